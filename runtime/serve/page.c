/* page.html as a constant: the assembler reads it, from where the compiler runs. */
#include "runtime/serve/page.h"

__asm__(
    ".section .rodata\n"
    "mm_page_begin: .incbin \"runtime/serve/page.html\"\n"
    "mm_page_end:\n"
    ".previous\n");

extern const char mm_page_begin[], mm_page_end[];

const char *mm_page_html(size_t *n) {
  *n = (size_t)(mm_page_end - mm_page_begin);
  return mm_page_begin;
}
