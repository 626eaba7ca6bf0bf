// Scalar maths that vectorises, and the divergences of divergence.py: value and dD/dlog q of one outcome.
//
// No -ffast-math anywhere: NaN and infinity must travel, because a row that is not finite is a finding, not noise.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace stillroom {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSmallest = 1.1754944e-38f;
constexpr float kLogProbFloor = -50.0f;  // numerics.LOG_PROB_FLOOR

inline float bits_to_float(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline int32_t float_to_bits(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// exp(x) for x <= 0, within 2 units in the last place (Cephes); 0 below exp(-87); NaN stays NaN.
inline float exp_below_zero(float x) {
    const float y = x < -87.0f ? -87.0f : x;
    const float shifted = y * 1.44269504088896341f + 12582912.0f;  // rounds to an integer, kept in the low bits
    const float n = shifted - 12582912.0f;
    const float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const float power = bits_to_float((int32_t)((uint32_t)float_to_bits(shifted) << 23) + 0x3f800000);
    return x < -87.0f ? 0.0f : p * power;
}

// log(x) for normal positive x (Cephes).
inline float log_above_zero(float x) {
    const int32_t bits = float_to_bits(x);
    const float mantissa = bits_to_float((bits & 0x007fffff) | 0x3f000000);
    const bool is_low = mantissa < 0.707106781186547524f;
    const float e = (float)((bits >> 23) - 126) - (is_low ? 1.0f : 0.0f);
    const float m = is_low ? mantissa + mantissa - 1.0f : mantissa - 1.0f;
    const float square = m * m;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * square - e * 2.12194440e-4f - 0.5f * square;
    return m + p + e * 0.693359375f;
}

inline float tanh_of(float x) {
    const float size = std::fabs(x);
    const float e = exp_below_zero(-2.0f * size);
    const float far = (1.0f - e) / (1.0f + e);
    const float s = x * x;
    const float near = size * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f))));
    return std::copysign(size < 0.25f ? near : far, x);
}

// log(1 + x) for x >= -1/2, accurate near 0 (Kahan): whatever 1 + x rounds away, the quotient puts back.
inline float log1p_of(float x) {
    const float sum = 1.0f + x;
    return sum == 1.0f ? x : log_above_zero(sum) * (x / (sum - 1.0f));
}

// x - log(1 + x) for x > -1, accurate near 0: with s = x / (2 + x), log(1 + x) = 2 (s + s^3 / 3 + s^5 / 5 ...).
inline float log1p_rest(float x) {
    const float s = x / (2.0f + x), t = s * s;
    float series = 0.0769230769f;
    series = series * t + 0.0909090909f;
    series = series * t + 0.1111111111f;
    series = series * t + 0.1428571429f;
    series = series * t + 0.2f;
    series = series * t + 0.3333333333f;
    return std::fabs(x) < 0.5f ? s * (x - 2.0f * t * series) : x - log_above_zero(1.0f + x);
}

// -- divergences -------------------------------------------------------------------------------------------------

// beta or alpha, and 1 minus it from FP64: in FP32 that difference would be 0 near 1.
struct Place {
    float share, rest;
};

struct ForwardKL {
    static inline void at(float, float lq, float p, float lp, const Place&, float& value, float& slope) {
        value = p > 0.0f ? p * (lp - lq) : 0.0f;
        slope = -p;
    }
};

struct ReverseKL {
    static inline void at(float q, float lq, float, float lp, const Place&, float& value, float& slope) {
        const float floored = lp < kLogProbFloor ? kLogProbFloor : lp;
        value = q > 0.0f ? q * (lq - floored) : 0.0f;
        slope = value;
    }
};

inline float at_least(float least, float x) { return x < least ? least : x; }  // NaN stays NaN

constexpr float kLogSmallest = -87.3365447f;

// a (log a - log m) / share and b (log b - log m) / rest, m = share b + rest a, share <= 1/2: see divergence.py.
inline void mixture_slopes(float a, float log_a, float b, float log_b, float share, float rest, float& near, float& far) {
    const float rise = log1p_of(share * (b - a) / at_least(kSmallest, a));
    near = -a * (rise / share);
    far = b > 0.0f ? b * ((log_b - at_least(kLogSmallest, log_a)) - rise) / rest : 0.0f;
}

struct JensenShannonLow {  // beta <= 1/2
    static inline void at(float q, float lq, float p, float lp, const Place& place, float& value, float& slope) {
        float other;
        mixture_slopes(q, lq, p, lp, place.share, place.rest, slope, other);
        value = slope + other;
    }
};

struct JensenShannonHigh {
    static inline void at(float q, float lq, float p, float lp, const Place& place, float& value, float& slope) {
        float other;
        mixture_slopes(p, lp, q, lq, place.rest, place.share, other, slope);
        value = slope + other;
    }
};

struct SkewForwardKL {
    static inline void at(float q, float, float p, float lp, const Place& place, float& value, float& slope) {
        const float m = at_least(kSmallest, place.share * p + place.rest * q);
        value = p > 0.0f ? p * (lp - log_above_zero(m)) : 0.0f;
        slope = place.rest * place.rest * q * ((q - p) / m);
    }
};

struct SkewReverseKL {
    static inline void at(float q, float lq, float p, float, const Place& place, float& value, float& slope) {
        const float m = at_least(kSmallest, place.rest * p + place.share * q);
        value = q > 0.0f ? q * (lq - log_above_zero(m)) : 0.0f;
        slope = value + place.share * place.rest * q * ((p - q) / m);
    }
};

struct SteepSkewReverseKL {  // alpha near 1: alpha x / (1 + x) - log(1 + x) with x = m / q - 1 is of second order
    static inline void at(float q, float lq, float p, float lp, const Place& place, float& value, float& slope) {
        SkewReverseKL::at(q, lq, p, lp, place, value, slope);
        const float x = place.rest * (p - q) / at_least(kSmallest, q);
        const float near = log1p_rest(x) - x * ((place.rest + x) / (1.0f + x));
        slope = std::fabs(x) < 0.5f ? q * near : slope;
    }
};

struct TotalVariation {
    static inline void at(float q, float, float p, float, const Place&, float& value, float& slope) {
        value = 0.5f * std::fabs(p - q);
        slope = q > p ? 0.5f * q : (q < p ? -0.5f * q : 0.0f);
    }
};

}  // namespace stillroom
