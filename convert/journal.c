/* Reading and appending the journal. All numbers are little-endian on disk, as on every host this builds for. */
#include "convert/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/file.h"

static const char magic[8] = "MMJRNL2\n";

typedef struct mm_journal_header {
  char magic[8];
  uint8_t plan[32], source[32];
  uint64_t level;
} mm_journal_header;
_Static_assert(sizeof(mm_journal_header) == MM_JOURNAL_HEADER, "the header has no padding");

#define JOURNAL_MAX (UINT64_C(4) << 30)

/* Identity of every source file, so that a changed source is never continued with. */
static bool source_digest(const mm_plan *p, mm_digest *out, mm_err *err) {
  mm_sha256_state *s = mm_sha256_begin(err);
  bool ok = s != NULL;
  for (size_t i = 0; ok && i < p->hf->file_count; i++) {
    const mm_hf_file *f = &p->hf->file[i];
    ok = mm_sha256_add(s, f->name, strlen(f->name) + 1, err) && mm_sha256_add(s, &f->id.size, sizeof f->id.size, err) &&
         mm_sha256_add(s, &f->id.mtime_ns, sizeof f->id.mtime_ns, err);
  }
  if (!s) return false;
  return mm_sha256_end(s, ok ? out : NULL, err) && ok;
}

static bool make_header(const mm_plan *p, int level, mm_journal_header *h, mm_err *err) {
  mm_digest source;
  memcpy(h->magic, magic, sizeof magic);
  memcpy(h->plan, p->pack.plan.byte, sizeof h->plan);
  if (!source_digest(p, &source, err)) return false;
  memcpy(h->source, source.byte, sizeof h->source);
  h->level = (uint64_t)level;
  return true;
}

/* Two runs never write one journal; the kernel frees the lock when a run dies. */
static bool lock(const mm_journal *j, mm_err *err) {
  if (flock(j->fd, LOCK_EX | LOCK_NB) == 0 || mm_no_locks(errno)) return true; /* mm_staging_take has said so */
  if (errno != EWOULDBLOCK) return mm_fail_errno(err, mm_at(j->path, NULL), "lock", errno);
  return mm_fail(err, MM_LOCKED, "E_LOCKED", mm_at(j->path, NULL), "found another run writing this part of the output");
}

bool mm_journal_create(mm_journal *j, int parent, const char *name, const mm_plan *p, mm_err *err) {
  mm_journal_header h;
  *j = (mm_journal){.fd = -1, .level = j->level};
  j->path = mm_arena_strndup(&j->arena, name, strlen(name), err);
  if (!j->path || !make_header(p, j->level, &h, err)) return false;
  if (unlinkat(parent, name, 0) != 0 && errno != ENOENT) return mm_fail_errno(err, mm_at(name, NULL), "remove", errno);
  j->fd = mm_create_at(parent, ".", name, err);
  j->size = sizeof h;
  return j->fd >= 0 && lock(j, err) && mm_pwrite(j->fd, name, &h, sizeof h, 0, err) && mm_fsync(j->fd, name, false, err) &&
         mm_fsync(parent, ".", true, err);
}

/* A record's payload while it is read or written. */
typedef struct mm_cursor {
  uint8_t *p;
  size_t n, at, cap;
} mm_cursor;

static bool take(mm_cursor *c, void *out, size_t n) {
  if (c->n - c->at < n) return false;
  memcpy(out, c->p + c->at, n);
  c->at += n;
  return true;
}

static bool take_array(mm_journal *j, mm_cursor *c, void **out, uint32_t count, size_t size, mm_err *err) {
  if (count == 0) return true;
  if ((c->n - c->at) / size < count) return false;
  *out = mm_arena_alloc(&j->arena, count * size, err);
  return *out && take(c, *out, count * size);
}

static bool add(mm_cursor *c, const void *in, size_t n, mm_err *err) {
  if (n == 0) return true;
  if (!mm_grow((void **)&c->p, &c->cap, c->n + n, 1, err)) return false;
  memcpy(c->p + c->n, in, n);
  c->n += n;
  return true;
}

/* Payload: u32 blocks, u32 steps, the block entries, then per step {u32 step, u32 puts, u32 dead rows, puts, dead rows}. */
static bool read_payload(mm_journal *j, mm_cursor *c, mm_err *err) {
  uint32_t blocks, steps;
  if (!take(c, &blocks, 4) || !take(c, &steps, 4) || (c->n - c->at) / sizeof(mm_block_entry) < blocks) return false;
  if (!mm_grow((void **)&j->block, &j->block_cap, j->block_count + blocks, sizeof *j->block, err)) return false;
  if (blocks && !take(c, j->block + j->block_count, blocks * sizeof *j->block)) return false;
  j->block_count += blocks;
  for (uint32_t i = 0; i < steps; i++) {
    uint32_t head[3];
    mm_step_entry e = {0};
    if (!take(c, head, sizeof head) || !take_array(j, c, (void **)&e.put, head[1], sizeof *e.put, err) ||
        !take_array(j, c, (void **)&e.dead, head[2], sizeof *e.dead, err))
      return false;
    e.step = head[0];
    e.put_count = head[1];
    e.dead_count = head[2];
    if (!mm_grow((void **)&j->step, &j->step_cap, j->step_count + 1, sizeof e, err)) return false;
    j->step[j->step_count++] = e;
  }
  return c->at == c->n;
}

