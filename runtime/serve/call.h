/* One request of an API: its body, its choices, its reply. All in the loop's thread. */
#ifndef MM_RUNTIME_SERVE_CALL_H
#define MM_RUNTIME_SERVE_CALL_H

#include <stdatomic.h>

#include "formats/body.h"
#include "runtime/serve/params.h"
#include "runtime/serve/server.h"
#include "runtime/text/utf8.h"

typedef struct mm_call mm_call;
typedef struct mm_choice mm_choice;

typedef struct mm_api {
  /* Takes the body's fields and makes prompts of them; in the loop or, of a long body, in another thread. False: mm_refuse or err says
   * why. */
  bool (*begin)(mm_call *c, mm_err *err);
  bool (*start)(mm_call *c, mm_err *err); /* in the loop: starts choices, or answers */
  void (*token)(mm_choice *ch, const mm_token *t);
  void (*prefill)(mm_choice *ch); /* of a stream: a step read tokens of its prompt. NULL: such progress is not served */
  void (*ended)(mm_choice *ch);   /* ch->ending is set */
  /* Every choice has ended: the end of the stream, or the whole reply into c->out, in any thread. */
  void (*finish)(mm_call *c);
  void (*failed)(mm_call *c, const char *text); /* sends the event of a stream that a choice's failure ends; NULL: an error's own */
  bool bodiless;                                /* begin comes whatever the body is */
  bool keyless;                                 /* and without an API key */
  bool anthropic;                               /* whose errors these are; otherwise OpenAI's */
  const char *path;
  const char *prompt; /* the field that its prompts are of */
} mm_api;
/* The functions of an API whose replies are generated, under the names that its file gives them. */
#define MM_API_REPLIES .begin = begin, .start = start, .token = token, .ended = ended, .finish = finish

struct mm_choice {
  mm_call *call;
  uint32_t index;
  mm_generation *generation; /* NULL once it ended */
  mm_ending ending;
  mm_utf8_stream utf8;
  mm_text text, logprobs;
  double prefill_began;    /* when the prompt's progress was first reported; 0: it was not */
  double prefill_seconds;  /* from then to the last report */
  uint32_t prefilled;      /* tokens of the prompt that are computed, as reported */
  bool prefilling;         /* the piece under way reports them */
  double began;            /* when it had its slot; 0: no token came */
  double first, last;      /* when its first token came, and its last one; 0: none did */
  uint32_t tokens, cached; /* cached: of the prompt, in the prefix cache */
  uint32_t most;           /* tokens that its reply may have */
  bool closing;            /* vLLM's form: its last token is here, and what it says goes out with the finish reason */
  void *state;             /* the API's */
};

struct mm_call {
  mm_server *server;
  mm_exchange *x;
  const mm_api *api;
  mm_arena arena;      /* lives as long as the call */
  mm_held_forms forms; /* likewise */
  const mm_value *body;
  char id[25];                          /* random, hexadecimal */
  char method[24], path[200], peer[64]; /* for the log, cut where they are longer */
  char trace[56];   /* for the log: the request's traceparent (W3C Trace Context, section 3.2), "" without a valid one */
  const char *load; /* the form in which the reply's header reports the load, "TEXT" or "JSON"; NULL: it has no such header */
  double begun;
  int64_t created; /* Unix seconds */
  mm_params params;
  int32_t **prompt; /* [prompts] token ids, free() each */
  uint32_t *prompt_count, prompts;
  uint32_t boundary[2], boundaries; /* [boundaries] places of the prompt where a later one is likely to part, rising */
  mm_choice *choice;                /* [choices], those of a prompt side by side */
  uint32_t choices, open;
  mm_job job;
  atomic_bool left; /* the client has */
  bool begun_well;  /* begin's answer, and why */
  mm_err err;
  bool streaming; /* the reply has begun */
  int status;     /* of the reply */
  mm_text out;    /* scratch of the API for what it sends */
  mm_text echo;   /* fields of the request that the API's replies repeat */
  void *state;    /* the API's */
  void (*close_state)(void *state);
  /* The first refusal; 0: none. */
  int refused;
  char param[64], reason[600];
  const char *blamed; /* the field that begin is at: the param of an error that is the request's; NULL: none */
  size_t too_long;    /* tokens of the prompt that has no room; 0: each has */
  const char *code;   /* OpenAI's for it, set before; NULL: the one of its status */
};

/* Refuses the request with a status of HTTP; param is the field, or NULL. The first counts. Returns false. */
bool mm_refuse(mm_call *c, int status, const char *param, const char *fmt, ...) MM_PRINTF(4, 5);

void mm_call_begin(mm_server *s, mm_exchange *x, const mm_api *api);
/* Starts params.n choices for each prompt. Settings that are not of params alone may be changed by `shape`, if not NULL. */
MM_MUST_USE bool mm_call_start(mm_call *c, void (*shape)(mm_choice *ch, mm_generation_settings *set), mm_err *err);
/* Ids of text, added to c's prompts. */
MM_MUST_USE bool mm_call_add_prompt(mm_call *c, int32_t *ids, size_t count, mm_err *err);
/* A JSON reply with status 200 from c->out; ends the call's exchange. */
void mm_call_reply(mm_call *c);
/* mm_call_reply as an API's start, where begin has made the whole reply. */
bool mm_call_answer(mm_call *c, mm_err *err);
/* Begins a stream of events. */
void mm_call_stream(mm_call *c);
/* Sends c->out as the data of an event, which has a name where `event` is not NULL; empties c->out. */
void mm_call_event(mm_call *c, const char *event);
/* The reply's whole usage. */
mm_progress mm_call_usage(const mm_call *c);
/* For requests with `speculative`: `,"num_draft_tokens":…,"num_accepted_tokens":…` of a usage. */
void mm_call_put_drafts(const mm_call *c, const mm_progress *usage, mm_text *out);
/* The first choice that failed; NULL: none did. */
const mm_choice *mm_call_failed(const mm_call *c);
/* The error of the API's form as an object, into out: for streams. */
void mm_call_error(const mm_call *c, int status, const char *param, const char *text, mm_text *out);
/* Why a choice failed, and with which status. */
const char *mm_choice_failure(const mm_choice *ch, int *status);

#endif
