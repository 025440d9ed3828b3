/* Byte pair encoding: sorted tables for look-up; merging with a list of tokens and a heap of candidate pairs. */
#include "runtime/text/bpe.h"

#include <stdlib.h>
#include <string.h>

bool mm_bpe_open(mm_bpe *b, uint32_t vocab, mm_err *err) {
  b->vocab = vocab;
  b->token = mm_calloc(vocab, sizeof *b->token, err);
  b->by_text = mm_calloc(vocab, sizeof *b->by_text, err);
  b->first = mm_calloc((size_t)vocab + 1, sizeof *b->first, err);
  return b->token && b->by_text && b->first;
}

void mm_bpe_close(mm_bpe *b, bool borrowed) {
  free(b->token);
  mm_arena_close(&b->texts);
  if (borrowed) return;
  MM_FREE(b->by_text, b->merge, b->by_pair, b->first);
}

/* ---- Tables ---- */

static int compare_texts(mm_bpe_token a, mm_bpe_token b) {
  int order = memcmp(a.text, b.text, a.n < b.n ? a.n : b.n);
  return order ? order : (a.n > b.n) - (a.n < b.n);
}

static int compare_tokens(const void *a, const void *b, void *tokens) {
  const mm_bpe_token *token = tokens;
  return compare_texts(token[*(const uint32_t *)a], token[*(const uint32_t *)b]);
}

bool mm_bpe_index_tokens(mm_bpe *b, const char *file, mm_err *err) {
  b->text_count = 0;
  for (uint32_t id = 0; id < b->vocab; id++)
    if (b->token[id].text) b->by_text[b->text_count++] = id;
  qsort_r(b->by_text, b->text_count, sizeof *b->by_text, compare_tokens, b->token);
  for (size_t i = 1; i < b->text_count; i++) {
    mm_bpe_token token = b->token[b->by_text[i]];
    if (compare_tokens(&b->by_text[i - 1], &b->by_text[i], b->token) == 0)
      return mm_fail(err, MM_BAD_INPUT, "E_TOKENIZER", mm_at(file, NULL), "token \"%s\" has the ids %u and %u",
                     MM_ESCAPED_BYTES(200, token.text, token.n), b->by_text[i - 1], b->by_text[i]);
  }
  return true;
}

int32_t mm_bpe_find(const mm_bpe *b, const char *text, size_t n) {
  const mm_bpe_token want = {text, n};
  size_t lo = 0, hi = b->text_count;
  while (lo < hi) {
    size_t mid = lo + (hi - lo) / 2;
    int order = compare_texts(want, b->token[b->by_text[mid]]);
    if (order == 0) return (int32_t)b->by_text[mid];
    if (order < 0) {
      hi = mid;
    } else {
      lo = mid + 1;
    }
  }
  return -1;
}

static int compare_pairs(const void *a, const void *b, void *merges) {
  const mm_bpe_merge *x = (const mm_bpe_merge *)merges + *(const uint32_t *)a;
  const mm_bpe_merge *y = (const mm_bpe_merge *)merges + *(const uint32_t *)b;
  return x->left != y->left ? (x->left > y->left) - (x->left < y->left) : (x->right > y->right) - (x->right < y->right);
}

bool mm_bpe_index_merges(mm_bpe *b, const char *file, mm_err *err) {
  if (!(b->by_pair = mm_calloc(b->merge_count, sizeof *b->by_pair, err))) return false;
  for (size_t i = 0; i < b->merge_count; i++) b->by_pair[i] = (uint32_t)i;
  qsort_r(b->by_pair, b->merge_count, sizeof *b->by_pair, compare_pairs, b->merge);
  for (size_t i = 0; i < b->merge_count; i++) {
    if (i > 0 && compare_pairs(&b->by_pair[i - 1], &b->by_pair[i], b->merge) == 0)
      return mm_fail(err, MM_BAD_INPUT, "E_TOKENIZER", mm_at(file, NULL), "merges %u and %u are of the same pair", b->by_pair[i - 1],
                     b->by_pair[i]);
    b->first[b->merge[b->by_pair[i]].left + 1] = (uint32_t)i + 1;
  }
  for (uint32_t id = 0; id < b->vocab; id++)
    if (!b->first[id + 1]) b->first[id + 1] = b->first[id]; /* no merge starts with id */
  return true;
}

