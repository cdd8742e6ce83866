// The numeric contract on the device: elementary functions, row reductions and token sums, operation by
// operation as `src/num` states them. Every float operation is an intrinsic with its rounding.
#pragma once

namespace contract {

// ---------------------------------------------------------------------------------------------------
// Elementary functions: src/num/elementary/{exp,log}.rs.

__device__ constexpr unsigned NAN_BITS = 0x7fc00000u;
__device__ constexpr unsigned ONE_BITS = 0x3f800000u;
/// ln 2 in two parts, and the negated parts.
__device__ constexpr unsigned LN2_HI = 0x3f317200u;
__device__ constexpr unsigned LN2_LO = 0x35bfbe8eu;
__device__ constexpr unsigned MINUS_LN2_HI = 0xbf317200u;
__device__ constexpr unsigned MINUS_LN2_LO = 0xb5bfbe8eu;
/// Half of the longest step by which an exponent moves, as a change of the bits.
__device__ constexpr unsigned HALF_WAY = 64u << 23;

__device__ __forceinline__ float from_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned to_bits(float x) { return __float_as_uint(x); }
/// A change of the sign rounds nothing; as an operand's modifier it costs nothing.
__device__ __forceinline__ float negate(float x) { return -x; }
__device__ __forceinline__ bool is_nan(float x) { return (to_bits(x) & 0x7fffffffu) > 0x7f800000u; }

/// `y`, or the canonical NaN where `x` is a NaN.
__device__ __forceinline__ float canonical_nan(float x, float y) {
    return is_nan(x) ? from_bits(NAN_BITS) : y;
}

/// `e^x = (1 + r + tail) * 2^n`; the low nine bits of `n_bits` are n.
struct Reduced {
    float r;
    float tail;
    unsigned n_bits;
};

__device__ __forceinline__ Reduced reduce_exp(float x) {
    const float round = 12582912.0f;
    const float t = __fmaf_rn(x, from_bits(0x3fb8aa3bu), round);
    const float n = __fsub_rn(t, round);
    const float r = __fmaf_rn(n, from_bits(MINUS_LN2_HI), x);
    const float full = __fmaf_rn(n, from_bits(MINUS_LN2_LO), r);
    float q = __fmaf_rn(from_bits(0x3ab55c69u), full, from_bits(0x3c091eb9u));
    q = __fmaf_rn(q, full, from_bits(0x3d2aac2du));
    q = __fmaf_rn(q, full, from_bits(0x3e2aaa46u));
    q = __fmaf_rn(q, full, from_bits(0x3efffffeu));
    return {r, __fmaf_rn(n, from_bits(MINUS_LN2_LO), __fmul_rn(__fmul_rn(full, full), q)), to_bits(t)};
}

/// `p * 2^n` rounded once.
__device__ __forceinline__ float scale_exp(float p, unsigned n_bits, bool down) {
    const unsigned way = down ? HALF_WAY : 0u - HALF_WAY;
    const unsigned near = to_bits(p) + (n_bits << 23) + way;
    return __fmul_rn(from_bits(near), from_bits(ONE_BITS - way));
}

/// `e^x`.
__device__ __forceinline__ float exp(float x) {
    float z = x < -104.0f ? -104.0f : x;
    z = z > 89.0f ? 89.0f : z;
    const Reduced e = reduce_exp(z);
    const float p = __fadd_rn(1.0f, __fadd_rn(e.r, e.tail));
    return canonical_nan(x, scale_exp(p, e.n_bits, x < 0.0f));
}

/// `e^z` for `z = -|x|`: `hi + lo = e^z / 2^n`, and `power = 2^n`, or `+0.0` where `e^z` is below `e^-60`.
struct NegativeExp {
    float hi;
    float lo;
    unsigned n_bits;
    float power;

