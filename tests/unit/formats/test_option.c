/* Command lines: what is accepted, what is refused, and that help, man page and completions show every option of the table. */
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "formats/commands.h"
#include "formats/option.h"
#include "tests/unit/unit.h"

static struct {
  bool quiet, verbose;
  const char *output, *quant;
  mm_option_list ignore;
  uint64_t tp, port, part_size;
  double temperature;
} got;

static const mm_option options[] = {
    {.name = "output", .letter = 'o', .kind = MM_OPT_STR, .target = &got.output, .arg = "DIR", .help = "where the result goes"},
    {.name = "quant", .kind = MM_OPT_STR, .target = &got.quant, .arg = "SCHEME", .help = "weight scheme", .choices = "none|bf16|block_fp8"},
    {.name = "ignore", .kind = MM_OPT_LIST, .target = &got.ignore, .arg = "PATTERN", .help = "leave tensors of this name as they are"},
    {.name = "tp",
     .alias = "tensor-parallel-size",
     .kind = MM_OPT_U64,
     .target = &got.tp,
     .arg = "N",
     .help = "ranks; one thread's share isn't [more] than 100% of a rank: never",
     .lo = 1,
     .hi = 1024},
    {.name = "port", .kind = MM_OPT_U64, .target = &got.port, .arg = "N", .help = "without an upper limit", .lo = 5},
    {.name = "part-size", .kind = MM_OPT_SIZE, .target = &got.part_size, .arg = "BYTES_EACH", .help = "largest part file"},
    {.name = "temperature", .letter = 't', .kind = MM_OPT_REAL, .target = &got.temperature, .arg = "X", .help = "0 is greedy"},
    {.name = "quiet", .letter = 'q', .kind = MM_OPT_FLAG, .target = &got.quiet, .help = ".starts with a dot, as roff requests do"},
    {.name = "verbose",
     .letter = 'v',
     .kind = MM_OPT_FLAG,
     .target = &got.verbose,
     .help = "says more, and at such length that the line ends with column 96 or wraps \\ here, while the next one is longer than that by "
             "a letter: x and so it goes below"},
};
#define OPTIONS (sizeof options / sizeof *options)

static const mm_program program = {.name = "minimax-sample",
                                   .summary = "a table for tests",
                                   .operands = "SRC [MORE]",
                                   .min_operands = 1,
                                   .max_operands = 2,
                                   .options = options,
                                   .option_count = OPTIONS,
                                   .epilog = "Exit status: 0 done.\n.not a request\n'nor this",
                                   .examples = "minimax-sample A\nminimax-sample B --tp 2"};

/* Splits `line` at spaces ("_" stands for an empty argument) and parses it. */
static bool parse(const char *line, const char **operands, size_t *count, bool *done, mm_err *err) {
  static char buf[512];
  char *argv[32] = {"minimax-sample"};
  int argc = 1;
  snprintf(buf, sizeof buf, "%s", line);
  for (char *word = strtok(buf, " "); word; word = strtok(NULL, " ")) argv[argc++] = strcmp(word, "_") == 0 ? "" : word;
  free(got.ignore.item);
  memset(&got, 0, sizeof got);
  *err = (mm_err){0};
  return mm_options_parse(&program, argc, argv, operands, count, done, err);
}

