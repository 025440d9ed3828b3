/* Tool calls as forms: what a model of a chat format may write so that its calls are those of a request's tools. */
#ifndef MM_RUNTIME_CONSTRAIN_CALL_FORM_H
#define MM_RUNTIME_CONSTRAIN_CALL_FORM_H

#include "runtime/chat/arguments.h"
#include "runtime/chat/chat_format.h"
#include "runtime/constrain/grammar.h"

typedef struct mm_call_rules {
  mm_chat_family family;
  const mm_tools *tools; /* stays as long as the form */
  const bool *bound;     /* [tools->count] the tool's calls are held to its schema; those of others are well formed alone */
  mm_str only;           /* the one tool that may be called; absent: each */
  bool one_call;
  bool begun; /* M1: the tag <tool_calls> is there already */
} mm_call_rules;

/* M2: what stands between the tags of a block of calls. M3: what stands behind the mark that begins a block, to its end. M1: from
 * <tool_calls> to </tool_calls>. The form lives in the arena.
 * MM_UNSUPPORTED E_SCHEMA names the tool and the keyword that is not served, or what the format has no text for. */
const mm_form *mm_call_form(mm_arena *a, const mm_call_rules *r, mm_err *err);
/* M1: any text, in which calls are of `calls`, a form with `begun`; in_reasoning: it begins within <think>. */
const mm_form *mm_call_prose(mm_arena *a, const mm_form *calls, bool in_reasoning, mm_err *err);

#endif
