// Integer products: activations of 8 bits times weights of 4 or 8 bits, each with a scale for every 32 of them (weights perhaps with a
// minimum too). Included after kernels_impl.h by one .cpp for each instruction set.
//
// The dot product of a group is exact in int32 in whatever order; the groups are added upward in float32, in one chain for each output.
// So the bits of a row depend neither on the number of rows nor on the shape of a tile.

namespace {

constexpr int INTEGER_PANELS = 2;  // panels whose products wait for the epilogue together: a gate and its up
static_assert(VECTORS % INTEGER_VECTORS == 0 && INTEGER_PANELS <= BLOCK_PANELS, "tiles fill a panel, and fit the scratch");

#if defined(__AMX_INT8__)
constexpr int MATRIX_UNIT_ROWS = 8;  // from here on the matrix unit is faster
#endif

constexpr int group_bytes(int bits) { return GROUP * PANEL * bits / 8; }

// M rows x INTEGER_VECTORS vectors of one panel.
template <int BITS, bool MINIMA, int M>
inline void tile_integer(const Int8Rows& x, int groups, const std::uint8_t* w, const f16* scales, float* out, std::ptrdiff_t ldo) {
    constexpr int V = INTEGER_VECTORS;
    const std::ptrdiff_t ldg = x.ld / GROUP;
    F acc[M][V];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) acc[i][v] = zero();
    for (int g = 0; g < groups; g++) {
        I dots[M][V];
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            // Weights are stored as 8 + q or 128 + q: the dot product starts at minus what that adds.
            const I start = set1_int(MINIMA ? 0 : BITS == 4 ? x.offsets[i * ldg + g] : 16 * x.offsets[i * ldg + g]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) dots[i][v] = start;
        }
        const std::int8_t* values = x.values + g * GROUP;
#pragma GCC unroll 8
        for (int quad = 0; quad < BITS; quad++) {
            Quads first[V], second[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const std::uint8_t* at = w + quad * (4 * PANEL) + v * (4 * LANES);
                prefetch(at + 16384);
                first[v] = load_quads(at);
                if (BITS == 4) {
                    second[v] = high_nibbles(first[v]);
                    first[v] = low_nibbles(first[v]);
                }
            }
#pragma GCC unroll 16
            for (int i = 0; i < M; i++) {
                const Quad a = broadcast_quad(values + i * x.ld + 4 * quad);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) dots[i][v] = BITS == 4 ? dot_nibbles(dots[i][v], first[v], a) : dot_bytes(dots[i][v], first[v], a);
                if (BITS == 4) {
                    const Quad b = broadcast_quad(values + i * x.ld + 16 + 4 * quad);
#pragma GCC unroll 4
                    for (int v = 0; v < V; v++) dots[i][v] = dot_nibbles(dots[i][v], second[v], b);
                }
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            const F scale = load_f16(scales + v * LANES), minimum = MINIMA ? load_f16(scales + PANEL + v * LANES) : zero();
#pragma GCC unroll 16
            for (int i = 0; i < M; i++) {
                acc[i][v] = fma(mul(to_float(dots[i][v]), set1(x.scales[i * ldg + g])), scale, acc[i][v]);
                if (MINIMA) acc[i][v] = fma(set1(x.sums[i * ldg + g]), minimum, acc[i][v]);
            }
        }
        w += group_bytes(BITS);
        scales += MINIMA ? 2 * PANEL : PANEL;
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(out + i * ldo + v * LANES, acc[i][v]);
}

template <int BITS, bool MINIMA, int M>
inline void rows_integer(int m, const Int8Rows& x, int groups, const std::uint8_t* w, const f16* scales, float* out, std::ptrdiff_t ldo) {
    if constexpr (M > 1) {
        if (m < M) return rows_integer<BITS, MINIMA, M - 1>(m, x, groups, w, scales, out, ldo);
    }
    for (int v = 0; v < VECTORS; v += INTEGER_VECTORS)
        tile_integer<BITS, MINIMA, M>(x, groups, w + v * (4 * LANES), scales + v * LANES, out + v * LANES, ldo);
}

