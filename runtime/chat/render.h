/* Functions shared by the renderers. */
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

/* Text of the format itself. */
void mm_render_own(mm_renderer *r, const char *text);
void mm_render_str(mm_renderer *r, mm_owner owner, mm_str s);
/* All parts of a message, one after the other. */
void mm_render_parts(mm_renderer *r, const mm_message *m);
/* True if a template sees content: a list with any item, a string with any text. */
bool mm_render_has_content(const mm_message *m);
/* M2's and M3's list of tools, from its heading to </tools>. */
bool mm_render_tools(mm_renderer *r);

/* Reasoning and content of an assistant's message. */
typedef struct mm_thought {
  mm_str reasoning, content;
  mm_owner owner; /* of both, where they were one text */
  bool split;     /* they were, so `content` stands instead of the message's parts */
} mm_thought;
/* Splits content that has the reasoning within the format's tags, as minimax-append-think gives it. */
bool mm_render_thought(mm_renderer *r, const mm_message *m, mm_thought *t);
/* No text follows the reasoning. */
bool mm_render_is_empty(const mm_message *m, const mm_thought *t);
/* The text behind the reasoning: that of the split, else the message's parts. */
void mm_render_content(mm_renderer *r, const mm_message *m, const mm_thought *t);
/* The JSON value as transformers' tojson writes it, as the user's. */
bool mm_render_json(mm_renderer *r, const mm_value *v);
/* A JSON object of the conversation; NULL after an error that names it by `what` and its place. Nothing: {}. */
const mm_value *mm_render_object(mm_renderer *r, mm_str json, const char *what, size_t place);
/* The arguments of a call of message m. */
const mm_value *mm_render_arguments(mm_renderer *r, const mm_message *m, const mm_chat_call *call);
/* The object of a tool's function. */
const mm_value *mm_chat_function(const mm_value *tool);

/* As Python's json.dumps(v, ensure_ascii=False) writes it, but for numbers, which are as they were. */
void mm_tojson(mm_text *out, const mm_value *v);
/* s without white space at both ends, as Python's str.strip() takes it away. */
mm_str mm_strip(mm_str s);

#endif
