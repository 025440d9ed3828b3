/* Every scheme against its definition, written here a second time: scales from the rule of the format, codes as the nearest value
 * to w / s found by trying all of them. Then what all schemes owe: the same bytes on every CPU level, for both input types and for
 * every split into strips; cutting commutes with packing; zero, tiny and huge weights stay what they are. */
#include "tests/unit/quant/weights.h"

#include "quant/cpu.h"

/* The numbers a code can stand for, as the scheme's header comment says; code_of inverts how they are stored. */
static double code_value(mm_code code, int c) {
  static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  switch (code) {
    case MM_CODE_E4M3: return (c & 0x78 ? ldexp(8 + (c & 7), (c >> 3 & 15) - 10) : ldexp(c & 7, -9)) * (c & 0x80 ? -1 : 1);
    case MM_CODE_E2M1: return e2m1[c & 7] * (c & 8 ? -1 : 1);
    case MM_CODE_INT8: return c < 128 ? c : c - 256;
    case MM_CODE_INT4: return c < 8 ? c : c - 16;
    case MM_CODE_INT4_OFFSET: return c - 8;
    case MM_CODE_PLAIN: break;
  }
  fail();
  return 0;
}
/* Codes a scheme may use. */
static bool code_allowed(const mm_scheme *s, int c) {
  if (s->code == MM_CODE_E4M3) return (c & 0x7f) != 0x7f;
  if (s->code == MM_CODE_INT8) return c != 128;
  return strcmp(s->name, "w4a8") != 0 || c != 8;
}
static int code_count(mm_code code) { return code == MM_CODE_E4M3 || code == MM_CODE_INT8 ? 256 : 16; }

static int stored_code(const mm_packed *m, uint32_t row, uint32_t col) {
  const uint8_t *p = m->plane[0];
  if (code_count(m->scheme->code) == 256) return p[(size_t)row * m->k + col];
  return p[(size_t)row * ((m->k + 1) / 2) + col / 2] >> (col % 2 ? 4 : 0) & 15;
}

static double stored_scale(const mm_packed *m, unsigned plane, size_t i) {
  const uint8_t *bytes = m->plane[plane];
  const uint16_t *halves = m->plane[plane];
  const float *floats = m->plane[plane];
  switch (m->scheme->plane[plane].dtype) {
    case MM_F32: return (double)floats[i];
    case MM_BF16:
      return ldexp((halves[i] & 0x7f) + (halves[i] & 0x7f80 ? 128 : 0), (halves[i] & 0x7f80 ? halves[i] >> 7 & 255 : 1) - 134) *
             (halves[i] & 0x8000 ? -1 : 1);
    case MM_F16: return ldexp((halves[i] & 0x3ff) + (halves[i] & 0x7c00 ? 1024 : 0), (halves[i] & 0x7c00 ? halves[i] >> 10 & 31 : 1) - 25);
    case MM_U32:
      assert_int_equal(((const uint32_t *)m->plane[plane])[i] & 0x1fff, 0); /* packed with the zero point 0 */
      return (double)floats[i];
    case MM_F8_E4M3: return code_value(MM_CODE_E4M3, bytes[i]);
    case MM_U8: return ldexp(1, bytes[i] - 127);
    default: fail();
  }
  return 0;
}

static size_t cell_index(const mm_packed *m, unsigned plane, uint32_t row, uint32_t col) {
  mm_cell cell = m->cell[plane];
  size_t across = cell.k ? (m->k + cell.k - 1) / cell.k : 1;
  return (cell.n ? row / cell.n : 0) * across + (cell.k ? col / cell.k : 0);
}

/* The scale of one weight: the product of its scale planes, rounded to f32 after each. */
static float scale_of(const mm_packed *m, uint32_t row, uint32_t col) {
  float s = (float)stored_scale(m, 1, cell_index(m, 1, row, col));
  for (unsigned i = 2; i < m->scheme->plane_count; i++) s = (float)((double)s * stored_scale(m, i, cell_index(m, i, row, col)));
  return s;
}

