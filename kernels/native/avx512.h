// vectors.h for AVX-512 (F, BW, VL). Compression is in registers: a compressed store is many times slower on some processors.

#pragma once
#include <immintrin.h>
#define ISA "avx512"

static inline Bits beyond(const float *x, int32_t limit) {
    const __m512i size = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(0x7fffffff));
    return _mm512_cmpgt_epi32_mask(size, _mm512_set1_epi32(limit));
}

static inline int64_t compress(void *out, const void *x, Bits some) {
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32((__mmask16)some, _mm512_loadu_si512(x)));
    return __builtin_popcount(some);
}

static inline int64_t places(int32_t *out, int32_t base, Bits some) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32(base));
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32((__mmask16)some, place));
    return __builtin_popcount(some);
}

static inline void expand(float *out, const float *values, Bits some) {
    _mm512_storeu_ps(out, _mm512_maskz_expand_ps((__mmask16)some, _mm512_loadu_ps(values)));
}

static inline void clear(float *x, Bits some) {
    _mm512_storeu_ps(x, _mm512_maskz_mov_ps((__mmask16)~some, _mm512_loadu_ps(x)));
}

// Sixteen float32 in a register, for products.
typedef __m512 Floats;
enum { WIDE = 16 };
static inline Floats load(const float *x) { return _mm512_loadu_ps(x); }
static inline void store(float *x, Floats values) { _mm512_storeu_ps(x, values); }
static inline Floats fill_all(float x) { return _mm512_set1_ps(x); }
static inline Floats add_product(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
