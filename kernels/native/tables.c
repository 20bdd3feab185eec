#include "tables.h"

uint8_t together[PATTERNS][PLACES], apart[PATTERNS][PLACES];

// Fills the tables when the library is loaded.
__attribute__((constructor)) static void fill(void) {
#if defined(__aarch64__)
    enum { WIDTH = 4 };  // bytes of a lane
#else
    enum { WIDTH = 1 };
#endif
    for (int bits = 0; bits < PATTERNS; bits++)
        for (int lane = 0, count = 0; lane < PLACES / WIDTH; lane++) {
            const int hit = bits >> lane & 1;
            for (int byte = 0; byte < WIDTH; byte++) {
                if (hit) together[bits][count * WIDTH + byte] = (uint8_t)(lane * WIDTH + byte);
                apart[bits][lane * WIDTH + byte] = hit ? (uint8_t)(count * WIDTH + byte) : 255;
            }
            count += hit;
        }
}
