/* minimax-run: a prompt in, text out, from a packed checkpoint. */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/model/rule.h"
#include "runtime/chat/talk.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/engine_options.h"
#include "runtime/engine/load_bar.h"
#include "runtime/text/ends.h"
#include "runtime/text/stops.h"
#include "runtime/text/utf8.h"

#define PREFILL_ROWS  512 /* tokens of the prompt per step */
#define PROMPT_MAX    (UINT64_C(1) << 30)
#define ANSWER_TOKENS 256   /* unless --max-tokens says otherwise */
#define CHAT_TOKENS   32768 /* of a conversation, unless --max-model-len says otherwise: devices take its memory at once */

typedef struct run_args {
  const char *dir, *prompt, *prompt_file, *dp, *device, *devices, *attach, *act_quant, *kv, *index, *input_dtype, *system,
      *chat_format;  /* dp, devices, attach, act_quant, system, chat_format: NULL where not given */
  mm_sampling given; /* its real numbers: NAN where not given */
  uint64_t top_k, seed, max_tokens, max_model_len, threads, index_split; /* top_k: UINT64_MAX where not given, the others 0 */
  mm_option_list stop;
  double share; /* NAN where not given */
  mm_dummy dummy;
  bool added_tokens, ignore_eos, json, quiet, verbose, verify, chat, pin;
} run_args;

/* Reason why an answer ended. */
typedef enum end { END_BUDGET, END_TOKEN, END_STOP, END_INTERRUPT } end;

/* Ctrl-C while a reply is made: the reply ends. */
static volatile sig_atomic_t interrupted;
static void on_interrupt(int number) {
  (void)number;
  interrupted = 1;
}

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
  uint64_t limit;  /* tokens of prompt and answer at most */
  uint32_t budget; /* tokens to generate at most, ≥ 1 */
  bool by_tokens;  /* --max-tokens, or what stands for it, says so; else --max-model-len */
  uint32_t reused; /* of the prompt, which the engine holds already */
  bool act_quant;
  bool *is_end; /* [vocab] */
  bool *never;  /* [vocab] ids that no token has */
  char *text;   /* printable text of the last token */
  size_t text_cap;
  char *answer; /* --json: of all tokens, [answer_cap] */
  size_t answer_count, answer_cap;
  mm_talk *talk; /* --chat */
  bool terminal; /* --chat with somebody at a terminal */
  int32_t *fed;  /* [fed_count] what the engine holds, and [fed_known] what was chosen: the last choices of a reply were not fed */
  size_t fed_count, fed_known, fed_cap;
  mm_stops stops;
  bool stopped; /* by one of --stop */
  mm_utf8_stream utf8;
  end end;
  mm_read_stats came; /* of the weights, by the time of the first token */
  double load_s, prefill_s, decode_s;
  uint32_t queued, generated; /* tokens to be chosen, and those collected */
} run;

/* ---- What to stop at ---- */

static bool find_ends(run *r, mm_err *err) {
  const uint32_t vocab = r->shards.pack.model.vocab;
  if (!(r->is_end = mm_calloc(vocab, sizeof *r->is_end, err)) || !(r->never = mm_calloc(vocab, sizeof *r->never, err))) return false;
  mm_ends_never(r->tokenizer, vocab, r->never);
  return r->a->ignore_eos || mm_ends_find(&r->shards.pack, r->tokenizer, r->is_end, err);
}

/* ---- Opening ---- */

