/* Completions of bash, zsh and fish, from a program's table of options. */
#include <string.h>

#include "formats/option_text.h"

/* Writes s with `|` as spaces, the separator of shell word lists. */
static void put_choices(FILE *f, const char *s) {
  for (; *s; s++) fputc(*s == '|' ? ' ' : *s, f);
}

void mm_option_bash(const mm_program *p, FILE *f) {
  const mm_option *o;
  fprintf(f, "_%s() {\n  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n  case $prev in\n", p->name);
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
  fprintf(f, "' -- \"$cur\"))\n  else\n    COMPREPLY=($(compgen -f -- \"$cur\"))\n  fi\n}\ncomplete -o filenames -F _%s %s\n", p->name,
          p->name);
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
    char dashed[96];
    snprintf(dashed, sizeof dashed, "--%s", o->name);
    put_zsh(o, dashed, f);
    if (o->alias) {
      snprintf(dashed, sizeof dashed, "--%s", o->alias);
      put_zsh(o, dashed, f);
    }
    if (o->letter) {
      snprintf(dashed, sizeof dashed, "-%c", o->letter);
      put_zsh(o, dashed, f);
    }
  }
  fputs("  '*:file:_files'\n", f);
}

void mm_option_fish(const mm_program *p, FILE *f) {
  const mm_option *o;
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
