/* The model and the parts' metadata of the packed checkpoints that tests of the loader write by hand. */
#ifndef MM_TESTS_SMALL_MODEL_H
#define MM_TESTS_SMALL_MODEL_H

#include "formats/pack.h"
#include "formats/safetensors.h"
#include "tests/unit/odd_model.h"
#include "tests/unit/unit.h"

static inline mm_model small_model(uint32_t hidden, uint32_t intermediate) {
  mm_model m = odd_model();
  m.hidden = hidden, m.intermediate = intermediate, m.layers = 1, m.attn[0] = MM_ATTN_FULL;
  return m;
}

/* A tensor [n, k] of one piece, cut from [n, whole]; behind it its planes and piece. */
#define SMALL_TENSOR(title, how, n, k, whole, planes, ...) \
  { .name = title, .scheme = how, .rows = n, .cols = k, .whole_cols = whole, .plane_count = planes, .piece_count = 1, __VA_ARGS__ }

/* Lays the tensors of a part out and gives the part's header; free() it. *size: of the whole part. */
static inline uint8_t *small_header(mm_st_tensor *t, size_t count, const char *version, const char *rank, const char *tp, const char *part,
                                    const char *plan, size_t *n, uint64_t *size) {
  const struct mm_st_meta meta[] = {
      {"format", MM_PACK_FORMAT}, {"version", version}, {"rank", rank}, {"tp", tp}, {"part", part}, {"plan", plan}};
  mm_err err = {0};
  uint8_t *header = mm_st_header(t, count, meta, 6, 4096, n, &err);
  if (!header) fail_msg("%s", err.text);
  *size = t[count - 1].offset + t[count - 1].bytes;
  return header;
}

#endif
