/* The file behind the pool of pages (runtime/schedule/disk_store.h): with one thread copies end in the order in which they are made, reads
 * before writes, and blocks hold what places held, all parts of them. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/disk_store.h"
#include "tests/unit/unit.h"

enum { PLACES = 24, BLOCKS = 12, PARTS = 3 };
static const uint64_t part_bytes[PARTS] = {4096, 0, 777}; /* a rank may have none */

static mm_disk_store *open_store(mm_pool_part part[PARTS]) {
  mm_err err = {0};
  const char *dir = getenv("TMPDIR");
  for (uint32_t i = 0; i < PARTS; i++) {
    part[i] = (mm_pool_part){calloc(PLACES, part_bytes[i] + 1), part_bytes[i]};
    for (uint64_t k = 0; k < PLACES * part_bytes[i]; k++)
      part[i].memory[k] = (char)((k * k + 7 * k + i) * UINT64_C(0x9e3779b97f4a7c15) >> 56);
  }
  mm_disk_store *d = mm_disk_store_open(dir ? dir : "/tmp", BLOCKS, part, PARTS, &err);
  if (!d) fail_msg("%s", err.text);
  return d;
}

static void close_store(mm_disk_store *d, const mm_pool_part part[PARTS]) {
  mm_disk_store_close(d);
  for (uint32_t i = 0; i < PARTS; i++) free(part[i].memory);
}

/* Queues the moves, and waits until all have ended: end[count], in that order. */
static void run_moves(mm_disk_store *d, const mm_disk_move *move, uint32_t count, mm_disk_end *end) {
  mm_err err = {0};
  if (!mm_disk_store_move(d, move, count, &err)) fail_msg("%s", err.text);
  static mm_disk_end found[PLACES];
  uint32_t n = 0;
  while (n < count) {
    const uint32_t more = mm_disk_store_ended(d, MM_DISK_ANY, found, PLACES, &err);
    memcpy(end + n, found, more * sizeof *end);
    n += more;
  }
}

static bool is_move(const mm_disk_end *end, const mm_disk_move *m) {
  return end->ok && end->move.place == m->place && end->move.block == m->block && end->move.in == m->in;
}

TEST(test_order) {
  cpu_set_t before, one;
  mm_pool_part part[PARTS];
  CPU_ZERO(&one);
  assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
  for (size_t i = 0; i < CPU_SETSIZE && !CPU_COUNT(&one); i++)
    if (CPU_ISSET(i, &before)) CPU_SET(i, &one);
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0); /* as many threads as CPUs */
  mm_disk_store *d = open_store(part);
  assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
  mm_disk_end end[PLACES];
  mm_disk_move move[8];
  for (uint32_t i = 0; i < 8; i++) move[i] = (mm_disk_move){.place = i, .block = 7 - i};
  run_moves(d, move, 8, end);
  for (uint32_t i = 0; i < 8; i++) assert_true(is_move(&end[i], &move[i]));
  /* Two writes, then reads of places that the first ones had not: the reads first, both in the order that they came. */
  const mm_disk_move mixed[] = {{8, 8, false}, {9, 3, true}, {10, 9, false}, {11, 7, true}, {12, 5, true}, {13, 10, false}};
  const uint32_t order[] = {1, 3, 4, 0, 2, 5};
  run_moves(d, mixed, 6, end);
  for (uint32_t i = 0; i < 6; i++) {
    assert_true(is_move(&end[i], &mixed[order[i]]));
    if (!end[i].move.in) continue;
    for (uint32_t k = 0; k < PARTS; k++)
      assert_memory_equal(part[k].memory + end[i].move.place * part[k].bytes, part[k].memory + (7 - end[i].move.block) * part[k].bytes,
                          part[k].bytes);
  }
  close_store(d, part);
}

int main(void) { return run_unit_tests(NULL, NULL); }
