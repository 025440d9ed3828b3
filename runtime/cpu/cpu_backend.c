/* The CPU backend's life: its buffers, and the start and end of a step. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "formats/hash.h"
#include "formats/system/memory.h"
#include "runtime/cpu/cpu_backend.h"
#include "runtime/cpu/cpu_codes.h"
#include "runtime/engine/position.h"

enum { LINE = 64 }; /* bytes of the cache's lines: a vector that lies across two is read at half the rate */

/* rows x columns of a 4-byte type, from the beginning of a line on. */
static void *matrix(mm_backend *b, uint64_t rows, uint64_t columns, mm_err *err) {
  uint64_t count, bytes;
  if (mm_mul(rows, columns, &count) && mm_mul(count, 4, &bytes) && bytes <= SIZE_MAX - LINE) {
    char *p = mm_arena_alloc(&b->arena, (size_t)bytes + LINE, err);
    return p ? p + (LINE - (uintptr_t)p % LINE) % LINE : NULL;
  }
  mm_fail_memory(err, UINT64_MAX);
  return NULL;
}

void *mm_cpu_map(size_t bytes, mm_err *err) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p != MAP_FAILED) return p;
  mm_fail_memory(err, bytes);
  return NULL;
}

static bool open_kv(mm_backend *b, mm_cpu_cache *c, bool sparse, mm_err *err) {
  return (c->k = mm_cpu_map(b->mapped.kv_bytes, err)) && (c->v = mm_cpu_map(b->mapped.kv_bytes, err)) &&
         (!sparse || (c->index = mm_cpu_map(b->mapped.index_bytes, err)));
}

static bool open_caches(mm_backend *b, mm_err *err) {
  const mm_model *m = b->c.model;
  const mm_limits *limits = &b->c.limits;
  uint32_t pages, lightning = 0;
  uint64_t state, kv, index;
  if (!mm_limits_pages(limits, &pages, err) || !(b->cache = mm_calloc(m->layers, sizeof *b->cache, err))) return false;
  b->per_slot = (uint32_t)mm_ceil_div(limits->max_positions, MM_PAGE);
  b->kv_size = b->c.options.kv_bf16 ? 2 : 4;
  if (!mm_mul((uint64_t)pages * b->kv_heads, (uint64_t)MM_PAGE * b->d * b->kv_size, &kv)) return mm_fail_memory(err, UINT64_MAX);
  b->mapped.index_key = b->c.options.index_fp8 ? sizeof(float) + m->index_dim : m->index_dim * sizeof(float);
  if (!mm_mul((uint64_t)pages * MM_PAGE, b->mapped.index_key, &index)) return mm_fail_memory(err, UINT64_MAX);
  b->mapped.kv_bytes = kv, b->mapped.index_bytes = index;
  for (uint32_t l = b->c.weights->layer_first; l < b->c.weights->layer_end; l++) {
    if (m->attn[l] == MM_ATTN_LIGHTNING)
      b->cache[l].state = lightning++;
    else if (!open_kv(b, &b->cache[l], m->attn[l] == MM_ATTN_SPARSE, err))
      return false;
  }
  b->state_floats = (size_t)lightning * b->heads * b->d * b->d;
  if (!mm_mul(limits->slots, b->state_floats, &state)) return mm_fail_memory(err, UINT64_MAX);
  return (b->state = mm_calloc(state, sizeof *b->state, err));
}

static bool open_position_tables(mm_backend *b, mm_err *err) {
  const mm_model *m = b->c.model;
  b->slope = matrix(b, m->layers, b->heads, err);
  b->inv_freq = matrix(b, 1, m->rotary_dim / 2, err);
  b->rope = matrix(b, b->c.limits.max_tokens, m->rotary_dim, err);
  if (!b->slope || !b->inv_freq || !b->rope) return false;
  uint32_t first_head = b->groups.own.rank * b->heads;
  for (uint32_t l = 0; l < m->layers; l++)
    for (uint32_t h = 0; h < b->heads; h++) b->slope[(size_t)l * b->heads + h] = (float)mm_lightning_decay(m, l, first_head + h);
  for (uint32_t i = 0; i < m->rotary_dim / 2; i++) b->inv_freq[i] = mm_rope_inv_freq(m, i);
  return true;
}

/* The widest of what was bound to this rank. */
typedef struct widths {
  uint64_t input, uncut; /* columns of a matrix: here, and before it was cut */
  uint64_t vector, inter, experts, mlp;
} widths;

