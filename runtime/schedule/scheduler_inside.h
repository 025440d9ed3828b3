/* Internals of the scheduler: requests.c (they come and go), schedule.c (who has a slot), reuse.c (what
 * the prefix cache keeps of them and gives them), offload.c (its pages in host memory), drafts.c (prompt lookup), batching.c (what the
 * slots are given and what comes back), health.c (whether the engine still works). Everything but what `lock` guards belongs to the
 * scheduler's thread. */
#ifndef MM_RUNTIME_SCHEDULE_SCHEDULER_INSIDE_H
#define MM_RUNTIME_SCHEDULE_SCHEDULER_INSIDE_H

#include <pthread.h>
#include <stdatomic.h>

#include "formats/system/pool.h"
#include "runtime/schedule/draft_index.h"
#include "runtime/schedule/prefix_cache.h"
#include "runtime/schedule/scheduler.h"

typedef struct mm_sending mm_sending;
typedef struct mm_sender mm_sender;
typedef struct mm_fetch mm_fetch;
typedef struct mm_receiver mm_receiver;

/* A prompt that another server is to compute: not asked, under way, in the prefix cache, or computed here in place of that. */
typedef enum fetch_state { FETCH_NONE, FETCH_RUNS, FETCH_CAME, FETCH_FAILED } fetch_state;

/* What proposals for a request follow. */
typedef struct job_lookup {
  double acceptance[2];       /* share of proposals that were right of late: behind short matches and the draft's, behind long ones */
  bool long_match;            /* the last proposals followed a long one, or would have */
  uint32_t copied, copied_at; /* place of its own tokens that goes on as the last ones do, when it had so many; 0: none */
} job_lookup;

/* The fetch of its cached prefix from host memory and disk. */
typedef struct job_return {
  uint32_t turn;   /* 1 + the turn that it is for */
  uint32_t starts; /* how often in that turn */
  bool any;        /* some page was fetched in it */
  bool pushed;     /* others gave way for it in that turn, and until then it may wait for pages: nobody else takes what they left */
  double held;
  uint32_t spills; /* 1 + the starts before which others went to disk for it, */
  double until;    /* which is waited for until then */
} job_return;

/* The fetch of its prompt from another server. */
typedef struct job_fetch {
  mm_fetch *running; /* or NULL */
  fetch_state state;
  uint32_t had;  /* tokens that the cache had before that */
  uint64_t ends; /* it waits for another job's fetch: how many had ended when that was seen, and one; 0: it does not */
} job_fetch;

/* A request while it lives. Its slot is given token[fed …]; the token sampled after token[count - 1] becomes token[count]. */
typedef struct job {
  struct job *next, *previous; /* among the living; under the lock */
  struct job *next_in;         /* the same, until the thread has seen it */
  mm_request r;                /* its arrays are the job's */
  uint64_t ticket;
  atomic_bool cancelled;

  int32_t *token; /* [count]: the prompt, then the reply */
  size_t token_cap;
  uint32_t count;
  uint32_t fed;       /* tokens that its slot was given, steps under way included */
  uint32_t in_flight; /* tokens that steps under way sample for it */
  int32_t slot;       /* -1: none, it waits */
  uint32_t turn;      /* how often it had a slot: tokens of steps of an earlier turn are discarded */
  uint32_t rows_out;  /* entries of steps under way that name it */
  bool duplicate;     /* it waits for what another is reading just now: */
  uint64_t duplicate_of;
  uint32_t duplicate_until; /* until that one was given so many tokens */
  uint32_t parting;         /* lightning: its states are kept here too, where its prompt parts from another; 0: nowhere */
  uint32_t awaited;         /* others wait for so many tokens of its prompt, or more; 0: none does */
  int need;                 /* priority of its rows: its own, or a higher one of those that wait for it */
  job_return back;
  uint32_t cached; /* tokens of the prompt that the prefix cache had, at its first turn */
  job_fetch fetch;
  uint32_t drafts; /* of them, proposed ones behind the last */
  int32_t draft[MM_DRAFTS];
  double began; /* when it had its first slot; 0: it has had none */
  job_lookup lookup;
  uint32_t drafted, accepted; /* of all its steps: tokens proposed, and those that were right */
  mm_gram_index grams;
  uint32_t learned, learned_at; /* proposals of the engine's draft after so many tokens */
  int32_t learned_draft[MM_DRAFTS];
  bool from_draft;    /* those of the last step were the draft's */
  uint32_t take;      /* tokens that the step being built gives it */
  uint32_t scored;    /* tokens of the prompt whose logprobs `score` had; the first has none */
  uint32_t prefilled; /* tokens of the prompt that `prefill` had */
  bool ended;         /* freed when no step names it */
} job;

