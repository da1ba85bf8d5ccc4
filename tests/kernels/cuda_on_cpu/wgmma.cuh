// The functions of kernels/csrc/wgmma.cuh for a CPU: same names, same meaning. It takes that header's place by its guard.
//
// Operands are read through their descriptors as the PTX ISA describes the 128-byte swizzle: the address of an element is
// computed without it, and then its bits 4-6 are xored with bits 7-9. A product takes place when it is waited for, or, with
// seeds other than 0, at random before: shared memory that changes too early, or sums read too early, give wrong results.
#ifndef TAILPACK_WGMMA_CUH
#define TAILPACK_WGMMA_CUH

#include <array>
#include <map>

#include "ptx.cuh"

namespace tailpack {

inline constexpr uint32_t slab_offset(uint32_t row, uint32_t byte) {
    return row * 128 + ((byte / 16 ^ row % 8) * 16 | byte % 16);
}

// ---- shared and global memory

template <typename T> inline void store_shared(uint32_t address, T value, const char* name, Where where) {
    std::memcpy(cta::shared_pointer(address, sizeof value, sizeof value, name, where), &value, sizeof value);
}
inline void store_shared_16(uint32_t address, uint4 x, Where where = Where::here()) {
    store_shared(address, x, "store_shared_16", where);
}
inline void store_shared_4(uint32_t address, uint32_t x, Where where = Where::here()) {
    store_shared(address, x, "store_shared_4", where);
}
inline uint32_t load_shared_4(uint32_t address, Where where = Where::here()) {
    return load_shared<uint32_t>(address, "load_shared_4", where);
}
inline void prefetch_l2(const void*) {}

// ---- matrix descriptors

inline uint64_t operand_along_rows(uint32_t slab) {
    return 1ull << 62 | 64ull << 32 | 1ull << 16 | (slab & 0x3ffff) >> 4;
}
inline uint64_t operand_across_rows(uint32_t slab, uint32_t slab_bytes) {
    return 1ull << 62 | 64ull << 32 | static_cast<uint64_t>(slab_bytes / 16) << 16 | (slab & 0x3ffff) >> 4;
}

// ---- products under way

// One warp's quarter of a product.
struct Product {
    std::array<float*, 32> d;                     // each lane's registers
    std::array<std::array<uint32_t, 4>, 32> a;    // A in registers
    bool a_in_registers, b_across_rows, accumulate;
    uint64_t a_operand, b_operand;
    int columns, warp; // of the group
    float (*value)(uint16_t);
    Where where;
};
struct WarpProducts {
    std::vector<std::vector<Product>> groups; // committed ones, oldest first
    std::vector<Product> open;
};
inline std::map<const void*, WarpProducts> products_under_way; // by warp

// Address of an element: `along` is the index along the rows of a slab, `row` counts rows.
inline uint32_t operand_address(uint64_t operand, int row, int along, bool across, Where where) {
    if (operand >> 62 != 1 || (operand >> 49 & 7) != 0) cta::fail("wgmma: only 128-byte swizzled operands are known here", where);
    const uint32_t start = static_cast<uint32_t>(operand & 0x3fff) << 4;
    const uint32_t leading = static_cast<uint32_t>(operand >> 16 & 0x3fff) << 4, stride = static_cast<uint32_t>(operand >> 32 & 0x3fff) << 4;
    if (start & 0x380) cta::fail(cta::format("wgmma: an operand at 0x%x, inside the swizzle's 8 rows", start), where);
    uint32_t address = start + static_cast<uint32_t>(row / 8) * stride + static_cast<uint32_t>(row % 8) * 128;
    if (across) address += static_cast<uint32_t>(along / 64) * leading + static_cast<uint32_t>(along % 64) * 2;
    else address += static_cast<uint32_t>(along) * 2; // 16 values: inside the slab
    return address ^ (address >> 7 & 7) << 4;
}
inline uint16_t operand_value(uint64_t operand, int row, int along, bool across, Where where) {
    uint16_t bits;
    std::memcpy(&bits, cta::shared_pointer(operand_address(operand, row, along, across, where), 2, 2, "wgmma", where), 2);
    return bits;
}
__attribute__((optimize("O3"))) inline void run_product(const Product& p) {
    static thread_local float a[16][16], b[16][128], sums[128];
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++) {
            // a[0], a[1]: rows g, g + 8, k = 2 t, + 1; a[2], a[3]: k + 8
            const uint32_t word = p.a[static_cast<size_t>(row % 8 * 4 + k % 8 / 2)][static_cast<size_t>(k / 8 * 2 + row / 8)];
            a[row][k] = p.value(p.a_in_registers ? static_cast<uint16_t>(word >> 16 * (k % 2))
                                                 : operand_value(p.a_operand, 16 * p.warp + row, k, false, p.where));
        }
    for (int k = 0; k < 16; k++)
        for (int column = 0; column < p.columns; column++)
            b[k][column] = p.value(p.b_across_rows ? operand_value(p.b_operand, k, column, true, p.where)
                                                   : operand_value(p.b_operand, column, k, false, p.where));
    for (int row = 0; row < 16; row++) {
        std::fill_n(sums, p.columns, 0.0f);
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < p.columns; column++) sums[column] += a[row][k] * b[k][column];
        for (int column = 0; column < p.columns; column++) {
            float& d = p.d[static_cast<size_t>(row % 8 * 4 + column % 8 / 2)][column / 8 * 4 + row / 8 * 2 + column % 2];
            d = (p.accumulate ? d : 0.0f) + sums[column];
        }
    }
}
inline WarpProducts& products_of_warp() {
    return products_under_way[&cta::current->warps[static_cast<size_t>(cta::thread->warp())]];
}
inline void run_products(std::vector<Product>& products) {
    for (const Product& product : products) run_product(product);
    products.clear();
}
// Products run in the order of their issue.
inline void run_groups(WarpProducts& warp, size_t left) {
    while (warp.groups.size() > left) {
        run_products(warp.groups.front());
        warp.groups.erase(warp.groups.begin());
    }
}

