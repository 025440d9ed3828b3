/* Numbers between bounds: magnitudes as whole numbers, in which a beginning stands for a range. */
#include "runtime/constrain/decimal.h"

#define POWERS 20

static const uint64_t power[POWERS] = {1,
                                       10,
                                       100,
                                       1000,
                                       10000,
                                       100000,
                                       1000000,
                                       10000000,
                                       100000000,
                                       1000000000,
                                       10000000000,
                                       100000000000,
                                       1000000000000,
                                       10000000000000,
                                       100000000000000,
                                       1000000000000000,
                                       10000000000000000,
                                       100000000000000000,
                                       1000000000000000000,
                                       10000000000000000000u};

/* A multiple of the step lies within [first, last] and within the bounds. */
static bool any_within(const mm_decimal *d, bool negative, uint64_t first, uint64_t last) {
  const uint64_t lo = mm_max(first, d->least[negative]), hi = mm_min(last, d->most[negative]);
  return lo <= hi && hi - hi % d->step >= lo;
}

bool mm_decimal_may_go_on(const mm_decimal *d, const mm_decimal_part *p) {
  if (!p->begun) return any_within(d, p->negative, 0, UINT64_MAX);
  if (p->point) {
    const uint64_t scale = power[d->places - p->places];
    if (p->digits > d->most[p->negative] / scale) return false;
    return any_within(d, p->negative, p->digits * scale, p->digits * scale + (scale - 1));
  }
  /* More digits before the point, and those behind it; a 0 is the only one. */
  for (unsigned more = d->places; more < POWERS; more++) {
    const uint64_t scale = power[more];
    if (p->digits > d->most[p->negative] / scale) return false;
    const uint64_t first = p->digits * scale, last = first > UINT64_MAX - (scale - 1) ? UINT64_MAX : first + (scale - 1);
    if (any_within(d, p->negative, first, last)) return true;
    if (!p->digits) return false;
  }
  return false;
}

bool mm_decimal_fits(const mm_decimal *d, const mm_decimal_part *p) {
  const uint64_t scale = power[d->places - p->places];
  if (p->digits > d->most[p->negative] / scale) return false;
  return any_within(d, p->negative, p->digits * scale, p->digits * scale);
}

bool mm_decimal_any(const mm_decimal *d) { return any_within(d, false, 0, UINT64_MAX) || any_within(d, true, 0, UINT64_MAX); }

/* ---- Bounds ---- */

bool mm_decimal_read(const char *text, size_t n, mm_decimal_bound *out) {
  size_t i = 0;
  int places = 0, exponent = 0;
  bool point = false;
  *out = (mm_decimal_bound){.negative = n && text[0] == '-'};
  int zeros = 0; /* that stand at the end of the digits so far */
  for (i = out->negative; i < n && text[i] != 'e' && text[i] != 'E'; i++) {
    if (text[i] == '.') {
      point = true;
      continue;
    }
    if (text[i] < '0' || text[i] > '9' || places > 4096) return false;
    places += point;
    if (text[i] == '0') {
      zeros += out->digits != 0;
      if (!out->digits) continue;
      if (zeros > 4096) return false;
      continue;
    }
    for (; zeros >= 0; zeros--)
      if (!mm_mul(out->digits, 10, &out->digits)) return false;
    zeros = 0;
    if (!mm_add(out->digits, (uint64_t)(text[i] - '0'), &out->digits)) return false;
  }
  if (i < n) {
    const bool negative = ++i < n && text[i] == '-';
    if (i < n && (text[i] == '-' || text[i] == '+')) i++;
    for (; i < n; i++) {
      if (text[i] < '0' || text[i] > '9') return false;
      if (exponent < 100000) exponent = exponent * 10 + (text[i] - '0');
    }
    if (negative) exponent = -exponent;
  }
  out->exponent = out->digits ? exponent - places + zeros : 0;
  if (!out->digits) out->negative = false;
  return true;
}

/* ---- Comparison ---- */

/* A number's digits but for zeros around them; a point may stand among them. */
typedef struct digit_range {
  const char *first, *end; /* equal: the number is 0 */
  int64_t top;             /* the first digit counts 10^top */
  bool negative;
} digit_range;

static digit_range digits_of(const char *s, size_t n) {
  digit_range d = {.negative = n && *s == '-'};
  const char *end = s + n, *at = s + d.negative, *point = NULL;
  for (; at < end && *at != 'e' && *at != 'E'; at++) {
    if (*at == '.') point = at;
    if (*at < '1' || *at > '9') continue;
    if (!d.first) d.first = at;
    d.end = at + 1;
  }
  if (!d.first) return (digit_range){0};
  if (!point) point = at;
  d.top = point - d.first - (d.first < point);
  int64_t exponent = 0;
  const bool below = at + 1 < end && at[1] == '-';
  for (at += at < end; at < end; at++)
    if (*at >= '0' && *at <= '9' && exponent < INT32_MAX) exponent = exponent * 10 + (*at - '0');
  d.top += below ? -exponent : exponent;
  return d;
}

