/* minimax-verify: proves a packed checkpoint, or an unsharded one of ours, alone or against its source. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "convert/report/exact.h"
#include "convert/report/report_error.h"
#include "convert/source/locate.h"
#include "convert/source/packed_agrees.h"
#include "formats/option.h"
#include "formats/system/bar.h"
#include "formats/system/file.h"
#include "formats/system/pool.h"
#include "loader/archive/signature.h"
#include "loader/bind.h"
#include "loader/companions.h"
#include "loader/dflash.h"
#include "loader/verify.h"
#include "loader/verify_unsharded.h"
#include "runtime/text/tokenizer.h"

#define NO_SEED UINT64_MAX

/* Each does what the one before does, and more. */
typedef enum mm_verify_level { MM_LEVEL_HEADER, MM_LEVEL_SAMPLE, MM_LEVEL_FULL, MM_LEVEL_SOURCE } mm_verify_level;

typedef struct mm_verify_args {
  const char *dir, *source, *level_word, *key, *report, *divergence, *draft;
  mm_verify_level level;
  double min_sqnr;
  uint64_t threads, samples, seed;
  bool json, list, quiet, force;
} mm_verify_args;

static bool print_errors(const mm_verify_args *a, const mm_error_report *r, mm_err *err) {
  size_t exact = mm_report_exact(r);
  mm_bar_clear();
  if (a->json) return mm_program_json(mm_report_json(r), true, err);
  fputs("against ", stdout);
  mm_show_to(stdout, a->source);
  printf(": %zu of %zu tensors exact", exact, r->count);
  if (r->absent) printf("; %zu tensors are not in this directory", r->absent);
  puts("");
  size_t shown = a->list ? r->count : mm_min(5, r->count - exact);
  for (size_t i = 0; i < shown; i++) {
    char name[512];
    mm_show(name, sizeof name, r->row[i].name);
    printf("  %-60s SQNR %6.2f dB  max |error| %.3g\n", name, mm_sqnr_db(&r->row[i].e), r->row[i].e.max_abs);
  }
  return true;
}

/* The rows are ranked: the first is the worst. */
static bool good_enough(const mm_verify_args *a, const mm_error_report *r, mm_err *err) {
  if (r->count == 0 || !(mm_sqnr_db(&r->row[0].e) < a->min_sqnr)) return true;
  return mm_program_written(err) &&
         mm_fail(err, MM_INTEGRITY, "E_SQNR", mm_at(a->dir, r->row[0].name),
                 "found SQNR %.2f dB against the source, expected at least %.2f", mm_sqnr_db(&r->row[0].e), a->min_sqnr);
}

/* NULL: only checks whether it can be written. */
MM_OWN_FRAME static bool write_report(const mm_verify_args *a, const mm_error_report *r, mm_err *err) {
  mm_arena arena = {0};
  const char *found = mm_source_locate(a->source, &arena, MM_IGNORED); /* the comparison reports a missing source */
  const mm_output_place place = {
      .path = a->report, MM_OUTPUT_INPUTS(a->dir, a->source, found, a->key, a->divergence, a->draft), .force = a->force, .stream = true};
  const bool ok = r ? mm_report_write(place, r, err) : mm_report_place_ok(place, err);
  mm_arena_close(&arena);
  return ok;
}

/* --divergence, of a checkpoint with the report's manifest; mm_json_free(*out). */
static bool read_divergence(const mm_verify_args *a, mm_error_report *r, mm_json **out, mm_err *err) {
  const bool ok = !a->divergence || mm_report_divergence_read(out, a->divergence, a->dir, r->manifest, err);
  r->divergence = *out;
  return ok;
}

/* Shows the errors and writes the report. */
static bool report_errors(const mm_verify_args *a, mm_error_report *r, mm_err *err) {
  mm_report_rank(r);
  return print_errors(a, r, err) && (!a->report || write_report(a, r, err)) && good_enough(a, r, err);
}

/* As a conversion does; a tokenizer that gives no image gives none here. */
static bool bake_tokenizer(const char *path, uint32_t vocab, const mm_digest *source, uint8_t **image, size_t *n, mm_err *err) {
  mm_err reason = {0};
  if (mm_tokenizer_bake(path, vocab, source, image, n, &reason)) return true;
  *image = NULL;
  *n = 0;
  return reason.status == MM_BAD_INPUT || reason.status == MM_UNSUPPORTED || mm_fail_as(err, &reason);
}

