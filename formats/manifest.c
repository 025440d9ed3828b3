/* Reading the manifest of a packed checkpoint: hostile text to an mm_pack on which every reader may rely. The rules are those of
 * FORMAT.md. Memory stays in proportion to the text: every count is that of an array that stands in it. */
#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/manifest_version.h"
#include "formats/pack.h"
#include "formats/system/file.h"
#include "formats/system/pool.h"

typedef struct reader {
  mm_pack *p;
  mm_json_ctx ctx;        /* its file is `place` */
  char *place;            /* "DIR/manifest.json: tensors[3]: pieces[0]", for messages */
  size_t file_len;        /* of the part before the first ": " */
  const uint32_t *wanted; /* ranks whose digests are read; NULL: all */
  uint32_t wanted_count;
  mm_err *err;
} reader;

#define PLACE_MAX 96 /* bytes after the file's name */

static char *put(char *to, const char *s) {
  while (*s) *to++ = *s++;
  return to;
}

static char *put_entry(char *to, const char *list, uint64_t i) {
  char digit[20], *d = digit + sizeof digit;
  do *--d = (char)('0' + i % 10);
  while (i /= 10);
  to = put(put(to, list), "[");
  for (; d < digit + sizeof digit; d++) *to++ = *d;
  *to++ = ']';
  return to;
}

/* Says where in the manifest the next messages are about: at "KEY", "LIST[i]" or "LIST[i].OF[k]". Not by printf: it is said for every
 * entry, and hardly ever read. Two lists of at most ten letters and two numbers fit PLACE_MAX. */
static void at(reader *r, const char *key) { *put(put(r->place + r->file_len, ": "), key) = '\0'; }
static void at_entry(reader *r, const char *list, size_t i) { *put_entry(put(r->place + r->file_len, ": "), list, i) = '\0'; }
static void at_part(reader *r, const char *list, size_t i, const char *of, size_t k) {
  *put_entry(put(put_entry(put(r->place + r->file_len, ": "), list, i), "."), of, k) = '\0';
}

static void at_top(reader *r) { r->place[r->file_len] = '\0'; }

/* Zeroed arena memory for the `count` entries of an array that stands in the text. */
static void *take(reader *r, size_t count, size_t size) { return mm_arena_alloc(&r->p->arena, count * size, r->err); }

static const mm_json *array(reader *r, const mm_json *obj, const char *key, size_t lo, size_t hi) {
  const mm_json *j = mm_json_need(obj, key, MM_JSON_ARR, &r->ctx, r->err);
  if (!j || (mm_json_size(j) >= lo && mm_json_size(j) <= hi)) return j;
  MM_REFUSE(&r->ctx, r->err, "key \"%s\": found %zu entries, expected %zu to %zu", key, mm_json_size(j), lo, hi);
  return NULL;
}

static bool integer(reader *r, const mm_json *obj, const char *key, int64_t lo, int64_t hi, uint32_t *out) {
  int64_t v;
  if (!mm_json_need_int(obj, key, lo, hi, &v, &r->ctx, r->err)) return false;
  *out = (uint32_t)v;
  return true;
}

static bool u32(reader *r, const mm_json *obj, const char *key, uint32_t *out) { return integer(r, obj, key, 0, UINT32_MAX, out); }
/* A count of rows or columns. Its sums with a tile or a block stay below 2^32. */
static bool extent(reader *r, const mm_json *obj, const char *key, uint32_t *out) { return integer(r, obj, key, 1, INT32_MAX, out); }

static bool file_size(reader *r, const mm_json *obj, uint64_t *out) {
  return mm_json_need_int(obj, "size", 0, INT64_MAX, (int64_t *)out, &r->ctx, r->err);
}

/* An array of objects: checked as such before memory is taken for each of them. */
static const mm_json *objects(reader *r, const mm_json *obj, const char *key, size_t lo, size_t hi) {
  const mm_json *j = array(r, obj, key, lo, hi);
  for (size_t i = 0; j && i < mm_json_size(j); i++) {
    if (mm_json_type_of(mm_json_at(j, i)) == MM_JSON_OBJ) continue;
    MM_REFUSE(&r->ctx, r->err, "key \"%s\": entry %zu: found %s, expected an object", key, i, MM_SHOWN_JSON(mm_json_at(j, i)));
    return NULL;
  }
  return j;
}

static bool only(reader *r, const mm_json *obj, const char *const *keys) { return mm_json_only_keys(obj, keys, &r->ctx, r->err); }

