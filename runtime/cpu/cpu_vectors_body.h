/* The loops of cpu_vectors.h over one level's vectors. Besides the definitions that cpu_rows_body.h needs, the file that includes this
 * defines v16_div, v16_max(a, b) = a > b ? a : b, v16_min likewise, and v16_scale2(p, t) = p·2^n where n is t's last bits, t being
 * near 1.5·2^23; v16_e4m3(p), 16 codes over 256; how many queries and positions meet in registers, SCORE_QUERIES and SCORE_POSITIONS, and
 * how many queries are mixed there, MIX_QUERIES. */

LEVEL v16 exp_16(v16 x) {
  const v16 magic = v16_set1(0x1.8p23f);
  x = v16_min(v16_set1(88.0f), v16_max(v16_set1(-87.0f), x)); /* the second where one is no number */
  const v16 t = v16_fma(x, v16_set1(0x1.715476p+0f), magic), n = v16_add(t, v16_mul(magic, v16_set1(-1)));
  const v16 r = v16_fma(n, v16_set1(-0x1.7f7d1cp-20f), v16_fma(n, v16_set1(-0x1.62e4p-1f), x)); /* ln 2 in two parts */
  v16 p = v16_set1(1.0f / 5040);
  p = v16_fma(p, r, v16_set1(1.0f / 720));
  p = v16_fma(p, r, v16_set1(1.0f / 120));
  p = v16_fma(p, r, v16_set1(1.0f / 24));
  p = v16_fma(p, r, v16_set1(1.0f / 6));
  p = v16_fma(p, r, v16_set1(0.5f));
  p = v16_fma(p, r, v16_set1(1));
  p = v16_fma(p, r, v16_set1(1));
  return v16_add(v16_scale2(p, t), v16_fma(x, v16_set1(-1), x)); /* plus 0, or what is no number */
}
LEVEL v16 one_and_exp_of_minus(v16 x) { return v16_add(v16_set1(1), exp_16(v16_mul(x, v16_set1(-1)))); }

/* n below 16 numbers, then zeros. */
LEVEL v16 load_some(const float *x, size_t n) {
  float scratch[16] = {0};
  memcpy(scratch, x, n * sizeof *x);
  return v16_load(scratch);
}
LEVEL void store_some(float *out, v16 x, size_t n) {
  float scratch[16];
  v16_store(scratch, x);
  memcpy(out, scratch, n * sizeof *out);
}

TARGET static void exp_of(float *out, const float *x, size_t n) {
  for (; n >= 16; n -= 16, out += 16, x += 16) v16_store(out, exp_16(v16_load(x)));
  if (n) store_some(out, exp_16(load_some(x, n)), n);
}

TARGET static void silu_of(float *out, const float *x, const float *by, size_t n) {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const v16 a = v16_load(x + i), y = v16_div(a, one_and_exp_of_minus(a));
    v16_store(out + i, by ? v16_mul(y, v16_load(by + i)) : y);
  }
  if (i == n) return;
  const v16 a = load_some(x + i, n - i), y = v16_div(a, one_and_exp_of_minus(a));
  store_some(out + i, by ? v16_mul(y, load_some(by + i, n - i)) : y, n - i);
}

/* A NaN stays NaN: v16_min and v16_max return their second operand then. */
LEVEL v16 swiglu_16(v16 gate, v16 up, const mm_cpu_swiglu *s) {
  const v16 limit = v16_set1(s->limit), g = v16_min(limit, gate), u = v16_max(v16_set1(-s->limit), v16_min(limit, up));
  const v16 y = v16_div(g, one_and_exp_of_minus(v16_mul(g, v16_set1(s->alpha))));
  return v16_mul(v16_add(u, v16_set1(s->beta)), y);
}
TARGET static void swiglu_of(float *out, const float *gate, const float *up, size_t n, const mm_cpu_swiglu *s) {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) v16_store(out + i, swiglu_16(v16_load(gate + i), v16_load(up + i), s));
  if (i < n) store_some(out + i, swiglu_16(load_some(gate + i, n - i), load_some(up + i, n - i), s), n - i);
}

