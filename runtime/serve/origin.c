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
    if (strcmp(name[i], "*") == 0 || (strlen(name[i]) == n && strncasecmp(name[i], authority, n) == 0) ||
        strcasecmp(name[i], authority) == 0)
      return true;
  return is_local(authority, n);
}

/* The request's origin as it stands there, if o->origin has it, or "*"; NULL: it has not. */
static const char *shared_with(const mm_origins *o, const mm_exchange *x) {
  const char *origin = mm_exchange_header(x, "Origin");
  for (size_t i = 0; origin && i < o->origins; i++) {
    if (strcmp(o->origin[i], "*") == 0) return "*";
    if (strcasecmp(o->origin[i], origin) == 0) return origin;
  }
  return NULL;
}

/* A name or address, and a port or none. */
static bool is_host(const char *p) {
  const size_t n = *p == '[' ? 1 + strspn(p + 1, "0123456789abcdefABCDEF:.") : strcspn(p, ":/?#@[]*, \t");
  const char *port = p + n;
  if (*p == '[' && *port++ != ']') return false;
  return n > (*p == '[') && (!*port || (*port == ':' && port[1] && !port[1 + strspn(port + 1, "0123456789")]));
}

bool mm_origin_check(const mm_origins *o, mm_err *err) {
  for (size_t i = 0; i < o->hosts; i++)
    if (strcmp(o->host[i], "*") != 0 && !is_host(o->host[i]))
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                     "--allow-host: found %s, expected NAME, NAME:PORT, an address in their place ([::1]), or *", o->host[i]);
  for (size_t i = 0; i < o->origins; i++) {
    const char *p = o->origin[i], *authority = strstr(p, "://");
    if (strcmp(p, "*") == 0 || strcmp(p, "null") == 0) continue;
    if (!authority || authority == p || !authority[3] || authority[3 + strcspn(authority + 3, "/?#@ \t")])
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                     "--allow-origin: found %s, expected https://NAME, https://NAME:PORT, null or *", p);
  }
  return true;
}

bool mm_origin_admit(const mm_origins *o, const mm_exchange *x) {
  const char *host = mm_exchange_header(x, "Host"), *origin = mm_exchange_header(x, "Origin");
  if (host && !admitted(o->host, o->hosts, host)) return false;
  if (!origin || shared_with(o, x)) return true;
  const char *authority = strstr(origin, "://");
  return admitted(o->host, o->hosts, authority ? authority + 3 : origin); /* "null": a page of no origin */
}

void mm_origin_share(const mm_origins *o, mm_exchange *x) {
  const char *with = shared_with(o, x);
  if (!o->origins) return;
  mm_exchange_set(x, "Vary", "Origin"); /* for caches */
  if (!with) return;
  mm_exchange_set(x, "Access-Control-Allow-Origin", with);
  mm_exchange_set(x, "Access-Control-Expose-Headers", "X-Request-Id, request-id, Retry-After, endpoint-load-metrics");
}

void mm_origin_share_methods(const mm_origins *o, mm_exchange *x) {
  if (!shared_with(o, x) || !mm_exchange_header(x, "Access-Control-Request-Method")) return;
  mm_exchange_set(x, "Access-Control-Allow-Methods", "GET, HEAD, POST, OPTIONS");
  mm_exchange_set(x, "Access-Control-Max-Age", "600");
  const char *headers; /* a list, as its answer is */
  for (size_t i = 0; (headers = mm_exchange_header_at(x, "Access-Control-Request-Headers", i)); i++)
    mm_exchange_set(x, "Access-Control-Allow-Headers", headers);
  if (mm_exchange_header(x, "Access-Control-Request-Private-Network")) mm_exchange_set(x, "Access-Control-Allow-Private-Network", "true");
}
