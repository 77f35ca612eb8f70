// What bounds the kernels on this machine: loops that do nothing but read memory, and nothing but multiply in registers, written with
// the vector types of one instruction set. Included by one .cpp for each, after kernels_impl.h.

#if defined(__x86_64__)
#define VECTOR_REGISTER "v"
#elif defined(__aarch64__)
#define VECTOR_REGISTER "w"
#else
#define VECTOR_REGISTER "m"
#endif

namespace {

constexpr int CHAINS = LANES == 16 ? 12 : 10;  // independent accumulators: more than the latency of any processor needs

// The compiler must take the value for a new, unknown one: it could else compute a product once for all chains and rounds.
template <class V> inline void forget(V& v) {
    if constexpr (sizeof(V) == sizeof(F)) {
        asm volatile("" : "+" VECTOR_REGISTER(v));
    } else {
        asm volatile("" : "+" VECTOR_REGISTER(v.first), "+" VECTOR_REGISTER(v.second));
    }
}

// Reads n floats, a multiple of 8 LANES; returns their sum.
float read_floats(const float* p, std::ptrdiff_t n) {
    F sums[8];
    for (int i = 0; i < 8; i++) sums[i] = zero();
    for (std::ptrdiff_t at = 0; at < n; at += 8 * LANES)
        for (int i = 0; i < 8; i++) sums[i] = add(sums[i], load(p + at + i * LANES));
    F sum = sums[0];
    for (int i = 1; i < 8; i++) sum = add(sum, sums[i]);
    return reduce_add(sum);
}

// `rounds` dot products in each chain. Returns the floating-point operations done; adds to `sink` what they gave.
#if defined(__AMX_BF16__)
double dot_pairs(std::int64_t rounds, float* sink) {
    alignas(64) bf16 ones[16 * 32];
    alignas(64) float sums[16 * 16];
    for (bf16& one : ones) one = 0x3F80;
    TileConfig config;
    for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = 16;
    _tile_loadconfig(&config);
    asm volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, ones, 64);
    _tile_loadd(5, ones, 64);
    _tile_loadd(6, ones, 64);
    _tile_loadd(7, ones, 64);
    for (std::int64_t round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_release();
    *sink += sums[0];
    return (double)rounds * 4 * (16 * 16 * 32 * 2);
}
#else
double dot_pairs(std::int64_t rounds, float* sink) {
    bf16 ones[2 * LANES];
    for (bf16& one : ones) one = 0x3F80;
    Pairs w = load_pairs(ones);
    Pair x = broadcast_pair(ones);
    forget(w);  // a product with a known 1 would be none
    F sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = set1((float)i);
    for (std::int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < CHAINS; i++) {
            forget(x);
            sums[i] = dot(sums[i], w, x);
        }
    for (int i = 0; i < CHAINS; i++) *sink += reduce_add(sums[i]);
    return (double)rounds * CHAINS * LANES * 4;  // of a pair: two products, two additions
}
#endif

Kernels with_limits(Kernels kernels) {
    kernels.read_floats = read_floats;
    kernels.dot_pairs = dot_pairs;
    return kernels;
}

}  // namespace
