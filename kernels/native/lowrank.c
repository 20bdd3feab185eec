// SEPARATE with tracked columns: products of gradient plus residual with narrow matrices, and AdamW on the product of two narrow
// matrices. References: multiply of compopt/_lowrank/stacks.py, update_tensors of compopt/separate.py; caller:
// compopt/_ops/native/lowrank.py.
//
// Products are summed in the order of their index, one rounding a term: all machines compute equal bits.

#include "adamw.h"
#include "common.h"

// A product is computed for this many rows and columns at a time, whose sums stay in registers.
#if defined(__AVX512F__) && !defined(PORTABLE)
enum { HIGH = 8, COLUMNS = 16, ROWS = 4 };
#elif defined(__aarch64__) && !defined(PORTABLE)
enum { HIGH = 4, COLUMNS = 16, ROWS = 4 };
#else
enum { HIGH = 4, COLUMNS = 8, ROWS = 2 };
#endif
// Elements of a row, and rows, that stay in the cache; LANES columns of a narrow matrix are one step.
enum { WIDTH = 256, HEIGHT = 16, PARTS = LANES / WIDE, MOST = 64 };

typedef struct {
    int64_t height, width, r;
    const float *g, *e;  // this rank's gradient, or NULL, and its residual
    const float *right;  // the narrow matrix, by rows
    float *out;          // the product, by columns
} Product;

// Prefetches `size` elements that a later tile reads: the hardware prefetcher does not follow so many short streams.
static inline void fetch(const float *x, int64_t size) {
    for (int64_t j = 0; j < size; j += 64 / sizeof(float)) __builtin_prefetch(x + j, 0, 2);
}

// h = e + factor g, then zeros up to `padded`. `next`: from here to the elements of the next tile.
static inline void add_residual(const Product *x, int64_t at, int64_t size, int64_t padded, int64_t next, float factor,
                                float *restrict h) {
    const float *restrict e = x->e + at, *restrict g = x->g ? x->g + at : NULL;
    fetch(e + next, size);
    if (g) fetch(g + next, size);
    if (g && factor == 1)
        for (int64_t j = 0; j < size; j++) h[j] = e[j] + g[j];
    else if (g)
        for (int64_t j = 0; j < size; j++) h[j] = e[j] + factor * g[j];
    else
        memcpy(h, e, size * sizeof(float));
    for (int64_t j = size; j < padded; j++) h[j] = 0;
}

// LANES columns of HIGH rows of h Q, added to `sums`; `stride`: from a row of Q to the next.
static inline void multiply_tile(const float h[HIGH][WIDTH], const float *Q, int64_t stride, int64_t size,
                                 Floats sums[HIGH][PARTS]) {
    Floats part[HIGH][PARTS];
    for (int n = 0; n < HIGH; n++)
        for (int c = 0; c < PARTS; c++) part[n][c] = sums[n][c];
    for (int64_t j = 0; j < size; j++) {
        Floats right[PARTS];
#pragma GCC unroll 16
        for (int c = 0; c < PARTS; c++) right[c] = load(Q + j * stride + c * WIDE);
#pragma GCC unroll 16
        for (int n = 0; n < HIGH; n++)
#pragma GCC unroll 16
            for (int c = 0; c < PARTS; c++) part[n][c] = add_product(part[n][c], fill_all(h[n][j]), right[c]);
    }
    for (int n = 0; n < HIGH; n++)
        for (int c = 0; c < PARTS; c++) sums[n][c] = part[n][c];
}

