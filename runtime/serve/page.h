/* The page at /. */
#ifndef MM_RUNTIME_SERVE_PAGE_H
#define MM_RUNTIME_SERVE_PAGE_H

#include <stddef.h>

/* page.html as it was when this was built; *n bytes. */
const char *mm_page_html(size_t *n);

#endif
