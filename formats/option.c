/* Command lines: the parser, and the frame of a program's main. */
#include "formats/option.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "formats/option_text.h"
#include "formats/system/file.h"
#include "formats/system/staging.h"

#define OPERANDS_WATCHED 2                 /* no program takes more that are directories */
#define STACK_LEAST      ((size_t)1 << 20) /* of a thread */
#define STACK_MOST       ((size_t)8 << 20)

static bool json_errors; /* --json was among the arguments */

/* ---- values ---- */

static bool usage(mm_err *err, const mm_option *o, const char *found, const char *expected) {
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--%s: found \"%s\", expected %s", o->name, MM_ESCAPED(256, found), expected);
}

static bool parse_digits(const char **s, uint64_t *out) {
  const char *p = *s;
  for (*out = 0; *p >= '0' && *p <= '9'; p++)
    if (!mm_mul(*out, 10, out) || !mm_add(*out, (uint64_t)(*p - '0'), out)) return false;
  bool some = p != *s;
  *s = p;
  return some;
}

static bool parse_u64(const mm_option *o, const char *s, mm_err *err) {
  uint64_t v;
  const char *p = s;
  if (parse_digits(&p, &v) && *p == '\0' && v >= o->lo && (o->hi == 0 || v <= o->hi)) {
    *(uint64_t *)o->target = v;
    return true;
  }
  unsigned long long lo = o->lo, hi = o->hi ? o->hi : UINT64_MAX;
  return usage(err, o, s, MM_FORMATTED(96, "an integer from %llu to %llu", lo, hi));
}

bool mm_option_size(const char *text, uint64_t *bytes) {
  static const char units[] = "KMGT";
  uint64_t v;
  const char *p = text;
  bool ok = parse_digits(&p, &v);
  const char *unit = *p ? strchr(units, *p) : NULL;
  if (unit) {
    const bool decimal = strcmp(p + 1, "B") == 0;
    for (const char *u = units; ok && u <= unit; u++) ok = mm_mul(v, decimal ? 1000 : 1024, &v);
    p += decimal ? 2 : strcmp(p + 1, "iB") == 0 ? 3 : 1;
  }
  if (ok) *bytes = v;
  return ok && *p == '\0';
}

static bool parse_size(const mm_option *o, const char *s, mm_err *err) {
  uint64_t v;
  if (!mm_option_size(s, &v)) return usage(err, o, s, "bytes, as in 512M, 4GiB or 80GB");
  if (v < o->lo) return usage(err, o, s, MM_FORMATTED(48, "bytes, at least %llu", (unsigned long long)o->lo));
  *(uint64_t *)o->target = v;
  return true;
}

static bool parse_real(const mm_option *o, const char *s, mm_err *err) {
  char *end;
  double v = strtod(s, &end);
  if (s[0] == '\0' || strspn(s, "+-.0123456789eE") != strlen(s) || *end != '\0' || !isfinite(v)) return usage(err, o, s, "a number");
  *(double *)o->target = v;
  return true;
}

/* `word` is one of the '|'-separated choices. */
static bool is_choice(const char *choices, const char *word) {
  size_t n = strlen(word);
  for (const char *c = choices; *c; c += strcspn(c, "|"), c += *c == '|')
    if (strcspn(c, "|") == n && memcmp(c, word, n) == 0) return true;
  return false;
}

bool mm_option_set(const mm_option *o, const char *s, mm_err *err) {
  if (o->choices && o->kind != MM_OPT_WORD && !is_choice(o->choices, s)) return usage(err, o, s, o->choices);
  switch (o->kind) {
    case MM_OPT_FLAG: break;
    case MM_OPT_STR:
    case MM_OPT_WORD: *(const char **)o->target = s; return true;
    case MM_OPT_U64: return parse_u64(o, s, err);
    case MM_OPT_SIZE: return parse_size(o, s, err);
    case MM_OPT_REAL: return parse_real(o, s, err);
    case MM_OPT_LIST: {
      mm_option_list *list = o->target;
      if (!MM_GROW(list->item, &list->cap, list->count + 1, err)) return false;
      list->item[list->count++] = s;
      return true;
    }
  }
  return false;
}

