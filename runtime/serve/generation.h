/* One reply on its way: the scheduler's thread gives tokens, the loop's thread takes them. Between the two stand the stop strings, which
 * end the reply in the step that completes one, wherever the borders of tokens lie. */
#ifndef MM_RUNTIME_SERVE_GENERATION_H
#define MM_RUNTIME_SERVE_GENERATION_H

#include "runtime/chat/reply_watch.h"
#include "runtime/schedule/scheduler.h"
#include "runtime/serve/http.h"
#include "runtime/text/tokenizer.h"

#define MM_STOPS    16  /* stop strings of one request */
#define MM_STOP_MAX 256 /* bytes of one */

typedef struct mm_generation mm_generation;

/* Queue from the scheduler's thread to the loop, shared by all generations. */
typedef struct mm_outbox mm_outbox;
mm_outbox *mm_outbox_open(mm_http *http, mm_err *err);
void mm_outbox_close(mm_outbox *o); /* accepts NULL; no generation is left */

/* One token. Where a stop string begins inside, `bytes` ends before it and the id is -1; logprobs[0] has the token's own. */
typedef struct mm_token {
  int32_t id;
  const char *bytes; /* the tokenizer's; none of a token that ends the reply and of special ones, unless they were asked for */
  size_t n;
  bool special, end;          /* end: it ends the reply */
  const mm_logprob *logprobs; /* [1 + top_logprobs], NULL unless asked for */
  uint32_t top;
  uint32_t cached; /* tokens of the prompt that the prefix cache had */
  double began;    /* when the request had its first slot */
  bool last;       /* the reply ends with it, at its limit, a stop string or an id that ends replies; done follows at once */
} mm_token;

typedef struct mm_ending {
  mm_finish reason;
  int stop;       /* number of the stop string that ended it, -1: none did */
  int32_t end_id; /* the token that ended it, -1: none did */
  bool enough;    /* its one call ended it */
  mm_progress progress;
  const mm_err *err; /* of MM_FINISH_ERROR */
} mm_ending;

typedef struct mm_stop {
  const char *text;
  size_t n;
} mm_stop;

typedef struct mm_generation_settings {
  mm_request request;  /* but for user, allow, token and done; its `stop` are ids without text, and stay until done */
  const mm_stop *stop; /* [stop_count], copied */
  uint32_t stop_count;
  bool keep_stop;                               /* a stop string is part of the text, and so is a token that ends the reply */
  bool special;                                 /* special tokens have their text */
  void *constraint;                             /* or NULL; the next two are in the scheduler's thread */
  const uint32_t *(*allow)(void *constraint);   /* mm_request.allow */
  bool (*chosen)(void *constraint, int32_t id); /* after each choice; false: nothing may follow, and no token says so */
  mm_reply_watch *watch; /* or NULL: stop strings count everywhere. In the scheduler's thread too, stays until done */
  void *user;
  /* In the loop: each token of the prompt but the first, before those of the reply. NULL: not wanted. */
  void (*scored)(void *user, const mm_token *t);
  void (*prefill)(void *user, uint32_t tokens, uint32_t cached); /* in the loop: mm_request.prefill. NULL: not wanted */
  void (*token)(void *user, const mm_token *t);                  /* in the loop */
  void (*done)(void *user, const mm_ending *end);                /* in the loop; the last, the generation is freed after it */
} mm_generation_settings;

/* NULL: the scheduler's refusal, or want of memory; neither callback comes then. */
mm_generation *mm_generation_start(mm_scheduler *s, mm_outbox *o, const mm_tokenizer *t, const mm_generation_settings *set, mm_err *err);
/* In the loop, before done; done follows. */
void mm_generation_cancel(mm_generation *g);

#endif