/* `count` numbers of 32 bits, as in a cell or a range. */
static bool u32_list(reader *r, const mm_json *j, const char *key, size_t count, uint32_t *out) {
  if (mm_json_type_of(j) != MM_JSON_ARR || mm_json_size(j) != count)
    return MM_REFUSE(&r->ctx, r->err, "key \"%s\": found %s, expected an array of %zu integers", key, MM_SHOWN_JSON(j), count);
  for (size_t i = 0; i < count; i++) {
    const mm_json *v = mm_json_at(j, i);
    if (mm_json_type_of(v) != MM_JSON_INT || mm_json_int(v) < 0 || mm_json_int(v) > UINT32_MAX)
      return MM_REFUSE(&r->ctx, r->err, "key \"%s\": entry %zu: found %s, expected an integer from 0 to %u", key, i, MM_SHOWN_JSON(v),
                       UINT32_MAX);
    out[i] = (uint32_t)mm_json_int(v);
  }
  return true;
}

static char *text(reader *r, const mm_json *obj, const char *key, size_t min) {
  const char *s;
  if (!mm_json_need_str(obj, key, &s, &r->ctx, r->err)) return NULL;
  if (strlen(s) >= min) return mm_arena_strndup(&r->p->arena, s, strlen(s), r->err);
  MM_REFUSE(&r->ctx, r->err, "key \"%s\": found an empty string, expected text", key);
  return NULL;
}

/* A plain file name: the only thing of a manifest that ever becomes part of a path. */
static char *base_name(reader *r, const mm_json *obj, const char *key) {
  char *s = text(r, obj, key, 1);
  if (!s || mm_base_name_ok(s, strlen(s))) return s;
  MM_REFUSE(&r->ctx, r->err, "key \"%s\": found \"%s\", expected a plain file name", key, MM_ESCAPED(300, s));
  return NULL;
}

static bool no_digest(reader *r, const char *key, const mm_json *found) {
  return MM_REFUSE(&r->ctx, r->err, "key \"%s\": found %s, expected a digest of %d lower-case hexadecimal digits", key,
                   MM_SHOWN_JSON(found), MM_HEX_LEN);
}

static bool digest(reader *r, const mm_json *obj, const char *key, mm_digest *out) {
  const mm_json *j = mm_json_get(obj, key);
  return (mm_json_type_of(j) == MM_JSON_STR && mm_digest_parse(mm_json_str(j), mm_json_str_len(j), out)) || no_digest(r, key, j);
}

/* Sorts names. */
static bool unique(reader *r, const char **names, size_t count) {
  qsort(names, count, sizeof *names, mm_by_text);
  for (size_t i = 1; i < count; i++) {
    if (strcmp(names[i - 1], names[i]) == 0)
      return MM_REFUSE(&r->ctx, r->err, "found \"%s\" twice, expected once", MM_ESCAPED(512, names[i]));
  }
  return true;
}

/* ---- cuts ---- */

/* One rank's range; `covered` is the end of what the ranks before it hold without a gap. */
static bool read_range(reader *r, const mm_cut *c, const mm_json *j, mm_range *out, uint64_t *covered) {
  uint32_t v[3] = {0};
  if (!u32_list(r, j, "ranks", 3, v)) return false;
  *out = (mm_range){v[0], v[1], v[2]};
  if ((uint64_t)v[0] + v[2] > c->local) return MM_REFUSE(&r->ctx, r->err, "found local %u + %u, expected at most %u", v[0], v[2], c->local);
  if ((uint64_t)v[1] + v[2] > c->whole) return MM_REFUSE(&r->ctx, r->err, "found whole %u + %u, expected at most %u", v[1], v[2], c->whole);
  if (v[1] > *covered)
    return MM_REFUSE(&r->ctx, r->err, "found a start at %u, expected at most %llu, where the ranks before end", v[1],
                     (unsigned long long)*covered);
  *covered = mm_max(*covered, (uint64_t)v[1] + v[2]);
  return true;
}

