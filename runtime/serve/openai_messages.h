/* Conversations as OpenAI's chat completions have them. */
#ifndef MM_RUNTIME_SERVE_OPENAI_MESSAGES_H
#define MM_RUNTIME_SERVE_OPENAI_MESSAGES_H

#include "runtime/chat/arguments.h"
#include "runtime/serve/call.h"

/* How tools may be called. */
typedef enum mm_tool_choice { MM_TOOLS_AUTO, MM_TOOLS_NONE, MM_TOOLS_REQUIRED, MM_TOOLS_NAMED } mm_tool_choice;
typedef struct mm_tool_rules {
  mm_tool_choice choice;
  mm_str name;   /* the tool that is to be called: MM_TOOLS_NAMED */
  bool one_call; /* at most one call: parallel_tool_calls false */
} mm_tool_rules;

/* From messages, tools, tool_choice, parallel_tool_calls, and chat_template_kwargs, in c's arena. False after a refusal or err. Types of
 * content that are not text are refused by name. */
MM_MUST_USE bool mm_openai_conversation(mm_call *c, mm_conversation *out, mm_tool_rules *rules, mm_err *err);

/* Shared with the other APIs. */
/* The arguments of a call as the text of a JSON object, from such a text or an object; an empty text, null and NULL are
 * none. An object that was cut off ends where its text does. */
MM_MUST_USE bool mm_arguments_read(mm_call *c, const char *param, const mm_value *arguments, mm_str *text, mm_err *err);
/* Refuses a message that has calls, reasoning or tools in fields of another kind of message or API, where nobody would see them.
 * `instead`: what to give. */
bool mm_message_check(mm_call *c, const mm_value *v, const char *instead);
/* Reads tools whose function fields stand next to `type`, as in responses and in Anthropic's messages. schema is the key of the
 * parameters. */
MM_MUST_USE bool mm_flat_tools(mm_call *c, mm_conversation *out, const char *schema, mm_err *err);
/* A tool of responses that a server or a client has built in, such as web_search. The formats show functions alone: it is left out. */
bool mm_tool_is_hosted(const mm_value *tool);
/* tool_choice and parallel_tool_calls of OpenAI's APIs. *other is a choice that is neither absent, auto, none nor one of allowed_tools,
 * which are the only ones then; NULL otherwise. */
MM_MUST_USE bool mm_tool_word(mm_call *c, mm_conversation *v, mm_tool_rules *r, const mm_value **other, mm_err *err);
/* A call that must be made: of any tool, or of the one with this name. `others`: words that may stand for the name, for the message. */
MM_MUST_USE bool mm_tool_choose(mm_call *c, const mm_conversation *v, mm_tool_rules *r, bool required, const mm_value *name,
                                const char *others);
/* chat_template_kwargs: what the templates of the formats name, and the other fields that say whether the model reasons. */
MM_MUST_USE bool mm_template_kwargs(mm_call *c, mm_conversation *out);
/* The name of tool i, from its JSON; parsed in c's arena. */
mm_str mm_tool_name(mm_call *c, const mm_chat_tool *t);

#endif
