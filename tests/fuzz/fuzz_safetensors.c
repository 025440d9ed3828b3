/* libFuzzer target: any bytes as a safetensors header. An accepted header must hold what readers rely on. Seeds: any
 * safetensors header, prefix included. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* A finding: unlike refusing, this must stop the fuzzer. */
static void must(bool holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "broken: %s\n", what);
  abort();
}

/* Tensors sorted by name, each of the size of its shape, inside the file, together all of its data; each can be found. */
static void check_accepted(const mm_st *st, uint64_t file_size) {
  uint64_t sum = 0;
  must(st->data_start >= 10 && st->data_start <= file_size, "the data begins inside the file");
  for (size_t i = 0; i < st->count; i++) {
    const mm_st_tensor *t = &st->tensor[i];
    uint64_t bytes;
    must(i == 0 || strcmp(t[-1].name, t->name) < 0, "names ascend");
    must(t->dtype < MM_DTYPE_COUNT && t->shape.rank <= MM_MAX_RANK, "type and rank are known");
    must(mm_shape_bytes(&t->shape, t->dtype, &bytes) && bytes == t->bytes, "the range has the shape's size");
    must(t->offset >= st->data_start && t->offset <= file_size && t->bytes <= file_size - t->offset, "the range is inside the data");
    must(mm_st_find(st, t->name) == t, "the tensor is found");
    sum += t->bytes;
  }
  must(sum == file_size - st->data_start, "the ranges add up to the data");
  for (size_t i = 1; i < st->metadata_count; i++) must(strcmp(st->metadata[i - 1].key, st->metadata[i].key) < 0, "keys ascend");
}

/* A header that was read, written anew in file order, must be read as the same. */
static int by_offset(const void *a, const void *b) {
  const mm_st_tensor *x = a, *y = b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static void check_round_trip(mm_st *st, uint64_t file_size) {
  mm_err err = {0};
  size_t n;
  uint64_t data = file_size - st->data_start, old_start = st->data_start;
  mm_st_tensor *copy = mm_calloc(st->count, sizeof *copy, &err);
  must(copy, "memory");
  if (st->count) memcpy(copy, st->tensor, st->count * sizeof *copy);
  qsort(copy, st->count, sizeof *copy, by_offset);
  void *header = mm_st_header(copy, st->count, st->metadata, st->metadata_count, 64, &n, &err);
  mm_st again;
  must(header && mm_st_parse(&again, "again", header, n, n + data, MM_INTEGRITY, &err), err.text);
  must(again.count == st->count && again.metadata_count == st->metadata_count && again.data_start == n, "the counts survive");
  for (size_t i = 0; i < st->count; i++) {
    const mm_st_tensor *x = &st->tensor[i], *y = &again.tensor[i];
    must(strcmp(x->name, y->name) == 0 && x->dtype == y->dtype && mm_shape_equal(&x->shape, &y->shape), "the tensor survives");
    must(x->offset - old_start == y->offset - n && x->bytes == y->bytes, "its place survives");
  }
  mm_st_close(&again);
  free(header);
  free(copy);
}

static void parse(const uint8_t *data, size_t n, uint64_t file_size) {
  mm_st st;
  mm_err err = {0};
  if (mm_st_parse(&st, "fuzz", data, n, file_size, MM_BAD_INPUT, &err)) {
    must(err.status == MM_OK, "no error beside success");
    check_accepted(&st, file_size);
    check_round_trip(&st, file_size);
  } else {
    must(err.status != MM_OK && strncmp(err.text, err.code, strlen(err.code)) == 0, "a refusal says why");
    for (const char *c = err.text; *c; c++) must((uint8_t)*c >= 0x20 && *c != 0x7F, "the line is printable");
  }
  mm_st_close(&st);
}

/* The largest data_offsets number written plainly: the file size most likely to be accepted. */
static uint64_t largest_number(const uint8_t *data, size_t n) {
  uint64_t best = 0, v = 0;
  for (size_t i = 0; i < n; i++) {
    bool digit = data[i] >= '0' && data[i] <= '9';
    v = digit ? v * 10 + (uint64_t)(data[i] - '0') : 0;
    if (v > best && i + 1 < n && data[i + 1] == ']') best = v;
  }
  return best;
}

/* One way to look at the bytes for each input, by its length: as a file of this size or another, or as the JSON of one. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  if (n % 5 < 2) {
    parse(data, n, n + (n % 5) * 1000);
    return 0;
  }
  if (n % 5 == 2) {
    parse(data, n, n + (n >= 8 ? largest_number(data + 8, n - 8) : 0));
    return 0;
  }
  uint8_t *file = malloc(n + 8); /* the right prefix before them */
  uint64_t length = n;
  must(file, "memory");
  memcpy(file, &length, 8);
  if (n) memcpy(file + 8, data, n);
  parse(file, n + 8, n + 8 + (n % 5 == 3 ? largest_number(data, n) : 0));
  free(file);
  return 0;
}