/* The code that w should get under scale s: the nearest value to the f32 quotient, ties to the even code, in value order. */
static int nearest_code(const mm_scheme *sc, float w, float s) {
  double y = fmin(1e6, fmax(-1e6, (double)(float)((double)w / (double)s))); /* where distances to codes still differ */
  int best = -1;
  for (int c = 0; c < code_count(sc->code); c++) {
    if (!code_allowed(sc, c)) continue;
    double v = code_value(sc->code, c), d = fabs(v - y);
    if ((sc->code == MM_CODE_E4M3 || sc->code == MM_CODE_E2M1) && signbit(v) != signbit(y)) continue;
    double least = best < 0 ? (double)INFINITY : fabs(code_value(sc->code, best) - y);
    bool even = sc->code == MM_CODE_E4M3 || sc->code == MM_CODE_E2M1 ? c % 2 == 0 : fmod(v, 2) == 0;
    if (d < least || (d == least && even)) best = c;
  }
  return best;
}

/* Division in double and rounding to f32 is f32 division (the quotient of two 24-bit numbers is never that near a boundary). */
static void check_codes(const packed *p, const matrix *m) {
  const mm_packed *v = &p->view;
  float *out = calloc(m->k, sizeof *out);
  assert_non_null(out);
  for (uint32_t r = 0; r < m->n; r++) {
    mm_unpack(v, 0, r, 1, out);
    for (uint32_t c = 0; c < m->k; c++) {
      float w = m->w[(size_t)r * m->k + c], s = scale_of(v, r, c);
      int code = stored_code(v, r, c), expected = nearest_code(v->scheme, w, s);
      if (code != expected)
        fail_msg("%s [%u, %u]: %a / %a is code %x, expected %x", v->scheme->name, r, c, (double)w, (double)s, (unsigned)code,
                 (unsigned)expected);
      assert_true(out[c] == (float)(code_value(v->scheme->code, code) * (double)s));
    }
  }
  free(out);
}

/* Largest magnitude of the weights under one cell. */
static float cell_amax(const matrix *m, mm_cell cell, size_t index) {
  uint32_t n = cell.n ? cell.n : m->n, k = cell.k ? cell.k : m->k, across = (m->k + k - 1) / k;
  uint32_t row = (uint32_t)(index / across) * n, col = (uint32_t)(index % across) * k;
  float most = 0;
  for (uint32_t r = row; r < row + n && r < m->n; r++)
    for (uint32_t c = col; c < col + k && c < m->k; c++) most = fmaxf(most, fabsf(m->w[(size_t)r * m->k + c]));
  return most;
}

static double round_to(mm_code code, double x) { /* nearest E4M3 magnitude, by trying all */
  int best = 0;
  for (int c = 0; c < 0x7f; c++) {
    double d = fabs(code_value(code, c) - x), least = fabs(code_value(code, best) - x);
    if (d < least || (d == least && c % 2 == 0)) best = c;
  }
  return code_value(code, best);
}

/* The absmax scale of a cell, from the format's own rule; f32 arithmetic where the rule has it. */
static double absmax_scale(const mm_packed *p, float amax, float amax_all) {
  const char *name = p->scheme->name;
  bool fp8 = strcmp(name, "block_fp8") == 0 || strcmp(name, "channel_fp8") == 0 || strcmp(name, "tensor_wise_fp8") == 0;
  if (fp8) return amax == 0 ? 1 : (double)(amax / 448.0f);
  if (strcmp(name, "int8") == 0) return amax == 0 ? 1 : (double)(amax / 127.0f);
  if (strcmp(name, "w4a8") == 0) return amax == 0 ? 1 : (double)(amax / 7.0f);
  if (strcmp(name, "w4a16") == 0 || strcmp(name, "w4afp8") == 0) {
    if (amax == 0) return 1;
    float s = amax / 7.5f;
    int e;
    frexpf(s, &e);
    return ldexp(rint(ldexp((double)s, 8 - e)), e - 8); /* 8 significant bits */
  }
  if (p->scheme->scale_of == MM_F16 || p->scheme->scale_of == MM_BF16) {
    if (amax == 0) return 1;
    const float s = amax / (p->scheme->code == MM_CODE_INT8 ? 127.0f : 7.0f);
    int e;
    frexpf(s, &e);
    if (p->scheme->scale_of == MM_BF16) return ldexp(rint(ldexp((double)s, 8 - e)), e - 8);
    const int step = e - 11 > -24 ? e - 11 : -24; /* 11 significant bits, whole 2^-24, from one of those to the largest */
    return fmin(65504, fmax(0x1p-24, ldexp(rint(ldexp((double)s, -step)), step)));
  }
  if (strcmp(name, "nvfp4") == 0 || strcmp(name, "nvfp4a16") == 0) {
    float s2 = amax_all / 2688.0f, s = amax / (6.0f * s2);
    return amax == 0 ? 1 : round_to(MM_CODE_E4M3, fmax((double)s, 0x1p-9));
  }
  if (amax == 0) return 1;
  int e;
  float fraction = 2 * frexpf(amax, &e); /* amax = fraction · 2^(e - 1), fraction in [1, 2) */
  if (strcmp(name, "mxfp4") == 0) return ldexp(1, e - 1 - 2 + (fraction >= 1.75f));
  assert_string_equal(name, "mxfp8");
  return ldexp(1, e - 1 - 8 + (fraction > 1.75f));
}

