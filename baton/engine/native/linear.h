/* Products of weights, row-major [out, in] as PyTorch keeps them, with a few rows of float32 activations.
 *
 * Each output is one running vector sum along `in`, whatever the size of the tile that it is computed in, so a
 * row's results do not depend on how many rows there are.
 */
#ifndef BATON_LINEAR_H
#define BATON_LINEAR_H

#include "simd.h"

#define TILE_OUT 4
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE_ROWS 6 /* 32 vector registers: 24 sums */
#else
#define TILE_ROWS 3 /* 16 vector registers: 12 sums */
#endif

/* Mirrored by baton.engine.native.library.Linear. */
struct linear {
    const void *weight;
    const uint16_t *scale; /* bfloat16, of each group of an int8 weight; else NULL */
    const float *bias;     /* or NULL */
    int64_t out, in;
};

#define GROUP 64 /* elements of an int8 weight that share a scale; mirrored by baton.engine.quantization */

/* Elements of a row of int8 weights, in whole groups. */
INLINE size_t grouped(size_t count) { return (count + GROUP - 1) / GROUP * GROUP; }

/* The same map without its first `first` outputs. */
INLINE struct linear linear_from(int type, const struct linear *linear, int64_t first) {
    size_t in = (size_t)linear->in, row_bytes = type == INT8 ? grouped(in) : in * element_bytes(type);
    struct linear rest = *linear;
    rest.weight = (const char *)rest.weight + (size_t)first * row_bytes;
    if (rest.scale) rest.scale += (size_t)first * (grouped(in) / GROUP);
    if (rest.bias) rest.bias += first;
    rest.out -= first;
    return rest;
}

/* A product's operands: the weights of each output, `in` elements; activations of row r at x + r * x_stride, in the
 * weights' order. */
struct operands {
    const char *weight[TILE_OUT];
    const float *x;
    size_t x_stride, in;
};

/* sums[r * stride + o] = weights of output o times activation row r, for `outs` (4 or 1) and `rows`. */
INLINE void tile(int type, int outs, int rows, struct operands p, float *sums, size_t stride) {
    vf sum[TILE_OUT][TILE_ROWS], first, second;
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) sum[o][r] = splat(0.0f);
    size_t bytes = BLOCK * element_bytes(type), whole = p.in / BLOCK * BLOCK;
    for (size_t i = 0, at = 0; i < whole; i += BLOCK, at += bytes) {
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            widen(type, p.weight[o] + at, &first, &second);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) sum[o][r] = fused(first, load(p.x + r * p.x_stride + i), sum[o][r]);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++)
                sum[o][r] = fused(second, load(p.x + r * p.x_stride + i + LANES), sum[o][r]);
        }
    }
    if (whole < p.in) {
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            widen_rest(type, p.weight[o] + whole * element_bytes(type), p.in - whole, &first, &second);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                sum[o][r] = fused(first, load(p.x + r * p.x_stride + whole), sum[o][r]);
                sum[o][r] = fused(second, load(p.x + r * p.x_stride + whole + LANES), sum[o][r]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        if (outs == TILE_OUT) {
            v4 four = sum_lanes_of_four(sum[0][r], sum[1][r], sum[2][r], sum[3][r]);
            memcpy(sums + r * stride, &four, sizeof four);
        } else {
            sums[r * stride] = sum_lanes(sum[0][r]);
        }
    }
}

INLINE void tile_of_rows(int type, int outs, int rows, struct operands p, float *sums, size_t stride) {
    switch (rows) {
    case 1: tile(type, outs, 1, p, sums, stride); break;
    case 2: tile(type, outs, 2, p, sums, stride); break;
    case 3: tile(type, outs, 3, p, sums, stride); break;
#if TILE_ROWS == 6
    case 4: tile(type, outs, 4, p, sums, stride); break;
    case 5: tile(type, outs, 5, p, sums, stride); break;
    case 6: tile(type, outs, 6, p, sums, stride); break;
#endif
    }
}

