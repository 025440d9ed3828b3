/* Prompt lookup: what followed the last tokens of a sequence where they stood before, in it or in an earlier reply, is proposed as what
 * follows them now, and the step that computes the next token checks the proposals in rows of their own. Every token is sampled by the
 * model as it would be alone; right proposals save steps, wrong ones cost rows. Measured rates decide whether it is done. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/scheduler_inside.h"

enum {
  ENOUGH = 3,          /* steps of each way before the rates decide */
  FIRST_WAIT = 8,      /* steps until the way that loses is tried, when it has just begun to lose; then each time twice as many, to */
  USUAL_WAIT = 64,     /* these, and, while a trial takes more than one in TRIAL_SHARE of the time between two, */
  LONGEST_WAIT = 1024, /* to these */
  TRIAL_SHARE = 200,
  LONG = 8,    /* equal tokens before a place that go on alike, most likely */
  NEARER = 2,  /* tokens by which a match elsewhere has to be longer than one where a copy goes on */
  FOLLOWED = 4 /* tokens of a match that is taken for the beginning of a copy */
};

typedef enum proposal_kind {
  NO_PROPOSALS,
  PROPOSALS, /* of any kind */
  COPIES,    /* some of them behind a long match */
  KINDS
} proposal_kind;

/* The rates of a number of decoding requests: each up to 4 has its own, then two ranges of each power of two. */
static uint32_t bucket_of(uint32_t decoders) {
  uint32_t steps = 0;
  for (; decoders > 4; steps += 2) decoders = (decoders + 1) / 2;
  return steps + decoders;
}

bool mm_drafts_open(mm_scheduler *s, mm_err *err) {
  if (!s->c.drafts || s->lightning) return true;
  const bool learned = s->engine && mm_engine_drafts(s->engine);
  if (learned && (!(s->draft.request = mm_calloc(s->slots, sizeof *s->draft.request, err)) ||
                  !(s->draft.proposed = mm_calloc(s->slots, MM_DRAFTS * sizeof *s->draft.proposed, err))))
    return false;
  const uint32_t count = KINDS * (bucket_of(s->slots) + 1);
  if (!(s->draft.rate = mm_calloc(count, sizeof *s->draft.rate, err))) return false;
  for (uint32_t i = 0; i < count; i++) s->draft.rate[i].wait = USUAL_WAIT;
  return (s->draft.replies = mm_reply_index_open(err));
}

void mm_drafts_close(mm_scheduler *s) {
  MM_FREE(s->draft.rate, s->draft.request, s->draft.proposed);
  mm_reply_index_close(s->draft.replies);
}

static rate *rate_of(const mm_scheduler *s, uint32_t decoders, proposal_kind kind) {
  return &s->draft.rate[KINDS * bucket_of(decoders) + kind];
}

/* Median of the last steps' times: a single delayed step does not count. */
static double median(const rate *r) {
  const uint32_t n = (uint32_t)mm_min(r->steps, MM_DRAFTS_TIMES);
  double middle = 0;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t below = 0;
    for (uint32_t k = 0; k < n; k++) below += r->seconds[k] < r->seconds[i];
    if (below <= n / 2 && r->seconds[i] > middle) middle = r->seconds[i];
  }
  return middle;
}

static bool is_known(const rate *plain, const rate *drafted) { return plain->steps >= ENOUGH && drafted->steps >= ENOUGH; }

static bool is_better(const rate *plain, const rate *drafted) {
  return is_known(plain, drafted) && drafted->tokens * median(plain) > plain->tokens * median(drafted);
}

/* True if steps of this kind pay, or are to be measured now, which is not done while a prompt is read. */
static bool pays(const mm_scheduler *s, uint32_t decoders, proposal_kind kind, bool prompts) {
  const rate *plain = rate_of(s, decoders, NO_PROPOSALS), *drafted = rate_of(s, decoders, kind);
  if (!is_known(plain, drafted)) return !prompts && plain->steps >= drafted->steps;
  return is_better(plain, drafted) == (prompts || s->own.steps % drafted->wait);
}