static bool read_cut(reader *r, size_t i, const mm_json *j, mm_cut *out) {
  static const char *const none_keys[] = {"axis", NULL};
  static const char *const keys[] = {"axis", "whole", "local", "ranks", NULL};
  at_entry(r, "cuts", i);
  const char *axis;
  if (!only(r, j, keys) || !mm_json_need_str(j, "axis", &axis, &r->ctx, r->err)) return false;
  if (strcmp(axis, "none") == 0) return only(r, j, none_keys);
  out->axis = strcmp(axis, "rows") == 0 ? MM_AXIS_ROWS : strcmp(axis, "cols") == 0 ? MM_AXIS_COLS : MM_AXIS_NONE;
  if (out->axis == MM_AXIS_NONE)
    return MM_REFUSE(&r->ctx, r->err, "key \"axis\": found \"%s\", expected none, rows or cols", MM_ESCAPED(64, axis));
  if (!extent(r, j, "whole", &out->whole) || !extent(r, j, "local", &out->local)) return false;
  const mm_json *ranks = array(r, j, "ranks", r->p->tp, r->p->tp);
  if (!ranks || !(out->rank = take(r, r->p->tp, sizeof *out->rank))) return false;
  uint64_t covered = 0;
  for (uint32_t k = 0; k < r->p->tp; k++) {
    at_part(r, "cuts", i, "ranks", k);
    if (!read_range(r, out, mm_json_at(ranks, k), &out->rank[k], &covered)) return false;
  }
  at_entry(r, "cuts", i);
  return covered == out->whole ||
         MM_REFUSE(&r->ctx, r->err, "found ranks that end at %llu, expected %u", (unsigned long long)covered, out->whole);
}

static bool read_cuts(reader *r, const mm_json *root) {
  at_top(r);
  const mm_json *list = objects(r, root, "cuts", 0, SIZE_MAX);
  if (!list || !(r->p->cut = take(r, mm_json_size(list), sizeof *r->p->cut))) return false;
  for (size_t i = 0; i < mm_json_size(list); i++, r->p->cut_count++)
    if (!read_cut(r, i, mm_json_at(list, i), &r->p->cut[i])) return false;
  return true;
}

/* ---- tensors ---- */

static bool read_plane(reader *r, const mm_json *j, mm_pack_plane *out) {
  static const char *const keys[] = {"suffix", "dtype", "cell", "grid", NULL};
  const char *dtype;
  uint32_t cell[2] = {0}, grid[2] = {0};
  if (!only(r, j, keys) || !(out->suffix = text(r, j, "suffix", 0)) || !mm_json_need_str(j, "dtype", &dtype, &r->ctx, r->err)) return false;
  if (!mm_dtype_parse(dtype, strlen(dtype), &out->dtype)) {
    return MM_REFUSE(&r->ctx, r->err, "found unknown dtype \"%s\", expected a safetensors type such as BF16 or F8_E4M3",
                     MM_ESCAPED(128, dtype));
  }
  if (!u32_list(r, mm_json_get(j, "cell"), "cell", 2, cell)) return false;
  out->cell_n = cell[0];
  out->cell_k = cell[1];
  if (!mm_json_get(j, "grid")) return true;
  if (!u32_list(r, mm_json_get(j, "grid"), "grid", 2, grid)) return false;
  out->grid = (mm_pack_grid){true, grid[0], grid[1]};
  return true;
}

/* Reads one piece that must begin at local row `row`, and checks it against its cut. */
static bool read_piece(reader *r, const mm_json *j, const mm_pack_tensor *t, uint64_t row, mm_piece *out) {
  static const char *const keys[] = {"source", "rows", "at", "local_rows", "cut", NULL};
  if (!only(r, j, keys) || !(out->source = text(r, j, "source", 1)) || !extent(r, j, "rows", &out->rows) ||
      !u32(r, j, "at", &out->local_at) || !extent(r, j, "local_rows", &out->local_rows) || !u32(r, j, "cut", &out->cut))
    return false;
  if (out->local_at != row)
    return MM_REFUSE(&r->ctx, r->err, "key \"at\": found %u, expected %llu", out->local_at, (unsigned long long)row);
  if (out->cut >= r->p->cut_count)
    return MM_REFUSE(&r->ctx, r->err, "key \"cut\": found %u, expected one of %zu cuts", out->cut, r->p->cut_count);
  const mm_cut *c = &r->p->cut[out->cut];
  bool by_rows = c->axis == MM_AXIS_ROWS, by_cols = c->axis == MM_AXIS_COLS;
  uint32_t whole_rows = by_rows ? c->whole : out->local_rows, local_rows = by_rows ? c->local : out->local_rows;
  uint32_t whole_cols = by_cols ? c->whole : t->cols, local_cols = by_cols ? c->local : t->cols;
  if (out->rows != whole_rows || out->local_rows != local_rows)
    return MM_REFUSE(&r->ctx, r->err, "found %u rows cut to %u, expected %u to %u", out->rows, out->local_rows, whole_rows, local_rows);
  if (t->whole_cols != whole_cols || t->cols != local_cols)
    return MM_REFUSE(&r->ctx, r->err, "found %u columns cut to %u, expected %u to %u", t->whole_cols, t->cols, whole_cols, local_cols);
  return true;
}

