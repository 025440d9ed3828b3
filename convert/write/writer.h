/* The output directory: a staging directory next to the target, part files block by block, a journal of what is durable, the manifest
 * last, one rename. A directory with the final name is complete; a directory with the staging name can be continued.
 *
 * With a level, the directory is an archive (formats/ARCHIVE.md). Blocks are finished in any order, so a part is written plainly, then
 * packed, journaled as frames and removed. The disk holds the archive and one part. */
#ifndef MM_CONVERT_WRITER_H
#define MM_CONVERT_WRITER_H

#include <pthread.h>

#include "convert/decode/draft_source.h"
#include "convert/write/blocks.h"
#include "convert/write/journal.h"
#include "formats/system/staging.h"
#include "loader/archive/archive.h"

typedef enum mm_leftover { MM_LEFTOVER_REFUSE, MM_LEFTOVER_RESUME, MM_LEFTOVER_RESTART } mm_leftover;

/* Makes the bytes of a companion from the tokenizer.json at `path`, whose digest is *source, for a vocabulary of this size. The same file
 * gives the same bytes. *image is NULL where none can be made, else to be freed. */
typedef bool mm_bake_fn(const char *path, uint32_t vocab, const mm_digest *source, uint8_t **image, size_t *n, mm_err *err);

typedef struct mm_writer_options {
  const char *target;
  bool force;             /* replace a packed checkpoint of that name */
  mm_leftover leftover;   /* what to do with an interrupted run */
  uint32_t shard, shards; /* makes the parts p with p % shards == shard (from 0); publishes only when shards is 1 */
  size_t buffers;         /* of MM_HASH_BLOCK, for assembling */
  uint64_t commit_bytes;  /* source bytes converted between two journal records: about what a crash costs */
  unsigned threads;
  const _Atomic bool *stop; /* set when a signal asks for the end */
  int level;                /* of zstd: the output is an archive; 0: it is not */
  mm_bake_fn *bake;         /* NULL, or what makes the companion `baked` of the packed layout */
  const char *baked;
  const mm_draft_source *draft; /* NULL, or what the companion draft.safetensors of the packed layout is made of */
  const struct mm_followed {    /* NULL, or a source that is being downloaded */
    mm_hf *hf;                  /* of the plan */
    const mm_plan_options *plan;
  } * followed;
} mm_writer_options;

typedef struct mm_writer {
  mm_plan *plan;
  mm_writer_options o;
  mm_staging stage;
  const char *staging_name; /* of stage: ".NAME.partial" next to the target */
  char *staging;            /* where this run's files are: that directory, or a folder "I-N" in it */
  char *journal_name;       /* ".NAME.partial.journal", for a shard with ".I-N" behind it */
  int parent, dir;          /* descriptors of the target's parent and of `staging`; -1 when closed */
  bool fresh;               /* this run began the journal: there was nothing to continue */
  bool complete;            /* resume found the target finished already */
  mm_blocks blocks;
  mm_journal journal;
  mm_archive archive;     /* its table: every part's entry, by rank and part */
  mm_archive_lanes lanes; /* open when there is a level */
  bool *skip;             /* [plan.step_count]: done by the interrupted run, and verified */
  pthread_mutex_t lock;
  mm_step_entry *pending; /* finished, not yet journaled */
  size_t pending_count, pending_cap;
  uint64_t pending_bytes;
  bool committing;
  size_t dead_count, dead_cap;
  uint32_t *dead;  /* all-zero lm_head rows */
  uint64_t zeroed; /* weights that were not finite, of steps that are not done again */
  uint64_t companion_bytes;
  mm_arena arena;
} mm_writer;

/* Checks the target (MM_USAGE when it exists and is not ours, or lies in the source or around it), takes the staging directory
 * (MM_LOCKED when another run holds it), reads the journal and checks free space (MM_IO). */
MM_MUST_USE bool mm_writer_open(mm_writer *w, mm_plan *p, const mm_writer_options *o, mm_err *err);
/* What mm_writer_open refuses of companions, and unless the target is NULL of it and of what runs left next to it; but nothing is written,
 * and no finished output compared. */
MM_MUST_USE bool mm_writer_check(mm_plan *p, const mm_writer_options *o, mm_err *err);
/* Closes without publishing. Keeps what can be continued, or removes it all. Accepts a half-opened writer. */
void mm_writer_close(mm_writer *w, bool keep);

/* Starts a part on every rank; with a journal, verifies what it claims and sets skip[] for the part's steps. *finished: an archived part
 * that needs nothing more, not even mm_writer_end_part. */
MM_MUST_USE bool mm_writer_begin_part(mm_writer *w, uint32_t part, bool *finished, mm_err *err);
/* Rows of the head that are zero. */
MM_MUST_USE bool mm_writer_dead_rows(mm_writer *w, const uint32_t *row, size_t count, mm_err *err);
/* A step is done: takes over its puts (freed here). May commit. */
MM_MUST_USE bool mm_writer_step_done(mm_writer *w, mm_step_entry *e, uint64_t source_bytes, mm_err *err);
/* Makes everything finished so far durable and journals it. */
MM_MUST_USE bool mm_writer_commit(mm_writer *w, mm_err *err);
MM_MUST_USE bool mm_writer_end_part(mm_writer *w, mm_err *err);

