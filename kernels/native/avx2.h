// vectors.h for AVX2: two halves of eight, permuted by a table of 256 rows (tables.c).

#pragma once
#include <immintrin.h>
#include "tables.h"
#define ISA "avx2"

static inline __m256i row_of(const uint8_t (*table)[8], Bits eight) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)table[eight]));
}

static inline Bits beyond(const float *x, int32_t limit) {
    const __m256i all = _mm256_set1_epi32(0x7fffffff), than = _mm256_set1_epi32(limit);
    const __m256i low = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)x), all);
    const __m256i high = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + 8)), all);
    const Bits first = (Bits)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(low, than)));
    return first | (Bits)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(high, than))) << 8;
}

static inline int64_t compress(void *out, const void *x, Bits some) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)x), high = _mm256_loadu_si256((const __m256i *)x + 1);
    int32_t *const next = (int32_t *)out + __builtin_popcount(some & 255);
    _mm256_storeu_si256((__m256i *)out, _mm256_permutevar8x32_epi32(low, row_of(together, some & 255)));
    _mm256_storeu_si256((__m256i *)next, _mm256_permutevar8x32_epi32(high, row_of(together, some >> 8)));
    return __builtin_popcount(some);
}

static inline int64_t places(int32_t *out, int32_t base, Bits some) {
    int32_t *const next = out + __builtin_popcount(some & 255);
    _mm256_storeu_si256((__m256i *)out, _mm256_add_epi32(row_of(together, some & 255), _mm256_set1_epi32(base)));
    _mm256_storeu_si256((__m256i *)next, _mm256_add_epi32(row_of(together, some >> 8), _mm256_set1_epi32(base + 8)));
    return __builtin_popcount(some);
}

// A negative index in the table: no value, and 0.
static inline __m256 spread(const float *values, Bits eight) {
    const __m256i from = row_of(apart, eight);
    const __m256 moved = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), from);
    return _mm256_blendv_ps(moved, _mm256_setzero_ps(), _mm256_castsi256_ps(from));
}

static inline void expand(float *out, const float *values, Bits some) {
    const __m256 low = spread(values, some & 255), high = spread(values + __builtin_popcount(some & 255), some >> 8);
    _mm256_storeu_ps(out, low);
    _mm256_storeu_ps(out + 8, high);
}

static inline void clear(float *x, Bits some) {
    const __m256i each = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1), none = _mm256_setzero_si256();
    for (int half = 0; half < 2; half++, some >>= 8) {
        const __m256i left = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int32_t)some), each), none);
        _mm256_storeu_ps(x + 8 * half, _mm256_and_ps(_mm256_loadu_ps(x + 8 * half), _mm256_castsi256_ps(left)));
    }
}

// Eight float32 in a register, for products.
typedef __m256 Floats;
enum { WIDE = 8 };
static inline Floats load(const float *x) { return _mm256_loadu_ps(x); }
static inline void store(float *x, Floats values) { _mm256_storeu_ps(x, values); }
static inline Floats fill_all(float x) { return _mm256_set1_ps(x); }
static inline Floats add_product(Floats sum, Floats a, Floats b) { return _mm256_fmadd_ps(a, b, sum); }
