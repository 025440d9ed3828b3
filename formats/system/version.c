/* Which version this is: the number, the commit it was built from, and the GPU code in it. */
#include "formats/system/base.h"

#ifndef MM_COMMIT
#define MM_COMMIT ""
#endif
#ifdef MM_CUDA
#define GPU ", CUDA for " MM_CUDA_ARCH
#else
#define GPU ", no CUDA"
#endif

/* `make` gives the commit; in an archive that git exported, git has written it here. */
static const char exported[] = "$Format:%h$";

const char *mm_version(void) {
  static const char unknown[] = MM_VERSION " (commit unknown" GPU ")", given[] = MM_VERSION " (commit " MM_COMMIT GPU ")";
  static char text[sizeof MM_VERSION + sizeof exported + sizeof GPU + 16];
  if (*MM_COMMIT) return given;
  if (exported[0] == '$') return unknown;
  snprintf(text, sizeof text, MM_VERSION " (commit %s" GPU ")", exported);
  return text;
}