/* All of standard input; free() it. */
static char *read_input(size_t *n, mm_err *err) {
  char *text = NULL;
  size_t cap = 0, got = 1;
  for (*n = 0; got; *n += got) {
    if (*n > PROMPT_MAX) {
      mm_fail(err, MM_LIMIT, "E_LIMIT", mm_at("stdin", NULL), "found more bytes, expected at most %llu", (unsigned long long)PROMPT_MAX);
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
  if (a->chat && !a->prompt && !a->prompt_file) return true;
  if (!a->prompt == !a->prompt_file)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "expected one of --prompt and --prompt-file (- for standard input)");
  const bool input = strcmp(a->prompt ? a->prompt : a->prompt_file, "-") == 0, given = a->prompt && !input;
  size_t n = given ? strlen(a->prompt) : 0;
  char *file = given ? NULL : input ? read_input(&n, err) : mm_file_slurp(a->prompt_file, PROMPT_MAX, &n, err);
  const char *text = file ? file : a->prompt;
  bool ok = given || file;
  if (ok && a->chat)
    ok = mm_talk_say(r->talk, text, n, err);
  else
    ok = ok && mm_tokenizer_encode(r->tokenizer, text, n, a->added_tokens, &r->prompt, &r->prompt_count, err);
  free(file);
  size_t place = 0;
  const char *media = ok && !a->chat ? mm_prompt_media(r->tokenizer, r->prompt, r->prompt_count, &place) : NULL;
  if (media)
    return mm_fail(err, MM_UNSUPPORTED, "E_CHAT", mm_at(NULL, NULL),
                   "token %zu of the prompt is %s: images and video are not served, text is", place, media);
  if (ok && !a->chat && r->prompt_count == 0) return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "the prompt is empty");
  return ok;
}

/* Tokens of prompt and answer at most. */
static bool set_limit(run *r, mm_err *err) {
  const uint64_t most = r->shards.pack.model.max_positions, given = r->a->max_model_len;
  if (given > most)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--max-model-len: found %llu, the model has %llu positions",
                   (unsigned long long)given, (unsigned long long)most);
  r->limit = given ? given : r->a->chat ? mm_min(most, CHAT_TOKENS) : most;
  return true;
}

/* How many tokens may follow the prompt. */
static bool set_budget(run *r, mm_err *err) {
  if (r->prompt_count >= r->limit)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "the prompt has %zu tokens, expected fewer than %llu (--max-model-len)",
                   r->prompt_count, (unsigned long long)r->limit);
  const uint64_t most = r->a->max_tokens ? r->a->max_tokens : r->a->chat ? r->limit : ANSWER_TOKENS, capacity = r->limit - r->prompt_count;
  r->budget = (uint32_t)mm_min(most, capacity);
  r->by_tokens = most <= capacity && (r->a->max_tokens || !r->a->chat);
  return true;
}

static bool open_engine(run *r, mm_err *err) {
  mm_engine_config c = {.ops = mm_ops_find(r->a->device, err),
                        .limits = {.max_tokens = r->a->chat ? PREFILL_ROWS : (uint32_t)mm_min(PREFILL_ROWS, r->prompt_count),
                                   .slots = 1,
                                   .max_positions = r->a->chat ? (uint32_t)r->limit : (uint32_t)r->prompt_count + r->budget},
                        .never = r->never,
                        .verify = r->a->verify,
                        .attach = r->a->attach,
                        .log = r->log,
                        .options = {.input_bf16 = strcmp(r->a->input_dtype, "bf16") == 0, .pin = r->a->pin},
                        .memory = {.fits = true,
                                   .share = r->a->share,
                                   .outs = 1,
                                   .length = r->a->chat ? "--max-model-len" : "a shorter prompt or --max-tokens, together"}};
  if (!c.ops) return false;
  mm_cache_options(r->a->kv, r->a->index, r->a->index_split, &c.options);
  c.options.act_quant = r->act_quant = r->a->act_quant ? strcmp(r->a->act_quant, "on") == 0 : c.ops->act_quant;
  uint32_t *device;
  if (!mm_process_group_find(true, &c.process_group, err)) return false;
  const uint32_t here = mm_process_group_ranks(c.process_group, mm_pack_ranks(&r->shards.pack));
  c.options.threads = mm_engine_threads(r->a->threads, here);
  if (!mm_devices_read(r->a->device, r->a->devices, here, &device, err)) return false;
  c.device = device;
  if (!r->a->quiet) r->bar = mm_load_bar_open(r->log);
  r->engine = mm_engine_open(&r->shards, &c, err);
  free(device);
  return r->engine;
}

