/* Masks of constrained replies at 200,064 ids (large_tokenizer.h): microseconds a mask over replies of noise to the everyday schemas
 * (tests/data/schemas.json) and to forced calls of M2's format, each of a tool with one of these schemas; what compiling a form, opening a
 * constraint and a short reply take, and steps of 64 requests, each of which takes one token and makes one mask, all by CPU time; then
 * steps of the scheduler on a device that takes 3 ms for each, of 64 free and of 64 constrained requests, half of them forced calls.
 * bench_masks [TOKENS [ROUNDS]]: of a reply, at most; of each figure. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "formats/body.h"
#include "formats/text.h"
#include "runtime/constrain/call_form.h"
#include "runtime/constrain/constrain.h"
#include "runtime/constrain/schema.h"
#include "runtime/schedule/scheduler.h"
#include "tests/bench/large_tokenizer.h"
#include "tests/unit/runtime/reference.h"

enum { SHORT = 12, STREAMS = 64, FORMS = 128 };

typedef struct bench {
  mm_tokenizer *tokenizer;
  mm_lexicon *lexicon;
  int32_t end;
  const mm_form *form[FORMS];
  mm_tools tools[FORMS]; /* of forced calls */
  size_t schemas, forms; /* the first are JSON of schemas, the others calls */
  int32_t *list;         /* [LARGE_VOCAB] */
  uint64_t seed;
  double *took; /* [taken] seconds */
  size_t taken, cap;
} bench;

static _Noreturn void die(const mm_err *err) {
  fprintf(stderr, "bench_masks: %s\n", err->text);
  exit((int)err->status);
}

static uint32_t below(bench *b, uint32_t n) {
  b->seed ^= b->seed << 13;
  b->seed ^= b->seed >> 7;
  b->seed ^= b->seed << 17;
  return (uint32_t)((b->seed >> 16) % n);
}

static void record(bench *b, double seconds) {
  mm_err err = {0};
  if (!MM_GROW(b->took, &b->cap, b->taken + 1, &err)) die(&err);
  b->took[b->taken++] = seconds;
}

static int by_value(const void *x, const void *y) {
  const double a = *(const double *)x, b = *(const double *)y;
  return (a > b) - (a < b);
}

/* The quantile of what was recorded, which is sorted, in microseconds. */
static double at(const bench *b, double share) { return 1e6 * b->took[(size_t)(share * (double)(b->taken - 1))]; }

static double sum(const bench *b) {
  double s = 0;
  for (size_t i = 0; i < b->taken; i++) s += b->took[i];
  return s;
}

static void print(bench *b, const char *what) {
  qsort(b->took, b->taken, sizeof *b->took, by_value);
  printf("%s: %zu, mean %.1f us, median %.1f, p90 %.1f, p99 %.1f, most %.1f\n", what, b->taken, 1e6 * sum(b) / (double)b->taken, at(b, 0.5),
         at(b, 0.9), at(b, 0.99), at(b, 1));
  b->taken = 0;
}

static double cpu_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A form of a schema for even i, of a call for odd. */
static size_t form_of(const bench *b, size_t i) {
  const size_t calls = b->forms - b->schemas;
  return i % 2 && calls ? b->schemas + i / 2 % calls : i / 2 % b->schemas;
}

/* One of the allowed ids; half of the time one that closes something. */
static int32_t pick(bench *b, const uint32_t *mask) {
  uint32_t count = 0, closing = 0;
  for (uint32_t i = 0; i < (LARGE_VOCAB + 31) / 32; i++)
    for (uint32_t m = mask[i]; m; m &= m - 1) b->list[count++] = (int32_t)(32 * i + (uint32_t)__builtin_ctz(m));
  if (mask[b->end / 32] >> (b->end % 32) & 1 && below(b, 2)) return b->end;
  static const char closers[] = "\"}],:";
  for (const char *p = closers; below(b, 2) && *p; p++) closing |= (uint32_t)(mask[*p / 32] >> (*p % 32) & 1) << (p - closers);
  for (uint32_t i = 0; closing; i = (i + 1) % 5)
    if (closing >> i & 1 && below(b, 2)) return closers[i];
  return b->list[below(b, count)];
}