// Line 1: P = h Q. `memory`: room for Q with rows of whole steps.
static void multiply(const Product *x, float factor, float *memory) {
    const int64_t r = x->r, stride = (r + LANES - 1) / LANES * LANES;
    const float *Q = x->right;
    if (stride != r) {
        memset(memory, 0, x->width * stride * sizeof(float));
        for (int64_t j = 0; j < x->width; j++) memcpy(memory + j * stride, Q + j * r, r * sizeof(float));
        Q = memory;
    }
    float h[HIGH][WIDTH];
    for (int64_t i = 0; i < x->height; i += HIGH) {
        const int rows = (int)smaller(HIGH, x->height - i);
        for (int64_t k = 0; k < r; k += LANES) {
            Floats sums[HIGH][PARTS];
            for (int n = 0; n < HIGH; n++)
                for (int c = 0; c < PARTS; c++) sums[n][c] = fill_all(0);
            for (int64_t a = 0; a < x->width; a += WIDTH) {
                const int64_t size = smaller(WIDTH, x->width - a);
                for (int n = 0; n < HIGH; n++)  // rows that are not there: the last one again
                    add_residual(x, (i + (n < rows ? n : rows - 1)) * x->width + a, size, size, HIGH * x->width,
                                 factor, h[n]);
                multiply_tile((const float(*)[WIDTH])h, Q + a * stride + k, stride, size, sums);
            }
            float product[HIGH][LANES];
            for (int n = 0; n < HIGH; n++)
                for (int c = 0; c < PARTS; c++) store(product[n] + c * WIDE, sums[n][c]);
            for (int64_t c = 0; c < smaller(LANES, r - k); c++)
                for (int n = 0; n < rows; n++) x->out[(k + c) * x->height + i + n] = product[n][c];
        }
    }
}

// COLUMNS rows of h^T R transposed, for WIDE columns, added to `sums`.
static inline void multiply_transposed_tile(const float h[HEIGHT][WIDTH], const float *R, int64_t r, int64_t rows,
                                            float sums[COLUMNS][WIDTH]) {
    Floats part[COLUMNS];
#pragma GCC unroll 16
    for (int c = 0; c < COLUMNS; c++) part[c] = load(sums[c]);
    for (int64_t n = 0; n < rows; n++) {
        const Floats right = load(h[n]);
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; c++) part[c] = add_product(part[c], fill_all(R[n * r + c]), right);
    }
#pragma GCC unroll 16
    for (int c = 0; c < COLUMNS; c++) store(sums[c], part[c]);
}

// Line 3: p = h^T R. `memory`: room for R with rows of whole steps.
static void multiply_transposed(const Product *x, float factor, float *memory) {
    const int64_t r = x->r, stride = (r + COLUMNS - 1) / COLUMNS * COLUMNS;
    const float *R = x->right;
    if (stride != r) {
        memset(memory, 0, x->height * stride * sizeof(float));
        for (int64_t i = 0; i < x->height; i++) memcpy(memory + i * stride, R + i * r, r * sizeof(float));
        R = memory;
    }
    float h[HEIGHT][WIDTH], sums[MOST][WIDTH];
    for (int64_t a = 0; a < x->width; a += WIDTH) {
        const int64_t size = smaller(WIDTH, x->width - a), padded = (size + LANES - 1) / LANES * LANES;
        for (int64_t first = 0; first < r; first += MOST) {
            const int64_t count = smaller(MOST, stride - first);
            memset(sums, 0, count * sizeof *sums);
            for (int64_t i = 0; i < x->height; i += HEIGHT) {
                const int64_t rows = smaller(HEIGHT, x->height - i);
                for (int64_t n = 0; n < rows; n++)
                    add_residual(x, (i + n) * x->width + a, size, padded, HEIGHT * x->width, factor, h[n]);
                for (int64_t k = 0; k < count; k += COLUMNS)
                    for (int64_t j = 0; j < padded; j += WIDE)
                        multiply_transposed_tile((const float(*)[WIDTH])(*h + j), R + i * stride + first + k, stride, rows,
                                                 (float(*)[WIDTH])(sums[k] + j));
            }
            for (int64_t k = 0; k < smaller(count, r - first); k++)
                memcpy(x->out + (first + k) * x->width + a, sums[k], size * sizeof(float));
        }
    }
}

// `memory`: room for the largest narrow matrix, its columns rounded up to LANES.
int64_t project(const Product *rows, int64_t first, int64_t last, double factor, double transposed, float *memory) {
    for (int64_t x = first; x < last; x++)
        if (transposed)
            multiply_transposed(rows + x, (float)factor, memory);
        else
            multiply(rows + x, (float)factor, memory);
    return -1;
}

typedef struct {
    int64_t height, width, r;
    const float *R, *p, *sent;  // by columns: the averaged gradient is R p^T, and this rank has sent R sent^T of it
    const float *g;             // this rank's gradient, or NULL
    float *e, *w, *m, *v, *step;  // step: steps before this one
} Factored;

