/* The scheduler against the bare engine: tokens a second of 64 streams that decode, once from steps of one row for each slot and nothing
 * else, once through the scheduler, in one run and on one model; and what the scheduler's own thread takes. Exit status 1 below 0.80 of the
 * bare steps or above 5 % of a core. bench_scheduler [DIR [DEVICE [STREAMS PROMPT REPLY]]] DIR: a packed checkpoint; without one a random
 * model of the size of tests/data/tiny-m2. INVARIANT=1: of an engine with --batch-invariant. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "formats/option.h"
#include "formats/system/pool.h"
#include "runtime/schedule/scheduler.h"
#include "tests/unit/runtime/reference.h"

typedef struct bench {
  mm_engine *engine;
  uint32_t vocab, streams, prompt, reply, step; /* step: rows of one at most */
  bool batch_invariant;
  /* A run through the scheduler, written by its thread: streams that began, tokens in all; both when the last stream began, and when
   * the first one ended. */
  uint32_t begun, tokens, at_begin, at_end;
  double began, ended, over;
} bench;

static void die(const mm_err *err) {
  fprintf(stderr, "bench_scheduler: %s\n", err->text);
  exit((int)err->status);
}

static void *capacity(size_t n, size_t size) {
  mm_err err = {0};
  void *p = mm_calloc(n, size, &err);
  if (!p) die(&err);
  return p;
}

static int32_t prompt_id(const bench *b, uint32_t stream, uint32_t t) {
  return (int32_t)((t * UINT64_C(7919) + stream * UINT64_C(104729) + 3) % b->vocab);
}

static mm_model random_model(void) {
  mm_model m = ref_dims(MM_FAMILY_M2, false);
  m.hidden = 256, m.layers = 4, m.heads = 8, m.kv_heads = 2, m.head_dim = 64, m.rotary_dim = 32;
  m.experts = 8, m.top_k = 4, m.intermediate = 192, m.vocab = 2048;
  return m;
}

/* ---- bare steps ---- */

/* Every slot reads its prompt; then steps of one row for each, queued ahead where the device does that. Tokens a second of the latter. */
static double bare(const bench *b) {
  mm_err err = {0};
  mm_span *span = capacity(b->streams, sizeof *span);
  int32_t *id = capacity(b->streams + b->step, sizeof *id), *chosen = capacity(b->streams, sizeof *chosen);
  uint32_t *out = capacity(b->streams, sizeof *out);
  mm_sampling *set = capacity(b->streams, sizeof *set);
  for (uint32_t s = 0; s < b->streams; s++) set[s] = (mm_sampling){.top_p = 1};
  for (uint32_t s = 0; s < b->streams; s++)
    for (uint32_t at = 0, n; at < b->prompt; at += n) {
      n = (uint32_t)mm_min(b->step, b->prompt - at);
      for (uint32_t i = 0; i < n; i++) id[i] = prompt_id(b, s, at + i);
      out[0] = n - 1;
      span[0] = (mm_span){(int32_t)s, 0, n, at};
      if (!mm_engine_queue(b->engine, &(mm_batch){n, id, 1, span, 1, out, set, NULL}, &err) || !mm_engine_collect(b->engine, chosen, &err))
        die(&err);
    }
  const double start = mm_now();
  const uint32_t ahead = mm_engine_queues(b->engine);
  for (uint32_t t = 0; t + 1 < b->reply + ahead; t++) {
    for (uint32_t s = 0; s < b->streams; s++) id[s] = MM_ID_SAMPLED, out[s] = s, span[s] = (mm_span){(int32_t)s, s, 1, b->prompt + t};
    const mm_batch batch = {b->streams, id, b->streams, span, b->streams, out, set, NULL};
    if (t + 1 < b->reply && !mm_engine_queue(b->engine, &batch, &err)) die(&err);
    if (t >= ahead && !mm_engine_collect(b->engine, chosen, &err)) die(&err);
  }
  const double seconds = mm_now() - start;
  for (uint32_t s = 0; s < b->streams; s++) mm_engine_drop(b->engine, s);
  free(span), free(id), free(chosen), free(out), free(set);
  return (double)b->streams * (b->reply - 1) / seconds;
}

/* ---- through the scheduler ---- */