    __device__ __forceinline__ explicit NegativeExp(float x) {
        float z = from_bits(to_bits(x) | 0x80000000u);
        z = z < -104.0f ? -104.0f : z;
        const Reduced e = reduce_exp(z);
        const float s = __fadd_rn(e.r, e.tail);
        const float s_low = __fsub_rn(e.tail, __fsub_rn(s, e.r));
        hi = __fadd_rn(1.0f, s);
        lo = __fadd_rn(__fsub_rn(s, __fsub_rn(hi, 1.0f)), s_low);
        n_bits = e.n_bits;
        power = z < -60.0f ? 0.0f : from_bits((e.n_bits << 23) + ONE_BITS);
    }
    /// `e^z` as an unevaluated sum.
    __device__ __forceinline__ float high() const { return __fmul_rn(hi, power); }
    __device__ __forceinline__ float low() const { return __fmul_rn(lo, power); }
    /// `e^z` rounded once.
    __device__ __forceinline__ float value() const { return scale_exp(__fadd_rn(hi, lo), n_bits, true); }
};

/// `1 / (1 + e^-x)`.
__device__ __forceinline__ float sigmoid(float x) {
    const bool down = x < 0.0f;
    const NegativeExp e(x);
    const float u = e.high();
    const float d = __fadd_rn(1.0f, u);
    const float d_low = __fadd_rn(__fsub_rn(u, __fsub_rn(d, 1.0f)), e.low());
    const float inverse = __frcp_rn(d);
    const float top = down ? e.hi : 1.0f;
    const float top_low = down ? e.lo : 0.0f;
    float q = __fmul_rn(top, inverse);
    float rest = __fadd_rn(__fmaf_rn(negate(q), d, top), top_low);
    rest = __fmaf_rn(negate(q), d_low, rest);
    q = __fmaf_rn(rest, inverse, q);
    const float scaled = scale_exp(q, e.n_bits, true);
    return canonical_nan(x, down ? scaled : q);
}

/// Minimax polynomial of `(log(1 + f) - f) / f^2`.
__device__ __forceinline__ float log_polynomial(float f) {
    float q = __fmaf_rn(from_bits(0x3d94c001u), f, from_bits(0xbdf4e58eu));
    q = __fmaf_rn(q, f, from_bits(0x3df23074u));
    q = __fmaf_rn(q, f, from_bits(0xbdfd1715u));
    q = __fmaf_rn(q, f, from_bits(0x3e119e48u));
    q = __fmaf_rn(q, f, from_bits(0xbe2ab4b5u));
    q = __fmaf_rn(q, f, from_bits(0x3e4cd294u));
    q = __fmaf_rn(q, f, from_bits(0xbe7fffecu));
    q = __fmaf_rn(q, f, from_bits(0x3eaaaaa3u));
    return __fmaf_rn(q, f, from_bits(0xbf000000u));
}

/// The natural logarithm.
__device__ __forceinline__ float log(float x) {
    const bool subnormal = x < from_bits(0x00800000u);
    const unsigned bits = to_bits(subnormal ? __fmul_rn(x, 8388608.0f) : x);
    const int e = (int)(bits - 0x3f333333u) >> 23;
    const float f = __fsub_rn(from_bits(bits - ((unsigned)e << 23)), 1.0f);
    const float n = __fsub_rn(__int2float_rn(e), subnormal ? 23.0f : 0.0f);
    const float hi = __fmul_rn(n, from_bits(LN2_HI));
    const float s = __fadd_rn(hi, f);
    const float s_low = __fsub_rn(f, __fsub_rn(s, hi));
    const float low = __fmaf_rn(n, from_bits(LN2_LO), s_low);
    float y = __fadd_rn(s, __fmaf_rn(__fmul_rn(f, f), log_polynomial(f), low));
    y = x == from_bits(0x7f800000u) ? x : y;
    y = x == 0.0f ? from_bits(0xff800000u) : y;
    y = x < 0.0f ? from_bits(NAN_BITS) : y;
    return canonical_nan(x, y);
}

/// `log(1 + e^x)`.
__device__ __forceinline__ float softplus(float x) {
    const NegativeExp e(x);
    const float u = e.high();
    const float u_low = e.low();
    const bool upper = u > from_bits(0x3ecccccdu);
    const float under = __fsub_rn(u, 1.0f);
    const float under_low = __fsub_rn(u, __fadd_rn(under, 1.0f));
    const float f = upper ? __fmul_rn(0.5f, under) : u;
    const float f_low = upper ? __fmul_rn(0.5f, __fadd_rn(u_low, under_low)) : u_low;
    const float hi = upper ? from_bits(LN2_HI) : 0.0f;
    const float ln2_low = upper ? from_bits(LN2_LO) : 0.0f;
    const float s = __fadd_rn(hi, f);
    const float s_low = __fsub_rn(f, __fsub_rn(s, hi));
    float low = __fadd_rn(__fadd_rn(s_low, ln2_low), __fmaf_rn(negate(f), f_low, f_low));
    low = __fmaf_rn(__fmul_rn(f, f), log_polynomial(f), low);
    const float ramp = x > 0.0f ? x : 0.0f;
    const float larger = ramp > s ? ramp : s;
    const float smaller = ramp > s ? s : ramp;
    const float sum = __fadd_rn(larger, smaller);
    const float sum_low = __fsub_rn(smaller, __fsub_rn(sum, larger));
    float y = __fadd_rn(sum, __fadd_rn(sum_low, low));
    y = x > 20.0f ? x : y;
    y = x < -20.0f ? e.value() : y;
    return canonical_nan(x, y);
}

// ---------------------------------------------------------------------------------------------------
// Row reductions over 256 lanes by one warp: src/num/lanes.rs.
//
// Thread t of the warp holds 8 lanes, in one of two layouts:
//   strided: lanes[j] is lane t + 32 * j            (loads of 4 bytes)
//   quads:   lanes[j] is lane 4 * t + j for j < 4, lane 128 + 4 * t + (j - 4) above (loads of 16 bytes)
// Every lane starts at +0.0 and takes elements l, l + 256, … ascending; lanes without an element stay
// +0.0 and take part in the fold, so short rows need no care. Every thread gets the result: a fold step
// adds the same two numbers on both sides, and an addition does not depend on the order of its two.

__device__ constexpr unsigned WHOLE_WARP = 0xffffffffu;

__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }

