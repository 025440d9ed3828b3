/* Waiting for the files of a download, checking them as they come, and removing them when they are done with. */
#include "convert/decode/follow.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "convert/decode/follow_wait.h"
#include "convert/decode/forms.h"
#include "convert/source/encoding.h"
#include "formats/records.h"
#include "formats/system/staging.h"

typedef enum mm_arrival { MM_AWAITED, MM_ARRIVED, MM_FREED } mm_arrival;

typedef struct mm_followed_file {
  _Atomic int state;
  bool recorded, refetched; /* its header is in the record; it came again after it was freed */
  bool learned;             /* the plan is made of its header, too */
  mm_file_id id;            /* of the record */
} mm_followed_file;

struct mm_follow {
  mm_hf *hf;
  mm_follow_options o;
  pthread_mutex_t lock; /* of arrivals and of the record */
  mm_followed_file *file;
  mm_hf_tensor **original; /* [tensor_count], by their names in the index */
  mm_digest names;         /* of all names and files of the index, and of the directory */
  mm_records record;
  bool record_there; /* an interrupted run left one */
  _Atomic(const char *) waiting;
  pthread_mutex_t failing;
  _Atomic bool failed;
  mm_err reason;
};

/* Payload of a record; the header's bytes follow ARRIVED, the digest of sort_names BEGUN. */
typedef struct mm_source_record {
  uint32_t what, file;
  uint64_t size, ino;
  int64_t mtime_ns, ctime_ns;
} mm_source_record;
enum { BEGUN = 1, ARRIVED, FREED }; /* of a record */
static const char record_kind[8] = MM_FOLLOW_HEAD "01\n";

static bool exists(const char *path) {
  struct stat s;
  return lstat(path, &s) == 0;
}

static bool same_id(const mm_file_id *a, const mm_file_id *b) {
  return a->size == b->size && a->ino == b->ino && a->mtime_ns == b->mtime_ns && a->ctime_ns == b->ctime_ns;
}

/* ---- a file that arrives ---- */

static int by_original(const void *a, const void *b) {
  return strcmp((*(mm_hf_tensor *const *)a)->original, (*(mm_hf_tensor *const *)b)->original);
}

/* All tensors by their names in the index, to be freed, and the digest of all names, files and the directory: models of one family have the
 * same names, files and headers. A directory that is renamed keeps its number, a copy has another. NULL: no memory, or no directory. */
static mm_hf_tensor **sort_names(const mm_hf *hf, mm_digest *names, mm_err *err) {
  mm_sha256_state s;
  struct stat dir;
  if (stat(hf->dir, &dir) != 0) {
    mm_fail_errno(err, mm_at(hf->dir, NULL), "look at", errno);
    return NULL;
  }
  const uint64_t number = dir.st_ino;
  mm_hf_tensor **original = mm_calloc(hf->tensor_count, sizeof *original, err);
  if (!original) return NULL;
  for (size_t i = 0; i < hf->tensor_count; i++) original[i] = &hf->tensor[i];
  mm_sort(original, hf->tensor_count, sizeof *original, by_original);
  mm_sha256_begin(&s);
  for (size_t i = 0; i < hf->tensor_count; i++) {
    const mm_hf_tensor *t = original[i];
    const char *file = hf->file[t->file].name;
    mm_sha256_add(&s, t->original, strlen(t->original) + 1);
    mm_sha256_add(&s, file, strlen(file) + 1);
  }
  mm_sha256_add(&s, &number, sizeof number);
  *names = mm_sha256_end(&s);
  return original;
}

static mm_hf_tensor *find_original(const struct mm_follow *x, const char *name) {
  const mm_hf_tensor key = {.original = name}, *at = &key;
  mm_hf_tensor **t = bsearch(&at, x->original, x->hf->tensor_count, sizeof *x->original, by_original);
  return t ? *t : NULL;
}

