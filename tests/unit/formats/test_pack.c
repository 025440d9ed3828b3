/* The manifest: a rich one survives writing and reading in every field, and every rule of FORMAT.md refuses what breaks it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/pack.h"
#include "tests/unit/changed_text.h"
#include "tests/unit/odd_model.h"
#include "tests/unit/unit.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define PLAIN(type)       \
  {                       \
    "", type, 1, 1, { 0 } \
  }
#define TENSOR(...) \
  { __VA_ARGS__, {0}, 0, NULL }

static mm_range vocab_ranks[] = {{0, 0, 64}, {0, 64, 36}}; /* 100 rows as 64 + 36 and 28 of padding */
static mm_range q_ranks[] = {{0, 0, 24}, {0, 24, 24}};
static mm_range kv_ranks[] = {{0, 0, 8}, {0, 0, 8}}; /* one head on both ranks */
static mm_range expert_ranks[] = {{0, 0, 12}, {0, 12, 11}};
static mm_range down_ranks[] = {{0, 0, 12}, {0, 12, 11}};
static mm_cut cuts[] = {{MM_AXIS_NONE, 0, 0, NULL},     {MM_AXIS_ROWS, 100, 64, vocab_ranks}, {MM_AXIS_ROWS, 48, 24, q_ranks},
                        {MM_AXIS_ROWS, 8, 8, kv_ranks}, {MM_AXIS_ROWS, 23, 12, expert_ranks}, {MM_AXIS_COLS, 23, 12, down_ranks}};

/* All numbers of a kind differ where they may. */
static mm_pack_tensor tensors[] = {
    TENSOR("model.embed_tokens.weight", "bf16", false, 0, 0, 0, 64, 32, 32, 1, 1, {PLAIN(MM_BF16)},
           {{"model.embed_tokens.weight", 100, 0, 64, 1}}, 0),
    TENSOR("model.layers.0.input_layernorm.weight", "f32", true, 0, 0, 0, 32, 1, 1, 1, 1, {PLAIN(MM_F32)}, {{"in.weight", 32, 0, 32, 0}},
           0),
    TENSOR("model.layers.0.self_attn.qkv_proj.weight", "block_fp8", false, 0, 0, 0, 40, 32, 32, 2, 3,
           {PLAIN(MM_F8_E4M3), {"_scale_inv", MM_F32, 8, 16, {0}}},
           {{"q_proj.weight", 48, 0, 24, 2}, {"k_proj.weight", 8, 24, 8, 3}, {"v_proj.weight", 8, 32, 8, 3}}, 0.0625f),
    TENSOR("model.layers.0.self_attn.q_norm.weight", "bf16", true, 0, 0, 0, 24, 1, 1, 1, 1, {PLAIN(MM_BF16)},
           {{"q_norm.weight", 48, 0, 24, 2}}, 0),
    TENSOR("model.layers.0.mlp.experts.w13_weight", "nvfp4", false, 4, 4, 0, 24, 32, 32, 3, 2,
           {{"", MM_U8, 1, 2, {0}}, {"_scale", MM_F8_E4M3, 1, 16, {0}}, {"_scale_2", MM_F32, 0, 0, {0}}},
           {{"experts.{e}.w1.weight", 23, 0, 12, 4}, {"experts.{e}.w3.weight", 23, 12, 12, 4}}, 3e-3f),
    TENSOR("model.layers.0.mlp.experts.w2_weight", "block_fp8", false, 4, 4, 0, 32, 12, 23, 2, 1,
           {PLAIN(MM_F8_E4M3), {"_scale_inv", MM_F32, 0, 4, {0}}}, {{"experts.{e}.w2.weight", 32, 0, 32, 5}}, 0)};

static mm_digest blocks[][3] = {{{{1}}, {{2}}, {{3}}}, {{{4}}}, {{{5}}, {{6}}}};
static mm_part parts0[] = {{"model-rank-00000-part-00000.safetensors", (UINT64_C(8) << 20) + 1, {{0}}, 3, blocks[0]},
                           {"model-rank-00000-part-00001.safetensors", UINT64_C(4) << 20, {{0}}, 1, blocks[1]}};
static mm_part parts1[] = {{"model-rank-00001-part-00000.safetensors", UINT64_C(8) << 20, {{0}}, 2, blocks[2]}};
static mm_rank_parts ranks[] = {{2, parts0}, {1, parts1}};
static mm_pack_file sources[] = {{"model-00001-of-00002.safetensors", UINT64_C(9007199254740993), {{7}}},
                                 {"model-00002-of-00002.safetensors", 54321, {{8}}}};
static mm_pack_file files[] = {{"config.json", 123, {{9}}}, {"tokenizer.json", 0, {{10}}}};
static uint32_t dead[] = {3, 98, 99};

static mm_pack sample(void) {
  mm_pack p = {.tool = "minimax-convert 9.8.7",
               .quant = "block_fp8",
               .tp_align = MM_ALIGN_PAD,
               .model = odd_model(),
               .tp = 2,
               .ep = 1,
               .pp = 1,
               .tensor_count = COUNT(tensors),
               .cut_count = COUNT(cuts),
               .source_count = COUNT(sources),
               .file_count = COUNT(files),
               .tensor = tensors,
               .cut = cuts,
               .rank = ranks,
               .source = sources,
               .file = files,
               .plan = {{0xab, 1}},
               .dead_rows = COUNT(dead),
               .dead_row = dead};
  p.model.vocab = 100; /* as its cut is */
  for (unsigned r = 0; r < 2; r++)
    for (size_t i = 0; i < ranks[r].part_count; i++)
      ranks[r].part[i].root = mm_hash_root(ranks[r].part[i].block, ranks[r].part[i].block_count);
  return p;
}

static char *text_of(const mm_pack *p) {
  mm_err err = {0};
  char *text = mm_pack_text(p, &err);
  if (!text) fail_msg("%s", err.text);
  return text;
}

