/* One part of an archive: packing and unpacking it, its blocks in parallel, each proven by its digest. */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"
#include "formats/system/file.h"
#include "formats/system/pool.h"
#include "loader/archive/archive.h"

void mm_archive_lanes_close(mm_archive_lanes *l) {
  for (unsigned i = 0; l->lane && i < l->threads; i++) {
    mm_frame_close(l->lane[i].coder);
    free(l->lane[i].frame);
    free(l->lane[i].block);
  }
  free(l->lane);
  *l = (mm_archive_lanes){0};
}

bool mm_archive_lanes_open(mm_archive_lanes *l, unsigned threads, mm_err *err) {
  *l = (mm_archive_lanes){.threads = threads, .lane = mm_calloc(threads, sizeof *l->lane, err)};
  bool ok = l->lane != NULL;
  for (unsigned i = 0; ok && i < threads; i++) {
    mm_archive_lane *x = &l->lane[i];
    ok = (x->coder = mm_frame_open(err)) && (x->frame = mm_calloc(mm_frame_bound(MM_HASH_BLOCK), 1, err)) &&
         (x->block = mm_calloc(MM_HASH_BLOCK, 1, err));
  }
  return ok;
}

size_t mm_archive_lane_bytes(int level) { return mm_frame_memory(level) + mm_frame_bound(MM_HASH_BLOCK) + MM_HASH_BLOCK; }

static bool may_go_on(const mm_archive_lanes *l, mm_err *err) {
  return !l->stopped || !l->stopped(l->ctx) ||
         mm_fail(err, MM_INTERRUPTED, "E_INTERRUPTED", mm_at(NULL, NULL), "stopped by a signal; %s", l->then);
}

/* ---- packing ---- */

/* One part being packed. Frames follow each other in the order of their blocks, so each waits for its turn to be given its place. */
typedef struct packing {
  mm_path from, to;
  mm_file in;
  mm_st header; /* of `from`: what its bytes are */
  int out, level;
  const mm_archive_lanes *lanes;
  mm_archive_part *p; /* its frames and size are filled here */
  pthread_mutex_t lock;
  pthread_cond_t next;
  size_t turn;   /* the block whose frame is placed next; guarded, like p->size */
  size_t failed; /* the lowest block that never takes its turn; SIZE_MAX while there is none */
} packing;

/* Bytes that a tensor has in [from, end) of the file. */
static uint64_t overlap(const mm_st_tensor *t, uint64_t from, uint64_t end) {
  uint64_t lo = mm_max(t->offset, from), hi = mm_min(t->offset + t->bytes, end);
  return lo < hi ? hi - lo : 0;
}

/* The width of the elements that most of a block's bytes belong to. */
static unsigned stride_of(const mm_st *header, uint64_t from, uint64_t end) {
  uint64_t bytes[5] = {0}; /* by width */
  for (size_t i = 0; i < header->count; i++) {
    size_t width = mm_dtype_size(header->tensor[i].dtype);
    if (width < 5) bytes[width] += overlap(&header->tensor[i], from, end);
  }
  return bytes[4] > bytes[2] && bytes[4] > bytes[1] ? 4 : bytes[2] > bytes[1] ? 2 : 1;
}

static bool read_block(const packing *k, size_t b, uint8_t *block, uint64_t at, uint64_t n, mm_err *err) {
  if (!mm_file_read(&k->in, k->from.text, block, n, at, err)) return false;
  const mm_digest d = mm_sha256(block, n);
  if (mm_digest_equal(&d, &k->p->part->block[b])) return true;
  mm_name_list names = {0};
  for (size_t i = 0; i < k->header.count; i++)
    if (overlap(&k->header.tensor[i], at, at + n) > 0) mm_name_list_add(&names, k->header.tensor[i].name);
  if (names.used == 0) mm_name_list_add(&names, "header");
  return mm_fail(err, MM_INTEGRITY, "E_DIGEST", mm_at_offset(k->from.text, NULL, at),
                 "found block %zu of %zu damaged, expected its digest in the manifest; it holds: %s", b, k->p->part->block_count,
                 names.text);
}

/* False when a block before it failed: that one says why. */
static bool take_turn(packing *k, size_t b, size_t bytes) {
  pthread_mutex_lock(&k->lock);
  while (k->turn != b && k->failed > b) pthread_cond_wait(&k->next, &k->lock);
  bool mine = k->turn == b;
  if (mine) {
    k->p->frame[b].at = k->p->size;
    k->p->size += bytes;
    k->turn++;
    pthread_cond_broadcast(&k->next);
  }
  pthread_mutex_unlock(&k->lock);
  return mine;
}

static bool give_up(packing *k, size_t b) {
  pthread_mutex_lock(&k->lock);
  k->failed = mm_min(k->failed, b);
  pthread_cond_broadcast(&k->next);
  pthread_mutex_unlock(&k->lock);
  return false;
}

static bool pack_block(void *ctx, size_t b, unsigned worker, mm_err *err) {
  packing *k = ctx;
  const mm_archive_lane *l = &k->lanes->lane[worker];
  mm_pool_at(k->p->part->file);
  if (!may_go_on(k->lanes, err)) return give_up(k, b);
  uint64_t at = b * MM_HASH_BLOCK, n = mm_min(MM_HASH_BLOCK, k->p->part->size - at);
  unsigned stride = stride_of(&k->header, at, at + n);
  size_t bytes;
  if (!read_block(k, b, l->block, at, n, err) || !mm_frame_pack(l->coder, l->block, n, stride, k->level, l->frame, &bytes, err))
    return give_up(k, b);
  mm_archive_frame *f = &k->p->frame[b];
  f->bytes = (uint32_t)bytes;
  f->stride = stride;
  return take_turn(k, b, bytes) && (mm_pwrite(k->out, k->to.text, l->frame, bytes, f->at, err) || give_up(k, b));
}

