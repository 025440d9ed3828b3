/* Weights held for other processes (runtime/engine/hold.h): who is answered, what with, who is not, and when the holder ends. The memory is
 * bytes that nobody looks into. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/engine/hold.h"
#include "tests/unit/unit.h"

static char dir[] = "/tmp/mm-hold-XXXXXX", path[64];
static int lines;
static void count_line(const char *line) {
  (void)line;
  __atomic_add_fetch(&lines, 1, __ATOMIC_SEQ_CST);
}

static mm_held held_of(uint8_t i) {
  mm_held h = {.bytes = UINT64_C(1000) * i + 7};
  snprintf(h.key.build, sizeof h.key.build, "1.2 (commit %u)", 7u);
  for (uint8_t k = 0; k < 32; k++) h.key.checkpoint.byte[k] = h.key.layout.byte[k] = (uint8_t)(3 * k);
  h.key.tp = 4, h.key.attn_tp = 2, h.key.rank = i;
  snprintf(h.key.device, sizeof h.key.device, "GPU-%u", i);
  for (uint8_t k = 0; k < MM_HOLD_HANDLE; k++) h.handle[k] = (uint8_t)(i * 31 + k);
  return h;
}

typedef struct holder {
  pid_t pid;
} holder;

/* A holder in a process of its own, which ends with 0 when all went well. */
static holder start(uint32_t ranks) {
  int ready[2];
  assert_int_equal(pipe(ready), 0);
  const holder h = {fork()};
  assert_true(h.pid >= 0);
  if (h.pid == 0) {
    mm_err err = {0};
    mm_held all[4];
    for (uint32_t i = 0; i < ranks; i++) all[i] = held_of((uint8_t)(i + 1));
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGHUP);
    sigaddset(&set, SIGXCPU);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    mm_hold *hold = mm_hold_open(path, all, ranks, &err);
    const int stop = signalfd(-1, &set, SFD_NONBLOCK);
    const char byte = hold && stop >= 0 ? 1 : 0;
    if (write(ready[1], &byte, 1) != 1) _exit(9);
    const bool ok = hold && mm_hold_serve(hold, stop, count_line, &err);
    mm_hold_close(hold);
    _exit(ok ? 0 : (int)err.status);
  }
  char byte = 0;
  close(ready[1]);
  assert_int_equal(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  return h;
}

static int end(holder h) {
  int status;
  for (int i = 0; i < 1000; i++) {
    if (waitpid(h.pid, &status, WNOHANG) == h.pid) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    usleep(10000);
  }
  kill(h.pid, SIGKILL);
  return -2;
}

static bool find(uint8_t i, mm_held *got, int *connection, mm_err *err) {
  const mm_held want = held_of(i);
  *got = (mm_held){.key = want.key};
  *err = (mm_err){0};
  return mm_hold_find(path, got, connection, err);
}

TEST(test_found) {
  mm_err err;
  mm_held got;
  int a, b, c;
  holder h = start(3);
  struct stat s;
  assert_int_equal(stat(path, &s), 0);
  assert_int_equal(s.st_mode & 0777, 0600);
  for (uint8_t i = 1; i <= 3; i++) {
    assert_true(find(i, &got, &a, &err));
    const mm_held want = held_of(i);
    assert_memory_equal(&got, &want, sizeof got);
    close(a);
  }
  assert_false(find(4, &got, &c, &err)); /* nobody's */
  assert_string_equal(err.code, "E_HELD");
  assert_int_equal(err.status, MM_UNSUPPORTED);
  assert_int_equal(c, -1);
  /* Two that are attached are waited for; nobody new is answered meanwhile. */
  assert_true(find(1, &got, &a, &err));
  assert_true(find(2, &got, &b, &err));
  kill(h.pid, SIGTERM);
  for (int i = 0; i < 500 && access(path, F_OK) == 0; i++) usleep(10000);
  assert_false(find(1, &got, &c, &err));
  assert_int_equal(err.status, MM_IO);
  close(a);
  usleep(50000);
  assert_int_equal(kill(h.pid, 0), 0);
  close(b);
  assert_int_equal(end(h), 0);
}