/// The last steps of a fold: `value` is lane t of `WIDTH` lanes, a power of two of at most 32.
template <int WIDTH = 32, typename T>
__device__ __forceinline__ T fold_threads(T value) {
#pragma unroll
    for (int half = WIDTH / 2; half > 0; half /= 2)
        value = plus(value, __shfl_xor_sync(WHOLE_WARP, value, half));
    return value;
}

/// Folds 256 lanes in the strided layout.
template <typename T>
__device__ __forceinline__ T fold_strided(const T (&lanes)[8]) {
    const T a0 = plus(lanes[0], lanes[4]), a1 = plus(lanes[1], lanes[5]);
    const T a2 = plus(lanes[2], lanes[6]), a3 = plus(lanes[3], lanes[7]);
    return fold_threads(plus(plus(a0, a2), plus(a1, a3)));
}

/// Folds 256 lanes in the layout of quads, with 8 shuffles: partners share the four columns of a quad.
template <typename T>
__device__ __forceinline__ T fold_quads(const T (&lanes)[8]) {
    const unsigned t = threadIdx.x & 31u;
    const T v0 = plus(lanes[0], lanes[4]), v1 = plus(lanes[1], lanes[5]);
    const T v2 = plus(lanes[2], lanes[6]), v3 = plus(lanes[3], lanes[7]);
    const bool upper = (t & 16u) != 0, odd = (t & 8u) != 0;
    const T give0 = upper ? v0 : v2, give1 = upper ? v1 : v3;
    const T keep0 = upper ? v2 : v0, keep1 = upper ? v3 : v1;
    const T a0 = plus(keep0, __shfl_xor_sync(WHOLE_WARP, give0, 16));
    const T a1 = plus(keep1, __shfl_xor_sync(WHOLE_WARP, give1, 16));
    const T give = odd ? a0 : a1, keep = odd ? a1 : a0;
    T a = plus(keep, __shfl_xor_sync(WHOLE_WARP, give, 8));
    a = plus(a, __shfl_xor_sync(WHOLE_WARP, a, 4));
    a = plus(a, __shfl_xor_sync(WHOLE_WARP, a, 2));
    a = plus(a, __shfl_xor_sync(WHOLE_WARP, a, 1));
    a = plus(a, __shfl_xor_sync(WHOLE_WARP, a, 16));
    return plus(a, __shfl_xor_sync(WHOLE_WARP, a, 8));
}

/// Folds 256 lanes that the block wrote to shared memory in lane order, after a barrier. Every warp that
/// calls it gets the result; a further barrier stands before the lanes are written again.
template <typename T>
__device__ __forceinline__ T fold_shared(const T* lanes256) {
    const unsigned t = threadIdx.x & 31u;
    T lanes[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) lanes[j] = lanes256[t + 32 * j];
    return fold_strided(lanes);
}

/// Calls `step(i, lane)` for every element i of a row of n that this thread holds in the strided layout.
template <typename Step>
__device__ __forceinline__ void for_strided(unsigned n, Step step) {
    unsigned i = threadIdx.x & 31u;
    for (; i + 224 < n; i += 256) {
#pragma unroll
        for (int j = 0; j < 8; ++j) step(i + 32 * j, j);
    }
#pragma unroll
    for (int j = 0; j < 7; ++j)
        if (i + 32 * j < n) step(i + 32 * j, j);
}

