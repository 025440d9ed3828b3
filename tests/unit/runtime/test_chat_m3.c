/* MiniMax-M3: the prompt's end by thinking mode, control tokens of a prompt by owner, and replies, the same for every cut, with the
 * mark and the tags of reasoning as text and as tokens. Random replies compared with a second parser: tests/interop/m3_chat.py. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/file.h"
#include "runtime/chat/reply.h"
#include "tests/unit/unit.h"

#define M MM_CHAT_MARK
#define STR(s) \
  { s, sizeof(s) - 1 }

static const char tool_text[] =
    "{\"name\": \"f\", \"parameters\": {\"type\": \"object\", \"properties\": {\"s\": {\"type\": \"string\"}, \"m\": {\"type\": "
    "[\"string\", \"null\"]}, \"i\": {\"type\": \"integer\"}, \"b\": {\"type\": \"boolean\"}, \"l\": {\"anyOf\": [{\"type\": \"array\", "
    "\"items\": {\"type\": \"integer\"}}, {\"type\": \"null\"}]}, \"o\": {\"$ref\": \"#/$defs/o\"}}, \"$defs\": {\"o\": {\"type\": "
    "\"object\", \"properties\": {\"n\": {\"type\": \"number\"}, \"o\": {\"$ref\": \"#/$defs/o\"}}}}}}";

/* The tokenizer of tiny-m2 with M3's tokens in the place of M2's. */
static mm_tokenizer *tokenizer(void) {
  static const char *const from[] = {"]!p~[", "<think>", "</think>"}, *const to[] = {M, "<mm:think>", "</mm:think>"};
  mm_err err = {0};
  size_t n;
  char *text = mm_file_slurp("tests/data/tiny-m2/tokenizer.json", 1u << 24, &n, &err), path[] = "/tmp/m3-tokenizer-XXXXXX";
  assert_non_null(text);
  const int fd = mkstemp(path);
  FILE *f = fdopen(fd, "wb");
  assert_non_null(f);
  for (const char *at = text; *at;) {
    size_t i = 0;
    while (i < 3 && strncmp(at, from[i], strlen(from[i])) != 0) i++;
    fputs(i < 3 ? to[i] : (char[]){*at, 0}, f);
    at += i < 3 ? strlen(from[i]) : 1;
  }
  assert_int_equal(fclose(f), 0);
  free(text);
  mm_tokenizer *t = mm_tokenizer_open(path, 1u << 16, &err);
  if (!t) fail_msg("%s", err.text);
  remove(path);
  return t;
}

/* ---- Prompts ---- */

static bool ends_with(const mm_prompt *p, const char *end) {
  const size_t n = strlen(end);
  return p->text.n >= n && memcmp(p->text.p + p->text.n - n, end, n) == 0;
}

/* Tokens that were sampled after this prompt stand in the next one behind the same text. */
static void assert_goes_on(const mm_conversation *c, const mm_prompt *before) {
  static const int32_t sampled[] = {70, 300};
  const mm_message m[] = {
      c->message[0], c->message[1], {.role = MM_ROLE_ASSISTANT, .sampled = sampled, .sampled_count = 2, .opening = before->opening}};
  mm_conversation next = *c;
  next.message = m, next.message_count = 3;
  mm_prompt p = {0};
  mm_err err = {0};
  assert_true(mm_chat_render(mm_chat_format_find("minimax-m3"), &next, &p, &err));
  assert_ptr_equal(p.piece[before->count].sampled, sampled);
  assert_int_equal(p.piece[before->count + 1].at, before->text.n);
  assert_memory_equal(p.text.p, before->text.p, before->text.n);
  mm_prompt_close(&p);
}

