/* formats/safetensors: every hostile header is refused with its code and names file and tensor; every valid one is read
 * exactly; what is written is read back. The tables' row marks (A01 …) are those of the fault catalogue. */
#include "formats/safetensors.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/unit/formats/hostile_headers.h"
#include "tests/unit/unit.h"

/* A file's first bytes in a block of exactly that size, so that the sanitizer sees one byte too many. */
typedef struct blob {
  char *p;
  size_t n;
} blob;

static blob file_of(const char *json, size_t n) {
  blob b = {malloc(8 + n), 8 + n};
  uint64_t length = n;
  assert_non_null(b.p);
  for (size_t i = 0; i < 8; i++) b.p[i] = (char)(length >> 8 * i);
  memcpy(b.p + 8, json, n);
  return b;
}

static blob repeat(const char *before, const char *piece, size_t count, const char *after) {
  size_t a = strlen(before), m = strlen(piece), z = strlen(after);
  blob b = {malloc(a + count * m + z + 1), a + count * m + z};
  memcpy(b.p, before, a);
  for (size_t i = 0; i < count; i++) memcpy(b.p + a + i * m, piece, m);
  memcpy(b.p + a + count * m, after, z + 1);
  return b;
}

/* Parses and expects a refusal: code, a line that names the file and says `says`, nothing raw in it, nothing left open. */
static void refused(const char *row, const char *bytes, size_t n, uint64_t file_size, mm_status status, const char *code,
                    const char *says) {
  mm_st st;
  mm_err err = {0};
  char start[64];
  if (mm_st_parse(&st, "evil.safetensors", bytes, n, file_size, status, &err)) fail_msg("%s: accepted, expected %s %s", row, code, says);
  snprintf(start, sizeof start, "%s: evil.safetensors: ", code);
  if (err.status != status || strcmp(err.code, code) != 0 || strncmp(err.text, start, strlen(start)) != 0 || !strstr(err.text, says)) {
    fail_msg("%s: expected %s … %s, got %d %s", row, start, says, (int)err.status, err.text);
  }
  for (const char *c = err.text; *c; c++) assert_true((uint8_t)*c >= 0x20 && *c != 0x7F);
  assert_int_equal(!strstr(err.text, "big-endian"), strcmp(row, "A04") != 0); /* a guess made only where it holds */
  assert_true(st.count == 0 && !st.tensor && !st.path);
  mm_st_close(&st);
}

static void refused_json(const char *row, const char *json, size_t n, uint64_t data, const char *code, const char *says) {
  blob b = file_of(json, n);
  refused(row, b.p, b.n, b.n + data, MM_BAD_INPUT, code, says);
  refused(row, b.p, b.n, b.n + data, MM_INTEGRITY, code, says);
  free(b.p);
}
TEST(test_hostile_headers) {
  for (size_t i = 0; i < sizeof hostile / sizeof hostile[0]; i++) {
    refused_json(hostile[i].row, hostile[i].json, hostile[i].n, hostile[i].data, hostile[i].code, hostile[i].says);
  }
}

TEST(test_long_hostile_headers) {
  blob b = repeat("{\"w\":", "{\"a\":", 3000, "1");
  refused_json("A12", b.p, b.n, 0, "E_FIELD", TW);
  free(b.p);
  b = repeat("{\"w\":{\"shape\":", "[", 3000, "");
  refused_json("A12 arrays", b.p, b.n, 0, "E_SHAPE", TW "offset 23: shape: found \"[[[");
  free(b.p);
  b = repeat("{\"w\":{\"shape\":[1", ",1", 4999, "]}}");
  refused_json("A19 rank 5000", b.p, b.n, 0, "E_SHAPE", TW "offset 39: shape: expected at most 8");
  free(b.p);
  b = repeat("{\"", "n", 65536, "\":{}}");
  refused_json("A28 64 KB", b.p, b.n, 0, "E_NAME", "…\", which is longer than 4096 bytes, expected 1 to 4096 bytes of text");
  free(b.p);

  /* A24: a thousand tensors over the same bytes */
  char *json = malloc(1000 * 80), *end = json;
  for (int i = 0; i < 1000; i++)
    end += sprintf(end, "%s\"t%03d\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}", i ? "," : "{", i * 7 % 1000);
  end += sprintf(end, "}");
  refused_json("A24 1000", json, (size_t)(end - json), 8, "E_OVERLAP", "found its first byte at data byte 0, expected 8, where tensor \"t");
  free(json);
}

