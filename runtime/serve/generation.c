/* Tokens from one thread to another, with stop strings between. */
#include "runtime/serve/generation.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* A token, progress of the prompt or, as a generation's own last one, its end. */
typedef struct letter letter;
struct letter {
  letter *next;
  mm_generation *of;
  mm_token token;
  bool scored;        /* a token of the prompt */
  bool prefill;       /* no token: progress of the prompt */
  uint32_t prefilled; /* its tokens that are computed */
  mm_logprob logprobs[];
};

struct mm_outbox {
  mm_http *http;
  mm_task task;
  pthread_mutex_t lock;
  letter *first, **last;
};

struct mm_generation {
  mm_scheduler *scheduler;
  mm_outbox *outbox;
  const mm_tokenizer *tokenizer;
  mm_generation_settings set;
  mm_stop stop[MM_STOPS];
  char stop_text[MM_STOPS][MM_STOP_MAX];
  size_t longest;
  uint64_t ticket;
  /* The scheduler's thread: tokens that may be part of a stop string, and the text since some way before the first of them. */
  letter *held, **held_last;
  char tail[2 * MM_STOP_MAX];
  size_t tail_n;
  bool starved;
  bool closing; /* the last token is here: what is held goes out with the end, in on_done */
  mm_ending ending;
  mm_err err;
  letter *end; /* allocated at the start: the end cannot fail */
};

/* ---- The scheduler's thread ---- */

static void send_letters(mm_outbox *o, letter *first, letter **last) {
  pthread_mutex_lock(&o->lock);
  *o->last = first;
  o->last = last;
  pthread_mutex_unlock(&o->lock);
  mm_http_post(o->http, &o->task);
}

/* Hands over the first of the held tokens. */
static void release(mm_generation *g) {
  letter *l = g->held;
  if (!(g->held = l->next)) g->held_last = &g->held;
  l->next = NULL;
  send_letters(g->outbox, l, &l->next);
}

static void release_all(mm_generation *g) {
  while (g->held && !g->closing) release(g);
}

/* The stop string in tail[0 … n) that ends first after `seen`, of several the longest; its place in *at. -1: none. */
static int find_stop(const mm_generation *g, size_t seen, size_t *at) {
  int found = -1;
  size_t end = SIZE_MAX;
  for (uint32_t i = 0; i < g->set.stop_count; i++) {
    const size_t n = g->stop[i].n, from = seen >= n ? seen - n + 1 : 0;
    const char *p = g->tail_n > from ? memmem(g->tail + from, g->tail_n - from, g->stop[i].text, n) : NULL;
    const size_t begin = p ? (size_t)(p - g->tail) : 0;
    if (!p || begin + n > end || (begin + n == end && begin >= *at)) continue;
    found = (int)i;
    *at = begin, end = begin + n;
  }
  return found;
}

/* How many bytes at the end of the tail could begin a stop string. */
static size_t pending(const mm_generation *g) {
  for (size_t n = g->tail_n < g->longest - 1 ? g->tail_n : g->longest - 1; n > 0; n--)
    for (uint32_t i = 0; i < g->set.stop_count; i++)
      if (n < g->stop[i].n && memcmp(g->tail + g->tail_n - n, g->stop[i].text, n) == 0) return n;
  return 0;
}

/* Tokens before the last `keep` bytes of the text go out; one on the border stays held. */
static void release_before(mm_generation *g, size_t keep) {
  size_t held = 0;
  for (const letter *l = g->held; l; l = l->next) held += l->token.n;
  while (g->held && !g->closing && held >= keep + g->held->token.n) {
    held -= g->held->token.n;
    release(g);
  }
}

/* The text ends `keep` bytes before its end: what lies behind is dropped, the token on the border cut. */
static void cut(mm_generation *g, size_t drop) {
  size_t held = 0;
  for (const letter *l = g->held; l; l = l->next) held += l->token.n;
  size_t left = held > drop ? held - drop : 0;
  for (letter *l = g->held; l; l = l->next) {
    if (l->token.n > left) {
      l->token.n = left;
      l->token.id = -1;
    }
    left -= l->token.n;
  }
}

