/* formats/pool: every item once, in order of number, the lowest failing item's error, and fewer threads than asked. */
#include "formats/system/pool.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/unit/unit.h"

/* The sanitizer's pthread_create, where one is linked in: newer ones end a program that joins a thread which they did not see. */
int __interceptor_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) __attribute__((weak));

/* Stands before the library's: fails with EAGAIN once `threads_left` have been made. */
static int threads_left = -1; /* -1: no limit */
static unsigned threads_made;
int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *arg) {
  int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = __interceptor_pthread_create;
  if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
  if (threads_left == 0) return EAGAIN;
  if (threads_left > 0) threads_left--;
  threads_made++;
  return real(t, a, f, arg);
}

enum { ITEMS = 2000 };

typedef struct tally {
  atomic_uint done[ITEMS];
  atomic_uint worker_busy[64];
  unsigned workers;
  atomic_bool wrong;
} tally;

static bool count_item(void *ctx, size_t item, unsigned worker, mm_err *err) {
  tally *t = ctx;
  (void)err;
  if (item >= ITEMS || worker >= t->workers) {
    t->wrong = true;
    return true;
  }
  if (atomic_fetch_add(&t->worker_busy[worker], 1) != 0) t->wrong = true; /* a worker's scratch is its own */
  atomic_fetch_add(&t->done[item], 1);
  if (item % 64 == 0) sched_yield();
  atomic_fetch_sub(&t->worker_busy[worker], 1);
  return true;
}

TEST(test_every_item_once) {
  static const unsigned threads[] = {1, 2, 7, 64};
  for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
    static tally t;
    memset(&t, 0, sizeof t);
    t.workers = threads[i];
    mm_err err = {0};
    threads_made = 0;
    assert_true(mm_pool_run(threads[i], ITEMS, count_item, &t, &err));
    assert_int_equal(threads_made, threads[i] - 1); /* the caller works too */
    assert_false(t.wrong);
    for (size_t j = 0; j < ITEMS; j++) assert_int_equal(t.done[j], 1);
  }
}

TEST(test_few_items) {
  static tally t;
  memset(&t, 0, sizeof t);
  t.workers = 3;
  mm_err err = {0};
  threads_made = 0;
  assert_true(mm_pool_run(50, 3, count_item, &t, &err));
  assert_int_equal(threads_made, 2);
  assert_true(t.done[0] == 1 && t.done[1] == 1 && t.done[2] == 1 && t.done[3] == 0);
  threads_made = 0;
  assert_true(mm_pool_run(50, 0, count_item, &t, &err));
  assert_int_equal(threads_made, 0);
  assert_int_equal(t.done[0], 1);
}

/* Items 0 and 1 wait for each other: only real parallelism lets both finish. */
static bool meet(void *ctx, size_t item, unsigned worker, mm_err *err) {
  atomic_uint *arrived = ctx;
  (void)worker;
  atomic_fetch_add(arrived, 1);
  for (int i = 0; i < 5000 && atomic_load(arrived) < 2; i++) nanosleep(&(struct timespec){0, 1000000}, NULL);
  return atomic_load(arrived) == 2 || mm_fail(err, MM_BUG, "E_ALONE", mm_at(NULL, NULL), "item %zu waited alone", item);
}

TEST(test_parallel) {
  atomic_uint arrived = 0;
  mm_err err = {0};
  assert_true(mm_pool_run(2, 2, meet, &arrived, &err));
}

/* Items 11, 37 and 90 fail, 11 long after the others. */
static bool fail_some(void *ctx, size_t item, unsigned worker, mm_err *err) {
  tally *t = ctx;
  (void)worker;
  atomic_fetch_add(&t->done[item], 1);
  if (item == 11) nanosleep(&(struct timespec){0, 2000000}, NULL);
  if (item != 11 && item != 37 && item != 90) return true;
  return mm_fail(err, MM_IO, "E_ITEM", mm_at(NULL, NULL), "item %zu", item);
}

