/* Replies: separates markers from text, and reasoning from content. */
#include "runtime/chat/reply.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/chat/reply_inside.h"

#define BLOCK_PIECE 256 /* bytes */

#define GAP_MAX 64 /* bytes of white space between M3's mark and a tag */

const char *const mm_reply_tag[MM_REPLY_TAGS] = {"<think>",      "</think>",      "<minimax:tool_call>", "</minimax:tool_call>",
                                                 "<tool_calls>", "</tool_calls>", "<mm:think>",          "</mm:think>",
                                                 MM_CHAT_MARK};

bool mm_reply_is_tag(const mm_chat_format *f, const char *bytes, size_t n) {
  const mm_chat_tags *t = f->tags;
  const char *const tag[] = {t->think, t->think_end, t->calls, t->calls_end, t->marked ? MM_CHAT_MARK : t->think};
  for (size_t i = 0; i < sizeof tag / sizeof *tag; i++)
    if (n == strlen(tag[i]) && memcmp(bytes, tag[i], n) == 0) return true;
  return false;
}

mm_reply *mm_reply_open(const mm_reply_settings *s, mm_err *err) {
  const mm_chat_tags *t = s->format->tags;
  const char *const tag[MM_MARKERS] = {t->think, t->think_end, t->calls, t->calls_end};
  mm_reply *r = mm_calloc(1, sizeof *r, err);
  if (!r) return NULL;
  r->s = *s;
  r->reasoning = s->in_reasoning;
  r->append_open = s->append_think && r->reasoning;
  r->fresh = r->silent = true;
  for (int i = 0; i < MM_MARKERS; i++) {
    const bool token = s->tokenizer && !(t->marked && (i == MM_MARK_CALLS || i == MM_MARK_CALLS_END));
    r->marker[i] = tag[i];
    r->marker_id[i] = token ? mm_tokenizer_find_added(s->tokenizer, tag[i]) : -1;
  }
  r->mark_id = s->tokenizer && t->marked ? mm_tokenizer_find_added(s->tokenizer, MM_CHAT_MARK) : -1;
  r->tools = s->tools ? s->tools : &r->own;
  if (s->tools || mm_tools_open(&r->own, s->tool, s->tool_count, err)) return r;
  mm_reply_close(r);
  return NULL;
}

#define TEXTS \
  { &r->bytes, &r->text, &r->held, &r->shown, &r->in, &r->name, &r->key, &r->value, &r->given, &r->fragment, &r->raw, &r->within }

void mm_reply_close(mm_reply *r) {
  if (!r) return;
  mm_text *const text[] = TEXTS;
  for (size_t i = 0; i < sizeof text / sizeof *text; i++) free(text[i]->p);
  mm_tools_close(&r->own);
  free(r);
}

mm_reply_place mm_reply_where(const mm_reply *r) {
  if (r->block) return MM_REPLY_OUTSIDE;
  if (r->reasoning) return MM_REPLY_IN_REASONING;
  return r->fresh && r->silent ? MM_REPLY_UNDECIDED : MM_REPLY_OUTSIDE;
}

bool mm_reply_in_calls(const mm_reply *r) { return r->block != MM_BLOCK_NONE; }

uint32_t mm_reply_reasoning_tokens(const mm_reply *r) { return r->reasoning_tokens; }

void mm_reply_emit(mm_reply *r, mm_reply_kind kind, const char *text, size_t n) {
  for (const char *mark; r->s.format->tags->marked && n && (mark = memchr(text, MM_REPLY_MARK, n));) {
    const size_t before = (size_t)(mark - text);
    mm_reply_emit(r, kind, text, before);
    r->s.sink(r->s.user, &(mm_reply_event){kind, 0, MM_CHAT_MARK, strlen(MM_CHAT_MARK)});
    r->silent = false;
    text += before + 1;
    n -= before + 1;
    if (!n) return;
  }
  if (!n && kind != MM_REPLY_CALL_END) return;
  const bool of_call = kind >= MM_REPLY_CALL;
  r->silent = false;
  if (kind == MM_REPLY_CALL) r->calls++;
  r->s.sink(r->s.user, &(mm_reply_event){kind, of_call ? r->calls - 1 : 0, text, n});
}

/* ---- Prose ---- */

