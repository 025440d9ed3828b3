/* JSON documents: trees of what scan.h reads, building and writing. */
#include "formats/json.h"

#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/scan.h"
#include "formats/system/file.h"

#define MAX_VALUES   (UINT32_C(4) << 20) /* some 100 bytes each */
#define FEW_KEYS     16                  /* are compared in pairs */
#define PACKED_BYTES (MM_HEX_LEN + 3)    /* of a digest in a packed array: its digits, quotes and comma */

/* Who frees a node. */
typedef enum home {
  BUILT, /* mm_json_free: the node, its string or its members, their keys and values */
  ROOT,  /* of what was read: the same, with the arena of all that was read */
  PART,  /* below such a root, in its arena */
} home;

/* How an object or array holds its members. */
typedef enum form {
  LOOSE,  /* member: pointers, as many as the next power of two; the keys of a built one are on their own, else in the arena */
  TIGHT,  /* item: the values themselves, as they were read; a root object is loose at once, so that it can change under whoever borrows */
  PACKED, /* digest: the text of digests, which has none */
} form;

typedef struct member {
  const char *key; /* NULL in an array */
  mm_json *value;
} member;

struct mm_json {
  uint8_t type; /* mm_json_type */
  uint8_t home, form;
  bool failed; /* to take a member */
  size_t n;    /* bytes of a string, members of an object or array */
  union {
    int64_t integer;
    double real;
    bool truth;
    char *string; /* terminated */
    member *member;
    struct item *item;
    const char *digest; /* the quote of the first one */
  };
};

typedef struct item {
  const char *key;
  mm_json value;
} item;

typedef struct document {
  mm_json root;
  mm_arena arena;
} document;

static bool holds(const mm_json *j) { return j->type == MM_JSON_OBJ || j->type == MM_JSON_ARR; }
static mm_arena *arena_of(mm_json *root) { return &((document *)(void *)root)->arena; }
static const char *key_at(const mm_json *j, size_t i) { return j->form == TIGHT ? j->item[i].key : j->member[i].key; }
static mm_json *value_at(const mm_json *j, size_t i) { return j->form == TIGHT ? &j->item[i].value : j->member[i].value; }
/* The digits of a packed array's i-th digest. */
static const char *packed_at(const mm_json *j, size_t i) { return j->digest + i * PACKED_BYTES + 1; }

static void free_member(mm_json *j, size_t i) {
  if (j->home == BUILT) free((char *)(uintptr_t)j->member[i].key);
  mm_json_free(j->member[i].value);
}

void mm_json_free(mm_json *j) {
  if (!j || j->home == PART) return;
  for (size_t i = 0; holds(j) && j->form == LOOSE && i < j->n; i++) free_member(j, i);
  if (j->home == ROOT)
    mm_arena_close(arena_of(j));
  else if (holds(j))
    free(j->member);
  else if (j->type == MM_JSON_STR)
    free(j->string);
  free(j);
}

/* Room for another member. The arena of a root keeps what was there before. */
static bool widen(mm_json *j) {
  size_t capacity = 1;
  while (capacity <= j->n) capacity *= 2;
  member *m = j->home == BUILT ? realloc(j->member, capacity * sizeof *m) : mm_arena_alloc(arena_of(j), capacity * sizeof *m, MM_IGNORED);
  if (!m) return false;
  for (size_t i = 0; j->home == ROOT && i < j->n; i++) m[i] = (member){key_at(j, i), value_at(j, i)};
  j->member = m;
  j->form = LOOSE;
  return true;
}

/* Reading */

/* A member of an object or array that is not closed yet. */
typedef struct entry {
  item item;
  size_t at; /* the byte of its key, or of the value where it has none */
} entry;

/* A key of at most 16 bytes that was met: most objects of a document have the keys of others. */
typedef struct known {
  uint64_t head, tail; /* its first and, of more than 8, its last 8 bytes */
  size_t n;
  const char *key;
} known;

typedef struct reader {
  mm_scan scan;
  mm_arena *arena;
  entry *open; /* of all that are open, outermost first */
  size_t open_count, open_cap;
  uint32_t values;
  bool pack; /* arrays of digests */
  mm_err *err;
  known known[64];
} reader;

