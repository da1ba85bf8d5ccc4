// kernels/csrc/decode_step.cu for one dtype, its defines given on the command line.
#include "cta.h"

#include "decode_step.cu"

#define TAILPACK_LAUNCH(name, kernel, type)                                                                            \
    extern "C" void name(int64_t x, int64_t y, type args) {                                                            \
        cta::launch(dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)), kStepThreads, 0, [=] { kernel(args); }); \
    }
TAILPACK_LAUNCH(begin, TAILPACK_KERNEL_BEGIN, StepArgs)
TAILPACK_LAUNCH(embed, TAILPACK_KERNEL_EMBED, StepArgs)
TAILPACK_LAUNCH(norm, TAILPACK_KERNEL_NORM, NormArgs)
TAILPACK_LAUNCH(rope, TAILPACK_KERNEL_ROPE, RopeArgs)
TAILPACK_LAUNCH(swiglu_rows, TAILPACK_KERNEL_SWIGLU, NormArgs)
