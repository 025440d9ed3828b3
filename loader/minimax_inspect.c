/* minimax-inspect: lists a checkpoint (source or packed) or one safetensors file, and compares two. Headers only, unless --data asks for
 * the bytes. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "convert/decode/companion_names.h"
#include "convert/source/hf.h"
#include "formats/option.h"
#include "formats/safetensors.h"
#include "formats/system/file.h"
#include "loader/shards.h"

typedef struct mm_inspect_args {
  const char *dir[1];
  const char *diff, *match;
  uint64_t rank; /* UINT64_MAX: all */
  bool json, data, summary, names_only, quiet;
} mm_inspect_args;

/* One line of a listing: a tensor of the source, or a packed tensor with all its planes. */
typedef struct mm_inspect_row {
  const char *name;
  char type[64]; /* dtype, or scheme with its scale grid */
  char shape[64];
  mm_shape dims;
  uint64_t bytes;   /* of the source, or on one rank */
  const char *file; /* that holds it; NULL where parts do */
  size_t index;     /* into hf.tensor, the manifest's tensors or st.tensor */
} mm_inspect_row;

static const char *const kind_word[] = {"source", "packed", "file"};
static const char *const kind_phrase[] = {"a source", "a packed checkpoint", "one file"};

typedef struct mm_listing {
  enum { SOURCE, PACKED, ONE_FILE } kind;
  mm_hf hf;         /* SOURCE */
  mm_shards shards; /* PACKED */
  mm_st st;         /* ONE_FILE */
  size_t count;
  mm_inspect_row *item; /* sorted by name */
} mm_listing;

/* With names only, a tensor's type and shape are not known. */
static void list_source(mm_listing *l) {
  for (size_t i = 0; i < l->count; i++) {
    const mm_hf_tensor *t = &l->hf.tensor[i];
    mm_inspect_row *x = &l->item[i];
    *x = (mm_inspect_row){.name = t->original, .type = "-", .shape = "-", .file = l->hf.file[t->file].name, .index = i};
    if (l->hf.names_only) continue;
    snprintf(x->type, sizeof x->type, "%s", mm_dtype_name(t->dtype));
    x->dims = t->shape;
    mm_shape_text(&t->shape, x->shape, sizeof x->shape);
    x->bytes = t->bytes;
  }
}

static void list_file(mm_listing *l) {
  for (size_t i = 0; i < l->count; i++) {
    const mm_st_tensor *t = &l->st.tensor[i];
    mm_inspect_row *x = &l->item[i];
    *x = (mm_inspect_row){.name = t->name, .dims = t->shape, .bytes = t->bytes, .index = i};
    snprintf(x->type, sizeof x->type, "%s", mm_dtype_name(t->dtype));
    mm_shape_text(&t->shape, x->shape, sizeof x->shape);
  }
}

static void list_packed(mm_listing *l) {
  for (size_t i = 0; i < l->count; i++) {
    const mm_pack_tensor *t = &l->shards.pack.tensor[i];
    mm_inspect_row *x = &l->item[i];
    x->name = t->name;
    int n = snprintf(x->type, sizeof x->type, "%s", t->scheme);
    for (unsigned p = 1; p < t->plane_count && n > 0 && (size_t)n < sizeof x->type; p++)
      n += snprintf(x->type + n, sizeof x->type - (size_t)n, " %ux%u", t->plane[p].cell_n, t->plane[p].cell_k);
    x->dims = t->vector ? mm_shape1(t->rows) : t->lead ? mm_shape3(t->lead, t->rows, t->cols) : mm_shape2(t->rows, t->cols);
    mm_shape_text(&x->dims, x->shape, sizeof x->shape);
    for (unsigned p = 0; p < t->plane_count; p++) {
      mm_shape plane = mm_pack_plane_shape(t, p);
      uint64_t bytes = 0;
      if (mm_shape_bytes(&plane, t->plane[p].dtype, &bytes)) x->bytes += bytes; /* the manifest's reader has refused overflow */
    }
    x->index = i;
  }
}

