// The kernels, written once over the vector types of one instruction set. Included by one .cpp for each, after its vec_*.h.
//
// Everything is in an anonymous namespace and nothing of the standard library's templates is used: a function that two files share
// by name would be taken by the linker from either, and might then use instructions the processor lacks.
//
// One order of additions: whatever the number of rows, an output is summed over k upward in one chain (BF16; with the matrix unit as
// tiles_amx.h says), or over the pairs of a group likewise and then over the groups (Q4, Q8). Tiles of different shape only decide which outputs are computed together.

namespace {

using namespace sidestream;

constexpr int VECTORS = PANEL / LANES;

// integer_impl.h, included after this file
void matmul_integer(const MatmulJob& job, int panel_begin, int panel_end, float* tile);
void quantize(const bf16* x, int n, const Int8Rows& out);
float integer_weight(const Matrix& w, int row, int column);

// ---------------------------------------------------------------- elementary functions

// Relative error below 2e-7; exactly 1 at 0, exactly 0 below -87 and at -inf, NaN at NaN.
inline F exponential(F x) {
    const F low = set1(-87.0f), high = set1(88.0f);
    const F v = min(high, max(low, x));  // in this order a NaN stays
    const F n = round(mul(v, set1(1.44269504088896341f)));
    F r = fma(n, set1(-0.693359375f), v);
    r = fma(n, set1(2.12194440e-4f), r);
    F p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), set1(1.0f));
    return inside(x, low, set1(__builtin_inff()), scale_by_power(p, n), zero());
}

// 2^x for x <= 0, to a relative 1e-4: finer than the bfloat16 it becomes. Exactly 1 at 0, 0 at -inf, NaN at NaN.
inline F coarse_power(F x) {
    const F f = fraction(x);
    F p = fma(set1(0.0770672f), f, set1(0.22764482f));
    p = fma(p, f, set1(0.69511682f));
    p = fma(p, f, set1(1.0f));
    return scale_by_floor(p, x);
}

inline F activate(Activation kind, F x) {
    const F one = set1(1.0f);
    switch (kind) {
        case Activation::SILU: return div(x, add(one, exponential(sub(zero(), x))));
        case Activation::GELU_TANH: {
            // 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u))
            const F u = mul(set1(0.79788456080286536f), fma(mul(set1(0.044715f), mul(x, x)), x, x));
            return div(x, add(one, exponential(mul(set1(-2.0f), u))));
        }
        default: {
            float lanes[LANES];
            store(lanes, x);
            for (int i = 0; i < LANES; i++) lanes[i] = 0.5f * lanes[i] * (1.0f + __builtin_erff(lanes[i] * 0.70710678118654752f));
            return load(lanes);
        }
    }
}

// ---------------------------------------------------------------- products

// Where vector v of a pair stands in a group of a bf16 panel.
constexpr int pairs_at(int v, int pair) { return v * LANES / 16 * (GROUP * 16) + pair * 32 + v * LANES % 16 * 2; }

// Where the weights of a quantised group come from: `group` hands over its 16 pairs of NP panels, one after the other, as bf16 integers.
struct NibbleSource {
    const std::uint32_t* data;
    std::ptrdiff_t panel_stride;  // words
    static constexpr bool OFFSET = true;
    template <int NP, class Take> inline void group(int g, Take&& take) const {
        const std::uint32_t* base = data + (std::ptrdiff_t)g * (4 * PANEL);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            Pairs w0[NP * VECTORS], w1[NP * VECTORS], w2[NP * VECTORS], w3[NP * VECTORS];
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) {
                    const std::uint32_t* at = base + p * panel_stride + j * PANEL + v * LANES;
                    prefetch(at + 4096);
                    const Nibbles n(at);
                    w0[p * VECTORS + v] = n.pairs<0>();
                    w1[p * VECTORS + v] = n.pairs<1>();
                    w2[p * VECTORS + v] = n.pairs<2>();
                    w3[p * VECTORS + v] = n.pairs<3>();
                }
            take(4 * j, w0);
            take(4 * j + 1, w1);
            take(4 * j + 2, w2);
            take(4 * j + 3, w3);
        }
    }
};