typedef struct {
    double lr, beta1, beta2, eps, decay, sign;
    double of_average, of_sent, of_grad;  // factors: of R p^T in AdamW; of R sent^T and of g in the residual
} Weights;

// ROWS rows of R p^T and of R sent^T, for `size` columns; `stride`: from a column of R to the next.
static inline void expand_tile(const Factored *x, int64_t i, int64_t a, int64_t size,
                               float average[ROWS][WIDTH], float own[ROWS][WIDTH]) {
    enum { PAIR = 2 };
    const float *R[ROWS];
    for (int n = 0; n < ROWS; n++) R[n] = x->R + smaller(i + n, x->height - 1);
    int64_t j = 0;
    for (; j + PAIR * WIDE <= size; j += PAIR * WIDE) {
        Floats one[ROWS][PAIR], two[ROWS][PAIR];
#pragma GCC unroll 16
        for (int n = 0; n < ROWS; n++)
            for (int c = 0; c < PAIR; c++) one[n][c] = two[n][c] = fill_all(0);
        for (int64_t k = 0; k < x->r; k++) {
            const float *const p = x->p + k * x->width + a + j, *const mine = x->sent + k * x->width + a + j;
            const Floats mean[PAIR] = {load(p), load(p + WIDE)}, local[PAIR] = {load(mine), load(mine + WIDE)};
#pragma GCC unroll 16
            for (int n = 0; n < ROWS; n++) {
                const Floats left = fill_all(R[n][k * x->height]);
#pragma GCC unroll 2
                for (int c = 0; c < PAIR; c++) {
                    one[n][c] = add_product(one[n][c], left, mean[c]);
                    two[n][c] = add_product(two[n][c], left, local[c]);
                }
            }
        }
#pragma GCC unroll 16
        for (int n = 0; n < ROWS; n++)
            for (int c = 0; c < PAIR; c++) {
                store(average[n] + j + c * WIDE, one[n][c]);
                store(own[n] + j + c * WIDE, two[n][c]);
            }
    }
    for (; j < size; j++)
        for (int n = 0; n < ROWS; n++) {
            float one = 0, two = 0;
            for (int64_t k = 0; k < x->r; k++) {
                one = fmaf(R[n][k * x->height], x->p[k * x->width + a + j], one);
                two = fmaf(R[n][k * x->height], x->sent[k * x->width + a + j], two);
            }
            average[n][j] = one, own[n][j] = two;
        }
}

// Lines 4 and 5 of one tensor, and AdamW.
static void update_factored(const Factored *x, const Weights *h) {
    const Factors f = adamw_factors(*x->step + 1, h->lr, h->beta1, h->beta2, h->eps, h->decay);
    const float scale = (float)(h->sign * h->of_average), of_sent = (float)h->of_sent, of_grad = (float)h->of_grad;
    float average[ROWS][WIDTH], own[ROWS][WIDTH];
    for (int64_t i = 0; i < x->height; i += ROWS) {
        const int rows = (int)smaller(ROWS, x->height - i);
        for (int64_t a = 0; a < x->width; a += WIDTH) {
            const int64_t size = smaller(WIDTH, x->width - a);
            expand_tile(x, i, a, size, average, own);
            for (int n = 0; n < rows; n++) {
                const int64_t at = (i + n) * x->width + a;
                float *restrict const w = x->w + at, *restrict const m = x->m + at, *restrict const v = x->v + at;
                float *restrict const e = x->e + at;
                const float *restrict const g = x->g ? x->g + at : NULL, *restrict const ghat = average[n];
                const int64_t next = ROWS * x->width;
                fetch(w + next, size), fetch(m + next, size), fetch(v + next, size), fetch(e + next, size);
                if (g) fetch(g + next, size);
                for (int64_t c = 0; c < size; c++)
                    w[c] = f.shrink * w[c] - f.rate * update_moments(m + c, v + c, scale * ghat[c], f);
                if (g)
                    for (int64_t c = 0; c < size; c++) e[c] = e[c] + of_grad * g[c] - of_sent * own[n][c];
                else
                    for (int64_t c = 0; c < size; c++) e[c] -= of_sent * own[n][c];
            }
        }
    }
    *x->step += 1;
}

int64_t factored(const Factored *rows, int64_t first, int64_t last, const Weights *weights) {
    for (int64_t x = first; x < last; x++) update_factored(rows + x, weights);
    return -1;
}
