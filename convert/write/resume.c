/* Continuing an interrupted run: every block and byte range that the journal claims for a part is hashed again; what holds is skipped. A
 * step counts only when its record lists every byte that the plan has it fill, and never where those bytes are all zero, as unwritten ones
 * are: it is carried out again. */
#include <stdlib.h>
#include <string.h>

#include "convert/plan/fill.h"
#include "convert/write/writer.h"
#include "formats/system/file.h"
#include "formats/system/pool.h"

typedef struct mm_trust {
  mm_writer *w;
  const bool *kept;  /* [tp]: the rank's file was there in full size */
  uint8_t **buffer;  /* [threads] of MM_HASH_BLOCK */
  bool *block_holds; /* [journal.block_count] */
  bool *step_holds;  /* [journal.step_count] */
} mm_trust;

static const mm_part *part_of(const mm_writer *w, uint32_t rank) { return mm_plan_entry(w->plan, w->blocks.part, rank); }

/* *written: not all of it is zero. */
static bool read_range(const mm_trust *t, unsigned worker, uint32_t rank, uint64_t offset, size_t n, mm_digest *d, bool *written,
                       mm_err *err) {
  mm_file f = {.fd = t->w->blocks.fd[rank]};
  const uint8_t *bytes = t->buffer[worker];
  if (!mm_file_read(&f, part_of(t->w, rank)->file, t->buffer[worker], n, offset, err)) return false;
  *written = bytes[0] != 0 || memcmp(bytes, bytes + 1, n - 1) != 0;
  *d = mm_sha256(bytes, n);
  return true;
}

/* The puts of a step's record, to be compared with those of the plan. */
typedef struct mm_claim {
  const mm_plan *plan;
  uint32_t part;
  const mm_step_entry *entry;
  size_t at;
} mm_claim;

static bool claims_fill(void *ctx, uint32_t rank, uint64_t offset, uint64_t bytes) {
  mm_claim *c = ctx;
  offset += c->plan->part[c->part].file[rank].header_bytes;
  while (bytes > 0) {
    const mm_put *p = c->at < c->entry->put_count ? &c->entry->put[c->at++] : NULL;
    uint64_t n = mm_min(bytes, MM_HASH_BLOCK - offset % MM_HASH_BLOCK);
    if (!p || p->rank != rank || p->offset != offset || p->bytes != n) return false;
    offset += n;
    bytes -= n;
  }
  return true;
}

/* The record is of a step of this part and lists what that step fills, all of it and nothing else. */
static bool claims_step(const mm_plan *p, uint32_t part, const mm_step_entry *e) {
  mm_claim c = {.plan = p, .part = part, .entry = e};
  if (e->step >= p->step_count || p->tensor[p->step[e->step].tensor].part != part || e->put_count == 0) return false;
  return mm_step_fills(p, &p->step[e->step], claims_fill, &c) && c.at == e->put_count;
}

static bool check_block(void *ctx, size_t item, unsigned worker, mm_err *err) {
  mm_trust *t = ctx;
  const mm_block_entry *e = &t->w->journal.block[item];
  uint32_t tp = t->w->plan->pack.tp;
  if (e->at.part != t->w->blocks.part || e->at.rank >= tp || !t->kept[e->at.rank] || e->at.block >= part_of(t->w, e->at.rank)->block_count)
    return true;
  uint64_t at = e->at.block * MM_HASH_BLOCK, size = t->w->plan->part[e->at.part].file[e->at.rank].size;
  mm_digest d;
  bool written;
  if (!read_range(t, worker, e->at.rank, at, (size_t)mm_min(MM_HASH_BLOCK, size - at), &d, &written, err)) return false;
  t->block_holds[item] = written && mm_digest_equal(&d, &e->digest);
  return true;
}

static bool put_holds(const mm_trust *t, unsigned worker, const mm_put *p, bool *holds, mm_err *err) {
  const mm_writer *w = t->w;
  *holds = t->kept[p->rank];
  if (!*holds || w->blocks.block[p->rank][p->offset / MM_HASH_BLOCK].state == MM_BLOCK_DONE) return true;
  *holds = p->check != 0;
  if (!*holds) return true;
  mm_digest d;
  bool written;
  if (!read_range(t, worker, p->rank, p->offset, p->bytes, &d, &written, err)) return false;
  *holds = written && mm_digest_check(&d) == p->check;
  return true;
}

