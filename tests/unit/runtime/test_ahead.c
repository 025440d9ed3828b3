/* The scheduler on devices that choose by themselves: the next step is queued before the last one's choices are read. The device is the CPU
 * backend with a choice of its own behind it, whose tokens come out only when they are collected; with shared pages and without. One that
 * defers keeps the logits of a pass, so that masks are made, several at once, and the step before is collected in the meantime. */
#include <unistd.h>

#include "formats/system/pool.h"
#include "tests/unit/runtime/random_requests.h"

enum { SLOTS = 6, ROWS = 64, SAMPLES = MM_SAMPLES_MIN_P | MM_SAMPLES_BIAS | MM_SAMPLES_MASK | MM_SAMPLES_LOGPROBS };

/* The device. */
static struct {
  mm_sampler *sampler;
  mm_batch batch; /* of the step, with the tokens that were chosen */
  int32_t id[ROWS];
  int32_t chosen[SLOTS]; /* after the last row of each slot */
  int32_t queue[MM_QUEUE][ROWS];
  uint32_t count[MM_QUEUE];
  _Atomic uint64_t queued, collected, ahead; /* ahead: steps queued before the choices of the last one were collected */
  uint64_t deferred;                         /* steps sampled after their pass */
  _Atomic uint32_t padding[ROWS + 1];        /* steps of so many rows of padding */
  _Atomic uint64_t fail_at, fail_choice;     /* numbers of the step that fails, and of the one whose choice does, from 1; 0: none */
  _Atomic uint64_t fail_until;               /* the number of the last step that fails, from fail_at on */
  _Atomic uint64_t refuse_at;                /* the number of the step from which on none is taken, 0: all are */
  float logits[ROWS * 64];
} device;

static bool device_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  if (device.refuse_at && device.queued + 1 >= device.refuse_at)
    return mm_fail(err, MM_IO, "E_HELD", mm_at(NULL, NULL), "the holder has ended");
  device.batch = *batch;
  device.batch.id = device.id;
  for (uint32_t i = 0; i < batch->span_count; i++)
    for (uint32_t t = batch->span[i].first; t < batch->span[i].first + batch->span[i].count; t++)
      device.id[t] = batch->id[t] == MM_ID_SAMPLED ? device.chosen[batch->span[i].slot] : batch->id[t];
  if (batch->span_count && batch->span[0].slot < 0) device.padding[batch->span_count]++;
  return poisoning_begin(b, &device.batch, err);
}

/* Samples after the rows of device.batch, whose logits are in device.logits. */
static void sample_rows(const mm_backend *b, const mm_sampling *sampling, uint32_t count) {
  const mm_batch *batch = &device.batch;
  const uint32_t at = (uint32_t)(device.queued % MM_QUEUE), stride = b->c.weights->vocab_rows;
  const mm_span *s = batch->span;
  for (uint32_t i = 0; i < count; i++) {
    while (batch->out[i] >= s->first + s->count) s++;
    float *row = device.logits + (size_t)i * stride, own[64];
    const mm_sampling *set = &sampling[i];
    memcpy(own, row, b->c.model->vocab * sizeof *own);
    mm_sample_adjust(device.sampler, set, NULL, 0, own);
    const int32_t id = mm_sample(device.sampler, set, s->pos + (batch->out[i] - s->first) + UINT64_C(1), own);
    if (set->logprobs) mm_sample_logprobs(device.sampler, set, id, row);
    device.queue[at][i] = id;
    if (s->slot >= 0) device.chosen[s->slot] = id;
  }
  device.count[at] = count;
  device.queued++;
}

static bool device_sample(mm_backend *b, mm_err *err) {
  if (!mm_ops_cpu.end(b, device.logits, err)) return false;
  device.ahead += device.queued > device.collected;
  sample_rows(b, device.batch.sampling, device.batch.out_count);
  return true;
}

/* The batch's arrays are the scheduler's, which builds no other before the choice. */
static bool device_defer(mm_backend *b, mm_err *err) {
  device.ahead += device.queued > device.collected;
  return mm_ops_cpu.end(b, device.logits, err);
}

static bool device_sample_deferred(mm_backend *b, const mm_sampling *sampling, uint32_t count, mm_err *err) {
  if (device.queued + 1 == device.fail_choice) return mm_fail(err, MM_LIMIT, "E_CUDA", mm_at(NULL, NULL), "no room for the choice");
  if (device.queued != device.collected) return mm_fail(err, MM_USAGE, "E_BATCH", mm_at(NULL, NULL), "the step before is not collected");
  device.deferred++;
  sample_rows(b, sampling, count);
  return true;
}

