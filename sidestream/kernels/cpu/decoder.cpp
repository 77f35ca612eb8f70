#include "decoder.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <unordered_map>

namespace sidestream {

namespace {

int padded(int n) { return static_cast<int>(round_up(static_cast<std::size_t>(n), PANEL)); }

int log2_of(int power) {
    int n = 0;
    while ((1 << n) < power) n++;
    return n;
}

}  // namespace

Decoder::Decoder(const Kernels& kernels_, Spec spec_, bool integer_, const float* cos, const float* sin, int context)
    : kernels(kernels_), spec(std::move(spec_)), integer(integer_), layers(static_cast<std::size_t>(spec.num_layers)) {
    query_width_ = padded(spec.num_heads * spec.head_dim);
    kv_width_ = padded(spec.num_kv_heads * spec.head_dim);
    padded_hidden_ = padded(spec.hidden_size);
    padded_attention_ = query_width_;
    padded_intermediate_ = padded(spec.intermediate_size);
    padded_head_ = padded(spec.head_dim);
    group_size_ = spec.num_heads / spec.num_kv_heads;
    tile_rows_ = std::max(1, MAX_QUERIES / group_size_);
    const std::size_t widest = static_cast<std::size_t>(std::max({padded_hidden_, padded_attention_, padded_intermediate_}));
    // Attention keeps, beside its own scratch, the queries and the running and the fresh part of each.
    const std::size_t queries = static_cast<std::size_t>(std::max(MAX_QUERIES, group_size_));
    const std::size_t attention = attend_scratch_bytes(static_cast<std::size_t>(spec.head_dim)) +
                                  queries * (padded_head_ * sizeof(bf16) + 2 * (padded_head_ + 2) * sizeof(float) + 2 * sizeof(int)) + 1024;
    scratch_bytes_ = std::max(matmul_scratch_bytes(widest), attention);
    const std::size_t half = static_cast<std::size_t>(spec.rotary) / 2 * context;
    cos_.assign(cos, cos + half);
    sin_.assign(sin, sin + half);
}

void Decoder::set_vector(float*& place, const float* values, int n) {
    place = static_cast<float*>(arena.allocate(sizeof(float) * padded(n)));
    std::fill(place, place + padded(n), 0.0f);
    std::copy(values, values + n, place);
}

void Decoder::set_bias(Linear& linear, const std::vector<std::pair<const float*, int>>& parts, bool alternate) {
    const int total = linear.panels() * PANEL;
    linear.bias = static_cast<float*>(arena.allocate(sizeof(float) * total));
    std::fill(linear.bias, linear.bias + total, 0.0f);
    int at = 0;
    const int count = static_cast<int>(parts.size());
    for (int p = 0; p < count; p++) {
        const auto [values, n] = parts[static_cast<std::size_t>(p)];
        if (alternate) {
            for (int i = 0; i < n; i++) linear.bias[(i / PANEL * count + p) * PANEL + i % PANEL] = values[i];
        } else {
            std::copy(values, values + n, linear.bias + at);
            at += padded(n);
        }
    }
}

void Decoder::reserve(int tokens, int logit_rows, int threads) {
    const std::size_t n = static_cast<std::size_t>(std::max(tokens, logit_rows)), m = static_cast<std::size_t>(tokens);
    const int width = std::max(padded_hidden_, padded_attention_);
    x_.reserve(m * padded_hidden_);
    normed_.reserve(n * padded_hidden_);
    if (integer) {
        x8_.reserve(n * width);
        act8_.reserve(m * padded_intermediate_);
    } else {
        sums_.reserve(n * width / GROUP);
        act_sums_.reserve(m * padded_intermediate_ / GROUP);
    }
    qkv_.reserve(m * (query_width_ + 2 * kv_width_));
    q_.reserve(m * spec.num_heads * spec.head_dim);
    attended_.reserve(m * padded_attention_);
    act_.reserve(m * padded_intermediate_);
    head_rows_.reserve(static_cast<std::size_t>(logit_rows) * padded_hidden_);
    // In steps: with many requests some row enters a new split at almost every step.
    const std::size_t parts = round_up(static_cast<std::size_t>(num_parts_), 64) * spec.num_heads;
    parts_.reserve(parts * padded_head_);
    part_max_.reserve(parts);
    part_sum_.reserve(parts);
    if (scratch_.size() < static_cast<std::size_t>(threads)) scratch_.resize(static_cast<std::size_t>(threads));
    for (Buffer<char>& buffer : scratch_) buffer.reserve(scratch_bytes_);
}

// Who attends together. Spans of several tokens are cut into tiles of rows; single rows meet split by split, all that share the pages.
void Decoder::plan(const Step& step, int threads) {
    row_slot_.clear();
    row_position_.clear();
    part_offset_.clear();
    tiles_.clear();
    groups_.clear();
    group_rows_.clear();
    single_rows_.clear();
    num_parts_ = 0;
    // Large tiles pack less often, but every thread should have some.
    const int rows = static_cast<int>(std::accumulate(step.lengths, step.lengths + step.num_spans, std::int64_t{0}));
    const int rows_of_tile = std::clamp(rows * spec.num_kv_heads / (4 * threads), std::min(tile_rows_, std::max(1, SCORE_ROWS / group_size_)), tile_rows_);
    for (int s = 0; s < step.num_spans; s++) {
        const int start = static_cast<int>(step.starts[s]), length = static_cast<int>(step.lengths[s]), row = static_cast<int>(row_slot_.size());
        for (int i = 0; i < length; i++) {
            row_slot_.push_back(static_cast<int>(step.slots[s]));
            row_position_.push_back(start + i);
            part_offset_.push_back(-1);
        }
        if (length > 1) {
            for (int i = 0; i < length; i += rows_of_tile) tiles_.push_back({row + i, std::min(rows_of_tile, length - i)});
        } else if (length == 1) {
            part_offset_.back() = num_parts_;
            num_parts_ += start / SPLIT + 1;
            single_rows_.push_back(row);
        }
    }
    // The longest tiles first: what is left at the end is small.
    std::stable_sort(tiles_.begin(), tiles_.end(), [&](const Tile& a, const Tile& b) { return row_position_[a.row] > row_position_[b.row]; });

    const int pages_per_split = SPLIT / step.page_size;
    std::vector<int> left = single_rows_;
    std::unordered_map<int, std::vector<std::vector<int>>> by_page;
    for (int split = 0; !left.empty(); split++) {
        left.erase(std::remove_if(left.begin(), left.end(), [&](int row) { return row_position_[row] < split * SPLIT; }), left.end());
        by_page.clear();
        for (const int row : left) {
            const int pages = std::min(pages_per_split, row_position_[row] / step.page_size + 1 - split * pages_per_split);
            const std::int32_t* mine = step.page_table + row_slot_[row] * step.page_stride + split * pages_per_split;
            std::vector<std::vector<int>>& candidates = by_page[mine[0]];
            const auto same = [&](const std::vector<int>& group) {
                const int other = group.front();
                const int others = std::min(pages_per_split, row_position_[other] / step.page_size + 1 - split * pages_per_split);
                return others == pages && static_cast<int>(group.size()) < tile_rows_ &&
                       !std::memcmp(mine, step.page_table + row_slot_[other] * step.page_stride + split * pages_per_split, sizeof(*mine) * pages);
            };
            const auto found = std::find_if(candidates.begin(), candidates.end(), same);
            if (found != candidates.end())
                found->push_back(row);
            else
                candidates.push_back({row});
        }
        for (const auto& [page, candidates] : by_page)
            for (const std::vector<int>& rows : candidates) {
                groups_.push_back({split, static_cast<int>(group_rows_.size()), static_cast<int>(rows.size())});
                group_rows_.insert(group_rows_.end(), rows.begin(), rows.end());
            }
    }
}

// What products with a row need beside it: its 8-bit integers, or the sums of its groups.
void Decoder::prepare(const bf16* x, int width, std::ptrdiff_t row) {
    if (integer)
        kernels.quantize(x, width, x8_.rows(width).from(row));
    else
        kernels.group_sums(x, width, sums_.get() + row * (width / GROUP));
}

namespace {

// A product of rows that `prepare` has seen.
MatmulJob product(const Rows& x, const Int8Rows& x8, int rows, Epilogue epilogue, float* y, std::ptrdiff_t ldy) {
    MatmulJob job{};
    job.x = x;
    job.x8 = x8;
    job.rows = rows;
    job.epilogue = epilogue;
    job.y = y;
    job.ldy = ldy;
    job.scale = 1.0f;
    return job;
}

}  // namespace

// Called by every thread of the team; returns when all of them are done.
void Decoder::linear(const Linear& w, const MatmulJob& job, void* scratch) const {
    const int panels = w.panels(), threads = omp_get_num_threads();
    int block = std::min(4, std::max(1, panels / (threads * 4)));
    if (job.epilogue == Epilogue::GATE_UP) block = block < 2 ? 2 : block / 2 * 2;
    const int blocks = (panels + block - 1) / block;
#pragma omp for schedule(dynamic, 1)
    for (int b = 0; b < blocks; b++) {
        int begin = b * block, end = std::min(panels, begin + block), first = 0;
        for (const Matrix& part : w.parts) {
            if (begin < first + part.panels && end > first) {
                MatmulJob mine = job;
                mine.w = &part;
                if (job.y) mine.y = job.y + static_cast<std::ptrdiff_t>(first) * PANEL;
                mine.bias = w.bias ? w.bias + static_cast<std::ptrdiff_t>(first) * PANEL : nullptr;
                kernels.matmul(mine, std::max(0, begin - first), std::min(part.panels, end - first), scratch);
            }
            first += part.panels;
        }
    }
}

KVView Decoder::view(const Step& step, int layer, int slot, int head) const {
    const bool rest = heads_together_ && head == 0;  // in the order of memory, for the heads that follow
    const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(spec.num_kv_heads) * spec.head_dim;
    const std::ptrdiff_t at = layer * step.layer_stride + static_cast<std::ptrdiff_t>(head) * spec.head_dim;
    return {step.keys + at, step.values + at, stride, step.page_table + slot * step.page_stride, log2_of(step.page_size),
            rest ? static_cast<int>(stride) : spec.head_dim};
}

// A thread's scratch during attention, cut up.
struct Decoder::Carve {
    char* at;
    template <class T> T* take(int count) {
        T* p = reinterpret_cast<T*>(at);
        at += round_up(static_cast<std::size_t>(count) * sizeof(T), 64);
        return p;
    }
};

// The query heads of one key head of some rows, each padded with zeros, and room for what becomes of them.
AttendJob Decoder::queries_of(const Step& step, int layer, int head, const int* rows, int count, Carve& carve) {
    const int dim = spec.head_dim, queries = count * group_size_, window = spec.windows[layer];
    void* inner = carve.take<char>(static_cast<int>(attend_scratch_bytes(static_cast<std::size_t>(dim))));
    bf16* q = carve.take<bf16>(queries * padded_head_);
    int *first = carve.take<int>(queries), *last = carve.take<int>(queries);
    float *max = carve.take<float>(queries), *sum = carve.take<float>(queries), *out = carve.take<float>(queries * padded_head_);
    for (int i = 0; i < queries; i++) {
        const int row = rows[i / group_size_], position = row_position_[row];
        const bf16* from = q_.get() + (static_cast<std::ptrdiff_t>(row) * spec.num_heads + head * group_size_ + i % group_size_) * dim;
        bf16* to = q + i * padded_head_;
        std::memcpy(to, from, sizeof(bf16) * dim);
        std::fill(to + dim, to + padded_head_, bf16{0});
        first[i] = window ? std::max(0, position - window + 1) : 0;
        last[i] = position;
    }
    return {view(step, layer, row_slot_[rows[0]], head), 0, dim, padded_head_, queries, q, first, last, spec.attention_scale, max, sum, out, inner, nullptr};
}

void Decoder::attend_tile(const Step& step, int layer, const Tile& tile, int head, char* scratch) {
    int rows[MAX_QUERIES];
    std::iota(rows, rows + tile.count, tile.row);
    Carve carve{scratch};
    AttendJob job = queries_of(step, layer, head, rows, tile.count, carve);
    float *max = carve.take<float>(job.queries), *sum = carve.take<float>(job.queries), *acc = carve.take<float>(job.queries * padded_head_);
    std::fill(max, max + job.queries, -__builtin_inff());
    std::fill(sum, sum + job.queries, 0.0f);
    std::fill(acc, acc + job.queries * padded_head_, 0.0f);
    for (job.split = job.first[0] / SPLIT; job.split <= job.last[job.queries - 1] / SPLIT; job.split++) {
        kernels.attend(job);
        for (int i = 0; i < job.queries; i++)
            kernels.merge(job.max[i], job.sum[i], job.out + i * padded_head_, padded_head_, max + i, sum + i, acc + i * padded_head_);
    }
    for (int i = 0; i < job.queries; i++)
        kernels.finish(acc + i * padded_head_, sum[i], job.head_dim,
                       attended_.get() + static_cast<std::ptrdiff_t>(rows[i / group_size_]) * padded_attention_ + (head * group_size_ + i % group_size_) * job.head_dim);
}

void Decoder::attend_group(const Step& step, int layer, const Group& group, int head, char* scratch, Upcoming* upcoming) {
    const int* rows = group_rows_.data() + group.begin;
    Carve carve{scratch};
    AttendJob job = queries_of(step, layer, head, rows, group.count, carve);
    job.split = group.split;
    job.upcoming = upcoming;
    kernels.attend(job);
    for (int i = 0; i < job.queries; i++) {
        const std::ptrdiff_t to = (part_offset_[rows[i / group_size_]] + group.split) * spec.num_heads + head * group_size_ + i % group_size_;
        part_max_.get()[to] = job.max[i];
        part_sum_.get()[to] = job.sum[i];
        std::memcpy(parts_.get() + to * padded_head_, job.out + i * padded_head_, sizeof(float) * padded_head_);
    }
}

void Decoder::merge_row(int row) {
    const int splits = row_position_[row] / SPLIT + 1;
    for (int h = 0; h < spec.num_heads; h++) {
        float max = -__builtin_inff(), sum = 0.0f, acc[1024];
        std::fill(acc, acc + padded_head_, 0.0f);
        for (int s = 0; s < splits; s++) {
            const std::ptrdiff_t from = (part_offset_[row] + s) * spec.num_heads + h;
            kernels.merge(part_max_.get()[from], part_sum_.get()[from], parts_.get() + from * padded_head_, padded_head_, &max, &sum, acc);
        }
        kernels.finish(acc, sum, spec.head_dim, attended_.get() + static_cast<std::ptrdiff_t>(row) * padded_attention_ + h * spec.head_dim);
    }
}

void Decoder::attention(const Step& step, int layer, char* scratch) {
    const int heads = spec.num_kv_heads, tiles = static_cast<int>(tiles_.size()), groups = static_cast<int>(groups_.size());
    if (!heads_together_) {
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < (tiles + groups) * heads; i++) {
            if (i < tiles * heads)
                attend_tile(step, layer, tiles_[i / heads], i % heads, scratch);
            else
                attend_group(step, layer, groups_[i / heads - tiles], i % heads, scratch, nullptr);
        }
    } else {
#pragma omp for schedule(dynamic, 1) nowait
        for (int i = 0; i < tiles; i++)
            for (int h = 0; h < heads; h++) attend_tile(step, layer, tiles_[i], h, scratch);
        // A thread takes a few groups, so that it knows whose keys and values are next.
        const int block = std::min(8, std::max(1, groups / (4 * omp_get_num_threads())));
#pragma omp for schedule(dynamic, 1)
        for (int b = 0; b < (groups + block - 1) / block; b++)
            for (int i = b * block; i < std::min(groups, (b + 1) * block); i++) {
                Upcoming next{};
                if (i + 1 < std::min(groups, (b + 1) * block)) {
                    const Group& group = groups_[i + 1];
                    const int row = group_rows_[group.begin];
                    const int window = spec.windows[layer], seen = window ? std::max(0, row_position_[row] - window + 1) : 0;
                    next = {view(step, layer, row_slot_[row], 0), std::max(group.split * SPLIT, seen),
                            std::min(row_position_[row] + 1, (group.split + 1) * SPLIT), (8 + heads - 1) / heads};
                }
                for (int h = 0; h < heads; h++) attend_group(step, layer, groups_[i], h, scratch, &next);
            }
    }
    const int rows = static_cast<int>(row_slot_.size());
#pragma omp for schedule(dynamic, 16)
    for (int r = 0; r < rows; r++) {
        if (part_offset_[r] >= 0) merge_row(r);
        prepare(attended_.get() + static_cast<std::ptrdiff_t>(r) * padded_attention_, padded_attention_, r);
    }
}

