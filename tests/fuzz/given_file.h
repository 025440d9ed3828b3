/* Bytes of the fuzzer as a file with a path, for parsers that open one: an unlinked file in memory, reused by every input. */
#ifndef MM_TESTS_GIVEN_FILE_H
#define MM_TESTS_GIVEN_FILE_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* The path of a file of these bytes; valid until the next call. */
static inline const char *given_file(const uint8_t *data, size_t size) {
  static char path[32];
  static int fd = -1;
  if (fd < 0) {
    fd = memfd_create("input", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  }
  if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size) abort();
  return path;
}

#endif