/* What the plan assumes of a tensor is what its header says. */
static bool as_planned(const mm_hf *hf, const mm_hf_tensor *t, const mm_st_tensor *s, mm_err *err) {
  char found[128], expected[128];
  if (!t->used || (t->dtype == s->dtype && mm_shape_equal(&t->shape, &s->shape))) return true;
  return mm_fail(
      err, MM_UNSUPPORTED, "E_FOLLOW", mm_hf_at(hf, t),
      "found %s %s, expected %s %s, which --follow plans with before the headers are there: convert the whole download without it",
      mm_dtype_name(s->dtype), mm_shape_text(&s->shape, found, sizeof found), mm_dtype_name(t->dtype),
      mm_shape_text(&t->shape, expected, sizeof expected));
}

/* Takes what a file's header says. */
static bool take_header(struct mm_follow *x, uint32_t file, const mm_st *st, mm_err *err) {
  mm_hf *hf = x->hf;
  const mm_hf_file *f = &hf->file[file];
  size_t expected = 0;
  for (size_t i = 0; i < st->count; i++) {
    const mm_st_tensor *s = &st->tensor[i];
    mm_hf_tensor *t = find_original(x, s->name);
    if (!mm_hf_listed(hf, t, file, s, err) || !as_planned(hf, t, s, err)) return false;
    mm_hf_take(t, s);
  }
  for (size_t i = 0; i < hf->tensor_count; i++) {
    expected += hf->tensor[i].file == file;
    if (hf->tensor[i].file == file && !hf->tensor[i].found)
      return mm_fail(err, MM_BAD_INPUT, "E_IDX_TENSOR", mm_hf_at(hf, &hf->tensor[i]),
                     "found in the index, but not in this file, expected in both");
  }
  return expected == st->count ||
         mm_fail(err, MM_BUG, "E_BUG", mm_at(f->path, NULL), "found %zu tensors, expected %zu", st->count, expected);
}

static bool record(struct mm_follow *x, uint32_t what, uint32_t file, const void *more, size_t n, mm_err *err) {
  const mm_file_id id = x->hf->file && what != BEGUN ? x->hf->file[file].id : (mm_file_id){0};
  const mm_source_record r = {what, file, id.size, id.ino, id.mtime_ns, id.ctime_ns};
  uint8_t *payload = mm_calloc(sizeof r + n, 1, err);
  if (!payload) return false;
  memcpy(payload, &r, sizeof r);
  if (n) memcpy(payload + sizeof r, more, n);
  const bool ok = mm_records_add(&x->record, payload, sizeof r + n, err);
  free(payload);
  return ok;
}

/* False with err unset while the file is not whole. */
static bool take_file(struct mm_follow *x, uint32_t file, const mm_file *f, mm_err *err) {
  mm_hf_file *to = &x->hf->file[file];
  mm_followed_file *own = &x->file[file];
  mm_st st = {0};
  mm_err reason = {0};
  size_t n = 0;
  if (!same_id(&own->id, &f->id) && own->recorded && !own->refetched)
    return mm_fail(err, MM_USAGE, "E_RESUME", mm_at(to->path, NULL),
                   "found this file changed, moved or copied since the interrupted run; --restart discards it");
  if (!mm_wait_still(f->id.ctime_ns, x->o.quiet_s)) return false;
  uint8_t *header = mm_wait_header(f, to->path, &n, err);
  bool ok = header && mm_st_parse(&st, to->path, header, n, f->size, MM_BAD_INPUT, &reason);
  if (!ok && header && strcmp(reason.code, "E_TRUNCATED") != 0) mm_fail_as(err, &reason);
  if (ok && own->recorded && !mm_digest_equal(&to->header, &st.header))
    ok = mm_fail(err, MM_USAGE, "E_RESUME", mm_at(to->path, NULL), "found another header than before it was freed");
  ok = ok && take_header(x, file, &st, err);
  if (ok) {
    to->id = f->id;
    to->header = st.header;
    ok = (own->recorded && !own->refetched) || x->record.fd < 0 || record(x, ARRIVED, file, header, n, err);
  }
  if (ok) {
    own->recorded = true;
    own->refetched = false;
    own->id = f->id;
    atomic_store(&own->state, MM_ARRIVED);
  }
  mm_st_close(&st);
  free(header);
  return ok;
}

