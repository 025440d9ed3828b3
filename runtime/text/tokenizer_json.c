/* Reads a Hugging Face tokenizer.json (byte alphabet: GPT-2, Radford et al. 2019; file: huggingface/tokenizers). Features that the file
 * uses and this code lacks are refused by name. */
#include <stdlib.h>
#include <string.h>

#include "formats/json.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/tokenizer_tables.h"

#define FILE_MAX (UINT64_C(64) << 20) /* the released files have 10 MB */

/* Reads the file into a tokenizer. */
typedef struct reader {
  mm_tokenizer *t;
  const char *path;
  mm_err *err;
  int byte_of[0x144]; /* the byte that a code point of the byte alphabet stands for, -1 for other code points */
  char *text;         /* bytes of the vocabulary entry or merge at hand */
  size_t len, cap;
} reader;

#define BAD(r, ...)         mm_fail((r)->err, MM_BAD_INPUT, "E_TOKENIZER", mm_at((r)->path, NULL), __VA_ARGS__)
#define UNSUPPORTED(r, ...) mm_fail((r)->err, MM_UNSUPPORTED, "E_TOKENIZER", mm_at((r)->path, NULL), __VA_ARGS__)

/* Text from the file as messages show it. */
typedef struct excerpt {
  char text[200];
} excerpt;

static const char *show(excerpt *x, const char *text, size_t n) { return mm_escape(x->text, sizeof x->text, text, n); }

static bool is_null(const mm_json *obj, const char *key) { return mm_json_type_of(mm_json_get(obj, key)) == MM_JSON_NULL; }

static bool is_str(const mm_json *obj, const char *key, const char *want) {
  const mm_json *j = mm_json_get(obj, key);
  size_t n = strlen(want);
  return mm_json_type_of(j) == MM_JSON_STR && mm_json_str_len(j) == n && memcmp(mm_json_str(j), want, n) == 0;
}

static bool is_bool(const mm_json *obj, const char *key, bool want) {
  const mm_json *j = mm_json_get(obj, key);
  return mm_json_type_of(j) == MM_JSON_BOOL && mm_json_bool(j) == want;
}

/* A component is an object of this "type". */
static bool check_type(const reader *r, const char *name, const mm_json *component, const char *want) {
  if (is_str(component, "type", want)) return true;
  const mm_json *type = mm_json_get(component, "type");
  excerpt x;
  return UNSUPPORTED(r, "%s: found %s, expected %s", name,
                     mm_json_type_of(type) == MM_JSON_STR ? show(&x, mm_json_str(type), mm_json_str_len(type)) : "no type", want);
}

static bool check_components(const reader *r, const mm_json *root) {
  static const char *const keys[] = {"version",       "truncation",     "padding", "added_tokens", "normalizer",
                                     "pre_tokenizer", "post_processor", "decoder", "model",        NULL};
  static const char *const absent[] = {"truncation", "padding", "normalizer"};
  const mm_json_ctx unknown = {r->path, MM_UNSUPPORTED, "E_TOKENIZER"};
  if (mm_json_type_of(root) != MM_JSON_OBJ) return BAD(r, "not a JSON object");
  if (!mm_json_only_keys(root, keys, &unknown, r->err)) return false;
  if (!is_str(root, "version", "1.0")) return UNSUPPORTED(r, "version is not \"1.0\"");
  for (size_t i = 0; i < sizeof absent / sizeof *absent; i++)
    if (!is_null(root, absent[i])) return UNSUPPORTED(r, "%s is not null", absent[i]);
  /* A ByteLevel post-processor moves offsets only. */
  if (!is_null(root, "post_processor") && !check_type(r, "post_processor", mm_json_get(root, "post_processor"), "ByteLevel")) return false;
  return check_type(r, "decoder", mm_json_get(root, "decoder"), "ByteLevel");
}

