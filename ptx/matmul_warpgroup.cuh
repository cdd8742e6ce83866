// Products of 16-bit matrices by warpgroups whose factors the copy engine brings, and the sums of adapters, which follow a
// product in its registers.
//
// A block has 128 rows and COLUMNS columns of the output, its two warpgroups 64 rows each. The two blocks of a cluster lie above
// each other, and each brings half of the right factor to both. A stage is 64 terms of both factors. A thread of a third
// group starts the copies of a stage as soon as what stood there was read in both blocks. Blocks stay and take tile after
// tile, so that stages of the next tile come while the last one is written; and the second group goes some stages behind the
// first, so that each of them writes while the other one multiplies.
//
// A step of wgmma is the contract's step, and an output is one chain of them over ascending terms: no tile shows in the
// bits. An adapter's sum is added to the rounded product, as a call of its own would read it.
#pragma once
#include "copy_engine.cuh"
#include "lora_wide.cuh"
#include "narrow.cuh"
#include "warpgroup.cuh"

namespace product {

using engine::Address;

constexpr unsigned ROWS = 128, TERMS = 64, GROUPS = 2, THREADS = 128 * (GROUPS + 1), BLOCKS = 2;
/// Bytes of a row of a box, of a box of 64 rows, and of the left factor of a stage.
constexpr unsigned ROW_BYTES = 128, PANEL_BYTES = 64 * ROW_BYTES, LEFT_BYTES = ROWS * ROW_BYTES;
/// Bytes of a warp's 16 x 64 outputs on their way to memory; it has two such places.
constexpr unsigned WAY_BYTES = 16 * ROW_BYTES;
/// Stages before which the second group does not begin.
constexpr unsigned BEHIND = 3;

/// Where things stand in shared memory, from a multiple of 1024 on.
template <int COLUMNS>
struct Places {
    static constexpr unsigned STAGE = LEFT_BYTES + COLUMNS * ROW_BYTES;
    static constexpr unsigned STAGES = 197 * 1024 / STAGE;
    static constexpr unsigned WAYS = STAGES * STAGE;
    static constexpr unsigned FULL = WAYS + 4 * GROUPS * 2 * WAY_BYTES;
    static constexpr unsigned EMPTY = FULL + 8 * STAGES;
};

/// A matrix descriptor (PTX ISA, wgmma): rows of 128 swizzled bytes, 1024 from 8 rows to the next, and a panel from 64
/// columns to the next where terms are rows. A block's addresses may name the block beside their 18 bits.
__device__ __forceinline__ unsigned long long descriptor(Address at) {
    return (unsigned long long)(1u << 30 | 1024 >> 4) << 32 | (PANEL_BYTES >> 4) << 16 | (at & 0x3ffff) >> 4;
}

/// d = left · right, added to what `d` is where `goes_on` is not 0: 64 rows, 16 terms. TURNED: the right factor's rows are terms.
template <class T, int COLUMNS, bool TURNED>
struct Step;

#define FOUR_TILES(d, n) EIGHT(d, n), EIGHT(d, n + 2)
#define EIGHT_TILES(d, n) FOUR_TILES(d, n), FOUR_TILES(d, n + 4)
#define STEP_OF(T, TYPE, COLUMNS, TURNED, NUMBERS, LEFT, RIGHT, GOES_ON, ...)                                      \
    template <>                                                                                                    \
    struct Step<T, COLUMNS, TURNED> {                                                                              \
        static __device__ __forceinline__ void add(float (&d)[COLUMNS / 8][4], unsigned long long left,            \
                                                   unsigned long long right, int goes_on) {                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " GOES_ON ", 0;\n"                                      \
                         "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" NUMBERS "}, "  \
                         LEFT ", " RIGHT ", p, 1, 1, 0, " #TURNED ";\n}"                                           \
                         : __VA_ARGS__                                                                             \
                         : "l"(left), "l"(right), "r"(goes_on));                                                   \
        }                                                                                                          \
    };
#define STEPS_OF(T, TYPE, TURNED)                                                                                  \
    STEP_OF(T, TYPE, 64, TURNED, NUMBERS_32, "%32", "%33", "%34", EIGHT_TILES(d, 0))                               \
    STEP_OF(T, TYPE, 128, TURNED, NUMBERS_64, "%64", "%65", "%66", EIGHT_TILES(d, 0), EIGHT_TILES(d, 8))           \
    STEP_OF(T, TYPE, 192, TURNED, NUMBERS_96, "%96", "%97", "%98", EIGHT_TILES(d, 0), EIGHT_TILES(d, 8),           \
            EIGHT_TILES(d, 16))                                                                                    \
    STEP_OF(T, TYPE, 256, TURNED, NUMBERS_128, "%128", "%129", "%130", EIGHT_TILES(d, 0), EIGHT_TILES(d, 8),       \
            EIGHT_TILES(d, 16), EIGHT_TILES(d, 24))
STEPS_OF(Bf16, "bf16", 0)
STEPS_OF(Bf16, "bf16", 1)
STEPS_OF(F16, "f16", 0)
STEPS_OF(F16, "f16", 1)

/// A place in a ring of stages, and the parity of its present round.
template <unsigned STAGES>
struct Turn {
    unsigned stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

/// The address of a lane's row of the matrices n and n + 1 of 8 columns, in 16 rows at `rows`.
__device__ __forceinline__ Address row_of(Address rows, int n) {
    const unsigned row = threadIdx.x % 16, upper = threadIdx.x / 16 % 2;
    return rows + row * ROW_BYTES + ((n + upper) ^ (row & 7)) * 16;
}

/// 64 columns of a warp's 16 rows to their place, a word two neighbours of a row, made canonical.
template <class T>
__device__ __forceinline__ void put(Address rows, unsigned (&words)[16]) {
    wide::canonical<T>(reinterpret_cast<uint4(&)[4]>(words));
#pragma unroll
    for (int n = 0; n < 8; n += 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_of(rows, n)), "r"(words[2 * n]),
                     "r"(words[2 * n + 1]), "r"(words[2 * n + 2]), "r"(words[2 * n + 3])
                     : "memory");
}

/// The factors and the output, and the factors of adapters.
struct Maps {
    const TensorMap *left, *right, *out, *low, *factor;
};

/// Tiles of two blocks, rows first; stages of terms.
struct Extent {
    unsigned row_pairs, tiles, stages;
};

/// Steps of terms of an adapter, what their sum is multiplied by, and the columns before which each part ends.
struct Adapters {
    unsigned steps;
    float scale;
    unsigned ends[3];
};

template <class T, int COLUMNS, bool TURNED, bool ADAPTS>
struct Kernel {
    typedef typename wide::StorageOf<T>::Type H;
    typedef Places<COLUMNS> At;
    static constexpr unsigned HALF = COLUMNS / 2, CHUNKS = COLUMNS / 64;

