// What a decode step of deepseek_v4 does between its matrix products, in one launch where PyTorch makes five to twenty:
// hyper-connections, norms with rotary embedding, the router, the order of experts' rows, clamped SwiGLU, the sums behind
// the experts, the softmax with a sink. They round where worker/models/deepseek_v4*.py round, which are their reference;
// sums have another order.
//
// T: bf16 or f16. Matrices are contiguous, widths multiples of 8, addresses of 16 bytes. Grids are one-dimensional.
#pragma once

#include "ptx.cuh"

namespace tailpack {

constexpr int kV4Threads = 256, kV4Warps = kV4Threads / 32;
constexpr int kHyperSlice = 256, kHyperRows = 8; // values of a row, and rows, of a CTA of hyper_partial

__device__ __forceinline__ float v4_warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}
__device__ __forceinline__ float v4_warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
}
// Of all threads, in all threads. shared: kV4Warps floats, nobody's else until the next barrier.
template <bool LARGEST> __device__ __forceinline__ float v4_of_all(float x, float* shared) {
    x = LARGEST ? v4_warp_max(x) : v4_warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int w = 1; w < kV4Warps; w++) x = LARGEST ? fmaxf(x, shared[w]) : x + shared[w];
    return x;
}
template <typename T> __device__ __forceinline__ float v4_rounded(float x) { return static_cast<float>(static_cast<T>(x)); }
__device__ __forceinline__ float v4_infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float v4_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float v4_float(int64_t bits) { return __int_as_float(static_cast<int>(bits)); }

template <typename T> __device__ __forceinline__ void load_8(const T* from, float (&x)[8]) {
    const uint4 v = load_cached_16(from);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = half_of<T>(words[i / 2], i % 2);
}
template <typename T> __device__ __forceinline__ void store_8(T* to, const float (&x)[8]) {
    store_global_16(to, make_uint4(pack_halves<T>(x[0], x[1]), pack_halves<T>(x[2], x[3]), pack_halves<T>(x[4], x[5]),
                                   pack_halves<T>(x[6], x[7])));
}

// ---- hyper-connections: h streams of `hidden` values a row

// Products of the flattened streams [rows][width] with fn [outputs][width], and their squares' sum, by slices of 256:
// partial [width / 256][rows][outputs + 1]. Grid: slices * ceil(rows / 8), slices innermost.
template <typename T>
__device__ __forceinline__ void hyper_partial(const T* streams, const float* fn, float* partial, int64_t rows, int64_t width,
                                              int64_t outputs) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t slices = width / kHyperSlice, slice = blockIdx.x % slices, first = blockIdx.x / slices * kHyperRows;
    const int64_t at = slice * kHyperSlice + 8 * lane;
    float x[kHyperRows][8];
#pragma unroll
    for (int r = 0; r < kHyperRows; r++) {
        if (first + r < rows) {
            load_8(streams + (first + r) * width + at, x[r]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) x[r][i] = 0.0f;
        }
    }
    for (int64_t o = warp; o <= outputs; o += kV4Warps) {
        float w[8] = {};
        if (o < outputs) {
            const float4 low = load_l2_f4(fn + o * width + at), high = load_l2_f4(fn + o * width + at + 4);
            w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w;
            w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
        }
#pragma unroll
        for (int r = 0; r < kHyperRows; r++) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) sum += x[r][i] * (o < outputs ? w[i] : x[r][i]);
            sum = v4_warp_sum(sum);
            if (lane == r && first + r < rows) partial[(slice * rows + first + r) * (outputs + 1) + o] = sum;
        }
    }
}

