/* Tool calls of the M2 family: <invoke name="…"> around <parameter name="…">text</parameter>. */
#include <string.h>

#include "runtime/chat/reply_inside.h"

#define INVOKE        "<invoke name="
#define INVOKE_END    "</invoke>"
#define PARAMETER     "<parameter name="
#define PARAMETER_END "</parameter>"
#define NAME_BYTES    4096 /* bytes of a name; what is longer is none */
#define GAP_MAX       64   /* bytes of white space after </invoke> where </parameter> is missing */

typedef enum tag_match { TAG_NO, TAG_PARTIAL, TAG_YES } tag_match;

/* Whether r->in has a tag at `at`, or may have. */
static tag_match tag_at(const mm_reply *r, size_t at, const char *tag) {
  const size_t len = strlen(tag), left = r->in.n - at;
  if (memcmp(r->in.p + at, tag, left < len ? left : len) != 0) return TAG_NO;
  return left < len ? TAG_PARTIAL : TAG_YES;
}

static bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

static mm_str in_str(const mm_text *t) { return (mm_str){t->p ? t->p : "", t->n}; }

/* ---- Calls and parameters ---- */

static void begin_call(mm_reply *r) {
  mm_text_clear(&r->shown);
  r->literal = false;
  r->open = true;
  r->begun = false;
  mm_reply_emit(r, MM_REPLY_CALL, r->name.p, r->name.n);
  r->block = MM_BLOCK_PARAMETERS;
}

static void put_stray(mm_reply *r) {
  mm_reply_emit(r, MM_REPLY_CONTENT, r->stray.p, r->stray.n);
  mm_text_clear(&r->stray);
}

static void end_call(mm_reply *r) {
  mm_reply_emit(r, MM_REPLY_ARGUMENTS, r->begun ? "}" : "{}", r->begun ? 1 : 2);
  mm_reply_emit(r, MM_REPLY_CALL_END, NULL, 0);
  r->open = false;
  put_stray(r);
  r->block = MM_BLOCK_NEXT;
}

/* Quotes a piece of a string, with the quotes that are asked for. */
static void put_piece(mm_reply *r, const char *text, size_t n, bool first, bool last) {
  const size_t from = r->fragment.n;
  mm_text_quote(&r->fragment, text, n);
  if (r->fragment.failed) return;
  if (!last) r->fragment.n--;
  if (first) return;
  memmove(r->fragment.p + from, r->fragment.p + from + 1, r->fragment.n - from - 1);
  r->fragment.n--;
}

static void put_fragment(mm_reply *r) {
  if (!r->fragment.failed) mm_reply_emit(r, MM_REPLY_ARGUMENTS, r->fragment.p, r->fragment.n);
  if (!r->fragment.failed) mm_text_clear(&r->fragment);
}

/* `{"key": ` or `, "key": ` into the fragment. */
static void put_key(mm_reply *r) {
  mm_text_put(&r->fragment, r->begun ? ", " : "{");
  mm_text_quote(&r->fragment, r->key.p, r->key.n);
  mm_text_put(&r->fragment, ": ");
  r->begun = true;
}

static void begin_value(mm_reply *r) {
  r->types = mm_tools_types(r->tools, in_str(&r->name), in_str(&r->key));
  r->streaming = r->types == MM_TYPE_STRING;
  r->block = MM_BLOCK_VALUE;
  if (!r->streaming) return;
  put_key(r);
  put_piece(r, "", 0, true, false);
  put_fragment(r);
}

/* Whether text may be null still: white space around it, and so much of it as there is. */
static bool may_be_null(const char *text, size_t n) {
  size_t at = 0;
  while (at < n && is_space(text[at])) at++;
  for (const char *word = "null"; *word && at < n; word++, at++)
    if (text[at] != *word) return false;
  while (at < n && is_space(text[at])) at++;
  return at == n;
}

static void put_value(mm_reply *r, const char *text, size_t n) {
  if (r->streaming) {
    put_piece(r, text, n, false, false);
    put_fragment(r);
    return;
  }
  mm_text_add(&r->value, text, n);
  if (r->types != (MM_TYPE_STRING | MM_TYPE_NULL) || r->value.failed || may_be_null(r->value.p, r->value.n)) return;
  r->streaming = true;
  put_key(r);
  put_piece(r, r->value.p, r->value.n, true, false);
  put_fragment(r);
}

