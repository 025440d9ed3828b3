/* formats/file: what is opened and what is refused, exact transfers under short and interrupted calls, faults reported.
 * The system calls below stand before the C library's, so that a test can make them fail, stop short or be interrupted. */
#undef _FORTIFY_SOURCE /* its inline versions would hide ours */
#include "formats/system/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/unit/unit.h"

static struct {
  bool dribble; /* transfers of at most 7 bytes, every other call interrupted */
  bool write_nothing;
  int read_errno, write_errno, sync_errno, close_errno; /* non-zero: the call fails … */
  unsigned good_calls;                                  /* … after so many that do not */
  unsigned calls;
} fault;

static bool interrupted(void) {
  if (!fault.dribble || fault.calls++ % 2) return false;
  errno = EINTR;
  return true;
}

static bool failing(int reason) {
  if (reason == 0 || fault.good_calls > 0) {
    if (fault.good_calls > 0) fault.good_calls--;
    return false;
  }
  errno = reason;
  return true;
}

ssize_t pread(int fd, void *buf, size_t n, off_t at) {
  if (interrupted() || failing(fault.read_errno)) return -1;
  return syscall(SYS_pread64, fd, buf, fault.dribble && n > 7 ? 7 : n, at);
}

ssize_t pwrite(int fd, const void *buf, size_t n, off_t at) {
  if (fault.write_nothing) return 0;
  if (interrupted() || failing(fault.write_errno)) return -1;
  return syscall(SYS_pwrite64, fd, buf, fault.dribble && n > 7 ? 7 : n, at);
}

int fsync(int fd) {
  if (interrupted() || failing(fault.sync_errno)) return -1;
  return (int)syscall(SYS_fsync, fd);
}

int close(int fd) {
  int r = (int)syscall(SYS_close, fd);
  return failing(fault.close_errno) ? -1 : r;
}

static char dir[] = "/tmp/mm_test_file_XXXXXX";
static int dirfd_;

static const char *at(const char *name) {
  static char path[8][256];
  static unsigned next;
  char *p = path[next++ % 8];
  snprintf(p, 256, "%s/%s", dir, name);
  return p;
}

