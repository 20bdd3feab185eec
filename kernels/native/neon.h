// vectors.h for 64-bit ARM: four quarters of four, whose bytes are permuted by a table of 16 rows (tables.c).

#pragma once
#include <arm_neon.h>
#include "tables.h"
#define ISA "neon"

static inline Bits beyond(const float *x, int32_t limit) {
    static const uint32_t each[4] = {1, 2, 4, 8};
    Bits hits = 0;
    for (int quarter = 0; quarter < 4; quarter++) {
        const uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(x + 4 * quarter));
        const int32x4_t size = vreinterpretq_s32_u32(vandq_u32(bits, vdupq_n_u32(0x7fffffff)));
        const uint32x4_t hit = vandq_u32(vcgtq_s32(size, vdupq_n_s32(limit)), vld1q_u32(each));
        hits |= vaddvq_u32(hit) << 4 * quarter;
    }
    return hits;
}

static inline int64_t compress(void *out, const void *x, Bits some) {
    uint8_t *to = out;
    const uint8_t *from = x;
    for (int quarter = 0; quarter < 4; quarter++, some >>= 4) {
        vst1q_u8(to, vqtbl1q_u8(vld1q_u8(from + 16 * quarter), vld1q_u8(together[some & 15])));
        to += 4 * __builtin_popcount(some & 15);
    }
    return (to - (uint8_t *)out) / 4;
}

static inline int64_t places(int32_t *out, int32_t base, Bits some) {
    static const int32_t lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int32_t here[LANES];
    for (int quarter = 0; quarter < 4; quarter++)
        vst1q_s32(here + 4 * quarter, vaddq_s32(vld1q_s32(lanes + 4 * quarter), vdupq_n_s32(base)));
    return compress(out, here, some);
}

static inline void expand(float *out, const float *values, Bits some) {
    uint8x16_t moved[4];  // all are read before any is written
    for (int quarter = 0; quarter < 4; quarter++, some >>= 4) {
        moved[quarter] = vqtbl1q_u8(vld1q_u8((const uint8_t *)values), vld1q_u8(apart[some & 15]));
        values += __builtin_popcount(some & 15);
    }
    for (int quarter = 0; quarter < 4; quarter++) vst1q_f32(out + 4 * quarter, vreinterpretq_f32_u8(moved[quarter]));
}

static inline void clear(float *x, Bits some) {
    static const uint32_t each[4] = {1, 2, 4, 8};
    for (int quarter = 0; quarter < 4; quarter++, some >>= 4) {
        const uint32x4_t off = vtstq_u32(vdupq_n_u32(some), vld1q_u32(each));
        const uint32x4_t left = vbicq_u32(vreinterpretq_u32_f32(vld1q_f32(x + 4 * quarter)), off);
        vst1q_f32(x + 4 * quarter, vreinterpretq_f32_u32(left));
    }
}

// Four float32 in a register, for products.
typedef float32x4_t Floats;
enum { WIDE = 4 };
static inline Floats load(const float *x) { return vld1q_f32(x); }
static inline void store(float *x, Floats values) { vst1q_f32(x, values); }
static inline Floats fill_all(float x) { return vdupq_n_f32(x); }
static inline Floats add_product(Floats sum, Floats a, Floats b) { return vfmaq_f32(sum, a, b); }
