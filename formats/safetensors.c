/* The safetensors container: reading hostile headers, writing dense ones (huggingface/safetensors, README "Format").
 *
 * A header is scanned once, in place: names and metadata are NUL-terminated where they stand in our copy of it, so that
 * reading costs the header, one mm_st_tensor per tensor and a sort's scratch, whatever the header holds. */
#include "formats/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/scan.h"
#include "formats/system/file.h"

#define PREFIX_BYTES 8
#define PROBE_BYTES  512     /* of a file whose length prefix is nonsense, to say what it looks like */
#define ENTRIES_MAX  1000000 /* tensors, and metadata pairs: bounds memory where entries are as short as can be */
#define NAME_BYTES   4096

typedef struct reader {
  mm_st *st;
  char *text; /* what scan reads, writable: strings are terminated in place once they are scanned */
  mm_scan scan;
  size_t tensor_cap, metadata_cap;
  mm_err *err;
} reader;

static mm_where here(const reader *r) { return mm_at_offset(r->scan.file, r->scan.tensor, r->scan.base + r->scan.pos); }

#define REFUSE(r, code, ...) mm_fail((r)->err, (r)->scan.status, code, here(r), __VA_ARGS__)

/* Prefix */

static uint64_t header_length(const char *head) {
  uint64_t n;
  memcpy(&n, head, sizeof n);
  return n;
}

/* Names, from its first n bytes, the kind of a file that is no safetensors file, and the remedy. Returns NULL if no known kind matches. */
static const char *looks_like(const char *head, size_t n) {
  static const char page[] = "an HTML or XML page, probably a login or error page saved under this name: download the file again";
  static const char pickle[] = "a Python pickle: convert it to safetensors first";
  static const char json[] = "JSON text, perhaps an index or a config: name a weight file";
  static const struct {
    const char *magic, *what;
  } known[] = {
      {MM_LFS_POINTER, "a Git LFS pointer, the tensors are not here: run `git lfs pull`"},
      {"<!", page},
      {"<h", page},
      {"<H", page},
      {"<?xml", page},
      {"GGUF", "a GGUF file: give the original safetensors checkpoint"},
      {"PK\x03\x04", "a ZIP archive or a PyTorch checkpoint: unpack it, or convert it to safetensors first"},
      {"\x1f\x8b", "a gzip archive: unpack it first"},
      {"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"},
      {"\x80\x02", pickle},
      {"\x80\x03", pickle},
      {"\x80\x04", pickle},
      {"\x80\x05", pickle},
      {"{\"", json},
      {"{\n", json},
      {"{\r", json},
      {"{ ", json},
  };
  size_t zeros = 0, blank = 0;
  while (zeros < n && head[zeros] == 0) zeros++;
  if (zeros == n) return "zeros only, never written? An interrupted download or copy: fetch the file again";
  while (blank < n && memchr(" \t\r\n", head[blank], 4)) blank++;
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    size_t m = strlen(known[i].magic);
    if (n - blank >= m && memcmp(head + blank, known[i].magic, m) == 0) return known[i].what;
  }
  return NULL;
}

/* Bytes from the start of the file that reading needs. */
static size_t wanted_bytes(const char *head, uint64_t file_size) {
  uint64_t n = header_length(head);
  bool sane = n >= 2 && n <= MM_ST_HEADER_MAX && n <= file_size - PREFIX_BYTES;
  return (size_t)(sane ? PREFIX_BYTES + n : mm_min(file_size, PROBE_BYTES));
}

