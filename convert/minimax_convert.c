/* minimax-convert: a Hugging Face checkpoint, or a packed one, in; a packed, pre-sharded, quantised checkpoint out. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "convert/decode/follow.h"
#include "convert/report/exact.h"
#include "convert/report/notes.h"
#include "convert/report/report.h"
#include "formats/mpi.h"
#include "formats/option.h"
#include "formats/system/pool.h"
#include "runtime/chat/chat_format.h"
#include "runtime/chat/source_notes.h"

/* Memory: the plan and the program, per thread a strip in four forms and one block, and the blocks being assembled. */
#define MEM_FIXED  (UINT64_C(64) << 20)
#define MEM_THREAD (4 * MM_STRIP_BYTES + 2 * MM_HASH_BLOCK)
#define WAITING    4

static mm_convert_progress progress;
static bool ready; /* this process met the others before its first block, or behind the plan that --dry-run prints */

/* The first signal stops in a resumable state (status 75), a second one at once; a terminal that closes may send its own twice. */
static void on_signal(int n) {
  atomic_store(&progress.stop, true);
  signal(n, n == SIGHUP ? SIG_IGN : SIG_DFL);
}

static bool is_stopped(void) { return atomic_load(&progress.stop); }

typedef struct mm_convert_args {
  const char *source, *output, *layout, *target_format, *align, *part, *ranks, *compress, *importance, *act_scales, *events, *gpu, *load,
      *kv, *index;
  struct {
    const char *dir, *quant;
  } draft;
  struct { /* which schemes: parts of a recipe */
    const char *quant, *file, *search, *method, *kv_scales, *head;
    mm_option_list ignore, override;
  } recipe;
  struct { /* of a source that is being downloaded */
    bool on, frees;
    uint64_t timeout_s, quiet_s;
  } follow;
  struct {
    uint64_t tp, ep, pp, attn_tp;
  } cut;
  uint64_t threads, part_size, commit_bytes, mem_limit;
  mm_gpu_demand demand;        /* of --gpu-memory, --kv-cache-dtype and --index-cache-dtype */
  int level;                   /* of compress, 0 without */
  uint32_t process, processes; /* of mpirun */
  bool dry_run, names_only, list, json, quiet, force, outside, nonfinite, resume, restart, unmatched, print_recipe;
} mm_convert_args;

/* --quant (a scheme, a preset or a recipe line) or --recipe, then --search, --method, --kv-scales, --ignore, --override and --head, as one
 * line. */
static char *recipe_line(const mm_convert_args *a, mm_arena *arena, mm_err *err) {
  if (a->recipe.head && strpbrk(a->recipe.head, ";="))
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL),
                   "--head: found \"%s\", expected the name of a scheme (--quant help lists them)", a->recipe.head),
           NULL;
  const bool ok = mm_recipe_options_ok("ignore", a->recipe.ignore.item, a->recipe.ignore.count, false, err) &&
                  mm_recipe_options_ok("override", a->recipe.override.item, a->recipe.override.count, true, err);
  const char *base = !ok ? NULL : a->recipe.file ? mm_recipe_load(arena, a->recipe.file, err) : a->recipe.quant;
  if (!base) return NULL;
  const char *preset = mm_recipe_preset(base);
  char *line = mm_arena_printf(arena, err, "%s", preset ? preset : base);
  if (line && a->recipe.search) line = mm_arena_printf(arena, err, "%s; search=%s", line, a->recipe.search);
  if (line && a->recipe.method) line = mm_arena_printf(arena, err, "%s; method=%s", line, a->recipe.method);
  if (line && a->recipe.kv_scales) line = mm_arena_printf(arena, err, "%s; kv_scales=%s", line, a->recipe.kv_scales);
  for (size_t i = 0; line && i < a->recipe.ignore.count; i++)
    line = mm_arena_printf(arena, err, "%s; %s=none", line, a->recipe.ignore.item[i]);
  for (size_t i = 0; line && i < a->recipe.override.count; i++)
    line = mm_arena_printf(arena, err, "%s; %s", line, a->recipe.override.item[i]);
  if (line && a->recipe.head) line = mm_arena_printf(arena, err, "%s; lm_head.weight=%s", line, a->recipe.head);
  return line;
}

/* Prints the texts that need no checkpoint: --quant help, --print-recipe. */
static bool print_words(const mm_convert_args *a, bool *printed, mm_err *err) {
  mm_arena arena = {0};
  mm_recipe recipe = {0};
  bool ok = true, help = !a->recipe.file && (strcmp(a->recipe.quant, "help") == 0 || strcmp(a->recipe.quant, "list") == 0);
  *printed = help || a->print_recipe;
  if (help && a->json) {
    char *text = mm_recipe_help_json(err);
    ok = text;
    if (text) puts(text);
    free(text);
  } else if (help) {
    mm_recipe_help(stdout);
  } else if (a->print_recipe) {
    const char *line = recipe_line(a, &arena, err);
    char *text = line && mm_recipe_parse(&recipe, line, err) ? mm_recipe_text(&recipe, err) : NULL;
    ok = text;
    if (text) puts(text);
    free(text);
  }
  mm_recipe_close(&recipe);
  mm_arena_close(&arena);
  return ok && (!*printed || mm_program_written(err));
}