static bool device_collect(mm_backend *b, int32_t *id, mm_err *err) {
  const uint32_t at = (uint32_t)(device.collected++ % MM_QUEUE);
  for (uint32_t i = 0; i < device.count[at]; i++) id[i] = device.queue[at][i];
  if (device.collected != device.fail_at && (device.collected < device.fail_at || device.collected > device.fail_until)) return true;
  device.collected = device.queued;
  for (uint32_t l = 0; l < b->c.model->layers; l++)
    if (b->cache[l].k) memset(b->cache[l].k, 0xff, b->mapped.kv_bytes), memset(b->cache[l].v, 0xff, b->mapped.kv_bytes);
  return mm_fail(err, MM_IO, "E_CUDA", mm_at(NULL, NULL), "the device is on fire");
}

/* Penalties are not among its rules: it needs no ids of before. */
static bool device_ids_load(mm_backend *b, uint32_t slot, const int32_t *id, uint32_t count, mm_err *err) {
  (void)b, (void)slot, (void)id, (void)count, (void)err;
  return true;
}

static void open_device(serving *w, mm_model m, bool pages, bool defers, mm_limits l, mm_scheduler_config c) {
  static mm_ops ops;
  mm_err err = {0};
  memset(&device, 0, sizeof device);
  device.sampler = mm_sampler_open(m.vocab, &err);
  assert_non_null(device.sampler);
  ops = mm_ops_cpu;
  ops.begin = device_begin;
  ops.sampler.sample = device_sample;
  if (defers) ops.sampler.defer = device_defer, ops.sampler.sample_deferred = device_sample_deferred;
  ops.sampler.collect = device_collect;
  ops.sampler.load_ids = device_ids_load;
  ops.sampler.samples = SAMPLES;
  ops.cache.pages = pages;
  serving_open_ops(w, m, 1, &ops, l, c);
}

static void close_device(serving *w) {
  serving_close(w, true);
  mm_sampler_close(device.sampler);
}

TEST(test_random) {
  const mm_scheduler_config c = {.step_tokens = 40, .queue_max = 100, .prefix_cache = true, .cache_bytes = 1 << 16};
  uint64_t deferred = 0;
  for (uint32_t k = 0; k < 2; k++)
    for (uint32_t pages = 0; pages < 3; pages++) {
      serving w;
      open_device(&w, kind(k), pages, k == pages % 2, (mm_limits){.max_tokens = ROWS, .slots = SLOTS, .pages = pages == 2 ? 9 : 0}, c);
      random_requests(&w, SAMPLES, 2);
      close_device(&w);
      print_message("%llu of %llu steps queued ahead\n", (unsigned long long)device.ahead, (unsigned long long)device.queued);
      assert_int_equal(device.queued, device.collected);
      if (k != pages % 2) assert_int_equal(device.deferred, 0);
      deferred += device.deferred;
    }
  assert_true(deferred > 0);
}

/* One reply: every step but the first is queued before its token is known, and one more than it has tokens for is not. */
TEST(test_ahead) {
  serving w;
  open_device(&w, kind(1), true, true, (mm_limits){.max_tokens = ROWS, .slots = SLOTS},
              (mm_scheduler_config){.step_tokens = 40, .queue_max = 1});
  client c = {.r = {.max_tokens = 30}};
  fill(&c, 0, 10);
  client_ready(&w, &c);
  client_submit(&w, &c);
  client_check(&c);
  assert_int_equal(device.queued, 30);
  assert_int_equal(device.ahead, 29);
  c = (client){.r = {.max_tokens = 30}, .masked = true};
  fill(&c, 0, 10);
  client_ready(&w, &c);
  client_submit(&w, &c);
  client_check(&c);
  assert_int_equal(device.queued, 60);
  assert_int_equal(device.ahead, 58);
  assert_int_equal(device.deferred, 30);
  c = (client){.r = {.max_tokens = 30, .sampling.frequency = 1}};
  fill(&c, 0, 10);
  client_ready(&w, &c);
  mm_err err = {0};
  assert_false(mm_scheduler_submit(w.scheduler, &c.r, &c.ticket, &err));
  assert_int_equal(err.status, MM_UNSUPPORTED);
  assert_string_equal(err.code, "E_SAMPLING");
  close_device(&w);
}

/* A reply of one token again and again, by a prompt that no cache has: proposals begin although steps are queued ahead, and go on. */
TEST(test_lookup) {
  serving w;
  open_device(&w, kind(1), true, true, (mm_limits){.max_tokens = ROWS, .slots = 2},
              (mm_scheduler_config){.step_tokens = 64, .queue_max = 1, .drafts = MM_DRAFTS});
  const mm_scheduler_stats t = easy_request(&w);
  assert_true(t.drafted > 10 && t.accepted == t.drafted);
  close_device(&w);
}