/* head: the file's first `bytes` bytes. */
static bool check_prefix(const char *head, size_t bytes, uint64_t file_size, const char *path, mm_status status, mm_err *err) {
  mm_where at = mm_at_offset(path, NULL, 0);
  if (bytes < PREFIX_BYTES) {
    return mm_fail(err, status, "E_PREFIX", at,
                   "found %" PRIu64 " bytes in all, expected a header length of 8 bytes: an interrupted download?", file_size);
  }
  uint64_t n = header_length(head), left = file_size - PREFIX_BYTES;
  bool opens = bytes > PREFIX_BYTES && head[PREFIX_BYTES] == '{';
  const char *what = n > MM_ST_HEADER_MAX || n > left || !opens ? looks_like(head, bytes) : NULL;
  if (what) return mm_fail(err, status, "E_NOT_ST", at, "not a safetensors file; it looks like %s", what);
  if (n > MM_ST_HEADER_MAX) {
    uint64_t swapped = __builtin_bswap64(n);
    return mm_fail(err, status, "E_PREFIX", at, "found header length %" PRIu64 ", expected at most the 100,000,000 cap%s", n,
                   opens && swapped <= MM_ST_HEADER_MAX && swapped <= left ? ": it was written big-endian" : "");
  }
  if (n > left) {
    return mm_fail(err, status, "E_PREFIX", at,
                   "found header length %" PRIu64 ", expected at most the %" PRIu64 " bytes that follow: an interrupted download?", n,
                   left);
  }
  if (n > bytes - PREFIX_BYTES) {
    return mm_fail(err, MM_BUG, "E_BUG", at, "header of %" PRIu64 " bytes, only %zu given", n, bytes - PREFIX_BYTES);
  }
  if (n < 2) return mm_fail(err, status, "E_PREFIX", at, "found header length %" PRIu64 ", expected at least 2", n);
  if (!opens) {
    return mm_fail(err, status, "E_JSON", mm_at_offset(path, NULL, PREFIX_BYTES), "found \"%s\", expected \"{\" as the header's first byte",
                   MM_ESCAPED_BYTES(8, head + PREFIX_BYTES, 1));
  }
  return true;
}

/* Header fields */

/* The value of a scanned string, NUL-terminated; *n is its length, which differs from strlen if it holds NUL. */
static const char *text_of(reader *r, mm_scan_str s, size_t *n) {
  return mm_scan_terminate(r->text, &r->scan, &r->st->arena, s, n, r->err);
}

static bool expect(reader *r, char first, const char *code, const char *field, const char *expected) {
  if (mm_scan_peek(&r->scan) == first) return true;
  return REFUSE(r, code, "%s: found %s, expected %s", field, MM_FOUND(&r->scan), expected);
}

static bool read_dtype(reader *r, mm_st_tensor *t) {
  mm_scan_str s;
  size_t n;
  const char *name;
  if (!expect(r, '"', "E_FIELD", "dtype", "a string") || !mm_scan_string(&r->scan, &s, r->err)) return false;
  if (!(name = text_of(r, s, &n))) return false;
  if (mm_dtype_parse(name, n, &t->dtype)) return true;
  return REFUSE(r, "E_DTYPE", "found dtype \"%s\", expected a safetensors type such as BF16 or F8_E4M3", MM_ESCAPED_BYTES(64, name, n));
}

/* An array of at most max plain integers; more are E_SHAPE or E_OFFSETS like anything else that does not belong there. */
static bool read_numbers(reader *r, const char *code, const char *field, uint64_t *out, uint32_t max, uint32_t *count) {
  *count = 0;
  if (!expect(r, '[', "E_FIELD", field, "an array") || !mm_scan_open(&r->scan, '[', r->err)) return false;
  for (bool first = true, more;; first = false) {
    if (!mm_scan_more(&r->scan, ']', first, &more, r->err)) return false;
    if (!more) return true;
    if (*count == max) return REFUSE(r, code, "%s: expected at most %u numbers, found more", field, max);
    if (!mm_scan_u64(&r->scan, &out[*count], MM_IGNORED)) {
      return REFUSE(r, code, "%s: found %s, expected a plain non-negative integer below 2^64", field, MM_FOUND(&r->scan));
    }
    ++*count;
  }
}