/* The files that calibrate a conversion; each is open where its path is set. */
typedef struct mm_calibration_files {
  mm_importance importance;
  mm_act_scales act_scales;
} mm_calibration_files;

/* The recipe names them by what they hold, so that a resumed run knows another file from the same; and it says whether numbers may be
 * lost. */
static char *open_calibration(const mm_convert_args *a, mm_calibration_files *c, char *line, mm_arena *arena, mm_err *err) {
  if (line && a->importance) {
    if (!mm_importance_open(&c->importance, a->importance, err)) return NULL;
    line = mm_arena_printf(arena, err, "%s; importance=%s", line, mm_digest_hex(&c->importance.digest).text);
  }
  if (line && a->act_scales) {
    if (!mm_act_scales_open(&c->act_scales, a->act_scales, err)) return NULL;
    line = mm_arena_printf(arena, err, "%s; act_scales=%s", line, mm_digest_hex(&c->act_scales.digest).text);
  }
  if (line && a->nonfinite) line = mm_arena_printf(arena, err, "%s; nonfinite=zero", line);
  return line;
}

static void print_waiting(const char *name) {
  fputs("waiting for ", stderr), mm_show_to(stderr, name), fputs(", which the plan needs\n", stderr);
}

/* Opens the source; one that is being downloaded as soon as its config and index, or its only file, are there. */
static bool open_source(const mm_convert_args *a, mm_hf *hf, mm_err *err) {
  const mm_follow_options fo = {.timeout_s = (double)a->follow.timeout_s,
                                .quiet_s = (double)a->follow.quiet_s,
                                .frees = a->follow.frees,
                                .target = a->resume ? a->output : NULL,
                                .stop = &progress.stop,
                                .waiting = a->quiet ? NULL : print_waiting};
  mm_hf_options ho = {.allow_outside_links = a->outside,
                      .names_only = a->names_only,
                      .allow_nonfinite = a->nonfinite,
                      .for_plan = true,
                      .dry_run = a->dry_run,
                      .one_thread = a->threads == 1};
  bool single = false, came = false;
  if (a->follow.on && !mm_follow_texts(a->source, &fo, &single, err)) return false;
  if (a->follow.on && !single) ho.names_only = true;
  if (!mm_hf_open(hf, a->source, &ho, err) || (a->follow.on && !mm_follow_description(hf, &fo, &came, err))) return false;
  if (came) mm_hf_close(hf);
  if ((came && !mm_hf_open(hf, a->source, &ho, err)) || (a->follow.on && !mm_follow_open(hf, &fo, err))) return false;
  if (a->quiet || a->process != 0 || strcmp(a->source, hf->dir) == 0) return true;
  return fputs("source: ", stderr), mm_show_to(stderr, hf->dir), fputs("\n", stderr), true;
}

/* The inputs of a plan. --follow makes it twice. */
typedef struct mm_planning {
  mm_calibration_files calibration;
  mm_plan_options options;
} mm_planning;

static bool make_plan(const mm_convert_args *a, mm_hf *hf, mm_planning *planning, mm_plan *plan, mm_verdict *verdict, mm_err *err) {
  mm_calibration_files *c = &planning->calibration;
  if (!open_source(a, hf, err)) return false;
  char *line = open_calibration(a, c, recipe_line(a, &hf->arena, err), &hf->arena, err);
  char *recipe = line ? mm_recipe_line(&hf->arena, line, err) : NULL;
  if (!recipe) return false;
  mm_align align = MM_ALIGN_SPLIT;
  mm_align_find(a->align, &align); /* one of its words */
  planning->options = (mm_plan_options){.quant = recipe,
                                        .tp = (uint32_t)a->cut.tp,
                                        .ep = (uint32_t)a->cut.ep,
                                        .pp = (uint32_t)a->cut.pp,
                                        .attn_tp = (uint32_t)a->cut.attn_tp,
                                        .part_size = a->part_size || a->follow.frees ? a->part_size : MM_PART_SIZE,
                                        .ranks = a->ranks,
                                        .layout = strcmp(a->layout, mm_layout_hf.word) == 0 ? &mm_layout_hf : &mm_layout_packed,
                                        .target_format = a->target_format,
                                        .load = a->load,
                                        .allow_unmatched = a->unmatched,
                                        .importance = a->importance ? &c->importance : NULL,
                                        .act_scales = a->act_scales ? &c->act_scales : NULL,
                                        .align = align};
  mm_err reason = {0};
  if (!mm_plan_build(plan, hf, &planning->options, &reason)) /* of types that the files would say */
    return mm_follow_comparable(hf, err) && mm_fail_as(err, &reason);
  if (a->gpu && !mm_verdict_make(verdict, plan, hf, &planning->options, &a->demand, err)) return false;
  if (!a->quiet && a->process == 0) mm_report_notes(stderr, hf, plan);
  if (!a->quiet && a->process == 0 && !a->names_only && !a->follow.on) {
    mm_report_absent(stderr, hf, mm_chat_format_given(hf->dir));
    if (plan->layout->extras) mm_source_notes(stderr, hf->dir, plan->pack.model.vocab);
  }
  if (a->follow.frees && !a->part_size && !a->quiet)
    fprintf(stderr, "note: --part-size %llu, by the size of the output\n", (unsigned long long)plan->part_size);
  if (a->follow.frees && !mm_follow_proven(hf) && !a->quiet)
    fputs("note: the index's total_size does not prove the plan yet: no file is freed before headers do\n", stderr);
  if (!a->names_only || !mm_hf_total_known(hf) || hf->total_size == plan->source_bytes) return true;
  return mm_fail(
      err, MM_BAD_INPUT, "E_IDX", mm_at(hf->dir, NULL),
      "found total_size %llu in the index, expected %llu by the types of the released model; without --names-only headers say them",
      (unsigned long long)hf->total_size, (unsigned long long)plan->source_bytes);
}

