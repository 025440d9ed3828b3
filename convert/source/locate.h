/* The directory of a source that is named as users name it: itself, a repository's folder in the Hub's cache, or a repository's id or
 * address, which is looked up there; where the cache lacks it, the error says how to fetch it. */
#ifndef MM_CONVERT_LOCATE_H
#define MM_CONVERT_LOCATE_H

#include "formats/system/base.h"

/* The checkpoint's directory (in *a) for the word that was given: itself, or the snapshot of a "models--ORG--NAME" folder, given by its
 * path or by ORG/NAME: that of refs/main, or the only one. MM_BAD_INPUT: E_FS_MISSING when there is no such directory or no single
 * snapshot. NULL on failure. */
char *mm_source_locate(const char *given, mm_arena *a, mm_err *err);

#endif
