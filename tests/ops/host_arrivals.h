/* Weights that arrive while steps run, for host.c, in which this stands: what comes in time, and files that are damaged meanwhile. */
#ifndef MM_TESTS_HOST_ARRIVALS_H
#define MM_TESTS_HOST_ARRIVALS_H

static uint32_t below(uint32_t n);

/* The experts that the router's kernel would select, by list_used: one or two, or all. */
static uint32_t listed, lists;
static void choose_some(const char *name, void **args) {
  if (!strstr(name, "list_used")) return;
  listed = below(8) ? 1u << below(8) | 1u << below(8) : 255, lists++;
  *(uint32_t *)*(void **)args[1] = listed;
}

static const char *find_arena(void) { /* the largest block */
  uint32_t most = 0;
  for (uint32_t i = 1; i < fake.blocks; i++)
    if (fake.block[i].bytes > fake.block[most].bytes) most = i;
  return fake.block[most].at;
}

/* Where the experts of bf16 lie in the arena, by what is in it once all is there. */
enum { MOST_LAYERS = 16 };
static size_t place[MOST_LAYERS][2];
static uint32_t layer_of_step, wrong_experts, learns;
static size_t find_place(const mm_packed *w) {
  const char *const base = find_arena();
  for (size_t at = 0;; at += 256)
    if (memcmp(base + at, w->plane[0], (size_t)w->n * w->k * 2) == 0) return at;
}

static void watched_experts(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2) {
  const mm_packed *both[] = {w13, w2};
  listed = 255;
  mm_ops_cuda.experts(b, y, x, w13, w2);
  for (int k = 0; k < 2; k++) {
    const mm_packed *w = both[k];
    const size_t each = (size_t)w->n * w->k * 2;
    if (learns) place[layer_of_step][k] = find_place(w);
    for (uint32_t e = 0; e < w->lead; e++)
      if (listed >> e & 1)
        wrong_experts += memcmp(find_arena() + place[layer_of_step][k] + e * each, (const char *)w->plane[0] + e * each, each) != 0;
  }
}
static void watched_layer(mm_backend *b, uint32_t l) {
  layer_of_step = l;
  mm_ops_cuda.weights.layer(b, l);
}

static mm_engine *open_watched(const mm_shards *shards, mm_err *err) {
  static mm_ops watched;
  watched = mm_ops_cuda, watched.experts = watched_experts, watched.weights.layer = watched_layer;
  fake.ranks = 1, fake.wrong[0] = 0, fake.copied = 0;
  const mm_engine_config c = {.ops = &watched, .limits = {4, SLOTS, 64, 7}, .options.threads = 1, .options.eager = true};
  return mm_engine_open(shards, &c, err);
}

/* Steps while the weights of many files arrive slowly: each expert that a step uses is there when it is launched, and the first step does
 * not wait for the others. */
static void check_arriving(const mm_shards *shards) {
  mm_err err = {0};
  uint64_t all = 0, first = 0;
  uint32_t announced = 0, early = 0;
  bool ok = true;
  wrong_experts = 0;
  for (int run = 0; ok && run < 6; run++) {
    mm_engine *e = open_watched(shards, &err);
    learns = run == 0;
    ok = e && (run || mm_engine_warm(e, (const uint32_t[]){1}, 1, &err));
    fake.on_launch = choose_some, lists = 0;
    for (int i = 0; ok && i < 8; i++) {
      ok = step(e, 1 + below(4), false, &err);
      if (i == 0) first = fake.copied, early += run && first < all;
      if (run == 0) all = first, fake.copy_us = 10000;
    }
    fake.on_launch = NULL, announced += lists;
    mm_engine_close(e);
  }
  fake.copy_us = 0;
  char what[200];
  snprintf(what, sizeof what,
           "experts are there when they are used: %u steps' layers announced, %u of 5 first steps before the end, the last with %.0f %%",
           announced, early, 100 * (double)first / (double)all);
  report(what, ok && !wrong_experts && announced > 5 && early > 0, ok ? "some were not, or all had come" : err.text);
  close_engine(NULL, "its calls and its memory");
}

/* A file that is cut, or written to, while it is loaded: a step says so in time, and so does every later one. */
static void check_bad_file(const char *dir, bool cut) {
  mm_err err = {0}, again = {0};
  mm_shards shards = {0};
  char path[600];
  if (!mm_shards_open(&shards, dir, &err)) {
    report("a checkpoint of many files", false, err.text);
    return;
  }
  const mm_rank_parts *rank = &shards.pack.rank[0];
  snprintf(path, sizeof path, "%s/%s", dir, rank->part[rank->part_count - 1].file);
  fake.copy_us = 30000;
  mm_engine *e = open_engine(&shards);
  const double from = now();
  const int fd = open(path, O_RDWR);
  char byte;
  const uint64_t size = rank->part[rank->part_count - 1].size;
  bool ok = e && fd >= 0 && pread(fd, &byte, 1, 0) == 1 && (cut ? ftruncate(fd, (off_t)size / 2) : pwrite(fd, &byte, 1, 0) - 1) == 0;
  bool done = ok;
  while (done && now() - from < 5) done = step(e, 1, false, &err);
  const double took = now() - from;
  ok = ok && !done && !step(e, 1, false, &again) && strcmp(err.code, again.code) == 0 && strstr(err.text, path);
  ok = ok && (strcmp(err.code, "E_CHANGED") == 0 || (cut && strcmp(err.code, "E_SHORT_READ") == 0));
  char what[100];
  snprintf(what, sizeof what, "a file %s while it is loaded is named in %.1f s", cut ? "cut" : "written to", took);
  report(what, ok && took < 5, err.text);
  fake.copy_us = 0;
  close_engine(e, "its calls and its memory");
  if (fd >= 0) close(fd);
  mm_shards_close(&shards);
}

