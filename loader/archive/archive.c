/* Archives: their table, and whole checkpoints to archives and back, a part at a time. */
#include "loader/archive/archive.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/system/file.h"
#include "formats/system/staging.h"
#include "loader/archive/signature.h"
#include "loader/shards.h"

static size_t part_count(const mm_pack *p) {
  size_t n = 0;
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++) n += p->rank[r].part_count;
  return n;
}

/* ---- the table ---- */

/* One [bytes, stride] pair. */
static bool read_frame(const mm_json *j, uint64_t content, mm_archive_frame *f, const mm_json_ctx *c, mm_err *err) {
  const mm_json *bytes = mm_json_at(j, 0), *stride = mm_json_at(j, 1);
  if (mm_json_type_of(j) != MM_JSON_ARR || mm_json_size(j) != 2 || mm_json_type_of(bytes) != MM_JSON_INT ||
      mm_json_type_of(stride) != MM_JSON_INT)
    return MM_REFUSE(c, err, "found a frame %s, expected a pair of integers", MM_SHOWN_JSON(j));
  int64_t n = mm_json_int(bytes), s = mm_json_int(stride);
  if (n < 1 || (uint64_t)n > mm_frame_bound(content))
    return MM_REFUSE(c, err, "found a frame of %" PRId64 " bytes, expected 1 to %zu", n, mm_frame_bound(content));
  if (s != 1 && s != 2 && s != 4) return MM_REFUSE(c, err, "found elements of %" PRId64 " bytes, expected 1, 2 or 4", s);
  f->bytes = (uint32_t)n;
  f->stride = (uint32_t)s;
  return true;
}

bool mm_archive_part_make(mm_archive_part *p, const mm_part *part, mm_arena *arena, mm_err *err) {
  *p = (mm_archive_part){.part = part, .file = mm_arena_printf(arena, err, "%s.zst", part->file)};
  return p->file && (p->frame = mm_arena_alloc(arena, part->block_count * sizeof *p->frame, err));
}

static bool read_part(mm_archive *a, const mm_json *j, const mm_part *part, const mm_json_ctx *c, mm_err *err) {
  static const char *const keys[] = {"file", "frames", NULL};
  mm_archive_part *p = &a->part[a->part_count];
  const char *file;
  const mm_json *frames;
  if (!mm_archive_part_make(p, part, &a->arena, err)) return false;
  if (mm_json_type_of(j) != MM_JSON_OBJ) return MM_REFUSE(c, err, "found a part %s, expected an object", MM_SHOWN_JSON(j));
  if (!mm_json_only_keys(j, keys, c, err) || !mm_json_need_str(j, "file", &file, c, err) ||
      !(frames = mm_json_need(j, "frames", MM_JSON_ARR, c, err)))
    return false;
  if (strcmp(file, p->file) != 0) return MM_REFUSE(c, err, "key \"file\": found \"%s\", expected \"%s\"", MM_ESCAPED(300, file), p->file);
  if (mm_json_size(frames) != part->block_count)
    return MM_REFUSE(c, err, "%s: found %zu frames, expected %zu", p->file, mm_json_size(frames), part->block_count);
  for (size_t b = 0; b < part->block_count; b++) {
    uint64_t content = mm_min(MM_HASH_BLOCK, part->size - b * MM_HASH_BLOCK);
    if (!read_frame(mm_json_at(frames, b), content, &p->frame[b], c, err)) return false;
    p->frame[b].at = p->size;
    p->size += p->frame[b].bytes; /* cannot overflow: below 2^23 each */
  }
  a->part_count++;
  return true;
}

static bool read_table(mm_archive *a, const mm_json *root, const mm_json_ctx *c, mm_err *err) {
  static const char *const keys[] = {"format", "version", "parts", NULL};
  const char *format;
  int64_t version;
  if (mm_json_type_of(root) != MM_JSON_OBJ) return MM_REFUSE(c, err, "found %s, expected an object", MM_SHOWN_JSON(root));
  if (!mm_json_need_str(root, "format", &format, c, err) || !mm_json_need_int(root, "version", INT64_MIN, INT64_MAX, &version, c, err))
    return false;
  if (strcmp(format, MM_ARCHIVE_FORMAT) != 0 || version != MM_ARCHIVE_VERSION) {
    return mm_fail(err, MM_UNSUPPORTED, "E_VERSION", mm_at(c->file, NULL), "found \"%s\" %" PRId64 ", expected \"%s\" %d",
                   MM_ESCAPED(128, format), version, MM_ARCHIVE_FORMAT, MM_ARCHIVE_VERSION);
  }
  const mm_json *parts = mm_json_need(root, "parts", MM_JSON_ARR, c, err);
  size_t count = part_count(&a->pack);
  if (!parts || !mm_json_only_keys(root, keys, c, err)) return false;
  if (mm_json_size(parts) != count) return MM_REFUSE(c, err, "found %zu parts, expected %zu", mm_json_size(parts), count);
  if (!(a->part = mm_arena_alloc(&a->arena, count * sizeof *a->part, err))) return false;
  for (uint32_t r = 0; r < mm_pack_ranks(&a->pack); r++)
    for (size_t i = 0; i < a->pack.rank[r].part_count; i++)
      if (!read_part(a, mm_json_at(parts, a->part_count), &a->pack.rank[r].part[i], c, err)) return false;
  return true;
}

