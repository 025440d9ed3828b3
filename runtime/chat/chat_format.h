/* Chat formats: how a conversation becomes a prompt. One for each template that MiniMax's models come with, written by hand and equal to it
 * byte for byte, but for numbers in JSON, which keep their digits.
 *
 * minimax-m1           the template that vLLM ships for tools (string or parts, calls replayed)
 * minimax-m1-released  the template in M1's tokenizer_config.json (parts only, calls not replayed)
 * minimax-m2, minimax-m2.1, minimax-m2.5, minimax-m2.7  the M2 family, which differ in the default system text
 * minimax-m3           the template released with M3 (chat_m3.c) */
#ifndef MM_RUNTIME_CHAT_FORMAT_H
#define MM_RUNTIME_CHAT_FORMAT_H

#include "formats/pack.h"
#include "runtime/chat/prompt.h"

/* The names, as --chat-format takes them. */
#define MM_CHAT_FORMATS "minimax-m1|minimax-m1-released|minimax-m2|minimax-m2.1|minimax-m2.5|minimax-m2.7|minimax-m3"

typedef enum mm_chat_family { MM_CHAT_M1, MM_CHAT_M1_RELEASED, MM_CHAT_M2, MM_CHAT_M3 } mm_chat_family;

/* A token that stands before each tag of M3's calls. */
#define MM_CHAT_MARK "]<]minimax[>["

/* The tags of a reply, by which the families differ. */
typedef struct mm_chat_tags {
  const char *think, *think_end;
  const char *calls, *calls_end; /* around a block of calls */
  const char *call_token;        /* a token that begins a block of calls, also within the reasoning; NULL: text does */
  bool marked;                   /* MM_CHAT_MARK stands before each tag of calls; these tags are text */
  bool newlines;                 /* the template puts newlines around the tags */
  bool bare_end;                 /* content may begin with think_end, which is dropped */
  bool optional;                 /* the request decides whether the model reasons */
  bool minimal;                  /* an effort "minimal" is no reasoning, as "none" is */
} mm_chat_tags;

typedef struct mm_chat_format {
  const char *name;
  mm_chat_family family;
  const char *identity; /* the default system text */
  const mm_chat_tags *tags;
} mm_chat_format;

/* NULL: none has this name. */
const mm_chat_format *mm_chat_format_find(const char *name);
/* The format of these bytes of a template, by their digest; NULL: not known. */
const mm_chat_format *mm_chat_format_of_template(const char *text, size_t n);
/* The format of this name or, where it is NULL, of the checkpoint's own template: chat_template.jinja, else chat_template in
 * tokenizer_config.json. MM_UNSUPPORTED E_CHAT_FORMAT where the template is not known (its digest is named) or there is none; MM_USAGE
 * where no format has the name. */
const mm_chat_format *mm_chat_format_of(const mm_pack *pack, const char *name, mm_err *err);

/* True if the folder of a source has a template, known or not. */
bool mm_chat_format_given(const char *dir);
/* False where the folder of a source has a template, in *file, that is not known. *err: the file is not read. */
bool mm_chat_format_known(const char *dir, const char **file, mm_err *err);

/* The format of the model's family, for a checkpoint without any template. NULL without an error where it has one, or the family has no
 * format. */
const mm_chat_format *mm_chat_format_of_family(const mm_pack *pack, mm_err *err);

/* The thinking mode that an effort of a request stands for: unset unless it is none. */
mm_thinking mm_chat_effort(const mm_chat_format *f, mm_str effort);

/* Renders into an empty prompt. MM_BAD_INPUT E_CHAT names the message: no messages, a tool's message without a call before it (M2, M3),
 * arguments or a tool that are no JSON object; MM_UNSUPPORTED what the format has no form for.
 * M1's templates take the first part alone of a list of parts (minimax-m1: a system message's; minimax-m1-released: a user's too): the
 * parts are rendered as one instead, so that no text is lost. */
MM_MUST_USE bool mm_chat_render(const mm_chat_format *f, const mm_conversation *c, mm_prompt *out, mm_err *err);

#endif
