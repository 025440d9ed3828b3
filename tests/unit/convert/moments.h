/* Importance files made from scratch, byte by byte from the formats' descriptions. */
#ifndef MM_TESTS_MOMENTS_H
#define MM_TESTS_MOMENTS_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct bytes {
  uint8_t at[4096];
  size_t n;
} bytes;

static inline void put(bytes *b, const void *p, size_t n) {
  memcpy(b->at + b->n, p, n);
  b->n += n;
}
static inline void put_u32(bytes *b, uint32_t v) { put(b, &v, sizeof v); }
static inline void put_u64(bytes *b, uint64_t v) { put(b, &v, sizeof v); }
static inline void put_f32(bytes *b, float v) { put(b, &v, sizeof v); }
static inline void put_text(bytes *b, const char *s) {
  put_u64(b, strlen(s));
  put(b, s, strlen(s));
}
static inline void pad(bytes *b, size_t align) {
  while (b->n % align) b->at[b->n++] = 0;
}

/* Value j of matrix e of an entry, all different; and how many tokens it has. */
static inline float moment(unsigned e, unsigned j) { return 0.25f + 3.0f * (float)e + 0.5f * (float)(j * j % 17); }
static inline float tokens(unsigned e) { return e == 1 ? 31 : 32 + (float)e; }

/* Two dense matrices of 6 columns and a stack of 3 with 4: sums and counts, in no special order, other metadata between. */
static inline bytes gguf(void) {
  static const struct {
    const char *name;
    unsigned cols, matrices;
  } t[] = {{"blk.1.attn_q.weight", 6, 1}, {"blk.0.ffn_down_exps.weight", 4, 3}, {"output.weight", 6, 1}};
  bytes b = {.n = 0};
  put(&b, "GGUF", 4);
  put_u32(&b, 3);
  put_u64(&b, 6);
  put_u64(&b, 6);
  put_text(&b, "general.type"), put_u32(&b, 8), put_text(&b, "imatrix");
  put_text(&b, "general.alignment"), put_u32(&b, 4), put_u32(&b, 64);
  put_text(&b, "imatrix.datasets"), put_u32(&b, 9), put_u32(&b, 8), put_u64(&b, 2), put_text(&b, "one.txt"), put_text(&b, "");
  put_text(&b, "imatrix.chunk_count"), put_u32(&b, 4), put_u32(&b, 7);
  put_text(&b, "flags"), put_u32(&b, 9), put_u32(&b, 7), put_u64(&b, 3), put(&b, "\1\0\1", 3);
  put_text(&b, "real"), put_u32(&b, 12), put_u64(&b, 0);
  uint64_t at = 0;
  for (int i = 0; i < 3; i++)
    for (int sums = 0; sums < 2; sums++) {
      char name[64];
      snprintf(name, sizeof name, "%s.%s", t[i].name, sums ? "in_sum2" : "counts");
      put_text(&b, name), put_u32(&b, 2), put_u64(&b, sums ? t[i].cols : 1), put_u64(&b, t[i].matrices), put_u32(&b, 0), put_u64(&b, at);
      at += (t[i].matrices * (sums ? t[i].cols : 1) * 4 + 63) / 64 * 64;
    }
  for (int i = 0; i < 3; i++) {
    pad(&b, 64);
    for (unsigned e = 0; e < t[i].matrices; e++) put_f32(&b, t[i].matrices == 1 ? 100 : tokens(e));
    pad(&b, 64);
    for (unsigned e = 0; e < t[i].matrices; e++)
      for (unsigned j = 0; j < t[i].cols; j++) put_f32(&b, moment(e + (unsigned)i, j));
  }
  return b;
}

/* The same three without counts of tokens. */
static inline bytes dat(void) {
  bytes b = {.n = 0};
  put_u32(&b, 3);
  put_u32(&b, 19), put(&b, "blk.1.attn_q.weight", 19), put_u32(&b, 5), put_u32(&b, 6);
  for (unsigned j = 0; j < 6; j++) put_f32(&b, moment(0, j));
  put_u32(&b, 26), put(&b, "blk.0.ffn_down_exps.weight", 26), put_u32(&b, 5), put_u32(&b, 12);
  for (unsigned i = 0; i < 12; i++) put_f32(&b, i / 4 == 1 ? 0 : moment(1 + i / 4, i % 4)); /* an expert that no token reached */
  put_u32(&b, 13), put(&b, "output.weight", 13), put_u32(&b, 5), put_u32(&b, 6);
  for (unsigned j = 0; j < 6; j++) put_f32(&b, moment(2, j));
  put_u32(&b, 5), put_u32(&b, 7), put(&b, "one.txt", 7);
  return b;
}

/* Ours: a packed name, and a Hugging Face one of a single expert. */
static inline bytes collected(void) {
  static const char header[] =
      "{\"__metadata__\":{\"format\":\"minimax-calibration\"},"
      "\"model.layers.0.block_sparse_moe.experts.w2_weight.mean_square\":{\"dtype\":\"F32\",\"shape\":[3,4],\"data_offsets\":[0,48]},"
      "\"model.layers.0.block_sparse_moe.experts.w2_weight.amax\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[48,60]},"
      "\"model.layers.0.block_sparse_moe.experts.w2_weight.rows\":{\"dtype\":\"I64\",\"shape\":[3],\"data_offsets\":[60,84]},"
      "\"model.layers.1.self_attn.q_proj.weight.mean_square\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[84,108]},"
      "\"model.layers.1.self_attn.q_proj.weight.rows\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[108,116]}}";
  bytes b = {.n = 0};
  put_u64(&b, sizeof header - 1);
  put(&b, header, sizeof header - 1);
  for (unsigned i = 0; i < 12; i++) put_f32(&b, moment(1 + i / 4, i % 4));
  for (unsigned e = 0; e < 3; e++) put_f32(&b, 1);
  for (unsigned e = 0; e < 3; e++) put_u64(&b, (uint64_t)tokens(e));
  for (unsigned j = 0; j < 6; j++) put_f32(&b, moment(0, j));
  put_u64(&b, 100);
  return b;
}

#endif
