/* Masks. Tokens in the order of their bytes share what was found for their common beginnings, and a mask is kept for states that come
 * again: within a string, most do. */
#include "runtime/constrain/constraint.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/chat/elements.h"
#include "runtime/chat/reply.h"

#define KEPT 16 /* masks of a constraint */

typedef struct word {
  const char *bytes;
  uint32_t n;
  uint32_t shared; /* bytes that it has in common with the word before */
  int32_t id;
} word;

struct mm_lexicon {
  const mm_tokenizer *tokenizer;
  const int32_t *end;
  uint32_t end_count, words_of_mask, longest;
  word *word; /* [count], by bytes */
  size_t count;
  uint32_t *ordinary;            /* mask of all words */
  int32_t marker[MM_REPLY_TAGS]; /* ids of the tags that mark the parts of a reply, -1 where a tag is no token */
  int32_t mark;                  /* M3's mark, likewise */
};

typedef struct kept {
  mm_grammar state;
  uint32_t *mask;
  uint64_t used;
} kept;

struct mm_constraint {
  const mm_lexicon *lexicon;
  mm_section section[MM_SECTIONS];
  uint32_t sections, now;
  mm_grammar state; /* of a form */
  mm_grammar *path; /* [longest + 1] states after the bytes of a word */
  uint32_t *mask;
  kept kept[KEPT];
  uint64_t clock;
  bool begun; /* the form has more than space */
  bool stuck; /* nothing was allowed */
  bool lost;  /* a token came that was not allowed, or a call instead of a form: nothing is constrained any more */
};

/* ---- The lexicon ---- */

static int by_bytes(const void *a, const void *b) {
  const word *x = a, *y = b;
  const int order = memcmp(x->bytes, y->bytes, x->n < y->n ? x->n : y->n);
  return order ? order : x->n < y->n ? -1 : x->n > y->n;
}

static void set_bit(uint32_t *mask, int32_t id) { mask[id / 32] |= UINT32_C(1) << (id % 32); }

static const char mark_byte[] = {MM_REPLY_MARK};

/* It is a word of forms. */
static bool is_word(const mm_lexicon *l, int32_t id) { return id == l->mark || l->ordinary[id / 32] >> (id % 32) & 1; }

static bool among(const int32_t *ids, uint32_t count, int32_t id) {
  for (uint32_t i = 0; i < count; i++)
    if (ids[i] == id) return true;
  return false;
}

/* The tags are no words, special or not: a reply's parser takes their ids as tags wherever they stand. */
static void fill(mm_lexicon *l, uint32_t vocab) {
  for (uint32_t i = 0; i < MM_REPLY_TAGS; i++) l->marker[i] = mm_tokenizer_find_added(l->tokenizer, mm_reply_tag[i]);
  for (uint32_t id = 0; id < vocab; id++) {
    size_t n;
    const char *bytes = mm_tokenizer_bytes(l->tokenizer, (int32_t)id, &n);
    if (!bytes || !n || mm_tokenizer_is_special(l->tokenizer, (int32_t)id)) continue;
    if (among(l->end, l->end_count, (int32_t)id) || among(l->marker, MM_REPLY_TAGS, (int32_t)id)) continue;
    set_bit(l->ordinary, (int32_t)id);
    if (memchr(bytes, MM_REPLY_MARK, n)) continue; /* no text has this byte */
    l->word[l->count++] = (word){.bytes = bytes, .n = (uint32_t)n, .id = (int32_t)id};
    l->longest = (uint32_t)mm_max(l->longest, n);
  }
  l->mark = mm_tokenizer_find_added(l->tokenizer, MM_CHAT_MARK);
  if (l->mark >= 0 && (uint32_t)l->mark < vocab) l->word[l->count++] = (word){.bytes = mark_byte, .n = 1, .id = l->mark};
  qsort(l->word, l->count, sizeof *l->word, by_bytes);
  for (size_t i = 1; i < l->count; i++) {
    const word *a = &l->word[i - 1];
    word *b = &l->word[i];
    while (b->shared < a->n && b->shared < b->n && a->bytes[b->shared] == b->bytes[b->shared]) b->shared++;
  }
}

