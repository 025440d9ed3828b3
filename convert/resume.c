/* Continuing an interrupted run: every block and byte range that the journal claims for a part is hashed again; what holds is skipped. */
#include <stdlib.h>
#include <string.h>

#include "convert/writer.h"
#include "formats/file.h"
#include "formats/pool.h"

typedef struct mm_trust {
  mm_writer *w;
  const bool *kept;  /* [tp]: the rank's file was there in full size */
  uint8_t **buffer;  /* [threads] of MM_HASH_BLOCK */
  bool *block_holds; /* [journal.block_count] */
  bool *step_holds;  /* [journal.step_count] */
} mm_trust;

static const mm_part *part_of(const mm_writer *w, uint32_t rank) { return mm_plan_entry(w->plan, w->blocks.part, rank); }

static bool read_range(const mm_trust *t, unsigned worker, uint32_t rank, uint64_t offset, size_t n, mm_digest *d, mm_err *err) {
  mm_file f = {.fd = t->w->blocks.fd[rank]};
  return mm_file_read(&f, part_of(t->w, rank)->file, t->buffer[worker], n, offset, err) && mm_sha256(t->buffer[worker], n, d, err);
}

static bool check_block(void *ctx, size_t item, unsigned worker, mm_err *err) {
  mm_trust *t = ctx;
  const mm_block_entry *e = &t->w->journal.block[item];
  uint32_t tp = t->w->plan->pack.tp;
  if (e->at.part != t->w->blocks.part || e->at.rank >= tp || !t->kept[e->at.rank] || e->at.block >= part_of(t->w, e->at.rank)->block_count)
    return true;
  uint64_t at = e->at.block * MM_HASH_BLOCK, size = t->w->plan->part[e->at.part].file[e->at.rank].size;
  mm_digest d;
  if (!read_range(t, worker, e->at.rank, at, (size_t)mm_min(MM_HASH_BLOCK, size - at), &d, err)) return false;
  t->block_holds[item] = mm_digest_equal(&d, &e->digest);
  return true;
}

static bool put_holds(const mm_trust *t, unsigned worker, const mm_put *p, bool *holds, mm_err *err) {
  const mm_writer *w = t->w;
  uint32_t block = (uint32_t)(p->offset / MM_HASH_BLOCK);
  *holds = p->rank < w->plan->pack.tp && t->kept[p->rank] && block < part_of(w, p->rank)->block_count && p->bytes > 0 &&
           p->bytes <= MM_HASH_BLOCK - p->offset % MM_HASH_BLOCK;
  if (!*holds || w->blocks.block[p->rank][block].state == MM_BLOCK_DONE) return true;
  *holds = p->check != 0;
  if (!*holds) return true;
  mm_digest d;
  if (!read_range(t, worker, p->rank, p->offset, p->bytes, &d, err)) return false;
  *holds = mm_digest_check(&d) == p->check;
  return true;
}

static bool check_step(void *ctx, size_t item, unsigned worker, mm_err *err) {
  mm_trust *t = ctx;
  const mm_step_entry *e = &t->w->journal.step[item];
  const mm_plan *p = t->w->plan;
  if (e->step >= p->step_count || p->tensor[p->step[e->step].tensor].part != t->w->blocks.part) return true;
  bool holds = e->put_count > 0;
  for (size_t i = 0; holds && i < e->put_count; i++)
    if (!put_holds(t, worker, &e->put[i], &holds, err)) return false;
  t->step_holds[item] = holds;
  return true;
}

/* Blocks that hold get their digest; steps that hold are skipped, and what they wrote through the page cache stays there. */
static void take_blocks(mm_trust *t) {
  mm_writer *w = t->w;
  for (size_t i = 0; i < w->journal.block_count; i++) {
    const mm_block_entry *e = &w->journal.block[i];
    if (!t->block_holds[i]) continue;
    mm_plan_entry(w->plan, e->at.part, e->at.rank)->block[e->at.block] = e->digest;
    w->blocks.block[e->at.rank][e->at.block].state = MM_BLOCK_DONE;
  }
}

static bool take_dead(mm_writer *w, const mm_step_entry *e, mm_err *err) {
  if (!mm_grow((void **)&w->dead, &w->dead_cap, w->dead_count + e->dead_count, sizeof *w->dead, err)) return false;
  for (size_t k = 0; k < e->dead_count; k++) w->dead[w->dead_count++] = e->dead[k];
  return true;
}

