/* Arguments of a call that was cut off: the beginning of a JSON object, as clients put it back into a history. */
#ifndef MM_RUNTIME_CHAT_CUT_ARGUMENTS_H
#define MM_RUNTIME_CHAT_CUT_ARGUMENTS_H

#include "formats/body.h"
#include "runtime/chat/conversation.h"

/* The object that `text` begins, as far as it says something: a string ends where the text does, and a member whose value has not begun, or
 * is the beginning of another value, is left out. False where the text is no such beginning, or with an error without memory. */
bool mm_arguments_close(mm_arena *a, mm_str text, mm_str *out, mm_err *err);

#endif
