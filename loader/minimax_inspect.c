/* minimax-inspect: lists a checkpoint (source or packed) and compares two. Headers only, unless --data asks for the bytes. */
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "convert/source/hf.h"
#include "formats/option.h"
#include "loader/shards.h"

typedef struct mm_inspect_args {
  const char *dir[1];
  const char *diff, *match;
  bool json, data, summary;
} mm_inspect_args;

/* One line of a listing: a tensor of the source, or a packed tensor with all its planes. */
typedef struct mm_listed {
  const char *name;
  char type[64]; /* dtype, or scheme with its scale grid */
  char shape[64];
  uint64_t bytes; /* of the source, or on one rank */
  size_t index;   /* into hf.tensor or the manifest's tensors */
} mm_listed;

typedef struct mm_listing {
  bool packed;
  mm_hf hf;
  mm_shards shards;
  size_t count;
  mm_listed *item; /* sorted by name */
} mm_listing;

static int by_name(const void *a, const void *b) { return strcmp(((const mm_listed *)a)->name, ((const mm_listed *)b)->name); }

static void list_source(mm_listing *l) {
  for (size_t i = 0; i < l->count; i++) {
    const mm_hf_tensor *t = &l->hf.tensor[i];
    mm_listed *x = &l->item[i];
    x->name = t->original;
    snprintf(x->type, sizeof x->type, "%s", mm_dtype_name(t->dtype));
    mm_shape_text(&t->shape, x->shape, sizeof x->shape);
    x->bytes = t->bytes;
    x->index = i;
  }
}

static void list_packed(mm_listing *l) {
  for (size_t i = 0; i < l->count; i++) {
    const mm_pack_tensor *t = &l->shards.pack.tensor[i];
    mm_listed *x = &l->item[i];
    x->name = t->name;
    int n = snprintf(x->type, sizeof x->type, "%s", t->scheme);
    for (unsigned p = 1; p < t->plane_count && n > 0 && (size_t)n < sizeof x->type; p++)
      n += snprintf(x->type + n, sizeof x->type - (size_t)n, " %ux%u", t->plane[p].cell_n, t->plane[p].cell_k);
    mm_shape s = t->vector ? mm_shape1(t->rows) : t->lead ? mm_shape3(t->lead, t->rows, t->cols) : mm_shape2(t->rows, t->cols);
    mm_shape_text(&s, x->shape, sizeof x->shape);
    for (unsigned p = 0; p < t->plane_count; p++) {
      mm_shape plane = mm_pack_plane_shape(t, p);
      uint64_t bytes = 0;
      if (mm_shape_bytes(&plane, t->plane[p].dtype, &bytes)) x->bytes += bytes; /* the manifest's reader has refused overflow */
    }
    x->index = i;
  }
}

static bool open_listing(mm_listing *l, const char *dir, mm_err *err) {
  char manifest[PATH_MAX];
  snprintf(manifest, sizeof manifest, "%s/%s", dir, MM_MANIFEST);
  l->packed = access(manifest, F_OK) == 0;
  mm_hf_options o = {.allow_outside_links = true};
  if (!(l->packed ? mm_shards_open(&l->shards, dir, err) : mm_hf_open(&l->hf, dir, &o, err))) return false;
  l->count = l->packed ? l->shards.pack.tensor_count : l->hf.tensor_count;
  l->item = mm_calloc(l->count, sizeof *l->item, err);
  if (!l->item) return false;
  if (l->packed)
    list_packed(l);
  else
    list_source(l);
  return true;
}

static void close_listing(mm_listing *l) {
  free(l->item);
  mm_shards_close(&l->shards);
  mm_hf_close(&l->hf);
}

static void print_summary(const mm_listing *l, const char *dir) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < l->count; i++) bytes += l->item[i].bytes;
  mm_show_to(stdout, dir);
  if (!l->packed) {
    printf(": source, %zu tensors in %zu files, %" PRIu64 " bytes\n", l->count, l->hf.file_count, bytes);
    return;
  }
  const mm_pack *p = &l->shards.pack;
  fputs(": packed by ", stdout);
  mm_show_to(stdout, p->tool);
  fputs(", ", stdout);
  mm_show_to(stdout, p->model.architecture);
  printf(", --tp %u --ep %u --pp %u --quant \"", p->tp, p->ep, p->pp);
  mm_show_to(stdout, p->quant);
  fputs("\" --tp-align ", stdout);
  mm_show_to(stdout, p->tp_align);
  printf(", %zu tensors, %" PRIu64 " bytes a rank\n", l->count, bytes);
  for (uint32_t r = 0; r < mm_pack_ranks(p); r++)
    for (size_t i = 0; i < p->rank[r].part_count; i++)
      printf("  %s  %" PRIu64 " bytes\n", p->rank[r].part[i].file, p->rank[r].part[i].size);
}

