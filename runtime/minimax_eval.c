/* minimax-eval: what a packed checkpoint predicts. Mean negative log-likelihood and perplexity of a text, the logits of given prompts as a
 * safetensors file, or how far they are from those of another checkpoint. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/model/rule.h"
#include "formats/safetensors.h"
#include "formats/system/bar.h"
#include "formats/system/output.h"
#include "formats/system/pool.h"
#include "loader/companions.h"
#include "runtime/chat/transcripts.h"
#include "runtime/cpu/cpu_fisher.h"
#include "runtime/engine/calibration.h"
#include "runtime/engine/divergence.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/engine_options.h"
#include "runtime/text/tokenizer.h"

#define IDS_MAX (UINT64_C(1) << 30) /* bytes of --ids, --text and of one ids tensor */

typedef struct eval_args {
  const char *dir, *ids, *text, *chats, *logits, *ids_from, *against, *act_quant, *collect, *device, *devices, *input_dtype, *index,
      *dp;                                                              /* act_quant, devices, dp: NULL where not given */
  uint64_t window, limit, chunk, threads, moments, fisher, index_split; /* 0 where not given */
  double share;                                                         /* NAN where not given */
  mm_dummy dummy;
  bool json, quiet, pin, force;
} eval_args;

/* Progress on stderr (formats/system/bar.h). */
typedef struct progress {
  double start, said;
  bool quiet, tty;
} progress;

static progress begin_progress(bool quiet) { return (progress){.start = mm_now(), .said = mm_now(), .quiet = quiet, .tty = isatty(2)}; }

/* `done` of `all` (windows, prompts), `tokens` so far. */
static void say_progress(progress *p, const char *what, uint64_t done, uint64_t all, uint64_t tokens) {
  const double t = mm_now(), took = t - p->start, share = (double)done / (double)all;
  if (p->quiet || t - p->said < (p->tty ? 0.5 : 5) || done == 0) return;
  p->said = t;
  const char *facts =
      MM_FORMATTED(120, "%llu of %llu %s, %.0f tokens/s", (unsigned long long)done, (unsigned long long)all, what, (double)tokens / took);
  mm_bar_draw(&(mm_bar_line){"", share, facts, took / share - took, ""});
}

static void end_progress(const progress *p) {
  if (!p->quiet) mm_bar_clear();
}

/* A checkpoint at work on one sequence. */
typedef struct eval {
  const eval_args *a;
  mm_dir dir; /* until its tokenizer was read */
  mm_shards shards;
  mm_engine *engine;
  mm_calibration *calibration; /* --collect */
  mm_cpu_fisher *fisher;       /* --fisher */
  uint32_t vocab, chunk;
  uint32_t *rows; /* [chunk]: 0, 1, …: every row's logits are wanted */
  float *logits;  /* [chunk, vocab], where they are written to a file */
  double *score;  /* [chunk] */
} eval;

/* Feeds the batch of `count` positions from `pos` on, and takes what it gives. */
typedef bool take_fn(void *ctx, eval *e, const mm_batch *b, uint32_t pos, uint32_t count, mm_err *err);

/* --moments and --fisher, and how much they take. */
static bool gather_moments(eval *e, const mm_ops *ops, uint32_t longest, unsigned threads, mm_err *err) {
  uint64_t inputs, outputs = 0, pass = 0;
  if (ops->calibrate)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "found --moments with device %s, which sums squares only",
                   ops->name);
  if (!mm_calibration_gather_moments(e->calibration, (uint32_t)e->a->moments, &inputs, err)) return false;
  const mm_cpu_fisher_config c = {&e->shards, e->calibration, (uint32_t)e->a->fisher, longest, threads};
  if (e->a->fisher && !(e->fisher = mm_cpu_fisher_open(&c, &outputs, &pass, err))) return false;
  if (!e->a->quiet)
    fprintf(stderr, "second moments take %llu bytes of memory, half of it in the file\n", (unsigned long long)(inputs + outputs));
  if (e->fisher && !e->a->quiet) fprintf(stderr, "the backward pass takes %llu bytes of memory\n", (unsigned long long)pass);
  return true;
}

