/* The table of naming schemes of each target format, and the choice among them. */
#include "convert/plan/target_format.h"

#include "convert/plan/card.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct mm_target_format {
  const char *name;
  bool mixes;  /* several schemes in one checkpoint */
  bool groups; /* several sizes of groups */
  /* The quantization_config of a plan. `list` holds the modules that stay as they are (taken over). NULL on want of memory. */
  mm_json *(*config)(const mm_plan *p, mm_json *list, mm_err *err);
  const char *file; /* the same in its own file, or NULL */
  mm_json *(*file_config)(const mm_plan *p, mm_json *list, mm_err *err);
};

static const mm_target_format fp8 = {.name = "fp8", .config = mm_target_fp8_config},
                              ct = {.name = "ct", .mixes = true, .groups = true, .config = mm_target_ct_config},
                              modelopt = {.name = "modelopt",
                                          .config = mm_target_modelopt_config,
                                          .file = "hf_quant_config.json",
                                          .file_config = mm_target_modelopt_file},
                              gptq = {.name = "gptq", .groups = true, .config = mm_target_words_config},
                              awq = {.name = "awq", .config = mm_target_words_config};
/* In the order in which they are tried, after the one that a source of words came in. */
static const mm_target_format *const target_formats[] = {&fp8, &ct, &modelopt, &gptq, &awq};

/* JSON of compressed-tensors, with target_config.h. */
#define MX "\"strategy\": \"group\", \"group_size\": 32, \"scale_dtype\": \"torch.uint8\", \"zp_dtype\": null, "
#define NV "\"strategy\": \"tensor_group\", \"group_size\": 16, \"scale_dtype\": \"torch.float8_e4m3fn\", \"zp_dtype\": null, "
/* ModelOpt's. */
#define MODELOPT4 "{\"dynamic\": false, \"num_bits\": 4, \"type\": \"float\", \"group_size\": 16}"

#define IN(by, word, ...) \
  { .target_format = &by, .scheme = word, __VA_ARGS__ }
#define ROLES(last) \
  { MM_WORDS_CODES, MM_WORDS_SCALES, MM_WORDS_ZEROS, last }
#define GPTQ(word, bits, sym)                                                                                    \
  IN(gptq, word, .suffix = {".qweight", ".scales", ".qzeros", ".g_idx"}, .form = MM_WORDS_GPTQ, .words = MM_I32, \
     .role = ROLES(MM_WORDS_ORDER), .config = "{\"quant_method\": \"gptq\", \"bits\": " bits ", \"desc_act\": false, \"sym\": " sym "}")
#define AWQ(word)                                                                                                                   \
  IN(awq, word, .suffix = {".qweight", ".scales", ".qzeros"}, .form = MM_WORDS_AWQ, .words = MM_I32, .role = ROLES(MM_WORDS_ZEROS), \
     .config = "{\"quant_method\": \"awq\", \"bits\": 4, \"version\": \"gemm\", \"zero_point\": true}")
#define CT_ZEROS(word, bits)                                                                                                               \
  IN(ct, word, .suffix = {".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape"}, .form = MM_WORDS_CT, .words = MM_I32, \
     .role = ROLES(MM_WORDS_SHAPE),                                                                                                        \
     .config = "{\"num_bits\": " bits ", \"type\": \"int\", \"symmetric\": false, \"actorder\": null, " STATIC)
#define CT_SYMMETRIC(word, bits)                                                                                     \
  IN(ct, word, .suffix = {".weight_packed", ".weight_scale", ".weight_shape"}, .form = MM_WORDS_CT, .words = MM_I32, \
     .role = {MM_WORDS_CODES, MM_WORDS_SCALES, MM_WORDS_SHAPE}, .config = INT(bits) "\"actorder\": null, " STATIC)
