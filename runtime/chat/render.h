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

/* Text of the format itself. */
void mm_render_own(mm_renderer *r, const char *text);
void mm_render_str(mm_renderer *r, mm_owner owner, mm_str s);
/* All parts of a message, one after the other. */
void mm_render_parts(mm_renderer *r, const mm_message *m);
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
