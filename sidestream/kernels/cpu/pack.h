// From the rows of a checkpoint to the panels that the kernels read.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"
#include "memory.h"

namespace sidestream {

// How the source stores a row. The quantised ones are ggml's blocks of 32: scale (and minimum) as halves, then the integers.
enum class Stored : int { BF16 = 0, Q4_0 = 1, Q4_1 = 2, Q8_0 = 3 };

// What the panels are for. STORED: bf16 activations, each matrix as it is stored. INT8, INT4: integer activations; INT8 makes everything
// Q8_0, INT4 keeps Q4_0 and Q4_1 and makes the others Q4_1.
enum class Packing : int { STORED = 0, INT8 = 1, INT4 = 2 };

std::size_t stored_row_bytes(Stored stored, int cols);

// One matrix. With two sources their panels alternate (gate, up), and `rows` counts both, padded to whole panels.
// sources: [rows, cols] each, contiguous.
Matrix pack(Stored stored, const std::vector<const void*>& sources, int rows, int cols, Packing packing, Arena& arena);

}  // namespace sidestream