/* Steps of 1, 2, 3, 4 and 6 rows are warmed between two requests, each kind of ending twice, and the second one's reply is right; without
 * `warm`, and before the first request, none is. */
TEST(test_warm) {
  for (uint32_t warm = 0; warm < 2; warm++) {
    serving w;
    open_device(&w, kind(1), true, true, (mm_limits){.max_tokens = ROWS, .slots = SLOTS},
                (mm_scheduler_config){.step_tokens = 40, .queue_max = 1, .warm = warm});
    for (uint32_t turn = 0; turn < 2; turn++) {
      usleep(700000);
      for (uint32_t rows = 1; !turn && rows <= SLOTS; rows++) assert_int_equal(device.padding[rows], 0);
      client c = {.r = {.max_tokens = 8}};
      fill(&c, 0, 10);
      client_ready(&w, &c);
      client_submit(&w, &c);
      client_check(&c);
      for (uint32_t i = 0; warm && i < 1000 && device.padding[SLOTS] < 8; i++) usleep(10000);
    }
    for (uint32_t rows = 0; rows <= ROWS; rows++)
      assert_int_equal(device.padding[rows], warm && rows && rows <= SLOTS && rows != 5 ? 8 : 0);
    close_device(&w);
  }
}

/* A device that fails while its steps are warmed forgets what it held: the same prompt again takes nothing of it from the cache. */
TEST(test_warm_failure) {
  serving w;
  open_device(&w, kind(1), true, true, (mm_limits){.max_tokens = ROWS, .slots = SLOTS},
              (mm_scheduler_config){.step_tokens = 40, .queue_max = 1, .prefix_cache = true, .cache_bytes = 1 << 16, .warm = true});
  for (uint32_t turn = 0; turn < 2; turn++) {
    client c = {.r = {.max_tokens = 8}};
    for (uint32_t i = 0; i < 80; i++) c.prompt[i] = (int32_t)(i * i + 3 * i) % 40;
    c.r.prompt_count = 80;
    client_ready(&w, &c);
    client_submit(&w, &c);
    client_check(&c);
    assert_int_equal(c.cached, 0);
    device.fail_at = turn ? 0 : device.collected + 1;
    for (uint32_t i = 0; !turn && i < 1000 && device.collected < device.fail_at; i++) usleep(10000);
    usleep(10000);
  }
  assert_true(device.padding[1] > 0 && !device.padding[2]);
  close_device(&w);
}

/* A device that fails, and forgets what it held: what it was given ends with its error, and those that wait go on, with nothing of before
 * from the cache. */
TEST(test_failure) {
  for (uint32_t at = 1; at < 25; at++) {
    serving w;
    open_device(&w, kind(at % 2), true, at % 3 > 0, (mm_limits){.max_tokens = ROWS, .slots = 1 + at % 3},
                (mm_scheduler_config){.step_tokens = 7, .queue_max = 9, .prefix_cache = true, .cache_bytes = 1 << 16});
    if (at % 3 == 2)
      device.fail_choice = at;
    else
      device.fail_at = at;
    client c[4];
    for (uint32_t i = 0; i < 4; i++) {
      c[i] = (client){.r = {.max_tokens = 6}, .masked = at % 3 > 0 && i % 2 == 0};
      fill(&c[i], 0, 30 + i);
      client_ready(&w, &c[i]);
    }
    for (uint32_t i = 0; i < 4; i++) client_submit(&w, &c[i]);
    uint32_t failed = 0;
    for (uint32_t i = 0; i < 4; i++) {
      client_wait(&c[i]);
      failed += c[i].finish == MM_FINISH_ERROR;
      if (c[i].finish == MM_FINISH_ERROR)
        assert_string_equal(c[i].err.code, "E_CUDA");
      else
        client_verdict(&c[i]);
    }
    assert_true(failed <= 1 + at % 3 && (failed > 0 || device.queued < at + 9));
    close_device(&w);
  }
}

