// AVX-512 with BF16 dot products and VBMI: 16 lanes.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace {

using sidestream::bf16;
using sidestream::f16;

constexpr int LANES = 16;
#if defined(__AMX_BF16__)
constexpr int MAX_ROWS = 32;  // rows of a tile of products
#else
constexpr int MAX_ROWS = 12;
constexpr int MAX_GROUPED_ROWS = 6;  // with a second set of accumulators for the groups
#endif
constexpr int MIN_CHAINS = 6;        // independent accumulators that hide the latency of a dot product

using F = __m512;
using Pairs = __m512bh;  // 16 x (two consecutive k of one output)
using Pair = __m512bh;   // two consecutive k of x, broadcast

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float v) { return _mm512_set1_ps(v); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F round(F v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F scale_by_power(F v, F n) { return _mm512_scalef_ps(v, n); }  // v * 2^n, n integral
inline F fraction(F x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }  // x - floor(x); 0 at -inf
inline F scale_by_floor(F v, F x) { return _mm512_scalef_ps(v, x); }                                 // v * 2^floor(x)
inline F iota(float first) {
    return add(set1(first), _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
// v where low <= at <= high or at is NaN, else other
inline F inside(F at, F low, F high, F v, F other) {
    const __mmask16 m = _mm512_cmp_ps_mask(at, low, _CMP_NLT_UQ) & _mm512_cmp_ps_mask(at, high, _CMP_NGT_UQ);
    return _mm512_mask_blend_ps(m, other, v);
}
inline bool any_greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
inline bool any_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
inline float reduce_add(F v) { return _mm512_reduce_add_ps(v); }
inline float reduce_max(F v) { return _mm512_reduce_max_ps(v); }

inline F load_bf16(const bf16* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16)); }
inline void store_bf16(bf16* p, F v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
// Stores both, rounded, and returns the sum of what was stored, in any arrangement of the lanes.
inline F store_bf16_sum(bf16* p, F a, F b) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    _mm512_storeu_si512(p, both);
    return add(_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xFFFF0000))));
}
inline F load_f16(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_f16(f16* p, F v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }

inline Pairs load_pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline Pair broadcast_pair(const bf16* p) {
    std::int32_t both;
    __builtin_memcpy(&both, p, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}
inline F dot(F acc, Pairs w, Pair x) { return _mm512_dpbf16_ps(acc, w, x); }
inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // no nearer than the second cache

// 16 words of nibbles -> pairs i = 0..3 as the bfloat16 integers 128 + q.
struct Nibbles {
    __m512i words;
    explicit Nibbles(const std::uint32_t* p) : words(_mm512_loadu_si512(p)) {}
    template <int i> Pairs pairs() const {
        const __m512i mask = _mm512_set1_epi32(0x000F000F), magic = _mm512_set1_epi32(0x43004300);
        return (__m512bh)_mm512_ternarylogic_epi32(_mm512_srli_epi32(words, 4 * i), mask, magic, 0xEA);
    }
};

// 64 bytes, four k of 16 outputs -> two pairs as bfloat16 integers -128..127, by a table of 128 magnitudes.
struct Bytes {
    __m512i low, high;
    explicit Bytes(const std::int8_t* p) {
        const __m512i q = _mm512_loadu_si512(p);
        const __m512i magnitude = _mm512_abs_epi8(q);  // 128 stays 0x80: its table index is 0, handled by the mask below
        const __mmask64 is128 = _mm512_movepi8_mask(magnitude);
        __m512i lo = _mm512_permutex2var_epi8(table(0, 0), magnitude, table(0, 1));
        __m512i hi = _mm512_permutex2var_epi8(table(1, 0), magnitude, table(1, 1));
        lo = _mm512_mask_mov_epi8(lo, is128, _mm512_setzero_si512());          // 128 = 0x4300
        hi = _mm512_mask_mov_epi8(hi, is128, _mm512_set1_epi8(0x43));
        hi = _mm512_ternarylogic_epi32(hi, q, _mm512_set1_epi8((char)0x80), 0xF8);  // hi | (q & sign)
        low = _mm512_unpacklo_epi8(lo, hi);
        high = _mm512_unpackhi_epi8(lo, hi);
    }
    template <int i> Pairs pairs() const { return (__m512bh)(i == 0 ? low : high); }

    struct Table {
        alignas(64) unsigned char bytes[2][128];
        constexpr Table() : bytes() {
            for (int m = 1; m < 128; m++) {
                int exponent = 0;
                while ((m >> exponent) > 1) exponent++;
                const int bits = ((127 + exponent) << 7) | ((m << (7 - exponent)) & 0x7F);
                bytes[0][m] = (unsigned char)(bits & 0xFF);
                bytes[1][m] = (unsigned char)(bits >> 8);
            }
        }
    };
    static __m512i table(int byte, int half) {
        static constexpr Table values{};
        return _mm512_load_si512(values.bytes[byte] + 64 * half);
    }
};

inline void store_pairs(bf16* p, Pairs v) { _mm512_storeu_si512(p, (__m512i)v); }

// Sixteen rows of sixteen 32-bit words, transposed: to[c * stride + r] = from[r][c].
inline void transpose16(const std::uint32_t* const* from, std::uint32_t* to, std::ptrdiff_t stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from[i]);
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + (0 + i) * stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88));
        _mm512_storeu_si512(to + (8 + i) * stride, _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD));
        _mm512_storeu_si512(to + (4 + i) * stride, _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88));
        _mm512_storeu_si512(to + (12 + i) * stride, _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD));
    }
}

// Two rows of 16 bf16 -> 16 pairs.
inline void interleave(const bf16* a, const bf16* b, bf16* to) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a)), y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    _mm512_storeu_si512(to, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
}
constexpr int INTERLEAVE = 16;

// ---- integers: 16 outputs x 4 consecutive k in unsigned bytes, times 4 consecutive k of x in signed bytes

constexpr int MAX_INTEGER_ROWS = 4;
constexpr int INTEGER_VECTORS = 2;  // vectors of outputs in a tile

using I = __m512i;
using Quads = __m512i;
using Quad = __m512i;

inline I set1_int(std::int32_t v) { return _mm512_set1_epi32(v); }
inline F to_float(I v) { return _mm512_cvtepi32_ps(v); }
inline Quads load_quads(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
inline Quads low_nibbles(Quads v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Quads high_nibbles(Quads v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline Quad broadcast_quad(const std::int8_t* p) {
    std::int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
inline I dot_bytes(I acc, Quads w, Quad x) { return _mm512_dpbusd_epi32(acc, w, x); }
inline I dot_nibbles(I acc, Quads w, Quad x) { return _mm512_dpbusd_epi32(acc, w, x); }
inline void store_int8(std::int8_t* p, F integers) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(integers))); }

}  // namespace
