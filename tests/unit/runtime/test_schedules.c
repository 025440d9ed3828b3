/* Random schedules of an engine against an oracle: single tokens, prompts and rows of drafts in one step, each row chosen from by settings
 * of its own, within the step or after it, or scored; forks, states saved and restored at any position, slots dropped, pages short with
 * nothing changed; at tp 1, 2 and 8, over two stages and with groups of attention, some of them without rows, among poisoned pages and
 * states. The oracle is an engine of one slot without shared pages, fed token by token; it is held against double precision. STEPS=N runs N
 * steps of each kind, MM_SEED=N another schedule. */
#include <math.h>
#include <stdio.h>

#include "tests/unit/runtime/fixture.h"
/* Behind it, whose parameters have names of its types. */
#include "runtime/engine/engine_inside.h"

#define PAGES     16 /* at most; 8 of 24 that the slots could fill, or 4 for each group of attention */
#define LIKELIEST 3  /* likeliest ids that a row may ask for */

/* How a step ends. */
enum { LOGITS, QUEUED, DEFERRED, SCORED, KINDS };

typedef struct saved {
  uint32_t page[LENGTH / MM_PAGE + 1], pages, tokens, text, group;
  char *state;
} saved;

/* A row whose output is wanted: the ids it comes from, how it is chosen, and what must come of it. */
typedef struct wanted {
  uint32_t text, pos;
  int32_t slot; /* whose last row of the step this is, or -1 */
  mm_sampling set;
  mm_bias bias[2];
  uint32_t allowed[2];
  mm_logprob logprobs[1 + LIKELIEST];
  int32_t id;
} wanted;

typedef struct step {
  int32_t id[LENGTH];
  uint32_t out[LENGTH], text[2 * SLOTS];
  mm_span span[2 * SLOTS];
  wanted row[LENGTH];
  mm_sampling set[LENGTH];
  uint32_t rows, spans, outs;
} step;

typedef struct schedule {
  fixture w;
  uint32_t ranks, groups, pages;
  mm_sampler *sampler;
  uint32_t text[SLOTS];
  int32_t held[SLOTS][LENGTH]; /* ids of each slot, -1 where it was restored without */
  int32_t chosen[SLOTS];       /* after its last row, or -1 */
  saved saved[3];
  step *queued[MM_QUEUE]; /* what is to be collected, oldest first */
  uint32_t queue;
  uint32_t steps, refused, forks, resumed, drafts, mixed, draws, named, scores;
  uint32_t idle; /* steps in which a group had no rows */
} schedule;

/* ---- the oracle ---- */

/* Every text token by token in an engine of its own that shares nothing: the bits of the world's engine, and double precision's numbers. */
static void check_oracle(const fixture *w, caches cache) {
  mm_ops ops = mm_ops_cpu;
  ops.cache.pages = false;
  const mm_engine_config c = {.ops = &ops, .limits = {.max_tokens = 1, .slots = 1, .max_positions = LENGTH}, .options = cached(cache)};
  mm_err err = {0};
  mm_engine *e = mm_engine_open(&w->shards->s, &c, &err);
  if (!e) fail_msg("%s", err.text);
  float logits[64];
  double exact[64] = {0}, worst = 0;
  for (uint32_t text = 0; text < TEXTS; text++) {
    ref_state state = ref_start(&w->ref.m, LENGTH);
    for (uint32_t t = 0; t < LENGTH; t++) {
      const int32_t id = token(text, t);
      const float *want = w->want[text] + (size_t)t * w->vocab;
      assert_true(mm_engine_step(e, &(mm_batch){1, &id, 1, &(mm_span){0, 0, 1, t}, 1, (uint32_t[]){0}, NULL, NULL}, logits, &err));
      assert_memory_equal(logits, want, w->vocab * sizeof *want);
      if (cache != IN_F32) continue; /* doubles have no rounded caches */
      ref_step(&w->ref, &state, id, exact);
      for (uint32_t v = 0; v < w->vocab; v++) worst = fmax(worst, fabs((double)want[v] - exact[v]));
    }
    ref_stop(&state);
  }
  if (!(worst <= 5e-4)) fail_msg("oracle: %g from double precision", worst);
  mm_engine_close(e);
}

