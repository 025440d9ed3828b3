/* Errors, allocation and arenas: the parts of base.h that are not one line. */
#include "formats/base.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* Bytes at text that may be shown as they are: 0 for control characters (C0, DEL, C1), quotes, backslashes, invalid UTF-8. */
static size_t showable(const char *text, size_t n) {
  uint8_t c = (uint8_t)text[0];
  if (c < 0x20 || c == 0x7F || c == '"' || c == '\\') return 0;
  size_t len = mm_utf8_len(text, n);
  return len == 2 && c == 0xC2 && (uint8_t)text[1] < 0xA0 ? 0 : len;
}

char *mm_escape(char *out, size_t cap, const char *text, size_t n) {
  static const char ellipsis[] = "…";
  size_t at = 0, cut = 0; /* cut: the last length after which the ellipsis still fits */
  if (cap == 0) return out;
  for (size_t i = 0; i < n;) {
    size_t len = showable(text + i, n - i), width = len ? len : 4;
    if (at + width >= cap) {
      if (cap < sizeof ellipsis) break;
      memcpy(out + cut, ellipsis, sizeof ellipsis);
      return out;
    }
    if (len) {
      memcpy(out + at, text + i, len);
    } else {
      static const char hex[] = "0123456789abcdef";
      uint8_t c = (uint8_t)text[i];
      memcpy(out + at, (char[]){'\\', 'x', hex[c >> 4], hex[c & 15]}, 4);
    }
    at += width;
    i += len ? len : 1;
    if (at + sizeof ellipsis <= cap) cut = at;
  }
  out[at] = 0;
  return out;
}

/* Appends to text[cap] at *at; what does not fit is cut. */
static void append(char *text, size_t cap, size_t *at, const char *fmt, va_list args) {
  int n = vsnprintf(text + *at, cap - *at, fmt, args);
  if (n > 0) *at = (size_t)mm_min(*at + (size_t)n, cap - 1);
}

MM_PRINTF(3, 4) static void put(mm_err *err, size_t *at, const char *fmt, ...) {
  va_list args;
  va_start(args, fmt);
  append(err->text, sizeof err->text, at, fmt, args);
  va_end(args);
}

bool mm_fail(mm_err *err, mm_status status, const char *code, mm_where where, const char *fmt, ...) {
  if (!err || err->status != MM_OK) return false;
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
  append(err->text, sizeof err->text, &at, fmt, args);
  va_end(args);
  for (size_t i = 0; i < at; i++) { /* one line, whatever the caller formatted */
    if ((uint8_t)err->text[i] < 0x20 || err->text[i] == 0x7F) err->text[i] = ' ';
  }
  return false;
}

bool mm_fail_errno(mm_err *err, mm_where where, const char *what, int errno_value) {
  char buf[128];
  if (errno_value == ENOMEM) return mm_fail(err, MM_LIMIT, "E_MEMORY", where, "%s: %s", what, strerror_r(errno_value, buf, sizeof buf));
  return mm_fail(err, MM_IO, "E_IO", where, "%s: %s", what, strerror_r(errno_value, buf, sizeof buf));
}

bool mm_fail_memory(mm_err *err, uint64_t bytes) {
  return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "cannot allocate %" PRIu64 " bytes", bytes);
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
