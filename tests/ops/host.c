/* The host's side of the CUDA backend without a GPU (fake_device.h): host DIR1 … DIR7, a checkpoint whole, cut for two ranks, into two
 * stages, both, whole in many files that may be damaged, cut for two ranks and for two stages in many such; or groups, or an extended
 * model. All ranks reach the same decision, whichever fails; nothing is allocated while a step is recorded, nor waits for a device while a
 * rank's kernel waits for another rank; experts are there when they are used; what fails is named in time; all memory is given back. */
#ifdef MM_CUDA
#include "tests/ops/fake_device.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "runtime/engine/calibration.h"
#include "runtime/engine/engine.h"

enum { SLOTS = 4, ROWS = 96, POSITIONS = 300 };

static int failures;
static void report(const char *what, bool ok, const char *reason) {
  printf("%-4s %s%s%s\n", ok ? "ok" : "FAIL", what, ok ? "" : ": ", ok ? "" : reason);
  failures += !ok;
}

static int fails;           /* rank 1's next begin does, */
static _Atomic int hangs_s; /* or takes so long */
static mm_backend *second;
static mm_backend *open_rank(const mm_backend_config *c, mm_err *err) {
  mm_backend *b = mm_ops_cuda.open(c, err);
  if (c->place.rank == 1) second = b;
  return b;
}
static bool failing_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  if (b == second && hangs_s) sleep((unsigned)hangs_s), hangs_s = 0;
  if (b == second && fails) return fails = 0, mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "this rank fails");
  return mm_ops_cuda.begin(b, batch, err);
}

static float *logits;
static const mm_ops *backend = &mm_ops_cuda;
static mm_ops ops;
static uint32_t placed_on[] = {0, 1, 0, 1}; /* device of each rank */

static mm_engine *open_engine(const mm_shards *shards) {
  mm_err err = {0};
  ops = *backend, ops.open = open_rank, ops.begin = failing_begin, second = NULL;
  fake.wrong[0] = 0, fake.ranks = shards->pack.tp, fake.graphs = 0;
  const mm_engine_config c = {
      .ops = &ops, .limits = {ROWS, SLOTS, POSITIONS, 7}, .options.threads = 1, .options.act_quant = true, .device = placed_on};
  mm_engine *e = mm_engine_open(shards, &c, &err);
  if (!e) report("open", false, err.text);
  return e;
}

