/* convert/index: a weight map is read whatever its names; file names that are paths, malformed maps and doubled entries are refused
 * with the place. The rows' marks (B01 …) are those of the fault catalogue. */
#include <limits.h>
#include <time.h>

#include "convert/source/index.h"
#include "tests/unit/convert/source.h"

static const char shard1[] = "src/model-00001-of-00002.safetensors";

#define REFUSED(depth_, row, code, says) src_refused(s, (src_options){.depth = (depth_)}, row, MM_BAD_INPUT, code, says)
#define ACCEPTED(row)                    src_accepted(s, (src_options){.depth = SRC_READ}, row)

/* B01: file names of the index. `shown` is what the line must show of them. */
TEST(test_file_names) {
  static char long_name[5001], name256[257], name255[256];
  memset(long_name, 'a', sizeof long_name - 1);
  memset(name256, 'a', sizeof name256 - 1);
  memset(name255, 'b', sizeof name255 - 1);
  static const char *const bad[][2] = {{"../x", "../x"},
                                       {"a/../../x", "a/../../x"},
                                       {"/etc/passwd", "/etc/passwd"},
                                       {"sub/model.safetensors", "sub/model"},
                                       {"a\\\\b", "a\\x5cb"},
                                       {"..\\\\x", "..\\x5cx"},
                                       {".", "\".\""},
                                       {"..", "\"..\""},
                                       {"", "\"\""},
                                       {"a\\u0000b", "a\\x00b"},
                                       {"a\\nb", "a\\x0ab"},
                                       {"\\u001b[2J", "\\x1b[2J"},
                                       {"a\\u007f", "a\\x7f"},
                                       {name256, "aaaa"},
                                       {long_name, "aaaa"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    FRESH(s) {
      src_find(s, "lm_head.weight")->file = bad[i][0];
      src_write(s);
      REFUSED(SRC_OPEN, "B01", "E_IDX_PATH", bad[i][1]);
      REFUSED(SRC_OPEN, "B01", "E_IDX_PATH", "tensor \"lm_head.weight\"");
    }
  }
  FRESH(s) { /* the own folder spelt out is a path all the same */
    char own[256];
    snprintf(own, sizeof own, "%s/%s", s->root, shard1);
    src_find(s, "lm_head.weight")->file = own;
    src_write(s);
    REFUSED(SRC_OPEN, "B01", "E_IDX_PATH", "plain base name");
  }
  static const char *const good[] = {name255, "-f", ".hidden", "r\xc3\xa9sum\xc3\xa9 1.safetensors", "...", "model 1"};
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    FRESH(s) {
      s->file[0] = good[i];
      for (size_t k = 0; k < s->count; k++) s->t[k].file = s->file[s->t[k].shard];
      src_write(s);
      ACCEPTED(good[i]);
    }
  }
  FRESH(s) {
    src_find(s, "lm_head.weight")->shard = 1;
    src_find(s, "lm_head.weight")->file = "model-0000\\u0032-of-00002.safetensors";
    src_write(s);
    ACCEPTED("an escaped spelling of a file's name");
  }
}

