/* minimax-run: a prompt in, text out, from a packed checkpoint. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/option.h"
#include "formats/pool.h"
#include "runtime/engine.h"
#include "runtime/load_bar.h"
#include "runtime/text/ends.h"
#include "runtime/text/stops.h"
#include "runtime/text/utf8.h"

#define PREFILL_ROWS 512 /* tokens of the prompt per step */
#define PROMPT_MAX   (UINT64_C(1) << 30)

typedef struct run_args {
  const char *dir, *prompt, *prompt_file, *device, *devices, *attach, *act_quant, *kv,
      *input_dtype; /* devices, attach, act_quant: NULL where not given */
  double temperature, top_p, min_p, repetition, presence, frequency;
  uint64_t top_k, seed, max_tokens, max_model_len, threads; /* max_model_len and threads: 0 where not given */
  mm_option_list stop;
  bool added_tokens, ignore_eos, json, quiet, verbose, verify;
} run_args;

/* What ended an answer. */
typedef enum end { END_BUDGET, END_TOKEN, END_STOP } end;

typedef struct run {
  const run_args *a;
  mm_shards shards;
  mm_tokenizer *tokenizer;
  mm_sampling sampling;
  mm_read_log *log;
  mm_load_bar *bar;
  mm_engine *engine;
  int32_t *prompt; /* [prompt_count] */
  size_t prompt_count;
  uint32_t budget; /* tokens to generate at most, ≥ 1 */
  bool act_quant;
  bool *is_end; /* [vocab] */
  bool *never;  /* [vocab] ids that no token has */
  char *text;   /* printable text of the last token */
  size_t text_cap;
  char *answer; /* --json: of all tokens, [answer_cap] */
  size_t answer_count, answer_cap;
  mm_stops stops;
  mm_utf8_stream utf8;
  end end;
  mm_read_stats came; /* of the weights, by the time of the first token */
  double load_s, prefill_s, decode_s;
  uint32_t queued, generated; /* tokens to be chosen, and those collected */
} run;

/* ---- What to stop at ---- */

static bool find_never(run *r, mm_err *err) {
  uint32_t vocab = r->shards.pack.model.vocab;
  if (!(r->never = mm_calloc(vocab, sizeof *r->never, err))) return false;
  mm_ends_never(r->tokenizer, vocab, r->never);
  return true;
}

static bool find_ends(run *r, mm_err *err) { return r->a->ignore_eos || mm_ends_find(&r->shards.pack, r->tokenizer, r->is_end, err); }

/* ---- Opening ---- */

/* All of standard input; free() it. */
static char *read_input(size_t *n, mm_err *err) {
  char *text = NULL;
  size_t cap = 0, got = 1;
  for (*n = 0; got; *n += got) {
    if (*n > PROMPT_MAX) {
      mm_fail(err, MM_LIMIT, "E_LIMITS", mm_at("stdin", NULL), "found more than %llu bytes", (unsigned long long)PROMPT_MAX);
      break;
    }
    if (!MM_GROW(text, &cap, *n + 65536, err)) break;
    got = fread(text + *n, 1, 65536, stdin);
    if (got == 0 && ferror(stdin)) mm_fail_errno(err, mm_at("stdin", NULL), "read", errno);
    if (got == 0 && !ferror(stdin)) return text;
  }
  free(text);
  return NULL;
}

static bool read_prompt(run *r, mm_err *err) {
  const run_args *a = r->a;
  if (!a->prompt == !a->prompt_file)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "expected one of --prompt and --prompt-file (- for standard input)");
  const bool input = strcmp(a->prompt ? a->prompt : a->prompt_file, "-") == 0, given = a->prompt && !input;
  size_t n = given ? strlen(a->prompt) : 0;
  char *file = given ? NULL : input ? read_input(&n, err) : mm_file_slurp(a->prompt_file, PROMPT_MAX, &n, err);
  bool ok =
      (given || file) && mm_tokenizer_encode(r->tokenizer, file ? file : a->prompt, n, a->added_tokens, &r->prompt, &r->prompt_count, err);
  free(file);
  if (ok && r->prompt_count == 0) return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "the prompt is empty");
  return ok;
}

