/* Shared parts of the compiler of schemas. */
#ifndef MM_RUNTIME_CONSTRAIN_SCHEMA_INSIDE_H
#define MM_RUNTIME_CONSTRAIN_SCHEMA_INSIDE_H

#include "runtime/constrain/schema.h"

#define MM_SCHEMAS_MAX       4096
#define MM_SCHEMAS_TRIED     (4 * MM_SCHEMAS_MAX) /* those that no value fits too */
#define MM_SCHEMA_DEPTH      24
#define MM_SCHEMA_COPIES     ((size_t)4 * MM_LITERALS) /* values of enum that alternatives copy from each other or compare */
#define MM_SCHEMA_MERGED     (1u << 18)                /* keywords and properties copied to merge schemas */
#define MM_SCHEMA_PLACES     1024                      /* schemas with $id or $anchor */
#define MM_SCHEMA_ANY_NUMBER (1u << MM_FIRSTS)         /* besides the bits of an mm_first: and not integers alone */

typedef struct mm_schema_compiled {
  const mm_value *schema;
  mm_form *form;
  bool open;     /* what it holds is being compiled */
  bool none;     /* no value fits */
  bool narrowed; /* unless it is one that was left out */
  bool partial;  /* the form may lack values that fit: all that begin alike, or single ones */
} mm_schema_compiled;

/* A schema of $ref or allOf, and the one that says the same without them. */
typedef struct mm_schema_merged {
  const mm_value *schema, *plain; /* plain NULL: no value fits, or an error */
  bool open;                      /* it is being merged */
  bool none, narrowed, partial;
} mm_schema_merged;

/* A string's conditions that were compiled before. */
typedef struct mm_schema_text {
  const char *conditions;
  size_t n;
  mm_form form;
} mm_schema_text;
#define MM_SCHEMA_TEXTS 64 /* of the newest */

/* A $ref, by the address of its text, and the URI of the schema that it stands in. */
typedef struct mm_schema_reference {
  const char *text, *base;
} mm_schema_reference;

/* A schema, and the URI of the part of the document that it stands in. */
typedef struct mm_schema_part {
  const mm_value *schema;
  const char *base;
} mm_schema_part;

typedef struct mm_schema_scope mm_schema_scope;
typedef struct mm_schema_copy mm_schema_copy;
typedef struct mm_schema_negated mm_schema_negated;

typedef struct mm_schema_compiler {
  mm_arena *arena;
  const mm_value *root;
  mm_schema_compiled *done; /* [count] */
  size_t count, cap;
  mm_schema_merged *merged; /* [merged_count] */
  size_t merged_count, merged_cap;
  mm_schema_text text[MM_SCHEMA_TEXTS];
  size_t texts;
  struct mm_schema_place *place; /* [places] */
  size_t places, place_cap;
  mm_schema_reference *reference; /* [references] in the order of their addresses */
  size_t references, reference_cap;
  bool old;             /* the document is of draft 7 or older: a $ref stands alone, whatever is next to it */
  bool dynamic;         /* the document has a $dynamicRef */
  mm_schema_part *part; /* [parts] of such a document, in the order of their addresses */
  size_t parts, part_cap;
  const mm_schema_scope *scopes;
  mm_schema_copy *copies;
  size_t values; /* of enum and const */
  size_t copied; /* of them, to unite alternatives */
  uint64_t merging;
  size_t compiled; /* schemas in all */
  unsigned depth, merge_depth;
  struct {
    const mm_schema_negated *open; /* the innermost one at hand */
    unsigned count;
  } turned;      /* schemas that `not` turns round */
  bool none;     /* the error is that no value fits */
  bool overlap;  /* the error is that a value may fit two alternatives of oneOf */
  bool narrowed; /* some values are left out, of a negation, of numbers or of texts */
  bool escapes;  /* a pattern of these texts has escapes by which texts are left out */
  bool partial;  /* the form at hand may lack values that fit, because of its alternatives */
  struct {
    const char *beyond; /* the keyword whose numbers or texts are left out */
    mm_str property;    /* the innermost one whose schema the error is of; NULL: of none */
  } fault;
  mm_automaton_budget *budget;
  const char *where, *keyword; /* of the schema, for messages; the one whose values or alternatives are compiled */
  mm_err *err;
} mm_schema_compiler;

