// Tiles of the matrix unit (AMX): 16 rows of x times 32 values of k times 16 outputs an instruction. Included by kernels_impl.h.
//
// The unit sums the even and the odd k of 32 apart and adds both to the product, each step rounded as a float32 fused multiply-add, and
// takes numbers below the smallest normal one for zero. Where vectors are faster (one row of quantised weights, which it could not read as
// they are) they do the very same.

constexpr int ROW_BLOCK = 256;   // rows whose products wait for the epilogue
constexpr int BLOCK_PANELS = 2;  // panels likewise
constexpr int CHUNK = 3;         // groups whose products leave the unit together
constexpr int FEW_ROWS = 8;      // up to here what counts is how fast weights are expanded
constexpr int FEW_CHUNK = 4;     // and so many groups leave together
constexpr int MOST_GROUPS = FEW_CHUNK > CHUNK ? FEW_CHUNK : CHUNK;

constexpr int HALF = GROUP * 16;  // elements of a tile of weights

struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
};

// Vectors, too, take and give zero for subnormal numbers, as the unit does, as long as this lives.
class FlushSubnormals {
public:
    FlushSubnormals() : before_(_mm_getcsr()) { set(before_ | 0x8040); }  // FTZ, DAZ
    FlushSubnormals(const FlushSubnormals&) = delete;
    ~FlushSubnormals() { set(before_); }

private:
    static void set(unsigned state) {
        asm volatile("" ::: "memory");  // what was loaded before is stored before
        _mm_setcsr(state);
        asm volatile("" ::: "memory");
    }
    unsigned before_;
};

inline void split(Pairs both, F& even, F& odd) {
    const __m512i bits = (__m512i)both;
    even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xFFFF0000)));
}

// One row x NP panels.
template <int NP, class Source>
inline void row_of_vectors(const bf16* x, const float* sums, int groups, const Source& source, const GroupScales& scales, float* out) {
    constexpr int V = NP * VECTORS;
    F acc[V];
    for (int j = 0; j < V; j++) acc[j] = zero();
    for (int g = 0; g < groups; g++) {
        F even[V], odd[V];
        for (int j = 0; j < V; j++) even[j] = odd[j] = zero();
        source.template group<NP>(g, [&](int pair, const Pairs* w) __attribute__((always_inline)) {
            F x_even, x_odd;
            split(broadcast_pair(x + g * GROUP + 2 * pair), x_even, x_odd);
#pragma GCC unroll 16
            for (int j = 0; j < V; j++) {
                F w_even, w_odd;
                split(w[j], w_even, w_odd);
                even[j] = fma(x_even, w_even, even[j]);
                odd[j] = fma(x_odd, w_odd, odd[j]);
            }
        });
        for (int j = 0; j < V; j++) {
            F scale, offset;
            scales.load_group(g, j / VECTORS, j % VECTORS, scale, offset);
            if (Source::OFFSET) acc[j] = fma(set1(sums[g]), offset, acc[j]);
            acc[j] = fma(add(zero(), add(even[j], odd[j])), scale, acc[j]);  // the unit adds to a product that is zero
        }
    }
    for (int j = 0; j < V; j++) store(out + j * LANES, acc[j]);
}

// The products of up to MAX_ROWS rows with one panel, for each group of a chunk by itself: float32, or int32 where integers are multiplied.
struct alignas(64) Products {
    float of[CHUNK][MAX_ROWS * PANEL];
};