/* "zstd" or "zstd:LEVEL". */
static bool parse_compress(const char *text, int *level, mm_err *err) {
  int end = 0;
  *level = 1;
  if (strcmp(text, "zstd") == 0) return true;
  if (strspn(text, "zstd:0123456789") == strlen(text) && sscanf(text, "zstd:%2d%n", level, &end) == 1 && text[end] == 0 && *level >= 1 &&
      *level <= MM_FRAME_LEVEL_MAX)
    return true;
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                 "--compress: found \"%s\", expected zstd or zstd:LEVEL with LEVEL from 1 to %d", text, MM_FRAME_LEVEL_MAX);
}

/* Bytes that a thread needs for second moments; with coupled rows also for strips of whole blocks of them. */
static uint64_t moment_bytes(const mm_plan *p) {
  uint64_t most = 0;
  for (uint32_t i = 0; i < p->pack.tensor_count; i++)
    most = mm_max(most, mm_moments_bytes(&p->tensor[i].moments, p->pack.tensor[i].piece_count, mm_plan_strip_rows(p, i)));
  return most;
}

/* Threads, and how many output blocks may be assembled at once, within the limit. Without --jobs the threads are as many as the CPUs and
 * WAITING more, since each waits for the disk in its turn, but no more than the limit has room for. The default limit grows with what
 * compression needs at its level. */
static bool divide_memory(const mm_convert_args *a, const mm_plan *plan, int level, unsigned *threads, size_t *buffers, mm_err *err) {
  uint64_t fixed = MEM_FIXED * (strcmp(a->layout, "hf") == 0 ? 2 : 1); /* a tensor for each expert */
  uint64_t lane = (level > 0 ? mm_archive_lane_bytes(level) : 0) + moment_bytes(plan), each = MEM_THREAD + lane, limit, need;
  uint64_t n = a->threads ? a->threads : mm_pool_cpus() + WAITING;
  for (;; n--) {
    limit = a->mem_limit ? a->mem_limit : (UINT64_C(256) << 20) + n * ((UINT64_C(64) << 20) + lane);
    need = fixed + n * each;
    if (need <= limit || a->threads || n == 1) break;
  }
  if (limit < need)
    return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "found --mem-limit %llu, expected at least %llu for %llu threads",
                   (unsigned long long)limit, (unsigned long long)need, (unsigned long long)n);
  *threads = (unsigned)n;
  *buffers = mm_min((limit - need) / MM_HASH_BLOCK, plan->output_bytes / MM_HASH_BLOCK);
  return true;
}

/* "I/N" with I below N. */
static bool parse_shard(const char *text, uint32_t *shard, uint32_t *shards, mm_err *err) {
  int end = 0;
  const bool plain = strspn(text, "0123456789/") == strlen(text); /* no sign, no blank, which %u takes */
  if (plain && sscanf(text, "%9u/%9u%n", shard, shards, &end) == 2 && text[end] == 0 && *shard < *shards) return true;
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "--part: found \"%s\", expected I/N with I from 0 to N - 1", text);
}

/* This process's shard of the parts, then, in the first of several processes, what remains: publishing. */
static bool run(const mm_convert_args *a, mm_plan *plan, mm_writer_options o, mm_digest *manifest, mm_err *err) {
  ready = true;
  if (!mm_mpi_all(true, err)) return false;
  bool ok = mm_mpi_all(mm_convert_run(plan, &o, &progress, manifest, err), err);
  if (a->processes == 1 || !ok) return ok;
  if (a->process == 0) {
    o.shard = 0, o.shards = 1, o.leftover = MM_LEFTOVER_RESUME;
    atomic_store(&progress.zeroed, 0); /* the journals know them all */
    uint64_t kept = atomic_load(&progress.kept_bytes);
    ok = mm_convert_run(plan, &o, &progress, manifest, err);
    atomic_store(&progress.kept_bytes, kept); /* not what this run's own processes did */
  }
  return mm_mpi_all(ok, ok ? MM_IGNORED : err) || ok; /* all but the first are done */
}

