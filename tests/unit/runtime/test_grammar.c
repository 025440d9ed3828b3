/* JSON of a schema: what the automaton lets through is what the schema says, and whatever it lets through is JSON. */
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "formats/json.h"
#include "formats/text.h"
#include "runtime/constrain/constrain.h"
#include "tests/unit/runtime/schema_of.h"
#include "tests/unit/unit.h"

static mm_grammar_stack more[2][MM_GRAMMAR_MORE]; /* of the texts that a test follows */

/* How many bytes of the text may stand; all and *whole: it may end there. */
static size_t taken(const mm_form *f, const char *text, bool *whole) {
  mm_grammar g = {.more = more[0]};
  size_t n = 0;
  mm_grammar_start(&g, f);
  while (text[n] && mm_grammar_step(&g, (uint8_t)text[n])) n++;
  *whole = !text[n] && mm_grammar_accepts(&g);
  return n;
}

static const struct {
  const char *schema, *text;
  bool good;
} cases[] = {
    {"{}", "{\"a\": [1, -2.5e+3, true, null, \"x\\n\\u00e9\xc3\xa9\"]}", true},
    {"{}", "01", false},
    {"{}", "1.", false},
    {"{}", "-", false},
    {"{}", "[1,]", false},
    {"{}", "{\"a\":1,}", false},
    {"{}", "\"\\ud800\"", false},
    {"{}", "\"\xff\"", false},
    {"{}", "\"\xed\xa0\x80\"", false},
    {"{}", "\"\xf0\x9f\x98\x80\"", true},
    {"{}", "\"a\nb\"", false},
    {"{}", "\n\n{}", true},
    {"{}", "{\n\n}", false},
    {"{\"type\": \"integer\"}", "12", true},
    {"{\"type\": \"integer\"}", "1.5", false},
    {"{\"type\": [\"integer\", \"null\"]}", "null", true},
    {"{\"type\": [\"integer\", \"null\"]}", "\"a\"", false},
    {"{\"type\": [\"integer\", \"number\"]}", "1.5", true},
    {"{\"enum\": [\"a\", \"ab\", 1, 12, null]}", "\"ab\"", true},
    {"{\"enum\": [\"a\", \"ab\", 1, 12, null]}", "12", true},
    {"{\"enum\": [\"a\", \"ab\", 1, 12, null]}", "1", true},
    {"{\"enum\": [\"a\", \"ab\", 1, 12, null]}", "13", false},
    {"{\"enum\": [\"a\", \"ab\", 1, 12, null]}", "\"abc\"", false},
    {"{\"type\": \"string\", \"enum\": [\"a\", 1, null]}", "\"a\"", true},
    {"{\"type\": \"string\", \"enum\": [\"a\", 1, null]}", "1", false},
    {"{\"type\": [\"integer\", \"null\"], \"enum\": [1, 1.5, 2.0, null, true]}", "1.5", false},
    {"{\"type\": [\"integer\", \"null\"], \"enum\": [1, 1.5, 2.0, null, true]}", "2.0", true},
    {"{\"type\": [\"integer\", \"null\"], \"enum\": [1, 1.5, 2.0, null, true]}", "true", false},
    {"{\"type\": \"object\", \"anyOf\": [{\"type\": \"object\", \"properties\": {\"a\": {}}}]}", "{\"a\": 1}", true},
    {"{\"allOf\": [{\"type\": \"null\"}], \"description\": \"x\"}", "null", true},
    {"{\"properties\": {\"a\": {}}, \"minItems\": 3}", "{}", true},
    {"{\"const\": null}", "null", true},
    {"{\"const\": null}", "1", false},
    {"{\"type\": \"string\", \"minLength\": 2, \"maxLength\": 3}", "\"\xc3\xa9\xc3\xa9\"", true},
    {"{\"type\": \"string\", \"minLength\": 2, \"maxLength\": 3}", "\"\xc3\xa9\"", false},
    {"{\"type\": \"string\", \"minLength\": 2, \"maxLength\": 3}", "\"abcd\"", false},
    {"{\"type\": \"array\", \"items\": {\"type\": \"boolean\"}, \"minItems\": 1, \"maxItems\": 2}", "[true, false]", true},
    {"{\"type\": \"array\", \"items\": {\"type\": \"boolean\"}, \"minItems\": 1, \"maxItems\": 2}", "[]", false},
    {"{\"type\": \"array\", \"items\": {\"type\": \"boolean\"}, \"minItems\": 1, \"maxItems\": 2}", "[true,true,true]", false},
    {"{\"type\": \"object\", \"additionalProperties\": {\"type\": \"integer\"}}", "{\"x\": 1, \"y\": 2}", true},
    {"{\"type\": \"object\", \"additionalProperties\": {\"type\": \"integer\"}}", "{\"x\": \"1\"}", false},
    {"{\"type\": \"object\", \"additionalProperties\": false}", "{}", true},
    {"{\"type\": \"object\", \"additionalProperties\": false}", "{\"a\":1}", false},
#define PERSON \
  "{\"type\": \"object\", \"properties\": {\"na\": {\"type\": \"string\"}, \"name\": {\"type\": \"string\"}, \
\"age\": {\"type\": \"integer\"}}, \"required\": [\"name\"]}"
    {PERSON, "{\"name\": \"x\"}", true},
    {PERSON, "{\"na\": \"x\", \"name\": \"y\", \"age\": 3}", true},
    {PERSON, "{\"na\": \"x\"}", false},
    {PERSON, "{\"age\": 3}", false},
    {PERSON, "{\"name\": \"x\", \"other\": 1}", false},
    {PERSON, "{\"name\": \"x\", \"na\": \"y\"}", false},
#define LIST \
  "{\"$ref\": \"#/$defs/node\", \"$defs\": {\"node\": {\"type\": \"object\", \"properties\": {\"v\": {\"type\": \"integer\"}, \
\"next\": {\"anyOf\": [{\"$ref\": \"#/$defs/node\"}, {\"type\": \"null\"}]}}, \"required\": [\"v\", \"next\"]}}}"
    {LIST, "{\"v\":1,\"next\":{\"v\":2,\"next\":null}}", true},
    {LIST, "{\"v\":1,\"next\":{\"v\":2}}", false},
#define KEYS "{\"type\": \"object\", \"properties\": {\"b\": {}, \"ab\": {}, \"a\": {}, \"abc\": {}, \"B\": {}}, \"required\": [\"a\"]}"
    {KEYS, "{\"b\":1,\"ab\":1,\"a\":1,\"abc\":1,\"B\":1}", true},
    {KEYS, "{\"ab\":1,\"a\":1,\"B\":1}", true},
    {KEYS, "{\"a\":1}", true},
    {KEYS, "{\"a\":1,\"ab\":1}", false},
    {KEYS, "{\"b\":1}", false},
    {KEYS, "{\"b\":1,\"abc\":1}", false},
    {KEYS, "{\"B\":1}", false},
    {"{\"anyOf\": [{\"const\": \"b\"}, {\"enum\": [\"ab\", 2]}, {\"const\": \"a\"}, {\"const\": 10}]}", "\"a\"", true},
    {"{\"anyOf\": [{\"const\": \"b\"}, {\"enum\": [\"ab\", 2]}, {\"const\": \"a\"}, {\"const\": 10}]}", "\"b\"", true},
    {"{\"anyOf\": [{\"const\": \"b\"}, {\"enum\": [\"ab\", 2]}, {\"const\": \"a\"}, {\"const\": 10}]}", "10", true},
    {"{\"anyOf\": [{\"const\": \"b\"}, {\"enum\": [\"ab\", 2]}, {\"const\": \"a\"}, {\"const\": 10}]}", "12", false},
    {"{\"oneOf\": [{\"const\": \"a\"}, {\"enum\": [\"b\", 1]}, {\"enum\": [2, \"c\"]}, {\"type\": \"null\"}]}", "\"c\"", true},
    {"{\"oneOf\": [{\"type\": \"object\"}, {\"anyOf\": [{\"type\": \"boolean\"}, {\"enum\": [7.5, null]}]}]}", "7.5", true},
    {"{\"oneOf\": [{\"items\": {}}]}", "[1]", true},
    /* Fragments of RFC 6901. */
    {"{\"$ref\": \"#/$defs/a%25b~1c~0%22\", \"$defs\": {\"a%b/c~\\\"\": {\"type\": \"null\"}}}", "null", true},
    {"{\"$ref\": \"#/$defs/x%2Fy\", \"$defs\": {\"x\": {\"y\": {\"type\": \"null\"}}}}", "null", true},
    {"{\"anyOf\": [{\"type\": \"null\"}, {\"type\": \"array\", \"items\": {\"$ref\": \"#/anyOf/0\"}}]}", "[null]", true},
    {"{\"$ref\": \"#/$defs/x\", \"$defs\": {\"x\": true}}", "7", true},
    /* Whole numbers have 64 bits, others 17 digits and a small exponent. */
    {"{\"type\": \"integer\"}", "9223372036854775807", true},
    {"{\"type\": \"integer\"}", "9223372036854775808", false},
    {"{\"type\": \"integer\"}", "-9223372036854775808", true},
    {"{\"type\": \"integer\"}", "-9223372036854775809", false},
    {"{\"type\": \"integer\"}", "8999999999999999999", true},
    {"{\"type\": \"integer\"}", "10000000000000000000", false},
    {"{\"type\": \"number\"}", "-1234567890.1234567e-99", true},
    {"{\"type\": \"number\"}", "12345678901234567", true},
    {"{\"type\": \"number\"}", "123456789012345678", false},
    {"{\"type\": \"number\"}", "0.00012345678901234567", true},
    {"{\"type\": \"number\"}", "0.123456789012345678", false},
    {"{\"type\": \"number\"}", "1e100", false},
    {"{}", "[12345678901234567890123]", false},
    /* Bounds, alternatives that begin alike, other keys, numbers of properties, first items, patterns, schemas that hold together. */
    {"{\"type\": \"integer\", \"minimum\": -17, \"maximum\": 205}", "-17", true},
    {"{\"type\": \"integer\", \"minimum\": -17, \"maximum\": 205}", "-18", false},
    {"{\"type\": \"integer\", \"minimum\": -17, \"maximum\": 205}", "205", true},
    {"{\"type\": \"integer\", \"minimum\": -17, \"maximum\": 205}", "206", false},
    {"{\"type\": \"integer\", \"minimum\": -17, \"maximum\": 205}", "-0", false},
    {"{\"type\": \"integer\", \"minimum\": -17, \"maximum\": 205}", "0", true},
    {"{\"type\": \"integer\", \"minimum\": -17, \"maximum\": 205}", "30", true},
    {"{\"type\": \"integer\", \"minimum\": -17, \"maximum\": 205}", "00", false},
    {"{\"type\": \"integer\", \"minimum\": -17, \"maximum\": 205}", "1000", false},
    {"{\"type\": \"integer\", \"minimum\": -17, \"maximum\": 205}", "2e1", false},
    {"{\"type\": \"integer\", \"minimum\": -20, \"exclusiveMaximum\": 100, \"multipleOf\": 7}", "-14", true},
    {"{\"type\": \"integer\", \"minimum\": -20, \"exclusiveMaximum\": 100, \"multipleOf\": 7}", "-21", false},
    {"{\"type\": \"integer\", \"minimum\": -20, \"exclusiveMaximum\": 100, \"multipleOf\": 7}", "98", true},
    {"{\"type\": \"integer\", \"minimum\": -20, \"exclusiveMaximum\": 100, \"multipleOf\": 7}", "99", false},
    {"{\"type\": \"integer\", \"minimum\": -20, \"exclusiveMaximum\": 100, \"multipleOf\": 7}", "7", true},
    {"{\"type\": \"integer\", \"minimum\": -20, \"exclusiveMaximum\": 100, \"multipleOf\": 7}", "0", true},
    {"{\"type\": \"integer\", \"minimum\": 9223372036854775806}", "9223372036854775807", true},
    {"{\"type\": \"integer\", \"minimum\": 9223372036854775806}", "9223372036854775805", false},
    {"{\"type\": \"integer\", \"maximum\": 1e30}", "9223372036854775807", true},
    {"{\"type\": \"number\", \"exclusiveMinimum\": -0.5, \"maximum\": 2.25}", "-0.49999999999999", true},
    {"{\"type\": \"number\", \"exclusiveMinimum\": -0.5, \"maximum\": 2.25}", "-0.5", false},
    {"{\"type\": \"number\", \"exclusiveMinimum\": -0.5, \"maximum\": 2.25}", "2.25", true},
    {"{\"type\": \"number\", \"exclusiveMinimum\": -0.5, \"maximum\": 2.25}", "2.2500000000001", false},
    {"{\"type\": \"number\", \"exclusiveMinimum\": -0.5, \"maximum\": 2.25}", "2.3", false},
    {"{\"type\": \"number\", \"exclusiveMinimum\": -0.5, \"maximum\": 2.25}", "0.0", true},
    {"{\"type\": \"number\", \"exclusiveMinimum\": -0.5, \"maximum\": 2.25}", "-0.0", false},
    {"{\"type\": \"number\", \"exclusiveMinimum\": -0.5, \"maximum\": 2.25}", "1.5e0", false},
    {"{\"anyOf\": [{\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"a\"}, \"x\": {\"type\": \"integer\"}}, \"required\": "
     "[\"k\", \"x\"]}, {\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"ab\"}, \"y\": {\"type\": \"null\"}}, \"required\": "
     "[\"k\"]}]}",
     "{\"k\":\"a\",\"x\":1}", true},
    {"{\"anyOf\": [{\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"a\"}, \"x\": {\"type\": \"integer\"}}, \"required\": "
     "[\"k\", \"x\"]}, {\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"ab\"}, \"y\": {\"type\": \"null\"}}, \"required\": "
     "[\"k\"]}]}",
     "{\"k\":\"ab\"}", true},
    {"{\"anyOf\": [{\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"a\"}, \"x\": {\"type\": \"integer\"}}, \"required\": "
     "[\"k\", \"x\"]}, {\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"ab\"}, \"y\": {\"type\": \"null\"}}, \"required\": "
     "[\"k\"]}]}",
     "{\"k\":\"ab\",\"y\":null}", true},
    {"{\"anyOf\": [{\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"a\"}, \"x\": {\"type\": \"integer\"}}, \"required\": "
     "[\"k\", \"x\"]}, {\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"ab\"}, \"y\": {\"type\": \"null\"}}, \"required\": "
     "[\"k\"]}]}",
     "{\"k\":\"ab\",\"x\":1}", false},
    {"{\"anyOf\": [{\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"a\"}, \"x\": {\"type\": \"integer\"}}, \"required\": "
     "[\"k\", \"x\"]}, {\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"ab\"}, \"y\": {\"type\": \"null\"}}, \"required\": "
     "[\"k\"]}]}",
     "{\"k\":\"a\"}", false},
    {"{\"anyOf\": [{\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"a\"}, \"x\": {\"type\": \"integer\"}}, \"required\": "
     "[\"k\", \"x\"]}, {\"type\": \"object\", \"properties\": {\"k\": {\"const\": \"ab\"}, \"y\": {\"type\": \"null\"}}, \"required\": "
     "[\"k\"]}]}",
     "{\"k\":\"a\",\"y\":null}", false},
    {"{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}, \"ab\": {\"type\": \"null\"}}, \"required\": [\"a\"], "
     "\"additionalProperties\": {\"type\": \"boolean\"}}",
     "{\"a\":1,\"ab\":null,\"abc\":true,\"\":false}", true},
    {"{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}, \"ab\": {\"type\": \"null\"}}, \"required\": [\"a\"], "
     "\"additionalProperties\": {\"type\": \"boolean\"}}",
     "{\"a\":1,\"b\":true}", true},
    {"{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}, \"ab\": {\"type\": \"null\"}}, \"required\": [\"a\"], "
     "\"additionalProperties\": {\"type\": \"boolean\"}}",
     "{\"a\":1,\"ab\":true}", false},
    {"{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}, \"ab\": {\"type\": \"null\"}}, \"required\": [\"a\"], "
     "\"additionalProperties\": {\"type\": \"boolean\"}}",
     "{\"a\":1,\"b\":true,\"ab\":null}", false},
    {"{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}, \"ab\": {\"type\": \"null\"}}, \"required\": [\"a\"], "
     "\"additionalProperties\": {\"type\": \"boolean\"}}",
     "{\"b\":true}", false},
    {"{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"integer\"}, \"ab\": {\"type\": \"null\"}}, \"required\": [\"a\"], "
     "\"additionalProperties\": {\"type\": \"boolean\"}}",
     "{\"a\":1,\"aa\":1}", false},
    {"{\"type\": \"object\", \"properties\": {\"a\": {}, \"b\": {}, \"c\": {}, \"d\": {}}, \"required\": [\"c\"], \"minProperties\": 2, "
     "\"maxProperties\": 3}",
     "{\"c\":1}", false},
    {"{\"type\": \"object\", \"properties\": {\"a\": {}, \"b\": {}, \"c\": {}, \"d\": {}}, \"required\": [\"c\"], \"minProperties\": 2, "
     "\"maxProperties\": 3}",
     "{\"c\":1,\"d\":2}", true},
    {"{\"type\": \"object\", \"properties\": {\"a\": {}, \"b\": {}, \"c\": {}, \"d\": {}}, \"required\": [\"c\"], \"minProperties\": 2, "
     "\"maxProperties\": 3}",
     "{\"a\":1,\"b\":1,\"c\":1}", true},
    {"{\"type\": \"object\", \"properties\": {\"a\": {}, \"b\": {}, \"c\": {}, \"d\": {}}, \"required\": [\"c\"], \"minProperties\": 2, "
     "\"maxProperties\": 3}",
     "{\"a\":1,\"b\":1,\"c\":1,\"d\":1}", false},
    {"{\"type\": \"object\", \"properties\": {\"a\": {}, \"b\": {}, \"c\": {}, \"d\": {}}, \"required\": [\"c\"], \"minProperties\": 2, "
     "\"maxProperties\": 3}",
     "{\"a\":1,\"b\":1,\"d\":1}", false},
    {"{\"type\": \"array\", \"prefixItems\": [{\"type\": \"integer\"}, {\"type\": \"string\"}], \"items\": {\"type\": \"null\"}, "
     "\"minItems\": 1}",
     "[1]", true},
    {"{\"type\": \"array\", \"prefixItems\": [{\"type\": \"integer\"}, {\"type\": \"string\"}], \"items\": {\"type\": \"null\"}, "
     "\"minItems\": 1}",
     "[]", false},
    {"{\"type\": \"array\", \"prefixItems\": [{\"type\": \"integer\"}, {\"type\": \"string\"}], \"items\": {\"type\": \"null\"}, "
     "\"minItems\": 1}",
     "[\"a\"]", false},
    {"{\"type\": \"array\", \"prefixItems\": [{\"type\": \"integer\"}, {\"type\": \"string\"}], \"items\": {\"type\": \"null\"}, "
     "\"minItems\": 1}",
     "[1,\"a\",null,null]", true},
    {"{\"type\": \"array\", \"prefixItems\": [{\"type\": \"integer\"}, {\"type\": \"string\"}], \"items\": {\"type\": \"null\"}, "
     "\"minItems\": 1}",
     "[1,\"a\",2]", false},
    {"{\"type\": \"array\", \"items\": [{\"type\": \"null\"}], \"additionalItems\": false}", "[null,null]", false},
    {"{\"type\": \"string\", \"format\": \"date\"}", "\"2024-02-29\"", true},
    {"{\"type\": \"string\", \"format\": \"date\"}", "\"2023-02-29\"", false},
    {"{\"type\": \"string\", \"format\": \"date\"}", "\"1900-02-29\"", false},
    {"{\"type\": \"string\", \"format\": \"date\"}", "\"0000-01-01\"", false},
    {"{\"type\": \"string\", \"format\": \"date-time\"}", "\"2000-02-29T23:59:59.5+01:30\"", true},
    {"{\"type\": \"string\", \"format\": \"ipv4\"}", "\"255.0.10.249\"", true},
    {"{\"type\": \"string\", \"format\": \"ipv4\"}", "\"256.0.0.1\"", false},
    {"{\"type\": \"string\", \"format\": \"ipv4\"}", "\"01.0.0.1\"", false},
    {"{\"type\": \"string\", \"pattern\": \"^(?!ab)[a-c\\\\\\\"]+$\", \"maxLength\": 3}", "\"aab\"", true},
    {"{\"type\": \"string\", \"pattern\": \"^(?!ab)[a-c\\\\\\\"]+$\", \"maxLength\": 3}", "\"abb\"", false},
    {"{\"type\": \"string\", \"pattern\": \"^(?!ab)[a-c\\\\\\\"]+$\", \"maxLength\": 3}", "\"a\\\"c\"", true},
    {"{\"type\": \"string\", \"pattern\": \"^(?!ab)[a-c\\\\\\\"]+$\", \"maxLength\": 3}", "\"aaaa\"", false},
    {"{\"type\": \"string\", \"pattern\": \"^[^\\\\W_]$\"}", "\"é\"", false},
    {"{\"type\": \"string\", \"pattern\": \"^[^\\\\W_]$\"}", "\"a\"", true},
    {"{\"type\": \"string\", \"pattern\": \"^[^\\\\D]$\"}", "\"、\"", false},
    {"{\"type\": \"string\", \"pattern\": \"^[^\\\\S]$\"}", "\"\xc2\x85\"", false},
    {"{\"type\": \"string\", \"pattern\": \"^[^\\\\S]$\"}", "\" \"", true},
    {"{\"type\": \"string\", \"pattern\": \"^(?!\\\\s)..$\"}", "\"　a\"", false},
    {"{\"type\": \"string\", \"pattern\": \"^(?!\\\\s)..$\"}", "\"a　\"", true},
    {"{\"type\": \"string\", \"pattern\": \"^(?!.*[^\\\\S])..$\"}", "\"a\xc2\xa0\"", false},
    {"{\"allOf\": [{\"enum\": [9007199254740993, 1]}, {\"enum\": [9007199254740992, 1.0]}]}", "9007199254740993", false},
    {"{\"allOf\": [{\"enum\": [9007199254740993, 1]}, {\"enum\": [9007199254740992, 1.0]}]}", "1", true},
    {"{\"enum\": [9007199254740993, 1], \"allOf\": [{\"enum\": [[9007199254740992], 1]}]}", "1", true},
    {"{\"allOf\": [{\"enum\": [[9007199254740993], 1]}, {\"enum\": [[9007199254740992], 1]}]}", "[9007199254740993]", false},
    {"{\"type\": \"object\", \"patternProperties\": {\"^[a-c]{2}$\": {\"type\": \"integer\"}}}", "{\"ab\":1}", true},
    {"{\"type\": \"object\", \"patternProperties\": {\"^[a-c]{2}$\": {\"type\": \"integer\"}}}", "{\"abc\":1}", false},
    {"{\"type\": \"object\", \"propertyNames\": {\"enum\": [\"a\", \"b\"]}}", "{\"b\":1}", true},
    {"{\"type\": \"object\", \"propertyNames\": {\"enum\": [\"a\", \"b\"]}}", "{\"c\":1}", false},
    {"{\"type\": \"object\", \"properties\": {\"a\": {}}, \"propertyNames\": {\"type\": \"string\"}, \"required\": [\"a\"]}", "{\"a\":1}",
     true},
    {"{\"type\": \"object\", \"properties\": {\"a\": {}}, \"propertyNames\": {\"type\": \"string\"}, \"required\": [\"a\"]}", "{}", false},
    {"{\"patternProperties\": {\"^b\": {\"type\": \"null\"}}, \"type\": \"object\", \"propertyNames\": {\"title\": \"x\"}}", "{\"b\":null}",
     true},
    {"{\"type\": \"object\", \"propertyNames\": true, \"additionalProperties\": {\"type\": \"integer\"}}", "{\"c\":1}", true},
    {"{\"type\": \"string\", \"x-order\": 1, \"maxLength\": 2, \"x-\\u00e9\": {}}", "\"ab\"", true},
    {"{\"type\": \"string\", \"x-order\": 1, \"maxLength\": 2}", "\"abc\"", false},
    {"{\"$ref\": \"#/$defs/a\", \"maxLength\": 2, \"$defs\": {\"a\": {\"type\": \"string\", \"minLength\": 1}}}", "\"ab\"", true},
    {"{\"$ref\": \"#/$defs/a\", \"maxLength\": 2, \"$defs\": {\"a\": {\"type\": \"string\", \"minLength\": 1}}}", "\"abc\"", false},
    {"{\"allOf\": [{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"number\"}}}], \"properties\": {\"a\": {\"maximum\": 3}}, "
     "\"required\": [\"a\"]}",
     "{\"a\":3}", true},
    {"{\"allOf\": [{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"number\"}}}], \"properties\": {\"a\": {\"maximum\": 3}}, "
     "\"required\": [\"a\"]}",
     "{\"a\":4}", false},
    {"{\"type\": \"object\", \"properties\": {\"a\": {}, \"b\": {}}, \"anyOf\": [{\"required\": [\"a\"]}, {\"required\": [\"b\"]}]}", "{}",
     false},
    {"{\"type\": \"object\", \"properties\": {\"a\": {}, \"b\": {}}, \"anyOf\": [{\"required\": [\"a\"]}, {\"required\": [\"b\"]}]}",
     "{\"b\":1}", true},
    {"{\"anyOf\": [{\"type\": \"string\", \"maxLength\": 1}, {\"enum\": [\"abc\"]}, {\"type\": \"string\", \"pattern\": \"^xy\"}]}",
     "\"abc\"", true},
    {"{\"anyOf\": [{\"type\": \"string\", \"maxLength\": 1}, {\"enum\": [\"abc\"]}, {\"type\": \"string\", \"pattern\": \"^xy\"}]}",
     "\"ab\"", false},
    {"{\"anyOf\": [{\"type\": \"integer\", \"maximum\": 3}, {\"type\": \"number\", \"minimum\": 10}]}", "10.5", true},
    {"{\"anyOf\": [{\"type\": \"integer\", \"maximum\": 3}, {\"type\": \"number\", \"minimum\": 10}]}", "5", false},
};

