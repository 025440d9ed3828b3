/* Ranks in shared memory: sums in rank order, stages that hand rows on, and a break that nobody waits behind. */
#include <pthread.h>
#include <string.h>

#include "runtime/engine/comm.h"
#include "tests/unit/unit.h"

typedef struct member {
  mm_comm *comm;
  uint32_t rank;
  float x[101];
} member;

static void *sum_member(void *arg) {
  member *m = arg;
  for (size_t n = 0; n <= 101; n += 101) mm_comm_all_reduce_sum(m->comm, m->rank, m->x, n);
  return NULL;
}

/* In rank order: 1e8 + 1 - 1e8 + 1 is 1 and nothing else, on every rank. */
TEST(sums) {
  static const float part[] = {1e8f, 1, -1e8f, 1};
  member m[4];
  pthread_t thread[4];
  mm_err err = {0};
  mm_comm *comm = mm_comm_open(4, &err);
  for (uint32_t r = 0; r < 4; r++) {
    m[r] = (member){.comm = comm, .rank = r};
    for (int i = 0; i < 101; i++) m[r].x[i] = part[r] * (float)(i + 1);
    pthread_create(&thread[r], NULL, sum_member, &m[r]);
  }
  for (uint32_t r = 0; r < 4; r++) pthread_join(thread[r], NULL);
  for (int i = 0; i < 101; i++) {
    float k = (float)(i + 1), expected = ((part[0] * k + part[1] * k) + part[2] * k) + part[3] * k;
    for (uint32_t r = 0; r < 4; r++) assert_memory_equal(&m[r].x[i], &expected, sizeof expected);
  }
  mm_comm_close(comm);
}

/* ---- gathering ---- */

#define GATHERED 300

typedef struct gatherer {
  mm_comm *comm;
  uint32_t rank;
  uint32_t given[GATHERED], wrong;
} gatherer;

/* Everybody sees what everybody brought, and nobody what comes next. */
static void *gather_all(void *arg) {
  gatherer *g = arg;
  for (uint32_t i = 0; i < GATHERED; i++) {
    const void *all[4];
    g->given[i] = g->rank * 1000 + i;
    if (!mm_comm_gather(g->comm, g->rank, &g->given[i], all)) g->wrong++;
    for (uint32_t r = 0; r < 4; r++) g->wrong += *(const uint32_t *)all[r] != r * 1000 + i;
  }
  return NULL;
}

/* Ranks 0, step, 2 step, … below n in threads of their own. */
static void start(mm_comm *comm, gatherer *g, pthread_t *thread, uint32_t n, uint32_t step, void *(*of)(void *)) {
  for (uint32_t r = 0; r < n; r += step) {
    g[r] = (gatherer){.comm = comm, .rank = r};
    pthread_create(&thread[r], NULL, of, &g[r]);
  }
}

/* Waits for them; none has seen anything wrong. */
static void join(gatherer *g, pthread_t *thread, uint32_t n, uint32_t step) {
  for (uint32_t r = 0; r < n; r += step) {
    pthread_join(thread[r], NULL);
    assert_int_equal(g[r].wrong, 0);
  }
}

TEST(gathers) {
  gatherer g[4];
  pthread_t thread[4];
  mm_err err = {0};
  mm_comm *comm = mm_comm_open(4, &err);
  start(comm, g, thread, 4, 1, gather_all);
  join(g, thread, 4, 1);
  mm_comm_close(comm);
}

static void *gather_alone(void *arg) {
  gatherer *g = arg;
  const void *all[4];
  g->wrong = mm_comm_gather(g->comm, g->rank, NULL, all);
  return NULL;
}

/* Three of four wait; the fourth fails: they return, and the word that devices look at is set. */
TEST(a_break_is_seen) {
  gatherer g[3];
  pthread_t thread[3];
  mm_err err = {0};
  volatile uint32_t word = 0;
  mm_comm *comm = mm_comm_open(4, &err);
  mm_comm_watch(comm, &word);
  start(comm, g, thread, 3, 1, gather_alone);
  mm_comm_abort(comm);
  join(g, thread, 3, 1);
  assert_int_equal(word, 1);
  word = 0;
  mm_comm_watch(comm, NULL);
  mm_comm_abort(comm);
  assert_int_equal(word, 0);
  mm_comm_close(comm);
}

