/* Reading a draft's config, checking its tensors, and laying them side by side. */
#include "convert/decode/draft_source.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/source/encoding.h"
#include "formats/json.h"
#include "loader/companions.h"

#define CONFIG_MAX (UINT64_C(1) << 20)

/* ---- config.json ---- */

static bool lacks(mm_err *err, const char *path, const char *what, const char *expected) {
  return mm_fail(err, MM_UNSUPPORTED, "E_DRAFT", mm_at(path, NULL), "found %s, expected %s", what, expected);
}

bool mm_draft_taps(mm_dflash_config *c, const mm_json *ids, const char *key, const mm_json_ctx *at, mm_err *err) {
  const size_t count = mm_json_type_of(ids) == MM_JSON_ARR ? mm_json_size(ids) : 0;
  if (count == 0 || count > MM_DFLASH_TAPS)
    return mm_fail(err, MM_UNSUPPORTED, "E_DRAFT", mm_at(at->file, NULL), "found %s%s, expected 1 to %u layers of the target",
                   mm_json_type_of(ids) == MM_JSON_NULL ? "no " : "another kind of ", key, MM_DFLASH_TAPS);
  for (c->taps = 0; c->taps < count; c->taps++) {
    const mm_json *v = mm_json_at(ids, c->taps);
    if (mm_json_type_of(v) != MM_JSON_INT || mm_json_int(v) < 0 || mm_json_int(v) >= MM_MAX_LAYERS)
      return MM_REFUSE(at, err, "%s: found %s, expected layers of the target", key, MM_SHOWN_JSON(v));
    c->tap[c->taps] = (uint32_t)mm_json_int(v);
  }
  return true;
}

/* True where a setting is absent, null or false. */
static bool is_off(const mm_json *v) {
  return mm_json_type_of(v) == MM_JSON_NULL || (mm_json_type_of(v) == MM_JSON_BOOL && !mm_json_bool(v));
}

/* Refuses settings that change the numbers and are not served. */
static bool check_settings(const mm_json *o, const mm_json *flash, const char *path, mm_err *err) {
  const mm_json *act = mm_json_get(o, "hidden_act"), *scaling = mm_json_get(o, "rope_scaling");
  if (mm_json_type_of(flash) != MM_JSON_OBJ)
    return lacks(err, path, "no dflash_config and no draft_vocab_size", "the config of a DFlash or EAGLE-3 draft");
  if (mm_json_type_of(act) != MM_JSON_NULL && !mm_json_is(act, "silu")) return lacks(err, path, "another hidden_act", "silu");
  if (mm_json_type_of(scaling) != MM_JSON_NULL) return lacks(err, path, "rope_scaling", "none");
  if (!is_off(mm_json_get(o, "attention_bias"))) return lacks(err, path, "attention_bias", "none");
  if (!is_off(mm_json_get(flash, "attention_sink_bias"))) return lacks(err, path, "attention_sink_bias", "none");
  return true;
}

static bool need(const mm_json *o, const char *key, uint32_t hi, uint32_t *out, const mm_json_ctx *at, mm_err *err) {
  int64_t v;
  if (!mm_json_need_int(o, key, 0, hi, &v, at, err)) return false;
  *out = (uint32_t)v;
  return true;
}

/* One value of a type that the config and dflash_config may both have; NULL: neither has it. Two that differ, and one of another type, are
 * errors. */
static bool either(const mm_json *a, const mm_json *b, mm_json_type type, const char *what, const mm_json **out, const mm_json_ctx *at,
                   mm_err *err) {
  const bool has_a = mm_json_type_of(a) == type, has_b = mm_json_type_of(b) == type;
  *out = has_a ? a : has_b ? b : NULL;
  if ((!has_a && mm_json_type_of(a) != MM_JSON_NULL) || (!has_b && mm_json_type_of(b) != MM_JSON_NULL))
    return MM_REFUSE(at, err, "found another type in %s, expected %s", what, type == MM_JSON_BOOL ? "true or false" : "an integer");
  if (!has_a || !has_b || (type == MM_JSON_BOOL ? mm_json_bool(a) == mm_json_bool(b) : mm_json_int(a) == mm_json_int(b))) return true;
  return MM_REFUSE(at, err, "found two values of %s, expected one", what);
}

