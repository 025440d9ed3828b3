/* A packed checkpoint on disk, as an attacker would write it, through everything that a server does with one: opened, put together,
 * verified, bound, and a step of three tokens taken on the CPU, rounded or not, observed or not. The input is a list of changes to a whole
 * checkpoint of one layer, in the manifest's fields, in the extents that must agree, in headers, scales and weights, and in the manifest's
 * text; digests and seals are made right afterwards, so that what is changed is what is read. A checkpoint that verify passes must bind,
 * and one that binds must step. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/safetensors.h"
#include "loader/bind.h"
#include "loader/unshard.h"
#include "loader/verify.h"
#include "runtime/engine/calibration.h"
#include "runtime/engine/engine.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { TENSORS = 16, CUTS = 24, RANKS = 4, PLANES = TENSORS * MM_PACK_PLANES, DATA = 1 << 16, POSITIONS = 8 };

static char dir[64];

typedef struct input {
  const uint8_t *at, *end;
} input;

typedef struct made {
  mm_pack pack;
  mm_pack_tensor tensor[TENSORS];
  mm_cut cut[CUTS];
  mm_range range[CUTS][RANKS];
  mm_rank_parts rank[RANKS];
  mm_part part[RANKS];
  mm_digest block[RANKS];
  uint32_t dead;
  int odd_plane, odd_axis; /* a shape in the headers that is not the manifest's; -1: none */
  uint64_t odd_extent;
  input changes; /* again, for data and text */
} made;

static uint8_t byte(input *in) { return in->at < in->end ? *in->at++ : 0; }

static void remove_dir(void) {
  char path[160];
  for (int i = 0; i < RANKS; i++) {
    char name[64];
    mm_part_name(name, (uint32_t)i, 0);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    unlink(path);
  }
  snprintf(path, sizeof path, "%s/%s", dir, MM_MANIFEST);
  unlink(path);
  rmdir(dir);
}

/* ---- a whole checkpoint ---- */

static uint32_t new_cut(made *m, mm_axis axis, uint32_t whole, uint32_t local, uint32_t step) {
  uint32_t i = (uint32_t)m->pack.cut_count++;
  m->cut[i] = (mm_cut){axis, whole, local, m->range[i]};
  for (uint32_t r = 0; r < RANKS; r++) m->range[i][r] = (mm_range){0, step * (r % m->pack.tp), local};
  return i;
}

static void set_scheme(mm_pack_tensor *t, const mm_scheme *s) {
  t->scheme = s->name;
  t->plane_count = s->plane_count;
  for (unsigned p = 0; p < s->plane_count; p++)
    t->plane[p] = (mm_pack_plane){s->plane[p].suffix, s->plane[p].dtype, s->plane[p].cell.n, s->plane[p].cell.k, {0}};
}

static mm_pack_tensor *new_tensor(made *m, const char *name, const char *scheme, uint32_t cols, uint32_t lead) {
  mm_pack_tensor *t = &m->tensor[m->pack.tensor_count++];
  *t = (mm_pack_tensor){.name = name, .vector = cols == 1, .lead = lead, .whole_lead = lead, .cols = cols, .whole_cols = cols};
  set_scheme(t, mm_scheme_find(scheme));
  return t;
}

static void new_piece(const made *m, mm_pack_tensor *t, uint32_t rows, uint32_t cut) {
  const mm_cut *c = &m->cut[cut];
  uint32_t local = c->axis == MM_AXIS_ROWS ? c->local : rows;
  t->piece[t->piece_count++] = (mm_piece){"s", rows, t->rows, local, cut};
  t->rows += local;
  if (c->axis == MM_AXIS_COLS) t->whole_cols = c->whole, t->cols = c->local;
}

