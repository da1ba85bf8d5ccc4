// The next token of every row, and what the step after it starts from: csrc/sample.cuh. TAILPACK_TYPE: of the logits.
#include "sample.cuh"

using namespace tailpack;

extern "C" __global__ void __launch_bounds__(kSampleThreads) TAILPACK_KERNEL_SAMPLE(const __grid_constant__ SampleArgs args) {
    sample_row<TAILPACK_TYPE>(args);
}
