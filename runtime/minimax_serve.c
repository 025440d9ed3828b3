/* minimax-serve: an HTTP server over a packed checkpoint. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "convert/model/rule.h"
#include "formats/system/staging.h"
#include "loader/companions.h"
#include "runtime/engine/engine_options.h"
#include "runtime/engine/load_bar.h"
#include "runtime/serve/config_file.h"
#include "runtime/serve/descriptors.h"
#include "runtime/serve/key_file.h"
#include "runtime/serve/loading.h"
#include "runtime/serve/notify.h"
#include "runtime/serve/routes.h"

#define WORKERS        3                 /* threads that read long requests, one of them none over a megabyte */
#define REPORT_SECONDS 5                 /* between lines of a load that goes on */
#define END_SECONDS    2                 /* from the second signal to the end, whatever still runs */
#define REPLAY_TOKENS  ((size_t)4 << 20) /* of replies with calls that may come back */

typedef struct serve_args {
  mm_loading_config load;
  mm_http_config http;
  mm_option_list keys, names, hosts, origins;
  mm_arena *arena;
  const char *dir, *kv, *index, *input_dtype, *prefix_cache, *log_format, *metric_names, *compat, *config, *key_file;
  const char *kv_dir, *kv_listen, *prefill_from, *drafts;
  uint64_t port, queue, step_tokens, cache_memory, form_cache, kv_offload, kv_disk, connections, index_split, prefill_least;
  double request_time, prefill_time;
  bool any_name, trust_user, batch_invariant, json, quiet, check;
} serve_args;

typedef struct serve {
  const serve_args *a;
  mm_server server;
  mm_loaded loaded;
  pthread_t loader;
  bool loading, failed; /* loader is to be joined; why it failed is in err */
  bool loaded_well;     /* the loader's, until it is joined */
  bool out_of_time;     /* the process has used its CPU time */
  mm_err err;
  mm_task ready;
  unsigned signals;
  uint32_t connections;  /* at a time */
  double load_logged_at; /* mm_now(), seconds */
} serve;

/* ---- Loading, in a thread of its own ---- */

static void log_failure(void *user, const mm_err *err) { mm_log_error(user, NULL, err); }

static void *load(void *user) {
  serve *s = user;
  mm_loading_config c = s->a->load;
  c.reads = s->server.reads;
  c.scheduler.report = log_failure, c.scheduler.user = &s->server.log;
  s->loaded_well = mm_loading_check(&s->loaded, &c, &s->err) && mm_loading_finish(&s->loaded, &c, &s->err);
  if (s->loaded_well) mm_program_opened();
  mm_http_post(s->server.http, &s->ready);
  return NULL;
}

static void say_cache(const mm_server *v) {
  const mm_engine_cache c = mm_engine_cache_of(v->engine);
  const uint32_t longest = mm_engine_limits(v->engine)->max_positions;
  if (!c.tokens) return;
  mm_log_say(&v->log, "KV cache: %llu tokens (%.2f GiB on each rank), a full sequence of %u fits %llu times", (unsigned long long)c.tokens,
             (double)c.bytes / (1 << 30), longest, (unsigned long long)c.sequences);
  if (mm_engine_groups(v->engine) == 1) return;
  char text[200];
  mm_exchange_text(mm_engine_exchange(v->engine), text, sizeof text);
  mm_log_say(&v->log, "attention: %u groups of ranks, each with slots and an equal part of the KV cache; %s", mm_engine_groups(v->engine),
             text);
}

static bool is_loopback(const char *host) {
  return strncmp(host, "127.", 4) == 0 || strcmp(host, "::1") == 0 || strcmp(host, "localhost") == 0;
}

/* The other server of a split of prefill and decode. */
static void say_transfer(const serve *s) {
  const mm_transfer_config *t = &s->a->load.scheduler.transfer;
  if (t->listen) {
    const int n = (int)(strrchr(t->listen, ':') - t->listen);
    mm_log_say(&s->server.log, "prompts are computed for other servers at %.*s:%u", n, t->listen, mm_scheduler_port(s->loaded.scheduler));
    char host[256];
    snprintf(host, sizeof host, "%.*s", n, t->listen);
    if (!is_loopback(*host == '[' ? "::1" : host))
      mm_log_say(&s->server.log, "warning: --kv-listen %s: anybody who reaches it can have prompts computed, and there is no key",
                 t->listen);
  }
  if (t->from) mm_log_say(&s->server.log, "prompts of %u tokens and more are computed by %s", t->least, t->from);
}