static void put(const char *name, const void *data, size_t n) {
  int fd = open(at(name), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  assert_true(fd >= 0);
  assert_int_equal(write(fd, data, n), n);
  close(fd);
}

static void fill(uint8_t *p, size_t n) {
  for (size_t i = 0; i < n; i++) p[i] = (uint8_t)(i * 31 + (i >> 8) * 7 + 1);
}

static int set_up(void **state) {
  (void)state;
  if (!mkdtemp(dir)) return -1;
  dirfd_ = open(dir, O_RDONLY | O_DIRECTORY);
  return dirfd_ < 0;
}

static int tear_down(void **state) {
  (void)state;
  char command[64];
  close(dirfd_);
  snprintf(command, sizeof command, "rm -rf %s", dir);
  return system(command);
}

static int reset_faults(void **state) {
  (void)state;
  memset(&fault, 0, sizeof fault);
  return 0;
}

TEST_BETWEEN(test_open, NULL, reset_faults) {
  uint8_t data[1000], back[1000] = {0};
  fill(data, sizeof data);
  put("plain", data, sizeof data);
  assert_int_equal(symlink("plain", at("link")), 0);
  static const char *const names[] = {"plain", "link"};
  for (size_t i = 0; i < 2; i++) {
    mm_file f;
    mm_err err = {0};
    struct stat s;
    assert_true(mm_file_open(&f, at(names[i]), &err));
    assert_int_equal(stat(at("plain"), &s), 0);
    assert_true(f.fd >= 0 && f.size == 1000 && f.id.size == 1000 && f.id.ino == s.st_ino && f.id.dev == s.st_dev);
    assert_int_equal(f.id.mtime_ns, s.st_mtim.tv_sec * 1000000000 + s.st_mtim.tv_nsec);
    assert_true(fcntl(f.fd, F_GETFD) & FD_CLOEXEC);
    assert_true(mm_file_read(&f, "plain", back, 900, 100, &err));
    assert_memory_equal(back, data + 100, 900);
    mm_file_close(&f);
    assert_int_equal(f.fd, -1);
    mm_file_close(&f);
  }
}

TEST_BETWEEN(test_refused_kinds, NULL, reset_faults) {
  static const struct {
    const char *name, *code, *says;
    mm_status status;
  } cases[] = {
      {"fifo", "E_FS_TYPE", "it is a FIFO", MM_BAD_INPUT},
      {"folder", "E_FS_TYPE", "it is a directory", MM_BAD_INPUT},
      {"socket", "E_FS_TYPE", "it is a socket", MM_BAD_INPUT},
      {"zero", "E_FS_TYPE", "it is a device", MM_BAD_INPUT},
      {"loop", "E_FS_TYPE", "a loop of symbolic links", MM_BAD_INPUT},
      {"dangling", "E_FS_MISSING", "a symbolic link to nothing", MM_BAD_INPUT},
      {"absent", "E_FS_MISSING", "no such file", MM_BAD_INPUT},
      {"absent/x", "E_FS_MISSING", "no such file", MM_BAD_INPUT},
      {"plain/x", "E_FS_MISSING", "no such file", MM_BAD_INPUT},
  };
  assert_int_equal(mkfifo(at("fifo"), 0600), 0);
  assert_int_equal(mkdir(at("folder"), 0700), 0);
  assert_int_equal(symlink("/dev/zero", at("zero")), 0);
  assert_int_equal(symlink("loop", at("loop")), 0);
  assert_int_equal(symlink("nowhere", at("dangling")), 0);
  struct sockaddr_un name = {.sun_family = AF_UNIX};
  snprintf(name.sun_path, sizeof name.sun_path, "%s", at("socket"));
  int sock = socket(AF_UNIX, SOCK_STREAM, 0);
  assert_int_equal(bind(sock, (struct sockaddr *)&name, sizeof name), 0);
  alarm(10); /* opening the FIFO must not wait for a writer */
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    mm_file f;
    mm_err err = {0};
    assert_false(mm_file_open(&f, at(cases[i].name), &err));
    assert_int_equal(f.fd, -1);
    assert_int_equal(err.status, cases[i].status);
    assert_string_equal(err.code, cases[i].code);
    if (!strstr(err.text, cases[i].says) || !strstr(err.text, at(cases[i].name))) fail_msg("%s", err.text);
  }
  alarm(0);
  close(sock);
}

TEST_BETWEEN(test_open_errors_are_io, NULL, reset_faults) {
  char name[300];
  memset(name, 'n', sizeof name - 1);
  name[sizeof name - 1] = 0;
  mm_file f;
  mm_err err = {0};
  assert_false(mm_file_open(&f, name, &err));
  assert_int_equal(err.status, MM_IO);
  assert_non_null(strstr(err.text, "open: File name too long"));
}

static void check_changed(const char *says) {
  mm_file f;
  mm_err err = {0};
  put("watched", "123456", 6);
  assert_true(mm_file_open(&f, at("watched"), &err));
  assert_true(mm_file_unchanged(&f, at("watched"), &err));
  if (strstr(says, "size")) {
    assert_int_equal(truncate(at("watched"), 5), 0);
  } else if (strstr(says, "written")) {
    assert_int_equal(utimensat(AT_FDCWD, at("watched"), (struct timespec[]){{1, 0}, {1234567, 89}}, 0), 0);
  } else if (strstr(says, "inode")) {
    usleep(20000); /* the file system's clock ticks */
    assert_int_equal(chmod(at("watched"), 0640), 0);
  } else if (strstr(says, "another")) {
    put("other", "123456", 6);
    assert_int_equal(rename(at("other"), at("watched")), 0);
  } else {
    assert_int_equal(unlink(at("watched")), 0);
  }
  assert_false(mm_file_unchanged(&f, at("watched"), &err));
  assert_int_equal(err.status, MM_IO);
  assert_string_equal(err.code, "E_CHANGED");
  if (!strstr(err.text, says)) fail_msg("%s", err.text);
  mm_file_close(&f);
}

TEST_BETWEEN(test_changes_are_seen, NULL, reset_faults) {
  check_changed("its size is different");
  check_changed("it was written to");
  check_changed("its inode was changed");
  check_changed("it is another file now");
  check_changed("No such file");
}

