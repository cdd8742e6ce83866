// What the two probes of the tensor-core step share: where a thread's fragments lie.
#pragma once

typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

// 32-bit words of a row in one step: 16 numbers of 16 bits or 8 of 32 bits, which lie alike in fragments.
static constexpr uint32_t STEP_WORDS = 8;

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
