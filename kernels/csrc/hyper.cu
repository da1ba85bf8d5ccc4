// How hyper-connections read, write and carry their residual streams, from what one matrix product says of them: a row
// of values becomes two vectors and a balanced matrix (Sinkhorn & Knopp 1967), in registers. By PyTorch that is four
// launches an iteration of a few numbers each.
//
// TAILPACK_STREAMS: h. TAILPACK_ITERATIONS, TAILPACK_EPS: the model's own. Grid: a thread a row.
#include "ptx.cuh"

namespace {

constexpr int kStreams = TAILPACK_STREAMS;
constexpr float kEps = TAILPACK_EPS;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

} // namespace

// values: [rows][(2 + h) h], contiguous; base: [(2 + h) h]; scale: [3]. read, write: [rows][h]; carry: [rows][h][h].
extern "C" __global__ void __launch_bounds__(64)
TAILPACK_KERNEL_HYPER(const float* values, const float* base, const float* scale, float* read, float* write, float* carry,
                      int64_t rows) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * 64 + threadIdx.x;
    if (row >= rows) return;
    const float* v = values + row * (2 + kStreams) * kStreams;
#pragma unroll
    for (int j = 0; j < kStreams; j++) {
        read[row * kStreams + j] = sigmoid(v[j] * scale[0] + base[j]) + kEps;
        write[row * kStreams + j] = 2.0f * sigmoid(v[kStreams + j] * scale[1] + base[kStreams + j]);
    }

    float c[kStreams][kStreams];
#pragma unroll
    for (int j = 0; j < kStreams; j++) {
        float top = -3.0e38f, total = 0.0f;
#pragma unroll
        for (int k = 0; k < kStreams; k++) {
            const int at = (2 + j) * kStreams + k;
            c[j][k] = v[at] * scale[2] + base[at];
            top = fmaxf(top, c[j][k]);
        }
#pragma unroll
        for (int k = 0; k < kStreams; k++) {
            c[j][k] = expf(c[j][k] - top);
            total += c[j][k];
        }
#pragma unroll
        for (int k = 0; k < kStreams; k++) c[j][k] = c[j][k] / total + kEps;
    }
    for (int half = 1; half < 2 * TAILPACK_ITERATIONS; half++) { // columns first and last
#pragma unroll
        for (int a = 0; a < kStreams; a++) {
            float total = kEps;
#pragma unroll
            for (int b = 0; b < kStreams; b++) total += half & 1 ? c[b][a] : c[a][b];
#pragma unroll
            for (int b = 0; b < kStreams; b++) {
                if (half & 1) {
                    c[b][a] /= total;
                } else {
                    c[a][b] /= total;
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < kStreams; j++) {
#pragma unroll
        for (int k = 0; k < kStreams; k++) carry[(row * kStreams + j) * kStreams + k] = c[j][k];
    }
}