/* Adds the tensor's bytes on a rank of its stage to *total. */
static bool add_bytes(reader *r, const mm_pack_tensor *t, uint64_t *total) {
  for (unsigned i = 0; i < t->plane_count; i++) {
    mm_shape shape = mm_pack_plane_shape(t, i);
    uint64_t bytes;
    if (!mm_shape_bytes(&shape, t->plane[i].dtype, &bytes) || !mm_add(*total, bytes, total))
      return MM_REFUSE(&r->ctx, r->err, "planes[%u]: found a size beyond 64 bits, expected a smaller one", i);
  }
  return true;
}

/* Optional: an f32 above 0. */
static bool read_input_scale(reader *r, const mm_json *j, float *out) {
  double v;
  if (!mm_json_get(j, "input_scale")) return true;
  if (!mm_json_need_number(j, "input_scale", &v, &r->ctx, r->err)) return false;
  if (!(v > 0 && v <= (double)FLT_MAX && (double)(float)v == v))
    return MM_REFUSE(&r->ctx, r->err, "key \"input_scale\": found %g, expected a positive F32", v);
  *out = (float)v;
  return true;
}

static bool read_tensor(reader *r, size_t i, const mm_json *j, mm_pack_tensor *t) {
  static const char *const keys[] = {"name",       "scheme", "vector", "stage",       "lead",    "whole_lead",   "rows", "cols",
                                     "whole_cols", "planes", "pieces", "input_scale", "experts", "global_steps", NULL};
  at_entry(r, "tensors", i);
  if (!only(r, j, keys) || !(t->name = text(r, j, "name", 1)) || !(t->scheme = text(r, j, "scheme", 1)) ||
      !mm_json_need_bool(j, "vector", &t->vector, &r->ctx, r->err) || !u32(r, j, "stage", &t->stage) || !u32(r, j, "lead", &t->lead) ||
      !u32(r, j, "whole_lead", &t->whole_lead) || !extent(r, j, "rows", &t->rows) || !extent(r, j, "cols", &t->cols) ||
      !extent(r, j, "whole_cols", &t->whole_cols) || !read_input_scale(r, j, &t->input_scale))
    return false;
  if (t->stage >= r->p->pp) return MM_REFUSE(&r->ctx, r->err, "key \"stage\": found %u, expected one of %u stages", t->stage, r->p->pp);
  if ((uint64_t)t->lead * r->p->ep != t->whole_lead)
    return MM_REFUSE(&r->ctx, r->err, "found lead %u of %u, expected whole_lead divided by ep %u", t->lead, t->whole_lead, r->p->ep);
  if (!mm_manifest_experts(r->p, t, j, &r->ctx, r->err)) return false;
  const mm_json *planes = objects(r, j, "planes", 1, t->vector ? 1 : MM_PACK_PLANES);
  const mm_json *pieces = planes ? objects(r, j, "pieces", 1, MM_PACK_PIECES) : NULL;
  if (!pieces) return false;
  for (; t->plane_count < mm_json_size(planes); t->plane_count++) {
    at_part(r, "tensors", i, "planes", t->plane_count);
    if (!read_plane(r, mm_json_at(planes, t->plane_count), &t->plane[t->plane_count])) return false;
  }
  uint64_t row = 0;
  for (; t->piece_count < mm_json_size(pieces); row += t->piece[t->piece_count++].local_rows) {
    at_part(r, "tensors", i, "pieces", t->piece_count);
    if (!read_piece(r, mm_json_at(pieces, t->piece_count), t, row, &t->piece[t->piece_count])) return false;
  }
  at_entry(r, "tensors", i);
  if (!mm_manifest_global_steps(r->p, t, j, &r->ctx, r->err)) return false;
  if (row != t->rows) return MM_REFUSE(&r->ctx, r->err, "found pieces of %llu rows, expected %u", (unsigned long long)row, t->rows);
  if (t->vector && (t->lead != 0 || t->cols != 1 || t->plane[0].cell_n != 1 || t->plane[0].cell_k != 1))
    return MM_REFUSE(&r->ctx, r->err, "found a vector of lead %u, %u columns and cells [%u, %u], expected 0, 1 and [1, 1]", t->lead,
                     t->cols, t->plane[0].cell_n, t->plane[0].cell_k);
  return true;
}

