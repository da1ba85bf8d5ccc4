// One cell: seal and restore of TurboQuant rows of one width and dtype, at 2, 3 and 4 bits. kernels/page_cells.py gives the
// defines and the names.
#include "restore.cuh"

using namespace tailpack;

extern "C" __global__ void __launch_bounds__(32 * kMaxRowWarps)
TAILPACK_KERNEL_SEAL(const PageRows* pages, const PageRegion* regions, const PageUnit* units, long long num_pages,
                     long long num_units, uint8_t* arena, long long page_bytes, uint64_t* checksums,
                     long long* first_bad_row) {
    TAILPACK_DYNAMIC_SHARED(shared);
    seal_pages<TAILPACK_WIDTH, TAILPACK_TYPE>({pages, regions, units, num_pages, num_units, arena, page_bytes}, checksums,
                                              first_bad_row,
                                              *reinterpret_cast<SharedRows<TAILPACK_WIDTH, TAILPACK_TYPE>*>(shared));
}

extern "C" __global__ void __launch_bounds__(32 * kMaxRowWarps)
TAILPACK_KERNEL_RESTORE(const PageRows* pages, const PageRegion* regions, const PageUnit* units, long long num_pages,
                        long long num_units, uint8_t* arena, long long page_bytes) {
    TAILPACK_DYNAMIC_SHARED(shared);
    restore_pages<TAILPACK_WIDTH, TAILPACK_TYPE>({pages, regions, units, num_pages, num_units, arena, page_bytes},
                                                 *reinterpret_cast<SharedRows<TAILPACK_WIDTH, TAILPACK_TYPE>*>(shared));
}
