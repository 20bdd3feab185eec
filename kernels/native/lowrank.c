// SEPARATE with tracked columns: products of gradient plus residual with narrow matrices, and AdamW on the product of two narrow
// matrices. Lines are those of compopt/separate/stacks.py. References: multiply there, update_tensors of
// compopt/separate/separate.py; caller: compopt/_backends/native/native_lowrank.py.
//
// Products are summed in the order of their index, one rounding a term: all machines compute equal bits.

#include "adamw.h"
#include "common.h"

// A product is computed for this many rows and columns at a time, whose sums stay in registers.
#if defined(__AVX512F__) && !defined(PORTABLE)
enum { HIGH = 8, COLUMNS = 16, ROWS = 8 };
#elif defined(__aarch64__) && !defined(PORTABLE)
enum { HIGH = 4, COLUMNS = 16, ROWS = 8 };
#else
enum { HIGH = 4, COLUMNS = 8, ROWS = 4 };
#endif
// Rows that h^T R adds up before sums are stored; LANES columns of a narrow matrix are one step.
enum { DEEP = 16, PARTS = LANES / WIDE };
// Elements that are prefetched before they are read, by a product of two streams and an update of five, and between two buffers.
enum { FAR_AHEAD = 1024, AHEAD = 320, SPACE = 4 * LANES };

typedef struct {
    int64_t height, width, r;
    const float *g, *e;  // this rank's gradient, or NULL, and its residual
    const float *right;  // the narrow matrix, by rows
    float *out;          // the product, by columns
    float *flag;         // of h Q: 1 if the squares of g have a finite sum, else NaN; 0 without g
} Product;

// h = e + g of `size` elements from `at` on; adds the squares of g to `squares`, if there is that.
//
// Both products read h in the order of memory, some elements between two tiles: the rows that later tiles multiply. So memory is
// read as two long streams, while products are computed.
static inline void add_residual(const Product *x, int64_t at, int64_t size, float *restrict h, float *restrict squares) {
    const float *restrict e = x->e + at, *restrict g = x->g ? x->g + at : NULL;
    if (size <= 0) return;
    for (int64_t j = FAR_AHEAD; j < FAR_AHEAD + size; j += LANES) {
        __builtin_prefetch(e + j, 0, 2);
        if (g) __builtin_prefetch(g + j, 0, 2);
    }
    if (!g) {
        memcpy(h, e, size * sizeof(float));
        return;
    }
    int64_t j = 0;
    if (squares)
        for (; j + LANES <= size; j += LANES)
            for (int l = 0; l < LANES; l++) h[j + l] = e[j + l] + g[j + l], squares[l] += g[j + l] * g[j + l];
    for (int64_t i = j; i < size; i++) h[i] = e[i] + g[i];
    if (squares)
        for (; j < size; j++) squares[0] += g[j] * g[j];
}

// The narrow matrix with rows of whole steps of `stride` numbers, zeros added; in `memory` if it has others.
static const float *pad_rows(const float *matrix, int64_t rows, int64_t r, int64_t stride, float *memory) {
    if (stride == r) return matrix;
    memset(memory, 0, rows * stride * sizeof(float));
    for (int64_t i = 0; i < rows; i++) memcpy(memory + i * stride, matrix + i * r, r * sizeof(float));
    return memory;
}

// LANES columns of HIGH rows of h Q, added to `sums`; `stride`: from a row of Q to the next.
static inline void multiply_tile(const float *const h[HIGH], int64_t a, const float *Q, int64_t stride, int64_t size,
                                 Floats sums[HIGH][PARTS]) {
    for (int64_t j = 0; j < size; j++) {
        Floats right[PARTS];
#pragma GCC unroll 16
        for (int c = 0; c < PARTS; c++) right[c] = load(Q + j * stride + c * WIDE);
#pragma GCC unroll 16
        for (int n = 0; n < HIGH; n++)
#pragma GCC unroll 16
            for (int c = 0; c < PARTS; c++) sums[n][c] = add_product(sums[n][c], fill_all(h[n][a + j]), right[c]);
    }
}