static void append_begin(mm_reply *r) {
  const char *tag = r->marker[MM_MARK_THINK];
  mm_reply_emit(r, MM_REPLY_CONTENT, tag, strlen(tag));
}

static void put_prose(mm_reply *r, const char *text, size_t n) {
  if (!n) return;
  if (r->append_open && r->silent) append_begin(r);
  mm_reply_emit(r, r->reasoning && !r->s.append_think ? MM_REPLY_REASONING : MM_REPLY_CONTENT, text, n);
}

static size_t space_length(const char *text, size_t n) {
  size_t i = 0;
  while (i < n && mm_is_space(text[i])) i++;
  return i;
}

/* The white space at the start of a reasoning or content that turned out to have more. */
static void put_lead(mm_reply *r) {
  size_t drop = 0;
  while (drop < r->lead && drop < r->held.n && r->held.p[drop] == '\n') drop++;
  if (r->held.n > drop) put_prose(r, r->held.p + drop, r->held.n - drop);
  mm_text_clear(&r->held);
  r->fresh = false;
}

/* White space waits while nothing else has come, and so does a newline that may be the last. */
static void prose_text(mm_reply *r, const char *text, size_t n) {
  const size_t space = r->fresh && (r->reasoning || !r->s.as_written) ? space_length(text, n) : 0;
  mm_text_add(&r->held, text, space);
  text += space;
  n -= space;
  if (!n) return;
  if (r->fresh) put_lead(r);
  put_prose(r, r->held.p, r->held.n);
  mm_text_clear(&r->held);
  const size_t last = text[n - 1] == '\n';
  put_prose(r, text, n - last);
  mm_text_add(&r->held, text + n - last, last);
}

/* A reasoning or content ends; what is held goes where it is `kept`. White space alone never is. */
static void prose_ends(mm_reply *r, bool kept) {
  if (kept && !r->fresh) put_prose(r, r->held.p, r->held.n);
  mm_text_clear(&r->held);
}

static void prose_begins(mm_reply *r, bool reasoning, unsigned lead) {
  r->reasoning = reasoning;
  r->fresh = true;
  r->lead = r->s.format->tags->newlines ? lead : 0;
}

/* Closes the reasoning with a tag in the content. If the client sends that content back, it splits into reasoning and content again. */
static void append_close(mm_reply *r) {
  if (!r->append_open) return;
  const bool newlines = r->s.format->tags->newlines;
  if (newlines) put_prose(r, "\n", 1);
  put_prose(r, r->marker[MM_MARK_THINK_END], strlen(r->marker[MM_MARK_THINK_END]));
  if (newlines) put_prose(r, "\n\n", 2);
  r->append_open = false;
}

static void prose_marker(mm_reply *r, mm_marker m, const char *text, size_t n) {
  const mm_chat_tags *tags = r->s.format->tags;
  const bool by_id = r->marker_id[m] >= 0, raw = r->s.append_think, first = r->fresh && r->silent;
  if (m == MM_MARK_THINK && !r->reasoning && (by_id || (first && !r->s.as_written))) {
    prose_ends(r, true);
    r->append_open = raw;
    if (raw && !r->silent) append_begin(r);
    prose_begins(r, true, 1);
  } else if (m == MM_MARK_THINK && r->reasoning && r->fresh) {
    mm_text_clear(&r->held); /* the prompt had it already */
    r->lead = tags->newlines;
  } else if (m == MM_MARK_THINK_END && !r->reasoning && first && tags->bare_end) {
    mm_text_clear(&r->held); /* the prompt had it already, or the model did not reason */
  } else if (m == MM_MARK_THINK_END && r->reasoning) {
    prose_ends(r, !tags->newlines);
    if (raw && r->silent) append_begin(r);
    append_close(r);
    prose_begins(r, false, 2);
  } else if (m == MM_MARK_CALLS && r->s.calls && !r->quoting && (tags->call_token || !r->reasoning)) {
    prose_ends(r, !tags->newlines);
    append_close(r);
    r->reasoning = false;
    r->block = MM_BLOCK_START;
    r->literal = false;
    mm_text_add(&r->shown, text, n);
  } else {
    if (m == MM_MARK_THINK && !r->reasoning) r->quoting = true;
    if (m == MM_MARK_THINK_END) r->quoting = false;
    prose_text(r, text, n);
  }
}

/* ---- Blocks ---- */