/* A checkpoint that is packed, or its manifest; a source; or one safetensors file. */
static bool open_kind(mm_listing *l, const mm_inspect_args *a, const char *path, mm_err *err) {
  struct stat st;
  const mm_path manifest = mm_path_of(path, MM_MANIFEST);
  if (stat(path, &st) == 0 && !S_ISDIR(st.st_mode)) {
    l->kind = ONE_FILE;
    return mm_st_open(&l->st, path, MM_BAD_INPUT, err);
  }
  l->kind = access(manifest.text, F_OK) == 0 ? PACKED : SOURCE;
  const uint32_t rank = (uint32_t)a->rank;
  const mm_hf_options o = {.allow_outside_links = true, .names_only = a->names_only, .dry_run = true};
  mm_dir d = l->kind == SOURCE ? mm_dir_open(path) : (mm_dir){-1};
  if (l->kind == SOURCE) return mm_dir_close(&d, path, mm_hf_open(&l->hf, path, &o, err), err);
  return a->rank == UINT64_MAX ? mm_shards_open(&l->shards, path, err) : mm_shards_open_ranks(&l->shards, path, &rank, 1, err);
}

static bool open_listing(mm_listing *l, const mm_inspect_args *a, const char *path, mm_err *err) {
  if (!open_kind(l, a, path, err)) return false;
  if (a->rank != UINT64_MAX && l->kind != PACKED)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(path, NULL), "found --rank with %s, expected a packed checkpoint", kind_phrase[l->kind]);
  if (a->names_only && l->kind != SOURCE)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(path, NULL), "found --names-only with %s, expected a source", kind_phrase[l->kind]);
  l->count = l->kind == PACKED ? l->shards.pack.tensor_count : l->kind == SOURCE ? l->hf.tensor_count : l->st.count;
  l->item = mm_calloc(l->count, sizeof *l->item, err);
  if (!l->item) return false;
  if (l->kind == PACKED)
    list_packed(l);
  else if (l->kind == SOURCE)
    list_source(l);
  else
    list_file(l);
  return true;
}

static void close_listing(mm_listing *l) {
  free(l->item);
  mm_shards_close(&l->shards);
  mm_hf_close(&l->hf);
  mm_st_close(&l->st);
}

/* True if the tensor is listed: its name matches --match and, under --rank, a packed tensor is of the rank's stage. */
static bool wanted(const mm_inspect_args *a, const mm_listing *l, const mm_inspect_row *x) {
  if (a->rank != UINT64_MAX && !mm_pack_holds(&l->shards.pack, &l->shards.pack.tensor[x->index], (uint32_t)a->rank)) return false;
  return !a->match || strstr(x->name, a->match);
}

/* Tensors and bytes of what is listed; --match does not count. */
static size_t total(const mm_inspect_args *a, const mm_listing *l, uint64_t *bytes) {
  const mm_inspect_args all = {.rank = a->rank};
  size_t n = 0;
  *bytes = 0;
  for (size_t i = 0; i < l->count; i++)
    if (wanted(&all, l, &l->item[i])) n++, *bytes += l->item[i].bytes;
  return n;
}

static bool rank_wanted(const mm_inspect_args *a, uint32_t r) { return a->rank == UINT64_MAX || a->rank == r; }

static void print_packed(const mm_inspect_args *a, const mm_pack *p, size_t count, uint64_t bytes) {
  fputs(": packed by ", stdout);
  mm_show_to(stdout, p->tool);
  fputs(", ", stdout);
  mm_show_to(stdout, p->model.architecture);
  printf(", --tp %u --ep %u --pp %u ", p->tp, p->ep, p->pp);
  if (p->attn_tp) printf("--attn-tp %u ", p->attn_tp);
  fputs("--quant \"", stdout);
  mm_show_to(stdout, p->quant);
  fputs("\" --tp-align ", stdout);
  printf("%s%s", mm_align_word(p->tp_align), mm_pack_placed(p) ? " --place" : "");
  printf(", %zu tensors, %" PRIu64 " bytes a rank\n", count, bytes);
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++)
    for (size_t i = 0; rank_wanted(a, r) && i < p->rank[r].part_count; i++)
      printf("  %s  %" PRIu64 " bytes\n", p->rank[r].part[i].file, p->rank[r].part[i].size);
}

