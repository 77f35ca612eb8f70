// The Python side: addresses come in as integers, checked by sidestream.kernels.cpu, which knows tensors.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "decoder.h"
#include "dispatch.h"
#include "limits.h"

namespace nb = nanobind;
using namespace sidestream;

namespace {

using Address = std::uintptr_t;

template <class T> T* at(Address address) { return reinterpret_cast<T*>(address); }

const Kernels& kernels_named(const std::string& isa) {
    for (const Kernels* kernels : supported_kernels())
        if (isa == kernels->isa) return *kernels;
    throw nb::value_error(("this processor has no " + isa).c_str());
}

// A matrix, as the checkpoint stores it: (stored, addresses of one source or of two that alternate, rows, cols)
using Part = std::tuple<int, std::vector<Address>, int, int>;

void fill(Linear& linear, const std::vector<Part>& parts, int packing, Arena& arena) {
    for (const auto& [stored, addresses, rows, cols] : parts) {
        std::vector<const void*> sources;
        for (const Address address : addresses) sources.push_back(at<const void>(address));
        linear.parts.push_back(pack(static_cast<Stored>(stored), sources, rows, cols, static_cast<Packing>(packing), arena));
    }
}

Linear& find_linear(Decoder& decoder, int layer, const std::string& name) {
    if (name == "embed") return decoder.embedding;
    if (name == "lm_head") return decoder.head;
    Layer& here = decoder.layers.at(static_cast<std::size_t>(layer));
    if (name == "qkv") return here.qkv;
    if (name == "o") return here.o;
    if (name == "gate_up") return here.gate_up;
    if (name == "down") return here.down;
    throw nb::value_error(("no matrix is called " + name).c_str());
}

float*& find_vector(Decoder& decoder, int layer, const std::string& name) {
    if (name == "final_norm") return decoder.final_norm;
    Layer& here = decoder.layers.at(static_cast<std::size_t>(layer));
    if (name == "attn_norm") return here.attn_norm;
    if (name == "mlp_norm") return here.mlp_norm;
    if (name == "q_norm") return here.q_norm;
    if (name == "k_norm") return here.k_norm;
    throw nb::value_error(("no vector is called " + name).c_str());
}

template <class Fn> void over_rows(int rows, int threads, Fn&& fn) {
    nb::gil_scoped_release release;
#pragma omp parallel for num_threads(threads < rows ? threads : rows > 0 ? rows : 1) schedule(dynamic, 1)
    for (int i = 0; i < rows; i++) fn(static_cast<std::ptrdiff_t>(i));
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native CPU kernels. Use sidestream.kernels.cpu, which checks what it hands over.";

    m.def("supported", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : supported_kernels()) names.emplace_back(kernels->isa);
        return names;
    });

    nb::class_<Decoder>(m, "Decoder")
        .def(
            "__init__",
            [](Decoder* self, const std::string& isa, std::vector<int> sizes, std::vector<float> numbers, int activation, bool qk_norm,
               std::vector<int> windows, bool integer, Address cos, Address sin, int context) {
                Spec spec{sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3), sizes.at(4), sizes.at(5), sizes.at(6), sizes.at(7),
                          numbers.at(0), numbers.at(1), numbers.at(2), numbers.at(3), static_cast<Activation>(activation), qk_norm, std::move(windows)};
                new (self) Decoder(kernels_named(isa), std::move(spec), integer, at<const float>(cos), at<const float>(sin), context);
            })
        .def("set_matrix", [](Decoder& self, int layer, const std::string& name, const std::vector<Part>& parts, int packing) {
            fill(find_linear(self, layer, name), parts, packing, self.arena);
        })
        .def("set_bias",
             [](Decoder& self, int layer, const std::string& name, const std::vector<std::tuple<Address, int>>& parts, bool alternate) {
                 std::vector<std::pair<const float*, int>> values;
                 for (const auto& [address, n] : parts) values.emplace_back(at<const float>(address), n);
                 self.set_bias(find_linear(self, layer, name), values, alternate);
             })
        .def("set_vector", [](Decoder& self, int layer, const std::string& name, Address values, int n) { self.set_vector(find_vector(self, layer, name), at<const float>(values), n); })
        .def_prop_ro("weight_bytes", [](const Decoder& self) { return self.arena.total(); })
        .def("forward",
             [](Decoder& self, std::tuple<int, Address, Address, Address> spans, std::tuple<Address, std::int64_t> token_table,
                std::tuple<Address, std::int64_t, int> page_table, std::tuple<Address, Address, std::int64_t> pool,
                const std::vector<std::tuple<Address, int, std::vector<int>, int, Address>>& taps, Address hidden,
                std::tuple<Address, int, Address> logits, int threads) {
                 Step step{};
                 step.num_spans = std::get<0>(spans);
                 step.slots = at<const std::int64_t>(std::get<1>(spans));
                 step.starts = at<const std::int64_t>(std::get<2>(spans));
                 step.lengths = at<const std::int64_t>(std::get<3>(spans));
                 step.token_table = at<const std::int32_t>(std::get<0>(token_table));
                 step.token_stride = std::get<1>(token_table);
                 step.page_table = at<const std::int32_t>(std::get<0>(page_table));
                 step.page_stride = std::get<1>(page_table);
                 step.page_size = std::get<2>(page_table);
                 step.keys = at<bf16>(std::get<0>(pool));
                 step.values = at<bf16>(std::get<1>(pool));
                 step.layer_stride = std::get<2>(pool);
                 for (const auto& [rows, n, layers, type, out] : taps) step.taps.push_back({at<const std::int64_t>(rows), n, layers, static_cast<RowType>(type), at<void>(out)});
                 step.hidden = at<bf16>(hidden);
                 step.logit_rows = at<const std::int64_t>(std::get<0>(logits));
                 step.num_logit_rows = std::get<1>(logits);
                 step.logits = at<float>(std::get<2>(logits));
                 nb::gil_scoped_release release;
                 self.forward(step, threads);
             })
        .def("logits", [](Decoder& self, Address hidden, int rows, Address out, int threads) {
            nb::gil_scoped_release release;
            self.logits(at<const bf16>(hidden), rows, at<float>(out), threads);
        });

    m.def("admit", [](const std::string& isa, Address x, Address masks, int rows, int n, Address out, int threads) {
        const Kernels& kernels = kernels_named(isa);
        const int words = (n + 31) / 32;
        over_rows(rows, threads, [&](std::ptrdiff_t i) {
            kernels.admit(at<const float>(x) + i * n, at<const std::uint32_t>(masks) + i * words, n, at<float>(out) + i * n);
        });
    });
    // The id of the best, or what stands for none: `nothing` where all are -inf, `not_finite` where it is NaN or infinite.
    m.def("greedy", [](const std::string& isa, Address x, int rows, int n, std::int32_t nothing, std::int32_t not_finite, Address ids, int threads) {
        const Kernels& kernels = kernels_named(isa);
        over_rows(rows, threads, [&](std::ptrdiff_t i) {
            float value;
            const int id = kernels.argmax(at<const float>(x) + i * n, n, &value);
            at<std::int32_t>(ids)[i] = value - value == 0.0f ? id : value == -__builtin_inff() ? nothing : not_finite;
        });
    });
    m.def("nucleus", [](const std::string& isa, Address x, int rows, int n, Address masses, Address out, int threads) {
        const Kernels& kernels = kernels_named(isa);
        over_rows(rows, threads, [&](std::ptrdiff_t i) { at<float>(out)[i] = kernels.nucleus(at<const float>(x) + i * n, n, at<const float>(masses)[i]); });
    });
    m.def("draw", [](const std::string& isa, Address x, int rows, int n, Address uniforms, Address out, int threads) {
        const Kernels& kernels = kernels_named(isa);
        over_rows(rows, threads, [&](std::ptrdiff_t i) { at<std::int64_t>(out)[i] = kernels.draw(at<const float>(x) + i * n, n, at<const double>(uniforms)[i]); });
    });
    m.def("logsumexp", [](const std::string& isa, Address x, int rows, int n, Address out, int threads) {
        const Kernels& kernels = kernels_named(isa);
        over_rows(rows, threads, [&](std::ptrdiff_t i) { at<float>(out)[i] = kernels.logsumexp(at<const float>(x) + i * n, n); });
    });
    m.def("top_k", [](const std::string& isa, Address x, int rows, int n, int k, Address values, Address ids, int threads) {
        const Kernels& kernels = kernels_named(isa);
        over_rows(rows, threads, [&](std::ptrdiff_t i) { kernels.top_k(at<const float>(x) + i * n, n, k, at<float>(values) + i * k, at<std::int32_t>(ids) + i * k); });
    });

    m.def("memory_read_gbs", [](const std::string& isa, std::size_t bytes, int threads) {
        nb::gil_scoped_release release;
        return memory_read_gbs(kernels_named(isa), bytes, threads);
    });
    m.def("dot_gflops", [](const std::string& isa, int threads) {
        nb::gil_scoped_release release;
        return dot_gflops(kernels_named(isa), threads);
    });

    // For the tests, from here on: one kernel on its own.
    // A matrix, packed one way or another, times x: [rows, padded cols] bf16. out: [rows, weight rows] float32.
    m.def("matmul", [](const std::string& isa, int packing, int stored, Address weight, int weight_rows, int cols, Address x, int rows, Address out) {
        const Kernels& kernels = kernels_named(isa);
        Arena arena;
        const Matrix w = pack(static_cast<Stored>(stored), {at<const void>(weight)}, weight_rows, cols, static_cast<Packing>(packing), arena);
        Buffer<float> sums;
        Int8Buffer x8;
        Buffer<char> scratch;
        sums.reserve(static_cast<std::size_t>(rows) * w.cols / GROUP);
        x8.reserve(static_cast<std::size_t>(rows) * w.cols);
        scratch.reserve(matmul_scratch_bytes(static_cast<std::size_t>(w.cols)));
        for (int i = 0; i < rows; i++) {
            const bf16* row = at<const bf16>(x) + static_cast<std::ptrdiff_t>(i) * w.cols;
            kernels.group_sums(row, w.cols, sums.get() + static_cast<std::ptrdiff_t>(i) * w.cols / GROUP);
            kernels.quantize(row, w.cols, x8.rows(w.cols).from(i));
        }
        MatmulJob job{};
        job.w = &w;
        job.x = {at<const bf16>(x), sums.get(), w.cols};
        job.x8 = x8.rows(w.cols);
        job.rows = rows;
        job.y = at<float>(out);
        job.ldy = weight_rows;
        job.scale = 1.0f;
        kernels.matmul(job, 0, w.panels, scratch.get());
    });
    // The packed matrix as float32: [weight rows, padded cols].
    m.def("embed", [](const std::string& isa, int packing, int stored, Address weight, int weight_rows, int cols, Address out) {
        Arena arena;
        const Matrix w = pack(static_cast<Stored>(stored), {at<const void>(weight)}, weight_rows, cols, static_cast<Packing>(packing), arena);
        for (int row = 0; row < weight_rows; row++) kernels_named(isa).embed(w, row, 1.0f, at<float>(out) + static_cast<std::ptrdiff_t>(row) * w.cols);
    });
    // x, weight, out: zero from n up to a multiple of 32.
    m.def("rms_norm", [](const std::string& isa, Address x, Address weight, float eps, int n, Address out) {
        kernels_named(isa).rms_norm(at<const float>(x), at<const float>(weight), eps, n, at<bf16>(out));
    });
    m.def("rope", [](const std::string& isa, Address x, Address norm_weight, float eps, Address cos, Address sin, int rotary, int head_dim, Address out) {
        kernels_named(isa).rope(at<const float>(x), at<const float>(norm_weight), eps, at<const float>(cos), at<const float>(sin), rotary, head_dim, at<bf16>(out));
    });
    m.def("convert", [](const std::string& isa, Address x, int n, int type, Address out) {
        kernels_named(isa).convert(at<const float>(x), n, static_cast<RowType>(type), at<void>(out));
    });
    // All parts of the attention of some queries, merged. kv: (keys, values, stride, pages, page shift); sees: first and last, [queries].
    m.def("attend", [](const std::string& isa, std::tuple<Address, Address, std::ptrdiff_t, Address, int> kv, int head_dim, Address q, int queries,
                       std::tuple<Address, Address> sees, float scale, Address out) {
        const Kernels& kernels = kernels_named(isa);
        const std::size_t padded = round_up(static_cast<std::size_t>(head_dim), PANEL), n = static_cast<std::size_t>(queries);
        Buffer<char> scratch;
        Buffer<float> max, sum, part, part_max, part_sum, acc;
        scratch.reserve(attend_scratch_bytes(static_cast<std::size_t>(head_dim)));
        for (Buffer<float>* each : {&max, &sum, &part_max, &part_sum}) each->reserve(n);
        for (Buffer<float>* each : {&part, &acc}) each->reserve(n * padded);
        const int *first = at<const int>(std::get<0>(sees)), *last = at<const int>(std::get<1>(sees));
        std::fill_n(max.get(), n, -__builtin_inff());
        Buffer<bf16> padded_q;
        padded_q.reserve(n * padded);
        for (std::size_t i = 0; i < n; i++) std::copy_n(at<const bf16>(q) + i * static_cast<std::size_t>(head_dim), head_dim, padded_q.get() + i * padded);
        AttendJob job{{at<const bf16>(std::get<0>(kv)), at<const bf16>(std::get<1>(kv)), std::get<2>(kv), at<const std::int32_t>(std::get<3>(kv)), std::get<4>(kv), head_dim},
                      0, head_dim, static_cast<int>(padded), queries, padded_q.get(), first, last, scale, part_max.get(), part_sum.get(), part.get(), scratch.get(), nullptr};
        for (; job.split <= *std::max_element(last, last + queries) / SPLIT; job.split++) {
            kernels.attend(job);
            for (std::size_t i = 0; i < n; i++)
                kernels.merge(job.max[i], job.sum[i], job.out + i * padded, job.padded_dim, max.get() + i, sum.get() + i, acc.get() + i * padded);
        }
        for (std::size_t i = 0; i < n; i++)
            kernels.finish(acc.get() + i * padded, sum.get()[i], head_dim, at<bf16>(out) + i * static_cast<std::size_t>(head_dim));
    });

    // Rows to 8-bit integers.
    m.def("quantize", [](const std::string& isa, Address x, int rows, int cols, Address values, Address scales, Address sums, Address offsets) {
        const Int8Rows out{at<std::int8_t>(values), at<float>(scales), at<float>(sums), at<std::int32_t>(offsets), cols};
        for (int i = 0; i < rows; i++) kernels_named(isa).quantize(at<const bf16>(x) + static_cast<std::ptrdiff_t>(i) * cols, cols, out.from(i));
    });
}
