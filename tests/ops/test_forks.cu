/* Slots that share pages and slots restored from saved states on the GPU, bit for bit: forks against sequences fed separately, at page
 * borders; restored slots against unbroken ones; random schedules against the same ones in other pages, where everything that nobody holds
 * is poison. Also samples by every rule against the CPU's, after the pass and within it, and scores against doubles. */
#include <string.h>

#include <algorithm>
#include <memory>

#include "runtime/cuda/backend.h"
#include "runtime/engine/engine.h"
#include "tests/ops/forks_fixture.h"
#include "tests/ops/gpu.h"
#include "tests/ops/whole.h"

namespace {

/* ---- forks and restored slots ---- */

/* Sequences that share a prompt of n tokens by a fork, against the same fed separately, for as long as it takes to cross a border. */
bool forked_as_separate(fixture &a, fixture &b, uint32_t n) {
  const std::vector<int32_t> prompt = random_ids(n, a.vocab);
  mm_err err = {};
  for (uint32_t from = 0; from < n; from += ROWS) {
    const uint32_t count = std::min(ROWS, n - from);
    feed_slot(a, 0, prompt, from, count);
    for (uint32_t slot = 0; slot < 3; slot++) feed_slot(b, slot, prompt, from, count);
  }
  const uint32_t to[] = {1, 2};
  must(mm_engine_fork(a.engine, 0, to, 2, &err), err);
  bool same = memcmp(a.pages_of(0), a.pages_of(1), (n + MM_PAGE - 1) / MM_PAGE * sizeof(uint32_t)) == 0; /* shared until they write */
  for (uint32_t t = n; same && t < n + 70; t++) {
    step s;
    for (uint32_t slot = 0; slot < 3; slot++) s.add(slot, t, random_ids(1, a.vocab).data(), 1);
    s.last_rows();
    same = same_bits(logits_of(a, s), logits_of(b, s));
  }
  return same && a.pages_of(0)[n / MM_PAGE] != a.pages_of(1)[n / MM_PAGE];
}

/* The token sampled after a slot's last one is known to its forks. */
bool chosen_forked(fixture &a) {
  const std::vector<int32_t> prompt = random_ids(40, a.vocab);
  const mm_sampling greedy = {0, 1, 0, 0};
  step s, with_id, with_chosen;
  s.add(0, 0, prompt.data(), 40), s.last_rows();
  const mm_batch b = s.batch(&greedy);
  const uint32_t to[] = {1, 2};
  int32_t id = -1;
  const int32_t chosen = MM_ID_SAMPLED;
  mm_err err = {};
  must(mm_engine_queue(a.engine, &b, &err) && mm_engine_fork(a.engine, 0, to, 2, &err), err); /* queued, not collected */
  must(mm_engine_collect(a.engine, &id, &err), err);
  with_chosen.add(1, 40, &chosen, 1), with_chosen.last_rows(), with_id.add(2, 40, &id, 1), with_id.last_rows();
  return same_bits(logits_of(a, with_chosen), logits_of(a, with_id));
}

/* Saved after n tokens, dropped, its states overwritten by others; then restored in another slot: it goes on as one that was never broken.
 * Without lightning also from the middle of what was kept. */
bool restored_as_unbroken(fixture &a, fixture &b, uint32_t n) {
  const bool lightning = mm_engine_state_bytes(a.engine) > 0;
  const std::vector<int32_t> ids = random_ids(n + 10, a.vocab);
  std::vector<char> state(mm_engine_state_bytes(a.engine));
  mm_err err = {};
  const uint32_t at = lightning ? n : n - n / 3;
  for (uint32_t from = 0; from < at; from += ROWS) feed_slot(b, 4, ids, from, std::min(ROWS, at - from)); /* chunks as below */
  for (uint32_t from = 0; from < at; from += ROWS) feed_slot(a, 0, ids, from, std::min(ROWS, at - from));
  if (at < n) feed_slot(a, 0, ids, at, n - at);
  must(mm_engine_save(a.engine, 0, state.data(), &err), err);
  mm_pages *const pages = mm_engine_pages(a.engine);
  const std::vector<uint32_t> kept(a.pages_of(0), a.pages_of(0) + mm_pages_held(pages, 0));
  for (uint32_t page : kept) mm_pages_hold(pages, page);
  mm_engine_drop(a.engine, 0);
  for (uint32_t slot = 0; slot < SLOTS; slot++) feed_slot(a, slot, random_ids(90, a.vocab), 0, 90);
  must(mm_engine_resume(a.engine, 4, kept.data(), ids.data(), at, lightning ? state.data() : nullptr, &err), err);
  std::fill(state.begin(), state.end(), (char)-1); /* the caller's own again */
  bool same = true;
  for (uint32_t t = at; t < n + 10; t++) same &= same_bits(feed_slot(a, 4, ids, t, 1), feed_slot(b, 4, ids, t, 1));
  for (uint32_t page : kept) mm_pages_release(pages, page);
  return same && mm_pages_check(pages, nullptr, &err);
}

void check_shared(const mm_shards *shards, const std::string &name) {
  fixture a(shards, 0), b(shards, 0);
  bool forked = true, restored = true;
  for (uint32_t n : {1u, 63u, 64u, 65u, 127u, 128u, 129u, 200u}) {
    forked &= forked_as_separate(a, b, n), restored &= restored_as_unbroken(a, b, n);
    if (!forked || !restored) printf("     prompt of %u tokens\n", n);
  }
  report_true(name + ": forks of 1 to 200 tokens = sequences apart, bit for bit", forked);
  report_true(name + ": restored after 1 to 200 tokens = unbroken, bit for bit", restored);
  report_true(name + ": forks know what was chosen last", chosen_forked(a));
}

/* ---- what rows may ask for ---- */

struct sampled {
  mm_sampling set = {};
  std::vector<mm_bias> bias;
  std::vector<uint32_t> mask;
  mm_logprob logprobs[1 + MM_LOGPROBS];
};

/* Every parameter in use, in every combination; pointers lead into *a, which stays where it is. */
void fill(sampled *a, uint32_t vocab) {
  mm_sampling *s = &a->set;
  *s = {g_rng.below(6) ? 0.2 + 2 * g_rng.uniform() : 0, g_rng.below(2) ? 0.2 + 0.8 * g_rng.uniform() : 1,
        g_rng.below(2) ? 1 + g_rng.below(60) : 0, g_rng.next()};
  if (g_rng.below(2)) s->min_p = pow(10, -5 * g_rng.uniform());
  if (g_rng.below(2)) s->repetition = 0.7 + g_rng.uniform();
  if (g_rng.below(3) == 0) s->presence = 6 * g_rng.uniform() - 2;
  if (g_rng.below(3) == 0) s->frequency = 6 * g_rng.uniform() - 2;
  s->prompt = g_rng.below(100);
  a->bias.clear(), a->mask.clear();
  const bool near = g_rng.below(2); /* ids that sequences here hold: penalties then decide */
  const uint32_t first = g_rng.below(near ? 260 : vocab), step = near ? 1 : 37, biases = g_rng.below(2) ? g_rng.below(40) : 0;
  for (uint32_t i = 0; i < biases; i++)
    a->bias.push_back({(int32_t)((first + step * i) % vocab), g_rng.below(8) ? (float)(8 * g_rng.uniform() - 3) : -INFINITY});
  if (g_rng.below(3) == 0) {
    a->mask.resize((vocab + 31) / 32);
    const bool few = g_rng.below(2);
    for (uint32_t &m : a->mask) m = few ? 1u << g_rng.below(32) & (uint32_t) - (int32_t)(g_rng.below(8) == 0) : (uint32_t)g_rng.next();
  }
  s->bias_count = biases, s->bias = a->bias.data(), s->allowed = a->mask.empty() ? nullptr : a->mask.data();
  s->top_logprobs = g_rng.below(1 + MM_LOGPROBS), s->logprobs = g_rng.below(2) ? a->logprobs : nullptr;
}

/* The CPU's choice from the same logits, `held` being what the sequence holds; whether it is the one. Logprobs: sums in another order. */
bool as_cpu(mm_sampler *capacity, const sampled &a, const std::vector<int32_t> &held, uint32_t count, const float *logits, uint32_t vocab,
            int32_t chosen) {
  std::vector<float> own(logits, logits + vocab);
  mm_sample_adjust(capacity, &a.set, held.data(), count, own.data());
  if (mm_sample(capacity, &a.set, count, own.data()) != chosen) return false;
  if (!a.set.logprobs) return true;
  mm_logprob want[1 + MM_LOGPROBS];
  mm_sampling set = a.set;
  set.logprobs = want;
  mm_sample_logprobs(capacity, &set, chosen, logits);
  bool same = true;
  for (uint32_t i = 0; i <= set.top_logprobs; i++) {
    same &= want[i].id == a.logprobs[i].id;
    same &=
        want[i].logprob == a.logprobs[i].logprob || fabsf(want[i].logprob - a.logprobs[i].logprob) <= 1e-6f * (1 + fabsf(want[i].logprob));
  }
  return same;
}

/* 10,000 draws of rows in the middle of sequences, whose first tokens came by a fork, against the CPU's from the logits of the same step.
 */
void check_draws(const mm_shards *shards, const std::string &name) {
  constexpr uint32_t N = 64, kDraws = 10000;
  fixture w(shards, 0);
  mm_err err = {};
  mm_sampler *const capacity = mm_sampler_open(w.vocab, &err);
  must(capacity != nullptr, err);
  std::vector<sampled> a(N);
  uint32_t wrong = 0, drawn = 0, found = 0;
  const uint32_t to[] = {1, 2};
  for (; drawn < kDraws; drawn += N) {
    const uint32_t p = 1 + g_rng.below(80);
    std::vector<int32_t> ids = random_ids(p + N, 300), got(N);
    feed_slot(w, 0, ids, 0, p);
    must(mm_engine_fork(w.engine, 0, to, 2, &err), err);
    std::vector<mm_sampling> set;
    for (sampled &x : a) fill(&x, w.vocab), set.push_back(x.set);
    step plain, draws;
    plain.add(1, p, &ids[p], N), plain.all_rows(), draws.add(2, p, &ids[p], N), draws.all_rows();
    const auto logits = logits_of(w, plain);
    const mm_batch b = draws.batch(set.data());
    must(mm_engine_queue(w.engine, &b, &err) && mm_engine_collect(w.engine, got.data(), &err), err);
    for (uint32_t i = 0; i < N; i++) wrong += !as_cpu(capacity, a[i], ids, p + i + 1, &logits[(size_t)i * w.vocab], w.vocab, got[i]);
    std::rotate(ids.begin(), ids.begin() + 1,
                ids.begin() + 20); /* planted: other places of the first ids, and so other counts in replies */
    for (int32_t &id : ids) id = (id + 1) % 300;
    for (uint32_t i = 0; i < N; i++) found += !as_cpu(capacity, a[i], ids, p + i + 1, &logits[(size_t)i * w.vocab], w.vocab, got[i]);
  }
  mm_sampler_close(capacity);
  report_true(
      name + ": " + std::to_string(wrong) + " of " + std::to_string(drawn) + " draws with every parameter in use differ from the CPU's",
      wrong == 0);
  report_true(name + ": other ids planted, found " + std::to_string(found) + " times", found > 0);
}

/* Single rows, recorded: a mask that hangs on the token before, which is collected after the pass was queued; the same tokens where the
 * mask is given with the step. */
void check_deferred(const mm_shards *shards, const std::string &name) {
  constexpr uint32_t N = 40;
  fixture a(shards, 0), b(shards, 0);
  mm_err err = {};
  std::vector<int32_t> got[2];
  std::vector<std::vector<uint32_t>> mask;
  bool parity = true;
  for (uint32_t n = 0; n < N; n++) {
    const int32_t id = n ? MM_ID_SAMPLED : 5;
    step s;
    s.add(0, n, &id, 1), s.last_rows();
    mm_sampling set = {0.9, 0.99, 0, 77};
    set.repetition = 1.2, set.frequency = 0.5;
    mm_batch batch = s.batch();
    must(mm_engine_forward(a.engine, &batch, &err), err);
    if (n) must(mm_engine_collect(a.engine, &got[0].back(), &err), err);
    mask.emplace_back((a.vocab + 31) / 32, n && got[0].back() % 2 ? 0x55555555u : 0xaaaaaaaau);
    set.allowed = mask.back().data();
    got[0].push_back(-2), got[1].push_back(-2);
    must(mm_engine_sample(a.engine, &set, &err), err);
    batch = s.batch(&set);
    must(mm_engine_queue(b.engine, &batch, &err) && mm_engine_collect(b.engine, &got[1].back(), &err), err);
  }
  must(mm_engine_collect(a.engine, &got[0].back(), &err), err);
  for (uint32_t n = 1; n < N; n++) parity &= (got[0][n - 1] + got[0][n]) % 2 == 1;
  report_true(name + ": choices after the pass = within it", got[0] == got[1]);
  report_true(name + ": masks that hang on the token before are kept to", parity);
}

void check_scores(const mm_shards *shards, const std::string &name) {
  constexpr uint32_t N = 90;
  fixture w(shards, 0);
  const std::vector<int32_t> ids = random_ids(N, w.vocab), target = random_ids(N, w.vocab);
  std::vector<double> score(N);
  mm_err err = {};
  step s;
  s.add(0, 0, ids.data(), N), s.all_rows();
  const auto logits = logits_of(w, s);
  const mm_batch b = s.batch();
  must(mm_engine_score(w.engine, &b, target.data(), score.data(), &err), err);
  double worst = 0;
  for (uint32_t i = 0; i < N; i++) {
    const float *x = &logits[(size_t)i * w.vocab];
    double sum = 0;
    for (uint32_t v = 0; v < w.vocab; v++) sum += exp((double)x[v]);
    worst = std::max(worst, fabs(score[i] - (log(sum) - x[target[i]])));
  }
  report(name + ": scores beside doubles", worst, 1e-9);
}

/* ---- random schedules ---- */

/* The saved pages of a slot, in one world. */
struct kept_pages {
  std::vector<uint32_t> page;
  std::vector<char> state;
};
struct entry {
  uint32_t tokens = 0;
  std::vector<int32_t> id;
  kept_pages in[2];
};

/* Two worlds under the same commands: in the second, pages come in another order, and what nobody holds is poison. */
struct schedule {
  fixture a, b;
  fixture *w[2] = {&a, &b};
  bool lightning;
  std::vector<std::vector<int32_t>> id = std::vector<std::vector<int32_t>>(SLOTS);
  std::vector<entry> cache;
  const char *reason = "";
  uint32_t forks = 0, resumed = 0, refused = 0, mixed = 0, moved = 0, moved_at = 0;
  static constexpr uint32_t PLACES = 2 * POSITIONS / MM_PAGE;