static const mm_target_naming naming[] = {
    IN(fp8, "block_fp8", .suffix = {".weight", ".weight_scale_inv"},
       .config = "{\"activation_scheme\": \"dynamic\", \"fmt\": \"float8_e4m3fn\", \"quant_method\": \"fp8\", "
                 "\"weight_block_size\": [128, 128]}"),
    IN(fp8, "tensor_wise_fp8", .suffix = {".weight", ".weight_scale_inv"}, .scalar = true,
       .config =
           "{\"activation_scheme\": \"dynamic\", \"fmt\": \"float8_e4m3fn\", \"quant_method\": \"fp8\", \"weight_block_size\": null}"),
    IN(fp8, "tensor_wise_fp8", .suffix = {".weight", ".weight_scale_inv"}, .input = ".activation_scale", .scalar = true,
       .config = "{\"activation_scheme\": \"static\", \"fmt\": \"float8_e4m3fn\", \"quant_method\": \"fp8\", \"weight_block_size\": null}"),
    IN(ct, "block_fp8", .suffix = {".weight", ".weight_scale"},
       .config =
           GROUP("float-quantized", FLOAT("8") "\"strategy\": \"block\", \"block_structure\": [128, 128], \"group_size\": null, " STATIC,
                 FLOAT("8") "\"strategy\": \"group\", \"group_size\": 128, " DYNAMIC)),
    IN(ct, "channel_fp8", .suffix = {".weight", ".weight_scale"},
       .config = GROUP("float-quantized", FLOAT("8") "\"strategy\": \"channel\", " STATIC, FLOAT("8") "\"strategy\": \"token\", " DYNAMIC)),
    IN(ct, "tensor_wise_fp8", .suffix = {".weight", ".weight_scale"},
       .config = GROUP("float-quantized", FLOAT("8") "\"strategy\": \"tensor\", " STATIC, FLOAT("8") "\"strategy\": \"token\", " DYNAMIC)),
    IN(ct, "tensor_wise_fp8", .suffix = {".weight", ".weight_scale"}, .input = ".input_scale",
       .config = GROUP("float-quantized", FLOAT("8") "\"strategy\": \"tensor\", " STATIC, FLOAT("8") "\"strategy\": \"tensor\", " STATIC)),
    IN(ct, "int8", .suffix = {".weight", ".weight_scale"},
       .config = GROUP("int-quantized", INT("8") "\"strategy\": \"channel\", " STATIC, INT("8") "\"strategy\": \"token\", " DYNAMIC)),
    IN(ct, "w4a16", .suffix = {".weight_packed", ".weight_scale"}, .words = MM_I32, .shape = true, .any_group = true, .config = "null"),
    IN(ct, "w4afp8", .suffix = {".weight_packed", ".weight_scale"}, .words = MM_I32, .shape = true, .offset = true, .any_group = true,
       .config = FLOAT("8") "\"strategy\": \"token\", " DYNAMIC),
    IN(ct, "nvfp4a16", .suffix = {".weight_packed", ".weight_scale", ".weight_global_scale"}, .reciprocal = true, .whole_groups = true,
       .config = GROUP("nvfp4-pack-quantized", FLOAT("4") NV STATIC, "null")),
    IN(ct, "nvfp4", .suffix = {".weight_packed", ".weight_scale", ".weight_global_scale"}, .input = ".input_global_scale",
       .reciprocal = true, .whole_groups = true,
       .config = GROUP("nvfp4-pack-quantized", FLOAT("4") NV STATIC, FLOAT("4") NV "\"dynamic\": \"local\"}")),
    IN(ct, "mxfp4", .suffix = {".weight_packed", ".weight_scale"}, .whole_groups = true,
       .config = GROUP("mxfp4-pack-quantized", FLOAT("4") MX STATIC, FLOAT("4") MX DYNAMIC)),
    IN(ct, "mxfp8", .suffix = {".weight", ".weight_scale"}, .whole_groups = true,
       .config = GROUP("mxfp8-quantized", FLOAT("8") MX STATIC, FLOAT("8") MX DYNAMIC)),
    IN(modelopt, "nvfp4a16", .suffix = {".weight", ".weight_scale", ".weight_scale_2"}, .scalar = true, .whole_groups = true,
       .algorithm = "W4A16_NVFP4", .config = "{\"weights\": " MODELOPT4 "}"),
    IN(modelopt, "nvfp4", .suffix = {".weight", ".weight_scale", ".weight_scale_2"}, .input = ".input_scale", .scalar = true,
       .whole_groups = true, .algorithm = "NVFP4", .config = "{\"weights\": " MODELOPT4 ", \"input_activations\": " MODELOPT4 "}"),
    CT_SYMMETRIC("w4a16_f16", "4"),
    CT_SYMMETRIC("w8a16_f16", "8"),
    CT_ZEROS("w4a16_zero", "4"),
    CT_ZEROS("w4a16_zero_bf16", "4"),
    CT_ZEROS("w8a16_zero", "8"),
    CT_ZEROS("w8a16_zero_bf16", "8"),
    GPTQ("w4a16_f16", "4", "true"),
    GPTQ("w8a16_f16", "8", "true"),
    GPTQ("w4a16_zero", "4", "false"),
    GPTQ("w4a16_zero_bf16", "4", "false"),
    GPTQ("w8a16_zero", "8", "false"),
    GPTQ("w8a16_zero_bf16", "8", "false"),
    AWQ("w4a16_zero"),
    AWQ("w4a16_zero_bf16"),
};
#undef IN
#define NAMINGS (sizeof naming / sizeof *naming)

