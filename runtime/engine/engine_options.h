/* Options of the programs that open an engine or keep weights on devices: one name, one help. `at` is where the value goes. */
#ifndef MM_RUNTIME_ENGINE_OPTIONS_H
#define MM_RUNTIME_ENGINE_OPTIONS_H

#include <math.h>

#include "formats/option.h"
#include "runtime/engine/ops.h"

#define MM_OPTION_DEVICE(at)  MM_OPTION(STR, "device", at, "NAME", "where to compute, cpu unless given", .choices = MM_DEVICES)
#define MM_OPTION_DEVICES(at) MM_OPTION(STR, "devices", at, "LIST", "numbers of the GPUs, one for each rank of this process (0,1,2,...)")
#define MM_OPTION_ATTACH(at)  MM_OPTION(STR, "attach", at, "SOCKET", "use the weights that minimax-hold keeps on the GPUs")
#define MM_OPTION_VERIFY(at)  MM_FLAG("verify-on-load", at, "check the digests of all weights while they are loaded")
#define MM_OPTION_UTILIZATION(at)                  \
  MM_OPTION(                                       \
      REAL, "gpu-memory-utilization", at, "SHARE", \
      "share of a GPU's memory for weights, buffers and KV cache (0.9); on cpu, share of RAM for KV cache and lightning states (0.5)")
#define MM_OPTION_THREADS(at) \
  MM_OPTION(U64, "threads", at, "N", "CPU threads per rank (CPUs / ranks, both of this process)", .letter = 't', .lo = 1, .hi = 1024)
#define MM_OPTION_PIN(at) MM_FLAG("pin", at, "keep each of them on a CPU of its own")
#define MM_OPTION_INPUT_DTYPE(at)                                                                                             \
  MM_OPTION(STR, "input-dtype", at, "TYPE",                                                                                   \
            "of inputs of linears that --act-quant leaves as they are (auto: the device's own, f32 on cpu and bf16 on cuda)", \
            .choices = "auto|bf16")
#define MM_OPTION_KV_CACHE(at)                                                                                    \
  MM_OPTION(STR, "kv-cache-dtype", at, "TYPE",                                                                    \
            "of cached keys and values, fp8 on cuda: e4m3 (auto: the device's own, f32 on cpu and bf16 on cuda)", \
            .choices = "auto|bf16|fp8")

/* share: the value of MM_OPTION_UTILIZATION, NAN: not given. MM_USAGE E_USAGE if it is not a valid fraction. */
static inline bool mm_utilization_check(double share, mm_err *err) {
  return isnan(share) || (share > 0 && share <= 1) ||
         mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--gpu-memory-utilization: found %g, expected more than 0 and at most 1",
                 share);
}

/* The last line of their help. */
#define MM_ENGINE_STATUSES \
  "Exit status: 0 done, 2 usage, 3 bad tokenizer or config, 4 unsupported, 5 I/O, 6 damaged checkpoint, 8 memory or limit."

#endif
