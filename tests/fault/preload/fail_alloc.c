/* LD_PRELOAD: makes one allocation of a program fail. FAIL_ALLOC=N: the N-th since main was entered, =N+: that one and all after it; what
 * libraries allocate counts too. ALLOC_COUNT=FILE: how many there were, written at the end. Counted are malloc, calloc, realloc,
 * posix_memalign, aligned_alloc, mmap and pthread_create; those that glibc makes for itself inside malloc and pthread_create are not seen.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* glibc's own names of what is replaced here: unlike dlsym, calling them allocates nothing. */
extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void *__libc_memalign(size_t align, size_t n);

static atomic_bool counting;
static atomic_long count;
static long fail_at;
static bool ever_after;
static int (*real_main)(int, char **, char **);
static int (*real_pthread_create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
static void *(*real_mmap)(void *, size_t, int, int, int, off_t);

static bool fails(void) {
  if (!atomic_load(&counting)) return false;
  long n = atomic_fetch_add(&count, 1) + 1;
  bool hit = fail_at > 0 && (n == fail_at || (ever_after && n > fail_at));
  if (hit) errno = ENOMEM;
  return hit;
}

void *malloc(size_t n) { return fails() ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return fails() ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return fails() ? NULL : __libc_realloc(p, n); }
void *aligned_alloc(size_t align, size_t n) { return fails() ? NULL : __libc_memalign(align, n); }

int posix_memalign(void **out, size_t align, size_t n) {
  void *p = fails() ? NULL : __libc_memalign(align, n);
  if (!p) return ENOMEM;
  *out = p;
  return 0;
}

void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset) {
  if (!real_mmap) *(void **)&real_mmap = dlsym(RTLD_NEXT, "mmap");
  return fails() ? MAP_FAILED : real_mmap(at, n, protection, flags, fd, offset);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg) {
  return fails() ? EAGAIN : real_pthread_create(thread, attr, start, arg);
}

static void report(void) {
  const char *file = getenv("ALLOC_COUNT");
  atomic_store(&counting, false);
  int fd = file ? open(file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
  if (fd < 0) return;
  dprintf(fd, "%ld\n", atomic_load(&count));
  close(fd);
}

static int counted_main(int argc, char **argv, char **environment) {
  const char *at = getenv("FAIL_ALLOC");
  fail_at = at ? strtol(at, NULL, 10) : 0;
  ever_after = at && strchr(at, '+');
  *(void **)&real_pthread_create = dlsym(RTLD_NEXT, "pthread_create");
  atexit(report);
  atomic_store(&counting, true);
  return real_main(argc, argv, environment);
}

int __libc_start_main(int (*start)(int, char **, char **), int argc, char **argv, void (*init)(void), void (*fini)(void),
                      void (*rtld_fini)(void), void *stack_end) {
  int (*next)(int (*)(int, char **, char **), int, char **, void (*)(void), void (*)(void), void (*)(void), void *);
  *(void **)&next = dlsym(RTLD_NEXT, "__libc_start_main");
  real_main = start;
  return next(counted_main, argc, argv, init, fini, rtld_fini, stack_end);
}
