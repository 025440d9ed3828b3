/* Opening packed checkpoints: a small one of two ranks with two parts each, read back to the number, and one variation for each
 * promise that a part can break. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/safetensors.h"
#include "loader/shards.h"
#include "tests/unit/loader/small_model.h"
#include "tests/unit/put_file.h"
#include "tests/unit/unit.h"

/* One part file before it is written. */
typedef struct part {
  char version[8], rank[8], tp[8], index[8], plan[MM_HEX_LEN + 1];
  mm_st_tensor tensor[6];
  size_t count;
  long grow; /* bytes added (or cut) after the manifest was made */
  bool absent;
} part;

typedef struct checkpoint {
  char dir[256];
  mm_pack pack;
  mm_pack_tensor tensor[3];
  part part[2][2];
} checkpoint;

static mm_range ranges[2][2] = {{{0, 0, 4}, {0, 4, 4}}, {{0, 0, 192}, {0, 192, 192}}};

/* "a.weight" bf16, 8 x 6 cut along rows; "e.w" block_fp8, 2 x [130, 384] cut along columns inside a block, so that its scales
 * stand on a grid of 64 columns; "n.weight" f32, a vector of 5, whole. */
static void describe(checkpoint *c) {
  static mm_cut cuts[] = {{MM_AXIS_ROWS, 8, 4, ranges[0]}, {MM_AXIS_COLS, 384, 192, ranges[1]}, {.axis = MM_AXIS_NONE}};
  static const mm_pack_tensor tensors[] = {
      SMALL_TENSOR("a.weight", "bf16", 4, 6, 6, 1, .plane = {{"", MM_BF16, 1, 1, {0}}}, .piece = {{"a", 8, 0, 4, 0}}),
      SMALL_TENSOR("e.w", "block_fp8", 130, 192, 384, 2, .lead = 2, .whole_lead = 2,
                   .plane = {{"", MM_F8_E4M3, 1, 1, {0}}, {"_scale_inv", MM_F32, 128, 64, {0}}}, .piece = {{"e{e}", 130, 0, 130, 1}}),
      SMALL_TENSOR("n.weight", "f32", 5, 1, 1, 1, .vector = true, .plane = {{"", MM_F32, 1, 1, {0}}}, .piece = {{"n", 5, 0, 5, 2}}),
  };
  memcpy(c->tensor, tensors, sizeof c->tensor);
  c->pack = (mm_pack){.tool = "test",
                      .quant = "none",
                      .tp_align = MM_ALIGN_SPLIT,
                      .tp = 2,
                      .ep = 1,
                      .pp = 1,
                      .tensor_count = 3,
                      .tensor = c->tensor,
                      .cut_count = 3,
                      .cut = cuts};
  c->pack.model = small_model(6, 384);
  memset(c->pack.plan.byte, 0x5a, sizeof c->pack.plan.byte);
}

static void describe_parts(checkpoint *c) {
  for (unsigned r = 0; r < 2; r++)
    for (unsigned i = 0; i < 2; i++) {
      part *p = &c->part[r][i];
      *p = (part){.count = 2};
      snprintf(p->version, sizeof p->version, "%d", MM_PACK_VERSION);
      snprintf(p->rank, sizeof p->rank, "%u", r);
      snprintf(p->tp, sizeof p->tp, "2");
      snprintf(p->index, sizeof p->index, "%u", i);
      memcpy(p->plan, mm_digest_hex(&c->pack.plan).text, sizeof p->plan);
    }
  for (unsigned r = 0; r < 2; r++) {
    part *p = c->part[r];
    p[0].tensor[0] = (mm_st_tensor){.name = "e.w", .dtype = MM_F8_E4M3, .shape = mm_shape3(2, 130, 192)};
    p[0].tensor[1] = (mm_st_tensor){.name = "a.weight", .dtype = MM_BF16, .shape = mm_shape2(4, 6)};
    p[1].tensor[0] = (mm_st_tensor){.name = "e.w_scale_inv", .dtype = MM_F32, .shape = mm_shape3(2, 2, 3)};
    p[1].tensor[1] = (mm_st_tensor){.name = "n.weight", .dtype = MM_F32, .shape = mm_shape1(5)};
  }
}

