#include "limits.h"

#include <omp.h>

#include <algorithm>

#include "memory.h"

namespace sidestream {

namespace {

constexpr double SECONDS = 0.1;  // of measuring
constexpr int PASSES = 3;        // at least
constexpr std::size_t STRIDE = 512;                         // bytes: what `read_floats` reads at a time, for any instruction set
constexpr std::size_t PASS_BYTES = std::size_t{32} << 20;  // at least; below, starting the threads would be seen
constexpr std::int64_t ROUNDS = 200000;                    // of dot products in a pass: some milliseconds

// The highest amount / seconds of some passes.
template <class Pass> double best(double amount, Pass&& pass) {
    double rate = 0.0, spent = 0.0;
    for (int i = 0; i < PASSES || spent < SECONDS; i++) {
        const double started = omp_get_wtime();
        pass();
        const double seconds = omp_get_wtime() - started;
        rate = std::max(rate, amount / seconds);
        spent += seconds;
    }
    return rate * 1e-9;
}

}  // namespace

double memory_read_gbs(const Kernels& kernels, std::size_t bytes, int threads) {
    const std::size_t share = std::max(bytes / static_cast<std::size_t>(threads) / STRIDE, std::size_t{1}) * STRIDE;
    const std::size_t all = share * static_cast<std::size_t>(threads), repeats = (PASS_BYTES + all - 1) / all;
    Arena arena;
    float* buffer = static_cast<float*>(arena.allocate(all));
    const std::ptrdiff_t floats = static_cast<std::ptrdiff_t>(share / sizeof(float));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; thread++) std::fill_n(buffer + thread * floats, floats, 1.0f);
    volatile float sink = 0.0f;
    return best(static_cast<double>(all * repeats), [&] {
        float sum = 0.0f;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum)
        for (int thread = 0; thread < threads; thread++)
            for (std::size_t repeat = 0; repeat < repeats; repeat++) sum += kernels.read_floats(buffer + thread * floats, floats);
        sink = sum;
    });
}

double dot_gflops(const Kernels& kernels, int threads) {
    float sink = 0.0f;
    const double operations = kernels.dot_pairs(1, &sink) * ROUNDS * threads;
    volatile float kept = sink;
    return best(operations, [&] {
        float sum = 0.0f;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum)
        for (int thread = 0; thread < threads; thread++) kernels.dot_pairs(ROUNDS, &sum);
        kept = sum;
    });
}

}  // namespace sidestream
