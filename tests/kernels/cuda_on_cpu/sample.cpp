// kernels/csrc/sample.cu for one dtype, its defines given on the command line. Built by test_sample_on_cpu.py.
#include "cta.h"

#include "sample.cu"

extern "C" void sample(int64_t ctas, SampleArgs args) {
    cta::launch(static_cast<unsigned>(ctas), kSampleThreads, 0, [=] { TAILPACK_KERNEL_SAMPLE(args); });
}