static bool same_draft(const mm_verify_args *a, const mm_plan *plan, const mm_pack *p, mm_err *err) {
  bool compared;
  if (!mm_exact_draft(plan, p, a->draft, &compared, err)) return false;
  if (!a->quiet && !compared && mm_pack_find_file(p, MM_DFLASH_FILE))
    fputs("note: the draft is not compared, as this source has none; --draft DIR names its own\n", stderr);
  return true;
}

/* Weights of ranks that are not in the directory are neither read nor judged, as in a conversion of some ranks. */
static void want_ranks(mm_plan *plan, const mm_pack *p) {
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++) plan->wanted[r] = p->rank[r].part_count > 0;
}

MM_OWN_FRAME static bool against_source(const mm_verify_args *a, const mm_shards *s, mm_err *err) {
  mm_hf hf = {0};
  mm_plan plan = {0};
  mm_hf_options ho = {.allow_outside_links = true, .allow_nonfinite = true, .one_thread = a->threads == 1};
  mm_plan_options po = {.quant = s->pack.quant,
                        .made = true,
                        .placed = &s->pack,
                        .tp = s->pack.tp,
                        .ep = s->pack.ep,
                        .pp = s->pack.pp,
                        .attn_tp = s->pack.attn_tp,
                        .align = s->pack.tp_align,
                        .part_size = UINT64_MAX / 2};
  size_t n = s->pack.tensor_count;
  mm_tensor_error *e = mm_calloc(n, sizeof *e, err);
  const mm_hex planned = mm_digest_hex(&s->pack.plan);
  mm_hex manifest;
  mm_error_report r = {.dir = a->dir,
                       .source = a->source,
                       .quant = s->pack.quant,
                       .row = mm_calloc(n, sizeof *r.row, err),
                       .tool = s->pack.tool,
                       .manifest = manifest.text,
                       .plan = planned.text};
  mm_json *divergence = NULL;
  const bool begun = e && r.row && mm_manifest_hex(&s->pack, &manifest, err) && read_divergence(a, &r, &divergence, err);
  bool ok = begun && mm_hf_open(&hf, a->source, &ho, err) && mm_plan_build(&plan, &hf, &po, err) && mm_compare_plan(&plan, s, err);
  if (ok) want_ranks(&plan, &s->pack);
  ok = ok && mm_exact_words(&plan, &s->pack, err) && mm_companions_same(&plan, &s->pack, bake_tokenizer, MM_TOKENIZER_IMAGE, err) &&
       same_draft(a, &plan, &s->pack, err) && mm_exact_weights(&plan, s, (unsigned)a->threads, err) &&
       mm_compare(&plan, s, (unsigned)a->threads, e, err) && mm_exact_bounds(&plan, s, e, err);
  if (begun && !ok && err->status == MM_USAGE) err->status = MM_UNSUPPORTED; /* the manifest's words, not the user's */
  for (size_t i = 0; ok && i < n; i++)
    if (e[i].count > 0) r.row[r.count++] = (mm_error_row){s->pack.tensor[i].name, s->pack.tensor[i].scheme, e[i], i};
  r.absent = n - r.count;
  ok = ok && report_errors(a, &r, err);
  MM_FREE(r.row, e);
  mm_json_free(divergence);
  mm_plan_close(&plan);
  mm_hf_close(&hf);
  return ok;
}

/* The figures of a verification, for its summary. */
typedef struct mm_looked {
  const mm_pack *p;
  bool unsharded;
  size_t blocks, hashed; /* of 4 MiB: in all, and those whose digest was compared */
  uint64_t bytes;
  double seconds; /* that hashing took */
} mm_looked;

static void count_parts(mm_looked *l, const mm_verify_args *a) {
  for (uint32_t r = 0; r < mm_pack_ranks(l->p); r++)
    for (size_t i = 0; i < l->p->rank[r].part_count; i++) {
      const mm_part *part = &l->p->rank[r].part[i];
      l->blocks += part->block_count;
      l->bytes += part->size;
      if (a->level >= MM_LEVEL_SAMPLE) l->hashed += mm_min(part->block_count, a->level == MM_LEVEL_SAMPLE ? a->samples : UINT64_MAX);
    }
}

