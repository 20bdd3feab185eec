#include "common.h"

// The instruction set that these passes were built for.
const char *isa(void) { return ISA; }

// The instruction sets that this processor has beside the portable one; asked of the portable passes, which run on all.
const char *processor(void) {
#if defined(__x86_64__)
#define HAS __builtin_cpu_supports
    __builtin_cpu_init();
    if (!HAS("avx2") || !HAS("fma") || !HAS("bmi") || !HAS("bmi2") || !HAS("popcnt")) return "";
    if (!HAS("avx512f") || !HAS("avx512bw") || !HAS("avx512cd") || !HAS("avx512dq") || !HAS("avx512vl")) return "avx2";
    return "avx512 avx2";
#elif defined(__aarch64__)
    return "neon";
#else
    return "";
#endif
}