/* unk_token, fuse_unk and byte_fallback are about characters that have no token: here every byte has one. */
static bool check_model(const reader *r, const mm_json *model) {
  static const char *const keys[] = {
      "type",  "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges",
      "vocab", "merges",  NULL};
  static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
  const mm_json_ctx unknown = {r->path, MM_UNSUPPORTED, "E_TOKENIZER"};
  if (!check_type(r, "model", model, "BPE") || !mm_json_only_keys(model, keys, &unknown, r->err)) return false;
  if (!is_null(model, "dropout")) return UNSUPPORTED(r, "model: dropout is not null");
  if (!is_null(model, "ignore_merges") && !is_bool(model, "ignore_merges", false))
    return UNSUPPORTED(r, "model: ignore_merges is not false");
  for (size_t i = 0; i < sizeof affixes / sizeof *affixes; i++)
    if (!is_null(model, affixes[i]) && !is_str(model, affixes[i], "")) return UNSUPPORTED(r, "model: %s is not empty", affixes[i]);
  return true;
}

/* pre_tokenizer: a Sequence of a Split into one piece per match and a ByteLevel without a pattern of its own. */
static bool read_split(const reader *r, const mm_json *pre) {
  if (!check_type(r, "pre_tokenizer", pre, "Sequence")) return false;
  const mm_json *list = mm_json_get(pre, "pretokenizers"), *split = mm_json_at(list, 0), *bytes = mm_json_at(list, 1);
  if (mm_json_size(list) != 2) return UNSUPPORTED(r, "pre_tokenizer: not a list of Split and ByteLevel");
  if (!check_type(r, "pre_tokenizer 1 of 2", split, "Split") || !check_type(r, "pre_tokenizer 2 of 2", bytes, "ByteLevel")) return false;
  if (!is_bool(bytes, "add_prefix_space", false)) return UNSUPPORTED(r, "pre_tokenizer ByteLevel: add_prefix_space is not false");
  if (!is_bool(bytes, "use_regex", false)) return UNSUPPORTED(r, "pre_tokenizer ByteLevel: use_regex is not false");
  /* Matches leave no gaps, so removing the gaps is the same as isolating the matches. */
  bool isolated = is_str(split, "behavior", "Isolated") && is_bool(split, "invert", false);
  bool gaps_removed = is_str(split, "behavior", "Removed") && is_bool(split, "invert", true);
  if (!isolated && !gaps_removed) return UNSUPPORTED(r, "pre_tokenizer Split: behavior is not Isolated");
  const mm_json *pattern = mm_json_get(split, "pattern"), *regex = mm_json_get(pattern, "Regex");
  if (mm_json_type_of(regex) != MM_JSON_STR) return UNSUPPORTED(r, "pre_tokenizer Split: pattern is not a Regex");
  for (uint32_t i = 0; mm_split_patterns[i]; i++) {
    if (!is_str(pattern, "Regex", mm_split_patterns[i])) continue;
    r->t->pattern = i;
    return mm_tokenizer_compile(r->t, r->path, r->err);
  }
  excerpt x;
  return UNSUPPORTED(r, "pre_tokenizer Split: unknown pattern \"%s\"", show(&x, mm_json_str(regex), mm_json_str_len(regex)));
}

/* GPT-2's alphabet: printable Latin-1 bytes stand for themselves; U+0100, U+0101, … for the others in order. */
static void fill_alphabet(reader *r) {
  int other = 0x100;
  memset(r->byte_of, -1, sizeof r->byte_of);
  for (int b = 0; b < 256; b++) {
    bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD);
    r->byte_of[printable ? b : other++] = b;
  }
}

/* Appends to r->text the bytes that n bytes of valid UTF-8 stand for in the byte alphabet. */
static bool append_bytes(reader *r, const char *s, size_t n) {
  if (!MM_GROW(r->text, &r->cap, r->len + n + 1, r->err)) return false;
  for (size_t i = 0; i < n;) {
    unsigned lead = (uint8_t)s[i++], code = lead;
    if (lead >= 0x80) code = (lead & 0x1F) << 6 | ((uint8_t)s[i++] & 0x3F);
    int byte = lead < 0xE0 && code < sizeof r->byte_of / sizeof *r->byte_of ? r->byte_of[code] : -1;
    excerpt x;
    if (byte < 0) return BAD(r, "token \"%s\" is not written in the byte alphabet", show(&x, s, n));
    r->text[r->len++] = (char)byte;
  }
  return true;
}

