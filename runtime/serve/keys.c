/* API keys, compared in a time that does not depend on how many bytes match. */
#include "runtime/serve/keys.h"

#include <string.h>

static bool same(const char *key, const char *given) {
  const size_t n = strlen(key), m = given ? strlen(given) : 0;
  uint8_t differ = n != m;
  for (size_t i = 0; i < n && m; i++) differ |= (uint8_t)(key[i] ^ given[i % m]);
  return given && !differ;
}

bool mm_keys_check(const char *const *key, size_t keys, mm_err *err) {
  for (size_t i = 0; i < keys; i++) {
    const char *p = key[i];
    while ((uint8_t)*p >= ' ' && *p != 0x7f) p++;
    if (*p || p == key[i] || *key[i] == ' ' || p[-1] == ' ')
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                     "--api-key: found %s, expected printable characters and no space at either end",
                     *key[i] ? "another character or a space there" : "nothing");
  }
  return true;
}

bool mm_keys_admit(const char *const *key, size_t keys, const mm_exchange *x) {
  const char *bearer = mm_exchange_header(x, "Authorization"), *own = mm_exchange_header(x, "x-api-key");
  bearer = bearer && strncasecmp(bearer, "Bearer ", 7) == 0 ? bearer + 7 : NULL;
  int known = !keys; /* every key is compared, whatever was found */
  for (size_t i = 0; i < keys; i++) known |= (int)same(key[i], bearer) | (int)same(key[i], own);
  return known != 0;
}