static mm_constraint *open_one(const bench *b, size_t form) {
  mm_err err = {0};
  const mm_section section = {.kind = MM_SECTION_FORM, .form = b->form[form]};
  mm_constraint *c = mm_constraint_open(b->lexicon, &section, 1, &err);
  if (!c) die(&err);
  return c;
}

/* A reply of at most so many tokens; its time without what is done to pick tokens. masks: each of them is recorded. */
static double reply(bench *b, size_t form, int tokens, bool masks) {
  double began = cpu_now(), whole = 0;
  mm_constraint *c = open_one(b, form);
  for (int i = 0; i < tokens; i++) {
    const double mask_began = cpu_now();
    const uint32_t *mask = mm_constraint_allowed(c);
    const double now = cpu_now();
    if (masks) record(b, now - mask_began);
    whole += now - began;
    const int32_t id = pick(b, mask);
    began = cpu_now();
    if (id == b->end) break;
    mm_constraint_chosen(c, id);
  }
  mm_constraint_close(c);
  return whole + cpu_now() - began;
}

/* Steps of STREAMS requests, each with a schema of its own; a reply that ends is followed by another. */
static void steps(bench *b, int count) {
  mm_constraint *c[STREAMS];
  int32_t id[STREAMS];
  for (size_t i = 0; i < STREAMS; i++) {
    c[i] = open_one(b, form_of(b, i));
    id[i] = pick(b, mm_constraint_allowed(c[i]));
  }
  for (int k = 0; k < count; k++) {
    double took = 0;
    for (size_t i = 0; i < STREAMS; i++) {
      const double began = cpu_now();
      if (id[i] == b->end) {
        mm_constraint_close(c[i]);
        c[i] = open_one(b, form_of(b, 2 * below(b, FORMS) + i % 2));
      } else {
        mm_constraint_chosen(c[i], id[i]);
      }
      const uint32_t *mask = mm_constraint_allowed(c[i]);
      took += cpu_now() - began;
      id[i] = pick(b, mask);
    }
    record(b, took);
  }
  for (size_t i = 0; i < STREAMS; i++) mm_constraint_close(c[i]);
}

/* ---- a device of 3 ms ---- */

#define STEP_SECONDS 3e-3

/* Its time is that of one core that nobody else uses: the CPU time of this process, without what the device's own picks take, and the
 * waits. A pass begins when it was queued and the one before is done; its choice, which takes no time, when it is done and was asked for.
 */
static struct {
  bench *b;
  atomic_bool all;       /* all requests are there: until then it does not begin */
  double waited, picked; /* seconds */
  double free_at, ready[MM_QUEUE];
  uint32_t rows;
  int32_t id[MM_QUEUE][STREAMS];
  uint64_t queued, collected;
} gpu;

static double gpu_now(void) { return cpu_now() + gpu.waited - gpu.picked; }
static double latest(double a, double b) { return a > b ? a : b; }

static bool gpu_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  (void)b, (void)err;
  const struct timespec pause = {0, 1000000};
  while (!atomic_load(&gpu.all)) nanosleep(&pause, NULL);
  gpu.rows = batch->out_count;
  gpu.free_at = latest(gpu_now(), gpu.free_at) + STEP_SECONDS;
  return true;
}

/* What closes something, if it is allowed, else the first allowed id behind a random one. */
static int32_t pick_at_once(bench *b, const uint32_t *mask) {
  static const char closers[] = {0, '"', '}', ']', ',', ':'};
  const uint32_t words = (LARGE_VOCAB + 31) / 32, from = below(b, words);
  if (!mask) return (int32_t)(1 + from);
  for (size_t i = 0; i < sizeof closers; i++)
    if (mask[closers[i] / 32] >> (closers[i] % 32) & 1 && below(b, 3) == 0) return closers[i];
  for (uint32_t i = 0; i < words; i++) {
    const uint32_t at = (from + i) % words;
    if (mask[at]) return (int32_t)(32 * at + (uint32_t)__builtin_ctz(mask[at]));
  }
  return b->end;
}

static bool gpu_sample(const mm_sampling *set, uint32_t rows) {
  const uint64_t at = gpu.queued++ % MM_QUEUE;
  const double now = gpu_now(), began = cpu_now();
  for (uint32_t i = 0; i < rows; i++) gpu.id[at][i] = pick_at_once(gpu.b, set ? set[i].allowed : NULL);
  gpu.ready[at] = gpu.free_at = latest(now, gpu.free_at);
  gpu.picked += cpu_now() - began;
  return true;
}

