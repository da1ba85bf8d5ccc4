// The PTX instructions that the attention kernels use, one thin function each, and what stands for them on older archs.
//
// tests/kernels/cuda_on_cpu/ptx.cuh has the same functions for a CPU, so that kernels written against this header alone
// can be run lane by lane without a GPU. The guard is how it takes this header's place.
//
// Fragments (PTX ISA, "Matrix Fragments for mma.m16n8k32 / m16n8k16"), g = lane / 4, t = lane % 4:
//   A a0: row g, a1: row g + 8, both k = 4t.. (bytes) or 2t.. (halves); a2, a3: the same rows, k + 16 (bytes) or k + 8
//   B b0: column g, k = 4t.. or 2t..; b1: k + 16 or k + 8.      C c0, c1: row g, columns 2t, 2t+1; c2, c3: row g + 8
#ifndef TAILPACK_PTX_CUH
#define TAILPACK_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cuda/std/cstdint>

// The launch's dynamic shared memory as `uint8_t* name` or an array of that name.
#define TAILPACK_DYNAMIC_SHARED(name) extern __shared__ __align__(128) ::tailpack::uint8_t name[]

namespace tailpack {

using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;

// ---- shared memory

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(address));
    return r;
}
__device__ __forceinline__ float4 load_shared_f4(uint32_t address) {
    float4 r;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w) : "r"(address));
    return r;
}
__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
    uint2 r;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address));
    return r;
}

// ---- global memory

// Read once: past L1, and first to leave L2.
__device__ __forceinline__ uint4 load_stream_16(const void* p) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p));
    return r;
}
// Read again soon, or along with neighbours: into L1.
__device__ __forceinline__ uint4 load_cached_16(const void* p) { return __ldg(static_cast<const uint4*>(p)); }
__device__ __forceinline__ uint2 load_cached_8(const void* p) { return __ldg(static_cast<const uint2*>(p)); }
__device__ __forceinline__ uint32_t load_cached_4(const void* p) { return __ldg(static_cast<const unsigned*>(p)); }
__device__ __forceinline__ void store_global_16(void* p, const uint4& v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Written by another kernel of the same call: past L1.
__device__ __forceinline__ float4 load_l2_f4(const float* p) { return __ldcg(reinterpret_cast<const float4*>(p)); }
__device__ __forceinline__ uint4 load_l2_16(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }
__device__ __forceinline__ float2 load_l2_f2(const float* p) { return __ldcg(reinterpret_cast<const float2*>(p)); }

// A counter that CTAs of a grid meet at: what a thread wrote before it adds is seen by those who have loaded the sum.
__device__ __forceinline__ uint32_t add_release(uint32_t* p, uint32_t value) {
    uint32_t before;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
    return before;
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}
__device__ __forceinline__ void pause_poll() {} // where the emulator lets others run

// ---- mbarriers and the pages that arrive at them

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the inits, by the thread that made them, before the __syncthreads that shows them to the others.
__device__ __forceinline__ void mbarrier_init_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
    uint32_t done;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
    return done != 0;
}
// Until the phase of that parity is complete (a fresh barrier: parity 1 passes at once, parity 0 waits for its first).
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    while (!mbarrier_test(barrier, parity)) {
    }
}

// Copies by a whole warp (the producer's) into shared memory that complete at an mbarrier. A phase is:
//   stage_begin(full, all bytes of the phase); stage_copy(...) once or more; stage_end(full).
// The barrier is made with kStageArrivals arrivals. All 32 lanes call all three. Addresses and sizes: multiples of 16.
#if defined(TAILPACK_NO_BULK_COPY) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900)
constexpr uint32_t kStageArrivals = 32;
__device__ __forceinline__ void stage_begin(uint32_t, uint32_t) {}
__device__ __forceinline__ void stage_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t, uint64_t) {
    for (uint32_t at = 16 * (threadIdx.x % 32); at < bytes; at += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(static_cast<const uint8_t*>(from) + at)
                     : "memory");
}
__device__ __forceinline__ void stage_end(uint32_t full) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
}
__device__ __forceinline__ uint64_t evict_first_policy() { return 0; }
__device__ __forceinline__ uint64_t evict_last_policy() { return 0; }
#else
constexpr uint32_t kStageArrivals = 1;
__device__ __forceinline__ void stage_begin(uint32_t full, uint32_t bytes) {
    __syncwarp(); // a lane that still waited for the place while lane 0 goes on could miss a phase, and wait for ever
    if (threadIdx.x % 32 == 0)
        asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(full), "r"(bytes)
                     : "memory");
}
__device__ __forceinline__ void stage_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t full, uint64_t policy) {
    if (threadIdx.x % 32 == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
                     "%4;" ::"r"(to),
                     "l"(from), "r"(bytes), "r"(full), "l"(policy)
                     : "memory");
}
__device__ __forceinline__ void stage_end(uint32_t) {}
__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ uint64_t evict_last_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
#endif

