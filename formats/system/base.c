/* Errors, allocation and arenas: the parts of base.h that are not one line. */
#include "formats/system/base.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define NAME_MAX_SHOWN 1000

size_t mm_utf8_len(const char *text, size_t n) {
  const uint8_t *s = (const uint8_t *)text;
  /* Lead byte, the range of the second byte (narrowed where a form would be overlong, a surrogate or too large), length:
   * Unicode Standard, table 3-7. */
  static const struct {
    uint8_t lead_lo, lead_hi, second_lo, second_hi, len;
  } form[] = {{0xC2, 0xDF, 0x80, 0xBF, 2}, {0xE0, 0xE0, 0xA0, 0xBF, 3}, {0xE1, 0xEC, 0x80, 0xBF, 3}, {0xED, 0xED, 0x80, 0x9F, 3},
              {0xEE, 0xEF, 0x80, 0xBF, 3}, {0xF0, 0xF0, 0x90, 0xBF, 4}, {0xF1, 0xF3, 0x80, 0xBF, 4}, {0xF4, 0xF4, 0x80, 0x8F, 4}};
  if (s[0] < 0x80) return 1;
  for (size_t f = 0; f < sizeof form / sizeof form[0]; f++) {
    if (s[0] < form[f].lead_lo || s[0] > form[f].lead_hi) continue;
    if (n < form[f].len || s[1] < form[f].second_lo || s[1] > form[f].second_hi) return 0;
    for (size_t i = 2; i < form[f].len; i++) {
      if ((s[i] & 0xC0) != 0x80) return 0;
    }
    return form[f].len;
  }
  return 0;
}

uint32_t mm_utf8_next(const char **p, const char *end) {
  const uint8_t *s = (const uint8_t *)*p;
  const size_t len = mm_utf8_len(*p, (size_t)(end - *p));
  uint32_t point = len > 1 ? s[0] & (0x7Fu >> len) : s[0];
  for (size_t i = 1; i < len; i++) point = point << 6 | (s[i] & 0x3F);
  *p += len ? len : 1;
  return point;
}

size_t mm_utf8_put(char out[4], uint32_t code) {
  const size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  for (size_t i = n - 1; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3F));
  out[0] = (char)(n == 1 ? code : (0xF00u >> n) | code); /* lead bytes 110…, 1110…, 11110… */
  return n;
}

int mm_hex_digit(char c) {
  const char small = (char)(c | 0x20);
  return c >= '0' && c <= '9' ? c - '0' : small >= 'a' && small <= 'f' ? small - 'a' + 10 : -1;
}

/* Characters that a terminal obeys, or that change how others are shown, without a glyph of their own: C1 controls, the soft hyphen,
 * direction marks, embeddings, overrides and isolates, zero-width characters, line separators, the byte order mark, annotations, tags. */
static const struct {
  uint32_t first, last;
} hidden[] = {{0x80, 0x9F},     {0xAD, 0xAD},     {0x61C, 0x61C},   {0x180E, 0x180E}, {0x200B, 0x200F},
              {0x2028, 0x202E}, {0x2060, 0x206F}, {0xFEFF, 0xFEFF}, {0xFFF9, 0xFFFB}, {0xE0000, 0xE007F}};

/* Bytes at text that may be shown as they are: 0 for control characters, hidden ones, invalid UTF-8. */
static size_t showable(const char *text, size_t n) {
  const uint8_t *s = (const uint8_t *)text;
  if (s[0] < 0x20 || s[0] == 0x7F) return 0;
  size_t len = mm_utf8_len(text, n);
  if (len < 2) return len;
  const uint32_t point = mm_utf8_next(&text, text + len);
  for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++)
    if (point >= hidden[i].first && point <= hidden[i].last) return 0;
  return len;
}

/* Writes the shown form of the start of text: its first `len` bytes as they are, in `width` bytes, or its first byte as \xNN. */
static size_t show_one(char shown[4], const char *text, size_t n, bool quoted, size_t *width) {
  static const char hex[] = "0123456789abcdef";
  size_t len = quoted && (*text == '"' || *text == '\\') ? 0 : showable(text, n);
  uint8_t c = (uint8_t)*text;
  if (len)
    memcpy(shown, text, len);
  else
    memcpy(shown, (char[]){'\\', 'x', hex[c >> 4], hex[c & 15]}, 4);
  *width = len ? len : 4;
  return len ? len : 1;
}