  schedule(const mm_shards *shards, uint32_t pages, bool kv_fp8) : a(shards, pages, kv_fp8), b(shards, pages, kv_fp8) {
    lightning = mm_engine_state_bytes(a.engine) > 0;
    for (uint32_t slot = 0; slot < 3; slot++) feed_slot(b, slot, random_ids(90, b.vocab), 0, 90);
    for (uint32_t slot : {1u, 0u, 2u}) b.drop(slot);
    mm_err err = {};
    for (fixture *x : w) must(mm_engine_pool(x->engine, PLACES, &err), err);
  }
  void drop(uint32_t slot) {
    for (fixture *x : w) x->drop(slot);
    id[slot].clear();
  }

  void fork() {
    const uint32_t from = g_rng.below(SLOTS), to = (from + 1 + g_rng.below(SLOTS - 1)) % SLOTS;
    if (!a.held[from]) return;
    mm_err err = {};
    for (fixture *x : w) must(mm_engine_fork(x->engine, from, &to, 1, &err), err), x->held[to] = x->held[from];
    id[to] = id[from], forks++;
  }

  void keep() {
    const uint32_t slot = g_rng.below(SLOTS);
    if (!a.held[slot]) return;
    if (cache.size() == 2) forget();
    entry e;
    mm_err err = {};
    e.tokens = a.held[slot], e.id = id[slot];
    for (int i = 0; i < 2; i++) {
      e.in[i].page.assign(w[i]->pages_of(slot), w[i]->pages_of(slot) + (e.tokens + MM_PAGE - 1) / MM_PAGE);
      for (uint32_t page : e.in[i].page) mm_pages_hold(mm_engine_pages(w[i]->engine), page);
      e.in[i].state.resize(mm_engine_state_bytes(w[i]->engine));
      must(mm_engine_save(w[i]->engine, slot, e.in[i].state.data(), &err), err);
    }
    cache.push_back(e);
  }
  void forget() {
    if (cache.empty()) return;
    for (int i = 0; i < 2; i++) {
      for (uint32_t page : cache[0].in[i].page) mm_pages_release(mm_engine_pages(w[i]->engine), page);
    }
    cache.erase(cache.begin());
  }
  void resume() {
    if (cache.empty()) return;
    const entry &e = cache[g_rng.below((uint32_t)cache.size())];
    const uint32_t slot = g_rng.below(SLOTS), n = lightning ? e.tokens : 1 + g_rng.below(e.tokens);
    mm_err err = {};
    for (int i = 0; i < 2; i++) {
      const void *const state = lightning ? e.in[i].state.data() : nullptr;
      must(mm_engine_resume(w[i]->engine, slot, e.in[i].page.data(), e.id.data(), n, state, &err), err), w[i]->held[slot] = n;
    }
    id[slot].assign(e.id.begin(), e.id.begin() + n), resumed++;
  }