/* Windows and causality of the layers: what the config says of all, else sliding layers are causal. */
static bool read_layers(mm_dflash_config *c, const mm_json *o, const mm_json *flash, const mm_json_ctx *at, mm_err *err) {
  const mm_json *types = mm_json_get(o, "layer_types"), *whole, *width;
  if (!either(mm_json_get(o, "is_causal"), mm_json_get(flash, "causal"), MM_JSON_BOOL, "is_causal and dflash_config.causal", &whole, at,
              err) ||
      !either(mm_json_get(flash, "swa_window_size"), mm_json_get(o, "sliding_window"), MM_JSON_INT,
              "dflash_config.swa_window_size and sliding_window", &width, at, err))
    return false;
  if (mm_json_type_of(types) != MM_JSON_NULL && (mm_json_type_of(types) != MM_JSON_ARR || mm_json_size(types) != c->layers))
    return MM_REFUSE(at, err, "layer_types: found %s, expected a list of %u layers", MM_SHOWN_JSON(types), c->layers);
  if (mm_json_type_of(types) == MM_JSON_NULL && mm_json_bool(mm_json_get(flash, "use_swa")))
    return lacks(err, at->file, "use_swa without layer_types", "layer_types");
  for (uint32_t l = 0; l < c->layers; l++) {
    const mm_json *type = mm_json_type_of(types) == MM_JSON_ARR ? mm_json_at(types, l) : NULL;
    const char *word = mm_json_type_of(type) == MM_JSON_STR ? mm_json_str(type) : "no word";
    const bool sliding = mm_json_is(type, "sliding_attention");
    if (type && !sliding && !mm_json_is(type, "full_attention")) return lacks(err, at->file, word, "sliding_attention or full_attention");
    if (sliding && (mm_json_type_of(width) != MM_JSON_INT || mm_json_int(width) < 1 || mm_json_int(width) > INT32_MAX))
      return lacks(err, at->file, "a sliding layer without sliding_window", "a window of 1 or more");
    c->window[l] = sliding ? (uint32_t)mm_json_int(width) : 0;
    c->causal[l] = mm_json_type_of(whole) == MM_JSON_BOOL ? mm_json_bool(whole) : sliding;
  }
  return true;
}

/* A DFlash draft has no ids of its own: the embedding and head are the target's. */
static bool check_vocab(const mm_json *o, const mm_model *target, const mm_json_ctx *at, mm_err *err) {
  int64_t vocab = target->vocab;
  if (mm_json_type_of(mm_json_get(o, "vocab_size")) == MM_JSON_NULL) return true;
  if (!mm_json_need_int(o, "vocab_size", 1, INT32_MAX, &vocab, at, err)) return false;
  return vocab == target->vocab ||
         MM_REFUSE(at, err, "vocab_size: found %lld ids, expected the target's %u", (long long)vocab, target->vocab);
}

static bool read_config(mm_dflash_config *c, const mm_json *o, const mm_model *target, const mm_json_ctx *at, mm_err *err) {
  const mm_json *flash = mm_json_get(o, "dflash_config"), *taps = mm_json_get(flash, "target_layer_ids");
  if (!check_settings(o, flash, at->file, err) || !check_vocab(o, target, at, err)) return false;
  if (!need(o, "num_hidden_layers", MM_DFLASH_LAYERS, &c->layers, at, err) || !need(o, "hidden_size", 1 << 16, &c->hidden, at, err) ||
      !need(o, "num_attention_heads", 1 << 10, &c->heads, at, err) || !need(o, "num_key_value_heads", 1 << 10, &c->kv_heads, at, err) ||
      !need(o, "head_dim", 1 << 10, &c->head_dim, at, err) || !need(o, "intermediate_size", 1 << 17, &c->intermediate, at, err) ||
      !need(o, "block_size", MM_DFLASH_BLOCK, &c->block, at, err) || !need(flash, "mask_token_id", INT32_MAX, &c->mask_id, at, err) ||
      !mm_json_need_number(o, "rms_norm_eps", &c->norm_eps, at, err) ||
      !mm_config_whole_rope((mm_config){o, at->file}, &c->rope_theta, err))
    return false;
  return mm_draft_taps(c, taps, "target_layer_ids", at, err) && read_layers(c, o, flash, at, err);
}

