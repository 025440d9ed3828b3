/* Ranks of one stage in two processes on devices, without a GPU and without NCCL (fake_device.h, preload/fake_nccl.c): host_fixture DIR
 * NCCL, a checkpoint cut for two ranks and a library that only counts. Each process is a thread, MPI a queue. All processes reach the same
 * decision, whichever fails; a rank that does not come is reported in time, and all go on when it is back; NCCL is joined anew after each
 * failure, and all memory is given back. */
#ifdef MM_CUDA
#include "tests/ops/fake_device.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <unistd.h>

#include "runtime/engine/engine.h"
#include "tests/unit/runtime/threads_fixture.h"

enum { SLOTS = 4, ROWS = 96, POSITIONS = 300 };

static int failures;
static void report(const char *what, bool ok, const char *reason) {
  printf("%-4s %s%s%s\n", ok ? "ok" : "FAIL", what, ok ? "" : ": ", ok ? "" : reason);
  failures += !ok;
}

/* As preload/fake_nccl.c has it. */
static struct fake_nccl {
  int version, init_fails, gather_fails, async_fails;
  unsigned inits, aborts, gathers;
  void (*on_init)(void), (*on_abort)(void);
} * nccl;

/* Kernels that wait for NCCL end when it is aborted: fake_device.h asks this word, as it asks that of ranks of one process. */
static volatile uint32_t aborted;
static void note_init(void) { aborted = 0; }
static void note_abort(void) { aborted = 1; }

/* Stand-ins for the kernels that say where a rank is: it has arrived where its thread waits for others, and is done when they came. */
typedef struct signs {
  volatile uint32_t arrived, done;
} signs;
static signs *signs_of[2];
static void find_signs(const char *name, void **args) {
  if (strstr(name, "arrive")) signs_of[fake_device] = *(signs **)args[0];
}
static void move_signs(bool done) {
  signs *s = signs_of[fake_device];
  if (done) s->done = s->arrived;
  if (!done) s->arrived = s->done + 1;
}

/* The rank that fails in its next begin, or takes so long, by its process. */
static atomic_int fails = -1, hangs = -1, hangs_ms;
static mm_backend *backend_of[2];
static atomic_int shut = -1; /* the rank that does not open */
static mm_backend *open_rank(const mm_backend_config *c, mm_err *err) {
  if (shut == (int)c->place.rank) return mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "this rank does not open"), NULL;
  return backend_of[c->place.rank] = mm_ops_cuda.open(c, err);
}
static bool failing_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  const int rank = b == backend_of[1];
  int mine = rank;
  if (atomic_compare_exchange_strong(&hangs, &mine, -1)) usleep((unsigned)hangs_ms * 1000);
  mine = rank;
  if (atomic_compare_exchange_strong(&fails, &mine, -1)) return mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "this rank fails");
  return mm_ops_cuda.begin(b, batch, err);
}
static mm_ops ops;

typedef struct process {
  pthread_t thread;
  mm_process_group process_group;
  const mm_shards *shards;
  bool ok;
  mm_err err;
} process;
static process processes[2];
static float *logits;

static void *follow(void *arg) {
  process *p = arg;
  static const uint32_t device[] = {1};
  const mm_engine_config c = {.ops = &ops, .options.threads = 1, .device = device, .process_group = &p->process_group};
  p->ok = mm_engine_follow(p->shards, &c, &p->err);
  return NULL;
}

static mm_engine *open_both(const mm_shards *shards, mm_err *err) {
  ops = mm_ops_cuda, ops.open = open_rank, ops.begin = failing_begin;
  fake.wrong[0] = 0, fake.ranks = 2, fake.graphs = 0, fake.control = &aborted, fake.on_launch = find_signs, fake.on_wait = move_signs;
  nccl->on_init = note_init, nccl->on_abort = note_abort, nccl->inits = nccl->aborts = nccl->gathers = 0;
  for (uint32_t i = 0; i < 2; i++) processes[i] = (process){.process_group = {i, 2, exchange}, .shards = shards};
  pthread_create(&processes[1].thread, NULL, follow, &processes[1]);
  const mm_engine_config c = {
      .ops = &ops, .limits = {ROWS, SLOTS, POSITIONS, 7}, .options.threads = 1, .process_group = &processes[0].process_group};
  return mm_engine_open(shards, &c, err);
}

