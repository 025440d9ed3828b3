/* The lexicon: all words of a tokenizer as tries, and their parts in texts. The automaton follows the bytes of each word. */
#include "runtime/constrain/lexicon_inside.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/chat/elements.h"

/* A word, or its part that a trie has. */
typedef struct item {
  const char *bytes;
  uint32_t n;
  mm_trie_word word;
  uint64_t key; /* its first bytes, most of which differ */
} item;

typedef struct items {
  item *item;
  size_t count, cap;
} items;

static const char mark_byte[] = {MM_REPLY_MARK};

/* ---- Tries ---- */

static int by_bytes(const void *a, const void *b) {
  const item *x = a, *y = b;
  if (x->key != y->key) return x->key < y->key ? -1 : 1;
  const int order = memcmp(x->bytes, y->bytes, mm_min(x->n, y->n));
  if (order || x->n != y->n) return order ? order : x->n < y->n ? -1 : 1;
  return (x->word.id > y->word.id) - (x->word.id < y->word.id);
}

static uint32_t shared(const item *a, const item *b) {
  uint32_t n = 0;
  while (n < a->n && n < b->n && a->bytes[n] == b->bytes[n]) n++;
  return n;
}

/* Nodes for the bytes of the i-th item from `from` on. open: the nodes of the bytes of the one before, whose subtrees end here. */
static void add_nodes(mm_trie *t, const item *x, uint32_t from, uint32_t *open, uint32_t *depth) {
  while (*depth > from) t->node[open[--*depth]].next = t->nodes;
  for (; *depth < x->n; ++*depth) {
    open[*depth] = t->nodes;
    t->node[t->nodes++] =
        (mm_trie_node){.text = MM_TRIE_NONE, .first = t->texts, .depth = (uint16_t)*depth, .byte = (uint8_t)x->bytes[*depth]};
  }
}

/* Sorts the items. */
static bool build(mm_trie *t, items *list, mm_err *err) {
  size_t nodes = 0, longest = 0;
  if (list->count) qsort(list->item, list->count, sizeof *list->item, by_bytes);
  for (size_t i = 0; i < list->count; i++) {
    nodes += list->item[i].n - (i ? shared(&list->item[i - 1], &list->item[i]) : 0);
    longest = mm_max(longest, list->item[i].n);
  }
  t->node = mm_calloc(nodes + 1, sizeof *t->node, err);
  t->first = mm_calloc(list->count + 1, sizeof *t->first, err);
  t->word = mm_calloc(list->count + 1, sizeof *t->word, err);
  uint32_t *open = mm_calloc(longest + 1, sizeof *open, err), depth = 0;
  const bool ok = t->node && t->first && t->word && open;
  for (size_t i = 0; ok && i < list->count; i++) {
    const item *x = &list->item[i];
    const uint32_t same = i ? shared(x - 1, x) : 0;
    t->word[i] = x->word;
    if (i && same == x->n && same == x[-1].n) continue;
    add_nodes(t, x, same, open, &depth);
    if (x->n)
      t->node[open[x->n - 1]].text = t->texts;
    else
      t->empty = true;
    t->first[t->texts++] = (uint32_t)i;
  }
  while (depth) t->node[open[--depth]].next = t->nodes;
  if (ok) t->first[t->texts] = (uint32_t)list->count, t->node[t->nodes].first = t->texts;
  free(open);
  return ok;
}

/* ---- Words in texts ---- */

static int by_characters(const void *a, const void *b) {
  const mm_trie_word *x = a, *y = b;
  return x->characters != y->characters ? (x->characters < y->characters ? -1 : 1) : (x->id > y->id) - (x->id < y->id);
}

static bool end_texts(const mm_lexicon *l, mm_text_words *w, mm_err *err) {
  qsort(w->word, w->count, sizeof *w->word, by_characters);
  w->mask = mm_calloc((size_t)(MM_TEXT_LENGTHS + 1) * l->words_of_mask, sizeof *w->mask, err);
  if (!w->mask) return false;
  for (uint32_t longest = 0, i = 0; longest <= MM_TEXT_LENGTHS; longest++) {
    uint32_t *mask = w->mask + (size_t)longest * l->words_of_mask;
    if (longest) memcpy(mask, mask - l->words_of_mask, l->words_of_mask * sizeof *mask);
    for (; i < w->count && (longest == MM_TEXT_LENGTHS || w->word[i].characters <= longest); i++) mm_mask_set(mask, w->word[i].id);
  }
  return true;
}

void mm_text_words_mask(const mm_lexicon *l, const mm_text_words *w, uint32_t longest, uint32_t *mask) {
  const uint32_t row = (uint32_t)mm_min(longest, MM_TEXT_LENGTHS);
  memcpy(mask, w->mask + (size_t)row * l->words_of_mask, l->words_of_mask * sizeof *mask);
  if (row < MM_TEXT_LENGTHS) return;
  for (uint32_t i = w->count; i-- > 0 && w->word[i].characters > longest;) mm_mask_clear(mask, w->word[i].id);
}

/* The state after `begin`, in a text of the form, which has one way to be read. */
static void begin_text(mm_grammar *g, const mm_form *form, uint8_t begin) {
  g->more = NULL;
  mm_grammar_start(g, form);
  mm_grammar_step(g, begin);
}

/* How far the word goes in a string of JSON: *characters of it. Bytes up to behind the quote that ends it, n + 1 if there is none, 0: the
 * word is none of a string. */