static void print_version(const mm_program *p, FILE *f) { fprintf(f, "%s %s\n", p->name, mm_version()); }

/* The text that `word` ("--help-man") asks for, if any. */
static void (*printer_of(const char *word))(const mm_program *, FILE *) {
  static const struct {
    const char *word;
    void (*print)(const mm_program *, FILE *);
  } table[] = {{"--help", mm_option_help},     {"-h", mm_option_help},          {"--version", print_version},
               {"--help-man", mm_option_man},  {"--help-bash", mm_option_bash}, {"--help-zsh", mm_option_zsh},
               {"--help-fish", mm_option_fish}};
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (strcmp(table[i].word, word) == 0) return table[i].print;
  return NULL;
}

/* ---- parsing ---- */

typedef struct parser {
  const mm_program *p;
  char **next, **end; /* arguments not looked at yet */
  bool *seen;         /* [option_count] */
  mm_err *err;
} parser;

/* `value` is what followed '=' (or the letter), NULL if nothing did. */
static bool take(parser *a, const mm_option *o, const char *value) {
  size_t i = (size_t)(o - a->p->options);
  if (a->seen[i] && o->kind != MM_OPT_LIST)
    return mm_fail(a->err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--%s: found twice, expected once", o->name);
  a->seen[i] = true;
  if (o->kind == MM_OPT_FLAG) {
    *(bool *)o->target = true;
    return !value || usage(a->err, o, value, "no value");
  }
  if (!value && a->next == a->end)
    return mm_fail(a->err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--%s: found no value, expected %s", o->name, o->arg);
  return mm_option_set(o, value ? value : *a->next++, a->err);
}

static bool take_long(parser *a, const char *word) {
  const char *name = word + 2;
  size_t n = strcspn(name, "=");
  for (size_t i = 0; i < a->p->option_count; i++) {
    const mm_option *o = &a->p->options[i];
    if (!o->name) continue;
    bool hit = strlen(o->name) == n && memcmp(o->name, name, n) == 0;
    hit = hit || (o->alias && strlen(o->alias) == n && memcmp(o->alias, name, n) == 0);
    if (hit) return take(a, o, name[n] == '=' ? name + n + 1 : NULL);
  }
  return mm_option_unknown(a->p, word, a->err);
}

/* "-q", "-qv", "-o DIR", "-oDIR". */
static bool take_letters(parser *a, const char *word) {
  for (const char *c = word + 1; *c; c++) {
    const mm_option *o = NULL;
    for (size_t i = 0; !o && i < a->p->option_count; i++)
      if (a->p->options[i].letter == *c) o = &a->p->options[i];
    if (!o) return mm_option_unknown(a->p, word, a->err);
    if (o->kind != MM_OPT_FLAG) return take(a, o, c[1] ? c + 1 : NULL);
    if (!take(a, o, NULL)) return false;
  }
  return true;
}

static bool parse_all(parser *a, const char **operands, size_t *count, bool *done) {
  bool only_operands = false;
  while (a->next < a->end) {
    const char *word = *a->next++;
    if (only_operands || word[0] != '-' || word[1] == '\0') {
      if (*count == a->p->max_operands) {
        return mm_fail(a->err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found \"%s\", expected at most %u operands (%s)",
                       MM_ESCAPED(256, word), a->p->max_operands, a->p->operands);
      }
      operands[(*count)++] = word;
      continue;
    }
    void (*print)(const mm_program *, FILE *) = printer_of(word);
    if (print) {
      print(a->p, stdout);
      *done = true;
      return mm_program_written(a->err);
    }
    only_operands = strcmp(word, "--") == 0;
    if (only_operands) continue;
    if (!(word[1] == '-' ? take_long(a, word) : take_letters(a, word))) return false;
  }
  if (*count >= a->p->min_operands) return true;
  return mm_fail(a->err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found %zu operands, expected %u (%s); see %s --help", *count,
                 a->p->min_operands, a->p->operands, a->p->name);
}

/* MINIMAX_JOBS, where --jobs was not given. */
static bool take_environment(parser *a) {
  const char *jobs = getenv("MINIMAX_JOBS");
  for (size_t i = 0; jobs && *jobs && i < a->p->option_count; i++) {
    const mm_option *o = &a->p->options[i];
    if (a->seen[i] || !o->name || strcmp(o->name, "jobs") != 0 || mm_option_set(o, jobs, MM_IGNORED)) continue;
    return mm_fail(a->err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                   "MINIMAX_JOBS in the environment: found \"%s\", expected a value of --jobs", MM_ESCAPED(256, jobs));
  }
  return true;
}

bool mm_options_parse(const mm_program *p, int argc, char **argv, const char **operands, size_t *operand_count, bool *done, mm_err *err) {
  parser a = {p, argv + (argc > 0), argv + argc, mm_calloc(p->option_count, sizeof(bool), err), err};
  *operand_count = 0;
  *done = false;
  json_errors = false;
  for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) json_errors = json_errors || strcmp(argv[i], "--json") == 0;
  bool ok = a.seen && parse_all(&a, operands, operand_count, done) && (*done || take_environment(&a));
  free(a.seen);
  return ok;
}

#define STDOUT "stdout"

/* The stream keeps no reason of an earlier write that failed: writing once more gives it. */
bool mm_program_written(mm_err *err) {
  errno = 0;
  if (fflush(stdout) == 0 && !ferror(stdout)) return true;
  int reason = errno;
  clearerr(stdout);
  if (!reason && (putchar('\n') == EOF || fflush(stdout) != 0)) reason = errno;
  return mm_fail_errno(err, mm_at(STDOUT, NULL), "write", reason ? reason : EIO);
}

bool mm_program_json(mm_json *o, bool pretty, mm_err *err) {
  char *text = mm_json_text(o, pretty, err);
  if (!text) return false;
  puts(text);
  free(text);
  return true;
}

/* True if err says that standard output could not be written because its reader is gone. */
static bool reader_left(const mm_err *err) {
  static const char text[] = "E_IO: " STDOUT;
  struct pollfd p = {.fd = STDOUT_FILENO, .events = POLLOUT};
  return err->status == MM_IO && strncmp(err->text, text, sizeof text - 1) == 0 && poll(&p, 1, 0) == 1 && p.revents & POLLERR;
}

int mm_program_fail(const mm_program *p, const mm_err *err) {
  bool known = err->status != MM_OK;
  int status = known ? (int)err->status : MM_BUG;
  const char *text = known ? err->text : "E_BUG: failed without saying why; this is a bug";
  if (known && !*text) return status;
  if (reader_left(err)) {
    signal(SIGPIPE, SIG_DFL);
    raise(SIGPIPE);
  }
  char *json =
      json_errors ? mm_json_text(MM_JSON_NEW({"program", mm_json_new_str(p->name)}, {"error", mm_json_new_str(known ? err->code : "E_BUG")},
                                             {"status", mm_json_new_int(status)}, {"message", mm_json_new_str(text)}),
                                 false, MM_IGNORED)
                  : NULL;
  char line[2 * sizeof err->text];
  int n = json ? snprintf(line, sizeof line, "%s\n", json) : snprintf(line, sizeof line, "%s: error: %s\n", p->name, text);
  if (n >= (int)sizeof line) n = (int)sizeof line - 1;
  free(json);
  ssize_t written = write(STDERR_FILENO, line, (size_t)n);
  (void)written; /* there is nowhere to report a failed write of an error */
  return status;
}

static void on_note(const char *line) { fprintf(stderr, "%s: note: %s\n", program_invocation_short_name, line); }

/* Threads have stacks that hold what they run, whatever the limit of the process's own stack (ulimit -s) is, which they take after. */
static void size_stacks(void) {
  pthread_attr_t a;
  size_t size;
  if (pthread_getattr_default_np(&a) != 0) return;
  if (pthread_attr_getstacksize(&a, &size) == 0 && (size < STACK_LEAST || size > STACK_MOST) &&
      pthread_attr_setstacksize(&a, size < STACK_LEAST ? STACK_LEAST : STACK_MOST) == 0)
    (void)pthread_setattr_default_np(&a);
  pthread_attr_destroy(&a);
}

void mm_program_start(void) {
  mm_staging_notes(on_note);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
  mm_map_watch();
  size_stacks();
  /* A closed 0, 1 or 2 would be given to the next file opened, and messages would land in it. open takes the lowest. */
  for (int fd = 0; fd <= 2; fd++)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) _exit(MM_IO);
}

