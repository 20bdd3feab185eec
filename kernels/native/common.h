// What the passes share. A pass walks over float32 tensors in blocks that stay in the core's cache, so that memory is
// read once although several loops go over a block. Nothing is contracted or reassociated: all machines get equal bits.
//
// Tables come from compopt/_ops/native/ops.py: a row a tensor, every field 8 bytes wide, in the order of the structs here.
// Positions are ascending int32; packed masks hold element i in bit i % 8 of byte i / 8. NULL: there is none.
//
// Python has checked dtypes and lengths. What lies in positions and masks is not trusted: a position that is not in its
// block ends the row, and the pass returns the number of the first row in which not all were used; -1: all is well.

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "vectors.h"

enum { BLOCK = 512 };  // elements: whole bytes of a mask, and as many sixteens as a word has bits

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Fetch the block after the next one: what a processor foresees by itself is not far enough where few streams are read.
static inline void fetch_ahead(const float *x, int64_t a) {
    for (int64_t i = 2 * BLOCK; i < 3 * BLOCK; i += 64 / sizeof(float)) __builtin_prefetch(x + a + i);
}

static inline uint32_t magnitude(float x) {  // as an integer: it grows with |x|
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffffu;
}

// Whether position i is one of the `size` elements from `a` on.
static inline int within(int64_t i, int64_t a, int64_t size) { return i >= a && i < a + size; }

static inline int on(const uint8_t *mask, int64_t i) { return mask[i / 8] >> i % 8 & 1; }
