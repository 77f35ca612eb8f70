// What this machine can do at most, by the clock: the roofline that a step is held against.
#pragma once

#include <cstddef>

#include "common.h"

namespace sidestream {

// GB/s at which `threads` threads read a buffer of `bytes` together, again and again: the best pass.
double memory_read_gbs(const Kernels& kernels, std::size_t bytes, int threads);

// GFLOP/s of bfloat16 dot products (of float32 ones, where there are none) in the registers of `threads` threads: the best pass.
double dot_gflops(const Kernels& kernels, int threads);

}  // namespace sidestream
