/* API keys that do not stand on the command line, where every user of the machine could read them. */
#ifndef MM_RUNTIME_SERVE_KEY_FILE_H
#define MM_RUNTIME_SERVE_KEY_FILE_H

#include "formats/option.h"

/* Adds to the keys of the command line that of the environment's MINIMAX_API_KEY, where it is set, and those of the file at `path` (NULL:
 * no file), one a line. Empty lines count for nothing. Texts are in *a. MM_USAGE E_USAGE where a key, given in whichever way, is empty or
 * holds bytes that a header cannot carry; MM_BAD_INPUT E_KEY for a file without keys. No error shows a key. */
MM_MUST_USE bool mm_keys_gather(mm_option_list *keys, const char *path, mm_arena *a, mm_err *err);

#endif
