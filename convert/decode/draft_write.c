/* The companion draft.safetensors: tensors as they came, or put into a scheme. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/decode/draft_source.h"
#include "loader/companions.h"
#include "quant/numbers.h"

enum { BLOCK_ROWS = 128 }; /* of a strip, at least */

typedef struct draft_output {
  int fd; /* or -1: only the digest is wanted */
  const char *path;
  uint64_t at;
  mm_sha256_state digest;
} draft_output;

static bool put(draft_output *o, const void *bytes, size_t n, mm_err *err) {
  if (o->fd >= 0 && !mm_pwrite(o->fd, o->path, bytes, n, o->at, err)) return false;
  mm_sha256_add(&o->digest, bytes, n);
  o->at += n;
  return true;
}

/* The bytes of a source's tensor, with 0 for numbers that are not finite. */
static bool put_zeroed(const mm_draft_pieces *p, draft_output *o, const mm_st_tensor *t, mm_err *err) {
  static const size_t most = (size_t)1 << 20;
  uint8_t *bytes = mm_calloc(mm_min(t->bytes, most), 1, err);
  bool ok = bytes;
  for (uint64_t at = 0, n; ok && at < t->bytes; at += n) {
    n = mm_min(t->bytes - at, most);
    memcpy(bytes, p->data + t->offset + at, n);
    mm_dflash_zero(t->dtype, bytes, n);
    ok = put(o, bytes, n, err);
  }
  free(bytes);
  return ok;
}

/* A tensor as it came. */
static bool put_kept(const mm_draft_source *s, const mm_draft_pieces *p, draft_output *o, mm_err *err) {
  bool ok = true;
  for (uint32_t k = 0; ok && k < p->count; k++) {
    const mm_st_tensor *x = p->piece[k];
    ok = s->as_zero ? put_zeroed(p, o, x, err) : put(o, p->data + x->offset, x->bytes, err);
  }
  return ok;
}

/* ---- in a scheme ---- */

/* Rows [first, first + rows) of a tensor as f32, whatever pieces have them. A file's numbers lie at any byte: each row goes through
 * `aligned`, which has 4 bytes for each of its numbers. */
static void read_rows(const mm_draft_source *s, const mm_dflash_tensor *t, const mm_draft_pieces *p, uint32_t first, uint32_t rows,
                      void *aligned, float *out) {
  const size_t k = t->cols;
  uint32_t piece = 0, at = first;
  if (s->fused) mm_unpack((const mm_packed *)(const void *)((const char *)&s->packed + t->at), 0, first, rows, out);
  for (uint32_t i = 0; !s->fused && i < rows; i++, at++) {
    while (at >= p->piece[piece]->shape.dim[0]) at -= (uint32_t)p->piece[piece++]->shape.dim[0];
    const mm_st_tensor *x = p->piece[piece];
    const size_t row = k * mm_dtype_size(x->dtype);
    memcpy(aligned, p->data + x->offset + at * row, row);
    mm_either_way(mm_widen(out + i * k, aligned, x->dtype, k));
  }
  if (s->as_zero) mm_dflash_zero(MM_F32, (uint8_t *)out, rows * k * sizeof *out);
}

/* Codes strip by strip, then the scales of all. */
static bool put_packed(const mm_draft_source *s, const mm_dflash_tensor *t, const mm_draft_pieces *p, draft_output *o, mm_err *err) {
  const uint32_t strip = (uint32_t)mm_round_up(BLOCK_ROWS, mm_scheme_rows(t->scheme));
  const size_t scale_row = mm_cells(t->cols, t->scheme->plane[1].cell.k), size = mm_dtype_size(t->scheme->plane[1].dtype);
  float *w = mm_calloc((size_t)strip * t->cols, sizeof *w, err);
  uint8_t *codes = w ? mm_calloc((size_t)strip * t->cols, 1, err) : NULL;
  char *scales = codes ? mm_calloc(mm_cells(t->rows, t->scheme->plane[1].cell.n) * scale_row, size, err) : NULL, *at = scales;
  bool ok = scales;
  for (uint32_t row = 0, n; ok && row < t->rows; row += n) {
    n = (uint32_t)mm_min(strip, t->rows - row);
    read_rows(s, t, p, row, n, codes, w);
    t->scheme->pack(&(mm_pack_args){.w = w, .n = n, .k = t->cols, .search = MM_SEARCH_ABSMAX}, (void *[MM_MAX_PLANES]){codes, at});
    at += mm_cells(n, t->scheme->plane[1].cell.n) * scale_row * size;
    ok = put(o, codes, (size_t)n * t->cols, err);
  }
  ok = ok && put(o, scales, (size_t)(at - scales), err);
  free(w), free(codes), free(scales);
  return ok;
}