/* Parts of a group count their ranks from 0 and wait for their own alone; who aborts one aborts them all. */
TEST(parts) {
  gatherer g[3];
  pthread_t thread[3];
  mm_err err = {0};
  mm_comm *comm = mm_comm_open(6, &err);
  assert_ptr_equal(mm_comm_part(comm, 0), comm);
  assert_true(mm_comm_split(comm, 3, &err));
  for (uint32_t i = 0; i < 3; i++) { /* one rank of each part waits, for the other, which fails in the first */
    g[i] = (gatherer){.comm = mm_comm_part(comm, i), .rank = i % 2};
    pthread_create(&thread[i], NULL, gather_alone, &g[i]);
  }
  mm_comm_abort(mm_comm_part(comm, 0));
  join(g, thread, 3, 1);
  assert_true(mm_comm_aborted(comm) && mm_comm_aborted(mm_comm_part(comm, 2)));
  mm_comm_reset(comm);
  assert_false(mm_comm_aborted(comm) || mm_comm_aborted(mm_comm_part(comm, 1)));
  mm_comm_close(comm);
}

/* The failure word that devices write counts from the next task on, for all ranks alike, until it is reset; the waiting rank and the
 * awaited one stay known, and no later failure takes their place. */
TEST(a_word_is_heard) {
  mm_err err = {0};
  volatile uint32_t word = MM_COMM_GOES_ON;
  mm_comm *comm = mm_comm_open(4, &err);
  mm_comm_watch(comm, &word);
  mm_comm_set_timeout(comm, 4);
  word = MM_COMM_TIMED_OUT | 2 << 8 | 3 << 16;
  assert_false(mm_comm_failed(comm));
  assert_true(mm_comm_failed_now(comm));
  mm_comm_reset(comm);
  mm_comm_abort(comm);
  assert_int_equal(word, MM_COMM_TIMED_OUT | 2 << 8 | 3 << 16);
  word = MM_COMM_GOES_ON;
  mm_comm_reset(comm);
  assert_true(mm_comm_failed(comm) && mm_comm_failed_now(comm));
  assert_false(mm_comm_root_cause(comm, &err));
  assert_string_equal(err.code, "E_RANK");
  assert_non_null(strstr(err.text, "rank 2 waited 4.0 s for rank 3: timeout"));
  mm_comm_recover(comm);
  mm_comm_reset(comm);
  assert_false(mm_comm_failed(comm) || mm_comm_failed_now(comm));
  mm_comm_abort(comm);
  assert_int_equal(word, MM_COMM_ABORTED);
  err = (mm_err){0};
  assert_false(mm_comm_root_cause(comm, &err));
  assert_null(strstr(err.text, "waited"));
  mm_comm_watch(comm, NULL);
  mm_comm_close(comm);
}

static void *gather_patiently(void *arg) {
  gatherer *g = arg;
  const void *all[4];
  uint32_t awaited = 9;
  g->wrong = mm_comm_gather(g->comm, g->rank, NULL, all);
  g->given[0] = mm_comm_timed_out(g->comm, g->rank, &awaited);
  g->given[1] = awaited;
  return NULL;
}

/* Two of four wait for the others no longer than their timeout: one names the awaited rank, both return. After a reset all is as it was. */
TEST(timeout) {
  gatherer g[4];
  pthread_t thread[4];
  mm_err err = {0};
  mm_comm *comm = mm_comm_open(4, &err);
  for (int round = 0; round < 2; round++) {
    mm_comm_set_timeout(comm, 0.05);
    const double from = mm_now();
    start(comm, g, thread, 4, 3, gather_patiently);
    join(g, thread, 4, 3);
    assert_true(mm_now() - from >= 0.05);
    assert_int_equal(g[0].given[0] + g[3].given[0], 1);
    for (uint32_t r = 0; r < 4; r += 3)
      if (g[r].given[0]) assert_int_equal(g[r].given[1], 1);
    mm_comm_reset(comm);
    mm_comm_set_timeout(comm, 60);
    start(comm, g, thread, 4, 1, gather_all);
    join(g, thread, 4, 1);
  }
  mm_comm_close(comm);
}

