/* Recognising the encoding of a matrix from its tensors, and what packed schemes hold bit for bit. */
#include "convert/source/encoding.h"

#include <stdio.h>
#include <string.h>

#define NAME_MAX_LEN 320

/* How far a row of the table fits the tensors of a matrix; what lies furthest explains a refusal best. */
typedef enum mm_fit { FIT_NO_CODES, FIT_DTYPE, FIT_SHAPE, FIT_NO_SCALE, FIT_SCALE_DTYPE, FIT_NO_BLOCK, FIT_SCALE_SHAPE, FIT_ALL } mm_fit;

/* A refusal's list of what was expected, no item twice. */
typedef struct mm_expected {
  unsigned count;
  char item[8][NAME_MAX_LEN];
} mm_expected;

static void offer(mm_expected *c, const char *item) {
  for (unsigned i = 0; i < c->count; i++)
    if (strcmp(c->item[i], item) == 0) return;
  if (c->count < sizeof c->item / sizeof *c->item) snprintf(c->item[c->count++], sizeof *c->item, "%s", item);
}

/* U8 scales are E8M0 that does not say so. */
static void offer_dtypes(mm_expected *c, uint32_t dtypes) {
  if (dtypes & 1u << MM_F8_E8M0) dtypes &= ~(1u << MM_U8);
  for (int t = MM_DTYPE_COUNT - 1; t >= 0; t--)
    if (dtypes & 1u << t) offer(c, mm_dtype_name((mm_dtype)t));
}

/* "a, b or c" */
static const char *choice_text(const mm_expected *c, char *out, size_t cap) {
  size_t n = 0;
  *out = 0;
  for (unsigned i = 0; i < c->count && n < cap; i++)
    n += (size_t)snprintf(out + n, cap - n, "%s%s", i == 0 ? "" : i + 1 < c->count ? ", " : " or ", c->item[i]);
  return out;
}

/* ---- tensors by name, shapes by place ---- */

/* The name with its "weight" replaced; what has another name ("…correction_bias") has no other tensors. No snprintf: a plan of M2 asks half
 * a million times. */
static char *part_name(char out[NAME_MAX_LEN], const mm_site *p, const char *suffix) {
  bool stem = mm_ends_with(p->name, "weight");
  if (!stem) suffix = "";
  size_t n = mm_min(strlen(p->name) - (stem ? strlen("weight") : 0), NAME_MAX_LEN - 1), k = mm_min(strlen(suffix), NAME_MAX_LEN - 1 - n);
  memcpy(out, p->name, n);
  memcpy(out + n, suffix, k);
  out[n + k] = 0;
  return out;
}

static mm_hf_tensor *find(const mm_hf *hf, const mm_site *p, const char *suffix) {
  char name[NAME_MAX_LEN];
  return suffix ? mm_hf_find(hf, part_name(name, p, suffix)) : NULL;
}

static bool typed(const mm_stored_form *f, const mm_hf_tensor *t) { return f->dtypes >> t->dtype & 1; }

/* The form's cell with what the configuration and the tensor settle; a side that covers everything is 0. */
static mm_cell cell_of(const mm_stored_form *f, const mm_site *p, const mm_hf_tensor *t, mm_cell block) {
  mm_cell c = f->cell;
  if (c.n == MM_CELL_BLOCK) c = block;
  if (c.k == 2 && t->dtype == MM_F4) c.k = 1;
  if (c.k != MM_CELL_GROUP) return c;
  uint32_t axis = (p->entries ? 1u : 0u) + (f->span == MM_SPAN_TURNED ? 0u : 1u);
  uint64_t groups = axis < t->shape.rank ? t->shape.dim[axis] : 0;
  c.k = groups == 1 ? 0 : groups == 0 || p->cols % groups != 0 ? MM_CELL_GROUP : (uint32_t)(p->cols / groups);
  return c;
}

/* Rows of cells of the pieces before this one, or of all. */
static uint64_t rows_of_cells(const mm_site *p, unsigned pieces, uint32_t cell) {
  uint64_t n = 0;
  for (unsigned i = 0; i < pieces; i++) n += mm_cells(p->piece_rows[i], cell);
  return n;
}

