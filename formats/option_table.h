/* A program's table of options, from which its parser, --help, man page and completions are made. */
#ifndef MM_FORMATS_OPTION_TABLE_H
#define MM_FORMATS_OPTION_TABLE_H

#include "formats/system/base.h"

typedef enum mm_option_kind {
  MM_OPT_FLAG, /* bool* */
  MM_OPT_STR,  /* const char** (borrowed from argv) */
  MM_OPT_WORD, /* the same; its choices are shown and completed, but others are taken too: the program judges them */
  MM_OPT_LIST, /* mm_option_list*: may be repeated */
  MM_OPT_U64,  /* uint64_t*, range checked */
  MM_OPT_SIZE, /* uint64_t* bytes; suffixes K M G T, also as KiB (powers of 1024), KB (powers of 1000) */
  MM_OPT_REAL  /* double* */
} mm_option_kind;

typedef struct mm_option_list {
  const char **item; /* free() it */
  size_t count, cap;
} mm_option_list;

typedef struct mm_option {
  const char *name;  /* "tp" for --tp; long names only have this. NULL: a heading of the help, .help, over the options that follow */
  const char *alias; /* another long name ("tensor-parallel-size"), or NULL */
  char letter;       /* short form, or 0; not h, which is --help */
  mm_option_kind kind;
  void *target;
  const char *arg;     /* metavariable in the help, NULL for flags */
  const char *help;    /* one line; "%" is literal */
  const char *choices; /* "none|bf16|block_fp8" checked by the parser, or NULL */
  uint64_t lo, hi;     /* MM_OPT_U64 range, both inclusive; hi 0 means no limit. MM_OPT_SIZE has lo alone */
} mm_option;

/* Rows of a table. Behind the explanation more of the row may stand, by name: .letter, .alias, .choices, .lo, .hi. */
#define MM_FLAG(word, to, ...) \
  { .name = word, .kind = MM_OPT_FLAG, .target = to, .help = __VA_ARGS__ }
#define MM_OPTION(type, word, to, what, ...) \
  { .name = word, .kind = MM_OPT_##type, .target = to, .arg = what, .help = __VA_ARGS__ }

typedef struct mm_program {
  const char *name;     /* "minimax-convert" */
  const char *summary;  /* one line */
  const char *operands; /* "SRC -o DIR" */
  unsigned min_operands, max_operands;
  const mm_option *options;
  size_t option_count;
  const char *epilog;             /* notes, and behind them "Exit status: 0 done, 2 usage."; may be NULL */
  const char *commands;           /* the words that the first operand is one of, each before its purpose, a line each; may be NULL */
  const char *examples;           /* three command lines; may be NULL */
  const char *files;              /* of the man page: what it reads and writes, a line each; may be NULL */
  const struct mm_program *other; /* what the first operand leads to where it is the last word of this one's name; may be NULL */
  bool (*may_end)(mm_err *err);   /* whether it may end where --help or its like was all; may be NULL: it may */
  bool (*agreed)(bool parsed, mm_err *err); /* whether all processes took the command line; may be NULL: `parsed`, if this one did */
} mm_program;

/* The fields of an mm_program: its name and line, its operands in words, how many they are, its table. */
#define MM_PROGRAM(word, line, operand_words, least, most, table)                                                          \
  .name = word, .summary = line, .operands = operand_words, .min_operands = least, .max_operands = most, .options = table, \
  .option_count = sizeof(table) / sizeof *(table)

#endif
