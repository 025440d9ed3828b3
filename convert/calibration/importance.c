/* Opening importance files, and finding in them what a rule's matrix needs. */
#include "convert/calibration/importance.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"

#define LEAST_WEIGHT 1e-4f

static bool bad(const mm_importance *m, const char *name, uint64_t offset, mm_err *err, const char *what) {
  return mm_fail(err, MM_BAD_INPUT, "E_IMPORTANCE", mm_at_offset(m->path, name, offset), "%s", what);
}

/* ---- opening ---- */

static bool read_safetensors(mm_importance *m, uint64_t size, mm_err *err) {
  static const char end[] = ".mean_square";
  mm_st st = {0};
  bool ok = mm_st_parse(&st, m->path, m->data, (size_t)size, size, MM_BAD_INPUT, err);
  m->entry = ok ? mm_calloc(st.count, sizeof *m->entry, err) : NULL;
  ok = m->entry;
  for (size_t i = 0; ok && i < st.count; i++) {
    const mm_st_tensor *t = &st.tensor[i];
    size_t n = strlen(t->name), stem = n < sizeof end ? 0 : n - (sizeof end - 1);
    if (stem == 0 || strcmp(t->name + stem, end) != 0) continue;
    const mm_st_tensor *r = mm_st_find(&st, MM_FORMATTED(600, "%.*s.rows", (int)mm_min(stem, 512), t->name));
    if (t->dtype != MM_F32 || !r || r->dtype != MM_I64) {
      ok = bad(m, t->name, t->offset, err,
               MM_FORMATTED(96, "found %s and %s .rows, expected F32 and .rows of I64", mm_dtype_name(t->dtype),
                            r ? mm_dtype_name(r->dtype) : "no"));
      break;
    }
    mm_importance_entry *e = &m->entry[m->count++];
    *e =
        (mm_importance_entry){.value = t->offset, .values = t->bytes / 4, .count = r->offset, .counts = r->bytes / 8, .count_type = MM_I64};
    e->name = mm_arena_strndup(&m->arena, t->name, stem, err);
    ok = e->name && mm_second_moments_read(m, &st, e, err);
  }
  mm_st_close(&st);
  return ok;
}

bool mm_importance_parse(mm_importance *m, const char *path, const void *data, uint64_t size, mm_err *err) {
  *m = (mm_importance){.path = path, .data = data};
  uint64_t head = 0;
  if (size >= sizeof head) memcpy(&head, data, sizeof head);
  if (size >= sizeof MM_LFS_POINTER - 1 && memcmp(data, MM_LFS_POINTER, sizeof MM_LFS_POINTER - 1) == 0)
    return bad(m, NULL, 0, err, "found a Git LFS pointer, expected safetensors or an importance matrix: run `git lfs pull`");
  bool gguf = size >= 4 && memcmp(data, "GGUF", 4) == 0;
  /* A safetensors file begins with the length of its header, then a brace; a .dat file with a count and a length in the same place. */
  bool safetensors = !gguf && size > sizeof head && head <= size - sizeof head && ((const uint8_t *)data)[sizeof head] == '{';
  if (!(gguf ? mm_imatrix_gguf(m, size, err) : safetensors ? read_safetensors(m, size, err) : mm_imatrix_dat(m, size, err))) return false;
  if (m->count == 0) return bad(m, NULL, 0, err, "found no tensor of second moments, expected some");
  qsort(m->entry, m->count, sizeof *m->entry, mm_by_text);
  for (size_t i = 1; i < m->count; i++)
    if (mm_by_text(&m->entry[i - 1], &m->entry[i]) == 0)
      return bad(m, m->entry[i].name, m->entry[i].value, err, "found the same entry twice, expected each once");
  return true;
}

bool mm_importance_open(mm_importance *m, const char *path, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  mm_map map = {0};
  *m = (mm_importance){0};
  bool ok = mm_file_open(&f, path, err) &&
            (f.size > 0 || mm_fail(err, MM_BAD_INPUT, "E_IMPORTANCE", mm_at(path, NULL),
                                   "found an empty file, expected safetensors or an importance matrix")) &&
            mm_map_open(&map, &f, path, err) && mm_importance_parse(m, path, map.data, map.size, err);
  m->map = map;
  m->id = f.id;
  if (ok) m->digest = mm_sha256(map.data, map.size);
  mm_file_close(&f);
  return ok;
}

bool mm_importance_unchanged(const mm_importance *m, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  if (!m) return true;
  f.id = m->id;
  return mm_file_unchanged(&f, m->path, err);
}

void mm_importance_close(mm_importance *m) {
  mm_map_close(&m->map);
  free(m->entry);
  mm_arena_close(&m->arena);
  *m = (mm_importance){0};
}

/* ---- finding ---- */

/* llama.cpp's name of a matrix. */
static const struct {
  const char *theirs, *llama; /* behind "model.layers.{l}." and "blk.{l}."; or whole */
} naming[] = {
    {"self_attn.q_proj.weight", "attn_q.weight"},
    {"self_attn.k_proj.weight", "attn_k.weight"},
    {"self_attn.v_proj.weight", "attn_v.weight"},
    {"self_attn.o_proj.weight", "attn_output.weight"},
    {"block_sparse_moe.experts.{e}.w1.weight", "ffn_gate_exps.weight"},
    {"block_sparse_moe.experts.{e}.w3.weight", "ffn_up_exps.weight"},
    {"block_sparse_moe.experts.{e}.w2.weight", "ffn_down_exps.weight"},
    {"lm_head.weight", "output.weight"},
};

