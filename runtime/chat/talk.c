/* Conversations in a terminal. */
#include "runtime/chat/talk.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/json.h"
#include "formats/system/output.h"
#include "runtime/chat/arguments.h"
#include "runtime/chat/line_edit.h"
#include "runtime/chat/reply_watch.h"
#include "runtime/chat/transcripts.h"
#include "runtime/text/stops.h"

#define LOAD_MAX (UINT64_C(64) << 20) /* bytes of a conversation's file */

/* A message, its texts its own. */
typedef struct said {
  mm_role role;
  mm_text content, reasoning;
} said;

/* A token of the reply that may be part of a stop text. */
typedef struct waiting {
  int32_t id; /* -1: cut by a stop text */
  const char *bytes;
  size_t n;
  bool hidden; /* a special token that is no text of the reply */
} waiting;

struct mm_talk {
  mm_talk_config c;
  const mm_chat_format *format;
  mm_text system;  /* the system message */
  bool own_system; /* there is one; else the format's own */
  said *message;   /* [count] */
  size_t count, cap;
  mm_reply *reply;       /* of the last message */
  mm_line_edit *edit;    /* NULL: lines are read by getline */
  bool listened;         /* opening `edit` was tried */
  mm_reply_watch *watch; /* of the same reply; NULL: there are no stop texts */
  mm_stops stops;        /* text behind the reasoning that may begin one */
  waiting *token;        /* [tokens] not yet given to `reply` */
  size_t tokens, tokens_cap;
  bool stopped, thinking; /* thinking: reasoning was printed, and nothing after it */
  mm_err err;             /* what a callback met */
};

static void set_system(mm_talk *t, const char *text) {
  mm_text_clear(&t->system);
  mm_text_put(&t->system, text);
  t->own_system = true;
}

mm_talk *mm_talk_open(const mm_talk_config *c, mm_err *err) {
  const mm_chat_format *format = c->format ? NULL : mm_chat_format_of_family(c->pack, err);
  if (!format && err->status == MM_OK) format = mm_chat_format_of(c->pack, c->format, err);
  mm_talk *t = format ? mm_calloc(1, sizeof *t, err) : NULL;
  if (!t) return NULL;
  t->c = *c;
  t->format = format;
  if (c->system) set_system(t, c->system);
  t->stops = (mm_stops){.stop = c->stop, .count = c->stops};
  return t;
}

/* Drops all messages from number `left` on. */
static void cut(mm_talk *t, size_t left) {
  while (t->count > left) {
    said *m = &t->message[--t->count];
    free(m->content.p);
    free(m->reasoning.p);
  }
}

