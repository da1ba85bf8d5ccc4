// kernels/csrc/v4_step.cu for one dtype, its defines given on the command line. Built by test_v4_step_on_cpu.py.
#include "cta.h"

#include "v4_step.cu"

template <typename... Parameters, typename... Arguments>
void run_v4(int64_t ctas, void (*kernel)(Parameters...), Arguments... arguments) {
    cta::launch(static_cast<unsigned>(ctas), kV4Threads, 0, [=] { kernel(arguments...); });
}

extern "C" {
void v4_partial(int64_t ctas, const T* a, const float* b, float* c, int64_t d, int64_t e, int64_t f) {
    run_v4(ctas, TAILPACK_KERNEL_PARTIAL, a, b, c, d, e, f);
}
void v4_read(int64_t ctas, const float* a, const float* b, const float* c, const T* d, const float* e, T* f, float* g, float* h,
          int64_t i, int64_t j, int64_t k, int64_t l) {
    run_v4(ctas, TAILPACK_KERNEL_READ, a, b, c, d, e, f, g, h, i, j, k, l);
}
void v4_write(int64_t ctas, const T* a, const T* b, const float* c, const float* d, T* e, int64_t f) {
    run_v4(ctas, TAILPACK_KERNEL_WRITE, a, b, c, d, e, f);
}
void v4_rotate(int64_t ctas, const void* a, int64_t b, const float* c, const float* d, const float* e, T* f, int64_t g,
            int64_t h, int64_t i, int64_t j, int64_t k, int64_t l, int64_t m) {
    run_v4(ctas, TAILPACK_KERNEL_ROTATE, a, b, c, d, e, f, g, h, i, j, k, l, m);
}
void v4_route(int64_t ctas, const float* a, const float* b, const int64_t* c, const int64_t* d, int32_t* e, float* f, int64_t g,
           int64_t h, int64_t i, int64_t j) {
    run_v4(ctas, TAILPACK_KERNEL_ROUTE, a, b, c, d, e, f, g, h, i, j);
}
void v4_order(int64_t ctas, const int32_t* a, int32_t* b, int32_t* c, int64_t d, int64_t e) {
    run_v4(ctas, TAILPACK_KERNEL_ORDER, a, b, c, d, e);
}
void v4_spread(int64_t ctas, const T* a, const int32_t* b, const float* c, T* d, float* e, int64_t f, int64_t g) {
    run_v4(ctas, TAILPACK_KERNEL_SPREAD, a, b, c, d, e, f, g);
}
void v4_swiglu(int64_t ctas, const T* a, const float* b, T* c, int64_t d, int64_t e) {
    run_v4(ctas, TAILPACK_KERNEL_SWIGLU, a, b, c, d, e);
}
void v4_sum(int64_t ctas, const T* a, const T* b, const int32_t* c, T* d, int64_t e, int64_t f) {
    run_v4(ctas, TAILPACK_KERNEL_SUM, a, b, c, d, e, f);
}
void v4_complete(int64_t ctas, const float* a, int64_t b, int64_t c, int64_t d, const int64_t* e, const int64_t* f,
                 const int64_t* g, int64_t h, const float* i, const float* j, T* k, int64_t l, int64_t m, int64_t n, int64_t o,
                 int64_t p, int64_t q) {
    run_v4(ctas, TAILPACK_KERNEL_COMPLETE, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q);
}
void v4_choose(int64_t ctas, const float* a, const int64_t* b, int64_t* c, int64_t d, int64_t e) {
    run_v4(ctas, TAILPACK_KERNEL_CHOOSE, a, b, c, d, e);
}
void v4_softmax(int64_t ctas, const float* a, const uint8_t* b, const float* c, T* d, int64_t e, int64_t f, int64_t g) {
    run_v4(ctas, TAILPACK_KERNEL_SOFTMAX, a, b, c, d, e, f, g);
}
}
