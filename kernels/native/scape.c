// SCAPE, lines 10, 11 and 15 to 21 (the numbered lines of compopt/scape/scape.py), and AdamS. Reference: scape_ of
// tests/support/oracles/kernels.py and adams_ of compopt/_ops/operations.py.

#include "common.h"

int64_t above(const float *x, int64_t n, int64_t base, float t, int32_t *out, int64_t count, int64_t room);
float select_candidates(int64_t k, int64_t count, float t, const int32_t *scratch, int32_t *out);
double largest(const float *x, int64_t n, int64_t k, double guess, int32_t *scratch, int32_t *out);
int64_t room_for(int64_t k);

typedef struct {
    int64_t n;
    float *w, *e;            // e: NULL for a tensor that is not compressed
    const float *g;          // this rank's gradient
    const int32_t *held;     // positions of the old momentum; NULL: everywhere
    int64_t holding;
    const float *old;        // the old momentum, at `held`
    const int32_t *index;    // positions that were exchanged; NULL: everywhere
    int64_t k;
    const float *mean;       // the averaged gradient, at `index`
    float *m, *step;         // the new momentum, at `index`; steps before this one, or NULL: this tensor takes no step
    double *guess;           // of the threshold for the largest |x|
    int64_t start, stop;     // the slice in which this rank selects,
    int64_t wanted;          // how many elements,
    int32_t *chosen;         // and memory for their positions, counted from `start`
} Scape;

typedef struct {
    double lr, beta1, beta2, eps, decay, clip, alpha;  // alpha: factor on g in x
} Hyper;

typedef struct {
    float beta1, old, new, rate, eps, shrink;
} Factors;

static Factors factors(const Hyper *h, double step) {
    const double first = 1 - pow(h->beta1, step), second = 1 - pow(h->beta2, step);
    const double old = h->beta2 / second, new = (1 - h->beta2) / second * h->clip * h->clip;
    return (Factors){h->beta1, old, new, h->lr / first, h->eps, 1 - h->lr * h->decay};
}

// Lines 18 to 21 for contiguous elements; w has decayed already.
static void adams_run(Factors f, float *restrict w, const float *restrict old, const float *restrict mean,
                      float *restrict m, int64_t n) {
    const float fresh = 1 - f.beta1;
    for (int64_t i = 0; i < n; i++) {
        const float root = sqrtf(f.old * old[i] * old[i] + f.new * mean[i] * mean[i]) + f.eps;
        const float now = old[i] + fresh * (mean[i] - old[i]);
        w[i] -= f.rate * now / root;
        m[i] = now;
    }
}

enum { ENOUGH = 256 };  // elements: enough for vector loops, and still in the cache

// Weights and old momentum at `count` positions from `done` on.
typedef struct {
    float weight[ENOUGH + BLOCK], before[ENOUGH + BLOCK];
    int64_t done, count;
} Gathered;

// Lines 18 to 21 for the gathered elements; scatters the weights.
static void put_back(const Scape *row, Factors f, Gathered *some) {
    adams_run(f, some->weight, some->before, row->mean + some->done, row->m + some->done, some->count);
    for (int64_t j = 0; j < some->count; j++) row->w[row->index[some->done + j]] = some->weight[j];
    some->done += some->count;
    some->count = 0;
}

// Line 10 and the weight decay for one block: e becomes x. `dense`: the old momentum.
static void moment(float *restrict e, const float *restrict g, const float *restrict dense, float *restrict w,
                   int64_t size, float alpha, Factors f) {
    if (g)
        for (int64_t i = 0; i < size; i++) e[i] = (e[i] + alpha * g[i]) + f.beta1 * dense[i];
    else
        for (int64_t i = 0; i < size; i++) e[i] = e[i] + f.beta1 * dense[i];
    for (int64_t i = 0; i < size; i++) w[i] *= f.shrink;
}

// The guess failed: selects among all elements. The exchanged elements are restored in x for the search.
static double search_all(const Scape *row, const float *sent, int32_t *scratch) {
    for (int64_t j = 0; row->index && j < row->k; j++) row->e[row->index[j]] = sent[j];
    const double next = largest(row->e + row->start, row->stop - row->start, row->wanted, 0, scratch, row->chosen);
    for (int64_t j = 0; row->index && j < row->k; j++) row->e[row->index[j]] = 0;
    return next;
}

// Writes x at `index` to `sent`. Returns whether all positions are within the tensor.
static int scape_row(const Scape *row, const Hyper *hyper, int32_t *scratch, float *sent) {
    const Factors f = factors(hyper, *row->step += 1);
    const float t = row->guess ? (float)*row->guess : 0;
    const int64_t room = row->chosen ? room_for(row->wanted) : 0;
    const int32_t *const held = row->held, *const index = row->index;
    float *const e = row->e, *const w = row->w, dense[BLOCK] = {0};
    int64_t h = 0, j = 0, count = 0;
    Gathered some;
    some.done = some.count = 0;
    for (int64_t a = 0; a < row->n; a += BLOCK) {
        const int64_t b = smaller(a + BLOCK, row->n), size = b - a, held_before = h;
        const float *const old = held ? dense : row->old + a;
        for (; held && h < row->holding && within(held[h], a, size); h++) dense[held[h] - a] = row->old[h];
        fetch_ahead(w, a);
        if (e) {
            fetch_ahead(e, a);
            if (row->g) fetch_ahead(row->g, a);
            moment(e + a, row->g ? row->g + a : NULL, old, w + a, size, hyper->alpha, f);
            const int64_t start = a > row->start ? a : row->start, stop = smaller(b, row->stop);
            if (t > 0 && start < stop)  // line 15
                count = above(e + start, stop - start, start - row->start, t, scratch, count, room);
        } else {
            for (int64_t i = a; i < b; i++) w[i] *= f.shrink;
        }
        if (!index) {
            float before[BLOCK];
            memcpy(before, old, size * sizeof(float));  // the new one may be written there
            adams_run(f, w + a, before, row->mean + a, row->m + a, size);
        }
        for (; index && j < row->k && within(index[j], a, size); j++) {
            const int32_t i = index[j];
            some.before[some.count] = old[i - a];
            some.weight[some.count++] = w[i];
            sent[j] = e[i];
            e[i] = 0;  // line 11
        }
        if (some.count >= ENOUGH) put_back(row, f, &some);
        for (int64_t i = held_before; i < h; i++) dense[held[i] - a] = 0;
    }
    put_back(row, f, &some);
    if ((held && h < row->holding) || (index && j < row->k)) return 0;
    if (row->chosen) {
        const float next = t > 0 ? select_candidates(row->wanted, count, t, scratch, row->chosen) : -1;
        *row->guess = next >= 0 ? next : search_all(row, sent, scratch);
    }
    if (!index && e) memset(e, 0, row->n * sizeof(float));  // line 11
    return 1;
}

// `scratch` and `sent` are for one thread: two times room_for() the largest `wanted`, and the largest k.
int64_t scape(const Scape *rows, int64_t first, int64_t last, const Hyper *hyper, int32_t *scratch, float *sent) {
    int64_t wrong = -1;
    for (int64_t r = first; r < last; r++)
        if (rows[r].step && !scape_row(rows + r, hyper, scratch, sent) && wrong < 0) wrong = r;
    return wrong;
}
