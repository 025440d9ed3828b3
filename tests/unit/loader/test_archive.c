/* Archives: what was packed comes back to the byte whatever the level and the number of threads, and every broken promise of an archive is
 * refused by name, with nothing left at the target. */
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/system/file.h"
#include "loader/archive/archive.h"
#include "tests/unit/loader/checkpoint.h"
#include "tests/unit/unit.h"

static char work[256];

static const char *join(char *out, const char *name) {
  snprintf(out, 512, "%s/%s", work, name);
  return out;
}
#define AT(name) join((char[512]){0}, name)

static char *slurp(const char *path, size_t *n) {
  mm_err err = {0};
  char *text = mm_file_slurp(path, UINT64_C(64) << 20, n, &err);
  if (!text) fail_msg("%s", err.text);
  return text;
}

static unsigned remove_dir(const char *dir) {
  unsigned count = 0;
  DIR *d = opendir(dir);
  if (!d) return 0;
  char path[1024];
  for (struct dirent *e; (e = readdir(d));) {
    if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
    snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
    assert_int_equal(unlink(path), 0);
    count++;
  }
  closedir(d);
  assert_int_equal(rmdir(dir), 0);
  return count;
}

static void same_file(const char *a, const char *b, const char *name) {
  char x[1024], y[1024];
  size_t n, m;
  snprintf(x, sizeof x, "%s/%s", a, name);
  snprintf(y, sizeof y, "%s/%s", b, name);
  char *p = slurp(x, &n), *q = slurp(y, &m);
  if (n != m || memcmp(p, q, n) != 0) fail_msg("%s differs", name);
  free(p), free(q);
}

static const char *const files[] = {"config.json", MM_MANIFEST, "model-rank-00000-part-00000.safetensors",
                                    "model-rank-00000-part-00001.safetensors"};

static void pack_to(const char *target, int level, unsigned threads) {
  mm_err err = {0};
  mm_archive_totals t;
  if (!mm_archive_pack(AT("in"), target, level, (mm_archive_work){.threads = threads}, &t, &err)) fail_msg("%s", err.text);
  assert_true(t.bytes > 12000000 && t.packed < t.bytes * 9 / 10);
}

/* There may be nothing but what `begin` made: neither the target nor what it was staged in. */
static void nothing_new(void) {
  unsigned count = 0;
  DIR *d = opendir(work);
  while (readdir(d)) count++;
  closedir(d);
  assert_int_equal(count, 4);
}

static int begin(void **state) {
  (void)state;
  const char *tmp = getenv("TMPDIR");
  snprintf(work, sizeof work, "%s/archive.XXXXXX", tmp ? tmp : "/tmp");
  assert_non_null(mkdtemp(work));
  assert_int_equal(mkdir(AT("in"), 0755), 0);
  checkpoint_write(AT("in"));
  pack_to(AT("packed"), 1, 2);
  return 0;
}

static int end(void **state) {
  (void)state;
  remove_dir(AT("in"));
  remove_dir(AT("packed"));
  return rmdir(work);
}

TEST(comes_back) {
  mm_err err = {0};
  mm_archive_totals t;
  for (unsigned threads = 1; threads <= 5; threads += 2) {
    if (!mm_archive_unpack(AT("packed"), AT("out"), (mm_archive_work){.threads = threads}, &t, &err)) fail_msg("%s", err.text);
    for (size_t i = 0; i < 4; i++) same_file(AT("in"), AT("out"), files[i]);
    assert_int_equal(remove_dir(AT("out")), 4);
  }
  pack_to(AT("again"), 1, 5); /* the archive does not depend on the threads either */
  same_file(AT("packed"), AT("again"), MM_ARCHIVE);
  same_file(AT("packed"), AT("again"), "model-rank-00000-part-00001.safetensors.zst");
  remove_dir(AT("again"));
  pack_to(AT("again"), 5, 2);
  assert_true(mm_archive_unpack(AT("again"), AT("out"), (mm_archive_work){.threads = 2}, &t, &err));
  for (size_t i = 0; i < 4; i++) same_file(AT("in"), AT("out"), files[i]);
  remove_dir(AT("again"));
  remove_dir(AT("out"));
  nothing_new();
}

/* Blocks of bf16, of FP8 and mostly of f32. */
TEST(widths) {
  mm_archive a;
  mm_err err = {0};
  if (!mm_archive_open(&a, AT("packed"), &err)) fail_msg("%s", err.text);
  assert_int_equal(a.part_count, 2);
  assert_int_equal(a.part[0].frame[0].stride, 2);
  assert_int_equal(a.part[0].frame[1].stride, 2);
  assert_int_equal(a.part[1].frame[0].stride, 1);
  assert_int_equal(a.part[1].frame[1].stride, 4);
  assert_int_equal(a.part[1].frame[1].at, a.part[1].frame[0].bytes);
  mm_archive_close(&a);
  mm_archive_close(&a);
}