/* The shapes a form may have here, the usual one first; returns how many. */
static unsigned shapes(const mm_stored_form *f, const mm_site *p, mm_cell c, mm_shape out[3]) {
  uint64_t n = rows_of_cells(p, p->pieces, c.n), k = mm_cells(p->cols, c.k);
  mm_shape lead = p->entries ? mm_shape1(p->entries) : (mm_shape){0};
  bool scalar = p->vector && n == 1; /* a vector of one may have no axis */
  unsigned count = f->span == MM_SPAN_ONE ? 3 : f->span == MM_SPAN_ROWS || scalar ? 2 : 1;
#define AXIS(i, extent) out[i].dim[out[i].rank++] = (extent)
  for (unsigned i = 0; i < count; i++) out[i] = lead;
  switch (f->span) {
    case MM_SPAN_GRID:
      AXIS(0, n);
      if (!p->vector) AXIS(0, k);
      break;
    case MM_SPAN_TURNED:
      AXIS(0, k);
      AXIS(0, n);
      break;
    case MM_SPAN_SPREAD:
      AXIS(0, n);
      AXIS(0, 1);
      AXIS(0, k);
      AXIS(0, 1);
      break;
    case MM_SPAN_ROWS:
      AXIS(0, n);
      AXIS(1, n);
      AXIS(1, 1);
      break;
    case MM_SPAN_COLS: AXIS(0, k); break;
    case MM_SPAN_SIDES: AXIS(0, 2); break;
    case MM_SPAN_ONE:
      AXIS(1, 1);
      AXIS(2, p->pieces);
      if (!p->entries && p->pieces == 1) AXIS(2, 1);
      break;
  }
#undef AXIS
  return count;
}

/* Where the matrix begins in a tensor of the form whose shape is the `which`th possible one. */
static mm_source place_part(const mm_stored_form *f, const mm_site *p, mm_cell c, mm_hf_tensor *t, unsigned which) {
  uint64_t n = rows_of_cells(p, p->pieces, c.n), before = rows_of_cells(p, p->piece, c.n), k = mm_cells(p->cols, c.k), at = 0, line = k;
  switch (f->span) {
    case MM_SPAN_GRID:
    case MM_SPAN_SPREAD: at = (p->entry * n + before) * k; break;
    case MM_SPAN_TURNED:
      at = p->entry * n * k + before;
      line = n;
      break;
    case MM_SPAN_ROWS:
      at = p->entry * n + before;
      line = 1;
      break;
    case MM_SPAN_COLS: at = p->entry * k; break;
    case MM_SPAN_SIDES: at = 2 * p->entry; break;
    case MM_SPAN_ONE: at = which < 2 ? p->entry : (uint64_t)p->entry * p->pieces + p->piece; break;
  }
  return (mm_source){t, at * mm_dtype_bits(t->dtype) / 8, line};
}

/* Index of the tensor's shape among the possible ones, or -1. A grid whose groups do not divide K has none. [n, 1, 1] is a vector, too:
 * compressed-tensors' scales of attention heads. */
static int shape_index(const mm_stored_form *f, const mm_site *p, mm_cell c, const mm_hf_tensor *t) {
  mm_shape s[3];
  const mm_shape *own = &t->shape;
  if (c.k == MM_CELL_GROUP) return -1;
  if (p->vector && own->rank == 3 && own->dim[0] == p->rows && own->dim[1] == 1 && own->dim[2] == 1) return 0;
  for (unsigned i = 0, n = shapes(f, p, c, s); i < n; i++)
    if (mm_shape_equal(&t->shape, &s[i])) return (int)i;
  return -1;
}

static void offer_shapes(mm_expected *choice, const mm_stored_form *f, const mm_site *p, mm_cell c) {
  char text[128];
  mm_shape s[3];
  if (c.k == MM_CELL_GROUP) {
    uint64_t n = rows_of_cells(p, p->pieces, c.n);
    char groups[24], rows[24], lead[24] = "";
    snprintf(groups, sizeof groups, "%u/g", p->cols);
    snprintf(rows, sizeof rows, "%llu", (unsigned long long)n);
    if (p->entries) snprintf(lead, sizeof lead, "%u, ", p->entries);
    bool turned = f->span == MM_SPAN_TURNED;
    snprintf(text, sizeof text, "[%s%s, %s]", lead, turned ? groups : rows, turned ? rows : groups);
    offer(choice, text);
    return;
  }
  for (unsigned i = 0, n = shapes(f, p, c, s); i < n; i++) offer(choice, mm_shape_text(&s[i], text, sizeof text));
}