static void set_if(double *to, double given) {
  if (!isnan(given)) *to = given;
}

/* In a conversation, settings that are not given come from the checkpoint. */
static bool set_sampling(run *r, mm_err *err) {
  const run_args *a = r->a;
  r->sampling = (mm_sampling){.temperature = a->chat, .top_p = 1, .seed = a->seed};
  if (a->chat && !mm_ends_defaults(&r->shards.pack, &r->sampling, err)) return false;
  set_if(&r->sampling.temperature, a->given.temperature);
  set_if(&r->sampling.top_p, a->given.top_p);
  set_if(&r->sampling.min_p, a->given.min_p);
  set_if(&r->sampling.repetition, a->given.repetition);
  set_if(&r->sampling.presence, a->given.presence);
  set_if(&r->sampling.frequency, a->given.frequency);
  if (a->top_k != UINT64_MAX) r->sampling.top_k = (uint32_t)a->top_k;
  return mm_sampling_check(&r->sampling, 0, err);
}

static bool open_talk(run *r, mm_err *err) {
  const run_args *a = r->a;
  if (!a->chat && (a->system || a->chat_format))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--system and --chat-format are of --chat");
  if (!a->chat) return true;
  if (a->added_tokens) return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--added-tokens: not of --chat");
  r->terminal = !a->prompt && !a->prompt_file && !a->json && isatty(STDIN_FILENO) && isatty(STDERR_FILENO);
  const mm_talk_config c = {.pack = &r->shards.pack,
                            .tokenizer = r->tokenizer,
                            .format = a->chat_format,
                            .system = a->system,
                            .stop = a->stop.item,
                            .stops = a->stop.count,
                            .commands = r->terminal,
                            .silent = a->json,
                            .thoughts = !a->quiet};
  if (!(r->talk = mm_talk_open(&c, err))) return false;
  if (!a->chat_format && !a->quiet && mm_chat_format_of_family(&r->shards.pack, err))
    fprintf(stderr, "note: the checkpoint has no chat template; --chat-format %s is its family's\n", mm_talk_format(r->talk)->name);
  return err->status == MM_OK;
}

/* A stop text that begins within a character would cut one of the answer. */
static bool check_stop(const char *text, mm_err *err) {
  size_t left = strlen(text), n;
  if (!left) return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--stop: found an empty text");
  for (; left; text += n, left -= n)
    if (!(n = mm_utf8_len(text, left)))
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--stop: found a text that is not UTF-8");
  return true;
}

/* Weights and texts, of one directory also while minimax-convert --force replaces it. */
static bool read_dir(run *r, mm_err *err) {
  const mm_groups_request groups = {.word = r->a->dp, .device = r->a->device, .sequences = 1};
  char line[MM_GROUPS_LINE];
  mm_dir d = mm_dir_open(r->a->dir);
  const bool ok = mm_groups_open(&r->shards, r->a->dir, &r->a->dummy, &groups, line, err) && set_sampling(r, err) &&
                  (!*line || r->a->quiet || fprintf(stderr, "%s\n", line) > 0) && (r->tokenizer = mm_tokenizer_of(&r->shards.pack, err)) &&
                  open_talk(r, err) && find_ends(r, err);
  return mm_dir_close(&d, r->a->dir, ok, err);
}

