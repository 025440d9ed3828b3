/* Lines typed at a terminal: libedit's emacs keys (or those of ~/.editrc) and a history of this session's lines. The Makefile
 * defines MM_LIBEDIT where pkg-config finds libedit. */
#include "runtime/chat/line_edit.h"

#ifdef MM_LIBEDIT
#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HISTORY_LINES 1000

struct mm_line_edit {
  EditLine *line;
  History *history;
  locale_t utf8; /* in force during libedit's calls; the program itself has the C locale */
};

static char *prompt_first(EditLine *e) {
  static char text[] = "> ";
  (void)e;
  return text;
}

static char *prompt_next(EditLine *e) {
  static char text[] = ". ";
  (void)e;
  return text;
}

static bool open_line(mm_line_edit *e) {
  HistEvent event;
  e->line = el_init("minimax-run", stdin, stderr, stderr);
  e->history = history_init();
  if (!e->line || !e->history) return false;
  return history(e->history, &event, H_SETSIZE, HISTORY_LINES) >= 0 && history(e->history, &event, H_SETUNIQUE, 1) >= 0 &&
         el_set(e->line, EL_EDITOR, "emacs") == 0 && el_set(e->line, EL_SIGNAL, 1) == 0 &&
         el_set(e->line, EL_HIST, history, e->history) == 0;
}

mm_line_edit *mm_line_edit_open(void) {
  const char *term = getenv("TERM");
  if (!isatty(STDIN_FILENO) || !isatty(STDERR_FILENO) || !term || !*term || strcmp(term, "dumb") == 0) return NULL;
  mm_line_edit *e = calloc(1, sizeof *e);
  if (!e) return NULL;
  e->utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
  const locale_t before = uselocale(e->utf8);
  const bool ok = open_line(e);
  if (ok) el_source(e->line, NULL);
  uselocale(before);
  if (ok) return e;
  mm_line_edit_close(e);
  return NULL;
}

void mm_line_edit_close(mm_line_edit *e) {
  if (!e) return;
  if (e->line) el_end(e->line);
  if (e->history) history_end(e->history);
  if (e->utf8) freelocale(e->utf8);
  free(e);
}

const char *mm_line_edit_read(mm_line_edit *e, bool first) {
  int n = 0;
  HistEvent event;
  const locale_t before = uselocale(e->utf8);
  el_set(e->line, EL_PROMPT, first ? prompt_first : prompt_next);
  const char *line;
  do /* Ctrl-Z where no shell waits, as in a container, stops nobody, and is no end of the lines */
    errno = 0, line = el_gets(e->line, &n);
  while (!line && n < 0 && errno == EINTR);
  if (line && n > 1) history(e->history, &event, H_ENTER, line);
  uselocale(before);
  return n > 0 ? line : NULL;
}

#else

mm_line_edit *mm_line_edit_open(void) { return 0; }
void mm_line_edit_close(mm_line_edit *e) { (void)e; }
const char *mm_line_edit_read(mm_line_edit *e, bool first) {
  (void)e, (void)first;
  return 0;
}

#endif
