/* Products of many rows: a strip of rows times a panel of columns, whose sums stay in registers all along.
 *
 * A panel is BLOCK columns side by side, [depth][BLOCK] in float32, so that a step along the depth is two vector
 * loads and one broadcast a row. Every sum is added in the order of the depth, whatever strip or panel it is in.
 */
#ifndef BATON_PANELS_H
#define BATON_PANELS_H

#include "simd.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define STRIP 12 /* 32 vector registers: 24 sums */
#else
#define STRIP 6 /* 16 vector registers: 12 sums */
#endif

/* sums[r * stride ..] = scale[r] * sums[r * stride ..] + the sum over k < depth of rows[r * row_step + k * step] *
 * panel[k]; without `scale`, the sum alone. */
INLINE void multiply_panel(size_t depth, const float *rows, size_t row_step, size_t step, const float *panel,
                           float *sums, size_t stride, const float *scale) {
    vf sum[STRIP][2];
#pragma GCC unroll 12
    for (int r = 0; r < STRIP; r++) {
        sum[r][0] = scale ? load(sums + r * stride) * scale[r] : splat(0.0f);
        sum[r][1] = scale ? load(sums + r * stride + LANES) * scale[r] : splat(0.0f);
    }
    for (size_t k = 0; k < depth; k++, rows += step, panel += BLOCK) {
        vf first = load(panel), second = load(panel + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < STRIP; r++) {
            vf factor = splat(rows[r * row_step]);
            sum[r][0] = fused(factor, first, sum[r][0]);
            sum[r][1] = fused(factor, second, sum[r][1]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < STRIP; r++) {
        store(sums + r * stride, sum[r][0]);
        store(sums + r * stride + LANES, sum[r][1]);
    }
}

/* Widens `count` elements into `to` in `type`'s order, zeros up to a whole block. */
INLINE void widen_row(int type, const void *from, size_t count, float *to) {
    size_t bytes = element_bytes(type), i = 0;
    vf first, second;
    for (; i + BLOCK <= count; i += BLOCK) {
        widen(type, (const char *)from + i * bytes, &first, &second);
        store(to + i, first);
        store(to + i + LANES, second);
    }
    if (i < count) {
        widen_rest(type, (const char *)from + i * bytes, count - i, &first, &second);
        store(to + i, first);
        store(to + i + LANES, second);
    }
}

/* Makes four rows, `row_stride` apart, four columns of a panel: panel[k * BLOCK + i] = rows[i * row_stride + k] for
 * k < depth, a multiple of 4. */
INLINE void turn_four(const float *rows, size_t row_stride, size_t depth, float *panel) {
    for (size_t k = 0; k < depth; k += 4, panel += 4 * BLOCK) {
        v4 a, b, c, d;
        memcpy(&a, rows + k, sizeof a);
        memcpy(&b, rows + row_stride + k, sizeof b);
        memcpy(&c, rows + 2 * row_stride + k, sizeof c);
        memcpy(&d, rows + 3 * row_stride + k, sizeof d);
        v4 ab = SHUFFLE(a, b, 0, 4, 1, 5), cd = SHUFFLE(c, d, 0, 4, 1, 5);
        v4 column[4] = {SHUFFLE(ab, cd, 0, 1, 4, 5), SHUFFLE(ab, cd, 2, 3, 6, 7)};
        ab = SHUFFLE(a, b, 2, 6, 3, 7), cd = SHUFFLE(c, d, 2, 6, 3, 7);
        column[2] = SHUFFLE(ab, cd, 0, 1, 4, 5), column[3] = SHUFFLE(ab, cd, 2, 3, 6, 7);
        for (int i = 0; i < 4; i++) memcpy(panel + i * BLOCK, &column[i], sizeof column[i]);
    }
}

#endif
