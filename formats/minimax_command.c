/* minimax: runs the other programs by a word. */
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "formats/commands.h"
#include "formats/option.h"

static bool is_command(const char *word) {
  for (size_t i = 0; i < mm_command_count; i++)
    if (strcmp(mm_commands[i].word, word) == 0) return true;
  return false;
}

static bool unknown(const char *word, mm_err *err) {
  const char *near = NULL;
  unsigned few = 0;
  for (size_t i = 0; i < mm_command_count; i++) {
    const char *name = mm_commands[i].word;
    const unsigned edits = mm_edits(word, strlen(word), name, strlen(name));
    if (mm_edits_few(edits, strlen(word)) && (!near || edits < few)) near = name, few = edits;
  }
  const char *shown = MM_ESCAPED(256, word);
  if (near) return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found \"%s\"; did you mean %s? See minimax --help", shown, near);
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found \"%s\", expected a program's word; see minimax --help", shown);
}

/* The program in the directory that this one was started from: one of the same build. Returns only on failure. */
static bool run(const char *word, char **argv, mm_err *err) {
  char path[PATH_MAX];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path);
  if (n < 0) return mm_fail_errno(err, mm_at("/proc/self/exe", NULL), "read", errno);
  size_t end = (size_t)n;
  while (end > 0 && path[end - 1] != '/') end--;
  const size_t capacity = sizeof path - end;
  if ((size_t)snprintf(path + end, capacity, "minimax-%s", word) >= capacity)
    return mm_fail_errno(err, mm_at("/proc/self/exe", NULL), "read", ENAMETOOLONG);
  argv[0] = path;
  execv(path, argv);
  if (errno == ENOENT)
    return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(path, NULL), "no such program, expected it in the directory of minimax");
  return mm_fail_errno(err, mm_at(path, NULL), "run", errno);
}

/* The table of programs as text, a line each. */
static bool list(char *out, size_t cap) {
  size_t at = 0;
  for (size_t i = 0; i < mm_command_count; i++) {
    const int n = snprintf(out + at, cap - at, "%s%-9s%s", i ? "\n" : "", mm_commands[i].word, mm_commands[i].purpose);
    if (n < 0 || (size_t)n >= cap - at) return false;
    at += (size_t)n;
  }
  return true;
}

static bool nothing(void *args, mm_err *err) {
  (void)args;
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found no program's word; see minimax --help");
}

int main(int argc, char **argv) {
  char commands[2048];
  mm_err err = {0};
  const mm_program program = {
      .name = "minimax",
      .summary = "convert MiniMax checkpoints and serve them: runs the programs below by a word",
      .operands = "PROGRAM [OPERAND…]",
      .max_operands = 1,
      .commands = commands,
      .examples =
          "minimax convert MiniMaxAI/MiniMax-M2.7 -o M2.7-tp4 --tp 4 --quant block_fp8\n"
          "minimax verify M2.7-tp4\n"
          "minimax serve M2.7-tp4 --device cuda",
      .epilog =
          "minimax convert … is minimax-convert …, and so for all; minimax help convert is minimax-convert --help.\n\n"
          "Exit status: 0 done, 2 usage, 3 the program is not installed, 5 it cannot be run; otherwise the program's own.",
  };
  if (!list(commands, sizeof commands)) return MM_BUG;
  if (argc < 2 || argv[1][0] == '-') return mm_program_main(&program, argc, argv, (const char *[1]){NULL}, nothing, NULL);
  if (is_command(argv[1])) {
    run(argv[1], argv + 1, &err);
  } else if (strcmp(argv[1], "help") == 0 && argc > 2 && is_command(argv[2])) {
    run(argv[2], (char *[]){NULL, "--help", NULL}, &err);
  } else if (strcmp(argv[1], "help") == 0 && argc == 2) {
    return mm_program_main(&program, 2, (char *[]){argv[0], "--help", NULL}, (const char *[1]){NULL}, nothing, NULL);
  } else {
    unknown(argv[strcmp(argv[1], "help") == 0 ? 2 : 1], &err);
  }
  mm_program_start();
  return mm_program_fail(&program, &err);
}
