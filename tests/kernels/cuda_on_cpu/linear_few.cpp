// One cell of kernels/csrc/linear_few.cu, its defines given on the command line. Built by test_linear_on_cpu.py.
#include "cta.h"

#include "linear_few.cu"

extern "C" void linear(int64_t ctas, int64_t shared_bytes, LinearArgs args) {
    cta::launch(static_cast<unsigned>(ctas), 32 * (TAILPACK_WARPS + TAILPACK_PRODUCERS + 1), static_cast<size_t>(shared_bytes),
                [=] { TAILPACK_KERNEL_LINEAR(args); });
}