static char *escape(char *out, size_t cap, const char *text, size_t n, bool quoted) {
  static const char ellipsis[] = "…";
  size_t at = 0, cut = 0; /* cut: the last length after which the ellipsis still fits */
  if (cap == 0) return out;
  for (size_t i = 0; i < n;) {
    char shown[4];
    size_t width, taken = show_one(shown, text + i, n - i, quoted, &width);
    if (at + width >= cap) {
      if (cap < sizeof ellipsis) break;
      memcpy(out + cut, ellipsis, sizeof ellipsis);
      return out;
    }
    memcpy(out + at, shown, width);
    at += width;
    i += taken;
    if (at + sizeof ellipsis <= cap) cut = at;
  }
  out[at] = 0;
  return out;
}

char *mm_format(char *out, size_t cap, const char *fmt, ...) {
  va_list args;
  va_start(args, fmt);
  vsnprintf(out, cap, fmt, args);
  va_end(args);
  return out;
}

char *mm_escape(char *out, size_t cap, const char *text, size_t n) { return escape(out, cap, text, n, true); }
char *mm_show(char *out, size_t cap, const char *text) { return escape(out, cap, text, strlen(text), false); }

void mm_name_list_add(mm_name_list *l, const char *name) {
  const size_t more = sizeof ", and 18446744073709551615 more", n = strlen(name) + (l->used ? 2 : 0);
  if (l->more == 0 && l->used + n + more <= sizeof l->text)
    l->used += (size_t)snprintf(l->text + l->used, sizeof l->text - l->used, "%s%s", l->used ? ", " : "", name);
  else
    snprintf(l->text + l->used, sizeof l->text - l->used, "%s%llu more", l->used ? ", and " : "", (unsigned long long)++l->more);
}

void mm_show_to(FILE *f, const char *text) {
  for (size_t n = strlen(text); n > 0;) {
    char shown[4];
    size_t width, taken = show_one(shown, text, n, false, &width);
    fwrite(shown, 1, width, f);
    text += taken;
    n -= taken;
  }
}

/* Appends to err->text at *at; what does not fit is cut. */
MM_PRINTF(3, 4) static void put(mm_err *err, size_t *at, const char *fmt, ...) {
  va_list args;
  va_start(args, fmt);
  int n = vsnprintf(err->text + *at, sizeof err->text - *at, fmt, args);
  va_end(args);
  if (n > 0) *at = (size_t)mm_min(*at + (size_t)n, sizeof err->text - 1);
}

/* Ends text[cap] at `at` with what the caller formatted: one line that a terminal shows as it is, whatever went into it. */
static void put_shown(char *text, size_t cap, size_t at, const char *fmt, va_list args) {
  char raw[sizeof((mm_err *)0)->text];
  int length = vsnprintf(raw, sizeof raw, fmt, args);
  size_t n = length < 0 ? 0 : (size_t)mm_min((uint64_t)length, sizeof raw - 1), width;
  for (size_t i = 0; i < n; at += width) {
    char shown[4];
    i += show_one(shown, raw + i, n - i, false, &width);
    if (at + width >= cap) break;
    memcpy(text + at, shown, width);
  }
  text[at] = 0;
}

bool mm_fail(mm_err *err, mm_status status, const char *code, mm_where where, const char *fmt, ...) {
  if (err->status != MM_OK) return false;
  char name[NAME_MAX_SHOWN + 1];
  size_t at = 0;
  err->status = status;
  snprintf(err->code, sizeof err->code, "%s", code);
  put(err, &at, "%s: ", code);
  if (where.file) put(err, &at, "%s: ", mm_escape(name, sizeof name, where.file, strlen(where.file)));
  if (where.tensor) put(err, &at, "tensor \"%s\": ", mm_escape(name, sizeof name, where.tensor, strlen(where.tensor)));
  if (where.offset >= 0) put(err, &at, "offset %" PRId64 ": ", where.offset);
  va_list args;
  va_start(args, fmt);
  put_shown(err->text, sizeof err->text, at, fmt, args);
  va_end(args);
  return false;
}

