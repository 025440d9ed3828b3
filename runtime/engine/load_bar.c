/* The bar of a load (load_bar.h): what is drawn when the log is looked at. */
#include "runtime/engine/load_bar.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/system/bar.h"
#include "formats/system/pool.h"

#define CELLS 30

struct mm_load_bar {
  mm_read_log *log;
  bool tty, drawn;
  mm_ticker *ticker;
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

static void look(void *ctx, unsigned n) {
  mm_load_bar *b = ctx;
  char text[160];
  const mm_read_stats s = mm_read_log_stats(b->log);
  const uint64_t read = mm_read_bytes(&s);
  const bool busy = n && s.wanted > 0 && read < s.wanted;
  if (busy) {
    const double share = (double)read / (double)s.wanted;
    snprintf(text, sizeof text, "%.1f of %.1f GB, %.0f %%, %.1f GB/s", (double)read * 1e-9, (double)s.wanted * 1e-9, 100 * share,
             s.seconds > 0 ? (double)read * 1e-9 / s.seconds : 0);
    mm_bar_draw(&(mm_bar_line){"loading", share, text, read ? s.seconds / share - s.seconds : (double)NAN, ""});
  }
  if (!busy && b->drawn && b->tty) mm_bar_clear();
  b->drawn = busy;
}

mm_load_bar *mm_load_bar_open(mm_read_log *log) {
  mm_load_bar *b = calloc(1, sizeof *b);
  if (!b) return NULL;
  *b = (mm_load_bar){.log = log, .tty = isatty(STDERR_FILENO)};
  b->ticker = mm_ticker_open(b->tty ? 100 : 5000, look, b);
  return b;
}

void mm_load_bar_close(mm_load_bar *b) {
  if (b) mm_ticker_close(b->ticker);
  free(b);
}
