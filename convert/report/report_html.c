/* The HTML report: one page, inline SVG drawn here, no scripts, nothing fetched. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "convert/report/report_error.h"

static void put_text(FILE *f, const char *s) {
  for (; *s; s++) {
    unsigned char c = (unsigned char)*s;
    if (c == '<' || c == '>' || c == '&' || c == '"' || c == '\'' || c < 0x20)
      fprintf(f, "&#%u;", c);
    else
      fputc(c, f);
  }
}

/* ---- colours: worst red, best blue, through white; exact green ---- */

#define EXACT "#1b7837"

static void put_colour(FILE *f, double share) {
  static const double stop[3][3] = {{178, 24, 43}, {247, 247, 247}, {33, 102, 172}};
  double x = fmin(fmax(share, 0), 1) * 2;
  int i = x < 1 ? 0 : 1;
  fputc('#', f);
  for (int c = 0; c < 3; c++) fprintf(f, "%02x", (unsigned)lrint(stop[i][c] + (stop[i + 1][c] - stop[i][c]) * (x - i)));
}

/* Least and largest finite SQNR; false when every tensor is exact. */
static bool sqnr_range(const mm_error_report *r, double *least, double *most) {
  *least = (double)INFINITY;
  *most = -(double)INFINITY;
  for (size_t i = 0; i < r->count; i++) {
    double db = mm_sqnr_db(&r->row[i].e);
    if (!isfinite(db)) continue;
    *least = fmin(*least, db);
    *most = fmax(*most, db);
  }
  return *least <= *most;
}

/* ---- histograms ---- */

enum { BINS = 32, BIN_WIDTH = 14, PLOT = 120, MARGIN = 30 };

/* Of value(row) over all rows where it is finite. */
static void put_histogram(FILE *f, const mm_error_report *r, double (*value)(const mm_tensor_error *), const char *title) {
  double least = (double)INFINITY, most = -(double)INFINITY;
  for (size_t i = 0; i < r->count; i++) {
    double x = value(&r->row[i].e);
    if (!isfinite(x)) continue;
    least = fmin(least, x);
    most = fmax(most, x);
  }
  fputs("<figure><figcaption>", f);
  put_text(f, title);
  if (least > most) {
    fputs(": every tensor is exact</figcaption></figure>\n", f);
    return;
  }
  size_t count[BINS] = {0}, top = 1;
  double width = most > least ? (most - least) / BINS : 1;
  for (size_t i = 0; i < r->count; i++) {
    double x = value(&r->row[i].e);
    if (!isfinite(x)) continue;
    int bin = (int)fmin((x - least) / width, BINS - 1);
    if (++count[bin] > top) top = count[bin];
  }
  fprintf(f, "</figcaption><svg width=\"%d\" height=\"%d\" role=\"img\">\n", BINS * BIN_WIDTH + 2 * MARGIN, PLOT + MARGIN);
  for (int i = 0; i < BINS; i++) {
    double height = PLOT * (double)count[i] / (double)top;
    fprintf(f, "<rect x=\"%d\" y=\"%.1f\" width=\"%d\" height=\"%.1f\" fill=\"#2166ac\"><title>%.4g to %.4g: %zu</title></rect>\n",
            MARGIN + i * BIN_WIDTH, PLOT - height, BIN_WIDTH - 1, height, least + i * width, least + (i + 1) * width, count[i]);
  }
  fprintf(f, "<text x=\"%d\" y=\"%d\">%.4g</text><text x=\"%d\" y=\"%d\" text-anchor=\"end\">%.4g</text>", MARGIN, PLOT + 16, least,
          MARGIN + BINS * BIN_WIDTH, PLOT + 16, most);
  fprintf(f, "<text x=\"%d\" y=\"10\" text-anchor=\"end\">%zu</text></svg></figure>\n", MARGIN - 4, top);
}

static double largest_error(const mm_tensor_error *e) { return log10(e->max_abs); }

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

static int by_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

enum { CELL_W = 34, CELL_H = 14, LEFT = 40, HEAD = 230 };

