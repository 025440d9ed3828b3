/* Waits of --follow, each with an end; and the first one, for the texts by which a plan is made. */
#include "convert/decode/follow_wait.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "convert/source/hf.h"
#include "convert/source/index.h"
#include "convert/source/locate.h"
#include "formats/safetensors.h"

#define POLL_MS    50
#define LOOK_POLLS 20 /* polls between looks at the whole directory */
#define UNFINISHED 60 /* seconds of quiet where a temporary name is left: an older download's, perhaps */

static void pause_ms(int ms) {
  const struct timespec t = {0, ms * 1000000L};
  nanosleep(&t, NULL);
}

/* Adds the names, sizes and times of dir/below to the wait's number. */
static void look_at(mm_wait *w, const char *below, uint64_t *change) {
  const mm_path path = mm_path_of(w->dir, below);
  DIR *d = opendir(path.text);
  const char *name;
  struct stat s;
  if (!d) return;
  while (mm_dir_next(d, path.text, &name, MM_IGNORED) && name) {
    if (fstatat(dirfd(d), name, &s, AT_SYMLINK_NOFOLLOW) != 0) continue;
    uint64_t x = (uint64_t)s.st_ino;
    for (const char *c = name; *c; c++) x = mm_scatter(x ^ (uint8_t)*c);
    *change += mm_scatter(x ^ mm_scatter((uint64_t)s.st_size ^ mm_scatter((uint64_t)s.st_mtim.tv_sec ^ (uint64_t)s.st_mtim.tv_nsec << 32)));
    if (mm_ends_with(name, ".incomplete") || mm_ends_with(name, ".part") || mm_ends_with(name, ".aria2"))
      snprintf(w->unfinished, sizeof w->unfinished, "%s/%s", below, name);
  }
  closedir(d);
}

void mm_wait_look(mm_wait *w) {
  uint64_t change = 1;
  w->unfinished[0] = 0;
  look_at(w, ".", &change);
  look_at(w, ".cache/huggingface/download", &change);
  look_at(w, "../../blobs", &change);
  if (change == w->change) return;
  w->change = change;
  w->since = mm_now();
}

bool mm_wait_once(mm_wait *w, const char *what, const char *more, mm_err *err) {
  if (atomic_load(w->o->stop))
    return mm_fail(err, MM_INTERRUPTED, "E_INTERRUPTED", mm_at(NULL, NULL), "stopped by a signal; --resume continues");
  if (w->polls++ % LOOK_POLLS == 0) mm_wait_look(w);
  if (w->polls > LOOK_POLLS && w->o->waiting && what != w->named) w->o->waiting(w->named = what);
  if (mm_now() - w->since >= w->o->timeout_s)
    return mm_fail(err, MM_INTERRUPTED, "E_FOLLOW", mm_at(mm_path_of(w->dir, what).text, NULL),
                   "found no such file whole, and no change of its directory for %.0f s%s; --resume continues when the download does",
                   w->o->timeout_s, more);
  pause_ms(POLL_MS);
  return true;
}

bool mm_wait_still(int64_t changed_ns, double quiet_s) {
  struct timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now) != 0) return true;
  const double age = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec - 1e-9 * (double)changed_ns;
  return age < 0 || age >= (quiet_s < 1 ? quiet_s : 1);
}

static bool is_settled(const char *path, double quiet_s) {
  struct stat s;
  return stat(path, &s) == 0 && mm_wait_still(s.st_ctim.tv_sec * INT64_C(1000000000) + s.st_ctim.tv_nsec, quiet_s);
}

bool mm_wait_quiet(const mm_wait *w) {
  return mm_now() - w->since >= (w->unfinished[0] && w->o->quiet_s < UNFINISHED ? UNFINISHED : w->o->quiet_s);
}

/* One that is no JSON is written in place, as curl and rsync do, or after a quiet time what it is to be. */
static bool text_is_whole(const mm_wait *w, const char *name) {
  const mm_path path = mm_path_of(w->dir, name);
  if (!is_settled(path.text, w->o->quiet_s)) return false;
  mm_json *j = mm_json_load(path.text, MM_INDEX_MAX, MM_IGNORED);
  mm_json_free(j);
  return j || mm_wait_quiet(w);
}