bool mm_archive_pack_part(mm_archive_part *p, const char *from_dir, int to, const char *to_dir, int level, const mm_archive_lanes *l,
                          mm_err *err) {
  packing k = {.from = mm_path_of(from_dir, p->part->file),
               .to = mm_path_of(to_dir, p->file),
               .in = MM_FILE_NONE,
               .out = -1,
               .level = level,
               .lanes = l,
               .p = p,
               .failed = SIZE_MAX};
  pthread_mutex_init(&k.lock, NULL);
  pthread_cond_init(&k.next, NULL);
  bool ok = mm_file_open(&k.in, k.from.text, err) && mm_st_open(&k.header, k.from.text, MM_INTEGRITY, err) &&
            (k.out = mm_create_at(to, to_dir, p->file, err)) >= 0 && mm_pool_run(l->threads, p->part->block_count, pack_block, &k, err) &&
            mm_fsync(k.out, k.to.text, false, err);
  if (k.out >= 0 && !mm_close(k.out, k.to.text, err)) ok = false;
  mm_st_close(&k.header);
  mm_file_close(&k.in);
  pthread_cond_destroy(&k.next);
  pthread_mutex_destroy(&k.lock);
  return ok;
}

/* ---- unpacking ---- */

/* One part being unpacked. */
typedef struct unpacking {
  const mm_archive_part *part;
  mm_path from, to;
  mm_file in;
  int out; /* -1: proven only */
  const mm_archive_lanes *lanes;
} unpacking;

static bool unpack_block(void *ctx, size_t b, unsigned worker, mm_err *err) {
  const unpacking *u = ctx;
  const mm_archive_lane *l = &u->lanes->lane[worker];
  const mm_part *p = u->part->part;
  const mm_archive_frame *f = &u->part->frame[b];
  mm_pool_at(p->file);
  uint64_t at = b * MM_HASH_BLOCK, n = mm_min(MM_HASH_BLOCK, p->size - at);
  mm_where where = mm_at_offset(MM_FORMATTED(sizeof(mm_path) + 32, "%s: block %zu", u->from.text, b), NULL, f->at);
  if (!may_go_on(u->lanes, err) || !mm_file_read(&u->in, u->from.text, l->frame, f->bytes, f->at, err) ||
      !mm_frame_unpack(l->coder, l->frame, f->bytes, f->stride, l->block, n, where, err))
    return false;
  const mm_digest d = mm_sha256(l->block, n);
  if (!mm_digest_equal(&d, &p->block[b]))
    return mm_fail(err, MM_INTEGRITY, "E_DIGEST", where,
                   "found other contents, expected those that the manifest has for offset %" PRIu64 " of %s", at, p->file);
  return u->out < 0 || mm_pwrite(u->out, u->to.text, l->block, n, at, err);
}

bool mm_archive_unpack_part(const mm_archive_part *p, const char *dir, int to, const char *to_dir, const mm_archive_lanes *l, mm_err *err) {
  unpacking u = {
      .part = p, .from = mm_path_of(dir, p->file), .to = mm_path_of(to_dir, p->part->file), .in = MM_FILE_NONE, .out = -1, .lanes = l};
  bool ok = mm_file_open(&u.in, u.from.text, err) && (u.out = mm_create_at(to, to_dir, p->part->file, err)) >= 0 &&
            mm_pool_run(l->threads, p->part->block_count, unpack_block, &u, err) && mm_fsync(u.out, u.to.text, false, err);
  if (u.out >= 0 && !mm_close(u.out, u.to.text, err)) ok = false;
  mm_file_close(&u.in);
  return ok;
}

bool mm_archive_prove_part(const mm_archive_part *p, const char *dir, const mm_archive_lanes *l, mm_err *err) {
  unpacking u = {.part = p, .from = mm_path_of(dir, p->file), .in = MM_FILE_NONE, .out = -1, .lanes = l};
  const bool ok = mm_file_open(&u.in, u.from.text, err) && mm_size_is(u.from.text, u.in.size, p->size, err) &&
                  mm_pool_run(l->threads, p->part->block_count, unpack_block, &u, err);
  mm_file_close(&u.in);
  return ok;
}

bool mm_archive_read_part(const mm_archive_part *p, const char *dir, uint64_t at, void *to, uint64_t n, mm_err *err) {
  mm_archive_lanes lanes = {0};
  unpacking u = {.part = p, .from = mm_path_of(dir, p->file), .in = MM_FILE_NONE, .out = -1, .lanes = &lanes};
  bool ok = mm_archive_lanes_open(&lanes, 1, err) && mm_file_open(&u.in, u.from.text, err);
  for (uint64_t done = 0, k; ok && done < n; done += k) {
    const uint64_t skip = (at + done) % MM_HASH_BLOCK;
    k = mm_min(n - done, MM_HASH_BLOCK - skip);
    ok = unpack_block(&u, (size_t)((at + done) / MM_HASH_BLOCK), 0, err);
    if (ok) memcpy((uint8_t *)to + done, lanes.lane->block + skip, k);
  }
  mm_file_close(&u.in);
  mm_archive_lanes_close(&lanes);
  return ok;
}
