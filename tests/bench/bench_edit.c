/* A reply that repeats most of a file, as in code editing: how many tokens the steps of one sequence give with prompt lookup, and how much
 * faster they are than plain steps, by times of steps that another run measured (`minimax-bench drafts`, less the draft's pass).
 *
 * bench_edit FILE OTHER [PLAIN_US ROWS_US...]: the prompt is FILE; the reply is FILE where hunks of three lines, one line in five in all,
 * are lines of OTHER. A token is a word, a run of blanks or one other character. PLAIN_US: a step of one token, queued ahead; ROWS_US:
 * steps of 1 to 8 rows of the sequence that are waited for. Without times a step of n rows takes as long as a plain one (what is right of
 * the proposals bounds it). Proposals, their number and the decision whether to make them are the scheduler's; its clock is that of the
 * times. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/scheduler_inside.h"

enum { HUNK = 3, OF = 15, VOCAB = 200000, ROWS = MM_DRAFTS + 1 };

typedef struct text {
  int32_t *token;
  uint32_t count;
  size_t cap;
} text;

static void must(bool ok, const mm_err *err) {
  if (ok) return;
  fprintf(stderr, "bench_edit: %s\n", err->text);
  exit(3);
}

static void add(text *t, int32_t id) {
  mm_err err = {0};
  must(MM_GROW(t->token, &t->cap, t->count + 1, &err), &err);
  t->token[t->count++] = id;
}

/* Tokens of bytes [s, s + n): ids by a hash of each piece. */
static void add_pieces(text *t, const char *s, size_t n) {
  for (size_t i = 0, end; i < n; i = end) {
    uint64_t hash = UINT64_C(14695981039346656037);
    const bool word = isalnum((unsigned char)s[i]) || s[i] == '_', blank = s[i] == ' ';
    for (end = i + 1; end < n && ((word && (isalnum((unsigned char)s[end]) || s[end] == '_')) || (blank && s[end] == ' '));) end++;
    for (size_t k = i; k < end; k++) hash = (hash ^ (unsigned char)s[k]) * UINT64_C(1099511628211);
    add(t, (int32_t)(hash % VOCAB));
  }
}

static char *read_all(const char *path) {
  mm_err err = {0};
  FILE *f = fopen(path, "rb");
  char *bytes = NULL;
  size_t cap = 0, n = 0, got;
  if (!f) {
    fprintf(stderr, "bench_edit: %s: cannot be opened\n", path);
    exit(3);
  }
  do {
    must(MM_GROW(bytes, &cap, n + 65536, &err), &err);
    n += got = fread(bytes + n, 1, 65535, f);
  } while (got);
  fclose(f);
  bytes[n] = 0;
  return bytes;
}

/* The next line of a text, its end with it; from its beginning again where it ends. */
static const char *next_line(const char *all, size_t *at, size_t *length) {
  if (!all[*at]) *at = 0;
  const char *line = all + *at, *end = strchr(line, '\n');
  *length = end ? (size_t)(end - line) + 1 : strlen(line);
  *at += *length;
  return line;
}

/* The prompt into t, then the reply; returns the prompt's tokens. */
static uint32_t make_text(text *t, const char *file, const char *other, uint32_t *repeated) {
  size_t length, at = 0, place = 0;
  add_pieces(t, file, strlen(file));
  const uint32_t prompt = t->count;
  *repeated = 0;
  for (uint32_t line = 0; file[at]; line++) {
    const uint32_t before = t->count;
    const char *old = next_line(file, &at, &length);
    const bool edited = line % OF < HUNK;
    if (edited) old = next_line(other, &place, &length);
    add_pieces(t, old, length);
    if (!edited) *repeated += t->count - before;
  }
  return prompt;
}

typedef struct figures {
  uint64_t steps, rows[ROWS + 1];
  double plain, with; /* seconds of all tokens: one by one; as the scheduler has them */
} figures;

/* One step of the job, whose reply is the text's. Returns its seconds. */
static double one_step(mm_scheduler *s, job *j, const text *t, const double *row_s, double plain_s, double now, figures *f) {
  s->own.steps++;
  s->draft.wanted = mm_drafts_wanted(s);
  const uint32_t left = t->count - j->count, drafts = (uint32_t)mm_min(mm_drafts_find(s, j, MM_DRAFTS), left - 1);
  const double took = s->draft.wanted ? row_s[1 + drafts] : plain_s;
  uint32_t right = 0;
  while (right < drafts && j->draft[right] == t->token[j->count + right]) right++;
  if (drafts) mm_drafts_judge(s, j, drafts, right);
  const step done = {.began = now, .decoders = 1, .drafted = s->draft.wanted, .copies = drafts && j->lookup.long_match};
  mm_drafts_measure(s, &done, 1 + right, now + took);
  f->steps++, f->rows[1 + drafts]++;
  j->count += 1 + right;
  j->fed = j->count - 1;
  mm_drafts_look(s, j);
  return took;
}

static void replay(const text *t, uint32_t prompt, double plain_s, const double *row_s, figures *f) {
  mm_err err = {0};
  job j = {.token = t->token, .count = prompt + 1, .fed = prompt, .lookup.acceptance = {1, 1}};
  job *slot[1] = {&j};
  mm_scheduler s = {.slots = 1, .slot = slot, .c.drafts = MM_DRAFTS};
  j.r = (mm_request){.prompt_count = prompt, .max_tokens = t->count - prompt + 9, .drafts = MM_DRAFTS};
  must(mm_drafts_open(&s, &err), &err);
  while (j.count < t->count) f->with += one_step(&s, &j, t, row_s, plain_s, 1 + f->with, f);
  f->plain = plain_s * (double)(t->count - prompt - 1);
  mm_gram_index_close(&j.grams);
  mm_drafts_close(&s);
}

int main(int argc, char **argv) {
  double plain_s = 1, row_s[ROWS + 1];
  for (int i = 0; i <= ROWS; i++) row_s[i] = 1;
  if (argc != 3 && argc != 4 + ROWS) return fprintf(stderr, "usage: bench_edit FILE OTHER [PLAIN_US ROWS_US, 8 of these]\n"), 2;
  if (argc > 3) plain_s = strtod(argv[3], NULL) * 1e-6;
  for (int i = 0; argc > 3 && i < ROWS; i++) row_s[1 + i] = strtod(argv[4 + i], NULL) * 1e-6;
  char *file = read_all(argv[1]), *other = read_all(argv[2]);
  text t = {0};
  uint32_t repeated;
  const uint32_t prompt = make_text(&t, file, other, &repeated), reply = t.count - prompt;
  figures f = {0};
  replay(&t, prompt, plain_s, row_s, &f);
  printf("reply of %u tokens, %.2f of them in lines that the prompt has: %.2f tokens a step, %.2f x plain; steps of", reply,
         (double)repeated / reply, (double)(reply - 1) / (double)f.steps, f.plain / f.with);
  for (int i = 1; i <= ROWS; i++) printf(" %d %s: %llu%s", i, i > 1 ? "rows" : "row", (unsigned long long)f.rows[i], i < ROWS ? "," : "\n");
  MM_FREE(file, other, t.token);
  return 0;
}
