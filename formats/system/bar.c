/* The line of progress (bar.h). */
#include "formats/system/bar.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "formats/system/pool.h"

#define CELLS      30
#define CELLS_MIN  8
#define NAME_LEAST 12  /* columns of a name that is worth its place */
#define TICK_MS    500 /* on a terminal */
#define TICKS_LINE 10  /* ticks for a line elsewhere */

const char *mm_duration(char out[32], double seconds) {
  const unsigned long long s = seconds > 0 && seconds < 1e15 ? (unsigned long long)(seconds + 0.5) : 0;
  if (s < 60)
    snprintf(out, 32, "%llu s", s);
  else if (s < 3600)
    snprintf(out, 32, "%llu min %02llu s", s / 60, s % 60);
  else if (s < 48 * 3600)
    snprintf(out, 32, "%llu h %02llu min", s / 3600, s / 60 % 60);
  else
    snprintf(out, 32, "%llu d %llu h", s / 86400, s / 3600 % 24);
  return out;
}

static void put_cells(char *out, double share, unsigned cells) {
  const double part = share > 0 ? fmin(share, 1) : 0;
  memset(out, '-', cells);
  memset(out, '#', (size_t)(cells * part));
  out[cells] = 0;
}

const char *mm_bar_text(char out[MM_BAR_MAX], unsigned width, const mm_bar_line *l) {
  char left[48] = "", time[32], cells[CELLS + 1], name[200];
  if (!isnan(l->left_s)) snprintf(left, sizeof left, "%s%s left", *l->facts ? ", " : "", mm_duration(time, l->left_s));
  mm_show(name, sizeof name, l->name);
  const size_t max = width && width < MM_BAR_MAX ? width : MM_BAR_MAX - 1;
  const size_t fixed = strlen(l->verb) + (*l->verb ? 4 : 3) + strlen(l->facts) + strlen(left); /* all but cells, and ", " and the name */
  size_t named = *name ? strlen(name) + 2 : 0;
  unsigned n = CELLS;
  while (n > CELLS_MIN && fixed + n + named > max) n--;
  if (*name && fixed + n + named > max) { /* a layer's number stands in front, a file's at the end */
    const size_t capacity = max > fixed + n + 4 ? max - fixed - n - 4 : 0, front = capacity / 2, back = capacity - front;
    named = 0;
    if (capacity >= NAME_LEAST) {
      named = capacity + 4;
      memcpy(name + front, "..", 2);
      memmove(name + front + 2, name + strlen(name) - back, back + 1);
    } else {
      name[0] = 0;
    }
  }
  while (n < CELLS && fixed + n + named < max && !*name) n++;
  put_cells(cells, l->share, n);
  snprintf(out, max + 1, "%s%s[%s] %s%s%s%s", l->verb, *l->verb ? " " : "", cells, l->facts, left,
           *name && (*l->facts || *left) ? ", " : "", name);
  return out;
}

/* Columns of stderr's terminal, 80 where it does not say; 0: stderr is no terminal. */
static unsigned terminal_width(void) {
  struct winsize w;
  if (!isatty(STDERR_FILENO)) return 0;
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col ? w.ws_col : 80;
}

static atomic_bool shown_line; /* on the terminal */

void mm_bar_draw(const mm_bar_line *line) {
  char text[MM_BAR_MAX];
  const unsigned width = terminal_width();
  mm_bar_text(text, width ? width - (width > 1) : 0, line); /* a full line would wrap */
  if (width) atomic_store(&shown_line, true);
  fprintf(stderr, width ? "\r%s\033[K" : "%s\n", text);
}

void mm_bar_clear(void) {
  if (atomic_exchange(&shown_line, false)) fputs("\r\033[K", stderr);
}

struct mm_bar {
  mm_pool_watch watch;
  const char *verb; /* under its lock */
  bool tty;
  mm_ticker *ticker;
};

static void look(void *ctx, unsigned n) {
  mm_bar *b = ctx;
  char name[sizeof b->watch.name];
  if (!n) mm_bar_clear();
  if (!n || (!b->tty && n % TICKS_LINE)) return;
  pthread_mutex_lock(&b->watch.lock);
  const size_t done = b->watch.done, count = b->watch.count;
  const double took = mm_now() - b->watch.since;
  const char *verb = b->verb;
  memcpy(name, b->watch.name, sizeof name);
  pthread_mutex_unlock(&b->watch.lock);
  if (!count || took < 1e-3 * TICK_MS) return;
  const double share = (double)done / (double)count;
  const mm_bar_line line = {verb, share, MM_FORMATTED(64, "%.0f %%", 100 * share), done ? took / share - took : (double)NAN, name};
  mm_bar_draw(&line);
}

mm_bar *mm_bar_open(bool quiet) {
  mm_bar *b = quiet ? NULL : calloc(1, sizeof *b);
  if (!b) return NULL;
  pthread_mutex_init(&b->watch.lock, NULL);
  b->verb = "";
  b->tty = isatty(STDERR_FILENO);
  mm_pool_watched(&b->watch);
  b->ticker = mm_ticker_open(TICK_MS, look, b);
  return b;
}

void mm_bar_verb(mm_bar *b, const char *verb) {
  if (!b) return;
  pthread_mutex_lock(&b->watch.lock);
  b->verb = verb;
  pthread_mutex_unlock(&b->watch.lock);
  mm_bar_clear();
}

void mm_bar_close(mm_bar *b) {
  if (!b) return;
  mm_pool_watched(NULL);
  mm_ticker_close(b->ticker);
  pthread_mutex_destroy(&b->watch.lock);
  free(b);
}