// out = (out, from the second chunk on) + products * scale + sums * offset, group after group. step: from a group's products to the next.
template <bool OFFSET> struct Scaled {
    alignas(64) float scale[MOST_GROUPS][PANEL], offset[MOST_GROUPS][PANEL];

    void set(const GroupScales& scales, int p, int first, int count) {
        for (int c = 0; c < count; c++)
            for (int v = 0; v < VECTORS; v++) {
                F s, o;
                scales.load_group(first + c, p, v, s, o);
                store(scale[c] + v * LANES, s);
                store(offset[c] + v * LANES, o);
            }
    }

    template <int COUNT> inline void add(int m, const Rows& x, int first, const float* products, std::ptrdiff_t step, float* out, std::ptrdiff_t ldo) const {
        const float* sums = OFFSET ? x.sums + first : nullptr;
        F s[COUNT][VECTORS], o[COUNT][VECTORS];
        for (int c = 0; c < COUNT; c++)
            for (int v = 0; v < VECTORS; v++) s[c][v] = load(scale[c] + v * LANES), o[c][v] = load(offset[c] + v * LANES);
        for (int i = 0; i < m; i++) {
            F acc[VECTORS];
            for (int v = 0; v < VECTORS; v++) acc[v] = first ? load(out + i * ldo + v * LANES) : zero();
#pragma GCC unroll 4
            for (int c = 0; c < COUNT; c++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    if (OFFSET) acc[v] = fma(set1(sums[i * (x.ld / GROUP) + c]), o[c][v], acc[v]);
                    acc[v] = fma(load(products + c * step + i * PANEL + v * LANES), s[c][v], acc[v]);
                }
            for (int v = 0; v < VECTORS; v++) store(out + i * ldo + v * LANES, acc[v]);
        }
    }
};

// The same for integers (integer_impl.h), whose rows have scales of their own.
template <int BITS, bool MINIMA> struct ScaledIntegers {
    alignas(64) float scale[CHUNK][PANEL], minimum[CHUNK][PANEL];

    void set(const f16* scales, int first, int count) {
        for (int c = 0; c < count; c++)
            for (int v = 0; v < PANEL; v += LANES) {
                const f16* at = scales + (std::ptrdiff_t)(first + c) * (MINIMA ? 2 * PANEL : PANEL) + v;
                store(scale[c] + v, load_f16(at));
                if (MINIMA) store(minimum[c] + v, load_f16(at + PANEL));
            }
    }

    template <int COUNT> inline void add(int m, const Int8Rows& x, int first, const float* products, std::ptrdiff_t step, float* out, std::ptrdiff_t ldo) const {
        F s[COUNT][VECTORS], minima[COUNT][VECTORS];
        for (int c = 0; c < COUNT; c++)
            for (int v = 0; v < VECTORS; v++) {
                s[c][v] = load(scale[c] + v * LANES);
                if (MINIMA) minima[c][v] = load(minimum[c] + v * LANES);
            }
        for (int i = 0; i < m; i++) {
            const std::ptrdiff_t at = i * (x.ld / GROUP) + first;
            F acc[VECTORS];
            for (int v = 0; v < VECTORS; v++) acc[v] = first ? load(out + i * ldo + v * LANES) : zero();
#pragma GCC unroll 4
            for (int c = 0; c < COUNT; c++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    I dots = _mm512_load_si512(products + c * step + i * PANEL + v * LANES);
                    if (!MINIMA) dots = _mm512_add_epi32(dots, set1_int(BITS == 4 ? x.offsets[at + c] : 16 * x.offsets[at + c]));
                    acc[v] = fma(mul(to_float(dots), set1(x.scales[at + c])), s[c][v], acc[v]);
                    if (MINIMA) acc[v] = fma(set1(x.sums[at + c]), minima[c][v], acc[v]);
                }
            for (int v = 0; v < VECTORS; v++) store(out + i * ldo + v * LANES, acc[v]);
        }
    }
};

// What the unit reads of a group, in bytes: lines, the second 16 rows or outputs, and the next group.
struct Operand {
    const void* at;
    long line, half, group;
    const void* tile(int c, int second) const { return (const char*)at + c * group + second * half; }
};

