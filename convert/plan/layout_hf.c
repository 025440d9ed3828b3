/* The Hugging Face layout: "model-00001-of-00003.safetensors" in layer order, and an index of exact total_size, the plan's digest and the
 * weight map in file order. */
#include "convert/plan/layout_hf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/decode/companion_names.h"
#include "convert/plan/card.h"
#include "convert/plan/target_format.h"
#include "convert/source/index.h"

static char *name_of(const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane, mm_arena *a, mm_err *err) {
  const mm_pack_tensor *t = &p->pack.tensor[tensor];
  const char *source = t->piece[piece].source;
  size_t n = strlen(source);
  if (p->tensor[tensor].naming) n -= strlen(".weight");
  return mm_arena_printf(a, err, "%.*s%s", (int)n, source, t->plane[plane].suffix);
}

static mm_shape shape_of(const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane) {
  const mm_pack_tensor *t = &p->pack.tensor[tensor];
  const mm_pack_plane *x = &t->plane[plane];
  const mm_target_naming *s = p->tensor[tensor].naming;
  const mm_scheme *scheme = p->tensor[tensor].scheme;
  uint32_t rows = t->piece[piece].rows;
  if (p->tensor[tensor].passed) return p->tensor[tensor].passed->shape;
  if (s && s->form) {
    const mm_words_matrix m = mm_target_words_of(p, tensor, piece);
    return mm_words_shape(&m, s->role[plane]);
  }
  if (t->vector) return mm_shape1(rows);
  if (s && s->shape && plane == scheme->plane_count) return mm_shape1(2);
  if (s && x->cell_n == 0 && x->cell_k == 0) return s->scalar ? (mm_shape){0} : mm_shape1(1);
  uint32_t ours_in_theirs = (uint32_t)(mm_dtype_size(x->dtype) / mm_dtype_size(scheme->plane[plane].dtype));
  return mm_shape2(mm_cells(rows, x->cell_n), mm_cells(t->cols, x->cell_k) / ours_in_theirs);
}

static char *file_of(mm_plan *p, uint32_t rank, uint32_t number, mm_err *err) {
  (void)rank;
  return mm_arena_printf(&p->pack.arena, err, "model-%05u-of-%05u.safetensors", number + 1, p->part_count);
}

/* Calls fn for every stored tensor in plan order; stops when it returns false. */
static bool each_stored(const mm_plan *p,
                        bool (*fn)(void *ctx, const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane, const char *name,
                                   mm_err *err),
                        void *ctx, mm_err *err) {
  bool ok = true;
  for (uint32_t i = 0; ok && i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    mm_arena names = {0};
    for (uint32_t j = 0; ok && j < t->piece_count; j++)
      for (unsigned k = 0; ok && k < t->plane_count; k++) {
        const char *name = name_of(p, i, j, k, &names, err);
        ok = name && fn(ctx, p, i, j, k, name, err);
      }
    mm_arena_close(&names);
  }
  return ok;
}

static void add_text(mm_sha256_state *s, const char *text) { mm_sha256_add(s, text, strlen(text) + 1); }

static bool add_stored(void *ctx, const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane, const char *name, mm_err *err) {
  char shape[64];
  mm_shape x = shape_of(p, tensor, piece, plane);
  const mm_pack_tensor *t = &p->pack.tensor[tensor];
  (void)err;
  add_text(ctx, name);
  add_text(ctx, mm_dtype_name(t->plane[plane].dtype));
  mm_sha256_add(ctx, &t->input_scale, sizeof t->input_scale);
  for (size_t i = 0; i < t->step_count; i++) mm_sha256_add(ctx, &t->step[i], sizeof t->step[i]);
  add_text(ctx, mm_shape_text(&x, shape, sizeof shape));
  add_text(ctx, p->pack.rank[0].part[p->tensor[tensor].part].file);
  return true;
}

