/* Reports of a packed checkpoint's error as JSON and CSV, and the file they go to. */
#include "convert/report/report_error.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CSV_HEAD "name,scheme,count,nonfinite,sqnr_db"

static int worst_first(const void *a, const void *b) {
  const mm_error_row *p = a, *q = b;
  double x = mm_sqnr_db(&p->e), y = mm_sqnr_db(&q->e);
  return x != y ? (x > y) - (x < y) : strcmp(p->name, q->name);
}

void mm_report_rank(mm_error_report *r) { qsort(r->row, r->count, sizeof *r->row, worst_first); }

bool mm_error_exact(const mm_tensor_error *e) { return e->noise == 0 && e->nonfinite == 0; }

size_t mm_report_exact(const mm_error_report *r) {
  size_t n = 0;
  for (size_t i = 0; i < r->count; i++) n += mm_error_exact(&r->row[i].e);
  return n;
}

/* The figures of a tensor, once for all formats: those that are not counts. */
typedef struct figure {
  const char *name;
  double value;
} figure;
enum { FIGURES = 7 };
/* NAN: not measured. */
static void figures_of(const mm_tensor_error *e, bool unscaled, figure out[FIGURES]) {
  double n = (double)e->count;
  const figure f[FIGURES] = {{"rmse", mm_rmse(e)},
                             {"max_abs", e->max_abs},
                             {"cosine", mm_cosine(e)},
                             {"clipped_share", unscaled ? (double)NAN
                                               : n > 0  ? (double)e->clipped / n
                                                        : 0},
                             {"flushed_share", n > 0 ? (double)e->flushed / n : 0},
                             {"least_scale", unscaled ? (double)NAN : e->least_scale},
                             {"most_scale", unscaled ? (double)NAN : e->most_scale}};
  memcpy(out, f, sizeof f);
}

/* A stack of experts of which some are not exact. */
static bool has_worst(const mm_tensor_error *e) { return e->experts > 0 && isfinite(e->worst_db); }

static mm_json *row_json(const mm_error_row *x, bool unscaled) {
  figure f[FIGURES];
  figures_of(&x->e, unscaled, f);
  double db = mm_sqnr_db(&x->e);
  mm_json *o = MM_JSON_NEW({"name", mm_json_new_str(x->name)}, {"scheme", mm_json_new_str(x->scheme)},
                           {"count", mm_json_new_u64(x->e.count)}, {"nonfinite", mm_json_new_u64(x->e.nonfinite)});
  if (isfinite(db)) mm_json_set(o, "sqnr_db", mm_json_new_real(db));
  for (int i = 0; i < FIGURES; i++)
    if (!isnan(f[i].value)) mm_json_set(o, f[i].name, mm_json_new_real(f[i].value));
  if (has_worst(&x->e))
    MM_JSON_PUT(o, {"worst_expert", mm_json_new_int(x->e.worst_expert)}, {"worst_expert_sqnr_db", mm_json_new_real(x->e.worst_db)});
  return o;
}

mm_json *mm_report_json(const mm_error_report *r) {
  mm_json *o = mm_json_new_obj();
  const char *const fact[][2] = {{"checkpoint", r->dir},
                                 {"source", r->source},
                                 {"quant", r->quant},
                                 {"packed_by", r->tool},
                                 {"compared_by", "minimax-verify " MM_VERSION},
                                 {"manifest_sha256", r->manifest},
                                 {"plan_sha256", r->plan}};
  for (size_t i = 0; i < sizeof fact / sizeof *fact; i++)
    if (fact[i][1]) mm_json_set(o, fact[i][0], mm_json_new_path(fact[i][1]));
  mm_json_put_int(o, "exact_tensors", mm_report_exact(r));
  if (r->absent > 0) mm_json_put_int(o, "absent_tensors", r->absent);
  if (r->divergence) mm_json_set(o, "divergence", mm_json_copy(r->divergence, MM_IGNORED));
  mm_json *list = mm_json_put_list(o, "tensors");
  for (size_t i = 0; i < r->count; i++) mm_json_append(list, row_json(&r->row[i], r->unscaled));
  return o;
}

