/* Lines typed at a terminal, with editing and history by libedit. */
#ifndef MM_RUNTIME_CHAT_LINE_EDIT_H
#define MM_RUNTIME_CHAT_LINE_EDIT_H

#include <stdbool.h>

typedef struct mm_line_edit mm_line_edit;
/* NULL if stdin or stderr is no terminal, TERM is unset, empty or "dumb", memory is short, or the program is built without
 * libedit: read lines by getline then. */
mm_line_edit *mm_line_edit_open(void);
void mm_line_edit_close(mm_line_edit *e); /* accepts NULL */
/* The next line with its newline, valid until the next call; NULL at the end of input. The prompt is "> " for the first line
 * of a message, else ". ". Ctrl-C ends the program by SIGINT, the terminal restored. */
const char *mm_line_edit_read(mm_line_edit *e, bool first);

#endif
