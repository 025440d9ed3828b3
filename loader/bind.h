/* Names to a struct: the weights of one rank as the forward pass uses them. */
#ifndef MM_LOADER_BIND_H
#define MM_LOADER_BIND_H

#include "loader/shards.h"

#ifdef __cplusplus
extern "C" {
#endif

/* attn_tp: ranks that attention, embedding and head are cut for, tp unless a stage has groups of ranks with all of attention each.
 * hpr = heads/attn_tp, kpr = max(1, kv_heads/attn_tp), Ir = intermediate per rank (padded under --tp-align pad). Weights that a
 * layer does not have keep scheme == NULL. */
typedef struct mm_layer_weights {
  mm_packed input_norm, post_norm;      /* [H] */
  mm_packed qkv;                        /* lightning: [hpr·3·d, H], per head q,k,v; full: [(hpr + 2·kpr)·d, H], q then k then v */
  mm_packed out;                        /* o_proj or out_proj: [H, hpr·d] */
  mm_packed output_gate;                /* lightning: [hpr·d, H] */
  mm_packed attn_norm;                  /* lightning self_attn.norm: [hpr·d] */
  mm_packed q_norm, k_norm;             /* M2: [hpr·d], [kpr·d]; with qk_norm_per_head: [d] each */
  mm_packed index_q, index_k;           /* sparse: [ipr·index_dim, H] with ipr = max(1, index_heads/attn_tp), [index_dim, H] */
  mm_packed index_q_norm, index_k_norm; /* sparse: [index_dim] */
  mm_packed mlp_up, mlp_down;   /* of a dense layer, or of the shared expert: [2·Ir, H], gate rows, then up rows; [H, Ir], Ir cut by tp */
  mm_packed router;             /* [E, H] */
  mm_packed router_bias;        /* M2: [E] */
  mm_packed w13;                /* E x [2·Ir, H]: w1 (gate) rows, then w3 (up) rows */
  mm_packed w2;                 /* E x [H, Ir] */
  const uint32_t *expert_index; /* [E]: the index of each expert in the stacks of all ranks (mm_expert_order); NULL: its id */
} mm_layer_weights;

typedef struct mm_rank_weights {
  uint32_t rank, tp;                /* within the stage */
  uint32_t attn_tp;                 /* ranks of a group that has all of attention, embedding and head; 0: tp (mm_attn_tp) */
  uint32_t layer_first, layer_end;  /* layers [first, end) live here: the stage's */
  uint32_t expert_first;            /* its w13 and w2 are those of indices [first, first + lead) */
  uint32_t vocab_first, vocab_rows; /* ids [vocab_first, vocab_first + vocab_rows) live here; rows past model.vocab are padding */
  mm_packed embed, head;            /* [vocab_rows, H]: of the first stage, and of the last */
  mm_packed final_norm;             /* [H]: of the last stage */
  mm_layer_weights *layer;          /* [layers]; those of other stages have nothing */
  void *made;                       /* memory of random planes (random_weights.h), or NULL */
  size_t made_bytes;
} mm_rank_weights;

static inline uint32_t mm_attn_tp(const mm_rank_weights *w) { return w->attn_tp ? w->attn_tp : w->tp; }
/* The number of the rank's group, and its number in it. */
static inline uint32_t mm_attn_group(const mm_rank_weights *w) { return w->rank / mm_attn_tp(w); }
static inline uint32_t mm_attn_rank(const mm_rank_weights *w) { return w->rank % mm_attn_tp(w); }

/* rank: stage · tp + tensor-parallel rank. Fails (MM_INTEGRITY) naming the first tensor that is absent, or is not what model, rank and cut
 * imply: extents, experts, vector or matrix, and which rows and columns of the uncut matrix it holds. E_PARALLEL for a layer on two stages
 * or on a stage before the last layer's. */
MM_MUST_USE bool mm_bind(mm_rank_weights *w, const mm_shards *s, uint32_t rank, mm_err *err);
/* The same by a plan whose files are not there yet: all of *w but the planes, which are NULL. */
MM_MUST_USE bool mm_bind_planned(mm_rank_weights *w, const mm_pack *pack, uint32_t rank, mm_err *err);
/* The same of every rank of a stage by the manifest alone, whatever ep and pp and whichever ranks' files are there: what passes binds. */
MM_MUST_USE bool mm_bind_check(const mm_shards *s, mm_err *err);
void mm_bind_close(mm_rank_weights *w);

#ifdef __cplusplus
}
#endif
#endif