/* How many tokens may follow the prompt. */
static bool set_budget(run *r, mm_err *err) {
  uint64_t most = r->shards.pack.model.max_positions, limit = r->a->max_model_len ? r->a->max_model_len : most;
  if (limit > most)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--max-model-len: found %llu, the model has %llu positions",
                   (unsigned long long)limit, (unsigned long long)most);
  if (r->prompt_count >= limit)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "the prompt has %zu tokens, expected fewer than %llu (--max-model-len)",
                   r->prompt_count, (unsigned long long)limit);
  r->budget = (uint32_t)mm_min(r->a->max_tokens, limit - r->prompt_count);
  return true;
}

static bool open_tokenizer(run *r, mm_err *err) {
  r->tokenizer = mm_tokenizer_of(&r->shards.pack, err);
  return r->tokenizer;
}

static bool open_engine(run *r, mm_err *err) {
  unsigned threads = (unsigned)(r->a->threads ? r->a->threads : mm_max(1, mm_pool_cpus() / r->shards.pack.tp));
  mm_engine_config c = {.ops = mm_ops_find(r->a->device, err),
                        .limits = {.max_tokens = (uint32_t)mm_min(PREFILL_ROWS, r->prompt_count),
                                   .slots = 1,
                                   .max_positions = (uint32_t)r->prompt_count + r->budget},
                        .threads = threads,
                        .never = r->never,
                        .verify = r->a->verify,
                        .attach = r->a->attach,
                        .log = r->log,
                        .kv_fp8 = strcmp(r->a->kv, "fp8") == 0,
                        .kv_bf16 = strcmp(r->a->kv, "bf16") == 0,
                        .input_bf16 = strcmp(r->a->input_dtype, "bf16") == 0};
  if (!c.ops) return false;
  c.act_quant = r->act_quant = r->a->act_quant ? strcmp(r->a->act_quant, "on") == 0 : c.ops->act_quant;
  uint32_t *device;
  if (!mm_devices_read(r->a->devices, mm_pack_ranks(&r->shards.pack), &device, err)) return false;
  c.device = device;
  if (!r->a->quiet) r->bar = mm_load_bar_open(r->log);
  r->engine = mm_engine_open(&r->shards, &c, err);
  free(device);
  return r->engine;
}

/* Everything small is checked before the weights are bound. */
static bool run_open(run *r, mm_err *err) {
  r->sampling = (mm_sampling){.temperature = r->a->temperature,
                              .top_p = r->a->top_p,
                              .top_k = (uint32_t)r->a->top_k,
                              .seed = r->a->seed,
                              .min_p = r->a->min_p,
                              .repetition = r->a->repetition,
                              .presence = r->a->presence,
                              .frequency = r->a->frequency};
  double start = mm_now();
  bool empty = false;
  for (size_t i = 0; i < r->a->stop.count; i++) empty |= !*r->a->stop.item[i];
  if (empty) {
    mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--stop: found an empty text");
    return false;
  }
  if (!mm_sampling_check(&r->sampling, 0, err) || !(r->log = mm_read_log_open(err))) return false;
  if (!mm_shards_open(&r->shards, r->a->dir, err)) return false;
  if (!(r->is_end = mm_calloc(r->shards.pack.model.vocab, sizeof *r->is_end, err))) return false;
  if (!open_tokenizer(r, err) || !read_prompt(r, err) || !set_budget(r, err)) return false;
  r->sampling.prompt = (uint32_t)r->prompt_count;
  if (!find_ends(r, err) || !find_never(r, err) || !open_engine(r, err)) return false;
  r->load_s = mm_now() - start;
  return true;
}

static void run_close(run *r) {
  mm_load_bar_close(r->bar);
  mm_engine_close(r->engine);
  mm_read_log_close(r->log);
  mm_tokenizer_close(r->tokenizer);
  mm_shards_close(&r->shards);
  mm_stops_close(&r->stops);
  free(r->prompt);
  free(r->is_end);
  free(r->never);
  free(r->text);
  free(r->answer);
}

/* ---- Generating ---- */

/* One step; the last of the prompt and every later one choose a token. */
static bool step(run *r, const int32_t *id, uint32_t count, uint32_t pos, bool choose, mm_err *err) {
  const mm_span span = {0, 0, count, pos};
  const uint32_t out = count - 1;
  const mm_batch batch = {
      .tokens = count, .id = id, .span_count = 1, .span = &span, .out_count = choose, .out = &out, .sampling = &r->sampling};
  r->queued += choose;
  return choose ? mm_engine_queue(r->engine, &batch, err) : mm_engine_step(r->engine, &batch, NULL, err);
}

