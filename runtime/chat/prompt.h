/* A prompt: text in pieces, each with its owner, and tokens that stand for themselves. */
#ifndef MM_RUNTIME_PROMPT_H
#define MM_RUNTIME_PROMPT_H

#include "formats/text.h"
#include "runtime/chat/conversation.h"
#include "runtime/text/tokenizer.h"

typedef struct mm_prompt_piece {
  mm_owner owner;
  size_t at, n;           /* bytes of the prompt's text … */
  const int32_t *sampled; /* … or, where this is not NULL, tokens, borrowed from the conversation; [sampled_count] */
  size_t sampled_count;
} mm_prompt_piece;

/* Zero-initialise; mm_prompt_close accepts an unused one. */
typedef struct mm_prompt {
  mm_text text;
  mm_prompt_piece *piece; /* [count], neighbours of one owner united */
  size_t count, cap;
  size_t user_pieces; /* the pieces before this one, … */
  size_t user_bytes;  /* … and these bytes of it, are the prompt up to the end of the last user message, in M1's formats also of a
                         tool's; 0 0 where there is none */
  bool in_reasoning;  /* the reply begins inside the reasoning */
  mm_opening opening; /* MM_OPENING_NONE without a generation prompt, and in formats that never use sampled tokens */
} mm_prompt;

void mm_prompt_close(mm_prompt *p);

/* Appends text; want of memory shows in p->text.failed. */
void mm_prompt_put(mm_prompt *p, mm_owner owner, const char *text, size_t n);
void mm_prompt_put_sampled(mm_prompt *p, const int32_t *id, size_t count);
/* The prompt so far ends a user message. */
void mm_prompt_mark_user(mm_prompt *p);

typedef struct mm_prompt_tokens {
  int32_t *id; /* [count]; free() it */
  size_t count;
  size_t user_end; /* so many tokens lie up to the end of the last user message, whole: the next turn's prompt begins with them too */
  mm_opening opening;
} mm_prompt_tokens;

/* Control tokens are recognised inside trusted pieces; with trust_user everywhere, as transformers does. Text between two control tokens is
 * encoded as one, whoever wrote it, so that ids are those of the whole text where no user text spells a control token. MM_LIMIT. */
MM_MUST_USE bool mm_prompt_encode(const mm_prompt *p, const mm_tokenizer *t, bool trust_user, mm_prompt_tokens *out, mm_err *err);

/* The token of an image or a video that stands among the ids, at *place: no program here sees pictures. NULL: there is none. */
const char *mm_prompt_media(const mm_tokenizer *t, const int32_t *id, size_t count, size_t *place);

#endif