/* Which code runs on the device, where there are several. */
static void say_kernels(serve *s) {
  mm_err none = {0};
  const mm_ops *ops = mm_ops_find(s->a->load.device, &none);
  if (ops && ops->kernels && *ops->kernels()) mm_log_say(&s->server.log, "%s", ops->kernels());
}

static void say_proposals(const serve *s) {
  const mm_log *log = &s->server.log;
  const mm_loaded *l = &s->loaded;
  const mm_loading_config *c = &s->a->load;
  if (c->fixed_drafts && c->scheduler.drafts && !l->proposals)
    mm_log_say(log, "--drafts: this model's lightning states cannot be rolled back, so that no tokens are proposed");
  if (l->no_draft.status != MM_OK) mm_log_say(log, "the checkpoint's draft is left out: %s", l->no_draft.text);
  if (l->proposals_left_out) mm_log_say(log, "no tokens are proposed: memory for that would leave too little for the cache");
  if (l->proposals)
    mm_log_say(log, "proposals: up to %u tokens a step of a request where that pays, by prompt lookup%s", l->proposals,
               l->has_draft ? " and the checkpoint's draft" : "");
}

/* Tokens of the longest sequence: of a cache, or part of it for a group, that was given no room for more, fewer than --max-model-len. */
static uint32_t positions_of(const mm_loaded *l) {
  mm_scheduler_stats stats;
  mm_scheduler_stats_read(l->scheduler, &stats);
  return stats.pages ? (uint32_t)mm_min(l->positions, (uint64_t)(stats.pages / mm_scheduler_groups(l->scheduler)) * MM_PAGE) : l->positions;
}

static void join_loader(serve *s) {
  if (!s->loading) return;
  pthread_join(s->loader, NULL);
  s->loading = false;
  s->failed = !s->loaded_well;
}

/* Of --max-connections as many as the limit of descriptors has room for; once more when a device's driver has opened what it needs. */
static bool bound_connections(serve *s, bool loaded, mm_err *err) {
  const mm_transfer_config *t = &s->a->load.scheduler.transfer;
  const bool device = strcmp(s->a->load.device, "cpu") != 0;
  const mm_descriptors_use use = {.later = (s->a->kv_dir ? 1u : 0u) + (t->listen || t->from ? MM_TRANSFER_DESCRIPTORS : 0u),
                                  .driver = device && !loaded,
                                  .served = mm_http_connections(s->server.http)};
  if (loaded && !device) return true;
  if (!loaded) s->connections = (uint32_t)s->a->connections;
  if (!mm_descriptors_share(&s->server.log, &use, &s->connections, err)) return false;
  mm_http_limit(s->server.http, s->connections);
  return true;
}

static void on_loaded(void *user) {
  serve *s = user;
  mm_server *v = &s->server;
  if (!s->loading) return; /* the loop has ended */
  join_loader(s);
  if (!s->failed) s->failed = !bound_connections(s, true, &s->err);
  if (s->failed || s->signals) {
    mm_http_stop(v->http);
    return;
  }
  v->scheduler = s->loaded.scheduler;
  v->engine = s->loaded.engine;
  v->tokenizer = s->loaded.tokenizer;
  v->vocab = s->loaded.shards.pack.model.vocab;
  v->positions = positions_of(&s->loaded);
  v->end = s->loaded.end;
  v->end_count = s->loaded.end_count;
  v->defaults = s->loaded.defaults;
  v->format = s->loaded.format;
  v->no_format = s->loaded.no_format.text;
  v->trust_user = s->a->trust_user;
  v->state = MM_SERVER_READY;
  mm_notify("READY=1\nSTATUS=ready");
  if (!v->format) mm_log_say(&v->log, "no chat: %s", v->no_format);
  say_proposals(s);
  if (*s->loaded.groups_line) mm_log_say(&v->log, "%s", s->loaded.groups_line);
  say_cache(v);
  say_transfer(s);
  say_kernels(s);
  mm_log_say(&v->log, "ready after %.2f s: %s, %u positions, temperature %g, top_p %g, top_k %u", mm_now() - v->started,
             MM_ESCAPED(400, v->name[0]), v->positions, v->defaults.temperature, v->defaults.top_p, v->defaults.top_k);
}

