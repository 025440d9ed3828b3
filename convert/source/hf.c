/* An open Hugging Face checkpoint: finding its tensors by name, reading them, and whether its files are still those that were opened. */
#include "convert/source/hf.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void mm_hf_close(mm_hf *hf) {
  mm_packed_close(hf);
  mm_json_free(hf->config);
  MM_FREE(hf->file, hf->tensor, hf->index_text);
  mm_arena_close(&hf->arena);
  *hf = (mm_hf){0};
}

const mm_hf_tensor *mm_hf_sort(mm_hf *hf) {
  mm_sort(hf->tensor, hf->tensor_count, sizeof *hf->tensor, mm_by_text);
  for (size_t i = 1; i < hf->tensor_count; i++)
    if (mm_by_text(&hf->tensor[i - 1], &hf->tensor[i]) == 0) return &hf->tensor[i];
  return NULL;
}

mm_hf_tensor *mm_hf_find(const mm_hf *hf, const char *canonical) {
  return bsearch(&canonical, hf->tensor, hf->tensor_count, sizeof *hf->tensor, mm_by_text);
}

bool mm_hf_listed(const mm_hf *hf, const mm_hf_tensor *t, uint32_t file, const mm_st_tensor *s, mm_err *err) {
  const mm_where at = mm_at(hf->file[file].path, s->name);
  if (!t) return mm_fail(err, MM_BAD_INPUT, "E_IDX_TENSOR", at, "found in this file, but not in the index, expected in both");
  return t->file == file ||
         mm_fail(err, MM_BAD_INPUT, "E_DUP_TENSOR", at, "found in this file, expected in %s as the index lists it", hf->file[t->file].name);
}

void mm_hf_take(mm_hf_tensor *t, const mm_st_tensor *s) {
  t->found = true;
  t->dtype = s->dtype;
  t->shape = s->shape;
  t->offset = s->offset;
  t->bytes = s->bytes;
}

static bool unchanged(mm_file_id id, const char *path, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  f.id = id;
  return mm_file_unchanged(&f, path, err);
}

bool mm_hf_numbers(const void *hf, const char *canonical, uint64_t *count) {
  const mm_hf_tensor *t = mm_hf_find(hf, canonical);
  if (t && !mm_shape_count(&t->shape, count)) *count = 0;
  return t;
}

bool mm_hf_unchanged(const mm_hf *hf, mm_err *err) {
  for (size_t i = 0; i < hf->file_count; i++)
    if (!hf->file[i].freed && !unchanged(hf->file[i].id, hf->file[i].path, err)) return false;
  for (size_t i = 0; i < hf->text_count; i++)
    if (!unchanged(hf->text[i].id, hf->text[i].path, err)) return false;
  return true;
}

void mm_hf_reader_open(mm_hf_reader *r, const mm_hf *hf) {
  *r = (mm_hf_reader){.hf = hf, .slot = {{UINT32_MAX, MM_FILE_NONE, -1}, {UINT32_MAX, MM_FILE_NONE, -1}}};
}

static void close_slot(mm_hf_reader *r, unsigned i) {
  mm_file_close(&r->slot[i].open);
  if (r->slot[i].direct >= 0) close(r->slot[i].direct);
  r->slot[i].direct = -1;
  r->slot[i].file = UINT32_MAX;
}

void mm_hf_reader_close(mm_hf_reader *r) {
  for (unsigned i = 0; i < 2; i++) close_slot(r, i);
}

/* Makes r->last the slot of the tensor's file. */
static bool open_slot(mm_hf_reader *r, uint32_t file, mm_err *err) {
  const mm_hf_file *f = &r->hf->file[file];
  if (r->slot[r->last].file == file) return true;
  if (r->hf->await && !r->hf->await(r->hf, file, err)) return false;
  r->last ^= 1;
  if (r->slot[r->last].file == file) return true;
  close_slot(r, r->last);
  mm_file *open_file = &r->slot[r->last].open;
  mm_err reason = {0};
  bool found = mm_file_open(open_file, f->path, &reason);
  if (!found && reason.status != MM_BAD_INPUT) return mm_fail_as(err, &reason);
  if (!found || memcmp(&open_file->id, &f->id, sizeof f->id) != 0)
    return mm_fail(err, MM_IO, "E_CHANGED", mm_at(f->path, NULL), "found %s since its header was read",
                   found ? "another file, or a change," : "it gone or of another kind");
  r->slot[r->last].direct = open(f->path, O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (r->slot[r->last].direct >= 0)
    posix_fadvise(open_file->fd, 0, 0, POSIX_FADV_RANDOM); /* small reads: what is around them is not wanted */
  r->slot[r->last].file = file;
  return true;
}

static bool read_file(mm_hf_reader *r, const mm_hf_tensor *t, uint64_t at, void *buf, size_t n, mm_err *err) {
  return open_slot(r, t->file, err) && mm_file_read(&r->slot[r->last].open, r->hf->file[t->file].path, buf, n, t->offset + at, err);
}

static bool stream_file(mm_hf_reader *r, const mm_hf_tensor *t, uint64_t at, uint8_t *buf, size_t n, size_t *skew, mm_err *err) {
  return open_slot(r, t->file, err) &&
         mm_file_stream(&r->slot[r->last].open, r->slot[r->last].direct, r->hf->file[t->file].path, buf, n, t->offset + at, skew, err);
}

const mm_source_kind mm_source_files = {mm_files_matrix, read_file, stream_file};