static bool collect(run *r, int32_t *id, mm_err *err) {
  if (!mm_engine_collect(r->engine, id, err)) return false;
  if (*id >= 0) return true;
  return mm_fail(err, MM_INTEGRITY, "E_LOGITS", mm_at(r->a->dir, NULL), "no logit after %zu tokens is a number",
                 r->prompt_count + r->generated);
}

/* *first: the token after the prompt. */
static bool prefill(run *r, int32_t *first, mm_err *err) {
  double start = mm_now();
  uint32_t count = (uint32_t)r->prompt_count;
  for (uint32_t at = 0, rows; at < count; at += rows) {
    rows = (uint32_t)mm_min(PREFILL_ROWS, count - at);
    if (!step(r, r->prompt + at, rows, at, at + rows == count, err)) return false;
  }
  const bool collected = collect(r, first, err);
  mm_load_bar_close(r->bar);
  r->bar = NULL;
  if (!collected) return false;
  r->prefill_s = mm_now() - start;
  r->came = mm_read_log_stats(r->log);
  return true;
}

static const char *end_word(const run *r) {
  switch (r->end) {
    case END_TOKEN: return "end_token";
    case END_STOP: return "stop";
    default: return r->budget == r->a->max_tokens ? "max_tokens" : "max_model_len";
  }
}

/* The answer and what it took as one object. */
static bool print_json(const run *r, mm_err *err) {
  mm_json *o = mm_json_new_obj();
  bool ok = mm_json_set(o, "text", mm_json_new_str(r->answer));
  ok = mm_json_set(o, "end", mm_json_new_str(end_word(r))) && ok;
  ok = mm_json_set(o, "prompt_tokens", mm_json_new_int((int64_t)r->prompt_count)) && ok;
  ok = mm_json_set(o, "tokens", mm_json_new_int(r->generated)) && ok;
  ok = mm_json_set(o, "load_s", mm_json_new_real(r->load_s)) && ok;
  ok = mm_json_set(o, "prefill_s", mm_json_new_real(r->prefill_s)) && ok;
  ok = mm_json_set(o, "decode_s", mm_json_new_real(r->decode_s)) && ok;
  return mm_program_json(o, ok, err);
}

/* Of what the bytes make printable, the object's share. */
static bool keep_bytes(run *r, size_t n, mm_err *err) {
  if (!MM_GROW(r->answer, &r->answer_cap, r->answer_count + n + 1, err)) return false;
  memcpy(r->answer + r->answer_count, r->text, n);
  r->answer[r->answer_count += n] = 0;
  return true;
}

/* Writes what the bytes make printable; n = 0 ends the text. */
static bool put_bytes(run *r, const char *bytes, size_t n, mm_err *err) {
  if (!MM_GROW(r->text, &r->text_cap, 3 * n + 4, err)) return false;
  size_t len = mm_utf8_push(&r->utf8, bytes, n, r->text);
  if (r->a->json) return keep_bytes(r, len, err);
  if (n == 0) r->text[len++] = '\n';
  if (fwrite(r->text, 1, len, stdout) == len && fflush(stdout) == 0) return true;
  return mm_fail_errno(err, mm_at("stdout", NULL), "write", errno);
}

/* The bytes of a token, up to a stop text. */
static bool put_token(run *r, const char *bytes, size_t n, mm_err *err) {
  bool stopped;
  size_t ready;
  if (!mm_stops_push(&r->stops, bytes, n, &ready, &stopped, err)) return false;
  if (ready && !put_bytes(r, r->stops.held, ready, err)) return false;
  mm_stops_take(&r->stops, stopped ? r->stops.held_count : ready);
  if (stopped) r->end = END_STOP;
  return true;
}

/* What was held back, and the end of the text. */
static bool put_end(run *r, mm_err *err) {
  const size_t held = r->stops.held_count;
  if (held && !put_bytes(r, r->stops.held, held, err)) return false;
  mm_stops_take(&r->stops, held);
  return put_bytes(r, "", 0, err);
}