/* ---- Ending ---- */

/* The second signal: what has not ended some seconds later, as a worker that hangs in a step or a load that goes on, is not waited for. */
static volatile sig_atomic_t last_signal, hurried;
static char hurried_line[160];

static void end_process(int number) {
  (void)number;
  if (mm_log_writable() && write(STDERR_FILENO, hurried_line, strlen(hurried_line)) < 0) _exit(128 + last_signal);
  _exit(128 + last_signal);
}

static void hurry(int number) {
  const struct sigaction end = {.sa_handler = end_process};
  last_signal = number;
  sigaction(SIGALRM, &end, NULL);
  if (!hurried) alarm(END_SECONDS);
  hurried = 1;
}

/* Signals that come while no loop runs: the server is ending already. They count up to the end of the process, which
 * waits for workers of mpirun behind the last line of the log. */
static void catch_late_signals(bool json) {
  static const char text[] = "a second signal: ended without waiting for what still ran";
  const struct sigaction late = {.sa_handler = hurry};
  snprintf(hurried_line, sizeof hurried_line, json ? "{\"error\":\"%s\"}\n" : "minimax-serve: %s\n", text);
  sigaction(SIGTERM, &late, NULL);
  sigaction(SIGINT, &late, NULL);
  signal(SIGHUP, SIG_IGN);
  signal(SIGXCPU, SIG_IGN);
}

/* Replies that run end as they would, and new requests are refused. */
static void drain(serve *s, const char *how) {
  mm_log_say(&s->server.log, "draining: %u requests; %s", s->server.calls, how);
  mm_notify("STOPPING=1\nSTATUS=draining");
  mm_http_drain(s->server.http);
  s->server.state = MM_SERVER_DRAINING;
}

static void tick(void *user) {
  serve *s = user;
  s->server.stage = s->loaded.stage ? s->loaded.stage : "start";
  const mm_read_stats read = mm_read_log_stats(s->server.reads);
  if (!s->loading && !s->failed && mm_read_log_failed(s->server.reads, &s->err)) { /* after open: no request can be answered any more */
    s->failed = true;
    s->server.state = MM_SERVER_DRAINING;
    mm_http_stop(s->server.http);
  }
  if (!s->failed && s->server.scheduler && mm_scheduler_lost(s->server.scheduler, &s->err)) {
    s->failed = true;
    drain(s, "the engine has failed, and runs no step any more");
  }
  if (!s->failed && mm_read_bytes(&read) < read.wanted && mm_now() - s->load_logged_at >= REPORT_SECONDS) {
    char text[MM_BAR_MAX];
    s->load_logged_at = mm_now();
    const char *bar = mm_load_bar_text(text, &read);
    mm_log_say(&s->server.log, "loading %s", bar);
    mm_notify(MM_FORMATTED(MM_BAR_MAX + sizeof "STATUS=loading ", "STATUS=loading %s", bar));
  }
  if (s->server.state == MM_SERVER_DRAINING && !s->loading && s->server.calls == 0 && !mm_http_busy(s->server.http))
    mm_http_stop(s->server.http);
}

static void on_signal(serve *s, int number) {
  if (++s->signals > 1) {
    hurry(number);
    mm_http_stop(s->server.http);
    return;
  }
  drain(s, "a second signal ends at once");
  tick(s);
}

static void on_terminate(void *user) { on_signal(user, SIGTERM); }
static void on_interrupt(void *user) { on_signal(user, SIGINT); }

/* A terminal that closes, which may send it twice: never the second signal. */
static void on_hangup(void *user) {
  if (!((const serve *)user)->signals) on_signal(user, SIGHUP);
}

/* The soft limit of CPU time, then each second up to the hard one, at which the system ends the process. */
static void on_cpu_limit(void *user) {
  serve *s = user;
  s->out_of_time = true;
  if (!s->signals) on_signal(s, SIGXCPU);
}

