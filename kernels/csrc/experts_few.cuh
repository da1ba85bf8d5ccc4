// Products of the experts of a mixture, a few rows each, at the speed of reading the weights of those that have rows.
//
// A work item is one expert and a tile of its outputs; CTAs go from item to item. A warp takes two rows of weights at a
// time: each lane reads 16 bytes of both, four times in flight, and multiplies them with up to eight rows of x out of
// shared memory. Sums are f32, over dims in an order that the number of rows does not change.
#pragma once

#include "ptx.cuh"

namespace tailpack {

constexpr int kExpertThreads = 256, kExpertWarps = kExpertThreads / 32, kExpertRows = 8, kExpertPairs = 2;
constexpr int kMostExperts = 512, kExpertUnroll = 4;
constexpr int kPairsPerItem = kExpertWarps * kExpertPairs;

// x [n][width], rows in the order of experts; weights [experts][outputs][width]; ends [experts]: where each expert's rows
// end. Gated: outputs are gates, then ups of the same number, and out [n][outputs / 2] = T(silu(min(gate, limit)) *
// clamp(up, -limit, limit) * shares[n]) of gate and up rounded to T; else out [n][outputs].
// width: a multiple of 256; pairs of outputs: of 16. Dynamic shared memory: 8 * width * 2 bytes.
struct ExpertArgs {
    const void *x, *weights;
    const int32_t* ends;
    const float* shares;
    void* out;
    int64_t width, outputs, experts;
    float limit;
};

template <typename T, int M>
__device__ __forceinline__ void multiply_pair(const T* first, const T* second, const uint8_t* x, int width, float (&a)[kExpertRows],
                                              float (&b)[kExpertRows]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < M; m++) a[m] = b[m] = 0.0f;
    for (int k = 8 * lane; k < width; k += 256 * kExpertUnroll) {
        uint4 w[kExpertUnroll][2];
#pragma unroll
        for (int u = 0; u < kExpertUnroll; u++) {
            const bool there = k + 256 * u < width;
            w[u][0] = there ? load_stream_16(first + k + 256 * u) : make_uint4(0, 0, 0, 0);
            w[u][1] = there ? load_stream_16(second + k + 256 * u) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int u = 0; u < kExpertUnroll; u++) {
            if (k + 256 * u >= width) break;
            const uint32_t low[4] = {w[u][0].x, w[u][0].y, w[u][0].z, w[u][0].w};
            const uint32_t high[4] = {w[u][1].x, w[u][1].y, w[u][1].z, w[u][1].w};
#pragma unroll
            for (int m = 0; m < M; m++) {
                const uint4 v = *reinterpret_cast<const uint4*>(x + 2 * (static_cast<int64_t>(m) * width + k + 256 * u));
                const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float value = half_of<T>(words[i / 2], i % 2);
                    a[m] += half_of<T>(low[i / 2], i % 2) * value;
                    b[m] += half_of<T>(high[i / 2], i % 2) * value;
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int distance = 16; distance >= 1; distance /= 2) {
            a[m] += __shfl_xor_sync(0xffffffffu, a[m], distance);
            b[m] += __shfl_xor_sync(0xffffffffu, b[m], distance);
        }
    }
}

template <typename T, bool GATED> __device__ __forceinline__ void experts_few(const ExpertArgs& args, uint8_t* rows) {
    __shared__ int32_t active[kMostExperts], begins[kMostExperts], counts[kMostExperts], num_active;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int experts = static_cast<int>(args.experts), width = static_cast<int>(args.width);
    const int pairs = static_cast<int>(args.outputs) / 2, tiles = pairs / kPairsPerItem;
    if (warp == 0) { // those that have rows, in order
        int found = 0;
        for (int first = 0; first < experts; first += 32) {
            const int e = first + lane, begin = e > 0 && e < experts ? args.ends[e - 1] : 0;
            const int count = e < experts ? args.ends[e] - begin : 0;
            const uint32_t has = __ballot_sync(0xffffffffu, count > 0);
            const int at = found + __popc(has & ((1u << lane) - 1u));
            if (count > 0) {
                active[at] = e;
                begins[at] = begin;
                counts[at] = count;
            }
            found += __popc(has);
        }
        if (lane == 0) num_active = found;
    }
    __syncthreads();
    const T* x = static_cast<const T*>(args.x);
    T* out = static_cast<T*>(args.out);
    const int64_t items = static_cast<int64_t>(num_active) * tiles;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int at = static_cast<int>(item / tiles), tile = static_cast<int>(item % tiles);
        const T* weights = static_cast<const T*>(args.weights) + static_cast<int64_t>(active[at]) * args.outputs * width;
        for (int first = 0; first < counts[at]; first += kExpertRows) {
            const int count = min(kExpertRows, counts[at] - first);
            const int64_t begin = begins[at] + first;
            __syncthreads(); // the rows before these are read
            for (int i = 8 * thread; i < count * width; i += 8 * kExpertThreads)
                *reinterpret_cast<uint4*>(rows + 2 * i) = load_cached_16(x + begin * width + i);
            __syncthreads();
#pragma unroll
            for (int p = 0; p < kExpertPairs; p++) {
                const int pair = (tile * kExpertWarps + warp) * kExpertPairs + p;
                const int one = GATED ? pair : 2 * pair, two = GATED ? pair + pairs : 2 * pair + 1;
                const T *row_one = weights + static_cast<int64_t>(one) * width, *row_two = weights + static_cast<int64_t>(two) * width;
                float a[kExpertRows], b[kExpertRows];
                if (count == 1) {
                    multiply_pair<T, 1>(row_one, row_two, rows, width, a, b);
                } else if (count == 2) {
                    multiply_pair<T, 2>(row_one, row_two, rows, width, a, b);
                } else if (count <= 4) {
                    multiply_pair<T, 4>(row_one, row_two, rows, width, a, b);
                } else {
                    multiply_pair<T, 8>(row_one, row_two, rows, width, a, b);
                }
#pragma unroll
                for (int m = 0; m < kExpertRows; m++) {
                    if (lane != m || m >= count) continue;
                    if (GATED) {
                        float gate = static_cast<float>(static_cast<T>(a[m])), up = static_cast<float>(static_cast<T>(b[m]));
                        gate = gate > args.limit ? args.limit : gate; // NaN stays
                        up = up > args.limit ? args.limit : (up < -args.limit ? -args.limit : up);
                        const float value = gate / (1.0f + expf(-gate)) * up * args.shares[begin + m];
                        out[(begin + m) * pairs + pair] = static_cast<T>(value);
                    } else {
                        *reinterpret_cast<uint32_t*>(out + (begin + m) * args.outputs + 2 * pair) = pack_halves<T>(a[m], b[m]);
                    }
                }
            }
        }
    }
}

} // namespace tailpack
