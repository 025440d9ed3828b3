/* The table of naming schemes and the quantization_config of each target format. */
#include "convert/plan/target_format.h"

#include "convert/plan/card.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct mm_target_format {
  const char *name;
  bool mixes; /* several schemes in one checkpoint */
  /* The quantization_config of a plan. `list` holds the modules that stay as they are (taken over). NULL on want of memory. */
  mm_json *(*config)(const mm_plan *p, mm_json *list, mm_err *err);
  const char *file; /* the same in its own file, or NULL */
  mm_json *(*file_config)(const mm_plan *p, mm_json *list, mm_err *err);
};

static mm_json *fp8_config(const mm_plan *p, mm_json *list, mm_err *err);
static mm_json *ct_config(const mm_plan *p, mm_json *list, mm_err *err);
static mm_json *modelopt_config(const mm_plan *p, mm_json *list, mm_err *err);
static mm_json *modelopt_file(const mm_plan *p, mm_json *list, mm_err *err);
static mm_json *words_config(const mm_plan *p, mm_json *list, mm_err *err);

static const mm_target_format fp8 = {.name = "fp8", .config = fp8_config}, ct = {.name = "ct", .mixes = true, .config = ct_config},
                              modelopt = {.name = "modelopt",
                                          .config = modelopt_config,
                                          .file = "hf_quant_config.json",
                                          .file_config = modelopt_file},
                              gptq = {.name = "gptq", .config = words_config}, awq = {.name = "awq", .config = words_config};
/* In the order in which they are tried, after the one that a source of words came in. */
static const mm_target_format *const target_formats[] = {&fp8, &ct, &modelopt, &gptq, &awq};

/* JSON of compressed-tensors. */
#define FLOAT(bits) "{\"num_bits\": " bits ", \"type\": \"float\", \"symmetric\": true, "
#define INT(bits)   "{\"num_bits\": " bits ", \"type\": \"int\", \"symmetric\": true, "
#define STATIC      "\"dynamic\": false}"
#define DYNAMIC     "\"dynamic\": true}"
#define MX          "\"strategy\": \"group\", \"group_size\": 32, \"scale_dtype\": \"torch.uint8\", \"zp_dtype\": null, "
#define NV          "\"strategy\": \"tensor_group\", \"group_size\": 16, \"scale_dtype\": \"torch.float8_e4m3fn\", \"zp_dtype\": null, "
#define GROUP(format, weights, inputs) \
  "{\"format\": \"" format "\", \"weights\": " weights ", \"input_activations\": " inputs ", \"output_activations\": null}"

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
    IN(ct, "w4a16", .suffix = {".weight_packed", ".weight_scale"}, .words = MM_I32, .shape = true, .whole_groups = true,
       .config = GROUP("pack-quantized", INT("4") "\"strategy\": \"group\", \"group_size\": 128, \"actorder\": null, " STATIC, "null")),
    IN(ct, "w4afp8", .suffix = {".weight_packed", ".weight_scale"}, .words = MM_I32, .shape = true, .offset = true, .whole_groups = true,
       .config = GROUP("pack-quantized", INT("4") "\"strategy\": \"group\", \"group_size\": 128, \"actorder\": null, " STATIC,
                       FLOAT("8") "\"strategy\": \"token\", " DYNAMIC)),
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

/* Columns of a scale's cell that must divide the matrix's; 1 when any number will do. */
static uint32_t group_of(const mm_target_naming *s, const mm_scheme *scheme) { return s->whole_groups ? scheme->plane[1].cell.k : 1; }

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

