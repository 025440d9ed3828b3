/* Tool calls of M1: a JSON object {"name": …, "arguments": {…}} on each line. */
#include <string.h>

#include "runtime/chat/reply_inside.h"

/* ---- One object ---- */

/* The arguments as JSON text: an object, or a string that holds one; absent where they are neither. */
static mm_str arguments_of(const mm_value *v) {
  mm_value_type type = MM_VALUE_NULL;
  mm_str s = {0};
  if (v && v->type == MM_VALUE_OBJECT) s = (mm_str){v->raw, v->raw_n};
  if (v && v->type == MM_VALUE_STRING) s = (mm_str){v->text, v->n};
  return s.p && mm_json_is_strict(s, &type) && type == MM_VALUE_OBJECT ? s : (mm_str){0};
}

/* r->value: a call, or content. */
static void take_object(mm_reply *r) {
  mm_arena a = {0};
  mm_err wrong = {0};
  const mm_value *v = mm_body_parse(&a, r->value.p, r->value.n, &wrong), *name = mm_value_get(v, "name");
  const mm_str arguments = arguments_of(mm_value_get(v, "arguments"));
  if (name && name->type == MM_VALUE_STRING && name->n && arguments.p) {
    mm_text_clear(&r->shown);
    r->literal = false;
    mm_reply_emit(r, MM_REPLY_CALL, name->text, name->n);
    mm_reply_emit(r, MM_REPLY_ARGUMENTS, arguments.p, arguments.n);
    mm_reply_emit(r, MM_REPLY_CALL_END, NULL, 0);
    r->block = MM_BLOCK_NEXT;
  } else {
    mm_block_show(r);
    mm_reply_emit(r, MM_REPLY_CONTENT, r->value.p, r->value.n);
    r->block = MM_BLOCK_STRAY;
  }
  mm_arena_close(&a);
  mm_text_clear(&r->value);
}

/* An object that did not end on its line is content. */
static void give_up(mm_reply *r) {
  mm_block_show(r);
  mm_reply_emit(r, MM_REPLY_CONTENT, r->value.p, r->value.n);
  mm_text_clear(&r->value);
  r->block = MM_BLOCK_STRAY_LINE;
}

/* ---- The text of a block; each takes what it can of r->in ---- */

static void begin_line(mm_reply *r) {
  r->block = *r->in.p == '{' ? MM_BLOCK_LINE : MM_BLOCK_STRAY;
  r->depth = 0;
  r->quoted = r->escaped = false;
}

/* Between objects. Braces too many after a call are dropped. */
static void at_start(mm_reply *r) {
  size_t n = mm_block_space(r);
  if (r->block == MM_BLOCK_START) mm_text_add(&r->shown, r->in.p, n);
  if (r->block == MM_BLOCK_NEXT)
    while (n < r->in.n && (r->in.p[n] == '}' || strchr(" \t\r\n", r->in.p[n])) && r->in.p[n]) n++;
  mm_block_drop(r, n);
  if (r->in.n) begin_line(r);
}

/* At the start of a line of stray text: whether an object begins. */
static void at_line(mm_reply *r) {
  size_t n = 0;
  while (n < r->in.n && (r->in.p[n] == ' ' || r->in.p[n] == '\t')) n++;
  mm_block_stray(r, n);
  if (r->in.n) begin_line(r);
}

static void in_stray(mm_reply *r) {
  const char *end = memchr(r->in.p, '\n', r->in.n);
  mm_block_stray(r, end ? (size_t)(end - r->in.p) + 1 : r->in.n);
  if (end) r->block = MM_BLOCK_STRAY_LINE;
}

static void in_object(mm_reply *r) {
  size_t i = 0;
  bool done = false, broken = false;
  for (; i < r->in.n && !done && !broken; i++) {
    const char c = r->in.p[i];
    broken = c == '\n';
    if (r->escaped) {
      r->escaped = false;
    } else if (r->quoted) {
      r->escaped = c == '\\';
      r->quoted = c != '"';
    } else {
      r->quoted = c == '"';
      r->depth += c == '{' || c == '[';
      r->depth -= (c == '}' || c == ']') && r->depth;
      done = !r->depth;
    }
  }
  mm_text_add(&r->value, r->in.p, i);
  mm_block_drop(r, i);
  if (r->value.failed) return;
  if (broken)
    give_up(r);
  else if (done)
    take_object(r);
}

void mm_block_m1_text(mm_reply *r) {
  while (r->in.n && !r->value.failed) switch (r->block) {
      case MM_BLOCK_START:
      case MM_BLOCK_NEXT: at_start(r); break;
      case MM_BLOCK_STRAY_LINE: at_line(r); break;
      case MM_BLOCK_STRAY: in_stray(r); break;
      default: in_object(r); break;
    }
}

/* ---- Ends ---- */

bool mm_block_m1_marker(const mm_reply *r, mm_marker m) {
  if (m == MM_MARK_CALLS_END) return r->block == MM_BLOCK_LINE && r->quoted;
  return m != MM_MARK_CALLS || r->block != MM_BLOCK_NEXT;
}

void mm_block_m1_end(mm_reply *r) {
  if (r->block == MM_BLOCK_LINE) give_up(r);
}