static void end_value(mm_reply *r) {
  if (r->streaming) {
    put_piece(r, "", 0, false, true);
  } else {
    put_key(r);
    mm_arguments_put(&r->fragment, r->types, in_str(&r->value));
  }
  put_fragment(r);
  if (!r->value.failed) mm_text_clear(&r->value);
  r->block = MM_BLOCK_PARAMETERS;
}

/* The reply was cut off inside a value: it is a string that does not end. */
static void cut_value(mm_reply *r) {
  if (r->streaming || !r->value.n) return;
  put_key(r);
  put_piece(r, r->value.p, r->value.n, true, false);
  put_fragment(r);
}

/* ---- The text of a block; each takes what it can of r->in, false: it waits for more ---- */

static bool at_start(mm_reply *r) {
  const size_t space = mm_block_space(r);
  if (r->block == MM_BLOCK_START) mm_text_add(&r->shown, r->in.p, space);
  mm_block_drop(r, space);
  if (!r->in.n || tag_at(r, 0, INVOKE) == TAG_PARTIAL) return false;
  r->block = tag_at(r, 0, INVOKE) == TAG_YES ? MM_BLOCK_NAME : MM_BLOCK_STRAY;
  if (r->block == MM_BLOCK_NAME) mm_block_drop(r, strlen(INVOKE));
  return true;
}

static bool in_stray(mm_reply *r) {
  size_t at = 0;
  tag_match found = TAG_NO;
  while (at < r->in.n && (found = tag_at(r, at, INVOKE)) == TAG_NO) at++;
  mm_block_stray(r, at);
  if (found != TAG_YES) return false;
  mm_block_drop(r, strlen(INVOKE));
  r->block = MM_BLOCK_NAME;
  return true;
}

/* What stands up to ">" at the start of r->in, without white space around it and one pair of quotes. *used: bytes up to there. */
static tag_match take_name(mm_reply *r, mm_text *out, size_t *used) {
  const size_t most = r->in.n < NAME_BYTES ? r->in.n : NAME_BYTES;
  const char *s = r->in.p, *end = memchr(s, '>', most);
  if (!end) return most == NAME_BYTES ? TAG_NO : TAG_PARTIAL;
  size_t from = 0, to = (size_t)(end - s);
  *used = to + 1;
  while (from < to && is_space(s[from])) from++;
  while (from < to && is_space(s[to - 1])) to--;
  if (to - from >= 2 && (s[from] == '"' || s[from] == '\'') && s[to - 1] == s[from]) from++, to--;
  mm_text_clear(out);
  mm_text_add(out, s + from, to - from);
  return TAG_YES;
}

/* A header that names nothing is text. */
static bool in_name(mm_reply *r) {
  size_t used = 0;
  const tag_match found = take_name(r, &r->name, &used);
  if (found == TAG_PARTIAL) return false;
  if (found == TAG_YES && r->name.n) {
    mm_block_drop(r, used);
    begin_call(r);
    return true;
  }
  mm_block_show(r);
  mm_reply_emit(r, MM_REPLY_CONTENT, INVOKE, strlen(INVOKE));
  r->block = MM_BLOCK_STRAY;
  return true;
}

/* A tag that may stand between parameters begins at `at`. */
static tag_match between_at(mm_reply *r, size_t at, const char **tag) {
  static const char *const tags[] = {PARAMETER, INVOKE_END, INVOKE};
  tag_match best = TAG_NO;
  for (size_t i = 0; i < 3; i++) {
    const tag_match m = tag_at(r, at, tags[i]);
    if (m == TAG_YES) *tag = tags[i];
    if (m > best) best = m;
  }
  return best;
}

static bool in_parameters(mm_reply *r) {
  if (r->block == MM_BLOCK_PARAMETERS) mm_block_drop(r, mm_block_space(r));
  size_t at = 0;
  tag_match found = TAG_NO;
  const char *tag = NULL;
  while (at < r->in.n && (found = between_at(r, at, &tag)) == TAG_NO) at++;
  if (at) {
    r->block = MM_BLOCK_PARAMETERS_STRAY;
    mm_text_add(&r->stray, r->in.p, at);
    mm_block_drop(r, at);
  }
  if (found != TAG_YES) return false;
  mm_block_drop(r, strlen(tag));
  r->block = MM_BLOCK_KEY;
  if (strcmp(tag, PARAMETER) == 0) return true;
  end_call(r);
  if (strcmp(tag, INVOKE) == 0) r->block = MM_BLOCK_NAME;
  return true;
}