/* Groups of the tensors seen: a config has one size. Rows under one scale count as a group of any size that is not smaller. */
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
  const uint32_t before = seen->group;
  if (grid.k) seen->group = grid.k;
  if (!grid.k) seen->widest = (uint32_t)mm_max(seen->widest, t->cols);
  if ((before == 0 || before == seen->group) && (seen->group == 0 || seen->widest <= seen->group)) return true;
  return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", at, "found groups of %u columns and others of %u, but dialect %s holds one size",
                 seen->group, before && before != seen->group ? before : seen->widest, d->name);
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
    if (t->cols % group_of(s, pt->scheme) != 0)
      return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", at,
                     "found %s of %u columns, but dialect %s holds whole groups of %u (--override gives it another scheme)", t->scheme,
                     t->cols, d->name, group_of(s, pt->scheme));
    if (s->form && !fits_words(p, d, (uint32_t)i, &seen, err)) return false;
    if (!s->form && (pt->grid.n != pt->scheme->plane[1].cell.n || pt->grid.k != pt->scheme->plane[1].cell.k))
      return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", at,
                     "found %s with a scale for %u x %u, but dialect %s writes %u x %u (--quant %s makes it so)", t->scheme, pt->grid.n,
                     pt->grid.k, d->name, pt->scheme->plane[1].cell.n, pt->scheme->plane[1].cell.k, t->scheme);
    if (!first) first = s;
    if (s != first && !d->mixes)
      return mm_fail(err, MM_UNSUPPORTED, "E_DIALECT", at, "found %s and %s, but dialect %s holds one scheme", t->scheme, first->scheme,
                     d->name);
  }
  p->target_format = first ? d : NULL;
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

void mm_target_format_scale(const mm_target_naming *s, const mm_scheme *scheme, unsigned plane, void *stored, size_t bytes) {
  const mm_cell *cell = &scheme->plane[plane].cell;
  if (s->offset && plane == 0) /* two's complement plus 8 */
    for (size_t i = 0; i < bytes; i++) ((uint8_t *)stored)[i] ^= 0x88;
  if (s->reciprocal && cell->n == 0 && cell->k == 0) *(float *)stored = 1.0f / *(float *)stored;
}

/* ---- configs ---- */

static mm_json *parse(const char *text, mm_err *err) { return mm_json_parse(text, strlen(text), "quantization_config", err); }

/* A matrix's module: its name without ".weight". */
static void add_module(mm_json *list, const char *source) {
  char name[256];
  snprintf(name, sizeof name, "%.*s", (int)(strlen(source) - strlen(".weight")), source);
  mm_json_append(list, mm_json_new_str(name));
}

/* "model.layers.0.self_attn.q_proj.weight", the first of several that engines fuse: the module's name in them; false for others. */
static bool fused_name(const char *source, unsigned pieces, char out[256]) {
  static const struct {
    const char *first, *module;
    unsigned pieces;
  } fused[] = {
      {".q_proj.weight", ".qkv_proj", 3}, {".gate_proj.weight", ".gate_up_proj", 2}, {".index_q_proj.weight", ".index_qkv_proj", 1}};
  for (size_t i = 0; i < sizeof fused / sizeof *fused; i++) {
    const size_t n = strlen(source), end = strlen(fused[i].first);
    if (pieces != fused[i].pieces || !mm_ends_with(source, fused[i].first)) continue;
    return snprintf(out, 256, "%.*s%s", (int)(n - end), source, fused[i].module) < 256;
  }
  return false;
}

/* Names that begin with ".block_sparse_moe." begin with ".mlp." where an engine follows transformers. */
static bool mlp_name(const char *source, size_t n, char out[256]) {
  static const char ours[] = ".block_sparse_moe.";
  const char *at = strstr(source, ours);
  if (!at || at >= source + n) return false;
  const char *rest = at + strlen(ours);
  return snprintf(out, 256, "%.*s.mlp.%.*s", (int)(at - source), source, (int)(source + n - rest), rest) < 256;
}

static bool is_expert(const mm_plan *p, size_t i, uint32_t layer) {
  return p->tensor[i].layer == layer && p->tensor[i].rule[0]->kind == MM_KIND_EXPERT;
}

