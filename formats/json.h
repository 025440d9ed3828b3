/* JSON documents of moderate size: configs, manifests, tokenizers. Arrays or objects, read as strictly as scan.h does; duplicate keys, NUL
 * characters in keys, more than 4 Mi values and sizes beyond the caller's limit are refused too, each with its byte position. Large
 * untrusted maps (safetensors headers, indexes) go through scan.h.
 *
 * Not jansson: it gives no position of a duplicate key, no exact text of a number, and takes longer. An index of 7,680 tensors (0.74 MB)
 * takes 0.82 ms here; jansson 2.14 takes 23 ms with duplicate keys refused and 7 ms with them accepted (best of 7, one thread, 2026-11-29).
 * It would save some hundred lines and add a package. */
#ifndef MM_FORMATS_JSON_H
#define MM_FORMATS_JSON_H

#include "formats/hash.h"
#include "formats/text.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A node. Owned ones, which parse, load and new_… give, are released with mm_json_free; borrowed ones, which get, at and next give, never.
 * All that was read lies in memory of the root, which goes with the root and not before: what is removed or replaced there stays until
 * then. The root itself may be changed as what was built, and may become part of it; what is below it is borrowed, const, and stays as it
 * was read. */
typedef struct mm_json mm_json;

/* Parses n bytes; `file` is for messages. MM_BAD_INPUT E_JSON on malformed text. */
mm_json *mm_json_parse(const char *text, size_t n, const char *file, mm_err *err);
/* The same of a text that outlives the tree. An array of digests alone (64 lower-case hexadecimal digits each), written without white
 * space, is packed: it is checked, but not made into nodes. mm_json_size counts its digests, mm_json_digest reads them from the text,
 * mm_json_at gives none. */
mm_json *mm_json_parse_packed(const char *text, size_t n, const char *file, mm_err *err);
/* Reads and parses a regular file of at most max_bytes (E_LIMIT beyond). */
mm_json *mm_json_load(const char *path, uint64_t max_bytes, mm_err *err);
/* The same of a file that is to be a list, as its failures say; an object is read, too. */
mm_json *mm_json_load_list(const char *path, uint64_t max_bytes, mm_err *err);
void mm_json_free(mm_json *j); /* accepts NULL */

typedef enum mm_json_type { MM_JSON_NULL, MM_JSON_BOOL, MM_JSON_INT, MM_JSON_REAL, MM_JSON_STR, MM_JSON_ARR, MM_JSON_OBJ } mm_json_type;
mm_json_type mm_json_type_of(const mm_json *j); /* NULL counts as MM_JSON_NULL */

/* Borrowed; NULL when absent (a present null gives a node of type MM_JSON_NULL). */
const mm_json *mm_json_get(const mm_json *obj, const char *key);
size_t mm_json_size(const mm_json *arr_or_obj);
const mm_json *mm_json_at(const mm_json *arr, size_t i);
bool mm_json_packed(const mm_json *arr); /* every one is a digest */
/* Digest i of an array, packed or not; false where it is none. */
bool mm_json_digest(const mm_json *arr, size_t i, mm_digest *out);
/* Iterates an object in insertion order: start with *iter = NULL, ends with false. */
bool mm_json_next(const mm_json *obj, void **iter, const char **key, const mm_json **value);

/* Of values of other types 0, false or NULL. Strings may hold NUL bytes: use the length. */
int64_t mm_json_int(const mm_json *j);
double mm_json_number(const mm_json *j); /* MM_JSON_INT or MM_JSON_REAL */
bool mm_json_bool(const mm_json *j);
const char *mm_json_str(const mm_json *j);
size_t mm_json_str_len(const mm_json *j);
bool mm_json_is(const mm_json *j, const char *string); /* is this string, NUL bytes compared too */
/* The same value, whatever the order of keys, and however numbers are written; null is as good as absent. */
bool mm_json_same(const mm_json *a, const mm_json *b);

/* Required fields. status/code say whose fault a violation is: a config (MM_BAD_INPUT, "E_CFG_TYPE"/"E_CFG_RANGE") or
 * a manifest (MM_INTEGRITY, "E_MANIFEST"). The line names file and key, what was found and what was expected. */
typedef struct mm_json_ctx {
  const char *file;
  mm_status status;
  const char *code;
} mm_json_ctx;
/* mm_fail as ctx says. */
#define MM_REFUSE(ctx, err, ...) mm_fail(err, (ctx)->status, (ctx)->code, mm_at((ctx)->file, NULL), __VA_ARGS__)
MM_MUST_USE bool mm_json_need_int(const mm_json *obj, const char *key, int64_t lo, int64_t hi, int64_t *out, const mm_json_ctx *c,
                                  mm_err *err);
