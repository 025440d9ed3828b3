/* A second parser of the reply, and what became of the bytes that it was given. */
#include "runtime/chat/reply_watch.h"

#include <stdlib.h>

#include "formats/text.h"

#define LEAD 2 /* newlines behind the end of the reasoning that are the template's, where it has any */

struct mm_reply_watch {
  mm_reply *reply;
  const mm_chat_format *format;
  bool special, one_call, ended;
  unsigned newlines; /* behind the end of the reasoning */
  mm_text text;      /* to be looked at with this token, or as long as it waits */
  unsigned lead;     /* so many newlines may still be the template's */
};

static void note(void *user, const mm_reply_event *e) {
  mm_reply_watch *w = user;
  w->ended |= e->kind == MM_REPLY_CALL_END;
}

mm_reply_watch *mm_reply_watch_open(const mm_reply_settings *s, bool special, bool one_call, mm_err *err) {
  mm_reply_watch *w = mm_calloc(1, sizeof *w, err);
  if (!w) return NULL;
  mm_reply_settings own = *s;
  own.sink = note;
  own.user = w;
  w->format = s->format;
  w->newlines = s->format->tags->newlines && !s->as_written ? LEAD : 0;
  w->special = special;
  w->one_call = one_call;
  if ((w->reply = mm_reply_open(&own, err))) return w;
  mm_reply_watch_close(w);
  return NULL;
}

void mm_reply_watch_close(mm_reply_watch *w) {
  if (!w) return;
  mm_reply_close(w->reply);
  MM_FREE(w->text.p, w);
}

/* Text outside the reasoning. */
static void add(mm_reply_watch *w, const char *bytes, size_t n) {
  while (n && w->lead && *bytes == '\n') bytes++, n--, w->lead--;
  if (n) w->lead = 0;
  mm_text_add(&w->text, bytes, n);
}

/* One step of the parser. </think> belongs to the reasoning, a tag of calls that ends it does not. */
static bool step(mm_reply_watch *w, int32_t id, const char *bytes, size_t n, mm_reply_seen *out) {
  const mm_reply_place before = mm_reply_where(w->reply);
  if (!mm_reply_push(w->reply, id, bytes, n, MM_IGNORED)) return false;
  const mm_reply_place now = mm_reply_where(w->reply);
  if (now == MM_REPLY_IN_REASONING || before == MM_REPLY_IN_REASONING) {
    mm_text_clear(&w->text);
    w->lead = now == MM_REPLY_IN_REASONING ? 0 : w->newlines;
    out->again = true;
    if (now != MM_REPLY_IN_REASONING && mm_reply_in_calls(w->reply) && mm_reply_is_tag(w->format, bytes, n)) add(w, bytes, n);
  } else {
    add(w, bytes, n);
  }
  return !w->text.failed;
}

bool mm_reply_watch_token(mm_reply_watch *w, int32_t id, const char *bytes, size_t n, bool is_special, mm_reply_seen *out) {
  *out = (mm_reply_seen){0};
  const bool tag = mm_reply_is_tag(w->format, bytes, n), shown = !is_special || w->special || tag;
  if (mm_reply_where(w->reply) == MM_REPLY_OUTSIDE) mm_text_clear(&w->text);
  if (!shown) {
    if (mm_reply_where(w->reply) != MM_REPLY_IN_REASONING) add(w, bytes, n);
  } else if (tag || mm_reply_where(w->reply) == MM_REPLY_OUTSIDE) {
    if (n && !step(w, id, bytes, n, out)) return false;
  } else {
    /* Its tags may be text, and begin and end within the token. */
    for (size_t i = 0; i < n; i++)
      if (!step(w, -1, bytes + i, 1, out)) return false;
  }
  out->waits = mm_reply_where(w->reply) == MM_REPLY_UNDECIDED;
  if (!out->waits) out->text = w->text.p, out->n = w->text.n;
  out->enough = w->one_call && w->ended;
  return !w->text.failed;
}

void mm_reply_watch_rest(const mm_reply_watch *w, mm_reply_seen *out) {
  *out = (mm_reply_seen){0};
  if (mm_reply_where(w->reply) == MM_REPLY_UNDECIDED) out->text = w->text.p, out->n = w->text.n;
}
