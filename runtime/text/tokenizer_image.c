/* tokenizer.bin: the tables of a tokenizer, laid out as they are used, so that opening one is mapping it (formats/FORMAT.md,
 * "tokenizer.bin"). Reading and sorting the released tokenizer.json takes most of a second; this takes milliseconds. */
#include <string.h>

#include "runtime/text/tokenizer.h"
#include "runtime/text/tokenizer_tables.h"

/* The file begins with it; the tables follow in the order of `tables` below, each on 8 bytes. */
typedef struct header {
  char magic[8];
  uint32_t version, vocab, pattern, text_count, merge_count, text_bytes;
  mm_digest source; /* of tokenizer.json */
} header;

static const char magic[8] = "MMTOKEN";
enum { VERSION = 1 };

/* Where each table lies. */
typedef struct tables {
  uint64_t at, by_text, merge, by_pair, first, byte_id, level, special, added_start, added_len, text, end;
} tables;

static uint64_t place(uint64_t *end, uint64_t bytes) {
  uint64_t at = *end;
  *end = mm_round_up(at + bytes, 8);
  return at;
}

/* All counts are of 32 bits: no sum overflows 64. */
static tables layout(const header *h) {
  tables t = {.end = sizeof *h};
  t.at = place(&t.end, ((uint64_t)h->vocab + 1) * sizeof(uint32_t));
  t.by_text = place(&t.end, (uint64_t)h->text_count * sizeof(uint32_t));
  t.merge = place(&t.end, (uint64_t)h->merge_count * sizeof(mm_bpe_merge));
  t.by_pair = place(&t.end, (uint64_t)h->merge_count * sizeof(uint32_t));
  t.first = place(&t.end, ((uint64_t)h->vocab + 1) * sizeof(uint32_t));
  t.byte_id = place(&t.end, sizeof(((mm_bpe *)NULL)->byte_id));
  t.level = place(&t.end, h->vocab);
  t.special = place(&t.end, h->vocab);
  t.added_start = place(&t.end, sizeof(((mm_tokenizer *)NULL)->added_start));
  t.added_len = place(&t.end, sizeof(((mm_tokenizer *)NULL)->added_len));
  t.text = place(&t.end, h->text_bytes);
  return t;
}

/* ---- Writing ---- */

bool mm_tokenizer_image(const mm_tokenizer *t, const mm_digest *source, uint8_t **image, size_t *n, mm_err *err) {
  const mm_bpe *b = &t->bpe;
  uint64_t bytes = 0;
  for (uint32_t id = 0; id < b->vocab; id++) bytes += b->token[id].n;
  if (bytes > UINT32_MAX || b->merge_count > UINT32_MAX)
    return mm_fail(err, MM_LIMIT, "E_LIMIT", mm_at(NULL, NULL), "found %llu bytes of tokens, expected fewer than 2^32",
                   (unsigned long long)bytes);
  header h = {.version = VERSION, .vocab = b->vocab, .pattern = t->pattern, .text_count = (uint32_t)b->text_count};
  h.merge_count = (uint32_t)b->merge_count, h.text_bytes = (uint32_t)bytes, h.source = *source;
  memcpy(h.magic, magic, sizeof magic);
  const tables to = layout(&h);
  uint8_t *x = mm_calloc(to.end, 1, err);
  if (!x) return false;
  uint32_t *at = (uint32_t *)(x + to.at);
  for (uint32_t id = 0; id < b->vocab; id++) {
    if (b->token[id].n) memcpy(x + to.text + at[id], b->token[id].text, b->token[id].n);
    at[id + 1] = at[id] + (uint32_t)b->token[id].n;
  }
  memcpy(x, &h, sizeof h);
  memcpy(x + to.by_text, b->by_text, b->text_count * sizeof *b->by_text);
  if (b->merge_count) memcpy(x + to.merge, b->merge, b->merge_count * sizeof *b->merge);
  if (b->merge_count) memcpy(x + to.by_pair, b->by_pair, b->merge_count * sizeof *b->by_pair);
  memcpy(x + to.first, b->first, ((size_t)b->vocab + 1) * sizeof *b->first);
  memcpy(x + to.byte_id, b->byte_id, sizeof b->byte_id);
  memcpy(x + to.level, t->level, b->vocab);
  memcpy(x + to.special, t->special, b->vocab);
  memcpy(x + to.added_start, t->added_start, sizeof t->added_start);
  memcpy(x + to.added_len, t->added_len, sizeof t->added_len);
  *image = x;
  *n = to.end;
  return true;
}