/* The bytes of a file differ everywhere: byte i of part `p` of rank `r`. No E4M3 NaN, no bf16 or f32 beyond what is finite. */
static uint8_t byte_at(unsigned r, unsigned p, uint64_t i) { return (uint8_t)((i * 7 + i / 251 + r * 31 + p * 13) % 60 + 1); }

static void write_part(checkpoint *c, unsigned r, unsigned i, mm_part *out) {
  part *p = &c->part[r][i];
  size_t n;
  uint64_t size;
  uint8_t *header = small_header(p->tensor, p->count, p->version, p->rank, p->tp, p->index, p->plan, &n, &size), *bytes = malloc(size + 64);
  memcpy(bytes, header, n);
  for (uint64_t k = n; k < size + 64; k++) bytes[k] = byte_at(r, i, k - n);
  char name[64];
  mm_part_name(name, r, i);
  if (!p->absent) put_file_in(c->dir, name, bytes, (size_t)((long)size + p->grow));
  *out = (mm_part){.file = strdup(name), .size = size, .block_count = 1, .block = calloc(1, sizeof(mm_digest))};
  *out->block = mm_sha256(bytes, size);
  out->root = mm_hash_root(out->block, 1);
  free(header), free(bytes);
}

static void write_checkpoint(checkpoint *c) {
  mm_rank_parts rank[2];
  mm_part parts[2][2];
  mm_err err = {0};
  for (unsigned r = 0; r < 2; r++) {
    for (unsigned i = 0; i < 2; i++) write_part(c, r, i, &parts[r][i]);
    rank[r] = (mm_rank_parts){2, parts[r]};
  }
  c->pack.rank = rank;
  char *text = mm_pack_text(&c->pack, &err);
  if (!text) fail_msg("%s", err.text);
  put_file_in(c->dir, MM_MANIFEST, text, strlen(text));
  free(text);
  for (unsigned r = 0; r < 2; r++)
    for (unsigned i = 0; i < 2; i++) free((char *)(uintptr_t)parts[r][i].file), free(parts[r][i].block);
}

static void begin(checkpoint *c) {
  const char *tmp = getenv("TMPDIR");
  snprintf(c->dir, sizeof c->dir, "%s/shards.XXXXXX", tmp ? tmp : "/tmp");
  assert_non_null(mkdtemp(c->dir));
  describe(c);
  describe_parts(c);
}

static void finish(const checkpoint *c) {
  char path[512], name[64];
  for (unsigned r = 0; r < 2; r++)
    for (unsigned i = 0; i < 2; i++) {
      mm_part_name(name, r, i);
      snprintf(path, sizeof path, "%s/%s", c->dir, name);
      unlink(path);
    }
  snprintf(path, sizeof path, "%s/" MM_MANIFEST, c->dir);
  unlink(path);
  assert_int_equal(rmdir(c->dir), 0);
}

/* By name; false when absent from that rank. */
static bool find(const mm_shards *s, uint32_t rank, const char *name, mm_packed *out) {
  if (!s->rank[rank].plane) return false;
  for (size_t i = 0; i < s->pack.tensor_count; i++) {
    if (strcmp(s->pack.tensor[i].name, name) != 0 || !mm_pack_holds(&s->pack, &s->pack.tensor[i], rank)) continue;
    *out = mm_shards_tensor(s, rank, i);
    return true;
  }
  return false;
}