static const float *logits_of(const schedule *s, const wanted *r) { return s->w.want[r->text] + (size_t)r->pos * s->w.vocab; }

/* -ln of the softmax's share of an id. */
static double score_of(const schedule *s, const wanted *r, int32_t id) {
  const float *x = logits_of(s, r);
  double sum = 0;
  for (uint32_t v = 0; v < s->w.vocab; v++) sum += exp((double)x[v]);
  return log(sum) - (double)x[id];
}

/* ---- steps ---- */

/* Settings of a row, every parameter now and then; of some the next token of its text is the only one allowed. */
static void randomize(wanted *r) {
  mm_sampling *q = &r->set;
  *q = (mm_sampling){.temperature = below(4) ? 0.3 + below(20) * 0.1 : 0, .top_p = below(2) ? 1 : 0.5 + below(50) * 0.01, .seed = below(9)};
  if (below(2)) q->top_k = 1 + below(30);
  if (below(3) == 0) q->min_p = below(20) * 0.01;
  if (below(3) == 0) q->repetition = 0.7 + below(10) * 0.1;
  if (below(3) == 0) q->presence = below(10) * 0.1, q->frequency = below(10) * 0.1 - 0.3, q->prompt = below(LENGTH);
  for (uint32_t i = 0; i < 2; i++) r->bias[i] = (mm_bias){(int32_t)(below(25) * 2 + i), (float)below(60) * 0.1f - 3};
  if (below(3) == 0) q->bias_count = 2, q->bias = r->bias;
  if (below(3) == 0) q->top_logprobs = below(LIKELIEST + 1), q->logprobs = r->logprobs;
  const int32_t next = r->pos + 1 < LENGTH ? token(r->text, r->pos + 1) : 0;
  r->allowed[0] = below(1u << 30) | 1, r->allowed[1] = below(1u << 30);
  if (below(2)) r->allowed[0] = next < 32 ? 1u << next : 0, r->allowed[1] = next < 32 ? 0 : 1u << (next - 32);
  if (below(2)) q->allowed = r->allowed;
}

/* The token that the rule samples from the oracle's logits, given the row's sequence up to it. */
static void expect(const schedule *s, wanted *r, const int32_t *held) {
  float x[64];
  memcpy(x, logits_of(s, r), s->w.vocab * sizeof *x);
  mm_sample_adjust(s->sampler, &r->set, held, held ? r->pos + 1 : 0, x);
  r->id = mm_sample(s->sampler, &r->set, r->pos + UINT64_C(1), x);
}

/* Rows of one slot: it goes on, back or starts again, with one token, two to eight drafted ones or a part of a prompt. */
static void add_span(schedule *s, step *t, uint32_t slot) {
  fixture *w = &s->w;
  const uint32_t held = mm_engine_held(w->engine, slot), at = t->spans, kind = below(4);
  uint32_t pos = held, text = s->text[slot];
  if (held == LENGTH || below(12) == 0) pos = 0;
  if (pos && w->ref.m.qk_norm && below(8) == 0) pos = below(held + 1); /* no lightning layers: it may go back */
  if (pos == 0) text = below(TEXTS);
  if (pos && pos <= COMMON && below(4) == 0) text ^= 1;
  const uint32_t count = (uint32_t)mm_min(kind < 2 ? 1 : kind == 2 ? 2 + below(7) : 1 + below(40), LENGTH - pos);
  if (t->rows + count + 2 > LENGTH) return;
  t->text[at] = text;
  t->span[t->spans++] = (mm_span){(int32_t)slot, t->rows, count, pos};
  s->drafts += kind == 2, s->mixed += at > 0 && (count == 1) != (t->span[at - 1].count == 1);
  for (uint32_t i = 0; i < count; i++) {
    const bool last = i + 1 == count;
    if (kind == 2 || last || below(8) == 0) {
      t->row[t->outs] = (wanted){.text = text, .pos = pos + i, .slot = last ? (int32_t)slot : -1};
      t->out[t->outs++] = t->rows;
    }
    t->id[t->rows++] = token(text, pos + i);
  }
  if (pos && pos == held && s->chosen[slot] == token(text, pos) && below(2)) t->id[t->span[at].first] = MM_ID_SAMPLED, s->named++;
  if (below(6)) return;
  t->span[t->spans++] = (mm_span){-1, t->rows, 2, below(9)};
  t->id[t->rows++] = 3, t->id[t->rows++] = 4;
}