static bool gives(const mm_plan *plan, const char *dir, const mm_stored *stored, unsigned threads, mm_err *err) {
  return mm_exact_sample(plan, dir, stored, MM_TOKENIZER_IMAGE, threads, err);
}

static bool print_shard(const char *part, double seconds, mm_err *err) {
  return mm_program_json(MM_JSON_NEW({"part", mm_json_new_str(part)}, {"seconds", mm_json_new_real(seconds)}), true, err);
}

/* All from the staging directory to the summary. */
static bool convert_with(const mm_convert_args *a, mm_plan *plan, const mm_verdict *verdict, mm_events *events, mm_writer_options o,
                         mm_err *err) {
  const bool first = a->process == 0;
  if (a->part && !parse_shard(a->part, &o.shard, &o.shards, err)) return false;
  if (!divide_memory(a, plan, o.level, &o.threads, &o.buffers, err)) return false;
  mm_convert_outcome outcome = {.resumed = a->resume};
  double start = mm_now();
  mm_report_begin(events, plan, verdict);
  mm_watch *watch = mm_watch_open(plan, &progress, events, first && !a->quiet);
  bool ok = run(a, plan, o, &outcome.manifest, err);
  mm_watch_close(watch);
  outcome.seconds = mm_now() - start;
  outcome.zeroed = atomic_load(&progress.zeroed) + (o.draft ? o.draft->zeroed : 0);
  outcome.kept = atomic_load(&progress.kept_bytes);
  if (ok && a->part)
    mm_events_put(events, "share_done", mm_json_new_obj());
  else if (ok)
    mm_report_done(events, plan, &outcome);
  if (ok && first && outcome.zeroed && !a->quiet) /* its journals have those of all processes */
    fprintf(stderr, "%llu weights were NaN or infinite and are stored as 0\n", (unsigned long long)outcome.zeroed);
  if (!ok || !first || (a->quiet && !a->json)) return ok;
  if (!a->part) return mm_report_summary(a->json ? stdout : stderr, plan, &outcome, a->json ? MM_REPORT_JSON : MM_REPORT_TEXT, err);
  if (a->json) return print_shard(a->part, outcome.seconds, err);
  fprintf(stderr, "part %s done in %.2f s; when all are, --resume without --part publishes\n", a->part, outcome.seconds);
  return true;
}

static bool convert_draft(const mm_convert_args *a, mm_plan *plan, const mm_draft_source *draft, const mm_verdict *verdict,
                          const struct mm_followed *followed, mm_events *events, mm_err *err) {
  const bool first = a->process == 0;
  plan->gives = gives;
  mm_writer_options o = {.target = a->output,
                         .force = a->force,
                         .leftover = a->resume    ? MM_LEFTOVER_RESUME
                                     : a->restart ? MM_LEFTOVER_RESTART
                                                  : MM_LEFTOVER_REFUSE,
                         .shard = a->process,
                         .shards = a->processes,
                         .commit_bytes = a->commit_bytes,
                         .stop = &progress.stop,
                         .level = a->level,
                         .bake = mm_tokenizer_bake_noted,
                         .baked = MM_TOKENIZER_IMAGE,
                         .draft = draft,
                         .followed = a->follow.on ? followed : NULL};
  if (a->dry_run) {
    const bool ok = mm_writer_check(plan, &o, err);
    ready = true;
    return mm_mpi_all(ok && (!first || mm_report_plan(stdout, plan, verdict, a->json ? MM_REPORT_JSON : MM_REPORT_TEXT, a->list, err)),
                      err);
  }
  if (!a->quiet && first && !mm_report_plan(stderr, plan, verdict, MM_REPORT_TEXT, a->list, err)) return false;
  return convert_with(a, plan, verdict, events, o, err);
}

static bool convert(const mm_convert_args *a, mm_plan *plan, const mm_verdict *verdict, const struct mm_followed *followed,
                    mm_events *events, mm_err *err) {
  mm_draft_source *draft = mm_calloc(1, sizeof *draft, err);
  bool made = false;
  const mm_pack *from = plan->layout && plan->layout->extras ? plan->hf->manifest : NULL;
  bool ok = draft && mm_draft_source_find(draft, &made, a->draft.dir, a->draft.quant, from, &plan->pack.model, err);
  mm_draft_source *const given = made ? draft : NULL;
  ok = ok && mm_draft_describe(given, from, &plan->draft, err) &&
       (a->dry_run || mm_draft_digest(given, a->nonfinite, from, &plan->draft.digest, err)) &&
       convert_draft(a, plan, given, verdict, followed, events, err);
  if (draft) mm_draft_source_close(draft);
  free(draft);
  return ok;
}