static bool open_engine(eval *e, uint64_t longest, mm_err *err) {
  const mm_pack *pack = &e->shards.pack;
  if (longest > pack->model.max_positions || longest > UINT32_MAX)
    return mm_fail(err, MM_USAGE, "E_LENGTH", mm_at(pack->dir, NULL), "found %llu tokens in one sequence, expected at most %llu",
                   (unsigned long long)longest, (unsigned long long)pack->model.max_positions);
  e->vocab = pack->model.vocab;
  e->chunk = (uint32_t)mm_min(e->a->chunk, longest);
  uint64_t logits;
  if (!mm_mul(e->chunk, e->vocab, &logits)) return mm_fail_memory(err, UINT64_MAX);
  if ((e->a->logits || e->a->against) && !(e->logits = mm_calloc(logits, sizeof *e->logits, err))) return false;
  e->score = mm_calloc(e->chunk, sizeof *e->score, err);
  e->rows = mm_calloc(e->chunk, sizeof *e->rows, err);
  if (!e->score || !e->rows) return false;
  for (uint32_t i = 0; i < e->chunk; i++) e->rows[i] = i;
  if (e->a->collect && !(e->calibration = mm_calibration_open(&e->shards, err))) return false;
  mm_engine_config c = {.ops = mm_ops_find(e->a->device, err),
                        .limits = {.max_tokens = e->chunk, .slots = 1, .max_positions = (uint32_t)longest},
                        .calibration = e->calibration,
                        .options = {.input_bf16 = strcmp(e->a->input_dtype, "bf16") == 0, .pin = e->a->pin},
                        .memory = {.fits = true, .share = e->a->share, .length = "sequences (--window)"}};
  mm_cache_options("auto", e->a->index, e->a->index_split, &c.options);
  if (!c.ops) return false;
  c.options.act_quant = e->a->act_quant ? strcmp(e->a->act_quant, "on") == 0 : c.ops->act_quant;
  if (!mm_process_group_find(true, &c.process_group, err)) return false;
  const uint32_t here = mm_process_group_ranks(c.process_group, mm_pack_ranks(pack));
  c.options.threads = mm_engine_threads(e->a->threads, here);
  if (e->a->moments && !gather_moments(e, c.ops, (uint32_t)longest, c.options.threads, err)) return false;
  uint32_t *device;
  if (!mm_devices_read(e->a->device, e->a->devices, here, &device, err)) return false;
  c.device = device;
  e->engine = mm_engine_open(&e->shards, &c, err);
  free(device);
  return e->engine;
}

static void eval_close(eval *e) {
  mm_engine_close(e->engine);
  mm_cpu_fisher_close(e->fisher);
  mm_calibration_close(e->calibration);
  mm_shards_close(&e->shards);
  MM_FREE(e->rows, e->logits, e->score);
}

/* Feeds one sequence from its start. */
static bool feed(eval *e, const int32_t *id, uint32_t count, take_fn *take, void *ctx, mm_err *err) {
  for (uint32_t pos = 0; pos < count; pos += e->chunk) {
    uint32_t n = (uint32_t)mm_min(e->chunk, count - pos);
    mm_span span = {0, 0, n, pos};
    mm_batch b = {n, id + pos, 1, &span, n, e->rows, NULL, NULL};
    if (!take(ctx, e, &b, pos, n, err)) return false;
  }
  return true;
}

/* ---- output files ---- */

static const struct mm_st_meta logits_meta = {"format", "minimax-logits"};

/* Opens the output of --logits or --collect. It must not replace an input, nor a file of another program. */
static bool open_place(const eval_args *a, mm_output *out, mm_err *err) {
  const char *path = a->logits ? a->logits : a->collect;
  static const mm_output_mark logits = {.at = 8, .head = "{\"__metadata__\":{\"format\":\"minimax-logits\""},
                              collected = {.at = 8, .head = "{\"__metadata__\":{\"format\":\"minimax-calibration\""};
  const mm_output_place place = {.path = path,
                                 MM_OUTPUT_INPUTS(a->dir, a->ids, a->text, a->chats, a->ids_from, a->against),
                                 .mark = a->logits ? &logits : &collected,
                                 .marks = 1,
                                 .force = a->force};
  if (out) return mm_output_open(out, &place, err);
  return !path || mm_output_check(&place, err);
}