#define REFUSE(r, place, code, ...) mm_fail((r)->err, (r)->scan.status, code, mm_at_offset((r)->scan.file, NULL, place), __VA_ARGS__)

/* An integer as mm_scan_number found it; false where 64 bits do not hold it. */
static bool integer_of(mm_scan_str s, int64_t *out) {
  const bool negative = *s.p == '-';
  uint64_t v = 0;
  for (size_t i = negative; i < s.n; i++)
    if (!mm_mul(v, 10, &v) || !mm_add(v, (uint64_t)(s.p[i] - '0'), &v)) return false;
  if (v > (uint64_t)INT64_MAX + negative) return false;
  *out = (int64_t)(negative ? -v : v);
  return true;
}

/* The text ends where the caller says, not in a NUL, so real numbers are converted from a copy. */
static bool real_of(const reader *r, mm_scan_str s, double *out) {
  char few[64], *const text = s.n < sizeof few ? few : mm_calloc(s.n + 1, 1, r->err);
  if (!text) return false;
  memcpy(text, s.p, s.n);
  text[s.n] = 0;
  *out = strtod_l(text, NULL, newlocale(LC_ALL_MASK, "C", (locale_t)0));
  if (text != few) free(text);
  return isfinite(*out);
}

static bool read_number(reader *r, mm_json *j) {
  mm_scan_str s;
  bool real;
  if (!mm_scan_number(&r->scan, &s, &real, r->err)) return false;
  j->type = real ? MM_JSON_REAL : MM_JSON_INT;
  if (real ? real_of(r, s, &j->real) : integer_of(s, &j->integer)) return true;
  r->scan.pos -= s.n;
  return REFUSE(r, r->scan.pos, "E_NUMBER", "found %s, expected %s", MM_FOUND(&r->scan),
                real ? "a number of double precision" : "an integer of 64 bits");
}

/* A key and its first eight bytes as a number, which sorts as they do. */
typedef struct sorted {
  uint64_t first;
  const entry *of;
} sorted;

static int by_key(const void *a, const void *b) {
  const sorted *x = a, *y = b;
  if (x->first != y->first) return x->first < y->first ? -1 : 1;
  const int order = strcmp(x->of->item.key, y->of->item.key);
  return order ? order : (x->of > y->of) - (x->of < y->of);
}

static bool same_key(const char *a, const char *b) { return *a == *b && strcmp(a, b) == 0; }

static bool few_differ(const entry *e, size_t n) {
  for (size_t i = 1; i < n; i++)
    for (size_t k = 0; k < i; k++)
      if (same_key(e[i].item.key, e[k].item.key)) return false;
  return true;
}

static bool keys_differ(const reader *r, const entry *e, size_t n) {
  if (n <= FEW_KEYS && few_differ(e, n)) return true;
  sorted *m = mm_calloc(n, sizeof *m, r->err);
  if (!m) return false;
  for (size_t i = 0; i < n; i++) {
    uint64_t first;
    memcpy(&first, e[i].item.key, sizeof first); /* what is behind a key are zeros of the arena */
    m[i] = (sorted){__builtin_bswap64(first), &e[i]};
  }
  mm_sort(m, n, sizeof *m, by_key);
  size_t i = 1;
  while (i < n && (m[i - 1].first != m[i].first || strcmp(m[i - 1].of->item.key, m[i].of->item.key) != 0)) i++;
  const char *const key = i < n ? m[i].of->item.key : NULL;
  if (key) REFUSE(r, m[i].of->at, "E_JSON", "found key \"%s\" twice, expected once", MM_ESCAPED(256, key));
  free(m);
  return !key;
}

/* An array of digests alone, without white space, as a whole; false, and nothing consumed, for every other and for one beyond the limit, of
 * which the ordinary way says what and where. */
static bool read_packed(reader *r, mm_json *j) {
  const char *first = r->scan.text + r->scan.pos + 1, *const end = r->scan.text + r->scan.len, *p = first;
  mm_digest d;
  size_t n = 0;
  do {
    if (end - p < PACKED_BYTES || *p != '"' || p[MM_HEX_LEN + 1] != '"' || !mm_digest_parse(p + 1, MM_HEX_LEN, &d)) return false;
    p += PACKED_BYTES;
    n++;
  } while (p[-1] == ',');
  if (p[-1] != ']' || r->scan.depth >= MM_SCAN_DEPTH || n > MAX_VALUES - r->values) return false;
  r->values += (uint32_t)n;
  r->scan.pos = (size_t)(p - r->scan.text);
  *j = (mm_json){.type = MM_JSON_ARR, .home = PART, .form = PACKED, .n = n, .digest = first};
  return true;
}

