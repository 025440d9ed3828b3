/* Builds the batch of one step, [decode rows | chunks of prompts] within a budget of tokens, and what comes back. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/scheduler_inside.h"

bool mm_step_open(mm_scheduler *s, mm_err *err) {
  const size_t rows = s->c.step_tokens;
  for (uint32_t i = 0; i < MM_QUEUE; i++)
    if (!(s->step[i].group = mm_calloc(3 * (size_t)s->slots, sizeof(output_group), err))) return false;
  return (s->build.id = mm_calloc(rows, sizeof *s->build.id, err)) && (s->build.span = mm_calloc(s->slots, sizeof *s->build.span, err)) &&
         (s->build.out = mm_calloc(rows, sizeof *s->build.out, err)) &&
         (s->build.sampling = mm_calloc(rows, sizeof *s->build.sampling, err)) &&
         (s->build.bias = mm_calloc(rows, sizeof *s->build.bias, err)) && (s->sampled = mm_calloc(rows, sizeof *s->sampled, err)) &&
         (s->build.masks.slot = mm_calloc(s->slots, sizeof *s->build.masks.slot, err)) &&
         (s->build.masks.allowed = mm_calloc(s->slots, sizeof *s->build.masks.allowed, err)) &&
         (s->order = mm_calloc(s->slots, sizeof(job *), err)) && (s->build.free = mm_calloc(s->groups.count, sizeof *s->build.free, err));
}

void mm_step_close(mm_scheduler *s) {
  for (uint32_t i = 0; i < MM_QUEUE; i++) {
    free(s->step[i].group);
    free(s->step[i].logprob);
  }
  mm_team_close(s->build.masks.team);
  MM_FREE(s->build.masks.slot, (void *)s->build.masks.allowed, s->build.id, s->build.span, s->build.out, s->build.sampling, s->build.bias,
          s->build.free, s->sampled, s->order);
}

/* ---- how many rows each gets ---- */

/* Tokens of the job that its slot was not given; one that is being sampled counts where steps go ahead. */
static uint32_t left_of(const mm_scheduler *s, const job *j) {
  const uint32_t reply = j->count - j->r.prompt_count + j->in_flight;
  if (reply >= j->r.max_tokens || (j->in_flight && !s->ahead)) return 0;
  return j->count + j->in_flight - j->fed;
}

/* Pages that `rows` more tokens in the job's slot take, as mm_pages_reserve counts them. */
static uint64_t pages_for(const mm_scheduler *s, const job *j, uint32_t rows) {
  const uint32_t slot = (uint32_t)j->slot, held = mm_pages_held(s->pages, slot), first = j->fed / MM_PAGE;
  const uint32_t *table = mm_pages_table(s->pages) + (size_t)slot * mm_pages_per_slot(s->pages);
  const uint64_t end = mm_ceil_div((uint64_t)j->fed + rows, MM_PAGE);
  uint64_t n = end > held ? end - held : 0;
  for (uint32_t i = first; i < mm_min(held, end); i++) n += mm_pages_references(s->pages, table[i]) > 1;
  return n;
}

/* As many of `rows` as there are pages for in the job's group, when the cache has made room. */
static uint32_t within_pages(mm_scheduler *s, const job *j, uint32_t rows) {
  if (!s->pages) return rows;
  uint64_t *const free_pages = &s->build.free[mm_schedule_group(s, j)];
  for (uint32_t over; rows && pages_for(s, j, rows) > *free_pages;) {
    const uint32_t freed = mm_reuse_evict(s, mm_schedule_group(s, j));
    *free_pages += freed;
    if (freed) continue;
    over = (j->fed + rows) % MM_PAGE; /* back to the border before */
    rows -= (uint32_t)mm_min(rows, over ? over : MM_PAGE);
  }
  if (rows) *free_pages -= pages_for(s, j, rows);
  return rows;
}