static void widen(widths *x, const mm_packed *w) {
  if (!w->scheme) return;
  x->input = mm_max(x->input, w->k);
  x->uncut = mm_max(x->uncut, mm_max(w->k, w->whole_k));
}

static widths widths_of(const mm_rank_weights *w, uint32_t layers) {
  widths x = {.vector = w->final_norm.n};
  widen(&x, &w->head);
  for (uint32_t l = 0; l < layers; l++) {
    const mm_layer_weights *y = &w->layer[l];
    const mm_packed *matrix[] = {&y->qkv, &y->out,     &y->output_gate, &y->router, &y->w13,
                                 &y->w2,  &y->index_q, &y->index_k,     &y->mlp_up, &y->mlp_down};
    const mm_packed *vector[] = {&y->input_norm, &y->post_norm,   &y->attn_norm,    &y->q_norm,
                                 &y->k_norm,     &y->router_bias, &y->index_q_norm, &y->index_k_norm};
    for (size_t i = 0; i < sizeof matrix / sizeof *matrix; i++) widen(&x, matrix[i]);
    for (size_t i = 0; i < sizeof vector / sizeof *vector; i++) x.vector = mm_max(x.vector, vector[i]->n);
    x.inter = mm_max(x.inter, mm_max(y->w2.k, y->w13.n / 2));
    x.experts = mm_max(x.experts, mm_max(y->w2.n, y->w13.n));
    x.mlp = mm_max(x.mlp, y->mlp_down.k);
  }
  return x;
}

static void widen_for_draft(widths *x, const mm_dflash *d) {
  if (!d) return;
  const uint32_t heads = d->c.heads * d->c.head_dim;
  const uint32_t joined = d->c.kind == MM_DRAFT_EAGLE3 ? 2 * d->c.hidden : 0;
  x->input = mm_max(x->input, mm_max(mm_max(d->fc.k, joined), mm_max(heads, d->c.intermediate)));
  x->uncut = mm_max(x->uncut, x->input);
  x->vector = mm_max(x->vector, mm_max(d->c.hidden, d->c.head_dim));
  x->mlp = mm_max(x->mlp, d->c.intermediate);
}

/* Terms of placed experts: whole strips of columns of every pair, more where TERM_FLOATS has room. */
static bool open_terms(mm_backend *b, uint64_t pairs, mm_err *err) {
  enum { TERM_FLOATS = 4 << 20 };
  const mm_model *m = b->c.model;
  uint64_t ways = 0;
  for (uint32_t l = b->c.weights->layer_first; l < b->c.weights->layer_end; l++)
    if (b->c.weights->layer[l].expert_index) ways = b->c.weights->tp / (m->experts / b->c.weights->layer[l].w2.lead);
  const uint64_t all = ways * pairs * mm_round_up(m->hidden, MM_CPU_MANY);
  b->moe.term_floats = mm_min(all, mm_max(TERM_FLOATS, ways * pairs * MM_CPU_MANY));
  return !ways || (b->moe.term = matrix(b, b->moe.term_floats, 1, err));
}

/* Room for a scan of index keys that is split over ranks. */
static bool open_index_split(mm_backend *b, uint32_t tokens, mm_err *err) {
  const mm_model *m = b->c.model;
  const uint64_t ranks = b->groups.own.count, candidates = (uint64_t)tokens * m->index_heads;
  mm_cpu_index_split *x = &b->groups.index_split;
  if (!b->c.options.index_split || ranks == 1) return true;
  return (x->q = matrix(b, ranks * tokens * b->index_heads, m->index_dim, err)) &&
         (x->own = matrix(b, candidates, 2 * m->index_top_k, err)) && (x->all = matrix(b, ranks * candidates, 2 * m->index_top_k, err));
}