static void add(made *m, const char *name, const char *scheme, uint32_t rows, uint32_t cols, uint32_t lead, unsigned pieces,
                const uint32_t *cut) {
  mm_pack_tensor *t = new_tensor(m, name, scheme, cols, lead);
  for (unsigned i = 0; i < pieces; i++) new_piece(m, t, i ? rows & 0xFFFF : rows >> 16, cut[i]);
}
#define ADD(name, scheme, first, others, cols, lead, ...)                                                          \
  add(m, name, scheme, (first) << 16 | (others), cols, lead, sizeof((uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t), \
      (uint32_t[]){__VA_ARGS__})

#define LAYER "model.layers.0."
enum { H = 16, HEADS = 2, D = 8, E = 2, I = 16, V = 8, Q = HEADS * D, PADDED = 24 };

/* An M2, or an M1 with lightning or full attention, on one rank or two. */
static void build(made *m, uint8_t kind, const char *scheme) {
  uint32_t tp = kind & 1 ? 2 : 1;
  bool m1 = kind & 2, lightning = m1 && kind & 4;
  m->pack = (mm_pack){.tool = "t",
                      .quant = "none",
                      .tp_align = kind & 8 ? MM_ALIGN_PAD : MM_ALIGN_SPLIT,
                      .tp = tp,
                      .ep = 1,
                      .pp = 1,
                      .tensor = m->tensor,
                      .cut = m->cut,
                      .rank = m->rank,
                      .dead_row = &m->dead};
  m->pack.model = (mm_model){.architecture = "A",
                             .family = m1 ? MM_FAMILY_M1 : MM_FAMILY_M2,
                             .router = m1 ? MM_ROUTER_SOFTMAX : MM_ROUTER_SIGMOID_BIAS,
                             .postnorm = m1,
                             .qk_norm = !m1,
                             .hidden = H,
                             .layers = 1,
                             .heads = HEADS,
                             .kv_heads = 1,
                             .head_dim = D,
                             .rotary_dim = 4,
                             .experts = E,
                             .top_k = 1,
                             .intermediate = I,
                             .vocab = V,
                             .max_positions = 64,
                             .rope_theta = 1e4,
                             MM_MODEL_NORMS(1e-6),
                             .attn = {lightning ? MM_ATTN_LIGHTNING : MM_ATTN_FULL}};
  uint32_t pad = kind & 8 ? PADDED : I / tp, none = new_cut(m, MM_AXIS_NONE, 0, 0, 0), vocab = new_cut(m, MM_AXIS_ROWS, V, V / tp, V / tp);
  uint32_t q = new_cut(m, MM_AXIS_ROWS, Q, Q / tp, Q / tp), kv = new_cut(m, MM_AXIS_ROWS, D, D, 0),
           o = new_cut(m, MM_AXIS_COLS, Q, Q / tp, Q / tp);
  uint32_t up = new_cut(m, MM_AXIS_ROWS, I, pad, 0), down = new_cut(m, MM_AXIS_COLS, I, pad, 0);
  for (uint32_t r = 0; r < RANKS; r++) {
    uint32_t from = I / tp * (r % tp), at = kind & 8 ? from : 0;
    m->range[up][r] = m->range[down][r] = (mm_range){at, from, I / tp};
  }
  ADD("model.embed_tokens.weight", "bf16", V, 0, H, 0, vocab);
  ADD(LAYER "input_layernorm.weight", "f32", H, 0, 1, 0, none);
  if (lightning) {
    uint32_t three = new_cut(m, MM_AXIS_ROWS, 3 * Q, 3 * Q / tp, 3 * Q / tp);
    ADD(LAYER "self_attn.qkv_proj.weight", scheme, 3 * Q, 0, H, 0, three);
    ADD(LAYER "self_attn.output_gate.weight", scheme, Q, 0, H, 0, q);
    ADD(LAYER "self_attn.norm.weight", "f32", Q, 0, 1, 0, q);
    ADD(LAYER "self_attn.out_proj.weight", scheme, H, 0, Q, 0, o);
  } else {
    ADD(LAYER "self_attn.qkv_proj.weight", scheme, Q, D, H, 0, q, kv, kv);
    ADD(LAYER "self_attn.o_proj.weight", scheme, H, 0, Q, 0, o);
  }
  if (!m1) {
    ADD(LAYER "self_attn.q_norm.weight", "bf16", Q, 0, 1, 0, q);
    ADD(LAYER "self_attn.k_norm.weight", "bf16", D, 0, 1, 0, kv);
    ADD(LAYER "block_sparse_moe.e_score_correction_bias", "f32", E, 0, 1, 0, none);
  }
  ADD(LAYER "post_attention_layernorm.weight", "f16", H, 0, 1, 0, none);
  ADD(LAYER "block_sparse_moe.gate.weight", "f32", E, 0, H, 0, none);
  ADD(LAYER "block_sparse_moe.experts.w13_weight", scheme, I, I, H, E, up, up);
  ADD(LAYER "block_sparse_moe.experts.w2_weight", scheme, H, 0, I, E, down);
  ADD("model.norm.weight", "f32", H, 0, 1, 0, none);
  ADD("lm_head.weight", kind & 16 ? scheme : "bf16", V, 0, H, 0, vocab);
}

/* ---- changes ---- */

enum change { MODEL, TENSOR, PIECE, CUT, RANGE, PLANE, SCHEME, EVERYWHERE, WORD, SWAP, LIST, PARALLEL, SHAPE, FLAG, VALUE, TEXT, CHANGES };

/* A number that stands somewhere, or one at an edge, or any small one. */
static uint32_t number(made *m, input *in) {
  static const uint32_t edge[] = {
      0, 1, 2, 3, 31, 33, 63, 64, 65, 127, 128, 255, 256, 4096, 65535, 65536, INT32_MAX, UINT32_MAX, UINT32_MAX - 126, 1u << 24};
  const mm_model *x = &m->pack.model;
  const uint32_t own[] = {x->hidden,  x->heads, x->kv_heads,     x->head_dim, x->rotary_dim,
                          x->experts, x->top_k, x->intermediate, x->vocab,    x->heads * x->head_dim};
  uint8_t b = byte(in);
  if (b < 32) return own[b % (sizeof own / sizeof *own)];
  return b < 64 ? edge[b % (sizeof edge / sizeof *edge)] : (uint32_t)b - 64;
}

static uint32_t *model_field(mm_model *x, uint8_t i) {
  uint32_t *const all[] = {&x->hidden,     &x->layers,  &x->heads, &x->kv_heads,     &x->head_dim,
                           &x->rotary_dim, &x->experts, &x->top_k, &x->intermediate, &x->vocab};
  return all[i % (sizeof all / sizeof *all)];
}

/* One number becomes another wherever it stands, so that all agree again. */
static void everywhere(made *m, uint32_t old, uint32_t with) {
#define TURN(x) (x) = (x) == old ? with : (x)
  for (uint8_t i = 0; i < 10; i++) TURN(*model_field(&m->pack.model, i));
  for (size_t i = 0; i < m->pack.cut_count; i++) {
    TURN(m->cut[i].whole), TURN(m->cut[i].local);
    for (uint32_t r = 0; r < RANKS; r++) TURN(m->range[i][r].at), TURN(m->range[i][r].from), TURN(m->range[i][r].count);
  }
  for (size_t i = 0; i < m->pack.tensor_count; i++) {
    mm_pack_tensor *t = &m->tensor[i];
    TURN(t->cols), TURN(t->whole_cols), TURN(t->lead), TURN(t->whole_lead);
    for (unsigned p = 0; p < t->piece_count; p++) TURN(t->piece[p].rows), TURN(t->piece[p].local_rows);
  }
}

/* Pieces lie side by side. */
static void lay(mm_pack_tensor *t) {
  t->rows = 0;
  for (unsigned p = 0; p < t->piece_count; p++) t->piece[p].local_at = t->rows, t->rows += t->piece[p].local_rows;
}

static void change_tensor(made *m, mm_pack_tensor *t, uint8_t what, input *in) {
  uint32_t v = number(m, in);
  switch (what % 10) {
    case 0: t->rows = v; break;
    case 1: t->cols = v; break;
    case 2: t->cols = t->whole_cols = v; break;
    case 3: t->whole_cols = v; break;
    case 4: t->lead = t->whole_lead = v; break;
    case 5: t->lead = v; break;
    case 6: t->stage = v; break;
    case 7: t->vector = !t->vector; break;
    case 8: t->input_scale = (float)(int)(v - 2) / 8; break;
    default: t->piece[0].rows = t->piece[0].local_rows = v, lay(t); break;
  }
}

static void change_flag(mm_model *x, uint8_t what) {
  switch (what % 6) {
    case 0: x->attn[0] ^= 1; break;
    case 1: x->router = (mm_router)(1 - x->router); break;
    case 2: x->qk_norm = !x->qk_norm; break;
    case 3: x->postnorm = !x->postnorm; break;
    case 4: x->rope_theta = 1e-300; break;
    default: x->deepnorm_full.alpha = x->norm_eps = 1e300; break;
  }
}

static void change_list(made *m, mm_pack_tensor *t, uint8_t what) {
  mm_pack_tensor *last = &m->tensor[m->pack.tensor_count - 1];
  switch (what % 4) {
    case 0: *t = *last, m->pack.tensor_count -= m->pack.tensor_count > 1; break;
    case 1:
      if (m->pack.tensor_count < TENSORS) last[1] = *t, last[1].name = "extra", m->pack.tensor_count++;
      break;
    case 2: t->piece_count = t->piece_count % MM_PACK_PIECES + 1, lay(t); break;
    default: m->dead = what / 4, m->pack.dead_rows = 1; break;
  }
}

static void change(made *m, input *in) {
  enum change what = byte(in) % CHANGES;
  uint8_t which = byte(in), part = byte(in);
  mm_pack_tensor *t = &m->tensor[which % m->pack.tensor_count], *other = &m->tensor[part % m->pack.tensor_count];
  mm_cut *c = &m->cut[which % m->pack.cut_count];
  mm_range *r = &m->range[which % m->pack.cut_count][part % RANKS];
  mm_piece *x = &t->piece[part % MM_PACK_PIECES];
  mm_pack_plane *p = &t->plane[part % t->plane_count];
  const char *name = t->name;
  switch (what) {
    case MODEL: *model_field(&m->pack.model, which) = number(m, in); break;
    case TENSOR: change_tensor(m, t, part, in); break;
    case PIECE: *(uint32_t *[]){&x->rows, &x->local_rows, &x->cut, &x->local_at}[byte(in) % 4] = number(m, in); break;
    case CUT: *(uint32_t *[]){&c->whole, &c->local}[part % 2] = number(m, in); break;
    case RANGE: *(uint32_t *[]){&r->at, &r->from, &r->count}[byte(in) % 3] = number(m, in); break;
    case PLANE: *(uint32_t *[]){&p->cell_n, &p->cell_k}[byte(in) % 2] = number(m, in); break;
    case SCHEME: set_scheme(t, mm_scheme_at(part % 14)); break;
    case EVERYWHERE: everywhere(m, *model_field(&m->pack.model, which), number(m, in)), lay(t); break;
    case WORD: c->axis = (mm_axis)(part % 3); break;
    case SWAP: t->name = other->name, other->name = name; break;
    case LIST: change_list(m, t, part); break;
    case PARALLEL: *(uint32_t *[]){&m->pack.tp, &m->pack.ep, &m->pack.pp}[which % 3] = part % 3; break;
    case SHAPE: m->odd_plane = which % PLANES, m->odd_axis = part % 3, m->odd_extent = number(m, in); break;
    case FLAG: change_flag(&m->pack.model, part); break;
    default: byte(in), byte(in); break; /* VALUE and TEXT come later */
  }
}

/* ---- files ---- */

static void put_file(const char *name, const void *bytes, size_t n) {
  char path[160];
  snprintf(path, sizeof path, "%s/%s", dir, name);
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0 || write(fd, bytes, n) != (ssize_t)n || close(fd) != 0) abort();
}

