// The copy engine (PTX ISA, cp.async.bulk.tensor) and the barriers that count its bytes, in a cluster of two blocks.
//
// A box is rows of 128 bytes, which stand in shared memory with the swizzle of 128 bytes: chunk c of row r at place
// c ^ (r mod 8), from a multiple of 1024 on. What lies beyond a matrix comes as zeros.
#ifndef BITSTEP_COPY_ENGINE_CUH
#define BITSTEP_COPY_ENGINE_CUH

/// A matrix and a box of it, as the driver encodes them (CUtensorMap).
struct __align__(64) TensorMap {
    unsigned long long words[16];
};

namespace engine {

/// An address in shared memory.
typedef unsigned Address;

__device__ __forceinline__ unsigned block_of_cluster() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/// The threads of both blocks meet.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Begins a barrier's first phase, of parity 0; the cluster has to meet before it is used.
__device__ __forceinline__ void begin_barrier(Address barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Barriers that were begun are seen by the cluster and by the copy engine.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Waits for the end of the phase of this parity, which is the present one or the one before.
__device__ __forceinline__ void await(Address barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n@!over bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
/// Arrives, and adds bytes that the phase waits for.
__device__ __forceinline__ void expect(Address barrier, unsigned bytes) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
/// Arrives at the barrier at this place of a block of the cluster.
__device__ __forceinline__ void arrive_at(Address barrier, unsigned block) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
                 "r"(block)
                 : "memory");
}

__device__ __forceinline__ void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// Starts copying the box whose first element is (row, column) to this block; its bytes count at the barrier.
__device__ __forceinline__ void bring(Address to, Address barrier, const TensorMap* map, unsigned row, unsigned column) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(row)
                 : "memory");
}
/// The same to this place of both blocks, and each one's barrier.
__device__ __forceinline__ void bring_to_both(Address to, Address barrier, const TensorMap* map, unsigned row, unsigned column) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], "
                 "[%2], %5;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((unsigned short)3)
                 : "memory");
}
/// Starts copying a box to memory.
__device__ __forceinline__ void take(const TensorMap* map, Address from, unsigned row, unsigned column) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\ncp.async.bulk.commit_group;" ::"l"(map),
                 "r"(from), "r"(column), "r"(row)
                 : "memory");
}
/// Waits until of the boxes that this thread has taken at most `N` are still to be read.
template <int N>
__device__ __forceinline__ void await_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

}  // namespace engine

#endif
