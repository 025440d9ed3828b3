/* Loading, in the order in which mistakes are cheapest to find. */
#include "runtime/serve/loading.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/text/ends.h"

_Static_assert(MM_DEFAULT_DRAFTS == MM_DRAFTS, "by default as many as there may be");

static bool find_ends(mm_loaded *l, mm_err *err) {
  const uint32_t vocab = l->shards.pack.model.vocab;
  bool *is_end = mm_calloc(vocab, sizeof *is_end, err);
  bool ok = is_end && mm_ends_find(&l->shards.pack, l->tokenizer, is_end, err);
  ok = ok && (l->end = mm_calloc(vocab, sizeof *l->end, err)) && (l->never = mm_calloc(vocab, sizeof *l->never, err));
  for (uint32_t i = 0; ok && i < vocab; i++)
    if (is_end[i]) l->end[l->end_count++] = (int32_t)i;
  if (ok) mm_ends_never(l->tokenizer, vocab, l->never);
  free(is_end);
  return ok;
}

/* --dp; a draft that was asked for needs one group of attention. */
static bool select_groups(mm_loaded *l, const mm_loading_config *c, mm_err *err) {
  const bool draft = c->fixed_drafts && c->scheduler.drafts && mm_pack_find_file(&l->shards.pack, MM_DFLASH_FILE);
  const mm_groups_request r = {c->dp, c->device, c->slots, draft ? "a draft" : NULL};
  return mm_groups_select(&l->shards, &r, l->groups_line, err);
}

/* A sequence lies in one group of attention, each of which has an equal part of the cache. */
static bool check_kv_tokens(const mm_loaded *l, const mm_loading_config *c, mm_err *err) {
  const uint64_t groups = mm_pack_groups(&l->shards.pack), each = mm_ceil_div(mm_ceil_div(c->kv_tokens, MM_PAGE), groups) * MM_PAGE;
  if (!c->positions || !c->kv_tokens || each >= c->positions) return true;
  char part[80] = "";
  if (groups > 1) snprintf(part, sizeof part, " (%llu for each of %llu groups)", (unsigned long long)each, (unsigned long long)groups);
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                 "--kv-cache-tokens: found %llu%s, fewer than one sequence of --max-model-len %llu", (unsigned long long)c->kv_tokens, part,
                 (unsigned long long)c->positions);
}

static bool open_texts(mm_loaded *l, const mm_loading_config *c, mm_err *err) {
  l->stage = "headers";
  if (!mm_shards_open_as(&l->shards, c->dir, &c->dummy, err) || !select_groups(l, c, err)) return false;
  const uint32_t most = (uint32_t)l->shards.pack.model.max_positions;
  if (c->positions > most)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--max-model-len: found %llu, the model has %u positions",
                   (unsigned long long)c->positions, most);
  l->positions = c->positions ? (uint32_t)c->positions : most;
  if (!check_kv_tokens(l, c, err)) return false;
  l->stage = "tokenizer";
  if (!(l->tokenizer = mm_tokenizer_of(&l->shards.pack, err)) || !find_ends(l, err)) return false;
  l->format = mm_chat_format_of(&l->shards.pack, c->chat_format, &l->no_format);
  if (!l->format && (c->chat_format || l->no_format.status != MM_UNSUPPORTED)) return *err = l->no_format, false;
  l->defaults = (mm_sampling){.temperature = 1, .top_p = 1};
  return c->own_defaults || mm_ends_defaults(&l->shards.pack, &l->defaults, err);
}

/* Weights and texts of one directory, also while minimax-convert --force replaces it. */
bool mm_loading_check(mm_loaded *l, const mm_loading_config *c, mm_err *err) {
  mm_dir d = mm_dir_open(c->dir);
  return mm_dir_close(&d, c->dir, open_texts(l, c, err), err);
}

/* The scheduler's config, with what another server has to have in common with this one. */
static mm_scheduler_config scheduler_of(const mm_loaded *l, const mm_loading_config *c, const mm_run_options *o) {
  mm_scheduler_config s = c->scheduler;
  mm_transfer_config *t = &s.transfer;
  t->checkpoint = mm_shards_digest(&l->shards);
  snprintf(t->device, sizeof t->device, "%s", c->device);
  snprintf(t->cache, sizeof t->cache, "%s", o->kv_fp8 ? "fp8" : o->kv_bf16 ? "bf16" : "auto");
  snprintf(t->index, sizeof t->index, "%s", o->index_fp8 ? "fp8" : "auto");
  snprintf(t->inputs, sizeof t->inputs, "%s", o->input_bf16 ? "bf16" : "auto");
  t->act_quant = o->act_quant;
  return s;
}

