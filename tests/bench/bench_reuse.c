/* Time to the first token of a prompt that is new and of the same prompt again, through the scheduler and its prefix cache. Exit status 1
 * where the second takes more than 3 % of the first, or 5 % with lightning layers. bench_reuse [DIR [DEVICE [PROMPT [STEP]]]] DIR: a packed
 * checkpoint; without one, or for -, random models of the size of tests/data/tiny-m1 and tiny-m2. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/option.h"
#include "formats/system/pool.h"
#include "runtime/schedule/scheduler.h"
#include "tests/unit/runtime/reference.h"

typedef struct reply {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  double first;
  uint32_t cached;
  bool done;
} reply;

static void die(const mm_err *err) {
  fprintf(stderr, "bench_reuse: %s\n", err->text);
  exit((int)err->status);
}

static bool on_token(void *user, int32_t id, const mm_logprob *logprobs, const mm_progress *p) {
  reply *r = user;
  (void)id, (void)logprobs;
  r->first = mm_now();
  r->cached = p->cached_tokens;
  return false;
}

static void on_done(void *user, mm_finish reason, const mm_progress *p, const mm_err *err) {
  reply *r = user;
  (void)p;
  if (reason == MM_FINISH_ERROR) die(err);
  pthread_mutex_lock(&r->lock);
  r->done = true;
  pthread_cond_signal(&r->changed);
  pthread_mutex_unlock(&r->lock);
}

/* Seconds to the first token. */
static double complete(mm_scheduler *s, const int32_t *prompt, uint32_t count, uint32_t *cached) {
  reply r = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
  mm_err err = {0};
  uint64_t ticket;
  const mm_request q = {
      .prompt = prompt, .prompt_count = count, .max_tokens = 4, .sampling = {.top_p = 1}, .user = &r, .token = on_token, .done = on_done};
  const double start = mm_now();
  if (!mm_scheduler_submit(s, &q, &ticket, &err)) die(&err);
  pthread_mutex_lock(&r.lock);
  while (!r.done) pthread_cond_wait(&r.changed, &r.lock);
  pthread_mutex_unlock(&r.lock);
  *cached = r.cached;
  return r.first - start;
}

static bool compare(const char *name, const mm_shards *shards, const char *device, uint32_t count, uint32_t step) {
  mm_err err = {0};
  const mm_engine_config c = {.ops = mm_ops_find(device, &err),
                              .limits = {.max_tokens = step, .slots = 2, .max_positions = count + 8},
                              .options.threads = (unsigned)mm_pool_cpus()};
  mm_engine *e = c.ops ? mm_engine_open(shards, &c, &err) : NULL;
  const mm_scheduler_config sc = {.step_tokens = step, .queue_max = 1, .prefix_cache = true, .cache_bytes = UINT64_C(8) << 30};
  mm_scheduler *s = e ? mm_scheduler_open(e, &sc, &err) : NULL;
  int32_t *prompt = mm_calloc(count, sizeof *prompt, &err);
  if (!s || !prompt) die(&err);
  const uint32_t vocab = mm_engine_model(e)->vocab;
  const bool lightning = mm_engine_state_bytes(e) > 0;
  double cold = 0, hit = 0;
  uint32_t cached = 0;
  for (uint32_t i = 0; i < 3; i++) { /* the first pair warms the device up; the best of two counts */
    for (uint32_t t = 0; t < count; t++) prompt[t] = (int32_t)((t * UINT64_C(7919) + i * UINT64_C(104729) + 3) % vocab);
    const double first = complete(s, prompt, count, &cached), again = complete(s, prompt, count, &cached);
    if (i == 1 || (i > 1 && first < cold)) cold = first;
    if (i == 1 || (i > 1 && again < hit)) hit = again;
  }
  printf("%s, a prompt of %u tokens: first token after %.1f ms, again after %.2f ms with %u cached: %.2f %%\n", name, count, 1e3 * cold,
         1e3 * hit, cached, 100 * hit / cold);
  mm_scheduler_close(s, true);
  mm_engine_close(e);
  free(prompt);
  return hit <= (lightning ? 0.05 : 0.03) * cold;
}

static bool compare_random(mm_family family, const char *device, uint32_t count, uint32_t step) {
  mm_model m = ref_dims(family, family == MM_FAMILY_M1);
  m.hidden = 256, m.heads = 8, m.kv_heads = 2, m.head_dim = 64, m.rotary_dim = 32, m.vocab = 2048, m.max_positions = count + 8;
  m.experts = family == MM_FAMILY_M1 ? 4 : 8, m.top_k = family == MM_FAMILY_M1 ? 2 : 4, m.intermediate = 128;
  ref_model ref = ref_build(m);
  ref_shards *cut = ref_cut(&ref, 1);
  const bool ok = compare(family == MM_FAMILY_M1 ? "a small M1" : "a small M2", &cut->s, device, count, step);
  ref_uncut(cut);
  ref_free(&ref);
  return ok;
}

int main(int argc, char **argv) {
  mm_program_start();
  const char *device = argc > 2 ? argv[2] : "cpu";
  const uint32_t count = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 2048,
                 step = argc > 4 ? (uint32_t)strtoul(argv[4], NULL, 10) : 256;
  bool ok;
  if (argc < 2 || strcmp(argv[1], "-") == 0) {
    ok = compare_random(MM_FAMILY_M1, device, count, step);
    ok &= compare_random(MM_FAMILY_M2, device, count, step);
  } else {
    mm_err err = {0};
    mm_shards shards;
    if (!mm_shards_open(&shards, argv[1], &err)) die(&err);
    ok = compare(argv[1], &shards, device, count, step);
    mm_shards_close(&shards);
  }
  return ok ? 0 : 1;
}
