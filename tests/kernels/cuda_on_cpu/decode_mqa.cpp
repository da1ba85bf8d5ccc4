// One cell of kernels/csrc/decode_mqa.cu, its defines given on the command line. Built by test_mqa_on_cpu.py.
#include "cta.h"

#include "wgmma.cuh"

#include "decode_mqa.cu"

extern "C" void prepare(unsigned ctas, DecodeArgs args) {
    cta::launch(ctas, 32 * (TAILPACK_VECTORS + 1), 0, [=] { TAILPACK_KERNEL_PREPARE(args); });
}
extern "C" void attend(unsigned ctas, DecodeArgs args) {
    cta::launch(ctas, kMqaThreads, kMqaSharedBytes, [=] { TAILPACK_KERNEL_ATTEND(args); });
}
extern "C" void merge(unsigned ctas, DecodeArgs args) {
    cta::launch(ctas, kMergeThreads, 0, [=] { TAILPACK_KERNEL_MERGE(args); });
}
// Eight codes to eight fp16.
extern "C" void decode(unsigned codes, uint4* out) { *out = decode_codes<kMqaWidth>(codes); }
extern "C" unsigned shared_bytes() { return kMqaSharedBytes; }