/* More entries than a reader's memory is bounded for. */
TEST(test_too_many_entries) {
  blob b = repeat("{\"__metadata__\":{\"\":\"\"", ",\"a\":\"\"", 1000000, "}}");
  refused_json("metadata", b.p, b.n, 0, "E_LIMIT", "more metadata entries");
  free(b.p);
  b = repeat("{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}",
             ",\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}", 1000000, "}");
  refused_json("tensors", b.p, b.n, 1, "E_LIMIT", "more tensors");
  free(b.p);
}

static const struct {
  const char *row, *bytes;
  size_t n;
  uint64_t file_size;
  const char *code, *says;
} wrong_files[] = {
    {"A02 by one", J("\3\0\0\0\0\0\0\0{}"), 10, "E_PREFIX", "offset 0: found header length 3, expected at most the 2 bytes that follow"},
    {"A02 by far", J("\0\0\0\1\0\0\0\0{}"), 10, "E_PREFIX", "found header length 16777216, expected at most the 2 bytes"},
    {"A03 2^64-1", J("\xff\xff\xff\xff\xff\xff\xff\xff{}"), 10, "E_PREFIX", "18446744073709551615, expected at most the 100,000,000 cap"},
    {"A03 2^64-8", J("\xf8\xff\xff\xff\xff\xff\xff\xff{}"), 10, "E_PREFIX", "18446744073709551608, expected at most the 100,000,000 cap"},
    {"A03 2^63", J("\0\0\0\0\0\0\0\x80{}"), 10, "E_PREFIX", "9223372036854775808, expected at most the 100,000,000 cap"},
    {"A03 over the cap", J("\x01\xe1\xf5\x05\0\0\0\0{}"), UINT64_MAX, "E_PREFIX", "100000001, expected at most the 100,000,000 cap"},
    {"A03 at the cap", J("\x00\xe1\xf5\x05\0\0\0\0{}"), 100000007, "E_PREFIX",
     "100000000, expected at most the 99999999 bytes that follow"},
    {"A04", J("\0\0\0\0\0\0\0\2{}"), 10, "E_PREFIX", "100,000,000 cap: it was written big-endian"},
    {"A03 2^57", J("\0\0\0\0\0\0\0\2[]"), 10, "E_PREFIX", "144115188075855872, expected at most the 100,000,000 cap"},
    {"length 0", J("\0\0\0\0\0\0\0\0{}"), 10, "E_PREFIX", "found header length 0, expected at least 2"},
    {"length 1", J("\1\0\0\0\0\0\0\0{}"), 10, "E_PREFIX", "found header length 1, expected at least 2"},
    {"A06 LFS", J("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"), 75, "E_NOT_ST",
     "Git LFS pointer, the tensors are not here: run `git lfs pull`"},
    {"A06 HTML", J("<!DOCTYPE html><html><head>"), 27, "E_NOT_ST", "an HTML or XML page"},
    {"A06 html", J("\n  <html lang=\"en\"><head>"), 25, "E_NOT_ST", "download the file again"},
    {"A06 XML", J("<?xml version=\"1.0\"?><Error>"), 28, "E_NOT_ST", "an HTML or XML page"},
    {"A06 GGUF", J("GGUF\3\0\0\0\1\0\0\0\0\0\0\0"), 16, "E_NOT_ST", "a GGUF file: give the original"},
    {"A06 ZIP", J("PK\3\4\0\0\x08\x08\0\0\0\0\0\0"), 14, "E_NOT_ST", "a ZIP archive or a PyTorch checkpoint"},
    {"A06 gzip", J("\x1f\x8b\x08\x08\x01\x02\x03\x04\x00\x03model"), 15, "E_NOT_ST", "a gzip archive"},
    {"A06 gzip, small length", J("\x1f\x8b\x08\0\0\0\0\0\0\3"), 99999999, "E_NOT_ST", "a gzip archive"},
    {"A06 zstd", J("\x28\xb5\x2f\xfd\x24\x00\x01\x00\x00"), 9, "E_NOT_ST", "a zstd archive"},
    {"A06 pickle", J("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20"), 10, "E_NOT_ST", "a Python pickle"},
    {"A06 pickle 4", J("\x80\x04\x95\x10\0\0\0\0\0\0\0"), 11, "E_NOT_ST", "a Python pickle"},
    {"B02 config", J("{\n  \"architectures\": ["), 22, "E_NOT_ST", "JSON text"},
    {"B02 index", J("{\"metadata\": {"), 14, "E_NOT_ST", "JSON text"},
    {"A07 short", J("\0\0\0\0\0\0\0\0"), 8, "E_NOT_ST", "zeros only, never written?"},
};

