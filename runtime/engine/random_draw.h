/* The draw of a token, the same bits on every device: C for the CPU, and for CUDA's kernels. sample.h states the rule; here are its three
 * numbers of an id.
 *
 * mass: exp((logit - largest)/temperature) in 2^40ths, a whole number, so that sums of masses do not depend on their order; 0 below about
 * 2^-40 of the largest. bits: 64 random bits of (seed, n, id), from a generator whose state is a counter. key: the order of arrival of an
 * id in a race of exponential clocks, each running as fast as its mass; the smallest key wins, and so an id wins with the probability
 * mass / Σ mass. The winner depends on no order and no cut of the vocabulary into parts, and logits that differ by rounding change it
 * about as seldom as any rule can.
 *
 * Every step is integer arithmetic or one correctly rounded operation; none may be contracted. */
#ifndef MM_RUNTIME_DRAW_H
#define MM_RUNTIME_DRAW_H

#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __CUDACC__
#define MM_DRAW_FN static __host__ __device__ __forceinline__
#else
#define MM_DRAW_FN static inline
#endif

#define MM_DRAW_IDS (UINT32_C(1) << 24) /* ids that a key can name */
#define MM_DRAW_ONE (UINT64_C(1) << 40) /* the mass of the largest logit */

/* One rounding each. */
#ifdef __CUDA_ARCH__
MM_DRAW_FN float mm_draw_add(float a, float b) { return __fadd_rn(a, b); }
MM_DRAW_FN float mm_draw_div(float a, float b) { return __fdiv_rn(a, b); }
MM_DRAW_FN float mm_draw_sub(float a, float b) { return __fsub_rn(a, b); }
MM_DRAW_FN float mm_draw_mul(float a, float b) { return __fmul_rn(a, b); }
MM_DRAW_FN double mm_draw_dadd(double a, double b) { return __dadd_rn(a, b); }
MM_DRAW_FN double mm_draw_dmul(double a, double b) { return __dmul_rn(a, b); }
MM_DRAW_FN double mm_draw_ddiv(double a, double b) { return __ddiv_rn(a, b); }
MM_DRAW_FN uint32_t mm_draw_zeros(uint64_t x) { return (uint32_t)__clzll((long long)x); }
MM_DRAW_FN uint64_t mm_draw_image(double x) { return (uint64_t)__double_as_longlong(x); }
MM_DRAW_FN double mm_draw_number(uint64_t image) { return __longlong_as_double((long long)image); }
#else
/* A function's result is not contracted with what its caller does: compilers do that within an expression alone. */
MM_DRAW_FN float mm_draw_add(float a, float b) { return a + b; }
MM_DRAW_FN float mm_draw_div(float a, float b) { return a / b; }
MM_DRAW_FN float mm_draw_sub(float a, float b) { return a - b; }
MM_DRAW_FN float mm_draw_mul(float a, float b) { return a * b; }
MM_DRAW_FN double mm_draw_dadd(double a, double b) { return a + b; }
MM_DRAW_FN double mm_draw_dmul(double a, double b) { return a * b; }
MM_DRAW_FN double mm_draw_ddiv(double a, double b) { return a / b; }
MM_DRAW_FN uint32_t mm_draw_zeros(uint64_t x) { return x ? (uint32_t)__builtin_clzll(x) : 64; }
MM_DRAW_FN uint64_t mm_draw_image(double x) {
  uint64_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
MM_DRAW_FN double mm_draw_number(uint64_t image) {
  double x;
  memcpy(&x, &image, sizeof x);
  return x;
}
#endif

/* splitmix64 (Steele, Lea, Flood 2014): number n of a seed. */
MM_DRAW_FN uint64_t mm_draw_mix(uint64_t seed, uint64_t n) {
  uint64_t x = seed + n * UINT64_C(0x9E3779B97F4A7C15);
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  return x ^ x >> 31;
}

/* A logit under penalties: of an id that the sequence holds, `times` times in the reply. repetition 1, presence 0, frequency 0: none. */
MM_DRAW_FN float mm_draw_penalty(float logit, float repetition, float presence, float frequency, uint32_t times) {
  if (repetition != 1) logit = logit > 0 ? mm_draw_div(logit, repetition) : mm_draw_mul(logit, repetition);
  if (times == 0) return logit;
  return mm_draw_sub(mm_draw_sub(logit, mm_draw_mul(frequency, (float)times)), presence);
}

/* log2(e) / temperature, temperature > 0, as the masses take it. */
MM_DRAW_FN float mm_draw_scale(double temperature) {
  const double scale = 1.4426950408889634 / temperature;
  return scale < 3e38 ? (float)scale : 3e38f;
}

/* How far a logit lies below the largest, in 2^-26 of a factor of two; ~0 at 64 factors or more. Neither is NaN or -INFINITY. */
MM_DRAW_FN uint32_t mm_draw_depth(float logit, float largest, float scale) {
  if (logit == largest) return 0; /* infinity less infinity is no number */
  const float d = mm_draw_mul(mm_draw_sub(largest, logit), scale);
  return d < 64 ? (uint32_t)mm_draw_mul(d, 0x1p26f) : ~UINT32_C(0);
}

/* 2^(40 - depth), rounded down; its error before that is about 2^-30 of it. It never grows with the depth: two neighbours' difference is
 * larger than their errors. */
MM_DRAW_FN uint64_t mm_draw_mass(uint32_t depth) {
  const uint32_t whole = depth >> 26, t = depth << 6; /* t/2^32: the part below a factor of two */
  if (whole > 40) return 0;
  /* 2^-t = 1 - t(a1 - t(a2 - …)), a_i = ln(2)^i / i! in 2^-32 */
  uint32_t s = 30; /* a10 */
#define MM_DRAW_STEP(a) s = (a) - (uint32_t)((uint64_t)t * s >> 32)
  MM_DRAW_STEP(UINT32_C(437));
  MM_DRAW_STEP(UINT32_C(5676));
  MM_DRAW_STEP(UINT32_C(65510));
  MM_DRAW_STEP(UINT32_C(661577));
  MM_DRAW_STEP(UINT32_C(5726720));
  MM_DRAW_STEP(UINT32_C(41309550));
  MM_DRAW_STEP(UINT32_C(238388332));
  MM_DRAW_STEP(UINT32_C(1031764991));
  MM_DRAW_STEP(UINT32_C(2977044472));
#undef MM_DRAW_STEP
  const uint64_t part = (UINT64_C(1) << 32) - ((uint64_t)t * s >> 32);
  return part << 8 >> whole;
}

/* The random bits below their leading one, as a number in [0, 2^53). */
MM_DRAW_FN uint64_t mm_draw_rest(uint64_t bits, uint32_t zeros) { return zeros < 63 ? bits << (zeros + 1) >> 11 : 0; }

/* An exponential variate of mean 1/ln(2), from 64 random bits: as many halvings as there are leading zeros, and -log2(1 - q) for q in
 * (0, 1/2], in which the rest is even. -log2(1 - q) = 2/ln(2) · atanh(z), z = q/(2 - q) ≤ 1/3; relative error about 1e-11. */
MM_DRAW_FN double mm_draw_wait(uint64_t bits) {
  const uint32_t zeros = mm_draw_zeros(bits);
  const double q = mm_draw_dmul(mm_draw_dadd((double)mm_draw_rest(bits, zeros), 0.5), 0x1p-54);
  const double z = mm_draw_ddiv(q, mm_draw_dadd(2, -q)), zz = mm_draw_dmul(z, z);
  double s = 1.0 / 21;
  for (int n = 19; n > 0; n -= 2) s = mm_draw_dadd(mm_draw_dmul(s, zz), 1.0 / n);
  return mm_draw_dadd((double)zeros, mm_draw_dmul(mm_draw_dmul(z, 2.8853900817779268), s));
}

/* A lower bound of mm_draw_wait that costs no logarithm. */
MM_DRAW_FN float mm_draw_wait_least(uint64_t bits) {
  const uint32_t zeros = mm_draw_zeros(bits);
  return mm_draw_mul((float)zeros + mm_draw_mul((float)(uint32_t)(mm_draw_rest(bits, zeros) >> 32), 0x1p-22f), 0.999f);
}

/* When id arrives, mass > 0: the time's bits but for the last 24, then the id, so that of equal times the lowest id comes first. */
MM_DRAW_FN uint64_t mm_draw_key(uint64_t bits, uint64_t mass, uint32_t id) {
  return (mm_draw_image(mm_draw_ddiv(mm_draw_wait(bits), (double)mass)) & ~(uint64_t)(MM_DRAW_IDS - 1)) | id;
}

/* The key before anyone has arrived; its time is infinity. */
#define MM_DRAW_NOBODY (UINT64_C(0x7ff0000000000000))

/* A key's time, about. */
MM_DRAW_FN float mm_draw_time(uint64_t key) { return (float)mm_draw_number(key); }

/* Returns true if the id certainly arrives after `time`: most ids do, and need no key. mass: at least its own. */
MM_DRAW_FN int mm_draw_late(uint64_t bits, float mass, float time) { return mm_draw_wait_least(bits) > mm_draw_mul(time, mass); }

/* The mass that top_p < 1 asks of ids whose masses sum to `all`. */
MM_DRAW_FN uint64_t mm_draw_share(double top_p, uint64_t all) {
  const double share = mm_draw_dmul(top_p, (double)all);
  const uint64_t floor = (uint64_t)share;
  return (double)floor < share || floor == 0 ? floor + 1 : floor;
}

#ifdef __cplusplus
}
#endif
#endif
