/* Lines typed at a terminal: libedit's emacs keys (or those of ~/.editrc) and a history of this session's lines. The Makefile
 * defines MM_LIBEDIT where pkg-config finds libedit. */
#include "runtime/chat/line_edit.h"

#ifdef MM_LIBEDIT
#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <termios.h>
#include <unistd.h>
#include <wchar.h>
#include <wctype.h>

#include "formats/system/base.h"

#define HISTORY_LINES 1000

struct mm_line_edit {
  EditLine *line;
  History *history;
  locale_t utf8;  /* in force during libedit's calls; the program itself has the C locale */
  mbstate_t half; /* of a character whose bytes have not all come */
  bool elsewhere; /* the cursor was not at the end of the line when the last key was read */
};

/* ---- signals while a line is typed. libedit's own handlers allocate and draw, whatever they interrupt, and send the whole process group
 * what they got: none of them is used ---- */

enum { RESIZED = 1, CONTINUES = 2, STOPS = 4 };
static const struct {
  int number;
  unsigned flag; /* 0: it ends the program */
} signals[] = {{SIGWINCH, RESIZED}, {SIGCONT, CONTINUES}, {SIGTSTP, STOPS}, {SIGINT, 0}, {SIGQUIT, 0}, {SIGHUP, 0}, {SIGTERM, 0}};
#define SIGNALS (sizeof signals / sizeof *signals)
static struct sigaction before[SIGNALS]; /* the program's */
static struct termios modes;             /* of the terminal before the line */
static atomic_uint came;                 /* flags */
static int woken = -1;                   /* an eventfd: read when some came */

static void on_signal(int number) {
  const int error = errno;
  const uint64_t one = 1;
  for (size_t i = 0; i < SIGNALS; i++)
    if (signals[i].number == number) atomic_fetch_or(&came, signals[i].flag);
  mm_either_way(write(woken, &one, sizeof one) > 0); /* full: it is to be read already */
  errno = error;
}

/* In the background the terminal's modes are another's. The signal comes again, to the program's own action, when this returns. */
static void on_end(int number) {
  const int error = errno;
  if (tcgetpgrp(STDIN_FILENO) == getpgrp()) tcsetattr(STDIN_FILENO, TCSANOW, &modes);
  for (size_t i = 0; i < SIGNALS; i++)
    if (signals[i].number == number) sigaction(number, &before[i], NULL);
  raise(number);
  errno = error;
}

/* A signal that the program ignores stays ignored. */
static void take_signal(size_t i) {
  const struct sigaction action = {.sa_handler = signals[i].flag ? on_signal : on_end, .sa_flags = SA_RESTART};
  sigaction(signals[i].number, NULL, &before[i]);
  if (before[i].sa_handler != SIG_IGN || signals[i].flag & (RESIZED | CONTINUES)) sigaction(signals[i].number, &action, NULL);
}

static void stop(void) {
  const struct sigaction action = {.sa_handler = SIG_DFL};
  struct sigaction own;
  sigaction(SIGTSTP, &action, &own);
  raise(SIGTSTP);
  sigaction(SIGTSTP, &own, NULL);
  atomic_fetch_and(&came, ~(unsigned)CONTINUES);
}

/* The line is drawn anew: el_resize alone leaves the cursor where the old window had it, and a key is then written behind the new display.
 * A shell has set its own modes where the program was stopped. */
static void serve_signals(mm_line_edit *e) {
  const unsigned flags = atomic_exchange(&came, 0);
  if (!flags) return;
  if (flags & (STOPS | CONTINUES)) el_set(e->line, EL_PREP_TERM, 0);
  if (flags & STOPS) stop();
  if (flags & (STOPS | CONTINUES)) el_set(e->line, EL_PREP_TERM, 1);
  el_resize(e->line);
  fputs("\r", stderr);
  el_set(e->line, EL_REFRESH);
}

/* ---- keys ---- */

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

/* Waits for a byte of the terminal, and serves signals meanwhile: 1; 0 at the end of the input; -1 with errno. */
static int read_byte(mm_line_edit *e, char *byte) {
  for (;;) {
    struct pollfd p[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = woken, .events = POLLIN}};
    int ready = poll(p, 2, -1);
    uint64_t times;
    if (ready > 0 && p[1].revents && read(woken, &times, sizeof times) > 0) {
      serve_signals(e);
      ready = poll(p, 1, 0); /* a stop discards what was typed */
    }
    if (ready == 0 || (ready > 0 && !p[0].revents)) continue;
    const ssize_t n = ready > 0 ? read(STDIN_FILENO, byte, 1) : -1;
    if (n >= 0 || (errno != EAGAIN && errno != EINTR)) return (int)n;
  }
}

