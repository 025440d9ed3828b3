/* LD_PRELOAD: makes one allocation fail on demand. FAIL_NEXT=FILE, a file of 4 bytes that the program maps: a number N written
 * there makes the N-th malloc, calloc or realloc from then on fail, whichever thread it is of, those of libraries included; 0: none. */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* glibc's own names of what is replaced here. */
extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *p, size_t n);

static _Atomic uint32_t *left;

__attribute__((constructor)) static void map_file(void) {
  const char *path = getenv("FAIL_NEXT");
  const int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  void *p = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *left, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p != MAP_FAILED) left = p;
  if (fd >= 0) close(fd);
}

static bool fails(void) {
  uint32_t n = left ? atomic_load(left) : 0;
  while (n && !atomic_compare_exchange_weak(left, &n, n - 1)) continue;
  if (n == 1) errno = ENOMEM;
  return n == 1;
}

void *malloc(size_t n) { return fails() ? NULL : __libc_malloc(n); }
void *calloc(size_t count, size_t size) { return fails() ? NULL : __libc_calloc(count, size); }
void *realloc(void *p, size_t n) { return fails() ? NULL : __libc_realloc(p, n); }
