// One cell of kernels/csrc/seal.cu, its defines given on the command line. Built by test_seal_on_cpu.py.
#include "cta.h"

#include "seal.cu"

using Shared = SharedRows<TAILPACK_WIDTH, TAILPACK_TYPE>;

size_t bytes_of(int64_t warps) { return offsetof(Shared, warps) + static_cast<size_t>(warps) * sizeof(Shared::warps[0]); }

extern "C" void seal(int64_t ctas, int64_t warps, const PageRows* pages, const PageRegion* regions, const PageUnit* units, int64_t num_pages,
                     int64_t num_units, uint8_t* arena, int64_t page_bytes, uint64_t* checksums, long long* first_bad_row) {
    cta::launch(static_cast<unsigned>(ctas), static_cast<unsigned>(32 * warps), bytes_of(warps), [=] {
        TAILPACK_KERNEL_SEAL(pages, regions, units, num_pages, num_units, arena, page_bytes, checksums, first_bad_row);
    });
}
extern "C" void restore(int64_t ctas, int64_t warps, const PageRows* pages, const PageRegion* regions, const PageUnit* units,
                        int64_t num_pages, int64_t num_units, uint8_t* arena, int64_t page_bytes) {
    cta::launch(static_cast<unsigned>(ctas), static_cast<unsigned>(32 * warps), bytes_of(warps), [=] {
        TAILPACK_KERNEL_RESTORE(pages, regions, units, num_pages, num_units, arena, page_bytes);
    });
}

extern "C" int64_t shared_bytes(int64_t warps) { return static_cast<int64_t>(bytes_of(warps)); }

// Codes of chunks of 8 rotated unit coordinates, f32 [32 chunks][8], one chunk a lane; nibble words u32 [32].
extern "C" void quantise(int64_t bits, const float* coordinates, uint32_t* words) {
    cta::launch(1, 32, sizeof(RowTables), [=] {
        TAILPACK_DYNAMIC_SHARED(shared);
        RowTables& tables = *reinterpret_cast<RowTables*>(shared);
        const int lane = static_cast<int>(threadIdx.x);
        tables.fill<TAILPACK_WIDTH>(lane, 32);
        __syncthreads();
        float y[kChunk];
        for (int j = 0; j < kChunk; j++) y[j] = coordinates[kChunk * lane + j];
        words[lane] = Quantiser(static_cast<int>(bits), tables, lane).codes(y);
    });
}