static bool gpu_choose(mm_backend *b, mm_err *err) { return (void)b, (void)err, gpu_sample(NULL, gpu.rows); }
static bool gpu_keep(mm_backend *b, mm_err *err) { return (void)b, (void)err, true; }
static bool gpu_choose_kept(mm_backend *b, const mm_sampling *set, uint32_t count, mm_err *err) {
  return (void)b, (void)err, gpu_sample(set, count);
}

static bool gpu_collect(mm_backend *b, int32_t *id, mm_err *err) {
  (void)b, (void)err;
  const uint64_t at = gpu.collected++ % MM_QUEUE;
  gpu.waited += latest(0, gpu.ready[at] - gpu_now());
  memcpy(id, gpu.id[at], sizeof gpu.id[at]);
  return true;
}

static bool gpu_ids(mm_backend *b, uint32_t slot, const int32_t *id, uint32_t count, mm_err *err) {
  return (void)b, (void)slot, (void)id, (void)count, (void)err, true;
}
static void no_rows(mm_backend *b, mm_act x, const mm_packed *w) { (void)b, (void)x, (void)w; }
static void no_norm(mm_backend *b, mm_act y, mm_act x, const mm_packed *w, double eps) { (void)b, (void)y, (void)x, (void)w, (void)eps; }
static void no_linear(mm_backend *b, mm_act y, mm_act x, const mm_packed *w) { (void)b, (void)y, (void)x, (void)w; }
static void no_gqa(mm_backend *b, uint32_t l, mm_act o, mm_act qkv, const mm_packed *q, const mm_packed *k) {
  (void)b, (void)l, (void)o, (void)qkv, (void)q, (void)k;
}
static void no_route(mm_backend *b, uint32_t l, mm_act x, const mm_packed *w, const mm_packed *bias) {
  (void)b, (void)l, (void)x, (void)w, (void)bias;
}
static void no_experts(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2) {
  (void)b, (void)y, (void)x, (void)w13, (void)w2;
}
static void no_combine(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w,
                       double eps) {
  (void)b, (void)h, (void)n, (void)residual, (void)branch, (void)scale, (void)w, (void)eps;
}

typedef struct stream {
  bench *b;
  mm_constraint *constraint; /* NULL: it is free */
  size_t number;
} stream;

static const uint32_t *on_allow(void *user) { return mm_constraint_allowed(((stream *)user)->constraint); }

/* A reply that ends is followed by another one. */
static bool on_token(void *user, int32_t id, const mm_logprob *logprobs, const mm_progress *p) {
  stream *s = user;
  (void)logprobs, (void)p;
  if (s->constraint && id != s->b->end) mm_constraint_chosen(s->constraint, id);
  if (!s->constraint || id != s->b->end) return true;
  mm_constraint_close(s->constraint);
  s->constraint = open_one(s->b, form_of(s->b, 2 * below(s->b, FORMS) + s->number % 2));
  return true;
}

static void on_done(void *user, mm_finish reason, const mm_progress *p, const mm_err *err) {
  (void)user, (void)p;
  if (reason == MM_FINISH_ERROR) die(err);
}

/* Milliseconds of a step of STREAMS requests. */
static double scheduled(bench *b, mm_engine *e, uint32_t tokens, bool constrained) {
  const mm_scheduler_config c = {.step_tokens = STREAMS, .queue_max = STREAMS};
  mm_err err = {0};
  mm_scheduler_stats t;
  stream own[STREAMS];
  const int32_t prompt = 1;
  uint64_t ticket;
  mm_scheduler *s = mm_scheduler_open(e, &c, &err);
  if (!s) die(&err);
  for (size_t i = 0; i < STREAMS; i++) {
    own[i] = (stream){.b = b, .number = i, .constraint = constrained ? open_one(b, form_of(b, i)) : NULL};
    const mm_request r = {.prompt = &prompt,
                          .prompt_count = 1,
                          .max_tokens = tokens,
                          .sampling = {.top_p = 1},
                          .user = &own[i],
                          .allow = constrained ? on_allow : NULL,
                          .token = on_token,
                          .done = on_done};
    if (!mm_scheduler_submit(s, &r, &ticket, &err)) die(&err);
  }
  const double began = gpu_now();
  atomic_store(&gpu.all, true);
  const struct timespec pause = {0, 20000000};
  do nanosleep(&pause, NULL), mm_scheduler_stats_read(s, &t);
  while (t.running || t.waiting);
  const double ms = 1e3 * (gpu_now() - began) / (double)t.steps;
  mm_scheduler_close(s, true);
  atomic_store(&gpu.all, false);
  for (size_t i = 0; i < STREAMS; i++) mm_constraint_close(own[i].constraint);
  return ms;
}

