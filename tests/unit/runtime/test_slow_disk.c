/* Pages of the prefix cache on a disk that takes long to read: others are served meanwhile, and a request that pushed others out computes
 * what does not come soon. */
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/unit/runtime/serving.h"

static atomic_bool slow;
static atomic_uint reads; /* that have ended since it is slow */
static pthread_mutex_t disk = PTHREAD_MUTEX_INITIALIZER;

/* The C library's, for the whole program: one read after another, each of which takes 0.6 s. */
ssize_t pread(int file, void *to, size_t count, off_t offset) {
  const bool late = atomic_load(&slow);
  if (late) pthread_mutex_lock(&disk);
  for (int i = 0; late && i < 60 && atomic_load(&slow); i++) nanosleep(&(struct timespec){0, 10000000}, NULL);
  if (late) atomic_fetch_add(&reads, 1);
  if (late) pthread_mutex_unlock(&disk);
  return syscall(SYS_pread64, file, to, count, offset);
}

static void fill(client *c, uint32_t text, uint32_t count) {
  for (uint32_t t = 0; t < count; t++) c->prompt[t] = (int32_t)((t * t * 3 + t * 7 + text * 11) % 50);
  c->r.prompt_count = count;
}

static client of_text(serving *w, uint32_t text, uint32_t tokens, uint32_t reply, int priority) {
  client c = {.r = {.max_tokens = reply, .priority = priority}};
  fill(&c, text, tokens);
  client_ready(w, &c);
  return c;
}

/* Runs a prompt and forgets the client. */
static void run_alone(serving *w, uint32_t text, uint32_t tokens) {
  static client c;
  c = of_text(w, text, tokens, 3, 0);
  client_ready(w, &c);
  client_submit(w, &c);
  client_check(&c);
}

/* One slot, eight pages, one place in host memory, and a prompt of six pages on disk alone. */
static void open_slow(serving *w) {
  mm_err err = {0};
  mm_scheduler_config c = {.step_tokens = 40, .queue_max = 9, .prefix_cache = true};
  serving_open(w, ref_dims(MM_FAMILY_M2, false), 1, (mm_limits){.max_tokens = 64, .slots = 1, .pages = 8}, c);
  const uint64_t page = mm_engine_page_bytes(w->engine);
  mm_scheduler_close(w->scheduler, true);
  c.disk_dir = getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp";
  c.disk_bytes = 40 * page, c.offload_bytes = page;
  if (!(w->scheduler = mm_scheduler_open(w->engine, &c, &err))) fail_msg("%s", err.text);
  run_alone(w, 0, 384);
  for (uint32_t text = 2; text < 8; text += 2) run_alone(w, text, 390);
  atomic_store(&reads, 0);
  atomic_store(&slow, true);
}

static void close_slow(serving *w, bool drain) {
  atomic_store(&slow, false);
  serving_close(w, drain);
}

/* While nothing runs and a request waits for pages, one that comes is served. */
TEST(test_others_are_served) {
  serving w;
  open_slow(&w);
  client c[2] = {of_text(&w, 0, 384, 1, 0), of_text(&w, 9, 20, 1, 0)};
  for (uint32_t i = 0; i < 2; i++) client_ready(&w, &c[i]);
  client_submit(&w, &c[0]);
  nanosleep(&(struct timespec){0, 150000000}, NULL);
  client_submit(&w, &c[1]);
  client_check(&c[1]);
  const uint32_t had = atomic_load(&reads);
  print_message("%u reads had ended\n", had);
  assert_true(had <= 1);
  atomic_store(&slow, false);
  client_check(&c[0]);
  assert_true(c[0].cached == 383 && c[1].order < c[0].order);
  close_slow(&w, true);
}

static bool slow_token(void *user, int32_t id, const mm_logprob *logprob, const mm_progress *p) {
  nanosleep(&(struct timespec){0, 50000000}, NULL);
  return client_token(user, id, logprob, p);
}

/* A request that pushed another one out waits a second for its pages, and then computes the others. */
TEST(test_a_pushed_out_place_is_used) {
  serving w;
  open_slow(&w);
  client c[3] = {of_text(&w, 11, 330, 50, 0), of_text(&w, 0, 384, 1, 1), of_text(&w, 13, 20, 1, 0)};
  for (uint32_t i = 0; i < 3; i++) client_ready(&w, &c[i]);
  c[0].r.token = slow_token; /* it is still there when the other's pages find no room next to its own */
  clients_submit_held(&w, c, 3);
  atomic_store(&serving_closed, false);
  client_check(&c[1]);
  const uint32_t had = atomic_load(&reads);
  print_message("%u reads had ended, %u tokens were cached\n", had, c[1].cached);
  assert_true(had <= 5 && c[1].cached <= 5 * MM_PAGE);
  client_check(&c[0]);
  client_check(&c[2]);
  close_slow(&w, true);
}

int main(void) { return run_unit_tests(NULL, NULL); }