/* "2 ranks", or "ranks 0,2-3 of 8" where files of others are not in the directory. */
static void print_ranks(const mm_pack *p) {
  const uint32_t all = mm_pack_ranks(p);
  uint32_t here = 0;
  for (uint32_t r = 0; r < all; r++) here += p->rank[r].part_count > 0;
  if (here == all) {
    fprintf(stderr, "%u ranks", all);
    return;
  }
  const char *before = "ranks ";
  for (uint32_t r = 0, end; r < all; r = end) {
    for (end = r; end < all && p->rank[end].part_count > 0;) end++;
    if (end == r) {
      end++;
      continue;
    }
    fprintf(stderr, end - r > 1 ? "%s%u-%u" : "%s%u", before, r, end - 1);
    before = ",";
  }
  fprintf(stderr, " of %u", all);
}

/* And what that proves. */
static void print_summary(const mm_verify_args *a, const mm_looked *l) {
  static const char *const word[] = {"headers of", "headers and a sample of", "verified", "verified"};
  fprintf(stderr, "%s ", word[a->level]);
  mm_show_to(stderr, a->dir);
  fputs(": ", stderr);
  if (l->unsharded)
    fprintf(stderr, "unsharded, %zu files, %.3f GB; ", l->p->rank->part_count + l->p->file_count, (double)l->bytes / 1e9);
  else {
    print_ranks(l->p);
    fprintf(stderr, ", %zu tensors, %zu blocks, %.3f GB; ", l->p->tensor_count, l->blocks, (double)l->bytes / 1e9);
  }
  if (a->level == MM_LEVEL_SAMPLE) fprintf(stderr, "%zu blocks hashed, --seed %llu; ", l->hashed, (unsigned long long)a->seed);
  if (a->level >= MM_LEVEL_FULL) fprintf(stderr, "SHA-256 at %.2f GB/s; ", (double)l->bytes / l->seconds / 1e9);
  fputs(a->key ? "signed with the key given\n" : l->unsharded ? "integrity only\n" : "integrity only, no signature checked\n", stderr);
}

/* The same as JSON on stdout; with --source, the errors of tensors stand there instead. */
static bool print_looked(const mm_verify_args *a, const mm_looked *l, mm_err *err) {
  static const char *const word[] = {"header", "sample", "full", "source"};
  mm_json *o = MM_JSON_NEW({"checkpoint", mm_json_new_path(a->dir)}, {"kind", mm_json_new_str(l->unsharded ? "unsharded" : "packed")},
                           {"level", mm_json_new_str(word[a->level])}, {"quant", mm_json_new_str(l->p->quant)},
                           {"ranks", mm_json_new_int(mm_pack_ranks(l->p))});
  mm_json *absent = NULL;
  for (uint32_t r = 0; r < mm_pack_ranks(l->p); r++) {
    if (l->p->rank[r].part_count > 0) continue;
    if (!absent) absent = mm_json_put_list(o, "absent_ranks");
    mm_json_append(absent, mm_json_new_int(r));
  }
  MM_JSON_PUT(o, {"bytes", mm_json_new_u64(l->bytes)}, {"blocks", mm_json_new_u64(l->blocks)},
              {"hashed_blocks", mm_json_new_u64(l->hashed)});
  if (a->level == MM_LEVEL_SAMPLE) mm_json_put_int(o, "seed", a->seed);
  mm_json_set(o, "signed", mm_json_new_bool(a->key != NULL));
  return mm_program_json(o, true, err);
}

MM_OWN_FRAME static bool say(const mm_verify_args *a, const mm_looked *l, mm_err *err) {
  if (!a->quiet) print_summary(a, l);
  return !a->json || a->source || print_looked(a, l, err);
}

MM_OWN_FRAME static bool check_signature(const mm_verify_args *a, const mm_pack *p, mm_err *err) {
  mm_key *key = mm_key_open(a->key, false, err);
  bool ok = key && mm_signature_check(p, key, err);
  mm_key_close(key);
  return ok;
}

/* Plans `made` from its source again: from that alone, or, where that is what it was made from, from a packed checkpoint of it. A target
 * format may fit one of the two alone: experts of one layer have groups of several sizes in a source, but not in a packed checkpoint. */