#define SAME(field)      assert_true(a->field == b->field)
#define SAME_TEXT(field) assert_string_equal(a->field, b->field)

static void same_file(const mm_pack_file *a, const mm_pack_file *b) {
  SAME_TEXT(name), SAME(size);
  assert_memory_equal(&a->sha256, &b->sha256, sizeof a->sha256);
}

static void same_tensor(const mm_pack_tensor *a, const mm_pack_tensor *b) {
  SAME_TEXT(name), SAME_TEXT(scheme), SAME(vector), SAME(stage), SAME(lead), SAME(whole_lead), SAME(rows), SAME(cols), SAME(whole_cols),
      SAME(input_scale);
  SAME(plane_count), SAME(piece_count);
  for (unsigned i = 0; i < a->plane_count; i++)
    SAME_TEXT(plane[i].suffix), SAME(plane[i].dtype), SAME(plane[i].cell_n), SAME(plane[i].cell_k), SAME(plane[i].grid.known),
        SAME(plane[i].grid.n), SAME(plane[i].grid.k);
  for (unsigned i = 0; i < a->piece_count; i++) {
    SAME_TEXT(piece[i].source), SAME(piece[i].rows), SAME(piece[i].local_at), SAME(piece[i].local_rows), SAME(piece[i].cut);
  }
}

static void same_cut(const mm_cut *a, const mm_cut *b, uint32_t tp) {
  SAME(axis), SAME(whole), SAME(local);
  assert_int_equal(b->rank == NULL, a->axis == MM_AXIS_NONE);
  if (a->rank) assert_memory_equal(a->rank, b->rank, tp * sizeof *a->rank);
}

static void same_parts(const mm_rank_parts *a, const mm_rank_parts *b) {
  SAME(part_count);
  for (size_t i = 0; i < a->part_count; i++) {
    SAME_TEXT(part[i].file), SAME(part[i].size), SAME(part[i].block_count);
    assert_memory_equal(&a->part[i].root, &b->part[i].root, sizeof(mm_digest));
    assert_memory_equal(a->part[i].block, b->part[i].block, a->part[i].block_count * sizeof(mm_digest));
  }
}

TEST(test_round_trip) {
  mm_pack a = sample(), b;
  mm_err err = {0};
  char *text = text_of(&a);
  if (!mm_pack_parse(&b, "some/dir", text, strlen(text), &err)) fail_msg("%s", err.text);
  assert_string_equal(b.dir, "some/dir");
  assert_string_equal(b.tool, a.tool);
  assert_string_equal(b.quant, a.quant);
  assert_int_equal(b.tp_align, a.tp_align);
  assert_string_equal(b.model.architecture, a.model.architecture);
  assert_true(b.model.max_positions == a.model.max_positions && b.model.deepnorm_mlp.beta == a.model.deepnorm_mlp.beta);
  assert_int_equal(b.tp, a.tp);
  assert_memory_equal(&b.plan, &a.plan, sizeof a.plan);
  assert_int_equal(b.cut_count, a.cut_count);
  for (size_t i = 0; i < a.cut_count; i++) same_cut(&a.cut[i], &b.cut[i], a.tp);
  assert_int_equal(b.tensor_count, a.tensor_count);
  for (size_t i = 0; i < a.tensor_count; i++) same_tensor(&a.tensor[i], &b.tensor[i]);
  for (uint32_t r = 0; r < a.tp; r++) same_parts(&a.rank[r], &b.rank[r]);
  assert_int_equal(b.source_count, a.source_count);
  for (size_t i = 0; i < a.source_count; i++) same_file(&a.source[i], &b.source[i]);
  assert_int_equal(b.file_count, a.file_count);
  for (size_t i = 0; i < a.file_count; i++) same_file(&a.file[i], &b.file[i]);
  assert_int_equal(b.dead_rows, a.dead_rows);
  assert_memory_equal(b.dead_row, a.dead_row, sizeof dead);

  char *again = text_of(&b);
  assert_string_equal(again, text);
  free(again), free(text);
  mm_pack_close(&b), mm_pack_close(&b);
}

/* A manifest with a grid is of version 2. */
TEST(test_grid) {
  mm_pack a = sample(), b;
  mm_err err = {0};
  mm_pack_plane *plane = &a.tensor[2].plane[1], before = *plane;
  assert_int_equal(mm_pack_version(&a), 1);
  plane->grid = (mm_pack_grid){true, 16, 0};
  char *text = text_of(&a);
  assert_non_null(strstr(text, "\n\"version\":2,\n"));
  assert_non_null(strstr(text, "\"cell\":[8,16],\"grid\":[16,0]}"));
  if (!mm_pack_parse(&b, "d", text, strlen(text), &err)) fail_msg("%s", err.text);
  for (size_t i = 0; i < a.tensor_count; i++) same_tensor(&a.tensor[i], &b.tensor[i]);
  assert_int_equal(mm_pack_version(&b), 2);
  free(text);
  *plane = before;
  mm_pack_close(&b);
}

