// Stand-ins for CUDA's qualifiers and vector types.
#pragma once

#include <cstdint>

using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// Static shared memory: the thread-local block of this library, which each CTA finds filled with garbage (cta.h).
#define __shared__ static thread_local

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define CTA_VECTOR_TYPES(NAME, VALUE)                                                                                  \
    struct __align__(2 * sizeof(VALUE)) NAME##2 {                                                                      \
        VALUE x, y;                                                                                                    \
    };                                                                                                                 \
    struct __align__(sizeof(VALUE) < 8 ? 4 * sizeof(VALUE) : 16) NAME##4 {                                             \
        VALUE x, y, z, w;                                                                                              \
    };                                                                                                                 \
    inline NAME##2 make_##NAME##2(VALUE x, VALUE y) { return {x, y}; }                                                 \
    inline NAME##4 make_##NAME##4(VALUE x, VALUE y, VALUE z, VALUE w) { return {x, y, z, w}; }
CTA_VECTOR_TYPES(char, signed char)
CTA_VECTOR_TYPES(uchar, unsigned char)
CTA_VECTOR_TYPES(short, short)
CTA_VECTOR_TYPES(ushort, unsigned short)
CTA_VECTOR_TYPES(int, int)
CTA_VECTOR_TYPES(uint, unsigned)
CTA_VECTOR_TYPES(longlong, long long)
CTA_VECTOR_TYPES(ulonglong, unsigned long long)
CTA_VECTOR_TYPES(float, float)
CTA_VECTOR_TYPES(double, double)
#undef CTA_VECTOR_TYPES