void mm_block_drop(mm_reply *r, size_t n) {
  memmove(r->in.p, r->in.p + n, r->in.n - n);
  r->in.n -= n;
}

void mm_block_stray(mm_reply *r, size_t n) {
  mm_block_show(r);
  mm_reply_emit(r, MM_REPLY_CONTENT, r->in.p, n);
  mm_block_drop(r, n);
}

void mm_block_show(mm_reply *r) {
  if (!r->shown.n) return;
  mm_reply_emit(r, MM_REPLY_CONTENT, r->shown.p, r->shown.n);
  mm_text_clear(&r->shown);
  r->literal = true;
}

size_t mm_block_space(const mm_reply *r) { return space_length(r->in.p, r->in.n); }

/* ---- Arguments ---- */

void mm_block_piece(mm_reply *r, const char *text, size_t n, bool first, bool last) {
  const size_t from = r->fragment.n;
  mm_text_quote(&r->fragment, text, n);
  if (r->fragment.failed) return;
  if (!last) r->fragment.n--;
  if (first) return;
  memmove(r->fragment.p + from, r->fragment.p + from + 1, r->fragment.n - from - 1);
  r->fragment.n--;
}

void mm_block_send(mm_reply *r) {
  if (!r->fragment.failed) mm_reply_emit(r, MM_REPLY_ARGUMENTS, r->fragment.p, r->fragment.n);
  if (!r->fragment.failed) mm_text_clear(&r->fragment);
}

void mm_block_flow(mm_reply *r, const char *text, size_t n) {
  r->streaming = true;
  mm_block_key(r);
  mm_block_piece(r, text, n, true, false);
  mm_block_send(r);
}

void mm_block_end_call(mm_reply *r) {
  mm_reply_emit(r, MM_REPLY_ARGUMENTS, r->begun ? "}" : "{}", r->begun ? 1 : 2);
  mm_reply_emit(r, MM_REPLY_CALL_END, NULL, 0);
  mm_text_clear(&r->shown);
  mm_text_clear(&r->raw);
  r->literal = r->open = false;
  r->block = MM_BLOCK_NEXT;
}

mm_str mm_block_name(const char *s, size_t n) {
  const char *end = s + n;
  while (s < end && mm_is_space(*s)) s++;
  while (s < end && mm_is_space(end[-1])) end--;
  if (end - s >= 2 && (*s == '"' || *s == '\'') && end[-1] == *s) s++, end--;
  return (mm_str){s, (size_t)(end - s)};
}

void mm_block_key(mm_reply *r) {
  mm_text_put(&r->fragment, r->begun ? ", " : "{");
  mm_text_quote(&r->fragment, r->key.p, r->key.n);
  mm_text_put(&r->fragment, ": ");
  r->begun = true;
}

/* ---- The way in ---- */

static const mm_block_parser *parser_of(const mm_reply *r) {
  static const mm_block_parser *const parser[] = {
      [MM_CHAT_M1] = &mm_block_m1, [MM_CHAT_M1_RELEASED] = &mm_block_m1, [MM_CHAT_M2] = &mm_block_m2, [MM_CHAT_M3] = &mm_block_m3};
  return parser[r->s.format->family];
}

/* In pieces, so that no step of a block parser moves much. */
static void block_text(mm_reply *r, const char *text, size_t n) {
  for (size_t len; n && !r->in.failed; text += len, n -= len) {
    len = n < BLOCK_PIECE ? n : BLOCK_PIECE;
    while (len < n && ((uint8_t)text[len] & 0xc0) == 0x80) len--;
    mm_text_add(&r->in, text, len);
    if (r->in.failed) return;
    parser_of(r)->text(r);
  }
}

static void give_text(mm_reply *r, const char *text, size_t n) {
  if (!n) return;
  if (r->block)
    block_text(r, text, n);
  else
    prose_text(r, text, n);
}

/* The closing tag, or an opening one once more. */
static void leave_block(mm_reply *r, mm_marker m, const char *text, size_t n) {
  parser_of(r)->end(r, MM_REPLY_WHOLE);
  mm_text_clear(&r->in);
  mm_text_clear(&r->shown);
  if (m == MM_MARK_CALLS_END && r->literal) mm_reply_emit(r, MM_REPLY_CONTENT, text, n);
  r->literal = false;
  r->block = m == MM_MARK_CALLS ? MM_BLOCK_START : MM_BLOCK_NONE;
  if (r->block)
    mm_text_add(&r->shown, text, n);
  else
    prose_begins(r, false, 1);
}