  /* An entry's pages go to host memory and come back in other pages: in the second world neighbours rise, fall, or have no order, and the
   * moves are given in two calls. Both worlds move, since slots that shared the pages do not any more, which takes pages. */
  void move() {
    if (cache.empty()) return;
    entry &e = cache[g_rng.below((uint32_t)cache.size())];
    bool done = true;
    for (int i = 0; i < 2; i++) done &= move_in(*w[i], &e.in[i].page, i ? g_rng.below(3) : 0, i > 0);
    moved += done;
  }
  static bool move_in(fixture &x, std::vector<uint32_t> *page, uint32_t order, bool cuts) {
    const uint32_t n = (uint32_t)page->size();
    std::vector<uint32_t> fresh, place(PLACES);
    mm_pages *const p = mm_engine_pages(x.engine);
    for (uint32_t taken; fresh.size() < n && mm_pages_take(p, 0, &taken);) fresh.push_back(taken);
    const bool all = fresh.size() == n;
    for (uint32_t i = 0; i < PLACES; i++) place[i] = order == 1 ? PLACES - 1 - i : i;
    for (uint32_t i = 0; order == 2 && i < PLACES; i++) std::swap(place[i], place[i + g_rng.below(PLACES - i)]);
    std::vector<mm_page_move> move;
    for (uint32_t i = 0; i < n; i++) move.push_back({(*page)[i], place[i], false});
    for (uint32_t i = 0; i < n && all; i++) move.push_back({fresh[i], place[i], true});
    mm_err err = {};
    uint64_t number, oldest;
    const uint32_t cut = cuts ? g_rng.below((uint32_t)move.size()) : 0;
    must((!cut || mm_engine_move(x.engine, move.data(), cut, &number, &err)) &&
             mm_engine_move(x.engine, move.data() + cut, (uint32_t)move.size() - cut, &number, &err),
         err);
    do must(mm_engine_moved(x.engine, false, &oldest, &err), err);
    while (oldest <= number);
    for (uint32_t old : all ? *page : fresh) mm_pages_release(p, old);
    if (all) *page = fresh;
    return all;
  }

