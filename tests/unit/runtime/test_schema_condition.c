/* Schemas with conditions: not, if, oneOf, dependent keys, keywords that see other ones, and schemas that hold together. */
#include <stdio.h>
#include <string.h>

#include "tests/unit/runtime/schema_of.h"
#include "tests/unit/unit.h"

static mm_grammar_stack more[MM_GRAMMAR_MORE];

static bool lets_through(const mm_form *f, const char *text) {
  mm_grammar g = {.more = more};
  mm_grammar_start(&g, f);
  for (const char *c = text; *c; c++)
    if (!mm_grammar_step(&g, (uint8_t)*c)) return false;
  return mm_grammar_accepts(&g);
}

/* Texts that may be generated, and texts that must not. */
static const struct {
  const char *schema, *good[3], *bad[4];
} cases[] = {
    {"{'not': {'minLength': 2}}", {"'a'"}, {"'ab'", "1"}},
    {"{'type': ['string', 'boolean'], 'not': {'enum': ['a', true]}}", {"'b'", "false", "'aa'"}, {"'a'", "true"}},
    {"{'pattern': '^[\\\\ud83d\\\\ude00-\\\\ud83d\\\\ude02]\\\\ud83d\\\\ude01$'}",
     {"'\xf0\x9f\x98\x80\xf0\x9f\x98\x81'"},
     {"'\xf0\x9f\x98\x83\xf0\x9f\x98\x81'", "'\xf0\x9f\x98\x80'"}},
    {"{'type': 'integer', 'not': {'const': 5}}", {"4", "6"}, {"5"}},
    {"{'type': 'object', 'patternProperties': {'^a': {'type': 'integer'}, 'a': {'minimum': 3}}, 'additionalProperties': false, "
     "'minProperties': 1}",
     {"{'ba': 5}"},
     {"{'ab': 5}", "{'ba': 1}", "{}"}},
    /* A number or text that is not generated may fit an alternative. */
    {"{'oneOf': [{'type': 'number', 'exclusiveMinimum': 123456789012.121, 'exclusiveMaximum': 123456789012.122}, {'type': 'number'}]}",
     {"5", "123456789012.123"},
     {"123456789012.1215"}},
    {"{'oneOf': [{'type': 'string', 'pattern': '^\\\\x01$'}, {'type': 'string'}]}", {"'a'", "''"}, {"'\\u0001'"}},
    {"{'oneOf': [{'type': 'string', 'pattern': '^[^ -\xf4\x8f\xbf\xbf]$'}, {'enum': ['\\u0001', 'a']}]}", {"'a'"}, {"'\\u0001'"}},
    {"{'oneOf': [{'enum': ['\xc3\xa9'], 'pattern': '^\\\\W$'}, {'enum': ['\xc3\xa9', 'a']}]}", {"'a'"}, {"'\xc3\xa9'"}},
    {"{'type': 'integer', 'minimum': 7, 'maximum': 18446744073709551615}", {"7", "9223372036854775807"}, {"6", "9223372036854775808"}},
    {"{'pattern': '^[\\\\cIx]\\\\cj$'}", {"'\\t\\n'", "'x\\n'"}, {"'cJ'", "'I\\n'"}},
    {"{'type': 'string', 'not': {'pattern': '^a.*z$'}}", {"'az '", "'b'"}, {"'az'", "'abz'"}},
    {"{'type': 'object', 'properties': {'a': {'type': 'string'}, 'b': {}}, 'not': {'required': ['a', 'b']}}",
     {"{'a': 'x'}", "{'b': 1}", "{}"},
     {"{'a': 'x', 'b': 1}"}},
    {"{'type': 'object', 'properties': {'k': {'enum': ['a', 'b']}, 'v': {}}, 'required': ['k', 'v'], "
     "'if': {'properties': {'k': {'const': 'a'}}}, 'then': {'properties': {'v': {'type': 'string'}}}, "
     "'else': {'properties': {'v': {'type': 'integer'}}}}",
     {"{'k': 'a', 'v': 's'}", "{'k': 'b', 'v': 1}"},
     {"{'k': 'a', 'v': 1}", "{'k': 'b', 'v': 's'}"}},
    {"{'if': {'exclusiveMaximum': 0}, 'then': {'minimum': -10}, 'else': {'multipleOf': 2}}", {"-10", "4", "0"}, {"-11", "3", "'a'"}},
    {"{'if': true, 'then': {'const': 1}, 'else': {'const': 2}}", {"1"}, {"2"}},
    /* A value that fits two alternatives is not generated. */
    {"{'type': 'string', 'oneOf': [{'minLength': 2}, {'maxLength': 4}]}", {"'a'", "'abcde'"}, {"'ab'", "'abcd'"}},
    {"{'oneOf': [{'const': 'a'}, {'enum': ['b', 'a']}]}", {"'b'"}, {"'a'"}},
    {"{'type': 'string', 'oneOf': [{'not': {'const': 'a'}}, {'not': {'not': {'const': 'b'}}}]}", {"'c'"}, {"'a'", "'b'"}},
    {"{'type': 'number', 'oneOf': [{'minimum': 2}, {'not': {'enum': [2.5, 2]}}]}", {"2", "2.5"}, {"3"}},
    {"{'enum': [1, 'a', 2], 'const': 1.0}", {"1.0"}, {"2"}},
    /* Numbers differ by their digits, where they are not read as the same. */
    {"{'oneOf': [{'const': 9007199254740993}, {'const': 9007199254740992}]}",
     {"9007199254740993", "9007199254740992"},
     {"9007199254740991"}},
    {"{'oneOf': [{'enum': [-18446744073709551617, 0.1]}, {'enum': [-18446744073709551616, 0.3, -0.0]}, {'enum': [12e-1, 1e400]}]}",
     {"-18446744073709551617", "-18446744073709551616", "0.1"},
     {"0.2"}},
    {"{'type': 'array', 'items': {'enum': [9007199254740993, 9007199254740992, 9007199254740992.0]}, 'uniqueItems': true, 'minItems': 2}",
     {"[9007199254740992, 9007199254740993]"},
     {"[9007199254740992, 9007199254740992]", "[9007199254740992, 9007199254740992.0]"}},
    {"{'type': 'array', 'prefixItems': [{'const': 18446744073709551615}, {'const': 18446744073709551614}], 'uniqueItems': true, "
     "'items': false, 'minItems': 2}",
     {"[18446744073709551615, 18446744073709551614]"},
     {"[18446744073709551615]"}},
    {"{'enum': [123456789012345678901.5, 0.00000000000000000000125, 100000000000000000000], 'allOf': [{'enum': "
     "[1234567890123456789015e-1, 1.25e-21, 1e20]}]}",
     {"123456789012345678901.5", "0.00000000000000000000125", "100000000000000000000"},
     {"100"}},
    /* The numbers of enum are held to the other keywords by their digits: not all of them could be generated. */
    {"{'const': 5000000000, 'minimum': 1}", {"5000000000"}, {"500000000"}},
    {"{'enum': [1e22, 0.1234567, 0.1, 18446744073709551615, -1], 'exclusiveMinimum': 0.1}",
     {"1e22", "0.1234567", "18446744073709551615"},
     {"0.1", "-1"}},
    {"{'enum': [0.75, 1e1, 2.50, 0.3, 9007199254740993, 5e-1, -0], 'multipleOf': 0.25}", {"0.75", "1e1", "2.50"}, {"0.3"}},
    {"{'enum': [9007199254740993, 9007199254740994, 1e23, 6e1], 'multipleOf': 2}",
     {"9007199254740994", "6e1"},
     {"9007199254740993", "1e23"}},
    /* One that is read as a listed number, and is another one by its digits, is not generated, nor known to be of one alternative alone. */
    {"{'enum': [0.1, 0.2], 'oneOf': [{'enum': [0.10000000000000001, 0.2]}, {'const': 0.1}]}", {"0.2"}, {"0.1"}},
    {"{'properties': {'x': {'$ref': '#/$defs/a'}, 'y': {'oneOf': [{'$ref': '#/$defs/a'}, {'const': 0.1}]}}, 'required': ['x', 'y'], "
     "'$defs': {'a': {'allOf': [{'enum': [0.1, 0.2]}, {'enum': [0.10000000000000001, 0.2]}]}}}",
     {"{'x': 0.2, 'y': 0.2}"},
     {"{'x': 0.2, 'y': 0.1}"}},
    {"{'type': 'integer', 'enum': [-1e400, 1e400, 1e2]}", {"1e2"}, {"1e400", "-1e400"}}, /* read as infinite, which is not whole */
    /* One that is a listed number by its digits, and is read as another one. */
    {"{'allOf': [{'enum': [9.007199254740993e15, 1e23, 1]}, {'enum': [9007199254740993, 100000000000000000000000, 1]}]}",
     {"1"},
     {"9.007199254740993e15", "9007199254740993", "1e23", "100000000000000000000000"}},
    /* An alternative of an alternative that no value fits. */
    {"{'oneOf': [{'enum': [1]}, {'anyOf': [{'const': 2}, {'allOf': [{'const': 3}, {'const': 4}]}]}]}", {"1", "2"}, {"3"}},
    {"{'oneOf': [{'type': 'object', 'properties': {'k': {'const': 1}}, 'required': ['k']}, {'anyOf': [{'type': 'null'}, "
     "{'allOf': [{'type': 'object'}, {'type': 'string'}]}]}]}",
     {"{'k': 1}", "null"},
     {"'a'"}},
    {"{'type': 'integer', 'minimum': -9.5, 'maximum': 4.000000000000001e0, 'exclusiveMaximum': 1e300}", {"-9", "4"}, {"-10", "5"}},
    /* An alternative that leaves values out may share them. */
    {"{'oneOf': [{'const': 0.5}, {'oneOf': [{'type': ['number', 'string']}, {'type': 'integer'}]}]}", {"'a'"}, {"0.5"}},
    {"{'properties': {'k': {'$ref': '#/$defs/x'}, 'l': {'oneOf': [{'const': 0.5}, {'$ref': '#/$defs/x'}]}}, 'required': ['k', 'l'], "
     "'$defs': {'x': {'oneOf': [{'type': ['number', 'string']}, {'type': 'integer'}]}}}",
     {"{'k': 'a', 'l': 'b'}"},
     {"{'k': 'a', 'l': 0.5}"}},
    {"{'oneOf': [{'type': 'object'}, {'anyOf': [{'type': 'object', 'properties': {'a': {'type': 'integer', 'not': {'type': 'integer'}}}}, "
     "{'type': 'null'}]}]}",
     {"null"},
     {"{}", "{'b': 1}"}},
    /* Whether texts that are not generated fit is not looked at any longer than the patterns of others leave room for. */
    {"{'anyOf': [{'type': 'string', 'pattern': '^\\\\x01(a|b)*a(a|b){18}$'}, {'type': 'string', 'pattern': '^[a-z]{2}$'}]}",
     {"'ab'"},
     {"'a'"}},
    {"{'enum': [100.0, 1e1, -0.0, 7], 'multipleOf': 2}", {"100.0", "1e1", "-0.0"}, {"7"}},
    {"{'type': 'object', 'properties': {'a': {}, 'b': {}}, 'not': {'not': {'properties': {'a': {}}, 'unevaluatedProperties': false}}}",
     {"{'a': 1}", "{}"},
     {"{'b': 1}"}},
    /* Draft 7: next to $ref nothing else counts. */
    {"{'$schema': 'http://json-schema.org/draft-07/schema#', 'type': 'integer', 'not': {'$ref': '#/definitions/k', 'minimum': 5}, "
     "'definitions': {'k': {'maximum': 10}}}",
     {"11"},
     {"4", "7"}},
    /* The entry says nothing about a list. */
    {"{'type': 'array', 'dependentSchemas': {'a': {'items': true}}, 'unevaluatedItems': false}", {"[]"}, {"[1]"}},
    {"{'oneOf': [{'type': 'object', 'properties': {'a': {'type': 'string'}}, 'required': ['a']}, "
     "{'type': 'object', 'properties': {'b': {'type': 'string'}}}]}",
     {"{'a': 'x', 'b': 1}", "{'b': 's'}", "{}"},
     {"{'a': 'x', 'b': 's'}", "{'a': 'x'}"}},
    /* The alternatives of both lists, the multiples of both numbers, the values of both lists. */
    {"{'allOf': [{'multipleOf': 4}, {'anyOf': [{'maximum': 8}, {'minimum': 24}]}], 'anyOf': [{'multipleOf': 6}]}",
     {"0", "24"},
     {"4", "12"}},
    {"{'allOf': [{'enum': [1, 'a', 2]}, {'enum': [2.0, 'a']}, {'type': 'number'}]}", {"2"}, {"1", "'a'"}},
    {"{'enum': ['a', 'bcd', 1], 'maxLength': 2}", {"'a'", "1"}, {"'bcd'"}},
    /* What holds for a key that only the other schema declares. */
    {"{'allOf': [{'properties': {'a': {}}, 'additionalProperties': {'type': 'null'}}, {'properties': {'a': {'type': 'integer'}, 'b': "
     "{}}}]}",
     {"{'a': 1, 'b': null}"},
     {"{'a': 1, 'b': 2}"}},
    {"{'allOf': [{'prefixItems': [{'minimum': 3}]}], 'items': {'minimum': 5}, 'minItems': 2}", {"[5, 5]"}, {"[4, 5]", "[5, 4]"}},
    /* Keywords of the alternative count, and those of a cousin do not. */
    {"{'properties': {'a': {}}, 'anyOf': [{'properties': {'b': {}}, 'required': ['b']}, {'required': ['a']}], 'unevaluatedProperties': "
     "false}",
     {"{'a': 1, 'b': 1}", "{'b': 1}", "{'a': 1}"},
     {"{'c': 1}", "{}"}},
    {"{'allOf': [{'properties': {'a': true}}, {'properties': {'b': true}, 'unevaluatedProperties': false}]}", {"{'b': 1}"}, {"{'a': 1}"}},
    {"{'properties': {'a': {}}, 'not': {'properties': {'b': {'type': 'string'}}, 'required': ['b']}, 'unevaluatedProperties': {'type': "
     "'null'}}",
     {"{'a': 1}"},
     {"{'b': 5}", "{'b': 's'}"}},
    {"{'prefixItems': [{'const': 1}], 'contains': {'type': 'string'}, 'unevaluatedItems': false}", {"[1, 'a']"}, {"[1, 2]", "[1, 'a', 2]"}},
    /* Keys of patterns. */
    {"{'patternProperties': {'^a': {'type': 'integer'}, 'b$': {'type': 'string'}}}",
     {"{'ax': 1}", "{'xb': 's'}"},
     {"{'ab': 1}", "{'c': 1}"}},
    {"{'properties': {'ab': {'minimum': 3}}, 'patternProperties': {'^a': {'type': 'integer'}}, 'additionalProperties': {'type': 'null'}}",
     {"{'ab': 3, 'b': null}"},
     {"{'ab': 3.5}", "{'ab': 2}", "{'ac': null}"}},
    /* Items that all differ: literals in the order of their texts, as many left as are needed. */
    {"{'type': 'array', 'items': {'enum': ['b', 'a', 1, 1.0]}, 'uniqueItems': true, 'minItems': 2}",
     {"['a', 1]", "['a', 'b', 1]", "['b', 1]"},
     {"['a', 'a']", "['b', 'a']", "[1]", "['a', 1, 1.0]"}},
    {"{'type': 'array', 'items': {'type': 'boolean'}, 'uniqueItems': true}", {"[false, true]", "[]"}, {"[true, true]"}},
    {"{'prefixItems': [{'type': 'string'}, {'type': 'null'}, {'const': 'a'}], 'uniqueItems': true}", {"['a', null]"}, {"['a', null, 'a']"}},
    {"{'uniqueItems': true}", {"[1]"}, {"[1, 1]"}},
    {"{'type': 'integer', 'multipleOf': 1e-8}", {"7"}, {"0.5"}},
    /* The outermost part that leads there has the anchor. */
    {"{'$id': 'http://a.example/root', '$ref': 'list', '$defs': {'s': {'$dynamicAnchor': 'item', 'type': 'string'}, 'list': {'$id': "
     "'list', "
     "'type': 'array', 'items': {'$dynamicRef': '#item'}, '$defs': {'item': {'$dynamicAnchor': 'item', 'type': 'integer'}}}}}",
     {"['a']", "[]"},
     {"[1]"}},
    {"{'$id': 'http://a.example/root', '$ref': 'list', '$defs': {'s': {'$anchor': 'item', 'type': 'string'}, 'list': {'$id': 'list', "
     "'type': 'array', 'items': {'$dynamicRef': '#item'}, '$defs': {'item': {'$dynamicAnchor': 'item', 'type': 'integer'}}}}}",
     {"[1]"},
     {"['a']"}},
    {"{'$id': 'http://a.example/root', 'properties': {'a': {'$ref': 'list'}, 'b': {'$ref': 'strings'}}, '$defs': {'strings': {'$id': "
     "'strings', "
     "'$ref': 'list', '$defs': {'s': {'$dynamicAnchor': 'item', 'type': 'string'}}}, 'list': {'$id': 'list', 'type': 'array', 'items': "
     "{'$dynamicRef': '#item'}, '$defs': {'item': {'$dynamicAnchor': 'item', 'type': 'integer'}}}}}",
     {"{'a': [1], 'b': ['a']}"},
     {"{'a': ['a']}", "{'b': [1]}"}},
    {"{'properties': {'xa': {'type': 'null'}}, 'patternProperties': {'^x': {}}, 'additionalProperties': false}",
     {"{'xa': null, 'xb': 1}", "{'xb': 1}"},
     {"{'xb': 1, 'xa': 1}", "{'a': 1}", "{'xa': 1}"}},
    /* A part that no value fits is left out. */
    {"{'type': 'object', 'properties': {'a': {'not': {}}, 'b': {}}}", {"{'b': 1}"}, {"{'a': 1}"}},
    {"{'anyOf': [{'allOf': [{'type': 'string'}, {'type': 'null'}]}, {'type': 'null'}]}", {"null"}, {"'a'"}},
    {"{'dependentSchemas': {'a': true, 'b': false}, 'type': 'object', 'properties': {'a': {}, 'b': {}}}", {"{'a': 1}", "{}"}, {"{'b': 1}"}},
};

