/* The scheduler: one thread owns an engine, and many requests share its steps (continuous batching). A step is the decode rows of all
 * running requests and chunks of prompts within a budget of tokens. */
#ifndef MM_RUNTIME_SCHEDULE_SCHEDULER_H
#define MM_RUNTIME_SCHEDULE_SCHEDULER_H

#include "runtime/engine/engine.h"
#include "runtime/engine/sample.h"
#include "runtime/schedule/transfer.h"

#define MM_DRAFTS 7

typedef struct mm_scheduler mm_scheduler;
typedef struct mm_scheduler_config {
  uint32_t step_tokens;   /* rows of one step, decode and prompt together; ≤ the engine's max_tokens */
  uint32_t queue_max;     /* requests that may wait, not counting requests that have slots; the next is refused */
  uint64_t cache_bytes;   /* host memory for lightning states of the prefix cache */
  uint64_t offload_bytes; /* host memory for pages that leave the prefix cache; 0: they are lost */
  const char *disk_dir;   /* NULL, or a folder for pages that leave that memory, until close; with disk_bytes of them at most */
  uint64_t disk_bytes;
  mm_transfer_config transfer;                   /* prompts computed for other servers, or by one; both need offload_bytes */
  void (*report)(void *user, const mm_err *err); /* NULL, or called by any thread for failures that no request has, now and then */
  void *user;
  bool prefix_cache;    /* keep pages and states of prompts for requests that begin alike; nothing where the device does not share pages */
  bool batch_invariant; /* the tokens of a request do not depend on what else runs; refused where the device cannot say so */
  bool warm;            /* while nothing runs, the engine's steps of more rows are recorded (mm_engine_warm), one size after another */
  double lost_after;    /* seconds of steps that fail, after which the engine is lost; 0: 5 */
  uint32_t drafts;      /* tokens that prompt lookup may propose for one step of a request, ≤ MM_DRAFTS; 0: none. Nothing is proposed
                         * for models with lightning layers, whose states cannot go back */
} mm_scheduler_config;

typedef enum mm_finish { MM_FINISH_STOP, MM_FINISH_LENGTH, MM_FINISH_CANCELLED, MM_FINISH_DEADLINE, MM_FINISH_ERROR } mm_finish;

/* Output of a request so far; valid during the call. */
typedef struct mm_progress {
  uint32_t prompt_tokens, cached_tokens; /* cached: of the prompt, taken from the prefix cache */
  uint32_t reply_tokens;
  uint32_t drafted, accepted; /* tokens proposed for the reply, and those of them that were right */
  uint32_t preempted;         /* how often it gave its slot up */
  double began;               /* CLOCK_MONOTONIC seconds at which it had its first slot; 0: it has had none */
} mm_progress;

/* One request. Arrays are copied by submit. Callbacks come from the scheduler's thread, never from within submit; they do not wait and
 * call nothing of the scheduler but mm_scheduler_cancel. */
typedef struct mm_request {
  const int32_t *prompt;
  uint32_t prompt_count; /* 1 ≤ n, n + max_tokens ≤ the engine's max_positions and what all pages of a group hold */
  uint32_t max_tokens;   /* of the reply, ≥ 0; 0 ends at once */
  /* bias is copied. `prompt` is the scheduler's, and so is what logprobs points to: not NULL, or top_logprobs ≥ 1, asks for them. */
  mm_sampling sampling;
  const int32_t *stop; /* [stop_count] ids that end the reply; they are handed to `token` too */
  uint32_t stop_count;
  const uint32_t *boundary; /* [boundary_count] rising lengths of the prompt at which a later request is likely to part (turn ends) */
  uint32_t boundary_count;
  const void *together;    /* the same of the choices of one request, which wait for each other's prompt; NULL: it is alone */
  struct mm_sending *send; /* NULL; the scheduler's own: pages of the prompt go to another server */
  uint64_t salt;           /* requests share cached prefixes, and replies to look up, only under equal salts */
  uint32_t drafts;         /* proposals for one step at most, as many as the scheduler's config allows; 0: none */
  int priority;            /* larger first */
  bool reserved;           /* submit gives it one of mm_scheduler_reserve's places */
  double deadline;         /* CLOCK_MONOTONIC seconds; 0: none */
  void *user;
  /* Before each sampled token where it is not NULL, after `token` had all tokens before: the ids allowed next, [ceil(vocab/32)] as
   * mm_sampling.allowed, valid until the next call; NULL: all. It may come twice for one token, and in another thread than the other
   * callbacks, at the same time as those of other requests and never as another one of this request. */
  const uint32_t *(*allow)(void *user);
  /* Where it is not NULL: the logprobs of each token of the prompt but the first, in order and before `token`: logprobs[1 + top_logprobs],
   * the prompt's own token first. The prompt is read without the prefix cache then, and in smaller chunks. */
  void (*score)(void *user, const mm_logprob *logprobs);
  /* Where it is not NULL: how many tokens of the prompt are computed, rising, before `token`. The first call has the tokens that the prefix
   * cache had, the last one all of the prompt; a call follows each step that read some. */
  void (*prefill)(void *user, uint32_t tokens, uint32_t cached);
  /* One token of the reply; logprobs[1 + top_logprobs] or NULL. false ends the reply with MM_FINISH_STOP (a stop string). */
  bool (*token)(void *user, int32_t id, const mm_logprob *logprobs, const mm_progress *progress);
  /* The last call for this request, always and once. err for MM_FINISH_ERROR alone. */
  void (*done)(void *user, mm_finish reason, const mm_progress *progress, const mm_err *err);
} mm_request;

