/* The HTML report: one page, inline SVG drawn here, no scripts, nothing fetched. Colours stand for dB, the same in every report. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "convert/report/report_error.h"

/* As messages show it: names of folders need not be UTF-8. */
static void put_text(FILE *f, const char *s) {
  const char *const end = s + strlen(s);
  for (size_t n; s < end; s += n) {
    char one[8] = "", shown[24];
    n = mm_max(1, mm_utf8_len(s, (size_t)(end - s)));
    memcpy(one, s, n);
    if (strchr("<>&\"'", one[0]))
      fprintf(f, "&#%d;", one[0]);
    else
      fputs(mm_show(shown, sizeof shown, one), f);
  }
}

/* ---- colours ---- */

#define EXACT "#1b7837"

/* A scheme of 4 bits gives about 20 dB, one of 8 bits about 30: those are blue. */
static const struct {
  double db;
  int rgb[3];
  const char *what;
} stops[] = {{5, {178, 24, 43}, "unusable"},  {12, {239, 138, 98}, "poor"},    {17, {253, 219, 199}, "low"},
             {20, {209, 229, 240}, "4 bits"}, {30, {103, 169, 207}, "8 bits"}, {42, {33, 102, 172}, "fine"}};
enum { STOPS = sizeof stops / sizeof *stops };

static void put_colour(FILE *f, double db) {
  int i = 0;
  while (i + 2 < STOPS && db > stops[i + 1].db) i++;
  double x = fmin(fmax((db - stops[i].db) / (stops[i + 1].db - stops[i].db), 0), 1);
  fputc('#', f);
  for (int c = 0; c < 3; c++) fprintf(f, "%02x", (unsigned)lrint(stops[i].rgb[c] + (stops[i + 1].rgb[c] - stops[i].rgb[c]) * x));
}

static void put_tensor_colour(FILE *f, const mm_tensor_error *e) {
  if (mm_error_exact(e))
    fputs(EXACT, f);
  else
    put_colour(f, mm_sqnr_db(e));
}

static void put_legend(FILE *f) {
  fputs("<p class=legend>", f);
  for (int i = 0; i < STOPS; i++) {
    fputs("<span class=k><span class=c style=\"background:", f);
    put_colour(f, stops[i].db);
    fprintf(f, "\"></span> %.0f dB, %s</span> ", stops[i].db, stops[i].what);
  }
  fputs("<span class=k><span class=c style=\"background:" EXACT "\"></span> exact</span></p>\n", f);
}

/* ---- the verdict ---- */

#define NEAR_DB 3.0 /* below what a scheme gives on Gaussian weights: heavy tails cost about this much */

/* dB below what the tensor's scheme gives on Gaussian weights; 0 for exact tensors and those without a figure. */
static double shortfall(const mm_error_row *x) {
  const mm_scheme *s = mm_scheme_find(x->scheme);
  if (mm_error_exact(&x->e) || !s || !(s->sqnr > 0)) return 0;
  return (double)s->sqnr - mm_sqnr_db(&x->e);
}

static void put_verdict(FILE *f, const mm_error_report *r) {
  size_t low = 0, exact = mm_report_exact(r);
  uint64_t lost = 0;
  const mm_error_row *worst = NULL;
  for (size_t i = 0; i < r->count; i++) {
    const mm_error_row *x = &r->row[i];
    low += shortfall(x) > NEAR_DB;
    lost += x->e.nonfinite;
    if (shortfall(x) > NEAR_DB && (!worst || shortfall(x) > shortfall(worst))) worst = x;
  }
  bool good = low == 0 && lost == 0;
  fprintf(f, "<p class=\"verdict %s\"><b>%s</b> ", good ? "good" : "bad", exact == r->count ? "Exact." : good ? "Good." : "Look closer.");
  if (exact == r->count)
    fputs(r->absent ? "Every weight in this directory is that of the source." : "Every weight is that of the source.", f);
  else
    fprintf(f, "%zu of %zu tensors are exact; of the other %zu, %zu lose more than their scheme is expected to.", exact, r->count,
            r->count - exact, low);
  if (worst) {
    fputs(" The worst of these, ", f);
    put_text(f, worst->name);
    fprintf(f, ", has %.2f dB where its scheme gives %.1f dB.", mm_sqnr_db(&worst->e), mm_sqnr_db(&worst->e) + shortfall(worst));
  }
  if (r->absent) fprintf(f, " %zu tensors are not in this directory and were not compared.", r->absent);
  if (lost) fprintf(f, " %llu weights are NaN or infinite in the source or here.", (unsigned long long)lost);
  fprintf(f, "</p>\n<p>Expected is the SQNR of the scheme on Gaussian weights, less %.0f dB.</p>\n", NEAR_DB);
}