/* The key in the arena, with seven zeros more behind it than its end, and once for all that are the same. */
static const char *keep_text(reader *r, mm_scan_str s, size_t at) {
  const char *const end = r->scan.text + r->scan.len;
  known now = {.n = s.n}, *k = NULL;
  if (!s.escaped && s.n <= 16 && end - s.p >= 8) {
    memcpy(&now.head, s.p, 8);
    if (s.n < 8) now.head &= (UINT64_C(1) << 8 * s.n) - 1;
    if (s.n > 8) memcpy(&now.tail, s.p + s.n - 8, 8);
    k = &r->known[mm_scatter(now.head ^ now.tail) % (sizeof r->known / sizeof *k)];
    if (k->key && k->head == now.head && k->tail == now.tail && k->n == now.n) return k->key;
  }
  char *key = mm_arena_alloc(r->arena, s.n + 8, r->err);
  if (!key) return NULL;
  const size_t n = mm_scan_copy(s, key);
  if (s.escaped && memchr(key, 0, n)) {
    REFUSE(r, at, "E_JSON", "found a key with a NUL character, expected text");
    return NULL;
  }
  now.key = key;
  if (k) *k = now;
  return key;
}

static bool read_value(reader *r, mm_json *j);

/* The next member, behind those that are open. */
static bool read_member(reader *r, bool keyed) {
  mm_scan_str s;
  mm_scan_peek(&r->scan);
  entry e = {.item.value.home = PART, .at = r->scan.pos};
  if (r->values++ == MAX_VALUES)
    return mm_fail(r->err, MM_LIMIT, "E_LIMIT", mm_at_offset(r->scan.file, NULL, e.at), "found more than %u values", MAX_VALUES);
  if (keyed && !mm_scan_key(&r->scan, &s, r->err)) return false;
  if (keyed && !(e.item.key = keep_text(r, s, e.at))) return false;
  if (!read_value(r, &e.item.value)) return false;
  if (r->open_count == r->open_cap && !MM_GROW(r->open, &r->open_cap, r->open_count + 1, r->err)) return false;
  r->open[r->open_count++] = e;
  return true;
}

/* Moves the open entries from the first-th on into j, whose members they are. */
static bool close_members(reader *r, mm_json *j, size_t first) {
  const size_t n = r->open_count - first;
  const entry *const e = n ? r->open + first : NULL;
  if (j->type == MM_JSON_OBJ && n > 1 && !keys_differ(r, e, n)) return false;
  if (n && !(j->item = mm_arena_alloc(r->arena, n * sizeof *j->item, r->err))) return false;
  for (size_t i = 0; i < n; i++) j->item[i] = e[i].item;
  j->form = TIGHT;
  j->n = n;
  r->open_count = first;
  return true;
}

/* Recursion ends at the depth that mm_scan_open allows. */
static bool read_members(reader *r, mm_json *j, char open) {
  const bool keyed = open == '{';
  const size_t first = r->open_count;
  if (!mm_scan_open(&r->scan, open, r->err)) return false;
  j->type = keyed ? MM_JSON_OBJ : MM_JSON_ARR;
  for (bool none = true, more;; none = false) {
    if (!mm_scan_more(&r->scan, keyed ? '}' : ']', none, &more, r->err)) return false;
    if (!more) return close_members(r, j, first);
    if (!read_member(r, keyed)) return false;
  }
}

/* Into a zeroed node. */
static bool read_value(reader *r, mm_json *j) {
  const char c = mm_scan_peek(&r->scan);
  mm_scan_str s;
  switch (c) {
    case '[': return (r->pack && read_packed(r, j)) || read_members(r, j, c);
    case '{': return read_members(r, j, c);
    case '"':
      if (!mm_scan_string(&r->scan, &s, r->err) || !(j->string = mm_scan_unescape(r->arena, s, &j->n, r->err))) return false;
      j->type = MM_JSON_STR;
      return true;
    case 't':
    case 'f':
    case 'n':
      j->type = c == 'n' ? MM_JSON_NULL : MM_JSON_BOOL;
      j->truth = c == 't';
      return mm_scan_skip(&r->scan, r->err);
    default: return read_number(r, j);
  }
}

