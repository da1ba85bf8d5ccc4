// One cell of kernels/csrc/decode_packed.cu, its defines given on the command line. Built by test_decode_on_cpu.py.
#include "cta.h"

#include "decode_packed.cu"

extern "C" void prepare(unsigned ctas, DecodeArgs args) {
    cta::launch(ctas, 32 * (TAILPACK_VECTORS + 1), 0, [=] { TAILPACK_KERNEL_PREPARE(args); });
}
extern "C" void attend(unsigned ctas, DecodeArgs args) {
    cta::launch(ctas, Tiling::kThreads, Tiling::kSharedBytes, [=] { TAILPACK_KERNEL_ATTEND(args); });
}
extern "C" void merge(unsigned ctas, DecodeArgs args) {
    cta::launch(ctas, kMergeThreads, 0, [=] { TAILPACK_KERNEL_MERGE(args); });
}