/* Who asks for other weights hears in which parts they differ, and of no other part. */
TEST(test_difference) {
  static const struct {
    int part;
    const char *text;
  } all[] = {{0, "found build 1.2 (commit 7), expected 1.2 (commit 8)"},
             {1, "found checkpoint 000306090c0f1215, expected 010306090c0f1215"},
             {2, "found cut --tp 4 with attention cut for 2, expected --tp 4 with attention cut for 4"},
             {3, "found rank 3, expected 9"},
             {4, "found device GPU-2, expected GPU-8"},
             {5, "found layout 000306"}};
  holder h = start(3);
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    mm_err err = {0};
    mm_held want = held_of(all[i].part == 3 ? 3 : 2);
    int connection;
    switch (all[i].part) {
      case 0: snprintf(want.key.build, sizeof want.key.build, "1.2 (commit 8)"); break;
      case 1: want.key.checkpoint.byte[0]++; break;
      case 2: want.key.attn_tp = 4; break;
      case 3: want.key.rank = 9; break;
      case 4: snprintf(want.key.device, sizeof want.key.device, "GPU-8"); break;
      default: want.key.layout.byte[0]++; break;
    }
    assert_false(mm_hold_find(path, &want, &connection, &err));
    assert_string_equal(err.code, "E_HELD");
    if (!strstr(err.text, all[i].text) || strchr(err.text, ';')) fail_msg("%s: %s", all[i].text, err.text);
  }
  mm_err err = {0};
  mm_held want = held_of(2);
  int connection;
  want.key.tp = 8, want.key.checkpoint.byte[0]++;
  assert_false(mm_hold_find(path, &want, &connection, &err));
  assert_non_null(strstr(err.text, "; found cut --tp 4 with attention cut for 2, expected --tp 8"));
  kill(h.pid, SIGTERM);
  assert_int_equal(end(h), 0);
}

/* A second signal does not wait. A holder that was killed leaves a socket, which the next one replaces. */
TEST(test_ends) {
  mm_err err;
  mm_held got;
  int a;
  holder h = start(1);
  assert_true(find(1, &got, &a, &err));
  kill(h.pid, SIGTERM);
  for (int i = 0; i < 500 && access(path, F_OK) == 0; i++) usleep(10000);
  kill(h.pid, SIGHUP); /* a terminal that closes is no second signal */
  usleep(50000);
  assert_true(mm_hold_is_alive(path, a, &err)); /* it waits for its user, */
  kill(h.pid, SIGTERM);
  assert_int_equal(end(h), 0);
  assert_false(mm_hold_is_alive(path, a, &err)); /* which has to know that it does not any more */
  assert_string_equal(err.code, "E_HELD");
  assert_int_equal(err.status, MM_IO);
  close(a);
  h = start(1); /* the limit of CPU time comes each second: it is the first signal alone, and the status says so */
  assert_true(find(1, &got, &a, &err));
  for (int i = 0; i < 3; i++) {
    kill(h.pid, SIGXCPU);
    usleep(20000);
  }
  assert_true(mm_hold_is_alive(path, a, &err));
  close(a);
  assert_int_equal(end(h), MM_LIMIT);
  h = start(1);
  kill(h.pid, SIGKILL);
  assert_int_equal(end(h), -1);
  assert_int_equal(access(path, F_OK), 0);
  assert_false(find(1, &got, &a, &err));
  assert_int_equal(err.status, MM_IO);
  h = start(1);
  assert_true(find(1, &got, &a, &err));
  const holder second = start(1); /* while the first listens */
  assert_int_equal(end(second), MM_USAGE);
  close(a);
  kill(h.pid, SIGTERM);
  assert_int_equal(end(h), 0);
}

