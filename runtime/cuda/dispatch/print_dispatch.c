/* The table of choices, printed (runtime/bench/bench_dispatch.h). */
#include "runtime/bench/bench_dispatch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/bench/bench_shapes.h"
#include "runtime/cuda/dispatch/dispatch.h"

enum { MOST_TOKENS = 8192, MOST_RANGES = 16, MOST_ROWS = 128, SHOWN = 300 };

static const struct code {
  const char *name;
  mm_cu_device device;
} codes[] = {{"sm_90a", {true, 8, 227 * 1024, false}}, {"other code", {false, 0, 99 * 1024, false}}};

/* From `from` tokens on, up to the next range. */
typedef struct range {
  uint32_t from;
  mm_cu_dispatch decode, chunk;
} range;

/* The kernels of products in some schemes, and the names of all schemes that take the same ones. */
typedef struct row {
  char products[96], schemes[240];
  range range[MOST_RANGES];
  uint32_t ranges;
} row;

typedef struct rows {
  row at[MOST_ROWS];
  uint32_t count;
} rows;

static bool same(const mm_cu_dispatch *a, const mm_cu_dispatch *b) {
  return a->kernel == b->kernel && a->x == b->x && a->middle == b->middle;
}

static void find_ranges(row *r, const mm_cu_device *d, mm_cu_task task) {
  for (task.tokens = 1; task.tokens <= MOST_TOKENS && r->ranges < MOST_RANGES; task.tokens++) {
    const range *last = r->ranges ? &r->range[r->ranges - 1] : NULL;
    range now = {.from = task.tokens};
    task.decode = true, now.decode = mm_cu_dispatch_product(d, &task);
    task.decode = false, now.chunk = mm_cu_dispatch_product(d, &task);
    if (!last || !same(&last->decode, &now.decode) || !same(&last->chunk, &now.chunk)) r->range[r->ranges++] = now;
  }
}

static bool same_ranges(const row *a, const row *b) {
  bool alike = a->ranges == b->ranges;
  for (uint32_t i = 0; alike && i < a->ranges; i++)
    alike = a->range[i].from == b->range[i].from && same(&a->range[i].decode, &b->range[i].decode) &&
            same(&a->range[i].chunk, &b->range[i].chunk);
  return alike;
}

static void append(char *to, size_t size, const char *word) {
  const size_t at = strlen(to);
  snprintf(to + at, size - at, "%s%s", at ? ", " : "", word);
}

/* Adds the product to the rows of its scheme, which begin at `first`: as a row of its own, or as a name more of one. False where the
 * backend refuses the scheme. */
static bool add(rows *all, uint32_t first, const char *product, const mm_packed *w, const mm_packed *w2, const mm_cu_device *d,
                uint32_t top_k, bool rounds) {
  mm_err refused = {0};
  mm_cu_weight one, two = {0};
  if (!w->scheme) return true;
  if (!mm_cu_describe(w, product, &one, &refused) || (w2 && !mm_cu_describe(w2, product, &two, &refused))) return false;
  if (!rounds) one.rounding = one.whole = two.rounding = two.whole = (mm_cu_rounding){0};
  row r = {0};
  find_ranges(&r, d, (mm_cu_task){.w = &one, .w2 = w2 ? &two : NULL, .top_k = top_k});
  uint32_t i = first;
  while (i < all->count && !same_ranges(&all->at[i], &r)) i++;
  if (i == MOST_ROWS) return false;
  if (i == all->count) snprintf(r.schemes, sizeof r.schemes, "%s", w->scheme->name), all->at[all->count++] = r;
  append(all->at[i].products, sizeof all->at[i].products, product);
  return true;
}

/* The rows from `first` on that differ from an earlier one by the scheme alone go into that. */
static void merge(rows *all, uint32_t first) {
  uint32_t kept = first;
  for (uint32_t i = first; i < all->count; i++) {
    const row r = all->at[i];
    uint32_t j = 0;
    while (j < first && (strcmp(all->at[j].products, r.products) != 0 || !same_ranges(&all->at[j], &r))) j++;
    if (j < first)
      append(all->at[j].schemes, sizeof all->at[j].schemes, r.schemes);
    else
      all->at[kept++] = r;
  }
  all->count = kept;
}

