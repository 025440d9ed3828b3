/* Options of the programs that open an engine or keep weights on devices: one name, one help. `at` is where the value goes. */
#ifndef MM_RUNTIME_ENGINE_OPTIONS_H
#define MM_RUNTIME_ENGINE_OPTIONS_H

#include <math.h>
#include <string.h>

#include "formats/option.h"
#include "formats/text.h"
#include "runtime/engine/attention_groups.h"
#include "runtime/engine/ops.h"

#define MM_OPTION_DEVICE(at)  MM_OPTION(STR, "device", at, "NAME", "device that computes (cpu)", .choices = MM_DEVICES)
#define MM_OPTION_DEVICES(at) MM_OPTION(STR, "devices", at, "LIST", "numbers of the GPUs, one for each rank of this process (0,1,2,...)")
#define MM_OPTION_ATTACH(at)  MM_OPTION(STR, "attach", at, "SOCKET", "use the weights that minimax-hold keeps on the GPUs")
#define MM_OPTION_VERIFY(at)  MM_FLAG("verify-on-load", at, "check the digests of all weights while they are loaded")
#define MM_OPTION_UTILIZATION(at)                  \
  MM_OPTION(                                       \
      REAL, "gpu-memory-utilization", at, "SHARE", \
      "share of a GPU's memory for weights, buffers and KV cache (0.9); on cpu, share of RAM for KV cache and lightning states (0.5)")
#define MM_OPTION_THREADS(at) \
  MM_OPTION(U64, "threads", at, "N", "CPU threads per rank (CPUs / ranks, both of this process)", .letter = 't', .lo = 1, .hi = 1024)
#define MM_OPTION_PIN(at) MM_FLAG("pin", at, "pin each of --threads to its own CPU")
#define MM_OPTION_INPUT_DTYPE(at)                                                                                          \
  MM_OPTION(STR, "input-dtype", at, "TYPE", "type of activations that are not quantised (auto: f32 on cpu, bf16 on cuda)", \
            .choices = "auto|bf16")
#define MM_OPTION_KV_CACHE(at)                                                                                                            \
  MM_OPTION(STR, "kv-cache-dtype", at, "TYPE", "type of cached keys and values; fp8 is e4m3, cuda only (auto: f32 on cpu, bf16 on cuda)", \
            .choices = "auto|bf16|fp8")
#define MM_OPTION_INDEX_CACHE(at)                                                                                     \
  MM_OPTION(STR, "index-cache-dtype", at, "TYPE",                                                                     \
            "type of M3's cached index keys; fp8 is e4m3 with a scale for each key (auto: f32 on cpu, bf16 on cuda)", \
            .choices = "auto|fp8")

#define MM_OPTION_INDEX_SPLIT(at)                                                                                               \
  MM_OPTION(U64, "index-split", at, "TOKENS",                                                                                   \
            "split the scan of M3's index keys over the ranks for tokens at positions from TOKENS on; the blocks are the same " \
            "(default 0: each rank scans all)",                                                                                 \
            .hi = UINT32_MAX)

/* Options of a run from the words of --kv-cache-dtype and --index-cache-dtype, and from --index-split. */
static inline void mm_cache_options(const char *kv, const char *index, uint64_t split, mm_run_options *o) {
  o->index_split = (uint32_t)split;
  o->kv_fp8 = strcmp(kv, "fp8") == 0, o->kv_bf16 = strcmp(kv, "bf16") == 0, o->index_fp8 = strcmp(index, "fp8") == 0;
}

/* Seven options; `at` is an mm_dummy that began as MM_DUMMY_NONE(mm_arch_read). */
#define MM_OPTIONS_DUMMY(at)                                                                                                          \
  MM_OPTION(STR, "load-format", &(at).format, "WORD", "packed; dummy: random weights, DIR is any folder with a config.json (packed)", \
            .choices = "packed|dummy"),                                                                                               \
      MM_OPTION(STR, "dummy-quant", &(at).quant, "SCHEME", "with --load-format dummy: scheme of linears (block_fp8)"),                \
      MM_OPTION(STR, "dummy-expert-quant", &(at).experts, "SCHEME", "with dummy: scheme of experts (as --dummy-quant)"),              \
      MM_OPTION(U64, "dummy-tp", &(at).tp, "N", "with dummy: tensor-parallel ranks (1)", .lo = 1, .hi = MM_MAX_TP),                   \
      MM_OPTION(U64, "dummy-ep", &(at).ep, "N", "with dummy: expert-parallel ranks, a divisor of --dummy-tp (1)", .lo = 1,            \
                .hi = MM_MAX_TP),                                                                                                     \
      MM_OPTION(U64, "dummy-pp", &(at).pp, "N", "with dummy: pipeline stages (1)", .lo = 1, .hi = MM_MAX_LAYERS),                     \
      MM_OPTION(REAL, "dummy-skew", &(at).skew, "SHARE", "with dummy: routers prefer some experts, from 0 for none to below 1 (0)")

/* share: the value of MM_OPTION_UTILIZATION, NAN: not given. MM_USAGE E_USAGE if it is not a valid fraction. */
static inline bool mm_utilization_check(double share, mm_err *err) {
  char shown[MM_REAL_SHOWN];
  return isnan(share) || (share > 0 && share <= 1) ||
         mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--gpu-memory-utilization: found %s, expected more than 0 and at most 1",
                 mm_real_shown(share, shown));
}

/* The last line of their help. */
#define MM_ENGINE_STATUSES "Exit status: 0 done, 2 usage, 3 bad input, 4 unsupported, 5 I/O, 6 damaged checkpoint, 8 memory or limit."

#endif
