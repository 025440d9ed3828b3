/* Opening a Hugging Face checkpoint: config, index, headers of every shard, one naming for every name. */
#include "convert/source/hf.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "convert/model/kv_scales.h"
#include "convert/model/rule.h"
#include "convert/source/encoding.h"
#include "convert/source/index.h"
#include "convert/source/locate.h"
#include "formats/system/hub.h"
#include "formats/system/pool.h"

#define HEADER_THREADS 2 /* few: each may hold a header of 100 MB */

static char *join(mm_hf *hf, const char *name, mm_err *err) { return mm_arena_printf(&hf->arena, err, "%s/%s", hf->dir, name); }

/* Also of a link to nothing, which is not the same as no file. */
static bool exists(const char *path) {
  struct stat st;
  return lstat(path, &st) == 0;
}

bool mm_hf_inside(const mm_hf *hf, const char *path, mm_err *err) {
  char real[PATH_MAX], base[PATH_MAX], blobs[PATH_MAX];
  if (hf->outside_allowed || !realpath(path, real) || !realpath(hf->dir, base)) return true;
  size_t n = strlen(base);
  if (strncmp(real, base, n) == 0 && real[n] == '/') return true;
  if (realpath(mm_path_of(base, "../../blobs").text, blobs)) {
    n = strlen(blobs);
    if (strncmp(real, blobs, n) == 0 && real[n] == '/') return true;
  }
  return mm_fail(err, MM_BAD_INPUT, "E_FS_OUTSIDE", mm_at(path, NULL),
                 "found a link to %s, expected a file below the checkpoint or its Hub cache (--allow-outside-links)",
                 MM_ESCAPED(512, real));
}

static bool missing_shard(const mm_hf *hf, const mm_hf_file *f, mm_err *err) {
  static const char *const partial[] = {".incomplete", ".part"};
  for (size_t i = 0; i < 2; i++)
    if (exists(mm_path_of(hf->dir, MM_FORMATTED(NAME_MAX + sizeof ".incomplete", "%s%s", f->name, partial[i])).text))
      return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(f->path, NULL),
                     "found only %s%s, expected the file: its download seems unfinished", f->name, partial[i]);
  size_t missing = 0;
  for (size_t i = 0; i < hf->file_count; i++) missing += access(hf->file[i].path, F_OK) != 0;
  char rest[NAME_MAX + 64];
  return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(f->path, NULL), "%s; of %zu files that the index names, %zu are missing%s%s",
                 exists(f->path) ? "a symbolic link to nothing" : "no such file", hf->file_count, missing,
                 mm_hub_rest(hf->dir, rest, sizeof rest),
                 hf->dry_run && mm_hf_types_named(hf, MM_IGNORED) ? "; --names-only does with config.json and the index alone" : "");
}

/* Weights of other kinds, by the end of a file's name. */
static bool is_foreign(const char *dot) {
  static const char *const end[] = {".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz"};
  size_t i = 0;
  while (i < sizeof end / sizeof *end && strcmp(dot, end[i]) != 0) i++;
  return i < sizeof end / sizeof *end;
}

/* Neither an index nor the one file that needs none: says what weights lie there. */
static bool no_weights(const mm_hf *hf, const char *index, mm_err *err) {
  char first[NAME_MAX + 1] = "", foreign[NAME_MAX + 1] = "";
  size_t count = 0;
  bool shards = false, ok;
  DIR *d = opendir(hf->dir);
  if (!d) return mm_fail_errno(err, mm_at(hf->dir, NULL), "list", errno);
  const char *name;
  while ((ok = mm_dir_next(d, hf->dir, &name, err)) && name) {
    const char *dot = strrchr(name, '.');
    const bool shard = strstr(name, "-of-") != NULL;
    if (dot && is_foreign(dot) && (!*foreign || strcmp(name, foreign) < 0)) snprintf(foreign, sizeof foreign, "%s", name);
    if (!dot || strcmp(dot, ".safetensors") != 0 || (shards && !shard)) continue;
    if (shard && !shards) count = 0; /* other files do not count once there are shards */
    shards = shards || shard;
    if (count++ == 0 || strcmp(name, first) < 0) snprintf(first, sizeof first, "%s", name);
  }
  closedir(d);
  if (!ok) return false;
  if (count == 0)
    return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(index, NULL), "found %s, expected this index or " MM_SINGLE_NAME "%s",
                   *foreign ? MM_ESCAPED(4 * NAME_MAX, foreign) : "no weight file",
                   *foreign ? ": give the original checkpoint in safetensors" : "");
  return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(index, NULL),
                 "found no index and no " MM_SINGLE_NAME ", but %zu weight file%s, first %s: fetch the index, too", count,
                 count == 1 ? "" : "s", MM_ESCAPED(4 * NAME_MAX, first));
}

