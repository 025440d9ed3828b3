/* A manifest of which some ranks are wanted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/pack.h"
#include "formats/system/file.h"
#include "tests/unit/changed_text.h"
#include "tests/unit/odd_model.h"
#include "tests/unit/unit.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static void same_parts(const mm_rank_parts *a, const mm_rank_parts *b) {
  assert_int_equal(a->part_count, b->part_count);
  for (size_t i = 0; i < a->part_count; i++) {
    assert_string_equal(a->part[i].file, b->part[i].file);
    assert_true(a->part[i].size == b->part[i].size && a->part[i].block_count == b->part[i].block_count);
    assert_memory_equal(&a->part[i].root, &b->part[i].root, sizeof(mm_digest));
    assert_memory_equal(a->part[i].block, b->part[i].block, a->part[i].block_count * sizeof(mm_digest));
  }
}

/* text with its seal, its last bytes, made right again. */
static void write_digest(char *text) {
  const size_t n = strlen(text), before = n - (sizeof MM_MANIFEST_ENDING - 3 + MM_HEX_LEN);
  const mm_digest d = mm_sha256(text, before);
  snprintf(text + before, n - before + 1, MM_MANIFEST_ENDING, mm_digest_hex(&d).text);
}

static bool open_text(mm_pack *p, const char *dir, const char *text, const uint32_t *rank, uint32_t count, mm_err *err) {
  FILE *f = fopen(mm_path_of(dir, MM_MANIFEST).text, "w");
  fputs(text, f);
  fclose(f);
  *err = (mm_err){0};
  return rank ? mm_pack_open_ranks(p, dir, rank, count, err) : mm_pack_open(p, dir, err);
}

static void opens(mm_pack *p, const char *dir, const char *text, const uint32_t *rank, uint32_t count) {
  mm_err err;
  if (!open_text(p, dir, text, rank, count, &err)) fail_msg("%s", err.text);
}

static void stays_shut(const char *dir, const char *text, const uint32_t *rank, const char *says) {
  mm_err err;
  mm_pack p;
  if (open_text(&p, dir, text, rank, 1, &err)) fail_msg("opened, expected \"%s\"", says);
  if (!strstr(err.text, says) || err.status != MM_INTEGRITY || strcmp(err.code, "E_MANIFEST") != 0)
    fail_msg("\"%s\" does not say \"%s\"", err.text, says);
  mm_pack_close(&p);
}

/* Digests of ranks that were not asked for are not kept nor held against their root; all else of them is checked. The long list makes the
 * text one that is hashed while it is read. */