/* Single tokens of `rows` slots, or a chunk of one; every row's logits. */
static bool step(mm_engine *e, uint32_t rows, bool chunk, mm_err *err) {
  static int32_t id[ROWS]; /* a rank that does not come back may still look at them */
  static mm_span span[ROWS];
  static uint32_t out[ROWS];
  for (uint32_t i = 0; i < rows; i++) id[i] = (int32_t)i, out[i] = i, span[i] = (mm_span){(int32_t)i, i, 1, 0};
  if (chunk) span[0].count = rows;
  return mm_engine_step(e, &(mm_batch){rows, id, chunk ? 1 : rows, span, rows, out, NULL, NULL}, logits, err);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void close_engine(mm_engine *e, const char *what) {
  mm_engine_close(e);
  char text[300];
  snprintf(text, sizeof text, "%u blocks, %u rings left; %s", fake.blocks, fake.registered,
           fake.wrong[0] ? fake.wrong : "no call is wrong");
  report(what, fake.blocks == 0 && fake.registered == 0 && !fake.wrong[0], text);
}

/* Steps while weights arrive, of sizes that are recorded, and of more rows than there is room for. */
static void check_steps(const mm_shards *shards, const char *what) {
  mm_err err = {0};
  fake.copy_us = 3000;
  mm_engine *e = open_engine(shards);
  if (!e) return;
  bool ok = true;
  for (uint32_t i = 0; ok && i < 4; i++) ok = step(e, i == 1 ? 70 : 1 + i, i == 1, &err);
  fake.copy_us = 0;
  for (uint32_t i = 0; ok && i < 20; i++) ok = step(e, i == 7 || i == 13 ? 60 + i * 2 : 1 + i % 4, i == 7 || i == 13, &err);
  const uint32_t rows[] = {1, 2, 4};
  ok = ok && mm_engine_warm(e, rows, 3, &err);
  const bool records = shards->pack.pp == 1;
  report(what, ok && (fake.graphs > 0) == records, ok ? "steps were recorded where they cannot be, or not" : err.text);
  close_engine(e, "its calls and its memory");
}

#include "tests/ops/host_memory.h"

static _Atomic uint32_t sums; /* launches that add inputs up */
static void count_sums(const char *name, void **args) {
  (void)args;
  sums += strstr(name, "add_inputs") != NULL;
}

/* Inputs are collected by an engine that is asked to, at each product of every step (the router's is none), and by no other. */
static void check_collected(const mm_shards *shards, bool collects, const char *what) {
  mm_err err = {0};
  mm_calibration *c = collects ? mm_calibration_open(shards, &err) : NULL;
  uint32_t products = 1; /* the head */
  for (uint32_t l = 0; l < shards->pack.model.layers; l++) products += shards->pack.model.attn[l] == MM_ATTN_LIGHTNING ? 5 : 4;
  fake.ranks = mm_pack_ranks(&shards->pack), fake.graphs = 0, fake.wrong[0] = 0;
  const mm_engine_config config = {.ops = backend, .limits = {1, SLOTS, POSITIONS}, .options.threads = 1, .calibration = c};
  mm_engine *e = mm_engine_open(shards, &config, &err);
  bool ok = e && (collects || mm_engine_warm(e, (const uint32_t[]){1}, 1, &err)); /* all weights are there: steps are recorded */
  sums = 0;
  fake.on_launch = count_sums;
  for (uint32_t i = 0; ok && i < 3; i++) ok = step(e, 1, false, &err);
  fake.on_launch = NULL;
  ok = ok && mm_engine_calibrate(e, &err);
  char reason[400];
  snprintf(reason, sizeof reason, "%u sums of %u products, %.200s", (uint32_t)sums, 3 * products * fake.ranks, err.text);
  report(what, ok && sums == (collects ? 3 * products * fake.ranks : 0) && (fake.graphs > 0) == !collects, reason);
  close_engine(e, "its calls and its memory");
  mm_calibration_close(c);
}

/* ---- batch-invariant rows ---- */

static char launched[1 << 15]; /* names of the kernels of a step, each once */
/* But for those that prepare pages, as the slot needs them, and sums over ranks, which give the same bits in both ways. */
static void note_kernel(const char *name, void **args) {
  (void)args;
  char line[256];
  snprintf(line, sizeof line, "%.250s\n", name);
  if (strstr(line, "edit_table") || strstr(line, "copy_pages") || strstr(line, "reduce_")) return;
  pthread_mutex_lock(&fake.lock); /* two ranks */
  if (!strstr(launched, line) && strlen(launched) + strlen(line) < sizeof launched) strcat(launched, line);
  pthread_mutex_unlock(&fake.lock);
}

static int by_line(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }
static void sort_lines(char *text) {
  static char copy[sizeof launched];
  char *line[512], *rest = NULL;
  size_t n = 0;
  strcpy(copy, text);
  for (char *p = strtok_r(copy, "\n", &rest); p && n < 512; p = strtok_r(NULL, "\n", &rest)) line[n++] = p;
  qsort(line, n, sizeof *line, by_line);
  *text = 0;
  for (size_t i = 0; i < n; i++) strcat(strcat(text, line[i]), "\n");
}

/* Both forms of the portable tile add the products of a row in steps of kGemmK from its first column on (gemm.cuh): they are one kernel
 * here. Bits are compared on a device (`gpu test invariant`). */
static void join_forms(char *text) {
  static const char small[] = "gemm_small", large[] = "gemm_large";
  for (char *p = text; (p = strstr(p, small)); p += sizeof small - 1) memcpy(p, large, sizeof large - 1);
}

/* Whatever a step holds, the kernels are the same and nothing is recorded. */
static void check_invariant(const mm_shards *shards, const char *what) {
  static const struct {
    uint32_t rows;
    bool chunk;
  } steps[] = {{1, false}, {1, true},  {2, false}, {3, false}, {4, false},  {1, false},
               {2, true},  {16, true}, {17, true}, {70, true}, {ROWS, true}};
  static char first[sizeof launched];
  mm_err err = {0};
  fake.ranks = mm_pack_ranks(&shards->pack), fake.graphs = 0, fake.wrong[0] = 0;
  const mm_engine_config c = {.ops = backend,
                              .limits = {ROWS, SLOTS, POSITIONS, 0},
                              .options.threads = 1,
                              .options.act_quant = true,
                              .options.batch_invariant = true};
  mm_engine *e = mm_engine_open(shards, &c, &err);
  bool ok = e && mm_engine_batch_invariant(e) && mm_engine_warm(e, (const uint32_t[]){1}, 1, &err), same = true; /* all weights are there */
  for (size_t i = 0; ok && same && i < 2 * sizeof steps / sizeof *steps; i++) {
    launched[0] = 0;
    fake.on_launch = note_kernel;
    ok = step(e, steps[i / 2].rows, steps[i / 2].chunk, &err);
    fake.on_launch = NULL;
    join_forms(launched);
    sort_lines(launched);
    if (i == 0) strcpy(first, launched);
    same = strcmp(first, launched) == 0;
    if (!same) printf("     of 1 row:\n%s     of %u:\n%s", first, steps[i / 2].rows, launched);
  }
  ok = ok && same && fake.graphs == 0 && *first;
  report(what, ok, err.status != MM_OK ? err.text : same ? "a step was recorded, or nothing launched" : "other kernels");
  mm_engine_close(e), err = (mm_err){0};
  const mm_engine_config few = {.ops = backend, .limits = {1, 1, 64, 0}, .options.threads = 1, .options.batch_invariant = true};
  fake.ranks = mm_pack_ranks(&shards->pack);
  e = mm_engine_open(shards, &few, &err);
  report("steps of one row at most", e && step(e, 1, false, &err), err.text);
  close_engine(e, "its calls and its memory");
}

#include "tests/ops/host_proposals.h"
/* The `failing`-th step of its size fails on one rank, in begin, or for want of room; then all go on. */
static void check_failing(const mm_shards *shards, int failing, bool capacity) {
  mm_err err = {0};
  mm_engine *e = open_engine(shards);
  if (!e) return;
  char what[100];
  bool reported = false, others = true;
  double took = 0;
  for (int i = 0; i < failing + 6; i++) {
    const double from = now();
    if (i == failing && capacity) fake.fail_malloc_of = 1;
    if (i == failing && !capacity) fails = 1;
    mm_err now_err = {0};
    const bool done = step(e, i == failing && capacity ? ROWS : 3, i == failing && capacity, &now_err);
    if (i == failing) reported = !done && strcmp(now_err.code, capacity ? "E_MEMORY" : "E_TEST") == 0, took = now() - from;
    if (i != failing && !done && others) others = false, err = now_err;
  }
  others = others && step(e, ROWS - 1, true, &err);
  snprintf(what, sizeof what, "step %d fails on one rank %s, and all go on", failing, capacity ? "for want of room" : "in begin");
  report(what, reported && others && took < 0.5e-3 * TIMEOUT_MS, !reported ? "it was not told" : !others ? err.text : "late");
  close_engine(e, "its calls and its memory");
}

/* Slots that share, states in and out, and choices that ask for everything, queued ahead. */
static void check_slots(const mm_shards *shards) {
  mm_err err = {0};
  mm_engine *e = open_engine(shards);
  if (!e) return;
  char *state = malloc(mm_engine_state_bytes(e) + 1);
  const mm_bias bias = {1, 1};
  static const uint32_t allowed[8192];
  mm_logprob logprobs[MM_QUEUE][4];
  bool ok = step(e, 70, true, &err) && mm_engine_save(e, 0, state, &err) && mm_engine_fork(e, 0, (const uint32_t[]){1, 2}, 2, &err);
  for (uint32_t n = 0; ok && n < 20; n++) {
    mm_sampling set[3];
    const mm_span span[] = {{0, 0, 1, 70 + n}, {1, 1, 1, 70 + n}, {2, 2, 1, 70 + n}};
    for (uint32_t i = 0; i < 3; i++) set[i] = (mm_sampling){.temperature = 1, .top_p = 0.9, .seed = n};
    if (n % 2) set[0].repetition = 1.1, set[1].bias_count = 1, set[1].bias = &bias, set[2].allowed = allowed;
    if (n % 3) set[n % 2].top_logprobs = 3, set[n % 2].logprobs = logprobs[n % MM_QUEUE];
    const mm_batch batch = {3, (const int32_t[]){5, 6, 7}, 3, span, 3, (const uint32_t[]){0, 1, 2}, set, NULL};
    int32_t chosen[3];
    ok = mm_engine_queue(e, &batch, &err) && (n < 2 || mm_engine_collect(e, chosen, &err));
    if (n == 19) ok = ok && mm_engine_collect(e, chosen, &err) && mm_engine_collect(e, chosen, &err);
  }
  const uint32_t *page = mm_pages_table(mm_engine_pages(e));
  int32_t held[70] = {0};
  ok = ok && mm_engine_resume(e, 3, page, held, 70, state, &err) && mm_engine_resume(e, 2, page, NULL, 70, state, &err);
  report("slots forked, saved, restored, chosen for by every rule; pages moved", ok && move_pages(e, &err), err.text);
  free(state);
  close_engine(e, "its calls and its memory");
}

/* Up to `ahead` steps wait for their choices when one fails on one rank: they have none, and all go on. */
static void check_ahead(const mm_shards *shards, uint32_t ahead) {
  const mm_batch batch = {1, (const int32_t[]){5}, 1, &(mm_span){0, 0, 1, 0}, 1, &(uint32_t){0}, &(mm_sampling){.top_p = 1}, NULL};
  mm_err err = {0};
  mm_engine *e = open_engine(shards);
  bool ok = e != NULL;
  for (uint32_t n = 1, waiting = 0; ok && n <= 40; n++) {
    const bool good = n % 10 != 0;
    fails = !good, err = (mm_err){0};
    ok = mm_engine_queue(e, &batch, &err) == good && (good || strcmp(err.code, "E_TEST") == 0);
    if (!good || ++waiting > ahead)
      ok = ok && (waiting == 0 || mm_engine_collect(e, &(int32_t){0}, &err) == good), waiting = good ? ahead : 0;
  }
  report("steps ahead of one that fails on one rank have no choices, and all go on", ok, err.text);
  close_engine(e, "its calls and its memory");
}

/* One token behind what the slot holds. */
static uint32_t below(uint32_t n);
static bool pass(mm_engine *e, int32_t slot, bool outs, bool (*by)(mm_engine *, const mm_batch *, mm_err *), mm_err *err) {
  const mm_sampling set = {.top_p = 1};
  const mm_span span = {slot, 0, 1, mm_engine_held(e, (uint32_t)slot)};
  return by(e, &(mm_batch){1, (const int32_t[]){5}, 1, &span, outs, &(uint32_t){0}, &set, NULL}, err);
}
static bool step_one(mm_engine *e, const mm_batch *b, mm_err *err) { return mm_engine_step(e, b, logits, err); }
static bool score_one(mm_engine *e, const mm_batch *b, mm_err *err) {
  return mm_engine_score(e, b, (const int32_t[]){3}, &(double){0}, err);
}

/* A kernel of rank 0 times out waiting for rank 1, as its word says, while passes are queued or kept, or when all are known to be good. In
 * the first case whatever is asked of any slot fails, by name, and none holds anything; in the second it is done. Then all go on. */
static void check_doubts(const mm_shards *shards) {
  mm_err err = {0};
  mm_engine *e = open_engine(shards);
  char *state = malloc(mm_engine_state_bytes(e) + 1), reason[400] = "";
  for (int n = 0; n < 150 && !reason[0]; n++) {
    const uint32_t queued = below(4), kept = below(3), fault = below(6);
    bool ok = true;
    err = (mm_err){0};
    for (int32_t s = 0; ok && s < 3; s++) ok = pass(e, s, true, step_one, &err);
    for (uint32_t i = 0; ok && i < queued; i++) ok = pass(e, (int32_t)below(3), true, mm_engine_queue, &err);
    const uint32_t collected = below(queued + 1), left = queued - collected;
    for (uint32_t i = 0; ok && i < collected; i++) ok = mm_engine_collect(e, &(int32_t){0}, &err);
    if (ok && kept) ok = pass(e, 0, kept == 2, mm_engine_forward, &err);
    bool proven = !left && !kept;
    if (ok && kept == 1 && below(2)) ok = proven = pass(e, 1, true, step_one, &err);
    if (!ok) {
      snprintf(reason, sizeof reason, "before: %.200s", err.text);
      break;
    }
    for (uint32_t i = 0; i < STREAMS; i++)
      if (fake.stream[i].open && fake.stream[i].word) *fake.stream[i].word = MM_COMM_TIMED_OUT | 0 << 8 | 1 << 16;
    switch (fault) {
      case 0: ok = pass(e, 1, true, step_one, &err); break;
      case 1: ok = pass(e, 1, true, mm_engine_queue, &err) && (!proven || left || mm_engine_collect(e, &(int32_t){0}, &err)); break;
      case 2: ok = pass(e, 1, false, mm_engine_forward, &err); break;
      case 3: ok = pass(e, 1, true, score_one, &err); break;
      case 4: ok = mm_engine_fork(e, 1, &(uint32_t){3}, 1, &err); break;
      default: /* of a model without states nothing is read */
        ok = proven || mm_engine_state_bytes(e) ? mm_engine_save(e, 1, state, &err) : mm_engine_fork(e, 1, &(uint32_t){3}, 1, &err);
    }
    const bool reported =
        !ok && strcmp(err.code, "E_RANK") == 0 && strstr(err.text, "rank 0 waited") && strstr(err.text, "rank 1: timeout");
    uint32_t held = 0;
    for (uint32_t s = 0; s < SLOTS; s++) held += mm_engine_held(e, s);
    if (proven ? !ok : !reported || held) snprintf(reason, sizeof reason, "found %d, %u tokens held: %.200s", ok, held, err.text);
    mm_err late = {0}, again = {0};
    if (left && !proven && (pass(e, 2, true, mm_engine_queue, &again) || !strstr(again.text, "rank 1: timeout")))
      snprintf(reason, sizeof reason, "queued behind what was lost: %.200s", again.text);
    if (left && mm_engine_collect(e, &(int32_t){0}, &late)) snprintf(reason, sizeof reason, "what was queued was collected");
    if (left && !strstr(late.text, "rank 1: timeout")) snprintf(reason, sizeof reason, "collected: %.200s", late.text);
    if (reason[0])
      snprintf(reason + strlen(reason), sizeof reason - strlen(reason), " (queued %u of which %u collected, kept %u, fault %u)", queued,
               collected, kept, fault);
    for (uint32_t s = 0; s < SLOTS; s++) mm_engine_drop(e, s);
  }
  err = (mm_err){0};
  const bool on = reason[0] || step(e, 3, false, &err);
  report("no step uses a pass in which a rank failed, and all go on", on && !reason[0], on ? reason : err.text);
  free(state);
  close_engine(e, "its calls and its memory");
}

#include "tests/ops/host_arrivals.h"

/* ---- what ranks cannot do ---- */

/* An engine of two ranks that does not open, or whose step fails: by this code and word, in time. */
static void check_refused(const mm_shards *shards, const char *what, const char *code, const char *word) {
  const uint32_t devices[] = {0, fake.fail_malloc_of ? 1 : placed_on[1] ? 7 : 0};
  mm_err err = {0};
  const double from = now();
  fake.ranks = 2, fake.wrong[0] = 0;
  const mm_engine_config c = {.ops = &mm_ops_cuda, .limits = {ROWS, SLOTS, POSITIONS, 7}, .options.threads = 1, .device = devices};
  mm_engine *e = mm_engine_open(shards, &c, &err);
  const double took = now() - from;
  report(what, !e && strcmp(err.code, code) == 0 && strstr(err.text, word) && took < 5, e ? "it opened" : err.text);
  fake.fail_malloc_of = 0;
  close_engine(e, "its calls and its memory");
}

/* A rank that does not come to a step is named by the one that waits, which does so in a kernel or, where they meet, on the host; the step
 * ends without it, and so do later ones until it is back. Then all go on. */
static void check_hanging(const mm_shards *shards, bool meets) {
  mm_err err = {0}, hung = {0}, away = {0};
  mm_engine *e = open_engine(shards);
  if (!e) return;
  bool ok = mm_engine_warm(e, (const uint32_t[]){3}, 1, &err) && step(e, 3, false, &err);
  hangs_s = meets ? 6 : 3;
  fake.timeout_ms = 1500;
  const double from = now();
  const bool reported =
      !step(e, meets ? ROWS : 3, meets, &hung) && strcmp(hung.code, "E_RANK") == 0 && strstr(hung.text, "for rank 1: timeout");
  const double took = now() - from;
  const bool still = !step(e, 3, false, &away) && strcmp(away.code, "E_RANK") == 0 && strstr(away.text, "not come back");
  while (hangs_s && now() - from < 10) usleep(10000);
  usleep(200000);
  fake.timeout_ms = TIMEOUT_MS;
  for (int i = 0; ok && i < 4; i++) ok = step(e, 3, false, &err);
  char what[120];
  snprintf(what, sizeof what, "a rank that hangs is named %s in %.1f s, and all go on when it is back",
           meets ? "on the host" : "by a kernel", took);
  report(what, ok && reported && still && took < 5, !reported ? hung.text : !still ? away.text : err.text);
  close_engine(e, "its calls and its memory");
}

/* An engine whose rank stays away is closed at once. The last test: what the rank uses stays. */
static void check_left(const mm_shards *shards) {
  mm_err err = {0};
  mm_engine *e = open_engine(shards);
  if (!e) return;
  const bool ok = mm_engine_warm(e, (const uint32_t[]){3}, 1, &err);
  hangs_s = 20;
  fake.timeout_ms = 1500;
  const bool reported = !step(e, 3, false, &err) && strcmp(err.code, "E_RANK") == 0;
  const double from = now();
  mm_engine_close(e);
  report("an engine whose rank stays away is closed at once", ok && reported && now() - from < 1, err.text);
}

/* ---- tables of pages ---- */

/* mm_cu_page_work (kernels.h), and what its kernel does. */
typedef struct page_work {
  uint32_t *table;
  const void *kv;
  uint32_t layers, kv_heads, token_bytes;
  const uint32_t (*edit)[2];
  const mm_page_copy *copy;
  uint32_t edits, copies;
} page_work;
static uint32_t *table; /* the device's */
static void edit_table(const char *name, void **args) {
  if (!strstr(name, "edit_table")) return;
  const page_work *w = args[0];
  table = w->table;
  for (uint32_t i = 0; i < w->edits; i++) table[w->edit[i][0]] = w->edit[i][1];
}

static uint32_t below(uint32_t n) {
  static uint64_t seed = 1;
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % n);
}