/* Tokens until the job has read its prompt, or what others wait for of it. */
static uint32_t needed(const job *j) { return (j->awaited > j->fed ? (uint32_t)mm_min(j->awaited, j->count) : j->count) - j->fed; }

/* Larger priorities first, then what is soonest done, then who came first. */
static int by_need(const void *a, const void *b) {
  const job *x = *(job *const *)a, *y = *(job *const *)b;
  if (x->need != y->need) return x->need > y->need ? -1 : 1;
  const uint32_t m = needed(x), n = needed(y);
  if (m != n) return m < n ? -1 : 1;
  return x->ticket < y->ticket ? -1 : 1;
}

/* The prompts share what rows the step has left: the one that came first gets a quarter at least, so that short ones do not hold it up for
 * ever, and the rest goes to what is soonest done. */
static uint32_t plan_prompts(mm_scheduler *s, uint32_t count, uint32_t budget) {
  if (!count || !budget) return 0;
  job *oldest = s->order[0];
  for (uint32_t i = 1; i < count; i++)
    if (s->order[i]->need == oldest->need ? s->order[i]->ticket < oldest->ticket : s->order[i]->need > oldest->need) oldest = s->order[i];
  qsort(s->order, count, sizeof(job *), by_need);
  const uint32_t kept = (uint32_t)mm_min(left_of(s, oldest), mm_max(1, budget / 4));
  uint32_t left = budget - kept, rows = 0;
  for (uint32_t i = 0; i < count; i++) {
    job *j = s->order[i];
    const uint32_t own = j == oldest ? kept : 0, more = (uint32_t)mm_min(left_of(s, j) - own, left);
    /* Each row of a prompt that is scored is an output. */
    const uint32_t cut = mm_reuse_cut(s, j, j->r.score ? (uint32_t)mm_min(own + more, 1 + s->build.spare) : own + more);
    if (j->r.score && cut > 1) s->build.spare -= cut - 1;
    left = left + own - cut;
    rows += j->take = within_pages(s, j, cut);
  }
  return rows;
}

/* Rows of the step: one for each that decodes, then chunks of prompts. *shorted: one that decodes lacks a page, or NULL. */
static uint32_t plan(mm_scheduler *s, const job **shorted) {
  uint32_t rows = 0, prompts = 0;
  for (uint32_t g = 0; s->pages && g < s->groups.count; g++) s->build.free[g] = mm_pages_free_in(s->pages, g);
  *shorted = NULL;
  s->build.spare = s->slots * (1 + s->c.drafts) - s->running;
  for (uint32_t i = 0; i < s->slots; i++) {
    job *j = s->slot[(s->first + i) % s->slots];
    if (!j) continue;
    const uint32_t left = left_of(s, j);
    j->take = j->drafts = 0;
    if (left > 1) s->order[prompts++] = j;
    if (left != 1 || rows == s->c.step_tokens) continue;
    const uint32_t drafts = mm_drafts_find(s, j, s->c.step_tokens - rows - 1);
    rows += j->take = within_pages(s, j, 1 + drafts);
    if (j->take) j->drafts = j->take - 1;
    s->build.spare -= j->drafts;
    if (!j->take) *shorted = j;
  }
  return rows + plan_prompts(s, prompts, s->c.step_tokens - rows);
}

/* The newest jobs are preempted until decoding jobs of their group have their pages, or until some job can run. */
static uint32_t plan_all(mm_scheduler *s) {
  for (;;) {
    const job *shorted;
    const uint32_t rows = plan(s, &shorted);
    if (!shorted && (rows || s->queued > s->collected || !s->running)) return rows;
    const uint32_t group = mm_schedule_group(s, shorted ? shorted : mm_schedule_victim(s, MM_ANY_GROUP));
    if (mm_schedule_running(s, group) == 1 && mm_reuse_make_way(s, group)) continue; /* it had pages in common with the cache */
    mm_schedule_preempt(s, mm_schedule_victim(s, group));
  }
}

/* ---- masks ---- */

#define MASK_THREADS  8    /* at most */
#define MASKS_ALONE_S 5e-4 /* seconds that one thread makes them; most are remembered */

