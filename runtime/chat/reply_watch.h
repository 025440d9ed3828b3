/* A reply as it is seen before its tokens are given to the parser: where its reasoning ends, since stop strings are looked for outside it
 * alone, and where its one call ends. In the server this is the scheduler's thread; the loop parses the reply again for the client. */
#ifndef MM_RUNTIME_REPLY_WATCH_H
#define MM_RUNTIME_REPLY_WATCH_H

#include "runtime/chat/reply.h"

typedef struct mm_reply_watch mm_reply_watch;

typedef struct mm_reply_seen {
  /* n bytes up to the end of the reply so far, in which stop strings count and were not looked for yet. Without `again` they follow those
   * of the token before. */
  const char *text;
  size_t n;
  bool again;  /* reasoning stood before them: no stop string begins before `text` */
  bool waits;  /* the end of the reply so far may be reasoning or not: its tokens are given to nobody yet */
  bool enough; /* the one call has ended */
} mm_reply_seen;

/* The settings without sink and user; `special`: special tokens are text. With one_call the reply ends after its first whole call. */
mm_reply_watch *mm_reply_watch_open(const mm_reply_settings *s, bool special, bool one_call, mm_err *err);
void mm_reply_watch_close(mm_reply_watch *w); /* accepts NULL */
/* The next token. *out is valid until the next call. False: want of memory. */
MM_MUST_USE bool mm_reply_watch_token(mm_reply_watch *w, int32_t id, const char *bytes, size_t n, bool is_special, mm_reply_seen *out);
/* The end of the reply: text that waits until then is content. out->text is valid until the watch closes. */
void mm_reply_watch_rest(const mm_reply_watch *w, mm_reply_seen *out);

#endif