/* True if the device's page table equals the host's for every page of the last step's slots. */
static bool same_tables(mm_engine *e, const mm_span *span, uint32_t spans) {
  const mm_pages *p = mm_engine_pages(e);
  bool same = true;
  for (uint32_t i = 0; table && i < spans; i++) {
    const size_t at = (size_t)span[i].slot * mm_pages_per_slot(p);
    for (uint32_t k = 0; k < mm_pages_held(p, (uint32_t)span[i].slot); k++) same = same && table[at + k] == mm_pages_table(p)[at + k];
  }
  return same;
}

/* Random chunks, forks, restored and dropped slots; now and then the launch that edits the table fails. */
static void check_tables(const mm_shards *shards) {
  mm_err err = {0};
  mm_engine *e = open_engine(shards);
  if (!e) return;
  char *state = calloc(1, mm_engine_state_bytes(e) + 1);
  uint32_t steps = 0, refused = 0, failed = 0;
  bool same = true;
  fake.on_launch = edit_table, table = NULL;
  for (; steps < 2000 && same; steps++) {
    mm_span span[SLOTS];
    int32_t id[ROWS] = {0};
    uint32_t rows = 0, spans = 0;
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
      const uint32_t held = mm_engine_held(e, slot), count = below(3) ? 1 : 1 + below(22), pos = held + count > POSITIONS ? 0 : held;
      if (below(2)) span[spans++] = (mm_span){(int32_t)slot, rows, count, pos}, rows += count;
    }
    if (below(20) == 0) fake.fail_launch_of = "edit_table";
    err = (mm_err){0};
    if (!mm_engine_step(e, &(mm_batch){rows, id, spans, span, 0, NULL, NULL, NULL}, logits, &err)) {
      const bool short_of = strcmp(err.code, "E_PAGES") == 0;
      refused += short_of, failed += !short_of;
      if (short_of) mm_engine_drop(e, below(SLOTS));
      continue;
    }
    same = same_tables(e, span, spans);
    const uint32_t from = below(SLOTS), to = below(SLOTS), tokens = mm_engine_held(e, from);
    if (below(4) == 0 && !mm_engine_fork(e, from, &to, 1, &err)) same = false;
    if (below(6) == 0 && tokens && mm_engine_save(e, from, state, &err)) {
      const mm_pages *p = mm_engine_pages(e);
      if (!mm_engine_resume(e, to, mm_pages_table(p) + (size_t)from * mm_pages_per_slot(p), NULL, tokens, state, &err)) same = false;
    }
    if (below(9) == 0) mm_engine_drop(e, below(SLOTS));
  }
  fake.on_launch = NULL, fake.fail_launch_of = NULL;
  char what[200];
  snprintf(what, sizeof what, "the device's tables are the host's over %u steps, %u short of pages, %u whose edits failed", steps, refused,
           failed);
  report(what, same && table && refused && failed, same ? "nothing was edited, refused or failed" : "another page, or a refusal");
  free(state);
  close_engine(e, "its calls and its memory");
}