/* ---- likelihood ---- */

typedef struct likelihood {
  const int32_t *target; /* of the window's positions */
  double *window;        /* summed; the one at work */
} likelihood;

static bool add_nll(void *ctx, eval *e, const mm_batch *b, uint32_t pos, uint32_t count, mm_err *err) {
  likelihood *l = ctx;
  if (!mm_engine_score(e->engine, b, l->target + pos, e->score, err)) return false;
  for (uint32_t t = 0; t < count; t++) *l->window += e->score[t];
  return true;
}

static int32_t *read_ids(const char *path, uint32_t vocab, size_t *count, mm_err *err) {
  mm_json *root = mm_json_load_list(path, IDS_MAX, err);
  if (!root) return NULL;
  bool ok = mm_json_type_of(root) == MM_JSON_ARR ||
            mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(path, NULL), "found an object, expected a list of ids");
  *count = ok ? mm_json_size(root) : 0;
  int32_t *id = ok ? mm_calloc(*count, sizeof *id, err) : NULL;
  ok = id;
  for (size_t i = 0; ok && i < *count; i++) {
    const mm_json *j = mm_json_at(root, i);
    ok = (mm_json_type_of(j) == MM_JSON_INT && mm_json_int(j) >= 0 && mm_json_int(j) < vocab) ||
         mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(path, NULL), "entry %zu: found %s, expected an id below %u", i, MM_SHOWN_JSON(j), vocab);
    if (ok) id[i] = (int32_t)mm_json_int(j);
  }
  mm_json_free(root);
  return ok ? id : (free(id), NULL);
}

static bool check_likelihood(const eval_args *a, double sum, uint64_t w, mm_err *err) {
  return isfinite(exp(sum / (double)a->window)) ||
         mm_fail(err, MM_INTEGRITY, "E_LOGITS", mm_at(a->dir, NULL),
                 "found %g as -ln of a token's probability in window %llu, on average; expected a number whose exponential is one",
                 sum / (double)a->window, (unsigned long long)w);
}

/* sum: of each window, summed over its tokens. */
static bool print_likelihood(const eval_args *a, const double *sum, uint64_t windows, mm_err *err) {
  double nll = 0;
  const uint64_t tokens = windows * a->window;
  for (uint64_t w = 0; w < windows; w++) nll += sum[w];
  nll /= (double)tokens;
  if (!a->json) {
    printf("nll %.6f, perplexity %.4f over %llu tokens in %llu windows of %llu\n", nll, exp(nll), (unsigned long long)tokens,
           (unsigned long long)windows, (unsigned long long)a->window);
    return true;
  }
  mm_json *o = MM_JSON_NEW({"nll", mm_json_new_real(nll)}, {"perplexity", mm_json_new_real(exp(nll))}, {"tokens", mm_json_new_u64(tokens)},
                           {"windows", mm_json_new_u64(windows)}, {"window", mm_json_new_u64(a->window)});
  mm_json *each = mm_json_put_list(o, "window_nll");
  for (uint64_t w = 0; w < windows; w++) mm_json_append(each, mm_json_new_real(sum[w] / (double)a->window));
  return mm_program_json(o, false, err);
}

static bool write_calibration(const eval *e, mm_err *err) {
  mm_output f = MM_OUTPUT_NONE;
  bool ok = mm_engine_calibrate(e->engine, err) && open_place(e->a, &f, err) && mm_calibration_write(e->calibration, f.fd, f.path, err) &&
            mm_output_publish(&f, err);
  mm_output_discard(&f);
  return ok;
}

