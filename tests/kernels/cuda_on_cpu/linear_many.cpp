// One cell of kernels/csrc/linear_many.cu, its defines given on the command line. Built by test_linear_on_cpu.py.
#include "cta.h"

#include "linear_many.cu"

extern "C" void linear(int64_t x, int64_t y, int64_t shared_bytes, ManyArgs args) {
    cta::launch(dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)), kManyThreads, static_cast<size_t>(shared_bytes),
                [=] { TAILPACK_KERNEL_LINEAR(args); });
}
