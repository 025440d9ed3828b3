/* Byte-level BPE: text is cut at added tokens, then into pieces by the split pattern, then the bytes of each piece are merged. */
#include <stdlib.h>
#include <string.h>

#include "runtime/text/tokenizer.h"
#include "runtime/text/tokenizer_tables.h"
#include "runtime/text/utf8.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* GPT-4o's split; S and NOT_S are white space and its complement. */
#define O200K(S, NOT_S)                                                                                                     \
  "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"  \
  "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?" \
  "|\\p{N}{1,3}| ?[^" S "\\p{L}\\p{N}]+[\\r\\n/]*|" S "*[\\r\\n]+|" S "+(?!" NOT_S ")|" S "+"

/* Split patterns that may run. Each matches at every position of every text, in time linear in the text: that is why no other
 * pattern is accepted. PCRE2's \s would take U+180E for white space, which Unicode and the engines that wrote the files do not;
 * its properties need PCRE2 10.40. Characters newer than the installed PCRE2's Unicode count as unassigned. */
const char *const mm_split_patterns[] = {O200K("\\s", "\\S"), NULL};
static const char *const for_pcre2[] = {O200K("\\p{White_Space}", "\\P{White_Space}")};

bool mm_tokenizer_compile(mm_tokenizer *t, const char *path, mm_err *err) {
  int code;
  size_t at;
  const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED;
  t->split = pcre2_compile((PCRE2_SPTR)for_pcre2[t->pattern], PCRE2_ZERO_TERMINATED, options, &code, &at, NULL);
  if (!t->split) return mm_fail(err, MM_LIMIT, "E_SPLIT", mm_at(path, NULL), "PCRE2 error %d at %zu of the split pattern", code, at);
  pcre2_jit_compile(t->split, PCRE2_JIT_COMPLETE); /* without it matching is slower and the same */
  return true;
}

void mm_tokenizer_close(mm_tokenizer *t) {
  if (!t) return;
  mm_bpe_close(&t->bpe, t->map.data != NULL);
  if (!t->map.data) {
    free(t->level);
    free(t->special);
  }
  mm_map_close(&t->map);
  pcre2_code_free(t->split);
  free(t);
}

/* ---- Encoding ---- */

typedef struct encoder {
  const mm_tokenizer *t;
  mm_err *err;
  const char *text;           /* the whole of it */
  const mm_text_range *range; /* [ranges] where added tokens are recognised */
  size_t ranges;
  pcre2_match_data *match;
  pcre2_match_context *limits;
  mm_bpe_scratch out;
} encoder;

/* Valid UTF-8 without added tokens. */
static bool encode_pieces(encoder *e, const char *s, size_t n) {
  for (size_t at = 0; at < n;) {
    int rc = pcre2_match(e->t->split, (PCRE2_SPTR)s, n, at, PCRE2_NO_UTF_CHECK, e->match, e->limits);
    size_t end = rc > 0 ? pcre2_get_ovector_pointer(e->match)[1] : 0;
    if (end <= at) return mm_fail(e->err, MM_LIMIT, "E_SPLIT", mm_at(NULL, NULL), "PCRE2 gave %d at byte %zu of a text of %zu", rc, at, n);
    if (!mm_bpe_encode(&e->t->bpe, &e->out, s + at, end - at, e->err)) return false;
    at = end;
  }
  return true;
}

/* Bytes that are not UTF-8 stand alone. */
static bool encode_ordinary(encoder *e, const char *s, size_t n) {
  for (size_t at = 0; at < n;) {
    size_t end = at;
    unsigned len;
    while (end < n && mm_utf8_scan(s + end, n - end, &len) == MM_UTF8_WHOLE) end += len;
    if (!encode_pieces(e, s + at, end - at)) return false;
    if (end < n && !mm_bpe_emit(&e->out, e->t->bpe.byte_id[(uint8_t)s[end++]], e->err)) return false;
    at = end;
  }
  return true;
}

