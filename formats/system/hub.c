/* Words that name a repository of the Hub, and where its cache has it. */
#include "formats/system/hub.h"

#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
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

/* What an address names besides its repository. */
typedef struct hub_revision {
  const char *text; /* NULL: main, named or not */
  int n;
  const char *folder; /* of the repository, folder_n bytes; NULL: its root */
  int folder_n;
} hub_revision;

/* The name ends as a file's does (".json"), which that of a folder ("v1.0", "M2.5-FP8") does not. */
static bool has_extension(const char *name, size_t n) {
  const char *end = name + n, *dot = memrchr(name, '.', n), *p = dot ? dot + 1 : end;
  if (p == end || !isalpha((unsigned char)*p)) return false;
  while (p < end && isalnum((unsigned char)*p)) p++;
  return p == end;
}

/* The folder that a path within a repository leads to: all of it, or what is before a file's name. */
static void name_folder(hub_revision *r, const char *path, bool is_folder) {
  size_t n = strcspn(path, "?#");
  for (; n > 0 && path[n - 1] == '/'; n--) is_folder = true;
  const char *last = memrchr(path, '/', n);
  const size_t name = last ? (size_t)(last + 1 - path) : 0;
  if (!is_folder && has_extension(path + name, n - name)) n = last ? (size_t)(last - path) : 0;
  if (n > 0) r->folder = path, r->folder_n = (int)mm_min(n, NAME_MAX);
}

/* The revision and folder that the rest of an address names, as the Hub's pages and HfFileSystem write them: "/tree/REV/FOLDER" and its
 * like, "@REV", "?revision=REV". path_follows: one within the repository may follow its name. */
static hub_revision revision_in(const char *rest, bool path_follows) {
  static const char *const page[] = {"/tree/", "/blob/", "/resolve/", "/raw/", "/commit/", "/commits/", "@"};
  static const char discussions[] = "/discussions/", usual[] = "main", query[] = "revision=", pull[] = "refs/",
                    characters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-%/";
  const char *text = NULL, *within = NULL;
  hub_revision out = {0};
  for (size_t i = 0; !text && i < sizeof page / sizeof *page; i++)
    if (strncmp(rest, page[i], strlen(page[i])) == 0) text = within = rest + strlen(page[i]);
  /* Pages to edit, upload and compare, too. */
  if (!text && !path_follows && *rest == '/' && strncmp(rest, discussions, sizeof discussions - 1) != 0) {
    const char *const end = rest + 1 + strcspn(rest + 1, "/?#");
    if (*end == '/') text = within = end + 1;
  }
  if (within) within += strcspn(within, "/?#");
  if (!within && path_follows && *rest == '/') name_folder(&out, rest + 1, false);
  if (within && *within == '/') name_folder(&out, within + 1, strncmp(rest, page[0], strlen(page[0])) == 0);
  for (const char *p = rest + strcspn(rest, "?#"); *p && *p != '#'; p += strcspn(p, "&#")) /* parameters, which say more */
    if (strncmp(++p, query, sizeof query - 1) == 0) text = p + sizeof query - 1;
  if (!text) return out;
  size_t n = strspn(text, characters);
  if (strncmp(text, pull, sizeof pull - 1) != 0) n = mm_min(n, strcspn(text, "/")); /* a file's path follows */
  const bool is_main = n == 0 || (n == sizeof usual - 1 && strncmp(text, usual, n) == 0);
  if (!is_main) out.text = text, out.n = (int)mm_min(n, NAME_MAX);
  return out;
}

/* What follows the Hub's name in an address; NULL where there is none. */
static const char *past_host(const char *given, bool *path_follows) {
  static const char *const host[] = {
      "https://huggingface.co/", "http://huggingface.co/", "huggingface.co/", "hf.co/", "https://hf.co/", "http://hf.co/", "hf://"};
  for (size_t i = 0; i < sizeof host / sizeof *host; i++) {
    if (strncmp(given, host[i], strlen(host[i])) != 0) continue;
    *path_follows = strncmp(host[i], "hf:", 3) == 0;
    return given + strlen(host[i]);
  }
  return NULL;
}