bool mm_fail_as(mm_err *err, const mm_err *reason) {
  if (err->status == MM_OK) *err = *reason;
  return false;
}

bool mm_fail_damaged(mm_err *err, mm_err *reason) {
  if (reason->status == MM_BAD_INPUT) reason->status = MM_INTEGRITY;
  return mm_fail_as(err, reason);
}

/* The number that stands in a file behind the first `skip`; UINT64_MAX where there is none ("max"). */
static uint64_t number_of_file(const char *dir, const char *name, const char *skip) {
  char text[128] = "", path[4200], *end = NULL;
  snprintf(path, sizeof path, "%s/%s", dir, name);
  FILE *f = fopen(path, "re");
  if (f && !fgets(text, sizeof text, f)) text[0] = 0;
  if (f) fclose(f);
  const char *at = skip ? strstr(text, skip) : text;
  if (!at) return UINT64_MAX;
  if (skip) at += strlen(skip);
  const uint64_t v = strtoull(at, &end, 10);
  return end != at ? v : UINT64_MAX;
}

/* The group or one above it is full: its limit; UINT64_MAX: none is. The hierarchy's own root has a container's limit. */
static uint64_t full_group(const char *root, const char *path) {
  char group[4096];
  const int n = snprintf(group, sizeof group, "%s%s", root, path);
  if (n < 0 || (size_t)n >= sizeof group) return UINT64_MAX;
  for (size_t end = (size_t)n; end > 0 && end >= strlen(root); end--) {
    if (group[end] && group[end] != '/') continue;
    group[end] = 0;
    const uint64_t most = number_of_file(group, "pids.max", NULL), now = number_of_file(group, "pids.current", NULL);
    if (most != UINT64_MAX && now != UINT64_MAX && now >= most) return most;
  }
  return UINT64_MAX;
}

static uint64_t full_of_all(const char *groups, const char *root) {
  FILE *f = fopen(groups, "re");
  char line[4096];
  uint64_t full = UINT64_MAX;
  char v1[300], unified[300];
  snprintf(v1, sizeof v1, "%s/pids", root), snprintf(unified, sizeof unified, "%s/unified", root);
  while (f && full == UINT64_MAX && fgets(line, sizeof line, f)) {
    line[strcspn(line, "\n")] = 0;
    char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path) continue;
    *path++ = 0;
    controllers++;
    if (!*controllers) full = mm_min(full_group(root, path), full_group(unified, path)); /* version 2, alone or with version 1 */
    if (strcmp(controllers, "pids") == 0) full = full_group(v1, path);
  }
  if (f) fclose(f);
  return full;
}

const char *mm_tasks_full(char to[MM_LIMITS_TEXT], const char *groups, const char *root, const char *proc) {
  const uint64_t group = full_of_all(groups, root);
  const uint64_t most = number_of_file(proc, "sys/kernel/threads-max", NULL), now = number_of_file(proc, "loadavg", "/");
  const bool kernel = most != UINT64_MAX && now != UINT64_MAX && now >= most;
  const char *words =
      group != UINT64_MAX ? "processes and threads of the control group (pids.max)" : "threads of the system (kernel.threads-max)";
  *to = 0;
  if (group != UINT64_MAX || kernel)
    snprintf(to, MM_LIMITS_TEXT, "; the limit is %" PRIu64 " %s", group != UINT64_MAX ? group : most, words);
  return to;
}

/* Whether the limit of processes of a user holds for this process: it does not for root. */
static bool tasks_limited(void) {
  unsigned long inside = 1, outside = 1;
  FILE *f = fopen("/proc/self/uid_map", "re"); /* root of a user namespace is another user outside */
  const bool read = f && fscanf(f, "%lu %lu", &inside, &outside) == 2;
  if (f) fclose(f);
  return getuid() != 0 || (read && outside != 0);
}

