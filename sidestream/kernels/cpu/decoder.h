// The native interpreter of a DecoderSpec: one call runs a whole step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common.h"
#include "memory.h"
#include "pack.h"

namespace sidestream {

struct Spec {
    int vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size, rotary;
    float norm_eps, attention_scale, embedding_scale, logit_scale;
    Activation activation;
    bool qk_norm;
    std::vector<int> windows;  // per layer, 0 = full
};

// A product of one or more matrices with the same input; their outputs follow each other, each padded to whole panels.
struct Linear {
    std::vector<Matrix> parts;
    float* bias = nullptr;  // [32 * panels()] or null
    int panels() const {
        int n = 0;
        for (const Matrix& part : parts) n += part.panels;
        return n;
    }
};

struct Layer {
    float *attn_norm = nullptr, *mlp_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr;
    Linear qkv, o, gate_up, down;
};

// Rows of the step, packed: out[i, j] = layer layers[j] of token rows[i].
struct Tap {
    const std::int64_t* rows;
    int num_rows;
    std::vector<int> layers;
    RowType type;
    void* out;
};

struct Step {
    int num_spans;
    const std::int64_t *slots, *starts, *lengths;  // [num_spans]
    const std::int32_t* token_table;               // [slots, token_stride]
    std::int64_t token_stride;
    const std::int32_t* page_table;  // [slots, page_stride]
    std::int64_t page_stride;
    int page_size;      // a power of two
    bf16 *keys, *values;  // [layers, positions, kv_heads, head_dim]
    std::int64_t layer_stride;
    std::vector<Tap> taps;
    bf16* hidden;  // [tokens, hidden] out: after the final norm
    const std::int64_t* logit_rows;  // [num_logit_rows] tokens whose logits are wanted
    int num_logit_rows;
    float* logits;  // [num_logit_rows, vocab] out
};

// Int8Rows that grow.
class Int8Buffer {
public:
    void reserve(std::size_t count) {
        values_.reserve(count);
        scales_.reserve(count / GROUP);
        sums_.reserve(count / GROUP);
        offsets_.reserve(count / GROUP);
    }
    Int8Rows rows(std::ptrdiff_t ld) { return {values_.get(), scales_.get(), sums_.get(), offsets_.get(), ld}; }

private:
    Buffer<std::int8_t> values_;
    Buffer<float> scales_, sums_;
    Buffer<std::int32_t> offsets_;
};

class Decoder {
public:
    // integer: every matrix is packed for 8-bit activations.
    Decoder(const Kernels& kernels, Spec spec, bool integer, const float* cos, const float* sin, int context);

    void set_vector(float*& place, const float* values, int n);
    void set_bias(Linear& linear, const std::vector<std::pair<const float*, int>>& parts, bool alternate);

    void forward(const Step& step, int threads);
    // hidden [rows, hidden] -> logits [rows, vocab]
    void logits(const bf16* hidden, int rows, float* out, int threads);

    const Kernels& kernels;
    const Spec spec;
    const bool integer;
    Arena arena;
    std::vector<Layer> layers;
    Linear embedding, head;  // head is empty when tied
    float* final_norm = nullptr;

private:
    struct Tile {   // rows of one span, over all splits
        int row, count;
    };
    struct Group {  // single rows that share the pages of one split
        int split, begin, count;  // into group_rows_
    };

    struct Carve;

    void plan(const Step& step, int threads);
    void reserve(int tokens, int logit_rows, int threads);
    void prepare(const bf16* x, int width, std::ptrdiff_t row);
    void linear(const Linear& w, const MatmulJob& job, void* scratch) const;
    template <class RowOf> void project(int rows, RowOf&& row_of, float* out, char* scratch);
    void attention(const Step& step, int layer, char* scratch);
    AttendJob queries_of(const Step& step, int layer, int head, const int* rows, int count, Carve& carve);
    void attend_tile(const Step& step, int layer, const Tile& tile, int head, char* scratch);
    void attend_group(const Step& step, int layer, const Group& group, int head, char* scratch, Upcoming* upcoming);
    void merge_row(int row);
    void write_taps(const Step& step, int layer, bool normed, char* scratch);
    KVView view(const Step& step, int layer, int slot, int head) const;

    int padded_hidden_, padded_attention_, padded_intermediate_, padded_head_, query_width_, kv_width_, group_size_, tile_rows_;
    std::size_t scratch_bytes_;
    std::vector<float> cos_, sin_;

    // One step's plan.
    std::vector<int> row_slot_, row_position_, single_rows_, group_rows_;
    std::vector<std::int64_t> part_offset_;  // per row, in parts; -1 for the rows of tiles
    std::vector<Tile> tiles_;
    std::vector<Group> groups_;
    int num_parts_ = 0;
    bool heads_together_ = false;

    Buffer<float> x_, qkv_, sums_, act_sums_, parts_, part_max_, part_sum_;
    Buffer<bf16> normed_, q_, attended_, act_, head_rows_;
    Int8Buffer x8_, act8_;
    std::vector<Buffer<char>> scratch_;
};

}  // namespace sidestream