LEVEL v16 gate_16(v16 x, v16 r, v16 w, v16 gate) { return v16_div(v16_mul(v16_mul(x, r), w), one_and_exp_of_minus(gate)); }
TARGET static void gate_of(float *out, const float *x, float r, const float *w, const float *gate, size_t n) {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) v16_store(out + i, gate_16(v16_load(x + i), v16_set1(r), v16_load(w + i), v16_load(gate + i)));
  if (i == n) return;
  const v16 y = gate_16(load_some(x + i, n - i), v16_set1(r), load_some(w + i, n - i), load_some(gate + i, n - i));
  store_some(out + i, y, n - i);
}

/* Products of queries with keys, lane by lane: part[query][position][16], MM_SCORES positions of a query. */
enum { MM_SCORES = 16 };
LEVEL void score_tile(uint32_t queries, uint32_t positions, const mm_cpu_query *query, const float *k, uint32_t d, float *part) {
  v16 sum[8][8];
  MM_UNROLL
  for (uint32_t q = 0; q < queries; q++) MM_UNROLL
  for (uint32_t i = 0; i < positions; i++) sum[q][i] = v16_zero();
  MM_ROLL
  for (uint32_t c = 0; c < d; c += 16) {
    const uint32_t some = d - c < 16 ? d - c : 16;
    v16 key[8];
    MM_UNROLL
    for (uint32_t i = 0; i < positions; i++) {
      const float *const from = k + (size_t)i * d + c;
      key[i] = some == 16 ? v16_load(from) : load_some(from, some);
    }
    MM_UNROLL
    for (uint32_t q = 0; q < queries; q++) {
      const v16 own = v16_held(some == 16 ? v16_load(query[q].q + c) : load_some(query[q].q + c, some));
      MM_UNROLL
      for (uint32_t i = 0; i < positions; i++) sum[q][i] = v16_fma(own, key[i], sum[q][i]);
    }
  }
  MM_UNROLL
  for (uint32_t q = 0; q < queries; q++) MM_UNROLL
  for (uint32_t i = 0; i < positions; i++) v16_store(part + (q * MM_SCORES + i) * 16, sum[q][i]);
}

/* Scores of queries and all positions that one of them sees. */
LEVEL void scores_of(uint32_t queries, const mm_cpu_query *query, const float *k, uint32_t d) {
  float part[8 * MM_SCORES * 16];
  uint32_t most = 0;
  for (uint32_t q = 0; q < queries; q++) most = query[q].n > most ? query[q].n : most;
  for (uint32_t from = 0; from < most; from += MM_SCORES) {
    const uint32_t n = most - from < MM_SCORES ? most - from : MM_SCORES;
    uint32_t i = 0;
    for (; i + SCORE_POSITIONS <= n; i += SCORE_POSITIONS)
      score_tile(queries, SCORE_POSITIONS, query, k + (size_t)(from + i) * d, d, part + (size_t)16 * i);
    for (; i < n; i++) score_tile(queries, 1, query, k + (size_t)(from + i) * d, d, part + (size_t)16 * i);
    for (uint32_t q = 0; q < queries; q++) {
      const float *const own = part + (size_t)q * MM_SCORES * 16;
#ifdef SUMS_TOGETHER
      if (n == MM_SCORES) {
        v16_store(query[q].score + from, v16_sums(own, 16));
        continue;
      }
#endif
      for (i = 0; i < n; i++) query[q].score[from + i] = v16_sum(v16_load(own + (size_t)16 * i));
    }
  }
}

