/* minimax-archive: packs checkpoints for transport and cold storage, unpacks them, and signs them. */
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>

#include "formats/frame.h"
#include "formats/option.h"
#include "formats/system/bar.h"
#include "formats/system/pool.h"
#include "loader/archive/archive.h"
#include "loader/archive/signature.h"

typedef struct mm_archive_args {
  const char *operand[2]; /* verb, directory */
  const char *output, *key;
  uint64_t level, threads;
  bool json, quiet;
} mm_archive_args;

static atomic_bool stop;

/* The first signal takes away what is not finished (status 75), a second one ends at once. */
static void on_signal(int n) {
  atomic_store(&stop, true);
  signal(n, SIG_DFL);
}

static bool is_stopped(const void *none) {
  (void)none;
  return atomic_load(&stop);
}

static void take_signals(void) {
  const struct sigaction action = {.sa_handler = on_signal};
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  if (!mm_program_hangup_ignored()) sigaction(SIGHUP, &action, NULL);
}

static bool pack_or_unpack(const mm_archive_args *a, bool pack, mm_err *err) {
  mm_archive_totals t;
  double start = mm_now();
  const char *dir = a->operand[1];
  const mm_archive_work work = {.threads = (unsigned)a->threads, .stopped = is_stopped};
  take_signals();
  mm_bar *bar = mm_bar_open(a->quiet);
  mm_bar_verb(bar, pack ? "packing" : "unpacking");
  bool ok = pack ? mm_archive_pack(dir, a->output, a->level ? (int)a->level : 1, work, &t, err)
                 : mm_archive_unpack(dir, a->output, work, &t, err);
  mm_bar_close(bar);
  if (!ok) return false;
  double seconds = mm_now() - start;
  if (a->json)
    return mm_program_json(MM_JSON_NEW({"output", mm_json_new_path(a->output)}, {"bytes", mm_json_new_u64(t.bytes)},
                                       {"packed", mm_json_new_u64(t.packed)}, {"seconds", mm_json_new_real(seconds)}),
                           true, err);
  if (a->quiet) return true;
  fputs(pack ? "packed " : "unpacked ", stderr);
  mm_show_to(stderr, dir);
  fprintf(stderr, ": parts of %.3f GB in %.3f GB (%.2f %%), %.2f GB/s\n", (double)t.bytes / 1e9, (double)t.packed / 1e9,
          100.0 * (double)t.packed / (double)t.bytes, (double)t.bytes / seconds / 1e9);
  return true;
}

static bool list_json(const mm_archive *x, mm_err *err) {
  mm_json *o = mm_json_new_obj(), *parts = mm_json_put_list(o, "parts");
  for (size_t i = 0; i < x->part_count; i++) {
    const mm_archive_part *p = &x->part[i];
    mm_json_append(parts, MM_JSON_NEW({"file", mm_json_new_str(p->part->file)}, {"blocks", mm_json_new_u64(p->part->block_count)},
                                      {"bytes", mm_json_new_u64(p->part->size)}, {"packed", mm_json_new_u64(p->size)}));
  }
  return mm_program_json(o, true, err);
}

static bool list(const mm_archive_args *a, mm_err *err) {
  mm_archive x;
  bool ok = mm_archive_open(&x, a->operand[1], err);
  if (a->json) ok = ok && list_json(&x, err);
  for (size_t i = 0; ok && !a->json && i < x.part_count; i++) {
    const mm_archive_part *p = &x.part[i];
    printf("%s  %zu blocks  %" PRIu64 " bytes  %" PRIu64 " packed  %.2f %%\n", p->part->file, p->part->block_count, p->part->size, p->size,
           100.0 * (double)p->size / (double)p->part->size);
  }
  mm_archive_close(&x);
  return ok;
}