/* Gives the text to the id that `value` holds. */
static bool add_token(const reader *r, const char *text, size_t n, const mm_json *value) {
  mm_bpe *b = &r->t->bpe;
  excerpt x;
  int64_t id = mm_json_type_of(value) == MM_JSON_INT ? mm_json_int(value) : -1;
  if (n == 0) return BAD(r, "a token is empty");
  if (id < 0 || id >= b->vocab) return BAD(r, "the id of token \"%s\" is not an integer below %u", show(&x, text, n), b->vocab);
  if (b->token[id].text) return BAD(r, "the id of token \"%s\", %lld, belongs to another one", show(&x, text, n), (long long)id);
  b->token[id].text = mm_arena_strndup(&b->texts, text, n, r->err);
  b->token[id].n = n;
  return b->token[id].text;
}

static bool read_vocab(reader *r, const mm_json *vocab) {
  mm_bpe *b = &r->t->bpe;
  void *iter = NULL;
  const char *key;
  const mm_json *value;
  while (mm_json_next(vocab, &iter, &key, &value)) {
    r->len = 0;
    if (!append_bytes(r, key, strlen(key)) || !add_token(r, r->text, r->len, value)) return false;
  }
  if (!mm_bpe_index_tokens(b, r->path, r->err)) return false;
  for (int i = 0; i < 256; i++) {
    char byte = (char)i;
    b->byte_id[i] = mm_bpe_find(b, &byte, 1);
    if (b->byte_id[i] < 0) return BAD(r, "the vocabulary has no token for byte 0x%02X", (unsigned)i);
  }
  return true;
}

/* A merge is "a b" or ["a", "b"]. */
static bool read_merge(reader *r, const mm_json *j, size_t rank, mm_bpe_merge *out) {
  const mm_json *left = mm_json_at(j, 0), *right = mm_json_at(j, 1);
  const char *part[2] = {"", ""};
  size_t n[2] = {0, 0};
  if (mm_json_type_of(j) == MM_JSON_STR) {
    const char *text = mm_json_str(j), *space = memchr(text, ' ', mm_json_str_len(j));
    if (space) {
      part[0] = text, n[0] = (size_t)(space - text);
      part[1] = space + 1, n[1] = mm_json_str_len(j) - n[0] - 1;
    }
  } else if (mm_json_size(j) == 2 && mm_json_type_of(left) == MM_JSON_STR && mm_json_type_of(right) == MM_JSON_STR) {
    part[0] = mm_json_str(left), n[0] = mm_json_str_len(left);
    part[1] = mm_json_str(right), n[1] = mm_json_str_len(right);
  }
  if (!n[0] || !n[1]) return BAD(r, "merge %zu is not a pair of tokens", rank);
  r->len = 0;
  if (!append_bytes(r, part[0], n[0])) return false;
  size_t cut = r->len;
  if (!append_bytes(r, part[1], n[1])) return false;
  const mm_bpe *b = &r->t->bpe;
  *out = (mm_bpe_merge){mm_bpe_find(b, r->text, cut), mm_bpe_find(b, r->text + cut, r->len - cut), mm_bpe_find(b, r->text, r->len)};
  if (out->left >= 0 && out->right >= 0 && out->result >= 0) return true;
  excerpt x;
  return BAD(r, "merge %zu: the vocabulary lacks the %s of \"%s\"", rank,
             out->left < 0    ? "left part"
             : out->right < 0 ? "right part"
                              : "result",
             show(&x, r->text, r->len));
}