struct ByteSource {
    const std::int8_t* data;
    std::ptrdiff_t panel_stride;  // bytes
    static constexpr bool OFFSET = false;
    template <int NP, class Take> inline void group(int g, Take&& take) const {
        const std::int8_t* base = data + (std::ptrdiff_t)g * (GROUP * PANEL);
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; quad++) {
            Pairs w0[NP * VECTORS], w1[NP * VECTORS];
#pragma GCC unroll 8
            for (int p = 0; p < NP; p++)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) {
                    const std::int8_t* at = base + p * panel_stride + quad * (4 * PANEL) + v * (4 * LANES);
                    prefetch(at + 16384);
                    const Bytes n(at);
                    w0[p * VECTORS + v] = n.pairs<0>();
                    w1[p * VECTORS + v] = n.pairs<1>();
                }
            take(2 * quad, w0);
            take(2 * quad + 1, w1);
        }
    }
};

struct GroupScales {
    const f16* data;
    std::ptrdiff_t panel_stride;
    bool minima;
    // Scale, and what the sum of x is multiplied by: weights are s (128 + q) + offset.
    inline void load_group(int g, int p, int v, F& scale, F& offset) const {
        const f16* at = data + p * panel_stride + (std::ptrdiff_t)g * (minima ? 2 * PANEL : PANEL) + v * LANES;
        scale = load_f16(at);
        offset = minima ? fma(scale, set1(-128.0f), load_f16(at + PANEL)) : mul(scale, set1(-136.0f));
    }
};

// Rows in pieces as even as they can be: 13 are 7 and 6, not 12 and 1.
inline int piece_of(int left, int most) {
    const int pieces = (left + most - 1) / most;
    return (left + pieces - 1) / pieces;
}

// Writes a group of one panel as the bf16 panels are laid out.
template <class Source> inline void expand_group(const Source& source, int g, bf16* out) {
    source.template group<1>(g, [&](int pair, const Pairs* w) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store_pairs(out + pairs_at(v, pair), w[v]);
    });
}

// Products by tiles of vectors, or of the processor's matrix unit.
#if defined(__AMX_BF16__)
#include "tiles_amx.h"
#else
#include "tiles_vector.h"
#endif

static_assert(ROW_BLOCK * BLOCK_PANELS * PANEL * sizeof(float) <= TILE_BYTES, "the tile must fit its place in the scratch");

inline void add_group_sum(const bf16* x, float* sum) {
    F total = zero();
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) total = add(total, load_bf16(x + v * LANES));
    *sum = reduce_add(total);
}

template <bool ADD> inline void write_row(const float* from, float scale, const float* bias, float* y, int n) {
    if (scale == 1.0f && !bias) {
        for (int v = 0; v < n; v += LANES) store(y + v, ADD ? add(load(y + v), load(from + v)) : load(from + v));
        return;
    }
    const F factor = set1(scale);
    for (int v = 0; v < n; v += LANES) {
        F value = mul(load(from + v), factor);
        if (bias) value = add(value, load(bias + v));
        store(y + v, ADD ? add(load(y + v), value) : value);
    }
}

inline void epilogue(const MatmulJob& job, const float* tile, std::ptrdiff_t ldt, int row, int rows, int panel, int panels) {
    if (job.epilogue == Epilogue::GATE_UP) {
        for (int i = 0; i < rows; i++)
            for (int p = 0; p < panels; p += 2) {
                const float *gate = tile + i * ldt + p * PANEL, *up = gate + PANEL;
                const float *gate_bias = job.bias ? job.bias + (panel + p) * PANEL : nullptr, *up_bias = gate_bias ? gate_bias + PANEL : nullptr;
                const std::ptrdiff_t column = (std::ptrdiff_t)(panel + p) / 2 * PANEL;
                bf16* act = job.act + (row + i) * job.ldact + column;
#pragma GCC unroll 8
                for (int v = 0; v < PANEL; v += LANES) {
                    F g = load(gate + v), u = load(up + v);
                    if (job.bias) g = add(g, load(gate_bias + v)), u = add(u, load(up_bias + v));
                    store_bf16(act + v, mul(activate(job.activation, g), u));
                }
                if (job.act8.values)
                    quantize(act, GROUP, job.act8.from(row + i, column / GROUP));
                else
                    add_group_sum(act, job.act_sums + (row + i) * (job.ldact / GROUP) + column / GROUP);
            }
        return;
    }
    const int outputs = job.w->rows - panel * PANEL, whole = outputs < panels * PANEL ? outputs / LANES * LANES : panels * PANEL;
    const float* bias = job.bias ? job.bias + panel * PANEL : nullptr;
    for (int i = 0; i < rows; i++) {
        const float* from = tile + i * ldt;
        float* y = job.y + (row + i) * job.ldy + (std::ptrdiff_t)panel * PANEL;
        if (job.epilogue == Epilogue::ADD)
            write_row<true>(from, job.scale, bias, y, whole);
        else
            write_row<false>(from, job.scale, bias, y, whole);
        if (whole < outputs && whole < panels * PANEL) {  // the last outputs of a matrix
            const int left = outputs - whole;
            float last[LANES] = {};
            for (int c = 0; c < left; c++) last[c] = y[whole + c];
            if (job.epilogue == Epilogue::ADD)
                write_row<true>(from + whole, job.scale, bias ? bias + whole : nullptr, last, LANES);
            else
                write_row<false>(from + whole, job.scale, bias ? bias + whole : nullptr, last, LANES);
            for (int c = 0; c < left; c++) y[whole + c] = last[c];
        }
    }
}

