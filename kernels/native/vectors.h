// Sixteen float32, or positions, at a time: what the passes do to them that a compiler does not find by itself. Each
// instruction set has these functions in a file of its own, with the same results to the bit; arithmetic is written as
// plain loops, which compilers turn into vectors well.
//
// Bits: one of each of the sixteen, the first lowest. What is compressed may write, and what is expanded may read,
// sixteen elements whatever the bits say: callers have room for them.
//
//     Bits beyond(const float *x, int32_t limit)            where the magnitude, as an integer, is larger
//     int64_t compress(void *out, const void *x, Bits some)  those of x one after the other; how many
//     int64_t places(int32_t *out, int32_t base, Bits some)  the same of base, base + 1, ...
//     void expand(float *out, const float *values, Bits some) the next value where there is a bit, 0 elsewhere
//     void clear(float *x, Bits some)                        0 where there is a bit

#pragma once
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };
typedef uint32_t Bits;

#if defined(PORTABLE)
#include "scalar.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include "neon.h"
#else
#include "scalar.h"
#endif

// Sixteen bits of a packed mask; i is a multiple of 8.
static inline Bits sixteen(const uint8_t *mask, int64_t i) { return (Bits)(mask[i / 8] | mask[i / 8 + 1] << 8); }
