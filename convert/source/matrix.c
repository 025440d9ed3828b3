/* Finding each matrix of the model inside the source, and refusing what does not fit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/source/encoding.h"

#define NAME_MAX_LEN 256

/* Where a piece lies: alone under its own name, or fused under the packed one. */
static mm_site place_of(const mm_model *m, const mm_rule_piece *piece, bool fused, const char *name) {
  const mm_rule *r = piece->rules[piece->i];
  mm_site p = {.name = name,
               .vector = r->cols == MM_DIM_NONE,
               .rows = mm_dim_extent(r->rows, m),
               .cols = mm_dim_extent(r->cols, m),
               .pieces = 1,
               .assumed = r->rows == MM_DIM_EXPERTS ? MM_F32 : MM_BF16};
  p.piece_rows[0] = p.rows;
  if (!fused) return p;
  p.piece = piece->i;
  p.pieces = piece->count;
  for (unsigned j = 0; j < p.pieces; j++) p.piece_rows[j] = mm_dim_extent(piece->rules[j]->rows, m);
  if (mm_rule_stacks(r)) p.entry = piece->expert, p.entries = m->experts;
  return p;
}

mm_found mm_files_matrix(mm_hf *hf, const mm_model *m, const mm_rule_piece *p, mm_matrix *out, mm_err *err) {
  const mm_rule *r = p->rules[p->i];
  bool plain_only = r->cols == MM_DIM_NONE; /* any matrix may be quantised, head and router too */
  char name[NAME_MAX_LEN], fused_name[NAME_MAX_LEN];
  mm_site alone = place_of(m, p, false, mm_rule_name(name, sizeof name, r->theirs, p->layer, p->expert));
  mm_site fused = place_of(m, p, true, mm_rule_name(fused_name, sizeof fused_name, r->ours, p->layer, 0));
  const mm_hf_tensor *own = mm_encoding_codes(hf, &alone, plain_only), *whole = NULL;
  if (p->count > 1 || mm_rule_stacks(r)) whole = mm_encoding_codes(hf, &fused, plain_only);
  if (own && whole) {
    mm_fail(err, MM_BAD_INPUT, "E_DUP_TENSOR", mm_hf_at(hf, own), "found again inside \"%s\" in %s, expected once", whole->original,
            hf->file[whole->file].name);
    return MM_FAILED;
  }
  return mm_encoding_find(hf, whole ? &fused : &alone, plain_only, out, err);
}

/* True for a tensor of a layer past the last (multi-token prediction), or of such layers under a name of their own. */
static bool past_last(const char *name, const mm_model *m) {
  static const char before[] = "model.layers.";
  if (strncmp(name, "mtp.", 4) == 0 || strncmp(name, "model.mtp.", 10) == 0) return true;
  if (strncmp(name, before, sizeof before - 1) != 0) return false;
  const char *number = name + sizeof before - 1;
  size_t n = strspn(number, "0123456789");
  return n > 0 && n < 10 && number[0] != '0' && number[n] == '.' && strtoul(number, NULL, 10) >= m->layers;
}

/* Buffers some exports carry and everyone recomputes, and layers past the last. */
static bool redundant(const char *name, const mm_model *m) {
  static const char *const buffer[] = {".rotary_emb.inv_freq", ".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"};
  for (size_t i = 0; i < sizeof buffer / sizeof *buffer; i++)
    if (mm_ends_with(name, buffer[i])) return true;
  return past_last(name, m);
}

size_t mm_hf_past_last(const mm_hf *hf, const mm_model *m) {
  size_t n = 0;
  for (size_t i = 0; i < hf->tensor_count; i++) n += !hf->tensor[i].used && past_last(hf->tensor[i].name, m);
  return n;
}

void mm_hf_left_out(const mm_hf *hf, const mm_arch *a, mm_pack *p) {
  mm_left_out all[MM_LEFT_OUT_MAX] = {{0}};
  const mm_pack *from = hf->manifest;
  p->left_out_count = 0;
  for (size_t i = 0; from && i < from->left_out_count; i++) p->left_out[p->left_out_count++] = from->left_out[i];
  for (size_t i = 0; i < hf->tensor_count; i++) {
    mm_left_out *x = &all[hf->tensor[i].left_out];
    x->tensors++, x->bytes += hf->tensor[i].bytes;
  }
  for (size_t i = 0; a->left_out && a->left_out[i]; i++) {
    all[1 + i].prefix = a->left_out[i];
    if (all[1 + i].tensors) p->left_out[p->left_out_count++] = all[1 + i];
  }
}