TEST_BETWEEN(test_read, NULL, reset_faults) {
  uint8_t data[5000], back[5001] = {0};
  fill(data, sizeof data);
  put("data", data, sizeof data);
  mm_file f;
  mm_err err = {0};
  assert_true(mm_file_open(&f, at("data"), &err));
  fault.dribble = true;
  assert_true(mm_file_read(&f, "data", back, sizeof data, 0, &err));
  assert_memory_equal(back, data, sizeof data);
  assert_true(fault.calls >= 2 * 5000 / 7);
  memset(back, 0, sizeof back);
  assert_true(mm_file_read(&f, "data", back, 100, 3000, &err));
  assert_memory_equal(back, data + 3000, 100);
  assert_true(back[100] == 0 && back[101] == 0); /* not a byte more than asked */
  fault.dribble = false;
  assert_true(mm_file_read(&f, "data", back, 0, 99999, &err));
  assert_false(mm_file_read(&f, "data", back, 20, 4990, &err));
  assert_int_equal(err.status, MM_IO);
  assert_string_equal(err.text, "E_SHORT_READ: data: offset 5000: the file ends here, 10 more bytes expected");
  mm_err io = {0};
  fault.dribble = true;
  fault.read_errno = EIO;
  fault.good_calls = 2;
  assert_false(mm_file_read(&f, "data", back, 20, 8, &io));
  assert_string_equal(io.text, "E_IO: data: offset 22: read: Input/output error");
  mm_file_close(&f);
}

/* Every residue of offset and end against the page, with and without O_DIRECT, calls cut short, and past the end. */
TEST_BETWEEN(test_stream, NULL, reset_faults) {
  enum { SIZE = 5 * MM_DIRECT + 1234 };
  static const uint64_t offsets[] = {0, 1, MM_DIRECT - 1, MM_DIRECT, MM_DIRECT + 700, 3 * MM_DIRECT + 5, SIZE - 3};
  static const size_t sizes[] = {0, 1, 4095, 4096, 4097, 9000, 3 * MM_DIRECT, SIZE};
  static uint8_t data[SIZE];
  fill(data, sizeof data);
  put("streamed", data, sizeof data);
  mm_file f;
  mm_err err = {0};
  assert_true(mm_file_open(&f, at("streamed"), &err));
  assert_int_equal(fsync(f.fd), 0);                       /* only clean pages leave the cache */
  int direct = open(at("streamed"), O_RDONLY | O_DIRECT); /* -1 where the file system has none */
  for (size_t i = 0; i < sizeof offsets / sizeof offsets[0] * (sizeof sizes / sizeof sizes[0]) * 4; i++) {
    uint64_t offset = offsets[i / 4 % 7];
    size_t n = sizes[i / 28], skew = 99999;
    fault.dribble = i % 4 == 3; /* also breaks direct reads: the plain ones must finish */
    if (i % 4 == 1) posix_fadvise(f.fd, 0, 0, POSIX_FADV_DONTNEED);
    if (i % 4 > 1) posix_fadvise(f.fd, (off_t)mm_round_up(offset + n / 2, MM_DIRECT), 0, POSIX_FADV_DONTNEED); /* the first half stays */
    uint8_t *buf;
    mm_err e = {0};
    assert_int_equal(posix_memalign((void **)&buf, MM_DIRECT, n + 2 * MM_DIRECT), 0);
    bool ok = mm_file_stream(&f, i % 4 == 0 ? -1 : direct, "streamed", buf, n, offset, &skew, &e);
    assert_int_equal(ok, offset + n <= SIZE);
    if (ok) {
      assert_true(skew < MM_DIRECT);
      assert_memory_equal(buf + skew, data + offset, n);
    } else {
      assert_string_equal(e.code, "E_SHORT_READ");
    }
    free(buf);
  }
  fault.dribble = false;
  if (direct >= 0) close(direct);
  mm_file_close(&f);
}

