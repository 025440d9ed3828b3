/* Lines typed at a terminal: libedit's emacs keys (or those of ~/.editrc) and a history of this session's lines. The Makefile
 * defines MM_LIBEDIT where pkg-config finds libedit. */
#include "runtime/chat/line_edit.h"

#ifdef MM_LIBEDIT
#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <wchar.h>

#include "formats/system/base.h"

#define HISTORY_LINES 1000

struct mm_line_edit {
  EditLine *line;
  History *history;
  locale_t utf8;              /* in force during libedit's calls; the program itself has the C locale */
  mbstate_t half;             /* of a character whose bytes have not all come */
  struct sigaction continues; /* libedit's, which it takes away when it has run */
};

/* ---- the size of the window. libedit's own handler allocates and draws, whatever the signal interrupts: at worst another draw ---- */

static int resized = -1; /* an eventfd: the window has another size since */

static void on_resize(int number) {
  const int before = errno;
  const uint64_t one = 1;
  (void)number;
  mm_either_way(write(resized, &one, sizeof one) > 0); /* full: it is to be read already */
  errno = before;
}

/* libedit sets its handlers before it asks for the prompt of a line, and restores the program's behind the line. */
static void take_resize(void) {
  const struct sigaction action = {.sa_handler = on_resize, .sa_flags = SA_RESTART};
  sigaction(SIGWINCH, &action, NULL);
}

static char *prompt_first(EditLine *e) {
  static char text[] = "> ";
  (void)e;
  take_resize();
  return text;
}

static char *prompt_next(EditLine *e) {
  static char text[] = ". ";
  (void)e;
  take_resize();
  return text;
}

/* ---- keys ---- */

/* libedit's handler of SIGCONT has run: it is set again, and the line is drawn. */
static bool has_continued(mm_line_edit *e) {
  struct sigaction now;
  if (sigaction(SIGCONT, NULL, &now) != 0 || now.sa_handler == e->continues.sa_handler) return false;
  sigaction(SIGCONT, &e->continues, NULL);
  return el_set(e->line, EL_REFRESH) == 0;
}

/* The line is drawn anew: el_resize alone leaves the cursor where the old window had it, and a key is then written behind the new display.
 */
static void take_size(mm_line_edit *e) {
  el_resize(e->line);
  fputs("\r", stderr);
  el_set(e->line, EL_REFRESH);
}

/* Waits for a byte of the terminal, and takes new sizes of the window meanwhile: 1; 0 at the end of the input; -1 with errno. */
static int read_byte(mm_line_edit *e, char *byte) {
  for (;;) {
    struct pollfd p[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = resized, .events = POLLIN}};
    const int ready = poll(p, 2, -1);
    uint64_t times;
    if (ready > 0 && p[1].revents && read(resized, &times, sizeof times) > 0) take_size(e);
    if (ready > 0 && !p[0].revents) continue;
    const ssize_t n = ready > 0 ? read(STDIN_FILENO, byte, 1) : -1;
    if (n >= 0) return (int)n;
    if (errno == EAGAIN || (errno == EINTR && (has_continued(e) || poll(p + 1, 1, 0) > 0))) continue;
    return -1;
  }
}

/* One character for libedit. A byte that begins none is left out. */
static int read_key(EditLine *line, wchar_t *key) {
  mm_line_edit *e = NULL;
  el_get(line, EL_CLIENTDATA, &e);
  if (e->continues.sa_handler == SIG_DFL) sigaction(SIGCONT, NULL, &e->continues);
  for (;;) {
    char byte;
    const int n = read_byte(e, &byte);
    *key = 0;
    if (n <= 0) return n;
    const size_t length = mbrtowc(key, &byte, 1, &e->half);
    if (length == (size_t)-1) e->half = (mbstate_t){0};
    if (length == 0 || length == 1) return 1;
  }
}

static bool open_line(mm_line_edit *e) {
  HistEvent event;
  e->line = el_init("minimax-run", stdin, stderr, stderr);
  e->history = history_init();
  if (!e->line || !e->history) return false;
  return history(e->history, &event, H_SETSIZE, HISTORY_LINES) >= 0 && history(e->history, &event, H_SETUNIQUE, 1) >= 0 &&
         (resized = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) >= 0 && el_set(e->line, EL_CLIENTDATA, e) == 0 &&
         el_set(e->line, EL_GETCFN, read_key) == 0 && el_set(e->line, EL_EDITOR, "emacs") == 0 && el_set(e->line, EL_SIGNAL, 1) == 0 &&
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
  if (resized >= 0) close(resized);
  resized = -1;
  free(e);
}

const char *mm_line_edit_read(mm_line_edit *e, bool first) {
  int n = 0;
  HistEvent event;
  const locale_t before = uselocale(e->utf8);
  el_set(e->line, EL_PROMPT, first ? prompt_first : prompt_next);
  e->continues.sa_handler = SIG_DFL;
  el_resize(e->line); /* of a window that has another size since the last line */
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
