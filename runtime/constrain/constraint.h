/* Masks of the tokens that may come next in a reply. A constraint is a sequence of sections: free text, a token, or JSON of a form. */
#ifndef MM_RUNTIME_SERVE_CONSTRAINT_H
#define MM_RUNTIME_SERVE_CONSTRAINT_H

#include "runtime/constrain/grammar.h"
#include "runtime/constrain/lexicon.h"

typedef enum mm_section_kind {
  MM_SECTION_UNTIL, /* ordinary tokens, up to the token `id`, which belongs to it; with `instead` the token `call` may end it too: the
                       next section is the one after MM_SECTION_TOKEN of `call`, and without such a section anything may follow */
  MM_SECTION_FREE,  /* anything, up to the end or to the token `id`, which belongs to it; `instead` as above, and a section _FREE whose
                       `id` is `call` counts too */
  MM_SECTION_TOKEN, /* the token `id`; with `again` the first section follows it, and so with a form that ends itself */
  MM_SECTION_FORM,  /* text of `form`; with `instead` the token `id` may stand in its place: what follows is as after `call` above */
  MM_SECTION_END    /* nothing: the sections behind it are reached by a call alone */
} mm_section_kind;

typedef struct mm_section {
  mm_section_kind kind;
  int32_t id, call;
  const mm_form *form;
  bool instead, again;
  /* Of a reasoning, a section _UNTIL or _FREE that comes first: */
  bool limited; /* after `most` tokens `id` alone may come */
  bool opened;  /* it begins with the token `open`, which does not count; a reply that begins otherwise has no such section */
  bool once;    /* `again` goes to the section behind it */
  int32_t open;
  uint32_t most;
} mm_section;

#define MM_SECTIONS 8
typedef struct mm_constraint mm_constraint;
/* After the last section nothing but the end may come. Forms stay until close. */
mm_constraint *mm_constraint_open(const mm_lexicon *l, const mm_section *section, uint32_t sections, mm_err *err);
void mm_constraint_close(mm_constraint *c); /* accepts NULL */
/* The ids allowed next, as mm_sampling.allowed; NULL: all. Valid until the next call. In one thread at a time, as is chosen. */
const uint32_t *mm_constraint_allowed(mm_constraint *c);
void mm_constraint_chosen(mm_constraint *c, int32_t id);
/* True if a form had to go on and no token could follow, for example within values nested too deep. From then on only the end is
 * allowed. */
bool mm_constraint_stuck(const mm_constraint *c);

#endif
