/* Numbers between bounds, and multiples of a step: which digit may follow, so that a number within the bounds can still be complete.
 *
 * Numbers are whole multiples of 10^-places, written without an exponent. With places they have 15 digits at most, so that a double
 * distinguishes every two of them and keeps their order: the comparison of the texts is that of the doubles. */
#ifndef MM_RUNTIME_CONSTRAIN_DECIMAL_H
#define MM_RUNTIME_CONSTRAIN_DECIMAL_H

#include "formats/system/base.h"

#define MM_DECIMAL_DIGITS 15 /* of numbers that need not be whole */

typedef struct mm_decimal {
  uint64_t least[2], most[2]; /* magnitudes in units of 10^-places, of numbers that are not negative, and of negative ones; least above
                               * most: none */
  uint64_t step;              /* in these units; 1: any */
  uint8_t places;             /* digits behind the point, at most */
} mm_decimal;

/* The beginning of a number. */
typedef struct mm_decimal_part {
  uint64_t digits; /* as one number, without the point */
  uint8_t places;  /* of them behind the point */
  bool negative, point;
  bool begun; /* there is a digit */
} mm_decimal_part;

/* Some number within the bounds begins so. */
bool mm_decimal_may_go_on(const mm_decimal *d, const mm_decimal_part *p);
/* The number is complete, and within the bounds. */
bool mm_decimal_fits(const mm_decimal *d, const mm_decimal_part *p);
/* Some number is within the bounds. */
bool mm_decimal_any(const mm_decimal *d);

/* A bound as JSON writes it: ±digits × 10^exponent, digits without a 0 at their end. false: digits of more than 64 bits, or no number. */
typedef struct mm_decimal_bound {
  uint64_t digits;
  int exponent;
  bool negative;
} mm_decimal_bound;
bool mm_decimal_read(const char *text, size_t n, mm_decimal_bound *out);
/* The order of two numbers as JSON writes them, of any length and by their digits: below, at or above 0. */
int mm_decimal_compare(const char *a, size_t a_n, const char *b, size_t b_n);
/* Bounds of a schema; NULL: none. An exclusive one is no value itself. */
typedef struct mm_decimal_bounds {
  const mm_decimal_bound *least, *most, *above, *below;
} mm_decimal_bounds;
/* Whole numbers of 64 bits, or, if not `whole`, numbers of 15 digits. The step is 1. false: a bound has too many digits for these. */
bool mm_decimal_of(const mm_decimal_bounds *b, bool whole, mm_decimal *out);

#endif
