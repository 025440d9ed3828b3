/* Reading ahead into a ring (reader.h). Chunk i goes to buffer i modulo the ring; what it is of is chosen when the first thread takes a
 * piece of it (read_order.c). Threads take the next piece of the next chunk as soon as its buffer is free, the caller takes chunks in
 * order. A thread that has read a block to be hashed hands it on and hashes it afterwards: the caller does not wait for that, the buffer's
 * next use does. */
#include "loader/stream/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "formats/system/pool.h"

typedef struct source {
  mm_file file;
  int direct; /* descriptor with O_DIRECT, or -1 */
  mm_read_path path;
  mm_read_stats stats;
} source;

struct mm_reader {
  mm_reader_config c;
  source *source;

  pthread_mutex_t lock;
  pthread_cond_t freed, ready; /* a buffer is free; a chunk is filled or hashed, or reading has failed */
  mm_read_order order;
  mm_read_run *run;        /* [buffers] what is, or will be, in each */
  size_t next, next_piece; /* to be read */
  size_t given, released;  /* chunks */
  uint32_t *left;          /* [buffers] pieces that are not read yet */
  uint32_t *unhashed;      /* [buffers] blocks that are not hashed yet */
  uint64_t unproved;       /* blocks of all runs that are not */
  bool stop;
  mm_err err;
  pthread_t *thread;
  unsigned threads;
  mm_read_stats stats;
  double opened;
  bool logged;
};

/* ---- which path ---- */

/* File systems whose files are in memory, and those whose files are elsewhere. */
static bool in_memory(long type) { return type == 0x01021994 /* tmpfs */ || (unsigned long)type == 0x858458f6 /* ramfs */; }
static bool far_away(long type) {
  static const unsigned long types[] = {
      0x6969 /* NFS */,    0x517B /* SMB */,        0xFF534D42 /* CIFS */, 0xFE534D42 /* SMB2 */, 0x65735546 /* FUSE */,
      0x01021997 /* 9P */, 0x0BD00BD0 /* Lustre */, 0x00C36400 /* Ceph */, 0x5346414F /* AFS */,  0x47504653 /* GPFS */,
      0x19830326 /* BeeGFS */};
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    if (types[i] == (unsigned long)type) return true;
  return false;
}

/* Does the work of mm_file_cached where the kernel does not know that call. mincore is truthful about files that the caller may write. */
static bool cached_by_mincore(const mm_file *f, const char *path) {
  if (f->size == 0 || access(path, W_OK) != 0) return false;
  size_t page = (size_t)sysconf(_SC_PAGESIZE), pages = (size_t)mm_ceil_div(f->size, page);
  void *at = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, f->fd, 0);
  unsigned char *in = malloc(pages);
  bool all = at != MAP_FAILED && in && mincore(at, f->size, in) == 0;
  for (size_t i = 0; all && i < pages; i++) all = in[i] & 1;
  if (at != MAP_FAILED) munmap(at, f->size);
  free(in);
  return all;
}

static bool is_cached(const mm_file *f, const char *path) {
  if (f->size == 0) return false;
  if (mm_file_cached(f->fd, 0, f->size)) return true;
  return (errno == ENOSYS || errno == EPERM) && cached_by_mincore(f, path);
}

/* A descriptor that bypasses the page cache; -1 where the file system has none. Some file systems refuse only when it is read. */
static int open_direct(const char *path, uint8_t *buffer) {
  int fd;
  do fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC | O_NOCTTY);
  while (fd < 0 && errno == EINTR);
  if (fd < 0 || pread(fd, buffer, MM_DIRECT, 0) >= 0 || (errno != EINVAL && errno != EOPNOTSUPP)) return fd;
  close(fd);
  return -1;
}

static void probe(mm_reader *r, source *s, const char *path) {
  struct statfs fs = {0};
  bool known = fstatfs(s->file.fd, &fs) == 0;
  mm_read_path forced = r->c.path;
  if (forced == MM_READ_PROBE && ((known && in_memory((long)fs.f_type)) || is_cached(&s->file, path))) forced = MM_READ_CACHE;
  if (forced == MM_READ_PROBE && known && far_away((long)fs.f_type)) forced = MM_READ_STREAMS;
  if (forced == MM_READ_PROBE || forced == MM_READ_DIRECT) s->direct = open_direct(path, r->c.ring);
  s->path = s->direct >= 0 ? MM_READ_DIRECT : forced == MM_READ_CACHE ? MM_READ_CACHE : MM_READ_STREAMS;
}