static bool has_handling(int number, void (*handling)(int)) {
  struct sigaction now;
  return sigaction(number, NULL, &now) == 0 && !(now.sa_flags & SA_SIGINFO) && now.sa_handler == handling;
}

void mm_program_stay(void) {
  static const int meaningless[] = {SIGALRM, SIGIO, SIGPROF, SIGUSR1, SIGUSR2, SIGVTALRM};
  for (size_t i = 0; i < sizeof meaningless / sizeof *meaningless; i++)
    if (has_handling(meaningless[i], SIG_DFL)) signal(meaningless[i], SIG_IGN);
}

bool mm_program_cpu_time(mm_err *err) {
  return mm_fail(err, MM_LIMIT, "E_CPU_TIME", mm_at(NULL, NULL), "the process reached its limit of CPU time (RLIMIT_CPU) and ended for it");
}

bool mm_program_hangup_ignored(void) { return has_handling(SIGHUP, SIG_IGN); }

static atomic_bool all_opened;

void mm_program_opened(void) { atomic_store(&all_opened, true); }

/* Runs the program while the directories among its operands are open: bad input or damage in one is E_CHANGED where another directory
 * has taken its name before all files were open. */
static bool run_with(const char **operands, size_t count, bool (*run)(void *, mm_err *), void *args, mm_err *err) {
  mm_dir dir[OPERANDS_WATCHED];
  count = mm_min(count, OPERANDS_WATCHED);
  for (size_t i = 0; i < count; i++) dir[i] = operands[i] ? mm_dir_open(operands[i]) : (mm_dir){-1};
  const bool ok = run(args, err) && mm_program_written(err);
  for (size_t i = 0; i < count; i++)
    if (ok || atomic_load(&all_opened))
      (void)close(dir[i].fd);
    else
      mm_either_way(mm_dir_close(&dir[i], operands[i], false, err));
  return ok;
}

