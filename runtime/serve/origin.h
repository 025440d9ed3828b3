/* Pages in a browser that ask a server which listens for its own machine alone. */
#ifndef MM_RUNTIME_SERVE_ORIGIN_H
#define MM_RUNTIME_SERVE_ORIGIN_H

#include "runtime/serve/http.h"

/* Whether the request names this machine, or one of name[names] ("*": whatever it names), as its host and as the page that it comes from,
 * so far as it names them: a page from elsewhere whose name was made to point here (DNS rebinding), or that sends forms here, does not. */
bool mm_origin_admit(const char *const *name, size_t names, const mm_exchange *x);

#endif