static int compare_magnitudes(digit_range a, digit_range b) {
  if (a.first == a.end || b.first == b.end) return (a.first != a.end) - (b.first != b.end);
  if (a.top != b.top) return a.top < b.top ? -1 : 1;
  while (a.first < a.end && b.first < b.end) {
    a.first += *a.first == '.';
    b.first += *b.first == '.';
    if (*a.first != *b.first) return *a.first < *b.first ? -1 : 1;
    a.first++, b.first++;
  }
  return (a.first < a.end) - (b.first < b.end);
}

int mm_decimal_compare(const char *a, size_t a_n, const char *b, size_t b_n) {
  const digit_range x = digits_of(a, a_n), y = digits_of(b, b_n);
  if (x.negative != y.negative) return x.negative ? -1 : 1;
  return x.negative ? compare_magnitudes(y, x) : compare_magnitudes(x, y);
}

/* The bound in units of 10^-places, its magnitude rounded down; *exact: nothing was lost. UINT64_MAX: more than 64 bits. */
static uint64_t units_of(const mm_decimal_bound *b, unsigned places, bool *exact) {
  const int shift = b->exponent + (int)places;
  *exact = true;
  if (!b->digits) return 0;
  if (shift >= POWERS || (shift > 0 && b->digits > UINT64_MAX / power[shift])) return UINT64_MAX;
  if (shift >= 0) return b->digits * power[shift];
  *exact = false;
  return -shift >= POWERS ? 0 : b->digits / power[-shift];
}

/* Digits before the point. */
static int whole_digits(const mm_decimal_bound *b) {
  int n = 0;
  for (uint64_t d = b->digits; d; d /= 10) n++;
  return b->digits && n + b->exponent > 1 ? n + b->exponent : 1;
}

/* No number below the bound fits; with `exclusive`, itself neither. */
static void bound_below(mm_decimal *d, const mm_decimal_bound *b, bool exclusive) {
  bool exact;
  const uint64_t n = units_of(b, d->places, &exact);
  if (!b->negative) {
    d->least[true] = 1;
    d->most[true] = 0;
    if (n == UINT64_MAX) {
      d->most[false] = 0;
      d->least[false] = 1;
    } else {
      d->least[false] = mm_max(d->least[false], n + (!exact || exclusive));
    }
    return;
  }
  /* A magnitude of n at most; n itself only if it is the bound and may be it. */
  if (n == UINT64_MAX) return;
  d->most[true] = mm_min(d->most[true], n - (exact && exclusive));
}

static void swap_signs(mm_decimal *d) {
  const uint64_t least = d->least[0], most = d->most[0];
  d->least[0] = d->least[1];
  d->most[0] = d->most[1];
  d->least[1] = least;
  d->most[1] = most;
}

/* No number above the bound fits: the negative ones of it are not below its contrary. */
static void bound_above(mm_decimal *d, const mm_decimal_bound *b, bool exclusive) {
  mm_decimal_bound contrary = *b;
  contrary.negative = b->digits && !b->negative;
  swap_signs(d);
  if (b->digits) {
    bound_below(d, &contrary, exclusive);
  } else { /* 0: after the exchange the numbers that are not negative stand where negative ones do */
    d->most[true] = 0;
    d->least[true] = mm_max(d->least[true], exclusive);
  }
  swap_signs(d);
}

bool mm_decimal_of(const mm_decimal_bounds *b, bool whole, mm_decimal *out) {
  const mm_decimal_bound *all[] = {b->least, b->most, b->above, b->below};
  int before = 1, behind = 0;
  for (int i = 0; i < 4; i++) {
    if (!all[i]) continue;
    const int digits = whole_digits(all[i]);
    if (digits > before) before = digits;
    if (-all[i]->exponent > behind) behind = -all[i]->exponent;
  }
  *out = (mm_decimal){.least = {0, 1}, .most = {INT64_MAX, UINT64_C(1) << 63}, .step = 1};
  if (!whole) {
    const bool closed = (b->least || b->above) && (b->most || b->below);
    if (before + behind > MM_DECIMAL_DIGITS) return false;
    if (!closed && before < 9) before = behind > 6 ? MM_DECIMAL_DIGITS - behind : 9;
    out->places = (uint8_t)(MM_DECIMAL_DIGITS - before);
    out->most[0] = out->most[1] = power[MM_DECIMAL_DIGITS] - 1;
  }
  if (b->least) bound_below(out, b->least, false);
  if (b->above) bound_below(out, b->above, true);
  if (b->most) bound_above(out, b->most, false);
  if (b->below) bound_above(out, b->below, true);
  return true;
}