TEST(schemas_let_through_what_they_say) {
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    mm_arena a = {0};
    mm_err err = {0};
    bool whole;
    const mm_form *f = compile(&a, cases[i].schema, &err);
    if (!f) fail_msg("%s: %s", cases[i].schema, err.text);
    const size_t n = taken(f, cases[i].text, &whole);
    if (whole != cases[i].good) fail_msg("%s: %s: %zu bytes taken", cases[i].schema, cases[i].text, n);
    mm_arena_close(&a);
  }
}

TEST(what_is_not_served_is_refused_by_name) {
  static const char *const refused[][2] = {
      {"{\"type\": \"string\", \"pattern\": \"a(?=b)\"}", "\"pattern\" is not served: a lookaround"},
      {"{\"type\": \"string\", \"pattern\": \"(a)\\\\1\"}", "\"pattern\" is not served: a reference to a group"},
      {"{\"type\": \"string\", \"pattern\": \"^\\\\p{L}$\"}", "\"pattern\" is not served: \\\\p"},
      {"{\"type\": \"string\", \"pattern\": \"^a$b\"}", "^ or $ within it"},
      {"{\"type\": \"string\", \"pattern\": \"^a{3}$\", \"minLength\": 4}", "\"pattern\" is not served: no text fits"},
      {"{\"type\": \"string\", \"pattern\": \"((a{1000}){1000}){1000}\"}", "too large"},
      {"{\"type\": \"integer\", \"minimum\": 3, \"maximum\": 2}", "no number fits"},
      {"{\"type\": \"integer\", \"minimum\": 7, \"maximum\": 9, \"multipleOf\": 5}", "no number fits"},
      {"{\"type\": \"number\", \"multipleOf\": 0.1}", "\"multipleOf\""},
      {"{\"type\": \"number\", \"minimum\": 0.12345678901234567}", "\"minimum\" is not served with so many digits"},
      {"{\"not\": {}}", "not"},
      {"{\"type\": \"array\", \"uniqueItems\": true}", "uniqueItems"},
      {"{\"type\": \"object\", \"minProperties\": 2}", "\"minProperties\" is not served above 1"},
      {"{\"type\": \"object\", \"required\": [\"a\"], \"additionalProperties\": false}", "required"},
      {"{\"allOf\": [{\"type\": \"string\"}, {\"type\": \"integer\"}]}", "no type in common"},
      {"{\"allOf\": [{\"$ref\": \"#\"}, {\"$ref\": \"#\"}]}", "\"allOf\" is not served of a schema to itself"},
      {"{\"enum\": [null, {\"a\": 1}], \"not\": {\"const\": 1}}", "\"not\" is not served with enum"},
      {"{\"type\": \"array\", \"items\": {\"type\": \"string\"}, \"contains\": {\"type\": \"boolean\"}}", "schema: schemas that hold"},
      {"{\"type\": \"array\", \"contains\": {\"type\": \"boolean\"}, \"maxContains\": 0}", "schema: contains: more than maxContains"},
      {"{\"type\": \"array\", \"contains\": {\"type\": \"boolean\"}, \"maxItems\": 0}", "schema: found fewer items"},
      {"{\"$ref\": \"#/nowhere\"}", "$ref"},
      {"{\"$ref\": \"#\"}", "$ref: leads to itself"},
      {"{\"$defs\": {\"a\": {\"$ref\": \"#/$defs/a\"}}, \"$ref\": \"#/$defs/a\"}", "$ref: leads to itself"},
      {"{\"$defs\": {\"a\": {\"anyOf\": [{\"$ref\": \"#/$defs/a\"}, {\"type\": \"null\"}]}}, \"$ref\": \"#/$defs/a\"}", "$ref"},
      {"{\"type\": \"thing\"}", "type"},
      {"false", "schema"},
      {"{\"enum\": []}", "enum"},
      /* Two keywords that are served, each with the other. */
      {"{\"oneOf\": [{\"type\": \"integer\"}, {\"type\": \"number\"}]}", "begin alike"},
      /* A value may fit two of the alternatives. */
      {"{\"oneOf\": [true, true]}", "no value fits"},
      {"{\"oneOf\": [{\"$ref\": \"#/$defs/a\"}, {\"$ref\": \"#/$defs/a\"}], \"$defs\": {\"a\": {\"type\": \"array\"}}}", "no value fits"},
      {"{\"oneOf\": [{\"properties\": {\"a\": {}}}, {\"items\": {}}]}", "\"oneOf\" is not served with an alternative that names no type"},
      /* The keyword is the schema's own. */
      {"{\"oneOf\": [{\"type\": \"object\"}, {\"type\": \"object\"}]}", "no value fits"},
      {"{\"oneOf\": 1}", "oneOf"},
      {"{\"type\": \"string\", \"minLength\": -1}", "minLength"},
      {"{\"allOf\": [false]}", "false"},
      {"{\"$ref\": \"#/$defs/a%2\", \"$defs\": {\"a%2\": {}}}", "$ref"},
      {"{\"$ref\": \"#/$defs/a~2\", \"$defs\": {\"a~2\": {}}}", "$ref"},
      {"{\"enum\": [\"a\"], \"maxLength\": 0}", "no value fits"},
      {"{\"const\": 1, \"enum\": [2]}", "enum"},
      {"{\"type\": \"string\", \"const\": 1}", "const"},
      {"{\"type\": \"string\", \"enum\": [1]}", "enum"},
      {"{\"enum\": [1, NaN]}", "NaN"},
      {"{\"type\": [\"integer\", \"null\"], \"enum\": [-Infinity, 1]}", "Infinity"},
      {"{\"const\": Infinity}", "Infinity"},
      {"{\"$ref\": \"other.json\", \"$defs\": {\"a\": {\"$id\": \"urn:other.json\"}}}", "$ref: leads to no schema"},
      {"{\"items\": {\"$id\": \"urn:b\", \"$ref\": \"#/$defs/a\"}, \"$defs\": {\"a\": {}}}", "$ref: leads to no schema"},
      {"{\"items\": {\"$id\": \"#b\"}}", "\"$id\" is not served with a fragment"},
      {"{\"required\": \"a\"}", "required"},
      {"{\"type\": \"object\", \"properties\": {\"a\": {}}, \"required\": \"a\"}", "required"},
  };
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    mm_arena a = {0};
    mm_err err = {0};
    assert_null(compile(&a, refused[i][0], &err));
    if (strcmp(err.code, "E_SCHEMA") != 0 || !strstr(err.text, refused[i][1])) fail_msg("%s: %s", refused[i][0], err.text);
    mm_arena_close(&a);
  }
}