static bool catch_signals(serve *s, mm_err *err) {
  mm_http *h = s->server.http;
  const bool hangup_ignored = mm_program_hangup_ignored();
  catch_late_signals(s->server.log.json);
  return mm_http_on_signal(h, SIGTERM, on_terminate, s, err) && mm_http_on_signal(h, SIGINT, on_interrupt, s, err) &&
         mm_http_on_signal(h, SIGXCPU, on_cpu_limit, s, err) && (hangup_ignored || mm_http_on_signal(h, SIGHUP, on_hangup, s, err));
}

/* ---- Opening ---- */

static void accept_failed(void *user, const mm_err *err) {
  const mm_server *v = user;
  mm_log_error(&v->log, NULL, err);
}

/* The last component of the checkpoint's path, of "." and ".." that of the directory they are. free() it. */
static char *name_of(const char *dir) {
  size_t n = strlen(dir);
  while (n > 1 && dir[n - 1] == '/') n--;
  size_t from = n;
  while (from > 0 && dir[from - 1] != '/') from--;
  const bool dots = (n - from == 1 && dir[from] == '.') || (n - from == 2 && dir[from] == '.' && dir[from + 1] == '.');
  char *whole = dots ? realpath(dir, NULL) : NULL, *name = whole ? name_of(whole) : strndup(dir + from, n - from);
  free(whole);
  return name;
}

static bool open_http(serve *s, mm_err *err) {
  mm_server *v = &s->server;
  mm_http_config c = s->a->http;
  c.port = (uint16_t)s->a->port;
  c.handle = mm_routes_handle;
  c.failed = accept_failed;
  c.user = v;
  if (!(v->http = mm_http_open(&c, err)) || !(v->outbox = mm_outbox_open(v->http, err)) ||
      !(v->workers = mm_workers_open(v->http, WORKERS, err)))
    return false;
  if (!mm_http_every(v->http, 0.05, tick, s, err)) return false;
  if (!catch_signals(s, err) || !bound_connections(s, false, err)) return false;
  const bool colon = strchr(c.host, ':');
  mm_log_say(&v->log, "listening on http://%s%s%s:%u", colon ? "[" : "", c.host, colon ? "]" : "", mm_http_port(v->http));
  if (!is_loopback(c.host) && !v->keys)
    mm_log_say(&v->log, "warning: listening on %s without an API key: anybody can use this server", c.host);
  return true;
}

static bool start_loading(serve *s, mm_err *err) {
  s->ready = (mm_task){.fn = on_loaded, .user = s};
  const int r = pthread_create(&s->loader, NULL, load, s);
  if (r) return mm_fail_thread(err, "start the thread that loads", r);
  return s->loading = true;
}

#define METRIC_NAMES "minimax|vllm|llama.cpp|none" /* as mm_metric_names has them */
#define DRAFTS       "auto|0|1|2|3|4|5|6|7"        /* to MM_DRAFTS */
#define COMPATS      "openai|vllm|llama.cpp"       /* as mm_compat has them */

/* The number of a word in a list, in which it is. */
static int word_of(const char *word, const char *list) {
  int number = 0;
  for (const char *p = list, *end = strstr(list, word); p < end; p++) number += *p == '|';
  return number;
}