static void close_draft(mm_loaded *l) {
  if (l->draft) mm_dflash_close(l->draft);
  free(l->draft);
  l->draft = NULL;
}

static bool map_draft(mm_loaded *l, const mm_loading_config *c, mm_err *err) {
  const mm_pack *p = &l->shards.pack;
  return (l->draft = mm_calloc(1, sizeof *l->draft, err)) && mm_dflash_open(l->draft, p->dir, &p->model, err) &&
         (!c->verify || mm_dflash_verify(l->draft, mm_pack_find_file(p, MM_DFLASH_FILE), err));
}

/* Both servers of a split need the same cells, so that neither takes a draft by itself. */
static bool takes_draft(const mm_loaded *l, const mm_loading_config *c, const mm_engine_config *e, mm_err *err) {
  mm_engine_config with = *e;
  with.draft = l->draft;
  if (c->scheduler.transfer.listen || c->scheduler.transfer.from)
    return mm_fail(err, MM_UNSUPPORTED, "E_DRAFT", mm_at(l->draft->st.path, NULL),
                   "found one server of two; expected --drafts N for both, where it is to be used");
  return mm_engine_takes_draft(&l->shards.pack, &with, err);
}

/* The checkpoint's draft, if it has one and proposals are wanted. One that this run cannot have is refused where proposals were asked for,
 * and left out where they were not. */
static bool open_draft(mm_loaded *l, const mm_loading_config *c, const mm_engine_config *e, mm_err *err) {
  if (!mm_pack_find_file(&l->shards.pack, MM_DFLASH_FILE) || !c->scheduler.drafts) return true;
  if (c->fixed_drafts) return l->has_draft = map_draft(l, c, err);
  l->has_draft = map_draft(l, c, &l->no_draft) && takes_draft(l, c, e, &l->no_draft);
  if (!l->has_draft) close_draft(l);
  return true;
}

/* Proposals of the scheduler: none where states cannot go back, or where by default the engine has no room for them. */
static uint32_t proposals_of(mm_loaded *l, const mm_loading_config *c, const mm_engine_config *e) {
  l->proposals_left_out = mm_engine_outs(l->engine) != e->memory.outs;
  if (l->proposals_left_out) l->has_draft = false;
  return l->proposals_left_out || mm_engine_state_bytes(l->engine) ? 0 : c->scheduler.drafts;
}

bool mm_loading_finish(mm_loaded *l, const mm_loading_config *c, mm_err *err) {
  const mm_engine_config e = {
      .ops = mm_ops_find(c->device, err),
      .limits = {.max_tokens = c->scheduler.step_tokens,
                 .slots = (uint32_t)c->slots,
                 .max_positions = l->positions,
                 .pages = (uint32_t)mm_ceil_div(c->kv_tokens, MM_PAGE)},
      .never = l->never,
      .attach = c->attach,
      .verify = c->verify,
      .log = c->reads,
      .options = c->options,
      .memory = {.fits = true,
                 .share = c->memory_share,
                 .outs = mm_outs_of(&l->shards.pack.model, c->slots, c->scheduler.drafts),
                 .least = c->fixed_drafts ? 0 : (uint32_t)c->slots,
                 .length = "--max-model-len"},
  };
  mm_engine_config with = e;
  if (!e.ops || !mm_process_group_find(true, &with.process_group, err) || !open_draft(l, c, &with, err)) return false;
  with.draft = l->has_draft ? l->draft : NULL;
  with.options.act_quant = c->act_quant ? strcmp(c->act_quant, "on") == 0 : e.ops->act_quant;
  uint32_t *device;
  const uint32_t here = mm_process_group_ranks(with.process_group, mm_pack_ranks(&l->shards.pack));
  with.options.batch_invariant = c->scheduler.batch_invariant;
  with.options.threads = mm_engine_threads(c->threads, here);
  if (!mm_devices_read(c->device, c->devices, here, &device, err)) return false;
  with.device = device;
  l->stage = "weights";
  l->engine = mm_engine_open(&l->shards, &with, err);
  free(device);
  if (!l->engine || (c->whole && !mm_engine_finish_load(l->engine, err))) return false;
  l->stage = "scheduler";
  mm_scheduler_config scheduler = scheduler_of(l, c, &with.options);
  scheduler.drafts = l->proposals = proposals_of(l, c, &with);
  if (!(l->scheduler = mm_scheduler_open(l->engine, &scheduler, err))) return false;
  l->stage = "done";
  return true;
}

void mm_loading_close(mm_loaded *l, bool drain) {
  mm_scheduler_close(l->scheduler, drain);
  mm_engine_close(l->engine);
  close_draft(l);
  mm_tokenizer_close(l->tokenizer);
  mm_shards_close(&l->shards);
  free(l->never);
  free(l->end);
  *l = (mm_loaded){0};
}
