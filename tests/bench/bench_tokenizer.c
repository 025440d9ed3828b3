/* How long a tokenizer of the released size takes to open: tokenizer.json read and sorted, its image mapped and checked; next to them one
 * read of the image from the page cache. Of 200,064 tokens (large_tokenizer.h). bench_tokenizer FILE only writes that tokenizer.json. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/text/tokenizer.h"
#include "tests/bench/large_tokenizer.h"

enum { VOCAB = LARGE_VOCAB, REPEATS = 9 };

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *x) {
  qsort(x, REPEATS, sizeof *x, by_value);
  return 1e3 * x[REPEATS / 2];
}

int main(int argc, char **argv) {
  if (argc == 2) return !large_tokenizer_write(argv[1], "tests/data/tiny-m2/tokenizer.json");
  char dir[] = "/tmp/bench-tokenizer-XXXXXX", json[64], image[64];
  mm_err err = {0};
  const mm_digest source = {{1}};
  if (!mkdtemp(dir)) return 1;
  snprintf(json, sizeof json, "%s/tokenizer.json", dir);
  snprintf(image, sizeof image, "%s/tokenizer.bin", dir);
  double parse[REPEATS], map[REPEATS], read[REPEATS];
  uint8_t *bytes = NULL;
  size_t n = 0;
  bool ok = large_tokenizer_write(json, "tests/data/tiny-m2/tokenizer.json") && mm_tokenizer_bake(json, VOCAB, &source, &bytes, &n, &err);
  FILE *f = ok ? fopen(image, "wb") : NULL;
  ok = f && fwrite(bytes, 1, n, f) == n && fclose(f) == 0;
  for (int i = 0; ok && i < REPEATS; i++) {
    double t = mm_now();
    mm_tokenizer *a = mm_tokenizer_open(json, VOCAB, &err);
    parse[i] = mm_now() - t, t = mm_now();
    mm_tokenizer *b = mm_tokenizer_map(image, VOCAB, &source, &err);
    map[i] = mm_now() - t, t = mm_now();
    char *whole = mm_file_slurp(image, UINT64_MAX, &n, &err);
    read[i] = mm_now() - t;
    ok = a && b && whole;
    free(whole);
    mm_tokenizer_close(a);
    mm_tokenizer_close(b);
  }
  if (ok) {
    printf("tokenizer of %d tokens, medians of %d: tokenizer.json %.0f ms, tokenizer.bin (%.1f MB) %.1f ms, one read of it %.1f ms\n",
           VOCAB, REPEATS, median(parse), (double)n / 1e6, median(map), median(read));
  } else {
    fprintf(stderr, "bench_tokenizer: %s\n", err.text);
  }
  free(bytes);
  unlink(json);
  unlink(image);
  rmdir(dir);
  return !ok;
}
