/* Plan, progress and summary for people (text) and pipelines (JSON). */
#include "convert/report/report.h"

#include "convert/decode/follow.h"
#include "convert/plan/card.h"
#include "convert/plan/target_format.h"
#include "formats/option.h"
#include "formats/system/bar.h"
#include "formats/system/pool.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* What stderr does not take ends no conversion. */
static bool written(const FILE *f, mm_err *err) { return f != stdout || mm_program_written(err); }

static bool print_json(mm_json *j, mm_err *err) { return mm_program_json(j, true, err) && mm_program_written(err); }

/* One entry of the list of a plan: a packed tensor, or a matrix of an unsharded plan. */
typedef struct mm_plan_row {
  const char *name, *scheme;
  uint32_t lead, rows, cols;
  uint64_t bytes; /* of all planes */
} mm_plan_row;

static mm_plan_row listed(const mm_plan *p, size_t i, uint32_t piece) {
  const mm_pack_tensor *t = &p->pack.tensor[i];
  mm_plan_row x = {.name = t->name, .scheme = t->scheme, .lead = t->lead, .rows = t->rows, .cols = t->cols};
  if (!p->layout->roles.joins) {
    x.name = t->piece[piece].source;
    x.rows = t->piece[piece].rows;
  }
  for (unsigned k = 0; k < t->plane_count; k++) x.bytes += p->tensor[i].place[piece][k].bytes;
  return x;
}

static size_t output_tensors(const mm_plan *p) {
  size_t n = 0;
  for (size_t i = 0; i < p->pack.tensor_count; i++) n += p->layout->roles.joins ? 1 : mm_plan_stored(p, i) * p->pack.tensor[i].plane_count;
  return n;
}

static size_t used_names(const mm_plan *p) {
  size_t n = 0;
  for (size_t i = 0; i < p->hf->tensor_count; i++) n += p->hf->tensor[i].used;
  return n;
}

static mm_json *footprint_json(const mm_footprint *f) {
  return MM_JSON_NEW({"experts", mm_json_new_u64(f->experts)}, {"attention", mm_json_new_u64(f->attention)},
                     {"rest", mm_json_new_u64(f->rest)}, {"kv_bytes_per_token", mm_json_new_u64(f->kv_token)},
                     {"state_bytes_per_sequence", mm_json_new_u64(f->state)});
}

static mm_json *verdict_json(const mm_verdict *v) {
  mm_json *x = MM_JSON_NEW({"gpu_memory", mm_json_new_u64(v->memory)}, {"fits", mm_json_new_bool(v->fits)},
                           {"kv_tokens", mm_json_new_u64(v->tokens)});
  if (v->kv_fp8) mm_json_put_text(x, "kv_cache_dtype", "fp8");
  if (v->index_fp8) mm_json_put_text(x, "index_cache_dtype", "fp8");
  if (v->tp > 0) mm_json_put_int(x, "smallest_tp", v->tp);
  if (*v->refused) mm_json_put_text(x, "refused", v->refused);
  if (v->card.name) MM_JSON_PUT(x, {"gpu", mm_json_new_str(v->card.name)}, {"sm", mm_json_new_int(v->card.sm)});
  if (v->card.runs) MM_JSON_PUT(x, {"runs", mm_json_new_str(v->card.runs)}, {"tried", mm_json_new_str(v->card.tried)});
  return x;
}

static void put_tensors(mm_json *j, const mm_plan *p) {
  mm_json *list = mm_json_put_list(j, "tensors");
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    for (uint32_t k = 0; k < mm_plan_stored(p, i); k++) {
      const mm_plan_row t = listed(p, i, k);
      mm_json_append(
          list, MM_JSON_NEW({"name", mm_json_new_str(t.name)}, {"scheme", mm_json_new_str(t.scheme)}, {"lead", mm_json_new_int(t.lead)},
                            {"rows", mm_json_new_int(t.rows)}, {"cols", mm_json_new_int(t.cols)}, {"bytes", mm_json_new_u64(t.bytes)}));
    }
}

