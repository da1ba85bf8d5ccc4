// One cell of kernels/csrc/linear_few.cu, its defines given on the command line. Built by test_linear_on_cpu.py.
#include "cta.h"

#include "linear_few.cu"

extern "C" void linear(int64_t ctas, LinearArgs args) {
    cta::launch(static_cast<unsigned>(ctas), kLinearThreads, 0, [=] { TAILPACK_KERNEL_LINEAR(args); });
}
