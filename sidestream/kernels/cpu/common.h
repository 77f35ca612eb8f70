// What the translation units of the native backend share: number formats, packed weights, and the table of kernels that one
// instruction set provides. This header is included by files that are compiled for different instruction sets: its few functions are inlined
// always, or the linker could take one that uses instructions the processor lacks.
#pragma once

#define SIDESTREAM_INLINE __attribute__((always_inline)) inline

#include <cstddef>
#include <cstdint>

namespace sidestream {

using bf16 = std::uint16_t;  // bit pattern of a bfloat16
using f16 = std::uint16_t;   // bit pattern of an IEEE half

constexpr int PANEL = 32;   // output columns of a packed panel
constexpr int GROUP = 32;   // weights that share a scale (GGUF Q4_0, Q4_1, Q8_0)
constexpr int SPLIT = 256;  // keys of one part of attention; parts begin at multiples of it, whatever the page size
constexpr int MAX_QUERIES = 192;  // query vectors for which one attention tile packs keys and values
constexpr int SCORE_ROWS = 32;    // of which so many are scored at a time

// A matrix [rows, cols] (y = x W^T: rows are outputs), packed in panels of 32 outputs.
//   BF16  data: bf16   [panels][cols/32][2 halves of 16 outputs][16 pairs of k][16][2]: a half is one tile of the matrix unit
//   Q4    data: uint32 [panels][cols/32][4 words j][32]: bits 4i hold k = 8j+2i, bits 16+4i hold k = 8j+2i+1, for i = 0..3
//   Q8    data: int8   [panels][cols/32][8 quads][2 halves of 16 outputs][4][2 pairs][4 outputs][2]
//   I4    data: uint8  [panels][cols/32][4 quads q][32][4]: the low half of a byte i holds k = 4q+i, the high half k = 16+4q+i
//   I8    data: uint8  [panels][cols/32][8 quads][32][4]: 128 + the integer
//   scales: f16 [panels][cols/32][32], and for minima (Q4_1) as many again behind each group's scales: [2][32]
// BF16, Q4 and Q8 are multiplied with bf16 activations, I4 and I8 hold what Q4 and Q8 hold, for 8-bit activations.
enum class Format : int { BF16 = 0, Q4 = 1, Q8 = 2, I4 = 3, I8 = 4 };

constexpr SIDESTREAM_INLINE bool is_integer(Format format) { return format == Format::I4 || format == Format::I8; }

struct Matrix {
    Format format = Format::BF16;
    bool minima = false;  // Q4, I4 only: w = s q + m; without, w = s (q - 8)
    int rows = 0;
    int cols = 0;    // stored columns: a multiple of 32, zero beyond the source's
    int panels = 0;  // ceil(rows / 32); the last one is padded with zeros
    const void* data = nullptr;
    const f16* scales = nullptr;
};

// Rows of activations.
struct Rows {
    const bf16* x = nullptr;      // [rows, ld], zero beyond the model's own width
    const float* sums = nullptr;  // [rows, ld / 32] sums of each 32 x; used by Q4
    std::ptrdiff_t ld = 0;        // a multiple of 32
    SIDESTREAM_INLINE Rows from(std::ptrdiff_t row) const { return {x + row * ld, sums ? sums + row * (ld / GROUP) : nullptr, ld}; }
};

// Rows of activations rounded to 8 bits, x = scale * value, with a scale for each 32 of them.
struct Int8Rows {
    std::int8_t* values = nullptr;  // [rows, ld] from -127 to 127
    float* scales = nullptr;        // [rows, ld / 32]
    float* sums = nullptr;          // likewise: scale * sum of the values, which minima of weights are multiplied by
    std::int32_t* offsets = nullptr;  // likewise: -8 * sum of the values, where a dot product with weights stored as 8 + q starts
    std::ptrdiff_t ld = 0;          // a multiple of 32
    SIDESTREAM_INLINE Int8Rows from(std::ptrdiff_t row, std::ptrdiff_t group = 0) const {
        const std::ptrdiff_t at = row * (ld / GROUP) + group;
        return {values + row * ld + group * GROUP, scales + at, sums + at, offsets + at, ld};
    }
};

enum class Activation : int { SILU = 0, GELU = 1, GELU_TANH = 2 };

// What becomes of the float32 products of a matrix.
enum class Epilogue : int {
    STORE = 0,    // y[row, column] = product + bias
    ADD = 1,      // y[row, column] += product + bias
    GATE_UP = 2,  // panels alternate gate, up: act[row, column] = bf16(activation(gate) * up), and its group sums
};

struct MatmulJob {
    const Matrix* w;
    Rows x;
    int rows;
    Epilogue epilogue;
    float* y;  // STORE, ADD: [rows, ldy], column 0 is the matrix's first
    std::ptrdiff_t ldy;
    const float* bias;  // [32 * panels] or null
    Activation activation;
    bf16* act;  // GATE_UP: [rows, ldact]
    std::ptrdiff_t ldact;
    float* act_sums;  // [rows, ldact / 32]
    float scale;  // STORE: products are multiplied by it
    Int8Rows x8, act8;  // for I4 and I8, in place of x, and beside act in place of act_sums
};

// Keys and values of one request in one layer, for one key head.
struct KVView {
    const bf16* keys;    // of token position 0 of page 0, this head
    const bf16* values;
    std::ptrdiff_t stride;      // elements between token positions of a page
    const std::int32_t* pages;  // page of each `page_size` positions
    int page_shift;             // log2 of the page size
    int ahead;                  // elements of a position to fetch early: the head's, or also those of the heads behind it
};

// Keys and values that will be wanted soon, all heads of them: fetched little by little while something else is computed.
struct Upcoming {
    KVView kv;
    int position, end;
    int each;  // positions a call
};

// One part of attention: `queries` query vectors against the keys [SPLIT * split, SPLIT * (split + 1)) that each may see.
struct AttendJob {
    KVView kv;
    int split;
    int head_dim;
    int padded_dim;  // head_dim rounded up to 32
    int queries;     // any number
    const bf16* q;   // [queries, padded_dim], zero beyond the head
    const int* first;  // [queries] absolute position of the first key that a query sees
    const int* last;   // [queries] of the last one; every query sees at least one key of some split, perhaps none of this one
    float scale;
    float* max;  // [queries] out: largest score, -inf where no key of this split is seen, NaN if all seen are
    float* sum;  // [queries] out: sum of exp(score - max)
    float* out;  // [queries, padded_dim] out: sum of exp(score - max) * value
    void* scratch;  // attend_scratch_bytes(head_dim)
    Upcoming* upcoming;  // or null
};

enum class RowType : int { BF16 = 0, F32 = 1, F16 = 2 };

struct Kernels {
    const char* isa;
    // y[panel_begin .. panel_end) of a job. scratch: matmul_scratch_bytes(cols).
    void (*matmul)(const MatmulJob& job, int panel_begin, int panel_end, void* scratch);
    // out = bf16(x / rms(x) * weight), zero from n up to a multiple of 32.
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, bf16* out);
    // One row of an embedding matrix as float32, times scale.
    void (*embed)(const Matrix& w, int row, float scale, float* out);
    // One head: optional rms norm over the head, rotary embedding of its first `rotary` dimensions, rounding.
    void (*rope)(const float* x, const float* norm_weight, float eps, const float* cos, const float* sin, int rotary, int head_dim, bf16* out);
    void (*to_bf16)(const float* x, int n, bf16* out);
    void (*attend)(const AttendJob& job);
    // Merge a part into the running (max, sum, out) of one query; start with (-inf, 0, 0). Parts must come in order.
    void (*merge)(float part_max, float part_sum, const float* part, int padded_dim, float* max, float* sum, float* out);
    // out = bf16(acc / sum)
    void (*finish)(const float* acc, float sum, int head_dim, bf16* out);
    void (*group_sums)(const bf16* x, int n, float* sums);
    // n bf16 to one row of 8-bit integers. n: a multiple of 32.
    void (*quantize)(const bf16* x, int n, const Int8Rows& out);
    // Rows for the outputs: float32 to a row type. n any.
    void (*convert)(const float* x, int n, RowType type, void* out);
    void (*widen)(const bf16* x, int n, float* out);
    // Sampling help over one row of logits.
    // A copy in which what the mask does not admit is -inf: id i is bit i % 32 of word i / 32.
    void (*admit)(const float* x, const std::uint32_t* mask, int n, float* out);
    int (*argmax)(const float* x, int n, float* value);  // the first of equal ones; a NaN is larger than every number
    float (*logsumexp)(const float* x, int n);
    // The k best, best first, of equal ones the lower id first. k <= n.
    void (*top_k)(const float* x, int n, int k, float* values, std::int32_t* ids);
    // The smallest x of the nucleus: of the best ids that together have at least `mass` of sum(exp(x)).
    float (*nucleus)(const float* x, int n, float mass);
    // The first id whose cumulative sum of exp(x), in the order of ids, passes `uniform` of the whole. An id of weight 0 never does.
    int (*draw)(const float* x, int n, double uniform);
    // The machine's limits (limits_impl.h).
    float (*read_floats)(const float* p, std::ptrdiff_t n) = nullptr;
    double (*dot_pairs)(std::int64_t rounds, float* sink) = nullptr;
};

constexpr SIDESTREAM_INLINE std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

// The tile of products in float32, and behind it a panel that is expanded to bf16 when many rows use it.
constexpr std::size_t TILE_BYTES = 512 * PANEL * sizeof(float);
constexpr SIDESTREAM_INLINE std::size_t matmul_scratch_bytes(std::size_t cols) { return TILE_BYTES + PANEL * round_up(cols, GROUP) * sizeof(bf16); }

constexpr SIDESTREAM_INLINE std::size_t attend_scratch_bytes(std::size_t head_dim) {
    const std::size_t padded = round_up(head_dim, PANEL);
    return SPLIT * padded * 2 * sizeof(bf16)                // packed keys and values
           + SCORE_ROWS * SPLIT * (sizeof(float) + sizeof(bf16))  // scores and probabilities
           + 256;
}

const Kernels& kernels_portable();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_amx();
#endif

}  // namespace sidestream