// Registers: 0 to 3 products, 4 and 5 rows of x, 6 and 7 weights.
class Tiles {
public:
    explicit Tiles(bf16*) {}  // groups are expanded one by one, in places of their own
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (rows_[0]) _tile_release();
    }

    // rows of x, np panels of weights -> out: [rows, 32 np] of [rows, ldo]. cols: a multiple of 32.
    void plain(int rows, int np, const Rows& x, int cols, const bf16* w, std::ptrdiff_t panel_stride, float* out, std::ptrdiff_t ldo) {
        for (int i = 0; i < rows; i += MAX_ROWS)
            piece(least(MAX_ROWS, rows - i), np, x.x + i * x.ld, x.ld, cols, w, panel_stride, out + i * ldo, ldo);
    }

    // The same for quantised weights: the products of a group are scaled and summed in vectors.
    template <class Source>
    void grouped(int rows, int np, const Rows& x, int groups, const Source& source, const GroupScales& scales, float* out, std::ptrdiff_t ldo) {
        const FlushSubnormals flush;
        if (rows == 1) return one_row(np, x, groups, source, scales, out);
        if (rows <= FEW_ROWS) return few(rows, np, x, groups, source, scales, out, ldo);
        alignas(64) bf16 weights[CHUNK][GROUP * PANEL];
        Scaled<Source::OFFSET> scaled;
        chunks<false>(rows, np, groups, out, ldo, scaled, x, {x.x, x.ld * 2, x.ld * 32, GROUP * 2}, [&](int p, int first, int count) {
            for (int c = 0; c < count; c++) expand_group(Source{source.data + p * source.panel_stride, 0}, first + c, weights[c]);
            scaled.set(scales, p, first, count);
            return Operand{weights, 64, HALF * 2, GROUP * PANEL * 2};
        });
    }

    // The same for integers. w, scales: of the first panel, others follow.
    template <int BITS, bool MINIMA>
    void integers(int rows, int np, const Int8Rows& x, int groups, const std::uint8_t* w, const f16* scales, float* out, std::ptrdiff_t ldo) {
        alignas(64) std::uint8_t weights[CHUNK][GROUP * PANEL];
        ScaledIntegers<BITS, MINIMA> scaled;
        chunks<true>(rows, np, groups, out, ldo, scaled, x, {x.values, x.ld, x.ld * 16, GROUP}, [&](int p, int first, int count) {
            const std::ptrdiff_t group = (std::ptrdiff_t)p * groups + first;
            const std::uint8_t* from = w + group * (GROUP * PANEL * BITS / 8);
            scaled.set(scales + (std::ptrdiff_t)p * groups * (MINIMA ? 2 * PANEL : PANEL), first, count);
            for (int at = 0; at < count * GROUP * PANEL * BITS / 8; at += 64) prefetch(from + 16384 + at);
            if (BITS == 8) return Operand{from, 4 * PANEL, 2 * PANEL, GROUP * PANEL};
            for (int c = 0; c < count; c++)
                for (int at = 0; at < GROUP * PANEL / 2; at += 64) {
                    const Quads both = load_quads(from + c * (GROUP * PANEL / 2) + at);
                    _mm512_store_si512(weights[c] + at, low_nibbles(both));
                    _mm512_store_si512(weights[c] + GROUP * PANEL / 2 + at, high_nibbles(both));
                }
            return Operand{weights, 4 * PANEL, 2 * PANEL, GROUP * PANEL};
        });
    }