/* Adds a token's bytes to the text in pieces that the tail can take. True: a stop string is complete. */
static bool match(mm_generation *g, const char *bytes, size_t n) {
  for (size_t i = 0; i < n;) {
    const size_t keep = g->longest - 1;
    if (g->tail_n > keep) {
      memmove(g->tail, g->tail + g->tail_n - keep, keep);
      g->tail_n = keep;
    }
    const size_t seen = g->tail_n, piece = mm_min(n - i, sizeof g->tail - seen);
    memcpy(g->tail + seen, bytes + i, piece);
    g->tail_n += piece;
    i += piece;
    size_t at = 0;
    const int stop = find_stop(g, seen, &at);
    if (stop < 0) continue;
    g->ending.stop = stop;
    const size_t behind = g->tail_n - at + (n - i); /* bytes from the stop string's first on */
    cut(g, g->set.keep_stop ? behind - g->stop[stop].n : behind);
    return true;
  }
  release_before(g, pending(g));
  return false;
}

static bool is_end(const mm_generation *g, int32_t id) {
  for (uint32_t i = 0; i < g->set.request.stop_count; i++)
    if (g->set.request.stop[i] == id) return true;
  return false;
}

/* The reply has ended: text that could still have become a tag is content. True: a stop string is in it. */
static bool look_at_rest(mm_generation *g) {
  mm_reply_seen rest = {0};
  if (!g->set.watch || !g->set.stop_count || g->ending.stop >= 0) return false;
  mm_reply_watch_rest(g->set.watch, &rest);
  return rest.n && match(g, rest.text, rest.n);
}

/* The token's letter is the last that is held. True: the reply ends with it. */
static bool look(mm_generation *g, const letter *l) {
  const mm_token *t = &l->token;
  mm_reply_seen seen = {.text = t->bytes, .n = t->n};
  if (g->set.watch && !mm_reply_watch_token(g->set.watch, t->id, t->bytes, t->n, t->special, &seen)) {
    g->starved = true;
    return true;
  }
  if (seen.waits) return false;
  if (seen.again) g->tail_n = 0;
  if (g->set.stop_count && match(g, seen.text, seen.n)) return true;
  g->closing |= seen.enough;
  if (!g->set.stop_count) release_all(g);
  return g->ending.enough = seen.enough;
}

static bool on_token(void *user, int32_t id, const mm_logprob *logprobs, const mm_progress *progress) {
  mm_generation *g = user;
  const uint32_t top = g->set.request.sampling.top_logprobs;
  const size_t extra = logprobs ? sizeof(mm_logprob) * (1 + top) : 0;
  const bool over = g->set.constraint && !g->set.chosen(g->set.constraint, id);
  letter *l = malloc(sizeof *l + extra);
  if (!l) {
    g->starved = true;
    return false;
  }
  const bool special = mm_tokenizer_is_special(g->tokenizer, id);
  *l = (letter){
      .of = g,
      .token = {.id = id, .special = special, .bytes = "", .top = top, .cached = progress->cached_tokens, .began = progress->began}};
  if (logprobs) {
    memcpy(l->logprobs, logprobs, extra);
    l->token.logprobs = l->logprobs;
  }
  const bool end = is_end(g, id);
  l->token.end = end;
  g->closing = end || over || progress->reply_tokens >= g->set.request.max_tokens;
  if (end) g->ending.end_id = id;
  if ((!end || g->set.keep_stop) && (g->set.special || !special)) l->token.bytes = mm_tokenizer_bytes(g->tokenizer, id, &l->token.n);
  *g->held_last = l;
  g->held_last = &l->next;
  const bool looks = !end && (g->set.stop_count || g->set.watch);
  if (looks && look(g, l)) return false;
  if (looks && !over) return true;
  look_at_rest(g);
  release_all(g);
  return !over;
}

static void on_score(void *user, const mm_logprob *logprobs) {
  mm_generation *g = user;
  const uint32_t top = g->set.request.sampling.top_logprobs;
  const size_t extra = sizeof(mm_logprob) * (1 + top);
  letter *l = malloc(sizeof *l + extra);
  if (!l) {
    g->starved = true;
    return;
  }
  *l = (letter){.of = g, .scored = true, .token = {.id = logprobs[0].id, .bytes = "", .top = top}};
  memcpy(l->logprobs, logprobs, extra);
  l->token.logprobs = l->logprobs;
  *g->held_last = l;
  g->held_last = &l->next;
  release_all(g);
}

