/* Plan, progress and summary for people (text) and pipelines (JSON). */
#include "convert/report/report.h"

#include "convert/decode/follow.h"
#include "convert/plan/card.h"
#include "convert/plan/target_format.h"
#include "formats/system/bar.h"
#include "formats/system/pool.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static bool written(FILE *f, mm_err *err) {
  return (fflush(f) == 0 && !ferror(f)) || mm_fail_errno(err, mm_at("stdout", NULL), "write", errno);
}

static bool print_json(FILE *f, mm_json *j, mm_err *err) {
  char *text = j ? mm_json_dump(j, true) : NULL;
  mm_json_free(j);
  if (!text) return mm_fail_memory(err, 0);
  fprintf(f, "%s\n", text);
  free(text);
  return written(f, err);
}

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

static mm_json *listed_json(mm_plan_row t) {
  mm_json *x = mm_json_new_obj();
  if (mm_json_set(x, "name", mm_json_new_str(t.name)) && mm_json_set(x, "scheme", mm_json_new_str(t.scheme)) &&
      mm_json_set(x, "lead", mm_json_new_int(t.lead)) && mm_json_set(x, "rows", mm_json_new_int(t.rows)) &&
      mm_json_set(x, "cols", mm_json_new_int(t.cols)) && mm_json_set(x, "bytes", mm_json_new_int((int64_t)t.bytes)))
    return x;
  mm_json_free(x);
  return NULL;
}

static bool put_number(mm_json *j, const char *key, uint64_t n) { return mm_json_set(j, key, mm_json_new_int((int64_t)n)); }

static mm_json *footprint_json(const mm_footprint *f) {
  mm_json *x = mm_json_new_obj();
  if (put_number(x, "experts", f->experts) && put_number(x, "attention", f->attention) && put_number(x, "rest", f->rest) &&
      put_number(x, "kv_bytes_per_token", f->kv_token) && put_number(x, "state_bytes_per_sequence", f->state))
    return x;
  mm_json_free(x);
  return NULL;
}

static mm_json *verdict_json(const mm_verdict *v) {
  mm_json *x = mm_json_new_obj();
  bool ok = put_number(x, "gpu_memory", v->memory) && mm_json_set(x, "fits", mm_json_new_bool(v->fits)) &&
            put_number(x, "kv_tokens", v->tokens) && (v->tp == 0 || put_number(x, "smallest_tp", v->tp)) &&
            (!*v->refused || mm_json_set(x, "refused", mm_json_new_str(v->refused)));
  if (ok && v->card.name) ok = mm_json_set(x, "gpu", mm_json_new_str(v->card.name)) && put_number(x, "sm", v->card.sm);
  if (ok && v->card.runs)
    ok = mm_json_set(x, "runs", mm_json_new_str(v->card.runs)) && mm_json_set(x, "tried", mm_json_new_str(v->card.tried));
  if (ok) return x;
  mm_json_free(x);
  return NULL;
}

/* The known faults of engines in reading the schemes of the plan, as sentences. */
static mm_json *caveats_json(const mm_plan *p) {
  mm_json *list = mm_json_new_arr();
  const char *what;
  bool ok = list;
  for (size_t at = 0; ok && (what = mm_card_caveat(p, mm_target_format_name(p->target_format), &at));)
    ok = mm_json_append(list, mm_json_new_str(what));
  if (ok) return list;
  mm_json_free(list);
  return NULL;
}

