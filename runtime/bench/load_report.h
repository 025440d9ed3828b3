/* The figures of a load test, as other benchmarks of servers define and name them. */
#ifndef MM_RUNTIME_BENCH_LOAD_REPORT_H
#define MM_RUNTIME_BENCH_LOAD_REPORT_H

#include <stdio.h>

#include "runtime/bench/load_client.h"

/* Seconds that a request may take to count as good; 0: any. */
typedef struct mm_load_goal {
  double ttft, tpot, e2el;
} mm_load_goal;

typedef struct mm_load_run_facts {
  const char *model, *url, *endpoint;
  double rate; /* requests a second, 0: all at once */
  uint32_t concurrency;
  double seconds; /* of the whole */
  mm_load_goal goal;
} mm_load_run_facts;

/* ttft: from sending to the first text. tpot: the time after that over the output's other tokens, of outputs of two tokens and more. itl:
 * between two pieces of a stream. e2el: from sending to the last text. Percentiles are interpolated linearly. Failed requests count only as
 * failed. As text, or as JSON with the fields of vllm bench serve. */
MM_MUST_USE bool mm_load_report(FILE *f, const mm_load_run_facts *x, const mm_load_request *r, size_t count, bool json, mm_err *err);

#endif