TEST(test_modes) {
  static const struct {
    mm_thinking mode;
    const char *line, *end;
    mm_opening opening;
  } modes[] = {{MM_THINKING_UNSET, "mode: adaptive.", "]~b]ai\n", MM_OPENING_FREE},
               {MM_THINKING_ADAPTIVE, "mode: adaptive.", "]~b]ai\n", MM_OPENING_FREE},
               {MM_THINKING_ENABLED, "mode: enabled.", "]~b]ai\n<mm:think>", MM_OPENING_REASONING},
               {MM_THINKING_DISABLED, "mode: disabled.", "]~b]ai\n</mm:think>", MM_OPENING_CONTENT}};
  const mm_chat_format *f = mm_chat_format_find("minimax-m3");
  const mm_chat_part part = {.text = STR("Hi")};
  mm_message m[] = {{.role = MM_ROLE_ROOT, .part = &part, .part_count = 1}, {.role = MM_ROLE_USER, .part = &part, .part_count = 1}};
  mm_conversation c = {.message = m, .message_count = 2, .add_generation_prompt = true};
  for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
    mm_prompt p = {0};
    mm_err err = {0};
    c.thinking = modes[i].mode;
    assert_true(mm_chat_render(f, &c, &p, &err));
    assert_true(ends_with(&p, modes[i].end) && strstr(p.text.p, modes[i].line));
    assert_int_equal(p.opening, modes[i].opening);
    assert_int_equal(p.in_reasoning, p.opening == MM_OPENING_REASONING);
    assert_goes_on(&c, &p);
    mm_prompt_close(&p);
  }
  mm_prompt p = {0};
  mm_err err = {0};
  assert_false(mm_chat_render(mm_chat_format_find("minimax-m2"), &c, &p, &err));
  assert_true(err.status == MM_UNSUPPORTED && strstr(err.text, "has no root messages"));
  mm_prompt_close(&p);
  assert_int_equal(mm_chat_effort(f, (mm_str)STR("none")), MM_THINKING_DISABLED);
  assert_int_equal(mm_chat_effort(f, (mm_str)STR("minimal")), MM_THINKING_DISABLED);
  assert_int_equal(mm_chat_effort(f, (mm_str)STR("high")), MM_THINKING_UNSET);
  assert_int_equal(mm_chat_effort(mm_chat_format_find("minimax-m2"), (mm_str)STR("minimal")), MM_THINKING_UNSET);
}

/* A user who writes the mark or a tag sends text; the marks of calls in the history are tokens. */
TEST(test_owners) {
  mm_tokenizer *t = tokenizer();
  const int32_t mark = mm_tokenizer_find_added(t, M), end = mm_tokenizer_find_added(t, "</mm:think>");
  const mm_chat_part user = {.text = STR(M "<tool_call></mm:think>")};
  const mm_chat_call call = {.name = STR("f"), .arguments = STR("{\"" M "\": {\"a\": [\"" M "\", null, true]}}")};
  const mm_message m[] = {
      {.role = MM_ROLE_USER, .part = &user, .part_count = 1},
      {.role = MM_ROLE_ASSISTANT, .part = &user, .part_count = 1, .reasoning = STR("x"), .call = &call, .call_count = 1}};
  const mm_conversation c = {.message = m, .message_count = 2};
  mm_prompt p = {0};
  mm_prompt_tokens tokens;
  mm_err err = {0};
  assert_true(mm_chat_render(mm_chat_format_find("minimax-m3"), &c, &p, &err) && mm_prompt_encode(&p, t, false, &tokens, &err));
  size_t marks = 0, ends = 0;
  for (size_t i = 0; i < tokens.count; i++) marks += tokens.id[i] == mark, ends += tokens.id[i] == end;
  assert_int_equal(marks, 14); /* of the block, the call, the parameter, "a", and three items: two each */
  assert_int_equal(ends, 3);   /* two in the instructions */
  free(tokens.id);
  mm_prompt_close(&p);
  mm_tokenizer_close(t);
}

/* ---- Replies ---- */

static void note(void *user, const mm_reply_event *e) {
  mm_text *t = user;
  static const char kinds[] = "RCTAE";
  static mm_reply_kind last;
  assert_true(e->n > 0 || e->kind == MM_REPLY_CALL_END);
  if (!t->n || e->kind != last || e->kind == MM_REPLY_CALL || e->kind == MM_REPLY_CALL_END)
    mm_text_add(t, (char[]){'\1', kinds[e->kind]}, 2);
  mm_text_add(t, e->text ? e->text : "", e->n);
  last = e->kind;
}

typedef struct feeding {
  const char *text;
  bool in_reasoning, cut_off;
  const mm_tokenizer *tokenizer; /* the mark and the tags of reasoning come as tokens */
} feeding;