static int by_original(const void *key, const void *t) { return strcmp(key, ((const mm_hf_tensor *)t)->original); }

/* By its name in the index; `next` is tried first: a header's names are in the order of the index in long runs. */
static mm_hf_tensor *find_original(const mm_hf *hf, mm_hf_tensor *next, const char *name) {
  if (next < hf->tensor + hf->tensor_count && strcmp(next->original, name) == 0) return next;
  return bsearch(name, hf->tensor, hf->tensor_count, sizeof *next, by_original);
}

/* Reads the header of one file. Several files are read at the same time: each call writes only its own file's tensors. */
static bool read_header(void *ctx, size_t index, unsigned worker, mm_err *err) {
  (void)worker;
  mm_hf *hf = ctx;
  mm_hf_file *f = &hf->file[index];
  mm_st st = {0};
  if (!mm_hf_inside(hf, f->path, err)) return false;
  if (access(f->path, F_OK) != 0 && errno == ENOENT && !missing_shard(hf, f, err)) return false;
  bool ok = mm_st_open(&st, f->path, MM_BAD_INPUT, err);
  f->id = st.id;
  f->header = st.header;
  if (ok && !hf->index_text) { /* it is the only file */
    ok = st.count > 0 || mm_fail(err, MM_BAD_INPUT, "E_IDX", mm_at(f->path, NULL), "found no tensors, expected those of a model");
    hf->tensor = ok ? mm_calloc(st.count, sizeof *hf->tensor, err) : NULL;
    ok = ok && hf->tensor;
    for (size_t i = 0; ok && i < st.count; i++) {
      char *name = mm_arena_strndup(&hf->arena, st.tensor[i].name, strlen(st.tensor[i].name), err);
      ok = name != NULL;
      hf->tensor[i] = (mm_hf_tensor){.name = name, .original = name};
    }
    hf->tensor_count = ok ? st.count : 0;
  }
  mm_hf_tensor *t = NULL;
  for (size_t i = 0; ok && i < st.count; i++) {
    const mm_st_tensor *s = &st.tensor[i];
    t = find_original(hf, t ? t + 1 : hf->tensor, s->name);
    ok = mm_hf_listed(hf, t, (uint32_t)index, s, err);
    if (ok) mm_hf_take(t, s);
  }
  mm_st_close(&st);
  return ok;
}

static const mm_alias block[] = {{".mlp.", ".block_sparse_moe."}, {".experts.routed_experts.", ".experts."}, {NULL, NULL}};
/* Behind ".experts.{e}." */
static const mm_alias projection[] = {{"gate_proj.", "w1."}, {"up_proj.", "w3."}, {"down_proj.", "w2."}, {NULL, NULL}};
/* Behind ".experts.", and what follows them. */
static const mm_alias stack[] = {{"gate_up_proj", "w13_"}, {"down_proj", "w2_"}, {"w13", "w13_"}, {"w2", "w2_"}, {NULL, NULL}};
static const mm_alias stack_part[] = {{"", "weight"}, {"scale_inv", "weight_scale_inv"}, {"scales_inv", "weight_scale_inv"}, {NULL, NULL}};

/* The name with n bytes from `at` replaced. */
static char *respelt(mm_hf *hf, const char *name, const char *at, size_t n, const char *by, mm_err *err) {
  return mm_arena_printf(&hf->arena, err, "%.*s%s%s", (int)(at - name), name, by, at + n);
}

static const mm_alias *begins(const mm_alias *s, const char *text) {
  for (; s->theirs; s++)
    if (strncmp(text, s->theirs, strlen(s->theirs)) == 0) return s;
  return NULL;
}

/* "gate_up_proj", "gate_up_proj_scale_inv", "w13.qweight": a stack's part. */
static const char *stack_name(mm_hf *hf, const char *name, const char *rest, mm_err *err) {
  const mm_alias *s = begins(stack, rest);
  const char *part = s ? rest + strlen(s->theirs) : NULL;
  if (!s || !memchr("._", *part, 3)) return name;
  if (*part) part++;
  const char *canonical = part;
  for (const mm_alias *p = stack_part; p->theirs; p++)
    if (strcmp(part, p->theirs) == 0) canonical = p->canonical;
  return mm_arena_printf(&hf->arena, err, "%.*s%s%s", (int)(rest - name), name, s->canonical, canonical);
}

