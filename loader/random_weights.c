/* Shapes and cuts of random weights (random_weights.h). */
#include "loader/random_weights.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "formats/hash.h"
#include "formats/system/file.h"
#include "formats/system/memory.h"
#include "formats/text.h"

enum { VOCAB_UNIT = 64, ALIGN = 64 };

/* Rows [from, from + rows) of `whole` uncut ones. */
typedef struct range {
  uint32_t whole, from, rows;
} range;

/* One of `ways` equal parts. */
static range part_of(uint32_t whole, uint32_t ways, uint32_t part) { return (range){whole, whole / ways * part, whole / ways}; }
static range all_of(uint32_t whole) { return (range){whole, 0, whole}; }
/* Heads of a rank where `tp` ranks share `heads`, or a head goes to several ranks. */
static range heads_of(uint32_t heads, uint32_t dim, uint32_t tp, uint32_t rank) {
  return (range){heads * dim, (uint32_t)((uint64_t)rank * heads / tp) * dim, (uint32_t)mm_max(1, heads / tp) * dim};
}

static uint32_t attn_tp(const mm_random_model *r) { return r->attn_tp ? r->attn_tp : r->tp; }

/* The stage's tensor-parallel rank, its number among those that attention is cut for, and the next weight's seed. */
typedef struct maker {
  const mm_random_model *r;
  const mm_model *m;
  uint32_t rank, attn_rank, seed;
} maker;

static mm_packed weight(maker *k, const mm_scheme *scheme, uint32_t rows, uint32_t columns) {
  mm_packed w = {.scheme = scheme, .lead = 1, .n = rows, .k = columns, .random = {.seed = ++k->seed, .centre = 1}};
  for (unsigned i = 0; i < scheme->plane_count; i++) w.cell[i] = scheme->plane[i].cell;
  return w;
}

/* As converters cut: cells of scales, which are all planes but the first, become finer until a slice has whole ones. */
static void fit(uint32_t *cell, uint32_t slice) {
  while (*cell && slice % *cell) *cell /= 2;
}

/* Up to three ranges of rows, one below the other here and in the uncut matrix. */
static mm_packed rows_of(maker *k, const mm_scheme *scheme, const range piece[3], uint32_t columns) {
  mm_packed w = weight(k, scheme, 0, columns);
  for (uint32_t i = 0, before = 0; i < 3 && piece[i].whole; before += piece[i++].whole) {
    w.random.at[i] = w.n, w.random.from[i] = before + piece[i].from, w.n += piece[i].rows;
    for (unsigned p = 1; piece[i].rows < piece[i].whole && p < scheme->plane_count; p++) fit(&w.cell[p].n, piece[i].rows);
  }
  return w;
}

static mm_packed columns_of(maker *k, const mm_scheme *scheme, uint32_t rows, range columns) {
  mm_packed w = weight(k, scheme, rows, columns.rows);
  if (columns.rows == columns.whole) return w;
  for (unsigned i = 1; i < scheme->plane_count; i++) fit(&w.cell[i].k, w.k);
  w.first_k = columns.from, w.whole_k = columns.whole, w.cut_k = w.k;
  return w;
}

static mm_packed vector_of(maker *k, range rows) { return rows_of(k, mm_scheme_plain(MM_BF16), (const range[3]){rows}, 1); }
static mm_packed norm_of(maker *k, range rows) {
  mm_packed w = vector_of(k, rows);
  w.random.centre = k->m->norm_offset ? 0 : 1;
  return w;
}

static void make_attention(maker *k, uint32_t l, mm_layer_weights *y) {
  const mm_model *m = k->m;
  const mm_scheme *linear = k->r->linear, *plain = mm_scheme_plain(MM_BF16);
  const uint32_t tp = attn_tp(k->r), d = m->head_dim;
  const range q = part_of(m->heads * d, tp, k->attn_rank), kv = heads_of(m->kv_heads, d, tp, k->attn_rank);
  const range lightning = {3 * q.whole, 3 * q.from, 3 * q.rows}, head = all_of(d);
  const bool full = m->attn[l] != MM_ATTN_LIGHTNING;
  y->qkv = full ? rows_of(k, linear, (const range[3]){q, kv, kv}, m->hidden) : rows_of(k, linear, (const range[3]){lightning}, m->hidden);
  y->out = columns_of(k, linear, m->hidden, q);
  if (!full) y->output_gate = rows_of(k, linear, (const range[3]){q}, m->hidden), y->attn_norm = norm_of(k, q);
  if (full && m->qk_norm) y->q_norm = norm_of(k, m->qk_norm_per_head ? head : q), y->k_norm = norm_of(k, m->qk_norm_per_head ? head : kv);
  if (m->attn[l] != MM_ATTN_SPARSE) return;
  const range index = heads_of(m->index_heads, m->index_dim, tp, k->attn_rank), key = all_of(m->index_dim);
  y->index_q = rows_of(k, plain, (const range[3]){index}, m->hidden), y->index_k = rows_of(k, plain, (const range[3]){key}, m->hidden);
  y->index_q_norm = norm_of(k, key), y->index_k_norm = norm_of(k, key);
}

