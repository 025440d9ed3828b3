/* The quantization_config of each target format. */
#include "convert/plan/target_config.h"

#include <stdio.h>
#include <string.h>

static mm_json *parse(const char *text, mm_err *err) { return mm_json_parse(text, strlen(text), "quantization_config", err); }

/* A matrix's module: its name without ".weight". */
static void add_module(mm_json *list, const char *source) {
  mm_json_append(list, mm_json_new_str(MM_FORMATTED(256, "%.*s", (int)(strlen(source) - strlen(".weight")), source)));
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
  for (size_t j = i; j < p->pack.tensor_count && is_expert(p, j, layer); j++)
    if (p->tensor[j].naming) return;
  size_t n = (size_t)(strstr(source, ".experts.") + strlen(".experts") - source);
  char *name = MM_FORMATTED(256, "%.*s", (int)n, source);
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

mm_json *mm_target_left_out(const mm_plan *p) {
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

mm_json *mm_target_fp8_config(const mm_plan *p, mm_json *list, mm_err *err) {
  return MM_JSON_PUT(parse(first_naming(p)->config, err), {"modules_to_not_convert", list});
}

/* What one group of a config describes. */
typedef struct variant {
  const mm_target_naming *naming;
  uint32_t group; /* columns of a scale; 0: the whole row */
} variant;

static bool in_variant(const mm_plan_tensor *pt, const variant *v) { return pt->naming == v->naming && pt->config_group == v->group; }

static size_t tensors_of(const mm_plan *p, const variant *v) {
  size_t count = 0;
  for (size_t i = 0; i < p->pack.tensor_count; i++) count += in_variant(&p->tensor[i], v);
  return count;
}

/* The variant of tensor i if none before it has the same; without a naming otherwise. */
static variant new_variant(const mm_plan *p, size_t i) {
  const variant v = {p->tensor[i].naming, p->tensor[i].config_group};
  for (size_t j = 0; v.naming && j < i; j++)
    if (in_variant(&p->tensor[j], &v)) return (variant){0};
  return v;
}

/* Of most tensors, the first in the table's order among equals. */
static variant commonest(const mm_plan *p) {
  variant most = {0};
  size_t best = 0;
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const variant v = new_variant(p, i);
    const size_t n = v.naming ? tensors_of(p, &v) : 0;
    if (n > best || (n > 0 && n == best && v.naming < most.naming)) most = v, best = n;
  }
  return most;
}

static mm_json *group_size(const variant *v) { return mm_json_new_int(v->group ? (int64_t)v->group : -1); }

static mm_json *producer(void) { return MM_JSON_NEW({"name", mm_json_new_str("modelopt")}, {"version", mm_json_new_str("0.41.0")}); }

static mm_json *words(const char *word) {
  mm_json *a = mm_json_new_arr();
  mm_json_append(a, mm_json_new_str(word));
  return a;
}

mm_json *mm_target_modelopt_config(const mm_plan *p, mm_json *list, mm_err *err) {
  const mm_target_naming *s = first_naming(p);
  mm_json *group = MM_JSON_PUT(parse(s->config, err), {"targets", words("Linear")});
  return MM_JSON_NEW({"quant_method", mm_json_new_str("modelopt")}, {"quant_algo", mm_json_new_str(s->algorithm)},
                     {"config_groups", MM_JSON_NEW({"group_0", group})}, {"ignore", list}, {"producer", producer()});
}

mm_json *mm_target_modelopt_file(const mm_plan *p, mm_json *list, mm_err *err) {
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

/* True if every expert of every layer is of this variant. */
static bool all_experts(const mm_plan *p, const variant *v) {
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    if (p->tensor[i].rule[0]->kind == MM_KIND_EXPERT && !in_variant(&p->tensor[i], v)) return false;
  return true;
}

/* True if a module of this pattern is a matrix of another variant, or what engines fuse its matrices into: M1's lightning layers have a
 * "qkv_proj", which is also the fused matrix of the other layers. */
static bool other_variant(const mm_plan *p, const variant *v, const char *pattern, size_t n) {
  char theirs[256], name[256];
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    if (t->vector || !p->tensor[i].naming || in_variant(&p->tensor[i], v)) continue;
    snprintf(theirs, sizeof theirs, "%s%s", p->prefix, p->tensor[i].rule[0]->theirs);
    if (module_length(theirs) == n && strncmp(theirs, pattern, n) == 0) return true;
    if (fused_name(theirs, t->piece_count, name) && strlen(name) == n && strncmp(name, pattern, n) == 0) return true;
  }
  return false;
}

/* A module of a rule, of piece `piece` or what engines fuse all pieces into: one expression for all layers, or a name for each where the
 * expression would fit modules of another variant. */
static void add_module_of(mm_json *list, const mm_plan *p, const variant *v, const mm_rule *rule, const char *pattern, size_t n,
                          int piece) {
  char name[256];
  if (!other_variant(p, v, pattern, n)) {
    add_pattern(list, pattern, n);
    return;
  }
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    if (p->tensor[i].rule[0] != rule) continue;
    if (piece >= 0) add_module(list, t->piece[piece].source);
    if (piece < 0 && fused_name(t->piece[0].source, t->piece_count, name)) mm_json_append(list, mm_json_new_str(name));
  }
}