static bool make_mask(void *ctx, size_t item, unsigned worker, mm_err *err) {
  mm_scheduler *s = ctx;
  const uint32_t slot = s->build.masks.slot[s->build.masks.next + item];
  (void)worker, (void)err;
  s->build.masks.allowed[slot] = s->slot[slot]->r.allow(s->slot[slot]->r.user);
  return true;
}

/* Makes the masks of the first `count` listed slots. Several threads make what is left after a while: one mask may take tens of
 * milliseconds. */
static void make_masks(mm_scheduler *s, size_t count) {
  step_masks *m = &s->build.masks;
  mm_err err = {0};
  const double began = mm_now();
  m->next = 0;
  for (; m->next < count && (m->alone || m->next + 2 > count || mm_now() - began < MASKS_ALONE_S); m->next++) make_mask(s, 0, 0, &err);
  if (m->next == count) return;
  if (!m->team) m->team = mm_team_open((unsigned)mm_min(mm_pool_cpus(), MASK_THREADS), &err);
  m->alone = !m->team;
  if (m->alone)
    for (; m->next < count; m->next++) make_mask(s, 0, 0, &err);
  else
    mm_either_way(mm_team_run(m->team, count - m->next, make_mask, s, &err)); /* it does not fail */
}

/* The masks of what a step without deferred sampling is about to sample. */
static void make_own_masks(mm_scheduler *s) {
  size_t count = 0;
  for (uint32_t i = 0; i < s->slots; i++) {
    const job *j = s->slot[i];
    if (j && j->take && j->r.allow && j->fed + j->take >= j->count) s->build.masks.slot[count++] = i;
  }
  make_masks(s, count);
}

/* ---- the batch ---- */

static mm_logprob *logprobs_of(const mm_scheduler *s, step *t, uint32_t out, mm_err *err) {
  if (!t->logprob) t->logprob = mm_calloc(s->c.step_tokens, (1 + MM_LOGPROBS) * sizeof *t->logprob, err);
  return t->logprob ? t->logprob + (size_t)out * (1 + MM_LOGPROBS) : NULL;
}

/* How the token after the step's next output is sampled, but for its mask if that is made while the pass runs. */
static bool add_output(mm_scheduler *s, step *t, const job *j, uint32_t row, mm_err *err) {
  mm_sampling *set = &s->build.sampling[t->outs];
  *set = j->r.sampling;
  if (j->r.allow && !s->build.deferred) set->allowed = s->build.masks.allowed[j->slot];
  if ((set->logprobs || set->top_logprobs) && !(set->logprobs = logprobs_of(s, t, t->outs, err))) return false;
  s->build.out[t->outs++] = row;
  return true;
}

/* Outputs of the step's rows before the prompt's last, whose sampled token is the prompt's next one: a bias that no logit reaches. Its
 * logprob is that of the logits before the bias. */
static bool add_scores(mm_scheduler *s, step *t, job *j, uint32_t row, mm_err *err) {
  const uint32_t end = (uint32_t)mm_min(j->fed + j->take, j->r.prompt_count - 1);
  if (!j->r.score || j->fed >= end) return true;
  t->group[t->groups++] = (output_group){.job = j, .turn = j->turn, .first = t->outs, .count = end - j->fed, .pos = j->fed, .scored = true};
  for (uint32_t at = j->fed; at < end; at++, row++) {
    mm_sampling *set = &s->build.sampling[t->outs];
    s->build.bias[t->outs] = (mm_bias){.id = j->token[at + 1], .add = 1e30f};
    *set = (mm_sampling){.top_p = 1, .bias = &s->build.bias[t->outs], .bias_count = 1, .top_logprobs = j->r.sampling.top_logprobs};
    if (!(set->logprobs = logprobs_of(s, t, t->outs, err))) return false;
    s->build.out[t->outs++] = row;
  }
  return true;
}

