/* The way of a request from its path to what answers it. */
#ifndef MM_RUNTIME_SERVE_ROUTES_H
#define MM_RUNTIME_SERVE_ROUTES_H

#include "runtime/serve/server.h"

/* mm_http_config.handle; user is the server. */
void mm_routes_handle(void *user, mm_exchange *x);

#endif