/* Looks for the file once. False with err unset while it is not whole. */
static bool look_for(struct mm_follow *x, uint32_t file, mm_err *err) {
  const mm_hf_file *f = &x->hf->file[file];
  mm_err reason = {0};
  mm_file open_file = MM_FILE_NONE;
  struct stat s;
  if (mm_wait_partial(x->hf->dir, f->name)) return false;
  if (lstat(f->path, &s) != 0 || !mm_hf_inside(x->hf, f->path, err)) return false;
  if (x->o.frees && S_ISLNK(s.st_mode))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(f->path, NULL),
                   "found --delete-source with a link, whose file other snapshots of a Hub cache may need: fetch to a folder (hf download "
                   "--local-dir)");
  if (!mm_file_open(&open_file, f->path, &reason)) return strcmp(reason.code, "E_FS_MISSING") != 0 && mm_fail_as(err, &reason);
  const bool ok = take_file(x, file, &open_file, err);
  mm_file_close(&open_file);
  return ok;
}

static bool fail_freed(const mm_hf *hf, uint32_t file, mm_err *err) {
  return mm_fail(
      err, MM_INTEGRITY, "E_FREED", mm_at(hf->file[file].path, NULL),
      "found it freed by --delete-source, but a part of the output does not hold what was made of it: fetch this file again, then "
      "--resume");
}

/* With the lock held, so that one thread looks and the others wait for it. */
static bool await(struct mm_follow *x, uint32_t file, mm_err *err) {
  const mm_hf *hf = x->hf;
  mm_wait w = {.o = &x->o, .dir = hf->dir, .since = mm_now()};
  char more[64];
  size_t absent = 0;
  for (;;) {
    if (atomic_load(&x->failed)) return mm_fail_as(err, &x->reason);
    const int state = atomic_load(&x->file[file].state);
    if (state == MM_FREED) return fail_freed(hf, file, err);
    if (state == MM_ARRIVED || look_for(x, file, err)) break;
    if (err->status != MM_OK) return false;
    atomic_store(&x->waiting, hf->file[file].name);
    absent = 0;
    for (uint32_t i = 0; i < hf->file_count; i++) absent += atomic_load(&x->file[i].state) == MM_AWAITED && !exists(hf->file[i].path);
    snprintf(more, sizeof more, " (of %zu files, %zu are not there)", hf->file_count, absent);
    w.named = hf->file[file].name; /* progress says it */
    if (!mm_wait_once(&w, hf->file[file].name, more, err)) return false;
  }
  return true;
}

/* A quantize_config.json that comes behind the plan has to mean the zero points that the plan was made with. */
static bool same_zeros(const mm_hf *hf, mm_err *err) {
  const mm_quantization *own = &hf->quantization;
  const mm_path path = mm_path_of(hf->dir, "quantize_config.json");
  if (!own->gptq || !exists(path.text)) return true;
  mm_hf other = {0};
  mm_json *j = mm_json_load(path.text, MM_CONFIG_MAX, MM_IGNORED); /* NULL while it is not whole */
  const bool read = j && mm_quantization_parse(&other, j, path.text, "gptq", MM_IGNORED);
  const bool same = !read || other.quantization.zero_less == own->zero_less || (own->less_assumed && other.quantization.less_assumed);
  mm_json_free(j);
  mm_arena_close(&other.arena);
  return same ||
         mm_fail(err, MM_UNSUPPORTED, "E_FOLLOW", mm_at(path.text, NULL),
                 "found another format of zero points than that of the plan, which was made before this file came: convert the whole "
                 "download without --follow");
}