/* B05, B06, B07: the index's own text. */
TEST(test_index_text) {
  static const char *const bad[][3] = {
      {"{}", "E_IDX", "found no \"weight_map\""},
      {"{\"weight_map\":{}}", "E_IDX", "empty weight_map"},
      {"{\"weight_map\":[]}", "E_IDX", "not an object"},
      {"{\"weight_map\":null}", "E_IDX", "not an object"},
      {"{\"weight_map\":{\"a\":1}}", "E_IDX", "not a string"},
      {"{\"weight_map\":{\"a\":null}}", "E_IDX", "not a string"},
      {"{\"weight_map\":{\"a\":[\"x\"]}}", "E_IDX", "not a string"},
      {"{\"weight_map\":{\"a\":\"x\",\"b\":\"x\",\"a\":\"y\"}}", "E_DUP_KEY", "tensor \"a\""},
      {"{\"weight_map\":{\"a\":\"x\",\"\\u0061\":\"x\"}}", "E_DUP_KEY", "tensor \"a\""},
      {"{\"weight_map\":{\"a\":\"x\"},\"weight_map\":{\"b\":\"x\"}}", "E_IDX", "twice"},
      {"{\"metadata\":{},\"metadata\":{},\"weight_map\":{\"a\":\"x\"}}", "E_IDX", "twice"},
      {"{\"metadata\":[],\"weight_map\":{\"a\":\"x\"}}", "E_IDX", "metadata"},
      {"{\"weight_map\":{\"\":\"x\"}}", "E_NAME", "empty"},
      {"{\"weight_map\":{\"a\\u0000b\":\"x\"}}", "E_NAME", "NUL"},
      {"{\"metadata\":{\"total_size\":-1},\"weight_map\":{\"a\":\"x\"}}", "E_NUMBER", "-1"},
      {"{\"metadata\":{\"total_size\":\"5\"},\"weight_map\":{\"a\":\"x\"}}", "E_NUMBER", "5"},
      {"{\"metadata\":{\"total_size\":18446744073709551616},\"weight_map\":{\"a\":\"x\"}}", "E_NUMBER", "18446744073709551616"},
      {"{\"weight_map\":{\"a\":\"x\"}", "E_JSON", "offset"},
      {"{\"weight_map\":{\"a\":\"x\"}}}", "E_JSON", "offset"},
      {"{\"weight_map\":{\"a\":\"x\",}}", "E_JSON", "offset"},
      {"[]", "E_JSON", "offset 0"},
      {"\xef\xbb\xbf{\"weight_map\":{\"a\":\"x\"}}", "E_JSON", "offset 0"},
      {"{\"weight_map\":{\"a\xff\":\"x\"}}", "E_JSON", "offset"},
      {"version https://git-lfs.github.com/spec/v1\n", "E_JSON", "offset 0"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    FRESH(s) {
      s->index = bad[i][0];
      src_write(s);
      REFUSED(SRC_OPEN, bad[i][0], bad[i][1], bad[i][2]);
      REFUSED(SRC_OPEN, bad[i][0], bad[i][1], MM_INDEX_NAME);
    }
  }
  FRESH(s) {
    static char deep[5001];
    src_write(s);
    ACCEPTED("B06: a wrong total_size does not matter where the headers are there");
    memset(deep, '[', sizeof deep - 1);
    put_file(src_path(s, "src/" MM_INDEX_NAME), deep, sizeof deep - 1);
    REFUSED(SRC_OPEN, "B07", "E_JSON", MM_INDEX_NAME);
    memcpy(deep, "{\"a\":", 5);
    put_file(src_path(s, "src/" MM_INDEX_NAME), deep, sizeof deep - 1);
    REFUSED(SRC_OPEN, "B07", "E_JSON", MM_INDEX_NAME);
    put_file(src_path(s, "src/" MM_INDEX_NAME), "", 0);
    REFUSED(SRC_OPEN, "B07", "E_JSON", MM_INDEX_NAME);
    assert_int_equal(truncate(src_path(s, "src/" MM_INDEX_NAME), 200 << 20), 0);
    REFUSED(SRC_OPEN, "B07", "E_LIMIT", MM_INDEX_NAME);
  }
}

/* As many entries as 64 MB hold, every one with a file of its own: seconds would mean a search of all files for each tensor. */
TEST(test_many_files) {
  char *text = NULL;
  size_t n = 0;
  FILE *f = open_memstream(&text, &n);
  fputs("{\"weight_map\":{", f);
  enum { MANY = 100000 };
  for (unsigned i = 0; i < MANY; i++) fprintf(f, "%s\"t%u\":\"f%u\"", i ? "," : "", i * 7919u % MANY, i % 2 ? i : MANY - i);
  fputs("}}", f);
  fclose(f);
  mm_hf hf = {0};
  mm_err err = {0};
  clock_t start = clock();
  assert_true(mm_index_parse(&hf, "index", text, n, &err));
  double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
  assert_int_equal(hf.tensor_count, MANY);
  assert_int_equal(hf.file_count, MANY);
  for (size_t i = 0; i < hf.tensor_count; i++) { /* every tensor still has its own file */
    unsigned t = (unsigned)strtoul(hf.tensor[i].name + 1, NULL, 10), k = 0;
    sscanf(hf.file[hf.tensor[i].file].name, "f%u", &k);
    assert_int_equal((k % 2 ? k : MANY - k) * 7919u % MANY, t);
  }
  if (seconds > 8) fail_msg("%.1f s for %d files", seconds, MANY);
  mm_hf_close(&hf);
  free(text);
}

int main(void) { return run_unit_tests(NULL, NULL); }