/* A manifest of an extended model is of version 3, grids or not, and says what was left out. */
TEST(test_extended) {
  mm_pack a = sample(), b;
  mm_err err = {0};
  const mm_model before = a.model;
  a.model = odd_extended_model(), a.left_out_count = 2;
  a.left_out[0] = (mm_left_out){"first.", 3, UINT64_C(9007199254740993)}, a.left_out[1] = (mm_left_out){"second.", 1, 0};
  assert_int_equal(mm_pack_version(&a), 3);
  char *text = text_of(&a);
  assert_non_null(strstr(text, "\n\"version\":3,\n"));
  assert_non_null(strstr(text,
                         "\"left_out\":[\n{\"prefix\":\"first.\",\"tensors\":3,\"bytes\":9007199254740993},\n"
                         "{\"prefix\":\"second.\",\"tensors\":1,\"bytes\":0}\n],\n\"dead_rows\""));
  if (!mm_pack_parse(&b, "d", text, strlen(text), &err)) fail_msg("%s", err.text);
  assert_int_equal(b.left_out_count, 2);
  for (size_t i = 0; i < 2; i++) {
    assert_string_equal(b.left_out[i].prefix, a.left_out[i].prefix);
    assert_true(b.left_out[i].tensors == a.left_out[i].tensors && b.left_out[i].bytes == a.left_out[i].bytes);
  }
  char *again = text_of(&b);
  assert_string_equal(again, text);
  const struct {
    const char *prefix[2], *says;
    uint64_t tensors;
  } bad[] = {{{"second.", "first."}, "found other prefixes, expected them in ascending order", 1},
             {{"first.", "first."}, "found other prefixes, expected them in ascending order", 1},
             {{"", "first."}, "key \"prefix\": found an empty string", 1},
             {{"first.", "second."}, "key \"tensors\": found 0", 0}};
  for (size_t i = 0; i < COUNT(bad); i++) {
    mm_pack c;
    for (size_t k = 0; k < 2; k++) a.left_out[k] = (mm_left_out){bad[i].prefix[k], bad[i].tensors, 5};
    char *wrong = text_of(&a);
    assert_false(mm_pack_parse(&c, "d", wrong, strlen(wrong), &err));
    if (!strstr(err.text, bad[i].says)) fail_msg("\"%s\" does not say \"%s\"", err.text, bad[i].says);
    assert_string_equal(err.code, "E_MANIFEST");
    free(wrong), mm_pack_close(&c), err = (mm_err){0};
  }
  a.model = before, a.left_out_count = 0;
  free(again), free(text), mm_pack_close(&b);
}

/* The page's keys, one line a tensor. */
TEST(test_text) {
  mm_pack p = sample();
  char *text = text_of(&p);
  assert_int_equal(strncmp(text,
                           "{\n\"format\":\"minimax-packed\",\n\"version\":1,\n\"tool\":\"minimax-convert 9.8.7\",\n"
                           "\"quant\":\"block_fp8\",\n\"tp_align\":\"pad\",\n"
                           "\"plan\":\"ab01000000000000000000000000000000000000000000000000000000000000\",\n\"model\":{\"architecture\"",
                           200),
                   0);
#define HAS(line) \
  if (!strstr(text, line)) fail_msg("no %s in\n%s", line, text)
  HAS("\n\"parallel\":{\"tp\":2,\"ep\":1,\"pp\":1},\n");
  HAS("\n\"cuts\":[\n{\"axis\":\"none\"},\n{\"axis\":\"rows\",\"whole\":100,\"local\":64,\"ranks\":[[0,0,64],[0,64,36]]},\n");
  HAS("\n{\"axis\":\"cols\",\"whole\":23,\"local\":12,\"ranks\":[[0,0,12],[0,12,11]]}\n],\n\"tensors\":[\n");
  HAS("\n{\"name\":\"model.layers.0.mlp.experts.w2_weight\",\"scheme\":\"block_fp8\",\"vector\":false,\"stage\":0,\"lead\":4,\"whole_"
      "lead\":4,\"rows\":32,\"cols\":12,"
      "\"whole_cols\":23,\"planes\":[{\"suffix\":\"\",\"dtype\":\"F8_E4M3\",\"cell\":[1,1]},{\"suffix\":\"_scale_inv\",\"dtype\":\"F32\","
      "\"cell\":[0,4]}],\"pieces\":[{\"source\":\"experts.{e}.w2.weight\",\"rows\":32,\"at\":0,\"local_rows\":32,\"cut\":5}]}\n],\n");
  HAS("\n\"ranks\":[\n{\"parts\":[{\"file\":\"model-rank-00000-part-00000.safetensors\",\"size\":8388609,\"root\":\"");
  HAS("\n\"sources\":[\n{\"name\":\"model-00001-of-00002.safetensors\",\"size\":9007199254740993,\"header_sha256\":\"07000000");
  HAS("\n\"files\":[\n{\"name\":\"config.json\",\"size\":123,\"sha256\":\"09000000");
  HAS("\n\"dead_rows\":[3,98,99],\n\"sha256\":\"");
  free(text);
}

static void expect_refusal(const char *text, size_t n, mm_status status, const char *code, const char *what) {
  mm_pack p;
  mm_err err = {0};
  if (mm_pack_parse(&p, "d", text, n, &err)) fail_msg("accepted, expected \"%s\"", what);
  mm_pack_close(&p);
  if (!strstr(err.text, what)) fail_msg("\"%s\" does not say \"%s\"", err.text, what);
  assert_non_null(strstr(err.text, ": d/manifest.json"));
  assert_int_equal(err.status, status);
  assert_string_equal(err.code, code);
}

typedef struct mutation {
  const char *anchor, *old, *new, *what;
} mutation;

static void refuse_all(const mutation *m, size_t count, mm_status status, const char *code) {
  mm_pack p = sample();
  char *text = text_of(&p);
  for (size_t i = 0; i < count; i++) {
    char *changed = replaced(text, m[i].anchor, m[i].old, m[i].new);
    expect_refusal(changed, strlen(changed), status, code, m[i].what);
    free(changed);
  }
  free(text);
}

TEST(test_versions) {
  static const mutation bad[] = {
      {"", "\"version\":1", "\"version\":6", "d/manifest.json: found format version 6, expected 1, 2, 3, 4 or 5"},
      {"", "\"version\":1", "\"version\":0", "found format version 0, expected 1, 2, 3, 4 or 5"},
      {"", "\"version\":1", "\"version\":-1,\"new\":[]", "found format version -1, expected 1, 2, 3, 4 or 5"},
      {"", "minimax-packed", "minimax-packed\\n2", "found format \"minimax-packed\\x0a2\", expected \"minimax-packed\""},
  };
  refuse_all(bad, COUNT(bad), MM_UNSUPPORTED, "E_VERSION");
}

