/* The manifest reader on any bytes; what it accepts must survive writing and reading, to the byte. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/pack.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { LINE = sizeof MM_MANIFEST_ENDING - 3 + MM_HEX_LEN };

/* The text before "parallel" in a manifest. Here "parallel" comes last: text that is no JSON is refused before it is read. */
static const char head[] =
    "\"format\":\"minimax-packed\",\"version\":1,\"tool\":\"t\",\"quant\":\"q\",\"tp_align\":\"split\","
    "\"plan\":\"0000000000000000000000000000000000000000000000000000000000000000\","
    "\"model\":{\"architecture\":\"MiniMaxM2ForCausalLM\",\"family\":\"m2\",\"router\":\"sigmoid_bias\",\"postnorm\":false,"
    "\"qk_norm\":true,\"hidden\":128,\"layers\":1,\"heads\":8,\"kv_heads\":8,\"head_dim\":128,\"rotary_dim\":64,\"experts\":4,"
    "\"top_k\":4,\"intermediate\":64,\"vocab\":256,\"max_positions\":1024,\"rope_theta\":5e6,\"norm_eps\":1e-6,"
    "\"lightning_norm_eps\":1e-6,\"deepnorm_lightning\":{\"alpha\":1.0,\"beta\":1.0},\"deepnorm_full\":{\"alpha\":1.0,\"beta\":1.0},"
    "\"deepnorm_mlp\":{\"alpha\":1.0,\"beta\":1.0},\"attn\":[1]},";

/* A manifest, if it begins like one; else what follows the model in one, so that mutations fall on cuts, tensors and parts. The digest
 * of its last line is made right, which no mutation finds by chance. */
static char *with_digest(const uint8_t *data, size_t size, size_t *n) {
  bool whole = size > 0 && data[0] == '{';
  *n = whole ? size : size + sizeof head + 1 + LINE;
  char *text = malloc(*n + 1);
  if (!text) abort();
  if (!whole) text[0] = '{';
  if (size) memcpy(text + !whole, data, size);
  if (!whole) text[1 + size] = ',';
  if (!whole) memcpy(text + 2 + size, head, sizeof head - 1);
  if (*n < LINE) return text;
  const mm_digest d = mm_sha256(text, *n - LINE);
  snprintf(text + *n - LINE, LINE + 1, MM_MANIFEST_ENDING, mm_digest_hex(&d).text);
  return text;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  mm_err err = {0};
  mm_pack p, again;
  size_t n;
  char *given = with_digest(data, size, &n);
  if (mm_pack_parse(&p, "dir", given, n, &err)) {
    char *text = mm_pack_text(&p, &err);
    if (!text || !mm_pack_parse(&again, "dir", text, strlen(text), &err)) abort();
    char *same = mm_pack_text(&again, &err);
    if (!same || strcmp(same, text) != 0) abort();
    free(same);
    free(text);
    mm_pack_close(&again);
  }
  mm_pack_close(&p);
  free(given);
  return 0;
}
