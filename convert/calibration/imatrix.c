/* Importance matrices of llama.cpp, from hostile bytes. GGUF version 3, little-endian: "GGUF", u32 version, i64 tensors, i64 pairs; pairs
 * of key, i32 type and value; tensors of name, u32 dimensions, i64 each (the fastest first), i32 type, u64 offset; then the data, aligned.
 * Strings are u64 length and bytes; arrays i32 type, u64 length and elements. Only what an importance matrix has is read: F32 tensors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/calibration/importance.h"

#define NAME_MOST   512
#define ALIGN_MOST  (UINT64_C(1) << 20)
#define GGUF_F32    0
#define GGUF_STRING 8
#define GGUF_ARRAY  9

typedef struct cursor {
  const mm_importance *m;
  uint64_t at, size;
  mm_err *err;
} cursor;

static bool bad(const cursor *c, const char *name, const char *what) {
  return mm_fail(c->err, MM_BAD_INPUT, "E_IMPORTANCE", mm_at_offset(c->m->path, name, c->at), "%s", what);
}

/* n bytes of the file, or NULL behind its end. */
static const uint8_t *take(cursor *c, uint64_t n) {
  if (n > c->size - c->at) {
    bad(c, NULL, MM_FORMATTED(96, "found the end of the file, expected %llu more bytes of an entry", (unsigned long long)n));
    return NULL;
  }
  const uint8_t *p = c->m->data + c->at;
  c->at += n;
  return p;
}

static bool take_u32(cursor *c, uint32_t *out) {
  const uint8_t *p = take(c, sizeof *out);
  return p && memcpy(out, p, sizeof *out);
}
static bool take_u64(cursor *c, uint64_t *out) {
  const uint8_t *p = take(c, sizeof *out);
  return p && memcpy(out, p, sizeof *out);
}

/* A name of n bytes into the arena. */
static const char *take_name(cursor *c, mm_importance *m, uint64_t n) {
  if (n == 0 || n > NAME_MOST) {
    bad(c, NULL, MM_FORMATTED(96, "found a name of %llu bytes, expected 1 to %d", (unsigned long long)n, NAME_MOST));
    return NULL;
  }
  const char *text = (const char *)take(c, n);
  if (!text) return NULL;
  if (!memchr(text, 0, n)) return mm_arena_strndup(&m->arena, text, n, c->err);
  bad(c, NULL, "found a NUL byte in a name, expected text");
  return NULL;
}

static mm_importance_entry *add(mm_importance *m, size_t *cap, mm_err *err) {
  if (!MM_GROW(m->entry, cap, m->count + 1, err)) return NULL;
  mm_importance_entry *e = &m->entry[m->count++];
  *e = (mm_importance_entry){0};
  return e;
}

/* ---- GGUF ---- */

static bool skip_string(cursor *c) {
  uint64_t n;
  return take_u64(c, &n) && take(c, n);
}

static bool skip_value(cursor *c, uint32_t type) {
  static const uint8_t size[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8}; /* u8 i8 u16 i16 u32 i32 f32 bool string array u64 i64 f64 */
  uint64_t n = 1, bytes;
  if (type == GGUF_ARRAY && !(take_u32(c, &type) && take_u64(c, &n))) return false;
  if (type >= sizeof size || type == GGUF_ARRAY)
    return bad(c, NULL, MM_FORMATTED(96, "found type %u of a value, expected 0 to 12, in an array not 9 (an array)", type));
  if (type != GGUF_STRING)
    return mm_mul(n, size[type], &bytes)
               ? take(c, bytes) != NULL
               : bad(c, NULL, MM_FORMATTED(96, "found an array of %llu, expected one inside the file", (unsigned long long)n));
  for (uint64_t i = 0; i < n; i++) /* each has bytes: the end of the file ends it */
    if (!skip_string(c)) return false;
  return true;
}

static bool is(const uint8_t *text, uint64_t n, const char *word) { return n == strlen(word) && memcmp(text, word, n) == 0; }

/* One pair; what matters of it into *align and *imatrix. */
static bool read_pair(cursor *c, uint64_t *align, bool *imatrix) {
  uint64_t n, length;
  uint32_t type, v;
  const uint8_t *key, *text;
  if (!take_u64(c, &n) || !(key = take(c, n)) || !take_u32(c, &type)) return false;
  if (is(key, n, "general.type") && type == GGUF_STRING) {
    if (!take_u64(c, &length) || !(text = take(c, length))) return false;
    *imatrix = is(text, length, "imatrix");
    return true;
  }
  if (!is(key, n, "general.alignment")) return skip_value(c, type);
  if (type != 4) return bad(c, NULL, MM_FORMATTED(96, "found general.alignment of type %u, expected 4 (u32)", type));
  if (!take_u32(c, &v)) return false;
  if (v == 0 || v > ALIGN_MOST || (v & (v - 1)) != 0)
    return bad(c, NULL, MM_FORMATTED(96, "found general.alignment %u, expected a power of two, at most %d", v, (int)ALIGN_MOST));
  *align = v;
  return true;
}

typedef struct gguf_tensor {
  const char *name;
  uint64_t elements, offset; /* from the start of the data */
} gguf_tensor;

