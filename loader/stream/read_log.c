/* The statistics of all readers, gathered in one place, and their wording (read_log.h). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loader/stream/read_log.h"

typedef struct logged {
  char *path;
  mm_read_stats stats;
} logged;

#define NOTES 24

struct mm_read_log {
  pthread_mutex_t lock;
  double made;
  struct {
    const char *what;
    double seconds;
  } note[NOTES];
  size_t notes;
  mm_read_stats sum;
  double opened, closed; /* first and last; closed 0: none yet */
  unsigned open;         /* readers */
  mm_err failed;
  logged *file;
  size_t files, cap;
};

mm_read_log *mm_read_log_open(mm_err *err) {
  mm_read_log *log = mm_calloc(1, sizeof *log, err);
  if (!log) return NULL;
  pthread_mutex_init(&log->lock, NULL);
  log->made = mm_now();
  return log;
}

void mm_read_log_close(mm_read_log *log) {
  if (!log) return;
  for (size_t i = 0; i < log->files; i++) free(log->file[i].path);
  free(log->file);
  pthread_mutex_destroy(&log->lock);
  free(log);
}

void mm_read_log_fail(mm_read_log *log, const mm_err *err) {
  if (!log) return;
  pthread_mutex_lock(&log->lock);
  if (log->failed.status == MM_OK) log->failed = *err;
  pthread_mutex_unlock(&log->lock);
}

bool mm_read_log_failed(mm_read_log *log, mm_err *err) {
  pthread_mutex_lock(&log->lock);
  const bool failed = log->failed.status != MM_OK;
  if (failed) *err = log->failed;
  pthread_mutex_unlock(&log->lock);
  return failed;
}

void mm_read_log_begin(mm_read_log *log, uint64_t wanted, double now) {
  if (!log) return;
  pthread_mutex_lock(&log->lock);
  if (log->opened == 0) log->opened = now;
  log->open++;
  log->sum.wanted += wanted;
  pthread_mutex_unlock(&log->lock);
  mm_read_log_note(log, "reading from", now - log->made);
}

void mm_read_log_add(mm_read_log *log, mm_read_path path, uint64_t read, uint64_t hashed) {
  if (!log) return;
  pthread_mutex_lock(&log->lock);
  log->sum.bytes[path] += read;
  log->sum.hashed += hashed;
  pthread_mutex_unlock(&log->lock);
}

void mm_read_log_keep(mm_read_log *log, const char *path, const mm_read_stats *s) {
  if (!log) return;
  pthread_mutex_lock(&log->lock);
  char *copy = NULL;
  /* A file that there is no memory for is not listed; what was read is in the sum. */
  if (MM_GROW(log->file, &log->cap, log->files + 1, MM_IGNORED) && (copy = strdup(path))) log->file[log->files++] = (logged){copy, *s};
  pthread_mutex_unlock(&log->lock);
}

void mm_read_log_note(mm_read_log *log, const char *what, double seconds) {
  if (!log) return;
  pthread_mutex_lock(&log->lock);
  size_t i = 0;
  while (i < log->notes && strcmp(log->note[i].what, what) != 0) i++;
  if (i == log->notes && i < NOTES) log->note[i].what = what, log->note[i].seconds = seconds, log->notes++;
  pthread_mutex_unlock(&log->lock);
}

void mm_read_log_mark(mm_read_log *log, const char *what) {
  if (log) mm_read_log_note(log, what, mm_now() - log->made);
}

void mm_read_log_end(mm_read_log *log, double now) {
  if (!log) return;
  pthread_mutex_lock(&log->lock);
  log->open--;
  log->closed = now;
  pthread_mutex_unlock(&log->lock);
}

mm_read_stats mm_read_log_stats(mm_read_log *log) {
  pthread_mutex_lock(&log->lock);
  mm_read_stats s = log->sum;
  if (log->opened > 0) s.seconds = (log->open ? mm_now() : log->closed) - log->opened;
  pthread_mutex_unlock(&log->lock);
  return s;
}

bool mm_read_log_file(mm_read_log *log, size_t i, const char **path, mm_read_stats *s) {
  pthread_mutex_lock(&log->lock);
  const bool there = i < log->files;
  if (there) *path = log->file[i].path, *s = log->file[i].stats;
  pthread_mutex_unlock(&log->lock);
  return there;
}

char *mm_read_log_times(mm_read_log *log, char *out, size_t cap) {
  size_t at = 0;
  out[0] = 0;
  pthread_mutex_lock(&log->lock);
  for (size_t i = 0; i < log->notes && at < cap; i++)
    at += (size_t)snprintf(out + at, cap - at, "%s%s %.3f", i ? ", " : "", log->note[i].what, log->note[i].seconds);
  pthread_mutex_unlock(&log->lock);
  return out;
}

const char *mm_read_path_name(mm_read_path p) {
  static const char *const name[] = {"unknown", "page cache", "O_DIRECT", "streams", "memory"};
  return name[p];
}

uint64_t mm_read_bytes(const mm_read_stats *s) {
  uint64_t sum = 0;
  for (int i = 0; i < MM_READ_PATHS; i++) sum += s->bytes[i];
  return sum;
}

/* The paths, with their shares where there are several. */
static size_t put_paths(char *out, size_t cap, size_t at, const mm_read_stats *s) {
  const double sum = (double)mm_read_bytes(s);
  unsigned paths = 0;
  for (int i = 0; i < MM_READ_PATHS; i++) paths += s->bytes[i] > 0;
  for (int i = 0; i < MM_READ_PATHS; i++) {
    if (s->bytes[i] == 0 || at >= cap) continue;
    at += (size_t)snprintf(out + at, cap - at, ", %s", mm_read_path_name((mm_read_path)i));
    if (paths > 1 && at < cap) at += (size_t)snprintf(out + at, cap - at, " %.0f %%", 100 * (double)s->bytes[i] / sum);
  }
  return at;
}

char *mm_read_text(char *out, size_t cap, const mm_read_stats *s) {
  const uint64_t sum = mm_read_bytes(s);
  out[0] = 0;
  if (sum == 0) return out;
  const double gb = (double)sum * 1e-9;
  size_t at = (size_t)snprintf(out, cap, "%.*f GB", gb < 1 ? 3 : 1, gb);
  if (s->seconds > 0 && at < cap) at += (size_t)snprintf(out + at, cap - at, " in %.2f s, %.1f GB/s", s->seconds, gb / s->seconds);
  if (at < cap) at = put_paths(out, cap, at, s);
  if (s->hashed && at < cap) snprintf(out + at, cap - at, ", %s", s->hashed == sum ? "digests checked" : "some digests checked");
  return out;
}
