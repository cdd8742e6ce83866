// What mma.sync gives: chains of tensor-core steps on 64 x 64 outputs a block, to be compared with the rule.
//
// A is [tiles][64][steps * K], B is [tiles][64][steps * K] (a column of B is a row here), C and D are
// [tiles][64][64]. Each of the block's four warps takes 16 rows of A against all 64 columns.
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

#define MMA_16BIT(TYPE)                                                                                     \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "                             \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                          \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

struct Bf16 {
    static __device__ void step(float d[4], const uint32_t a[4], const uint32_t b[2]) { MMA_16BIT("bf16"); }
};

struct F16 {
    static __device__ void step(float d[4], const uint32_t a[4], const uint32_t b[2]) { MMA_16BIT("f16"); }
};

struct Tf32 {
    static __device__ void step(float d[4], const uint32_t a[4], const uint32_t b[2]) {
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};

template <class Kind>
__device__ void probe(const uint32_t *a, const uint32_t *b, const float *c, float *d, uint32_t steps) {
    Place at;
    const uint32_t words = steps * STEP_WORDS;
    const uint32_t *rows = a + blockIdx.x * 64 * words, *columns = b + blockIdx.x * 64 * words;
    for (uint32_t n = 0; n < 64; n += 8) {
        float acc[4];
        at.load(acc, c + blockIdx.x * 4096, n);
        for (uint32_t s = 0; s < steps; s++) {
            uint32_t left[4], right[2];
            at.left(left, rows + s * STEP_WORDS, words);
            const uint32_t *column = columns + (n + at.group) * words + s * STEP_WORDS;
            right[0] = column[at.member];
            right[1] = column[at.member + 4];
            Kind::step(acc, left, right);
        }
        at.store(acc, d + blockIdx.x * 4096, n);
    }
}

#define PROBE(NAME, KIND)                                                                                   \
    extern "C" __global__ void __launch_bounds__(128)                                                       \
        probe_mma_##NAME(const uint32_t *a, const uint32_t *b, const float *c, float *d, uint32_t steps) {  \
        probe<KIND>(a, b, c, d, steps);                                                                     \
    }

PROBE(bf16, Bf16)
PROBE(f16, F16)
PROBE(tf32, Tf32)