/* Appends enums of 4096 texts each, no two equal, as alternatives. */
static void put_enums(mm_text *t, int enums) {
  mm_text_put(t, "{\"anyOf\": [");
  for (int i = 0; i < enums; i++) {
    mm_text_put(t, i ? ", {\"enum\": [" : "{\"enum\": [");
    for (int k = 0; k < 4096; k++) mm_text_printf(t, k ? ", \"%d.%d\"" : "\"%d.%d\"", i, k);
    mm_text_put(t, "]}");
  }
  mm_text_put(t, "]}");
}

/* Values of enum take memory in proportion to their number, and their number has a limit. */
TEST(many_values_take_little_memory_and_are_limited) {
  static const struct {
    int enums;
    bool good;
  } sizes[] = {{1, true}, {8, true}, {15, true}, {16, false}, {40, false}};
  struct rusage before, after;
  getrusage(RUSAGE_SELF, &before);
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    mm_arena a = {0};
    mm_err err = {0};
    mm_text t = {0};
    put_enums(&t, sizes[i].enums);
    const mm_form *f = t.failed ? NULL : compile(&a, t.p, &err);
    if (!f != !sizes[i].good) fail_msg("%d enums: %s", sizes[i].enums, err.text);
    if (!f) assert_non_null(strstr(err.text, "expected at most 65535"));
    for (int k = 0; f && k < sizes[i].enums; k++) {
      char text[40];
      bool whole;
      snprintf(text, sizeof text, "\"%d.%d\"", k, 4095 - k);
      assert_int_equal(taken(f, text, &whole), strlen(text));
      assert_true(whole);
    }
    free(t.p);
    mm_arena_close(&a);
  }
  getrusage(RUSAGE_SELF, &after);
  if (after.ru_maxrss - before.ru_maxrss > 150 << 10) fail_msg("%ld KiB more", after.ru_maxrss - before.ru_maxrss);
}

