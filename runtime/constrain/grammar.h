/* Texts of a form, byte by byte: a state says which bytes may follow. JSON of a schema (schema.h), and tool calls (call_form.h). */
#ifndef MM_RUNTIME_SERVE_GRAMMAR_H
#define MM_RUNTIME_SERVE_GRAMMAR_H

#include "runtime/constrain/automaton.h"
#include "runtime/constrain/constrain.h"
#include "runtime/constrain/decimal.h"

#define MM_GRAMMAR_SPACE                                                                                       \
  24                              /* blanks between two tokens of JSON at most, newlines first and one of them \
                                   * (two at the start): models that may write more do not stop */
#define MM_GRAMMAR_DIGITS      32 /* characters of a number */
#define MM_GRAMMAR_SIGNIFICANT 17 /* digits of one that need not be whole; whole ones have 64 bits */
#define MM_GRAMMAR_EXPONENT    2  /* digits */
#define MM_LITERALS            UINT16_MAX
#define MM_GRAMMAR_STACKS      32 /* alternatives that are followed at once */
#define MM_GRAMMAR_MORE        (MM_GRAMMAR_STACKS - 1)

typedef enum mm_form_kind {
  MM_FORM_CHOICE, /* one of several, which differ in their first byte */
  MM_FORM_OBJECT, /* with the properties of a list, in its order */
  MM_FORM_MAP,    /* an object with any keys */
  MM_FORM_ARRAY,
  MM_FORM_STRING,
  MM_FORM_NUMBER,
  MM_FORM_INTEGER,
  MM_FORM_LITERALS,  /* one of some texts */
  MM_FORM_AUTOMATON, /* a string of `automaton` */
  MM_FORM_DECIMAL,   /* a number of `decimal` */
  MM_FORM_UNION,     /* one of several that may begin alike: the values of the literals */
  MM_FORM_RULE,      /* the whole text, of `automaton`, which may call others */
  MM_FORM_CALLS,     /* tool calls: `before`, then calls of `literal`, behind each `after` */
  MM_FORM_ELEMENTS,  /* M2: the parameters of a call, and the tag that ends it */
  MM_FORM_VALUE,     /* M2: the text of a parameter, and the tag that ends it; M3: the content of an element */
  MM_FORM_PROSE,     /* M1: any text, and calls of `item` behind each tag that begins them */
  MM_FORM_FIELDS,    /* M3: elements of an object, up to the mark and "</" of the tag that closes it */
  MM_FORM_ITEMS      /* M3: elements of a list, so too */
} mm_form_kind;

/* By what a value begins with. */
typedef enum mm_first {
  MM_FIRST_OBJECT,
  MM_FIRST_ARRAY,
  MM_FIRST_STRING,
  MM_FIRST_NUMBER,
  MM_FIRST_TRUE,
  MM_FIRST_FALSE,
  MM_FIRST_NULL
} mm_first;
#define MM_FIRSTS 7

typedef struct mm_form_rule mm_form_rule;
typedef struct mm_literal {
  const char *p; /* n bytes */
  size_t n;
  bool required;        /* of a property's key */
  uint16_t end;         /* of a property's key: one past the next property that is required, itself included; else one past the last */
  uint16_t needed;      /* of a property's key: properties that are required from this one on */
  const mm_form *value; /* of a property; an alternative; one of the first items */
} mm_literal;

struct mm_form {
  mm_form_kind kind;
  /* In a choice: NULL where no value begins this way. In an M2 value: the JSON that it may be; _STRING is set if it may be any text. If
   * the reader would turn a text into another value, the form must allow that value. */
  const mm_form *by_first[MM_FIRSTS];
  bool exact;            /* of literals, automata and unions: no blanks before */
  bool closed;           /* of an object: the schema refuses every other key */
  bool unique;           /* of an array without first items: each item, a literal of one form, comes behind the last in their order */
  mm_literal *literal;   /* [count] the texts in the order of their bytes (mm_literals_sort), or the keys of an object with their quotes;
                          * the first items of an array; alternatives */
  uint32_t count;        /* MM_LITERALS at most */
  const uint16_t *order; /* [count] of an object, elements or calls: the literals in the order of their bytes */
  const mm_form *item;   /* of an array, behind its first items, or of a map; of the other keys of an object, NULL: none */
  const mm_form *key;    /* of a map, NULL: any string; of the other keys of an object */
  const mm_automaton *automaton;
  const mm_text_rule *rules; /* that the automaton was made of */
  const mm_decimal *decimal;
  const mm_form_rule *called; /* of a rule: all rules of its grammar that are called, by their numbers */
  uint32_t least, most;       /* items, members, calls or characters; most UINT32_MAX: any */
  const char *before, *after; /* of calls */
  bool ends;                  /* of calls: the last literal is no call but their end, and comes after at least one */
  bool one_line;              /* of calls: no line ends within their JSON */
  bool any_names;             /* of elements: the first literal is the beginning of a tag, up to the name, which may be any; of
                               * fields: the names may be any */
  bool marked;                /* of a value: M3's, which ends before the mark; its lists and objects are forms of elements */
  bool empty;                 /* of a marked value: it may be nothing */
  unsigned types;             /* of an M2 value: what its reader may make of its text (arguments.h) */
};

struct mm_form_rule {
  mm_form form;
  uint32_t first[8]; /* bits of the bytes that a text of it may begin with */
};

