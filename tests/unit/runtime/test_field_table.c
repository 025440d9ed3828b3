/* The table of request fields against tests/data/request_fields.tsv: each has what the other has, and says the same of every API. */
#include <stdlib.h>
#include <string.h>

#include "formats/system/file.h"
#include "runtime/serve/content_fields.h"
#include "runtime/serve/field_table.h"
#include "tests/unit/unit.h"

#define NAMES 1024

static const char *file_name[NAMES]; /* of the file, as it comes */
static size_t file_names;

static mm_field_fate fate_of_word(const char *word) {
  if (strcmp(word, "served") == 0) return MM_FIELD_SERVED;
  if (strcmp(word, "refused") == 0) return MM_FIELD_REFUSED;
  assert_string_equal(word, "none");
  return MM_FIELD_NO_EFFECT;
}

TEST(same_as_the_file) {
  mm_err err = {0};
  size_t n, rows = 0;
  char *text = mm_file_slurp("tests/data/request_fields.tsv", 1 << 20, &n, &err), *at = text;
  assert_non_null(text);
  for (char *line = strsep(&at, "\n"); line && *line; line = strsep(&at, "\n")) {
    const char *name = strsep(&line, "\t");
    if (strcmp(name, "field") == 0 || strchr(name, '.')) continue; /* the head; fields within objects are read where those are */
    for (mm_field_api api = 0; api < MM_FIELDS_APIS; api++) {
      const char *word = strsep(&line, "\t");
      assert_non_null(word);
      if (strcmp(word, ".") == 0) continue; /* another row has it */
      if (mm_field_fate_of(name, api) != fate_of_word(word)) fail_msg("%s of API %d: the file says %s", name, api, word);
      rows++;
    }
    assert_true(file_names < NAMES);
    file_name[file_names++] = name;
  }
  size_t count = 0;
  for (; mm_field_name(count); count++) {
    const char *name = mm_field_name(count);
    bool found = false;
    for (size_t i = 0; i < file_names; i++) found |= strcmp(file_name[i], name) == 0;
    if (!found) fail_msg("the file has no %s", name);
    if (count && strcmp(mm_field_name(count - 1), name) >= 0) fail_msg("%s is not in its place", name);
    assert_int_not_equal(mm_field_fate_of(name, MM_FIELDS_CHAT), MM_FIELD_UNKNOWN);
  }
  assert_int_equal(rows, count * MM_FIELDS_APIS);
  assert_int_equal(mm_field_fate_of("no_such_field", MM_FIELDS_CHAT), MM_FIELD_UNKNOWN);
  assert_int_equal(mm_field_fate_of("", MM_FIELDS_CHAT), MM_FIELD_UNKNOWN);
  free(text);
}

/* A field holds a reply where some API serves it as such, null never; one that is served otherwise, or that nobody knows, does not. */
TEST(fields_that_hold) {
  static const struct {
    const char *body;
    bool holds;
  } row[] = {
      {"{}", false},
      {"{\"prompt\": \"x\", \"stop\": [\"y\"]}", false},
      {"{\"tools\": []}", true},
      {"{\"prompt\": \"x\", \"ebnf\": \"\"}", true},
      {"{\"guided_json\": {}}", true},
      {"{\"guided_json\": null}", false},
      {"{\"guided_json\\u0000\": {}}", false},
      {"{\"reasoning_budget_tokens\": 3}", true},
      {"{\"structural_tag\": {}}", false},
  };
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
    mm_err err = {0};
    mm_arena a = {0};
    const mm_value *body = mm_body_parse(&a, row[i].body, strlen(row[i].body), &err);
    assert_non_null(body);
    if (mm_field_holds(body) != row[i].holds) fail_msg("%s", row[i].body);
    mm_arena_close(&a);
  }
}

static bool holds(const char *name) {
  mm_arena a = {0};
  mm_err err = {0};
  char text[128];
  const int n = snprintf(text, sizeof text, "{\"%s\": {}}", name);
  const mm_value *body = mm_body_parse(&a, text, (size_t)n, &err);
  assert_non_null(body);
  const bool answer = mm_field_holds(body);
  mm_arena_close(&a);
  return answer;
}

/* The fields that completions and chat completions read as forms of the content are those that hold replies to completions. */
TEST(content_fields_are_those_that_hold) {
  size_t count = 0, found = 0;
  for (const char *name; (name = mm_content_field(count)); count++) {
    if (mm_field_fate_of(name, MM_FIELDS_CHAT) != MM_FIELD_SERVED || mm_field_fate_of(name, MM_FIELDS_COMPLETIONS) != MM_FIELD_SERVED ||
        !holds(name))
      fail_msg("%s does not hold replies", name);
    for (size_t i = 0; i < count; i++) assert_string_not_equal(mm_content_field(i), name);
  }
  for (size_t i = 0; mm_field_name(i); i++)
    found += mm_field_fate_of(mm_field_name(i), MM_FIELDS_COMPLETIONS) == MM_FIELD_SERVED && holds(mm_field_name(i));
  assert_true(count > 0);
  assert_int_equal(found, count);
}

int main(void) { return run_unit_tests(NULL, NULL); }
