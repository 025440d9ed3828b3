/* A checkpoint that is still being downloaded (--follow). The plan is made from config.json and the index; each file's header is checked
 * against it when the file is there, and its offsets are known from then on. A reader waits here for the file that it needs. With
 * --delete-source a file is removed once nothing needs it; a record next to the output says so before, and has the header of each file. */
#ifndef MM_CONVERT_FOLLOW_H
#define MM_CONVERT_FOLLOW_H

#include "convert/decode/follow_wait.h"
#include "convert/source/hf.h"

/* hf was opened from names, or a single file from its header. Waits until some tensor of each kind of layer has its header, by which all
 * others are planned; its readers wait from now on. */
MM_MUST_USE bool mm_follow_open(mm_hf *hf, const mm_follow_options *o, mm_err *err);
void mm_follow_close(mm_hf *hf); /* of any hf */

/* Opens the record parent/name, made where it is absent; the plan is made, no weight was read. With `anew` an old one is discarded, which
 * is MM_USAGE E_FREED where a file that it has freed is not there again. Finishes removals that a killed run had begun. */
MM_MUST_USE bool mm_follow_begin(mm_hf *hf, int parent, const char *name, bool anew, mm_err *err);
/* MM_USAGE E_FREED where the record, if it is there, says that files of another source are gone, so that all that is left of them is what
 * its run staged. Any hf may ask. */
MM_MUST_USE bool mm_follow_discardable(const mm_hf *hf, int parent, const char *name, mm_err *err);
/* Waits for all files, for tokenizer.json, and until nothing has changed for quiet_s. */
MM_MUST_USE bool mm_follow_await_all(const mm_hf *hf, mm_err *err);
/* Every waiting thread ends with this failure. */
void mm_follow_abandon(const mm_hf *hf, const mm_err *reason);

/* Looks once: *there when the file is whole and agrees with the plan. */
MM_MUST_USE bool mm_follow_look(const mm_hf *hf, uint32_t file, bool *there, mm_err *err);
bool mm_follow_frees(const mm_hf *hf);
/* The plan cannot be another than that of all headers: they were read, or the tensors have the total_size of the index. */
bool mm_follow_proven(const mm_hf *hf);
/* Records that the file is not needed any more, then removes it. MM_IO E_CHANGED where another file has its name by now. */
MM_MUST_USE bool mm_follow_free(const mm_hf *hf, uint32_t file, mm_err *err);
/* The output was made of files of these names. */
bool mm_follow_made_of(const mm_hf *hf, const mm_pack *made);
/* The target is a finished output of these files and one of them is not there, so that its header cannot be read: MM_USAGE E_FREED. */
MM_MUST_USE bool mm_follow_comparable(const mm_hf *hf, mm_err *err);
/* Takes sizes and headers' digests from the manifest of a finished output of the same files; an arriving file must have them. */
void mm_follow_assume(mm_hf *hf, const mm_pack *made);
/* As if no header had been read. */
void mm_follow_forget(mm_hf *hf);
/* The name of the file that is waited for, or NULL. */
const char *mm_follow_waiting(const mm_hf *hf);

/* The beginning of every record of sources, of other versions too. */
#define MM_FOLLOW_HEAD "MMSRC"

#endif