/* ---- the file ---- */

/* The tensors of the file, in its order. */
typedef struct contents {
  mm_dflash_tensor tensor[MM_DFLASH_TENSORS];
  mm_draft_pieces from[MM_DFLASH_TENSORS];
  mm_dflash_stored stored[MM_DFLASH_STORED];
  mm_st_tensor header[MM_DFLASH_STORED];
  uint32_t tensors, count;
} contents;

static bool list_contents(const mm_draft_source *s, contents *c, mm_err *err) {
  for (c->tensors = c->count = 0; mm_dflash_tensor_at(&s->c, c->tensors, &c->tensor[c->tensors]); c->tensors++) {
    const mm_dflash_tensor *t = &c->tensor[c->tensors];
    mm_draft_pieces *from = &c->from[c->tensors];
    if (!mm_draft_pieces_of(s, t, from, err) || !from->piece[0]) return false;
    for (unsigned p = 0; mm_dflash_stored_at(t, p, from->piece[0]->dtype, &c->stored[c->count]); p++, c->count++)
      c->header[c->count] =
          (mm_st_tensor){.name = c->stored[c->count].name, .dtype = c->stored[c->count].dtype, .shape = c->stored[c->count].shape};
  }
  return true;
}

/* The header, which places the tensors; free() it. */
static void *make_header(const mm_draft_source *s, contents *c, size_t *bytes, mm_err *err) {
  static const uint64_t page = 4096;
  char *text = list_contents(s, c, err) ? mm_dflash_text(&s->c, err) : NULL;
  void *header = text ? mm_st_header(c->header, c->count, &(struct mm_st_meta){MM_DFLASH_KEY, text}, 1, page, bytes, err) : NULL;
  free(text);
  return header;
}

/* Bytes of the file, by its shapes. */
static bool count_bytes(const mm_draft_source *s, uint64_t *bytes, mm_err *err) {
  contents *c = mm_calloc(1, sizeof *c, err);
  size_t of_header = 0;
  void *header = c ? make_header(s, c, &of_header, err) : NULL;
  *bytes = of_header;
  for (uint32_t i = 0; header && i < c->count; i++) *bytes += c->header[i].bytes;
  const bool ok = header;
  free(header), free(c);
  return ok;
}

bool mm_draft_describe(const mm_draft_source *s, const mm_pack *from, mm_drafted *out, mm_err *err) {
  const mm_pack_file *const f = !s && from ? mm_pack_find_file(from, MM_DFLASH_FILE) : NULL;
  *out = (mm_drafted){.bytes = f ? f->size : 0};
  if (!s && !f) return true;
  mm_dflash *d = s ? NULL : mm_calloc(1, sizeof *d, err);
  const bool ok = s ? count_bytes(s, &out->bytes, err) : d && mm_dflash_open(d, from->dir, &from->model, err);
  const mm_dflash_config *c = s ? &s->c : d ? &d->c : NULL;
  if (ok && c) out->kind = c->kind == MM_DRAFT_EAGLE3 ? "eagle3" : "dflash", out->quant = c->quant ? c->quant->name : "none";
  if (d) mm_dflash_close(d);
  free(d);
  return ok;
}

/* Header and tensors, in the file's own order. */
static bool put_all(const mm_draft_source *s, draft_output *o, mm_err *err) {
  contents *c = mm_calloc(1, sizeof *c, err);
  size_t bytes = 0;
  void *header = c ? make_header(s, c, &bytes, err) : NULL;
  bool ok = header && put(o, header, bytes, err);
  for (uint32_t i = 0; ok && i < c->tensors; i++)
    ok = c->tensor[i].scheme ? put_packed(s, &c->tensor[i], &c->from[i], o, err) : put_kept(s, &c->from[i], o, err);
  free(header), free(c);
  return ok;
}

