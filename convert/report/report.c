/* Plan, progress and summary for people (text) and pipelines (JSON). */
#include "convert/report/report.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static bool written(FILE *f, mm_err *err) {
  return (fflush(f) == 0 && !ferror(f)) || mm_fail_errno(err, mm_at("standard output", NULL), "write", errno);
}

static bool print_json(FILE *f, mm_json *j, mm_err *err) {
  char *text = j ? mm_json_dump(j, true) : NULL;
  mm_json_free(j);
  if (!text) return mm_fail_memory(err, 0);
  fprintf(f, "%s\n", text);
  free(text);
  return written(f, err);
}

static uint64_t rank_bytes(const mm_plan *p, uint32_t rank) {
  uint64_t n = 0;
  for (size_t i = 0; i < p->pack.rank[rank].part_count; i++) n += p->pack.rank[rank].part[i].size;
  return n;
}

/* What is listed of a plan: packed tensors, or the matrices of an unsharded one. */
typedef struct mm_listed {
  const char *name, *scheme;
  uint32_t lead, rows, cols;
  uint64_t bytes; /* of all planes */
} mm_listed;

static uint32_t listed_count(const mm_plan *p, size_t i) { return p->unsharded ? p->pack.tensor[i].piece_count : 1; }

static mm_listed listed(const mm_plan *p, size_t i, uint32_t piece) {
  const mm_pack_tensor *t = &p->pack.tensor[i];
  mm_listed x = {.name = t->name, .scheme = t->scheme, .lead = t->lead, .rows = t->rows, .cols = t->cols};
  if (p->unsharded) {
    x.name = t->piece[piece].source;
    x.rows = t->piece[piece].rows;
  }
  for (unsigned k = 0; k < t->plane_count; k++) x.bytes += p->tensor[i].place[piece][k].bytes;
  return x;
}

static size_t output_tensors(const mm_plan *p) {
  size_t n = 0;
  for (size_t i = 0; i < p->pack.tensor_count; i++) n += p->unsharded ? listed_count(p, i) * p->pack.tensor[i].plane_count : 1;
  return n;
}

static size_t used_names(const mm_plan *p) {
  size_t n = 0;
  for (size_t i = 0; i < p->hf->tensor_count; i++) n += p->hf->tensor[i].used;
  return n;
}

static mm_json *listed_json(mm_listed t) {
  mm_json *x = mm_json_new_obj();
  if (mm_json_set(x, "name", mm_json_new_str(t.name)) && mm_json_set(x, "scheme", mm_json_new_str(t.scheme)) &&
      mm_json_set(x, "lead", mm_json_new_int(t.lead)) && mm_json_set(x, "rows", mm_json_new_int(t.rows)) &&
      mm_json_set(x, "cols", mm_json_new_int(t.cols)) && mm_json_set(x, "bytes", mm_json_new_int((int64_t)t.bytes)))
    return x;
  mm_json_free(x);
  return NULL;
}

static mm_json *plan_json(const mm_plan *p, bool tensors) {
  mm_json *j = mm_json_new_obj(), *ranks = mm_json_new_arr(), *list = tensors ? mm_json_new_arr() : NULL;
  bool ok = j && ranks;
  for (uint32_t r = 0; ok && r < mm_pack_ranks(&p->pack); r++) ok = mm_json_append(ranks, mm_json_new_int((int64_t)rank_bytes(p, r)));
  for (size_t i = 0; ok && list && i < p->pack.tensor_count; i++)
    for (uint32_t k = 0; ok && k < listed_count(p, i); k++) ok = mm_json_append(list, listed_json(listed(p, i, k)));
  ok = ok && mm_json_set(j, "architecture", mm_json_new_str(p->pack.model.architecture)) &&
       mm_json_set(j, "quant", mm_json_new_str(p->pack.quant)) && mm_json_set(j, "tp", mm_json_new_int(p->pack.tp)) &&
       mm_json_set(j, "ep", mm_json_new_int(p->pack.ep)) && mm_json_set(j, "pp", mm_json_new_int(p->pack.pp)) &&
       mm_json_set(j, "source_tensors", mm_json_new_int((int64_t)used_names(p))) &&
       mm_json_set(j, "source_bytes", mm_json_new_int((int64_t)p->source_bytes)) &&
       mm_json_set(j, "output_tensors", mm_json_new_int((int64_t)output_tensors(p))) &&
       mm_json_set(j, "output_bytes", mm_json_new_int((int64_t)p->output_bytes)) && mm_json_set(j, "parts", mm_json_new_int(p->part_count));
  if (p->recipe.importance)
    ok = ok && mm_json_set(j, "weighed_matrices", mm_json_new_int((int64_t)p->calibrated.weighed)) &&
         mm_json_set(j, "unweighed_too_few_tokens", mm_json_new_int((int64_t)p->calibrated.too_few)) &&
         mm_json_set(j, "unweighed_no_entry", mm_json_new_int((int64_t)p->calibrated.no_entry));
  if (p->calibrated.scaled > 0)
    ok = ok && mm_json_set(j, "scaled_tensors", mm_json_new_int((int64_t)p->calibrated.scaled)) &&
         mm_json_set(j, "unreached_experts", mm_json_new_int((int64_t)p->calibrated.unreached));
  ok = mm_json_set(j, "rank_bytes", ranks) && ok;
  if (list) ok = mm_json_set(j, "tensors", list) && ok;
  if (ok) return j;
  mm_json_free(j);
  return NULL;
}

