// What mma.sync gives: chains of tensor-core steps on 64 x 64 outputs a block, to be compared with the rule.
//
// A is [tiles][64][steps * K], B is [tiles][64][steps * K] (a column of B is a row here), C and D are
// [tiles][64][64]. Each of the block's four warps takes 16 rows of A against all 64 columns.
#include "probe.cuh"

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
