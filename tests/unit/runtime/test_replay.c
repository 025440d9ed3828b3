/* Sampled tokens of messages that come back: which message is the same, and which tokens go for want of room. */
#include <stdio.h>
#include <string.h>

#include "runtime/chat/replay.h"
#include "tests/unit/unit.h"

static mm_str str(const char *s) { return (mm_str){s, strlen(s)}; }

/* Content NULL: absent. */
typedef struct said {
  mm_chat_part part;
  mm_chat_call call[2];
  mm_message message;
} said;

static mm_message *say(said *s, const char *content, const char *id, const char *arguments) {
  *s = (said){.part = {.text = str(content ? content : "")}, .call = {{str(id), str("f"), str(arguments)}, {str("second"), str("g"), {0}}}};
  s->message = (mm_message){.role = MM_ROLE_ASSISTANT,
                            .part = &s->part,
                            .part_count = content != NULL,
                            .call = s->call,
                            .call_count = 2,
                            .opening = MM_OPENING_REASONING};
  return &s->message;
}

static mm_replay *opened(size_t max_tokens) {
  mm_err err = {0};
  mm_replay *r = mm_replay_open(max_tokens, &err);
  assert_non_null(r);
  return r;
}

TEST(test_same) {
  static const int32_t id[] = {5, 6, 7};
  mm_replay *r = opened(100);
  mm_err err = {0};
  said s;
  size_t n = 0;
  mm_opening opening = MM_OPENING_NONE;
  say(&s, "Let me see\n", "call_1", "{\"a\": 1.0, \"b\": \"\\u00e9\"}")->reasoning = str("because\n");
  assert_true(mm_replay_add(r, &s.message, id, 3, &err));
  /* As clients write it that parsed it: numbers in other digits, keys in another order. */
  static const char *const same[] = {"{\"a\": 1, \"b\": \"\\u00e9\"}", "{\"b\": \"\xc3\xa9\", \"a\": 1e0}"};
  for (size_t i = 0; i < sizeof same / sizeof *same; i++)
    assert_non_null(mm_replay_find(r, say(&s, "Let me see", "call_1", same[i]), &n, &opening));
  /* Otherwise spaced and escaped, trimmed, in parts, with reasoning or without. */
  const int32_t *found = mm_replay_find(r, say(&s, "Let me see", "call_1", "{\"a\":1.0,\n\"b\":\"\xc3\xa9\"}"), &n, &opening);
  assert_non_null(found);
  assert_int_equal(n, 3);
  assert_int_equal(opening, MM_OPENING_REASONING);
  assert_memory_equal(found, id, sizeof id);
  const mm_chat_part parts[] = {{.text = str("Let ")}, {.text = str("me see")}};
  s.message.part = parts;
  s.message.part_count = 2;
  s.message.list = true;
  s.message.reasoning = str("because");
  assert_ptr_equal(mm_replay_find(r, &s.message, &n, &opening), found);
  s.message.reasoning = str("");
  assert_ptr_equal(mm_replay_find(r, &s.message, &n, &opening), found);
  /* Changed: another reasoning, id, content, value, type, key, number of keys, name, number of calls, role. */
  s.message.reasoning = str("no cause");
  assert_null(mm_replay_find(r, &s.message, &n, &opening));
  assert_null(mm_replay_find(r, say(&s, "Let me see", "call_2", "{\"a\": 1.0, \"b\": \"\\u00e9\"}"), &n, &opening));
  assert_null(mm_replay_find(r, say(&s, NULL, "call_1", "{\"a\": 1.0, \"b\": \"\\u00e9\"}"), &n, &opening));
  assert_null(mm_replay_find(r, say(&s, "Let me see", "call_1", "{\"a\": 1.0, \"b\": \"e\"}"), &n, &opening));
  assert_null(mm_replay_find(r, say(&s, "Let me see", "call_1", "{\"a\": 1.5, \"b\": \"\\u00e9\"}"), &n, &opening));
  assert_null(mm_replay_find(r, say(&s, "Let me see", "call_1", "{\"a\": \"1\", \"b\": \"\\u00e9\"}"), &n, &opening));
  assert_null(mm_replay_find(r, say(&s, "Let me see", "call_1", "{\"b\": 1.0, \"a\": \"\\u00e9\"}"), &n, &opening));
  assert_null(mm_replay_find(r, say(&s, "Let me see", "call_1", "{\"b\": \"\\u00e9\"}"), &n, &opening));
  assert_null(mm_replay_find(r, say(&s, "Let me see", "call_1", "{\"a\": "), &n, &opening));
  say(&s, "Let me see", "call_1", "{\"a\": 1.0, \"b\": \"\\u00e9\"}")->call_count = 1;
  assert_null(mm_replay_find(r, &s.message, &n, &opening));
  s.message.call_count = 2;
  s.call[1].name = str("h");
  assert_null(mm_replay_find(r, &s.message, &n, &opening));
  s.call[1].name = str("g");
  assert_ptr_equal(mm_replay_find(r, &s.message, &n, &opening), found);
  s.message.role = MM_ROLE_USER;
  assert_null(mm_replay_find(r, &s.message, &n, &opening));
  mm_replay_close(r);
}

/* Values whose numbers of members and first digits run together otherwise are not the same. */
TEST(test_unlike_lists) {
  static const char *const pair[][2] = {
      {"{\"a\": [13, [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]]}",
       "{\"a\": [3, [15, 5], 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]}"},
      {"{\"a\": [1, [2]]}", "{\"a\": [[1], 2]}"},
  };
  static const int32_t id[] = {5, 6, 7};
  mm_replay *r = opened(100);
  mm_err err = {0};
  said s;
  size_t n = 0;
  mm_opening opening = MM_OPENING_NONE;
  for (size_t i = 0; i < sizeof pair / sizeof *pair; i++) {
    assert_true(mm_replay_add(r, say(&s, "x", "call_1", pair[i][0]), id, 3, &err));
    assert_non_null(mm_replay_find(r, &s.message, &n, &opening));
    assert_null(mm_replay_find(r, say(&s, "x", "call_1", pair[i][1]), &n, &opening));
  }
  mm_replay_close(r);
}

