// One cell: seal and restore of e4m3 rows, of any width that is a multiple of 8. kernels/page_cells.py gives the defines.
#include "fp8_rows.cuh"

using namespace tailpack;

extern "C" __global__ void __launch_bounds__(128)
TAILPACK_KERNEL_SEAL(const PageRows* pages, const PageRegion* regions, const PageUnit* units, long long num_pages,
                     long long num_units, uint8_t* arena, long long page_bytes, uint64_t* checksums,
                     long long* first_bad_row) {
    seal_fp8_pages<TAILPACK_TYPE>({pages, regions, units, num_pages, num_units, arena, page_bytes}, checksums, first_bad_row);
}

extern "C" __global__ void __launch_bounds__(128)
TAILPACK_KERNEL_RESTORE(const PageRows* pages, const PageRegion* regions, const PageUnit* units, long long num_pages,
                        long long num_units, uint8_t* arena, long long page_bytes) {
    restore_fp8_pages<TAILPACK_TYPE>({pages, regions, units, num_pages, num_units, arena, page_bytes});
}