static bool plan_unsharded(mm_plan *plan, mm_hf *hf, mm_plan_options *o, const mm_made *made, mm_err *err) {
  mm_plan_options po = *o;
  mm_plan packed = {0}, from = {0};
  mm_err own = {0}, reason = {0};
  const bool planned = mm_plan_build(plan, hf, o, &own);
  po.layout = &mm_layout_packed, po.target_format = NULL;
  o->packed = &packed;
  const bool other = !hf->manifest && mm_plan_build(&packed, hf, &po, &reason) && mm_plan_build(&from, hf, o, &reason);
  o->packed = NULL;
  const bool lacks = strcmp(own.code, "E_ACT_SCALES") == 0; /* what the checkpoint itself must have */
  bool ok = planned || other || (lacks ? mm_fail_damaged(err, &own) : mm_fail_as(err, &own)), from_packed = !planned && other;
  if (planned && other) ok = mm_exact_from_packed(plan, &from, made, &from_packed, err);
  if (from_packed) {
    mm_plan_close(plan);
    *plan = from, from = (mm_plan){0};
  }
  mm_plan_close(&packed);
  mm_plan_close(&from);
  return ok;
}

/* Opens the unsharded checkpoint itself, whose index and headers must agree: malformed files are damage here, not a bad source. NaN is not
 * allowed, as a conversion stores 0 where its source was not finite. */
MM_OWN_FRAME static bool open_made(mm_hf *made, const mm_verify_args *a, const mm_pack *p, mm_err *err) {
  const mm_hf_options o = {.allow_outside_links = true, .one_thread = a->threads == 1};
  mm_err reason = {0};
  return (mm_hf_open(made, a->dir, &o, &reason) || mm_fail_damaged(err, &reason)) && mm_exact_index(made, p, err);
}

/* Where the recipe took static scales of activations from a file, the plan has those of the checkpoint: the file is not at hand. */
static bool scales_of_made(mm_act_scales *s, mm_plan_options *o, const mm_hf *made, mm_err *err) {
  mm_recipe recipe = {0};
  bool ok = mm_recipe_parse_normal(&recipe, o->quant, err);
  if (ok && recipe.act_scales) {
    ok = mm_exact_input_scales(s, made, err);
    o->act_scales = s;
  }
  mm_recipe_close(&recipe);
  return ok;
}

MM_OWN_FRAME static bool unsharded_against_source(const mm_verify_args *a, mm_hf *made, const mm_pack *p, mm_err *err) {
  mm_hf hf = {0};
  mm_act_scales scales = {0};
  mm_plan plan = {0};
  mm_hf_options ho = {.allow_outside_links = true, .allow_nonfinite = true, .one_thread = a->threads == 1};
  mm_plan_options po = {.quant = p->quant,
                        .made = true,
                        .tp = 1,
                        .ep = 1,
                        .pp = 1,
                        .layout = &mm_layout_hf,
                        .target_format = p->target_format,
                        .part_size = UINT64_MAX / 2};
  const mm_hex laid = mm_digest_hex(&p->plan);
  mm_hex self;
  mm_error_report r = {
      .dir = a->dir, .source = a->source, .quant = p->quant, .tool = p->tool, .manifest = self.text, .plan = laid.text, .unscaled = true};
  mm_json *divergence = NULL;
  const bool begun = mm_manifest_hex(p, &self, err) && read_divergence(a, &r, &divergence, err);
  bool ok = begun && mm_hf_open(&hf, a->source, &ho, err) && scales_of_made(&scales, &po, made, err) &&
            plan_unsharded(&plan, &hf, &po, &(mm_made){made, p}, err) && mm_exact_words(&plan, p, err) &&
            mm_exact_texts(&plan, made, p, err) && mm_companions_same(&plan, p, NULL, MM_TOKENIZER_IMAGE, err) &&
            mm_exact_unsharded(&plan, made, p, (unsigned)a->threads, err) &&
            mm_compare_unsharded(&plan, &(mm_made){made, p}, (unsigned)a->threads, &r.row, &r.count, err);
  if (begun && !ok && err->status == MM_USAGE) err->status = MM_UNSUPPORTED; /* the digests' words, not the user's */
  ok = ok && report_errors(a, &r, err);
  free(r.row);
  mm_json_free(divergence);
  mm_plan_close(&plan);
  mm_act_scales_close(&scales);
  mm_hf_close(&hf);
  return ok;
}

