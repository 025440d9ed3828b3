/* The Hugging Face Hub: names of repositories, the folders of its cache, and the commands that fetch. */
#ifndef MM_FORMATS_HUB_H
#define MM_FORMATS_HUB_H

#include <stddef.h>

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the folder of a repository in the Hub's cache to out[cap], and is true, where `given` is the repository's id (ORG/NAME) or
 * address, names no revision but main, and the folder is there. The cache is $HF_HUB_CACHE, $HUGGINGFACE_HUB_CACHE, $HF_HOME/hub,
 * $XDG_CACHE_HOME/huggingface/hub or ~/.cache/huggingface/hub: the first whose variable is set. */
bool mm_hub_cached(const char *given, char *out, size_t cap);

/* Writes to out[cap] how to go on fetching the repository that a folder of the cache, or a snapshot in one, is of: "; hf download ORG/NAME
 * fetches the rest". "" for any other folder. Returns out. */
const char *mm_hub_rest(const char *dir, char *out, size_t cap);

/* Fails with MM_BAD_INPUT E_FS_MISSING for a directory that is not there. Where the word may be a repository's id or address, the line says
 * how to fetch it, and, if `convert`, how to make a packed checkpoint of it. False, as all that fails. */
bool mm_hub_absent(const char *given, bool convert, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