/* ---- choosing a row ---- */

static mm_fit fit(const mm_hf *hf, const mm_encoding *e, const mm_site *p) {
  mm_cell block = hf->quantization.block;
  const mm_stored_form *scale = &e->part[MM_SCALE];
  const mm_hf_tensor *t = find(hf, p, e->codes.suffix), *s = find(hf, p, scale->suffix);
  if (!t || (e->whole && !hf->quantization.whole)) return FIT_NO_CODES;
  if (!typed(&e->codes, t)) return FIT_DTYPE;
  if (shape_index(&e->codes, p, cell_of(&e->codes, p, t, block), t) < 0) return FIT_SHAPE;
  if (!scale->suffix) return FIT_ALL;
  if (!s) return FIT_NO_SCALE;
  if (!typed(scale, s)) return FIT_SCALE_DTYPE;
  mm_cell c = cell_of(scale, p, s, block);
  if (scale->cell.n == MM_CELL_BLOCK && c.n == 0) return FIT_NO_BLOCK;
  return shape_index(scale, p, c, s) < 0 ? FIT_SCALE_SHAPE : FIT_ALL;
}

static bool no_config(const mm_hf *hf, const mm_hf_tensor *t, const char *what, mm_err *err) {
  bool declared = hf->quantization.method != NULL;
  return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_hf_at(hf, t), "found %s of %s, but no %s in %s, expected one", what,
                 mm_dtype_name(t->dtype), declared ? "weight_block_size" : "quantization_config",
                 declared ? hf->quantization.path : hf->config_path);
}

/* Says what the rows that fitted up to `best` wanted. */
static bool refuse(const mm_hf *hf, const mm_site *p, const mm_encoding *const *rows, mm_fit best, mm_err *err) {
  mm_expected want = {0};
  const mm_hf_tensor *t = NULL, *s = NULL;
  char name[NAME_MAX_LEN], shape[128];
  for (; *rows; rows++) {
    const mm_stored_form *codes = &(*rows)->codes, *scale = &(*rows)->part[MM_SCALE];
    if (fit(hf, *rows, p) != best) continue;
    t = find(hf, p, codes->suffix);
    s = find(hf, p, scale->suffix);
    if (best == FIT_DTYPE) offer_dtypes(&want, codes->dtypes);
    if (best == FIT_SHAPE) offer_shapes(&want, codes, p, cell_of(codes, p, t, hf->quantization.block));
    if (best == FIT_NO_SCALE) offer(&want, part_name(name, p, scale->suffix));
    if (best == FIT_SCALE_DTYPE) offer_dtypes(&want, scale->dtypes);
    if (best == FIT_SCALE_SHAPE) offer_shapes(&want, scale, p, cell_of(scale, p, s, hf->quantization.block));
  }
  char list[1024];
  choice_text(&want, list, sizeof list);
  if (!t) return mm_fail(err, MM_BUG, "E_BUG", mm_at(hf->dir, NULL), "found no row behind the best match");
  mm_where at = mm_hf_at(hf, t), at_scale = s ? mm_hf_at(hf, s) : at;
  const char *dtype = mm_dtype_name(t->dtype);
  switch (best) {
    case FIT_DTYPE:
      if (t->dtype == MM_I32 && hf->quantization.method && strcmp(hf->quantization.method, "quark") == 0)
        return mm_fail(err, MM_UNSUPPORTED, "E_Q_METHOD", at,
                       "found Quark's packed words of I32, expected a weight in a type of its own: %s", list);
      return mm_fail(err, MM_BAD_INPUT, "E_DTYPE", at, "found %s, expected %s", dtype, list);
    case FIT_SHAPE:
      return mm_fail(err, MM_BAD_INPUT, "E_SHAPE", at, "found shape %s, expected %s", mm_shape_text(&t->shape, shape, sizeof shape), list);
    case FIT_NO_SCALE: return mm_fail(err, MM_BAD_INPUT, "E_Q_MISSING", at, "found %s without a scale, expected %s", dtype, list);
    case FIT_SCALE_DTYPE:
      return mm_fail(err, MM_BAD_INPUT, "E_Q_DTYPE", at_scale, "found a scale of %s, expected %s", mm_dtype_name(s->dtype), list);
    case FIT_SCALE_SHAPE:
      return mm_fail(err, MM_BAD_INPUT, "E_Q_SHAPE", at_scale, "found shape %s, expected %s", mm_shape_text(&s->shape, shape, sizeof shape),
                     list);
    default: return no_config(hf, s, "a scale for blocks", err);
  }
}

