/* Prefill and decode in different servers: one computes prompts and sends their pages and lightning states to the other over TCP. Both run
 * the same checkpoint, and both have a pool of host memory (offload_bytes), in which pages lie while they are sent and received. */
#ifndef MM_RUNTIME_TRANSFER_H
#define MM_RUNTIME_TRANSFER_H

#include "formats/hash.h"

/* Descriptors that the connections of one side, and making them, take at most. */
enum { MM_TRANSFER_DESCRIPTORS = 17 };

typedef struct mm_transfer_config {
  const char *listen; /* HOST:PORT where this scheduler computes prompts for others, or NULL; port 0: a free one */
  const char *from;   /* HOST:PORT of the server that computes prompts for this one, or NULL. Not with listen */
  uint32_t least;     /* with from: tokens of a prompt that are in no cache here; fewer are computed here */
  double timeout;     /* seconds without a byte of the other side after which a connection is given up */
  /* What both sides must have in common, besides what the engine says. */
  mm_digest checkpoint; /* of the manifest's text */
  char device[9], cache[9], index[9], inputs[9];
  bool act_quant;
} mm_transfer_config;

typedef struct mm_transfer_stats {
  uint64_t fetched, fallbacks, running; /* prompts that came from the other side, that were computed here in place of that, under way */
  uint64_t pages_in, bytes_in;
  double wait_seconds;             /* from the request for a prompt to its end, added up */
  uint64_t sent, dropped, sending; /* prompts sent whole, given up, under way */
  uint64_t pages_out, bytes_out;
} mm_transfer_stats;

#endif