static bool serve_all(const serve_args *a, mm_err *err) {
  char *name = name_of(a->dir);
  const char *const own[] = {name};
  serve s = {.a = a,
             .server = {.name = a->names.count ? a->names.item : own,
                        .names = a->names.count ? a->names.count : 1,
                        .key = a->keys.item,
                        .keys = a->keys.count,
                        .local = is_loopback(a->http.host) && !a->keys.count,
                        .origins = {a->hosts.item, a->hosts.count, a->origins.item, a->origins.count},
                        .any_name = a->any_name,
                        .metric_names = (mm_metric_names)word_of(a->metric_names, METRIC_NAMES),
                        .compat = (mm_compat)word_of(a->compat, COMPATS),
                        .request_time = a->request_time,
                        .log = {.json = a->json || strcmp(a->log_format, "json") == 0, .quiet = a->quiet},
                        .started = mm_now(),
                        .created = (int64_t)time(NULL),
                        .stage = "start",
                        .making = PTHREAD_MUTEX_INITIALIZER,
                        .shared = PTHREAD_MUTEX_INITIALIZER}};
  bool ok = name || mm_fail_memory(err, strlen(a->dir));
  ok = ok && (mm_dummy_wanted(&a->load.dummy) || mm_unpacked_refuse(a->dir, err)) &&
       (s.server.forms = mm_form_cache_open(a->form_cache, err)) && (s.server.replay = mm_replay_open(REPLAY_TOKENS, err)) &&
       (s.server.reads = mm_read_log_open(err));
  ok = ok && open_http(&s, err) && start_loading(&s, err) && mm_http_run(s.server.http, err);
  catch_late_signals(s.server.log.json);
  join_loader(&s);
  s.failed = s.failed || (s.server.scheduler && mm_scheduler_failing(s.server.scheduler, &s.err));
  if (s.failed) {
    *err = s.err;
    ok = false;
  }
  mm_workers_close(s.server.workers);
  s.server.workers = NULL; /* what ends from here on is done in this thread */
  if (s.server.http) mm_http_flush(s.server.http);
  mm_scheduler_close(s.loaded.scheduler, false);
  s.loaded.scheduler = s.server.scheduler = NULL;
  mm_outbox_close(s.server.outbox);
  mm_http_close(s.server.http);
  mm_form_cache_close(s.server.forms);
  mm_lexicon_close(s.server.lexicon);
  mm_replay_close(s.server.replay);
  mm_loading_close(&s.loaded, false);
  mm_read_log_close(s.server.reads);
  if (ok) mm_log_say(&s.server.log, "ended");
  if (ok && s.out_of_time) ok = mm_program_cpu_time(err);
  free(name);
  return ok;
}

static bool print_check(const serve_args *a, const mm_loaded *l, mm_err *err) {
  const mm_engine_cache cache = mm_engine_cache_of(l->engine);
  return mm_program_json(
      MM_JSON_NEW({"checkpoint", mm_json_new_path(a->dir)}, {"positions", mm_json_new_int(positions_of(l))},
                  {"chat", mm_json_new_bool(l->format != NULL)}, {"kv_cache_tokens", mm_json_new_u64(cache.tokens)},
                  {"kv_cache_bytes", mm_json_new_u64(cache.bytes)}, {"groups", mm_json_new_int(mm_engine_groups(l->engine))}),
      true, err);
}

static bool check(const serve_args *a, mm_err *err) {
  mm_loaded l = {0};
  mm_loading_config c = a->load;
  c.whole = true;
  bool ok = mm_loading_check(&l, &c, err) && mm_loading_finish(&l, &c, err);
  if (ok && a->json) {
    ok = print_check(a, &l, err);
  } else if (ok) {
    mm_show_to(stdout, a->dir);
    printf(": can be served, %u positions\n", positions_of(&l));
    if (*l.groups_line) printf("%s\n", l.groups_line);
  }
  mm_loading_close(&l, false);
  return ok && mm_program_written(err);
}

/* The pages' folder does not lie in the checkpoint, nor in another, whose files minimax-verify counts. */
static bool check_kv_dir(const serve_args *a, mm_err *err) {
  const int fd = a->kv_dir ? open(a->kv_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
  if (fd < 0) return true; /* the scheduler says why it cannot be used */
  const int own = mm_lies_in(fd, a->dir), inside = own == 0 ? mm_in_checkpoint(fd) : own;
  close(fd);
  return inside != 1 || mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(a->kv_dir, NULL),
                                "--kv-offload-dir: found a folder inside %s checkpoint, expected one elsewhere", own ? "the" : "a");
}

static bool check_split(serve_args *a, mm_err *err) {
  if ((a->kv_listen || a->prefill_from) && (!a->kv_offload || (a->kv_listen && a->prefill_from)))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                   "--kv-listen, --prefill-from: expected one of them, and --kv-offload, the memory in which pages are sent and received");
  if (a->prefill_least && !a->prefill_from)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--prefill-min: expected --prefill-from, whose prompts it is about");
  if (!isnan(a->prefill_time) && !a->kv_listen && !a->prefill_from)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--prefill-timeout: expected --prefill-from or --kv-listen");
  if (!a->prefill_least) a->prefill_least = 512;
  if (isnan(a->prefill_time)) a->prefill_time = 10;
  return (a->prefill_time >= 2 && a->prefill_time <= 3600) || /* beats come once a second */
         mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--prefill-timeout: found %g, expected 2 to 3600 seconds", a->prefill_time);
}

