/* Host time of prompt lookup in one step of 64 requests, with nothing found and with text that repeats itself: microseconds of a step, in
 * which each request gets a token and asks for proposals, after sequences of 16,384 tokens and 200 replies. Exit status 1 above 20 us.
 * bench_lookup [REQUESTS [STEPS]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/scheduler_inside.h"

enum { PROMPT = 16384, REPLY = 1000, REPLIES = 200 };

static uint64_t seed = 1;
static uint32_t below(uint32_t n) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % n);
}

static void must(bool ok, const mm_err *err) {
  if (ok) return;
  fprintf(stderr, "bench_lookup: %s\n", err->text);
  exit(1);
}

/* The next id: a new one, or, in four of five places, that of an earlier text. */
static int32_t next_id(const int32_t *token, uint32_t count, bool repeats) {
  static uint32_t from;
  if (!repeats || count < 100) return (int32_t)below(200000);
  if (!below(5)) from = below(count - 50);
  return token[from++ % count];
}

/* The same by looking through the tokens, for 3 and for 2: seconds of a step. */
static double scan(const job *j, uint32_t requests, uint64_t *sum) {
  const double start = mm_now();
  for (uint32_t i = 0; i < requests; i++)
    for (uint32_t gram = 3; gram >= 2; gram--) {
      const int32_t *token = j[i].token, *end = token + j[i].count - gram;
      for (uint32_t at = PROMPT - gram; at-- > 0;)
        if (token[at] == end[0] && memcmp(token + at, end, gram * sizeof *end) == 0) {
          *sum += at;
          break;
        }
    }
  return mm_now() - start;
}

static int by_value(const void *a, const void *b) {
  return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

/* Seconds of a step: the lowest decile, which other work of the machine does not change. */
static double measure(uint32_t requests, uint32_t steps, bool repeats, double *begin, double *found, double *scanned) {
  mm_err err = {0};
  mm_scheduler s = {.slots = requests, .c.drafts = MM_DRAFTS, .draft.wanted = true};
  job *j = mm_calloc(requests, sizeof *j, &err);
  double *time = mm_calloc(steps, sizeof *time, &err);
  int32_t *reply = mm_calloc(REPLY, sizeof *reply, &err);
  must(j && time && reply && mm_drafts_open(&s, &err), &err);
  for (uint32_t r = 0; r < REPLIES; r++) {
    for (uint32_t t = 0; t < REPLY; t++) reply[t] = next_id(reply, t, repeats);
    mm_reply_index_add(s.draft.replies, 0, reply, REPLY);
  }
  for (uint32_t i = 0; i < requests; i++) {
    j[i] = (job){.count = PROMPT, .r = {.prompt_count = PROMPT, .max_tokens = steps + 9, .drafts = MM_DRAFTS}, .lookup.acceptance = {1, 1}};
    must((j[i].token = mm_calloc(PROMPT + (size_t)steps, sizeof *j[i].token, &err)), &err);
    for (uint32_t t = 0; t < PROMPT; t++) j[i].token[t] = next_id(j[i].token, t, repeats);
  }
  double first = mm_now();
  uint32_t proposed = 0;
  for (uint32_t i = 0; i < requests; i++) mm_drafts_find(&s, &j[i], MM_DRAFTS);
  *begin = (mm_now() - first) / requests;
  for (uint32_t n = 0; n < steps; n++) {
    for (uint32_t i = 0; i < requests; i++) j[i].token[j[i].count] = next_id(j[i].token, j[i].count, repeats), j[i].count++;
    const double start = mm_now();
    for (uint32_t i = 0; i < requests; i++) mm_drafts_look(&s, &j[i]);
    for (uint32_t i = 0; i < requests; i++) proposed += mm_drafts_find(&s, &j[i], MM_DRAFTS) > 0;
    time[n] = mm_now() - start;
  }
  qsort(time, steps, sizeof *time, by_value);
  const double low = time[steps / 10];
  uint64_t found_at = 0;
  *scanned = scan(j, requests, &found_at);
  if (found_at > UINT64_MAX / 2) exit(1); /* so that the search is made */
  *found = (double)proposed / steps / requests;
  for (uint32_t i = 0; i < requests; i++) mm_gram_index_close(&j[i].grams), free(j[i].token);
  mm_drafts_close(&s);
  MM_FREE(j, time, reply);
  return low;
}

int main(int argc, char **argv) {
  const uint32_t requests = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 64;
  const uint32_t steps = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 1000;
  if (!requests || !steps) return 2;
  double begin, none, some, scanned;
  const double repeats = measure(requests, steps, true, &begin, &some, &scanned);
  const double fresh = measure(requests, steps, false, &begin, &none, &scanned);
  printf(
      "%u requests of %u tokens: %.1f us a step with proposals for %.0f %% of them, %.1f us with %.0f %%; a prompt's index %.0f us, once; "
      "a scan of the first %.0f us a step\n",
      requests, PROMPT, 1e6 * fresh, 100 * none, 1e6 * repeats, 100 * some, 1e6 * begin, 1e6 * scanned);
  return fresh <= 20e-6 && repeats <= 20e-6 ? 0 : 1;
}
