// Reads memory once, 16 bytes a load, eight loads in flight a thread: the read bandwidth that other kernels are held to.
extern "C" __global__ void __launch_bounds__(512) read_stream(const uint4* from, long long count, unsigned* never) {
    unsigned sum = 0;
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 x[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(x[k].x), "=r"(x[k].y), "=r"(x[k].z), "=r"(x[k].w)
                         : "l"(from + i + k * stride));
#pragma unroll
        for (int k = 0; k < 8; k++) sum ^= x[k].x ^ x[k].y ^ x[k].z ^ x[k].w;
    }
    for (; i < count; i += stride) sum ^= from[i].x;
    if (sum == 0x9e3779b9u) *never = sum; // keeps the loads
}
