/* Errors, checked arithmetic, allocation. Everything else stands on this file.
 *
 * Error style (one line, one exit status): a function that can fail takes `mm_err *err` last and returns
 * bool (or a pointer, NULL on failure). err is never NULL; the first failure recorded in it wins. Nothing below the programs
 * prints or exits. */
#ifndef MM_FORMATS_BASE_H
#define MM_FORMATS_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MM_VERSION "0.2.0"
/* "0.2.0 (commit 1a2b3c4, CUDA for 80 90a)": for people; what is written to files has the number alone. */
const char *mm_version(void);

#if defined(__GNUC__)
#define MM_PRINTF(f, a) __attribute__((format(printf, f, a)))
#define MM_MUST_USE     __attribute__((warn_unused_result)) /* a status that nobody may overlook */
#define MM_NEEDS(...)   __attribute__((nonnull(__VA_ARGS__)))
#else
#define MM_PRINTF(f, a)
#define MM_MUST_USE
#define MM_NEEDS(...)
#endif

/* A call whose status is not looked at: what failed stands in its err, or does not matter. */
static inline void mm_either_way(bool ok) { (void)ok; }

/* Exit statuses of every program; an mm_err carries one of them. */
typedef enum mm_status {
  MM_OK = 0,
  MM_BUG = 1,         /* an error of ours; says so */
  MM_USAGE = 2,       /* options, or an output path that must not be touched */
  MM_BAD_INPUT = 3,   /* a source file is malformed or inconsistent */
  MM_UNSUPPORTED = 4, /* valid, but not something this version does */
  MM_IO = 5,          /* the operating system refused; carries strerror */
  MM_INTEGRITY = 6,   /* a packed checkpoint is not what its manifest says */
  MM_LOCKED = 7,      /* another run owns the output */
  MM_LIMIT = 8,       /* memory or another limit */
  MM_INTERRUPTED = 75 /* stopped in a resumable state */
} mm_status;

/* Where a failure was seen. Strings are borrowed for the call only; NULL and -1 mean "does not apply". */
typedef struct mm_where {
  const char *file;
  const char *tensor;
  int64_t offset; /* bytes from the start of `file` */
} mm_where;

static inline mm_where mm_at(const char *file, const char *tensor) {
  mm_where w = {file, tensor, -1};
  return w;
}

static inline mm_where mm_at_offset(const char *file, const char *tensor, uint64_t offset) {
  mm_where w = {file, tensor, offset > INT64_MAX ? INT64_MAX : (int64_t)offset};
  return w;
}

/* The first failure of a call chain. Zero-initialise before use (`mm_err err = {0}`). */
typedef struct mm_err {
  mm_status status; /* MM_OK while nothing has failed */
  char code[24];    /* "E_PREFIX": stable, documented in docs/errors.md */
  char text[3072]; /* `CODE: FILE: tensor "NAME": offset N: found …, expected …`, names escaped, no newline; "": another process says it */
} mm_err;

/* The err of a call whose failure needs no words: the result says it, or it does not matter. */
#define MM_IGNORED (&(mm_err){0})

/* Records a failure unless `err` already holds one. `fmt` says what was found and what was expected.
 * File and tensor names are escaped (mm_escape) and cut at 1,000 bytes; what fmt gives is escaped too, but for quotes and backslashes.
 * Returns false, so that `return mm_fail(…)` works. Does not allocate. */
bool mm_fail(mm_err *err, mm_status status, const char *code, mm_where where, const char *fmt, ...) MM_PRINTF(5, 6) MM_NEEDS(1);

/* Passes a failure on, unless `err` already holds one. Returns false. */
bool mm_fail_as(mm_err *err, const mm_err *reason) MM_NEEDS(1, 2);
/* The same of a file of ours: what would be bad input of a source (absent, no file, malformed) is damage there. why may be err. */
bool mm_fail_damaged(mm_err *err, mm_err *reason) MM_NEEDS(1, 2);

/* mm_fail(MM_IO, "E_IO") with `what` (e.g. "open"), strerror(errno_value) and the limit of this process that may be why; ENOMEM is MM_LIMIT
 * "E_MEMORY". */
bool mm_fail_errno(mm_err *err, mm_where where, const char *what, int errno_value) MM_NEEDS(1);

/* mm_fail(MM_LIMIT, "E_MEMORY") naming the bytes wanted, and the limit. */
bool mm_fail_memory(mm_err *err, uint64_t bytes) MM_NEEDS(1);

/* mm_fail(MM_LIMIT, "E_THREADS") for what pthread_create returned, with the limit that was reached, or those that may have been. */
bool mm_fail_thread(mm_err *err, const char *what, int errno_value) MM_NEEDS(1);

/* Writes "; the limit is N descriptors (ulimit -n)" and its like: the limits of this process that may cause the error (EMFILE, EFBIG,
 * ENOMEM, or EAGAIN for a thread); "" where there are none. Returns `to`. */
#define MM_LIMITS_TEXT 200
const char *mm_limits_text(char to[MM_LIMITS_TEXT], int errno_value);
/* Writes "; NAME is "VALUE"" of a variable of the environment that may be the cause of an error; "" where it is not set. Returns `to`. */
#define MM_VARIABLE_TEXT 160
const char *mm_variable_text(char to[MM_VARIABLE_TEXT], const char *name);
/* Why the system starts no thread any more: a control group (`groups` as /proc/self/cgroup, `root` as /sys/fs/cgroup) that has as many as
 * it may have, or one of those above it; or the kernel (`proc` as /proc). Writes a text like that; "" where neither is full. Returns `to`.
 */
const char *mm_tasks_full(char to[MM_LIMITS_TEXT], const char *groups, const char *root, const char *proc);

