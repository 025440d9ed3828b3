/* Groups of modules whose integers differ in ways that engines take from the configuration: symmetric or with zero points, columns in the
 * order of their groups or not. */
#ifndef MM_CONVERT_MODULE_GROUPS_H
#define MM_CONVERT_MODULE_GROUPS_H

#include "formats/json.h"
#include "formats/system/base.h"

/* What the configuration says of a module. */
typedef struct mm_module_group {
  bool integers, zeros, symmetric, order; /* has integers; has zero points; all are the middle; has a g_idx */
} mm_module_group;

typedef struct mm_module_groups mm_module_groups;

/* A description of a quantization, and what it says of modules that no rule names. */
typedef struct mm_declaration {
  mm_arena *arena;
  const char *path;
  bool symmetric, order;
} mm_declaration;

/* What compressed-tensors' "weights" of a group say, which are an object; its names are read in any case, as it reads them. */
MM_MUST_USE bool mm_module_group_read(const char *path, const mm_json *weights, mm_module_group *out, mm_err *err);
/* compressed-tensors' config_groups. MM_BAD_INPUT E_Q_CONFIG where targets are not names, "Linear" or regular expressions. */
const mm_module_groups *mm_module_groups_compressed(const mm_declaration *d, const mm_json *groups, mm_err *err);
/* GPTQModel's "dynamic" and AutoRound's "extra_config", rules for single modules, each of which may be NULL; *out is NULL where all modules
 * have the same. */
MM_MUST_USE bool mm_module_groups_rules(const mm_declaration *d, const mm_json *dynamic, const mm_json *extra, const mm_module_groups **out,
                                        mm_err *err);
/* The group of the module whose codes are the tensor at `codes`; MM_BAD_INPUT E_Q_CONFIG where none names it, or several that differ. */
MM_MUST_USE bool mm_module_groups_find(const mm_module_groups *g, const mm_where *codes, mm_module_group *out, mm_err *err);

#endif
