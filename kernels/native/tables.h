// Permutations of lanes, a row for each pattern of bits. AVX2 permutes words, NEON bytes.

#pragma once
#include <stdint.h>

#if defined(__aarch64__)
enum { PATTERNS = 16, PLACES = 16 };
#else
enum { PATTERNS = 256, PLACES = 8 };
#endif

extern uint8_t together[PATTERNS][PLACES];  // the source lane of each lane of a compressed vector
extern uint8_t apart[PATTERNS][PLACES];     // the source value of each lane of an expanded vector; 255: none, 0
