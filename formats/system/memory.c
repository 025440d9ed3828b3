/* Limits of control groups (memory.h). Source: the kernel's admin-guide, cgroup-v2 (memory.max, memory.current, memory.stat) and
 * cgroup-v1/memory (memory.limit_in_bytes, memory.usage_in_bytes, memory.stat); proc(5) for MemAvailable. */
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

/* The number of a line "NAME …: NUMBER" or "NAME NUMBER" of a file; 0 where there is none. */
static uint64_t line_of(const char *path, const char *name) {
  FILE *f = fopen(path, "re");
  char text[200];
  uint64_t v = 0;
  const size_t n = strlen(name);
  while (f && fgets(text, sizeof text, f))
    if (strncmp(text, name, n) == 0 && (text[n] == ' ' || text[n] == ':')) v = strtoull(text + n + 1, NULL, 10);
  if (f) fclose(f);
  return v;
}

/* Files of a version of control groups. */
typedef struct group_files {
  const char *limit, *usage, *cache[2]; /* cache: lines of memory.stat, page cache that is given up for other uses */
} group_files;
static const group_files version_1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}},
                         version_2 = {"memory.max", "memory.current", {"inactive_file", "active_file"}};

/* A group's limit, or what is left of it. */
static uint64_t limit_of(const char *group, const group_files *f, bool left) {
  const uint64_t limit = number_in(mm_path_of(group, f->limit).text);
  if (limit == UINT64_MAX || !left) return limit;
  const uint64_t usage = number_in(mm_path_of(group, f->usage).text);
  if (usage == UINT64_MAX) return limit;
  uint64_t cache = 0;
  for (size_t i = 0; i < 2; i++) cache += line_of(mm_path_of(group, "memory.stat").text, f->cache[i]);
  return limit - mm_min(limit, usage - mm_min(usage, cache));
}

/* The least of a group's limit and those of the groups above it. In a container the path may be the host's: the hierarchy's own root then
 * has the container's limit. */
static uint64_t least(const char *root, const char *path, const group_files *f, bool left) {
  char group[4096];
  uint64_t limit = UINT64_MAX;
  int n = snprintf(group, sizeof group, "%s%s", root, path);
  if (n < 0 || (size_t)n >= sizeof group) return limit;
  for (size_t end = (size_t)n; end >= strlen(root); end--) {
    if (group[end] && group[end] != '/') continue;
    group[end] = 0;
    limit = mm_min(limit, limit_of(group, f, left));
    if (end == 0) break;
  }
  return limit;
}

static uint64_t least_of_all(uint64_t machine, const char *groups, const char *root, bool left) {
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
      limit = mm_min(limit, least(root, path, &version_2, left));
      limit = mm_min(limit, least(unified.text, path, &version_2, left));
    } else if (strcmp(controllers, "memory") == 0) {
      limit = mm_min(limit, least(v1.text, path, &version_1, left));
    }
  }
  free(line);
  if (f) fclose(f);
  return limit;
}

uint64_t mm_memory_limit_of(uint64_t machine, const char *groups, const char *root) { return least_of_all(machine, groups, root, false); }
uint64_t mm_memory_left_of(uint64_t machine, const char *groups, const char *root) { return least_of_all(machine, groups, root, true); }

uint64_t mm_memory_left(void) {
  const uint64_t kib = line_of("/proc/meminfo", "MemAvailable");
  return mm_memory_left_of(kib ? kib << 10 : mm_memory_limit(), "/proc/self/cgroup", "/sys/fs/cgroup");
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