static mm_batch batch_of(const step *t, const mm_sampling *set) {
  return (mm_batch){t->rows, t->id, t->spans, t->span, t->outs, t->out, set, NULL};
}

/* All that a refused step must leave as it was. */
typedef struct standing {
  uint32_t held[SLOTS], free, refs[PAGES], mapped[SLOTS], table[SLOTS * (LENGTH / MM_PAGE + 1)];
} standing;
static standing standing_of(const schedule *s) {
  const mm_pages *p = mm_engine_pages(s->w.engine);
  standing x = {.free = mm_pages_free(p)};
  for (uint32_t i = 0; i < PAGES; i++) x.refs[i] = mm_pages_references(p, i);
  for (uint32_t i = 0; i < SLOTS; i++) {
    x.held[i] = mm_engine_held(s->w.engine, i), x.mapped[i] = mm_pages_held(p, i);
    memcpy(x.table + (size_t)i * mm_pages_per_slot(p), mm_pages_table(p) + (size_t)i * mm_pages_per_slot(p), x.mapped[i] * sizeof *x.table);
  }
  return x;
}

/* Contents of the slots once the step is done. */
static void keep_ids(schedule *s, const step *t) {
  for (uint32_t i = 0; i < t->spans; i++) {
    const mm_span *p = &t->span[i];
    if (p->slot < 0) continue;
    s->text[p->slot] = t->text[i], s->chosen[p->slot] = -1;
    for (uint32_t k = 0; k < p->count; k++) s->held[p->slot][p->pos + k] = token(t->text[i], p->pos + k);
  }
}

static const int32_t *ids_before(const schedule *s, const step *t, uint32_t out) {
  for (uint32_t i = 0; i < t->spans; i++)
    if (t->out[out] - t->span[i].first < t->span[i].count) return t->span[i].slot < 0 ? NULL : s->held[t->span[i].slot];
  return NULL;
}

/* The choices of the oldest step that was queued. */
static void collect(schedule *s) {
  int32_t id[LENGTH];
  mm_err err = {0};
  step *t = s->queued[0];
  assert_true(mm_engine_collect(s->w.engine, id, &err));
  for (uint32_t i = 0; i < t->outs; i++) {
    const wanted *r = &t->row[i];
    if (id[i] != r->id) fail_msg("step %u, text %u, position %u: chosen %d, expected %d", s->steps, r->text, r->pos, id[i], r->id);
    for (uint32_t k = 0; r->set.logprobs && k <= r->set.top_logprobs; k++)
      if (r->logprobs[k].id >= 0) assert_true(fabs((double)r->logprobs[k].logprob + score_of(s, r, r->logprobs[k].id)) < 1e-4);
    if (r->set.logprobs) assert_int_equal(r->logprobs[0].id, r->id);
  }
  s->draws += t->outs;
  free(t);
  memmove(s->queued, s->queued + 1, --s->queue * sizeof *s->queued);
}

static void expect_all(schedule *s, step *t) {
  for (uint32_t i = 0; i < t->outs; i++) {
    wanted *r = &t->row[i];
    expect(s, r, ids_before(s, t, i));
    if (r->slot >= 0) s->chosen[r->slot] = r->id;
  }
}

/* A slot of the same group. */
static uint32_t near(const schedule *s, uint32_t slot) {
  uint32_t other;
  do other = below(SLOTS);
  while (other % s->groups != slot % s->groups);
  return other;
}

/* Slot `to` holds what `from` does. */
static void fork_slot(schedule *s, uint32_t from, uint32_t to) {
  mm_err err = {0};
  assert_true(mm_engine_fork(s->w.engine, from, &to, 1, &err));
  s->text[to] = s->text[from], s->chosen[to] = s->chosen[from], s->forks++;
  memmove(s->held[to], s->held[from], sizeof s->held[0]);
}

