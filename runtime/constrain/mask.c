/* Masks. Words share what was found for their common beginnings, and most words of a text are known without a look at each. */
#include "runtime/constrain/mask.h"

#include <string.h>

/* What a walk may set: words whose text before has need to room characters. */
typedef struct masker {
  const mm_lexicon *l;
  const mm_mask_path *p;
  uint32_t need, longest;
  uint32_t *mask;
  const uint32_t *had; /* NULL, or words that are of no interest */
} masker;

/* The state in p->state[place] is what stands after `place` bytes. */
static void note_place(const masker *m, uint32_t place) {
  const mm_grammar *g = &m->p->state[place];
  mm_path_place *at = &m->p->at[place];
  at->place = place;
  at->in_text = mm_grammar_in_text(g, m->l->longest);
  at->decided = !at->in_text && mm_grammar_automaton(g, &at->by);
}

/* The byte may follow after `depth` bytes of a word. */
static bool step_place(masker *m, uint32_t depth, uint8_t byte) {
  const mm_path_place *from = &m->p->at[depth];
  mm_path_place *to = &m->p->at[depth + 1];
  mm_grammar *next = &m->p->state[depth + 1];
  if (from->in_text && mm_is_plain(byte)) {
    *to = *from;
    return true;
  }
  if (from->decided) {
    *to = *from;
    const mm_automaton_step step = mm_automaton_take(&to->by, byte);
    if (step != MM_AUTOMATON_LEAVES) return step == MM_AUTOMATON_TAKES;
  }
  mm_grammar_copy(next, &m->p->state[from->place]);
  if (from->decided) mm_grammar_set_automaton(next, from->by.at);
  const bool takes = mm_grammar_step(next, byte);
  if (takes) note_place(m, depth + 1);
  return takes;
}

static void set_text(const masker *m, const mm_trie *t, uint32_t text) {
  for (uint32_t i = t->first[text]; i < t->first[text + 1]; i++)
    if (t->word[i].characters >= m->need && t->word[i].characters <= m->longest) mm_mask_set(m->mask, t->word[i].id);
}

static bool had_text(const masker *m, const mm_trie *t, uint32_t text) {
  for (uint32_t i = t->first[text]; i < t->first[text + 1]; i++)
    if (!mm_mask_has(m->had, t->word[i].id)) return false;
  return true;
}

/* Sets the words of texts that may follow p->state[0]. */
static void walk(masker *m, const mm_trie *t) {
  uint32_t fresh = 0; /* the texts before it are of no interest */
  note_place(m, 0);
  if (t->empty) set_text(m, t, 0);
  for (uint32_t i = 0; i < t->nodes;) {
    const mm_trie_node *n = &t->node[i];
    const uint32_t behind = t->node[n->next].first;
    fresh = (uint32_t)mm_max(fresh, n->first);
    while (m->had && fresh < behind && had_text(m, t, fresh)) fresh++;
    if ((m->had && fresh >= behind) || !step_place(m, n->depth, n->byte)) {
      i = n->next;
      continue;
    }
    if (n->text != MM_TRIE_NONE) set_text(m, t, n->text);
    i++;
  }
}

/* Words with a tag or its beginning alone, which the mask has for another state. */
static void walk_tagged(masker *m, const mm_grammar *state) {
  const mm_trie *t = &m->l->tagged;
  m->need = 0;
  m->longest = UINT32_MAX;
  for (uint32_t i = 0; i < t->first[t->texts]; i++) mm_mask_clear(m->mask, t->word[i].id);
  mm_grammar_copy(&m->p->state[0], state);
  walk(m, t);
}

static void clear_subtree(const masker *m, const mm_trie *t, uint32_t from) {
  for (uint32_t i = from; i < t->node[from].next; i++) {
    const uint32_t text = t->node[i].text;
    if (text == MM_TRIE_NONE) continue;
    for (uint32_t k = t->first[text]; k < t->first[text + 1]; k++) mm_mask_clear(m->mask, t->word[k].id);
  }
}

/* Words that go on with a tag which may have begun; the mask has the others. */
static void walk_tag(masker *m, const mm_grammar *state) {
  const mm_trie *t = &m->l->all;
  uint32_t ended = UINT32_MAX; /* bytes of the word before the one that ended the tag */
  m->need = 0;
  m->longest = UINT32_MAX;
  mm_grammar_copy(&m->p->state[0], state);
  for (uint32_t i = 0; i < t->nodes;) {
    const mm_trie_node *n = &t->node[i];
    mm_grammar *next = &m->p->state[n->depth + 1];
    if (n->depth <= ended) ended = UINT32_MAX;
    mm_grammar_copy(next, &m->p->state[n->depth]);
    const bool follows = mm_grammar_step(next, n->byte);
    const mm_tag_walk walk = !follows || ended != UINT32_MAX ? MM_TAG_GOES_ON : mm_grammar_tag(next, state->first.depth);
    if (!follows) clear_subtree(m, t, i);
    if (!follows || walk == MM_TAG_LEFT) {
      i = n->next;
      continue;
    }
    if (walk == MM_TAG_ENDS) ended = n->depth;
    if (n->text != MM_TRIE_NONE) set_text(m, t, n->text);
    i++;
  }
}

/* The words but those that are in `had` already. */
static void add_words(const mm_lexicon *l, const mm_mask_path *p, const mm_grammar *state, const uint32_t *had, uint32_t *mask) {
  mm_grammar plain;
  const bool tag = mm_grammar_plain(&plain, state);
  const mm_grammar *tagged = state;
  if (tag) state = &plain;
  const mm_grammar_text t = mm_grammar_text_of(state, l->longest);
  masker m = {.l = l, .p = p, .need = t.need, .longest = t.kind == MM_TEXT_NONE ? UINT32_MAX : t.longest, .mask = mask};
  if (t.kind != MM_TEXT_NONE) mm_text_words_mask(l, t.kind == MM_TEXT_STRING ? &l->string : &l->prose, t.longest, mask);
  mm_grammar_copy(&p->state[0], state);
  if (t.kind == MM_TEXT_NONE) {
    memset(mask, 0, l->words_of_mask * sizeof *mask);
    m.had = had;
    walk(&m, &l->all);
    m.had = NULL;
  } else if (t.kind == MM_TEXT_STRING && t.need <= t.longest && mm_grammar_end_string(&p->state[0], t.need)) {
    walk(&m, &l->tails);
  }
  if (t.tags) walk_tagged(&m, state);
  if (tag) walk_tag(&m, tagged);
}

/* Each way to read the text by itself, which is faster than all at every byte; none takes another's place where it forks within a word. */
static void add_ways(const mm_lexicon *l, const mm_mask_path *p, const mm_grammar *state, uint32_t *mask) {
  mm_grammar one = {0};
  memset(mask, 0, l->words_of_mask * sizeof *mask);
  for (uint32_t i = 0; i < state->count; i++) {
    mm_grammar_way(&one, state, i);
    add_words(l, p, &one, mask, p->one);
    for (uint32_t k = 0; k < l->words_of_mask; k++) mask[k] |= p->one[k];
  }
}

void mm_mask_words(const mm_lexicon *l, const mm_mask_path *p, const mm_grammar *state, uint32_t *mask) {
  if (state->count > 1 && mm_grammar_text_of(state, l->longest).kind == MM_TEXT_NONE)
    add_ways(l, p, state, mask);
  else
    add_words(l, p, state, NULL, mask);
}
