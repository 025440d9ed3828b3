/* Patterns by PCRE2; globs are written as its expressions. */
#include "convert/model/pattern.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#define GROUP      "(?>.*?" /* in place of each star */
#define GLOB_BYTES (8 * MM_PATTERN_BYTES + 16)
#define HEAP_KIB   1024 /* of one match */

/* The compiled pattern lies in the recipe's arena; a match has memory of its own. */
static void *arena_malloc(size_t n, void *arena) {
  mm_err err = {0};
  return mm_arena_alloc(arena, n, &err);
}

static void arena_free(void *p, void *arena) { (void)p, (void)arena; }

static bool refuse(const char *text, const char *what, mm_err *err) {
  return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL), "found %s of pattern \"%s\"", what, MM_ESCAPED(2 * MM_PATTERN_BYTES, text));
}

/* ---- globs ---- */

static char *put_byte(char *out, char c) {
  if (isalnum((uint8_t)c) || c == '_')
    *out++ = c;
  else
    out += sprintf(out, "\\x%02x", (uint8_t)c);
  return out;
}

/* The set at *at, which has an end. NULL where it is none of PCRE2's. */
static char *put_set(char *out, const char **at) {
  const char *c = *at + 1;
  *out++ = '[';
  if (*c == '^' || *c == '!') *out++ = '^', c++;
  for (const char *first = c; *c != ']' || c == first; c++) {
    const char *end = c[0] == '[' && c[1] == ':' ? strstr(c, ":]") : NULL;
    if (*c == 0 || (c[0] == '[' && (c[1] == '.' || c[1] == '='))) return NULL;
    if (end) { /* [:digit:] */
      memcpy(out, c, (size_t)(end + 2 - c));
      out += end + 2 - c, c = end + 1;
    } else if (*c == '-') {
      *out++ = *c;
    } else {
      c += *c == '\\' && c[1];
      out = put_byte(out, *c);
    }
  }
  *out++ = ']';
  *at = c + 1;
  return out;
}

/* A star and the fixed bytes up to the next one are an atomic group: its first match is as good as any later one, since only the last group
 * has to end where the name does. So nothing is tried twice. */
static bool from_glob(char *out, const char *text, mm_err *err) {
  bool open = false;
  out = stpcpy(out, "\\A");
  for (const char *at = text; *at;) {
    const bool set = at[0] == '[' && at[1] && strchr(at + 2, ']'); /* else a bracket like any byte */
    if (*at == '*') {
      out = stpcpy(stpcpy(out, open ? ")" : ""), GROUP);
      open = true, at++;
    } else if (*at == '?') {
      *out++ = '.', at++;
    } else if (set) {
      if (!(out = put_set(out, &at))) return refuse(text, "a set without an end or with a collating element", err);
    } else {
      at += at[0] == '\\' && at[1];
      out = put_byte(out, *at++);
    }
  }
  stpcpy(stpcpy(out, "\\z"), open ? ")" : "");
  return true;
}

/* ---- PCRE2 ---- */

bool mm_pattern_compile(mm_pattern *p, const char *text, mm_arena *a, mm_err *err) {
  char glob[GLOB_BYTES], message[160], what[200];
  const bool expression = strncmp(text, "re:", 3) == 0;
  const char *from = expression ? text + 3 : glob;
  if (strlen(text) > MM_PATTERN_BYTES)
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL), "found a pattern of %zu bytes, expected at most %d", strlen(text),
                   MM_PATTERN_BYTES);
  if (text[expression ? 3 : 0] == 0) return refuse(text, "nothing at byte 0", err);
  if (!expression && !from_glob(glob, text, err)) return false;
  *p = (mm_pattern){.text = text};
  pcre2_general_context *memory = pcre2_general_context_create(arena_malloc, arena_free, a);
  pcre2_compile_context *context = memory ? pcre2_compile_context_create(memory) : NULL;
  if (!context) return mm_fail_memory(err, 0);
  pcre2_set_parens_nest_limit(context, MM_PATTERN_NEST);
  const uint32_t options =
      PCRE2_DOTALL | PCRE2_DOLLAR_ENDONLY | PCRE2_NO_AUTO_CAPTURE | PCRE2_NEVER_UTF | PCRE2_NEVER_UCP | PCRE2_NEVER_BACKSLASH_C;
  int code;
  size_t at;
  p->code = pcre2_compile((PCRE2_SPTR)from, PCRE2_ZERO_TERMINATED, options, &code, &at, context);
  if (!p->code && code == PCRE2_ERROR_HEAP_FAILED) return mm_fail_memory(err, 0);
  if (!p->code) {
    if (pcre2_get_error_message(code, (PCRE2_UCHAR *)message, sizeof message) < 0) snprintf(message, sizeof message, "error %d", code);
    if (expression)
      snprintf(what, sizeof what, "\"%s\" at byte %zu", message, at + 3);
    else
      snprintf(what, sizeof what, "\"%s\" in a set", message);
    return refuse(text, what, err);
  }
  return p->code;
}

bool mm_pattern_match(const mm_pattern *p, const char *name, bool *hit, mm_err *err) {
  int rc = PCRE2_ERROR_NOMEMORY;
  pcre2_match_data *data = pcre2_match_data_create(1, NULL);
  pcre2_match_context *limits = pcre2_match_context_create(NULL);
  if (data && limits) {
    pcre2_set_match_limit(limits, MM_PATTERN_STEPS);
    pcre2_set_heap_limit(limits, HEAP_KIB);
    rc = pcre2_match(p->code, (PCRE2_SPTR)name, strlen(name), 0, 0, data, limits);
  }
  pcre2_match_data_free(data);
  pcre2_match_context_free(limits);
  *hit = rc >= 0;
  if (rc >= 0 || rc == PCRE2_ERROR_NOMATCH) return true;
  if (rc == PCRE2_ERROR_NOMEMORY) return mm_fail_memory(err, 0);
  return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, name),
                 "found pattern \"%s\", which takes more than %d steps (PCRE2 gave %d); expected a simpler one",
                 MM_ESCAPED(2 * MM_PATTERN_BYTES, p->text), MM_PATTERN_STEPS, rc);
}