/* Writes `text` (n bytes) to `out` so that a terminal shows it and obeys none of it: control bytes (C0, DEL, C1), characters that are not
 * seen or turn others round (zero-width, U+202E and its like), quotes, backslashes and invalid UTF-8 as \xNN; always NUL-terminated, cut
 * with "…" at cap. Returns out. */
char *mm_escape(char *out, size_t cap, const char *text, size_t n);
/* The same in a buffer of cap bytes that lives as long as the block that names it; fmt's text in such a buffer. */
#define MM_ESCAPED_BYTES(cap, text, n) mm_escape((char[cap]){0}, cap, text, n)
#define MM_ESCAPED(cap, text)          MM_ESCAPED_BYTES(cap, text, strlen(text))
#define MM_FORMATTED(cap, ...)         mm_format((char[cap]){0}, cap, __VA_ARGS__)
/* A function whose frame never is part of its callers': they keep little of a small stack. */
#define MM_OWN_FRAME __attribute__((noinline))
char *mm_format(char *out, size_t cap, const char *fmt, ...) MM_PRINTF(3, 4);
/* mm_escape of a string that does not stand between quotes: quotes and backslashes stay. */
char *mm_show(char *out, size_t cap, const char *text);
/* mm_show to a stream, whole. */
void mm_show_to(FILE *f, const char *text);

/* Length (1–4) of the valid UTF-8 sequence at the start of text (n ≥ 1 bytes); 0 if there is none: overlong forms, surrogates
 * and code points beyond U+10FFFF are invalid. */
size_t mm_utf8_len(const char *text, size_t n);
/* The code point at *p, before end; *p moves past it. A byte that begins no valid sequence is one of its own. */
uint32_t mm_utf8_next(const char **p, const char *end);
/* Writes a code point up to 0x1FFFFF; returns its length. */
size_t mm_utf8_put(char out[4], uint32_t code);
/* The value of a hexadecimal digit; -1 of others. */
int mm_hex_digit(char c);

/* Checked arithmetic for every size that comes from a file: false on overflow, *out then unspecified. */
static inline bool mm_add(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_add_overflow(a, b, out); }
static inline bool mm_mul(uint64_t a, uint64_t b, uint64_t *out) { return !__builtin_mul_overflow(a, b, out); }

static inline uint64_t mm_ceil_div(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }
static inline uint64_t mm_round_up(uint64_t a, uint64_t b) { return mm_ceil_div(a, b) * b; }
static inline uint64_t mm_min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t mm_max(uint64_t a, uint64_t b) { return a > b ? a : b; }
uint64_t mm_gcd(uint64_t a, uint64_t b);

/* Names in a message: whole ones, as many as fit, then how many there are besides. Zero-initialise. */
typedef struct mm_name_list {
  char text[512];
  size_t used;
  uint64_t more;
} mm_name_list;
void mm_name_list_add(mm_name_list *l, const char *name);

/* The finaliser of splitmix64: a random function of 64 bits. */
static inline uint64_t mm_scatter(uint64_t x) {
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  return x ^ x >> 31;
}

/* Seconds of a clock that only goes forward, CLOCK_MONOTONIC, from a moment of its own. */
double mm_now(void);
/* The time of that clock in so many seconds, for pthread_cond_clockwait. */
struct timespec mm_later(double seconds);
bool mm_ends_with(const char *s, const char *end);

/* Zeroed memory for count elements of size bytes; NULL and E_MEMORY on overflow or exhaustion. Free with free(). */
void *mm_calloc(size_t count, size_t size, mm_err *err) MM_NEEDS(3);
/* Grows *array (element size `size`) so that it holds at least want elements; *cap is its capacity. */
MM_MUST_USE bool mm_grow(void **array, size_t *cap, size_t want, size_t size, mm_err *err) MM_NEEDS(1, 2, 5);
/* mm_grow of a typed pointer, by its element size. */
#define MM_GROW(array, cap, want, err) mm_grow((void **)&(array), cap, want, sizeof *(array), err)

/* Orders for qsort and bsearch. By text: of pointers to texts, and of structs that begin with one. */
int mm_by_text(const void *a, const void *b);
int mm_by_u32(const void *a, const void *b);
int mm_by_real(const void *a, const void *b); /* double */
/* qsort for what is mostly in order when it comes: one pass and no scratch if it is. */
void mm_sort(void *array, size_t count, size_t size, int (*order)(const void *, const void *));

/* Closes a stream of open_memstream whose buffer is *text: true when all of it is there. glibc's fclose reports success and leaves no text
 * when its last allocation fails. */
bool mm_close_text(FILE *f, char *const *text);

/* Frees each of these. */
#define MM_FREE(...) mm_free_each((void *[]){__VA_ARGS__}, sizeof((void *[]){__VA_ARGS__}) / sizeof(void *))
static inline void mm_free_each(void *const *p, size_t n) {
  for (size_t i = 0; i < n; i++) free(p[i]);
}

/* An arena: many small pieces, freed together. Zero-initialise; close accepts an unused one. */
typedef struct mm_arena {
  struct mm_arena_chunk *chunk;
} mm_arena;
void *mm_arena_alloc(mm_arena *a, size_t n, mm_err *err) MM_NEEDS(3); /* 16-byte aligned, zeroed */
size_t mm_arena_bytes(const mm_arena *a);                             /* of memory that it has taken */
char *mm_arena_strndup(mm_arena *a, const char *s, size_t n, mm_err *err);
/* printf into the arena. */
char *mm_arena_printf(mm_arena *a, mm_err *err, const char *fmt, ...) MM_PRINTF(3, 4);
void mm_arena_close(mm_arena *a);

#ifdef __cplusplus
}
#endif
#endif
