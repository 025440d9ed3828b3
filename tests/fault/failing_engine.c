/* minimax-serve whose engine fails each step while the file FAILING exists (with DAMAGED set, as if weights had changed): all of the server
 * but the device (-Wl,--wrap=mm_ops_find). */
#include "runtime/minimax_serve.c" /* NOLINT(bugprone-suspicious-include) */

const mm_ops *__real_mm_ops_find(const char *name, mm_err *err);
const mm_ops *__wrap_mm_ops_find(const char *name, mm_err *err);

static bool failing_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  const char *path = getenv("FAILING");
  const bool damaged = getenv("DAMAGED");
  if (path && access(path, F_OK) == 0)
    return mm_fail(err, damaged ? MM_INTEGRITY : MM_IO, damaged ? "E_DIGEST" : "E_CUDA", mm_at(NULL, NULL), "the device has fallen out");
  return mm_ops_cpu.begin(b, batch, err);
}

const mm_ops *__wrap_mm_ops_find(const char *name, mm_err *err) {
  static mm_ops ops;
  const mm_ops *real = __real_mm_ops_find(name, err);
  if (!real) return NULL;
  ops = *real;
  ops.begin = failing_begin;
  return &ops;
}