static void expect_refusal(mm_status status, const char *code, const char *says) {
  mm_err err = {0};
  mm_archive_totals t;
  if (mm_archive_unpack(AT("packed"), AT("out"), (mm_archive_work){.threads = 2}, &t, &err)) fail_msg("accepted, expected \"%s\"", says);
  if (err.status != status || strcmp(err.code, code) != 0 || !strstr(err.text, says))
    fail_msg("found %d %s, expected %s %s", err.status, err.text, code, says);
  nothing_new();
}

/* The first `old` in the archive's table replaced by `new`. */
TEST(table_mutations) {
  static const struct {
    const char *old, *new;
    mm_status status;
    const char *code, *says;
  } bad[] = {
      {"\"minimax-archive\"", "\"minimax-packed\"", MM_UNSUPPORTED, "E_VERSION",
       "found \"minimax-packed\" 1, expected \"minimax-archive\" 1"},
      {"\"version\":1", "\"version\":2", MM_UNSUPPORTED, "E_VERSION", "found \"minimax-archive\" 2"},
      {"\"version\":1", "\"version\":1,\"x\":0", MM_INTEGRITY, "E_ARCHIVE", "found unknown key \"x\""},
      {"\"version\":1,", "", MM_INTEGRITY, "E_ARCHIVE", "key \"version\": found nothing"},
      {"\"parts\":[", "\"parts\":[[],", MM_INTEGRITY, "E_ARCHIVE", "found 3 parts, expected 2"},
      {"part-00000.safetensors.zst", "part-00001.safetensors.zst", MM_INTEGRITY, "E_ARCHIVE",
       ".zst\", expected \"model-rank-00000-part-00000.safetensors.zst\""},
      {"model-rank-00000-part-00000", "../x", MM_INTEGRITY, "E_ARCHIVE", ".zst\", expected"},
      {"\"frames\":[", "\"frames\":[[1,1],", MM_INTEGRITY, "E_ARCHIVE", "part-00000.safetensors.zst: found 4 frames, expected 3"},
      {"\"frames\":[[", "\"frames\":[[0,1],[", MM_INTEGRITY, "E_ARCHIVE", "found 4 frames"},
      {",2],[", ",3],[", MM_INTEGRITY, "E_ARCHIVE", "found elements of 3 bytes"},
      {",2],[", ",2,2],[", MM_INTEGRITY, "E_ARCHIVE", "expected a pair of integers"},
      {",2],[", ",\"2\"],[", MM_INTEGRITY, "E_ARCHIVE", "expected a pair of integers"},
      {",2],[", "],[", MM_INTEGRITY, "E_ARCHIVE", "expected a pair of integers"},
      {"[[", "[[-", MM_INTEGRITY, "E_ARCHIVE", "found a frame of -"},
      {"[[", "[[9", MM_INTEGRITY, "E_ARCHIVE", "found a frame of 9"},
      {"[[", "[[9223372036854775807,1],[", MM_INTEGRITY, "E_ARCHIVE", "found 4 frames"},
      {"\n]", "", MM_INTEGRITY, "E_JSON", "archive.json: offset"},
      {",2],[", ",4],[", MM_INTEGRITY, "E_DIGEST", "part-00000.safetensors.zst: block 0: offset 0"},
      {",1],[", ",2],[", MM_INTEGRITY, "E_DIGEST", "part-00001.safetensors.zst: block 0: offset 0"},
  };
  size_t n;
  char *table = slurp(AT("packed/" MM_ARCHIVE), &n);
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    char *from = strstr(table, bad[i].old), changed[2048];
    assert_non_null(from);
    int k = snprintf(changed, sizeof changed, "%.*s%s%s", (int)(from - table), table, bad[i].new, from + strlen(bad[i].old));
    put_file(AT("packed/" MM_ARCHIVE), changed, (size_t)k);
    expect_refusal(bad[i].status, bad[i].code, bad[i].says);
  }
  put_file(AT("packed/" MM_ARCHIVE), table, n);
  free(table);
}