void mm_talk_close(mm_talk *t) {
  if (!t) return;
  cut(t, 0);
  free(t->message);
  free(t->system.p);
  mm_line_edit_close(t->edit);
  mm_reply_close(t->reply);
  mm_reply_watch_close(t->watch);
  mm_stops_close(&t->stops);
  MM_FREE(t->token, t);
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
static char *read_line(mm_talk *t, size_t *n, bool first, mm_err *err) {
  char *line = NULL;
  size_t cap = 0;
  if (!t->listened) t->edit = mm_line_edit_open();
  t->listened = true;
  if (t->edit) {
    const char *edited = mm_line_edit_read(t->edit, first);
    if (!edited) return NULL;
    *n = strcspn(edited, "\n");
    if (!(line = strndup(edited, *n))) mm_fail_memory(err, *n);
    return line;
  }
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

/* ---- Commands ---- */

static const char help[] =
    "/clear        begin anew; the system message stays\n"
    "/system TEXT  set the system message; without a text, show it\n"
    "/save FILE    write the conversation as JSON; FILE must be new\n"
    "/load FILE    go on with the conversation in FILE\n"
    "/help         show this\n"
    "/quit         end, as Ctrl-D does\n"
    "A line that ends with a backslash goes on in the next one. A message that begins with a slash is given with two. Ctrl-C ends a\n"
    "reply, a second one the program.\n";

static const char *const role_words[] = {[MM_ROLE_SYSTEM] = "system", [MM_ROLE_USER] = "user", [MM_ROLE_ASSISTANT] = "assistant"};

static mm_json *text_of(const mm_text *t) { return mm_json_new_bytes(t->p ? t->p : "", t->n); }

/* {"role": …, "content": …}, and the reasoning of a reply, as chat completions have it. */
static void put_message(mm_json *list, mm_role role, const mm_text *content, const mm_text *reasoning) {
  mm_json *o = mm_json_append(list, MM_JSON_NEW({"role", mm_json_new_str(role_words[role])}, {"content", text_of(content)}));
  if (reasoning->n) mm_json_set(o, "reasoning_content", text_of(reasoning));
}

static bool save(const mm_talk *t, const char *path, mm_err *err) {
  const mm_text none = {0};
  const mm_output_place place = {.path = path, MM_OUTPUT_INPUTS(t->c.pack->dir), .force = true}; /* of an old file fopen says so */
  if (!mm_output_check(&place, err)) return false;
  mm_json *o = mm_json_new_obj(), *list = mm_json_put_list(o, "messages");
  if (t->own_system) put_message(list, MM_ROLE_SYSTEM, &t->system, &none);
  for (size_t i = 0; i < t->count; i++) put_message(list, t->message[i].role, &t->message[i].content, &t->message[i].reasoning);
  char *text = mm_json_dump(o, true);
  mm_json_free(o);
  if (!text) return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(path, NULL), "found a message that is no UTF-8, or no memory for the text");
  FILE *f = fopen(path, "wxe");
  if (!f) {
    free(text);
    return mm_fail_errno(err, mm_at(path, NULL), "create", errno);
  }
  bool ok = fputs(text, f) >= 0 && fputc('\n', f) != EOF;
  ok = fclose(f) == 0 && ok;
  free(text);
  return ok || mm_fail_errno(err, mm_at(path, NULL), "write", errno);
}

/* Nothing of the file that would change the prompt is left out in silence: keys of a message, and next to the messages. */
static bool check_keys(const mm_json *root, const char *path, mm_err *err) {
  const char *key = mm_json_size(mm_json_get(root, "tools")) ? "tools" : NULL;
  for (const char *const *at = mm_conversation_unread; !key && *at; at++)
    if (mm_json_type_of(mm_json_get(root, *at)) != MM_JSON_NULL) key = *at;
  return !key || mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(path, NULL), "found %s, which is not read, next to the messages", key);
}

static const char *unread_key(const mm_json *m) {
  static const char *const key[] = {"tool_calls", "function_call", "reasoning_details"};
  for (size_t i = 0; i < sizeof key / sizeof *key; i++) {
    const mm_json *v = mm_json_get(m, key[i]);
    if (mm_json_type_of(v) != MM_JSON_NULL && (mm_json_type_of(v) != MM_JSON_ARR || mm_json_size(v))) return key[i];
  }
  return NULL;
}

