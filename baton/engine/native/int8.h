/* Products of int8 weights with a few rows of activations that are rounded to 16 bits.
 *
 * A weight row is groups of GROUP elements, each with a bfloat16 scale, zeros at its end. A row of activations has one
 * step, its largest element divided by 32767: an error far below that of the weights. A group's products are added
 * exactly, as integers, and its sum goes to one running vector sum along the row, so a result depends neither on the
 * other rows nor on the tile that it is computed in. 16 bits cost no more than 8 would: without a dot product of
 * bytes (VNNI) both take two instructions for as many elements.
 */
#ifndef BATON_INT8_H
#define BATON_INT8_H

#include "linear.h"
#include "simd.h"

#if defined(__SSE2__) && VECTOR_BYTES == 16
#include <emmintrin.h>
#endif

#define GROUP_VECTORS (GROUP / (2 * LANES))
#define INT8_ROWS 8
#define STREAMED_ROWS 2 /* of more, the arithmetic takes longer than the memory: outputs are neighbours then */
#define LARGEST_STEP 32767.0f

typedef int16_t vs __attribute__((vector_size(VECTOR_BYTES)));
typedef int16_t vs_any __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
typedef int16_t vs_half __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int8_t vb_any __attribute__((vector_size(VECTOR_BYTES / 2), aligned(1), may_alias));

INLINE vs widen_bytes(const int8_t *from) {
#if defined(__AVX512BW__) && VECTOR_BYTES == 64
    return (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__) && VECTOR_BYTES == 32
    return (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#else
    return __builtin_convertvector(*(const vb_any *)from, vs);
#endif
}

#if defined(__SSE2__)
#define ADDS_NEIGHBOURS 1
#else
#define ADDS_NEIGHBOURS 0
#endif

/* sum + the products of pairs: of neighbours, or of elements that are LANES apart. Exact. */
INLINE vi add_products(vi sum, vs a, vs b) {
#if defined(__AVX512VNNI__) && VECTOR_BYTES == 64
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__) && VECTOR_BYTES == 64
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__) && VECTOR_BYTES == 32
    return (vi)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif defined(__AVX2__) && VECTOR_BYTES == 32
    return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && VECTOR_BYTES == 16
    return sum + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__SSE2__)
    union {
        vs whole[2];
        __m128i part[2 * VECTOR_BYTES / 16];
    } u = {{a, b}};
    const int parts = VECTOR_BYTES / 16;
    for (int i = 0; i < parts; i++) u.part[i] = _mm_madd_epi16(u.part[i], u.part[parts + i]);
    return sum + (vi)u.whole[0];
#elif defined(__aarch64__)
    int32x4_t low = vmlal_s16((int32x4_t)sum, vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    return (vi)vmlal_high_s16(low, (int16x8_t)a, (int16x8_t)b);
#else
    for (int i = 0; i < 2 * LANES; i++) sum[i % LANES] += (int32_t)a[i] * b[i];
    return sum;
#endif
}

/* Rounds `count` elements into to[grouped(count)], zeros at its end; returns the step, which is not a number where an
 * element is not finite. */
static float round_row(const float *x, size_t count, int16_t *to) {
    vf largest = splat(0.0f), fault = splat(0.0f);
    vf last = splat(0.0f);
    size_t whole = count / LANES * LANES;
    memcpy(&last, x + whole, (count - whole) * sizeof *x);
    for (size_t i = 0; i <= whole; i += LANES) {
        vf value = i < whole ? load(x + i) : last;
        largest = larger(larger(value, -value), largest);
        fault = fused(value, splat(0.0f), fault);
    }
    float most = max_lanes(largest), per_step = most > 1e-30f ? LARGEST_STEP / most : 0.0f;
    const vf magic = splat(12582912.0f); /* adding it rounds to a whole number, kept in the low bits */
    for (size_t i = 0; i < grouped(count); i += LANES) {
        vf value = i < whole ? load(x + i) : i == whole ? last : splat(0.0f);
        vi rounded = (vi)fused(value, splat(per_step), magic) - (vi)magic;
        vs_half narrow = __builtin_convertvector(rounded, vs_half);
        memcpy(to + i, &narrow, sizeof narrow);
    }
    return most / LARGEST_STEP + sum_lanes(fault);
}