/* One file of the archive changed: cut, longer, swapped, flipped, gone, other, new. */
TEST(file_mutations) {
  mm_archive a;
  mm_err err = {0};
  assert_true(mm_archive_open(&a, AT("packed"), &err));
  uint32_t first = a.part[1].frame[0].bytes;
  mm_archive_close(&a);
  const char *path = AT("packed/model-rank-00000-part-00001.safetensors.zst");
  size_t n, m;
  char *file = slurp(path, &n), *copy = malloc(n + 1), *other = slurp(AT("packed/model-rank-00000-part-00000.safetensors.zst"), &m);
  put_file(path, file, n - 1);
  expect_refusal(MM_INTEGRITY, "E_SIZE", "part-00001.safetensors.zst: found");
  memcpy(copy, file, n), copy[n] = 0;
  put_file(path, copy, n + 1);
  expect_refusal(MM_INTEGRITY, "E_SIZE", "part-00001.safetensors.zst: found");
  memcpy(copy, file, n), copy[first + n / 3] ^= 4;
  put_file(path, copy, n);
  mm_archive_totals t;
  assert_false(mm_archive_unpack(AT("packed"), AT("out"), (mm_archive_work){.threads = 2}, &t, &err));
  assert_int_equal(err.status, MM_INTEGRITY);
  assert_non_null(strstr(err.text, "part-00001.safetensors.zst: block 1: offset "));
  nothing_new();
  memcpy(copy, file + n - m % n, m % n);
  put_file(path, copy, n);
  expect_refusal(MM_INTEGRITY, "E_FRAME", "part-00001.safetensors.zst: block 0: offset 0");
  unlink(path);
  expect_refusal(MM_INTEGRITY, "E_FS_MISSING", "part-00001.safetensors.zst");
  assert_int_equal(mkfifo(path, 0600), 0);
  expect_refusal(MM_INTEGRITY, "E_FS_TYPE", "part-00001.safetensors.zst");
  unlink(path);
  put_file(path, file, n);
  put_file(AT("packed/config.json"), "{\"a\": 2}\n", 9);
  expect_refusal(MM_INTEGRITY, "E_DIGEST", "config.json");
  put_file(AT("packed/config.json"), "{\"a\": 1}\n", 9);
  put_file(AT("packed/readme"), "x", 1);
  expect_refusal(MM_INTEGRITY, "E_EXTRA", "packed/readme");
  unlink(AT("packed/readme"));
  free(other), free(file), free(copy);
}

/* Two blocks in each other's place, in a table that says so: frames are good, digests are not. */
TEST(swapped_blocks) {
  mm_archive a;
  mm_err err = {0};
  assert_true(mm_archive_open(&a, AT("packed"), &err));
  const char *path = AT("packed/model-rank-00000-part-00000.safetensors.zst");
  size_t n, k;
  uint32_t first = a.part[0].frame[0].bytes, second = a.part[0].frame[1].bytes;
  char *file = slurp(path, &n), *copy = slurp(path, &n), *table = slurp(AT("packed/" MM_ARCHIVE), &k), changed[2048], old[64];
  memcpy(copy, file + first, second);
  memcpy(copy + second, file, first);
  snprintf(old, sizeof old, "[[%u,2],[%u,2]", first, second);
  char *from = strstr(table, old);
  assert_non_null(from);
  int len = snprintf(changed, sizeof changed, "%.*s[[%u,2],[%u,2]%s", (int)(from - table), table, second, first, from + strlen(old));
  put_file(path, copy, n);
  put_file(AT("packed/" MM_ARCHIVE), changed, (size_t)len);
  expect_refusal(MM_INTEGRITY, "E_DIGEST", "part-00000.safetensors.zst: block 0: offset 0: found other contents");
  put_file(path, file, n);
  put_file(AT("packed/" MM_ARCHIVE), table, k);
  mm_archive_close(&a);
  free(file), free(copy), free(table);
}

/* Damage is not archived, nor is anything written over. */
TEST(pack_refuses) {
  mm_err err = {0};
  mm_archive_totals t;
  assert_false(mm_archive_pack(AT("in"), AT("packed"), 1, (mm_archive_work){.threads = 2}, &t, &err));
  assert_int_equal(err.status, MM_USAGE);
  const char *path = AT("in/model-rank-00000-part-00001.safetensors");
  size_t n;
  char *file = slurp(path, &n);
  file[n - 100] ^= 1;
  put_file(path, file, n);
  err = (mm_err){0};
  assert_false(mm_archive_pack(AT("in"), AT("out"), 1, (mm_archive_work){.threads = 4}, &t, &err));
  assert_int_equal(err.status, MM_INTEGRITY);
  assert_non_null(strstr(err.text, "part-00001.safetensors"));
  assert_non_null(strstr(err.text, "block 1 of 2 damaged"));
  assert_non_null(strstr(err.text, "v.weight"));
  nothing_new();
  file[n - 100] ^= 1;
  put_file(path, file, n);
  free(file);
}

int main(void) { return run_unit_tests(begin, end); }