/* Leaves t->offset relative to the data and t->bytes as the header claims. */
static bool read_offsets(reader *r, mm_st_tensor *t) {
  uint64_t range[2];
  uint32_t count;
  if (!read_numbers(r, "E_OFFSETS", "data_offsets", range, 2, &count)) return false;
  if (count != 2) return REFUSE(r, "E_OFFSETS", "found %u data_offsets, expected 2", count);
  if (range[0] > range[1]) {
    return REFUSE(r, "E_OFFSETS", "found data_offsets [%" PRIu64 ", %" PRIu64 "], expected begin <= end", range[0], range[1]);
  }
  t->offset = range[0];
  t->bytes = range[1] - range[0];
  return true;
}

/* The range must be what shape and type need: nobody downstream asks again. */
static bool check_size(reader *r, const mm_st_tensor *t) {
  uint64_t count, bytes;
  const char *fault = NULL;
  if (!mm_shape_count(&t->shape, &count)) {
    fault = "the number of elements overflows 64 bits";
  } else if (!mm_shape_bytes(&t->shape, t->dtype, &bytes)) {
    fault = count > UINT64_MAX / mm_dtype_bits(t->dtype) ? "the size overflows 64 bits" : "the size is not a whole number of bytes";
  } else if (bytes == t->bytes) {
    return true;
  }
  char shape[256];
  mm_shape_text(&t->shape, shape, sizeof shape);
  if (fault)
    return REFUSE(r, "E_SHAPE", "found shape %s of %s, expected a size in whole bytes below 2^64: %s", shape, mm_dtype_name(t->dtype),
                  fault);
  return REFUSE(r, "E_SIZE", "found data_offsets of %" PRIu64 " bytes, expected %" PRIu64 " for shape %s of %s", t->bytes, bytes, shape,
                mm_dtype_name(t->dtype));
}

static bool read_tensor(reader *r, mm_st_tensor *t) {
  static const struct {
    const char *name;
    size_t n;
  } field[] = {{"dtype", 5}, {"shape", 5}, {"data_offsets", 12}};
  enum { DTYPE, SHAPE, OFFSETS, FIELDS };
  bool seen[FIELDS] = {false};
  if (!expect(r, '{', "E_FIELD", "tensor", "an object") || !mm_scan_open(&r->scan, '{', r->err)) return false;
  for (bool first = true, more;; first = false) {
    if (!mm_scan_more(&r->scan, '}', first, &more, r->err)) return false;
    if (!more) break;
    mm_scan_str s;
    size_t n, f = 0;
    const char *key;
    if (!mm_scan_key(&r->scan, &s, r->err) || !(key = text_of(r, s, &n))) return false;
    while (f < FIELDS && (field[f].n != n || memcmp(field[f].name, key, n) != 0)) f++;
    if (f == FIELDS) {
      return REFUSE(r, "E_FIELD", "found key \"%s\", expected dtype, shape and data_offsets only", MM_ESCAPED_BYTES(64, key, n));
    }
    if (seen[f]) return REFUSE(r, "E_DUP_KEY", "found \"%s\" twice, expected once", field[f].name);
    seen[f] = true;
    bool ok = f == DTYPE   ? read_dtype(r, t)
              : f == SHAPE ? read_numbers(r, "E_SHAPE", "shape", t->shape.dim, MM_MAX_RANK, &t->shape.rank)
                           : read_offsets(r, t);
    if (!ok) return false;
  }
  for (size_t f = 0; f < FIELDS; f++) {
    if (!seen[f]) return REFUSE(r, "E_FIELD", "found no \"%s\", expected dtype, shape and data_offsets", field[f].name);
  }
  return check_size(r, t);
}

static bool too_many(reader *r, size_t count, const char *what) {
  if (count < ENTRIES_MAX) return false;
  REFUSE(r, "E_LIMIT", "found more %s, expected at most 1,000,000", what);
  return true;
}

