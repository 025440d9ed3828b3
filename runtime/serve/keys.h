/* API keys. */
#ifndef MM_RUNTIME_SERVE_KEYS_H
#define MM_RUNTIME_SERVE_KEYS_H

#include "runtime/serve/http.h"

/* True if a request carries one of key[keys], as `Authorization: Bearer` or `x-api-key`; true where there are none. */
bool mm_keys_admit(const char *const *key, size_t keys, const mm_exchange *x);

/* True if every key can be sent as a header's value; an empty one would admit requests without a key. */
MM_MUST_USE bool mm_keys_check(const char *const *key, size_t keys, mm_err *err);

#endif
