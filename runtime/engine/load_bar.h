/* Progress of a load on stderr: a bar on a terminal, else a line every few seconds. */
#ifndef MM_RUNTIME_LOAD_BAR_H
#define MM_RUNTIME_LOAD_BAR_H

#include "formats/system/bar.h"
#include "loader/stream/read_log.h"

typedef struct mm_load_bar mm_load_bar;
/* Looks at the log until it is closed; shows nothing before anything is read, nor once all is. NULL without the means, which is no error.
 */
mm_load_bar *mm_load_bar_open(mm_read_log *log);
/* Takes the bar away. Accepts NULL. */
void mm_load_bar_close(mm_load_bar *b);

/* "[####------] 11.6 of 28.9 GB, 40 %, 49.8 GB/s": the bar's text. Returns out. */
const char *mm_load_bar_text(char out[MM_BAR_MAX], const mm_read_stats *s);

#endif
