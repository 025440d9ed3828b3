/* Assembling, hashing and writing part files block by block. */
#include "convert/write/blocks.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "convert/plan/fill.h"
#include "formats/system/file.h"
#include "formats/system/pool.h"

static mm_part *part_of(const mm_blocks *b, uint32_t rank) { return mm_plan_entry(b->plan, b->part, rank); }
static const mm_plan_file *layout_of(const mm_blocks *b, uint32_t rank) { return &b->plan->part[b->part].file[rank]; }

bool mm_blocks_open(mm_blocks *b, mm_plan *p, int dir, const char *dir_name, size_t buffers, mm_err *err) {
  uint32_t tp = p->pack.tp;
  *b = (mm_blocks){.plan = p, .dir = dir, .dir_name = dir_name, .buffer_count = buffers};
  pthread_mutex_init(&b->lock, NULL);
  for (size_t i = 0; i < p->pack.cut_count; i++) {
    const mm_cut *c = &p->pack.cut[i];
    for (uint32_t r = 0; c->axis != MM_AXIS_NONE && r < tp; r++) b->zeroed = b->zeroed || c->rank[r].count < c->local;
  }
  b->fd = mm_calloc(tp, sizeof *b->fd, err);
  b->direct = mm_calloc(tp, sizeof *b->direct, err);
  b->block = mm_calloc(tp, sizeof *b->block, err);
  b->free_buffer = mm_calloc(buffers ? buffers : 1, sizeof *b->free_buffer, err);
  if (!b->fd || !b->direct || !b->block || !b->free_buffer) return false;
  for (uint32_t r = 0; r < tp; r++) b->fd[r] = b->direct[r] = -1;
  void *memory = NULL;
  if (buffers && posix_memalign(&memory, MM_HASH_BLOCK, buffers * MM_HASH_BLOCK) != 0) return mm_fail_memory(err, buffers * MM_HASH_BLOCK);
  if (memory) madvise(memory, buffers * MM_HASH_BLOCK, MADV_HUGEPAGE); /* fewer pages to hand to the disk */
  b->memory = memory;
  for (size_t i = 0; i < buffers; i++) b->free_buffer[b->free_count++] = b->memory + i * MM_HASH_BLOCK;
  return true;
}

static void close_files(mm_blocks *b) {
  for (uint32_t r = 0; b->fd && b->direct && b->block && r < b->plan->pack.tp; r++) {
    if (b->fd[r] >= 0) close(b->fd[r]);
    if (b->direct[r] >= 0) close(b->direct[r]);
    b->fd[r] = b->direct[r] = -1;
    free(b->block[r]);
    b->block[r] = NULL;
  }
}

void mm_blocks_close(mm_blocks *b) {
  if (!b->plan) return;
  close_files(b);
  MM_FREE(b->fd, b->direct, b->block, b->free_buffer, b->memory, b->done);
  pthread_mutex_destroy(&b->lock);
  *b = (mm_blocks){0};
}

/* Blocks that codes alone fill are assembled; others, which hold a header or scales too, are cached. `filled` counts a block's codes
 * meanwhile. */
static void choose_states(mm_blocks *b, uint32_t rank) {
  const mm_plan *p = b->plan;
  uint64_t base = layout_of(b, rank)->header_bytes;
  mm_block *block = b->block[rank];
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    for (unsigned j = 0; p->tensor[i].part == b->part && j < MM_PACK_PIECES; j++) {
      const mm_place *codes = &p->tensor[i].place[j][0];
      uint64_t at = base + codes->offset, end = at + codes->bytes;
      while (at < end) {
        uint64_t k = at / MM_HASH_BLOCK, stop = mm_min(end, (k + 1) * MM_HASH_BLOCK);
        block[k].filled += (uint32_t)(stop - at);
        at = stop;
      }
    }
  for (size_t k = 0; k < part_of(b, rank)->block_count; k++)
    block[k] = (mm_block){.state = block[k].filled == MM_HASH_BLOCK ? MM_BLOCK_ASSEMBLED : MM_BLOCK_CACHED};
}