bool mm_archive_parse(mm_archive *a, const char *text, size_t n, mm_err *err) {
  const mm_path path = mm_path_of(a->pack.dir, MM_ARCHIVE);
  mm_json_ctx c = {path.text, MM_INTEGRITY, "E_ARCHIVE"};
  mm_json *root = mm_json_parse(text, n, path.text, err);
  bool ok = root && read_table(a, root, &c, err);
  mm_json_free(root);
  return ok;
}

static bool read_text(const char *dir, const char *name, char **text, size_t *n, mm_err *err) {
  const mm_path path = mm_path_of(dir, name);
  return (*text = mm_file_slurp(path.text, MM_MANIFEST_MAX, n, err)) != NULL;
}

/* Each part's file has the size of its frames. */
static bool check_sizes(const mm_archive *a, mm_err *err) {
  bool ok = true;
  for (size_t i = 0; ok && i < a->part_count; i++) {
    mm_file f;
    const mm_path path = mm_path_of(a->pack.dir, a->part[i].file);
    ok = mm_file_open(&f, path.text, err) && mm_size_is(path.text, f.size, a->part[i].size, err);
    mm_file_close(&f);
  }
  return ok;
}

/* Whatever is not a part. */
static bool is_text(const mm_pack *p, const char *name) {
  return mm_pack_find_file(p, name) || strcmp(name, MM_ARCHIVE) == 0 || strcmp(name, MM_MANIFEST) == 0 || strcmp(name, MM_SIGNATURE) == 0;
}

static bool listed(const void *ctx, const char *name) {
  const mm_archive *a = ctx;
  if (is_text(&a->pack, name)) return true;
  for (size_t i = 0; i < a->part_count; i++)
    if (strcmp(name, a->part[i].file) == 0) return true;
  return false;
}

bool mm_archive_open(mm_archive *a, const char *dir, mm_err *err) {
  *a = (mm_archive){0};
  char *table = NULL;
  size_t n;
  mm_err e = {0};
  if (access(mm_path_of(dir, MM_ARCHIVE).text, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
    if (access(mm_path_of(dir, MM_MANIFEST).text, F_OK) != 0)
      return mm_fail(err, MM_BAD_INPUT, "E_FS_MISSING", mm_at(dir, NULL), "found no " MM_ARCHIVE " there, expected an archive");
    return mm_fail(err, MM_INTEGRITY, "E_ARCHIVE", mm_at(dir, NULL),
                   "found a packed checkpoint, or an archive without its " MM_ARCHIVE
                   "; minimax-archive pack makes an archive of a checkpoint");
  }
  bool ok = read_text(dir, MM_ARCHIVE, &table, &n, &e) && read_text(dir, MM_MANIFEST, &a->manifest, &a->manifest_bytes, &e) &&
            mm_pack_parse(&a->pack, dir, a->manifest, a->manifest_bytes, &e) && mm_archive_parse(a, table, n, &e) && check_sizes(a, &e) &&
            mm_nothing_else(dir, listed, a, &e);
  free(table);
  return ok || mm_fail_damaged(err, &e);
}

void mm_archive_close(mm_archive *a) {
  free(a->manifest);
  mm_pack_close(&a->pack);
  mm_arena_close(&a->arena);
  *a = (mm_archive){0};
}

/* ---- whole archives ---- */

/* Whatever is not a part: companions, proven, and the signature if there is one, which may be anybody's. */
static bool copy_companions(const mm_pack *p, const mm_staging *s, mm_err *err) {
  char *text;
  bool ok = true;
  for (size_t i = 0; ok && i < p->file_count; i++) {
    ok = mm_verify_companion(p, &p->file[i], &text, err) && mm_write_file_at(s->dir, s->path, p->file[i].name, text, p->file[i].size, err);
    free(text);
  }
  const mm_path path = mm_path_of(p->dir, MM_SIGNATURE);
  if (!ok || faccessat(AT_FDCWD, path.text, F_OK, AT_SYMLINK_NOFOLLOW) != 0) return ok; /* a link to nothing is not absent */
  size_t n;
  ok = (text = mm_signature_text(p->dir, &n, err)) && mm_write_file_at(s->dir, s->path, MM_SIGNATURE, text, n, err);
  free(text);
  return ok;
}

/* One part a line. */
char *mm_archive_text(const mm_archive *a, mm_err *err) {
  mm_text t = {0};
  mm_text_printf(&t, "{\n\"format\":\"%s\",\n\"version\":%d,\n\"parts\":[", MM_ARCHIVE_FORMAT, MM_ARCHIVE_VERSION);
  for (size_t i = 0; i < a->part_count; i++) {
    mm_text_printf(&t, "%s\n{\"file\":\"%s\",\"frames\":[", i ? "," : "", a->part[i].file);
    for (size_t b = 0; b < a->part[i].part->block_count; b++)
      mm_text_printf(&t, "%s[%u,%u]", b ? "," : "", a->part[i].frame[b].bytes, a->part[i].frame[b].stride);
    mm_text_put(&t, "]}");
  }
  mm_text_put(&t, "\n]\n}\n");
  return mm_text_take(&t, err);
}

static bool write_table(const mm_archive *a, const mm_staging *s, mm_err *err) {
  char *text = mm_archive_text(a, err);
  bool ok = text && mm_write_file_at(s->dir, s->path, MM_ARCHIVE, text, strlen(text), err);
  free(text);
  return ok;
}

/* The one by which the parts were proven. */
static bool copy_manifest(const mm_pack *p, const mm_staging *s, mm_err *err) {
  size_t n;
  char *text = mm_manifest_again(p, &n, err);
  bool ok = text && mm_write_file_at(s->dir, s->path, MM_MANIFEST, text, n, err);
  free(text);
  return ok;
}

/* Every part of the checkpoint p, into a's table. */
static bool pack_parts(mm_archive *a, const mm_pack *p, const mm_staging *s, int level, const mm_archive_lanes *l, mm_err *err) {
  size_t count = part_count(p);
  if (!(a->part = mm_arena_alloc(&a->arena, count * sizeof *a->part, err))) return false;
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++)
    for (uint32_t i = 0; i < p->rank[r].part_count; i++) {
      mm_archive_part *x = &a->part[a->part_count];
      if (!mm_archive_part_make(x, &p->rank[r].part[i], &a->arena, err) || !mm_archive_pack_part(x, p->dir, s->dir, s->path, level, l, err))
        return false;
      a->part_count++;
    }
  return true;
}