/* Weight row o begins at weight + o * apart * groups * GROUP, its scales at scale + o * apart * groups; row r of
 * activations at x + r * x_stride. */
struct int8_operands {
    const int8_t *weight;
    const uint16_t *scale;
    const int16_t *x;
    size_t x_stride, groups, apart;
};

/* sums[r * TILE_OUT + o] = weight row o times activation row r, in steps of the latter. */
INLINE void int8_tile(int outs, int rows, struct int8_operands p, float *sums) {
    vf sum[TILE_OUT][INT8_ROWS];
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sum[o][r] = splat(0.0f);
    for (size_t g = 0; g < p.groups; g++) {
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            size_t group = (size_t)o * (rows > STREAMED_ROWS ? 1 : p.apart) * p.groups + g;
            const int8_t *weight = p.weight + group * GROUP;
            if (rows > STREAMED_ROWS) __builtin_prefetch(weight + TILE_OUT * p.groups * GROUP, 0, 2);
            vf scale = splat(from_bfloat16(p.scale[group]));
            vs wide[GROUP_VECTORS];
#pragma GCC unroll 8
            for (int i = 0; i < GROUP_VECTORS; i++) wide[i] = widen_bytes(weight + i * 2 * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int16_t *x = p.x + (size_t)r * p.x_stride + g * GROUP;
                vi products = {0};
#pragma GCC unroll 8
                for (int i = 0; i < GROUP_VECTORS; i++)
                    products = add_products(products, wide[i], *(const vs_any *)(x + i * 2 * LANES));
                sum[o][r] = fused(scale, __builtin_convertvector(products, vf), sum[o][r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) sums[r * TILE_OUT + o] = sum_lanes(sum[o][r]);
}

/* Functions of their own: each is kilobytes. */
#define DEFINE_INT8_TILES(NAME, OUTS)                                                           \
    static __attribute__((noinline)) void NAME(int rows, struct int8_operands p, float *sums) { \
        switch (rows) {                                                                         \
        case 1: int8_tile(OUTS, 1, p, sums); break;                                             \
        case 2: int8_tile(OUTS, 2, p, sums); break;                                             \
        case 4: int8_tile(OUTS, 4, p, sums); break;                                             \
        default: int8_tile(OUTS, INT8_ROWS, p, sums); break;                                    \
        }                                                                                       \
    }
DEFINE_INT8_TILES(int8_tiles, TILE_OUT)
DEFINE_INT8_TILES(int8_tiles_of_one, 1)

INLINE int int8_tile_rows(int left) { return left >= INT8_ROWS ? INT8_ROWS : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

/* Outputs `from` up to `to` for all rows; `step` has one for each. */
static void int8_range(const struct linear *linear, const int16_t *x, size_t x_stride, const float *step, int rows,
                       int64_t from, int64_t to, struct target target) {
    size_t groups = grouped((size_t)linear->in) / GROUP;
    float sums[INT8_ROWS * TILE_OUT];
    for (struct walk walk = walk_outputs(from, to, rows <= STREAMED_ROWS); walk.output < to; walk_on(&walk)) {
        int outs = walk_outs(&walk);
        size_t group = (size_t)walk.output * groups;
        struct int8_operands p = {(const int8_t *)linear->weight + group * GROUP, linear->scale + group, x, x_stride,
                                  groups, (size_t)walk.apart};
        float *y = target.y;
        for (int r = 0, count; r < rows; r += count) {
            count = int8_tile_rows(rows - r);
            p.x = x + (size_t)r * x_stride;
            if (outs == TILE_OUT)
                int8_tiles(count, p, sums);
            else
                int8_tiles_of_one(count, p, sums);
            for (int j = 0; j < count; j++, y += target.stride)
                for (int i = 0; i < outs; i++) {
                    int64_t o = walk.output + i * walk.apart;
                    float value = sums[j * TILE_OUT + i] * step[r + j] + (linear->bias ? linear->bias[o] : 0.0f);
                    y[o] = (target.adding ? y[o] : 0.0f) + value;
                }
        }
    }
}

#endif