static bool settle(serve_args *a, mm_err *err) {
  if (!check_split(a, err)) return false;
  a->load.dir = a->dir;
  mm_cache_options(a->kv, a->index, a->index_split, &a->load.options);
  a->load.options.input_bf16 = strcmp(a->input_dtype, "bf16") == 0;
  a->load.scheduler = (mm_scheduler_config){
      .step_tokens = (uint32_t)a->step_tokens,
      .queue_max = (uint32_t)a->queue,
      .cache_bytes = a->cache_memory,
      .offload_bytes = a->kv_offload,
      .disk_dir = a->kv_dir,
      .disk_bytes = a->kv_disk,
      .transfer = {.listen = a->kv_listen, .from = a->prefill_from, .least = (uint32_t)a->prefill_least, .timeout = a->prefill_time},
      .prefix_cache = strcmp(a->prefix_cache, "on") == 0,
      .batch_invariant = a->batch_invariant,
      .warm = true,
      .drafts = MM_DEFAULT_DRAFTS};
  a->load.fixed_drafts = strcmp(a->drafts, "auto") != 0;
  if (a->load.fixed_drafts) a->load.scheduler.drafts = (uint32_t)(a->drafts[0] - '0'); /* one of the option's choices */
  if (a->kv_offload && strcmp(a->prefix_cache, "on") != 0)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--kv-offload: found --prefix-cache off, whose pages it would keep");
  if (!a->kv_dir != !a->kv_disk || (a->kv_dir && !a->kv_offload))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--kv-offload-dir, --kv-offload-disk: expected both, and --kv-offload");
  if (!check_kv_dir(a, err)) return false;
  if (a->http.body_max > UINT64_C(1) << 32)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--max-body: found %llu bytes, expected 4G or less",
                   (unsigned long long)a->http.body_max);
  const double least = fmin(a->http.read_time, a->http.write_time);
  if (least <= 0)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "%s: found %g, expected more than 0 seconds",
                   a->http.read_time <= 0 ? "--read-timeout" : "--write-timeout", a->http.read_time <= 0 ? a->http.read_time : least);
  if (a->request_time < 0)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--request-timeout: found %g, expected 0 or more seconds", a->request_time);
  for (size_t i = 0; i < a->names.count; i++)
    if (!*a->names.item[i])
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--served-model-name: found nothing, expected a name");
  const mm_origins origins = {a->hosts.item, a->hosts.count, a->origins.item, a->origins.count};
  return mm_keys_gather(&a->keys, a->key_file, a->arena, err) && mm_utilization_check(a->load.memory_share, err) &&
         mm_origin_check(&origins, err);
}

static bool run_all(void *args, mm_err *err) {
  serve_args *a = args;
  return (settle(a, err) && (a->check ? check(a, err) : serve_all(a, err))) || mm_config_named(err);
}

/* The options, before the command line is read with their defaults. */
static serve_args settings = {
    .load = {.device = "cpu", .slots = MM_DEFAULT_SLOTS, .memory_share = NAN, .dummy = MM_DUMMY_NONE(mm_arch_read)},
    .http = {.host = "127.0.0.1", .header_max = 64 << 10, .body_max = 32 << 20, .read_time = 60, .write_time = 60, .pending_max = 8 << 20},
    .kv = "auto",
    .index = "auto",
    .input_dtype = "auto",
    .prefix_cache = "on",
    .log_format = "text",
    .metric_names = "minimax",
    .compat = "openai",
    .drafts = "auto",
    .port = 8000,
    .queue = 256,
    .step_tokens = MM_DEFAULT_STEP_TOKENS,
    .prefill_time = NAN,
    .cache_memory = UINT64_C(1) << 30,
    .form_cache = UINT64_C(64) << 20,
    .connections = 4096};

