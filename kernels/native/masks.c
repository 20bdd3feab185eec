// Encoded masks (Elias-Fano). Reference: encode_mask and decode_positions of compopt/_state/masks.py.

#include "common.h"

typedef struct {
    const int32_t *chosen;  // ascending, counted from the first element of the slice
    int64_t k, at;          // how many; where the slice begins among the bits of its range
} Chosen;

typedef struct {
    int32_t *positions;         // ascending, counted from the first element of the tensor
    int64_t k, at, start, stop;  // the slice: how many, where among the bits of its range, which elements of the tensor
} Decoded;

typedef struct {
    int64_t low, upper, row;  // the number of low bits; bits of the run of high bits, and of a row of low bits
} Code;

static void set(uint8_t *bits, int64_t i) { bits[i / 8] |= (uint8_t)(1 << i % 8); }

// Encodes a rank's message of `length` zero bytes: high bits of positions in unary, then a row for each low bit; without a
// code, bits. Returns the number of the first slice with a position outside the message, -1 if none.
int64_t encode(const Chosen *pieces, int64_t many, const Code *code, uint8_t *message, int64_t length) {
    const int64_t low = code ? code->low : 0, bytes = code ? code->row / 8 : 0;
    const int64_t room = code ? code->upper : 8 * length;
    uint8_t *const rows = message + (code ? code->upper / 8 : 0);
    int64_t n = 0;
    for (int64_t p = 0; p < many; p++)
        for (int64_t j = 0; j < pieces[p].k; j++, n++) {
            const int64_t place = pieces[p].at + pieces[p].chosen[j], bit = code ? (place >> low) + n : place;
            if (!within(bit, 0, room) || (code && n >= code->row)) return p;
            set(message, bit);
            for (int64_t b = 0; b < low; b++) rows[b * bytes + n / 8] |= (uint8_t)((place >> b & 1) << n % 8);
        }
    return -1;
}

// Decodes a rank's message for `bytes` of mask to positions in each tensor, and to `bits`, which are 0 before. A message of
// another rank is not trusted: returns how many positions are in their slices and in order, and stops at the first that is not.
int64_t decode(const uint8_t *message, int64_t bytes, const Code *code, const Decoded *pieces, int64_t many,
               uint8_t *bits) {
    const int64_t low = code ? code->low : 0, row = code ? code->row / 8 : 0;
    const uint8_t *const rows = message + (code ? code->upper / 8 : 0);
    int64_t n = 0, p = 0, count = 0;
    EACH_BIT(message, code ? code->upper / 8 : bytes, i, {
        while (p < many && count == pieces[p].k) p++, count = 0;
        if (p == many) return -1;  // more than was agreed
        int64_t place = code ? (i - n) << low : i;
        for (int64_t b = 0; b < low; b++) place |= (int64_t)(rows[b * row + n / 8] >> n % 8 & 1) << b;
        const int64_t element = place - pieces[p].at + pieces[p].start;
        const int64_t before = count ? pieces[p].positions[count - 1] : pieces[p].start - 1;
        if (element <= before || element >= pieces[p].stop) return n;
        pieces[p].positions[count++] = (int32_t)element;
        set(bits, place);
        n++;
    })
    return n;
}
