/* A small Hugging Face checkpoint in memory, to be spoilt in one place, written to a real directory and read. One layer of
 * MiniMax-M2 in block FP8, all extents different, every byte of every tensor different from its neighbours. The safetensors and index
 * writers here share nothing with the code under test. */
#ifndef MM_TESTS_CONVERT_SOURCE_H
#define MM_TESTS_CONVERT_SOURCE_H

#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "convert/decode/decode.h"
#include "convert/plan/plan.h"
#include "tests/unit/put_file.h"
#include "tests/unit/unit.h"

enum { HIDDEN = 10, HEADS = 2, KV_HEADS = 1, HEAD_DIM = 4, EXPERTS = 3, INTER = 6, VOCAB = 12 };

typedef struct src_tensor {
  char name[1200]; /* as it stands in the JSON, so that a test may spoil it */
  char dtype[16];
  unsigned rank;
  uint64_t dim[4];
  size_t bytes;
  uint8_t *data;
  int shard;        /* file that holds it; -1: none */
  const char *file; /* file that the index names; NULL: the index does not list it */
} src_tensor;

typedef struct src_dims {
  unsigned hidden, heads, kv_heads, head_dim, experts, inter, vocab;
  bool bf16; /* instead of block FP8 */
} src_dims;

typedef struct source {
  char root[64]; /* a fresh directory; the checkpoint is root/src */
  char config[2048];
  const char *file[4]; /* of each shard */
  size_t file_count;
  const char *index; /* text to write instead of the true index; "" writes none */
  size_t count;
  src_tensor t[64];
} source;

static inline size_t src_size(const char *dtype) {
  if (strcmp(dtype, "I64") == 0) return 8;
  return strcmp(dtype, "F32") == 0 || strcmp(dtype, "I32") == 0 ? 4 : strcmp(dtype, "BF16") == 0 || strcmp(dtype, "F16") == 0 ? 2 : 1;
}

/* Finite values of the type, all small, neighbours different. */
static inline void src_fill(src_tensor *t, uint32_t seed) {
  for (size_t i = 0; i < t->bytes / src_size(t->dtype); i++) {
    uint32_t x = (seed + (uint32_t)i) * 2654435761u;
    uint8_t *at = t->data + i * src_size(t->dtype);
    float f = 0.25f + (float)(x >> 12) / 1048576.0f; /* [0.25, 1.25) */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (src_size(t->dtype) == 4)
      memcpy(at, &bits, 4);
    else if (strcmp(t->dtype, "BF16") == 0)
      memcpy(at, (uint8_t *)&bits + 2, 2);
    else if (strcmp(t->dtype, "F16") == 0)
      memcpy(at, (uint16_t[]){(uint16_t)(0x3000 + (x >> 20))}, 2);
    else
      *at = (uint8_t)(0x20 + (x >> 27) + (x >> 19 & 0x80));
  }
}

/* Gives t a type and shape, and new contents. */
static inline void src_shape(src_tensor *t, const char *dtype, unsigned rank, uint64_t a, uint64_t b, uint64_t c) {
  snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
  t->rank = rank;
  t->dim[0] = a;
  t->dim[1] = b;
  t->dim[2] = c;
  t->bytes = src_size(dtype);
  for (unsigned i = 0; i < rank; i++) t->bytes *= t->dim[i];
  free(t->data);
  t->data = calloc(1, t->bytes + 1);
  assert_non_null(t->data);
  uint32_t seed = 17;
  for (const char *s = t->name; *s; s++) seed = seed * 31 + (uint8_t)*s;
  src_fill(t, seed);
}

static inline src_tensor *src_add(source *s, const char *name, const char *dtype, unsigned rank, uint64_t a, uint64_t b) {
  assert_true(s->count < sizeof s->t / sizeof *s->t);
  src_tensor *t = &s->t[s->count++];
  *t = (src_tensor){.shard = (int)(s->count % s->file_count)};
  t->file = s->file[t->shard];
  snprintf(t->name, sizeof t->name, "%s", name);
  src_shape(t, dtype, rank, a, b, 0);
  return t;
}