static bool read_metadata(reader *r) {
  mm_st *st = r->st;
  if (!expect(r, '{', "E_META", "__metadata__", "an object of strings") || !mm_scan_open(&r->scan, '{', r->err)) return false;
  for (bool first = true, more;; first = false) {
    if (!mm_scan_more(&r->scan, '}', first, &more, r->err)) return false;
    if (!more) return true;
    mm_scan_str key, value;
    size_t key_n, value_n;
    if (too_many(r, st->metadata_count, "metadata entries")) return false;
    if (!mm_scan_key(&r->scan, &key, r->err)) return false;
    struct mm_st_meta m = {.key = text_of(r, key, &key_n)};
    if (!m.key || !expect(r, '"', "E_META", "__metadata__", "a string") || !mm_scan_string(&r->scan, &value, r->err)) return false;
    if (!(m.value = text_of(r, value, &value_n))) return false;
    if (strlen(m.key) != key_n || strlen(m.value) != value_n) {
      return REFUSE(r, "E_META", "__metadata__: found a NUL character, expected text");
    }
    if (!MM_GROW(st->metadata, &r->metadata_cap, st->metadata_count + 1, r->err)) return false;
    st->metadata[st->metadata_count++] = m;
  }
}

/* Only escapes bring control characters below 0x20: the scanner refuses raw ones. */
static bool check_name(reader *r, const char *name, size_t n, bool escaped) {
  const char *fault = n == 0 ? "is empty" : n > NAME_BYTES ? "is longer than 4096 bytes" : NULL;
  bool control = memchr(name, 0x7F, n) != NULL;
  for (size_t i = 0; escaped && i < n; i++) control = control || (uint8_t)name[i] < 0x20;
  if (control && !fault) fault = "holds a control character";
  if (!fault) return true;
  return REFUSE(r, "E_NAME", "found the tensor name \"%s\", which %s, expected 1 to 4096 bytes of text", MM_ESCAPED_BYTES(1000, name, n),
                fault);
}

static bool read_entry(reader *r, const char *name, size_t n, bool escaped) {
  mm_st *st = r->st;
  if (!check_name(r, name, n, escaped) || too_many(r, st->count, "tensors")) return false;
  if (!MM_GROW(st->tensor, &r->tensor_cap, st->count + 1, r->err)) return false;
  mm_st_tensor *t = &st->tensor[st->count++];
  *t = (mm_st_tensor){.name = name};
  r->scan.tensor = name;
  if (!read_tensor(r, t)) return false;
  r->scan.tensor = NULL;
  return true;
}

static bool read_header(reader *r) {
  static const char meta[] = "__metadata__";
  bool metadata = false;
  if (!mm_scan_open(&r->scan, '{', r->err)) return false;
  for (bool first = true, more;; first = false) {
    if (!mm_scan_more(&r->scan, '}', first, &more, r->err)) return false;
    if (!more) return mm_scan_end(&r->scan, r->err);
    mm_scan_str s;
    size_t n;
    const char *name;
    if (!mm_scan_key(&r->scan, &s, r->err) || !(name = text_of(r, s, &n))) return false;
    if (n == sizeof meta - 1 && memcmp(name, meta, n) == 0) {
      if (metadata) return REFUSE(r, "E_DUP_KEY", "found \"__metadata__\" twice, expected once");
      metadata = true;
      if (!read_metadata(r)) return false;
    } else if (!read_entry(r, name, n, s.escaped)) {
      return false;
    }
  }
}

/* Checks on the whole */