/* Whether ".mlp." is that of a dense layer, which stays. */
static bool dense_mlp(const char *at) {
  static const char *const part[] = {".mlp.gate_proj.", ".mlp.up_proj.", ".mlp.down_proj.", ".mlp.gate_up_proj."};
  for (size_t i = 0; i < sizeof part / sizeof *part; i++)
    if (strncmp(at, part[i], strlen(part[i])) == 0) return true;
  return false;
}

/* The family's own naming, and whether it has a place for the name. */
static const char *family_name(mm_hf *hf, const mm_arch *a, mm_hf_tensor *t, mm_err *err) {
  const char *name = t->original, *at;
  for (const mm_alias *s = a ? a->naming : NULL; name && s && s->theirs; s++) {
    at = s->theirs[0] == '.' ? strstr(name, s->theirs) : strncmp(name, s->theirs, strlen(s->theirs)) == 0 ? name : NULL;
    if (at) name = respelt(hf, name, at, strlen(s->theirs), s->canonical, err);
  }
  for (size_t i = 0; a && a->left_out && name && a->left_out[i]; i++)
    if (strncmp(name, a->left_out[i], strlen(a->left_out[i])) == 0) t->left_out = (uint8_t)(1 + i);
  return name;
}

/* One naming per name: the family's, the prefix of the MoE block, fused expert names, gate/up/down for w1/w3/w2. */
static bool canonical_name(mm_hf *hf, const mm_arch *a, mm_hf_tensor *t, mm_err *err) {
  const char *name = family_name(hf, a, t, err), *at;
  t->name = name;
  if (!name || t->left_out) return name;
  for (const mm_alias *s = block; name && s->theirs; s++)
    if ((at = strstr(name, s->theirs)) && !dense_mlp(at)) name = respelt(hf, name, at, strlen(s->theirs), s->canonical, err);
  at = name ? strstr(name, ".self_attn.") : NULL;
  const char *kv = at ? mm_kv_suffix_of(at + strlen(".self_attn.")) : NULL;
  if (kv) name = respelt(hf, name, at + strlen(".self_attn."), strlen(at + strlen(".self_attn.")), kv, err);
  at = name ? strstr(name, ".experts.") : NULL;
  if (at) {
    at += strlen(".experts.");
    size_t digits = strspn(at, "0123456789");
    const mm_alias *s = digits > 0 && at[digits] == '.' ? begins(projection, at + digits + 1) : NULL;
    if (s)
      name = respelt(hf, name, at + digits + 1, strlen(s->theirs), s->canonical, err);
    else
      name = stack_name(hf, name, at, err);
  }
  t->name = name;
  return name != NULL;
}

static bool canonical_names(mm_hf *hf, mm_err *err) {
  const mm_arch *arch = mm_arch_find(hf->config, hf->config_path, MM_IGNORED); /* of an unknown one: the naming of all */
  for (size_t i = 0; i < hf->tensor_count; i++)
    if (!canonical_name(hf, arch, &hf->tensor[i], err)) return false;
  const mm_hf_tensor *twice = mm_hf_sort(hf);
  return !twice || mm_fail(err, MM_BAD_INPUT, "E_DUP_TENSOR", mm_hf_at(hf, twice - 1), "found again as \"%s\" in %s, expected once",
                           MM_ESCAPED(256, twice->original), hf->file[twice->file].name);
}

static bool read_headers(mm_hf *hf, bool one_thread, mm_err *err) {
  if (!mm_pool_run(one_thread ? 1 : HEADER_THREADS, hf->file_count, read_header, hf, err)) return false;
  for (size_t i = 0; i < hf->tensor_count; i++) {
    const mm_hf_tensor *t = &hf->tensor[i];
    if (!t->found)
      return mm_fail(err, MM_BAD_INPUT, "E_IDX_TENSOR", mm_hf_at(hf, t), "found in the index, but not in this file, expected in both");
  }
  return true;
}

/* The text of config or index; noted, so that mm_hf_unchanged covers it. */
static char *read_text(mm_hf *hf, const char *path, uint64_t max, size_t *n, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  if (!mm_hf_inside(hf, path, err) || !mm_file_open(&f, path, err)) return NULL;
  hf->text[hf->text_count++] = (struct mm_hf_text){path, f.id};
  mm_file_close(&f);
  return mm_file_slurp(path, max, n, err);
}