/* A rule's modules in all layers, and where engines fuse them the fused one: "qkv_proj", the experts of a layer as one. */
static void add_rule(mm_json *list, const mm_plan *p, const variant *v, const mm_plan_tensor *pt, unsigned piece, unsigned pieces) {
  char theirs[256], name[256];
  snprintf(theirs, sizeof theirs, "%s%s", p->prefix, pt->rule[piece]->theirs);
  const char *experts = strstr(theirs, ".experts.{e}.");
  add_module_of(list, p, v, pt->rule[0], theirs, module_length(theirs), (int)piece);
  if (piece == 0 && fused_name(theirs, pieces, name)) add_module_of(list, p, v, pt->rule[0], name, strlen(name), -1);
  if (!experts || piece != 0 || pieces != 2 || !all_experts(p, v)) return; /* w2 comes with w1 and w3 */
  static const char *const fused[] = {"", ".gate_up_proj", ".down_proj"};
  for (size_t i = 0; i < sizeof fused / sizeof *fused; i++) {
    snprintf(name, sizeof name, "%.*s%s", (int)(experts + strlen(".experts") - theirs), theirs, fused[i]);
    add_pattern(list, name, strlen(name));
  }
}

/* True if every tensor of a rule is of this variant. */
static bool whole_rule(const mm_plan *p, const mm_rule *r, const variant *v) {
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    if (p->tensor[i].rule[0] == r && !in_variant(&p->tensor[i], v)) return false;
  return true;
}

/* The modules of one variant: one expression for a whole rule, each by its name otherwise. */
static mm_json *targets(const mm_plan *p, const variant *v) {
  const mm_rule *last = NULL; /* tensors of one rule mostly follow one another */
  bool whole = false;
  mm_json *list = mm_json_new_arr(), *done = mm_json_new_obj(); /* rules that are listed as a whole */
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    const mm_plan_tensor *pt = &p->tensor[i];
    if (!in_variant(pt, v)) continue;
    if (pt->rule[0] != last) whole = whole_rule(p, pt->rule[0], v);
    last = pt->rule[0];
    if (whole && mm_json_get(done, last->theirs)) continue;
    for (unsigned j = 0; whole && j < t->piece_count; j++) add_rule(list, p, v, pt, j, t->piece_count);
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
static mm_json *words_group(const variant *v, mm_err *err) {
  mm_json *o = parse("{\"format\": \"pack-quantized\", \"input_activations\": null, \"output_activations\": null}", err);
  mm_json *weights = parse(v->naming->config, err);
  MM_JSON_PUT(weights, {"strategy", mm_json_new_str(v->group ? "group" : "channel")}, {"group_size", group_size(v)});
  return MM_JSON_PUT(o, {"weights", weights});
}

/* Its group of 4-bit integers with BF16 scales; config is that of the inputs. */
static mm_json *integer_group(const variant *v, mm_err *err) {
  char text[512];
  snprintf(text, sizeof text,
           GROUP("pack-quantized", INT("4") "\"strategy\": \"%s\", \"group_size\": %lld, \"actorder\": null, " STATIC, "%s"),
           v->group ? "group" : "channel", v->group ? (long long)v->group : -1LL, v->naming->config);
  return parse(text, err);
}

static void add_group(mm_json *groups, const variant *v, mm_json *modules, mm_err *err) {
  const char *name = MM_FORMATTED(32, "group_%zu", mm_json_size(groups));
  mm_json *group = v->naming->form ? words_group(v, err) : v->naming->any_group ? integer_group(v, err) : parse(v->naming->config, err);
  mm_json_set(groups, name, MM_JSON_PUT(group, {"targets", modules}));
}

/* The next naming of the table that the plan has; NULL: the first. */
static const mm_target_naming *next_naming(const mm_plan *p, const mm_target_naming *after) {
  const mm_target_naming *next = NULL;
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_target_naming *s = p->tensor[i].naming;
    if (s && (!after || s > after) && (!next || s < next)) next = s;
  }
  return next;
}

