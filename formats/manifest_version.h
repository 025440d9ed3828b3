/* The version of a manifest, before and after it is read (manifest.c). */
#ifndef MM_FORMATS_MANIFEST_VERSION_H
#define MM_FORMATS_MANIFEST_VERSION_H

#include "formats/pack.h"

/* Before anything else is understood: whether root is an object of format `wanted` and of a version from 1 to `newest`, else MM_UNSUPPORTED
 * E_VERSION. */
MM_MUST_USE bool mm_manifest_version(const mm_json *root, const char *wanted, int newest, int64_t *version, const mm_json_ctx *c,
                                     mm_err *err);
/* The version is that of what was read, so that one plan has one text. */
MM_MUST_USE bool mm_manifest_right_version(const mm_pack *p, int64_t version, const mm_json_ctx *c, mm_err *err);
/* "left_out" of an extended model into p->left_out: at most MM_LEFT_OUT_MAX prefixes in ascending order, each of some tensor. */
MM_MUST_USE bool mm_manifest_left_out(mm_pack *p, const mm_json *root, const mm_json_ctx *c, mm_err *err);
/* The same of another model, which has none. */
MM_MUST_USE bool mm_manifest_no_left_out(const mm_json *root, const mm_json_ctx *c, mm_err *err);
/* Optional "experts" of version 4 into t->order: the experts of a stack by index, a permutation of all. */
MM_MUST_USE bool mm_manifest_experts(mm_pack *p, mm_pack_tensor *t, const mm_json *j, const mm_json_ctx *c, mm_err *err);
/* Optional "global_steps" of version 5 into t->step, of a tensor whose planes and pieces are read. */
MM_MUST_USE bool mm_manifest_global_steps(mm_pack *p, mm_pack_tensor *t, const mm_json *j, const mm_json_ctx *c, mm_err *err);
/* Optional "attn_tp" of version 4 in "parallel": a divisor of p->tp below it. */
MM_MUST_USE bool mm_manifest_attn_tp(mm_pack *p, const mm_json *parallel, const mm_json_ctx *c, mm_err *err);

#endif