static void on_device(bench *b, uint32_t tokens) {
  mm_err err = {0};
  mm_model m = ref_dims(MM_FAMILY_M2, false);
  m.hidden = 64, m.layers = 1, m.vocab = LARGE_VOCAB;
  ref_model ref = ref_build(m);
  ref_shards *cut = ref_cut(&ref, 1);
  mm_ops ops = mm_ops_cpu;
  ops.begin = gpu_begin, ops.sampler.sample = gpu_choose, ops.sampler.defer = gpu_keep, ops.sampler.sample_deferred = gpu_choose_kept,
  ops.sampler.collect = gpu_collect;
  ops.sampler.load_ids = gpu_ids, ops.sampler.samples = UINT32_MAX, ops.embed = no_rows, ops.norm = no_norm, ops.linear = no_linear,
  ops.logits = no_rows;
  ops.gqa = no_gqa, ops.route = no_route, ops.experts = no_experts, ops.combine = no_combine;
  const mm_engine_config c = {
      .ops = &ops, .limits = {.max_tokens = STREAMS, .slots = STREAMS, .max_positions = tokens + 1}, .options = {.threads = 1}};
  mm_engine *e = mm_engine_open(&cut->s, &c, &err);
  if (!e) die(&err);
  gpu.b = b;
  for (int k = 0; k < 3; k++) {
    const double open = scheduled(b, e, tokens, false), masked = scheduled(b, e, tokens, true);
    printf("steps of 64 requests on a device of 3 ms: free %.3f ms, constrained %.3f ms, %+.1f %%\n", open, masked,
           100 * (masked / open - 1));
  }
  mm_engine_close(e);
  ref_uncut(cut);
  ref_free(&ref);
}

/* ---- all ---- */

/* The form of a forced call of a tool with the schema; NULL: it is not served. */
static const mm_form *call_of(bench *b, mm_arena *a, const mm_value *schema) {
  static const bool bound[] = {true};
  mm_err err = {0}, refused = {0};
  mm_text json = {0};
  mm_text_printf(&json, "{\"name\": \"answer\", \"parameters\": %.*s}", (int)schema->raw_n, schema->raw);
  const char *kept = json.failed ? NULL : mm_arena_strndup(a, json.p, json.n, &err);
  const mm_chat_tool tool = {.json = {kept, json.n}};
  free(json.p);
  if (!kept || !mm_tools_open(&b->tools[b->forms], &tool, 1, &err)) die(&err);
  const mm_call_rules rules = {.family = MM_CHAT_M2, .tools = &b->tools[b->forms], .bound = bound, .one_call = true};
  const mm_form *form = mm_call_form(a, &rules, &refused);
  if (!form) mm_tools_close(&b->tools[b->forms]);
  return form;
}

/* Forms of schemas, and of forced calls, that the cache has. */
static void find_forms(bench *b, const mm_value *corpus, bool calls) {
  static const bool bound[] = {true};
  mm_err err = {0};
  mm_form_cache *cache = mm_form_cache_open((size_t)64 << 20, &err);
  if (!cache) die(&err);
  for (const mm_value *v = corpus->first; v; v = v->next) {
    const mm_value *schema = mm_value_get(v, "schema");
    mm_held_forms held = {.cache = cache};
    mm_text json = {0};
    mm_text_printf(&json, "{\"name\": \"answer\", \"parameters\": %.*s}", (int)schema->raw_n, schema->raw);
    const mm_chat_tool tool = {.json = {json.p, json.n}};
    const mm_call_limits limits = {.family = MM_CHAT_M2, .tool = &tool, .tools = 1, .bound = bound, .one_call = true};
    for (int i = 0; i < 20 && !json.failed; i++) {
      mm_err refused = {0};
      const double began = cpu_now();
      const mm_form *f = calls ? mm_forms_calls(&held, &limits, &refused) : mm_forms_schema(&held, schema, "json_schema", &refused);
      mm_forms_release(&held);
      if (f && i) record(b, cpu_now() - began);
    }
    free(json.p);
  }
  print(b, calls ? "forced calls from the cache" : "schemas from the cache");
  mm_form_cache_close(cache);
}

