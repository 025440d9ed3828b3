/* --config. */
#include "runtime/serve/config_file.h"

#include <stdlib.h>
#include <string.h>

#include "formats/system/file.h"

#define CONFIG_MAX (UINT64_C(1) << 20)
#define LINES_MAX  4096

/* --config FILE or --config=FILE; NULL: it is not there. */
static const char *find_file(int argc, char **argv) {
  for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
    if (strncmp(argv[i], "--config=", 9) == 0) return argv[i] + 9;
    if (strcmp(argv[i], "--config") == 0 && i + 1 < argc) return argv[i + 1];
  }
  return NULL;
}

static bool given(int argc, char **argv, const char *name, size_t n) {
  for (int i = 1; i < argc; i++)
    if (strncmp(argv[i], "--", 2) == 0 && strncmp(argv[i] + 2, name, n) == 0 && (argv[i][2 + n] == 0 || argv[i][2 + n] == '=')) return true;
  return false;
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
  if (*value == '=') value += 1 + strspn(value + 1, " \t");
  if (!*name_n || *line == '-' || (line[*name_n] && !strchr(" \t=", line[*name_n])))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(file, NULL), "line %zu: found \"%.80s\", expected an option and its value", number,
                   line);
  *out = *value ? mm_arena_printf(a, err, "--%.*s=%s", (int)*name_n, line, value) : mm_arena_printf(a, err, "--%s", line);
  return *out;
}

bool mm_config_file(mm_arena *a, int argc, char **argv, int *count, char ***out, mm_err *err) {
  const char *file = find_file(argc, argv);
  *count = argc;
  *out = argv;
  if (!file) return true;
  size_t n, lines = 0;
  char *text = mm_file_slurp(file, CONFIG_MAX, &n, err), *copy = text ? mm_arena_strndup(a, text, n, err) : NULL;
  free(text);
  char **all = copy ? mm_arena_alloc(a, ((size_t)argc + LINES_MAX + 1) * sizeof *all, err) : NULL;
  if (!all) return false;
  *count = 0;
  all[(*count)++] = argv[0];
  for (char *line = copy; line;) {
    char *end = strchr(line, '\n'), *option;
    size_t name_n;
    if (end) *end = 0;
    if (++lines > LINES_MAX) return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(file, NULL), "more than %d lines", LINES_MAX);
    if (!read_line(a, file, line, lines, &option, &name_n, err)) return false;
    if (option && !given(argc, argv, option + 2, name_n)) all[(*count)++] = option;
    line = end ? end + 1 : NULL;
  }
  for (int i = 1; i < argc; i++) all[(*count)++] = argv[i];
  *out = all;
  return true;
}
