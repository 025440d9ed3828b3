/* Reading the fields of a request. False after mm_refuse: the wrong type or range. Absent and null leave *out as it is. */
#ifndef MM_RUNTIME_SERVE_FIELDS_H
#define MM_RUNTIME_SERVE_FIELDS_H

#include "runtime/serve/call.h"

bool mm_field_real(mm_call *c, const mm_value *object, const char *key, double lo, double hi, double *out);
bool mm_field_int(mm_call *c, const mm_value *object, const char *key, int64_t lo, int64_t hi, int64_t *out);
bool mm_field_bool(mm_call *c, const mm_value *object, const char *key, bool *out);
/* *v: the member of this type, NULL where absent. */
bool mm_field(mm_call *c, const mm_value *object, const char *key, mm_value_type type, const mm_value **v);

/* mm_fields_check, then from the body: temperature, top_p, top_k, min_p, the penalties, seed, logit_bias, stop, stop_token_ids, ignore_eos,
 * n, stream, stream_options, skip_special_tokens, include_stop_str_in_output, cache_salt, speculative, priority, timeout, max_tokens. False
 * after a refusal or err.
 */
MM_MUST_USE bool mm_params_read(mm_call *c, mm_err *err);
/* Refuses the fields that the API does not serve although they bind a reply or its prompt elsewhere (field_table.h). */
bool mm_fields_check(mm_call *c);
/* The same of a request whose text is a prompt, as completions have it. */
bool mm_fields_check_text(mm_call *c);
/* A limit of tokens under another name than max_tokens: the smaller one counts. */
bool mm_params_limit(mm_call *c, const char *key);
/* stop strings from a string or a list of them. */
bool mm_params_stop(mm_call *c, const char *key);

#endif
