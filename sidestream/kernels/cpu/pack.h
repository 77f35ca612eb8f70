// From the rows of a checkpoint to the panels that the kernels read.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"
#include "memory.h"

namespace sidestream {

// How the source stores a row. The quantised ones are ggml's blocks of 32: scale (and minimum) as halves, then the integers.
enum class Stored : int { BF16 = 0, F32 = 1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 4 };

std::size_t stored_row_bytes(Stored stored, int cols);

// One matrix. With two sources their panels alternate (gate, up), and `rows` counts both, padded to whole panels.
// sources: [rows, cols] each, contiguous.
Matrix pack(Stored stored, const std::vector<const void*>& sources, int rows, int cols, Arena& arena);

}  // namespace sidestream
