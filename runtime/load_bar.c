/* The bar of a load (load_bar.h): a thread that looks at the log now and then. */
#include "runtime/load_bar.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CELLS 30

struct mm_load_bar {
  mm_read_log *log;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  bool stop;
};

char *mm_load_bar_text(char *out, size_t cap, const mm_read_stats *s) {
  const uint64_t read = mm_read_bytes(s);
  const double share = s->wanted ? (double)mm_min(read, s->wanted) / (double)s->wanted : 0;
  char bar[CELLS + 1];
  memset(bar, '-', CELLS);
  memset(bar, '#', (size_t)(CELLS * share));
  bar[CELLS] = 0;
  snprintf(out, cap, "[%s] %.1f of %.1f GB, %.0f %%, %.1f GB/s", bar, (double)read * 1e-9, (double)s->wanted * 1e-9, 100 * share,
           s->seconds > 0 ? (double)read * 1e-9 / s->seconds : 0);
  return out;
}

/* Waits a while; false when it is over. */
static bool sleep_on(mm_load_bar *b, int64_t ms) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += ms * 1000000;
  until.tv_sec += until.tv_nsec / 1000000000, until.tv_nsec %= 1000000000;
  pthread_mutex_lock(&b->lock);
  if (!b->stop) pthread_cond_timedwait(&b->wake, &b->lock, &until);
  const bool on = !b->stop;
  pthread_mutex_unlock(&b->lock);
  return on;
}

static void *watch(void *arg) {
  mm_load_bar *b = arg;
  const bool tty = isatty(STDERR_FILENO);
  bool drawn = false;
  char text[160];
  while (sleep_on(b, tty ? 100 : 5000)) {
    const mm_read_stats s = mm_read_log_stats(b->log);
    const bool busy = s.wanted > 0 && mm_read_bytes(&s) < s.wanted;
    if (busy) fprintf(stderr, tty ? "\r%s  " : "loading %s\n", mm_load_bar_text(text, sizeof text, &s));
    if (!busy && drawn && tty) fprintf(stderr, "\r\033[K");
    drawn = busy;
  }
  if (drawn && tty) fprintf(stderr, "\r\033[K");
  return NULL;
}

mm_load_bar *mm_load_bar_open(mm_read_log *log) {
  mm_load_bar *b = calloc(1, sizeof *b);
  if (!b) return NULL;
  b->log = log;
  pthread_mutex_init(&b->lock, NULL);
  pthread_cond_init(&b->wake, NULL);
  if (pthread_create(&b->thread, NULL, watch, b) == 0) return b;
  free(b);
  return NULL;
}

void mm_load_bar_close(mm_load_bar *b) {
  if (!b) return;
  pthread_mutex_lock(&b->lock);
  b->stop = true;
  pthread_cond_signal(&b->wake);
  pthread_mutex_unlock(&b->lock);
  pthread_join(b->thread, NULL);
  pthread_cond_destroy(&b->wake);
  pthread_mutex_destroy(&b->lock);
  free(b);
}