static void fork_any(schedule *s) {
  const uint32_t from = below(SLOTS);
  fork_slot(s, from, near(s, from));
}

static bool queue_step(schedule *s, step *t, bool deferred, mm_err *err) {
  for (uint32_t i = 0; i < t->outs; i++) randomize(&t->row[i]), t->set[i] = t->row[i].set;
  if (s->queue == MM_QUEUE) collect(s);
  const mm_batch batch = batch_of(t, deferred ? NULL : t->set);
  if (!(deferred ? mm_engine_forward : mm_engine_queue)(s->w.engine, &batch, err)) return false;
  keep_ids(s, t);
  if (deferred) {
    const uint32_t from = below(SLOTS), to = near(s, from); /* anything but a step may come between; the choice belongs to the slots */
    bool waits = false;
    for (uint32_t i = 0; i < t->spans; i++) waits |= t->span[i].slot == (int32_t)from || t->span[i].slot == (int32_t)to;
    if (!waits) fork_slot(s, from, to);
    assert_true(mm_engine_sample(s->w.engine, t->set, err));
  }
  expect_all(s, t);
  s->queued[s->queue++] = t;
  return true;
}

static bool plain_step(schedule *s, step *t, bool scored, mm_err *err) {
  fixture *w = &s->w;
  int32_t target[LENGTH] = {0};
  double score[LENGTH] = {0};
  const mm_batch batch = batch_of(t, NULL);
  for (uint32_t i = 0; i < t->outs; i++) target[i] = (int32_t)below(w->vocab);
  if (!(scored ? mm_engine_score(w->engine, &batch, target, score, err) : mm_engine_step(w->engine, &batch, w->got, err))) return false;
  keep_ids(s, t);
  for (uint32_t i = 0; i < t->outs; i++) {
    const wanted *r = &t->row[i];
    const bool same_bits = scored ? fabs(score[i] - score_of(s, r, target[i])) < 1e-9
                                  : memcmp(w->got + (size_t)i * w->vocab, logits_of(s, r), w->vocab * sizeof(float)) == 0;
    if (!same_bits) fail_msg("step %u, text %u, position %u: other %s", s->steps, r->text, r->pos, scored ? "score" : "bits");
  }
  s->scores += scored ? t->outs : 0;
  return true;
}

static void random_step(schedule *s) {
  step *t = calloc(1, sizeof *t);
  uint32_t order[SLOTS];
  for (uint32_t i = 0; i < SLOTS; i++) order[i] = i;
  for (uint32_t i = 0; i < SLOTS; i++) {
    const uint32_t other = i + below(SLOTS - i), slot = order[other];
    order[other] = order[i], order[i] = slot;
    if (below(2)) add_span(s, t, slot);
  }
  const uint32_t kind = below(KINDS);
  const standing before = standing_of(s);
  mm_err err = {0};
  if (kind == QUEUED || kind == DEFERRED ? queue_step(s, t, kind == DEFERRED, &err) : plain_step(s, t, kind == SCORED, &err)) {
    if (kind == LOGITS || kind == SCORED) free(t);
    return;
  }
  const standing after = standing_of(s);
  assert_string_equal(err.code, "E_PAGES");
  assert_int_equal(err.status, MM_LIMIT);
  assert_memory_equal(&before, &after, sizeof before);
  free(t);
  s->refused++;
  const uint32_t slot = below(SLOTS);
  mm_engine_drop(s->w.engine, slot), s->chosen[slot] = -1;
}

/* ---- what slots are given besides ---- */

