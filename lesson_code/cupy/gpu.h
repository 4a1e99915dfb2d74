// What the kernels need and CUDA C++ has no short word for, in the GPU's own instructions (PTX).
// cpu.h says the same in C++. No #include: the text stands before each kernel file when NVRTC compiles it.

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };  // the upper half of a float

#define dynamic_shared_memory(name) extern __shared__ uint4 name[]

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ float to_float(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// To the nearest, ties to even.
template <typename T> __device__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ float16 from_float<float16>(float x) {
    float16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
    bfloat16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    unsigned bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    y.bits = nan ? 0x7fff : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
#endif
    return y;
}

// Two 16-bit numbers in one register, as the tensor cores take them.
template <typename T> __device__ __forceinline__ unsigned pack(float low, float high) {
    return from_float<T>(low).bits | unsigned(from_float<T>(high).bits) << 16;
}

// Four 8x8 matrices of 16-bit numbers from shared memory: lane i gives the address of row i % 8 of matrix i / 8.
// Of each matrix a lane receives (row lane / 4, columns 2 (lane % 4) and the next); transposed, (those rows, that column).
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row))) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(unsigned(__cvta_generic_to_shared(row))) : "memory");
}

// c += a b on the tensor cores of a warp: a is 16x16, b 16x8, c 16x8 in float32.
template <typename T>
__device__ __forceinline__ void multiply_tiles(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void multiply_tiles<float16>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // Turing multiplies half as many at a time
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ void multiply_tiles<bfloat16>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// Sixteen bytes on their way from global to shared memory, while the thread goes on. Copies that were begun since
// the last end_group() are a group; a thread has its own when all but its newest MORE groups have landed.
// Turing copies at once.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
#else
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
#endif
}
__device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int MORE> __device__ __forceinline__ void wait_for_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(MORE) : "memory");
#endif
}

// Two 16-bit numbers in one register, times a third.
template <typename T> __device__ __forceinline__ unsigned scale_pair(unsigned pair, float factor) {
    const T low = {static_cast<unsigned short>(pair)}, high = {static_cast<unsigned short>(pair >> 16)};
    return pack<T>(to_float(low) * factor, to_float(high) * factor);
}