/* Some engines ask for the experts of a layer as one module: listed too where none of them is quantised. `i` is the first. */
static void add_experts(mm_json *list, const mm_plan *p, size_t i) {
  uint32_t layer = p->tensor[i].layer;
  const char *source = p->pack.tensor[i].piece[0].source;
  char name[256];
  for (size_t j = i; j < p->pack.tensor_count && is_expert(p, j, layer); j++)
    if (p->tensor[j].naming) return;
  size_t n = (size_t)(strstr(source, ".experts.") + strlen(".experts") - source);
  snprintf(name, sizeof name, "%.*s", (int)n, source);
  mm_json_append(list, mm_json_new_str(name));
  if (mlp_name(source, n, name)) mm_json_append(list, mm_json_new_str(name));
}

/* A matrix that is not among the experts: by the name of the module that it is fused into, and under ".mlp.", too. */
static void add_aliases(mm_json *list, const mm_pack_tensor *t) {
  char name[256];
  const char *source = t->piece[0].source;
  if (fused_name(source, t->piece_count, name)) mm_json_append(list, mm_json_new_str(name));
  if (mlp_name(source, strlen(source) - strlen(".weight"), name)) mm_json_append(list, mm_json_new_str(name));
}

/* A module of the vision tower. Norms too whose names do not end so: compressed-tensors' dequantiser takes their modules for quantised
 * ones. vLLM asks for the two products of an MLP without ".mlp". */
static void add_passed(mm_json *list, const mm_hf_tensor *t) {
  static const char mlp[] = ".mlp.fc";
  const char *at = strstr(t->original, mlp);
  char name[256];
  if (!mm_ends_with(t->original, ".weight") || (t->shape.rank < 2 && mm_ends_with(t->original, "norm.weight"))) return;
  add_module(list, t->original);
  if (!at || snprintf(name, sizeof name, "%.*s%s", (int)(at - t->original), t->original, at + strlen(".mlp")) >= (int)sizeof name) return;
  add_module(list, name);
}

static mm_json *left_out(const mm_plan *p) {
  mm_json *list = mm_json_new_arr();
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    const mm_hf_tensor *passed = p->tensor[i].passed;
    if (passed) add_passed(list, passed);
    if (t->vector || p->tensor[i].naming) continue;
    if (is_expert(p, i, p->tensor[i].layer) && !is_expert(p, i - 1, p->tensor[i].layer)) add_experts(list, p, i);
    for (unsigned j = 0; j < t->piece_count; j++) add_module(list, t->piece[j].source);
    if (p->tensor[i].rule[0]->kind != MM_KIND_EXPERT) add_aliases(list, t);
  }
  return list;
}

static const mm_target_naming *first_naming(const mm_plan *p) {
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    if (p->tensor[i].naming) return p->tensor[i].naming;
  return NULL;
}

static mm_json *fp8_config(const mm_plan *p, mm_json *list, mm_err *err) {
  return MM_JSON_PUT(parse(first_naming(p)->config, err), {"modules_to_not_convert", list});
}

/* Columns of a group; -1: the whole row. */
static mm_json *group_size(const mm_plan *p, const mm_target_naming *s) {
  int64_t group = -1;
  for (size_t i = 0; group < 0 && i < p->pack.tensor_count; i++)
    if (p->tensor[i].naming == s && p->tensor[i].grid.k) group = p->tensor[i].grid.k;
  return mm_json_new_int(group);
}

/* GPTQModel's rules for modules that are not quantised; takes the list over. */
static mm_json *left_out_rules(mm_json *list) {
  mm_json *rules = mm_json_failed(list) ? NULL : mm_json_new_obj();
  char rule[512];
  for (size_t i = 0; i < mm_json_size(list); i++) {
    snprintf(rule, sizeof rule, "-:^%s$", mm_json_str(mm_json_at(list, i)));
    mm_json_set(rules, rule, mm_json_new_obj());
  }
  mm_json_free(list);
  return rules;
}