    const Maps& maps;
    const Extent& of;
    const Adapters& adapters;
    Address start;
    unsigned block;
    Turn<At::STAGES> turn;

    __device__ __forceinline__ Address stage() const { return start + turn.stage * At::STAGE; }
    __device__ __forceinline__ Address full() const { return start + At::FULL + 8 * turn.stage; }
    __device__ __forceinline__ Address empty(unsigned at) const { return start + At::EMPTY + 8 * at; }
    __device__ __forceinline__ unsigned row(unsigned tile) const { return (tile % of.row_pairs * BLOCKS + block) * ROWS; }
    __device__ __forceinline__ unsigned column(unsigned tile) const { return tile / of.row_pairs * COLUMNS; }

    /// Brings the block's rows of a left factor, and half of a right one to both blocks.
    __device__ __forceinline__ void bring_factors(const TensorMap* left, const TensorMap* right, unsigned tile, unsigned term) {
        engine::await(empty(turn.stage), turn.parity ^ 1);
        engine::expect(full(), At::STAGE);
        engine::bring(stage(), full(), left, row(tile), term);
        const Address to = stage() + LEFT_BYTES;
        if (TURNED) {
#pragma unroll
            for (unsigned c = 0; c < CHUNKS; c++)
                engine::bring_to_both(to + c * PANEL_BYTES + block * (PANEL_BYTES / 2), full(), right, term + block * (TERMS / 2),
                                      column(tile) + 64 * c);
        } else {
            engine::bring_to_both(to + block * HALF * ROW_BYTES, full(), right, column(tile) + block * HALF, term);
        }
        turn.next();
    }

    __device__ __forceinline__ void bring_tile(unsigned tile) {
        for (unsigned k = 0; k < of.stages; k++) bring_factors(maps.left, maps.right, tile, k * TERMS);
        if (ADAPTS) bring_factors(maps.low, maps.factor, tile, 0);
    }

    /// The warp has read a stage, for both blocks' copies.
    __device__ __forceinline__ void release(unsigned at) const {
        if (threadIdx.x % 32 < BLOCKS) engine::arrive_at(empty(at), threadIdx.x % 32);
    }