// From the partial products, how a sublayer reads, writes and carries the streams (csrc/hyper.cu says how a matrix is
// balanced); then its input, normed: out = T(T(sum_j read[j] streams[j]) * rstd * weight). Grid: rows.
template <typename T, int H, int ITERATIONS>
__device__ __forceinline__ void hyper_read(const float* partial, const float* base, const float* scale, const T* streams,
                                           const float* weight, T* out, float* write, float* carry, int64_t rows,
                                           int64_t hidden, float norm_eps, float eps) {
    constexpr int kOutputs = (2 + H) * H, kCarry = H * H;
    static_assert(kCarry <= 32 && (H & (H - 1)) == 0, "a matrix lies in the lanes of a warp");
    __shared__ float values[kOutputs + 1], read[H], sums[kV4Warps];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int64_t row = blockIdx.x, slices = H * hidden / kHyperSlice;
    for (int o = warp; o <= kOutputs; o += kV4Warps) {
        float sum = 0.0f;
        for (int64_t i = lane; i < slices; i += 32) sum += partial[(i * rows + row) * (kOutputs + 1) + o];
        sum = v4_warp_sum(sum);
        if (lane == 0) values[o] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        const float rstd = rsqrtf(values[kOutputs] / static_cast<float>(H * hidden) + norm_eps);
        const int j = lane % H, at = lane % kCarry;
        const float r = v4_sigmoid(values[j] * rstd * scale[0] + base[j]) + eps;
        const float w = 2.0f * v4_sigmoid(values[H + j] * rstd * scale[1] + base[H + j]);
        float c = values[2 * H + at] * rstd * scale[2] + base[2 * H + at];
        float top = c, total;
#pragma unroll
        for (int d = 1; d < H; d *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
        c = expf(c - top);
        total = c;
#pragma unroll
        for (int d = 1; d < H; d *= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
        c = c / total + eps;
        for (int half = 1; half < 2 * ITERATIONS; half++) { // columns first and last
            total = c;
            if (half & 1) {
#pragma unroll
                for (int d = H; d < kCarry; d *= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
            } else {
#pragma unroll
                for (int d = 1; d < H; d *= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
            }
            c = c / (total + eps);
        }
        if (lane < H) {
            read[lane] = r;
            write[row * H + lane] = w;
        }
        if (lane < kCarry) carry[row * kCarry + lane] = c;
    }
    __syncthreads();
    T* to = out + row * hidden;
    float sum = 0.0f;
    for (int64_t at = 8 * thread; at < hidden; at += 8 * kV4Threads) {
        float x[8] = {};
#pragma unroll
        for (int j = 0; j < H; j++) {
            float s[8];
            load_8(streams + (row * H + j) * hidden + at, s);
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] += read[j] * s[i];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = v4_rounded<T>(x[i]);
            sum += x[i] * x[i];
        }
        store_8(to + at, x);
    }
    const float rstd = rsqrtf(v4_of_all<false>(sum, sums) / static_cast<float>(hidden) + norm_eps);
    for (int64_t at = 8 * thread; at < hidden; at += 8 * kV4Threads) { // a thread's own
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = static_cast<float>(to[at + i]) * rstd * weight[at + i];
        store_8(to + at, x);
    }
}

// out[k] = T(write[k] y + sum_j carry[j][k] streams[j]). Grid: rows * ceil(hidden / 2048).
template <typename T, int H>
__device__ __forceinline__ void hyper_write(const T* streams, const T* y, const float* write, const float* carry, T* out,
                                            int64_t hidden) {
    const int64_t chunks = (hidden + 8 * kV4Threads - 1) / (8 * kV4Threads), row = blockIdx.x / chunks;
    const int64_t at = (blockIdx.x % chunks * kV4Threads + threadIdx.x) * 8;
    if (at >= hidden) return;
    float s[H][8], value[8];
    load_8(y + row * hidden + at, value);
#pragma unroll
    for (int j = 0; j < H; j++) load_8(streams + (row * H + j) * hidden + at, s[j]);
#pragma unroll
    for (int k = 0; k < H; k++) {
        float x[8] = {};
#pragma unroll
        for (int j = 0; j < H; j++) {
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] += carry[row * H * H + j * H + k] * s[j][i];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] += write[row * H + k] * value[i];
        store_8(out + (row * H + k) * hidden + at, x);
    }
}

// ---- norms and rotary embedding

__device__ __forceinline__ void load_pair(const float* from, float& a, float& b) {
    const float2 pair = load_l2_f2(from);
    a = pair.x;
    b = pair.y;
}
template <typename T> __device__ __forceinline__ void load_pair(const T* from, float& a, float& b) {
    const uint32_t pair = load_cached_4(from);
    a = half_of<T>(pair, 0);
    b = half_of<T>(pair, 1);
}

// x [rows][heads][dim] in X, T or f32; where normed, T(x * rstd * weight), weight [dim] or null; then the last `rope` dims
// rotated in pairs (2i, 2i + 1) by cos, sin [rows][rope / 2], backwards where inverse; out [rows][heads][dim] T.
// dim: up to 2048, a multiple of 64. Grid: ceil(rows * heads / 8), a warp a head.
template <typename T, typename X>
__device__ __forceinline__ void rotate_rows(const X* x, const float* weight, const float* cos, const float* sin, T* out,
                                            int64_t rows, int64_t heads, int64_t dim, int64_t rope, bool normed, bool inverse,
                                            float eps) {
    constexpr int kMost = 32; // pairs of a lane
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t head = static_cast<int64_t>(blockIdx.x) * kV4Warps + threadIdx.x / 32;
    if (head >= rows * heads) return; // a whole warp
    const int64_t row = head / heads, begin = head * dim;
    const int pairs = static_cast<int>(dim) / 64, first = static_cast<int>(dim - rope) / 2;
    float a[kMost], b[kMost], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kMost; j++) { // all loads under way, before the first is waited for
        a[j] = b[j] = 0.0f;
        if (j < pairs) load_pair(x + begin + 2 * (lane + 32 * j), a[j], b[j]);
    }
#pragma unroll
    for (int j = 0; j < kMost; j++) sum += a[j] * a[j] + b[j] * b[j];
    const float rstd = rsqrtf(v4_warp_sum(sum) / static_cast<float>(dim) + eps);
#pragma unroll
    for (int j = 0; j < kMost; j++) {
        if (j >= pairs) break;
        const int pair = lane + 32 * j;
        if (normed) {
            a[j] = v4_rounded<T>(a[j] * rstd * (weight == nullptr ? 1.0f : weight[2 * pair]));
            b[j] = v4_rounded<T>(b[j] * rstd * (weight == nullptr ? 1.0f : weight[2 * pair + 1]));
        }
        if (pair >= first) {
            const int64_t at = row * (rope / 2) + pair - first;
            const float c = cos[at], s = inverse ? -sin[at] : sin[at], even = a[j], odd = b[j];
            a[j] = even * c - odd * s;
            b[j] = odd * c + even * s;
        }
        *reinterpret_cast<uint32_t*>(out + begin + 2 * pair) = pack_halves<T>(a[j], b[j]);
    }
}

// ---- experts

// Of each row the K experts with the largest affinity + bias, of equal ones the lower; or, with a table
// [vocabulary][K], those of its token. affinity = sqrt(softplus(logit)). shares: affinities over their sum, times `scale`.
// logits [rows][experts <= 512]; chosen, shares [rows][K <= 32]. Grid: ceil(rows / 8), a warp a row.
__device__ __forceinline__ void route_rows(const float* logits, const float* bias, const int64_t* table, const int64_t* tokens,
                                           int32_t* chosen, float* shares, int64_t rows, int64_t experts, int64_t k,
                                           float scale) {
    constexpr int kMost = 16;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kV4Warps + threadIdx.x / 32;
    if (row >= rows) return; // a whole warp
    const auto affinity = [&](int64_t expert) {
        const float x = logits[row * experts + expert];
        return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
    };
    float mine = 0.0f, own_score[kMost];
    int expert = 0;
    if (table != nullptr) {
        if (lane < k) {
            expert = static_cast<int>(table[tokens[row] * k + lane]);
            mine = affinity(expert);
        }
    } else {
#pragma unroll
        for (int j = 0; j < kMost; j++) {
            const int64_t e = lane + 32 * j;
            own_score[j] = e < experts ? affinity(e) + bias[e] : -v4_infinity();
            if (!(own_score[j] >= -3.0e38f)) own_score[j] = e < experts ? -3.0e38f : -v4_infinity(); // NaN, too, is an expert
        }
        for (int pick = 0; pick < k; pick++) {
            float best = -v4_infinity();
            int at = 1 << 30;
#pragma unroll
            for (int j = 0; j < kMost; j++) {
                if (own_score[j] > best) {
                    best = own_score[j];
                    at = lane + 32 * j;
                }
            }
#pragma unroll
            for (int distance = 16; distance >= 1; distance /= 2) {
                const float other = __shfl_xor_sync(0xffffffffu, best, distance);
                const int other_at = __shfl_xor_sync(0xffffffffu, at, distance);
                if (other > best || (other == best && other_at < at)) {
                    best = other;
                    at = other_at;
                }
            }
#pragma unroll
            for (int j = 0; j < kMost; j++) {
                if (lane + 32 * j == at) own_score[j] = -v4_infinity();
            }
            if (lane == pick) expert = at;
        }
        if (lane < k) mine = affinity(expert);
    }
    const float sum = v4_warp_sum(mine);
    if (lane < k) {
        chosen[row * k + lane] = expert;
        shares[row * k + lane] = mine / (sum + 1e-20f) * scale;
    }
}

// Rows in order of their experts, of one expert in their own: place [n] of entry i = row * K + k; ends [experts], where
// each expert's rows end. chosen [n]. Grid: ceil(n / 256) + ceil(experts / 256).
__device__ __forceinline__ void order_rows(const int32_t* chosen, int32_t* place, int32_t* ends, int64_t n, int64_t experts) {
    __shared__ __align__(16) int32_t block[kV4Threads];
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t entry_ctas = (n + kV4Threads - 1) / kV4Threads;
    const bool entries = blockIdx.x < entry_ctas;
    const int64_t mine = (blockIdx.x - (entries ? 0 : entry_ctas)) * kV4Threads + thread;
    const int expert = entries ? (mine < n ? chosen[mine] : 0) : static_cast<int>(mine);
    int32_t before = 0;
    for (int64_t first = 0; first < n; first += kV4Threads) {
        __syncthreads();
        block[thread] = first + thread < n ? chosen[first + thread] : 0x7fffffff; // behind all
        __syncthreads();
        const int equals = entries ? static_cast<int>(mine - first) : kV4Threads; // of those before it
#pragma unroll 8
        for (int i = 0; i < kV4Threads; i += 4) {
            const int4 four = *reinterpret_cast<const int4*>(block + i);
            before += four.x < expert || (four.x == expert && i < equals);
            before += four.y < expert || (four.y == expert && i + 1 < equals);
            before += four.z < expert || (four.z == expert && i + 2 < equals);
            before += four.w < expert || (four.w == expert && i + 3 < equals);
        }
    }
    if (entries && mine < n) place[mine] = before;
    if (!entries && mine < experts) ends[mine] = before;
}

// Entry i = row * K + k of x [rows][width] goes to row place[i] of sorted [n][width], its share with it. Grid: n.
template <typename T>
__device__ __forceinline__ void spread_rows(const T* x, const int32_t* place, const float* shares, T* sorted,
                                            float* sorted_shares, int64_t k, int64_t width) {
    const int64_t to = place[blockIdx.x], row = blockIdx.x / k;
    for (int64_t at = 8 * threadIdx.x; at < width; at += 8 * kV4Threads)
        store_global_16(sorted + to * width + at, load_cached_16(x + row * width + at));
    if (threadIdx.x == 0) sorted_shares[to] = shares[blockIdx.x];
}

// out = T(silu(min(gate, limit)) * clamp(up, -limit, limit) * share) of gate_up [n][2 width], gate first; shares [n], or
// null: 1. Grid: n * ceil(width / 2048).
template <typename T>
__device__ __forceinline__ void clamped_swiglu(const T* gate_up, const float* shares, T* out, int64_t width, float limit) {
    const int64_t chunks = (width + 8 * kV4Threads - 1) / (8 * kV4Threads), row = blockIdx.x / chunks;
    const int64_t at = (blockIdx.x % chunks * kV4Threads + threadIdx.x) * 8;
    if (at >= width) return;
    float gate[8], up[8];
    load_8(gate_up + row * 2 * width + at, gate);
    load_8(gate_up + row * 2 * width + width + at, up);
    const float share = shares == nullptr ? 1.0f : shares[row];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float g = gate[i] > limit ? limit : gate[i]; // NaN stays
        const float u = up[i] > limit ? limit : (up[i] < -limit ? -limit : up[i]);
        gate[i] = g / (1.0f + expf(-g)) * u * share;
    }
    store_8(out + row * width + at, gate);
}