TEST(test_outline) {
  static const mutation bad[] = {
      {"", "\"version\":1", "\"version\":\"1\"", "key \"version\": found a string, expected an integer"},
      {"", "\"version\":1", "\"version\":3", "key \"version\": found 3, expected 1, as the model has no keys of version 3"},
      {"", "\"version\":1", "\"version\":2", "d/manifest.json: key \"version\": found 2, expected 1, as planes have no grid"},
      {"", "\"format\":\"minimax-packed\",", "", "key \"format\": found nothing"},
      {"", "\"tool\"", "\"extra\":1,\"tool\"", "found unknown key \"extra\""},
      {"", "\"tool\":\"minimax-convert 9.8.7\"", "\"tool\":\"\"", "key \"tool\": found an empty string"},
      {"", "\"quant\":\"block_fp8\"", "\"quant\":\"\"", "key \"quant\": found an empty string"},
      {"", "\"tp_align\":\"pad\"", "\"tp_align\":\"paid\"", "key \"tp_align\": found \"paid\", expected split, pad or error"},
      {"", "\"tp_align\":\"pad\"", "\"tp_align\":\"\"", "key \"tp_align\""},
      {"", "\"tp_align\":\"pad\"", "\"tp_align\":7", "key \"tp_align\": found an integer"},
      {"", "\"plan\":\"ab", "\"plan\":\"AB", "key \"plan\": found "},
      {"", "\"plan\":\"ab", "\"plan\":\"abc", "key \"plan\": found "},
      {"", "\"plan\":\"ab", "\"plan\":\"b", "key \"plan\": found "},
      {"", "\"plan\":\"ab", "\"plan\":\"gb", "key \"plan\": found "},
      {"", "\"hidden\":96", "\"hidden\":0", "d/manifest.json: model: hidden: found 0"},
      {"", "\"hidden\":96", "\"hidden\":96,\"wide\":1", "d/manifest.json: model: found unknown key \"wide\""},
      {"", "\"tp\":2", "\"tp\":0", "parallel: key \"tp\": found 0, expected 1 to 1024"},
      {"", "\"tp\":2", "\"tp\":1025", "parallel: key \"tp\": found 1025, expected 1 to 1024"},
      {"", "\"tp\":2", "\"tp\":3", "cuts[1]: key \"ranks\": found 2 entries, expected 3 to 3"},
      {"", "\"ep\":1", "\"ep\":3", "parallel: key \"ep\": found 3, expected 1 to 2"},
      {"", "\"tp\":2,\"ep\":1", "\"tp\":5,\"ep\":3", "parallel: found ep 3, expected a divisor of tp 5"},
      {"", "\"pp\":1", "\"pp\":1025", "parallel: key \"pp\": found 1025, expected 1 to 1024"},
      {"", "\"pp\":1", "\"pp\":2", "key \"ranks\": found 2 entries, expected 4 to 4"},
      {"", "\"pp\":1", "\"pp\":1,\"dp\":1", "parallel: found unknown key \"dp\""},
      {"", "[3,98,99]", "[3,98,100]", "\"dead_rows\": entry 2: found 100, expected ascending ids below 100"},
      {"", "[3,98,99]", "[3,98,98]", "\"dead_rows\": entry 2: found 98, expected ascending ids below 100"},
      {"", "[3,98,99]", "[3,98,-1]", "\"dead_rows\": entry 2: found "},
      {"", "[3,98,99]", "[3,98,4294967296]", "\"dead_rows\": entry 2: found "},
      {"", "[3,98,99]", "[3,98,1.5]", "\"dead_rows\": entry 2: found "},
      {"", "[3,98,99]", "null", "key \"dead_rows\": found null, expected an array"},
  };
  refuse_all(bad, COUNT(bad), MM_INTEGRITY, "E_MANIFEST");
}

TEST(test_cuts) {
  static const mutation bad[] = {
      {"\"cuts\"", "{\"axis\":\"none\"}", "7", "key \"cuts\": entry 0: found "},
      {"\"cuts\"", "\"none\"", "\"none\",\"whole\":0", "cuts[0]: found unknown key \"whole\""},
      {"\"cuts\"", "\"rows\"", "\"diagonal\"", "found \"diagonal\", expected none, rows or cols"},
      {"\"cuts\"", "\"rows\"", "\"rows\",\"step\":1", "cuts[1]: found unknown key \"step\""},
      {"\"cuts\"", "\"whole\":100", "\"whole\":0", "cuts[1]: key \"whole\": found 0"},
      {"\"cuts\"", "\"whole\":100", "\"whole\":4294967296", "cuts[1]: key \"whole\": found 4294967296"},
      {"\"cuts\"", "\"local\":64", "\"local\":0", "cuts[1]: key \"local\": found 0"},
      {"\"cuts\"", "[[0,0,64],[0,64,36]]", "[[0,0,64]]", "cuts[1]: key \"ranks\": found 1 entries, expected 2 to 2"},
      {"\"cuts\"", "[0,64,36]", "[0,64,36],[0,0,1]", "cuts[1]: key \"ranks\": found 3 entries, expected 2 to 2"},
      {"\"cuts\"", "[0,64,36]", "[0,64]", "cuts[1].ranks[1]: key \"ranks\": found "},
      {"\"cuts\"", "[0,64,36]", "[0,64,36,0]", "cuts[1].ranks[1]: key \"ranks\": found "},
      {"\"cuts\"", "[0,64,36]", "7", "cuts[1].ranks[1]: key \"ranks\": found "},
      {"\"cuts\"", "[0,64,36]", "[29,64,36]", "cuts[1].ranks[1]: found local 29 + 36, expected at most 64"},
      {"\"cuts\"", "[0,64,36]", "[4294967295,64,36]", "cuts[1].ranks[1]: found local 4294967295 + 36"},
      {"\"cuts\"", "[0,64,36]", "[0,64,37]", "cuts[1].ranks[1]: found whole 64 + 37, expected at most 100"},
      {"\"cuts\"", "[0,64,36]", "[0,4294967295,36]", "cuts[1].ranks[1]: found whole 4294967295 + 36"},
      {"\"cuts\"", "[0,64,36]", "[0,65,35]", "cuts[1].ranks[1]: found a start at 65, expected at most 64, where the ranks before end"},
      {"\"cuts\"", "[0,0,64]", "[0,1,63]", "cuts[1].ranks[0]: found a start at 1, expected at most 0, where the ranks before end"},
      {"\"cuts\"", "[0,64,36]", "[0,64,35]", "cuts[1]: found ranks that end at 99, expected 100"},
  };
  refuse_all(bad, COUNT(bad), MM_INTEGRITY, "E_MANIFEST");
}

