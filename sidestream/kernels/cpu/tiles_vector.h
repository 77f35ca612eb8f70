// Tiles of vector registers. Included by kernels_impl.h, in its anonymous namespace.

constexpr int ROW_BLOCK = 60;    // rows whose products wait for the epilogue
constexpr int BLOCK_PANELS = 4;  // panels likewise
constexpr int EXPAND_ROWS = 16;  // from here on quantised panels are first expanded to bf16 integers

// A panel of which every group was expanded.
template <bool WITH_OFFSET> struct ExpandedSource {
    const bf16* data;
    std::ptrdiff_t panel_stride;  // elements
    static constexpr bool OFFSET = WITH_OFFSET;
    template <int NP, class Take> inline void group(int g, Take&& take) const {
        const bf16* base = data + (std::ptrdiff_t)g * (GROUP * PANEL);
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++) {
            Pairs w[NP * VECTORS];
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) w[p * VECTORS + v] = load_pairs(base + p * panel_stride + pairs_at(v, k));
            take(k, w);
        }
    }
};

// M rows x NP panels of bf16 weights. w: first pair of the first panel; panels follow each other at `panel_stride` elements.
template <int M, int NP>
inline void tile_bf16(const Rows& x, int groups, const bf16* w, std::ptrdiff_t panel_stride, float* out, std::ptrdiff_t ldo) {
    F acc[M][NP * VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 16
        for (int j = 0; j < NP * VECTORS; j++) acc[i][j] = zero();
    for (int g = 0; g < groups; g++, w += GROUP * PANEL)
        for (int k = 0; k < GROUP / 2; k++) {
            Pairs weights[NP * VECTORS];
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++) {
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) {
                    const bf16* at = w + p * panel_stride + pairs_at(v, k);
                    if (v * LANES % 16 == 0) prefetch(at + 512);
                    weights[p * VECTORS + v] = load_pairs(at);
                }
            }
#pragma GCC unroll 16
            for (int i = 0; i < M; i++) {
                const Pair b = broadcast_pair(x.x + i * x.ld + g * GROUP + 2 * k);
#pragma GCC unroll 16
                for (int j = 0; j < NP * VECTORS; j++) acc[i][j] = dot(acc[i][j], weights[j], b);
            }
        }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 16
        for (int j = 0; j < NP * VECTORS; j++) store(out + i * ldo + j * LANES, acc[i][j]);
}