/* Limits of a process, as ulimit names and counts them, and the errors that they cause: of memory, files, sizes or threads. */
static const struct {
  int number;
  uint64_t unit;
  const char *words;
  int of[2];
} limits[] = {{RLIMIT_NOFILE, 1, "descriptors (ulimit -n)", {EMFILE, EMFILE}},
              {RLIMIT_FSIZE, 1024, "KiB a file (ulimit -f)", {EFBIG, EFBIG}},
              {RLIMIT_NPROC, 1, "processes and threads (ulimit -u)", {EAGAIN, EAGAIN}},
              {RLIMIT_AS, 1024, "KiB of address space (ulimit -v)", {ENOMEM, EAGAIN}},
              {RLIMIT_DATA, 1024, "KiB of data (ulimit -d)", {ENOMEM, EAGAIN}}};

const char *mm_limits_text(char to[MM_LIMITS_TEXT], int errno_value) {
  size_t n = 0;
  *to = 0;
  for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
    struct rlimit l;
    if (errno_value != limits[i].of[0] && errno_value != limits[i].of[1]) continue;
    if (getrlimit((__rlimit_resource_t)limits[i].number, &l) != 0 || l.rlim_cur == RLIM_INFINITY) continue;
    if (limits[i].number == RLIMIT_NPROC && !tasks_limited()) continue;
    n += (size_t)snprintf(to + n, MM_LIMITS_TEXT - n, "%s%" PRIu64 " %s", n ? ", " : "; the limit is ",
                          (uint64_t)l.rlim_cur / limits[i].unit, limits[i].words);
  }
  return to;
}

const char *mm_variable_text(char to[MM_VARIABLE_TEXT], const char *name) {
  const char *value = getenv(name);
  char shown[MM_VARIABLE_TEXT / 2];
  *to = 0;
  if (value) snprintf(to, MM_VARIABLE_TEXT, "; %s is \"%s\"", name, mm_escape(shown, sizeof shown, value, strlen(value)));
  return to;
}

bool mm_fail_errno(mm_err *err, mm_where where, const char *what, int errno_value) {
  char buf[128], text[MM_LIMITS_TEXT];
  const bool memory = errno_value == ENOMEM;
  const char *reason = strerror_r(errno_value, buf, sizeof buf), *limit = errno_value == EAGAIN ? "" : mm_limits_text(text, errno_value);
  return mm_fail(err, memory ? MM_LIMIT : MM_IO, memory ? "E_MEMORY" : "E_IO", where, "%s: %s%s", what, reason, limit);
}

bool mm_fail_memory(mm_err *err, uint64_t bytes) {
  char text[MM_LIMITS_TEXT];
  return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "cannot allocate %" PRIu64 " bytes%s", bytes, mm_limits_text(text, ENOMEM));
}

bool mm_fail_thread(mm_err *err, const char *what, int errno_value) {
  char buf[128], text[MM_LIMITS_TEXT];
  const char *full = errno_value == EAGAIN ? mm_tasks_full(text, "/proc/self/cgroup", "/sys/fs/cgroup", "/proc") : "";
  return mm_fail(err, MM_LIMIT, "E_THREADS", mm_at(NULL, NULL), "%s: %s%s", what, strerror_r(errno_value, buf, sizeof buf),
                 *full ? full : mm_limits_text(text, errno_value));
}

uint64_t mm_gcd(uint64_t a, uint64_t b) {
  while (b) {
    uint64_t r = a % b;
    a = b;
    b = r;
  }
  return a;
}

void *mm_calloc(size_t count, size_t size, mm_err *err) {
  uint64_t bytes;
  bool fits = mm_mul(count, size, &bytes);
  void *p = fits ? calloc(count ? count : 1, size ? size : 1) : NULL;
  if (!p) mm_fail_memory(err, fits ? bytes : UINT64_MAX);
  return p;
}

bool mm_grow(void **array, size_t *cap, size_t want, size_t size, mm_err *err) {
  if (want <= *cap) return true;
  size_t next = *cap > SIZE_MAX / 2 || want > *cap * 2 ? want : *cap * 2;
  if (next < 16) next = 16;
  uint64_t bytes;
  if (!mm_mul(next, size, &bytes)) return mm_fail_memory(err, UINT64_MAX);
  void *p = realloc(*array, bytes);
  if (!p) return mm_fail_memory(err, bytes);
  *array = p;
  *cap = next;
  return true;
}