/// The same for the layout of quads: `step(i, lane)` stands for the four elements from i and the four
/// lanes from `lane`; n is a multiple of 4.
template <typename Step>
__device__ __forceinline__ void for_quads(unsigned n, Step step) {
    unsigned i = 4 * (threadIdx.x & 31u);
    for (; i + 128 < n; i += 256) {
        step(i, 0);
        step(i + 128, 4);
    }
    if (i < n) step(i, 0);
}

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ void store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }

/// The sum of a row of n elements. `QUADS`: the row is aligned to 16 bytes and n is a multiple of 4.
template <bool QUADS>
__device__ __forceinline__ float row_sum(const float* row, unsigned n) {
    float lanes[8] = {};
    if (QUADS) {
        for_quads(n, [&](unsigned i, int lane) {
            const float4 x = load4(row + i);
            lanes[lane] = __fadd_rn(lanes[lane], x.x);
            lanes[lane + 1] = __fadd_rn(lanes[lane + 1], x.y);
            lanes[lane + 2] = __fadd_rn(lanes[lane + 2], x.z);
            lanes[lane + 3] = __fadd_rn(lanes[lane + 3], x.w);
        });
        return fold_quads(lanes);
    }
    for_strided(n, [&](unsigned i, int lane) { lanes[lane] = __fadd_rn(lanes[lane], row[i]); });
    return fold_strided(lanes);
}

/// The dot product of two rows of n elements, each lane a chain of fma.
template <bool QUADS>
__device__ __forceinline__ float row_dot(const float* a, const float* b, unsigned n) {
    float lanes[8] = {};
    if (QUADS) {
        for_quads(n, [&](unsigned i, int lane) {
            const float4 x = load4(a + i), y = load4(b + i);
            lanes[lane] = __fmaf_rn(x.x, y.x, lanes[lane]);
            lanes[lane + 1] = __fmaf_rn(x.y, y.y, lanes[lane + 1]);
            lanes[lane + 2] = __fmaf_rn(x.z, y.z, lanes[lane + 2]);
            lanes[lane + 3] = __fmaf_rn(x.w, y.w, lanes[lane + 3]);
        });
        return fold_quads(lanes);
    }
    for_strided(n, [&](unsigned i, int lane) { lanes[lane] = __fmaf_rn(a[i], b[i], lanes[lane]); });
    return fold_strided(lanes);
}

/// The sum of the squares of a row of n elements.
template <bool QUADS>
__device__ __forceinline__ float row_sum_of_squares(const float* row, unsigned n) {
    return row_dot<QUADS>(row, row, n);
}

/// The greater of two, NaNs left out: the step of a maximum.
__device__ __forceinline__ float greater(float a, float x) { return x > a ? x : a; }

/// The maximum over the warp of each thread's own maximum, which starts at `-inf` and grows by `greater`;
/// a zero is `+0.0`.
__device__ __forceinline__ float fold_max(float value) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2)
        value = greater(value, __shfl_xor_sync(WHOLE_WARP, value, half));
    return __fadd_rn(value, 0.0f);
}

/// The greatest of n elements, NaNs left out; `-inf` for none.
template <bool QUADS>
__device__ __forceinline__ float row_max(const float* row, unsigned n) {
    float m = from_bits(0xff800000u);
    if (QUADS) {
        for_quads(n, [&](unsigned i, int) {
            const float4 x = load4(row + i);
            m = greater(greater(greater(greater(m, x.x), x.y), x.z), x.w);
        });
    } else {
        for_strided(n, [&](unsigned i, int) { m = greater(m, row[i]); });
    }
    return fold_max(m);
}

// ---------------------------------------------------------------------------------------------------
// The balanced tree: src/num/tree.rs.
//
// The recursive rule splits n leaves at the largest power of two below n. Two facts follow.
// (1) Level by level: adding node i + s to node i for i = 0, 2s, 4s, … and s = 1, 2, 4, …, where a node
//     without a partner passes unchanged, builds that tree. For the leaves i .. min(i + 2s, n), a count
//     above s splits at s, since s is the largest power of two below it; a count up to s is the left
//     node alone.
// (2) Every aligned group of 2^k neighbouring leaves, the last one ragged, is a subtree; the tree over
//     the groups' results is the tree over the leaves, since every split of more than 2^k leaves is a
//     multiple of 2^k.

