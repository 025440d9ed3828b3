/* Bytes of ranks, and the smallest tp whose ranks fit a device. */
#include "convert/report/footprint.h"

#include <string.h>

#include "convert/model/rule.h"
#include "loader/stream/gpu_reads.h"

static void add_tensor(mm_footprint *f, const mm_plan *p, size_t i) {
  const mm_pack_tensor *t = &p->pack.tensor[i];
  uint64_t bytes = 0;
  for (unsigned j = 0; j < MM_PACK_PIECES; j++)
    for (unsigned k = 0; k < t->plane_count; k++) bytes += p->tensor[i].place[j][k].bytes;
  if (p->tensor[i].rule[0]->kind == MM_KIND_EXPERT)
    f->experts += bytes;
  else if (p->tensor[i].rule[0]->kind == MM_KIND_LINEAR)
    f->attention += bytes;
  else
    f->rest += bytes;
}

mm_footprint mm_footprint_of(const mm_plan *p, uint32_t rank) {
  const mm_model *m = &p->pack.model;
  mm_footprint f = {0};
  for (size_t i = 0; i < p->pack.rank[rank].part_count; i++) f.bytes += p->pack.rank[rank].part[i].size;
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    if (mm_pack_holds(&p->pack, &p->pack.tensor[i], rank)) add_tensor(&f, p, i);
  for (uint32_t l = 0; l < m->layers; l++) {
    if ((uint64_t)l * p->pack.pp / m->layers != rank / p->pack.tp) continue; /* of another stage */
    if (m->attn[l] == MM_ATTN_SPARSE) f.kv_token += 2 * m->index_dim;
    if (mm_attn_has_cache(m->attn[l]))
      f.kv_token += 2 * 2 * mm_max(1, m->kv_heads / mm_pack_attn_tp(&p->pack)) * m->head_dim;
    else
      f.state += sizeof(float) * (uint64_t)(m->heads / mm_pack_attn_tp(&p->pack)) * m->head_dim * m->head_dim;
  }
  return f;
}

/* The demand of minimax-serve --device cuda with these types of caches and its default options, one rank a GPU. */
static mm_demand default_demand(const mm_model *m, const mm_gpu_demand *g) {
  return (mm_demand){.gpu = true,
                     .step_tokens = MM_DEFAULT_STEP_TOKENS,
                     .outs = mm_outs_of(m, MM_DEFAULT_SLOTS, MM_DEFAULT_DRAFTS),
                     .slots = MM_DEFAULT_SLOTS,
                     .positions = (uint32_t)m->max_positions,
                     .cache = g->kv_fp8 ? MM_CACHE_FP8 : MM_CACHE_BF16,
                     .index_fp8 = g->index_fp8,
                     .act_quant = true};
}

/* Judges the ranks: *fit where a sequence of the model's full length fits every one, *tokens of cache that all have room for. A plan that
 * the cuda backend refuses has neither, and *no says why. */
static bool judge(const mm_plan *p, const mm_gpu_demand *g, bool *fit, uint64_t *tokens, mm_err *no, mm_err *err) {
  const uint32_t groups = mm_pack_groups(&p->pack);
  mm_demand d = default_demand(&p->pack.model, g), least;
  d.slots = (uint32_t)mm_ceil_div(d.slots, groups); /* of a rank: its group's */
  least = d, least.outs = MM_DEFAULT_SLOTS;         /* without proposals */
  const mm_device_memory on = {.total = g->card.bytes, .free = g->card.bytes, .ranks = 1, .share = MM_GPU_SHARE};
  uint64_t pages = mm_most_pages(&d), most = pages;
  *fit = false, *tokens = 0;
  bool taken = mm_gpu_takes_model(&p->pack.model, p->pack.tp, mm_pack_attn_tp(&p->pack), no);
  for (uint32_t r = 0; taken && r < mm_pack_ranks(&p->pack); r++) {
    mm_rank_weights w;
    mm_rank_memory need, needed;
    if (!mm_bind_planned(&w, &p->pack, r, err)) return false;
    taken = mm_gpu_takes_rank(&w, no);
    const bool ok =
        !taken || (mm_rank_memory_of(&need, &p->pack.model, &w, &d, err) && mm_rank_memory_of(&needed, &p->pack.model, &w, &least, err));
    mm_bind_close(&w);
    if (!ok) return false;
    if (taken) pages = mm_fewer_pages(pages, &need, &d, &on), most = mm_fewer_pages(most, &needed, &d, &on);
  }
  if (!taken) return true;
  if (!mm_proposals_fit(pages, most, mm_sequence_pages(&d))) pages = most;
  *fit = pages >= mm_sequence_pages(&d);
  *tokens = pages * groups * MM_PAGE;
  return true;
}

/* The card has code: else nothing of the plan is judged. */
static bool takes_card(mm_verdict *v, const mm_gpu_card *card) {
  if (!card->name || card->runs) return true;
  snprintf(v->refused, sizeof v->refused, "%s is sm_%u, and %s", card->name, card->sm, card->tried);
  return false;
}

bool mm_verdict_make(mm_verdict *v, const mm_plan *p, mm_hf *hf, const mm_plan_options *o, const mm_gpu_demand *d, mm_err *err) {
  const uint64_t memory = d->card.bytes, usable = (uint64_t)((double)memory * MM_GPU_SHARE);
  mm_err refused = {0};
  *v = (mm_verdict){.memory = memory, .kv_fp8 = d->kv_fp8, .index_fp8 = d->index_fp8, .card = d->card};
  if (d->index_fp8 && !p->pack.model.index_heads)
    return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, NULL),
                   "found --index-cache-dtype fp8; the model has no index keys, expected MiniMax-M3");
  if (!takes_card(v, &d->card)) return true;
  if (!judge(p, d, &v->fits, &v->tokens, &refused, err)) return false;
  if (refused.status != MM_OK) snprintf(v->refused, sizeof v->refused, "%.*s", (int)sizeof v->refused - 1, refused.text);
  for (uint32_t tp = 1; v->tp == 0 && tp <= p->pack.model.heads && tp <= MM_GPU_RANKS; tp++) {
    mm_plan_options with = *o;
    mm_plan other = {0};
    mm_err no = {0}, ignored = {0};
    uint64_t tokens;
    with.tp = tp, with.attn_tp = 0;
    with.ranks = NULL;
    if (tp == p->pack.tp && v->fits) v->tp = tp;
    /* No rank is smaller than its share of all, where that has no padding: the plan need not be built to refuse it. */
    const uint64_t share = o->align == MM_ALIGN_PAD ? 0 : p->output_bytes / p->pack.pp / mm_max(p->pack.tp, tp);
    if (v->tp || (tp == p->pack.tp && !p->pack.attn_tp) || share > usable || !mm_cut_feasible(&p->pack.model, &with, hf->config_path, &no))
      continue;
    bool fit = false;
    const bool built = mm_plan_build(&other, hf, &with, &no), judged = built && judge(&other, d, &fit, &tokens, &ignored, &no);
    if (fit) v->tp = tp;
    mm_plan_close(&other);
    if (!judged && no.status != MM_UNSUPPORTED) { /* a cut that --tp-align refuses is only not a candidate */
      *err = no;
      return false;
    }
  }
  return true;
}
