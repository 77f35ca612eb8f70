// The native backend without Python, for the sanitizers: every buffer is as large as it must be and not a byte more, and what nobody
// owns is NaN. Exits with 1 if anything failed. That the numbers are right is tested in tests/kernels.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "../decoder.h"
#include "../dispatch.h"

using namespace sidestream;

namespace {

int failures = 0;

void check(bool ok, const char* what, const char* isa) {
    if (ok) return;
    failures++;
    std::printf("%s: %s\n", isa, what);
}

std::mt19937 engine(1);

int random_int(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }

float random_float() { return std::normal_distribution<float>()(engine); }

bf16 narrow(float v) {
    std::uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return static_cast<bf16>(bits >> 16);
}

float widen(bf16 v) {
    const std::uint32_t bits = static_cast<std::uint32_t>(v) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

// Memory of exactly `count` elements, with what the address sanitizer puts around it.
template <class T> class Exact {
public:
    explicit Exact(std::size_t count, T fill = T{}) : all_(count, fill) {}
    T* get() { return all_.data(); }
    T* begin() { return get(); }
    T* end() { return get() + all_.size(); }

private:
    std::vector<T> all_;
};

// The rows of a checkpoint. Of the quantised ones the integers are random bytes, and the scales small halves.
std::vector<std::uint8_t> stored_rows(Stored stored, int rows, int cols) {
    std::vector<std::uint8_t> bytes(stored_row_bytes(stored, cols) * static_cast<std::size_t>(rows));
    if (stored == Stored::BF16) {
        for (std::size_t i = 0; i < bytes.size(); i += 2) {
            const bf16 value = narrow(random_float() * 0.2f);
            std::memcpy(&bytes[i], &value, 2);
        }
        return bytes;
    }
    const std::size_t block = stored_row_bytes(stored, GROUP);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random_int(0, 255));
    for (std::size_t i = 0; i < bytes.size(); i += block) {
        const f16 scale = static_cast<f16>(random_int(0, 0x2400));  // up to 2^-6, also below the normal ones
        std::memcpy(&bytes[i], &scale, 2);
        if (stored == Stored::Q4_1) std::memcpy(&bytes[i + 2], &scale, 2);
    }
    return bytes;
}

void test_matmul(const Kernels& kernels, Stored stored, Packing packing, int outputs, int cols) {
    Arena arena;
    const std::vector<std::uint8_t> source = stored_rows(stored, outputs, cols);
    const Matrix w = pack(stored, {source.data()}, outputs, cols, packing, arena);
    const int ldx = static_cast<int>(round_up(static_cast<std::size_t>(cols), PANEL));
    std::vector<float> alone;
    for (const int rows : {25, 1, 2, 7, 16, 37}) {
        Exact<bf16> x(static_cast<std::size_t>(rows) * ldx);
        std::mt19937 same(2);
        for (int i = 0; i < rows; i++)
            for (int k = 0; k < cols; k++) x.get()[i * ldx + k] = narrow(std::normal_distribution<float>()(same));
        Exact<float> sums(static_cast<std::size_t>(rows) * ldx / GROUP), y(static_cast<std::size_t>(rows) * outputs), bias(static_cast<std::size_t>(w.panels) * PANEL);
        Exact<char> scratch(matmul_scratch_bytes(static_cast<std::size_t>(ldx)) + 64);
        const std::size_t groups = static_cast<std::size_t>(rows) * ldx / GROUP;
        Exact<std::int8_t> values(groups * GROUP);
        Exact<float> scales8(groups), sums8(groups);
        Exact<std::int32_t> offsets8(groups);
        const Int8Rows x8{values.get(), scales8.get(), sums8.get(), offsets8.get(), ldx};
        for (int i = 0; i < rows; i++) {
            kernels.group_sums(x.get() + i * ldx, ldx, sums.get() + i * ldx / GROUP);
            kernels.quantize(x.get() + i * ldx, ldx, x8.from(i));
        }
        MatmulJob job{};
        job.w = &w;
        job.x = {x.get(), sums.get(), ldx};
        job.x8 = x8;
        job.rows = rows;
        job.y = y.get();
        job.ldy = outputs;
        job.bias = bias.get();
        job.scale = 1.0f;
        const std::size_t off = reinterpret_cast<std::uintptr_t>(scratch.get()) % 64;
        char* aligned_scratch = scratch.get() + (off ? 64 - off : 0);
        kernels.matmul(job, 0, w.panels, aligned_scratch);
        if (alone.empty()) alone.assign(y.begin(), y.begin() + outputs);
        check(!std::memcmp(alone.data(), y.get(), sizeof(float) * alone.size()), "the first row depends on the others", kernels.isa);
        job.epilogue = Epilogue::ADD;
        kernels.matmul(job, 0, w.panels, aligned_scratch);
    }
    Exact<float> row(static_cast<std::size_t>(w.cols));
    for (int r = 0; r < outputs; r++) kernels.embed(w, r, 2.0f, row.get());
}

void test_sampling(const Kernels& kernels) {
    for (int n = 1; n < 70; n++) {
        Exact<float> x(static_cast<std::size_t>(n)), values(static_cast<std::size_t>(n));
        Exact<std::int32_t> ids(static_cast<std::size_t>(n));
        for (float& v : x) v = random_int(0, 9) ? random_float() : -std::numeric_limits<float>::infinity();
        x.get()[0] = 1.0f;
        kernels.top_k(x.get(), n, n, values.get(), ids.get());
        float best;
        check(kernels.argmax(x.get(), n, &best) == ids.get()[0] && best == values.get()[0], "argmax is not the best of top_k", kernels.isa);
        check(kernels.nucleus(x.get(), n, 1e-9f) == best, "the best is not the whole of a small nucleus", kernels.isa);
        for (const double uniform : {0.0, 0.5, 1.0 - 1e-16}) {
            const int drawn = kernels.draw(x.get(), n, uniform);
            check(drawn >= 0 && drawn < n && std::isfinite(x.get()[drawn]), "an id without weight was drawn", kernels.isa);
        }
        check(std::isfinite(kernels.logsumexp(x.get(), n)), "logsumexp", kernels.isa);
        Exact<std::uint32_t> mask(static_cast<std::size_t>((n + 31) / 32));
        for (std::uint32_t& word : mask) word = random_int(0, 2) ? 0x5A5A5A5Au : 0xFFFFFFFFu;
        Exact<float> admitted(static_cast<std::size_t>(n));
        kernels.admit(x.get(), mask.get(), n, admitted.get());
        for (int i = 0; i < n; i++) {
            const float want = mask.get()[i / 32] >> i % 32 & 1 ? x.get()[i] : -std::numeric_limits<float>::infinity();
            check(admitted.get()[i] == want, "admit", kernels.isa);
        }
        for (const RowType type : {RowType::BF16, RowType::F32, RowType::F16}) {
            Exact<char> out(static_cast<std::size_t>(n) * (type == RowType::F32 ? 4 : 2));
            kernels.convert(x.get(), n, type, out.get());
        }
    }
}

// A model of random weights. `stored`: how its matrices are.
struct Model {
    std::vector<float> cos, sin;
    Decoder decoder;

