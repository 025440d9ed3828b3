/* State shared by all requests: the model, its defaults, counters. */
#ifndef MM_RUNTIME_SERVE_SERVER_H
#define MM_RUNTIME_SERVE_SERVER_H

#include <pthread.h>

#include "loader/stream/read_log.h"
#include "runtime/chat/chat_format.h"
#include "runtime/chat/replay.h"
#include "runtime/constrain/constrain.h"
#include "runtime/serve/generation.h"
#include "runtime/serve/log.h"
#include "runtime/serve/metrics.h"
#include "runtime/serve/origin.h"
#include "runtime/serve/workers.h"

typedef enum mm_server_state { MM_SERVER_LOADING, MM_SERVER_READY, MM_SERVER_DRAINING } mm_server_state;

/* --compat, in this order: the server whose forms replies take where servers differ. */
typedef enum mm_compat { MM_COMPAT_OPENAI, MM_COMPAT_VLLM, MM_COMPAT_LLAMA } mm_compat;

typedef struct mm_server mm_server;
struct mm_server {
  /* Set before the loop runs. */
  mm_http *http;
  mm_outbox *outbox;
  mm_workers *workers;
  const char *const *name; /* [names] the model's; the first is in replies */
  size_t names;
  const char *const *key; /* [keys] of which a request must carry one; none: all may */
  size_t keys;
  bool local;           /* it listens for its own machine, and takes requests without a key: they must name that machine */
  mm_origins origins;   /* further names of this machine, and pages of other hosts that may read replies */
  double request_time;  /* seconds that a request may take in all; 0: any */
  mm_form_cache *forms; /* compiled for requests */
  mm_read_log *reads;   /* what a device reads to load; on the CPU, which maps files, nothing */
  double started;       /* CLOCK_MONOTONIC */
  int64_t created;      /* Unix seconds */
  /* Set when loading is done, in the loop; read there alone. */
  mm_server_state state;
  const char *stage; /* what is being loaded; any thread may set it */
  mm_scheduler *scheduler;
  mm_engine *engine;
  const mm_tokenizer *tokenizer;
  uint32_t vocab, positions; /* positions: of prompt and reply together */
  const int32_t *end;        /* [end_count] ids that end a reply */
  uint32_t end_count;
  mm_sampling defaults;
  const mm_chat_format *format; /* NULL: no chat, */
  const char *no_format;        /* for this reason */
  mm_lexicon *lexicon;          /* made when it is first needed */
  pthread_mutex_t making;       /* of the lexicon, for as long as that takes: never in the loop */
  pthread_mutex_t shared;       /* of replay */
  mm_replay *replay;            /* what was sampled for messages with calls */
  mm_metrics metrics;
  mm_metric_names metric_names;
  mm_compat compat;
  bool any_name;   /* requests may name any model */
  bool trust_user; /* text of users may spell control tokens */
  mm_log log;
  uint32_t calls; /* being answered */
};

#endif
