/* A packed checkpoint as a source: every matrix that it was made from, put together from its ranks, in the encoding that its scheme is. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/source/encoding.h"
#include "convert/source/index.h"
#include "loader/bind.h"
#include "loader/companions.h"
#include "loader/unshard.h"
#include "loader/verify.h"

#define INPUT_SCALE MM_PACK_PLANES /* the "plane" of a tensor that is the static scale of activations */
#define SCHEMES_MAX 32

/* A source matrix. */
typedef struct mm_packed_entry {
  mm_whole whole;
  mm_cell cell[MM_PACK_PLANES]; /* weights under one element, once `settled` */
  bool settled;
} mm_packed_entry;

typedef struct mm_packed_source {
  mm_shards shards;
  mm_proof proof;
  size_t count, cap;
  mm_packed_entry *entry;
  mm_encoding encoding[SCHEMES_MAX]; /* of each scheme, by its number in the registry */
} mm_packed_source;

static bool has(const char *dir, const char *name) { return access(mm_path_of(dir, name).text, F_OK) == 0; }

bool mm_packed_is(const char *dir) { return has(dir, MM_MANIFEST) && !has(dir, MM_INDEX_NAME) && !has(dir, MM_SINGLE_NAME); }

void mm_packed_close(mm_hf *hf) {
  if (!hf->packed) return;
  mm_proof_close(&hf->packed->proof);
  free(hf->packed->entry);
  mm_shards_close(&hf->packed->shards);
  free(hf->packed);
  hf->packed = NULL;
}

/* ---- reading ---- */

static bool prove(void *ctx, const mm_unshard_range *x, mm_err *err) {
  return mm_proof_range(ctx, x->rank, x->part, x->offset, x->bytes, err);
}

/* Lines [first, first + count) of a plane on its stored grid. */
static bool stored_lines(const mm_packed_source *p, const mm_whole *w, unsigned plane, uint32_t first, uint32_t count, void *out,
                         mm_err *err) {
  return mm_whole_cells(w, plane, first, count, out, prove, (void *)&p->proof, err);
}

static const mm_pack_plane *plane_of(const mm_packed_entry *e, unsigned plane) {
  return &e->whole.s->pack.tensor[e->whole.tensor].plane[plane];
}

/* Stored cells in one of a coarser grid; 0 spans all `extent`. */
static uint32_t ratio(uint32_t coarse, uint32_t stored, uint32_t extent) {
  return stored == 0 ? 1 : coarse == 0 ? mm_cells(extent, stored) : coarse / stored;
}

/* Line `line` of a plane on a coarser grid than it is stored on: the first of each cell's elements, into out[width]. */
static bool coarse_line(const mm_packed_source *p, const mm_packed_entry *e, unsigned plane, uint32_t line, uint8_t *out, mm_err *err) {
  const mm_pack_plane *x = plane_of(e, plane);
  mm_cell c = e->cell[plane];
  uint32_t cols = mm_whole_cols(&e->whole), width = mm_cells(cols, c.k), step = ratio(c.k, x->cell_k, cols);
  size_t size = mm_dtype_size(x->dtype), stored = mm_cells(cols, x->cell_k);
  uint8_t *all = mm_calloc(stored, size, err);
  bool ok = all && stored_lines(p, &e->whole, plane, line * ratio(c.n, x->cell_n, mm_whole_rows(&e->whole)), 1, all, err);
  for (uint32_t i = 0; ok && i < width; i++) memcpy(out + i * size, all + (size_t)i * step * size, size);
  free(all);
  return ok;
}