/* Refuses events under the name of the output, or under one that a run leaves next to it (".NAME.partial" and more) or inside that. */
MM_OWN_FRAME static bool events_elsewhere(const mm_convert_args *a, mm_err *err) {
  char parent[2][PATH_MAX], name[2][PATH_MAX];
  mm_arena texts = {0};
  if (!mm_path_split(a->events, parent[0], name[0], err) || !mm_path_split(a->output, parent[1], name[1], err)) return false;
  const char *events = mm_arena_printf(&texts, err, "%s/%s", strcmp(parent[0], "/") == 0 ? "" : parent[0], name[0]);
  const char *staged = mm_arena_printf(&texts, err, "%s/.%s.partial", strcmp(parent[1], "/") == 0 ? "" : parent[1], name[1]);
  const bool same = strcmp(parent[0], parent[1]) == 0 && strcmp(name[0], name[1]) == 0, ok = events && staged;
  const bool own = ok && (same || strncmp(events, staged, strlen(staged)) == 0);
  mm_arena_close(&texts);
  return ok && (!own || mm_fail(err, MM_USAGE, "E_OUTPUT", mm_at(a->events, NULL),
                                "found a name of the output's own, expected another for events"));
}

/* With events of it where they are asked for, by the first of several processes. */
static bool convert_watched(const mm_convert_args *a, mm_plan *plan, const mm_verdict *verdict, const struct mm_followed *followed,
                            mm_err *err) {
  bool watched = a->events && a->process == 0 && !a->dry_run;
  const char *const input[] = {a->output,    a->source, plan->hf ? plan->hf->dir : NULL, a->recipe.file, a->importance, a->act_scales,
                               a->draft.dir, a->load};
  const size_t inputs = sizeof input / sizeof *input;
  static const mm_output_mark mark[] = MM_EVENTS_MARKS;
  const mm_output_place place = {
      .path = a->events, .input = input, .inputs = inputs, MM_OUTPUT_MARKS(mark), .stream = true, .stopped = is_stopped};
  if (a->output && !mm_output_dir_check(a->output, input + 1, inputs - 1, err)) return false;
  if (watched && !events_elsewhere(a, err)) return false;
  mm_events *events = watched ? mm_events_open(&place, err) : NULL;
  if (watched && !events) return false;
  mm_err late = {0};
  bool ok = convert(a, plan, verdict, followed, events, err);
  if (!ok) mm_report_failed(events, err);
  if (!mm_events_close(events, &late)) fprintf(stderr, "note: events are missing: %s\n", late.text);
  return ok;
}

#define OPERANDS "SRC -o DIR"

/* The rules of --follow and --delete-source, or NULL; sets what of their times is not given. */
static const char *wrong_follow(mm_convert_args *a, bool hf) {
  const bool on = a->follow.on, frees = a->follow.frees, timed = a->follow.timeout_s || a->follow.quiet_s != UINT64_MAX;
  if (!a->follow.timeout_s) a->follow.timeout_s = 3600;
  if (a->follow.quiet_s == UINT64_MAX) a->follow.quiet_s = 10;
  return frees && !on             ? "found --delete-source without --follow"
         : timed && !on           ? "found --follow-timeout or --follow-quiet without --follow"
         : on && a->dry_run       ? "found --follow with --dry-run; --names-only plans without the weights"
         : on && hf               ? "found --follow with --layout hf, which copies what only the headers describe"
         : on && a->compress      ? "found --follow with --compress; minimax-archive pack makes an archive of the output"
         : on && a->part          ? "found --follow with --part, whose runs would wait for each other"
         : on && a->processes > 1 ? "found --follow under mpirun, expected one process"
         : on && a->follow.quiet_s >= a->follow.timeout_s ? "found --follow-quiet not below --follow-timeout"
         : frees && a->ranks                              ? "found --delete-source with --ranks: other ranks need the source, too"
         : frees && a->outside           ? "found --delete-source with --allow-outside-links, expected files of the download itself"
         : on && mm_packed_is(a->source) ? "found --follow with a packed checkpoint, expected a download with an index"
                                         : NULL;
}