TEST(test_accepted) {
  const char *operand[2];
  size_t count;
  bool done;
  mm_err err;
  assert_true(parse("src -o out --tp 8 --quant=block_fp8 --ignore a --ignore=b -qv --temperature -0.5 more", operand, &count, &done, &err));
  assert_false(done);
  assert_int_equal(count, 2);
  assert_string_equal(operand[0], "src");
  assert_string_equal(operand[1], "more");
  assert_string_equal(got.output, "out");
  assert_string_equal(got.quant, "block_fp8");
  assert_int_equal(got.tp, 8);
  assert_int_equal(got.ignore.count, 2);
  assert_string_equal(got.ignore.item[0], "a");
  assert_string_equal(got.ignore.item[1], "b");
  assert_true(got.quiet && got.verbose);
  assert_true(got.temperature == -0.5);

  assert_true(parse("--tensor-parallel-size=1024 -qoout --output-is-an-operand", operand, &count, &done, &err) == false);
  assert_true(parse("--tensor-parallel-size=1024 -qoout -- --output", operand, &count, &done, &err));
  assert_int_equal(got.tp, 1024);
  assert_true(got.quiet);
  assert_string_equal(got.output, "out");
  assert_string_equal(operand[0], "--output");
  assert_true(parse("x --tp 1", operand, &count, &done, &err));
  assert_true(parse("- -t1e-3", operand, &count, &done, &err));
  assert_string_equal(operand[0], "-");
  assert_true(got.temperature == 1e-3);
  assert_true(parse("x --port 18446744073709551615 --output _", operand, &count, &done, &err));
  assert_true(got.port == UINT64_MAX);
  assert_string_equal(got.output, "");
}

TEST(test_sizes) {
  static const struct {
    const char *line;
    uint64_t bytes;
  } good[] = {{"x --part-size 100", 100},
              {"x --part-size 3K", 3072},
              {"x --part-size 512M", UINT64_C(512) << 20},
              {"x --part-size 4GiB", UINT64_C(4) << 30},
              {"x --part-size 3KB", 3000},
              {"x --part-size 80GB", UINT64_C(80000000000)},
              {"x --part-size=2T", UINT64_C(2) << 40},
              {"x --part-size 18446744TB", UINT64_C(18446744000000000000)},
              {"x --part-size 16777215T", UINT64_C(16777215) << 40}};
  const char *operand[2];
  size_t count;
  bool done;
  mm_err err;
  for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
    assert_true(parse(good[i].line, operand, &count, &done, &err));
    assert_true(got.part_size == good[i].bytes);
  }
}