static void print_summary(const mm_inspect_args *a, const mm_listing *l) {
  uint64_t bytes;
  size_t count = total(a, l, &bytes);
  mm_show_to(stdout, a->dir[0]);
  if (l->kind == PACKED) {
    print_packed(a, &l->shards.pack, count, bytes);
  } else if (l->kind == SOURCE && l->hf.names_only) {
    printf(": source, %zu tensors in %zu files, by the index alone\n", count, l->hf.file_count);
  } else if (l->kind == SOURCE) {
    printf(": source, %zu tensors in %zu files, %" PRIu64 " bytes\n", count, l->hf.file_count, bytes);
  } else {
    printf(": safetensors, %zu tensors, %" PRIu64 " bytes\n", count, bytes);
    for (size_t i = 0; i < l->st.metadata_count; i++) {
      char key[256], value[1024];
      printf("  %s: %s\n", mm_show(key, sizeof key, l->st.metadata[i].key), mm_show(value, sizeof value, l->st.metadata[i].value));
    }
  }
}

/* ---- placed experts ---- */

/* The ranks [*from, *end) of a group hold the experts of a placed stack from index *first on; false where none of them is listed. */
static bool group_of(const mm_inspect_args *a, const mm_pack *p, const mm_pack_tensor *t, uint32_t group, uint32_t *from, uint32_t *end,
                     uint32_t *first) {
  const uint32_t each = p->tp / p->ep;
  *from = t->stage * p->tp + group * each;
  *end = *from + each;
  *first = mm_pack_first_lead(p, t, *from);
  if (a->rank == UINT64_MAX) return true;
  if (a->rank < *from || a->rank >= *end) return false;
  *from = (uint32_t)a->rank;
  *end = *from + 1;
  return true;
}

/* "    ranks 0-1: experts 0,3-5,7" */
static void print_placed(const mm_inspect_args *a, const mm_pack *p, const mm_pack_tensor *t) {
  for (uint32_t g = 0, from, end, first; t->order.expert && g < p->ep; g++) {
    if (!group_of(a, p, t, g, &from, &end, &first)) continue;
    printf(end - from > 1 ? "    ranks %u-%u: experts" : "    rank %u: experts", from, end - 1);
    const uint32_t *e = t->order.expert + first;
    for (uint32_t i = 0, next; i < t->lead; i = next) {
      for (next = i + 1; next < t->lead && e[next] == e[next - 1] + 1;) next++;
      printf(next - i > 1 ? "%c%u-%u" : "%c%u", i == 0 ? ' ' : ',', e[i], e[next - 1]);
    }
    puts("");
  }
}

static void put_placed(mm_json *o, const mm_inspect_args *a, const mm_pack *p, const mm_pack_tensor *t) {
  mm_json *list = t->order.expert ? mm_json_put_list(o, "experts") : NULL;
  for (uint32_t g = 0, from, end, first; list && g < p->ep; g++) {
    if (!group_of(a, p, t, g, &from, &end, &first)) continue;
    mm_json *one = mm_json_append(list, mm_json_new_obj());
    mm_json *ranks = mm_json_put_list(one, "ranks"), *held = mm_json_put_list(one, "experts");
    for (uint32_t r = from; r < end; r++) mm_json_append(ranks, mm_json_new_int(r));
    for (uint32_t i = 0; i < t->lead; i++) mm_json_append(held, mm_json_new_int(t->order.expert[first + i]));
  }
}

/* ---- JSON ---- */

static mm_json *shape_json(const mm_shape *s) {
  mm_json *list = mm_json_new_arr();
  for (unsigned i = 0; i < s->rank; i++) mm_json_append(list, mm_json_new_u64(s->dim[i]));
  return list;
}