/* The ids of --text or --ids, and how many windows of `window` ids they have. */
static int32_t *read_windows(eval *e, uint64_t *windows, mm_err *err) {
  const eval_args *a = e->a;
  size_t count = 0;
  int32_t *id = a->text    ? mm_text_ids(&e->shards.pack, a->text, &count, err)
                : a->chats ? mm_transcripts_ids(&e->shards.pack, a->chats, &count, err)
                           : read_ids(a->ids, e->shards.pack.model.vocab, &count, err);
  const bool ok = mm_dir_close(&e->dir, a->dir, id, err); /* weights and tokenizer are of one directory */
  *windows = mm_min(count ? (count - 1) / a->window : 0, a->limit ? a->limit : UINT64_MAX);
  if (ok && *windows) return id;
  free(id);
  const char *path = a->text ? a->text : a->ids ? a->ids : a->chats;
  if (ok)
    mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(path, NULL), "found %zu ids, expected more than a window of %llu", count,
            (unsigned long long)a->window);
  return NULL;
}

/* Windows of `window` ids, each from its own start; every id of a window predicts the next one of the text. */
static bool run_likelihood(eval *e, mm_err *err) {
  const eval_args *a = e->a;
  uint64_t windows;
  int32_t *id = read_windows(e, &windows, err);
  double *sum = id ? mm_calloc(windows, sizeof *sum, err) : NULL;
  bool ok = sum && open_engine(e, a->window, err);
  progress p = begin_progress(a->quiet);
  for (uint64_t w = 0; ok && w < windows; w++) {
    say_progress(&p, "windows", w, windows, w * a->window);
    const int32_t *first = id + w * a->window;
    likelihood l = {first + 1, sum + w};
    ok = feed(e, first, (uint32_t)a->window, add_nll, &l, err) && check_likelihood(a, sum[w], w, err) &&
         (!e->fisher || mm_cpu_fisher_add(e->fisher, first, (uint32_t)a->window, err));
  }
  end_progress(&p);
  free(id);
  ok = ok && (!a->collect || write_calibration(e, err)) && print_likelihood(a, sum, windows, err);
  free(sum);
  return ok;
}

/* ---- logits ---- */

typedef struct logits_file {
  mm_output *file;
  uint64_t offset; /* of the current prompt's logits */
} logits_file;

static bool write_logits(void *ctx, eval *e, const mm_batch *b, uint32_t pos, uint32_t count, mm_err *err) {
  const logits_file *f = ctx;
  if (!mm_engine_step(e->engine, b, e->logits, err)) return false;
  size_t row = (size_t)e->vocab * sizeof *e->logits;
  return mm_pwrite(f->file->fd, f->file->path, e->logits, count * row, f->offset + pos * row, err);
}

/* The prompts: I32 vectors named "ids.NAME" of one file, in the order of their names. */
typedef struct prompts {
  mm_st st;
  mm_file file;
  mm_st_tensor *out; /* [count]: "logits.NAME", F32 [tokens, vocab] */
  const mm_st_tensor **in;
  size_t count;
  uint64_t longest;
  mm_arena arena;
} prompts;

/* The ids of one prompt; free() them. */
static int32_t *read_prompt(const prompts *p, size_t i, mm_err *err) {
  int32_t *id = mm_calloc(p->in[i]->shape.dim[0], sizeof *id, err);
  if (id && mm_file_read(&p->file, p->st.path, id, p->in[i]->bytes, p->in[i]->offset, err)) return id;
  free(id);
  return NULL;
}

/* Before anything is loaded for them. */
static bool check_prompts(const prompts *p, uint32_t vocab, mm_err *err) {
  bool ok = true;
  for (size_t i = 0; ok && i < p->count; i++) {
    int32_t *id = read_prompt(p, i, err);
    ok = id;
    for (uint64_t t = 0; ok && t < p->in[i]->shape.dim[0]; t++)
      ok = (id[t] >= 0 && (uint32_t)id[t] < vocab) ||
           mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(p->st.path, p->in[i]->name), "entry %llu: found %d, expected an id below %u",
                   (unsigned long long)t, id[t], vocab);
    free(id);
  }
  return ok;
}

