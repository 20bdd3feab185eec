// vectors.h in plain C, for correctness. No branch depends on a bit: it would be mispredicted.

#pragma once
#include <math.h>
#define ISA "portable"

static inline uint32_t select_word(uint32_t word, Bits bit) { return word & (0u - bit); }

static inline Bits beyond(const float *x, int32_t limit) {
    Bits hits = 0;
    for (int lane = 0; lane < LANES; lane++) {
        int32_t size;
        memcpy(&size, x + lane, 4);
        hits |= (Bits)((size & 0x7fffffff) > limit) << lane;
    }
    return hits;
}

static inline int64_t compress(void *out, const void *x, Bits some) {
    int64_t count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        memcpy((char *)out + 4 * count, (const char *)x + 4 * lane, 4);
        count += some >> lane & 1;
    }
    return count;
}

static inline int64_t places(int32_t *out, int32_t base, Bits some) {
    int64_t count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        out[count] = base + lane;
        count += some >> lane & 1;
    }
    return count;
}

static inline void expand(float *out, const float *values, Bits some) {
    int64_t count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t word;
        memcpy(&word, values + count, 4);
        word = select_word(word, some >> lane & 1);
        memcpy(out + lane, &word, 4);
        count += some >> lane & 1;
    }
}

static inline void clear(float *x, Bits some) {
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t word;
        memcpy(&word, x + lane, 4);
        word = select_word(word, 1 - (some >> lane & 1));
        memcpy(x + lane, &word, 4);
    }
}

// One float32, for products.
typedef float Floats;
enum { WIDE = 1 };
static inline Floats load(const float *x) { return *x; }
static inline void store(float *x, Floats value) { *x = value; }
static inline Floats fill_all(float x) { return x; }
static inline Floats add_product(Floats sum, Floats a, Floats b) { return fmaf(a, b, sum); }
