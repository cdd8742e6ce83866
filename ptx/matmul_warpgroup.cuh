// Products of 16-bit matrices by warpgroups whose factors the copy engine brings, and what follows a product in its
// registers: the sums of adapters, SwiGLU, SwiGLU's gradient.
//
// A block has 128 rows and COLUMNS columns of the output, its two warpgroups 64 rows each. The two blocks of a cluster lie above
// each other, and each brings half of the right factor to both. A stage is 64 terms of both factors. A thread of a third
// group starts the copies of a stage as soon as what stood there was read in both blocks. Blocks stay and take tile after
// tile, so that stages of the next tile come while the last one is written; and the second group goes some stages behind the
// first, so that each of them writes while the other one multiplies.
//
// A step of wgmma is the contract's step, and an output is one chain of them over ascending terms: no tile shows in the
// bits. What follows begins with the rounded product, as a call of its own would read it.
#pragma once
#include "copy_engine.cuh"
#include "lora_wide.cuh"
#include "narrow.cuh"
#include "swiglu.cuh"
#include "warpgroup.cuh"

namespace product {

using engine::Address;

constexpr unsigned ROWS = 128, TERMS = 64, GROUPS = 2, THREADS = 128 * (GROUPS + 1), BLOCKS = 2;
/// Bytes of a row of a box, of a box of 64 rows, and of the left factor of a stage.
constexpr unsigned ROW_BYTES = 128, PANEL_BYTES = 64 * ROW_BYTES, LEFT_BYTES = ROWS * ROW_BYTES;
/// Bytes of a warp's 16 x 64 outputs, which stand in shared memory before they leave by rows; it has two such places.
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
    typedef typename wide::StorageOf<T>::Type H;
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) sum = wide::add_nothing(sum, words[i], H());
    if (sum != 0) {
#pragma unroll
        for (int i = 0; i < 16; i++) words[i] = narrow::canonical2<H>(words[i]);
    }
#pragma unroll
    for (int n = 0; n < 8; n += 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_of(rows, n)), "r"(words[2 * n]),
                     "r"(words[2 * n + 1]), "r"(words[2 * n + 2]), "r"(words[2 * n + 3])
                     : "memory");
}

/// The same the other way.
__device__ __forceinline__ void get(Address rows, unsigned (&words)[16]) {
#pragma unroll
    for (int n = 0; n < 8; n += 2)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[2 * n]), "=r"(words[2 * n + 1]), "=r"(words[2 * n + 2]), "=r"(words[2 * n + 3])
                     : "r"(row_of(rows, n))
                     : "memory");
}

/// 16 rows of 64 columns to memory, rows of `stride` elements.
__device__ __forceinline__ void leave(Address rows, unsigned short* to, unsigned stride) {
    const unsigned lane = threadIdx.x % 32, first = lane / 8, chunk = lane % 8;
#pragma unroll
    for (unsigned i = 0; i < 4; i++) {
        const unsigned row = 4 * i + first;
        uint4 eight;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                     : "r"(rows + row * ROW_BYTES + (chunk ^ (row & 7)) * 16)
                     : "memory");
        *(uint4*)(to + row * (size_t)stride + 8 * chunk) = eight;
    }
}

/// What follows a product. SwiGLU behind a product with the weight; its gradient behind one that is the gradient of an input.
enum class After { NOTHING, ADAPTERS, SWIGLU, ADAPTERS_SWIGLU };

typedef unsigned short Word;

/// The factors; the factors of adapters; SwiGLU's operand before its gradient.
struct Maps {
    const TensorMap *left, *right, *low, *factor, *held;
};

/// The output, and what SwiGLU gives or gets back.
struct Outputs {
    Word *out, *gated;
};

/// Tiles of two blocks, rows first; stages of terms; columns of the output; those of one projection where SwiGLU follows.
struct Extent {
    unsigned row_pairs, tiles, stages, columns, projection;
};

/// Steps of terms of an adapter, what their sum is multiplied by, and the columns before which each part ends.
struct Adapters {
    unsigned steps;
    float scale;
    unsigned ends[3];
};

