/* The engine: ranks as threads over one backend each, stepping together, in one process or several. */
#ifndef MM_RUNTIME_ENGINE_H
#define MM_RUNTIME_ENGINE_H

#include "loader/shards.h"
#include "runtime/engine/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_engine mm_engine;

/* How the KV cache is sized from the device's memory (loader/stream/capacity.h), before a weight is read. */
typedef struct mm_engine_memory {
  bool fits;          /* it is: with limits.pages 0 as many pages as there is room for, with others as many as they say. MM_LIMIT E_MEMORY
                       * where that is less than one sequence, or more than is free. Nothing where the ops do not know their memory */
  double share;       /* of the device's memory that may be used, in (0, 1]; 0 or NAN: MM_GPU_SHARE or MM_CPU_SHARE */
  uint32_t outs;      /* rows of a step whose logits are wanted at most; 0: all */
  uint32_t least;     /* 0, or a number of such rows: without mm_proposals_fit of outs and the draft, that many, and no draft */
  const char *length; /* the option that says max_positions, for errors; need not outlive open */
} mm_engine_memory;

typedef struct mm_engine_config {
  const mm_ops *ops;
  mm_limits limits;
  mm_run_options options; /* MM_UNSUPPORTED for what the ops cannot do: E_ACT_QUANT act_quant, E_DEVICE pin and batch_invariant
                           * (mm_engine_batch_invariant); MM_USAGE E_LIMITS to pin more threads than this process has CPUs */
  struct mm_calibration *calibration;
  const bool *never;      /* [vocab]: ids that no step samples, or NULL; ids whose head row is zero are never sampled */
  const uint32_t *tap;    /* [taps] layers whose output mm_engine_hidden gives; need not outlive open */
  uint32_t taps;          /* ≤ MM_TAPS */
  const mm_dflash *draft; /* NULL, or a draft for mm_engine_draft, until close: its taps are the engine's, tap is NULL then */
  const char *attach;     /* socket of the weights' holder (minimax-hold), or NULL; not with verify: the holder's to do */
  bool verify;            /* digests of all files are checked while they are loaded: MM_INTEGRITY E_DIGEST, at open or by a step */
  mm_read_log *log;       /* what devices read to load goes there, or NULL; until close */
  const uint32_t *device; /* [ranks of this process] numbers of their accelerators, or NULL: 0, 1, …; need not outlive open */
  mm_engine_memory memory;
  mm_process_group *process_group; /* NULL, or until close: each process has as many ranks, in their order. The first opens the engine and
                                    * is asked; the others follow (mm_engine_follow). The host samples then, and all ranks of a stage are of
                                    * one process on devices that cannot do otherwise (mm_ops.across): MM_UNSUPPORTED E_PARALLEL */
} mm_engine_config;

/* Borrows the shards until close. All calls on one engine come from one thread at a time. Checkpoints with groups of attention
 * (mm_pack_groups): MM_UNSUPPORTED E_PARALLEL for a device that runs one group alone, and with process_group, calibration, draft or taps.
 * With limits.pages each group has ceil(pages / groups). */
mm_engine *mm_engine_open(const mm_shards *shards, const mm_engine_config *c, mm_err *err);
/* Threads for a config: the value of --threads, or if that is 0 the CPUs of this process divided by its ranks, at least 1. */
unsigned mm_engine_threads(uint64_t given, uint32_t ranks);
/* A process of c->world that is not the first: its ranks run the tasks of the first process's engine until that engine is closed. c gives
 * ops, world, options.threads and device; the first process gives the rest. The first process reports failed tasks; the call returns true
 * when the engine was closed. */
MM_MUST_USE bool mm_engine_follow(const mm_shards *shards, const mm_engine_config *c, mm_err *err);
/* Accepts NULL. Memory that a missing rank still uses (E_RANK, below) is not freed. */
void mm_engine_close(mm_engine *e);
const mm_model *mm_engine_model(const mm_engine *e);
/* Waits until all weights are there and found good, where they go on arriving after open; between steps. False with the load's error. */
MM_MUST_USE bool mm_engine_finish_load(mm_engine *e, mm_err *err);