/* Pieces end at `cut`, and behind every byte where it is SIZE_MAX. free() it. */
static char *said(const feeding *f, size_t cut) {
  static const char *const tokens[] = {M, "<mm:think>", "</mm:think>"};
  const mm_chat_tool tool = {.json = {tool_text, sizeof tool_text - 1}};
  mm_text out = {0};
  const mm_reply_settings s = {.format = mm_chat_format_find("minimax-m3"),
                               .tokenizer = f->tokenizer,
                               .tool = &tool,
                               .tool_count = 1,
                               .calls = true,
                               .in_reasoning = f->in_reasoning,
                               .sink = note,
                               .user = &out};
  mm_err err = {0};
  mm_reply *r = mm_reply_open(&s, &err);
  assert_non_null(r);
  for (size_t at = 0, n = strlen(f->text), len; at < n; at += len) {
    int32_t id = -1;
    len = cut == SIZE_MAX ? 1 : at < cut && cut < n ? cut - at : n - at;
    for (size_t i = at; f->tokenizer && i < at + len; i++)
      for (size_t k = 0; k < 3; k++) {
        if (strncmp(f->text + i, tokens[k], strlen(tokens[k])) != 0) continue;
        if (i == at) id = mm_tokenizer_find_added(f->tokenizer, tokens[k]);
        len = i == at ? strlen(tokens[k]) : i - at;
      }
    assert_true(mm_reply_push(r, id, f->text + at, len, &err));
  }
  assert_true(mm_reply_end(r, !f->cut_off, &err));
  mm_reply_close(r);
  mm_text_put(&out, "");
  return out.p;
}

static void same_for_all_cuts(const feeding *f, const char *want) {
  char *whole = said(f, strlen(f->text));
  if (want && strcmp(whole, want) != 0) fail_msg("%s\nwant %s\ngot  %s", f->text, want, whole);
  for (size_t cut = 1; cut <= strlen(f->text); cut++) {
    char *got = said(f, cut == strlen(f->text) ? SIZE_MAX : cut);
    if (strcmp(whole, got) != 0) fail_msg("%s\nwhole %s\ncut at %zu: %s", f->text, whole, cut, got);
    free(got);
  }
  free(whole);
}

#define BEGIN          M "<tool_call>\n"
#define END            M "</tool_call>"
#define CALL(elements) M "<invoke name=\"f\">" elements M "</invoke>\n"
#define E(k, v)        M "<" k ">" v M "</" k ">"
#define R              "\1R"
#define C              "\1C"
#define T              "\1Tf\1A"
#define END_CALL       "\1E"