    /// The chains of a warpgroup's 64 rows.
    __device__ __forceinline__ void multiply(float (&d)[COLUMNS / 8][4], unsigned group, bool& leads) {
        unsigned former = 0;
        for (unsigned k = 0; k < of.stages; k++) {
            engine::await(full(), turn.parity);
            const unsigned long long left = descriptor(stage() + group * PANEL_BYTES), right = descriptor(stage() + LEFT_BYTES);
            tensor::begin_products();
#pragma unroll
            for (int s = 0; s < 4; s++) Step<T, COLUMNS, TURNED>::add(d, left + 2 * s, right + (TURNED ? 128 : 2) * s, k | s);
            tensor::commit_products();
            tensor::wait_products<1>();
            if (k > 0) release(former);
            former = turn.stage;
            turn.next();
            if (leads && k + 1 == BEHIND) {
                asm volatile("bar.arrive 1, 256;" ::: "memory");
                leads = false;
            }
        }
        tensor::wait_products<0>();
        tensor::settled(d);
        release(former);
    }

    /// 64 columns of the tile: the product rounded, then the adapters' sum added and rounded again.
    __device__ __forceinline__ void round(unsigned (&words)[16], const float (&d)[COLUMNS / 8][4], int c, unsigned tile, unsigned group,
                                          Address factors) const {
        float sums[8][4];
        if (ADAPTS) {
            // Of several parts the left factor has the terms side by side.
            const unsigned first = column(tile) + 64 * c;
            const unsigned part = TURNED ? 0 : (first >= adapters.ends[0]) + (first >= adapters.ends[1]) + (first >= adapters.ends[2]);
            const unsigned long long left = descriptor(factors + group * PANEL_BYTES) + 2 * part * adapters.steps;
            const unsigned long long right = descriptor(factors + LEFT_BYTES + c * PANEL_BYTES);
            tensor::begin_products();
            for (unsigned s = 0; s < adapters.steps; s++)
                Step<T, 64, TURNED>::add(sums, left + 2 * s, right + (TURNED ? 128 : 2) * s, s);
            tensor::commit_products();
            tensor::wait_products<0>();
            tensor::settled(sums);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float* x = &d[8 * c + i / 2][2 * (i & 1)];
            words[i] = narrow::round2(x[0], x[1], H());
            if (!ADAPTS) continue;
            const float2 y = narrow::widen2(words[i], H());
            const float* sum = &sums[i / 2][2 * (i & 1)];
            words[i] = TURNED ? narrow::round2(__fadd_rn(y.x, sum[0]), __fadd_rn(y.y, sum[1]), H())
                              : narrow::round2(__fmaf_rn(adapters.scale, sum[0], y.x), __fmaf_rn(adapters.scale, sum[1], y.y), H());
        }
    }

    __device__ __forceinline__ void compute(unsigned cluster, unsigned clusters) {
        const unsigned warp = threadIdx.x / 32, group = warp / 4;
        const bool first = threadIdx.x % 32 == 0;
        const Address ways = start + At::WAYS + warp * 2 * WAY_BYTES;
        unsigned way = 0;
        if (group == 1) asm volatile("bar.sync 1, 256;" ::: "memory");
        bool leads = group == 0;
        for (unsigned tile = cluster; tile < of.tiles; tile += clusters) {
            const unsigned own_row = row(tile) + 16 * warp, own_column = column(tile);
            float d[COLUMNS / 8][4];
            multiply(d, group, leads);
            const unsigned of_factors = turn.stage;
            const Address factors = stage();
            if (ADAPTS) {
                engine::await(full(), turn.parity);
                turn.next();
            }
#pragma unroll
            for (int c = 0; c < (int)CHUNKS; c++) {
                unsigned words[16];
                round(words, d, c, tile, group, factors);
                if (first) engine::await_read<1>();
                __syncwarp();
                put<T>(ways + way, words);
                tensor::publish();
                __syncwarp();
                if (first) engine::take(maps.out, ways + way, own_row, own_column + 64 * c);
                way ^= WAY_BYTES;
            }
            if (ADAPTS) release(of_factors);
        }
        if (first) engine::await_read<0>();
    }

