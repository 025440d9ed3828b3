/* Blocks to Zstandard frames and back, with elements split into byte planes. */
#include "formats/frame.h"

#include <stdlib.h>
#include <string.h>
#include <zstd.h>

enum {
  WINDOW_LOG = 22,   /* of MM_FRAME_MAX: then the frame header needs no window of its own */
  FEW_HASHES_LOG = 6 /* zstd's least: 64 places to look for a repetition */
};

struct mm_frame {
  ZSTD_CCtx *c; /* made when first needed */
  ZSTD_DCtx *d;
  uint8_t planes[MM_FRAME_MAX];
};

mm_frame *mm_frame_open(mm_err *err) { return mm_calloc(1, sizeof(mm_frame), err); }

void mm_frame_close(mm_frame *f) {
  if (!f) return;
  ZSTD_freeCCtx(f->c);
  ZSTD_freeDCtx(f->d);
  free(f);
}

/* zstd's contexts with a window of 4 MiB: 0.5 MiB at level 1 as below, at most 64.5 MiB (level 15) beyond. */
size_t mm_frame_memory(int level) { return sizeof(mm_frame) + ((size_t)(level == 1 ? 1 : 65) << 20); }

size_t mm_frame_bound(size_t n) { return ZSTD_compressBound(n); }

/* Byte planes of `count` elements, one function a width so that the compiler makes vectors of the loops. */
static void split2(const uint8_t *in, size_t count, uint8_t *out) {
  for (size_t i = 0; i < count; i++) {
    uint16_t v;
    memcpy(&v, in + 2 * i, sizeof v);
    out[i] = (uint8_t)v;
    out[count + i] = (uint8_t)(v >> 8);
  }
}

static void split4(const uint8_t *in, size_t count, uint8_t *out) {
  for (size_t i = 0; i < count; i++) {
    uint32_t v;
    memcpy(&v, in + 4 * i, sizeof v);
    out[i] = (uint8_t)v;
    out[count + i] = (uint8_t)(v >> 8);
    out[2 * count + i] = (uint8_t)(v >> 16);
    out[3 * count + i] = (uint8_t)(v >> 24);
  }
}

static void join2(const uint8_t *in, size_t count, uint8_t *out) {
  for (size_t i = 0; i < count; i++) {
    uint16_t v = (uint16_t)(in[i] | in[count + i] << 8);
    memcpy(out + 2 * i, &v, sizeof v);
  }
}

static void join4(const uint8_t *in, size_t count, uint8_t *out) {
  for (size_t i = 0; i < count; i++) {
    uint32_t v = in[i] | (uint32_t)in[count + i] << 8 | (uint32_t)in[2 * count + i] << 16 | (uint32_t)in[3 * count + i] << 24;
    memcpy(out + 4 * i, &v, sizeof v);
  }
}

static void split(const uint8_t *in, size_t n, unsigned stride, uint8_t *out) {
  (stride == 2 ? split2 : split4)(in, n / stride, out);
  memcpy(out + n - n % stride, in + n - n % stride, n % stride);
}

static void join(const uint8_t *in, size_t n, unsigned stride, uint8_t *out) {
  (stride == 2 ? join2 : join4)(in, n / stride, out);
  memcpy(out + n - n % stride, in + n - n % stride, n % stride);
}

bool mm_frame_pack(mm_frame *f, const void *block, size_t n, unsigned stride, int level, void *out, size_t *packed, mm_err *err) {
  if (!f->c && !(f->c = ZSTD_createCCtx())) return mm_fail_memory(err, 0);
  if (stride > 1) {
    split(block, n, stride, f->planes);
    block = f->planes;
  }
  size_t r = ZSTD_CCtx_setParameter(f->c, ZSTD_c_compressionLevel, level);
  if (!ZSTD_isError(r)) r = ZSTD_CCtx_setParameter(f->c, ZSTD_c_windowLog, WINDOW_LOG);
  if (!ZSTD_isError(r)) r = ZSTD_CCtx_setParameter(f->c, ZSTD_c_hashLog, level == 1 ? FEW_HASHES_LOG : 0);
  if (!ZSTD_isError(r)) r = ZSTD_CCtx_setParameter(f->c, ZSTD_c_checksumFlag, 1);
  if (!ZSTD_isError(r)) r = ZSTD_compress2(f->c, out, mm_frame_bound(n), block, n);
  if (ZSTD_isError(r)) return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "zstd: %s", ZSTD_getErrorName(r));
  *packed = r;
  return true;
}

/* The only header that pack writes: magic number, then a descriptor whose low six bits (RFC 8878, 3.1.1.1.1) say single segment (window =
 * content), checksum, no dictionary. The top two bits are the width of the content size. */
static bool header_ok(const uint8_t *frame, size_t packed) {
  static const uint8_t magic[4] = {0x28, 0xB5, 0x2F, 0xFD};
  return packed > 5 && memcmp(frame, magic, sizeof magic) == 0 && (frame[4] & 0x3F) == 0x24;
}

bool mm_frame_unpack(mm_frame *f, const void *frame, size_t packed, unsigned stride, void *block, size_t n, mm_where where, mm_err *err) {
  if (!f->d && !(f->d = ZSTD_createDCtx())) return mm_fail_memory(err, 0);
  if (!header_ok(frame, packed))
    return mm_fail(err, MM_INTEGRITY, "E_FRAME", where,
                   "found other bytes, expected a zstd frame with its size and checksum and without a dictionary");
  unsigned long long claimed = ZSTD_getFrameContentSize(frame, packed);
  if (claimed != n) return mm_fail(err, MM_INTEGRITY, "E_FRAME", where, "found a frame of %llu bytes, expected %zu", claimed, n);
  size_t length = ZSTD_findFrameCompressedSize(frame, packed);
  if (!ZSTD_isError(length) && length != packed)
    return mm_fail(err, MM_INTEGRITY, "E_FRAME", where, "found a frame that ends after %zu bytes, expected %zu", length, packed);
  size_t got = ZSTD_isError(length) ? length : ZSTD_decompressDCtx(f->d, stride > 1 ? f->planes : block, n, frame, packed);
  if (ZSTD_isError(got))
    return mm_fail(err, MM_INTEGRITY, "E_FRAME", where, "found a frame that zstd does not decode (%s), expected %zu bytes",
                   ZSTD_getErrorName(got), n);
  if (got != n) return mm_fail(err, MM_INTEGRITY, "E_FRAME", where, "found %zu bytes, expected %zu", got, n);
  if (stride > 1) join(f->planes, n, stride, block);
  return true;
}