/* The kind of what an address names that is no model, as the address has it; NULL for all else. */
static const char *other_kind(const char *given) {
  static const char *const kind[] = {"datasets", "spaces", "collections"};
  bool path_follows;
  const char *at = past_host(given, &path_follows);
  for (size_t i = 0; at && i < sizeof kind / sizeof *kind; i++)
    if (strncmp(at, kind[i], strlen(kind[i])) == 0 && at[strlen(kind[i])] == '/') return kind[i];
  return NULL;
}

/* The id in an address of the Hub or a word that is nothing but an id, slashes behind it left out, and a revision other than main, of an
 * address; NULL when it is neither, or the address of no model. */
static const char *repository(const char *given, size_t *n, hub_revision *revision) {
  bool path_follows = false;
  const char *id = past_host(given, &path_follows);
  *revision = (hub_revision){0};
  if (other_kind(given)) return NULL;
  if (id && (*n = id_length(id))) {
    *revision = revision_in(id + *n, path_follows);
    return id;
  }
  *n = id_length(given);
  return *n && given[*n + strspn(given + *n, "/")] == 0 ? given : NULL;
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
  hub_revision revision;
  const char *id = repository(given, &n, &revision), *name = id ? (const char *)memchr(id, '/', n) + 1 : NULL;
  if (!id || revision.text || revision.folder || !cache_folder(cache, sizeof cache)) return false;
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

/* The revision with the slashes that an address has as %2F: hf download would encode its % again. */
static void plain_revision(const hub_revision *r, char out[NAME_MAX + 1]) {
  size_t n = 0;
  for (int i = 0; i < r->n; i++) {
    const bool slash = r->n - i >= 3 && strncasecmp(r->text + i, "%2f", 3) == 0;
    out[n++] = slash ? '/' : r->text[i];
    if (slash) i += 2;
  }
  out[n] = 0;
}

bool mm_hub_absent(const char *given, bool convert, mm_err *err) {
  char cache[PATH_MAX], folder[PATH_MAX], then[2 * NAME_MAX + 64] = "";
  size_t n = 0;
  hub_revision revision;
  const char *id = repository(given, &n, &revision), *kind = other_kind(given);
  if (kind)
    return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL),
                   "no such directory; the address is one of the Hugging Face Hub's %s, expected that of a model", kind);
  if (!id) return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL), "no such directory");
  if (convert) snprintf(then, sizeof then, "minimax-convert %.*s -o DIR", (int)mm_min(n, NAME_MAX), id);
  if (convert && mm_hub_cached(given, folder, sizeof folder))
    return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL),
                   "no such directory; the Hugging Face Hub's cache has a source of this name: convert it first: %s", then);
  if (revision.text) {
    char name[NAME_MAX + 1];
    plain_revision(&revision, name);
    return mm_fail(
        err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL),
        "no such directory; if it is meant on the Hugging Face Hub, fetch it first: hf download %.*s --revision %s, which prints "
        "the directory to give",
        (int)n, id, name);
  }
  if (revision.folder)
    return mm_fail(
        err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL),
        "no such directory; if it is the folder \"%s\" of a repository on the Hugging Face Hub, fetch it first: hf download %.*s, "
        "which prints the directory that has it",
        MM_ESCAPED_BYTES(4 * NAME_MAX, revision.folder, (size_t)revision.folder_n), (int)n, id);
  const bool found = cache_folder(cache, sizeof cache);
  return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL),
                 "no such directory; if it is meant on the Hugging Face Hub, fetch it first, into its cache%s%s: hf download %.*s%s%s",
                 found ? " " : "", found ? cache : "", (int)n, id, convert ? ", then convert it: " : "", then);
}