  step random_step() {
    step s;
    std::vector<uint32_t> slot(SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) slot[i] = i;
    for (uint32_t i = 0; i < SLOTS; i++) std::swap(slot[i], slot[i + g_rng.below(SLOTS - i)]);
    const bool verifies = g_rng.below(3) == 0; /* every row is an output: those of a few rows are verify rows */
    const uint32_t singles = g_rng.below(6), chunks = singles ? g_rng.below(3) : 1 + g_rng.below(2);
    for (uint32_t i = 0; i < singles + chunks && i < SLOTS; i++) {
      const uint32_t left = ROWS - (uint32_t)s.id.size(),
                     most = i >= singles ? std::min(left - 8, 80u)
                            : verifies   ? 8
                                         : 1,
                     count = 1 + g_rng.below(most);
      uint32_t pos = a.held[slot[i]];
      if (!lightning && pos && g_rng.below(8) == 0) pos = g_rng.below(pos);
      if (pos + count > POSITIONS || g_rng.below(30) == 0) pos = 0;
      s.add(slot[i], pos, random_ids(count, 300).data(), count);
      if (left - count < 16) break;
    }
    verifies ? s.all_rows() : s.last_rows();
    mixed += singles && chunks;
    return s;
  }

  /* The step in one world: logits, or tokens and logprobs. False where pages are short. */
  bool run(fixture &x, const step &s, std::vector<sampled> *a_of, std::vector<float> *given) const {
    mm_err err = {};
    std::vector<mm_sampling> set;
    for (const sampled &q : *a_of) set.push_back(q.set);
    const mm_batch batch = s.batch(set.empty() ? nullptr : set.data());
    std::vector<int32_t> token(s.out.size());
    given->assign(set.empty() ? s.out.size() * x.vocab : s.out.size(), 0);
    const bool done = set.empty() ? mm_engine_step(x.engine, &batch, given->data(), &err) : mm_engine_queue(x.engine, &batch, &err);
    if (!done && err.status == MM_LIMIT) return false;
    must(done && (set.empty() || mm_engine_collect(x.engine, token.data(), &err)), err);
    for (size_t i = 0; i < set.size(); i++) {
      (*given)[i] = (float)token[i];
      for (uint32_t k = 0; set[i].logprobs && k <= set[i].top_logprobs; k++)
        given->push_back((float)set[i].logprobs[k].id), given->push_back(set[i].logprobs[k].logprob);
    }
    return true;
  }

