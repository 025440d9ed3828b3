/* Manifests as texts, and the same with one place changed, which are refused. */
#ifndef MM_TESTS_CHANGED_MANIFEST_H
#define MM_TESTS_CHANGED_MANIFEST_H

#include "formats/pack.h"
#include "tests/unit/changed_text.h"

/* The manifest's text; free() it. */
static inline char *manifest_text(const mm_pack *p) {
  mm_err err = {0};
  char *text = mm_pack_text(p, &err);
  if (!text) fail_msg("%s", err.text);
  return text;
}

/* A change of a manifest, and what the refusal says. */
typedef struct manifest_change {
  const char *old, *new, *says;
} manifest_change;

/* Each change alone, at the first `old` of the text, is refused. */
static inline void refuse_changes(const char *text, const manifest_change *change, size_t count) {
  for (size_t i = 0; i < count; i++) {
    char *changed = replaced(text, "", change[i].old, change[i].new);
    mm_pack p;
    mm_err err = {0};
    assert_false(mm_pack_parse(&p, "d", changed, strlen(changed), &err));
    if (!strstr(err.text, change[i].says)) fail_msg("\"%s\" does not say \"%s\"", err.text, change[i].says);
    assert_string_equal(err.code, "E_MANIFEST");
    free(changed), mm_pack_close(&p);
  }
}

#endif