static bool read_lines(mm_hf_reader *r, const mm_hf_tensor *t, uint64_t at, void *buf, size_t n, mm_err *err) {
  const mm_hf *hf = r->hf;
  const mm_packed_source *p = hf->packed;
  const mm_packed_entry *e = &p->entry[t->matrix];
  if (t->plane == INPUT_SCALE) {
    memcpy(buf, &p->shards.pack.tensor[e->whole.tensor].input_scale, n);
    return true;
  }
  const mm_pack_plane *x = plane_of(e, t->plane);
  mm_cell c = e->cell[t->plane];
  uint64_t line = mm_cells(mm_whole_cols(&e->whole), c.k) * mm_dtype_size(x->dtype);
  if (at % line != 0 || n % line != 0)
    return mm_fail(err, MM_BUG, "E_BUG", mm_at(hf->dir, t->original), "found a read of %zu bytes at %llu, expected lines of %llu", n,
                   (unsigned long long)at, (unsigned long long)line);
  uint32_t first = (uint32_t)(at / line), count = (uint32_t)(n / line);
  if (c.n == x->cell_n && c.k == x->cell_k) return stored_lines(p, &e->whole, t->plane, first, count, buf, err);
  for (uint32_t i = 0; i < count; i++)
    if (!coarse_line(p, e, t->plane, first + i, (uint8_t *)buf + i * line, err)) return false;
  return true;
}

static bool stream_lines(mm_hf_reader *r, const mm_hf_tensor *t, uint64_t at, uint8_t *buf, size_t n, size_t *skew, mm_err *err) {
  *skew = 0;
  return read_lines(r, t, at, buf, n, err);
}

/* ---- grids ---- */

/* Sets *same: the stored scales are equal within every cell of a coarser grid. */
static bool repeats(const mm_packed_source *p, const mm_packed_entry *e, unsigned plane, mm_cell c, bool *same, mm_err *err) {
  const mm_pack_plane *x = plane_of(e, plane);
  uint32_t rows = mm_whole_rows(&e->whole), cols = mm_whole_cols(&e->whole);
  uint32_t lines = mm_cells(rows, x->cell_n), band = ratio(c.n, x->cell_n, rows), width = mm_cells(cols, x->cell_k),
           step = ratio(c.k, x->cell_k, cols);
  size_t size = mm_dtype_size(x->dtype);
  uint8_t *all = mm_calloc((size_t)band * width, size, err);
  bool ok = all != NULL;
  *same = true;
  for (uint32_t at = 0; ok && *same && at < lines; at += band) {
    uint32_t count = (uint32_t)mm_min(band, lines - at);
    ok = stored_lines(p, &e->whole, plane, at, count, all, err);
    for (uint32_t i = 0; ok && *same && i < count; i++)
      for (uint32_t j = 0; *same && j < width; j++)
        *same = memcmp(all + ((size_t)i * width + j) * size, all + (size_t)(j - j % step) * size, size) == 0;
  }
  free(all);
  return ok;
}

/* The coarsest grid along one side, from the scheme's down, on which nothing is lost. */
static bool coarsest(const mm_packed_source *p, const mm_packed_entry *e, unsigned plane, mm_cell scheme, bool down, uint32_t *out,
                     mm_err *err) {
  const mm_pack_plane *x = plane_of(e, plane);
  mm_cell c = {x->cell_n, x->cell_k};
  uint32_t *side = down ? &c.n : &c.k, stored = *side, most = down ? scheme.n : scheme.k;
  bool same = stored == most;
  *out = most;
  if (same) return true;
  for (uint32_t d = most; d != stored; d = d == 0 ? stored : d - 1) {
    if (d != 0 && (most % d != 0 || d % stored != 0)) continue;
    *side = d;
    if (!repeats(p, e, plane, c, &same, err)) return false;
    if (same) {
      *out = d;
      return true;
    }
  }
  *out = stored;
  return true;
}

/* The grid that the manifest declares, on which the stored scales must repeat. */
static bool known_grid(const mm_hf *hf, const mm_packed_entry *e, unsigned plane, mm_cell *out, mm_err *err) {
  const mm_pack_plane *x = plane_of(e, plane);
  bool same = true;
  *out = (mm_cell){x->grid.n, x->grid.k};
  if ((x->cell_n != out->n || x->cell_k != out->k) && !repeats(hf->packed, e, plane, *out, &same, err)) return false;
  return same || mm_fail(err, MM_INTEGRITY, "E_MANIFEST", mm_at(hf->dir, hf->packed->shards.pack.tensor[e->whole.tensor].name),
                         "found scales that differ within a cell of the grid [%u, %u], expected equal ones", out->n, out->k);
}

