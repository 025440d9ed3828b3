/* Words that name a repository of the Hub, and where its cache has it. */
#include "formats/system/hub.h"

#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ORG/NAME at the start of text, up to a character that ids do not have; its length, 0 when there is none. */
static size_t id_length(const char *text) {
  size_t n = 0, slash = 0;
  for (; isalnum((unsigned char)text[n]) || strchr("-_./", text[n]); n++) {
    if (text[n] == 0) break;
    if (text[n] != '/') continue;
    if (slash || n == 0) break;
    slash = n;
  }
  return slash && n > slash + 1 && text[0] != '.' ? n : 0;
}

/* The id in an address of the Hub or a word that is nothing but an id, and a revision other than main, of an address; NULL when it is
 * neither. */
static const char *repository(const char *given, size_t *n, const char **revision) {
  static const char *const host[] = {
      "https://huggingface.co/", "http://huggingface.co/", "huggingface.co/", "hf.co/", "https://hf.co/", "hf://"};
  static const char tree[] = "/tree/", usual[] = "main";
  *revision = NULL;
  for (size_t i = 0; i < sizeof host / sizeof *host; i++) {
    const char *id = given + strlen(host[i]);
    if (strncmp(given, host[i], strlen(host[i])) != 0 || !(*n = id_length(id))) continue;
    if (strncmp(id + *n, tree, sizeof tree - 1) == 0) *revision = id + *n + sizeof tree - 1;
    const size_t length = *revision ? strspn(*revision, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") : 0;
    if (!length || (length == sizeof usual - 1 && strncmp(*revision, usual, length) == 0)) *revision = NULL;
    return id;
  }
  *n = id_length(given);
  return *n && given[*n] == 0 ? given : NULL;
}

/* The Hub's cache; false where no variable says it. */
static bool cache_folder(char *out, size_t cap) {
  static const struct {
    const char *variable, *below;
  } place[] = {{"HF_HUB_CACHE", ""},
               {"HUGGINGFACE_HUB_CACHE", ""},
               {"HF_HOME", "/hub"},
               {"XDG_CACHE_HOME", "/huggingface/hub"},
               {"HOME", "/.cache/huggingface/hub"}};
  for (size_t i = 0; i < sizeof place / sizeof *place; i++) {
    const char *base = getenv(place[i].variable), *home = "";
    if (!base || !*base) continue;
    if (base[0] == '~' && (base[1] == '/' || !base[1])) base++, home = getenv("HOME") ? getenv("HOME") : "~";
    return (size_t)snprintf(out, cap, "%s%s%s", home, base, place[i].below) < cap;
  }
  return false;
}

bool mm_hub_cached(const char *given, char *out, size_t cap) {
  struct stat st;
  size_t n = 0;
  char cache[PATH_MAX];
  const char *revision, *id = repository(given, &n, &revision), *name = id ? (const char *)memchr(id, '/', n) + 1 : NULL;
  if (!id || revision || !cache_folder(cache, sizeof cache)) return false;
  const int written = snprintf(out, cap, "%s/models--%.*s--%.*s", cache, (int)(name - 1 - id), id, (int)(n - (size_t)(name - id)), name);
  return written > 0 && (size_t)written < cap && stat(out, &st) == 0 && S_ISDIR(st.st_mode);
}

const char *mm_hub_rest(const char *dir, char *out, size_t cap) {
  static const char mark[] = "/models--";
  const char *folder = NULL, *next = dir;
  while ((next = strstr(next, mark))) folder = next += sizeof mark - 1;
  if (!folder && strncmp(dir, mark + 1, sizeof mark - 2) == 0) folder = dir + sizeof mark - 2;
  const char *between = folder ? strstr(folder, "--") : NULL;
  out[0] = 0;
  if (!between) return out;
  const size_t org = (size_t)(between - folder), name = strcspn(between + 2, "/");
  char id[NAME_MAX + 2];
  if (org && name && org + 1 + name < sizeof id) {
    snprintf(id, sizeof id, "%.*s/%.*s", (int)org, folder, (int)name, between + 2);
    if (id_length(id) == strlen(id)) snprintf(out, cap, "; hf download %s fetches the rest", id);
  }
  return out;
}

bool mm_hub_absent(const char *given, bool convert, mm_err *err) {
  char cache[PATH_MAX], folder[PATH_MAX], then[2 * NAME_MAX + 64] = "";
  size_t n = 0;
  const char *revision, *id = repository(given, &n, &revision);
  if (!id) return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL), "no such directory");
  if (convert) snprintf(then, sizeof then, "minimax-convert %.*s -o DIR", (int)mm_min(n, NAME_MAX), id);
  if (convert && mm_hub_cached(given, folder, sizeof folder))
    return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL),
                   "no such directory; the Hugging Face Hub's cache has a source of this name: convert it first: %s", then);
  if (revision)
    return mm_fail(
        err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL),
        "no such directory; if it is meant on the Hugging Face Hub, fetch it first: hf download %.*s --revision %s, which prints "
        "the directory to give",
        (int)n, id, revision);
  const bool found = cache_folder(cache, sizeof cache);
  return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL),
                 "no such directory; if it is meant on the Hugging Face Hub, fetch it first, into its cache%s%s: hf download %.*s%s%s",
                 found ? " " : "", found ? cache : "", (int)n, id, convert ? ", then convert it: " : "", then);
}
