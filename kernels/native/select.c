// The k elements of largest magnitude, exactly k: compopt/_math.py, top_k, but as positions. Of equal ones the first.

#include "common.h"

static const float AIM = 0.93f;  // of the threshold that would do: what drifts until the next step still finds enough

// How many candidates there is room for in `scratch`: positions, and behind them as many values.
int64_t room_for(int64_t k) { return 4 * k + 1024; }

// Candidates: |x| > t and their positions, from `base` on, into `scratch`, while there is room for 16 more; `count` is how
// many came before. Returns how many there are, stored or not.
int64_t above(const float *restrict x, int64_t n, int64_t base, float t, int32_t *restrict scratch, int64_t count,
              int64_t room) {
    float *restrict const values = (float *)(scratch + room);
    int64_t i = 0;
#if defined(__AVX512F__) && !defined(PORTABLE)
    const __m512 limit = _mm512_set1_ps(t);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + LANES <= n; i += LANES) {
        const __m512 some = _mm512_loadu_ps(x + i);
        const __mmask16 hit = _mm512_cmp_ps_mask(_mm512_abs_ps(some), limit, _CMP_GT_OQ);
        if (!hit) continue;
        if (count + LANES <= room) {  // compressed in a register: straight to memory is many times slower on some CPUs
            const __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)(base + i)));
            _mm512_storeu_si512(scratch + count, _mm512_maskz_compress_epi32(hit, place));
            _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(hit, some));
        }
        count += __builtin_popcount(hit);
    }
#endif
    for (; i < n; i++)
        if (fabsf(x[i]) > t) {
            if (count + LANES <= room) {
                scratch[count] = (int32_t)(base + i);
                values[count] = x[i];
            }
            count++;
        }
    return count;
}

// Where among 256 counts the k-th from above lies; *larger grows by those in higher bins.
static int bin_of(const int32_t *counts, int64_t k, int64_t *larger) {
    int bin = 255;
    while (bin > 0 && *larger + counts[bin] < k) *larger += counts[bin--];
    return bin;
}

// The k-th largest magnitude, 1 <= k <= n, eight bits at a time; *larger becomes the number of those that are larger.
static uint32_t kth(const float *restrict x, int64_t n, int64_t k, int64_t *larger) {
    static const int shifts[] = {23, 15, 7, 0};
    uint32_t found = 0, known = 0;  // the bits found so far, and which they are
    *larger = 0;
    for (int level = 0; level < 4; level++) {
        int32_t counts[256] = {0};
        const uint32_t mask = level < 3 ? 255 : 127;
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = magnitude(x[i]);
            if ((bits & known) == found) counts[bits >> shifts[level] & mask]++;
        }
        found |= (uint32_t)bin_of(counts, k, larger) << shifts[level];
        known |= mask << shifts[level];
    }
    return found;
}

// The same where all magnitudes are known to be at least `least`: most of them lie just above it, so one histogram of the
// factor of 2 above leaves a few among which to look. They go to `few`, which has room for k.
static uint32_t kth_from(uint32_t least, const float *restrict x, int64_t n, int64_t k, int64_t *larger,
                         float *restrict few) {
    int32_t counts[256] = {0};
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bin = (magnitude(x[i]) - least) >> 15;
        counts[bin < 255 ? bin : 255]++;
    }
    *larger = 0;
    const int bin = bin_of(counts, k, larger);
    if (bin == 255 || counts[bin] + LANES > k) return kth(x, n, k, larger);
    const uint32_t low = least + ((uint32_t)bin << 15), width = 1u << 15;
    int64_t size = 0, above_these = 0, i = 0;
#if defined(__AVX512F__) && !defined(PORTABLE)
    const __m512i all = _mm512_set1_epi32(0x7fffffff), from = _mm512_set1_epi32((int32_t)low);
    for (; i + LANES <= n && size + LANES <= k; i += LANES) {
        const __m512 some = _mm512_loadu_ps(x + i);
        const __m512i over = _mm512_sub_epi32(_mm512_and_si512(_mm512_castps_si512(some), all), from);
        const __mmask16 hit = _mm512_cmplt_epu32_mask(over, _mm512_set1_epi32((int32_t)width));
        _mm512_storeu_ps(few + size, _mm512_maskz_compress_ps(hit, some));
        size += __builtin_popcount(hit);
    }
#endif
    for (; i < n; i++)
        if (magnitude(x[i]) - low < width) few[size++] = x[i];
    const uint32_t found = kth(few, size, k - *larger, &above_these);
    *larger += above_these;
    return found;
}

// Positions, ascending, of the k elements with magnitudes of `least` and more, of which `more` are larger. `of` says where
// x[i] is, NULL: at i.
static void take(const float *restrict x, const int32_t *restrict of, int64_t n, int64_t k, uint32_t least, int64_t more,
                 int32_t *restrict out) {
    int64_t count = 0, equal = k - more, i = 0;  // so many of the equal ones, the first
#if defined(__AVX512F__) && !defined(PORTABLE)
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i limit = _mm512_set1_epi32((int32_t)least), all = _mm512_set1_epi32(0x7fffffff);
    for (; i + LANES <= n && count + LANES <= k; i += LANES) {
        const __m512i bits = _mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(x + i)), all);
        __mmask16 hit = _mm512_cmpge_epi32_mask(bits, limit);
        for (unsigned same = hit & _mm512_cmpeq_epi32_mask(bits, limit); same; same &= same - 1)
            if (equal-- <= 0) hit &= (__mmask16)~(same & -same);
        const __m512i here = of ? _mm512_loadu_si512(of + i) : _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)i));
        _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(hit, here));
        count += __builtin_popcount(hit);
    }
#endif
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

// Of the `count` candidates in `scratch`, all above t, the k largest, into `out`. Returns where to look the next time; -1 where the
// candidates are too few, or there were too many.
float settle(int64_t k, int64_t count, float t, const int32_t *scratch, int32_t *out) {
    const int64_t room = room_for(k);
    const float *const values = (const float *)(scratch + room);
    int64_t more;
    if (count < k || count + LANES > room) return -1;
    if (k == 0) return 0;
    const uint32_t least = kth_from(magnitude(t), values, count, k, &more, (float *)out);
    take(values, scratch, count, k, least, more, out);
    return AIM * as_float(least);
}

// Positions of the k largest |x|, given where to look (0: nowhere, a sample tells). Returns where to look the next time.
double largest(const float *x, int64_t n, int64_t k, double guess, int32_t *scratch, int32_t *out) {
    enum { SAMPLE = 4096 };
    int64_t more;
    float t = (float)guess;
    if (k == 0) return 0;
    if (t == 0 && n > 4 * SAMPLE) {
        float sample[SAMPLE];
        const int64_t share = k * SAMPLE / n;
        for (int64_t i = 0; i < SAMPLE; i++) sample[i] = x[i * (n / SAMPLE)];
        t = AIM * as_float(kth(sample, SAMPLE, share < 1 ? 1 : share, &more));
    }
    if (t > 0) {
        const float next = settle(k, above(x, n, 0, t, scratch, 0, room_for(k)), t, scratch, out);
        if (next >= 0) return next;
    }
    const uint32_t least = kth(x, n, k, &more);
    take(x, NULL, n, k, least, more, out);
    return AIM * as_float(least);
}