static mm_json *read_json(mm_hf *hf, const char *path, mm_err *err) {
  size_t n = 0;
  char *text = read_text(hf, path, MM_CONFIG_MAX, &n, err);
  mm_json *j = text ? mm_json_parse(text, n, path, err) : NULL;
  free(text);
  return j;
}

/* GPTQModel reads quantize_config.json, engines read config.json: refuses a width, a group size or a format of zero points in which the two
 * differ. AutoAWQ has a file of its own, which says no format. */
static bool same_words(mm_hf *hf, const mm_json *described, mm_err *err) {
  mm_quantization own = hf->quantization;
  const bool awq = strcmp(own.method, "awq") == 0;
  const char *path = join(hf, awq ? "quant_config.json" : "quantize_config.json", err);
  if (!path) return false;
  if (!(own.gptq || awq) || !exists(path)) return true;
  mm_json *j = read_json(hf, path, MM_IGNORED);
  const bool same = mm_declared_same_words(described, j, path, err);
  if (awq || !same) return mm_json_free(j), same;
  hf->quantization = (mm_quantization){0};
  const bool read = j && mm_quantization_parse(hf, j, path, "gptq", MM_IGNORED), stated = read && !hf->quantization.less_assumed;
  const bool differs = read && hf->quantization.zero_less != own.zero_less && !own.less_assumed;
  if (stated && own.less_assumed) own.zero_less = hf->quantization.zero_less, own.less_assumed = false;
  hf->quantization = own;
  mm_json_free(j);
  return !differs || mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(path, NULL), "found format \"%s\", expected \"%s\" as %s says",
                             own.zero_less ? "gptq_v2" : "gptq", own.zero_less ? "gptq" : "gptq_v2", "config.json");
}

/* Files that describe a quantization where config.json does not, and the method that each stands for. */
static const struct {
  const char *file, *method;
} companion[] = {{"hf_quant_config.json", "modelopt"},
                 {"quantize_config.json", "gptq"},
                 {"quant_config.json", "awq"},
                 {"quant_model_description.json", "ModelSlim"}};

bool mm_hf_described(const mm_hf *hf) {
  static const char *const ending[] = {"qweight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2"};
  bool found = false;
  for (size_t i = 0; !found && i < hf->tensor_count; i++)
    for (size_t j = 0; j < sizeof ending / sizeof *ending; j++) found = found || mm_ends_with(hf->tensor[i].original, ending[j]);
  return (hf->quantization.method && (!hf->quantization.less_assumed || hf->quantization.symmetric)) || !found;
}

bool mm_hf_types_named(const mm_hf *hf, mm_err *err) {
  static const char *const ending[] = {".qweight", ".weight_packed", ".weight_scale", ".weight_scale_2", ".weight_scale_inv"};
  const bool blocks = hf->quantization.block.n > 0; /* the last ending is of block FP8 */
  for (size_t i = 0; i < hf->tensor_count; i++)
    for (size_t j = 0; j < sizeof ending / sizeof *ending - blocks; j++)
      if (mm_ends_with(hf->tensor[i].original, ending[j]))
        return mm_fail(err, MM_USAGE, "E_USAGE", mm_hf_at(hf, &hf->tensor[i]),
                       "found --names-only with a quantised weight whose types this file says, expected BF16 or block FP8 "
                       "(weight_scale_inv, with a weight_block_size)");
  return true;
}

const char *mm_hf_description(size_t i) { return i < sizeof companion / sizeof *companion ? companion[i].file : NULL; }

/* The quantization: in config.json (or its text model's part), or in a file of its own. */
static bool read_quantization(mm_hf *hf, mm_err *err) {
  static const char *const key[] = {"quantization_config", "compression_config"};
  const mm_json *from[] = {hf->config, mm_json_get(hf->config, "text_config")}, *first = NULL;
  for (size_t i = 0; i < 2; i++)
    if (!mm_declared_unrotated(hf->config_path, from[i], err)) return false;
  for (size_t i = 0; i < 4; i++) {
    const mm_json *q = mm_json_get(from[i / 2], key[i % 2]);
    if (mm_json_type_of(q) == MM_JSON_NULL) continue;
    if (first && !mm_json_same(first, q))
      return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(hf->config_path, NULL),
                     "found \"%s\"%s, which differs from what stands before it, expected one description of the quantization", key[i % 2],
                     i / 2 ? " in \"text_config\"" : "");
    if (!first) first = q;
  }
  const char *file = join(hf, companion[0].file, err);
  if (first)
    return file && mm_quantization_parse(hf, first, hf->config_path, NULL, err) && same_words(hf, first, err) &&
           mm_declared_agrees(first, file, err);
  if (mm_declared_mlx(mm_json_get(hf->config, "quantization")))
    return mm_quantization_parse(hf, mm_json_get(hf->config, "quantization"), hf->config_path, NULL, err);
  for (size_t i = 0; i < sizeof companion / sizeof *companion; i++) {
    const char *path = join(hf, companion[i].file, err);
    if (!path) return false;
    if (!exists(path)) continue;
    mm_json *j = read_json(hf, path, err);
    bool ok = j && mm_quantization_parse(hf, j, path, companion[i].method, err);
    mm_json_free(j);
    return ok;
  }
  return true;
}