static uint64_t block_bytes(const mm_blocks *b, uint32_t rank, uint32_t block) {
  return mm_min(MM_HASH_BLOCK, layout_of(b, rank)->size - block * MM_HASH_BLOCK);
}

typedef struct mm_collection {
  uint64_t header_bytes;
  uint32_t rank;
  mm_block_range *range;
  size_t count, cap;
  mm_err *err;
} mm_collection;

static bool add_range(void *ctx, uint32_t rank, uint64_t offset, uint64_t bytes) {
  mm_collection *c = ctx;
  if (rank != c->rank) return true;
  if (!MM_GROW(c->range, &c->cap, c->count + 1, c->err)) return false;
  c->range[c->count++] = (mm_block_range){c->header_bytes + offset, c->header_bytes + offset + bytes};
  return true;
}

static int by_start(const void *a, const void *b) {
  const mm_block_range *x = a, *y = b;
  return (x->at > y->at) - (x->at < y->at);
}

mm_block_range *mm_blocks_ranges(const mm_blocks *b, uint32_t rank, size_t *count, mm_err *err) {
  const mm_plan *p = b->plan;
  mm_collection c = {.header_bytes = layout_of(b, rank)->header_bytes, .rank = rank, .err = err};
  bool ok = MM_GROW(c.range, &c.cap, 1, err);
  for (size_t i = 0; ok && i < p->step_count; i++)
    ok = p->tensor[p->step[i].tensor].part != b->part || mm_step_fills(p, &p->step[i], add_range, &c);
  if (ok) {
    mm_sort(c.range, c.count, sizeof *c.range, by_start);
    *count = c.count;
    return c.range;
  }
  free(c.range);
  return NULL;
}

/* Checks that the byte ranges, with the header, cover the whole file; if the file has padding, that they lie in it. */
static bool covers_file(const mm_blocks *b, uint32_t rank, const mm_block_range *range, size_t count, mm_err *err) {
  const mm_plan_file *f = layout_of(b, rank);
  uint64_t end = f->header_bytes;
  for (size_t i = 0; i < count && (b->zeroed || range[i].at <= end); i++) end = mm_max(end, range[i].end);
  return (b->zeroed ? end <= f->size : end == f->size) ||
         mm_fail(err, MM_BUG, "E_UNFILLED", mm_at_offset(part_of(b, rank)->file, NULL, end),
                 "found a plan that does not fill the file's %llu bytes", (unsigned long long)f->size);
}

/* Counts the bytes that the header and the steps put into each block of a rank's file. */
static bool count_expected(mm_blocks *b, uint32_t rank, mm_err *err) {
  size_t count;
  mm_block_range *range = mm_blocks_ranges(b, rank, &count, err);
  const bool ok = range && covers_file(b, rank, range, count, err);
  for (size_t i = 0; ok && i < count; i++)
    for (uint64_t at = range[i].at, stop; at < range[i].end; at = stop) {
      const uint64_t k = at / MM_HASH_BLOCK;
      stop = mm_min(range[i].end, (k + 1) * MM_HASH_BLOCK);
      b->block[rank][k].expected += (uint32_t)(stop - at);
    }
  free(range);
  for (uint32_t k = 0; k < part_of(b, rank)->block_count; k++) {
    uint64_t header = layout_of(b, rank)->header_bytes, at = k * MM_HASH_BLOCK;
    mm_block *x = &b->block[rank][k];
    x->filled = (uint32_t)(header > at ? mm_min(header - at, MM_HASH_BLOCK) : 0);
    x->expected += x->filled;
  }
  return ok;
}