void matmul(const MatmulJob& job, int panel_begin, int panel_end, void* scratch) {
    const Matrix& w = *job.w;
    if (is_integer(w.format)) return matmul_integer(job, panel_begin, panel_end, (float*)scratch);
    const std::ptrdiff_t cols = w.cols;
    const int groups = w.cols / GROUP;
    float* tile = (float*)scratch;
    Tiles tiles((bf16*)((char*)scratch + TILE_BYTES));
    for (int panel = panel_begin; panel < panel_end; panel += BLOCK_PANELS) {
        const int panels = panel_end - panel < BLOCK_PANELS ? panel_end - panel : BLOCK_PANELS;
        const std::ptrdiff_t ldt = panels * PANEL, panel_scales = (std::ptrdiff_t)groups * (w.minima ? 2 * PANEL : PANEL);
        const GroupScales scales{w.scales ? w.scales + panel * panel_scales : nullptr, panel_scales, w.minima};
        for (int row = 0; row < job.rows;) {
            const int rows = piece_of(job.rows - row, ROW_BLOCK);
            const Rows x = job.x.from(row);
            if (w.format == Format::BF16)
                tiles.plain(rows, panels, x, w.cols, (const bf16*)w.data + panel * (cols * PANEL), cols * PANEL, tile, ldt);
            else if (w.format == Format::Q4)
                tiles.grouped(rows, panels, x, groups, NibbleSource{(const std::uint32_t*)w.data + panel * (cols * 4), cols * 4}, scales, tile, ldt);
            else
                tiles.grouped(rows, panels, x, groups, ByteSource{(const std::int8_t*)w.data + panel * (cols * PANEL), cols * PANEL}, scales, tile, ldt);
            epilogue(job, tile, ldt, row, rows, panel, panels);
            row += rows;
        }
    }
}

// ---------------------------------------------------------------- rows

void group_sums(const bf16* x, int n, float* sums) {
    for (int g = 0; g * GROUP < n; g++) add_group_sum(x + g * GROUP, sums + g);
}

inline float inverse_rms(const float* x, int padded, int n, float eps) {
    F total = zero();
    for (int k = 0; k < padded; k += LANES) {
        const F v = load(x + k);
        total = fma(v, v, total);
    }
    return 1.0f / __builtin_sqrtf(reduce_add(total) / (float)n + eps);
}

void rms_norm(const float* x, const float* weight, float eps, int n, bf16* out) {
    const int padded = (int)round_up((std::size_t)n, PANEL);
    const F inverse = set1(inverse_rms(x, padded, n, eps));
    for (int k = 0; k < padded; k += LANES) store_bf16(out + k, mul(mul(load(x + k), inverse), load(weight + k)));
}