/* Every tensor, that no two planes share a name, and the bytes of a rank of each stage: bytes[pp]. */
static bool read_tensors(reader *r, const mm_json *root, uint64_t *bytes) {
  mm_pack *p = r->p;
  at_top(r);
  const mm_json *list = objects(r, root, "tensors", 0, SIZE_MAX);
  size_t count = list ? mm_json_size(list) : 0, name_count = 0;
  if (!list || !(p->tensor = take(r, count, sizeof *p->tensor))) return false;
  for (; p->tensor_count < count; name_count += p->tensor[p->tensor_count++].plane_count) {
    mm_pack_tensor *t = &p->tensor[p->tensor_count];
    if (!read_tensor(r, p->tensor_count, mm_json_at(list, p->tensor_count), t) || !add_bytes(r, t, &bytes[t->stage])) return false;
  }
  mm_arena scratch = {0};
  const char **names = mm_arena_alloc(&scratch, name_count * sizeof *names, r->err);
  bool ok = names;
  for (size_t i = 0, n = 0; ok && i < count; i++)
    for (unsigned k = 0; ok && k < p->tensor[i].plane_count; k++, n++) {
      const char *suffix = p->tensor[i].plane[k].suffix;
      char *name = mm_arena_alloc(&scratch, strlen(p->tensor[i].name) + strlen(suffix) + 1, r->err);
      if ((ok = (names[n] = name))) put(put(name, p->tensor[i].name), suffix);
    }
  at(r, "tensors");
  ok = ok && unique(r, names, name_count);
  mm_arena_close(&scratch);
  return ok;
}

/* ---- files ---- */

static const char *const part_keys[] = {"file", "size", "root", "blocks", NULL};

/* A file with its size and, where wanted, the digests of its blocks; else they are counted and must be digests. */
static bool read_blocks(reader *r, const mm_json *j, bool wanted, mm_part *out) {
  if (!only(r, j, part_keys) || !(out->file = base_name(r, j, "file"))) return false;
  if (!file_size(r, j, &out->size) || !digest(r, j, "root", &out->root)) return false;
  const mm_json *blocks = array(r, j, "blocks", mm_hash_blocks(out->size), mm_hash_blocks(out->size));
  mm_digest *block = NULL, unwanted;
  if (!blocks || (wanted && !(block = take(r, mm_json_size(blocks), sizeof *block)))) return false;
  for (size_t i = 0; (block || !mm_json_packed(blocks)) && i < mm_json_size(blocks); i++)
    if (!mm_json_digest(blocks, i, block ? &block[i] : &unwanted)) return no_digest(r, "blocks", mm_json_at(blocks, i));
  out->block = block;
  out->block_count = mm_json_size(blocks);
  if (!block) return true;
  const mm_digest root = mm_hash_root(out->block, out->block_count);
  return mm_digest_equal(&root, &out->root) ||
         MM_REFUSE(&r->ctx, r->err, "key \"root\": found %s, expected %s, the digest of the blocks' digests",
                   mm_digest_hex(&out->root).text, mm_digest_hex(&root).text);
}

static bool wants(const reader *r, uint32_t rank) {
  uint32_t i = 0;
  while (i < r->wanted_count && r->wanted[i] != rank) i++;
  return !r->wanted || i < r->wanted_count;
}

static bool read_part(reader *r, uint32_t rank, uint32_t part, const mm_json *j, mm_part *out) {
  at_part(r, "ranks", rank, "parts", part);
  char name[64];
  mm_part_name(name, rank, part);
  const char *file = only(r, j, part_keys) ? text(r, j, "file", 1) : NULL;
  if (file && strcmp(file, name) != 0)
    return MM_REFUSE(&r->ctx, r->err, "key \"file\": found \"%s\", expected \"%s\"", MM_ESCAPED(300, file), name);
  return file && read_blocks(r, j, wants(r, rank), out);
}