TEST(test_refused) {
  static const char *const bad[][2] = {
      {"x --tp=", "--tp: found \"\", expected an integer from 1 to 1024"},
      {"x --tp _", "--tp: found \"\", expected an integer from 1 to 1024"},
      {"x --tp 8x", "--tp: found \"8x\", expected an integer from 1 to 1024"},
      {"x --tp 0", "--tp: found \"0\", expected an integer from 1 to 1024"},
      {"x --tp 1025", "--tp: found \"1025\", expected an integer from 1 to 1024"},
      {"x --tp -1", "--tp: found \"-1\", expected an integer from 1 to 1024"},
      {"x --tp +1", "--tp: found \"+1\", expected an integer from 1 to 1024"},
      {"x --tp 0x8", "--tp: found \"0x8\", expected an integer from 1 to 1024"},
      {"x --tp 18446744073709551617", "--tp: found \"18446744073709551617\", expected an integer from 1 to 1024"},
      {"x --port 4", "--port: found \"4\", expected an integer from 5 to 18446744073709551615"},
      {"x --tensor-parallel-size 4 --tp 4", "--tp: found twice, expected once"},
      {"x -q --quiet", "--quiet: found twice, expected once"},
      {"x --tp", "--tp: found no value, expected N"},
      {"x -o", "--output: found no value, expected DIR"},
      {"x --quiet=yes", "--quiet: found \"yes\", expected no value"},
      {"x --quant fp8", "--quant: found \"fp8\", expected none|bf16|block_fp8"},
      {"x --quant bf1", "--quant: found \"bf1\", expected none|bf16|block_fp8"},
      {"x --quant bf16|block_fp8", "--quant: found \"bf16|block_fp8\", expected none|bf16|block_fp8"},
      {"x --quant=", "--quant: found \"\", expected none|bf16|block_fp8"},
      {"x --part-size 4GBs", "--part-size: found \"4GBs\", expected bytes, as in 512M, 4GiB or 80GB"},
      {"x --part-size 4B", "--part-size: found \"4B\", expected bytes, as in 512M, 4GiB or 80GB"},
      {"x --part-size 18446745TB", "--part-size: found \"18446745TB\", expected bytes, as in 512M, 4GiB or 80GB"},
      {"x --part-size 4g", "--part-size: found \"4g\", expected bytes, as in 512M, 4GiB or 80GB"},
      {"x --part-size G", "--part-size: found \"G\", expected bytes, as in 512M, 4GiB or 80GB"},
      {"x --part-size _", "--part-size: found \"\", expected bytes, as in 512M, 4GiB or 80GB"},
      {"x --part-size 16777216T", "--part-size: found \"16777216T\", expected bytes, as in 512M, 4GiB or 80GB"},
      {"x --part-size 1.5G", "--part-size: found \"1.5G\", expected bytes, as in 512M, 4GiB or 80GB"},
      {"x -t nan", "--temperature: found \"nan\", expected a number"},
      {"x -t inf", "--temperature: found \"inf\", expected a number"},
      {"x -t 1e999", "--temperature: found \"1e999\", expected a number"},
      {"x -t 1x", "--temperature: found \"1x\", expected a number"},
      {"x -t 0x10", "--temperature: found \"0x10\", expected a number"},
      {"x -t _", "--temperature: found \"\", expected a number"},
      {"x --tensor 4", "unknown option \"--tensor\"; did you mean --tensor-parallel-size? See minimax-sample --help"},
      {"x --tps 4", "unknown option \"--tps\"; did you mean --tp? See minimax-sample --help"},
      {"x --qunat=none", "unknown option \"--qunat=none\"; did you mean --quant? See minimax-sample --help"},
      {"x --versoin", "unknown option \"--versoin\"; did you mean --version? See minimax-sample --help"},
      {"x --tp-size 4", "unknown option \"--tp-size\"; here it is --tp"},
      {"x --tokenizer=T", "unknown option \"--tokenizer=T\"; the tokenizer is the checkpoint's own"},
      {"x --tx 4", "unknown option \"--tx\"; did you mean --tp? See minimax-sample --help"},
      {"x --x 4", "unknown option \"--x\"; see minimax-sample --help"},
      {"x --=4", "unknown option \"--=4\"; see minimax-sample --help"},
      {"x -z", "unknown option \"-z\"; see minimax-sample --help"},
      {"x -qz", "unknown option \"-qz\"; see minimax-sample --help"},
      {"x --help-me", "unknown option \"--help-me\"; see minimax-sample --help"},
      {"x \x1b[1m -\x1b", "unknown option \"-\\x1b\"; see minimax-sample --help"},
      {"-q", "found 0 operands, expected 1 (SRC [MORE]); see minimax-sample --help"},
      {"a b c", "found \"c\", expected at most 2 operands (SRC [MORE])"},
      {"a b -- -c", "found \"-c\", expected at most 2 operands (SRC [MORE])"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    const char *operand[2];
    size_t count;
    bool done;
    mm_err err;
    if (parse(bad[i][0], operand, &count, &done, &err)) fail_msg("accepted: %s", bad[i][0]);
    assert_int_equal(err.status, MM_USAGE);
    assert_string_equal(err.code, "E_USAGE");
    assert_string_equal(err.text + strlen("E_USAGE: "), bad[i][1]);
  }
}

/* Output of the program for one hidden or plain help option. */
static char *printed_by(const mm_program *p, const char *word) {
  static char text[16384];
  FILE *file = tmpfile();
  assert_non_null(file);
  fflush(stdout);
  int saved = dup(STDOUT_FILENO);
  dup2(fileno(file), STDOUT_FILENO);
  const char *operand[2];
  size_t count;
  bool done;
  mm_err err = {0};
  char *argv[16] = {"minimax-sample"}, line[512];
  int argc = 1;
  snprintf(line, sizeof line, "%s", word);
  for (char *w = strtok(line, " "); w; w = strtok(NULL, " ")) argv[argc++] = w;
  bool ok = mm_options_parse(p, argc, argv, operand, &count, &done, &err);
  fflush(stdout);
  dup2(saved, STDOUT_FILENO);
  close(saved);
  assert_true(ok && done);
  rewind(file);
  text[fread(text, 1, sizeof text - 1, file)] = '\0';
  fclose(file);
  return text;
}

static char *printed(const char *word) { return printed_by(&program, word); }

/* Every option's text in the form that `how` gives it ("--%s ", ".TP\n… \\-\\-%s") is in the output of `word`. */
static void lists_every(const char *word, const char *how, const char *dash, bool explained) {
  char *text = printed(word);
  for (size_t i = 0; i < OPTIONS; i++) {
    const char *names[2] = {options[i].name, options[i].alias};
    for (int n = 0; n < 2 && names[n]; n++) {
      char name[64], want[96];
      size_t at = 0;
      for (const char *c = names[n]; *c; c++)
        at += (size_t)snprintf(name + at, sizeof name - at, "%.*s", *c == '-' ? 9 : 1, *c == '-' ? dash : c);
      snprintf(want, sizeof want, how, name);
      if (!strstr(text, want)) fail_msg("%s does not list \"%s\":\n%s", word, want, text);
    }
    char first[10];
    snprintf(first, sizeof first, "%s", options[i].help);
    if (explained && !strstr(text, first)) fail_msg("%s does not explain %s", word, options[i].name);
  }
  assert_non_null(strstr(text, "version"));
  assert_non_null(strstr(text, "bf16"));
}

TEST(test_help) {
  lists_every("--help", "--%s", "-", true);
  lists_every("--help-man", "\\-\\-%s", "\\-", true);
  lists_every("--help-bash", "--%s ", "-", false);
  lists_every("--help-zsh", "--%s", "-", true);
  lists_every("--help-fish", " -l %s ", "-", true);
  assert_string_equal(printed("--help"),
                      "minimax-sample: a table for tests\n"
                      "\n"
                      "usage: minimax-sample [OPTION…] SRC [MORE]\n"
                      "\n"
                      "options:\n"
                      "  -o, --output DIR            where the result goes\n"
                      "      --quant SCHEME          weight scheme (none|bf16|block_fp8)\n"
                      "      --ignore PATTERN        leave tensors of this name as they are\n"
                      "      --tp, --tensor-parallel-size N\n"
                      "                              ranks; one thread's share isn't [more] than 100% of a rank: never\n"
                      "      --port N                without an upper limit\n"
                      "      --part-size BYTES_EACH  largest part file\n"
                      "  -t, --temperature X         0 is greedy\n"
                      "  -q, --quiet                 .starts with a dot, as roff requests do\n"
                      "  -v, --verbose               says more, and at such length that the line ends with column 96 or\n"
                      "                              wraps \\ here, while the next one is longer than that by a letter:\n"
                      "                              x and so it goes below\n"
                      "  -h, --help                  print this help\n"
                      "      --version               print the version\n"
                      "\n"
                      "Exit status: 0 done.\n"
                      ".not a request\n"
                      "'nor this\n"
                      "\n"
                      "examples:\n"
                      "  minimax-sample A\n"
                      "  minimax-sample B --tp 2\n");
  char version[128];
  snprintf(version, sizeof version, "minimax-sample %s\n", mm_version());
  assert_string_equal(printed("--version"), version);
  assert_non_null(strstr(version, " " MM_VERSION " (commit "));
  char *short_form = strdup(printed("-h"));
  assert_string_equal(printed("a b --help --unknown"), short_form); /* what follows is not read */
  free(short_form);
}

/* The edits by their definition, over all ways to begin. */
static uint64_t edits_by_trial(const char *from, const char *to) {
  if (!*from || !*to) return strlen(from) + strlen(to);
  uint64_t least = edits_by_trial(from + 1, to + 1) + (*from != *to);
  least = mm_min(least, mm_min(edits_by_trial(from + 1, to), edits_by_trial(from, to + 1)) + 1);
  const bool exchanged = from[1] && from[0] == to[1] && from[1] == to[0];
  return exchanged ? mm_min(least, edits_by_trial(from + 2, to + 2) + 1) : least;
}

TEST(test_edits) {
  static const char *const words[] = {"", "a", "ab", "ba", "abc", "bca", "acb", "cab", "aabb", "abab", "cc", "caab"};
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    for (size_t j = 0; j < sizeof words / sizeof *words; j++) {
      const unsigned found = mm_edits(words[i], strlen(words[i]), words[j], strlen(words[j]));
      const uint64_t want = edits_by_trial(words[i], words[j]);
      if (found != want) fail_msg("%s %s: found %u, expected %u", words[i], words[j], found, (unsigned)want);
    }
  }
  assert_int_equal(mm_edits("quantisation", 5, "quant", 5), 0);
  char a[100], b[100];
  memset(a, 'a', sizeof a);
  memset(b, 'b', sizeof b);
  assert_int_equal(mm_edits(a, sizeof a, b, sizeof b), 64);
  assert_false(mm_edits_few(1, 1));
  assert_true(mm_edits_few(1, 2));
  assert_false(mm_edits_few(2, 5));
}

