/* The packed checkpoint as a value: names and shapes of what is stored, and the text of its manifest (manifest.c reads it). */
#include "formats/pack.h"

#include <stdio.h>
#include <string.h>

static uint64_t cells(uint32_t extent, uint32_t cell) { return cell == 0 ? 1 : mm_ceil_div(extent, cell); }

bool mm_pack_placed(const mm_pack *p) {
  for (size_t i = 0; i < p->tensor_count; i++)
    if (p->tensor[i].order.expert) return true;
  return false;
}

bool mm_pack_set_order(mm_pack *p, mm_pack_tensor *t, const uint32_t *expert, bool *permutes, mm_err *err) {
  const uint32_t n = t->whole_lead;
  uint32_t *order = mm_arena_alloc(&p->arena, 2 * n * sizeof *order, err);
  if (!order) return false;
  uint32_t *index = order + n;
  memcpy(order, expert, n * sizeof *order);
  memset(index, 0xff, n * sizeof *index);
  *permutes = true;
  for (uint32_t i = 0; *permutes && i < n; i++) {
    *permutes = order[i] < n && index[order[i]] == UINT32_MAX;
    if (*permutes) index[order[i]] = i;
  }
  if (*permutes) t->order = (mm_expert_order){order, index};
  return true;
}

bool mm_pack_same_sources(const mm_pack *a, const mm_pack *b) {
  bool same = a->source_count == b->source_count;
  for (size_t i = 0; same && i < a->source_count; i++)
    same = strcmp(a->source[i].name, b->source[i].name) == 0 && a->source[i].size == b->source[i].size &&
           mm_digest_equal(&a->source[i].sha256, &b->source[i].sha256);
  return same;
}

bool mm_pack_same_places(const mm_pack *a, const mm_pack *b) {
  for (size_t i = 0; i < a->tensor_count && i < b->tensor_count; i++) {
    const mm_pack_tensor *x = &a->tensor[i], *y = &b->tensor[i];
    if (strcmp(x->name, y->name) != 0 || x->whole_lead != y->whole_lead) return true;
    for (uint32_t e = 0; e < x->whole_lead; e++)
      if (mm_pack_index(x, e) != mm_pack_index(y, e)) return false;
  }
  return true;
}

bool mm_pack_same_version(const mm_pack *a, const mm_pack *b) {
  const size_t n = strcspn(a->tool, ",");
  return strcspn(b->tool, ",") == n && memcmp(a->tool, b->tool, n) == 0;
}

bool mm_pack_same_sizes(const mm_pack *a, const mm_pack *b) {
  bool same = true;
  for (uint32_t w = 0; same && w < mm_pack_ranks(a); w++) {
    const mm_rank_parts *x = &a->rank[w], *y = &b->rank[w];
    const bool both = x->part_count > 0 && y->part_count > 0;
    same = !both || x->part_count == y->part_count;
    for (size_t i = 0; both && same && i < x->part_count; i++) same = x->part[i].size == y->part[i].size;
  }
  return same;
}

int32_t mm_pack_steps(const mm_pack_tensor *t, uint32_t expert, uint32_t piece) {
  for (size_t i = 0; i < t->step_count; i++)
    if (t->step[i].expert == expert && t->step[i].piece == piece) return t->step[i].steps;
  return 0;
}

bool mm_pack_same_steps(const mm_pack_tensor *a, const mm_pack_tensor *b) {
  bool same = a->step_count == b->step_count;
  for (size_t i = 0; same && i < a->step_count; i++) {
    const mm_global_step *x = &a->step[i], *y = &b->step[i];
    same = x->expert == y->expert && x->piece == y->piece && x->steps == y->steps;
  }
  return same;
}

int mm_pack_version(const mm_pack *p) {
  for (size_t i = 0; i < p->tensor_count; i++)
    if (p->tensor[i].step_count) return MM_PACK_VERSION5;
  if (mm_pack_placed(p) || p->attn_tp) return MM_PACK_VERSION4;
  if (mm_model_extended(&p->model)) return MM_PACK_VERSION3;
  for (size_t i = 0; i < p->tensor_count; i++)
    for (unsigned k = 0; k < p->tensor[i].plane_count; k++)
      if (p->tensor[i].plane[k].grid.known) return MM_PACK_VERSION2;
  return MM_PACK_VERSION;
}