/* A weight under a name of its own kind of quantization that is not read. */
static mm_found refused_by_name(const mm_hf *hf, const mm_site *p, mm_err *err) {
  for (const mm_refused_suffix *r = mm_refused_suffixes; r->suffix; r++) {
    const mm_hf_tensor *t = find(hf, p, r->suffix);
    if (!t) continue;
    mm_fail(err, MM_UNSUPPORTED, r->code, mm_hf_at(hf, t), "found %s, expected codes and scales of a kind that is read", r->what);
    return MM_FAILED;
  }
  return MM_ABSENT;
}

static const mm_encoding *recognise(const mm_hf *hf, const mm_site *p, const mm_encoding *const *rows, mm_fit *best) {
  *best = FIT_NO_CODES;
  for (; *rows; rows++) {
    mm_fit f = fit(hf, *rows, p);
    if (f > *best) *best = f;
    if (f == FIT_ALL) return *rows;
  }
  return NULL;
}

/* ---- the companions of codes and scale ---- */

static bool companion(mm_hf *hf, const mm_site *p, const mm_encoding *e, mm_companion i, mm_matrix *out, mm_err *err) {
  mm_stored_form f = e->part[i];
  const mm_quantization *q = &hf->quantization;
  mm_hf_tensor *t = find(hf, p, f.suffix);
  bool required = f.suffix && (!f.optional || (i == MM_ZERO && out->zeros) || (i == MM_ORDER && out->reordered));
  char name[NAME_MAX_LEN], shape[128], list[256];
  if (!t)
    return !required || mm_fail(err, MM_BAD_INPUT, "E_Q_MISSING", mm_hf_at(hf, out->weight), "found %s without \"%s\", expected both",
                                e->name, part_name(name, p, f.suffix));
  mm_expected want = {0};
  if (!typed(&f, t)) {
    offer_dtypes(&want, f.dtypes);
    return mm_fail(err, MM_BAD_INPUT, "E_Q_DTYPE", mm_hf_at(hf, t), "found %s, expected %s", mm_dtype_name(t->dtype),
                   choice_text(&want, list, sizeof list));
  }
  mm_cell c = cell_of(&f, p, t, q->block);
  if (i == MM_SCALE) out->cell = c;
  if (i == MM_ZERO) c.k = out->cell.k; /* as many groups as scales */
  int which = shape_index(&f, p, c, t);
  if (which < 0) {
    offer_shapes(&want, &f, p, c);
    return mm_fail(err, MM_BAD_INPUT, "E_Q_SHAPE", mm_hf_at(hf, t), "found shape %s, expected %s",
                   mm_shape_text(&t->shape, shape, sizeof shape), choice_text(&want, list, sizeof list));
  }
  t->used = true;
  out->part[i] = place_part(&f, p, c, t, (unsigned)which);
  return true;
}

/* A power of two that makes as many groups of the columns as groups of g do, the last one shorter; 0: there is none, or g is one. */
static uint32_t other_group(uint32_t cols, uint32_t g) {
  uint32_t p = 8;
  while (p < cols && mm_cells(cols, p) > mm_cells(cols, g)) p *= 2;
  return (g & (g - 1)) != 0 && g < cols && p < cols && mm_cells(cols, p) == mm_cells(cols, g) ? p : 0;
}

/* A group that the configuration knows, or the only one that can be meant. */
static bool group_declared(const mm_hf *hf, const mm_matrix *x, mm_err *err) {
  const mm_quantization *q = &hf->quantization;
  uint32_t g = x->cell.k ? x->cell.k : x->cols;
  bool known = q->groups == 0 || x->encoding->part[MM_SCALE].cell.k != MM_CELL_GROUP;
  const uint32_t other = x->encoding->part[MM_SCALE].cell.k == MM_CELL_GROUP && !x->part[MM_ORDER].tensor ? other_group(x->cols, g) : 0;
  if (q->groups == 0 && other)
    return mm_fail(
        err, MM_BAD_INPUT, "E_Q_SHAPE", mm_hf_at(hf, x->part[MM_SCALE].tensor),
        "found %u groups of %u columns, which may be groups of %u or of %u with a shorter last one, expected one group_size in %s",
        mm_cells(x->cols, g), x->cols, g, other, q->path);
  for (unsigned i = 0; i < q->groups; i++) known = known || q->group[i] == g || (q->group[i] > x->cols && g == x->cols);
  if (q->bits && x->weight->dtype == MM_I32 && !(q->bits & mm_code_bits(x)))
    return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_hf_at(hf, x->weight), "found codes of %u bits, expected %u as %s says",
                   mm_code_bits(x), q->bits, q->path);
  return known || mm_fail(err, MM_BAD_INPUT, "E_Q_SHAPE", mm_hf_at(hf, x->part[MM_SCALE].tensor),
                          "found a scale for every %u columns, expected one for every %u, a group_size of %s", g,
                          (uint32_t)mm_min(q->group[0], x->cols), q->path);
}