/* Headings divide the help, and are no options; known words are shown, others taken. */
TEST(test_headings) {
  const char *word = NULL;
  uint64_t jobs = 3;
  const mm_option rows[] = {{.help = "first"},
                            {.name = "word", .kind = MM_OPT_WORD, .target = &word, .arg = "WORD", .help = "which", .choices = "a|b"},
                            {.help = "second"},
                            {.name = "jobs", .letter = 'j', .kind = MM_OPT_U64, .target = &jobs, .arg = "N", .help = "threads", .lo = 1}};
  const mm_program p = {
      .name = "minimax-sample", .summary = "headings", .operands = "", .options = rows, .option_count = sizeof rows / sizeof *rows};
  size_t count;
  bool done;
  mm_err err = {0};
  assert_true(mm_options_parse(&p, 3, (char *[]){"x", "--word", "c"}, NULL, &count, &done, &err));
  assert_string_equal(word, "c");
  assert_int_equal(jobs, 3);
  assert_false(mm_options_parse(&p, 2, (char *[]){"x", "--first"}, NULL, &count, &done, &err));
  setenv("MINIMAX_JOBS", "7", 1);
  assert_true(mm_options_parse(&p, 1, (char *[]){"x"}, NULL, &count, &done, &err));
  assert_int_equal(jobs, 7);
  assert_true(mm_options_parse(&p, 2, (char *[]){"x", "-j5"}, NULL, &count, &done, &err));
  assert_int_equal(jobs, 5);
  setenv("MINIMAX_JOBS", "many", 1);
  err = (mm_err){0};
  assert_false(mm_options_parse(&p, 1, (char *[]){"x"}, NULL, &count, &done, &err));
  assert_string_equal(err.text, "E_USAGE: MINIMAX_JOBS in the environment: found \"many\", expected a value of --jobs");
  assert_true(mm_options_parse(&p, 2, (char *[]){"x", "-j5"}, NULL, &count, &done, &err));
  unsetenv("MINIMAX_JOBS");
  assert_string_equal(printed_by(&p, "--help"),
                      "minimax-sample: headings\n\nusage: minimax-sample [OPTION…] \n\nfirst:\n"
                      "      --word WORD             which: a, b\n\nsecond:\n"
                      "  -j, --jobs N                threads\n\nthis program:\n"
                      "  -h, --help                  print this help\n"
                      "      --version               print the version\n\n"
                      "environment:\n  MINIMAX_JOBS  the value of --jobs where it is not given\n");
  assert_non_null(strstr(printed_by(&p, "--help-man"), "\n.SH ENVIRONMENT\n.nf\nMINIMAX_JOBS  "));
  assert_non_null(strstr(printed_by(&p, "--help-man"), "\n.SS second\n.TP\n\\-j, \\-\\-jobs N\n"));
  assert_non_null(strstr(printed_by(&p, "--help-bash"), "--word) COMPREPLY=($(compgen -W 'a b' "));
}