/* `expected`: the bracket that is named where there is neither. */
static mm_json *parse(const char *text, size_t n, bool pack, char expected, const char *file, mm_err *err) {
  document *d = mm_calloc(1, sizeof *d, err);
  if (!d) return NULL;
  d->root.home = ROOT;
  reader r = {.scan = {.text = text, .len = n, .file = file, .status = MM_BAD_INPUT}, .arena = &d->arena, .pack = pack, .err = err};
  const char first = mm_scan_peek(&r.scan);
  bool ok = read_members(&r, &d->root, first == '[' || first == '{' ? first : expected) && mm_scan_end(&r.scan, err);
  free(r.open);
  if (ok && d->root.type == MM_JSON_OBJ && !widen(&d->root)) ok = mm_fail_memory(err, d->root.n * sizeof(member));
  if (ok) return &d->root;
  mm_json_free(&d->root);
  return NULL;
}

mm_json *mm_json_parse(const char *text, size_t n, const char *file, mm_err *err) { return parse(text, n, false, '{', file, err); }
mm_json *mm_json_parse_packed(const char *text, size_t n, const char *file, mm_err *err) { return parse(text, n, true, '{', file, err); }

static mm_json *load(const char *path, uint64_t max_bytes, char expected, mm_err *err) {
  size_t n;
  char *text = mm_file_slurp(path, max_bytes, &n, err);
  if (!text) return NULL;
  mm_json *j = parse(text, n, false, expected, path, err);
  free(text);
  return j;
}

mm_json *mm_json_load(const char *path, uint64_t max_bytes, mm_err *err) { return load(path, max_bytes, '{', err); }
mm_json *mm_json_load_list(const char *path, uint64_t max_bytes, mm_err *err) { return load(path, max_bytes, '[', err); }

/* Values */

mm_json_type mm_json_type_of(const mm_json *j) { return j ? (mm_json_type)j->type : MM_JSON_NULL; }

/* The place of a key in an object; its size where there is none. */
static size_t place_of(const mm_json *obj, const char *key) {
  size_t i = 0;
  while (i < obj->n && !same_key(key_at(obj, i), key)) i++;
  return i;
}

const mm_json *mm_json_get(const mm_json *obj, const char *key) {
  const size_t i = mm_json_type_of(obj) == MM_JSON_OBJ ? place_of(obj, key) : 0;
  return mm_json_type_of(obj) == MM_JSON_OBJ && i < obj->n ? value_at(obj, i) : NULL;
}

bool mm_json_packed(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_ARR && j->form == PACKED; }
size_t mm_json_size(const mm_json *j) { return j && holds(j) ? j->n : 0; }
const mm_json *mm_json_at(const mm_json *arr, size_t i) {
  return mm_json_type_of(arr) == MM_JSON_ARR && arr->form != PACKED && i < arr->n ? value_at(arr, i) : NULL;
}

bool mm_json_digest(const mm_json *arr, size_t i, mm_digest *out) {
  if (mm_json_packed(arr)) return i < arr->n && mm_digest_parse(packed_at(arr, i), MM_HEX_LEN, out);
  const mm_json *j = mm_json_at(arr, i);
  return mm_json_type_of(j) == MM_JSON_STR && mm_digest_parse(j->string, j->n, out);
}

bool mm_json_next(const mm_json *obj, void **iter, const char **key, const mm_json **value) {
  const size_t i = (size_t)(uintptr_t)*iter; /* how many were had */
  if (mm_json_type_of(obj) != MM_JSON_OBJ || i >= obj->n) return false;
  *iter = (void *)(uintptr_t)(i + 1);
  *key = key_at(obj, i);
  *value = value_at(obj, i);
  return true;
}

int64_t mm_json_int(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_INT ? j->integer : 0; }
double mm_json_number(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_REAL ? j->real : (double)mm_json_int(j); }
bool mm_json_bool(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_BOOL && j->truth; }
const char *mm_json_str(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_STR ? j->string : NULL; }
size_t mm_json_str_len(const mm_json *j) { return mm_json_type_of(j) == MM_JSON_STR ? j->n : 0; }

