/* Hash chains over grams: a table has the last place of each hash, and a ring the place before it with the same hash. Every place is
 * compared with the tokens themselves, so that a collision costs a comparison and never a wrong match. */
#include "runtime/schedule/draft_index.h"

#include <stdlib.h>
#include <string.h>

enum {
  LONG = 3,       /* tokens of a gram of one sequence, or else */
  SHORT = 2,      /* these */
  REPLY_GRAM = 4, /* of a reply of another request */
  CANDIDATES = 8, /* matches of which the longest is taken */
  PLACES = 64,    /* places of one hash that are compared at most */
  SIZE_MIN = 256
};

/* A hash of a gram, in `bits` bits. */
static uint32_t hash_of(uint64_t salt, const int32_t *gram, uint32_t n, uint32_t bits) {
  uint64_t h = (salt ^ n) * UINT64_C(0x9e3779b97f4a7c15);
  for (uint32_t i = 0; i < n; i++) h = (h ^ (h >> 29) ^ (uint32_t)gram[i]) * UINT64_C(0xbf58476d1ce4e5b9);
  return (uint32_t)((h ^ (h >> 32)) * UINT64_C(0x94d049bb133111eb) >> (64 - bits));
}

/* ---- one sequence ---- */

void mm_gram_index_close(mm_gram_index *x) {
  MM_FREE(x->head, x->link);
  *x = (mm_gram_index){0};
}

/* Room for so many tokens, or for the window; growing starts again from an empty index. */
static bool make_room(mm_gram_index *x, uint32_t count) {
  uint32_t size = x->size ? x->size : SIZE_MIN;
  while (size < count && size < MM_GRAM_WINDOW) size *= 2;
  if (size == x->size) return true;
  mm_gram_index_close(x);
  mm_err err = {0};
  x->head = mm_calloc(2 * (size_t)size, sizeof *x->head, &err);
  x->link = mm_calloc(2 * (size_t)size, sizeof *x->link, &err);
  if (x->head && x->link) return x->size = size, true;
  mm_gram_index_close(x);
  return false;
}

/* Each length of gram has chains of its own. */
static uint32_t *head_of(const mm_gram_index *x, const int32_t *gram, uint32_t n) {
  return &x->head[(size_t)(n - SHORT) * x->size + hash_of(0, gram, n, (uint32_t)__builtin_ctz(x->size))];
}

static uint32_t *link_of(const mm_gram_index *x, uint32_t gram, uint32_t at) {
  return &x->link[(size_t)(gram - SHORT) * x->size + (at & (x->size - 1))];
}

static void add_gram(mm_gram_index *x, const int32_t *token, uint32_t gram, uint32_t at) {
  uint32_t *head = head_of(x, token + at, gram);
  *link_of(x, gram, at) = *head;
  *head = at + 1;
}

/* Equal tokens before two places of one sequence, or of two: those of `a` reach back `most` tokens. */
static uint32_t equal_before(const int32_t *a, const int32_t *b, uint32_t most) {
  uint32_t n = 0;
  while (n < most && a[-1 - (int64_t)n] == b[-1 - (int64_t)n]) n++;
  return n;
}

/* The place after the longest of the latest matches of the last `gram` tokens, 0 for none. */
static uint32_t find_gram(const mm_gram_index *x, const int32_t *token, uint32_t count, uint32_t gram, uint32_t *matched) {
  const uint32_t lowest = count > x->size ? count - x->size : 0;
  uint32_t best = 0, found = 0;
  *matched = 0;
  uint32_t next = *head_of(x, token + count - gram, gram);
  for (uint32_t i = 0; i < PLACES && found < CANDIDATES && next > lowest; i++) {
    const uint32_t at = next - 1, end = at + gram, most = (uint32_t)mm_min(end, MM_GRAM_MATCH);
    const uint32_t equal = equal_before(token + end, token + count, most);
    if (equal >= gram) found++;
    if (equal >= gram && equal > *matched) best = end, *matched = equal;
    next = *link_of(x, gram, at);
    if (next > at) break; /* the ring has come round: what was here is older than the window */
  }
  return best;
}

