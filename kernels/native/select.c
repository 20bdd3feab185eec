// Positions of exactly the k elements of largest magnitude, the first of equal ones. Reference: top_k of tests/support/oracles/kernels.py.

#include "common.h"

// Returns the capacity of `scratch` in candidates: that many positions, then that many values.
int64_t room_for(int64_t k) { return 4 * k + 4 * BLOCK; }

// Returns how many candidates a threshold should let through, so that k remain after a step has changed all values; relatively
// more for a small k.
static int64_t ahead_of(int64_t k) { return k + k / 2 + (int64_t)(16 * sqrt((double)k)); }

// Notes for each sixteen of a block where the magnitude exceeds `limit`.
static void note(const float *restrict x, int32_t limit, uint16_t *restrict hits) {
    for (int64_t v = 0; v < BLOCK / LANES; v++) hits[v] = (uint16_t)beyond(x + v * LANES, limit);
}

// Appends the positions, counted from -base, and the values of a block where `hits` has bits.
static int64_t collect(const float *restrict x, const uint16_t *restrict hits, int64_t base, int32_t *restrict scratch,
                       float *restrict values, int64_t count) {
    Bits some = 0;
    for (int v = 0; v < BLOCK / LANES; v++) some |= (Bits)(hits[v] != 0) << v;
    for (; some; some &= some - 1) {
        const int64_t v = __builtin_ctz(some);
        places(scratch + count, (int32_t)(base + v * LANES), hits[v]);
        count += compress(values + count, x + v * LANES, hits[v]);
    }
    return count;
}

// Appends the candidates, |x| > t, and their positions plus `base` to `scratch`, after `count` of them. Returns their number, or
// `room` if not all fit.
int64_t above(const float *restrict x, int64_t n, int64_t base, float t, int32_t *restrict scratch, int64_t count,
              int64_t room) {
    float *restrict const values = (float *)(scratch + room);
    const int32_t limit = (int32_t)magnitude(t);
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t size = smaller(BLOCK, n - i);
        if (count + BLOCK > room) return room;
        if (size == BLOCK) {
            uint16_t hits[BLOCK / LANES];
            note(x + i, limit, hits);
            count = collect(x + i, hits, base + i, scratch, values, count);
            continue;
        }
        for (int64_t j = i; j < i + size; j++) {  // no branch: it would be mispredicted
            scratch[count] = (int32_t)(base + j);
            values[count] = x[j];
            count += (int32_t)magnitude(x[j]) > limit;
        }
    }
    return count;
}

// Returns the bin of the k-th largest among 256 counts; adds those in higher bins to *larger.
static int bin_of(const int32_t *counts, int64_t k, int64_t *larger) {
    int bin = 255;
    while (bin > 0 && *larger + counts[bin] < k) *larger += counts[bin--];
    return bin;
}

// Returns the k-th largest magnitude, 1 <= k <= n, found eight bits at a time; *larger: how many are larger.
static uint32_t kth(const float *restrict x, int64_t n, int64_t k, int64_t *larger) {
    static const int shifts[] = {23, 15, 7, 0};
    uint32_t prefix = 0, known = 0;  // the bits so far, and a mask of them
    *larger = 0;
    for (int level = 0; level < 4; level++) {
        int32_t counts[256] = {0};
        const uint32_t mask = level < 3 ? 255 : 127;
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = magnitude(x[i]);
            if ((bits & known) == prefix) counts[bits >> shifts[level] & mask]++;
        }
        prefix |= (uint32_t)bin_of(counts, k, larger) << shifts[level];
        known |= mask << shifts[level];
    }
    return prefix;
}

enum { BIN = 1 << 15, NEAR = 16 };  // the width of a bin, 0.4 to 0.8 % of a value; bins from which a slope is estimated

// Counts these magnitudes, all at least `least`, by bins above it; the last bin has no upper end.
static void count_above(uint32_t least, const float *restrict x, int64_t n, int32_t *restrict counts) {
    memset(counts, 0, 256 * sizeof *counts);
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bin = (magnitude(x[i]) - least) / BIN;
        counts[bin < 255 ? bin : 255]++;
    }
}

// Returns the magnitude that about `wanted` exceed, by these counts; below them the lowest bins are extrapolated.
static uint32_t level_of(uint32_t least, const int32_t *counts, int64_t n, int64_t wanted) {
    int64_t larger = 0, near = 0;
    if (n >= wanted) return least + (uint32_t)bin_of(counts, wanted, &larger) * BIN;
    for (int bin = 0; bin < NEAR; bin++) near += counts[bin];
    const int64_t bins = smaller((wanted - n) * NEAR / (near + 1) + 1, 64);
    return least > bins * BIN ? least - (uint32_t)bins * BIN : 0;
}

