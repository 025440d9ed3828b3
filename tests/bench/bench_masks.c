/* Masks of constrained replies at 200,064 ids (large_tokenizer.h): microseconds a mask over replies of noise to the everyday schemas
 * (tests/data/schemas.json), what opening a constraint and a short reply take, and steps of 64 requests, each of which takes one token and
 * makes one mask. bench_masks [TOKENS [ROUNDS]]: of a reply, at most; of each figure. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/body.h"
#include "runtime/constrain/constraint.h"
#include "runtime/constrain/schema.h"
#include "tests/bench/large_tokenizer.h"

enum { SHORT = 12, STREAMS = 64, FORMS = 64 };

typedef struct bench {
  mm_tokenizer *tokenizer;
  mm_lexicon *lexicon;
  int32_t end;
  const mm_form *form[FORMS];
  const char *name[FORMS];
  size_t forms;
  int32_t *list; /* [LARGE_VOCAB] */
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
  double began = mm_now(), whole = 0;
  mm_constraint *c = open_one(b, form);
  for (int i = 0; i < tokens; i++) {
    const double mask_began = mm_now();
    const uint32_t *mask = mm_constraint_allowed(c);
    const double now = mm_now();
    if (masks) record(b, now - mask_began);
    whole += now - began;
    const int32_t id = pick(b, mask);
    began = mm_now();
    if (id == b->end) break;
    mm_constraint_chosen(c, id);
  }
  mm_constraint_close(c);
  return whole + mm_now() - began;
}

/* Steps of STREAMS requests, each with a schema of its own; a reply that ends is followed by another. */
static void steps(bench *b, int count) {
  mm_constraint *c[STREAMS];
  int32_t id[STREAMS];
  for (size_t i = 0; i < STREAMS; i++) {
    c[i] = open_one(b, i % b->forms);
    id[i] = pick(b, mm_constraint_allowed(c[i]));
  }
  for (int k = 0; k < count; k++) {
    double took = 0;
    for (size_t i = 0; i < STREAMS; i++) {
      const double began = mm_now();
      if (id[i] == b->end) {
        mm_constraint_close(c[i]);
        c[i] = open_one(b, below(b, (uint32_t)b->forms));
      } else {
        mm_constraint_chosen(c[i], id[i]);
      }
      const uint32_t *mask = mm_constraint_allowed(c[i]);
      took += mm_now() - began;
      id[i] = pick(b, mask);
    }
    record(b, took);
  }
  for (size_t i = 0; i < STREAMS; i++) mm_constraint_close(c[i]);
}

static void open_forms(bench *b, mm_arena *a) {
  mm_err err = {0};
  size_t n;
  const char *text = mm_file_slurp("tests/data/schemas.json", UINT64_C(1) << 20, &n, &err);
  const mm_value *corpus = text ? mm_body_parse(a, text, n, &err) : NULL;
  if (!corpus) die(&err);
  for (const mm_value *v = corpus->first; v && b->forms < FORMS; v = v->next) {
    mm_err refused = {0};
    b->form[b->forms] = mm_schema_compile(a, mm_value_get(v, "schema"), "json_schema", &refused);
    b->name[b->forms] = mm_value_shown(mm_value_get(v, "name"));
    b->forms += b->form[b->forms] != NULL;
  }
}

static void open_tokenizer(bench *b) {
  char json[] = "/tmp/bench-masks-XXXXXX";
  mm_err err = {0};
  const int fd = mkstemp(json);
  if (fd < 0 || close(fd) != 0 || !large_tokenizer_write(json, "tests/data/tiny-m2/tokenizer.json")) exit(5);
  b->tokenizer = mm_tokenizer_open(json, LARGE_VOCAB, &err);
  unlink(json);
  b->end = 0; /* the byte of zero, which no text has */
  const double began = mm_now();
  if (!b->tokenizer || !(b->lexicon = mm_lexicon_open(b->tokenizer, LARGE_VOCAB, &b->end, 1, &err))) die(&err);
  printf("lexicon of %d ids: %.0f ms\n", LARGE_VOCAB, 1e3 * (mm_now() - began));
}

int main(int argc, char **argv) {
  static bench b = {.seed = UINT64_C(0x2545f4914f6cdd1d)};
  mm_arena a = {0};
  const int tokens = argc > 1 ? atoi(argv[1]) : 200, rounds = argc > 2 ? (int)mm_max(1, strtoul(argv[2], NULL, 10)) : 20;
  open_tokenizer(&b);
  open_forms(&b, &a);
  b.list = calloc(LARGE_VOCAB, sizeof *b.list);
  if (!b.list || !b.forms) return 8;
  for (int k = 0; k < rounds; k++)
    for (size_t i = 0; i < b.forms; i++) reply(&b, i, tokens, true);
  print(&b, "masks of long replies");
  for (int k = 0; k < rounds; k++)
    for (size_t i = 0; i < b.forms; i++) {
      const double began = mm_now();
      mm_constraint_close(open_one(&b, i));
      record(&b, mm_now() - began);
    }
  print(&b, "constraints opened and closed");
  for (int k = 0; k < rounds; k++)
    for (size_t i = 0; i < b.forms; i++) record(&b, reply(&b, i, SHORT, false));
  print(&b, "whole replies of at most 12 tokens");
  steps(&b, 20 * rounds);
  print(&b, "steps of 64 requests");
  mm_lexicon_close(b.lexicon);
  mm_tokenizer_close(b.tokenizer);
  mm_arena_close(&a);
  free(b.list);
  free(b.took);
  return 0;
}
