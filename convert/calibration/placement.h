/* Placement of experts on the ranks of --ep by their load, which a server collected. */
#ifndef MM_CONVERT_PLACEMENT_H
#define MM_CONVERT_PLACEMENT_H

#include "formats/pack.h"

/* experts[layers, E]: the experts of each layer by their index in a stack (mm_expert_order); a layer's entry of `moved` is false where they
 * stay in order of their ids. Memory of the pack's arena. */
typedef struct mm_placement {
  uint32_t *experts;
  bool *moved;
  double before, after; /* load of the fullest group over the mean of groups, weighted by the layers' loads: unplaced, and placed */
} mm_placement;

/* Reads a load file (docs/converting.md) and places the experts of each layer on p->ep groups of equally many: the expert of the largest
 * load first, to the group of the smallest load that has room; of equal ones the lower id and the lower group. Within a group experts
 * ascend. A layer stays as it is where this is no better. p has model, tp and ep. MM_USAGE with ep 1; MM_BAD_INPUT E_LOAD for a file that
 * is malformed or of another model. */
MM_MUST_USE bool mm_placement_open(mm_placement *out, mm_pack *p, const char *path, mm_err *err);

#endif