bool mm_hf_total_known(const mm_hf *hf) {
  size_t i = 0;
  while (i < hf->tensor_count && (hf->tensor[i].used || hf->tensor[i].left_out) && hf->tensor[i].bytes > 0) i++;
  return i == hf->tensor_count && hf->total_given;
}

bool mm_hf_total_wrong(const mm_hf *hf, uint64_t *bytes) {
  *bytes = 0;
  for (size_t i = 0; i < hf->tensor_count; i++) *bytes += hf->tensor[i].bytes;
  return hf->total_given && !hf->names_only && hf->total_size != *bytes;
}

bool mm_hf_all_used(const mm_hf *hf, const mm_model *m, mm_err *err) {
  const mm_hf_tensor *first = NULL;
  size_t more = 0;
  for (size_t i = 0; i < hf->tensor_count; i++) {
    const mm_hf_tensor *t = &hf->tensor[i];
    if (t->used || t->left_out || redundant(t->name, m)) continue;
    if (first) more++;
    if (!first) first = t;
  }
  if (!first) return true;
  char what[512], others[64] = "";
  const char *code = mm_encoding_leftover(hf, first, what);
  mm_status status = strcmp(code, "E_Q_METHOD") == 0 || strcmp(code, "E_Q_TRANSFORM") == 0 ? MM_UNSUPPORTED : MM_BAD_INPUT;
  if (more) snprintf(others, sizeof others, " (and %zu more tensors that are not read)", more);
  return mm_fail(err, status, code, mm_hf_at(hf, first), "found %s%s, expected none", what, others);
}

/* More than half of the names have this prefix. */
static bool most_begin(const mm_hf *hf, const char *prefix, size_t n) {
  size_t count = 0;
  for (size_t i = 0; i < hf->tensor_count; i++) count += strncmp(hf->tensor[i].name, prefix, n) == 0;
  return 2 * count > hf->tensor_count;
}

/* Bytes of the prefix that a tool left on the name: without those that the family's own names may begin with. */
static size_t foreign_prefix(const mm_hf *hf, const char *name, size_t n) {
  const mm_arch *a = mm_arch_find(hf->config, hf->config_path, MM_IGNORED);
  for (const mm_alias *s = a ? a->naming : NULL; s && s->theirs; s++) {
    if (s->theirs[0] == '.' || !mm_ends_with(s->theirs, s->canonical)) continue;
    const size_t own = strlen(s->theirs) - strlen(s->canonical);
    if (n > own && strncmp(name + n - own, s->theirs, own) == 0) return n - own;
  }
  return n;
}

void mm_hf_name_hint(const mm_hf *hf, const char *missing, char *out, size_t cap) {
  const size_t n = strlen(missing);
  const mm_hf_tensor *prefixed = NULL, *compiled = NULL, *mlx = NULL;
  for (size_t i = 0; i < hf->tensor_count && !prefixed; i++) {
    const mm_hf_tensor *t = &hf->tensor[i];
    const size_t length = strlen(t->name);
    if (length > n + 1 && mm_ends_with(t->name, missing) && t->name[length - n - 1] == '.' && most_begin(hf, t->name, length - n))
      prefixed = t;
    if (strstr(t->original, "_orig_mod.")) compiled = t;
    if (strstr(t->original, ".switch_mlp.")) mlx = t;
  }
  const mm_hf_tensor *t = prefixed ? prefixed : compiled ? compiled : mlx;
  char name[300], prefix[300];
  *out = 0;
  if (!t) return;
  mm_escape(name, sizeof name, t->original, strlen(t->original));
  if (prefixed)
    snprintf(out, cap, "; it is there as \"%s\": take the prefix \"%s\" off all names", name,
             mm_escape(prefix, sizeof prefix, t->name, foreign_prefix(hf, t->name, strlen(t->name) - n)));
  else if (compiled)
    snprintf(out, cap, "; names such as \"%s\" have torch.compile's \"_orig_mod.\": take it off all names", name);
  else
    snprintf(out, cap, "; names such as \"%s\" are MLX's, whose checkpoints are not read: convert the original", name);
}
