/* quantization_config of any JSON: it is understood, or refused with a status. */
#include <stdlib.h>
#include <string.h>

#include "convert/source/encoding.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const char *const fallback[] = {NULL, "fp8", "gptq", "awq", "compressed-tensors", "modelopt"};
  char *text = malloc(size ? size : 1);
  if (!text) abort();
  if (size) memcpy(text, data, size);
  mm_err err = {0};
  mm_json *j = mm_json_parse(text, size, "config.json", &err);
  for (size_t i = 0; j && i < sizeof fallback / sizeof *fallback; i++) {
    mm_hf hf = {0};
    mm_err refused = {0};
    if (mm_quantization_parse(&hf, j, "config.json", fallback[i], &refused) != (refused.status == MM_OK)) abort();
    mm_hf_close(&hf);
  }
  mm_json_free(j);
  free(text);
  return 0;
}