typedef struct waiting_job {
  job *job;
  uint32_t runs; /* how many of its tenant run */
} waiting_job;

typedef struct waiting_turns {
  waiting_job *job;
  size_t cap;
} waiting_turns;

/* A request that found no pages: nothing is to be had before the next slot is free. */
typedef struct page_shortage {
  uint64_t left;            /* how often a slot became free */
  uint64_t ticket, at_left; /* the ticket that found none last, and when */
} page_shortage;

/* Tokens that one step sampled for one job: outputs [first, first + count) of it, after the tokens from `pos` on. */
typedef struct output_group {
  job *job;
  uint32_t turn, first, count, pos;
  bool scored;  /* they are tokens of the prompt, whose logprobs are wanted */
  bool prefill; /* no tokens: the prompt is computed up to `pos` after the step */
} output_group;

/* A step that was queued and not collected. */
typedef struct step {
  output_group *group; /* [groups], at most three of each slot */
  mm_logprob *logprob; /* [step_tokens, 1 + MM_LOGPROBS], allocated when first asked for */
  uint32_t groups, outs;
  double began;      /* when it was queued */
  uint32_t decoders; /* requests that it decodes for; 0 where it reads prompts too */
  bool drafted;      /* with proposals among its rows */
  bool copies;       /* some of them behind a long match */
} step;

#define MM_DRAFTS_TIMES 16

/* Rate of steps that only decode: seconds of the last ones, tokens that a request got of a recent one. */
typedef struct rate {
  uint64_t steps;
  double seconds[MM_DRAFTS_TIMES], tokens;
  uint32_t wait; /* with proposals: after how many steps the way that loses, these or those without, is tried again */
} rate;

/* Token masks of a step. */
typedef struct step_masks {
  uint32_t *slot;           /* [slots] of requests that need one; from `next` on they are still to be made */
  const uint32_t **allowed; /* [slots] of the request in each slot; NULL: all ids */
  size_t next;
  mm_team *team; /* makes several at once; opened when it is first of use */
  bool alone;    /* there is none to be had */
} step_masks;

/* Arrays of a batch. */
typedef struct step_arrays {
  int32_t *id;
  mm_span *span;
  uint32_t *out;
  mm_sampling *sampling;
  mm_bias *bias;  /* [step_tokens] that make the prompt's own token the sampled one */
  uint32_t spare; /* outputs that the step may have besides one for each job, and those of drafts */
  bool deferred;  /* its tokens are sampled in a call of their own, after its masks are made */
  uint64_t *free; /* [groups] pages that the step may take still */
  step_masks masks;
} step_arrays;

/* Proposals of the next steps, and the rates that decide for them. */
typedef struct step_drafts {
  rate *rate; /* [slots + 1, 3] by how many decode: without proposals, with any, with some behind long matches; NULL: none are made */
  mm_reply_index *replies;   /* or NULL, as rate */
  mm_draft_request *request; /* [slots] of a learned draft, or NULL */
  int32_t *proposed;         /* [slots, MM_DRAFTS] */
  double began;              /* when the learned draft was asked for the next step's proposals; 0: it was not */
  double over;               /* when the last step was collected */
  bool wanted;               /* the next step may have proposals */
  bool copies_only;          /* behind long matches alone */
} step_drafts;

/* Groups of attention (mm_engine_groups): slot s belongs to group s mod count. */
typedef struct scheduler_groups {
  uint32_t count;
  mm_prefix_cache *cache; /* of all groups' pages, or NULL */
  uint64_t *tokens;       /* [count] of the requests that run in each */
  uint64_t *shown;        /* [count] the same under the lock */
  uint64_t looked;        /* tokens that were compared before this step, of requests that wait with those that run */
  uint64_t look_most;     /* after so many, other requests are looked at before the next step */
} scheduler_groups;

/* Rows of each expert of each layer. */
typedef struct expert_loads {
  uint64_t *shown; /* [count], under the lock */
  uint64_t *own;   /* [count], the thread's */
  size_t count;
  double read; /* when */
} expert_loads;