static bool open_source(mm_reader *r, uint32_t i, mm_err *err) {
  const mm_read_file *f = &r->c.file[i];
  source *s = &r->source[i];
  *s = (source){.file = MM_FILE_NONE, .direct = -1, .path = MM_READ_MEMORY};
  s->file.size = f->size;
  if (!f->path) return true;
  if (!mm_file_open(&s->file, f->path, err)) return false;
  if (f->id && memcmp(f->id, &s->file.id, sizeof *f->id) != 0)
    return mm_fail(err, MM_IO, "E_CHANGED", mm_at(f->path, NULL), "the file is not the one that was opened before");
  probe(r, s, f->path);
  return true;
}

/* ---- what to read ---- */

static bool check_end(const mm_reader *r, const mm_read_want *w, mm_err *err) {
  const uint64_t size = r->source[w->file].file.size;
  uint64_t end;
  if (mm_add(w->offset, w->bytes, &end) && end <= size) return true;
  return mm_fail(err, MM_IO, "E_SHORT_READ", mm_at_offset(r->c.file[w->file].path, NULL, size),
                 "the file ends here, %" PRIu64 " more bytes expected", w->bytes - (w->offset < size ? size - w->offset : 0));
}

static bool plan(mm_reader *r, mm_err *err) {
  for (size_t i = 0; i < r->c.wants; i++)
    if (!check_end(r, &r->c.want[i], err)) return false;
  uint64_t *size = mm_calloc(r->c.files + (size_t)1, sizeof *size, err);
  for (uint32_t i = 0; size && i < r->c.files; i++) size[i] = r->source[i].file.size;
  const mm_read_list list = {r->c.file, size, r->c.want, r->c.wants, r->c.chunk};
  const bool ok = size && mm_read_order_open(&r->order, &list, err);
  free(size);
  r->stats.wanted = r->order.sum;
  r->unproved = r->order.hash;
  return ok;
}

static size_t piece_bytes(const mm_reader *r, const mm_read_run *w) { return r->c.file[w->file].digest ? MM_HASH_BLOCK : r->c.piece; }
static size_t pieces(const mm_reader *r, const mm_read_run *w) { return (size_t)mm_ceil_div(w->bytes, piece_bytes(r, w)); }

/* ---- threads ---- */