uint8_t *mm_wait_header(const mm_file *f, const char *path, size_t *n, mm_err *err) {
  uint8_t prefix[8];
  uint64_t length;
  if (f->size < sizeof prefix || !mm_file_read(f, path, prefix, sizeof prefix, 0, err)) return NULL;
  memcpy(&length, prefix, sizeof length);
  if (length == 0 || (length <= MM_ST_HEADER_MAX && length > f->size - sizeof prefix)) return NULL; /* allocated before it is written */
  *n = (size_t)mm_min(f->size, sizeof prefix + (length <= MM_ST_HEADER_MAX ? length : 512));
  uint8_t *header = mm_calloc(*n, 1, err);
  if (header && mm_file_read(f, path, header, *n, 0, err)) return header;
  free(header);
  return NULL;
}

bool mm_wait_partial(const char *dir, const char *name) {
  static const char *const partial[] = {".incomplete", ".part", ".aria2"};
  char text[NAME_MAX + sizeof ".incomplete"];
  struct stat s;
  for (size_t i = 0; i < sizeof partial / sizeof *partial; i++) {
    snprintf(text, sizeof text, "%s%s", name, partial[i]);
    if (lstat(mm_path_of(dir, text).text, &s) == 0) return true;
  }
  return false;
}

/* True if the only weight file is there and whole: then there may be no index. False with err unset while it is not. */
static bool single_whole(const char *dir, double quiet_s, mm_err *err) {
  const mm_path path = mm_path_of(dir, MM_SINGLE_NAME);
  mm_file f = MM_FILE_NONE;
  mm_st st = {0};
  mm_err reason = {0};
  size_t n = 0;
  if (mm_wait_partial(dir, MM_SINGLE_NAME) || !is_settled(path.text, quiet_s)) return false;
  if (!mm_file_open(&f, path.text, &reason)) return strcmp(reason.code, "E_FS_MISSING") != 0 && mm_fail_as(err, &reason);
  uint8_t *header = mm_wait_header(&f, path.text, &n, err);
  const bool whole = header && mm_st_parse(&st, path.text, header, n, f.size, MM_BAD_INPUT, &reason);
  if (header && !whole && strcmp(reason.code, "E_TRUNCATED") != 0) mm_fail_as(err, &reason);
  mm_st_close(&st);
  free(header);
  mm_file_close(&f);
  return whole;
}

/* Waits for the index, or for the only weight file and then for a quiet time, in which no index has come. */
static bool await_names(mm_wait *w, bool *single, mm_err *err) {
  while (!text_is_whole(w, MM_INDEX_NAME)) {
    *single = single_whole(w->dir, w->o->quiet_s, err) && mm_wait_quiet(w);
    if (err->status != MM_OK) return false;
    if (*single && w->o->frees)
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(mm_path_of(w->dir, MM_SINGLE_NAME).text, NULL),
                     "found --delete-source with a checkpoint of one file, which is needed to the end: convert it without, then remove it");
    if (*single) return true;
    if (!mm_wait_once(w, MM_INDEX_NAME, "", err)) return false;
  }
  return true;
}

bool mm_follow_texts(const char *given, const mm_follow_options *o, bool *single, mm_err *err) {
  mm_arena arena = {0};
  const char *dir = mm_source_locate(given, &arena, err);
  mm_wait w = {.o = o, .dir = dir, .since = mm_now()};
  *single = false;
  bool ok = dir;
  while (ok && !text_is_whole(&w, "config.json")) ok = mm_wait_once(&w, "config.json", "", err);
  ok = ok && await_names(&w, single, err);
  mm_arena_close(&arena);
  return ok;
}

bool mm_follow_description(const mm_hf *hf, const mm_follow_options *o, bool *came, mm_err *err) {
  const size_t first = hf->quantization.gptq; /* config.json describes it: quantize_config.json alone says more */
  mm_wait w = {.o = o, .dir = hf->dir, .since = mm_now()};
  *came = false;
  if (mm_hf_described(hf)) return true;
  for (;;) {
    for (size_t i = first; mm_hf_description(i); i++) *came = *came || text_is_whole(&w, mm_hf_description(i));
    mm_wait_look(&w);
    if (*came || mm_wait_quiet(&w)) return true;
    if (!mm_wait_once(&w, mm_hf_description(first), "", err)) return false;
  }
}