TEST(test_wrong_files) {
  for (size_t i = 0; i < sizeof wrong_files / sizeof wrong_files[0]; i++) {
    char *copy = malloc(wrong_files[i].n);
    memcpy(copy, wrong_files[i].bytes, wrong_files[i].n);
    refused(wrong_files[i].row, copy, wrong_files[i].n, wrong_files[i].file_size, MM_BAD_INPUT, wrong_files[i].code, wrong_files[i].says);
    free(copy);
  }
  char zeros[4096] = {0};
  refused("A07", zeros, sizeof zeros, sizeof zeros, MM_BAD_INPUT, "E_NOT_ST", "zeros only, never written?");
  for (size_t n = 0; n < 8; n++) {
    char says[32], *copy = malloc(n ? n : 1);
    memcpy(copy, "\2\0\0\0\0\0\0\0", n);
    snprintf(says, sizeof says, "found %zu bytes in all", n);
    refused("A01", copy, n, n, MM_BAD_INPUT, "E_PREFIX", says);
    free(copy);
  }
}

/* The caller holds less than the header: its fault, not the file's. */
TEST(test_short_buffer) {
  mm_st st;
  mm_err err = {0};
  assert_false(mm_st_parse(&st, "f", "\4\0\0\0\0\0\0\0{}", 10, 12, MM_BAD_INPUT, &err));
  assert_int_equal(err.status, MM_BUG);
}

/* Accepted files (A29, A31) */

static mm_st accepted(const char *json, size_t n, uint64_t data) {
  mm_st st;
  mm_err err = {0};
  blob b = file_of(json, n);
  if (!mm_st_parse(&st, "good.safetensors", b.p, b.n, b.n + data, MM_BAD_INPUT, &err)) fail_msg("%s: %s", json, err.text);
  free(b.p); /* nothing points into the caller's bytes */
  assert_string_equal(st.path, "good.safetensors");
  assert_true(st.data_start == 8 + n);
  return st;
}

static void has(const mm_st *st, const char *name, mm_dtype t, mm_shape shape, uint64_t relative, uint64_t bytes) {
  const mm_st_tensor *found = mm_st_find(st, name);
  if (!found) fail_msg("no %s", name);
  assert_string_equal(found->name, name);
  assert_int_equal(found->dtype, t);
  assert_true(mm_shape_equal(&found->shape, &shape));
  assert_true(found->offset == st->data_start + relative && found->bytes == bytes);
}