/* ---- histograms ---- */

enum { BINS = 30, BIN_WIDTH = 14, PLOT = 120, MARGIN = 30 };

static double largest_error(const mm_tensor_error *e) { return log10(e->max_abs); }

/* Draws the histogram of value(row) over all rows where it is finite, on an axis that is the same in every report; values beyond the axis
 * are in the first and last bins. */
static void put_histogram(FILE *f, const mm_error_report *r, double (*value)(const mm_tensor_error *), double least, double most,
                          const char *title) {
  size_t count[BINS] = {0}, top = 1;
  const double width = (most - least) / (double)BINS;
  for (size_t i = 0; i < r->count; i++) {
    double x = value(&r->row[i].e);
    if (!isfinite(x)) continue;
    int bin = (int)fmin(fmax((x - least) / width, 0), BINS - 1);
    if (++count[bin] > top) top = count[bin];
  }
  fputs("<figure><figcaption>", f);
  put_text(f, title);
  fprintf(f, "</figcaption><svg viewBox=\"0 0 %d %d\" width=\"%d\" role=\"img\">\n", BINS * BIN_WIDTH + 2 * MARGIN, PLOT + MARGIN,
          BINS * BIN_WIDTH + 2 * MARGIN);
  for (int i = 0; i < BINS; i++) {
    double height = (double)PLOT * (double)count[i] / (double)top;
    fprintf(f, "<rect class=\"bar\" x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%.1f\"", MARGIN + i * BIN_WIDTH, (double)PLOT - height,
            BIN_WIDTH - 1, height);
    if (value == mm_sqnr_db) {
      fputs(" style=\"fill:", f);
      put_colour(f, least + (i + 0.5) * width);
      fputs("\"", f);
    }
    fprintf(f, "><title>%.4g to %.4g: %zu</title></rect>\n", least + i * width, least + (i + 1) * width, count[i]);
  }
  fprintf(f, "<path class=\"axis\" d=\"M%d %d h%d\"/>", MARGIN, PLOT, BINS * BIN_WIDTH);
  for (int i = 0; i <= BINS; i += 5)
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%.4g</text>", MARGIN + i * BIN_WIDTH, PLOT + 16, least + i * width);
  fprintf(f, "<text x=\"%d\" y=\"10\" text-anchor=\"end\">%zu</text></svg></figure>\n", MARGIN - 4, top);
}

/* In dB, or that there is no error. */
static void put_sqnr(FILE *f, const mm_tensor_error *e, const char *unit) {
  if (mm_error_exact(e))
    fputs("exact", f);
  else
    fprintf(f, "%.2f%s", mm_sqnr_db(e), unit);
}

/* ---- layer x tensor ---- */

/* "model.layers.7.mlp.w" is layer 7, kind "mlp.w"; tensors outside layers are of layer -1 and their whole name. */
static long layer_of(const char *name, const char **kind) {
  static const char mark[] = ".layers.";
  const char *at = strstr(name, mark);
  char *end;
  *kind = name;
  if (!at) return -1;
  long layer = strtol(at + sizeof mark - 1, &end, 10);
  if (end == at + sizeof mark - 1 || *end != '.' || layer < 0) return -1;
  *kind = end + 1;
  return layer;
}

enum { CELL_W = 34, CELL_H = 16, WORST_W = 11, LEFT = 40, HEAD = 200 };

