/* Progress of long work as one line on stderr: fitted to the terminal and drawn over in place; elsewhere a line every five seconds. */
#ifndef MM_FORMATS_BAR_H
#define MM_FORMATS_BAR_H

#include "formats/system/base.h"

#define MM_BAR_MAX 400 /* bytes of a line, its end included */

typedef struct mm_bar_line {
  const char *verb;  /* "verifying", or "" */
  double share;      /* done, 0 to 1 */
  const char *facts; /* amounts and rates, without a comma at the end, or "" */
  double left_s;     /* NAN where unknown */
  const char *name;  /* of the file or layer, or ""; shown escaped */
} mm_bar_line;

/* "48 s", "2 min 05 s", "1 h 16 min", "3 d 4 h". */
const char *mm_duration(char out[32], double seconds);
/* The line in at most `width` columns (0: no limit): the bar is made shorter first, then the beginning of the name is cut, then it is left
 * out, then the end of the line. */
const char *mm_bar_text(char out[MM_BAR_MAX], unsigned width, const mm_bar_line *line);
/* Writes the line to stderr, on a terminal over the last one. */
void mm_bar_draw(const mm_bar_line *line);
/* Removes the last line from a terminal. */
void mm_bar_clear(void);

/* Draws the runs of mm_pool_run of the calling thread until it is closed. NULL, which the others accept, if `quiet` or without memory. */
typedef struct mm_bar mm_bar;
mm_bar *mm_bar_open(bool quiet);
void mm_bar_verb(mm_bar *b, const char *verb); /* a literal: what the next runs do */
void mm_bar_close(mm_bar *b);                  /* by the thread that opened it */

#endif