static void llama_name(char *out, size_t cap, const mm_rule *rule, uint32_t layer) {
  static const char prefix[] = "model.layers.{l}.";
  bool layered = strncmp(rule->theirs, prefix, sizeof prefix - 1) == 0;
  const char *rest = rule->theirs + (layered ? sizeof prefix - 1 : 0);
  *out = 0;
  for (size_t i = 0; i < sizeof naming / sizeof *naming; i++)
    if (strcmp(rest, naming[i].theirs) == 0) snprintf(out, cap, layered ? "blk.%u.%s" : "%.0u%s", layered ? layer : 0, naming[i].llama);
}

bool mm_importance_of_model(const mm_importance *m, const mm_model *model, mm_err *err) {
  for (size_t i = 0; i < m->count; i++)
    if (mm_name_past_layers(m->entry[i].name, model) || mm_name_past_experts(m->entry[i].name, model))
      return mm_fail(err, MM_BAD_INPUT, "E_IMPORTANCE", mm_at_offset(m->path, m->entry[i].name, m->entry[i].value),
                     "found an entry of another model, expected %u layers of %u experts", model->layers, model->experts);
  return true;
}

const mm_importance_entry *mm_importance_entry_of(const mm_importance *m, const char *name) {
  return bsearch(&name, m->entry, m->count, sizeof *m->entry, mm_by_text);
}

/* Tokens behind matrix i of an entry; infinitely many where the file does not say. */
static double rows_of(const mm_importance *m, const mm_importance_entry *e, uint64_t i) {
  if (e->counts == 0) return (double)INFINITY;
  if (i >= e->counts) i = 0; /* one number for all */
  const uint8_t *at = m->data + e->count + i * mm_dtype_size(e->count_type);
  float f;
  int64_t n;
  if (e->count_type == MM_F32) return memcpy(&f, at, sizeof f), (double)f;
  return memcpy(&n, at, sizeof n), (double)n;
}

static mm_weighing check_values(const mm_importance *m, const mm_importance_entry *e, uint64_t first, uint32_t cols, mm_err *err) {
  bool some = false;
  for (uint32_t i = 0; i < cols; i++) {
    float v;
    memcpy(&v, m->data + e->value + (first + i) * sizeof v, sizeof v);
    some = some || v > 0;
    if (isfinite(v) && v >= 0) continue;
    bad(m, e->name, e->value + (first + i) * sizeof v, err,
        MM_FORMATTED(96, "found mean square %g, expected a finite one from 0 on", (double)v));
    return MM_WEIGHING_FAILED;
  }
  return some ? MM_WEIGHED : MM_TOO_FEW;
}

mm_weighing mm_importance_find(const mm_importance *m, const mm_rule *rule, uint32_t layer, uint32_t expert, uint32_t experts,
                               uint32_t cols, const uint8_t **values, mm_err *err) {
  char ours[256], theirs[256], llama[256];
  llama_name(llama, sizeof llama, rule, layer);
  const mm_importance_entry *e = mm_importance_entry_of(m, mm_rule_name(ours, sizeof ours, rule->ours, layer, 0));
  bool stacked = e || mm_importance_entry_of(m, llama);
  if (!e) e = mm_importance_entry_of(m, llama);
  if (!e) e = mm_importance_entry_of(m, mm_rule_name(theirs, sizeof theirs, rule->theirs, layer, expert));
  if (!e) return MM_NO_ENTRY;
  uint64_t matrices = stacked && mm_rule_stacks(rule) ? experts : 1, i = matrices > 1 ? expert : 0;
  if (e->values != matrices * cols || e->counts > matrices) {
    mm_fail(err, MM_BAD_INPUT, "E_IMPORTANCE", mm_at_offset(m->path, e->name, e->value),
            "found %llu values and %llu counts, expected %llu x %u from the model", (unsigned long long)e->values,
            (unsigned long long)e->counts, (unsigned long long)matrices, cols);
    return MM_WEIGHING_FAILED;
  }
  const double rows = rows_of(m, e, i);
  if (e->counts > 0 && !(isfinite(rows) && rows >= 0)) {
    bad(m, e->name, e->count, err, MM_FORMATTED(96, "found %g tokens, expected a finite number from 0 on", rows));
    return MM_WEIGHING_FAILED;
  }
  mm_weighing w = check_values(m, e, i * cols, cols, err);
  if (w == MM_WEIGHED && rows < MM_IMPORTANCE_ROWS) w = MM_TOO_FEW;
  *values = w == MM_WEIGHED ? m->data + e->value + i * cols * sizeof(float) : NULL;
  return w;
}

void mm_importance_weights(const uint8_t *values, uint32_t cols, float *out) {
  double sum = 0;
  memcpy(out, values, cols * sizeof *out);
  for (uint32_t i = 0; i < cols; i++) sum += (double)out[i];
  for (uint32_t i = 0; i < cols; i++) out[i] = fmaxf((float)((double)out[i] * cols / sum), LEAST_WEIGHT);
}