/* The kinds of tensors that layers have, sorted: the map's columns. */
typedef struct columns {
  const char **kind;
  size_t count;
  long layers;
} columns;

static bool find_columns(columns *c, const mm_error_report *r) {
  *c = (columns){.kind = calloc(r->count + 1, sizeof *c->kind)};
  size_t kinds = 0;
  for (size_t i = 0; c->kind && i < r->count; i++) {
    const char *k;
    long layer = layer_of(r->row[i].name, &k);
    if (layer < 0) continue;
    c->kind[kinds++] = k;
    c->layers = layer >= c->layers ? layer + 1 : c->layers;
  }
  if (c->kind) qsort(c->kind, kinds, sizeof *c->kind, mm_by_text);
  for (size_t i = 0; i < kinds; i++)
    if (c->count == 0 || strcmp(c->kind[c->count - 1], c->kind[i]) != 0) c->kind[c->count++] = c->kind[i];
  return c->kind;
}

/* A tensor's cell; in a stack's right part the colour of its worst expert. */
static void put_cell(FILE *f, const columns *c, const mm_error_row *row) {
  const char *k;
  long layer = layer_of(row->name, &k);
  if (layer < 0) return;
  const char **column = bsearch(&k, c->kind, c->count, sizeof *c->kind, mm_by_text);
  const mm_tensor_error *e = &row->e;
  size_t x = LEFT + (size_t)(column - c->kind) * CELL_W;
  bool split = e->experts > 0 && !mm_error_exact(e);
  fprintf(f, "<rect x=\"%zu\" y=\"%ld\" width=\"%d\" height=\"%d\" fill=\"", x, HEAD + layer * CELL_H, CELL_W - 1 - (split ? WORST_W : 0),
          CELL_H - 1);
  put_tensor_colour(f, e);
  fputs("\"><title>", f);
  put_text(f, row->name);
  fputs(": ", f);
  put_sqnr(f, e, " dB");
  fputs("</title></rect>\n", f);
  if (!split) return;
  fprintf(f, "<rect x=\"%zu\" y=\"%ld\" width=\"%d\" height=\"%d\" fill=\"", x + CELL_W - WORST_W, HEAD + layer * CELL_H, WORST_W - 1,
          CELL_H - 1);
  put_colour(f, e->worst_db);
  fputs("\"><title>", f);
  put_text(f, row->name);
  fprintf(f, ", expert %u, the worst: %.2f dB</title></rect>\n", e->worst_expert, e->worst_db);
}

static bool put_map(FILE *f, const mm_error_report *r) {
  columns c;
  if (!find_columns(&c, r)) return false;
  fprintf(f, "<div class=wide><svg width=\"%zu\" height=\"%ld\" role=\"img\">\n", LEFT + c.count * CELL_W + HEAD, HEAD + c.layers * CELL_H);
  for (size_t i = 0; i < c.count; i++) {
    fprintf(f, "<text transform=\"translate(%zu,%d) rotate(-45)\">", LEFT + i * CELL_W + CELL_W / 2, HEAD - 6);
    put_text(f, c.kind[i]);
    fputs("</text>\n", f);
  }
  for (long l = 0; l < c.layers; l++)
    fprintf(f, "<text x=\"%d\" y=\"%ld\" text-anchor=\"end\">%ld</text>", LEFT - 6, HEAD + l * CELL_H + 12, l);
  for (size_t i = 0; i < r->count; i++) put_cell(f, &c, &r->row[i]);
  fputs("</svg></div>\n", f);
  free(c.kind);
  return true;
}

/* ---- tables: the same rows in three orders, chosen without scripts ---- */

static int by_place(const void *a, const void *b) {
  const mm_error_row *x = *(const mm_error_row *const *)a, *y = *(const mm_error_row *const *)b;
  return (x->place > y->place) - (x->place < y->place);
}

