/* Schemas that would be large, and alternatives that would multiply: each is compiled or refused within its budget of time and memory. */
#include <stdlib.h>
#include <sys/resource.h>

#include "formats/text.h"
#include "tests/unit/runtime/schema_of.h"
#include "tests/unit/unit.h"

#define MOST_SECONDS   6          /* of processor time for all, with the sanitizers too */
#define MOST_KIBIBYTES (64 << 10) /* for each, likewise */

/* A schema: `before`, then `count` times `part` with a number from 1 to `numbers` in the place of %, then `after`; ' stands for ". */
typedef struct hostile {
  const char *before, *part, *after;
  int count, numbers;
} hostile;

static const hostile schemas[] = {
    {"{'anyOf': [", "{'type': 'string', 'pattern': '(a|b|c)*a(a|b|c){%}'}, ", "{}]}", 1000, 100},
    {"{'anyOf': [", "{'type': 'string', 'pattern': '^.{1,9%}$'}, ", "{}]}", 1000, 100},
    {"{'type': 'array', 'prefixItems': [", "{'type': 'string', 'pattern': '^(x?){%00}x{2000}$'}, ", "{}]}", 1000, 100},
    {"{'allOf': [", "{'$ref': '#/allOf/%'}, {'$ref': '#'}, ", "{}]}", 1000, 100},
    {"{'$ref': '#/$defs/a', '$defs': {'a': {'allOf': [", "{'properties': {'x': {'allOf': [{'$ref': '#/$defs/a'}, {'title': '%'}]}}}, ",
     "{'properties': {'x': {'$ref': '#/$defs/a'}}}]}}}", 1000, 100},
    {"{'allOf': [", "{'$id': 'a%/', '$anchor': 'b', '$ref': '#b'}, ", "{}]}", 1000, 100},
    {"{'oneOf': [", "{'type': 'object', 'properties': {'k': {'const': %}}, 'required': ['k']}, ", "{'type': 'null'}]}", 1000, 1000},
    {"{'allOf': [", "{'anyOf': [{'minimum': %}, {'maxLength': 3}, {'required': ['a']}]}, ", "{}]}", 1024, 1024},
    {"{'oneOf': [", "{'properties': {'a%': {'type': 'string'}}}, ", "{}]}", 1024, 1024},
    {"{'allOf': [", "{'if': {'required': ['a%']}, 'then': {'required': ['b']}, 'else': {'maxProperties': 3}}, ", "{}]}", 16, 16},
    {"{'not': {'anyOf': [", "{'allOf': [{'not': {'minimum': %}}, {'not': {'$ref': '#/not'}}]}, ", "{}]}}", 1024, 1024},
    {"{'unevaluatedProperties': false, 'allOf': [", "{'anyOf': [{'properties': {'a%': {}}}, {'unevaluatedProperties': false}]}, ", "{}]}",
     1024, 1024},
    {"{'patternProperties': {'a': {}", ", '^[ab]*a[ab]{%}$': {'type': 'null'}", "}, 'additionalProperties': {'type': 'string'}}", 16, 16},
    {"{'$ref': '#/$defs/a', '$defs': {'a': {'oneOf': [", "{'properties': {'x%': {'oneOf': [{'$ref': '#/$defs/a'}, {}]}}}, ",
     "{'type': 'null'}]}}}", 1024, 1024},
    {"{'anyOf': [",
     "{'$id': 'r%', '$dynamicAnchor': 'n', 'properties': {'x': {'$dynamicRef': '#n'}, 'y': {'$ref': 'r1'}, 'z': {'$ref': 'r2'}, "
     "'w': {'$ref': 'r3'}, 'v': {'$ref': 'r4'}}}, ",
     "{'$dynamicRef': 'r1#n'}]}", 16, 16},
    {"{'enum': ['a'], 'anyOf': [", "{'enum': ['b%', 'a'], 'oneOf': [{'maxLength': 1}, {'minLength': 1}]}, ", "{}]}", 1024, 1024},
};

static void put(mm_text *t, const hostile *h) {
  const char *number = strchr(h->part, '%');
  mm_text_put(t, h->before);
  for (int k = 0; k < h->count; k++) {
    mm_text_add(t, h->part, (size_t)(number - h->part));
    mm_text_printf(t, "%d%s", 1 + k % h->numbers, number + 1);
  }
  mm_text_put(t, h->after);
  assert_false(t->failed);
  for (char *c = t->p; *c; c++)
    if (*c == '\'') *c = '"';
}

/* The largest memory of the process so far, in KiB, and its processor time in seconds. A sanitizer keeps what was freed for a while: each
 * schema is bounded by what it adds. */
static long used(double *seconds) {
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  *seconds = (double)u.ru_utime.tv_sec + (double)u.ru_utime.tv_usec / 1e6;
  return u.ru_maxrss;
}

TEST(each_is_compiled_or_refused) {
  double start, now;
  long before = used(&start);
  for (size_t i = 0; i < sizeof schemas / sizeof *schemas; i++) {
    mm_arena a = {0};
    mm_err err = {0};
    mm_text t = {0};
    put(&t, &schemas[i]);
    if (!compile(&a, t.p, &err) && strcmp(err.code, "E_SCHEMA") != 0) fail_msg("%s: %s", schemas[i].part, err.text);
    free(t.p);
    mm_arena_close(&a);
    const long after = used(&now);
    if (after - before > MOST_KIBIBYTES) fail_msg("%s: %ld KiB more", schemas[i].part, after - before);
    before = after;
  }
  if (now - start > MOST_SECONDS) fail_msg("%.1f s", now - start);
}

/* Equal values whose keys stand in opposite orders: each is looked for among all. */
TEST(wide_values_are_not_compared_without_end) {
  mm_arena a = {0};
  mm_err err = {0};
  mm_text t = {0};
  mm_text_put(&t, "{\"allOf\": [{\"const\": {\"k\": 0");
  for (int k = 0; k < 20000; k++) mm_text_printf(&t, ", \"k%d\": 0", k);
  mm_text_put(&t, "}}, {\"const\": {\"k\": 0");
  for (int k = 20000; k--;) mm_text_printf(&t, ", \"k%d\": 0", k);
  mm_text_put(&t, "}}]}");
  assert_false(t.failed);
  assert_null(compile(&a, t.p, &err));
  if (!strstr(err.text, "expected at most")) fail_msg("%s", err.text);
  free(t.p);
  mm_arena_close(&a);
}

/* Numbers that differ in the last of many digits, each looked for among all. */
TEST(long_numbers_are_not_compared_without_end) {
  static const char *const between[] = {"]}, {\"enum\": [2", "], \"not\": {\"const\": 1}}, {\"enum\": [2"};
  for (int way = 0; way < 3; way++) {
    mm_arena a = {0};
    mm_err err = {0};
    mm_text t = {0};
    mm_text_put(&t, way / 2 ? "{\"oneOf\": [{\"enum\": [1" : "{\"allOf\": [{\"enum\": [1");
    for (int k = 0; k < 4000; k++) {
      if (k == 2000) mm_text_put(&t, between[way % 2]);
      mm_text_printf(&t, ", %01000d%d", 0, 10000 + k);
    }
    mm_text_put(&t, "]}]}");
    for (char *c = t.p; *c; c++)
      if (c[0] == ' ' && c[1] == '0') c[1] = '1'; /* JSON has no zeros in front */
    assert_false(t.failed);
    assert_null(compile(&a, t.p, &err));
    if (!strstr(err.text, "expected at most")) fail_msg("%d: %s", way, err.text);
    free(t.p);
    mm_arena_close(&a);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
