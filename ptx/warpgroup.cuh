// What the kernels of warpgroups share: Hopper's wgmma (PTX ISA, asynchronous warpgroup level matrix instructions).
#ifndef BITSTEP_WARPGROUP_CUH
#define BITSTEP_WARPGROUP_CUH

namespace tensor {

// What was written to shared memory is seen by wgmma after the next barrier.
__device__ __forceinline__ void publish() {
#ifndef BITSTEP_HOST
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Registers are ready for the products that follow.
__device__ __forceinline__ void begin_products() {
#ifndef BITSTEP_HOST
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void commit_products() {
#ifndef BITSTEP_HOST
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most `PENDING` groups of products are under way.
template <int PENDING>
__device__ __forceinline__ void wait_products() {
#ifndef BITSTEP_HOST
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

// Keeps the use of accumulators behind the wait before it, and their making before the products that follow.
template <int N>
__device__ __forceinline__ void settled(float (&d)[N][4]) {
#ifndef BITSTEP_HOST
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(d[n][e])::"memory");
#endif
}

}  // namespace tensor

// Accumulators of two tiles of 8 columns as operands, and the numbers of so many operands.
#define EIGHT(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), \
                    "+f"(d[n + 1][1]), "+f"(d[n + 1][2]), "+f"(d[n + 1][3])
#define NUMBERS_32                                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_64                                                                                 \
    NUMBERS_32                                                                                     \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS_96                                                                                 \
    NUMBERS_64                                                                                     \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
    "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NUMBERS_128                                                                                \
    NUMBERS_96                                                                                     \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
    "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#endif