/* ---- weights that are held ---- */

static char socket_path[100];
static int stop;
static void ignore(const char *line) { (void)line; }
static void *serve(void *hold) {
  mm_err err = {0};
  return mm_hold_serve(hold, stop, ignore, &err) ? hold : NULL;
}

static mm_engine *attach(const mm_shards *shards, mm_err *err) {
  fake.ranks = mm_pack_ranks(&shards->pack), fake.graphs = 0;
  const mm_engine_config c = {.ops = &mm_ops_cuda, .limits = {ROWS, SLOTS, POSITIONS, 7}, .options.threads = 1, .attach = socket_path};
  *err = (mm_err){0};
  return mm_engine_open(shards, &c, err);
}

/* Engines that come and go use what is held, read nothing, and leave it; `other` is refused. */
static void check_held(const mm_shards *shards, const mm_shards *other, const char *what) {
  mm_err err = {0};
  const uint32_t ranks = mm_pack_ranks(&shards->pack);
  mm_rank_weights weights[2] = {0};
  mm_held held[2];
  void *memory[2] = {0};
  bool ok = true;
  for (uint32_t r = 0; ok && r < ranks; r++) {
    const mm_backend_config c = {
        .model = &shards->pack.model, .weights = &weights[r], .place = {r, r, ranks, r, false}, .checkpoint = shards->pack.text_digest};
    ok = mm_bind(&weights[r], shards, r, &err) && mm_ops_cuda.weights.hold(&c, &held[r], &memory[r], &err);
  }
  const uint32_t registered = fake.registers;
  mm_hold *hold = ok ? mm_hold_open(socket_path, held, ranks, &err) : NULL;
  pthread_t thread;
  ok = hold && pthread_create(&thread, NULL, serve, hold) == 0;
  for (int i = 0; ok && i < 3; i++) {
    mm_engine *e = attach(shards, &err);
    ok = e && fake.borrowed == ranks && step(e, 3, false, &err) && step(e, 70, true, &err) && step(e, 3, false, &err);
    mm_engine_close(e);
    ok = ok && fake.borrowed == 0;
  }
  report(what, ok && fake.registers == registered, ok ? "something was read" : err.text);
  mm_engine *e = ok ? attach(other, &err) : NULL;
  report("weights of another checkpoint are refused", !e && strstr(err.text, "found checkpoint "), err.text);
  mm_engine_close(e);
  void *done = NULL;
  if (ok && kill(getpid(), SIGUSR1) == 0) pthread_join(thread, &done);
  report("the holder ends", done, "it failed");
  mm_hold_close(hold);
  for (uint32_t r = 0; r < ranks; r++) {
    if (memory[r]) mm_ops_cuda.weights.release(memory[r]);
    mm_bind_close(&weights[r]);
  }
  close_engine(NULL, "its calls and its memory");
}