mm_lexicon *mm_lexicon_open(const mm_tokenizer *t, uint32_t vocab, const int32_t *end, uint32_t end_count, mm_err *err) {
  mm_lexicon *l = mm_calloc(1, sizeof *l, err);
  if (!l) return NULL;
  *l = (mm_lexicon){.tokenizer = t, .end = end, .end_count = end_count, .words_of_mask = (uint32_t)mm_ceil_div(vocab, 32)};
  l->word = mm_calloc(vocab, sizeof *l->word, err);
  l->ordinary = mm_calloc(l->words_of_mask, sizeof *l->ordinary, err);
  if (l->word && l->ordinary) {
    fill(l, vocab);
    return l;
  }
  mm_lexicon_close(l);
  return NULL;
}

void mm_lexicon_close(mm_lexicon *l) {
  if (!l) return;
  MM_FREE(l->word, l->ordinary, l);
}

/* ---- Masks ---- */

/* Words whose bytes may follow the state, and the end where it may. */
static void mask_form(mm_constraint *c, uint32_t *mask) {
  const mm_lexicon *l = c->lexicon;
  memset(mask, 0, l->words_of_mask * sizeof *mask);
  mm_grammar_copy(&c->path[0], &c->state);
  uint32_t good = 0; /* bytes of the word before that may follow */
  for (size_t i = 0; i < l->count; i++) {
    const word *w = &l->word[i];
    if (w->shared > good) continue; /* the byte that was wrong is in this one too */
    good = w->shared;
    while (good < w->n) {
      mm_grammar_copy(&c->path[good + 1], &c->path[good]);
      if (!mm_grammar_step(&c->path[good + 1], (uint8_t)w->bytes[good])) break;
      good++;
    }
    if (good == w->n) set_bit(mask, w->id);
  }
}

static const uint32_t *form_mask(mm_constraint *c) {
  const mm_lexicon *l = c->lexicon;
  kept *oldest = &c->kept[0];
  for (int i = 0; i < KEPT; i++) {
    kept *k = &c->kept[i];
    if (k->mask && mm_grammar_same(&k->state, &c->state, l->longest)) {
      k->used = ++c->clock;
      return k->mask;
    }
    if (k->used < oldest->used) oldest = k;
  }
  if (!oldest->mask && !(oldest->mask = malloc(l->words_of_mask * sizeof *oldest->mask))) oldest = NULL;
  uint32_t *mask = oldest ? oldest->mask : c->mask;
  mask_form(c, mask);
  if (!oldest) return mask;
  oldest->used = ++c->clock;
  mm_grammar_copy(&oldest->state, &c->state);
  return mask;
}

/* c->mask: what the current section allows, and where it may end, what the next does; ends where nothing need follow. */
static void join(mm_constraint *c, const uint32_t *mask, bool accepts) {
  const mm_lexicon *l = c->lexicon;
  if (mask != c->mask) memcpy(c->mask, mask, l->words_of_mask * sizeof *mask);
  const bool last = c->now + 1 >= c->sections || c->section[c->now + 1].kind == MM_SECTION_END;
  if (accepts && last)
    for (uint32_t i = 0; i < l->end_count; i++) set_bit(c->mask, l->end[i]);
  const mm_section *next = &c->section[c->now + 1], *now = &c->section[c->now];
  if (now->instead && !c->begun) set_bit(c->mask, now->id);
  if (accepts && !last && next->kind == MM_SECTION_TOKEN) set_bit(c->mask, next->id);
}

static const uint32_t *end_alone(mm_constraint *c) {
  const mm_lexicon *l = c->lexicon;
  memset(c->mask, 0, l->words_of_mask * sizeof *c->mask);
  for (uint32_t i = 0; i < l->end_count; i++) set_bit(c->mask, l->end[i]);
  return c->mask;
}

static bool any_of(const uint32_t *mask, uint32_t words) {
  for (uint32_t i = 0; i < words; i++)
    if (mask[i]) return true;
  return false;
}