static mm_json *words_config(const mm_plan *p, mm_json *list, mm_err *err) {
  const mm_target_naming *s = first_naming(p);
  const bool second = strstr(p->pack.tool, ", from gptq_v2");
  mm_json *o = MM_JSON_PUT(parse(s->config, err), {"group_size", group_size(p, s)});
  if (s->form == MM_WORDS_AWQ) return MM_JSON_PUT(o, {"modules_to_not_convert", list});
  return MM_JSON_PUT(o, {"checkpoint_format", mm_json_new_str(second ? "gptq_v2" : "gptq")}, {"dynamic", left_out_rules(list)});
}

static mm_json *producer(void) { return MM_JSON_NEW({"name", mm_json_new_str("modelopt")}, {"version", mm_json_new_str("0.41.0")}); }

static mm_json *words(const char *word) {
  mm_json *a = mm_json_new_arr();
  mm_json_append(a, mm_json_new_str(word));
  return a;
}

static mm_json *modelopt_config(const mm_plan *p, mm_json *list, mm_err *err) {
  const mm_target_naming *s = first_naming(p);
  mm_json *group = MM_JSON_PUT(parse(s->config, err), {"targets", words("Linear")});
  return MM_JSON_NEW({"quant_method", mm_json_new_str("modelopt")}, {"quant_algo", mm_json_new_str(s->algorithm)},
                     {"config_groups", MM_JSON_NEW({"group_0", group})}, {"ignore", list}, {"producer", producer()});
}

static mm_json *modelopt_file(const mm_plan *p, mm_json *list, mm_err *err) {
  const mm_target_naming *s = first_naming(p);
  mm_json *q = parse("{\"kv_cache_quant_algo\": null, \"group_size\": 16}", err);
  MM_JSON_PUT(q, {"quant_algo", mm_json_new_str(s->algorithm)}, {"exclude_modules", list});
  return MM_JSON_NEW({"producer", producer()}, {"quantization", q});
}

/* Projections of an expert, as transformers and the engines that follow it call them. */
static const char *const projection[][2] = {{"w1", "gate_proj"}, {"w3", "up_proj"}, {"w2", "down_proj"}};

/* A regular expression for a module and what else engines call it: "model.layers.{l}.block_sparse_moe.experts.{e}.w1" is
 * "re:^model\.layers\.\d+\.(block_sparse_moe|mlp)\.experts\.\d+\.(w1|gate_proj)$". */
static void add_pattern(mm_json *list, const char *module, size_t n) {
  static const char moe[] = "block_sparse_moe";
  char re[512];
  size_t at = (size_t)snprintf(re, sizeof re, "re:^");
  bool expert = n > 3 && strstr(module, ".experts.") && module[n - 3] == '.';
  for (size_t i = 0; i < n && at + 64 < sizeof re;) {
    const char *word = NULL;
    size_t taken = 1;
    if (module[i] == '{') {
      word = "\\d+";
      taken = strlen("{l}");
    } else if (strncmp(module + i, moe, sizeof moe - 1) == 0) {
      word = "(block_sparse_moe|mlp)";
      taken = sizeof moe - 1;
    } else if (module[i] == '.') {
      word = "\\.";
    }
    for (size_t k = 0; expert && i == n - 2 && k < 3; k++)
      if (strncmp(module + i, projection[k][0], 2) == 0) {
        at += (size_t)snprintf(re + at, sizeof re - at, "(%s|%s)", projection[k][0], projection[k][1]);
        taken = 2;
        word = "";
      }
    if (word)
      at += (size_t)snprintf(re + at, sizeof re - at, "%s", word);
    else
      re[at++] = module[i];
    i += taken;
  }
  snprintf(re + at, sizeof re - at, "$");
  mm_json_append(list, mm_json_new_str(re));
}

static size_t module_length(const char *name) { return strlen(name) - strlen(".weight"); }

