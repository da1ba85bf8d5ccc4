// Every cell of the codec as C functions with the kernels' own parameters plus the number of CTAs (of one warp each).
// Built by tests/kernels/test_turboquant_on_cpu.py.
#include "cta.h"

#include "turboquant.cuh"

using namespace tailpack;

#define CELL(WIDTH, BITS, NAME, ROW)                                                                                    \
    extern "C" void pack_w##WIDTH##_b##BITS##_##NAME(unsigned blocks, const ROW* rows, int64_t row_stride,             \
                                                     uint8_t* codes, int64_t codes_stride, float* scales,              \
                                                     int64_t scales_stride, long long* bad, int64_t num_rows) {        \
        cta::launch(blocks, 32, 0, [=] {                                                                                        \
            pack_rows<ROW, WIDTH, BITS>(rows, row_stride, codes, codes_stride, scales, scales_stride, bad, num_rows);  \
        });                                                                                                            \
    }                                                                                                                  \
    extern "C" void unpack_w##WIDTH##_b##BITS##_##NAME(unsigned blocks, const uint8_t* codes, int64_t codes_stride,    \
                                                       const float* scales, int64_t scales_stride, ROW* rows,          \
                                                       int64_t row_stride, int64_t num_rows) {                         \
        cta::launch(blocks, 32, 0, [=] {                                                                                        \
            unpack_rows<ROW, WIDTH, BITS>(codes, codes_stride, scales, scales_stride, rows, row_stride, num_rows);     \
        });                                                                                                            \
    }
#define ROW_TYPES(WIDTH, BITS)                                                                                         \
    CELL(WIDTH, BITS, bf16, __nv_bfloat16) CELL(WIDTH, BITS, f16, __half) CELL(WIDTH, BITS, f32, float)
#define QUANTISE(WIDTH, BITS)                                                                                          \
    extern "C" unsigned quantise_w##WIDTH##_b##BITS(float y) { return quantise<WIDTH, BITS>(y); }
#define BITS_OF(WIDTH) QUANTISE(WIDTH, 2) QUANTISE(WIDTH, 3) QUANTISE(WIDTH, 4) ROW_TYPES(WIDTH, 2) ROW_TYPES(WIDTH, 3) ROW_TYPES(WIDTH, 4)
TAILPACK_WIDTHS(BITS_OF)
