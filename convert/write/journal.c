/* Reading and appending the journal. All numbers are little-endian on disk, as on every host this builds for. */
#include "convert/write/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "convert/plan/target_format.h"
#include "formats/system/file.h"

static const char magic[8] = MM_JOURNAL_HEAD "7\n";

/* Behind it: uint64_t[files], a check of each source file. */
typedef struct mm_journal_header {
  char magic[8];
  uint8_t plan[32];
  uint64_t ranks, source; /* checks */
  uint64_t quant, cut;    /* mm_recipe_code, cut_words: what another plan differs in */
  uint64_t decoding;      /* of what says how the source's words are read, and of the importance file's identity */
  uint8_t layout[32];
  uint64_t level, files;
} mm_journal_header;
_Static_assert(sizeof(mm_journal_header) == 128, "the header has no padding");

#define FOLLOWED    (UINT64_C(1) << 32) /* in the level */
#define DRAFT_AT    33                  /* and above, there: of the check of the draft */
#define JOURNAL_MAX (UINT64_C(4) << 30)

static size_t header_bytes(const mm_plan *p) { return sizeof(mm_journal_header) + p->hf->file_count * sizeof(uint64_t); }

static uint64_t check_of(mm_sha256_state *s) {
  const mm_digest d = mm_sha256_end(s);
  return mm_digest_check(&d);
}

/* Identity of a file that is read while weights are packed, so that a changed one is never continued with. No device number: that changes
 * with every mount. */
static void add_identity(mm_sha256_state *s, const mm_file_id *f) {
  const uint64_t id[] = {f->size, f->ino, (uint64_t)f->mtime_ns, (uint64_t)f->ctime_ns};
  mm_sha256_add(s, id, sizeof id);
}

/* Of a source that is followed, the record next to the journal has the identities. */
static uint64_t source_check(const mm_hf_file *f, bool followed) {
  mm_sha256_state s;
  mm_sha256_begin(&s);
  mm_sha256_add(&s, f->name, strlen(f->name) + 1);
  if (followed) return check_of(&s);
  add_identity(&s, &f->id);
  mm_sha256_add(&s, f->header.byte, sizeof f->header.byte);
  return check_of(&s);
}

enum { CUT_BITS = 12, CUT_MASK = (1 << CUT_BITS) - 1, ATTN_AT = 3 * CUT_BITS + 3 }; /* of each of tp, ep, pp, and attn_tp at ATTN_AT */
_Static_assert(MM_MAX_TP < 1 << CUT_BITS && MM_MAX_LAYERS < 1 << CUT_BITS, "a cut fits its bits");

/* tp, ep, pp, the alignment, the layout and attn_tp, from the lowest bits. */
static uint64_t cut_words(const mm_plan *p) {
  const mm_pack *k = &p->pack;
  return (uint64_t)k->tp | (uint64_t)k->ep << CUT_BITS | (uint64_t)k->pp << 2 * CUT_BITS | (uint64_t)k->tp_align << 3 * CUT_BITS |
         p->layout->code << (3 * CUT_BITS + 2) | (uint64_t)k->attn_tp << ATTN_AT;
}

/* As options; the journal's words may be anything. */
static const char *cut_text(uint64_t cut, char out[160]) {
  char attn[32] = "";
  const char *align = mm_align_word((mm_align)mm_min(cut >> 3 * CUT_BITS & 3, MM_ALIGN_ERROR));
  if (cut >> ATTN_AT & CUT_MASK) snprintf(attn, sizeof attn, " --attn-tp %u", (unsigned)(cut >> ATTN_AT & CUT_MASK));
  snprintf(out, 160, "--tp %u%s --ep %u --pp %u --tp-align %s --layout %s", (unsigned)(cut & CUT_MASK), attn,
           (unsigned)(cut >> CUT_BITS & CUT_MASK), (unsigned)(cut >> 2 * CUT_BITS & CUT_MASK), align,
           cut >> (3 * CUT_BITS + 2) & 1 ? "hf" : "packed");
  return out;
}

/* The checks of a plan's ingredients: sources, recipe, cuts. */
static void plan_checks(const mm_plan *p, mm_journal_header *h) {
  mm_sha256_state s;
  mm_sha256_begin(&s);
  for (size_t i = 0; i < p->pack.source_count; i++) {
    mm_sha256_add(&s, p->pack.source[i].name, strlen(p->pack.source[i].name) + 1);
    mm_sha256_add(&s, p->pack.source[i].sha256.byte, sizeof p->pack.source[i].sha256.byte);
  }
  h->source = check_of(&s);
  h->quant = mm_recipe_code(&p->recipe, mm_target_format_name(p->target_format));
  h->cut = cut_words(p);
}

/* The check of the source's quantization as declared, since the same words may mean other numbers; equality of all zero points is only
 * checked. An importance file stays mapped until the end: blocks that were packed with altered contents are not continued once the
 * contents are put back. */