/* ---- schema_compile.c ---- */
extern const mm_form mm_schema_any_value, mm_schema_any_string;
bool mm_schema_compile_value(mm_schema_compiler *p, const mm_value *schema, const mm_form **out);
/* Fails with MM_BAD_INPUT, MM_UNSUPPORTED that names the keyword, MM_UNSUPPORTED with a number. */
bool mm_schema_wrong(mm_schema_compiler *p, const char *what);
/* Fails because no value fits the schema. */
bool mm_schema_none(mm_schema_compiler *p, const char *what);
/* Forgets the error if it is that no value fits: true then. */
bool mm_schema_forget_none(mm_schema_compiler *p);
/* The same, unless values of a negation were left out, which might have fitted. */
bool mm_schema_leave_out(mm_schema_compiler *p);
/* The same for an alternative of oneOf, which is said to overlap with others then. */
bool mm_schema_leave_out_one(mm_schema_compiler *p);
bool mm_schema_unserved(mm_schema_compiler *p, const char *keyword, const char *reason);
bool mm_schema_too_many(mm_schema_compiler *p, const char *what, size_t found, size_t most);
bool mm_schema_count(mm_schema_compiler *p, const mm_value *schema, const char *key, uint32_t *out);
bool mm_schema_is_open(const mm_schema_compiler *p, const mm_form *s);
/* The form may lack values that fit its schema, as mm_schema_compiled.partial says. */
bool mm_schema_is_partial(const mm_schema_compiler *p, const mm_form *s);
/* An annotation does not restrict the values. */
bool mm_schema_is_annotation(const mm_value *member);
/* True if only annotations and the keywords of `with` stand next to the deciding keyword, so that no keyword is ignored. */
bool mm_schema_alone(mm_schema_compiler *p, const mm_value *schema, const char *keyword, const char *with);

/* A string of JSON that spells a tag of M2's calls, which a parameter of these could not hold: with each "<" as an escape. */
bool mm_schema_escape_tags(mm_schema_compiler *p, mm_literal *l);
/* The key with its quotes, in JSON. */
bool mm_schema_quote_key(mm_schema_compiler *p, const char *key, size_t n, mm_literal *out);
/* The reader of bodies takes NaN and Infinity, which an answer may not hold. */
bool mm_schema_is_json(mm_schema_compiler *p, const mm_value *v);

/* ---- schema_object.c ---- */
bool mm_schema_compile_object(mm_schema_compiler *p, const mm_value *schema, mm_form *out);

/* ---- schema_array.c ---- */
bool mm_schema_compile_array(mm_schema_compiler *p, const mm_value *schema, mm_form *out);

/* ---- schema_exact.c ---- */
/* The form of one value alone. NULL after an error. */
const mm_form *mm_schema_exact(mm_schema_compiler *p, const mm_value *v, unsigned depth);

/* ---- schema_refs.c ---- */
/* Finds the URIs and anchors of the root's schemas. */
bool mm_schema_find_references(mm_schema_compiler *p);
/* Where a $ref leads; NULL: to no schema of the document. */
const mm_value *mm_schema_follow(mm_schema_compiler *p, const mm_value *reference);
/* True if a member of a schema is a schema, or several of them in a list or an object. */
bool mm_schema_holds(const mm_value *member, bool *several);
/* The URI of the part of the document that a schema stands in. */
const char *mm_schema_base(const mm_schema_compiler *p, const mm_value *schema);
/* The schema of this part with the $dynamicAnchor. NULL: none, or several. */
const mm_value *mm_schema_dynamic_place(const mm_schema_compiler *p, const char *base, const char *anchor);