/* Adds a byte to those that came before: true with a character. Bytes that make none are left out; the one that shows it may begin one. */
static bool add_byte(mm_line_edit *e, const char *byte, wchar_t *key) {
  for (int i = 0; i < 2; i++) {
    const bool first = mbsinit(&e->half);
    const size_t n = mbrtowc(key, byte, 1, &e->half);
    if (n != (size_t)-1) return n != (size_t)-2;
    e->half = (mbstate_t){0};
    if (first) break;
  }
  return false;
}

/* Whether the line may fill the window, as libedit counts: a character that is not printed takes up to eight columns. */
static bool fills_window(EditLine *line, const LineInfoW *l) {
  int rows = 0, columns = 0;
  el_get(line, EL_GETTC, "li", &rows);
  el_get(line, EL_GETTC, "co", &columns);
  int64_t used = 2; /* the prompt */
  for (const wchar_t *c = l->buffer; c < l->lastchar; c++) used += iswprint((wint_t)*c) ? wcwidth(*c) : 8;
  return used + rows >= (int64_t)(rows - 1) * columns; /* a wide character leaves one column free at the end of a row */
}

/* A cursor that came to the end of a line that fills the window is in a row that libedit does not have: what is typed next would be written
 * to no memory. Such a line is drawn anew. */
static void return_to_end(mm_line_edit *e) {
  const LineInfoW *l = el_wline(e->line);
  const bool elsewhere = l->cursor != l->lastchar;
  if (e->elsewhere && !elsewhere && fills_window(e->line, l)) {
    fputs("\r", stderr);
    el_set(e->line, EL_REFRESH);
  }
  e->elsewhere = elsewhere;
}

/* One character for libedit. */
static int read_key(EditLine *line, wchar_t *key) {
  mm_line_edit *e = NULL;
  el_get(line, EL_CLIENTDATA, &e);
  return_to_end(e);
  char byte;
  int n;
  do {
    *key = 0;
    n = read_byte(e, &byte);
  } while (n > 0 && !add_byte(e, &byte, key));
  return n;
}

static bool open_line(mm_line_edit *e) {
  HistEvent event;
  e->line = el_init("minimax-run", stdin, stderr, stderr);
  e->history = history_init();
  if (!e->line || !e->history) return false;
  return history(e->history, &event, H_SETSIZE, HISTORY_LINES) >= 0 && history(e->history, &event, H_SETUNIQUE, 1) >= 0 &&
         (woken = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) >= 0 && el_set(e->line, EL_CLIENTDATA, e) == 0 &&
         el_set(e->line, EL_GETCFN, read_key) == 0 && el_set(e->line, EL_EDITOR, "emacs") == 0 && el_set(e->line, EL_SIGNAL, 0) == 0 &&
         el_set(e->line, EL_HIST, history, e->history) == 0;
}

mm_line_edit *mm_line_edit_open(void) {
  const char *term = getenv("TERM");
  if (!isatty(STDIN_FILENO) || !isatty(STDERR_FILENO) || !term || !*term || strcmp(term, "dumb") == 0) return NULL;
  mm_line_edit *e = calloc(1, sizeof *e);
  if (!e) return NULL;
  e->utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
  const locale_t own = uselocale(e->utf8);
  const bool ok = open_line(e);
  if (ok) el_source(e->line, NULL);
  uselocale(own);
  if (ok) return e;
  mm_line_edit_close(e);
  return NULL;
}

void mm_line_edit_close(mm_line_edit *e) {
  if (!e) return;
  if (e->line) el_end(e->line);
  if (e->history) history_end(e->history);
  if (e->utf8) freelocale(e->utf8);
  if (woken >= 0) close(woken);
  woken = -1;
  free(e);
}

const char *mm_line_edit_read(mm_line_edit *e, bool first) {
  int n = 0;
  HistEvent event;
  e->elsewhere = false;
  const locale_t own = uselocale(e->utf8);
  el_set(e->line, EL_PROMPT, first ? prompt_first : prompt_next);
  el_resize(e->line); /* of a window that has another size since the last line */
  tcgetattr(STDIN_FILENO, &modes);
  for (size_t i = 0; i < SIGNALS; i++) take_signal(i);
  const char *line = el_gets(e->line, &n);
  for (size_t i = 0; i < SIGNALS; i++) sigaction(signals[i].number, &before[i], NULL);
  if (atomic_exchange(&came, 0) & STOPS) raise(SIGTSTP);
  if (line && n > 1) history(e->history, &event, H_ENTER, line);
  uselocale(own);
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
