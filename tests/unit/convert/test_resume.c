/* convert/writer, journal and resume: a conversion that is stopped anywhere, and whose staged files are damaged or cut meanwhile, ends in
 * the same bytes; what a run may continue, replace or must refuse. The pwrite below stands before the C library's: it stops a run after so
 * many. */
#undef _FORTIFY_SOURCE /* its inline version would hide ours */
#include <fcntl.h>
#include <sys/syscall.h>

#include "tests/unit/convert/converted.h"

static mm_convert_progress progress;
static _Atomic long writes_left; /* before a run is stopped; below 0: never */

ssize_t pwrite(int fd, const void *buf, size_t n, off_t at) {
  if (atomic_load(&writes_left) >= 0 && atomic_fetch_sub(&writes_left, 1) == 0) atomic_store(&progress.stop, true);
  return syscall(SYS_pwrite64, fd, buf, n, at);
}

typedef struct options {
  const char *quant;
  mm_leftover leftover;
  uint32_t shard, shards;
  int level;
  bool force;
  long stop_after;
} options;

/* The status; err->text says why. */
static mm_status run(const source *s, const char *target, options a, mm_err *err) {
  mm_hf hf = {0};
  mm_plan plan = {0};
  mm_digest manifest;
  *err = (mm_err){0};
  memset(&progress, 0, sizeof progress);
  const mm_plan_options o = {.quant = a.quant ? a.quant : "block_fp8", .tp = 2, .ep = 1, .pp = 1, .part_size = 300 << 10};
  if (!mm_hf_open(&hf, src_path(s, "src"), &(mm_hf_options){0}, err) || !mm_plan_build(&plan, &hf, &o, err)) fail_msg("%s", err->text);
  const mm_writer_options w = {.target = src_path(s, target),
                               .leftover = a.leftover,
                               .shard = a.shard,
                               .shards = a.shards ? a.shards : 1,
                               .buffers = 4,
                               .commit_bytes = 64 << 10,
                               .threads = 2,
                               .stop = &progress.stop,
                               .level = a.level,
                               .force = a.force};
  atomic_store(&writes_left, a.stop_after ? a.stop_after : -1);
  bool ok = mm_convert_run(&plan, &w, &progress, &manifest, err);
  atomic_store(&writes_left, -1);
  mm_plan_close(&plan);
  mm_hf_close(&hf);
  assert_int_equal(ok, err->status == MM_OK);
  return err->status;
}

static source *opened(void) {
  source *s = src_open_as((src_dims){260, 4, 2, 70, 3, 520, 70, true});
  for (unsigned row = 1; row < 70; row += 33) memset(src_find(s, "lm_head.weight")->data + row * 520, 0, 520);
  src_write(s);
  return s;
}

static void expect(mm_status found, mm_status expected, const mm_err *err, const char *says) {
  if (found != expected || !strstr(err->text, says)) fail_msg("status %d, expected %d: %s", found, expected, err->text);
}

static bool there(const source *s, const char *name) { return access(src_path(s, name), F_OK) == 0; }

/* Stopped again and again, later each time. */
TEST(test_stopped) {
  source *s = opened();
  mm_err err;
  expect(run(s, "whole", (options){0}, &err), MM_OK, &err, "");
  for (int level = 0; level <= 1; level++) {
    const char *target = level ? "packed" : "stopped";
    options a = {.level = level, .stop_after = 3};
    unsigned stops = 0, kept = 0;
    mm_status status;
    while ((status = run(s, target, a, &err)) == MM_INTERRUPTED) {
      assert_false(there(s, target));
      stops++;
      a.leftover = MM_LEFTOVER_RESUME;
      a.stop_after = 3 + 5L * stops;
    }
    expect(status, MM_OK, &err, "");
    kept = atomic_load(&progress.kept_bytes) > 0;
    if (stops < 2 || !kept) fail_msg("stopped %u times, kept %u", stops, kept);
    if (!level) assert_same(src_path(s, "whole"), src_path(s, target));
    expect(run(s, target, a, &err), MM_OK, &err, ""); /* finished: nothing is left to do */
  }
  options archive = {.level = 1};
  expect(run(s, "at once", archive, &err), MM_OK, &err, "");
  assert_same(src_path(s, "at once"), src_path(s, "packed"));
  src_close(s);
}

static char *staged(const source *s, const char *target, const char *file) {
  char name[200];
  snprintf(name, sizeof name, ".%s.partial/%s", target, file);
  return strdup(src_path(s, name));
}