static void make_mlp(maker *k, uint32_t width, mm_layer_weights *y) {
  const range cut = part_of(width, k->r->tp, k->rank);
  y->mlp_up = rows_of(k, k->r->linear, (const range[3]){cut, cut}, k->m->hidden);
  y->mlp_down = columns_of(k, k->r->linear, k->m->hidden, cut);
}

static void make_experts(maker *k, mm_layer_weights *y) {
  const mm_model *m = k->m;
  const uint32_t ways = k->r->tp / k->r->ep, held = m->experts / k->r->ep;
  const range cut = part_of(m->intermediate, ways, k->rank % ways);
  const bool wide = m->family == MM_FAMILY_M3; /* its release has routers in f32 */
  y->router = rows_of(k, mm_scheme_plain(wide ? MM_F32 : MM_BF16), (const range[3]){all_of(m->experts)}, m->hidden);
  y->router.random.skew = k->r->skew;
  if (m->router == MM_ROUTER_SIGMOID_BIAS) y->router_bias = vector_of(k, all_of(m->experts)), y->router_bias.random.centre = 0;
  y->w13 = rows_of(k, k->r->experts, (const range[3]){cut, cut}, m->hidden);
  y->w2 = columns_of(k, k->r->experts, m->hidden, cut);
  for (mm_packed *const *w = (mm_packed *const[]){&y->w13, &y->w2, NULL}; *w; w++)
    (*w)->lead = held, (*w)->random.first = k->rank / ways * held;
}

static void make_layer(maker *k, uint32_t l, mm_layer_weights *y) {
  const mm_model *m = k->m;
  y->input_norm = norm_of(k, all_of(m->hidden)), y->post_norm = norm_of(k, all_of(m->hidden));
  make_attention(k, l, y);
  if (m->ffn[l] == MM_FFN_DENSE) {
    make_mlp(k, m->dense_intermediate, y);
    return;
  }
  make_experts(k, y);
  if (m->shared_intermediate) make_mlp(k, m->shared_intermediate, y);
}

/* Codes are cut between bytes. */
static bool check_bytes(const mm_scheme *s, uint32_t columns, uint32_t ways, mm_err *err) {
  const uint32_t unit = s->plane[0].cell.k;
  return columns / ways % unit == 0 ||
         mm_fail(err, MM_USAGE, "E_TP", mm_at(NULL, NULL), "found %u columns in %u parts of scheme %s, expected parts of whole bytes",
                 columns, ways, s->name);
}

static bool check_columns(const mm_random_model *r, const mm_model *m, mm_err *err) {
  return check_bytes(r->linear, m->heads * m->head_dim, attn_tp(r), err) && check_bytes(r->linear, m->dense_intermediate, r->tp, err) &&
         check_bytes(r->linear, m->shared_intermediate, r->tp, err) && check_bytes(r->experts, m->intermediate, r->tp / r->ep, err) &&
         check_bytes(r->linear, m->hidden, 1, err) && check_bytes(r->experts, m->hidden, 1, err);
}

bool mm_random_check(const mm_random_model *r, const mm_model *m, mm_err *err) {
  const uint32_t tp = r->tp, ep = r->ep;
  if (tp % attn_tp(r) == 0 && mm_model_cuts(m, tp, attn_tp(r), ep) && r->pp && r->pp <= m->layers) return check_columns(r, m, err);
  return mm_fail(
      err, MM_USAGE, "E_TP", mm_at(NULL, NULL),
      "found tp %u, ep %u, pp %u; expected a tp that divides %u heads, %u and %u columns of dense layers and shared experts, and "
      "%u kv heads (%u index heads) or the other way round, an ep that divides tp and %u experts, tp / ep their %u columns, and "
      "pp of at most %u layers",
      tp, ep, r->pp, m->heads, m->dense_intermediate, m->shared_intermediate, m->kv_heads, m->index_heads, m->experts, m->intermediate,
      m->layers);
}