/* An ordinary number of the plane's type all over. */
static void fill(uint8_t *to, size_t n, const mm_pack_plane *p, unsigned index) {
  static const uint8_t f32[] = {0, 0, 0x20, 0x3c}, bf16[] = {0x20, 0x3c}, f16[] = {0, 0x28};
  const uint8_t one[] = {p->dtype == MM_U8 && index ? 0x7a : p->dtype == MM_F8_E4M3 ? 0x30 : 0x12};
  const uint8_t *from = p->dtype == MM_F32 ? f32 : p->dtype == MM_BF16 ? bf16 : p->dtype == MM_F16 ? f16 : one;
  size_t width = mm_max(1, mm_dtype_size(p->dtype));
  for (size_t i = 0; i < n; i++) to[i] = (uint8_t)(from[i % width] ^ (width == 1 && !index ? i * 37 & 0x87 : 0));
}

/* The planes of a rank, the widest types first. False where they would be too large, or nothing. */
static bool list_planes(const made *m, uint32_t rank, mm_st_tensor *st, const mm_pack_plane **plane, unsigned *index, size_t *count,
                        mm_arena *names) {
  *count = 0;
  uint64_t total = 0;
  for (size_t width = 4; width > 0; width /= 2)
    for (size_t i = 0; i < m->pack.tensor_count; i++)
      for (unsigned p = 0; p < m->tensor[i].plane_count; p++) {
        const mm_pack_tensor *t = &m->tensor[i];
        mm_shape s = mm_pack_plane_shape(t, p);
        uint64_t bytes;
        if (mm_max(1, mm_dtype_size(t->plane[p].dtype)) != width || rank / mm_max(1, m->pack.tp) != t->stage) continue;
        if ((int)(i * MM_PACK_PLANES + p) == m->odd_plane && (unsigned)m->odd_axis < s.rank) s.dim[m->odd_axis] = m->odd_extent;
        if (!mm_shape_bytes(&s, t->plane[p].dtype, &bytes) || bytes == 0 || (total += bytes) > DATA) return false;
        st[*count] = (mm_st_tensor){
            .name = mm_arena_printf(names, MM_IGNORED, "%s%s", t->name, t->plane[p].suffix), .dtype = t->plane[p].dtype, .shape = s};
        plane[*count] = &t->plane[p];
        index[(*count)++] = p;
      }
  return *count > 0;
}