/* EAGLE-3's configs say how many ids their head has. */
static bool is_eagle(const mm_json *o) {
  return mm_json_type_of(mm_json_get(o, "dflash_config")) == MM_JSON_NULL &&
         mm_json_type_of(mm_json_get(o, "draft_vocab_size")) != MM_JSON_NULL;
}

static bool load_config(mm_draft_source *s, const mm_model *target, mm_err *err) {
  const mm_path path = mm_path_of(s->dir, "config.json");
  const mm_json_ctx at = {.file = path.text, .status = MM_BAD_INPUT, .code = "E_DRAFT"};
  mm_json *o = mm_json_load(path.text, CONFIG_MAX, err);
  bool ok = o && (is_eagle(o) ? mm_draft_eagle_config(s, o, target, &at, err) : read_config(&s->c, o, target, &at, err));
  mm_json_free(o);
  /* The rules of the file that will be made. */
  mm_dflash_config same;
  char *text = ok ? mm_dflash_text(&s->c, err) : NULL;
  ok = text && mm_dflash_parse(&same, text, path.text, MM_BAD_INPUT, err) && mm_dflash_fits(&s->c, path.text, target, MM_BAD_INPUT, err);
  free(text);
  return ok;
}

/* ---- tensors ---- */

enum { PIECES = MM_DRAFT_PIECES };

static const mm_st_tensor *find_prefixed(const mm_draft_source *s, const char *prefix, const char *name) {
  char text[128];
  snprintf(text, sizeof text, "%s%s", prefix, name);
  const mm_st_tensor *t = mm_st_find(&s->st, text);
  if (t) return t;
  snprintf(text, sizeof text, "model.%s%s", prefix, name);
  return mm_st_find(&s->st, text);
}

const mm_st_tensor *mm_draft_find(const mm_draft_source *s, const char *name) {
  static const char layer[] = "layers.0.";
  const mm_st_tensor *t = find_prefixed(s, "", name);
  if (t || s->c.kind != MM_DRAFT_EAGLE3) return t;
  if (strncmp(name, layer, sizeof layer - 1) == 0) return find_prefixed(s, "midlayer.", name + sizeof layer - 1);
  if (strcmp(name, "hidden_norm.weight") != 0) return NULL;
  t = find_prefixed(s, "midlayer.", name);
  return t ? t : find_prefixed(s, layer, name);
}

/* Rows of piece k of `count`: q has those of the heads, k and v those of the kv heads; gate and up have as many. */
static uint32_t rows_of_piece(const mm_dflash_config *c, const mm_dflash_tensor *t, uint32_t k, uint32_t count) {
  return count == PIECES ? (k ? c->kv_heads : c->heads) * c->head_dim : t->rows / count;
}