static uint64_t next_random(uint64_t *s) {
  *s ^= *s << 13;
  *s ^= *s >> 7;
  return *s ^= *s << 17;
}

/* A text of random bytes that the automaton lets through, closing soon. */
static size_t walk(const mm_form *f, uint64_t *seed, char *text, size_t cap) {
  mm_grammar g = {.more = more[0]}, try = {.more = more[1]};
  size_t n = 0;
  mm_grammar_start(&g, f);
  while (!mm_grammar_done(&g) && !(mm_grammar_accepts(&g) && next_random(seed) % 4 == 0)) {
    static const char often[] = "{}[]\",:0123456789truefalsn\\u eamvxg";
    uint8_t byte = (uint8_t)next_random(seed);
    if (next_random(seed) % 8) byte = (uint8_t)often[next_random(seed) % (sizeof often - 1)];
    if (n > cap / 2 && next_random(seed) % 4) byte = (uint8_t) "}]\"\":,0e1"[next_random(seed) % 9];
    mm_grammar_copy(&try, &g);
    if (!mm_grammar_step(&try, byte)) continue;
    mm_grammar_copy(&g, &try);
    text[n++] = (char)byte;
    if (n == cap) return 0;
  }
  return n;
}

TEST(whatever_is_let_through_is_json) {
  uint64_t seed = 12345;
  size_t bytes = 0;
  char text[240];
  mm_arena a = {0};
  mm_err none = {0};
  const mm_form *form[] = {compile(&a, "{}", &none), mm_schema_any_object(), compile(&a, PERSON, &none), compile(&a, LIST, &none)};
  for (int i = 0; i < 400; i++) {
    const size_t n = walk(form[i % 4], &seed, text, sizeof text);
    mm_err err = {0};
    bytes += n;
    if (!n) continue;
    mm_arena own = {0};
    assert_non_null(mm_body_parse(&own, text, n, &err));
    mm_arena_close(&own);
    if (text[0] != '{' && text[0] != '[') continue; /* documents alone */
    mm_json *j = mm_json_parse(text, n, "walk", &err);
    /* Two equal keys and numbers too large are JSON too. */
    if (!j && strcmp(err.code, "E_NUMBER") != 0 && !strstr(err.text, "twice")) fail_msg("%.*s: %s", (int)n, text, err.text);
    mm_json_free(j);
  }
  assert_true(bytes > 2000);
  mm_arena_close(&a);
}

