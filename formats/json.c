/* JSON documents: trees of what scan.h reads, required fields with one error line each, building and writing. */
#include "formats/json.h"

#include <errno.h>
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/file.h"
#include "formats/scan.h"

#define MAX_VALUES (UINT32_C(4) << 20) /* some 100 bytes each */

typedef struct member {
  char *key; /* NULL in an array */
  mm_json *value;
} member;

struct mm_json {
  mm_json_type type;
  size_t n;  /* bytes of a string, members of an object or array */
  size_t at; /* of what was read: the byte of its key, or of the value where it has none */
  union {
    int64_t integer;
    double real;
    bool truth;
    char *string;   /* terminated */
    member *member; /* as many as the next power of two */
  };
};

static bool holds(const mm_json *j) { return j->type == MM_JSON_OBJ || j->type == MM_JSON_ARR; }

void mm_json_free(mm_json *j) {
  if (!j) return;
  for (size_t i = 0; holds(j) && i < j->n; i++) {
    free(j->member[i].key);
    mm_json_free(j->member[i].value);
  }
  if (holds(j)) free(j->member);
  if (j->type == MM_JSON_STR) free(j->string);
  free(j);
}

/* Takes key and value, where it fails too. */
static bool add(mm_json *to, char *key, mm_json *value) {
  const bool full = (to->n & (to->n - 1)) == 0;
  member *m = full ? realloc(to->member, (to->n ? 2 * to->n : 1) * sizeof *m) : to->member;
  if (m) {
    to->member = m;
    m[to->n++] = (member){key, value};
    return true;
  }
  free(key);
  mm_json_free(value);
  return false;
}

/* Reading */

typedef struct reader {
  mm_scan scan;
  uint32_t values;
  mm_err *err;
} reader;

#define REFUSE(r, place, code, ...) mm_fail((r)->err, (r)->scan.status, code, mm_at_offset((r)->scan.file, NULL, place), __VA_ARGS__)

static char *read_string(const reader *r, mm_scan_str s, size_t *n) {
  char *text = mm_calloc(s.n + 1, 1, r->err);
  if (text) *n = mm_scan_copy(s, text);
  return text;
}

/* The text ends where the caller says, not in a NUL, so numbers are converted from a copy. */
static bool read_number(reader *r, mm_json *j) {
  mm_scan_str s;
  bool real;
  if (!mm_scan_number(&r->scan, &s, &real, r->err)) return false;
  char few[64], *const text = s.n < sizeof few ? few : mm_calloc(s.n + 1, 1, r->err);
  if (!text) return false;
  memcpy(text, s.p, s.n);
  text[s.n] = 0;
  j->type = real ? MM_JSON_REAL : MM_JSON_INT;
  errno = 0;
  if (real)
    j->real = strtod_l(text, NULL, newlocale(LC_ALL_MASK, "C", (locale_t)0));
  else
    j->integer = strtoll(text, NULL, 10);
  const bool held = real ? isfinite(j->real) : errno == 0;
  if (text != few) free(text);
  if (held) return true;
  r->scan.pos -= s.n;
  char found[MM_SCAN_FOUND];
  return REFUSE(r, r->scan.pos, "E_NUMBER", "found %s, expected %s", mm_scan_found(&r->scan, found),
                real ? "a number of double precision" : "an integer of 64 bits");
}

static int by_key(const void *a, const void *b) {
  const member *x = *(const member *const *)a, *y = *(const member *const *)b;
  const int order = strcmp(x->key, y->key);
  return order ? order : (x > y) - (x < y);
}

static bool keys_differ(const reader *r, const mm_json *o) {
  const member **m = o->n > 1 ? mm_calloc(o->n, sizeof(member *), r->err) : NULL;
  if (!m) return o->n < 2;
  for (size_t i = 0; i < o->n; i++) m[i] = &o->member[i];
  qsort(m, o->n, sizeof(member *), by_key);
  size_t i = 1;
  while (i < o->n && strcmp(m[i - 1]->key, m[i]->key) != 0) i++;
  char shown[256];
  const bool ok = i == o->n || REFUSE(r, m[i]->value->at, "E_JSON", "found key \"%s\" twice",
                                      mm_escape(shown, sizeof shown, m[i]->key, strlen(m[i]->key)));
  free(m);
  return ok;
}

static mm_json *read_value(reader *r);