static void mark_used(mm_hf *hf, const mm_site *p, const char *suffix) {
  mm_hf_tensor *t = find(hf, p, suffix);
  if (t) t->used = true;
}

/* The static scale of inputs in FP8 says nothing to the schemes of FP4; modules without one may stand next to it. */
static bool scales_other_inputs(const mm_hf *hf, const mm_encoding *e) {
  return e->part[MM_GLOBAL].suffix && (hf->quantization.inputs.of[MM_NUMBERS_FP4] >> MM_NUMBERS_FP8 & 1);
}

/* Codes of a kind that the description contradicts. Modules left in FP8 next to others are common and no contradiction. */
static bool kind_declared(const mm_hf *hf, const mm_encoding *e, const mm_hf_tensor *t, mm_err *err) {
  const mm_quantization *q = &hf->quantization;
  const mm_numbers kind = mm_numbers_of(e->code);
  char found[96], expected[96];
  if (q->e5m2 && t->dtype == MM_F8_E4M3)
    return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_hf_at(hf, t), "found %s, expected F8_E5M2 as key \"fmt\" of %s says",
                   mm_dtype_name(t->dtype), q->path);
  const unsigned integers = 1u << MM_NUMBERS_INT4 | 1u << MM_NUMBERS_INT8; /* whose width in words is compared with the groups */
  const bool words = t->dtype == MM_I32 && q->bits && (q->kinds & integers);
  return !q->kinds || kind == MM_NUMBERS_FP8 || words || (q->kinds >> kind & 1) ||
         mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_hf_at(hf, t), "found weights %s, expected them %s as %s says",
                 mm_numbers_words(1u << kind, found), mm_numbers_words(q->kinds, expected), q->path);
}

static bool take(mm_hf *hf, const mm_site *p, const mm_encoding *e, mm_matrix *out, mm_err *err) {
  mm_hf_tensor *t = find(hf, p, e->codes.suffix);
  mm_cell c = cell_of(&e->codes, p, t, hf->quantization.block);
  mm_source codes = place_part(&e->codes, p, c, t, 0);
  *out = (mm_matrix){.encoding = e, .weight = t, .at = codes.at, .line = codes.line, .rows = p->rows, .cols = p->cols};
  t->used = true;
  if (e->code == MM_CODE_PLAIN) return true;
  if (!hf->quantization.method) return no_config(hf, t, "codes", err);
  if (!kind_declared(hf, e, t, err)) return false;
  if (e->less && !hf->quantization.gptq)
    return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_hf_at(hf, t),
                   "found GPTQ's words, but %s declares \"%s\", which leaves open how zero points are stored; expected gptq",
                   hf->quantization.path, hf->quantization.method);
  const mm_quantization *q = &hf->quantization;
  const mm_where at = mm_hf_at(hf, t);
  mm_module_group group = {true, q->zeros, q->symmetric, q->order};
  if (q->differing && e->part[MM_ZERO].suffix && !mm_module_groups_find(q->differing, &at, &group, err)) return false;
  out->zeros = group.zeros;
  out->symmetric = group.symmetric;
  out->reordered = group.order;
  for (unsigned i = 0; i < MM_COMPANIONS; i++)
    if (!companion(hf, p, e, (mm_companion)i, out, err)) return false;
  if (scales_other_inputs(hf, e)) out->part[MM_INPUT] = (mm_source){0};
  for (size_t i = 0; i < sizeof e->unread / sizeof *e->unread; i++) mark_used(hf, p, e->unread[i]);
  return group_declared(hf, out, err);
}

