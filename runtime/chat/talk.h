/* A conversation in a terminal (minimax-run --chat): what the user says becomes prompts, and tokens a reply that is printed as it comes,
 * its content on stdout, its reasoning on stderr. */
#ifndef MM_RUNTIME_TALK_H
#define MM_RUNTIME_TALK_H

#include "runtime/chat/chat_format.h"

typedef struct mm_talk_config {
  const mm_pack *pack;
  const mm_tokenizer *tokenizer;
  const char *format;      /* a name, or NULL: that of the checkpoint's template */
  const char *system;      /* the system message, or NULL: the format's own */
  const char *const *stop; /* [stops] texts that end the content of a reply, borrowed */
  size_t stops;
  bool commands; /* lines of stdin that begin with a slash are commands (/help); a text that begins with one is given with two */
  bool silent;   /* nothing of a reply is printed */
  bool thoughts; /* nor, unless this is set, its reasoning */
} mm_talk_config;

typedef struct mm_talk mm_talk;
/* Without a format, and without a template in the checkpoint, the format is that of the model's family. Fails with the errors of
 * mm_chat_format_of. */
mm_talk *mm_talk_open(const mm_talk_config *c, mm_err *err);
void mm_talk_close(mm_talk *t); /* accepts NULL */
const mm_chat_format *mm_talk_format(const mm_talk *t);

/* The user's next message: n bytes, which are copied; or lines of stdin up to one that does not end with a backslash, *more false where
 * stdin has no more, or after /quit. */
MM_MUST_USE bool mm_talk_say(mm_talk *t, const char *text, size_t n, mm_err *err);
MM_MUST_USE bool mm_talk_listen(mm_talk *t, bool *more, mm_err *err);
/* The prompt of all so far, (*id)[*count], free() it; a reply begins. */
MM_MUST_USE bool mm_talk_prompt(mm_talk *t, int32_t **id, size_t *count, mm_err *err);
/* A token of the reply. *stopped: its content has come to a stop text, and ends there. */
MM_MUST_USE bool mm_talk_token(mm_talk *t, int32_t id, bool *stopped, mm_err *err);
/* The reply ends, whole or cut off, and is part of the conversation. *stopped: a stop text is in it, perhaps in text that was known to be
 * content at the end alone. */
MM_MUST_USE bool mm_talk_end(mm_talk *t, bool whole, bool *stopped, mm_err *err);
/* Takes the last message of the user, and a reply to it, out of the conversation. */
void mm_talk_forget(mm_talk *t);
/* Content and reasoning of the last reply; NUL bytes may be among theirs. */
mm_str mm_talk_content(const mm_talk *t);
mm_str mm_talk_reasoning(const mm_talk *t);

#endif
