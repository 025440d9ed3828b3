/* Global scales of NVFP4 that are kept: one for all matrices of a packed tensor, and their numbers in the source (planner.c). */
#ifndef MM_CONVERT_GLOBAL_SCALES_H
#define MM_CONVERT_GLOBAL_SCALES_H

#include "convert/decode/decode.h"
#include "convert/plan/plan.h"

/* Of a tensor whose scheme is chosen. MM_UNSUPPORTED E_Q_KEEP where the recipe names none and no global scale keeps the numbers of all its
 * matrices, E_FOLLOW where a download has reciprocals of them. Sets the steps of its global scales in pt->matrix and t->step. */
MM_MUST_USE bool mm_plan_global_scales(mm_plan *p, mm_decoder *source, mm_plan_tensor *pt, mm_pack_tensor *t, size_t matrices, mm_err *err);

#endif