static mm_json *tensor_json(const mm_inspect_args *a, const mm_listing *l, const mm_inspect_row *x) {
  mm_json *o = MM_JSON_NEW({"name", mm_json_new_str(x->name)});
  if (l->kind == SOURCE && l->hf.names_only) return MM_JSON_PUT(o, {"file", mm_json_new_path(x->file)});
  MM_JSON_PUT(o, {"type", mm_json_new_str(x->type)}, {"shape", shape_json(&x->dims)}, {"bytes", mm_json_new_u64(x->bytes)});
  if (x->file) mm_json_set(o, "file", mm_json_new_path(x->file));
  if (l->kind == ONE_FILE) mm_json_put_int(o, "offset", l->st.tensor[x->index].offset);
  if (l->kind != PACKED) return o;
  const mm_pack_tensor *t = &l->shards.pack.tensor[x->index];
  MM_JSON_PUT(o, {"scheme", mm_json_new_str(t->scheme)}, {"stage", mm_json_new_int(t->stage)});
  mm_json *planes = mm_json_put_list(o, "planes"); /* codes, then scales */
  for (unsigned p = 0; p < t->plane_count; p++) {
    const mm_shape shape = mm_pack_plane_shape(t, p), cell = mm_shape2(t->plane[p].cell_n, t->plane[p].cell_k);
    mm_json_append(
        planes, MM_JSON_NEW({"suffix", mm_json_new_str(t->plane[p].suffix)}, {"dtype", mm_json_new_str(mm_dtype_name(t->plane[p].dtype))},
                            {"shape", shape_json(&shape)}, {"cell", shape_json(&cell)}));
  }
  put_placed(o, a, &l->shards.pack, t);
  return o;
}

/* d: its digest under `key`, or NULL. */
static void add_file(mm_json *list, const char *name, uint64_t size, const char *key, const mm_digest *d) {
  mm_json *o = mm_json_append(list, MM_JSON_NEW({"file", mm_json_new_path(name)}, {"size", mm_json_new_u64(size)}));
  if (key) mm_json_set(o, key, mm_json_new_digest(d));
}

/* The parts of each rank with their digests, and the companions. */
static void put_packed(mm_json *o, const mm_inspect_args *a, const mm_pack *p) {
  MM_JSON_PUT(o, {"tool", mm_json_new_str(p->tool)}, {"architecture", mm_json_new_str(p->model.architecture)},
              {"tp", mm_json_new_int(p->tp)}, {"ep", mm_json_new_int(p->ep)}, {"pp", mm_json_new_int(p->pp)},
              {"quant", mm_json_new_str(p->quant)}, {"tp_align", mm_json_new_str(mm_align_word(p->tp_align))},
              {"plan", mm_json_new_digest(&p->plan)});
  if (p->attn_tp) mm_json_put_int(o, "attn_tp", p->attn_tp);
  mm_json *ranks = mm_json_put_list(o, "ranks"), *companions = mm_json_put_list(o, "companions");
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++) {
    if (!rank_wanted(a, r)) continue;
    mm_json *parts = mm_json_set(mm_json_append(ranks, MM_JSON_NEW({"rank", mm_json_new_int(r)})), "parts", mm_json_new_arr());
    for (size_t i = 0; i < p->rank[r].part_count; i++)
      add_file(parts, p->rank[r].part[i].file, p->rank[r].part[i].size, "sha256_tree", &p->rank[r].part[i].root);
  }
  for (size_t i = 0; i < p->file_count; i++) add_file(companions, p->file[i].name, p->file[i].size, "sha256", &p->file[i].sha256);
}

static void put_source(mm_json *o, const mm_hf *hf) {
  const mm_json *name = mm_json_at(mm_json_get(hf->config, "architectures"), 0);
  if (mm_json_type_of(name) == MM_JSON_STR) mm_json_put_text(o, "architecture", mm_json_str(name));
  mm_json *list = mm_json_put_list(o, "files");
  for (size_t i = 0; i < hf->file_count; i++)
    add_file(list, hf->file[i].name, hf->file[i].id.size, hf->names_only ? NULL : "header_sha256", &hf->file[i].header);
}

static void put_file(mm_json *o, const mm_st *st) {
  MM_JSON_PUT(o, {"size", mm_json_new_u64(st->id.size)}, {"header_sha256", mm_json_new_digest(&st->header)});
  mm_json *meta = mm_json_set(o, "metadata", mm_json_new_obj());
  for (size_t i = 0; i < st->metadata_count; i++) mm_json_put_text(meta, st->metadata[i].key, st->metadata[i].value);
}