static void random_save(schedule *s) {
  mm_engine *e = s->w.engine;
  mm_pages *p = mm_engine_pages(e);
  saved *x = &s->saved[below(3)];
  const uint32_t slot = below(SLOTS);
  mm_err err = {0};
  if (!x->tokens) {
    if (!mm_engine_held(e, slot)) return;
    x->tokens = mm_engine_held(e, slot), x->pages = mm_pages_held(p, slot), x->text = s->text[slot], x->group = slot % s->groups;
    memcpy(x->page, mm_pages_table(p) + (size_t)slot * mm_pages_per_slot(p), x->pages * sizeof *x->page);
    for (uint32_t i = 0; i < x->pages; i++) mm_pages_hold(p, x->page[i]);
    assert_true(mm_engine_save(e, slot, x->state, &err));
  } else if (below(3)) {
    const uint32_t n = s->w.ref.m.qk_norm ? 1 + below(x->tokens) : x->tokens; /* states are those after one token alone */
    int32_t id[LENGTH];
    const bool known = below(2);
    if (slot % s->groups != x->group) { /* whose ranks do not have these pages */
      assert_false(mm_engine_resume(e, slot, x->page, NULL, n, x->state, &err));
      assert_string_equal(err.code, "E_BATCH");
      return;
    }
    for (uint32_t i = 0; i < n; i++) id[i] = token(x->text, i), s->held[slot][i] = known ? id[i] : -1;
    assert_true(mm_engine_resume(e, slot, x->page, known ? id : NULL, n, x->state, &err));
    s->text[slot] = x->text, s->chosen[slot] = -1, s->resumed++;
  } else {
    for (uint32_t i = 0; i < x->pages; i++) mm_pages_release(p, x->page[i]);
    x->tokens = 0;
  }
}

/* Poisons the rest of a slot's own page behind its last token. */
enum { HUGE_KEY = 0x7e }; /* bytes of an index key, or of its scale, that wins over all: NaN would count as none */
static void poison_tail(const schedule *s, const mm_backend *b, const mm_cpu_cache *c, uint32_t first, uint32_t slot) {
  const mm_pages *p = mm_engine_pages(s->w.engine);
  const uint32_t held = mm_engine_held(s->w.engine, slot), used = held % MM_PAGE;
  const uint32_t page = mm_pages_table(p)[(size_t)slot * mm_pages_per_slot(p) + held / MM_PAGE];
  if (!used || mm_pages_references(p, page) > 1) return;
  for (uint32_t h = 0; h < b->kv_heads; h++) {
    const size_t at = mm_cpu_cell(b, page - first, h, used), bytes = mm_cpu_cell(b, 0, 0, MM_PAGE - used);
    memset(c->k + at, 0xff, bytes), memset(c->v + at, 0xff, bytes);
  }
  if (c->index) memset(mm_cpu_index_key(b, c, page - first, used), HUGE_KEY, (MM_PAGE - used) * b->mapped.index_key);
}

/* Every number that no slot may read becomes NaN, or of index keys huge: pages without a reference, what lies behind a slot's last token,
 * states of empty slots.
 */
static void poison(const schedule *s) {
  const mm_pages *p = mm_engine_pages(s->w.engine);
  for (uint32_t r = 0; r < s->ranks; r++) {
    const mm_backend *b = backend[r];
    const size_t bytes = mm_cpu_cell(b, 1, 0, 0);
    const uint32_t group = mm_engine_rank_group(s->w.engine, r), each = s->pages / s->groups, first = group * each;
    for (uint32_t l = 0; l < s->w.ref.m.layers; l++) {
      const mm_cpu_cache *c = &b->cache[l];
      if (!c->k) continue;
      for (uint32_t i = 0; i < each; i++)
        if (!mm_pages_references(p, first + i)) {
          memset(c->k + i * bytes, 0xff, bytes), memset(c->v + i * bytes, 0xff, bytes);
          if (c->index) memset(mm_cpu_index_key(b, c, i, 0), HUGE_KEY, MM_PAGE * b->mapped.index_key);
        }
      for (uint32_t slot = group; slot < SLOTS; slot += s->groups) poison_tail(s, b, c, first, slot);
    }
    for (uint32_t slot = group; b->state_floats && slot < SLOTS; slot += s->groups)
      if (!mm_engine_held(s->w.engine, slot))
        memset(b->state + slot / s->groups * b->state_floats, 0xff, b->state_floats * sizeof *b->state);
  }
}

static void check_pages(const schedule *s) {
  uint32_t held[PAGES] = {0};
  mm_err err = {0};
  for (uint32_t i = 0; i < 3; i++)
    for (uint32_t k = 0; s->saved[i].tokens && k < s->saved[i].pages; k++) held[s->saved[i].page[k]]++;
  if (!mm_pages_check(mm_engine_pages(s->w.engine), held, &err)) fail_msg("step %u: %s", s->steps, err.text);
}