TEST(test_accepted) {
  mm_st st = accepted(J("{}"), 0);
  assert_true(st.count == 0 && st.metadata_count == 0);
  assert_null(mm_st_find(&st, "w"));
  mm_st_close(&st);

  st = accepted(J("{\"__metadata__\":{}}"), 0);
  assert_true(st.count == 0 && st.metadata_count == 0);
  mm_st_close(&st);

  static const char rich[] =
      "{\"__metadata__\":{\"format\":\"pt\",\"\":\"\",\"esc\\u0061ped\\n\":\"\\ud83d\\ude00\\\\\"},\n"
      "\"zero.dim\" : { \"shape\" : [ 3 , 0 ] , \"dtype\" : \"F32\" , \"data_offsets\" : [ 7 , 7 ] } ,"
      "\"scalar\":{\"data_offsets\":[3,7],\"dtype\":\"F32\",\"shape\":[]}," /* misaligned, too */
      "\"\\u0061 name é 😀\":{\"dtype\":\"U8\",\"shape\":[1,3],\"data_offsets\":[0,3]},"
      "\"../../etc/passwd\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[7,11]},"
      "\"Zero.early\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[3,3]}," /* before \"scalar\" by name, too */
      "\"zero.first\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
      "\"zero.last\":{\"dtype\":\"U8\",\"shape\":[0,4294967296,4294967296],\"data_offsets\":[11,11]}}      \n\t ";
  st = accepted(J(rich), 11);
  assert_true(st.count == 7 && st.metadata_count == 3);
  for (size_t i = 1; i < st.count; i++) assert_true(strcmp(st.tensor[i - 1].name, st.tensor[i].name) < 0);
  has(&st, "zero.dim", MM_F32, mm_shape2(3, 0), 7, 0);
  has(&st, "scalar", MM_F32, (mm_shape){0, {0}}, 3, 4);
  has(&st, "a name é 😀", MM_U8, mm_shape2(1, 3), 0, 3);
  has(&st, "../../etc/passwd", MM_BF16, mm_shape1(2), 7, 4);
  has(&st, "Zero.early", MM_U8, mm_shape1(0), 3, 0);
  has(&st, "zero.first", MM_U8, mm_shape1(0), 0, 0);
  has(&st, "zero.last", MM_U8, mm_shape3(0, UINT64_C(1) << 32, UINT64_C(1) << 32), 11, 0);
  assert_null(mm_st_find(&st, "scala"));
  assert_null(mm_st_find(&st, "__metadata__"));
  static const char *const pairs[] = {"", "", "escaped\n", "😀\\", "format", "pt"};
  for (size_t i = 0; i < 3; i++) {
    assert_string_equal(st.metadata[i].key, pairs[2 * i]);
    assert_string_equal(st.metadata[i].value, pairs[2 * i + 1]);
  }
  mm_st_close(&st);
  mm_st_close(&st);

  /* rank 8, reverse order in the file, the longest name */
  char longest[4097];
  memset(longest, 'n', 4096);
  longest[4096] = 0;
  blob b = repeat("{" T("b", "I16", "[1,2,1,2,1,1,1,3]", "[5,29]") "," T("a", "BOOL", "[5]", "[0,5]") ",\"", "n", 4096,
                  "\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[29,30]}}");
  st = accepted(b.p, b.n, 30);
  has(&st, "a", MM_BOOL, mm_shape1(5), 0, 5);
  has(&st, "b", MM_I16, (mm_shape){8, {1, 2, 1, 2, 1, 1, 1, 3}}, 5, 24);
  has(&st, longest, MM_I8, mm_shape1(1), 29, 1);
  mm_st_close(&st);
  free(b.p);
}

