// Loops over one row of a vocabulary.

#pragma once

#include "maths.h"

namespace stillroom {

constexpr int64_t kBlock = 2048;  // FP32 sums are short; the long sum is FP64

struct Head {
    float* raw;         // [rows, stride]: bare products in, gradient with respect to them out
    int64_t stride;
    const float* bias;  // [V] or null
    float scale;
    float softcap;      // 0: none
};

// Bias, scale and cap of a head in place; `slope` (or null) takes the derivative of scale and cap.
inline void finish(const Head& head, float* z, int64_t size, float* slope) {
    if (head.bias != nullptr) {
#pragma omp simd
        for (int64_t j = 0; j < size; ++j) z[j] += head.bias[j];
    }
    if (head.softcap > 0.0f) {
        const float inner = head.scale / head.softcap, cap = head.softcap, scale = head.scale;
        if (slope != nullptr) {
#pragma omp simd
            for (int64_t j = 0; j < size; ++j) {
                const float bent = tanh_of(z[j] * inner);
                slope[j] = (1.0f - bent) * (1.0f + bent) * scale;
                z[j] = bent * cap;
            }
        } else {
#pragma omp simd
            for (int64_t j = 0; j < size; ++j) z[j] = tanh_of(z[j] * inner) * cap;
        }
    } else if (head.scale != 1.0f) {
        const float scale = head.scale;
#pragma omp simd
        for (int64_t j = 0; j < size; ++j) z[j] *= scale;
    }
}

inline float maximum(const float* z, int64_t size) {
    float top = -kInfinity;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < size; ++j) top = z[j] > top ? z[j] : top;
    return top;
}

struct Sums {
    double exps, squares;
};

// out = exp((z - top) / T), their sum, and the sum of their squares: at T = 2 those are the exponentials at T = 1.
inline Sums exponentials(const float* z, float top, float inverse, float* out, int64_t size) {
    Sums total{0.0, 0.0};
    for (int64_t start = 0; start < size; start += kBlock) {
        const int64_t stop = start + kBlock < size ? start + kBlock : size;
        float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum, squares)
        for (int64_t j = start; j < stop; ++j) {
            const float e = exp_below_zero((z[j] - top) * inverse);
            out[j] = e;
            sum += e;
            squares += e * e;
        }
        total.exps += sum;
        total.squares += squares;
    }
    return total;
}

}  // namespace stillroom
