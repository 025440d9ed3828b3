/* The fields of a request that say whether the model reasons before it replies, and for how long: those of all chat APIs, vLLM, SGLang and
 * llama.cpp. Two that contradict each other are refused. */
#ifndef MM_RUNTIME_SERVE_REASONING_FIELDS_H
#define MM_RUNTIME_SERVE_REASONING_FIELDS_H

#include "runtime/chat/conversation.h"
#include "runtime/serve/call.h"

/* v->thinking from all of them. Refused with its name where the format has no reply without reasoning, but for Anthropic's `thinking`,
 * which agents send to every model. */
MM_MUST_USE bool mm_reasoning_read(mm_call *c, mm_conversation *v);
/* *most: the smallest of the request's budgets of reasoning tokens, -1: there is none. Refused where the format cannot limit it, but for
 * `thinking` and `reasoning`, which M1 takes without effect. */
MM_MUST_USE bool mm_reasoning_budget(mm_call *c, int64_t *most);
/* *excluded: OpenRouter's reasoning.exclude, the reasoning is left out of the reply. */
MM_MUST_USE bool mm_reasoning_excluded(mm_call *c, bool *excluded);

#endif