static bool wanted(const mm_inspect_args *a, const char *name) { return !a->match || strstr(name, a->match); }

static bool print_json(const mm_inspect_args *a, const mm_listing *l, mm_err *err) {
  mm_json *o = mm_json_new_obj(), *list = mm_json_new_arr();
  bool ok = o && list && mm_json_set(o, "kind", mm_json_new_str(l->packed ? "packed" : "source"));
  for (size_t i = 0; ok && i < l->count; i++) {
    const mm_listed *x = &l->item[i];
    if (!wanted(a, x->name)) continue;
    mm_json *e = mm_json_new_obj();
    ok = e && mm_json_set(e, "name", mm_json_new_str(x->name)) && mm_json_set(e, "type", mm_json_new_str(x->type)) &&
         mm_json_set(e, "shape", mm_json_new_str(x->shape)) && mm_json_set(e, "bytes", mm_json_new_int((int64_t)x->bytes));
    ok = mm_json_append(list, e) && ok;
  }
  ok = mm_json_set(o, "tensors", list) && ok;
  char *text = ok ? mm_json_dump(o, true) : NULL;
  mm_json_free(o);
  if (!text) return mm_fail_memory(err, 0);
  puts(text);
  free(text);
  return true;
}

static bool print_listing(const mm_inspect_args *a, const mm_listing *l, mm_err *err) {
  if (a->json) return print_json(a, l, err);
  print_summary(l, a->dir[0]);
  for (size_t i = 0; !a->summary && i < l->count; i++) {
    const mm_listed *x = &l->item[i];
    char name[256];
    if (wanted(a, x->name)) printf("  %-68s %-20s %-20s %12" PRIu64 "\n", mm_show(name, sizeof name, x->name), x->type, x->shape, x->bytes);
  }
  return true;
}

/* Whether the stored bytes of two tensors with equal type and shape are equal, on every rank that both directories hold. */
static bool same_packed(const mm_listing *a, const mm_listed *x, const mm_listing *b, const mm_listed *y) {
  const mm_pack *p = &a->shards.pack, *q = &b->shards.pack;
  if (p->tp != q->tp || p->ep != q->ep || p->pp != q->pp) return false;
  uint32_t first = p->tensor[x->index].stage * p->tp;
  for (uint32_t r = first; r < first + p->tp; r++) {
    const mm_shard_rank *s = &a->shards.rank[r], *t = &b->shards.rank[r];
    for (unsigned i = 0; s->plane && t->plane && i < p->tensor[x->index].plane_count; i++) {
      const mm_shard_plane *u = &s->plane[x->index * MM_PACK_PLANES + i], *v = &t->plane[y->index * MM_PACK_PLANES + i];
      if (u->bytes != v->bytes || memcmp(s->map[u->part].data + u->offset, t->map[v->part].data + v->offset, u->bytes) != 0) return false;
    }
  }
  return true;
}

static bool same_source(const mm_listing *a, const mm_listed *x, const mm_listing *b, const mm_listed *y, bool *same, mm_err *err) {
  enum { CHUNK = 1 << 20 };
  mm_hf_reader ra, rb;
  mm_hf_reader_open(&ra, &a->hf);
  mm_hf_reader_open(&rb, &b->hf);
  uint8_t *buf = mm_calloc(2, CHUNK, err);
  bool ok = buf != NULL;
  for (uint64_t at = 0; ok && *same && at < x->bytes; at += CHUNK) {
    size_t n = (size_t)mm_min(CHUNK, x->bytes - at);
    ok = mm_hf_read(&ra, &a->hf.tensor[x->index], at, buf, n, err) && mm_hf_read(&rb, &b->hf.tensor[y->index], at, buf + CHUNK, n, err);
    *same = ok && memcmp(buf, buf + CHUNK, n) == 0;
  }
  free(buf);
  mm_hf_reader_close(&ra);
  mm_hf_reader_close(&rb);
  return ok;
}