    Model(const Kernels& kernels, const Spec& spec, Stored stored, Packing packing, int context)
        : cos(table(spec, context, 0)), sin(table(spec, context, 1)), decoder(kernels, spec, packing != Packing::STORED, cos.data(), sin.data(), context), packing_(packing) {
        const int queries = spec.num_heads * spec.head_dim, keys = spec.num_kv_heads * spec.head_dim;
        fill(decoder.embedding, stored, spec.vocab_size, spec.hidden_size, 1, 1);
        for (Layer& layer : decoder.layers) {
            vector(layer.attn_norm, spec.hidden_size);
            vector(layer.mlp_norm, spec.hidden_size);
            if (spec.qk_norm) vector(layer.q_norm, spec.head_dim), vector(layer.k_norm, spec.head_dim);
            fill(layer.qkv, stored, queries, spec.hidden_size, 1, 1);
            fill(layer.qkv, stored, keys, spec.hidden_size, 2, 1);
            fill(layer.o, stored, spec.hidden_size, queries, 1, 1);
            fill(layer.gate_up, stored, spec.intermediate_size, spec.hidden_size, 1, 2);
            fill(layer.down, stored, spec.hidden_size, spec.intermediate_size, 1, 1);
            if (spec.qk_norm) continue;  // half of the models have biases
            std::vector<float> values(static_cast<std::size_t>(std::max({queries, spec.hidden_size, spec.intermediate_size})), 0.1f);
            decoder.set_bias(layer.qkv, {{values.data(), queries}, {values.data(), keys}, {values.data(), keys}}, false);
            decoder.set_bias(layer.o, {{values.data(), spec.hidden_size}}, false);
            decoder.set_bias(layer.gate_up, {{values.data(), spec.intermediate_size}, {values.data(), spec.intermediate_size}}, true);
            decoder.set_bias(layer.down, {{values.data(), spec.hidden_size}}, false);
        }
        vector(decoder.final_norm, spec.hidden_size);
    }

private:
    static std::vector<float> table(const Spec& spec, int context, int which) {
        std::vector<float> values;
        for (int p = 0; p < context; p++)
            for (int k = 0; k < spec.rotary / 2; k++) {
                const float angle = static_cast<float>(p) / static_cast<float>(1 + 10 * k);
                values.push_back(which ? std::sin(angle) : std::cos(angle));
            }
        return values;
    }
    void vector(float*& place, int n) {
        const std::vector<float> ones(static_cast<std::size_t>(n), 1.0f);
        decoder.set_vector(place, ones.data(), n);
    }
    void fill(Linear& linear, Stored stored, int rows, int cols, int times, int sources) {
        for (int i = 0; i < times; i++) {
            std::vector<std::vector<std::uint8_t>> data;
            std::vector<const void*> addresses;
            for (int s = 0; s < sources; s++) data.push_back(stored_rows(stored, rows, cols));
            for (const auto& each : data) addresses.push_back(each.data());
            linear.parts.push_back(pack(stored, addresses, rows, cols, packing_, decoder.arena));
        }
    }

