/* Tool calls of the M2 family: <invoke name="…"> around <parameter name="…">text</parameter>. */
#include <string.h>

#include "runtime/chat/reply_inside.h"

#define INVOKE        "<invoke name="
#define INVOKE_END    "</invoke>"
#define PARAMETER     "<parameter name="
#define PARAMETER_END "</parameter>"
#define NAME_BYTES    4096 /* bytes of a name; what is longer is none */
#define GAP_MAX       1024 /* bytes of white space behind a closing tag */
#define WHOLE_MAX     4096 /* bytes of a value that is looked at in whole before its end */
#define NOWHERE       SIZE_MAX

typedef enum tag_match { TAG_NO, TAG_PARTIAL, TAG_YES } tag_match;

/* Matches a tag in r->in at `at`: yes, no, or not enough text yet. */
static tag_match tag_at(const mm_reply *r, size_t at, const char *tag) {
  const size_t len = strlen(tag), left = r->in.n - at;
  if (memcmp(r->in.p + at, tag, left < len ? left : len) != 0) return TAG_NO;
  return left < len ? TAG_PARTIAL : TAG_YES;
}

/* ---- Calls and parameters ---- */

static void begin_call(mm_reply *r) {
  mm_text_clear(&r->shown);
  r->literal = false;
  r->open = true;
  r->begun = false;
  mm_text_clear(&r->given);
  mm_text_put(&r->given, ">");
  mm_reply_emit(r, MM_REPLY_CALL, r->name.p, r->name.n);
  r->block = MM_BLOCK_PARAMETERS;
}

/* A parameter whose schema names no type is a string, as in the vendor's parser. */
static void begin_value(mm_reply *r) {
  r->types = mm_tools_types(r->tools, mm_text_str(&r->name), mm_text_str(&r->key));
  if (!r->types) r->types = MM_TYPE_STRING;
  r->scan = 0;
  r->maybe = NOWHERE;
  mm_text_add(&r->given, r->key.p, r->key.n);
  mm_text_put(&r->given, ">");
  r->streaming = r->types == MM_TYPE_STRING;
  r->block = MM_BLOCK_VALUE;
  if (r->streaming) mm_block_flow(r, "", 0);
}

/* True if the text may still become null: it is a prefix of "null", with any white space around it. */
static bool may_be_null(const char *text, size_t n) {
  size_t at = 0;
  while (at < n && mm_is_space(text[at])) at++;
  for (const char *word = "null"; *word && at < n; word++, at++)
    if (text[at] != *word) return false;
  while (at < n && mm_is_space(text[at])) at++;
  return at == n;
}

static void put_value(mm_reply *r, const char *text, size_t n) {
  if (r->streaming) {
    mm_block_piece(r, text, n, false, false);
    mm_block_send(r);
    return;
  }
  mm_text_add(&r->value, text, n);
  if (r->types != (MM_TYPE_STRING | MM_TYPE_NULL) || r->value.failed || may_be_null(r->value.p, r->value.n)) return;
  mm_block_flow(r, r->value.p, r->value.n);
}

static void end_value(mm_reply *r) {
  if (r->streaming) {
    mm_block_piece(r, "", 0, false, true);
  } else {
    mm_block_key(r);
    mm_arguments_put(&r->fragment, r->types, mm_text_str(&r->value));
  }
  mm_block_send(r);
  if (!r->value.failed) mm_text_clear(&r->value);
  r->block = MM_BLOCK_PARAMETERS;
}

/* The reply was cut off inside a value: it is a string that does not end. */
static void cut_value(mm_reply *r) {
  if (!r->streaming && r->value.n) mm_block_flow(r, r->value.p, r->value.n);
}

/* ---- The text of a block; each takes what it can of r->in, false: it waits for more ---- */

/* A closing tag that closes nothing, between calls. */
static tag_match idle_tag(const mm_reply *r, size_t *n) {
  static const char *const tags[] = {INVOKE_END, PARAMETER_END};
  tag_match best = TAG_NO;
  for (size_t i = 0; i < 2 && r->block == MM_BLOCK_NEXT; i++) {
    const tag_match m = tag_at(r, 0, tags[i]);
    if (m == TAG_YES) *n = strlen(tags[i]);
    if (m > best) best = m;
  }
  return best;
}

