// AVX2 with FMA and F16C: 8 lanes. bfloat16 products are made of float32 ones.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace {

using sidestream::bf16;
using sidestream::f16;

constexpr int LANES = 8;
constexpr int MAX_ROWS = 2;
constexpr int MAX_GROUPED_ROWS = 2;
constexpr int MIN_CHAINS = 4;

using F = __m256;
struct Pairs { __m256 first, second; };
struct Pair { __m256 first, second; };

inline F zero() { return _mm256_setzero_ps(); }
inline F set1(float v) { return _mm256_set1_ps(v); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F div(F a, F b) { return _mm256_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm256_max_ps(a, b); }
inline F min(F a, F b) { return _mm256_min_ps(a, b); }
inline F round(F v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F scale_by_power(F v, F n) {
    // In two steps, so that results below the smallest normal number are reached through it.
    const __m256i e = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(e, 1), rest = _mm256_sub_epi32(e, half), bias = _mm256_set1_epi32(127);
    v = mul(v, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return mul(v, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
inline F iota(float first) { return add(set1(first), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)); }
inline F inside(F at, F low, F high, F v, F other) {
    return _mm256_blendv_ps(other, v, _mm256_and_ps(_mm256_cmp_ps(at, low, _CMP_NLT_UQ), _mm256_cmp_ps(at, high, _CMP_NGT_UQ)));
}
inline F floor(F v) { return _mm256_floor_ps(v); }
inline F above(F at, F low, F v) { return _mm256_and_ps(_mm256_cmp_ps(at, low, _CMP_NLE_UQ), v); }  // v where at > low, or is NaN, else 0
inline bool any_greater(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
inline bool any_nan(F a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
inline float reduce_add(F v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float reduce_max(F v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

inline F load_bf16(const bf16* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)); }
inline void store_bf16(bf16* p, F v) {
    // Round to nearest even; a NaN stays a NaN.
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xD8);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
inline F load_f16(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store_f16(f16* p, F v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }

inline Pairs split_pairs(__m256i both) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xFFFF0000)))};
}
inline Pairs load_pairs(const bf16* p) { return split_pairs(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_pairs(bf16* p, Pairs v) {  // exact bfloat16 values
    _mm256_storeu_si256((__m256i*)p, _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(v.first), 16), _mm256_castps_si256(v.second)));
}
inline Pair broadcast_pair(const bf16* p) {
    std::int32_t both;
    __builtin_memcpy(&both, p, 4);
    const Pairs x = split_pairs(_mm256_set1_epi32(both));
    return {x.first, x.second};
}
inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // no nearer than the second cache

struct Nibbles {
    __m256i words;
    explicit Nibbles(const std::uint32_t* p) : words(_mm256_loadu_si256((const __m256i*)p)) {}
    template <int i> Pairs pairs() const {
        const __m256i q = _mm256_and_si256(_mm256_srli_epi32(words, 4 * i), _mm256_set1_epi32(0x000F000F));
        return split_pairs(_mm256_or_si256(q, _mm256_set1_epi32(0x43004300)));
    }
};

struct Bytes {
    __m256i low, high;
    explicit Bytes(const std::int8_t* p) {
        const __m256i q = _mm256_loadu_si256((const __m256i*)p);
        low = _mm256_unpacklo_epi8(q, q);  // the byte in the upper half of each 16 bits
        high = _mm256_unpackhi_epi8(q, q);
    }
    template <int i> Pairs pairs() const {
        const __m256i both = i == 0 ? low : high;
        return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(both, 16), 24)), _mm256_cvtepi32_ps(_mm256_srai_epi32(both, 24))};
    }
};

inline void interleave(const bf16* a, const bf16* b, bf16* to) {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)a)), y = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)b));
    _mm256_storeu_si256((__m256i*)to, _mm256_or_si256(x, _mm256_slli_epi32(y, 16)));
}
constexpr int INTERLEAVE = 8;

// ---- integers: 8 outputs x 4 consecutive k in unsigned bytes, times 4 consecutive k of x in signed bytes

constexpr int MAX_INTEGER_ROWS = 3;
constexpr int INTEGER_VECTORS = 2;  // vectors of outputs in a tile

using I = __m256i;
using Quads = __m256i;
struct Quad { __m256i bytes, even, odd; };

inline I set1_int(std::int32_t v) { return _mm256_set1_epi32(v); }
inline F to_float(I v) { return _mm256_cvtepi32_ps(v); }
inline Quads load_quads(const std::uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Quads low_nibbles(Quads v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Quads high_nibbles(Quads v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
inline Quad broadcast_quad(const std::int8_t* p) {
    std::int32_t four;
    __builtin_memcpy(&four, p, 4);
    const __m256i x = _mm256_set1_epi32(four);
    return {x, _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
}
// Sums of two products of bytes would saturate 16 bits, so even and odd k are widened first; with nibbles they fit.
inline I dot_bytes(I acc, Quads w, Quad x) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), x.even));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), x.odd));
}
inline I dot_nibbles(I acc, Quads w, Quad x) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x.bytes), _mm256_set1_epi16(1)));
}
inline void store_int8(std::int8_t* p, F integers) {
    const __m256i v = _mm256_cvtps_epi32(integers);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}

}  // namespace

#include "vec_common.h"
