/* API keys. */
#ifndef MM_RUNTIME_SERVE_KEYS_H
#define MM_RUNTIME_SERVE_KEYS_H

#include "runtime/serve/http.h"

/* True if a request carries one of key[keys], as `Authorization: Bearer` or `x-api-key`; true where there are none. */
bool mm_keys_admit(const char *const *key, size_t keys, const mm_exchange *x);

#endif