/* Fused names and what they are made of; other tensors have one piece of their own name. */
bool mm_draft_pieces_of(const mm_draft_source *s, const mm_dflash_tensor *t, mm_draft_pieces *out, mm_err *err) {
  static const struct {
    const char *fused, *piece[PIECES];
  } fused[] = {{"self_attn.qkv_proj.weight", {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}},
               {"mlp.gate_up_proj.weight", {"mlp.gate_proj.weight", "mlp.up_proj.weight", NULL}}};
  const char *name[PIECES] = {t->name, NULL, NULL};
  char text[PIECES][64];
  for (size_t i = 0; i < sizeof fused / sizeof *fused; i++) {
    const char *end = strstr(t->name, fused[i].fused);
    for (uint32_t k = 0; end && k < PIECES && fused[i].piece[k]; k++) {
      snprintf(text[k], sizeof text[k], "%.*s%s", (int)(end - t->name), t->name, fused[i].piece[k]);
      name[k] = text[k];
    }
  }
  const uint32_t count = name[2] ? 3 : name[1] ? 2 : 1;
  *out = (mm_draft_pieces){.data = s->map.data};
  if (s->fused) { /* as mm_dflash_open found it */
    *out = (mm_draft_pieces){{mm_st_find(&s->packed.st, t->name)}, s->packed.map.data, 1};
    return true;
  }
  for (uint32_t k = 0; k < count; k++) {
    const uint32_t rows = rows_of_piece(&s->c, t, k, count);
    const mm_shape shape = t->cols ? mm_shape2(rows, t->cols) : mm_shape1(rows);
    const mm_st_tensor *p = mm_draft_find(s, name[k]);
    if (!p) return mm_fail(err, MM_BAD_INPUT, "E_DRAFT", mm_at(s->st.path, name[k]), "found no such tensor, expected one as in the config");
    const bool typed = t->ids ? p->dtype == MM_I64 : p->dtype == MM_BF16 || p->dtype == MM_F32;
    char found[80], expected[80];
    if (!mm_shape_equal(&p->shape, &shape))
      return mm_fail(err, MM_BAD_INPUT, "E_DRAFT", mm_at(s->st.path, p->name), "found shape %s, expected %s as in the config",
                     mm_shape_text(&p->shape, found, sizeof found), mm_shape_text(&shape, expected, sizeof expected));
    if (!typed)
      return mm_fail(err, MM_BAD_INPUT, "E_DRAFT", mm_at(s->st.path, p->name), "found weights of %s, expected %s", mm_dtype_name(p->dtype),
                     t->ids ? "I64" : "BF16 or F32");
    if (k && p->dtype != out->piece[0]->dtype)
      return mm_fail(err, MM_BAD_INPUT, "E_DRAFT", mm_at(s->st.path, p->name),
                     "found weights of %s, expected %s as in \"%s\", with which they are joined", mm_dtype_name(p->dtype),
                     mm_dtype_name(out->piece[0]->dtype), out->piece[0]->name);
    out->piece[out->count++] = p;
  }
  return true;
}

/* Copies of the target's embedding and head, which a DFlash draft shares; t2d, which d2t says too. */
static bool is_shared(const mm_draft_source *s, const char *name) {
  if (strncmp(name, "model.", 6) == 0) name += 6;
  if (s->c.kind == MM_DRAFT_EAGLE3) return strcmp(name, "t2d") == 0;
  return strcmp(name, "embed_tokens.weight") == 0 || strcmp(name, "lm_head.weight") == 0;
}

/* They have the target's shapes; t2d says of each of the target's ids whether the draft has it. */
static bool check_shared(const mm_draft_source *s, const mm_st_tensor *t, const mm_model *target, mm_err *err) {
  const bool ids = s->c.kind == MM_DRAFT_EAGLE3;
  const mm_shape shape = ids ? mm_shape1(target->vocab) : mm_shape2(target->vocab, target->hidden);
  char found[80], expected[80];
  if (mm_shape_equal(&t->shape, &shape) && (ids ? t->dtype == MM_BOOL : t->dtype == MM_BF16 || t->dtype == MM_F32)) return true;
  return mm_fail(err, MM_BAD_INPUT, "E_DRAFT", mm_at(s->st.path, t->name), "found %s %s, expected %s %s", mm_dtype_name(t->dtype),
                 mm_shape_text(&t->shape, found, sizeof found), ids ? "BOOL" : "BF16 or F32",
                 mm_shape_text(&shape, expected, sizeof expected));
}

static bool check_tensors(const mm_draft_source *s, const mm_model *target, mm_err *err) {
  mm_dflash_tensor t;
  bool *used = mm_calloc(s->st.count, sizeof *used, err), ok = used;
  for (uint32_t i = 0; ok && mm_dflash_tensor_at(&s->c, i, &t); i++) {
    mm_draft_pieces p;
    ok = mm_draft_pieces_of(s, &t, &p, err);
    for (uint32_t k = 0; ok && k < p.count; k++) used[p.piece[k] - s->st.tensor] = true;
  }
  for (size_t i = 0; ok && i < s->st.count; i++) {
    const mm_st_tensor *x = &s->st.tensor[i];
    if (used[i]) continue;
    ok = is_shared(s, x->name) ? check_shared(s, x, target, err)
                               : mm_fail(err, MM_BAD_INPUT, "E_DRAFT", mm_at(s->st.path, x->name),
                                         "found a tensor that such a draft does not have, expected none");
  }
  free(used);
  return ok;
}