template <int M, int NP, class Source>
inline void tile_grouped(const Rows& x, int groups, const Source& source, const GroupScales& scales, float* out, std::ptrdiff_t ldo) {
    const std::ptrdiff_t ldsums = x.ld / GROUP;
    F acc[M][NP * VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 16
        for (int j = 0; j < NP * VECTORS; j++) acc[i][j] = zero();
    for (int g = 0; g < groups; g++) {
        F d[M][NP * VECTORS];
#pragma GCC unroll 16
        for (int i = 0; i < M; i++)
#pragma GCC unroll 16
            for (int j = 0; j < NP * VECTORS; j++) d[i][j] = zero();
        const bf16* xg = x.x + (std::ptrdiff_t)g * GROUP;
        source.template group<NP>(g, [&](int pair, const Pairs* w) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int i = 0; i < M; i++) {
                const Pair b = broadcast_pair(xg + i * x.ld + 2 * pair);
#pragma GCC unroll 16
                for (int j = 0; j < NP * VECTORS; j++) d[i][j] = dot(d[i][j], w[j], b);
            }
        });
#pragma GCC unroll 8
        for (int p = 0; p < NP; p++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                F scale, offset;
                scales.load_group(g, p, v, scale, offset);
                const int j = p * VECTORS + v;
#pragma GCC unroll 16
                for (int i = 0; i < M; i++) {
                    if (Source::OFFSET) acc[i][j] = fma(set1(x.sums[i * ldsums + g]), offset, acc[i][j]);
                    acc[i][j] = fma(d[i][j], scale, acc[i][j]);
                }
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 16
        for (int j = 0; j < NP * VECTORS; j++) store(out + i * ldo + j * LANES, acc[i][j]);
}

// Panels that a tile of M rows takes together, so that enough independent chains hide the latency of a dot product.
constexpr int panels_for(int rows) {
    return rows * VECTORS >= MIN_CHAINS ? 1 : rows * 2 * VECTORS >= MIN_CHAINS ? 2 : 4;
}

template <int M, int NP>
inline void rows_bf16(int m, int np, const Rows& x, int groups, const bf16* w, std::ptrdiff_t stride, float* out, std::ptrdiff_t ldo) {
    if constexpr (M > 1) {
        if (m < M) return rows_bf16<M - 1, panels_for(M - 1)>(m, np, x, groups, w, stride, out, ldo);
    }
    int p = 0;
    for (; p + NP <= np; p += NP) tile_bf16<M, NP>(x, groups, w + p * stride, stride, out + p * PANEL, ldo);
    if constexpr (NP > 2) {
        for (; p + 2 <= np; p += 2) tile_bf16<M, 2>(x, groups, w + p * stride, stride, out + p * PANEL, ldo);
    }
    for (; p < np; p++) tile_bf16<M, 1>(x, groups, w + p * stride, stride, out + p * PANEL, ldo);
}

template <int M, int NP, class Source>
inline void rows_grouped(int m, int np, const Rows& x, int groups, Source source, GroupScales scales, float* out, std::ptrdiff_t ldo) {
    if constexpr (M > 1) {
        if (m < M) return rows_grouped<M - 1, panels_for(M - 1), Source>(m, np, x, groups, source, scales, out, ldo);
    }
    while (np > 0) {
        const int step = np >= NP ? NP : NP > 2 && np >= 2 ? 2 : 1;
        if (step == NP)
            tile_grouped<M, NP>(x, groups, source, scales, out, ldo);
        else if (step == 2)
            tile_grouped<M, 2>(x, groups, source, scales, out, ldo);
        else
            tile_grouped<M, 1>(x, groups, source, scales, out, ldo);
        np -= step;
        source.data += step * source.panel_stride;
        scales.data += step * scales.panel_stride;
        out += step * PANEL;
    }
}

class Tiles {
public:
    // panel: room for one that is expanded; not used by `plain`.
    explicit Tiles(bf16* panel) : panel_(panel) {}

    // rows of x, np panels of weights -> out: [rows, 32 np] of [rows, ldo]. cols: a multiple of 32.
    void plain(int rows, int np, const Rows& x, int cols, const bf16* w, std::ptrdiff_t panel_stride, float* out, std::ptrdiff_t ldo) {
        for (int i = 0; i < rows;) {
            const int m = piece_of(rows - i, MAX_ROWS);
            rows_bf16<MAX_ROWS, panels_for(MAX_ROWS)>(m, np, x.from(i), cols / GROUP, w, panel_stride, out + i * ldo, ldo);
            i += m;
        }
    }

    // The same for quantised weights.
    template <class Source>
    void grouped(int rows, int np, const Rows& x, int groups, const Source& source, const GroupScales& scales, float* out, std::ptrdiff_t ldo) {
        if (rows < EXPAND_ROWS) return pieces(rows, np, x, groups, source, scales, out, ldo);
        for (int p = 0; p < np; p++) {
            const Source one{source.data + p * source.panel_stride, 0};
            for (int g = 0; g < groups; g++) expand_group(one, g, panel_ + (std::ptrdiff_t)g * (GROUP * PANEL));
            const GroupScales its{scales.data + p * scales.panel_stride, 0, scales.minima};
            pieces(rows, 1, x, groups, ExpandedSource<Source::OFFSET>{panel_, 0}, its, out + p * PANEL, ldo);
        }
    }

private:
    template <class Source>
    static void pieces(int rows, int np, const Rows& x, int groups, const Source& source, const GroupScales& scales, float* out, std::ptrdiff_t ldo) {
        for (int i = 0; i < rows;) {
            const int m = piece_of(rows - i, MAX_GROUPED_ROWS);
            rows_grouped<MAX_GROUPED_ROWS, panels_for(MAX_GROUPED_ROWS)>(m, np, x.from(i), groups, source, scales, out + i * ldo, ldo);
            i += m;
        }
    }

    bf16* panel_;
};