TEST(test_escapes) {
  assert_non_null(strstr(printed("--help-man"), "\n\\&.starts with a dot"));
  assert_non_null(strstr(printed("--help-man"), "wraps \\e here"));
  assert_non_null(strstr(printed("--help-man"), "\n\\&.not a request\n\\&'nor this\n"));
  assert_non_null(strstr(printed("--help-man"), "\n.TP\n\\-o, \\-\\-output DIR\nwhere the result goes\n.TP\n"));
  assert_non_null(
      strstr(printed("--help-zsh"), "'--tp=[ranks; one thread'\\''s share isn'\\''t \\[more\\] than 100% of a rank\\: never]:N:_files'"));
  assert_non_null(strstr(printed("--help-zsh"), "'*--ignore=["));
  assert_non_null(strstr(printed("--help-fish"), " -l tp -l tensor-parallel-size -r -d 'ranks; one thread'\\''s share"));
  assert_non_null(strstr(printed("--help-fish"), " -l quiet -s q -d '"));
  assert_non_null(strstr(printed("--help-fish"), "wraps \\\\ here"));
}

/* The shells themselves find nothing wrong with the completions (each only where it is installed). */
TEST(test_shells) {
  static const struct { const char *shell, *word; } check[] = {{"bash", "--help-bash"}, {"zsh", "--help-zsh"}, {"fish", "--help-fish"}};
  for (size_t i = 0; i < sizeof check / sizeof *check; i++) {
    FILE *file = tmpfile();
    assert_non_null(file);
    fputs(printed(check[i].word), file);
    fflush(file);
    rewind(file);
    pid_t pid = fork();
    if (pid == 0) {
      dup2(fileno(file), STDIN_FILENO);
      execlp(check[i].shell, check[i].shell, "-n", "/dev/stdin", (char *)NULL);
      _exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    fclose(file);
  }
}

TEST(test_full_stdout) {
  fflush(stdout);
  int saved = dup(STDOUT_FILENO), full = open("/dev/full", O_WRONLY);
  dup2(full, STDOUT_FILENO);
  close(full);
  const char *operand[2];
  size_t count;
  bool done;
  mm_err err;
  bool ok = parse("--help", operand, &count, &done, &err);
  clearerr(stdout);
  dup2(saved, STDOUT_FILENO);
  close(saved);
  assert_false(ok);
  assert_string_equal(err.text, "E_IO: stdout: write: No space left on device");
}

/* Runs fn in a child whose stderr is returned; *status is its exit status. */
static const char *child(void (*fn)(void), int *status) {
  static char text[8192];
  int pipes[2];
  assert_int_equal(pipe(pipes), 0);
  pid_t pid = fork();
  if (pid == 0) {
    dup2(pipes[1], STDERR_FILENO);
    close(pipes[0]);
    close(pipes[1]);
    fn();
    _exit(99);
  }
  close(pipes[1]);
  size_t n = 0;
  ssize_t some;
  while ((some = read(pipes[0], text + n, sizeof text - 1 - n)) > 0) n += (size_t)some;
  text[n] = '\0';
  close(pipes[0]);
  assert_int_equal(waitpid(pid, status, 0), pid);
  return text;
}

static void fail_plainly(void) {
  mm_err err = {0};
  mm_fail(&err, MM_BAD_INPUT, "E_PREFIX", mm_at("a.safetensors", "t"), "found 3 bytes, expected 8");
  _exit(mm_program_fail(&program, &err));
}

static void fail_as_json(void) {
  const char *operand[2];
  size_t count;
  bool done;
  mm_err err = {0};
  parse("x --json", operand, &count, &done, &err);
  _exit(mm_program_fail(&program, &err));
}

static void fail_without_reason(void) {
  mm_err err = {0};
  _exit(mm_program_fail(&program, &err));
}

static void fail_at_length(void) {
  mm_err err = {.status = MM_IO};
  memset(err.text, 'x', sizeof err.text - 1);
  _exit(mm_program_fail(&program, &err));
}

TEST(test_program_fail) {
  int status;
  assert_string_equal(child(fail_plainly, &status),
                      "minimax-sample: error: E_PREFIX: a.safetensors: tensor \"t\": found 3 bytes, expected 8\n");
  assert_int_equal(WEXITSTATUS(status), MM_BAD_INPUT);
  assert_string_equal(child(fail_as_json, &status),
                      "{\"program\":\"minimax-sample\",\"error\":\"E_USAGE\",\"status\":2,\"message\":\"E_USAGE: unknown option "
                      "\\\"--json\\\"; see minimax-sample --help\"}\n");
  assert_int_equal(WEXITSTATUS(status), MM_USAGE);
  assert_non_null(strstr(child(fail_without_reason, &status), "minimax-sample: error: E_BUG"));
  assert_int_equal(WEXITSTATUS(status), MM_BUG);
  const char *line = child(fail_at_length, &status);
  assert_int_equal(strlen(line), strlen("minimax-sample: error: ") + sizeof((mm_err *)0)->text - 1 + 1);
  assert_int_equal(line[strlen(line) - 1], '\n');
}

static void start_closed(void) {
  int err = dup(STDERR_FILENO);
  for (int fd = 0; fd <= 2; fd++) close(fd);
  mm_program_start();
  bool open_now = fcntl(0, F_GETFD) >= 0 && fcntl(1, F_GETFD) >= 0 && fcntl(2, F_GETFD) >= 0;
  bool harmless = write(1, "lost", 4) == 4 && write(2, "lost", 4) == 4 && read(0, (char[1]){0}, 1) == 0;
  int pipes[2];
  bool alive = pipe(pipes) == 0 && close(pipes[0]) == 0 && write(pipes[1], "x", 1) < 0; /* SIGPIPE would kill */
  alive = alive && raise(SIGXFSZ) == 0;
  dup2(err, STDERR_FILENO);
  dprintf(STDERR_FILENO, "%d %d %d", open_now, harmless, alive);
  _exit(0);
}

static void start_open(void) {
  mm_program_start();
  dprintf(STDERR_FILENO, "still here");
  _exit(0);
}

TEST(test_program_start) {
  int status;
  assert_string_equal(child(start_closed, &status), "1 1 1");
  assert_string_equal(child(start_open, &status), "still here");
}

static bool run_well(void *args, mm_err *err) {
  (void)err;
  puts(args); /* stdout holds it until the end */
  return true;
}

static bool run_badly(void *args, mm_err *err) { return mm_fail(err, MM_LOCKED, "E_LOCKED", mm_at(args, NULL), "found another run"); }

static int main_of(const char *word, bool (*run)(void *, mm_err *), const char *stdout_path) {
  const char *operand[2];
  char *argv[] = {"minimax-sample", (char *)word};
  int out = open(stdout_path, O_WRONLY);
  dup2(out, STDOUT_FILENO);
  return mm_program_main(&program, 2, argv, operand, run, "given");
}

static void main_well(void) { _exit(main_of("SRC", run_well, "/dev/null")); }
static void main_badly(void) { _exit(main_of("SRC", run_badly, "/dev/null")); }
static void main_help(void) { _exit(main_of("--help", run_badly, "/dev/null")); }
static void main_unknown(void) { _exit(main_of("--unknown", run_well, "/dev/null")); }
static void main_full(void) { _exit(main_of("SRC", run_well, "/dev/full")); }

TEST(test_program_main) {
  int status;
  assert_string_equal(child(main_well, &status), "");
  assert_int_equal(WEXITSTATUS(status), MM_OK);
  assert_string_equal(child(main_badly, &status), "minimax-sample: error: E_LOCKED: given: found another run\n");
  assert_int_equal(WEXITSTATUS(status), MM_LOCKED);
  assert_string_equal(child(main_help, &status), "");
  assert_int_equal(WEXITSTATUS(status), MM_OK);
  assert_non_null(strstr(child(main_unknown, &status), "unknown option"));
  assert_int_equal(WEXITSTATUS(status), MM_USAGE);
  assert_string_equal(child(main_full, &status), "minimax-sample: error: E_IO: stdout: write: No space left on device\n");
  assert_int_equal(WEXITSTATUS(status), MM_IO);
}

static int free_list(void **state) {
  (void)state;
  free(got.ignore.item);
  return 0;
}

int main(void) { return run_unit_tests(NULL, free_list); }
