// One cell of kernels/csrc/decode_rows.cu, its defines given on the command line. Built by test_rows_on_cpu.py.
#include "cta.h"

#include "decode_rows.cu"

extern "C" void prepare(unsigned ctas, DecodeArgs args) {
    cta::launch(ctas, 32 * (TAILPACK_VECTORS + 1), 0, [=] { TAILPACK_KERNEL_PREPARE(args); });
}
extern "C" void attend(unsigned ctas, DecodeArgs args) {
    cta::launch(ctas, 32 * kRowWarps, row_shared_bytes(TAILPACK_WIDTH, TAILPACK_VECTORS), [=] { TAILPACK_KERNEL_ATTEND(args); });
}
extern "C" void merge(unsigned ctas, DecodeArgs args) {
    cta::launch(ctas, kMergeThreads, 0, [=] { TAILPACK_KERNEL_MERGE(args); });
}

// The reader alone, as the packed kernel uses it for the tail: one item, one kv head, num_warps warps of one CTA.
// outs [warp][VECTORS][stride], mls [warp][VECTORS][2]
template <bool ONE_ROUND>
void attend_tail(const DecodeArgs& args, const Item& item, int kv_head, int first_vector, float* outs, int stride, float* mls) {
    using Rows = RingRows<DenseFormat<TAILPACK_WIDTH, TAILPACK_TYPE>>;
    const int warp = static_cast<int>(threadIdx.x) / 32, num_warps = static_cast<int>(blockDim.x) / 32;
    attend_rows_warp<TAILPACK_WIDTH, TAILPACK_TYPE, Rows, TAILPACK_VECTORS, TAILPACK_SOFTCAP, 2, ONE_ROUND>(
        args, Rows(args, item, kv_head), item, kv_head, first_vector, warp, num_warps, outs + warp * TAILPACK_VECTORS * stride,
        stride, mls + warp * TAILPACK_VECTORS * 2);
}
extern "C" void tail(unsigned num_warps, DecodeArgs args, Item item, int64_t kv_head, int64_t first_vector, int64_t one_round,
                     float* outs, int64_t stride, float* mls) {
    cta::launch(1, 32 * num_warps, 0, [=] {
        const auto attend = one_round ? attend_tail<true> : attend_tail<false>;
        attend(args, item, static_cast<int>(kv_head), static_cast<int>(first_vector), outs, static_cast<int>(stride), mls);
    });
}