TEST(test_open_ranks) {
  char dir[] = "/tmp/mm_pack_XXXXXX";
  assert_non_null(mkdtemp(dir));
  mm_pack back;
  mm_err err = {0};
  enum { BLOCKS = 40000 };
  mm_digest *many = calloc(BLOCKS, sizeof *many);
  for (uint32_t i = 0; i < BLOCKS; i++) memcpy(&many[i], &i, sizeof i);
  mm_digest few[] = {{{1}}, {{2}}, {{3}}, {{4}}};
  mm_part parts[] = {{"model-rank-00000-part-00000.safetensors", 2 * MM_HASH_BLOCK + 1, mm_hash_root(few, 3), 3, few},
                     {"model-rank-00000-part-00001.safetensors", MM_HASH_BLOCK, mm_hash_root(few + 3, 1), 1, few + 3},
                     {"model-rank-00001-part-00000.safetensors", BLOCKS * MM_HASH_BLOCK, mm_hash_root(many, BLOCKS), BLOCKS, many}};
  mm_rank_parts ranks[] = {{2, parts}, {1, parts + 2}};
  const mm_pack p = {.tool = "t", .quant = "none", .model = odd_model(), .tp = 2, .ep = 1, .pp = 1, .rank = ranks};
  const uint32_t zero = 0, one[] = {1}, neither = 7, none = 0;
  char *text = mm_pack_text(&p, &err);
  if (!text) fail_msg("%s", err.text);
  assert_true(strlen(text) > (2 << 20));
  opens(&back, dir, text, NULL, 0);
  for (uint32_t r = 0; r < 2; r++) same_parts(&ranks[r], &back.rank[r]);
  mm_pack_close(&back);
  opens(&back, dir, text, one, 1);
  same_parts(&ranks[1], &back.rank[1]);
  assert_null(back.rank[0].part[0].block);
  assert_int_equal(back.rank[0].part[0].block_count, 3);
  assert_int_equal(back.rank[0].part_count, 2);
  assert_string_equal(back.rank[0].part[1].file, parts[1].file);
  assert_memory_equal(&back.rank[0].part[1].root, &parts[1].root, sizeof(mm_digest));
  mm_pack_close(&back);
  for (int i = 0; i < 2; i++) {
    opens(&back, dir, text, i ? &neither : &none, i ? 1 : 0);
    assert_true(!back.rank[0].part[0].block && !back.rank[1].part[0].block);
    mm_pack_close(&back);
  }
  static const struct {
    const char *anchor, *old, *new, *what;
    bool of_blocks; /* against the root: not seen where the rank was not asked for */
  } bad[] = {
      {"rank-00001", "\"3e9c0000", "\"3e9c0001", "key \"root\": found ", true},
      {"rank-00001", "\"root\":\"", "\"root\":\"z", "ranks[1].parts[0]: key \"root\": found ", false},
      {"rank-00001", "\"3f9c0000", "\"3f9c000g", "ranks[1].parts[0]: key \"blocks\": found ", false},
      {"rank-00001", "\"3f9c0000", "\"3f9c00000", "ranks[1].parts[0]: key \"blocks\": found ", false},
      {"rank-00001", ",\"3f9c0000", ", \"3f9c000G", "ranks[1].parts[0]: key \"blocks\": found ", false},
      {"rank-00001", "\"size\":167772160000", "\"size\":167772160001", "found 40000 entries, expected 40001 to 40001", false},
      {"", "rank-00001", "rank-00002", "ranks[1].parts[0]: key \"file\": found", false},
  };
  for (size_t i = 0; i < COUNT(bad); i++) {
    char *changed = replaced(text, bad[i].anchor, bad[i].old, bad[i].new);
    write_digest(changed);
    stays_shut(dir, changed, NULL, bad[i].what);
    stays_shut(dir, changed, one, bad[i].what);
    if (bad[i].of_blocks) {
      opens(&back, dir, changed, &zero, 1);
      mm_pack_close(&back);
    } else {
      stays_shut(dir, changed, &zero, bad[i].what);
    }
    free(changed);
  }
  /* The seal covers what is not kept; what is wrong says more than it. */
  char *changed = replaced(text, "rank-00001", "\"3f9c0000", "\"3f9c0001");
  stays_shut(dir, changed, &zero, "manifest.json: key \"sha256\": found another ending, expected ");
  free(changed);
  changed = replaced(text, "", "\"tp\":2", "\"tp\":0");
  stays_shut(dir, changed, &zero, "parallel: key \"tp\": found 0, expected 1 to 1024");
  free(changed);
  free(text);
  free(many);
  unlink(mm_path_of(dir, MM_MANIFEST).text);
  rmdir(dir);
}

/* Where in a long list something is wrong. */
TEST(test_places) {
  mm_pack_file source[120];
  char name[120][8];
  for (size_t i = 0; i < COUNT(source); i++) {
    snprintf(name[i], sizeof name[i], "s%zu", i);
    source[i] = (mm_pack_file){name[i], i, {{0}}};
  }
  mm_rank_parts none = {0, NULL};
  const mm_pack p = {.tool = "t",
                     .quant = "none",
                     .model = odd_model(),
                     .tp = 1,
                     .ep = 1,
                     .pp = 1,
                     .rank = &none,
                     .source = source,
                     .source_count = COUNT(source)};
  mm_err err = {0};
  char *text = mm_pack_text(&p, &err);
  if (!text) fail_msg("%s", err.text);
  for (size_t i = 0; i < COUNT(source); i++) {
    char old[12], new[12], what[64];
    snprintf(old, sizeof old, "\"s%zu\"", i);
    snprintf(new, sizeof new, "\"/%zu\"", i);
    snprintf(what, sizeof what, "d/manifest.json: sources[%zu]: key \"name\": found \"/%zu\"", i, i);
    char *changed = replaced(text, "sources", old, new);
    mm_pack back;
    err = (mm_err){0};
    assert_false(mm_pack_parse(&back, "d", changed, strlen(changed), &err));
    if (!strstr(err.text, what)) fail_msg("\"%s\" does not say \"%s\"", err.text, what);
    mm_pack_close(&back);
    free(changed);
  }
  free(text);
}

int main(void) { return run_unit_tests(NULL, NULL); }