static bool open_prompts(prompts *p, const char *path, uint32_t vocab, mm_err *err) {
  *p = (prompts){.file = MM_FILE_NONE};
  if (!mm_st_open(&p->st, path, MM_BAD_INPUT, err) || !mm_file_open(&p->file, path, err)) return false;
  p->in = mm_arena_alloc(&p->arena, p->st.count * sizeof *p->in, err);
  p->out = mm_arena_alloc(&p->arena, p->st.count * sizeof *p->out, err);
  if (!p->in || !p->out) return false;
  for (size_t i = 0; i < p->st.count; i++) {
    const mm_st_tensor *t = &p->st.tensor[i];
    if (strncmp(t->name, "ids.", 4) != 0) continue;
    if (t->dtype != MM_I32 || t->shape.rank != 1 || t->shape.dim[0] == 0 || t->bytes > IDS_MAX) {
      char shape[128];
      return mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(path, t->name), "found %s %s, expected I32 [tokens]", mm_dtype_name(t->dtype),
                     mm_shape_text(&t->shape, shape, sizeof shape));
    }
    const char *name = mm_arena_printf(&p->arena, err, "logits.%s", t->name + 4);
    if (!name) return false;
    p->in[p->count] = t;
    p->out[p->count++] = (mm_st_tensor){.name = name, .dtype = MM_F32, .shape = mm_shape2(t->shape.dim[0], vocab)};
    p->longest = mm_max(p->longest, t->shape.dim[0]);
  }
  if (!p->count) return mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(path, NULL), "found no tensor named ids.NAME");
  return check_prompts(p, vocab, err);
}

static void close_prompts(prompts *p) {
  mm_file_close(&p->file);
  mm_st_close(&p->st);
  mm_arena_close(&p->arena);
}

/* The ids of one prompt to the engine. */
static bool feed_prompt(eval *e, prompts *p, size_t i, take_fn *take, void *ctx, mm_err *err) {
  int32_t *id = read_prompt(p, i, err);
  const bool ok = id && feed(e, id, (uint32_t)p->in[i]->shape.dim[0], take, ctx, err);
  free(id);
  return ok;
}

static bool write_all(eval *e, prompts *p, logits_file *f, mm_err *err) {
  size_t header_bytes;
  void *header = mm_st_header(p->out, p->count, &logits_meta, 1, 8, &header_bytes, err);
  bool ok = header && mm_pwrite(f->file->fd, f->file->path, header, header_bytes, 0, err);
  uint64_t tokens = 0;
  progress said = begin_progress(e->a->quiet);
  free(header);
  for (size_t i = 0; ok && i < p->count; i++) {
    say_progress(&said, "prompts", i, p->count, tokens);
    f->offset = p->out[i].offset;
    ok = feed_prompt(e, p, i, write_logits, f, err);
    tokens += p->in[i]->shape.dim[0];
  }
  end_progress(&said);
  return ok;
}

static bool run_logits(eval *e, mm_err *err) {
  const char *path = e->a->logits;
  prompts p;
  mm_output out = MM_OUTPUT_NONE;
  logits_file f = {.file = &out};
  bool ok = open_prompts(&p, e->a->ids_from, e->shards.pack.model.vocab, err) && open_engine(e, p.longest, err) &&
            open_place(e->a, &out, err) && write_all(e, &p, &f, err) && mm_output_publish(&out, err);
  mm_output_discard(&out);
  size_t count = p.count;
  close_prompts(&p);
  if (!ok) return false;
  if (!e->a->json) {
    printf("%s: logits of %zu prompts\n", path, count);
    return true;
  }
  return mm_program_json(MM_JSON_NEW({"logits", mm_json_new_path(path)}, {"prompts", mm_json_new_u64(count)}), false, err);
}

/* ---- divergence from another checkpoint's logits ---- */

typedef struct divergence {
  mm_st st; /* of a file of logits */
  mm_file file;
  const mm_st_tensor *at; /* the other's logits of the current prompt */
  float *row;             /* [vocab] */
  eval other;             /* or the other checkpoint */
  mm_divergence d;
} divergence;

static bool print_divergence(const divergence *d, const eval *e, const char *unit, uint64_t count, mm_err *err) {
  const mm_pack *pack = mm_dummy_wanted(&e->a->dummy) ? NULL : &e->shards.pack;
  const mm_divergence_of of = {e->a->dir, e->a->against, pack, unit, count};
  return mm_divergence_print(&d->d, &of, e->a->json, err);
}

