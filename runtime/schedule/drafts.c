/* Prompt lookup: what followed the last tokens of a sequence where they stood in it before is proposed as what follows them now, and the
 * step that computes the next token checks the proposals in rows of their own. Every token is chosen by the model as it would be alone;
 * right proposals save steps, wrong ones cost rows. Measured rates decide whether it is done. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/scheduler_inside.h"

enum {
  WINDOW = 16384, /* tokens that are looked through, backwards */
  GRAM = 3,       /* tokens that have to stand there alike; or else GRAM - 1 */
  ENOUGH = 3,     /* steps of each way before one is chosen */
  TRIAL = 64      /* every so many steps the other way is measured */
};

bool mm_drafts_open(mm_scheduler *s, mm_err *err) {
  if (!s->c.drafts || s->lightning) return true;
  return (s->rate = mm_calloc(2 * (s->slots + (size_t)1), sizeof *s->rate, err));
}

void mm_drafts_close(mm_scheduler *s) { free(s->rate); }

static rate *rate_of(const mm_scheduler *s, uint32_t decoders, bool drafted) { return &s->rate[2 * (size_t)decoders + drafted]; }

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

bool mm_drafts_wanted(mm_scheduler *s) {
  if (!s->rate) return false;
  uint32_t decoders = 0;
  for (uint32_t i = 0; i < s->slots; i++) decoders += s->slot[i] && s->slot[i]->count == s->slot[i]->fed + 1;
  if (!decoders) return s->drafting;
  const rate *plain = rate_of(s, decoders, false), *drafted = rate_of(s, decoders, true);
  if (plain->steps < ENOUGH || drafted->steps < ENOUGH) return plain->steps >= drafted->steps;
  const bool pays = drafted->tokens * median(plain) > plain->tokens * median(drafted);
  return s->own.steps % TRIAL ? pays : !pays;
}

/* Where the last `gram` tokens stood before: the place after them, 0 for nowhere. */
static uint32_t find_gram(const job *j, uint32_t gram) {
  const int32_t *end = j->token + j->count - gram;
  const uint32_t lowest = j->count > WINDOW ? j->count - WINDOW : 0;
  for (uint32_t at = j->count - gram; at-- > lowest;)
    if (j->token[at] == end[0] && memcmp(j->token + at, end, gram * sizeof *end) == 0) return at + gram;
  return 0;
}

/* As many as were right of late. */
uint32_t mm_drafts_find(const mm_scheduler *s, job *j, uint32_t most) {
  const uint32_t reply = j->count - j->r.prompt_count;
  j->drafts = 0;
  if (!s->drafting || j->r.allow || j->count <= GRAM || reply + 1 >= j->r.max_tokens) return 0;
  uint32_t at = find_gram(j, GRAM);
  if (!at) at = find_gram(j, GRAM - 1);
  if (!at) return 0;
  const uint32_t likely = 1 + (uint32_t)(j->acceptance * s->c.drafts);
  most = (uint32_t)mm_min(mm_min(most, j->r.max_tokens - reply - 1), mm_min(likely, s->c.drafts));
  /* A draft continues where the tokens end. */
  for (; j->drafts < most; j->drafts++) {
    const uint32_t from = at + j->drafts;
    j->draft[j->drafts] = from < j->count ? j->token[from] : j->draft[from - j->count];
  }
  return j->drafts;
}

void mm_drafts_judge(mm_scheduler *s, job *j, uint32_t drafted, uint32_t right) {
  s->own.drafted += drafted;
  s->own.accepted += right;
  j->acceptance += (((double)right / drafted) - j->acceptance) / 4;
}

void mm_drafts_measure(mm_scheduler *s, const step *t, uint32_t tokens, double now) {
  const double seconds = now - (t->began > s->over ? t->began : s->over);
  s->over = now;
  if (!s->rate || !t->decoders || seconds <= 0) return;
  rate *r = rate_of(s, t->decoders, t->drafted);
  r->seconds[r->steps % MM_DRAFTS_TIMES] = seconds;
  r->tokens += r->steps ? (tokens - r->tokens) / 8 : tokens;
  r->steps++;
}
