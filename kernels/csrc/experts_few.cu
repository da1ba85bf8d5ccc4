// Products of experts of a few rows each, for one dtype: csrc/experts_few.cuh. TAILPACK_TYPE. Floats are passed as their
// bits. A CTA is to share its SM with another.
#include "experts_few.cuh"

using namespace tailpack;
using T = TAILPACK_TYPE;

extern "C" __global__ void __launch_bounds__(kExpertThreads, 2)
TAILPACK_KERNEL_GATED(const T* x, const T* weights, const int32_t* ends, const float* shares, T* out, int64_t width,
                      int64_t outputs, int64_t experts, int64_t limit) {
    TAILPACK_DYNAMIC_SHARED(rows);
    const ExpertArgs args{x, weights, ends, shares, out, width, outputs, experts, __int_as_float(static_cast<int>(limit))};
    experts_few<T, true>(args, rows);
}
extern "C" __global__ void __launch_bounds__(kExpertThreads, 2)
TAILPACK_KERNEL_PLAIN(const T* x, const T* weights, const int32_t* ends, T* out, int64_t width, int64_t outputs,
                      int64_t experts) {
    TAILPACK_DYNAMIC_SHARED(rows);
    const ExpertArgs args{x, weights, ends, nullptr, out, width, outputs, experts, 0.0f};
    experts_few<T, false>(args, rows);
}
