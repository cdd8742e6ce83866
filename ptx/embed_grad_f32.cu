// dtable[v] (+)= the sum of dx[t] over the positions t of id v: a chain over ascending positions within a
// grain, the balanced tree over grains.
//
// A block serves every 2^shift-th id and one chunk of columns, so that neighbouring ids, which are often used
// alike, are in different blocks; all chunks of the smallest ids, which often have the most positions, are among the
// blocks that start first. Its warps scan all positions once, each a segment, and list those of the
// block's ids in ascending order; then each warp sums the rows that it owns, or clears them where the sum is
// assigned. A segment whose list overflows is scanned again for each row. Rows with many positions wait to the
// end: several warps then share one, each with columns of its own and more positions under way.
//
// For few ids and one grain there is a kernel whose blocks serve one id and 128 columns each: no warp then
// waits for the rows of another id.
#include "contract.cuh"

using namespace contract;

__device__ constexpr unsigned WARPS = 8;
__device__ constexpr unsigned MOST_ROWS = 256;
__device__ constexpr unsigned QUEUE = 128;
/// Positions from which on several warps share a row of quads of columns.
__device__ constexpr unsigned MANY = 32;

struct Params {
    const int* ids;
    const float* dx;
    float* dtable;
    unsigned tokens;
    unsigned grain;
    unsigned vocab;
    unsigned d;
    /// A block has the ids that are equal to its number in this many bits, at most MOST_ROWS.
    unsigned shift;
    /// Positions that a warp can list.
    unsigned capacity;
    /// Whether the sum is added to the table's row.
    unsigned add;
};

/// One thread's columns of one row of the table.
template <bool QUADS>
struct Columns {
    static constexpr int N = QUADS ? 4 : 1;
    float v[N];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = 0.0f;
    }
    __device__ __forceinline__ void load(const float* p) {
        if constexpr (QUADS) {
            const float4 q = load4(p);
            v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
        } else {
            v[0] = *p;
        }
    }
    __device__ __forceinline__ void store(float* p) const {
        if constexpr (QUADS) store4(p, make_float4(v[0], v[1], v[2], v[3]));
        else *p = v[0];
    }
    /// `left + this`.
    __device__ __forceinline__ void add_to(const Columns& left) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = __fadd_rn(left.v[i], v[i]);
    }
    __device__ __forceinline__ void take(const Columns& right) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = __fadd_rn(v[i], right.v[i]);
    }
};

/// The tree over the grains that hold the id; one without it is left out, since its partial is +0.0 and no
/// partial is -0.0. Grains a < b meet at the level of the highest bit in which they differ; `pending` names
/// the levels at which a left side waits, in shared memory, for its right.
template <bool QUADS>
struct GrainTree {
    Columns<QUADS> sum;
    unsigned grain;
    unsigned pending;
    Columns<QUADS>* levels;

    /// Adds what waits at the levels of `mask`, lowest first.
    __device__ __forceinline__ void settle(unsigned mask) {
        for (unsigned m = pending & mask; m != 0; m &= m - 1)
            sum.add_to(levels[((unsigned)__ffs((int)m) - 1) * (32 * WARPS)]);
        pending &= ~mask;
    }
    __device__ __forceinline__ void enter(unsigned next) {
        const unsigned level = 31u - (unsigned)__clz((int)(grain ^ next));
        settle((1u << level) - 1);
        levels[level * (32 * WARPS)] = sum;
        pending |= 1u << level;
        sum.clear();
        grain = next;
    }
};

/// Adds the n oldest positions of the queue to the tree's present grain, or to the grains that they open; BATCH
/// of them are under way together.
template <bool QUADS, bool GRAINS, int BATCH>
__device__ __forceinline__ void take_positions(const Params& p, const unsigned* queue, unsigned head, unsigned n,
                                               unsigned column, GrainTree<QUADS>& tree) {
    for (unsigned start = 0; start < n; start += BATCH) {
        Columns<QUADS> row[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            row[i].clear();
            if (start + i < n && column < p.d)
                row[i].load(p.dx + (size_t)queue[(head + start + i) % QUEUE] * p.d + column);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (start + i >= n) break;
            if (GRAINS) {
                const unsigned grain = queue[(head + start + i) % QUEUE] / p.grain;
                if (tree.grain == 0xffffffffu) tree.grain = grain;
                else if (tree.grain != grain) tree.enter(grain);
            }
            tree.sum.take(row[i]);
        }
    }
}

