/* Weights that stay on a device while processes that compute with them come and go. A holder (minimax-hold) listens on a Unix socket; a
 * process of the same user asks there for a key and receives the location of the memory. The backend fills the key (mm_ops.weights.hold):
 * another build, checkpoint, cut, rank, device or layout is another key, and the error names the parts that differ.
 *
 * On the socket: the reader sends mm_hold_request, the holder answers with mm_hold_answer, and the reader keeps the connection as long as
 * it uses the memory. Both are of one machine, so numbers are as the machine has them. */
#ifndef MM_RUNTIME_HOLD_H
#define MM_RUNTIME_HOLD_H

#include "formats/hash.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_HOLD_HANDLE 64
#define MM_HOLD_USERS  64 /* at a time */

/* Which weights: compared byte by byte, so that all bytes are set. */
typedef struct mm_hold_key {
  char build[96];       /* mm_version: another commit may lay codes out otherwise */
  mm_digest checkpoint; /* mm_shards_digest */
  uint32_t tp, attn_tp; /* the cut */
  uint32_t rank;        /* of all stages */
  char device[44];      /* a name of this one accelerator */
  mm_digest layout;     /* of the weights in its memory */
} mm_hold_key;

/* Memory of a rank's weights. */
typedef struct mm_held {
  mm_hold_key key;
  uint8_t handle[MM_HOLD_HANDLE]; /* the device's word for it, for other processes */
  uint64_t bytes;
} mm_held;

/* ---- the holder ---- */

typedef struct mm_hold mm_hold;
/* Listens at the path, for this user alone. A socket there that nobody listens on is replaced; MM_USAGE E_HELD where somebody does, or
 * where the path is something else, or too long. held[count] stays where it is until close. */
mm_hold *mm_hold_open(const char *path, const mm_held *held, uint32_t count, mm_err *err);
/* Answers until `stop` (a signalfd) has a signal; from then on nobody new is answered, and it returns when the last user has gone, or at a
 * second signal. SIGHUP and SIGXCPU are never the second one; after SIGXCPU it fails with MM_LIMIT E_CPU_TIME. `report` gets a line for
 * each process that attaches and leaves. */
MM_MUST_USE bool mm_hold_serve(mm_hold *h, int stop, void (*report)(const char *line), mm_err *err);
void mm_hold_close(mm_hold *h); /* accepts NULL; removes the socket */

/* ---- the reader ---- */

/* Asks for held->key: fills the rest. The memory may be used as long as *connection, which is the caller's to close, is open. MM_IO where
 * nobody answers in 5 s, E_HELD where the holder is another user's; MM_UNSUPPORTED E_HELD where it has no such key, with the parts in which
 * the nearest one differs. */
MM_MUST_USE bool mm_hold_find(const char *path, mm_held *held, int *connection, mm_err *err);
/* Checks without waiting that the holder at `path` still runs: MM_IO E_HELD once it has ended. */
MM_MUST_USE bool mm_hold_is_alive(const char *path, int connection, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