/* A rank that holds padding only, ranks that overlap, a range that does not begin at local 0. A changed text that fails only by its digest,
 * which is checked last, shows that the change was good. */
TEST(test_good_cuts) {
  static const mutation good[] = {
      {"\"cuts\"", "[[0,0,64],[0,64,36]]", "[[0,0,64],[0,36,64]]", "key \"sha256\": found another ending, expected "},
      {"\"cuts\"", "[[0,0,8],[0,0,8]]", "[[0,0,8],[5,8,0]]", "key \"sha256\": found another ending, expected "},
      {"\"cuts\"", "[[0,0,64],[0,64,36]]", "[[0,0,60],[28,64,36]]", "cuts[1].ranks[1]: found a start at 64"},
  };
  refuse_all(good, COUNT(good), MM_INTEGRITY, "E_MANIFEST");
}

TEST(test_tensors) {
#define QKV    "qkv_proj"
#define W2     "w2_weight"
#define VECTOR "input_layernorm"
  static const mutation bad[] = {
      {"\"tensors\"", "{\"name\"", "[],{\"name\"", "key \"tensors\": entry 0: found "},
      {QKV, "\"vector\"", "\"kind\":1,\"vector\"", "tensors[2]: found unknown key \"kind\""},
      {"\"tensors\"", "model.embed_tokens.weight", "", "tensors[0]: key \"name\": found an empty string"},
      {"\"tensors\"", "model.embed_tokens.weight", "a\\u0000b", "tensors[0]: key \"name\": found a string with a NUL"},
      {"\"tensors\"", "\"scheme\":\"bf16\"", "\"scheme\":\"\"", "tensors[0]: key \"scheme\": found an empty string"},
      {QKV, "\"vector\":false", "\"vector\":0", "tensors[2]: key \"vector\": found an integer"},
      {QKV, "\"rows\":40", "\"rows\":0", "tensors[2]: key \"rows\": found 0"},
      {QKV, "\"cols\":32", "\"cols\":0", "tensors[2]: key \"cols\": found 0"},
      {QKV, "\"whole_cols\":32", "\"whole_cols\":0", "tensors[2]: key \"whole_cols\": found 0"},
      {QKV, "\"lead\":0", "\"lead\":-1", "tensors[2]: key \"lead\": found -1"},
      {QKV, "\"lead\":0", "\"lead\":1", "tensors[2]: found lead 1 of 0, expected whole_lead divided by ep 1"},
      {W2, "\"whole_lead\":4", "\"whole_lead\":8", "tensors[5]: found lead 4 of 8, expected whole_lead divided by ep 1"},
      {QKV, "\"stage\":0", "\"stage\":1", "tensors[2]: key \"stage\": found 1, expected one of 1 stages"},
      {"\"tensors\"", "layers.0.self_attn.q_norm.weight", "layers.0.input_layernorm.weight",
       "tensors: found \"model.layers.0.input_layernorm.weight\" twice"},
      {"\"tensors\"", "model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.qkv_proj.weight_scale_inv",
       "found \"model.layers.0.self_attn.qkv_proj.weight_scale_inv\" twice"},
      {QKV, "_scale_inv", "", "found \"model.layers.0.self_attn.qkv_proj.weight\" twice"},
      /* planes */
      {QKV,
       "\"planes\":[{\"suffix\":\"\",\"dtype\":\"F8_E4M3\",\"cell\":[1,1]},{\"suffix\":\"_scale_inv\",\"dtype\":\"F32\",\"cell\":[8,16]}]",
       "\"planes\":[]", "tensors[2]: key \"planes\": found 0 entries, expected 1 to 4"},
      {QKV, "\"planes\":[", "\"planes\":[{},{},{},", "tensors[2]: key \"planes\": found 5 entries, expected 1 to 4"},
      {QKV, "\"planes\":[", "\"planes\":[1,", "tensors[2]: key \"planes\": entry 0: found "},
      {QKV, "\"suffix\":\"_scale_inv\",", "", "tensors[2].planes[1]: key \"suffix\": found nothing"},
      {QKV, "\"dtype\":\"F32\"", "\"dtype\":\"F33\"", "tensors[2].planes[1]: found unknown dtype \"F33\""},
      {QKV, "\"dtype\":\"F32\"", "\"dtype\":\"f32\"", "tensors[2].planes[1]: found unknown dtype \"f32\""},
      {QKV, "\"dtype\":\"F32\"", "\"dtype\":\"F32\",\"scale\":true", "tensors[2].planes[1]: found unknown key \"scale\""},
      {QKV, "[8,16]", "[8,16],\"grid\":[16,16]", "d/manifest.json: key \"version\": found 1, expected 2, as planes have a grid"},
      {QKV, "[8,16]", "[8,16],\"grid\":[16]", "tensors[2].planes[1]: key \"grid\": found "},
      {QKV, "[8,16]", "[8,16],\"grid\":null", "tensors[2].planes[1]: key \"grid\": found "},
      {QKV, "[8,16]", "[8]", "tensors[2].planes[1]: key \"cell\": found "},
      {QKV, ",\"cell\":[8,16]", "", "tensors[2].planes[1]: key \"cell\": found "},
      {QKV, "[8,16]", "[8,-16]", "tensors[2].planes[1]: key \"cell\": entry 1: found -16, expected an integer from 0"},
      {QKV, "\"dtype\":\"F32\"", "\"dtype\":\"F6_E2M3\"", "tensors[2]: planes[1]: found a size beyond 64 bits"},
      /* vectors */
      {VECTOR, "\"lead\":0,\"whole_lead\":0", "\"lead\":1,\"whole_lead\":1",
       "tensors[1]: found a vector of lead 1, 1 columns and cells [1, 1]"},
      {QKV, "\"input_scale\":0.0625", "\"input_scale\":0", "expected a positive F32"},
      {QKV, "\"input_scale\":0.0625", "\"input_scale\":0.1", "expected a positive F32"},
      {QKV, "\"input_scale\":0.0625", "\"input_scale\":1e39", "expected a positive F32"},
      {QKV, "\"input_scale\":0.0625", "\"input_scale\":\"1\"", "input_scale"},
      {VECTOR, "\"cols\":1,\"whole_cols\":1", "\"cols\":2,\"whole_cols\":2", "tensors[1]: found a vector of lead 0, 2 columns"},
      {VECTOR, "[1,1]", "[0,1]", "tensors[1]: found a vector of lead 0, 1 columns and cells [0, 1]"},
      {VECTOR, "[1,1]", "[1,0]", "tensors[1]: found a vector of lead 0, 1 columns and cells [1, 0]"},
      {QKV, "\"vector\":false", "\"vector\":true", "tensors[2]: key \"planes\": found 2 entries, expected 1 to 1"},
      /* pieces */
      {W2, "[{\"source\":\"experts.{e}.w2.weight\",\"rows\":32,\"at\":0,\"local_rows\":32,\"cut\":5}]", "[]",
       "tensors[5]: key \"pieces\": found 0 entries, expected 1 to 3"},
      {QKV, "\"pieces\":[", "\"pieces\":[{},", "tensors[2]: key \"pieces\": found 4 entries, expected 1 to 3"},
      {QKV, "\"source\":\"k_proj.weight\"", "\"source\":\"\"", "tensors[2].pieces[1]: key \"source\": found an empty string"},
      {QKV, "\"source\":\"k_proj.weight\"", "\"source\":\"k\",\"file\":1", "tensors[2].pieces[1]: found unknown key \"file\""},
      {QKV, "\"at\":0", "\"at\":1", "tensors[2].pieces[0]: key \"at\": found 1, expected 0"},
      {QKV, "\"at\":24", "\"at\":23", "tensors[2].pieces[1]: key \"at\": found 23, expected 24"},
      {QKV, "\"at\":32", "\"at\":24", "tensors[2].pieces[2]: key \"at\": found 24, expected 32"},
      {QKV, "\"cut\":3", "\"cut\":6", "tensors[2].pieces[1]: key \"cut\": found 6, expected one of 6 cuts"},
      {QKV, "\"rows\":40", "\"rows\":41", "tensors[2]: found pieces of 40 rows, expected 41"},
      {QKV, "\"rows\":40", "\"rows\":39", "tensors[2]: found pieces of 40 rows, expected 39"},
      {QKV, "\"rows\":48", "\"rows\":47", "tensors[2].pieces[0]: found 47 rows cut to 24, expected 48 to 24"},
      {QKV, "\"local_rows\":24", "\"local_rows\":23", "tensors[2].pieces[0]: found 48 rows cut to 23, expected 48 to 24"},
      {QKV, "\"local_rows\":24", "\"local_rows\":0", "tensors[2].pieces[0]: key \"local_rows\": found 0"},
      {VECTOR, "\"rows\":32,\"at\"", "\"rows\":33,\"at\"", "tensors[1].pieces[0]: found 33 rows cut to 32, expected 32 to 32"},
      {W2, "\"rows\":32,\"at\"", "\"rows\":33,\"at\"", "tensors[5].pieces[0]: found 33 rows cut to 32, expected 32 to 32"},
      {W2, "\"whole_cols\":23", "\"whole_cols\":24", "tensors[5].pieces[0]: found 24 columns cut to 12, expected 23 to 12"},
      {W2, "\"cols\":12", "\"cols\":11", "tensors[5].pieces[0]: found 23 columns cut to 11, expected 23 to 12"},
      {QKV, "\"whole_cols\":32", "\"whole_cols\":33", "tensors[2].pieces[0]: found 33 columns cut to 32, expected 32 to 32"},
  };
  refuse_all(bad, COUNT(bad), MM_INTEGRITY, "E_MANIFEST");
}