static const mm_target_naming *find_naming(const mm_target_format *d, const mm_pack_tensor *t) {
  for (size_t i = 0; i < NAMINGS; i++)
    if (naming[i].target_format == d && strcmp(naming[i].scheme, t->scheme) == 0 && !naming[i].input == !(t->input_scale > 0))
      return &naming[i];
  return NULL;
}

/* Columns that must divide the matrix's; 1 when any number will do. */
static uint32_t group_of(const mm_target_naming *s, const mm_plan_tensor *pt) {
  const uint32_t per = 8, group = pt->grid.k ? pt->grid.k : 1; /* codes of a word */
  if (s->any_group) return group / (uint32_t)mm_gcd(group, per) * per;
  return s->whole_groups ? pt->scheme->plane[1].cell.k : 1;
}

static bool no_naming(const mm_target_format *d, const mm_pack_tensor *t, mm_err *err) {
  const char *fixed = " with static scales of the inputs";
  char known[512] = "";
  for (size_t i = 0; i < NAMINGS; i++)
    if (naming[i].target_format == d)
      snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s, ", naming[i].scheme, naming[i].input ? fixed : "");
  return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", mm_at(NULL, t->piece[0].source),
                 "found %s%s, which dialect %s cannot represent; expected one of %sbf16 or none", t->scheme,
                 t->input_scale > 0 ? fixed : "", d->name, known);
}

/* Groups of the tensors seen, for configs of one size. Rows under one scale count as a group of any size that is not smaller. */
typedef struct words_seen {
  uint32_t group, widest; /* columns of a group; of the widest row under one scale */
} words_seen;

static bool fits_words(const mm_plan *p, const mm_target_format *d, uint32_t tensor, words_seen *seen, mm_err *err) {
  const mm_pack_tensor *t = &p->pack.tensor[tensor];
  const mm_cell grid = p->tensor[tensor].grid;
  const mm_where at = mm_at(p->hf->dir, t->piece[0].source);
  const uint32_t per = p->tensor[tensor].scheme->code == MM_CODE_INT8 ? 4 : 8;
  bool whole = t->cols % per == 0 && grid.n == 1 && (grid.k == 0 || t->cols % grid.k == 0);
  for (unsigned j = 0; j < t->piece_count; j++) whole = whole && t->piece[j].rows % per == 0;
  if (!whole)
    return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", at, "found [%u, %u] in groups of %u columns, but dialect %s holds whole words of %u",
                   t->rows, t->cols, grid.k, d->name, per);
  if (d->groups) return true;
  const uint32_t before = seen->group;
  if (grid.k) seen->group = grid.k;
  if (!grid.k) seen->widest = (uint32_t)mm_max(seen->widest, t->cols);
  if ((before == 0 || before == seen->group) && (seen->group == 0 || seen->widest <= seen->group)) return true;
  return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", at, "found groups of %u columns and others of %u, but dialect %s holds one size",
                 seen->group, before && before != seen->group ? before : seen->widest, d->name);
}

