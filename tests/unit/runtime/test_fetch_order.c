/* The queue of prompts that another server is to compute (runtime/schedule/transfer_fetch.c), which its connections take from. */
#include "runtime/schedule/transfer_inside.h"
#include "tests/unit/unit.h"

static uint64_t seed = 1;
static uint32_t below(uint32_t n) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((seed >> 33) % n);
}

/* The highest priority first, and of equal ones the first that came, also when others come in between. */
TEST(test_order_of_fetches) {
  enum { FETCHES = 40 };
  static const int64_t priority[] = {0, 2, INT32_MIN, 2, INT32_MAX, -1, 0};
  static mm_fetch fetch[FETCHES];
  mm_receiver r = {.held = 0};
  uint32_t come = 0, taken = 0;
  assert_null(mm_fetch_next(&r));
  while (taken < FETCHES) {
    if (come < FETCHES && (come == taken || below(3))) {
      mm_fetch **at = &r.first;
      while (*at) at = &(*at)->next;
      fetch[come] = (mm_fetch){.request = {.priority = priority[come % 7]}};
      *at = &fetch[come++];
      continue;
    }
    uint32_t want = FETCHES; /* of a sort of all that wait, by priority and then by when they came */
    for (uint32_t i = come; i-- > 0;)
      if (!fetch[i].begun && (want == FETCHES || fetch[i].request.priority >= fetch[want].request.priority)) want = i;
    mm_fetch *f = mm_fetch_next(&r);
    assert_ptr_equal(f, &fetch[want]);
    f->begun = true;
    taken++;
  }
  assert_null(mm_fetch_next(&r));
}

int main(void) { return run_unit_tests(NULL, NULL); }
