/* --config. */
#include "runtime/serve/config_file.h"

#include <stdlib.h>
#include <string.h>

#include "formats/option_text.h"
#include "formats/system/file.h"

#define CONFIG_MAX (UINT64_C(1) << 20)
#define LINES_MAX  4096

#define SEVERAL SIZE_MAX

/* The file that was read, and the line of each option that counts: 0: none, SEVERAL: more than one. */
static struct {
  const mm_program *program;
  const char *file;
  const size_t *line;
} taken;

static const mm_option *find(const mm_program *p, const char *name, size_t n) {
  for (size_t i = 0; i < p->option_count; i++) {
    const char *const names[] = {p->options[i].name, p->options[i].alias};
    for (size_t j = 0; j < 2; j++)
      if (names[j] && strlen(names[j]) == n && memcmp(names[j], name, n) == 0) return &p->options[i];
  }
  return NULL;
}

static const mm_option *find_letter(const mm_program *p, char letter) {
  for (size_t i = 0; i < p->option_count; i++)
    if (p->options[i].letter == letter) return &p->options[i];
  return NULL;
}

/* Whether argv[*i] gives the option. Moves *i over the value of whatever option it gives. */
static bool gives(const mm_program *p, char **argv, int *i, const mm_option *o) {
  const char *word = argv[*i];
  if (word[0] != '-') return false;
  if (word[1] == '-') {
    const size_t n = strcspn(word + 2, "=");
    const mm_option *found = find(p, word + 2, n);
    if (found && found->kind != MM_OPT_FLAG && !word[2 + n]) ++*i;
    return found && found == o;
  }
  bool hit = false;
  for (const char *c = word + 1; *c; c++) { /* "-qt2" */
    const mm_option *found = find_letter(p, *c);
    hit = hit || (found && found == o);
    if (!found || found->kind == MM_OPT_FLAG) continue;
    if (!c[1]) ++*i;
    break;
  }
  return hit;
}

static bool given(const mm_program *p, int argc, char **argv, const mm_option *o) {
  for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
    if (gives(p, argv, &i, o)) return true;
  return false;
}

/* Of --config FILE or --config=FILE; NULL: it is not there. */
static const char *find_file(const mm_program *p, int argc, char **argv) {
  const mm_option *config = find(p, "config", 6);
  for (int i = 1, at; (at = i) < argc && strcmp(argv[i], "--") != 0; i++)
    if (gives(p, argv, &i, config)) return i > at ? i < argc ? argv[i] : NULL : argv[at] + strlen("--config=");
  return NULL;
}

/* One line as an argument; NULL without an error: it has none. */
static bool read_line(mm_arena *a, const char *file, char *line, size_t number, char **out, size_t *name_n, mm_err *err) {
  *out = NULL;
  line += strspn(line, " \t\r");
  size_t n = strlen(line);
  while (n && strchr(" \t\r", line[n - 1])) line[--n] = 0;
  if (!n || *line == '#') return true;
  *name_n = strspn(line, "abcdefghijklmnopqrstuvwxyz0123456789-");
  char *value = line + *name_n;
  value += strspn(value, " \t");
  const bool valued = *value; /* by nothing, too */
  if (*value == '=') value += 1 + strspn(value + 1, " \t");
  if (!*name_n || *line == '-' || (line[*name_n] && !strchr(" \t=", line[*name_n])))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(file, NULL), "line %zu: found \"%.80s\", expected an option and its value", number,
                   line);
  *out = valued ? mm_arena_printf(a, err, "--%.*s=%s", (int)*name_n, line, value) : mm_arena_printf(a, err, "--%s", line);
  return *out;
}

/* --help and --version, which are in no table, stand for themselves. */
static bool check_name(const mm_program *p, const char *file, size_t number, const char *option, size_t name_n, mm_err *err) {
  static const char code[] = "E_USAGE: ";
  const mm_option *o;
  mm_err own = {0};
  if (find(p, option + 2, name_n)) return true;
  for (size_t i = 0; (o = mm_option_next(p, &i)); i++)
    if (strlen(o->name) == name_n && memcmp(o->name, option + 2, name_n) == 0) return true;
  mm_option_unknown(p, option, &own);
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(file, NULL), "line %zu: %s", number, own.text + sizeof code - 1);
}

