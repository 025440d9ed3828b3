/* Printing what minimax-bench measured. */
#include "runtime/bench/bench_result.h"

#include <stdio.h>
#include <stdlib.h>

#include "formats/system/base.h"

double mm_bench_median(double *x, size_t n) {
  qsort(x, n, sizeof *x, mm_by_real);
  return x[n / 2];
}

void mm_bench_print_copy(double bytes_per_s, bool json) {
  if (json)
    printf("{\"copy_bytes_per_s\":%.6g}\n", bytes_per_s);
  else
    printf("device copy %.0f GB/s, read + write\n", bytes_per_s * 1e-9);
}

/* Prints the beginning of every object. */
static void open_object(const mm_bench_result *r) {
  printf("{\"subject\":\"%s\",\"model\":\"%s\",\"tp\":%u,\"ep\":%u,\"layers\":%u,\"quant\":\"%s\",\"expert_quant\":\"%s\",\"head\":\"%s\"",
         r->c->subject, r->c->model, r->ranks, r->ep, r->layers, r->c->quant, r->c->experts, r->c->head);
  if (r->attn_tp < r->ranks) printf(",\"attn_tp\":%u", r->attn_tp);
  if (r->c->dense) printf(",\"dense_layers\":%u", r->c->dense);
  if (r->c->shrink > 1) printf(",\"shrink\":%u", r->c->shrink);
  if (r->index_fp8) printf(",\"index_fp8\":true");
  if (r->index_split) printf(",\"index_split\":%u", r->index_split);
}

/* Prints the beginning of every line. */
static void open_line(const mm_bench_result *r) {
  printf("%s", r->c->model);
  if (r->c->shrink > 1) printf(" / %u", r->c->shrink);
  if (r->ranks > 1) printf(", tp %u,", r->ranks);
  if (r->ep > 1) printf(" ep %u,", r->ep);
  if (r->attn_tp < r->ranks) printf(" attn-tp %u,", r->attn_tp);
  if (r->index_fp8) printf(" index keys fp8,");
  if (r->index_split) printf(" scan split from %u,", r->index_split);
}

void mm_bench_print_op(const mm_bench_result *r, const char *op, bool json) {
  if (json) {
    open_object(r);
    printf(",\"op\":\"%s\",\"batch\":%u,\"seconds\":%.9g", op, r->batch / r->each, r->seconds);
    if (r->each > 1) printf(",\"verify\":%u", r->each);
    if (r->bytes > 0) printf(",\"bytes\":%.0f,\"of_copy\":%.4f", r->bytes, r->bytes / r->seconds / r->copy_rate);
    if (r->reached > 0) printf(",\"experts_a_layer\":%.3f", r->reached);
    puts("}");
    return;
  }
  open_line(r);
  char each[32] = "";
  if (r->each > 1) snprintf(each, sizeof each, " x %u rows", r->each);
  printf(" %s/%s/%s B=%u%s %s: %.2f us", r->c->quant, r->c->experts, r->c->head, r->batch / r->each, each, op, r->seconds * 1e6);
  if (r->bytes > 0) printf(", %.1f MB, %.2f of copy", r->bytes * 1e-6, r->bytes / r->seconds / r->copy_rate);
  if (r->reached > 0) printf(", %.1f experts a layer", r->reached);
  printf("\n");
}