uint32_t mm_gram_index_find(mm_gram_index *x, const int32_t *token, uint32_t count, uint32_t *matched) {
  *matched = 0;
  if (count <= LONG || !make_room(x, count)) return 0;
  if (count > x->size) x->next = (uint32_t)mm_max(x->next, count - x->size);
  /* The gram at the end is not added before a token follows it. */
  for (; x->next + LONG < count; x->next++) {
    add_gram(x, token, SHORT, x->next);
    add_gram(x, token, LONG, x->next);
  }
  const uint32_t at = find_gram(x, token, count, LONG, matched);
  if (at) return at;
  /* The gram of 2 that begins at `next` is behind all of the index: it ends before the last token. */
  if (token[x->next] == token[count - 2] && token[x->next + 1] == token[count - 1]) return *matched = SHORT, x->next + SHORT;
  return find_gram(x, token, count, SHORT, matched);
}

/* ---- replies of all requests ---- */

enum { RING = MM_REPLY_TOKENS, RING_BITS = 18, NO_ID = -1 };

struct mm_reply_index {
  uint32_t next;   /* place of the next token; all places are modulo 2^32, in the ring modulo RING */
  int32_t *token;  /* [RING] NO_ID ends each reply */
  uint64_t *salt;  /* [RING] */
  uint32_t *link;  /* [RING] 1 + the place before with the same hash */
  uint32_t *head;  /* [RING] 1 + the last place with a hash */
  uint32_t filled; /* places that were written, at most RING */
};

mm_reply_index *mm_reply_index_open(mm_err *err) {
  mm_reply_index *x = mm_calloc(1, sizeof *x, err);
  if (x && (x->token = mm_calloc(RING, sizeof *x->token, err)) && (x->salt = mm_calloc(RING, sizeof *x->salt, err)) &&
      (x->link = mm_calloc(RING, sizeof *x->link, err)) && (x->head = mm_calloc(RING, sizeof *x->head, err)))
    return x;
  mm_reply_index_close(x);
  return NULL;
}

void mm_reply_index_close(mm_reply_index *x) {
  if (x) MM_FREE(x->token, x->salt, x->link, x->head, x);
}

static void put(mm_reply_index *x, uint64_t salt, int32_t id) {
  x->token[x->next % RING] = id;
  x->salt[x->next % RING] = salt;
  x->link[x->next % RING] = 0;
  x->next++;
  x->filled += x->filled < RING;
}

void mm_reply_index_add(mm_reply_index *x, uint64_t salt, const int32_t *token, uint32_t count) {
  if (count > RING / 4) token += count - RING / 4, count = RING / 4;
  if (count <= REPLY_GRAM) return;
  const uint32_t first = x->next;
  for (uint32_t i = 0; i < count; i++) put(x, salt, token[i]);
  put(x, salt, NO_ID);
  for (uint32_t i = 0; i + REPLY_GRAM < count; i++) {
    uint32_t *head = &x->head[hash_of(salt, token + i, REPLY_GRAM, RING_BITS)];
    x->link[(first + i) % RING] = *head;
    *head = first + i + 1;
  }
}

/* Equal tokens before `end` in the ring and before the sequence's end, `most` at most. */
static uint32_t equal_in_ring(const mm_reply_index *x, uint64_t salt, uint32_t end, const int32_t *last, uint32_t most) {
  uint32_t n = 0;
  for (; n < most && x->next - (end - 1 - n) <= x->filled; n++) {
    const uint32_t at = (end - 1 - n) % RING;
    if (x->token[at] != last[-1 - (int64_t)n] || x->salt[at] != salt) break;
  }
  return n;
}

uint32_t mm_reply_index_find(const mm_reply_index *x, uint64_t salt, const int32_t *token, uint32_t count, int32_t *next, uint32_t most,
                             uint32_t *matched) {
  *matched = 0;
  if (count < REPLY_GRAM) return 0;
  uint32_t best = 0, found = 0, age = 0;
  uint32_t place = x->head[hash_of(salt, token + count - REPLY_GRAM, REPLY_GRAM, RING_BITS)];
  for (uint32_t i = 0; i < PLACES && found < CANDIDATES && place; i++) {
    const uint32_t at = place - 1;
    if (x->next - at > x->filled || x->next - at <= age) break; /* overwritten, so that all behind it are too */
    age = x->next - at;
    const uint32_t equal = equal_in_ring(x, salt, at + REPLY_GRAM, token + count, (uint32_t)mm_min(count, MM_GRAM_MATCH));
    if (equal >= REPLY_GRAM) found++;
    if (equal >= REPLY_GRAM && equal > *matched) best = at + REPLY_GRAM, *matched = equal;
    place = x->link[at % RING];
  }
  uint32_t n = 0;
  for (; *matched && n < most && x->token[(best + n) % RING] != NO_ID && x->salt[(best + n) % RING] == salt; n++)
    next[n] = x->token[(best + n) % RING];
  return n;
}
