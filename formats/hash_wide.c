/* SHA-256 (FIPS 180-4) of sixteen messages of one length at once, one in each 32-bit lane of AVX-512 registers. OpenSSL has nothing for it,
 * and its SHA instructions take twice the time. */
#include "formats/hash_wide.h"

#ifdef __x86_64__
#include <immintrin.h>
#include <stdatomic.h>

#define WIDE     __attribute__((target("avx512f,avx512bw")))
#define WIDE_ANY WIDE __attribute__((always_inline)) static inline

typedef __m512i lanes;

static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
static const uint32_t constant[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

bool mm_sha256_is_wide(void) {
  static atomic_int known = -1; /* not looked at yet */
  int yes = atomic_load_explicit(&known, memory_order_relaxed);
  if (yes < 0) {
    yes = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    atomic_store_explicit(&known, yes, memory_order_relaxed);
  }
  return yes;
}

WIDE_ANY lanes sum(lanes a, lanes b) { return _mm512_add_epi32(a, b); }
WIDE_ANY lanes xor3(lanes a, lanes b, lanes c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }

/* Row i of words becomes lane i of every row. */
WIDE_ANY void transpose(lanes r[16]) {
  lanes t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) { /* 128-bit quarters, even ones and odd ones */
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

/* Words 64 bytes into each message, most significant byte first. */
WIDE_ANY void load(lanes w[16], const uint8_t *const data[16], size_t at) {
  const lanes swap = _mm512_broadcast_i32x4(_mm_setr_epi8(3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12));
  for (int i = 0; i < 16; i++) w[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(data[i] + at), swap);
  transpose(w);
}

/* Step i: the variables a to h are v[0] to v[7], turned by i. */
WIDE_ANY void step(lanes v[8], unsigned i, lanes w, uint32_t k) {
  lanes a = v[-i & 7], b = v[(1 - i) & 7], c = v[(2 - i) & 7], e = v[(4 - i) & 7], f = v[(5 - i) & 7], g = v[(6 - i) & 7];
  lanes choice = _mm512_ternarylogic_epi32(e, f, g, 0xca), majority = _mm512_ternarylogic_epi32(a, b, c, 0xe8);
  lanes e3 = xor3(_mm512_ror_epi32(e, 6), _mm512_ror_epi32(e, 11), _mm512_ror_epi32(e, 25));
  lanes a3 = xor3(_mm512_ror_epi32(a, 2), _mm512_ror_epi32(a, 13), _mm512_ror_epi32(a, 22));
  lanes t = sum(sum(sum(v[(7 - i) & 7], sum(w, _mm512_set1_epi32((int)k))), choice), e3);
  v[(3 - i) & 7] = sum(v[(3 - i) & 7], t);
  v[(7 - i) & 7] = sum(t, sum(majority, a3));
}

/* Eight steps, after which every variable is in its place again. */
WIDE_ANY void steps(lanes v[8], const lanes w[8], const uint32_t k[8]) {
  step(v, 0, w[0], k[0]);
  step(v, 1, w[1], k[1]);
  step(v, 2, w[2], k[2]);
  step(v, 3, w[3], k[3]);
  step(v, 4, w[4], k[4]);
  step(v, 5, w[5], k[5]);
  step(v, 6, w[6], k[6]);
  step(v, 7, w[7], k[7]);
}

/* The next sixteen words of the schedule. */
WIDE_ANY void extend(lanes w[16]) {
  for (int i = 0; i < 16; i++) {
    lanes x = w[(i + 1) & 15], y = w[(i + 14) & 15];
    lanes x3 = xor3(_mm512_ror_epi32(x, 7), _mm512_ror_epi32(x, 18), _mm512_srli_epi32(x, 3));
    lanes y3 = xor3(_mm512_ror_epi32(y, 17), _mm512_ror_epi32(y, 19), _mm512_srli_epi32(y, 10));
    w[i] = sum(sum(w[i], w[(i + 9) & 15]), sum(x3, y3));
  }
}

WIDE_ANY void compress(lanes state[8], lanes w[16]) {
  lanes v[8];
  for (int i = 0; i < 8; i++) v[i] = state[i];
  for (int r = 0; r < 64; r += 16) {
    if (r > 0) extend(w);
    steps(v, w, constant + r);
    steps(v, w + 8, constant + r + 8);
  }
  for (int i = 0; i < 8; i++) state[i] = sum(state[i], v[i]);
}

WIDE void mm_sha256_wide(const uint8_t *const data[16], size_t n, mm_digest out[16]) {
  lanes state[8], w[16];
  for (int i = 0; i < 8; i++) state[i] = _mm512_set1_epi32((int)start[i]);
  for (size_t at = 0; at < n; at += 64) {
    load(w, data, at);
    compress(state, w);
  }
  for (int i = 0; i < 16; i++) w[i] = _mm512_setzero_si512(); /* the padding: a bit, and the message's length in bits */
  w[0] = _mm512_set1_epi32((int)0x80000000);
  w[14] = _mm512_set1_epi32((int)(uint32_t)((uint64_t)n >> 29));
  w[15] = _mm512_set1_epi32((int)(uint32_t)((uint64_t)n << 3));
  compress(state, w);
  uint32_t word[8][16];
  for (int i = 0; i < 8; i++) _mm512_storeu_si512(word[i], state[i]);
  for (int l = 0; l < 16; l++)
    for (int i = 0; i < 32; i++) out[l].byte[i] = (uint8_t)(word[i / 4][l] >> (24 - i % 4 * 8));
}
#else
bool mm_sha256_is_wide(void) { return false; }

void mm_sha256_wide(const uint8_t *const data[16], size_t n, mm_digest out[16]) { (void)data, (void)n, (void)out; }
#endif
