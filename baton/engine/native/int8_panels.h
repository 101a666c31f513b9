/* Products of many rows with int8 weights: what panels.h does, on whole numbers (int8.h says how rows are rounded).
 *
 * Elements are multiplied in pairs, whose products the processor adds. Pair p of a row is elements 4 * (p / 2) + p % 2 and
 * two after that: so bytes are widened by shifts alone. A group's products are added exactly, and its sum goes to
 * one running float32 sum in the order of the groups, whatever strip or panel it is in.
 */
#ifndef BATON_INT8_PANELS_H
#define BATON_INT8_PANELS_H

#include "int8.h"
#include "panels.h"

#define PAIRS (GROUP / 2)

/* A group of BLOCK rows of weights, side by side. */
struct int8_group {
    float scale[BLOCK];
    int16_t pair[PAIRS][2 * BLOCK]; /* where pair_place says */
};

/* Where element `of_pair` of a column's pair stands in a panel: add_products adds neighbours, or the vector's halves. */
INLINE size_t pair_place(size_t column, size_t of_pair) {
    size_t lane = column % LANES, vector = (column - lane) * 2;
    return vector + (ADDS_NEIGHBOURS ? 2 * lane + of_pair : of_pair * LANES + lane);
}

/* A row's pair for every column. */
INLINE vs splat_pair(const int16_t *pair) {
#if ADDS_NEIGHBOURS
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return (vs)(both + (vi){0});
#else
    vs all;
    for (int i = 0; i < 2 * LANES; i++) all[i] = pair[i / LANES];
    return all;
#endif
}

/* add_products, but in place. Left to itself GCC computes all products of a step first and spills the sums. */
INLINE void add_in_place(vi *sum, vs a, vs b) {
#if VECTOR_BYTES == 32 && defined(__AVX2__) && !defined(__AVXVNNI__)
    vs products;
    __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(*sum), "=&x"(products) : "x"(a), "x"(b));
#else
    *sum = add_products(*sum, a, b);
#endif
}

/* sums[r][BLOCK] += rows[r] * panel, in steps of the rows; `rows` lie as [pair][STRIP][2]. */
INLINE void multiply_int8_panel(size_t groups, const int16_t *rows, const struct int8_group *panel, float *sums) {
    for (; groups; groups--, panel++) {
        vi sum[STRIP][2];
#pragma GCC unroll 12
        for (int r = 0; r < STRIP; r++) sum[r][0] = sum[r][1] = (vi){0};
        for (size_t p = 0; p < PAIRS; p++, rows += 2 * STRIP) {
            vs first = *(const vs_any *)panel->pair[p], second = *(const vs_any *)(panel->pair[p] + 2 * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < STRIP; r++) {
                vs factor = splat_pair(rows + 2 * r);
                add_in_place(&sum[r][0], factor, first);
                add_in_place(&sum[r][1], factor, second);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                float *to = sums + r * BLOCK + i * LANES;
                vf whole = __builtin_convertvector(sum[r][i], vf);
                store(to, fused(whole, load(panel->scale + i * LANES), load(to)));
            }
    }
}

/* A rounded row of whole groups becomes row `r` of a strip. */
static void pack_pairs(const int16_t *row, size_t count, int16_t *strip, size_t r) {
    int16_t *to = strip + 2 * r;
    for (size_t k = 0; k < count; k += 4, row += 4, to += 4 * STRIP) {
        to[0] = row[0], to[1] = row[2];
        to[2 * STRIP] = row[1], to[2 * STRIP + 1] = row[3];
    }
}

/* A group of SIDE rows of weights becomes columns `column` and so on of a panel's. */
INLINE void turn_int8_rows(const char *const *rows, size_t column, struct int8_group *to) {
    typedef int16_t turned_pairs __attribute__((vector_size(sizeof(turned))));
    turned four[4];
    for (size_t k = 0; k < GROUP; k += 16) {
        turn(rows, k, four);
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; i++) { /* four elements of each column */
            turned_pairs bytes = (turned_pairs)four[i], pairs[2] = {bytes << 8 >> 8, bytes >> 8};
#pragma GCC unroll 2
            for (size_t j = 0; j < 2; j++) {
                int16_t *pair = to->pair[k / 2 + 2 * i + j];
                if (ADDS_NEIGHBOURS)
                    memcpy(pair + pair_place(column, 0), &pairs[j], sizeof pairs[j]);
                else
                    for (size_t c = 0; c < 2 * SIDE; c++) pair[pair_place(column + c / 2, c % 2)] = pairs[j][c];
            }
        }
    }
}

#endif
