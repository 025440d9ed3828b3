/* Many streamed requests to an HTTP server at a time, and when each piece of each reply came. One thread, poll, a connection a request. */
#ifndef MM_RUNTIME_BENCH_LOAD_CLIENT_H
#define MM_RUNTIME_BENCH_LOAD_CLIENT_H

#include "formats/text.h"

typedef struct mm_load_request {
  double at;    /* seconds from the beginning at which it is sent, if fewer than `concurrency` are under way */
  mm_text body; /* JSON */
  /* What came of it. */
  bool done;                /* the reply is complete */
  double sent, first, last; /* seconds from the beginning: the connection is asked for, the first text, the latest */
  uint64_t input, output;   /* tokens, as the server counts them; without usage, output counts the pieces */
  double *gap;              /* [gaps] seconds between pieces of text */
  size_t gaps, gap_cap;
  char reason[160]; /* of a failure; "" */
} mm_load_request;

typedef struct mm_load_client {
  const char *host, *port, *path; /* of POST */
  const char *key;                /* Authorization: Bearer; or NULL */
  uint32_t concurrency;           /* requests under way at most */
  double timeout;                 /* seconds of a request, from when it is sent */
} mm_load_client;

/* Sends all requests, which are in order of `at`, and waits for the replies. *seconds: from the beginning to the end of the last. Failures
 * of requests stand in them; MM_IO E_IO where the host has no address. */
MM_MUST_USE bool mm_load_run(const mm_load_client *c, mm_load_request *r, size_t count, double *seconds, mm_err *err);
/* The body of a GET's reply, NUL-terminated, free() it. MM_IO E_IO where none comes whole or its status is not 200. */
char *mm_load_get(const mm_load_client *c, const char *path, size_t *n, mm_err *err);

#endif