static bool on_token(void *user, int32_t id, const mm_logprob *logprobs, const mm_progress *p) {
  bench *b = user;
  (void)id, (void)logprobs;
  b->tokens++;
  if (p->reply_tokens == 1 && ++b->begun == b->streams) b->began = mm_now(), b->at_begin = b->tokens;
  return true;
}

static void on_done(void *user, mm_finish reason, const mm_progress *p, const mm_err *err) {
  bench *b = user;
  (void)p;
  if (reason == MM_FINISH_ERROR) die(err);
  b->over = mm_now();
  if (b->ended == 0) b->ended = b->over, b->at_end = b->tokens;
}

typedef struct figures {
  double decode, whole; /* tokens a second while all streams decode, and of the whole run, prompts included */
  double core;          /* share of a core that the scheduler's thread takes outside the engine */
} figures;

static figures scheduled(bench *b) {
  mm_err err = {0};
  const mm_scheduler_config c = {.step_tokens = b->step, .queue_max = b->streams, .batch_invariant = b->batch_invariant};
  mm_scheduler *s = mm_scheduler_open(b->engine, &c, &err);
  if (!s) die(&err);
  b->begun = b->tokens = 0;
  b->ended = 0;
  int32_t *prompt = capacity(b->prompt, sizeof *prompt);
  const double start = mm_now();
  for (uint32_t i = 0; i < b->streams; i++) {
    uint64_t ticket;
    for (uint32_t t = 0; t < b->prompt; t++) prompt[t] = prompt_id(b, i, t);
    const mm_request r = {.prompt = prompt,
                          .prompt_count = b->prompt,
                          .max_tokens = b->reply,
                          .sampling = {.top_p = 1},
                          .user = b,
                          .token = on_token,
                          .done = on_done};
    if (!mm_scheduler_submit(s, &r, &ticket, &err)) die(&err);
  }
  mm_scheduler_stats t;
  const struct timespec pause = {0, 2000000};
  do nanosleep(&pause, NULL), mm_scheduler_stats_read(s, &t);
  while (t.running || t.waiting);
  mm_scheduler_close(s, true);
  free(prompt);
  return (figures){(b->at_end - b->at_begin) / (b->ended - b->began), b->tokens / (b->over - start), t.own_seconds / (b->over - start)};
}

int main(int argc, char **argv) {
  mm_program_start();
  mm_err err = {0};
  mm_shards shards;
  const bool random = argc < 2 || strcmp(argv[1], "-") == 0;
  ref_model ref = {0};
  ref_shards *cut = NULL;
  if (random) {
    ref = ref_build(random_model());
    cut = ref_cut(&ref, 1);
  } else if (!mm_shards_open(&shards, argv[1], &err))
    die(&err);
  bench b = {.streams = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 64,
             .prompt = argc > 4 ? (uint32_t)strtoul(argv[4], NULL, 10) : 64,
             .reply = argc > 5 ? (uint32_t)strtoul(argv[5], NULL, 10) : 96,
             .step = argc > 6 ? (uint32_t)strtoul(argv[6], NULL, 10) : 256,
             .batch_invariant = getenv("INVARIANT")};
  const mm_engine_config c = {.ops = mm_ops_find(argc > 2 ? argv[2] : "cpu", &err),
                              .limits = {.max_tokens = b.step, .slots = b.streams, .max_positions = b.prompt + b.reply},
                              .options.threads = (unsigned)mm_pool_cpus(),
                              .options.batch_invariant = b.batch_invariant};
  if (!c.ops || !(b.engine = mm_engine_open(random ? &cut->s : &shards, &c, &err))) die(&err);
  b.vocab = mm_engine_model(b.engine)->vocab;
  const double before = bare(&b);
  const figures f = scheduled(&b);
  const double after = bare(&b), steps = before > after ? before : after;
  printf(
      "%u streams of %u + %u tokens, steps of at most %u rows%s: bare decode steps %.0f and %.0f tokens/s, scheduled decode %.0f (%.3f of "
      "the faster), prompts included %.0f; the scheduler's thread %.2f %% of a core\n",
      b.streams, b.prompt, b.reply, b.step, b.batch_invariant ? ", batch-invariant" : "", before, after, f.decode, f.decode / steps,
      f.whole, 100 * f.core);
  mm_engine_close(b.engine);
  if (random) {
    ref_uncut(cut);
    ref_free(&ref);
  } else
    mm_shards_close(&shards);
  return f.decode >= 0.80 * steps && f.core <= 0.05 ? 0 : 1;
}