/* Checks the rules between options. */
static bool check_args(mm_convert_args *a, mm_err *err) {
  const bool hf = strcmp(a->layout, "hf") == 0;
  const char *wrong = !a->source                           ? "found 0 operands, expected 1 (" OPERANDS "); see minimax-convert --help"
                      : !a->dry_run && !a->output          ? "found no -o DIR, expected one (or --dry-run)"
                      : a->target_format && !hf            ? "found --dialect without --layout hf"
                      : a->compress && hf                  ? "found --compress with --layout hf; archives hold packed checkpoints"
                      : a->draft.dir && hf                 ? "found --draft with --layout hf; packed checkpoints have drafts"
                      : a->draft.quant && hf               ? "found --draft-quant with --layout hf; packed checkpoints have drafts"
                      : a->gpu && hf                       ? "found --gpu-memory with --layout hf, whose files have no ranks"
                      : a->kv && !a->gpu                   ? "found --kv-cache-dtype without --gpu-memory; minimax-serve has it"
                      : a->index && !a->gpu                ? "found --index-cache-dtype without --gpu-memory; minimax-serve has it"
                      : a->resume && a->restart            ? "found --resume with --restart, which discards what --resume continues"
                      : a->names_only && !a->dry_run       ? "found --names-only without --dry-run"
                      : a->dry_run && a->events            ? "found --events with --dry-run, which has none; --json prints the plan"
                      : a->dry_run && a->part              ? "found --part with --dry-run, which is of the whole output"
                      : a->part && a->processes > 1        ? "found --part under mpirun, whose processes divide the work"
                      : a->dry_run && a->mem_limit         ? "found --mem-limit with --dry-run, which reads no weight"
                      : a->list && a->quiet && !a->dry_run ? "found --list with --quiet, which prints no plan"
                                                           : NULL;
  if (!wrong) wrong = wrong_follow(a, hf);
  if (wrong) return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "%s", wrong);
  a->demand.kv_fp8 = a->kv && strcmp(a->kv, "fp8") == 0, a->demand.index_fp8 = a->index && strcmp(a->index, "fp8") == 0;
  return (!a->gpu || mm_gpu_card_parse(&a->demand.card, a->gpu, err)) && (!a->compress || parse_compress(a->compress, &a->level, err));
}

static bool run_all(void *args, mm_err *err) {
  mm_convert_args *a = args;
  bool printed;
  if (a->recipe.quant && a->recipe.file)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found --quant with --recipe, which has a default scheme of its own") ||
           mm_mpi_all(false, err);
  if (!a->recipe.quant) a->recipe.quant = "none";
  if (!mm_mpi_all(print_words(a, &printed, err), err) || printed) return err->status == MM_OK;
  const char *const paths[] = {a->source, a->output, a->recipe.file, a->importance, a->act_scales, a->draft.dir, a->load};
  if (!mm_mpi_same_paths(paths, sizeof paths / sizeof *paths, err)) return false;
  struct sigaction action = {.sa_handler = on_signal};
  sigaction(SIGINT, &action, NULL), sigaction(SIGTERM, &action, NULL);
  if (!mm_program_hangup_ignored()) sigaction(SIGHUP, &action, NULL);
  mm_hf hf = {0};
  mm_plan plan = {0};
  mm_planning planning = {0};
  mm_verdict verdict = {0};
  bool ok = mm_mpi_all(check_args(a, err) && make_plan(a, &hf, &planning, &plan, &verdict, err), err);
  const struct mm_followed followed = {&hf, &planning.options};
  ok = ok && (convert_watched(a, &plan, &verdict, &followed, err) || (!ready && mm_mpi_all(false, err)));
  mm_plan_close(&plan);
  mm_importance_close(&planning.calibration.importance);
  mm_act_scales_close(&planning.calibration.act_scales);
  mm_follow_close(&hf);
  mm_hf_close(&hf);
  return ok;
}

/* The options, before the command line is read with their defaults. */
static mm_convert_args settings = {.layout = "packed",
                                   .align = "split",
                                   .follow = {.quiet_s = UINT64_MAX}, /* and timeout_s 0: neither is given */
                                   .cut = {.tp = 1, .ep = 1, .pp = 1},
                                   .commit_bytes = UINT64_C(64) << 20};