static bool sign(const mm_archive_args *a, mm_err *err) {
  mm_key *key = mm_key_open(a->key, true, err);
  mm_bar *bar = mm_bar_open(a->quiet);
  mm_bar_verb(bar, "hashing");
  bool ok = key && mm_signature_make(a->operand[1], key, a->key, (unsigned)a->threads, err);
  mm_bar_close(bar);
  mm_key_close(key);
  if (ok && a->json)
    return mm_program_json(MM_JSON_NEW({"signed", mm_json_new_path(a->operand[1])}, {"signature", mm_json_new_str(MM_SIGNATURE)}), true,
                           err);
  if (!ok || a->quiet) return ok;
  fputs("signed ", stderr);
  mm_show_to(stderr, a->operand[1]);
  fputs(": " MM_SIGNATURE "\n", stderr);
  return true;
}

static bool need(const mm_archive_args *a, const char *option, bool given, bool wanted, mm_err *err) {
  if (given == wanted) return true;
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "%s %s --%s", a->operand[0], wanted ? "needs" : "does not take", option);
}

static bool run(void *args, mm_err *err) {
  const mm_archive_args *a = args;
  const char *verb = a->operand[0];
  bool pack = strcmp(verb, "pack") == 0, unpack = strcmp(verb, "unpack") == 0, signs = strcmp(verb, "sign") == 0;
  if (!pack && !unpack && !signs && strcmp(verb, "list") != 0) {
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found \"%s\", expected pack, unpack, list or sign", MM_ESCAPED(64, verb));
  }
  if (!need(a, "output", a->output, pack || unpack, err) || !need(a, "key", a->key, signs, err)) return false;
  if (!pack && !need(a, "level", a->level, false, err)) return false;
  return pack || unpack ? pack_or_unpack(a, pack, err) : signs ? sign(a, err) : list(a, err);
}

int main(int argc, char **argv) {
  mm_archive_args a = {.threads = mm_pool_cpus()};
  const mm_option options[] = {
      MM_OPTION(STR, "output", &a.output, "DIR", "pack, unpack: the new directory; it appears when it is complete", .letter = 'o'),
      MM_OPTION(U64, "level", &a.level, "N", "pack: 1 (default, smallest and fastest for weights) or one of zstd's levels", .lo = 1,
                .hi = MM_FRAME_LEVEL_MAX),
      MM_OPTION(STR, "key", &a.key, "PRIVATE.pem",
                "sign: an EC private key on P-256, as from: openssl ecparam -name prime256v1 -genkey -noout"),
      MM_OPTION(U64, "jobs", &a.threads, "N", "threads (default: CPUs)", .letter = 'j', .lo = 1, .hi = 1024),
      MM_FLAG("json", &a.json, "what was made, or listed, as JSON on stdout; errors as JSON"),
      MM_FLAG("quiet", &a.quiet, "no summary on stderr", .letter = 'q'),
  };
  const mm_program program = {
      MM_PROGRAM("minimax-archive",
                 "pack a checkpoint for transport and cold storage, unpack it to the same bytes, list an archive, sign a checkpoint",
                 "pack|unpack|list|sign DIR", 2, 2, options),
      .examples =
          "minimax-archive pack M2-nvfp4 -o M2-nvfp4.arc\n"
          "minimax-archive unpack M2-nvfp4.arc -o M2-nvfp4\n"
          "minimax-archive sign M2-nvfp4 --key private.pem",
      .files =
          "DIR/archive.json  the table of an archive\n"
          "DIR/model.sig  the signature\n"
          ".NAME.partial-pack, .NAME.partial-unpack  next to -o DIR: what a run has not finished, with .mark behind it that a run "
          "made it; a run that fails or is stopped by a signal takes both away, and after kill -9 the next run of that name does\n"
          ".NAME.partial-sign  next to DIR: a signature that a killed run has not put into DIR; the next one replaces it",
      .epilog =
          "Exit status: 0 done, 2 usage, 3 bad input or key, 4 unsupported, 5 I/O, 6 damaged or hostile, 7 locked by another run, 8 memory "
          "or limit, 75 stopped by a signal: pack or unpack again.",
  };
  return mm_program_main(&program, argc, argv, a.operand, run, &a);
}
