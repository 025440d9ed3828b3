/* formats/staging and formats/replaced: names, what is refused, who may remove what, publishing with and without flags of rename, and what
 * the next run finds after a crash. The renames below stand before the C library's, so that a test can take their flags away or make them
 * fail. */
#include "formats/system/staging.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "formats/system/file.h"
#include "tests/unit/unit.h"

static bool no_flags;     /* of renameat2 */
static int good_renames;  /* calls of renameat that succeed before one fails; -1: all */
static char notes[20000]; /* messages to the user */

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  if (no_flags && flags) {
    errno = EINVAL;
    return -1;
  }
  return (int)syscall(SYS_renameat2, from, old, to, new, flags);
}

int renameat(int from, const char *old, int to, const char *new) {
  if (good_renames == 0) {
    errno = EIO;
    return -1;
  }
  if (good_renames > 0) good_renames--;
  return (int)syscall(SYS_renameat2, from, old, to, new, 0);
}

static void noted(const char *line) { snprintf(notes + strlen(notes), sizeof notes - strlen(notes), "%s\n", line); }

static int in_a_folder(void **state) {
  (void)state;
  char folder[] = "/tmp/mm-staging-XXXXXX";
  no_flags = false;
  good_renames = -1;
  notes[0] = 0;
  mm_staging_notes(noted);
  return mkdtemp(folder) && chdir(folder) == 0 ? 0 : -1;
}

static int away(void **state) {
  (void)state;
  char folder[PATH_MAX], command[PATH_MAX + 16];
  if (!getcwd(folder, sizeof folder)) return -1;
  snprintf(command, sizeof command, "rm -rf '%s'", folder);
  return system(command) == 0 && chdir("/") == 0 ? 0 : -1; /* NOLINT(cert-env33-c): a folder of ours */
}

static void put(const char *path, const char *text) {
  FILE *f = fopen(path, "w");
  assert_non_null(f);
  fputs(text, f);
  assert_int_equal(fclose(f), 0);
}

static void has(const char *path, const char *text) {
  char found[64] = "";
  FILE *f = fopen(path, "r");
  if (!f) fail_msg("%s is absent", path);
  size_t n = fread(found, 1, sizeof found - 1, f);
  fclose(f);
  found[n] = 0;
  assert_string_equal(found, text);
}

static bool there(const char *path) { return access(path, F_OK) == 0; }

/* Files of the program are named x. */
static bool ours(const void *ctx, const char *name) {
  assert_string_equal(ctx, "ctx");
  return name[0] == 'x';
}

static void refused(bool ok, mm_err *err, mm_status status, const char *text) {
  assert_false(ok);
  assert_int_equal(err->status, status);
  if (!strstr(err->text, text)) fail_msg("found \"%s\", expected \"%s\" in it", err->text, text);
  *err = (mm_err){0};
}

/* Named, looked at and taken. */
static mm_staging begun(const char *target) {
  mm_staging s = MM_STAGING_NONE;
  mm_err err = {0};
  if (!mm_staging_name(&s, target, NULL, &err) || !mm_staging_look(&s, &err) || !mm_staging_take(&s, false, &err)) fail_msg("%s", err.text);
  return s;
}

TEST_BETWEEN(test_names, in_a_folder, away) {
  mm_err err = {0};
  mm_staging s = MM_STAGING_NONE;
  assert_true(mm_staging_name(&s, "./out/", "pack", &err));
  assert_string_equal(s.new_name, "out");
  assert_string_equal(s.name, ".out.partial-pack");
  assert_string_equal(s.path + strlen(s.path) - strlen("/.out.partial-pack"), "/.out.partial-pack");
  assert_string_equal(s.list, ".out.partial-pack.replaced");
  assert_string_equal(s.aside, ".out.partial-pack.old");
  assert_string_equal(s.mark, ".out.partial-pack.mark");
  mm_staging_close(&s);
  assert_true(mm_staging_name(&s, "out", NULL, &err));
  assert_string_equal(s.name, ".out.partial");
  mm_staging_close(&s);
  static const char *const unusable[] = {".", "..", "/", "a/.."};
  assert_int_equal(mkdir("a", 0777), 0);
  for (size_t i = 0; i < sizeof unusable / sizeof *unusable; i++) {
    refused(mm_staging_name(&s, unusable[i], NULL, &err), &err, MM_USAGE, "found no usable directory name, expected that of one to make");
    mm_staging_close(&s);
  }
  refused(mm_staging_name(&s, "absent/out", NULL, &err), &err, MM_IO, "resolve the parent of: No such file");
  mm_staging_close(&s);
  char longer[5000] = ""; /* cut at PATH_MAX it would name another directory */
  for (int i = 0; i < 818; i++) memcpy(longer + 5L * i, "a/../", 6);
  memcpy(longer + 4090, "outer-name", 11);
  refused(mm_staging_name(&s, longer, NULL, &err), &err, MM_IO, "File name too long");
  mm_staging_close(&s);
}

