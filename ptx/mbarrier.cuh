// Barriers in shared memory that some threads arrive at and others wait for (PTX ISA, mbarrier): what a thread has done
// before it arrives is seen by those that have waited. A barrier completes one phase after the other; a phase's parity
// tells it from the one before.
#ifndef BITSTEP_MBARRIER_CUH
#define BITSTEP_MBARRIER_CUH

namespace mbarrier {

/// The state of a barrier.
typedef unsigned long long Word;

/// Begins the first phase, of parity 0; the block has to meet at a barrier before it is used.
__device__ __forceinline__ void init(Word* barrier, unsigned arrivals) {
#ifdef BITSTEP_HOST
    emu_mbarrier_init(barrier, arrivals);
#else
    const unsigned address = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void arrive(Word* barrier) {
#ifdef BITSTEP_HOST
    emu_mbarrier_arrive(barrier);
#else
    const unsigned address = (unsigned)__cvta_generic_to_shared(barrier);
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address) : "memory");
#endif
}
/// Waits for the end of the phase of this parity, which is the present one or the one before.
__device__ __forceinline__ void wait(Word* barrier, unsigned parity) {
#ifdef BITSTEP_HOST
    emu_mbarrier_wait(barrier, parity);
#else
    const unsigned address = (unsigned)__cvta_generic_to_shared(barrier);
    unsigned over;
    do {
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(over) : "r"(address), "r"(parity) : "memory");
    } while (over == 0);
#endif
}

}  // namespace mbarrier

#endif