/* The parts of every rank, whose files must be able to hold the bytes[] of its stage. */
static bool read_ranks(reader *r, const mm_json *root, const uint64_t *bytes) {
  static const char *const keys[] = {"parts", NULL};
  mm_pack *p = r->p;
  at_top(r);
  const mm_json *list = objects(r, root, "ranks", mm_pack_ranks(p), mm_pack_ranks(p));
  if (!list || !(p->rank = take(r, mm_pack_ranks(p), sizeof *p->rank))) return false;
  for (uint32_t i = 0; i < mm_pack_ranks(p); i++) {
    mm_rank_parts *rank = &p->rank[i];
    at_entry(r, "ranks", i);
    const mm_json *j = mm_json_at(list, i), *parts = only(r, j, keys) ? objects(r, j, "parts", 0, UINT32_MAX) : NULL;
    if (!parts || !(rank->part = take(r, mm_json_size(parts), sizeof *rank->part))) return false;
    uint64_t total = 0;
    for (; rank->part_count < mm_json_size(parts); rank->part_count++) {
      mm_part *part = &rank->part[rank->part_count];
      if (!read_part(r, i, (uint32_t)rank->part_count, mm_json_at(parts, rank->part_count), part)) return false;
      total += part->size; /* cannot overflow: the text holds 64 bytes for each 4 MiB */
    }
    at_entry(r, "ranks", i);
    if (rank->part_count > 0 && total < bytes[i / p->tp])
      return MM_REFUSE(&r->ctx, r->err, "found parts of %llu bytes, expected at least the %llu of its tensors", (unsigned long long)total,
                       (unsigned long long)bytes[i / p->tp]);
  }
  return true;
}

/* "sources" or "files": digest_key says what was hashed. */
static bool read_files(reader *r, const mm_json *root, const char *key, const char *digest_key, mm_pack_file **out, size_t *count) {
  const char *const keys[] = {"name", "size", digest_key, NULL};
  at_top(r);
  const mm_json *list = objects(r, root, key, 0, SIZE_MAX);
  if (!list || !(*out = take(r, mm_json_size(list), sizeof **out))) return false;
  for (; *count < mm_json_size(list); ++*count) {
    const mm_json *j = mm_json_at(list, *count);
    mm_pack_file *f = &(*out)[*count];
    at_entry(r, key, *count);
    if (!only(r, j, keys) || !(f->name = base_name(r, j, "name")) || !file_size(r, j, &f->size) || !digest(r, j, digest_key, &f->sha256))
      return false;
  }
  return true;
}

/* No source twice; no companion twice, or under the name of a part, of the manifest, of its signature or of an archive's table. */
static bool check_file_names(reader *r) {
  const mm_pack *p = r->p;
  size_t most = mm_max(p->source_count, p->file_count + 3), n = 0;
  for (uint32_t i = 0; i < mm_pack_ranks(p); i++) most += p->rank[i].part_count;
  const char **names = mm_calloc(most, sizeof *names, r->err);
  if (!names) return false;
  for (size_t i = 0; i < p->source_count; i++) names[i] = p->source[i].name;
  at(r, "sources");
  bool ok = unique(r, names, p->source_count);
  for (size_t i = 0; i < p->file_count; i++) names[n++] = p->file[i].name;
  for (uint32_t i = 0; i < mm_pack_ranks(p); i++)
    for (size_t k = 0; k < p->rank[i].part_count; k++) names[n++] = p->rank[i].part[k].file;
  names[n++] = MM_MANIFEST;
  names[n++] = MM_SIGNATURE, names[n++] = MM_ARCHIVE;
  at(r, "files");
  ok = ok && unique(r, names, n);
  free(names);
  return ok;
}

/* ---- the whole ---- */

/* Token ids, ascending. */
static bool read_dead_rows(reader *r, const mm_json *root) {
  mm_pack *p = r->p;
  at_top(r);
  const mm_json *list = array(r, root, "dead_rows", 0, p->model.vocab);
  if (!list || !(p->dead_row = take(r, mm_json_size(list), sizeof *p->dead_row))) return false;
  if (!u32_list(r, list, "dead_rows", mm_json_size(list), p->dead_row)) return false;
  p->dead_rows = mm_json_size(list);
  for (size_t i = 0; i < p->dead_rows; i++)
    if (p->dead_row[i] >= p->model.vocab || (i > 0 && p->dead_row[i] <= p->dead_row[i - 1]))
      return MM_REFUSE(&r->ctx, r->err, "key \"dead_rows\": entry %zu: found %u, expected ascending ids below %u", i, p->dead_row[i],
                       p->model.vocab);
  return true;
}

