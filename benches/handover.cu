// How warps of a block may hand shared memory from one to the next, what that costs, and what racecheck says of each.
//
//   nvcc -gencode arch=compute_80,code=compute_80 -o handover benches/handover.cu
//   ./handover                      # each form: right or wrong, nanoseconds a hand-over
//   for form in none arrive rendezvous lanes leader; do
//       compute-sanitizer --tool racecheck --racecheck-report all ./handover "$form" 64; done
//   ./handover FORM ROWS COLUMNS DELAY STAY
//
// A ring of warps sums rows into chains of columns that lie in shared memory, as the relay of the norm's gradient
// does: the warp with a row takes the chains from the warp with the row before. All forms but `none` order the two
// by PTX's memory model, so a hazard that racecheck reports for one of them is the tool's; it must report `none`,
// which orders nothing. DELAY is the most cycles that a warp waits before a row, another number each time; with STAY
// 1 no warp of a block ends before all have come to their ends. Exit code 0: all sums of the forms that ran, `none`
// aside, are right.
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

struct Task {
    float* sums;
    unsigned rows, columns, delay, stay;
};

// Waits up to `most` cycles, another number for each block and row.
__device__ void wait_some(unsigned row, unsigned most) {
    if (most == 0) return;
    unsigned h = (blockIdx.x * 2654435761u) ^ (row * 2246822519u);
    h = (h ^ (h >> 15)) * 3266489917u;
    const long long end = clock64() + (h >> 8) % most;
    while (clock64() < end) {}
}

template <Form FORM>
__device__ void ring(const Task& task) {
    __shared__ __align__(16) float chains[COLUMNS];
    __shared__ unsigned long long words[WARPS];
    const unsigned warp = threadIdx.x / 32, next = warp + 1 == WARPS ? 0 : warp + 1, first = 4 * (threadIdx.x % 32);
    const Barriers barriers(words, FORM == LANES ? 32 : 1);
    unsigned taken = 0;
    for (unsigned t = warp; t < task.rows; t += WARPS) {
        wait_some(t, task.delay);
        if (t > 0) {
            if (FORM == ARRIVE || FORM == RENDEZVOUS) asm volatile("bar.sync %0, 64;" ::"r"(warp + 1) : "memory");
            if (FORM == LANES || FORM == LEADER) barriers.wait(warp, taken++ & 1);
        }
        const bool last = t + 1 == task.rows;
        float* to = last ? task.sums + (size_t)blockIdx.x * COLUMNS : chains;
#pragma unroll
        for (int k = 0; k < QUADS; ++k) {
            const unsigned i = first + 128 * k;
            if (i >= task.columns) continue;
            float4 acc = t > 0 ? *reinterpret_cast<const float4*>(chains + i) : make_float4(0, 0, 0, 0);
            *reinterpret_cast<float4*>(to + i) = make_float4(acc.x + 1, acc.y + 2, acc.z + 3, acc.w + 4);
        }
        if (last) continue;
        if (FORM == ARRIVE) asm volatile("bar.arrive %0, 64;" ::"r"(next + 1) : "memory");
        if (FORM == RENDEZVOUS) asm volatile("bar.sync %0, 64;" ::"r"(next + 1) : "memory");
        if (FORM == LANES) barriers.arrive(next);
        if (FORM == LEADER) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) barriers.arrive(next);
        }
    }
    if (task.stay) __syncthreads();
}

extern "C" __global__ void handover_none(Task task) { ring<NONE>(task); }
extern "C" __global__ void handover_arrive(Task task) { ring<ARRIVE>(task); }
extern "C" __global__ void handover_rendezvous(Task task) { ring<RENDEZVOUS>(task); }
extern "C" __global__ void handover_lanes(Task task) { ring<LANES>(task); }
extern "C" __global__ void handover_leader(Task task) { ring<LEADER>(task); }

static void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(2);
}

static float host[BLOCKS * COLUMNS];

// Whether the sums are right; prints a line.
static bool run(const char* name, void (*kernel)(Task), const Task& task) {
    cudaEvent_t start, end;
    check(cudaEventCreate(&start), "event"), check(cudaEventCreate(&end), "event");
    kernel<<<BLOCKS, 32 * WARPS>>>(task);
    check(cudaMemset(task.sums, 255, sizeof host), "memset");
    check(cudaEventRecord(start), "event");
    kernel<<<BLOCKS, 32 * WARPS>>>(task);
    check(cudaEventRecord(end), "event");
    check(cudaMemcpy(host, task.sums, sizeof host, cudaMemcpyDeviceToHost), name);
    float ms = 0;
    check(cudaEventElapsedTime(&ms, start, end), "event");
    unsigned wrong = 0;
    for (unsigned i = 0; i < BLOCKS * COLUMNS; ++i)
        wrong += i % COLUMNS < task.columns && host[i] != (float)task.rows * (i % 4 + 1);
    printf("%-10s %s (%u of %u sums differ), %.1f ns a hand-over\n", name, wrong ? "WRONG" : "right", wrong,
           BLOCKS * task.columns, 1e6 * ms / task.rows);
    return wrong == 0;
}

static unsigned number(int count, char** words, int at, unsigned otherwise, unsigned most) {
    if (count <= at) return otherwise;
    char* end;
    const unsigned long found = strtoul(words[at], &end, 10);
    if (*end == 0 && found <= most) return (unsigned)found;
    fprintf(stderr, "%s: expected an integer up to %u\n", words[at], most);
    exit(2);
}

int main(int count, char** words) {
    const struct {
        const char* name;
        void (*kernel)(Task);
    } forms[] = {{"none", handover_none}, {"arrive", handover_arrive}, {"rendezvous", handover_rendezvous},
                 {"lanes", handover_lanes}, {"leader", handover_leader}};
    const char* wanted = count > 1 ? words[1] : "";
    Task task;
    task.rows = number(count, words, 2, 100000, 1000000), task.columns = number(count, words, 3, COLUMNS, COLUMNS);
    task.delay = number(count, words, 4, 0, 1000000), task.stay = number(count, words, 5, 0, 1);
    if (task.rows == 0 || task.columns % 4) return fprintf(stderr, "expected rows, and columns by fours\n"), 2;
    check(cudaMalloc(&task.sums, sizeof host), "memory");
    bool right = true;
    unsigned ran = 0;
    for (const auto& form : forms) {
        if (*wanted && strcmp(wanted, form.name)) continue;
        ++ran;
        right &= run(form.name, form.kernel, task) || form.kernel == handover_none;
    }
    if (ran == 0) return fprintf(stderr, "forms: none, arrive, rendezvous, lanes, leader\n"), 2;
    return right ? 0 : 1;
}
