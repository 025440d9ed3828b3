/* Reading ahead into a ring (reader.h). Chunk i goes to buffer i modulo the ring; threads take the next piece of the next chunk as soon as
 * its buffer is free, the caller takes chunks in order. */
#include "loader/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

typedef struct source {
  mm_file file;
  int direct; /* descriptor with O_DIRECT, or -1 */
  mm_read_path path;
} source;

/* A window of a file that one buffer takes. */
typedef struct window {
  uint32_t file;
  uint64_t offset; /* a multiple of MM_DIRECT */
  size_t bytes, first, count;
} window;

struct mm_reader {
  mm_reader_config c;
  source *source;
  window *window;
  size_t windows, windows_cap;

  pthread_mutex_t lock;
  pthread_cond_t room, ready; /* a buffer is free; a chunk is filled, or reading has failed */
  size_t next, next_piece;    /* to be read */
  size_t given, released;     /* chunks */
  uint32_t *left;             /* [buffers] pieces that are not read yet */
  bool stop;
  mm_err err;
  pthread_t *thread;
  unsigned threads;
  uint64_t bytes[MM_READ_PATHS];
  double opened;
};

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

const char *mm_read_path_name(mm_read_path p) {
  static const char *const name[] = {"unknown", "page cache", "O_DIRECT", "streams", "memory"};
  return name[p];
}

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

/* The same as mm_file_cached where the kernel does not know that call. mincore tells the truth about files that one may write. */
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

/* A descriptor past the page cache; -1 where the file system has none, or says so only when it is read. */
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

/* ---- windows ---- */

static int by_place(const void *a, const void *b) {
  const mm_read_want *x = a, *y = b;
  if (x->file != y->file) return x->file < y->file ? -1 : 1;
  return (x->offset > y->offset) - (x->offset < y->offset);
}

static bool add_window(mm_reader *r, const mm_read_want *w, uint64_t offset, size_t first, mm_err *err) {
  if (!mm_grow((void **)&r->window, &r->windows_cap, r->windows + 1, sizeof *r->window, err)) return false;
  r->window[r->windows++] = (window){.file = w->file, .offset = offset, .first = first};
  return true;
}

/* The last window takes as much of the want as it has room for, new ones the rest. */
static bool place_want(mm_reader *r, size_t i, mm_err *err) {
  const mm_read_want *w = &r->c.want[i];
  const mm_read_file *f = &r->c.file[w->file];
  uint64_t at = w->offset, end, size = r->source[w->file].file.size;
  if (!mm_add(at, w->bytes, &end) || end > size)
    return mm_fail(err, MM_IO, "E_SHORT_READ", mm_at_offset(f->path, NULL, size), "the file ends here, %" PRIu64 " more bytes expected",
                   w->bytes - (at < size ? size - at : 0));
  while (at < end) {
    window *last = r->windows ? &r->window[r->windows - 1] : NULL;
    bool fits = last && last->file == w->file && at >= last->offset && at < last->offset + r->c.chunk &&
                at <= mm_round_up(last->offset + last->bytes, MM_DIRECT);
    if (!fits) {
      if (!add_window(r, w, at - at % MM_DIRECT, i, err)) return false;
      last = &r->window[r->windows - 1];
    }
    at = mm_min(end, last->offset + r->c.chunk);
    last->bytes = (size_t)mm_max(last->bytes, at - last->offset);
    last->count = i + 1 - last->first;
  }
  return true;
}

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

/* Bytes [at, at + n) of a window; *taken: the path they came by. */
static bool read_piece(const mm_reader *r, const window *w, uint8_t *to, size_t at, size_t n, mm_read_path *taken, mm_err *err) {
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

static size_t pieces(const mm_reader *r, const window *w) { return (size_t)mm_ceil_div(w->bytes, r->c.piece); }

/* Whether there is more to read; waits until there is room for it. */
static bool wait_for_room(mm_reader *r) {
  while (!r->stop && r->next < r->windows && r->next >= r->released + r->c.buffers) pthread_cond_wait(&r->room, &r->lock);
  return !r->stop && r->next < r->windows;
}

static void *read_ahead(void *arg) {
  mm_reader *r = arg;
  pthread_mutex_lock(&r->lock);
  while (wait_for_room(r)) {
    const window *w = &r->window[r->next];
    size_t buffer = r->next % r->c.buffers, at = r->next_piece * r->c.piece, n = (size_t)mm_min(r->c.piece, w->bytes - at);
    if (r->next_piece == 0) r->left[buffer] = (uint32_t)pieces(r, w);
    if (++r->next_piece == pieces(r, w)) r->next++, r->next_piece = 0;
    pthread_mutex_unlock(&r->lock);
    mm_err err = {0};
    mm_read_path taken;
    bool ok = read_piece(r, w, r->c.ring + buffer * r->c.chunk, at, n, &taken, &err);
    pthread_mutex_lock(&r->lock);
    if (!ok && r->err.status == MM_OK) r->err = err;
    if (!ok) r->stop = true, pthread_cond_broadcast(&r->room);
    r->bytes[taken] += n;
    if (--r->left[buffer] == 0 || !ok) pthread_cond_signal(&r->ready);
  }
  pthread_mutex_unlock(&r->lock);
  return NULL;
}

static bool start_threads(mm_reader *r, mm_err *err) {
  for (; r->threads < r->c.threads; r->threads++) {
    int failed = pthread_create(&r->thread[r->threads], NULL, read_ahead, r);
    if (failed && r->threads == 0)
      return mm_fail(err, MM_LIMIT, "E_THREADS", mm_at(NULL, NULL), "started no thread to read with: %s", strerror(failed));
    if (failed) break;
  }
  return true;
}

/* ---- the caller's side ---- */

mm_reader *mm_reader_open(const mm_reader_config *c, mm_err *err) {
  mm_reader *r = mm_calloc(1, sizeof *r, err);
  if (!r) return NULL;
  r->c = *c, r->opened = now();
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->room, NULL);
  pthread_cond_init(&r->ready, NULL);
  bool ok = (r->source = mm_calloc(c->files ? c->files : 1, sizeof *r->source, err)) &&
            (r->left = mm_calloc(c->buffers, sizeof *r->left, err)) && (r->thread = mm_calloc(c->threads, sizeof *r->thread, err));
  if (!ok) r->c.files = 0;
  for (uint32_t i = 0; ok && i < c->files; i++) r->source[i] = (source){.file = MM_FILE_NONE, .direct = -1};
  for (uint32_t i = 0; ok && i < c->files; i++) ok = open_source(r, i, err);
  if (ok) mm_sort(c->want, c->wants, sizeof *c->want, by_place);
  for (size_t i = 0; ok && i < c->wants; i++) ok = place_want(r, i, err);
  if (ok && start_threads(r, err)) return r;
  mm_reader_close(r);
  return NULL;
}