static mm_json *plan_json(const mm_plan *p, const mm_verdict *v, bool tensors) {
  const struct mm_calibrated *c = &p->calibrated;
  mm_json *j = MM_JSON_NEW({"architecture", mm_json_new_str(p->pack.model.architecture)}, {"quant", mm_json_new_str(p->pack.quant)},
                           {"tp", mm_json_new_int(p->pack.tp)}, {"ep", mm_json_new_int(p->pack.ep)}, {"pp", mm_json_new_int(p->pack.pp)},
                           {"source_tensors", mm_json_new_u64(used_names(p))}, {"source_bytes", mm_json_new_u64(p->source_bytes)},
                           {"output_tensors", mm_json_new_u64(output_tensors(p))}, {"output_bytes", mm_json_new_u64(p->output_bytes)},
                           {"parts", mm_json_new_int(p->part_count)});
  if (p->pack.attn_tp) mm_json_put_int(j, "attn_tp", p->pack.attn_tp);
  if (p->layout->target_formats) {
    const char *what;
    mm_json_put_text(j, "dialect", mm_target_format_name(p->target_format));
    mm_json *notes = mm_json_put_list(j, "notes"); /* known faults of engines in reading the plan's schemes */
    for (size_t at = 0; (what = mm_card_caveat(p, mm_target_format_name(p->target_format), &at));)
      mm_json_append(notes, mm_json_new_str(what));
  }
  if (p->recipe.importance)
    MM_JSON_PUT(j, {"weighed_matrices", mm_json_new_u64(c->weighed)}, {"unweighed_too_few_tokens", mm_json_new_u64(c->too_few)},
                {"unweighed_no_entry", mm_json_new_u64(c->no_entry)});
  if (p->recipe.method == MM_METHOD_GPTQ)
    MM_JSON_PUT(j, {"fed_back_matrices", mm_json_new_u64(c->fed_back)}, {"coupled_matrices", mm_json_new_u64(c->coupled)},
                {"nearest_no_moments", mm_json_new_u64(c->no_moments)});
  if (p->placement.experts)
    MM_JSON_PUT(j, {"placed_peak", mm_json_new_real(p->placement.after)}, {"unplaced_peak", mm_json_new_real(p->placement.before)});
  if (c->scaled > 0) MM_JSON_PUT(j, {"scaled_tensors", mm_json_new_u64(c->scaled)}, {"unreached_experts", mm_json_new_u64(c->unreached)});
  if (p->draft.bytes)
    mm_json_set(j, "draft",
                MM_JSON_NEW({"kind", mm_json_new_str(p->draft.kind)}, {"quant", mm_json_new_str(p->draft.quant)},
                            {"bytes", mm_json_new_u64(p->draft.bytes)}));
  mm_json *ranks = mm_json_put_list(j, "rank_bytes"), *kinds = mm_json_put_list(j, "rank_footprint");
  for (uint32_t r = 0; r < mm_pack_ranks(&p->pack); r++) {
    const mm_footprint f = mm_footprint_of(p, r);
    mm_json_append(ranks, mm_json_new_u64(f.bytes));
    mm_json_append(kinds, footprint_json(&f));
  }
  if (v && v->memory) mm_json_set(j, "verdict", verdict_json(v));
  if (tensors) put_tensors(j, p);
  return j;
}

