// BLAKE3 of byte regions (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, "BLAKE3", 2020), unkeyed, 32 bytes.
//
// A region is cut into chunks of 1,024 bytes, one a thread; a block holds 128 neighbouring chunks and folds
// their chaining values to one. A second kernel folds the values of a region's blocks. Both fold
// neighbours pairwise and carry an odd one up, which is BLAKE3's tree since 128 is a power of two.

#define THREADS 128
#define CHUNK 1024
// Words from one chunk's staged 64 bytes to the next one's: 16-byte accesses of 8 threads meet no bank twice.
#define STRIDE 20

#define CHUNK_START 1u
#define CHUNK_END 2u
#define PARENT 4u
#define ROOT 8u

typedef unsigned long long u64;

// A region of the table. The host writes it: src/cuda/digest.rs.
struct Entry {
    // From the start of the arena.
    u64 offset;
    u64 bytes;
    // The region's first block in the grid; the blocks' values stand at this index too.
    unsigned first_block;
    unsigned blocks;
};

// One instruction, which shifts and an or are not.
#define ROTATE(x, n) __funnelshift_r(x, x, n)

#define G(a, b, c, d, x, y)              \
    a = a + b + (x);                     \
    d = ROTATE(d ^ a, 16);               \
    c = c + d;                           \
    b = ROTATE(b ^ c, 12);               \
    a = a + b + (y);                     \
    d = ROTATE(d ^ a, 8);                \
    c = c + d;                           \
    b = ROTATE(b ^ c, 7);

#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15) \
    G(v0, v4, v8, v12, m[s0], m[s1])                                               \
    G(v1, v5, v9, v13, m[s2], m[s3])                                               \
    G(v2, v6, v10, v14, m[s4], m[s5])                                              \
    G(v3, v7, v11, v15, m[s6], m[s7])                                              \
    G(v0, v5, v10, v15, m[s8], m[s9])                                              \
    G(v1, v6, v11, v12, m[s10], m[s11])                                            \
    G(v2, v7, v8, v13, m[s12], m[s13])                                             \
    G(v3, v4, v9, v14, m[s14], m[s15])

#define IV0 0x6A09E667u
#define IV1 0xBB67AE85u
#define IV2 0x3C6EF372u
#define IV3 0xA54FF53Au
#define IV4 0x510E527Fu
#define IV5 0x9B05688Cu
#define IV6 0x1F83D9ABu
#define IV7 0x5BE0CD19u

__device__ __forceinline__ void start_value(unsigned cv[8])
{
    cv[0] = IV0, cv[1] = IV1, cv[2] = IV2, cv[3] = IV3;
    cv[4] = IV4, cv[5] = IV5, cv[6] = IV6, cv[7] = IV7;
}

// The compression function, the first half of its output into `cv`.
__device__ __forceinline__ void compress(unsigned cv[8], const unsigned m[16], u64 counter, unsigned length,
                                         unsigned flags)
{
    unsigned v0 = cv[0], v1 = cv[1], v2 = cv[2], v3 = cv[3], v4 = cv[4], v5 = cv[5], v6 = cv[6], v7 = cv[7];
    unsigned v8 = IV0, v9 = IV1, v10 = IV2, v11 = IV3;
    unsigned v12 = (unsigned)counter, v13 = (unsigned)(counter >> 32), v14 = length, v15 = flags;
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ROUND(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
    ROUND(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1)
    ROUND(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6)
    ROUND(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4)
    ROUND(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7)
    ROUND(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13)
    cv[0] = v0 ^ v8, cv[1] = v1 ^ v9, cv[2] = v2 ^ v10, cv[3] = v3 ^ v11;
    cv[4] = v4 ^ v12, cv[5] = v5 ^ v13, cv[6] = v6 ^ v14, cv[7] = v7 ^ v15;
}

// left = parent of left and right.
__device__ __forceinline__ void merge(unsigned* left, const unsigned* right, unsigned flags)
{
    unsigned m[16], cv[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        m[i] = left[i];
        m[8 + i] = right[i];
    }
    start_value(cv);
    compress(cv, m, 0, 64, PARENT | flags);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        left[i] = cv[i];
    }
}

// Folds `n` values in place into the first one. `root` goes to the last merge.
__device__ __forceinline__ void fold_values(unsigned* values, unsigned n, unsigned root)
{
    for (unsigned s = 1; s < n; s *= 2) {
        const unsigned flags = 2 * s >= n ? root : 0;
        for (unsigned i = 2 * s * threadIdx.x; i + s < n; i += 2 * s * blockDim.x) {
            merge(values + 8ull * i, values + 8ull * (i + s), flags);
        }
        __syncthreads();
    }
}

// Where a block's bytes lie.
struct Source {
    const unsigned char* base;
    u64 bytes;
    // Whether the base is a multiple of 4, and whether it is one of 16 and the block's chunks are all whole.
    bool words, plain;