  /* True if both worlds gave the same. */
  bool one_step() {
    const step s = random_step();
    std::vector<sampled> wanted(g_rng.below(2) ? s.out.size() : 0);
    for (sampled &q : wanted) fill(&q, a.vocab);
    std::vector<float> given[2];
    poison();
    const bool done = run(a, s, &wanted, &given[0]);
    reason = "short of pages in one world alone";
    if (run(b, s, &wanted, &given[1]) != done) return false;
    reason = "other bits";
    if (!done) {
      refused++, forget();
      drop(g_rng.below(SLOTS));
      return true;
    }
    for (const mm_span &p : s.span) {
      auto &ids = id[(size_t)p.slot];
      ids.resize(p.pos), ids.insert(ids.end(), s.id.begin() + p.first, s.id.begin() + p.first + p.count);
      a.held[(size_t)p.slot] = b.held[(size_t)p.slot] = p.pos + p.count;
    }
    return same_bits(given[0], given[1]);
  }

  /* Tokens of each page of the second world that somebody holds. */
  std::vector<uint32_t> tokens_of_pages() const {
    std::vector<uint32_t> tokens(mm_pages_count(mm_engine_pages(b.engine)));
    const auto use = [&](const uint32_t *page, uint32_t n) {
      for (uint32_t at = 0; at < n; at += MM_PAGE) {
        uint32_t &t = tokens[page[at / MM_PAGE]];
        t = std::max(t, std::min(n - at, (uint32_t)MM_PAGE));
      }
    };
    for (uint32_t slot = 0; slot < SLOTS; slot++) use(b.pages_of(slot), b.held[slot]);
    for (const entry &e : cache) use(e.in[1].page.data(), e.tokens);
    return tokens;
  }