// Rows that somebody wants of this layer. normed: the last layer, whose rows are the input of the head.
void Decoder::write_taps(const Step& step, int layer, bool normed, char* scratch) {
    for (const Tap& tap : step.taps) {
        const int width = static_cast<int>(tap.layers.size());
        if (std::find(tap.layers.begin(), tap.layers.end(), layer) == tap.layers.end()) continue;
        const std::size_t bytes = static_cast<std::size_t>(spec.hidden_size) * (tap.type == RowType::F32 ? 4 : 2);
#pragma omp for schedule(dynamic, 16)
        for (int i = 0; i < tap.num_rows; i++) {
            const std::ptrdiff_t row = tap.rows[i];
            const float* from = x_.get() + row * padded_hidden_;
            if (normed) {
                float* wide = reinterpret_cast<float*>(scratch);
                kernels.widen(normed_.get() + row * padded_hidden_, spec.hidden_size, wide);
                from = wide;
            }
            for (int j = 0; j < width; j++)
                if (tap.layers[j] == layer)
                    kernels.convert(from, spec.hidden_size, tap.type, static_cast<char*>(tap.out) + (static_cast<std::size_t>(i) * width + j) * bytes);
        }
    }
}

void Decoder::forward(const Step& step, int threads) {
    plan(step, threads);
    const int tokens = static_cast<int>(row_slot_.size()), heads = spec.num_heads, kv_heads = spec.num_kv_heads, dim = spec.head_dim;
    reserve(tokens, step.num_logit_rows, threads);
    // The heads of a group lie side by side in memory: one thread takes them all, unless there are too few groups for that.
    heads_together_ = static_cast<int>(tiles_.size() + groups_.size()) >= 4 * threads;
    const int qkv_width = query_width_ + 2 * kv_width_, half = spec.rotary / 2;
    const int page_shift = log2_of(step.page_size), in_page = step.page_size - 1;
    const std::ptrdiff_t kv_stride = static_cast<std::ptrdiff_t>(kv_heads) * dim;

    const Rows normed{normed_.get(), sums_.get(), padded_hidden_}, attended{attended_.get(), sums_.get(), padded_attention_};
    const Rows act{act_.get(), act_sums_.get(), padded_intermediate_};
    const Int8Rows act8 = act8_.rows(padded_intermediate_);
    const MatmulJob qkv = product(normed, x8_.rows(padded_hidden_), tokens, Epilogue::STORE, qkv_.get(), qkv_width);
    const MatmulJob o = product(attended, x8_.rows(padded_attention_), tokens, Epilogue::ADD, x_.get(), padded_hidden_);
    const MatmulJob down = product(act, act8, tokens, Epilogue::ADD, x_.get(), padded_hidden_);
    MatmulJob gate_up = product(normed, x8_.rows(padded_hidden_), tokens, Epilogue::GATE_UP, nullptr, 0);
    gate_up.activation = spec.activation;
    gate_up.act = act_.get();
    gate_up.act_sums = act_sums_.get();
    gate_up.ldact = padded_intermediate_;
    gate_up.act8 = act8;

    const auto norm_rows = [&](const float* weight) {
#pragma omp for schedule(dynamic, 16)
        for (int r = 0; r < tokens; r++) {
            bf16* to = normed_.get() + static_cast<std::ptrdiff_t>(r) * padded_hidden_;
            kernels.rms_norm(x_.get() + static_cast<std::ptrdiff_t>(r) * padded_hidden_, weight, spec.norm_eps, spec.hidden_size, to);
            prepare(to, padded_hidden_, r);
        }
    };

#pragma omp parallel num_threads(threads)
    {
        char* scratch = scratch_[static_cast<std::size_t>(omp_get_thread_num())].get();
#pragma omp for schedule(dynamic, 16)
        for (int r = 0; r < tokens; r++) {
            // A row whose token turned out to be none is dropped by the host; any token will do for it.
            const int token = step.token_table[row_slot_[r] * step.token_stride + row_position_[r]];
            kernels.embed(embedding.parts[0], token >= 0 && token < spec.vocab_size ? token : 0, spec.embedding_scale,
                          x_.get() + static_cast<std::ptrdiff_t>(r) * padded_hidden_);
        }
        write_taps(step, 0, false, scratch);
        for (int i = 0; i < spec.num_layers; i++) {
            const Layer& layer = layers[static_cast<std::size_t>(i)];
            norm_rows(layer.attn_norm);
            linear(layer.qkv, qkv, scratch);
#pragma omp for schedule(dynamic, 8)
            for (int r = 0; r < tokens; r++) {
                const int position = row_position_[r];
                const float* from = qkv_.get() + static_cast<std::ptrdiff_t>(r) * qkv_width;
                const float *cos = cos_.data() + static_cast<std::ptrdiff_t>(position) * half, *sin = sin_.data() + static_cast<std::ptrdiff_t>(position) * half;
                const std::ptrdiff_t page = step.page_table[row_slot_[r] * step.page_stride + (position >> page_shift)];
                const std::ptrdiff_t at = i * step.layer_stride + ((page << page_shift) + (position & in_page)) * kv_stride;
                for (int h = 0; h < heads; h++)
                    kernels.rope(from + h * dim, layer.q_norm, spec.norm_eps, cos, sin, spec.rotary, dim, q_.get() + (static_cast<std::ptrdiff_t>(r) * heads + h) * dim);
                for (int h = 0; h < kv_heads; h++)
                    kernels.rope(from + query_width_ + h * dim, layer.k_norm, spec.norm_eps, cos, sin, spec.rotary, dim, step.keys + at + h * dim);
                kernels.to_bf16(from + query_width_ + kv_width_, kv_heads * dim, step.values + at);
            }
            attention(step, i, scratch);
            linear(layer.o, o, scratch);
            norm_rows(layer.mlp_norm);
            linear(layer.gate_up, gate_up, scratch);
            linear(layer.down, down, scratch);
            if (i + 1 < spec.num_layers) write_taps(step, i + 1, false, scratch);
        }
        norm_rows(final_norm);
        write_taps(step, spec.num_layers, true, scratch);
#pragma omp for schedule(dynamic, 16)
        for (int r = 0; r < tokens; r++)
            std::memcpy(step.hidden + static_cast<std::ptrdiff_t>(r) * spec.hidden_size, normed_.get() + static_cast<std::ptrdiff_t>(r) * padded_hidden_,
                        sizeof(bf16) * spec.hidden_size);
        if (step.num_logit_rows)
            project(step.num_logit_rows, [&](int i) { return normed_.get() + step.logit_rows[i] * padded_hidden_; }, step.logits, scratch);
    }
}

