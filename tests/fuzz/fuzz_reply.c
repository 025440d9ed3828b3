/* Replies of any bytes: cut as the first bytes say, they give the same events as when whole; every event is valid UTF-8; arguments of
 * calls that ended are one JSON object. Schemas of any bytes: refused, or used. */
#include <stdlib.h>
#include <string.h>

#include "formats/body.h"
#include "runtime/chat/reply.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char weather[] =
    "{\"name\": \"f\", \"parameters\": {\"properties\": {\"s\": {\"type\": \"string\"}, \"i\": {\"type\": \"integer\"}, "
    "\"o\": {\"anyOf\": [{\"type\": \"object\"}, {\"type\": \"null\"}]}, \"b\": {\"type\": [\"boolean\", \"string\"]}}}}";

enum { IN_REASONING = 1, CALLS = 2, APPEND = 4, WHOLE = 8, M1 = 16, SCHEMA = 32, M3 = 64 };

typedef struct transcript {
  mm_text text, arguments;
  uint32_t calls;
  mm_reply_kind last;
} transcript;

static void check_arguments(transcript *t) {
  mm_arena a = {0};
  mm_err err = {0};
  const mm_value *v = mm_body_parse(&a, t->arguments.p, t->arguments.n, &err);
  if ((!v && err.status != MM_LIMIT && !strstr(err.text, "nesting")) || (v && v->type != MM_VALUE_OBJECT)) abort();
  mm_arena_close(&a);
}

static void note(void *user, const mm_reply_event *e) {
  transcript *t = user;
  if (!e->n && e->kind != MM_REPLY_CALL_END) abort();
  for (size_t i = 0, n; i < e->n; i += n)
    if (!(n = mm_utf8_len(e->text + i, e->n - i))) abort();
  if (e->kind == MM_REPLY_CALL && e->call != t->calls++) abort();
  if ((e->kind == MM_REPLY_ARGUMENTS || e->kind == MM_REPLY_CALL_END) && e->call + 1 != t->calls) abort();
  if (e->kind == MM_REPLY_CALL) mm_text_clear(&t->arguments);
  if (e->kind == MM_REPLY_ARGUMENTS) mm_text_add(&t->arguments, e->text, e->n);
  if (e->kind == MM_REPLY_CALL_END) check_arguments(t);
  if (!t->text.n || t->last != e->kind || e->kind == MM_REPLY_CALL) mm_text_printf(&t->text, "\xff%d", (int)e->kind);
  t->last = e->kind;
  mm_text_add(&t->text, e->text, e->n);
}

/* `step`: so many bytes at once, by turns with one; 0: all. false: the schema was refused. */
static bool record(transcript *t, unsigned flags, mm_chat_tool tool, const char *text, size_t n, size_t step) {
  const mm_reply_settings s = {.format = mm_chat_format_find(flags & M3   ? "minimax-m3"
                                                             : flags & M1 ? "minimax-m1"
                                                                          : "minimax-m2"),
                               .tool = &tool,
                               .tool_count = 1,
                               .calls = flags & CALLS,
                               .in_reasoning = flags & IN_REASONING && (flags & M3 || !(flags & M1)),
                               .append_think = flags & APPEND,
                               .sink = note,
                               .user = t};
  mm_err err = {0};
  mm_reply *r = mm_reply_open(&s, &err);
  if (!r && err.status == MM_OK) abort();
  if (!r) return false;
  for (size_t at = 0, turn = 0; at < n; turn++) {
    size_t len = step == 0 ? n : turn % 2 ? 1 : step;
    if (len > n - at) len = n - at;
    if (!mm_reply_push(r, -1, text + at, len, &err)) abort();
    at += len;
  }
  if (!mm_reply_end(r, flags & WHOLE ? MM_REPLY_WHOLE : MM_REPLY_CUT, &err)) abort();
  mm_reply_close(r);
  return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < 2) return 0;
  const unsigned flags = data[0];
  const char *text = (const char *)data + 2;
  size_t n = size - 2;
  mm_chat_tool tool = {.json = {weather, sizeof weather - 1}};
  if (flags & SCHEMA) { /* the first line */
    const char *end = memchr(text, '\n', n);
    const size_t len = end ? (size_t)(end - text) : n;
    tool.json = (mm_str){text, len};
    text += len;
    n -= len;
  }
  transcript whole = {0}, cut = {0};
  const bool ok = record(&whole, flags, tool, text, n, 0);
  if (record(&cut, flags, tool, text, n, data[1] % 32 + 1) != ok) abort();
  if (whole.text.n != cut.text.n || (cut.text.n && memcmp(whole.text.p, cut.text.p, cut.text.n) != 0)) abort();
  free(whole.text.p);
  free(whole.arguments.p);
  free(cut.text.p);
  free(cut.arguments.p);
  return 0;
}
