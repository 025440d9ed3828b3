/* Reading ahead: every wanted byte comes once and is right, whatever the order of the wants, the sizes and the threads; no more than the
 * ring is filled ahead; what is asked for comes behind what is in the ring; short, changed and failing files are named errors; each path is
 * taken where it is to be. */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "loader/stream/reader.h"
#include "tests/unit/unit.h"

#define FILES 3
#define WANTS 40

static char dir[256], path[FILES][300];
static uint8_t *content[FILES];
static const size_t size[FILES] = {9500001, 70000, 4096 * 50};
static uint64_t seed = 1;

static uint64_t draw(uint64_t below) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (seed >> 20) % below;
}

/* ---- reads that fail: the program's own pread stands before the C library's ---- */

static atomic_long fail_after = -1; /* reads until one fails with EIO; -1: none */
static atomic_int direct_reads;
ssize_t faulty_pread(int fd, void *to, size_t n, off_t at) __asm__("pread");
ssize_t faulty_pread(int fd, void *to, size_t n, off_t at) {
  if (atomic_load(&fail_after) >= 0 && atomic_fetch_sub(&fail_after, 1) == 0) {
    errno = EIO;
    return -1;
  }
  if (fcntl(fd, F_GETFL) & O_DIRECT) atomic_fetch_add(&direct_reads, 1);
  return syscall(SYS_pread64, fd, to, n, at);
}