static bool print_json(const mm_inspect_args *a, const mm_listing *l, mm_err *err) {
  uint64_t bytes;
  size_t count = total(a, l, &bytes);
  mm_json *o = MM_JSON_NEW({"kind", mm_json_new_str(kind_word[l->kind])}, {"path", mm_json_new_path(a->dir[0])},
                           {"tensor_count", mm_json_new_u64(count)}, {"bytes", mm_json_new_u64(bytes)});
  if (l->kind == PACKED) put_packed(o, a, &l->shards.pack);
  if (l->kind == SOURCE) put_source(o, &l->hf);
  if (l->kind == ONE_FILE) put_file(o, &l->st);
  mm_json *list = a->summary ? NULL : mm_json_put_list(o, "tensors");
  for (size_t i = 0; list && i < l->count; i++)
    if (wanted(a, l, &l->item[i])) mm_json_append(list, tensor_json(a, l, &l->item[i]));
  return mm_program_json(o, true, err);
}

static bool print_listing(const mm_inspect_args *a, const mm_listing *l, mm_err *err) {
  if (a->json) return print_json(a, l, err);
  print_summary(a, l);
  for (size_t i = 0; !a->summary && i < l->count; i++) {
    const mm_inspect_row *x = &l->item[i];
    char name[256];
    if (!wanted(a, l, x)) continue;
    printf("  %-68s %-20s %-20s %12" PRIu64 "\n", mm_show(name, sizeof name, x->name), x->type, x->shape, x->bytes);
    if (l->kind == PACKED) print_placed(a, &l->shards.pack, &l->shards.pack.tensor[x->index]);
  }
  return true;
}

/* How two tensors with equal type and shape differ in what is stored of them; NULL if they do not, on every rank of either directory. */
static const char *packed_difference(const mm_listing *a, const mm_inspect_row *x, const mm_listing *b, const mm_inspect_row *y) {
  const mm_pack *p = &a->shards.pack, *q = &b->shards.pack;
  if (p->tp != q->tp || p->ep != q->ep || p->pp != q->pp || p->attn_tp != q->attn_tp ||
      p->tensor[x->index].stage != q->tensor[y->index].stage)
    return "bytes";
  const mm_expert_order *m = &p->tensor[x->index].order, *n = &q->tensor[y->index].order;
  if (!m->expert != !n->expert || (m->expert && memcmp(m->expert, n->expert, p->model.experts * sizeof *m->expert) != 0)) return "experts";
  uint32_t first = p->tensor[x->index].stage * p->tp;
  for (uint32_t r = first; r < first + p->tp; r++) {
    const mm_shard_rank *s = &a->shards.rank[r], *t = &b->shards.rank[r];
    if (!s->plane != !t->plane) return "ranks";
    for (unsigned i = 0; s->plane && t->plane && i < p->tensor[x->index].plane_count; i++) {
      const mm_shard_plane *u = &s->plane[x->index * MM_PACK_PLANES + i], *v = &t->plane[y->index * MM_PACK_PLANES + i];
      if (u->bytes != v->bytes || memcmp(s->map[u->part].data + u->offset, t->map[v->part].data + v->offset, u->bytes) != 0) return "bytes";
    }
  }
  if (!mm_pack_same_steps(&p->tensor[x->index], &q->tensor[y->index])) return "global_steps";
  return p->tensor[x->index].input_scale != q->tensor[y->index].input_scale ? "input_scale" : NULL;
}

/* The ranks whose files lie in one of the directories. */
static uint32_t ranks_open(const mm_listing *a, const mm_listing *b) {
  uint32_t n = 0;
  for (uint32_t r = 0; r < mm_pack_ranks(&a->shards.pack); r++)
    n += a->shards.rank[r].plane || (r < mm_pack_ranks(&b->shards.pack) && b->shards.rank[r].plane);
  return n;
}

