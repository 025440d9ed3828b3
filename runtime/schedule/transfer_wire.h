/* Messages between a server that computes prompts and one that decodes (transfer.h), over one TCP connection for each prompt. The decoding
 * side opens it, and
 *   both send HELLO: mm_wire_profile. They must be equal.
 *   The decoding side sends REQUEST: mm_wire_request, then ids i32[count], then u32[boundaries] (mm_request.boundary).
 *   The other side sends BEAT (u64: tokens computed so far) once a second at least, PAGE (u64 index, then the page's bytes of each rank in
 *   order of ranks) for each page from request.from on, in order, STATE (the lightning states after the last id) where the model has such,
 *   and then DONE; or at any time ERROR with a text, and closes.
 * Each message is a head of 48 bytes and its body. The digest is SHA-256 of kind, bytes and body. All numbers are little-endian. */
#ifndef MM_RUNTIME_TRANSFER_WIRE_H
#define MM_RUNTIME_TRANSFER_WIRE_H

#include <stdatomic.h>

#include "formats/hash.h"

enum { MM_WIRE_VERSION = 2, MM_WIRE_TEXT = 512, MM_WIRE_BOUNDARIES = 256, MM_WIRE_BEAT_S = 1 };

typedef enum mm_wire_kind {
  MM_WIRE_HELLO = 1,
  MM_WIRE_REQUEST,
  MM_WIRE_BEAT,
  MM_WIRE_PAGE,
  MM_WIRE_STATE,
  MM_WIRE_DONE,
  MM_WIRE_ERROR
} mm_wire_kind;

/* Numbers, or texts of at most eight bytes (mm_wire_word), in the order of their names in transfer_wire.c. */
enum { MM_WIRE_FACTS = 13 };
typedef struct mm_wire_profile {
  uint64_t fact[MM_WIRE_FACTS];
  mm_digest checkpoint;
} mm_wire_profile;
uint64_t mm_wire_word(const char *text);
/* MM_USAGE E_PREFILL that names the first difference: what the peer has, and what is expected. */
MM_MUST_USE bool mm_wire_same(const mm_wire_profile *peer, const mm_wire_profile *own, const char *name, mm_err *err);

typedef struct mm_wire_request {
  uint64_t salt;
  int64_t priority;
  uint64_t from, count; /* pages before `from` are not sent; count ≥ 1 ids */
  uint64_t boundaries;  /* ≤ MM_WIRE_BOUNDARIES */
} mm_wire_request;

typedef struct mm_wire_head {
  char magic[4];
  uint32_t kind;
  uint64_t bytes;
  mm_digest digest;
} mm_wire_head;

/* A connection. Its calls come from one thread; *stop, which another sets, ends each within a tenth of a second. */
typedef struct mm_wire {
  int fd;
  double timeout; /* seconds without a byte; a message has that long and a second a megabyte in all */
  const char *name;
  atomic_bool *stop;
} mm_wire;

typedef struct mm_wire_part {
  void *data;
  size_t bytes;
} mm_wire_part;

/* Failures are MM_IO E_PREFILL: the peer is late, has closed, or sends what breaks the rules above; E_IO with the system's reason. */
MM_MUST_USE bool mm_wire_connect(mm_wire *w, const char *address, mm_err *err);
/* A socket that listens at HOST:PORT, or -1; *port is the one that it has. */
int mm_wire_listen(const char *address, uint16_t *port, mm_err *err);
MM_MUST_USE bool mm_wire_send(mm_wire *w, mm_wire_kind kind, const mm_wire_part *part, uint32_t parts, mm_err *err);
/* The next message's head, of some kind; then its body, as long as the parts together. */
MM_MUST_USE bool mm_wire_head_read(mm_wire *w, mm_wire_head *head, mm_err *err);
MM_MUST_USE bool mm_wire_body_read(mm_wire *w, const mm_wire_head *head, const mm_wire_part *part, uint32_t parts, mm_err *err);
/* A message of that kind with one part. ERROR is MM_IO E_PREFILL with its text. */
MM_MUST_USE bool mm_wire_expect(mm_wire *w, mm_wire_kind kind, void *data, size_t bytes, mm_err *err);
/* The body of an ERROR message becomes err. Returns false. */
bool mm_wire_refused(mm_wire *w, const mm_wire_head *head, mm_err *err);
/* Fails: a message that the rules do not allow now. */
bool mm_wire_unexpected(const mm_wire *w, const mm_wire_head *head, mm_err *err);
/* Returns true if the peer has closed or sent something. */
bool mm_wire_ended(const mm_wire *w);
bool mm_wire_closed(const mm_wire *w); /* it has closed, and all that it sent was read */
/* Says that nothing more comes, and reads for a moment what the peer had sent: closing at once would lose the last message. */
void mm_wire_finish(mm_wire *w);
void mm_wire_close(mm_wire *w);

#endif