bool mm_json_is(const mm_json *j, const char *string) {
  return mm_json_type_of(j) == MM_JSON_STR && j->n == strlen(string) && memcmp(j->string, string, j->n) == 0;
}

/* Building */

static mm_json *node(mm_json n) {
  mm_json *j = malloc(sizeof *j);
  if (j) *j = n;
  return j;
}

static bool utf8(const char *s, size_t n) {
  size_t len = 1;
  for (size_t i = 0; i < n && len; i += len) len = mm_utf8_len(s + i, n - i);
  return len;
}

mm_json *mm_json_new_obj(void) { return node((mm_json){.type = MM_JSON_OBJ}); }
mm_json *mm_json_new_arr(void) { return node((mm_json){.type = MM_JSON_ARR}); }
mm_json *mm_json_new_int(int64_t v) { return node((mm_json){.type = MM_JSON_INT, .integer = v}); }
mm_json *mm_json_new_real(double v) { return isfinite(v) ? node((mm_json){.type = MM_JSON_REAL, .real = v}) : NULL; }
mm_json *mm_json_new_bool(bool v) { return node((mm_json){.type = MM_JSON_BOOL, .truth = v}); }

mm_json *mm_json_new_bytes(const char *s, size_t n) {
  char *own = utf8(s, n) ? malloc(n + 1) : NULL;
  mm_json *j = own ? node((mm_json){.type = MM_JSON_STR, .n = n, .string = own}) : NULL;
  if (!j) free(own);
  if (j && n) memcpy(own, s, n);
  if (j) own[n] = 0;
  return j;
}

mm_json *mm_json_new_str(const char *s) { return s ? mm_json_new_bytes(s, strlen(s)) : NULL; }

mm_json *mm_json_new_digest(const mm_digest *d) { return mm_json_new_str(mm_digest_hex(d).text); }

/* A part of what was read stays as it is: it is only ever had as const. */
static bool may_change(const mm_json *j) { return j && j->home != PART; }

/* A key as obj keeps it. */
static char *keep_key(mm_json *obj, const char *key) {
  if (!utf8(key, strlen(key))) return NULL;
  return obj->home == BUILT ? strdup(key) : mm_arena_strndup(arena_of(obj), key, strlen(key), MM_IGNORED);
}

/* Takes value, where it fails too. */
static mm_json *add(mm_json *to, const char *key, mm_json *value) {
  const bool full = to->form == TIGHT || (to->n & (to->n - 1)) == 0;
  char *own = NULL;
  if (value && (!full || widen(to)) && (!key || (own = keep_key(to, key)))) {
    to->member[to->n++] = (member){own, value};
    return value;
  }
  to->failed = true;
  mm_json_free(value);
  return NULL;
}

mm_json *mm_json_set(mm_json *obj, const char *key, mm_json *value) {
  const size_t i = may_change(obj) ? place_of(obj, key) : 0;
  if (may_change(obj) && (!value || i == obj->n)) return add(obj, key, value);
  if (may_change(obj)) {
    mm_json_free(obj->member[i].value);
    return obj->member[i].value = value;
  }
  mm_json_free(value);
  return NULL;
}

mm_json *mm_json_append(mm_json *arr, mm_json *value) {
  if (may_change(arr)) return add(arr, NULL, value);
  mm_json_free(value);
  return NULL;
}

mm_json *mm_json_put(mm_json *obj, const mm_json_field *field) {
  for (; field->key; field++) mm_json_set(obj, field->key, field->value);
  return obj;
}

void mm_json_remove(mm_json *obj, const char *key) {
  const size_t i = may_change(obj) ? place_of(obj, key) : 0;
  if (!may_change(obj) || i == obj->n) return;
  free_member(obj, i);
  memmove(&obj->member[i], &obj->member[i + 1], (--obj->n - i) * sizeof(member));
}

/* Writing */

/* The character of len bytes at s by its number. */
static void write_escape(mm_text *t, const char *s, size_t len) {
  const uint32_t c = mm_utf8_next(&s, s + len);
  if (c > 0xFFFF)
    mm_text_printf(t, "\\u%04X\\u%04X", 0xD7C0 + (c >> 10), 0xDC00 + (c & 0x3FF));
  else
    mm_text_printf(t, "\\u%04X", c);
}

