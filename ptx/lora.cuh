// Low-rank adapters beside a frozen product: which columns of it each part adds to, and how a part's rows of `b`
// and columns of `s` are found.
#pragma once
#include "tiles.cuh"

// Parts that one launch serves at most; the host says so too.
constexpr unsigned MOST_PARTS = 4;

struct Parts {
    unsigned first[MOST_PARTS], columns[MOST_PARTS];
};

#define PARTS_PARAMETERS                                                                                         \
    unsigned first0, unsigned columns0, unsigned first1, unsigned columns1, unsigned first2, unsigned columns2,  \
        unsigned first3, unsigned columns3
#define PARTS_GIVEN                                                                                              \
    Parts {                                                                                                      \
        {first0, first1, first2, first3}, { columns0, columns1, columns2, columns3 }                             \
    }

// Ranks of a part and of all parts, and columns of the whole product: how far rows of `s` and `y` are apart.
struct Ranks {
    unsigned rank, ranks, n_out;
};

// One part: its place among all, its columns of the product, its first row of `b`.
struct Part {
    unsigned index, first, columns, row;
};

__device__ __forceinline__ unsigned tiles_of(unsigned extent, unsigned of_tile) {
    return (extent + of_tile - 1) / of_tile;
}

// The part that a block serves, where each part has a block for every `WIDTH` of its columns in each of `lines`
// lines; `block` becomes the block's number within the part.
template <unsigned WIDTH> __device__ __forceinline__ Part part_of(const Parts& parts, unsigned lines, unsigned& block) {
    Part part = {0, parts.first[0], parts.columns[0], 0};
#pragma unroll
    for (unsigned i = 1; i < MOST_PARTS; ++i) {
        const unsigned blocks = tiles_of(part.columns, WIDTH) * lines;
        if (part.index + 1 == i && block >= blocks) {
            block -= blocks;
            part = {i, parts.first[i], parts.columns[i], part.row + part.columns};
        }
    }
    return part;
}

// The part of a number.
__device__ __forceinline__ Part part_at(const Parts& parts, unsigned index) {
    Part part = {0, parts.first[0], parts.columns[0], 0};
#pragma unroll
    for (unsigned i = 1; i < MOST_PARTS; ++i) {
        if (i <= index) part = {i, parts.first[i], parts.columns[i], part.row + part.columns};
    }
    return part;
}