/* The group of the commonest variant names every linear module and comes last: readers take the first group that a module fits. */
static mm_json *ct_groups(const mm_plan *p, mm_err *err) {
  const variant most = commonest(p);
  mm_json *o = mm_json_new_obj();
  for (const mm_target_naming *s = next_naming(p, NULL); s; s = next_naming(p, s))
    for (size_t i = 0; i < p->pack.tensor_count; i++) {
      const variant v = p->tensor[i].naming == s ? new_variant(p, i) : (variant){0};
      if (v.naming && (v.naming != most.naming || v.group != most.group)) add_group(o, &v, targets(p, &v), err);
    }
  add_group(o, &most, words("Linear"), err);
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

mm_json *mm_target_ct_config(const mm_plan *p, mm_json *list, mm_err *err) {
  mm_json *groups = ct_groups(p, err), *o = parse("{\"kv_cache_scheme\": null}", err);
  const mm_json *format = mm_json_get(mm_json_get(groups, "group_0"), "format");
  ignore_experts(list, p);
  return MM_JSON_PUT(o, {"quant_method", mm_json_new_str("compressed-tensors")},
                     {"format", mm_json_new_str(mm_json_size(groups) > 1 ? "mixed-precision" : mm_json_str(format))},
                     {"quantization_status", mm_json_new_str("compressed")}, {"config_groups", groups}, {"ignore", list});
}

/* GPTQModel's rules for modules that are not quantised, then for those in groups of another size than `most`; takes the list over. */
static mm_json *module_rules(const mm_plan *p, const variant *most, mm_json *list) {
  mm_json *rules = mm_json_failed(list) ? NULL : mm_json_new_obj();
  for (size_t i = 0; i < mm_json_size(list); i++)
    mm_json_set(rules, MM_FORMATTED(512, "-:^%s$", mm_json_str(mm_json_at(list, i))), mm_json_new_obj());
  mm_json_free(list);
  for (size_t i = 0; i < p->pack.tensor_count; i++) {
    const variant v = new_variant(p, i);
    mm_json *modules = v.naming && v.group != most->group ? targets(p, &v) : NULL;
    if (modules && mm_json_failed(modules)) mm_json_set(rules, "", NULL);
    for (size_t j = 0; j < mm_json_size(modules); j++) {
      const char *module = mm_json_str(mm_json_at(modules, j));
      const bool expression = strncmp(module, "re:", 3) == 0;
      const char *rule = MM_FORMATTED(512, expression ? "+:%s" : "+:^%s$", expression ? module + 3 : module);
      mm_json_set(rules, rule, MM_JSON_NEW({"group_size", group_size(&v)}));
    }
    mm_json_free(modules);
  }
  return rules;
}

mm_json *mm_target_words_config(const mm_plan *p, mm_json *list, mm_err *err) {
  const variant most = commonest(p);
  const mm_target_naming *s = first_naming(p); /* every tensor's */
  const bool second = strstr(p->pack.tool, ", from gptq_v2");
  mm_json *o = MM_JSON_PUT(parse(s->config, err), {"group_size", group_size(&most)});
  if (s->form == MM_WORDS_AWQ) return MM_JSON_PUT(o, {"modules_to_not_convert", list});
  return MM_JSON_PUT(o, {"checkpoint_format", mm_json_new_str(second ? "gptq_v2" : "gptq")}, {"dynamic", module_rules(p, &most, list)});
}
