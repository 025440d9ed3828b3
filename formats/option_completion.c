/* Completions of bash, zsh and fish, from a program's table of options. */
#include <string.h>

#include "formats/option_text.h"

/* Writes s with `|` as spaces, the separator of shell word lists. */
static void put_choices(FILE *f, const char *s) {
  for (; *s; s++) fputc(*s == '|' ? ' ' : *s, f);
}

/* The last word of a program's name. */
static const char *last_word(const mm_program *p) {
  const char *blank = strrchr(p->name, ' ');
  return blank ? blank + 1 : p->name;
}

/* Writes the words that the first operand is one of, with blanks between them: those of p->commands' lines, or of "pack|unpack DIR". False,
 * and nothing is written, where it is any word. */
static bool put_words(FILE *f, const mm_program *p) {
  const size_t n = strcspn(p->operands, " ");
  if (!p->commands && !memchr(p->operands, '|', n)) return false;
  if (!f) return true;
  for (const char *line = p->commands; line && *line; line += *line == '\n') {
    fprintf(f, "%s%.*s", line == p->commands ? "" : " ", (int)strcspn(line, " \n"), line);
    line += strcspn(line, "\n");
  }
  for (size_t i = 0; !p->commands && i < n; i++) fputc(p->operands[i] == '|' ? ' ' : p->operands[i], f);
  if (p->other) fprintf(f, " %s", last_word(p->other));
  return true;
}

/* ---- bash ---- */

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

static void put_bash_options(FILE *f, const mm_program *p) {
  const mm_option *o;
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
  fputs("' -- \"$cur\"))\n", f);
  if (put_words(NULL, p)) {
    fputs("  elif ((COMP_CWORD == 1)); then\n    COMPREPLY=($(compgen -W '", f);
    put_words(f, p);
    fputs("' -- \"$cur\"))\n", f);
  }
  fputs("  else\n    COMPREPLY=()\n  fi\n", f); /* bash's own of files, which quotes their names */
}

void mm_option_bash(const mm_program *p, FILE *f) {
  fprintf(f, "_%s() {\n  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n", p->name);
  fputs("  if [[ $cur == = ]]; then cur=; elif [[ $prev == = ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi\n", f); /* --name=value */
  if (p->commands) put_bash_delegate(f, p->name);
  if (p->other) {
    fprintf(f, "  if ((COMP_CWORD > 1)) && [[ ${COMP_WORDS[1]} == %s ]]; then\n", last_word(p->other));
    put_bash_options(f, p->other);
    fputs("  return\n  fi\n", f);
  }
  put_bash_options(f, p);
  fprintf(f, "}\ncomplete -o default -F _%s %s\n", p->name, p->name);
}

/* ---- zsh ---- */

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

static void put_zsh_options(FILE *f, const mm_program *p) {
  const mm_option *o;
  fputs("_arguments -s \\\n", f);
  for (size_t i = 0; (o = mm_option_next(p, &i)); i++) {
    put_zsh(o, MM_FORMATTED(96, "--%s", o->name), f);
    if (o->alias) put_zsh(o, MM_FORMATTED(96, "--%s", o->alias), f);
    if (o->letter) put_zsh(o, MM_FORMATTED(96, "-%c", o->letter), f);
  }
  if (put_words(NULL, p)) {
    fputs("  '1:word:(", f);
    put_words(f, p);
    fputs(")' \\\n", f);
  }
  fputs("  '*:file:_files'\n", f);
}

void mm_option_zsh(const mm_program *p, FILE *f) {
  fprintf(f, "#compdef %s\n", p->name);
  if (p->commands)
    fprintf(f, "if ((CURRENT > 2)); then\n  words[2]=%s-${words[2]}\n  shift words\n  ((CURRENT--))\n  _normal\n  return\nfi\n", p->name);
  if (p->other) {
    fprintf(f, "if ((CURRENT > 2)) && [[ ${words[2]} == %s ]]; then\nshift words\n((CURRENT--))\n", last_word(p->other));
    put_zsh_options(f, p->other);
    fputs("return\nfi\n", f);
  }
  put_zsh_options(f, p);
}

/* ---- fish ---- */

static void put_fish_options(FILE *f, const char *command, const char *where, const mm_program *p) {
  const mm_option *o;
  for (size_t i = 0; (o = mm_option_next(p, &i)); i++) {
    fprintf(f, "complete -c %s%s -l %s", command, where, o->name);
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

void mm_option_fish(const mm_program *p, FILE *f) {
  char here[128] = "", there[128] = "";
  if (put_words(NULL, p)) {
    fprintf(f, "complete -c %s -n __fish_use_subcommand -f -a '", p->name);
    put_words(f, p);
    fputs("'\n", f);
  }
  if (p->other) {
    snprintf(there, sizeof there, " -n '__fish_seen_subcommand_from %s'", last_word(p->other));
    snprintf(here, sizeof here, " -n 'not __fish_seen_subcommand_from %s'", last_word(p->other));
    put_fish_options(f, p->name, there, p->other);
  }
  if (p->commands) {
    fprintf(
        f,
        "complete -c %s -n 'not __fish_use_subcommand' -f -a '(complete -C (string join -- \" \" %s-(commandline -opc)[2] (string escape "
        "-- (commandline -opc)[3..]) (commandline -ct)))'\n",
        p->name, p->name);
    snprintf(here, sizeof here, " -n __fish_use_subcommand");
  }
  put_fish_options(f, p->name, here, p);
}