/* Runs one batch on all ranks; logits[out_count, vocab], ids whose head row is zero are -INFINITY.
 * Refuses (MM_USAGE E_BATCH) ids ≥ vocab, positions past the limit, unknown slots, rows not covered by spans, one slot in two
 * spans, and a pos that the slot does not hold: lightning state cannot go back, so there pos is 0 or exactly where the slot
 * stands. MM_LIMIT E_PAGES when the batch needs more pages than are free. After any of these the slots hold what they held; after any
 * other failure the slots of the batch hold nothing. If ranks wait for one another in kernels and earlier batches are still unfinished
 * (queued, or passed without sampling) when one fails, their results are discarded and every slot is emptied. Until all queued batches are
 * collected, each batch and each call that reads their results returns the same error. MM_IO E_RANK: waiting for the rank of a device timed
 * out. If that rank does not return within a second, the call returns without it; until it returns every call fails with E_RANK, and the
 * rank still reads the memory that the batch points to. */
MM_MUST_USE bool mm_engine_step(mm_engine *e, const mm_batch *batch, float *logits, mm_err *err);

const mm_limits *mm_engine_limits(const mm_engine *e);
/* The KV cache of an engine whose memory.fits was set; all 0 where its device gives each slot its own. */
typedef struct mm_engine_cache {
  uint64_t tokens;    /* of all sequences together */
  uint64_t bytes;     /* of the rank that stores the most */
  uint64_t sequences; /* of max_positions tokens that fit */
} mm_engine_cache;
mm_engine_cache mm_engine_cache_of(const mm_engine *e);
/* config.memory.outs, or its `least` where that was taken. */
uint32_t mm_engine_outs(const mm_engine *e);
/* The memory of rank r's device, which ranks may share, and what the rank takes of it, in bytes: all of it is taken by the end of the
 * start. */
typedef struct mm_engine_use {
  uint64_t total, free;                      /* before the engine took any */
  uint64_t weights, buffers, states, caches; /* on a CPU the first two are 0: weights lie in the page cache */
} mm_engine_use;
/* False behind the last rank, of whichever process, and where memory.fits was not set. */
bool mm_engine_use_of(const mm_engine *e, uint32_t r, mm_engine_use *out);
/* Bits MM_SAMPLES_…: the sampling options that the engine supports. */
uint32_t mm_engine_samples(const mm_engine *e);
/* Returns true if a row's bits depend on the tokens before it alone: not on prefill chunks, other rows or slots. */
bool mm_engine_batch_invariant(const mm_engine *e);

/* Returns true if mm_engine_queue returns before the step is done, so that it pays to queue the next batch before collecting this one. */
bool mm_engine_queues(const mm_engine *e);
/* Returns true if mm_engine_forward returns before the pass is done, so that it pays to make masks before mm_engine_sample. */
bool mm_engine_defers(const mm_engine *e);
/* Queues one batch with sampling; mm_engine_collect returns the sampled tokens, in order. On a device that samples, the
 * next batch may name MM_ID_SAMPLED before this one's tokens were collected. Refuses what mm_engine_step refuses, MM_ID_SAMPLED in a
 * slot that no token was sampled for, and more than MM_QUEUE batches outstanding; MM_USAGE E_SAMPLING for settings out of range,
 * MM_UNSUPPORTED E_SAMPLING for one that the device lacks, by name. */
MM_MUST_USE bool mm_engine_queue(mm_engine *e, const mm_batch *batch, mm_err *err);
/* mm_engine_queue in two calls: the pass, whose logits stay in the engine, and the sampling of a token after each of its output rows,
 * sampling[out_count]. Between them the caller may call anything but a step: collect the batch before, drop slots, make a mask of allowed
 * tokens that depends on the token before. A step in between drops the logits. E_SAMPLING as above; MM_UNSUPPORTED E_DEVICE for devices
 * that sample within the step. */
