/* The table of GPUs (cards.h). Sizes and compute capabilities are NVIDIA's. */
#include "loader/stream/cards.h"

#include <ctype.h>
#include <stdio.h>

#include "formats/option.h"

#define GB(n)    ((uint64_t)(n)*UINT64_C(1000000000))
#define HOPPER   "kernels of sm_90a"
#define NATIVE   "portable kernels (code of sm_80)"
#define PTX      "portable kernels (PTX of compute_90), no FP4 products of the device"
#define IN_PTX   "as PTX of compute_80 on H100 and H200"
#define IN_99_KB IN_PTX WITH_99
#define IN_90    "as code of compute_90 on H200"
#define WITH_99  " with 99 KB of shared memory for a block"
#define TOO_OLD  "the kernels need sm_80 or newer"

static const mm_gpu_card cards[] = {
    {"A100-40GB", GB(40), 80, NATIVE, IN_PTX},
    {"A100-80GB", GB(80), 80, NATIVE, IN_PTX},
    {"RTX-3090", GB(24), 86, NATIVE, IN_99_KB},
    {"RTX-4090", GB(24), 89, NATIVE, IN_99_KB},
    {"RTX-5090", GB(32), 120, PTX, IN_90 WITH_99},
    {"RTX-6000-Ada", GB(48), 89, NATIVE, IN_99_KB},
    {"RTX-PRO-6000", GB(96), 120, PTX, IN_90 WITH_99},
    {"L40S", GB(48), 89, NATIVE, IN_99_KB},
    {"H100", GB(80), 90, HOPPER, "on this card"},
    {"H200", GB(141), 90, HOPPER, "on this card"},
    {"H20", GB(96), 90, HOPPER, "on H100 and H200"},
    {"B200", GB(180), 100, PTX, IN_90},
    {"V100", GB(32), 70, NULL, TOO_OLD},
    {"T4", GB(16), 75, NULL, TOO_OLD},
};

const mm_gpu_card *mm_gpu_card_at(size_t i) { return i < sizeof cards / sizeof *cards ? &cards[i] : NULL; }

/* Letters and digits alike, whatever their case and what stands between them. */
static bool same_name(const char *a, const char *b) {
  for (;; a++, b++) {
    while (*a == ' ' || *a == '-' || *a == '_') a++;
    while (*b == ' ' || *b == '-' || *b == '_') b++;
    if (tolower((unsigned char)*a) != tolower((unsigned char)*b)) return false;
    if (!*a) return true;
  }
}

bool mm_gpu_card_parse(mm_gpu_card *out, const char *text, mm_err *err) {
  uint64_t bytes;
  for (size_t i = 0; i < sizeof cards / sizeof *cards; i++) {
    if (!same_name(cards[i].name, text)) continue;
    *out = cards[i];
    return true;
  }
  if (mm_option_size(text, &bytes) && bytes > 0) {
    *out = (mm_gpu_card){.bytes = bytes};
    return true;
  }
  char names[256] = "", shown[160];
  for (size_t i = 0, at = 0; i < sizeof cards / sizeof *cards && at < sizeof names; i++)
    at += (size_t)snprintf(names + at, sizeof names - at, ", %s", cards[i].name);
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--gpu-memory: found \"%s\", expected bytes, as in 80G or 80GB%s",
                 mm_show(shown, sizeof shown, text), names);
}
