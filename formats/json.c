/* JSON documents over jansson: the strict reading that jansson leaves to its caller, required fields with one error
 * line each, and building. */
#include "formats/json.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "formats/file.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define POISON(p, n)   __asan_poison_memory_region(p, n)
#define UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#else
#define POISON(p, n)   ((void)0)
#define UNPOISON(p, n) ((void)0)
#endif

#define MAX_DEPTH  32
#define MAX_VALUES (UINT32_C(4) << 20) /* jansson takes up to some 150 bytes for each */

/* What jansson would let through: raw NUL bytes (taken for white space after a number), nesting up to 2,048, and lists of
 * tiny values that grow a hundredfold in memory. */
static bool prescan(const char *text, size_t n, const char *file, mm_err *err) {
  const char *nul = n ? memchr(text, '\0', n) : NULL;
  if (nul)
    return mm_fail(err, MM_BAD_INPUT, "E_JSON", mm_at_offset(file, NULL, (uint64_t)(nul - text)), "found a NUL byte, expected JSON text");
  static const bool syntax[256] = {['"'] = true, ['\\'] = true, ['{'] = true, ['['] = true, ['}'] = true, [']'] = true, [','] = true};
  unsigned depth = 0, values = 0;
  bool quoted = false;
  for (size_t i = 0; i < n; i++) {
    char c = text[i];
    if (!syntax[(uint8_t)c]) continue;
    if (c == '"') quoted = !quoted;
    if (quoted) {
      if (c == '\\') i++;
      continue;
    }
    if (c == '{' || c == '[') depth++;
    if ((c == '}' || c == ']') && depth > 0) depth--;
    if (c == '{' || c == '[' || c == ',') values++;
    if (depth > MAX_DEPTH)
      return mm_fail(err, MM_BAD_INPUT, "E_JSON", mm_at_offset(file, NULL, i), "found nesting deeper than %d", MAX_DEPTH);
    if (values > MAX_VALUES) return mm_fail(err, MM_LIMIT, "E_LIMIT", mm_at_offset(file, NULL, i), "found more than %u values", MAX_VALUES);
  }
  return true;
}

/* Memory of jansson. When it has none its reader goes on without the bytes that it could not keep, and runs past those that it did (2.14,
 * lex_scan_string). So a failed allocation leaves the reader at once, and frees what the document has so far. The writer leaves things out
 * instead: there it is noted. Small blocks of a document share chunks; a chunk goes with its last block. Under AddressSanitizer all of it
 * but the blocks themselves is out of bounds. */
#define CHUNK ((size_t)4 << 10)

typedef struct chunk {
  struct chunk *before, *after; /* of the document that is being read */
  size_t used, cap, live;       /* bytes, bytes, blocks */
  _Alignas(max_align_t) char data[];
} chunk;

typedef struct head { /* of a block */
  _Alignas(max_align_t) chunk *home;
  size_t size;
} head;

typedef struct reading {
  chunk *newest;
  jmp_buf out_of_memory;
} reading;

static _Thread_local reading *now_reading;
static _Thread_local bool starved;

/* A chunk with room for n bytes: the newest of the document, or a new one; a large block has its own. NULL for want of memory. */
static chunk *chunk_for(size_t n) {
  chunk *last = now_reading ? now_reading->newest : NULL;
  if (last && n <= last->cap - last->used) return last;
  size_t cap = now_reading && n < CHUNK / 4 ? CHUNK : n;
  chunk *c = malloc(sizeof *c + cap);
  if (!c) return NULL;
  *c = (chunk){.cap = cap};
  POISON(c->data, cap);
  if (!now_reading) return c;
  bool second = last && cap != CHUNK; /* the rest of the newest stays in use */
  c->before = second ? last : NULL;
  c->after = second ? last->after : last;
  if (c->before) c->before->after = c;
  if (c->after) c->after->before = c;
  if (!second) now_reading->newest = c;
  return c;
}

static void drop(chunk *c) {
  if (c->before) c->before->after = c->after;
  if (c->after) c->after->before = c->before;
  if (now_reading && now_reading->newest == c) now_reading->newest = c->after;
  UNPOISON(c->data, c->cap);
  free(c);
}

static void *block_malloc(size_t n) {
  chunk *c = n <= SIZE_MAX / 2 ? chunk_for(sizeof(head) + mm_round_up(n, sizeof(head))) : NULL;
  if (!c && now_reading) longjmp(now_reading->out_of_memory, 1);
  if (!c) {
    starved = true;
    return NULL;
  }
  head *h = (head *)(void *)(c->data + c->used);
  UNPOISON(h, sizeof *h + n);
  *h = (head){c, n};
  POISON(h, sizeof *h);
  c->used += sizeof *h + mm_round_up(n, sizeof *h);
  c->live++;
  return h + 1;
}