static const char *quoted(char *to, size_t size, const char *text) {
  snprintf(to, size, "%s", text);
  for (char *c = to; *c; c++)
    if (*c == '\'') *c = '"';
  return to;
}

TEST(conditions_let_through_what_they_say) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    mm_arena a = {0};
    mm_err err = {0};
    char schema[1024], text[64];
    const mm_form *f = compile(&a, quoted(schema, sizeof schema, cases[i].schema), &err);
    if (!f) fail_msg("%s: %s", schema, err.text);
    for (int k = 0; k < 3 && cases[i].good[k]; k++)
      if (!lets_through(f, quoted(text, sizeof text, cases[i].good[k]))) fail_msg("%s: %s is refused", schema, text);
    for (int k = 0; k < 4 && cases[i].bad[k]; k++)
      if (lets_through(f, quoted(text, sizeof text, cases[i].bad[k]))) fail_msg("%s: %s is let through", schema, text);
    mm_arena_close(&a);
  }
}

/* Each schema is refused, with these words. */
static void check_refused(const char *const (*refused)[2], size_t count) {
  for (size_t i = 0; i < count; i++) {
    mm_arena a = {0};
    mm_err err = {0};
    char schema[1024];
    if (compile(&a, quoted(schema, sizeof schema, refused[i][0]), &err)) fail_msg("%s is served", schema);
    if (strcmp(err.code, "E_SCHEMA") != 0 || !strstr(err.text, refused[i][1])) fail_msg("%s: %s", schema, err.text);
    mm_arena_close(&a);
  }
}