/* Waits for the file. MM_INTERRUPTED E_FOLLOW: it did not come, or the program is to stop. MM_INTEGRITY E_FREED: it was freed, but is
 * needed again. Any header that is not what the plan assumes is an error of its own. */
static bool await_file(const mm_hf *hf, uint32_t file, mm_err *err) {
  struct mm_follow *x = hf->follow;
  if (atomic_load(&x->file[file].state) == MM_ARRIVED) return true;
  pthread_mutex_lock(&x->lock);
  const bool ok = same_zeros(hf, err) && await(x, file, err);
  atomic_store(&x->waiting, NULL);
  pthread_mutex_unlock(&x->lock);
  return ok;
}

bool mm_follow_await_all(const mm_hf *hf, mm_err *err) {
  static const char tokenizer[] = "tokenizer.json";
  struct mm_follow *x = hf->follow;
  for (uint32_t i = 0; i < hf->file_count; i++)
    if (!hf->file[i].freed && !await_file(hf, i, err)) return false;
  mm_wait w = {.o = &x->o, .dir = hf->dir, .since = mm_now()};
  const mm_path path = mm_path_of(hf->dir, tokenizer);
  bool ok = true;
  for (;;) {
    mm_wait_look(&w);
    const bool there = exists(path.text);
    if (there && mm_wait_quiet(&w)) break;
    atomic_store(&x->waiting, there ? "files that may still come" : tokenizer);
    if (!(ok = mm_wait_once(&w, there && w.unfinished[0] ? w.unfinished : tokenizer, "", err))) break;
  }
  atomic_store(&x->waiting, NULL);
  return ok && same_zeros(hf, err);
}

void mm_follow_abandon(const mm_hf *hf, const mm_err *reason) {
  struct mm_follow *x = hf->follow;
  if (!x) return;
  pthread_mutex_lock(&x->failing);
  if (x->reason.status == MM_OK) x->reason = *reason;
  pthread_mutex_unlock(&x->failing);
  atomic_store(&x->failed, true);
}

bool mm_follow_look(const mm_hf *hf, uint32_t file, bool *there, mm_err *err) {
  struct mm_follow *x = hf->follow;
  pthread_mutex_lock(&x->lock);
  *there = atomic_load(&x->file[file].state) == MM_ARRIVED || look_for(x, file, err);
  pthread_mutex_unlock(&x->lock);
  return err->status == MM_OK;
}

bool mm_follow_frees(const mm_hf *hf) { return hf->follow && hf->follow->o.frees; }
const char *mm_follow_waiting(const mm_hf *hf) { return hf->follow ? atomic_load(&hf->follow->waiting) : NULL; }

bool mm_follow_proven(const mm_hf *hf) {
  uint64_t total = 0;
  bool all = true, sized = hf->total_given;
  for (uint32_t i = 0; i < hf->file_count; i++) all = all && atomic_load(&hf->follow->file[i].state) != MM_AWAITED;
  for (size_t i = 0; i < hf->tensor_count; i++) {
    total += hf->tensor[i].bytes;
    sized = sized && hf->tensor[i].bytes > 0;
  }
  return all || (sized && total == hf->total_size);
}

/* ---- the record ---- */

static bool set_freed(struct mm_follow *x, uint32_t file) {
  x->hf->file[file].freed = true;
  atomic_store(&x->file[file].state, MM_FREED);
  return true;
}

bool mm_follow_free(const mm_hf *hf, uint32_t file, mm_err *err) {
  struct mm_follow *x = hf->follow;
  const mm_hf_file *f = &hf->file[file];
  mm_file now = MM_FILE_NONE;
  mm_err reason = {0};
  const bool same = mm_file_open(&now, f->path, &reason) && same_id(&now.id, &f->id);
  mm_file_close(&now);
  if (!same)
    return mm_fail(err, MM_IO, "E_CHANGED", mm_at(f->path, NULL),
                   "found another file, or a change, since its header was read: it is not removed");
  if (!(x->record.fd < 0 || record(x, FREED, file, NULL, 0, err))) return false;
  return (unlink(f->path) == 0 || mm_fail_errno(err, mm_at(f->path, NULL), "remove", errno)) && set_freed(x, file);
}