/* The changes that are bytes of the data. */
static void change_values(input in, uint8_t *data, size_t n) {
  while (in.at < in.end) {
    enum change what = byte(&in) % CHANGES;
    uint8_t a = byte(&in), b = byte(&in), c = byte(&in), d = byte(&in);
    if (what == VALUE) data[((size_t)a << 8 | b) % n] = c;
    if (what == VALUE && d & 1) memset(data + ((size_t)a << 8 | b) % n, c, mm_min(4, n - ((size_t)a << 8 | b) % n));
  }
}

static bool put_part(made *m, uint32_t rank) {
  static uint8_t bytes[DATA + (1 << 16)];
  mm_st_tensor st[PLANES];
  const mm_pack_plane *plane[PLANES];
  unsigned index[PLANES];
  size_t count, n;
  mm_arena names = {0};
  char text[3][16], name[64];
  snprintf(text[0], sizeof text[0], "%d", mm_pack_version(&m->pack)), snprintf(text[1], sizeof text[1], "%u", rank),
      snprintf(text[2], sizeof text[2], "%u", m->pack.tp);
  const mm_hex plan = mm_digest_hex(&m->pack.plan);
  const struct mm_st_meta meta[] = {{"format", MM_PACK_FORMAT}, {"version", text[0]}, {"rank", text[1]}, {"tp", text[2]}, {"part", "0"},
                                    {"plan", plan.text}};
  bool ok = list_planes(m, rank, st, plane, index, &count, &names);
  uint8_t *header = ok ? mm_st_header(st, count, meta, 6, 4096, &n, MM_IGNORED) : NULL;
  if ((ok = header && n <= 1 << 16)) {
    memcpy(bytes, header, n);
    uint64_t end = st[count - 1].offset + st[count - 1].bytes;
    for (size_t i = 0; i < count; i++) fill(bytes + st[i].offset, st[i].bytes, plane[i], index[i]);
    change_values(m->changes, bytes + n, end - n);
    mm_part *p = &m->part[rank];
    mm_part_name(name, rank, 0);
    *p = (mm_part){
        .file = mm_arena_strndup(&m->pack.arena, name, strlen(name), MM_IGNORED), .size = end, .block_count = 1, .block = &m->block[rank]};
    *p->block = mm_sha256(bytes, end);
    p->root = mm_hash_root(p->block, 1);
    m->rank[rank] = (mm_rank_parts){1, p};
    put_file(name, bytes, end);
  }
  free(header);
  mm_arena_close(&names);
  return ok;
}