static bool take_steps(mm_trust *t, mm_err *err) {
  mm_writer *w = t->w;
  for (size_t i = 0; i < w->journal.step_count; i++) {
    const mm_step_entry *e = &w->journal.step[i];
    if (!t->step_holds[i] || w->skip[e->step]) continue; /* journaled again by a run that did not trust it */
    w->skip[e->step] = true;
    for (size_t k = 0; k < e->put_count; k++) {
      mm_block *x = &w->blocks.block[e->put[k].rank][e->put[k].offset / MM_HASH_BLOCK];
      if (x->state != MM_BLOCK_DONE) x->state = MM_BLOCK_CACHED;
    }
    if (!take_dead(w, e, err)) return false;
  }
  return true;
}

bool mm_writer_trust(mm_writer *w, const bool *kept, mm_err *err) {
  unsigned threads = w->o.threads;
  mm_trust t = {.w = w, .kept = kept, .buffer = mm_calloc(threads, sizeof *t.buffer, err)};
  t.block_holds = mm_calloc(w->journal.block_count + 1, sizeof *t.block_holds, err);
  t.step_holds = mm_calloc(w->journal.step_count + 1, sizeof *t.step_holds, err);
  bool ok = t.buffer && t.block_holds && t.step_holds;
  for (unsigned i = 0; ok && i < threads; i++) ok = (t.buffer[i] = mm_calloc(1, MM_HASH_BLOCK, err)) != NULL;
  ok = ok && mm_pool_run(threads, w->journal.block_count, check_block, &t, err);
  if (ok) take_blocks(&t);
  ok = ok && mm_pool_run(threads, w->journal.step_count, check_step, &t, err) && take_steps(&t, err);
  for (unsigned i = 0; t.buffer && i < threads; i++) free(t.buffer[i]);
  free(t.buffer);
  free(t.block_holds);
  free(t.step_holds);
  return ok;
}

/* The journal's digests and frames of an archived part; *whole: of all its blocks, on all ranks. */
static bool claim_frames(mm_writer *w, uint32_t part, bool *whole, mm_err *err) {
  const mm_plan *p = w->plan;
  for (uint32_t r = 0; r < p->pack.tp; r++)
    if (mm_plan_wants(p, part, r) &&
        (!mm_blocks_digests(w->plan, part, r, err) ||
         !mm_archive_part_make(mm_writer_archived(w, part, r), mm_plan_entry(p, part, r), &w->archive.arena, err)))
      return false;
  for (size_t i = 0; i < w->journal.block_count; i++) {
    const mm_block_entry *e = &w->journal.block[i];
    if (e->at.packed == 0 || e->at.part != part || e->at.rank >= p->pack.tp || !mm_plan_wants(p, part, e->at.rank)) continue;
    mm_part *x = mm_plan_entry(p, part, e->at.rank);
    bool known = e->at.stride == 1 || e->at.stride == 2 || e->at.stride == 4;
    if (!known || e->at.block >= x->block_count || e->at.packed > mm_frame_bound(MM_HASH_BLOCK)) continue;
    x->block[e->at.block] = e->digest;
    mm_writer_archived(w, part, e->at.rank)->frame[e->at.block] = (mm_archive_frame){.bytes = e->at.packed, .stride = e->at.stride};
  }
  *whole = true;
  for (uint32_t r = 0; r < p->pack.tp; r++) {
    mm_archive_part *x = mm_plan_wants(p, part, r) ? mm_writer_archived(w, part, r) : NULL;
    for (size_t b = 0; x && b < x->part->block_count; b++) {
      *whole = *whole && x->frame[b].bytes > 0;
      x->frame[b].at = x->size;
      x->size += x->frame[b].bytes;
    }
  }
  return true;
}

bool mm_writer_trust_archived(mm_writer *w, uint32_t part, bool *holds, mm_err *err) {
  const mm_plan *p = w->plan;
  if (!claim_frames(w, part, holds, err)) return false;
  for (uint32_t r = 0; *holds && r < p->pack.tp; r++) {
    if (!mm_plan_wants(p, part, r)) continue;
    mm_part *x = mm_plan_entry(p, part, r);
    mm_err why = {0};
    *holds = mm_archive_prove_part(mm_writer_archived(w, part, r), w->staging, &w->lanes, &why);
    if (!*holds && why.status != MM_INTEGRITY && why.status != MM_BAD_INPUT) { /* neither damaged nor absent */
      *err = why;
      return false;
    }
    if (*holds && !mm_hash_root(x->block, x->block_count, &x->root, err)) return false;
  }
  for (size_t i = 0; *holds && i < w->journal.step_count; i++) {
    const mm_step_entry *e = &w->journal.step[i];
    if (e->step >= p->step_count || p->tensor[p->step[e->step].tensor].part != part || w->skip[e->step]) continue;
    w->skip[e->step] = true;
    if (!take_dead(w, e, err)) return false;
  }
  return true;
}