/* ---- schema_scope.c ---- */
/* A copy of the schema whose references lead to copies. NULL after an error. */
const mm_value *mm_schema_copy_of(mm_schema_compiler *p, const mm_value *schema, const mm_schema_scope *scope);
/* A reference of such a copy, and where it leads. */
bool mm_schema_is_copied(const mm_value *reference);
const mm_value *mm_schema_follow_copied(mm_schema_compiler *p, const mm_value *reference);

/* ---- schema_made.c ---- */
/* An object or list that is made here. Its text is not at hand: raw_n is 0. */
typedef struct mm_schema_made {
  mm_value *value, *last;
} mm_schema_made;
extern const mm_value mm_schema_true, mm_schema_false;
bool mm_schema_is_true(const mm_value *v);
bool mm_schema_is_false(const mm_value *v);
bool mm_schema_begin(mm_schema_compiler *p, mm_value_type type, mm_schema_made *out);
/* Adds a copy of the member, under another key if one is given. NULL after an error. */
mm_value *mm_schema_put(mm_schema_compiler *p, mm_schema_made *m, const mm_value *member, const char *key);
/* So many members are copied or compared. False: too many. */
bool mm_schema_spend(mm_schema_compiler *p, uint64_t members);
/* {key: value}. NULL for NULL, and after an error. */
const mm_value *mm_schema_of(mm_schema_compiler *p, const char *key, const mm_value *value);
/* {key: [a, b]}, or {key: [a]}. */
const mm_value *mm_schema_list_of(mm_schema_compiler *p, const char *key, const mm_value *a, const mm_value *b);
/* A schema that says what both schemas, of any kind, say. */
const mm_value *mm_schema_all_of(mm_schema_compiler *p, const mm_value *a, const mm_value *b);
/* The member of the object with the key of `like`. NULL: none. */
mm_value *mm_schema_find(const mm_value *object, const mm_value *like);
/* A copy without this member and $id. */
const mm_value *mm_schema_without(mm_schema_compiler *p, const mm_value *schema, const mm_value *member);
/* A whole number. NULL after an error. */
const mm_value *mm_schema_whole(mm_schema_compiler *p, int64_t n);
/* The same value. False after an error too. */
bool mm_schema_same(mm_schema_compiler *p, const mm_value *a, const mm_value *b);
/* The same value, or one that is read as the same. */
bool mm_schema_may_equal(mm_schema_compiler *p, const mm_value *a, const mm_value *b);
/* The value is that of enum or const, of a list or the member itself. One that is the same only as it is read, or only by its digits, is
 * left out, and the form is partial. */
bool mm_schema_in_list(mm_schema_compiler *p, const mm_value *v, const mm_value *member, bool list);
/* Whole numbers of 64 bits are below, at or above the number by its digits as they are as it is read. */
bool mm_schema_whole_alike(const mm_value *v);
/* The order of two numbers: by their digits; as they are read, whole ones exactly and others as doubles. */
int mm_schema_compare_exact(const mm_value *a, const mm_value *b);
int mm_schema_compare_read(const mm_value *a, const mm_value *b);

/* ---- schema_merge.c ---- */
/* The schema without $ref and allOf at its top. NULL after an error, or without one: leads to no schema. */
const mm_value *mm_schema_plain(mm_schema_compiler *p, const mm_value *schema);
/* A schema that says what both, plain ones, say. unevaluatedProperties and unevaluatedItems of `a` see b too; b has none. */
const mm_value *mm_schema_both(mm_schema_compiler *p, const mm_value *a, const mm_value *b);

/* ---- schema_condition.c ---- */
/* The schema, a plain one, with anyOf in place of `if` with `then` or `else`, and of the first entry of dependentRequired or
 * dependentSchemas; as it is where it has none. */
const mm_value *mm_schema_resolve(mm_schema_compiler *p, const mm_value *schema);
/* The schema that holds where the rest, a plain schema, and one of any kind hold. The rest's unevaluatedProperties and unevaluatedItems see
 * it, its own do not see the rest. NULL after an error, also where no value fits. */
const mm_value *mm_schema_with(mm_schema_compiler *p, const mm_value *rest, const mm_value *one);
/* The alternatives of `any`, a member of the schema, each with what else the schema says. An alternative that no value fits is left
 * out. */
