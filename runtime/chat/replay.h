/* Sampled tokens of messages with tool calls, for when the message comes back in a history: the prompt then holds what the model wrote, its
 * reasoning too, and begins with the tokens that a prefix cache has. In memory, least recently used goes first. One thread at a time. */
#ifndef MM_RUNTIME_REPLAY_H
#define MM_RUNTIME_REPLAY_H

#include "formats/body.h"
#include "formats/text.h"
#include "runtime/chat/conversation.h"

typedef struct mm_replay mm_replay;

/* A store of at most max_tokens tokens. */
mm_replay *mm_replay_open(size_t max_tokens, mm_err *err);
void mm_replay_close(mm_replay *r); /* accepts NULL */

/* Stores the tokens of this message as it was sent to the client: those sampled after a generation prompt with m->opening, without
 * the end token. The key is the message's content without white space around it, and its calls: their ids, names and arguments as JSON,
 * whatever the spacing, the order of keys and the digits of a number. The ids of calls must therefore not be guessable. Its reasoning is
 * stored too, without white space around it. Messages without calls or an opening, and messages longer than max_tokens, are not stored. */
MM_MUST_USE bool mm_replay_add(mm_replay *r, const mm_message *m, const int32_t *id, size_t count, mm_err *err);
/* The tokens of a message that came back, for mm_message.sampled, and their opening; they stay until the next mm_replay_add. NULL: the
 * message is not stored, or was changed. Its reasoning may be absent or empty; another one is a change. */
const int32_t *mm_replay_find(mm_replay *r, const mm_message *m, size_t *count, mm_opening *opening);

/* Adds a value as clients have it that parsed it: equal values are equal texts, whatever their spacing, the order of keys and the digits of
 * a number. False without memory. */
MM_MUST_USE bool mm_value_put_parsed(mm_text *out, mm_arena *a, const mm_value *v);

#endif
