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
#define PREFETCH_BYTES 2048

/* Mirrored by baton.engine.native.library.Linear. */
struct linear {
    const void *weight;
    const float *bias; /* or NULL */
    int64_t out, in;
};

/* sums[o][r] = weight row at w[o] times activations at x + r * x_stride, in the weights' order. */
INLINE void tile(int type, int outs, int rows, const char *const *w, size_t in, const float *x, size_t x_stride,
                 float sums[TILE_OUT][TILE_ROWS]) {
    vf sum[TILE_OUT][TILE_ROWS];
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) sum[o][r] = splat(0.0f);
    size_t bytes = BLOCK * element_bytes(type), blocks = in / BLOCK, rest = in % BLOCK;
    for (size_t b = 0; b < blocks; b++) {
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            vf first, second;
            widen(type, w[o] + b * bytes, &first, &second);
            if (rows == 1) __builtin_prefetch(w[o] + b * bytes + PREFETCH_BYTES);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) sum[o][r] = fused(first, load(x + r * x_stride + b * BLOCK), sum[o][r]);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) sum[o][r] = fused(second, load(x + r * x_stride + b * BLOCK + LANES), sum[o][r]);
        }
    }
    if (rest) {
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            vf first, second;
            widen_rest(type, w[o] + blocks * bytes, rest, &first, &second);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                sum[o][r] = fused(first, load(x + r * x_stride + blocks * BLOCK), sum[o][r]);
                sum[o][r] = fused(second, load(x + r * x_stride + blocks * BLOCK + LANES), sum[o][r]);
            }
        }
    }
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) sums[o][r] = sum_lanes(sum[o][r]);
}

INLINE void tile_of_rows(int type, int outs, int rows, const char *const *w, size_t in, const float *x,
                         size_t x_stride, float sums[TILE_OUT][TILE_ROWS]) {
    switch (rows) {
    case 1: tile(type, outs, 1, w, in, x, x_stride, sums); break;
    case 2: tile(type, outs, 2, w, in, x, x_stride, sums); break;
    case 3: tile(type, outs, 3, w, in, x, x_stride, sums); break;
#if TILE_ROWS == 6
    case 4: tile(type, outs, 4, w, in, x, x_stride, sums); break;
    case 5: tile(type, outs, 5, w, in, x, x_stride, sums); break;
    case 6: tile(type, outs, 6, w, in, x, x_stride, sums); break;
#endif
    }
}

/* The kernels of one type as functions of their own: inlining all of them everywhere would be megabytes. */
#define DEFINE_TILES(NAME, TYPE)                                                                                   \
    static __attribute__((noinline)) void NAME(int outs, int rows, const char *const *w, size_t in, const float *x,  \
                                               size_t x_stride, float sums[TILE_OUT][TILE_ROWS]) {                   \
        if (outs == TILE_OUT)                                                                                        \
            tile_of_rows(TYPE, TILE_OUT, rows, w, in, x, x_stride, sums);                                            \
        else                                                                                                         \
            for (int o = 0; o < outs; o++) tile_of_rows(TYPE, 1, rows, w + o, in, x, x_stride, sums + o);            \
    }
DEFINE_TILES(tiles_float32, FLOAT32)
DEFINE_TILES(tiles_bfloat16, BFLOAT16)
DEFINE_TILES(tiles_float16, FLOAT16)

INLINE void tiles(int type, int outs, int rows, const char *const *w, size_t in, const float *x, size_t x_stride,
                  float sums[TILE_OUT][TILE_ROWS]) {
    if (type == FLOAT32)
        tiles_float32(outs, rows, w, in, x, x_stride, sums);
    else if (type == BFLOAT16)
        tiles_bfloat16(outs, rows, w, in, x, x_stride, sums);
    else
        tiles_float16(outs, rows, w, in, x, x_stride, sums);
}

/* Where results go: y[row * stride + column], the column in `type`'s order if `ordered`; added to what is there if
 * `adding`. */
struct target {
    float *y;
    size_t stride;
    int ordered, adding;
};

/* Outputs `from` up to `to` for all rows. */
static void linear_range(int type, const struct linear *linear, const float *x, size_t x_stride, int rows,
                         int64_t from, int64_t to, struct target target) {
    size_t in = (size_t)linear->in, row_bytes = in * element_bytes(type);
    float sums[TILE_OUT][TILE_ROWS];
    for (int64_t o = from; o < to; o += TILE_OUT) {
        int outs = to - o < TILE_OUT ? (int)(to - o) : TILE_OUT;
        const char *w[TILE_OUT];
        for (int i = 0; i < outs; i++) w[i] = (const char *)linear->weight + (size_t)(o + i) * row_bytes;
        for (int r = 0; r < rows; r += TILE_ROWS) {
            int count = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
            tiles(type, outs, count, w, in, x + (size_t)r * x_stride, x_stride, sums);
            for (int i = 0; i < outs; i++) {
                size_t column = target.ordered ? place(type, (size_t)(o + i)) : (size_t)(o + i);
                float bias = linear->bias ? linear->bias[o + i] : 0.0f;
                float *y = target.y + (size_t)r * target.stride + column;
                for (int j = 0; j < count; j++, y += target.stride)
                    *y = (target.adding ? *y : 0.0f) + (sums[i][j] + bias);
            }
        }
    }
}

#endif
