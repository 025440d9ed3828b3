/* Texts that are made from a program's table of options: help, man page, completions, and the answer to an unknown option. */
#ifndef MM_FORMATS_OPTION_TEXT_H
#define MM_FORMATS_OPTION_TEXT_H

#include <stdio.h>

#include "formats/option_table.h"

/* The option in row *i or the first one after it, NULL when there is none. */
const mm_option *mm_option_next(const mm_program *p, size_t *i);

void mm_option_help(const mm_program *p, FILE *f);
void mm_option_man(const mm_program *p, FILE *f);
void mm_option_bash(const mm_program *p, FILE *f);
void mm_option_zsh(const mm_program *p, FILE *f);
void mm_option_fish(const mm_program *p, FILE *f);

/* Gives the option, no flag, this value. */
bool mm_option_set(const mm_option *o, const char *value, mm_err *err);
/* Fails with MM_USAGE E_USAGE: the option (word, with its dashes and perhaps its value) is unknown. The line says its name here where it is
 * an option of another engine, or the nearest name. */
bool mm_option_unknown(const mm_program *p, const char *word, mm_err *err);

#endif