static bool read_tensor(cursor *c, mm_importance *m, gguf_tensor *t) {
  uint64_t n, dim;
  uint32_t dims, type;
  if (!take_u64(c, &n) || !(t->name = take_name(c, m, n)) || !take_u32(c, &dims)) return false;
  if (dims == 0 || dims > 4) return bad(c, t->name, MM_FORMATTED(96, "found %u dimensions, expected 1 to 4", dims));
  t->elements = 1;
  for (uint32_t i = 0; i < dims; i++)
    if (!take_u64(c, &dim))
      return false;
    else if (dim == 0 || !mm_mul(t->elements, dim, &t->elements))
      return bad(c, t->name,
                 MM_FORMATTED(96, "found dimension %llu, expected one from 1 on, and values inside the file", (unsigned long long)dim));
  if (!take_u32(c, &type) || !take_u64(c, &t->offset)) return false;
  return type == GGUF_F32 || bad(c, t->name, MM_FORMATTED(96, "found type %u, expected %d (F32)", type, GGUF_F32));
}

/* Places follow one another, each aligned; the last ends within the file. */
static bool place_tensors(cursor *c, gguf_tensor *t, uint64_t count, uint64_t align) {
  uint64_t start = mm_round_up(c->at, align), at = 0;
  for (uint64_t i = 0; i < count; i++) {
    uint64_t bytes, end;
    if (t[i].offset != at)
      return bad(c, t[i].name,
                 MM_FORMATTED(128, "found it at byte %llu of the data, expected %llu, where the one before it ends",
                              (unsigned long long)t[i].offset, (unsigned long long)at));
    if (!mm_mul(t[i].elements, 4, &bytes) || !mm_add(start + at, bytes, &end) || end > c->size)
      return bad(c, t[i].name, MM_FORMATTED(96, "found %llu values, expected an end within the file", (unsigned long long)t[i].elements));
    t[i].offset += start;
    at = mm_round_up(at + bytes, align);
  }
  return true;
}

static bool pair_up(cursor *c, mm_importance *m, gguf_tensor *t, uint64_t count) {
  size_t cap = 0;
  qsort(t, (size_t)count, sizeof *t, mm_by_text);
  for (uint64_t i = 0; i < count; i++) {
    size_t n = strlen(t[i].name) - strlen(".in_sum2");
    if (!mm_ends_with(t[i].name, ".in_sum2") || n == 0) continue;
    const gguf_tensor key = {.name = MM_FORMATTED(NAME_MOST + 16, "%.*s.counts", (int)n, t[i].name)},
                      *counts = bsearch(&key, t, (size_t)count, sizeof *t, mm_by_text);
    if (!counts) return bad(c, t[i].name, "found no .counts of it, expected counts with sums");
    mm_importance_entry *e = add(m, &cap, c->err);
    if (!e || !(e->name = mm_arena_strndup(&m->arena, t[i].name, n, c->err))) return false;
    e->value = t[i].offset;
    e->values = t[i].elements;
    e->count = counts->offset;
    e->counts = counts->elements;
    e->count_type = MM_F32;
  }
  return true;
}

bool mm_imatrix_gguf(mm_importance *m, uint64_t size, mm_err *err) {
  enum { LEAST_TENSOR = 32, LEAST_PAIR = 13 }; /* bytes */
  cursor c = {m, 4, size, err};
  uint32_t version;
  uint64_t tensors, pairs, align = 32;
  bool imatrix = false;
  if (!take_u32(&c, &version) || !take_u64(&c, &tensors) || !take_u64(&c, &pairs)) return false;
  if (version != 3) return bad(&c, NULL, MM_FORMATTED(96, "found version %u of GGUF, expected 3", version));
  if (tensors > size / LEAST_TENSOR || pairs > size / LEAST_PAIR)
    return bad(&c, NULL,
               MM_FORMATTED(128, "found %llu tensors and %llu pairs, expected no more than the file has room for",
                            (unsigned long long)tensors, (unsigned long long)pairs));
  for (uint64_t i = 0; i < pairs; i++)
    if (!read_pair(&c, &align, &imatrix)) return false;
  if (!imatrix) return bad(&c, NULL, "found no general.type \"imatrix\", expected an importance matrix");
  gguf_tensor *t = mm_arena_alloc(&m->arena, (size_t)tensors * sizeof *t, err);
  for (uint64_t i = 0; t && i < tensors; i++)
    if (!read_tensor(&c, m, &t[i])) return false;
  return t && place_tensors(&c, t, tensors, align) && pair_up(&c, m, t, tensors);
}

/* ---- .dat ---- */

bool mm_imatrix_dat(mm_importance *m, uint64_t size, mm_err *err) {
  cursor c = {m, 0, size, err};
  uint32_t entries, length, calls, values;
  size_t cap = 0;
  if (!take_u32(&c, &entries)) return false;
  for (uint32_t i = 0; i < entries; i++) {
    const char *name;
    if (!take_u32(&c, &length) || !(name = take_name(&c, m, length)) || !take_u32(&c, &calls) || !take_u32(&c, &values)) return false;
    if (calls == 0 || calls > INT32_MAX || values == 0 || values > INT32_MAX)
      return bad(&c, name, MM_FORMATTED(96, "found %u calls and %u values, expected 1 to %d", calls, values, INT32_MAX));
    mm_importance_entry *e = add(m, &cap, err);
    if (!e) return false;
    *e = (mm_importance_entry){.name = name, .value = c.at, .values = values};
    if (!take(&c, 4 * (uint64_t)values)) return false;
  }
  return true; /* what follows names the text */
}
