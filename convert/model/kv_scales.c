/* Names of KV-cache scales (after vLLM's and SGLang's loaders). */
#include "convert/model/kv_scales.h"

#include <string.h>

static const struct {
  const char *canonical, *theirs[6];
} names[] = {
    {"q_scale", {"attn.q_scale"}},
    {"kv_scale", {"attn.kv_scale"}},
    {"k_scale", {"k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale", "k_cache.scale", "attn.k_scale"}},
    {"v_scale", {"v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale", "v_cache.scale", "attn.v_scale"}},
    {"k_zero_point", {"k_proj.k_zero_point", "qkv_proj.k_zero_point", "attn.k_zero_point"}},
    {"v_zero_point", {"v_proj.v_zero_point", "qkv_proj.v_zero_point", "attn.v_zero_point"}},
};

const char *mm_kv_suffix_of(const char *rest) {
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    for (const char *const *theirs = names[i].theirs; *theirs; theirs++)
      if (strcmp(rest, *theirs) == 0) return names[i].canonical;
  return NULL;
}