static bool other_source(const struct mm_follow *x, mm_err *err) {
  return mm_fail(err, MM_USAGE, "E_RESUME", mm_at(x->record.name, NULL),
                 "found a run of another source, or of this one in another directory, expected the same to continue; "
                 "--restart discards it");
}

/* Takes the header that an earlier run read. */
static bool take_recorded(struct mm_follow *x, uint32_t file, const mm_file_id *id, const uint8_t *header, size_t n, mm_err *err) {
  mm_hf_file *f = &x->hf->file[file];
  mm_st st = {0};
  const bool ok = mm_st_parse(&st, f->path, header, n, id->size, MM_BAD_INPUT, err) && take_header(x, file, &st, err);
  f->id = *id;
  f->header = st.header;
  x->file[file].id = *id;
  x->file[file].recorded = true;
  mm_st_close(&st);
  return ok;
}

static bool read_record(void *ctx, const uint8_t *payload, size_t n, mm_err *err) {
  struct mm_follow *x = ctx;
  mm_source_record r;
  if (n < sizeof r) return other_source(x, err);
  memcpy(&r, payload, sizeof r);
  if (r.what == BEGUN)
    return (n == sizeof r + sizeof x->names.byte && memcmp(payload + sizeof r, x->names.byte, sizeof x->names.byte) == 0) ||
           other_source(x, err);
  if (r.file >= x->hf->file_count || (r.what != ARRIVED && r.what != FREED)) return other_source(x, err);
  x->hf->file[r.file].freed = r.what == FREED;
  const mm_file_id id = {.size = r.size, .ino = r.ino, .mtime_ns = r.mtime_ns, .ctime_ns = r.ctime_ns};
  return r.what == FREED || take_recorded(x, r.file, &id, payload + sizeof r, n - sizeof r, err);
}

/* After reading the record: files that were freed are gone, still to be removed, or there again. */
static bool settle_freed(struct mm_follow *x, bool anew, mm_err *err) {
  for (uint32_t i = 0; i < x->hf->file_count; i++) {
    mm_hf_file *f = &x->hf->file[i];
    mm_file now = MM_FILE_NONE;
    if (!f->freed) continue;
    f->freed = false;
    const bool there = mm_file_open(&now, f->path, MM_IGNORED), same = there && same_id(&now.id, &f->id);
    mm_file_close(&now);
    if (!there && anew)
      return mm_fail(err, MM_USAGE, "E_FREED", mm_at(f->path, NULL),
                     "found --restart, which discards all that is left of this file, freed by --delete-source: fetch it again first");
    if (!there) set_freed(x, i);
    if (there) x->file[i].refetched = !same;
    if (same && x->o.frees && !anew) {
      if (unlink(f->path) != 0) return mm_fail_errno(err, mm_at(f->path, NULL), "remove", errno);
      set_freed(x, i);
    }
  }
  return true;
}

void mm_follow_forget(mm_hf *hf) {
  for (uint32_t i = 0; i < hf->file_count; i++) {
    hf->file[i].freed = false;
    hf->file[i].id = (mm_file_id){0};
    hf->file[i].header = (mm_digest){{0}};
    hf->follow->file[i] = (mm_followed_file){.learned = hf->follow->file[i].learned};
  }
  for (size_t i = 0; i < hf->tensor_count; i++) hf->tensor[i].found = false; /* its form stays, for the plan */
}

bool mm_follow_made_of(const mm_hf *hf, const mm_pack *made) {
  bool same = made->source_count == hf->file_count;
  for (size_t i = 0; same && i < hf->file_count; i++) same = strcmp(made->source[i].name, hf->file[i].name) == 0;
  return same;
}