static const mm_option options[] = {
    MM_OPTION(STR, "host", &settings.http.host, "ADDRESS", "address to listen on (127.0.0.1)"),
    MM_OPTION(U64, "port", &settings.port, "N", "port to listen on, 0: a free one (8000)", .hi = UINT16_MAX),
    MM_OPTION(LIST, "api-key", &settings.keys, "KEY",
              "accept requests with this key (may be given again); other users of the machine see it in the list of processes"),
    MM_OPTION(STR, "api-key-file", &settings.key_file, "FILE", "accept requests with any key of FILE, one a line"),
    MM_OPTION(LIST, "allow-host", &settings.hosts, "NAME",
              "without a key, also requests whose Host or Origin is this name, as a proxy may pass it on; * for any"),
    MM_OPTION(LIST, "allow-origin", &settings.origins, "ORIGIN",
              "pages from there may read replies in a browser (CORS): https://NAME, https://NAME:PORT or null; * for any (none)"),
    MM_OPTION(LIST, "served-model-name", &settings.names, "NAME", "name of the model in requests and replies (the directory's)"),
    MM_FLAG("any-model", &settings.any_name, "answer requests for any model's name"),
    MM_OPTION(U64, "max-model-len", &settings.load.positions, "N",
              "tokens of prompt and reply at most (as many as the model has positions)", .lo = 2, .hi = INT32_MAX),
    MM_OPTION(U64, "max-num-seqs", &settings.load.slots, "N", "requests that run at a time (16)", .lo = 1, .hi = 4096),
    MM_OPTION(U64, "max-num-batched-tokens", &settings.step_tokens, "N", "tokens of one step, prompts and replies together (512)", .lo = 1,
              .hi = 1 << 20),
    MM_OPTION(U64, "kv-cache-tokens", &settings.load.kv_tokens, "N", "tokens of all KV caches together (as many as fit in memory)",
              .hi = INT32_MAX),
    MM_OPTION_UTILIZATION(&settings.load.memory_share),
    MM_OPTION(U64, "max-queue", &settings.queue, "N", "waiting requests at most; more get status 429 (256)", .lo = 1, .hi = 1 << 20),
    MM_OPTION(STR, "prefix-cache", &settings.prefix_cache, "WORD", "keep prompts for requests that begin alike (on)", .choices = "on|off"),
    MM_OPTION(SIZE, "prefix-cache-memory", &settings.cache_memory, "SIZE", "memory of kept prompts' lightning states (1G)"),
    MM_OPTION(SIZE, "form-cache", &settings.form_cache, "SIZE", "memory for compiled schemas and grammars that no request uses (64M)"),
    MM_OPTION(SIZE, "kv-offload", &settings.kv_offload, "SIZE",
              "host memory for pages of kept prompts that leave the device, 0: they are lost (0)"),
    MM_OPTION(STR, "kv-offload-dir", &settings.kv_dir, "DIR", "folder for a file of pages that leave host memory (none: they are lost)"),
    MM_OPTION(SIZE, "kv-offload-disk", &settings.kv_disk, "SIZE", "largest size of the file in --kv-offload-dir (0)"),
    MM_OPTION(STR, "kv-listen", &settings.kv_listen, "HOST:PORT", "compute prompts there for servers with --prefill-from (none)"),
    MM_OPTION(STR, "prefill-from", &settings.prefill_from, "HOST:PORT",
              "have long prompts computed by the server with --kv-listen there (none)"),
    MM_OPTION(U64, "prefill-min", &settings.prefill_least, "N", "with --prefill-from: fewer tokens than that are computed here (512)",
              .lo = 1, .hi = INT32_MAX),
    MM_OPTION(REAL, "prefill-timeout", &settings.prefill_time, "SECONDS", "silence after which the other server counts as lost (10)"),
    MM_FLAG("batch-invariant", &settings.batch_invariant, "the same tokens whatever else runs"),
    MM_OPTION(STR, "drafts", &settings.drafts, "N",
              "tokens that prompt lookup or a packed draft may propose for a step of a request (auto: 7 where that can be had)",
              .choices = DRAFTS),
    MM_OPTION(REAL, "request-timeout", &settings.request_time, "SECONDS", "seconds for a whole request, 0: no limit (0)"),
    MM_OPTION(REAL, "read-timeout", &settings.http.read_time, "SECONDS", "time in which a request must arrive whole (60)"),
    MM_OPTION(REAL, "write-timeout", &settings.http.write_time, "SECONDS", "time in which a client must take some of its reply (60)"),
    MM_OPTION(SIZE, "max-body", &settings.http.body_max, "SIZE", "bytes of a request at most (32M)"),
    MM_OPTION(U64, "max-connections", &settings.connections, "N", "open connections at most, more wait (4096)", .lo = 1, .hi = 1 << 20),
    MM_OPTION(STR, "chat-format", &settings.load.chat_format, "NAME", "how conversations are rendered (as the checkpoint's template does)",
              .choices = MM_CHAT_FORMATS),
    MM_FLAG("trust-user-tokens", &settings.trust_user, "read control tokens in users' text as control tokens"),
    MM_OPTION_DEVICE(&settings.load.device),
    MM_OPTION_DEVICES(&settings.load.devices),
    MM_OPTION_DP(&settings.load.dp),
    MM_OPTION_VERIFY(&settings.load.verify),
    MM_OPTIONS_DUMMY(settings.load.dummy),
    MM_OPTION_ATTACH(&settings.load.attach),
    MM_OPTION(STR, "act-quant", &settings.load.act_quant, "WORD",
              "round the inputs of linears as their scheme defines, or not (on where the device can, else off)", .choices = "on|off"),
    MM_OPTION_INPUT_DTYPE(&settings.input_dtype),
    MM_OPTION_KV_CACHE(&settings.kv),
    MM_OPTION_INDEX_CACHE(&settings.index),
    MM_OPTION_INDEX_SPLIT(&settings.index_split),
    MM_OPTION_THREADS(&settings.load.threads),
    MM_OPTION_PIN(&settings.load.options.pin),
    MM_FLAG("ignore-generation-config", &settings.load.own_defaults,
            "defaults are temperature 1 and top_p 1, not those of generation_config.json"),
    MM_OPTION(STR, "log-format", &settings.log_format, "WORD", "format of log lines on stderr (text)", .choices = "text|json"),
    MM_OPTION(STR, "metric-names", &settings.metric_names, "WORD",
              "names of metrics in /metrics (minimax); vllm, llama.cpp: also theirs; none: /metrics is off", .choices = METRIC_NAMES),
    MM_OPTION(STR, "compat", &settings.compat, "WORD", "server to follow where replies differ from OpenAI's (openai)", .choices = COMPATS),
    MM_OPTION(STR, "config", &settings.config, "FILE", "more options, one a line without dashes; those of the command line win"),
    MM_FLAG("check", &settings.check, "load everything, say whether it can be served, and end"),
    MM_FLAG("json", &settings.json, "print the log, errors and the result of --check as JSON"),
    MM_FLAG("quiet", &settings.quiet, "log errors alone", .letter = 'q'),
};

