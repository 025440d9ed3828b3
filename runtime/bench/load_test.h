/* minimax-bench serve URL: the load test of any server with OpenAI's API. */
#ifndef MM_RUNTIME_BENCH_LOAD_TEST_H
#define MM_RUNTIME_BENCH_LOAD_TEST_H

#include "formats/option_table.h"

/* Its options, for completions of minimax-bench. */
extern const mm_program mm_load_test_program;
/* The whole of a main, with the arguments behind "minimax-bench"; argv[0] is "serve". */
int mm_load_test_main(int argc, char **argv);

#endif