/// Level by level over up to `N` leaves in registers, N a power of two; the result of 0 leaves is `+0.0`.
template <int N>
__device__ __forceinline__ float tree_registers(float (&leaf)[N], unsigned n) {
#pragma unroll
    for (int s = 1; s < N; s *= 2) {
#pragma unroll
        for (int i = 0; i + s < N; i += 2 * s)
            if (i + s < n) leaf[i] = __fadd_rn(leaf[i], leaf[i + s]);
    }
    return n == 0 ? 0.0f : leaf[0];
}

/// The streaming form: push leaves in order, then finish. Holds up to 2^DEPTH - 1 leaves.
template <int DEPTH>
struct TreeStack {
    float level[DEPTH];

    /// Takes leaf number `index`, counted from 0: a merge for each trailing one of the index.
    __device__ __forceinline__ void push(float leaf, unsigned index) {
        bool placed = false;
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const bool full = (index >> k & 1u) != 0;
            if (!placed && full) leaf = __fadd_rn(level[k], leaf);
            if (!placed && !full) {
                level[k] = leaf;
                placed = true;
            }
        }
    }
    /// The root after n leaves: the levels that the bits of n name, from the right.
    __device__ __forceinline__ float finish(unsigned n) const {
        float carry = 0.0f;
        bool any = false;
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            if ((n >> k & 1u) != 0) {
                carry = any ? __fadd_rn(level[k], carry) : level[k];
                any = true;
            }
        }
        return carry;
    }
};

/// Reads what another block wrote in the same launch; a plain load could find an old line of L1.
__device__ __forceinline__ float load_other(const float* p) { return __ldcg(p); }

/// The tree over n partials at p, p + stride, …; up to 2^20 * 16 of them.
__device__ __forceinline__ float tree_memory(const float* p, size_t stride, unsigned n) {
    float leaf[16];
    if (n <= 16) {
#pragma unroll
        for (int i = 0; i < 16; ++i) leaf[i] = i < n ? load_other(p + i * stride) : 0.0f;
        return tree_registers(leaf, n);
    }
    TreeStack<20> stack;
    const unsigned groups = (n + 15) / 16;
    for (unsigned g = 0; g < groups; ++g) {
        const unsigned first = 16 * g;
#pragma unroll
        for (int i = 0; i < 16; ++i) leaf[i] = first + i < n ? load_other(p + (first + i) * stride) : 0.0f;
        stack.push(tree_registers(leaf, n - first < 16 ? n - first : 16u), g);
    }
    return stack.finish(groups);
}

/// A sum over tokens cut as `TokenSum` says, its pieces gathered in groups of a power of two: by fact (2)
/// a group is a subtree of its grain. A `cut` of whole grains that hold 2^k pieces is passed as one grain.
struct TokenCut {
    unsigned tokens;
    unsigned grain;
    unsigned piece;
    /// Pieces of a group.
    unsigned group;

    __device__ __forceinline__ unsigned pieces_per_grain() const { return (grain + piece - 1) / piece; }
    __device__ __forceinline__ unsigned groups_per_grain() const {
        return (pieces_per_grain() + group - 1) / group;
    }
    __device__ __forceinline__ unsigned grains() const { return (tokens + grain - 1) / grain; }
    /// The first token of a piece of a grain, and the token behind its last.
    __device__ __forceinline__ unsigned first(unsigned g, unsigned p) const { return g * grain + p * piece; }
    __device__ __forceinline__ unsigned end(unsigned g, unsigned p) const {
        const unsigned grain_end = (g + 1) * grain < tokens ? (g + 1) * grain : tokens;
        const unsigned piece_end = g * grain + (p + 1) * piece;
        return piece_end < grain_end ? piece_end : grain_end;
    }
    /// Pieces of a grain: the last grain may be shorter.
    __device__ __forceinline__ unsigned pieces(unsigned g) const {
        const unsigned rest = tokens - g * grain;
        return ((rest < grain ? rest : grain) + piece - 1) / piece;
    }
    __device__ __forceinline__ unsigned groups(unsigned g) const { return (pieces(g) + group - 1) / group; }

    /// The root from the groups' results at p, p + stride, …, numbered `g * groups_per_grain() + group`.
    __device__ __forceinline__ float root(const float* p, size_t stride) const {
        const unsigned n = grains();
        if (n <= 1) return n == 0 ? 0.0f : tree_memory(p, stride, groups(0));
        TreeStack<24> stack;
        const size_t grain_stride = groups_per_grain() * stride;
        for (unsigned g = 0; g < n; ++g) stack.push(tree_memory(p + g * grain_stride, stride, groups(g)), g);
        return stack.finish(n);
    }
};