/* Where a cut fell inside a block, its scale was stored on a finer grid: undoes that, for what was made on a coarser one. */
static bool settle(mm_hf *hf, mm_packed_entry *e, mm_err *err) {
  const mm_pack_tensor *t = &hf->packed->shards.pack.tensor[e->whole.tensor];
  const mm_scheme *s = mm_scheme_find(t->scheme);
  for (unsigned i = 0; i < t->plane_count; i++) {
    e->cell[i] = (mm_cell){t->plane[i].cell_n, t->plane[i].cell_k};
    if (t->plane[i].grid.known ? !known_grid(hf, e, i, &e->cell[i], err)
                               : s->plane[i].scale && !(coarsest(hf->packed, e, i, s->plane[i].cell, true, &e->cell[i].n, err) &&
                                                        coarsest(hf->packed, e, i, s->plane[i].cell, false, &e->cell[i].k, err)))
      return false;
  }
  e->settled = true;
  return true;
}

/* ---- matrices ---- */

static mm_hf_tensor *part(const mm_hf *hf, const char *source, const char *suffix) {
  return mm_hf_find(hf, MM_FORMATTED(512, "%s%s", source, suffix));
}

static mm_source as_source(const mm_packed_entry *e, mm_hf_tensor *t) {
  t->used = true;
  return (mm_source){.tensor = t, .line = mm_cells(mm_whole_cols(&e->whole), e->cell[t->plane].k)};
}

static mm_shape shape_on(const mm_packed_entry *e, mm_cell c) {
  uint32_t rows = mm_whole_rows(&e->whole), cols = mm_whole_cols(&e->whole);
  if (e->whole.s->pack.tensor[e->whole.tensor].vector) return mm_shape1(rows);
  return mm_shape2(mm_cells(rows, c.n), mm_cells(cols, c.k));
}

/* The manifest was checked against its own model; the rules go by config.json's. */
static bool fits(const mm_hf *hf, const mm_packed_entry *e, const mm_model *m, const mm_rule *r, const char *name, mm_err *err) {
  uint32_t rows = mm_dim_extent(r->rows, m), cols = mm_dim_extent(r->cols, m);
  if (mm_whole_rows(&e->whole) == rows && mm_whole_cols(&e->whole) == cols) return true;
  return mm_fail(err, MM_INTEGRITY, "E_SHAPE", mm_at(hf->dir, name), "found [%u, %u] in the manifest, expected [%u, %u] by config.json",
                 mm_whole_rows(&e->whole), mm_whole_cols(&e->whole), rows, cols);
}

static mm_found matrix_of(mm_hf *hf, const mm_model *m, const mm_rule_piece *piece, mm_matrix *out, mm_err *err) {
  mm_packed_source *p = hf->packed;
  const mm_rule *r = piece->rules[piece->i];
  char name[256];
  mm_hf_tensor *codes = mm_hf_find(hf, mm_rule_name(name, sizeof name, r->theirs, piece->layer, piece->expert));
  if (!codes) return MM_ABSENT;
  mm_packed_entry *e = &p->entry[codes->matrix];
  if (!fits(hf, e, m, r, name, err) || (!e->settled && !settle(hf, e, err))) return MM_FAILED;
  const mm_pack_tensor *t = &p->shards.pack.tensor[e->whole.tensor];
  const mm_encoding *encoding = NULL;
  for (size_t i = 0; !encoding; i++)
    if (mm_scheme_at(i) == mm_scheme_find(t->scheme)) encoding = &p->encoding[i];
  *out = (mm_matrix){.encoding = encoding, .weight = codes, .rows = mm_whole_rows(&e->whole), .cols = mm_whole_cols(&e->whole)};
  out->line = as_source(e, codes).line;
  out->steps = mm_pack_steps(t, e->whole.expert, e->whole.piece);
  for (unsigned i = 1; i < t->plane_count; i++) {
    mm_hf_tensor *x = part(hf, name, t->plane[i].suffix);
    x->shape = shape_on(e, e->cell[i]);
    out->part[i == 1 ? MM_SCALE : MM_GLOBAL] = as_source(e, x);
    if (!mm_shape_bytes(&x->shape, x->dtype, &x->bytes)) x->bytes = 0;
  }
  if (t->plane_count > 1) out->cell = e->cell[1];
  mm_hf_tensor *input = part(hf, name, "_input_scale");
  if (input) {
    input->used = true;
    out->part[MM_INPUT] = (mm_source){.tensor = input, .line = 1};
  }
  return MM_FOUND;
}