/* One or TILE_OUT outputs, of rows up to TILE_ROWS. Functions of their own: each is kilobytes. */
#define DEFINE_TILES(NAME, TYPE)                                                                                    \
    static __attribute__((noinline)) void NAME(int outs, int rows, struct operands p, float *sums, size_t stride) { \
        if (outs == TILE_OUT)                                                                                       \
            tile_of_rows(TYPE, TILE_OUT, rows, p, sums, stride);                                                    \
        else                                                                                                        \
            tile_of_rows(TYPE, 1, rows, p, sums, stride);                                                           \
    }
DEFINE_TILES(tiles_float32, FLOAT32)
DEFINE_TILES(tiles_bfloat16, BFLOAT16)
DEFINE_TILES(tiles_float16, FLOAT16)

INLINE void tiles(int type, int outs, int rows, struct operands p, float *sums, size_t stride) {
    if (type == FLOAT32)
        tiles_float32(outs, rows, p, sums, stride);
    else if (type == BFLOAT16)
        tiles_bfloat16(outs, rows, p, sums, stride);
    else
        tiles_float16(outs, rows, p, sums, stride);
}

/* How many of the `left` rows the next tile takes. One row alone would leave the arithmetic idle: share the last. */
INLINE int tile_rows(int left) {
    if (left <= TILE_ROWS) return left;
    return left == TILE_ROWS + 1 ? (TILE_ROWS + 1) / 2 : TILE_ROWS;
}

/* Where results go: y[row * stride + column], the column in `type`'s order if `ordered`; added to what is there if
 * `adding`. */
struct target {
    float *y;
    size_t stride;
    int ordered, adding;
};

/* How outputs are taken in tiles of TILE_OUT, output i of a tile `apart` after output i - 1, and what is left one by one.
 *
 * Streaming, a tile's outputs are a quarter of the range apart. Their weights are then as many streams that go on from
 * tile to tile, which the processor foresees and fetches from memory in time: twice as fast where memory is the limit.
 * Of four neighbouring rows it sees four beginnings and four ends. */
struct walk {
    int64_t output, apart, step, tiles, rest;
};

INLINE struct walk walk_outputs(int64_t from, int64_t to, int streaming) {
    int64_t tiles = (to - from) / TILE_OUT, rest = from + tiles * TILE_OUT;
    return (struct walk){tiles ? from : rest, streaming ? tiles : 1, streaming ? 1 : TILE_OUT, tiles, rest};
}

INLINE int walk_outs(const struct walk *walk) { return walk->tiles ? TILE_OUT : 1; }

INLINE void walk_on(struct walk *walk) {
    if (!walk->tiles)
        walk->output++;
    else if (--walk->tiles)
        walk->output += walk->step;
    else
        walk->output = walk->rest;
}

/* Outputs `from` up to `to` for all rows. */
static void linear_range(int type, const struct linear *linear, const float *x, size_t x_stride, int rows,
                         int64_t from, int64_t to, struct target target) {
    size_t in = (size_t)linear->in, row_bytes = in * element_bytes(type);
    float sums[TILE_ROWS * TILE_OUT], bias[TILE_OUT] = {0};
    size_t column[TILE_OUT];
    for (struct walk walk = walk_outputs(from, to, 1); walk.output < to; walk_on(&walk)) {
        int outs = walk_outs(&walk);
        struct operands p = {{NULL}, x, x_stride, in};
        for (int i = 0; i < outs; i++) {
            size_t o = (size_t)(walk.output + i * walk.apart);
            p.weight[i] = (const char *)linear->weight + o * row_bytes;
            column[i] = target.ordered ? place(type, o) : o;
            if (linear->bias) bias[i] = linear->bias[o];
        }
        float *y = target.y;
        for (int r = 0, count; r < rows; r += count) {
            count = tile_rows(rows - r);
            p.x = x + (size_t)r * x_stride;
            tiles(type, outs, count, p, sums, TILE_OUT);
            for (int j = 0; j < count; j++, y += target.stride)
                for (int i = 0; i < outs; i++) {
                    float *to_y = y + column[i];
                    *to_y = (target.adding ? *to_y : 0.0f) + (sums[j * TILE_OUT + i] + bias[i]);
                }
        }
    }
}

#endif