MM_MUST_USE bool mm_json_need_number(const mm_json *obj, const char *key, double *out, const mm_json_ctx *c, mm_err *err);
MM_MUST_USE bool mm_json_need_bool(const mm_json *obj, const char *key, bool *out, const mm_json_ctx *c, mm_err *err);
MM_MUST_USE bool mm_json_need_str(const mm_json *obj, const char *key, const char **out, const mm_json_ctx *c, mm_err *err);
const mm_json *mm_json_need(const mm_json *obj, const char *key, mm_json_type type, const mm_json_ctx *c, mm_err *err);
/* Every key of obj is among the NULL-terminated list, else fails naming the first unknown one. */
MM_MUST_USE bool mm_json_only_keys(const mm_json *obj, const char *const *keys, const mm_json_ctx *c, mm_err *err);

/* Building. New nodes are owned. A failure is want of memory, text that is not UTF-8 or a number that is not finite; it stays in the tree:
 * NULL as a value fails its container, NULL as a container is passed over, so calls need no check before mm_json_dump or mm_json_failed. */
mm_json *mm_json_new_obj(void);
mm_json *mm_json_new_arr(void);
mm_json *mm_json_new_str(const char *s);             /* NULL for a NULL s, and for what is not UTF-8 */
mm_json *mm_json_new_path(const char *path);         /* new_str; of a name that is not UTF-8 as messages show it (mm_escape) */
mm_json *mm_json_new_bytes(const char *s, size_t n); /* the same of n bytes, NUL among them */
mm_json *mm_json_new_int(int64_t v);
static inline mm_json *mm_json_new_u64(uint64_t v) { return mm_json_new_int((int64_t)v); } /* at most INT64_MAX */
mm_json *mm_json_new_real(double v);                                                       /* finite; written with 17 significant digits */
mm_json *mm_json_new_bool(bool v);
mm_json *mm_json_new_digest(const mm_digest *d); /* its hexadecimal digits */
/* Take value over, also where they fail; return it, borrowed, or NULL. */
mm_json *mm_json_set(mm_json *obj, const char *key, mm_json *value);
mm_json *mm_json_append(mm_json *arr, mm_json *value);
/* Sets fields up to one without a key; returns obj. */
typedef struct mm_json_field {
  const char *key;
  mm_json *value;
} mm_json_field;
mm_json *mm_json_put(mm_json *obj, const mm_json_field *field);
#define MM_JSON_PUT(obj, ...) mm_json_put(obj, (const mm_json_field[]){__VA_ARGS__, {NULL, NULL}})
#define MM_JSON_NEW(...)      MM_JSON_PUT(mm_json_new_obj(), __VA_ARGS__)
static inline mm_json *mm_json_put_text(mm_json *obj, const char *key, const char *text) {
  return mm_json_set(obj, key, mm_json_new_str(text));
}
static inline mm_json *mm_json_put_int(mm_json *obj, const char *key, uint64_t n) { return mm_json_set(obj, key, mm_json_new_u64(n)); }
static inline mm_json *mm_json_put_list(mm_json *obj, const char *key) { return mm_json_set(obj, key, mm_json_new_arr()); }
bool mm_json_failed(const mm_json *j);              /* a failure in it or below it; NULL is one */
void mm_json_remove(mm_json *obj, const char *key); /* absent: nothing happens */
/* Appends j to t, keys in insertion order, 1-space indent when `pretty`. A tree with a failure makes t one. */
void mm_json_write(mm_text *t, const mm_json *j, bool pretty);
/* The same as a text; free() it. NULL on want of memory and for a tree with a failure. */
char *mm_json_dump(const mm_json *j, bool pretty);
/* The same; takes j over, and says MM_LIMIT E_MEMORY. */
char *mm_json_text(mm_json *j, bool pretty, mm_err *err);
mm_json *mm_json_copy(const mm_json *j, mm_err *err); /* of an object or array, to be changed */
/* Writes into out the words in which an error line shows a value: a short value itself, else its type or how many entries it has;
 * "nothing" for NULL. */
#define MM_JSON_SHOWN 80
const char *mm_json_shown(const mm_json *j, char out[MM_JSON_SHOWN]);
#define MM_SHOWN_JSON(j) mm_json_shown(j, (char[MM_JSON_SHOWN]){0}) /* as long as the block that names it */

#ifdef __cplusplus
}
#endif
#endif