TEST(test_files) {
#define ZEROS62 "00000000000000000000000000000000000000000000000000000000000000"
  static const mutation bad[] = {
      {"\"ranks\":[\n", "{\"parts\"", "{\"parts\":[]},{\"parts\"", "key \"ranks\": found 3 entries, expected 2 to 2"},
      {"\"ranks\":[\n", "{\"parts\"", "{\"node\":0,\"parts\"", "ranks[0]: found unknown key \"node\""},
      {"\"ranks\":[\n", "{\"file\"", "{\"mode\":0,\"file\"", "ranks[0].parts[0]: found unknown key \"mode\""},
      {"\"ranks\":[\n", "{\"file\"", "0,{\"file\"", "ranks[0]: key \"parts\": entry 0: found "},
      {"", "part-00001", "part-00002", "expected \"model-rank-00000-part-00001.safetensors\""},
      {"", "rank-00001-part", "rank-00000-part", "expected \"model-rank-00001-part-00000.safetensors\""},
      {"", "model-rank-00001", "../model-rank-00001", "expected"},
      {"", "\"size\":8388609", "\"size\":8388608", "ranks[0].parts[0]: key \"blocks\": found 3 entries, expected 2 to 2"},
      {"", "\"size\":8388609", "\"size\":12582913", "ranks[0].parts[0]: key \"blocks\": found 3 entries, expected 4 to 4"},
      {"", "\"size\":8388609", "\"size\":9223372036854775807", "ranks[0].parts[0]: key \"blocks\": found 3 entries"},
      {"", "\"size\":8388609", "\"size\":-1", "ranks[0].parts[0]: key \"size\": found -1"},
      {"", "\"root\":\"", "\"root\":\"z", "ranks[0].parts[0]: key \"root\": found "},
      {"", "\"03" ZEROS62 "\"", "\"03" ZEROS62 "0\"", "ranks[0].parts[0]: key \"blocks\": found "},
      {"", "\"03" ZEROS62 "\"", "\"0B" ZEROS62 "\"", "ranks[0].parts[0]: key \"blocks\": found "},
      {"", "\"03" ZEROS62 "\"", "null", "ranks[0].parts[0]: key \"blocks\": found "},
      {"", "\"03" ZEROS62 "\"", "\"0b" ZEROS62 "\"", "ranks[0].parts[0]: key \"root\": found "},
      {"\"sources\"", "model-00001-of-00002", "../model",
       "sources[0]: key \"name\": found \"../model.safetensors\", expected a plain file name"},
      {"\"sources\"", "model-00001-of-00002", "a/b", "sources[0]: key \"name\": found \"a/b.safetensors\", expected a plain file name"},
      {"\"sources\"", "model-00001-of-00002", "a\\u0000b", "sources[0]: key \"name\": found a string with a NUL"},
      {"\"sources\"", "model-00001-of-00002", "model-00002-of-00002", "sources: found \"model-00002-of-00002.safetensors\" twice"},
      {"\"sources\"", "\"header_sha256\"", "\"sha256\"", "sources[0]: found unknown key \"sha256\""},
      {"\"sources\"", "54321", "-54321", "sources[1]: key \"size\": found -54321"},
      {"\"sources\"", "\"07" ZEROS62, "\"007" ZEROS62, "sources[0]: key \"header_sha256\": found "},
      {"\"files\"", "config.json", "..", "files[0]: key \"name\": found \"..\", expected a plain file name"},
      {"\"files\"", "config.json", "/etc/passwd", "files[0]: key \"name\": found \"/etc/passwd\", expected a plain file name"},
      {"\"files\"", "config.json", "a\\\\b", "files[0]: key \"name\": found \"a\\x5cb\", expected a plain file name"},
      {"\"files\"", "config.json", "", "files[0]: key \"name\": found an empty string"},
      {"\"files\"", "config.json", "tokenizer.json", "files: found \"tokenizer.json\" twice"},
      {"\"files\"", "config.json", "manifest.json", "files: found \"manifest.json\" twice"},
      {"\"files\"", "config.json", "model.sig", "files: found \"model.sig\" twice"},
      {"\"files\"", "config.json", "archive.json", "files: found \"archive.json\" twice"},
      {"\"files\"", "config.json", "model-rank-00001-part-00000.safetensors",
       "files: found \"model-rank-00001-part-00000.safetensors\" twice"},
      {"\"files\"", "{\"name\"", "\"x\",{\"name\"", "key \"files\": entry 0: found "},
  };
  refuse_all(bad, COUNT(bad), MM_INTEGRITY, "E_MANIFEST");
}