static bool add_divergence(void *ctx, eval *e, const mm_batch *b, uint32_t pos, uint32_t count, mm_err *err) {
  divergence *d = ctx;
  size_t bytes = (size_t)e->vocab * sizeof *d->row;
  if (!mm_engine_step(e->engine, b, e->logits, err)) return false;
  for (uint32_t t = 0; t < count; t++) {
    const float *x = e->logits + (size_t)t * e->vocab;
    if (!mm_file_read(&d->file, d->st.path, d->row, bytes, d->at->offset + (uint64_t)(pos + t) * bytes, err)) return false;
    if (!mm_divergence_add(&d->d, d->row, x, e->vocab))
      return mm_fail(err, MM_INTEGRITY, "E_LOGITS", mm_at(d->st.path, d->at->name), "found no finite divergence at position %u", pos + t);
  }
  return true;
}

static bool find_logits(divergence *d, const prompts *p, size_t i, uint32_t vocab, mm_err *err) {
  char shape[128];
  d->at = mm_st_find(&d->st, p->out[i].name);
  if (!d->at) return mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(d->st.path, p->out[i].name), "found no such logits (minimax-eval --logits)");
  if (d->at->dtype == MM_F32 && mm_shape_equal(&d->at->shape, &p->out[i].shape)) return true;
  return mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(d->st.path, d->at->name), "found %s %s, expected F32 [%llu, %u]",
                 mm_dtype_name(d->at->dtype), mm_shape_text(&d->at->shape, shape, sizeof shape), (unsigned long long)p->out[i].shape.dim[0],
                 vocab);
}

static bool run_divergence(eval *e, mm_err *err) {
  const uint32_t vocab = e->shards.pack.model.vocab;
  prompts p;
  divergence d = {.file = MM_FILE_NONE, .row = mm_calloc(vocab, sizeof *d.row, err)};
  bool ok = open_prompts(&p, e->a->ids_from, vocab, err) && d.row && mm_st_open(&d.st, e->a->against, MM_BAD_INPUT, err) &&
            mm_file_open(&d.file, e->a->against, err);
  uint64_t tokens = 0;
  for (size_t i = 0; ok && i < p.count; i++) {
    ok = find_logits(&d, &p, i, vocab, err);
    tokens += p.in[i]->shape.dim[0];
  }
  ok = ok && (d.d.kl = mm_calloc(tokens, sizeof *d.d.kl, err)) && open_engine(e, p.longest, err);
  progress said = begin_progress(e->a->quiet);
  for (size_t i = 0; ok && i < p.count; i++) {
    say_progress(&said, "prompts", i, p.count, d.d.tokens);
    ok = find_logits(&d, &p, i, vocab, err) && feed_prompt(e, &p, i, add_divergence, &d, err);
  }
  end_progress(&said);
  ok = ok && print_divergence(&d, e, "prompts", p.count, err);
  MM_FREE(d.row, d.d.kl);
  mm_file_close(&d.file);
  mm_st_close(&d.st);
  close_prompts(&p);
  return ok;
}

static bool add_compared(void *ctx, eval *e, const mm_batch *b, uint32_t pos, uint32_t count, mm_err *err) {
  divergence *d = ctx;
  if (!mm_engine_step(e->engine, b, e->logits, err) || !mm_engine_step(d->other.engine, b, d->other.logits, err)) return false;
  for (uint32_t t = 0; t < count; t++)
    if (!mm_divergence_add(&d->d, d->other.logits + (size_t)t * e->vocab, e->logits + (size_t)t * e->vocab, e->vocab))
      return mm_fail(err, MM_INTEGRITY, "E_LOGITS", mm_at(e->a->dir, NULL), "found no finite divergence at position %u of window %llu",
                     pos + t, (unsigned long long)(d->d.tokens / e->a->window));
  return true;
}

/* The reference of --against, with the ids of this checkpoint. */
static bool open_other(const eval *e, eval *other, mm_err *err) {
  const uint32_t vocab = e->shards.pack.model.vocab;
  other->a = e->a;
  if (!mm_shards_open(&other->shards, e->a->against, err)) return false;
  if (other->shards.pack.model.vocab != vocab)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(e->a->against, NULL), "found a model of %u ids, expected %u as in %s",
                   other->shards.pack.model.vocab, vocab, e->a->dir);
  return open_engine(other, e->a->window, err);
}