  char *index_key(const layer_cache &c, uint32_t page, uint32_t token) const {
    return reinterpret_cast<char *>(c.kv.index) + ((size_t)page * MM_PAGE + token) * b.backend->pages.work.index_bytes;
  }

  /* Pages that nobody holds in the second world become NaN, ids other ids. */
  void poison() {
    const mm_backend *x = b.backend;
    const auto tokens = tokens_of_pages();
    CUDA_OK(cudaDeviceSynchronize());
    const auto fill =
        [&](void *p, size_t bytes,
            uint32_t page) { /* bytes of a token */
                             char *const to =
                                 static_cast<char *>(p) + mm_cu_cell(page, x->heads.kv_heads, 0) * bytes + tokens[page] * bytes;
                             if (p && tokens[page] < MM_PAGE)
                               CUDA_OK(cudaMemset2DAsync(to, MM_PAGE * bytes, 0xff, (MM_PAGE - tokens[page]) * bytes, x->heads.kv_heads));
        };
    for (const layer_cache &c : x->cache) {
      for (uint32_t page = 0; page < tokens.size(); page++) {
        fill(c.kv.k, x->pages.work.token_bytes, page), fill(c.kv.v, x->pages.work.token_bytes, page);
        fill(c.kv.k_scale, sizeof(float), page), fill(c.kv.v_scale, sizeof(float), page);
        if (c.kv.index && tokens[page] < MM_PAGE)
          CUDA_OK(cudaMemsetAsync(index_key(c, page, tokens[page]), 0xff, (MM_PAGE - tokens[page]) * x->pages.work.index_bytes));
      }
    }
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
      CUDA_OK(cudaMemsetAsync(x->sampler.ids + slot * POSITIONS + b.held[slot], 0, (POSITIONS - b.held[slot]) * sizeof *x->sampler.ids));
      if (x->states.data && !b.held[slot])
        CUDA_OK(cudaMemsetAsync(x->states.data + slot * x->states.per_slot, 0xff, x->states.per_slot * sizeof(float)));
    }
    CUDA_OK(cudaDeviceSynchronize());
  }