/// Nothing, which takes 16 values at once: whoever orders instructions cannot move their loads behind it.
__device__ __forceinline__ void all_loaded(float* x) {
#ifndef BITSTEP_HOST
    asm volatile("" : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]),
                 "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15]));
#endif
}

/// sum + the listed rows of dx, ascending; all N loads are under way together. `dx` is at the thread's column.
template <int N>
__device__ __forceinline__ float take_rows(const float* dx, const unsigned* list, unsigned d, float sum) {
    float x[N];
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const uint4 t = *reinterpret_cast<const uint4*>(list + i);
        x[i] = dx[(size_t)t.x * d], x[i + 1] = dx[(size_t)t.y * d];
        x[i + 2] = dx[(size_t)t.z * d], x[i + 3] = dx[(size_t)t.w * d];
    }
#pragma unroll
    for (int i = 0; i < N; i += 16) all_loaded(x + i);
#pragma unroll
    for (int i = 0; i < N; ++i) sum = __fadd_rn(sum, x[i]);
    return sum;
}

/// The same for n of at most 16 rows, at least one; in place of rows that are not there the first is read.
__device__ __forceinline__ float take_last_rows(const float* dx, const unsigned* list, unsigned n, unsigned d, float sum) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = dx[(size_t)list[i < n ? i : 0] * d];
    all_loaded(x);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float more = __fadd_rn(sum, x[i]);
        sum = i < n ? more : sum;
    }
    return sum;
}

/// What the warps of a block know of their ids.
struct Found {
    /// Positions that are to be added, one queue a warp; read by quads.
    __align__(16) unsigned queues[WARPS][QUEUE];
    /// Positions of each id, and of each segment; the lists of the segments.
    unsigned hits[MOST_ROWS];
    unsigned listed[WARPS];
    /// Ids with many positions, in any order.
    unsigned many[MOST_ROWS];
    unsigned many_count;
};

/// sum + the n oldest positions of a queue that begins at a multiple of 64 places, n at most 64. `dx` is at the
/// thread's column.
__device__ __forceinline__ float take_queue(const float* dx, const unsigned* list, unsigned n, unsigned d, float sum) {
    if (n == 64) return take_rows<64>(dx, list, d, sum);
    unsigned i = 0;
    for (; i + 16 <= n; i += 16) sum = take_rows<16>(dx, list + i, d, sum);
    return i < n ? take_last_rows(dx, list + i, n - i, d, sum) : sum;
}

/// Positions that are scanned by one warp.
__device__ __forceinline__ unsigned segment_of(unsigned tokens) { return ((tokens + WARPS - 1) / WARPS + 31) / 32 * 32; }

/// Lists the positions of this warp's segment whose ids the block serves.
__device__ __forceinline__ void list_segment(const Params& p, Found& found, unsigned* list) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x & 31u, before = (1u << lane) - 1;
    const unsigned mask = (1u << p.shift) - 1, segment = segment_of(p.tokens);
    // Positions of a thread that are read together.
    constexpr int TOGETHER = 8;
    const unsigned from = warp * segment;
    const unsigned to = from + segment < p.tokens ? from + segment : p.tokens;
    unsigned n = 0;
    for (unsigned base = from; base < to; base += 32 * TOGETHER) {
        unsigned id[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const unsigned t = base + 32 * i + lane;
            id[i] = t < to ? (unsigned)p.ids[t] : 0xffffffffu;
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const bool hit = id[i] < p.vocab && (id[i] & mask) == blockIdx.y;
            const unsigned all = __ballot_sync(WHOLE_WARP, hit);
            if (all == 0) continue;
            const unsigned slot = n + __popc(all & before), r = id[i] >> p.shift;
            if (hit) atomicAdd(&found.hits[r], 1u);
            if (hit && slot < p.capacity) list[slot] = (base + 32 * i + lane) << 8 | r;
            n += __popc(all);
        }
    }
    if (lane == 0) found.listed[warp] = n;
}