/// Counts this block in at `counter`, which stands at 0 before the first of `expected` blocks; true in
/// every thread of the last one, which then sees what the others wrote (read it by `load_other`) and has
/// set the counter back to 0. All threads of the block call it.
__device__ __forceinline__ bool last_arrival(unsigned* counter, unsigned expected) {
    __shared__ unsigned last;
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
        __threadfence();
        const unsigned before = atomicAdd(counter, 1u);
        last = before + 1 == expected ? 1u : 0u;
        if (last != 0) *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return last != 0;
}

/// Where the fold of a token sum leaves column j: `out[j]`.
struct ToRow {
    float* out;
    __device__ __forceinline__ void operator()(unsigned j, float sum) const { out[j] = sum; }
};

/// Equal sets of leaves in memory: leaf i of set s, column j, lies at `s * set_stride + i * leaf_stride + j`.
struct LeafSets {
    float* at;
    unsigned columns;
    unsigned sets;
    size_t set_stride;
    size_t leaf_stride;
};

/// Folds every set in place by the whole block, 16 nodes a thread and round, so that by fact (2) each set's
/// root ends at its first leaf; `count(s)` is the number of leaves of set s, at most `most`, at least 1.
/// With one set, `done(j, root)` is called where a root is made. All threads of the block call it.
template <typename Count, typename Done>
__device__ __forceinline__ void fold_sets(const LeafSets& leaves, unsigned most, Count count, Done done) {
    const unsigned threads = blockDim.x * blockDim.y;
    const unsigned me = threadIdx.y * blockDim.x + threadIdx.x;
    unsigned span = 1;
    do {
        const unsigned groups = (most + 16 * span - 1) / (16 * span);
        const unsigned work = leaves.sets * groups * leaves.columns;
        for (unsigned w = me; w < work; w += threads) {
            const unsigned j = w % leaves.columns, g = w / leaves.columns % groups;
            const unsigned s = w / leaves.columns / groups;
            const unsigned nodes = (count(s) + span - 1) / span;
            if (16 * g >= nodes) continue;
            const unsigned n = nodes - 16 * g < 16 ? nodes - 16 * g : 16;
            const size_t stride = span * leaves.leaf_stride;
            float* p = leaves.at + s * leaves.set_stride + 16 * g * stride + j;
            float leaf[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) leaf[i] = i < n ? load_other(p + i * stride) : 0.0f;
            const float root = tree_registers(leaf, n);
            if (leaves.sets == 1 && groups == 1) done(j, root);
            else *p = root;
        }
        __syncthreads();
        span *= 16;
    } while (span < most);
}

/// What the blocks of a token sum share: for each group of pieces a row of `pitch` floats that its block
/// has written (`row(grain, group)`), and a counter that stands at 0.
struct GroupRows {
    float* at;
    unsigned pitch;
    unsigned* counter;

    __device__ __forceinline__ float* row(const TokenCut& cut, unsigned grain, unsigned group) const {
        return at + ((size_t)grain * cut.groups_per_grain() + group) * pitch;
    }
};

/// Counts this block's row in; the last block folds `columns` columns of all rows from column `first` on and
/// calls `done(j, sum)` for each j below `columns`. All threads of every block call it, once a row.
template <typename Done>
__device__ __forceinline__ void fold_rows(const TokenCut& cut, const GroupRows& rows, unsigned first,
                                          unsigned columns, Done done) {
    const unsigned grains = cut.grains(), most = cut.groups_per_grain();
    const unsigned total = (grains - 1) * most + cut.groups(grains - 1);
    if (!last_arrival(rows.counter, total)) return;
    const size_t set_stride = (size_t)most * rows.pitch;
    auto groups = [&](unsigned s) { return cut.groups(s); };
    if (grains > 1 && most > 1)
        fold_sets(LeafSets{rows.at + first, columns, grains, set_stride, rows.pitch}, most, groups, done);
    if (grains > 1)
        fold_sets(LeafSets{rows.at + first, columns, 1, 0, set_stride}, grains, [&](unsigned) { return grains; }, done);
    else
        fold_sets(LeafSets{rows.at + first, columns, 1, 0, rows.pitch}, most, groups, done);
}

}  // namespace contract