/* Notes the columns of groups as the config says them; those of a row under one scale are a group that is not smaller, if there is one. */
static void note_groups(mm_plan *p) {
  uint32_t widest[NAMINGS] = {0};
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_plan_tensor *pt = &p->tensor[i];
    if (pt->naming && pt->naming->form) widest[pt->naming - naming] = (uint32_t)mm_max(widest[pt->naming - naming], pt->grid.k);
  }
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    mm_plan_tensor *pt = &p->tensor[i];
    const uint32_t row_group = pt->naming ? widest[pt->naming - naming] : 0;
    pt->config_group = pt->grid.k || row_group < p->pack.tensor[i].cols ? pt->grid.k : row_group;
  }
}

/* Spells every tensor in d, or says what it cannot spell. */
static bool spell_in(mm_plan *p, const mm_target_format *d, mm_err *err) {
  const mm_target_naming *first = NULL;
  words_seen seen = {0};
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    mm_plan_tensor *pt = &p->tensor[i];
    mm_where at = mm_at(p->hf->dir, t->piece[0].source);
    pt->naming = NULL;
    if (pt->scheme->code == MM_CODE_PLAIN) continue;
    const mm_target_naming *s = pt->naming = find_naming(d, t);
    if (!s) return no_naming(d, t, err);
    if (pt->rule[0]->kind == MM_KIND_EMBED)
      return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", at,
                     "found %s, but engines keep embedding and head as they are (--head bf16, or --override, makes it so)", t->scheme);
    if (t->cols % group_of(s, pt) != 0)
      return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", at,
                     "found %s of %u columns, but dialect %s holds whole groups of %u (--override gives it another scheme)", t->scheme,
                     t->cols, d->name, group_of(s, pt));
    if (s->form && !fits_words(p, d, (uint32_t)i, &seen, err)) return false;
    if (!s->form && (pt->grid.n != pt->scheme->plane[1].cell.n || (pt->grid.k != pt->scheme->plane[1].cell.k && !s->any_group)))
      return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", at,
                     "found %s with a scale for %u x %u, but dialect %s writes %u x %u (--quant %s makes it so)", t->scheme, pt->grid.n,
                     pt->grid.k, d->name, pt->scheme->plane[1].cell.n, pt->scheme->plane[1].cell.k, t->scheme);
    if (!first) first = s;
    if (s != first && !d->mixes)
      return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", at, "found %s and %s, but dialect %s holds one scheme", t->scheme, first->scheme,
                     d->name);
  }
  p->target_format = first ? d : NULL;
  note_groups(p);
  return true;
}

bool mm_target_format_file(const char *name) {
  for (size_t i = 0; i < sizeof target_formats / sizeof *target_formats; i++)
    if (target_formats[i]->file && strcmp(target_formats[i]->file, name) == 0) return true;
  return false;
}

const char *mm_target_format_name(const mm_target_format *d) { return d ? d->name : "none"; }

mm_words_matrix mm_target_words_of(const mm_plan *p, uint32_t tensor, uint32_t piece) {
  const mm_pack_tensor *t = &p->pack.tensor[tensor];
  const mm_plan_tensor *pt = &p->tensor[tensor];
  return (mm_words_matrix){.form = pt->naming->form,
                           .rows = t->piece[piece].rows,
                           .cols = t->cols,
                           .group = pt->grid.k,
                           .scheme = pt->scheme,
                           .zero_less = strstr(p->pack.tool, ", from gptq_v2") ? 0 : 1};
}

/* What a source of words came in, as the tool's words record it (planner.c); NULL: they do not. */
static const mm_target_format *target_formats_from(const mm_plan *p) {
  return strstr(p->pack.tool, ", from awq") ? &awq : strstr(p->pack.tool, ", from gptq") ? &gptq : NULL;
}

