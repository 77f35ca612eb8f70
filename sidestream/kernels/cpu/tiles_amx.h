// Tiles of the matrix unit (AMX): 16 rows of x times 32 values of k times 16 outputs an instruction. Included by kernels_impl.h.
//
// The unit sums the even and the odd k of 32 apart and adds both to the product, each step rounded as a float32 fused multiply-add, and
// takes numbers below the smallest normal one for zero. Where vectors are faster (one row of quantised weights, which it could not read as
// they are) they do the very same.

constexpr int ROW_BLOCK = 128;   // rows whose products wait for the epilogue
constexpr int BLOCK_PANELS = 2;  // panels likewise

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

// Registers: 0 to 3 products, 4 and 5 rows of x, 6 and 7 weights.
class Tiles {
public:
    explicit Tiles(bf16*) {}  // groups are expanded one by one, in places of their own
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (first_) _tile_release();
    }

    // rows of x, np panels of weights -> out: [rows, 32 np] of [rows, ldo]. cols: a multiple of 32.
    void plain(int rows, int np, const Rows& x, int cols, const bf16* w, std::ptrdiff_t panel_stride, float* out, std::ptrdiff_t ldo) {
        for (int i = 0; i < rows;) {
            const int m = piece_of(rows - i, MAX_ROWS);
            piece(m, np, x.x + i * x.ld, x.ld, cols, w, panel_stride, out + i * ldo, ldo);
            i += m;
        }
    }

    // The same for quantised weights: the products of a group are scaled and summed in vectors. rows <= ROW_BLOCK.
    template <class Source>
    void grouped(int rows, int np, const Rows& x, int groups, const Source& source, const GroupScales& scales, float* out, std::ptrdiff_t ldo) {
        const FlushSubnormals flush;
        if (rows == 1) return one_row(np, x, groups, source, scales, out);
        alignas(64) float products[CHUNK][MAX_ROWS * PANEL];
        alignas(64) bf16 weights[2][CHUNK][GROUP * PANEL];
        for (int p = 0; p < np; p++, out += PANEL) {
            const Source panel{source.data + p * source.panel_stride, 0};
            // A few groups at a time, for all rows: their weights stay in the nearest cache. The next ones are written while the unit works.
            expand(panel, 0, groups, weights[0]);
            for (int first = 0, turn = 0; first < groups; first += CHUNK, turn ^= 1) {
                for (int row = 0; row < rows;) {
                    const int m = piece_of(rows - row, MAX_ROWS);
                    multiply(m, x.from(row), first, groups, weights[turn], products);
                    if (row == 0) expand(panel, first + CHUNK, groups, weights[turn ^ 1]);
                    sum<Source::OFFSET>(m, x.from(row), first, groups, p, products, scales, out + row * ldo, ldo);
                    row += m;
                }
            }
        }
    }

private:
    void piece(int m, int np, const bf16* x, std::ptrdiff_t ldx, int cols, const bf16* w, std::ptrdiff_t panel_stride, float* out, std::ptrdiff_t ldo) {
        const long x_bytes = ldx * 2, out_bytes = ldo * 4;
        asm volatile("" ::: "memory");  // GCC 12's tile loads do not say that they read memory
        if (m <= 16) {  // two panels at a time: four independent chains
            configure(m, m);
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
        configure(16, m - 16);
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

    void configure(int first, int second) {
        if (first == first_ && second == second_) return;
        TileConfig config;
        for (int t = 0; t < 8; t++) {
            config.row_bytes[t] = 64;
            config.rows[t] = (std::uint8_t)(t >= 6 ? 16 : t == 0 || t == 1 || t == 4 ? first : second);
        }
        _tile_loadconfig(&config);
        first_ = first;
        second_ = second;
    }

    static constexpr int CHUNK = 4;  // groups

    template <class Source> static void one_row(int np, const Rows& x, int groups, Source source, GroupScales scales, float* out) {
        for (; np > 1; np -= 2, source.data += 2 * source.panel_stride, scales.data += 2 * scales.panel_stride, out += 2 * PANEL)
            row_of_vectors<2>(x.x, x.sums, groups, source, scales, out);
        if (np) row_of_vectors<1>(x.x, x.sums, groups, source, scales, out);
    }

    template <class Source> static void expand(const Source& panel, int first, int groups, bf16 (*to)[GROUP * PANEL]) {
        for (int g = first; g < groups && g < first + CHUNK; g++) expand_group(panel, g, to[g - first]);
    }

    void multiply(int m, const Rows& x, int first, int groups, const bf16 (*weights)[GROUP * PANEL], float (*products)[MAX_ROWS * PANEL]) {
        const long x_bytes = x.ld * 2;
        const int upper = m < 16 ? m : 16, lower = m - upper;
        configure(upper, lower ? lower : 1);
        asm volatile("" ::: "memory");  // GCC 12's tile loads do not say that they read memory
        for (int g = first; g < groups && g < first + CHUNK; g++) {
            const bf16 *w = weights[g - first], *rows = x.x + g * GROUP;
            float* d = products[g - first];
            _tile_zero(0);
            _tile_zero(1);
            _tile_loadd(4, rows, x_bytes);
            _tile_loadd(6, w, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + HALF, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (lower) {
                _tile_zero(2);
                _tile_zero(3);
                _tile_loadd(5, rows + 16 * x.ld, x_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, d, 4 * PANEL);
            _tile_stored(1, d + 16, 4 * PANEL);
            if (lower) {
                _tile_stored(2, d + 16 * PANEL, 4 * PANEL);
                _tile_stored(3, d + 16 * PANEL + 16, 4 * PANEL);
            }
        }
    }

    // out += products * scale + sums * offset, group after group.
    template <bool OFFSET>
    static void sum(int m, const Rows& x, int first, int groups, int p, const float (*products)[MAX_ROWS * PANEL], const GroupScales& scales,
                    float* out, std::ptrdiff_t ldo) {
        const int count = groups - first < CHUNK ? groups - first : CHUNK;
        F scale[CHUNK][VECTORS], offset[CHUNK][VECTORS];
        for (int c = 0; c < count; c++)
            for (int v = 0; v < VECTORS; v++) scales.load_group(first + c, p, v, scale[c][v], offset[c][v]);
        for (int i = 0; i < m; i++) {
            F acc[VECTORS];
            for (int v = 0; v < VECTORS; v++) acc[v] = first ? load(out + i * ldo + v * LANES) : zero();
            for (int c = 0; c < count; c++) {
                const F of_row = OFFSET ? set1(x.sums[i * (x.ld / GROUP) + first + c]) : zero();
                for (int v = 0; v < VECTORS; v++) {
                    if (OFFSET) acc[v] = fma(of_row, offset[c][v], acc[v]);
                    acc[v] = fma(load(products[c] + i * PANEL + v * LANES), scale[c][v], acc[v]);
                }
            }
            for (int v = 0; v < VECTORS; v++) store(out + i * ldo + v * LANES, acc[v]);
        }
    }

    int first_ = 0, second_ = 0;
};
