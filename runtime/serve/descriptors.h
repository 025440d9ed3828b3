/* How many connections the limit of descriptors of the process allows. */
#ifndef MM_RUNTIME_SERVE_DESCRIPTORS_H
#define MM_RUNTIME_SERVE_DESCRIPTORS_H

#include "runtime/serve/log.h"

typedef struct mm_descriptors_use {
  uint32_t later;  /* that the server itself may open, besides MM_DESCRIPTORS_PASSING */
  bool driver;     /* a device's driver is still to open its own: some hundreds, of a small limit half of what is left */
  uint32_t served; /* connections that are open */
} mm_descriptors_use;

/* For the length of a moment: files of the load, of /metrics, words to systemd. */
enum { MM_DESCRIPTORS_PASSING = 8 };

/* Raises the limit as far as *connections want it and the system allows it. Lowers *connections, with a line in the log, to those that
 * fit with what is open and is opened later. MM_IO E_IO where none does. */
MM_MUST_USE bool mm_descriptors_share(const mm_log *log, const mm_descriptors_use *use, uint32_t *connections, mm_err *err);

#endif
