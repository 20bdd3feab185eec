// Masks on the wire: compopt/_masks.py has the format, _code() and decode() its reference.

#include "common.h"

typedef struct {
    const int32_t *chosen;  // ascending, counted from the first element of the piece
    int64_t k, at;          // how many; where the piece begins among the bits of its range
} Chosen;

typedef struct {
    int32_t *found;           // ascending, counted from the first element of the tensor
    int64_t k, at, start;     // start: where the piece begins in the tensor
} Found;

typedef struct {
    int64_t low, upper, row;  // low bits kept apart; bits of the runs that tell the high ones, and of a row of low ones
} Code;

static void set(uint8_t *bits, int64_t i) { bits[i / 8] |= (uint8_t)(1 << i % 8); }

// A rank's message, 0 before: high bits of positions in unary, then low bits, a row each; without a code, bits.
void encode(const Chosen *pieces, int64_t many, const Code *code, uint8_t *message) {
    const int64_t low = code ? code->low : 0, bytes = code ? code->row / 8 : 0;
    uint8_t *const rows = message + (code ? code->upper / 8 : 0);
    int64_t n = 0;
    for (int64_t p = 0; p < many; p++)
        for (int64_t j = 0; j < pieces[p].k; j++, n++) {
            const int64_t place = pieces[p].at + pieces[p].chosen[j];
            set(message, code ? (place >> low) + n : place);
            for (int64_t b = 0; b < low; b++) rows[b * bytes + n / 8] |= (uint8_t)((place >> b & 1) << n % 8);
        }
}

// Runs the body for the position i of every bit that is set.
#define EACH_BIT(bits, bytes, i, body)                                   \
    for (int64_t byte_ = 0; byte_ < (bytes); byte_ += 8) {               \
        uint64_t word_ = 0;                                              \
        memcpy(&word_, (bits) + byte_, smaller(8, (bytes) - byte_));     \
        for (; word_; word_ &= word_ - 1) {                              \
            const int64_t i = 8 * byte_ + __builtin_ctzll(word_);        \
            body                                                         \
        }                                                                \
    }

// Positions of the bits of a mask, where there is an `out`; returns how many.
int64_t positions(const uint8_t *mask, int64_t bytes, int32_t *out) {
    int64_t n = 0;
    if (out) {
        EACH_BIT(mask, bytes, i, out[n++] = (int32_t)i;)
    } else {
        for (int64_t i = 0; i < bytes; i++) n += __builtin_popcount(mask[i]);
    }
    return n;
}

// A rank's message of `bytes` of mask as positions in each tensor, and as `bits`, which are 0 before.
void decode(const uint8_t *message, int64_t bytes, const Code *code, const Found *pieces, int64_t many, uint8_t *bits) {
    const int64_t low = code ? code->low : 0, row = code ? code->row / 8 : 0;
    const uint8_t *const rows = message + (code ? code->upper / 8 : 0);
    int64_t n = 0, p = -1, left = 0;
    EACH_BIT(message, code ? code->upper / 8 : bytes, i, {
        int64_t place = code ? (i - n) << low : i;
        for (int64_t b = 0; b < low; b++) place |= (int64_t)(rows[b * row + n / 8] >> n % 8 & 1) << b;
        while (left == 0 && ++p < many) left = pieces[p].k;
        if (p == many || place >= 8 * bytes) return;  // not what was agreed: nothing is written beyond
        pieces[p].found[pieces[p].k - left--] = (int32_t)(place - pieces[p].at + pieces[p].start);
        set(bits, place);
        n++;
    })
}
