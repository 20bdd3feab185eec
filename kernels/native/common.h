// What the passes share. A pass walks over float32 tensors in blocks that stay in the core's cache, so that memory is
// read once although several loops go over a block. Nothing is contracted or reassociated: all machines get equal bits.
//
// Tables come from compopt/_ops_native.py: a row a tensor, every field 8 bytes wide, in the order of the structs here.
// Positions are ascending int32; packed masks hold element i in bit i % 8 of byte i / 8. NULL: there is none.

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) && !defined(PORTABLE)
#include <immintrin.h>
#endif

enum { BLOCK = 512, LANES = 16 };  // elements: a block is whole bytes of a mask

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline uint32_t magnitude(float x) {  // as an integer: it grows with |x|
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffffu;
}

static inline int on(const uint8_t *mask, int64_t i) { return mask[i / 8] >> i % 8 & 1; }

#if defined(__AVX512F__) && !defined(PORTABLE)
static inline __mmask16 beyond(__m512 x, float t) {  // |x| > t
    return _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(t), _CMP_GT_OQ);
}

static inline __mmask16 sixteen(const uint8_t *mask, int64_t i) { return (__mmask16)(mask[i / 8] | mask[i / 8 + 1] << 8); }
#endif
