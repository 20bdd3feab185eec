// TAGC, lines 1 to 3 and 5 (the numbered lines of compopt/tagc/tagc.py, which has the references), for tensors in the order of a mask.

#include "common.h"

void add_squares(const float *g, int64_t n, float *sums);
float sum_of_squares(const float *sums);
int64_t above(const float *x, int64_t n, int64_t base, float t, int32_t *out, int64_t count, int64_t room);
float select_candidates(int64_t k, int64_t count, float t, const int32_t *scratch, int32_t *out);
double largest(const float *x, int64_t n, int64_t k, double guess, int32_t *scratch, int32_t *out);
int64_t room_for(int64_t k);

typedef struct {
    int64_t n, first;  // elements, and the position of the first in the mask
    const float *g;    // this rank's gradient; NULL: 0
    float *e;          // the residual; NULL for a tensor that is not compressed, or does not change
    float *squares;    // the sum of g^2
} Piece;

typedef struct {
    const Piece *pieces;   // in the order of the mask
    int64_t many;          // how many pieces
    int64_t begin, size;   // where the shard begins in the mask, and its bits; the bits of no piece count as 0
    int64_t k, selected;   // how many elements to select, and how many of these are not 0
    double *guess;         // of a threshold for |g + e|, which becomes one for the next step
    int64_t *positions;    // in the mask, ascending, of the selected elements, and
    float *values;         // g + e there
} Shard;

// Writes g + e of a block to x, or leaves e where it is; returns where they are.
static const float *sum_block(const Piece *p, int64_t a, int64_t size, float *restrict x) {
    const float *restrict const g = p->g + a, *restrict const e = p->e + a;
    fetch_ahead(p->e, a);
    if (!p->g) return e;
    for (int64_t i = 0; i < size; i++) x[i] = g[i] + e[i];
    return x;
}

// Appends the candidates among g + e of one piece; returns their new number.
static int64_t sum_piece(const Piece *p, float t, int32_t *scratch, int64_t count, int64_t room) {
    float sums[SUMS] = {0}, x[BLOCK];
    for (int64_t a = 0; a < p->n; a += BLOCK) {
        const int64_t size = smaller(BLOCK, p->n - a);
        if (p->g) fetch_ahead(p->g, a), add_squares(p->g + a, size, sums);
        if (p->e && t > 0) count = above(sum_block(p, a, size, x), size, p->first + a, t, scratch, count, room);
    }
    *p->squares = sum_of_squares(sums);
    return count;
}

// Selects among all sums, which go to x; returns a threshold for the next step.
static double search_sums(Shard *s, int32_t *scratch, int32_t *chosen, float *x) {
    double next = 0;
    memset(x, 0, s->size * sizeof(float));
    for (const Piece *p = s->pieces; p < s->pieces + s->many; p++)
        for (int64_t a = 0; a < p->n; a += BLOCK) {
            const int64_t size = smaller(BLOCK, p->n - a);
            float sums[BLOCK];
            memcpy(x + p->first - s->begin + a, sum_block(p, a, size, sums), size * sizeof(float));
        }
    if (s->k < s->size) next = largest(x, s->size, s->k, 0, scratch, chosen);
    for (int64_t j = 0; j < smaller(s->k, s->size); j++) {
        const int64_t i = s->k < s->size ? chosen[j] : j;
        if (x[i] == 0) continue;  // zeros are not sent
        s->positions[s->selected] = s->begin + i;
        s->values[s->selected++] = x[i];
    }
    return next;
}

// `scratch` is for one thread: two times room_for() the largest k that is smaller than its shard, and that k; `memory` too: the
// size of the largest shard.
int64_t select_sums(Shard *shards, int64_t first, int64_t last, int32_t *scratch, float *memory) {
    for (Shard *s = shards + first; s < shards + last; s++) {
        const int is_part = s->k < s->size;
        const int64_t room = is_part ? room_for(s->k) : 0;
        const float t = is_part ? (float)*s->guess : 0, *const values = (const float *)(scratch + room);
        int32_t *const chosen = scratch + 2 * room;
        int64_t count = 0;
        s->selected = 0;
        for (const Piece *p = s->pieces; p < s->pieces + s->many; p++) count = sum_piece(p, t, scratch, count, room);
        const double next = t > 0 ? select_candidates(s->k, count, t, scratch, chosen) : -1;
        *s->guess = next >= 0 ? next : s->k > 0 ? search_sums(s, scratch, chosen, memory) : 0;
        for (int64_t c = 0; next >= 0 && c < count && s->selected < s->k; c++)
            if (scratch[c] == chosen[s->selected]) {
                s->positions[s->selected] = scratch[c];
                s->values[s->selected++] = values[c];
            }
    }
    return -1;
}

// Writes the positions of a mask's set bits, ascending, and for each the value that is at this one of some ascending positions, or
// 0; to nowhere, it counts. Returns how many.
int64_t read_union(const uint8_t *mask, int64_t bytes, const int64_t *some, const float *values, int64_t many, int64_t *positions,
                   float *out) {
    int64_t count = 0, j = 0;
    if (!positions) {
        for (int64_t i = 0; i < bytes; i += 8) {
            uint64_t word = 0;
            memcpy(&word, mask + i, smaller(8, bytes - i));
            count += __builtin_popcountll(word);
        }
        return count;
    }
    EACH_BIT(mask, bytes, i, {
        positions[count] = i;
        out[count++] = j < many && some[j] == i ? values[j++] : 0;
    })
    return count;
}

// Sets the bits at these positions.
int64_t set_bits(const int64_t *positions, int64_t many, uint8_t *bits) {
    for (int64_t j = 0; j < many; j++) bits[positions[j] / 8] |= (uint8_t)(1 << positions[j] % 8);
    return -1;
}