static void assume_form(mm_hf_tensor *t, const mm_stored_form *f, const mm_site *p, mm_cell c, mm_dtype dtype) {
  mm_shape shape[3];
  shapes(f, p, c, shape);
  t->shape = shape[0];
  t->dtype = dtype;
  if (!mm_shape_bytes(&t->shape, t->dtype, &t->bytes)) t->bytes = 0;
}

/* Without headers, the released forms: the rule's plain type, or block FP8 where a weight_scale_inv is listed. A tensor whose form is known
 * from elsewhere keeps it. */
static void assume(mm_hf *hf, const mm_site *p, bool plain_only) {
  static const mm_stored_form scale = {.span = MM_SPAN_GRID};
  mm_hf_tensor *t = find(hf, p, "weight"), *s = plain_only ? NULL : find(hf, p, "weight_scale_inv");
  if (!t || (t->bytes > 0 && hf->follow)) return;
  assume_form(t, &mm_encodings[0].codes, p, (mm_cell){1, 1}, s ? MM_F8_E4M3 : p->assumed);
  if (s) assume_form(s, &scale, p, hf->quantization.block, MM_F32);
}

/* The rows that a weight may have: the plain one only, or all. */
static void candidates(bool plain_only, const mm_encoding *rows[64]) {
  unsigned n = 0;
  for (const mm_encoding *e = mm_encodings; e->name && (n == 0 || !plain_only); e++) rows[n++] = e;
  rows[n] = NULL;
}

const mm_hf_tensor *mm_encoding_codes(const mm_hf *hf, const mm_site *p, bool plain_only) {
  const mm_encoding *rows[64];
  const mm_hf_tensor *t = NULL;
  candidates(plain_only, rows);
  for (unsigned i = 0; !t && rows[i]; i++) t = find(hf, p, rows[i]->codes.suffix);
  return t;
}

mm_numbers mm_numbers_of(mm_code c) {
  switch (c) {
    case MM_CODE_E4M3: return MM_NUMBERS_FP8;
    case MM_CODE_INT8: return MM_NUMBERS_INT8;
    case MM_CODE_E2M1: return MM_NUMBERS_FP4;
    case MM_CODE_PLAIN: return MM_NUMBERS_PLAIN;
    default: return MM_NUMBERS_INT4;
  }
}

mm_found mm_encoding_find(mm_hf *hf, const mm_site *p, bool plain_only, mm_matrix *out, mm_err *err) {
  const mm_encoding *rows[64];
  candidates(plain_only, rows);
  if (hf->names_only) assume(hf, p, plain_only);
  mm_fit best;
  const mm_encoding *e = recognise(hf, p, rows, &best);
  if (best == FIT_NO_CODES) return plain_only ? MM_ABSENT : refused_by_name(hf, p, err);
  if (!e) refuse(hf, p, rows, best, err);
  return e && take(hf, p, e, out, err) ? MM_FOUND : MM_FAILED;
}

/* A weight whose companion t could be, by the first n bytes of its name, in any encoding; NULL: there is none. */
static const mm_hf_tensor *weight_of(const mm_hf *hf, const mm_hf_tensor *t, size_t n) {
  char name[NAME_MAX_LEN];
  for (const mm_encoding *e = mm_encodings; e->name; e++) {
    int length = snprintf(name, sizeof name, "%.*s%s", (int)n, t->name, e->codes.suffix);
    const mm_hf_tensor *w = length > 0 && (size_t)length < sizeof name ? mm_hf_find(hf, name) : NULL;
    if (w && w != t) return w;
  }
  return NULL;
}

const char *mm_encoding_leftover(const mm_hf *hf, const mm_hf_tensor *t, char what[512]) {
  const size_t cap = 512, length = strlen(t->name);
  for (const mm_refused_suffix *r = mm_refused_suffixes; r->suffix; r++)
    if (mm_ends_with(t->name, r->suffix)) {
      snprintf(what, cap, "%s, which is not read", r->what);
      return r->code;
    }
  for (const mm_encoding *e = mm_encodings; e->name; e++)
    for (unsigned i = 0; i < MM_COMPANIONS; i++) {
      const char *suffix = e->part[i].suffix;
      if (!suffix || !mm_ends_with(t->name, suffix)) continue;
      const mm_hf_tensor *w = weight_of(hf, t, length - strlen(suffix));
      if (w && w->used)
        snprintf(what, cap, "a tensor of a quantised weight, but \"%s\" is %s and is read without it", MM_ESCAPED(400, w->original),
                 mm_dtype_name(w->dtype));
      else if (w)
        snprintf(what, cap, "a tensor of \"%s\", a weight that this architecture does not have", MM_ESCAPED(400, w->original));
      else
        snprintf(what, cap, "a tensor of a quantised weight that is not there");
      return "E_Q_ORPHAN";
    }
  snprintf(what, cap, "a tensor that this architecture does not have");
  return "E_UNKNOWN";
}