/* A CSV field after RFC 4180: names come from a file. */
static void put_quoted(FILE *f, const char *text) {
  fputc('"', f);
  for (; *text; text++) fprintf(f, *text == '"' ? "\"\"" : "%c", *text);
  fputc('"', f);
}

/* One line of names, one line a tensor. */
static void put_csv(FILE *f, const mm_error_report *r) {
  figure x[FIGURES];
  figures_of(&(mm_tensor_error){0}, false, x);
  fputs(CSV_HEAD, f);
  for (int i = 0; i < FIGURES; i++) fprintf(f, ",%s", x[i].name);
  fputs(",worst_expert,worst_expert_sqnr_db\n", f);
  for (size_t i = 0; i < r->count; i++) {
    const mm_error_row *row = &r->row[i];
    double db = mm_sqnr_db(&row->e);
    figures_of(&row->e, r->unscaled, x);
    put_quoted(f, row->name);
    fprintf(f, ",%s,%llu,%llu,", row->scheme, (unsigned long long)row->e.count, (unsigned long long)row->e.nonfinite);
    if (isfinite(db)) fprintf(f, "%.17g", db);
    for (int j = 0; j < FIGURES; j++) isnan(x[j].value) ? fputs(",", f) : fprintf(f, ",%.17g", x[j].value);
    if (has_worst(&row->e))
      fprintf(f, ",%u,%.17g\n", row->e.worst_expert, row->e.worst_db);
    else
      fputs(",,\n", f);
  }
}

static bool write_json(FILE *f, const mm_error_report *r, mm_err *err) {
  char *text = mm_json_text(mm_report_json(r), true, err);
  if (text) fprintf(f, "%s\n", text);
  free(text);
  return text != NULL;
}

static const char *ending(const char *path) {
  const char *dot = strrchr(path, '.');
  return dot ? dot : "";
}

/* False for an ending that no format has. */
static bool mark_of(mm_output_place *place, mm_err *err) {
  static const char *const format[] = {".json", ".csv", ".html"};
  static const mm_output_mark mark[] = {
      {.head = "{\n \"checkpoint\": \"", .text = "\"compared_by\": \"minimax-verify "},
      {.head = CSV_HEAD},
      {.head = "<!DOCTYPE html>\n<html lang=en><meta charset=utf-8>", .text = "<title>" MM_REPORT_TITLE "</title>"}};
  for (size_t i = 0; i < sizeof format / sizeof *format; i++) {
    if (strcmp(ending(place->path), format[i]) != 0) continue;
    place->mark = &mark[i];
    place->marks = 1;
    return true;
  }
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(place->path, NULL),
                 "found a report of this name, expected one that ends in .json, .csv or .html");
}

bool mm_report_place_ok(mm_output_place place, mm_err *err) { return mark_of(&place, err) && mm_output_check(&place, err); }

/* Closes f, whose descriptor it is not. */
static bool write_format(FILE *f, const char *path, const mm_error_report *r, mm_err *err) {
  bool ok = true;
  switch (ending(path)[1]) {
    case 'j': ok = write_json(f, r, err); break;
    case 'c': put_csv(f, r); break;
    default: ok = mm_report_html(f, r) || mm_fail_memory(err, 0);
  }
  bool written = !ferror(f);
  if (fclose(f) == 0 && written) return ok;
  return mm_fail_errno(err, mm_at(path, NULL), "write", errno);
}

bool mm_report_write(mm_output_place place, const mm_error_report *r, mm_err *err) {
  mm_output out = MM_OUTPUT_NONE;
  bool ok = mark_of(&place, err) && mm_output_open(&out, &place, err);
  int fd = ok ? fcntl(out.fd, F_DUPFD_CLOEXEC, 3) : -1;
  FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
  if (ok && !f) ok = mm_fail_errno(err, mm_at(place.path, NULL), "open", errno);
  if (fd >= 0 && !f) close(fd);
  ok = ok && write_format(f, place.path, r, err) && mm_output_publish(&out, err);
  mm_output_discard(&out);
  return ok;
}
