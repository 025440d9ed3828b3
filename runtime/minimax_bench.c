/* minimax-bench: how fast layers of real size run on a GPU, compared with the limit by the device's own copy rate. Random weights of the
 * released shapes are made on the device: no checkpoint is read. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "formats/option.h"
#include "runtime/bench/bench_cases.h"
#include "runtime/bench/bench_dispatch.h"
#include "runtime/bench/bench_result.h"
#include "runtime/bench/bench_shapes.h"
#include "runtime/bench/bench_steps.h"
#include "runtime/bench/load_test.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/engine_options.h"

#define SUBJECTS "kernels|layers|decode|drafts|prefill|attention|mixed|choices"
#define SCHEMES  "bf16|block_fp8|channel_fp8|tensor_wise_fp8|w4a16|w4afp8|w4a8|nvfp4|nvfp4a16|mxfp4|mxfp8"

/* ---- Cases ---- */

static bool measure_decode(mm_bench *b, uint32_t rows, mm_err *err) {
  mm_bench_result r = mm_bench_result_of(b, rows);
  const uint32_t own = rows / mm_bench_groups_of(b);
  if (!mm_bench_decode(b, NULL, own, &r.seconds, err)) return false;
  r.bytes = mm_bench_decode_bytes(b, own, b->c->context + 1);
  if (b->ranks > 1) mm_bench_wire_bytes(b, rows, &r.wire);
  r.floor_s = r.bytes / b->copy_rate;
  r.reached = b->reached;
  if (b->rank == 0) mm_bench_print_decode(&r, b->json);
  return true;
}

/* Single tokens, and as many rows of fewer sequences. */
static bool measure_rows(mm_bench *b, uint32_t rows, mm_err *err) {
  const bool kernels = strcmp(b->c->subject, "kernels") == 0;
  b->each = 1;
  if (rows % mm_bench_groups_of(b)) return true; /* of the usual numbers: too few for each group to have some */
  if (kernels ? !mm_bench_measure_ops(b, rows, err) : !mm_bench_fill(b, rows / mm_bench_groups_of(b), err) || !measure_decode(b, rows, err))
    return false;
  if (!b->c->verify) return true;
  b->each = b->c->verify;
  return kernels ? mm_bench_measure_ops(b, rows, err) : measure_decode(b, rows, err);
}

/* Steps of as many sequences, of each of several numbers of rows. */
static bool measure_drafted(mm_bench *b, uint32_t sequences, double plain_s, mm_err *err) {
  static const uint32_t rows[] = {8, 4, 2, 0};
  const uint32_t own[] = {b->c->verify, 0};
  if (!mm_bench_fill(b, sequences, err)) return false;
  for (const uint32_t *each = b->c->verify ? own : rows; *each; each++) {
    double step_s[2];
    b->each = *each;
    if (!mm_bench_drafts(b, sequences, step_s, err)) return false;
    mm_bench_result r = mm_bench_result_of(b, sequences * *each);
    r.seconds = step_s[0], r.reached = b->reached, r.draft_quant = b->draft_quant ? b->draft_quant->name : "bf16";
    r.bytes = mm_bench_draft_bytes(b), r.floor_s = r.bytes / b->copy_rate;
    if (b->rank == 0) mm_bench_print_drafts(&r, step_s[1], plain_s, b->kind == MM_DRAFT_EAGLE3, b->json);
  }
  b->each = 1;
  return true;
}

/* Plain decode steps; then the same model is opened with a draft. */
static bool measure_drafts(mm_bench *b, mm_err *err) {
  const mm_bench_case *c = b->c;
  double plain_s[8];
  mm_dflash_config config;
  mm_dflash *draft = mm_calloc(1, sizeof *draft, err);
  bool ok = draft && mm_bench_draft(&b->model, c->shrink ? c->shrink : 1, b->kind, &config, err);
  if (ok) config.quant = b->draft_quant;
  ok = ok && mm_dflash_fits_quant(&config, "", MM_USAGE, err);
  for (int i = 0; ok && i < 8 && c->batch[i]; i++)
    ok = mm_bench_fill(b, c->batch[i], err) && mm_bench_decode(b, NULL, c->batch[i], &plain_s[i], err);
  ok = ok && mm_dflash_random(draft, &config, err);
  mm_bench_close(b);
  b->draft = draft;
  ok = ok && mm_bench_open(b, err);
  for (int i = 0; ok && i < 8 && c->batch[i]; i++) ok = measure_drafted(b, c->batch[i], plain_s[i], err);
  mm_bench_close(b);
  if (draft) mm_dflash_close(draft);
  free(draft);
  b->draft = NULL;
  return ok;
}

