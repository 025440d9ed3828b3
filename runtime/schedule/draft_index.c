/* Hash chains over grams: a table has the last place of each hash, and a ring the place before it with the same hash. Every place is
 * compared with the tokens themselves, so that a collision costs a comparison and never a wrong match. */
#include "runtime/schedule/draft_index.h"

#include <stdlib.h>
#include <string.h>

enum {
  REPLY_GRAM = 4, /* tokens of a gram of a reply of another request */
  CANDIDATES = 4, /* matches of which the longest is taken, or the first */
  ENOUGH = 8,     /* of so many tokens */
  TRIES = 64,     /* places of one hash that are compared at most */
  PLACES = 65535, /* places of a sequence are stored modulo it */
  SIZE_MIN = 256,
  BEHIND = 64, /* places around the expected one where a copy is looked for */
  AHEAD = 64
};

static uint64_t mix(uint64_t h, uint32_t id) {
  h = (h ^ id) * UINT64_C(0x9e3779b97f4a7c15);
  return h ^ (h >> 32);
}

/* The last 3 tokens or more. */
static mm_gram_hash hash_last(const int32_t *token, uint32_t count) {
  const int32_t *end = token + count;
  const uint64_t two = mix(mix(2, (uint32_t)end[-1]), (uint32_t)end[-2]), three = mix(two, (uint32_t)end[-3]);
  return (mm_gram_hash){count, (uint32_t)two, (uint32_t)three, count < REPLY_GRAM ? 0 : mix(three, (uint32_t)end[-4])};
}

/* Equal tokens before two places, `most` at most. */
static uint32_t equal_before(const int32_t *a, const int32_t *b, uint32_t most) {
  uint32_t n = 0;
  while (n < most && a[-1 - (int64_t)n] == b[-1 - (int64_t)n]) n++;
  return n;
}

/* ---- one sequence ---- */

void mm_gram_index_close(mm_gram_index *x) {
  free(x->head);
  *x = (mm_gram_index){0};
}

/* Room for so many tokens, or for the window; growing starts again from an empty index. */
static bool grow(mm_gram_index *x, uint32_t count) {
  uint32_t size = x->size ? x->size : SIZE_MIN;
  while (size < count && size < MM_GRAM_WINDOW) size *= 2;
  if (size == x->size) return true;
  mm_gram_index_close(x);
  mm_err err = {0};
  if (!(x->head = mm_calloc(6 * (size_t)size, sizeof *x->head, &err))) return false;
  x->link = x->head + 4 * (size_t)size;
  x->size = size;
  return true;
}

/* Each length of gram has chains of its own. */
static uint16_t *head_of(const mm_gram_index *x, const mm_gram_hash *h, uint32_t gram) {
  const uint32_t mask = 2 * x->size - 1;
  return gram == 2 ? &x->head[h->two & mask] : &x->head[2 * x->size + (h->three & mask)];
}

static uint16_t *link_of(const mm_gram_index *x, uint32_t gram, uint32_t place) {
  return &x->link[(gram - 2) * x->size + (place & (x->size - 1))];
}

static void add_grams(mm_gram_index *x, const mm_gram_hash *h) {
  for (uint32_t gram = 2; gram <= 3; gram++) {
    uint16_t *head = head_of(x, h, gram);
    *link_of(x, gram, h->count) = *head;
    *head = (uint16_t)(1 + h->count % PLACES);
  }
}

/* Adds the grams before the last ones, and notes these. */
static void follow(mm_gram_index *x, const int32_t *token, uint32_t count) {
  uint32_t next = (uint32_t)mm_max(x->next, 3);
  if (count > x->size) next = (uint32_t)mm_max(next, count - x->size);
  for (; next < count; next++) {
    const mm_gram_hash h = x->at.count == next ? x->at : hash_last(token, next);
    add_grams(x, &h);
  }
  x->next = next;
  if (x->at.count != count) x->at = hash_last(token, count);
}

/* The longest of the latest matches of the last `gram` tokens, 0 for none. */
static uint32_t find_gram(const mm_gram_index *x, const int32_t *token, uint32_t count, uint32_t gram, uint32_t *matched) {
  const uint32_t candidates = gram == 2 ? 1 : CANDIDATES; /* longer matches would have been found */
  const uint32_t end = count % PLACES, oldest = (uint32_t)mm_min(count - 3, x->size);
  uint32_t best = 0, found = 0, age = 0;
  *matched = 0;
  uint32_t stored = *head_of(x, &x->at, gram);
  for (uint32_t i = 0; i < TRIES && found < candidates && *matched < ENOUGH && stored; i++) {
    /* Each place is further back than the one before it; else it was there before the window. */
    const uint32_t back = (end + PLACES - (stored - 1)) % PLACES;
    if (back > oldest || back <= age) break;
    age = back;
    const uint32_t place = count - back, equal = equal_before(token + place, token + count, (uint32_t)mm_min(place, MM_GRAM_MATCH));
    found += equal >= gram;
    if (equal >= gram && equal > *matched) best = place, *matched = equal;
    stored = *link_of(x, gram, place);
  }
  return best;
}

uint32_t mm_gram_index_find(mm_gram_index *x, const int32_t *token, uint32_t count, uint32_t *matched) {
  *matched = 0;
  if (count <= 3 || !grow(x, count)) return 0;
  follow(x, token, count);
  const uint32_t place = find_gram(x, token, count, 3, matched);
  return place ? place : find_gram(x, token, count, 2, matched);
}

uint32_t mm_copy_match(const int32_t *token, uint32_t count, uint32_t place) {
  return equal_before(token + place, token + count, (uint32_t)mm_min(place, MM_GRAM_MATCH));
}