/* The aligned window around [offset, offset + n) to buf; the end of the file may cut its last read short. */
static bool read_direct(const source *s, const char *path, uint8_t *buf, size_t n, uint64_t offset, mm_err *err) {
  size_t want = (size_t)mm_round_up(n, MM_DIRECT);
  for (size_t done = 0; done < n;) {
    ssize_t got = pread(s->direct, buf + done, want - done, (off_t)(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return mm_fail_errno(err, mm_at_offset(path, NULL, offset + done), "read", errno);
    done += (size_t)got;
    if (done < n && (got == 0 || done % MM_DIRECT != 0))
      return mm_fail(err, MM_IO, "E_SHORT_READ", mm_at_offset(path, NULL, offset + done), "the file ends here, %zu more bytes expected",
                     n - done);
  }
  return true;
}

/* Bytes [at, at + n) of a run; *taken: the path they came by. */
static bool read_piece(const mm_reader *r, const mm_read_run *w, uint8_t *to, size_t at, size_t n, mm_read_path *taken, mm_err *err) {
  const mm_read_file *f = &r->c.file[w->file];
  const source *s = &r->source[w->file];
  const uint64_t offset = w->offset + at;
  *taken = s->path;
  if (s->path == MM_READ_MEMORY) {
    memcpy(to + at, f->memory + offset, n);
    return true;
  }
  if (s->path == MM_READ_DIRECT && (r->c.path == MM_READ_DIRECT || !mm_file_cached(s->file.fd, offset, n)))
    return read_direct(s, f->path, to + at, n, offset, err);
  if (s->path == MM_READ_DIRECT) *taken = MM_READ_CACHE;
  return mm_file_read(&s->file, f->path, to + at, n, offset, err);
}

/* A block that is in the ring, at `data`. */
static bool prove(const mm_reader *r, const mm_read_run *w, size_t at, const uint8_t *data, size_t n, mm_err *err) {
  const mm_read_file *f = &r->c.file[w->file];
  const uint64_t offset = w->offset + at, block = offset / MM_HASH_BLOCK;
  const mm_digest d = mm_sha256(data, n);
  return mm_digest_equal(&d, &f->digest[block]) || mm_fail(err, MM_INTEGRITY, "E_DIGEST", mm_at_offset(f->path, NULL, offset),
                                                           "found block %" PRIu64 " damaged, expected %zu bytes of its digest", block, n);
}

/* True if the buffer of the next piece is still in use. */
static bool is_full(const mm_reader *r) {
  return r->next >= r->released + r->c.buffers || (r->next_piece == 0 && r->unhashed[r->next % r->c.buffers] > 0);
}

static bool has_more(const mm_reader *r) { return r->next_piece > 0 || r->order.left > 0; }

/* True if there is more to read; waits until a buffer is free for it. */
static bool wait_for_buffer(mm_reader *r) {
  while (!r->stop && has_more(r) && is_full(r)) pthread_cond_wait(&r->freed, &r->lock);
  return !r->stop && has_more(r);
}

static void note_failure(mm_reader *r, const mm_err *err) {
  if (r->err.status == MM_OK) r->err = *err;
  r->stop = true;
  pthread_cond_broadcast(&r->freed);
  pthread_cond_broadcast(&r->ready);
}

static void note_read(mm_reader *r, uint32_t file, size_t buffer, size_t n, mm_read_path taken) {
  r->stats.bytes[taken] += n;
  r->source[file].stats.bytes[taken] += n;
  mm_read_log_add(r->c.log, taken, n, 0);
  if (--r->left[buffer] == 0) pthread_cond_broadcast(&r->ready);
}

static void note_hashed(mm_reader *r, uint32_t file, size_t buffer, size_t n) {
  r->stats.hashed += n;
  r->source[file].stats.hashed += n;
  mm_read_log_add(r->c.log, MM_READ_PROBE, 0, n);
  r->unproved--;
  if (--r->unhashed[buffer] > 0) return;
  pthread_cond_broadcast(&r->freed);
  pthread_cond_broadcast(&r->ready);
}

/* The next piece, which is the caller's from here on; under the lock, but for what it does with bytes. */
static void read_next(mm_reader *r) {
  const size_t buffer = r->next % r->c.buffers;
  if (r->next_piece == 0) mm_read_order_take(&r->order, &r->run[buffer]);
  const mm_read_run w = r->run[buffer];
  const bool hashed = r->c.file[w.file].digest;
  const size_t at = r->next_piece * piece_bytes(r, &w), n = (size_t)mm_min(piece_bytes(r, &w), w.bytes - at);
  uint8_t *const to = r->c.ring + buffer * r->c.chunk;
  if (r->next_piece == 0) r->left[buffer] = (uint32_t)pieces(r, &w), r->unhashed[buffer] = hashed ? r->left[buffer] : 0;
  if (++r->next_piece == pieces(r, &w)) r->next++, r->next_piece = 0;
  pthread_mutex_unlock(&r->lock);
  mm_err err = {0};
  mm_read_path taken;
  bool ok = read_piece(r, &w, to, at, n, &taken, &err);
  pthread_mutex_lock(&r->lock);
  if (ok) note_read(r, w.file, buffer, n, taken);
  if (ok && hashed) {
    pthread_mutex_unlock(&r->lock);
    ok = prove(r, &w, at, to + at, n, &err);
    pthread_mutex_lock(&r->lock);
    if (ok) note_hashed(r, w.file, buffer, n);
  }
  if (!ok) note_failure(r, &err);
}

static void *read_ahead(void *arg) {
  mm_reader *r = arg;
  pthread_mutex_lock(&r->lock);
  while (wait_for_buffer(r)) read_next(r);
  pthread_mutex_unlock(&r->lock);
  return NULL;
}

static bool start_threads(mm_reader *r, mm_err *err) {
  for (; r->threads < r->c.threads; r->threads++) {
    int failed = pthread_create(&r->thread[r->threads], NULL, read_ahead, r);
    if (failed && r->threads == 0) return mm_fail_thread(err, "start a thread that reads", failed);
    if (failed) break;
  }
  return true;
}

/* ---- the caller's side ---- */

mm_reader *mm_reader_open(const mm_reader_config *c, mm_err *err) {
  mm_reader *r = mm_calloc(1, sizeof *r, err);
  if (!r) return NULL;
  r->c = *c, r->opened = mm_now();
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->freed, NULL);
  pthread_cond_init(&r->ready, NULL);
  bool ok = (r->source = mm_calloc(c->files ? c->files : 1, sizeof *r->source, err)) &&
            (r->left = mm_calloc(c->buffers, sizeof *r->left, err)) && (r->unhashed = mm_calloc(c->buffers, sizeof *r->unhashed, err)) &&
            (r->run = mm_calloc(c->buffers, sizeof *r->run, err)) && (r->thread = mm_calloc(c->threads, sizeof *r->thread, err));
  if (!ok) r->c.files = 0;
  for (uint32_t i = 0; ok && i < c->files; i++) r->source[i] = (source){.file = MM_FILE_NONE, .direct = -1};
  for (uint32_t i = 0; ok && i < c->files; i++) ok = open_source(r, i, err);
  ok = ok && plan(r, err);
  if (ok) mm_read_log_begin(c->log, r->stats.wanted, r->opened), r->logged = true;
  if (ok && start_threads(r, err)) return r;
  mm_reader_close(r);
  return NULL;
}

static bool check_files(const mm_reader *r, mm_err *err) {
  for (uint32_t i = 0; i < r->c.files; i++)
    if (r->c.file[i].path && !mm_file_unchanged(&r->source[i].file, r->c.file[i].path, err)) return false;
  return true;
}

/* Under the lock: false, with its error, when reading has failed. */
static bool is_well(const mm_reader *r, mm_err *err) { return r->err.status == MM_OK || mm_fail_as(err, &r->err); }

/* A chunk has been read, which is the caller's now, or there is none (*out NULL) and all blocks were hashed. */
static bool wait_for_chunk(mm_reader *r, const mm_read_run **out, mm_err *err) {
  const size_t buffer = r->given % r->c.buffers;
  bool more;
  pthread_mutex_lock(&r->lock);
  for (;;) {
    more = r->given < r->next || has_more(r);
    const bool wait = more ? r->next <= r->given || r->left[buffer] > 0 : r->unproved > 0;
    if (r->err.status != MM_OK || !wait) break;
    pthread_cond_wait(&r->ready, &r->lock);
  }
  const bool ok = is_well(r, err);
  r->given += ok && more;
  pthread_mutex_unlock(&r->lock);
  *out = more ? &r->run[buffer] : NULL;
  return ok;
}

bool mm_reader_next(mm_reader *r, mm_chunk *out, mm_err *err) {
  *out = (mm_chunk){0};
  if (r->given - r->released >= r->c.buffers)
    return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "all %u buffers are with the caller, expected one to be released",
                   r->c.buffers);
  const mm_read_run *w;
  if (!wait_for_chunk(r, &w, err)) return false;
  if (!w) return check_files(r, err);
  *out = (mm_chunk){r->c.ring + (size_t)(w - r->run) * r->c.chunk, w->file, w->offset, w->bytes, w->first, w->count};
  return true;
}