/* The changes that are bytes of the manifest; its seal is made again. */
static bool put_manifest(made *m) {
  enum { DIGEST = sizeof MM_MANIFEST_ENDING - 3 + MM_HEX_LEN };
  char *text = mm_pack_text(&m->pack, MM_IGNORED);
  if (!text) return false; /* a number that JSON has not */
  size_t n = strlen(text);
  input in = m->changes;
  while (in.at < in.end) {
    enum change what = byte(&in) % CHANGES;
    uint8_t a = byte(&in), b = byte(&in), c = byte(&in);
    byte(&in);
    if (what == TEXT && c) text[((size_t)a << 8 | b) % (n - DIGEST)] = (char)c;
  }
  const mm_digest d = mm_sha256(text, n - DIGEST);
  snprintf(text + n - DIGEST, DIGEST + 1, MM_MANIFEST_ENDING, mm_digest_hex(&d).text);
  put_file(MM_MANIFEST, text, n);
  free(text);
  return true;
}

/* ---- what is done with it ---- */

static void step(const mm_shards *s, const mm_rank_weights *w, mm_comm *comm, bool act_quant, mm_calibration *calibration) {
  const mm_model *x = &s->pack.model;
  mm_err err = {0};
  uint32_t positions = (uint32_t)mm_min(POSITIONS, x->max_positions), first = positions > 3 ? 3 : 1, all[] = {0, 1, 2};
  mm_backend_config c = {.model = x,
                         .weights = w,
                         .limits = {.max_tokens = 3, .slots = 1, .max_positions = positions},
                         .comm = comm,
                         .options.threads = 1,
                         .options.act_quant = act_quant,
                         .calibration = calibration};
  mm_forward f;
  if (!mm_forward_open(&f, &mm_ops_cpu, &c, &err)) {
    if (err.status != MM_LIMIT) abort();
    return;
  }
  int32_t id[3] = {0, (int32_t)(x->vocab - 1), (int32_t)(x->vocab / 2)};
  float *logits = mm_calloc((size_t)3 * w->vocab_rows, sizeof *logits, &err);
  mm_span span = {0, 0, first, 0};
  mm_batch batch = {.tokens = first, .id = id, .span_count = 1, .span = &span, .out_count = first, .out = all};
  if (logits && !mm_forward_step(&f, &batch, logits, &err)) abort();
  free(logits);
  mm_forward_close(&f);
}