static int begin(void **state) {
  (void)state;
  const char *tmp = getenv("TMPDIR");
  snprintf(dir, sizeof dir, "%s/reader.XXXXXX", tmp ? tmp : "/tmp");
  assert_non_null(mkdtemp(dir));
  for (int f = 0; f < FILES; f++) {
    snprintf(path[f], sizeof path[f], "%s/%d", dir, f);
    content[f] = malloc(size[f]);
    for (size_t i = 0; i < size[f]; i++) content[f][i] = (uint8_t)draw(256);
    FILE *out = fopen(path[f], "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(content[f], 1, size[f], out), size[f]);
    assert_int_equal(fflush(out) + fsync(fileno(out)) + fclose(out), 0);
  }
  return 0;
}

static int end(void **state) {
  (void)state;
  for (int f = 0; f < FILES; f++) {
    unlink(path[f]);
    free(content[f]);
  }
  return rmdir(dir);
}

/* ---- what is read ---- */

typedef struct job {
  mm_read_file file[FILES];
  mm_read_want want[WANTS];
  mm_reader_config c;
} job;

static void set_up(job *j, unsigned threads, uint32_t buffers, size_t chunk, size_t piece, mm_read_path p) {
  *j = (job){.c = {.files = FILES, .wants = WANTS, .buffers = buffers, .chunk = chunk, .piece = piece, .threads = threads, .path = p}};
  for (int f = 0; f < FILES; f++) j->file[f] = (mm_read_file){.path = path[f]};
  j->file[2] = (mm_read_file){.memory = content[2], .size = size[2]};
  size_t n = 0;
  for (uint32_t f = 0; f < FILES; f++) {
    uint64_t at = draw(9000), most = 2 * size[f] / (WANTS / FILES);
    for (; n < (f + 1) * WANTS / FILES; n++) {
      uint64_t bytes = at < size[f] ? mm_min(draw(most), size[f] - at) : 0;
      j->want[n] = (mm_read_want){f, mm_min(at, size[f]), bytes, n, draw(2) * draw(size[f])};
      at += bytes + (draw(3) ? 0 : draw(20000));
    }
  }
  for (size_t i = WANTS - 1; i > 0; i--) { /* in any order */
    size_t k = draw(i + 1);
    mm_read_want t = j->want[i];
    j->want[i] = j->want[k], j->want[k] = t;
  }
  j->c.file = j->file, j->c.want = j->want;
  j->c.ring = aligned_alloc(MM_DIRECT, buffers * chunk);
  assert_non_null(j->c.ring);
  memset(j->c.ring, 0xA5, buffers * chunk);
}

/* Reads all, up to `held` chunks with the caller at a time; every wanted byte must be right and come once. */
static bool read_all(job *j, uint32_t held, mm_read_stats *stats, mm_err *err) {
  mm_reader *r = mm_reader_open(&j->c, err);
  uint64_t got[WANTS] = {0};
  uint32_t have = 0;
  mm_chunk c = {0};
  bool ok = r;
  while (ok) {
    if (have == held) mm_reader_release(r), have--;
    if (!(ok = mm_reader_next(r, &c, err)) || !c.data) break;
    have++;
    assert_true(c.offset % MM_DIRECT == 0 && c.bytes <= j->c.chunk);
    assert_memory_equal(c.data, content[c.file] + c.offset, c.bytes);
    for (size_t i = c.first; i < c.first + c.count; i++) {
      const mm_read_want *w = &j->want[i];
      assert_int_equal(w->file, c.file);
      uint64_t from = mm_max(w->offset, c.offset), to = mm_min(w->offset + w->bytes, c.offset + c.bytes);
      if (from >= to) continue;
      got[w->tag] += to - from;
    }
  }
  if (stats && r) *stats = mm_reader_stats(r);
  mm_reader_close(r);
  for (size_t i = 0; ok && i < WANTS; i++) assert_int_equal(got[j->want[i].tag], j->want[i].bytes);
  free(j->c.ring);
  return ok;
}

TEST(bytes_are_right) {
  static const mm_read_path paths[] = {MM_READ_PROBE, MM_READ_CACHE, MM_READ_DIRECT, MM_READ_STREAMS};
  for (int i = 0; i < 60; i++) {
    size_t piece = (size_t)MM_DIRECT << draw(4), chunk = piece * (1 + draw(4));
    uint32_t buffers = (uint32_t)(2 + draw(6));
    job j;
    mm_err err = {0};
    mm_read_stats s = {0};
    set_up(&j, (unsigned)(1 + draw(5)), buffers, chunk, piece, paths[i % 4]);
    uint64_t wanted = 0, read = 0;
    for (size_t k = 0; k < WANTS; k++) wanted += j.want[k].bytes;
    if (!read_all(&j, (uint32_t)(1 + draw(buffers - 1)), &s, &err)) fail_msg("%s", err.text);
    for (int p = 0; p < MM_READ_PATHS; p++) read += s.bytes[p];
    assert_true(read >= wanted && read <= wanted + 2 * WANTS * MM_DIRECT);
    assert_true(s.bytes[MM_READ_MEMORY] > 0);
  }
}

/* The cache is used where it holds the file; where it does not, the disk is read past it, and it still holds nothing. A file system in
 * memory has no disk. */
TEST(paths_by_probe) {
  mm_file f;
  mm_err err = {0};
  job j;
  mm_read_stats s;
  assert_true(mm_file_open(&f, path[0], &err));
  uint8_t *all = malloc(size[0]);
  assert_true(mm_file_read(&f, path[0], all, size[0], 0, &err));
  free(all);
  set_up(&j, 2, 4, 1 << 16, 1 << 14, MM_READ_PROBE);
  bool cached = mm_file_cached(f.fd, 0, size[0]);
  assert_true(read_all(&j, 2, &s, &err));
  if (cached) assert_true(s.bytes[MM_READ_CACHE] > 0 && s.bytes[MM_READ_DIRECT] == 0);
  posix_fadvise(f.fd, 0, 0, POSIX_FADV_DONTNEED);
  int direct = open(path[0], O_RDONLY | O_DIRECT);
  cached = mm_file_cached(f.fd, 0, size[0]);
  bool able = errno == 0 && !cached && direct >= 0;
  if (direct >= 0) close(direct);
  atomic_store(&direct_reads, 0);
  set_up(&j, 2, 4, 1 << 16, 1 << 14, MM_READ_PROBE);
  for (int i = 0; i < WANTS; i++)
    if (j.want[i].file == 1) j.want[i].bytes = 0;
  assert_true(read_all(&j, 2, &s, &err));
  if (able) {
    assert_true(s.bytes[MM_READ_DIRECT] > 0);
    assert_true(atomic_load(&direct_reads) > 0);
    assert_int_equal(s.bytes[MM_READ_CACHE], 0);
    assert_false(mm_file_cached(f.fd, 0, MM_DIRECT));
    assert_false(mm_file_cached(f.fd, 1 << 20, MM_DIRECT));
  } else {
    print_message("no file past the page cache here: O_DIRECT is not tested\n");
  }
  mm_file_close(&f);
}

TEST(nothing_past_the_ring) {
  job j;
  mm_err err = {0};
  mm_chunk c;
  set_up(&j, 3, 4, 1 << 14, 1 << 12, MM_READ_CACHE);
  mm_reader *r = mm_reader_open(&j.c, &err);
  assert_non_null(r);
  for (int i = 0; i < 4; i++) assert_true(mm_reader_next(r, &c, &err) && c.data);
  usleep(20000);
  mm_read_stats s = mm_reader_stats(r);
  assert_true(s.bytes[MM_READ_CACHE] <= 4 << 14); /* the four that are with the caller, and not a byte more */
  assert_false(mm_reader_next(r, &c, &err));
  assert_string_equal(err.code, "E_BUG");
  err = (mm_err){0};
  mm_reader_release(r);
  assert_true(mm_reader_next(r, &c, &err) && c.data);
  mm_reader_close(r); /* with chunks at the caller, and others unread */
  free(j.c.ring);
}

static void expect(job *j, const char *code, const char *text) {
  mm_err err = {0};
  assert_false(read_all(j, 1, NULL, &err));
  assert_string_equal(err.code, code);
  assert_int_equal(err.status, MM_IO);
  assert_non_null(strstr(err.text, path[0]));
  if (!strstr(err.text, text)) fail_msg("found \"%s\", expected \"%s\"", err.text, text);
}

TEST(bad_files) {
  static const mm_read_path paths[] = {MM_READ_CACHE, MM_READ_DIRECT, MM_READ_STREAMS};
  for (int i = 0; i < 3; i++) {
    job j;
    struct stat s;
    assert_int_equal(stat(path[0], &s), 0);
    mm_file_id id = mm_file_id_of(&s);
    id.mtime_ns--;
    set_up(&j, 3, 4, 1 << 16, 1 << 14, paths[i]); /* another file than was opened before */
    j.file[0].id = &id;
    expect(&j, "E_CHANGED", "not the one that was opened before");

    set_up(&j, 3, 4, 1 << 16, 1 << 14, paths[i]); /* shorter than what is wanted */
    for (int k = 0; k < WANTS; k++)
      if (j.want[k].file == 0 && j.want[k].bytes > 0) j.want[k] = (mm_read_want){0, size[0] - 1, 11, (uint64_t)k, 0}, k = WANTS;
    expect(&j, "E_SHORT_READ", "10 more bytes expected");

    set_up(&j, 3, 4, 1 << 16, 1 << 14, paths[i]); /* a disk that fails */
    atomic_store(&fail_after, 40);
    mm_err err = {0};
    assert_false(read_all(&j, 1, NULL, &err));
    atomic_store(&fail_after, -1);
    assert_string_equal(err.code, "E_IO");
    assert_true(strstr(err.text, "offset ") && strstr(err.text, strerror(EIO)));
  }
}

/* A file that is cut, or written to, while it is read. */
TEST(changing_files) {
  for (int cut = 0; cut < 2; cut++) {
    job j;
    mm_err err = {0};
    mm_chunk c = {0};
    char copy[300];
    snprintf(copy, sizeof copy, "%s/copy", dir);
    FILE *out = fopen(copy, "wb");
    assert_true(out && fwrite(content[0], 1, size[0], out) == size[0] && fclose(out) == 0);
    set_up(&j, 1, 2, 1 << 14, 1 << 14, MM_READ_CACHE);
    j.file[0].path = copy;
    mm_reader *r = mm_reader_open(&j.c, &err);
    assert_true(r && mm_reader_next(r, &c, &err));
    int fd = open(copy, O_WRONLY);
    assert_true(cut ? ftruncate(fd, 500000) == 0 : pwrite(fd, "x", 1, 2000000) == 1);
    close(fd);
    bool ok = true;
    while (ok && c.data) {
      mm_reader_release(r);
      ok = mm_reader_next(r, &c, &err);
    }
    assert_false(ok);
    assert_string_equal(err.code, cut ? "E_SHORT_READ" : "E_CHANGED");
    assert_non_null(strstr(err.text, copy));
    mm_reader_close(r);
    free(j.c.ring);
    unlink(copy);
  }
}

/* ---- what is asked for ---- */

enum { PART = 3 * MM_DIRECT, PARTS = 500 };

/* One want of many parts, one thread, and a part to a chunk. */
static mm_reader *open_parts(job *j, uint32_t buffers, mm_err *err) {
  set_up(j, 1, buffers, PART, MM_DIRECT, MM_READ_CACHE);
  j->want[0] = (mm_read_want){0, 2 * MM_DIRECT, (uint64_t)PART * PARTS, 0, PART};
  j->c.wants = 1;
  return mm_reader_open(&j->c, err);
}

/* The part that comes next. */
static uint64_t next_part(job *j, mm_reader *r) {
  mm_err err = {0};
  mm_chunk c;
  if (!mm_reader_next(r, &c, &err)) fail_msg("%s", err.text);
  if (!c.data) return UINT64_MAX;
  assert_int_equal((c.offset - 2 * MM_DIRECT) % PART, 0);
  assert_int_equal(c.bytes, PART);
  assert_memory_equal(c.data, content[0] + c.offset, c.bytes);
  mm_reader_release(r);
  return (c.offset - j->want[0].offset) / PART;
}

static void prefetch(job *j, mm_reader *r, uint64_t part) { mm_reader_prefetch(r, 0, j->want[0].offset + part * PART, PART); }

/* Behind what is in the ring, in the order of asking, once each, and before all others. Parts that are in the ring, or were given, are not
 * moved. */
TEST(prefetched_parts) {
  enum { BUFFERS = 3 };
  for (int i = 0; i < 30; i++) {
    job j;
    mm_err err = {0};
    mm_reader *r = open_parts(&j, BUFFERS, &err);
    bool came[PARTS] = {false};
    assert_non_null(r);
    for (uint64_t rounds = 0, n = 0; rounds < 20; rounds++) {
      uint64_t wanted[4], got[BUFFERS + 5], gots = 0;
      for (uint64_t k = draw(5); k > 0; k--, n++) came[next_part(&j, r)] = true;
      for (int k = 0; k < 4; k++) {
        bool twice;
        do {
          twice = false;
          wanted[k] = draw(4) ? draw(PARTS) : n + draw(4);
          for (int before = 0; before < k; before++) twice = twice || wanted[before] == wanted[k];
        } while (twice);
        prefetch(&j, r, wanted[k]);
        if (draw(3) == 0) prefetch(&j, r, wanted[k]);
      }
      for (bool all = false; !all; gots += !all) {
        all = true;
        for (int k = 0; k < 4; k++) all = all && came[wanted[k]];
        if (all) break;
        assert_true(gots < BUFFERS + 4); /* those in the ring, and the four */
        got[gots] = next_part(&j, r);
        assert_false(came[got[gots]]);
        came[got[gots]] = true;
      }
      n += gots;
      uint64_t at = 0; /* those that came behind the ring's came in the order of asking */
      for (int k = 0; k < 4; k++)
        for (uint64_t g = BUFFERS; g < gots; g++)
          if (got[g] == wanted[k]) assert_true(g >= at), at = g;
    }
    for (uint64_t p; (p = next_part(&j, r)) != UINT64_MAX; came[p] = true) assert_false(came[p]);
    for (int p = 0; p < PARTS; p++) assert_true(came[p]);
    prefetch(&j, r, 3); /* after the end it is nothing */
    assert_true(mm_reader_prove(r, &err));
    mm_reader_close(r);
    free(j.c.ring);
  }
}

/* A disk that fails while a part is waited for: the next call says so, whoever makes it, and asking is harmless. */
TEST(prefetched_without_answer) {
  job j;
  mm_err err = {0}, again = {0};
  mm_reader *r = open_parts(&j, 2, &err);
  assert_non_null(r);
  assert_int_equal(next_part(&j, r), 0);
  assert_true(mm_reader_prove(r, &err));
  prefetch(&j, r, 400);
  atomic_store(&fail_after, 1);
  mm_chunk c = {0};
  bool ok = true;
  while (ok) {
    ok = mm_reader_next(r, &c, &err);
    if (ok) mm_reader_release(r);
  }
  atomic_store(&fail_after, -1);
  assert_string_equal(err.code, "E_IO");
  prefetch(&j, r, 401);
  assert_false(mm_reader_prove(r, &again));
  assert_string_equal(again.text, err.text);
  mm_reader_close(r);
  free(j.c.ring);
}

/* ---- digests ---- */

enum { BLOCKS = 3 };
static mm_digest digest[BLOCKS];

static void set_up_digests(job *j, unsigned threads, uint32_t buffers) {
  set_up(j, threads, buffers, 2 * MM_HASH_BLOCK, 1 << 20, draw(2) ? MM_READ_CACHE : MM_READ_DIRECT);
  for (uint64_t b = 0, n; b < BLOCKS; b++) {
    n = mm_min(MM_HASH_BLOCK, size[0] - b * MM_HASH_BLOCK);
    digest[b] = mm_sha256(content[0] + b * MM_HASH_BLOCK, n);
  }
  j->file[0].digest = digest;
  for (int k = 0; k < WANTS; k++) /* the last block too */
    if (j->want[k].file == 0) j->want[k] = (mm_read_want){0, size[0] - 11, 11, j->want[k].tag, 0}, k = WANTS;
}

/* Whole blocks are read and hashed, the file's other bytes too; files without digests are read as they were. */
TEST(digests_hold) {
  for (int i = 0; i < 12; i++) {
    job j;
    mm_err err = {0};
    mm_read_stats s;
    set_up_digests(&j, (unsigned)(1 + draw(4)), (uint32_t)(2 + draw(3)));
    if (!read_all(&j, 1, &s, &err)) fail_msg("%s", err.text);
    assert_int_equal(s.hashed, size[0]);
    assert_int_equal(s.wanted, mm_read_bytes(&s));
  }
}

/* One bit of one block, wherever it is, ends the load with its place: nothing but the last chunks was given by then. */
TEST(damage_is_named) {
  for (uint64_t b = 0; b < BLOCKS; b++) {
    job j;
    mm_err err = {0};
    char place[40];
    set_up_digests(&j, 2, 2);
    digest[b].byte[draw(32)] ^= (uint8_t)(1 << draw(8));
    assert_false(read_all(&j, 1, NULL, &err));
    assert_int_equal(err.status, MM_INTEGRITY);
    assert_string_equal(err.code, "E_DIGEST");
    snprintf(place, sizeof place, "offset %llu", (unsigned long long)(b * MM_HASH_BLOCK));
    if (!strstr(err.text, path[0]) || !strstr(err.text, place)) fail_msg("found \"%s\", expected %s", err.text, place);
  }
}

/* Only the parts given so far are proved: a damaged block is reported once it was given. A file that has changed is reported at once. */
TEST(proved_so_far) {
  job j;
  mm_err err = {0};
  mm_chunk c = {0};
  set_up_digests(&j, 2, 2);
  j.want[0] = (mm_read_want){0, 0, size[0], 0, MM_HASH_BLOCK};
  j.c.wants = 1, j.c.chunk = MM_HASH_BLOCK;
  digest[BLOCKS - 1].byte[3] ^= 1;
  mm_reader *r = mm_reader_open(&j.c, &err);
  assert_true(r && mm_reader_next(r, &c, &err) && c.offset == 0);
  assert_true(mm_reader_prove(r, &err));
  mm_reader_prefetch(r, 0, MM_HASH_BLOCK, 1); /* it is next anyway */
  assert_true(mm_reader_next(r, &c, &err) && c.offset == MM_HASH_BLOCK);
  assert_true(mm_reader_prove(r, &err)); /* with both buffers at the caller, nothing more is read */
  mm_reader_release(r);
  const bool given = mm_reader_next(r, &c, &err);
  assert_true(!given || c.offset == 2 * MM_HASH_BLOCK);
  assert_false(mm_reader_prove(r, &err));
  assert_string_equal(err.code, "E_DIGEST");
  mm_reader_close(r);
  free(j.c.ring);

  struct stat s;
  assert_int_equal(stat(path[1], &s), 0);
  err = (mm_err){0};
  set_up(&j, 1, 2, 1 << 14, 1 << 12, MM_READ_CACHE);
  r = mm_reader_open(&j.c, &err);
  assert_true(r && mm_reader_next(r, &c, &err) && mm_reader_prove(r, &err));
  const struct timespec times[2] = {{s.st_atime, 0}, {s.st_mtime - 5, 0}};
  assert_int_equal(utimensat(AT_FDCWD, path[1], times, 0), 0);
  assert_false(mm_reader_prove(r, &err));
  assert_string_equal(err.code, "E_CHANGED");
  assert_non_null(strstr(err.text, path[1]));
  mm_reader_close(r);
  free(j.c.ring);
}

/* ---- reports ---- */

TEST(a_log) {
  mm_err err = {0};
  mm_read_log *log = mm_read_log_open(&err);
  assert_non_null(log);
  assert_int_equal(mm_read_bytes(&(mm_read_stats){0}), 0);
  uint64_t wanted = 0;
  for (int i = 0; i < 2; i++) {
    job j;
    mm_read_stats s = {0};
    set_up(&j, 3, 4, 1 << 16, 1 << 14, MM_READ_CACHE);
    j.c.log = log;
    assert_true(read_all(&j, 2, &s, &err));
    wanted += s.wanted;
  }
  mm_read_stats all = mm_read_log_stats(log), of;
  assert_int_equal(all.wanted, wanted);
  assert_int_equal(mm_read_bytes(&all), wanted);
  assert_true(all.seconds > 0 && all.bytes[MM_READ_MEMORY] > 0 && all.bytes[MM_READ_CACHE] > all.bytes[MM_READ_MEMORY]);
  const char *name;
  uint64_t sum = 0;
  for (size_t i = 0; i < 4; i++) {
    assert_true(mm_read_log_file(log, i, &name, &of));
    assert_string_equal(name, path[i % 2]);
    sum += of.bytes[MM_READ_CACHE];
  }
  assert_false(mm_read_log_file(log, 4, &name, &of));
  assert_int_equal(sum, all.bytes[MM_READ_CACHE]);
  mm_read_log_close(log);
  mm_read_log_close(NULL);
}

/* Times and durations of events: the first of each. */
TEST(times) {
  mm_err err = {0};
  char text[100];
  mm_read_log *log = mm_read_log_open(&err);
  assert_non_null(log);
  assert_string_equal(mm_read_log_times(log, text, sizeof text), "");
  mm_read_log_note(log, "waited", 1.25);
  mm_read_log_note(log, "waited", 7);
  mm_read_log_note(log, "slept", 0.0004);
  mm_read_log_mark(NULL, "nothing");
  assert_string_equal(mm_read_log_times(log, text, sizeof text), "waited 1.250, slept 0.000");
  assert_string_equal(mm_read_log_times(log, text, 9), "waited 1");
  usleep(20000);
  mm_read_log_mark(log, "now");
  double s = 0;
  assert_int_equal(sscanf(mm_read_log_times(log, text, sizeof text), "waited 1.250, slept 0.000, now %lf", &s), 1);
  assert_true(s > 0.019 && s < 10);
  mm_read_log_close(log);
}

TEST(in_words) {
  char text[160];
  mm_read_stats s = {.seconds = 2};
  assert_string_equal(mm_read_text(text, sizeof text, &s), "");
  s.bytes[MM_READ_CACHE] = UINT64_C(30000000000);
  assert_string_equal(mm_read_text(text, sizeof text, &s), "30.0 GB in 2.00 s, 15.0 GB/s, page cache");
  s.hashed = s.bytes[MM_READ_CACHE];
  assert_string_equal(mm_read_text(text, sizeof text, &s), "30.0 GB in 2.00 s, 15.0 GB/s, page cache, digests checked");
  s.bytes[MM_READ_DIRECT] = UINT64_C(10000000000), s.hashed = 0;
  assert_string_equal(mm_read_text(text, sizeof text, &s), "40.0 GB in 2.00 s, 20.0 GB/s, page cache 75 %, O_DIRECT 25 %");
  assert_string_equal(mm_read_text(text, 10, &s), "40.0 GB i");
  s.seconds = 0;
  assert_string_equal(mm_read_text(text, sizeof text, &s), "40.0 GB, page cache 75 %, O_DIRECT 25 %");
}

/* A mapped byte is found again in its file. */
TEST(mapped_bytes) {
  mm_file f;
  mm_map m = {0};
  mm_err err = {0};
  mm_mapped at;
  assert_true(mm_file_open(&f, path[1], &err) && mm_map_open(&m, &f, path[1], &err));
  assert_true(mm_map_find(m.data + 12345, &at));
  assert_string_equal(at.path, path[1]);
  assert_int_equal(at.offset, 12345);
  assert_int_equal(at.size, size[1]);
  assert_memory_equal(at.id, &f.id, sizeof f.id);
  assert_false(mm_map_find(m.data + m.size, &at));
  assert_false(mm_map_find(content[1], &at));
  const uint8_t *gone = m.data;
  mm_map_close(&m);
  assert_false(mm_map_find(gone, &at));
  mm_file_close(&f);
}

int main(void) { return run_unit_tests(begin, end); }