/* A marker, as n bytes of text have it. */
static void give_marker(mm_reply *r, mm_marker m, const char *text, size_t n) {
  if (!r->block)
    prose_marker(r, m, text, n);
  else if (parser_of(r)->marker(r, m))
    give_text(r, text, n);
  else
    leave_block(r, m, text, n);
}

/* Returns whether the text begins with white space and the tag, or may once it is longer; *used: bytes of both. */
static mm_tag_match tag_behind(const char *text, size_t n, const char *tag, size_t *used) {
  const size_t at = space_length(text, n), len = strlen(tag);
  *used = 0;
  if (at > GAP_MAX) return MM_TAG_NO;
  *used = at + len;
  if (memcmp(text + at, tag, n - at < len ? n - at : len) != 0) return MM_TAG_NO;
  return n - at < len ? MM_TAG_PARTIAL : MM_TAG_YES;
}

/* The marker, matched by text, that s begins with, n bytes of *used; MM_MARKERS: none; *partial: s may become one. */
static mm_marker marker_at(const mm_reply *r, const char *s, size_t n, size_t *used, bool *partial) {
  const bool marked = r->s.format->tags->marked;
  *partial = false;
  for (int i = 0; i < MM_MARKERS; i++) {
    const bool behind = marked && (i == MM_MARK_CALLS || i == MM_MARK_CALLS_END); /* the mark */
    if (r->marker_id[i] >= 0 || behind != (*s == MM_REPLY_MARK)) continue;
    const mm_tag_match match = tag_behind(s + behind, n - behind, r->marker[i], used);
    *used += behind;
    if (match == MM_TAG_YES) return (mm_marker)i;
    *partial |= match == MM_TAG_PARTIAL;
  }
  return MM_MARKERS;
}

/* Turns M3's mark into its byte, where it is matched by text and `s` begins with it. True: `s` may become one. */
static bool take_mark(mm_reply *r, char *s, size_t n) {
  const size_t len = strlen(MM_CHAT_MARK);
  if (r->mark_id >= 0 || *s != *MM_CHAT_MARK || memcmp(s, MM_CHAT_MARK, n < len ? n : len) != 0) return false;
  if (n < len) return true;
  *s = MM_REPLY_MARK;
  memmove(s + 1, s + len, n - len);
  r->text.n -= len - 1;
  return false;
}

/* Where the next marker may begin in r->text from `at` on. */
static size_t next_candidate(const mm_reply *r, size_t at) {
  if (r->s.format->tags->marked) {
    while (at < r->text.n && r->text.p[at] != '<' && r->text.p[at] != *MM_CHAT_MARK && r->text.p[at] != MM_REPLY_MARK) at++;
    return at;
  }
  const char *s = at < r->text.n ? memchr(r->text.p + at, '<', r->text.n - at) : NULL;
  return s ? (size_t)(s - r->text.p) : r->text.n;
}

/* Splits r->text at markers; text that may be the beginning of a marker waits. */
static void find_markers(mm_reply *r) {
  size_t from = 0, used = 0;
  bool partial;
  while (from < r->text.n) {
    size_t at = from;
    mm_marker m = MM_MARKERS;
    partial = false;
    while ((at = next_candidate(r, at)) < r->text.n) {
      char *s = r->text.p + at;
      partial = r->s.format->tags->marked && take_mark(r, s, r->text.n - at);
      if (!partial) m = marker_at(r, s, r->text.n - at, &used, &partial);
      if (m != MM_MARKERS || partial) break;
      at++;
    }
    give_text(r, r->text.p + from, at - from);
    from = at;
    if (m == MM_MARKERS) break;
    give_marker(r, m, r->text.p + from, used);
    from += used;
  }
  if (r->text.failed) return;
  if (from) memmove(r->text.p, r->text.p + from, r->text.n - from);
  r->text.n -= from;
}

