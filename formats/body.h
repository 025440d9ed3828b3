/* JSON of clients, read as Python's json module reads it, within limits: of equal keys the last value counts, at the place of the first;
 * integers have any length; NaN and Infinity are numbers; a byte order mark is skipped; half of a surrogate pair alone becomes U+FFFD.
 * Numbers keep their text and objects their order, so that what goes on to a template goes on as it was written. */
#ifndef MM_RUNTIME_SERVE_BODY_H
#define MM_RUNTIME_SERVE_BODY_H

#include "formats/system/base.h"

#define MM_BODY_VALUES (1u << 20)

typedef enum mm_value_type {
  MM_VALUE_NULL,
  MM_VALUE_BOOL,
  MM_VALUE_NUMBER,
  MM_VALUE_STRING,
  MM_VALUE_ARRAY,
  MM_VALUE_OBJECT
} mm_value_type;

typedef struct mm_value mm_value;
struct mm_value {
  mm_value_type type;
  bool truth;
  bool repeats;     /* `raw` has a key twice, in this object or in a value within it */
  const char *text; /* a string: its bytes, n of them, terminated too; a number: as written, not terminated */
  size_t n;
  const char *raw; /* the whole value as it stands in the body, raw_n bytes */
  size_t raw_n;
  const char *key; /* of a member of an object, terminated */
  size_t key_n;
  const mm_value *first, *next; /* of an array or object; the value after this one */
  size_t count;
};

/* Parses `text`, which must stay; the values live in the arena. MM_BAD_INPUT E_JSON with the byte, MM_LIMIT. */
const mm_value *mm_body_parse(mm_arena *a, const char *text, size_t n, mm_err *err);

/* The member of this name; NULL where there is none, where it is null, and of what is no object. */
const mm_value *mm_value_get(const mm_value *object, const char *key);
bool mm_value_is(const mm_value *v, const char *string);  /* equals this string */
bool mm_value_key_is(const mm_value *v, const char *key); /* its key equals this one, which a key with a NUL never does */
double mm_value_real(const mm_value *number);             /* ±infinity where it is too large */
/* An integer, written as one or as 3.0. false for others and those beyond int64. */
bool mm_value_int(const mm_value *v, int64_t *out);
/* Returns the value within `root` that the fragment of a URI, "#" and a JSON pointer, leads to (RFC 6901: ~0, ~1, percent escapes, places
 * in arrays). Returns NULL if the pointer leads to nothing or `reference` is no string of this form. */
const mm_value *mm_value_follow(const mm_value *root, const mm_value *reference);
const char *mm_value_word(const mm_value *v);              /* "an object", for messages */
char *mm_value_key_shown(const mm_value *v, char out[96]); /* a member's key, escaped and cut; a NUL stands in it as \x00 */
/* A string's text, escaped and cut where it holds a NUL; the word of others. */
const char *mm_value_shown(const mm_value *v, char out[128]);
#define MM_SHOWN_VALUE(v) mm_value_shown(v, (char[128]){0})

#endif
