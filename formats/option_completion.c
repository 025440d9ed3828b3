/* Completions of bash, zsh and fish, from a program's table of options. */
#include <string.h>

#include "formats/option_text.h"

/* Writes s with `|` as spaces, the separator of shell word lists. */
static void put_choices(FILE *f, const char *s) {
  for (; *s; s++) fputc(*s == '|' ? ' ' : *s, f);
}

/* The first words of p->commands' lines between before and after, with something between each two; `otherwise` where there are none. */
static void put_commands(FILE *f, const mm_program *p, const char *before, const char *between, const char *after, const char *otherwise) {
  const char *line = p->commands;
  if (!line) {
    fputs(otherwise, f);
    return;
  }
  for (fputs(before, f); *line; line += *line == '\n') {
    fprintf(f, "%s%.*s", line == p->commands ? "" : between, (int)strcspn(line, " \n"), line);
    line += strcspn(line, "\n");
  }
  fputs(after, f);
}

/* Behind a program's word its own completion goes on. */
static void put_bash_delegate(FILE *f, const char *name) {
  fprintf(f,
          "  local program=%s-${COMP_WORDS[1]}\n"
          "  if ((COMP_CWORD > 1)); then\n"
          "    declare -F \"_$program\" >/dev/null || _completion_loader \"$program\" 2>/dev/null\n"
          "    declare -F \"_$program\" >/dev/null || return 0\n"
          "    COMP_WORDS=(\"$program\" \"${COMP_WORDS[@]:2}\")\n"
          "    COMP_CWORD=$((COMP_CWORD - 1))\n"
          "    \"_$program\"\n"
          "    return\n"
          "  fi\n",
          name);
}

void mm_option_bash(const mm_program *p, FILE *f) {
  const mm_option *o;
  fprintf(f, "_%s() {\n  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n", p->name);
  if (p->commands) put_bash_delegate(f, p->name);
  fputs("  case $prev in\n", f);
  for (size_t i = 0; (o = mm_option_next(p, &i)); i++) {
    if (!o->choices) continue;
    fprintf(f, "    --%s%s%s) COMPREPLY=($(compgen -W '", o->name, o->alias ? "|--" : "", o->alias ? o->alias : "");
    put_choices(f, o->choices);
    fputs("' -- \"$cur\")); return ;;\n", f);
  }
  fputs("  esac\n  if [[ $cur == -* ]]; then\n    COMPREPLY=($(compgen -W '", f);
  for (size_t i = 0; (o = mm_option_next(p, &i)); i++) {
    fprintf(f, "--%s ", o->name);
    if (o->alias) fprintf(f, "--%s ", o->alias);
    if (o->letter) fprintf(f, "-%c ", o->letter);
  }
  fputs("' -- \"$cur\"))\n  else\n    COMPREPLY=($(compgen ", f);
  put_commands(f, p, "-W '", " ", "'", "-f");
  fprintf(f, " -- \"$cur\"))\n  fi\n}\ncomplete -o filenames -F _%s %s\n", p->name, p->name);
}

/* Inside single quotes; bytes of `special` get a backslash. */
static void put_quoted(FILE *f, const char *s, const char *special) {
  for (; *s; s++) {
    if (*s == '\'')
      fputs("'\\''", f);
    else
      fprintf(f, "%s%c", strchr(special, *s) ? "\\" : "", *s);
  }
}

static void put_zsh(const mm_option *o, const char *dashed, FILE *f) {
  fprintf(f, "  '%s%s%s[", o->kind == MM_OPT_LIST ? "*" : "", dashed, o->kind == MM_OPT_FLAG ? "" : dashed[1] == '-' ? "=" : "+");
  put_quoted(f, o->help, "[]:\\");
  fputc(']', f);
  if (o->kind != MM_OPT_FLAG) {
    fputc(':', f);
    put_quoted(f, o->arg, "[]:\\");
    fputc(':', f);
    if (o->choices) {
      fputc('(', f);
      put_choices(f, o->choices);
      fputc(')', f);
    } else {
      fputs("_files", f);
    }
  }
  fputs("' \\\n", f);
}

void mm_option_zsh(const mm_program *p, FILE *f) {
  const mm_option *o;
  fprintf(f, "#compdef %s\n_arguments -s \\\n", p->name);
  for (size_t i = 0; (o = mm_option_next(p, &i)); i++) {
    put_zsh(o, MM_FORMATTED(96, "--%s", o->name), f);
    if (o->alias) put_zsh(o, MM_FORMATTED(96, "--%s", o->alias), f);
    if (o->letter) put_zsh(o, MM_FORMATTED(96, "-%c", o->letter), f);
  }
  put_commands(f, p, "  '1:program:(", " ", ")' \\\n", "");
  fputs("  '*:file:_files'\n", f);
}

void mm_option_fish(const mm_program *p, FILE *f) {
  const mm_option *o;
  if (p->commands) fprintf(f, "complete -c %s -n __fish_use_subcommand -f", p->name);
  put_commands(f, p, " -a '", " ", "'\n", "");
  for (size_t i = 0; (o = mm_option_next(p, &i)); i++) {
    fprintf(f, "complete -c %s -l %s", p->name, o->name);
    if (o->alias) fprintf(f, " -l %s", o->alias);
    if (o->letter) fprintf(f, " -s %c", o->letter);
    if (o->kind != MM_OPT_FLAG) fputs(" -r", f);
    if (o->choices) {
      fputs(" -f -a '", f);
      put_choices(f, o->choices);
      fputc('\'', f);
    }
    fputs(" -d '", f);
    put_quoted(f, o->help, "\\");
    fputs("'\n", f);
  }
}