TEST(contradictions_and_what_is_not_served_differ) {
  static const char *const refused[][2] = {
      {"{'not': {}}", "no value fits"},
      {"{'allOf': [true, false]}", "no value fits"},
      {"{'anyOf': [false, {'not': true}]}", "no value fits"},
      {"{'type': 'object', 'properties': {'a': {'type': 'number', 'maximum': 1, 'minimum': 2}}, 'required': ['a']}", "no value fits"},
      {"{'oneOf': [{'type': 'array'}, {'type': 'array', 'items': {}}]}", "\"oneOf\" is not served"},
      {"{'type': 'number', 'not': {'type': 'integer'}}", "\"not\" is not served where no value is left"},
      {"{'type': 'object', 'properties': {'a': {'type': 'number', 'not': {'type': 'integer'}}}}",
       "\"not\" is not served where no value is left"},
      {"{'not': {'uniqueItems': true}}", "\"not\" is not served of such keywords"},
      {"{'if': {'propertyNames': {'maxLength': 2}}, 'then': {'minProperties': 1}}", "\"if\" is not served of such keywords"},
      {"{'type': 'string', 'not': {'pattern': '^a|b'}}", "\"not\" is not served of a pattern"},
      {"{'not': {'not': {'$ref': '#/$defs/a'}}}", "$ref: leads to no schema"},
      {"{'oneOf': [{'enum': [9007199254740992, 1]}, {'enum': [9007199254740993.0, 2]}]}",
       "\"oneOf\" is not served: two alternatives have a value in common"},
      {"{'oneOf': [{'type': 'string', 'pattern': '^\\\\x01(a|b)*a(a|b){18}$'}, {'type': 'string'}]}", "\"oneOf\" is not served"},
      {"{'oneOf': [{'type': 'object', 'properties': {'k': {'const': 0.5}}, 'required': ['k']}, {'type': 'object', 'required': ['k'], "
       "'properties': {'k': {'oneOf': [{'type': ['number', 'string']}, {'type': 'integer'}]}}}]}",
       "\"oneOf\" is not served: two objects"},
      {"{'const': 1000000000000000, 'oneOf': [{}, {'not': {'const': 1}}]}", "no alternative is left"},
      {"{'const': 0.1234567, 'oneOf': [{}, {'not': {'const': 0.5}}]}", "no alternative is left"},
      {"{'const': 0.10000000000000001, 'maximum': 0.1}", "\"const\" is not served of such values"},
      {"{'const': 9007199254740993e0, 'multipleOf': 3}", "\"const\" is not served of such values"},
      {"{'const': 9007199254740993.0, 'multipleOf': 3}", "\"const\" is not served of such values"},
      {"{'const': 1e400, 'multipleOf': 3}", "\"const\" is not served of such values"},
      {"{'const': 1e-400, 'multipleOf': 3}", "\"const\" is not served of such values"}, /* read as 0 */
      {"{'const': 100.0, 'oneOf': [{}, {'multipleOf': 2}]}", "\"oneOf\" is not served"},
      {"{'not': {'not': 5}}", "found something else than an object"},
      {"{'type': 'array', 'oneOf': [{'minItems': 2}, {'contains': {'const': 1}, 'maxContains': 1, 'minItems': 2}]}",
       "\"contains\" is not served with so many items"},
      {"{'type': 'array', 'oneOf': [{'minItems': 1}, {'prefixItems': [{'const': 1}], 'contains': {'const': 1}, 'items': {'const': 2}}]}",
       "\"contains\" is not served of first items alone"},
      {"{'oneOf': [{'type': 'object'}, {'type': 'object', 'patternProperties': {'^a': false}, 'minProperties': 1}]}",
       "\"minProperties\" is not served"},
      {"{'\\u0024dynamicRef': '#'}", "\"$dynamicRef\" is not served"},
      {"{'pattern': '\\\\c1'}", "an escape that is not complete"},
      /* Numbers that are not served fit: they are no contradiction, and a value may fit the alternative. */
      {"{'type': 'integer', 'minimum': 9223372036854775808}", "\"minimum\" is not served where no value is left"},
      {"{'type': ['integer', 'null'], 'allOf': [{'type': ['integer', 'string']}], 'minimum': 9223372036854775808}",
       "\"minimum\" is not served where no value is left"},
      {"{'anyOf': [{'type': 'string', 'pattern': '^\\\\x01$'}, {'type': 'string', 'maxLength': 0, 'minLength': 1}]}",
       "\"pattern\" is not served where no value is left"},
      {"{'properties': {'a': {'type': ['integer', 'null'], 'minimum': 1e20}, 'b': {'not': {'enum': [1, 2]}, 'type': 'integer'}}, "
       "'required': ['a', 'b']}",
       "\"not\" is not served where no value is left"},
      {"{'type': 'integer', 'exclusiveMaximum': -9223372036854775808}", "\"exclusiveMaximum\" is not served where no value is left"},
      {"{'type': 'number', 'maximum': 1e15, 'exclusiveMinimum': 1, 'multipleOf': 1e15}",
       "\"maximum\" is not served where no value is left"},
      {"{'type': 'number', 'exclusiveMinimum': 123456789012.121, 'maximum': 123456789012.1215, 'exclusiveMaximum': 123456789012.122}",
       "is not served"},
      {"{'type': 'number', 'exclusiveMinimum': 123456789012.121, 'exclusiveMaximum': 123456789012.122}",
       "\"exclusiveMinimum\" is not served where no value is left"},
      {"{'type': 'number', 'minimum': 5, 'multipleOf': 1e15}", "\"multipleOf\" is not served where no value is left"},
      {"{'type': 'integer', 'minimum': 9223372036854775808, 'exclusiveMaximum': 9223372036854775808}",
       "no number fits them: no value fits"},
      {"{'oneOf': [{'type': 'integer', 'minimum': 9223372036854775808}, {'type': 'number'}]}", "\"oneOf\" is not served"},
      {"{'oneOf': [{'type': ['integer', 'null'], 'minimum': 9223372036854775808}, {'type': 'number'}]}", "\"oneOf\" is not served"},
      {"{'oneOf': [{'anyOf': [{'type': 'integer', 'minimum': 1e22}, {'type': 'null'}]}, {'type': 'number'}]}", "\"oneOf\" is not served"},
      /* Such a schema cannot be turned round. */
      {"{'not': {'$ref': '#/not'}}", "\"not\" is not served of a schema that leads to itself"},
      {"{'not': {'$ref': '#/$defs/l'}, '$defs': {'l': {'properties': {'n': {'$ref': '#/$defs/l'}}}}}",
       "\"not\" is not served of a schema that leads to itself"},
      /* The same of texts that are not generated: with control characters, or beyond ASCII. */
      {"{'type': 'string', 'pattern': '^\\\\x01$'}", "\"pattern\" is not served where no value is left"},
      {"{'pattern': '^\x7f\\\\0$'}", "\"pattern\" is not served where no value is left"},
      {"{'type': 'string', 'pattern': '^(?!a)a$'}", "\"pattern\" is not served: no text fits"},
      {"{'oneOf': [{'type': 'string', 'pattern': '^(?=\\\\W)[\xc3\xa9]$'}, {'type': 'string'}]}", "\"oneOf\" is not served"},
      {"{'enum': ['\xc3\xa9'], 'pattern': '^\\\\W$'}", "\"enum\" is not served where no value is left"},
      {"{'not pattern': 'a'}", "\"not pattern\" is not served"},
      {"{'properties': {'\xc3\xa9': {}}, 'patternProperties': {'^a': {}}}", "\"patternProperties\" is not served next to a key"},
  };
  check_refused(refused, sizeof refused / sizeof *refused);
}