static size_t in_string(const item *x, uint32_t *characters) {
  static const mm_form form = {.kind = MM_FORM_STRING, .most = UINT32_MAX};
  mm_grammar g;
  begin_text(&g, &form, '"');
  for (size_t i = 0; i < x->n; i++) {
    *characters = g.first.frame[0].count;
    if (!mm_grammar_step(&g, (uint8_t)x->bytes[i])) return 0;
    if (!g.first.depth) return i + 1;
  }
  *characters = g.first.frame[0].count;
  return x->n + (size_t)1;
}

/* The word is text of an M2 value, at whose end no tag may have begun; nor is there one in it. */
static bool in_prose(const item *x, uint32_t *characters) {
  static const mm_form any = {.kind = MM_FORM_STRING, .most = UINT32_MAX};
  static const mm_form form = {.kind = MM_FORM_VALUE, .most = UINT32_MAX, .by_first[MM_FIRST_STRING] = &any};
  mm_grammar g;
  begin_text(&g, &form, 'x');
  for (size_t i = 0; i < x->n; i++)
    if (!mm_grammar_step(&g, (uint8_t)x->bytes[i]) || !g.first.depth) return false;
  *characters = g.first.frame[0].count - 1;
  return !g.first.frame[0].tag;
}

static bool add(items *list, item x, mm_err *err) {
  if (!MM_GROW(list->item, &list->cap, list->count + 1, err)) return false;
  for (uint32_t i = 0; i < 8; i++) x.key = x.key << 8 | (i < x.n ? (uint8_t)x.bytes[i] : 0);
  list->item[list->count++] = x;
  return true;
}

static bool sort_words(mm_lexicon *l, const items *all, items *tails, items *tagged, mm_err *err) {
  l->string.word = mm_calloc(all->count + 1, sizeof *l->string.word, err);
  l->prose.word = mm_calloc(all->count + 1, sizeof *l->prose.word, err);
  bool ok = l->string.word && l->prose.word;
  for (size_t i = 0; ok && i < all->count; i++) {
    const item *x = &all->item[i];
    uint32_t characters = 0;
    const size_t end = in_string(x, &characters);
    if (end > x->n) l->string.word[l->string.count++] = (mm_trie_word){x->word.id, characters};
    if (end && end <= x->n) ok = add(tails, (item){x->bytes + end, (uint32_t)(x->n - end), {x->word.id, characters}, 0}, err);
    const bool prose = in_prose(x, &characters);
    if (prose) l->prose.word[l->prose.count++] = (mm_trie_word){x->word.id, characters};
    if (ok && ((!prose && memchr(x->bytes, '<', x->n)) || x->word.id == l->mark)) ok = add(tagged, *x, err);
  }
  return ok && end_texts(l, &l->string, err) && end_texts(l, &l->prose, err);
}

/* ---- Words ---- */

static bool among(const int32_t *ids, uint32_t count, int32_t id) {
  for (uint32_t i = 0; i < count; i++)
    if (ids[i] == id) return true;
  return false;
}

/* The tags are no words, special or not: a reply's parser takes their ids as tags wherever they stand. */
static bool find_words(mm_lexicon *l, uint32_t vocab, items *all, mm_err *err) {
  bool ok = true;
  for (uint32_t i = 0; i < MM_REPLY_TAGS; i++) l->marker[i] = mm_tokenizer_find_added(l->tokenizer, mm_reply_tag[i]);
  for (uint32_t id = 0; ok && id < vocab; id++) {
    size_t n;
    const char *bytes = mm_tokenizer_bytes(l->tokenizer, (int32_t)id, &n);
    if (!bytes || !n || mm_tokenizer_is_special(l->tokenizer, (int32_t)id)) continue;
    if (among(l->end, l->end_count, (int32_t)id) || among(l->marker, MM_REPLY_TAGS, (int32_t)id)) continue;
    mm_mask_set(l->ordinary, (int32_t)id);
    if (memchr(bytes, MM_REPLY_MARK, n) || n > UINT16_MAX) continue; /* no text has this byte */
    ok = add(all, (item){bytes, (uint32_t)n, {.id = (int32_t)id}, 0}, err);
    l->longest = (uint32_t)mm_max(l->longest, n);
  }
  l->mark = mm_tokenizer_find_added(l->tokenizer, MM_CHAT_MARK);
  if (l->mark >= (int32_t)vocab) l->mark = -1;
  return ok && (l->mark < 0 || add(all, (item){mark_byte, 1, {.id = l->mark}, 0}, err));
}

mm_lexicon *mm_lexicon_open(const mm_tokenizer *t, uint32_t vocab, const int32_t *end, uint32_t end_count, mm_err *err) {
  mm_lexicon *l = mm_calloc(1, sizeof *l, err);
  items all = {0}, tails = {0}, tagged = {0};
  if (!l) return NULL;
  *l = (mm_lexicon){.tokenizer = t, .end = end, .end_count = end_count, .words_of_mask = (uint32_t)mm_ceil_div(vocab, 32)};
  l->ordinary = mm_calloc(l->words_of_mask, sizeof *l->ordinary, err);
  const bool ok = l->ordinary && find_words(l, vocab, &all, err) && sort_words(l, &all, &tails, &tagged, err) &&
                  build(&l->all, &all, err) && build(&l->tails, &tails, err) && build(&l->tagged, &tagged, err);
  MM_FREE(all.item, tails.item, tagged.item);
  if (ok) return l;
  mm_lexicon_close(l);
  return NULL;
}

void mm_lexicon_close(mm_lexicon *l) {
  if (!l) return;
  mm_trie *const trie[] = {&l->all, &l->tails, &l->tagged};
  for (int i = 0; i < 3; i++) MM_FREE(trie[i]->node, trie[i]->first, trie[i]->word);
  MM_FREE(l->string.word, l->string.mask, l->prose.word, l->prose.mask, l->ordinary, l);
}
