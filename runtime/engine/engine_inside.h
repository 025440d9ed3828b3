/* Internals of the engine: engine_ranks.c (ranks and steps), engine_groups.c (rows and slots by groups of attention), engine_slots.c (what
 * slots hold), engine_memory.c (the size of the KV cache) and engine_sampling.c (tokens sampled from logits). */
#ifndef MM_RUNTIME_ENGINE_INSIDE_H
#define MM_RUNTIME_ENGINE_INSIDE_H

#include <pthread.h>

#include "runtime/engine/engine.h"

typedef enum task_kind {
  MEASURE,
  OPEN,
  STEP,
  COLLECT,
  HIDDEN,
  LOAD,
  STATE_COPY,
  STATE_SAVE,
  STATE_LOAD,
  IDS_LOAD,
  SAMPLE_DEFERRED,
  SCORE,
  CALIBRATE,
  FINISH_LOAD,
  DRAFT,
  POOL,
  MOVE,
  MOVED,
  CLOSE
} task_kind;

/* One task of all ranks, with what each kind of it reads and where its results go. Memory that it names outlives the call that waits for
 * it; where a rank may come back later (E_RANK), it is the engine's own. */
typedef struct task {
  task_kind kind;
  union {
    struct {
      const mm_batch *batch;
      float *logits;
      bool deferred_sampling; /* the step ends before the device samples: mm_engine_sample follows */
    } step;
    struct {
      uint32_t tap, rows;
      float *out; /* [rows, hidden] */
    } hidden;
    struct {
      uint32_t to, from; /* slots */
      void *saved;       /* STATE_SAVE: to there */
      const void *given; /* STATE_LOAD: from there */
    } state;
    struct {
      uint32_t slot, count;
      const int32_t *id; /* [count], or NULL: what the slot holds from now on */
    } ids;
    struct {
      const mm_sampling *sampling; /* [count] */
      uint32_t count;
    } sample;
    struct {
      const int32_t *target; /* ids whose scores are wanted, one for each row without a sampled token, */
      double *score;         /* and room for these */
    } score;
    struct {
      const mm_batch *batch; /* spans that begin with a token of their slot, masks behind it; or a chain's: */
      float *logits;         /* [out_count, vocab], or NULL: */
      int32_t *id;           /* [out_count] the best of each, of a chain [passes, out_count] */
      mm_draft_step step;    /* of a chain: with `best` all passes, batch[passes]; else this one, whose logits stay with the rank:
                                [out_count, draft_vocab] */
    } draft;
    struct {
      uint64_t number;
      const mm_page_move *move; /* [count], where there is one group */
      uint32_t count;
    } move;
    struct {
      uint32_t places;
      bool shared; /* ranks of the first group have made theirs, and those of the others use it */
    } pool;
    bool wait; /* MOVED: until all moves have ended */
    struct {
      int32_t *id;
      const uint32_t *first; /* [groups]: where those of each begin; NULL: there is one */
    } collected;             /* COLLECT */
    uint64_t *load;          /* LOAD: [layers, experts] */
  };
} task;

/* Facts of a rank that all processes know, whichever process has it. */
typedef struct rank_facts {
  uint32_t layer_first, layer_end, vocab_first, vocab_rows;
  uint64_t state_bytes, page_bytes;
  mm_rank_memory need;  /* of MEASURE, as is: */
  mm_rank_memory least; /* without the draft, and with config.memory.least rows of logits */
  mm_memory_facts memory;
} rank_facts;

typedef struct slot_state {
  uint32_t held;       /* tokens that its caches hold */
  uint64_t last_batch; /* number of the last batch that named it */
  bool sampled;        /* some step sampled a token after its last row */
  int32_t sampled_id;  /* that token, where the engine samples it */
} slot_state;

/* Tokens of a step that the engine itself sampled, until they are collected. */
typedef struct sampled_tokens {
  int32_t *id;
  size_t cap;
} sampled_tokens;

/* An output row: its slot (-1: padding) and position. */
typedef struct output_row {
  int32_t slot;
  uint32_t pos;
} output_row;