static char schemes[1024]; /* words of --quant, written by main */
static const mm_option options[] = {
    {.help = "output"},
    MM_OPTION(STR, "output", &settings.output, "DIR", "the packed checkpoint to make; appears when complete", .letter = 'o'),
    MM_OPTION(STR, "layout", &settings.layout, "WORD",
              "packed shards, or hf: unsharded, with Hugging Face names and quantization_config (default packed)", .choices = "packed|hf"),
    MM_OPTION(STR, "dialect", &settings.target_format, "WORD",
              "with --layout hf: target format of the scheme, fp8 (Hugging Face), ct (compressed-tensors), modelopt, gptq or awq "
              "(default: the source's, if it kept its integers, or the first that has the scheme)",
              .choices = "fp8|ct|modelopt|gptq|awq"),
    MM_OPTION(U64, "tp", &settings.cut.tp, "N", "tensor-parallel ranks (default 1)", .alias = "tensor-parallel-size", .lo = 1,
              .hi = MM_MAX_TP),
    MM_OPTION(U64, "ep", &settings.cut.ep, "N",
              "expert-parallel groups inside the tp ranks: each holds 1/N of the experts, cut among tp/N ranks (default 1)",
              .alias = "expert-parallel-size", .lo = 1, .hi = MM_MAX_TP),
    MM_OPTION(U64, "attn-tp", &settings.cut.attn_tp, "N",
              "ranks that attention, embedding and head are cut for, a divisor of --tp; each group of N ranks has all of them and runs its "
              "own requests, the experts lie over all ranks (default --tp)",
              .lo = 1, .hi = MM_MAX_TP),
    MM_OPTION(STR, "place", &settings.load, "FILE", "with --ep: place experts so that ranks are even by the load in FILE (/expert_load)"),
    MM_OPTION(U64, "pp", &settings.cut.pp, "N", "pipeline stages of whole layers, tp ranks each (default 1)",
              .alias = "pipeline-parallel-size", .lo = 1, .hi = MM_MAX_LAYERS),
    MM_OPTION(STR, "tp-align", &settings.align, "HOW",
              "a cut inside a scale's block: finer scale grid, zero padding, or refusal (default split)", .choices = MM_ALIGN_WORDS),
    MM_OPTION(SIZE, "part-size", &settings.part_size, "BYTES",
              "largest part file (default 4G, with --delete-source a 32nd of a rank's output; a larger tensor gets its own part)", .lo = 1),
    MM_OPTION(STR, "compress", &settings.compress, "zstd[:LEVEL]",
              "make an archive, for transport: part by part, so that only one lies there uncompressed (LEVEL 1 to 19, default 1: "
              "smallest and fastest for weights); minimax-archive unpack gives the checkpoint"),
    {.help = "quantisation"},
    MM_OPTION(WORD, "quant", &settings.recipe.quant, "SCHEME",
              "a scheme, a preset or a recipe's line (default none: kept as stored); help prints what each is", .choices = schemes),
    MM_OPTION(STR, "recipe", &settings.recipe.file, "FILE", "default scheme, search and rules from a JSON file, instead of --quant"),
    MM_FLAG("print-recipe", &settings.print_recipe, "write the recipe in force, as --recipe reads it, to stdout and stop; needs no SRC"),
    MM_OPTION(LIST, "ignore", &settings.recipe.ignore, "PATTERN",
              "keep tensors of these names as stored (glob, or re:REGEX); may be repeated"),
    MM_OPTION(LIST, "override", &settings.recipe.override, "PATTERN=SCHEME",
              "another scheme for these names; may be repeated, the last match wins"),
    MM_OPTION(WORD, "head", &settings.recipe.head, "SCHEME",
              "of the head, lm_head.weight, after all other rules (default: kept as stored): block_fp8 halves what each decode step "
              "reads of it"),
    MM_FLAG("allow-unmatched", &settings.unmatched, "take patterns that match no tensor; they are an error otherwise"),
    MM_OPTION(STR, "search", &settings.recipe.search, "HOW", "how schemes that can choose pick their scales (default mse)",
              .choices = "absmax|mse|four_six"),
    MM_OPTION(STR, "method", &settings.recipe.method, "HOW",
              "codes of all schemes with scales: nearest rounds each weight, gptq feeds each error back into the weights after it, by "
              "the second moments of an --importance file, where it has those of gradients also into the rows after it (default nearest)",
              .choices = "nearest|gptq"),
    MM_OPTION(STR, "importance", &settings.importance, "FILE",
              "weigh errors by what each input channel sees when scales are searched: safetensors of minimax-eval --collect, or an "
              "importance matrix of llama.cpp"),
    MM_OPTION(STR, "act-scales", &settings.act_scales, "FILE",
              "static scales of activations for tensor_wise_fp8, w4afp8 and nvfp4: safetensors of minimax-eval --collect, or names and "
              "numbers in safetensors or JSON"),
    MM_OPTION(STR, "kv-scales", &settings.recipe.kv_scales, "WORD",
              "scales of a quantised KV cache that the source has: kept as stored, cast to F32, or dropped (default keep)",
              .choices = "keep|f32|drop"),
    MM_OPTION(STR, "draft", &settings.draft.dir, "DIR",
              "also pack this DFlash or EAGLE-3 draft of the model, config.json and model.safetensors, as stored"),
    MM_OPTION(STR, "draft-quant", &settings.draft.quant, "SCHEME",
              "of the matrices of --draft, or of a packed source's draft, but not of its head and embeddings (default none: as stored)",
              .choices = "none|" MM_DFLASH_QUANTS),
    MM_FLAG("allow-nonfinite", &settings.nonfinite,
            "store weights that are NaN or infinite as 0 and say how many; they are an error otherwise"),
    {.help = "plan"},
    MM_FLAG("dry-run", &settings.dry_run, "print the plan with its exact bytes and stop"),
    MM_FLAG("names-only", &settings.names_only, "with --dry-run: plan from config.json and the index alone, without weight files"),
    MM_FLAG("list", &settings.list, "list every packed tensor of the plan"),
    MM_OPTION(STR, "gpu-memory", &settings.gpu, "BYTES|CARD",
              "say what fits GPUs of this size or name (80G, 80GB, H100, RTX-4090): tokens of cache, the smallest --tp for a sequence of "
              "full length, and the kernels of a card"),
    MM_OPTION(STR, "kv-cache-dtype", &settings.kv, "TYPE", "with --gpu-memory: type of cached keys and values (auto: bf16)",
              .choices = "auto|bf16|fp8"),
    MM_OPTION(STR, "index-cache-dtype", &settings.index, "TYPE", "with --gpu-memory: type of M3's cached index keys (auto: bf16)",
              .choices = "auto|fp8"),
    {.help = "run"},
    MM_FLAG("force", &settings.force, "replace a packed checkpoint of that name (whole until the new one is complete)"),
    MM_FLAG("resume", &settings.resume, "continue an interrupted conversion (or start, if there is none)"),
    MM_FLAG("restart", &settings.restart, "discard an interrupted conversion and start anew"),
    MM_OPTION(STR, "ranks", &settings.ranks, "LIST",
              "only the files of these ranks, such as 0,2-5; they fit those of other runs of the same plan"),
    MM_OPTION(STR, "part", &settings.part, "I/N",
              "convert only shard I of N (I from 0), for job arrays; a last run with --resume and without --part publishes"),
    MM_OPTION(SIZE, "journal-every", &settings.commit_bytes, "BYTES",
              "source bytes between journal records, about what a crash costs (default 64M)", .lo = 1),
    MM_OPTION(U64, "jobs", &settings.threads, "N", "threads (default: CPUs and four, which wait for the disk in turn)", .letter = 'j',
              .lo = 1, .hi = 1024),
    MM_OPTION(SIZE, "mem-limit", &settings.mem_limit, "BYTES",
              "never use more memory (default 256M + 64M a thread, with --compress 78M a thread, from zstd:2 on 142M); too little exits 8 "
              "with the figure needed",
              .lo = 1),
    MM_FLAG("allow-outside-links", &settings.outside, "follow links that leave the checkpoint and its Hub cache"),
    {.help = "download"},
    MM_FLAG("follow", &settings.follow.on,
            "convert SRC while it is being downloaded: waits for each file that comes next, from when config.json and the index are there"),
    MM_FLAG("delete-source", &settings.follow.frees,
            "with --follow: remove each weight file of SRC once all that is made of it is on disk and in the journal; cannot be undone"),
    MM_OPTION(U64, "follow-timeout", &settings.follow.timeout_s, "SECONDS",
              "with --follow: give up, status 75, when SRC has not changed for so long and a file is missing (default 3600)", .lo = 1,
              .hi = 10000000),
    MM_OPTION(U64, "follow-quiet", &settings.follow.quiet_s, "SECONDS",
              "with --follow: copy the tokenizer and other small files, which may come last, when SRC has not changed for so long "
              "(default 10)",
              .hi = 86400),
    {.help = "messages"},
    MM_FLAG("json", &settings.json, "plan, summary or what --quant help prints, as JSON on stdout; errors as JSON"),
    MM_OPTION(STR, "events", &settings.events, "FILE",
              "append a line of JSON to FILE as the run begins, every second, and as it is done or failed"),
    MM_FLAG("quiet", &settings.quiet, "no plan, progress or summary on stderr", .letter = 'q'),
};

