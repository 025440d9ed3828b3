/* A tokenizer.json of the released size, 200,064 tokens: the bytes, and words that are each a merge of a shorter one and a byte. Words of
 * letters with and without a blank before them, digits, punctuation of code and JSON, blanks, and text of two and three bytes a character,
 * about in the shares of a released vocabulary; the longest is 128 blanks. */
#ifndef MM_TESTS_BENCH_LARGE_TOKENIZER_H
#define MM_TESTS_BENCH_LARGE_TOKENIZER_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/file.h"

enum { LARGE_VOCAB = 200064, LARGE_LONGEST = 128 };

typedef struct large_word {
  uint32_t parent; /* the word without its last byte */
  uint8_t byte, n, kind;
} large_word;

typedef enum large_kind { LARGE_LETTERS, LARGE_BLANK_LETTERS, LARGE_TWO, LARGE_THREE, LARGE_CODE, LARGE_BLANKS, LARGE_KINDS } large_kind;

typedef struct large_words {
  large_word word[LARGE_VOCAB];
  uint32_t count;
  uint32_t child[1 << 19]; /* open addressing: words by parent and byte, plus one */
  uint32_t kind[LARGE_KINDS][LARGE_VOCAB], kinds[LARGE_KINDS];
  uint64_t seed;
} large_words;

static uint32_t large_below(large_words *w, uint32_t n) {
  w->seed ^= w->seed << 13;
  w->seed ^= w->seed >> 7;
  w->seed ^= w->seed << 17;
  return (uint32_t)((w->seed >> 16) % n);
}

static void large_list(large_words *w, uint32_t id, large_kind kind) {
  w->word[id].kind = (uint8_t)kind;
  w->kind[kind][w->kinds[kind]++] = id;
}

/* The word `parent` and a byte, which may be there already. */
static void large_add(large_words *w, uint32_t parent, uint8_t byte, large_kind kind) {
  const uint32_t mask = (1u << 19) - 1;
  uint32_t at = (parent * 257u + byte) * 2654435761u >> 13;
  for (; w->child[at & mask]; at++) {
    const large_word *x = &w->word[w->child[at & mask] - 1];
    if (x->parent == parent && x->byte == byte) return;
  }
  if (w->count == LARGE_VOCAB || w->word[parent].n == LARGE_LONGEST) return;
  w->word[w->count] = (large_word){parent, byte, (uint8_t)(w->word[parent].n + 1), 0};
  w->child[at & mask] = w->count + 1;
  large_list(w, w->count++, kind);
}

static uint8_t large_byte(large_words *w, large_kind kind, uint32_t n) {
  static const char code[] = "{}[]()\"':;,.<>/\\=_-+*&#!?|\n0123456789";
  switch (kind) {
    case LARGE_TWO: return (uint8_t)(n % 2 ? 0x80 + large_below(w, 64) : 0xc3 + large_below(w, 20));
    case LARGE_THREE: return (uint8_t)(n % 3 ? 0x80 + large_below(w, 64) : 0xe3 + large_below(w, 7));
    case LARGE_CODE: return (uint8_t)code[large_below(w, sizeof code - 1)];
    case LARGE_BLANKS: return ' ';
    default: return (uint8_t)((large_below(w, 40) ? 'a' : 'A') + large_below(w, 26));
  }
}

static large_words *large_words_open(void) {
  static const uint8_t share[] = {LARGE_LETTERS,       LARGE_LETTERS, LARGE_BLANK_LETTERS, LARGE_BLANK_LETTERS,
                                  LARGE_BLANK_LETTERS, LARGE_TWO,     LARGE_THREE,         LARGE_CODE};
  large_words *w = calloc(1, sizeof *w);
  if (!w) return NULL;
  w->seed = UINT64_C(0x9e3779b97f4a7c15);
  for (uint32_t i = 0; i < 256; i++) w->word[w->count++] = (large_word){UINT32_MAX, (uint8_t)i, 1, 0};
  for (uint32_t i = 'A'; i <= 'z'; i++)
    if (i <= 'Z' || i >= 'a') large_list(w, i, LARGE_LETTERS);
  for (const char *p = "{}[]()\"':;,.<>/\\=_-+*&#!?|\n0123456789"; *p; p++) large_list(w, (uint8_t)*p, LARGE_CODE);
  for (uint32_t i = 0xc3; i < 0xc3 + 20; i++) large_list(w, i, LARGE_TWO);
  for (uint32_t i = 0xe3; i < 0xe3 + 7; i++) large_list(w, i, LARGE_THREE);
  large_list(w, ' ', LARGE_BLANK_LETTERS);
  for (uint32_t n = 1, last = ' '; n < LARGE_LONGEST; n++, last = w->count - 1) large_add(w, last, ' ', LARGE_BLANKS);
  while (w->count < LARGE_VOCAB) {
    const large_kind kind = (large_kind)share[large_below(w, sizeof share)];
    const uint32_t parent = w->kind[kind][large_below(w, w->kinds[kind])];
    if (w->word[parent].n < 12) large_add(w, parent, large_byte(w, kind, w->word[parent].n), kind);
  }
  return w;
}

/* A byte as the letter that stands for it in tokenizer.json. */
static void large_letter(FILE *f, uint8_t byte) {
  unsigned code = byte;
  const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
  if (!printable) code = 0x100u + (byte < 0x21 ? byte : byte < 0xa1 ? byte - 0x7fu + 0x21u : 0x43u);
  if (code < 0x7f && code != '"' && code != '\\')
    fputc((int)code, f);
  else
    fprintf(f, "\\u%04x", code);
}

static void large_text(FILE *f, const large_words *w, uint32_t id) {
  if (w->word[id].parent != UINT32_MAX) large_text(f, w, w->word[id].parent);
  large_letter(f, w->word[id].byte);
}

/* The small checkpoint's tokenizer.json with other tokens: what comes before its added tokens, and its settings between these and the
 * vocabulary, no added tokens. */
static bool large_tokenizer_write(const char *path, const char *like) {
  mm_err err = {0};
  size_t n;
  char *text = mm_file_slurp(like, UINT64_C(1) << 20, &n, &err);
  char *added = text ? strstr(text, "\"added_tokens\"") : NULL, *rest = added ? strstr(added, "\"normalizer\"") : NULL;
  char *vocab = rest ? strstr(rest, "\"vocab\"") : NULL;
  FILE *f = vocab ? fopen(path, "w") : NULL;
  large_words *w = f ? large_words_open() : NULL;
  if (w) {
    fprintf(f, "%.*s\"added_tokens\":[],%.*s\"vocab\":{", (int)(added - text), text, (int)(vocab - rest), rest);
    for (uint32_t i = 0; i < w->count; i++) {
      fputs(i ? ",\"" : "\"", f);
      large_text(f, w, i);
      fprintf(f, "\":%u", i);
    }
    fputs("},\"merges\":[", f);
    for (uint32_t i = 256; i < w->count; i++) {
      fputs(i > 256 ? ",\"" : "\"", f);
      large_text(f, w, w->word[i].parent);
      fputc(' ', f);
      large_letter(f, w->word[i].byte);
      fputc('"', f);
    }
    fputs("]}}\n", f);
  }
  const bool closed = f && fclose(f) == 0;
  const bool done = w && closed;
  free(w);
  free(text);
  return done;
}

#endif