bool mm_drafts_wanted(mm_scheduler *s) {
  if (!s->draft.rate) return false;
  uint32_t decoders = 0;
  bool copies = false, prompts = false, any = false;
  for (uint32_t i = 0; i < s->slots; i++) {
    const job *j = s->slot[i];
    if (!j) continue;
    prompts |= j->count + j->in_flight > j->fed + 1;
    if (j->count + j->in_flight != j->fed + 1) continue;
    decoders++;
    copies |= j->lookup.long_match;
    any |= j->r.drafts && !j->r.allow;
  }
  if (!decoders) return s->draft.wanted;
  const bool all = pays(s, decoders, PROPOSALS, prompts);
  s->draft.copies_only = !all;
  return any && (all || (copies && pays(s, decoders, COPIES, prompts)));
}

/* Proposals for one step of the job at most; 0 where none may be made. */
static uint32_t limit_of(const mm_scheduler *s, const job *j) {
  const uint32_t reply = j->count - j->r.prompt_count;
  if (!s->draft.wanted || j->r.allow || reply + 1 >= j->r.max_tokens) return 0;
  return (uint32_t)mm_min(mm_min(s->c.drafts, j->r.drafts), j->r.max_tokens - reply - 1);
}

/* The draft is asked for all that decode at once, or for as many as a step has rows for. */
bool mm_drafts_propose(mm_scheduler *s, mm_err *err) {
  const uint32_t each = s->draft.request && !s->draft.copies_only ? (uint32_t)mm_min(s->c.drafts, mm_engine_drafts(s->engine)) : 0;
  uint32_t n = 0;
  s->draft.began = 0;
  for (uint32_t i = 0; each && i < s->slots && (n + 1) * (1 + each) <= s->c.step_tokens; i++) {
    job *j = s->slot[(s->first + i) % s->slots];
    if (!j || j->in_flight || j->count != j->fed + 1 || !j->fed || !limit_of(s, j)) continue;
    s->draft.request[n++] = (mm_draft_request){(uint32_t)j->slot, j->fed, j->token[j->fed], &j->r.sampling};
  }
  if (!n) return true;
  s->draft.began = mm_now();
  if (!mm_engine_draft(s->engine, s->draft.request, n, each, s->draft.proposed, NULL, err)) return false;
  for (uint32_t i = 0; i < n; i++) {
    job *j = s->slot[s->draft.request[i].slot];
    j->learned = each;
    j->learned_at = j->count;
    memcpy(j->learned_draft, s->draft.proposed + (size_t)i * each, each * sizeof *s->draft.proposed);
  }
  return true;
}

/* The place of the job's own tokens whose text goes on as its end does, 0 for none; *matched: tokens before it that are equal. A text that
 * is being copied is followed through what was edited in it, although other places have the same few tokens. */
static uint32_t own_place(job *j, uint32_t *matched) {
  const uint64_t expected = j->lookup.copied + (uint64_t)(j->count - j->lookup.copied_at);
  const uint32_t place = j->lookup.copied && expected < j->count ? (uint32_t)expected : 0;
  uint32_t at = place, near;
  *matched = place ? mm_copy_match(j->token, j->count, place) : 0;
  if (*matched < LONG) {
    at = mm_gram_index_find(&j->grams, j->token, j->count, matched);
    const uint32_t copy = place && *matched < LONG ? mm_copy_find(j->token, j->count, place, &near) : 0;
    if (copy && near + NEARER >= *matched) at = copy, *matched = near;
  }
  if (at && *matched >= FOLLOWED) j->lookup.copied = at, j->lookup.copied_at = j->count;
  return at;
}

/* What follows the last tokens where many of them stood before, in this sequence or in a reply; else what the draft proposes, where there
 * is one; else what follows fewer of them. *matched: of how many; 0 for the draft's. */
static uint32_t propose(const mm_scheduler *s, job *j, uint32_t most, uint32_t *matched) {
  const bool learned = j->learned && j->learned_at == j->count;
  uint32_t other = 0, n = 0;
  const uint32_t at = own_place(j, matched);
  if (s->draft.replies && *matched < LONG && j->grams.at.count == j->count) {
    int32_t next[MM_DRAFTS];
    n = mm_reply_index_find(s->draft.replies, j->r.salt, &j->grams, j->token, next, most, &other);
    if (n && other > *matched && (!learned || other >= LONG)) return *matched = other, memcpy(j->draft, next, n * sizeof *next), n;
  }
  if (learned && *matched < LONG) {
    n = (uint32_t)mm_min(most, j->learned);
    j->from_draft = true, *matched = 0;
    return memcpy(j->draft, j->learned_draft, n * sizeof *j->draft), n;
  }
  if (!at) return 0;
  /* A draft continues where the tokens end. */
  for (n = 0; n < most; n++) j->draft[n] = at + n < j->count ? j->token[at + n] : j->draft[at + n - j->count];
  return n;
}