static bool same_source(const mm_listing *a, const mm_inspect_row *x, const mm_listing *b, const mm_inspect_row *y, bool *same,
                        mm_err *err) {
  enum { CHUNK = 1 << 20 };
  mm_hf_reader ra, rb;
  mm_hf_reader_open(&ra, &a->hf);
  mm_hf_reader_open(&rb, &b->hf);
  uint8_t *buf = mm_calloc(2, CHUNK, err);
  bool ok = buf != NULL;
  for (uint64_t at = 0; ok && *same && at < x->bytes; at += CHUNK) {
    size_t n = (size_t)mm_min(CHUNK, x->bytes - at);
    ok = mm_hf_read(&ra, &a->hf.tensor[x->index], at, buf, n, err) && mm_hf_read(&rb, &b->hf.tensor[y->index], at, buf + CHUNK, n, err);
    *same = ok && memcmp(buf, buf + CHUNK, n) == 0;
  }
  free(buf);
  mm_hf_reader_close(&ra);
  mm_hf_reader_close(&rb);
  return ok;
}

/* The differences that are found: lines on stdout, or with --json a list. */
typedef struct mm_differences {
  size_t count, files, same_files; /* tensors; companions that differ, and that do not */
  mm_json *list;                   /* NULL: lines */
} mm_differences;

static void put_form(mm_json *o, const char *key, const mm_inspect_row *x) {
  if (x) mm_json_set(o, key, MM_JSON_NEW({"type", mm_json_new_str(x->type)}, {"shape", shape_json(&x->dims)}));
}

/* x or y is NULL where only the other checkpoint has the tensor. */
static void put_difference(mm_differences *d, const mm_inspect_row *x, const mm_inspect_row *y, const char *what) {
  const mm_inspect_row *one = x ? x : y;
  char name[512];
  d->count++;
  if (d->list) {
    mm_json *o = mm_json_append(d->list, MM_JSON_NEW({"name", mm_json_new_str(one->name)}, {"what", mm_json_new_str(what)}));
    put_form(o, "first", x);
    put_form(o, "second", y);
    return;
  }
  mm_show(name, sizeof name, one->name);
  if (x && y)
    printf("~ %s: %s %s, %s %s%s\n", name, x->type, x->shape, y->type, y->shape,
           strcmp(what, "bytes") == 0          ? ", other bytes"
           : strcmp(what, "input_scale") == 0  ? ", another input_scale"
           : strcmp(what, "global_steps") == 0 ? ", other global_steps"
           : strcmp(what, "ranks") == 0        ? ", on other ranks"
           : strcmp(what, "experts") == 0      ? ", other experts on some ranks"
                                               : "");
  else
    printf("%c %s: %s %s\n", x ? '-' : '+', name, one->type, one->shape);
}

static bool diff_pair(const mm_inspect_args *args, const mm_listing *a, const mm_inspect_row *x, const mm_listing *b,
                      const mm_inspect_row *y, mm_differences *d, mm_err *err) {
  const char *what = strcmp(x->type, y->type) == 0 && strcmp(x->shape, y->shape) == 0 ? NULL : "form";
  if (!what && args->data) {
    bool same = true;
    if (a->kind == PACKED)
      what = packed_difference(a, x, b, y);
    else if (!same_source(a, x, b, y, &same, err))
      return false;
    if (!same) what = "bytes";
  }
  if (what) put_difference(d, x, y, what);
  return true;
}

/* ---- companions: configuration, tokenizer, code ---- */

static void put_file_difference(mm_differences *d, const char *name, char sign) {
  char shown[512];
  d->files++;
  if (d->list)
    mm_json_append(d->list, MM_JSON_NEW({"name", mm_json_new_str(name)}, {"what", mm_json_new_str(sign == '~'   ? "file"
                                                                                                  : sign == '-' ? "file removed"
                                                                                                                : "file added")}));
  else
    printf("%c file %s%s\n", sign, mm_show(shown, sizeof shown, name), sign == '~' ? ": other bytes" : "");
}