bool mm_tokenizer_bake(const char *path, uint32_t vocab, const mm_digest *source, uint8_t **image, size_t *n, mm_err *err) {
  mm_tokenizer *t = mm_tokenizer_open(path, vocab, err);
  bool ok = t && mm_tokenizer_image(t, source, image, n, err);
  mm_tokenizer_close(t);
  return ok;
}

/* ---- Mapping ---- */

#define BAD(...) mm_fail(err, MM_INTEGRITY, "E_TOKENIZER", mm_at(path, NULL), __VA_ARGS__)

static bool check_header(const header *h, const char *path, uint64_t size, uint32_t vocab, const mm_digest *source, mm_err *err) {
  if (memcmp(h->magic, magic, sizeof magic) != 0) return BAD("found no tokenizer image");
  if (h->version != VERSION)
    return mm_fail(err, MM_UNSUPPORTED, "E_TOKENIZER", mm_at(path, NULL), "found version %u of the image, expected %d", h->version,
                   VERSION);
  if (h->vocab != vocab) return BAD("found a vocabulary of %u, expected %u", h->vocab, vocab);
  if (memcmp(&h->source, source, sizeof *source) != 0) return BAD("found the image of another tokenizer.json");
  uint32_t patterns = 0;
  while (mm_split_patterns[patterns]) patterns++;
  if (h->pattern >= patterns) return BAD("found split pattern %u, expected fewer than %u", h->pattern, patterns);
  if (h->text_count > vocab) return BAD("found %u tokens, expected at most %u", h->text_count, vocab);
  const uint64_t end = layout(h).end;
  return size == end || BAD("found %llu bytes, expected %llu", (unsigned long long)size, (unsigned long long)end);
}

/* Texts: every id's lies inside, and those that exist are listed once, in ascending order. */
static bool map_tokens(mm_bpe *b, const uint32_t *at, const char *text, uint32_t bytes, const char *path, mm_err *err) {
  size_t present = 0;
  for (uint32_t id = 0; id < b->vocab; id++) {
    if (at[id + 1] < at[id] || at[id + 1] > bytes) return BAD("token %u: found bytes %u to %u of %u", id, at[id], at[id + 1], bytes);
    const size_t n = at[id + 1] - at[id];
    b->token[id] = (mm_bpe_token){n ? text + at[id] : NULL, n};
    present += n > 0;
  }
  if (at[0] != 0 || present != b->text_count) return BAD("found %zu tokens with text, expected %zu", present, b->text_count);
  for (size_t i = 0; i < b->text_count; i++) {
    if (b->by_text[i] >= b->vocab || !b->token[b->by_text[i]].text) return BAD("entry %zu of the sorted tokens names no token", i);
    if (i == 0) continue;
    const mm_bpe_token x = b->token[b->by_text[i - 1]], y = b->token[b->by_text[i]];
    const int order = memcmp(x.text, y.text, x.n < y.n ? x.n : y.n);
    if (order > 0 || (order == 0 && x.n >= y.n)) return BAD("entry %zu of the sorted tokens is out of order", i);
  }
  return true;
}

static bool is_token(const mm_bpe *b, int32_t id) { return id >= 0 && (uint32_t)id < b->vocab && b->token[id].text; }

/* Merges: of tokens into the token of both texts; listed by left id, ascending by the right one. */
static bool check_merges(const mm_bpe *b, const char *path, mm_err *err) {
  for (size_t i = 0; i < b->merge_count; i++) {
    const mm_bpe_merge m = b->merge[i];
    if (!is_token(b, m.left) || !is_token(b, m.right) || !is_token(b, m.result)) return BAD("merge %zu names no token", i);
    if (b->token[m.result].n != b->token[m.left].n + b->token[m.right].n) return BAD("merge %zu: its result is not both parts", i);
  }
  for (uint32_t id = 0; id < b->vocab; id++) {
    if (b->first[id] > b->first[id + 1] || b->first[id + 1] > b->merge_count) return BAD("the merges of token %u are out of range", id);
    for (uint32_t i = b->first[id]; i < b->first[id + 1]; i++) {
      if (b->by_pair[i] >= b->merge_count || b->merge[b->by_pair[i]].left != (int32_t)id) return BAD("merge %u is listed elsewhere", i);
      if (i > b->first[id] && b->merge[b->by_pair[i - 1]].right >= b->merge[b->by_pair[i]].right) return BAD("merge %u is out of order", i);
    }
  }
  if (b->first[0] != 0 || b->first[b->vocab] != b->merge_count) return BAD("found merges that no token begins");
  for (size_t i = 0; i < 256; i++)
    if (!is_token(b, b->byte_id[i]) || b->token[b->byte_id[i]].n != 1 || (uint8_t)*b->token[b->byte_id[i]].text != i)
      return BAD("found no token for byte 0x%02zX", i);
  return true;
}

