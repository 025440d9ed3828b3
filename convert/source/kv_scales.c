/* Names of KV-cache scales (after vLLM's and SGLang's loaders). */
#include "convert/source/kv_scales.h"

#include <string.h>

static const struct {
  const char *theirs, *canonical;
} alias[] = {
    {"k_proj.k_scale", "k_scale"},
    {"v_proj.v_scale", "v_scale"},
    {"qkv_proj.k_scale", "k_scale"},
    {"qkv_proj.v_scale", "v_scale"},
    {"k_proj.output_scale", "k_scale"},
    {"v_proj.output_scale", "v_scale"},
    {"k_cache.scale", "k_scale"},
    {"v_cache.scale", "v_scale"},
    {"attn.q_scale", "q_scale"},
    {"attn.k_scale", "k_scale"},
    {"attn.v_scale", "v_scale"},
    {"attn.kv_scale", "kv_scale"},
    {"k_proj.k_zero_point", "k_zero_point"},
    {"v_proj.v_zero_point", "v_zero_point"},
    {"qkv_proj.k_zero_point", "k_zero_point"},
    {"qkv_proj.v_zero_point", "v_zero_point"},
    {"attn.k_zero_point", "k_zero_point"},
    {"attn.v_zero_point", "v_zero_point"},
};

const char *mm_kv_spelling(const char *rest) {
  for (size_t i = 0; i < sizeof alias / sizeof *alias; i++)
    if (strcmp(rest, alias[i].theirs) == 0) return alias[i].canonical;
  return NULL;
}
