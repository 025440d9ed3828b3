/* Output as an archive: parts that have ended become files of frames, and leave the disk. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "convert/write/writer.h"
#include "formats/system/file.h"

static bool stopped(const void *ctx) { return atomic_load((const _Atomic bool *)ctx); }

bool mm_writer_archive_open(mm_writer *w, mm_err *err) {
  const mm_pack *p = &w->plan->pack;
  mm_archive *a = &w->archive;
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++) a->part_count += p->rank[r].part_count;
  a->part = mm_arena_alloc(&a->arena, a->part_count * sizeof *a->part, err);
  if (!a->part || !mm_archive_lanes_open(&w->lanes, w->o.threads, err)) return false;
  w->lanes.stopped = stopped;
  w->lanes.ctx = w->o.stop;
  w->lanes.then = "--resume continues";
  return true;
}

mm_archive_part *mm_writer_archived(const mm_writer *w, uint32_t part, uint32_t rank) {
  const mm_plan_part *x = &w->plan->part[part];
  uint32_t all = x->stage * w->plan->pack.tp + rank;
  size_t at = x->number;
  for (uint32_t r = 0; r < all; r++) at += w->plan->pack.rank[r].part_count;
  return &w->archive.part[at];
}

bool mm_writer_remove_plain(mm_writer *w, uint32_t part, mm_err *err) {
  for (uint32_t r = 0; r < w->plan->pack.tp; r++) {
    if (!mm_plan_wants(w->plan, part, r)) continue;
    const char *name = mm_plan_entry(w->plan, part, r)->file;
    if (unlinkat(w->dir, name, 0) != 0 && errno != ENOENT) return mm_fail_errno(err, mm_at(name, NULL), "remove", errno);
  }
  return true;
}

/* One record for the frames of all ranks, so that a part is archived on all of them or on none. */
static bool journal_frames(mm_writer *w, uint32_t part, mm_err *err) {
  mm_done *done = NULL;
  size_t n = 0, cap = 0;
  bool ok = true;
  for (uint32_t r = 0; ok && r < w->plan->pack.tp; r++) {
    if (!mm_plan_wants(w->plan, part, r)) continue;
    const mm_archive_part *p = mm_writer_archived(w, part, r);
    ok = MM_GROW(done, &cap, n + p->part->block_count, err);
    for (uint32_t b = 0; ok && b < p->part->block_count; b++)
      done[n++] = (mm_done){.rank = r, .part = part, .block = b, .packed = p->frame[b].bytes, .stride = p->frame[b].stride};
  }
  ok = ok && mm_journal_append(&w->journal, w->plan, NULL, 0, done, n, err);
  free(done);
  return ok;
}

bool mm_writer_archive_part(mm_writer *w, uint32_t part, mm_err *err) {
  for (uint32_t r = 0; r < w->plan->pack.tp; r++) {
    if (!mm_plan_wants(w->plan, part, r)) continue;
    mm_archive_part *p = mm_writer_archived(w, part, r);
    if (!mm_archive_part_make(p, mm_plan_entry(w->plan, part, r), &w->archive.arena, err)) return false;
    unlinkat(w->dir, p->file, 0); /* what an interrupted run left */
    if (!mm_archive_pack_part(p, w->staging, w->dir, w->staging, w->o.level, &w->lanes, err)) return false;
  }
  return mm_fsync(w->dir, w->staging, true, err) && journal_frames(w, part, err) && mm_writer_remove_plain(w, part, err);
}
