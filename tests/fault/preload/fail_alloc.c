/* LD_PRELOAD: makes one allocation of a program fail. FAIL_ALLOC=N: the N-th since main was entered, =N+: that one and all after it; what
 * libraries allocate counts too. ALLOC_COUNT=FILE: how many there were, written at the end. Counted are malloc, calloc, realloc,
 * posix_memalign, aligned_alloc, mmap and pthread_create; those that glibc makes for itself inside malloc and pthread_create are not seen.
 *
 * ALLOC_FORK=FILE tries many cases in one run of a program that writes nothing but its stdout, which must be a file open for reading too:
 * before an allocation the program forks, the child goes on with that one failing and ends, and FILE gets a line "CASE STATUS N M", N bytes
 * of stdout and M of stderr. Case 2(N-1) is the N-th failing, the next that one and all after it; ALLOC_CASES=FIRST,STEP says which. A
 * child would lack all threads but one: the first thread that the program starts ends it.
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
#include <sys/wait.h>
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

static struct {
  int results, out, err; /* files: of the cases, and what a child prints; results: -1 when not forking */
  long first, step;
} forking = {.results = -1};

/* Files, from the start of the one to the end of the other. */
static void copy(int from, int to) {
  char some[4096];
  ssize_t n;
  for (off_t at = 0; (n = pread(from, some, sizeof some, at)) > 0; at += n)
    if (write(to, some, (size_t)n) != n) abort();
}

static void copy_afresh(int from, int to) {
  if (ftruncate(to, 0) != 0 || lseek(to, 0, SEEK_SET) != 0) abort();
  copy(from, to);
}

/* True in the child. */
static bool try_case(long n, bool more) {
  copy_afresh(1, forking.out);
  copy_afresh(2, forking.err);
  pid_t child = fork();
  if (child < 0) abort();
  if (child == 0) {
    if (dup2(forking.out, 1) < 0 || dup2(forking.err, 2) < 0) abort();
    forking.results = -1;
    fail_at = n;
    ever_after = more;
    alarm(60);
    return true;
  }
  int status;
  char line[128];
  if (waitpid(child, &status, 0) != child) abort();
  int length =
      snprintf(line, sizeof line, "%ld %d %ld %ld\n", 2 * (n - 1) + more, WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
               (long)lseek(forking.out, 0, SEEK_END), (long)lseek(forking.err, 0, SEEK_END));
  if (write(forking.results, line, (size_t)length) != length) abort();
  copy(forking.out, forking.results);
  copy(forking.err, forking.results);
  return false;
}

static void try_cases(long n) {
  bool child = false;
  atomic_store(&counting, false); /* fork may call what allocates */
  for (int more = 0; !child && more < 2; more++) child = (2 * (n - 1) + more) % forking.step == forking.first && try_case(n, more);
  atomic_store(&counting, true);
}

static bool fails(void) {
  if (!atomic_load(&counting)) return false;
  long n = atomic_fetch_add(&count, 1) + 1;
  if (forking.results >= 0) try_cases(n);
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
  if (fails()) return EAGAIN;
  forking.results = -1;
  return real_pthread_create(thread, attr, start, arg);
}

static void report(void) {
  const char *file = getenv("ALLOC_COUNT");
  atomic_store(&counting, false);
  int fd = file ? open(file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
  if (fd < 0) return;
  dprintf(fd, "%ld\n", atomic_load(&count));
  close(fd);
}

static void start_forking(const char *file) {
  const char *cases = getenv("ALLOC_CASES");
  forking.results = open(file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  forking.out = memfd_create("out", MFD_CLOEXEC);
  forking.err = memfd_create("err", MFD_CLOEXEC);
  if (!cases || sscanf(cases, "%ld,%ld", &forking.first, &forking.step) != 2 || forking.results < 0 || forking.out < 0 || forking.err < 0)
    abort();
}

static int counted_main(int argc, char **argv, char **environment) {
  const char *at = getenv("FAIL_ALLOC"), *forks = getenv("ALLOC_FORK");
  fail_at = at ? strtol(at, NULL, 10) : 0;
  ever_after = at && strchr(at, '+');
  *(void **)&real_pthread_create = dlsym(RTLD_NEXT, "pthread_create");
  if (forks) start_forking(forks);
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