static bool read_merges(reader *r, const mm_json *merges) {
  mm_bpe *b = &r->t->bpe;
  size_t count = mm_json_size(merges);
  if (!(b->merge = mm_calloc(count, sizeof *b->merge, r->err))) return false;
  for (size_t i = 0; i < count; i++)
    if (!read_merge(r, mm_json_at(merges, i), i, &b->merge[i])) return false;
  b->merge_count = count;
  return mm_bpe_index_merges(b, r->path, r->err);
}

static bool read_added_token(const reader *r, const mm_json *j) {
  mm_tokenizer *t = r->t;
  const mm_json_ctx c = {r->path, MM_BAD_INPUT, "E_TOKENIZER"};
  const mm_json *content = mm_json_need(j, "content", MM_JSON_STR, &c, r->err), *id = mm_json_get(j, "id");
  bool single_word, lstrip, rstrip, normalized, special;
  if (!content || !mm_json_need_bool(j, "single_word", &single_word, &c, r->err) || !mm_json_need_bool(j, "lstrip", &lstrip, &c, r->err) ||
      !mm_json_need_bool(j, "rstrip", &rstrip, &c, r->err) || !mm_json_need_bool(j, "normalized", &normalized, &c, r->err) ||
      !mm_json_need_bool(j, "special", &special, &c, r->err))
    return false;
  const char *text = mm_json_str(content);
  size_t n = mm_json_str_len(content);
  excerpt x;
  if (single_word || lstrip || rstrip) return UNSUPPORTED(r, "added token \"%s\" has single_word, lstrip or rstrip", show(&x, text, n));
  if (n > MM_ADDED_MAX) return UNSUPPORTED(r, "added token \"%s\" is longer than %d bytes", show(&x, text, n), MM_ADDED_MAX);
  /* The vocabulary may list an added token as well. */
  int32_t listed = mm_bpe_find(&t->bpe, text, n);
  bool same = listed >= 0 && mm_json_type_of(id) == MM_JSON_INT && mm_json_int(id) == listed && t->level[listed] == MM_ORDINARY;
  if (!same && !add_token(r, text, n, id)) return false;
  t->level[mm_json_int(id)] = normalized ? MM_NORMALIZED : MM_VERBATIM;
  t->special[mm_json_int(id)] = special;
  t->added_start[(uint8_t)*text] = true;
  t->added_len[n] = true;
  return true;
}

static bool read_file(reader *r, const mm_json *root) {
  const mm_json *model = mm_json_get(root, "model"), *vocab = mm_json_get(model, "vocab"), *merges = mm_json_get(model, "merges");
  const mm_json *added = mm_json_get(root, "added_tokens");
  if (!check_components(r, root) || !read_split(r, mm_json_get(root, "pre_tokenizer")) || !check_model(r, model)) return false;
  if (mm_json_type_of(vocab) != MM_JSON_OBJ) return BAD(r, "model: vocab is not an object");
  if (mm_json_type_of(merges) != MM_JSON_ARR) return BAD(r, "model: merges is not a list");
  if (mm_json_type_of(added) != MM_JSON_ARR) return BAD(r, "added_tokens is not a list");
  if (!read_vocab(r, vocab) || !read_merges(r, merges)) return false;
  for (size_t i = 0; i < mm_json_size(added); i++)
    if (!read_added_token(r, mm_json_at(added, i))) return false;
  return mm_bpe_index_tokens(&r->t->bpe, r->path, r->err);
}

mm_tokenizer *mm_tokenizer_open(const char *path, uint32_t vocab, mm_err *err) {
  mm_tokenizer *t = mm_calloc(1, sizeof *t, err);
  if (!t) return NULL;
  reader r = {.t = t, .path = path, .err = err};
  fill_alphabet(&r);
  t->level = mm_calloc(vocab, sizeof *t->level, err);
  t->special = mm_calloc(vocab, sizeof *t->special, err);
  mm_json *root = t->level && t->special && mm_bpe_open(&t->bpe, vocab, err) ? mm_json_load(path, FILE_MAX, err) : NULL;
  bool ok = root && read_file(&r, root);
  mm_json_free(root);
  free(r.text);
  if (ok) return t;
  mm_tokenizer_close(t);
  return NULL;
}
