// Definitions that the passes share. A pass reads float32 tensors in blocks that stay in the core's cache, so that memory is
// read once although several loops run over a block. Nothing is contracted or reassociated: all machines compute equal bits.
//
// Tables come from compopt/_backends/native/: a row for each tensor, every field 8 bytes wide, in the order of the structs here.
// Positions are ascending int32; packed masks hold element i in bit i % 8 of byte i / 8. NULL: there is none.
//
// Python has checked dtypes and lengths. The contents of positions and masks are not trusted: a position outside its block
// ends the row, and the pass returns the number of the first row in which not all were used, -1 if none.

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "vectors.h"

enum { BLOCK = 512 };  // elements: whole bytes of a mask; a word has a bit for each sixteen
enum { SUMS = 4 * LANES };  // independent sums: the latency of an addition is four times its throughput

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Prefetches the block after the next one: the hardware prefetcher is too late where few streams are read.
static inline void fetch_ahead(const float *x, int64_t a) {
    for (int64_t i = 2 * BLOCK; i < 3 * BLOCK; i += 64 / sizeof(float)) __builtin_prefetch(x + a + i);
}

static inline uint32_t magnitude(float x) {  // as an integer that grows with |x|
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffffu;
}

// True if i is one of the `size` positions from `a` on.
static inline int within(int64_t i, int64_t a, int64_t size) { return i >= a && i < a + size; }

static inline int on(const uint8_t *mask, int64_t i) { return mask[i / 8] >> i % 8 & 1; }

// Runs the body for the position i of every set bit.
#define EACH_BIT(bits, bytes, i, ...)                                    \
    for (int64_t byte_ = 0; byte_ < (bytes); byte_ += 8) {               \
        uint64_t word_ = 0;                                              \
        memcpy(&word_, (bits) + byte_, smaller(8, (bytes) - byte_));     \
        for (; word_; word_ &= word_ - 1) {                              \
            const int64_t i = 8 * byte_ + __builtin_ctzll(word_);        \
            __VA_ARGS__                                                  \
        }                                                                \
    }