TEST(test_replies) {
  static const struct {
    const char *text, *want;
    bool in_reasoning, cut_off;
  } row[] = {
      /* Reasoning: it may begin the reply, a bare end may too, and a call ends it. */
      {"why\n</mm:think>\n\nSo.", R "why\n" C "\n\nSo.", true, false},
      {"<mm:think>why</mm:think>So", R "why" C "So", false, false},
      {" <mm:think> </mm:think> ", "", false, false},
      {"\n</mm:think>So", C "So", false, false},
      {"why" BEGIN CALL("") END, R "why" T "{}" END_CALL, true, false},
      {"So" BEGIN CALL("") END "\n" BEGIN CALL("") END "ok", C "So" T "{}" END_CALL T "{}" END_CALL C "ok", false, false},
      /* Values by their schema. */
      {BEGIN CALL(E("s", " 1 <b>\n") E("m", "null") E("i", "007") E("b", "Yes")) END,
       T "{\"s\": \" 1 <b>\\n\", \"m\": null, \"i\": 7, \"b\": true}" END_CALL, false, false},
      {BEGIN CALL(E("m", "nulls") E("i", "x") E("free", "521") E("free2", "false") E("s", "")) END,
       T "{\"m\": \"nulls\", \"i\": \"x\", \"free\": \"521\", \"free2\": false, \"s\": \"\"}" END_CALL, false, false},
      {BEGIN CALL(E("l", E("item", "1") E("x", "-2")) E("o", E("n", "1.5") E("o", E("n", "")) E("k", "a") E("k", "b"))) END,
       T "{\"l\": [1, -2], \"o\": {\"n\": 1.5, \"o\": {\"n\": \"\"}, \"k\": [\"a\", \"b\"]}}" END_CALL, false, false},
      {BEGIN CALL(E("l", "") E("o", "") E("u", E("item", "") "\n" E("item", E("a", "1")))) END,
       T "{\"l\": null, \"o\": {}, \"u\": [\"\", {\"a\": \"1\"}]}" END_CALL, false, false},
      {BEGIN CALL(E("s", E("a", "1") "t") E("u", E("a", "1") "t")) END,
       T "{\"s\": \"" M "<a>1" M "</a>t\", \"u\": {\"a\": \"1\", \"$text\": \"t\"}}" END_CALL, false, false},
      {BEGIN CALL(E("tool_call", E("tool_call", "x"))) END, T "{\"tool_call\": {\"tool_call\": \"x\"}}" END_CALL, false, false},
      /* White space between tags, names in any quotes, a missing end of a call. */
      {M " \n<tool_call>" M "\n<invoke name='f'>\n" M " <s>x" M "\n</s>\n" M "<invoke name=f/>" END,
       T "{\"s\": \"x\"}" END_CALL T "{}" END_CALL, false, false},
      /* Calls that break the grammar are content. */
      {BEGIN CALL(E("i", "1") "x") END "!", T "{\"i\": 1" C BEGIN CALL(E("i", "1") "x") END "!", false, false},
      {BEGIN CALL(M "<s>x" M "</t>") CALL(E("i", "1")) END,
       T "{\"s\": \"x" C BEGIN M "<invoke name=\"f\">" M "<s>x" M "</t>" M "</invoke>\n" T "{\"i\": 1}" END_CALL, false, false},
      {BEGIN "So" CALL("") END, C BEGIN "So" T "{}" END_CALL, false, false},
      {M "<tool>" M M, C M "<tool>" M M, false, false},
      {"a]<]mini", C "a]<]mini", false, false},
      /* Cut off: what is complete was passed on, and no mark shows. */
      {"So" M, C "So", false, true},
      {"So" M "<tool_", C "So", false, true},
      {BEGIN, "", false, true},
      {BEGIN M "<invoke name=\"f\">" E("i", "1") M "<l>" M "<item>1", T "{\"i\": 1", false, true},
      {BEGIN M "<invoke name=\"f\">" M "<s>x]" M, T "{\"s\": \"x]", false, true},
      {BEGIN CALL(E("i", "1")) M "</tool", T "{\"i\": 1}" END_CALL, false, true},
  };
  mm_tokenizer *t = tokenizer();
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    feeding f = {row[i].text, row[i].in_reasoning, row[i].cut_off, NULL};
    same_for_all_cuts(&f, row[i].want);
    f.tokenizer = t;
    same_for_all_cuts(&f, row[i].want);
  }
  /* By text the last byte may have begun the mark. */
  feeding f = {"So]", false, true, NULL};
  same_for_all_cuts(&f, C "So");
  f.text = BEGIN M "<invoke name=\"f\">" M "<s>x]<]", same_for_all_cuts(&f, T "{\"s\": \"x");
  f.text = "<</mm:th", f.in_reasoning = true, same_for_all_cuts(&f, R "<");
  f.text = "So]", f.in_reasoning = false, f.tokenizer = t;
  same_for_all_cuts(&f, C "So]");
  mm_tokenizer_close(t);
}

/* Without its id the mark is text. */
TEST(test_mark_as_text) {
  mm_tokenizer *t = tokenizer();
  const mm_reply_settings s = {.format = mm_chat_format_find("minimax-m3"), .tokenizer = t, .calls = true, .sink = note};
  mm_text out = {0};
  mm_reply_settings own = s;
  own.user = &out;
  mm_err err = {0};
  mm_reply *r = mm_reply_open(&own, &err);
  static const char text[] = BEGIN CALL("") END;
  assert_true(mm_reply_push(r, -1, text, sizeof text - 1, &err) && mm_reply_end(r, true, &err));
  mm_reply_close(r);
  assert_string_equal(out.p, C BEGIN CALL("") END);
  free(out.p);
  mm_tokenizer_close(t);
}

/* Random pieces of tags. */
TEST(test_random_cuts) {
  static const char *const piece[] = {M,
                                      M "<tool_call>",
                                      END,
                                      M "<invoke name=\"f\">",
                                      M "</invoke>",
                                      M "<s>",
                                      M "</s>",
                                      M "<l>",
                                      M "</l>",
                                      M "<item>",
                                      M "</item>",
                                      "\n",
                                      "x",
                                      "1",
                                      "]<]",
                                      "<mm:think>",
                                      "</mm:think>",
                                      "null",
                                      "\xc3\xa9",
                                      "\xff",
                                      BEGIN CALL(E("l", E("item", "1")))};
  uint32_t seed = 7;
  for (int round = 0; round < 100; round++) {
    mm_text made = {0};
    mm_text_put(&made, round % 3 ? BEGIN : "");
    for (int i = 0; i < 12; i++) {
      seed = seed * 1664525u + 1013904223u;
      mm_text_put(&made, piece[(seed >> 16) % (sizeof piece / sizeof *piece)]);
    }
    const feeding f = {made.p, round % 5 == 0, round % 4 == 0, NULL};
    same_for_all_cuts(&f, NULL);
    free(made.p);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
