/* The weight map: tensor name -> file name, from an index that may be hostile and has about 100,000 entries. */
#include "convert/source/index.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/scan.h"

/* A file name as it came up; `at` is what mm_hf_tensor.file says until all are known. */
typedef struct mm_noted {
  const char *name;
  uint32_t at;
} mm_noted;

typedef struct mm_index_reader {
  mm_hf *hf;
  char *text; /* what scan reads */
  mm_scan scan;
  const char *path;
  size_t tensor_cap, noted_count, noted_cap;
  mm_noted *noted;
  bool seen_map, seen_metadata;
  mm_err *err;
} mm_index_reader;

static bool bad(mm_index_reader *r, const char *code, const char *tensor, const char *what) {
  return mm_fail(r->err, MM_BAD_INPUT, code, mm_at_offset(r->path, tensor, r->scan.pos), "%s", what);
}

static char *text_of(mm_index_reader *r, mm_scan_str s, size_t *n) {
  return mm_scan_terminate(r->text, &r->scan, &r->hf->arena, s, n, r->err);
}

/* Notes the file of a tensor, once for a run of tensors of one file. */
static bool note_file(mm_index_reader *r, mm_scan_str s, const char *tensor, uint32_t *out) {
  const char *last = r->noted_count ? r->noted[r->noted_count - 1].name : "";
  size_t n = 0;
  if (s.escaped || s.n == 0 || strlen(last) != s.n || memcmp(last, s.p, s.n) != 0) {
    char *name = text_of(r, s, &n);
    if (!name) return false;
    if (!mm_base_name_ok(name, n)) {
      return mm_fail(r->err, MM_BAD_INPUT, "E_IDX_PATH", mm_at(r->path, tensor), "found file name \"%s\", expected a plain base name",
                     MM_ESCAPED_BYTES(256, name, n));
    }
    if (!MM_GROW(r->noted, &r->noted_cap, r->noted_count + 1, r->err)) return false;
    r->noted[r->noted_count] = (mm_noted){name, (uint32_t)r->noted_count};
    r->noted_count++;
  }
  *out = (uint32_t)(r->noted_count - 1);
  return true;
}

static bool weight_map(mm_index_reader *r) {
  mm_hf *hf = r->hf;
  if (r->seen_map) return bad(r, "E_IDX", NULL, "found \"weight_map\" twice, expected once");
  r->seen_map = true;
  if (!mm_scan_open(&r->scan, '{', r->err)) return false;
  for (bool first = true, more = false;; first = false) {
    mm_scan_str key, value;
    if (!mm_scan_more(&r->scan, '}', first, &more, r->err)) return false;
    if (!more) break;
    if (!mm_scan_key(&r->scan, &key, r->err)) return false;
    size_t n = 0;
    char *name = text_of(r, key, &n);
    if (!name) return false;
    if (n == 0 || strlen(name) != n) return bad(r, "E_NAME", NULL, "found a tensor name that is empty or holds NUL, expected text");
    if (mm_scan_peek(&r->scan) != '"') return bad(r, "E_IDX", name, "found a value that is not a string, expected a file name");
    if (!mm_scan_string(&r->scan, &value, r->err)) return false;
    if (!MM_GROW(hf->tensor, &r->tensor_cap, hf->tensor_count + 1, r->err)) return false;
    mm_hf_tensor *t = &hf->tensor[hf->tensor_count];
    *t = (mm_hf_tensor){.name = name, .original = name};
    if (!note_file(r, value, name, &t->file)) return false;
    hf->tensor_count++;
  }
  return hf->tensor_count > 0 || bad(r, "E_IDX", NULL, "found an empty weight_map, expected names and files");
}

