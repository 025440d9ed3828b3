/* A file as token ids: a text, or conversations by the checkpoint's chat format: texts for calibration as a server's requests look. */
#ifndef MM_RUNTIME_CHAT_TRANSCRIPTS_H
#define MM_RUNTIME_CHAT_TRANSCRIPTS_H

#include "runtime/chat/chat_format.h"
#include "runtime/text/tokenizer.h"

/* The ids of a text's file in the checkpoint's own tokenizer, control tokens read as text; free() them. MM_BAD_INPUT E_IDS: it is empty. */
int32_t *mm_text_ids(const mm_pack *pack, const char *path, size_t *count, mm_err *err);
/* Keys next to the messages of a conversation's file that change its prompt elsewhere and are read by nobody here; NULL ends them. */
extern const char *const mm_conversation_unread[];
/* The ids of all conversations of a JSON Lines file, one behind the other; free() them. A line is {"messages": [{"role": "system", "user",
 * "assistant" or "tool", "content": TEXT}, …]} or such a list alone; empty lines are skipped. As in chat completions messages may have
 * "reasoning_content" or "reasoning", "tool_calls" and "tool_call_id", and the object may have "tools". The format is that of the
 * checkpoint's template, or its family's where it has none. MM_BAD_INPUT E_CHAT names file and line. */
int32_t *mm_transcripts_ids(const mm_pack *pack, const char *path, size_t *count, mm_err *err);

#endif