/* Recursion ends at the depth that mm_scan_open allows. */
static bool read_members(reader *r, mm_json *j, char open) {
  const bool keyed = open == '{';
  j->type = keyed ? MM_JSON_OBJ : MM_JSON_ARR;
  if (!mm_scan_open(&r->scan, open, r->err)) return false;
  for (bool first = true, more;; first = false) {
    mm_scan_str s;
    char *key = NULL;
    size_t n = 0;
    if (!mm_scan_more(&r->scan, keyed ? '}' : ']', first, &more, r->err)) return false;
    if (!more) return !keyed || keys_differ(r, j);
    mm_scan_peek(&r->scan);
    const size_t at = r->scan.pos;
    if (r->values++ == MAX_VALUES)
      return mm_fail(r->err, MM_LIMIT, "E_LIMIT", mm_at_offset(r->scan.file, NULL, at), "found more than %u values", MAX_VALUES);
    if (keyed && (!mm_scan_key(&r->scan, &s, r->err) || !(key = read_string(r, s, &n)))) return false;
    mm_json *v = n == (key ? strlen(key) : 0) ? read_value(r) : (REFUSE(r, at, "E_JSON", "found a key with a NUL character"), NULL);
    if (!v) return free(key), false;
    v->at = at;
    if (!add(j, key, v)) return mm_fail_memory(r->err, 2 * j->n * sizeof(member));
  }
}

static mm_json *read_value(reader *r) {
  mm_json *j = mm_calloc(1, sizeof *j, r->err);
  const char c = mm_scan_peek(&r->scan);
  mm_scan_str s;
  bool ok = j != NULL;
  if (ok && (c == '{' || c == '[')) {
    ok = read_members(r, j, c);
  } else if (ok && c == '"') {
    ok = mm_scan_string(&r->scan, &s, r->err) && (j->string = read_string(r, s, &j->n));
    if (ok) j->type = MM_JSON_STR;
  } else if (ok && (c == 't' || c == 'f' || c == 'n')) {
    ok = mm_scan_skip(&r->scan, r->err);
    j->type = c == 'n' ? MM_JSON_NULL : MM_JSON_BOOL;
    j->truth = c == 't';
  } else if (ok) {
    ok = read_number(r, j);
  }
  if (ok) return j;
  mm_json_free(j);
  return NULL;
}