// out[row] = T(shared[row] + sum_k routed[place[row * K + k]]). Grid: rows * ceil(width / 2048).
template <typename T>
__device__ __forceinline__ void gather_sum(const T* shared, const T* routed, const int32_t* place, T* out, int64_t k,
                                           int64_t width) {
    const int64_t chunks = (width + 8 * kV4Threads - 1) / (8 * kV4Threads), row = blockIdx.x / chunks;
    const int64_t at = (blockIdx.x % chunks * kV4Threads + threadIdx.x) * 8;
    if (at >= width) return;
    float sum[8] = {}, x[8];
    for (int64_t i = 0; i < k; i++) {
        load_8(routed + place[row * k + i] * width + at, x);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    load_8(shared + row * width + at, x);
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] += x[j];
    store_8(out + row * width + at, sum);
}

// ---- attention

// weights = T(softmax of scores * scale over the rows not hidden, and of the head's sink, which has no row). scores
// [B][heads][n] f32, hidden [B][n] bytes, sinks [heads]. Grid: B * heads.
template <typename T>
__device__ __forceinline__ void sink_softmax(const float* scores, const uint8_t* hidden, const float* sinks, T* weights,
                                             int64_t heads, int64_t n, float scale) {
    __shared__ float shared[kV4Warps];
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * n;
    const uint8_t* hides = hidden + blockIdx.x / heads * n;
    const float sink = sinks[blockIdx.x % heads];
    float top = -v4_infinity();
    for (int64_t i = threadIdx.x; i < n; i += kV4Threads) {
        if (!hides[i]) top = fmaxf(top, scores[begin + i] * scale);
    }
    top = fmaxf(v4_of_all<true>(top, shared), sink);
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < n; i += kV4Threads) {
        if (!hides[i]) sum += expf(scores[begin + i] * scale - top);
    }
    const float total = v4_of_all<false>(sum, shared) + expf(sink - top);
    for (int64_t i = threadIdx.x; i < n; i += kV4Threads)
        weights[begin + i] = static_cast<T>(hides[i] ? 0.0f : expf(scores[begin + i] * scale - top) / total);
}