static inline void src_matrix(source *s, bool bf16, const char *name, uint64_t rows, uint64_t cols) {
  char scale[160];
  snprintf(scale, sizeof scale, "%s_scale_inv", name);
  src_add(s, name, bf16 ? "BF16" : "F8_E4M3", 2, rows, cols);
  if (!bf16) src_add(s, scale, "F32", 2, (rows + 127) / 128, (cols + 127) / 128); /* mostly in the other shard */
}

static inline src_tensor *src_find(source *s, const char *end) {
  for (size_t i = 0; i < s->count; i++) {
    size_t n = strlen(s->t[i].name), k = strlen(end);
    if (n >= k && strcmp(s->t[i].name + n - k, end) == 0) return &s->t[i];
  }
  fail_msg("the source has no %s", end);
  return NULL;
}

static inline void src_remove(source *s, const char *end) {
  src_tensor *t = src_find(s, end);
  free(t->data);
  *t = s->t[--s->count];
}

#define SRC_ATTN "model.layers.0.self_attn."
#define SRC_MOE  "model.layers.0.block_sparse_moe."

static inline source *src_open_as(src_dims d) {
  const char *tmp = getenv("TMPDIR");
  source *s = malloc(sizeof *s);
  assert_non_null(s);
  *s = (source){.file = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}, .file_count = 2};
  snprintf(s->root, sizeof s->root, "%.40s/convert.XXXXXX", tmp && strlen(tmp) < 40 ? tmp : "/tmp");
  assert_non_null(mkdtemp(s->root));
  snprintf(s->config, sizeof s->config,
           "{\"architectures\":[\"MiniMaxM2ForCausalLM\"],\"hidden_size\":%u,\"num_hidden_layers\":1,\"num_attention_heads\":%u,"
           "\"num_key_value_heads\":%u,\"head_dim\":%u,\"intermediate_size\":%u,\"num_local_experts\":%u,\"num_experts_per_tok\":2,"
           "\"rotary_dim\":2,\"vocab_size\":%u,\"chat_template\":\"{{ evil() }}\",\"quantization_config\":%s}",
           d.hidden, d.heads, d.kv_heads, d.head_dim, d.inter, d.experts, d.vocab,
           d.bf16 ? "null" : "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}");
  src_add(s, "model.embed_tokens.weight", "BF16", 2, d.vocab, d.hidden);
  src_add(s, "model.layers.0.input_layernorm.weight", "BF16", 1, d.hidden, 0);
  src_matrix(s, d.bf16, SRC_ATTN "q_proj.weight", d.heads * d.head_dim, d.hidden);
  src_matrix(s, d.bf16, SRC_ATTN "k_proj.weight", d.kv_heads * d.head_dim, d.hidden);
  src_matrix(s, d.bf16, SRC_ATTN "v_proj.weight", d.kv_heads * d.head_dim, d.hidden);
  src_matrix(s, d.bf16, SRC_ATTN "o_proj.weight", d.hidden, d.heads * d.head_dim);
  src_add(s, SRC_ATTN "q_norm.weight", "BF16", 1, d.heads * d.head_dim, 0);
  src_add(s, SRC_ATTN "k_norm.weight", "BF16", 1, d.kv_heads * d.head_dim, 0);
  src_add(s, "model.layers.0.post_attention_layernorm.weight", "BF16", 1, d.hidden, 0);
  src_add(s, SRC_MOE "gate.weight", "F32", 2, d.experts, d.hidden);
  src_add(s, SRC_MOE "e_score_correction_bias", "F32", 1, d.experts, 0);
  for (unsigned e = 0; e < d.experts; e++)
    for (int w = 1; w <= 3; w++) {
      char name[128];
      snprintf(name, sizeof name, SRC_MOE "experts.%u.w%d.weight", e, w);
      src_matrix(s, d.bf16, name, w == 2 ? d.hidden : d.inter, w == 2 ? d.inter : d.hidden);
    }
  src_add(s, "model.norm.weight", "BF16", 1, d.hidden, 0);
  src_add(s, "lm_head.weight", "BF16", 2, d.vocab, d.hidden);
  return s;
}

static inline source *src_open(void) { return src_open_as((src_dims){HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, INTER, VOCAB, false}); }