/* Everything small is checked before the weights are bound. */
static bool run_open(run *r, mm_err *err) {
  double start = mm_now();
  for (size_t i = 0; i < r->a->stop.count; i++)
    if (!check_stop(r->a->stop.item[i], err)) return false;
  if (!mm_utilization_check(r->a->share, err) || !(r->log = mm_read_log_open(err)) || !read_dir(r, err) || !read_prompt(r, err) ||
      !set_limit(r, err) || (!r->a->chat && !set_budget(r, err)) || !open_engine(r, err))
    return false;
  mm_program_opened();
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
  mm_talk_close(r->talk);
  MM_FREE(r->prompt, r->fed, r->is_end, r->never, r->text, r->answer);
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
  if (!mm_engine_collect(r->engine, id, err) || !MM_GROW(r->fed, &r->fed_cap, r->fed_known + 1, err)) return false;
  r->fed[r->fed_known++] = *id;
  if (*id >= 0) return true;
  return mm_fail(err, MM_INTEGRITY, "E_LOGITS", mm_at(r->a->dir, NULL), "no logit after %zu tokens is a number",
                 r->prompt_count + r->generated);
}

/* Reuses as much of the prompt as the engine holds. Models with lightning layers go on where they stand, or start again. */
static void reuse(run *r) {
  uint32_t n = 0;
  while (n < r->fed_count && n + 1 < r->prompt_count && r->fed[n] == r->prompt[n]) n++;
  r->reused = mm_engine_state_bytes(r->engine) && n < r->fed_count ? 0 : n;
}

/* *first: the token after the prompt. */
static bool prefill(run *r, int32_t *first, mm_err *err) {
  double start = mm_now();
  uint32_t count = (uint32_t)r->prompt_count;
  reuse(r);
  r->queued = r->generated = 0;
  r->end = END_BUDGET;
  r->stopped = false;
  r->sampling.prompt = count;
  if (!MM_GROW(r->fed, &r->fed_cap, r->prompt_count, err)) return false;
  memcpy(r->fed, r->prompt, r->prompt_count * sizeof *r->fed);
  r->fed_known = r->prompt_count;
  for (uint32_t at = r->reused, rows; at < count; at += rows) {
    rows = (uint32_t)mm_min(PREFILL_ROWS, count - at);
    if (interrupted) {
      r->fed_count = r->fed_known = at;
      r->end = END_INTERRUPT;
      return true;
    }
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
    case END_INTERRUPT: return "interrupted";
    default: return r->by_tokens ? "max_tokens" : "max_model_len";
  }
}

/* The answer and what it took as one object. */
static bool print_json(const run *r, mm_err *err) {
  const mm_str text = r->talk ? mm_talk_content(r->talk) : (mm_str){r->answer, r->answer_count};
  const mm_str reasoning = r->talk ? mm_talk_reasoning(r->talk) : (mm_str){0};
  mm_json *o = MM_JSON_NEW({"text", mm_json_new_bytes(text.p, text.n)});
  if (r->talk) mm_json_set(o, "reasoning", mm_json_new_bytes(reasoning.p, reasoning.n));
  MM_JSON_PUT(o, {"end", mm_json_new_str(end_word(r))}, {"prompt_tokens", mm_json_new_u64(r->prompt_count)},
              {"tokens", mm_json_new_int(r->generated)}, {"load_s", mm_json_new_real(r->load_s)},
              {"prefill_s", mm_json_new_real(r->prefill_s)}, {"decode_s", mm_json_new_real(r->decode_s)});
  return mm_program_json(o, true, err);
}

/* Adds the bytes to the JSON object's text. */
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
static bool put_token(run *r, int32_t id, mm_err *err) {
  size_t ready, n;
  const char *bytes = mm_tokenizer_bytes(r->tokenizer, id, &n);
  if (r->talk) return mm_talk_token(r->talk, id, &r->stopped, err);
  if (mm_tokenizer_is_special(r->tokenizer, id)) return true;
  if (!mm_stops_push(&r->stops, bytes, n, &ready, &r->stopped, err)) return false;
  if (ready && !put_bytes(r, r->stops.held, ready, err)) return false;
  mm_stops_take(&r->stops, r->stopped ? r->stops.held_count : ready);
  return true;
}

/* Prints held-back text, and the end of the text. */
static bool put_end(run *r, mm_err *err) {
  if (r->talk) return mm_talk_end(r->talk, r->end == END_TOKEN, &r->stopped, err);
  const size_t held = r->stops.held_count;
  if (held && !put_bytes(r, r->stops.held, held, err)) return false;
  mm_stops_take(&r->stops, held);
  return put_bytes(r, "", 0, err);
}