/* Errors of the text itself are those of a file of ours. */
TEST(test_not_json) {
  mm_pack p = sample();
  char *text = text_of(&p);
  size_t n = strlen(text);
  expect_refusal(text, n - 3, MM_INTEGRITY, "E_JSON", "d/manifest.json: offset ");
  expect_refusal(text, n + 1, MM_INTEGRITY, "E_JSON", "\\x00");
  expect_refusal("[]", 2, MM_INTEGRITY, "E_MANIFEST", "expected an object");
  expect_refusal("", 0, MM_INTEGRITY, "E_JSON", "d/manifest.json: offset 0");
  char *twice = replaced(text, "", "\"tp\":2", "\"tp\":2,\"tp\":2");
  expect_refusal(twice, strlen(twice), MM_INTEGRITY, "E_JSON", "twice");
  free(twice);
  char *big = replaced(text, "", "\"size\":8388609", "\"size\":9223372036854775808");
  expect_refusal(big, strlen(big), MM_INTEGRITY, "E_NUMBER", "expected an integer of 64 bits");
  free(big);
  free(text);
}

/* One tensor of the sample made huge: its bytes overflow, or only exceed the parts. */
TEST(test_sizes) {
  mm_pack p = sample();
  mm_pack_tensor huge = TENSOR("h", "u8", false, 0, 0, 0, 13000000, 1, 1, 1, 1, {PLAIN(MM_U8)}, {{"h", 13000000, 0, 13000000, 0}}, 0);
  p.tensor = &huge;
  p.tensor_count = 1;
  char *text = text_of(&p); /* rank 0 has 12 MiB + 1, rank 1 has 8 MiB */
  expect_refusal(text, strlen(text), MM_INTEGRITY, "E_MANIFEST", "ranks[0]: found parts of 12582913 bytes, expected at least the 13000000");
  free(text);
  huge.rows = huge.piece[0].rows = huge.piece[0].local_rows = (8 << 20) + 1;
  text = text_of(&p);
  expect_refusal(text, strlen(text), MM_INTEGRITY, "E_MANIFEST", "ranks[1]: found parts of 8388608 bytes, expected at least the 8388609");
  free(text);
  huge.rows = huge.piece[0].rows = huge.piece[0].local_rows = 8 << 20;
  text = text_of(&p);
  mm_pack fits;
  mm_err err = {0};
  assert_true(mm_pack_parse(&fits, "d", text, strlen(text), &err));
  mm_pack_close(&fits);
  free(text);
  huge.lead = huge.whole_lead = UINT32_MAX;
  huge.rows = huge.piece[0].rows = huge.piece[0].local_rows = huge.cols = huge.whole_cols = INT32_MAX;
  text = text_of(&p);
  expect_refusal(text, strlen(text), MM_INTEGRITY, "E_MANIFEST",
                 "tensors[0]: planes[0]: found a size beyond 64 bits, expected a smaller one");
  free(text);

  /* One column more: loops over columns count in 32 bits, a tile at a time. */
  huge.cols = huge.whole_cols = UINT32_C(1) << 31;
  text = text_of(&p);
  expect_refusal(text, strlen(text), MM_INTEGRITY, "E_MANIFEST", "tensors[0]: key \"cols\": found 2147483648, expected 1 to 2147483647");
  free(text);
  huge.cols = huge.whole_cols = 1;
  huge.rows = huge.piece[0].rows = huge.piece[0].local_rows = UINT32_C(1) << 31;
  text = text_of(&p);
  expect_refusal(text, strlen(text), MM_INTEGRITY, "E_MANIFEST", "tensors[0]: key \"rows\": found 2147483648, expected 1 to 2147483647");
  free(text);

  /* 8 · (2^32 - 1) · 2^29 + 2 · (2^31 - 1) + 4 = 2^64 + 2 bytes. */
  mm_pack_tensor many[10];
  char name[10][4];
  for (unsigned i = 0; i < 10; i++) {
    uint32_t rows = i < 8 ? UINT32_C(1) << 29 : i == 8 ? INT32_MAX : 4, lead = i < 8 ? UINT32_MAX : i == 8 ? 2 : 0;
    snprintf(name[i], sizeof name[i], "t%u", i);
    many[i] = (mm_pack_tensor)TENSOR(name[i], "u8", false, lead, lead, 0, rows, 1, 1, 1, 1, {PLAIN(MM_U8)}, {{"h", rows, 0, rows, 0}}, 0);
  }
  p.tensor = many;
  p.tensor_count = 10;
  text = text_of(&p);
  expect_refusal(text, strlen(text), MM_INTEGRITY, "E_MANIFEST",
                 "tensors[9]: planes[0]: found a size beyond 64 bits, expected a smaller one");
  free(text);
}

