/* Texts of config.json and what is read of them, for tests. */
#ifndef MM_TESTS_CONFIG_TEXT_H
#define MM_TESTS_CONFIG_TEXT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/model/rule.h"
#include "tests/unit/unit.h"

/* `text` with the first `old` replaced by `new`; free() it. */
static inline char *edited(const char *text, const char *old, const char *new) {
  const char *at = strstr(text, old);
  if (!at) fail_msg("\"%s\" is not in the config", old);
  size_t cap = strlen(text) + strlen(new) + 1;
  char *out = malloc(cap);
  assert_non_null(out);
  snprintf(out, cap, "%.*s%s%s", (int)(at - text), text, new, at + strlen(old));
  return out;
}

static inline bool read_text(const char *text, mm_model *m, const mm_arch **arch, mm_err *err) {
  mm_json *j = mm_json_parse(text, strlen(text), "dir/config.json", err);
  *arch = j ? mm_arch_find(j, "dir/config.json", err) : NULL;
  bool ok = *arch && (*arch)->read_config(j, "dir/config.json", m, err);
  mm_json_free(j);
  return ok;
}

static inline mm_model accepted(const char *text) {
  mm_model m;
  mm_err err = {0};
  const mm_arch *arch;
  if (!read_text(text, &m, &arch, &err)) fail_msg("refused: %s", err.text);
  return m;
}

/* `base` with `old` replaced is read, and the field has the value. */
#define READS(base, old, new, field, value)                                                                   \
  do {                                                                                                        \
    char *text_ = edited(base, old, new);                                                                     \
    mm_model m_ = accepted(text_);                                                                            \
    free(text_);                                                                                              \
    if (!(m_.field == (value))) fail_msg("%s: %s is %g, expected %s", new, #field, (double)m_.field, #value); \
  } while (0)

/* `base` with `old` replaced is refused with this status and a line that says all of `says`. */
static inline void refused(const char *base, const char *old, const char *new, mm_status status, const char *code, const char *says) {
  char *text = edited(base, old, new), start[64];
  mm_model m;
  mm_err err = {0};
  const mm_arch *arch;
  if (read_text(text, &m, &arch, &err)) fail_msg("accepted \"%s\" for \"%s\"", new, old);
  free(text);
  snprintf(start, sizeof start, "%s: dir/config.json: ", code);
  if (err.status != status || strncmp(err.text, start, strlen(start)) != 0 || !strstr(err.text, says))
    fail_msg("\"%s\" for \"%s\": expected status %d, %s… %s, got %d, %s", new, old, (int)status, start, says, (int)err.status, err.text);
  for (const char *c = err.text; *c; c++) assert_true((uint8_t)*c >= 0x20 && *c != 0x7f);
}

#endif