uint32_t mm_copy_find(const int32_t *token, uint32_t count, uint32_t place, uint32_t *matched) {
  const uint32_t from = place > BEHIND + 2 ? place - BEHIND : 2, end = (uint32_t)mm_min(place + (uint64_t)AHEAD, count);
  const int32_t last = token[count - 1];
  uint32_t best = 0;
  *matched = 0;
  for (uint32_t i = from; i < end; i++) {
    const uint32_t at = i < from + (end - place) ? i + (place - from) : i - (end - place); /* from `place` on, then before it */
    const uint32_t equal = token[at - 1] == last ? mm_copy_match(token, count, at) : 0;
    if (equal >= 2 && equal > *matched) best = at, *matched = equal;
  }
  return best;
}

/* ---- replies of all requests ---- */

enum { RING = MM_REPLY_TOKENS, HEADS = 2 * MM_REPLY_TOKENS, NO_ID = -1 };

/* A link is a place modulo RING and bits of the hash that the place in the table does not have, the lowest of them 1; 0: none. */
struct mm_reply_index {
  uint32_t next;   /* place of the next token, modulo RING */
  uint32_t filled; /* places that were written, at most RING */
  int32_t *token;  /* [RING] NO_ID ends each reply */
  uint64_t *salt;  /* [RING] */
  uint32_t *link;  /* [RING] the place before with the same hash, at a gram's last token */
  uint32_t *head;  /* [HEADS] */
};

mm_reply_index *mm_reply_index_open(mm_err *err) {
  mm_reply_index *x = mm_calloc(1, sizeof *x, err);
  if (x && (x->token = mm_calloc(RING, sizeof *x->token, err)) && (x->salt = mm_calloc(RING, sizeof *x->salt, err)) &&
      (x->link = mm_calloc(RING, sizeof *x->link, err)) && (x->head = mm_calloc(HEADS, sizeof *x->head, err)))
    return x;
  mm_reply_index_close(x);
  return NULL;
}

void mm_reply_index_close(mm_reply_index *x) {
  if (x) MM_FREE(x->token, x->salt, x->link, x->head, x);
}

static uint64_t salted(uint64_t four, uint64_t salt) { return mix(four ^ salt, REPLY_GRAM); }
static uint32_t *reply_head(const mm_reply_index *x, uint64_t hash) { return &x->head[hash % HEADS]; }
static uint32_t mark_of(uint64_t hash) { return (uint32_t)(hash >> 32) / RING * RING | RING; }

static void put(mm_reply_index *x, uint64_t salt, int32_t id) {
  x->token[x->next] = id;
  x->salt[x->next] = salt;
  x->link[x->next] = 0;
  x->next = (x->next + 1) % RING;
  x->filled += x->filled < RING;
}

void mm_reply_index_add(mm_reply_index *x, uint64_t salt, const int32_t *token, uint32_t count) {
  if (count > RING / 4) token += count - RING / 4, count = RING / 4;
  if (count <= REPLY_GRAM) return;
  const uint32_t first = x->next;
  for (uint32_t i = 0; i < count; i++) put(x, salt, token[i]);
  put(x, salt, NO_ID);
  for (uint32_t end = REPLY_GRAM; end < count; end++) {
    const uint64_t hash = salted(hash_last(token, end).four, salt);
    const uint32_t place = (first + end - 1) % RING;
    x->link[place] = *reply_head(x, hash);
    *reply_head(x, hash) = mark_of(hash) | place;
  }
}

/* Equal tokens at a place and before it in the ring, and before the sequence's end, `most` at most. */
static uint32_t equal_in_ring(const mm_reply_index *x, uint64_t salt, uint32_t place, const int32_t *end, uint32_t most) {
  uint32_t n = 0;
  for (; n < most; n++) {
    const uint32_t at = (place - n) % RING;
    if (x->token[at] != end[-1 - (int64_t)n] || x->salt[at] != salt || (x->next - at - 1) % RING >= x->filled) break;
  }
  return n;
}

uint32_t mm_reply_index_find(const mm_reply_index *x, uint64_t salt, const mm_gram_index *own, const int32_t *token, int32_t *next,
                             uint32_t most, uint32_t *matched) {
  const uint32_t count = own->at.count, longest = (uint32_t)mm_min(count, MM_GRAM_MATCH);
  *matched = 0;
  if (count < REPLY_GRAM) return 0;
  const uint64_t hash = salted(own->at.four, salt);
  const uint32_t mark = mark_of(hash);
  uint32_t best = 0, found = 0, age = 0;
  uint32_t link = *reply_head(x, hash);
  for (uint32_t i = 0; i < TRIES && found < CANDIDATES && *matched < ENOUGH && link; i++) {
    const uint32_t place = link % RING, back = (x->next - place - 1) % RING;
    if (back >= x->filled || back <= age) break; /* overwritten, so that all behind it are too */
    age = back;
    const uint32_t equal = link - place == mark ? equal_in_ring(x, salt, place, token + count, longest) : 0;
    found += equal >= REPLY_GRAM;
    if (equal >= REPLY_GRAM && equal > *matched) best = place + 1, *matched = equal;
    link = x->link[place];
  }
  uint32_t n = 0;
  for (; *matched && n < most && x->token[(best + n) % RING] != NO_ID; n++) next[n] = x->token[(best + n) % RING];
  return n;
}

void mm_draft_index_prefetch(mm_gram_index *x, const mm_reply_index *replies, uint64_t salt, const int32_t *token, uint32_t count) {
  if (!x->size || count <= 3 || x->at.count + 1 != count) return; /* the find will see more tokens than these */
  follow(x, token, count);
  __builtin_prefetch(head_of(x, &x->at, 3), 1);
  __builtin_prefetch(head_of(x, &x->at, 2), 1);
  if (replies) __builtin_prefetch(reply_head(replies, salted(x->at.four, salt)));
}
