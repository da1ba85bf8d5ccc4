// One cell of kernels/csrc/seal_fp8.cu, its defines given on the command line. Built by test_seal_on_cpu.py.
#include "cta.h"

#include "seal_fp8.cu"

extern "C" void seal(int64_t ctas, const PageRows* pages, const PageRegion* regions, const PageUnit* units, int64_t num_pages,
                     int64_t num_units, uint8_t* arena, int64_t page_bytes, uint64_t* checksums, long long* first_bad_row) {
    cta::launch(static_cast<unsigned>(ctas), 128, 0, [=] {
        TAILPACK_KERNEL_SEAL(pages, regions, units, num_pages, num_units, arena, page_bytes, checksums, first_bad_row);
    });
}
extern "C" void restore(int64_t ctas, const PageRows* pages, const PageRegion* regions, const PageUnit* units,
                        int64_t num_pages, int64_t num_units, uint8_t* arena, int64_t page_bytes) {
    cta::launch(static_cast<unsigned>(ctas), 128, 0, [=] {
        TAILPACK_KERNEL_RESTORE(pages, regions, units, num_pages, num_units, arena, page_bytes);
    });
}

extern "C" unsigned e4m3(float x) { return to_e4m3(x); }
extern "C" float e4m3_value(unsigned code) { return from_e4m3(code); }
