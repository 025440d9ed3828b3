/* One block of a file as one Zstandard frame (RFC 8878), for archives. The frames are the plain ones: `zstd -d` reads a file of them. They
 * are also the strictest: the header says the size of the content, which is the window too, asks for a checksum and no dictionary; whatever
 * else a hostile archive holds is refused before it is decoded, so memory never depends on what the frame claims. */
#ifndef MM_FORMATS_FRAME_H
#define MM_FORMATS_FRAME_H

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_FRAME_MAX       (UINT64_C(4) << 20) /* bytes of content: a block of hash.h */
#define MM_FRAME_LEVEL_MAX 19

/* Packs or unpacks blocks one after the other, on one thread. */
typedef struct mm_frame mm_frame;
mm_frame *mm_frame_open(mm_err *err);
void mm_frame_close(mm_frame *f); /* accepts NULL */

/* Memory that packing at this level may need, block and frame aside. */
size_t mm_frame_memory(int level);

/* Room that a frame of n bytes may need. */
size_t mm_frame_bound(size_t n);

/* The block's elements are `stride` bytes wide (1, 2 or 4). Wider ones are first laid out as byte planes: byte 0 of every element, then
 * byte 1 of every element and so on, then the bytes beyond the last whole element. This order puts the exponents, which can be coded, next
 * to each other. Packs n bytes (1 … MM_FRAME_MAX) into out[mm_frame_bound(n)]; *packed is the frame's length. Level 1 codes each byte by
 * its frequency and hardly looks for repetitions, which weights do not have (ARCHIVE.md has the figures); higher levels are zstd's. */
MM_MUST_USE bool mm_frame_pack(mm_frame *f, const void *block, size_t n, unsigned stride, int level, void *out, size_t *packed,
                               mm_err *err);

/* The reverse: frame[packed] must be exactly one frame of exactly n bytes. MM_INTEGRITY E_FRAME at `where` otherwise. */
MM_MUST_USE bool mm_frame_unpack(mm_frame *f, const void *frame, size_t packed, unsigned stride, void *block, size_t n, mm_where where,
                                 mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
