/* A conversation as a request gives it, whatever the API was: what a chat format renders into a prompt.
 *
 * All memory is the caller's and stays as it is until the prompt is rendered. Text is any UTF-8 and may hold NUL bytes. JSON is text as the
 * client wrote it: keys keep their order and numbers their digits. */
#ifndef MM_RUNTIME_CONVERSATION_H
#define MM_RUNTIME_CONVERSATION_H

#include <string.h>

#include "formats/system/base.h"

typedef struct mm_str {
  const char *p; /* n bytes, not terminated; NULL: absent */
  size_t n;
} mm_str;
static inline bool mm_str_equal(mm_str a, mm_str b) { return a.n == b.n && memcmp(a.p, b.p, a.n) == 0; }
static inline bool mm_is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

/* The author of a text. Text of a user never becomes a control token, even if it spells one. */
typedef enum mm_owner { MM_OWNER_USER, MM_OWNER_TRUSTED } mm_owner;

/* MM_ROLE_ROOT: M3's message above the system message; other formats refuse it. */
typedef enum mm_role { MM_ROLE_SYSTEM, MM_ROLE_USER, MM_ROLE_ASSISTANT, MM_ROLE_TOOL, MM_ROLE_ROOT } mm_role;

/* Whether the model reasons before it replies. */
typedef enum mm_thinking {
  MM_THINKING_UNSET,    /* the format's own way: M2 reasons, M3 is adaptive, M1 decides */
  MM_THINKING_ADAPTIVE, /* M3: the model decides */
  MM_THINKING_ENABLED,
  MM_THINKING_DISABLED
} mm_thinking;

/* Where a prompt ends that an assistant's message is sampled after. */
typedef enum mm_opening {
  MM_OPENING_NONE,      /* not where a message begins: within the last message, or behind it */
  MM_OPENING_REASONING, /* within the reasoning */
  MM_OPENING_CONTENT,   /* behind a reasoning that the request left empty */
  MM_OPENING_FREE       /* before either: the model decides */
} mm_opening;

/* A part of a message's content that is text; parts of other types are the API's to refuse. */
typedef struct mm_chat_part {
  mm_str text;
  mm_str name; /* in a tool's message: the tool whose result it is; may be absent */
  mm_owner owner;
} mm_chat_part;

typedef struct mm_chat_call {
  mm_str id;        /* may be absent */
  mm_str name;      /* not empty */
  mm_str arguments; /* a JSON object; empty: {} */
} mm_chat_call;

typedef struct mm_message {
  mm_role role;
  /* Content. A string is one part with `list` false, absent and null content are no parts. Formats may render a list otherwise than a
   * string: M2 has a <response> for each item of a tool's list. */
  const mm_chat_part *part; /* [part_count] */
  size_t part_count;
  bool list;
  /* Assistant messages only. Absent reasoning differs from empty: where it is absent, M2 looks for </think> in the content. */
  mm_str reasoning;
  const mm_chat_call *call; /* [call_count]; an empty list of calls is no list */
  size_t call_count;
  /* Assistant messages only: the tokens that were sampled for this message after a generation prompt with this opening, without the end
   * token. They are used instead of content, reasoning and calls where the format keeps the reasoning of this message; NULL: none. */
  const int32_t *sampled; /* [sampled_count] */
  size_t sampled_count;
  mm_opening opening;
  mm_str call_id; /* of tools: the call that this answers; may be absent */
  /* User messages only: it was a system message after the first, shown as a user's. It does not count as the last user message, after
   * which M2 keeps the reasoning. */
  bool as_user;
} mm_message;

/* A tool as JSON: {"type": "function", "function": {"name": …, "description": …, "parameters": {…}}} or the function's object alone.
 * M1 renders it as it is wrapped, M2 the function's object. */
typedef struct mm_chat_tool {
  mm_str json;
  bool strict; /* its calls are held to its schema */
} mm_chat_tool;

typedef struct mm_conversation {
  const mm_message *message; /* [message_count] ≥ 1 */
  size_t message_count;
  const mm_chat_tool *tool; /* [tool_count]; an empty list of tools is no list */
  size_t tool_count;
  /* Other inputs of the templates; absent unless given. */
  mm_str identity;                       /* model_identity: instead of M2's and M3's default system text */
  mm_str current_date, current_location; /* of the first system message, M2 */
  /* The prompt ends where the assistant's next message begins. Exactly one of the two may be set. */
  bool add_generation_prompt;
  bool continue_final;  /* the last message is the assistant's and goes on: nothing is rendered after its content */
  mm_thinking thinking; /* disabled: the generation prompt of M2 holds an empty reasoning, M1 refuses it */
} mm_conversation;

#endif