static void *gather_and_say(void *arg) {
  gatherer *g = arg;
  const void *all[4];
  for (uint32_t i = 0; i < 5000; i++) {
    mm_comm_set_timeout(g->comm, 60 + i % 2);
    if (!mm_comm_gather(g->comm, g->rank, g, all)) return NULL;
  }
  return g->given[0] = 1, NULL;
}

/* Each says how long it waits from then on, while others gather; the thread sanitizer looks on. */
TEST(timeout_of_several) {
  gatherer g[4];
  pthread_t thread[4];
  mm_err err = {0};
  mm_comm *comm = mm_comm_open(4, &err);
  start(comm, g, thread, 4, 1, gather_and_say);
  join(g, thread, 4, 1);
  for (uint32_t r = 0; r < 4; r++) assert_int_equal(g[r].given[0], 1);
  mm_comm_close(comm);
}

/* ---- stages ---- */

#define STAGES 3
#define HANDED 200

typedef struct stage {
  mm_comm *comm;
  uint32_t at, rank;
  float x[7];
  uint32_t wrong;
} stage;

/* The first makes rows, each adds 1, the last looks at them: one after the other, however the threads run. */
static void *hand_on(void *arg) {
  stage *s = arg;
  for (uint32_t n = 0; n < HANDED; n++) {
    for (int i = 0; s->at == 0 && i < 7; i++) s->x[i] = (float)(n * 10 + s->rank);
    if (s->at > 0) mm_comm_receive(s->comm, s->rank, s->x, 7);
    for (int i = 0; i < 7; i++) s->wrong += s->x[i] != (float)(n * 10 + s->rank + s->at), s->x[i]++;
    if (s->at + 1 < STAGES) mm_comm_send(s->comm, s->rank, s->x, 7);
  }
  return NULL;
}

static void run_stages(mm_comm **comm, stage s[STAGES][2], void *(*of)(void *)) {
  pthread_t thread[STAGES][2];
  mm_err err = {0};
  for (uint32_t i = 0; i < STAGES; i++) {
    assert_non_null(comm[i] = mm_comm_open(2, &err));
    if (i) mm_comm_link(comm[i - 1], comm[i]);
  }
  for (uint32_t i = 0; i < STAGES; i++)
    for (uint32_t r = 0; r < 2; r++) {
      s[i][r] = (stage){.comm = comm[i], .at = i, .rank = r};
      pthread_create(&thread[i][r], NULL, of, &s[i][r]);
    }
  for (uint32_t i = 0; i < STAGES; i++)
    for (uint32_t r = 0; r < 2; r++) pthread_join(thread[i][r], NULL);
}

TEST(handed_on) {
  mm_comm *comm[STAGES];
  stage s[STAGES][2];
  run_stages(comm, s, hand_on);
  for (uint32_t i = 0; i < STAGES; i++)
    for (uint32_t r = 0; r < 2; r++) assert_int_equal(s[i][r].wrong, 0);
  for (uint32_t i = 0; i < STAGES; i++) mm_comm_close(comm[i]);
}

/* Rank 0 of the middle stage fails: the ranks before, behind and next to it come back. */
static void *fail_in_the_middle(void *arg) {
  stage *s = arg;
  if (s->at == 1 && s->rank == 0) {
    mm_comm_abort(s->comm);
    return NULL;
  }
  if (s->at == 1) mm_comm_all_reduce_sum(s->comm, s->rank, s->x, 7);
  if (s->at == 0) mm_comm_send(s->comm, s->rank, s->x, 7);
  if (s->at == 2) mm_comm_receive(s->comm, s->rank, s->x, 7);
  return NULL;
}

TEST(broken) {
  for (int round = 0; round < 50; round++) {
    mm_comm *comm[STAGES];
    stage s[STAGES][2];
    run_stages(comm, s, fail_in_the_middle);
    for (uint32_t i = 0; i < STAGES; i++) mm_comm_close(comm[i]);
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