static bool allows(const uint32_t *mask, int32_t id) { return !mask || mask[id / 32] >> (id % 32) & 1; }

/* A reply of a form, or a call in its place: only before the form has begun. */
TEST(a_call_may_stand_for_the_form) {
  mm_err err = {0};
  mm_arena a = {0};
  mm_tokenizer *t = mm_tokenizer_open("tests/data/tiny-m2/tokenizer.json", 2048, &err);
  assert_non_null(t);
  const int32_t end = mm_tokenizer_find(t, "[e~["), think = mm_tokenizer_find(t, "</think>"),
                call = mm_tokenizer_find(t, "<minimax:tool_call>"), brace = mm_tokenizer_find(t, "{"),
                line = mm_tokenizer_find(t, "\xc4\x8a");
  assert_true(end >= 0 && think >= 0 && call >= 0 && brace >= 0);
  mm_lexicon *l = mm_lexicon_open(t, 2048, &end, 1, &err);
  const mm_form *form = compile(&a, PERSON, &err);
  for (int way = 0; way < 4; way++) {
    const mm_section section[] = {{.kind = MM_SECTION_UNTIL, .id = think},
                                  {.kind = MM_SECTION_FORM, .id = call, .form = form, .instead = way != 3}};
    mm_constraint *c = mm_constraint_open(l, section, 2, &err);
    assert_true(l && c && !allows(mm_constraint_allowed(c), call));
    mm_constraint_chosen(c, think);
    assert_int_equal(allows(mm_constraint_allowed(c), call), way != 3);
    assert_true(allows(mm_constraint_allowed(c), brace) && !allows(mm_constraint_allowed(c), end) &&
                !allows(mm_constraint_allowed(c), think));
    if (way == 1 && line >= 0 && allows(mm_constraint_allowed(c), line)) mm_constraint_chosen(c, line);
    assert_int_equal(allows(mm_constraint_allowed(c), call), way != 3);
    mm_constraint_chosen(c, way < 2 ? call : brace);
    if (way < 2) assert_null(mm_constraint_allowed(c));
    if (way >= 2) assert_true(!allows(mm_constraint_allowed(c), call) && !allows(mm_constraint_allowed(c), end));
    mm_constraint_close(c);
  }
  mm_lexicon_close(l);
  mm_tokenizer_close(t);
  mm_arena_close(&a);
}