mm_json *mm_json_parse(const char *text, size_t n, const char *file, mm_err *err) {
  reader r = {.scan = {.text = text, .len = n, .file = file, .status = MM_BAD_INPUT}, .err = err};
  mm_json *j = mm_calloc(1, sizeof *j, err);
  if (j && read_members(&r, j, mm_scan_peek(&r.scan) == '[' ? '[' : '{') && mm_scan_end(&r.scan, err)) return j;
  mm_json_free(j);
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

/* Values */

mm_json_type mm_json_type_of(const mm_json *j) { return j ? j->type : MM_JSON_NULL; }

/* The place of a key in an object; its size where there is none. */
static size_t place_of(const mm_json *obj, const char *key) {
  size_t i = 0;
  while (i < obj->n && strcmp(obj->member[i].key, key) != 0) i++;
  return i;
}

const mm_json *mm_json_get(const mm_json *obj, const char *key) {
  const size_t i = mm_json_type_of(obj) == MM_JSON_OBJ ? place_of(obj, key) : 0;
  return mm_json_type_of(obj) == MM_JSON_OBJ && i < obj->n ? obj->member[i].value : NULL;
}

size_t mm_json_size(const mm_json *j) { return j && holds(j) ? j->n : 0; }
const mm_json *mm_json_at(const mm_json *arr, size_t i) {
  return mm_json_type_of(arr) == MM_JSON_ARR && i < arr->n ? arr->member[i].value : NULL;
}

bool mm_json_next(const mm_json *obj, void **iter, const char **key, const mm_json **value) {
  if (mm_json_type_of(obj) != MM_JSON_OBJ || obj->n == 0) return false;
  member *m = *iter ? (member *)*iter + 1 : obj->member;
  if (m == obj->member + obj->n) return false;
  *iter = m;
  *key = m->key;
  *value = m->value;
  return true;
}

int64_t mm_json_int(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_INT ? j->integer : 0; }
double mm_json_number(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_REAL ? j->real : (double)mm_json_int(j); }
bool mm_json_bool(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_BOOL && j->truth; }
const char *mm_json_str(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_STR ? j->string : NULL; }
size_t mm_json_str_len(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_STR ? j->n : 0; }

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
  if (mm_json_type_of(j) != MM_JSON_INT && mm_json_type_of(j) != MM_JSON_REAL) return wrong_type(j, key, "a number", c, err);
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

/* Building */

static mm_json *node(mm_json n) {
  mm_json *j = malloc(sizeof *j);
  if (j) *j = n;
  return j;
}

/* NULL for what is not UTF-8, too. */
static char *copy_text(const char *s) {
  const size_t n = strlen(s);
  for (size_t i = 0, len; i < n; i += len)
    if (!(len = mm_utf8_len(s + i, n - i))) return NULL;
  return strdup(s);
}

mm_json *mm_json_new_obj(void) { return node((mm_json){.type = MM_JSON_OBJ}); }
mm_json *mm_json_new_arr(void) { return node((mm_json){.type = MM_JSON_ARR}); }
mm_json *mm_json_new_int(int64_t v) { return node((mm_json){.type = MM_JSON_INT, .integer = v}); }
mm_json *mm_json_new_real(double v) { return isfinite(v) ? node((mm_json){.type = MM_JSON_REAL, .real = v}) : NULL; }
mm_json *mm_json_new_bool(bool v) { return node((mm_json){.type = MM_JSON_BOOL, .truth = v}); }

mm_json *mm_json_new_str(const char *s) {
  char *own = s ? copy_text(s) : NULL;
  mm_json *j = own ? node((mm_json){.type = MM_JSON_STR, .n = strlen(s), .string = own}) : NULL;
  if (!j) free(own);
  return j;
}

bool mm_json_set(mm_json *obj, const char *key, mm_json *value) {
  const size_t i = obj && value ? place_of(obj, key) : 0;
  if (obj && value && i < obj->n) {
    mm_json_free(obj->member[i].value);
    obj->member[i].value = value;
    return true;
  }
  char *own = obj && value ? copy_text(key) : NULL;
  if (own) return add(obj, own, value);
  mm_json_free(value);
  return false;
}

bool mm_json_append(mm_json *arr, mm_json *value) {
  if (arr && value) return add(arr, NULL, value);
  mm_json_free(value);
  return false;
}

void mm_json_remove(mm_json *obj, const char *key) {
  const size_t i = place_of(obj, key);
  if (i == obj->n) return;
  free(obj->member[i].key);
  mm_json_free(obj->member[i].value);
  memmove(&obj->member[i], &obj->member[i + 1], (--obj->n - i) * sizeof(member));
}

/* Writing */

/* The character of len bytes at s by its number. */
static void write_escape(FILE *f, const char *s, size_t len) {
  uint32_t c = (uint8_t)*s & (0x7Fu >> (len > 1 ? len : 0));
  for (size_t i = 1; i < len; i++) c = c << 6 | ((uint8_t)s[i] & 0x3F);
  if (c > 0xFFFF)
    fprintf(f, "\\u%04X\\u%04X", 0xD7C0 + (c >> 10), 0xDC00 + (c & 0x3FF));
  else
    fprintf(f, "\\u%04X", c);
}

static void write_string(FILE *f, const char *s, size_t n, bool ascii) {
  static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
  putc('"', f);
  for (size_t i = 0, start = 0; i <= n;) {
    const uint8_t c = i < n ? (uint8_t)s[i] : 0;
    const char *p = c ? strchr(from, c) : NULL;
    if (c >= 0x20 && !p && !(ascii && c >= 0x7F) && ++i) continue;
    fwrite(s + start, 1, i - start, f);
    const size_t len = i < n ? mm_utf8_len(s + i, n - i) : 1;
    if (p)
      fprintf(f, "\\%c", to[p - from]);
    else if (i < n)
      write_escape(f, s + i, len);
    start = i += len;
  }
  putc('"', f);
}

/* With a point or an exponent, so that it is read as a real number again; the exponent without plus and zeros. */
static void write_real(FILE *f, double v) {
  char text[32];
  const locale_t own = uselocale(newlocale(LC_ALL_MASK, "C", (locale_t)0));
  snprintf(text, sizeof text, "%.17g", v);
  uselocale(own);
  char *e = strchr(text, 'e');
  if (e) *e++ = 0;
  fputs(text, f);
  if (e)
    fprintf(f, "e%ld", strtol(e, NULL, 10));
  else if (!strchr(text, '.'))
    fputs(".0", f);
}

static void write_value(FILE *f, const mm_json *j, bool pretty, int depth);

static void write_members(FILE *f, const mm_json *j, bool pretty, int depth) {
  const bool keyed = j->type == MM_JSON_OBJ;
  putc(keyed ? '{' : '[', f);
  for (size_t i = 0; i < j->n; i++) {
    if (i) putc(',', f);
    if (pretty) fprintf(f, "\n%*s", depth + 1, "");
    if (keyed) write_string(f, j->member[i].key, strlen(j->member[i].key), pretty);
    if (keyed) fputs(pretty ? ": " : ":", f);
    write_value(f, j->member[i].value, pretty, depth + 1);
  }
  if (pretty && j->n) fprintf(f, "\n%*s", depth, "");
  putc(keyed ? '}' : ']', f);
}

static void write_value(FILE *f, const mm_json *j, bool pretty, int depth) {
  switch (j->type) {
    case MM_JSON_NULL: fputs("null", f); break;
    case MM_JSON_BOOL: fputs(j->truth ? "true" : "false", f); break;
    case MM_JSON_INT: fprintf(f, "%" PRId64, j->integer); break;
    case MM_JSON_REAL: write_real(f, j->real); break;
    case MM_JSON_STR: write_string(f, j->string, j->n, pretty); break;
    case MM_JSON_ARR:
    case MM_JSON_OBJ: write_members(f, j, pretty, depth); break;
  }
}

char *mm_json_dump(const mm_json *j, bool pretty) {
  char *text = NULL;
  size_t n;
  FILE *f = open_memstream(&text, &n);
  if (!f) return NULL;
  write_value(f, j, pretty, 0);
  if (mm_close_text(f, &text)) return text;
  free(text);
  return NULL;
}
