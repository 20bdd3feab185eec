// A bucket's payload, and whether gradients are finite; each gradient is read once. Reference: encode of compopt/_ops/operations.py.

#include "common.h"

enum { AHEAD = 32 };  // positions ahead: residuals there are not in the cache yet

typedef struct {
    int64_t n;
    const float *g, *add;
    const int32_t *index;  // the elements to send, as positions or
    const uint8_t *mask;   // as bits; neither: all
    int64_t k;
    float *out, *flag;
} Pack;

// Adds the squares of g to `sums`.
void add_squares(const float *restrict g, int64_t n, float *restrict sums) {
    float sum[SUMS];
    int64_t i = 0;
    memcpy(sum, sums, sizeof sum);
    for (; i + SUMS <= n; i += SUMS)
        for (int l = 0; l < SUMS; l++) sum[l] += g[i + l] * g[i + l];
    for (; i < n; i++) sum[0] += g[i] * g[i];
    memcpy(sums, sum, sizeof sum);
}

float sum_of_squares(const float *sums) {
    float all = 0;
    for (int l = 0; l < SUMS; l++) all += sums[l];
    return all;
}

// Appends x where the mask is set to `out`. `count` were there before, k there will be; returns the new count.
static int64_t selected(const float *restrict x, const uint8_t *restrict mask, int64_t a, int64_t size,
                        float *restrict out, int64_t count, int64_t k) {
    int64_t i = 0;
    for (; i + LANES <= size && count + LANES <= k; i += LANES)
        count += compress(out + count, x + i, sixteen(mask, a + i));
    for (; i < size && count < k; i++)
        if (on(mask, a + i)) out[count++] = x[i];
    return count;
}

// Returns whether all k elements were found.
static int pack_row(const Pack *row, float sign, float scale) {
    const float *const g = row->g, *const add = row->add;
    const int as_they_are = row->mask && g && !add && sign == 1;
    float sums[SUMS] = {0}, x[BLOCK], *const out = row->out;
    int64_t count = 0;
    for (int64_t a = 0; a < row->n; a += BLOCK) {
        const int64_t size = smaller(BLOCK, row->n - a);
        if (g) {
            fetch_ahead(g, a);
            add_squares(g + a, size, sums);
        }
        if (add && !row->index) fetch_ahead(add, a);
        if (row->index) {
            for (; count < row->k && within(row->index[count], a, size); count++) {
                const int32_t i = row->index[count];
                if (add && count + AHEAD < row->k) __builtin_prefetch(add + row->index[count + AHEAD]);
                const float value = g ? sign * g[i] : 0;
                out[count] = add ? value + scale * add[i] : value;
            }
            continue;
        }
        if (as_they_are) {
            count = selected(g + a, row->mask, a, size, out, count, row->k);
            continue;
        }
        float *const to = row->mask ? x : out + a;
        for (int64_t i = 0; i < size; i++) to[i] = g ? sign * g[a + i] : 0;
        if (add)
            for (int64_t i = 0; i < size; i++) to[i] += scale * add[a + i];
        if (row->mask) count = selected(x, row->mask, a, size, out, count, row->k);
    }
    *row->flag = g ? 1 + 0 * sum_of_squares(sums) : 0;  // 1 if all terms are finite, else NaN
    return count == (row->index || row->mask ? row->k : 0);
}

int64_t pack(const Pack *rows, int64_t first, int64_t last, double sign, double scale) {
    int64_t wrong = -1;
    for (int64_t r = first; r < last; r++)
        if (!pack_row(rows + r, (float)sign, (float)scale) && wrong < 0) wrong = r;
    return wrong;
}