#define COUNTED \
  "{\"type\": \"array\", \"minItems\": 3, \"maxItems\": 9, \"items\": {\"type\": \"string\", \"minLength\": 30, \"maxLength\": 90}}"

#define ALIKE \
  "{\"anyOf\": [{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\", \"pattern\": \"^[a-m ]*$\"}, \"n\": {\"type\": \"integer\", \"minimum\": 17}}, \
\"required\": [\"a\", \"n\"]}, {\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\", \"maxLength\": 9}, \"b\": {\"type\": \"null\"}}, \
\"additionalProperties\": {\"type\": \"number\", \"maximum\": 5}}]}"

/* Within a text of bounded length most states are as good as equal: near its bounds they are not. */
TEST(counts_matter_near_their_bounds_alone) {
  mm_err err = {0};
  mm_arena a = {0};
  mm_grammar before = {0}, now = {0};
  int alike[2] = {0};
  mm_grammar_start(&now, compile(&a, "{\"type\": \"string\", \"minLength\": 30, \"maxLength\": 90}", &err));
  assert_true(mm_grammar_step(&now, '"') && mm_grammar_step(&now, 'x'));
  for (uint32_t count = 1; count < 90; count++) {
    mm_grammar_copy(&before, &now);
    assert_true(mm_grammar_step(&now, 'x'));
    const bool same = mm_grammar_same(&before, &now, 8);
    assert_int_equal(same, count + 1 + 8 <= 30 || (count >= 30 && count + 1 + 8 <= 90));
    alike[count >= 30] += same;
  }
  assert_true(alike[0] == 21 && alike[1] == 52 && !mm_grammar_step(&now, 'x'));
  mm_arena_close(&a);
}