/* The windows of a text through two checkpoints. */
static bool run_compared(eval *e, mm_err *err) {
  const uint64_t window = e->a->window;
  uint64_t windows = 0;
  divergence d = {.file = MM_FILE_NONE};
  int32_t *id = mm_process_group_none(err) ? read_windows(e, &windows, err) : NULL;
  bool ok =
      id && (d.d.kl = mm_calloc(windows * window, sizeof *d.d.kl, err)) && open_engine(e, window, err) && open_other(e, &d.other, err);
  progress p = begin_progress(e->a->quiet);
  for (uint64_t w = 0; ok && w < windows; w++) {
    say_progress(&p, "windows", w, windows, d.d.tokens);
    ok = feed(e, id + w * window, (uint32_t)window, add_compared, &d, err);
  }
  end_progress(&p);
  ok = ok && print_divergence(&d, e, "windows", windows, err);
  eval_close(&d.other);
  MM_FREE(id, d.d.kl);
  return ok;
}

/* Exactly one of likelihood, logits and divergence is asked for; --window and --limit go with a text. */
static bool settle(eval_args *a, mm_err *err) {
  const int texts = (a->ids != NULL) + (a->text != NULL) + (a->chats != NULL);
  bool scored = texts, compared = scored && a->against, prompted = a->logits || (a->against && !scored);
  if (texts <= 1 && !(a->logits && a->against) && scored != prompted && prompted == (a->ids_from != NULL) &&
      (!a->collect || (scored && !compared))) {
    if (compared && !mm_unpacked_refuse(a->against, err)) return false;
    if (a->force && !a->collect && !a->logits)
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--force goes with --collect or --logits");
    if (prompted && (a->window || a->limit))
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--window and --limit: only with --ids, --text or --conversations");
    if (a->moments && (!a->collect || a->moments % MM_MOMENTS_LEAST))
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--moments: only with --collect, and a multiple of %d",
                     (int)MM_MOMENTS_LEAST);
    if (a->fisher && (!a->moments || a->fisher % MM_MOMENTS_LEAST))
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--fisher: only with --moments, and a multiple of %d",
                     (int)MM_MOMENTS_LEAST);
    if (!a->window) a->window = 512;
    return true;
  }
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                 "expected one of --ids, --text and --conversations (and --collect or --against), or --ids-from with one of --logits and "
                 "--against");
}

static bool run(void *args, mm_err *err) {
  eval_args *a = args;
  eval e = {.a = a, .dir = mm_dir_open(a->dir)};
  const mm_groups_request groups = {a->dp, a->device, 1, a->collect ? "--collect" : NULL};
  char line[MM_GROUPS_LINE];
  bool ok = settle(a, err) && mm_utilization_check(a->share, err) && open_place(a, NULL, err) /* refused before the work */ &&
            mm_groups_open(&e.shards, a->dir, &a->dummy, &groups, line, err) && (!*line || a->quiet || fprintf(stderr, "%s\n", line) > 0) &&
            (a->logits     ? run_logits(&e, err)
             : !a->against ? run_likelihood(&e, err)
             : a->ids_from ? run_divergence(&e, err)
                           : run_compared(&e, err));
  eval_close(&e);
  return ok;
}

/* The options, before the command line is read with their defaults. */
static eval_args settings = {
    .chunk = 512, .device = "cpu", .input_dtype = "auto", .index = "auto", .share = NAN, .dummy = MM_DUMMY_NONE(mm_arch_read)};