static bool open_buffers(mm_backend *b, mm_err *err) {
  const mm_model *m = b->c.model;
  uint32_t tokens = b->c.limits.max_tokens;
  widths x = widths_of(b->c.weights, m->layers);
  widen_for_draft(&x, b->c.draft);
  uint64_t pairs = (uint64_t)tokens * m->top_k;
  if (!(b->vector = matrix(b, 1, x.vector, err)) || !(b->sums = matrix(b, tokens, 2, err))) return false;
  if (!(b->moe.score = matrix(b, tokens, m->experts, err)) || !(b->moe.pick = matrix(b, pairs, 1, err))) return false;
  if (!(b->moe.weight = matrix(b, pairs, 1, err)) || !(b->moe.first_pair = matrix(b, m->experts + UINT64_C(1), 1, err))) return false;
  if (!(b->moe.pair_row = matrix(b, pairs, 1, err)) || !(b->moe.pair_weight = matrix(b, pairs, 1, err))) return false;
  if (!(b->moe.pair_act = matrix(b, pairs, x.inter, err)) ||
      !(b->moe.few = matrix(b, mm_min(tokens, MM_CPU_FEW) * m->top_k, x.experts, err)) || !open_terms(b, pairs, err))
    return false;
  if (x.mlp && (!(b->mlp.up = matrix(b, tokens, 2 * x.mlp, err)) || !(b->mlp.act = matrix(b, tokens, x.mlp, err)) ||
                !(b->mlp.out = matrix(b, tokens, m->hidden, err))))
    return false;
  if (b->index_heads && (!(b->block = matrix(b, (uint64_t)tokens * b->index_heads, m->index_top_k, err)) ||
                         !(b->blocks = matrix(b, tokens, b->index_heads, err))))
    return false;
  if (!open_index_split(b, tokens, err)) return false;
  if (!(b->share = matrix(b, b->c.options.threads, sizeof *b->share / 4, err))) return false;
  if (b->c.options.act_quant) {
    if (!(b->amax = matrix(b, pairs, mm_act_amaxes(&mm_act_formats[MM_ACT_NVFP4], (uint32_t)x.uncut), err))) return false;
    if (!(b->rounded = matrix(b, tokens, x.input, err))) return false;
    const uint32_t packed = mm_cpu_packed_floats(b);
    if (packed && !(b->groups.packed = matrix(b, tokens, packed, err))) return false;
  }
  if (!(b->row = mm_arena_alloc(&b->arena, tokens * sizeof *b->row, err))) return false;
  if (!(b->moe.pair_x = mm_arena_alloc(&b->arena, pairs * sizeof *b->moe.pair_x, err)) || !(b->moe.active = matrix(b, m->experts, 1, err)))
    return false;
  const uint64_t wide = mm_max(MM_CPU_INPUT(x.input + MM_CHUNK), mm_cpu_limbs_floats((uint32_t)x.input));
  const uint64_t wide_act = mm_max(MM_CPU_INPUT(x.inter + MM_CHUNK), mm_cpu_limbs_floats((uint32_t)x.inter));
  if (!(b->turned = matrix(b, 1, mm_max(tokens * wide, pairs * wide_act), err))) return false;
  b->out_at = MM_CPU_SUMS(MM_CPU_MANY) + MM_CPU_STRIP * ((size_t)x.input + MM_CHUNK);
  const uint64_t attention = mm_cpu_attention_floats(b);
  uint64_t scratch = mm_max(mm_max(b->out_at + 2 * mm_max((uint64_t)tokens * MM_CPU_MANY, MM_CPU_ALONE), attention), m->experts);
  if (!(b->scratch = mm_arena_alloc(&b->arena, b->c.options.threads * sizeof *b->scratch, err))) return false;
  for (unsigned t = 0; t < b->c.options.threads; t++)
    if (!(b->scratch[t] = matrix(b, 1, scratch, err))) return false;
  return true;
}

static void cpu_close(mm_backend *b) {
  if (!b) return;
  for (uint32_t l = 0; b->cache && l < b->c.model->layers; l++) {
    if (b->cache[l].k) munmap(b->cache[l].k, b->mapped.kv_bytes);
    if (b->cache[l].v) munmap(b->cache[l].v, b->mapped.kv_bytes);
    if (b->cache[l].index) munmap(b->cache[l].index, b->mapped.index_bytes);
  }
  mm_cpu_draft_close(b);
  mm_cpu_pool_close(b);
  free(b->cache);
  free(b->state);
  free(b->moe.load);
  free(b->logits.row);
  mm_team_close(b->team);
  mm_arena_close(&b->arena);
  free(b);
}

