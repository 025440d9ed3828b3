/* Functions shared by the renderers, which write a conversation as a format's prompt (render_m1.c, render_m2.c, chat_m3.c). Text carries
 * its owner: markers in the format's own text become special tokens, the same characters in a user's text do not. */
#ifndef MM_RUNTIME_RENDER_H
#define MM_RUNTIME_RENDER_H

#include "formats/body.h"
#include "runtime/chat/chat_format.h"

typedef struct mm_renderer {
  const mm_chat_format *format;
  const mm_conversation *c;
  mm_prompt *p;
  mm_arena arena;
  mm_err *err;
} mm_renderer;

bool mm_render_m1(mm_renderer *r);
bool mm_render_m2(mm_renderer *r);
bool mm_render_m3(mm_renderer *r);

/* Text of the format itself, and text of an owner. */
void mm_render_own(mm_renderer *r, const char *text);
void mm_render_str(mm_renderer *r, mm_owner owner, mm_str s);
/* All parts of a message, one after the other. */
void mm_render_parts(mm_renderer *r, const mm_message *m);
/* True if a template sees content: a list with any item, a string with any text. */
bool mm_render_has_content(const mm_message *m);
/* All parts as one text, in the renderer's arena; *owner: the user where one of them is. Absent on want of memory. */
mm_str mm_render_joined(mm_renderer *r, const mm_message *m, mm_owner *owner);
/* M2's and M3's system text: the message's, which may be NULL, the conversation's identity or the format's. */
void mm_render_system(mm_renderer *r, const mm_message *m);
/* Fails for a tool's message without a call before it. */
bool mm_render_no_call(mm_renderer *r, const mm_message *m);
/* M2's and M3's list of tools, from its heading to </tools>. */
bool mm_render_tools(mm_renderer *r);

/* Reasoning and content of an assistant's message. */
typedef struct mm_thought {
  mm_str reasoning, content;
  mm_owner owner; /* of both, if split */
  bool split;     /* both were cut from one text, so `content` replaces the message's parts */
} mm_thought;
/* Splits content that has the reasoning within the format's tags, as minimax-append-think gives it. */
bool mm_render_thought(mm_renderer *r, const mm_message *m, mm_thought *t);
/* Returns true if no text follows the reasoning. */
bool mm_render_is_empty(const mm_message *m, const mm_thought *t);
/* Writes the text behind the reasoning: t's content if split, else the message's parts. */
void mm_render_content(mm_renderer *r, const mm_message *m, const mm_thought *t);
/* Writes the JSON value as transformers' tojson does, owned by the user. */
bool mm_render_json(mm_renderer *r, const mm_value *v);
/* A JSON object of the conversation; NULL after an error that names `what` and its place. An empty text is {}. */
const mm_value *mm_render_object(mm_renderer *r, mm_str json, const char *what, size_t place);
/* The arguments of a call of message m. */
const mm_value *mm_render_arguments(mm_renderer *r, const mm_message *m, const mm_chat_call *call);

/* As Python's json.dumps(v, ensure_ascii=False) writes it, except numbers, which stay as they were written. */
void mm_tojson(mm_text *out, const mm_value *v);
/* s without white space at both ends, as Python's str.strip() removes it. */
mm_str mm_strip(mm_str s);

#endif