/* ---- keeping ---- */

static bool same_codes(mm_code a, mm_code b) {
  return a == b || (a == MM_CODE_INT4 && b == MM_CODE_INT4_OFFSET) || (a == MM_CODE_INT4_OFFSET && b == MM_CODE_INT4);
}

/* Every cell of `fine` lies in one of `coarse`. */
static bool covers(uint32_t coarse, uint32_t fine, uint32_t extent) {
  return coarse == 0 || coarse >= extent || (fine != 0 && coarse % fine == 0);
}

bool mm_encoding_is_grid(const mm_matrix *x) {
  const mm_stored_form *f = &x->encoding->codes;
  if (f->span != MM_SPAN_GRID || f->cell.n != 1 || x->part[MM_ZERO].tensor || x->part[MM_ORDER].tensor) return false;
  return x->weight->dtype != MM_I32 || x->cols % f->cell.k == 0; /* no padding at the end of a row */
}

bool mm_encoding_is_words(const mm_matrix *x) {
  return !mm_is_plain(x) && !mm_encoding_is_grid(x) && x->weight->dtype == MM_I32 && !x->reordered;
}

const char *mm_encoding_words_form(const mm_matrix *x) {
  if (!mm_encoding_is_words(x) || x->encoding->codes.span != MM_SPAN_TURNED) return NULL;
  return x->encoding->order ? "awq" : "gptq";
}

/* True if a scheme's scales, and zero points where there are some, hold those of x. */
static bool holds_scales(const mm_matrix *x, const mm_scheme *s) {
  const mm_encoding *e = x->encoding;
  const mm_dtype own = s->plane[1].dtype, t = x->part[MM_SCALE].tensor->dtype;
  if (t == MM_U32) return own == t && mm_scheme_find(e->scheme)->scale_of == s->scale_of; /* of a packed source */
  if (mm_has_zeros(s)) return t == s->scale_of;
  if (x->part[MM_ZERO].tensor && !x->symmetric) return false;
  return own == t || own == MM_F32 || (own == MM_U8 && t == MM_F8_E8M0);
}

bool mm_encoding_keeps(const mm_matrix *x, const mm_scheme *s, mm_cell grid) {
  const mm_encoding *e = x->encoding;
  if (mm_is_plain(x)) return s == mm_scheme_plain(x->weight->dtype);
  if (!(mm_encoding_is_grid(x) || mm_encoding_is_words(x)) || x->part[MM_SMOOTH].tensor || !same_codes(e->code, s->code)) return false;
  if (s->plane_count != (e->part[MM_GLOBAL].suffix ? 3 : 2)) return false;
  if (e->signed_scale && s->code >= MM_CODE_E2M1 && !s->signed_scale) return false; /* nor does such a scheme have code -8 */
  return holds_scales(x, s) && covers(x->cell.n, grid.n, x->rows) && covers(x->cell.k, grid.k, x->cols);
}

/* The choices, with SQNR as tests/interop/sources.py measures it; it is about the same for every encoding. */
#define CHOICES                                                                                                       \
  "which no packed scheme holds bit for bit; expected another --quant: f32 (exact), bf16 (56 dB of SQNR against the " \
  "source), int8 (44), block_fp8 (32), nvfp4a16 (22) or w4a16 (21, but 49 for symmetric groups of 128)"

