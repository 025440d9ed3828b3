/* The ranks of one random model, each with a CPU backend, for tests of single ops. */
#ifndef MM_TESTS_CPU_RANKS_H
#define MM_TESTS_CPU_RANKS_H

#include <pthread.h>

#include "runtime/engine/calibration.h"
#include "runtime/engine/engine.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

enum { RANKS = 8 };

/* Acts are opened at their widest and used as views. */
typedef struct ranks {
  ref_model ref;
  ref_shards *shards;
  uint32_t tp;
  mm_comm *comm;
  mm_calibration *calibration; /* of one rank, or NULL */
  mm_rank_weights w[RANKS];
  mm_backend *b[RANKS];
  mm_act x[RANKS], y[RANKS], z[RANKS];
} ranks;

/* Backends as `c` says but for what is the ranks' own. */
static inline void open_backends(ranks *r, mm_model m, uint32_t tp, mm_backend_config c, uint32_t widest, bool calibrated) {
  mm_err err = {0};
  *r = (ranks){.ref = ref_build(m), .tp = tp, .comm = mm_comm_open(tp, &err)};
  r->shards = ref_cut(&r->ref, tp);
  if (calibrated) r->calibration = mm_calibration_open(&r->shards->s, &err);
  for (uint32_t i = 0; i < tp; i++) {
    assert_true(mm_bind(&r->w[i], &r->shards->s, i, &err));
    c.model = &r->ref.m, c.weights = &r->w[i], c.comm = r->comm, c.calibration = r->calibration;
    r->b[i] = mm_ops_cpu.open(&c, &err);
    assert_non_null(r->b[i]);
    mm_act *const act[] = {&r->x[i], &r->y[i], &r->z[i]};
    for (int j = 0; j < 3; j++) assert_true(mm_ops_cpu.act(r->b[i], widest, act[j], &err));
  }
}

static inline void close_ranks(ranks *r) {
  for (uint32_t i = 0; i < r->tp; i++) {
    mm_ops_cpu.close(r->b[i]);
    mm_bind_close(&r->w[i]);
  }
  mm_comm_close(r->comm);
  mm_calibration_close(r->calibration);
  ref_uncut(r->shards);
  ref_free(&r->ref);
}

typedef struct rank_call {
  ranks *r;
  uint32_t rank;
  void (*fn)(ranks *r, uint32_t rank, void *ctx);
  void *ctx;
} rank_call;

static inline void *run_rank_call(void *arg) {
  rank_call *c = arg;
  c->fn(c->r, c->rank, c->ctx);
  return NULL;
}

/* fn on every rank at once, inside one step of the batch; logits[rank] may be NULL. */
static inline void step(ranks *r, const mm_batch *batch, void (*fn)(ranks *, uint32_t, void *), void *ctx, float *logits[]) {
  pthread_t thread[RANKS];
  rank_call c[RANKS];
  mm_err err = {0};
  for (uint32_t i = 0; i < r->tp; i++) assert_true(mm_ops_cpu.begin(r->b[i], batch, &err));
  for (uint32_t i = 0; i < r->tp; i++) {
    c[i] = (rank_call){r, i, fn, ctx};
    assert_int_equal(pthread_create(&thread[i], NULL, run_rank_call, &c[i]), 0);
  }
  for (uint32_t i = 0; i < r->tp; i++) pthread_join(thread[i], NULL);
  for (uint32_t i = 0; i < r->tp; i++) assert_true(mm_ops_cpu.end(r->b[i], logits ? logits[i] : NULL, &err));
}

#endif