static bool digest_of(const mm_plan *p, mm_digest *out, mm_err *err) {
  mm_sha256_state s;
  mm_sha256_begin(&s);
  add_text(&s, p->pack.tool);
  add_text(&s, p->pack.quant);
  for (size_t i = 0; i < p->pack.source_count; i++) {
    const mm_pack_file *f = &p->pack.source[i];
    add_text(&s, f->name);
    mm_sha256_add(&s, &f->size, sizeof f->size);
    mm_sha256_add(&s, &f->sha256, sizeof f->sha256);
  }
  for (size_t i = 0; i < MM_PLAN_TEXTS && p->text[i].name; i++) add_text(&s, p->text[i].text);
  if (!each_stored(p, add_stored, &s, err)) return false;
  *out = mm_sha256_end(&s);
  return true;
}

static bool put_stored(void *ctx, const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane, const char *name, mm_err *err) {
  mm_text *t = ctx;
  (void)piece, (void)plane, (void)err;
  mm_text_put(t, t->n && t->p[t->n - 1] == '"' ? ",\n  " : "  ");
  mm_text_quote_string(t, name); /* tensors that are copied have any */
  mm_text_printf(t, ": \"%s\"", p->pack.rank[0].part[p->tensor[tensor].part].file);
  return true;
}

static char *index_of(const mm_plan *p, mm_err *err) {
  uint64_t total = 0;
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    for (unsigned j = 0; j < MM_PACK_PIECES; j++)
      for (unsigned k = 0; k < MM_PACK_PLANES; k++) total += p->tensor[i].place[j][k].bytes;
  mm_text t = {0};
  mm_text_printf(&t, "{\n \"metadata\": {\n  \"total_size\": %llu,\n  \"plan\": \"%s\"\n },\n \"weight_map\": {\n",
                 (unsigned long long)total, mm_digest_hex(&p->pack.plan).text);
  if (!each_stored(p, put_stored, &t, err)) return free(t.p), NULL;
  mm_text_put(&t, "\n }\n}\n");
  return mm_text_take(&t, err);
}

static bool part_of(const char *file, unsigned *rank, unsigned *number) {
  *rank = 0;
  return sscanf(file, "model-%9u-of-", number) == 1 && (*number)-- > 0;
}

static const char *const made[] = {"config.json", "hf_quant_config.json", MM_INDEX_NAME, NULL};
const mm_layout mm_layout_hf = {.word = "hf",
                                .kind = "unsharded",
                                .last = MM_INDEX_NAME,
                                .last_kind = "index",
                                .digest_key = "index_sha256",
                                .digests = MM_DIGESTS,
                                .made = made,
                                .format = "pt", /* transformers loads no other */
                                .code = 1,
                                .roles = {.keeps_names = true, .copies = true},
                                .target_formats = true,
                                .name = name_of,
                                .shape = shape_of,
                                .file = file_of,
                                .part = part_of,
                                .digest = digest_of,
                                .finish = index_of};

bool mm_plan_writes(const mm_plan *p, const char *name) {
  for (size_t i = 0; i < MM_PLAN_TEXTS && p->text[i].name; i++)
    if (strcmp(p->text[i].name, name) == 0) return true;
  return false;
}

bool mm_unsharded_has(const char *file) {
  unsigned part, parts;
  int end = 0;
  return strcmp(file, MM_INDEX_NAME) == 0 || strcmp(file, MM_DIGESTS) == 0 || strcmp(file, MM_CARD) == 0 || mm_code_file(file) ||
         mm_target_format_file(file) ||
         (sscanf(file, "model-%9u-of-%9u.safetensors%n", &part, &parts, &end) == 2 && file[end] == 0 && end > 0);
}

bool mm_unsharded_plan(const char *dir, mm_digest *plan, mm_err *err) {
  mm_err reason = {0};
  const mm_path path = mm_path_of(dir, MM_INDEX_NAME);
  mm_json *index = mm_json_load(path.text, MM_INDEX_MAX, &reason);
  if (reason.status == MM_LIMIT || reason.status == MM_IO) *err = reason; /* not that it is another directory */
  const mm_json *hex = mm_json_get(mm_json_get(index, "metadata"), "plan");
  bool ours = mm_json_type_of(hex) == MM_JSON_STR && mm_digest_parse(mm_json_str(hex), mm_json_str_len(hex), plan);
  mm_json_free(index);
  return ours;
}