/* An extended model, whole and cut for two ranks: host DIR1 DIR2. By a name of its own: under the backend's it may be refused. */
static int check_extended(char **dir) {
  mm_err err = {0};
  mm_shards one = {0}, two = {0};
  static mm_ops named;
  named = mm_ops_cuda, named.name = "fake", backend = &named;
  if (!mm_shards_open(&one, dir[0], &err) || !mm_shards_open(&two, dir[1], &err)) return fprintf(stderr, "host: %s\n", err.text), 1;
  logits = calloc((size_t)ROWS * one.pack.model.vocab, sizeof *logits);
  check_steps(&one, "extended model: steps of one rank"), check_steps(&two, "extended model: steps of two ranks");
  for (int i = 0; i < 2; i++) {
    check_memory(&one, false, i, "extended model: memory of one rank");
    check_memory(&two, false, i, "extended model: memory of two ranks");
  }
  check_invariant(&one, "extended model: the same kernels for any batch-invariant step"), check_verify(&one), check_verify(&two);
  free(logits);
  mm_shards_close(&one), mm_shards_close(&two);
  printf("%d failure(s)\n", failures);
  return failures > 0;
}

#include "tests/ops/host_groups.h"
#include "tests/ops/host_streams.h"

int main(int argc, char **argv) {
  mm_err err = {0};
  if (argc < 4) return setvbuf(stdout, NULL, _IOLBF, 0), argc == 2 ? check_groups(argv[1]) : check_extended(argv + 1);
  mm_shards one = {0}, two = {0}, staged = {0}, both = {0}, many = {0}, *const all[] = {&one, &two, &staged, &both, &many};
  setvbuf(stdout, NULL, _IOLBF, 0);
  for (int i = 0; i < 5; i++)
    if (argc != 8 || !mm_shards_open(all[i], argv[1 + i], &err)) return fprintf(stderr, "host: of five checkpoints: %s\n", err.text), 1;
  logits = calloc((size_t)ROWS * one.pack.model.vocab, sizeof *logits);
  check_steps(&one, "steps of one rank");
  for (int i = 0; i < 4; i++) {
    check_memory(&one, i % 2, i / 2, "memory of one rank"), check_memory(&two, i % 2, i / 2, "memory of two ranks");
    if (i < 2)
      check_memory(&staged, i % 2, false, "memory of two stages"), check_memory(&both, i % 2, false, "memory of two stages of two ranks");
  }
  check_collected(&one, true, "inputs collected"), check_collected(&one, false, "no inputs collected");
  check_collected(&two, true, "inputs collected on two ranks");
  check_arriving(&many), mm_shards_close(&many);
  check_bad_file(argv[5], false), check_bad_file(argv[5], true);
  for (int i = 0; i < 8; i++) check_bad_rank(argv[6 + i % 2], i / 2 % 2, i / 4 % 2);
  report("loads that failed are in their logs", in_logs > 0, "none was");
  fake.no_peers = true, check_steps(&two, "steps of two ranks through host memory"), fake.no_peers = false;
  fake.fail_malloc_of = 1 << 20, check_refused(&two, "a device that is full", "E_MEMORY", "bytes free of");
  fake.no_driver = true, check_refused(&two, "no driver", "E_CUDA", "found no NVIDIA driver"), fake.no_driver = false;
  check_hidden(&two), check_hanging(&two, false);
  if (two.pack.model.qk_norm) check_hanging(&two, true); /* once is enough: it takes its time */
  check_invariant(&one, "batch-invariant: the same kernels for any step"), check_invariant(&two, "batch-invariant on two ranks");
  check_verify(&one), check_verify(&two);
  check_slots(&one), check_slots(&two), check_ahead(&two, 0), check_ahead(&two, 1), check_ahead(&two, 3);
  check_doubts(&two), check_tables(&one);
  for (int i = 0; i < 3; i++) check_steps(&two, "steps of two ranks"), check_steps(&both, "steps of two stages of two ranks");
  check_steps(&staged, "steps of two stages"), placed_on[1] = 0, check_steps(&two, "steps of two ranks on one device"), check_streams(&two);
  for (int i = 0; i < 4; i++) check_failing(&two, i, false), check_failing(&two, i, true), check_failing(&staged, i, i % 2);
  for (int i = 0; i < 12; i++) check_failing(&both, i % 4, i % 3 == 2);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &set, NULL);
  stop = signalfd(-1, &set, SFD_NONBLOCK);
  snprintf(socket_path, sizeof socket_path, "%s/socket", getenv("TMPDIR"));
  check_held(&one, &two, "held weights of one rank");
  check_held(&two, &one, "held weights of two ranks");
  check_left(&two);
  free(logits);
  for (int i = 0; i < 4; i++) mm_shards_close(all[i]);
  printf("%d failure(s)\n", failures);
  return failures > 0;
}
#else
#include <stdio.h>

int main(void) {
  printf("this build has no CUDA backend\n");
  return 77;
}
#endif