const mm_source_kind mm_source_packed = {matrix_of, read_lines, stream_lines};

/* ---- opening ---- */

static bool add_name(mm_hf *hf, size_t *cap, const char *name, const char *original, mm_hf_tensor like, mm_err *err) {
  if (!MM_GROW(hf->tensor, cap, hf->tensor_count + 1, err)) return false;
  like.name = mm_arena_strndup(&hf->arena, name, strlen(name), err);
  like.original = mm_arena_strndup(&hf->arena, original, strlen(original), err);
  hf->tensor[hf->tensor_count++] = like;
  return like.name && like.original;
}

/* The file in which the first rank of the stage has a plane. */
static uint32_t file_of(const mm_packed_source *p, const mm_whole *w, unsigned plane) {
  uint32_t rank = p->shards.pack.tensor[w->tensor].stage * p->shards.pack.tp;
  return (uint32_t)(p->proof.first[rank] + p->shards.rank[rank].plane[w->tensor * MM_PACK_PLANES + plane].part);
}

/* Names of one matrix's planes, as its source would have called them. */
static bool add_matrix(mm_hf *hf, size_t *cap, mm_whole w, mm_err *err) {
  mm_packed_source *p = hf->packed;
  const mm_pack_tensor *t = &p->shards.pack.tensor[w.tensor];
  char source[256], name[512], original[512];
  if (!MM_GROW(p->entry, &p->cap, p->count + 1, err)) return false;
  mm_packed_entry *e = &p->entry[p->count];
  *e = (mm_packed_entry){.whole = w};
  mm_whole_name(&w, source, sizeof source);
  for (unsigned i = 0; i < t->plane_count; i++) {
    mm_hf_tensor x = {.dtype = t->plane[i].dtype,
                      .shape = shape_on(e, (mm_cell){t->plane[i].cell_n, t->plane[i].cell_k}),
                      .file = file_of(p, &w, i),
                      .found = true,
                      .matrix = (uint32_t)p->count,
                      .plane = i};
    snprintf(name, sizeof name, "%s%s", source, t->plane[i].suffix);
    snprintf(original, sizeof original, "%s%s", t->name, t->plane[i].suffix);
    if (!mm_shape_bytes(&x.shape, x.dtype, &x.bytes))
      return mm_fail(err, MM_LIMIT, "E_SIZE", mm_at(hf->dir, name), "found a size beyond 64 bits, expected a smaller one");
    if (!add_name(hf, cap, name, original, x, err)) return false;
  }
  mm_hf_tensor input = {
      .dtype = MM_F32, .shape = mm_shape1(1), .found = true, .file = file_of(p, &w, 0), .matrix = (uint32_t)p->count, .plane = INPUT_SCALE};
  snprintf(name, sizeof name, "%s_input_scale", source);
  p->count++;
  return t->input_scale == 0 || add_name(hf, cap, name, t->name, input, err);
}