/* Takes the engine: no other thread calls it until close. Its slots are to hold nothing. MM_USAGE E_LIMITS for no or too many tokens a
 * step or drafts, and for a prefix cache without room for the lightning states of one request, E_PREFILL where the server of transfer.from
 * runs something else; MM_UNSUPPORTED E_DEVICE for batch_invariant
 * on a device that cannot keep a row's bits independent of other rows. */
mm_scheduler *mm_scheduler_open(mm_engine *engine, const mm_scheduler_config *c, mm_err *err);
/* drain: running and waiting requests end as they would, new ones are refused (E_DRAINING); else they are cancelled. Joins the thread;
 * the engine is the caller's again. Accepts NULL. */
void mm_scheduler_close(mm_scheduler *s, bool drain);
/* Any thread. *ticket, set before any callback, names the request for cancel. MM_USAGE for a request that can never run (E_BATCH,
 * E_SAMPLING), MM_UNSUPPORTED E_SAMPLING for one that the device lacks, MM_LIMIT E_QUEUE when the queue is full, MM_LIMIT E_DRAINING when
 * closing. */
MM_MUST_USE bool mm_scheduler_submit(mm_scheduler *s, const mm_request *r, uint64_t *ticket, mm_err *err);
uint64_t mm_scheduler_capacity(const mm_scheduler *s); /* requests that run and wait at most. Any thread. */
/* Any thread. Places for so many requests that are submitted together, or, with MM_LIMIT as of submit, for none of them. Each submit of a
 * request that is `reserved` takes one, also where it fails; release gives back those for which no submit comes. */
MM_MUST_USE bool mm_scheduler_reserve(mm_scheduler *s, uint32_t count, mm_err *err);
void mm_scheduler_release(mm_scheduler *s, uint32_t count);
/* Any thread; its `done` follows within one step (MM_FINISH_CANCELLED), unless it has ended already. */
void mm_scheduler_cancel(mm_scheduler *s, uint64_t ticket);

/* Steps by their tokens: those that they generated, and the prompts whose first token is among these. Steps with none are not counted. */
#define MM_STEP_BUCKETS 14
typedef struct mm_step_tokens {
  uint64_t count[MM_STEP_BUCKETS + 1]; /* [i]: of at most 2^i tokens and more than 2^(i - 1); the last: of more than all these */
  uint64_t sum;
} mm_step_tokens;

typedef struct mm_scheduler_stats {
  uint64_t requests, refused; /* refused: for a full queue */
  uint64_t prompt_tokens, cached_tokens, reply_tokens, steps, preempted;
  uint64_t busy;                      /* requests that a step has rows of, added up over the steps */
  uint64_t drafts, drafted, accepted; /* rows with proposals, tokens proposed, and those that were right */
  uint64_t learned;                   /* tokens that the checkpoint's draft proposed, of drafted */
  uint32_t waiting, running, slots, pages, pages_free, pages_cached;
  uint64_t cache_bytes;         /* of states in use */
  uint32_t places, places_used; /* of pages in host memory */
  uint64_t page_bytes;          /* of each */
  uint32_t blocks, blocks_used; /* of pages on disk */
  uint64_t pages_written, pages_read, disk_failed;
  mm_step_tokens step_tokens;
  mm_transfer_stats transfer;
  uint64_t pages_out, pages_in, fetched; /* pages moved there and back, and requests that had some fetched */
  double step_seconds;                   /* spent in the engine, added up */
  double own_seconds;                    /* CPU time of the scheduler's thread outside the engine, callbacks included */
} mm_scheduler_stats;
void mm_scheduler_stats_read(mm_scheduler *s, mm_scheduler_stats *out); /* any thread */
/* Share of the pages that requests hold, 0 to 1. */
static inline double mm_scheduler_cache_usage(const mm_scheduler_stats *s) {
  return s->pages ? 1 - (double)((uint64_t)s->pages_free + s->pages_cached) / s->pages : 0;
}
/* True once the engine is lost: for lost_after seconds all steps failed, those too that are tried while requests wait. All requests end
 * with the last error, which *err is. Any thread. */
bool mm_scheduler_lost(mm_scheduler *s, mm_err *err);
/* True while the last step failed, as *err says: before `done` of the requests that it ended. Any thread. */
bool mm_scheduler_failing(mm_scheduler *s, mm_err *err);
/* Groups of attention (mm_engine_groups), and tokens[groups] of the requests that run in each, after the last step. A request runs in the
 * group that has the fewest tokens when it gets a slot, counting those that it would compute there beyond the prefix cache, and one for
 * each 16 that it would have fetched from host memory, disk or another group; when it gave its slot up, perhaps in another. Any thread. */
uint32_t mm_scheduler_groups(const mm_scheduler *s);
void mm_scheduler_group_tokens(mm_scheduler *s, uint64_t *tokens);
uint16_t mm_scheduler_port(const mm_scheduler *s);  /* where it listens for other servers (transfer.listen); 0: it does not */
bool mm_scheduler_has_cache(const mm_scheduler *s); /* there is a prefix cache. Any thread. */
/* load[layers, experts] of mm_engine_expert_load, as it was a second ago or since nothing runs. Any thread. */
void mm_scheduler_expert_load(mm_scheduler *s, uint64_t *load);
#endif
