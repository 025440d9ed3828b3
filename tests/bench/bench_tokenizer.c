/* How long a tokenizer of the released size takes to open: tokenizer.json read and sorted, its image mapped and checked; next to them one
 * read of the image from the page cache. 200,064 tokens: the bytes, then words of two to four letters, each a merge of a shorter one and a
 * letter. bench_tokenizer FILE only writes that tokenizer.json. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/system/file.h"
#include "runtime/text/tokenizer.h"

enum { VOCAB = 200064, WORDS = VOCAB - 256, REPEATS = 9 };
typedef char word[6];

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void fill_words(word *w) { /* w[26 + WORDS] */
  unsigned count = 26;
  for (unsigned i = 0; i < 26; i++) snprintf(w[i], sizeof *w, "%c", (char)('a' + i));
  for (unsigned i = 0; count < 26 + WORDS; i++)
    for (char c = 'a'; c <= 'z' && count < 26 + WORDS; c++) {
      memcpy(w[count], w[i], sizeof *w);
      w[count][strlen(w[i])] = c;
      count++;
    }
}

/* The small checkpoint's tokenizer.json with other tokens: what comes before its added tokens, and its settings between these and the
 * vocabulary. */
static bool write_json(const char *path, const char *like) {
  mm_err err = {0};
  size_t n;
  char *text = mm_file_slurp(like, UINT64_C(1) << 20, &n, &err);
  char *added = text ? strstr(text, "\"added_tokens\"") : NULL, *rest = added ? strstr(added, "\"normalizer\"") : NULL;
  char *vocab = rest ? strstr(rest, "\"vocab\"") : NULL;
  FILE *f = vocab ? fopen(path, "w") : NULL;
  word *w = calloc(26 + WORDS, sizeof *w);
  if (!f || !w) {
    if (f) fclose(f);
    free(w);
    free(text);
    return false;
  }
  fill_words(w);
  fprintf(f, "%.*s\"added_tokens\":[],%.*s\"vocab\":{", (int)(added - text), text, (int)(vocab - rest), rest);
  for (unsigned b = 0, other = 0x100; b < 256; b++) {
    const bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad);
    fprintf(f, "\"\\u%04x\":%u,", printable ? b : other, b);
    other += !printable;
  }
  for (unsigned i = 0; i < WORDS; i++) fprintf(f, "%s\"%s\":%u", i ? "," : "", w[26 + i], 256 + i);
  fprintf(f, "},\"merges\":[");
  for (unsigned i = 0; i < WORDS; i++) {
    const size_t last = strlen(w[26 + i]) - 1;
    fprintf(f, "%s\"%.*s %c\"", i ? "," : "", (int)last, w[26 + i], w[26 + i][last]);
  }
  fprintf(f, "]}}\n");
  free(w);
  free(text);
  return fclose(f) == 0;
}

static double median(double *x) {
  qsort(x, REPEATS, sizeof *x, by_value);
  return 1e3 * x[REPEATS / 2];
}

int main(int argc, char **argv) {
  if (argc == 2) return !write_json(argv[1], "tests/data/tiny-m2/tokenizer.json");
  char dir[] = "/tmp/bench-tokenizer-XXXXXX", json[64], image[64];
  mm_err err = {0};
  const mm_digest source = {{1}};
  if (!mkdtemp(dir)) return 1;
  snprintf(json, sizeof json, "%s/tokenizer.json", dir);
  snprintf(image, sizeof image, "%s/tokenizer.bin", dir);
  double parse[REPEATS], map[REPEATS], read[REPEATS];
  uint8_t *bytes = NULL;
  size_t n = 0;
  bool ok = write_json(json, "tests/data/tiny-m2/tokenizer.json") && mm_tokenizer_bake(json, VOCAB, &source, &bytes, &n, &err);
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