static const mm_program program = {
    MM_PROGRAM("minimax-serve", "serve a packed checkpoint over HTTP", "DIR", 1, 1, options),
    .examples =
        "minimax-serve M2-nvfp4\n"
        "minimax-serve M2-nvfp4 --host 0.0.0.0 --api-key-file keys.txt --max-num-seqs 64\n"
        "curl -s 127.0.0.1:8000/v1/chat/completions -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'",
    .may_end = mm_process_group_none,
    .epilog =
        "/v1/chat/completions, /v1/responses, /v1/completions and /v1/models as OpenAI has them, /v1/messages as Anthropic has it;\n"
        "/health, /ready, /metrics, /tokenize, /detokenize; / is a page to chat with the model.\n"
        "SIGTERM and SIGINT let running requests end; a second one ends the server within two seconds.\n" MM_ENGINE_STATUSES,
};

int main(int argc, char **argv) {
  mm_err err = {0};
  mm_arena arena = {0};
  mm_program_stay();
  settings.arena = &arena;
  char **args;
  int count;
  const int status = mm_config_file(&program, &arena, argc, argv, &count, &args, &err)
                         ? mm_program_main(&program, count, args, &settings.dir, run_all, &settings)
                         : mm_program_fail(&program, &err);
  mm_arena_close(&arena);
  MM_FREE(settings.keys.item, settings.names.item, settings.hosts.item, settings.origins.item);
  return status;
}