// Line 2a: P = h Q. `memory`: room for Q with rows of whole steps, and for two buffers of HIGH rows.
static void multiply(const Product *x, float *memory) {
    const int64_t width = x->width, r = x->r, stride = (r + LANES - 1) / LANES * LANES, numel = x->height * width;
    const float *Q = pad_rows(x->right, width, r, stride, memory);
    float *const buffers = memory + width * stride, squares[LANES] = {0}, all = 0;
    const int64_t half = HIGH * width + SPACE;
    add_residual(x, 0, smaller(HIGH * width, numel), buffers, squares);
    for (int64_t i = 0; i < x->height; i += HIGH) {
        const int64_t rows = smaller(HIGH, x->height - i), now = i / HIGH % 2, later = (i + HIGH) * width;
        float *const next = buffers + half * (1 - now);
        const float *h[HIGH];  // rows that are not there: the last one again
        for (int n = 0; n < HIGH; n++) h[n] = buffers + half * now + smaller(n, rows - 1) * width;
        for (int64_t k = 0; k < r; k += LANES) {
            Floats sums[HIGH][PARTS];
            for (int n = 0; n < HIGH; n++)
                for (int c = 0; c < PARTS; c++) sums[n][c] = fill_all(0);
            for (int64_t a = 0; a < width; a += LANES) {
                const int64_t size = smaller(LANES, width - a), done = HIGH * a;
                multiply_tile(h, a, Q + a * stride + k, stride, size, sums);
                if (k == 0) add_residual(x, later + done, smaller(HIGH * size, numel - later - done), next + done, squares);
            }
            float product[HIGH][LANES];
            for (int n = 0; n < HIGH; n++)
                for (int c = 0; c < PARTS; c++) store(product[n] + c * WIDE, sums[n][c]);
            for (int64_t c = 0; c < smaller(LANES, r - k); c++)
                for (int n = 0; n < rows; n++) x->out[(k + c) * x->height + i + n] = product[n][c];
        }
    }
    for (int l = 0; l < LANES; l++) all += squares[l];
    *x->flag = x->g ? 1 + 0 * all : 0;
}

// COLUMNS rows of h^T R transposed, for WIDE columns, added to `sums`, whose rows are `length` numbers apart.
static inline void multiply_transposed_tile(const float *h, int64_t width, const float *R, int64_t stride, int64_t rows, float *sums,
                                            int64_t length) {
    Floats part[COLUMNS];
#pragma GCC unroll 16
    for (int c = 0; c < COLUMNS; c++) part[c] = load(sums + c * length);
    for (int64_t n = 0; n < rows; n++) {
        const Floats right = load(h + n * width);
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; c++) part[c] = add_product(part[c], fill_all(R[n * stride + c]), right);
    }
#pragma GCC unroll 16
    for (int c = 0; c < COLUMNS; c++) store(sums + c * length, part[c]);
}

// Line 2c: p = h^T R. `memory`: room for R with rows of whole steps, for two buffers of DEEP rows, and for the sums.
static void multiply_transposed(const Product *x, float *memory) {
    const int64_t width = x->width, r = x->r, stride = (r + COLUMNS - 1) / COLUMNS * COLUMNS, numel = x->height * width;
    const int64_t half = DEEP * width + SPACE, length = width + SPACE;
    const float *R = pad_rows(x->right, x->height, r, stride, memory);
    float *const buffers = memory + x->height * stride, *const sums = buffers + 2 * half;
    memset(sums, 0, stride * length * sizeof(float));
    add_residual(x, 0, smaller(DEEP * width, numel), buffers, NULL);
    for (int64_t i = 0; i < x->height; i += DEEP) {
        const int64_t rows = smaller(DEEP, x->height - i), now = i / DEEP % 2, later = (i + DEEP) * width;
        const float *const h = buffers + half * now;
        float *const next = buffers + half * (1 - now);
        for (int64_t k = 0; k < stride; k += COLUMNS)
            for (int64_t a = 0; a < width; a += WIDE) {
                const int64_t done = DEEP * a, size = DEEP * smaller(WIDE, width - a);
                multiply_transposed_tile(h + a, width, R + i * stride + k, stride, rows, sums + k * length + a, length);
                if (k == 0) add_residual(x, later + done, smaller(size, numel - later - done), next + done, NULL);
            }
    }
    for (int64_t k = 0; k < r; k++) memcpy(x->out + k * width, sums + k * length, width * sizeof(float));
}

// `memory`: room for a narrow matrix and the sums, their columns rounded up to LANES, and 2 DEEP rows with 4 SPACE more.
int64_t project(const Product *rows, int64_t first, int64_t last, double makes_P, float *memory) {
    for (int64_t x = first; x < last; x++)
        (makes_P ? multiply : multiply_transposed)(rows + x, memory);
    return -1;
}

typedef struct {
    int64_t height, width, r;
    const float *R, *p, *sent;  // R by rows, p and sent by columns: the average is R p^T, this rank has sent R sent^T of it
    const float *g;             // this rank's gradient, or NULL
    float *e, *w, *m, *v, *step;  // step: steps before this one
} Factored;

typedef struct {
    double lr, beta1, beta2, eps, decay, sign;
    double of_average, of_sent, of_grad;  // factors: of R p^T in AdamW; of R sent^T and of g in the residual
} Weights;

