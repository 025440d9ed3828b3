/* Replies: separates markers from text, and reasoning from content. */
#include "runtime/chat/reply.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/chat/reply_inside.h"

#define BLOCK_PIECE 256 /* bytes */

const char *const mm_reply_tag[MM_REPLY_TAGS] = {"<think>",      "</think>",     "<minimax:tool_call>", "</minimax:tool_call>",
                                                 "<tool_calls>", "</tool_calls>"};

bool mm_reply_is_tag(const char *bytes, size_t n) {
  for (size_t i = 0; i < MM_REPLY_TAGS; i++)
    if (n == strlen(mm_reply_tag[i]) && memcmp(bytes, mm_reply_tag[i], n) == 0) return true;
  return false;
}

mm_reply *mm_reply_open(const mm_reply_settings *s, mm_err *err) {
  static const char *const m2[] = {"<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"};
  static const char *const m1[] = {"<think>", "</think>", "<tool_calls>", "</tool_calls>"};
  mm_reply *r = mm_calloc(1, sizeof *r, err);
  if (!r) return NULL;
  r->s = *s;
  r->reasoning = s->in_reasoning;
  r->append_open = s->append_think && r->reasoning;
  r->fresh = r->silent = true;
  for (int i = 0; i < MM_MARKERS; i++) {
    r->marker[i] = s->format->family == MM_CHAT_M2 ? m2[i] : m1[i];
    r->marker_id[i] = s->tokenizer ? mm_tokenizer_find_added(s->tokenizer, r->marker[i]) : -1;
  }
  r->tools = s->tools ? s->tools : &r->own;
  if (s->tools || mm_tools_open(&r->own, s->tool, s->tool_count, err)) return r;
  mm_reply_close(r);
  return NULL;
}

#define TEXTS \
  { &r->bytes, &r->text, &r->held, &r->shown, &r->in, &r->name, &r->key, &r->value, &r->given, &r->fragment }

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

uint32_t mm_reply_calls(const mm_reply *r) { return r->calls; }
uint32_t mm_reply_reasoning_tokens(const mm_reply *r) { return r->reasoning_tokens; }

void mm_reply_emit(mm_reply *r, mm_reply_kind kind, const char *text, size_t n) {
  if (!n && kind != MM_REPLY_CALL_END) return;
  const bool of_call = kind == MM_REPLY_CALL || kind == MM_REPLY_ARGUMENTS || kind == MM_REPLY_CALL_END;
  r->silent = false;
  if (kind == MM_REPLY_CALL) r->calls++;
  r->s.sink(r->s.user, &(mm_reply_event){kind, of_call ? r->calls - 1 : 0, text, n});
}

/* ---- Prose ---- */

static void put_prose(mm_reply *r, const char *text, size_t n) {
  if (!n) return;
  if (r->append_open && r->silent) mm_reply_emit(r, MM_REPLY_CONTENT, "<think>", 7);
  mm_reply_emit(r, r->reasoning && !r->s.append_think ? MM_REPLY_REASONING : MM_REPLY_CONTENT, text, n);
}

static size_t space_length(const char *text, size_t n) {
  size_t i = 0;
  while (i < n && (text[i] == ' ' || text[i] == '\n' || text[i] == '\r' || text[i] == '\t')) i++;
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
  const size_t space = r->fresh ? space_length(text, n) : 0;
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
  r->lead = lead;
}

/* Closes the reasoning with a tag in the content. If the client sends that content back, it splits into reasoning and content again. */
static void append_close(mm_reply *r) {
  if (!r->append_open) return;
  put_prose(r, "\n</think>\n\n", 11);
  r->append_open = false;
}