static void close_both(mm_engine *e, const char *what) {
  mm_engine_close(e);
  pthread_join(processes[1].thread, NULL);
  char text[700];
  snprintf(text, sizeof text, "%u blocks, %u rings left; %u joined, %u parted; %.200s; %.200s", fake.blocks, fake.registered, nccl->inits,
           nccl->aborts, fake.wrong[0] ? fake.wrong : "no call is wrong", processes[1].err.text);
  report(what, fake.blocks == 0 && fake.registered == 0 && !fake.wrong[0] && nccl->inits == nccl->aborts && !post.first, text);
}

/* Single tokens of `rows` slots, or a chunk of one; every row's logits. */
static bool step(mm_engine *e, uint32_t rows, bool chunk, mm_err *err) {
  int32_t id[ROWS];
  mm_span span[ROWS];
  uint32_t out[ROWS];
  for (uint32_t i = 0; i < rows; i++) id[i] = (int32_t)i, out[i] = i, span[i] = (mm_span){(int32_t)i, i, 1, 0};
  if (chunk) span[0].count = rows;
  return mm_engine_step(e, &(mm_batch){rows, id, chunk ? 1 : rows, span, rows, out, NULL, NULL}, logits, err);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Steps while weights arrive, of sizes that are recorded, and of more rows than there is room for. */
static void check_steps(const mm_shards *shards) {
  mm_err err = {0};
  fake.copy_us = 3000;
  mm_engine *e = open_both(shards, &err);
  bool ok = e != NULL;
  for (uint32_t i = 0; ok && i < 4; i++) ok = step(e, i == 1 ? 70 : 1 + i, i == 1, &err);
  fake.copy_us = 0;
  for (uint32_t i = 0; ok && i < 20; i++) ok = step(e, i == 7 || i == 13 ? 60 + i * 2 : 1 + i % 4, i == 7 || i == 13, &err);
  const uint32_t rows[] = {1, 2, 4};
  ok = ok && mm_engine_warm(e, rows, 3, &err);
  report("steps of two processes, recorded ones among them", ok && fake.graphs > 0 && nccl->gathers > 100,
         ok ? "none was recorded" : err.text);
  close_both(e, "its calls and its memory");
}

/* The `failing`-th step of its size fails on one rank, in begin, for want of room or in NCCL; then all go on. */
static void check_failing(const mm_shards *shards, int rank, int failing, const char *how) {
  mm_err err = {0};
  mm_engine *e = open_both(shards, &err);
  const bool capacity = strcmp(how, "E_MEMORY") == 0, in_nccl = strcmp(how, "E_NCCL") == 0;
  bool reported = false, others = e != NULL;
  double took = 0;
  for (int i = 0; e && i < failing + 6; i++) {
    const double from = now();
    if (i == failing && capacity) fake.fail_malloc_of = 1;
    if (i == failing && in_nccl) nccl->async_fails = 6, hangs_ms = 300;
    if (i == failing && in_nccl) hangs = rank;
    if (i == failing && !capacity && !in_nccl) fails = rank;
    mm_err now_err = {0};
    const bool done = step(e, i == failing && capacity ? ROWS : 3, i == failing && capacity, &now_err);
    if (i == failing) reported = !done && strcmp(now_err.code, how) == 0, took = now() - from;
    if (i == failing && !reported) err = now_err;
    if (i != failing && !done && others) others = false, err = now_err;
    nccl->async_fails = 0;
  }
  others = others && step(e, ROWS - 1, true, &err);
  char what[100];
  snprintf(what, sizeof what, "step %d fails on rank %d with %s, in %.1f s, and all go on", failing, rank, how, took);
  report(what, reported && others && took < 5 && nccl->inits == 4, err.text);
  close_both(e, "its calls and its memory");
}

/* A rank comes to a step after the other has waited for it for as long as one does: it reports that, and all go on. */
static void check_late(const mm_shards *shards, int rank) {
  mm_err err = {0}, late = {0};
  mm_engine *e = open_both(shards, &err);
  bool ok = e && mm_engine_warm(e, (const uint32_t[]){4}, 1, &err) && step(e, 3, false, &err); /* all weights are there */
  hangs_ms = 4400;
  hangs = rank;
  const double from = now();
  const bool reported =
      ok && !step(e, 2, false, &late) && strcmp(late.code, "E_RANK") == 0 && strstr(late.text, "other processes: timeout");
  const double took = now() - from;
  for (int i = 0; ok && i < 4; i++) ok = step(e, 3, false, &err);
  char what[120];
  snprintf(what, sizeof what, "rank %d, which is late, is told in %.1f s, and all go on", rank, took);
  report(what, ok && reported && took < 5, reported ? err.text : late.text);
  close_both(e, "its calls and its memory");
}

/* NCCL that is too old, does not join, or is not there: the engine does not open, and says why. */
static void check_refused(const mm_shards *shards, const char *what, const char *so, int version, int init_fails, const char *word) {
  mm_err err = {0};
  char *const named = strdup(getenv("MM_NCCL_SO"));
  if (so) setenv("MM_NCCL_SO", so, 1);
  nccl->version = version, nccl->init_fails = init_fails;
  const double from = now();
  mm_engine *e = open_both(shards, &err);
  report(what, !e && strcmp(err.code, "E_NCCL") == 0 && strstr(err.text, word) && now() - from < 5, e ? "it opened" : err.text);
  nccl->version = 23004, nccl->init_fails = 0, setenv("MM_NCCL_SO", named, 1);
  free(named);
  if (init_fails) nccl->aborts = nccl->inits; /* nothing was joined */
  close_both(e, "its calls and its memory");
}

/* A rank that does not open is not waited for. */
static void check_shut(const mm_shards *shards, int rank) {
  mm_err err = {0};
  char what[60];
  shut = rank;
  const double from = now();
  mm_engine *e = open_both(shards, &err);
  shut = -1;
  snprintf(what, sizeof what, "rank %d does not open", rank);
  report(what, !e && strcmp(err.code, "E_TEST") == 0 && now() - from < 5, e ? "it opened" : err.text);
  close_both(e, "its calls and its memory");
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: host_fixture DIR NCCL\n");
    return 2;
  }
  mm_shards shards = {0};
  mm_err err = {0};
  void *const so = dlopen(argv[2], RTLD_NOW);
  setenv("MM_NCCL_SO", argv[2], 1);
  if (!so || !(nccl = dlsym(so, "fake_nccl")) || !mm_shards_open(&shards, argv[1], &err)) {
    fprintf(stderr, "host_fixture: %s\n", so ? err.text : dlerror());
    return 1;
  }
  logits = calloc((size_t)ROWS * shards.pack.model.vocab, sizeof *logits);
  check_steps(&shards);
  for (int rank = 0; rank < 2; rank++) {
    for (int failing = 0; failing < 4; failing++) check_failing(&shards, rank, failing, "E_TEST");
    check_failing(&shards, rank, 1, "E_MEMORY");
    check_late(&shards, rank);
    check_shut(&shards, rank);
  }
  check_failing(&shards, 0, 1, "E_NCCL");
  check_refused(&shards, "no NCCL", "/no/libnccl.so.2", 23004, 0, "/no/libnccl.so.2");
  check_refused(&shards, "an old NCCL", NULL, 22000, 0, "found NCCL 2.20.0");
  check_refused(&shards, "an NCCL that does not join", NULL, 23004, 6, "remote process exited");
  free(logits);
  mm_shards_close(&shards);
  dlclose(so);
  return failures > 0;
}

#else

int main(void) { return 77; }

#endif
