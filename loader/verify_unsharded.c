/* Compares the files of an unsharded checkpoint with their digests. */
#include "loader/verify_unsharded.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/safetensors.h"
#include "formats/system/file.h"
#include "formats/system/pool.h"
#include "loader/companions.h"
#include "loader/verify.h"

#define CARD "README.md"

static bool is_listed(const void *ctx, const char *name) {
  const mm_pack *p = ctx;
  if (strcmp(name, MM_DIGESTS) == 0 || strcmp(name, CARD) == 0 || mm_pack_find_file(p, name)) return true;
  for (size_t i = 0; i < p->rank->part_count; i++)
    if (strcmp(name, p->rank->part[i].file) == 0) return true;
  return false;
}

/* The metadata of a file is what a conversion writes: "format", which engines ask for, and the plan of all files. */
static bool check_metadata(const mm_pack *p, const mm_st *st, mm_err *err) {
  const mm_hex plan = mm_digest_hex(&p->plan);
  const char *const expected[][2] = {{"format", "pt"}, {"plan", plan.text}};
  for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
    const char *found = mm_st_meta_find(st, expected[i][0]);
    if (found && strcmp(found, expected[i][1]) == 0) continue;
    return mm_fail(err, MM_INTEGRITY, "E_PART", mm_at(st->path, NULL), "metadata \"%s\": found %s, expected %s", expected[i][0],
                   found ? MM_ESCAPED(128, found) : "nothing", expected[i][1]);
  }
  return true;
}

static bool check_header(const mm_pack *p, const mm_part *part, mm_err *err) {
  mm_err reason = {0};
  mm_st st = {0};
  const mm_path path = mm_path_of(p->dir, part->file);
  const bool ok = mm_st_open(&st, path.text, MM_INTEGRITY, &reason) && mm_size_is(path.text, st.id.size, part->size, &reason) &&
                  check_metadata(p, &st, &reason);
  mm_st_close(&st);
  return ok || mm_fail_damaged(err, &reason);
}

/* The model card may be absent, and may be edited, but is a file. */
static bool check_card(const mm_pack *p, mm_err *err) {
  const mm_path path = mm_path_of(p->dir, CARD);
  mm_file f = MM_FILE_NONE;
  mm_err reason = {0};
  if (faccessat(AT_FDCWD, path.text, F_OK, AT_SYMLINK_NOFOLLOW) != 0) return true;
  const bool ok = mm_file_open(&f, path.text, &reason);
  mm_file_close(&f);
  return ok || mm_fail_damaged(err, &reason);
}

bool mm_unsharded_listing(const mm_pack *p, mm_err *err) {
  for (size_t i = 0; i < p->rank->part_count; i++)
    if (!check_header(p, &p->rank->part[i], err)) return false;
  return mm_companion_sizes(p, err) && check_card(p, err) && mm_nothing_else(p->dir, is_listed, p, err);
}

typedef struct job {
  const mm_pack *p;
  mm_digest_block *block;
  uint8_t **buffer; /* [threads] of MM_HASH_BLOCK */
} job;

/* The tensors that bytes [from, end) of a file hold. */
static void tensors_in(const char *path, uint64_t from, uint64_t end, mm_name_list *out) {
  mm_st st = {0};
  bool ok = mm_st_open(&st, path, MM_INTEGRITY, MM_IGNORED);
  if (!ok || from < st.data_start) mm_name_list_add(out, "header");
  for (size_t i = 0; ok && i < st.count; i++) {
    const mm_st_tensor *t = &st.tensor[i];
    if (t->offset < end && t->offset + t->bytes > from) mm_name_list_add(out, t->name);
  }
  mm_st_close(&st);
}

static bool check_block(void *ctx, size_t item, unsigned worker, mm_err *err) {
  const job *j = ctx;
  const mm_digest_block *b = &j->block[item];
  const mm_part *part = &j->p->rank->part[b->part];
  const uint64_t at = b->index * MM_HASH_BLOCK;
  const size_t n = (size_t)mm_min(MM_HASH_BLOCK, part->size - at);
  mm_name_list names = {0};
  mm_file f = MM_FILE_NONE;
  const mm_path path = mm_path_of(j->p->dir, part->file);
  mm_pool_at(part->file);
  bool ok = mm_file_open(&f, path.text, err) && mm_file_read(&f, path.text, j->buffer[worker], n, at, err);
  mm_file_close(&f);
  if (!ok) return false;
  const mm_digest d = mm_sha256(j->buffer[worker], n);
  if (mm_digest_equal(&d, &part->block[b->index])) return true;
  tensors_in(path.text, at, at + n, &names);
  return mm_fail(err, MM_INTEGRITY, "E_DIGEST", mm_at_offset(path.text, NULL, at),
                 "found block %zu of %zu damaged, expected its digest in " MM_DIGESTS " (%zu bytes; it holds: %s)", b->index,
                 part->block_count, n, names.text);
}

bool mm_unsharded_blocks(const mm_pack *p, uint32_t count, uint64_t seed, unsigned threads, size_t *seen, mm_err *err) {
  for (size_t i = 0; i < p->file_count; i++) {
    char *text;
    bool same = mm_verify_companion(p, &p->file[i], &text, err);
    free(text);
    if (!same) return false;
  }
  *seen = mm_verify_choose(p, NULL, count, seed, NULL);
  job j = {.p = p, .block = mm_calloc(*seen + 1, sizeof *j.block, err), .buffer = mm_calloc(threads, sizeof *j.buffer, err)};
  bool ok = j.block && j.buffer;
  for (unsigned i = 0; ok && i < threads; i++) ok = (j.buffer[i] = mm_calloc(MM_HASH_BLOCK, 1, err));
  if (ok) mm_verify_choose(p, NULL, count, seed, j.block);
  ok = ok && mm_pool_run(threads, *seen, check_block, &j, err);
  for (unsigned i = 0; j.buffer && i < threads; i++) free(j.buffer[i]);
  free(j.buffer);
  free(j.block);
  return ok || mm_fail_damaged(err, err);
}