int mm_by_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

#define ORDER(name, type)                                  \
  int name(const void *a, const void *b) {                 \
    const type x = *(const type *)a, y = *(const type *)b; \
    return (x > y) - (x < y);                              \
  }
ORDER(mm_by_u32, uint32_t)
ORDER(mm_by_real, double)

struct timespec mm_later(double seconds) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  const time_t whole = (time_t)seconds;
  t.tv_sec += whole, t.tv_nsec += (long)((seconds - (double)whole) * 1e9);
  if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
  return t;
}

double mm_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

bool mm_ends_with(const char *s, const char *end) {
  size_t n = strlen(s), k = strlen(end);
  return n >= k && memcmp(s + n - k, end, k) == 0;
}

void mm_sort(void *array, size_t count, size_t size, int (*order)(const void *, const void *)) {
  const char *p = array;
  size_t i = 1;
  while (i < count && order(p + (i - 1) * size, p + i * size) <= 0) i++;
  if (i < count) qsort(array, count, size, order);
}

bool mm_close_text(FILE *f, char *const *text) {
  bool written = !ferror(f);
  return fclose(f) == 0 && written && *text;
}

/* Arena */

/* Chunks double from the least to the most: a small document costs little memory, a large one few allocations. */
#define CHUNK_LEAST ((size_t)1 << 10)
#define CHUNK_MOST  ((size_t)64 << 10)

struct mm_arena_chunk {
  struct mm_arena_chunk *next;
  size_t used, cap;
  _Alignas(16) char data[];
};

void *mm_arena_alloc(mm_arena *a, size_t n, mm_err *err) {
  struct mm_arena_chunk *c = a->chunk;
  if (n > SIZE_MAX - sizeof *c - 15) {
    mm_fail_memory(err, n);
    return NULL;
  }
  n = (n + 15) & ~(size_t)15;
  if (!c || n > c->cap - c->used) {
    bool alone = n > CHUNK_MOST / 4;
    size_t usual = mm_min(mm_max(c ? 2 * c->cap : CHUNK_LEAST, 2 * n), CHUNK_MOST), cap = alone ? n : usual;
    struct mm_arena_chunk *fresh = mm_calloc(1, sizeof *fresh + cap, err);
    if (!fresh) return NULL;
    fresh->cap = cap;
    if (c && alone) { /* goes second: the rest of the first chunk stays in use */
      fresh->next = c->next;
      c->next = fresh;
    } else {
      fresh->next = c;
      a->chunk = fresh;
    }
    c = fresh;
  }
  void *p = c->data + c->used;
  c->used += n;
  return p;
}

size_t mm_arena_bytes(const mm_arena *a) {
  size_t bytes = 0;
  for (const struct mm_arena_chunk *c = a->chunk; c; c = c->next) bytes += sizeof *c + c->cap;
  return bytes;
}

char *mm_arena_strndup(mm_arena *a, const char *s, size_t n, mm_err *err) {
  if (n == SIZE_MAX) {
    mm_fail_memory(err, n);
    return NULL;
  }
  char *p = mm_arena_alloc(a, n + 1, err);
  if (p && n) memcpy(p, s, n);
  return p;
}

char *mm_arena_printf(mm_arena *a, mm_err *err, const char *fmt, ...) {
  va_list args, again;
  va_start(args, fmt);
  va_copy(again, args);
  int n = vsnprintf(NULL, 0, fmt, args);
  va_end(args);
  char *p = NULL;
  if (n < 0) {
    mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "cannot format \"%s\"", fmt);
  } else if ((p = mm_arena_alloc(a, (size_t)n + 1, err))) {
    vsnprintf(p, (size_t)n + 1, fmt, again);
  }
  va_end(again);
  return p;
}

void mm_arena_close(mm_arena *a) {
  while (a->chunk) {
    struct mm_arena_chunk *next = a->chunk->next;
    free(a->chunk);
    a->chunk = next;
  }
}