/* By range; an empty tensor before the one that begins at the same place. */
static int by_range(const void *a, const void *b) {
  const mm_st_tensor *x = *(mm_st_tensor *const *)a, *y = *(mm_st_tensor *const *)b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static bool sort_and_check_names(reader *r) {
  mm_st *st = r->st;
  mm_sort(st->tensor, st->count, sizeof *st->tensor, mm_by_text);
  for (size_t i = 1; i < st->count; i++) {
    if (strcmp(st->tensor[i - 1].name, st->tensor[i].name) == 0) {
      return mm_fail(r->err, r->scan.status, "E_DUP_KEY", mm_at(st->path, st->tensor[i].name), "found twice in the header, expected once");
    }
  }
  mm_sort(st->metadata, st->metadata_count, sizeof *st->metadata, mm_by_text);
  for (size_t i = 1; i < st->metadata_count; i++) {
    const char *key = st->metadata[i].key;
    if (strcmp(st->metadata[i - 1].key, key) == 0) {
      return mm_fail(r->err, r->scan.status, "E_DUP_KEY", mm_at(st->path, NULL), "__metadata__: found key \"%s\" twice, expected once",
                     MM_ESCAPED(1000, key));
    }
  }
  return true;
}

/* order: the tensors by range. Offsets are relative to the data, which is data_bytes long. */
static bool check_tiling(reader *r, mm_st_tensor *const *order, uint64_t data_bytes) {
  const mm_st *st = r->st;
  uint64_t end = 0; /* of the tensors so far; cannot wrap, being the end of a checked range */
  const mm_st_tensor *cut = NULL;
  for (size_t i = 0; i < st->count; i++) {
    const mm_st_tensor *t = order[i];
    if (t->offset > end) {
      return mm_fail(r->err, r->scan.status, "E_HOLE", mm_at(st->path, t->name),
                     "found its first byte at data byte %" PRIu64 ", expected %" PRIu64 ": %" PRIu64 " bytes before it belong to no tensor",
                     t->offset, end, t->offset - end);
    }
    if (t->offset < end) {
      const char *name = order[i - 1]->name;
      return mm_fail(r->err, r->scan.status, "E_OVERLAP", mm_at(st->path, t->name),
                     "found its first byte at data byte %" PRIu64 ", expected %" PRIu64 ", where tensor \"%s\" ends", t->offset, end,
                     MM_ESCAPED(256, name));
    }
    end = t->offset + t->bytes;
    if (!cut && end > data_bytes) cut = t;
  }
  if (cut) {
    return mm_fail(r->err, r->scan.status, "E_TRUNCATED", mm_at(st->path, cut->name),
                   "found the file's end at data byte %" PRIu64 ", expected this tensor to end at %" PRIu64
                   " (the header describes %" PRIu64 " data bytes, %" PRIu64 " are missing): an interrupted download?",
                   data_bytes, cut->offset + cut->bytes, end, end - data_bytes);
  }
  if (end < data_bytes) {
    return mm_fail(r->err, r->scan.status, "E_TRAILING", mm_at_offset(st->path, NULL, st->data_start + end),
                   "found %" PRIu64 " bytes after the last tensor, expected none", data_bytes - end);
  }
  return true;
}

static bool check_ranges(reader *r, uint64_t data_bytes) {
  mm_st *st = r->st;
  mm_st_tensor **order = mm_calloc(st->count, sizeof(mm_st_tensor *), r->err);
  if (!order) return false;
  for (size_t i = 0; i < st->count; i++) order[i] = &st->tensor[i];
  mm_sort(order, st->count, sizeof *order, by_range);
  bool ok = check_tiling(r, order, data_bytes);
  free(order);
  return ok;
}

/* text: the file's first bytes, in st's arena; st->path is set. */
static bool read_text(mm_st *st, char *text, size_t bytes, uint64_t file_size, mm_status status, mm_err *err) {
  if (!check_prefix(text, bytes, file_size, st->path, status, err)) return false;
  uint64_t n = header_length(text);
  reader r = {.st = st, .text = text + PREFIX_BYTES, .err = err};
  r.scan = (mm_scan){.text = r.text, .len = n, .file = st->path, .base = PREFIX_BYTES, .status = status};
  st->data_start = PREFIX_BYTES + n;
  st->header = mm_sha256(text, st->data_start); /* before names are terminated in it */
  if (!read_header(&r) || !sort_and_check_names(&r) || !check_ranges(&r, file_size - st->data_start)) return false;
  for (size_t i = 0; i < st->count; i++) st->tensor[i].offset += st->data_start; /* inside the file, by the tiling */
  return true;
}

/* Reading */

static bool set_path(mm_st *st, const char *path, mm_err *err) {
  *st = (mm_st){0};
  st->path = mm_arena_strndup(&st->arena, path, strlen(path), err);
  return st->path != NULL;
}

bool mm_st_parse(mm_st *st, const char *path, const void *header, size_t header_bytes, uint64_t file_size, mm_status status, mm_err *err) {
  size_t bytes = (size_t)mm_min(header_bytes, file_size);
  if (bytes >= PREFIX_BYTES) bytes = (size_t)mm_min(bytes, wanted_bytes(header, file_size));
  char *text = set_path(st, path, err) ? mm_arena_strndup(&st->arena, header, bytes, err) : NULL;
  if (text && read_text(st, text, bytes, file_size, status, err)) return true;
  mm_st_close(st);
  return false;
}

static bool open_file(mm_st *st, const mm_file *f, mm_status status, mm_err *err) {
  char prefix[PREFIX_BYTES];
  size_t bytes = (size_t)mm_min(f->size, PREFIX_BYTES), prefix_bytes = bytes;
  if (!mm_file_read(f, st->path, prefix, prefix_bytes, 0, err)) return false;
  if (bytes == PREFIX_BYTES) bytes = wanted_bytes(prefix, f->size);
  char *text = mm_arena_alloc(&st->arena, bytes, err);
  if (!text) return false;
  memcpy(text, prefix, prefix_bytes); /* not read again: the length must not change under us */
  if (!mm_file_read(f, st->path, text + prefix_bytes, bytes - prefix_bytes, prefix_bytes, err)) return false;
  st->id = f->id;
  return read_text(st, text, bytes, f->size, status, err) && mm_file_unchanged(f, st->path, err);
}

bool mm_st_open(mm_st *st, const char *path, mm_status status, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  bool ok = set_path(st, path, err) && mm_file_open(&f, path, err) && open_file(st, &f, status, err);
  mm_file_close(&f);
  if (!ok) mm_st_close(st);
  return ok;
}

void mm_st_close(mm_st *st) {
  free(st->tensor);
  free(st->metadata);
  mm_arena_close(&st->arena);
  *st = (mm_st){0};
}

const mm_st_tensor *mm_st_find(const mm_st *st, const char *name) {
  mm_st_tensor wanted = {.name = name};
  return st->count ? bsearch(&wanted, st->tensor, st->count, sizeof wanted, mm_by_text) : NULL;
}

const char *mm_st_meta_find(const mm_st *st, const char *key) {
  for (size_t i = 0; i < st->metadata_count; i++)
    if (strcmp(st->metadata[i].key, key) == 0) return st->metadata[i].value;
  return NULL;
}

/* Writing */

static bool put_string(FILE *out, const char *text, mm_err *err) {
  fputc('"', out);
  const char *end = text + strlen(text);
  for (const char *p = text; p < end;) {
    uint8_t c = (uint8_t)*p;
    size_t len = mm_utf8_len(p, (size_t)(end - p));
    if (!len) return mm_fail(err, MM_BUG, "E_NAME", mm_at(NULL, text), "expected valid UTF-8");
    if (c < 0x20) {
      fprintf(out, "\\u%04x", c);
    } else {
      if (c == '"' || c == '\\') fputc('\\', out);
      fwrite(p, 1, len, out);
    }
    p += len;
  }
  fputc('"', out);
  return true;
}

static bool put_metadata(FILE *out, const struct mm_st_meta *metadata, size_t count, mm_err *err) {
  fputs("\"__metadata__\":{", out);
  for (size_t i = 0; i < count; i++) {
    if (i) fputc(',', out);
    if (!put_string(out, metadata[i].key, err)) return false;
    fputc(':', out);
    if (!put_string(out, metadata[i].value, err)) return false;
  }
  fputc('}', out);
  return true;
}

static bool put_tensor(FILE *out, const mm_st_tensor *t, mm_err *err) {
  if (!put_string(out, t->name, err)) return false;
  fprintf(out, ":{\"dtype\":\"%s\",\"shape\":[", mm_dtype_name(t->dtype));
  for (uint32_t i = 0; i < t->shape.rank; i++) fprintf(out, "%s%" PRIu64, i ? "," : "", t->shape.dim[i]);
  fprintf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", t->offset, t->offset + t->bytes);
  return true;
}

/* Offsets relative to the data, one tensor right after the other. */
static bool lay_out(mm_st_tensor *tensors, size_t count, mm_err *err) {
  uint64_t end = 0;
  for (size_t i = 0; i < count; i++) {
    mm_st_tensor *t = &tensors[i];
    t->offset = end;
    if (!mm_shape_bytes(&t->shape, t->dtype, &t->bytes) || !mm_add(end, t->bytes, &end)) {
      return mm_fail(err, MM_BUG, "E_SHAPE", mm_at(NULL, t->name), "its size overflows or is not a whole number of bytes");
    }
  }
  return true;
}

static bool put_header(FILE *out, const mm_st_tensor *tensors, size_t count, const struct mm_st_meta *metadata, size_t metadata_count,
                       uint64_t align, mm_err *err) {
  for (int i = 0; i < PREFIX_BYTES; i++) fputc(0, out);
  fputc('{', out);
  if (metadata_count && !put_metadata(out, metadata, metadata_count, err)) return false;
  for (size_t i = 0; i < count; i++) {
    if (i || metadata_count) fputc(',', out);
    if (!put_tensor(out, &tensors[i], err)) return false;
  }
  fputc('}', out);
  uint64_t end = (uint64_t)ftell(out);
  for (uint64_t pad = mm_round_up(end, align) - end; pad > 0; pad--) fputc(' ', out);
  return true;
}

/* No two tensors share a name: who lays a file out must not give one twice, whatever the input has. */
static bool names_differ(const mm_st_tensor *tensors, size_t count, mm_err *err) {
  const char **name = mm_calloc(count, sizeof *name, err);
  bool ok = name;
  for (size_t i = 0; ok && i < count; i++) name[i] = tensors[i].name;
  if (ok) qsort(name, count, sizeof *name, mm_by_text);
  for (size_t i = 1; ok && i < count; i++)
    ok = strcmp(name[i - 1], name[i]) != 0 ||
         mm_fail(err, MM_BUG, "E_NAME", mm_at(NULL, name[i]), "found twice in one file that is to be written");
  free(name);
  return ok;
}

void *mm_st_header(mm_st_tensor *tensors, size_t count, const struct mm_st_meta *metadata, size_t metadata_count, uint64_t align, size_t *n,
                   mm_err *err) {
  char *text = NULL;
  if (!lay_out(tensors, count, err) || !names_differ(tensors, count, err)) return NULL;
  FILE *out = open_memstream(&text, n);
  if (!out) {
    mm_fail_memory(err, BUFSIZ);
    return NULL;
  }
  bool ok = put_header(out, tensors, count, metadata, metadata_count, align, err);
  if (!mm_close_text(out, &text)) ok = mm_fail_memory(err, *n);
  if (ok && *n - PREFIX_BYTES > MM_ST_HEADER_MAX) {
    ok = mm_fail(err, MM_LIMIT, "E_LIMIT", mm_at(NULL, NULL), "a header of %zu bytes, expected at most 100,000,000", *n - PREFIX_BYTES);
  }
  if (!ok) {
    free(text);
    return NULL;
  }
  uint64_t length = *n - PREFIX_BYTES;
  memcpy(text, &length, sizeof length);
  for (size_t i = 0; i < count; i++) tensors[i].offset += *n;
  return text;
}
