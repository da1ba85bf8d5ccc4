// One cell: the codec's two kernels for one width, bits and row dtype. kernels/cells.py gives the defines and the names.
#include "turboquant.cuh"

using namespace tailpack;

extern "C" __global__ void __launch_bounds__(256)
TAILPACK_PACK(const TAILPACK_ROW* rows, long long row_stride, uint8_t* codes, long long codes_stride, float* scales,
              long long scales_stride, long long* first_bad_row, long long num_rows) {
    pack_rows<TAILPACK_ROW, TAILPACK_WIDTH, TAILPACK_BITS_PER_CODE>(rows, row_stride, codes, codes_stride, scales,
                                                                    scales_stride, first_bad_row, num_rows);
}

extern "C" __global__ void __launch_bounds__(256)
TAILPACK_UNPACK(const uint8_t* codes, long long codes_stride, const float* scales, long long scales_stride,
                TAILPACK_ROW* rows, long long row_stride, long long num_rows) {
    unpack_rows<TAILPACK_ROW, TAILPACK_WIDTH, TAILPACK_BITS_PER_CODE>(codes, codes_stride, scales, scales_stride, rows,
                                                                      row_stride, num_rows);
}