  /* A token that some slot holds is overwritten in the second world: its next step shows it. */
  bool finds_planted() {
    uint32_t slot = 0;
    while (slot < SLOTS && (!a.held[slot] || a.held[slot] == POSITIONS)) slot++;
    if (slot == SLOTS) return false;
    while (!cache.empty()) forget();
    for (uint32_t other = 0; other < SLOTS; other++) {
      if (other != slot) drop(other);
    }
    const mm_backend *x = b.backend;
    CUDA_OK(cudaDeviceSynchronize());
    for (const layer_cache &c : x->cache) {
      if (c.kv.v)
        CUDA_OK(cudaMemset(static_cast<char *>(c.kv.v) + mm_cu_cell(b.pages_of(slot)[0], x->heads.kv_heads, 0) * x->pages.work.token_bytes,
                           0x3c, x->pages.work.token_bytes));
    }
    const auto ids = random_ids(POSITIONS, a.vocab);
    return !same_bits(feed_slot(a, slot, ids, a.held[slot], 1), feed_slot(b, slot, ids, b.held[slot], 1));
  }

  bool selects() const {
    return std::any_of(b.backend->cache.begin(), b.backend->cache.end(), [](const layer_cache &c) { return c.kv.index != nullptr; });
  }
  /* Index keys of the first 16 tokens of a long context, overwritten in the second world: other blocks are read then. */
  bool finds_planted_index() {
    constexpr uint32_t N = 2 * ROWS;
    while (!cache.empty()) forget();
    for (uint32_t slot = 0; slot < SLOTS; slot++) drop(slot);
    const auto ids = random_ids(N + 1, a.vocab);
    for (fixture *x : w) feed_slot(*x, 0, ids, 0, ROWS), feed_slot(*x, 0, ids, ROWS, ROWS);
    CUDA_OK(cudaDeviceSynchronize());
    for (const layer_cache &c : b.backend->cache)
      if (c.kv.index) CUDA_OK(cudaMemset(index_key(c, b.pages_of(0)[0], 0), 0x45, 16 * b.backend->pages.work.index_bytes));
    return !same_bits(feed_slot(a, 0, ids, N, 1), feed_slot(b, 0, ids, N, 1));
  }

