/* The help and the man page of a program, from its table of options. */
#include "formats/option_text.h"

#include <stdlib.h>
#include <string.h>

#include "formats/commands.h"

#define WIDTH     96 /* of the help text */
#define HELP_FROM 30 /* column of the explanations */

static const mm_option builtin[] = {
    {.help = "this program"},
    {.name = "help", .letter = 'h', .help = "print this help"},
    {.name = "version", .help = "print the version"},
};
#define BUILTINS (sizeof builtin / sizeof *builtin)

/* The program's options, then the built-in ones; headings among them. */
/* Row i of the program's table, then the built-in options; headings among them. NULL behind the last. */
static const mm_option *row_at(const mm_program *p, size_t i) {
  if (i < p->option_count) return &p->options[i];
  return i - p->option_count < BUILTINS ? &builtin[i - p->option_count] : NULL;
}

/* The option in row *i or the first one after it, NULL when there is none. */
const mm_option *mm_option_next(const mm_program *p, size_t *i) {
  const mm_option *o;
  while ((o = row_at(p, *i)) && !o->name) ++*i;
  return o;
}

/* Options as users type them: "-o, --output DIR". */
static void left_column(const mm_option *o, char *out, size_t cap) {
  char letter[8] = "    ", alias[96] = "";
  if (o->letter) snprintf(letter, sizeof letter, "-%c, ", o->letter);
  if (o->alias) snprintf(alias, sizeof alias, ", --%s", o->alias);
  snprintf(out, cap, "  %s--%s%s%s%s", letter, o->name, alias, o->arg ? " " : "", o->arg ? o->arg : "");
}

/* Words of `text` from column `at` on, wrapped and indented to HELP_FROM. */
static void put_wrapped(FILE *f, size_t at, const char *text) {
  while (*text) {
    size_t n = strcspn(text, " ");
    if (at > HELP_FROM && at + 1 + n > WIDTH) {
      fprintf(f, "\n%*s", HELP_FROM, "");
      at = HELP_FROM;
    } else if (at > HELP_FROM) {
      fputc(' ', f);
      at++;
    }
    fwrite(text, 1, n, f);
    at += n;
    text += n;
    text += strspn(text, " ");
  }
}

static void print_option(const mm_option *o, FILE *f) {
  char left[256], text[4096];
  left_column(o, left, sizeof left);
  fputs(left, f);
  if (strlen(left) + 2 > HELP_FROM) fputc('\n', f);
  fprintf(f, "%*s", (int)(strlen(left) + 2 > HELP_FROM ? HELP_FROM : HELP_FROM - strlen(left)), "");
  snprintf(text, sizeof text, "%s", o->help);
  if (o->choices && o->kind != MM_OPT_WORD) snprintf(text + strlen(text), sizeof text - strlen(text), " (%s)", o->choices);
  for (const char *c = o->kind == MM_OPT_WORD ? o->choices : NULL; c && *c; c += strcspn(c, "|"), c += *c == '|')
    snprintf(text + strlen(text), sizeof text - strlen(text), "%s%.*s", c == o->choices ? ": " : ", ", (int)strcspn(c, "|"), c);
  put_wrapped(f, HELP_FROM, text);
  fputc('\n', f);
}

/* The help on the environment variables that stand for options of the program, a line each; "" where there are none. */
static const char *environment(const mm_program *p) {
  static const struct {
    const char *option, *text;
  } variable[] = {{"jobs", "MINIMAX_JOBS  the value of --jobs where it is not given"},
                  {"api-key-file", "MINIMAX_API_KEY  a key, as one of --api-key and --api-key-file"},
                  {"chat", "NO_COLOR  if not empty: --chat does not dim the reasoning at a terminal"}};
  const mm_option *o;
  for (size_t i = 0; (o = mm_option_next(p, &i)); i++)
    for (size_t j = 0; j < sizeof variable / sizeof *variable; j++)
      if (strcmp(o->name, variable[j].option) == 0) return variable[j].text;
  return NULL;
}

/* Lines of text, indented. */
static void put_lines(FILE *f, const char *title, const char *text) {
  if (!text) return;
  fprintf(f, "\n%s:\n", title);
  for (size_t n; *text; text += n + (text[n] == '\n')) {
    n = strcspn(text, "\n");
    fprintf(f, "  %.*s\n", (int)n, text);
  }
}

