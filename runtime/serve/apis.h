/* The APIs, one file each. */
#ifndef MM_RUNTIME_SERVE_APIS_H
#define MM_RUNTIME_SERVE_APIS_H

#include "runtime/serve/call.h"

extern const mm_api mm_api_completions;     /* POST /v1/completions */
extern const mm_api mm_api_chat;            /* POST /v1/chat/completions */
extern const mm_api mm_api_responses;       /* POST /v1/responses */
extern const mm_api mm_api_messages;        /* POST /v1/messages, as Anthropic has it */
extern const mm_api mm_api_count_chat;      /* POST /v1/chat/completions/input_tokens, as llama.cpp has it */
extern const mm_api mm_api_count_responses; /* POST /v1/responses/input_tokens */
extern const mm_api mm_api_count_messages;  /* POST /v1/messages/count_tokens */
extern const mm_api mm_api_tokenize;        /* POST /tokenize */
extern const mm_api mm_api_detokenize;      /* POST /detokenize */

/* Pages answer requests without a body, at once: GET /health, /ready, /metrics, /v1/models, /v1/models/NAME, /version, /props,
 * /openapi.json, /. mm_page_find returns
 * NULL if there is no such path; *keyed: the request needs an API key. */
typedef void mm_page(mm_server *s, mm_exchange *x);
mm_page *mm_page_find(const char *path, bool *keyed);
/* True if `path` is the path `whole` without its /v1, as llama.cpp's server takes it too. */
bool mm_path_is_short(const char *path, const char *whole);
/* Path i and what it answers with; NULL behind the last. */
const char *mm_page_path(size_t i, const char **what);
/* GET /openapi.json: the paths and the fields of requests, from the tables that answer them. */
void mm_openapi_page(mm_server *s, mm_exchange *x);

/* Printable text of bytes that may be no UTF-8, in pieces: added to `out`; n = 0 ends it. */
void mm_print_utf8(mm_utf8_stream *u, const char *bytes, size_t n, mm_text *out);
/* "stop" or "length". */
const char *mm_openai_finish(const mm_ending *end);
/* ,"stop_reason": as vLLM has it: the stop string or the id of stop_token_ids that ended the reply, or null. */
void mm_openai_stop_reason(const mm_call *c, const mm_ending *end, mm_text *out);
/* The model's name, and the build as `system_fingerprint`. */
void mm_openai_put_model(mm_call *c);
/* Members that llama.cpp has: `timings` where timings_per_token wants them and a token is there, `prompt_progress` of return_progress. */
void mm_openai_put_progress(const mm_choice *ch, mm_text *out);
/* Ends the one choice of a chunk of a stream, with the usage that stream_options want, and sends it. */
void mm_openai_end_chunk(mm_choice *ch);
/* The reply as OpenAI has it, or the end of the stream: head begins an object of the API's, put adds a choice. reasoning: tokens of the
 * reply that are reasoning. */
void mm_openai_end(mm_call *c, void (*head)(mm_call *c), void (*put)(mm_call *c, mm_choice *ch), uint32_t reasoning);

#endif