static bool check_step(void *ctx, size_t item, unsigned worker, mm_err *err) {
  mm_trust *t = ctx;
  const mm_step_entry *e = &t->w->journal.step[item];
  bool holds = claims_step(t->w->plan, t->w->blocks.part, e);
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

static void take_step(mm_writer *w, const mm_step_entry *e) {
  w->zeroed += e->zeroed;
  w->skip[e->step] = true;
}

static void take_steps(mm_trust *t) {
  mm_writer *w = t->w;
  for (size_t i = 0; i < w->journal.step_count; i++) {
    const mm_step_entry *e = &w->journal.step[i];
    if (!t->step_holds[i] || w->skip[e->step]) continue; /* a run that did not trust the first record wrote a second one */
    take_step(w, e);
    for (size_t k = 0; k < e->put_count; k++) mm_blocks_trust_put(&w->blocks, &e->put[k]);
  }
}

/* Zeroes bytes [at, end) of a rank's file, but for those in blocks that hold. */
static bool zero_gap(const mm_trust *t, uint32_t rank, uint64_t at, uint64_t end, mm_err *err) {
  static const uint8_t zeros[1 << 16];
  const mm_writer *w = t->w;
  while (at < end) {
    const uint64_t block = at / MM_HASH_BLOCK, stop = mm_min(end, (block + 1) * MM_HASH_BLOCK);
    for (uint64_t n; w->blocks.block[rank][block].state != MM_BLOCK_DONE && at < stop; at += n) {
      n = mm_min(stop - at, sizeof zeros);
      if (!mm_pwrite(w->blocks.fd[rank], part_of(w, rank)->file, zeros, n, at, err)) return false;
    }
    at = stop;
  }
  return true;
}

/* True if some block of the file was not taken as it is. A block's `due` does not reveal padding: it counts bytes that several pieces
 * share once for each of them. */
static bool is_unproven(const mm_writer *w, uint32_t rank) {
  for (size_t i = 0; i < part_of(w, rank)->block_count; i++)
    if (w->blocks.block[rank][i].state != MM_BLOCK_DONE) return true;
  return false;
}

/* Padding is in no record: what a kept file holds there is not believed, but made zero. */
static bool zero_padding(const mm_trust *t, uint32_t rank, mm_err *err) {
  const mm_plan_file *file = &t->w->plan->part[t->w->blocks.part].file[rank];
  size_t count = 0;
  mm_block_range *filled = mm_blocks_ranges(&t->w->blocks, rank, &count, err);
  uint64_t at = file->header_bytes;
  bool ok = filled;
  for (size_t i = 0; ok && i < count; i++) {
    ok = zero_gap(t, rank, at, filled[i].at, err);
    at = mm_max(at, filled[i].end);
  }
  ok = ok && zero_gap(t, rank, at, file->size, err);
  free(filled);
  return ok;
}

static bool zero_paddings(const mm_trust *t, mm_err *err) {
  for (uint32_t r = 0; r < t->w->plan->pack.tp; r++)
    if (t->kept[r] && is_unproven(t->w, r) && !zero_padding(t, r, err)) return false;
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
  ok = ok && mm_pool_run(threads, w->journal.step_count, check_step, &t, err);
  if (ok) take_steps(&t);
  ok = ok && zero_paddings(&t, err);
  for (unsigned i = 0; t.buffer && i < threads; i++) free(t.buffer[i]);
  MM_FREE(t.buffer, t.block_holds, t.step_holds);
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

/* The steps of an archived part; *all: each has its record or fills nothing. The others are carried out, without a byte to put. */
static bool claim_steps(mm_writer *w, uint32_t part, bool *all, mm_err *err) {
  const mm_plan *p = w->plan;
  bool *claimed = mm_calloc(w->journal.step_count + 1, sizeof *claimed, err), *has = mm_calloc(p->step_count, sizeof *has, err);
  bool ok = claimed && has;
  for (size_t i = 0; ok && i < w->journal.step_count; i++) {
    const mm_step_entry *e = &w->journal.step[i];
    claimed[i] = claims_step(p, part, e) && !has[e->step];
    if (claimed[i]) has[e->step] = true;
  }
  for (uint32_t s = 0; ok && *all && s < p->step_count; s++)
    *all = p->tensor[p->step[s].tensor].part != part || has[s] || mm_step_idle(p, &p->step[s]);
  for (size_t i = 0; ok && *all && i < w->journal.step_count; i++)
    if (claimed[i]) take_step(w, &w->journal.step[i]);
  free(claimed);
  free(has);
  return ok;
}

bool mm_writer_trust_archived(mm_writer *w, uint32_t part, bool *holds, mm_err *err) {
  const mm_plan *p = w->plan;
  if (!claim_frames(w, part, holds, err)) return false;
  for (uint32_t r = 0; *holds && r < p->pack.tp; r++) {
    if (!mm_plan_wants(p, part, r)) continue;
    mm_part *x = mm_plan_entry(p, part, r);
    mm_err reason = {0};
    *holds = mm_archive_prove_part(mm_writer_archived(w, part, r), w->staging, &w->lanes, &reason);
    if (!*holds && reason.status != MM_INTEGRITY && reason.status != MM_BAD_INPUT) { /* neither damaged nor absent */
      *err = reason;
      return false;
    }
    if (*holds) x->root = mm_hash_root(x->block, x->block_count);
  }
  return !*holds || claim_steps(w, part, holds, err);
}
