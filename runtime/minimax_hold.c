/* minimax-hold: keeps a packed checkpoint's weights on its devices, so that servers start again in an instant. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "convert/model/rule.h"
#include "formats/system/output.h"
#include "formats/system/pool.h"
#include "loader/verify.h"
#include "runtime/engine/engine_options.h"
#include "runtime/engine/hold.h"

typedef struct hold_args {
  const char *operand[2];            /* DIR, SOCKET */
  const char *device, *devices, *dp; /* dp: NULL where not given */
  mm_dummy dummy;
  bool verify, json, quiet;
} hold_args;

typedef struct holder holder;
/* One rank's weights, loaded by a thread of its own. */
typedef struct held_rank {
  const holder *all;
  uint32_t index;
  pthread_t thread;
  mm_rank_weights weights;
  void *memory;
  mm_err err;
} held_rank;

struct holder {
  const hold_args *a;
  const mm_ops *ops;
  mm_shards shards;
  mm_comm *comm; /* broken by a rank whose load fails: then no other one is waited for */
  mm_read_log *log;
  uint32_t *device; /* [ranks], or NULL */
  mm_held *held;    /* [ranks] */
  held_rank *rank;  /* [started] */
  uint32_t ranks, started;
};

static bool g_quiet;
static void report(const char *line) {
  if (!g_quiet) fprintf(stderr, "minimax-hold: %s\n", line);
}

static void *load(void *arg) {
  held_rank *r = arg;
  const holder *h = r->all;
  if (!mm_bind_any(&r->weights, &h->shards, r->index, &r->err)) return NULL;
  const mm_backend_config c = {
      .model = &h->shards.pack.model,
      .weights = &r->weights,
      .comm = h->comm,
      .place = {r->index, r->index, h->ranks, h->device ? h->device[r->index] : r->index, mm_devices_shared(h->device, h->ranks)},
      .verify = h->a->verify && !h->shards.regrouped ? &h->shards : NULL,
      .log = h->log,
      .checkpoint = mm_shards_digest(&h->shards)};
  if (h->ops->weights.hold(&c, &h->held[r->index], &r->memory, &r->err)) return r;
  mm_comm_abort(h->comm);
  return NULL;
}

/* All ranks at once; the first error of any. A signal ends the process meanwhile: nobody uses anything yet. */
static bool load_all(holder *h, const sigset_t *signals, mm_err *err) {
  bool ok = true;
  for (; ok && h->started < h->ranks; h->started++) {
    held_rank *r = &h->rank[h->started];
    *r = (held_rank){.all = h, .index = h->started};
    const int failed = pthread_create(&r->thread, NULL, load, r);
    if (!failed) continue;
    ok = mm_fail_thread(err, MM_FORMATTED(80, "start a thread for rank %u", h->started), failed);
    mm_comm_abort(h->comm);
    break;
  }
  pthread_sigmask(SIG_UNBLOCK, signals, NULL);
  for (uint32_t i = 0; i < h->started; i++) {
    void *done;
    pthread_join(h->rank[i].thread, &done);
    if (done) continue;
    if (err->status == MM_OK) *err = h->rank[i].err; /* none of a rank that stopped waiting for its own load */
    ok = false;
  }
  pthread_sigmask(SIG_BLOCK, signals, NULL);
  return ok;
}

static bool open_all(holder *h, const sigset_t *signals, mm_err *err) {
  const hold_args *a = h->a;
  if (!mm_output_outside(a->operand[1], a->operand[0], err)) return false;
  if (!(h->ops = mm_ops_find(a->device, err))) return false;
  if (!h->ops->weights.hold)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                   "found device %s, which reads weights where the page cache has them: nothing is to be held", h->ops->name);
  const mm_groups_request groups = {.word = a->dp, .device = a->device};
  char line[MM_GROUPS_LINE];
  if (!mm_groups_open(&h->shards, a->operand[0], &a->dummy, &groups, line, err) || !mm_ops_run(h->ops, &h->shards.pack.model, err) ||
      !mm_ops_run_groups(h->ops, &h->shards.pack, err))
    return false;
  if (*line) report(line);
  if (a->verify && h->shards.regrouped && !mm_verify_blocks(&h->shards, mm_pool_cpus(), err)) return false; /* copies have no digests */
  mm_hold *const path = mm_hold_open(a->operand[1], NULL, 0, err); /* what is wrong with it is said before the weights are read */
  mm_hold_close(path);
  if (!path) return false;
  h->ranks = mm_pack_ranks(&h->shards.pack);
  return mm_devices_read(a->device, a->devices, h->ranks, &h->device, err) && (h->log = mm_read_log_open(err)) &&
         (h->comm = mm_comm_open(h->ranks, err)) && (h->held = mm_calloc(h->ranks, sizeof *h->held, err)) &&
         (h->rank = mm_calloc(h->ranks, sizeof *h->rank, err)) && load_all(h, signals, err);
}