typedef struct program_work {
  const char **operands;
  size_t count;
  bool (*run)(void *, mm_err *);
  void *args;
  mm_err err;
  bool ok;
} program_work;

static void *work_with(void *user) {
  program_work *w = user;
  w->ok = run_with(w->operands, w->count, w->run, w->args, &w->err);
  return NULL;
}

/* In a thread, where the limit of the process's own stack is small. Signals are the thread's, as they would be its own. */
static bool run_on_stack(program_work *w, mm_err *err) {
  struct rlimit l;
  if (getrlimit(RLIMIT_STACK, &l) != 0 || l.rlim_cur >= STACK_LEAST) {
    work_with(w);
  } else {
    pthread_t thread;
    sigset_t all;
    const int failed = pthread_create(&thread, NULL, work_with, w);
    if (failed) return mm_fail_thread(err, "start a thread in place of a small stack (ulimit -s)", failed);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    pthread_join(thread, NULL);
  }
  if (!w->ok) *err = w->err;
  return w->ok;
}

int mm_program_main(const mm_program *p, int argc, char **argv, const char **operands, bool (*run)(void *, mm_err *), void *args) {
  mm_err err = {0};
  size_t count;
  bool done;
  mm_program_start();
  const bool parsed = mm_options_parse(p, argc, argv, operands, &count, &done, &err);
  if (p->agreed ? !p->agreed(parsed, &err) : !parsed) return mm_program_fail(p, &err);
  program_work w = {.operands = operands, .count = count, .run = run, .args = args};
  const bool ok = done ? !p->may_end || p->may_end(&err) : run_on_stack(&w, &err);
  return ok ? MM_OK : mm_program_fail(p, &err);
}