template <class T, int COLUMNS, bool TURNED, After AFTER>
struct Kernel {
    typedef typename wide::StorageOf<T>::Type H;
    typedef Places<COLUMNS> At;
    static constexpr bool ADAPTS = AFTER == After::ADAPTERS || AFTER == After::ADAPTERS_SWIGLU;
    static constexpr bool GATED = AFTER == After::SWIGLU || AFTER == After::ADAPTERS_SWIGLU;
    /// Forward a tile has as many columns of the gate as of the other projection.
    static constexpr bool GATES = GATED && !TURNED, UNGATES = GATED && TURNED;
    static constexpr unsigned HALF = COLUMNS / 2, TILE = GATES ? HALF : COLUMNS, CHUNKS = COLUMNS / 64;

    const Maps& maps;
    const Outputs& outputs;
    const Extent& of;
    const Adapters& adapters;
    Address start;
    unsigned block;
    Turn<At::STAGES> turn;

    __device__ __forceinline__ Address stage() const { return start + turn.stage * At::STAGE; }
    __device__ __forceinline__ Address full() const { return start + At::FULL + 8 * turn.stage; }
    __device__ __forceinline__ Address empty(unsigned at) const { return start + At::EMPTY + 8 * at; }
    __device__ __forceinline__ unsigned row(unsigned tile) const { return (tile % of.row_pairs * BLOCKS + block) * ROWS; }
    __device__ __forceinline__ unsigned column(unsigned tile) const { return tile / of.row_pairs * TILE; }

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
            const unsigned first = column(tile) + block * (GATES ? of.projection : HALF);
            engine::bring_to_both(to + block * HALF * ROW_BYTES, full(), right, first, term);
        }
        turn.next();
    }

    /// Brings what both projections hold in 64 columns.
    __device__ __forceinline__ void bring_held(unsigned tile, unsigned c) {
        engine::await(empty(turn.stage), turn.parity ^ 1);
        engine::expect(full(), 2 * LEFT_BYTES);
#pragma unroll
        for (unsigned side = 0; side < 2; side++)
            engine::bring(stage() + side * LEFT_BYTES, full(), maps.held, row(tile), side * of.projection + column(tile) + 64 * c);
        turn.next();
    }

    __device__ __forceinline__ void bring_tile(unsigned tile) {
        for (unsigned k = 0; k < of.stages; k++) bring_factors(maps.left, maps.right, tile, k * TERMS);
        if (ADAPTS) bring_factors(maps.low, maps.factor, tile, 0);
        if (UNGATES) {
            for (unsigned c = 0; c < CHUNKS; c++) bring_held(tile, c);
        }
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
            const unsigned first = column(tile) + 64 * c + (GATES && c >= CHUNKS / 2 ? of.projection - HALF : 0);
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

    /// What SwiGLU gives, over the words of the gate.
    static __device__ __forceinline__ void gate(unsigned (&gate)[16], const unsigned (&up)[16]) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 g = narrow::widen2(gate[i], H()), u = narrow::widen2(up[i], H());
            gate[i] = narrow::round2(swiglu::gated(g.x, swiglu::sigmoid<H>(g.x), u.x), swiglu::gated(g.y, swiglu::sigmoid<H>(g.y), u.y), H());
        }
    }

    /// SwiGLU's output over the words of its gradient, and the gradients of both projections over what these held.
    static __device__ __forceinline__ void ungate(unsigned (&words)[16], unsigned (&gate)[16], unsigned (&up)[16]) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float2 g = narrow::widen2(gate[i], H()), u = narrow::widen2(up[i], H());
            const float2 y = narrow::widen2(words[i], H());
            const float2 s = make_float2(swiglu::sigmoid<H>(g.x), swiglu::sigmoid<H>(g.y));
            words[i] = narrow::round2(swiglu::gated(g.x, s.x, u.x), swiglu::gated(g.y, s.y, u.y), H());
            swiglu::backward(y.x, s.x, g.x, u.x), swiglu::backward(y.y, s.y, g.y, u.y);
            gate[i] = narrow::round2(g.x, g.y, H()), up[i] = narrow::round2(u.x, u.y, H());
        }
    }

    __device__ __forceinline__ void compute(unsigned cluster, unsigned clusters) {
        const unsigned warp = threadIdx.x / 32, group = warp / 4;
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
            // 64 columns of the warp's rows; they leave by whole rows of 128 bytes.
            const auto send = [&](unsigned(&words)[16], Word* to, unsigned stride, unsigned at) {
                put<T>(ways + way, words);
                __syncwarp();
                leave(ways + way, to + (size_t)own_row * stride + at, stride);
                way ^= WAY_BYTES;
            };
#pragma unroll
            for (int c = 0; c < (int)(GATES ? CHUNKS / 2 : CHUNKS); c++) {
                unsigned words[16], more[16];
                const unsigned at = own_column + 64 * c;
                round(words, d, c, tile, group, factors);
                if (GATES) {
                    send(words, outputs.out, of.columns, at);
                    round(more, d, c + CHUNKS / 2, tile, group, factors);
                    send(more, outputs.out, of.columns, of.projection + at);
                    gate(words, more);
                    send(words, outputs.gated, of.projection, at);
                } else if (UNGATES) {
                    if (ADAPTS && c + 1 == CHUNKS) release(of_factors);
                    unsigned gates[16];
                    engine::await(full(), turn.parity);
                    const Address held = stage() + warp * WAY_BYTES;
                    get(held, gates), get(held + LEFT_BYTES, more);
                    release(turn.stage);
                    turn.next();
                    ungate(words, gates, more);
                    send(words, outputs.gated, of.projection, at);
                    send(gates, outputs.out, of.columns, at);
                    send(more, outputs.out, of.columns, of.projection + at);
                } else {
                    send(words, outputs.out, of.columns, at);
                }
            }
            if (ADAPTS && !UNGATES) release(of_factors);
        }
    }

    static __device__ __forceinline__ void run(const Maps& maps, const Outputs& outputs, const Extent& of, const Adapters& adapters) {
        extern __shared__ unsigned char memory[];
        const Address start = ((Address)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
        Kernel kernel = {maps, outputs, of, adapters, start, engine::block_of_cluster(), {}};
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
                engine::prefetch(maps.left), engine::prefetch(maps.right);
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
#define EXTENT_PARAMETERS unsigned row_pairs, unsigned tiles, unsigned stages, unsigned columns
#define RUN(T, COLUMNS, TURNED, AFTER, ADAPTERS, OUT, GATED, PROJECTION, ...)                                      \
    product::Kernel<T, COLUMNS, TURNED, product::After::AFTER>::run(                                               \
        product::Maps{__VA_ARGS__}, product::Outputs{OUT, GATED},                                                  \
        product::Extent{row_pairs, tiles, stages, columns, PROJECTION}, ADAPTERS)

/// y[t, o] = sum_i x[t, i] * w[o, i]; TURNED: w[i, o].
#define PRODUCT(NAME, T, COLUMNS, TURNED)                                                                          \
    PRODUCT_KERNEL(NAME)(MAP x, MAP w, unsigned short* y, EXTENT_PARAMETERS) {                                     \
        RUN(T, COLUMNS, TURNED, NOTHING, product::Adapters{}, y, 0, 0, &x, &w);                                    \
    }

/// And a[t, o] = (y[t, o] * sigmoid(y[t, o])) * y[t, d + o], of 2 d columns.
#define PRODUCT_SWIGLU(NAME, T, COLUMNS)                                                                           \
    PRODUCT_KERNEL(NAME)(MAP x, MAP w, unsigned short* y, unsigned short* a, EXTENT_PARAMETERS) {                  \
        RUN(T, COLUMNS, 0, SWIGLU, product::Adapters{}, y, a, columns / 2, &x, &w);                                \
    }

/// The product is da, of d columns: SwiGLU's gradient over what `gate_up` holds, and its output to a.
#define PRODUCT_SWIGLU_GRAD(NAME, T, COLUMNS)                                                                      \
    PRODUCT_KERNEL(NAME)(MAP dy, MAP w, MAP held, unsigned short* gate_up, unsigned short* a, EXTENT_PARAMETERS) { \
        RUN(T, COLUMNS, 1, SWIGLU, product::Adapters{}, gate_up, a, columns / 2, &dy, &w, 0, 0, &held);            \
    }

/// And y[t, o] = fma(scale, sum_k s[t, k] * b[o, k], y[t, o]), the terms of each column's part.
#define PRODUCT_LORA_UP(NAME, T, COLUMNS)                                                                          \
    PRODUCT_KERNEL(NAME)(MAP x, MAP w, MAP s, MAP b, unsigned short* y, EXTENT_PARAMETERS, unsigned steps,         \
                         float scale, unsigned end_0, unsigned end_1, unsigned end_2) {                            \
        const product::Adapters adapters = {steps, scale, {end_0, end_1, end_2}};                                  \
        RUN(T, COLUMNS, 0, ADAPTERS, adapters, y, 0, 0, &x, &w, &s, &b);                                           \
    }

/// Both.
#define PRODUCT_LORA_UP_SWIGLU(NAME, T, COLUMNS)                                                                   \
    PRODUCT_KERNEL(NAME)(MAP x, MAP w, MAP s, MAP b, unsigned short* y, unsigned short* a, EXTENT_PARAMETERS,      \
                         unsigned steps, float scale) {                                                            \
        const product::Adapters adapters = {steps, scale, {columns / 2, columns, columns}};                        \
        RUN(T, COLUMNS, 0, ADAPTERS_SWIGLU, adapters, y, a, columns / 2, &x, &w, &s, &b);                          \
    }

/// The product is dx, and dx[t, i] = dx[t, i] + sum_k ds[t, k] * a[k, i].
#define PRODUCT_LORA_DOWN_GRAD(NAME, T, COLUMNS)                                                                   \
    PRODUCT_KERNEL(NAME)(MAP dy, MAP w, MAP ds, MAP a, unsigned short* dx, EXTENT_PARAMETERS, unsigned steps) {    \
        const product::Adapters adapters = {steps, 1.0f, {0, 0, 0}};                                               \
        RUN(T, COLUMNS, 1, ADAPTERS, adapters, dx, 0, 0, &dy, &w, &ds, &a);                                        \
    }

/// Both, with SwiGLU's gradient last.
#define PRODUCT_LORA_DOWN_GRAD_SWIGLU_GRAD(NAME, T, COLUMNS)                                                       \
    PRODUCT_KERNEL(NAME)(MAP dy, MAP w, MAP ds, MAP a, MAP held, unsigned short* gate_up, unsigned short* gated,   \
                         EXTENT_PARAMETERS, unsigned steps) {                                                      \
        const product::Adapters adapters = {steps, 1.0f, {0, 0, 0}};                                               \
        RUN(T, COLUMNS, 1, ADAPTERS_SWIGLU, adapters, gate_up, gated, columns / 2, &dy, &w, &ds, &a, &held);       \
    }

/// All kernels of a storage and its format.
#define FORWARD_PRODUCTS(NAME, T)                                                                                  \
    PRODUCT(NAME##_128, T, 128, 0)                                                                                 \
    PRODUCT(NAME##_192, T, 192, 0)                                                                                 \
    PRODUCT(NAME##_256, T, 256, 0)                                                                                 \
    PRODUCT_SWIGLU(NAME##_swiglu_256, T, 256)                                                                      \
    PRODUCT_LORA_UP(NAME##_lora_up_128, T, 128)                                                                    \
    PRODUCT_LORA_UP(NAME##_lora_up_192, T, 192)                                                                    \
    PRODUCT_LORA_UP(NAME##_lora_up_256, T, 256)                                                                    \
    PRODUCT_LORA_UP_SWIGLU(NAME##_lora_up_swiglu_256, T, 256)
#define INPUT_GRADIENTS(NAME, T)                                                                                   \
    PRODUCT(NAME##_128, T, 128, 1)                                                                                 \
    PRODUCT(NAME##_192, T, 192, 1)                                                                                 \
    PRODUCT(NAME##_256, T, 256, 1)                                                                                 \
    PRODUCT_SWIGLU_GRAD(NAME##_swiglu_grad_256, T, 256)                                                            \
    PRODUCT_LORA_DOWN_GRAD(NAME##_lora_down_128, T, 128)                                                           \
    PRODUCT_LORA_DOWN_GRAD(NAME##_lora_down_192, T, 192)                                                           \
    PRODUCT_LORA_DOWN_GRAD(NAME##_lora_down_256, T, 256)                                                           \
    PRODUCT_LORA_DOWN_GRAD_SWIGLU_GRAD(NAME##_lora_down_swiglu_grad_256, T, 256)