    // The 16 bytes from byte `at`, +0 behind the region's end.
    __device__ __forceinline__ uint4 load16(u64 at) const
    {
        if (plain) {
            return *(const uint4*)(base + at);
        }
        unsigned w[4];
#pragma unroll
        for (unsigned k = 0; k < 4; k++) {
            const u64 from = at + 4 * k;
            if (words && from + 4 <= bytes) {
                w[k] = *(const unsigned*)(base + from);
                continue;
            }
            w[k] = 0;
#pragma unroll 1
            for (unsigned i = 0; i < 4 && from + i < bytes; i++) {
                w[k] |= (unsigned)base[from + i] << 8 * i;
            }
        }
        return {w[0], w[1], w[2], w[3]};
    }
};

// The region that holds a block: the last one whose first block is not behind it.
__device__ __forceinline__ unsigned region_of(const Entry* table, unsigned regions, unsigned block)
{
    unsigned low = 0, high = regions;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        if (table[middle].first_block <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// One block for every 128 chunks of every region. A region of one block has its digest written at once;
// of others, each block writes its value.
extern "C" __global__ void __launch_bounds__(THREADS, 6) digest_blake3_chunks(
    const unsigned char* __restrict__ arena, const Entry* __restrict__ table, unsigned* __restrict__ values,
    unsigned* __restrict__ digests, unsigned regions)
{
    __shared__ __align__(16) unsigned staged[THREADS * STRIDE];
    __shared__ __align__(16) unsigned folded[THREADS * 8];
    const unsigned t = threadIdx.x, lane = t % 32;
    const unsigned index = region_of(table, regions, blockIdx.x);
    const Entry entry = table[index];
    const unsigned char* base = arena + entry.offset;
    const u64 first = (u64)(blockIdx.x - entry.first_block) * THREADS;
    const u64 all = entry.bytes > 0 ? (entry.bytes + CHUNK - 1) / CHUNK : 1;
    const unsigned count = all - first < THREADS ? (unsigned)(all - first) : THREADS;
    const u64 chunk = first + t;
    const u64 begin = chunk * CHUNK;
    // Bytes of this thread's chunk.
    const unsigned length =
        begin >= entry.bytes ? 0 : (entry.bytes - begin < CHUNK ? (unsigned)(entry.bytes - begin) : CHUNK);
    const unsigned blocks = length > 64 ? (length + 63) / 64 : 1;
    // A warp loads 64 bytes of each of its 32 chunks together: 4 threads a chunk, 8 chunks at a time.
    const u64 from = (first + (t - lane) + lane / 4) * CHUNK + lane % 4 * 16;
    unsigned* const target = staged + (t - lane + lane / 4) * STRIDE + lane % 4 * 4;
    const Source source = {base, entry.bytes, (u64)base % 4 == 0,
                           (u64)base % 16 == 0 && (first + THREADS) * CHUNK <= entry.bytes};
    uint4 ahead[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        ahead[j] = source.load16(from + j * 8 * CHUNK);
    }
    unsigned cv[8];
    start_value(cv);
    const unsigned root = all == 1 ? ROOT : 0;
#pragma unroll 1
    for (unsigned b = 0; b < CHUNK / 64; b++) {
        __syncwarp(0xffffffffu);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            *(uint4*)(target + j * 8 * STRIDE) = ahead[j];
        }
        __syncwarp(0xffffffffu);
        unsigned m[16];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint4 x = *(const uint4*)(staged + t * STRIDE + 4 * j);
            m[4 * j] = x.x, m[4 * j + 1] = x.y, m[4 * j + 2] = x.z, m[4 * j + 3] = x.w;
        }
        if (b + 1 < CHUNK / 64) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                ahead[j] = source.load16(from + j * 8 * CHUNK + (b + 1) * 64);
            }
        }
        if (b < blocks) {
            const bool last = b + 1 == blocks;
            const unsigned flags = (b == 0 ? CHUNK_START : 0) | (last ? CHUNK_END | root : 0);
            compress(cv, m, chunk, last ? length - 64 * b : 64, flags);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        folded[t * 8 + i] = cv[i];
    }
    __syncthreads();
    fold_values(folded, count, entry.blocks == 1 ? ROOT : 0);
    if (t < 8) {
        unsigned* out = entry.blocks == 1 ? digests + 8ull * index : values + 8ull * blockIdx.x;
        out[t] = folded[t];
    }
}

// One block for every region: folds the values of the region's blocks, in place.
extern "C" __global__ void __launch_bounds__(512) digest_blake3_parents(
    const Entry* __restrict__ table, unsigned* __restrict__ values, unsigned* __restrict__ digests)
{
    const Entry entry = table[blockIdx.x];
    if (entry.blocks == 1) {
        return;
    }
    unsigned* own = values + 8ull * entry.first_block;
    fold_values(own, entry.blocks, ROOT);
    if (threadIdx.x < 8) {
        digests[8ull * blockIdx.x + threadIdx.x] = own[threadIdx.x];
    }
}