static mm_backend *cpu_open(const mm_backend_config *c, mm_err *err) {
  if (c->options.kv_fp8) {
    mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, NULL), "found a KV cache in fp8; the cpu backend keeps f32 or bf16");
    return NULL;
  }
  mm_backend *b = mm_calloc(1, sizeof *b, err);
  if (!b) return NULL;
  b->c = *c;
  b->groups.stage = (mm_cpu_ranks){c->comm, c->weights->rank, c->weights->tp};
  b->ranks = b->groups.own = (mm_cpu_ranks){c->group ? c->group : c->comm, mm_attn_rank(c->weights), mm_attn_tp(c->weights)};
  b->heads = c->model->heads / b->groups.own.count;
  b->kv_heads = (uint32_t)mm_max(1, c->model->kv_heads / b->groups.own.count);
  if (c->model->index_heads) b->index_heads = (uint32_t)mm_max(1, c->model->index_heads / b->groups.own.count);
  b->d = c->model->head_dim;
  b->swiglu = (mm_cpu_swiglu){(float)c->model->act_alpha, (float)c->model->act_limit, (float)c->model->act_beta};
  b->vectors = mm_cpu_vectors_here();
  b->ahead = mm_cpu_ahead_pays(b);
  b->moe.load = mm_calloc((size_t)c->model->layers * c->model->experts, sizeof *b->moe.load, err);
  b->team = mm_team_open(c->options.threads, err);
  if (b->team) mm_team_meanwhile(b->team, mm_cpu_prefetch_piece, &b->prefetch);
  if (b->team && c->options.pin && !mm_team_pin(b->team, c->place.local * c->options.threads, err)) return cpu_close(b), NULL;
  if (b->team && b->moe.load && open_caches(b, err) && open_position_tables(b, err) && open_buffers(b, err) && mm_cpu_draft_open(b, err))
    return b;
  cpu_close(b);
  return NULL;
}

static void cpu_layer(mm_backend *b, uint32_t l) {
  b->layer = l;
  mm_cpu_ahead_layer(b, l);
}

static bool cpu_act(mm_backend *b, uint32_t width, mm_act *out, mm_err *err) {
  *out = (mm_act){matrix(b, b->c.limits.max_tokens, width, err), width};
  return out->data != NULL;
}

/* Cosines and sines of every row, in the reference's precision: an f32 product of position and frequency. */
static void turn_rows(mm_backend *b) {
  uint32_t half = b->c.model->rotary_dim / 2;
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    for (uint32_t t = 0; t < s->count; t++) {
      float *turn = b->rope + (size_t)(s->first + t) * 2 * half;
      for (uint32_t j = 0; j < half; j++) {
        float angle = (float)(s->pos + t) * b->inv_freq[j];
        turn[j] = cosf(angle);
        turn[half + j] = sinf(angle);
      }
    }
  }
}

/* The parts of pages that slots go on from in pages of their own. */
static void copy_pages(const mm_backend *b, const mm_paging *p) {
  for (uint32_t l = 0; l < b->c.model->layers; l++) {
    const mm_cpu_cache *c = &b->cache[l];
    for (size_t i = 0; c->k && i < (size_t)p->copies * b->kv_heads; i++) {
      const mm_page_copy *copy = &p->copy[i / b->kv_heads];
      const uint32_t h = (uint32_t)(i % b->kv_heads);
      const size_t from = mm_cpu_cell(b, copy->from - p->first, h, 0), to = mm_cpu_cell(b, copy->to - p->first, h, 0);
      const size_t bytes = (size_t)copy->tokens * b->d * b->kv_size;
      memcpy(c->k + to, c->k + from, bytes);
      memcpy(c->v + to, c->v + from, bytes);
    }
    for (uint32_t i = 0; c->index && i < p->copies; i++)
      memcpy(mm_cpu_index_key(b, c, p->copy[i].to - p->first, 0), mm_cpu_index_key(b, c, p->copy[i].from - p->first, 0),
             p->copy[i].tokens * b->mapped.index_key);
  }
}

static bool cpu_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  const uint32_t of_draft = b->c.draft && b->c.draft->c.kind == MM_DRAFT_EAGLE3 ? b->c.draft->c.draft_vocab : 0;
  size_t logits = (size_t)batch->out_count * mm_max(b->c.weights->vocab_rows, of_draft);
  if (!MM_GROW(b->logits.row, &b->logits.cap, logits, err)) return false;
  b->batch = b->groups.batch = batch;
  b->ranks = b->groups.own, b->groups.rounded = NULL;
  b->err.status = MM_OK;
  if (batch->paging) copy_pages(b, batch->paging), mm_cpu_draft_copy(b, batch->paging);
  turn_rows(b);
  return true;
}