const uint32_t *mm_constraint_allowed(mm_constraint *c) {
  const mm_lexicon *l = c->lexicon;
  const mm_section *s = &c->section[c->now];
  if (c->stuck) return end_alone(c); /* also after ends that the request ignores */
  if (c->lost) return NULL;
  if (c->now == c->sections) return end_alone(c);
  switch (s->kind) {
    case MM_SECTION_FREE: return NULL;
    case MM_SECTION_END: return end_alone(c);
    case MM_SECTION_UNTIL:
      memcpy(c->mask, l->ordinary, l->words_of_mask * sizeof *c->mask);
      set_bit(c->mask, s->id);
      if (s->instead) set_bit(c->mask, s->call);
      return c->mask;
    case MM_SECTION_TOKEN:
      memset(c->mask, 0, l->words_of_mask * sizeof *c->mask);
      set_bit(c->mask, s->id);
      return c->mask;
    case MM_SECTION_FORM: break;
  }
  join(c, form_mask(c), mm_grammar_accepts(&c->state));
  if (any_of(c->mask, l->words_of_mask)) return c->mask;
  c->stuck = true;
  return end_alone(c);
}

bool mm_constraint_stuck(const mm_constraint *c) { return c->stuck; }

/* ---- Steps ---- */

static void next_section(mm_constraint *c) {
  c->now++;
  c->begun = false;
  if (c->now < c->sections && c->section[c->now].kind == MM_SECTION_FORM) mm_grammar_start(&c->state, c->section[c->now].form);
}

/* A call begins before its place: what stands between is passed over. */
static void begin_call(mm_constraint *c, int32_t id) {
  while (c->now < c->sections && (c->section[c->now].kind != MM_SECTION_TOKEN || c->section[c->now].id != id)) c->now++;
  c->lost = c->now == c->sections;
  if (!c->lost) next_section(c);
}

static void step_form(mm_constraint *c, int32_t id) {
  size_t n;
  const char *bytes = mm_tokenizer_bytes(c->lexicon->tokenizer, id, &n);
  const bool text = is_word(c->lexicon, id);
  const mm_section *s = &c->section[c->now];
  if (s->instead && !c->begun && id == s->id) {
    begin_call(c, id);
    return;
  }
  if (id == c->lexicon->mark) bytes = mark_byte, n = 1;
  if (!text && mm_grammar_accepts(&c->state)) {
    next_section(c);
    if (c->now < c->sections) mm_constraint_chosen(c, id);
    return;
  }
  for (size_t i = 0; bytes && i < n && text; i++) {
    if (!mm_grammar_step(&c->state, (uint8_t)bytes[i])) c->lost = true;
    c->begun |= !strchr(" \t\r\n", bytes[i]);
  }
  c->lost |= !text;
  /* If only the next section can follow, it begins now. */
  if (c->lost || !mm_grammar_done(&c->state)) return;
  if (s->again) c->now = UINT32_MAX;
  next_section(c);
}

void mm_constraint_chosen(mm_constraint *c, int32_t id) {
  if (c->lost || c->now == c->sections) return;
  const mm_section *s = &c->section[c->now];
  switch (s->kind) {
    case MM_SECTION_END: return;
    case MM_SECTION_FREE:
      if (id == s->id) next_section(c);
      return;
    case MM_SECTION_UNTIL:
      if (s->instead && id == s->call) {
        begin_call(c, id);
        return;
      }
      if (id == s->id) next_section(c);
      return;
    case MM_SECTION_TOKEN:
      if (id != s->id) return;
      if (s->again) c->now = UINT32_MAX;
      next_section(c);
      return;
    case MM_SECTION_FORM: step_form(c, id);
  }
}

/* ---- Opening ---- */

mm_constraint *mm_constraint_open(const mm_lexicon *l, const mm_section *section, uint32_t sections, mm_err *err) {
  mm_constraint *c = mm_calloc(1, sizeof *c, err);
  if (!c) return NULL;
  c->lexicon = l;
  c->path = mm_calloc((size_t)l->longest + 1, sizeof *c->path, err);
  c->mask = mm_calloc(l->words_of_mask, sizeof *c->mask, err);
  if (!c->path || !c->mask) {
    mm_constraint_close(c);
    return NULL;
  }
  memcpy(c->section, section, sections * sizeof *section);
  c->sections = sections;
  if (sections && section[0].kind == MM_SECTION_FORM) mm_grammar_start(&c->state, section[0].form);
  return c;
}

void mm_constraint_close(mm_constraint *c) {
  if (!c) return;
  for (int i = 0; i < KEPT; i++) free(c->kept[i].mask);
  MM_FREE(c->path, c->mask, c);
}