mm_shape mm_pack_plane_shape(const mm_pack_tensor *t, unsigned p) {
  uint64_t n = cells(t->rows, t->plane[p].cell_n), k = cells(t->cols, t->plane[p].cell_k);
  if (t->vector) return mm_shape1(n);
  return t->lead == 0 ? mm_shape2(n, k) : mm_shape3(t->lead, n, k);
}

mm_own mm_pack_own(const mm_pack *p, const mm_pack_tensor *t, unsigned piece, uint32_t rank) {
  const mm_piece *x = &t->piece[piece];
  const mm_cut *cut = &p->cut[x->cut];
  const mm_range *r = cut->axis == MM_AXIS_NONE ? NULL : &cut->rank[rank % p->tp];
  mm_own own = {x->local_at, x->local_rows, 0, t->cols};
  if (cut->axis == MM_AXIS_ROWS) own.row += r->at, own.rows = r->count;
  if (cut->axis == MM_AXIS_COLS) own.col = r->at, own.cols = r->count;
  return own;
}

/* True if cell i, of `cell` lines each (0: all lines), has a line in [at, at + count). */
static bool meets(uint32_t i, uint32_t cell, uint32_t at, uint32_t count) {
  uint64_t from = (uint64_t)i * cell, end = cell == 0 ? UINT64_MAX : from + cell;
  return count > 0 && from < (uint64_t)at + count && at < end;
}

bool mm_pack_covers(const mm_pack *p, const mm_pack_tensor *t, unsigned plane, uint32_t rank, uint32_t i, uint32_t j) {
  for (unsigned k = 0; k < t->piece_count; k++) {
    mm_own own = mm_pack_own(p, t, k, rank);
    if (meets(i, t->plane[plane].cell_n, own.row, own.rows) && meets(j, t->plane[plane].cell_k, own.col, own.cols)) return true;
  }
  return false;
}

uint32_t mm_cut_grid(const mm_cut *c, uint32_t tp, uint32_t base, uint32_t cell, bool codes) {
  uint64_t g = mm_gcd(cell, base);
  for (uint32_t r = 0; c->axis != MM_AXIS_NONE && r < tp; r++) {
    const mm_range *x = &c->rank[r];
    uint64_t local = (uint64_t)base + x->at;
    if (x->count == 0) continue;
    g = mm_gcd(g, local > x->from ? local - x->from : x->from - local);
    if (codes) g = mm_gcd(mm_gcd(g, x->from), x->count);
  }
  return (uint32_t)g;
}

void mm_part_name(char out[64], uint32_t rank, uint32_t part) { snprintf(out, 64, "model-rank-%05u-part-%05u.safetensors", rank, part); }

bool mm_part_named(const char *name) {
  unsigned rank, part;
  int end = 0;
  if (sscanf(name, "model-rank-%9u-part-%9u.safetensors%n", &rank, &part, &end) != 2 || end == 0) return false;
  return name[end] == 0 || strcmp(name + end, ".zst") == 0;
}

static const char *const align_word[] = {[MM_ALIGN_SPLIT] = "split", [MM_ALIGN_PAD] = "pad", [MM_ALIGN_ERROR] = "error"};

const char *mm_align_word(mm_align a) { return align_word[a]; }

bool mm_align_find(const char *word, mm_align *out) {
  for (mm_align a = MM_ALIGN_SPLIT; a <= MM_ALIGN_ERROR; a++)
    if (strcmp(word, align_word[a]) == 0) return *out = a, true;
  return false;
}

void mm_pack_close(mm_pack *p) {
  mm_arena_close(&p->arena);
  memset(p, 0, sizeof *p);
}

/* Building: a failure stays in the tree (json.h). */

static void put_u32s(mm_json *list, const uint32_t *v, size_t count) {
  for (size_t i = 0; i < count; i++) mm_json_append(list, mm_json_new_int(v[i]));
}

static void put_cut(mm_json *list, const mm_cut *c, uint32_t tp) {
  static const char *const axis[] = {[MM_AXIS_NONE] = "none", [MM_AXIS_ROWS] = "rows", [MM_AXIS_COLS] = "cols"};
  mm_json *o = mm_json_append(list, MM_JSON_NEW({"axis", mm_json_new_str(axis[c->axis])}));
  if (c->axis == MM_AXIS_NONE) return;
  MM_JSON_PUT(o, {"whole", mm_json_new_int(c->whole)}, {"local", mm_json_new_int(c->local)});
  mm_json *ranks = mm_json_put_list(o, "ranks");
  for (uint32_t i = 0; i < tp; i++)
    put_u32s(mm_json_append(ranks, mm_json_new_arr()), (const uint32_t[]){c->rank[i].at, c->rank[i].from, c->rank[i].count}, 3);
}