static const uint32_t shapes[][2] = {{1, 1}, {3, 16}, {5, 255}, {2, 258}, {129, 127}, {130, 384}, {255, 129}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Rows of very different size, one zero row, one zero range of a row, tiny and huge rows, values on rounding boundaries. */
static matrix mixed_matrix(uint32_t n, uint32_t k) {
  matrix m = matrix_open(n, k);
  for (uint32_t r = 0; r < n; r++) {
    double sigma = 0.02 * exp2((int)(r % 23) - 11);
    if (r % 29 == 7) sigma = 1e-30;
    if (r % 29 == 8) sigma = 1e30;
    for (uint32_t c = 0; c < k; c++) matrix_set(&m, r, c, student() * sigma);
    if (r == 1) memset(m.w + k, 0, k * sizeof *m.w), memset(m.bf16 + k, 0, k * sizeof *m.bf16);
    if (r == 2)
      for (uint32_t c = 0; c < k && c < 130; c++) matrix_set(&m, r, c, 0);
    if (r == 3)
      for (uint32_t c = 0; c < k; c++) matrix_set(&m, r, c, (c % 17) * 0.25 - 2); /* powers of two and halves: ties */
  }
  return m;
}

static bool quantised(const mm_scheme *s) { return s->code != MM_CODE_PLAIN; }

TEST(test_absmax) {
  for (size_t i = 0; mm_scheme_at(i); i++) {
    const mm_scheme *s = mm_scheme_at(i);
    if (!quantised(s)) continue;
    for (int j = 0; j < SHAPES; j++) {
      matrix m = mixed_matrix(shapes[j][0], shapes[j][1]);
      if (s->needs_amax) { /* one scale over all: the tiny and huge rows would leave nothing else to see */
        matrix_close(&m);
        m = matrix_open(shapes[j][0], shapes[j][1]);
        matrix_fill(&m, student, 0.02);
        for (uint32_t c = 0; c < m.k && c < 20; c++) matrix_set(&m, 0, c, 0);
      }
      packed p = pack_matrix(s, &m, MM_SEARCH_ABSMAX);
      float all = matrix_amax(&m);
      for (size_t c = 0; c < mm_plane_elements(m.n, m.k, s->plane[1].cell); c++) {
        double expected = absmax_scale(&p.view, cell_amax(&m, s->plane[1].cell, c), all), found = stored_scale(&p.view, 1, c);
        if (found != expected) fail_msg("%s %ux%u: scale %zu is %a, expected %a", s->name, m.n, m.k, c, found, expected);
      }
      if (s->plane_count == 3) assert_true(*(float *)p.plane[2] == fmaxf(all / 2688.0f, 0x1p-117f));
      check_codes(&p, &m);
      packed_close(&p);
      matrix_close(&m);
    }
  }
}

/* Whatever scale a search chose, codes are the nearest under it. */
TEST(test_search_codes) {
  for (size_t i = 0; mm_scheme_at(i); i++)
    for (int search = MM_SEARCH_MSE; search <= MM_SEARCH_FOUR_SIX; search++) {
      if (!(mm_scheme_at(i)->searches >> search & 1)) continue;
      for (int j = 0; j < SHAPES; j++) {
        matrix m = mixed_matrix(shapes[j][0], shapes[j][1]);
        packed p = pack_matrix(mm_scheme_at(i), &m, (mm_search)search);
        check_codes(&p, &m);
        packed_close(&p);
        matrix_close(&m);
      }
    }
}

/* Levels of SIMD, bf16 and f32 input, strips: the bytes of plain code on the whole matrix. */
TEST(test_same_bytes) {
  for (size_t i = 0; mm_scheme_at(i); i++)
    for (int search = MM_SEARCH_ABSMAX; search <= MM_SEARCH_FOUR_SIX; search++) {
      const mm_scheme *s = mm_scheme_at(i);
      if (search != MM_SEARCH_ABSMAX && !(s->searches >> search & 1)) continue;
      for (int j = 0; j < SHAPES; j++) {
        matrix m = mixed_matrix(shapes[j][0], shapes[j][1]);
        mm_cpu_limit(MM_CPU_PLAIN);
        packed plain = pack_matrix(s, &m, (mm_search)search);
        float *expected = calloc((size_t)m.n * m.k, sizeof *expected), *found = calloc((size_t)m.n * m.k, sizeof *found);
        assert_true(expected && found);
        mm_unpack(&plain.view, 0, 0, m.n, expected);
        for (int level = MM_CPU_PLAIN; level <= MM_CPU_AVX512; level++) {
          mm_cpu_limit((mm_cpu)level);
          packed p = packed_open(s, m.n, m.k);
          uint32_t strip = mm_scheme_rows(s) * (1 + (uint32_t)level);
          for (uint32_t r = 0; r < m.n; r += strip) {
            mm_pack_args a = {.n = (uint32_t)mm_min(strip, m.n - r), .k = m.k, .amax = matrix_amax(&m), .search = (mm_search)search};
            void *at[MM_MAX_PLANES];
            if (r / strip % 2)
              a.w = m.w + (size_t)r * m.k;
            else
              a.bf16 = m.bf16 + (size_t)r * m.k;
            for (unsigned q = 0; q < s->plane_count; q++) {
              mm_cell cell = s->plane[q].cell;
              at[q] = (char *)p.plane[q] + (cell.n ? mm_plane_elements(r, m.k, cell) : 0) * mm_dtype_size(s->plane[q].dtype);
              if (r == 0) at[q] = p.plane[q];
            }
            s->pack(&a, at);
          }
          if (!packed_equal(&plain, &p)) fail_msg("%s %ux%u search %d: level %d differs from plain", s->name, m.n, m.k, search, level);
          for (uint32_t r = 0; r < m.n; r++) mm_unpack(&p.view, 0, r, 1, found + (size_t)r * m.k);
          assert_memory_equal(found, expected, (size_t)m.n * m.k * sizeof *found);
          packed_close(&p);
        }
        free(expected);
        free(found);
        packed_close(&plain);
        matrix_close(&m);
      }
    }
  mm_cpu_limit(MM_CPU_AVX512);
}

/* block_fp8 of every bf16 weight under every mantissa of the largest, at both ends of the exponents and in between: bf16 input, which wide
 * levels compare where plain code divides, against f32 input, which is divided everywhere. */
TEST(test_block_fp8_bf16) {
  static const uint32_t exponent[] = {1, 8, 13, 14, 15, 127, 200, 254};
  const mm_scheme *s = mm_scheme_find("block_fp8");
  matrix m = matrix_open(128, 256);
  for (uint32_t top = 0; top < 128 * sizeof exponent / sizeof *exponent; top += SANITIZED ? 9 : 1) {
    uint32_t most = exponent[top / 128] << 7 | top % 128;
    for (uint32_t i = 0; i < m.n * m.k; i++) { /* a row of a block is the mantissas of one exponent */
      uint32_t h = i == 0 || i == 128 || i > most ? most : i;
      m.bf16[i] = (uint16_t)(h | (i * 2654435761u >> 31) << 15);
      m.w[i] = mm_bf16_to_f32(m.bf16[i]);
    }
    mm_cpu_limit(MM_CPU_PLAIN);
    packed plain = pack_matrix(s, &m, MM_SEARCH_ABSMAX);
    for (int level = MM_CPU_PLAIN; level <= MM_CPU_AVX512; level++) {
      mm_cpu_limit((mm_cpu)level);
      packed p = packed_open(s, m.n, m.k);
      mm_pack_args a = {.bf16 = m.bf16, .n = m.n, .k = m.k};
      s->pack(&a, p.plane);
      if (!packed_equal(&plain, &p)) fail_msg("largest weight %04x: level %d differs", most, level);
      packed_close(&p);
    }
    packed_close(&plain);
  }
  matrix_close(&m);
  mm_cpu_limit(MM_CPU_AVX512);
}

static uint32_t finer(uint32_t cell, uint32_t cut) { return cell == 0 || cut % cell == 0 ? cell : (uint32_t)mm_gcd(cell, cut); }

/* The shard [row, row + n) x [col, col + k) of a packed matrix: codes copied, scales repeated on the grid that divides the cut. */
static packed cut(const packed *p, uint32_t row, uint32_t n, uint32_t col, uint32_t k) {
  const mm_scheme *s = p->view.scheme;
  packed shard = {.view = {.scheme = s, .lead = 1, .n = n, .k = k}};
  for (unsigned i = 0; i < s->plane_count; i++) {
    mm_cell cell = p->view.cell[i];
    if (s->plane[i].scale) cell = (mm_cell){finer(cell.n, (uint32_t)mm_gcd(row, n)), finer(cell.k, (uint32_t)mm_gcd(col, k))};
    shard.view.cell[i] = cell;
    size_t size = mm_dtype_size(s->plane[i].dtype), at = 0;
    shard.bytes[i] = mm_plane_elements(n, k, cell) * size;
    shard.view.plane[i] = shard.plane[i] = malloc(shard.bytes[i]);
    assert_non_null(shard.plane[i]);
    for (uint32_t r = 0; r < mm_cells(n, cell.n); r++)
      for (uint32_t c = 0; c < mm_cells(k, cell.k); c++, at++)
        memcpy((char *)shard.plane[i] + at * size, (char *)p->plane[i] + cell_index(&p->view, i, row + r * cell.n, col + c * cell.k) * size,
               size);
  }
  return shard;
}

TEST(test_cutting) {
  enum { N = 384, K = 576 };
  static const uint32_t cuts[][2] = {{192, 288}, {384, 96}, {96, 576}, {64, 24}, {6, 10}}; /* rows and columns of a shard */
  matrix m = matrix_drawn(N, K, student, 0.02);
  float *whole = calloc((size_t)N * K, sizeof *whole), *part = calloc((size_t)N * K, sizeof *part);
  assert_true(whole && part);
  for (size_t i = 0; mm_scheme_at(i); i++) {
    const mm_scheme *s = mm_scheme_at(i);
    packed p = pack_matrix(s, &m, s->searches >> MM_SEARCH_MSE & 1 ? MM_SEARCH_MSE : MM_SEARCH_ABSMAX);
    mm_unpack(&p.view, 0, 0, N, whole);
    for (size_t j = 0; j < sizeof cuts / sizeof *cuts; j++) {
      uint32_t n = cuts[j][0], k = cuts[j][1];
      for (uint32_t row = 0; row + n <= N; row += n)
        for (uint32_t col = 0; col + k <= K; col += k) {
          if (j == 4 && (row + col) % 84) continue; /* a sample of the many */
          packed shard = cut(&p, row, n, col, k);
          mm_unpack(&shard.view, 0, 0, n, part);
          for (uint32_t r = 0; r < n; r++)
            if (memcmp(part + (size_t)r * k, whole + (size_t)(row + r) * K + col, k * sizeof *part) != 0)
              fail_msg("%s: shard %ux%u at [%u, %u] differs in row %u", s->name, n, k, row, col, r);
          packed_close(&shard);
        }
    }
    packed_close(&p);
  }
  free(whole);
  free(part);
  matrix_close(&m);
}

/* Several matrices under one another, as experts are stored. */
TEST(test_lead) {
  enum { LEAD = 3, N = 130, K = 160 };
  for (size_t i = 0; mm_scheme_at(i); i++) {
    const mm_scheme *s = mm_scheme_at(i);
    mm_packed stack = {.scheme = s, .lead = LEAD, .n = N, .k = K};
    void *plane[MM_MAX_PLANES] = {0};
    float out[3 * K], expected[3 * K];
    packed one[LEAD];
    for (int l = 0; l < LEAD; l++) {
      matrix m = matrix_drawn(N, K, gaussian, 0.02 * (l + 1));
      one[l] = pack_matrix(s, &m, MM_SEARCH_ABSMAX);
      matrix_close(&m);
    }
    for (unsigned q = 0; q < s->plane_count; q++) {
      stack.plane[q] = plane[q] = malloc(LEAD * one[0].bytes[q]);
      stack.cell[q] = s->plane[q].cell;
      assert_non_null(plane[q]);
      for (int l = 0; l < LEAD; l++) memcpy((char *)plane[q] + (size_t)l * one[l].bytes[q], one[l].plane[q], one[l].bytes[q]);
    }
    for (uint32_t l = 0; l < LEAD; l++) {
      mm_unpack(&stack, l, 126, 3, out);
      mm_unpack(&one[l].view, 0, 126, 3, expected);
      assert_memory_equal(out, expected, sizeof out);
    }
    for (int l = 0; l < LEAD; l++) packed_close(&one[l]);
    for (unsigned q = 0; q < s->plane_count; q++) free(plane[q]);
  }
}

TEST(test_plain) {
  matrix m = mixed_matrix(40, 300);
  for (size_t i = 0; i < 40 * 300; i++) m.w[i] *= 1.000123f; /* no longer exact in bf16 */
  packed bf16 = pack_matrix(mm_scheme_find("bf16"), &m, MM_SEARCH_ABSMAX), f16 = pack_matrix(mm_scheme_find("f16"), &m, MM_SEARCH_ABSMAX),
         f32 = pack_matrix(mm_scheme_find("f32"), &m, MM_SEARCH_ABSMAX);
  for (size_t i = 0; i < 40 * 300; i++) {
    assert_int_equal(((uint16_t *)bf16.plane[0])[i], mm_f32_to_bf16(m.w[i]));
    assert_int_equal(((uint16_t *)f16.plane[0])[i], mm_f32_to_f16(m.w[i]));
  }
  assert_memory_equal(f32.plane[0], m.w, f32.bytes[0]);
  packed_close(&bf16);
  packed_close(&f16);
  packed_close(&f32);
  matrix_close(&m);
}

/* A zero matrix gives zeros and finite scales; a scaled matrix keeps its relative error at any size f32 allows. */
TEST(test_extremes) {
  enum { N = 4, K = 512 };
  for (size_t i = 0; mm_scheme_at(i); i++) {
    const mm_scheme *s = mm_scheme_at(i);
    mm_search search = s->searches >> MM_SEARCH_MSE & 1 ? MM_SEARCH_MSE : MM_SEARCH_ABSMAX;
    if (!quantised(s)) continue;
    matrix zero = matrix_open(N, K), m = matrix_open(N, K), scaled = matrix_open(N, K);
    float out[N * K];
    packed p = pack_matrix(s, &zero, search);
    mm_unpack(&p.view, 0, 0, N, out);
    for (int j = 0; j < N * K; j++) assert_true(out[j] == 0);
    for (unsigned q = 1; q < s->plane_count; q++)
      for (size_t c = 0; c < mm_plane_elements(N, K, s->plane[q].cell); c++) {
        double v = stored_scale(&p.view, q, c);
        assert_true(v > 0 && isfinite(v));
      }
    packed_close(&p);
    matrix_fill(&m, gaussian, 1);
    p = pack_matrix(s, &m, search);
    double expected = sqnr(&m, &p);
    packed_close(&p);
    for (int e = -96; e <= 120 && s->scale_of != MM_F16; e += 24) { /* F16 has fewer sizes */
      for (uint32_t j = 0; j < N * K; j++) matrix_set(&scaled, j / K, j % K, ldexp((double)m.w[j], e));
      p = pack_matrix(s, &scaled, search);
      if (fabs(sqnr(&scaled, &p) - expected) > 1e-6) fail_msg("%s: %f dB at 2^%d, %f at 1", s->name, sqnr(&scaled, &p), e, expected);
      packed_close(&p);
    }
    matrix_close(&zero);
    matrix_close(&m);
    matrix_close(&scaled);
  }
}

/* The published block: 16 weights under a tensor maximum of 0.0875 (its global scale 0x38088889 divides 0.0875 in doubles; in f32,
 * as the tools do it, the last place is one less). */
TEST(test_nvfp4_vector) {
  static const float w[16] = {0.013f,   -0.021f, 0.0005f, -0.0332f, 0.007f,  0.0191f,  -0.0009f, 0.0250f,
                              -0.0113f, 0,       0.0404f, -0.0175f, 0.0301f, -0.0042f, 0.0009f,  -0.0268f};
  static const uint8_t absmax[8] = {0xd4, 0xe0, 0x52, 0x68, 0x0b, 0xd7, 0x96, 0xe0},
                       sweep[8] = {0xc3, 0xe0, 0x41, 0x58, 0x0a, 0xc6, 0x95, 0xd0};
  uint8_t codes[8], scale;
  float s2;
  void *plane[MM_MAX_PLANES] = {codes, &scale, &s2};
  mm_pack_args a = {.w = w, .n = 1, .k = 16, .amax = 0.0875f};
  const mm_scheme *s = mm_scheme_find("NVFP4");
  s->pack(&a, plane);
  assert_int_equal(mm_f32_bits(s2), 0x38088888);
  assert_int_equal(scale, 0x75);
  assert_memory_equal(codes, absmax, 8);
  a.search = MM_SEARCH_MSE;
  s->pack(&a, plane);
  assert_int_equal(scale, 0x79);
  assert_memory_equal(codes, sweep, 8);
}

/* int4 nibbles: -8, -7, -1, 0, 1, 3, 6, 7 in both encodings; MXFP4 exponents by maximum. */
TEST(test_int4_mxfp4_vectors) {
  static const float v[8] = {-8, -7, -1, 0, 1, 3, 6, 7};
  float w[8];
  for (int i = 0; i < 8; i++) w[i] = v[i] * 0.9375f; /* absmax/7.5 = 1 */
  uint8_t codes[4];
  uint16_t scale;
  void *plane[MM_MAX_PLANES] = {codes, &scale};
  mm_pack_args a = {.w = w, .n = 1, .k = 8};
  static const uint8_t offset[4] = {0x10, 0x87, 0xb9, 0xfe}, twos[4] = {0x98, 0x0f, 0x31, 0x76};
  mm_scheme_find("w4a16")->pack(&a, plane);
  assert_int_equal(scale, 0x3f80);
  assert_memory_equal(codes, offset, 4);
  mm_scheme_find("w4afp8")->pack(&a, plane);
  assert_memory_equal(codes, twos, 4);
  static const struct {
    float amax;
    uint8_t exponent;
  } mxfp4[] = {{1.0f, 125}, {1.5f, 125}, {1.51f, 125}, {1.75f, 126}, {2.0f, 126}, {6.0f, 127}, {6.5f, 127}, {7.0f, 128}};
  for (size_t i = 0; i < sizeof mxfp4 / sizeof *mxfp4; i++) {
    uint8_t exponent;
    void *planes[MM_MAX_PLANES] = {codes, &exponent};
    w[5] = -mxfp4[i].amax;
    for (int j = 0; j < 5; j++) w[j] = mxfp4[i].amax / (float)(j + 3);
    mm_pack_args b = {.w = w, .n = 1, .k = 6};
    mm_scheme_find("mxfp4")->pack(&b, planes);
    assert_int_equal(exponent, mxfp4[i].exponent);
  }
}

TEST(test_registry) {
  static const char *const pairs[][2] = {{"block_wise_fp8", "block_fp8"},
                                         {"FP8_BLOCK", "block_fp8"},
                                         {"NVFP4", "nvfp4"},
                                         {"W4A16", "w4a16"},
                                         {"MXFP4", "mxfp4"},
                                         {"W4A16_NVFP4", "nvfp4a16"},
                                         {"FP8_TENSOR", "tensor_wise_fp8"},
                                         {"FP8_DYNAMIC", "channel_fp8"},
                                         {"w8a8", "int8"}};
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
    assert_non_null(mm_scheme_find(pairs[i][0]));
    assert_string_equal(mm_scheme_find(pairs[i][0])->name, pairs[i][1]);
  }
  assert_null(mm_scheme_find("int3"));
  assert_null(mm_scheme_find(""));
  assert_null(mm_scheme_find("fp8")); /* block-wise in the released models, tensor-wise in tools */
  size_t count = 0;
  for (; mm_scheme_at(count); count++) {
    const mm_scheme *s = mm_scheme_at(count);
    assert_ptr_equal(mm_scheme_find(s->name), s); /* no name or synonym hides another */
    for (size_t i = 0; i < sizeof s->synonym / sizeof *s->synonym && s->synonym[i]; i++) assert_ptr_equal(mm_scheme_find(s->synonym[i]), s);
    assert_true(s->plane_count >= 1 && s->plane_count <= MM_MAX_PLANES && s->pack);
    assert_true(s->purpose && strlen(s->purpose) < 96);
    assert_true(!s->plane[0].scale && s->plane[0].suffix[0] == 0);
    for (unsigned i = 1; i < s->plane_count; i++) assert_true(s->plane[i].scale);
  }
  assert_int_equal(count, 20);
  assert_null(mm_scheme_at(count + 1));
  assert_ptr_equal(mm_scheme_plain(MM_BF16), mm_scheme_find("bf16"));
  assert_ptr_equal(mm_scheme_plain(MM_F32), mm_scheme_find("f32"));
  assert_null(mm_scheme_plain(MM_F8_E4M3));
}