TEST(test_lowest_failure_is_reported) {
  static const unsigned threads[] = {1, 2, 8, 40};
  for (int round = 0; round < 40; round++) {
    static tally t;
    memset(&t, 0, sizeof t);
    mm_err err = {0};
    assert_false(mm_pool_run(threads[round % 4], ITEMS, fail_some, &t, &err));
    assert_int_equal(err.status, MM_IO);
    assert_string_equal(err.text, "E_ITEM: item 11");
    size_t done = 0;
    for (size_t i = 0; i < ITEMS; i++) {
      assert_true(t.done[i] <= 1);
      assert_true(i > 11 || t.done[i] == 1); /* nothing below the failure is left out */
      done += t.done[i];
    }
    if (threads[round % 4] == 1) assert_int_equal(done, 12); /* nothing is begun after it */
  }
  static tally t;
  mm_err earlier = {0};
  mm_fail(&earlier, MM_USAGE, "E_EARLIER", mm_at(NULL, NULL), "before");
  assert_false(mm_pool_run(2, 100, fail_some, &t, &earlier));
  assert_string_equal(earlier.code, "E_EARLIER");
  assert_false(mm_pool_run(2, 100, fail_some, &t, MM_IGNORED));
}

TEST(test_fewer_threads_than_wanted) {
  for (int limit = 0; limit < 3; limit++) {
    static tally t;
    memset(&t, 0, sizeof t);
    t.workers = (unsigned)limit + 1;
    mm_err err = {0};
    threads_left = limit;
    bool ok = mm_pool_run(8, ITEMS, count_item, &t, &err);
    threads_left = -1;
    assert_true(ok);
    assert_false(t.wrong);
    for (size_t j = 0; j < ITEMS; j++) assert_int_equal(t.done[j], 1);
  }
}

TEST(test_cpus) {
  cpu_set_t before, one;
  unsigned all = mm_pool_cpus();
  assert_true(all >= 1);
  assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  for (size_t i = 0; i < CPU_SETSIZE; i++) {
    if (CPU_ISSET(i, &before)) {
      CPU_SET(i, &one);
      break;
    }
  }
  assert_int_equal(all, CPU_COUNT(&before));
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
  unsigned alone = mm_pool_cpus();
  sched_setaffinity(0, sizeof before, &before);
  assert_int_equal(alone, 1);
}

typedef struct where {
  cpu_set_t cpus[8];
  atomic_uint arrived;
} where;
/* Each worker has one item: none ends before all were begun. */
static bool note_cpus(void *ctx, size_t item, unsigned worker, mm_err *err) {
  where *w = ctx;
  (void)item, (void)err;
  atomic_fetch_add(&w->arrived, 1);
  for (const double begin = mm_now(); atomic_load(&w->arrived) < 2 && mm_now() - begin < 10;) sched_yield();
  return sched_getaffinity(0, sizeof w->cpus[worker], &w->cpus[worker]) == 0;
}
static size_t cpu_of(const cpu_set_t *set, unsigned n) {
  for (size_t i = 0; i < CPU_SETSIZE; i++)
    if (CPU_ISSET(i, set) && n-- == 0) return i;
  return CPU_SETSIZE;
}

