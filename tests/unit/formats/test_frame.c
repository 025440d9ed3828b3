/* Frames: every length, width and level comes back; other readers of zstd read them; and whatever a hostile file may hold instead is
 * refused. */
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "formats/frame.h"
#include "tests/unit/unit.h"

/* Bytes that differ everywhere; every other one (the exponents of 16-bit numbers) from a few values. */
static void fill(uint8_t *p, size_t n, uint64_t seed) {
  for (size_t i = 0; i < n; i++) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    p[i] = (uint8_t)(i % 2 ? 0x3C + (seed >> 60) % 3 : seed >> 56);
  }
}

static uint8_t *bytes(size_t n, uint64_t seed) {
  uint8_t *p = malloc(n + 1);
  assert_non_null(p);
  fill(p, n, seed);
  return p;
}

static size_t pack(mm_frame *f, const uint8_t *in, size_t n, unsigned stride, int level, uint8_t *out) {
  mm_err err = {0};
  size_t packed = 0;
  if (!mm_frame_pack(f, in, n, stride, level, out, &packed, &err)) fail_msg("%s", err.text);
  assert_true(packed <= mm_frame_bound(n));
  return packed;
}

TEST(round_trips) {
  static const size_t lengths[] = {1, 2, 3, 4, 5, 7, 255, 256, 1023, 65793, 131072, 1000003, MM_FRAME_MAX - 1, MM_FRAME_MAX};
  static const unsigned strides[] = {1, 2, 4};
  mm_err err = {0};
  mm_frame *f = mm_frame_open(&err);
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
    for (size_t s = 0; s < 3; s++)
      for (int level = 1; level <= (lengths[i] > 70000 ? 3 : MM_FRAME_LEVEL_MAX); level += 2) {
        size_t n = lengths[i];
        uint8_t *in = bytes(n, n + s), *out = malloc(mm_frame_bound(n)), *back = malloc(n);
        size_t packed = pack(f, in, n, strides[s], level, out);
        if (!mm_frame_unpack(f, out, packed, strides[s], back, n, mm_at("x", NULL), &err)) fail_msg("%zu bytes: %s", n, err.text);
        assert_memory_equal(in, back, n);
        free(in), free(out), free(back);
      }
  mm_frame_close(f);
}

/* The frame alone says what it holds: any decoder reads it, and finds the bytes of each plane side by side. */
TEST(planes) {
  enum { N = 4 * 5000 + 3 };
  mm_err err = {0};
  mm_frame *f = mm_frame_open(&err);
  uint8_t *in = bytes(N, 7), *out = malloc(mm_frame_bound(N)), *got = malloc(N);
  for (unsigned stride = 1; stride <= 4; stride *= 2) {
    size_t packed = pack(f, in, N, stride, 1, out), count = N / stride;
    assert_int_equal(ZSTD_decompress(got, N, out, packed), N);
    for (size_t i = 0; i < count * stride; i++) assert_int_equal(got[i % stride * count + i / stride], in[i]);
    for (size_t i = count * stride; i < N; i++) assert_int_equal(got[i], in[i]);
  }
  free(in), free(out), free(got);
  mm_frame_close(f);
}

/* The purpose of planes: exponents that lie together need less space. */
TEST(smaller) {
  enum { N = 1 << 20 };
  mm_err err = {0};
  mm_frame *f = mm_frame_open(&err);
  uint8_t *in = bytes(N, 3), *out = malloc(mm_frame_bound(N));
  size_t plain = pack(f, in, N, 1, 1, out), split = pack(f, in, N, 2, 1, out);
  assert_true(split * 10 < plain * 9 && split < N * 62 / 100); /* 8 bits and log2(3) of 16 */
  free(in), free(out);
  mm_frame_close(f);
}

static void refused(mm_frame *f, const void *frame, size_t packed, size_t n, const char *what) {
  uint8_t *back = malloc(n), *exact = malloc(packed ? packed : 1); /* exact: the sanitizer sees a byte read too many */
  mm_err err = {0};
  memcpy(exact, frame, packed);
  if (mm_frame_unpack(f, exact, packed, 1, back, n, mm_at_offset("part.zst", NULL, 77), &err)) fail_msg("%s: accepted", what);
  if (err.status != MM_INTEGRITY || strcmp(err.code, "E_FRAME") != 0 || !strstr(err.text, "part.zst: offset 77"))
    fail_msg("%s: %s", what, err.text);
  free(back), free(exact);
}

