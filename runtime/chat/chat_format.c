/* Which chat format a checkpoint has. */
#include "runtime/chat/chat_format.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/hash.h"
#include "formats/json.h"
#include "formats/system/file.h"
#include "runtime/text/ends.h"

#define TEMPLATE_MAX (UINT64_C(16) << 20)

#define M1_IDENTITY "You are a helpful assistant created by Minimax based on MiniMax-M1 model."
#define M2_IDENTITY "You are a helpful assistant."
#define M2_NAMED(x) M2_IDENTITY " Your name is MiniMax-M2." x " and is built by MiniMax."

static const mm_chat_tags m1 = {
    .think = "<think>", .think_end = "</think>", .calls = "<tool_calls>", .calls_end = "</tool_calls>", .newlines = true};
static const mm_chat_tags m2 = {.think = "<think>",
                                .think_end = "</think>",
                                .calls = "<minimax:tool_call>",
                                .calls_end = "</minimax:tool_call>",
                                .call_token = "<minimax:tool_call>",
                                .newlines = true,
                                .optional = true};
static const mm_chat_tags m3 = {.think = "<mm:think>",
                                .think_end = "</mm:think>",
                                .calls = "<tool_call>",
                                .calls_end = "</tool_call>",
                                .call_token = MM_CHAT_MARK,
                                .marked = true,
                                .bare_end = true,
                                .optional = true,
                                .minimal = true};

static const mm_chat_format formats[] = {
    {"minimax-m1", MM_CHAT_M1, M1_IDENTITY, &m1},     {"minimax-m1-released", MM_CHAT_M1_RELEASED, "", &m1},
    {"minimax-m2", MM_CHAT_M2, M2_IDENTITY, &m2},     {"minimax-m2.1", MM_CHAT_M2, M2_NAMED("1"), &m2},
    {"minimax-m2.5", MM_CHAT_M2, M2_NAMED("5"), &m2}, {"minimax-m2.7", MM_CHAT_M2, M2_NAMED("7"), &m2},
    {"minimax-m3", MM_CHAT_M3, M2_IDENTITY, &m3},
};

/* SHA-256 of the known templates without the last newline, which Jinja drops, and without the text of the default identity. */
static const struct {
  const char *digest;
  mm_chat_family family;
} known[] = {
    {"e1790d8fbe1c587e6fc385e2a712363f86faf52ae1fb1fcbfc5ded3eb1fae70a", MM_CHAT_M1},
    {"11fc33a57630c6e71a2231641db07c724208f4cc7611659c419c027c3fb3cf18", MM_CHAT_M1_RELEASED},
    {"c86a099b19941b8372553cbfe3ffb51ddf367c3b30783d5cc0e13fc6ee87fc7b", MM_CHAT_M2},
    /* The same with tool_calls[-1].name instead of tool_calls[-1].function.name. */
    {"aa9aecfdab1b3d337874452bd20782a87a7192cabcf9730f2473de7f9fc4dc29", MM_CHAT_M2},
    {"5963aaf3957045873d22a1fa5d3fa97c77cdaa5ff8cb64f7ca601b04b96c9aed", MM_CHAT_M3},
};

const mm_chat_format *mm_chat_format_find(const char *name) {
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
    if (strcmp(formats[i].name, name) == 0) return &formats[i];
  return NULL;
}

/* The identity that a template of M2 or M3 sets; absent in others. */
static mm_str identity_of(const char *text, size_t n) {
  static const char set[] = "set model_identity = \"";
  const char *at = memmem(text, n, set, sizeof set - 1);
  const char *end = at ? memchr(at + sizeof set - 1, '"', n - (size_t)(at + sizeof set - 1 - text)) : NULL;
  return end ? (mm_str){at + sizeof set - 1, (size_t)(end - (at + sizeof set - 1))} : (mm_str){0};
}

static mm_digest digest_of(const char *text, size_t n, mm_str identity) {
  mm_sha256_state s;
  if (n && text[n - 1] == '\n') n--;
  mm_sha256_begin(&s);
  const size_t before = identity.p ? (size_t)(identity.p - text) : n;
  mm_sha256_add(&s, text, before);
  if (identity.p) mm_sha256_add(&s, identity.p + identity.n, n - before - identity.n);
  return mm_sha256_end(&s);
}

const mm_chat_format *mm_chat_format_of_template(const char *text, size_t n) {
  const mm_str identity = identity_of(text, n);
  const mm_digest d = digest_of(text, n, identity);
  const mm_hex hex = mm_digest_hex(&d);
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
    if (strcmp(known[i].digest, hex.text) != 0) continue;
    for (size_t j = 0; j < sizeof formats / sizeof *formats; j++) {
      const mm_chat_format *f = &formats[j];
      const bool same = strlen(f->identity) == identity.n && memcmp(f->identity, identity.p ? identity.p : "", identity.n) == 0;
      if (f->family == known[i].family && (same || f->family < MM_CHAT_M2)) return f;
    }
  }
  return NULL;
}

mm_thinking mm_chat_effort(const mm_chat_format *f, mm_str effort) {
  const bool none = effort.n == 4 && memcmp(effort.p, "none", 4) == 0;
  const bool minimal = f && f->tags->minimal && effort.n == 7 && memcmp(effort.p, "minimal", 7) == 0;
  return none || minimal ? MM_THINKING_DISABLED : MM_THINKING_UNSET;
}

/* ---- A checkpoint's own template ---- */