void embed(const Matrix& w, int row, float scale, float* out) {
    const int panel = row / PANEL, column = row % PANEL;
    const std::ptrdiff_t cols = w.cols;
    if (w.format == Format::BF16) {
        const bf16* half = (const bf16*)w.data + panel * (cols * PANEL) + column / 16 * (GROUP * 16) + column % 16 * 2;
        for (int k = 0; k < w.cols; k += 2) {
            const bf16* at = half + k / GROUP * (GROUP * PANEL) + k % GROUP / 2 * 32;
            const std::uint32_t first = (std::uint32_t)at[0] << 16, second = (std::uint32_t)at[1] << 16;
            __builtin_memcpy(out + k, &first, 4);
            __builtin_memcpy(out + k + 1, &second, 4);
        }
    } else if (is_integer(w.format)) {
        for (int k = 0; k < w.cols; k++) out[k] = integer_weight(w, row, k);
    } else {
        const int groups = w.cols / GROUP;
        for (int g = 0; g < groups; g++) {
            const f16* scales = w.scales + ((std::ptrdiff_t)panel * groups + g) * PANEL * (w.minima ? 2 : 1);
            f16 lanes[LANES] = {scales[column], w.minima ? scales[PANEL + column] : (f16)0};
            float wide[LANES];
            store(wide, load_f16(lanes));
            const float s = wide[0], m = wide[1];
            for (int k = 0; k < GROUP; k++) {
                if (w.format == Format::Q4) {
                    const std::uint32_t word = ((const std::uint32_t*)w.data)[panel * (cols * 4) + ((std::ptrdiff_t)g * 4 + k / 8) * PANEL + column];
                    const int q = (word >> (4 * (k % 8 / 2) + 16 * (k % 2))) & 15;
                    out[g * GROUP + k] = w.minima ? s * (float)q + m : s * (float)(q - 8);
                } else {
                    const std::int8_t* quad = (const std::int8_t*)w.data + panel * (cols * PANEL) + (std::ptrdiff_t)g * (GROUP * PANEL) + k / 4 * (4 * PANEL);
                    const int half = column / 16, lane = column % 16 / 4, within = column % 4;
                    out[g * GROUP + k] = s * (float)quad[half * 64 + lane * 16 + k % 4 / 2 * 8 + within * 2 + k % 2];
                }
            }
        }
    }
    if (scale != 1.0f)
        for (int k = 0; k < w.cols; k++) out[k] *= scale;
}

void to_bf16(const float* x, int n, bf16* out) {
    int k = 0;
    for (; k + LANES <= n; k += LANES) store_bf16(out + k, load(x + k));
    if (k < n) {
        float in[LANES] = {};
        bf16 rest[LANES];
        for (int i = k; i < n; i++) in[i - k] = x[i];
        store_bf16(rest, load(in));
        for (int i = k; i < n; i++) out[i] = rest[i - k];
    }
}

void rope(const float* x, const float* norm_weight, float eps, const float* cos, const float* sin, int rotary, int head_dim, bf16* out) {
    constexpr int MOST = 1024;  // checked when the model is built
    float head[MOST];
    const float* in = x;
    if (norm_weight) {
        float total = 0.0f;
        for (int k = 0; k < head_dim; k++) total += x[k] * x[k];
        const float inverse = 1.0f / __builtin_sqrtf(total / (float)head_dim + eps);
        for (int k = 0; k < head_dim; k++) head[k] = x[k] * inverse * norm_weight[k];
        in = head;
    }
    float turned[MOST];
    const int half = rotary / 2;
    for (int k = 0; k < half; k++) {
        turned[k] = in[k] * cos[k] - in[k + half] * sin[k];
        turned[k + half] = in[k + half] * cos[k] + in[k] * sin[k];
    }
    for (int k = rotary; k < head_dim; k++) turned[k] = in[k];
    to_bf16(turned, head_dim, out);
}

void convert(const float* x, int n, RowType type, void* out) {
    if (type == RowType::F32) {
        __builtin_memcpy(out, x, (std::size_t)n * sizeof(float));
    } else if (type == RowType::BF16) {
        to_bf16(x, n, (bf16*)out);
    } else {
        f16* to = (f16*)out;
        int k = 0;
        for (; k + LANES <= n; k += LANES) store_f16(to + k, load(x + k));
        if (k < n) {
            float in[LANES] = {};
            f16 rest[LANES];
            for (int i = k; i < n; i++) in[i - k] = x[i];
            store_f16(rest, load(in));
            for (int i = k; i < n; i++) to[i] = rest[i - k];
        }
    }
}

void widen(const bf16* x, int n, float* out) {
    for (int k = 0; k < n; k++) {
        const std::uint32_t bits = (std::uint32_t)x[k] << 16;
        __builtin_memcpy(out + k, &bits, 4);
    }
}

#include "attention_impl.h"
#include "sampling_impl.h"

constexpr Kernels table(const char* isa) {
    return Kernels{isa,    matmul, rms_norm, embed,      rope,    to_bf16, attend, merge,
                  finish, group_sums, quantize, convert, widen, admit, argmax, logsumexp, top_k, nucleus, draw};
}

}  // namespace