/// The sum of one id's rows from `column` on, by one warp, whose lists start at `lists`.
template <bool QUADS, bool GRAINS, int BATCH>
__device__ __forceinline__ Columns<QUADS> sum_of(const Params& p, Found& found, unsigned* lists, unsigned r,
                                                 unsigned column) {
    constexpr unsigned TAKE = BATCH < 32 ? 32 : BATCH;
    static_assert(TAKE + 32 <= QUEUE, "a scan adds up to 32 positions to fewer than TAKE");
    const unsigned lane = threadIdx.x & 31u, before = (1u << lane) - 1, segment = segment_of(p.tokens);
    const unsigned wanted = found.hits[r], id = (r << p.shift) + blockIdx.y;
    unsigned* queue = found.queues[threadIdx.x / 32];
    // Behind the lists: the levels of the trees over grains.
    Columns<QUADS>* levels = reinterpret_cast<Columns<QUADS>*>(lists + WARPS * p.capacity) + threadIdx.x;
    GrainTree<QUADS> tree{{}, 0xffffffffu, 0, levels};
    tree.sum.clear();
    unsigned queued = 0, taken = 0;
    // One chain of single columns has all loads of a batch under way; a column that is not there reads the first.
    constexpr bool CHAIN = !QUADS && !GRAINS && BATCH == 64;
    const float* dx = p.dx + (column < p.d ? column : 0);
    auto take = [&](unsigned n) {
        if constexpr (CHAIN) {
            tree.sum.v[0] = take_queue(dx, queue + taken % QUEUE, n, p.d, tree.sum.v[0]);
        } else if (n == TAKE) {
            take_positions<QUADS, GRAINS, BATCH>(p, queue, taken, n, column, tree);
        } else {
            // A whole batch for a short rest would be mostly empty.
            take_positions<QUADS, GRAINS, (BATCH < 16 ? BATCH : 16)>(p, queue, taken, n, column, tree);
        }
    };
    for (unsigned s = 0; s < WARPS && queued < wanted; ++s) {
        const unsigned count = found.listed[s];
        const bool whole = count <= p.capacity;
        const unsigned begin = whole ? 0 : s * segment;
        const unsigned end = whole ? count : (begin + segment < p.tokens ? begin + segment : p.tokens);
        for (unsigned base = begin; base < end && queued < wanted; base += 32) {
            const unsigned i = base + lane;
            bool match = false;
            unsigned position = 0;
            if (i < end && whole) {
                const unsigned entry = lists[s * p.capacity + i];
                match = (entry & 255u) == r;
                position = entry >> 8;
            } else if (i < end) {
                match = (unsigned)p.ids[i] == id;
                position = i;
            }
            const unsigned all = __ballot_sync(WHOLE_WARP, match);
            if (all == 0) continue;
            if (match) queue[(queued + __popc(all & before)) % QUEUE] = position;
            queued += __popc(all);
            __syncwarp(WHOLE_WARP);
            if (queued - taken >= TAKE) {
                take(TAKE);
                taken += TAKE;
                __syncwarp(WHOLE_WARP);
            }
        }
    }
    if (queued > taken) take(queued - taken);
    __syncwarp(WHOLE_WARP);
    if (GRAINS) tree.settle(0xffffffffu);
    return tree.sum;
}

/// Writes the sum of id r from `column` on, or adds it.
template <bool QUADS>
__device__ __forceinline__ void leave(const Params& p, unsigned r, unsigned column, Columns<QUADS> sum) {
    if (column >= p.d) return;
    float* out = p.dtable + (size_t)((r << p.shift) + blockIdx.y) * p.d + column;
    if (p.add != 0) {
        Columns<QUADS> old;
        old.load(out);
        sum.add_to(old);
    }
    sum.store(out);
}

template <bool QUADS, bool GRAINS>
__device__ __forceinline__ void embed_grad(const Params& p) {
    extern __shared__ __align__(16) unsigned lists[];
    __shared__ Found found;
    constexpr unsigned N = Columns<QUADS>::N;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x & 31u;
    const unsigned rows = (p.vocab - blockIdx.y + (1u << p.shift) - 1) >> p.shift;
    for (unsigned r = threadIdx.x; r < rows; r += 32 * WARPS) found.hits[r] = 0;
    if (threadIdx.x == 0) found.many_count = 0;
    __syncthreads();
    list_segment(p, found, lists + warp * p.capacity);
    __syncthreads();

    const unsigned column = (blockIdx.x * 32 + lane) * N;
    for (unsigned r = warp; r < rows; r += WARPS) {
        const unsigned wanted = found.hits[r];
        if (wanted == 0 && p.add != 0) continue;
        if (QUADS && wanted >= MANY) {
            if (lane == 0) found.many[atomicAdd(&found.many_count, 1u)] = r;
            continue;
        }
        Columns<QUADS> sum;
        sum.clear();
        if (wanted != 0) sum = sum_of<QUADS, GRAINS, GRAINS ? (QUADS ? 4 : 8) : (QUADS ? 8 : 32)>(p, found, lists, r, column);
        leave<QUADS>(p, r, column, sum);
    }
    if (!QUADS) return;
    __syncthreads();
    for (unsigned part = warp; part < N * found.many_count; part += WARPS) {
        const unsigned r = found.many[part / N], single = (blockIdx.x * N + part % N) * 32 + lane;
        leave<false>(p, r, single, sum_of<false, GRAINS, GRAINS ? 16 : 64>(p, found, lists, r, single));
    }
}

