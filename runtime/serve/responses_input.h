/* Conversations as OpenAI's responses have them. */
#ifndef MM_RUNTIME_SERVE_RESPONSES_INPUT_H
#define MM_RUNTIME_SERVE_RESPONSES_INPUT_H

#include "runtime/serve/openai_messages.h"

/* From instructions, input, tools, tool_choice, parallel_tool_calls and reasoning, in c's arena. False after a refusal or err. */
MM_MUST_USE bool mm_responses_conversation(mm_call *c, mm_conversation *out, mm_tool_rules *rules, mm_err *err);

#endif