/* The softmax goes on over n scores, which become weights; what it held is to be multiplied with the result. */
LEVEL float weights_of(mm_cpu_query *query) {
  float *const score = query->score, top = query->soft.top;
  const uint32_t n = query->n;
  for (uint32_t i = 0; i < n; i++) top = score[i] > top ? score[i] : top;
  float keep = query->soft.top - top;
  for (uint32_t i = n; i < (n + 15) / 16 * 16; i++) score[i] = 0;
  exp_of(&keep, &keep, 1);
  v16 sum = v16_zero();
  for (uint32_t i = 0; i < n; i += 16) {
    v16_store(score + i, exp_16(v16_add(v16_load(score + i), v16_set1(-top))));
    sum = v16_add(sum, n - i < 16 ? load_some(score + i, n - i) : v16_load(score + i));
  }
  query->soft = (mm_cpu_softmax){top, query->soft.sum * keep + v16_sum(sum)};
  return keep;
}

/* Columns c … c + 16·count - 1 of queries: o = o·keep + Σ score[i]·v[i]. */
LEVEL void mix(uint32_t queries, const mm_cpu_query *query, const float *keep, const float *v, uint32_t d, uint32_t c, uint32_t count) {
  uint32_t all = query[0].n;
  v16 sum[4][8];
  MM_UNROLL
  for (uint32_t q = 0; q < queries; q++) {
    all = query[q].n < all ? query[q].n : all;
    MM_UNROLL
    for (uint32_t j = 0; j < count; j++) sum[q][j] = v16_mul(v16_load(query[q].o + c + 16 * j), v16_set1(keep[q]));
  }
  for (uint32_t i = 0; i < all; i++) {
    v16 weight[4];
    MM_UNROLL
    for (uint32_t q = 0; q < queries; q++) weight[q] = v16_set1(query[q].score[i]);
    MM_UNROLL
    for (uint32_t j = 0; j < count; j++) {
      const v16 value = v16_held(v16_load(v + (size_t)i * d + c + 16 * j));
      MM_UNROLL
      for (uint32_t q = 0; q < queries; q++) sum[q][j] = v16_fma(weight[q], value, sum[q][j]);
    }
  }
  MM_UNROLL
  for (uint32_t q = 0; q < queries; q++) {
    for (uint32_t i = all; i < query[q].n; i++) {
      MM_UNROLL
      for (uint32_t j = 0; j < count; j++)
        sum[q][j] = v16_fma(v16_set1(query[q].score[i]), v16_load(v + (size_t)i * d + c + 16 * j), sum[q][j]);
    }
    MM_UNROLL
    for (uint32_t j = 0; j < count; j++) v16_store(query[q].o + c + 16 * j, sum[q][j]);
  }
}
LEVEL void mix_all(uint32_t queries, const mm_cpu_query *query, const float *keep, const float *v, uint32_t d) {
  uint32_t c = 0;
  for (; c + 128 <= d; c += 128) mix(queries, query, keep, v, d, c, 8);
  for (; c + 16 <= d; c += 16) mix(queries, query, keep, v, d, c, 1);
  for (; c < d; c++)
    for (uint32_t q = 0; q < queries; q++) {
      float *const o = query[q].o + c;
      *o *= keep[q];
      for (uint32_t i = 0; i < query[q].n; i++) *o = fmaf(query[q].score[i], v[(size_t)i * d + c], *o);
    }
}

TARGET static void attend_of(mm_cpu_query *query, uint32_t count, const float *k, const float *v, uint32_t d) {
  uint32_t at = 0;
  for (; at + SCORE_QUERIES <= count; at += SCORE_QUERIES) scores_of(SCORE_QUERIES, query + at, k, d);
  for (; at < count; at++) scores_of(1, query + at, k, d);
  for (at = 0; at < count;) {
    const uint32_t some = at + MIX_QUERIES <= count ? MIX_QUERIES : 1;
    float keep[MIX_QUERIES];
    for (uint32_t q = 0; q < some; q++) keep[q] = weights_of(&query[at + q]);
    if (some == MIX_QUERIES)
      mix_all(MIX_QUERIES, query + at, keep, v, d);
    else
      mix_all(1, query + at, keep, v, d);
    at += some;
  }
}

