#include "pack.h"

#include <cstring>

namespace sidestream {

namespace {

int block_bytes(Stored stored) { return stored == Stored::Q4_0 ? 18 : stored == Stored::Q4_1 ? 20 : 34; }

bf16 narrow(float v) {
    std::uint32_t bits;
    std::memcpy(&bits, &v, 4);
    if (v != v) return 0x7FC0;
    return static_cast<bf16>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

void pack_bf16(Stored stored, const std::uint8_t* row, int cols, int column, bf16* panel) {
    for (int k = 0; k < cols; k++) {
        bf16 value;
        if (stored == Stored::BF16) {
            std::memcpy(&value, row + 2 * k, 2);
        } else {
            float wide;
            std::memcpy(&wide, row + 4 * static_cast<std::size_t>(k), 4);
            value = narrow(wide);
        }
        panel[(k / 2) * (2 * PANEL) + column * 2 + k % 2] = value;
    }
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

}  // namespace

std::size_t stored_row_bytes(Stored stored, int cols) {
    const std::size_t n = static_cast<std::size_t>(cols);
    return stored == Stored::BF16 ? 2 * n : stored == Stored::F32 ? 4 * n : n / GROUP * block_bytes(stored);
}

Matrix pack(Stored stored, const std::vector<const void*>& sources, int rows, int cols, Arena& arena) {
    Matrix m;
    const int source_panels = (rows + PANEL - 1) / PANEL, count = static_cast<int>(sources.size());
    m.panels = source_panels * count;
    m.rows = count == 1 ? rows : m.panels * PANEL;
    const bool plain = stored == Stored::BF16 || stored == Stored::F32;
    m.format = plain ? Format::BF16 : stored == Stored::Q8_0 ? Format::Q8 : Format::Q4;
    m.minima = stored == Stored::Q4_1;
    m.cols = static_cast<int>(round_up(static_cast<std::size_t>(cols), GROUP));
    const int groups = m.cols / GROUP;
    const std::size_t panel_bytes = static_cast<std::size_t>(m.cols) * (m.format == Format::BF16 ? 64 : m.format == Format::Q8 ? 32 : 16);
    const std::size_t panel_scales = plain ? 0 : static_cast<std::size_t>(groups) * PANEL * (m.minima ? 2 : 1);
    std::uint8_t* data = static_cast<std::uint8_t*>(arena.allocate(panel_bytes * m.panels));
    f16* scales = plain ? nullptr : static_cast<f16*>(arena.allocate(panel_scales * m.panels * sizeof(f16)));
    const std::size_t row_bytes = stored_row_bytes(stored, cols);
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
            if (plain)
                pack_bf16(stored, row, cols, r - first, reinterpret_cast<bf16*>(panel));
            else if (m.format == Format::Q8)
                pack_q8(row, groups, r - first, reinterpret_cast<std::int8_t*>(panel), panel_scale);
            else
                pack_q4(row, groups, block_bytes(stored), r - first, reinterpret_cast<std::uint32_t*>(panel), panel_scale, m.minima);
        }
    }
    m.data = data;
    m.scales = scales;
    return m;
}

}  // namespace sidestream
