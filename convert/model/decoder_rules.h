/* Rules (rule.h) that the families share, as initialisers for the tables of arch_*.c. The order of a table's rows is the order of the
 * packed tensors in a layer, and of the rows of a joined tensor (q, k, v; w1, w3): moving a row changes every packed checkpoint. */
#ifndef MM_CONVERT_DECODER_RULES_H
#define MM_CONVERT_DECODER_RULES_H

#include "convert/model/rule.h"

#define L    "model.layers.{l}."
#define ATTN L "self_attn."
#define MOE  L "block_sparse_moe."

/* A rule; SAME: one whose packed name is the Hugging Face name. */
#define RULE(theirs, ours, rows, cols, divide, kind, layers) \
  { theirs, ours, rows, cols, divide, kind, layers }
#define SAME(name, rows, cols, divide, kind, layers) RULE(name, name, rows, cols, divide, kind, layers)

/* Embedding and input norm; attention's q, k and v of the given layers; o_proj, its norm and the router; experts, final norm and head. */
#define MM_RULES_FIRST                                                                                        \
  SAME("model.embed_tokens.weight", MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_VOCAB_ROWS, MM_KIND_EMBED, MM_ANY_LAYER), \
      SAME(L "input_layernorm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_ANY_LAYER)
#define MM_RULES_QKV(layers)                                                                                            \
  RULE(ATTN "q_proj.weight", ATTN "qkv_proj.weight", MM_DIM_Q, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, layers),         \
      RULE(ATTN "k_proj.weight", ATTN "qkv_proj.weight", MM_DIM_KV, MM_DIM_HIDDEN, MM_KV_ROWS, MM_KIND_LINEAR, layers), \
      RULE(ATTN "v_proj.weight", ATTN "qkv_proj.weight", MM_DIM_KV, MM_DIM_HIDDEN, MM_KV_ROWS, MM_KIND_LINEAR, layers)
#define MM_RULES_OUT(layers)                                                                                               \
  SAME(ATTN "o_proj.weight", MM_DIM_HIDDEN, MM_DIM_Q, MM_COLS, MM_KIND_LINEAR, layers),                                    \
      SAME(L "post_attention_layernorm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_ANY_LAYER), \
      SAME(MOE "gate.weight", MM_DIM_EXPERTS, MM_DIM_HIDDEN, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_EXPERTS_LAYER)
#define MM_RULES_LAST                                                                                                         \
  RULE(MOE "experts.{e}.w1.weight", MOE "experts.w13_weight", MM_DIM_INTER, MM_DIM_HIDDEN, MM_INTER_ROWS, MM_KIND_EXPERT,     \
       MM_EXPERTS_LAYER),                                                                                                     \
      RULE(MOE "experts.{e}.w3.weight", MOE "experts.w13_weight", MM_DIM_INTER, MM_DIM_HIDDEN, MM_INTER_ROWS, MM_KIND_EXPERT, \
           MM_EXPERTS_LAYER),                                                                                                 \
      RULE(MOE "experts.{e}.w2.weight", MOE "experts.w2_weight", MM_DIM_HIDDEN, MM_DIM_INTER, MM_INTER_COLS, MM_KIND_EXPERT,  \
           MM_EXPERTS_LAYER),                                                                                                 \
      SAME("model.norm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_ANY_LAYER),                    \
      SAME("lm_head.weight", MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_VOCAB_ROWS, MM_KIND_EMBED, MM_ANY_LAYER)

#endif
