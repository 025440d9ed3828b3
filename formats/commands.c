/* The programs, and words that are nearly the same. */
#include "formats/commands.h"

const mm_command mm_commands[] = {
    {"convert", "turns a Hugging Face checkpoint into packed shards"},
    {"inspect", "lists a source or packed checkpoint, compares two"},
    {"verify", "proves a packed checkpoint: digests, completeness, error against its source"},
    {"archive", "packs a checkpoint for transport, unpacks it, signs it"},
    {"run", "generates text from a packed checkpoint; --chat: a conversation"},
    {"serve", "serves a packed checkpoint over HTTP"},
    {"hold", "keeps weights on the GPUs, so that servers start again in an instant"},
    {"worker", "runs ranks in another process of mpirun"},
    {"eval", "likelihood of a text, logits of prompts, divergence from another checkpoint"},
    {"bench", "times layers on a GPU, or a server under load"},
};
const size_t mm_command_count = sizeof mm_commands / sizeof *mm_commands;

#define LETTERS 64

static unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }

unsigned mm_edits(const char *a, size_t n, const char *b, size_t m) {
  unsigned row[3][LETTERS + 1]; /* of the prefixes of a with two letters less, one less, and this one */
  n = n < LETTERS ? n : LETTERS;
  m = m < LETTERS ? m : LETTERS;
  for (unsigned j = 0; j <= m; j++) row[0][j] = j;
  for (size_t i = 1; i <= n; i++) {
    unsigned *now = row[i % 3], *last = row[(i + 2) % 3], *before = row[(i + 1) % 3];
    now[0] = (unsigned)i;
    for (size_t j = 1; j <= m; j++) {
      now[j] = least(least(last[j], now[j - 1]) + 1, last[j - 1] + (a[i - 1] != b[j - 1]));
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) now[j] = least(now[j], before[j - 2] + 1);
    }
  }
  return row[n % 3][m];
}

bool mm_edits_few(unsigned edits, size_t n) { return n > 1 && edits <= (n < 6 ? 1 : n < 12 ? 2 : 3); }