/* As people count memory: "27.0 GiB", "913 KiB". */
static const char *sized(char out[32], uint64_t bytes) {
  static const char *const unit[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double n = (double)bytes;
  size_t u = 0;
  for (; n >= 1024 && u + 1 < sizeof unit / sizeof *unit; u++) n /= 1024;
  snprintf(out, 32, "%.*f %s", u == 0 || n >= 1000 ? 0 : n >= 100 ? 1 : 2, n, unit[u]);
  return out;
}

/* Wanted ranks that take the same stand on one line. */
static void print_ranks(FILE *f, const mm_plan *p) {
  const uint32_t all = mm_pack_ranks(&p->pack);
  for (uint32_t r = 0, next; r < all; r = next) {
    mm_footprint x = mm_footprint_of(p, r);
    for (next = r + 1; next < all && p->wanted[next] == p->wanted[r]; next++) {
      mm_footprint y = mm_footprint_of(p, next);
      if (memcmp(&x, &y, sizeof x) != 0) break;
    }
    if (!p->wanted[r]) continue;
    char size[32], experts[32], attention[32], rest[32], kv[32];
    if (!p->layout->roles.cuts)
      fprintf(f, "  in all: %llu bytes (%s)", (unsigned long long)x.bytes, sized(size, x.bytes));
    else if (next - r > 1)
      fprintf(f, "  ranks %u-%u: %llu bytes (%s) each", r, next - 1, (unsigned long long)x.bytes, sized(size, x.bytes));
    else
      fprintf(f, "  rank %u: %llu bytes (%s)", r, (unsigned long long)x.bytes, sized(size, x.bytes));
    fprintf(f, ": experts %s, attention %s, rest %s; BF16 KV cache %s a token", sized(experts, x.experts), sized(attention, x.attention),
            sized(rest, x.rest), sized(kv, x.kv_token));
    if (x.state) fprintf(f, ", state %s a sequence", sized(kv, x.state));
    fputc('\n', f);
  }
}

static void put_cut(FILE *f, const mm_pack *p) {
  fprintf(f, "--tp %u ", p->tp);
  if (p->attn_tp) fprintf(f, "--attn-tp %u ", p->attn_tp);
  fprintf(f, "--ep %u --pp %u ", p->ep, p->pp);
}

static void print_verdict(FILE *f, const mm_plan *p, const mm_verdict *v) {
  char memory[32];
  const unsigned long long most = p->pack.model.max_positions, tokens = v->tokens;
  fprintf(f, "GPUs of %s: ", sized(memory, v->memory));
  put_cut(f, &p->pack);
  if (*v->refused)
    fprintf(f, "is refused: %s", v->refused);
  else if (tokens)
    fprintf(f, "fits with up to %llu tokens of %s cache%s", tokens, v->kv_fp8 ? "FP8" : "BF16",
            v->index_fp8 ? " with index keys in FP8" : "");
  else
    fprintf(f, "does not fit: weights and buffers leave no room for a cache in %.0f %% of the memory", 100 * MM_GPU_SHARE);
  if (v->fits)
    fprintf(f, "; the smallest --tp for a full sequence of %llu is %u", most, v->tp);
  else if (v->tp)
    fprintf(f, "; a full sequence of %llu needs --tp %u", most, v->tp);
  else if (!v->card.name || v->card.runs)
    fprintf(f, "; no --tp of this model holds a full sequence of %llu: another --quant, or --pp", most);
  fputc('\n', f);
  if (v->card.runs) fprintf(f, "%s (sm_%u): %s; tried %s\n", v->card.name, v->card.sm, v->card.runs, v->card.tried);
}

/* The same in lines, and code that is missing. */
static void print_caveats(FILE *f, const mm_plan *p) {
  const char *what;
  for (size_t at = 0; (what = mm_card_caveat(p, mm_target_format_name(p->target_format), &at));) fprintf(f, "note: %s\n", what);
  char name[160], shown[512];
  if (mm_card_lacks(p->hf, name, sizeof name))
    fprintf(f, "note: auto_map in config.json names %s, which the source lacks: transformers will not load this with trust_remote_code.\n",
            mm_show(shown, sizeof shown, name));
}

bool mm_report_plan(FILE *f, const mm_plan *p, const mm_verdict *v, mm_report_style style, bool tensors, mm_err *err) {
  char size[32];
  if (style == MM_REPORT_JSON) return print_json(plan_json(p, v, tensors), err);
  mm_show_to(f, p->pack.model.architecture);
  fprintf(f, ": %zu tensors, %llu bytes (%s) of weights in %zu files\n", used_names(p), (unsigned long long)p->source_bytes,
          sized(size, p->source_bytes), p->hf->file_count);
  if (p->layout->target_formats)
    fprintf(f, "plan: --layout hf%s%s --quant \"", p->target_format ? " --dialect " : "",
            p->target_format ? mm_target_format_name(p->target_format) : "");
  else
    fputs("plan: ", f), put_cut(f, &p->pack), fputs("--quant \"", f);
  mm_show_to(f, p->pack.quant);
  fprintf(f, "\": %zu %s tensors, %u %s, %llu bytes (%s) in all\n", output_tensors(p), p->layout->kind, p->part_count,
          p->part_count == 1 ? "part" : "parts", (unsigned long long)p->output_bytes, sized(size, p->output_bytes));
  const struct mm_calibrated *c = &p->calibrated;
  if (p->recipe.importance)
    fprintf(f, "importance: %llu matrices weighed; without weights %llu with fewer than %d tokens and %llu that the file lacks\n",
            (unsigned long long)c->weighed, (unsigned long long)c->too_few, MM_IMPORTANCE_ROWS, (unsigned long long)c->no_entry);
  if (p->recipe.method == MM_METHOD_GPTQ)
    fprintf(
        f,
        "method gptq: %llu matrices rounded with error feedback, of which %llu have coupled rows; %llu to nearest, whose second moments "
        "the file lacks\n",
        (unsigned long long)c->fed_back, (unsigned long long)c->coupled, (unsigned long long)c->no_moments);
  if (p->placement.experts)
    fprintf(f, "placement: load of the fullest of %u ranks over their mean %.4f, in order %.4f\n", p->pack.ep, p->placement.after,
            p->placement.before);
  if (c->scaled > 0)
    fprintf(f, "static activation scales: %llu tensors; %llu experts that calibration did not reach take the largest of the others\n",
            (unsigned long long)c->scaled, (unsigned long long)c->unreached);
  print_ranks(f, p);
  if (p->draft.bytes)
    fprintf(f, "  draft of each rank: %s, --draft-quant %s, %llu bytes (%s)\n", p->draft.kind, p->draft.quant,
            (unsigned long long)p->draft.bytes, sized(size, p->draft.bytes));
  print_caveats(f, p);
  if (v && v->memory) print_verdict(f, p, v);
  for (size_t i = 0; tensors && i < p->pack.tensor_count; i++)
    for (uint32_t j = 0; j < mm_plan_stored(p, i); j++) {
      mm_plan_row t = listed(p, i, j);
      char lead[16] = "";
      if (t.lead) snprintf(lead, sizeof lead, "%u x ", t.lead);
      char name[512];
      mm_show(name, sizeof name, t.name);
      fprintf(f, "  %-60s %-10s %s[%u, %u]  %llu bytes\n", name, t.scheme, lead, t.rows, t.cols, (unsigned long long)t.bytes);
    }
  return written(f, err);
}

static uint64_t peak_rss(void) {
  struct rusage u;
  return getrusage(RUSAGE_SELF, &u) == 0 ? (uint64_t)u.ru_maxrss * 1024 : 0;
}

static mm_json *summary_json(const mm_plan *p, const mm_convert_outcome *o) {
  double fresh = (double)(p->source_bytes - o->kept);
  return MM_JSON_PUT(plan_json(p, NULL, false), {"seconds", mm_json_new_real(o->seconds)}, {"kept_bytes", mm_json_new_u64(o->kept)},
                     {"read_gb_per_s", mm_json_new_real(fresh / o->seconds / 1e9)},
                     {"written_gb_per_s", mm_json_new_real((double)p->output_bytes / o->seconds / 1e9)},
                     {"zeroed_weights", mm_json_new_u64(o->zeroed)}, {"peak_rss_bytes", mm_json_new_u64(peak_rss())},
                     {p->layout->digest_key, mm_json_new_digest(&o->manifest)});
}

bool mm_report_summary(FILE *f, const mm_plan *p, const mm_convert_outcome *o, mm_report_style style, mm_err *err) {
  if (style == MM_REPORT_JSON) return print_json(summary_json(p, o), err);
  double fresh = (double)(p->source_bytes - o->kept) / 1e9, out = (double)p->output_bytes / 1e9;
  if (o->kept || o->resumed)
    fprintf(f, "kept of the run before: %.2f of %.2f GB (%.1f %%)\n", (double)o->kept / 1e9, (double)p->source_bytes / 1e9,
            100 * (double)o->kept / (double)p->source_bytes);
  fprintf(f, "done in %.2f s: %.2f GB read (%.2f GB/s), %.2f GB written (%.2f GB/s), peak RSS %.0f MiB\n%s sha256 %s\n", o->seconds, fresh,
          fresh / o->seconds, out, out / o->seconds, (double)peak_rss() / (1 << 20), p->layout->last_kind,
          mm_digest_hex(&o->manifest).text);
  return written(f, err);
}

void mm_report_begin(mm_events *e, const mm_plan *p, const mm_verdict *v) {
  if (e) mm_events_put(e, "begin", plan_json(p, v, false));
}

void mm_report_done(mm_events *e, const mm_plan *p, const mm_convert_outcome *o) {
  if (e) mm_events_put(e, "done", summary_json(p, o));
}

void mm_report_failed(mm_events *e, const mm_err *reason) {
  if (e)
    mm_events_put(e, "failed",
                  MM_JSON_NEW({"error", mm_json_new_str(reason->code)}, {"status", mm_json_new_int(reason->status)},
                              {"message", mm_json_new_str(reason->text)}));
}

struct mm_watch {
  const mm_plan *p;
  const mm_convert_progress *progress;
  mm_events *events; /* NULL: none */
  bool drawn, tty, shown;
  double start;
  mm_pool_watch watch; /* of the conversion's threads: the tensor they are at */
  mm_ticker *ticker;
};

static void draw(mm_watch *w, double elapsed) {
  const double done = (double)atomic_load(&w->progress->read_bytes), all = (double)w->p->source_bytes;
  const double rate = elapsed > 0 ? (done - (double)atomic_load(&w->progress->kept_bytes)) / elapsed : 0;
  const char *waiting = mm_follow_waiting(w->p->hf);
  char facts[320], name[sizeof w->watch.name];
  int n = snprintf(facts, sizeof facts, "%.2f of %.2f GB (%.0f %%), %.2f GB/s", done / 1e9, all / 1e9, all > 0 ? 100 * done / all : 100,
                   rate / 1e9);
  pthread_mutex_lock(&w->watch.lock);
  memcpy(name, w->watch.name, sizeof name);
  pthread_mutex_unlock(&w->watch.lock);
  if (waiting) {
    n += snprintf(facts + n, sizeof facts - (size_t)n, ", waiting for ");
    mm_show(facts + n, mm_min(160, sizeof facts - (size_t)n), waiting);
  }
  const mm_bar_line line = {"", all > 0 ? done / all : 0, facts, rate > 0 && !waiting ? (all - done) / rate : (double)NAN,
                            waiting ? "" : name};
  mm_bar_draw(&line);
}

static void put_progress(const mm_watch *w, double elapsed) {
  mm_json *j =
      MM_JSON_NEW({"seconds", mm_json_new_real(elapsed)}, {"source_bytes", mm_json_new_u64(w->p->source_bytes)},
                  {"done_bytes", mm_json_new_u64(atomic_load(&w->progress->read_bytes))},
                  {"kept_bytes", mm_json_new_u64(atomic_load(&w->progress->kept_bytes))}, {"rss_bytes", mm_json_new_u64(peak_rss())});
  const char *waiting = mm_follow_waiting(w->p->hf);
  if (waiting) mm_json_put_text(j, "waiting_for", waiting);
  mm_events_put(w->events, "progress", j);
}

static void look(void *ctx, unsigned second) {
  mm_watch *w = ctx;
  const double elapsed = mm_now() - w->start;
  if (second && w->events) put_progress(w, elapsed);
  if (!second && w->tty && w->shown) fputc('\n', stderr); /* the last line stays */
  if (!second || !w->drawn || (!w->tty && second % 5 != 0)) return;
  draw(w, elapsed);
  w->shown = true;
}

mm_watch *mm_watch_open(const mm_plan *p, const mm_convert_progress *progress, mm_events *events, bool drawn) {
  mm_watch *w = events || drawn ? calloc(1, sizeof *w) : NULL;
  if (!w) return NULL;
  *w = (mm_watch){.p = p, .progress = progress, .events = events, .drawn = drawn, .tty = isatty(2), .start = mm_now()};
  pthread_mutex_init(&w->watch.lock, NULL);
  mm_pool_watched(&w->watch);
  w->ticker = mm_ticker_open(1000, look, w);
  return w;
}

void mm_watch_close(mm_watch *w) {
  if (!w) return;
  mm_pool_watched(NULL);
  mm_ticker_close(w->ticker);
  pthread_mutex_destroy(&w->watch.lock);
  free(w);
}
