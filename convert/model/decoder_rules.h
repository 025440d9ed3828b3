/* Rows of the tables of rules, and those that the families share. For the arch_*.c. */
#ifndef MM_CONVERT_DECODER_RULES_H
#define MM_CONVERT_DECODER_RULES_H

#include "convert/model/rule.h"

#define L    "model.layers.{l}."
#define ATTN L "self_attn."
#define MOE  L "block_sparse_moe."

#define RULE(theirs, ours, rows, cols, divide, kind, layers) \
  { theirs, ours, rows, cols, divide, kind, layers }
#define SAME(name, rows, cols, divide, kind, layers) RULE(name, name, rows, cols, divide, kind, layers)

#define MM_RULES_FIRST                                                                                        \
  SAME("model.embed_tokens.weight", MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_VOCAB_ROWS, MM_KIND_EMBED, MM_ANY_LAYER), \
      SAME(L "input_layernorm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_KEEP, MM_ANY_LAYER)
#define MM_RULES_QKV(layers)                                                                                            \
  RULE(ATTN "q_proj.weight", ATTN "qkv_proj.weight", MM_DIM_Q, MM_DIM_HIDDEN, MM_ROWS, MM_KIND_LINEAR, layers),         \
      RULE(ATTN "k_proj.weight", ATTN "qkv_proj.weight", MM_DIM_KV, MM_DIM_HIDDEN, MM_KV_ROWS, MM_KIND_LINEAR, layers), \
      RULE(ATTN "v_proj.weight", ATTN "qkv_proj.weight", MM_DIM_KV, MM_DIM_HIDDEN, MM_KV_ROWS, MM_KIND_LINEAR, layers)
#define MM_RULES_OUT(layers)                                                                                       \
  SAME(ATTN "o_proj.weight", MM_DIM_HIDDEN, MM_DIM_Q, MM_COLS, MM_KIND_LINEAR, layers),                            \
      SAME(L "post_attention_layernorm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_KEEP, MM_ANY_LAYER), \
      SAME(MOE "gate.weight", MM_DIM_EXPERTS, MM_DIM_HIDDEN, MM_WHOLE, MM_KIND_KEEP, MM_EXPERTS_LAYER)
#define MM_RULES_LAST                                                                                                         \
  RULE(MOE "experts.{e}.w1.weight", MOE "experts.w13_weight", MM_DIM_INTER, MM_DIM_HIDDEN, MM_INTER_ROWS, MM_KIND_EXPERT,     \
       MM_EXPERTS_LAYER),                                                                                                     \
      RULE(MOE "experts.{e}.w3.weight", MOE "experts.w13_weight", MM_DIM_INTER, MM_DIM_HIDDEN, MM_INTER_ROWS, MM_KIND_EXPERT, \
           MM_EXPERTS_LAYER),                                                                                                 \
      RULE(MOE "experts.{e}.w2.weight", MOE "experts.w2_weight", MM_DIM_HIDDEN, MM_DIM_INTER, MM_INTER_COLS, MM_KIND_EXPERT,  \
           MM_EXPERTS_LAYER),                                                                                                 \
      SAME("model.norm.weight", MM_DIM_HIDDEN, MM_DIM_NONE, MM_WHOLE, MM_KIND_KEEP, MM_ANY_LAYER),                            \
      SAME("lm_head.weight", MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_VOCAB_ROWS, MM_KIND_EMBED, MM_ANY_LAYER)

#endif
