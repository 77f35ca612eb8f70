// What vectors without an instruction for it have alike. Included by a vec_*.h, whose functions these are written with.
#pragma once

namespace {

constexpr float LOWEST_POWER = -125.0f;  // below it 2^x is taken for 0
inline F fraction(F x) {                  // x - floor(x); 0 at -inf
    const F v = max(set1(LOWEST_POWER), x);  // in this order a NaN stays
    return sub(v, floor(v));
}
inline F scale_by_floor(F v, F x) {  // v * 2^floor(x)
    const F low = set1(LOWEST_POWER);
    return above(x, low, scale_by_power(v, floor(max(low, x))));
}

inline F store_bf16_sum(bf16* p, F a, F b) {
    store_bf16(p, a);
    store_bf16(p + LANES, b);
    return add(load_bf16(p), load_bf16(p + LANES));
}

inline F dot(F acc, Pairs w, Pair x) { return fma(w.second, x.second, fma(w.first, x.first, acc)); }

inline void transpose16(const std::uint32_t* const* from, std::uint32_t* to, std::ptrdiff_t stride) {
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 16; c++) to[c * stride + r] = from[r][c];
}

}  // namespace