typedef struct rank {
  mm_engine *engine;
  uint32_t index; /* of all ranks */
  pthread_t thread;
  mm_rank_weights weights;
  mm_forward forward;
  float *logits; /* [out_count, vocab_rows] of the current step */
  size_t logits_cap;
  uint64_t state_at; /* where its part of a slot's lightning states is */
  uint64_t moving;   /* number of its first move of pages that has not ended */
  char *pool;        /* its places in host memory, or those of the rank of the first group that has the same layers and heads */
  bool back, done;   /* has finished the task, and well; under the engine's lock. Then err is read by others */
  mm_err err;
} rank;

/* Batches with sampling that were queued, and those of them that are not collected yet. */
typedef struct batch_queue {
  uint64_t queued, collected;     /* ever */
  uint32_t outstanding[MM_QUEUE]; /* out_count of queued batch i at i % MM_QUEUE, */
  uint64_t pass_of[MM_QUEUE];     /* and `passes` when it was queued */
  uint64_t lost;                  /* `queued` when slots lost what they held; batches are refused until those are collected, */
  mm_err loss;                    /* with why */
  uint64_t passes, proven;        /* ever; passes after `proven` waited in kernels for ranks that may have failed (mm_comm_failed_now) */
} batch_queue;

/* Of a step. */
typedef struct page_lists {
  mm_page_want *want; /* [slots] */
  mm_page_copy *copy; /* [slots] */
} page_lists;

/* Unused where the device samples. */
typedef struct host_sampling {
  sampled_tokens sampled[MM_QUEUE]; /* of queued batch i at i % MM_QUEUE */
  mm_sampler *sampler;
  int32_t *history; /* [slots, max_positions] ids that the slots hold, -1 where that is not known */
  float *logits;    /* [out_count, vocab] */
  int32_t *id;      /* [T] of the step, none MM_ID_SAMPLED */
  size_t logits_cap, id_cap;
} host_sampling;

/* Rows of logits that wait for mm_engine_sample. */
typedef struct unsampled_rows {
  output_row *row; /* [count] */
  uint32_t count;
  size_t cap;
} unsampled_rows;

/* Outputs of a queued batch, where attention has groups. */
typedef struct queued_rows {
  uint32_t *first, count; /* [groups + 1] as engine_groups.out was, of so many */
  uint32_t *place;        /* [count] as engine_groups.place */
  int32_t *id;            /* [count] the collected ids, in the order of groups */
  size_t place_cap, id_cap;
} queued_rows;

/* Groups of attention of a stage (engine_groups.c): slot s belongs to group s mod count, as number s div count of its slots. */
typedef struct engine_groups {
  uint32_t count;     /* 1: all ranks run all rows, and the rest is not used */
  mm_group_rows rows; /* of the step, of which these are parts: */
  uint32_t *first;    /* [count + 1] rows, */
  uint32_t *out;      /* [count + 1] outputs, */
  mm_batch *own;      /* [count] and batches of each group, by its own numbers of rows and slots */
  mm_paging *paging;  /* [count] */
  mm_page_copy *copy; /* [slots] by group */
  mm_page_move *move; /* of the last call that moves pages, by group and with its own numbers of pages: */
  size_t move_cap;
  uint32_t *moves; /* [count + 1] where those of each begin */
  char *bytes;     /* of arrays of these batches, and */
  size_t bytes_cap;
  uint32_t *place;       /* [out_count] which output of the caller's each one is */
  mm_sampling *sampling; /* [out_count] of mm_engine_sample, in the order of groups */
  size_t sampling_cap;
  queued_rows queued[MM_QUEUE]; /* of queued batch i at i % MM_QUEUE */
} engine_groups;

/* Several processes (engine_processes.c): the first one's engine is asked, those of the others follow. */
typedef struct engine_processes {
  mm_process_group *group; /* NULL: there is one process */
  bool opened;             /* all have opened theirs */
  bool unheard;            /* a rank stayed away from the last task, whose reports wait until it is back */
  char *order;             /* what the first process sent or this one was sent */
  size_t order_cap;
  uint32_t *table; /* of those that follow: [slots, per_slot] */
} engine_processes;

/* The draft's last block, or chain. */
typedef struct engine_drafts {
  mm_batch batch[MM_EAGLE_CHAIN]; /* a block's, or those of a chain's passes */
  mm_paging paging;
  char *bytes; /* their arrays, and the ids that are proposed */
  size_t bytes_cap;
  mm_sampling *sampling; /* of their outputs */
  size_t sampling_cap;
  float *logits; /* [out_count, vocab], or of a chain one row */
  size_t logits_cap;
  mm_sampler *sampler;
} engine_drafts;

