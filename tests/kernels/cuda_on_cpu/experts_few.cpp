// kernels/csrc/experts_few.cu for one dtype, its defines given on the command line. Built by test_v4_step_on_cpu.py.
#include "cta.h"

#include "experts_few.cu"

extern "C" {
void v4_gated(int64_t ctas, int64_t shared, const T* a, const T* b, const int32_t* c, const float* d, T* e, int64_t f,
              int64_t g, int64_t h, int64_t i) {
    cta::launch(static_cast<unsigned>(ctas), kExpertThreads, static_cast<size_t>(shared),
                [=] { TAILPACK_KERNEL_GATED(a, b, c, d, e, f, g, h, i); });
}
void v4_plain(int64_t ctas, int64_t shared, const T* a, const T* b, const int32_t* c, T* d, int64_t e, int64_t f, int64_t g) {
    cta::launch(static_cast<unsigned>(ctas), kExpertThreads, static_cast<size_t>(shared),
                [=] { TAILPACK_KERNEL_PLAIN(a, b, c, d, e, f, g); });
}
}