TEST(reads_back) {
  checkpoint c;
  mm_shards s;
  mm_err err = {0};
  begin(&c);
  write_checkpoint(&c);
  if (!mm_shards_open(&s, c.dir, &err)) fail_msg("%s", err.text);
  for (unsigned r = 0; r < 2; r++) {
    mm_packed a = {0}, e = {0}, n = {0}, none;
    assert_true(find(&s, r, "a.weight", &a) && find(&s, r, "e.w", &e) && find(&s, r, "n.weight", &n));
    assert_false(find(&s, r, "e.w_scale_inv", &none));
    assert_true(a.n == 4 && a.k == 6 && a.lead == 1 && n.n == 5 && n.k == 1 && e.lead == 2 && e.n == 130 && e.k == 192);
    assert_true(e.cell[1].n == 128 && e.cell[1].k == 64);
    assert_true(e.first_k == r * 192 && e.whole_k == 384 && e.cut_k == 192 && !a.whole_k && !a.cut_k && !n.cut_k);
    uint64_t at = 2 * 130 * 192;
    for (int i = 0; i < 48; i++) assert_int_equal(((const uint8_t *)a.plane[0])[i], byte_at(r, 0, at + (uint64_t)i));
    for (int i = 0; i < 48; i++) assert_int_equal(((const uint8_t *)e.plane[1])[i], byte_at(r, 1, (uint64_t)i));
    for (int i = 0; i < 20; i++) assert_int_equal(((const uint8_t *)n.plane[0])[i], byte_at(r, 1, 48 + (uint64_t)i));
    for (uint64_t i = 0; i < at; i++) assert_int_equal(((const uint8_t *)e.plane[0])[i], byte_at(r, 0, i));
  }
  mm_shards_close(&s);
  finish(&c);
}

/* ---- broken promises ---- */

static void version_2(checkpoint *c) { strcpy(c->part[1][0].version, "2"); }
static void other_rank(checkpoint *c) { strcpy(c->part[1][1].rank, "0"); }
static void other_tp(checkpoint *c) { strcpy(c->part[0][1].tp, "4"); }
static void other_part(checkpoint *c) { strcpy(c->part[0][1].index, "0"); }
static void other_plan(checkpoint *c) { c->part[1][0].plan[9] ^= 1; }
static void shorter(checkpoint *c) { c->part[1][1].grow = -1; }
static void longer(checkpoint *c) { c->part[0][0].grow = 1; }
static void gone(checkpoint *c) { c->part[0][1].absent = true; }
static void no_tensor(checkpoint *c) { c->part[1][0].count = 1; }
static void another_tensor(checkpoint *c) {
  c->part[1][0].tensor[2] = (mm_st_tensor){.name = "x", .dtype = MM_U8, .shape = mm_shape1(16)};
  c->part[1][0].count = 3;
}
static void tensor_twice(checkpoint *c) {
  c->part[1][1].tensor[2] = c->part[1][0].tensor[1];
  c->part[1][1].count = 3;
}
static void other_dtype(checkpoint *c) { c->part[0][0].tensor[1].dtype = MM_F16; }
static void other_shape(checkpoint *c) { c->part[0][0].tensor[1].shape = mm_shape2(6, 4); }
static void odd_offset(checkpoint *c) { /* five codes, then their scale */
  c->tensor[0] = c->tensor[2];
  c->tensor[0].name = "o";
  c->tensor[0].scheme = "block_fp8";
  c->tensor[0].vector = false;
  c->tensor[0].plane_count = 2;
  memcpy(c->tensor[0].plane, c->tensor[1].plane, sizeof c->tensor[0].plane);
  for (unsigned r = 0; r < 2; r++) {
    c->part[r][0].tensor[1] = (mm_st_tensor){.name = "o", .dtype = MM_F8_E4M3, .shape = mm_shape2(5, 1)};
    c->part[r][0].tensor[2] = (mm_st_tensor){.name = "o_scale_inv", .dtype = MM_F32, .shape = mm_shape2(1, 1)};
    c->part[r][0].count = 3;
  }
}
static void other_scheme(checkpoint *c) { c->tensor[0].scheme = "f17"; }
static void swapped_scheme(checkpoint *c) { c->tensor[0].scheme = "f16"; }
static void fewer_planes(checkpoint *c) {
  c->tensor[1].plane_count = 1;
  for (unsigned r = 0; r < 2; r++) {
    c->part[r][1].tensor[0] = c->part[r][1].tensor[1];
    c->part[r][1].count = 1;
  }
}
static void coarser_scales(checkpoint *c) {
  c->tensor[1].plane[1].cell_n = 0;
  for (unsigned r = 0; r < 2; r++) c->part[r][1].tensor[0].shape = mm_shape3(2, 1, 3);
}
static void other_grid(checkpoint *c) {
  c->tensor[1].plane[1].cell_k = 48; /* does not divide 128 */
  for (unsigned r = 0; r < 2; r++) c->part[r][1].tensor[0].shape = mm_shape3(2, 2, 4);
}
/* Before cuts the cells were smaller than they are. */
static void grid_within(checkpoint *c) { c->tensor[1].plane[1].grid = (mm_pack_grid){true, 64, 64}; }
static void grid_of_codes(checkpoint *c) { c->tensor[1].plane[0].grid = (mm_pack_grid){true, 1, 1}; }
static void fewer_codes(checkpoint *c) {
  c->tensor[1].plane[0].cell_k = 2;
  for (unsigned r = 0; r < 2; r++) c->part[r][0].tensor[0].shape = mm_shape3(2, 130, 96);
}
/* Codes never stand on a finer grid: one nibble to a byte. */
static void more_codes(checkpoint *c) {
  c->tensor[1].scheme = "mxfp4";
  c->tensor[1].plane[0].dtype = MM_U8;
  c->tensor[1].plane[1] = (mm_pack_plane){"_scale", MM_U8, 1, 32, {0}};
  for (unsigned r = 0; r < 2; r++) {
    c->part[r][0].tensor[0].dtype = MM_U8;
    c->part[r][1].tensor[0] = (mm_st_tensor){.name = "e.w_scale", .dtype = MM_U8, .shape = mm_shape3(2, 130, 6)};
  }
}

