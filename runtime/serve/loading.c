/* Loading, in the order in which mistakes are cheapest to find. */
#include "runtime/serve/loading.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/text/ends.h"

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

bool mm_loading_check(mm_loaded *l, const mm_loading_config *c, mm_err *err) {
  l->stage = "headers";
  if (!mm_shards_open_as(&l->shards, c->dir, &c->dummy, err)) return false;
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

/* The scheduler's config, with what another server has to have in common with this one. */
static mm_scheduler_config scheduler_of(const mm_loaded *l, const mm_loading_config *c, const mm_run_options *o) {
  mm_scheduler_config s = c->scheduler;
  mm_transfer_config *t = &s.transfer;
  t->checkpoint = l->shards.pack.text_digest;
  snprintf(t->device, sizeof t->device, "%s", c->device);
  snprintf(t->cache, sizeof t->cache, "%s", o->kv_fp8 ? "fp8" : o->kv_bf16 ? "bf16" : "auto");
  snprintf(t->index, sizeof t->index, "%s", o->index_fp8 ? "fp8" : "auto");
  snprintf(t->inputs, sizeof t->inputs, "%s", o->input_bf16 ? "bf16" : "auto");
  t->act_quant = o->act_quant;
  return s;
}

/* Rows of a step whose logits are wanted, at most. Nothing is proposed for models with lightning layers. */
static uint32_t outs_of(const mm_model *m, const mm_loading_config *c) {
  bool lightning = false;
  for (uint32_t l = 0; l < m->layers; l++) lightning |= m->attn[l] == MM_ATTN_LIGHTNING;
  return (uint32_t)(c->slots * (1 + (lightning ? 0 : c->scheduler.drafts)));
}

/* The checkpoint's draft, if it has one and proposals are wanted. Where this run cannot have it, it is refused and not left out. */
static bool open_draft(mm_loaded *l, const mm_loading_config *c, mm_err *err) {
  const mm_pack *p = &l->shards.pack;
  const mm_pack_file *f = mm_pack_find_file(p, MM_DFLASH_FILE);
  if (!f || !c->scheduler.drafts) return true;
  l->has_draft = mm_dflash_open(&l->draft, p->dir, &p->model, err);
  return l->has_draft && (!c->verify || mm_dflash_verify(&l->draft, f, err));
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
      .memory = {.fits = true, .share = c->memory_share, .outs = outs_of(&l->shards.pack.model, c), .length = "--max-model-len"},
  };
  if (!e.ops || !open_draft(l, c, err)) return false;
  mm_engine_config with = e;
  with.draft = l->has_draft ? &l->draft : NULL;
  with.options.act_quant = c->act_quant ? strcmp(c->act_quant, "on") == 0 : e.ops->act_quant;
  uint32_t *device;
  if (!mm_process_group_find(true, &with.process_group, err)) return false;
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
  const mm_scheduler_config scheduler = scheduler_of(l, c, &with.options);
  if (!(l->scheduler = mm_scheduler_open(l->engine, &scheduler, err))) return false;
  l->stage = "done";
  return true;
}

void mm_loading_close(mm_loaded *l, bool drain) {
  mm_scheduler_close(l->scheduler, drain);
  mm_engine_close(l->engine);
  mm_dflash_close(&l->draft);
  mm_tokenizer_close(l->tokenizer);
  mm_shards_close(&l->shards);
  free(l->never);
  free(l->end);
  *l = (mm_loaded){0};
}
