/* Finds the directory of a source: a path, or a name in the Hub's cache, with or without a revision. */
#include "convert/source/locate.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/system/file.h"
#include "formats/system/hub.h"

#define REVISION_MAX 256

/* True for a broken link too. */
MM_OWN_FRAME static bool holds(const char *dir, const char *name) {
  struct stat st;
  return lstat(mm_path_of(dir, name).text, &st) == 0;
}

/* The revision that refs/main names; "" where the file is absent. One that is not here is no reason to take another. */
MM_OWN_FRAME static bool main_revision(const char *dir, char out[REVISION_MAX], mm_err *err) {
  const mm_path path = mm_path_of(dir, "refs/main");
  size_t n = 0;
  out[0] = 0;
  if (!holds(dir, "refs/main")) return true;
  char *text = mm_file_slurp(path.text, REVISION_MAX - 1, &n, err);
  if (!text) return false;
  while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r')) n--; /* all of the file is the name, NUL bytes too */
  const bool named = n > 0 && strspn(text, "0123456789abcdef") == n;
  if (named) snprintf(out, REVISION_MAX, "%.*s", (int)n, text);
  const char *shown = MM_ESCAPED_BYTES(4 * REVISION_MAX, text, n);
  free(text);
  if (named && mm_is_dir(mm_path_of(mm_path_of(dir, "snapshots").text, out).text)) return true;
  return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(path.text, NULL),
                 "found revision \"%s\", of which there is no snapshot: fetch it again, or give one of snapshots/ by its name", shown);
}

/* The number of snapshots; the last one's name goes to out. */
MM_OWN_FRAME static bool snapshots(const char *dir, size_t *count, char out[REVISION_MAX], mm_err *err) {
  const mm_path path = mm_path_of(dir, "snapshots");
  *count = 0;
  DIR *d = opendir(path.text);
  if (!d) return errno == ENOENT || mm_fail_errno(err, mm_at(path.text, NULL), "list", errno);
  bool ok;
  const char *name;
  while ((ok = mm_dir_next(d, path.text, &name, err)) && name)
    if (name[0] != '.' && strlen(name) < REVISION_MAX) {
      ++*count;
      memcpy(out, name, strlen(name) + 1);
    }
  closedir(d);
  return ok;
}

/* A download that has not come as far as config.json. */
static char *complete(char *dir, mm_err *err) {
  char rest[NAME_MAX + 64];
  if (!dir || holds(dir, "config.json")) return dir;
  mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(dir, NULL), "found no config.json%s", mm_hub_rest(dir, rest, sizeof rest));
  return NULL;
}

char *mm_source_locate(const char *given, mm_arena *a, mm_err *err) {
  char revision[REVISION_MAX], cached[PATH_MAX];
  struct stat st;
  if (stat(given, &st) != 0) {
    if (!mm_hub_cached(given, cached, sizeof cached)) {
      mm_hub_absent(given, false, err);
      return NULL;
    }
    given = cached;
    if (stat(given, &st) != 0) {
      mm_fail_errno(err, mm_at(given, NULL), "find", errno);
      return NULL;
    }
  }
  if (!S_ISDIR(st.st_mode)) {
    mm_fail(err, MM_BAD_INPUT, "E_FS_TYPE", mm_at(given, NULL), "it is no directory, expected a checkpoint's");
    return NULL;
  }
  if (holds(given, "config.json") || !holds(given, "snapshots")) return mm_arena_strndup(a, given, strlen(given), err);
  if (!main_revision(given, revision, err)) return NULL;
  if (!revision[0]) {
    size_t count;
    if (!snapshots(given, &count, revision, err)) return NULL;
    if (count != 1) {
      mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL),
              "found %zu snapshots and no refs/main for one, expected one of snapshots/ by its name", count);
      return NULL;
    }
  }
  return complete(mm_arena_printf(a, err, "%s/snapshots/%s", given, revision), err);
}