/* Where the template lies: in a checkpoint, whose manifest lists it, or in the folder of a source. */
typedef struct place {
  const char *dir;
  const mm_pack *pack; /* NULL: a source */
} place;

/* Reads a companion file that the converter copied into the checkpoint; NULL without an error if the source had none. */
static char *companion(const place *p, const char *name, size_t *n, mm_err *err) {
  const mm_path path = mm_path_of(p->dir, name);
  if (p->pack ? !mm_pack_find_file(p->pack, name) : access(path.text, F_OK) != 0) return NULL;
  return mm_file_listed(path.text, err) ? mm_file_slurp(path.text, TEMPLATE_MAX, n, err) : NULL;
}

/* chat_template of a JSON file: a string, or a list of named ones of which "default" counts. */
static char *template_in(const place *p, const char *name, size_t *n, mm_err *err) {
  char *text = companion(p, name, n, err), *out = NULL;
  mm_err reason = {0};
  mm_json *root = text ? mm_json_parse(text, *n, mm_path_of(p->dir, name).text, &reason) : NULL;
  if (text && !root && !mm_companion_fail(p->pack, name, &reason, err)) return free(text), NULL;
  const mm_json *v = mm_json_get(root, "chat_template");
  if (mm_json_type_of(v) == MM_JSON_ARR) {
    const mm_json *list = v;
    v = NULL;
    for (size_t i = 0; i < mm_json_size(list); i++) {
      const mm_json *entry = mm_json_at(list, i), *label = mm_json_get(entry, "name");
      if (mm_json_is(label, "default")) v = mm_json_get(entry, "template");
    }
  }
  if (mm_json_type_of(v) == MM_JSON_STR) {
    *n = mm_json_str_len(v);
    out = mm_calloc(*n + 1, 1, err);
    if (out) memcpy(out, mm_json_str(v), *n);
  }
  mm_json_free(root);
  free(text);
  return out;
}

/* An empty one is none. */
static char *own_template(const place *p, const char **file, size_t *n, mm_err *err) {
  char *text = companion(p, *file = "chat_template.jinja", n, err);
  if (!text && err->status == MM_OK) text = template_in(p, *file = "chat_template.json", n, err);
  if (!text && err->status == MM_OK) text = template_in(p, *file = "tokenizer_config.json", n, err);
  if (!text || *n) return text;
  free(text);
  return NULL;
}

const mm_chat_format *mm_chat_format_of(const mm_pack *pack, const char *name, mm_err *err) {
  const mm_chat_format *f = NULL;
  if (name) {
    if (!(f = mm_chat_format_find(name)))
      mm_fail(err, MM_USAGE, "E_CHAT_FORMAT", mm_at(NULL, NULL), "found \"%s\", expected one of " MM_CHAT_FORMATS, name);
    return f;
  }
  const place at = {pack->dir, pack};
  const char *file;
  size_t n = 0;
  mm_err own = {0};
  char *text = own_template(&at, &file, &n, &own);
  if (own.status != MM_OK) {
    mm_fail_as(err, &own);
  } else if (!text) {
    mm_fail(err, MM_UNSUPPORTED, "E_CHAT_FORMAT", mm_at(pack->dir, NULL),
            "the checkpoint has no chat template, expected one or a format by name: " MM_CHAT_FORMATS);
  } else if (!(f = mm_chat_format_of_template(text, n))) {
    const mm_digest d = mm_sha256(text, n);
    mm_fail(err, MM_UNSUPPORTED, "E_CHAT_FORMAT", mm_at(mm_path_of(pack->dir, file).text, NULL),
            "found a chat template of digest %s, which is not known, expected a known one or a format by name: " MM_CHAT_FORMATS,
            mm_digest_hex(&d).text);
  }
  free(text);
  return f;
}

bool mm_chat_format_given(const char *dir) {
  const place at = {dir, NULL};
  const char *file;
  size_t n = 0;
  char *text = own_template(&at, &file, &n, MM_IGNORED);
  const bool given = text;
  free(text);
  return given;
}

bool mm_chat_format_known(const char *dir, const char **file, mm_err *err) {
  const place at = {dir, NULL};
  size_t n = 0;
  char *text = own_template(&at, file, &n, err);
  const bool known_one = !text || mm_chat_format_of_template(text, n);
  free(text);
  return known_one;
}

const mm_chat_format *mm_chat_format_of_family(const mm_pack *pack, mm_err *err) {
  static const struct {
    const char *architecture, *format;
  } family[] = {{"MiniMaxM3", "minimax-m3"}, /* the beginning of several names */
                {"MiniMaxM2ForCausalLM", "minimax-m2"},
                {"MiniMaxM1ForCausalLM", "minimax-m1"},
                {"MiniMaxText01ForCausalLM", "minimax-m1"},
                {"MiniMaxForCausalLM", "minimax-m1"}};
  const place at = {pack->dir, pack};
  const char *file;
  size_t n = 0;
  mm_err own = {0};
  char *text = own_template(&at, &file, &n, &own);
  free(text);
  if (own.status != MM_OK) mm_fail_as(err, &own);
  if (text || own.status != MM_OK) return NULL;
  for (size_t i = 0; i < sizeof family / sizeof *family; i++)
    if (strncmp(family[i].architecture, pack->model.architecture, strlen(family[i].architecture)) == 0)
      return mm_chat_format_find(family[i].format);
  return NULL;
}