/* The rank of the merge of (left, right); -1 when they do not merge. */
static int64_t find_merge(const mm_bpe *b, int32_t left, int32_t right) {
  size_t lo = b->first[left], end = b->first[left + 1], hi = end;
  while (lo < hi) {
    size_t mid = lo + (hi - lo) / 2;
    if (b->merge[b->by_pair[mid]].right < right) {
      lo = mid + 1;
    } else {
      hi = mid;
    }
  }
  return lo < end && b->merge[b->by_pair[lo]].right == right ? (int64_t)b->by_pair[lo] : -1;
}

/* ---- Merging ---- */

#define NO_NODE UINT32_MAX

/* A token of the piece at hand, in a list. id -1: merged into the node before. */
typedef struct mm_bpe_node {
  int32_t id;
  uint32_t prev, next;
} mm_bpe_node;

void mm_bpe_scratch_close(mm_bpe_scratch *s) { MM_FREE(s->node, s->heap, s->id); }

bool mm_bpe_emit(mm_bpe_scratch *s, int32_t id, mm_err *err) {
  if (!MM_GROW(s->id, &s->cap, s->count + 1, err)) return false;
  s->id[s->count++] = id;
  return true;
}

/* The heap holds candidates as rank << 32 | left node, least first. */
static void heap_push(mm_bpe_scratch *s, uint64_t value) {
  size_t i = s->heap_count++;
  for (; i > 0 && s->heap[(i - 1) / 2] > value; i = (i - 1) / 2) s->heap[i] = s->heap[(i - 1) / 2];
  s->heap[i] = value;
}

static uint64_t heap_pop(mm_bpe_scratch *s) {
  uint64_t top = s->heap[0], last = s->heap[--s->heap_count];
  size_t i = 0, child;
  for (; (child = 2 * i + 1) < s->heap_count; i = child) {
    if (child + 1 < s->heap_count && s->heap[child + 1] < s->heap[child]) child++;
    if (s->heap[child] >= last) break;
    s->heap[i] = s->heap[child];
  }
  s->heap[i] = last;
  return top;
}

/* Notes the merge of a node with the next one, if both exist and merge. */
static void push_candidate(const mm_bpe *b, mm_bpe_scratch *s, uint32_t at) {
  uint32_t next = at == NO_NODE ? NO_NODE : s->node[at].next;
  if (next == NO_NODE) return;
  int64_t rank = find_merge(b, s->node[at].id, s->node[next].id);
  if (rank >= 0) heap_push(s, (uint64_t)rank << 32 | at);
}

bool mm_bpe_encode(const mm_bpe *b, mm_bpe_scratch *s, const char *piece, size_t n, mm_err *err) {
  if (n == 0) return true;
  /* n - 1 candidates at first; each of at most n - 1 merges takes one and makes two. */
  if (!MM_GROW(s->node, &s->node_cap, n, err)) return false;
  if (!MM_GROW(s->heap, &s->heap_cap, 2 * n, err)) return false;
  for (uint32_t i = 0; i < n; i++)
    s->node[i] = (mm_bpe_node){b->byte_id[(uint8_t)piece[i]], i > 0 ? i - 1 : NO_NODE, i + 1 < n ? i + 1 : NO_NODE};
  for (uint32_t i = 0; i < n; i++) push_candidate(b, s, i);
  while (s->heap_count > 0) {
    uint64_t top = heap_pop(s);
    const mm_bpe_merge *m = &b->merge[top >> 32];
    mm_bpe_node *left = &s->node[(uint32_t)top];
    if (left->id != m->left || left->next == NO_NODE || s->node[left->next].id != m->right) continue; /* another merge was first */
    s->node[left->next].id = -1;
    left->id = m->result;
    left->next = s->node[left->next].next;
    if (left->next != NO_NODE) s->node[left->next].prev = (uint32_t)top;
    push_candidate(b, s, left->prev);
    push_candidate(b, s, (uint32_t)top);
  }
  for (uint32_t i = 0; i != NO_NODE; i = s->node[i].next)
    if (!mm_bpe_emit(s, s->node[i].id, err)) return false;
  return true;
}
