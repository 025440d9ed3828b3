/* The checks behind minimax-verify. */
#include "loader/verify.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/file.h"
#include "formats/system/pool.h"

/* --- digests --- */

typedef struct mm_block_job {
  const mm_shards *s;
  mm_digest_block *block;
} mm_block_job;

/* The names of the tensors that a block of a part touches. */
static void tensors_in(const mm_shards *s, uint32_t rank, uint32_t part, uint64_t from, uint64_t end, mm_name_list *out) {
  for (size_t i = 0; i < s->pack.tensor_count; i++)
    for (unsigned j = 0; j < s->pack.tensor[i].plane_count; j++) {
      const mm_shard_plane *x = &s->rank[rank].plane[i * MM_PACK_PLANES + j];
      if (x->part != part || x->offset >= end || x->offset + x->bytes <= from) continue;
      mm_name_list_add(out, MM_FORMATTED(1024, "%s%s", s->pack.tensor[i].name, s->pack.tensor[i].plane[j].suffix));
    }
  if (out->used == 0) mm_name_list_add(out, "header");
}

/* One 4 MiB block of a part hashed and compared. MM_INTEGRITY E_DIGEST names file, offset, block and the tensors inside the block. */
static bool verify_block(const mm_shards *s, uint32_t rank, uint32_t part, size_t block, mm_err *err) {
  const mm_part *p = &s->pack.rank[rank].part[part];
  uint64_t at = block * MM_HASH_BLOCK, n = mm_min(MM_HASH_BLOCK, p->size - at);
  const mm_digest d = mm_sha256(s->rank[rank].map[part].data + at, n);
  if (mm_digest_equal(&d, &p->block[block])) return true;
  mm_name_list names = {0};
  tensors_in(s, rank, part, at, at + n, &names);
  const mm_path path = mm_path_of(s->pack.dir, p->file);
  return mm_fail(err, MM_INTEGRITY, "E_DIGEST", mm_at_offset(path.text, NULL, at),
                 "found block %zu of %zu damaged, expected its digest in the manifest (%llu bytes; it holds: %s)", block, p->block_count,
                 (unsigned long long)n, names.text);
}

static bool check_block(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)worker;
  const mm_block_job *job = ctx;
  const mm_digest_block *b = &job->block[item];
  mm_pool_at(job->s->pack.rank[b->rank].part[b->part].file);
  return verify_block(job->s, b->rank, b->part, b->index, err);
}

size_t mm_verify_choose(const mm_pack *p, const mm_shards *s, uint32_t count, uint64_t seed, mm_digest_block *out) {
  size_t n = 0;
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++)
    for (uint32_t i = 0; (!s || s->rank[r].plane) && i < p->rank[r].part_count; i++) {
      uint64_t blocks = p->rank[r].part[i].block_count, wanted = mm_min(count, blocks);
      for (uint64_t k = 0; k < wanted; k++, n++) {
        uint64_t from = k * blocks / wanted, end = (k + 1) * blocks / wanted;
        if (out) out[n] = (mm_digest_block){r, i, from + mm_scatter(seed ^ mm_scatter(n + 1)) % (end - from)};
      }
    }
  return n;
}

bool mm_verify_sample(const mm_shards *s, uint32_t count, uint64_t seed, unsigned threads, mm_err *err) {
  const size_t n = mm_verify_choose(&s->pack, s, count, seed, NULL);
  mm_block_job job = {.s = s, .block = mm_calloc(n, sizeof *job.block, err)};
  if (!job.block) return false;
  mm_verify_choose(&s->pack, s, count, seed, job.block);
  bool ok = mm_pool_run(threads, n, check_block, &job, err);
  free(job.block);
  return ok;
}

/* A sample of as many as there are is all of them. */
bool mm_verify_blocks(const mm_shards *s, unsigned threads, mm_err *err) { return mm_verify_sample(s, UINT32_MAX, 0, threads, err); }

/* --- digests of what is read --- */

bool mm_proof_open(mm_proof *p, const mm_shards *s, mm_err *err) {
  uint32_t ranks = mm_pack_ranks(&s->pack);
  size_t parts = 0;
  *p = (mm_proof){.s = s};
  p->first = mm_calloc((size_t)ranks + 1, sizeof *p->first, err);
  if (!p->first) return false;
  for (uint32_t r = 0; r < ranks; r++) p->first[r + 1] = parts += s->pack.rank[r].part_count;
  p->block = mm_calloc(parts ? parts : 1, sizeof *p->block, err);
  for (uint32_t r = 0; p->block && r < ranks; r++)
    for (size_t i = 0; i < s->pack.rank[r].part_count; i++)
      if (!(p->block[p->first[r] + i] = mm_calloc(s->pack.rank[r].part[i].block_count, sizeof **p->block, err))) return false;
  return p->block != NULL;
}

void mm_proof_close(mm_proof *p) {
  for (size_t i = 0; p->block && i < p->first[mm_pack_ranks(&p->s->pack)]; i++) free(p->block[i]);
  free(p->block);
  free(p->first);
  *p = (mm_proof){0};
}

bool mm_proof_range(const mm_proof *p, uint32_t rank, uint32_t part, uint64_t offset, uint64_t bytes, mm_err *err) {
  _Atomic bool *proven = p->block[p->first[rank] + part];
  for (uint64_t b = offset / MM_HASH_BLOCK; b * MM_HASH_BLOCK < offset + bytes; b++) {
    if (atomic_load_explicit(&proven[b], memory_order_relaxed)) continue; /* two threads at once prove it twice */
    if (!verify_block(p->s, rank, part, b, err)) return false;
    atomic_store_explicit(&proven[b], true, memory_order_relaxed);
  }
  return true;
}

