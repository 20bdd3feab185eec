// Orthonormal columns that span those of a narrow matrix: Householder's reflections, with LAPACK's signs (geqr2, org2r).
// Reference: orthonormalize of compopt/separate/projections.py; caller: compopt/_backends/native/native_lowrank.py.
//
// Sums are taken in one order whatever the instruction set: all machines compute equal bits. A row of zeros gives a row of zeros.

#include "common.h"

// Columns that are reflected together, and the lengths of a sum in registers.
enum { TOGETHER = 4, PARTS = LANES / WIDE };

typedef struct {
    int64_t height, r;
    const float *x;  // by columns
    float *out;      // by rows
} Columns;

static inline float add_lanes(float *sums) {
    for (int i = 0; i < 8; i++) sums[i] += sums[i + 8];
    for (int i = 0; i < 4; i++) sums[i] += sums[i + 4];
    for (int i = 0; i < 2; i++) sums[i] += sums[i + 2];
    return sums[0] + sums[1];
}

// Makes of column x the vector v, 0 above place j and 1 there, of the reflection I - tau v v^T that leaves nothing below j.
// Returns tau; 0 if nothing is there already.
static float make_reflection(float *x, int64_t j, int64_t height) {
    double squares[LANES] = {0}, all = 0;
    int64_t i = j + 1;
    for (; i + LANES <= height; i += LANES)
        for (int l = 0; l < LANES; l++) squares[l] += (double)x[i + l] * x[i + l];
    for (int l = 0; i < height; i++, l++) squares[l] += (double)x[i] * x[i];
    for (int l = 0; l < LANES; l++) all += squares[l];
    const double length = sqrt(all + (double)x[j] * x[j]);
    const float by = length < 0x1p-60 ? 0x1p+80f : 1;  // v does not depend on it, and is precise where numbers are subnormal
    const float first = by * x[j], beta = (float)(first < 0 ? by * length : -by * length), scale = first - beta;
    memset(x, 0, j * sizeof(float));
    x[j] = 1;
    if (all == 0) return 0;
    for (i = j + 1; i < height; i++) x[i] = by * x[i] / scale;
    return (beta - first) / beta;
}

// Reflects `count` columns, `stride` numbers apart, by I - tau v v^T; v is 0 before `first`.
static inline void reflect_together(const float *v, float tau, float *x, int64_t stride, int count, int64_t first) {
    Floats parts[TOGETHER][PARTS], by[TOGETHER];
#pragma GCC unroll 16
    for (int k = 0; k < count; k++)
#pragma GCC unroll 16
        for (int c = 0; c < PARTS; c++) parts[k][c] = fill_all(0);
    for (int64_t i = first; i < stride; i += LANES)
#pragma GCC unroll 16
        for (int c = 0; c < PARTS; c++) {
            const Floats left = load(v + i + c * WIDE);
#pragma GCC unroll 16
            for (int k = 0; k < count; k++) parts[k][c] = add_product(parts[k][c], left, load(x + k * stride + i + c * WIDE));
        }
#pragma GCC unroll 16
    for (int k = 0; k < count; k++) {
        float sums[LANES];
#pragma GCC unroll 16
        for (int c = 0; c < PARTS; c++) store(sums + c * WIDE, parts[k][c]);
        by[k] = fill_all(-tau * add_lanes(sums));
    }
    for (int64_t i = first; i < stride; i += WIDE) {
        const Floats left = load(v + i);
#pragma GCC unroll 16
        for (int k = 0; k < count; k++) store(x + k * stride + i, add_product(load(x + k * stride + i), by[k], left));
    }
}

static void reflect(const float *v, float tau, float *columns, int64_t stride, int64_t count, int64_t j) {
    const int64_t first = j / LANES * LANES;
    int64_t k = 0;
    if (tau == 0) return;
    for (; k + TOGETHER <= count; k += TOGETHER) reflect_together(v, tau, columns + k * stride, stride, TOGETHER, first);
    for (; k < count; k++) reflect_together(v, tau, columns + k * stride, stride, 1, first);
}

// Writes columns, `stride` numbers apart, by rows.
static void write_rows(const float *columns, int64_t stride, int64_t height, int64_t r, float *restrict out) {
    for (int64_t i = 0; i < height; i++)
        for (int64_t k = 0; k < r; k++) out[i * r + k] = columns[k * stride + i];
}

// Writes zeros to rows of `out` that are zeros in x, unless all of x is. Reflections leave rounding errors in the first r at most.
static void keep_zeros(const Columns *c, float *restrict out) {
    const int64_t height = c->height, r = c->r;
    int64_t i = 0;
    while (i < height * r && c->x[i] == 0) i++;
    if (i == height * r) return;
    for (i = 0; i < smaller(r, height); i++) {
        int64_t k = 0;
        while (k < r && c->x[k * height + i] == 0) k++;
        if (k == r) memset(out + i * r, 0, r * sizeof(float));
    }
}

// `memory`: room for r rows of the height rounded up to LANES, and r numbers.
static void orthonormalize_columns(const Columns *c, float *memory) {
    const int64_t height = c->height, r = c->r, stride = (height + LANES - 1) / LANES * LANES, many = smaller(r, height);
    float *const x = memory, *const tau = memory + r * stride;
    for (int64_t k = 0; k < r; k++) {
        memcpy(x + k * stride, c->x + k * height, height * sizeof(float));
        memset(x + k * stride + height, 0, (stride - height) * sizeof(float));
    }
    for (int64_t j = 0; j < many; j++) {
        tau[j] = make_reflection(x + j * stride, j, height);
        reflect(x + j * stride, tau[j], x + (j + 1) * stride, stride, r - j - 1, j);
    }
    for (int64_t j = many - 1; j >= 0; j--) {  // the first j columns of I, reflected by all of them
        float *const v = x + j * stride;
        reflect(v, tau[j], v + stride, stride, r - j - 1, j);
        for (int64_t i = j + 1; i < height; i++) v[i] *= -tau[j];
        v[j] = 1 - tau[j];
    }
    write_rows(x, stride, height, r, c->out);
    keep_zeros(c, c->out);
}

int64_t orthonormalize(const Columns *rows, int64_t first, int64_t last, float *memory) {
    for (int64_t i = first; i < last; i++) orthonormalize_columns(rows + i, memory);
    return -1;
}
