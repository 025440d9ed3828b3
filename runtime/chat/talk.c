/* Conversations in a terminal. */
#include "runtime/chat/talk.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/chat/reply.h"
#include "runtime/text/stops.h"

/* A message, its texts its own. */
typedef struct said {
  mm_role role;
  mm_text content, reasoning;
} said;

struct mm_talk {
  mm_talk_config c;
  const mm_chat_format *format;
  said *message; /* [count] */
  size_t count, cap;
  mm_reply *reply; /* of the last message */
  mm_stops stops;
  bool stopped, thinking; /* thinking: reasoning was printed, and nothing after it */
  mm_err err;             /* what a callback met */
};

mm_talk *mm_talk_open(const mm_talk_config *c, mm_err *err) {
  const mm_chat_format *format = mm_chat_format_of(c->pack, c->format, err);
  mm_talk *t = format ? mm_calloc(1, sizeof *t, err) : NULL;
  if (!t) return NULL;
  t->c = *c;
  t->format = format;
  t->stops = (mm_stops){.stop = c->stop, .count = c->stops};
  return t;
}

void mm_talk_close(mm_talk *t) {
  if (!t) return;
  for (size_t i = 0; i < t->count; i++) {
    free(t->message[i].content.p);
    free(t->message[i].reasoning.p);
  }
  free(t->message);
  mm_reply_close(t->reply);
  mm_stops_close(&t->stops);
  free(t);
}

/* ---- The user ---- */

static said *add_message(mm_talk *t, mm_role role, mm_err *err) {
  if (!MM_GROW(t->message, &t->cap, t->count + 1, err)) return NULL;
  said *m = &t->message[t->count++];
  *m = (said){.role = role};
  return m;
}

bool mm_talk_say(mm_talk *t, const char *text, size_t n, mm_err *err) {
  said *m = add_message(t, MM_ROLE_USER, err);
  if (!m) return false;
  mm_text_add(&m->content, text, n);
  return !m->content.failed || mm_fail_memory(err, n);
}

/* A line without its end; NULL at the end of stdin or after a failure. free() it. */
static char *read_line(size_t *n, bool first, mm_err *err) {
  char *line = NULL;
  size_t cap = 0;
  if (isatty(STDIN_FILENO)) fputs(first ? "> " : ". ", stderr);
  errno = 0;
  const ssize_t got = getline(&line, &cap, stdin);
  if (got < 0) {
    if (ferror(stdin)) mm_fail_errno(err, mm_at("stdin", NULL), "read", errno);
    free(line);
    return NULL;
  }
  *n = (size_t)got;
  if (*n && line[*n - 1] == '\n') line[--*n] = 0;
  return line;
}

bool mm_talk_listen(mm_talk *t, bool *more, mm_err *err) {
  mm_text text = {0};
  bool on = true;
  *more = false;
  while (on) {
    size_t n;
    char *line = read_line(&n, text.n == 0, err);
    if (!line) break;
    on = n && line[n - 1] == '\\';
    mm_text_add(&text, line, on ? n - 1 : n);
    if (on) mm_text_put(&text, "\n");
    on = on || !text.n; /* an empty line says nothing */
    free(line);
  }
  bool ok = err->status == MM_OK;
  if (ok && text.failed) ok = mm_fail_memory(err, text.n);
  if (ok && text.n) ok = *more = mm_talk_say(t, text.p, text.n, err);
  free(text.p);
  return ok;
}

/* ---- The reply ---- */

static void print(mm_talk *t, FILE *to, const char *text, size_t n) {
  if (n && (fwrite(text, 1, n, to) != n || fflush(to) != 0) && t->err.status == MM_OK)
    mm_fail_errno(&t->err, mm_at(to == stdout ? "stdout" : "stderr", NULL), "write", errno);
}

/* Reasoning is dim where stderr is a terminal. */
static void think(mm_talk *t, const char *text, size_t n) {
  if (t->c.silent || !t->c.thoughts) return;
  if (!t->thinking && isatty(STDERR_FILENO)) print(t, stderr, "\033[2m", 4);
  t->thinking = true;
  print(t, stderr, text, n);
}

static void stop_thinking(mm_talk *t) {
  if (!t->thinking) return;
  if (isatty(STDERR_FILENO)) print(t, stderr, "\033[0m", 4);
  print(t, stderr, "\n", 1);
  t->thinking = false;
}

/* The first `n` bytes that may begin a stop text are content. */
static void put_content(mm_talk *t, size_t n) {
  if (!n) return;
  mm_text_add(&t->message[t->count - 1].content, t->stops.held, n);
  stop_thinking(t);
  if (!t->c.silent) print(t, stdout, t->stops.held, n);
}

