/* Lines typed at a terminal. libedit is opened when it is needed, so that programs run without it; its functions and constants are those of
 * histedit.h, which are its ABI. */
#include "runtime/chat/line_edit.h"

#include <dlfcn.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define HISTORY_LINES 1000

typedef struct EditLine EditLine;
typedef struct History History;
typedef struct HistEvent {
  int num;
  const char *str;
} HistEvent;

enum { EL_PROMPT = 0, EL_EDITOR = 2, EL_SIGNAL = 3, EL_HIST = 10, H_SETSIZE = 1, H_ENTER = 10, H_SETUNIQUE = 20 };

typedef struct library {
  EditLine *(*init)(const char *, FILE *, FILE *, FILE *);
  void (*end)(EditLine *);
  int (*set)(EditLine *, int, ...);
  int (*source)(EditLine *, const char *);
  const char *(*gets)(EditLine *, int *);
  History *(*history_init)(void);
  void (*history_end)(History *);
  int (*history)(History *, HistEvent *, int, ...);
} library;

struct mm_line_edit {
  library l;
  EditLine *line;
  History *history;
  locale_t utf8; /* of the calls: the program itself has the C locale */
};

static char *prompt(EditLine *e) {
  static char text[] = "> ";
  (void)e;
  return text;
}

static char *prompt_next(EditLine *e) {
  static char text[] = ". ";
  (void)e;
  return text;
}

static bool find(library *l) {
  void *const so = dlopen("libedit.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!so) return false;
  const struct {
    const char *name;
    void *function;
  } used[] = {{"el_init", &l->init},
              {"el_end", &l->end},
              {"el_set", &l->set},
              {"el_source", &l->source},
              {"el_gets", &l->gets},
              {"history", &l->history},
              {"history_init", &l->history_init},
              {"history_end", &l->history_end}};
  for (size_t i = 0; i < sizeof used / sizeof *used; i++)
    if (!(*(void **)used[i].function = dlsym(so, used[i].name))) return false;
  return true;
}

static bool open_line(mm_line_edit *e) {
  HistEvent event;
  e->line = e->l.init("minimax-run", stdin, stderr, stderr);
  e->history = e->l.history_init();
  return e->line && e->history && e->l.history(e->history, &event, H_SETSIZE, HISTORY_LINES) >= 0 &&
         e->l.history(e->history, &event, H_SETUNIQUE, 1) >= 0 && e->l.set(e->line, EL_EDITOR, "emacs") == 0 &&
         e->l.set(e->line, EL_SIGNAL, 1) == 0 && e->l.set(e->line, EL_HIST, e->l.history, e->history) == 0;
}

mm_line_edit *mm_line_edit_open(void) {
  const char *term = getenv("TERM");
  if (!isatty(STDIN_FILENO) || !isatty(STDERR_FILENO) || !term || !*term || strcmp(term, "dumb") == 0) return NULL;
  mm_line_edit *e = calloc(1, sizeof *e);
  if (!e || !find(&e->l)) {
    free(e);
    return NULL;
  }
  e->utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
  const locale_t before = uselocale(e->utf8);
  const bool ok = open_line(e);
  if (ok) e->l.source(e->line, NULL); /* ~/.editrc, if there is one */
  uselocale(before);
  if (ok) return e;
  mm_line_edit_close(e);
  return NULL;
}

void mm_line_edit_close(mm_line_edit *e) {
  if (!e) return;
  if (e->line) e->l.end(e->line);
  if (e->history) e->l.history_end(e->history);
  if (e->utf8) freelocale(e->utf8);
  free(e);
}

const char *mm_line_edit_read(mm_line_edit *e, bool first) {
  int n = 0;
  HistEvent event;
  const locale_t before = uselocale(e->utf8);
  e->l.set(e->line, EL_PROMPT, first ? prompt : prompt_next);
  const char *line = e->l.gets(e->line, &n);
  if (line && n > 1) e->l.history(e->history, &event, H_ENTER, line);
  uselocale(before);
  return n > 0 ? line : NULL;
}