/* ---- schedules ---- */

/* tp ranks, of which attention has attn_tp; 0: all. */
static void start(schedule *s, mm_model m, uint32_t tp, uint32_t attn_tp, uint32_t stage, caches cache) {
  mm_err err = {0};
  memset(s, 0, sizeof *s);
  s->groups = attn_tp ? tp / attn_tp : 1;
  s->pages = (uint32_t)mm_max(8, 4 * s->groups);
  open_groups(&s->w, m, tp, attn_tp, stage, s->pages, cache);
  check_oracle(&s->w, cache);
  s->ranks = stage ? 2 * tp : tp;
  s->sampler = mm_sampler_open(m.vocab, &err);
  for (int i = 0; i < 3; i++) s->saved[i].state = malloc(mm_engine_state_bytes(s->w.engine) + 1);
  for (int i = 0; i < SLOTS; i++) s->chosen[i] = -1;
}

/* All ranks of a group hold the same bits of its rows. */
static void check_alike(schedule *s) {
  const mm_engine *e = s->w.engine;
  bool idle = false;
  for (uint32_t r = 0; s->groups > 1 && e->stepped && r < s->ranks; r++) {
    const uint32_t group = mm_engine_rank_group(e, r), first = r - r % (e->shards->pack.tp / s->groups), rows = e->groups.own[group].tokens;
    const mm_forward *f = &e->rank[r].forward, *g = &e->rank[first].forward;
    const size_t bytes = rows * (size_t)f->h.width * sizeof(float);
    idle |= rows == 0;
    const bool same = memcmp(f->h.data, g->h.data, bytes) == 0 && memcmp(f->n.data, g->n.data, bytes) == 0 &&
                      memcmp(f->spare.data, g->spare.data, bytes) == 0;
    if (!same) fail_msg("step %u: rank %u has other bits than rank %u", s->steps, r, first);
  }
  s->idle += idle;
}

static void one_round(schedule *s) {
  poison(s);
  random_step(s);
  check_alike(s);
  if (s->queue && below(2)) collect(s);
  if (below(3) == 0) random_save(s);
  const uint32_t slot = below(SLOTS);
  if (below(30) == 0) mm_engine_drop(s->w.engine, slot), s->chosen[slot] = -1;
  if (below(12) == 0) fork_any(s);
  check_pages(s);
  s->steps++;
}

static void stop(schedule *s) {
  while (s->queue) collect(s);
  for (int i = 0; i < 3; i++) {
    for (uint32_t j = 0; s->saved[i].tokens && j < s->saved[i].pages; j++)
      mm_pages_release(mm_engine_pages(s->w.engine), s->saved[i].page[j]);
    free(s->saved[i].state);
  }
  free_again(&s->w);
  mm_sampler_close(s->sampler);
  close_group(&s->w);
}

static void run_groups(mm_family family, uint32_t tp, uint32_t attn_tp, uint32_t stage, caches cache, uint32_t quick) {
  static const char *const word[] = {"f32", "bf16", "index keys e4m3"};
  static schedule s;
  const char *steps = getenv("STEPS"), *from = getenv("MM_SEED");
  if (from) seed = strtoull(from, NULL, 10);
  start(&s, ref_dims(family, family == MM_FAMILY_M1 && cache != IN_BF16), tp, attn_tp, stage, cache);
  for (const uint32_t n = steps ? (uint32_t)strtoul(steps, NULL, 10) : SANITIZED ? 60 : quick; s.steps < n;) one_round(&s);
  while (s.queue) collect(&s);
  print_message(
      "%s, tp %u, groups %u, pp %d, %s: %u steps, %u short of pages, %u forks, %u restored, %u drafts, %u mixed, %u draws, %u by name, %u "
      "scores, %u with idle groups\n",
      family == MM_FAMILY_M1   ? "m1"
      : family == MM_FAMILY_M2 ? "m2"
                               : "m3",
      tp, s.groups, stage ? 2 : 1, word[cache], s.steps, s.refused, s.forks, s.resumed, s.drafts, s.mixed, s.draws, s.named, s.scores,
      s.idle);
  assert_true(s.groups == 1 || s.idle > 0);
  const bool few = s.groups > 1 && (s.groups > 2 || s.steps < 100); /* too few steps for some of each */
  assert_true(few ||
              (s.refused > 0 && s.forks > 0 && s.resumed > 0 && s.drafts > 0 && s.mixed > 0 && s.draws > 0 && s.named > 0 && s.scores > 0));
  stop(&s);
}

