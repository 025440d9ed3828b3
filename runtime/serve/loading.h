/* A checkpoint made ready to serve: shards, tokenizer, engine, scheduler. */
#ifndef MM_RUNTIME_SERVE_LOADING_H
#define MM_RUNTIME_SERVE_LOADING_H

#include "runtime/chat/chat_format.h"
#include "runtime/engine/attention_groups.h"
#include "runtime/schedule/scheduler.h"
#include "runtime/text/tokenizer.h"

typedef struct mm_loading_config {
  const char *dir, *device;
  mm_dummy dummy;          /* random weights, or none */
  const char *act_quant;   /* "on", "off", or NULL: on where the device can */
  mm_run_options options;  /* of which threads, act_quant and batch_invariant are decided by others of these */
  uint64_t positions;      /* of prompt and reply together; 0: as many as the model has */
  uint64_t slots, threads; /* threads 0: CPUs / ranks */
  uint64_t kv_tokens;      /* of all KV caches together; 0: as many as the device's memory holds */
  double memory_share;     /* of the device's memory, as in mm_engine_memory */
  const char *attach;      /* socket of minimax-hold, or NULL */
  const char *dp;          /* of --dp, or NULL: as the checkpoint was made */
  const char *devices;     /* numbers of the GPUs, or NULL: as in mm_devices_read */
  bool verify;             /* digests are checked */
  bool whole;              /* finish waits for all weights, where a device would serve while they arrive */
  mm_read_log *reads;      /* as in mm_engine_config; or NULL */
  const char *chat_format; /* a name, or NULL: that of the checkpoint's template */
  bool own_defaults;       /* generation_config.json is not read */
  bool fixed_drafts;       /* scheduler.drafts is what was asked for; else as many are proposed where the run can have them, with the
                            * checkpoint's draft or without, and it fails for none */
  mm_scheduler_config scheduler;
} mm_loading_config;

/* Zero-initialise. */
typedef struct mm_loaded {
  mm_shards shards;
  mm_dflash *draft; /* has_draft: the engine's */
  bool has_draft;
  mm_err no_draft;         /* why the checkpoint's is left out, where proposals were not asked for; else status MM_OK */
  bool proposals_left_out; /* nothing is proposed, as memory for it would leave too little */
  uint32_t proposals;      /* for one step of a request, at most */
  mm_tokenizer *tokenizer;
  mm_engine *engine;
  mm_scheduler *scheduler;
  bool *never;
  int32_t *end; /* [end_count] */
  uint32_t end_count, positions;
  mm_sampling defaults;
  const mm_chat_format *format; /* NULL: the checkpoint has no template that is known, no_format says so */
  mm_err no_format;
  char groups_line[MM_GROUPS_LINE]; /* of mm_groups_select */
  const char *_Atomic stage;        /* what is being done; any thread may read it */
} mm_loaded;

/* All that is checked before weights are touched. */
MM_MUST_USE bool mm_loading_check(mm_loaded *l, const mm_loading_config *c, mm_err *err);
/* The rest, after check. */
MM_MUST_USE bool mm_loading_finish(mm_loaded *l, const mm_loading_config *c, mm_err *err);
/* drain: requests that run end as they would. Accepts what is half loaded. */
void mm_loading_close(mm_loaded *l, bool drain);

#endif