static mm_json *plan_json(const mm_plan *p, const mm_verdict *v, bool tensors) {
  mm_json *j = mm_json_new_obj(), *ranks = mm_json_new_arr(), *kinds = mm_json_new_arr(), *list = tensors ? mm_json_new_arr() : NULL;
  bool ok = j && ranks && kinds;
  for (uint32_t r = 0; ok && r < mm_pack_ranks(&p->pack); r++) {
    mm_footprint f = mm_footprint_of(p, r);
    ok = mm_json_append(ranks, mm_json_new_int((int64_t)f.bytes)) && mm_json_append(kinds, footprint_json(&f));
  }
  for (size_t i = 0; ok && list && i < p->pack.tensor_count; i++)
    for (uint32_t k = 0; ok && k < mm_plan_stored(p, i); k++) ok = mm_json_append(list, listed_json(listed(p, i, k)));
  ok = ok && mm_json_set(j, "architecture", mm_json_new_str(p->pack.model.architecture)) &&
       mm_json_set(j, "quant", mm_json_new_str(p->pack.quant)) && mm_json_set(j, "tp", mm_json_new_int(p->pack.tp)) &&
       mm_json_set(j, "ep", mm_json_new_int(p->pack.ep)) && mm_json_set(j, "pp", mm_json_new_int(p->pack.pp)) &&
       mm_json_set(j, "source_tensors", mm_json_new_int((int64_t)used_names(p))) &&
       mm_json_set(j, "source_bytes", mm_json_new_int((int64_t)p->source_bytes)) &&
       mm_json_set(j, "output_tensors", mm_json_new_int((int64_t)output_tensors(p))) &&
       mm_json_set(j, "output_bytes", mm_json_new_int((int64_t)p->output_bytes)) && mm_json_set(j, "parts", mm_json_new_int(p->part_count));
  if (p->layout->target_formats)
    ok = ok && mm_json_set(j, "dialect", mm_json_new_str(mm_target_format_name(p->target_format))) &&
         mm_json_set(j, "notes", caveats_json(p));
  if (p->recipe.importance)
    ok = ok && mm_json_set(j, "weighed_matrices", mm_json_new_int((int64_t)p->calibrated.weighed)) &&
         mm_json_set(j, "unweighed_too_few_tokens", mm_json_new_int((int64_t)p->calibrated.too_few)) &&
         mm_json_set(j, "unweighed_no_entry", mm_json_new_int((int64_t)p->calibrated.no_entry));
  if (p->recipe.method == MM_METHOD_GPTQ)
    ok = ok && mm_json_set(j, "fed_back_matrices", mm_json_new_int((int64_t)p->calibrated.fed_back)) &&
         mm_json_set(j, "nearest_no_moments", mm_json_new_int((int64_t)p->calibrated.no_moments));
  if (p->calibrated.scaled > 0)
    ok = ok && mm_json_set(j, "scaled_tensors", mm_json_new_int((int64_t)p->calibrated.scaled)) &&
         mm_json_set(j, "unreached_experts", mm_json_new_int((int64_t)p->calibrated.unreached));
  ok = mm_json_set(j, "rank_bytes", ranks) && ok;
  ok = mm_json_set(j, "rank_footprint", kinds) && ok;
  if (v && v->memory) ok = mm_json_set(j, "verdict", verdict_json(v)) && ok;
  if (list) ok = mm_json_set(j, "tensors", list) && ok;
  if (ok) return j;
  mm_json_free(j);
  return NULL;
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

static void print_verdict(FILE *f, const mm_plan *p, const mm_verdict *v) {
  char memory[32];
  const unsigned long long most = p->pack.model.max_positions, tokens = v->tokens;
  fprintf(f, "GPUs of %s: --tp %u --ep %u --pp %u ", sized(memory, v->memory), p->pack.tp, p->pack.ep, p->pack.pp);
  if (*v->refused)
    fprintf(f, "is refused: %s", v->refused);
  else if (tokens)
    fprintf(f, "fits with up to %llu tokens of BF16 cache", tokens);
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
  if (style == MM_REPORT_JSON) return print_json(f, plan_json(p, v, tensors), err);
  mm_show_to(f, p->pack.model.architecture);
  fprintf(f, ": %zu tensors, %llu bytes (%s) of weights in %zu files\n", used_names(p), (unsigned long long)p->source_bytes,
          sized(size, p->source_bytes), p->hf->file_count);
  if (p->layout->target_formats)
    fprintf(f, "plan: --layout hf%s%s --quant \"", p->target_format ? " --dialect " : "",
            p->target_format ? mm_target_format_name(p->target_format) : "");
  else
    fprintf(f, "plan: --tp %u --ep %u --pp %u --quant \"", p->pack.tp, p->pack.ep, p->pack.pp);
  mm_show_to(f, p->pack.quant);
  fprintf(f, "\": %zu %s tensors, %u %s, %llu bytes (%s) in all\n", output_tensors(p), p->layout->kind, p->part_count,
          p->part_count == 1 ? "part" : "parts", (unsigned long long)p->output_bytes, sized(size, p->output_bytes));
  const struct mm_calibrated *c = &p->calibrated;
  if (p->recipe.importance)
    fprintf(f, "importance: %llu matrices weighed; without weights %llu with fewer than %d tokens and %llu that the file lacks\n",
            (unsigned long long)c->weighed, (unsigned long long)c->too_few, MM_IMPORTANCE_ROWS, (unsigned long long)c->no_entry);
  if (p->recipe.method == MM_METHOD_GPTQ)
    fprintf(f, "method gptq: %llu matrices rounded with error feedback, %llu to nearest, whose second moments the file lacks\n",
            (unsigned long long)c->fed_back, (unsigned long long)c->no_moments);
  if (c->scaled > 0)
    fprintf(f, "static activation scales: %llu tensors; %llu experts that calibration did not reach take the largest of the others\n",
            (unsigned long long)c->scaled, (unsigned long long)c->unreached);
  print_ranks(f, p);
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
  char hex[MM_HEX_LEN + 1];
  mm_digest_hex(&o->manifest, hex);
  mm_json *j = plan_json(p, NULL, false);
  double fresh = (double)(p->source_bytes - o->kept);
  bool ok = j && mm_json_set(j, "seconds", mm_json_new_real(o->seconds)) && put_number(j, "kept_bytes", o->kept) &&
            mm_json_set(j, "read_gb_per_s", mm_json_new_real(fresh / o->seconds / 1e9)) &&
            mm_json_set(j, "written_gb_per_s", mm_json_new_real((double)p->output_bytes / o->seconds / 1e9)) &&
            put_number(j, "zeroed_weights", o->zeroed) && put_number(j, "peak_rss_bytes", peak_rss()) &&
            mm_json_set(j, p->layout->digest_key, mm_json_new_str(hex));
  if (ok) return j;
  mm_json_free(j);
  return NULL;
}

bool mm_report_summary(FILE *f, const mm_plan *p, const mm_convert_outcome *o, mm_report_style style, mm_err *err) {
  char hex[MM_HEX_LEN + 1];
  if (style == MM_REPORT_JSON) return print_json(f, summary_json(p, o), err);
  mm_digest_hex(&o->manifest, hex);
  double fresh = (double)(p->source_bytes - o->kept) / 1e9, out = (double)p->output_bytes / 1e9;
  if (o->kept || o->resumed)
    fprintf(f, "kept of the run before: %.2f of %.2f GB (%.1f %%)\n", (double)o->kept / 1e9, (double)p->source_bytes / 1e9,
            100 * (double)o->kept / (double)p->source_bytes);
  fprintf(f, "done in %.2f s: %.2f GB read (%.2f GB/s), %.2f GB written (%.2f GB/s), peak RSS %.0f MiB\n%s sha256 %s\n", o->seconds, fresh,
          fresh / o->seconds, out, out / o->seconds, (double)peak_rss() / (1 << 20), p->layout->last_kind, hex);
  return written(f, err);
}

void mm_report_begin(mm_events *e, const mm_plan *p, const mm_verdict *v) {
  if (e) mm_events_put(e, "begin", plan_json(p, v, false));
}

void mm_report_done(mm_events *e, const mm_plan *p, const mm_convert_outcome *o) {
  if (e) mm_events_put(e, "done", summary_json(p, o));
}

void mm_report_failed(mm_events *e, const mm_err *why) {
  if (!e) return;
  mm_json *j = mm_json_new_obj();
  bool ok = mm_json_set(j, "error", mm_json_new_str(why->code)) && mm_json_set(j, "status", mm_json_new_int(why->status)) &&
            mm_json_set(j, "message", mm_json_new_str(why->text));
  if (!ok) mm_json_free(j);
  mm_events_put(e, "failed", ok ? j : NULL);
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
  mm_json *j = mm_json_new_obj();
  bool ok = mm_json_set(j, "seconds", mm_json_new_real(elapsed)) && put_number(j, "source_bytes", w->p->source_bytes) &&
            put_number(j, "done_bytes", atomic_load(&w->progress->read_bytes)) &&
            put_number(j, "kept_bytes", atomic_load(&w->progress->kept_bytes)) && put_number(j, "rss_bytes", peak_rss());
  const char *waiting = mm_follow_waiting(w->p->hf);
  ok = ok && (!waiting || mm_json_set(j, "waiting_for", mm_json_new_str(waiting)));
  if (!ok) mm_json_free(j);
  mm_events_put(w->events, "progress", ok ? j : NULL);
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