static int by_largest(const void *a, const void *b) {
  const mm_error_row *x = *(const mm_error_row *const *)a, *y = *(const mm_error_row *const *)b;
  return x->e.max_abs != y->e.max_abs ? (x->e.max_abs < y->e.max_abs) - (x->e.max_abs > y->e.max_abs) : by_place(a, b);
}

static void put_row(FILE *f, const mm_error_row *x, bool unscaled) {
  double n = fmax((double)x->e.count, 1);
  fputs("<tr><td>", f);
  put_text(f, x->name);
  fputs("<td>", f);
  put_text(f, x->scheme);
  fprintf(f, "<td>%llu<td><span class=c style=\"background:", (unsigned long long)x->e.count);
  put_tensor_colour(f, &x->e);
  fputs("\"></span> ", f);
  put_sqnr(f, &x->e, "");
  fputs("<td>", f);
  if (x->e.experts > 0 && isfinite(x->e.worst_db)) fprintf(f, "%u: %.2f", x->e.worst_expert, x->e.worst_db);
  fprintf(f, "<td>%.3g<td>%.3g<td>%.7f<td>", mm_rmse(&x->e), x->e.max_abs, mm_cosine(&x->e));
  if (!unscaled) fprintf(f, "%.3g %%", 100 * (double)x->e.clipped / n);
  fprintf(f, "<td>%.3g %%<td>", 100 * (double)x->e.flushed / n);
  if (x->e.most_scale > 0) fprintf(f, "%.3g … %.3g", x->e.least_scale, x->e.most_scale);
  fprintf(f, "<td>%llu\n", (unsigned long long)x->e.nonfinite);
}

static bool put_tables(FILE *f, const mm_error_report *r) {
  static const struct {
    const char *id, *word;
    int (*order)(const void *, const void *);
  } orders[] = {{"worst", "lowest SQNR first", NULL},
                {"place", "in the checkpoint's order", by_place},
                {"largest", "largest error first", by_largest}};
  const mm_error_row **row = calloc(r->count + 1, sizeof *row);
  if (!row) return false;
  for (size_t o = 0; o < 3; o++)
    fprintf(f, "<input type=radio name=order id=%s%s><label for=%s>%s</label>\n", orders[o].id, o ? "" : " checked", orders[o].id,
            orders[o].word);
  for (size_t o = 0; o < 3; o++) {
    for (size_t i = 0; i < r->count; i++) row[i] = &r->row[i];
    if (orders[o].order) qsort(row, r->count, sizeof *row, orders[o].order);
    fprintf(f,
            "<div class=\"wide t-%s\"><table><tr><th>tensor<th>scheme<th>weights<th>SQNR, dB<th>worst expert, dB<th>RMSE<th>max |error|"
            "<th>cosine<th>clipped<th>flushed<th>scales<th>not finite\n",
            orders[o].id);
    for (size_t i = 0; i < r->count; i++) put_row(f, row[i], r->unscaled);
    fputs("</table></div>\n", f);
  }
  free(row);
  return true;
}

/* ---- the page ---- */