/* Bytes that are text; n = 0: the text ends here, because a marker follows or the reply ends. */
static void push_bytes(mm_reply *r, const char *bytes, size_t n, mm_err *err) {
  if (!MM_GROW(r->bytes.p, &r->bytes.cap, 3 * n + 5, err)) {
    r->bytes.failed = true;
    return;
  }
  const size_t len = mm_utf8_push(&r->utf8, bytes, n, r->bytes.p);
  mm_text_add(&r->text, r->bytes.p, len);
  if (r->text.failed) return;
  find_markers(r);
  if (n) return;
  give_text(r, r->text.p, r->text.n);
  mm_text_clear(&r->text);
}

static bool all_well(mm_reply *r, mm_err *err) {
  const mm_text *const text[] = TEXTS;
  for (size_t i = 0; i < sizeof text / sizeof *text; i++)
    if (text[i]->failed) return mm_fail_memory(err, text[i]->n);
  return true;
}

bool mm_reply_push(mm_reply *r, int32_t id, const char *bytes, size_t n, mm_err *err) {
  r->reasoning_tokens += r->reasoning;
  for (int i = 0; i < MM_MARKERS; i++) {
    if (id < 0 || id != r->marker_id[i]) continue;
    push_bytes(r, "", 0, err);
    if (all_well(r, err)) give_marker(r, (mm_marker)i, r->marker[i], strlen(r->marker[i]));
    return all_well(r, err);
  }
  if (id >= 0 && id == r->mark_id) {
    push_bytes(r, "", 0, err);
    if (all_well(r, err)) mm_text_add(&r->text, &(char){MM_REPLY_MARK}, 1);
    return all_well(r, err);
  }
  if (n) push_bytes(r, bytes, n, err);
  return all_well(r, err);
}

/* True if the marker, matched by text, would be one here. */
static bool is_live(const mm_reply *r, mm_marker m) {
  const mm_chat_tags *tags = r->s.format->tags;
  const bool first = r->fresh && r->silent;
  if (r->block) return !parser_of(r)->marker(r, m);
  switch (m) {
    case MM_MARK_THINK: return r->reasoning ? r->fresh : first && !r->s.as_written;
    case MM_MARK_THINK_END: return r->reasoning || (first && tags->bare_end);
    case MM_MARK_CALLS: return r->s.calls && !r->quoting && (tags->call_token || !r->reasoning);
    default: return false;
  }
}

/* True if the text that waits is, from s on, the beginning of a tag, as far as is known. */
static bool begins_tag(const mm_reply *r, const char *s, mm_reply_finish finish) {
  const size_t n = r->text.n - (size_t)(s - r->text.p), len = strlen(MM_CHAT_MARK);
  const bool marked = r->s.format->tags->marked, mark = *s == MM_REPLY_MARK;
  if (marked && r->mark_id < 0 && n < len && memcmp(s, MM_CHAT_MARK, n) == 0)
    return finish == MM_REPLY_CUT && r->s.calls && (r->block || is_live(r, MM_MARK_CALLS));
  for (int i = 0; i < MM_MARKERS; i++) {
    const bool behind = marked && (i == MM_MARK_CALLS || i == MM_MARK_CALLS_END);
    size_t used;
    if (r->marker_id[i] >= 0 || behind != mark || tag_behind(s + behind, n - behind, r->marker[i], &used) != MM_TAG_PARTIAL) continue;
    /* Behind a call the beginning of the tag that ends them is no text, and the mark begins a tag. */
    if ((r->block == MM_BLOCK_NEXT && !r->in.n) || (mark && r->s.calls && !r->quoting) || (r->s.only_calls && !r->block && !r->reasoning))
      return true;
    if (finish == MM_REPLY_CUT && is_live(r, (mm_marker)i)) return true;
  }
  return false;
}

/* Drops what may have begun a tag from the text that waits. */
static void drop_tag(mm_reply *r, mm_reply_finish finish) {
  size_t at = 0;
  while ((at = next_candidate(r, at)) < r->text.n && !begins_tag(r, r->text.p + at, finish)) at++;
  r->text.n = at;
}

bool mm_reply_end(mm_reply *r, mm_reply_finish finish, mm_err *err) {
  if (finish != MM_REPLY_WHOLE && r->text.n) drop_tag(r, finish);
  push_bytes(r, "", 0, err);
  if (!all_well(r, err)) return false;
  if (!r->block) {
    prose_ends(r, true);
  } else {
    parser_of(r)->end(r, finish);
    mm_block_show(r);
  }
  return all_well(r, err);
}
