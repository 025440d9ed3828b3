/* Conversations of any bytes, rendered by every format: refused, or a prompt whose tokens spell its text, and whose control tokens are
 * those of the format's own text; with users trusted, they are those of the whole text. */
#include <stdlib.h>
#include <string.h>

#include "runtime/chat/chat_format.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { VOCAB = 4096, MESSAGES = 12, PARTS = 3, CALLS = 3, TOOLS = 3 };

typedef struct made {
  mm_message message[MESSAGES];
  mm_chat_part part[MESSAGES][PARTS];
  mm_chat_call call[MESSAGES][CALLS];
  mm_chat_tool tool[TOOLS];
  mm_conversation c;
} made;

/* The next field: up to a byte 0xff. */
static mm_str field(const uint8_t **at, const uint8_t *end) {
  const uint8_t *stop = *at < end ? memchr(*at, 0xff, (size_t)(end - *at)) : NULL;
  const mm_str s = {(const char *)*at, (size_t)((stop ? stop : end) - *at)};
  *at = stop ? stop + 1 : end;
  return s;
}

static const int32_t sampled[] = {65, 66, 300};

/* A byte says what a message has; its fields follow. */
static void make(made *m, const uint8_t *at, const uint8_t *end) {
  const unsigned flags = at < end ? *at++ : 0;
  m->c = (mm_conversation){.message = m->message,
                           .tool = m->tool,
                           .add_generation_prompt = flags & 1,
                           .thinking = flags & 2 ? MM_THINKING_DISABLED : MM_THINKING_UNSET};
  m->c.continue_final = flags & 4 && !(flags & 1);
  if (flags & 8) m->c.identity = field(&at, end);
  if (flags & 16) m->c.current_date = field(&at, end);
  for (m->c.tool_count = 0; m->c.tool_count < (flags >> 5 & 3);) m->tool[m->c.tool_count++].json = field(&at, end);
  while (at < end && m->c.message_count < MESSAGES) {
    const size_t i = m->c.message_count++;
    const unsigned what = *at++;
    mm_message *one = &m->message[i];
    *one = (mm_message){.role = (mm_role)(what & 3), .part = m->part[i], .call = m->call[i], .list = what & 4};
    const unsigned parts = what & 4 ? what >> 3 & 3 : what >> 3 & 1;
    for (; one->part_count < parts && one->part_count < PARTS; one->part_count++)
      m->part[i][one->part_count] = (mm_chat_part){.text = field(&at, end)};
    if (one->role != MM_ROLE_ASSISTANT) continue;
    if (what & 32) one->reasoning = field(&at, end);
    for (; one->call_count < (what >> 6); one->call_count++)
      m->call[i][one->call_count] = (mm_chat_call){.name = field(&at, end), .arguments = field(&at, end)};
    if (what == 0xee) one->sampled = sampled, one->sampled_count = 3, one->opening = (mm_opening)(1 + i % 3);
  }
}

/* Control tokens in text, from the left. */
static size_t spelled(const char *text, size_t n) {
  static const char *const added[] = {"]!p~[",   "]~!b[",   "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>",
                                      "<think>", "</think>"};
  size_t found = 0;
  for (size_t at = 0, len; at < n; at += len) {
    const bool begins = text[at] == ']' || text[at] == '[' || text[at] == '<';
    len = 1;
    for (size_t i = 0; i < 8 && begins; i++)
      if (n - at >= strlen(added[i]) && memcmp(text + at, added[i], strlen(added[i])) == 0) len = strlen(added[i]), found++, i = 8;
  }
  return found;
}

/* Tokens of text alone. */
static void check_text(const mm_tokenizer *t, const mm_prompt *p, const mm_prompt_tokens *tokens, bool trusted) {
  size_t at = 0, own = 0, controls = 0, n;
  const int32_t first = mm_tokenizer_find_added(t, "]!p~["); /* the ids of added tokens are the last */
  for (size_t i = 0; i < tokens->count; i++) {
    const char *s = mm_tokenizer_bytes(t, tokens->id[i], &n);
    if (!s || n > p->text.n - at || memcmp(s, p->text.p + at, n) != 0) abort();
    at += n;
    controls += tokens->id[i] >= first;
  }
  if (first < 0 || at != p->text.n || tokens->user_end > tokens->count) abort();
  for (size_t i = 0; i < p->count; i++)
    if (p->piece[i].owner == MM_OWNER_TRUSTED) own += spelled(p->text.p + p->piece[i].at, p->piece[i].n);
  if (controls != (trusted ? spelled(p->text.p, p->text.n) : own)) abort();
}

static void render(const mm_tokenizer *t, const char *format, const mm_conversation *c, bool trust) {
  mm_prompt p = {0};
  mm_err err = {0};
  bool replayed = false;
  if (mm_chat_render(mm_chat_format_find(format), c, &p, &err)) {
    for (size_t i = 0; i < p.count; i++) replayed |= p.piece[i].sampled != NULL;
    mm_prompt_tokens tokens;
    if (!mm_prompt_encode(&p, t, trust, &tokens, &err)) abort();
    if (!replayed) check_text(t, &p, &tokens, trust);
    free(tokens.id);
  } else if (err.status == MM_OK) {
    abort();
  }
  mm_prompt_close(&p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static mm_tokenizer *t;
  static const char *const formats[] = {"minimax-m1", "minimax-m1-released", "minimax-m2.1"};
  mm_err err = {0};
  if (!t && !(t = mm_tokenizer_open("tests/data/tiny-m2/tokenizer.json", VOCAB, &err))) abort();
  made *m = calloc(1, sizeof *m);
  if (!m) abort();
  const unsigned how = size ? data[0] : 0;
  if (size) make(m, data + 1, data + size);
  render(t, how & 64 ? "minimax-m3" : formats[how % 3], &m->c, how & 128);
  free(m);
  return 0;
}