MM_MUST_USE bool mm_engine_forward(mm_engine *e, const mm_batch *batch, mm_err *err);
MM_MUST_USE bool mm_engine_sample(mm_engine *e, const mm_sampling *sampling, mm_err *err);
/* The pass, and of each of its output rows -ln of the probability of id target[out_count]: score[out_count], in f64. Ids that no step
 * samples have no share; one of them scores infinity. A device that can reduces the logits there. MM_USAGE E_BATCH for targets of vocab and
 * above. */
MM_MUST_USE bool mm_engine_score(mm_engine *e, const mm_batch *batch, const int32_t *target, double *score, mm_err *err);
/* Runs steps of padding of rows[n] single tokens each, ended in every way that steps end, so that a device that captures its steps as
 * graphs has done so before the first request; does nothing on other devices. Slots stay as they are. MM_USAGE E_BATCH for more rows than a
 * step may have, and while batches are left to collect. */
MM_MUST_USE bool mm_engine_warm(mm_engine *e, const uint32_t *rows, uint32_t n, mm_err *err);
/* Waits for the oldest queued batch: id[out_count] of it, -1 where no logit was a number. After a failure nothing is queued any more
 * and no slot holds anything. */
MM_MUST_USE bool mm_engine_collect(mm_engine *e, int32_t *id, mm_err *err);

/* ---- slots and their pages. Where the backend gives slots pages of their own (mm_ops.cache), mm_engine_pages is NULL, and fork and resume
 * are MM_UNSUPPORTED E_DEVICE. All of these take their place in the order of steps, queued ones included. ---- */

/* Groups of attention (mm_pack_groups): 1, or so many groups of ranks that have all of attention each. Slot s belongs to group s mod groups
 * for life; its pages are its group's, and slots of different groups share none: mm_engine_fork and mm_engine_resume refuse it (MM_USAGE
 * E_BATCH). */
uint32_t mm_engine_groups(const mm_engine *e);
/* How rows that experts alone read go between them (mm_rank_ops.exchange); MM_ACT_KEPT with one group. */
mm_row_exchange mm_engine_exchange(const mm_engine *e);
/* to[size] = words for it. */
void mm_exchange_text(mm_row_exchange x, char *to, size_t size);
/* Tokens that the slot holds. */
uint32_t mm_engine_held(const mm_engine *e, uint32_t slot);
/* The slot holds nothing any more, and its pages are free. */
void mm_engine_drop(mm_engine *e, uint32_t slot);
/* The allocator, so that a prefix cache can hold pages beyond their slot. Pages held elsewhere are never written: their
 * slot goes on in a copy. */
mm_pages *mm_engine_pages(mm_engine *e);
/* Each of slots to[n] holds what `from` holds, in the same pages, and the token sampled after it. MM_USAGE E_BATCH for a slot of which rows
 * wait for mm_engine_sample, here and in mm_engine_resume. */
MM_MUST_USE bool mm_engine_fork(mm_engine *e, uint32_t from, const uint32_t *to, uint32_t n, mm_err *err);
/* Bytes of the lightning states of one slot, all layers and ranks; 0 for a model without such layers. */
uint64_t mm_engine_state_bytes(const mm_engine *e);
/* The states after the slot's last token, state[state_bytes]. MM_USAGE E_BATCH where the slot holds nothing. */
MM_MUST_USE bool mm_engine_save(mm_engine *e, uint32_t slot, void *state, mm_err *err);
/* The slot holds `tokens` tokens: those of page[ceil(tokens / MM_PAGE)], which somebody refers to, and the states saved after the last of
 * them (NULL without lightning layers). id[tokens]: which they are, for penalties; NULL: those count what follows alone. MM_USAGE E_BATCH
 * for a page that nobody refers to, too many tokens, or states missing. */
MM_MUST_USE bool mm_engine_resume(mm_engine *e, uint32_t slot, const uint32_t *page, const int32_t *id, uint32_t tokens, const void *state,
                                  mm_err *err);

/* ---- pages in host memory: a pool of places. A page is one group's; a place has a part for each rank of a group, the same for every
 * group: the first rank of each group has the same layers and heads, so its part of a page has as many bytes in the same order, and so on.
 * A page that left one group's device may come back to another's. ---- */

