/* Notes about files that the runtime does not read. */
#include "runtime/chat/source_notes.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/system/file.h"
#include "runtime/chat/chat_format.h"
#include "runtime/text/ends.h"

static bool tokenizer_noted;

/* The file is at fault, not the machine. */
static bool is_unread(const mm_err *reason) { return reason->status == MM_BAD_INPUT || reason->status == MM_UNSUPPORTED; }

static void note_tokenizer(FILE *f, const mm_err *reason) {
  const char *text = strstr(reason->text, "tokenizer.json: "); /* without the folder, which a conversion renames */
  fprintf(f, "note: the output will take no text, only ids: %s: %s\n", reason->code, text ? text : reason->text);
}

/* `who`: the programs that read it, with the options that make them leave it. */
static void note_refused(FILE *f, const char *who, const mm_err *reason) {
  if (is_unread(reason)) fprintf(f, "note: %s will refuse the output: %s\n", who, reason->text);
}

/* Settings and the template, whose formats are known by their digests. */
static void note_settings(FILE *f, const char *dir, uint32_t vocab) {
  mm_err settings = {0}, template = {0};
  const char *file;
  if (!mm_ends_check(dir, vocab, &settings))
    note_refused(f, "minimax-run (without --ignore-eos) and minimax-serve", &settings);
  else if (!mm_ends_check_defaults(dir, &settings))
    note_refused(f, "minimax-run --chat and minimax-serve (without --ignore-generation-config)", &settings);
  if (!mm_chat_format_known(dir, &file, &template))
    fprintf(f, "note: the template of %s is none that is known: chats will need --chat-format\n", file);
  note_refused(f, "minimax-run --chat and minimax-serve (without --chat-format)", &template);
}

void mm_source_notes(FILE *f, const char *dir, uint32_t vocab) {
  const mm_path path = mm_path_of(dir, "tokenizer.json");
  const mm_digest none = {{0}};
  mm_err reason = {0};
  uint8_t *image = NULL;
  size_t n;
  struct stat st;
  if (stat(path.text, &st) == 0 && st.st_size > 0 && !mm_tokenizer_bake(path.text, vocab, &none, &image, &n, &reason))
    if ((tokenizer_noted = is_unread(&reason))) note_tokenizer(f, &reason);
  free(image);
  note_settings(f, dir, vocab);
}

bool mm_tokenizer_bake_noted(const char *path, uint32_t vocab, const mm_digest *source, uint8_t **image, size_t *n, mm_err *err) {
  mm_err reason = {0};
  if (mm_tokenizer_bake(path, vocab, source, image, n, &reason)) return true;
  if (!is_unread(&reason)) return mm_fail_as(err, &reason);
  if (!tokenizer_noted) note_tokenizer(stderr, &reason);
  *image = NULL;
  return true;
}