bool mm_journal_parse(mm_journal *j, const uint8_t *text, size_t n, uint64_t *end, mm_err *err) {
  size_t at = sizeof(mm_journal_header);
  while (n - at > 4) {
    uint32_t length;
    uint64_t check;
    mm_digest d;
    memcpy(&length, text + at, 4);
    if (length > n - at - 4 || n - at - 4 - length < 8) break;
    memcpy(&check, text + at + 4 + length, 8);
    if (!mm_sha256(text + at + 4, length, &d, err)) return false;
    mm_cursor c = {.p = (uint8_t *)(uintptr_t)(text + at + 4), .n = length};
    if (mm_digest_check(&d) != check || !read_payload(j, &c, err)) break;
    at += 12 + (size_t)length;
  }
  *end = at;
  return err->status == MM_OK;
}

/* Reads the journal open at fd into j; *end is the size that is good, 0 when it died before its header was written. */
static bool read_journal(mm_journal *j, int fd, const char *name, const mm_plan *p, uint64_t *end, mm_err *err) {
  mm_journal_header h;
  struct stat s;
  *end = 0;
  if (!make_header(p, j->level, &h, err)) return false;
  if (fstat(fd, &s) != 0) return mm_fail_errno(err, mm_at(name, NULL), "look at", errno);
  if (!S_ISREG(s.st_mode) || (uint64_t)s.st_size > JOURNAL_MAX)
    return mm_fail(err, MM_USAGE, "E_RESUME", mm_at(name, NULL), "found something that is not a journal; --restart discards it");
  size_t n = (size_t)s.st_size;
  if (n < sizeof h) return true;
  uint8_t *text = mm_calloc(n, 1, err);
  mm_file f = {.fd = fd, .size = n};
  bool ok = text && mm_file_read(&f, name, text, n, 0, err);
  if (ok && memcmp(text, &h, sizeof h) != 0) {
    bool ours = memcmp(text, magic, sizeof magic) == 0, plan = memcmp(text + offsetof(mm_journal_header, plan), h.plan, sizeof h.plan) == 0;
    bool source = memcmp(text + offsetof(mm_journal_header, source), h.source, sizeof h.source) == 0;
    ok = mm_fail(err, MM_USAGE, "E_RESUME", mm_at(name, NULL), "found %s; --restart discards it",
                 !ours             ? "something that is not a journal"
                 : plan && !source ? "a run whose source files have changed since"
                                   : "a run of another source, option or tool version");
  }
  ok = ok && mm_journal_parse(j, text, n, end, err);
  free(text);
  return ok;
}

bool mm_journal_resume(mm_journal *j, int parent, const char *name, const mm_plan *p, bool *absent, mm_err *err) {
  *j = (mm_journal){.fd = -1, .level = j->level};
  *absent = false;
  j->path = mm_arena_strndup(&j->arena, name, strlen(name), err);
  if (!j->path) return false;
  j->fd = openat(parent, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (j->fd < 0 && errno != ENOENT) return mm_fail_errno(err, mm_at(name, NULL), "open", errno);
  *absent = j->fd < 0;
  if (*absent || !lock(j, err) || !read_journal(j, j->fd, name, p, &j->size, err)) return false;
  *absent = j->size == 0;
  if (*absent) return false;
  return ftruncate(j->fd, (off_t)j->size) == 0 || mm_fail_errno(err, mm_at(name, NULL), "cut", errno);
}

bool mm_journal_merge(mm_journal *j, int parent, const char *name, const mm_plan *p, mm_err *err) {
  uint64_t end;
  int fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return mm_fail_errno(err, mm_at(name, NULL), "open", errno);
  bool ok = read_journal(j, fd, name, p, &end, err);
  close(fd);
  return ok;
}

bool mm_journal_append(mm_journal *j, const mm_plan *p, const mm_step_entry *steps, size_t step_count, const mm_done *done,
                       size_t done_count, mm_err *err) {
  uint32_t counts[2] = {(uint32_t)done_count, (uint32_t)step_count}, length = 0;
  mm_cursor c = {0};
  bool ok = add(&c, &length, 4, err) && add(&c, counts, sizeof counts, err);
  for (size_t i = 0; ok && i < done_count; i++) {
    mm_block_entry e;
    memset(&e, 0, sizeof e);
    e.at = done[i];
    e.digest = mm_plan_entry(p, done[i].part, done[i].rank)->block[done[i].block];
    ok = add(&c, &e, sizeof e, err);
  }
  for (size_t i = 0; ok && i < step_count; i++) {
    uint32_t head[3] = {steps[i].step, (uint32_t)steps[i].put_count, (uint32_t)steps[i].dead_count};
    ok = add(&c, head, sizeof head, err) && add(&c, steps[i].put, steps[i].put_count * sizeof *steps[i].put, err) &&
         add(&c, steps[i].dead, steps[i].dead_count * sizeof *steps[i].dead, err);
  }
  mm_digest d;
  length = (uint32_t)(c.n - 4);
  if (ok) memcpy(c.p, &length, 4);
  ok = ok && mm_sha256(c.p + 4, length, &d, err);
  uint64_t check = ok ? mm_digest_check(&d) : 0;
  ok = ok && add(&c, &check, 8, err) && mm_pwrite(j->fd, j->path, c.p, c.n, j->size, err) && mm_fsync(j->fd, j->path, false, err);
  if (ok) j->size += c.n;
  free(c.p);
  return ok;
}

void mm_journal_close(mm_journal *j) {
  if (j->fd >= 0) close(j->fd);
  free(j->step);
  free(j->block);
  mm_arena_close(&j->arena);
  *j = (mm_journal){.fd = -1, .level = j->level};
}
