/* How much memory this process may use. */
#ifndef MM_FORMATS_MEMORY_H
#define MM_FORMATS_MEMORY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes: the machine's memory, or less where a control group (version 1 or 2) of this process or above it sets a limit; page cache counts
 * against either. */
uint64_t mm_memory_limit(void);
/* The same with other places: `groups` has the lines of /proc/self/cgroup (number:controllers:path), `root` the hierarchies of
 * /sys/fs/cgroup. A file that cannot be read sets no limit. */
uint64_t mm_memory_limit_of(uint64_t machine, const char *groups, const char *root);
/* Bytes of it that nobody uses, or page cache that is given up for other uses. */
uint64_t mm_memory_left(void);
uint64_t mm_memory_left_of(uint64_t machine, const char *groups, const char *root); /* machine: what the machine has left */
/* The name of this boot of the machine, which all processes that share its memory have in common; all zero bytes where it has none. */
typedef struct mm_boot {
  char name[40];
} mm_boot;
mm_boot mm_boot_name(void);

#ifdef __cplusplus
}
#endif
#endif