static bool cpu_end(mm_backend *b, float *out, mm_err *err) {
  if (b->err.status != MM_OK) return mm_fail_as(err, &b->err);
  if (b->batch->out_count) memcpy(out, b->logits.row, (size_t)b->batch->out_count * b->logits.width * sizeof *out);
  return true;
}

static void cpu_copy(mm_backend *b, mm_act to, mm_act from) {
  memcpy(to.data, from.data, (size_t)b->batch->tokens * to.width * sizeof(float));
}

static void cpu_send(mm_backend *b, mm_act x) {
  mm_comm_send(b->groups.stage.comm, b->groups.stage.rank, x.data, (size_t)b->batch->tokens * x.width);
}
/* Where nothing comes the step fails elsewhere. */
static void cpu_receive(mm_backend *b, mm_act x) {
  (void)mm_comm_receive(b->groups.stage.comm, b->groups.stage.rank, x.data, (size_t)b->batch->tokens * x.width);
}

static bool cpu_read(mm_backend *b, mm_act a, uint32_t rows, float *out, mm_err *err) {
  (void)b, (void)err;
  memcpy(out, a.data, (size_t)rows * a.width * sizeof *out);
  return true;
}

static bool cpu_expert_load(mm_backend *b, uint64_t *load, mm_err *err) {
  (void)err;
  memcpy(load, b->moe.load, (size_t)b->c.model->layers * b->c.model->experts * sizeof *load);
  return true;
}

static float *state_of(const mm_backend *b, uint32_t slot) { return b->state + slot * b->state_floats; }
static uint64_t cpu_state_bytes(mm_backend *b) { return b->state_floats * sizeof *b->state; }
static bool cpu_state_copy(mm_backend *b, uint32_t to, uint32_t from, mm_err *err) {
  (void)err;
  memmove(state_of(b, to), state_of(b, from), cpu_state_bytes(b));
  return true;
}
static bool cpu_state_save(mm_backend *b, uint32_t slot, void *state, mm_err *err) {
  (void)err;
  memcpy(state, state_of(b, slot), cpu_state_bytes(b));
  return true;
}
static bool cpu_state_load(mm_backend *b, uint32_t slot, const void *state, mm_err *err) {
  (void)err;
  memcpy(state_of(b, slot), state, cpu_state_bytes(b));
  return true;
}

/* All ranks of a machine share its memory, or what its control group may have; boots have names of their own. */
static bool cpu_memory(const mm_backend_config *c, mm_memory_facts *out, mm_err *err) {
  (void)c, (void)err;
  const mm_boot boot = mm_boot_name();
  out->total = out->free = mm_memory_limit();
  out->device = mm_sha256(&boot, sizeof boot);
  return true;
}

const mm_ops mm_ops_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .act = cpu_act,
    .begin = cpu_begin,
    .embed = mm_cpu_embed,
    .norm = mm_cpu_norm,
    .linear = mm_cpu_linear,
    .gqa = mm_cpu_gqa,
    .lightning = mm_cpu_lightning,
    .gated_norm = mm_cpu_gated_norm,
    .route = mm_cpu_route,
    .experts = mm_cpu_experts,
    .combine = mm_cpu_combine,
    .copy = cpu_copy,
    .logits = mm_cpu_logits,
    .end = cpu_end,
    .read = cpu_read,
    .expert_load = cpu_expert_load,
    .act_quant = true,
    .cache = {true, true, cpu_state_bytes, cpu_state_copy, cpu_state_save, cpu_state_load, mm_cpu_page_bytes, mm_cpu_pool, mm_cpu_move,
              mm_cpu_moved},
    .weights = {.layer = cpu_layer},
    .select = mm_cpu_select,
    .mlp = mm_cpu_mlp,
    .draft = {mm_cpu_concat, mm_cpu_draft_store, mm_cpu_draft_attend, mm_cpu_combine_whole, NULL, NULL, sizeof(float), mm_cpu_eagle_keep,
              mm_cpu_eagle_before, mm_cpu_eagle_chain, NULL},
    .calibration = true,
    .pins = true,
    .ranks = {.send = cpu_send,
              .receive = cpu_receive,
              .gather = mm_cpu_gather,
              .scatter = mm_cpu_scatter,
              .gather_routed = mm_cpu_gather_routed,
              .exchange = mm_cpu_exchange},
    .experts_cut = true,
    .across = true,
    .batch_invariant = true,
    .memory = cpu_memory,
};