/* The step reads tokens of a prompt whose progress is wanted. */
static bool shows_prefill(const job *j) { return j->r.prefill && j->fed < j->r.prompt_count; }

static void add_prefill(step *t, job *j) {
  const uint32_t end = (uint32_t)mm_min(j->fed + j->take, j->r.prompt_count);
  if (shows_prefill(j)) t->group[t->groups++] = (output_group){.job = j, .turn = j->turn, .pos = end, .prefill = true};
}

/* The job's i-th token of this step. */
static int32_t id_of(const job *j, uint32_t i) {
  const uint32_t at = j->fed + i;
  if (at < j->count) return j->token[at];
  return j->drafts ? j->draft[at - j->count] : MM_ID_SAMPLED;
}

static bool add_job(mm_scheduler *s, step *t, mm_batch *b, job *j, mm_err *err) {
  s->build.span[b->span_count++] = (mm_span){j->slot, b->tokens, j->take, j->fed};
  for (uint32_t i = 0; i < j->take; i++) s->build.id[b->tokens + i] = id_of(j, i);
  if (!add_scores(s, t, j, b->tokens, err)) return false;
  add_prefill(t, j);
  b->tokens += j->take;
  if (j->fed + j->take < j->count) return true;
  t->group[t->groups++] = (output_group){.job = j, .turn = j->turn, .first = t->outs, .count = 1 + j->drafts, .pos = j->fed};
  for (uint32_t row = b->tokens - 1 - j->drafts; row < b->tokens; row++)
    if (!add_output(s, t, j, row, err)) return false;
  return true;
}

static bool build(mm_scheduler *s, step *t, mm_batch *b, mm_err *err) {
  bool prompts = false;
  *t = (step){.group = t->group, .logprob = t->logprob, .began = s->draft.began > 0 ? s->draft.began : mm_now()};
  /* A device that could have been given this step before the last one was read pays for the lookup, whatever that finds. */
  t->drafted = s->draft.wanted && mm_engine_queues(s->engine);
  *b = (mm_batch){.id = s->build.id, .span = s->build.span, .out = s->build.out, .sampling = s->build.sampling};
  if (!s->build.deferred) make_own_masks(s);
  for (uint32_t i = 0; i < s->slots; i++) {
    job *j = s->slot[i];
    if (!j || !j->take) continue;
    prompts |= j->take > 1 + j->drafts || shows_prefill(j);
    t->drafted |= j->drafts > 0;
    t->copies |= j->drafts && j->lookup.long_match;
    if (!add_job(s, t, b, j, err)) return false;
  }
  b->out_count = t->outs;
  t->decoders = prompts ? 0 : t->groups;
  return true;
}

/* The slots of a step that failed hold nothing. */
static void fail_step(mm_scheduler *s, const mm_err *err) {
  mm_health_failed(s, err);
  mm_reuse_clear(s);
  for (uint32_t i = 0; i < s->slots; i++)
    if (s->slot[i] && s->slot[i]->take) mm_scheduler_end(s, s->slot[i], MM_FINISH_ERROR, err);
}

static void count_step(mm_scheduler *s, step *t) {
  for (uint32_t i = 0; i < s->slots; i++)
    if (s->slot[i]) s->slot[i]->fed += s->slot[i]->take, s->own.busy += s->slot[i]->take > 0;
  for (uint32_t i = 0; i < t->groups; i++) {
    if (!t->group[i].scored) t->group[i].job->in_flight += t->group[i].count;
    t->group[i].job->rows_out++;
  }
  s->queued++;
  s->own.steps++;
}

static bool any_masks(const mm_scheduler *s) {
  for (uint32_t i = 0; i < s->slots; i++)
    if (s->slot[i] && s->slot[i]->r.allow) return true;
  return false;
}

/* Time spent in the engine, by the clock and of this thread. */
typedef struct spell {
  double wall, cpu;
} spell;
static spell enter_engine(void) { return (spell){mm_now(), mm_scheduler_cpu()}; }
static void leave_engine(mm_scheduler *s, spell began) {
  s->own.step_seconds += mm_now() - began.wall;
  s->inside += mm_scheduler_cpu() - began.cpu;
}