    Packing packing_;
};

// Requests of several lengths in pages at random places; whatever no request owns is NaN. Twice: whole prompts by one thread, and random
// pieces of all requests together by two. Every row must have the same bits.
void test_decoder(const Kernels& kernels, const Spec& spec, Stored stored, int page_size, Packing packing = Packing::STORED) {
    const int slots = 40, context = 300, columns = (context + page_size - 1) / page_size, pages = slots * columns * 2;
    Model model(kernels, spec, stored, packing, context);
    const std::int64_t layer_stride = static_cast<std::int64_t>(pages) * page_size * spec.num_kv_heads * spec.head_dim;
    std::vector<int> lengths{1, 33, 257, 290};
    while (static_cast<int>(lengths.size()) < slots) lengths.push_back(random_int(1, 3));  // many single rows in a step
    Exact<std::int32_t> tokens(static_cast<std::size_t>(slots) * context);
    for (std::int32_t& token : tokens) token = random_int(-1, spec.vocab_size);  // one too small and one too large among them
    std::vector<std::vector<bf16>> want(slots);
    for (const int threads : {1, 2}) {
        std::vector<std::int32_t> shuffled(static_cast<std::size_t>(pages));
        std::iota(shuffled.begin(), shuffled.end(), 0);
        std::shuffle(shuffled.begin(), shuffled.end(), engine);
        Exact<std::int32_t> page_table(static_cast<std::size_t>(slots) * columns, -1);
        for (int s = 0; s < slots; s++)
            for (int c = 0; c * page_size < lengths[static_cast<std::size_t>(s)]; c++) page_table.get()[s * columns + c] = shuffled[static_cast<std::size_t>(s * columns + c)];
        Exact<bf16> keys(static_cast<std::size_t>(layer_stride * spec.num_layers), 0x7FC0), values(static_cast<std::size_t>(layer_stride * spec.num_layers), 0x7FC0);
        std::vector<int> done(static_cast<std::size_t>(slots), 0);
        for (;;) {
            std::vector<std::int64_t> span_slots, starts, span_lengths, rows;
            for (int s = 0; s < slots; s++) {
                const int left = lengths[static_cast<std::size_t>(s)] - done[static_cast<std::size_t>(s)];
                if (!left || (threads == 1 && !span_slots.empty())) continue;
                const int length = threads == 1 ? left : random_int(0, 2) ? random_int(1, left) : 1;
                span_slots.push_back(s);
                starts.push_back(done[static_cast<std::size_t>(s)]);
                span_lengths.push_back(length);
                for (int i = 0; i < length; i++) rows.push_back(static_cast<std::int64_t>(rows.size()));
            }
            if (rows.empty()) break;
            const std::size_t count = rows.size(), hidden_size = static_cast<std::size_t>(spec.hidden_size);
            Exact<bf16> hidden(count * hidden_size), halves(count * 2 * hidden_size);
            Exact<float> logits(count * static_cast<std::size_t>(spec.vocab_size)), wide(count * hidden_size), again(count * static_cast<std::size_t>(spec.vocab_size));
            Step step{};
            step.num_spans = static_cast<int>(span_slots.size());
            step.slots = span_slots.data();
            step.starts = starts.data();
            step.lengths = span_lengths.data();
            step.token_table = tokens.get();
            step.token_stride = context;
            step.page_table = page_table.get();
            step.page_stride = columns;
            step.page_size = page_size;
            step.keys = keys.get();
            step.values = values.get();
            step.layer_stride = layer_stride;
            step.taps.push_back({rows.data(), static_cast<int>(count), {0, spec.num_layers}, RowType::F16, halves.get()});
            step.taps.push_back({rows.data(), static_cast<int>(count), {1}, RowType::F32, wide.get()});
            step.hidden = hidden.get();
            step.logit_rows = rows.data();
            step.num_logit_rows = static_cast<int>(count);
            step.logits = logits.get();
            model.decoder.forward(step, threads);
            model.decoder.logits(hidden.get(), static_cast<int>(count), again.get(), threads);
            check(!std::memcmp(logits.get(), again.get(), sizeof(float) * count * static_cast<std::size_t>(spec.vocab_size)), "logits apart are others", kernels.isa);
            bool finite = true;
            for (const bf16 v : hidden) finite = finite && std::isfinite(widen(v));
            check(finite, "a page of nobody was read", kernels.isa);
            const bf16* from = hidden.get();
            for (std::size_t i = 0; i < span_slots.size(); i++) {
                std::vector<bf16>& rows_of = want[static_cast<std::size_t>(span_slots[i])];
                const std::size_t n = static_cast<std::size_t>(span_lengths[i]) * hidden_size;
                if (threads == 1)
                    rows_of.insert(rows_of.end(), from, from + n);
                else
                    check(!std::memcmp(&rows_of[static_cast<std::size_t>(starts[i]) * hidden_size], from, n * sizeof(bf16)), "a row depends on what is computed with it", kernels.isa);
                from += n;
                done[static_cast<std::size_t>(span_slots[i])] += static_cast<int>(span_lengths[i]);
            }
        }
    }
}

}  // namespace