#define EMBED_GRAD(NAME, QUADS, GRAINS)                                                                       \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                      \
    NAME(const int* __restrict__ ids, const float* __restrict__ dx, float* __restrict__ dtable, unsigned tokens,           \
         unsigned grain, unsigned vocab, unsigned d, unsigned shift, unsigned capacity, unsigned add) {       \
        embed_grad<QUADS, GRAINS>(Params{ids, dx, dtable, tokens, grain, vocab, d, shift, capacity, add});    \
    }

EMBED_GRAD(embed_grad_f32, false, false)
EMBED_GRAD(embed_grad_f32_quads, true, false)
EMBED_GRAD(embed_grad_f32_grains, false, true)
EMBED_GRAD(embed_grad_f32_grains_quads, true, true)

/// Threads of a block that serves one id, each a column, and the most positions it can list.
__device__ constexpr unsigned ROW_THREADS = 128;
__device__ constexpr unsigned ROW_TOKENS = 4096;

/// Lists the positions of `id` in ascending order and counts them. Word w of `masks` has a bit for each of
/// the positions from 32 w on.
__device__ __forceinline__ unsigned list_positions(const int* ids, unsigned id, unsigned tokens, unsigned* masks,
                                                   unsigned* list) {
    constexpr unsigned WARPS_OF_ROW = ROW_THREADS / 32, TOGETHER = 8;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x & 31u;
    const unsigned words = (tokens + 31) / 32;
    for (unsigned base = warp; base < words; base += WARPS_OF_ROW * TOGETHER) {
        unsigned found[TOGETHER];
#pragma unroll
        for (unsigned i = 0; i < TOGETHER; ++i) {
            const unsigned t = (base + WARPS_OF_ROW * i) * 32 + lane;
            found[i] = t < tokens ? (unsigned)ids[t] : 0xffffffffu;
        }
#pragma unroll
        for (unsigned i = 0; i < TOGETHER; ++i) {
            const unsigned mask = __ballot_sync(WHOLE_WARP, found[i] == id);
            if (lane == 0 && base + WARPS_OF_ROW * i < words) masks[base + WARPS_OF_ROW * i] = mask;
        }
    }
    __syncthreads();
    unsigned n = 0;
    for (unsigned first = 0; first < words; first += 32) {
        // Every warp counts all words and lists its own.
        const unsigned mask = first + lane < words ? masks[first + lane] : 0;
        const unsigned count = __popc(mask);
        unsigned end = count;
#pragma unroll
        for (unsigned step = 1; step < 32; step *= 2) {
            const unsigned left = __shfl_up_sync(WHOLE_WARP, end, step);
            if (lane >= step) end += left;
        }
        const unsigned start = n + end - count;
#pragma unroll
        for (unsigned i = 0; i < 32 / WARPS_OF_ROW; ++i) {
            const unsigned word = warp + WARPS_OF_ROW * i;
            const unsigned bits = __shfl_sync(WHOLE_WARP, mask, word);
            const unsigned at = __shfl_sync(WHOLE_WARP, start, word) + __popc(bits & ((1u << lane) - 1));
            if ((bits >> lane & 1u) != 0) list[at] = (first + word) * 32 + lane;
        }
        n += __shfl_sync(WHOLE_WARP, end, 31);
    }
    __syncthreads();
    return n;
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
embed_grad_f32_row(const int* __restrict__ ids, const float* __restrict__ dx, float* __restrict__ dtable,
                   unsigned tokens, unsigned d, unsigned add) {
    __shared__ unsigned masks[ROW_TOKENS / 32];
    __shared__ __align__(16) unsigned list[ROW_TOKENS];
    const unsigned id = blockIdx.x, column = blockIdx.y * ROW_THREADS + threadIdx.x;
    const unsigned n = list_positions(ids, id, tokens, masks, list);
    if (column >= d || (n == 0 && add != 0)) return;
    dx += column;
    float sum = 0.0f;
    unsigned i = 0;
    for (; i + 64 <= n; i += 64) sum = take_rows<64>(dx, list + i, d, sum);
    for (; i + 16 <= n; i += 16) sum = take_rows<16>(dx, list + i, d, sum);
    if (i < n) sum = take_last_rows(dx, list + i, n - i, d, sum);
    float* out = dtable + (size_t)id * d + column;
    *out = add != 0 ? __fadd_rn(*out, sum) : sum;
}