TEST(numbers_that_are_others_by_their_digits_are_refused) {
  static const char *const refused[][2] = {
      /* Whole numbers lie between the bound and what is read of it, or at one of the two. */
      {"{'type': 'integer', 'exclusiveMaximum': 3.0000000000000001}", "\"exclusiveMaximum\" is not served with so many digits"},
      {"{'type': 'integer', 'maximum': 9.007199254740993e15}", "\"maximum\" is not served with so many digits"},
      {"{'type': 'integer', 'exclusiveMaximum': 1e-400}", "\"exclusiveMaximum\" is not served with so many digits"},
      {"{'type': 'integer', 'minimum': 9.223372036854775807e18}", "\"minimum\" is not served with so many digits"},
      {"{'type': 'integer', 'not': {'minimum': 9007199254740993.0}}", "\"minimum\" is not served with so many digits"},
      /* Numbers that are read as the same, and differ by their digits. */
      {"{'const': 0.1, 'oneOf': [{}, {'enum': [0.10000000000000001]}]}", "\"oneOf\" is not served"},
      {"{'const': 0.1, 'enum': [0.10000000000000001]}", "\"enum\" is not served where no value is left"},
      {"{'allOf': [{'const': [0.1]}, {'const': [0.10000000000000001]}]}", "\"const\" is not served where no value is left"},
      {"{'const': 9007199254740993, 'enum': [9007199254740992]}", "no value of what else the schema says: no value fits"},
  };
  check_refused(refused, sizeof refused / sizeof *refused);
}