void mm_bench_print_decode(const mm_bench_result *r, bool json) {
  const double rate = r->batch / r->seconds;
  if (json) {
    open_object(r);
    printf(",\"batch\":%u,\"context\":%u,\"kv_fp8\":%s,\"seconds\":%.9g,\"tokens_per_s\":%.6g", r->batch / r->each, r->c->context,
           r->kv_fp8 ? "true" : "false", r->seconds, rate);
    if (r->each > 1) printf(",\"verify\":%u", r->each);
    printf(",\"experts_a_layer\":%.3f,\"bytes\":%.0f,\"floor_s\":%.9g", r->reached, r->bytes, r->floor_s);
    if (r->wire > 0) printf(",\"wire_bytes\":%.0f", r->wire);
    if (r->gather[0] > 0)
      printf(",\"gather_bytes\":%.0f,\"gather_fp8_bytes\":%.0f,\"gather_nvfp4_bytes\":%.0f", r->gather[0], r->gather[1], r->gather[2]);
    puts("}");
    return;
  }
  open_line(r);
  char each[32] = "";
  if (r->each > 1) snprintf(each, sizeof each, " x %u rows", r->each);
  printf(" x %u %s/%s/%s, decode B=%u%s context %u%s: %.1f us, %.1f tokens/s, %.1f experts a layer, %.3f GB, floor %.1f us, %.2f x floor",
         r->layers, r->c->quant, r->c->experts, r->c->head, r->batch / r->each, each, r->c->context, r->kv_fp8 ? " fp8" : "",
         r->seconds * 1e6, rate, r->reached, r->bytes * 1e-9, r->floor_s * 1e6, r->seconds / r->floor_s);
  if (r->wire > 0) printf(", %.2f MB of rows sent", r->wire * 1e-6);
  if (r->gather[0] > 0)
    printf(", of them %.2f gathered (%.2f as FP8, %.2f as NVFP4)", r->gather[0] * 1e-6, r->gather[1] * 1e-6, r->gather[2] * 1e-6);
  printf("\n");
}

void mm_bench_print_prefill(const mm_bench_result *r, bool json) {
  const double rate = r->c->tokens / r->seconds;
  if (json) {
    open_object(r);
    printf(",\"tokens\":%u,\"seconds\":%.9g,\"tokens_per_s\":%.6g,\"floor_s\":%.9g", r->c->tokens, r->seconds, rate, r->floor_s);
    printf(",\"floor_fp8_ops_per_s\":%.6g,\"floor_bf16_ops_per_s\":%.6g,\"floor_attention_ops_per_s\":%.6g}\n", r->rate[0], r->rate[1],
           r->rate[2]);
    return;
  }
  open_line(r);
  printf(" x %u %s/%s/%s, prefill T=%u: %.2f ms, %.2f ms a layer, %.0f tokens/s, floor %.2f ms, %.2f of it", r->layers, r->c->quant,
         r->c->experts, r->c->head, r->c->tokens, r->seconds * 1e3, r->seconds * 1e3 / r->layers, rate, r->floor_s * 1e3,
         r->floor_s / r->seconds);
  printf("; assumed: FP8 %.2f, BF16 %.2f, attention %.2f PFLOP/s\n", r->rate[0] * 1e-15, r->rate[1] * 1e-15, r->rate[2] * 1e-15);
}

/* Published lengths of drafts for M2: tokens that a step of eight rows gives with a DFlash draft, of four with an EAGLE-3 draft, the
 * target's own among them. */
static const double lengths[2][2] = {{3.9, 2.6}, {2.94, 2.6}};
static const uint32_t blocks[2] = {8, 4};
enum { LENGTHS = 2 };

static double tokens_of(double chance, uint32_t rows) {
  double sum = 0;
  for (uint32_t i = 0; i < rows; i++) sum = sum * chance + 1;
  return sum;
}

/* Tokens of a step of `rows` rows, where each proposal behind right ones is right with the chance that gives `length` tokens for `block`
 * rows: 1 + p + p² + … */
static double expected_tokens(double length, uint32_t block, uint32_t rows) {
  double low = 0, high = 1;
  for (int i = 0; i < 50; i++) {
    const double middle = (low + high) / 2;
    if (tokens_of(middle, block) < length)
      low = middle;
    else
      high = middle;
  }
  return tokens_of(low, rows);
}