void mm_option_help(const mm_program *p, FILE *f) {
  fprintf(f, "%s: %s\n\nusage: %s %s%s\n", p->name, p->summary, p->name, p->commands ? "" : "[OPTION…] ", p->operands);
  put_lines(f, "programs", p->commands);
  bool grouped = !row_at(p, 0)->name;
  if (!grouped) fputs("\noptions:\n", f);
  const mm_option *o;
  for (size_t i = 0; (o = row_at(p, i)); i++)
    if (o->name)
      print_option(o, f);
    else if (grouped)
      fprintf(f, "\n%s:\n", o->help);
  put_lines(f, "environment", environment(p));
  if (p->epilog) fprintf(f, "\n%s\n", p->epilog);
  put_lines(f, "examples", p->examples);
}

/* roff: backslash, hyphen and a leading control character lose their meaning. */
static void put_roff(FILE *f, const char *s) {
  for (bool start = true; *s; start = *s++ == '\n') {
    if (start && (*s == '.' || *s == '\'')) fputs("\\&", f);
    if (*s == '\\')
      fputs("\\e", f);
    else if (*s == '-')
      fputs("\\-", f);
    else
      fputc(*s, f);
  }
}

static void put_section(FILE *f, const char *title, const char *text) {
  if (!text) return;
  fprintf(f, "\n.SH %s\n.nf\n", title);
  put_roff(f, text);
  fputs("\n.fi", f);
}

/* "0 done, 2 usage." as a list; the end of it. */
static const char *put_statuses(FILE *f, const char *s) {
  const char *end = s + strcspn(s, "\n");
  fputs("\n.SH EXIT STATUS", f);
  while (s < end) {
    size_t digits = strspn(s, "0123456789"), n = digits;
    while (s + n < end && !(s[n] == ',' && s[n + 1] == ' ' && s[n + 2] >= '0' && s[n + 2] <= '9')) n++;
    char *item = strndup(s + digits, n - digits - (s + n == end && end[-1] == '.'));
    fprintf(f, "\n.TP\n%.*s\n", (int)digits, s);
    if (item) put_roff(f, item + strspn(item, " "));
    free(item);
    s += n + (s + n < end ? 2 : 0);
  }
  return *end ? end + 1 : end;
}

/* Writes the notes before the exit statuses, the exit statuses, and the notes behind them. */
static void put_epilog(FILE *f, const char *epilog) {
  static const char mark[] = "Exit status: ";
  const char *statuses = strstr(epilog, mark);
  size_t n = statuses ? (size_t)(statuses - epilog) : strlen(epilog);
  while (n > 0 && epilog[n - 1] == '\n') n--;
  char *before = strndup(epilog, n);
  if (before && n > 0) put_section(f, "NOTES", before);
  free(before);
  const char *rest = statuses ? put_statuses(f, statuses + sizeof mark - 1) : "";
  if (*rest) put_section(f, "NOTES", rest);
}

/* The other programs. */
static void put_see_also(FILE *f, const mm_program *p) {
  fprintf(f, "\n.SH SEE ALSO\n%s", strcmp(p->name, "minimax") == 0 ? "" : ".BR minimax (1),\n");
  for (size_t i = 0, n = 0; i < mm_command_count; i++)
    if (strncmp(p->name, "minimax-", 8) != 0 || strcmp(p->name + 8, mm_commands[i].word) != 0)
      fprintf(f, "%s.BR minimax\\-%s (1)", n++ ? ",\n" : "", mm_commands[i].word);
  fputs("\n", f);
}

void mm_option_man(const mm_program *p, FILE *f) {
  fprintf(f, ".TH %s 1 \"\" \"minimax " MM_VERSION "\" \"User Commands\"\n.SH NAME\n", p->name);
  fprintf(f, "%s \\- ", p->name);
  put_roff(f, p->summary);
  fprintf(f, "\n.SH SYNOPSIS\n.B %s\n%s", p->name, p->commands ? "" : "[OPTION...] ");
  put_roff(f, p->operands);
  fputs("\n.SH OPTIONS", f);
  const mm_option *o;
  for (size_t i = 0; (o = row_at(p, i)); i++) {
    char left[256];
    if (o->name) left_column(o, left, sizeof left);
    fputs(o->name ? "\n.TP\n" : "\n.SS ", f);
    if (o->name) put_roff(f, left + strspn(left, " "));
    if (o->name) fputc('\n', f);
    put_roff(f, o->help);
    if (!o->choices) continue;
    fputs(o->kind == MM_OPT_WORD ? "; known: " : "; one of: ", f);
    put_roff(f, o->choices);
    fputc('.', f);
  }
  put_section(f, "PROGRAMS", p->commands);
  if (p->epilog) put_epilog(f, p->epilog);
  put_section(f, "ENVIRONMENT", environment(p));
  put_section(f, "FILES", p->files);
  put_section(f, "EXAMPLES", p->examples);
  put_see_also(f, p);
}
