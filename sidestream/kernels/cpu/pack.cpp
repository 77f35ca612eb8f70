#include "pack.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "vec_portable.h"  // halves

namespace sidestream {

namespace {

int block_bytes(Stored stored) { return stored == Stored::Q4_0 ? 18 : stored == Stored::Q4_1 ? 20 : 34; }

void pack_bf16(const std::uint8_t* row, int cols, int column, bf16* panel) {
    for (int k = 0; k < cols; k++)
        std::memcpy(panel + k / GROUP * (GROUP * PANEL) + column / 16 * (GROUP * 16) + k % GROUP / 2 * 32 + column % 16 * 2 + k % 2, row + 2 * k, 2);
}

void pack_q4(const std::uint8_t* row, int groups, int bytes, int column, std::uint32_t* panel, f16* scales, bool minima) {
    for (int g = 0; g < groups; g++) {
        const std::uint8_t* block = row + static_cast<std::size_t>(g) * bytes;
        f16* group_scales = scales + static_cast<std::size_t>(g) * PANEL * (minima ? 2 : 1);
        std::memcpy(group_scales + column, block, 2);
        if (minima) std::memcpy(group_scales + PANEL + column, block + 2, 2);
        const std::uint8_t* nibbles = block + (minima ? 4 : 2);  // byte i: k = i in the low half, k = 16 + i in the high half
        for (int j = 0; j < 4; j++) {
            std::uint32_t word = 0;
            for (int i = 0; i < 8; i++) {
                const int k = 8 * j + i;
                const std::uint32_t q = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
                word |= q << (4 * (i / 2) + 16 * (i % 2));
            }
            panel[(static_cast<std::size_t>(g) * 4 + j) * PANEL + column] = word;
        }
    }
}

void pack_q8(const std::uint8_t* row, int groups, int column, std::int8_t* panel, f16* scales) {
    const int place = column / 16 * 64 + column % 16 / 4 * 16 + column % 4 * 2;
    for (int g = 0; g < groups; g++) {
        const std::uint8_t* block = row + static_cast<std::size_t>(g) * 34;
        std::memcpy(scales + static_cast<std::size_t>(g) * PANEL + column, block, 2);
        for (int k = 0; k < GROUP; k++)
            panel[static_cast<std::size_t>(g) * GROUP * PANEL + k / 4 * (4 * PANEL) + place + k % 4 / 2 * 8 + k % 2] = static_cast<std::int8_t>(block[2 + k]);
    }
}

void pack_i4(const std::uint8_t* row, int groups, int bytes, int column, std::uint8_t* panel, f16* scales, bool minima) {
    for (int g = 0; g < groups; g++) {
        const std::uint8_t* block = row + static_cast<std::size_t>(g) * bytes;
        f16* group_scales = scales + static_cast<std::size_t>(g) * PANEL * (minima ? 2 : 1);
        std::memcpy(group_scales + column, block, 2);
        if (minima) std::memcpy(group_scales + PANEL + column, block + 2, 2);
        for (int quad = 0; quad < 4; quad++)
            std::memcpy(panel + (static_cast<std::size_t>(g) * 4 + quad) * (4 * PANEL) + column * 4, block + (minima ? 4 : 2) + 4 * quad, 4);
    }
}

void pack_i8(const std::uint8_t* row, int groups, int column, std::uint8_t* panel, f16* scales) {
    for (int g = 0; g < groups; g++) {
        const std::uint8_t* block = row + static_cast<std::size_t>(g) * 34;
        std::memcpy(scales + static_cast<std::size_t>(g) * PANEL + column, block, 2);
        for (int k = 0; k < GROUP; k++)
            panel[static_cast<std::size_t>(g) * GROUP * PANEL + k / 4 * (4 * PANEL) + column * 4 + k % 4] = block[2 + k] ^ 0x80;  // 128 + q
    }
}

// A stored row in float32.
void widen_row(Stored stored, const std::uint8_t* row, int cols, float* out) {
    if (stored == Stored::BF16) {
        for (int k = 0; k < cols; k++) {
            bf16 value;
            std::memcpy(&value, row + 2 * k, 2);
            out[k] = widen_one(value);
        }
        return;
    }
    for (int g = 0; g < cols / GROUP; g++, row += block_bytes(stored), out += GROUP) {
        f16 halves[2];
        std::memcpy(halves, row, 4);
        const float d = half_to_float(halves[0]), m = half_to_float(halves[1]);
        for (int k = 0; k < GROUP; k++) {
            const int nibble = row[(stored == Stored::Q4_1 ? 4 : 2) + k % 16] >> (k / 16 * 4) & 15;
            if (stored == Stored::Q8_0)
                out[k] = d * static_cast<float>(static_cast<std::int8_t>(row[2 + k]));
            else
                out[k] = stored == Stored::Q4_1 ? d * static_cast<float>(nibble) + m : d * static_cast<float>(nibble - 8);
        }
    }
}

int nearest(float value, float low, float high) {
    value = value < low ? low : value > high ? high : value;
    return static_cast<int>((value + 12582912.0f) - 12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
}

void to_q8_0(const float* x, std::uint8_t* block) {
    float most = 0.0f;
    for (int k = 0; k < GROUP; k++) most = std::max(most, std::fabs(x[k]));
    const f16 scale = float_to_half(most / 127.0f);
    const float d = half_to_float(scale), inverse = d > 0.0f ? 1.0f / d : 0.0f;
    std::memcpy(block, &scale, 2);
    for (int k = 0; k < GROUP; k++) block[2 + k] = static_cast<std::uint8_t>(nearest(x[k] * inverse, -127.0f, 127.0f));
}

// x = d q + m: from the extremes of the group, then twice the least-squares d and m of the q that were found.
void to_q4_1(const float* x, std::uint8_t* block) {
    float low = x[0], high = x[0];
    for (int k = 1; k < GROUP; k++) low = std::min(low, x[k]), high = std::max(high, x[k]);
    float d = (high - low) / 15.0f, m = low;
    int q[GROUP];
    const auto assign = [&] {
        const float inverse = d > 0.0f ? 1.0f / d : 0.0f;
        for (int k = 0; k < GROUP; k++) q[k] = nearest((x[k] - m) * inverse, 0.0f, 15.0f);
    };
    for (int round = 0; round < 2; round++) {
        assign();
        float sum_q = 0, sum_qq = 0, sum_x = 0, sum_qx = 0;
        for (int k = 0; k < GROUP; k++) {
            const float v = static_cast<float>(q[k]);
            sum_q += v, sum_qq += v * v, sum_x += x[k], sum_qx += v * x[k];
        }
        const float spread = GROUP * sum_qq - sum_q * sum_q;  // 0: all q are the same
        if (spread <= 0.0f) break;
        d = (GROUP * sum_qx - sum_q * sum_x) / spread;
        m = (sum_x - d * sum_q) / GROUP;
    }
    const f16 halves[2] = {float_to_half(d), float_to_half(m)};
    d = half_to_float(halves[0]);
    m = half_to_float(halves[1]);
    assign();
    std::memcpy(block, halves, 4);
    for (int k = 0; k < 16; k++) block[4 + k] = static_cast<std::uint8_t>(q[k] | q[16 + k] << 4);
}

// What a matrix becomes before its blocks are packed.
Stored target_of(Stored stored, Packing packing) {
    if (packing == Packing::INT8) return Stored::Q8_0;
    return packing == Packing::INT4 && stored != Stored::Q4_0 ? Stored::Q4_1 : stored;
}

}  // namespace

std::size_t stored_row_bytes(Stored stored, int cols) {
    const std::size_t n = static_cast<std::size_t>(cols);
    return stored == Stored::BF16 ? 2 * n : n / GROUP * block_bytes(stored);
}

Matrix pack(Stored stored, const std::vector<const void*>& sources, int rows, int cols, Packing packing, Arena& arena) {
    Matrix m;
    const Stored target = target_of(stored, packing);
    const int source_panels = (rows + PANEL - 1) / PANEL, count = static_cast<int>(sources.size());
    m.panels = source_panels * count;
    m.rows = count == 1 ? rows : m.panels * PANEL;
    const bool plain = target == Stored::BF16, eight = target == Stored::Q8_0;
    if (packing == Packing::STORED)
        m.format = plain ? Format::BF16 : eight ? Format::Q8 : Format::Q4;
    else
        m.format = eight ? Format::I8 : Format::I4;
    m.minima = target == Stored::Q4_1;
    m.cols = static_cast<int>(round_up(static_cast<std::size_t>(cols), GROUP));
    const int groups = m.cols / GROUP;
    const std::size_t panel_bytes = static_cast<std::size_t>(m.cols) * (plain ? 64 : eight ? 32 : 16);
    const std::size_t panel_scales = plain ? 0 : static_cast<std::size_t>(groups) * PANEL * (m.minima ? 2 : 1);
    std::uint8_t* data = static_cast<std::uint8_t*>(arena.allocate(panel_bytes * m.panels));
    f16* scales = plain ? nullptr : static_cast<f16*>(arena.allocate(panel_scales * m.panels * sizeof(f16)));
    const std::size_t row_bytes = stored_row_bytes(stored, cols);
    // A row on its way from one form to another, for each thread; made here, where an allocation may fail.
    struct Row {
        std::vector<float> wide;
        std::vector<std::uint8_t> blocks;
    };
    std::vector<Row> rows_of_threads(static_cast<std::size_t>(target == stored ? 0 : omp_get_max_threads()));
    for (Row& row : rows_of_threads) row = {std::vector<float>(static_cast<std::size_t>(m.cols)), std::vector<std::uint8_t>(stored_row_bytes(target, m.cols))};
#pragma omp parallel for schedule(dynamic, 4)
    for (int p = 0; p < m.panels; p++) {
        const std::uint8_t* source = static_cast<const std::uint8_t*>(sources[p % count]);
        const int first = p / count * PANEL, last = first + PANEL < rows ? first + PANEL : rows;
        std::uint8_t* panel = data + panel_bytes * p;
        f16* panel_scale = scales + panel_scales * p;
        if (last - first < PANEL || m.cols != cols) {
            std::memset(panel, 0, panel_bytes);
            if (scales) std::memset(panel_scale, 0, panel_scales * sizeof(f16));
        }
        for (int r = first; r < last; r++) {
            const std::uint8_t* row = source + row_bytes * r;
            if (target != stored) {
                auto& [wide, blocks] = rows_of_threads[static_cast<std::size_t>(omp_get_thread_num())];
                widen_row(stored, row, cols, wide.data());
                for (int g = 0; g < groups; g++) (eight ? to_q8_0 : to_q4_1)(wide.data() + g * GROUP, blocks.data() + g * block_bytes(target));
                row = blocks.data();
            }
            switch (m.format) {
                case Format::BF16: pack_bf16(row, cols, r - first, reinterpret_cast<bf16*>(panel)); break;
                case Format::Q8: pack_q8(row, groups, r - first, reinterpret_cast<std::int8_t*>(panel), panel_scale); break;
                case Format::Q4: pack_q4(row, groups, block_bytes(target), r - first, reinterpret_cast<std::uint32_t*>(panel), panel_scale, m.minima); break;
                case Format::I8: pack_i8(row, groups, r - first, panel, panel_scale); break;
                case Format::I4: pack_i4(row, groups, block_bytes(target), r - first, panel, panel_scale, m.minima); break;
            }
        }
    }
    m.data = data;
    m.scales = scales;
    return m;
}

}  // namespace sidestream
