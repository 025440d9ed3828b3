/* Tool calls of M1: a JSON object {"name": …, "arguments": {…}} on each line. */
#include <stdlib.h>
#include <string.h>

#include "runtime/chat/reply_inside.h"

/* ---- A call that comes whole ---- */

/* The arguments of an object: an object, or a string that holds one; NULL: neither. */
static const mm_value *arguments_of(mm_arena *a, const mm_value *object) {
  const mm_value *v = mm_value_get(object, "arguments");
  mm_str s = {0};
  if (v && v->type == MM_VALUE_OBJECT) s = (mm_str){v->raw, v->raw_n};
  if (v && v->type == MM_VALUE_STRING) s = (mm_str){v->text, v->n};
  v = mm_json_strict(a, s);
  return v && v->type == MM_VALUE_OBJECT ? v : NULL;
}

/* The name of an object's call; NULL: none. */
static const mm_value *name_of(const mm_value *object) {
  const mm_value *v = mm_value_get(object, "name");
  return v && v->type == MM_VALUE_STRING && v->n ? v : NULL;
}

/* Sends an object that stands in r->fragment or r->value: a key once. */
static void send_object(mm_reply *r, mm_reply_kind kind, const mm_value *object) {
  mm_text once = {0};
  mm_arguments_put_json(&once, object);
  r->value.failed |= once.failed;
  if (!once.failed) mm_reply_emit(r, kind, once.p, once.n);
  free(once.p);
}

static void begin_call(mm_reply *r, const char *name, size_t n) {
  mm_text_clear(&r->shown);
  r->literal = false;
  r->begun = true;
  mm_reply_emit(r, MM_REPLY_CALL, name, n);
}

static void end_call(mm_reply *r) {
  mm_reply_emit(r, MM_REPLY_CALL_END, NULL, 0);
  r->open = false;
  r->object.ended = true;
}

/* Emits the part of r->value that was not passed on as content. */
static void give_up(mm_reply *r) {
  const size_t from = r->begun ? r->object.sent : 0;
  mm_block_show(r);
  mm_reply_emit(r, MM_REPLY_CONTENT, r->value.p + from, r->value.n - from);
}

/* r->value as a whole; false: it is no call. */
static bool take_object(mm_reply *r) {
  mm_arena a = {0};
  mm_err wrong = {0};
  const mm_value *v = mm_body_parse(&a, r->value.p, r->value.n, &wrong), *name = name_of(v), *arguments = arguments_of(&a, v);
  const bool ok = name && arguments;
  if (ok) {
    begin_call(r, name->text, name->n);
    send_object(r, MM_REPLY_ARGUMENTS, arguments);
    end_call(r);
  }
  mm_arena_close(&a);
  return ok;
}

/* ---- A call that comes argument by argument ---- */

/* JSON around a slice of r->value; NULL: none. */
static const mm_value *wrapped(mm_reply *r, mm_arena *a, const char *before, size_t from, const char *after) {
  mm_text_clear(&r->fragment);
  mm_text_put(&r->fragment, before);
  mm_text_add(&r->fragment, r->value.p + from, r->value.n - from);
  mm_text_put(&r->fragment, after);
  return r->fragment.failed ? NULL : mm_json_strict(a, (mm_str){r->fragment.p, r->fragment.n});
}

/* Before the brace that opens the first object inside r->value: whether it is the arguments of a call whose name is known. */
static void find_arguments(mm_reply *r) {
  mm_arena a = {0};
  const mm_value *v = wrapped(r, &a, "", 0, "{}}"), *name = name_of(v), *last = v ? v->first : NULL;
  while (last && last->next) last = last->next;
  if (last && last == mm_value_get(v, "arguments") && last->type == MM_VALUE_OBJECT && name) {
    mm_text_clear(&r->name);
    mm_text_add(&r->name, name->text, name->n);
    r->open = true;
    r->object.sent = r->value.n;
  }
  mm_arena_close(&a);
}

/* Sends r->value behind what was sent: an argument that `member` is in r->fragment, with the signs around it; NULL: signs alone. */
static void send_argument(mm_reply *r, const mm_value *member) {
  const char *from = r->value.p + r->object.sent;
  const size_t n = r->value.n - r->object.sent;
  r->object.sent = r->value.n;
  if (!member || !member->repeats) {
    mm_reply_emit(r, MM_REPLY_ARGUMENTS, from, n);
    return;
  }
  const size_t before = (size_t)(member->raw - r->fragment.p), behind = before + member->raw_n; /* both begin with one sign */
  mm_reply_emit(r, MM_REPLY_ARGUMENTS, from, before);
  send_object(r, MM_REPLY_ARGUMENTS, member);
  mm_reply_emit(r, MM_REPLY_ARGUMENTS, from + behind, n - behind);
}

/* Before a comma or the closing brace of open arguments: passes on the argument that ends there; true: with the brace. One that is no JSON
 * is the last: what was not passed on will be content, and a call that was begun has no end. */
static bool pass_argument(mm_reply *r, bool last) {
  mm_arena a = {0};
  const mm_value *v = wrapped(r, &a, "{", r->object.sent + 1, "}");
  const bool none = v && !v->count && last && r->value.p[r->object.sent] == '{', ok = v && (v->count == 1 || none);
  if (ok && last) mm_text_put(&r->value, "}");
  if (ok && !r->value.failed) {
    if (!r->begun) begin_call(r, r->name.p, r->name.n);
    send_argument(r, v->first);
    if (last) end_call(r);
  }
  r->open = r->open && ok;
  mm_arena_close(&a);
  return ok && last;
}

