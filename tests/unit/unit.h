/* cmocka, and tests that are registered where they are written: TEST(name) { ... }, and at the end of the file
 *   int main(void) { return run_unit_tests(NULL, NULL); }
 * They run in the order of their lines. */
#ifndef MM_TESTS_UNIT_H
#define MM_TESTS_UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* A random round takes several times as long with sanitizers; a program without them does them all. */
#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__ || __has_feature(address_sanitizer)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif
#define ROUNDS(n) (SANITIZED ? ((n) + 9) / 10 : (n))

static struct CMUnitTest unit_tests[128]; /* more than 600 lines hold; cmocka passes over the empty ones */
static size_t unit_test_count;

/* before and after, or NULL, are called around the test. */
#define TEST_BETWEEN(name, before, after)                                                  \
  static void name(void **unit_state);                                                     \
  __attribute__((constructor(1000 + __LINE__))) static void name##_is_a_test(void) {       \
    unit_tests[unit_test_count++] = (struct CMUnitTest){#name, name, before, after, NULL}; \
  }                                                                                        \
  static void name(__attribute__((unused)) void **unit_state)
#define TEST(name) TEST_BETWEEN(name, NULL, NULL)

/* before and after, or NULL, are called around all tests. A program without tests fails. */
static inline int run_unit_tests(CMFixtureFunction before, CMFixtureFunction after) {
  return unit_test_count ? cmocka_run_group_tests(unit_tests, before, after) : 1;
}

#endif