/* Every source matrix out of its ranks: all stored cells and all numbers, into room for just as many. */
static void put_together(const mm_shards *s) {
  for (size_t i = 0; i < s->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &s->pack.tensor[i];
    for (unsigned j = 0; j < t->piece_count * 2; j++) {
      mm_whole w = {s, i, j / 2, j % 2 && t->whole_lead ? t->whole_lead - 1 : 0};
      uint32_t rows = mm_whole_rows(&w), cols = mm_whole_cols(&w);
      for (unsigned p = 0; p < t->plane_count; p++) {
        mm_err err = {0};
        uint32_t lines = mm_cells(rows, t->plane[p].cell_n), width = mm_cells(cols, t->plane[p].cell_k);
        void *cells = mm_calloc((size_t)lines * width, mm_dtype_size(t->plane[p].dtype), &err);
        if (cells && !mm_whole_cells(&w, p, 0, lines, cells, NULL, NULL, &err) && err.status != MM_USAGE) abort();
        free(cells);
      }
      mm_err err = {0};
      float *numbers = mm_calloc((size_t)rows * cols, sizeof *numbers, &err);
      if (numbers && !mm_whole_unpack(&w, 0, rows, numbers, &err) && err.status != MM_USAGE && err.status != MM_LIMIT) abort();
      free(numbers);
    }
  }
}

static void use(const mm_shards *s, uint8_t how) {
  put_together(s);
  mm_err verify = {0}, err = {0}, none = {0};
  bool proven = mm_bind_check(s, &verify);
  (void)(proven && mm_verify_blocks(s, 1, &err) && mm_verify_numbers(s, 1, &err));
  mm_comm *comm = mm_comm_open(1, &none); /* each rank for itself: sums over ranks are its own part */
  mm_calibration *calibration = how & 2 ? mm_calibration_open(s, &none) : NULL;
  for (uint32_t r = 0; comm && r < s->pack.tp; r++) {
    mm_rank_weights w;
    mm_err bind = {0};
    bool here = s->rank[r].plane && s->pack.ep == 1 && s->pack.pp == 1, bound = mm_bind(&w, s, r, &bind);
    if (proven && here && !bound && bind.status != MM_LIMIT) abort();
    if (bound) step(s, &w, comm, how & 1, calibration);
    if (bound) mm_bind_close(&w);
  }
  mm_calibration_close(calibration);
  mm_comm_close(comm);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (!*dir) {
    snprintf(dir, sizeof dir, "%s/fuzz_packed.XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(dir) || atexit(remove_dir) != 0) abort();
  }
  input in = {data, data + size};
  made m = {.odd_plane = -1};
  uint8_t kind = byte(&in), scheme = byte(&in), how = byte(&in);
  build(&m, kind, mm_scheme_at(scheme % 14)->name);
  m.changes = in;
  while (in.at < in.end) {
    const uint8_t *begin = in.at;
    change(&m, &in);
    in.at = in.end - begin > 5 ? begin + 5 : in.end; /* each change has as many bytes, so that they move as one */
  }
  m.pack.model.layers = (uint32_t)mm_min(m.pack.model.layers, MM_MAX_LAYERS); /* as many as attn has */
  uint32_t ranks = m.pack.tp * m.pack.pp;
  bool ok = ranks <= RANKS;
  for (uint32_t r = 0; ok && r < ranks; r++) ok = put_part(&m, r);
  if (ok && put_manifest(&m)) {
    mm_shards s = {0};
    mm_err err = {0};
    if (mm_shards_open(&s, dir, &err)) use(&s, how);
    if (err.status == MM_BUG) abort();
    mm_shards_close(&s);
  }
  mm_arena_close(&m.pack.arena);
  return 0;
}