bool mm_follow_comparable(const mm_hf *hf, mm_err *err) {
  const struct mm_follow *x = hf->follow;
  mm_pack made = {0};
  uint32_t i = 0;
  const bool finished =
      x && !x->record_there && x->o.target && mm_pack_open(&made, x->o.target, MM_IGNORED) && mm_follow_made_of(hf, &made);
  mm_pack_close(&made);
  while (finished && i < hf->file_count && exists(hf->file[i].path)) i++;
  if (!finished || i == hf->file_count) return true;
  return mm_fail(err, MM_USAGE, "E_FREED", mm_at(hf->file[i].path, NULL),
                 "found it gone and the output finished, so nothing says whether this command would make the same; minimax-verify proves "
                 "the output");
}

void mm_follow_assume(mm_hf *hf, const mm_pack *made) {
  for (uint32_t i = 0; i < hf->file_count; i++) {
    hf->file[i].id.size = made->source[i].size;
    hf->file[i].header = made->source[i].sha256;
    hf->follow->file[i].recorded = hf->follow->file[i].refetched = true;
  }
  for (size_t k = 0; k < made->left_out_count; k++) { /* the bytes of all are known, not of each: the first stands for them */
    uint64_t bytes = made->left_out[k].bytes;
    for (size_t i = 0; i < hf->tensor_count; i++) {
      mm_hf_tensor *t = &hf->tensor[i];
      if (t->left_out && strncmp(t->name, made->left_out[k].prefix, strlen(made->left_out[k].prefix)) == 0) t->bytes = bytes, bytes = 0;
    }
  }
}

/* The record of another run: of which source it is, and whether a file of that is gone. */
typedef struct mm_other_record {
  const mm_digest *names;
  bool other, freed;
} mm_other_record;

static bool read_other(void *ctx, const uint8_t *payload, size_t n, mm_err *err) {
  mm_other_record *x = ctx;
  mm_source_record r;
  (void)err;
  if (n < sizeof r) return true;
  memcpy(&r, payload, sizeof r);
  if (r.what == BEGUN)
    x->other = n != sizeof r + sizeof x->names->byte || memcmp(payload + sizeof r, x->names->byte, sizeof x->names->byte) != 0;
  x->freed = x->freed || r.what == FREED;
  return true;
}

bool mm_follow_discardable(const mm_hf *hf, int parent, const char *name, mm_err *err) {
  mm_records seen = MM_RECORDS_NONE;
  mm_digest own;
  mm_hf_tensor **original = sort_names(hf, &own, err);
  mm_other_record x = {.names = &own};
  const bool ok = original && mm_records_read(&seen, parent, name, record_kind, read_other, &x, err);
  free(original);
  if (!ok || !x.other || !x.freed) return ok;
  return mm_fail(
      err, MM_USAGE, "E_FREED", mm_at(name, NULL),
      "found --restart, which discards all that is left of files of another source, freed by --delete-source: name another output");
}

bool mm_follow_begin(mm_hf *hf, int parent, const char *name, bool anew, mm_err *err) {
  struct mm_follow *x = hf->follow;
  const uint64_t head = sizeof record_kind;
  mm_err reason = {0};
  if (anew && !mm_follow_discardable(hf, parent, name, err)) return false;
  bool ok = mm_records_open(&x->record, parent, name, record_kind, read_record, x, &reason);
  if (!ok && !(anew && reason.status == MM_USAGE)) return mm_fail_as(err, &reason);
  if (!settle_freed(x, anew, err)) return false;
  if (anew) {
    mm_records_close(&x->record);
    if (unlinkat(parent, name, 0) != 0 && errno != ENOENT) return mm_fail_errno(err, mm_at(name, NULL), "remove", errno);
    mm_follow_forget(hf);
    ok = mm_records_open(&x->record, parent, name, record_kind, read_record, x, err);
  }
  ok = ok && (x->record.size > head || record(x, BEGUN, 0, x->names.byte, sizeof x->names.byte, err));
  for (uint32_t i = 0; ok && i < hf->file_count; i++) { /* a later run plans by the same headers; none has changed */
    bool there;
    if (x->file[i].learned || (x->file[i].recorded && !hf->file[i].freed)) ok = mm_follow_look(hf, i, &there, err);
  }
  return ok;
}