static bool check_added(const mm_tokenizer *t, const char *path, mm_err *err) {
  for (uint32_t id = 0; id < t->bpe.vocab; id++) {
    if (t->level[id] > MM_VERBATIM || t->special[id] > 1) return BAD("token %u is of no known kind", id);
    if (t->level[id] == MM_ORDINARY) continue;
    const mm_bpe_token x = t->bpe.token[id];
    if (!x.text || x.n > MM_ADDED_MAX || !t->added_start[(uint8_t)*x.text] || !t->added_len[x.n])
      return BAD("added token %u is not listed", id);
  }
  return true;
}

static bool map_image(mm_tokenizer *t, const char *path, uint32_t vocab, const mm_digest *source, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  if (!mm_file_open(&f, path, err)) return false;
  bool ok = f.size >= sizeof(header) ? mm_map_open(&t->map, &f, path, err) : BAD("found %llu bytes", (unsigned long long)f.size);
  mm_file_close(&f);
  if (!ok) return false;
  const uint8_t *x = t->map.data;
  header h;
  memcpy(&h, x, sizeof h);
  if (!check_header(&h, path, t->map.size, vocab, source, err)) return false;
  const tables from = layout(&h);
  mm_bpe *b = &t->bpe;
  /* The mapping is read-only; nothing writes to the tables of an open tokenizer. */
  b->vocab = vocab;
  b->by_text = (uint32_t *)(uintptr_t)(x + from.by_text);
  b->text_count = h.text_count;
  b->merge = (mm_bpe_merge *)(uintptr_t)(x + from.merge);
  b->merge_count = h.merge_count;
  b->by_pair = (uint32_t *)(uintptr_t)(x + from.by_pair);
  b->first = (uint32_t *)(uintptr_t)(x + from.first);
  memcpy(b->byte_id, x + from.byte_id, sizeof b->byte_id);
  t->level = (uint8_t *)(uintptr_t)(x + from.level);
  t->special = (uint8_t *)(uintptr_t)(x + from.special);
  memcpy(t->added_start, x + from.added_start, sizeof t->added_start);
  memcpy(t->added_len, x + from.added_len, sizeof t->added_len);
  t->pattern = h.pattern;
  const uint32_t *at = (const uint32_t *)(const void *)(x + from.at);
  return (b->token = mm_calloc(vocab, sizeof *b->token, err)) && map_tokens(b, at, (const char *)x + from.text, h.text_bytes, path, err) &&
         check_merges(b, path, err) && check_added(t, path, err) && mm_tokenizer_compile(t, path, err);
}

mm_tokenizer *mm_tokenizer_map(const char *path, uint32_t vocab, const mm_digest *source, mm_err *err) {
  mm_tokenizer *t = mm_calloc(1, sizeof *t, err);
  if (!t || map_image(t, path, vocab, source, err)) return t;
  mm_tokenizer_close(t);
  return NULL;
}

/* A companion has the size that the manifest says. */
static bool has_size(const char *path, const mm_pack_file *file, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  const bool ok = mm_file_listed(path, err) && mm_file_open(&f, path, err) && mm_size_is(path, f.size, file->size, err);
  mm_file_close(&f);
  return ok;
}

mm_tokenizer *mm_tokenizer_of(const mm_pack *p, mm_err *err) {
  const mm_pack_file *file = mm_pack_find_file(p, "tokenizer.json"), *baked = mm_pack_find_file(p, MM_TOKENIZER_IMAGE);
  const mm_path json = mm_path_of(p->dir, "tokenizer.json"), image = mm_path_of(p->dir, MM_TOKENIZER_IMAGE);
  if (!file && p->tensor_count == 0) return mm_tokenizer_of_ids(p->model.vocab, err);
  if (!file) mm_fail(err, MM_UNSUPPORTED, "E_TOKENIZER", mm_at(p->dir, NULL), "the checkpoint has no tokenizer.json");
  if (!file || !has_size(json.text, file, err) || (baked && !has_size(image.text, baked, err))) return NULL;
  if (baked) return mm_tokenizer_map(image.text, p->model.vocab, &file->sha256, err);
  return mm_tokenizer_open(json.text, p->model.vocab, err);
}