static bool measure_prefill(mm_bench *b, mm_err *err) {
  mm_bench_result r = mm_bench_result_of(b, 0);
  if (!mm_bench_prefill(b, &r.seconds, err)) return false;
  r.floor_s = mm_bench_prefill_floor(b, b->c->tokens);
  r.rate[0] = MM_BENCH_FP8_RATE, r.rate[1] = MM_BENCH_BF16_RATE, r.rate[2] = MM_BENCH_ATTENTION_RATE;
  if (b->rank == 0) mm_bench_print_prefill(&r, b->json);
  return true;
}

static bool measure_mixed(mm_bench *b, mm_err *err) {
  const mm_bench_result r = mm_bench_result_of(b, b->c->batch[0]);
  double s[3];
  if (!mm_bench_fill(b, r.batch, err) || !mm_bench_mixed(b, r.batch, s, err)) return false;
  if (b->rank == 0) mm_bench_print_mixed(&r, s, b->json);
  return true;
}

static bool measure_attention(mm_bench *b, mm_err *err) {
  const mm_bench_result r = mm_bench_result_of(b, 0);
  double part_s[3], ops[2];
  if (!mm_bench_attention(b, part_s, err)) return false;
  mm_bench_attention_ops(b, b->c->context, ops);
  if (b->rank == 0) mm_bench_print_attention(&r, part_s, ops, b->json);
  return true;
}

static bool measure(mm_bench *b, mm_err *err) {
  const mm_bench_case *c = b->c;
  if (strcmp(c->subject, "attention") == 0) return measure_attention(b, err);
  if (strcmp(c->subject, "mixed") == 0) return measure_mixed(b, err);
  if (strcmp(c->subject, "drafts") == 0) return measure_drafts(b, err);
  for (int i = 0; i < 8 && c->batch[i]; i++)
    if (!measure_rows(b, c->batch[i], err)) return false;
  return !c->tokens || measure_prefill(b, err);
}

/* ---- Ranks ---- */

typedef struct bench_rank {
  mm_bench b;
  pthread_t thread;
  mm_err err;
  bool done;
} bench_rank;

static void *run_rank(void *arg) {
  bench_rank *r = arg;
  r->done = mm_bench_open(&r->b, &r->err) && measure(&r->b, &r->err);
  if (!r->done && r->b.comm) mm_comm_abort(r->b.comm);
  mm_bench_close(&r->b);
  mm_bind_close(&r->b.weights);
  return NULL;
}

/* The case on all ranks; the first that says why it failed does so for all. */
static bool run_ranks(const mm_bench *one, mm_err *err) {
  bench_rank *all = mm_calloc(one->ranks, sizeof *all, err);
  uint32_t started = 0, done = 0;
  mm_comm *comm = all ? mm_comm_open(one->ranks, err) : NULL;
  if (!all || !comm || (mm_bench_groups_of(one) > 1 && !mm_comm_split(comm, mm_bench_groups_of(one), err)))
    return mm_comm_close(comm), free(all), false;
  for (; started < one->ranks; started++) {
    bench_rank *r = &all[started];
    r->b = *one, r->b.rank = started, r->b.comm = comm;
    const int failed = pthread_create(&r->thread, NULL, run_rank, r);
    if (!failed) continue;
    mm_fail_thread(err, MM_FORMATTED(80, "start a thread for rank %u", started), failed);
    break;
  }
  bool ok = started == one->ranks;
  if (!ok) mm_comm_abort(comm);
  for (uint32_t i = 0; i < started; i++) pthread_join(all[i].thread, NULL), done += all[i].done;
  for (uint32_t i = 0; ok && i < started; i++)
    if (all[i].err.status != MM_OK) ok = mm_fail_as(err, &all[i].err);
  mm_comm_close(comm);
  free(all);
  return ok && (done == started || mm_fail(err, MM_IO, "E_RANK", mm_at(NULL, NULL), "%u of %u ranks ended early", started - done, started));
}

static const mm_ops *find_ops(const mm_bench_args *a, mm_err *err) {
#ifdef MM_CUDA
  return mm_ops_find(a->device, err);
#else
  if (strcmp(a->device, "cpu") == 0) return &mm_ops_cpu;
  (void)mm_fail(err, MM_UNSUPPORTED, "E_CUDA", mm_at(NULL, NULL),
                "a GPU is measured, and this build has no CUDA backend; expected --device cpu");
  return NULL;
#endif
}

