/* Pages in a browser: which of them may use a server that listens for its own machine alone, and which may read replies (CORS). */
#ifndef MM_RUNTIME_SERVE_ORIGIN_H
#define MM_RUNTIME_SERVE_ORIGIN_H

#include "runtime/serve/http.h"

typedef struct mm_origins {
  const char *const *host; /* [hosts] further names of this machine, --allow-host; "*": any */
  size_t hosts;
  const char *const *origin; /* [origins] that may read replies, --allow-origin: "https://NAME:PORT" or "null"; "*": any */
  size_t origins;
} mm_origins;

/* MM_USAGE where one of the origins is not of that form. */
MM_MUST_USE bool mm_origin_check(const mm_origins *o, mm_err *err);
/* True if the host that the request names, and the page that it comes from, are this machine or one of o->host, as far as the request
 * names them. Pages of other hosts that point their name here (DNS rebinding) or send forms here are refused. Pages of o->origin are
 * admitted. */
bool mm_origin_admit(const mm_origins *o, const mm_exchange *x);
/* Headers of a reply that let a browser show it to a page of o->origin; none for others. */
void mm_origin_share(const mm_origins *o, mm_exchange *x);
/* The same for the reply to OPTIONS: what such a page may send. */
void mm_origin_share_methods(const mm_origins *o, mm_exchange *x);

#endif