/* All types in one file, written by mm_st_header and read back; also exact text. */
TEST(test_round_trip_of_types) {
  mm_st_tensor t[MM_DTYPE_COUNT];
  char names[MM_DTYPE_COUNT][32];
  for (unsigned i = 0; i < MM_DTYPE_COUNT; i++) { /* names descend while the file ascends */
    snprintf(names[i], sizeof names[i], "t%02u", MM_DTYPE_COUNT - i);
    t[i] = (mm_st_tensor){.name = names[i], .dtype = (mm_dtype)i, .shape = mm_shape3(i + 1, 4, i % 3), .offset = 999, .bytes = 999};
  }
  static const uint64_t aligns[] = {1, 8, 64, 4096, 1000};
  for (size_t a = 0; a < 5; a++) {
    mm_err err = {0};
    size_t n = 0;
    char *header = mm_st_header(t, MM_DTYPE_COUNT, NULL, 0, aligns[a], &n, &err);
    assert_non_null(header);
    assert_int_equal(n % aligns[a], 0);
    uint64_t at = n;
    for (unsigned i = 0; i < MM_DTYPE_COUNT; i++) {
      uint64_t bytes = (uint64_t)(i + 1) * 4 * (i % 3) * mm_dtype_bits((mm_dtype)i) / 8;
      assert_true(t[i].offset == at && t[i].bytes == bytes);
      at += bytes;
    }
    mm_st st;
    assert_true(mm_st_parse(&st, "f", header, n, at, MM_INTEGRITY, &err));
    assert_true(st.count == MM_DTYPE_COUNT && st.data_start == n);
    for (unsigned i = 0; i < MM_DTYPE_COUNT; i++) has(&st, t[i].name, t[i].dtype, t[i].shape, t[i].offset - n, t[i].bytes);
    mm_st_close(&st);
    free(header);
  }
}

TEST(test_header_text) {
  mm_st_tensor t[] = {{.name = "b \"\\\n\x7fé", .dtype = MM_BF16, .shape = mm_shape2(2, 3)},
                      {.name = "a", .dtype = MM_F32, .shape = {0, {0}}}};
  const struct mm_st_meta metadata[] = {{"plan", "\tx"}, {"rank", "3"}};
  static const char expected[] =
      "{\"__metadata__\":{\"plan\":\"\\u0009x\",\"rank\":\"3\"},"
      "\"b \\\"\\\\\\u000a\x7fé\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
      "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[12,16]}}";
  mm_err err = {0};
  size_t n = 0;
  char *header = mm_st_header(t, 2, metadata, 2, 4096, &n, &err);
  assert_non_null(header);
  assert_int_equal(n, 4096);
  assert_memory_equal(header, "\xf8\x0f\0\0\0\0\0\0", 8);
  assert_memory_equal(header + 8, expected, sizeof expected - 1);
  for (size_t i = 8 + sizeof expected - 1; i < n; i++) assert_int_equal(header[i], ' ');
  assert_true(t[0].offset == 4096 && t[0].bytes == 12 && t[1].offset == 4108 && t[1].bytes == 4);
  free(header);

  header = mm_st_header(NULL, 0, NULL, 0, 1, &n, &err); /* nothing at all is still a file */
  assert_int_equal(n, 10);
  assert_memory_equal(header, "\2\0\0\0\0\0\0\0{}", 10);
  free(header);
  header = mm_st_header(NULL, 0, metadata, 1, 1, &n, &err);
  assert_memory_equal(header + 8, "{\"__metadata__\":{\"plan\":\"\\u0009x\"}}", n - 8);
  free(header);
}

