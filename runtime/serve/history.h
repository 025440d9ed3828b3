/* Adapts histories that the APIs allow and the chat formats cannot express. */
#ifndef MM_RUNTIME_SERVE_HISTORY_H
#define MM_RUNTIME_SERVE_HISTORY_H

#include "runtime/serve/call.h"

/* Before a conversation is rendered; its messages are c's arena's.
 * Formats show one system message, the first: others right behind it become part of it, after an empty line, and later ones are the user's,
 * but end no chain of calls: as for the template, which shows none of them, the reasoning before them stays.
 * Results of tools stand in the order of the calls that they answer: formats show no ids. One whose id is of no call of the message before,
 * that comes twice, or that stands behind a call without a result, is refused. */
MM_MUST_USE bool mm_history_settle(mm_call *c, mm_conversation *v, mm_err *err);

#endif
