/* Lines typed at a terminal, with editing and history by libedit where the machine has it. */
#ifndef MM_RUNTIME_CHAT_LINE_EDIT_H
#define MM_RUNTIME_CHAT_LINE_EDIT_H

#include <stdbool.h>

typedef struct mm_line_edit mm_line_edit;
/* NULL where stdin or stderr is no terminal, the terminal is "dumb" or the machine has no libedit.so.2: read lines by getline. */
mm_line_edit *mm_line_edit_open(void);
void mm_line_edit_close(mm_line_edit *e); /* accepts NULL */
/* The next line with its end, valid until the next call; NULL at the end of input. `first`: of a message, the prompt is "> ", else ". ". */
const char *mm_line_edit_read(mm_line_edit *e, bool first);

#endif
