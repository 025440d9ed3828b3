/* Constraints: the sections of a reply, and masks that are kept for states that come again: within a string, most do. */
#include "runtime/constrain/constrain.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/chat/elements.h"
#include "runtime/constrain/mask.h"

#define KEPT 16 /* masks of a constraint */

typedef struct kept {
  mm_grammar state;
  uint32_t *mask;
  uint64_t used;
} kept;

struct mm_constraint {
  const mm_lexicon *lexicon;
  mm_section section[MM_SECTIONS];
  uint32_t sections, now;
  uint32_t spent;   /* tokens of a limited section */
  mm_grammar state; /* of a form */
  mm_mask_path path;
  mm_grammar_stack *more; /* of state, of what is kept and of the path; not read before it is written */
  uint32_t *mask;
  kept kept[KEPT];
  uint64_t clock;
  bool begun; /* the form has more than space; the reasoning is open */
  bool stuck; /* nothing was allowed */
  bool lost;  /* a token came that was not allowed, or a call instead of a form: nothing is constrained any more */
};

static const char mark_byte[] = {MM_REPLY_MARK};

/* It is a word of forms. */
static bool is_word(const mm_lexicon *l, int32_t id) { return id == l->mark || l->ordinary[id / 32] >> (id % 32) & 1; }

/* ---- Masks ---- */

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
  mm_mask_words(l, &c->path, &c->state, mask);
  if (!oldest) return mask;
  oldest->used = ++c->clock;
  mm_grammar_copy(&oldest->state, &c->state);
  return mask;
}

/* The words, and where the section may end, what the next does; ends where nothing need follow. A mask with no more than the words is not
 * copied. */
static const uint32_t *join(mm_constraint *c, const uint32_t *mask, bool accepts) {
  const mm_lexicon *l = c->lexicon;
  const mm_section *next = &c->section[c->now + 1], *now = &c->section[c->now];
  const bool instead = now->instead && !c->begun;
  if (!accepts && !instead) return mask;
  if (mask != c->mask) memcpy(c->mask, mask, l->words_of_mask * sizeof *mask);
  const bool last = c->now + 1 >= c->sections || next->kind == MM_SECTION_END;
  if (accepts && last)
    for (uint32_t i = 0; i < l->end_count; i++) mm_mask_set(c->mask, l->end[i]);
  if (instead) mm_mask_set(c->mask, now->id);
  if (accepts && !last && next->kind == MM_SECTION_TOKEN) mm_mask_set(c->mask, next->id);
  return c->mask;
}

static const uint32_t *end_alone(mm_constraint *c) {
  const mm_lexicon *l = c->lexicon;
  memset(c->mask, 0, l->words_of_mask * sizeof *c->mask);
  for (uint32_t i = 0; i < l->end_count; i++) mm_mask_set(c->mask, l->end[i]);
  return c->mask;
}

static const uint32_t *token_alone(mm_constraint *c, int32_t id) {
  memset(c->mask, 0, c->lexicon->words_of_mask * sizeof *c->mask);
  mm_mask_set(c->mask, id);
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
  if (s->limited && c->spent >= s->most && (c->begun || !s->opened)) return token_alone(c, s->id);
  switch (s->kind) {
    case MM_SECTION_FREE: return NULL;
    case MM_SECTION_END: return end_alone(c);
    case MM_SECTION_UNTIL:
      memcpy(c->mask, l->ordinary, l->words_of_mask * sizeof *c->mask);
      mm_mask_set(c->mask, s->id);
      if (s->instead) mm_mask_set(c->mask, s->call);
      return c->mask;
    case MM_SECTION_TOKEN: return token_alone(c, s->id);
    case MM_SECTION_FORM: break;
  }
  const uint32_t *mask = join(c, form_mask(c), mm_grammar_accepts(&c->state));
  if (any_of(mask, l->words_of_mask)) return mask;
  c->stuck = true;
  return end_alone(c);
}

bool mm_constraint_stuck(const mm_constraint *c) { return c->stuck; }

bool mm_constraint_over(const mm_constraint *c) { return c->now == c->sections && !c->lost && !c->lexicon->end_count; }

/* ---- Steps ---- */

static void next_section(mm_constraint *c) {
  c->now++;
  c->begun = false;
  c->spent = 0;
  if (c->now < c->sections && c->section[c->now].kind == MM_SECTION_FORM) mm_grammar_start(&c->state, c->section[c->now].form);
}

