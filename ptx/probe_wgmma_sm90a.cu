// What wgmma gives: as probe_mma.cu, with one warpgroup instruction of 64 x 64 outputs a step.
//
// A comes from registers, B from shared memory without swizzle: core matrices of 8 columns and 16 bytes of k.
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

// 32-bit words of a row in one step: 16 numbers of 16 bits or 8 of 32 bits, which lie alike in fragments.
static constexpr uint32_t STEP_WORDS = 8;

// Where a thread's fragments lie; the other probe has the same. A shared header would be given to the compiler
// with every kernel of the folder, whose bytes depend on the headers at hand.
struct Place {
    uint32_t group, member, row;

    __device__ Place() {
        const uint32_t lane = threadIdx.x % 32;
        group = lane / 4;
        member = lane % 4;
        row = threadIdx.x / 32 * 16 + group;
    }

    // The warp's 16 rows of one step.
    __device__ void left(uint32_t a[4], const uint32_t *rows, uint32_t words) const {
        a[0] = rows[row * words + member];
        a[1] = rows[(row + 8) * words + member];
        a[2] = rows[row * words + member + 4];
        a[3] = rows[(row + 8) * words + member + 4];
    }

    // The thread's four outputs among the eight columns from n on.
    __device__ void load(float acc[4], const float *c, uint32_t n) const {
        for (uint32_t i = 0; i < 4; i++) acc[i] = c[index(i, n)];
    }

    __device__ void store(const float acc[4], float *d, uint32_t n) const {
        for (uint32_t i = 0; i < 4; i++) d[index(i, n)] = acc[i];
    }

    __device__ uint32_t index(uint32_t i, uint32_t n) const {
        return (row + i / 2 * 8) * 64 + n + member * 2 + i % 2;
    }
};

#define OUTPUTS(d)                                                                                          \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), \
    "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
    "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), \
    "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
    "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])

#define WGMMA(SHAPE, TYPE, TRANSPOSE)                                                                       \
    asm volatile("{\n"                                                                                      \
                 ".reg .pred p;\n"                                                                          \
                 "setp.ne.b32 p, 1, 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPE "." TYPE " "                            \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                                                                                   \
                 "{%32, %33, %34, %35}, %36, p, 1, 1" TRANSPOSE ";\n"                                     \
                 "}\n"                                                                                      \
                 : OUTPUTS(d)                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

struct Bf16 {
    static __device__ void step(float d[32], const uint32_t a[4], uint64_t b) { WGMMA("m64n64k16", "bf16", ", 0"); }
};

struct F16 {
    static __device__ void step(float d[32], const uint32_t a[4], uint64_t b) { WGMMA("m64n64k16", "f16", ", 0"); }
};

struct Tf32 {
    static __device__ void step(float d[32], const uint32_t a[4], uint64_t b) { WGMMA("m64n64k8", "tf32", ""); }
};

// Bytes from one core matrix to the next along k, and from one group of eight columns to the next.
static constexpr uint64_t ALONG_K = 128, ALONG_N = 256;

// Copies one step of B: word w of column n goes to core matrix (n / 8, w / 4).
__device__ void stage(uint32_t *shared, const uint32_t *columns, uint32_t words) {
    for (uint32_t i = threadIdx.x; i < 64 * STEP_WORDS; i += 128) {
        const uint32_t n = i / STEP_WORDS, w = i % STEP_WORDS;
        shared[n / 8 * (ALONG_N / 4) + w / 4 * (ALONG_K / 4) + n % 8 * 4 + w % 4] = columns[n * words + w];
    }
}

template <class Kind>
__device__ void probe(const uint32_t *a, const uint32_t *b, const float *c, float *d, uint32_t steps) {
    __shared__ __align__(128) uint32_t shared[64 * STEP_WORDS];
    Place at;
    const uint32_t words = steps * STEP_WORDS;
    const uint32_t *rows = a + blockIdx.x * 64 * words, *columns = b + blockIdx.x * 64 * words;
    const uint64_t start = (uint32_t)__cvta_generic_to_shared(shared);
    const uint64_t descriptor = (start & 0x3ffff) >> 4 | ALONG_K >> 4 << 16 | ALONG_N >> 4 << 32;
    float acc[32];
#pragma unroll
    for (uint32_t n = 0; n < 64; n += 8) at.load(acc + n / 2, c + blockIdx.x * 4096, n);
    for (uint32_t s = 0; s < steps; s++) {
        uint32_t left[4];
        at.left(left, rows + s * STEP_WORDS, words);
        __syncthreads();
        stage(shared, columns + s * STEP_WORDS, words);
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        Kind::step(acc, left, descriptor);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
#pragma unroll
    for (uint32_t n = 0; n < 64; n += 8) at.store(acc + n / 2, d + blockIdx.x * 4096, n);
}

#define PROBE(NAME, KIND)                                                                                   \
    extern "C" __global__ void __launch_bounds__(128) probe_wgmma_sm90a_##NAME(                             \
        const uint32_t *a, const uint32_t *b, const float *c, float *d, uint32_t steps) {                   \
        probe<KIND>(a, b, c, d, steps);                                                                     \
    }

PROBE(bf16, Bf16)
PROBE(f16, F16)
PROBE(tf32, Tf32)