static void put_head(FILE *f) {
  fputs(
      "<!DOCTYPE html>\n<html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width, initial-scale=1\">"
      "<title>" MM_REPORT_TITLE
      "</title>\n<style>\n"
      ":root{color-scheme:light dark;--fg:#1a1a1a;--bg:#fff;--line:#d8d8d8;--soft:#f3f5f7;--bar:#2166ac}\n"
      "@media (prefers-color-scheme:dark){:root{--fg:#e6e6e6;--bg:#15181c;--line:#3a3f45;--soft:#20252b;--bar:#67a9cf}}\n"
      "body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:1em;max-width:80em;color:var(--fg);background:var(--bg)}\n"
      "svg{max-width:100%;height:auto}.wide{overflow-x:auto}.wide svg{max-width:none}\n"
      "svg text{font:11px system-ui,sans-serif;fill:var(--fg)}.bar{fill:var(--bar)}.axis{stroke:var(--fg);fill:none}\n"
      "table{border-collapse:collapse;font-size:13px}td,th{padding:2px 8px;text-align:right;border-bottom:1px solid var(--line);"
      "white-space:nowrap}td:first-child,th:first-child{text-align:left}th{background:var(--soft)}\n"
      ".verdict{padding:.7em 1em;border-left:6px solid;background:var(--soft);font-size:17px}.good{border-color:#1b7837}"
      ".bad{border-color:#b2182b}\n"
      "figure{display:inline-block;margin:.5em 1em .5em 0;max-width:100%}.c{display:inline-block;width:.9em;height:.9em;"
      "border:1px solid #888;vertical-align:-1px}\n"
      "dl{display:grid;grid-template-columns:max-content 1fr;gap:.1em 1em}dt{font-weight:600}dd{margin:0;overflow-wrap:anywhere}\n"
      ".k{white-space:nowrap;margin-right:.8em}input[name=order]{margin-left:1em}.t-worst,.t-place,.t-largest{display:none}"
      "#worst:checked~.t-worst,#place:checked~.t-place,#largest:checked~.t-largest{display:block}\n"
      "@media (max-width:40em){dl{grid-template-columns:1fr}dd{margin:0 0 .4em}}\n"
      "</style>\n<h1>Error of a packed checkpoint</h1>\n",
      f);
}

static void put_fact(FILE *f, const char *what, const char *text) {
  if (!text) return;
  fprintf(f, "<dt>%s<dd>", what);
  put_text(f, text);
  fputs("\n", f);
}

static void put_facts(FILE *f, const mm_error_report *r) {
  char date[64] = "";
  time_t t = time(NULL);
  struct tm utc;
  if (gmtime_r(&t, &utc)) strftime(date, sizeof date, "%Y-%m-%d %H:%M UTC", &utc);
  fputs("<dl>\n", f);
  put_fact(f, "checkpoint", r->dir);
  put_fact(f, "source", r->source);
  put_fact(f, "recipe", r->quant);
  put_fact(f, "packed by", r->tool);
  put_fact(f, "compared by", "minimax-verify " MM_VERSION);
  put_fact(f, "date", date);
  put_fact(f, "manifest SHA-256", r->manifest);
  put_fact(f, "plan SHA-256", r->plan);
  fputs("</dl>\n", f);
}

static void put_units(FILE *f) {
  fputs(
      "<h2>What the figures mean</h2>\n<dl>\n"
      "<dt>SQNR<dd>10 · log10 of Σw² over Σ(v − w)², w a weight of the source and v the packed one. 20 dB: the error is a tenth of the "
      "weights, "
      "root mean square; 6 dB more halve it.\n"
      "<dt>worst expert<dd>of a stack of experts the one with the least SQNR, by its number; on the map the right part of a cell.\n"
      "<dt>RMSE, max |error|<dd>root mean square and largest of |v − w|, in units of the weights.\n"
      "<dt>cosine<dd>of the angle between both tensors; 1 is the same direction.\n"
      "<dt>clipped<dd>weights that lay beyond the largest code, further off than half its step; of packed checkpoints.\n"
      "<dt>flushed<dd>weights that are not 0 and became 0.\n"
      "<dt>scales<dd>least and largest magnitude of what codes are multiplied with; of packed checkpoints.\n"
      "<dt>not finite<dd>weights that are NaN or infinite; they are in no sum.\n</dl>\n",
      f);
}

bool mm_report_html(FILE *f, const mm_error_report *r) {
  put_head(f);
  put_verdict(f, r);
  put_facts(f, r);
  if (r->divergence) mm_report_divergence_html(f, r->divergence, put_text);
  put_histogram(f, r, mm_sqnr_db, 0, 60, "tensors by SQNR, dB (exact ones left out)");
  put_histogram(f, r, largest_error, -5, 1, "tensors by largest error, log10 (exact ones left out)");
  fputs("<h2>Layer x tensor</h2>\n", f);
  put_legend(f);
  if (!put_map(f, r)) return false;
  put_units(f);
  fputs("<h2>Tensors</h2>\n", f);
  if (!put_tables(f, r)) return false;
  fputs("</html>\n", f);
  return true;
}