static bool say_ready(const holder *h, mm_err *err) {
  char text[160];
  const mm_read_stats s = mm_read_log_stats(h->log);
  report(MM_FORMATTED(320, "ready: %u rank(s), loaded %s", h->ranks, mm_read_text(text, sizeof text, &s)));
  if (!h->a->json) return true;
  mm_json *o = MM_JSON_NEW({"socket", mm_json_new_path(h->a->operand[1])}, {"ranks", mm_json_new_int(h->ranks)},
                           {"bytes", mm_json_new_u64(mm_read_bytes(&s))});
  return mm_program_json(o, true, err) && mm_program_written(err);
}

static bool hold(void *args, mm_err *err) {
  const hold_args *a = args;
  holder h = {.a = a};
  g_quiet = a->quiet;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  if (!mm_program_hangup_ignored()) sigaddset(&set, SIGHUP);
  const sigset_t ending = set; /* the limit of CPU time waits for the end of a load: then the status says so */
  sigaddset(&set, SIGXCPU);
  pthread_sigmask(SIG_BLOCK, &set, NULL); /* before there is any other thread */
  const int stop = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  bool ok = stop >= 0 || mm_fail_errno(err, mm_at(NULL, NULL), "signalfd", errno);
  ok = ok && open_all(&h, &ending, err);
  mm_hold *socket = ok ? mm_hold_open(a->operand[1], h.held, h.ranks, err) : NULL;
  ok = socket && say_ready(&h, err) && mm_hold_serve(socket, stop, report, err);
  mm_hold_close(socket);
  for (uint32_t i = 0; i < h.started; i++) {
    if (h.rank[i].memory) h.ops->weights.release(h.rank[i].memory);
    mm_bind_close(&h.rank[i].weights);
  }
  mm_comm_close(h.comm);
  mm_read_log_close(h.log);
  mm_shards_close(&h.shards);
  MM_FREE(h.rank, h.held, h.device);
  if (stop >= 0) close(stop);
  return ok;
}

int main(int argc, char **argv) {
  hold_args a = {.device = "cuda", .dummy = MM_DUMMY_NONE(mm_arch_read)};
  mm_program_stay();
  const mm_option options[] = {
      MM_OPTION(STR, "device", &a.device, "NAME", "where to keep them (cuda)", .choices = MM_DEVICES),
      MM_OPTION_DEVICES(&a.devices),
      MM_OPTION_DP_NUMBER(&a.dp),
      MM_OPTION_VERIFY(&a.verify),
      MM_OPTIONS_DUMMY(a.dummy),
      MM_FLAG("json", &a.json, "one JSON object when the weights are there; errors as JSON"),
      MM_FLAG("quiet", &a.quiet, "nothing on stderr but errors", .letter = 'q'),
  };
  const mm_program program = {
      MM_PROGRAM("minimax-hold", "keep a packed checkpoint's weights on its GPUs, so that servers start again in an instant", "DIR SOCKET",
                 2, 2, options),
      .examples =
          "minimax-hold M2-nvfp4 /run/minimax/hold.sock &\n"
          "minimax-serve M2-nvfp4 --device cuda --attach /run/minimax/hold.sock\n"
          "minimax-run M2-nvfp4 --device cuda --attach /run/minimax/hold.sock --chat",
      .epilog =
          "Processes of the same user attach by --attach SOCKET: minimax-serve and minimax-run. They read no weights, and end and start\n"
          "as they like. SIGTERM and SIGINT let attached processes go on: it ends when they have left; a second signal does not wait.\n"
          "The soft limit of CPU time counts as the first signal; the status is 8 then.\n"
          "Exit status: 0 done, 2 usage, 3 bad input, 4 unsupported, 5 I/O, 6 damaged checkpoint, 8 memory or limit.",
  };
  return mm_program_main(&program, argc, argv, a.operand, hold, &a);
}