static void open_forms(bench *b, mm_arena *a) {
  mm_err err = {0};
  size_t n;
  const char *text = mm_file_slurp("tests/data/schemas.json", UINT64_C(1) << 20, &n, &err);
  const mm_value *corpus = text ? mm_body_parse(a, text, n, &err) : NULL;
  if (!corpus) die(&err);
  for (const mm_value *v = corpus->first; v && b->forms < FORMS; v = v->next) {
    mm_err refused = {0};
    const double began = cpu_now();
    b->form[b->forms] = mm_schema_compile(a, mm_value_get(v, "schema"), "json_schema", &refused);
    record(b, cpu_now() - began);
    b->forms += b->form[b->forms] != NULL;
  }
  print(b, "schemas compiled");
  find_forms(b, corpus, false);
  b->schemas = b->forms;
  for (const mm_value *v = corpus->first; v && b->forms < FORMS; v = v->next) {
    const double began = cpu_now();
    b->form[b->forms] = call_of(b, a, mm_value_get(v, "schema"));
    record(b, cpu_now() - began);
    b->forms += b->form[b->forms] != NULL;
  }
  print(b, "forced calls compiled");
  find_forms(b, corpus, true);
}

static void open_tokenizer(bench *b) {
  char json[] = "/tmp/bench-masks-XXXXXX";
  mm_err err = {0};
  const int fd = mkstemp(json);
  if (fd < 0 || close(fd) != 0 || !large_tokenizer_write(json, "tests/data/tiny-m2/tokenizer.json")) exit(5);
  b->tokenizer = mm_tokenizer_open(json, LARGE_VOCAB, &err);
  unlink(json);
  b->end = 0; /* the byte of zero, which no text has */
  const double began = cpu_now();
  if (!b->tokenizer || !(b->lexicon = mm_lexicon_open(b->tokenizer, LARGE_VOCAB, &b->end, 1, &err))) die(&err);
  printf("lexicon of %d ids: %.0f ms\n", LARGE_VOCAB, 1e3 * (cpu_now() - began));
}

int main(int argc, char **argv) {
  static bench b = {.seed = UINT64_C(0x2545f4914f6cdd1d)};
  mm_arena a = {0};
  const int tokens = argc > 1 ? atoi(argv[1]) : 200, rounds = argc > 2 ? (int)mm_max(1, strtoul(argv[2], NULL, 10)) : 20;
  open_tokenizer(&b);
  open_forms(&b, &a);
  b.list = calloc(LARGE_VOCAB, sizeof *b.list);
  if (!b.list || !b.schemas || b.forms == b.schemas) return 8;
  for (size_t from = 0, to = b.schemas; from < b.forms; from = to, to = b.forms) {
    for (int k = 0; k < rounds; k++)
      for (size_t i = from; i < to; i++) reply(&b, i, tokens, true);
    printf("%zu forms: ", to - from);
    print(&b, from ? "masks of forced calls" : "masks of long replies");
  }
  for (int k = 0; k < rounds; k++)
    for (size_t i = 0; i < b.forms; i++) {
      const double began = cpu_now();
      mm_constraint_close(open_one(&b, i));
      record(&b, cpu_now() - began);
    }
  print(&b, "constraints opened and closed");
  for (int k = 0; k < rounds; k++)
    for (size_t i = 0; i < b.forms; i++) record(&b, reply(&b, i, SHORT, false));
  print(&b, "whole replies of at most 12 tokens");
  steps(&b, 20 * rounds);
  print(&b, "steps of 64 requests");
  on_device(&b, (uint32_t)tokens);
  for (size_t i = b.schemas; i < b.forms; i++) mm_tools_close(&b.tools[i]);
  mm_lexicon_close(b.lexicon);
  mm_tokenizer_close(b.tokenizer);
  mm_arena_close(&a);
  free(b.list);
  free(b.took);
  return 0;
}
