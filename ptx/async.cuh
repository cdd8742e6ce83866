// Asynchronous copies from global to shared memory (PTX ISA, cp.async). A host build has its own.
#ifndef BITSTEP_ASYNC_CUH
#define BITSTEP_ASYNC_CUH

// Copies 16 bytes, both addresses a multiple of 16; writes zeros where `present` is false, and reads
// nothing then.
__device__ __forceinline__ void copy_async_16(float* to, const float* from, bool present) {
#ifdef BITSTEP_HOST
    emu_cp_async(to, from, 16, present ? 16 : 0);
#else
    unsigned address = (unsigned)__cvta_generic_to_shared(to);
    int bytes = present ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
#endif
}

// As copy_async_16 for 4 bytes.
__device__ __forceinline__ void copy_async_4(float* to, const float* from, bool present) {
#ifdef BITSTEP_HOST
    emu_cp_async(to, from, 4, present ? 4 : 0);
#else
    unsigned address = (unsigned)__cvta_generic_to_shared(to);
    int bytes = present ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
#endif
}

// Copies the float at index `at` to the same index, both addresses a multiple of 4. A constant index goes
// into the instruction, as one address is converted for all of them.
__device__ __forceinline__ void copy_async_at(float* to, const float* from, unsigned at) {
#ifdef BITSTEP_HOST
    emu_cp_async(to + at, from + at, 4);
#else
    const unsigned address = (unsigned)__cvta_generic_to_shared(to) + 4 * at;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from + at) : "memory");
#endif
}

// Closes the group of this thread's copies since the last call.
__device__ __forceinline__ void copy_async_commit() {
#ifdef BITSTEP_HOST
    emu_cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `PENDING` of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
#ifdef BITSTEP_HOST
    emu_cp_async_wait_group(PENDING);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

#endif