static void put_plane(mm_json *list, const mm_pack_plane *p) {
  mm_json *o =
      mm_json_append(list, MM_JSON_NEW({"suffix", mm_json_new_str(p->suffix)}, {"dtype", mm_json_new_str(mm_dtype_name(p->dtype))}));
  put_u32s(mm_json_put_list(o, "cell"), (const uint32_t[]){p->cell_n, p->cell_k}, 2);
  if (p->grid.known) put_u32s(mm_json_put_list(o, "grid"), (const uint32_t[]){p->grid.n, p->grid.k}, 2);
}

static void put_steps(mm_json *list, const mm_pack_tensor *t) {
  for (size_t i = 0; i < t->step_count; i++) {
    mm_json *entry = mm_json_append(list, mm_json_new_arr());
    const mm_global_step *s = &t->step[i];
    const int64_t number[] = {s->expert, s->piece, s->steps};
    for (size_t k = 0; k < sizeof number / sizeof *number; k++) mm_json_append(entry, mm_json_new_int(number[k]));
  }
}

static void put_tensor(mm_json *list, const mm_pack_tensor *t) {
  mm_json *o = mm_json_append(
      list,
      MM_JSON_NEW({"name", mm_json_new_str(t->name)}, {"scheme", mm_json_new_str(t->scheme)}, {"vector", mm_json_new_bool(t->vector)},
                  {"stage", mm_json_new_int(t->stage)}, {"lead", mm_json_new_int(t->lead)}, {"whole_lead", mm_json_new_int(t->whole_lead)},
                  {"rows", mm_json_new_int(t->rows)}, {"cols", mm_json_new_int(t->cols)}, {"whole_cols", mm_json_new_int(t->whole_cols)}));
  if (t->input_scale != 0) mm_json_set(o, "input_scale", mm_json_new_real((double)t->input_scale));
  if (t->order.expert) put_u32s(mm_json_put_list(o, "experts"), t->order.expert, t->whole_lead);
  if (t->step_count) put_steps(mm_json_put_list(o, "global_steps"), t);
  mm_json *planes = mm_json_put_list(o, "planes"), *pieces = mm_json_put_list(o, "pieces");
  for (unsigned i = 0; i < t->plane_count; i++) put_plane(planes, &t->plane[i]);
  for (unsigned i = 0; i < t->piece_count; i++) {
    const mm_piece *p = &t->piece[i];
    mm_json_append(pieces, MM_JSON_NEW({"source", mm_json_new_str(p->source)}, {"rows", mm_json_new_int(p->rows)},
                                       {"at", mm_json_new_int(p->local_at)}, {"local_rows", mm_json_new_int(p->local_rows)},
                                       {"cut", mm_json_new_int(p->cut)}));
  }
}

static void put_parts(mm_json *o, const mm_rank_parts *r) {
  mm_json *parts = mm_json_put_list(o, "parts");
  for (size_t i = 0; i < r->part_count; i++) {
    const mm_part *p = &r->part[i];
    mm_json *x = mm_json_append(
        parts, MM_JSON_NEW({"file", mm_json_new_str(p->file)}, {"size", mm_json_new_u64(p->size)}, {"root", mm_json_new_digest(&p->root)}));
    mm_json *blocks = mm_json_put_list(x, "blocks");
    for (size_t b = 0; b < p->block_count; b++) mm_json_append(blocks, mm_json_new_digest(&p->block[b]));
  }
}

static void put_files(mm_json *o, const char *key, const mm_pack_file *f, size_t count, const char *digest_key) {
  mm_json *list = mm_json_put_list(o, key);
  for (size_t i = 0; i < count; i++)
    mm_json_append(list, MM_JSON_NEW({"name", mm_json_new_str(f[i].name)}, {"size", mm_json_new_u64(f[i].size)},
                                     {digest_key, mm_json_new_digest(&f[i].sha256)}));
}

static void put_left_out(mm_json *o, const mm_pack *p) {
  mm_json *list = mm_json_put_list(o, "left_out");
  for (size_t i = 0; i < p->left_out_count; i++) {
    const mm_left_out *x = &p->left_out[i];
    mm_json_append(list, MM_JSON_NEW({"prefix", mm_json_new_str(x->prefix)}, {"tensors", mm_json_new_u64(x->tensors)},
                                     {"bytes", mm_json_new_u64(x->bytes)}));
  }
}