    static __device__ __forceinline__ void run(const Maps& maps, const Extent& of, const Adapters& adapters) {
        extern __shared__ unsigned char memory[];
        const Address start = ((Address)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
        Kernel kernel = {maps, of, adapters, start, engine::block_of_cluster(), {}};
        if (threadIdx.x == 0) {
            for (unsigned s = 0; s < At::STAGES; s++) {
                engine::begin_barrier(start + At::FULL + 8 * s, 1);
                engine::begin_barrier(kernel.empty(s), 4 * GROUPS * BLOCKS);
            }
            engine::publish_barriers();
        }
        engine::meet_cluster();
        const unsigned cluster = blockIdx.x / BLOCKS, clusters = gridDim.x / BLOCKS;
        if (threadIdx.x >= 128 * GROUPS) {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
            if (threadIdx.x == 128 * GROUPS) {
                engine::prefetch(maps.left), engine::prefetch(maps.right), engine::prefetch(maps.out);
                for (unsigned tile = cluster; tile < of.tiles; tile += clusters) kernel.bring_tile(tile);
            }
        } else {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
            kernel.compute(cluster, clusters);
        }
        // No block ends while the other one still arrives at its barriers.
        engine::meet_cluster();
    }
};

}  // namespace product

#define MAP const __grid_constant__ TensorMap
#define PRODUCT_KERNEL(NAME) \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(product::THREADS, 1) NAME
#define EXTENT_PARAMETERS unsigned row_pairs, unsigned tiles, unsigned stages
#define RUN(T, COLUMNS, TURNED, ADAPTS, ADAPTERS, ...)                                                             \
    product::Kernel<T, COLUMNS, TURNED, ADAPTS>::run(product::Maps{__VA_ARGS__},                                   \
                                                     product::Extent{row_pairs, tiles, stages}, ADAPTERS)

/// y[t, o] = sum_i x[t, i] * w[o, i]; TURNED: w[i, o].
#define PRODUCT(NAME, T, COLUMNS, TURNED)                                                                          \
    PRODUCT_KERNEL(NAME)(MAP x, MAP w, MAP y, EXTENT_PARAMETERS) {                                                 \
        RUN(T, COLUMNS, TURNED, false, product::Adapters{}, &x, &w, &y);                                           \
    }

/// And y[t, o] = fma(scale, sum_k s[t, k] * b[o, k], y[t, o]), the terms of each column's part.
#define PRODUCT_LORA_UP(NAME, T, COLUMNS)                                                                          \
    PRODUCT_KERNEL(NAME)(MAP x, MAP w, MAP y, MAP s, MAP b, EXTENT_PARAMETERS, unsigned steps, float scale,        \
                         unsigned end_0, unsigned end_1, unsigned end_2) {                                         \
        const product::Adapters adapters = {steps, scale, {end_0, end_1, end_2}};                                  \
        RUN(T, COLUMNS, false, true, adapters, &x, &w, &y, &s, &b);                                                \
    }

/// The product is dx, and dx[t, i] = dx[t, i] + sum_k ds[t, k] * a[k, i].
#define PRODUCT_LORA_DOWN_GRAD(NAME, T, COLUMNS)                                                                   \
    PRODUCT_KERNEL(NAME)(MAP dy, MAP w, MAP dx, MAP ds, MAP a, EXTENT_PARAMETERS, unsigned steps) {                \
        const product::Adapters adapters = {steps, 1.0f, {0, 0, 0}};                                               \
        RUN(T, COLUMNS, true, true, adapters, &dy, &w, &dx, &ds, &a);                                              \
    }

/// All kernels of a storage and its format.
#define FORWARD_PRODUCTS(NAME, T)                                                                                  \
    PRODUCT(NAME##_128, T, 128, false)                                                                             \
    PRODUCT(NAME##_192, T, 192, false)                                                                             \
    PRODUCT(NAME##_256, T, 256, false)                                                                             \
    PRODUCT_LORA_UP(NAME##_lora_up_128, T, 128)                                                                    \
    PRODUCT_LORA_UP(NAME##_lora_up_192, T, 192)                                                                    \
    PRODUCT_LORA_UP(NAME##_lora_up_256, T, 256)
#define INPUT_GRADIENTS(NAME, T)                                                                                   \
    PRODUCT(NAME##_128, T, 128, true)                                                                              \
    PRODUCT(NAME##_192, T, 192, true)                                                                              \
    PRODUCT(NAME##_256, T, 256, true)                                                                              \
    PRODUCT_LORA_DOWN_GRAD(NAME##_lora_down_128, T, 128)                                                           \
    PRODUCT_LORA_DOWN_GRAD(NAME##_lora_down_192, T, 192)                                                           \
    PRODUCT_LORA_DOWN_GRAD(NAME##_lora_down_256, T, 256)