static bool read_config(mm_hf *hf, mm_err *err) {
  const bool packed = mm_packed_is(hf->dir);
  mm_err reason = {0};
  hf->config = read_json(hf, hf->config_path, &reason);
  if (!hf->config) return packed ? mm_fail_damaged(err, &reason) : mm_fail_as(err, &reason);
  return packed || read_quantization(hf, err);
}

/* A config that no plan would come from is refused before headers are read. */
static bool check_model(const mm_hf *hf, mm_err *err) {
  mm_model model = {0};
  const mm_arch *arch = mm_arch_find(hf->config, hf->config_path, err);
  return arch && arch->read_config(hf->config, hf->config_path, &model, err);
}

static bool has(const void *hf, const char *name) { return mm_hf_find(hf, name) != NULL; }

static bool open_packed(mm_hf *hf, const mm_hf_options *o, mm_err *err) {
  if (o->names_only)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(hf->dir, NULL), "found --names-only with a packed checkpoint, expected all its files");
  return mm_packed_open(hf, err);
}

static bool read_index(mm_hf *hf, const char *path, mm_err *err) {
  size_t n = 0;
  hf->index_text = read_text(hf, path, MM_INDEX_MAX, &n, err);
  return hf->index_text && mm_index_parse(hf, path, hf->index_text, n, err);
}

bool mm_hf_open(mm_hf *hf, const char *dir, const mm_hf_options *o, mm_err *err) {
  *hf = (mm_hf){.kind = &mm_source_files,
                .names_only = o->names_only,
                .outside_allowed = o->allow_outside_links,
                .nonfinite_allowed = o->allow_nonfinite,
                .dry_run = o->dry_run};
  hf->dir = mm_source_locate(dir, &hf->arena, err);
  if (!hf->dir) return false;
  char *index = join(hf, MM_INDEX_NAME, err), *single = join(hf, MM_SINGLE_NAME, err);
  hf->config_path = join(hf, "config.json", err);
  if (!index || !single || !hf->config_path) return false;
  if (!read_config(hf, err)) return false;
  if (mm_packed_is(hf->dir)) return open_packed(hf, o, err) && (!o->for_plan || check_model(hf, err)); /* which is proven by then */
  bool indexed = exists(index);
  if (!indexed && !o->names_only && !exists(single)) return no_weights(hf, index, err);
  if (indexed) {
    if (!read_index(hf, index, err)) return false;
  } else {
    hf->file = mm_calloc(1, sizeof *hf->file, err);
    if (!hf->file) return false;
    *hf->file = (mm_hf_file){.name = MM_SINGLE_NAME};
    hf->file_count = 1;
  }
  bool names_single = false;
  for (size_t i = 0; i < hf->file_count; i++) {
    hf->file[i].path = join(hf, hf->file[i].name, err);
    if (!hf->file[i].path) return false;
    names_single = names_single || strcmp(hf->file[i].name, MM_SINGLE_NAME) == 0;
  }
  if (indexed && !names_single && exists(single))
    return mm_fail(err, MM_BAD_INPUT, "E_AMBIGUOUS", mm_at(hf->dir, NULL),
                   "found both %s and %s, which the index does not name: remove one", MM_INDEX_NAME, MM_SINGLE_NAME);
  if (o->names_only && !indexed)
    return mm_fail(err, MM_BAD_INPUT, "E_IDX", mm_at(index, NULL), "found no index, expected one for --names-only");
  if (o->for_plan && !check_model(hf, err)) return false;
  if (!(o->names_only || read_headers(hf, o->one_thread, err)) || !canonical_names(hf, err)) return false;
  mm_quantization_block(hf);
  return !o->for_plan ||
         mm_arch_attn_fits(mm_arch_find(hf->config, hf->config_path, err), (mm_config){hf->config, hf->config_path}, has, hf, err);
}