/* A refusal names a keyword that the schema has, also where it is another one that it became. */
TEST(a_refusal_names_a_keyword_of_the_schema) {
  static const char *const refused[][2] = {
      {"{'not': {'type': 'number', 'minimum': 9007199254740992}}", "\"minimum\" is not served with so many digits"},
      {"{'not': {'type': 'number', 'maximum': 9007199254740994}}", "\"maximum\" is not served with so many digits"},
      {"{'type': 'object', 'patternProperties': {'^(?!a)[ab]+$': {}}, 'additionalProperties': {'type': 'null'}}",
       "\"patternProperties\" is not served: a lookaround"},
      {"{'type': 'integer', 'if': {'type': 'string', 'pattern': '^(?!a)[ab]+$'}, 'then': {}}", "\"if\" is not served: a lookaround"},
      {"{'type': 'null', 'not': {'type': ['object', 'null'], 'maxProperties': 2}}", "\"maxProperties\" is not served above 1"},
      {"{'type': 'number', 'if': {'type': 'integer'}, 'then': {'type': 'null'}}", "\"if\" is not served where no value is left"},
      {"{'properties': {'</parameter>': {}}, 'patternProperties': {'^x': {}}}", "\"patternProperties\" is not served with such a key"},
      /* The property whose schema it is in, the innermost one. */
      {"{'properties': {'a': {'type': 'integer', 'minimum': 1e300}, 'b': {}}, 'required': ['b']}",
       "\"minimum\" is not served where no value is left that is served; found in the property \"a\""},
      {"{'properties': {'a': {'properties': {'b\\u0000': {'multipleOf': 0.1}}}}}", "; found in the property \"b\\x00\""},
      {"{'required': ['a'], 'additionalProperties': {'odd': 1}}", "\"odd\" is not served; found in the property \"a\""},
      {"{'type': 'object', 'properties': {'a': false}, 'required': ['a']}", "no value fits; found in the property \"a\""},
      /* The name of a property and a value are no keywords. */
      {"{'properties': {'exclusiveMaximum': {'not': {'type': 'number', 'minimum': 9007199254740992}}}, 'required': ['exclusiveMaximum']}",
       "\"minimum\" is not served with so many digits"},
      {"{'dependentRequired': {'minimum': ['a']}, 'not': {'type': 'number', 'exclusiveMaximum': 9007199254740993}}",
       "\"exclusiveMaximum\" is not served with so many digits"},
      {"{'not': {'type': 'number', 'minimum': 9007199254740992}, 'default': {'exclusiveMaximum': 1}}",
       "\"minimum\" is not served with so many digits"},
  };
  check_refused(refused, sizeof refused / sizeof *refused);
}

int main(void) { return run_unit_tests(NULL, NULL); }
