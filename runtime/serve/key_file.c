/* API keys from the environment and from a file. */
#include "runtime/serve/key_file.h"

#include <stdlib.h>
#include <string.h>

#include "formats/system/file.h"

#define FILE_MAX (UINT64_C(1) << 20)

/* Visible ASCII: the characters that every client sends as they are. */
static bool is_key(const char *key, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (key[i] < '!' || key[i] > '~') return false;
  return n > 0;
}

static bool add(mm_option_list *keys, const char *key, mm_err *err) {
  if (!key || !MM_GROW(keys->item, &keys->cap, keys->count + 1, err)) return false;
  keys->item[keys->count++] = key;
  return true;
}

static bool of_file(mm_option_list *keys, const char *path, mm_arena *a, mm_err *err) {
  size_t n = 0, number = 1;
  char *text = mm_file_slurp(path, FILE_MAX, &n, err);
  bool ok = text, any = false;
  for (size_t at = 0, end; ok && at < n; at = end + 1, number++) {
    for (end = at; end < n && text[end] != '\n';) end++;
    const size_t most = end - at - (end > at && text[end - 1] == '\r');
    if (!most) continue;
    any = true;
    if (is_key(text + at, most))
      ok = add(keys, mm_arena_strndup(a, text + at, most, err), err);
    else
      ok = mm_fail(err, MM_BAD_INPUT, "E_KEY", mm_at(path, NULL),
                   "line %zu: found a space, a control character or a letter beyond ASCII, expected a key", number);
  }
  free(text);
  return ok && (any || mm_fail(err, MM_BAD_INPUT, "E_KEY", mm_at(path, NULL), "found no key, expected one a line"));
}

bool mm_keys_gather(mm_option_list *keys, const char *path, mm_arena *a, mm_err *err) {
  static const char expected[] = "expected a key of visible ASCII characters without spaces";
  const char *key = getenv("MINIMAX_API_KEY");
  for (size_t i = 0; i < keys->count; i++)
    if (!is_key(keys->item[i], strlen(keys->item[i])))
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--api-key: found %s, %s", *keys->item[i] ? "another text" : "nothing",
                     expected);
  if (key && !is_key(key, strlen(key)))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "MINIMAX_API_KEY in the environment: found %s, %s",
                   *key ? "another text" : "nothing", expected);
  if (key && !add(keys, key, err)) return false;
  return !path || of_file(keys, path, a, err);
}