/* ---- opening and closing ---- */

/* Takes the headers that an interrupted run recorded. *needless: the output is finished and says itself what it was made of. */
static bool peek(struct mm_follow *x, bool *needless, mm_err *err) {
  mm_staging at = MM_STAGING_NONE;
  mm_records seen = MM_RECORDS_NONE;
  *needless = false;
  if (!x->o.target) return true;
  bool ok = mm_staging_name(&at, x->o.target, NULL, err);
  const char *name = ok ? mm_arena_printf(&at.arena, err, "%s.sources", at.name) : NULL;
  ok = name && mm_records_read(&seen, at.parent, name, record_kind, read_record, x, err);
  x->record_there = ok && seen.size > 0;
  *needless = ok && seen.size == 0 && exists(mm_path_of(x->o.target, MM_MANIFEST).text);
  mm_staging_close(&at);
  return ok;
}

/* Reads headers until there is one of each kind of tensor, and lends their forms to the others. */
static bool learn(struct mm_follow *x, const mm_forms *forms, mm_err *err) {
  mm_hf *hf = x->hf;
  mm_wait w = {.o = &x->o, .dir = hf->dir, .since = mm_now()};
  uint32_t lacks;
  bool needless, ok = peek(x, &needless, err);
  bool enough = ok && x->record_there && !mm_forms_lack(forms, hf, &lacks, err);
  while (ok && !enough) {
    for (uint32_t i = 0; ok && i < hf->file_count; i++)
      ok = x->file[i].recorded || atomic_load(&x->file[i].state) == MM_ARRIVED || look_for(x, i, err) || err->status == MM_OK;
    enough = !ok || !mm_forms_lack(forms, hf, &lacks, err) || needless;
    if (enough) break;
    atomic_store(&x->waiting, hf->file[lacks].name);
    ok = mm_wait_once(&w, hf->file[lacks].name, " (the plan needs its header)", err);
  }
  atomic_store(&x->waiting, NULL);
  for (uint32_t i = 0; i < hf->file_count; i++) {
    hf->file[i].freed = false;
    x->file[i].learned = atomic_load(&x->file[i].state) == MM_ARRIVED;
  }
  return ok && err->status == MM_OK && mm_forms_lend(forms, hf, err);
}

bool mm_follow_open(mm_hf *hf, const mm_follow_options *o, mm_err *err) {
  struct mm_follow *x = mm_calloc(1, sizeof *x, err);
  if (!x) return false;
  *x = (struct mm_follow){.hf = hf, .o = *o, .record = MM_RECORDS_NONE};
  pthread_mutex_init(&x->lock, NULL);
  pthread_mutex_init(&x->failing, NULL);
  hf->follow = x;
  hf->await = await_file;
  x->file = mm_calloc(hf->file_count, sizeof *x->file, err);
  x->original = sort_names(hf, &x->names, err);
  if (!x->file || !x->original) return false;
  if (o->frees && access(hf->dir, W_OK) != 0) return mm_fail_errno(err, mm_at(hf->dir, NULL), "remove files from", errno);
  mm_forms forms = {0};
  const bool ok = mm_forms_open(&forms, hf, err) && learn(x, &forms, err);
  mm_forms_close(&forms);
  mm_follow_forget(hf);
  return ok;
}

void mm_follow_close(mm_hf *hf) {
  struct mm_follow *x = hf->follow;
  if (!x) return;
  mm_records_close(&x->record);
  pthread_mutex_destroy(&x->lock);
  pthread_mutex_destroy(&x->failing);
  MM_FREE(x->file, x->original, x);
  hf->follow = NULL;
  hf->await = NULL;
}