private:
    static int least(int a, int b) { return a < b ? a : b; }

    // A few groups at a time, for all rows: their weights stay in the nearest cache.
    template <bool INTEGER, class Sums, class X, class Weights>
    void chunks(int rows, int np, int groups, float* out, std::ptrdiff_t ldo, const Sums& sums, const X& x, const Operand& operand, Weights&& weights_of) {
        Products products;
        for (int p = 0; p < np; p++, out += PANEL)
            for (int first = 0; first < groups; first += CHUNK) {
                const int count = least(CHUNK, groups - first);
                const Operand w = weights_of(p, first, count);
                for (int row = 0; row < rows; row += MAX_ROWS) {
                    const int m = least(MAX_ROWS, rows - row);
                    multiply<INTEGER>(m, {(const char*)operand.at + row * operand.line + first * operand.group, operand.line, operand.half, operand.group}, w, count, products);
                    add_up<CHUNK>(count, sums, m, x.from(row), first, products.of[0], MAX_ROWS * PANEL, out + row * ldo, ldo);
                }
            }
    }

    template <int COUNT, class Sums, class X>
    static void add_up(int count, const Sums& sums, int m, const X& x, int first, const float* products, std::ptrdiff_t step, float* out, std::ptrdiff_t ldo) {
        if constexpr (COUNT > 1) {
            if (count < COUNT) return add_up<COUNT - 1>(count, sums, m, x, first, products, step, out, ldo);
        }
        sums.template add<COUNT>(m, x, first, products, step, out, ldo);
    }

    // The products of each group by itself. Those of one half leave while the next half is multiplied.
    template <bool INTEGER> void multiply(int m, const Operand& x, const Operand& w, int count, Products& products) {
        const bool both = m > 16;
        configure(both ? 16 : m, both ? m - 16 : m, INTEGER);
        asm volatile("" ::: "memory");  // GCC 12's tile loads do not say that they read memory
        for (int c = 0; c < count; c++) {
            float* to = products.of[c];
            _tile_zero(0);
            _tile_zero(1);
            _tile_loadd(4, x.tile(c, 0), x.line);
            _tile_loadd(6, w.tile(c, 0), w.line);
            if constexpr (INTEGER) _tile_dpbsud(0, 4, 6); else _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w.tile(c, 1), w.line);
            if constexpr (INTEGER) _tile_dpbsud(1, 4, 7); else _tile_dpbf16ps(1, 4, 7);
            if (both) {
                if (c) leave(products.of[c - 1]);
                _tile_zero(2);
                _tile_zero(3);
                _tile_loadd(5, x.tile(c, 1), x.line);
                if constexpr (INTEGER) _tile_dpbsud(2, 5, 6); else _tile_dpbf16ps(2, 5, 6);
                if constexpr (INTEGER) _tile_dpbsud(3, 5, 7); else _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, to, 4 * PANEL);
            _tile_stored(1, to + 16, 4 * PANEL);
        }
        if (both) leave(products.of[count - 1]);
    }

    static void leave(float* products) {
        _tile_stored(2, products + 16 * PANEL, 4 * PANEL);
        _tile_stored(3, products + 16 * PANEL + 16, 4 * PANEL);
    }

    void piece(int m, int np, const bf16* x, std::ptrdiff_t ldx, int cols, const bf16* w, std::ptrdiff_t panel_stride, float* out, std::ptrdiff_t ldo) {
        const long x_bytes = ldx * 2, out_bytes = ldo * 4;
        asm volatile("" ::: "memory");  // GCC 12's tile loads do not say that they read memory
        if (m <= 16) {  // two panels at a time: four independent chains
            configure(m, m, false);
            for (int p = 0; p < np; p += 2) {
                const bool both = p + 1 < np;
                const bf16 *first = w + p * panel_stride, *second = first + (both ? panel_stride : 0);
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int k = 0; k < cols; k += 32) {
                    for (int line = 0; line < 32; line++) {
                        prefetch(first + (k + 64) * PANEL + line * 32);
                        if (both) prefetch(second + (k + 64) * PANEL + line * 32);
                    }
                    _tile_loadd(4, x + k, x_bytes);
                    _tile_loadd(6, first + k * PANEL, 64);
                    _tile_loadd(7, first + k * PANEL + HALF, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    if (both) {
                        _tile_loadd(6, second + k * PANEL, 64);
                        _tile_loadd(7, second + k * PANEL + HALF, 64);
                        _tile_dpbf16ps(2, 4, 6);
                        _tile_dpbf16ps(3, 4, 7);
                    }
                }
                float* to = out + p * PANEL;
                _tile_stored(0, to, out_bytes);
                _tile_stored(1, to + 16, out_bytes);
                if (both) {
                    _tile_stored(2, to + PANEL, out_bytes);
                    _tile_stored(3, to + PANEL + 16, out_bytes);
                }
            }
            return;
        }
        configure(16, m - 16, false);
        const bf16* lower = x + 16 * ldx;
        for (int p = 0; p < np; p++, w += panel_stride, out += PANEL) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int k = 0; k < cols; k += 32) {
                _tile_loadd(4, x + k, x_bytes);
                _tile_loadd(6, w + k * PANEL, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, w + k * PANEL + HALF, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, lower + k, x_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, out, out_bytes);
            _tile_stored(1, out + 16, out_bytes);
            _tile_stored(2, out + 16 * ldo, out_bytes);
            _tile_stored(3, out + 16 * ldo + 16, out_bytes);
        }
    }

    // Few rows: weights are written two groups ahead, and products are summed when those of the next groups are on their way.
    template <class Source>
    void few(int m, int np, const Rows& x, int groups, const Source& source, const GroupScales& scales, float* out, std::ptrdiff_t ldo) {
        alignas(64) bf16 weights[4][GROUP * PANEL];
        alignas(64) float products[2][FEW_CHUNK][FEW_ROWS * PANEL];
        configure(m, m, false);
        Source ahead{source.data, 0};
        int panels_ahead = 0, groups_ahead = 0;
        const auto write = [&](bf16* to) __attribute__((always_inline)) {
            if (panels_ahead == np) return;
            expand_group(ahead, groups_ahead, to);
            if (++groups_ahead < groups) return;
            groups_ahead = 0;
            panels_ahead++;
            ahead.data += source.panel_stride;
        };
        const auto sum = [&](int p, int first, int count, int turn, float* to) {
            Scaled<Source::OFFSET> scaled;
            scaled.set(scales, p, first, count);
            add_up<FEW_CHUNK>(count, scaled, m, x, first, products[turn][0], FEW_ROWS * PANEL, to, ldo);
        };
        write(weights[0]);
        write(weights[1]);
        for (int p = 0, turn = 0, slot = 0; p < np; p++, out += PANEL)
            for (int first = 0; first < groups; first += FEW_CHUNK, turn ^= 1) {
                const int count = least(FEW_CHUNK, groups - first);
                for (int c = 0; c < count; c++, slot++) {
                    write(weights[(slot + 2) % 4]);
                    multiply_few(slot % 2, x.x + (first + c) * GROUP, x.ld * 2, weights[slot % 4], products[turn][c]);
                }
                if (first) sum(p, first - FEW_CHUNK, FEW_CHUNK, turn ^ 1, out);
                if (first + FEW_CHUNK >= groups) sum(p, first, count, turn, out);
            }
    }

    // Registers by turns, so that one group need not wait for the other.
    static inline void multiply_few(int turn, const bf16* x, long x_bytes, const bf16* w, float* products) {
        asm volatile("" ::: "memory");  // GCC 12's tile loads do not say that they read memory
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + HALF, 64);
        if (turn) {
            _tile_zero(2);
            _tile_zero(3);
            _tile_loadd(5, x, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            _tile_stored(2, products, 4 * PANEL);
            _tile_stored(3, products + 16, 4 * PANEL);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_loadd(4, x, x_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_stored(0, products, 4 * PANEL);
            _tile_stored(1, products + 16, 4 * PANEL);
        }
    }

    template <class Source> static void one_row(int np, const Rows& x, int groups, Source source, GroupScales scales, float* out) {
        for (; np > 1; np -= 2, source.data += 2 * source.panel_stride, scales.data += 2 * scales.panel_stride, out += 2 * PANEL)
            row_of_vectors<2>(x.x, x.sums, groups, source, scales, out);
        if (np) row_of_vectors<1>(x.x, x.sums, groups, source, scales, out);
    }

    void configure(int first, int second, bool integer) {
        if (first == rows_[0] && second == rows_[1] && integer == integer_) return;
        TileConfig config;
        for (int t = 0; t < 8; t++) {
            config.row_bytes[t] = integer && (t == 4 || t == 5) ? GROUP : 64;
            config.rows[t] = (std::uint8_t)(t >= 6 ? (integer ? 8 : 16) : t == 0 || t == 1 || t == 4 ? first : second);
        }
        _tile_loadconfig(&config);
        rows_[0] = first;
        rows_[1] = second;
        integer_ = integer;
    }

    int rows_[2] = {0, 0};
    bool integer_ = false;
};
