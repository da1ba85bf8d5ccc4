// What a decode step of the llama family does between its matrix products and its attention, for one dtype of rows.
//   TAILPACK_TYPE. Kernels begin_step, embed_rows, add_norm, rope_append and swiglu: csrc/decode_step.cuh.
#include "decode_step.cuh"

using namespace tailpack;

extern "C" __global__ void __launch_bounds__(kStepThreads) TAILPACK_KERNEL_BEGIN(const __grid_constant__ StepArgs args) {
    begin_step(args);
}
extern "C" __global__ void __launch_bounds__(kStepThreads) TAILPACK_KERNEL_EMBED(const __grid_constant__ StepArgs args) {
    embed_rows(args);
}
extern "C" __global__ void __launch_bounds__(kStepThreads) TAILPACK_KERNEL_NORM(const __grid_constant__ NormArgs args) {
    add_norm<TAILPACK_TYPE>(args);
}
extern "C" __global__ void __launch_bounds__(kStepThreads) TAILPACK_KERNEL_ROPE(const __grid_constant__ RopeArgs args) {
    rope_append<TAILPACK_TYPE>(args);
}
extern "C" __global__ void __launch_bounds__(kStepThreads) TAILPACK_KERNEL_SWIGLU(const __grid_constant__ NormArgs args) {
    swiglu<TAILPACK_TYPE>(args);
}