static const mm_program program = {
    MM_PROGRAM("minimax-convert", "turn a Hugging Face or packed checkpoint into packed tensor-parallel shards", OPERANDS, 0, 1, options),
    .examples =
        "minimax-convert MiniMax-M2 -o M2-nvfp4 --tp 8 --quant nvfp4 --dry-run\n"
        "minimax-convert MiniMax-M2 -o M2-nvfp4 --tp 8 --quant nvfp4\n"
        "minimax-convert MiniMax-M2 -o M2-nvfp4 --tp 8 --quant nvfp4 --resume\n"
        "minimax-convert MiniMax-M2 -o M2-nvfp4 --tp 8 --quant nvfp4 --resume --follow --delete-source\n"
        "minimax-convert MiniMax-M1-80k -o M1-fp8 --layout hf --quant block_fp8",
    .files =
        "SRC/model.safetensors.index.json, SRC/config.json  what the source holds; its tokenizer and template are copied\n"
        "DIR/manifest.json  the packed checkpoint's description (formats/FORMAT.md)\n"
        ".NAME.partial  next to DIR: a run that is at work or was interrupted; --resume continues it, --restart takes it away",
    .agreed = mm_mpi_agreed,
    .epilog =
        "Exit status: 0 done, 2 usage, 3 bad input, 4 valid but unsupported, 5 I/O, 6 damaged (a packed SRC, or a finished output under "
        "--resume), 7 "
        "output locked, 8 memory or limit, 75 interrupted (--resume continues).",
};

int main(int argc, char **argv) {
  mm_err err = {0};
  const bool ok = mm_recipe_words(schemes, sizeof schemes, &err);
  mm_mpi_start(&argc, &argv, &settings.process, &settings.processes);
  int status = ok ? mm_program_main(&program, argc, argv, &settings.source, run_all, &settings) : mm_program_fail(&program, &err);
  MM_FREE(settings.recipe.ignore.item, settings.recipe.override.item);
  mm_mpi_end();
  return status;
}