TEST_BETWEEN(test_outside, in_a_folder, away) {
  mm_err err = {0};
  assert_int_equal(mkdir("source", 0777) | mkdir("source/sub", 0777) | mkdir("other", 0777), 0);
  static const char *const inside[] = {"source", "source/out", "source/sub/out", "source/sub/../out"};
  for (size_t i = 0; i < sizeof inside / sizeof *inside; i++) {
    mm_staging s = MM_STAGING_NONE;
    assert_true(mm_staging_name(&s, inside[i], NULL, &err));
    refused(mm_staging_outside(&s, "source", &err), &err, MM_USAGE, "is, holds or lies in the source, expected one elsewhere");
    mm_staging_close(&s);
  }
  mm_staging s = MM_STAGING_NONE;
  assert_true(mm_staging_name(&s, "source", NULL, &err)); /* it holds the source */
  refused(mm_staging_outside(&s, "source/sub", &err), &err, MM_USAGE, "is, holds or lies in the source, expected one elsewhere");
  mm_staging_close(&s);
  static const char *const outside[] = {"out", "other", "other/out", "sourced"};
  for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
    assert_true(mm_staging_name(&s, outside[i], NULL, &err));
    assert_true(mm_staging_outside(&s, "source", &err));
    mm_staging_close(&s);
  }
  assert_true(mm_staging_name(&s, "out", NULL, &err));
  refused(mm_staging_outside(&s, "absent", &err), &err, MM_IO, "absent: list: No such file");
  mm_staging_close(&s);
}

TEST_BETWEEN(test_look, in_a_folder, away) {
  mm_err err = {0};
  mm_staging s = MM_STAGING_NONE;
  assert_true(mm_staging_name(&s, "out", NULL, &err));
  assert_true(mm_staging_look(&s, &err));
  assert_int_equal(s.found, MM_TARGET_ABSENT);
  assert_int_equal(mkdir("out", 0777), 0);
  assert_true(mm_staging_look(&s, &err));
  assert_int_equal(s.found, MM_TARGET_EMPTY);
  put("out/one", "1");
  put("out/three", "333");
  assert_int_equal(mkdir("out/sub", 0777), 0);
  assert_true(mm_staging_look(&s, &err));
  assert_int_equal(s.found, MM_TARGET_FULL);
  assert_int_equal(s.old_count, 2); /* the directory in it is nobody's to remove */
  for (size_t i = 0; i < 2; i++) assert_int_equal(s.old[i].size, strcmp(s.old[i].name, "one") == 0 ? 1 : 3);
  mm_staging_close(&s);
  put("file", "");
  assert_true(mm_staging_name(&s, "file", NULL, &err));
  refused(mm_staging_look(&s, &err), &err, MM_USAGE, "not a directory");
  mm_staging_close(&s);
  assert_true(mm_staging_name(&s, "/proc", NULL, &err));
  refused(mm_staging_look(&s, &err), &err, MM_USAGE, "mount point");
  mm_staging_close(&s);
}

TEST_BETWEEN(test_take, in_a_folder, away) {
  mm_err err = {0};
  mm_staging one = begun("out"), two = MM_STAGING_NONE;
  assert_true(one.made);
  struct stat st;
  assert_int_equal(stat(".out.partial", &st), 0);
  assert_int_equal(st.st_mode & 0777, 0700);
  assert_true(mm_staging_name(&two, "out", NULL, &err));
  refused(mm_staging_take(&two, false, &err), &err, MM_LOCKED, "another run");
  refused(mm_staging_take(&two, true, &err), &err, MM_LOCKED, "another run");
  close(one.dir);
  assert_true(mm_staging_take(&one, true, &err));
  assert_false(one.made);
  assert_true(mm_staging_take(&two, true, &err)); /* shared runs meet */
  close(two.dir);
  two.dir = -1;
  refused(mm_staging_take(&two, false, &err), &err, MM_LOCKED, "another run");
  mm_staging_close(&one);
  assert_true(mm_staging_take(&two, false, &err)); /* free again */
  mm_staging_close(&two);
}