/* From the token after the prompt on. Where the engine queues, it always has a step to do while a token is on its way to stdout. */
static bool generate(run *r, int32_t id, mm_err *err) {
  static const int32_t chosen = MM_ID_CHOSEN;
  const uint32_t ahead = mm_engine_queues(r->engine) ? 2 : 0;
  double start = mm_now();
  for (r->generated = 1;; r->generated++) {
    while (ahead && r->queued < mm_min(r->budget, r->generated + ahead))
      if (!step(r, &chosen, 1, (uint32_t)r->prompt_count + r->queued - 1, true, err)) return false;
    if (r->is_end[id]) r->end = END_TOKEN;
    if (r->end == END_TOKEN) break;
    size_t n;
    const char *bytes = mm_tokenizer_bytes(r->tokenizer, id, &n);
    if (!mm_tokenizer_is_special(r->tokenizer, id) && !put_token(r, bytes, n, err)) return false;
    if (r->end == END_STOP || r->generated == r->budget) break;
    if (!ahead && !step(r, &chosen, 1, (uint32_t)r->prompt_count + r->queued - 1, true, err)) return false;
    if (!collect(r, &id, err)) return false;
  }
  r->decode_s = mm_now() - start;
  return put_end(r, err);
}

/* How it was loaded: by a device that reads for itself, or mapped. */
static const char *load_text(const run *r, char *out, size_t cap) {
  char read[160];
  const mm_read_stats s = mm_read_log_stats(r->log);
  if (mm_read_bytes(&s))
    snprintf(out, cap, "%s", mm_read_text(read, sizeof read, &s));
  else
    snprintf(out, cap, "in %.2f s%s", r->load_s, r->a->verify ? ", digests checked" : "");
  return out;
}

static void tell(const run *r) {
  char text[200];
  fprintf(stderr, "prompt %zu tokens at %.1f/s, %u new tokens at %.1f/s up to %s, loaded %s, on %s, --act-quant %s\n", r->prompt_count,
          (double)r->prompt_count / r->prefill_s, r->generated, (double)(r->generated - 1) / r->decode_s,
          r->end == END_TOKEN             ? "an end token"
          : r->end == END_STOP            ? "a stop text"
          : r->budget == r->a->max_tokens ? "--max-tokens"
                                          : "--max-model-len",
          load_text(r, text, sizeof text), r->a->device, r->act_quant ? "on" : "off");
  const char *path;
  mm_read_stats s;
  for (size_t i = 0; r->a->verbose && mm_read_log_file(r->log, i, &path, &s); i++)
    fprintf(stderr, "%s: %s\n", path, mm_read_text(text, sizeof text, &s));
  if (!r->a->verbose) return;
  fprintf(stderr, "opened in %.2f s, first token %.2f s later", r->load_s, r->prefill_s);
  const uint64_t came = mm_read_bytes(&r->came);
  if (came)
    fprintf(stderr, ", with %.1f of %.1f GB read (%.0f %%)", (double)came * 1e-9, (double)r->came.wanted * 1e-9,
            100 * (double)came / (double)r->came.wanted);
  char times[600];
  if (*mm_read_log_times(r->log, times, sizeof times)) fprintf(stderr, "\nseconds: %s", times);
  fprintf(stderr, "\n");
}

static bool run_all(void *args, mm_err *err) {
  const run_args *a = args;
  run r = {.a = a, .stops = {.stop = a->stop.item, .count = a->stop.count}};
  int32_t first;
  bool ok = run_open(&r, err) && prefill(&r, &first, err) && generate(&r, first, err);
  if (a->json) ok = ok && print_json(&r, err);
  if (ok && !a->quiet) tell(&r);
  run_close(&r);
  return ok;
}