static bool bench_all(void *args, mm_err *err) {
  const mm_bench_args *a = args;
  const char *subject = a->subject;
  const bool choices = strcmp(subject, "choices") == 0;
  mm_bench_case c;
  double copy_rate;
  if (!choices && !mm_bench_is_subject(subject))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found subject \"%s\", expected " SUBJECTS, subject);
  if (!mm_bench_check_ranks(a, err)) return false;
  if (choices) return mm_bench_print_choices(a, err);
  if (!mm_bench_case_at(a, 0, &c))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                   a->model ? "found --model %s, which %s does not measure" : "found no %s, expected --model m3 for %s",
                   a->model ? a->model : "--model", subject);
  const mm_ops *ops = find_ops(a, err);
  mm_ops plain;
  const unsigned threads = mm_engine_threads(a->threads, (uint32_t)a->tp);
  if (!ops || !mm_bench_copy_rate(ops, threads * (unsigned)a->tp, &copy_rate, err)) return false;
  if (strcmp(a->exchange, "rows") == 0) plain = *ops, plain.ranks.gather_routed = NULL, ops = &plain;
  mm_bench_print_copy(copy_rate, a->json);
  for (size_t i = 0; mm_bench_case_at(a, i, &c); i++) {
    mm_bench b = {.c = &c,
                  .ops = ops,
                  .ranks = (uint32_t)a->tp,
                  .ep = (uint32_t)a->ep,
                  .attn_tp = (uint32_t)(a->attn_tp ? a->attn_tp : a->tp),
                  .threads = threads,
                  .steps = (uint32_t)a->steps,
                  .each = 1,
                  .kv_fp8 = strcmp(a->kv, "fp8") == 0,
                  .index_fp8 = strcmp(a->index, "fp8") == 0,
                  .index_split = (uint32_t)a->index_split,
                  .act_quant = strcmp(a->act_quant, "on") == 0,
                  .kind = strcmp(a->draft, "eagle3") == 0 ? MM_DRAFT_EAGLE3 : MM_DRAFT_DFLASH,
                  .draft_quant = mm_dflash_scheme(a->draft_quant),
                  .copy_rate = copy_rate,
                  .json = a->json};
    if (!run_ranks(&b, err)) return false;
  }
  return true;
}

static const char epilog[] =
    "Medians. Weights are random, made on the device; nothing is read from disk. kernels: each op of a layer, the head, a layer.\n"
    "layers: decode steps of eight layers. decode: steps of the whole of M2 with 4-bit experts. prefill: one step of many tokens.\n"
    "drafts: decode steps with a draft of M2's public shapes, which proposes before each, and plain ones. Their tokens are those of\n"
    "published lengths: with DFlash 3.9 and 2.6 tokens a step of eight rows, with EAGLE-3 2.94 and 2.6 of four; rows of a sequence\n"
    "choose experts as alike as those of text do.\n"
    "mixed: single tokens with a prefill chunk of one sequence, in one step and in two. A floor is the least bytes over the\n"
    "copy rate of the same run; of a prefill, where that is longer, the operations over constant rates, which its line shows.\n"
    "attention: a long prompt of M3 in chunks, a sparse layer's selection and chosen blocks, and a full layer of the same heads.\n"
    "choices: which kernels the CUDA backend takes for each product, by the scheme and the tokens of a step, on GPUs that run code "
    "of\n"
    "sm_90a and on others; it asks for no GPU, and takes --quant for the experts too.\n"
    "serve URL: the load test of a server; minimax-bench serve --help.\n"
    "Exit status: 0 done, 2 usage, 4 no CUDA backend, 5 the device failed, 6 no logit was a number, 8 memory.";

static const char examples[] =
    "minimax-bench kernels --model m2\n"
    "minimax-bench decode --expert-quant nvfp4 --batch 16 --context 4096\n"
    "minimax-bench layers --model m2 --verify 8 --context 32768\n"
    "minimax-bench choices --model m2 --quant nvfp4\n"
    "minimax-bench serve http://127.0.0.1:8000 --max-concurrency 16";