TEST(test_shapes_and_names) {
  char shape[64], name[64];
  static const struct {
    unsigned tensor, plane;
    const char *shape;
  } want[] = {{0, 0, "[64, 32]"},   {1, 0, "[32]"},      {2, 0, "[40, 32]"},    {2, 1, "[5, 2]"},   {4, 0, "[4, 24, 16]"},
              {4, 1, "[4, 24, 2]"}, {4, 2, "[4, 1, 1]"}, {5, 0, "[4, 32, 12]"}, {5, 1, "[4, 1, 3]"}};
  for (size_t i = 0; i < COUNT(want); i++) {
    mm_shape s = mm_pack_plane_shape(&tensors[want[i].tensor], want[i].plane);
    assert_string_equal(mm_shape_text(&s, shape, sizeof shape), want[i].shape);
  }
  mm_pack_tensor odd = TENSOR("o", "x", false, 0, 0, 0, 9, 33, 33, 1, 1, {{"", MM_U8, 4, 2, {0}}}, {{"o", 9, 0, 9, 0}}, 0);
  mm_shape s = mm_pack_plane_shape(&odd, 0);
  assert_string_equal(mm_shape_text(&s, shape, sizeof shape), "[3, 17]");
  mm_part_name(name, 3, 1);
  assert_string_equal(name, "model-rank-00003-part-00001.safetensors");
  assert_true(mm_part_named(name));
  assert_true(mm_part_named("model-rank-00000-part-00012.safetensors.zst"));
  static const char *const others[] = {"model-rank-00003-part-00001.safetensors.zs",
                                       "model-rank-00003-part-00001.safetensors.zst.zst",
                                       "model-rank-00003-part-00001.safetensors~",
                                       "model-rank-00003-part-00001.safetensor",
                                       "model-rank-00003-part-x.safetensors",
                                       "model-rank-00003.safetensors",
                                       "amodel-rank-00003-part-00001.safetensors",
                                       ".safetensors",
                                       ""};
  for (size_t i = 0; i < COUNT(others); i++)
    if (mm_part_named(others[i])) fail_msg("%s", others[i]);
}

TEST(test_open) {
  char dir[] = "/tmp/mm_pack_XXXXXX", path[64];
  assert_non_null(mkdtemp(dir));
  snprintf(path, sizeof path, "%s/manifest.json", dir);
  mm_pack p = sample(), back;
  mm_err err = {0};
  assert_false(mm_pack_open(&back, dir, &err));
  assert_string_equal(err.code, "E_FS_MISSING");
  assert_non_null(strstr(err.text, path));
  mm_pack_close(&back);

  assert_int_equal(mkfifo(path, 0600), 0);
  err = (mm_err){0};
  assert_false(mm_pack_open(&back, dir, &err));
  assert_string_equal(err.code, "E_FS_TYPE");
  unlink(path);

  char *text = text_of(&p);
  FILE *f = fopen(path, "w");
  fputs(text, f);
  fclose(f);
  err = (mm_err){0};
  assert_true(mm_pack_open(&back, dir, &err));
  assert_string_equal(back.dir, dir);
  assert_int_equal(back.tensor_count, COUNT(tensors));
  mm_pack_close(&back);
  free(text);
  unlink(path);
  rmdir(dir);
}

int main(void) { return run_unit_tests(NULL, NULL); }