/* Behind the arguments of a call the rest of its object: a name or arguments in it count in place of the first ones. */
static bool take_rest(mm_reply *r, mm_arena *a) {
  const mm_value *rest = wrapped(r, a, "{\"\": 0", r->object.sent, ""), *name = name_of(rest), *arguments = arguments_of(a, rest);
  if (name) mm_reply_emit(r, MM_REPLY_NAME_AGAIN, name->text, name->n);
  if (arguments) send_object(r, MM_REPLY_ARGUMENTS_AGAIN, arguments);
  return rest;
}

/* The object ends, or its line ends before it. Text after the arguments is dropped if it is the rest of an object. */
static void end_object(mm_reply *r, bool whole) {
  mm_arena a = {0};
  bool call = r->begun && r->object.ended;
  if (call && whole) {
    call = take_rest(r, &a);
  } else if (call) {
    size_t at = r->object.sent;
    while (at < r->value.n && strchr(" \t\r\n", r->value.p[at]) && r->value.p[at]) at++;
    call = at == r->value.n;
  } else if (whole && !r->begun) {
    call = take_object(r);
  }
  if (!call) give_up(r);
  mm_arena_close(&a);
  mm_text_clear(&r->value);
  r->block = !whole ? MM_BLOCK_STRAY_LINE : call ? MM_BLOCK_NEXT : MM_BLOCK_STRAY;
}

/* ---- The text of a block; each takes what it can of r->in ---- */

static void begin_line(mm_reply *r) {
  r->block = *r->in.p == '{' ? MM_BLOCK_LINE : MM_BLOCK_STRAY;
  r->object.depth = 0;
  r->object.quoted = r->object.escaped = r->object.tried = r->begun = r->open = r->object.ended = false;
  r->object.sent = 0;
  mm_text_clear(&r->value);
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

/* The bytes of r->in from *from up to `to` belong to the object. */
static void keep(mm_reply *r, size_t *from, size_t to) {
  mm_text_add(&r->value, r->in.p + *from, to - *from);
  *from = to;
}

/* A byte of the object that is not inside a string, at `at`; *from: what was not kept. */
static void structure(mm_reply *r, size_t *from, size_t at) {
  const char c = r->in.p[at];
  const bool opens = c == '{' || c == '[', closes = c == '}' || c == ']';
  r->object.quoted = c == '"';
  if (opens && r->object.depth == 1 && !r->object.tried) {
    keep(r, from, at);
    r->object.tried = true;
    if (c == '{') find_arguments(r);
  } else if (r->open && r->object.depth == 2 && c == ']') {
    r->open = false;
  } else if (r->open && r->object.depth == 2 && (c == ',' || c == '}')) {
    keep(r, from, at);
    if (r->value.failed) return;
    *from += pass_argument(r, c == '}');
  }
  r->object.depth += opens;
  r->object.depth -= closes && r->object.depth;
}

static void in_object(mm_reply *r) {
  size_t i = 0, from = 0;
  bool done = false, broken = false;
  for (; i < r->in.n && !done && !broken && !r->value.failed; i++) {
    const char c = r->in.p[i];
    broken = c == '\n';
    if (r->object.escaped) {
      r->object.escaped = false;
    } else if (r->object.quoted) {
      r->object.escaped = c == '\\';
      r->object.quoted = c != '"';
    } else {
      structure(r, &from, i);
      done = !r->object.depth;
    }
  }
  keep(r, &from, i);
  mm_block_drop(r, i);
  if (!r->value.failed && (broken || done)) end_object(r, done);
}

static void block_text(mm_reply *r) {
  while (r->in.n && !r->value.failed) switch (r->block) {
      case MM_BLOCK_START:
      case MM_BLOCK_NEXT: at_start(r); break;
      case MM_BLOCK_STRAY_LINE: at_line(r); break;
      case MM_BLOCK_STRAY: in_stray(r); break;
      default: in_object(r); break;
    }
}

/* ---- Ends ---- */

static bool is_text(const mm_reply *r, mm_marker m) {
  if (m == MM_MARK_CALLS_END) return r->block == MM_BLOCK_LINE && r->object.quoted;
  return m != MM_MARK_CALLS || r->block != MM_BLOCK_NEXT;
}

/* The reply was cut off inside arguments: they are the beginning of JSON. */
static void cut_arguments(mm_reply *r) {
  if (!r->begun) begin_call(r, r->name.p, r->name.n);
  mm_reply_emit(r, MM_REPLY_ARGUMENTS, r->value.p + r->object.sent, r->value.n - r->object.sent);
}

/* True if the object at hand may still become a call, or its rest belongs to one. */
static bool may_be_call(const mm_reply *r) { return r->begun ? r->object.ended : !r->object.sent; }

/* A call that was cut off before its arguments is not shown. */
static void block_end(mm_reply *r, mm_reply_finish finish) {
  const bool line = r->block == MM_BLOCK_LINE, whole = finish == MM_REPLY_WHOLE;
  const bool drop = finish == MM_REPLY_CUT || !r->literal; /* in a block with other text a stopped object is text */
  if (!whole && (line ? !r->open && drop && may_be_call(r) : r->block == MM_BLOCK_START)) {
    mm_text_clear(&r->shown);
    mm_text_clear(&r->value);
  } else if (line && !whole && r->open) {
    cut_arguments(r);
  } else if (line) {
    end_object(r, false);
  }
}

const mm_block_parser mm_block_m1 = {block_text, is_text, block_end};