/* The tensors of words in place of the planes. */
static void spell_words(const mm_target_naming *s, const mm_scheme *scheme, mm_pack_tensor *t) {
  t->plane_count = 0;
  for (unsigned j = 0; j < MM_MAX_PLANES && s->suffix[j]; j++) {
    const mm_dtype type = s->role[j] == MM_WORDS_SCALES ? scheme->scale_of : s->role[j] == MM_WORDS_SHAPE ? MM_I64 : s->words;
    t->plane[t->plane_count++] = (mm_pack_plane){.suffix = s->suffix[j], .dtype = type};
  }
}

bool mm_target_format_spell(mm_plan *p, const char *word, mm_err *err) {
  const size_t count = sizeof target_formats / sizeof *target_formats;
  bool ok = !word && target_formats_from(p) && spell_in(p, target_formats_from(p), MM_IGNORED);
  for (size_t i = 0; !ok && i < count; i++)
    if (!word || strcmp(word, target_formats[i]->name) == 0) ok = spell_in(p, target_formats[i], word ? err : MM_IGNORED);
  if (!ok && !word) return spell_in(p, &ct, err); /* the widest format gives the reason */
  if (!ok)
    return mm_fail(err, MM_USAGE, "E_DIALECT", mm_at(NULL, NULL), "found dialect \"%s\", expected fp8, ct, modelopt, gptq or awq", word);
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    mm_pack_tensor *t = &p->pack.tensor[i];
    const mm_target_naming *s = p->tensor[i].naming;
    if (s && s->form) {
      spell_words(s, p->tensor[i].scheme, t);
      continue;
    }
    for (unsigned j = 0; s && j < t->plane_count; j++) t->plane[j].suffix = s->suffix[j];
    if (s && s->words) t->plane[0].dtype = s->words;
    if (s && s->shape) t->plane[t->plane_count++] = (mm_pack_plane){.suffix = ".weight_shape", .dtype = MM_I64};
    if (s && s->input) t->plane[t->plane_count++] = (mm_pack_plane){.suffix = s->input, .dtype = MM_F32};
  }
  return true;
}

void mm_target_format_scale(const mm_target_naming *s, const mm_scheme *scheme, unsigned plane, int32_t steps, void *stored, size_t bytes) {
  const mm_cell *cell = &scheme->plane[plane].cell;
  if (s->offset && plane == 0) /* two's complement plus 8 */
    for (size_t i = 0; i < bytes; i++) ((uint8_t *)stored)[i] ^= 0x88;
  if (s->reciprocal && cell->n == 0 && cell->k == 0) {
    float *const one = stored;
    *one = 1.0f / *one;
    if (steps != 0) *one = nextafterf(*one, steps > 0 ? INFINITY : 0);
  }
}

/* Into the plan's arena; takes j over. */
static const char *text_of(mm_plan *p, mm_json *j, mm_err *err) {
  char *text = mm_json_text(j, true, err), *kept = text ? mm_arena_printf(&p->pack.arena, err, "%s\n", text) : NULL;
  free(text);
  return kept;
}

const mm_dtype *mm_target_format_type(const mm_plan *p) {
  const mm_scheme *one = NULL;
  bool several = false;
  for (const mm_plan_tensor *t = p->tensor; t < p->tensor + p->pack.tensor_count; t++)
    if (t->rule[0]->kind == MM_KIND_LINEAR || t->rule[0]->kind == MM_KIND_EXPERT) several |= one && one != t->scheme, one = t->scheme;
  return one && !several ? &one->plane[0].dtype : NULL;
}

bool mm_target_format_texts(mm_plan *p, mm_err *err) {
  mm_json *config = mm_declared_plain(p->hf->config, mm_target_format_type(p), err);
  if (!config) return false;
  const mm_target_format *d = p->target_format;
  if (d) mm_json_set(config, "quantization_config", d->config(p, mm_target_left_out(p), err));
  p->text[0] = (mm_plan_text){"config.json", text_of(p, config, err)};
  p->text[1] = (mm_plan_text){MM_CARD, mm_card_text(p, d ? d->name : NULL, err)};
  if (d && d->file) p->text[2] = (mm_plan_text){d->file, text_of(p, d->file_config(p, mm_target_left_out(p), err), err)};
  return p->text[0].text && p->text[1].text && (!p->text[2].name || p->text[2].text);
}
