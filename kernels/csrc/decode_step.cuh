// The small kernels of a decode step, which follow each other in a captured graph by programmatic dependent launch. They
// round where the model's own operators round (worker/models/llama.py), so that both give the same rows.
#pragma once

#include "ptx.cuh"

namespace tailpack {

constexpr int kStepThreads = 256, kStepWarps = kStepThreads / 32, kTokensPerPage = 128;

// state: i32 words on the device, of which the host patches some before a step. ring: i32 [slots][1 + 2 * max_patches] in
// pinned host memory: how many patches, then pairs (word of the state, value). The host writes slot number % slots before
// it launches step `number`, which counts from 1; step holds the number of the newest.
struct StepArgs {
    int32_t* state;
    int32_t* step;
    const int32_t* ring;
    const int32_t* tokens; // [rows]
    const uint8_t* embed;  // [vocabulary][row_bytes]
    uint8_t* out;          // [rows][row_bytes]
    int64_t row_bytes, num_states, vocabulary;
    int32_t slots, max_patches;
};

// Grid: 1 CTA.
__device__ __forceinline__ void begin_step(const StepArgs& args) {
    launch_dependents();
    wait_for_dependencies();
    __shared__ int32_t number;
    if (threadIdx.x == 0) number = *args.step + 1;
    __syncthreads();
    const int32_t* patches = args.ring + static_cast<int64_t>(number % args.slots) * (1 + 2 * args.max_patches);
    const int count = __ldcv(patches);
    if (count < 0 || count > args.max_patches) trap();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kStepThreads) {
        const int32_t at = __ldcv(patches + 1 + 2 * i);
        if (at < 0 || at >= args.num_states) trap();
        args.state[at] = __ldcv(patches + 2 + 2 * i);
    }
    if (threadIdx.x == 0) *args.step = number;
}

// Grid: a CTA a row.
__device__ __forceinline__ void embed_rows(const StepArgs& args) {
    launch_dependents();
    wait_for_dependencies();
    const int64_t row = blockIdx.x, token = args.tokens[row];
    if (token < 0 || token >= args.vocabulary) trap();
    const uint8_t* from = args.embed + token * args.row_bytes;
    uint8_t* to = args.out + row * args.row_bytes;
    for (int64_t at = 16 * threadIdx.x; at < args.row_bytes; at += 16 * kStepThreads)
        store_global_16(to + at, load_cached_16(from + at));
}

// x [rows][width] += delta [rows][width] where there is one, rounded; out = T(w * T(x * rsqrt(mean(x^2) + eps))).
// For swiglu x is [rows][2 width], gate and up, and out [rows][width].
struct NormArgs {
    void* x;
    const void* delta;
    const void* weight;
    void* out;
    int64_t width;
    float eps;
};

template <typename T> __device__ __forceinline__ float as_rounded(float x) { return static_cast<float>(static_cast<T>(x)); }

// Grid: a CTA a row. width: a multiple of 2.
template <typename T> __device__ __forceinline__ void add_norm(const NormArgs& args) {
    launch_dependents();
    wait_for_dependencies();
    __shared__ float sums[kStepWarps];
    const int width = static_cast<int>(args.width), thread = static_cast<int>(threadIdx.x);
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * width;
    T* x = static_cast<T*>(args.x) + begin;
    const T* delta = args.delta == nullptr ? nullptr : static_cast<const T*>(args.delta) + begin;
    float sum = 0.0f;
    for (int i = 2 * thread; i < width; i += 2 * kStepThreads) {
        uint32_t pair = *reinterpret_cast<const uint32_t*>(x + i);
        if (delta != nullptr) {
            const uint32_t more = *reinterpret_cast<const uint32_t*>(delta + i);
            pair = pack_halves<T>(half_of<T>(pair, 0) + half_of<T>(more, 0), half_of<T>(pair, 1) + half_of<T>(more, 1));
            *reinterpret_cast<uint32_t*>(x + i) = pair;
        }
        const float low = half_of<T>(pair, 0), high = half_of<T>(pair, 1);
        sum += low * low + high * high;
    }
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (thread % 32 == 0) sums[thread / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kStepWarps; w++) sum += sums[w];
    const float rstd = rsqrtf(sum / static_cast<float>(width) + args.eps);
    const T* weight = static_cast<const T*>(args.weight);
    T* out = static_cast<T*>(args.out) + begin;
    for (int i = 2 * thread; i < width; i += 2 * kStepThreads) { // the same thread's own
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(x + i);
        const uint32_t w = *reinterpret_cast<const uint32_t*>(weight + i);
        *reinterpret_cast<uint32_t*>(out + i) = pack_halves<T>(as_rounded<T>(half_of<T>(pair, 0) * rstd) * half_of<T>(w, 0),
                                                               as_rounded<T>(half_of<T>(pair, 1) * rstd) * half_of<T>(w, 1));
    }
}

// out = T(T(silu(gate)) * up). Grid: y a row, x as many CTAs as fit; width: a multiple of 2.
template <typename T> __device__ __forceinline__ void swiglu(const NormArgs& args) {
    launch_dependents();
    wait_for_dependencies();
    const int width = static_cast<int>(args.width);
    const int64_t row = blockIdx.y;
    const T* gate = static_cast<const T*>(args.x) + row * 2 * width;
    T* out = static_cast<T*>(args.out) + row * width;
    const int step = 2 * kStepThreads * static_cast<int>(gridDim.x);
    for (int i = 2 * (static_cast<int>(blockIdx.x) * kStepThreads + static_cast<int>(threadIdx.x)); i < width; i += step) {
        const uint32_t g = *reinterpret_cast<const uint32_t*>(gate + i), u = *reinterpret_cast<const uint32_t*>(gate + width + i);
        float value[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float x = half_of<T>(g, half);
            value[half] = as_rounded<T>(x / (1.0f + __expf(-x))) * half_of<T>(u, half);
        }
        *reinterpret_cast<uint32_t*>(out + i) = pack_halves<T>(value[0], value[1]);
    }
}

