// Runs what vectors.h has, and the passes over tensors and codes, on numbers from a fixed seed, and prints a checksum of
// all results: the same on every instruction set. See check_neon.py.

#include <stdio.h>
#include <stdlib.h>
#include "common.h"

int64_t room_for(int64_t k);
double largest(const float *x, int64_t n, int64_t k, double guess, int32_t *scratch, int32_t *out);
int64_t pack(const void *rows, int64_t first, int64_t last, double sign, double scale);
int64_t adamw(const void *rows, int64_t first, int64_t last, const void *hyper);
int64_t scape(const void *rows, int64_t first, int64_t last, const void *hyper, int32_t *scratch, float *gathered,
              int64_t most);
int64_t quantize(const void *pieces, int64_t first, int64_t last, const void *how);
int64_t mean_of_codes(const void *pieces, int64_t first, int64_t last, const void *how, const void *from);
int64_t dequantize(const void *pieces, int64_t first, int64_t last, int64_t bits);
int64_t project(const void *rows, int64_t first, int64_t last, double makes_P, float *memory);
int64_t factored(const void *rows, int64_t first, int64_t last, const void *weights, float *memory);
int64_t orthonormalize(const void *rows, int64_t first, int64_t last, float *memory);

static uint64_t state = 1, sum = 14695981039346656037u;