static mm_archive_totals totals(const mm_archive *a) {
  mm_archive_totals t = {0};
  for (size_t i = 0; i < a->part_count; i++) {
    t.bytes += a->part[i].part->size;
    t.packed += a->part[i].size;
  }
  return t;
}

/* Names that packing or unpacking writes, whatever the checkpoint: a part's, or a companion's of this one. */
static bool staged(const void *ctx, const char *name) { return mm_part_named(name) || is_text(ctx, name); }

static bool open_lanes(mm_archive_lanes *l, mm_archive_work w, mm_err *err) {
  if (!mm_archive_lanes_open(l, w.threads, err)) return false;
  l->stopped = w.stopped;
  l->then = "nothing of this run is left";
  return true;
}

bool mm_archive_pack(const char *dir, const char *target, int level, mm_archive_work w, mm_archive_totals *t, mm_err *err) {
  mm_archive a = {0};
  mm_shards shards = {0};
  mm_staging s = MM_STAGING_NONE;
  mm_archive_lanes l = {0};
  bool ok = open_lanes(&l, w, err) && mm_shards_open(&shards, dir, err) && mm_verify_listing(&shards.pack, err) &&
            mm_staging_open(&s, target, "pack", dir, 0, staged, &shards.pack, err) && pack_parts(&a, &shards.pack, &s, level, &l, err) &&
            copy_companions(&shards.pack, &s, err) && copy_manifest(&shards.pack, &s, err) && write_table(&a, &s, err) &&
            mm_staging_publish(&s, err);
  *t = totals(&a);
  mm_staging_discard(&s, staged, &shards.pack);
  mm_staging_close(&s);
  mm_arena_close(&a.arena);
  mm_shards_close(&shards);
  mm_archive_lanes_close(&l);
  return ok;
}

/* Bytes of all files of the checkpoint. */
static uint64_t unpacked_bytes(const mm_archive *a) {
  uint64_t n = totals(a).bytes + a->manifest_bytes;
  for (size_t i = 0; i < a->pack.file_count; i++) n += a->pack.file[i].size;
  return n;
}

bool mm_archive_unpack(const char *dir, const char *target, mm_archive_work w, mm_archive_totals *t, mm_err *err) {
  mm_archive a = {0};
  mm_staging s = MM_STAGING_NONE;
  mm_archive_lanes l = {0};
  mm_dir d = mm_dir_open(dir);
  bool ok = open_lanes(&l, w, err) && mm_archive_open(&a, dir, err);
  *t = totals(&a);
  ok = ok && mm_staging_open(&s, target, "unpack", dir, unpacked_bytes(&a), staged, &a.pack, err);
  for (size_t i = 0; ok && i < a.part_count; i++) ok = mm_archive_unpack_part(&a.part[i], dir, s.dir, s.path, &l, err);
  ok = mm_dir_close(&d, dir, ok && copy_companions(&a.pack, &s, err), err) && /* its signature too, which no digest covers */
       mm_write_file_at(s.dir, s.path, MM_MANIFEST, a.manifest, a.manifest_bytes, err) && mm_staging_publish(&s, err);
  mm_staging_discard(&s, staged, &a.pack);
  mm_staging_close(&s);
  mm_archive_close(&a);
  mm_archive_lanes_close(&l);
  return ok;
}
