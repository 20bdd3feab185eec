// Where lanes go: rows of places, one for each pattern of bits. AVX2 moves words, NEON bytes.

#pragma once
#include <stdint.h>

#if defined(__aarch64__)
enum { PATTERNS = 16, PLACES = 16 };
#else
enum { PATTERNS = 256, PLACES = 8 };
#endif

extern uint8_t together[PATTERNS][PLACES];  // of each lane of what is compressed: which lane it was
extern uint8_t apart[PATTERNS][PLACES];     // of each lane of what is expanded: the how many-th value; 255: none, it is 0