/* Columns [0, 16·count) of S and o. */
LEVEL void state_strip(float *S, float *o, const float *q, const float *k, const float *v, uint32_t d, float decay, uint32_t count) {
  v16 sum[8], value[8];
  MM_UNROLL
  for (uint32_t c = 0; c < count; c++) sum[c] = v16_zero(), value[c] = v16_load(v + 16 * c);
  for (uint32_t a = 0; a < d; a++) {
    float *const row = S + (size_t)a * d;
    MM_UNROLL
    for (uint32_t c = 0; c < count; c++) {
      const v16 y = v16_fma(v16_set1(k[a]), value[c], v16_mul(v16_set1(decay), v16_load(row + 16 * c)));
      v16_store(row + 16 * c, y);
      sum[c] = v16_fma(v16_set1(q[a]), y, sum[c]);
    }
  }
  MM_UNROLL
  for (uint32_t c = 0; c < count; c++) v16_store(o + 16 * c, sum[c]);
}

TARGET static void state_of(float *S, float *o, const float *q, const float *k, const float *v, uint32_t d, float decay) {
  uint32_t c = 0;
  for (; c + 128 <= d; c += 128) state_strip(S + c, o + c, q, k, v + c, d, decay, 8);
  for (; c + 16 <= d; c += 16) state_strip(S + c, o + c, q, k, v + c, d, decay, 1);
  for (; c < d; c++) {
    float sum = 0;
    for (uint32_t a = 0; a < d; a++) {
      float *const cell = S + (size_t)a * d + c;
      *cell = fmaf(k[a], v[c], decay * *cell);
      sum = fmaf(q[a], *cell, sum);
    }
    o[c] = sum;
  }
}

/* mm_cpu_dot. */
TARGET static float dot(const float *a, const float *b, uint32_t n) {
  v16 sum = v16_zero();
  uint32_t i = 0;
  for (; i + MM_CHUNK <= n; i += MM_CHUNK) {
    v16 part = v16_mul(v16_load(a + i), v16_load(b + i));
    for (uint32_t j = 16; j < MM_CHUNK; j += 16) part = v16_fma(v16_load(a + i + j), v16_load(b + i + j), part);
    sum = v16_add(sum, part);
  }
  if (i < n) {
    float scratch[2][MM_CHUNK] = {{0}, {0}};
    memcpy(scratch[0], a + i, (n - i) * sizeof *a), memcpy(scratch[1], b + i, (n - i) * sizeof *b);
    v16 part = v16_mul(v16_load(scratch[0]), v16_load(scratch[1]));
    for (uint32_t j = 16; j < MM_CHUNK; j += 16) part = v16_fma(v16_load(scratch[0] + j), v16_load(scratch[1] + j), part);
    sum = v16_add(sum, part);
  }
  return v16_sum(sum);
}

TARGET static float dot_e4m3(const float *q, const uint8_t *code, uint32_t n) {
  v16 sum = v16_zero();
  for (uint32_t i = 0; i < n; i += MM_CHUNK) {
    float rest[MM_CHUNK];
    uint8_t codes[MM_CHUNK];
    const bool whole = i + MM_CHUNK <= n;
    if (!whole)
      memset(rest, 0, sizeof rest), memset(codes, 0, sizeof codes), memcpy(rest, q + i, (n - i) * sizeof *q),
          memcpy(codes, code + i, n - i);
    const float *const x = whole ? q + i : rest;
    const uint8_t *const c = whole ? code + i : codes;
    v16 part = v16_mul(v16_load(x), v16_e4m3(c));
    for (uint32_t j = 16; j < MM_CHUNK; j += 16) part = v16_fma(v16_load(x + j), v16_e4m3(c + j), part);
    sum = v16_add(sum, part);
  }
  return v16_sum(sum);
}

#define MM_VECTORS_HERE \
  { rows_of, rows_of_codes, dot, exp_of, silu_of, swiglu_of, gate_of, attend_of, state_of, dot_e4m3 }