// Tiles of WIDE columns of p and of sent, one after the other: from one k to the next lie 2 WIDE numbers. In their own rows they
// would share few sets of the cache, whose distance is a large power of two.
static void pack(const Factored *x, float *tiles) {
    for (int64_t a = 0; a < x->width; a += WIDE) {
        const int64_t size = smaller(WIDE, x->width - a);
        for (int64_t k = 0; k < x->r; k++, tiles += 2 * WIDE) {
            memcpy(tiles, x->p + k * x->width + a, size * sizeof(float));
            memcpy(tiles + WIDE, x->sent + k * x->width + a, size * sizeof(float));
            for (int64_t j = size; j < WIDE; j++) tiles[j] = tiles[WIDE + j] = 0;
        }
    }
}

// ROWS rows of R p^T and of R sent^T, for the columns of one tile; rows are `width` numbers apart.
static inline void expand_tile(const float *const R[ROWS], int64_t r, const float *tile, int64_t width, float *average, float *own) {
    Floats one[ROWS], two[ROWS];
#pragma GCC unroll 16
    for (int n = 0; n < ROWS; n++) one[n] = two[n] = fill_all(0);
    for (int64_t k = 0; k < r; k++, tile += 2 * WIDE) {
        const Floats mean = load(tile), local = load(tile + WIDE);
#pragma GCC unroll 16
        for (int n = 0; n < ROWS; n++) {
            const Floats left = fill_all(R[n][k]);
            one[n] = add_product(one[n], left, mean), two[n] = add_product(two[n], left, local);
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < ROWS; n++) store(average + n * width, one[n]), store(own + n * width, two[n]);
}

typedef struct {
    float of_average, of_sent, of_grad;
} Scales;

// AdamW and the residual of `size` elements from `at` on; `average` and `own`: of R p^T and of R sent^T.
static inline void step_elements(const Factored *x, Factors f, Scales by, int64_t at, int64_t size, const float *restrict average,
                                 const float *restrict own) {
    float *restrict const w = x->w + at, *restrict const m = x->m + at, *restrict const v = x->v + at;
    float *restrict const e = x->e + at;
    const float *restrict const g = x->g ? x->g + at : NULL;
    for (int64_t c = AHEAD; c < AHEAD + size; c += LANES) {
        __builtin_prefetch(w + c, 0, 2), __builtin_prefetch(m + c, 0, 2), __builtin_prefetch(v + c, 0, 2);
        __builtin_prefetch(e + c, 0, 2);
        if (g) __builtin_prefetch(g + c, 0, 2);
    }
    for (int64_t c = 0; c < size; c++)
        w[c] = f.shrink * w[c] - f.rate * update_moments(m + c, v + c, by.of_average * average[c], f);
    if (g)
        for (int64_t c = 0; c < size; c++) e[c] = e[c] + by.of_grad * g[c] - by.of_sent * own[c];
    else
        for (int64_t c = 0; c < size; c++) e[c] -= by.of_sent * own[c];
}

// Lines 4 and 5 of one tensor, and AdamW. `memory`: room for 2 r rows of the width rounded up to WIDE, 4 ROWS of the width, and
// 4 SPACE numbers.
//
// ROWS rows are expanded at a time. Between two tiles, as many elements of the ROWS before take their step, in the order of
// memory: memory is read as a few long streams, while products are computed. A row's last tile may write over the first numbers
// of the next row, which are written later: tiles go from the last to the first.
static void update_factored(const Factored *x, const Weights *h, float *memory) {
    const Factors f = adamw_factors(*x->step + 1, h->lr, h->beta1, h->beta2, h->eps, h->decay);
    const Scales by = {(float)(h->sign * h->of_average), (float)h->of_sent, (float)h->of_grad};
    const int64_t width = x->width, padded = (width + WIDE - 1) / WIDE * WIDE, half = ROWS * width + SPACE;
    float *const tiles = memory, *const buffers = tiles + 2 * x->r * padded;
    pack(x, tiles);
    int64_t first = 0, ready = 0;  // elements that are expanded and not stepped: the first, how many
    for (int64_t i = 0; first < x->height * width; i += ROWS) {
        const int64_t rows = i < x->height ? smaller(ROWS, x->height - i) : 0;
        const int now = i / ROWS % 2;
        float *const average = buffers + 2 * half * now, *const own = average + half;
        const float *const mean = buffers + 2 * half * (1 - now), *const sent = mean + half, *R[ROWS];
        for (int n = 0; n < ROWS; n++) R[n] = x->R + smaller(i + n, x->height - 1) * x->r;
        for (int64_t done = 0, a = padded - WIDE; a >= 0; done += ROWS * WIDE, a -= WIDE) {
            if (rows) expand_tile(R, x->r, tiles + 2 * x->r * a, width, average + a, own + a);
            const int64_t size = smaller(ROWS * WIDE, ready - done);
            if (size > 0) step_elements(x, f, by, first + done, size, mean + done, sent + done);
        }
        first += ready, ready = rows * width;
    }
    *x->step += 1;
}

int64_t factored(const Factored *rows, int64_t first, int64_t last, const Weights *weights, float *memory) {
    for (int64_t x = first; x < last; x++) update_factored(rows + x, weights, memory);
    return -1;
}
