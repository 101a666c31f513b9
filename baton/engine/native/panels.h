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

#if defined(__AVX__)
#define SIDE 8
typedef __m256 turned;
typedef uint32_t turned_bits __attribute__((vector_size(32)));

/* 16 bytes of each of SIDE rows: to[k] has the k-th float of all of them. */
INLINE void turn(const char *const *rows, size_t at, turned *to) {
    __m256 row[4], pair[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m256 low = _mm256_castps128_ps256(_mm_loadu_ps((const float *)(rows[i] + at)));
        row[i] = _mm256_insertf128_ps(low, _mm_loadu_ps((const float *)(rows[i + 4] + at)), 1);
    }
    pair[0] = _mm256_unpacklo_ps(row[0], row[1]), pair[1] = _mm256_unpackhi_ps(row[0], row[1]);
    pair[2] = _mm256_unpacklo_ps(row[2], row[3]), pair[3] = _mm256_unpackhi_ps(row[2], row[3]);
    to[0] = _mm256_shuffle_ps(pair[0], pair[2], 0x44), to[1] = _mm256_shuffle_ps(pair[0], pair[2], 0xee);
    to[2] = _mm256_shuffle_ps(pair[1], pair[3], 0x44), to[3] = _mm256_shuffle_ps(pair[1], pair[3], 0xee);
}
#else
#define SIDE 4
typedef v4 turned;
typedef uint32_t turned_bits __attribute__((vector_size(16)));

INLINE void turn(const char *const *rows, size_t at, turned *to) {
    v4 row[4];
    for (int i = 0; i < 4; i++) memcpy(&row[i], rows[i] + at, sizeof row[i]);
    v4 low = SHUFFLE(row[0], row[1], 0, 4, 1, 5), high = SHUFFLE(row[2], row[3], 0, 4, 1, 5);
    to[0] = SHUFFLE(low, high, 0, 1, 4, 5), to[1] = SHUFFLE(low, high, 2, 3, 6, 7);
    low = SHUFFLE(row[0], row[1], 2, 6, 3, 7), high = SHUFFLE(row[2], row[3], 2, 6, 3, 7);
    to[2] = SHUFFLE(low, high, 0, 1, 4, 5), to[3] = SHUFFLE(low, high, 2, 3, 6, 7);
}
#endif

/* The same for rows of any type: `count` elements, a multiple of BLOCK, become the rows of SIDE columns of a panel. */
INLINE void turn_whole(int type, const char *const *rows, size_t count, float *panel) {
    turned four[4];
    if (type == FLOAT16) { /* a block at a time */
        float wide[SIDE][BLOCK];
        const char *blocks[SIDE];
        for (size_t k = 0; k < count; k += BLOCK) {
            for (int i = 0; i < SIDE; i++) {
                vf first, second;
                widen(FLOAT16, rows[i] + k * 2, &first, &second);
                store(wide[i], first);
                store(wide[i] + LANES, second);
                blocks[i] = (const char *)wide[i];
            }
            for (size_t j = 0; j < BLOCK; j += 4, panel += 4 * BLOCK) {
                turn(blocks, j * 4, four);
                for (int i = 0; i < 4; i++) memcpy(panel + i * BLOCK, &four[i], sizeof four[i]);
            }
        }
    } else if (type == BFLOAT16) { /* in pairs, which are split when they stand where they belong */
        for (size_t k = 0; k < count; k += 8, panel += 8 * BLOCK) {
            turn(rows, k * 2, four);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                turned_bits bits = (turned_bits)four[i], even = bits << 16, odd = bits & 0xffff0000u;
                memcpy(panel + 2 * i * BLOCK, &even, sizeof even);
                memcpy(panel + (2 * i + 1) * BLOCK, &odd, sizeof odd);
            }
        }
    } else {
        for (size_t k = 0; k < count; k += 4, panel += 4 * BLOCK) {
            turn(rows, k * 4, four);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) memcpy(panel + i * BLOCK, &four[i], sizeof four[i]);
        }
    }
}

/* SIDE rows of `count` elements become SIDE columns of a panel; zeros below them up to a whole block. */
INLINE void turn_rows(int type, const char *const *rows, size_t count, float *panel) {
    size_t whole = count / BLOCK * BLOCK, bytes = element_bytes(type);
    turn_whole(type, rows, whole, panel);
    if (whole == count) return;
    char rest[SIDE][BLOCK * 4];
    const char *ends[SIDE];
    memset(rest, 0, sizeof rest);
    for (int i = 0; i < SIDE; i++) {
        memcpy(rest[i], rows[i] + whole * bytes, (count - whole) * bytes);
        ends[i] = rest[i];
    }
    turn_whole(type, ends, BLOCK, panel + whole * BLOCK);
}

#endif