struct mm_engine {
  const mm_shards *shards;
  const mm_model *model;
  mm_engine_config config;
  mm_comm **comm;   /* [pp]: the ranks of each stage */
  bool lightning;   /* some layer keeps a state that cannot go back */
  bool *never;      /* [vocab] ids that no step samples */
  slot_state *slot; /* [slots] */
  uint64_t batches;
  mm_pages *pages; /* NULL where the backend gives each slot its own */
  mm_paging paging;
  page_lists step_pages;

  bool device_samples;
  batch_queue queue;
  host_sampling host;
  unsampled_rows unsampled;

  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint64_t tasks;      /* counts what was handed to the ranks */
  task task;           /* the last of them */
  uint32_t busy;       /* ranks that have not finished it */
  bool stop, returned; /* returned: the call has, or is about to; a rank that is still away writes nothing to its caller's memory */
  uint32_t copying;    /* ranks that do */
  mm_batch batch;      /* the step's, in memory of the engine's: a rank that comes back late may read it after the caller has gone on */
  char *batch_bytes;
  size_t batch_cap;
  double *score; /* the same of scores */
  size_t score_cap;
  bool stepped;  /* the last step was done, */
  uint32_t rows; /* of so many rows */

  engine_groups groups;
  engine_drafts draft;
  engine_processes processes;
  rank_facts *facts;    /* [pp·tp] */
  uint64_t state_bytes; /* of a slot, all ranks' */
  uint64_t moves;       /* calls of mm_engine_move */
  uint32_t first, here; /* ranks of this process */
  uint32_t started;     /* threads */
  rank rank[];          /* [here] */
};

/* Hands the next task to every rank and waits for all; the lowest failing rank's error is the task's. If that is E_RANK, the call returns
 * without the missing rank; until it returns, every task fails. A task fails if it would build on passes that failed, or read their
 * results. After that, as after any failure with passes that are not proven, no slot holds anything. */
MM_MUST_USE bool mm_engine_run_task(mm_engine *e, const task *t, mm_err *err);
/* The same for the ranks of this process alone. */
MM_MUST_USE bool mm_engine_run_here(mm_engine *e, const task *t, mm_err *err);

/* ---- several processes (engine_processes.c); all of these do nothing, or what one does, without a world ---- */

/* By the first process, before anything in which processes may differ. */
void mm_engine_share_config(const mm_engine_config *c);
/* By every process, whether its ranks opened or not: all learn of all ranks, or fail alike. */
MM_MUST_USE bool mm_engine_exchange_facts(mm_engine *e, bool ok, mm_err *err);
/* The first process sends the task to the others before its own ranks run it. */
MM_MUST_USE bool mm_engine_announce(mm_engine *e, const task *t, mm_err *err);
/* Called after the task: true if all processes completed it; else the error of the lowest process that failed. Results of the other
 * processes' ranks are stored where this one's go. */
MM_MUST_USE bool mm_engine_hear(mm_engine *e, const task *t, bool ok, mm_err *err);

/* MM_IO E_RANK while a rank has not come back: it still uses what a call would change. */
MM_MUST_USE bool mm_engine_all_back(mm_engine *e, mm_err *err);
/* No slot holds anything any more; what is queued stays to be collected, and until then batches are refused with *why. */
void mm_engine_lose(mm_engine *e, const mm_err *reason);
/* Runs a batch that is ready; logits of ids whose head row is zero become -INFINITY. deferred_sampling: as in task. */
MM_MUST_USE bool mm_engine_run_step(mm_engine *e, const mm_batch *batch, float *logits, bool deferred_sampling, mm_err *err);
/* MM_USAGE E_BATCH: "WHAT INDEX: found FOUND, expected EXPECTED LIMIT". */
bool mm_engine_refuse(mm_err *err, const char *what, uint64_t index, int64_t found, const char *expected, uint64_t limit);

/* The rank's columns of r->logits[rows, vocab_rows] go to their place in to[rows, vocab], unless the call has returned (engine_ranks.c). */
void mm_engine_place_logits(rank *r, size_t rows, float *to);

/* ---- groups of attention (engine_groups.c); with one group the engine has none of it ---- */

