// Stand-in for NVIDIA's header.
#pragma once
#include <cstdint>
#include <cstring>
struct __nv_bfloat16 {
    std::uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return {0x7fff};
    return {static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)}; // to nearest, ties to even
}