static bool at_start(mm_reply *r) {
  size_t space = mm_block_space(r), idle = 0;
  if (r->block == MM_BLOCK_START) mm_text_add(&r->shown, r->in.p, space);
  mm_block_drop(r, space);
  if (!r->in.n || tag_at(r, 0, INVOKE) == TAG_PARTIAL || idle_tag(r, &idle) == TAG_PARTIAL) return false;
  mm_block_drop(r, idle);
  if (idle) return true;
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

/* The rest of a header, up to ">". */
typedef struct header {
  mm_str name; /* without white space around it and one pair of quotes */
  size_t used; /* bytes of r->in from the name on, ">" included */
  bool empty;  /* it ends with "/>": nothing stands in the element */
} header;

static tag_match take_header(const mm_reply *r, size_t at, header *out) {
  const size_t left = r->in.n - at, most = left < NAME_BYTES ? left : NAME_BYTES;
  const char *s = r->in.p + at, *end = memchr(s, '>', most);
  if (!end) return most == NAME_BYTES ? TAG_NO : TAG_PARTIAL;
  const size_t n = (size_t)(end - s);
  out->used = n + 1;
  out->empty = n && s[n - 1] == '/';
  out->name = mm_block_name(s, n - out->empty);
  return TAG_YES;
}

/* A header that names nothing is text. */
static bool in_name(mm_reply *r) {
  header h;
  const tag_match found = take_header(r, 0, &h);
  if (found == TAG_PARTIAL) return false;
  if (found == TAG_YES && h.name.n) {
    mm_text_clear(&r->name);
    mm_text_add(&r->name, h.name.p, h.name.n);
    mm_block_drop(r, h.used);
    begin_call(r);
    if (h.empty) mm_block_end_call(r);
    return true;
  }
  mm_block_show(r);
  mm_reply_emit(r, MM_REPLY_CONTENT, INVOKE, strlen(INVOKE));
  r->block = MM_BLOCK_STRAY;
  return true;
}

/* One of the tags that stand between parameters begins at `at`. */
static tag_match between_at(const mm_reply *r, size_t at, const char **tag) {
  static const char *const tags[] = {PARAMETER, INVOKE_END, INVOKE};
  tag_match best = TAG_NO;
  for (size_t i = 0; i < 3; i++) {
    const tag_match m = tag_at(r, at, tags[i]);
    if (m == TAG_YES) *tag = tags[i];
    if (m > best) best = m;
  }
  return best;
}

/* Text between parameters belongs to nothing and is dropped. */
static bool in_parameters(mm_reply *r) {
  size_t at = 0;
  tag_match found = TAG_NO;
  const char *tag = NULL;
  while (at < r->in.n && (found = between_at(r, at, &tag)) == TAG_NO) at++;
  mm_block_drop(r, at);
  if (found != TAG_YES) return false;
  mm_block_drop(r, strlen(tag));
  r->block = MM_BLOCK_KEY;
  if (strcmp(tag, PARAMETER) == 0) return true;
  mm_block_end_call(r);
  if (strcmp(tag, INVOKE) == 0) r->block = MM_BLOCK_NAME;
  return true;
}

static bool in_key(mm_reply *r) {
  header h;
  const tag_match found = take_header(r, 0, &h);
  if (found == TAG_PARTIAL) return false;
  r->block = MM_BLOCK_PARAMETERS;
  if (found != TAG_YES) return true;
  mm_text_clear(&r->key);
  mm_text_add(&r->key, h.name.p, h.name.n);
  mm_block_drop(r, h.used);
  begin_value(r);
  if (h.empty) end_value(r);
  return true;
}

/* ---- Where a value ends ---- */

/* Matches one of `count` tags behind the closing tag that ends at `from`, after any white space. */
static tag_match followed_by(const mm_reply *r, size_t from, const char *const *tags, size_t count) {
  size_t next = from;
  tag_match best = TAG_NO;
  while (next < r->in.n && next - from < GAP_MAX && mm_is_space(r->in.p[next])) next++;
  if (next - from == GAP_MAX) return TAG_NO;
  if (next == r->in.n) return TAG_PARTIAL;
  for (size_t i = 0; i < count; i++) {
    const tag_match m = tag_at(r, next, tags[i]);
    if (m > best) best = m;
  }
  return best;
}

static bool was_given(const mm_reply *r, mm_str name) {
  for (const char *at = r->given.p, *end = at + r->given.n; (at = memmem(at, (size_t)(end - at), name.p, name.n)); at++)
    if (at[-1] == '>' && at[name.n] == '>') return true;
  return false;
}

/* True if the value up to `at` is complete JSON and the parameter's type is no string: no following text could belong to it. */
static bool is_whole(mm_reply *r, size_t at) {
  if (r->types & MM_TYPE_STRING || r->value.n + at > WHOLE_MAX) return false;
  mm_arena a = {0};
  mm_text_clear(&r->fragment);
  mm_text_add(&r->fragment, r->value.p, r->value.n);
  mm_text_add(&r->fragment, r->in.p, at);
  const bool whole = !r->fragment.failed && mm_json_strict(&a, mm_text_str(&r->fragment));
  if (!r->fragment.failed) mm_text_clear(&r->fragment);
  mm_arena_close(&a);
  return whole;
}

typedef enum value_end {
  VALUE_GOES_ON,
  VALUE_UNDECIDED, /* more text is needed */
  VALUE_CLOSED,    /* by </parameter> */
  VALUE_UNCLOSED,  /* </invoke> ends the call: </parameter> is missing */
  VALUE_QUOTES,    /* a </parameter> that is text */
  VALUE_MAYBE      /* a parameter begins that may be the next: then </parameter> is missing */
} value_end;

/* How the "<" at `at` affects the value. */
static value_end ends_at(mm_reply *r, size_t at) {
  static const char *const after[] = {PARAMETER, INVOKE_END, INVOKE};
  tag_match m = tag_at(r, at, PARAMETER_END);
  if (m == TAG_YES) {
    m = followed_by(r, at + strlen(PARAMETER_END), after, 3);
    if (m == TAG_NO) return r->maybe == NOWHERE && is_whole(r, at) ? VALUE_CLOSED : VALUE_QUOTES;
    return m == TAG_YES ? VALUE_CLOSED : VALUE_UNDECIDED;
  }
  bool undecided = m == TAG_PARTIAL;
  m = tag_at(r, at, INVOKE_END);
  if (m == TAG_YES) m = followed_by(r, at + strlen(INVOKE_END), &after[2], 1);
  if (m == TAG_YES) return VALUE_UNCLOSED;
  undecided |= m == TAG_PARTIAL;
  m = tag_at(r, at, PARAMETER);
  header h;
  if (m == TAG_YES) m = take_header(r, at + strlen(PARAMETER), &h);
  if (m == TAG_YES && h.name.n && mm_tools_may_have(r->tools, mm_text_str(&r->name), h.name) && !was_given(r, h.name)) return VALUE_MAYBE;
  return undecided || m == TAG_PARTIAL ? VALUE_UNDECIDED : VALUE_GOES_ON;
}

/* r->in[0 … n) without the newline at its end, which the template puts before a tag. */
static size_t without_newline(const mm_reply *r, size_t n) { return n && r->in.p[n - 1] == '\n' ? n - 1 : n; }

/* The first n bytes of r->in are the value's. */
static void take_value(mm_reply *r, size_t n) {
  if (n) put_value(r, r->in.p, n);
  mm_block_drop(r, n);
  r->scan -= mm_min(n, r->scan);
  if (r->maybe != NOWHERE) r->maybe -= n;
}

/* The value ends before the tag at `at`. */
static void end_unclosed(mm_reply *r, size_t at) {
  take_value(r, without_newline(r, at));
  mm_block_drop(r, r->in.n && *r->in.p == '\n');
  end_value(r);
}

/* r->in[0 … r->scan) has been looked at. From r->maybe on it waits for the next </parameter>: where that is text, the parameter that seemed
 * to begin was text too. */
static bool in_value(mm_reply *r) {
  value_end end = VALUE_GOES_ON;
  for (const char *s; r->scan < r->in.n; r->scan += end == VALUE_QUOTES ? strlen(PARAMETER_END) : 1) {
    if (!(s = memchr(r->in.p + r->scan, '<', r->in.n - r->scan))) {
      r->scan = r->in.n;
      break;
    }
    r->scan = (size_t)(s - r->in.p);
    end = ends_at(r, r->scan);
    if (end == VALUE_MAYBE && r->maybe == NOWHERE) r->maybe = r->scan;
    if (end == VALUE_QUOTES) r->maybe = NOWHERE;
    if (end == VALUE_UNDECIDED || end == VALUE_CLOSED || end == VALUE_UNCLOSED) break;
  }
  const bool ends = r->scan < r->in.n && (end == VALUE_CLOSED || end == VALUE_UNCLOSED);
  if (!ends) {
    take_value(r, without_newline(r, r->maybe != NOWHERE ? r->maybe : r->scan));
    return false;
  }
  if (r->maybe != NOWHERE) {
    end_unclosed(r, r->maybe);
  } else if (end == VALUE_UNCLOSED) {
    end_unclosed(r, r->scan);
  } else {
    take_value(r, r->scan);
    end_value(r);
    mm_block_drop(r, strlen(PARAMETER_END));
  }
  return true;
}

static void block_text(mm_reply *r) {
  bool more = true;
  while (more && r->in.n) switch (r->block) {
      case MM_BLOCK_START:
      case MM_BLOCK_NEXT: more = at_start(r); break;
      case MM_BLOCK_STRAY: more = in_stray(r); break;
      case MM_BLOCK_NAME: more = in_name(r); break;
      case MM_BLOCK_PARAMETERS: more = in_parameters(r); break;
      case MM_BLOCK_KEY: more = in_key(r); break;
      case MM_BLOCK_VALUE: more = in_value(r); break;
      default: more = false; break;
    }
}

/* ---- Ends ---- */

/* The end is what </parameter> and </invoke> waited for. */
static void end_in_value(mm_reply *r, mm_reply_finish finish) {
  while (r->block == MM_BLOCK_VALUE && r->maybe != NOWHERE) {
    end_unclosed(r, r->maybe);
    block_text(r);
  }
  if (r->block != MM_BLOCK_VALUE) return;
  const bool waits = r->scan < r->in.n, closed = waits && tag_at(r, r->scan, PARAMETER_END) == TAG_YES;
  if (closed) {
    take_value(r, r->scan);
    end_value(r);
  } else if (finish == MM_REPLY_WHOLE) {
    end_unclosed(r, waits && tag_at(r, r->scan, INVOKE_END) == TAG_YES ? r->scan : r->in.n);
  } else {
    take_value(r, finish == MM_REPLY_CUT ? without_newline(r, r->scan) : r->in.n);
    cut_value(r);
  }
}

/* True if the reply may have been cut off within the tags that begin a call, of which r->in has the last one so far. */
static bool begins_call(const mm_reply *r, mm_reply_finish finish) {
  return r->block == MM_BLOCK_START || r->block == MM_BLOCK_NEXT || r->block == MM_BLOCK_NAME ||
         (r->block == MM_BLOCK_STRAY && finish == MM_REPLY_CUT);
}

/* Ends the block: waiting text is taken for what it is so far. Of a call that was cut off before its name is whole nothing is shown. */
static void block_end(mm_reply *r, mm_reply_finish finish) {
  const bool whole = finish == MM_REPLY_WHOLE;
  if (r->block == MM_BLOCK_VALUE) end_in_value(r, finish);
  if (!whole && begins_call(r, finish)) {
    mm_text_clear(&r->shown);
    mm_text_clear(&r->in);
    return;
  }
  if (r->block == MM_BLOCK_NAME) mm_block_show(r);
  if (r->block == MM_BLOCK_NAME) mm_reply_emit(r, MM_REPLY_CONTENT, INVOKE, strlen(INVOKE));
  if (!r->open && r->in.n) mm_block_stray(r, r->in.n);
  mm_text_clear(&r->in);
  if (r->open && whole) mm_block_end_call(r);
}

static bool is_text(const mm_reply *r, mm_marker m) {
  if (m == MM_MARK_CALLS_END) return false;
  return m != MM_MARK_CALLS || (r->block != MM_BLOCK_NEXT && r->block != MM_BLOCK_STRAY);
}

const mm_block_parser mm_block_m2 = {block_text, is_text, block_end};