/* Bytes of a page, all layers and ranks of a group; 0 where the backend moves none. */
uint64_t mm_engine_page_bytes(const mm_engine *e);
/* Makes a pool of `places` in host memory, once. MM_UNSUPPORTED E_DEVICE for a backend that moves no pages, E_PARALLEL for several
 * processes; MM_LIMIT E_MEMORY where it is more than this machine has free. */
MM_MUST_USE bool mm_engine_pool(mm_engine *e, uint32_t places, mm_err *err);
/* The pool's part i, below mm_engine_pool_parts, and how many bytes of it a place has. Until close. */
char *mm_engine_pool_part(const mm_engine *e, uint32_t i, uint64_t *bytes);
uint32_t mm_engine_pool_parts(const mm_engine *e); /* ranks of a group, of all stages */
uint32_t mm_engine_ranks(const mm_engine *e);
/* Every rank copies its parts of those of move[count] whose pages are its group's, in this order, after the steps and moves so far; it does
 * not wait. Ranks of different groups do not wait for one another: a place that one group's are to read has been written before, by moves
 * that have ended. The caller has a reference to each page until the copies have ended, and gives it to no step before. *number names the
 * call, failed or not; after a failure places and pages of it hold nothing good. */
MM_MUST_USE bool mm_engine_move(mm_engine *e, const mm_page_move *move, uint32_t count, uint64_t *number, mm_err *err);
/* *oldest: calls with numbers below it have ended in every rank. wait: until all have. After a failure pages and places of calls that had
 * not ended hold nothing good, and they may still be written. */
MM_MUST_USE bool mm_engine_moved(mm_engine *e, bool wait, uint64_t *oldest, mm_err *err);

/* Hidden states, for heads that draft tokens: out[T, H], of all rows of the last step, what layer config.tap[i] gives the next one, before
 * that one's norm. Hugging Face's hidden_states[layer + 1], but for the last layer, whose entry there comes after the final norm. Refuses
 * (MM_USAGE E_BATCH) an i that is not tapped, a last step that failed or is not collected, and where there was none. */
MM_MUST_USE bool mm_engine_hidden(mm_engine *e, uint32_t i, float *out, mm_err *err);
/* Whether open takes config.draft, before a weight is read: MM_UNSUPPORTED E_DEVICE, E_PARALLEL, E_DRAFT, E_SCHEME. Nothing else of the
 * config is checked. */
MM_MUST_USE bool mm_engine_takes_draft(const mm_pack *p, const mm_engine_config *c, mm_err *err);
/* Proposals of config.draft: the tokens after `id`, which comes after the `pos` tokens that the slot holds. */
typedef struct mm_draft_request {
  uint32_t slot, pos;
  int32_t id;
  const mm_sampling *sampling; /* of the tokens, or NULL: the likeliest are proposed */
} mm_draft_request;
/* Tokens that it proposes at once, 0 without one. */
uint32_t mm_engine_drafts(const mm_engine *e);
/* draft[n, each]: for each request, each ≤ mm_engine_drafts; n · (1 + each) ≤ limits.max_tokens. logits[n, each, vocab], which they are
 * chosen from, or NULL. Under a temperature they are drawn as mm_sample draws the tokens, by the same numbers of the seed, top_k, top_p and
 * min_p: where the draft's logits are near the model's, so are the draws. Slots stay as they are. MM_USAGE E_BATCH for a slot that holds
 * fewer tokens than pos. */
MM_MUST_USE bool mm_engine_draft(mm_engine *e, const mm_draft_request *request, uint32_t n, uint32_t each, int32_t *draft, float *logits,
                                 mm_err *err);
/* load[layers, experts]: how many rows were routed to each expert since open; of queued steps that were collected at least. */
MM_MUST_USE bool mm_engine_expert_load(mm_engine *e, uint64_t *load, mm_err *err);
/* config.calibration has the inputs of every step so far. Before it is written. */
MM_MUST_USE bool mm_engine_calibrate(mm_engine *e, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