/* An integer, a float that is whole (pandas and some exporters write 8170944.0), or null, which is no total. */
static bool total_size(mm_index_reader *r) {
  mm_scan_str text;
  bool real = false;
  char copy[64];
  if (mm_scan_peek(&r->scan) == 'n') return mm_scan_skip(&r->scan, r->err);
  const mm_scan start = r->scan;
  if (mm_scan_peek(&r->scan) != '"' && !mm_scan_number(&r->scan, &text, &real, r->err)) return false;
  if (!real) {
    r->scan = start;
    r->hf->total_given = true;
    return mm_scan_u64(&r->scan, &r->hf->total_size, r->err);
  }
  snprintf(copy, sizeof copy, "%.*s", (int)mm_min(text.n, sizeof copy - 1), text.p);
  double v = strtod(copy, NULL);
  if (text.n >= sizeof copy || !(v >= 0 && v < 0x1p63) || v != floor(v))
    return mm_fail(r->err, MM_BAD_INPUT, "E_NUMBER", mm_at_offset(r->path, NULL, start.pos), "found %s, expected a whole number of bytes",
                   copy);
  r->hf->total_given = true;
  r->hf->total_size = (uint64_t)v;
  return true;
}

static bool metadata(mm_index_reader *r) {
  if (r->seen_metadata) return bad(r, "E_IDX", NULL, "found \"metadata\" twice, expected once");
  r->seen_metadata = true;
  if (mm_scan_peek(&r->scan) == 'n') return mm_scan_skip(&r->scan, r->err);
  if (mm_scan_peek(&r->scan) != '{') return bad(r, "E_IDX", NULL, "found metadata that is not an object, expected one");
  if (!mm_scan_open(&r->scan, '{', r->err)) return false;
  for (bool first = true, more = false;; first = false) {
    mm_scan_str key;
    if (!mm_scan_more(&r->scan, '}', first, &more, r->err)) return false;
    if (!more) return true;
    if (!mm_scan_key(&r->scan, &key, r->err)) return false;
    bool total = key.n == 10 && memcmp(key.p, "total_size", 10) == 0;
    if (!(total ? total_size(r) : mm_scan_skip(&r->scan, r->err))) return false;
  }
}

/* One file, in order of names, for all that was noted under its name. */
static bool make_files(mm_index_reader *r) {
  mm_hf *hf = r->hf;
  size_t cap = 0;
  uint32_t *file = mm_calloc(r->noted_count, sizeof *file, r->err);
  bool ok = file != NULL;
  qsort(r->noted, r->noted_count, sizeof *r->noted, mm_by_text);
  for (size_t i = 0; ok && i < r->noted_count; i++) {
    if (i == 0 || mm_by_text(&r->noted[i - 1], &r->noted[i]) != 0) {
      ok = MM_GROW(hf->file, &cap, hf->file_count + 1, r->err);
      if (ok) hf->file[hf->file_count++] = (mm_hf_file){.name = r->noted[i].name};
    }
    file[r->noted[i].at] = (uint32_t)(hf->file_count - 1);
  }
  for (size_t i = 0; ok && i < hf->tensor_count; i++) hf->tensor[i].file = file[hf->tensor[i].file];
  free(file);
  return ok;
}

static bool parse(mm_index_reader *r) {
  mm_hf *hf = r->hf;
  mm_err *err = r->err;
  if (!mm_scan_open(&r->scan, '{', err)) return false;
  for (bool first = true, more = false;; first = false) {
    mm_scan_str key;
    if (!mm_scan_more(&r->scan, '}', first, &more, err)) return false;
    if (!more) break;
    if (!mm_scan_key(&r->scan, &key, err)) return false;
    bool map = key.n == 10 && memcmp(key.p, "weight_map", 10) == 0, meta = key.n == 8 && memcmp(key.p, "metadata", 8) == 0;
    if (map && mm_scan_peek(&r->scan) != '{') return bad(r, "E_IDX", NULL, "found a weight_map that is not an object, expected one");
    if (!(map ? weight_map(r) : meta ? metadata(r) : mm_scan_skip(&r->scan, err))) return false;
  }
  if (!mm_scan_end(&r->scan, err)) return false;
  if (!r->seen_map) return bad(r, "E_IDX", NULL, "found no \"weight_map\", expected one");
  const mm_hf_tensor *twice = mm_hf_sort(hf);
  return twice ? bad(r, "E_DUP_KEY", twice->name, "found twice in weight_map, expected once") : make_files(r);
}

bool mm_index_parse(mm_hf *hf, const char *path, char *text, size_t n, mm_err *err) {
  mm_index_reader r = {.hf = hf, .path = path, .err = err};
  r.text = text;
  r.scan = (mm_scan){.text = text, .len = n, .file = path, .status = MM_BAD_INPUT};
  bool ok = parse(&r);
  free(r.noted);
  return ok;
}