static bool read_parallel(reader *r, const mm_json *root) {
  static const char *const keys[] = {"tp", "ep", "pp", "attn_tp", NULL};
  int64_t tp, ep, pp;
  at_top(r);
  const mm_json *j = mm_json_need(root, "parallel", MM_JSON_OBJ, &r->ctx, r->err);
  at(r, "parallel");
  if (!j || !only(r, j, keys) || !mm_json_need_int(j, "tp", 1, MM_MAX_TP, &tp, &r->ctx, r->err) ||
      !mm_json_need_int(j, "ep", 1, tp, &ep, &r->ctx, r->err) || !mm_json_need_int(j, "pp", 1, MM_MAX_LAYERS, &pp, &r->ctx, r->err))
    return false;
  if (tp % ep != 0) return MM_REFUSE(&r->ctx, r->err, "found ep %lld, expected a divisor of tp %lld", (long long)ep, (long long)tp);
  r->p->tp = (uint32_t)tp;
  r->p->ep = (uint32_t)ep;
  r->p->pp = (uint32_t)pp;
  return mm_manifest_attn_tp(r->p, j, &r->ctx, r->err);
}

static bool read_model(reader *r, const mm_json *root) {
  const mm_json *j = mm_json_need(root, "model", MM_JSON_OBJ, &r->ctx, r->err);
  at(r, "model");
  return j && mm_model_from_json(&r->p->model, j, r->place, r->err);
}

static bool read_align(reader *r, const mm_json *root) {
  const char *word = text(r, root, "tp_align", 1);
  if (!word || mm_align_find(word, &r->p->tp_align)) return word;
  return MM_REFUSE(&r->ctx, r->err, "key \"tp_align\": found \"%s\", expected split, pad or error", MM_ESCAPED(64, word));
}

static bool right_version(reader *r, const mm_json *root, int64_t version) {
  at_top(r);
  return mm_manifest_right_version(r->p, version, &r->ctx, r->err) &&
         (mm_model_extended(&r->p->model) ? mm_manifest_left_out(r->p, root, &r->ctx, r->err)
                                          : mm_manifest_no_left_out(root, &r->ctx, r->err));
}

static bool read_manifest(reader *r, const mm_json *root) {
  const char *keys[] = {"format",  "version", "tool",    "quant", "tp_align",  "plan",   "model", "parallel", "cuts",
                        "tensors", "ranks",   "sources", "files", "dead_rows", "sha256", NULL,    NULL};
  mm_pack *p = r->p;
  uint64_t bytes[MM_MAX_LAYERS] = {0}; /* pp is at most that */
  int64_t version;
  if (!mm_manifest_version(root, MM_PACK_FORMAT, MM_PACK_VERSION5, &version, &r->ctx, r->err)) return false;
  if (version >= MM_PACK_VERSION3) keys[sizeof keys / sizeof *keys - 2] = "left_out"; /* in place of the first of the two NULLs */
  /* In this order: later readers rely on checked fields of earlier ones (model, then parallel, cuts, tensors, ranks). */
  return only(r, root, keys) && (p->tool = text(r, root, "tool", 1)) && (p->quant = text(r, root, "quant", 1)) && read_align(r, root) &&
         digest(r, root, "plan", &p->plan) && read_model(r, root) && read_parallel(r, root) && read_cuts(r, root) &&
         read_tensors(r, root, bytes) && right_version(r, root, version) && read_ranks(r, root, bytes) &&
         read_files(r, root, "sources", "header_sha256", &p->source, &p->source_count) &&
         read_files(r, root, "files", "sha256", &p->file, &p->file_count) && check_file_names(r) && read_dead_rows(r, root);
}

#define ENDING_BYTES (sizeof MM_MANIFEST_ENDING - 3 + MM_HEX_LEN) /* without "%s" and NUL */

/* The text ends with its own digest, found, of all before it: then no byte of it was changed by accident. */
static bool check_ending(reader *r, const char *text, size_t n, const mm_digest *found) {
  char ending[ENDING_BYTES + 1];
  at_top(r);
  snprintf(ending, sizeof ending, MM_MANIFEST_ENDING, mm_digest_hex(found).text);
  return (n > ENDING_BYTES && memcmp(text + n - ENDING_BYTES, ending, ENDING_BYTES) == 0) ||
         MM_REFUSE(&r->ctx, r->err, "key \"sha256\": found another ending, expected %s, the digest of the text before it",
                   mm_digest_hex(found).text);
}