/* A rule's modules in all layers, and where engines fuse them the fused one: "qkv_proj", the experts of a layer as one. */
static void add_rule(mm_json *list, const char *prefix, const mm_plan_tensor *pt, unsigned piece, unsigned pieces, bool all_experts) {
  char theirs[256], name[256];
  snprintf(theirs, sizeof theirs, "%s%s", prefix, pt->rule[piece]->theirs);
  const char *experts = strstr(theirs, ".experts.{e}.");
  add_pattern(list, theirs, module_length(theirs));
  if (piece == 0 && fused_name(theirs, pieces, name)) add_pattern(list, name, strlen(name));
  if (!experts || !all_experts || piece != 0 || pieces != 2) return; /* w2 comes with w1 and w3 */
  static const char *const fused[] = {"", ".gate_up_proj", ".down_proj"};
  for (size_t i = 0; i < sizeof fused / sizeof *fused; i++) {
    snprintf(name, sizeof name, "%.*s%s", (int)(experts + strlen(".experts") - theirs), theirs, fused[i]);
    add_pattern(list, name, strlen(name));
  }
}

/* One tensor's modules by name: experts by an expression, since engines call their projections otherwise, too. */
static void add_named(mm_json *list, const mm_pack_tensor *t) {
  char name[256];
  bool expert = strstr(t->piece[0].source, ".experts.");
  for (unsigned j = 0; j < t->piece_count; j++)
    if (expert)
      add_pattern(list, t->piece[j].source, module_length(t->piece[j].source));
    else
      add_module(list, t->piece[j].source);
  if (fused_name(t->piece[0].source, t->piece_count, name)) mm_json_append(list, mm_json_new_str(name));
}

/* True if every expert of every layer has this naming scheme. */
static bool all_experts(const mm_plan *p, const mm_target_naming *s) {
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    if (p->tensor[i].rule[0]->kind == MM_KIND_EXPERT && p->tensor[i].naming != s) return false;
  return true;
}

/* True if every tensor of a rule has this naming scheme. */
static bool whole_rule(const mm_plan *p, const mm_rule *r, const mm_target_naming *s) {
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    if (p->tensor[i].rule[0] == r && p->tensor[i].naming != s) return false;
  return true;
}

/* The modules of one naming: one expression for a whole rule, each by its name otherwise. */
static mm_json *targets(const mm_plan *p, const mm_target_naming *s) {
  const mm_rule *last = NULL; /* tensors of one rule mostly follow one another */
  bool whole = false;
  const bool every = all_experts(p, s);
  mm_json *list = mm_json_new_arr(), *done = mm_json_new_obj(); /* rules that are listed as a whole */
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    const mm_plan_tensor *pt = &p->tensor[i];
    if (pt->naming != s) continue;
    if (pt->rule[0] != last) whole = whole_rule(p, pt->rule[0], s);
    last = pt->rule[0];
    if (whole && mm_json_get(done, last->theirs)) continue;
    for (unsigned j = 0; whole && j < t->piece_count; j++) add_rule(list, p->prefix, pt, j, t->piece_count, every);
    if (whole)
      mm_json_set(done, last->theirs, mm_json_new_bool(true));
    else
      add_named(list, t);
  }
  if (mm_json_failed(done)) mm_json_append(list, NULL);
  mm_json_free(done);
  return list;
}

/* compressed-tensors' group of words; config is its weights. */
static mm_json *words_group(const mm_plan *p, const mm_target_naming *s, mm_err *err) {
  mm_json *o = parse("{\"format\": \"pack-quantized\", \"input_activations\": null, \"output_activations\": null}", err);
  mm_json *weights = parse(s->config, err), *size = group_size(p, s);
  MM_JSON_PUT(weights, {"strategy", mm_json_new_str(size && mm_json_int(size) < 0 ? "channel" : "group")}, {"group_size", size});
  return MM_JSON_PUT(o, {"weights", weights});
}

static void add_group(mm_json *groups, const mm_plan *p, const mm_target_naming *s, mm_json *modules, mm_err *err) {
  char name[32];
  snprintf(name, sizeof name, "group_%zu", mm_json_size(groups));
  mm_json *group = s->form ? words_group(p, s, err) : parse(s->config, err);
  mm_json_set(groups, name, MM_JSON_PUT(group, {"targets", modules}));
}