/* Somebody removed its socket, and another holder has the path since: that one's stays when the first ends. */
TEST(test_replaced) {
  mm_err err;
  mm_held got;
  int a;
  holder h = start(1);
  assert_int_equal(unlink(path), 0);
  const holder second = start(2);
  kill(h.pid, SIGTERM);
  assert_int_equal(end(h), 0);
  if (!find(2, &got, &a, &err)) fail_msg("%s", err.text);
  close(a);
  kill(second.pid, SIGTERM);
  assert_int_equal(end(second), 0);
  assert_int_equal(access(path, F_OK), -1);
}

/* Who opens a socket has its folder to itself until it listens: a second one would take the first one's for a dead holder's. */
TEST(test_one_at_a_time) {
  const int folder = open(dir, O_RDONLY | O_DIRECTORY);
  assert_int_equal(flock(folder, LOCK_EX), 0);
  const pid_t p = fork();
  if (p == 0) {
    mm_err err = {0};
    const mm_held all = held_of(1);
    close(folder); /* the lock is the parent's */
    mm_hold *h = mm_hold_open(path, &all, 1, &err);
    mm_hold_close(h);
    _exit(h ? 0 : 1);
  }
  usleep(200000);
  assert_int_equal(access(path, F_OK), -1);
  int status;
  assert_int_equal(waitpid(p, &status, WNOHANG), 0);
  close(folder);
  assert_int_equal(end((holder){p}), 0);
}

static int dial(void) {
  struct sockaddr_un at = {.sun_family = AF_UNIX};
  snprintf(at.sun_path, sizeof at.sun_path, "%s", path);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  assert_int_equal(connect(fd, (const struct sockaddr *)&at, sizeof at), 0);
  return fd;
}

/* Many that say nothing, nonsense, half a question, too much, or hang up, at random: a good one is answered all the time. */
TEST(test_strangers) {
  mm_err err;
  mm_held got;
  int open[40], n = 0, a;
  unsigned seed = 4711;
  holder h = start(2);
  for (int i = 0; i < 600; i++) {
    if (n == 40 || (n && rand_r(&seed) % 3 == 0)) close(open[--n]);
    open[n] = dial();
    char noise[400];
    for (size_t k = 0; k < sizeof noise; k++) noise[k] = (char)rand_r(&seed);
    if (rand_r(&seed) % 2) memcpy(noise, "mmhold2", 8);
    const size_t question = 8 + sizeof got.key, most = rand_r(&seed) % 4 ? question : sizeof noise;
    send(open[n++], noise, (size_t)rand_r(&seed) % (most + 1), MSG_NOSIGNAL);
    if (i % 5) continue;
    assert_true(find((uint8_t)(1 + i % 2), &got, &a, &err));
    assert_int_equal(got.bytes, held_of((uint8_t)(1 + i % 2)).bytes);
    if (i % 10 || n == 40)
      close(a);
    else
      open[n++] = a;
  }
  while (n) close(open[--n]);
  kill(h.pid, SIGTERM);
  assert_int_equal(end(h), 0);
}

/* Of another version: its question is shorter, so a holder hangs up as soon as it sees whose it is, and one that reads a part of a question
 * and hangs up is called so, though the system says that the connection was reset. */
TEST(test_versions) {
  const char old[40] = "mmhold1";
  char byte;
  const struct timeval wait = {.tv_sec = 2};
  holder h = start(1);
  const int fd = dial();
  assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait), 0);
  assert_int_equal(send(fd, old, sizeof old, MSG_NOSIGNAL), sizeof old);
  assert_int_equal(recv(fd, &byte, 1, 0), 0);
  close(fd);
  kill(h.pid, SIGTERM);
  assert_int_equal(end(h), 0);

  struct sockaddr_un at = {.sun_family = AF_UNIX};
  snprintf(at.sun_path, sizeof at.sun_path, "%s", path);
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  assert_int_equal(bind(listener, (const struct sockaddr *)&at, sizeof at), 0);
  assert_int_equal(listen(listener, 1), 0);
  h = (holder){fork()};
  if (h.pid == 0) {
    char part[40];
    const int user = accept(listener, NULL, NULL);
    _exit(recv(user, part, sizeof part, MSG_WAITALL) == sizeof part ? 0 : 1);
  }
  close(listener);
  mm_err err = {0};
  mm_held got;
  int a;
  assert_false(find(1, &got, &a, &err));
  assert_string_equal(err.code, "E_HELD");
  assert_non_null(strstr(err.text, "is of another version"));
  assert_int_equal(end(h), 0);
  unlink(path);
}