static bool check_files(const mm_reader *r, mm_err *err) {
  for (uint32_t i = 0; i < r->c.files; i++)
    if (r->c.file[i].path && !mm_file_unchanged(&r->source[i].file, r->c.file[i].path, err)) return false;
  return true;
}

bool mm_reader_next(mm_reader *r, mm_chunk *out, mm_err *err) {
  *out = (mm_chunk){0};
  if (r->given - r->released >= r->c.buffers)
    return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "all %u buffers are with the caller, expected one to be released",
                   r->c.buffers);
  if (r->given == r->windows) return check_files(r, err);
  size_t buffer = r->given % r->c.buffers;
  pthread_mutex_lock(&r->lock);
  while (r->err.status == MM_OK && (r->next <= r->given || r->left[buffer] > 0)) pthread_cond_wait(&r->ready, &r->lock);
  bool ok = r->err.status == MM_OK;
  if (!ok && err && err->status == MM_OK) *err = r->err;
  pthread_mutex_unlock(&r->lock);
  if (!ok) return false;
  const window *w = &r->window[r->given++];
  *out = (mm_chunk){r->c.ring + buffer * r->c.chunk, w->file, w->offset, w->bytes, w->first, w->count};
  return true;
}

void mm_reader_release(mm_reader *r) {
  pthread_mutex_lock(&r->lock);
  r->released++;
  pthread_cond_broadcast(&r->room);
  pthread_mutex_unlock(&r->lock);
}

static pthread_mutex_t total_lock = PTHREAD_MUTEX_INITIALIZER;
static mm_read_stats total;
static double first_opened;

static void add_total(const mm_reader *r) {
  pthread_mutex_lock(&total_lock);
  if (first_opened == 0 || r->opened < first_opened) first_opened = r->opened;
  for (int i = 0; i < MM_READ_PATHS; i++) total.bytes[i] += r->bytes[i];
  total.seconds = now() - first_opened;
  pthread_mutex_unlock(&total_lock);
}

void mm_reader_close(mm_reader *r) {
  if (!r) return;
  pthread_mutex_lock(&r->lock);
  r->stop = true;
  pthread_cond_broadcast(&r->room);
  pthread_mutex_unlock(&r->lock);
  for (unsigned i = 0; i < r->threads; i++) pthread_join(r->thread[i], NULL);
  if (r->threads) add_total(r);
  for (uint32_t i = 0; i < r->c.files; i++) {
    mm_file_close(&r->source[i].file);
    if (r->source[i].direct >= 0) close(r->source[i].direct);
  }
  pthread_cond_destroy(&r->ready);
  pthread_cond_destroy(&r->room);
  pthread_mutex_destroy(&r->lock);
  free(r->source);
  free(r->window);
  free(r->left);
  free(r->thread);
  free(r);
}

mm_read_stats mm_reader_stats(const mm_reader *r) {
  mm_reader *open = (mm_reader *)(uintptr_t)r; /* its lock */
  mm_read_stats s = {.seconds = now() - r->opened};
  pthread_mutex_lock(&open->lock);
  memcpy(s.bytes, r->bytes, sizeof s.bytes);
  pthread_mutex_unlock(&open->lock);
  return s;
}

mm_read_stats mm_reader_total(void) {
  pthread_mutex_lock(&total_lock);
  mm_read_stats s = total;
  pthread_mutex_unlock(&total_lock);
  return s;
}

char *mm_read_text(char *out, size_t cap, const mm_read_stats *s) {
  uint64_t sum = 0;
  unsigned paths = 0;
  for (int i = 0; i < MM_READ_PATHS; i++) sum += s->bytes[i], paths += s->bytes[i] > 0;
  out[0] = 0;
  if (sum == 0) return out;
  double gb = (double)sum * 1e-9;
  size_t at = (size_t)snprintf(out, cap, "%.*f GB in %.2f s, %.1f GB/s", gb < 1 ? 3 : 1, gb, s->seconds, gb / s->seconds);
  for (int i = 0; i < MM_READ_PATHS; i++) {
    if (s->bytes[i] == 0 || at >= cap) continue;
    at += (size_t)snprintf(out + at, cap - at, ", %s", mm_read_path_name((mm_read_path)i));
    if (paths > 1 && at < cap) at += (size_t)snprintf(out + at, cap - at, " %.0f %%", 100 * (double)s->bytes[i] / (double)sum);
  }
  return out;
}