static void prose_marker(mm_reply *r, mm_marker m) {
  const bool m2 = r->s.format->family == MM_CHAT_M2, by_id = r->marker_id[m] >= 0, raw = r->s.append_think;
  if (m == MM_MARK_THINK && !r->reasoning && ((r->fresh && r->silent) || by_id)) {
    prose_ends(r, true);
    r->append_open = raw;
    if (raw && !r->silent) mm_reply_emit(r, MM_REPLY_CONTENT, "<think>", 7);
    prose_begins(r, true, 1);
  } else if (m == MM_MARK_THINK && r->reasoning && r->fresh) {
    mm_text_clear(&r->held); /* the prompt had it already */
    r->lead = 1;
  } else if (m == MM_MARK_THINK_END && r->reasoning) {
    prose_ends(r, false);
    if (raw && r->silent) mm_reply_emit(r, MM_REPLY_CONTENT, "<think>", 7);
    append_close(r);
    prose_begins(r, false, 2);
  } else if (m == MM_MARK_CALLS && r->s.calls && !r->quoting && (m2 || !r->reasoning)) {
    prose_ends(r, false);
    append_close(r);
    r->reasoning = false;
    r->block = MM_BLOCK_START;
    r->literal = false;
    mm_text_put(&r->shown, r->marker[m]);
  } else {
    if (m == MM_MARK_THINK && !r->reasoning) r->quoting = true;
    if (m == MM_MARK_THINK_END) r->quoting = false;
    prose_text(r, r->marker[m], strlen(r->marker[m]));
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

/* ---- The way in ---- */

/* In pieces, so that no step of a block parser moves much. */
static void block_text(mm_reply *r, const char *text, size_t n) {
  for (size_t len; n && !r->in.failed; text += len, n -= len) {
    len = n < BLOCK_PIECE ? n : BLOCK_PIECE;
    while (len < n && ((uint8_t)text[len] & 0xc0) == 0x80) len--;
    mm_text_add(&r->in, text, len);
    if (r->in.failed) return;
    if (r->s.format->family == MM_CHAT_M2)
      mm_block_m2_text(r);
    else
      mm_block_m1_text(r);
  }
}

static void give_text(mm_reply *r, const char *text, size_t n) {
  if (!n) return;
  if (r->block)
    block_text(r, text, n);
  else
    prose_text(r, text, n);
}

static void end_block(mm_reply *r, bool whole) {
  if (r->s.format->family == MM_CHAT_M2)
    mm_block_m2_end(r, whole);
  else
    mm_block_m1_end(r, whole);
}

/* The closing tag, or an opening one once more. */
static void leave_block(mm_reply *r, mm_marker m) {
  const char *text = r->marker[m];
  end_block(r, true);
  mm_text_clear(&r->in);
  mm_text_clear(&r->shown);
  if (m == MM_MARK_CALLS_END && r->literal) mm_reply_emit(r, MM_REPLY_CONTENT, text, strlen(text));
  r->literal = false;
  r->block = m == MM_MARK_CALLS ? MM_BLOCK_START : MM_BLOCK_NONE;
  if (r->block)
    mm_text_put(&r->shown, text);
  else
    prose_begins(r, false, 1);
}

static void give_marker(mm_reply *r, mm_marker m) {
  const bool m2 = r->s.format->family == MM_CHAT_M2;
  if (!r->block)
    prose_marker(r, m);
  else if (m2 ? mm_block_m2_marker(r, m) : mm_block_m1_marker(r, m))
    give_text(r, r->marker[m], strlen(r->marker[m]));
  else
    leave_block(r, m);
}

/* The marker, matched by text, that s begins with, MM_MARKERS: none; *partial: s may become one. */
static mm_marker marker_at(const mm_reply *r, const char *s, size_t n, bool *partial) {
  *partial = false;
  for (int i = 0; i < MM_MARKERS; i++) {
    const size_t len = strlen(r->marker[i]);
    if (r->marker_id[i] >= 0 || memcmp(s, r->marker[i], n < len ? n : len) != 0) continue;
    if (n >= len) return (mm_marker)i;
    *partial = true;
  }
  return MM_MARKERS;
}

/* Splits r->text at markers; text that may be the beginning of a marker waits. */
static void find_markers(mm_reply *r) {
  size_t from = 0;
  const char *s;
  bool partial;
  while (from < r->text.n) {
    size_t at = from;
    mm_marker m = MM_MARKERS;
    partial = false;
    while (at < r->text.n && (s = memchr(r->text.p + at, '<', r->text.n - at))) {
      at = (size_t)(s - r->text.p);
      m = marker_at(r, s, r->text.n - at, &partial);
      if (m != MM_MARKERS || partial) break;
      at++;
    }
    if (m == MM_MARKERS && !partial) at = r->text.n;
    give_text(r, r->text.p + from, at - from);
    from = at;
    if (m == MM_MARKERS) break;
    give_marker(r, m);
    from += strlen(r->marker[m]);
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
    if (all_well(r, err)) give_marker(r, (mm_marker)i);
    return all_well(r, err);
  }
  if (n) push_bytes(r, bytes, n, err);
  return all_well(r, err);
}

bool mm_reply_end(mm_reply *r, bool whole, mm_err *err) {
  bool partial = false;
  /* Behind a call the beginning of the tag that ends them is no text. */
  if (!whole && r->block == MM_BLOCK_NEXT && !r->in.n && r->text.n && marker_at(r, r->text.p, r->text.n, &partial) == MM_MARKERS && partial)
    mm_text_clear(&r->text);
  push_bytes(r, "", 0, err);
  if (!all_well(r, err)) return false;
  if (!r->block) {
    prose_ends(r, true);
  } else {
    end_block(r, whole);
    mm_block_show(r);
  }
  return all_well(r, err);
}