static const struct {
  const char *name;
  void (*edit)(checkpoint *c);
  mm_status status;
  const char *code, *says;
} variations[] = {
    {"version", version_2, MM_INTEGRITY, "E_PART", "metadata \"version\": found 2, expected 1"},
    {"rank", other_rank, MM_INTEGRITY, "E_PART", "model-rank-00001-part-00001.safetensors: metadata \"rank\": found 0, expected 1"},
    {"tp", other_tp, MM_INTEGRITY, "E_PART", "metadata \"tp\": found 4, expected 2"},
    {"part", other_part, MM_INTEGRITY, "E_PART", "metadata \"part\": found 0, expected 1"},
    {"plan", other_plan, MM_INTEGRITY, "E_PART", "metadata \"plan\": found 5a5a5a5a5"},
    {"shorter", shorter, MM_INTEGRITY, "E_SIZE", "model-rank-00001-part-00001.safetensors"},
    {"longer", longer, MM_INTEGRITY, "E_SIZE", "model-rank-00000-part-00000.safetensors"},
    {"gone", gone, MM_INTEGRITY, "E_FS_MISSING", "model-rank-00000-part-00001.safetensors"},
    {"no tensor", no_tensor, MM_INTEGRITY, "E_MISSING", "\"a.weight\": found in no part of rank 1"},
    {"another tensor", another_tensor, MM_INTEGRITY, "E_EXTRA", "\"x\""},
    {"tensor twice", tensor_twice, MM_INTEGRITY, "E_EXTRA", "\"a.weight\""},
    {"dtype", other_dtype, MM_INTEGRITY, "E_SHAPE", "found F16 [4, 6], expected BF16 [4, 6]"},
    {"shape", other_shape, MM_INTEGRITY, "E_SHAPE", "found BF16 [6, 4], expected BF16 [4, 6]"},
    {"odd offset", odd_offset, MM_INTEGRITY, "E_ALIGN", "\"o_scale_inv\": offset "},
    {"unknown scheme", other_scheme, MM_UNSUPPORTED, "E_SCHEME", "\"f17\""},
    {"scheme of another type", swapped_scheme, MM_INTEGRITY, "E_SCHEME", "\"a.weight\""},
    {"no scales", fewer_planes, MM_INTEGRITY, "E_SCHEME", "\"e.w\""},
    {"coarser scales", coarser_scales, MM_INTEGRITY, "E_SCHEME", "\"e.w\""},
    {"a grid that does not divide", other_grid, MM_INTEGRITY, "E_SCHEME", "\"e.w\""},
    {"cells beyond their grid", grid_within, MM_INTEGRITY, "E_SCHEME", "\"e.w\": found a grid of [64, 64] over cells of [128, 64]"},
    {"a grid of codes", grid_of_codes, MM_INTEGRITY, "E_SCHEME", "\"e.w\": found a grid of [1, 1] over cells of [1, 1]"},
    {"one code to a byte of two", more_codes, MM_INTEGRITY, "E_SCHEME", "\"e.w\""},
    {"codes for two", fewer_codes, MM_INTEGRITY, "E_SCHEME", "\"e.w\""},
};