// Logits of rows of hidden_size each. Called by every thread of the team.
template <class RowOf> void Decoder::project(int rows, RowOf&& row_of, float* out, char* scratch) {
#pragma omp for schedule(dynamic, 16)
    for (int i = 0; i < rows; i++) {
        bf16* to = head_rows_.get() + static_cast<std::ptrdiff_t>(i) * padded_hidden_;
        std::memcpy(to, row_of(i), sizeof(bf16) * spec.hidden_size);
        std::fill(to + spec.hidden_size, to + padded_hidden_, bf16{0});
        prepare(to, padded_hidden_, i);
    }
    MatmulJob job = product({head_rows_.get(), sums_.get(), padded_hidden_}, x8_.rows(padded_hidden_), rows, Epilogue::STORE, out, spec.vocab_size);
    job.scale = spec.logit_scale;
    linear(head.parts.empty() ? embedding : head, job, scratch);
}

void Decoder::logits(const bf16* hidden, int rows, float* out, int threads) {
    num_parts_ = 0;
    reserve(0, rows, threads);
#pragma omp parallel num_threads(threads)
    project(rows, [&](int i) { return hidden + static_cast<std::ptrdiff_t>(i) * spec.hidden_size; }, out, scratch_[static_cast<std::size_t>(omp_get_thread_num())].get());
}

}  // namespace sidestream