TEST_BETWEEN(test_clear_and_reserve, in_a_folder, away) {
  mm_err err = {0};
  mm_staging s = begun("out");
  put(".out.partial/x1", "");
  put(".out.partial/theirs", "kept");
  put(".out.partial/x2", "");
  assert_int_equal(mkdir(".out.partial/xdir", 0777), 0);
  refused(mm_staging_clear(&s, ours, "ctx", &err), &err, MM_USAGE, "no run of this program wrote there");
  assert_false(there(".out.partial/x1") || there(".out.partial/x2")); /* also behind what was refused */
  has(".out.partial/theirs", "kept");
  assert_true(there(".out.partial/xdir"));
  unlink(".out.partial/theirs");
  rmdir(".out.partial/xdir");
  put(".out.partial/x3", "");
  assert_true(mm_staging_clear(&s, ours, "ctx", &err));
  assert_false(there(".out.partial/x3"));
  assert_true(mm_staging_capacity(&s, 1, &err));
  refused(mm_staging_capacity(&s, UINT64_MAX, &err), &err, MM_IO, "E_SPACE");
  mm_staging_close(&s);
}

/* Onto an absent name and onto an empty directory, with flags and without. */
TEST_BETWEEN(test_appear, in_a_folder, away) {
  for (int i = 0; i < 4; i++) {
    mm_err err = {0};
    no_flags = i & 1;
    if (i & 2) assert_int_equal(mkdir("out", 0700), 0);
    mm_staging s = begun("out");
    put(".out.partial/x", "new");
    mode_t before = umask(027);
    assert_true(mm_staging_publish(&s, &err));
    assert_int_equal(umask(before), 027);
    has("out/x", "new");
    struct stat st;
    assert_int_equal(stat("out", &st), 0);
    assert_int_equal(st.st_mode & 0777, 0750);
    assert_false(there(".out.partial"));
    mm_staging_close(&s);
    unlink("out/x");
    assert_int_equal(rmdir("out"), 0);
  }
}

/* The name was taken while the run worked: what came stays, and so does what was staged. */
TEST_BETWEEN(test_name_taken, in_a_folder, away) {
  for (int i = 0; i < 2; i++) {
    mm_err err = {0};
    no_flags = i == 1;
    mm_staging s = begun("out");
    put(".out.partial/x", "new");
    assert_int_equal(mkdir("out", 0777), 0);
    put("out/theirs", "theirs");
    refused(mm_staging_publish(&s, &err), &err, MM_IO, "was not there when this run began");
    has("out/theirs", "theirs");
    has(".out.partial/x", "new");
    mm_staging_close(&s);
    unlink("out/theirs");
    rmdir("out");
  }
}

static void make_old(void) {
  assert_int_equal(mkdir("out", 0777), 0);
  put("out/x", "old");
  put("out/y", "older");
}

TEST_BETWEEN(test_replace, in_a_folder, away) {
  for (int i = 0; i < 2; i++) {
    mm_err err = {0};
    no_flags = i == 1;
    make_old();
    mm_staging s = begun("out");
    put(".out.partial/x", "new");
    assert_true(mm_staging_publish(&s, &err));
    mm_staging_close(&s);
    has("out/x", "new");
    assert_false(there("out/y") || there(".out.partial") || there(".out.partial.old") || there(".out.partial.replaced") ||
                 there("out.kept"));
    assert_string_equal(notes, "");
    unlink("out/x");
    rmdir("out");
  }
}

/* Files added to the old directory, or altered in it, while the run worked are not removed. */
TEST_BETWEEN(test_replace_keeps, in_a_folder, away) {
  mm_err err = {0};
  make_old();
  assert_int_equal(mkdir("out.kept", 0777), 0);
  put("out.kept/earlier", "");
  mm_staging s = begun("out");
  put(".out.partial/x", "new");
  put("out/added", "theirs");
  put("out/y", "altered");
  assert_true(mm_staging_publish(&s, &err));
  mm_staging_close(&s);
  has("out/x", "new");
  has("out.kept-2/added", "theirs");
  has("out.kept-2/y", "altered");
  assert_false(there("out.kept-2/x") || there("out/added") || there(".out.partial"));
  assert_non_null(strstr(notes, "kept, in \"out.kept-2\" next to it"));
}

/* Another directory has the name since: neither is touched. */
TEST_BETWEEN(test_replace_another, in_a_folder, away) {
  mm_err err = {0};
  make_old();
  mm_staging s = begun("out");
  assert_int_equal(rename("out", "moved"), 0);
  make_old();
  refused(mm_staging_publish(&s, &err), &err, MM_IO, "another directory than when this run began");
  has("out/x", "old");
  has("moved/x", "old");
  mm_staging_close(&s);
}

/* Without flags, the second rename fails and so does taking the first back: the next run puts the old one back, or removes it when the new
 * one has the name. */
