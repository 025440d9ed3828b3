/* Weights of a model that no file holds: the shapes, schemes and cuts of mm_bind with random numbers (quant/random.h), made where they are
 * used. The ranks of all cuts hold parts of the same model. */
#ifndef MM_LOADER_RANDOM_WEIGHTS_H
#define MM_LOADER_RANDOM_WEIGHTS_H

#include "loader/bind.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The cut fits the model: as mm_bind wants it, with vocab, heads, experts and columns in whole parts, attention's for
 * attn_tp ranks. MM_USAGE E_TP. */
MM_MUST_USE bool mm_random_check(const mm_random_model *r, const mm_model *m, mm_err *err);
/* The weights of rank stage · tp + tensor-parallel rank, without planes: GPU backends make the numbers (mm_packed.random). mm_bind_close
 * frees w->layer, or the caller. MM_USAGE E_TP, MM_LIMIT. */
MM_MUST_USE bool mm_random_weights(const mm_random_model *r, const mm_model *m, uint32_t rank, mm_rank_weights *w, mm_err *err);
/* mm_bind of shards that have files, mm_random_weights of those that have none. */
MM_MUST_USE bool mm_bind_any(mm_rank_weights *w, const mm_shards *s, uint32_t rank, mm_err *err);
/* Gives all of them planes in memory, until mm_bind_close. MM_LIMIT. */
MM_MUST_USE bool mm_random_fill(mm_rank_weights *w, mm_err *err);

/* --load-format dummy and what goes with it (runtime/engine/engine_options.h). */
typedef struct mm_dummy {
  const char *format; /* "packed", "dummy", or NULL: packed */
  const char *quant, *experts;
  uint64_t tp, ep, pp;
  double skew;                                             /* these: NULL and 0 where not given */
  bool (*read)(const char *dir, mm_model *m, mm_err *err); /* DIR/config.json */
} mm_dummy;
/* No such option given. */
#define MM_DUMMY_NONE(reader) \
  { .read = (reader) }

bool mm_dummy_wanted(const mm_dummy *d); /* --load-format dummy is given */
/* Opens a packed checkpoint, or under --load-format dummy a model of random weights for the config.json in `dir`, with the tokenizer and
 * the templates that lie next to it. The digest is that of the model and its options, as minimax-hold compares it. MM_USAGE E_USAGE for
 * options that go with dummy alone, E_TP. */
MM_MUST_USE bool mm_shards_open_as(mm_shards *s, const char *dir, const mm_dummy *d, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