/* One message of a file. */
static bool take_message(mm_talk *t, const mm_json *m, const char *path, mm_err *err) {
  const mm_json *role = mm_json_get(m, "role"), *content = mm_json_get(m, "content"), *thoughts = mm_json_get(m, "reasoning_content");
  const char *unread = unread_key(m);
  const bool texts = mm_json_type_of(role) == MM_JSON_STR && mm_json_type_of(content) == MM_JSON_STR;
  size_t i = 0;
  while (texts && i < sizeof role_words / sizeof *role_words && (!role_words[i] || !mm_json_is(role, role_words[i]))) i++;
  if (!texts || i == sizeof role_words / sizeof *role_words)
    return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(path, NULL),
                   "message %zu: expected a role of system, user or assistant and a content that is a text", t->count + 1);
  if (unread)
    return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(path, NULL), "message %zu: found %s, which is not read%s", t->count + 1, unread,
                   strcmp(unread, "tool_calls") == 0 ? ": a conversation here has no tools" : "");
  if (!thoughts || mm_json_type_of(thoughts) == MM_JSON_NULL) thoughts = mm_json_get(m, "reasoning");
  if (mm_json_type_of(thoughts) != MM_JSON_STR && mm_json_type_of(thoughts) != MM_JSON_NULL)
    return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(path, NULL), "message %zu: found a reasoning that is no text", t->count + 1);
  if (i == MM_ROLE_SYSTEM && !t->count && !t->own_system) {
    mm_text_add(&t->system, mm_json_str(content), mm_json_str_len(content));
    return (t->own_system = !t->system.failed) || mm_fail_memory(err, 0);
  }
  const mm_role next = t->count % 2 ? MM_ROLE_ASSISTANT : MM_ROLE_USER;
  if (i != next)
    return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(path, NULL), "message %zu: found role %s, expected %s", t->count + 1, role_words[i],
                   role_words[next]);
  said *to = add_message(t, next, err);
  if (!to) return false;
  mm_text_add(&to->content, mm_json_str(content), mm_json_str_len(content));
  if (mm_json_type_of(thoughts) == MM_JSON_STR) mm_text_add(&to->reasoning, mm_json_str(thoughts), mm_json_str_len(thoughts));
  return (!to->content.failed && !to->reasoning.failed) || mm_fail_memory(err, 0);
}

/* The conversation of a file in place of this one, which stays where the file has none. */
static bool load(mm_talk *t, const char *path, mm_err *err) {
  mm_json *root = mm_json_load(path, LOAD_MAX, err);
  const mm_json *list = mm_json_type_of(root) == MM_JSON_ARR ? root : mm_json_get(root, "messages");
  bool ok = root && (mm_json_type_of(list) == MM_JSON_ARR || mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(path, NULL),
                                                                     "expected a list of messages, or an object with \"messages\""));
  mm_talk other = {.c = t->c};
  ok = ok && (list == root || check_keys(root, path, err));
  for (size_t i = 0; ok && i < mm_json_size(list); i++) ok = take_message(&other, mm_json_at(list, i), path, err);
  if (ok && other.count % 2)
    ok = mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(path, NULL), "the last message is the user's, expected a reply");
  mm_json_free(root);
  mm_talk *old = ok ? t : &other; /* its messages end here */
  const mm_text system = old->system;
  said *const message = old->message;
  cut(old, 0);
  if (ok)
    t->message = other.message, t->count = other.count, t->cap = other.cap, t->system = other.system, t->own_system = other.own_system;
  free(message);
  free(system.p);
  return ok;
}

static bool is_word(const char *line, const char *word, const char **rest) {
  const size_t n = strlen(word);
  if (strncmp(line, word, n) != 0 || (line[n] && line[n] != ' ')) return false;
  *rest = line + n + strspn(line + n, " ");
  return true;
}

/* All of it, NUL bytes included, which a file may give it. */
static void show_system(const mm_talk *t) {
  if (!t->own_system) fputs("(the format's own)", stderr);
  if (t->own_system && t->system.n) fwrite(t->system.p, 1, t->system.n, stderr);
  fputc('\n', stderr);
}

/* Does what a line with a slash says. *on: whether more lines are read. Failures are shown, and the conversation goes on. */
static void command(mm_talk *t, const char *line, size_t n, bool *on) {
  const char *rest;
  mm_err err = {0};
  bool ok = true;
  if (memchr(line, 0, n))
    fprintf(stderr, "a NUL character in the command %s\n", MM_ESCAPED_BYTES(256, line, n));
  else if (is_word(line, "/quit", &rest))
    *on = false;
  else if (is_word(line, "/help", &rest))
    fputs(help, stderr);
  else if (is_word(line, "/clear", &rest))
    cut(t, 0);
  else if (is_word(line, "/system", &rest) && *rest)
    set_system(t, rest);
  else if (is_word(line, "/system", &rest))
    show_system(t);
  else if (is_word(line, "/save", &rest) && *rest)
    ok = save(t, rest, &err);
  else if (is_word(line, "/load", &rest) && *rest)
    ok = load(t, rest, &err);
  else if (is_word(line, "/save", &rest) || is_word(line, "/load", &rest))
    fprintf(stderr, "%.5s: expected the name of a file behind it\n", line);
  else
    fprintf(stderr, "unknown command %s; /help lists them\n", MM_ESCAPED(256, line));
  if (!ok) fprintf(stderr, "%s\n", err.text);
}