/* Of pages of the prefix cache in host memory. */
typedef struct offload_state {
  bool on;             /* the prefix cache has a pool there */
  bool moves_failed;   /* some copies between both have: what it has is to be dropped */
  mm_disk_store *disk; /* NULL: pages that leave it are lost */
  bool waits;          /* a job waits for room in the pool, for which entries go to disk */
  double reported;     /* when a failure of the disk was */
  mm_sender *sender;   /* or NULL, as receiver: its places are read and written by connections (transfer.h) */
  mm_receiver *receiver;
  bool poked; /* under the lock: a connection has something for the thread */
} offload_state;

/* Of the engine, mostly health.c's. */
typedef struct engine_health {
  double failed,
      next;        /* when a step failed and none queued since has succeeded (under the lock), 0: none did; before `next` none is tried */
  uint64_t queued; /* steps queued when the last one failed: those may still succeed, which says nothing */
  atomic_bool lost;
  mm_err error;    /* under the lock; it stays once the engine is lost */
  uint32_t warmed; /* rows of the largest step that mm_engine_warm has recorded, or tried to */
} engine_health;

struct mm_scheduler {
  mm_engine *engine;
  mm_scheduler_config c;
  uint32_t slots, vocab;
  bool lightning;
  engine_health health;
  offload_state offload;
  mm_pages *pages; /* NULL: slots have pages of their own */
  scheduler_groups groups;
  uint32_t *page; /* [pages of a slot] receives those of the cache */
  uint8_t *mark;  /* [pages] bits, for schedule.c */

  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  job *living;   /* under the lock, like all up to stats */
  job *incoming; /* newest first, by next_in: those that the thread has not seen */
  uint64_t tickets;
  uint32_t live, reserved; /* reserved: places of requests that are still to come */
  bool closing;
  mm_scheduler_stats stats;
  expert_loads load;

  mm_scheduler_stats own; /* the thread's, published once a step */
  double inside;          /* CPU time of the thread in the engine */
  job **waiting;          /* [waiting_count] */
  size_t waiting_count, waiting_cap;
  waiting_turns turns; /* those whose turn it may be, while slots are given */
  job **slot;          /* [slots] who has it */
  uint32_t running;
  uint32_t first; /* slot whose turn it is, should a step have too few rows for all */
  page_shortage shortage;

  step step[MM_QUEUE]; /* step i at i % MM_QUEUE */
  uint64_t queued, collected;

  step_arrays build; /* the batch being built */
  step_drafts draft;
  int32_t *sampled; /* [step_tokens] of the step being collected */
  job **order;      /* [slots] the prompts that are being read */
  bool ahead;       /* the next step is queued before this one's tokens are read */
};

/* ---- requests.c ---- */
double mm_scheduler_cpu(void); /* seconds that the calling thread ran */
/* The job has ended: its slot is free, `done` is called, and it is gone once no step names it. */
void mm_scheduler_end(mm_scheduler *s, job *j, mm_finish reason, const mm_err *err);
mm_progress mm_scheduler_progress(const job *j);
/* A step that named the job was collected. */
void mm_scheduler_forget(job *j);

/* ---- schedule.c ---- */
/* Ends what was cancelled or is late, and gives slots to those that wait. */
void mm_schedule(mm_scheduler *s);
void mm_schedule_end_over(mm_scheduler *s); /* the first of both */
/* The job waits for a slot. */
void mm_schedule_join(mm_scheduler *s, job *j);
/* The job waits again, and is not lost: its tokens are given anew. */
void mm_schedule_preempt(mm_scheduler *s, job *j);
#define MM_ANY_GROUP UINT32_MAX
static inline uint32_t mm_schedule_group(const mm_scheduler *s, const job *j) {
  return (uint32_t)j->slot % s->groups.count;
} /* it has a slot */
/* Who gives way first: of those that run in the group, the last come of the lowest priority; NULL when none runs. */
job *mm_schedule_victim(const mm_scheduler *s, uint32_t group);
/* Requests that run in the group, and the tokens that they have. */
uint32_t mm_schedule_running(const mm_scheduler *s, uint32_t group);
uint64_t mm_schedule_tokens(const mm_scheduler *s, uint32_t group);
/* The job has no slot and waits for none. keep: what its slot held is good. */
void mm_schedule_leave(mm_scheduler *s, job *j, bool keep);

