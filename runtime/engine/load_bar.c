/* The bar of a load (load_bar.h): what is drawn when the log is looked at. */
#include "runtime/engine/load_bar.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "formats/system/pool.h"

#define FACTS 160 /* bytes of amounts and rates */

struct mm_load_bar {
  mm_read_log *log;
  bool tty, drawn;
  mm_ticker *ticker;
};

/* The line of a load; its facts lie in the caller's text. */
static mm_bar_line line_of(char facts[FACTS], const char *verb, const mm_read_stats *s) {
  const uint64_t read = mm_read_bytes(s);
  const double share = s->wanted ? (double)mm_min(read, s->wanted) / (double)s->wanted : 0;
  snprintf(facts, FACTS, "%.1f of %.1f GB, %.0f %%, %.1f GB/s", (double)read * 1e-9, (double)s->wanted * 1e-9, 100 * share,
           s->seconds > 0 ? (double)read * 1e-9 / s->seconds : 0);
  return (mm_bar_line){verb, share, facts, share > 0 ? s->seconds / share - s->seconds : (double)NAN, ""};
}

const char *mm_load_bar_text(char out[MM_BAR_MAX], const mm_read_stats *s) {
  char facts[FACTS];
  mm_bar_line line = line_of(facts, "", s);
  line.left_s = (double)NAN;
  return mm_bar_text(out, 0, &line);
}

static void look(void *ctx, unsigned n) {
  mm_load_bar *b = ctx;
  char facts[FACTS];
  const mm_read_stats s = mm_read_log_stats(b->log);
  const bool busy = n && s.wanted > 0 && mm_read_bytes(&s) < s.wanted;
  const mm_bar_line line = line_of(facts, "loading", &s);
  if (busy) mm_bar_draw(&line);
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