/* The group of the commonest naming names every linear module and comes last: readers take the first group that a module fits. */
static mm_json *ct_groups(const mm_plan *p, mm_err *err) {
  size_t count[NAMINGS] = {0}, most = 0;
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    if (p->tensor[i].naming) count[p->tensor[i].naming - naming]++;
  for (size_t i = 0; i < NAMINGS; i++)
    if (count[i] > count[most]) most = i;
  mm_json *o = mm_json_new_obj();
  for (size_t i = 0; i < NAMINGS; i++)
    if (i != most && count[i] > 0) add_group(o, p, &naming[i], targets(p, &naming[i]), err);
  add_group(o, p, &naming[most], words("Linear"), err);
  return o;
}

/* Engines ask for the experts of a layer by projections that no file has ("experts.0.gate_proj"): an expression covers them where none of
 * the layer's experts is quantised. */
static void ignore_experts(mm_json *list, const mm_plan *p) {
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const uint32_t layer = p->tensor[i].layer;
    bool some = false, first = is_expert(p, i, layer) && !is_expert(p, i - 1, layer);
    for (size_t j = i; first && j < p->pack.tensor_count && is_expert(p, j, layer); j++) some = some || p->tensor[j].naming;
    char re[256], prefix[64] = "";
    for (size_t k = 0, n = 0; p->prefix[k] && n + 3 < sizeof prefix; k++)
      n += (size_t)snprintf(prefix + n, sizeof prefix - n, p->prefix[k] == '.' ? "\\%c" : "%c", p->prefix[k]);
    snprintf(re, sizeof re, "re:^%smodel\\.layers\\.%u\\.(block_sparse_moe|mlp)\\.experts\\..*$", prefix, layer);
    if (first && !some) mm_json_append(list, mm_json_new_str(re));
  }
}

static mm_json *ct_config(const mm_plan *p, mm_json *list, mm_err *err) {
  mm_json *groups = ct_groups(p, err), *o = parse("{\"kv_cache_scheme\": null}", err);
  const mm_json *format = mm_json_get(mm_json_get(groups, "group_0"), "format");
  ignore_experts(list, p);
  return MM_JSON_PUT(o, {"quant_method", mm_json_new_str("compressed-tensors")},
                     {"format", mm_json_new_str(mm_json_size(groups) > 1 ? "mixed-precision" : mm_json_str(format))},
                     {"quantization_status", mm_json_new_str("compressed")}, {"config_groups", groups}, {"ignore", list});
}

/* Into the plan's arena; takes j over. */
static const char *text_of(mm_plan *p, mm_json *j, mm_err *err) {
  char *text = mm_json_text(j, true, err), *kept = text ? mm_arena_printf(&p->pack.arena, err, "%s\n", text) : NULL;
  free(text);
  return kept;
}

mm_json *mm_target_format_plain(const mm_hf *hf, mm_err *err) {
  mm_json *config = mm_json_copy(hf->config, err);
  if (!config) return NULL;
  mm_json_remove(config, "quantization_config");
  mm_json_remove(config, "compression_config");
  return config;
}

bool mm_target_format_texts(mm_plan *p, mm_err *err) {
  mm_json *config = mm_target_format_plain(p->hf, err);
  if (!config) return false;
  const mm_target_format *d = p->target_format;
  if (d) mm_json_set(config, "quantization_config", d->config(p, left_out(p), err));
  p->text[0] = (mm_plan_text){"config.json", text_of(p, config, err)};
  p->text[1] = (mm_plan_text){MM_CARD, mm_card_text(p, d ? d->name : NULL, err)};
  if (d && d->file) p->text[2] = (mm_plan_text){d->file, text_of(p, d->file_config(p, left_out(p), err), err)};
  return p->text[0].text && p->text[1].text && (!p->text[2].name || p->text[2].text);
}