/* Integers that round alike are not the same, and one number is, however it is written. */
TEST(test_large_numbers) {
  static const char *const same[][3] = {
      {"{\"a\": 9007199254740993}", "{\"a\": 9007199254740993.0}", "{\"a\": 90071992.54740993e8}"},
      {"{\"a\": 1e22}", "{\"a\": 10000000000000000000000}", "{\"a\": 0.0100E+24}"},
      {"{\"a\": -12345678901234567890}", "{\"a\": -1234567890123456789e1}", "{\"a\": -12345678901234567890.000}"},
      {"{\"a\": 9007199254740992}", "{\"a\": 9007199254740992e0}", "{\"a\": 9.007199254740992e15}"},
      {"{\"a\": -9007199254740992}", "{\"a\": -9007199254740992.0}", "{\"a\": -9.007199254740992e15}"},
      {"{\"a\": 9007199254740991}", "{\"a\": 9007199254740991.0}", "{\"a\": 9.007199254740991e15}"},
      {"{\"a\": 12345678901234567891}", "{\"a\": 1.2345678901234567891e19}", "{\"a\": 12345678901234567891.0}"},
      {"{\"a\": 1e300}", "{\"a\": 10e299}", "{\"a\": 0.1e301}"},
      {"{\"a\": 1e9223372036854775807}", "{\"a\": 1.0e9223372036854775807}", "{\"a\": 1E9223372036854775807}"}, /* for the sanitizers */
  };
  static const int32_t id[] = {5, 6, 7};
  const size_t n = sizeof same / sizeof *same;
  mm_err err = {0};
  said s;
  size_t count = 0;
  mm_opening opening = MM_OPENING_NONE;
  for (size_t i = 0; i < n; i++) {
    mm_replay *r = opened(100);
    assert_true(mm_replay_add(r, say(&s, "x", "call_1", same[i][0]), id, 3, &err));
    for (size_t k = 0; k < n; k++)
      for (size_t j = 0; j < 3; j++)
        if ((mm_replay_find(r, say(&s, "x", "call_1", same[k][j]), &count, &opening) != NULL) != (i == k))
          fail_msg("%s after %s", same[k][j], same[i][0]);
    mm_replay_close(r);
  }
}

/* Messages without calls, with calls that have no id, without an opening, and too long ones are not kept. */
TEST(test_unkept) {
  static const int32_t id[11] = {1};
  mm_replay *r = opened(10);
  mm_err err = {0};
  said s;
  size_t n;
  mm_opening opening;
  say(&s, "x", "call_1", "")->call_count = 0;
  assert_true(mm_replay_add(r, &s.message, id, 3, &err));
  assert_null(mm_replay_find(r, &s.message, &n, &opening));
  assert_true(mm_replay_add(r, say(&s, "x", "", ""), id, 3, &err));
  assert_null(mm_replay_find(r, &s.message, &n, &opening));
  assert_true(mm_replay_add(r, say(&s, "x", "call_1", ""), id, 11, &err));
  assert_null(mm_replay_find(r, &s.message, &n, &opening));
  assert_true(mm_replay_add(r, &s.message, id, 0, &err));
  assert_null(mm_replay_find(r, &s.message, &n, &opening));
  s.message.opening = MM_OPENING_NONE; /* the message was begun by the request */
  assert_true(mm_replay_add(r, &s.message, id, 3, &err));
  assert_null(mm_replay_find(r, &s.message, &n, &opening));
  s.message.opening = MM_OPENING_FREE;
  assert_true(mm_replay_add(r, &s.message, id, 10, &err));
  assert_non_null(mm_replay_find(r, say(&s, "x", "call_1", "{ }"), &n, &opening));
  assert_int_equal(opening, MM_OPENING_FREE);
  mm_replay_close(r);
  mm_replay_close(NULL);
}

/* Many messages: the most recently used are there, each with its own tokens, within the room. */
TEST(test_capacity) {
  enum { MESSAGES = 5000, EACH = 7, CAPACITY = 2000 };
  mm_replay *r = opened(CAPACITY * EACH);
  mm_err err = {0};
  said s;
  char name[32];
  size_t n, found = 0;
  mm_opening opening;
  int32_t id[EACH];
  for (int i = 0; i < MESSAGES; i++) {
    for (int j = 0; j < EACH; j++) id[j] = i * EACH + j;
    snprintf(name, sizeof name, "call_%d", i);
    assert_true(mm_replay_add(r, say(&s, NULL, name, ""), id, EACH, &err));
    assert_true(mm_replay_add(r, &s.message, id, EACH, &err)); /* again */
    if (i > 0) assert_non_null(mm_replay_find(r, say(&s, NULL, "call_0", ""), &n, &opening));
  }
  for (int i = 0; i < MESSAGES; i++) {
    snprintf(name, sizeof name, "call_%d", i);
    const int32_t *got = mm_replay_find(r, say(&s, NULL, name, ""), &n, &opening);
    assert_int_equal(got != NULL, i == 0 || i > MESSAGES - CAPACITY);
    for (int j = 0; got && j < EACH; j++) assert_int_equal(got[j], i * EACH + j);
    found += got != NULL;
  }
  assert_int_equal(found, CAPACITY);
  mm_replay_close(r);
}

int main(void) { return run_unit_tests(NULL, NULL); }
