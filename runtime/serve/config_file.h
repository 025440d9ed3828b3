/* Options from a file: a line `name value`, `name=value` or, of a flag, `name`; # begins a comment. */
#ifndef MM_RUNTIME_SERVE_CONFIG_FILE_H
#define MM_RUNTIME_SERVE_CONFIG_FILE_H

#include "formats/option_table.h"

/* Where argv has --config FILE, its options are put before the others, but for those that argv has too. *out[*count] lies in the arena as
 * far as it is new; without --config it is argv. MM_USAGE E_USAGE for a line that is no option or is config, and for a NUL byte; and
 * what reading the file gives. */
MM_MUST_USE bool mm_config_file(const mm_program *p, mm_arena *a, int argc, char **argv, int *count, char ***out, mm_err *err);
/* An error about an option of the file that was read, and is found only when all options are known, has the file and the line put before
 * it. Returns false. */
bool mm_config_named(mm_err *err);

#endif
