// Copies from global to shared memory that run beside the arithmetic (PTX ISA, cp.async), and loads that
// see what other blocks wrote. Under BITSTEP_HOST each goes to a plain form with the same result.
#pragma once

// Copies the float at index `at` to the same index, both addresses a multiple of 4. A constant index goes
// into the instruction, as one address is converted for all of them.
__device__ __forceinline__ void copy_async_4(float* to, const float* from, unsigned at = 0) {
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

// Waits until at most PENDING of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
#ifdef BITSTEP_HOST
    emu_cp_async_wait_group(PENDING);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