/* A kv_scale of the source is in the tensors of k and of v: one name. */
static bool same_source_before(const mm_pack *p, size_t tensor) {
  return tensor > 0 && strcmp(p->tensor[tensor - 1].piece[0].source, p->tensor[tensor].piece[0].source) == 0;
}

static bool add_matrices(mm_hf *hf, mm_err *err) {
  const mm_shards *s = &hf->packed->shards;
  size_t cap = 0;
  for (size_t i = 0; i < s->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &s->pack.tensor[i];
    if (same_source_before(&s->pack, i)) continue;
    for (unsigned j = 0; j < t->piece_count; j++)
      for (uint32_t e = 0; e < (t->whole_lead ? t->whole_lead : 1); e++)
        if (!add_matrix(hf, &cap, (mm_whole){s, i, j, e}, err)) return false;
  }
  const mm_hf_tensor *twice = mm_hf_sort(hf);
  return !twice || mm_fail(err, MM_INTEGRITY, "E_DUP_TENSOR", mm_at(hf->dir, twice->name), "found in two packed tensors, expected in one");
}

/* All parts; a part's root stands for its content. */
static bool add_files(mm_hf *hf, mm_err *err) {
  const mm_pack *p = hf->manifest;
  size_t count = hf->packed->proof.first[mm_pack_ranks(p)];
  hf->file = mm_calloc(count, sizeof *hf->file, err);
  if (!hf->file) return false;
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++)
    for (size_t i = 0; i < p->rank[r].part_count; i++) {
      const mm_part *x = &p->rank[r].part[i];
      mm_file f = MM_FILE_NONE;
      char *path = mm_arena_printf(&hf->arena, err, "%s/%s", hf->dir, x->file);
      if (!path || !mm_file_open(&f, path, err)) return false;
      hf->file[hf->file_count++] = (mm_hf_file){.name = x->file, .path = path, .id = f.id, .header = x->root};
      mm_file_close(&f);
    }
  return true;
}

static bool all_ranks(const mm_pack *p, mm_err *err) {
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++)
    if (p->rank[r].part_count == 0)
      return mm_fail(err, MM_BAD_INPUT, "E_RANKS", mm_at(p->dir, NULL), "found no files of rank %u, expected those of all %u ranks", r,
                     mm_pack_ranks(p));
  return true;
}

static void make_encodings(mm_packed_source *p) {
  const mm_scheme *s;
  for (size_t i = 0; i < SCHEMES_MAX && (s = mm_scheme_at(i)); i++) {
    mm_encoding *e = &p->encoding[i];
    *e = (mm_encoding){.name = s->name, .code = s->code, .signed_scale = s->signed_scale, .scheme = s->name, .packed = true};
    e->codes = (mm_stored_form){.suffix = "", .dtypes = 1u << s->plane[0].dtype, .cell = s->plane[0].cell};
    if (s->plane_count > 1)
      e->part[MM_SCALE] = (mm_stored_form){.suffix = s->plane[1].suffix, .dtypes = 1u << s->plane[1].dtype, .cell = s->plane[1].cell};
    if (s->plane_count > 2)
      e->part[MM_GLOBAL] = (mm_stored_form){.suffix = s->plane[2].suffix, .dtypes = 1u << s->plane[2].dtype, .span = MM_SPAN_ONE};
  }
}

bool mm_packed_open(mm_hf *hf, mm_err *err) {
  mm_packed_source *p = hf->packed = mm_calloc(1, sizeof *p, err);
  if (!p || !mm_shards_open(&p->shards, hf->dir, err) || !all_ranks(&p->shards.pack, err) || !mm_verify_files(&p->shards.pack, err) ||
      !mm_bind_check(&p->shards, err) || !mm_proof_open(&p->proof, &p->shards, err))
    return false;
  hf->kind = &mm_source_packed;
  hf->manifest = &p->shards.pack;
  make_encodings(p);
  hf->quantization.block = (mm_cell){128, 128}; /* strips of rows begin on whole blocks */
  return add_files(hf, err) && add_matrices(hf, err);
}