static bool diff_pair(const mm_inspect_args *args, const mm_listing *a, const mm_listed *x, const mm_listing *b, const mm_listed *y,
                      size_t *differences, mm_err *err) {
  bool form = strcmp(x->type, y->type) == 0 && strcmp(x->shape, y->shape) == 0, same = form;
  if (form && args->data) {
    if (a->packed)
      same = same_packed(a, x, b, y);
    else if (!same_source(a, x, b, y, &same, err))
      return false;
  }
  if (same) return true;
  ++*differences;
  char name[512];
  printf("~ %s: %s %s, %s %s%s\n", mm_show(name, sizeof name, x->name), x->type, x->shape, y->type, y->shape, form ? ", other bytes" : "");
  return true;
}

static bool diff(const mm_inspect_args *args, const mm_listing *a, const mm_listing *b, mm_err *err) {
  if (args->data && a->packed != b->packed)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(args->diff, NULL),
                   "found a packed and a source checkpoint; --data compares two of a kind");
  qsort(a->item, a->count, sizeof *a->item, by_name);
  qsort(b->item, b->count, sizeof *b->item, by_name);
  size_t i = 0, j = 0, differences = 0;
  while (i < a->count || j < b->count) {
    int c = i == a->count ? 1 : j == b->count ? -1 : strcmp(a->item[i].name, b->item[j].name);
    const mm_listed *x = c <= 0 ? &a->item[i++] : NULL, *y = c >= 0 ? &b->item[j++] : NULL;
    if (x && y) {
      if (!diff_pair(args, a, x, b, y, &differences, err)) return false;
      continue;
    }
    differences++;
    char name[512];
    printf("%c %s: %s %s\n", x ? '-' : '+', mm_show(name, sizeof name, (x ? x : y)->name), (x ? x : y)->type, (x ? x : y)->shape);
  }
  if (differences == 0) {
    printf("same: %zu tensors%s\n", a->count, args->data ? ", every byte" : " (names, types, shapes)");
    return true;
  }
  return mm_fail(err, MM_INTEGRITY, "E_DIFFER", mm_at(args->diff, NULL), "found %zu tensors that differ from %s", differences,
                 args->dir[0]);
}

static bool inspect(const mm_inspect_args *a, mm_err *err) {
  mm_listing l = {0}, other = {0};
  bool ok = open_listing(&l, a->dir[0], err) && (!a->diff || open_listing(&other, a->diff, err));
  ok = ok && (a->diff ? diff(a, &l, &other, err) : print_listing(a, &l, err));
  close_listing(&l);
  close_listing(&other);
  return ok && mm_program_written(err);
}

int main(int argc, char **argv) {
  mm_program_start();
  mm_inspect_args a = {0};
  const mm_option options[] = {
      {.name = "diff",
       .kind = MM_OPT_STR,
       .target = &a.diff,
       .arg = "DIR2",
       .help = "compare with another checkpoint; status 6 when they differ"},
      {.name = "data", .kind = MM_OPT_FLAG, .target = &a.data, .help = "with --diff: compare the bytes too"},
      {.name = "match", .kind = MM_OPT_STR, .target = &a.match, .arg = "TEXT", .help = "only tensors whose name holds TEXT"},
      {.name = "summary", .kind = MM_OPT_FLAG, .target = &a.summary, .help = "only the first lines: kind, counts, files"},
      {.name = "json", .kind = MM_OPT_FLAG, .target = &a.json, .help = "the listing as JSON"},
  };
  const mm_program program = {
      .name = "minimax-inspect",
      .summary = "list a source or packed checkpoint, or compare two",
      .operands = "DIR",
      .min_operands = 1,
      .max_operands = 1,
      .options = options,
      .option_count = sizeof options / sizeof *options,
      .epilog = "Exit status: 0 listed or same, 2 usage, 3 bad input, 4 unsupported, 5 I/O, 6 damaged, or different with --diff.",
  };
  mm_err err = {0};
  size_t operands = 0;
  bool done = false;
  if (!mm_options_parse(&program, argc, argv, a.dir, &operands, &done, &err)) return mm_program_fail(&program, &err);
  if (done || inspect(&a, &err)) return MM_OK;
  return mm_program_fail(&program, &err);
}