/* Verifies the output of minimax-convert --layout hf by the digests file in its directory. */
MM_OWN_FRAME static bool verify_unsharded(const mm_verify_args *a, mm_bar *bar, mm_err *err) {
  mm_pack p = {0};
  mm_hf made = {0};
  size_t seen = 0;
  mm_dir d = mm_dir_open(a->dir);
  uint32_t samples = a->level >= MM_LEVEL_FULL ? UINT32_MAX : (uint32_t)a->samples;
  bool ok = mm_digests_open(&p, a->dir, err) && mm_unsharded_listing(&p, err);
  if (ok && a->key)
    ok = mm_fail(err, MM_UNSUPPORTED, "E_SIGNATURE", mm_at(a->dir, NULL),
                 "found --key with an unsharded checkpoint; packed ones are signed");
  if (ok && a->draft)
    ok = mm_fail(err, MM_UNSUPPORTED, "E_DRAFT", mm_at(a->dir, NULL), "found --draft with an unsharded checkpoint, which has none");
  double start = mm_now();
  mm_bar_verb(bar, "hashing");
  ok = ok && (a->level == MM_LEVEL_HEADER || mm_unsharded_blocks(&p, samples, a->seed, (unsigned)a->threads, &seen, err));
  const double seconds = mm_now() - start;
  ok = mm_dir_close(&d, a->dir, ok && open_made(&made, a, &p, err), err);
  mm_looked looked = {.p = &p, .unsharded = true, .seconds = seconds};
  if (ok) count_parts(&looked, a);
  mm_bar_verb(bar, "comparing");
  ok = ok && say(a, &looked, err) && (a->level < MM_LEVEL_SOURCE || unsharded_against_source(a, &made, &p, err));
  mm_hf_close(&made);
  mm_pack_close(&p);
  return ok;
}

/* A fresh sample each time, unless --seed repeats one. */
static uint64_t fresh_seed(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return ((uint64_t)t.tv_sec * 1000003u + (uint64_t)t.tv_nsec) & INT64_MAX;
}

/* --source asks for its level by itself. */
static bool choose_level(mm_verify_args *a, mm_err *err) {
  static const char *const words[] = {"header", "sample", "full", "source"};
  a->level = a->source ? MM_LEVEL_SOURCE : MM_LEVEL_FULL;
  for (unsigned i = 0; a->level_word && i < sizeof words / sizeof *words; i++)
    if (strcmp(a->level_word, words[i]) == 0) a->level = (mm_verify_level)i;
  const bool sampled = a->samples > 0 || a->seed != NO_SEED;
  const char *wrong = !a->source && (a->report || isfinite(a->min_sqnr) || a->list) ? "--report, --min-sqnr and --list go with --source SRC"
                      : a->force && !a->report                                      ? "--force goes with --report FILE"
                      : a->divergence && !a->source                                 ? "--divergence goes with --source SRC"
                      : a->divergence && !a->report && !a->json                     ? "--divergence goes with --report FILE or --json"
                      : a->draft && !a->source                                      ? "--draft goes with --source SRC"
                      : a->divergence && a->report && mm_ends_with(a->report, ".csv")
                          ? "--divergence: found a .csv report, expected .json or .html"
                      : sampled && a->level != MM_LEVEL_SAMPLE ? "--samples and --seed go with --level sample"
                                                               : NULL;
  if (wrong) return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "%s", wrong);
  if (a->samples == 0) a->samples = 16;
  if (a->seed == NO_SEED) a->seed = fresh_seed();
  if (a->report && !write_report(a, NULL, err)) return false;
  if ((a->level == MM_LEVEL_SOURCE) == (a->source != NULL)) return true;
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "%s",
                 a->source ? "--source goes with --level source alone, which is its default" : "--level source goes with --source SRC");
}

static bool verify(mm_verify_args *a, mm_bar *bar, mm_err *err) {
  if (access(mm_path_of(a->dir, MM_DIGESTS).text, F_OK) == 0 && access(mm_path_of(a->dir, MM_MANIFEST).text, F_OK) != 0)
    return verify_unsharded(a, bar, err);
  mm_shards s = {0};
  unsigned threads = (unsigned)a->threads;
  bool full = a->level >= MM_LEVEL_FULL;
  bool files = a->level > MM_LEVEL_HEADER || a->key; /* what was signed are their digests */
  bool ok = mm_shards_open(&s, a->dir, err) && mm_verify_any_rank(&s.pack, err) && (!a->key || check_signature(a, &s.pack, err)) &&
            (files ? mm_verify_files(&s.pack, err) : mm_companion_sizes(&s.pack, err) && mm_verify_listing(&s.pack, err)) &&
            mm_bind_check(&s, err) && mm_dflash_check(&s.pack, full, err) && (!files || mm_packed_config(&s.pack, err));
  double start = mm_now();
  mm_bar_verb(bar, "hashing");
  if (a->level == MM_LEVEL_SAMPLE) ok = ok && mm_verify_sample(&s, (uint32_t)a->samples, a->seed, threads, err);
  if (full) ok = ok && mm_verify_blocks(&s, threads, err);
  mm_looked looked = {.p = &s.pack, .seconds = mm_now() - start};
  mm_bar_verb(bar, "checking numbers");
  if (full) ok = ok && mm_verify_numbers(&s, threads, err);
  if (ok) count_parts(&looked, a);
  mm_bar_verb(bar, "comparing");
  ok = ok && mm_shards_unchanged(&s, err) && say(a, &looked, err) &&
       (a->level < MM_LEVEL_SOURCE || (against_source(a, &s, err) && mm_shards_unchanged(&s, err)));
  mm_shards_close(&s);
  return ok;
}

