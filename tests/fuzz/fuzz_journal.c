/* libFuzzer target: any bytes as the records of a journal. An accepted record lies inside the text, holds only memory that is there, and is
 * read as the same again when the text is cut where its last good record ends. */
#include <stdlib.h>
#include <string.h>

#include "convert/write/journal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds) {
  if (!holds) abort(); /* a finding */
}

/* The checks of all records made right, which no mutation finds by chance. */
static void write_digest(uint8_t *text, size_t n) {
  for (size_t at = 0; n - at > 12;) {
    uint32_t length;
    memcpy(&length, text + at, 4);
    if (length > n - at - 12) return;
    const mm_digest d = mm_sha256(text + at + 4, length);
    uint64_t check = mm_digest_check(&d);
    memcpy(text + at + 4 + length, &check, 8);
    at += 12 + (size_t)length;
  }
}

/* Looks at every byte of what was read. */
static uint64_t sum(const mm_journal *j) {
  uint64_t s = 0;
  for (size_t i = 0; i < j->block_count; i++) s += j->block[i].at.block + j->block[i].digest.byte[31];
  for (size_t i = 0; i < j->step_count; i++) {
    const mm_step_entry *e = &j->step[i];
    for (size_t k = 0; k < e->put_count; k++) s += e->put[k].offset + e->put[k].check;
  }
  return s;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  mm_journal j = {.fd = -1}, again = {.fd = -1};
  mm_err err = {0};
  uint64_t end, end_again;
  uint8_t *text = calloc(1, n ? n : 1); /* not one byte more */
  must(text);
  if (n) memcpy(text, data, n);
  write_digest(text, n);
  must(mm_journal_parse(&j, text, 0, n, &end, &err) && err.status == MM_OK);
  must(end <= n);
  must(mm_journal_parse(&again, text, 0, end, &end_again, &err) && end_again == end);
  if (end == n) must(again.block_count == j.block_count && again.step_count == j.step_count && sum(&again) == sum(&j));
  volatile uint64_t looked = sum(&j);
  (void)looked;
  mm_journal_close(&j);
  mm_journal_close(&again);
  free(text);
  return 0;
}
