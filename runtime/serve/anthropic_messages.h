/* Conversations as Anthropic's messages have them. */
#ifndef MM_RUNTIME_SERVE_ANTHROPIC_MESSAGES_H
#define MM_RUNTIME_SERVE_ANTHROPIC_MESSAGES_H

#include "runtime/serve/openai_messages.h"

/* From system, messages, tools, tool_choice and thinking, in c's arena. False after a refusal or err. A first line of the system text that
 * begins with x-anthropic-billing-header changes with every request, and is dropped. */
MM_MUST_USE bool mm_anthropic_conversation(mm_call *c, mm_conversation *out, mm_tool_rules *rules, mm_err *err);

#endif