static void on_event(void *user, const mm_reply_event *e) {
  mm_talk *t = user;
  size_t ready;
  if (t->stopped || t->err.status != MM_OK) return;
  if (e->kind == MM_REPLY_REASONING) {
    mm_text_add(&t->message[t->count - 1].reasoning, e->text, e->n);
    think(t, e->text, e->n);
  } else if (mm_stops_push(&t->stops, e->text, e->n, &ready, &t->stopped, &t->err)) { /* there are no tools, so it is content */
    put_content(t, ready);
    mm_stops_take(&t->stops, t->stopped ? t->stops.held_count : ready);
  }
}

static mm_message message_of(const said *m, mm_chat_part *part) {
  *part = (mm_chat_part){.text = {m->content.p ? m->content.p : "", m->content.n}, .owner = MM_OWNER_USER};
  mm_message out = {.role = m->role, .part = part, .part_count = 1};
  if (m->role == MM_ROLE_ASSISTANT) out.reasoning = (mm_str){m->reasoning.p ? m->reasoning.p : "", m->reasoning.n};
  return out;
}

static bool render(mm_talk *t, mm_prompt *p, mm_err *err) {
  const bool system = t->c.system;
  const size_t count = t->count + system;
  mm_message *m = mm_calloc(count, sizeof *m, err);
  mm_chat_part *part = mm_calloc(count, sizeof *part, err);
  bool ok = m && part;
  if (ok && system) {
    part[0] = (mm_chat_part){.text = {t->c.system, strlen(t->c.system)}, .owner = MM_OWNER_USER};
    m[0] = (mm_message){.role = MM_ROLE_SYSTEM, .part = &part[0], .part_count = 1};
  }
  for (size_t i = 0; ok && i < t->count; i++) m[i + system] = message_of(&t->message[i], &part[i + system]);
  const mm_conversation c = {.message = m, .message_count = count, .add_generation_prompt = true};
  ok = ok && mm_chat_render(t->format, &c, p, err);
  free(m);
  free(part);
  return ok;
}

static bool begin_reply(mm_talk *t, bool in_reasoning, mm_err *err) {
  const mm_reply_settings set = {
      .format = t->format, .tokenizer = t->c.tokenizer, .in_reasoning = in_reasoning, .sink = on_event, .user = t};
  mm_reply_close(t->reply);
  t->reply = mm_reply_open(&set, err);
  t->stopped = false;
  return t->reply && add_message(t, MM_ROLE_ASSISTANT, err);
}

bool mm_talk_prompt(mm_talk *t, int32_t **id, size_t *count, mm_err *err) {
  mm_prompt p = {0};
  mm_prompt_tokens tokens = {0};
  bool ok = render(t, &p, err) && mm_prompt_encode(&p, t->c.tokenizer, false, &tokens, err);
  ok = ok && begin_reply(t, p.in_reasoning, err);
  mm_prompt_close(&p);
  if (!ok) free(tokens.id);
  if (ok) *id = tokens.id, *count = tokens.count;
  return ok;
}

static bool settle(mm_talk *t, bool ok, mm_err *err) {
  const said *m = &t->message[t->count - 1];
  if (ok && t->err.status == MM_OK && (m->content.failed || m->reasoning.failed)) mm_fail_memory(&t->err, m->content.n);
  if (ok && t->err.status == MM_OK) return true;
  if (ok && err) *err = t->err;
  return false;
}

bool mm_talk_token(mm_talk *t, int32_t id, bool *stopped, mm_err *err) {
  size_t n;
  const char *bytes = mm_tokenizer_bytes(t->c.tokenizer, id, &n);
  const bool hidden = mm_tokenizer_is_special(t->c.tokenizer, id) && !mm_reply_is_tag(t->format, bytes, n);
  const bool ok = hidden || !n || mm_reply_push(t->reply, id, bytes, n, err);
  *stopped = t->stopped;
  return settle(t, ok, err);
}

bool mm_talk_end(mm_talk *t, bool whole, mm_err *err) {
  const bool ok = mm_reply_end(t->reply, whole, err);
  if (ok && !t->stopped) put_content(t, t->stops.held_count);
  mm_stops_take(&t->stops, t->stops.held_count);
  stop_thinking(t);
  if (!t->c.silent) print(t, stdout, "\n", 1);
  return settle(t, ok, err);
}

const char *mm_talk_content(const mm_talk *t) { return t->message[t->count - 1].content.p ? t->message[t->count - 1].content.p : ""; }
const char *mm_talk_reasoning(const mm_talk *t) { return t->message[t->count - 1].reasoning.p ? t->message[t->count - 1].reasoning.p : ""; }