TEST(test_unwritable_headers) {
  const mm_st_tensor bad[] = {
      {.name = "w\xff", .dtype = MM_U8, .shape = mm_shape1(1)},
      {.name = "w", .dtype = MM_F4, .shape = mm_shape1(3)},
      {.name = "w", .dtype = MM_F32, .shape = mm_shape2(UINT64_C(1) << 32, UINT64_C(1) << 32)},
  };
  static const char *const codes[] = {"E_NAME", "E_SHAPE", "E_SHAPE"};
  for (size_t i = 0; i < 3; i++) {
    mm_st_tensor t = bad[i];
    mm_err err = {0};
    size_t n;
    assert_null(mm_st_header(&t, 1, NULL, 0, 8, &n, &err));
    assert_int_equal(err.status, MM_BUG);
    assert_string_equal(err.code, codes[i]);
    assert_non_null(strstr(err.text, "tensor \"w"));
  }
  const struct mm_st_meta bad_metadata[] = {{"key\xff", "v"}, {"k", "value\xff"}};
  for (size_t i = 0; i < 2; i++) {
    mm_err err = {0};
    size_t n;
    assert_null(mm_st_header(NULL, 0, &bad_metadata[i], 1, 8, &n, &err));
    assert_string_equal(err.code, "E_NAME");
  }
  mm_st_tensor many[9]; /* each fits, the sum does not */
  for (size_t i = 0; i < 9; i++) many[i] = (mm_st_tensor){.name = "w", .dtype = MM_U8, .shape = mm_shape1((UINT64_C(1) << 61) - 1)};
  mm_err err = {0};
  size_t n;
  assert_null(mm_st_header(many, 9, NULL, 0, 8, &n, &err));
  assert_string_equal(err.code, "E_SHAPE");

  mm_st_tensor twice[] = {
      {.name = "w", .dtype = MM_U8, .shape = mm_shape1(1)}, {.name = "v", .dtype = MM_U8}, {.name = "w", .dtype = MM_BF16}};
  mm_err same = {0};
  assert_null(mm_st_header(twice, 3, NULL, 0, 8, &n, &same));
  assert_int_equal(same.status, MM_BUG);
  assert_string_equal(same.code, "E_NAME");
  assert_non_null(strstr(same.text, "tensor \"w\": found twice in one file"));

  blob value = repeat("", "v", 100000000, "");
  const struct mm_st_meta metadata = {"k", value.p};
  mm_err large = {0};
  assert_null(mm_st_header(NULL, 0, &metadata, 1, 8, &n, &large));
  assert_int_equal(large.status, MM_LIMIT);
  free(value.p);
}

/* 200,000 tensors in shuffled order of names and of ranges: half a second, and minutes if each were sought among all. */
TEST(test_many_tensors) {
  enum { MANY = 200000 };
  char *json = malloc(MANY * 96), *end = json;
  for (size_t i = 0; i < MANY; i++) {
    size_t name = i * 77773 % MANY, place = i * 99991 % MANY;
    end += sprintf(end, "%s\"layers.%06zu\":{\"dtype\":\"BF16\",\"shape\":[3,1],\"data_offsets\":[%zu,%zu]}", i ? "," : "{", name,
                   place * 6, place * 6 + 6);
  }
  end += sprintf(end, "}");
  clock_t before = clock();
  mm_st st = accepted(json, (size_t)(end - json), MANY * 6);
  assert_true(clock() - before < 30 * CLOCKS_PER_SEC); /* slow as valgrind is */
  assert_int_equal(st.count, MANY);
  for (size_t i = 0; i < MANY; i += 997) {
    char name[32];
    snprintf(name, sizeof name, "layers.%06zu", i * 77773 % MANY);
    has(&st, name, MM_BF16, mm_shape2(3, 1), i * 99991 % MANY * 6, 6);
  }
  mm_st_close(&st);
  free(json);
}

/* Files on disk */

static char dir[] = "/tmp/mm_test_safetensors_XXXXXX";

static const char *write_file(const char *name, const char *bytes, size_t n, uint64_t size) {
  static char path[128];
  snprintf(path, sizeof path, "%s/%s", dir, name);
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, bytes, n), n);
  assert_int_equal(ftruncate(fd, (off_t)size), 0);
  close(fd);
  return path;
}

static void open_refused(const char *path, const char *code, const char *says) {
  mm_st st;
  mm_err err = {0};
  alarm(10); /* a FIFO must not hang us */
  if (mm_st_open(&st, path, MM_BAD_INPUT, &err)) fail_msg("%s: accepted", path);
  alarm(0);
  if (strcmp(err.code, code) != 0 || !strstr(err.text, path) || !strstr(err.text, says)) fail_msg("%s", err.text);
  assert_int_equal(err.status, MM_BAD_INPUT);
  mm_st_close(&st);
}