static void block_free(void *p) {
  if (!p) return;
  head *h = (head *)p - 1;
  UNPOISON(h, sizeof *h);
  chunk *c = h->home;
  POISON(h, sizeof *h + h->size);
  if (--c->live == 0) drop(c);
}

/* Before main: what jansson has allocated by its own means could not be freed by these. */
__attribute__((constructor)) static void set_memory(void) { json_set_alloc_funcs(block_malloc, block_free); }

/* NULL with e->text empty: want of memory. */
static json_t *read_text(const char *text, size_t n, json_error_t *e) {
  reading r = {0};
  e->text[0] = 0;
  now_reading = &r;
  if (setjmp(r.out_of_memory) != 0) {
    while (r.newest) drop(r.newest);
    now_reading = NULL;
    e->text[0] = 0;
    return NULL;
  }
  json_t *j = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, e);
  now_reading = NULL;
  return j;
}

mm_json *mm_json_parse(const char *text, size_t n, const char *file, mm_err *err) {
  if (!prescan(text, n, file, err)) return NULL;
  json_error_t e;
  mm_json *j = read_text(text, n, &e);
  if (j) return j;
  if (e.text[0] == 0) {
    mm_fail_memory(err, n);
    return NULL;
  }
  char what[4 * sizeof e.text];
  mm_escape(what, sizeof what, e.text, strlen(e.text));
  const char *code = json_error_code(&e) == json_error_numeric_overflow ? "E_NUMBER" : "E_JSON";
  mm_fail(err, MM_BAD_INPUT, code, mm_at_offset(file, NULL, e.position > 0 ? (uint64_t)e.position : 0), "%s", what);
  return NULL;
}

mm_json *mm_json_load(const char *path, uint64_t max_bytes, mm_err *err) {
  size_t n;
  char *text = mm_file_slurp(path, max_bytes, &n, err);
  if (!text) return NULL;
  mm_json *j = mm_json_parse(text, n, path, err);
  free(text);
  return j;
}

void mm_json_free(mm_json *j) { json_decref(j); }

mm_json_type mm_json_type_of(const mm_json *j) {
  if (!j) return MM_JSON_NULL;
  switch (json_typeof(j)) {
    case JSON_OBJECT: return MM_JSON_OBJ;
    case JSON_ARRAY: return MM_JSON_ARR;
    case JSON_STRING: return MM_JSON_STR;
    case JSON_INTEGER: return MM_JSON_INT;
    case JSON_REAL: return MM_JSON_REAL;
    case JSON_TRUE:
    case JSON_FALSE: return MM_JSON_BOOL;
    case JSON_NULL: break;
  }
  return MM_JSON_NULL;
}

const mm_json *mm_json_get(const mm_json *obj, const char *key) { return json_object_get(obj, key); }
size_t mm_json_size(const mm_json *j) { return json_is_array(j) ? json_array_size(j) : json_object_size(j); }
const mm_json *mm_json_at(const mm_json *arr, size_t i) { return json_array_get(arr, i); }

bool mm_json_next(const mm_json *obj, void **iter, const char **key, const mm_json **value) {
  json_t *o = (json_t *)obj; /* jansson's iterators want it writable; nothing is written */
  *iter = *iter ? json_object_iter_next(o, *iter) : json_object_iter(o);
  if (!*iter) return false;
  *key = json_object_iter_key(*iter);
  *value = json_object_iter_value(*iter);
  return true;
}

int64_t mm_json_int(const mm_json *j) { return json_integer_value(j); }
double mm_json_number(const mm_json *j) { return json_number_value(j); }
bool mm_json_bool(const mm_json *j) { return json_is_true(j); }
const char *mm_json_str(const mm_json *j) { return json_string_value(j); }
size_t mm_json_str_len(const mm_json *j) { return json_string_length(j); }

static const char *type_name(mm_json_type t) {
  static const char *const name[] = {"null", "a boolean", "an integer", "a real number", "a string", "an array", "an object"};
  return name[t];
}

static bool wrong_type(const mm_json *found, const char *key, const char *expected, const mm_json_ctx *c, mm_err *err) {
  const char *what = found ? type_name(mm_json_type_of(found)) : "nothing";
  return mm_fail(err, c->status, c->code, mm_at(c->file, NULL), "key \"%s\": found %s, expected %s", key, what, expected);
}

