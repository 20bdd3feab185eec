// Radius, lines 10, 15, 16 and 21 to 25: compopt/_math.py, radius_ and adamw_; radius.py has the numbered lines.

#include "common.h"

typedef struct {
    int64_t n;
    float *w, *m, *v, *step;  // the number of this step, still to be counted up; NULL: no step of this tensor
    const float *mean;        // the averaged gradient at `mask`
    const uint8_t *mask;      // NULL: everywhere
    int64_t k;
    float *residual;          // NULL for a tensor that is not compressed, or in a dense step
    const float *g;           // this rank's gradient
    float *score;             // the sizes of the updates, where somebody chooses by them
} AdamW;

typedef struct {
    double lr, beta1, beta2, eps, decay, sign;
} Hyper;

// A block of the averaged gradient as a dense vector, 0 off the mask; count is how many values came before.
static int64_t expand(const AdamW *row, int64_t a, int64_t size, int64_t count, float *restrict out) {
    int64_t i = 0;
#if defined(__AVX512F__) && !defined(PORTABLE)
    for (; i + LANES <= size && count + LANES <= row->k; i += LANES) {
        const __mmask16 some = sixteen(row->mask, a + i);
        _mm512_storeu_ps(out + i, _mm512_maskz_expand_ps(some, _mm512_loadu_ps(row->mean + count)));
        count += __builtin_popcount(some);
    }
#endif
    for (; i < size; i++) out[i] = on(row->mask, a + i) ? row->mean[count++] : 0;
    return count;
}

// Line 16 for one block.
static void hold_back(float *restrict residual, const float *restrict g, const uint8_t *restrict mask, int64_t a,
                      int64_t size) {
    int64_t i = 0;
#if defined(__AVX512F__) && !defined(PORTABLE)
    for (; i + LANES <= size; i += LANES) {
        __m512 kept = _mm512_loadu_ps(residual + i);
        if (g) kept = _mm512_add_ps(kept, _mm512_loadu_ps(g + i));
        _mm512_storeu_ps(residual + i, _mm512_maskz_mov_ps((__mmask16)~sixteen(mask, a + i), kept));
    }
#endif
    for (; i < size; i++) residual[i] = on(mask, a + i) ? 0 : g ? residual[i] + g[i] : residual[i];
}

static void adamw_row(const AdamW *row, const Hyper *h) {
    const double step = *row->step += 1, first = 1 - pow(h->beta1, step);
    const float beta2 = h->beta2, new1 = 1 - h->beta1, new2 = 1 - h->beta2, eps = h->eps, sign = h->sign;
    const float by_first = 1 / first, by_root = 1 / sqrt(1 - pow(h->beta2, step));
    const float decay = h->decay, shrink = 1 - h->lr * h->decay, rate = h->lr / first;
    float mean[BLOCK], ratio[BLOCK];
    int64_t count = 0;
    for (int64_t a = 0; a < row->n; a += BLOCK) {
        const int64_t size = smaller(BLOCK, row->n - a);
        if (row->mask)
            count = expand(row, a, size, count, mean);
        else
            memcpy(mean, row->mean + a, size * sizeof(float));
        if (row->residual && row->mask)
            hold_back(row->residual + a, row->g ? row->g + a : NULL, row->mask, a, size);
        else if (row->residual)
            memset(row->residual + a, 0, size * sizeof(float));
        float *restrict const w = row->w + a, *restrict const m = row->m + a, *restrict const v = row->v + a;
        for (int64_t i = 0; i < size; i++) {
            const float g = sign * mean[i];
            m[i] += new1 * (g - m[i]);
            v[i] = beta2 * v[i] + new2 * g * g;
            ratio[i] = m[i] / (sqrtf(v[i]) * by_root + eps);
        }
        for (int64_t i = 0; row->score && i < size; i++) row->score[a + i] = fabsf(ratio[i] * by_first + decay * w[i]);
        for (int64_t i = 0; i < size; i++) w[i] = shrink * w[i] - rate * ratio[i];
    }
}

void adamw(const AdamW *rows, int64_t first, int64_t last, const Hyper *hyper) {
    for (int64_t r = first; r < last; r++)
        if (rows[r].step) adamw_row(rows + r, hyper);
}
