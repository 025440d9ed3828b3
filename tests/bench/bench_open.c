/* Opening a packed rank for use: the manifest, the headers of the parts and the place of every tensor; no weight is read. Also the
 * ceiling: reading the manifest's bytes, from the page cache too, and their digest. bench_open DIR [RANK] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/pool.h"
#include "loader/shards.h"

#define TURNS 21

static int compare(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Seconds that the manifest's bytes take, read from the page cache into memory that was touched before, and their digest; 0: not read. */
static double reading(const char *dir, double *mib, double *digest) {
  char path[4096], *to = malloc(MM_MANIFEST_MAX);
  snprintf(path, sizeof path, "%s/" MM_MANIFEST, dir);
  double took[2][TURNS] = {{0}};
  size_t n = 0;
  for (int i = -1; to && i < TURNS; i++) {
    FILE *f = fopen(path, "rb");
    const double from = mm_now();
    n = f ? fread(to, 1, MM_MANIFEST_MAX, f) : 0;
    const double read = mm_now();
    const volatile mm_digest d = mm_sha256(to, n);
    (void)d;
    if (i >= 0) took[0][i] = read - from, took[1][i] = mm_now() - read;
    if (f) fclose(f);
  }
  free(to);
  for (int k = 0; k < 2; k++) qsort(took[k], TURNS, sizeof **took, compare);
  *mib = (double)n / (1 << 20);
  *digest = took[1][TURNS / 2];
  return took[0][TURNS / 2];
}

static long resident_kib(void) {
  char line[256];
  long kib = 0;
  FILE *f = fopen("/proc/self/status", "r");
  while (f && fgets(line, sizeof line, f))
    if (sscanf(line, "VmRSS: %ld", &kib) == 1) break;
  if (f) fclose(f);
  return kib;
}

int main(int argc, char **argv) {
  if (argc < 2 || argc > 3) return fprintf(stderr, "usage: bench_open DIR [RANK]\n"), 2;
  const uint32_t rank = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
  double took[TURNS], mib = 0, digest = 0;
  long before = resident_kib(), after = 0;
  size_t tensors = 0;
  uint64_t bytes = 0;
  for (int i = 0; i < TURNS; i++) {
    mm_shards s = {0};
    mm_err err = {0};
    const double from = mm_now();
    if (!mm_shards_open_ranks(&s, argv[1], &rank, 1, &err)) return fprintf(stderr, "bench_open: %s\n", err.text), (int)err.status;
    took[i] = mm_now() - from;
    if (i == 0) after = resident_kib();
    tensors = s.pack.tensor_count, bytes = 0;
    for (size_t j = 0; j < s.pack.rank[rank].part_count; j++) bytes += s.pack.rank[rank].part[j].size;
    mm_shards_close(&s);
  }
  qsort(took, TURNS, sizeof *took, compare);
  const double read = reading(argv[1], &mib, &digest);
  printf(
      "rank %u: %zu tensors, %.2f GB: opened in %.2f ms (median of %d; least %.2f), %.1f MiB resident; reading its manifest, %.1f MiB: "
      "%.2f ms, its SHA-256: %.2f ms\n",
      rank, tensors, (double)bytes / 1e9, took[TURNS / 2] * 1e3, TURNS, took[0] * 1e3, (double)(after - before) / 1024, mib, read * 1e3,
      digest * 1e3);
  return 0;
}
