/* Prompts: pieces of text with owners, and their encoding. */
#include "runtime/chat/prompt.h"

#include <stdlib.h>
#include <string.h>

void mm_prompt_close(mm_prompt *p) {
  free(p->text.p);
  free(p->piece);
  *p = (mm_prompt){0};
}

static mm_prompt_piece *add_piece(mm_prompt *p) {
  if (p->text.failed || !MM_GROW(p->piece, &p->cap, p->count + 1, MM_IGNORED)) {
    p->text.failed = true;
    return NULL;
  }
  p->piece[p->count] = (mm_prompt_piece){.at = p->text.n};
  return &p->piece[p->count++];
}

void mm_prompt_put(mm_prompt *p, mm_owner owner, const char *text, size_t n) {
  if (!n) return;
  mm_prompt_piece *last = p->count ? &p->piece[p->count - 1] : NULL;
  if ((!last || last->sampled || last->owner != owner) && !(last = add_piece(p))) return;
  last->owner = owner;
  last->n += n;
  mm_text_add(&p->text, text, n);
}

void mm_prompt_put_sampled(mm_prompt *p, const int32_t *id, size_t count) {
  mm_prompt_piece *last = count ? add_piece(p) : NULL;
  if (!last) return;
  last->sampled = id;
  last->sampled_count = count;
}

void mm_prompt_mark_user(mm_prompt *p) {
  p->user_pieces = p->count ? p->count - 1 : 0;
  p->user_bytes = p->count ? p->piece[p->count - 1].n : 0;
}

/* ---- Encoding ---- */

typedef struct encoding {
  const mm_prompt *prompt;
  const mm_tokenizer *tokenizer;
  bool trust_user;
  mm_text_range *range; /* [pieces]: scratch */
  size_t user_end;      /* byte of the text where the last user message ends */
  size_t user_piece;    /* in this piece */
  mm_prompt_tokens *out;
  size_t cap;
  mm_err *err;
} encoding;

static bool append(encoding *e, const int32_t *id, size_t count) {
  mm_prompt_tokens *out = e->out;
  if (!MM_GROW(out->id, &e->cap, out->count + count + 1, e->err)) return false;
  memcpy(out->id + out->count, id, count * sizeof *id);
  out->count += count;
  return true;
}

/* Tokens that lie whole in the first n bytes of the text that they spell. */
static size_t tokens_within(const encoding *e, const int32_t *id, size_t count, size_t n) {
  size_t i = 0, length;
  for (; i < count && mm_tokenizer_bytes(e->tokenizer, id[i], &length) && length <= n; i++) n -= length;
  return i;
}

/* The pieces from … to are text. */
static bool encode_text(encoding *e, size_t from, size_t to) {
  const mm_prompt_piece *piece = e->prompt->piece;
  const size_t at = piece[from].at, n = piece[to - 1].at + piece[to - 1].n - at;
  size_t ranges = 0, count;
  for (size_t i = from; i < to; i++)
    if (piece[i].owner == MM_OWNER_TRUSTED) e->range[ranges++] = (mm_text_range){piece[i].at - at, piece[i].at + piece[i].n - at};
  if (e->trust_user) e->range[0] = (mm_text_range){0, n}, ranges = 1;
  int32_t *id;
  if (!mm_tokenizer_encode_ranges(e->tokenizer, e->prompt->text.p + at, n, e->range, ranges, &id, &count, e->err)) return false;
  if (e->user_end && from <= e->user_piece && e->user_piece < to)
    e->out->user_end = e->out->count + tokens_within(e, id, count, e->user_end - at);
  const bool ok = append(e, id, count);
  free(id);
  return ok;
}

static bool encode_all(encoding *e) {
  const mm_prompt *p = e->prompt;
  for (size_t i = 0, end; i < p->count; i = end) {
    end = i + 1;
    if (p->piece[i].sampled) {
      if (!append(e, p->piece[i].sampled, p->piece[i].sampled_count)) return false;
      continue;
    }
    while (end < p->count && !p->piece[end].sampled) end++;
    if (!encode_text(e, i, end)) return false;
  }
  return true;
}

bool mm_prompt_encode(const mm_prompt *p, const mm_tokenizer *t, bool trust_user, mm_prompt_tokens *out, mm_err *err) {
  *out = (mm_prompt_tokens){.opening = p->opening};
  if (p->text.failed) return mm_fail_memory(err, p->text.n);
  encoding e = {.prompt = p, .tokenizer = t, .trust_user = trust_user, .out = out, .err = err, .user_piece = p->user_pieces};
  if (p->user_bytes) e.user_end = p->piece[p->user_pieces].at + p->user_bytes;
  e.range = mm_calloc(p->count + 1, sizeof *e.range, err);
  const bool ok = e.range && MM_GROW(out->id, &e.cap, 1, err) && encode_all(&e);
  free(e.range);
  if (ok) return true;
  free(out->id);
  *out = (mm_prompt_tokens){0};
  return false;
}

const char *mm_prompt_media(const mm_tokenizer *t, const int32_t *id, size_t count, size_t *place) {
  static const char *const token[] = {"]<]image[>[", "]<]video[>["};
  for (size_t k = 0; k < sizeof token / sizeof *token; k++) {
    const int32_t media = mm_tokenizer_find_added(t, token[k]);
    for (size_t i = 0; media >= 0 && i < count; i++)
      if (id[i] == media) return *place = i, token[k];
  }
  return NULL;
}
