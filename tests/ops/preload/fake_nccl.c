/* A libnccl.so.2 that joins nobody and brings nothing: what a test sets is what it says. */
#include <stddef.h>

typedef struct {
  char byte[128];
} ncclUniqueId;

/* For the test that opened it. */
struct fake_nccl {
  int version, init_fails, gather_fails, async_fails;
  unsigned inits, aborts, gathers; /* so far */
  void (*on_init)(void), (*on_abort)(void);
} fake_nccl = {.version = 23004};

int ncclGetVersion(int *version);
int ncclGetVersion(int *version) {
  *version = fake_nccl.version;
  return 0;
}

int ncclGetUniqueId(ncclUniqueId *id);
int ncclGetUniqueId(ncclUniqueId *id) {
  *id = (ncclUniqueId){"made by rank 0"};
  return 0;
}

int ncclCommInitRank(void **comm, int ranks, ncclUniqueId id, int rank);
int ncclCommInitRank(void **comm, int ranks, ncclUniqueId id, int rank) {
  if (id.byte[0] != 'm' || rank < 0 || rank >= ranks) return 4;
  __atomic_add_fetch(&fake_nccl.inits, 1, __ATOMIC_SEQ_CST);
  if (fake_nccl.on_init) fake_nccl.on_init();
  *comm = &fake_nccl;
  return fake_nccl.init_fails;
}

int ncclCommAbort(void *comm);
int ncclCommAbort(void *comm) {
  __atomic_add_fetch(&fake_nccl.aborts, 1, __ATOMIC_SEQ_CST);
  if (fake_nccl.on_abort) fake_nccl.on_abort();
  return comm != &fake_nccl;
}

int ncclCommGetAsyncError(void *comm, int *error);
int ncclCommGetAsyncError(void *comm, int *error) {
  *error = fake_nccl.async_fails;
  return comm != &fake_nccl;
}

int ncclAllGather(const void *from, void *to, size_t count, int type, void *comm, void *stream);
int ncclAllGather(const void *from, void *to, size_t count, int type, void *comm, void *stream) {
  (void)stream;
  if (!from || !to || count == 0 || type != 0 || comm != &fake_nccl) return 4;
  __atomic_add_fetch(&fake_nccl.gathers, 1, __ATOMIC_SEQ_CST);
  return fake_nccl.gather_fails;
}

const char *ncclGetErrorString(int error);
const char *ncclGetErrorString(int error) { return error == 6 ? "remote process exited or there was a network error" : "invalid argument"; }
