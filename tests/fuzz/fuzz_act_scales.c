/* Files of activation scales, of any bytes: each number of an accepted one is finite and not negative, and names are in order. */
#include <math.h>
#include <string.h>

#include "convert/calibration/act_scales.h"
#include "tests/fuzz/given_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  mm_act_scales s = {0};
  mm_err err = {0};
  bool ok = mm_act_scales_open(&s, given_file(data, size), &err);
  if (ok != (err.status == MM_OK)) abort();
  for (size_t i = 0; ok && i < s.count; i++) {
    if (!isfinite(s.number[i].value) || s.number[i].value < 0) abort();
    if (i > 0 && strcmp(s.number[i - 1].name, s.number[i].name) > 0) abort();
  }
  mm_act_scales_close(&s);
  return 0;
}
