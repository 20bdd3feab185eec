// One element of AdamW, for the passes that update weights. Reference: adamw_ of compopt/_ops/operations.py.

#pragma once
#include <math.h>

typedef struct {
    float beta2, new1, new2, eps, by_root, shrink, rate;
} Factors;

static inline Factors adamw_factors(double step, double lr, double beta1, double beta2, double eps, double decay) {
    const double first = 1 - pow(beta1, step), second = 1 - pow(beta2, step);
    return (Factors){beta2, 1 - beta1, 1 - beta2, eps, 1 / sqrt(second), 1 - lr * decay, lr / first};
}

// Updates the moments and returns their ratio.
static inline float update_moments(float *m, float *v, float g, Factors f) {
    *m += f.new1 * (g - *m);
    *v = f.beta2 * *v + f.new2 * g * g;
    return *m / (sqrtf(*v) * f.by_root + f.eps);
}