/* The companion of a packed checkpoint, byte for byte. */
static bool put_same(const mm_pack *from, draft_output *o, mm_err *err) {
  char *text = NULL;
  const mm_pack_file *f = mm_pack_find_file(from, MM_DFLASH_FILE);
  const bool ok = mm_verify_companion(from, f, &text, err) && put(o, text, (size_t)f->size, err);
  free(text);
  return ok;
}

/* Looks for numbers that are not finite. */
static bool check_numbers(mm_draft_source *s, bool as_zero, mm_err *err) {
  mm_dflash_tensor t;
  s->as_zero = as_zero;
  s->zeroed = 0;
  for (uint32_t i = 0; mm_dflash_tensor_at(&s->c, i, &t); i++) {
    mm_draft_pieces p;
    if (!mm_draft_pieces_of(s, &t, &p, err)) return false;
    for (uint32_t k = 0; k < p.count; k++)
      if (!mm_dflash_finite(p.piece[k], p.data, mm_draft_path(s), MM_BAD_INPUT, as_zero ? &s->zeroed : NULL, err)) return false;
  }
  return true;
}

bool mm_draft_write(const mm_draft_source *s, const mm_pack *from, const mm_digest *planned, int dirfd, const char *dir, mm_pack *pack,
                    mm_err *err) {
  const mm_path path = mm_path_of(dir, MM_DFLASH_FILE);
  draft_output o = {.path = path.text};
  if (!s && (!from || !mm_pack_find_file(from, MM_DFLASH_FILE))) return true;
  unlinkat(dirfd, MM_DFLASH_FILE, 0);
  if ((o.fd = mm_create_at(dirfd, dir, MM_DFLASH_FILE, err)) < 0) return false;
  mm_sha256_begin(&o.digest);
  const bool ok = (s ? put_all(s, &o, err) : put_same(from, &o, err)) && mm_fsync(o.fd, path.text, false, err);
  if (!mm_close(o.fd, path.text, ok ? err : MM_IGNORED) || !ok) return false;
  const mm_digest digest = mm_sha256_end(&o.digest);
  pack->file[pack->file_count++] = (mm_pack_file){.name = MM_DFLASH_FILE, .size = o.at, .sha256 = digest};
  return mm_digest_equal(&digest, planned) || mm_fail(err, MM_IO, "E_CHANGED", mm_at(s ? mm_draft_path(s) : from->dir, NULL),
                                                      "found another draft than when the conversion began");
}

bool mm_draft_digest(mm_draft_source *s, bool as_zero, const mm_pack *from, mm_digest *digest, mm_err *err) {
  draft_output o = {.fd = -1};
  const mm_pack_file *const given = from ? mm_pack_find_file(from, MM_DFLASH_FILE) : NULL;
  *digest = given ? given->sha256 : (mm_digest){0};
  if (!s) return true;
  mm_sha256_begin(&o.digest);
  const bool ok = check_numbers(s, as_zero, err) && put_all(s, &o, err);
  *digest = mm_sha256_end(&o.digest);
  return ok;
}

bool mm_draft_same(const mm_digest *digest, const char *dir, mm_err *err) {
  static const mm_digest none;
  const bool any = !mm_digest_equal(digest, &none);
  mm_pack is = {0};
  bool ok = mm_pack_open(&is, dir, err);
  const mm_pack_file *const there = ok ? mm_pack_find_file(&is, MM_DFLASH_FILE) : NULL;
  if (ok && (there ? !any || !mm_digest_equal(&there->sha256, digest) : any))
    ok = mm_fail(err, MM_USAGE, "E_RESUME", mm_at(dir, NULL), "found a finished conversion %s, expected %s; --force replaces it",
                 there ? "with a draft" : "without a draft",
                 !any    ? "none"
                 : there ? "another one (--draft, --draft-quant)"
                         : "one (--draft)");
  mm_pack_close(&is);
  return ok;
}
