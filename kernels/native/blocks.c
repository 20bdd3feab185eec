// Values in blocks of 8 bits: residuals between steps. Reference: BlockCodec of compopt/_state/blocks.py; caller:
// compopt/_backends/native/native_quantization.py. The bits are the same.

#include "common.h"
#include <float.h>

// as in the reference; STRIDE: from the u of one group of blocks to the next
enum { ROW = 128, GROUP = 512, TABLE = 65536, STRIDE = 40503 };

typedef struct {
    float scale;
    int8_t codes[ROW];
} Eight;

typedef struct {
    float *values;
    Eight *blocks;
    int64_t n, row;  // values, and the number of the first block, which determines u
} Run;

typedef struct {
    const float *numbers;  // u; NULL: round to nearest
    int64_t place;
} Noise;

static void encode_block(const float *restrict x, int n, const float *restrict u, Eight *restrict to) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t size = magnitude(x[i]);
        largest = size > largest ? size : largest;
    }
    float most, scale;
    memcpy(&most, &largest, 4);
    scale = most / 127;
    memset(to, 0, sizeof *to);
    if (!(most <= FLT_MAX)) to->scale = NAN;
    if (!(most <= FLT_MAX) || scale < FLT_MIN) return;
    uint32_t bits;  // 17 significant bits: its product with a code is exact
    memcpy(&bits, &scale, 4);
    bits = (bits + 64) & ~127u;
    memcpy(&scale, &bits, 4);
    to->scale = scale;
    for (int i = 0; i < n; i++) {
        const float t = x[i] / scale + (u ? u[i] : .5f);
        int32_t code = (int32_t)t;
        code -= (float)code > t;  // round down
        code = code < -127 ? -127 : code;
        code = code > 127 ? 127 : code;
        if (magnitude(x[i]) == largest) code = x[i] < 0 ? -127 : 127;
        to->codes[i] = (int8_t)code;
    }
}

int64_t encode_blocks(const Run *runs, int64_t first, int64_t last, const Noise *noise) {
    for (const Run *x = runs + first; x < runs + last; x++)
        for (int64_t a = 0, b = 0; a < x->n; a += ROW, b++) {
            const int64_t row = x->row + b;
            const float *u = noise->numbers;
            if (u) u += (noise->place + STRIDE * (row / GROUP)) % TABLE + ROW * (row % GROUP);
            encode_block(x->values + a, (int)smaller(ROW, x->n - a), u, x->blocks + b);
        }
    return -1;
}

int64_t decode_blocks(const Run *runs, int64_t first, int64_t last) {
    for (const Run *x = runs + first; x < runs + last; x++)
        for (int64_t a = 0, b = 0; a < x->n; a += ROW, b++) {
            const Eight *restrict from = x->blocks + b;
            float *restrict to = x->values + a;
            const int n = (int)smaller(ROW, x->n - a);
            for (int i = 0; i < n; i++) to[i] = from->codes[i] * from->scale;
        }
    return -1;
}
