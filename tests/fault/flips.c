/* flips DIR all | flips DIR random COUNT SEED: every bit (or COUNT random ones) of every file of a packed checkpoint is flipped in place,
 * one at a time, and the functions behind minimax-verify must find it and say where: the file; of a block also the number and a tensor
 * whose bytes hold the bit. Flips of headers and manifest must be found by --level header already. The last line is the figure. Exit status
 * 1: one was missed.
 *
 * Flips in tensor data are looked for through mappings opened once, which show what is written to the file: opening again reads only
 * headers, and those have not changed. */
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/safetensors.h"
#include "formats/system/pool.h"
#include "loader/companions.h"
#include "loader/verify.h"

typedef struct victim {
  char path[PATH_MAX];
  const char *name; /* its end */
  int fd;
  uint64_t size;
  bool part;
  uint32_t rank, index;
  uint64_t data_start; /* of a part */
} victim;

typedef struct flips {
  const char *dir;
  unsigned threads;
  mm_shards shards;
  victim file[64];
  size_t count;
  uint64_t tried, found, by_header;
} flips;

static void stop(const char *what, const char *reason) {
  fprintf(stderr, "flips: %s: %s\n", what, reason);
  exit(2);
}

static void add(flips *f, const char *name) {
  if (f->count == sizeof f->file / sizeof *f->file) stop(name, "too many files");
  victim *v = &f->file[f->count++];
  struct stat st;
  mm_err err = {0};
  snprintf(v->path, sizeof v->path, "%s/%s", f->dir, name);
  v->name = strrchr(v->path, '/') + 1;
  v->fd = open(v->path, O_RDWR | O_CLOEXEC);
  if (v->fd < 0 || fstat(v->fd, &st) != 0) stop(v->path, "cannot be opened for writing");
  v->size = (uint64_t)st.st_size;
  v->part = sscanf(name, "model-rank-%u-part-%u.safetensors", &v->rank, &v->index) == 2;
  mm_st header = {0};
  if (v->part && !mm_st_open(&header, v->path, MM_INTEGRITY, &err)) stop(v->path, err.text);
  v->data_start = header.data_start;
  mm_st_close(&header);
}

static int by_path(const void *a, const void *b) { return strcmp(((const victim *)a)->path, ((const victim *)b)->path); }

static void add_files(flips *f) {
  DIR *d = opendir(f->dir);
  if (!d) stop(f->dir, "cannot be listed");
  for (struct dirent *e; (e = readdir(d));)
    if (e->d_name[0] != '.') add(f, e->d_name);
  closedir(d);
  qsort(f->file, f->count, sizeof *f->file, by_path); /* the same bits for the same seed */
  for (size_t i = 0; i < f->count; i++) f->file[i].name = strrchr(f->file[i].path, '/') + 1;
}

/* The checks of --level header, and of --level full before it looks at numbers. */
static bool passes(const flips *f, bool full, mm_err *err) {
  mm_shards s;
  bool ok = mm_shards_open(&s, f->dir, err) &&
            (full ? mm_verify_files(&s.pack, err) && mm_verify_blocks(&s, f->threads, err) : mm_verify_listing(&s.pack, err));
  mm_shards_close(&s);
  return ok;
}

/* The message names a tensor with a plane over the byte. */
static bool names_tensor(const flips *f, const victim *v, uint64_t at, const char *text) {
  const mm_pack *p = &f->shards.pack;
  for (size_t i = 0; i < p->tensor_count; i++)
    for (unsigned k = 0; mm_pack_holds(p, &p->tensor[i], v->rank) && k < p->tensor[i].plane_count; k++) {
      const mm_shard_plane *x = &f->shards.rank[v->rank].plane[i * MM_PACK_PLANES + k];
      if (x->part == v->index && at >= x->offset && at < x->offset + x->bytes)
        return strstr(text, p->tensor[i].name) || strstr(text, " more)"); /* the list ends before all are named */
    }
  return false;
}

static bool found_and_named(flips *f, const victim *v, uint64_t at) {
  mm_err err = {0};
  char block[48];
  if (v->part && at >= v->data_start) {
    if (mm_verify_blocks(&f->shards, f->threads, &err)) return false;
    snprintf(block, sizeof block, "block %" PRIu64 " of ", at / MM_HASH_BLOCK);
    return strstr(err.text, v->name) && strstr(err.text, block) && names_tensor(f, v, at, err.text);
  }
  bool header = v->part || strcmp(v->name, MM_MANIFEST) == 0;
  if (passes(f, !header, &err)) return false;
  f->by_header += header;
  return strstr(err.text, v->name) || strstr(err.text, "tensor \""); /* a name that is gone from a header is not looked for in one file */
}

static void try_bit(flips *f, const victim *v, uint64_t bit) {
  uint8_t byte, flipped;
  off_t at = (off_t)(bit / 8);
  if (pread(v->fd, &byte, 1, at) != 1) stop(v->path, "cannot be read");
  flipped = (uint8_t)(byte ^ 1 << bit % 8);
  if (pwrite(v->fd, &flipped, 1, at) != 1) stop(v->path, "cannot be written");
  bool found = found_and_named(f, v, bit / 8);
  if (pwrite(v->fd, &byte, 1, at) != 1) stop(v->path, "cannot be written");
  f->tried++;
  f->found += found;
  if (!found) printf("missed: %s: byte %" PRIu64 ", bit %" PRIu64 "\n", v->name, bit / 8, bit % 8);
}

static void try_random(flips *f, uint64_t count, uint64_t seed) {
  uint64_t total = 0;
  for (size_t i = 0; i < f->count; i++) total += f->file[i].size * 8;
  if (total == 0) stop(f->dir, "holds no bytes");
  for (uint64_t n = 0; n < count; n++) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    uint64_t bit = (seed >> 16) % total;
    const victim *v = f->file;
    while (bit >= v->size * 8) bit -= v++->size * 8;
    try_bit(f, v, bit);
  }
}

int main(int argc, char **argv) {
  static flips f;
  mm_err err = {0};
  bool random = argc == 5 && strcmp(argv[2], "random") == 0;
  if (!random && !(argc == 3 && strcmp(argv[2], "all") == 0)) stop("usage", "flips DIR all | flips DIR random COUNT SEED");
  f.dir = argv[1];
  add_files(&f);
  if (!mm_shards_open(&f.shards, f.dir, &err)) stop(f.dir, err.text);
  for (size_t i = 0, bytes = 0; i < f.count; i++) f.threads = (bytes += f.file[i].size) > 1 << 20 ? mm_pool_cpus() : 1;
  if (!passes(&f, true, &err)) stop(f.dir, err.text);
  if (random) {
    try_random(&f, strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10));
  } else {
    for (size_t i = 0; i < f.count; i++)
      for (uint64_t bit = 0; bit < 8 * f.file[i].size; bit++) try_bit(&f, &f.file[i], bit);
  }
  if (!passes(&f, true, &err)) stop(f.dir, err.text);
  mm_shards_close(&f.shards);
  for (size_t i = 0; i < f.count; i++) close(f.file[i].fd);
  printf("%s: %" PRIu64 " of %" PRIu64 " flipped bits found and named (%" PRIu64 " of headers and manifest, by --level header)\n",
         random ? "random" : "all", f.found, f.tried, f.by_header);
  return f.found != f.tried;
}
