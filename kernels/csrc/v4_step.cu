// The small kernels of a decode step of deepseek_v4, for one dtype of rows: csrc/v4_step.cuh says what each does.
//   TAILPACK_TYPE; TAILPACK_STREAMS, TAILPACK_ITERATIONS of the hyper-connections. Floats are passed as their bits.
#include "v4_step.cuh"

using namespace tailpack;
using T = TAILPACK_TYPE;

#define TAILPACK_V4_KERNEL extern "C" __global__ void __launch_bounds__(kV4Threads)

TAILPACK_V4_KERNEL TAILPACK_KERNEL_PARTIAL(const T* streams, const float* fn, float* partial, int64_t rows, int64_t width,
                                           int64_t outputs) {
    hyper_partial<T>(streams, fn, partial, rows, width, outputs);
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_READ(const float* partial, const float* base, const float* scale, const T* streams,
                                        const float* weight, T* out, float* write, float* carry, int64_t rows,
                                        int64_t hidden, int64_t norm_eps, int64_t eps) {
    hyper_read<T, TAILPACK_STREAMS, TAILPACK_ITERATIONS>(partial, base, scale, streams, weight, out, write, carry, rows,
                                                         hidden, v4_float(norm_eps), v4_float(eps));
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_WRITE(const T* streams, const T* y, const float* write, const float* carry, T* out,
                                         int64_t hidden) {
    hyper_write<T, TAILPACK_STREAMS>(streams, y, write, carry, out, hidden);
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_ROTATE(const void* x, int64_t wide, const float* weight, const float* cos,
                                          const float* sin, T* out, int64_t rows, int64_t heads, int64_t dim, int64_t rope,
                                          int64_t normed, int64_t inverse, int64_t eps) {
    if (wide != 0) {
        rotate_rows<T>(static_cast<const float*>(x), weight, cos, sin, out, rows, heads, dim, rope, normed != 0,
                       inverse != 0, v4_float(eps));
    } else {
        rotate_rows<T>(static_cast<const T*>(x), weight, cos, sin, out, rows, heads, dim, rope, normed != 0, inverse != 0,
                       v4_float(eps));
    }
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_ROUTE(const float* logits, const float* bias, const int64_t* table,
                                         const int64_t* tokens, int32_t* chosen, float* shares, int64_t rows,
                                         int64_t experts, int64_t k, int64_t scale) {
    route_rows(logits, bias, table, tokens, chosen, shares, rows, experts, k, v4_float(scale));
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_ORDER(const int32_t* chosen, int32_t* place, int32_t* ends, int64_t n, int64_t experts) {
    order_rows(chosen, place, ends, n, experts);
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_SPREAD(const T* x, const int32_t* place, const float* shares, T* sorted,
                                          float* sorted_shares, int64_t k, int64_t width) {
    spread_rows<T>(x, place, shares, sorted, sorted_shares, k, width);
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_SWIGLU(const T* gate_up, const float* shares, T* out, int64_t width, int64_t limit) {
    clamped_swiglu<T>(gate_up, shares, out, width, v4_float(limit));
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_SUM(const T* shared, const T* routed, const int32_t* place, T* out, int64_t k,
                                       int64_t width) {
    gather_sum<T>(shared, routed, place, out, k, width);
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_SOFTMAX(const float* scores, const uint8_t* hidden, const float* sinks, T* weights,
                                           int64_t heads, int64_t n, int64_t scale) {
    sink_softmax<T>(scores, hidden, sinks, weights, heads, n, v4_float(scale));
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_COMPLETE(const float* pending, int64_t slot_stride, int64_t ring, int64_t width,
                                            const int64_t* slots, const int64_t* num_tokens, const int64_t* table,
                                            int64_t table_width, const float* norm, const float* frequencies, T* pages,
                                            int64_t page_stride, int64_t rows_per_page, int64_t dim, int64_t rope,
                                            int64_t ratio, int64_t eps) {
    complete_blocks<T>(pending, slot_stride, ring, width, slots, num_tokens, table, table_width, norm, frequencies, pages,
                       page_stride, rows_per_page, dim, rope, ratio, v4_float(eps));
}
TAILPACK_V4_KERNEL TAILPACK_KERNEL_CHOOSE(const float* scores, const int64_t* num_visible, int64_t* chosen, int64_t n,
                                          int64_t k) {
    choose_best(scores, num_visible, chosen, n, k);
}