TEST(every_cut_and_bit) {
  enum { N = 3000 };
  mm_err err = {0};
  mm_frame *f = mm_frame_open(&err);
  uint8_t *in = bytes(N, 9), *out = malloc(mm_frame_bound(N) + 1);
  size_t packed = pack(f, in, N, 1, 1, out);
  for (size_t k = 0; k < packed; k++) refused(f, out, k, N, "a cut frame");
  uint8_t back[N];
  unsigned same = 0; /* a few bits of a frame mean nothing: then the content must be the same */
  for (size_t bit = 0; bit < 8 * packed; bit++) {
    mm_err e = {0};
    out[bit / 8] ^= (uint8_t)(1 << bit % 8);
    if (mm_frame_unpack(f, out, packed, 1, back, N, mm_at("x", NULL), &e)) {
      assert_memory_equal(in, back, N);
      same++;
    }
    out[bit / 8] ^= (uint8_t)(1 << bit % 8);
  }
  assert_in_range(same, 0, 16);
  out[packed] = 0;
  refused(f, out, packed + 1, N, "a byte behind the frame");
  assert_false(mm_frame_unpack(f, out, packed, 1, back, N - 1, mm_at("x", NULL), &err));
  assert_non_null(strstr(err.text, "found a frame of 3000 bytes, expected 2999"));
  refused(f, out, packed, N - 1, "a frame of one byte more");
  refused(f, out, packed, N + 1, "a frame of one byte less");
  free(in), free(out);
  mm_frame_close(f);
}

/* A frame as zstd's own calls make it, with one parameter changed. */
static size_t other_frame(void *out, size_t cap, const uint8_t *in, size_t n, ZSTD_cParameter p, int value, bool sized) {
  ZSTD_CCtx *c = ZSTD_createCCtx();
  ZSTD_inBuffer i = {in, n, 0};
  ZSTD_outBuffer o = {out, cap, 0};
  ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, 1);
  ZSTD_CCtx_setParameter(c, p, value);
  if (sized)
    ZSTD_CCtx_setPledgedSrcSize(c, n);
  else
    ZSTD_compressStream2(c, &o, &i, ZSTD_e_continue);
  assert_int_equal(ZSTD_compressStream2(c, &o, &i, ZSTD_e_end), 0);
  ZSTD_freeCCtx(c);
  return o.pos;
}

TEST(hostile) {
  enum { N = 100000, CAP = 1 << 20, BOMB = 64 << 20 };
  mm_err err = {0};
  mm_frame *f = mm_frame_open(&err);
  uint8_t *in = bytes(N, 11), *out = malloc(CAP), *zeros = calloc(BOMB, 1);
  refused(f, out, other_frame(out, CAP, in, N, ZSTD_c_contentSizeFlag, 1, false), N, "no content size");
  refused(f, out, other_frame(out, CAP, in, N, ZSTD_c_contentSizeFlag, 0, true), N, "content size left out");
  refused(f, out, other_frame(out, CAP, in, N, ZSTD_c_checksumFlag, 0, true), N, "no checksum");
  refused(f, out, other_frame(out, CAP, in, N, ZSTD_c_windowLog, 10, true), N, "a window of its own");
  refused(f, out, other_frame(out, CAP, zeros, BOMB, ZSTD_c_compressionLevel, 1, true), N, "64 MiB of zeros");
  refused(f, out, other_frame(out, CAP, zeros, BOMB, ZSTD_c_windowLog, 27, false), N, "a window of 128 MiB");

  size_t a = pack(f, in, N / 2, 1, 1, out), b = pack(f, in + N / 2, N / 2, 1, 1, out + a);
  refused(f, out, a + b, N, "two frames");
  static const uint8_t skip[12] = {0x50, 0x2A, 0x4D, 0x18, 4, 0, 0, 0, 1, 2, 3, 4};
  memcpy(out, skip, sizeof skip);
  size_t k = pack(f, in, N, 1, 1, out + sizeof skip);
  refused(f, out, k + sizeof skip, N, "a skippable frame before");
  memcpy(out + sizeof skip + k, skip, sizeof skip);
  refused(f, out + sizeof skip, k + sizeof skip, N, "a skippable frame behind");
  refused(f, skip, sizeof skip, N, "a skippable frame alone");
  uint8_t *head = out + sizeof skip; /* with 4 bytes of content size: one of the dictionary's name goes between */
  memmove(head + 6, head + 5, k - 5);
  head[4] |= 1;
  head[5] = 9;
  refused(f, head, k + 1, N, "a dictionary");
  assert_false(ZSTD_isError(ZSTD_findFrameCompressedSize(head, k + 1)));
  static const uint8_t old[] = {0x27, 0xB5, 0x2F, 0xFD, 0x24, 0, 0, 0};
  refused(f, old, sizeof old, N, "a frame of zstd 0.7");
  refused(f, "", 0, N, "nothing");
  free(in), free(out), free(zeros);
  mm_frame_close(f);
  mm_frame_close(NULL);
}

int main(void) { return run_unit_tests(NULL, NULL); }