/* ---- what comes back ---- */

/* One token of the reply; false when the job has ended. */
static bool deliver(mm_scheduler *s, job *j, int32_t id, const mm_logprob *logprob) {
  mm_err err = {0};
  j->in_flight--;
  if (id < 0)
    mm_fail(&err, MM_INTEGRITY, "E_LOGITS", mm_at(NULL, NULL), "no logit after %u tokens is a number", j->count);
  else
    mm_either_way(MM_GROW(j->token, &j->token_cap, j->count + (size_t)1, &err));
  if (err.status != MM_OK) {
    mm_scheduler_end(s, j, MM_FINISH_ERROR, &err);
    return false;
  }
  j->token[j->count++] = id;
  s->own.reply_tokens++;
  const mm_progress progress = mm_scheduler_progress(j);
  bool stops = !j->r.token(j->r.user, id, logprob, &progress);
  for (uint32_t i = 0; i < j->r.stop_count; i++) stops |= j->r.stop[i] == id;
  if (!stops && progress.reply_tokens < j->r.max_tokens) return true;
  mm_scheduler_end(s, j, stops ? MM_FINISH_STOP : MM_FINISH_LENGTH, NULL);
  return false;
}

/* Hands on the logprobs of the prompt's tokens that have not been before: the job may have given way and read its prompt anew. */
static void deliver_scores(const mm_scheduler *s, const step *t, const output_group *g) {
  job *j = g->job;
  for (uint32_t i = 0; i < g->count; i++) {
    mm_logprob *l = t->logprob + (size_t)(g->first + i) * (1 + MM_LOGPROBS);
    const int32_t id = j->token[g->pos + i + 1];
    if (g->pos + i < j->scored) continue;
    if (s->sampled[g->first + i] != id) l[0] = (mm_logprob){id, -INFINITY}; /* an id that no step samples */
    j->scored = g->pos + i + 1;
    j->r.score(j->r.user, l);
  }
}

/* Delivers the tokens that a step sampled for the job, up to the first wrong draft; returns their number. */
static uint32_t deliver_all(mm_scheduler *s, const step *t, const output_group *g) {
  job *j = g->job;
  if (j->ended || j->turn != g->turn) return 0;
  if (g->scored) {
    deliver_scores(s, t, g);
    return 0;
  }
  if (g->prefill) {
    if (g->pos > j->prefilled) j->r.prefill(j->r.user, j->prefilled = g->pos, j->cached); /* not before: it may have given way */
    return 0;
  }
  const bool wanted = j->r.sampling.logprobs || j->r.sampling.top_logprobs;
  const uint32_t drafts = g->count - 1;
  uint32_t right = 0;
  while (right < drafts && s->sampled[g->first + right] == j->draft[right]) right++;
  if (drafts) {
    mm_drafts_judge(s, j, drafts, right);
    j->in_flight = right + 1;
  }
  for (uint32_t i = 0; i <= right; i++) {
    if (drafts) j->fed = g->pos + i + 1; /* what comes after in the slot is given anew */
    if (!deliver(s, j, s->sampled[g->first + i], wanted ? t->logprob + (size_t)(g->first + i) * (1 + MM_LOGPROBS) : NULL)) return i + 1;
  }
  mm_drafts_look(s, j);
  return right + 1;
}

/* After a failure nothing is queued any more and no slot holds anything. */
static void fail_all(mm_scheduler *s, const mm_err *err) {
  mm_health_failed(s, err);
  mm_reuse_clear(s);
  for (uint32_t i = 0; i < s->slots; i++)
    if (s->slot[i]) mm_scheduler_end(s, s->slot[i], MM_FINISH_ERROR, err);
  for (; s->collected < s->queued; s->collected++) {
    const step *t = &s->step[s->collected % MM_QUEUE];
    for (uint32_t i = 0; i < t->groups; i++) mm_scheduler_forget(t->group[i].job);
  }
}

