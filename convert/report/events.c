/* Writes events as lines of JSON (events.h, minimax-convert --events). The first failed write is reported by mm_events_close. */
#include "convert/report/events.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define READ_MS 5000 /* in which the reader of a full pipe takes some of it */

struct mm_events {
  int fd;
  const char *path;
  bool cut; /* the file ends within a line, of a killed run or a failed write: the next begins with a line feed */
  mm_err failed;
};

static bool ends_within_line(const mm_events *e) {
  struct stat st;
  char last = '\n';
  if (fstat(e->fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size == 0) return false;
  const int fd = open(e->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return false;
  if (pread(fd, &last, 1, st.st_size - 1) != 1) last = '\n';
  close(fd);
  return last != '\n';
}

mm_events *mm_events_open(const mm_output_place *place, mm_err *err) {
  mm_events *e = mm_calloc(1, sizeof *e, err);
  if (!e) return NULL;
  e->path = place->path;
  if (mm_output_append(&e->fd, place, err)) {
    const int flags = fcntl(e->fd, F_GETFL); /* no run stands still for its reader */
    if (flags >= 0) fcntl(e->fd, F_SETFL, flags | O_NONBLOCK);
    e->cut = ends_within_line(e);
    return e;
  }
  free(e);
  return NULL;
}

/* The pipe is full: false where it still is after a while, which is noted, or was before. */
static bool wait_for_reader(mm_events *e) {
  struct pollfd p = {.fd = e->fd, .events = POLLOUT};
  const double until = mm_now() + READ_MS * 1e-3;
  int ready = 0;
  if (e->failed.status != MM_OK) return false;
  while (ready <= 0 && mm_now() < until) ready = poll(&p, 1, READ_MS / 10);
  return ready > 0 || mm_fail(&e->failed, MM_IO, "E_IO", mm_at(e->path, NULL), "write: nobody has read the pipe for %d s", READ_MS / 1000);
}

/* Returns how many of the bytes were written; fewer than n: the first failure is noted. waits: for room, where none of them has any. */
static size_t put_bytes(mm_events *e, const char *bytes, size_t n, bool waits) {
  size_t at = 0;
  while (at < n) {
    ssize_t some = write(e->fd, bytes + at, n - at);
    if (some < 0 && errno == EINTR) continue;
    if (some < 0 && errno == EAGAIN && !waits && !at) break;
    if (some < 0 && errno == EAGAIN) {
      if (!wait_for_reader(e)) break;
      continue;
    }
    if (some < 0) {
      mm_fail_errno(&e->failed, mm_at(e->path, NULL), "write", errno);
      break;
    }
    at += (size_t)some;
  }
  return at;
}

static void put_line(mm_events *e, char *line, bool waits) {
  size_t n = strlen(line);
  line[n++] = '\n'; /* instead of the NUL */
  if (e->cut && put_bytes(e, "\n", 1, waits) < 1) return;
  const size_t written = put_bytes(e, line, n, waits);
  e->cut = written > 0 && written < n;
}

void mm_events_put(mm_events *e, const char *event, mm_json *fields) {
  struct timespec t;
  if (e) {
    clock_gettime(CLOCK_REALTIME, &t);
    MM_JSON_PUT(fields, {"event", mm_json_new_str(event)}, {"time", mm_json_new_real((double)t.tv_sec + 1e-9 * (double)t.tv_nsec)});
    char *line = mm_json_dump(fields, false);
    if (line)
      put_line(e, line, strcmp(event, "progress") != 0); /* the next one says more than this */
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
