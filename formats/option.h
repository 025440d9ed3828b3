/* Command lines from one table: the parser, --help, the man page and the shell completions all read it. */
#ifndef MM_FORMATS_OPTION_H
#define MM_FORMATS_OPTION_H

#include "formats/json.h"
#include "formats/option_table.h"

/* --help, --version and the hidden --help-man, --help-bash, --help-zsh, --help-fish are recognised for every program: the text goes to
 * stdout and *done becomes true (the program then exits 0). Operands are gathered in operands[max_operands]. "--" ends options;
 * --name=value and --name value are equal. Unknown, repeated (except lists) or malformed options are MM_USAGE E_USAGE. Where --jobs is not
 * given, the environment's MINIMAX_JOBS is its value. */
MM_MUST_USE bool mm_options_parse(const mm_program *p, int argc, char **argv, const char **operands, size_t *operand_count, bool *done,
                                  mm_err *err);

/* Reads bytes: digits, then nothing, K, M, G, T or KiB … (powers of 1024), KB … (of 1000). False for anything else. */
bool mm_option_size(const char *text, uint64_t *bytes);

/* Prints "NAME: error: TEXT\n" to stderr in one write and returns the exit status of err (MM_BUG if err holds none). With --json among the
 * arguments the line is an object {"program", "error", "status", "message"}. Where standard output could not be written because its reader
 * is gone, as in "| head", nothing is printed and SIGPIPE ends the process. */
int mm_program_fail(const mm_program *p, const mm_err *err);
/* Flushes standard output; MM_IO E_IO, with the reason, when something of it could not be written. */
MM_MUST_USE bool mm_program_written(mm_err *err);
/* Prints an object to stdout, indented when `pretty`; MM_LIMIT E_MEMORY for a tree with a failure. Frees o. */
MM_MUST_USE bool mm_program_json(mm_json *o, bool pretty, mm_err *err);
/* The whole of a main: starts the program, parses as mm_options_parse does, calls run(args) unless --help or its like was all, and writes
 * what stdout still holds. Returns the exit status; a failure has had its line. */
int mm_program_main(const mm_program *p, int argc, char **argv, const char **operands, bool (*run)(void *args, mm_err *err), void *args);
/* The first step of mm_program_main: ignores SIGPIPE and SIGXFSZ, opens /dev/null on closed descriptors 0–2. */
void mm_program_start(void);
/* The first step of main of programs that run until a signal ends them: ignores SIGALRM, SIGIO, SIGPROF, SIGUSR1, SIGUSR2 and SIGVTALRM,
 * which mean nothing to them and would end them. One that has a handler keeps it. Before any other thread. */
void mm_program_stay(void);
/* All files of the operands are open: from here on an error is said as it is, whatever takes the names of their directories. Any thread. */
void mm_program_opened(void);
/* Fails with MM_LIMIT E_CPU_TIME: what a program that ended on SIGXCPU, the soft limit of CPU time, returns. */
bool mm_program_cpu_time(mm_err *err);
/* Returns true if the process that started this one had it ignore SIGHUP, as nohup does. */
bool mm_program_hangup_ignored(void);

#endif