void mm_bench_print_drafts(const mm_bench_result *r, double draft_s, double plain_s, bool chain, bool json) {
  const uint32_t sequences = r->batch / r->each;
  if (json) {
    open_object(r);
    printf(",\"batch\":%u,\"context\":%u,\"kv_fp8\":%s,\"rows\":%u,\"seconds\":%.9g", sequences, r->c->context,
           r->kv_fp8 ? "true" : "false", r->each, r->seconds);
    printf(",\"draft_quant\":\"%s\",\"draft_bytes\":%.0f,\"draft_floor_s\":%.9g", r->draft_quant, r->bytes, r->floor_s);
    printf(",\"draft_s\":%.9g,\"plain_s\":%.9g,\"experts_a_layer\":%.3f,\"drafted\":[", draft_s, plain_s, r->reached);
  } else {
    open_line(r);
    printf(" x %u %s/%s/%s, drafts in %s B=%u x %u rows context %u%s: %.1f us", r->layers, r->c->quant, r->c->experts, r->c->head,
           r->draft_quant, sequences, r->each, r->c->context, r->kv_fp8 ? " fp8" : "", r->seconds * 1e6);
    printf(", the draft %.1f of them, floor %.1f; plain %.1f us; %.1f experts a layer", draft_s * 1e6, r->floor_s * 1e6, plain_s * 1e6,
           r->reached);
  }
  for (int i = 0; i < LENGTHS; i++) {
    const double tokens = expected_tokens(lengths[chain][i], blocks[chain], r->each), rate = tokens * sequences / r->seconds,
                 ratio = tokens * plain_s / r->seconds;
    if (json)
      printf("%s{\"length\":%.1f,\"tokens_a_step\":%.3f,\"tokens_per_s\":%.6g,\"of_plain\":%.4f}", i ? "," : "", lengths[chain][i], tokens,
             rate, ratio);
    else
      printf("; length %.1f: %.2f tokens, %.1f tokens/s, %.2f x plain", lengths[chain][i], tokens, rate, ratio);
  }
  puts(json ? "]}" : "");
}

void mm_bench_print_attention(const mm_bench_result *r, const double part_s[3], const double ops[2], bool json) {
  const double sparse = part_s[0] + part_s[1];
  if (json) {
    open_object(r);
    printf(",\"context\":%u,\"tokens\":%u,\"selection_s\":%.9g,\"chosen_blocks_s\":%.9g", r->c->context, r->c->tokens, part_s[0],
           part_s[1]);
    printf(",\"full_s\":%.9g,\"chosen_blocks_ops\":%.6g,\"full_ops\":%.6g}\n", part_s[2], ops[0], ops[1]);
    return;
  }
  open_line(r);
  printf(
      ", attention of a layer, a prompt of %u in chunks of %u: selection %.2f ms, chosen blocks %.2f ms (%.0f TFLOP/s); over all %.2f ms "
      "(%.0f TFLOP/s), %.2f x both\n",
      r->c->context, r->c->tokens, part_s[0] * 1e3, part_s[1] * 1e3, ops[0] / part_s[1] * 1e-12, part_s[2] * 1e3,
      ops[1] / part_s[2] * 1e-12, part_s[2] / sparse);
}

void mm_bench_print_mixed(const mm_bench_result *r, const double seconds[3], bool json) {
  if (json) {
    open_object(r);
    printf(",\"batch\":%u,\"context\":%u,\"tokens\":%u,\"seconds\":%.9g", r->batch, r->c->context, r->c->tokens, seconds[2]);
    printf(",\"decode_alone_s\":%.9g,\"prefill_alone_s\":%.9g}\n", seconds[0], seconds[1]);
    return;
  }
  open_line(r);
  printf(" x %u %s/%s/%s, %u tokens of context %u with a prefill chunk of %u: %.1f us; alone %.1f and %.1f us, ratio %.3f\n", r->layers,
         r->c->quant, r->c->experts, r->c->head, r->batch, r->c->context, r->c->tokens, seconds[2] * 1e6, seconds[0] * 1e6,
         seconds[1] * 1e6, seconds[2] / (seconds[0] + seconds[1]));
}