/* ---- health.c ---- */
void mm_health_failed(mm_scheduler *s, const mm_err *err); /* a step did */
void mm_health_good(mm_scheduler *s);                      /* a step was collected */
/* False while requests are to wait: no step has succeeded since one failed. It is tried here, now and then. */
bool mm_health_check(mm_scheduler *s);

/* ---- reuse.c: nothing of it does anything without a cache ---- */
/* How many of the job's tokens the cache may give it: not the last, from whose logits the next is sampled, and of a prompt whose logprobs
 * are wanted those alone that came before it gave way. */
static inline uint32_t mm_reuse_most(const job *j) { return j->r.score && j->scored + 1 < j->r.prompt_count ? j->scored : j->count - 1; }
MM_MUST_USE bool mm_reuse_open(mm_scheduler *s, mm_err *err);
void mm_reuse_close(mm_scheduler *s);
/* The prefix of a job's tokens that the cache has on a group's device: in s->page, held until it is released. */
typedef struct reuse {
  uint32_t tokens;
  const void *state;
} reuse;
reuse mm_reuse_find(mm_scheduler *s, const job *j, uint32_t group);
void mm_reuse_release(mm_scheduler *s, const reuse *hit);
/* Whether the states that were found are still kept: making room may have dropped them, though not the pages. */
bool mm_reuse_stands(const mm_scheduler *s, const reuse *hit);
/* The job's slot, which holds nothing, holds that. */
MM_MUST_USE bool mm_reuse_take(mm_scheduler *s, job *j, const reuse *hit, mm_err *err);
/* Puts the job's tokens that the slot holds into the cache. */
void mm_reuse_keep(mm_scheduler *s, const job *j);
/* After a step was queued: the states of those whose chunk ends at a boundary are kept. */
void mm_reuse_boundaries(mm_scheduler *s);
/* At most `rows`, so that the chunk ends at the next boundary whose states are to be kept. */
uint32_t mm_reuse_cut(const mm_scheduler *s, const job *j, uint32_t rows);
/* Returns true if a running job is about to compute more of this job's prompt than the cache has, and this one will find it wherever it
 * runs, or is the one that mm_reuse_wait_in found; or if so many were looked at that this one's turn is before the next step. */
bool mm_reuse_duplicate(mm_scheduler *s, job *j);
/* Tokens of its prompt that a job of the group reads just now, so many beyond those that the group's pages have that they are worth a wait;
 * 0: none, or they come by way of host memory. */
uint32_t mm_reuse_read_in(mm_scheduler *s, const job *j, uint32_t group);
/* Returns true if the job waits for such a one, as mm_reuse_duplicate says from then on without another look at the tokens. */
bool mm_reuse_wait_in(mm_scheduler *s, job *j, uint32_t group);
/* Tokens of the longest prefix that it would find, in any group. */
uint32_t mm_reuse_longest(mm_scheduler *s, const job *j);
/* Frees pages of the group that the cache alone refers to; how many. Waits for their copies if they go to host memory. */
uint32_t mm_reuse_evict(mm_scheduler *s, uint32_t group);
/* For the one job of a group, of which the cache can free no page: gives up the page that it would have to copy before it writes there;
 * where that is not what it lacks, all pages of the group. False if the cache has none. */
bool mm_reuse_make_way(mm_scheduler *s, uint32_t group);
/* Nothing is kept: of what slots held, after a failure nobody knows what is good. */
void mm_reuse_clear(mm_scheduler *s);

/* ---- offload.c: pages of the prefix cache in host memory; nothing of it does anything without a pool ---- */
MM_MUST_USE bool mm_offload_open(mm_scheduler *s, mm_err *err);
void mm_offload_close(mm_scheduler *s);
/* Returns true if pages of the job's cached prefix are on their way to the group's device; starts that, at most a few times a turn. */
bool mm_offload_fetch(mm_scheduler *s, job *j, uint32_t group);
/* Notices copies that have ended. wait: after those between the device and host memory have. */
void mm_offload_poll(mm_scheduler *s, bool wait);
/* The engine is lost, and may say of no copy that it has ended: what is on its way is given up, and no entry is good. */
void mm_offload_lost(mm_scheduler *s);
/* Returns true if pages are on their way to or from the disk. */
bool mm_offload_copying(const mm_scheduler *s);
/* Waits until all have that are not on their way to disk; for those from there, MM_DISK_WAIT_S at most. */
void mm_offload_wait(mm_scheduler *s);
/* After a step was queued: moves pages out before the next steps need theirs. */
void mm_offload_ahead(mm_scheduler *s);
/* As mm_reuse_evict. */
uint32_t mm_offload_evict(mm_scheduler *s, uint32_t group);
/* Gives the engine and the disk what the cache has listed. */
void mm_offload_issue(mm_scheduler *s);
/* The same, and waits for the engine's copies. */
void mm_offload_settle(mm_scheduler *s);
/* For a job that has had no slot and takes so many places: others go to disk for it. True while it is to wait for those copies. */
bool mm_offload_spills(mm_scheduler *s, job *j, uint32_t places);