// Larger floats have larger keys; zeros of both signs are equals, and NaN comes last.
__device__ __forceinline__ uint32_t v4_order_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return !(x == x) ? 0 : (bits & 0x80000000u ? ~bits : bits | 0x80000000u);
}
// The sum over all threads before this one. shared: kV4Warps ints, nobody's else until the next barrier.
__device__ __forceinline__ int v4_before_this(int x, int* shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    int sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += other;
    }
    __syncthreads();
    if (lane == 31) shared[warp] = sum;
    __syncthreads();
    int earlier = sum - x;
    for (int w = 0; w < warp; w++) earlier += shared[w];
    return earlier;
}

// The k best of each row's first num_visible scores, of equal ones the first; in rising order, -1 behind them. scores
// [rows][n] f32, num_visible [rows], chosen [rows][k]. Grid: rows.
__device__ __forceinline__ void choose_best(const float* scores, const int64_t* num_visible, int64_t* chosen, int64_t n,
                                            int64_t k) {
    __shared__ uint32_t bins[256], found[2];
    __shared__ int sums[kV4Warps];
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t row = blockIdx.x, sees = num_visible[row] < n ? num_visible[row] : n;
    const float* own = scores + row * n;
    int64_t* out = chosen + row * k;
    if (sees <= k) {
        for (int64_t i = thread; i < k; i += kV4Threads) out[i] = i < sees ? i : -1;
        return; // a whole CTA
    }
    uint32_t last = 0, left = static_cast<uint32_t>(k); // the last key that is chosen; how many of its equals are
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        bins[thread] = 0;
        __syncthreads();
        for (int64_t i = thread; i < sees; i += kV4Threads) {
            const uint32_t key = v4_order_key(own[i]);
            if (shift == 24 || (key ^ last) >> (shift + 8) == 0) atomicAdd(&bins[key >> shift & 255u], 1u);
        }
        __syncthreads();
        const uint32_t mine = bins[255 - thread], better = static_cast<uint32_t>(v4_before_this(static_cast<int>(mine), sums));
        if (better < left && better + mine >= left) { // one thread's bin
            found[0] = static_cast<uint32_t>(255 - thread);
            found[1] = left - better;
        }
        __syncthreads();
        last |= found[0] << shift;
        left = found[1];
    }
    // Each thread has a range of its own, so that places rise with numbers.
    const int64_t each = (sees + kV4Threads - 1) / kV4Threads, begin = thread * each < sees ? thread * each : sees;
    const int64_t end = begin + each < sees ? begin + each : sees;
    int equals = 0, better = 0;
    for (int64_t i = begin; i < end; i++) {
        const uint32_t key = v4_order_key(own[i]);
        equals += key == last;
        better += key > last;
    }
    const int equals_before = v4_before_this(equals, sums), room = static_cast<int>(left) - equals_before;
    const int taken = better + (room < 0 ? 0 : (room < equals ? room : equals));
    int64_t place = v4_before_this(taken, sums);
    int at = equals_before;
    for (int64_t i = begin; i < end; i++) {
        const uint32_t key = v4_order_key(own[i]);
        if (key > last || (key == last && at++ < static_cast<int>(left))) out[place++] = i;
    }
}

