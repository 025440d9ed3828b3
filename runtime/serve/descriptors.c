/* Descriptors: what is open is counted, what opens later is known. */
#include "runtime/serve/descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>

#define DRIVER  500               /* what drivers of several devices open */
#define PLENTY  512               /* that are not for connections, where the limit allows it */
#define COUNTED ((rlim_t)1 << 16) /* open descriptors are looked for below this one */

static uint64_t open_below(rlim_t limit) {
  uint64_t n = 0;
  for (rlim_t fd = 0; fd < mm_min(limit, COUNTED); fd++) n += fcntl((int)fd, F_GETFD) >= 0;
  return n;
}

bool mm_descriptors_share(const mm_log *log, const mm_descriptors_use *use, uint32_t *connections, mm_err *err) {
  struct rlimit l;
  const uint64_t wanted = *connections;
  if (getrlimit(RLIMIT_NOFILE, &l) != 0) return true;
  if (l.rlim_cur < wanted + PLENTY) {
    const struct rlimit more = {.rlim_cur = mm_min(l.rlim_max, wanted + PLENTY), .rlim_max = l.rlim_max};
    if (more.rlim_cur > l.rlim_cur && setrlimit(RLIMIT_NOFILE, &more) == 0) l = more;
  }
  const uint64_t open = open_below(l.rlim_cur), own = open - mm_min(use->served, open) + use->later + MM_DESCRIPTORS_PASSING;
  uint64_t left = l.rlim_cur - mm_min(own, l.rlim_cur);
  if (use->driver) left -= mm_min(DRIVER, left / 2);
  if (!left)
    return mm_fail(err, MM_IO, "E_IO", mm_at(NULL, NULL),
                   "the limit of %llu descriptors (ulimit -n) allows no connection, expected more than %llu",
                   (unsigned long long)l.rlim_cur, (unsigned long long)own);
  if (left >= wanted) return true;
  *connections = (uint32_t)left;
  mm_log_say(log, "--max-connections lowered from %llu: the limit of %llu descriptors allows %llu", (unsigned long long)wanted,
             (unsigned long long)l.rlim_cur, (unsigned long long)left);
  return true;
}