/* Every thread on one CPU, from the one that was asked for on; more threads than CPUs are refused and stay where they were. */
TEST(test_pin) {
  cpu_set_t before, after;
  mm_err err = {0};
  const unsigned cpus = mm_pool_cpus();
  assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
  mm_team *two = mm_team_open(2, &err), *last = mm_team_open(1, &err);
  assert_true(two && last);
  assert_false(mm_team_pin(two, cpus - 1, &err));
  char text[128];
  snprintf(text, sizeof text, "E_LIMITS: found 2 threads to pin after %u others, %u CPUs to run on", cpus - 1, cpus);
  assert_string_equal(err.text, text);
  assert_int_equal(err.status, MM_USAGE);
  assert_true(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&before, &after));
  err = (mm_err){0};
  if (cpus > 1) {
    where w = {0};
    assert_true(mm_team_pin(two, cpus - 2, &err));
    assert_true(mm_team_run(two, 2, note_cpus, &w, &err));
    for (unsigned i = 0; i < 2; i++) {
      assert_int_equal(CPU_COUNT(&w.cpus[i]), 1);
      assert_int_equal(cpu_of(&w.cpus[i], 0), cpu_of(&before, cpus - 2 + i));
    }
    sched_setaffinity(0, sizeof before, &before);
  }
  where w = {.arrived = 1};
  assert_true(mm_team_pin(last, cpus - 1, &err));
  assert_true(mm_team_run(last, 1, note_cpus, &w, &err));
  assert_true(CPU_COUNT(&w.cpus[0]) == 1 && cpu_of(&w.cpus[0], 0) == cpu_of(&before, cpus - 1));
  sched_setaffinity(0, sizeof before, &before);
  mm_team_close(two);
  mm_team_close(last);
}

typedef struct looks {
  atomic_uint count, last;
  atomic_bool wrong;
} looks;

static void count_look(void *ctx, unsigned n) {
  looks *l = ctx;
  l->last = n;
  l->wrong = l->wrong || (n && n != ++l->count);
}

/* Numbered from 1, no sooner than asked; 0 at the end alone, and at once; none after it. */
TEST(test_ticker) {
  looks l = {0}, late = {0};
  const double start = mm_now();
  mm_ticker *t = mm_ticker_open(20, count_look, &l), *slow = mm_ticker_open(60000, count_look, &late);
  assert_true(t && slow);
  while (l.count < 3 && mm_now() - start < 30) sched_yield();
  assert_true(mm_now() - start >= 0.06);
  assert_int_equal(l.last, l.count);
  mm_ticker_close(t);
  mm_ticker_close(slow);
  mm_ticker_close(NULL);
  assert_true(mm_now() - start < 50);
  assert_true(l.count >= 3 && l.last == 0 && !l.wrong && late.count == 0 && late.last == 0);
  threads_left = 0;
  assert_null(mm_ticker_open(20, count_look, &l));
  threads_left = -1;
}

typedef struct pastime {
  atomic_uint times;
  unsigned most;
} pastime;
static bool pass_time(void *ctx) {
  pastime *p = ctx;
  return atomic_fetch_add(&p->times, 1) < p->most;
}
/* The last item ends when a thread that has none was seen to do something else. */
static bool wait_for_pastime(void *ctx, size_t item, unsigned worker, mm_err *err) {
  pastime *p = ctx;
  const double begin = mm_now();
  (void)worker;
  while (item == 0 && atomic_load(&p->times) == 0) {
    if (mm_now() - begin > 10) return mm_fail(err, MM_BUG, "E_ALONE", mm_at(NULL, NULL), "nothing was done meanwhile");
  }
  return true;
}

/* Threads that wait do what they were given, with as many threads as CPUs; with more they sleep. */
TEST(test_meanwhile) {
  mm_err err = {0};
  pastime p = {.most = 5}, none = {.most = 5};
  const unsigned cpus = mm_pool_cpus();
  mm_team *t = mm_team_open(cpus, &err), *many = mm_team_open(cpus + 1, &err);
  assert_true(t && many);
  mm_team_meanwhile(t, pass_time, &p);
  mm_team_meanwhile(many, pass_time, &none);
  if (cpus > 1) assert_true(mm_team_run(t, 2, wait_for_pastime, &p, &err));
  static tally items;
  items.workers = cpus + 1;
  assert_true(mm_team_run(many, ITEMS, count_item, &items, &err));
  mm_team_close(t);
  mm_team_close(many);
  assert_int_equal(none.times, 0);
  for (size_t j = 0; j < ITEMS; j++) assert_int_equal(items.done[j], 1);
}

int main(void) { return run_unit_tests(NULL, NULL); }