static bool in_key(mm_reply *r) {
  size_t used = 0;
  const tag_match found = take_name(r, &r->key, &used);
  if (found == TAG_PARTIAL) return false;
  if (found == TAG_YES) {
    mm_block_drop(r, used);
    begin_value(r);
    return true;
  }
  mm_text_put(&r->stray, PARAMETER);
  r->block = MM_BLOCK_PARAMETERS_STRAY;
  return true;
}

/* Whether </invoke> at `at` ends a value that has no </parameter>: another call follows. */
static tag_match ends_call(mm_reply *r, size_t at) {
  tag_match m = tag_at(r, at, INVOKE_END);
  if (m != TAG_YES) return m;
  const size_t from = at + strlen(INVOKE_END);
  size_t next = from;
  while (next < r->in.n && next - from < GAP_MAX && is_space(r->in.p[next])) next++;
  if (next - from == GAP_MAX) return TAG_NO;
  return next == r->in.n ? TAG_PARTIAL : tag_at(r, next, INVOKE);
}

static bool in_value(mm_reply *r) {
  size_t at = 0;
  tag_match end = TAG_NO, call = TAG_NO;
  for (const char *s; at < r->in.n; at++) {
    if (!(s = memchr(r->in.p + at, '<', r->in.n - at))) {
      at = r->in.n;
      break;
    }
    at = (size_t)(s - r->in.p);
    end = tag_at(r, at, PARAMETER_END);
    call = ends_call(r, at);
    if (end != TAG_NO || call != TAG_NO) break;
  }
  if (at) put_value(r, r->in.p, at);
  mm_block_drop(r, at);
  if (!r->in.n || (end != TAG_YES && call != TAG_YES)) return false;
  end_value(r);
  if (end == TAG_YES) mm_block_drop(r, strlen(PARAMETER_END));
  return true;
}

void mm_block_m2_text(mm_reply *r) {
  bool more = true;
  while (more && r->in.n) switch (r->block) {
      case MM_BLOCK_START:
      case MM_BLOCK_NEXT: more = at_start(r); break;
      case MM_BLOCK_STRAY: more = in_stray(r); break;
      case MM_BLOCK_NAME: more = in_name(r); break;
      case MM_BLOCK_PARAMETERS:
      case MM_BLOCK_PARAMETERS_STRAY: more = in_parameters(r); break;
      case MM_BLOCK_KEY: more = in_key(r); break;
      case MM_BLOCK_VALUE: more = in_value(r); break;
      default: more = false; break;
    }
}

/* ---- Ends ---- */

/* What waits is what it is so far. */
void mm_block_m2_end(mm_reply *r, bool whole) {
  const mm_block where = r->block;
  if (where == MM_BLOCK_VALUE) {
    const bool closed = whole && r->in.n && tag_at(r, 0, INVOKE_END) == TAG_YES;
    if (!closed) put_value(r, r->in.p, r->in.n);
    if (whole)
      end_value(r);
    else
      cut_value(r);
    if (closed) {
      mm_block_drop(r, strlen(INVOKE_END));
      mm_block_drop(r, mm_block_space(r));
      mm_text_add(&r->stray, r->in.p, r->in.n);
    }
  } else if (where == MM_BLOCK_NAME || where == MM_BLOCK_NEXT || where == MM_BLOCK_STRAY || where == MM_BLOCK_START) {
    if (where == MM_BLOCK_NAME) mm_block_show(r);
    if (where == MM_BLOCK_NAME) mm_reply_emit(r, MM_REPLY_CONTENT, INVOKE, strlen(INVOKE));
    if (r->in.n) mm_block_stray(r, r->in.n);
  } else {
    if (where == MM_BLOCK_KEY) mm_text_put(&r->stray, PARAMETER);
    mm_text_add(&r->stray, r->in.p, r->in.n);
  }
  mm_text_clear(&r->in);
  if (r->open && whole) end_call(r);
  put_stray(r);
}

bool mm_block_m2_marker(const mm_reply *r, mm_marker m) {
  if (m == MM_MARK_CALLS_END) return false;
  return m != MM_MARK_CALLS || (r->block != MM_BLOCK_NEXT && r->block != MM_BLOCK_STRAY);
}