/* One model's products in these schemes; NULL: not those. */
static bool add_products(rows *all, const mm_bench_args *a, const char *model, const mm_cu_device *d, const char *quant,
                         const char *experts, const char *head, mm_err *err) {
  const mm_bench_shape shape = {
      model, 8, 200064, quant ? quant : "bf16", experts ? experts : "bf16", head ? head : "bf16", 0, (uint32_t)a->tp, (uint32_t)a->ep,
      0,     0, 0};
  const bool rounds = strcmp(a->act_quant, "on") == 0;
  const mm_model m = mm_bench_model(&shape);
  const uint32_t first = all->count;
  mm_rank_weights w;
  if (!mm_bench_weights(&shape, &m, &w, err)) return false;
  const mm_layer_weights *y = &w.layer[0], *last = &w.layer[m.layers - 1]; /* M1's last has full attention, its others lightning */
  bool known = !quant || m.attn[0] != MM_ATTN_LIGHTNING || add(all, first, "lightning qkv", &y->qkv, NULL, d, 0, rounds);
  known = known &&
          (!quant || (add(all, first, "qkv", &last->qkv, NULL, d, 0, rounds) &&
                      add(all, first, "gate", &y->output_gate, NULL, d, 0, rounds) && add(all, first, "out", &y->out, NULL, d, 0, rounds)));
  known = known && (!quant || (add(all, first, "shared up", &last->mlp_up, NULL, d, 0, rounds) &&
                               add(all, first, "shared down", &last->mlp_down, NULL, d, 0, rounds)));
  known = known && (!experts || add(all, first, "experts", &y->w13, &y->w2, d, m.top_k, rounds));
  known = known && (!head || add(all, first, "head", &w.head, NULL, d, 0, false)); /* its inputs are never rounded */
  if (!known) all->count = first;
  merge(all, first);
  free(w.layer);
  return true;
}

static bool add_model(rows *all, const mm_bench_args *a, const char *model, const mm_cu_device *d, mm_err *err) {
  static const char *const heads[] = {"bf16", "block_fp8"};
  const char *quant = a->quant ? a->quant : "block_fp8";
  bool ok = true;
  if (a->quant || a->experts) ok = add_products(all, a, model, d, quant, a->experts ? a->experts : quant, NULL, err);
  for (size_t i = 0; ok && !a->quant && !a->experts && mm_scheme_at(i); i++)
    ok = add_products(all, a, model, d, mm_scheme_at(i)->name, mm_scheme_at(i)->name, NULL, err);
  for (size_t i = 0; ok && i < sizeof heads / sizeof *heads; i++)
    if (!a->head || strcmp(a->head, heads[i]) == 0) ok = add_products(all, a, model, d, NULL, NULL, heads[i], err);
  return ok;
}

/* "a, b" as ["a","b"]. */
static void print_words(const char *words) {
  printf("[\"");
  for (; *words; words++) {
    if (strncmp(words, ", ", 2) == 0)
      printf("\",\""), words++;
    else
      putchar(*words);
  }
  printf("\"]");
}

static void print_object(const row *r, uint32_t i, const char *step, const mm_cu_dispatch *c, const char *model, const char *code) {
  char kernels[SHOWN];
  mm_cu_print_dispatch(c, kernels, sizeof kernels);
  printf("{\"subject\":\"choices\",\"model\":\"%s\",\"code\":\"%s\",\"products\":", model, code);
  print_words(r->products);
  printf(",\"schemes\":");
  print_words(r->schemes);
  printf(",\"step\":\"%s\",\"from\":%u", step, r->range[i].from);
  if (i + 1 < r->ranges) printf(",\"to\":%u", r->range[i + 1].from - 1);
  printf(",\"kernels\":");
  print_words(kernels);
  puts("}");
}

static void print_range(const row *r, uint32_t i) {
  char decode[SHOWN], chunk[SHOWN], tokens[32];
  const range *now = &r->range[i];
  const uint32_t to = i + 1 < r->ranges ? now[1].from - 1 : 0;
  if (to == now->from)
    snprintf(tokens, sizeof tokens, "%u", to);
  else if (to)
    snprintf(tokens, sizeof tokens, "%u to %u", now->from, to);
  else
    snprintf(tokens, sizeof tokens, "%u and more", now->from);
  mm_cu_print_dispatch(&now->decode, decode, sizeof decode);
  mm_cu_print_dispatch(&now->chunk, chunk, sizeof chunk);
  if (same(&now->decode, &now->chunk))
    printf("  %-12s %s\n", tokens, decode);
  else
    printf("  %-12s %s\n  %-12s %s\n", tokens, decode, "  prefill", chunk);
}

static void print_row(const row *r, const char *model, const char *code, bool json) {
  if (!json) printf("%s, %s: %s in %s\n", model, code, r->products, r->schemes);
  for (uint32_t i = 0; i < r->ranges; i++) {
    const bool any = same(&r->range[i].decode, &r->range[i].chunk);
    if (!json)
      print_range(r, i);
    else
      print_object(r, i, any ? "any" : "decode", &r->range[i].decode, model, code);
    if (json && !any) print_object(r, i, "prefill", &r->range[i].chunk, model, code);
  }
}

bool mm_bench_print_choices(const mm_bench_args *a, mm_err *err) {
  static const char *const models[] = {"m1", "m2", "m3"};
  rows *all = mm_calloc(1, sizeof *all, err);
  bool ok = all;
  for (size_t i = 0; ok && i < sizeof models / sizeof *models; i++)
    for (size_t j = 0; ok && (!a->model || strcmp(a->model, models[i]) == 0) && j < sizeof codes / sizeof *codes; j++) {
      all->count = 0;
      ok = add_model(all, a, models[i], &codes[j].device, err);
      for (uint32_t k = 0; ok && k < all->count; k++) print_row(&all->at[k], models[i], codes[j].name, a->json);
    }
  free(all);
  return ok;
}
