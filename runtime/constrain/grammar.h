/* Texts of a form, byte by byte: a state says which bytes may follow. JSON of a schema (schema.h), and tool calls (call_form.h). */
#ifndef MM_RUNTIME_SERVE_GRAMMAR_H
#define MM_RUNTIME_SERVE_GRAMMAR_H

#include "formats/system/base.h"

#define MM_GRAMMAR_DEPTH 32 /* values within values */
#define MM_GRAMMAR_SPACE                                                                                       \
  24                              /* blanks between two tokens of JSON at most, newlines first and one of them \
                                   * (two at the start): models that may write more do not stop */
#define MM_GRAMMAR_DIGITS      32 /* characters of a number */
#define MM_GRAMMAR_SIGNIFICANT 17 /* digits of one that need not be whole; whole ones have 64 bits */
#define MM_GRAMMAR_EXPONENT    2  /* digits */
#define MM_LITERALS            UINT16_MAX

typedef enum mm_form_kind {
  MM_FORM_CHOICE, /* one of several, which differ in their first byte */
  MM_FORM_OBJECT, /* with the properties of a list, in its order */
  MM_FORM_MAP,    /* an object with any keys */
  MM_FORM_ARRAY,
  MM_FORM_STRING,
  MM_FORM_NUMBER,
  MM_FORM_INTEGER,
  MM_FORM_LITERALS, /* one of some texts */
  MM_FORM_CALLS,    /* tool calls: `before`, then calls of `literal`, behind each `after` */
  MM_FORM_ELEMENTS, /* M2: the parameters of a call, and the tag that ends it */
  MM_FORM_VALUE,    /* M2: the text of a parameter, and the tag that ends it; M3: the content of an element */
  MM_FORM_PROSE,    /* M1: any text, and calls of `item` behind each tag that begins them */
  MM_FORM_FIELDS,   /* M3: elements of an object, up to the mark and "</" of the tag that closes it */
  MM_FORM_ITEMS     /* M3: elements of a list, so too */
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

typedef struct mm_form mm_form;
typedef struct mm_literal {
  const char *p; /* n bytes */
  size_t n;
  bool required;        /* of a property's key */
  uint16_t end;         /* of a property's key: one past the next property that is required, itself included; else one past the last */
  const mm_form *value; /* of a property */
} mm_literal;

struct mm_form {
  mm_form_kind kind;
  /* In a choice: NULL where no value begins this way. In an M2 value: the JSON that it may be; _STRING is set if it may be any text. If
   * the reader would turn a text into another value, the form must allow that value. */
  const mm_form *by_first[MM_FIRSTS];
  bool exact;            /* of literals: no blanks before */
  mm_literal *literal;   /* [count] the texts in the order of their bytes (mm_literals_sort), or the keys of an object with their quotes */
  uint32_t count;        /* MM_LITERALS at most */
  const uint16_t *order; /* [count] of an object, elements or calls: the literals in the order of their bytes */
  const mm_form *item;   /* of an array or map */
  uint32_t least, most;  /* items, calls or characters; most UINT32_MAX: any */
  const char *before, *after; /* of calls */
  bool ends;                  /* of calls: the last literal is no call but their end, and comes after at least one */
  bool one_line;              /* of calls: no line ends within their JSON */
  bool any_names;             /* of elements: the first literal is the beginning of a tag, up to the name, which may be any; of
                               * fields: the names may be any */
  bool marked;                /* of a value: M3's, which ends before the mark; its lists and objects are forms of elements */
  bool empty;                 /* of a marked value: it may be nothing */
  unsigned types;             /* of an M2 value: what its reader may make of its text (arguments.h) */
};

typedef struct mm_grammar_frame {
  const mm_form *form;
  uint32_t count;    /* items or characters so far; the next property */
  uint16_t bytes;    /* of a literal that are there; if any, */
  uint16_t from, to; /* literals [from, to), in the order of their bytes, have them; of a whole key: from is the key */
  uint8_t phase, space, digits, tail;
  uint8_t lo, hi; /* of the next byte of a character; of a number: how its digits compare with the largest, and its sign or exponent */
  uint8_t tag;    /* of an M2 value: so much of a tag stands at its end */
  uint8_t number; /* of an M2 value: the phase of the number that it is so far */
} mm_grammar_frame;

#define MM_GRAMMAR_NAMES 256 /* bytes of the names of any elements that are open */

typedef struct mm_grammar {
  mm_grammar_frame frame[MM_GRAMMAR_DEPTH];
  uint32_t depth;
  uint32_t value; /* depth of the M2 value whose JSON is open, 0: none */
  bool one_line;
  uint16_t named; /* bytes of names; a frame of any_names has its own from its `to` on */
  char names[MM_GRAMMAR_NAMES];
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

#endif
