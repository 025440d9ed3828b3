/* Pages of the KV caches in host memory (ops.h). The pool is pinned: place p has the parts of a page after one another, those of each layer
 * together. Copies run on a stream of their own, after the steps that were queued before them. Steps do not wait for them: no step is given
 * their pages before `moved` says that they have ended. */
#include "runtime/cuda/backend.h"
#include "runtime/cuda/core/device.cuh"

namespace {

/* An array with `bytes` of every page. */
struct part {
  char *pages;
  size_t bytes;
};

std::vector<part> parts_of(const mm_backend *b) {
  const mm_cu_page_work &w = b->pages.work;
  const size_t cells = (size_t)w.kv_heads * MM_CU_PAGE;
  std::vector<part> parts;
  const auto add = [&](void *p, size_t bytes) {
    if (p) parts.push_back({static_cast<char *>(p), bytes});
  };
  for (const layer_cache &c : b->cache) {
    add(c.kv.k, cells * w.token_bytes), add(c.kv.v, cells * w.token_bytes);
    add(c.kv.k_scale, cells * sizeof(float)), add(c.kv.v_scale, cells * sizeof(float));
    add(c.kv.index, MM_CU_PAGE * w.index_bytes), add(c.kv.index_scale, MM_CU_PAGE * sizeof(float));
  }
  const size_t of_draft = (size_t)b->draft.copies.kv_heads * MM_CU_PAGE * b->draft.copies.token_bytes;
  for (const mm_cu_kv &c : b->draft.cells)
    add(c.k, of_draft), add(c.v, of_draft), add(c.index, (size_t)MM_CU_PAGE * b->draft.copies.index_bytes);
  return parts;
}

/* Moves from move[0] on whose pages and places are neighbours, in the same order: copied together. */
uint32_t run_of(const mm_page_move *move, uint32_t count) {
  uint32_t n = 1;
  const int64_t step = count > 1 && move[1].page < move[0].page ? -1 : 1;
  while (n < count && move[n].in == move[0].in && (int64_t)move[n].page - move[n - 1].page == step &&
         (int64_t)move[n].place - move[n - 1].place == step)
    n++;
  return n;
}

/* Copies `run` neighbours. */
bool copy_run(mm_backend *b, const std::vector<part> &parts, const mm_page_move *move, uint32_t run, mm_err *err) {
  const host_pool &h = b->pool;
  const mm_page_move &first = move[0].page <= move[run - 1].page ? move[0] : move[run - 1];
  char *place = h.memory + first.place * h.page_bytes;
  for (const part &p : parts) {
    char *const page = p.pages + first.page * p.bytes;
    const cudaError_t e = first.in ? cudaMemcpy2DAsync(page, p.bytes, place, h.page_bytes, p.bytes, run, cudaMemcpyHostToDevice, h.stream)
                                   : cudaMemcpy2DAsync(place, h.page_bytes, page, p.bytes, p.bytes, run, cudaMemcpyDeviceToHost, h.stream);
    if (!mm_cu_check(e, "copy pages", err)) return false;
    place += p.bytes;
  }
  return true;
}

bool copy_all(mm_backend *b, const mm_page_move *move, uint32_t count, mm_err *err) {
  const std::vector<part> parts = parts_of(b);
  if (!mm_cu_check(cudaEventRecord(b->pool.before, b->stream), "cudaEventRecord", err) ||
      !mm_cu_check(cudaStreamWaitEvent(b->pool.stream, b->pool.before, 0), "cudaStreamWaitEvent", err))
    return false;
  for (uint32_t at = 0, run; at < count; at += run) {
    run = run_of(move + at, count - at);
    if (!copy_run(b, parts, move + at, run, err)) return false;
  }
  return true;
}

}  // namespace

uint64_t mm_cu_page_bytes(mm_backend *b) {
  uint64_t bytes = 0;
  for (const part &p : parts_of(b)) bytes += p.bytes;
  return bytes;
}

char *mm_cu_pool(mm_backend *b, uint32_t places, char *memory, mm_err *err) {
  host_pool &h = b->pool;
  h.page_bytes = mm_cu_page_bytes(b);
  if (!memory) {
    const size_t bytes = std::max<size_t>(places * h.page_bytes, 1); /* a stage may have lightning layers alone */
    if (!h.own.map(bytes, err) || !h.own.touch(b->c.options.threads, err) || !h.own.pin(err)) return nullptr;
    memory = reinterpret_cast<char *>(h.own.data);
  }
  h.memory = memory;
  const bool ok = mm_cu_check(cudaStreamCreateWithFlags(&h.stream, cudaStreamNonBlocking), "cudaStreamCreate", err) &&
                  mm_cu_check(cudaEventCreateWithFlags(&h.before, cudaEventDisableTiming), "cudaEventCreate", err);
  return ok ? h.memory : nullptr;
}

void mm_cu_pool_close(mm_backend *b) {
  host_pool &h = b->pool;
  if (h.stream) cudaStreamSynchronize(h.stream);
  for (const auto &call : h.under_way) cudaEventDestroy(call.second);
  for (cudaEvent_t e : h.idle) cudaEventDestroy(e);
  if (h.before) cudaEventDestroy(h.before);
  if (h.stream) cudaStreamDestroy(h.stream);
  h.own.unmap();
}

bool mm_cu_move(mm_backend *b, uint64_t number, const mm_page_move *move, uint32_t count, mm_err *err) {
  host_pool &h = b->pool;
  cudaEvent_t done = nullptr;
  if (!h.idle.empty()) {
    done = h.idle.back(), h.idle.pop_back();
  } else if (!mm_cu_check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "cudaEventCreate", err)) {
    return false;
  }
  /* Copies that were queued before one failed end too before the call counts as ended. */
  const bool copied = copy_all(b, move, count, err), marked = mm_cu_check(cudaEventRecord(done, h.stream), "cudaEventRecord", err);
  h.under_way.emplace_back(number, done);
  return copied && marked;
}

bool mm_cu_moved(mm_backend *b, bool wait, uint64_t *oldest, mm_err *err) {
  host_pool &h = b->pool;
  if (wait && !mm_cu_check(cudaStreamSynchronize(h.stream), "copy pages", err)) return false;
  while (!h.under_way.empty()) {
    const cudaError_t e = cudaEventQuery(h.under_way.front().second);
    if (e == cudaErrorNotReady) break;
    if (!mm_cu_check(e, "copy pages", err)) return false;
    h.idle.push_back(h.under_way.front().second);
    h.under_way.pop_front();
  }
  *oldest = h.under_way.empty() ? UINT64_MAX : h.under_way.front().first;
  return true;
}
