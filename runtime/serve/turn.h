/* One turn of an assistant: a conversation becomes a prompt, tokens become reasoning, content and tool calls. All chat APIs use it. */
#ifndef MM_RUNTIME_SERVE_TURN_H
#define MM_RUNTIME_SERVE_TURN_H

#include "runtime/chat/arguments.h"
#include "runtime/chat/reply.h"
#include "runtime/constrain/constrain.h"
#include "runtime/serve/openai_messages.h"

typedef struct mm_turn_call {
  char id[40]; /* the API's prefix and 24 random digits */
  mm_text name, arguments;
  bool ended;
} mm_turn_call;

/* One item of a reply, in the order of the reply: a span of reasoning or content, or a call. */
typedef struct mm_turn_item {
  mm_reply_kind kind; /* MM_REPLY_REASONING, _CONTENT or _CALL */
  size_t from, n;     /* bytes of the turn's text of this kind */
  uint32_t call;      /* its number */
} mm_turn_item;

typedef struct mm_turn mm_turn;
/* The events of a reply as they come, after they were added to the turn. */
typedef void mm_turn_event(mm_turn *t, const mm_reply_event *e);

/* The reply of one choice: mm_choice.state. */
struct mm_turn {
  mm_choice *choice;
  mm_reply *reply;
  mm_constraint *constraint; /* or NULL */
  mm_reply_watch *watch;     /* or NULL */
  mm_turn_event *event;
  mm_text reasoning, content;
  mm_turn_call *call; /* [calls] */
  size_t calls, cap;
  mm_turn_item *item; /* [items] */
  size_t items, items_cap;
  int32_t *sampled; /* [samples] its tokens */
  size_t samples, samples_cap;
  mm_opening opening;        /* of its prompt */
  bool one_call;             /* ends after the first */
  bool failed;               /* want of memory, or no random numbers */
  bool cut;                  /* at the end: a limit, a stop string or an id that the request named ended it, not the model */
  size_t wrong;              /* at the end: as many calls as there were, where the last had gone wrong by then; otherwise 0 */
  uint32_t reasoning_tokens; /* at the end */
  uint32_t block;            /* the API's */
  bool open;
  size_t sent; /* items that the API has begun to send */
  mm_reply_kind kind;
};

/* What holds the content of a reply: nothing, a form, or one of some texts. */
typedef struct mm_content_rule {
  const mm_form *form;  /* or NULL */
  const mm_str *choice; /* [choices] the content is one of these; of a single one, markers are tokens, and it is read as a reply */
  size_t choices;
  bool as_written;   /* white space of the content counts: it is none of JSON */
  const char *field; /* of the request, that says so */
} mm_content_rule;

typedef struct mm_turn_settings {
  const char *call_prefix; /* of ids of calls */
  mm_turn_event *event;    /* or NULL */
  bool append_think;
  bool no_reasoning; /* the reasoning is generated, and left out of the reply */
  mm_content_rule content;
} mm_turn_settings;

/* The constraint of a reply: a form, one of some texts, or calls of tools. */
typedef struct mm_turn_sections {
  mm_section section[MM_SECTIONS];
  uint32_t count; /* 0: to nothing */
} mm_turn_sections;

/* For a conversation whose reply begins in the reasoning or not. The server's lexicon is there where there are sections. */
MM_MUST_USE bool mm_turn_constrain(mm_call *c, const mm_conversation *v, const mm_tool_rules *r, const mm_turn_settings *set,
                                   bool in_reasoning, mm_turn_sections *out, mm_err *err);

/* Waits for nothing but the first caller: the server's lexicon is there after it. */
MM_MUST_USE bool mm_lexicon_ready(mm_server *s, mm_err *err);
/* A constraint wins over a bias: an allowed id with a forbidding bias ranks after all other allowed ids. */
void mm_soften_bias(mm_call *c);
/* Adds the section of one of these texts. */
MM_MUST_USE bool mm_turn_add_texts(mm_call *c, mm_turn_sections *a, const mm_str *text, size_t count, mm_err *err);

/* rule->form from `{"type": …}`, which may be NULL. A schema stands as `"schema": …` or, as in OpenAI's chat, as
 * `"json_schema": {"schema": …}`. */
MM_MUST_USE bool mm_turn_format(mm_call *c, const char *param, const mm_value *format, mm_content_rule *rule, mm_err *err);
/* The same from `format` within an object of the body. */
MM_MUST_USE bool mm_turn_format_of(mm_call *c, const char *param, mm_content_rule *rule, mm_err *err);
/* The tokens of a conversation's prompt. */
MM_MUST_USE bool mm_turn_encode(mm_call *c, mm_conversation *v, mm_prompt_tokens *out, bool *in_reasoning, mm_err *err);
/* Renders, and makes a turn for each choice; for mm_api.begin. */
MM_MUST_USE bool mm_turn_prepare(mm_call *c, mm_conversation *v, const mm_tool_rules *r, const mm_turn_settings *set, mm_err *err);
/* Starts the choices; for mm_api.start. */
MM_MUST_USE bool mm_turn_start(mm_call *c, mm_err *err);
/* mm_api.token and mm_api.ended of turns, to be called by the API's own. */
void mm_turn_token(mm_choice *ch, const mm_token *t);
void mm_turn_ended(mm_choice *ch);
/* After mm_turn_ended: whether a reply shows a call. One that went wrong is no call, one that was cut off is the beginning of one. */
bool mm_turn_shows(const mm_turn *t, uint32_t call);
/* After mm_turn_ended: whether the reply ended so that its calls are made: one is whole, and the last was not cut off. */
bool mm_turn_calls(const mm_turn *t);

#endif
