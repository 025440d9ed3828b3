/* The Hugging Face Hub, where a user may mean a repository of it and a directory is wanted. */
#ifndef MM_FORMATS_HUB_H
#define MM_FORMATS_HUB_H

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fails with MM_BAD_INPUT E_FS_MISSING for a directory that is not there; where the word may be a repository's id or address, the line says
 * how to fetch it, and `then`. False, as all that fails. */
bool mm_hub_absent(const char *given, const char *then, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