void mm_reader_release(mm_reader *r) {
  pthread_mutex_lock(&r->lock);
  r->released++;
  pthread_cond_broadcast(&r->freed);
  pthread_mutex_unlock(&r->lock);
}

void mm_reader_prefetch(mm_reader *r, uint32_t file, uint64_t offset, uint64_t bytes) {
  pthread_mutex_lock(&r->lock);
  mm_read_order_prefetch(&r->order, file, offset, bytes);
  pthread_mutex_unlock(&r->lock);
}

/* True if the first n chunks are hashed. A buffer takes another chunk only once the one before was hashed. */
static bool is_hashed(const mm_reader *r, size_t n) {
  for (size_t c = n > r->c.buffers ? n - r->c.buffers : 0; c < n; c++)
    if (c + r->c.buffers >= r->next + (r->next_piece > 0) && r->unhashed[c % r->c.buffers] > 0) return false;
  return true;
}

bool mm_reader_prove(mm_reader *r, mm_err *err) {
  pthread_mutex_lock(&r->lock);
  const size_t n = r->given;
  while (r->err.status == MM_OK && !is_hashed(r, n)) pthread_cond_wait(&r->ready, &r->lock);
  const bool ok = is_well(r, err);
  pthread_mutex_unlock(&r->lock);
  return ok && check_files(r, err);
}

static void close_source(const mm_reader *r, uint32_t i) {
  source *s = &r->source[i];
  if (r->logged && r->c.file[i].path) mm_read_log_keep(r->c.log, r->c.file[i].path, &s->stats);
  mm_file_close(&s->file);
  if (s->direct >= 0) close(s->direct);
}

void mm_reader_close(mm_reader *r) {
  if (!r) return;
  mm_raise(&r->stop, &r->lock, &r->freed);
  for (unsigned i = 0; i < r->threads; i++) pthread_join(r->thread[i], NULL);
  for (uint32_t i = 0; i < r->c.files; i++) close_source(r, i);
  if (r->logged) mm_read_log_end(r->c.log, mm_now());
  pthread_cond_destroy(&r->ready);
  pthread_cond_destroy(&r->freed);
  pthread_mutex_destroy(&r->lock);
  free(r->source);
  mm_read_order_close(&r->order);
  MM_FREE(r->run, r->left, r->unhashed, r->thread, r);
}

mm_read_stats mm_reader_stats(const mm_reader *r) {
  mm_reader *open = (mm_reader *)(uintptr_t)r; /* its lock */
  pthread_mutex_lock(&open->lock);
  mm_read_stats s = r->stats;
  pthread_mutex_unlock(&open->lock);
  s.seconds = mm_now() - r->opened;
  return s;
}
