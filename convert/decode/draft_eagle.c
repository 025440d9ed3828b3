/* The config of an EAGLE-3 draft in the layout of SpecForge: one Llama layer that is given embeddings and hidden states side by side. */
#include <string.h>

#include "convert/decode/draft_source.h"
#include "convert/source/encoding.h"

static bool lacks(mm_err *err, const char *path, const char *what, const char *expected) {
  return mm_fail(err, MM_UNSUPPORTED, "E_DRAFT", mm_at(path, NULL), "found %s, expected %s", what, expected);
}

/* A setting that is true or false; absent or null: `usual`. */
static bool flag(const mm_json *o, const char *key, bool usual, bool *out, const mm_json_ctx *at, mm_err *err) {
  const mm_json *v = mm_json_get(o, key);
  *out = mm_json_type_of(v) == MM_JSON_BOOL ? mm_json_bool(v) : usual;
  return mm_json_type_of(v) == MM_JSON_BOOL || mm_json_type_of(v) == MM_JSON_NULL ||
         MM_REFUSE(at, err, "%s: found another type, expected true or false", key);
}

/* Layers of the target whose outputs are read. SGLang and vLLM take the inputs of layers 2, L / 2 and L - 3 where the config has no ids.
 * Ids outside eagle_config are of another kind: vLLM takes the inputs of those layers. */
static bool read_taps(mm_dflash_config *c, const mm_json *o, const mm_json *eagle, const mm_model *target, const mm_json_ctx *at,
                      mm_err *err) {
  static const char key[] = "eagle_aux_hidden_state_layer_ids";
  const mm_json *ids = mm_json_get(eagle, key);
  if (mm_json_type_of(mm_json_get(o, key)) != MM_JSON_NULL)
    return lacks(err, at->file, "eagle_aux_hidden_state_layer_ids outside eagle_config", "them in eagle_config, as SpecForge writes them");
  if (mm_json_type_of(eagle) != MM_JSON_OBJ && mm_json_type_of(eagle) != MM_JSON_NULL)
    return MM_REFUSE(at, err, "eagle_config: found another type, expected an object");
  if (mm_json_type_of(ids) == MM_JSON_NULL) {
    if (target->layers < 6) return lacks(err, at->file, "no eagle_aux_hidden_state_layer_ids", "layers of the target");
    c->taps = 3, c->tap[0] = 1, c->tap[1] = target->layers / 2 - 1, c->tap[2] = target->layers - 4;
    return true;
  }
  return mm_draft_taps(c, ids, key, at, err);
}

static bool check_settings(const mm_json *o, const mm_json *eagle, const mm_json_ctx *at, mm_err *err) {
  const mm_json *act = mm_json_get(o, "hidden_act");
  bool attention, mlp, aux;
  if (mm_json_type_of(act) != MM_JSON_NULL && !mm_json_is(act, "silu")) return lacks(err, at->file, "another hidden_act", "silu");
  if (mm_json_type_of(mm_json_get(o, "rope_scaling")) != MM_JSON_NULL) return lacks(err, at->file, "rope_scaling", "none");
  if (!flag(o, "attention_bias", false, &attention, at, err) || !flag(o, "mlp_bias", false, &mlp, at, err) ||
      !flag(eagle, "use_aux_hidden_state", true, &aux, at, err))
    return false;
  if (attention || mlp) return lacks(err, at->file, "biases", "none");
  return aux || lacks(err, at->file, "use_aux_hidden_state false", "true");
}

bool mm_draft_eagle_config(mm_draft_source *s, const mm_json *o, const mm_model *target, const mm_json_ctx *at, mm_err *err) {
  mm_dflash_config *c = &s->c;
  const mm_json *eagle = mm_json_get(o, "eagle_config"), *width = mm_json_get(o, "target_hidden_size");
  const struct {
    const char *key;
    uint32_t hi, *out;
  } numbers[] = {{"num_hidden_layers", MM_DFLASH_LAYERS, &c->layers},
                 {"hidden_size", 1 << 16, &c->hidden},
                 {"num_attention_heads", 1 << 10, &c->heads},
                 {"num_key_value_heads", 1 << 10, &c->kv_heads},
                 {"head_dim", 1 << 10, &c->head_dim},
                 {"intermediate_size", 1 << 17, &c->intermediate},
                 {"vocab_size", INT32_MAX, &c->vocab},
                 {"draft_vocab_size", INT32_MAX, &c->draft_vocab}};
  *c = (mm_dflash_config){.kind = MM_DRAFT_EAGLE3};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    int64_t v;
    if (!mm_json_need_int(o, numbers[i].key, 1, numbers[i].hi, &v, at, err)) return false;
    *numbers[i].out = (uint32_t)v;
  }
  if (!check_settings(o, eagle, at, err) || !mm_json_need_number(o, "rms_norm_eps", &c->norm_eps, at, err) ||
      !mm_config_whole_rope((mm_config){o, at->file}, &c->rope_theta, err) || !read_taps(c, o, eagle, target, at, err))
    return false;
  if (mm_json_type_of(width) != MM_JSON_NULL && (mm_json_type_of(width) != MM_JSON_INT || mm_json_int(width) != c->hidden))
    return lacks(err, at->file, "another target_hidden_size", "hidden_size");
  bool output;
  if (!flag(o, "norm_before_residual", false, &c->norm_before_residual, at, err) || !flag(o, "norm_output", false, &output, at, err))
    return false;
  c->mapped = mm_draft_find(s, "d2t");
  if (!c->mapped && c->draft_vocab < c->vocab) /* t2d, if it is there, marks the ids without their order */
    return MM_REFUSE(at, err, "draft_vocab_size: found a head of %u of %u ids without d2t, expected d2t in model.safetensors",
                     c->draft_vocab, c->vocab);
  c->own_embed = mm_draft_find(s, "embed_tokens.weight");
  c->tap_norms = mm_draft_find(s, "fc_norm.0.weight");
  /* Without norms of the taps the word is SpecForge's, and says of the head alone that it comes after the norm. */
  c->norm_output = output && c->tap_norms;
  c->block = 1 + MM_EAGLE_CHAIN, c->causal[0] = true;
  return true;
}
