/* Where a source lies that is named as users name it: a directory, a repository's folder in the Hub's cache, or (which is an error that
 * says how to fetch it) a repository's id or address. */
#ifndef MM_CONVERT_LOCATE_H
#define MM_CONVERT_LOCATE_H

#include "formats/system/base.h"

/* The checkpoint's directory (in *a) for the word that was given: itself, or the snapshot of a "models--ORG--NAME" folder: that of
 * refs/main, or the only one. MM_BAD_INPUT: E_FS_MISSING when there is no such directory or no single snapshot. NULL on
 * failure. */
char *mm_source_locate(const char *given, mm_arena *a, mm_err *err);

#endif
