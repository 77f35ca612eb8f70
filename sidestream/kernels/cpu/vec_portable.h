// Any processor: four lanes in the compiler's vector types, which become SSE2, NEON or plain registers.
#pragma once

#include "common.h"

namespace {

using sidestream::bf16;
using sidestream::f16;

constexpr int LANES = 4;
constexpr int MAX_ROWS = 1;
constexpr int MAX_GROUPED_ROWS = 1;
constexpr int MIN_CHAINS = 4;

typedef float F __attribute__((vector_size(16)));
typedef std::int32_t I __attribute__((vector_size(16)));
typedef std::uint32_t U __attribute__((vector_size(16)));
struct Pairs { F first, second; };
struct Pair { F first, second; };

template <class To, class From> inline To as(From v) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &v, sizeof(to));
    return to;
}
inline F set1(float v) { return F{v, v, v, v}; }
inline F zero() { return set1(0.0f); }
inline F load(const float* p) {
    F v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
}
inline void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof(v)); }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }  // two roundings everywhere: built with -ffp-contract=off
inline F select(I mask, F yes, F no) { return as<F>((as<I>(yes) & mask) | (as<I>(no) & ~mask)); }
inline F max(F a, F b) { return select(a > b, a, b); }
inline F min(F a, F b) { return select(a < b, a, b); }
inline F round(F v) {  // |v| < 2^22
    const F magic = set1(12582912.0f);
    return (v + magic) - magic;
}
inline F scale_by_power(F v, F n) {
    const I e = __builtin_convertvector(n, I), half = e >> 1, rest = e - half;
    return v * as<F>((half + 127) << 23) * as<F>((rest + 127) << 23);
}
inline F iota(float first) { return F{first, first + 1, first + 2, first + 3}; }
inline F inside(F at, F low, F high, F v, F other) { return select((at < low) | (at > high), other, v); }
inline F floor(F v) {  // |v| < 2^22
    const F n = round(v);
    return n - select(n > v, set1(1.0f), zero());
}
inline F above(F at, F low, F v) { return select(at <= low, zero(), v); }  // v where at > low, or is NaN, else 0
inline bool any_greater(F a, F b) {
    const I m = a > b;
    return (m[0] | m[1] | m[2] | m[3]) != 0;
}
inline bool any_nan(F a) {
    const I m = a != a;
    return (m[0] | m[1] | m[2] | m[3]) != 0;
}
inline float reduce_add(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float reduce_max(F v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}

inline float widen_one(bf16 v) { return as<float>((std::uint32_t)v << 16); }
inline bf16 narrow_one(float v) {
    const std::uint32_t bits = as<std::uint32_t>(v);
    if (v != v) return 0x7FC0;
    return (bf16)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline float half_to_float(f16 h) {
    const std::uint32_t sign = (std::uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 0x1F, fraction = h & 0x3FF;
    if (exponent == 31) return as<float>(sign | 0x7F800000 | (fraction << 13));
    if (exponent) return as<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
    const float small = (float)fraction * (1.0f / 16777216.0f);
    return sign ? -small : small;
}
inline f16 float_to_half(float v) {
    const std::uint32_t bits = as<std::uint32_t>(v), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return (f16)(sign | 0x7E00);
    if (magnitude >= 0x477FF000) return (f16)(sign | 0x7C00);
    if (magnitude < 0x38800000) {  // a multiple of 2^-24
        const float scaled = as<float>(magnitude) * 16777216.0f;
        const float rounded = (scaled + 8388608.0f) - 8388608.0f;
        return (f16)(sign | (std::uint32_t)rounded);
    }
    return (f16)(sign | ((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13));
}
inline F load_bf16(const bf16* p) { return F{widen_one(p[0]), widen_one(p[1]), widen_one(p[2]), widen_one(p[3])}; }
inline void store_bf16(bf16* p, F v) {
    for (int i = 0; i < 4; i++) p[i] = narrow_one(v[i]);
}
inline F load_f16(const f16* p) { return F{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])}; }
inline void store_f16(f16* p, F v) {
    for (int i = 0; i < 4; i++) p[i] = float_to_half(v[i]);
}

inline Pairs split_pairs(U both) { return {as<F>(both << 16), as<F>(both & 0xFFFF0000u)}; }
inline Pairs load_pairs(const bf16* p) {
    U both;
    __builtin_memcpy(&both, p, sizeof(both));
    return split_pairs(both);
}
inline void store_pairs(bf16* p, Pairs v) {
    const U both = (as<U>(v.first) >> 16) | as<U>(v.second);
    __builtin_memcpy(p, &both, sizeof(both));
}
inline Pair broadcast_pair(const bf16* p) { return {set1(widen_one(p[0])), set1(widen_one(p[1]))}; }
inline void prefetch(const void*) {}
inline void prefetch_far(const void*) {}

struct Nibbles {
    U words;
    explicit Nibbles(const std::uint32_t* p) { __builtin_memcpy(&words, p, sizeof(words)); }
    template <int i> Pairs pairs() const { return split_pairs(((words >> (4 * i)) & 0x000F000Fu) | 0x43004300u); }
};

struct Bytes {
    const std::int8_t* p;
    explicit Bytes(const std::int8_t* from) : p(from) {}
    template <int i> Pairs pairs() const {
        const std::int8_t* q = p + 8 * i;
        return {F{(float)q[0], (float)q[2], (float)q[4], (float)q[6]}, F{(float)q[1], (float)q[3], (float)q[5], (float)q[7]}};
    }
};

inline void interleave(const bf16* a, const bf16* b, bf16* to) {
    for (int i = 0; i < 4; i++) {
        to[2 * i] = a[i];
        to[2 * i + 1] = b[i];
    }
}
constexpr int INTERLEAVE = 4;

// ---- integers: 4 outputs x 4 consecutive k in unsigned bytes, times 4 consecutive k of x in signed bytes

constexpr int MAX_INTEGER_ROWS = 1;
constexpr int INTEGER_VECTORS = 2;  // vectors of outputs in a tile

struct Quads { U words; };  // byte i of a word holds k = i, on any byte order
struct Quad { std::int32_t values[4]; };

inline I set1_int(std::int32_t v) { return I{v, v, v, v}; }
inline F to_float(I v) { return __builtin_convertvector(v, F); }
inline Quads load_quads(const std::uint8_t* p) {
    U words;
    for (int o = 0; o < 4; o++)
        words[o] = p[4 * o] | (std::uint32_t)p[4 * o + 1] << 8 | (std::uint32_t)p[4 * o + 2] << 16 | (std::uint32_t)p[4 * o + 3] << 24;
    return {words};
}
inline Quads low_nibbles(Quads v) { return {v.words & 0x0F0F0F0Fu}; }
inline Quads high_nibbles(Quads v) { return {(v.words >> 4) & 0x0F0F0F0Fu}; }
inline Quad broadcast_quad(const std::int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline I dot_bytes(I acc, Quads w, Quad x) {
    for (int k = 0; k < 4; k++) acc += as<I>((w.words >> (8 * k)) & 255u) * x.values[k];
    return acc;
}
inline I dot_nibbles(I acc, Quads w, Quad x) { return dot_bytes(acc, w, x); }
inline void store_int8(std::int8_t* p, F integers) {
    for (int i = 0; i < 4; i++) p[i] = (std::int8_t)integers[i];
}

}  // namespace

#include "vec_common.h"
