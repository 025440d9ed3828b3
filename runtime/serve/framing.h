/* Strict HTTP/1 parser (RFC 9112), fed with bytes as they come. Where the RFC allows leniency it refuses, so that a proxy and this server
 * never frame a request differently.
 * A refused request ends its connection, since nobody knows where the next one begins. */
#ifndef MM_RUNTIME_SERVE_FRAMING_H
#define MM_RUNTIME_SERVE_FRAMING_H

#include "formats/text.h"

typedef enum mm_framing_state {
  MM_FRAMING_HEAD,   /* before the blank line */
  MM_FRAMING_BODY,   /* the head is read: fields below are set */
  MM_FRAMING_DONE,   /* the request is whole */
  MM_FRAMING_REFUSED /* status and reason are set; method, path and field as far as they were read */
} mm_framing_state;

typedef struct mm_http_field {
  const char *name, *value; /* the value without white space around it */
} mm_http_field;

/* Zero-initialise and set the two limits. */
typedef struct mm_framing {
  size_t head_max;   /* bytes of the head; as many again of trailers and chunk extensions */
  uint64_t body_max; /* bytes of the body, chunks put together */
  mm_framing_state state;
  int status;         /* 400, 408, 413, 431, 503 or 505 */
  const char *reason; /* static */
  /* Borrowed until mm_framing_next. */
  const char *method, *path; /* NULL: not read. path: without the query; of a refused request the target */
  mm_http_field *field;      /* [fields] */
  size_t fields;
  mm_text body;
  int minor;    /* of HTTP/1.minor; 1 for any later one */
  bool keep;    /* the connection stays open behind the reply */
  bool expects; /* the client waits for 100 Continue before it sends the body */
  /* Inside. */
  mm_text request, head, line; /* the request line; fields, a zero behind each; a line of the body's framing */
  size_t target_at, line_at;   /* in request, of the target; in head, of the current line */
  size_t extra;                /* bytes of trailers and chunk extensions */
  uint64_t left;               /* bytes of the body, or of its chunk, that are to come */
  int part;
  bool cr, chunked;
} mm_framing;

/* Reads up to the end of the head, or of the request, and returns how many of the n bytes that took. Nothing is read in the states DONE and
 * REFUSED. How the bytes are divided between calls makes no difference. */
size_t mm_framing_read(mm_framing *f, const char *bytes, size_t n);
/* The rest of a request did not arrive in time: refuses it. */
void mm_framing_late(mm_framing *f);
/* Begins the next request. */
void mm_framing_next(mm_framing *f);
/* The value of a field of that name, any case, the first one having the number 0; NULL: there are not so many. */
const char *mm_framing_find(const mm_framing *f, const char *name, size_t number);
void mm_framing_close(mm_framing *f);
const char *mm_framing_reason(int status); /* its phrase; empty for those that are not sent */

#endif