/* The mask of each state, against every token tried alone; the sections of a call that is required. */
TEST(masks_are_what_the_automaton_says) {
  mm_err err = {0};
  mm_arena a = {0};
  mm_tokenizer *t = mm_tokenizer_open("tests/data/tiny-m2/tokenizer.json", 2048, &err);
  assert_non_null(t);
  const int32_t end = mm_tokenizer_find(t, "[e~["), think = mm_tokenizer_find(t, "</think>");
  mm_lexicon *l = mm_lexicon_open(t, 2048, &end, 1, &err);
  assert_non_null(l);
  const mm_form *const forms[] = {compile(&a, PERSON, &err), compile(&a, KEYS, &err), compile(&a, COUNTED, &err), compile(&a, ALIKE, &err)};
  uint64_t seed = 99;
  int whole = 0;
  for (int round = 0; round < 30; round++) {
    const mm_form *form = forms[round < 14 ? 0 : round < 20 ? 3 : 1 + round % 2];
    const mm_section section[] = {{.kind = MM_SECTION_UNTIL, .id = think}, {.kind = MM_SECTION_FORM, .form = form}};
    mm_constraint *c = mm_constraint_open(l, section, 2, &err);
    assert_non_null(c);
    assert_true(allows(mm_constraint_allowed(c), 40) && allows(mm_constraint_allowed(c), think) && !allows(mm_constraint_allowed(c), end));
    mm_constraint_chosen(c, 40);
    mm_constraint_chosen(c, think);
    mm_grammar g = {.more = more[0]}, try = {.more = more[1]};
    mm_grammar_start(&g, form);
    for (int steps = 0; !mm_grammar_done(&g); steps++) {
      if (steps == 400) break;
      const uint32_t *mask = mm_constraint_allowed(c);
      int32_t pick = -1;
      uint64_t best = 0;
      for (int32_t id = 0; id < 2048; id++) {
        size_t n, k = 0;
        const char *bytes = mm_tokenizer_bytes(t, id, &n);
        mm_grammar_copy(&try, &g);
        while (bytes && k < n && mm_grammar_step(&try, (uint8_t)bytes[k])) k++;
        const bool fits = bytes && n && k == n && !mm_tokenizer_is_special(t, id);
        if (allows(mask, id) != (fits || (id == end && mm_grammar_accepts(&g)))) fail_msg("token %d", id);
        const uint64_t draw = next_random(&seed) >> (bytes && n && bytes[n - 1] == '"' ? 0 : 3);
        if (fits && draw > best) best = draw, pick = id;
      }
      assert_true(pick >= 0);
      size_t n;
      const char *bytes = mm_tokenizer_bytes(t, pick, &n);
      for (size_t k = 0; k < n; k++) assert_true(mm_grammar_step(&g, (uint8_t)bytes[k]));
      mm_constraint_chosen(c, pick);
    }
    const uint32_t *mask = mm_grammar_done(&g) ? mm_constraint_allowed(c) : NULL;
    whole += mask != NULL;
    for (int32_t id = 0; mask && id < 2048; id++) assert_int_equal(allows(mask, id), id == end);
    mm_constraint_close(c);
  }
  assert_true(whole >= 3);
  mm_lexicon_close(l);
  mm_tokenizer_close(t);
  mm_arena_close(&a);
}

int main(void) { return run_unit_tests(NULL, NULL); }