/* Companions, manifest, syncs, rename. Afterwards the target is complete. *manifest is the manifest's digest. */
MM_MUST_USE bool mm_writer_publish(mm_writer *w, mm_digest *manifest, mm_err *err);

/* --- companion files of the weights --- */
/* Refuses at the start what could not be copied at the end, and adds up its bytes. */
MM_MUST_USE bool mm_writer_companions(mm_writer *w, mm_err *err);
/* Copies and writes them, and lists them in w->plan->pack.file; the unsharded layout's digests come last. */
MM_MUST_USE bool mm_companions_write(mm_writer *w, mm_err *err);

/* --- between writer.c, resume.c (what the journal claims for a part, verified) and pack_output.c (archives) --- */
MM_MUST_USE bool mm_writer_trust(mm_writer *w, const bool *kept, mm_err *err);
/* *holds: the archived part is there, every frame proven. */
MM_MUST_USE bool mm_writer_trust_archived(mm_writer *w, uint32_t part, bool *holds, mm_err *err);
MM_MUST_USE bool mm_writer_archive_open(mm_writer *w, mm_err *err);
/* Packs a part that has ended, journals its frames and removes the plain files. */
MM_MUST_USE bool mm_writer_archive_part(mm_writer *w, uint32_t part, mm_err *err);
MM_MUST_USE bool mm_writer_remove_plain(mm_writer *w, uint32_t part, mm_err *err);
/* The table's entry of a part's file on a wanted rank, as mm_plan_entry. */
mm_archive_part *mm_writer_archived(const mm_writer *w, uint32_t part, uint32_t rank);
/* A file of the staging directory, written anew: a resumed run may find its own there. */
MM_MUST_USE bool mm_writer_replace(mm_writer *w, const char *name, const void *text, size_t n, mm_err *err);
/* The end of a name behind that of a weight file of this plan, "" or an archive's ending; NULL for other names. */
const char *mm_writer_part_end(const mm_writer *w, const char *name, unsigned *rank, unsigned *number);

/* --- runs.c: the journals and files of all runs that make this output --- */
/* MM_USAGE E_OUTPUT where a name that runs use next to the target holds what none made. */
MM_MUST_USE bool mm_runs_usable(mm_writer *w, mm_err *err);
/* A name that a conversion writes, whatever its options; ctx: the writer. */
bool mm_runs_writes(const void *ctx, const char *name);
/* Takes the staging directory, shared with other shards: MM_LOCKED when another run holds it. */
MM_MUST_USE bool mm_runs_take(mm_writer *w, mm_err *err);
/* Refuses what other runs left, as mm_runs_begin will, for a run that makes a record of sources before that, or that only plans. */
MM_MUST_USE bool mm_runs_check(mm_writer *w, mm_err *err);
/* With the staging directory taken: opens the journal and the place of this run's files, and takes over what ended runs of the same plan
 * made. MM_USAGE E_RESUME or E_LEFTOVER for what other runs left, MM_LOCKED while another run makes the same parts. */
MM_MUST_USE bool mm_runs_begin(mm_writer *w, mm_err *err);
/* *bytes: of the plan's parts on disk, of all runs. */
MM_MUST_USE bool mm_runs_staged(mm_writer *w, uint64_t *bytes, mm_err *err);
/* Removes the journals of runs that have ended: the target is complete. */
MM_MUST_USE bool mm_runs_forget(mm_writer *w, mm_err *err);
/* Removes the staging directory and all journals. The directory, which is the lock, goes last. */
MM_MUST_USE bool mm_runs_remove(mm_writer *w, mm_err *err);
/* Removes what a run left that died after its rename: the journal and, under --force, the checkpoint that it replaced. An interrupted
 * conversion of other options stays, and so do files without a journal. */
MM_MUST_USE bool mm_runs_remove_done(mm_writer *w, mm_err *err);

/* --- followed.c: a source that is being downloaded. Files that are not needed any more are freed after each part, and the plan's digest,
 * which needs every file's header, is put into the parts at the end --- */
/* Into *mine the digest that the plan has with the sources of the target's manifest, if they have the names of this one's. */
MM_MUST_USE bool mm_followed_published(mm_writer *w, mm_digest *mine, mm_err *err);
/* Opens the record of sources, with the staging directory taken. */
MM_MUST_USE bool mm_followed_begin(mm_writer *w, mm_err *err);
/* Part `part` and those before it are on disk and journaled. No reader has a file open. */
MM_MUST_USE bool mm_followed_part_done(mm_writer *w, uint32_t part, mm_err *err);
/* Waits for what has not come, then gives plan, manifest and every part the digest that a plan from all headers has. */
MM_MUST_USE bool mm_followed_finish(mm_writer *w, mm_err *err);
/* The target is complete: frees the other files and removes the record. */
MM_MUST_USE bool mm_followed_end(mm_writer *w, mm_err *err);
/* MM_USAGE E_OUTPUT where the name of a record holds what no run made. */
MM_MUST_USE bool mm_followed_usable(const mm_writer *w, mm_err *err);
/* Removes a record, of any run. */
void mm_followed_forget(const mm_writer *w);
/* Before --restart discards what is staged: MM_USAGE E_FREED where nothing else is left of files of another source. */
MM_MUST_USE bool mm_followed_discardable(const mm_writer *w, mm_err *err);

#endif
