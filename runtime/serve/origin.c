/* Host and Origin. */
#include "runtime/serve/origin.h"

#include <string.h>

static bool ends_with(const char *p, size_t n, const char *end) {
  const size_t m = strlen(end);
  return n >= m && strncasecmp(p + n - m, end, m) == 0;
}

/* 0.0.0.0 and [::] are this machine's too; no name is ever made to be them. */
static bool is_local(const char *p, size_t n) {
  const bool word = n == 9 || (n > 9 && p[n - 10] == '.');
  if (word && ends_with(p, n, "localhost")) return true;
  if ((n == 5 && memcmp(p, "[::1]", 5) == 0) || (n == 4 && memcmp(p, "[::]", 4) == 0) || (n == 7 && memcmp(p, "0.0.0.0", 7) == 0))
    return true;
  return n > 4 && memcmp(p, "127.", 4) == 0 && strspn(p, "0123456789.") >= n;
}

/* "NAME" or "NAME:PORT". */
static bool admitted(const char *const *name, size_t names, const char *authority) {
  const char *end = *authority == '[' ? strchr(authority, ']') : NULL;
  const size_t n = end ? (size_t)(end + 1 - authority) : strcspn(authority, ":");
  const char *port = authority + n;
  if (*port && (*port != ':' || port[1 + strspn(port + 1, "0123456789")])) return false;
  for (size_t i = 0; i < names; i++)
    if (strcmp(name[i], "*") == 0 || (strlen(name[i]) == n && strncasecmp(name[i], authority, n) == 0)) return true;
  return is_local(authority, n);
}

bool mm_origin_admit(const char *const *name, size_t names, const mm_exchange *x) {
  const char *host = mm_exchange_header(x, "Host"), *origin = mm_exchange_header(x, "Origin");
  if (host && !admitted(name, names, host)) return false;
  if (!origin) return true;
  const char *authority = strstr(origin, "://");
  return admitted(name, names, authority ? authority + 3 : origin); /* "null": a page of no origin */
}