template <int BITS, bool MINIMA>
inline void panels_integer(const MatmulJob& job, int panel_begin, int panel_end, float* tile) {
    const int groups = job.w->cols / GROUP;
    const std::ptrdiff_t panel_bytes = (std::ptrdiff_t)groups * group_bytes(BITS);
    const std::ptrdiff_t panel_scales = (std::ptrdiff_t)groups * PANEL * (MINIMA ? 2 : 1);
#if defined(__AMX_INT8__)
    Tiles tiles(nullptr);
#endif
    for (int panel = panel_begin; panel < panel_end; panel += INTEGER_PANELS) {
        const int panels = panel_end - panel < INTEGER_PANELS ? panel_end - panel : INTEGER_PANELS;
        const std::ptrdiff_t ldt = panels * PANEL;
        const std::uint8_t* weights = (const std::uint8_t*)job.w->data + panel * panel_bytes;
        const f16* scales = job.w->scales + panel * panel_scales;
        for (int row = 0; row < job.rows;) {
            const int rows = piece_of(job.rows - row, ROW_BLOCK);
            int left = panels;  // for vectors
#if defined(__AMX_INT8__)
            if (rows >= MATRIX_UNIT_ROWS) {
                tiles.integers<BITS, MINIMA>(rows, panels, job.x8.from(row), groups, weights, scales, tile, ldt);
                left = 0;
            }
#endif
            for (int p = 0; p < left; p++)
                for (int i = 0; i < rows;) {
                    const int m = piece_of(rows - i, MAX_INTEGER_ROWS);
                    rows_integer<BITS, MINIMA, MAX_INTEGER_ROWS>(m, job.x8.from(row + i), groups, weights + p * panel_bytes,
                                                                 scales + p * panel_scales, tile + i * ldt + p * PANEL, ldt);
                    i += m;
                }
            epilogue(job, tile, ldt, row, rows, panel, panels);
            row += rows;
        }
    }
}

void matmul_integer(const MatmulJob& job, int panel_begin, int panel_end, float* tile) {
    if (job.w->format == Format::I8)
        panels_integer<8, false>(job, panel_begin, panel_end, tile);
    else if (job.w->minima)
        panels_integer<4, true>(job, panel_begin, panel_end, tile);
    else
        panels_integer<4, false>(job, panel_begin, panel_end, tile);
}

// Symmetric: the largest magnitude of a group becomes 127. A group that is not finite gets scale NaN, so that it is seen.
void quantize(const bf16* x, int n, const Int8Rows& out) {
    for (int g = 0; g * GROUP < n; g++) {
        F values[VECTORS], most = zero(), total = zero();
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            values[v] = load_bf16(x + g * GROUP + v * LANES);
            most = max(max(values[v], sub(zero(), values[v])), most);
        }
        const float largest = reduce_max(most);
        const F inverse = set1(largest > 1e-30f ? 127.0f / largest : 0.0f);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const F integers = round(mul(values[v], inverse));
            store_int8(out.values + g * GROUP + v * LANES, integers);
            total = add(total, integers);
        }
        const float sum = reduce_add(total);  // exact
        const float scale = sum == sum ? largest / 127.0f : sum;
        out.scales[g] = scale;
        out.sums[g] = scale * sum;
        out.offsets[g] = sum == sum ? -8 * (std::int32_t)sum : 0;
    }
}

float integer_weight(const Matrix& w, int row, int column) {
    const std::ptrdiff_t group = (std::ptrdiff_t)(row / PANEL) * (w.cols / GROUP) + column / GROUP;
    const int output = row % PANEL, k = column % GROUP;
    const f16* scales = w.scales + group * (w.minima ? 2 * PANEL : PANEL) + output;
    const f16 halves[LANES] = {scales[0], w.minima ? scales[PANEL] : (f16)0};
    float wide[LANES];
    store(wide, load_f16(halves));
    const std::uint8_t* data = (const std::uint8_t*)w.data + output * 4 + k % 4;
    if (w.format == Format::I8) return wide[0] * (float)(data[group * group_bytes(8) + k / 4 * (4 * PANEL)] - 128);
    const int q = data[group * group_bytes(4) + k % 16 / 4 * (4 * PANEL)] >> (k / 16 * 4) & 15;
    return w.minima ? wide[0] * (float)q + wide[1] : wide[0] * (float)(q - 8);
}

}  // namespace