static bool new_file(mm_blocks *b, uint32_t rank, mm_err *err) {
  const mm_plan_file *x = layout_of(b, rank);
  const char *name = part_of(b, rank)->file;
  unlinkat(b->dir, name, 0); /* an interrupted run left a file of another size */
  b->fd[rank] = mm_create_at(b->dir, b->dir_name, name, err);
  if (b->fd[rank] < 0) return false;
  int e;
  do e = posix_fallocate(b->fd[rank], 0, (off_t)x->size);
  while (e == EINTR);
  if (e != 0 && e != EOPNOTSUPP && e != EINVAL) return mm_fail_errno(err, mm_at(name, NULL), "allocate", e);
  if (e != 0 && mm_ftruncate(b->fd[rank], x->size) != 0) return mm_fail_errno(err, mm_at(name, NULL), "extend", errno);
  return true;
}

/* Opens a file of an interrupted run; false when it is not there in its full size. */
static bool old_file(mm_blocks *b, uint32_t rank) {
  struct stat s;
  int fd = openat(b->dir, part_of(b, rank)->file, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (fd >= 0 && fstat(fd, &s) == 0 && S_ISREG(s.st_mode) && (uint64_t)s.st_size == layout_of(b, rank)->size) {
    b->fd[rank] = fd;
    return true;
  }
  if (fd >= 0) close(fd);
  return false;
}

bool mm_blocks_digests(mm_plan *p, uint32_t part, uint32_t rank, mm_err *err) {
  mm_part *x = mm_plan_entry(p, part, rank);
  x->block_count = mm_hash_blocks(p->part[part].file[rank].size);
  if (!x->block) x->block = mm_arena_alloc(&p->pack.arena, x->block_count * sizeof *x->block, err);
  return x->block != NULL;
}

bool mm_blocks_begin(mm_blocks *b, uint32_t part, bool existing, bool *kept, mm_err *err) {
  b->part = part;
  for (uint32_t r = 0; r < b->plan->pack.tp; r++) {
    if (!mm_plan_wants(b->plan, part, r)) continue;
    mm_part *x = part_of(b, r);
    if (!mm_blocks_digests(b->plan, part, r, err) || !(b->block[r] = mm_calloc(x->block_count, sizeof **b->block, err))) return false;
    choose_states(b, r);
    kept[r] = existing && old_file(b, r);
    if (!kept[r] && !new_file(b, r, err)) return false;
    /* to a kept file too: the run that made it may have ended before its header was there, or durable */
    const mm_plan_file *f = layout_of(b, r);
    if (!mm_pwrite(b->fd[r], x->file, f->header, f->header_bytes, 0, err)) return false;
    b->direct[r] = openat(b->dir, x->file, O_WRONLY | O_DIRECT | O_NOFOLLOW | O_CLOEXEC); /* -1 where there is no such thing */
    if (!count_expected(b, r, err)) return false;
  }
  return true;
}

static bool note(mm_put_log *log, mm_put put, mm_err *err) {
  if (!MM_GROW(log->put, &log->cap, log->count + 1, err)) return false;
  log->put[log->count++] = put;
  return true;
}

uint64_t mm_digest_check(const mm_digest *d) {
  uint64_t v;
  memcpy(&v, d->byte, sizeof v);
  return v ? v : 1;
}

static bool put_cached(mm_blocks *b, mm_put_log *log, mm_put put, const void *bytes, mm_err *err) {
  const mm_digest d = mm_sha256(bytes, put.bytes);
  put.check = mm_digest_check(&d);
  return mm_pwrite(b->fd[put.rank], part_of(b, put.rank)->file, bytes, put.bytes, put.offset, err) && note(log, put, err);
}

static bool mark_done(mm_blocks *b, uint32_t rank, uint32_t block, mm_err *err) {
  pthread_mutex_lock(&b->lock);
  mm_block *x = &b->block[rank][block];
  if (x->buffer) b->free_buffer[b->free_count++] = x->buffer;
  x->buffer = NULL;
  x->state = MM_BLOCK_DONE;
  bool ok = MM_GROW(b->done, &b->done_cap, b->done_count + 1, err);
  if (ok) b->done[b->done_count++] = (mm_done){.rank = rank, .part = b->part, .block = block};
  pthread_mutex_unlock(&b->lock);
  return ok;
}

/* Hashes and writes a full buffer. */
static bool finish_assembled(mm_blocks *b, uint32_t rank, uint32_t block, mm_err *err) {
  mm_part *part = part_of(b, rank);
  const uint8_t *bytes = b->block[rank][block].buffer;
  int fd = b->direct[rank] >= 0 ? b->direct[rank] : b->fd[rank];
  part->block[block] = mm_sha256(bytes, MM_HASH_BLOCK);
  return mm_pwrite(fd, part->file, bytes, MM_HASH_BLOCK, block * MM_HASH_BLOCK, err) && mark_done(b, rank, block, err);
}

/* The state of a block for a put, taking a buffer if it needs one. */
static mm_block_state enter(mm_blocks *b, mm_block *x) {
  bool fresh = false;
  pthread_mutex_lock(&b->lock);
  if (x->state == MM_BLOCK_ASSEMBLED && !x->buffer) {
    if (b->free_count == 0) {
      x->state = MM_BLOCK_CACHED;
    } else {
      x->buffer = b->free_buffer[--b->free_count];
      fresh = true;
    }
  }
  mm_block_state state = x->state;
  if (fresh && b->zeroed) memset(x->buffer, 0, MM_HASH_BLOCK);
  pthread_mutex_unlock(&b->lock);
  return state;
}

/* Counts what was put; *full when the block lacks nothing more. */
static void count_filled(mm_blocks *b, const mm_put *put, bool *full) {
  mm_block *x = &b->block[put->rank][put->offset / MM_HASH_BLOCK];
  pthread_mutex_lock(&b->lock);
  x->filled += put->bytes;
  *full = x->filled == x->expected;
  pthread_mutex_unlock(&b->lock);
}

/* A step that is carried out again must give the bytes that are there; otherwise the journal was wrong to declare the block done. */
static bool compare_done(mm_blocks *b, const mm_put *put, const uint8_t *bytes, mm_err *err) {
  const char *name = part_of(b, put->rank)->file;
  mm_file f = {.fd = b->fd[put->rank], .size = layout_of(b, put->rank)->size};
  uint8_t *there = mm_calloc(put->bytes, 1, err);
  bool ok = there && mm_file_read(&f, name, there, put->bytes, put->offset, err) &&
            (memcmp(there, bytes, put->bytes) == 0 ||
             mm_fail(err, MM_USAGE, "E_RESUME", mm_at_offset(name, NULL, put->offset),
                     "found other bytes than the source gives in a block that the journal says is done; --restart discards it"));
  free(there);
  return ok;
}

static bool put_in_block(mm_blocks *b, mm_put_log *log, mm_put put, const uint8_t *bytes, mm_err *err) {
  uint32_t block = (uint32_t)(put.offset / MM_HASH_BLOCK);
  mm_block *x = &b->block[put.rank][block];
  mm_block_state state = enter(b, x);
  bool full;
  if (state == MM_BLOCK_ASSEMBLED) memcpy(x->buffer + put.offset % MM_HASH_BLOCK, bytes, put.bytes);
  if (state == MM_BLOCK_DONE && !compare_done(b, &put, bytes, err)) return false;
  if (!(state == MM_BLOCK_CACHED ? put_cached(b, log, put, bytes, err) : note(log, put, err))) return false;
  count_filled(b, &put, &full);
  return state != MM_BLOCK_ASSEMBLED || !full || finish_assembled(b, put.rank, block, err);
}

void mm_blocks_trust_put(mm_blocks *b, const mm_put *put) {
  mm_block *x = &b->block[put->rank][put->offset / MM_HASH_BLOCK];
  bool full;
  if (x->state != MM_BLOCK_DONE) x->state = MM_BLOCK_CACHED;
  count_filled(b, put, &full);
}

bool mm_blocks_put(mm_blocks *b, mm_put_log *log, uint32_t rank, uint64_t offset, const void *bytes, size_t n, mm_err *err) {
  const uint8_t *from = bytes;
  offset += layout_of(b, rank)->header_bytes;
  while (n > 0) {
    uint32_t take = (uint32_t)mm_min(n, MM_HASH_BLOCK - offset % MM_HASH_BLOCK);
    if (!put_in_block(b, log, (mm_put){.rank = rank, .bytes = take, .offset = offset}, from, err)) return false;
    from += take;
    offset += take;
    n -= take;
  }
  return true;
}

bool mm_blocks_sync(mm_blocks *b, mm_err *err) {
  for (uint32_t r = 0; r < b->plan->pack.tp; r++) {
    int synced = b->fd[r] < 0 ? 0 : fdatasync(b->fd[r]);
    while (synced != 0 && errno == EINTR) synced = fdatasync(b->fd[r]);
    if (synced != 0) return mm_fail_errno(err, mm_at(part_of(b, r)->file, NULL), "fdatasync", errno);
  }
  return true;
}

void mm_blocks_take_done(mm_blocks *b, mm_done **list, size_t *count) {
  pthread_mutex_lock(&b->lock);
  *list = b->done;
  *count = b->done_count;
  b->done = NULL;
  b->done_count = b->done_cap = 0;
  pthread_mutex_unlock(&b->lock);
}

/* Blocks of all ranks in one list of items: item = rank·most + block. */
typedef struct mm_rest {
  mm_blocks *b;
  size_t most;
  uint8_t **buffer; /* [threads] */
} mm_rest;

static bool finish_rest(void *ctx, size_t item, unsigned worker, mm_err *err) {
  mm_rest *rest = ctx;
  mm_blocks *b = rest->b;
  uint32_t rank = (uint32_t)(item / rest->most), block = (uint32_t)(item % rest->most);
  if (!b->block[rank]) return true; /* a rank that is not wanted */
  mm_part *part = part_of(b, rank);
  if (block >= part->block_count) return true;
  const mm_block *x = &b->block[rank][block];
  if (x->filled != x->expected)
    return mm_fail(err, MM_BUG, "E_UNFILLED", mm_at_offset(part->file, NULL, block * MM_HASH_BLOCK), "found %u bytes, expected %u",
                   x->filled, x->expected);
  if (x->state == MM_BLOCK_DONE) return true;
  if (x->buffer) return finish_assembled(b, rank, block, err);
  uint64_t at = block * MM_HASH_BLOCK, n = block_bytes(b, rank, block);
  mm_file f = {.fd = b->fd[rank], .size = layout_of(b, rank)->size};
  if (!mm_file_read(&f, part->file, rest->buffer[worker], n, at, err)) return false;
  part->block[block] = mm_sha256(rest->buffer[worker], n);
  return mark_done(b, rank, block, err);
}

static bool hash_rest(mm_blocks *b, unsigned threads, mm_err *err) {
  mm_rest rest = {.b = b, .buffer = mm_calloc(threads, sizeof *rest.buffer, err)};
  bool ok = rest.buffer != NULL;
  for (unsigned i = 0; ok && i < threads; i++) ok = (rest.buffer[i] = mm_calloc(1, MM_HASH_BLOCK, err)) != NULL;
  for (uint32_t r = 0; r < b->plan->pack.tp; r++)
    if (b->block[r]) rest.most = mm_max(rest.most, part_of(b, r)->block_count);
  ok = ok && mm_pool_run(threads, rest.most * b->plan->pack.tp, finish_rest, &rest, err);
  for (unsigned i = 0; rest.buffer && i < threads; i++) free(rest.buffer[i]);
  free(rest.buffer);
  return ok;
}

bool mm_blocks_end(mm_blocks *b, unsigned threads, mm_err *err) {
  if (!hash_rest(b, threads, err)) return false;
  for (uint32_t r = 0; r < b->plan->pack.tp; r++) {
    if (!b->block[r]) continue;
    mm_part *part = part_of(b, r);
    part->root = mm_hash_root(part->block, part->block_count);
    if (!mm_fsync(b->fd[r], part->file, false, err)) return false;
    int fd = b->fd[r];
    b->fd[r] = -1;
    if (!mm_close(fd, part->file, err)) return false;
  }
  close_files(b);
  return true;
}