static uint32_t drawn(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static float number(void) { return ((float)(drawn() % 2000001) - 1000000) / 250000; }

static void add(const void *memory, int64_t bytes) {  // FNV-1a
    for (int64_t i = 0; i < bytes; i++) sum = (sum ^ ((const uint8_t *)memory)[i]) * 1099511628211u;
}

static float *floats(int64_t n) {
    float *x = malloc((n + LANES) * sizeof(float));
    for (int64_t i = 0; i < n; i++) x[i] = drawn() % 7 ? number() : (float)(drawn() % 3);  // with ties and zeros
    return x;
}

static void primitives(void) {
    float x[2 * LANES], out[2 * LANES];
    int32_t where[2 * LANES];
    for (Bits some = 0; some < 1 << LANES; some += 1 + some / 512 % 7) {
        for (int i = 0; i < 2 * LANES; i++) x[i] = number();
        int32_t limit;
        memcpy(&limit, x + 20, 4);
        const Bits hits = beyond(x, limit & 0x7fffffff);
        add(&hits, sizeof hits);
        add(out, 4 * compress(out, x, some));
        add(where, 4 * places(where, 1000, some));
        expand(out, x, some);
        add(out, 4 * LANES);
        clear(x, some);
        add(x, 4 * LANES);
    }
}

// One tensor of n elements, k of them selected, through every pass.
static void passes(int64_t n, int64_t k) {
    float *w = floats(n), *m = floats(n), *v = floats(n), *e = floats(n), *g = floats(n), *score = floats(n);
    for (int64_t i = 0; i < n; i++) v[i] = fabsf(v[i]);
    int32_t *index = malloc((k + LANES) * 4), *chosen = malloc((k + LANES) * 4);
    int32_t *scratch = malloc(2 * room_for(k) * 4);
    uint8_t *mask = calloc(n / 8 + 1, 1);
    double guess = largest(g, n, k, 0, scratch, index);
    add(index, 4 * k);
    guess = largest(g, n, k, guess, scratch, chosen);
    add(&guess, 8);
    for (int64_t j = 0; j < k; j++) mask[index[j] / 8] |= (uint8_t)(1 << index[j] % 8);
    float *sent = malloc((k + LANES) * 4), mark, step = 3;
    int64_t row[8] = {n, (int64_t)g, (int64_t)e, 0, (int64_t)mask, k, (int64_t)sent, (int64_t)&mark};
    int64_t wrong = pack(row, 0, 1, -1, 0.5);
    add(&wrong, 8), add(sent, 4 * k), add(&mark, 4);
    const double adam[] = {1e-2, .9, .999, 1e-8, .01, 1};
    int64_t radius[16] = {n, (int64_t)w, (int64_t)m, (int64_t)v, (int64_t)&step, (int64_t)sent, (int64_t)mask, 0, 0, k,
                          (int64_t)e, (int64_t)g, (int64_t)score, 0, 0, 0};
    wrong = adamw(radius, 0, 1, adam);
    add(&wrong, 8), add(w, 4 * n), add(m, 4 * n), add(v, 4 * n), add(e, 4 * n), add(score, 4 * n), add(&step, 4);
    const double adams[] = {1e-2, .9, .95, 1e-8, .1, 1, .1};
    float *next = malloc((k + LANES) * 4), *gathered = malloc((3 * k + LANES) * 4);
    guess = 0.5;
    int64_t scapes[17] = {n, (int64_t)w, (int64_t)e, (int64_t)g, (int64_t)index, k, (int64_t)sent, (int64_t)index, k,
                          (int64_t)sent, (int64_t)next, (int64_t)&step, (int64_t)&guess, 0, n, k, (int64_t)chosen};
    wrong = scape(scapes, 0, 1, adams, scratch, gathered, k);
    add(&wrong, 8), add(w, 4 * n), add(e, 4 * n), add(next, 4 * k), add(chosen, 4 * k), add(&guess, 8);
}

// Codes, one a byte, to where messages have them.
static void put(const int8_t *codes, int64_t n, int64_t bits, int8_t *out) {
    const int64_t half = (n + 1) / 2;
    if (bits == 8) memcpy(out, codes, n);
    for (int64_t i = 0; bits == 4 && i < half; i++) out[i] = codes[i] + (half + i < n ? 16 * codes[half + i] : 0);
}

// What three ranks send of n values, the mean of it, and back. A row has only zeros, another's scale has no inverse.
static void codes(int64_t n, int64_t bits) {
    enum { RANKS = 3, ROW = 128, TABLE = 65536 };
    static float u[2 * TABLE];
    for (int i = 0; i < 2 * TABLE; i++) u[i] = ((uint32_t)(i % TABLE) * 40503u % TABLE + 0.5f) / TABLE;
    const int64_t rows = (n + ROW - 1) / ROW, codes_at = 4 * rows, stride = codes_at + (n + 3) / 4 * 4;
    char *messages = calloc(RANKS, stride);
    int8_t *own = malloc(n);
    float *x = floats(n), *rest = floats(n);
    for (int64_t rank = 0; rank < RANKS; rank++) {
        char *const message = messages + rank * stride;
        for (int64_t i = 0; i < n; i++) x[i] = i / ROW == 1 ? 0 : i / ROW == 2 ? 1e-38f * number() : number();
        const int64_t how[3] = {(int64_t)u, 60000 + rank, bits};
        const int64_t sent[9] = {(int64_t)x, (int64_t)message, (int64_t)own, (int64_t)rest, 0, 0, n, n, 0};
        quantize(sent, 0, 1, how);
        add(own, n), add(rest, 4 * n), add(message, 4 * rows);
        put(own, n, bits, (int8_t *)message + codes_at);
    }
    const int64_t how[3] = {(int64_t)u, 123, bits}, from[5] = {(int64_t)messages, stride, 0, codes_at, RANKS};
    float *scales = floats(rows);
    int64_t mean[9] = {(int64_t)x, (int64_t)scales, (int64_t)own, (int64_t)rest, 0, 0, n, n, 0};
    mean_of_codes(mean, 0, 1, how, from);
    add(own, n), add(rest, 4 * n), add(scales, 4 * rows);
    put(own, n, bits, (int8_t *)messages + codes_at);
    mean[2] = (int64_t)(messages + codes_at);
    dequantize(mean, 0, 1, bits);
    add(x, 4 * n);
}

// A tensor with tracked columns: its two products, and the step.
static void columns(int64_t height, int64_t width, int64_t r) {
    const int64_t n = height * width, longer = height > width ? height : width;
    float *w = floats(n), *m = floats(n), *v = floats(n), *e = floats(n), *g = floats(n), step = 2;
    float *memory = malloc((longer + 16 * LANES) * (2 * r + 8 * LANES) * 4), *sent = floats(width * r), mark = 0;
    for (int64_t i = 0; i < n; i++) v[i] = fabsf(v[i]);
    float *Q = floats(width * r), *R = floats(height * r), *P = malloc(height * r * 4), *p = malloc(width * r * 4);
    int64_t row[8] = {height, width, r, (int64_t)g, (int64_t)e, (int64_t)Q, (int64_t)P, (int64_t)&mark};
    project(row, 0, 1, 1, memory);
    row[5] = (int64_t)R, row[6] = (int64_t)p;
    project(row, 0, 1, 0, memory);
    add(P, 4 * height * r), add(p, 4 * width * r), add(&mark, 4);
    const double weights[9] = {1e-2, .9, .999, 1e-8, .01, -1, .5, .4, .3};
    const int64_t tensor[12] = {height, width, r, (int64_t)R, (int64_t)p, (int64_t)sent, (int64_t)g,
                                (int64_t)e, (int64_t)w, (int64_t)m, (int64_t)v, (int64_t)&step};
    factored(tensor, 0, 1, weights, memory);
    add(w, 4 * n), add(m, 4 * n), add(v, 4 * n), add(e, 4 * n), add(&step, 4);
    int64_t narrow[4] = {height, r, (int64_t)P, (int64_t)R};
    if (r <= height) orthonormalize(narrow, 0, 1, memory), add(R, 4 * height * r);
}

int main(void) {
    static const int64_t sizes[] = {1, 15, 16, 17, 511, 512, 513, 4095, 4096, 4097, 16383, 16384, 16385, 40007};
    primitives();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int64_t part = 1; part < 1000; part = 7 * part + 1) passes(sizes[i], (sizes[i] + part - 1) / part);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) codes(sizes[i], 8), codes(sizes[i], 4);
    static const int64_t sides[] = {1, 5, 17, 256, 300}, ranks[] = {1, 4, 16, 17, 64, 65};
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 5; j++)
            for (int k = 0; k < 6; k++) columns(sides[i], sides[j], ranks[k]);
    codes(300000, 8), codes(300000, 4);  // more rows than a block of them has
    printf("%s %016llx\n", ISA, (unsigned long long)sum);
    return 0;
}