int main() {
    for (const Kernels* kernels : supported_kernels()) {
        for (const auto& [outputs, cols] : {std::pair{1, 1}, {33, 7}, {70, 33}, {31, 250}}) test_matmul(*kernels, Stored::BF16, Packing::STORED, outputs, cols);
        for (const Stored stored : {Stored::Q4_0, Stored::Q4_1, Stored::Q8_0})
            for (const auto& [outputs, cols] : {std::pair{1, 32}, {33, 64}, {70, 160}}) {
                test_matmul(*kernels, stored, Packing::STORED, outputs, cols);
                test_matmul(*kernels, stored, stored == Stored::Q8_0 ? Packing::INT8 : Packing::INT4, outputs, cols);
            }
        test_sampling(*kernels);
        Spec spec{50, 48, 2, 4, 2, 20, 40, 20, 1e-5f, 0.2f, 1.0f, 1.0f, Activation::SILU, false, {0, 40}};
        for (const int page_size : {1, 256}) test_decoder(*kernels, spec, Stored::BF16, page_size);
        spec = {33, 33, 1, 3, 1, 6, 37, 4, 1e-5f, 0.4f, 2.0f, 0.5f, Activation::GELU, true, {0}};
        test_decoder(*kernels, spec, Stored::BF16, 4);
        spec = {70, 64, 2, 8, 1, 8, 96, 8, 1e-5f, 0.4f, 1.0f, 1.0f, Activation::GELU_TANH, false, {0, 0}};
        for (const Stored stored : {Stored::Q4_0, Stored::Q4_1, Stored::Q8_0}) test_decoder(*kernels, spec, stored, 8);
        for (const Packing packing : {Packing::INT8, Packing::INT4}) test_decoder(*kernels, spec, Stored::Q4_1, 16, packing);
        std::printf("%s done\n", kernels->isa);
    }
    std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
