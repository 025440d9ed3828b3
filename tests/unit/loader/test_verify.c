/* Verifying: what a sample sees, and that no change of the manifest goes unseen. Every bit of a whole checkpoint is tests/fault/flips. */
#include <unistd.h>

#include "formats/system/file.h"
#include "loader/companions.h"
#include "loader/verify.h"
#include "tests/unit/loader/checkpoint.h"
#include "tests/unit/unit.h"

static char dir[256];
static char *manifest;
static size_t manifest_bytes;

static char *slurp(const char *name, size_t *n) {
  char path[512];
  mm_err err = {0};
  snprintf(path, sizeof path, "%s/%s", dir, name);
  char *text = mm_file_slurp(path, UINT64_C(64) << 20, n, &err);
  if (!text) fail_msg("%s", err.text);
  return text;
}

static int begin(void **state) {
  (void)state;
  const char *tmp = getenv("TMPDIR");
  snprintf(dir, sizeof dir, "%s/verify.XXXXXX", tmp ? tmp : "/tmp");
  assert_non_null(mkdtemp(dir));
  checkpoint_write(dir);
  manifest = slurp(MM_MANIFEST, &manifest_bytes);
  return 0;
}

static int end(void **state) {
  (void)state;
  static const char *const files[] = {"config.json", MM_MANIFEST, "model-rank-00000-part-00000.safetensors",
                                      "model-rank-00000-part-00001.safetensors"};
  char path[512];
  for (size_t i = 0; i < 4; i++) {
    snprintf(path, sizeof path, "%s/%s", dir, files[i]);
    assert_int_equal(unlink(path), 0);
  }
  free(manifest);
  return rmdir(dir);
}

TEST(all_is_well) {
  mm_shards s;
  mm_err err = {0};
  bool ok =
      mm_shards_open(&s, dir, &err) && mm_verify_blocks(&s, 2, &err) && mm_verify_files(&s.pack, &err) && mm_verify_numbers(&s, 2, &err);
  if (!ok) fail_msg("%s", err.text);
  mm_shards_close(&s);
}

/* A sample looks at as many blocks of each part as asked, other ones for other seeds, and misses nothing when it is all of them. */
TEST(samples) {
  static const char name[] = "model-rank-00000-part-00001.safetensors";
  mm_shards s;
  mm_err err = {0};
  size_t n;
  char *file = slurp(name, &n);
  file[n - 1] ^= 1; /* in block 1 of 2 */
  put_file_in(dir, name, file, n);
  assert_true(mm_shards_open(&s, dir, &err));
  unsigned found = 0;
  for (uint64_t seed = 0; seed < 64; seed++) found += !mm_verify_sample(&s, 1, seed, 1, MM_IGNORED);
  assert_in_range(found, 16, 48);
  for (uint64_t seed = 0; seed < 8; seed++) assert_false(mm_verify_sample(&s, 2, seed, 2, MM_IGNORED));
  assert_false(mm_verify_blocks(&s, 2, &err));
  assert_non_null(strstr(err.text, "part-00001.safetensors: offset 4194304: found block 1 of 2 damaged"));
  assert_non_null(strstr(err.text, "v.weight"));
  mm_shards_close(&s);
  file[n - 1] ^= 1;
  put_file_in(dir, name, file, n);
  free(file);
}

/* The first scale of "f.weight", which part 1 holds, is no number of its own; then a code of "v.weight" is none. Each error names the part.
 */
TEST(numbers_by_part) {
  static const char name[] = "model-rank-00000-part-00001.safetensors";
  size_t n;
  char *file = slurp(name, &n), *copy = malloc(n);
  mm_shards s;
  mm_err err = {0};
  assert_true(mm_shards_open(&s, dir, &err));
  const uint64_t scale = s.rank[0].plane[1 * MM_PACK_PLANES + 1].offset, number = s.rank[0].plane[2 * MM_PACK_PLANES].offset;
  mm_shards_close(&s);
  for (int which = 0; which < 2; which++) {
    static const uint8_t zero[4], nan[4] = {0, 0, 0xc0, 0x7f};
    err = (mm_err){0};
    memcpy(copy, file, n);
    memcpy(copy + (which ? number : scale), which ? nan : zero, 4);
    put_file_in(dir, name, copy, n);
    assert_true(mm_shards_open(&s, dir, &err));
    assert_false(mm_verify_numbers(&s, 1, &err));
    assert_int_equal(err.status, MM_INTEGRITY);
    assert_string_equal(err.code, which ? "E_NONFINITE" : "E_SCALE");
    assert_non_null(strstr(err.text, name));
    assert_non_null(strstr(err.text, which ? "v.weight" : "f.weight"));
    mm_shards_close(&s);
  }
  put_file_in(dir, name, file, n);
  free(file), free(copy);
}