// Copies of 16 bytes by single lanes, whose arrivals at a barrier follow all that the lane has started before. (A bulk copy
// takes its addresses from registers of the whole warp: one a lane would be 32 turns of a loop.)
__device__ __forceinline__ void lane_copy_16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void lane_copies_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Ask for memory to be brought into the second-level cache; nobody waits for it. Address and size: multiples of 16.
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// ---- programmatic dependent launch (nothing before sm_90: there a launch waits for the one before it)

__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until every kernel that this launch depends on is complete and its writes are visible.
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- arithmetic

// Byte i of the result: byte (selector nibble & 7) of {b, a}, or, with bit 3 of the nibble set, eight copies of its sign.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}
__device__ __forceinline__ float exp2_fast(float x) { // 2^x, 2 ulp, results below 2^-126 are 0
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float log2_fast(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float tanh_fast(float x) { // 2^-11
    float r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float divide_fast(float a, float b) { return __fdividef(a, b); } // 2 ulp; 0 for b >= 2^126
// a * b + c rounded once, then clamped to [0, 1]; NaN gives 0.
__device__ __forceinline__ float fma_saturated(float a, float b, float c) {
    float r;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
// a * b + c of 32 bits on the multiplier's pipe. With b from a kernel parameter ptxas cannot turn it into logic.
__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// ---- tensor cores

// 8x8 halves, one row a lane group: lane (g, t) holds row g, columns 2t, 2t+1 and gets column g, rows 2t, 2t+1.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t a) {
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}
// c += a b, int8 by int8 and int8 by uint8 (m16n8k32)
__device__ __forceinline__ void mma_s8_s8(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                          uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_s8_u8(int32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                          uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// c += a b, bf16 or fp16 with f32 sums (m16n8k16)
template <typename T>
__device__ __forceinline__ void mma_half(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1);
template <>
__device__ __forceinline__ void mma_half<__nv_bfloat16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                        uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_half<__half>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                 uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two floats to two halves in one register, the first in the low half.
template <typename T> __device__ __forceinline__ uint32_t pack_halves(float low, float high);
template <> __device__ __forceinline__ uint32_t pack_halves<__nv_bfloat16>(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <> __device__ __forceinline__ uint32_t pack_halves<__half>(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// Half i (0: the low one) of a register.
template <typename T> __device__ __forceinline__ float half_of(uint32_t word, int i);
template <> __device__ __forceinline__ float half_of<__nv_bfloat16>(uint32_t word, int i) {
    return __bfloat162float(__ushort_as_bfloat16(static_cast<uint16_t>(word >> 16 * i)));
}
template <> __device__ __forceinline__ float half_of<__half>(uint32_t word, int i) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16 * i)));
}
// a * b of two halves each. The sum is there for sm_80, which has no mul.bf16x2; -0 keeps the product's own sign.
template <typename T> __device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b);
template <> __device__ __forceinline__ uint32_t multiply_halves<__nv_bfloat16>(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
    return r;
}
template <> __device__ __forceinline__ uint32_t multiply_halves<__half>(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// ---- broken invariants

// Ends the launch with an error: going on would write into memory of others.
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

// The two halves of a register as floats, exactly.
template <typename T> __device__ __forceinline__ void halves_to_floats(uint32_t halves, float& low, float& high);
template <> __device__ __forceinline__ void halves_to_floats<__nv_bfloat16>(uint32_t halves, float& low, float& high) {
    low = __uint_as_float(halves << 16);
    high = __uint_as_float(halves & 0xffff0000u);
}
template <> __device__ __forceinline__ void halves_to_floats<__half>(uint32_t halves, float& low, float& high) {
    asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(low), "=f"(high)
        : "r"(halves));
}
// Half by half the larger magnitude. NaN if either is; the sign bits mean nothing.
template <typename T> __device__ __forceinline__ uint32_t max_magnitudes(uint32_t a, uint32_t b);
template <> __device__ __forceinline__ uint32_t max_magnitudes<__nv_bfloat16>(uint32_t a, uint32_t b) {
    uint32_t r;
#if __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
#endif
    return r;
}
template <> __device__ __forceinline__ uint32_t max_magnitudes<__half>(uint32_t a, uint32_t b) {
    uint32_t r;
#if __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
#endif
    return r;
}

// ---- time, for the phase-timing variant

__device__ __forceinline__ uint64_t global_nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

} // namespace tailpack

#endif