static bool put_map(FILE *f, const mm_error_report *r) {
  const char **kind = calloc(r->count + 1, sizeof *kind);
  size_t kinds = 0;
  long layers = 0;
  double least, most;
  if (!kind) return false;
  sqnr_range(r, &least, &most);
  for (size_t i = 0; i < r->count; i++) {
    const char *k;
    long layer = layer_of(r->row[i].name, &k);
    if (layer < 0) continue;
    kind[kinds++] = k;
    layers = layer >= layers ? layer + 1 : layers;
  }
  qsort(kind, kinds, sizeof *kind, by_text);
  size_t unique = 0;
  for (size_t i = 0; i < kinds; i++)
    if (unique == 0 || strcmp(kind[unique - 1], kind[i]) != 0) kind[unique++] = kind[i];
  fprintf(f, "<svg width=\"%zu\" height=\"%ld\" role=\"img\">\n", LEFT + unique * CELL_W + HEAD, HEAD + layers * CELL_H);
  for (size_t i = 0; i < unique; i++) {
    fprintf(f, "<text transform=\"translate(%zu,%d) rotate(-45)\">", LEFT + i * CELL_W + CELL_W / 2, HEAD - 6);
    put_text(f, kind[i]);
    fputs("</text>\n", f);
  }
  for (long l = 0; l < layers; l++)
    fprintf(f, "<text x=\"%d\" y=\"%ld\" text-anchor=\"end\">%ld</text>", LEFT - 6, HEAD + l * CELL_H + 11, l);
  for (size_t i = 0; i < r->count; i++) {
    const char *k;
    long layer = layer_of(r->row[i].name, &k);
    if (layer < 0) continue;
    const char **column = bsearch(&k, kind, unique, sizeof *kind, by_text);
    const mm_tensor_error *e = &r->row[i].e;
    fprintf(f, "<rect x=\"%zu\" y=\"%ld\" width=\"%d\" height=\"%d\" fill=\"", LEFT + (size_t)(column - kind) * CELL_W,
            HEAD + layer * CELL_H, CELL_W - 1, CELL_H - 1);
    if (mm_error_exact(e))
      fputs(EXACT, f);
    else
      put_colour(f, most > least ? (mm_sqnr_db(e) - least) / (most - least) : 1);
    fputs("\"><title>", f);
    put_text(f, r->row[i].name);
    fputs(": ", f);
    put_sqnr(f, e, " dB");
    fputs("</title></rect>\n", f);
  }
  fputs("</svg>\n", f);
  free(kind);
  return true;
}

static void put_legend(FILE *f, const mm_error_report *r) {
  double least, most;
  fputs("<p class=legend><span style=\"background:" EXACT "\"></span> exact", f);
  if (sqnr_range(r, &least, &most))
    for (int i = 0; i <= 4; i++) {
      fputs(" <span style=\"background:", f);
      put_colour(f, i / 4.0);
      fprintf(f, "\"></span> %.1f dB", least + (most - least) * i / 4);
    }
  fputs("</p>\n", f);
}

/* ---- the page ---- */

static void put_table(FILE *f, const mm_error_report *r) {
  fputs(
      "<table><tr><th>tensor<th>scheme<th>weights<th>SQNR dB<th>RMSE<th>max |error|<th>cosine<th>clipped<th>flushed<th>scales<th>not "
      "finite\n",
      f);
  for (size_t i = 0; i < r->count; i++) {
    const mm_error_row *x = &r->row[i];
    double n = fmax((double)x->e.count, 1);
    fputs("<tr><td>", f);
    put_text(f, x->name);
    fputs("<td>", f);
    put_text(f, x->scheme);
    fprintf(f, "<td>%llu<td>", (unsigned long long)x->e.count);
    put_sqnr(f, &x->e, "");
    fprintf(f, "<td>%.3g<td>%.3g<td>%.7f<td>%.3g %%<td>%.3g %%<td>", mm_rmse(&x->e), x->e.max_abs, mm_cosine(&x->e),
            100 * (double)x->e.clipped / n, 100 * (double)x->e.flushed / n);
    if (x->e.most_scale > 0) fprintf(f, "%.3g … %.3g", x->e.least_scale, x->e.most_scale);
    fprintf(f, "<td>%llu\n", (unsigned long long)x->e.nonfinite);
  }
  fputs("</table>\n", f);
}

bool mm_report_html(FILE *f, const mm_error_report *r) {
  fputs(
      "<!DOCTYPE html>\n<html lang=en><meta charset=utf-8><title>Error of a packed checkpoint</title>\n<style>"
      "body{font:14px sans-serif;margin:2em}svg text{font:11px sans-serif}table{border-collapse:collapse}"
      "td,th{padding:1px 8px;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
      "figure{display:inline-block;margin:1em}.legend span{display:inline-block;width:1em;height:1em;border:1px solid #999}"
      "</style>\n<h1>Error of a packed checkpoint</h1>\n<p>",
      f);
  put_text(f, r->dir);
  fputs(" against ", f);
  put_text(f, r->source);
  fputs(", packed with <code>", f);
  put_text(f, r->quant);
  fprintf(f, "</code>: %zu of %zu tensors exact.</p>\n", mm_report_exact(r), r->count);
  put_histogram(f, r, mm_sqnr_db, "SQNR of the tensors, dB");
  put_histogram(f, r, largest_error, "largest error of the tensors, log10");
  fputs("<h2>Layer x tensor</h2>\n", f);
  put_legend(f, r);
  if (!put_map(f, r)) return false;
  fputs("<h2>Tensors</h2>\n", f);
  put_table(f, r);
  fputs("</html>\n", f);
  return true;
}
