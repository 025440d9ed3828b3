/* Mappings of whole files, and what becomes of a page that cannot be had. The kernel says it by SIGBUS: the handler finds the mapping, says
 * which file broke where, and ends the program. A page of zeros never passes for weights. */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/system/file.h"

/* A mapping the handler knows. Entries are never freed but used again, so that it may walk the list at any time. */
typedef struct mapped {
  _Atomic(const uint8_t *) data; /* NULL while the entry is free */
  uint64_t size;
  mm_file_id id;
  char *path;
  struct mapped *next;
} mapped;

static _Atomic(mapped *) first;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of whoever changes the list */

static bool enter(const mm_map *m, const mm_file_id *id, const char *path, mm_err *err) {
  char *copy = mm_calloc(strlen(path) + 1, 1, err);
  if (!copy) return false;
  memcpy(copy, path, strlen(path));
  pthread_mutex_lock(&lock);
  mapped *x = atomic_load(&first);
  while (x && atomic_load(&x->data)) x = x->next;
  bool added = !x;
  if (added && (x = mm_calloc(1, sizeof *x, err))) x->next = atomic_load(&first);
  if (x) {
    x->size = m->size;
    x->id = *id;
    x->path = copy;
    atomic_store(&x->data, m->data);
    if (added) atomic_store(&first, x);
  }
  pthread_mutex_unlock(&lock);
  if (!x) free(copy);
  return x;
}

static void leave(const mm_map *m) {
  pthread_mutex_lock(&lock);
  mapped *x = atomic_load(&first);
  while (x && atomic_load(&x->data) != m->data) x = x->next;
  if (x) {
    atomic_store(&x->data, NULL);
    free(x->path);
  }
  pthread_mutex_unlock(&lock);
}

bool mm_map_open(mm_map *m, const mm_file *f, const char *path, mm_err *err) {
  *m = (mm_map){0};
  void *p = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, f->fd, 0);
  if (p == MAP_FAILED) return errno == ENOMEM ? mm_fail_memory(err, f->size) : mm_fail_errno(err, mm_at(path, NULL), "mmap", errno);
  *m = (mm_map){p, f->size};
  if (enter(m, &f->id, path, err)) return true;
  munmap(p, f->size);
  *m = (mm_map){0};
  return false;
}

void mm_map_close(mm_map *m) {
  if (m->data) {
    leave(m);
    munmap((void *)(uintptr_t)m->data, m->size);
  }
  *m = (mm_map){0};
}

bool mm_map_find(const void *p, mm_mapped *out) {
  const uint8_t *at = p;
  pthread_mutex_lock(&lock);
  const mapped *x = atomic_load(&first);
  for (; x; x = x->next) {
    const uint8_t *data = atomic_load(&x->data);
    if (!data || at < data || (uint64_t)(at - data) >= x->size) continue;
    *out = (mm_mapped){x->path, &x->id, data, x->size, (uint64_t)(at - data)};
    break;
  }
  pthread_mutex_unlock(&lock);
  return x;
}

/* The process ends here: what it calls allocates nothing and takes no lock. */
static void on_bus_error(int n, siginfo_t *info, void *context) {
  (void)context;
  static atomic_flag reported = ATOMIC_FLAG_INIT;
  const uint8_t *at = info->si_addr;
  const mapped *x = atomic_load(&first);
  for (; x; x = x->next) {
    const uint8_t *data = atomic_load(&x->data);
    if (data && at >= data && at - data < (ptrdiff_t)x->size) break;
  }
  if (!x) { /* no file of ours: an error of ours */
    signal(n, SIG_DFL);
    return;
  }
  while (atomic_flag_test_and_set(&reported)) pause(); /* one line, from the thread that came first */
  struct stat s;
  mm_err err = {0};
  uint64_t offset = (uint64_t)(at - atomic_load(&x->data));
  mm_where where = mm_at_offset(x->path, NULL, offset);
  if (stat(x->path, &s) == 0 && (uint64_t)s.st_size >= x->size)
    mm_fail(&err, MM_IO, "E_IO", where, "the disk did not give this page");
  else
    mm_fail(&err, MM_IO, "E_CHANGED", where, "changed while it was mapped: %" PRIu64 " bytes expected", x->size);
  char line[sizeof err.text + 128];
  int length = snprintf(line, sizeof line, "%s: error: %s\n", program_invocation_short_name, err.text);
  ssize_t written = write(STDERR_FILENO, line, (size_t)mm_min((uint64_t)length, sizeof line - 1));
  (void)written; /* there is nowhere to report a failed write of an error */
  _exit(MM_IO);
}

void mm_map_watch(void) {
  struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
  sigaction(SIGBUS, &action, NULL);
}