const char *mm_encoding_unkept(const mm_matrix *x, char out[640]) {
  const mm_encoding *e = x->encoding;
  const mm_hf_tensor *s = x->part[MM_SCALE].tensor;
  const bool words = e->codes.span == MM_SPAN_TURNED, int4 = e->code == MM_CODE_INT4 || e->code == MM_CODE_INT4_OFFSET;
  const struct {
    bool holds;
    const char *what;
  } reason[] = {{e->codes.cell.n > 1 && !words, "bytes of two rows"},
                {x->part[MM_ZERO].tensor != NULL && !x->symmetric, "zero points"},
                {x->reordered, "columns out of the order of their groups (desc_act)"},
                {x->part[MM_SMOOTH].tensor != NULL, "a factor for each column"},
                {int4 && s && s->dtype == MM_F32, "F32"}};
  size_t n = (size_t)snprintf(out, 640, "%s", e->name), count = 0;
  for (size_t i = 0; i < sizeof reason / sizeof *reason; i++)
    if (reason[i].holds)
      n += (size_t)snprintf(out + n, 640 - n, "%s%s%s", count++ ? ", " : " with ", reason[i].what,
                            i + 1 == sizeof reason / sizeof *reason ? " scales (the schemes have F16 or BF16)" : "");
  if (s && s->dtype == MM_F32 ? !int4 : count == 0 && s)
    n += (size_t)snprintf(out + n, 640 - n, "%s scales of %s for %u x %u", count ? "," : " with", mm_dtype_name(s->dtype), x->cell.n,
                          x->cell.k);
  snprintf(out + n, 640 - n, ", %s", CHOICES);
  return out;
}

/* The coarsest grid in both: groups of 96 columns repeat their scales on one of 32. `grid` where it were finer than kernels have. */
static uint32_t finer(uint32_t grid, uint32_t cell, uint32_t extent) {
  const uint32_t common = (uint32_t)mm_gcd(grid, cell); /* cell itself where grid is 0, the whole extent */
  return covers(cell, grid, extent) || (common != cell && common < 16) ? grid : common;
}

mm_cell mm_encoding_grid(const mm_matrix *x, size_t matrices, const mm_scheme *s) {
  mm_cell g = s->plane[1].cell;
  for (size_t i = 0; i < matrices && !s->needs_amax && s->code != MM_CODE_PLAIN; i++)
    if (!mm_is_plain(&x[i])) g = (mm_cell){finer(g.n, x[i].cell.n, x[i].rows), finer(g.k, x[i].cell.k, x[i].cols)};
  return g;
}

bool mm_encoding_second_gptq(const mm_hf *hf, const mm_matrix *x, size_t matrices) {
  size_t i = 0;
  while (i < matrices && !(x[i].encoding->less && x[i].part[MM_ZERO].tensor)) i++;
  return hf->quantization.zero_less == 0 && i < matrices;
}

/* The scheme of weight-only integers that has scales of this type; NULL: none, or another kind of codes. */
static const mm_scheme *kept_integers(const mm_matrix *x) {
  const mm_encoding *e = x->encoding;
  const mm_dtype t = x->part[MM_SCALE].tensor->dtype;
  const bool zeros = x->part[MM_ZERO].tensor && !x->symmetric;
  const bool int4 = e->code == MM_CODE_INT4_OFFSET, int8 = e->code == MM_CODE_INT8;
  if (x->weight->dtype != MM_I32 || !(int4 || int8) || (!zeros && e->scheme && (int8 || t == MM_BF16))) return NULL;
  if (t == MM_F16) return mm_scheme_find(int4 ? zeros ? "w4a16_zero" : "w4a16_f16" : zeros ? "w8a16_zero" : "w8a16_f16");
  if (t == MM_BF16) return mm_scheme_find(int4 ? "w4a16_zero_bf16" : "w8a16_zero_bf16");
  return NULL;
}

const mm_scheme *mm_encoding_scheme(const mm_matrix *x, size_t matrices, unsigned pieces) {
  const mm_encoding *e = x->encoding;
  if (mm_is_plain(x)) return mm_scheme_plain(x->weight->dtype);
  if (e->packed) return mm_scheme_find(e->scheme);
  if (e->part[MM_GLOBAL].suffix) {
    bool input = false; /* calibration that missed some experts still is calibration */
    for (size_t i = 0; i < matrices; i++) input = input || x[i].part[MM_INPUT].tensor;
    return mm_scheme_find(input ? "nvfp4" : "nvfp4a16");
  }
  const mm_scheme *s = mm_encoding_is_words(x) || x->part[MM_SCALE].tensor->dtype == MM_F16 ? kept_integers(x) : NULL;
  if (!s && !e->scheme) return NULL;
  if (!s) s = mm_scheme_find(e->scheme);
  return s->needs_amax && pieces > 1 ? mm_scheme_find("channel_fp8") : s; /* each piece has a scale of its own */
}