/* t2d, the mask of the target's ids that the draft has, is that of the head's ids. vLLM and SGLang leave it out unread. */
static bool check_mask(const mm_draft_source *s, const int64_t *step, mm_err *err) {
  const mm_st_tensor *t = find_prefixed(s, "", "t2d");
  bool *named = t ? mm_calloc(s->c.vocab, sizeof *named, err) : NULL, ok = !t || named;
  for (uint32_t i = 0; named && i < s->c.draft_vocab; i++) named[i + step[i]] = true;
  for (uint32_t i = 0; ok && named && i < s->c.vocab; i++)
    ok = s->map.data[t->offset + i] == named[i] ||
         mm_fail(err, MM_BAD_INPUT, "E_DRAFT", mm_at(s->st.path, t->name), "found %u at id %u, expected %u as %s",
                 s->map.data[t->offset + i], i, named[i], s->c.mapped ? "d2t has it" : "the head has all ids in their order");
  free(named);
  return ok;
}

/* Ids that the head's become: those of d2t, or its own. */
static bool check_ids(const mm_draft_source *s, mm_err *err) {
  if (s->c.kind != MM_DRAFT_EAGLE3) return true;
  const mm_st_tensor *t = s->c.mapped ? mm_draft_find(s, "d2t") : NULL;
  int64_t *step = mm_calloc(s->c.draft_vocab, sizeof *step, err); /* a source need not be aligned */
  if (step && t) memcpy(step, s->map.data + t->offset, s->c.draft_vocab * sizeof *step);
  const bool ok = step && mm_dflash_check_ids(&s->c, step, s->st.path, MM_BAD_INPUT, err) && check_mask(s, step, err);
  free(step);
  return ok;
}

bool mm_draft_source_open(mm_draft_source *s, const char *dir, const mm_model *target, const mm_scheme *quant, mm_err *err) {
  const mm_path path = mm_path_of(dir, "model.safetensors");
  mm_file f = MM_FILE_NONE;
  *s = (mm_draft_source){.dir = strdup(dir)};
  bool ok = s->dir || mm_fail_memory(err, 0);
  ok = ok && mm_st_open(&s->st, path.text, MM_BAD_INPUT, err) && load_config(s, target, err) && check_tensors(s, target, err) &&
       mm_file_open(&f, path.text, err) && mm_map_open(&s->map, &f, path.text, err) && check_ids(s, err);
  mm_file_close(&f);
  s->c.quant = quant;
  ok = ok && mm_dflash_fits_quant(&s->c, path.text, MM_UNSUPPORTED, err);
  if (!ok) mm_draft_source_close(s);
  return ok;
}

bool mm_draft_source_packed(mm_draft_source *s, const mm_pack *from, const mm_scheme *quant, mm_err *err) {
  *s = (mm_draft_source){.fused = true};
  bool ok = mm_dflash_open(&s->packed, from->dir, &from->model, err) &&
            mm_dflash_verify(&s->packed, mm_pack_find_file(from, MM_DFLASH_FILE), err);
  s->c = s->packed.c, s->c.quant = quant;
  ok = ok && mm_dflash_fits_quant(&s->c, s->packed.st.path, MM_UNSUPPORTED, err);
  if (!ok) mm_draft_source_close(s);
  return ok;
}

bool mm_draft_source_find(mm_draft_source *s, bool *given, const char *dir, const char *word, const mm_pack *from, const mm_model *target,
                          mm_err *err) {
  const mm_scheme *quant = word ? mm_dflash_scheme(word) : NULL; /* "none" is no scheme */
  const bool there = from && mm_pack_find_file(from, MM_DFLASH_FILE);
  *given = dir;
  if (dir) return mm_draft_source_open(s, dir, target, quant, err);
  if (word && !there)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found --draft-quant without --draft, and a source without a draft");
  if (!quant) return true;
  mm_dflash *d = mm_calloc(1, sizeof *d, err);
  const bool ok = d && mm_dflash_open(d, from->dir, target, err);
  *given = ok && d->c.quant != quant;
  if (d) mm_dflash_close(d);
  free(d);
  return ok && (!*given || mm_draft_source_packed(s, from, quant, err));
}

void mm_draft_source_close(mm_draft_source *s) {
  mm_dflash_close(&s->packed);
  mm_map_close(&s->map);
  mm_st_close(&s->st);
  free(s->dir);
  *s = (mm_draft_source){0};
}
