/* A packed checkpoint on disk for tests: one rank, two parts of three and two blocks, elements of 1, 2 and 4 bytes that look like weights.
 */
#ifndef MM_TESTS_CHECKPOINT_H
#define MM_TESTS_CHECKPOINT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/pack.h"
#include "formats/safetensors.h"
#include "tests/unit/loader/small_model.h"
#include "tests/unit/put_file.h"

/* "a.weight" bf16 [1024, 4500], "f.weight" block_fp8 [1100, 3900], "v.weight" f32 [700000]. */
static mm_pack_tensor checkpoint_tensor[3] = {
    SMALL_TENSOR("a.weight", "bf16", 1024, 4500, 4500, 1, .plane = {{"", MM_BF16, 1, 1, {0}}}, .piece = {{"a", 1024, 0, 1024, 0}}),
    SMALL_TENSOR("f.weight", "block_fp8", 1100, 3900, 3900, 2,
                 .plane = {{"", MM_F8_E4M3, 1, 1, {0}}, {"_scale_inv", MM_F32, 128, 128, {0}}}, .piece = {{"f", 1100, 0, 1100, 0}}),
    SMALL_TENSOR("v.weight", "f32", 700000, 1, 1, 1, .vector = true, .plane = {{"", MM_F32, 1, 1, {0}}},
                 .piece = {{"v", 700000, 0, 700000, 0}}),
};

/* Numbers of either sign between 2^-7 and 2^-3, their other bits random; scales and E4M3 codes positive and finite. */
static void checkpoint_values(uint8_t *p, size_t n, size_t width, uint64_t *seed) {
  for (size_t i = 0; i < n; i++) {
    *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    uint8_t any = (uint8_t)(*seed >> 56);
    p[i] = width == 1 ? (uint8_t)(0x20 + any % 40) : i % width == width - 1 ? (uint8_t)(0x3C + (any & 1)) : any;
  }
}

static void checkpoint_part(const char *dir, uint32_t index, mm_st_tensor *t, size_t count, mm_part *out, uint64_t *seed) {
  char number[8];
  const mm_digest plan = {{0x5a}};
  const mm_hex hex = mm_digest_hex(&plan);
  snprintf(number, sizeof number, "%u", index);
  size_t n;
  uint64_t size;
  uint8_t *header = small_header(t, count, "1", "0", "1", number, hex.text, &n, &size), *bytes = malloc(size);
  memcpy(bytes, header, n);
  for (size_t i = 0; i < count; i++) checkpoint_values(bytes + t[i].offset, t[i].bytes, mm_dtype_size(t[i].dtype), seed);
  char name[64];
  mm_part_name(name, 0, index);
  put_file_in(dir, name, bytes, size);
  *out = (mm_part){.file = strdup(name), .size = size, .block_count = mm_hash_blocks(size)};
  out->block = calloc(out->block_count, sizeof(mm_digest));
  for (size_t b = 0; b < out->block_count; b++)
    out->block[b] = mm_sha256(bytes + b * MM_HASH_BLOCK, mm_min(MM_HASH_BLOCK, size - b * MM_HASH_BLOCK));
  out->root = mm_hash_root(out->block, out->block_count);
  free(header), free(bytes);
}

/* Fills the existing directory `dir`. */
static void checkpoint_write(const char *dir) {
  static const char config[] = "{\"a\": 1}\n";
  mm_cut whole = {.axis = MM_AXIS_NONE};
  mm_part part[2];
  mm_rank_parts rank = {2, part};
  mm_pack_file companion = {"config.json", sizeof config - 1, {{0}}};
  mm_err err = {0};
  uint64_t seed = 1;
  mm_st_tensor first[] = {{.name = "a.weight", .dtype = MM_BF16, .shape = mm_shape2(1024, 4500)}};
  mm_st_tensor second[] = {{.name = "f.weight", .dtype = MM_F8_E4M3, .shape = mm_shape2(1100, 3900)},
                           {.name = "f.weight_scale_inv", .dtype = MM_F32, .shape = mm_shape2(9, 31)},
                           {.name = "v.weight", .dtype = MM_F32, .shape = mm_shape1(700000)}};
  checkpoint_part(dir, 0, first, 1, &part[0], &seed);
  checkpoint_part(dir, 1, second, 3, &part[1], &seed);
  put_file_in(dir, companion.name, config, sizeof config - 1);
  companion.sha256 = mm_sha256(config, sizeof config - 1);
  mm_pack pack = {.tool = "test",
                  .quant = "none",
                  .tp_align = MM_ALIGN_SPLIT,
                  .tp = 1,
                  .ep = 1,
                  .pp = 1,
                  .tensor_count = 3,
                  .tensor = checkpoint_tensor,
                  .cut_count = 1,
                  .cut = &whole,
                  .rank = &rank,
                  .file_count = 1,
                  .file = &companion,
                  .plan = {{0x5a}}};
  pack.model = small_model(8, 8);
  char *text = mm_pack_text(&pack, &err);
  if (!text) fail_msg("%s", err.text);
  put_file_in(dir, MM_MANIFEST, text, text ? strlen(text) : 0);
  free(text);
  for (unsigned i = 0; i < 2; i++) free((char *)(uintptr_t)part[i].file), free(part[i].block);
}

#endif
