/* reshaped DIR GROUPS DIRECT [ONE]: a checkpoint with groups of attention, opened for GROUPS of them, is DIRECT, which was converted for so
 * many: cuts, cells and every byte of every rank, and the logits of both, to the bit. Logits of ONE, cut otherwise, are near. Prints what
 * was compared; exit status 1 where something differs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loader/bind.h"
#include "runtime/engine/engine.h"

#define LIMIT 2e-4 /* of golden.c: between logits of different cuts */
enum { LENGTH = 90, SLOTS = 3, STEPS = 12 };

static void die(const char *what, const mm_err *err) {
  fprintf(stderr, "reshaped: %s: %s\n", what, err ? err->text : "differs");
  exit(1);
}

/* ---- bytes ---- */

static void same_pieces(const mm_pack *a, const mm_pack *b, const mm_pack_tensor *x, const mm_pack_tensor *y) {
  for (unsigned k = 0; k < x->piece_count; k++) {
    const mm_piece *u = &x->piece[k], *v = &y->piece[k];
    const mm_cut *c = &a->cut[u->cut], *d = &b->cut[v->cut];
    const bool cut = c->axis == d->axis && c->whole == d->whole && c->local == d->local &&
                     (c->axis == MM_AXIS_NONE || memcmp(c->rank, d->rank, a->tp * sizeof *c->rank) == 0);
    if (!cut || u->rows != v->rows || u->local_at != v->local_at || u->local_rows != v->local_rows) die(x->name, NULL);
  }
}

static size_t same_planes(const mm_shards *a, const mm_shards *b, size_t i) {
  const mm_pack_tensor *x = &a->pack.tensor[i];
  size_t bytes = 0;
  for (uint32_t r = 0; r < mm_pack_ranks(&a->pack); r++) {
    if (!mm_pack_holds(&a->pack, x, r)) continue;
    const mm_packed u = mm_shards_tensor(a, r, i), v = mm_shards_tensor(b, r, i);
    if (u.n != v.n || u.k != v.k || u.lead != v.lead || u.first_k != v.first_k || u.whole_k != v.whole_k || u.cut_k != v.cut_k)
      die(x->name, NULL);
    for (unsigned p = 0; p < x->plane_count; p++) {
      const size_t n = u.lead * mm_plane_elements(u.n, u.k, u.cell[p]) * mm_dtype_size(x->plane[p].dtype);
      if (u.cell[p].n != v.cell[p].n || u.cell[p].k != v.cell[p].k || memcmp(u.plane[p], v.plane[p], n) != 0) die(x->name, NULL);
      bytes += n;
    }
  }
  return bytes;
}

static size_t same_shards(const mm_shards *a, const mm_shards *b) {
  const mm_pack *p = &a->pack, *q = &b->pack;
  size_t bytes = 0;
  if (p->tensor_count != q->tensor_count || p->attn_tp != q->attn_tp || p->tp != q->tp) die("shape", NULL);
  for (size_t i = 0; i < p->tensor_count; i++) {
    const mm_pack_tensor *x = &p->tensor[i], *y = &q->tensor[i];
    if (strcmp(x->name, y->name) != 0 || x->rows != y->rows || x->cols != y->cols || x->piece_count != y->piece_count) die(x->name, NULL);
    same_pieces(p, q, x, y);
    bytes += same_planes(a, b, i);
  }
  return bytes;
}

/* ---- logits ---- */

/* Prompts of three sequences in one step, then single tokens of all. logits[rows, vocab] of all steps. */
static float *run(const mm_shards *s, size_t *rows) {
  mm_err err = {0};
  const mm_engine_config c = {
      .ops = &mm_ops_cpu, .limits = {.max_tokens = SLOTS * LENGTH, .slots = SLOTS, .max_positions = LENGTH + STEPS}, .options.threads = 1};
  mm_engine *e = mm_engine_open(s, &c, &err);
  if (!e) die("open", &err);
  const uint32_t vocab = mm_engine_model(e)->vocab;
  static int32_t id[SLOTS * LENGTH];
  static uint32_t out[SLOTS * LENGTH];
  float *all = malloc((SLOTS * LENGTH + SLOTS * STEPS) * (size_t)vocab * sizeof *all);
  *rows = 0;
  for (uint32_t step = 0; all && step <= STEPS; step++) {
    mm_span span[SLOTS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
      const uint32_t count = step ? 1 : LENGTH - 40 * i, pos = step ? LENGTH - 40 * i + step - 1 : 0;
      span[i] = (mm_span){(int32_t)i, n, count, pos};
      for (uint32_t k = 0; k < count; k++, n++)
        out[n] = n, id[n] = (int32_t)((i * 131 + (pos + k) * 29 + (pos + k) * (pos + k) % 7) % vocab);
    }
    const mm_batch b = {n, id, SLOTS, span, n, out, NULL, NULL};
    if (!mm_engine_step(e, &b, all + *rows * vocab, &err)) die("step", &err);
    *rows += n;
  }
  mm_engine_close(e);
  return all;
}

static double furthest(const float *a, const float *b, size_t n) {
  double most = 0;
  for (size_t i = 0; i < n; i++) {
    const double d = fabs((double)a[i] - b[i]);
    if (!(d <= most)) most = isnan(d) ? INFINITY : d;
  }
  return most;
}

int main(int argc, char **argv) {
  mm_shards a, b, one;
  mm_err err = {0};
  if (argc < 4) return fprintf(stderr, "usage: reshaped DIR GROUPS DIRECT [ONE]\n"), 2;
  if (!mm_shards_open(&a, argv[1], &err) || !mm_shards_regroup(&a, (uint32_t)strtoul(argv[2], NULL, 10), &err)) die(argv[1], &err);
  if (!mm_shards_open(&b, argv[3], &err)) die(argv[3], &err);
  const size_t bytes = same_shards(&a, &b), vocab = a.pack.model.vocab;
  size_t rows, other;
  float *x = run(&a, &rows), *y = run(&b, &other), *z = NULL;
  if (!x || !y || memcmp(x, y, rows * vocab * sizeof *x) != 0) die("logits", NULL);
  double most = 0;
  if (argc > 4) {
    if (!mm_shards_open(&one, argv[4], &err)) die(argv[4], &err);
    if (!(z = run(&one, &other)) || !((most = furthest(x, z, rows * vocab)) <= LIMIT)) die("logits of one rank", NULL);
    mm_shards_close(&one);
  }
  printf("%zu bytes on %u ranks (%zu copied) and %zu rows of logits are those of the conversion; from one rank %.1e\n", bytes,
         mm_pack_ranks(&a.pack), a.copied_bytes, rows, most);
  MM_FREE(x, y, z);
  mm_shards_close(&a);
  mm_shards_close(&b);
  return 0;
}
