// int8 and int4 codes: rounding into messages, the mean of all ranks' messages, and back. Reference: compopt/_wire/quantization.py,
// between whose functions QuantizedMean of _wire/codec.py moves rows. The bits are the same, except where the reference adds
// ranks * x in one rounding.

#include "common.h"
#include <float.h>

// as in the reference; STRIDE: from the u of one block of rows to the next
enum { ROW = 128, BLOCK_ROWS = 512, TABLE = 65536, STRIDE = 40503 };

typedef struct {
    float *values;    // to be rounded, or memory for what was decoded
    float *scales;    // one for each row
    int8_t *codes;    // of the whole chunk
    float *rounding_errors;
    int64_t at;       // its first value in the chunk
    int64_t row;      // the number of its first row, which determines u
    int64_t n, size;  // how many values it has, and its chunk
    const float *addend;  // is added to the values before they are rounded, or NULL
} Piece;

typedef struct {
    const char *messages;                 // one of each rank, `stride` bytes apart
    int64_t stride, scales_at, codes_at;  // where in each the chunk's scales and codes begin
    int64_t ranks;
} Received;

typedef struct {
    const float *numbers;  // u
    int64_t place, bits;
} Rounding;

// Rounds the values of a row to codes.
static void round_row(const float *restrict x, int n, const float *restrict u, float most, float *restrict scale,
                      int8_t *restrict code, float *restrict errors) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t size = magnitude(x[i]);
        largest = size > largest ? size : largest;
    }
    float all;
    memcpy(&all, &largest, 4);
    if (!(all <= FLT_MAX)) {
        *scale = NAN;
        for (int i = 0; i < n; i++) code[i] = 0, errors[i] = NAN;
        return;
    }
    const float nearest = all / most, unit = nearest < FLT_MIN ? 0 : nearest;  // 1 / unit is finite
    const float per = unit > 0 ? 1 / unit : 0;
    *scale = unit;
    const int32_t end = (int32_t)most;
    for (int i = 0; i < n; i++) {
        const float t = x[i] * per + u[i];
        int32_t whole = (int32_t)t;
        whole -= (float)whole > t;  // round down
        whole = whole < -end ? -end : whole;
        whole = whole > end ? end : whole;
        code[i] = (int8_t)whole;
        errors[i] = x[i] - (float)whole * unit;
    }
}

static const float *numbers_of(const Rounding *how, int64_t row) {
    return how->numbers + (how->place + STRIDE * (row / BLOCK_ROWS)) % TABLE + ROW * (row % BLOCK_ROWS);
}

// Returns n codes of a chunk from `at` on, one a byte. A byte of int4 holds a code of the chunk's first half and 16 times one of
// the second.
static const int8_t *read_codes(const int8_t *codes, int64_t at, int n, int64_t size, int64_t bits, int8_t *restrict out) {
    if (bits == 8) return codes + at;
    const int64_t half = (size + 1) / 2;
    const int first = at < half ? (int)smaller(half - at, n) : 0;
    for (int i = 0; i < first; i++) out[i] = (int8_t)(codes[at + i] - 16 * ((codes[at + i] + 8) >> 4));
    for (int i = first; i < n; i++) out[i] = (int8_t)((codes[at - half + i] + 8) >> 4);
    return out;
}

static float most_of(const Rounding *how) { return how->bits == 8 ? 127 : 7; }

static void read_values(const Piece *p, int64_t a, int n, float *restrict x) {
    memcpy(x, p->values + a, n * sizeof(float));
    if (p->addend)
        for (int i = 0; i < n; i++) x[i] += p->addend[a + i];
}

// Rounds values to codes, one a byte.
int64_t quantize(const Piece *pieces, int64_t first, int64_t last, const Rounding *how) {
    const float most = most_of(how);
    for (const Piece *p = pieces + first; p < pieces + last; p++)
        for (int64_t a = 0, r = 0; a < p->n; a += ROW, r++) {
            const int n = (int)smaller(ROW, p->n - a);
            float x[ROW];  // errors may be written where the values are
            read_values(p, a, n, x);
            round_row(x, n, numbers_of(how, p->row + r), most, p->scales + r, p->codes + p->at + a, p->rounding_errors + a);
        }
    return -1;
}

// Rounds values in place, as one rank would receive them.
int64_t round_values(const Piece *pieces, int64_t first, int64_t last, const Rounding *how) {
    const float most = most_of(how);
    for (const Piece *p = pieces + first; p < pieces + last; p++)
        for (int64_t a = 0, r = 0; a < p->n; a += ROW, r++) {
            const int n = (int)smaller(ROW, p->n - a);
            float x[ROW], scale;
            int8_t codes[ROW];
            float *const values = p->values + a, *const errors = p->rounding_errors + a;
            read_values(p, a, n, x);
            round_row(x, n, numbers_of(how, p->row + r), most, &scale, codes, errors);
            for (int i = 0; i < n; i++) values[i] = x[i] - errors[i];
        }
    return -1;
}

// Averages all ranks' codes of a chunk and rounds the mean; adds ranks times the rounding error to `rounding_errors`.
int64_t mean_of_codes(const Piece *pieces, int64_t first, int64_t last, const Rounding *how, const Received *from) {
    const float most = most_of(how), ranks = (float)from->ranks;
    for (const Piece *p = pieces + first; p < pieces + last; p++)
        for (int64_t a = 0, r = 0; a < p->n; a += ROW, r++) {
            const int n = (int)smaller(ROW, p->n - a);
            float total[ROW] = {0}, errors[ROW];
            int8_t unpacked[ROW];
            for (int64_t rank = 0; rank < from->ranks; rank++) {
                const char *const message = from->messages + rank * from->stride;
                const int8_t *const code =
                    read_codes((const int8_t *)message + from->codes_at, p->at + a, n, p->size, how->bits, unpacked);
                float scale;
                memcpy(&scale, message + from->scales_at + 4 * (p->row + r), 4);
                for (int i = 0; i < n; i++) total[i] += code[i] * scale;
            }
            for (int i = 0; i < n; i++) total[i] /= ranks;
            round_row(total, n, numbers_of(how, p->row + r), most, p->scales + r, p->codes + p->at + a, errors);
            for (int i = 0; i < n; i++) p->rounding_errors[a + i] += ranks * errors[i];
        }
    return -1;
}

int64_t dequantize(const Piece *pieces, int64_t first, int64_t last, int64_t bits) {
    for (const Piece *p = pieces + first; p < pieces + last; p++)
        for (int64_t a = 0, r = 0; a < p->n; a += ROW, r++) {
            const int n = (int)smaller(ROW, p->n - a);
            int8_t unpacked[ROW];
            const int8_t *const code = read_codes(p->codes, p->at + a, n, p->size, bits, unpacked);
            for (int i = 0; i < n; i++) p->values[a + i] = code[i] * p->scales[r];
        }
    return -1;
}