static void count_tokens(mm_step_tokens *h, uint64_t tokens) {
  size_t i = 0;
  while (i < MM_STEP_BUCKETS && tokens > (uint64_t)1 << i) i++;
  h->count[i] += tokens > 0;
  h->sum += tokens;
}

void mm_step_collect(mm_scheduler *s) {
  const step *t = &s->step[s->collected % MM_QUEUE];
  mm_err err = {0};
  const spell began = enter_engine();
  const bool done = mm_engine_collect(s->engine, s->sampled, &err);
  leave_engine(s, began);
  if (!done) {
    fail_all(s, &err);
    return;
  }
  s->collected++;
  mm_health_good(s);
  uint32_t tokens = 0;
  uint64_t prompts = 0; /* tokens of those whose first token is here */
  for (uint32_t i = 0; i < t->groups; i++) {
    job *j = t->group[i].job;
    const uint32_t prompt = j->r.prompt_count, before = j->count, delivered = deliver_all(s, t, &t->group[i]);
    tokens += delivered;
    prompts += delivered && before == prompt ? prompt : 0;
    mm_scheduler_forget(j);
  }
  count_tokens(&s->own.step_tokens, prompts + tokens);
  mm_drafts_measure(s, t, tokens, mm_now());
}

/* ---- a step is queued ---- */

static bool is_masked(const output_group *g) {
  return !g->scored && !g->prefill && g->job->r.allow && !g->job->ended && g->job->turn == g->turn;
}

/* Masks of a step whose pass is queued. They depend on the tokens of the step before, which are collected first: both while the pass runs.
 * After a failure nothing is queued any more. */
static void sample_deferred(mm_scheduler *s) {
  const step *t = &s->step[(s->queued - 1) % MM_QUEUE];
  mm_err err = {0};
  while (s->queued - s->collected > 1) mm_step_collect(s);
  if (s->queued == s->collected) return; /* that failed */
  size_t count = 0;
  for (uint32_t i = 0; i < t->groups; i++)
    if (is_masked(&t->group[i])) s->build.masks.slot[count++] = (uint32_t)t->group[i].job->slot;
  make_masks(s, count);
  for (uint32_t i = 0; i < t->groups; i++)
    if (is_masked(&t->group[i])) s->build.sampling[t->group[i].first].allowed = s->build.masks.allowed[t->group[i].job->slot];
  const spell began = enter_engine();
  const bool done = mm_engine_sample(s->engine, s->build.sampling, &err);
  leave_engine(s, began);
  if (!done) fail_all(s, &err);
}

static bool queue_pass(mm_scheduler *s, const mm_batch *batch, mm_err *err) {
  const spell began = enter_engine();
  const bool done = s->build.deferred ? mm_engine_forward(s->engine, batch, err) : mm_engine_queue(s->engine, batch, err);
  leave_engine(s, began);
  return done;
}

bool mm_step_queue(mm_scheduler *s) {
  const bool masks = any_masks(s);
  s->draft.wanted = mm_drafts_wanted(s);
  s->build.deferred = masks && mm_engine_defers(s->engine);
  s->ahead = !s->draft.wanted && mm_engine_queues(s->engine) && (!masks || s->build.deferred);
  mm_err err = {0};
  if (!mm_drafts_propose(s, &err)) {
    fail_all(s, &err);
    return false;
  }
  if (!plan_all(s)) return false;
  step *t = &s->step[s->queued % MM_QUEUE];
  mm_batch batch;
  if (!build(s, t, &batch, &err) || !queue_pass(s, &batch, &err)) {
    fail_step(s, &err);
    return false;
  }
  count_step(s, t);
  mm_reuse_boundaries(s);
  mm_send_step(s);
  mm_offload_ahead(s);
  s->first = (s->first + 1) % s->slots;
  if (s->build.deferred) sample_deferred(s);
  return true;
}
