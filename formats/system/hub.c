/* Words that name a repository of the Hub. */
#include "formats/system/hub.h"

#include <ctype.h>
#include <string.h>

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

/* The id in an address of the Hub or a word that is nothing but an id; NULL when it is neither. */
static const char *repository(const char *given, size_t *n) {
  static const char *const host[] = {
      "https://huggingface.co/", "http://huggingface.co/", "huggingface.co/", "hf.co/", "https://hf.co/", "hf://"};
  for (size_t i = 0; i < sizeof host / sizeof *host; i++)
    if (strncmp(given, host[i], strlen(host[i])) == 0 && (*n = id_length(given + strlen(host[i])))) return given + strlen(host[i]);
  *n = id_length(given);
  return *n && given[*n] == 0 ? given : NULL;
}

bool mm_hub_absent(const char *given, const char *then, mm_err *err) {
  size_t n = 0;
  const char *id = repository(given, &n), *name = id ? memchr(id, '/', n) : NULL;
  if (!name) return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL), "no such directory");
  name++;
  return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(given, NULL),
                 "no such directory; if it is meant on the Hugging Face Hub, fetch it first: hf download %.*s --local-dir %.*s%s", (int)n,
                 id, (int)(n - (size_t)(name - id)), name, then);
}
