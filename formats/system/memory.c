/* Limits of control groups (memory.h). Source: the kernel's admin-guide, cgroup-v2 (memory.max) and cgroup-v1/memory
 * (memory.limit_in_bytes). */
#include "formats/system/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/system/base.h"
#include "formats/system/file.h"

/* The number in a file; UINT64_MAX where there is none ("max"). */
static uint64_t number_in(const char *path) {
  char text[32] = "";
  FILE *f = fopen(path, "re"); /* files of the kernel say that their size is 0 */
  if (f && !fgets(text, sizeof text, f)) text[0] = 0;
  if (f) fclose(f);
  char *end;
  const uint64_t v = strtoull(text, &end, 10);
  return end != text ? v : UINT64_MAX;
}

/* The least of a group's limit and those of the groups above it. In a container the path may be the host's: the hierarchy's own root then
 * has the container's limit. */
static uint64_t least(const char *root, const char *path, const char *file) {
  char group[4096];
  uint64_t limit = UINT64_MAX;
  int n = snprintf(group, sizeof group, "%s%s", root, path);
  if (n < 0 || (size_t)n >= sizeof group) return limit;
  for (size_t end = (size_t)n; end >= strlen(root); end--) {
    if (group[end] && group[end] != '/') continue;
    group[end] = 0;
    limit = mm_min(limit, number_in(mm_path_of(group, file).text));
    if (end == 0) break;
  }
  return limit;
}

uint64_t mm_memory_limit_of(uint64_t machine, const char *groups, const char *root) {
  FILE *f = fopen(groups, "re");
  char *line = NULL;
  size_t cap = 0;
  uint64_t limit = machine;
  const mm_path v1 = mm_path_of(root, "memory"), unified = mm_path_of(root, "unified");
  while (f && getline(&line, &cap, f) > 0) {
    line[strcspn(line, "\n")] = 0;
    char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path) continue;
    *path++ = 0;
    controllers++;
    if (!*controllers) { /* version 2, alone or together with version 1 */
      limit = mm_min(limit, least(root, path, "memory.max"));
      limit = mm_min(limit, least(unified.text, path, "memory.max"));
    } else if (strcmp(controllers, "memory") == 0) {
      limit = mm_min(limit, least(v1.text, path, "memory.limit_in_bytes"));
    }
  }
  free(line);
  if (f) fclose(f);
  return limit;
}

uint64_t mm_memory_limit(void) {
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  const uint64_t machine = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : UINT64_MAX;
  return mm_memory_limit_of(machine, "/proc/self/cgroup", "/sys/fs/cgroup");
}

mm_boot mm_boot_name(void) {
  mm_boot boot = {{0}};
  FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
  if (f) mm_either_way(fgets(boot.name, sizeof boot.name, f) != NULL), fclose(f);
  return boot;
}
