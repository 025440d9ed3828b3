/* For tests of the scheduler: random requests, cancelled and late ones among them, each held against the oracle. */
#ifndef MM_TESTS_RANDOM_REQUESTS_H
#define MM_TESTS_RANDOM_REQUESTS_H

#include "tests/unit/runtime/serving.h"

static uint64_t seed = 1;
static uint32_t below(uint32_t n) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % n);
}

/* Texts 2·i and 2·i + 1 begin alike. */
static void fill(client *c, uint32_t text, uint32_t count) {
  for (uint32_t t = 0; t < count; t++) c->prompt[t] = (int32_t)((t * t * 3 + t * 7 + (t < 70 ? text / 2 : text) * 11) % 50);
  c->r.prompt_count = count;
}

static mm_model kind(uint32_t i) {
  static const mm_family family[] = {MM_FAMILY_M1, MM_FAMILY_M2, MM_FAMILY_M3};
  return ref_dims(family[i], !i);
}

/* uses: what the device's choice has (MM_SAMPLES_…). */
static void random_client(serving *w, client *c, uint32_t uses) {
  *c = (client){.r = {.max_tokens = below(12) ? below(40) : 0, .priority = (int)below(3), .salt = below(2)}};
  fill(c, below(8), below(3) ? 1 + below(100) : 1 + below(POSITIONS - 150));
  c->r.sampling = (mm_sampling){.temperature = below(2), .top_p = 1, .seed = below(100), .top_k = below(2) ? 0 : 10};
  c->r.sampling.top_p = below(3) ? 1 : 0.9;
  c->r.sampling.repetition = below(4) || !(uses & MM_SAMPLES_PENALTIES) ? 0 : 1.3;
  c->r.sampling.frequency = below(4) || !(uses & MM_SAMPLES_PENALTIES) ? 0 : 0.5;
  c->r.sampling.presence = below(6) || !(uses & MM_SAMPLES_PENALTIES) ? 0 : 0.7;
  c->r.sampling.min_p = below(6) || !(uses & MM_SAMPLES_MIN_P) ? 0 : 0.05;
  c->r.sampling.top_logprobs = below(4) ? 0 : 2;
  c->fewer = below(4) ? 0 : below(MM_DRAFTS + 1);
  c->bias = (mm_bias){(int32_t)below(50), 2};
  c->r.sampling.bias_count = below(4) == 0;
  c->stop[0] = (int32_t)below(50), c->stop[1] = (int32_t)below(50);
  c->r.stop_count = below(4) ? 0 : 2;
  c->leave_at = below(4) ? 0 : 1 + below(10);
  c->masked = below(4) == 0;
  for (uint32_t at = below(90); c->r.boundary_count < 3 && at <= c->r.prompt_count; at += 1 + below(90))
    c->boundary[c->r.boundary_count++] = at;
  if (below(12) == 0) c->r.deadline = 1e-9;
  client_ready(w, c);
}

/* A request of 90 tokens, all of them 7, by a prompt of 200: what it made of proposals. */
static inline mm_scheduler_stats easy_request(serving *w) {
  mm_scheduler_stats t;
  client c = {.r = {.max_tokens = 90, .sampling.bias_count = 1}, .bias = {7, 1000}};
  fill(&c, 1, 200);
  client_ready(w, &c);
  client_submit(w, &c);
  client_check(&c);
  serving_settled(w, &t);
  print_message("%llu steps for 90 tokens, %llu proposed, %llu right\n", (unsigned long long)t.steps, (unsigned long long)t.drafted,
                (unsigned long long)t.accepted);
  return t;
}

/* MANY at a time are submitted, some of them cancelled at once or later; in as many rounds as the environment's ROUNDS says times more, and
 * few where each step takes long. */
static void random_requests(serving *w, uint32_t uses, uint32_t rounds) {
  const char *more = getenv("ROUNDS");
  rounds = more ? rounds * (uint32_t)strtoul(more, NULL, 10) : SANITIZED ? 1 : rounds;
#ifdef __SANITIZE_THREAD__
  enum { MANY = 9 };
#else
  enum { MANY = 24 };
#endif
  client *c = malloc(MANY * sizeof *c);
  uint32_t ends[5] = {0};
  for (uint32_t r = 0; r < rounds; r++) {
    for (uint32_t i = 0; i < MANY; i++) random_client(w, &c[i], uses);
    for (uint32_t i = 0; i < MANY; i++) {
      client_submit(w, &c[i]);
      if (below(10) == 0) mm_scheduler_cancel(w->scheduler, c[below(i + 1)].ticket);
      if (below(6) == 0) client_wait(&c[below(i + 1)]);
    }
    for (uint32_t i = 0; i < MANY; i++) {
      client_check(&c[i]);
      ends[c[i].finish]++;
    }
  }
  mm_scheduler_stats t;
  mm_scheduler_stats_read(w->scheduler, &t);
  print_message("%u requests: %u stop, %u length, %u cancelled, %u late; %llu steps, %llu preempted, %llu of %llu prompt tokens cached\n",
                rounds * MANY, ends[MM_FINISH_STOP], ends[MM_FINISH_LENGTH], ends[MM_FINISH_CANCELLED], ends[MM_FINISH_DEADLINE],
                (unsigned long long)t.steps, (unsigned long long)t.preempted, (unsigned long long)t.cached_tokens,
                (unsigned long long)t.prompt_tokens);
  free(c);
}

#endif
