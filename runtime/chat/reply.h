/* Parses a model's reply as it arrives into reasoning, content and tool calls. The joined events do not depend on how the reply is cut into
 * pieces.
 *
 * Markers (<think>, </think>, the tags around tool calls) are matched by token id where the tokenizer has them as tokens, and then the
 * same text of other tokens is text; otherwise by text. Text that does not parse as a call is content. Only white space around the
 * markers is dropped: the newlines that the template puts there, and text that is white space alone. Of content `as_written` none is.
 * A reply that is cut off where a call may have begun, before its name is whole, shows nothing of the call. */
#ifndef MM_RUNTIME_REPLY_H
#define MM_RUNTIME_REPLY_H

#include "runtime/chat/chat_format.h"

typedef enum mm_reply_kind {
  MM_REPLY_REASONING,
  MM_REPLY_CONTENT,
  MM_REPLY_CALL,      /* a call begins: text is its name, never empty */
  MM_REPLY_ARGUMENTS, /* a fragment of its arguments; joined, they are a JSON object */
  MM_REPLY_CALL_END,  /* the call is complete. A call that was cut off has no end, and its arguments may lack theirs. */
  /* M1, behind the end: the call's object gave its name, or its arguments, once more, and the last ones count. A stream, which has sent the
   * first ones, keeps them. */
  MM_REPLY_NAME_AGAIN,
  MM_REPLY_ARGUMENTS_AGAIN
} mm_reply_kind;

typedef struct mm_reply_event {
  mm_reply_kind kind;
  uint32_t call;    /* its number from 0; of calls */
  const char *text; /* n > 0 bytes of valid UTF-8, for the time of the callback; of MM_REPLY_CALL_END none */
  size_t n;
} mm_reply_event;

typedef void mm_reply_sink(void *user, const mm_reply_event *e);

typedef struct mm_reply_settings {
  const mm_chat_format *format;
  const mm_tokenizer *tokenizer; /* for the markers' ids; NULL: all by text */
  const mm_chat_tool *tool;      /* [tool_count]; may go after mm_reply_open */
  size_t tool_count;
  const struct mm_tools *tools; /* the same tools, opened (arguments.h): only read, so that replies may share them; stays until close. NULL:
                                   the reply opens its own from `tool`. */
  bool calls;                   /* tool calls are looked for; otherwise they are text. Ask for it where the request has tools. */
  bool only_calls;              /* nothing else follows the reasoning: the beginning of a tag where the reply was cut off is no content */
  bool in_reasoning;            /* mm_prompt's */
  bool append_think;            /* minimax-append-think: reasoning is content, after "<think>" */
  bool as_written;              /* the content is held to a form that counts white space: none is dropped, and <think> in it is text */
  mm_reply_sink *sink;
  void *user;
} mm_reply_settings;

typedef struct mm_reply mm_reply;

/* The tags that mark the parts of a reply and may be tokens, of all formats. */
#define MM_REPLY_TAGS 9
extern const char *const mm_reply_tag[MM_REPLY_TAGS];
/* One of the format's own. */
bool mm_reply_is_tag(const mm_chat_format *f, const char *bytes, size_t n);

/* MM_BAD_INPUT E_CHAT for a tool that is no JSON object with a name. */
mm_reply *mm_reply_open(const mm_reply_settings *s, mm_err *err);
void mm_reply_close(mm_reply *r); /* accepts NULL */
/* The next token and its bytes, or bytes alone with id -1. Tokens that end the reply are not given. False: want of memory. */
MM_MUST_USE bool mm_reply_push(mm_reply *r, int32_t id, const char *bytes, size_t n, mm_err *err);
typedef enum mm_reply_finish {
  MM_REPLY_CUT,    /* by the limit, or cancelled: an open call stays unfinished, and text that may have begun a tag is not shown */
  MM_REPLY_WHOLE,  /* the model ended its message: a call without its closing tags is closed */
  MM_REPLY_STOPPED /* by a stop string: as cut, but it is known that no tag has begun in content */
} mm_reply_finish;
MM_MUST_USE bool mm_reply_end(mm_reply *r, mm_reply_finish finish, mm_err *err);

typedef enum mm_reply_place {
  MM_REPLY_OUTSIDE,      /* in content or calls */
  MM_REPLY_IN_REASONING, /* or in the tag that may end it */
  MM_REPLY_UNDECIDED     /* nothing but white space and what may become a tag has come: a reasoning may still begin before it */
} mm_reply_place;
/* Where the reply stands after what was pushed. */
mm_reply_place mm_reply_where(const mm_reply *r);
bool mm_reply_in_calls(const mm_reply *r);             /* behind a tag that begins calls */
uint32_t mm_reply_reasoning_tokens(const mm_reply *r); /* tokens pushed inside the reasoning, its closing marker included */

/* Types of parameters follow the tool's JSON schema (type, lists of types, enum, const, anyOf, oneOf, allOf, local $ref). M2's parameters
 * are text. Where the schema allows a string alone it is the text as it is, streamed as it comes; where it may be null too, once it is not.
 * Others are trimmed and are the first of these that they can be: null (where the schema allows null or no string), a number as written, a
 * boolean (true, false, yes, no, on, off, 1, 0 in any case), an object or array as written; then any JSON where the schema has no string;
 * else a string as it is. Where no type is known: a string. M1's arguments are JSON as written, passed on one by one; where the line goes
 * wrong after the first, the rest is content and no end comes.
 * M3's arguments are elements. A parameter of the type string alone is its text, streamed as it comes, and elements in it are text as
 * written; where it may be null too, it flows once it is not. Other parameters wait for their end: text is a value by its types
 * (mm_arguments_put_element), elements are a list or an object (chat_m3.c). A call that breaks the grammar has no end, and its text as
 * written is content. */

#endif