// One layer's queries and keys are normed (where there are weights for it) and rotated; queries stay where they are, keys
// and values go to the ring row or the dense page of the sequence's newest token.
//
// qkv [rows][row_stride] T: q_heads, then kv_heads keys, then kv_heads values of dim each. cos, sin [positions][dim / 2] T.
// num_tokens [rows]: the newest token included; 0: padding, which goes nowhere. places: tail slots [rows], or page tables
// [rows][table_width], table_stride apart; a negative place is skipped. ring_rows: 0 for pages. k_to, v_to: place, row and
// head strides in bytes. Grid: ceil(heads / 8) CTAs a row, heads all three kinds, rows in y.
struct RopeArgs {
    void* qkv;
    const void *cos, *sin, *q_norm, *k_norm;
    const int32_t *num_tokens, *places;
    uint8_t *k_to, *v_to;
    int64_t row_stride, k_place_stride, v_place_stride, to_row_stride, to_head_stride;
    int32_t table_stride, table_width, ring_rows, num_places, q_heads, kv_heads, dim, positions;
    float eps;
};

// Where a sequence's newest key or value of a kv head goes; null: nowhere.
template <typename T>
__device__ __forceinline__ T* append_target(const RopeArgs& args, int row, int kv_head, bool is_value, int position) {
    if (position < 0) return nullptr;
    int place, at;
    if (args.ring_rows > 0) {
        place = args.places[row];
        at = position % args.ring_rows;
    } else {
        const int page = position / kTokensPerPage;
        place = page < args.table_width ? args.places[static_cast<int64_t>(row) * args.table_stride + page] : -1;
        at = position % kTokensPerPage;
    }
    if (place < 0) return nullptr;
    if (place >= args.num_places) trap();
    uint8_t* base = is_value ? args.v_to + place * args.v_place_stride : args.k_to + place * args.k_place_stride;
    return reinterpret_cast<T*>(base + at * args.to_row_stride + kv_head * args.to_head_stride);
}

template <typename T> __device__ __forceinline__ void rope_append(const RopeArgs& args) {
    constexpr int kMost = 8; // pairs of a lane: dims up to 512
    launch_dependents();
    wait_for_dependencies();
    const int lane = static_cast<int>(threadIdx.x) % 32, head = static_cast<int>(blockIdx.x) * kStepWarps + static_cast<int>(threadIdx.x) / 32;
    const int row = static_cast<int>(blockIdx.y), half = args.dim / 2;
    if (head >= args.q_heads + 2 * args.kv_heads) return;
    const bool is_query = head < args.q_heads, is_value = head >= args.q_heads + args.kv_heads;
    const int position = args.num_tokens[row] - 1;
    if (position >= args.positions) trap();
    T* from = static_cast<T*>(args.qkv) + row * args.row_stride + static_cast<int64_t>(head) * args.dim;
    float low[kMost], high[kMost];
#pragma unroll
    for (int j = 0; j < kMost; j++) {
        const int i = lane + 32 * j;
        low[j] = i < half ? static_cast<float>(from[i]) : 0.0f;
        high[j] = i < half ? static_cast<float>(from[i + half]) : 0.0f;
    }
    if (!is_value) {
        const T* norm = static_cast<const T*>(is_query ? args.q_norm : args.k_norm);
        if (norm != nullptr) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kMost; j++) sum += low[j] * low[j] + high[j] * high[j];
#pragma unroll
            for (int distance = 16; distance >= 1; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            const float rstd = rsqrtf(sum / static_cast<float>(args.dim) + args.eps);
#pragma unroll
            for (int j = 0; j < kMost; j++) {
                const int i = lane + 32 * j;
                if (i >= half) continue;
                low[j] = as_rounded<T>(as_rounded<T>(low[j] * rstd) * static_cast<float>(norm[i]));
                high[j] = as_rounded<T>(as_rounded<T>(high[j] * rstd) * static_cast<float>(norm[i + half]));
            }
        }
        const int64_t at = static_cast<int64_t>(max(position, 0)) * half;
        const T *cos = static_cast<const T*>(args.cos) + at, *sin = static_cast<const T*>(args.sin) + at;
#pragma unroll
        for (int j = 0; j < kMost; j++) {
            const int i = lane + 32 * j;
            if (i >= half) continue;
            const float c = static_cast<float>(cos[i]), s = static_cast<float>(sin[i]), l = low[j], h = high[j];
            low[j] = as_rounded<T>(l * c) - as_rounded<T>(h * s);
            high[j] = as_rounded<T>(h * c) + as_rounded<T>(l * s);
        }
    }
    T* to = is_query ? from : append_target<T>(args, row, (head - args.q_heads) % args.kv_heads, is_value, position);
    if (to == nullptr) return;
#pragma unroll
    for (int j = 0; j < kMost; j++) {
        const int i = lane + 32 * j;
        if (i >= half) continue;
        to[i] = static_cast<T>(low[j]);
        to[i + half] = static_cast<T>(high[j]);
    }
}

} // namespace tailpack