/* ---- The user's lines ---- */

bool mm_talk_listen(mm_talk *t, bool *more, mm_err *err) {
  mm_text text = {0};
  bool on = true;
  *more = false;
  while (on) {
    size_t n;
    char *line = read_line(t, &n, text.n == 0, err);
    if (!line) break;
    const bool slash = t->c.commands && !text.n && line[0] == '/';
    if (slash && line[1] != '/') {
      command(t, line, n, &on);
      free(line);
      continue;
    }
    on = n && line[n - 1] == '\\';
    mm_text_add(&text, line + slash, (on ? n - 1 : n) - slash);
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

/* The environment's NO_COLOR, if it is not empty, turns escape sequences off. */
static void dim(mm_talk *t, const char *sequence) {
  const char *plain = getenv("NO_COLOR");
  if (!plain || !*plain) print(t, stderr, sequence, strlen(sequence));
}

/* Where stderr is a terminal, reasoning is dim and begins with a word that marks it. */
static void think(mm_talk *t, const char *text, size_t n) {
  static const char mark[] = "Reasoning: ";
  if (t->c.silent || !t->c.thoughts) return;
  if (!t->thinking && isatty(STDERR_FILENO)) dim(t, "\033[2m"), print(t, stderr, mark, sizeof mark - 1);
  t->thinking = true;
  print(t, stderr, text, n);
}

static void stop_thinking(mm_talk *t) {
  if (!t->thinking) return;
  if (isatty(STDERR_FILENO)) dim(t, "\033[0m");
  print(t, stderr, "\n", 1);
  t->thinking = false;
}

static void on_event(void *user, const mm_reply_event *e) {
  mm_talk *t = user;
  said *m = &t->message[t->count - 1];
  if (t->err.status != MM_OK) return;
  if (e->kind == MM_REPLY_REASONING) {
    mm_text_add(&m->reasoning, e->text, e->n);
    think(t, e->text, e->n);
    return;
  }
  mm_text_add(&m->content, e->text, e->n); /* there are no tools, so it is content */
  stop_thinking(t);
  if (!t->c.silent) print(t, stdout, e->text, e->n);
}

static mm_message message_of(const said *m, mm_chat_part *part) {
  *part = (mm_chat_part){.text = {m->content.p ? m->content.p : "", m->content.n}, .owner = MM_OWNER_USER};
  mm_message out = {.role = m->role, .part = part, .part_count = 1};
  if (m->role == MM_ROLE_ASSISTANT) out.reasoning = (mm_str){m->reasoning.p ? m->reasoning.p : "", m->reasoning.n};
  return out;
}

static bool render(mm_talk *t, mm_prompt *p, mm_err *err) {
  const bool system = t->own_system;
  const size_t count = t->count + system;
  mm_message *m = mm_calloc(count, sizeof *m, err);
  mm_chat_part *part = mm_calloc(count, sizeof *part, err);
  bool ok = m && part && (!t->system.failed || mm_fail_memory(err, 0));
  if (ok && system) {
    part[0] = (mm_chat_part){.text = {t->system.p ? t->system.p : "", t->system.n}, .owner = MM_OWNER_USER};
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
  mm_reply_watch_close(t->watch);
  t->watch = t->stops.count ? mm_reply_watch_open(&set, false, false, err) : NULL;
  t->reply = t->watch || !t->stops.count ? mm_reply_open(&set, err) : NULL;
  t->stopped = false;
  t->tokens = 0;
  mm_stops_take(&t->stops, t->stops.held_count);
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

/* Gives tokens to the reply as long as all waiting bytes behind the first one are at least `keep`. */
static bool release(mm_talk *t, size_t keep, mm_err *err) {
  size_t held = 0, taken = 0;
  bool ok = true;
  for (size_t i = 0; i < t->tokens; i++) held += t->token[i].n;
  for (; ok && taken < t->tokens && held >= keep + t->token[taken].n; taken++) {
    const waiting *w = &t->token[taken];
    held -= w->n;
    ok = w->hidden || !w->n || mm_reply_push(t->reply, w->id, w->bytes, w->n, err);
  }
  t->tokens -= taken;
  if (taken) memmove(t->token, t->token + taken, t->tokens * sizeof *t->token);
  return ok;
}

/* Takes the last `drop` bytes from the waiting tokens. */
static void cut_tokens(mm_talk *t, size_t drop) {
  for (size_t i = t->tokens; drop && i-- > 0;) {
    const size_t n = mm_min(drop, t->token[i].n);
    drop -= n;
    t->token[i].n -= n;
    if (n) t->token[i].id = -1;
  }
}

/* Looks for stop texts in what the watch has seen, and gives the reply what stands before them. */
static bool look(mm_talk *t, const mm_reply_seen *seen, mm_err *err) {
  size_t ready = 0;
  if (seen->waits) return true;
  if (seen->again) mm_stops_take(&t->stops, t->stops.held_count);
  if (!mm_stops_push(&t->stops, seen->n ? seen->text : "", seen->n, &ready, &t->stopped, err)) return false;
  const size_t behind = t->stops.held_count - ready;
  if (t->stopped) cut_tokens(t, behind);
  mm_stops_take(&t->stops, ready);
  return release(t, t->stopped ? 0 : behind, err);
}

bool mm_talk_token(mm_talk *t, int32_t id, bool *stopped, mm_err *err) {
  waiting w = {.id = id};
  w.bytes = mm_tokenizer_bytes(t->c.tokenizer, id, &w.n);
  const bool special = mm_tokenizer_is_special(t->c.tokenizer, id);
  w.hidden = special && !mm_reply_is_tag(t->format, w.bytes, w.n);
  mm_reply_seen seen = {0};
  bool ok = MM_GROW(t->token, &t->tokens_cap, t->tokens + 1, err);
  if (ok) t->token[t->tokens++] = w;
  if (ok && t->watch && !mm_reply_watch_token(t->watch, id, w.bytes, w.n, special, &seen)) ok = mm_fail_memory(err, w.n);
  ok = ok && (t->watch ? look(t, &seen, err) : release(t, 0, err));
  *stopped = t->stopped;
  return settle(t, ok, err);
}

bool mm_talk_end(mm_talk *t, bool whole, bool *stopped, mm_err *err) {
  mm_reply_seen rest = {0};
  if (t->watch && !t->stopped) mm_reply_watch_rest(t->watch, &rest);
  bool ok = (!rest.n || look(t, &rest, err)) && release(t, 0, err);
  ok = ok && mm_reply_end(t->reply, t->stopped ? MM_REPLY_STOPPED : whole ? MM_REPLY_WHOLE : MM_REPLY_CUT, err);
  *stopped = t->stopped;
  stop_thinking(t);
  if (!t->c.silent) print(t, stdout, "\n", 1);
  return settle(t, ok, err);
}

const mm_chat_format *mm_talk_format(const mm_talk *t) { return t->format; }

void mm_talk_forget(mm_talk *t) {
  size_t left = t->count;
  while (left > 0 && t->message[left - 1].role != MM_ROLE_USER) left--;
  cut(t, left ? left - 1 : 0);
}

mm_str mm_talk_content(const mm_talk *t) { return mm_text_str(&t->message[t->count - 1].content); }
mm_str mm_talk_reasoning(const mm_talk *t) { return mm_text_str(&t->message[t->count - 1].reasoning); }