static uint32_t in_logs;                                      /* of such failures */
static bool names_path(const mm_err *err, const char *path) { /* as the reader found it, or who looked at the file itself */
  return strstr(err->text, path) && (strcmp(err->code, "E_CHANGED") == 0 || strcmp(err->code, "E_SHORT_READ") == 0);
}

/* The same of one rank's file, of ranks in one stage or in two, on one device or on two. The other rank's weights come slowly to a device
 * of its own: nobody waits for those, neither in a step, nor at its choices, nor where all are waited for. Cut before the engine opens, the
 * file may be reported by that. */
static void check_bad_rank(const char *dir, bool shared, bool early) {
  static const char *const ways[] = {"a step", "who waits for all", "choices"};
  static const uint32_t device[] = {0, 1, 0, 0};
  mm_err err = {0}, logged = {0};
  mm_shards shards = {0};
  char path[600], what[200];
  if (!mm_shards_open(&shards, dir, &err)) {
    report("a checkpoint of two ranks in many files", false, err.text);
    return;
  }
  const uint32_t of = below(2), way = below(shards.pack.pp > 1 ? 2 : 3);
  const mm_rank_parts *rank = &shards.pack.rank[of];
  snprintf(path, sizeof path, "%s/%s", dir, rank->part[rank->part_count - 1].file);
  const size_t size = rank->part[rank->part_count - 1].size, cut = size / 2;
  char *rest = malloc(size - cut);
  fake.wrong[0] = 0, fake.ranks = shards.pack.tp, fake.graphs = 0, fake.slow_device = shared ? -1 : (int)(1 - of);
  fake.copy_us = early ? below(60) * 1000 : 100000 + below(60) * 1000;
  mm_read_log *log = mm_read_log_open(&err);
  const mm_engine_config c = {
      .ops = &mm_ops_cuda, .limits = {ROWS, SLOTS, POSITIONS, 7}, .options.threads = 1, .device = device + 2 * shared, .log = log};
  const int fd = open(path, O_RDWR);
  bool done = fd >= 0 && pread(fd, rest, size - cut, (off_t)cut) == (ssize_t)(size - cut) && (!early || ftruncate(fd, (off_t)cut) == 0);
  double from = now();
  mm_engine *e = done ? mm_engine_open(&shards, &c, &err) : NULL;
  done = e && (early || ftruncate(fd, (off_t)cut) == 0);
  if (!early) from = now();
  if (done && way == 1) done = mm_engine_finish_load(e, &err);
  const mm_sampling greedy = {.top_p = 1};
  const mm_batch batch = {1, (const int32_t[]){5}, 1, &(mm_span){0, 0, 1, 0}, 1, (const uint32_t[]){0}, &greedy, NULL};
  while (done && now() - from < 5)
    done = way == 2 ? mm_engine_queue(e, &batch, &err) && mm_engine_collect(e, &(int32_t){0}, &err) : step(e, 1, false, &err);
  const double took = now() - from;
  mm_err again = {0};
  const bool stays = !e || (!step(e, 2, false, &again) && names_path(&again, path));
  bool reported = false;
  for (int i = 0; e && i < 100 && !(reported = mm_read_log_failed(log, &logged)); i++)
    usleep(10000); /* a step may look before the load does */
  const bool named = names_path(&err, path) && (!reported || names_path(&logged, path));
  in_logs += reported;
  snprintf(what, sizeof what, "a file of rank %u of %s cut %s is named in %.1f s, by %s, on %s", of,
           shards.pack.pp > 1 ? "two stages" : "two", early ? "before it is loaded" : "while it is loaded", took, e ? ways[way] : "opening",
           shared ? "one device" : "two");
  const bool mended = pwrite(fd, rest, size - cut, (off_t)cut) == (ssize_t)(size - cut);
  report(what, !done && named && stays && took < 5 && mended, stays ? err.text : again.text);
  fake.copy_us = 0, fake.slow_device = -1;
  close_engine(e, "its calls and its memory");
  mm_read_log_close(log);
  if (fd >= 0) close(fd);
  free(rest);
  mm_shards_close(&shards);
}

#endif