/* A search's squared error, in units of the group's amax, over all of the matrix. */
static double relative_error(const matrix *m, const float *out, double amax) {
  double sum = 0;
  for (size_t i = 0; i < (size_t)m->n * m->k; i++)
    sum += ((double)out[i] - (double)m->w[i]) / amax * (((double)out[i] - (double)m->w[i]) / amax);
  return sum;
}

/* At both ends of f32, and with one huge weight among small ones: what unpack gives is finite, no weight is off by more than 1/3 of the
 * largest, or by what the smallest scale cannot distinguish, scales are finite and not zero, and no search does worse than absmax. */
TEST(test_ends_of_f32) {
  enum { N = 4, K = 512 };
  static const uint32_t top[] = {0x7f7fffff, 0x7f7ffffe, 0x7f7f0000, 0x7f780000, 0x7f700000, 0x7f600000, 0x7f5f0000,
                                 0x7f400000, 0x7f000000, 0x7effffff, 0x7e800000, 0x47800000, 0x3f800000, 0x01000000,
                                 0x00800000, 0x007fffff, 0x00000100, 0x00000003, 1};
  float *out = calloc((size_t)N * K, sizeof *out);
  assert_non_null(out);
  for (size_t i = 0; mm_scheme_at(i); i++)
    for (size_t j = 0; j < sizeof top / sizeof *top * 4; j++) {
      const mm_scheme *s = mm_scheme_at(i);
      if (!quantised(s) || s->scale_of == MM_F16) continue; /* which saturates far from the ends */
      matrix m = matrix_open(N, K);
      float amax = mm_f32_from_bits(top[j / 4]);
      for (uint32_t x = 0; x < N * K; x++) {
        float spread = j % 4 < 2 ? (float)((x * 2654435761u >> 8) % 4096) / 4095.0f : x % 128 == 5 ? 1.0f : 0x1p-20f;
        m.w[x] = (j % 2 ? -amax : amax) * spread * ((x >> 3 & 1) && x % 128 != 5 ? -1.0f : 1.0f);
      }
      m.w[5] = j % 2 ? -amax : amax;
      double absmax = 0;
      for (int search = MM_SEARCH_ABSMAX; search <= MM_SEARCH_FOUR_SIX; search++) {
        if (search != MM_SEARCH_ABSMAX && !(s->searches >> search & 1)) continue;
        packed p = packed_open(s, N, K);
        mm_pack_args a = {.w = m.w, .n = N, .k = K, .amax = amax, .search = (mm_search)search};
        s->pack(&a, p.plane);
        mm_unpack(&p.view, 0, 0, N, out);
        for (unsigned q = 1; q < s->plane_count; q++)
          for (size_t c = 0; c < mm_plane_elements(N, K, s->plane[q].cell); c++) {
            double v = stored_scale(&p.view, q, c);
            if (v == 0 || !isfinite(v)) fail_msg("%s, search %d, amax %a: scale %a", s->name, search, (double)amax, v);
          }
        double bound = fmax((double)amax / 3, 0x1p-117);
        for (int x = 0; x < N * K; x++)
          if (!isfinite(out[x]) || fabs((double)out[x] - (double)m.w[x]) > bound)
            fail_msg("%s, search %d, amax %a: %a became %a", s->name, search, (double)amax, (double)m.w[x], (double)out[x]);
        double e = relative_error(&m, out, (double)amax);
        if (search == MM_SEARCH_ABSMAX) absmax = e;
        if (amax >= 0x1p-96f && e > absmax * 1.05 + 1e-9)
          fail_msg("%s, search %d, amax %a, case %zu: error %g, absmax %g", s->name, search, (double)amax, j % 4, e, absmax);
        packed_close(&p);
      }
      matrix_close(&m);
    }
  free(out);
}

int main(void) { return run_unit_tests(NULL, NULL); }