static mm_json *parallel_json(const mm_pack *p) {
  mm_json *o = MM_JSON_NEW({"tp", mm_json_new_int(p->tp)}, {"ep", mm_json_new_int(p->ep)}, {"pp", mm_json_new_int(p->pp)});
  if (p->attn_tp) mm_json_set(o, "attn_tp", mm_json_new_int(p->attn_tp));
  return o;
}

static mm_json *pack_json(const mm_pack *p) {
  mm_json *o = MM_JSON_NEW({"format", mm_json_new_str(MM_PACK_FORMAT)}, {"version", mm_json_new_int(mm_pack_version(p))},
                           {"tool", mm_json_new_str(p->tool)}, {"quant", mm_json_new_str(p->quant)},
                           {"tp_align", mm_json_new_str(mm_align_word(p->tp_align))}, {"plan", mm_json_new_digest(&p->plan)},
                           {"model", mm_model_to_json(&p->model)}, {"parallel", parallel_json(p)});
  mm_json *cuts = mm_json_put_list(o, "cuts"), *tensors = mm_json_put_list(o, "tensors"), *ranks = mm_json_put_list(o, "ranks");
  for (size_t i = 0; i < p->cut_count; i++) put_cut(cuts, &p->cut[i], p->tp);
  for (size_t i = 0; i < p->tensor_count; i++) put_tensor(tensors, &p->tensor[i]);
  for (uint32_t i = 0; i < mm_pack_ranks(p); i++) put_parts(mm_json_append(ranks, mm_json_new_obj()), &p->rank[i]);
  put_files(o, "sources", p->source, p->source_count, "header_sha256");
  put_files(o, "files", p->file, p->file_count, "sha256");
  if (mm_model_extended(&p->model)) put_left_out(o, p);
  put_u32s(mm_json_put_list(o, "dead_rows"), p->dead_row, p->dead_rows);
  return o;
}

/* One member a line, and in lists of objects one object a line: `grep` finds a tensor, `diff` shows what changed. */
static void put_lines(mm_text *t, const mm_json *root) {
  void *iter = NULL;
  const char *key, *before = "{\n";
  const mm_json *value;
  for (; mm_json_next(root, &iter, &key, &value); before = ",\n") {
    mm_text_printf(t, "%s\"%s\":", before, key);
    const bool list = mm_json_type_of(value) == MM_JSON_ARR && mm_json_type_of(mm_json_at(value, 0)) == MM_JSON_OBJ;
    if (!list) mm_json_write(t, value, false);
    for (size_t i = 0; list && i < mm_json_size(value); i++) {
      mm_text_put(t, i == 0 ? "[\n" : ",\n");
      mm_json_write(t, mm_json_at(value, i), false);
    }
    if (list) mm_text_put(t, "\n]");
  }
  mm_text_put(t, before);
}

const mm_pack_file *mm_pack_find_file(const mm_pack *p, const char *name) {
  for (size_t i = 0; i < p->file_count; i++)
    if (strcmp(p->file[i].name, name) == 0) return &p->file[i];
  return NULL;
}

/* Takes root over. The last member is the digest of the text before it. NULL when there was no memory for it. */
static char *text_with_digest(mm_json *root, mm_err *err) {
  mm_text t = {.failed = mm_json_failed(root)};
  put_lines(&t, root);
  mm_json_free(root);
  if (t.failed) return mm_text_take(&t, err);
  const mm_digest d = mm_sha256(t.p, t.n);
  mm_text_printf(&t, MM_MANIFEST_ENDING, mm_digest_hex(&d).text);
  return mm_text_take(&t, err);
}

char *mm_pack_text(const mm_pack *p, mm_err *err) { return text_with_digest(pack_json(p), err); }

char *mm_digests_text(const mm_pack *p, mm_err *err) {
  mm_json *o = MM_JSON_NEW({"format", mm_json_new_str(MM_DIGESTS_WORD)}, {"version", mm_json_new_int(MM_PACK_VERSION)},
                           {"tool", mm_json_new_str(p->tool)}, {"quant", mm_json_new_str(p->quant)},
                           {"dialect", mm_json_new_str(p->target_format)}, {"plan", mm_json_new_digest(&p->plan)});
  put_parts(o, &p->rank[0]);
  put_files(o, "sources", p->source, p->source_count, "header_sha256");
  put_files(o, "files", p->file, p->file_count, "sha256");
  return text_with_digest(o, err);
}