/* The file's bytes, *there false if it is absent. free() them. */
static char *read_companion(const char *dir, const char *name, size_t *n, bool *there, mm_err *err) {
  const mm_path path = mm_path_of(dir, name);
  *there = faccessat(AT_FDCWD, path.text, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
  return *there ? mm_file_slurp(path.text, MM_COMPANION_MAX, n, err) : NULL;
}

static bool diff_companion(const char *dir, const char *other, const char *name, mm_differences *d, mm_err *err) {
  size_t n = 0, m = 0;
  bool here, there;
  char *a = read_companion(dir, name, &n, &here, err), *b = read_companion(other, name, &m, &there, err);
  const bool ok = !here == !a && !there == !b;
  if (ok && here && there && n == m && memcmp(a, b, n) == 0)
    d->same_files++;
  else if (ok && (here || there))
    put_file_difference(d, name, here && there ? '~' : here ? '-' : '+');
  MM_FREE(a, b);
  return ok;
}

static const char *dir_of(const mm_listing *l) { return l->kind == PACKED ? l->shards.pack.dir : l->hf.dir; }

static bool diff_packed_companions(const mm_listing *a, const mm_listing *b, mm_differences *d, mm_err *err) {
  const mm_pack *p = &a->shards.pack, *q = &b->shards.pack;
  bool ok = true;
  for (size_t i = 0; ok && i < p->file_count; i++) ok = diff_companion(p->dir, q->dir, p->file[i].name, d, err);
  for (size_t i = 0; ok && i < q->file_count; i++)
    ok = mm_pack_find_file(p, q->file[i].name) || diff_companion(p->dir, q->dir, q->file[i].name, d, err);
  return ok;
}

static bool diff_source_companions(const mm_listing *a, const mm_listing *b, mm_differences *d, mm_err *err) {
  const char *code[2][MM_COMPANION_CODE];
  size_t count[2] = {0};
  mm_arena names = {0};
  bool ok = mm_companions_code(&a->hf, &names, code[0], &count[0], err) && mm_companions_code(&b->hf, &names, code[1], &count[1], err);
  for (size_t i = 0; ok && i < MM_COMPANION_NAMES; i++) ok = diff_companion(dir_of(a), dir_of(b), mm_companion_name[i], d, err);
  for (size_t i = 0, j = 0; ok && (i < count[0] || j < count[1]);) { /* both in order */
    const int c = i == count[0] ? 1 : j == count[1] ? -1 : strcmp(code[0][i], code[1][j]);
    ok = diff_companion(dir_of(a), dir_of(b), c <= 0 ? code[0][i] : code[1][j], d, err);
    i += c <= 0;
    j += c >= 0;
  }
  mm_arena_close(&names);
  return ok;
}

/* Prints the result of a finished comparison. */
static bool print_diff(const mm_inspect_args *args, const mm_listing *a, const mm_listing *b, mm_differences *d, mm_err *err) {
  const bool packed = args->data && a->kind == PACKED;
  const uint32_t all = packed ? mm_pack_ranks(&a->shards.pack) : 0, open = packed ? ranks_open(a, b) : 0;
  if (!d->list) {
    if (d->count + d->files > 0) return true;
    printf("same: %zu tensors", a->count);
    if (args->data) printf(" and %zu files", d->same_files);
    printf("%s", args->data ? ", every byte" : " (names, types, shapes)");
    if (open < all) printf(" of the %u of %u ranks that are here", open, all);
    puts("");
    return true;
  }
  mm_json *o = MM_JSON_NEW({"same", mm_json_new_bool(d->count + d->files == 0)}, {"tensor_count", mm_json_new_u64(a->count)},
                           {"data", mm_json_new_bool(args->data)});
  if (open < all) MM_JSON_PUT(o, {"ranks", mm_json_new_int(all)}, {"ranks_compared", mm_json_new_int(open)});
  mm_json_set(o, "differences", d->list);
  d->list = NULL; /* taken */
  return mm_program_json(o, true, err);
}

static bool diff(const mm_inspect_args *args, const mm_listing *a, const mm_listing *b, mm_err *err) {
  if (args->data && (a->kind != b->kind || a->kind == ONE_FILE || args->names_only))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(args->diff, NULL),
                   "found %s and %s; --data compares two packed checkpoints or two sources, with their weights", kind_phrase[a->kind],
                   kind_phrase[b->kind]);
  if (args->data && a->kind == PACKED && ranks_open(a, b) == 0 && ranks_open(b, a) == 0)
    return mm_fail(err, MM_INTEGRITY, "E_RANKS", mm_at(args->diff, NULL),
                   "found no part of any rank, nor in %s: there are no bytes to compare", args->dir[0]);
  qsort(a->item, a->count, sizeof *a->item, mm_by_text);
  qsort(b->item, b->count, sizeof *b->item, mm_by_text);
  size_t i = 0, j = 0;
  mm_differences d = {.list = args->json ? mm_json_new_arr() : NULL};
  bool ok = !args->json || d.list || mm_fail_memory(err, 0);
  while (ok && (i < a->count || j < b->count)) {
    int c = i == a->count ? 1 : j == b->count ? -1 : strcmp(a->item[i].name, b->item[j].name);
    const mm_inspect_row *x = c <= 0 ? &a->item[i++] : NULL, *y = c >= 0 ? &b->item[j++] : NULL;
    if (x && y)
      ok = diff_pair(args, a, x, b, y, &d, err);
    else
      put_difference(&d, x, y, x ? "removed" : "added");
  }
  if (args->data) ok = ok && (a->kind == PACKED ? diff_packed_companions : diff_source_companions)(a, b, &d, err);
  ok = ok && print_diff(args, a, b, &d, err);
  mm_json_free(d.list);
  if (!ok || d.count + d.files == 0) return ok;
  if (d.files > 0)
    return mm_program_written(err) && mm_fail(err, MM_INTEGRITY, "E_DIFFER", mm_at(args->diff, NULL),
                                              "found %zu tensors and %zu files that differ from %s", d.count, d.files, args->dir[0]);
  return mm_program_written(err) &&
         mm_fail(err, MM_INTEGRITY, "E_DIFFER", mm_at(args->diff, NULL), "found %zu tensors that differ from %s", d.count, args->dir[0]);
}