TEST(broken_promises) {
  for (size_t i = 0; i < sizeof variations / sizeof *variations; i++) {
    checkpoint c;
    mm_shards s;
    mm_err err = {0};
    begin(&c);
    variations[i].edit(&c);
    write_checkpoint(&c);
    if (mm_shards_open(&s, c.dir, &err)) fail_msg("%s: not refused", variations[i].name);
    if (err.status != variations[i].status || strcmp(err.code, variations[i].code) != 0 || !strstr(err.text, variations[i].says))
      fail_msg("%s: found %d %s", variations[i].name, err.status, err.text);
    mm_shards_close(&s); /* of a half-opened one */
    finish(&c);
  }
}

/* One rank of a set: another's file may be absent, and is not looked at; a number that no rank has is refused. */
TEST(some_ranks) {
  checkpoint c;
  mm_shards s;
  mm_err err = {0};
  begin(&c);
  write_checkpoint(&c);
  char path[512];
  snprintf(path, sizeof path, "%s/model-rank-00001-part-00001.safetensors", c.dir);
  unlink(path);
  if (!mm_shards_open_ranks(&s, c.dir, (const uint32_t[]){0, 0}, 2, &err)) fail_msg("%s", err.text);
  assert_non_null(s.rank[0].plane);
  assert_null(s.rank[1].plane);
  assert_non_null(s.pack.rank[0].part[0].block); /* verify's, of the ranks that are open */
  assert_null(s.pack.rank[1].part[0].block);
  mm_shards_close(&s);
  const uint32_t absent = 1, none = mm_pack_ranks(&c.pack);
  assert_false(mm_shards_open_ranks(&s, c.dir, &absent, 1, &err));
  assert_int_equal(err.status, MM_INTEGRITY);
  mm_shards_close(&s);
  err = (mm_err){0};
  assert_false(mm_shards_open_ranks(&s, c.dir, &none, 1, &err));
  assert_int_equal(err.status, MM_USAGE);
  assert_string_equal(err.code, "E_RANKS");
  mm_shards_close(&s);
  finish(&c);
}

/* The manifest's tensors lie in their parts in whatever order. */
TEST(parts_back_and_forth) {
  checkpoint c;
  mm_shards s;
  mm_err err = {0};
  begin(&c);
  const mm_pack_tensor first = c.tensor[0];
  c.tensor[0] = c.tensor[2];
  c.tensor[2] = first;
  write_checkpoint(&c);
  if (!mm_shards_open(&s, c.dir, &err)) fail_msg("%s", err.text);
  assert_int_equal(s.rank[1].plane[0].part, 1);
  assert_int_equal(s.rank[1].plane[MM_PACK_PLANES].part, 0);
  assert_int_equal(s.rank[1].plane[MM_PACK_PLANES + 1].part, 1);
  assert_int_equal(s.rank[1].plane[2 * MM_PACK_PLANES].part, 0);
  mm_shards_close(&s);
  finish(&c);
}

/* Every length of a part but its own, and every other kind of file under its name. */
TEST(every_length) {
  checkpoint c;
  mm_shards s;
  begin(&c);
  write_checkpoint(&c);
  char path[512];
  snprintf(path, sizeof path, "%s/model-rank-00001-part-00001.safetensors", c.dir);
  struct stat st;
  assert_int_equal(stat(path, &st), 0);
  for (off_t n = st.st_size - 1; n >= 0; n -= n > 4000 && n < 4090 ? 1 : n % 97 + 1) {
    mm_err err = {0};
    assert_int_equal(truncate(path, n), 0);
    assert_false(mm_shards_open(&s, c.dir, &err));
    assert_int_equal(err.status, MM_INTEGRITY);
    mm_shards_close(&s);
  }
  unlink(path);
  assert_int_equal(mkfifo(path, 0600), 0);
  mm_err err = {0};
  assert_false(mm_shards_open(&s, c.dir, &err));
  assert_int_equal(err.status, MM_INTEGRITY);
  assert_string_equal(err.code, "E_FS_TYPE");
  mm_shards_close(&s);
  finish(&c);
}

int main(void) { return run_unit_tests(NULL, NULL); }