/* Whether the config asks for nothing that one group alone has; MM_UNSUPPORTED E_PARALLEL. */
MM_MUST_USE bool mm_engine_check_groups(const mm_pack *p, const mm_engine_config *c, mm_err *err);
/* Once the number of pages is known. */
MM_MUST_USE bool mm_engine_open_groups(mm_engine *e, mm_err *err);
void mm_engine_close_groups(mm_engine *e);
/* Sorts the rows of a batch whose pages are reserved by groups, into memory of the engine's. */
MM_MUST_USE bool mm_engine_group_rows(mm_engine *e, const mm_batch *b, mm_err *err);
/* Room for what must be known of a batch of so many outputs, queued at `at`, when it is collected; then, once its rows are sorted and it is
 * queued, that itself. */
MM_MUST_USE bool mm_engine_reserve_queued(mm_engine *e, uint32_t at, uint32_t outs, mm_err *err);
void mm_engine_note_queued(mm_engine *e, uint32_t at, uint32_t outs);
/* Sorts moves of pages by groups, into memory of the engine's. */
MM_MUST_USE bool mm_engine_group_moves(mm_engine *e, const mm_page_move *move, uint32_t count, mm_err *err);
/* Ids that each group's first rank has collected, to their places. */
void mm_engine_place_ids(const mm_engine *e, uint32_t at, int32_t *id);
/* sampling[count] of the last batch's outputs in the order of groups, in memory of the engine's; NULL: MM_LIMIT. */
const mm_sampling *mm_engine_sort_sampling(mm_engine *e, const mm_sampling *sampling, uint32_t count, mm_err *err);
/* The group of a rank, by its number in all. */
static inline uint32_t mm_engine_rank_group(const mm_engine *e, uint32_t index) {
  return index % e->shards->pack.tp / mm_pack_attn_tp(&e->shards->pack);
}
/* The rank of the first group that has the same layers and heads. */
static inline uint32_t mm_engine_pool_rank(const mm_engine *e, uint32_t index) {
  return index - mm_engine_rank_group(e, index) * mm_pack_attn_tp(&e->shards->pack);
}
/* The number of a slot in its group; of a group's slots the most. */
static inline uint32_t mm_engine_own_slot(const mm_engine *e, uint32_t slot) { return slot / e->groups.count; }
static inline uint32_t mm_engine_own_slots(const mm_engine *e) { return (uint32_t)mm_ceil_div(e->config.limits.slots, e->groups.count); }

/* ---- drafts (engine_drafts.c) ---- */

/* Whether the config's draft can run, and its taps. */
MM_MUST_USE bool mm_engine_check_draft(const mm_pack *p, mm_engine_config *c, mm_err *err);
/* Adds what the config's draft takes: its cells of a page; on a device of its own memory its weights, and buffers of its steps too. */
void mm_engine_add_draft_memory(const mm_engine_config *c, mm_rank_memory *need);
/* A block of the draft, on a rank. */
MM_MUST_USE bool mm_engine_draft_rank(rank *r, mm_err *err);

/* ---- the size of the KV cache (engine_memory.c) ---- */

/* Measures a rank whose weights are bound: its requirements, and the memory that it will use. */
MM_MUST_USE bool mm_engine_measure(rank *r, const mm_backend_config *c, mm_err *err);
/* When all processes know all ranks' facts: sets limits.pages, to the same in each. */
MM_MUST_USE bool mm_engine_fit(mm_engine *e, mm_err *err);

/* Checks that the batch may run; if it may, its pages become the slots' own. */
MM_MUST_USE bool mm_engine_prepare(mm_engine *e, mm_batch *batch, mm_err *err);
/* Updates the slots after a batch: they hold all of it, or nothing if it failed. */
void mm_engine_update_slots(mm_engine *e, const mm_batch *batch, bool done);
/* POOL and MOVE, on a rank. */
MM_MUST_USE bool mm_engine_rank_pool(rank *r, mm_err *err);
MM_MUST_USE bool mm_engine_rank_move(rank *r, mm_err *err);
/* Gives the batch its ids with every MM_ID_SAMPLED replaced, where the engine samples. */
MM_MUST_USE bool mm_engine_resolve(mm_engine *e, mm_batch *batch, mm_err *err);
/* The ids of a batch that was done, none MM_ID_SAMPLED, are what its slots hold. */
void mm_engine_remember(mm_engine *e, const mm_batch *batch);
static inline int32_t *mm_engine_history(const mm_engine *e, uint32_t slot) {
  return e->host.history + (size_t)slot * e->config.limits.max_positions;
}

#endif