static bool run(void *args, mm_err *err) {
  mm_verify_args *a = args;
  if (!choose_level(a, err)) return false;
  a->threads = mm_file_threads((unsigned)a->threads, 8, 0); /* two files of the source and of an unsharded checkpoint, each also direct */
  mm_bar *bar = mm_bar_open(a->quiet);
  mm_dir source = a->source ? mm_dir_open(a->source) : (mm_dir){-1};
  const bool ok = mm_dir_close(&source, a->source, verify(a, bar, err), err);
  mm_bar_close(bar);
  return ok;
}

int main(int argc, char **argv) {
  mm_verify_args a = {.threads = mm_pool_cpus(), .seed = NO_SEED, .min_sqnr = -(double)INFINITY};
  const mm_option options[] = {
      MM_OPTION(STR, "level", &a.level_word, "LEVEL",
                "header: manifest, headers and sizes; sample: and some blocks of every part; full: every byte and number (default); "
                "source: and the weights they were made from (default with --source)",
                .choices = "header|sample|full|source"),
      MM_OPTION(U64, "samples", &a.samples, "N", "with --level sample: blocks of 4 MiB of every part (16)", .lo = 1, .hi = UINT32_MAX),
      MM_OPTION(U64, "seed", &a.seed, "S", "with --level sample: which blocks (default: printed)", .hi = INT64_MAX),
      MM_OPTION(STR, "key", &a.key, "PUBLIC.pem", "the checkpoint must be signed with this EC key (minimax-archive sign)"),
      MM_OPTION(STR, "source", &a.source, "SRC", "also compare every weight with the checkpoint it was made from"),
      MM_OPTION(STR, "draft", &a.draft, "DIR", "with --source: the folder of the draft that minimax-convert --draft packed"),
      MM_OPTION(STR, "report", &a.report, "FILE", "with --source: errors of every tensor as .json, .csv or .html (a page of figures)"),
      MM_OPTION(STR, "divergence", &a.divergence, "FILE",
                "with --source: the output of minimax-eval DIR --against REF --json, for report and --json"),
      MM_FLAG("force", &a.force, "with --report: replace a file of that name that is no report"),
      MM_OPTION(REAL, "min-sqnr", &a.min_sqnr, "DB", "with --source: exit 6 if a tensor's SQNR is below this"),
      MM_FLAG("list", &a.list, "with --source: every tensor, worst SQNR first"),
      MM_FLAG("json", &a.json, "what was proven, with --source the error of every tensor, as JSON on stdout; errors as JSON"),
      MM_OPTION(U64, "jobs", &a.threads, "N", "threads (default: CPUs)", .letter = 'j', .lo = 1, .hi = 1024),
      MM_FLAG("quiet", &a.quiet, "no summary on stderr", .letter = 'q'),
  };
  const mm_program program = {
      MM_PROGRAM("minimax-verify",
                 "prove a checkpoint that minimax-convert made: digests, completeness, finite numbers, error against its source", "DIR", 1,
                 1, options),
      .examples =
          "minimax-verify M2-nvfp4\n"
          "minimax-verify M2-nvfp4 --level sample --samples 64\n"
          "minimax-verify M2-nvfp4 --source MiniMax-M2 --report errors.html --min-sqnr 15\n"
          "minimax-verify M2-nvfp4 --key public.pem",
      .files =
          "DIR/manifest.json  the digests of every block\n"
          "DIR/model.sig  read with --key",
      .epilog =
          "A signature is proven with the digests that it lists: with --level header that the manifest, every byte of the companions and "
          "the "
          "names of all files are the signer's, from --level full on every byte.\n\nExit status: 0 proven, 2 usage, 3 bad input, 4 "
          "unsupported, 5 I/O, "
          "6 damaged, incomplete or below --min-sqnr, 8 memory or limit.",
  };
  return mm_program_main(&program, argc, argv, &a.dir, run, &a);
}