static uint64_t decoding_check(const mm_quantization *q, const mm_importance *importance) {
  const char *method = q->method ? q->method : "";
  const uint32_t how[] = {q->block.n, q->block.k, q->whole, q->groups, q->zeros, q->order, q->gptq, q->zero_less};
  mm_sha256_state s;
  mm_sha256_begin(&s);
  mm_sha256_add(&s, method, strlen(method) + 1);
  mm_sha256_add(&s, how, sizeof how);
  mm_sha256_add(&s, q->inputs.of, sizeof q->inputs.of);
  mm_sha256_add(&s, q->group, q->groups * sizeof *q->group);
  if (importance) add_identity(&s, &importance->id);
  return check_of(&s);
}

/* Which ranks are made; and where everything lies: the header of every file that is made says what is in it. */
static void plan_digests(const mm_plan *p, mm_journal_header *h) {
  mm_sha256_state s;
  mm_sha256_begin(&s);
  for (uint32_t i = 0; i < p->part_count; i++)
    for (uint32_t r = 0; r < p->pack.tp; r++) {
      const mm_plan_file *f = &p->part[i].file[r];
      if (!mm_plan_wants(p, i, r)) continue;
      const char *name = mm_plan_entry(p, i, r)->file;
      mm_sha256_add(&s, name, strlen(name) + 1);
      mm_sha256_add(&s, &f->size, sizeof f->size);
      mm_sha256_add(&s, f->header, f->header_bytes);
    }
  const mm_digest layout = mm_sha256_end(&s), ranks = mm_sha256(p->wanted, mm_pack_ranks(&p->pack) * sizeof *p->wanted);
  h->ranks = mm_digest_check(&ranks);
  memcpy(h->layout, layout.byte, sizeof h->layout);
}

/* header_bytes(p) bytes; free() them. */
static mm_journal_header *make_header(const mm_plan *p, int level, mm_err *err) {
  mm_journal_header *h = mm_calloc(1, header_bytes(p), err);
  if (!h) return NULL;
  memcpy(h->magic, magic, sizeof magic);
  memcpy(h->plan, p->pack.plan.byte, sizeof h->plan);
  h->level = (uint64_t)level | (p->hf->follow ? FOLLOWED : 0) | mm_digest_check(&p->draft.digest) >> DRAFT_AT << DRAFT_AT;
  h->files = p->hf->file_count;
  h->decoding = decoding_check(&p->hf->quantization, p->importance);
  plan_checks(p, h);
  plan_digests(p, h);
  for (size_t i = 0; i < p->hf->file_count; i++) ((uint64_t *)(h + 1))[i] = source_check(&p->hf->file[i], p->hf->follow);
  return h;
}

static const char *level_text(uint64_t level, char out[32]) {
  level &= FOLLOWED - 1;
  snprintf(out, 32, level ? "with --compress zstd:%llu" : "without --compress", (unsigned long long)level);
  return out;
}

static bool refuse(mm_where at, const char *found, const char *expected, mm_err *err) {
  return mm_fail(err, MM_USAGE, "E_RESUME", at, "found %s, expected %s to continue; --restart discards it", found, expected);
}

/* Says in what the plan of the journal differs. */
static bool other_plan(const mm_journal_header *found, const mm_journal_header *h, mm_where at, mm_err *err) {
  char a[176] = "a run with ", b[160];
  char *const own = a + strlen(a);
  if (found->source != h->source || found->files != h->files) return refuse(at, "a run of another source", "the same", err);
  if (found->cut != h->cut) return cut_text(found->cut, own), refuse(at, a, cut_text(h->cut, b), err);
  if (mm_recipe_code_differ(found->quant, h->quant, own, b)) return refuse(at, a, b, err);
  if (found->decoding != h->decoding)
    return refuse(at, "a run with another quantization of the source or another --importance", "the same", err);
  return refuse(at, "a run with another --part-size or config.json, or of another version of this program", "the same", err);
}