/* The staging directory is believed only as far as its bytes hold. */
TEST(test_damaged) {
  source *s = opened();
  mm_err err;
  expect(run(s, "whole", (options){0}, &err), MM_OK, &err, "");
  static const char part[] = "model-rank-00001-part-00000.safetensors";
  for (int how = 0; how < 6; how++) {
    expect(run(s, "out", (options){.stop_after = 12}, &err), MM_INTERRUPTED, &err, "");
    char *path = staged(s, "out", part); /* its embedding and head are padded */
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    for (off_t at = 100; how < 3 && at < st.st_size; at += how == 0 ? 4999 : how == 1 ? 70001 : st.st_size / 2) {
      uint8_t byte;
      assert_int_equal(pread(fd, &byte, 1, at), 1);
      byte ^= 0x10;
      assert_int_equal(syscall(SYS_pwrite64, fd, &byte, 1, at), 1);
    }
    if (how == 3) assert_int_equal(ftruncate(fd, st.st_size / 2), 0);
    if (how == 4) assert_int_equal(ftruncate(fd, st.st_size) | ftruncate(fd, 0) | ftruncate(fd, st.st_size), 0); /* all zero */
    if (how == 5) assert_int_equal(unlink(path), 0);
    close(fd);
    free(path);
    expect(run(s, "out", (options){.leftover = MM_LEFTOVER_RESUME}, &err), MM_OK, &err, "");
    assert_same(src_path(s, "whole"), src_path(s, "out"));
    src_move(s, "out", how == 0 ? "out0" : how == 1 ? "out1" : how == 2 ? "out2" : how == 3 ? "out3" : how == 4 ? "out4" : "out5");
  }
  src_close(s);
}

/* Shares meet in one staging directory, each stopped once; a last run publishes. */
TEST(test_shares) {
  source *s = opened();
  mm_err err;
  expect(run(s, "whole", (options){0}, &err), MM_OK, &err, "");
  for (uint32_t shard = 0; shard < 3; shard++) {
    options a = {.shard = shard, .shards = 3, .stop_after = 4};
    mm_status status = run(s, "out", a, &err);
    a.stop_after = 0;
    a.leftover = MM_LEFTOVER_RESUME;
    if (status == MM_INTERRUPTED) status = run(s, "out", a, &err);
    expect(status, MM_OK, &err, "");
    assert_false(there(s, "out"));
  }
  expect(run(s, "out", (options){.leftover = MM_LEFTOVER_RESUME}, &err), MM_OK, &err, "");
  assert_true(atomic_load(&progress.kept_bytes) > 0);
  assert_same(src_path(s, "whole"), src_path(s, "out"));
  src_close(s);
}

TEST(test_leftovers) {
  source *s = opened();
  mm_err err;
  expect(run(s, "whole", (options){0}, &err), MM_OK, &err, "");
  expect(run(s, "out", (options){.stop_after = 9}, &err), MM_INTERRUPTED, &err, "");
  expect(run(s, "out", (options){0}, &err), MM_USAGE, &err, "--resume");
  expect(run(s, "out", (options){.quant = "int8", .leftover = MM_LEFTOVER_RESUME}, &err), MM_USAGE, &err, ""); /* of another plan */
  assert_true(there(s, ".out.partial"));                                                                       /* neither took it away */
  expect(run(s, "out", (options){.leftover = MM_LEFTOVER_RESTART}, &err), MM_OK, &err, "");
  assert_int_equal(atomic_load(&progress.kept_bytes), 0);
  assert_same(src_path(s, "whole"), src_path(s, "out"));
  /* A directory that has the name already. */
  expect(run(s, "out", (options){0}, &err), MM_USAGE, &err, "E_OUTPUT");
  expect(run(s, "out", (options){.quant = "int8", .force = true}, &err), MM_OK, &err, "");
  expect(run(s, "out", (options){.force = true}, &err), MM_OK, &err, "");
  assert_same(src_path(s, "whole"), src_path(s, "out"));
  assert_int_equal(mkdir(src_path(s, "theirs"), 0777), 0);
  put_file(src_path(s, "theirs/file"), "x", 1);
  expect(run(s, "theirs", (options){.force = true}, &err), MM_USAGE, &err, "E_OUTPUT");
  assert_true(there(s, "theirs/file"));
  expect(run(s, "src/inside", (options){0}, &err), MM_USAGE, &err, "lies in the source");
  src_close(s);
}

int main(void) { return run_unit_tests(NULL, NULL); }
