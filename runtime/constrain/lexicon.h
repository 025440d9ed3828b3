/* The words of a tokenizer, for masks (constraint.h). */
#ifndef MM_RUNTIME_CONSTRAIN_LEXICON_H
#define MM_RUNTIME_CONSTRAIN_LEXICON_H

#include "runtime/text/tokenizer.h"

/* All ordinary tokens by their bytes; of one tokenizer, for all constraints. Read only. The tags that mark the parts of a reply are not
 * among them: text that spells a tag is made of other tokens. M3's mark is the word of the byte MM_REPLY_MARK, which forms of M3's calls
 * alone have. */
typedef struct mm_lexicon mm_lexicon;
/* end[end_count]: ids that end a reply. The tokenizer and `end` stay. */
mm_lexicon *mm_lexicon_open(const mm_tokenizer *t, uint32_t vocab, const int32_t *end, uint32_t end_count, mm_err *err);
void mm_lexicon_close(mm_lexicon *l); /* accepts NULL */

#endif
