// Operations on sixteen float32, or positions, that compilers do not vectorize. Each instruction set has these functions in its
// own file, with the same results to the bit; arithmetic is written as plain loops, which compilers vectorize well.
//
// Bits: one for each of the sixteen, the first lowest. Compression may write, and expansion may read, sixteen elements whatever
// the bits: callers have room for them.
//
//     Bits beyond(const float *x, int32_t limit)             where the magnitude, as an integer, is larger
//     int64_t compress(void *out, const void *x, Bits some)   writes the selected x one after the other; how many
//     int64_t places(int32_t *out, int32_t base, Bits some)   the same of base, base + 1, ...
//     void expand(float *out, const float *values, Bits some) writes the next value where there is a bit, 0 elsewhere
//     void clear(float *x, Bits some)                         writes 0 where there is a bit
//
// Products need as many numbers as a register holds, WIDE, and one rounding of a product and its sum, which not all compilers make
// of plain loops: Floats, load, store, fill_all (one number to all places) and add_product (sum + a b).

#pragma once
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };
typedef uint32_t Bits;

#if defined(PORTABLE)
#include "scalar.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "avx2.h"
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include "neon.h"
#else
#include "scalar.h"
#endif

// Loads sixteen bits of a packed mask; i is a multiple of 8.
static inline Bits sixteen(const uint8_t *mask, int64_t i) { return (Bits)(mask[i / 8] | mask[i / 8 + 1] << 8); }