const mm_json *mm_json_need(const mm_json *obj, const char *key, mm_json_type type, const mm_json_ctx *c, mm_err *err) {
  const mm_json *j = mm_json_get(obj, key);
  if (j && mm_json_type_of(j) == type) return j;
  wrong_type(j, key, type_name(type), c, err);
  return NULL;
}

bool mm_json_need_int(const mm_json *obj, const char *key, int64_t lo, int64_t hi, int64_t *out, const mm_json_ctx *c, mm_err *err) {
  const mm_json *j = mm_json_need(obj, key, MM_JSON_INT, c, err);
  if (!j) return false;
  *out = mm_json_int(j);
  if (*out >= lo && *out <= hi) return true;
  return mm_fail(err, c->status, c->code, mm_at(c->file, NULL), "key \"%s\": found %lld, expected %lld to %lld", key, (long long)*out,
                 (long long)lo, (long long)hi);
}

bool mm_json_need_number(const mm_json *obj, const char *key, double *out, const mm_json_ctx *c, mm_err *err) {
  const mm_json *j = mm_json_get(obj, key);
  if (!json_is_number(j)) return wrong_type(j, key, "a number", c, err);
  *out = mm_json_number(j);
  return true;
}

bool mm_json_need_bool(const mm_json *obj, const char *key, bool *out, const mm_json_ctx *c, mm_err *err) {
  const mm_json *j = mm_json_need(obj, key, MM_JSON_BOOL, c, err);
  if (!j) return false;
  *out = mm_json_bool(j);
  return true;
}

/* The caller gets no length, so a NUL inside would cut the string unseen. */
bool mm_json_need_str(const mm_json *obj, const char *key, const char **out, const mm_json_ctx *c, mm_err *err) {
  const mm_json *j = mm_json_need(obj, key, MM_JSON_STR, c, err);
  if (!j) return false;
  *out = mm_json_str(j);
  if (strlen(*out) == mm_json_str_len(j)) return true;
  return mm_fail(err, c->status, c->code, mm_at(c->file, NULL), "key \"%s\": found a string with a NUL character", key);
}

bool mm_json_only_keys(const mm_json *obj, const char *const *keys, const mm_json_ctx *c, mm_err *err) {
  void *iter = NULL;
  const char *key;
  const mm_json *value;
  while (mm_json_next(obj, &iter, &key, &value)) {
    const char *const *k = keys;
    while (*k && strcmp(*k, key) != 0) k++;
    if (*k) continue;
    char shown[256];
    return mm_fail(err, c->status, c->code, mm_at(c->file, NULL), "found unknown key \"%s\"",
                   mm_escape(shown, sizeof shown, key, strlen(key)));
  }
  return true;
}

mm_json *mm_json_new_obj(void) { return json_object(); }
mm_json *mm_json_new_arr(void) { return json_array(); }
mm_json *mm_json_new_str(const char *s) { return json_string(s); }
mm_json *mm_json_new_int(int64_t v) { return json_integer(v); }
mm_json *mm_json_new_real(double v) { return json_real(v); }
mm_json *mm_json_new_bool(bool v) { return json_boolean(v); }
bool mm_json_set(mm_json *obj, const char *key, mm_json *value) { return json_object_set_new(obj, key, value) == 0; }
bool mm_json_append(mm_json *arr, mm_json *value) { return json_array_append_new(arr, value) == 0; }
void mm_json_remove(mm_json *obj, const char *key) { json_object_del(obj, key); }

typedef struct text {
  char *text;
  size_t n, cap;
} text;

static int append(const char *bytes, size_t n, void *to) {
  text *t = to;
  starved = starved || !MM_GROW(t->text, &t->cap, t->n + n + 1, MM_IGNORED);
  if (starved) return -1;
  memcpy(t->text + t->n, bytes, n);
  t->text[t->n += n] = 0;
  return 0;
}

/* As append, with DEL escaped: jansson takes it for text that can be shown. It stands in strings only. */
static int append_shown(const char *bytes, size_t n, void *to) {
  for (const char *del; (del = memchr(bytes, 0x7f, n)); n -= (size_t)(del - bytes) + 1, bytes = del + 1)
    if (append(bytes, (size_t)(del - bytes), to) != 0 || append("\\u007F", 6, to) != 0) return -1;
  return append(bytes, n, to);
}

char *mm_json_dump(const mm_json *j, bool pretty) {
  text t = {0};
  starved = false;
  int r = json_dump_callback(j, pretty ? append_shown : append, &t,
                             JSON_ENCODE_ANY | JSON_REAL_PRECISION(17) | (pretty ? JSON_INDENT(1) | JSON_ENSURE_ASCII : JSON_COMPACT));
  if (r == 0 && !starved) return t.text;
  free(t.text);
  return NULL;
}
