// Radius, lines 10, 15 to 17, 21 and 25 (the numbered lines of compopt/radius.py). Reference: step_adamw of
// compopt/_engine/reducer.py.

#include "adamw.h"
#include "common.h"

typedef struct {
    int64_t n;
    float *w, *m, *v, *step;  // step: steps before this one; NULL: this tensor takes no step
    const float *mean;        // the averaged gradient
    const uint8_t *mask;      // given at these bits,
    const int32_t *index;     // or at these positions, counted from `base`; neither: everywhere
    int64_t base, k;
    float *residual;          // NULL for a tensor that is not compressed, or in a dense step
    const float *g;           // this rank's gradient
    const float *errors;      // NULL, or what the residual becomes where the averaged gradient is given
    float *new_w, *new_m, *new_v;  // where updated tensors go; NULL: in place
} AdamW;

typedef struct {
    double lr, beta1, beta2, eps, decay, sign;
} Hyper;

// Expands a block of values at the mask to a dense vector, 0 off the mask. `count` values were used before; returns how many
// were used after.
static int64_t averaged(const AdamW *row, const float *values, int64_t a, int64_t size, int64_t count, float *restrict out) {
    int64_t i = 0;
    if (row->index) {
        memset(out, 0, size * sizeof(float));
        const int64_t begin = row->base + a;
        for (; count < row->k && within(row->index[count], begin, size); count++) out[row->index[count] - begin] = values[count];
        return count;
    }
    for (; i + LANES <= size && count + LANES <= row->k; i += LANES) {
        const Bits some = sixteen(row->mask, a + i);
        expand(out + i, values + count, some);
        count += __builtin_popcount(some);
    }
    for (; i < size; i++) out[i] = count < row->k && on(row->mask, a + i) ? values[count++] : 0;
    return count;
}

// Line 16 for one block: adds g to the residual, and clears it on the mask.
static void update_residual(float *restrict residual, const float *restrict g, const uint8_t *restrict mask, int64_t a,
                      int64_t size) {
    int64_t i = 0;
    for (int64_t j = 0; g && j < size; j++) residual[j] += g[j];
    for (; i + LANES <= size; i += LANES) clear(residual + i, sixteen(mask, a + i));
    for (; i < size; i++)
        if (on(mask, a + i)) residual[i] = 0;
}

// Updates a block in other memory.
static void adamw_block(const float *restrict w, const float *restrict m, const float *restrict v, const float *restrict g,
                        float *restrict new_w, float *restrict new_m, float *restrict new_v, int64_t size, float sign, Factors f) {
    for (int64_t i = 0; i < size; i++) {
        float first = m[i], second = v[i];
        new_w[i] = f.shrink * w[i] - f.rate * update_moments(&first, &second, sign * g[i], f);
        new_m[i] = first;
        new_v[i] = second;
    }
}

// Returns whether all averaged values were used.
static int adamw_row(const AdamW *row, const Hyper *h) {
    const double step = *row->step + 1;
    const Factors f = adamw_factors(step, h->lr, h->beta1, h->beta2, h->eps, h->decay);
    const float sign = h->sign;
    float mean[BLOCK], errors[BLOCK];
    int64_t count = 0;
    for (int64_t a = 0; a < row->n; a += BLOCK) {
        const int64_t size = smaller(BLOCK, row->n - a);
        float *restrict const w = row->w + a, *restrict const m = row->m + a, *restrict const v = row->v + a;
        const float *restrict const g = row->mask || row->index ? mean : row->mean + a;
        const int64_t before = count;
        if (row->mask || row->index) count = averaged(row, row->mean, a, size, count, mean);
        if (row->residual && row->mask) {
            update_residual(row->residual + a, row->g ? row->g + a : NULL, row->mask, a, size);
            if (row->errors) averaged(row, row->errors, a, size, before, errors);
            for (int64_t i = 0; row->errors && i < size; i++) row->residual[a + i] += errors[i];  // to 0 on the mask
        } else if (row->residual && row->errors)
            memcpy(row->residual + a, row->errors + a, size * sizeof(float));
        else if (row->residual)
            memset(row->residual + a, 0, size * sizeof(float));
        if (row->new_w) {
            adamw_block(w, m, v, g, row->new_w + a, row->new_m + a, row->new_v + a, size, sign, f);
            continue;
        }
        for (int64_t i = 0; i < size; i++) w[i] = f.shrink * w[i] - f.rate * update_moments(m + i, v + i, sign * g[i], f);
    }
    *row->step += 1;
    return count == (row->mask || row->index ? row->k : 0);
}

int64_t adamw(const AdamW *rows, int64_t first, int64_t last, const Hyper *hyper) {
    int64_t wrong = -1;
    for (int64_t r = first; r < last; r++)
        if (rows[r].step && !adamw_row(rows + r, hyper) && wrong < 0) wrong = r;
    return wrong;
}