TEST_BETWEEN(test_recover, in_a_folder, away) {
  for (int stage = 0; stage < 2; stage++) {
    mm_err err = {0};
    no_flags = true;
    make_old();
    mm_staging s = begun("out");
    put(".out.partial/x", "new");
    good_renames = 1;
    refused(mm_staging_publish(&s, &err), &err, MM_IO, "publish");
    assert_false(there("out"));
    has(".out.partial.old/x", "old");
    good_renames = -1;
    /* The list went with the failure; a crash would have left it. */
    char line[256];
    struct stat dir, x;
    assert_int_equal(stat(".out.partial.old", &dir) | stat(".out.partial.old/x", &x), 0);
    mm_file_id id = mm_file_id_of(&x);
    snprintf(line, sizeof line, "minimax-replaced 1 %llu\n%llu %llu %lld %lld x\n", (unsigned long long)dir.st_ino,
             (unsigned long long)id.ino, (unsigned long long)id.size, (long long)id.mtime_ns, (long long)id.ctime_ns);
    put(".out.partial.replaced", line);
    mm_staging_close(&s);
    if (stage == 1) assert_int_equal(rename(".out.partial", "out"), 0);
    assert_true(mm_staging_name(&s, "out", NULL, &err));
    if (!mm_staging_recover(&s, &err)) fail_msg("%s", err.text);
    assert_false(there(".out.partial.old") || there(".out.partial.replaced"));
    has("out/x", stage == 0 ? "old" : "new");
    if (stage == 1) has("out.kept/y", "older"); /* the list did not name it */
    assert_true(mm_staging_recover(&s, &err));  /* nothing is left to do */
    mm_staging_close(&s);
    assert_int_equal(system("rm -rf out out.kept .out.partial"), 0); /* NOLINT(cert-env33-c): names of ours */
  }
}

TEST_BETWEEN(test_begin_anew, in_a_folder, away) {
  mm_err err = {0};
  mm_staging s = MM_STAGING_NONE;
  assert_int_equal(mkdir("source", 0777), 0);
  assert_true(mm_staging_open(&s, "out", "pack", "source", 1, ours, "ctx", &err));
  assert_true(there(".out.partial-pack.mark"));
  put(".out.partial-pack/x1", "half");
  mm_staging_close(&s); /* killed */
  assert_true(mm_staging_open(&s, "out", "pack", "source", 1, ours, "ctx", &err));
  assert_false(there(".out.partial-pack/x1"));
  put(".out.partial-pack/x2", "half");
  mm_staging_discard(&s, ours, "ctx");
  assert_false(there(".out.partial-pack") || there(".out.partial-pack.mark"));
  mm_staging_close(&s);

  assert_true(mm_staging_open(&s, "out", "pack", "source", 1, ours, "ctx", &err));
  put(".out.partial-pack/x3", "half");
  put(".out.partial-pack/alien", "theirs"); /* while the program runs */
  mm_staging_discard(&s, ours, "ctx");
  assert_false(there(".out.partial-pack/x3"));
  has(".out.partial-pack/alien", "theirs");
  assert_true(there(".out.partial-pack.mark"));
  mm_staging_close(&s);
  assert_true(unlink(".out.partial-pack/alien") == 0 && rmdir(".out.partial-pack") == 0 && unlink(".out.partial-pack.mark") == 0);

  assert_int_equal(mkdir(".out.partial-pack", 0777), 0); /* a user's */
  put(".out.partial-pack/x", "theirs");
  refused(mm_staging_open(&s, "out", "pack", "source", 1, ours, "ctx", &err), &err, MM_USAGE, "no interrupted run left");
  has(".out.partial-pack/x", "theirs");
  mm_staging_close(&s);
  unlink(".out.partial-pack/x");
  assert_true(mm_staging_open(&s, "out", "pack", "source", 1, ours, "ctx", &err)); /* an empty one will do */
  put(".out.partial-pack/x", "new");
  assert_true(mm_staging_publish(&s, &err));
  mm_staging_discard(&s, ours, "ctx");
  mm_staging_close(&s);
  has("out/x", "new");
  assert_false(there(".out.partial-pack.mark"));
  refused(mm_staging_open(&s, "out", "pack", "source", 1, ours, "ctx", &err), &err, MM_USAGE, "expected a new one");
  mm_staging_close(&s);
  refused(mm_staging_open(&s, "new", "pack", "source", UINT64_MAX, ours, "ctx", &err), &err, MM_IO, "E_SPACE");
  assert_false(there(".new.partial-pack") || there(".new.partial-pack.mark"));
  mm_staging_close(&s);
}

int main(void) { return run_unit_tests(NULL, NULL); }