TEST(test_open) {
  static const char json[] = "{" T("w", "F32", "[4]", "[0,16]") "}";
  blob b = file_of(J(json));
  const char *path = write_file("good", b.p, b.n, b.n + 16);
  struct stat s;
  mm_st st;
  mm_err err = {0};
  assert_true(mm_st_open(&st, path, MM_BAD_INPUT, &err));
  assert_int_equal(stat(path, &s), 0);
  assert_true(st.id.ino == s.st_ino && st.id.size == b.n + 16 && st.data_start == b.n);
  assert_string_equal(st.path, path);
  has(&st, "w", MM_F32, mm_shape1(4), 0, 16);
  mm_st_close(&st);

  /* A32: a sparse file of a terabyte: only the header is read, and it fits the size */
  static const char large[] = "{" T("w", "U8", "[1099511627776]", "[0,1099511627776]") "}";
  blob l = file_of(J(large));
  path = write_file("large", l.p, l.n, l.n + (UINT64_C(1) << 40));
  assert_true(mm_st_open(&st, path, MM_BAD_INPUT, &err));
  has(&st, "w", MM_U8, mm_shape1(UINT64_C(1) << 40), 0, UINT64_C(1) << 40);
  mm_st_close(&st);

  open_refused(write_file("short", b.p, b.n, b.n + 15), "E_TRUNCATED", "tensor \"w\"");
  open_refused(write_file("cut", b.p, b.n - 3, b.n - 3), "E_PREFIX", "an interrupted download?");
  open_refused(write_file("empty", "", 0, 0), "E_PREFIX", "found 0 bytes");
  open_refused(write_file("seven", b.p, 7, 7), "E_PREFIX", "found 7 bytes");
  open_refused(write_file("zeros", "", 0, 4096), "E_NOT_ST", "never written?");
  static const char lfs[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0f1e\nsize 99\n";
  open_refused(write_file("lfs", J(lfs), sizeof lfs - 1), "E_NOT_ST", "git lfs pull");
  open_refused(dir, "E_FS_TYPE", "a directory");
  char fifo[128];
  snprintf(fifo, sizeof fifo, "%s/fifo", dir);
  assert_int_equal(mkfifo(fifo, 0600), 0);
  open_refused(fifo, "E_FS_TYPE", "a FIFO");
  open_refused("/nonexistent/x.safetensors", "E_FS_MISSING", "no such file");
  free(b.p);
  free(l.p);
}

TEST(test_real_files) {
  static const struct {
    const char *path;
    size_t count;
    uint64_t data_start;
    const char *name;
    mm_dtype dtype;
    uint64_t rows, cols;
  } files[] = {
      {"tests/data/tiny-m1/model-00001-of-00002.safetensors", 59, 6944, "model.embed_tokens.weight", MM_BF16, 2048, 256},
      {"tests/data/tiny-m1/model-00002-of-00002.safetensors", 58, 6792, "lm_head.weight", MM_BF16, 2048, 256},
      {"tests/data/tiny-m2/model-00001-of-00002.safetensors", 126, 15056, "model.embed_tokens.weight", MM_BF16, 2048, 256},
      {"tests/data/tiny-m2/model-00002-of-00002.safetensors", 125, 14904, "lm_head.weight", MM_BF16, 2048, 256},
  };
  for (size_t i = 0; i < 4; i++) {
    mm_st st;
    mm_err err = {0};
    if (!mm_st_open(&st, files[i].path, MM_BAD_INPUT, &err)) fail_msg("%s", err.text);
    assert_int_equal(st.count, files[i].count);
    assert_true(st.data_start == files[i].data_start);
    const mm_st_tensor *t = mm_st_find(&st, files[i].name);
    assert_non_null(t);
    mm_shape shape = mm_shape2(files[i].rows, files[i].cols);
    assert_true(t->dtype == files[i].dtype && mm_shape_equal(&t->shape, &shape) && t->bytes == 2 * files[i].rows * files[i].cols);
    assert_int_equal(st.metadata_count, 1);
    assert_string_equal(st.metadata[0].key, "format");
    assert_string_equal(st.metadata[0].value, "pt");
    mm_st_close(&st);
  }
}

static int set_up(void **state) {
  (void)state;
  return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state) {
  (void)state;
  char command[64];
  snprintf(command, sizeof command, "rm -rf %s", dir);
  return system(command);
}

int main(void) { return run_unit_tests(set_up, tear_down); }
