/* The seam of this folder: what holds a reply to a form. Other folders include this header alone.
 *
 * A lexicon has the words of a tokenizer, a form says which texts may be written, and a constraint follows one reply through sections of
 * forms, tokens and free text: at each step it has the mask of the ids that may come next. */
#ifndef MM_RUNTIME_CONSTRAIN_CONSTRAIN_H
#define MM_RUNTIME_CONSTRAIN_CONSTRAIN_H

#include "formats/body.h"
#include "runtime/chat/chat_format.h"
#include "runtime/text/tokenizer.h"

/* ---- Lexicon ---- */

/* All ordinary tokens by their bytes; of one tokenizer, for all constraints. Read only. The tags that mark the parts of a reply are not
 * among them: text that spells a tag is made of other tokens. M3's mark is the word of the byte MM_REPLY_MARK, which forms of M3's calls
 * alone have. */
typedef struct mm_lexicon mm_lexicon;
/* end[end_count]: ids that end a reply. The tokenizer and `end` stay until close. NULL with MM_LIMIT E_MEMORY. */
mm_lexicon *mm_lexicon_open(const mm_tokenizer *t, uint32_t vocab, const int32_t *end, uint32_t end_count, mm_err *err);
void mm_lexicon_close(mm_lexicon *l); /* accepts NULL */

/* ---- Forms ---- */

#define MM_FORM_DEPTH 32 /* values within values; those that are deeper let nothing follow */

/* Texts of a form, in bytes: it depends on no tokenizer. Read only, for any number of constraints in any threads. */
typedef struct mm_form mm_form;

/* Any object of JSON. Static. */
const mm_form *mm_form_any_object(void);
/* One of text[count], count at most 65,535, of 65,535 bytes at most each. The form lives in the arena, and `text` stays as long. NULL with
 * MM_LIMIT E_MEMORY. */
const mm_form *mm_form_texts(mm_arena *a, const mm_str *text, size_t count, mm_err *err);

/* Compiled forms by their digests (SHA-256 of all that they are made of), shared by requests and threads. A form that no request holds is
 * dropped, the one that was not used for longest first, where all together take more than `bytes`; 0: as soon as no request holds it. */
typedef struct mm_form_cache mm_form_cache;
mm_form_cache *mm_form_cache_open(size_t bytes, mm_err *err); /* NULL with MM_LIMIT E_MEMORY */
void mm_form_cache_close(mm_form_cache *c);                   /* accepts NULL; nothing is held any more */

typedef struct mm_form_cache_stats {
  uint64_t hits, misses; /* forms found, and compiled; a form that is refused is a miss each time */
  uint64_t forms, bytes; /* there now: held or not; bytes of their arenas */
  uint64_t bytes_max;    /* as opened */
} mm_form_cache_stats;
mm_form_cache_stats mm_form_cache_read(mm_form_cache *c);

/* The forms that one request holds. Zero-initialise but for the cache; one thread at a time. A form stays until release. */
typedef struct mm_held_forms {
  mm_form_cache *cache;
  struct mm_cached_form **form; /* [count] */
  size_t count, cap;
} mm_held_forms;
void mm_forms_release(mm_held_forms *h); /* accepts one that holds nothing, also without a cache */

/* Errors of all of these: NULL with MM_UNSUPPORTED E_SCHEMA naming what is not served or too large, MM_BAD_INPUT E_SCHEMA for what is
 * none, MM_LIMIT E_MEMORY. `where` is the field of the request, for messages; it and the inputs need not stay. */

/* JSON of a schema, true and false included. docs/serving.md has the keywords. */
const mm_form *mm_forms_schema(mm_held_forms *h, const mm_value *schema, const char *where, mm_err *err);
/* The whole text matches the regular expression, with or without ^ and $. */
const mm_form *mm_forms_regex(mm_held_forms *h, mm_str pattern, const char *where, mm_err *err);
/* The whole text is of `root` of a grammar in GBNF, as llama.cpp has them. */
const mm_form *mm_forms_grammar(mm_held_forms *h, mm_str text, const char *where, mm_err *err);

typedef enum mm_call_place {
  MM_CALLS_ALONE,       /* nothing but calls. M2: what stands between the tags of a block of them. M3: what stands behind the mark that
                         * begins a block, to its end. M1: from <tool_calls> to </tool_calls> */
  MM_CALLS_IN_CONTENT,  /* M1: any text, in which calls are of this form */
  MM_CALLS_IN_REASONING /* M1: the same of a reply that begins within <think> */
} mm_call_place;

typedef struct mm_call_limits {
  mm_chat_family family;
  const mm_chat_tool *tool; /* [tools] as they are shown to the model */
  size_t tools;
  const bool *bound; /* [tools] the tool's calls are held to its schema; those of others are well formed alone */
  mm_str only;       /* the one tool that may be called; absent: each */
  bool one_call;
  mm_call_place place;
} mm_call_limits;
/* Tool calls as the model of a chat format may write them. */
const mm_form *mm_forms_calls(mm_held_forms *h, const mm_call_limits *r, mm_err *err);

/* ---- Constraints ---- */

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
/* The state of one reply. In one thread at a time. */
typedef struct mm_constraint mm_constraint;
/* section[sections], MM_SECTIONS at most, are copied; lexicon and forms stay until close. After the last section nothing but the end may
 * come. NULL with MM_LIMIT E_MEMORY. */
mm_constraint *mm_constraint_open(const mm_lexicon *l, const mm_section *section, uint32_t sections, mm_err *err);
void mm_constraint_close(mm_constraint *c); /* accepts NULL */
/* The ids allowed next, a bit each in ceil(vocab / 32) words, as mm_sampling.allowed; NULL: all. Valid until the next call. */
const uint32_t *mm_constraint_allowed(mm_constraint *c);
/* The reply goes on with this id. If it was not allowed, nothing is constrained from then on. */
void mm_constraint_chosen(mm_constraint *c, int32_t id);
/* True if nothing may follow, and the vocabulary has no token that ends a reply, as of a model without a tokenizer. */
bool mm_constraint_over(const mm_constraint *c);
/* True if a form had to go on and no token could follow, for example within values nested too deep. From then on only the end is
 * allowed. */
bool mm_constraint_stuck(const mm_constraint *c);

#endif
