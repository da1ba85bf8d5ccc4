// kernels/csrc/hyper.cu with the kernel's own parameters behind the number of CTAs; its defines are given on the command
// line. Built by test_hyper_on_cpu.py.
#include "cta.h"

#include "hyper.cu"

extern "C" void hyper(int64_t ctas, const float* values, const float* base, const float* scale, float* read, float* write,
                      float* carry, int64_t rows) {
    cta::launch(static_cast<unsigned>(ctas), 64, 0,
                [=] { TAILPACK_KERNEL_HYPER(values, base, scale, read, write, carry, rows); });
}