  bool balanced() {
    while (!cache.empty()) forget();
    mm_err err = {};
    return mm_pages_check(mm_engine_pages(a.engine), nullptr, &err) && mm_pages_check(mm_engine_pages(b.engine), nullptr, &err);
  }
};

void check_schedules(const mm_shards *shards, const std::string &name, bool kv_fp8) {
  const char *const wanted = getenv("MM_STEPS");
  const uint32_t steps = wanted ? (uint32_t)atoi(wanted) : 400;
  schedule s(shards, 26, kv_fp8);
  uint32_t wrong = 0, first = 0;
  for (uint32_t i = 0; i < steps && !wrong; i++) {
    const uint32_t what = g_rng.below(20);
    if (what < 2) s.drop(g_rng.below(SLOTS));
    if (what >= 2 && what < 6) s.fork();
    if (what >= 6 && what < 8) s.keep();
    if (what >= 8 && what < 11) s.resume();
    if (what == 11) s.forget();
    if (what >= 12 && what < 15) s.move(), s.moved_at = i;
    if (!s.one_step()) wrong++, first = i;
  }
  char text[300];
  snprintf(text, sizeof text,
           "%s%s: %u steps, %u with prefill chunks next to single tokens, %u forks, %u resumed, %u moved to the host and back, %u short of "
           "pages: %s those in other pages, the "
           "rest poison",
           name.c_str(), kv_fp8 ? ", fp8 cache" : "", steps, s.mixed, s.forks, s.resumed, s.moved, s.refused,
           wrong ? "not" : "the bits of");
  report_true(text + (wrong ? ", first at step " + std::to_string(first) + ": " + s.reason + ", " + std::to_string(first - s.moved_at) +
                                  " steps after the last move"
                            : std::string()),
              wrong == 0 && s.forks && s.resumed && s.moved && s.mixed);
  report_true(name + ": one value of one token planted is found", s.finds_planted());
  if (s.selects()) report_true(name + ": index keys planted are found", s.finds_planted_index());
  report_true(name + ": every page is free or held at the end", s.balanced());
}

}  // namespace

void test_forks() {
  const auto folders = model_folders();
  for (size_t i = 0; i < folders.size(); i += std::max<size_t>(1, folders.size() - 1)) { /* the first and the last */
    const std::string name = folders[i].substr(folders[i].rfind('/') + 1);
    mm_shards shards = {};
    mm_err err = {};
    must(mm_shards_open(&shards, folders[i].c_str(), &err), err);
    check_shared(&shards, name);
    check_schedules(&shards, name, false), check_schedules(&shards, name, true);
    check_draws(&shards, name), check_deferred(&shards, name), check_scores(&shards, name);
    mm_shards_close(&shards);
  }
}