/* Fails the steps of so many collects from now on, of which the first is a request's; a second request comes while they fail. */
static void open_failing(serving *w, client *first, client *second, double lost_after, uint64_t steps) {
  open_device(
      w, kind(1), true, false, (mm_limits){.max_tokens = ROWS, .slots = 2},
      (mm_scheduler_config){.step_tokens = 40, .queue_max = 9, .prefix_cache = true, .cache_bytes = 1 << 16, .lost_after = lost_after});
  *first = *second = (client){.r = {.max_tokens = 6}};
  fill(first, 0, 30);
  fill(second, 1, 40);
  client_ready(w, first);
  client_ready(w, second);
  device.fail_until = steps;
  device.fail_at = 1;
  client_submit(w, first);
  client_wait(first);
  assert_int_equal(first->finish, MM_FINISH_ERROR);
}

/* Steps are tried while nothing runs, and a request that comes meanwhile waits until one succeeds. */
TEST(test_failing_for_a_while) {
  serving w;
  client c, next;
  mm_err error = {0};
  open_failing(&w, &c, &next, 60, 3);
  client_submit(&w, &next);
  client_check(&next);
  assert_false(mm_scheduler_lost(w.scheduler, &error));
  assert_true(device.collected > 3);
  close_device(&w);
}

/* Where none succeeds the engine is lost: without a request too, and one that waits or comes later ends with the error. One that is
 * cancelled while the engine fails ends so. */
TEST(test_lost) {
  serving w;
  client c, gone, next;
  mm_err error = {0};
  open_failing(&w, &c, &gone, 1, UINT64_MAX);
  client_submit(&w, &gone);
  mm_scheduler_cancel(w.scheduler, gone.ticket);
  client_wait(&gone);
  assert_int_equal(gone.finish, MM_FINISH_CANCELLED);
  assert_false(mm_scheduler_lost(w.scheduler, &error));
  for (uint32_t i = 0; i < 1000 && !mm_scheduler_lost(w.scheduler, &error); i++) usleep(10000);
  assert_true(mm_scheduler_lost(w.scheduler, &error));
  assert_string_equal(error.code, "E_CUDA");
  next = (client){.r = {.max_tokens = 6}};
  fill(&next, 0, 30);
  client_ready(&w, &next);
  client_submit(&w, &next);
  client_wait(&next);
  assert_int_equal(next.finish, MM_FINISH_ERROR);
  assert_string_equal(next.err.code, "E_CUDA");
  close_device(&w);
}

/* A step that was queued before the one that failed may come back well, and says nothing about the engine. */
TEST(test_lost_ahead) {
  serving w;
  client c = {.r = {.max_tokens = 20}};
  mm_err error = {0};
  open_device(&w, kind(0), true, false, (mm_limits){.max_tokens = ROWS, .slots = 2},
              (mm_scheduler_config){.step_tokens = 40, .queue_max = 9, .lost_after = 0.2});
  device.refuse_at = 6;
  fill(&c, 0, 30);
  client_ready(&w, &c);
  client_submit(&w, &c);
  client_wait(&c);
  assert_int_equal(c.finish, MM_FINISH_ERROR);
  assert_true(device.ahead > 0);
  for (uint32_t i = 0; i < 1000 && !mm_scheduler_lost(w.scheduler, &error); i++) usleep(10000);
  assert_true(mm_scheduler_lost(w.scheduler, &error));
  assert_string_equal(error.code, "E_HELD");
  close_device(&w);
}

/* ---- masks that take long ---- */

static _Atomic uint32_t masks_now, masks_most, masks_made;

static const uint32_t *slow_allow(void *user) {
  const struct timespec t = {0, 4000000};
  const uint32_t now = ++masks_now;
  for (uint32_t most = masks_most; now > most && !atomic_compare_exchange_weak(&masks_most, &most, now);) {}
  masks_made++;
  nanosleep(&t, NULL);
  masks_now--;
  return client_allow(user);
}

/* The masks of a step are made by several threads, each once, whether the step is sampled behind its pass or in one with it. */
TEST(test_masks_at_once) {
  for (uint32_t k = 0; k < 2; k++) {
    serving w;
    client c[SLOTS];
    open_device(&w, kind(k), true, k, (mm_limits){.max_tokens = ROWS, .slots = SLOTS},
                (mm_scheduler_config){.step_tokens = ROWS, .queue_max = 9});
    masks_most = masks_made = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
      c[i] = (client){.r = {.max_tokens = 10}, .masked = i != 2};
      fill(&c[i], i, 5);
      client_ready(&w, &c[i]);
      if (c[i].masked) c[i].r.allow = slow_allow;
    }
    clients_submit_held(&w, c, SLOTS);
    atomic_store(&serving_closed, false);
    for (uint32_t i = 0; i < SLOTS; i++) client_check(&c[i]);
    assert_int_equal(masks_made, (SLOTS - 1) * 10);
    assert_int_equal(masks_most > 1, mm_pool_cpus() > 1);
    close_device(&w);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
