/* Writes events as lines of JSON (events.h, minimax-convert --events). The first failed write is reported by mm_events_close. */
#include "convert/report/events.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct mm_events {
  int fd;
  const char *path;
  mm_err failed;
};

mm_events *mm_events_open(const mm_output_place *place, mm_err *err) {
  mm_events *e = mm_calloc(1, sizeof *e, err);
  if (!e) return NULL;
  e->path = place->path;
  if (mm_output_append(&e->fd, place, err)) return e;
  free(e);
  return NULL;
}

static void put_line(mm_events *e, char *line) {
  size_t n = strlen(line), at = 0;
  line[n++] = '\n'; /* instead of the NUL */
  while (at < n) {
    ssize_t some = write(e->fd, line + at, n - at);
    if (some < 0 && errno == EINTR) continue;
    if (some < 0) {
      mm_fail_errno(&e->failed, mm_at(e->path, NULL), "write", errno);
      return;
    }
    at += (size_t)some;
  }
}

void mm_events_put(mm_events *e, const char *event, mm_json *fields) {
  struct timespec t;
  if (e) {
    clock_gettime(CLOCK_REALTIME, &t);
    MM_JSON_PUT(fields, {"event", mm_json_new_str(event)}, {"time", mm_json_new_real((double)t.tv_sec + 1e-9 * (double)t.tv_nsec)});
    char *line = mm_json_dump(fields, false);
    if (line)
      put_line(e, line);
    else
      mm_fail_memory(&e->failed, 0);
    free(line);
  }
  mm_json_free(fields);
}

bool mm_events_close(mm_events *e, mm_err *err) {
  if (!e) return true;
  if (close(e->fd) != 0) mm_fail_errno(&e->failed, mm_at(e->path, NULL), "close", errno);
  bool ok = e->failed.status == MM_OK || mm_fail_as(err, &e->failed);
  free(e);
  return ok;
}
