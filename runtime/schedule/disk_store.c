/* The file of blocks and the threads that copy (disk_store.h). The digest of each block stays in memory, so that a block that was changed,
 * or written in part, is found. */
#include "runtime/schedule/disk_store.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "formats/hash.h"
#include "formats/system/pool.h"

enum { THREADS = 8 };

/* Moves in the order they came; first: the next one. */
typedef struct disk_queue {
  mm_disk_move *move;
  size_t first, count, cap;
} disk_queue;

struct mm_disk_store {
  char *name; /* for errors */
  int file;
  uint64_t block_bytes;
  mm_pool_part *part; /* [parts] */
  uint32_t parts;
  mm_digest *digest; /* [blocks] */
  pthread_t thread[THREADS];
  uint32_t threads;

  pthread_mutex_t lock;
  pthread_cond_t changed;
  disk_queue in, out;
  mm_disk_end *end; /* [ends] */
  size_t ends, end_cap;
  uint32_t reads; /* that have not ended */
  mm_err reason;  /* of the last failure */
  bool closing;
};

/* ---- one block ---- */

static bool copy_bytes(const mm_disk_store *d, char *at, uint64_t n, uint64_t offset, bool in, mm_err *err) {
  while (n) {
    const size_t most = (size_t)mm_min(n, UINT64_C(1) << 30);
    const ssize_t done = in ? pread(d->file, at, most, (off_t)offset) : pwrite(d->file, at, most, (off_t)offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return mm_fail_errno(err, mm_at(d->name, NULL), in ? "read" : "write", errno);
    if (done == 0)
      return mm_fail(err, MM_INTEGRITY, "E_DIGEST", mm_at(d->name, NULL),
                     "offset %llu: found the end of the file, expected %llu bytes more", (unsigned long long)offset, (unsigned long long)n);
    at += done, offset += (uint64_t)done, n -= (uint64_t)done;
  }
  return true;
}

static bool copy_block(mm_disk_store *d, const mm_disk_move *m, mm_err *err) {
  const uint64_t first = m->block * d->block_bytes;
  uint64_t offset = first;
  mm_sha256_state sum;
  mm_sha256_begin(&sum);
  for (uint32_t i = 0; i < d->parts; i++) {
    const mm_pool_part *p = &d->part[i];
    char *const at = p->memory + m->place * p->bytes;
    if (!copy_bytes(d, at, p->bytes, offset, m->in, err)) break;
    mm_sha256_add(&sum, at, p->bytes);
    offset += p->bytes;
  }
  const mm_digest found = mm_sha256_end(&sum);
  if (err->status != MM_OK) return false;
  if (!m->in) d->digest[m->block] = found;
  return mm_digest_equal(&found, &d->digest[m->block]) ||
         mm_fail(err, MM_INTEGRITY, "E_DIGEST", mm_at(d->name, NULL),
                 "offset %llu: found another page than was written there; its tokens are computed", (unsigned long long)first);
}

/* ---- the threads ---- */

static bool next_move(mm_disk_store *d, mm_disk_move *m) {
  disk_queue *q = d->in.first < d->in.count ? &d->in : &d->out;
  if (q->first == q->count) return false;
  *m = q->move[q->first++];
  if (q->first == q->count) q->first = q->count = 0;
  return true;
}

static void *copy_blocks(void *arg) {
  mm_disk_store *d = arg;
  pthread_mutex_lock(&d->lock);
  while (!d->closing) {
    mm_disk_move m;
    if (!next_move(d, &m)) {
      pthread_cond_wait(&d->changed, &d->lock);
      continue;
    }
    pthread_mutex_unlock(&d->lock);
    mm_err err = {0};
    const bool ok = copy_block(d, &m, &err);
    pthread_mutex_lock(&d->lock);
    d->end[d->ends++] = (mm_disk_end){m, ok};
    if (!ok) d->reason = err;
    d->reads -= m.in;
    pthread_cond_broadcast(&d->changed);
  }
  pthread_mutex_unlock(&d->lock);
  return NULL;
}

/* Under the lock, with room in d->end for what is queued too. */
static bool queue_moves(mm_disk_store *d, const mm_disk_move *move, uint32_t count, mm_err *err) {
  const size_t under_way = d->ends + d->in.count + d->out.count + THREADS + count;
  if (!MM_GROW(d->end, &d->end_cap, under_way, err) || !MM_GROW(d->in.move, &d->in.cap, d->in.count + count, err) ||
      !MM_GROW(d->out.move, &d->out.cap, d->out.count + count, err))
    return false;
  for (uint32_t i = 0; i < count; i++) {
    disk_queue *q = move[i].in ? &d->in : &d->out;
    q->move[q->count++] = move[i];
    d->reads += move[i].in;
  }
  return true;
}

bool mm_disk_store_move(mm_disk_store *d, const mm_disk_move *move, uint32_t count, mm_err *err) {
  pthread_mutex_lock(&d->lock);
  const bool ok = queue_moves(d, move, count, err);
  pthread_cond_broadcast(&d->changed);
  pthread_mutex_unlock(&d->lock);
  return ok;
}

/* Under the lock. */
static void wait_for(mm_disk_store *d, mm_disk_wait wait) {
  const struct timespec until = mm_later(MM_DISK_WAIT_S);
  for (int late = 0; (wait == MM_DISK_ANY ? !d->ends : d->reads > 0) && !late;)
    late = pthread_cond_clockwait(&d->changed, &d->lock, CLOCK_MONOTONIC, &until);
}

uint32_t mm_disk_store_ended(mm_disk_store *d, mm_disk_wait wait, mm_disk_end *end, uint32_t most, mm_err *reason) {
  pthread_mutex_lock(&d->lock);
  if (wait != MM_DISK_NOW) wait_for(d, wait);
  const uint32_t n = (uint32_t)mm_min(most, d->ends);
  if (n) memcpy(end, d->end + d->ends - n, n * sizeof *end);
  d->ends -= n;
  *reason = d->reason;
  pthread_mutex_unlock(&d->lock);
  return n;
}

/* ---- open and close ---- */

/* Opens the file in the folder, which this user alone can enter, and takes its name away. */
static bool open_unnamed(mm_disk_store *d, const char *folder, mm_err *err) {
  const size_t n = strlen(folder) + sizeof "/pages";
  if (!(d->name = mm_calloc(1, n, err))) return false;
  snprintf(d->name, n, "%s/pages", folder);
  d->file = open(d->name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (d->file < 0) return mm_fail_errno(err, mm_at(d->name, NULL), "open", errno);
  return unlink(d->name) == 0 || mm_fail_errno(err, mm_at(d->name, NULL), "unlink", errno);
}

/* The folder is not empty: its file system keeps the name of an open file that is removed, some (FUSE) also a moment longer. */
static bool give_up(mm_disk_store *d, const char *dir, const char *folder, int reason, mm_err *err) {
  if (d->file >= 0) mm_either_way(close(d->file) == 0);
  d->file = -1;
  for (int i = 0; i < 100; i++) {
    if (rmdir(folder) == 0)
      return mm_fail(err, MM_IO, "E_IO", mm_at(dir, NULL),
                     "found a file system that keeps the name of an open file that is removed, as NFS and FUSE do, expected another");
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  }
  return mm_fail_errno(err, mm_at(folder, NULL), "remove", reason);
}

static bool open_file(mm_disk_store *d, const char *dir, mm_err *err) {
  const size_t n = strlen(dir) + sizeof "/minimax-kv-XXXXXX";
  char *folder = mm_calloc(1, n, err);
  if (!folder) return false;
  snprintf(folder, n, "%s/minimax-kv-XXXXXX", dir);
  bool ok = mkdtemp(folder) || mm_fail_errno(err, mm_at(dir, NULL), "make a folder", errno);
  if (ok) {
    ok = open_unnamed(d, folder, err);
    if (rmdir(folder) != 0) ok = give_up(d, dir, folder, errno, err);
  }
  free(folder);
  return ok;
}

static bool start_threads(mm_disk_store *d, mm_err *err) {
  const uint32_t wanted = (uint32_t)mm_min(THREADS, mm_pool_cpus());
  for (int failed; d->threads < wanted; d->threads++)
    if ((failed = pthread_create(&d->thread[d->threads], NULL, copy_blocks, d)) != 0)
      return mm_fail_thread(err, "start a thread that copies pages", failed);
  return true;
}

mm_disk_store *mm_disk_store_open(const char *dir, uint32_t blocks, const mm_pool_part *part, uint32_t parts, mm_err *err) {
  mm_disk_store *d = mm_calloc(1, sizeof *d, err);
  if (!d) return NULL;
  d->file = -1;
  d->parts = parts;
  pthread_mutex_init(&d->lock, NULL);
  pthread_cond_init(&d->changed, NULL);
  d->part = mm_calloc(parts, sizeof *d->part, err);
  d->digest = mm_calloc(blocks, sizeof *d->digest, err);
  for (uint32_t i = 0; d->part && i < parts; i++) d->part[i] = part[i], d->block_bytes += part[i].bytes;
  if (d->part && d->digest && open_file(d, dir, err) && start_threads(d, err)) return d;
  mm_disk_store_close(d);
  return NULL;
}

void mm_disk_store_close(mm_disk_store *d) {
  if (!d) return;
  pthread_mutex_lock(&d->lock);
  d->closing = true;
  pthread_cond_broadcast(&d->changed);
  pthread_mutex_unlock(&d->lock);
  for (uint32_t i = 0; i < d->threads; i++) pthread_join(d->thread[i], NULL);
  if (d->file >= 0) mm_either_way(close(d->file) == 0); /* nothing of it is wanted */
  pthread_cond_destroy(&d->changed);
  pthread_mutex_destroy(&d->lock);
  MM_FREE(d->name, d->part, d->digest, d->in.move, d->out.move, d->end, d);
}
