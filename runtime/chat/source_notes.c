/* Notes about files that the runtime does not read. */
#include "runtime/chat/source_notes.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/system/file.h"
#include "runtime/chat/chat_format.h"
#include "runtime/text/ends.h"

static bool tokenizer_noted;

/* Prints an error without the folder of its file, which a conversion renames. */
static void note(FILE *f, const char *consequence, const mm_err *reason) {
  static const char *const files[] = {"tokenizer.json: ",    "tokenizer_config.json: ",  "chat_template.json",
                                      "chat_template.jinja", "generation_config.json: ", "config.json: "};
  const char *text = NULL;
  for (size_t i = 0; !text && i < sizeof files / sizeof *files; i++) text = strstr(reason->text, files[i]);
  fprintf(f, "note: the output will %s: %s: %s\n", consequence, reason->code, text ? text : reason->text);
}

static void note_tokenizer(FILE *f, const mm_err *reason) { note(f, "take no text, only ids", reason); }

/* Settings and the template, whose formats are known by their digests. */
static void note_settings(FILE *f, const char *dir, uint32_t vocab) {
  static const char refused[] = "be refused by minimax-serve";
  mm_err reason = {0}, template = {0};
  const char *file;
  if (!mm_ends_check(dir, vocab, &reason)) note(f, refused, &reason);
  if (!mm_chat_format_known(dir, &file, &template))
    fprintf(f, "note: the template of %s is none that is known: chats will need --chat-format\n", file);
  if (template.status != MM_OK) note(f, refused, &template);
}

void mm_source_notes(FILE *f, const char *dir, uint32_t vocab) {
  const mm_path path = mm_path_of(dir, "tokenizer.json");
  const mm_digest none = {{0}};
  mm_err reason = {0};
  uint8_t *image = NULL;
  size_t n;
  struct stat st;
  if (stat(path.text, &st) == 0 && st.st_size > 0 && !mm_tokenizer_bake(path.text, vocab, &none, &image, &n, &reason))
    note_tokenizer(f, &reason), tokenizer_noted = true;
  free(image);
  note_settings(f, dir, vocab);
}

bool mm_tokenizer_bake_noted(const char *path, uint32_t vocab, const mm_digest *source, uint8_t **image, size_t *n, mm_err *err) {
  mm_err reason = {0};
  if (mm_tokenizer_bake(path, vocab, source, image, n, &reason)) return true;
  if (reason.status != MM_BAD_INPUT && reason.status != MM_UNSUPPORTED) return mm_fail_as(err, &reason);
  if (!tokenizer_noted) note_tokenizer(stderr, &reason);
  *image = NULL;
  return true;
}