static const mm_bench_args usual = {.kv = "auto",
                                    .index = "auto",
                                    .act_quant = "on",
                                    .draft = "dflash",
                                    .draft_quant = "none",
                                    .exchange = "codes",
                                    .steps = 64,
                                    .tp = 1,
                                    .ep = 1,
                                    .device = "cuda",
                                    .dense = UINT64_MAX};

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "serve") == 0) return mm_load_test_main(argc - 1, argv + 1);
  mm_bench_args a = usual;
  const mm_option options[] = {
      MM_OPTION(STR, "model", &a.model, "NAME", "only this model's shapes (m1 and m2)", .choices = "m1|m2|m3"),
      MM_OPTION(U64, "layers", &a.layers, "N", "layers of the model (8, 4 of M3; all for decode and drafts)", .lo = 1, .hi = MM_MAX_LAYERS),
      MM_OPTION(U64, "dense-layers", &a.dense, "N", "of them the first are M3's dense ones (1 for kernels, 3 for decode, else 0)",
                .hi = MM_MAX_LAYERS),
      MM_OPTION(STR, "quant", &a.quant, "SCHEME", "of attention, dense MLPs and shared experts (block_fp8; mxfp8 for M3)",
                .choices = SCHEMES),
      MM_OPTION(STR, "expert-quant", &a.experts, "SCHEME",
                "of the experts (block_fp8; mxfp8 for M3; w4a16 and nvfp4 for decode, nvfp4 for drafts)", .choices = SCHEMES),
      MM_OPTION(STR, "head", &a.head, "SCHEME", "of the head (bf16)", .choices = "bf16|block_fp8"),
      MM_OPTION(STR, "vocab", &a.vocab, "N",
                "rows of the head and of the embeddings (200064 for kernels, decode and drafts, 2048 elsewhere)", .choices = "2048|200064"),
      MM_OPTION(STR, "act-quant", &a.act_quant, "WORD", "round the inputs of linears as their scheme defines, or not (on)",
                .choices = "on|off"),
      MM_OPTION(STR, "kv-cache-dtype", &a.kv, "TYPE", "of cached keys and values (auto: bf16)", .choices = "auto|fp8"),
      MM_OPTION_INDEX_CACHE(&a.index),
      MM_OPTION_INDEX_SPLIT(&a.index_split),
      MM_OPTION(U64, "tp", &a.tp, "N", "ranks, a GPU each: 1, 2, 4 or 8 (1)", .lo = 1, .hi = MM_BENCH_RANKS),
      MM_OPTION(U64, "ep", &a.ep, "N", "divides tp: each rank holds 1/N of the experts, cut in tp/N (1)", .lo = 1, .hi = MM_BENCH_RANKS),
      MM_OPTION(U64, "attn-tp", &a.attn_tp, "N",
                "divides tp: groups of N ranks have all of attention and sequences of their own, for layers and decode (tp)", .lo = 1,
                .hi = MM_BENCH_RANKS),
      MM_OPTION(STR, "exchange", &a.exchange, "WORD", "of their rows: as codes where experts take these (codes)", .choices = "codes|rows"),
      MM_OPTION(
          U64, "batch", &a.batch, "N",
          "sequences of a decode step (1, 4, 16, 64 and 256; without 4 for kernels, 1 for decode, 1, 16 and 64 for drafts, 63 for mixed)",
          .lo = 1, .hi = 4096),
      MM_OPTION(
          U64, "verify", &a.verify, "N",
          "--batch (1) times N rows of decode steps, as single tokens and as N of a sequence; rows of a sequence for drafts (8, 4 and 2)",
          .lo = 2, .hi = 8),
      MM_OPTION(U64, "context", &a.context, "N",
                "tokens that each of them holds (1024, 512 for drafts), of the prompt (131072 for attention)", .lo = 1, .hi = 1 << 20),
      MM_OPTION(U64, "tokens", &a.tokens, "N", "of a prefill step (8192), of a prefill chunk (512 for mixed, 8192 for attention)", .lo = 1,
                .hi = 1 << 20),
      MM_OPTION(U64, "steps", &a.steps, "N", "decode steps that count (64)", .lo = 5, .hi = 100000),
      MM_OPTION(STR, "draft", &a.draft, "KIND", "of draft for drafts (dflash)", .choices = "dflash|eagle3"),
      MM_OPTION(STR, "draft-quant", &a.draft_quant, "SCHEME", "of its matrices (none: BF16)", .choices = "none|" MM_DFLASH_QUANTS),
      MM_OPTION(STR, "device", &a.device, "NAME", "where to compute (cuda)", .choices = "cpu|cuda"),
      MM_OPTION_THREADS(&a.threads),
      MM_OPTION(U64, "shrink", &a.shrink, "N", "divide widths and experts of the shapes, to try this on a small machine (1)", .lo = 1,
                .hi = 64),
      MM_FLAG("json", &a.json, "every result as a line of JSON; errors as JSON"),
      MM_FLAG("quiet", &a.quiet, "nothing on stderr but errors, as always here", .letter = 'q'),
  };
  const mm_program program = {
      MM_PROGRAM("minimax-bench", "time layers of real size on a GPU, compared with its copy rate", SUBJECTS, 1, 1, options),
      .examples = examples,
      .epilog = epilog,
      .other = &mm_load_test_program,
  };
  return mm_program_main(&program, argc, argv, &a.subject, bench_all, &a);
}