/* Refuses a journal that was made for something else, and says for what. */
static bool same_header(const mm_journal_header *found, const mm_journal_header *h, const mm_plan *p, const char *name, mm_err *err) {
  const uint64_t *a = (const uint64_t *)(found + 1), *b = (const uint64_t *)(h + 1), differ = found->level ^ h->level;
  char a_text[48] = "a run ", b_text[48] = "one ";
  mm_where at = mm_at(name, NULL);
  if (memcmp(found->magic, h->magic, sizeof h->magic) != 0)
    return mm_fail(err, MM_USAGE, "E_RESUME", at, "found something that is not a journal of this version; --restart discards it");
  if (differ & FOLLOWED)
    return found->level & FOLLOWED ? refuse(at, "a run with --follow", "one without it", err)
                                   : refuse(at, "a run without --follow", "one with it", err);
  if (memcmp(found->plan, h->plan, sizeof h->plan) != 0 || found->files != h->files) return other_plan(found, h, at, err);
  if (found->ranks != h->ranks) return refuse(at, "a run with another --ranks", "the same", err);
  if (memcmp(found->layout, h->layout, sizeof h->layout) != 0) return refuse(at, "a run with another --part-size", "the same", err);
  if (differ & (FOLLOWED - 1))
    return level_text(found->level, a_text + strlen(a_text)), level_text(h->level, b_text + strlen(b_text)),
           refuse(at, a_text, b_text, err);
  if (differ >> DRAFT_AT) return refuse(at, "a run with another --draft or --draft-quant, or without a draft", "the same", err);
  if (found->decoding != h->decoding && p->importance)
    return refuse(mm_at(p->importance->path, NULL),
                  "this file changed, moved or copied since the interrupted run, or another quantization of the source", "the same", err);
  if (found->decoding != h->decoding)
    return refuse(mm_at(p->hf->config_path, NULL), "another quantization of the source since the interrupted run", "the same", err);
  for (size_t i = 0; i < h->files; i++)
    if (a[i] != b[i])
      return refuse(mm_at(p->hf->file[i].path, NULL),
                    "a source file changed, moved or copied since the interrupted run (size, times, inode or header)", "the same", err);
  return true;
}

/* Two runs never write one journal; the kernel frees the lock when a run dies. */
static bool lock(const mm_journal *j, mm_err *err) {
  if (flock(j->fd, LOCK_EX | LOCK_NB) == 0 || mm_no_locks(errno)) return true; /* mm_staging_take has said so */
  if (errno != EWOULDBLOCK) return mm_fail_errno(err, mm_at(j->path, NULL), "lock", errno);
  return mm_fail(err, MM_LOCKED, "E_LOCKED", mm_at(j->path, NULL), "found another run writing this part of the output");
}

bool mm_journal_head(mm_journal *j, int parent, const mm_plan *p, mm_err *err) {
  mm_journal_header *h = make_header(p, j->level, err);
  j->size = header_bytes(p);
  const bool ok =
      h && mm_pwrite(j->fd, j->path, h, j->size, 0, err) && mm_fsync(j->fd, j->path, false, err) && mm_fsync(parent, ".", true, err);
  free(h);
  return ok;
}

bool mm_journal_create(mm_journal *j, int parent, const char *name, const mm_plan *p, mm_err *err) {
  *j = (mm_journal){.fd = -1, .level = j->level};
  j->path = mm_arena_strndup(&j->arena, name, strlen(name), err);
  if (!j->path) return false;
  if (unlinkat(parent, name, 0) != 0 && errno != ENOENT) return mm_fail_errno(err, mm_at(name, NULL), "remove", errno);
  j->fd = mm_create_at(parent, ".", name, err);
  return j->fd >= 0 && lock(j, err) && (!p || mm_journal_head(j, parent, p, err));
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
  if (!MM_GROW(c->p, &c->cap, c->n + n, err)) return false;
  memcpy(c->p + c->n, in, n);
  c->n += n;
  return true;
}

/* Payload: u32 blocks, u32 steps, the block entries, then per step {u32 step, u32 puts, u64 zeroed, puts}. */
static bool read_payload(mm_journal *j, mm_cursor *c, mm_err *err) {
  uint32_t blocks, steps;
  if (!take(c, &blocks, 4) || !take(c, &steps, 4) || (c->n - c->at) / sizeof(mm_block_entry) < blocks) return false;
  if (!MM_GROW(j->block, &j->block_cap, j->block_count + blocks, err)) return false;
  if (blocks && !take(c, j->block + j->block_count, blocks * sizeof *j->block)) return false;
  j->block_count += blocks;
  for (uint32_t i = 0; i < steps; i++) {
    uint32_t head[2];
    mm_step_entry e = {0};
    if (!take(c, head, sizeof head) || !take(c, &e.zeroed, sizeof e.zeroed) ||
        !take_array(j, c, (void **)&e.put, head[1], sizeof *e.put, err))
      return false;
    e.step = head[0];
    e.put_count = head[1];
    if (!MM_GROW(j->step, &j->step_cap, j->step_count + 1, err)) return false;
    j->step[j->step_count++] = e;
  }
  return c->at == c->n;
}

bool mm_journal_parse(mm_journal *j, const uint8_t *text, size_t at, size_t n, uint64_t *end, mm_err *err) {
  while (n - at > 4) {
    uint32_t length;
    uint64_t check;
    memcpy(&length, text + at, 4);
    if (length > n - at - 4 || n - at - 4 - length < 8) break;
    memcpy(&check, text + at + 4 + length, 8);
    const mm_digest d = mm_sha256(text + at + 4, length);
    mm_cursor c = {.p = (uint8_t *)(uintptr_t)(text + at + 4), .n = length};
    if (mm_digest_check(&d) != check || !read_payload(j, &c, err)) break;
    at += 12 + (size_t)length;
  }
  *end = at;
  return err->status == MM_OK;
}

