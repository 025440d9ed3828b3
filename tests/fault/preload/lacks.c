/* A file system that lacks something: LACKS=flags,direct,fallocate,locks (any of them; LOCK_ERRNO=ENOLCK or EOPNOTSUPP) makes these calls
 * fail as they do there. And a moment to do something in: PAUSE=CALL:N (rename, unlink, fsync or flock; N from 1) stops the process with
 * SIGSTOP before that call, and PAUSE_AFTER=CALL:N after it; DIE=CALL:N kills it before that call and DIE_AFTER=CALL:N after it. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/types.h>
#include <unistd.h>

static int lacks(const char *what) {
  const char *list = getenv("LACKS");
  return list && strstr(list, what) != NULL;
}

static int lock_errno(void) {
  const char *word = getenv("LOCK_ERRNO");
  return word && strcmp(word, "ENOLCK") == 0 ? ENOLCK : EOPNOTSUPP;
}

static void meet(const char *variable, int signal_number, const char *call, int n) {
  const char *at = getenv(variable);
  size_t k = strlen(call);
  if (at && strncmp(at, call, k) == 0 && at[k] == ':' && atoi(at + k + 1) == n) kill(getpid(), signal_number);
}

static int before(const char *call, atomic_int *count) {
  int n = atomic_fetch_add(count, 1) + 1;
  meet("PAUSE", SIGSTOP, call, n);
  meet("DIE", SIGKILL, call, n);
  return n;
}

static void after(const char *call, int n) {
  int kept = errno;
  meet("PAUSE_AFTER", SIGSTOP, call, n);
  meet("DIE_AFTER", SIGKILL, call, n);
  errno = kept;
}

static atomic_int renames, unlinks, syncs, locks;

/* *next: the function of the C library. */
static void find(void *next, const char *name) {
  void *f = dlsym(RTLD_NEXT, name);
  memcpy(next, &f, sizeof f);
}

static int fails(int reason) {
  errno = reason;
  return -1;
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  int (*next)(int, const char *, int, const char *, unsigned);
  find(&next, "renameat2");
  if (flags && lacks("flags")) return fails(EINVAL);
  int n = before("rename", &renames), r = next(a, from, b, to, flags);
  after("rename", n);
  return r;
}

int renameat(int a, const char *from, int b, const char *to) {
  int (*next)(int, const char *, int, const char *);
  find(&next, "renameat");
  int n = before("rename", &renames), r = next(a, from, b, to);
  after("rename", n);
  return r;
}

int unlinkat(int fd, const char *name, int flags) {
  int (*next)(int, const char *, int);
  find(&next, "unlinkat");
  int n = before("unlink", &unlinks), r = next(fd, name, flags);
  after("unlink", n);
  return r;
}

int fsync(int fd) {
  int (*next)(int);
  find(&next, "fsync");
  int n = before("fsync", &syncs), r = next(fd);
  after("fsync", n);
  return r;
}

int flock(int fd, int how) {
  int (*next)(int, int);
  find(&next, "flock");
  int n = before("flock", &locks), r = lacks("locks") ? fails(lock_errno()) : next(fd, how);
  after("flock", n);
  return r;
}

int fcntl(int fd, int cmd, ...) {
  va_list ap;
  va_start(ap, cmd);
  void *arg = va_arg(ap, void *);
  va_end(ap);
  int (*next)(int, int, ...);
  find(&next, "fcntl");
  int locking = cmd == F_SETLK || cmd == F_SETLKW || cmd == F_OFD_SETLK || cmd == F_OFD_SETLKW;
  return locking && lacks("locks") ? fails(lock_errno()) : next(fd, cmd, arg);
}

int posix_fallocate(int fd, off_t at, off_t n) {
  int (*next)(int, off_t, off_t);
  find(&next, "posix_fallocate");
  return lacks("fallocate") ? EOPNOTSUPP : next(fd, at, n);
}

static int refused(int flags) { return (flags & O_DIRECT) && lacks("direct"); }

int open(const char *path, int flags, ...) {
  va_list ap;
  va_start(ap, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, mode_t) : 0;
  va_end(ap);
  int (*next)(const char *, int, ...);
  find(&next, "open");
  return refused(flags) ? fails(EINVAL) : next(path, flags, mode);
}

int openat(int dir, const char *path, int flags, ...) {
  va_list ap;
  va_start(ap, flags);
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, mode_t) : 0;
  va_end(ap);
  int (*next)(int, const char *, int, ...);
  find(&next, "openat");
  return refused(flags) ? fails(EINVAL) : next(dir, path, flags, mode);
}