TEST_BETWEEN(test_slurp, NULL, reset_faults) {
  put("ten", "0123456789", 10);
  put("none", "", 0);
  mm_err err = {0};
  size_t n = 0;
  char *text = mm_file_slurp(at("ten"), 10, &n, &err);
  assert_non_null(text);
  assert_int_equal(n, 10);
  assert_string_equal(text, "0123456789");
  free(text);
  text = mm_file_slurp(at("none"), 10, &n, &err);
  assert_int_equal(n, 0);
  assert_string_equal(text, "");
  free(text);
  assert_null(mm_file_slurp(at("ten"), 9, &n, &err));
  assert_string_equal(err.code, "E_LIMIT");
  assert_non_null(strstr(err.text, "found 10 bytes, expected at most 9"));
  mm_err io = {0};
  fault.read_errno = EIO;
  assert_null(mm_file_slurp(at("ten"), 10, &n, &io));
  assert_int_equal(io.status, MM_IO);
}

TEST_BETWEEN(test_map, NULL, reset_faults) {
  uint8_t data[9000];
  fill(data, sizeof data);
  put("mapped", data, sizeof data);
  put("none", "", 0);
  mm_file f;
  mm_map m;
  mm_err err = {0};
  assert_true(mm_file_open(&f, at("mapped"), &err));
  assert_true(mm_map_open(&m, &f, "mapped", &err));
  mm_file_close(&f); /* the mapping lives on */
  assert_true(m.size == 9000);
  assert_memory_equal(m.data, data, sizeof data);
  mm_map_close(&m);
  assert_null(m.data);
  mm_map_close(&m);
  assert_true(mm_file_open(&f, at("none"), &err));
  assert_false(mm_map_open(&m, &f, "none", &err));
  assert_string_equal(err.text, "E_IO: none: mmap: Invalid argument");
  mm_file_close(&f);
}

static void assert_content(const char *name, const void *data, size_t n) {
  mm_err err = {0};
  size_t got;
  char *text = mm_file_slurp(at(name), 1 << 20, &got, &err);
  assert_non_null(text);
  assert_int_equal(got, n);
  assert_memory_equal(text, data, n);
  free(text);
}

TEST_BETWEEN(test_write, NULL, reset_faults) {
  uint8_t data[3000];
  fill(data, sizeof data);
  mm_err err = {0};
  int fd = mm_create_at(dirfd_, dir, "written", &err);
  assert_true(fd >= 0);
  fault.dribble = true;
  assert_true(mm_pwrite(fd, "written", data + 1000, 2000, 1000, &err));
  assert_true(mm_pwrite(fd, "written", data, 1000, 0, &err));
  assert_true(mm_fsync(fd, "written", false, &err));
  fault.dribble = false;
  assert_content("written", data, sizeof data);
  fault.dribble = true;
  fault.write_errno = ENOSPC;
  fault.good_calls = 1;
  assert_false(mm_pwrite(fd, "written", data, 10, 77, &err));
  assert_string_equal(err.text, "E_IO: written: offset 84: write: No space left on device");
  mm_err nothing = {0};
  fault.write_nothing = true; /* no progress is an error, not an endless loop */
  assert_false(mm_pwrite(fd, "written", data, 10, 0, &nothing));
  assert_int_equal(nothing.status, MM_IO);
  reset_faults(NULL);
  assert_true(mm_close(fd, "written", &err));
}

TEST_BETWEEN(test_create, NULL, reset_faults) {
  struct stat s;
  mode_t before = umask(027);
  mm_err err = {0}, exists = {0}, linked = {0};
  int fd = mm_create_at(dirfd_, dir, "new", &err);
  umask(before);
  assert_true(fd >= 0);
  assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
  assert_int_equal(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDWR);
  assert_int_equal(fstat(fd, &s), 0);
  assert_int_equal(s.st_mode & 0777, 0640);
  close(fd);
  assert_int_equal(mm_create_at(dirfd_, dir, "new", &exists), -1);
  assert_int_equal(exists.status, MM_IO);
  assert_non_null(strstr(exists.text, at("new")));
  assert_non_null(strstr(exists.text, "create: File exists"));
  assert_int_equal(symlink("victim", at("planted")), 0);
  assert_int_equal(mm_create_at(dirfd_, dir, "planted", &linked), -1);
  assert_int_equal(access(at("victim"), F_OK), -1);
}