static bool inspect(void *args, mm_err *err) {
  const mm_inspect_args *a = args;
  mm_listing l = {0}, other = {0};
  const char *wrong = a->data && !a->diff                   ? "found --data without --diff DIR2"
                      : a->diff && (a->match || a->summary) ? "found --match or --summary with --diff, which compares all"
                                                            : NULL;
  if (wrong) return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "%s", wrong);
  mm_dir d = a->diff ? mm_dir_open(a->diff) : (mm_dir){-1};
  bool ok = open_listing(&l, a, a->dir[0], err) && (!a->diff || open_listing(&other, a, a->diff, err));
  ok = mm_dir_close(&d, a->diff, ok && (a->diff ? diff(a, &l, &other, err) : print_listing(a, &l, err)), err);
  close_listing(&l);
  close_listing(&other);
  return ok;
}

int main(int argc, char **argv) {
  mm_inspect_args a = {.rank = UINT64_MAX};
  const mm_option options[] = {
      MM_OPTION(STR, "diff", &a.diff, "DIR2", "compare with another checkpoint; status 6 when they differ"),
      MM_FLAG("data", &a.data, "with --diff: compare the bytes too, also of configuration, tokenizer and code"),
      MM_OPTION(U64, "rank", &a.rank, "N", "of a packed checkpoint: only this rank's files, which alone need be there", .hi = UINT32_MAX),
      MM_FLAG("names-only", &a.names_only, "of a source: from config.json and the index alone, without weight files"),
      MM_OPTION(STR, "match", &a.match, "TEXT", "only tensors whose name holds TEXT"),
      MM_FLAG("summary", &a.summary, "only the first lines: kind, counts, files"),
      MM_FLAG("json", &a.json, "the listing, with files and digests, or an error as JSON"),
      MM_FLAG("quiet", &a.quiet, "nothing on stderr but errors, as always here", .letter = 'q'),
  };
  const mm_program program = {
      MM_PROGRAM("minimax-inspect", "list a source, a packed checkpoint or one safetensors file, or compare two", "DIR|FILE", 1, 1,
                 options),
      .examples =
          "minimax-inspect M2-nvfp4 --summary\n"
          "minimax-inspect M2-nvfp4 --match layers.0.\n"
          "minimax-inspect M2-nvfp4 --diff other/M2-nvfp4 --data",
      .files =
          "DIR/manifest.json  of a packed checkpoint\n"
          "DIR/model.safetensors.index.json, DIR/config.json  of a source",
      .epilog =
          "Exit status: 0 listed or same, 2 usage, 3 bad input, 4 unsupported, 5 I/O, 6 damaged, or different with --diff, 8 memory or "
          "limit.",
  };
  return mm_program_main(&program, argc, argv, a.dir, inspect, &a);
}