/* A call begins before its place: what stands between is passed over. */
static void begin_call(mm_constraint *c, int32_t id) {
  for (; c->now < c->sections; c->now++) {
    const mm_section *s = &c->section[c->now];
    if ((s->kind == MM_SECTION_TOKEN || s->kind == MM_SECTION_FREE) && s->id == id) break;
  }
  c->lost = c->now == c->sections;
  if (!c->lost) next_section(c);
}

/* The section before the one that follows `again`. */
static void rewind_sections(mm_constraint *c) { c->now = c->section[0].once ? 0 : UINT32_MAX; }

static void step_tokens(mm_constraint *c, int32_t id) {
  const mm_section *s = &c->section[c->now];
  if (s->opened && !c->begun) {
    if (id == s->open) {
      c->begun = true;
      return;
    }
    next_section(c);
    if (c->now < c->sections) mm_constraint_chosen(c, id);
    return;
  }
  if (s->instead && id == s->call)
    begin_call(c, id);
  else if (id == s->id)
    next_section(c);
  else if (c->spent < UINT32_MAX)
    c->spent++;
}

static bool takes_all(mm_grammar *g, const char *bytes, size_t n) {
  size_t i = 0;
  while (i < n && mm_grammar_step(g, (uint8_t)bytes[i])) i++;
  return i == n;
}

/* Where a word is read in more ways than are followed at once, a way may take the place of the one by which the mask allows it: then each
 * reads it alone, as for the mask. */
static bool takes_word(mm_constraint *c, const char *bytes, size_t n) {
  mm_grammar *before = &c->path.state[0], *one = &c->path.state[1];
  const uint32_t ways = c->state.count;
  c->state.lost = false;
  if (ways > 1) mm_grammar_copy(before, &c->state);
  const bool takes = takes_all(&c->state, bytes, n);
  if (ways == 1 || !c->state.lost) return takes;
  c->state.count = 0;
  for (uint32_t i = 0; i < ways; i++) {
    mm_grammar_way(one, before, i);
    if (takes_all(one, bytes, n)) mm_grammar_add(&c->state, one);
  }
  return c->state.count;
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
  c->lost = !text || (bytes && !takes_word(c, bytes, n));
  for (size_t i = 0; bytes && i < n && text; i++) c->begun |= !strchr(" \t\r\n", bytes[i]);
  /* If only the next section can follow, it begins now. */
  if (c->lost || !mm_grammar_done(&c->state)) return;
  if (s->again) rewind_sections(c);
  next_section(c);
}

void mm_constraint_chosen(mm_constraint *c, int32_t id) {
  if (c->lost || c->now == c->sections) return;
  const mm_section *s = &c->section[c->now];
  switch (s->kind) {
    case MM_SECTION_END: return;
    case MM_SECTION_FREE:
    case MM_SECTION_UNTIL: step_tokens(c, id); return;
    case MM_SECTION_TOKEN:
      if (id != s->id) return;
      if (s->again) rewind_sections(c);
      next_section(c);
      return;
    case MM_SECTION_FORM: step_form(c, id);
  }
}

/* ---- Opening ---- */

/* One piece of memory has the further ways of all states: pages of it are touched where texts fork alone. */
static bool open_states(mm_constraint *c, mm_err *err) {
  const size_t path = (size_t)c->lexicon->longest + 1, states = path + KEPT + 1;
  c->path.state = mm_calloc(path, sizeof *c->path.state, err);
  c->path.at = mm_calloc(path, sizeof *c->path.at, err);
  c->more = malloc(states * MM_GRAMMAR_MORE * sizeof *c->more);
  c->path.one = mm_calloc(c->lexicon->words_of_mask, sizeof *c->path.one, err);
  if (!c->path.state || !c->path.at || !c->path.one) return false;
  if (!c->more) return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "no memory for %zu states of a constraint", states);
  mm_grammar_stack *more = c->more;
  c->state.more = more;
  for (int i = 0; i < KEPT; i++) c->kept[i].state.more = more += MM_GRAMMAR_MORE;
  for (size_t i = 0; i < path; i++) c->path.state[i].more = more += MM_GRAMMAR_MORE;
  return true;
}

mm_constraint *mm_constraint_open(const mm_lexicon *l, const mm_section *section, uint32_t sections, mm_err *err) {
  mm_constraint *c = mm_calloc(1, sizeof *c, err);
  if (!c) return NULL;
  c->lexicon = l;
  c->mask = mm_calloc(l->words_of_mask, sizeof *c->mask, err);
  if (!c->mask || !open_states(c, err)) {
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
  MM_FREE(c->path.state, c->path.at, c->path.one, c->more, c->mask, c);
}