/* How many bytes of the range that holds s start there; 0 outside of all. */
static size_t range_left(const encoder *e, const char *s) {
  const size_t at = (size_t)(s - e->text);
  size_t lo = 0, hi = e->ranges;
  while (lo < hi) {
    const size_t mid = lo + (hi - lo) / 2;
    if (e->range[mid].to <= at)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo < e->ranges && e->range[lo].from <= at ? e->range[lo].to - at : 0;
}

/* The longest added token of this level that starts s[0 … n); -1 when none does. */
static int32_t added_at(const encoder *e, const char *s, size_t n, mm_token_level wanted) {
  const mm_tokenizer *t = e->t;
  if (!t->added_start[(uint8_t)s[0]]) return -1;
  n = (size_t)mm_min(n, range_left(e, s));
  for (size_t len = n < MM_ADDED_MAX ? n : MM_ADDED_MAX; len > 0; len--) {
    int32_t id = t->added_len[len] ? mm_bpe_find(&t->bpe, s, len) : -1;
    if (id >= 0 && t->level[id] == wanted) return id;
  }
  return -1;
}

static bool encode_level(encoder *e, const char *s, size_t n, mm_token_level wanted) {
  if (wanted == MM_ORDINARY) return encode_ordinary(e, s, n);
  size_t from = 0;
  for (size_t at = 0; at < n; at++) {
    int32_t id = added_at(e, s + at, n - at, wanted);
    if (id < 0) continue;
    if (!encode_level(e, s + from, at - from, wanted - 1) || !mm_bpe_emit(&e->out, id, e->err)) return false;
    from = at + e->t->bpe.token[id].n;
    at = from - 1;
  }
  return encode_level(e, s + from, n - from, wanted - 1);
}

bool mm_tokenizer_encode_ranges(const mm_tokenizer *t, const char *text, size_t n, const mm_text_range *range, size_t ranges, int32_t **ids,
                                size_t *count, mm_err *err) {
  if (n > INT32_MAX) return mm_fail(err, MM_LIMIT, "E_LIMIT", mm_at(NULL, NULL), "text of %zu bytes, at most %d", n, INT32_MAX);
  encoder e = {.t = t, .err = err, .text = text, .range = range, .ranges = ranges};
  e.match = pcre2_match_data_create_from_pattern(t->split, NULL);
  e.limits = pcre2_match_context_create(NULL);
  bool ok = e.match && e.limits;
  if (!ok) mm_fail_memory(err, sizeof e);
  if (ok) {
    pcre2_set_match_limit(e.limits, (uint32_t)n + 100); /* backtracking points; the known patterns need one per byte at most */
    pcre2_set_heap_limit(e.limits, 1024);               /* KiB */
    ok = MM_GROW(e.out.id, &e.out.cap, 1, err) && encode_level(&e, text, n, ranges ? MM_VERBATIM : MM_ORDINARY);
  }
  pcre2_match_data_free(e.match);
  pcre2_match_context_free(e.limits);
  *ids = ok ? e.out.id : NULL;
  *count = ok ? e.out.count : 0;
  if (ok) e.out.id = NULL;
  mm_bpe_scratch_close(&e.out);
  return ok;
}

bool mm_tokenizer_encode(const mm_tokenizer *t, const char *text, size_t n, bool added, int32_t **ids, size_t *count, mm_err *err) {
  const mm_text_range whole = {0, n};
  return mm_tokenizer_encode_ranges(t, text, n, &whole, added, ids, count, err);
}

const char *mm_tokenizer_bytes(const mm_tokenizer *t, int32_t id, size_t *n) {
  if (id < 0 || (uint32_t)id >= t->bpe.vocab) return NULL;
  *n = t->bpe.token[id].n;
  return t->bpe.token[id].text;
}

bool mm_tokenizer_is_special(const mm_tokenizer *t, int32_t id) { return id >= 0 && (uint32_t)id < t->bpe.vocab && t->special[id]; }

int32_t mm_tokenizer_find(const mm_tokenizer *t, const char *text) { return mm_bpe_find(&t->bpe, text, strlen(text)); }

int32_t mm_tokenizer_find_added(const mm_tokenizer *t, const char *text) {
  const int32_t id = mm_tokenizer_find(t, text);
  return id >= 0 && t->level[id] != MM_ORDINARY ? id : -1;
}