/* As many as were right of late. */
uint32_t mm_drafts_find(const mm_scheduler *s, job *j, uint32_t most) {
  const uint32_t limit = limit_of(s, j);
  uint32_t matched;
  j->drafts = 0;
  j->from_draft = false;
  if (!limit || !(most = (uint32_t)mm_min(most, limit))) return 0;
  const uint32_t n = propose(s, j, most, &matched);
  j->lookup.long_match = matched >= LONG;
  if (s->draft.copies_only && !j->lookup.long_match) return 0;
  return j->drafts =
             (uint32_t)mm_min(n, 1 + (uint32_t)(j->lookup.acceptance[j->lookup.long_match] * (double)mm_min(s->c.drafts, j->r.drafts)));
}

void mm_drafts_look(mm_scheduler *s, job *j) {
  if (!s->draft.rate || !j->r.drafts || j->r.allow) return;
  uint32_t matched;
  if (s->draft.wanted)
    mm_draft_index_prefetch(&j->grams, s->draft.replies, j->r.salt, j->token, j->count);
  else
    own_place(j, &matched), j->lookup.long_match = matched >= LONG;
}

void mm_drafts_keep(mm_scheduler *s, const job *j) {
  if (s->draft.replies) mm_reply_index_add(s->draft.replies, j->r.salt, j->token + j->r.prompt_count, j->count - j->r.prompt_count);
}

void mm_drafts_judge(mm_scheduler *s, job *j, uint32_t drafted, uint32_t right) {
  s->own.drafts++;
  s->own.drafted += drafted;
  s->own.learned += j->from_draft ? drafted : 0;
  s->own.accepted += right;
  j->drafted += drafted;
  j->accepted += right;
  double *acceptance = &j->lookup.acceptance[j->lookup.long_match];
  *acceptance += (((double)right / drafted) - *acceptance) / 4;
}

/* After a step of the way that loses: the next one is as soon as ever where this one won, and later where it lost by much. */
static void judge_trial(rate *drafted, const rate *better, double seconds, double tokens) {
  const double usual = median(better), lost = seconds - tokens / better->tokens * usual;
  if (lost <= 0)
    drafted->wait = (uint32_t)mm_min(drafted->wait, USUAL_WAIT);
  else if (drafted->wait < USUAL_WAIT || lost * TRIAL_SHARE > usual * drafted->wait)
    drafted->wait = (uint32_t)mm_min(2 * drafted->wait, LONGEST_WAIT);
}

void mm_drafts_measure(mm_scheduler *s, const step *t, uint32_t tokens, double now) {
  const double seconds = now - (t->began > s->draft.over ? t->began : s->draft.over);
  s->draft.over = now;
  if (!s->draft.rate || !t->decoders || seconds <= 0) return;
  const double each = (double)tokens / t->decoders;
  const proposal_kind kind = !t->drafted ? NO_PROPOSALS : t->copies ? COPIES : PROPOSALS;
  rate *plain = rate_of(s, t->decoders, NO_PROPOSALS), *r = rate_of(s, t->decoders, kind);
  bool better[KINDS] = {false};
  for (uint32_t k = PROPOSALS; k < KINDS; k++) {
    rate *drafted = rate_of(s, t->decoders, (proposal_kind)k);
    better[k] = is_better(plain, drafted);
    if (is_known(plain, drafted) && (better[k] ? r == plain : r == drafted))
      judge_trial(drafted, better[k] ? drafted : plain, seconds, each);
  }
  r->seconds[r->steps % MM_DRAFTS_TIMES] = seconds;
  r->tokens += r->steps ? (each - r->tokens) / 8 : each;
  r->steps++;
  for (uint32_t k = PROPOSALS; k < KINDS; k++) {
    rate *drafted = rate_of(s, t->decoders, (proposal_kind)k);
    if (is_better(plain, drafted) != better[k]) drafted->wait = FIRST_WAIT;
  }
}