/* A part that is replaced by an equal one after it was mapped: what was read is no longer what lies there. */
TEST(replaced_part) {
  static const char name[] = "model-rank-00000-part-00001.safetensors";
  size_t n;
  char *file = slurp(name, &n), path[512], fresh[520];
  mm_shards s;
  mm_err err = {0};
  snprintf(path, sizeof path, "%s/%s", dir, name);
  snprintf(fresh, sizeof fresh, "%s.new", path);
  assert_true(mm_shards_open(&s, dir, &err));
  assert_true(mm_shards_unchanged(&s, &err));
  put_file(fresh, file, n);
  assert_int_equal(rename(fresh, path), 0);
  assert_false(mm_shards_unchanged(&s, &err));
  assert_int_equal(err.status, MM_IO);
  assert_string_equal(err.code, "E_CHANGED");
  assert_non_null(strstr(err.text, name));
  mm_shards_close(&s);
  free(file);
}

static void refused(const char *text, size_t n, const char *what) {
  mm_pack p;
  mm_err err = {0};
  if (mm_pack_parse(&p, "d", text, n, &err)) fail_msg("%s: not noticed", what);
  assert_non_null(strstr(err.text, "d/manifest.json"));
  mm_pack_close(&p);
}

/* Any byte of the manifest, and anything before, inside or behind its digest. */
TEST(text_digest) {
  size_t n = manifest_bytes;
  char *copy = malloc(n + 2), what[32];
  memcpy(copy, manifest, n);
  for (size_t i = 0; i < n; i++) {
    copy[i] = (char)(copy[i] ^ (1 << i % 8));
    snprintf(what, sizeof what, "byte %zu", i);
    refused(copy, n, what);
    copy[i] = manifest[i];
  }
  copy[n] = '\n';
  refused(copy, n + 1, "a line behind the digest");
  memcpy(copy + n - 77, manifest + n - 78, 78);
  copy[n - 78] = ' ';
  refused(copy, n + 1, "a space before the digest");
  memcpy(copy, manifest, n);
  memcpy(copy + n - 80, "\n}\n", 3);
  refused(copy, n - 77, "no digest");
  free(copy);
}

/* A companion that is longer, shorter or other is refused by name. */
TEST(companions) {
  static const struct {
    const char *text, *code;
  } bad[] = {{"{\"a\": 2}\n", "E_DIGEST"}, {"{\"a\": 1}", "E_SIZE"}, {"{\"a\": 1}\n\n", "E_SIZE"}, {"", "E_SIZE"}};
  mm_pack p;
  mm_err err = {0};
  assert_true(mm_pack_open(&p, dir, &err));
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    mm_err e = {0};
    put_file_in(dir, "config.json", bad[i].text, strlen(bad[i].text));
    assert_false(mm_verify_files(&p, &e));
    assert_int_equal(e.status, MM_INTEGRITY);
    assert_string_equal(e.code, bad[i].code);
    assert_non_null(strstr(e.text, "config.json"));
  }
  put_file_in(dir, "config.json", "{\"a\": 1}\n", 9);
  put_file_in(dir, MM_SIGNATURE, "", 0);
  assert_true(mm_verify_files(&p, &err));
  char path[512];
  snprintf(path, sizeof path, "%s/%s", dir, MM_SIGNATURE);
  unlink(path);
  put_file_in(dir, ".more", "", 0);
  assert_false(mm_verify_listing(&p, &err));
  assert_string_equal(err.code, "E_EXTRA");
  snprintf(path, sizeof path, "%s/.more", dir);
  unlink(path);
  mm_pack_close(&p);
}

int main(void) { return run_unit_tests(begin, end); }