bool mm_report_plan(FILE *f, const mm_plan *p, mm_report_style style, bool tensors, mm_err *err) {
  if (style == MM_REPORT_JSON) return print_json(f, plan_json(p, tensors), err);
  mm_show_to(f, p->pack.model.architecture);
  fprintf(f, ": %zu tensors, %llu bytes of weights in %zu files\n", used_names(p), (unsigned long long)p->source_bytes, p->hf->file_count);
  fprintf(f, "plan: --tp %u --ep %u --pp %u --quant \"", p->pack.tp, p->pack.ep, p->pack.pp);
  mm_show_to(f, p->pack.quant);
  fprintf(f, "\": %zu %s tensors, %u parts, %llu bytes in all\n", output_tensors(p), p->unsharded ? "unsharded" : "packed", p->part_count,
          (unsigned long long)p->output_bytes);
  const struct mm_calibrated *c = &p->calibrated;
  if (p->recipe.importance)
    fprintf(f, "importance: %llu matrices weighed; without weights %llu with fewer than %d tokens and %llu that the file lacks\n",
            (unsigned long long)c->weighed, (unsigned long long)c->too_few, MM_IMPORTANCE_ROWS, (unsigned long long)c->no_entry);
  if (c->scaled > 0)
    fprintf(f, "static activation scales: %llu tensors; %llu experts that calibration did not reach take the largest of the others\n",
            (unsigned long long)c->scaled, (unsigned long long)c->unreached);
  for (uint32_t r = 0; r < mm_pack_ranks(&p->pack); r++)
    if (p->wanted[r]) fprintf(f, "  rank %u: %llu bytes\n", r, (unsigned long long)rank_bytes(p, r));
  for (size_t i = 0; tensors && i < p->pack.tensor_count; i++)
    for (uint32_t j = 0; j < listed_count(p, i); j++) {
      mm_listed t = listed(p, i, j);
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

bool mm_report_summary(FILE *f, const mm_plan *p, const mm_outcome *o, mm_report_style style, mm_err *err) {
  char hex[MM_HEX_LEN + 1];
  mm_digest_hex(&o->manifest, hex);
  double in = (double)p->source_bytes / o->seconds / 1e9, out = (double)p->output_bytes / o->seconds / 1e9;
  if (style == MM_REPORT_TEXT) {
    fprintf(f, "done in %.2f s: %.2f GB read (%.2f GB/s), %.2f GB written (%.2f GB/s), peak RSS %.0f MiB\n%s sha256 %s\n", o->seconds,
            (double)p->source_bytes / 1e9, in, (double)p->output_bytes / 1e9, out, (double)peak_rss() / (1 << 20),
            p->unsharded ? "index" : "manifest", hex);
    return written(f, err);
  }
  mm_json *j = plan_json(p, false);
  bool ok = j && mm_json_set(j, "seconds", mm_json_new_real(o->seconds)) && mm_json_set(j, "read_gb_per_s", mm_json_new_real(in)) &&
            mm_json_set(j, "written_gb_per_s", mm_json_new_real(out)) &&
            mm_json_set(j, "zeroed_weights", mm_json_new_int((int64_t)o->zeroed)) &&
            mm_json_set(j, "peak_rss_bytes", mm_json_new_int((int64_t)peak_rss())) &&
            mm_json_set(j, p->unsharded ? "index_sha256" : "manifest_sha256", mm_json_new_str(hex));
  if (!ok) {
    mm_json_free(j);
    j = NULL;
  }
  return print_json(f, j, err);
}

struct mm_watch {
  const mm_plan *p;
  const mm_progress *progress;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  bool stop;
};

static void draw(const mm_watch *w, double elapsed, bool tty) {
  double done = (double)atomic_load(&w->progress->read_bytes), all = (double)w->p->source_bytes;
  double rate = elapsed > 0 ? done / elapsed : 0, eta = rate > 0 ? (all - done) / rate : 0;
  char bar[31];
  size_t filled = all > 0 ? (size_t)(30 * (done / all)) : 0;
  memset(bar, '-', 30);
  memset(bar, '#', filled < 30 ? filled : 30);
  bar[30] = 0;
  if (tty) fprintf(stderr, "\r[%s] ", bar);
  fprintf(stderr, "%.2f of %.2f GB (%.0f %%), %.2f GB/s, %.0f s left, RSS %.0f MiB%s", done / 1e9, all / 1e9,
          all > 0 ? 100 * done / all : 100, rate / 1e9, eta, (double)peak_rss() / (1 << 20), tty ? "  " : "\n");
}

static void *watch(void *ctx) {
  mm_watch *w = ctx;
  bool tty = isatty(2), drawn = false;
  double start = mm_now();
  pthread_mutex_lock(&w->lock);
  while (!w->stop) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += tty ? 1 : 5;
    pthread_cond_timedwait(&w->wake, &w->lock, &until);
    if (w->stop) break;
    draw(w, mm_now() - start, tty);
    drawn = true;
  }
  pthread_mutex_unlock(&w->lock);
  if (tty && drawn) fputc('\n', stderr);
  return NULL;
}

mm_watch *mm_watch_open(const mm_plan *p, const mm_progress *progress) {
  mm_watch *w = calloc(1, sizeof *w);
  if (!w) return NULL;
  *w = (mm_watch){.p = p, .progress = progress};
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->wake, NULL);
  if (pthread_create(&w->thread, NULL, watch, w) == 0) return w;
  free(w);
  return NULL;
}

void mm_watch_close(mm_watch *w) {
  if (!w) return;
  pthread_mutex_lock(&w->lock);
  w->stop = true;
  pthread_cond_signal(&w->wake);
  pthread_mutex_unlock(&w->lock);
  pthread_join(w->thread, NULL);
  pthread_cond_destroy(&w->wake);
  pthread_mutex_destroy(&w->lock);
  free(w);
}