/* "root/name" in one of four buffers. */
static inline const char *src_path(const source *s, const char *name) {
  static char text[4][8192];
  static unsigned turn;
  char *out = text[turn++ % 4];
  snprintf(out, sizeof text[0], "%s/%s", s->root, name);
  return out;
}

/* Paths below root. */
static inline void src_move(const source *s, const char *from, const char *to) {
  assert_int_equal(rename(src_path(s, from), src_path(s, to)), 0);
}
static inline void src_link(const source *s, const char *to, const char *at) { assert_int_equal(symlink(to, src_path(s, at)), 0); }

/* Replaces `old` in the config. */
MM_PRINTF(3, 4) static inline void src_config(source *s, const char *old, const char *fmt, ...) {
  char text[sizeof s->config];
  char *at = strstr(s->config, old);
  if (!at) fail_msg("the config has no %s", old);
  memcpy(text, s->config, sizeof text);
  size_t n = (size_t)(at - s->config);
  va_list args;
  va_start(args, fmt);
  n += (size_t)vsnprintf(at, sizeof text - n, fmt, args);
  va_end(args);
  snprintf(s->config + n, sizeof text - n, "%s", text + (at - s->config) + strlen(old));
}

/* The JSON header of a shard; free() it. */
static inline char *src_header(const source *s, int shard, size_t *n) {
  char *header = NULL;
  size_t at = 0;
  FILE *f = open_memstream(&header, n);
  fprintf(f, "{\"__metadata__\":{\"format\":\"pt\"}");
  for (size_t i = 0; i < s->count; i++) {
    const src_tensor *t = &s->t[i];
    if (t->shard != shard) continue;
    fprintf(f, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
    for (unsigned d = 0; d < t->rank; d++) fprintf(f, "%s%llu", d ? "," : "", (unsigned long long)t->dim[d]);
    fprintf(f, "],\"data_offsets\":[%zu,%zu]}", at, at + t->bytes);
    at += t->bytes;
  }
  fputc('}', f);
  fclose(f);
  return header;
}

static inline void src_write_shard(const source *s, int shard, const char *path) {
  size_t n = 0;
  char *header = src_header(s, shard, &n);
  FILE *f = fopen(path, "wb");
  if (!f) fail_msg("cannot make %s", path);
  uint64_t length = n; /* little-endian, like the format */
  fwrite(&length, 8, 1, f);
  fwrite(header, 1, n, f);
  for (size_t i = 0; i < s->count; i++)
    if (s->t[i].shard == shard) fwrite(s->t[i].data, 1, s->t[i].bytes, f);
  assert_int_equal(fclose(f), 0);
  free(header);
}

/* Where a tensor's data begins in its file. */
static inline size_t src_offset(const source *s, const src_tensor *t) {
  size_t n = 0;
  free(src_header(s, t->shard, &n));
  n += 8;
  for (const src_tensor *x = s->t; x < t; x++)
    if (x->shard == t->shard) n += x->bytes;
  return n;
}

static inline void src_write_index(const source *s) {
  FILE *f = fopen(src_path(s, "src/model.safetensors.index.json"), "wb");
  assert_non_null(f);
  fprintf(f, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
  for (size_t i = 0, n = 0; i < s->count; i++)
    if (s->t[i].file) fprintf(f, "%s\"%s\":\"%s\"", n++ ? ",\n" : "", s->t[i].name, s->t[i].file);
  fputs("}}\n", f);
  assert_int_equal(fclose(f), 0);
}

/* Writes root/src: config, index, shards that the file table names. */
static inline void src_write(const source *s) {
  assert_int_equal(mkdir(src_path(s, "src"), 0755), 0);
  put_file(src_path(s, "src/config.json"), s->config, strlen(s->config));
  put_file(src_path(s, "src/tokenizer.json"), "{}", 2);
  for (size_t i = 0; i < s->file_count; i++) {
    char name[300];
    snprintf(name, sizeof name, "src/%s", s->file[i]);
    src_write_shard(s, (int)i, src_path(s, name));
  }
  if (!s->index)
    src_write_index(s);
  else if (*s->index)
    put_file(src_path(s, "src/model.safetensors.index.json"), s->index, strlen(s->index));
}

static inline int src_unlink(const char *path, const struct stat *st, int type, struct FTW *ftw) {
  (void)st;
  (void)type;
  (void)ftw;
  return remove(path);
}

static inline source *src_close(source *s) {
  nftw(s->root, src_unlink, 8, FTW_DEPTH | FTW_PHYS);
  for (size_t i = 0; i < s->count; i++) free(s->t[i].data);
  free(s);
  return NULL;
}

/* FRESH(s) { … }: a whole source that the block spoils, writes and has read. NOLINTNEXTLINE(bugprone-macro-parentheses) */
#define FRESH(s) for (source *s = src_open(); s; s = src_close(s))

/* How far a source is read: opened, planned, every weight decoded. */
typedef enum src_depth { SRC_OPEN, SRC_PLAN, SRC_READ } src_depth;

typedef struct src_options {
  src_depth depth;
  const char *quant; /* NULL: none */
  bool outside;
} src_options;

/* Reads every weight the way a conversion does: as stored where the plan copies, else as numbers. */
static inline bool src_decode(const mm_plan *p, mm_err *err) {
  mm_decoder d;
  mm_decoder_open(&d, p->hf);
  bool ok = true;
  for (size_t i = 0; ok && i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    for (size_t k = 0; ok && k < (size_t)(t->lead ? t->lead : 1) * t->piece_count; k++) {
      const mm_matrix *x = &p->tensor[i].matrix[k];
      const mm_scheme *scheme = p->tensor[i].scheme;
      const void *plane[MM_MAX_PLANES];
      float global = 0;
      if (mm_encoding_keeps(x, scheme, p->tensor[i].grid))
        ok = (!scheme->needs_amax || mm_decode_global(&d, x, &global, err)) &&
             mm_decode_planes(&d, x, &(mm_stored_as){scheme, p->tensor[i].grid, global}, 0, x->rows, plane, err);
      else
        ok = mm_decode_f32(&d, x, 0, x->rows, err);
    }
  }
  mm_decoder_close(&d);
  return ok;
}

static inline bool src_read(const source *s, src_options o, mm_err *err) {
  mm_hf hf = {0};
  mm_plan plan = {0};
  char dir[128];
  snprintf(dir, sizeof dir, "%s", src_path(s, "src"));
  mm_hf_options ho = {.allow_outside_links = o.outside};
  mm_plan_options po = {.quant = o.quant ? o.quant : "none", .tp = 1, .ep = 1, .pp = 1, .part_size = UINT64_C(4) << 30};
  bool ok = mm_hf_open(&hf, dir, &ho, err) && (o.depth < SRC_PLAN || mm_plan_build(&plan, &hf, &po, err)) &&
            (o.depth < SRC_READ || src_decode(&plan, err));
  mm_plan_close(&plan);
  mm_hf_close(&hf);
  return ok;
}

/* The written source is refused at this depth with this status and code; the line says `says` and holds nothing raw. */
static inline void src_refused(const source *s, src_options o, const char *row, mm_status status, const char *code, const char *says) {
  mm_err err = {0};
  if (src_read(s, o, &err)) fail_msg("%s: accepted, expected %s … %s", row, code, says);
  if (err.status != status || strcmp(err.code, code) != 0 || !strstr(err.text, says))
    fail_msg("%s: expected %d %s … %s, got %d %s", row, (int)status, code, says, (int)err.status, err.text);
  for (const char *c = err.text; *c; c++) assert_true((uint8_t)*c >= 0x20 && *c != 0x7f);
}

/* A quantization_config that is refused. */
typedef struct src_case {
  const char *config;
  mm_status status;
  const char *code, *says;
} src_case;

/* Writes the source with `old` of its config replaced by key and c->config, which is refused. */
static inline void src_refuses(source *s, const char *old, const char *key, src_depth depth, const src_case *c) {
  src_config(s, old, "%s%s", key, c->config);
  src_write(s);
  src_refused(s, (src_options){.depth = depth}, c->config, c->status, c->code, c->says);
}

static inline void src_accepted(const source *s, src_options o, const char *row) {
  mm_err err = {0};
  if (!src_read(s, o, &err)) fail_msg("%s: refused: %s", row, err.text);
}

#endif