/* --- numbers --- */

/* Scale j of a plane: the cell that it stands over has nothing but what fills up the rank. */
static bool is_padding(const mm_pack *p, const mm_pack_tensor *t, unsigned plane, uint32_t rank, uint64_t j) {
  uint64_t across = mm_cells(t->cols, t->plane[plane].cell_k), down = mm_cells(t->rows, t->plane[plane].cell_n);
  return !mm_pack_covers(p, t, plane, rank, (uint32_t)(j / across % down), (uint32_t)(j % across));
}

/* Plane `plane` of a tensor, by the part that holds it. */
static mm_where plane_at(const mm_shards *s, uint32_t rank, size_t tensor, unsigned plane) {
  const uint32_t part = s->rank[rank].plane[tensor * MM_PACK_PLANES + plane].part;
  return mm_at(s->pack.rank[rank].part[part].file, s->pack.tensor[tensor].name);
}

static bool check_scales(const mm_shards *s, const mm_packed *m, size_t tensor, uint32_t rank, mm_err *err) {
  const mm_pack *p = &s->pack;
  const mm_pack_tensor *t = &p->tensor[tensor];
  for (unsigned i = 0; i < t->plane_count; i++) {
    const mm_plane *scales = &m->scheme->plane[i];
    if (!scales->scale) continue;
    uint64_t count = (uint64_t)m->lead * mm_cells(m->n, m->cell[i].n) * mm_cells(m->k, m->cell[i].k);
    for (uint64_t j = 0; j < count; j++) {
      float v = mm_scale_value(scales->dtype, m->plane[i], j);
      if (!mm_zero_allowed(m->scheme, m->plane[i], j))
        return mm_fail(err, MM_INTEGRITY, "E_SCALE", plane_at(s, rank, tensor, i),
                       "found a word at element %llu that has more, expected a scale and a zero point of the codes", (unsigned long long)j);
      if (mm_scale_allowed(m->scheme, v) || (v == 0 && is_padding(p, t, i, rank, j))) continue;
      return mm_fail(err, MM_INTEGRITY, "E_SCALE", plane_at(s, rank, tensor, i), "found scale %g at element %llu, expected a %s number",
                     (double)v, (unsigned long long)j, m->scheme->signed_scale ? "finite nonzero" : "positive");
    }
  }
  return true;
}

/* Scales of a KV cache are plain numbers of the checkpoint, but engines divide by them. */
static bool is_kv_scale(const char *name) { return strstr(name, ".self_attn.attn.") && mm_ends_with(name, "_scale"); }

static bool check_tensor(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)worker;
  const mm_shards *s = ctx;
  uint32_t rank = (uint32_t)(item / s->pack.tensor_count);
  const size_t tensor = item % s->pack.tensor_count;
  if (!mm_pack_holds(&s->pack, &s->pack.tensor[tensor], rank) || !s->rank[rank].plane) return true;
  mm_pool_at(s->pack.tensor[tensor].name);
  mm_packed m = mm_shards_tensor(s, rank, tensor);
  if (!check_scales(s, &m, tensor, rank, err)) return false;
  const bool kv_scale = is_kv_scale(s->pack.tensor[tensor].name);
  uint32_t unit = (uint32_t)mm_min(m.n, mm_max(1, (UINT64_C(1) << 20) / m.k));
  float *row = mm_calloc((size_t)unit * m.k, sizeof *row, err);
  bool ok = row != NULL;
  for (uint32_t e = 0; ok && e < m.lead; e++)
    for (uint64_t at = 0; ok && at < m.n; at += unit) {
      uint32_t rows = (uint32_t)mm_min(unit, m.n - at);
      mm_unpack(&m, e, (uint32_t)at, rows, row);
      for (size_t i = 0; ok && i < (size_t)rows * m.k; i++)
        if (kv_scale && !(row[i] > 0) && !(row[i] == 0 && is_padding(&s->pack, &s->pack.tensor[tensor], 0, rank, at + i)))
          ok = mm_fail(err, MM_INTEGRITY, "E_SCALE", plane_at(s, rank, tensor, 0),
                       "found scale %g of a KV cache at element %zu, expected a positive number", (double)row[i], (size_t)at + i);
        else if (!isfinite(row[i]))
          ok = mm_fail(err, MM_INTEGRITY, "E_NONFINITE", plane_at(s, rank, tensor, 0),
                       "found NaN or infinity in matrix %u, row %zu, column %zu, expected finite values", e, (size_t)at + i / m.k, i % m.k);
    }
  free(row);
  return ok;
}

bool mm_verify_numbers(const mm_shards *s, unsigned threads, mm_err *err) {
  return mm_pool_run(threads, s->pack.tensor_count * mm_pack_ranks(&s->pack), check_tensor, (void *)s, err) &&
         mm_verify_agreement(s, threads, err);
}

bool mm_verify_any_rank(const mm_pack *p, mm_err *err) {
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++)
    if (p->rank[r].part_count > 0) return true;
  return mm_fail(err, MM_INTEGRITY, "E_RANKS", mm_at(mm_path_of(p->dir, MM_MANIFEST).text, NULL),
                 "found no part of any rank, expected those of at least one of %u", mm_pack_ranks(p));
}