/* ---- transfer_send.c, for other servers: nothing of it does anything without one that listens ---- */
MM_MUST_USE bool mm_send_open(mm_scheduler *s, mm_err *err);
MM_MUST_USE bool mm_send_start(mm_scheduler *s, mm_err *err); /* connections, when the thread runs */
/* No connection is taken any more; without `drain` those that there are end. Then the thread ends, then close. */
void mm_send_stop(mm_scheduler *s, bool drain);
void mm_send_close(mm_scheduler *s);
void mm_send_poll(mm_scheduler *s);
void mm_send_step(mm_scheduler *s);
/* The job is about to leave its slot. keep: what that holds is good. */
void mm_send_leave(mm_scheduler *s, const job *j, bool keep);
void mm_send_ended(mm_scheduler *s, mm_sending *g, mm_finish reason, const mm_err *err);
/* Moves have failed: so has everything under way. */
void mm_send_fail(mm_scheduler *s);
void mm_send_stats(mm_scheduler *s, mm_transfer_stats *out); /* any thread */
/* Returns true if some prompt is being sent. *waits becomes false if pages of it are on their way to host memory. */
bool mm_send_busy(const mm_scheduler *s, bool *waits);

/* ---- transfer_receive.c, from another server: nothing of it does anything without one ---- */
MM_MUST_USE bool mm_receive_open(mm_scheduler *s, mm_err *err);
void mm_receive_close(mm_scheduler *s);
/* Returns true if the job waits for its prompt, which is fetched if it is long and not in the cache. */
bool mm_receive_waits(mm_scheduler *s, job *j);
void mm_receive_poll(mm_scheduler *s);
/* The job has ended. */
void mm_receive_leave(job *j);
/* The job has its first slot, and in it what the cache has. */
void mm_receive_entered(mm_scheduler *s, job *j);
bool mm_receive_busy(const mm_scheduler *s);
void mm_receive_stats(mm_scheduler *s, mm_transfer_stats *out);
/* Nothing can be stepped: waits a little where prompts are being sent or fetched. */
void mm_transfer_idle(mm_scheduler *s);

/* ---- drafts.c ---- */
MM_MUST_USE bool mm_drafts_open(mm_scheduler *s, mm_err *err);
void mm_drafts_close(mm_scheduler *s);
/* Returns true if proposals pay for the number of requests that decode now, as measured, all of them or, where a request seems to copy what
 * stands before, those behind long matches (copies_only); now and then returns the opposite, to measure that too. */
bool mm_drafts_wanted(mm_scheduler *s);
/* Asks the engine's draft, if it has one, for proposals for the jobs that the next step decodes. After a failure no slot holds anything. */
MM_MUST_USE bool mm_drafts_propose(mm_scheduler *s, mm_err *err);
/* Proposes at most `most` tokens after the job's last one; how many. */
uint32_t mm_drafts_find(const mm_scheduler *s, job *j, uint32_t most);
/* The job got tokens: while proposals are made, what the next lookup reads is fetched; else it is noted whether a long match stands before.
 */
void mm_drafts_look(mm_scheduler *s, job *j);
/* The job has ended: its reply is where the next ones are looked up too. */
void mm_drafts_keep(mm_scheduler *s, const job *j);
void mm_drafts_judge(mm_scheduler *s, job *j, uint32_t drafted, uint32_t right);
/* A step was collected now and gave so many tokens. */
void mm_drafts_measure(mm_scheduler *s, const step *t, uint32_t tokens, double now);

/* ---- batching.c ---- */
MM_MUST_USE bool mm_step_open(mm_scheduler *s, mm_err *err);
void mm_step_close(mm_scheduler *s);
/* Queues the next step, if there is anything to do; true if it was. */
bool mm_step_queue(mm_scheduler *s);
/* Waits for the oldest step and delivers its tokens. */
void mm_step_collect(mm_scheduler *s);

#endif
