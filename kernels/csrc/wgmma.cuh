// Hopper's warpgroup instructions (sm_90a): products whose operands lie in shared memory, one thin function each.
//
// tests/kernels/cuda_on_cpu/wgmma.cuh has the same functions for a CPU. The guard is how it takes this header's place.
//
// A warpgroup is four warps from a multiple of four on; its threads call these together. A product is asynchronous:
//   hold(d); wgmma_fence(); wgmma_...(d, ...) any number; wgmma_commit();      a group of products
//   wgmma_wait<N>(); hold(d);                                                  until all but the newest N groups are done
// Between them nothing may touch d, the registers of A or the shared memory that is read. `hold` keeps the compiler from
// moving what is done with d across the place where it stands.
//
// Fragments (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"), warp w of the group, g = lane / 4, t = lane % 4:
//   D d[4 i], d[4 i + 1]: row 16 w + g, columns 8 i + 2 t, + 1; d[4 i + 2], d[4 i + 3]: row 16 w + g + 8, the same columns
//   A a[0]: row 16 w + g, k = 2 t, 2 t + 1; a[1]: row 16 w + g + 8; a[2], a[3]: the same rows, k + 8
//
// Operands in shared memory consist of *slabs*: 64 halves (128 bytes) a row, 16-byte chunk c of row r at chunk c ^ (r % 8)
// (the 128-byte swizzle), from a multiple of 1,024 bytes on.
#ifndef TAILPACK_WGMMA_CUH
#define TAILPACK_WGMMA_CUH

#include "ptx.cuh"

namespace tailpack {

// Where byte `byte` of row `row` lies in a slab.
__device__ __forceinline__ constexpr uint32_t slab_offset(uint32_t row, uint32_t byte) {
    return row * 128 + ((byte / 16 ^ row % 8) * 16 | byte % 16);
}

// ---- shared memory by address

__device__ __forceinline__ void store_shared_16(uint32_t address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
    uint32_t r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
    return r;
}

// ---- global memory

// The 128 bytes around an address into L2.
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }

// ---- matrix descriptors (PTX ISA, "Matrix Descriptor Format"); byte offsets in units of 16

// A slab with the contracted dim along its rows: A of 64 rows, or B of 64 columns. Step s of 16 values: + 2 s.
__device__ __forceinline__ uint64_t operand_along_rows(uint32_t slab) {
    constexpr uint64_t kSwizzle128 = 1ull << 62, kStride = 1024 / 16; // from 8 rows to the next 8
    return kSwizzle128 | kStride << 32 | 1ull << 16 | (slab & 0x3ffff) >> 4;
}
// B of 64 columns a slab, slabs `slab_bytes` apart, with the contracted dim across the rows. Step s of 16 rows: + 128 s.
__device__ __forceinline__ uint64_t operand_across_rows(uint32_t slab, uint32_t slab_bytes) {
    constexpr uint64_t kSwizzle128 = 1ull << 62, kStride = 1024 / 16; // from 8 rows to the next 8
    return kSwizzle128 | kStride << 32 | static_cast<uint64_t>(slab_bytes / 16) << 16 | (slab & 0x3ffff) >> 4;
}

// ---- order

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
template <int N> __device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// By each thread that stored to shared memory, before the barrier behind which a product or a bulk copy touches it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers, passed from one warpgroup to the others; launch bounds must name the threads of the CTA

template <int COUNT> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- products: d = a b, or d += a b; bf16 or fp16 with f32 sums

// clang-format off
#define TAILPACK_SUMS_32(d) \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define TAILPACK_SUM_NAMES_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TAILPACK_SUMS_64(d) \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define TAILPACK_SUM_NAMES_64 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
// clang-format on

template <typename T> struct Wgmma;
#define TAILPACK_WGMMA(T, NAME)                                                                                             \
    template <> struct Wgmma<T> {                                                                                           \
        /* m64n64k16, A and B along rows */                                                                                 \
        static __device__ __forceinline__ void scores(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {            \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                       \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" TAILPACK_SUM_NAMES_32             \
                         "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                                   \
                         : TAILPACK_SUMS_32(d)                                                                              \
                         : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)));                                         \
        }                                                                                                                   \
        /* m64n128k16, A along rows, B across rows */                                                                       \
        static __device__ __forceinline__ void output(float (&d)[64], uint64_t a, uint64_t b) {                            \
            asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" TAILPACK_SUM_NAMES_64           \
                         "}, %64, %65, 1, 1, 1, 0, 1;"                                                                    \
                         : TAILPACK_SUMS_64(d)                                                                             \
                         : "l"(a), "l"(b));                                                                                 \
        }                                                                                                                   \
        /* m64n128k16, A in registers, B across rows */                                                                     \
        static __device__ __forceinline__ void output(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,  \
                                                      uint64_t b) {                                                         \
            asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" TAILPACK_SUM_NAMES_64           \
                         "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                                                      \
                         : TAILPACK_SUMS_64(d)                                                                             \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                     \
        }                                                                                                                   \
    };
TAILPACK_WGMMA(__nv_bfloat16, "bf16")
TAILPACK_WGMMA(__half, "f16")
#undef TAILPACK_WGMMA
#undef TAILPACK_SUMS_32
#undef TAILPACK_SUMS_64
#undef TAILPACK_SUM_NAMES_32
#undef TAILPACK_SUM_NAMES_64

} // namespace tailpack

#endif