static void run(mm_family family, uint32_t tp, uint32_t stage, caches cache, uint32_t quick) {
  run_groups(family, tp, 0, stage, cache, quick);
}

TEST(test_one_rank) {
  run(MM_FAMILY_M1, 1, 0, IN_F32, 250);
  run(MM_FAMILY_M2, 1, 0, IN_BF16, 250);
  run(MM_FAMILY_M3, 1, 0, IN_F32, 250);
  run(MM_FAMILY_M3, 1, 0, INDEX_FP8, 150);
}
TEST(test_two_ranks) {
  run(MM_FAMILY_M1, 2, 0, IN_BF16, 150);
  run(MM_FAMILY_M2, 2, 0, IN_F32, 150);
  run(MM_FAMILY_M3, 2, 0, IN_BF16, 100);
  run(MM_FAMILY_M3, 2, 0, INDEX_FP8, 60);
}
TEST(test_eight_ranks) {
  run(MM_FAMILY_M1, 8, 0, IN_F32, 60);
  run(MM_FAMILY_M2, 8, 0, IN_BF16, 60);
}
TEST(test_stages) {
  run(MM_FAMILY_M1, 2, 2, IN_F32, 100);
  run(MM_FAMILY_M2, 1, 1, IN_F32, 150);
  run(MM_FAMILY_M3, 1, 2, IN_F32, 100);
}

/* One number that a slot holds is another: the next step of the schedule's kind would say so. */
static void planted(mm_family family, caches cache) {
  static schedule s;
  mm_err err = {0};
  start(&s, ref_dims(family, true), 1, 0, 0, cache);
  feed_ok(&s.w, 3, 1, 0, 130);
  mm_backend *b = backend[0];
  const uint32_t page = mm_pages_table(mm_engine_pages(s.w.engine))[(size_t)3 * mm_pages_per_slot(mm_engine_pages(s.w.engine)) + 1];
  char *const key = family == MM_FAMILY_M3 ? mm_cpu_index_key(b, &b->cache[1], page, 5) : NULL;
  float *value = family == MM_FAMILY_M1 ? b->state + 3 * b->state_floats
                 : key                  ? (float *)(void *)key
                                        : (float *)(void *)(b->cache[0].v + mm_cpu_cell(b, page, 1, 5));
  if (cache != INDEX_FP8) {
    *value += family == MM_FAMILY_M3 ? 100 : 1; /* so that its block is another */
  } else {
    memcpy(key, &(float){1}, sizeof(float)); /* and here: a key of 448 and zeros */
    memset(key + sizeof(float), 0, b->mapped.index_key - sizeof(float));
    key[sizeof(float)] = 0x7e;
  }
  assert_true(feed(&s.w, 3, 1, 130, 1, s.w.got, &err));
  assert_memory_not_equal(s.w.got, s.w.want[1] + (size_t)130 * s.w.vocab, s.w.vocab * sizeof(float));
  stop(&s);
}
TEST(test_planted) {
  planted(MM_FAMILY_M1, IN_F32);
  planted(MM_FAMILY_M2, IN_F32);
  planted(MM_FAMILY_M3, IN_F32);
  planted(MM_FAMILY_M3, INDEX_FP8);
}

TEST(test_groups) {
  run_groups(MM_FAMILY_M1, 2, 1, 0, IN_F32, 100);
  run_groups(MM_FAMILY_M2, 4, 2, 0, IN_F32, 100);
  run_groups(MM_FAMILY_M2, 8, 2, 0, IN_BF16, 50);
  run_groups(MM_FAMILY_M3, 2, 1, 0, IN_F32, 100);
  run_groups(MM_FAMILY_M1, 4, 2, 2, IN_BF16, 60);
}

int main(void) { return run_unit_tests(NULL, NULL); }