/* Size of the journal open at fd: a regular file of a size that journals have. */
static bool size_of(int fd, const char *name, size_t *n, mm_err *err) {
  struct stat s;
  if (fstat(fd, &s) != 0) return mm_fail_errno(err, mm_at(name, NULL), "look at", errno);
  if (!S_ISREG(s.st_mode) || (uint64_t)s.st_size > JOURNAL_MAX)
    return mm_fail(err, MM_USAGE, "E_RESUME", mm_at(name, NULL), "found something that is not a journal; --restart discards it");
  *n = (size_t)s.st_size;
  return true;
}

/* The header of the journal open at fd, which has n bytes, is the plan's. *whole: all of the header is there; otherwise the run that writes
 * it died before that, or has not come so far. */
static bool check_header(int fd, const char *name, const mm_plan *p, int level, size_t n, bool *whole, mm_err *err) {
  const size_t least = sizeof(mm_journal_header), all = header_bytes(p);
  mm_file f = {.fd = fd, .size = n};
  *whole = n >= all;
  if (n < least) return true;
  mm_journal_header *h = make_header(p, level, err), *found = h ? mm_calloc(1, all, err) : NULL;
  bool ok = found && mm_file_read(&f, name, found, mm_min(n, all), 0, err);
  if (ok && (*whole || found->files != h->files)) ok = same_header(found, h, p, name, err);
  free(found);
  free(h);
  return ok;
}

/* Reads the journal open at fd into j; *end is the size that is good, 0 when it died before its header was written. */
static bool read_journal(mm_journal *j, int fd, const char *name, const mm_plan *p, uint64_t *end, mm_err *err) {
  size_t n = 0;
  bool whole;
  *end = 0;
  if (!size_of(fd, name, &n, err) || !check_header(fd, name, p, j->level, n, &whole, err)) return false;
  if (!whole) return true;
  uint8_t *text = mm_calloc(n, 1, err);
  mm_file f = {.fd = fd, .size = n};
  bool ok = text && mm_file_read(&f, name, text, n, 0, err) && mm_journal_parse(j, text, header_bytes(p), n, end, err);
  free(text);
  return ok;
}

static int open_existing(int parent, const char *name, int how, mm_err *err) {
  int fd = openat(parent, name, how | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 && errno != ENOENT) mm_fail_errno(err, mm_at(name, NULL), "open", errno);
  return fd;
}

bool mm_journal_fits(int parent, const char *name, const mm_plan *p, int level, mm_err *err) {
  size_t n = 0;
  bool whole;
  int fd = open_existing(parent, name, O_RDONLY, err);
  if (fd < 0) return err->status == MM_OK; /* gone meanwhile */
  bool ok = size_of(fd, name, &n, err) && check_header(fd, name, p, level, n, &whole, err);
  close(fd);
  return ok;
}

bool mm_journal_resume(mm_journal *j, int parent, const char *name, const mm_plan *p, bool *absent, mm_err *err) {
  *j = (mm_journal){.fd = -1, .level = j->level};
  *absent = false;
  j->path = mm_arena_strndup(&j->arena, name, strlen(name), err);
  if (!j->path) return false;
  j->fd = open_existing(parent, name, O_RDWR, err);
  if (j->fd < 0 && err->status != MM_OK) return false;
  *absent = j->fd < 0;
  if (*absent || !lock(j, err) || !read_journal(j, j->fd, name, p, &j->size, err)) return false;
  *absent = j->size == 0;
  if (*absent) return false;
  return mm_ftruncate(j->fd, j->size) == 0 || mm_fail_errno(err, mm_at(name, NULL), "cut", errno);
}

bool mm_journal_merge(mm_journal *j, int parent, const char *name, const mm_plan *p, mm_err *err) {
  uint64_t end;
  int fd = open_existing(parent, name, O_RDONLY, err);
  if (fd < 0) return err->status == MM_OK; /* gone meanwhile */
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
    uint32_t head[2] = {steps[i].step, (uint32_t)steps[i].put_count};
    ok = add(&c, head, sizeof head, err) && add(&c, &steps[i].zeroed, sizeof steps[i].zeroed, err) &&
         add(&c, steps[i].put, steps[i].put_count * sizeof *steps[i].put, err);
  }
  length = (uint32_t)(c.n - 4);
  if (ok) memcpy(c.p, &length, 4);
  const mm_digest d = ok ? mm_sha256(c.p + 4, length) : (mm_digest){{0}};
  uint64_t check = mm_digest_check(&d);
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