/* From the token after the prompt on. Where the engine queues, it always has a step to do while a token is on its way to stdout. */
static bool generate(run *r, int32_t id, mm_err *err) {
  static const int32_t chosen = MM_ID_SAMPLED;
  const uint32_t ahead = mm_engine_queues(r->engine) ? 2 : 0;
  double start = mm_now();
  for (r->generated = 1;; r->generated++) {
    while (ahead && r->queued < mm_min(r->budget, r->generated + ahead))
      if (!step(r, &chosen, 1, (uint32_t)r->prompt_count + r->queued - 1, true, err)) return false;
    if (r->is_end[id]) r->end = END_TOKEN;
    if (r->end == END_TOKEN) break;
    if (!put_token(r, id, err)) return false;
    if (r->stopped) r->end = END_STOP;
    if (interrupted && r->end == END_BUDGET) r->end = END_INTERRUPT;
    if (r->end != END_BUDGET || r->generated == r->budget) break;
    if (!ahead && !step(r, &chosen, 1, (uint32_t)r->prompt_count + r->queued - 1, true, err)) return false;
    if (!collect(r, &id, err)) return false;
  }
  r->decode_s = mm_now() - start;
  r->fed_count = r->prompt_count + r->queued - 1;
  while (r->fed_known < r->prompt_count + r->queued) /* of steps that went ahead */
    if (!mm_engine_collect(r->engine, &id, err) || !MM_GROW(r->fed, &r->fed_cap, r->fed_known + 1, err))
      return false;
    else
      r->fed[r->fed_known++] = id;
  const bool ok = put_end(r, err);
  if (r->stopped) r->end = END_STOP;
  return ok;
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

static const char *until(const run *r) {
  return r->end == END_TOKEN       ? "an end token"
         : r->end == END_STOP      ? "a stop text"
         : r->end == END_INTERRUPT ? "Ctrl-C"
         : r->by_tokens            ? "--max-tokens"
                                   : "--max-model-len";
}

static void print_rates(const run *r) {
  char text[200];
  mm_err none = {0};
  const mm_ops *ops = mm_ops_find(r->a->device, &none);
  const char *kernels = ops && ops->kernels ? ops->kernels() : "";
  fprintf(stderr, "prompt %zu tokens at %.1f/s, %u new tokens at %.1f/s up to %s, loaded %s, on %s%s%s, --act-quant %s\n", r->prompt_count,
          (double)(r->prompt_count - r->reused) / r->prefill_s, r->generated, (double)(r->generated - 1) / r->decode_s, until(r),
          load_text(r, text, sizeof text), r->a->device, *kernels ? ", " : "", kernels, r->act_quant ? "on" : "off");
  const char *path;
  mm_read_stats s;
  for (size_t i = 0; r->a->verbose && mm_read_log_file(r->log, i, &path, &s); i++)
    mm_show_to(stderr, path), fprintf(stderr, ": %s\n", mm_read_text(text, sizeof text, &s));
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

static bool answer(run *r, mm_err *err) {
  int32_t first;
  if (!prefill(r, &first, err)) return false;
  if (r->end == END_INTERRUPT) {
    if (!mm_talk_end(r->talk, false, &r->stopped, err)) return false;
    mm_talk_forget(r->talk);
    fputs("interrupted; the message is not part of the conversation\n", stderr);
    return true;
  }
  if (!generate(r, first, err) || (r->a->json && !print_json(r, err))) return false;
  if (r->talk ? r->a->verbose : !r->a->quiet) print_rates(r);
  if (r->terminal && !r->a->verbose && !r->a->quiet && r->generated > 1)
    fprintf(stderr, "[%u tokens at %.1f/s up to %s]\n", r->generated, (double)(r->generated - 1) / r->decode_s, until(r));
  return true;
}

/* A message that cannot be answered, as one that is too long: at a terminal the conversation goes on without it. */
static bool refuse_message(run *r, mm_err *err) {
  if (!r->terminal || err->status == MM_LIMIT) return false;
  fprintf(stderr, "%s; the message is not part of the conversation, which /save keeps and /clear begins anew\n", err->text);
  mm_talk_forget(r->talk);
  *err = (mm_err){0};
  return true;
}

/* One reply of a conversation. At a terminal Ctrl-C ends the reply, a second one the program, as at the prompt. */
static bool reply(run *r, mm_err *err) {
  struct sigaction before;
  const struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND};
  free(r->prompt);
  r->prompt = NULL;
  if (!mm_talk_prompt(r->talk, &r->prompt, &r->prompt_count, err) || !set_budget(r, err)) return refuse_message(r, err);
  interrupted = 0;
  if (r->terminal) sigaction(SIGINT, &action, &before);
  const bool ok = answer(r, err);
  if (r->terminal) sigaction(SIGINT, &before, NULL);
  return ok;
}

/* Replies to the message that was given, or to those of stdin. */
static bool converse(run *r, mm_err *err) {
  const bool given = r->a->prompt || r->a->prompt_file;
  bool more = given;
  if (r->terminal && !r->a->quiet) {
    mm_show_to(stderr, r->a->dir);
    fprintf(stderr, " in chat format %s, up to %llu tokens. /help lists commands, Ctrl-C ends a reply, Ctrl-D the program.\n",
            mm_talk_format(r->talk)->name, (unsigned long long)r->limit);
  }
  if (!given && !mm_talk_listen(r->talk, &more, err)) return false;
  while (more) {
    if (!reply(r, err)) return false;
    if (given) break;
    if (!mm_talk_listen(r->talk, &more, err)) return false;
  }
  return true;
}

static bool run_all(void *args, mm_err *err) {
  const run_args *a = args;
  run r = {.a = a, .stops = {.stop = a->stop.item, .count = a->stop.count}};
  const bool ok = run_open(&r, err) && (a->chat ? converse(&r, err) : answer(&r, err));
  run_close(&r);
  return ok;
}

/* The options, before the command line is read with their defaults. */
static run_args settings = {.device = "cpu",
                            .dummy = MM_DUMMY_NONE(mm_arch_read),
                            .kv = "auto",
                            .index = "auto",
                            .input_dtype = "auto",
                            .given = {.temperature = NAN, .top_p = NAN, .min_p = NAN, .repetition = NAN, .presence = NAN, .frequency = NAN},
                            .share = NAN,
                            .top_k = UINT64_MAX};

static const mm_option options[] = {
    MM_OPTION(STR, "prompt", &settings.prompt, "TEXT", "text to continue, - for that of standard input", .letter = 'p'),
    MM_OPTION(STR, "prompt-file", &settings.prompt_file, "FILE", "the same from a file, its last newline included"),
    MM_FLAG("added-tokens", &settings.added_tokens,
            "read control tokens such as <end_of_sentence> in the prompt as tokens (default: as text)"),
    MM_FLAG(
        "chat", &settings.chat,
        "a conversation: -p is the user's message; without it each line of standard input is one, or several that end with a backslash; "
        "/help at a terminal"),
    MM_OPTION(STR, "system", &settings.system, "TEXT", "of --chat: the system message (the format's own)"),
    MM_OPTION(STR, "chat-format", &settings.chat_format, "NAME",
              "of --chat: how it is rendered (as the checkpoint's template does, or its family)", .choices = MM_CHAT_FORMATS),
    MM_OPTION(U64, "max-tokens", &settings.max_tokens, "N", "tokens to generate at most (256; of --chat as many as there is room for)",
              .letter = 'n', .lo = 1, .hi = INT32_MAX),
    MM_OPTION(U64, "max-model-len", &settings.max_model_len, "N",
              "tokens of prompt and answer at most (as many as the model has positions; of --chat 32768 of them)", .lo = 2,
              .hi = INT32_MAX),
    MM_FLAG("ignore-eos", &settings.ignore_eos, "do not stop at end tokens"),
    MM_OPTION(LIST, "stop", &settings.stop, "TEXT", "end before this text; may be repeated"),
    MM_OPTION(REAL, "temperature", &settings.given.temperature, "X",
              "0: always the likeliest token (0; of --chat this and the next four as generation_config.json says)"),
    MM_OPTION(U64, "top-k", &settings.top_k, "N", "draw from the N likeliest tokens, 0 for all (0)", .hi = INT32_MAX),
    MM_OPTION(REAL, "top-p", &settings.given.top_p, "X", "draw from the likeliest tokens that together reach probability X (1)"),
    MM_OPTION(REAL, "min-p", &settings.given.min_p, "X", "draw no token less likely than X times the likeliest (0)"),
    MM_OPTION(REAL, "repetition-penalty", &settings.given.repetition, "X",
              "divide logits above 0 of tokens that prompt or answer hold by X, multiply others (1)"),
    MM_OPTION(REAL, "presence-penalty", &settings.given.presence, "X", "subtract X from logits of tokens that the answer holds (0)"),
    MM_OPTION(REAL, "frequency-penalty", &settings.given.frequency, "X", "the same for each time that it holds them (0)"),
    MM_OPTION(U64, "seed", &settings.seed, "N", "of the draws (0)"),
    MM_OPTION_DEVICE(&settings.device),
    MM_OPTION_DEVICES(&settings.devices),
    MM_OPTION_DP(&settings.dp),
    MM_OPTION_ATTACH(&settings.attach),
    MM_OPTION(STR, "act-quant", &settings.act_quant, "WORD",
              "round the inputs of linears as their scheme defines, or not: weights alone are quantised then (on where the device can, "
              "else off)",
              .choices = "on|off"),
    MM_OPTION_INPUT_DTYPE(&settings.input_dtype),
    MM_OPTION_KV_CACHE(&settings.kv),
    MM_OPTION_INDEX_CACHE(&settings.index),
    MM_OPTION_INDEX_SPLIT(&settings.index_split),
    MM_OPTION_UTILIZATION(&settings.share),
    MM_OPTION_THREADS(&settings.threads),
    MM_OPTION_PIN(&settings.pin),
    MM_OPTION_VERIFY(&settings.verify),
    MM_OPTIONS_DUMMY(settings.dummy),
    MM_FLAG("verbose", &settings.verbose, "say how each file was read, and what took how long", .letter = 'v'),
    MM_FLAG("json", &settings.json, "the answer and what it took as one JSON object at the end; errors as JSON"),
    MM_FLAG("quiet", &settings.quiet, "no bar, no summary and no reasoning of --chat on stderr", .letter = 'q'),
};

static const mm_program program = {
    MM_PROGRAM("minimax-run", "continue a text with a packed checkpoint", "DIR -p TEXT", 1, 1, options),
    .examples =
        "minimax-run M2-nvfp4 --chat\n"
        "minimax-run M2-nvfp4 -p \"The capital of France is\" -n 32\n"
        "minimax-run M2-nvfp4 --prompt-file prompt.txt --temperature 0.8 --top-p 0.95 --seed 7",
    .files =
        "DIR/tokenizer.json, DIR/tokenizer.bin  the tokenizer, and its tables laid out for fast starts\n"
        "DIR/generation_config.json, DIR/config.json  eos_token_id: where an answer ends",
    .may_end = mm_process_group_none,
    .epilog =
        "Without --chat the prompt is used as it is. Text goes to stdout as it is generated, the reasoning of --chat to "
        "stderr.\n" MM_ENGINE_STATUSES,
};

int main(int argc, char **argv) {
  const int status = mm_program_main(&program, argc, argv, &settings.dir, run_all, &settings);
  free(settings.stop.item);
  return status;
}
