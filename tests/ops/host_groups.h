/* Two groups of attention of one rank each (--attn-tp 1). Part of host.c. */
#ifndef MM_TESTS_HOST_GROUPS_H
#define MM_TESTS_HOST_GROUPS_H

/* Of a kernel of rows between groups, its rows by group as both ranks launch it; they must agree. */
static uint32_t rows_of_group[2][2], exchanges[2];
static void note_rows(const char *name, void **args) {
  const bool combines = strstr(name, "_rows_combine"), codes = strstr(name, "share_rows_codes");
  if (!combines && !codes && !strstr(name, "rows_few") && !strstr(name, "rows_many")) return;
  const uint32_t *first = args[1 + combines]; /* a row_job, and one of codes, begins with mm_cu_group_rows (peers.h) */
  const int rank = fake_device == 1;
  pthread_mutex_lock(&fake.lock);
  rows_of_group[rank][0] = first[1], rows_of_group[rank][1] = first[2] - first[1];
  exchanges[rank]++;
  pthread_mutex_unlock(&fake.lock);
}

/* So many single tokens of slots of each group, and a prompt of slot 0; every row is an output. */
static bool rows_step(mm_engine *e, const uint32_t n[2], uint32_t prompt, mm_err *err) {
  static int32_t id[ROWS];
  static mm_span span[SLOTS];
  static uint32_t out[ROWS];
  uint32_t rows = 0, spans = 0;
  for (uint32_t k = 0; k < 2; k++)
    for (uint32_t i = 0; i < n[k]; i++, rows++) span[spans++] = (mm_span){(int32_t)(2 * (i + (prompt && k == 0)) + k), rows, 1, 0};
  if (prompt) span[spans++] = (mm_span){0, rows, prompt, 0}, rows += prompt;
  for (uint32_t i = 0; i < rows; i++) id[i] = (int32_t)i, out[i] = i;
  fake.on_launch = note_rows;
  const bool done = mm_engine_step(e, &(mm_batch){rows, id, spans, span, rows, out, NULL, NULL}, logits, err);
  fake.on_launch = NULL;
  return done && memcmp(rows_of_group[0], rows_of_group[1], sizeof rows_of_group[0]) == 0;
}

/* Both ranks launch the same rows of each group, padded where the step may be recorded, a row for a group without any. */
static void check_rows(const mm_shards *shards) {
  static const struct {
    uint32_t n[2], prompt, want[2];
  } step_of[] = {{{1, 1}, 0, {1, 1}},   {{2, 0}, 0, {2, 2}},   {{0, 1}, 0, {1, 1}}, {{2, 1}, 0, {2, 2}},
                 {{0, 0}, 70, {70, 1}}, {{1, 1}, 40, {41, 1}}, {{0, 2}, 9, {9, 2}}, {{0, 0}, ROWS, {ROWS, 1}}};
  mm_err err = {0};
  mm_engine *e = open_engine(shards);
  if (!e) return;
  bool ok = mm_engine_warm(e, (const uint32_t[]){1}, 1, &err); /* all weights are there */
  for (size_t i = 0; ok && i < sizeof step_of / sizeof *step_of; i++) {
    exchanges[0] = exchanges[1] = 0;
    ok = rows_step(e, step_of[i].n, step_of[i].prompt, &err);
    const bool replayed = exchanges[0] == 0; /* of a graph nothing is launched */
    ok = ok && exchanges[0] == exchanges[1] && (replayed || memcmp(rows_of_group[0], step_of[i].want, sizeof step_of[i].want) == 0);
    if (!ok) snprintf(err.text, sizeof err.text, "step %zu: rows %u and %u", i, rows_of_group[0][0], rows_of_group[0][1]);
  }
  report("groups: both ranks have the same rows of each", ok && fake.graphs > 0, err.text);
  close_engine(e, "its calls and its memory");
}

/* Steps whose tokens the device samples, up to two outstanding: of one group or both, with options that some rows have, at once or after
 * the pass. All ranks launch and meet alike, or a test hangs. */
static void check_sampled(const mm_shards *shards) {
  static const mm_bias bias = {1, 1};
  mm_err err = {0};
  mm_engine *e = open_engine(shards);
  if (!e) return;
  bool ok = mm_engine_warm(e, (const uint32_t[]){1, 2}, 2, &err);
  mm_logprob logprobs[SLOTS][1];
  int32_t id[SLOTS] = {0}, got[SLOTS];
  uint32_t outstanding = 0;
  for (uint32_t t = 1; ok && t < 64; t++) {
    mm_span span[SLOTS];
    uint32_t out[SLOTS], rows = 0;
    mm_sampling set[SLOTS] = {{0}};
    for (uint32_t s = 0; s < SLOTS; s++) {
      if (!(t % 16 >> s & 1)) continue;
      set[rows].top_p = 1, set[rows].temperature = t / 16 & 1;
      if (t / 16 == 2 && s == 1) set[rows].bias = &bias, set[rows].bias_count = 1;
      if (t / 16 == 3 && s == 0) set[rows].logprobs = logprobs[s];
      span[rows] = (mm_span){(int32_t)s, rows, 1, 0}, out[rows] = rows, rows++;
    }
    const mm_batch b = {rows, id, rows, span, rows, out, set, NULL};
    ok = rows == 0 || (t % 3 ? mm_engine_queue(e, &b, &err) : mm_engine_forward(e, &b, &err) && mm_engine_sample(e, set, &err));
    outstanding += rows > 0;
    for (; ok && outstanding > t % 2; outstanding--) ok = mm_engine_collect(e, got, &err);
  }
  for (; ok && outstanding; outstanding--) ok = mm_engine_collect(e, got, &err);
  report("groups: tokens sampled on the device", ok && mm_engine_queues(e), err.text);
  for (uint32_t s = 0; s < SLOTS; s++) mm_engine_drop(e, s); /* a group has four pages */
  report("groups: pages moved, also from one to the other", ok && move_pages(e, &err), err.text);
  close_engine(e, "its calls and its memory");
}

static int check_groups(const char *dir) {
  mm_err err = {0};
  mm_shards two = {0};
  if (!mm_shards_open(&two, dir, &err)) return fprintf(stderr, "host: %s\n", err.text), 1;
  logits = calloc((size_t)ROWS * two.pack.model.vocab, sizeof *logits);
  check_rows(&two), check_sampled(&two);
  check_steps(&two, "steps of two groups");
  check_memory(&two, false, false, "memory of two groups");
  fake.no_peers = true, check_steps(&two, "steps of two groups through host memory"), fake.no_peers = false;
  for (int i = 0; i < 2; i++) check_failing(&two, 1, i);
  free(logits);
  mm_shards_close(&two);
  printf("%d failure(s)\n", failures);
  return failures > 0;
}

#endif