const mm_value **mm_schema_alternatives(mm_schema_compiler *p, const mm_value *schema, const mm_value *any, bool exclusive, size_t *count);
/* The plain schema with unevaluatedProperties and unevaluatedItems as additionalProperties and items, so that it can be read together with
 * others, which they do not see. */
const mm_value *mm_schema_finish(mm_schema_compiler *p, const mm_value *schema);

/* ---- schema_negate.c ---- */
/* Keywords that are made here alone, by their addresses: texts that do not match, texts other than those of a list. */
extern const char mm_schema_no_match[], mm_schema_no_text[];
/* A schema whose values do not fit this one; it need not have all of them. */
const mm_value *mm_schema_negate(mm_schema_compiler *p, const mm_value *schema);
/* The plain schema, which has no alternatives, without its member `not`. */
const mm_value *mm_schema_apply_not(mm_schema_compiler *p, const mm_value *schema, const mm_value *member);

/* ---- schema_choice.c ---- */
/* A choice while alternatives are added to it. */
typedef struct mm_schema_choice {
  mm_form *form;
  mm_form *own[MM_FIRSTS]; /* literals or unions that are this choice's alone, or NULL */
  uint32_t capacity[MM_FIRSTS];
} mm_schema_choice;
bool mm_schema_add(mm_schema_compiler *p, mm_schema_choice *b, const mm_form *s);
void mm_schema_end_choice(mm_schema_choice *b);
/* Literals of this choice alone that begin so, with room for `more`. */
mm_form *mm_schema_own_literals(mm_schema_compiler *p, mm_schema_choice *b, int first, uint32_t more);
/* anyOf or oneOf. */
bool mm_schema_any_of(mm_schema_compiler *p, const mm_value **list, size_t count, const char *keyword, mm_form *out);
/* Sets *differ: two forms are known to have no value in common: their literals differ, or they begin differently. */
bool mm_schema_forms_differ(mm_schema_compiler *p, const mm_form *x, const mm_form *y, bool *differ);
/* Every alternative is of one of the types. */
bool mm_schema_choice_is_of(const mm_form *choice, unsigned firsts);

/* ---- schema_values.c ---- */
/* The format restricts strings. */
bool mm_schema_follows_format(const mm_value *format);
/* The pattern has escapes of classes, of which characters beyond ASCII are left out, or of zero. */
bool mm_schema_has_escapes(const char *pattern, size_t n);
bool mm_schema_string(mm_schema_compiler *p, const mm_value *schema, mm_form *out);
bool mm_schema_number(mm_schema_compiler *p, const mm_value *schema, bool whole, mm_form *out);
/* The number is within the bounds of the schema and a multiple of what it says: 1, or 0; -1: that depends on how numbers are read. */
int mm_schema_number_fits(const mm_value *schema, const mm_value *number);
typedef struct mm_schema_format {
  const char *name, *pattern;
} mm_schema_format;
extern const mm_schema_format mm_schema_formats[]; /* that are followed; the last has no name */
/* Any key but the object's and those that match one of the patterns other than `match`, which all match, as an automaton; match NULL: none.
 */
const mm_form *mm_schema_other_keys(mm_schema_compiler *p, const mm_form *object, const mm_value *patterns, const mm_value *match);
/* Sets *out: the key matches the pattern of a member of patternProperties. */
bool mm_schema_key_matches(mm_schema_compiler *p, const mm_value *pattern, const char *key, size_t n, bool *out);
/* A string that matches the pattern. */
bool mm_schema_pattern(mm_schema_compiler *p, const char *keyword, const char *pattern, size_t n, mm_form *out);

/* ---- schema_words.c ---- */
/* Where the error says that a keyword is not served that the schema does not have, names the one of its own that became it. */
void mm_schema_own_keyword(const mm_value *schema, mm_err *err);
/* Adds to an error about a keyword, or values, the property whose schema it is in. */
void mm_schema_name_property(mm_str key, mm_err *err);

#endif
