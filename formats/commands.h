/* The programs, in the order in which a user meets them. */
#ifndef MM_FORMATS_COMMANDS_H
#define MM_FORMATS_COMMANDS_H

#include <stdbool.h>
#include <stddef.h>

typedef struct mm_command {
  const char *word;    /* "convert" of minimax-convert */
  const char *purpose; /* one line */
} mm_command;

extern const mm_command mm_commands[];
extern const size_t mm_command_count;

/* The edits (a letter added, left out or replaced, two neighbours exchanged) that make a[0, n) of b[0, m); more than 64 letters count as
 * 64. */
unsigned mm_edits(const char *a, size_t n, const char *b, size_t m);
/* True if a name of m letters is near enough to a word of n, at so many edits, to be meant. */
bool mm_edits_few(unsigned edits, size_t n);

#endif