typedef struct mm_grammar_frame {
  const mm_form *form;
  uint32_t count;    /* items or characters so far; the next property; the state of an automaton; of a decimal: half of its digits; of
                      * literals of a unique array: the first that may stand, and, times 65536, the end of those; else 0 */
  uint16_t bytes;    /* of a literal that are there; if any, */
  uint16_t from, to; /* literals [from, to), in the order of their bytes, have them; of a whole key: from is the key; of a unique array:
                      * from is the first literal that the next item may be */
  uint8_t phase, space, digits, tail; /* digits of an object: its members, where their number has bounds */
  uint8_t lo, hi; /* of the next byte of a character; of a number: how its digits compare with the largest, and its sign or exponent */
  uint8_t tag;    /* of an M2 value: so much of a tag stands at its end; of an object: 1 behind a key that it does not declare */
  uint8_t number; /* of an M2 value: the phase of the number that it is so far */
} mm_grammar_frame;

#define MM_GRAMMAR_NAMES 256 /* bytes of the names of any elements that are open */

/* One way to read the text so far. */
typedef struct mm_grammar_stack {
  mm_grammar_frame frame[MM_FORM_DEPTH];
  uint32_t depth;
  uint32_t value; /* depth of the M2 value whose JSON is open, 0: none */
  bool one_line;
  uint16_t named; /* bytes of names; a frame of any_names has its own from its `to` on */
  char names[MM_GRAMMAR_NAMES];
} mm_grammar_stack;

/* All ways to read it: where alternatives begin alike there are several. More than fit are not followed: what they alone allow is not
 * generated. The caller sets `more` once, before the first use; most texts never touch that memory. */
typedef struct mm_grammar {
  uint32_t count;
  bool lost; /* since it was started or copied, there were more ways than fit */
  mm_grammar_stack first;
  mm_grammar_stack *more; /* [MM_GRAMMAR_MORE] the others; NULL: the first alone is followed */
} mm_grammar;

/* Order of literals by their bytes, the shorter first. */
int mm_literal_compare(const mm_literal *a, const mm_literal *b);
/* Sorts the literals by their bytes. A form of literals needs this before it is used. */
void mm_literals_sort(mm_form *literals);
/* Fills `end` of each key and the form's order[count]. A form of keys or tags needs this before it is used; its keys keep their places. */
void mm_literals_order(mm_form *keys, uint16_t *order);
/* True if the text spells a tag that would end an M2 value; such a value must not contain it. */
bool mm_spells_tag(const char *text, size_t n);
void mm_grammar_start(mm_grammar *g, const mm_form *form);
/* False: this byte may not follow; the state is undefined then. */
bool mm_grammar_step(mm_grammar *g, uint8_t byte);
/* The text may end here. */
bool mm_grammar_accepts(const mm_grammar *g);
/* Nothing may follow. */
bool mm_grammar_done(const mm_grammar *g);
/* States that the same words of at most `longest` bytes may follow; what is above depth does not count. False does not say that they
 * differ. */
bool mm_grammar_same(const mm_grammar *a, const mm_grammar *b, uint32_t longest);
void mm_grammar_copy(mm_grammar *to, const mm_grammar *from);
/* The i-th way to read the text, alone. */
void mm_grammar_way(mm_grammar *to, const mm_grammar *from, uint32_t i);
/* Adds the ways of another state to read the same text. */
void mm_grammar_add(mm_grammar *to, const mm_grammar *from);
/* Of a state: within text of one kind, where the words that may follow depend on a few numbers alone. */
typedef enum mm_text_kind {
  MM_TEXT_NONE,
  MM_TEXT_STRING, /* of JSON, in all ways to read it */
  MM_TEXT_PROSE   /* of an M2 or M3 value */
} mm_text_kind;
typedef struct mm_grammar_text {
  mm_text_kind kind;
  uint32_t need, longest; /* characters: at least, before its end; at most, UINT32_MAX: any number */
  bool tags;              /* what words with "<" do depends on more */
} mm_grammar_text;
/* For words of at most `longest` bytes. */
mm_grammar_text mm_grammar_text_of(const mm_grammar *g, uint32_t longest);
/* A state within the text of an M2 value in which a tag may have begun: words whose first byte goes on with no tag may follow it if they
 * may follow the state *plain, whose `more` stays NULL. False: it is no such state. */
bool mm_grammar_plain(mm_grammar *plain, const mm_grammar *g);
typedef enum mm_tag_walk {
  MM_TAG_GOES_ON,
  MM_TAG_LEFT, /* its bytes are text */
  MM_TAG_ENDS  /* it ended its element */
} mm_tag_walk;
/* Of a state that a byte led to from one with a tag, at this depth. */
mm_tag_walk mm_grammar_tag(const mm_grammar *g, uint32_t depth);
/* Ends the string of a state within one, after so many characters more. False: it may not end there. */
bool mm_grammar_end_string(mm_grammar *g, uint32_t more);
/* A byte of mm_is_plain changes nothing that matters for the words of at most `longest` bytes that may follow. */
bool mm_grammar_in_text(const mm_grammar *g, uint32_t longest);
static inline bool mm_is_plain(uint8_t byte) { return byte >= ' ' && byte < 0x7f && byte != '"' && byte != '\\' && byte != '<'; }
/* The automaton that alone decides on the next byte of a state, in the only way to read the text. */
typedef struct mm_automaton_place {
  const mm_automaton *automaton;
  uint32_t at; /* its state */
  bool alone;  /* no other rule goes on behind it */
} mm_automaton_place;
bool mm_grammar_automaton(const mm_grammar *g, mm_automaton_place *p);
typedef enum mm_automaton_step {
  MM_AUTOMATON_REFUSES,
  MM_AUTOMATON_TAKES, /* p is the place after the byte */
  MM_AUTOMATON_LEAVES /* the byte may follow, and the automaton alone does not decide on the next one: p is as before */
} mm_automaton_step;
mm_automaton_step mm_automaton_take(mm_automaton_place *p, uint8_t byte);
/* The automaton is in this state. */
void mm_grammar_set_automaton(mm_grammar *g, uint32_t at);

#endif