// Does as kth() by such counts, among the few values of one bin, which are copied to `few`, of capacity k.
static uint32_t kth_by(uint32_t least, const int32_t *counts, const float *restrict x, int64_t n, int64_t k,
                       int64_t *larger, float *restrict few) {
    *larger = 0;
    const int bin = bin_of(counts, k, larger);
    if (bin == 255 || counts[bin] + LANES > k) return kth(x, n, k, larger);
    const uint32_t low = least + (uint32_t)bin * BIN;
    int64_t size = 0, above_these = 0, i = 0;
    for (; i + LANES <= n && size + LANES <= k; i += LANES) {
        const Bits hit = beyond(x + i, (int32_t)(low - 1)) & ~beyond(x + i, (int32_t)(low + BIN - 1));
        size += compress(few + size, x + i, hit);
    }
    for (; i < n; i++)
        if (magnitude(x[i]) - low < BIN && size < k) few[size++] = x[i];
    const uint32_t least_of_k = kth(few, size, k - *larger, &above_these);
    *larger += above_these;
    return least_of_k;
}

// Writes the positions, ascending, of the k elements with magnitudes of `least` and more, of which `more` are larger. `of`: the
// position of x[i]; NULL: i.
static void write_selected(const float *restrict x, const int32_t *restrict of, int64_t n, int64_t k, uint32_t least, int64_t more,
                 int32_t *restrict out) {
    int64_t count = 0, equal = k - more, i = 0;  // how many of the equal ones, from the first
    for (; i + LANES <= n && count + LANES <= k; i += LANES) {
        const Bits more_here = beyond(x + i, (int32_t)least);
        Bits hit = beyond(x + i, (int32_t)(least - 1));
        for (Bits same = hit & ~more_here; same; same &= same - 1)
            if (equal-- <= 0) hit &= ~(same & -same);
        count += of ? compress(out + count, of + i, hit) : places(out + count, (int32_t)i, hit);
    }
    for (; i < n && count < k; i++) {
        const uint32_t bits = magnitude(x[i]);
        if (bits > least || (bits == least && equal-- > 0)) out[count++] = of ? of[i] : (int32_t)i;
    }
}

static float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Writes the k largest of the `count` candidates in `scratch`, all above t, to `out`. Returns a threshold for the next step; -1 if
// there are too few candidates, or were too many.
float select_candidates(int64_t k, int64_t count, float t, const int32_t *scratch, int32_t *out) {
    const float *const values = (const float *)(scratch + room_for(k));
    int32_t counts[256];
    int64_t more;
    if (count < k || count + BLOCK > room_for(k)) return -1;
    if (k == 0) return 0;
    count_above(magnitude(t), values, count, counts);
    const uint32_t least = kth_by(magnitude(t), counts, values, count, k, &more, (float *)out);
    write_selected(values, scratch, count, k, least, more, out);
    return as_float(level_of(magnitude(t), counts, count, ahead_of(k)));
}

// Returns a threshold, from a sample.
static float sampled(const float *x, int64_t n, int64_t k) {
    enum { SAMPLE = 4096 };
    float sample[SAMPLE];
    int64_t more;
    const int64_t every = n / SAMPLE, share = ahead_of(k) * SAMPLE / n + 4;
    for (uint32_t i = 0; i < SAMPLE; i++) sample[i] = x[i * every + (i * 2654435761u >> 8) % every];  // not all in one column
    return as_float(kth(sample, SAMPLE, smaller(share, SAMPLE), &more));
}

// Writes the positions of the k largest |x|, given a guess of the threshold (0: none). Returns a guess for the next step.
double largest(const float *x, int64_t n, int64_t k, double guess, int32_t *scratch, int32_t *out) {
    int64_t more;
    if (k == 0) return 0;
    for (int look = 0; look < 2; look++) {
        const float t = look == 0 ? (float)guess : n > 1 << 14 ? sampled(x, n, k) : 0;
        const float next = t > 0 ? select_candidates(k, above(x, n, 0, t, scratch, 0, room_for(k)), t, scratch, out) : -1;
        if (next >= 0) return next;
    }
    const uint32_t least = kth(x, n, k, &more);
    write_selected(x, NULL, n, k, least, more, out);
    return as_float(least);
}