static void on_prefill(void *user, uint32_t tokens, uint32_t cached) {
  mm_generation *g = user;
  letter *l = malloc(sizeof *l);
  if (!l) {
    g->starved = true;
    return;
  }
  *l = (letter){.of = g, .prefill = true, .prefilled = tokens, .token = {.cached = cached}};
  *g->held_last = l;
  g->held_last = &l->next;
  release_all(g);
}

static const uint32_t *on_allow(void *user) {
  const mm_generation *g = user;
  return g->set.allow(g->set.constraint);
}

static void on_done(void *user, mm_finish reason, const mm_progress *progress, const mm_err *err) {
  mm_generation *g = user;
  g->ending.reason = reason;
  g->ending.progress = *progress;
  if (reason == MM_FINISH_LENGTH && !g->starved && look_at_rest(g)) g->ending.reason = MM_FINISH_STOP;
  if (g->starved) g->ending.reason = MM_FINISH_ERROR;
  if (g->starved)
    mm_fail_memory(&g->err, sizeof(letter));
  else if (err)
    g->err = *err;
  *g->held_last = g->end; /* in one delivery, so that the token before the end is known to be the last */
  letter *first = g->held;
  g->held = NULL;
  send_letters(g->outbox, first, &g->end->next);
}

/* ---- The loop's thread ---- */

static void generation_free(mm_generation *g) {
  for (letter *l = g->held, *next; l; l = next) {
    next = l->next;
    free(l);
  }
  free(g->end);
  free(g);
}

static void deliver(letter *l) {
  mm_generation *g = l->of;
  if (l->prefill) {
    g->set.prefill(g->set.user, l->prefilled, l->token.cached);
    free(l);
    return;
  }
  if (l != g->end) {
    l->token.last = l->next == g->end && (g->ending.reason == MM_FINISH_STOP || g->ending.reason == MM_FINISH_LENGTH);
    (l->scored ? g->set.scored : g->set.token)(g->set.user, &l->token);
    free(l);
    return;
  }
  g->ending.err = g->ending.reason == MM_FINISH_ERROR ? &g->err : NULL;
  g->set.done(g->set.user, &g->ending);
  generation_free(g);
}

static void open_outbox(void *user) {
  mm_outbox *o = user;
  pthread_mutex_lock(&o->lock);
  letter *l = o->first;
  o->first = NULL;
  o->last = &o->first;
  pthread_mutex_unlock(&o->lock);
  for (letter *next; l; l = next) {
    next = l->next;
    deliver(l);
  }
}

mm_outbox *mm_outbox_open(mm_http *http, mm_err *err) {
  mm_outbox *o = mm_calloc(1, sizeof *o, err);
  if (!o) return NULL;
  *o = (mm_outbox){.http = http, .task = {.fn = open_outbox, .user = o}, .last = &o->first};
  pthread_mutex_init(&o->lock, NULL);
  return o;
}

void mm_outbox_close(mm_outbox *o) {
  if (!o) return;
  open_outbox(o);
  pthread_mutex_destroy(&o->lock);
  free(o);
}

mm_generation *mm_generation_start(mm_scheduler *s, mm_outbox *o, const mm_tokenizer *t, const mm_generation_settings *set, mm_err *err) {
  mm_generation *g = mm_calloc(1, sizeof *g, err);
  if (!g) return mm_scheduler_release(s, set->request.reserved), NULL;
  *g = (mm_generation){.scheduler = s, .outbox = o, .tokenizer = t, .set = *set, .ending = {.stop = -1, .end_id = -1}};
  g->held_last = &g->held;
  for (uint32_t i = 0; i < set->stop_count; i++) {
    memcpy(g->stop_text[i], set->stop[i].text, set->stop[i].n);
    g->stop[i] = (mm_stop){g->stop_text[i], set->stop[i].n};
    g->longest = mm_max(g->longest, set->stop[i].n);
  }
  g->end = mm_calloc(1, sizeof *g->end, err);
  mm_request r = set->request;
  r.user = g;
  r.allow = set->constraint ? on_allow : NULL;
  r.score = set->scored ? on_score : NULL;
  r.prefill = set->prefill ? on_prefill : NULL;
  r.token = on_token;
  r.done = on_done;
  if (g->end) {
    g->end->of = g;
    if (mm_scheduler_submit(s, &r, &g->ticket, err)) return g;
  } else {
    mm_scheduler_release(s, r.reserved);
  }
  generation_free(g);
  return NULL;
}

void mm_generation_cancel(mm_generation *g) { mm_scheduler_cancel(g->scheduler, g->ticket); }