// The blocks that end with rows' newest tokens: a softmax over tokens, channel by channel, then norm, rotated to the
// block's first token, kept in pages. A row whose newest token ends no block, or that has none, keeps nothing.
//
// pending [slots][ring][2][width] f32, values and scores, slots slot_stride apart: width is dim, or 2 dim where blocks
// overlap, their first halves being for the block behind. slots, num_tokens [rows]; table [rows][table_width]: pages.
// pages [pages][rows_per_page][dim], page_stride apart; dim up to 512, strides in elements. Grid: rows.
template <typename T>
__device__ __forceinline__ void complete_blocks(const float* pending, int64_t slot_stride, int64_t ring, int64_t width,
                                                const int64_t* slots, const int64_t* num_tokens, const int64_t* table,
                                                int64_t table_width, const float* norm, const float* frequencies, T* pages,
                                                int64_t page_stride, int64_t rows_per_page, int64_t dim, int64_t rope,
                                                int64_t ratio, float eps) {
    constexpr int kTogether = 8;
    __shared__ float pooled[512], sums[kV4Warps];
    const int64_t n = num_tokens[blockIdx.x];
    if (n <= 0 || n % ratio != 0) return; // a whole CTA
    const int64_t block = n / ratio - 1, own = block * ratio;
    const bool overlap = width == 2 * dim;
    const int64_t first = overlap && block > 0 ? own - ratio : own;
    const float* mine = pending + slots[blockIdx.x] * slot_stride;
    float squares = 0.0f;
    for (int64_t c = threadIdx.x; c < dim; c += kV4Threads) {
        float top = -v4_infinity(), total = 0.0f, sum = 0.0f;
        for (int64_t t = first; t < n; t += kTogether) {
            float value[kTogether], score[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; i++) {
                const bool there = t + i < n;
                const float* at = mine + (there ? t + i : t) % ring * 2 * width + (overlap && t + i >= own ? dim : 0) + c;
                value[i] = at[0];
                score[i] = there ? at[width] : -v4_infinity();
            }
            float most = top;
#pragma unroll
            for (int i = 0; i < kTogether; i++) most = fmaxf(most, score[i]);
            const float before = expf(top - most);
            total *= before;
            sum *= before;
            top = most;
#pragma unroll
            for (int i = 0; i < kTogether; i++) {
                const float share = expf(score[i] - top);
                total += share;
                sum += share * value[i];
            }
        }
        const float x = v4_rounded<T>(sum / total);
        pooled[c] = x;
        squares += x * x;
    }
    const float rstd = rsqrtf(v4_of_all<false>(squares, sums) / static_cast<float>(dim) + eps);
    const int64_t page = table[blockIdx.x * table_width + block / rows_per_page];
    T* out = pages + page * page_stride + block % rows_per_page * dim;
    for (int64_t pair = threadIdx.x; pair < dim / 2; pair += kV4Threads) {
        float a = v4_rounded<T>(pooled[2 * pair] * rstd * norm[2 * pair]);
        float b = v4_rounded<T>(pooled[2 * pair + 1] * rstd * norm[2 * pair + 1]);
        const int64_t turn = pair - (dim - rope) / 2;
        if (turn >= 0) {
            const float angle = static_cast<float>(own) * frequencies[turn], c = cosf(angle), s = sinf(angle);
            const float even = a;
            a = even * c - b * s;
            b = b * c + even * s;
        }
        *reinterpret_cast<uint32_t*>(out + 2 * pair) = pack_halves<T>(a, b);
    }
}

} // namespace tailpack
