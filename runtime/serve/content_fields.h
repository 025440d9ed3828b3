/* The fields that hold the content of a reply, as vLLM, SGLang and llama.cpp have them: schemas, regular expressions, grammars, choices. */
#ifndef MM_RUNTIME_SERVE_CONTENT_FIELDS_H
#define MM_RUNTIME_SERVE_CONTENT_FIELDS_H

#include "runtime/serve/turn.h"

/* The name of field i of a body that holds content; NULL behind the last. Each holds replies in the table of fields too. */
const char *mm_content_field(size_t i);
/* *rule from whichever of them the body has, one at most, and none next to a response_format that is read already. */
MM_MUST_USE bool mm_content_read(mm_call *c, mm_content_rule *rule, mm_err *err);
/* The section that holds a reply which is nothing but content. */
MM_MUST_USE bool mm_content_section(mm_call *c, const mm_content_rule *rule, mm_turn_sections *out, mm_err *err);

#endif