TEST_BETWEEN(test_write_file, NULL, reset_faults) {
  mm_err err = {0};
  fault.dribble = true;
  assert_true(mm_write_file_at(dirfd_, dir, "small", "{\"a\": 1}", 8, &err));
  fault.dribble = false;
  assert_content("small", "{\"a\": 1}", 8);
  assert_false(mm_write_file_at(dirfd_, dir, "small", "x", 1, &err)); /* never over an existing one */
  assert_content("small", "{\"a\": 1}", 8);
  int *const faults[] = {&fault.write_errno, &fault.sync_errno, &fault.close_errno};
  static const char *const words[] = {"write: ", "fsync: ", "close: "};
  for (size_t i = 0; i < 3; i++) {
    mm_err io = {0};
    *faults[i] = EIO;
    assert_false(mm_write_file_at(dirfd_, dir, "failed", "data", 4, &io));
    *faults[i] = 0;
    assert_int_equal(io.status, MM_IO);
    assert_non_null(strstr(io.text, words[i]));
    assert_non_null(strstr(io.text, at("failed")));
    assert_int_equal(access(at("failed"), F_OK), -1); /* nothing half-written stays */
  }
}

TEST_BETWEEN(test_fsync_and_close, NULL, reset_faults) {
  static const struct {
    int reason;
    bool directory, ok;
  } cases[] = {{EIO, false, false},    {EIO, true, false},      {EINVAL, true, true},  {ENOTSUP, true, true},
               {EINVAL, false, false}, {ENOTSUP, false, false}, {ENOSPC, true, false}, {0, true, true}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    mm_err err = {0};
    fault.sync_errno = cases[i].reason;
    assert_int_equal(mm_fsync(dirfd_, dir, cases[i].directory, &err), cases[i].ok);
    assert_int_equal(err.status, cases[i].ok ? MM_OK : MM_IO);
  }
  mm_err err = {0};
  fault.close_errno = EDQUOT;
  assert_false(mm_close(dup(dirfd_), "x", &err));
  assert_string_equal(err.text, "E_IO: x: close: Disk quota exceeded");
  mm_err late = {0};
  fault.close_errno = EINTR;
  assert_true(mm_close(dup(dirfd_), "x", &late));
}

TEST_BETWEEN(test_base_names, NULL, reset_faults) {
  char longest[256];
  memset(longest, 'n', sizeof longest);
  static const char *const good[] = {"a", "model-00001-of-00002.safetensors", "...", ".hidden", "a b", "é€", "-rf", "a:b", "..a"};
  static const struct {
    const char *name;
    size_t n;
  } bad[] = {{"", 0},     {".", 1},    {"..", 2},   {"../x", 4},    {"a/../../x", 9}, {"/etc/passwd", 11}, {"a/b", 3},
             {"a\\b", 3}, {"a\0b", 3}, {"a\nb", 3}, {"\x1b[2J", 4}, {"a\x7f", 2},     {"x/", 2},           {"x\0", 2}};
  for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) assert_true(mm_base_name_ok(good[i], strlen(good[i])));
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) assert_false(mm_base_name_ok(bad[i].name, bad[i].n));
  assert_true(mm_base_name_ok(longest, 255));
  assert_false(mm_base_name_ok(longest, 256));
}

/* A path that does not fit is refused by every function that opens it, and names nothing else. */
TEST(test_paths) {
  assert_string_equal(mm_path_of("dir", "name").text, "dir/name");
  static char longer[3 * PATH_MAX];
  memset(longer, '/', sizeof longer - 1);
  const mm_path cut = mm_path_of(longer, "etc/passwd");
  assert_true(strlen(cut.text) >= PATH_MAX);
  errno = 0;
  assert_int_equal(access(cut.text, F_OK), -1);
  assert_int_equal(errno, ENAMETOOLONG);
  mm_err err = {0};
  char parent[PATH_MAX], name[PATH_MAX];
  assert_true(mm_path_split("/usr/../etc/passwd", parent, name, &err));
  assert_string_equal(parent, "/etc");
  assert_string_equal(name, "passwd");
  assert_false(mm_path_split(longer, parent, name, &err));
  assert_string_equal(err.code, "E_IO");
}

int main(void) { return run_unit_tests(set_up, tear_down); }