/* A value that is refused is one of this line. Values of lists are looked at later, values of options that are given elsewhere (skip)
 * never. */
static bool check_value(const mm_option *o, bool skip, const char *file, size_t number, const char *value, mm_err *err) {
  static const char code[] = "E_USAGE: ";
  mm_err own = {0};
  if (o->kind == MM_OPT_FLAG)
    return !value || mm_fail(err, MM_USAGE, "E_USAGE", mm_at(file, NULL), "line %zu: --%s: found \"%s\", expected no value", number,
                             o->name, MM_ESCAPED(256, value + 1));
  if (!value) /* or the next word would be its value */
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(file, NULL), "line %zu: found no value of %s", number, o->name);
  if (skip || o->kind == MM_OPT_LIST || mm_option_set(o, value + 1, &own)) return true;
  return mm_fail(err, own.status, own.code, mm_at(file, NULL), "line %zu: %s", number, own.text + sizeof code - 1);
}

static bool check_once(const mm_option *o, const char *file, size_t number, size_t *first, mm_err *err) {
  if (*first && o->kind != MM_OPT_LIST)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(file, NULL), "line %zu: --%s: found twice, expected once; the first is in line %zu",
                   number, o->name, *first);
  *first = *first ? SEVERAL : number;
  return true;
}

bool mm_config_file(const mm_program *p, mm_arena *a, int argc, char **argv, int *count, char ***out, mm_err *err) {
  const char *file = find_file(p, argc, argv);
  *count = argc;
  *out = argv;
  if (!file) return true;
  size_t n, lines = 0;
  char *text = mm_file_slurp(file, CONFIG_MAX, &n, err), *copy = text ? mm_arena_strndup(a, text, n, err) : NULL;
  free(text);
  if (copy && strlen(copy) < n)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(file, NULL), "found a NUL byte at %zu, expected text", strlen(copy));
  char **all = copy ? mm_arena_alloc(a, ((size_t)argc + LINES_MAX + 1) * sizeof *all, err) : NULL;
  size_t *first = all ? mm_arena_alloc(a, p->option_count * sizeof *first, err) : NULL; /* line of each option, 0: none */
  if (!first) return false;
  memset(first, 0, p->option_count * sizeof *first);
  *count = 0;
  all[(*count)++] = argv[0];
  for (char *line = copy; line;) {
    char *end = strchr(line, '\n'), *option;
    size_t name_n;
    if (end) *end = 0;
    if (++lines > LINES_MAX) return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(file, NULL), "more than %d lines", LINES_MAX);
    if (!read_line(a, file, line, lines, &option, &name_n, err)) return false;
    if (option && !check_name(p, file, lines, option, name_n, err)) return false;
    const mm_option *known = option ? find(p, option + 2, name_n) : NULL;
    if (known && strcmp(known->name, "config") == 0)
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(file, NULL), "line %zu: found config, expected it on the command line alone", lines);
    const bool skip = known && given(p, argc, argv, known);
    if (known && !check_value(known, skip, file, lines, strchr(option, '='), err)) return false;
    if (known && !skip && !check_once(known, file, lines, &first[known - p->options], err)) return false;
    if (option && !skip) all[(*count)++] = option;
    line = end ? end + 1 : NULL;
  }
  for (int i = 1; i < argc; i++) all[(*count)++] = argv[i];
  *out = all;
  taken.program = p, taken.file = file, taken.line = first;
  return true;
}

bool mm_config_named(mm_err *err) {
  const mm_err own = *err;
  const mm_option *o = NULL;
  if (own.status != MM_USAGE || !taken.file) return false;
  for (const char *at = own.text; !o && (at = strstr(at, "--"));) {
    at += 2;
    o = find(taken.program, at, strspn(at, "abcdefghijklmnopqrstuvwxyz0123456789-"));
    if (o && !taken.line[o - taken.program->options]) o = NULL;
  }
  if (!o) return false;
  const size_t line = taken.line[o - taken.program->options], skip = strlen(own.code) + strlen(": ");
  *err = (mm_err){0};
  if (line == SEVERAL) return mm_fail(err, own.status, own.code, mm_at(taken.file, NULL), "%s", own.text + skip);
  return mm_fail(err, own.status, own.code, mm_at(taken.file, NULL), "line %zu: %s", line, own.text + skip);
}