/* Without descriptors a connection waits, and so does the holder: it takes no CPU, and answers when there are some again. */
TEST(test_no_descriptors) {
  mm_err err;
  mm_held got;
  int a;
  struct rlimit full;
  struct rusage used;
  holder h = start(1);
  assert_int_equal(prlimit(h.pid, RLIMIT_NOFILE, NULL, &full), 0);
  const struct rlimit few = {3, full.rlim_max};
  assert_int_equal(prlimit(h.pid, RLIMIT_NOFILE, &few, NULL), 0);
  const int waits = dial();
  usleep(1000000);
  assert_int_equal(prlimit(h.pid, RLIMIT_NOFILE, &full, NULL), 0);
  assert_true(find(1, &got, &a, &err));
  close(a);
  close(waits);
  kill(h.pid, SIGTERM);
  int status;
  assert_int_equal(wait4(h.pid, &status, 0, &used), h.pid);
  assert_int_equal(status, 0);
  assert_true(used.ru_utime.tv_sec + used.ru_stime.tv_sec == 0 && used.ru_utime.tv_usec + used.ru_stime.tv_usec < 300000);
}

/* Another user's process is not answered, and does not take another user's word. */
TEST(test_users) {
  if (geteuid() != 0) skip();
  holder h = start(1);
  chmod(path, 0666);
  chmod(dir, 0755);
  const pid_t p = fork();
  if (p == 0) {
    mm_err err;
    mm_held got;
    int a;
    if (setuid(65534) != 0) _exit(3);
    _exit(find(1, &got, &a, &err) ? 1 : err.status == MM_IO ? 0 : 2);
  }
  int status;
  waitpid(p, &status, 0);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
  kill(h.pid, SIGTERM);
  assert_int_equal(end(h), 0);
}

TEST(test_paths) {
  mm_err err = {0};
  const mm_held all = held_of(1);
  char file[80], far[200];
  mm_held got = all;
  int a;
  snprintf(file, sizeof file, "%s/file", dir);
  close(open(file, O_CREAT | O_WRONLY, 0600));
  assert_null(mm_hold_open(file, &all, 1, &err));
  assert_string_equal(err.code, "E_HELD");
  assert_int_equal(err.status, MM_USAGE);
  assert_int_equal(access(file, F_OK), 0); /* not taken away */
  memset(far, 'a', sizeof far - 1);
  far[sizeof far - 1] = 0;
  err = (mm_err){0};
  assert_null(mm_hold_open(far, &all, 1, &err));
  assert_int_equal(err.status, MM_USAGE);
  err = (mm_err){0};
  assert_false(mm_hold_find(file, &got, &a, &err));
  assert_int_equal(err.status, MM_IO);
  err = (mm_err){0};
  assert_false(mm_hold_find("/nowhere/at/all", &got, &a, &err));
  assert_int_equal(err.status, MM_IO);
  unlink(file);
}

static int group_setup(void **state) {
  (void)state;
  if (!mkdtemp(dir)) return -1;
  snprintf(path, sizeof path, "%s/socket", dir);
  return 0;
}
static int group_teardown(void **state) {
  (void)state;
  unlink(path);
  return rmdir(dir);
}

int main(void) { return run_unit_tests(group_setup, group_teardown); }
