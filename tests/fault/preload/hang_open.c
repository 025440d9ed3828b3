/* Weights that never come: a thread that opens a safetensors file waits for ever. */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

int openat(int dir, const char *path, int flags, ...) {
  int (*next)(int, const char *, int, ...);
  va_list args;
  va_start(args, flags);
  const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, int) : 0;
  va_end(args);
  while (strstr(path, ".safetensors")) pause();
  *(void **)&next = dlsym(RTLD_NEXT, "openat");
  return next(dir, path, flags, mode);
}

int open(const char *path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, int) : 0;
  va_end(args);
  return openat(AT_FDCWD, path, flags, mode);
}
