/* Refusals of the CUDA backend, without a device (gpu_reads.h). */
#include "loader/stream/gpu_reads.h"

#include "loader/stream/landing.h"

/* What only models with norms of each head have: index heads, and sizes of their kernels. */
static bool takes_extended(const mm_model *m, uint32_t tp, mm_err *err) {
  const mm_where nowhere = mm_at(NULL, NULL);
  if (m->qk_norm && !m->qk_norm_per_head)
    return mm_fail(err, MM_UNSUPPORTED, "E_MODEL", nowhere,
                   "found a norm of q over all heads; the cuda backend has that of each head for %s", m->architecture);
  const uint32_t heads = (uint32_t)mm_max(1, m->index_heads / tp), dim = m->index_dim;
  if (!m->index_heads || (heads <= MM_GPU_INDEX_HEADS && (dim == 32 || dim == 64 || dim == 128) && m->index_block % MM_GPU_INDEX_TILE == 0))
    return true;
  return mm_fail(err, MM_UNSUPPORTED, "E_MODEL", nowhere,
                 "found %u index heads of %u on a rank, blocks of %u; the cuda backend has kernels for at most %d of 32, 64 "
                 "and 128, and multiples of %d",
                 heads, dim, m->index_block, MM_GPU_INDEX_HEADS, MM_GPU_INDEX_TILE);
}

bool mm_gpu_takes_model(const mm_model *m, uint32_t tp, uint32_t attn_tp, mm_err *err) {
  const mm_where nowhere = mm_at(NULL, NULL);
  const bool extended = mm_model_extended(m);
  if (tp > MM_GPU_RANKS)
    return mm_fail(err, MM_UNSUPPORTED, "E_TP", nowhere, "found --tp %u, the cuda backend has up to %d ranks", tp, MM_GPU_RANKS);
  const uint64_t width = ((uint64_t)m->heads / attn_tp + 2 * mm_max(1, m->kv_heads / attn_tp)) * m->head_dim;
  const struct {
    const char *name;
    uint64_t found, most;
  } limit[] = {{"hidden", m->hidden, MM_GPU_HIDDEN},
               {"heads x head_dim", (uint64_t)m->heads * m->head_dim, MM_GPU_WIDTH},
               {"heads and two of keys and values for each kv head x head_dim, on a rank", width, MM_GPU_WIDTH},
               {"heads per kv head", m->kv_heads ? m->heads / m->kv_heads : 0, extended ? MM_GPU_GROUP_HEADS : MM_GPU_GROUP},
               {"experts", m->experts, MM_GPU_EXPERTS},
               {"top_k", m->top_k, mm_min(MM_GPU_TOP_K, m->experts)},
               {"rotary_dim", m->rotary_dim, m->head_dim}};
  for (size_t i = 0; i < sizeof limit / sizeof *limit; i++)
    if (limit[i].found > limit[i].most)
      return mm_fail(err, MM_UNSUPPORTED, "E_MODEL", nowhere, "found %s %llu; the cuda backend has kernels for at most %llu", limit[i].name,
                     (unsigned long long)limit[i].found, (unsigned long long)limit[i].most);
  const bool has_kernel = m->head_dim == 64 || m->head_dim == 128 || (extended && m->head_dim == 32);
  if (has_kernel && m->hidden % 8 == 0 && m->rotary_dim % 16 == 0 && m->kv_heads && m->heads % m->kv_heads == 0)
    return !extended || takes_extended(m, attn_tp, err);
  return mm_fail(
      err, MM_UNSUPPORTED, "E_MODEL", nowhere,
      "found head_dim %u, hidden %u, rotary_dim %u, %u heads on %u kv heads; the cuda backend has kernels for head_dim %s64 and 128, "
      "and for multiples of 8, of 16, and of the kv heads",
      m->head_dim, m->hidden, m->rotary_dim, m->heads, m->kv_heads, extended ? "32, " : "");
}

static bool is_power(uint32_t n) { return (n & (n - 1)) == 0; } /* or 0, the whole extent */

/* Scales on a grid that a kernel has. */
static bool reads_scales(const mm_packed *w) {
  const mm_cell cell = w->cell[1];
  if (w->scheme->plane_count == 1) return true;
  if (!is_power(cell.n) || !is_power(cell.k)) return false;
  if (w->scheme->code != MM_CODE_E2M1) return cell.k % 8 == 0;
  const bool whole = w->scheme->plane_count == 3;
  return cell.n == 1 && cell.k == (whole ? 16 : 32) && (!whole || (!w->cell[2].n && !w->cell[2].k));
}

bool mm_gpu_takes_matrix(const mm_packed *w, const char *name, mm_err *err) {
  mm_landing_layout layout;
  if (!w->scheme) return true;
  if (!mm_landing_layout_of(w, &layout) || w->k % 8 != 0 || !reads_scales(w))
    return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, name),
                   "found scheme %s with scales per [%u, %u] and %u columns; the cuda backend has no kernel for it", w->scheme->name,
                   w->cell[1].n, w->cell[1].k, w->k);
  const mm_act_format *f = &mm_act_formats[w->scheme->act];
  if (f->scale != MM_F8_E4M3 || f->group == 0 || w->cut_k % f->group == 0) return true;
  return mm_fail(err, MM_UNSUPPORTED, "E_ACT_QUANT", mm_at(NULL, name),
                 "found ranks whose columns begin at multiples of %u, which divide %s's groups of %u: GPUs need --act-quant off", w->cut_k,
                 w->scheme->name, f->group);
}

bool mm_gpu_takes_rank(const mm_rank_weights *w, mm_err *err) {
  bool ok = mm_gpu_takes_matrix(&w->embed, "embed_tokens.weight", err);
  if (ok && w->embed.scheme && w->embed.scheme->code != MM_CODE_PLAIN)
    return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, "embed_tokens.weight"), "found scheme %s; the cuda backend embeds bf16",
                   w->embed.scheme->name);
  for (uint32_t l = w->layer_first; ok && l < w->layer_end; l++) {
    const mm_layer_weights *y = &w->layer[l];
    ok = mm_gpu_takes_matrix(&y->qkv, "attention's qkv", err) && mm_gpu_takes_matrix(&y->out, "attention's o_proj", err) &&
         mm_gpu_takes_matrix(&y->output_gate, "attention's output_gate", err) && mm_gpu_takes_matrix(&y->w13, "experts' w13", err) &&
         mm_gpu_takes_matrix(&y->w2, "experts' w2", err);
  }
  return ok && mm_gpu_takes_matrix(&w->head, "lm_head.weight", err);
}
