/* Where stop strings may stand in a reply, for random cuts into tokens; and where its one call ends. */
#include <stdlib.h>
#include <string.h>

#include "formats/text.h"
#include "runtime/chat/reply_watch.h"
#include "tests/unit/unit.h"

static uint32_t random_state = 7;
static uint32_t draw(uint32_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state % below;
}

static const char *past_space(const char *s) { return s + strspn(s, " \n"); }

/* By the whole text: where stop strings begin to count. NULL: nowhere. An empty reasoning may be followed by another. */
static const char *behind_reasoning(const char *text, bool in_reasoning) {
  const char *s = past_space(text);
  if (!in_reasoning && strncmp(s, "<think>", 7) != 0) return *s ? text : NULL;
  for (bool empty = true; empty;) {
    while (strncmp(s = past_space(s), "<think>", 7) == 0) s += 7;
    empty = strncmp(s, "</think>", 8) == 0;
    if (!(s = strstr(s, "</think>"))) return NULL;
    s += 8;
    empty = empty && strncmp(past_space(s), "<think>", 7) == 0;
  }
  for (int i = 0; i < 2 && *s == '\n'; i++) s++;
  return s;
}

TEST(stop_strings_count_behind_the_reasoning) {
  static const char *const piece[] = {
      "<think>", "</think>", "\n", " ", "x", "Question:", "<thin", "k>", "<", "</think", "<minimax:", "\xc3\xa9"};
  uint32_t none = 0;
  for (int round = 0; round < 3000; round++) {
    const bool m2 = round % 2;
    mm_err err = {0};
    mm_text made = {0}, got = {0};
    mm_reply_seen w = {0};
    const mm_reply_settings s = {.format = mm_chat_format_find(m2 ? "minimax-m2" : "minimax-m1"), .in_reasoning = m2, .calls = true};
    mm_reply_watch *watch = mm_reply_watch_open(&s, true, false, &err);
    assert_non_null(watch);
    if (draw(2)) mm_text_put(&made, m2 ? "why" : "\n<think>");
    for (uint32_t i = 0, n = 1 + draw(10); i < n; i++) mm_text_put(&made, piece[draw(sizeof piece / sizeof *piece)]);
    mm_text_put(&got, "");
    for (size_t at = 0, n; at < made.n; at += n) {
      n = 1 + draw(9);
      if (n > made.n - at) n = made.n - at;
      char *copy = malloc(n); /* of its size, so that a reader past it is seen */
      assert_non_null(copy);
      memcpy(copy, made.p + at, n);
      assert_true(mm_reply_watch_token(watch, 1, copy, n, false, &w));
      if (w.again) mm_text_clear(&got);
      assert_true(!w.n || !w.waits);
      mm_text_add(&got, w.text, w.n);
      free(copy);
    }
    const char *want = behind_reasoning(made.p, m2);
    none += !want;
    if (w.waits) want = NULL; /* white space, or a tag that is not complete */
    if (strcmp(got.n ? got.p : "", want ? want : "") != 0) fail_msg("%d: %s\nwant %s\ngot  %s", m2, made.p, want, got.p);
    mm_reply_watch_close(watch);
    free(made.p);
    free(got.p);
  }
  assert_true(none > 100 && none < 2000);
}

/* The end of the first whole call, in the token that completes it. */
TEST(one_call_ends_the_reply) {
  static const struct {
    const char *format, *before, *after;
  } one[] = {
      {"minimax-m2", "</think><minimax:tool_call><invoke name=\"f\">\n</invoke", ">"},
      {"minimax-m2", "</think><minimax:tool_call><invoke name=\"f\"/", ">\n<invoke name=\"g\">"},
      {"minimax-m1", "<tool_calls>{\"name\": \"f\", \"arguments\": {\"a\": NaN}}\n{\"name\": \"f\", \"arguments\": {\"a\": 1", "}}\n"}};
  for (size_t i = 0; i < sizeof one / sizeof *one; i++)
    for (int only = 0; only < 2; only++) {
      mm_err err = {0};
      mm_reply_seen w;
      const mm_reply_settings s = {.format = mm_chat_format_find(one[i].format), .in_reasoning = i < 2, .calls = true};
      mm_reply_watch *watch = mm_reply_watch_open(&s, false, only, &err);
      assert_non_null(watch);
      assert_true(mm_reply_watch_token(watch, 1, one[i].before, strlen(one[i].before), false, &w) && !w.enough);
      assert_true(mm_reply_watch_token(watch, 1, one[i].after, strlen(one[i].after), false, &w));
      assert_int_equal(w.enough, only);
      mm_reply_watch_close(watch);
    }
}

int main(void) { return run_unit_tests(NULL, NULL); }