inline void wgmma_fence(Where where = Where::here()) { cta::meet("wgmma_fence", where, nullptr, 0); }
inline void wgmma_commit(Where where = Where::here()) {
    cta::meet("wgmma_commit", where, nullptr, 0, [](cta::Slots&) {
        WarpProducts& warp = products_of_warp();
        warp.groups.push_back(std::move(warp.open));
        warp.open.clear();
        if (cta::shuffles() && cta::random_below(2) == 0) run_groups(warp, 0);
    });
}
template <int GROUPS> inline void wgmma_wait(Where where = Where::here()) {
    cta::meet("wgmma_wait", where, nullptr, 0, [](cta::Slots&) { run_groups(products_of_warp(), GROUPS); });
}
template <int N> inline void hold(float (&)[N]) {}
inline void fence_async_proxy() {}
template <int COUNT> inline void take_registers() {}
template <int COUNT> inline void give_registers() {}

// ---- products

template <typename T> struct Wgmma {
    struct Lane {
        float* d;
        uint32_t a[4];
        uint64_t a_operand, b_operand;
    };
    static float value(uint16_t bits) { return half_of<T>(bits, 0); }

    static void issue(const Lane& mine, int columns, bool a_in_registers, bool b_across_rows, bool accumulate, Where where) {
        static_assert(sizeof(Lane) <= sizeof(cta::Slots) / 32);
        cta::meet("wgmma", where, &mine, sizeof mine, [&](cta::Slots& slots) {
            Product p = {};
            for (size_t lane = 0; lane < 32; lane++) {
                Lane other;
                std::memcpy(&other, slots[lane], sizeof other);
                if (other.a_operand != mine.a_operand || other.b_operand != mine.b_operand)
                    cta::fail("wgmma: lanes name different operands", where);
                p.d[lane] = other.d;
                std::copy_n(other.a, 4, p.a[lane].begin());
            }
            p.a_in_registers = a_in_registers, p.b_across_rows = b_across_rows, p.accumulate = accumulate;
            p.a_operand = mine.a_operand, p.b_operand = mine.b_operand;
            p.columns = columns, p.warp = cta::thread->warp() % 4, p.value = value, p.where = where;
            products_of_warp().open.push_back(p);
        });
    }
    static void scores(float (&d)[32], uint64_t a, uint64_t b, bool accumulate, Where where = Where::here()) {
        issue({d, {}, a, b}, 64, false, false, accumulate, where);
    }
    static void output(float (&d)[64], uint64_t a, uint64_t b, Where where = Where::here()) {
        issue({d, {}, a, b}, 128, false, true, true, where);
    }
    static void output(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, Where where = Where::here()) {
        issue({d, {a0, a1, a2, a3}, 0, b}, 128, true, true, true, where);
    }
};

} // namespace tailpack

#endif