int main(int argc, char **argv) {
  run_args a = {.device = "cpu", .kv = "auto", .input_dtype = "auto", .top_p = 1, .max_tokens = 256};
  const mm_option options[] = {
      MM_OPTION(STR, "prompt", &a.prompt, "TEXT", "text to continue, - for that of standard input", .letter = 'p'),
      MM_OPTION(STR, "prompt-file", &a.prompt_file, "FILE", "the same from a file, its last newline included"),
      MM_FLAG("added-tokens", &a.added_tokens, "read control tokens such as <end_of_sentence> in the prompt as tokens (default: as text)"),
      MM_OPTION(U64, "max-tokens", &a.max_tokens, "N", "tokens to generate at most (256)", .letter = 'n', .lo = 1, .hi = INT32_MAX),
      MM_OPTION(U64, "max-model-len", &a.max_model_len, "N", "tokens of prompt and answer at most (as many as the model has positions)",
                .lo = 2, .hi = INT32_MAX),
      MM_FLAG("ignore-eos", &a.ignore_eos, "do not stop at end tokens"),
      MM_OPTION(LIST, "stop", &a.stop, "TEXT", "end before this text; may be repeated"),
      MM_OPTION(REAL, "temperature", &a.temperature, "X", "0: always the likeliest token (0)"),
      MM_OPTION(U64, "top-k", &a.top_k, "N", "draw from the N likeliest tokens, 0 for all (0)", .hi = INT32_MAX),
      MM_OPTION(REAL, "top-p", &a.top_p, "X", "draw from the likeliest tokens that together reach probability X (1)"),
      MM_OPTION(REAL, "min-p", &a.min_p, "X", "draw no token less likely than X times the likeliest (0)"),
      MM_OPTION(REAL, "repetition-penalty", &a.repetition, "X",
                "divide logits above 0 of tokens that prompt or answer hold by X, multiply others (1)"),
      MM_OPTION(REAL, "presence-penalty", &a.presence, "X", "subtract X from logits of tokens that the answer holds (0)"),
      MM_OPTION(REAL, "frequency-penalty", &a.frequency, "X", "the same for each time that it holds them (0)"),
      MM_OPTION(U64, "seed", &a.seed, "N", "of the draws (0)"),
      MM_OPTION(STR, "device", &a.device, "NAME", "where to compute, cpu unless given", .choices = MM_DEVICES),
      MM_OPTION(STR, "devices", &a.devices, "LIST", "numbers of the GPUs, one for each rank (0,1,2,...)"),
      MM_OPTION(STR, "attach", &a.attach, "SOCKET", "use the weights that minimax-hold keeps on the GPUs"),
      MM_OPTION(STR, "act-quant", &a.act_quant, "WORD",
                "round the inputs of linears as their scheme defines, or not: weights alone are quantised then (on where the device can, "
                "else off)",
                .choices = "on|off"),
      MM_OPTION(STR, "input-dtype", &a.input_dtype, "TYPE",
                "of inputs of linears that --act-quant leaves as they are (auto: the device's own, f32 on cpu and bf16 on cuda)",
                .choices = "auto|bf16"),
      MM_OPTION(STR, "kv-cache-dtype", &a.kv, "TYPE",
                "of cached keys and values, fp8 on cuda: e4m3 (auto: the device's own, f32 on cpu and bf16 on cuda)",
                .choices = "auto|bf16|fp8"),
      MM_OPTION(U64, "threads", &a.threads, "N", "CPU threads per rank (CPUs / ranks)", .letter = 't', .lo = 1, .hi = 1024),
      MM_FLAG("verify-on-load", &a.verify, "check the digests of all weights while they are loaded"),
      MM_FLAG("verbose", &a.verbose, "say how each file was read, and what took how long", .letter = 'v'),
      MM_FLAG("json", &a.json, "the answer and what it took as one JSON object at the end; errors as JSON"),
      MM_FLAG("quiet", &a.quiet, "no bar and no summary on stderr", .letter = 'q'),
  };
  const mm_program program = {
      .name = "minimax-run",
      .summary = "continue a text with a packed checkpoint",
      MM_OPERANDS("DIR -p TEXT", 1, 1),
      MM_OPTIONS(options),
      .examples =
          "minimax-run M2-nvfp4 -p \"The capital of France is\" -n 32\n"
          "minimax-run M2-nvfp4 --prompt-file prompt.txt --temperature 0.8 --top-p 0.95 --seed 7",
      .files =
          "DIR/tokenizer.json, DIR/tokenizer.bin  the tokenizer, and its tables laid out for fast starts\n"
          "DIR/generation_config.json, DIR/config.json  eos_token_id: where an answer ends",
      .epilog =
          "The prompt is used as it is, without a chat template. Text goes to stdout as it is generated.\n"
          "Exit status: 0 done, 2 usage, 3 bad tokenizer or config, 4 unsupported, 5 I/O, 6 damaged checkpoint, 8 memory or limit.",
  };
  const int status = mm_program_main(&program, argc, argv, &a.dir, run_all, &a);
  free(a.stop.item);
  return status;
}
