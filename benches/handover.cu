// How warps of a block may hand shared memory from one to the next, what that costs, and what racecheck says of each.
//
//   nvcc -gencode arch=compute_80,code=compute_80 -o handover benches/handover.cu
//   ./handover                      # each form: right or wrong, nanoseconds a hand-over
//   for form in none arrive rendezvous lanes leader; do
//       compute-sanitizer --tool racecheck --racecheck-report all ./handover "$form" 64; done
//
// A ring of warps sums rows into chains of columns that lie in shared memory, as the relay of the norm's gradient
// does: the warp with a row takes the chains from the warp with the row before. All forms but `none` order the two
// by PTX's memory model, so a hazard that racecheck reports for one of them is the tool's; it must report `none`,
// which orders nothing. Exit code 0: all sums of the forms that ran, `none` aside, are right.
#include <cstdio>
#include <cstdlib>
#include <cstring>

constexpr unsigned WARPS = 8, COLUMNS = 768, QUADS = COLUMNS / 128, BLOCKS = 132;

enum Form { NONE, ARRIVE, RENDEZVOUS, LANES, LEADER };

// Barriers in shared memory that complete once for each hand-over (PTX ISA, mbarrier); a phase's parity tells it
// from the one before.
struct Barriers {
    unsigned first;

    __device__ Barriers(unsigned long long* words, unsigned arrivals) : first((unsigned)__cvta_generic_to_shared(words)) {
        if (threadIdx.x == 0) {
            for (unsigned warp = 0; warp < WARPS; ++warp)
                asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(first + 8 * warp), "r"(arrivals) : "memory");
        }
        __syncthreads();
    }
    __device__ void arrive(unsigned warp) const {
        asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(first + 8 * warp) : "memory");
    }
    __device__ void wait(unsigned warp, unsigned parity) const {
        unsigned done;
        do {
            asm volatile(
                "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                : "=r"(done) : "r"(first + 8 * warp), "r"(parity) : "memory");
        } while (done == 0);
    }
};

template <Form FORM>
__device__ void ring(float* sums, unsigned rows) {
    __shared__ __align__(16) float chains[COLUMNS];
    __shared__ unsigned long long words[WARPS];
    const unsigned warp = threadIdx.x / 32, next = warp + 1 == WARPS ? 0 : warp + 1, first = 4 * (threadIdx.x % 32);
    const Barriers barriers(words, FORM == LANES ? 32 : 1);
    unsigned taken = 0;
    for (unsigned t = warp; t < rows; t += WARPS) {
        if (t > 0) {
            if (FORM == ARRIVE || FORM == RENDEZVOUS) asm volatile("bar.sync %0, 64;" ::"r"(warp + 1) : "memory");
            if (FORM == LANES || FORM == LEADER) barriers.wait(warp, taken++ & 1);
        }
        float4 acc[QUADS];
#pragma unroll
        for (int k = 0; k < QUADS; ++k) {
            acc[k] = t > 0 ? *reinterpret_cast<const float4*>(chains + first + 128 * k) : make_float4(0, 0, 0, 0);
            acc[k].x += 1, acc[k].y += 2, acc[k].z += 3, acc[k].w += 4;
        }
        float* to = t + 1 < rows ? chains : sums + (size_t)blockIdx.x * COLUMNS;
#pragma unroll
        for (int k = 0; k < QUADS; ++k) *reinterpret_cast<float4*>(to + first + 128 * k) = acc[k];
        if (t + 1 == rows) return;
        if (FORM == ARRIVE) asm volatile("bar.arrive %0, 64;" ::"r"(next + 1) : "memory");
        if (FORM == RENDEZVOUS) asm volatile("bar.sync %0, 64;" ::"r"(next + 1) : "memory");
        if (FORM == LANES) barriers.arrive(next);
        if (FORM == LEADER) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) barriers.arrive(next);
        }
    }
}

extern "C" __global__ void handover_none(float* sums, unsigned rows) { ring<NONE>(sums, rows); }
extern "C" __global__ void handover_arrive(float* sums, unsigned rows) { ring<ARRIVE>(sums, rows); }
extern "C" __global__ void handover_rendezvous(float* sums, unsigned rows) { ring<RENDEZVOUS>(sums, rows); }
extern "C" __global__ void handover_lanes(float* sums, unsigned rows) { ring<LANES>(sums, rows); }
extern "C" __global__ void handover_leader(float* sums, unsigned rows) { ring<LEADER>(sums, rows); }

static void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(2);
}

static float host[BLOCKS * COLUMNS];

// Whether the sums are right; prints a line.
static bool run(const char* name, void (*kernel)(float*, unsigned), unsigned rows, float* sums) {
    cudaEvent_t start, end;
    check(cudaEventCreate(&start), "event"), check(cudaEventCreate(&end), "event");
    kernel<<<BLOCKS, 32 * WARPS>>>(sums, rows);
    check(cudaMemset(sums, 255, sizeof host), "memset");
    check(cudaEventRecord(start), "event");
    kernel<<<BLOCKS, 32 * WARPS>>>(sums, rows);
    check(cudaEventRecord(end), "event");
    check(cudaMemcpy(host, sums, sizeof host, cudaMemcpyDeviceToHost), name);
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, end), "event");
    unsigned wrong = 0;
    for (unsigned i = 0; i < BLOCKS * COLUMNS; ++i) wrong += host[i] != (float)rows * (i % 4 + 1);
    printf("%-10s %s (%u of %u sums differ), %.1f ns a hand-over\n", name, wrong ? "WRONG" : "right", wrong,
           BLOCKS * COLUMNS, 1e6 * ms / rows);
    return wrong == 0;
}

int main(int count, char** words) {
    const struct {
        const char* name;
        void (*kernel)(float*, unsigned);
    } forms[] = {{"none", handover_none}, {"arrive", handover_arrive}, {"rendezvous", handover_rendezvous},
                 {"lanes", handover_lanes}, {"leader", handover_leader}};
    const char* wanted = count > 1 ? words[1] : "";
    const unsigned rows = count > 2 ? (unsigned)atoi(words[2]) : 100000;
    if (rows == 0 || rows > 1000000) return fprintf(stderr, "rows: 1 to 1000000\n"), 2;
    float* sums;
    check(cudaMalloc(&sums, sizeof host), "memory");
    bool right = true;
    unsigned ran = 0;
    for (const auto& form : forms) {
        if (*wanted && strcmp(wanted, form.name)) continue;
        ++ran;
        right &= run(form.name, form.kernel, rows, sums) || form.kernel == handover_none;
    }
    if (ran == 0) return fprintf(stderr, "forms: none, arrive, rendezvous, lanes, leader\n"), 2;
    return right ? 0 : 1;
}