bool mm_random_weights(const mm_random_model *r, const mm_model *m, uint32_t rank, mm_rank_weights *w, mm_err *err) {
  if (!mm_random_check(r, m, err)) return false;
  const uint32_t at = attn_tp(r), stage = rank / r->tp, unit = VOCAB_UNIT % at == 0 ? VOCAB_UNIT : VOCAB_UNIT * at;
  const uint32_t padded = (uint32_t)mm_round_up(m->vocab, unit), held = m->experts / r->ep;
  maker k = {.r = r, .m = m, .rank = rank % r->tp, .attn_rank = rank % r->tp % at};
  const range vocab = part_of(padded, at, k.attn_rank);
  *w = (mm_rank_weights){.rank = k.rank,
                         .tp = r->tp,
                         .attn_tp = at,
                         .layer_first = (uint32_t)((uint64_t)m->layers * stage / r->pp),
                         .layer_end = (uint32_t)((uint64_t)m->layers * (stage + 1) / r->pp),
                         .expert_first = k.rank / (r->tp / r->ep) * held,
                         .vocab_first = vocab.from,
                         .vocab_rows = vocab.rows};
  if (!(w->layer = mm_calloc(m->layers, sizeof *w->layer, err))) return false;
  mm_packed embed = rows_of(&k, mm_scheme_plain(MM_BF16), (const range[3]){vocab}, m->hidden);
  const mm_packed head = rows_of(&k, r->head, (const range[3]){vocab}, m->hidden), norm = norm_of(&k, all_of(m->hidden));
  embed.random.gain = sqrtf((float)m->hidden); /* numbers as large as a layer's: rows differ by their tokens throughout */
  if (w->layer_first == 0) w->embed = embed;
  if (w->layer_end == m->layers) w->head = head, w->final_norm = norm;
  for (uint32_t l = 0; l < m->layers; l++) {
    mm_layer_weights unused = {0};
    make_layer(&k, l, l >= w->layer_first && l < w->layer_end ? &w->layer[l] : &unused);
  }
  return true;
}

bool mm_bind_any(mm_rank_weights *w, const mm_shards *s, uint32_t rank, mm_err *err) {
  return s->random.linear ? mm_random_weights(&s->random, &s->pack.model, rank, w, err) : mm_bind(w, s, rank, err);
}

/* ---- planes in memory ---- */

/* Calls `each` for every weight of the rank. */
static void visit(mm_rank_weights *w, void (*each)(mm_packed *, void *), void *with) {
  each(&w->embed, with), each(&w->head, with), each(&w->final_norm, with);
  for (uint32_t l = w->layer_first; l < w->layer_end; l++) {
    mm_layer_weights *y = &w->layer[l];
    mm_packed *const all[] = {&y->input_norm, &y->post_norm, &y->qkv,     &y->out,         &y->output_gate,  &y->attn_norm,
                              &y->q_norm,     &y->k_norm,    &y->index_q, &y->index_k,     &y->index_q_norm, &y->index_k_norm,
                              &y->mlp_up,     &y->mlp_down,  &y->router,  &y->router_bias, &y->w13,          &y->w2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
      if (all[i]->scheme) each(all[i], with);
  }
}

/* UINT64_MAX: more than that. */
static uint64_t plane_bytes(const mm_packed *w, unsigned i) {
  uint64_t bytes;
  const uint64_t each = mm_plane_elements(w->n, w->k, w->cell[i]); /* below 2^62 */
  const bool counted = mm_mul(each, w->lead, &bytes) && mm_mul(bytes, mm_dtype_size(w->scheme->plane[i].dtype), &bytes);
  return counted && bytes <= UINT64_MAX - ALIGN ? mm_round_up(bytes, ALIGN) : UINT64_MAX;
}
static void count(mm_packed *w, void *sum) {
  uint64_t *const all = sum;
  for (unsigned i = 0; w->scheme && i < w->scheme->plane_count; i++)
    if (!mm_add(*all, plane_bytes(w, i), all)) *all = UINT64_MAX;
}
static void fill(mm_packed *w, void *next) {
  char **at = next;
  for (unsigned i = 0; w->scheme && i < w->scheme->plane_count; *at += plane_bytes(w, i++)) {
    mm_random_plane(w, i, *at);
    w->plane[i] = *at;
  }
}

bool mm_random_fill(mm_rank_weights *w, mm_err *err) {
  uint64_t bytes = 0;
  visit(w, count, &bytes);
  if (bytes > mm_memory_limit()) return mm_fail_memory(err, bytes);
  void *made = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return mm_fail_memory(err, bytes);
  w->made = made, w->made_bytes = bytes;
  char *at = made;
  visit(w, fill, &at);
  return true;
}

/* ---- instead of a packed checkpoint ---- */

static bool refuse(mm_err *err, const char *option) {
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--%s: only with --load-format dummy", option);
}

static bool check_unused(const mm_dummy *d, mm_err *err) {
  if (d->quant) return refuse(err, "dummy-quant");
  if (d->experts) return refuse(err, "dummy-expert-quant");
  if (d->tp) return refuse(err, "dummy-tp");
  if (d->ep) return refuse(err, "dummy-ep");
  if (d->pp) return refuse(err, "dummy-pp");
  return d->skew == 0 || refuse(err, "dummy-skew");
}

static const mm_scheme *find_scheme(const char *option, const char *name, mm_err *err) {
  const mm_scheme *s = mm_scheme_find(name);
  const bool none = strcmp(name, "none") == 0;
  if (!s)
    (void)mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--%s: found \"%s\", expected a scheme of docs/quantisation.md%s", option,
                  name, none ? "; nothing is stored that none could leave as it is: bf16 is not quantised" : "");
  return s;
}

