/* Many requests to one scheduler, and each to an engine alone: the same tokens. The prompts are pieces of a text, some of them the
 * beginning of others; half of the replies are greedy. Few pages, so that some wait again; cache and proposals on. crowd PACKED IDS.json
 * THREADS */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "formats/json.h"
#include "formats/option.h"
#include "runtime/schedule/scheduler.h"

enum { REQUESTS = 12, REPLY = 36, POSITIONS = 300, SLOTS = 5, PAGES = 7 };

typedef struct request {
  uint32_t count, got;
  int32_t prompt[POSITIONS], reply[REPLY], want[REPLY];
  mm_sampling sampling;
} request;

static void check(bool ok, const mm_err *err) {
  if (ok) return;
  fprintf(stderr, "crowd: %s\n", err->text);
  exit(1);
}

static bool on_token(void *user, int32_t id, const mm_logprob *logprobs, const mm_progress *p) {
  request *r = user;
  (void)logprobs, (void)p;
  r->reply[r->got++] = id;
  return true;
}

static void on_done(void *user, mm_finish reason, const mm_progress *p, const mm_err *err) {
  (void)user, (void)p;
  check(reason == MM_FINISH_LENGTH, err ? err : &(mm_err){.text = "a request that ended otherwise"});
}

/* Request i: the text from its own place on, but every third begins where the one before did. */
static void read_requests(request *r, const char *path) {
  mm_err err = {0};
  mm_json *ids = mm_json_load(path, UINT64_C(1) << 22, &err);
  check(ids, &err);
  for (uint32_t i = 0; i < REQUESTS; i++) {
    const size_t from = 1500 * (size_t)(i - (i % 3 == 2));
    r[i].count = 30 + 97 * i % (POSITIONS - REPLY - 30);
    r[i].sampling = (mm_sampling){.temperature = i % 2 ? 0.8 : 0, .top_p = i % 4 == 1 ? 0.9 : 1, .seed = i};
    for (uint32_t t = 0; t < r[i].count; t++) r[i].prompt[t] = (int32_t)mm_json_int(mm_json_at(ids, from + t));
  }
  mm_json_free(ids);
}

static mm_engine *open_engine(const mm_shards *shards, uint32_t slots, uint32_t pages, unsigned threads) {
  mm_err err = {0};
  const mm_engine_config c = {.ops = &mm_ops_cpu,
                              .limits = {.max_tokens = POSITIONS, .slots = slots, .max_positions = POSITIONS, .pages = pages},
                              .options.threads = threads};
  mm_engine *e = mm_engine_open(shards, &c, &err);
  check(e, &err);
  return e;
}

static void run_alone(mm_engine *e, request *r) {
  mm_err err = {0};
  int32_t id = 0;
  for (uint32_t t = 0; t < REPLY; t++) {
    const uint32_t rows = t ? 1 : r->count, out = rows - 1;
    const mm_span span = {0, 0, rows, t ? r->count + t - 1 : 0};
    check(mm_engine_queue(e, &(mm_batch){rows, t ? &id : r->prompt, 1, &span, 1, &out, &r->sampling, NULL}, &err), &err);
    check(mm_engine_collect(e, &id, &err), &err);
    r->want[t] = id;
  }
}

static mm_scheduler_stats run_crowd(mm_engine *e, request *r) {
  mm_err err = {0};
  mm_scheduler_stats s;
  const mm_scheduler_config c = {.step_tokens = 64,
                                 .queue_max = REQUESTS,
                                 .prefix_cache = true,
                                 .cache_bytes = 64 << 20,
                                 .batch_invariant = true,
                                 .drafts = MM_DRAFTS};
  mm_scheduler *scheduler = mm_scheduler_open(e, &c, &err);
  check(scheduler, &err);
  for (uint32_t i = 0; i < REQUESTS; i++) {
    uint64_t ticket;
    const mm_request q = {.prompt = r[i].prompt,
                          .prompt_count = r[i].count,
                          .max_tokens = REPLY,
                          .sampling = r[i].sampling,
                          .drafts = MM_DRAFTS,
                          .user = &r[i],
                          .token = on_token,
                          .done = on_done};
    check(mm_scheduler_submit(scheduler, &q, &ticket, &err), &err);
  }
  const struct timespec pause = {0, 5000000};
  do nanosleep(&pause, NULL), mm_scheduler_stats_read(scheduler, &s);
  while (s.running || s.waiting);
  mm_scheduler_close(scheduler, true);
  return s;
}

int main(int argc, char **argv) {
  mm_err err = {0};
  mm_shards shards;
  static request r[REQUESTS];
  mm_program_start();
  if (argc != 4) return 2;
  check(mm_shards_open(&shards, argv[1], &err), &err);
  read_requests(r, argv[2]);
  const unsigned threads = (unsigned)strtoul(argv[3], NULL, 10);
  mm_engine *alone = open_engine(&shards, 1, 0, threads), *crowd = open_engine(&shards, SLOTS, PAGES, threads);
  for (uint32_t i = 0; i < REQUESTS; i++) run_alone(alone, &r[i]);
  const mm_scheduler_stats s = run_crowd(crowd, r);
  for (uint32_t i = 0; i < REQUESTS; i++)
    for (uint32_t t = 0; t < REPLY; t++) {
      if (t < r[i].got && r[i].reply[t] == r[i].want[t]) continue;
      fprintf(stderr, "crowd: request %u, token %u of %u: found %d, alone %d\n", i, t, r[i].got, r[i].reply[t], r[i].want[t]);
      return 1;
    }
  printf("%u requests as alone: %llu of %llu prompt tokens cached, %llu preempted, %llu tokens proposed, %llu right\n", REQUESTS,
         (unsigned long long)s.cached_tokens, (unsigned long long)s.prompt_tokens, (unsigned long long)s.preempted,
         (unsigned long long)s.drafted, (unsigned long long)s.accepted);
  mm_engine_close(alone);
  mm_engine_close(crowd);
  mm_shards_close(&shards);
  return 0;
}