static const mm_option options[] = {
    {.help = "likelihood of a text"},
    MM_OPTION(STR, "ids", &settings.ids, "FILE.json", "print the mean negative log-likelihood of these ids (a flat array)"),
    MM_OPTION(STR, "text", &settings.text, "FILE", "the same of a text, in the checkpoint's own tokenizer"),
    MM_OPTION(STR, "conversations", &settings.chats, "FILE",
              "the same of JSON Lines of {\"messages\": […]}, by the checkpoint's chat format"),
    MM_OPTION(U64, "window", &settings.window, "N", "ids that are scored together, each window from its own start (default 512)", .lo = 1,
              .hi = INT32_MAX),
    MM_OPTION(U64, "limit", &settings.limit, "N", "at most so many windows (default all)", .lo = 1),
    MM_OPTION(STR, "collect", &settings.collect, "OUT.safetensors",
              "with --ids, --text or --conversations: what the inputs of every linear look like: minimax-convert's --importance and "
              "--act-scales read it"),
    MM_OPTION(U64, "moments", &settings.moments, "N",
              "with --collect: also the second moments of the inputs, between all columns of a block of N (128 to 1024 in steps of "
              "128): what minimax-convert --method gptq reads; 4 N bytes of memory for each input channel of each expert",
              .lo = MM_MOMENTS_LEAST, .hi = MM_MOMENTS_MOST),
    MM_OPTION(
        U64, "fisher", &settings.fisher, "N",
        "with --moments: also the second moments of the gradients of the log-likelihood with respect to the outputs, between all rows "
        "of a block of N (128 to 1024 in steps of 128), under ids that the model draws: --method gptq then couples rows; a backward "
        "pass on the CPU, for MiniMax-M1 and M2",
        .lo = MM_MOMENTS_LEAST, .hi = MM_MOMENTS_MOST),
    {.help = "logits of prompts"},
    MM_OPTION(STR, "logits", &settings.logits, "OUT.safetensors", "write logits.NAME, F32 [tokens, vocab], for every prompt of --ids-from"),
    MM_OPTION(STR, "against", &settings.against, "REF",
              "print the KL divergence from a reference: a packed checkpoint, with --ids-from a file that --logits wrote"),
    MM_OPTION(STR, "ids-from", &settings.ids_from, "IN.safetensors", "prompts: every tensor ids.NAME, I32 [tokens]"),
    {.help = "run"},
    MM_FLAG("force", &settings.force, "with --collect or --logits: replace a file of that name that minimax-eval did not make"),
    MM_OPTION(U64, "chunk", &settings.chunk, "N", "tokens fed at once (default 512)", .lo = 1, .hi = UINT32_MAX),
    MM_OPTION(
        STR, "act-quant", &settings.act_quant, "WORD",
        "round the inputs of linears as their scheme defines, or not: weights alone are quantised then (default on where the device can)",
        .choices = "on|off"),
    MM_OPTION_INPUT_DTYPE(&settings.input_dtype),
    MM_OPTION_INDEX_CACHE(&settings.index),
    MM_OPTION_INDEX_SPLIT(&settings.index_split),
    MM_OPTION_DEVICE(&settings.device),
    MM_OPTION_DEVICES(&settings.devices),
    MM_OPTION_DP(&settings.dp),
    MM_OPTION_UTILIZATION(&settings.share),
    MM_OPTION_THREADS(&settings.threads),
    MM_OPTION_PIN(&settings.pin),
    MM_OPTIONS_DUMMY(settings.dummy),
    MM_FLAG("json", &settings.json, "print the result as JSON; errors as JSON"),
    MM_FLAG("quiet", &settings.quiet, "no progress on stderr", .letter = 'q'),
};

static const mm_program program = {
    MM_PROGRAM("minimax-eval", "likelihood of a text, logits of prompts, or their divergence from others, under a packed checkpoint", "DIR",
               1, 1, options),
    .examples =
        "minimax-eval M2-nvfp4 --ids ids.json --window 512\n"
        "minimax-eval M2-block_fp8 --ids ids.json --collect inputs.safetensors\n"
        "minimax-eval M2-nvfp4 --text text.txt --against M2-none\n"
        "minimax-eval M2-nvfp4 --ids-from prompts.safetensors --logits logits.safetensors",
    .files =
        "FILE.json  a flat array of token ids\n"
        "OUT.safetensors  appears when it is complete; .OUT.safetensors.partial-minimax-eval is a killed run's",
    .may_end = mm_process_group_none,
    .epilog =
        "Exit status: 0 done, 2 usage, 3 bad input, 4 valid but unsupported, 5 I/O, 6 integrity of the checkpoint, 8 memory or limit.",
};

int main(int argc, char **argv) { return mm_program_main(&program, argc, argv, &settings.dir, run, &settings); }