static bool read_options(mm_random_model *r, const mm_dummy *d, mm_err *err) {
  const char *quant = d->quant ? d->quant : "block_fp8", *experts = d->experts ? d->experts : quant;
  const uint32_t tp = d->tp ? (uint32_t)d->tp : 1;
  *r = (mm_random_model){.head = mm_scheme_plain(MM_BF16),
                         .tp = tp,
                         .ep = d->ep ? (uint32_t)d->ep : 1,
                         .pp = d->pp ? (uint32_t)d->pp : 1,
                         .skew = (float)d->skew};
  r->linear = find_scheme("dummy-quant", quant, err);
  r->experts = r->linear ? find_scheme("dummy-expert-quant", experts, err) : NULL;
  return r->linear && r->experts &&
         ((r->skew >= 0 && r->skew < 1) || mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                                                   "--dummy-skew: found %s, expected 0 or more and below 1", MM_SHOWN_REAL(d->skew)));
}

/* Files that a tokenizer, a chat format and defaults are read from. */
static bool find_companions(mm_pack *p, mm_err *err) {
  static const char *const names[] = {"config.json",           "generation_config.json", "tokenizer.json",
                                      "tokenizer_config.json", "chat_template.jinja",    "chat_template.json"};
  enum { NAMES = sizeof names / sizeof *names };
  if (!(p->file = mm_arena_alloc(&p->arena, NAMES * sizeof *p->file, err))) return false;
  for (size_t i = 0; i < NAMES; i++) {
    const mm_path path = mm_path_of(p->dir, names[i]);
    struct stat st;
    if (stat(path.text, &st) == 0 && S_ISREG(st.st_mode))
      p->file[p->file_count++] = (mm_pack_file){.name = names[i], .size = (uint64_t)st.st_size};
  }
  return true;
}

/* The digest of all that the weights follow from. */
static bool write_digest(mm_pack *p, const mm_random_model *r, mm_err *err) {
  char *text = mm_json_text(mm_model_to_json(&p->model), false, err);
  if (!text) return false;
  const char *cut = MM_FORMATTED(160, "dummy %s %s %u %u %u %.9g", r->linear->name, r->experts->name, r->tp, r->ep, r->pp, (double)r->skew);
  mm_sha256_state h;
  mm_sha256_begin(&h);
  mm_sha256_add(&h, cut, strlen(cut));
  mm_sha256_add(&h, text, strlen(text));
  free(text);
  p->text_digest = p->plan = mm_sha256_end(&h);
  return true;
}

static char *copy(mm_pack *p, const char *text, mm_err *err) {
  const size_t n = strlen(text) + 1;
  char *to = mm_arena_alloc(&p->arena, n, err);
  return to ? memcpy(to, text, n) : NULL;
}

bool mm_dummy_wanted(const mm_dummy *d) { return d->format && strcmp(d->format, "dummy") == 0; }

bool mm_shards_open_as(mm_shards *s, const char *dir, const mm_dummy *d, mm_err *err) {
  if (!mm_dummy_wanted(d)) return check_unused(d, err) && mm_shards_open(s, dir, err);
  *s = (mm_shards){0};
  mm_pack *p = &s->pack;
  mm_random_model r;
  if (!read_options(&r, d, err) || !d->read(dir, &p->model, err) || !mm_random_check(&r, &p->model, err)) return false;
  p->tp = r.tp, p->ep = r.ep, p->pp = r.pp;
  const char *quant = MM_FORMATTED(80, "dummy %s, experts %s", r.linear->name, r.experts->name);
  const bool ok = (p->dir = copy(p, dir, err)) && (p->quant = copy(p, quant, err)) && (p->tool = copy(p, "--load-format dummy", err)) &&
                  (p->rank = mm_arena_alloc(&p->arena, mm_pack_ranks(p) * sizeof *p->rank, err)) && find_companions(p, err) &&
                  write_digest(p, &r, err);
  if (ok) s->random = r;
  if (!ok) mm_shards_close(s);
  return ok;
}
