// A bucket's message: compopt/_ops.py, Ops.pack. Reads each gradient once, finite or not, and what is sent of it.

#include "common.h"

enum { AHEAD = 32 };  // positions: what is added is not in the cache yet

typedef struct {
    int64_t n;
    const float *g, *add;
    const int32_t *index;  // what is sent, as positions or
    const uint8_t *mask;   // as bits; neither: all
    int64_t k;
    float *out, *mark;
} Pack;

// 0 where the squares of g have a finite sum, else NaN.
static float not_finite(const float *restrict g, int64_t n) {
    float sum[2 * LANES] = {0}, all = 0;
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int l = 0; l < 2 * LANES; l++) sum[l] += g[i + l] * g[i + l];
    for (; i < n; i++) sum[0] += g[i] * g[i];
    for (int l = 0; l < 2 * LANES; l++) all += sum[l];
    return all;
}

// x where the mask is on, one after the other; count is how many were before these, k how many there will be in all.
static int64_t selected(const float *restrict x, const uint8_t *restrict mask, int64_t a, int64_t size,
                        float *restrict out, int64_t count, int64_t k) {
    int64_t i = 0;
    for (; i + LANES <= size && count + LANES <= k; i += LANES)
        count += compress(out + count, x + i, sixteen(mask, a + i));
    for (; i < size && count < k; i++)
        if (on(mask, a + i)) out[count++] = x[i];
    return count;
}

// Returns whether all that is to be sent was found.
static int pack_row(const Pack *row, float sign, float scale) {
    const float *const g = row->g, *const add = row->add;
    float sum = 0, x[BLOCK], *const out = row->out;
    int64_t count = 0;
    for (int64_t a = 0; a < row->n; a += BLOCK) {
        const int64_t size = smaller(BLOCK, row->n - a);
        if (g) sum += not_finite(g + a, size);
        if (row->index) {
            for (; count < row->k && within(row->index[count], a, size); count++) {
                const int32_t i = row->index[count];
                if (add && count + AHEAD < row->k) __builtin_prefetch(add + row->index[count + AHEAD]);
                const float own = g ? sign * g[i] : 0;
                out[count] = add ? own + scale * add[i] : own;
            }
            continue;
        }
        float *const to = row->mask ? x : out + a;
        for (int64_t i = 0; i < size; i++) to[i] = g ? sign * g[a + i] : 0;
        if (add)
            for (int64_t i = 0; i < size; i++) to[i] += scale * add[a + i];
        if (row->mask) count = selected(x, row->mask, a, size, out, count, row->k);
    }
    *row->mark = g ? 1 + 0 * sum : 0;
    return count == (row->index || row->mask ? row->k : 0);
}

int64_t pack(const Pack *rows, int64_t first, int64_t last, double sign, double scale) {
    int64_t wrong = -1;
    for (int64_t r = first; r < last; r++)
        if (!pack_row(rows + r, (float)sign, (float)scale) && wrong < 0) wrong = r;
    return wrong;
}