/* Reads the fields of minimax-digests.json, which lists the files of an unsharded checkpoint. */
static bool read_digests(reader *r, const mm_json *root) {
  static const char *const keys[] = {"format", "version", "tool", "quant", "dialect", "plan", "parts", "sources", "files", "sha256", NULL};
  mm_pack *p = r->p;
  int64_t version;
  p->tp = p->ep = p->pp = 1;
  if (!mm_manifest_version(root, MM_DIGESTS_WORD, MM_PACK_VERSION, &version, &r->ctx, r->err) || !only(r, root, keys) ||
      !(p->tool = text(r, root, "tool", 1)) || !(p->quant = text(r, root, "quant", 1)) ||
      !(p->target_format = text(r, root, "dialect", 1)) || !digest(r, root, "plan", &p->plan))
    return false;
  const mm_json *parts = objects(r, root, "parts", 1, UINT32_MAX);
  if (!parts || !(p->rank = take(r, 1, sizeof *p->rank)) || !(p->rank->part = take(r, mm_json_size(parts), sizeof *p->rank->part)))
    return false;
  for (; p->rank->part_count < mm_json_size(parts); p->rank->part_count++) {
    at_entry(r, "parts", p->rank->part_count);
    if (!read_blocks(r, mm_json_at(parts, p->rank->part_count), true, &p->rank->part[p->rank->part_count])) return false;
  }
  return read_files(r, root, "sources", "header_sha256", &p->source, &p->source_count) &&
         read_files(r, root, "files", "sha256", &p->file, &p->file_count) && check_file_names(r);
}

/* The file to read, the function that reads it, and the ranks whose block digests are loaded. */
typedef struct kind {
  const char *file;
  bool (*read)(reader *r, const mm_json *root);
  const uint32_t *rank; /* NULL: all */
  uint32_t count;
} kind;

#define TWO_THREADS ((size_t)512 << 10) /* bytes of text from which on a second thread gains more than it costs */

typedef struct digest_job {
  reader *r;
  const kind *kind;
  const char *text;
  size_t n;
  mm_digest digest;
} digest_job;

/* Item 0 reads the text, item 1 hashes it; both run at the same time if the text is long. */
static bool read_or_hash(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)worker;
  digest_job *s = ctx;
  if (item == 1) {
    s->digest = mm_sha256(s->text, s->n < ENDING_BYTES ? s->n : s->n - ENDING_BYTES);
    return true;
  }
  mm_err e = {0};
  s->r->err = err;
  mm_json *root = mm_json_parse_packed(s->text, s->n, s->r->place, &e);
  const bool ok = root ? s->kind->read(s->r, root) : mm_fail_damaged(err, &e);
  mm_json_free(root);
  return ok;
}

/* The digest is checked last: a rule that is broken names its field, the digest does not. */
static bool parse_with_digest(mm_pack *p, const char *dir, const kind *k, const char *text, size_t n, mm_err *err) {
  memset(p, 0, sizeof *p);
  size_t len = strlen(dir) + 1 + strlen(k->file);
  char *place = mm_calloc(len + PLACE_MAX, 1, err);
  if (!place) return false;
  snprintf(place, len + 1, "%s/%s", dir, k->file);
  reader r = {p, {place, MM_INTEGRITY, "E_MANIFEST"}, place, len, k->rank, k->count, err};
  digest_job s = {.r = &r, .kind = k, .text = text, .n = n};
  bool ok = (p->dir = mm_arena_strndup(&p->arena, dir, strlen(dir), err)) && mm_pool_run(n < TWO_THREADS ? 1 : 2, 2, read_or_hash, &s, err);
  r.err = err;
  ok = ok && check_ending(&r, text, n, &s.digest);
  p->text_digest = s.digest;
  free(place);
  return ok;
}

static const kind manifest = {MM_MANIFEST, read_manifest, NULL, 0}, digests = {MM_DIGESTS, read_digests, NULL, 0};

bool mm_pack_parse(mm_pack *p, const char *dir, const char *text, size_t n, mm_err *err) {
  return parse_with_digest(p, dir, &manifest, text, n, err);
}

static bool open_with_digest(mm_pack *p, const char *dir, const kind *k, mm_err *err) {
  memset(p, 0, sizeof *p);
  size_t n;
  char *text = mm_file_slurp(mm_path_of(dir, k->file).text, MM_MANIFEST_MAX, &n, err);
  bool ok = text && parse_with_digest(p, dir, k, text, n, err);
  free(text);
  return ok;
}

bool mm_pack_open(mm_pack *p, const char *dir, mm_err *err) { return open_with_digest(p, dir, &manifest, err); }

bool mm_pack_open_ranks(mm_pack *p, const char *dir, const uint32_t *rank, uint32_t count, mm_err *err) {
  const kind some = {MM_MANIFEST, read_manifest, rank, count};
  return open_with_digest(p, dir, &some, err);
}

bool mm_digests_open(mm_pack *p, const char *dir, mm_err *err) { return open_with_digest(p, dir, &digests, err); }