static void write_string(mm_text *t, const char *s, size_t n, bool ascii) {
  static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
  mm_text_put(t, "\"");
  for (size_t i = 0, start = 0; i <= n;) {
    const uint8_t c = i < n ? (uint8_t)s[i] : 0;
    const char *p = c ? strchr(from, c) : NULL;
    if (c >= 0x20 && !p && !(ascii && c >= 0x7F) && ++i) continue;
    mm_text_add(t, s + start, i - start);
    const size_t len = i < n ? mm_utf8_len(s + i, n - i) : 1;
    if (p)
      mm_text_printf(t, "\\%c", to[p - from]);
    else if (i < n)
      write_escape(t, s + i, len);
    start = i += len;
  }
  mm_text_put(t, "\"");
}

/* With a point or an exponent, so that it is read as a real number again; the exponent without plus and zeros. */
static void write_real(mm_text *t, double v) {
  const locale_t own = uselocale(newlocale(LC_ALL_MASK, "C", (locale_t)0));
  char *text = MM_FORMATTED(32, "%.17g", v);
  uselocale(own);
  char *e = strchr(text, 'e');
  if (e) *e++ = 0;
  mm_text_put(t, text);
  if (e)
    mm_text_printf(t, "e%ld", strtol(e, NULL, 10));
  else if (!strchr(text, '.'))
    mm_text_put(t, ".0");
}

static void write_value(mm_text *t, const mm_json *j, bool pretty, int depth);

static void write_members(mm_text *t, const mm_json *j, bool pretty, int depth) {
  const bool keyed = j->type == MM_JSON_OBJ;
  mm_text_put(t, keyed ? "{" : "[");
  for (size_t i = 0; i < j->n; i++) {
    if (i) mm_text_put(t, ",");
    if (pretty) mm_text_printf(t, "\n%*s", depth + 1, "");
    if (keyed) write_string(t, key_at(j, i), strlen(key_at(j, i)), pretty);
    if (keyed) mm_text_put(t, pretty ? ": " : ":");
    if (j->form == PACKED)
      write_string(t, packed_at(j, i), MM_HEX_LEN, pretty);
    else
      write_value(t, value_at(j, i), pretty, depth + 1);
  }
  if (pretty && j->n) mm_text_printf(t, "\n%*s", depth, "");
  mm_text_put(t, keyed ? "}" : "]");
}

static void write_value(mm_text *t, const mm_json *j, bool pretty, int depth) {
  switch (j->type) {
    case MM_JSON_NULL: mm_text_put(t, "null"); break;
    case MM_JSON_BOOL: mm_text_put(t, j->truth ? "true" : "false"); break;
    case MM_JSON_INT: mm_text_printf(t, "%" PRId64, j->integer); break;
    case MM_JSON_REAL: write_real(t, j->real); break;
    case MM_JSON_STR: write_string(t, j->string, j->n, pretty); break;
    case MM_JSON_ARR:
    case MM_JSON_OBJ: write_members(t, j, pretty, depth); break;
  }
}

bool mm_json_failed(const mm_json *j) {
  bool failed = !j || j->failed;
  for (size_t i = 0; !failed && holds(j) && j->form != PACKED && i < j->n; i++) failed = mm_json_failed(value_at(j, i));
  return failed;
}

void mm_json_write(mm_text *t, const mm_json *j, bool pretty) {
  t->failed = t->failed || mm_json_failed(j);
  if (!t->failed) write_value(t, j, pretty, 0);
}

char *mm_json_dump(const mm_json *j, bool pretty) {
  mm_text t = {0};
  mm_json_write(&t, j, pretty);
  return mm_text_take(&t, MM_IGNORED);
}

char *mm_json_text(mm_json *j, bool pretty, mm_err *err) {
  mm_text t = {0};
  mm_json_write(&t, j, pretty);
  mm_json_free(j);
  return mm_text_take(&t, err);
}

mm_json *mm_json_copy(const mm_json *j, mm_err *err) {
  char *text = mm_json_dump(j, false);
  mm_json *copy = text ? mm_json_parse(text, strlen(text), "copy", err) : NULL;
  if (!text) mm_fail_memory(err, 0);
  free(text);
  return copy;
}
