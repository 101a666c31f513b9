/* Attention of one query position over a paged cache, a span of keys at a time.
 *
 * A KV head's keys and values are read once for all the query heads that share it. Spans start at multiples of
 * SPAN_KEYS and are combined in order, so the result depends neither on the number of threads nor on other rows.
 */
#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H

#include "simd.h"

#define SPAN_KEYS 128
#define SHARED 4 /* query heads that are computed together */

struct heads {
    int type; /* of the cache */
    size_t query_heads, kv_heads, head_dim, head_stride; /* head_stride: floats of a padded head */
    size_t block_size;
};

/* scores[q * SPAN_KEYS] = key . queries[q] */
INLINE void dot(int type, int count, size_t dim, const char *key, const float *queries, size_t stride, float *scores) {
    vf sum[SHARED];
#pragma GCC unroll 4
    for (int q = 0; q < count; q++) sum[q] = splat(0.0f);
    size_t whole = dim / BLOCK * BLOCK;
    vf first, second;
    for (size_t d = 0; d < whole; d += BLOCK) {
        widen(type, key + d * element_bytes(type), &first, &second);
#pragma GCC unroll 4
        for (int q = 0; q < count; q++) {
            sum[q] = fused(first, load(queries + q * stride + d), sum[q]);
            sum[q] = fused(second, load(queries + q * stride + d + LANES), sum[q]);
        }
    }
    if (whole < dim) {
        widen_rest(type, key + whole * element_bytes(type), dim - whole, &first, &second);
#pragma GCC unroll 4
        for (int q = 0; q < count; q++) {
            sum[q] = fused(first, load(queries + q * stride + whole), sum[q]);
            sum[q] = fused(second, load(queries + q * stride + whole + LANES), sum[q]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < count; q++) scores[q * SPAN_KEYS] = sum_lanes(sum[q]);
}

/* mixed[q][d .. d + width * BLOCK) += sum over keys of weights[q][key] * value[key][d ...] */
INLINE void blend(int type, int count, int width, size_t present, const char *values, size_t value_bytes, size_t keys,
                  const float *weights, float *mixed, size_t stride) {
    vf sum[SHARED][2 * 2];
#pragma GCC unroll 4
    for (int q = 0; q < count; q++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * width; i++) sum[q][i] = load(mixed + q * stride + i * LANES);
    for (size_t key = 0; key < keys; key++, values += value_bytes) {
#pragma GCC unroll 2
        for (int i = 0; i < width; i++) {
            vf first, second;
            if (present)
                widen_rest(type, values, present, &first, &second);
            else
                widen(type, values + i * BLOCK * element_bytes(type), &first, &second);
#pragma GCC unroll 4
            for (int q = 0; q < count; q++) {
                vf weight = splat(weights[q * SPAN_KEYS + key]);
                sum[q][2 * i] = fused(weight, first, sum[q][2 * i]);
                sum[q][2 * i + 1] = fused(weight, second, sum[q][2 * i + 1]);
            }
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < count; q++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * width; i++) store(mixed + q * stride + i * LANES, sum[q][i]);
}

INLINE void blend_head(int type, int count, size_t dim, const char *values, size_t value_bytes, size_t keys,
                       const float *weights, float *mixed, size_t stride) {
    size_t d = 0, bytes = element_bytes(type);
    for (; d + 2 * BLOCK <= dim; d += 2 * BLOCK)
        blend(type, count, 2, 0, values + d * bytes, value_bytes, keys, weights, mixed + d, stride);
    for (; d + BLOCK <= dim; d += BLOCK)
        blend(type, count, 1, 0, values + d * bytes, value_bytes, keys, weights, mixed + d, stride);
    if (d < dim) blend(type, count, 1, dim - d, values + d * bytes, value_bytes, keys, weights, mixed + d, stride);
}

/* One cache block's keys `from` up to `to` against all heads: scores[head][SPAN_KEYS] from `scores` on. */
INLINE void score_block(int type, const struct heads *h, const char *keys, size_t from, size_t to,
                        const float *queries, float *scores) {
    size_t shared = h->query_heads / h->kv_heads, head_bytes = h->head_dim * element_bytes(type);
    for (size_t key = from; key < to; key++)
        for (size_t kv = 0; kv < h->kv_heads; kv++) {
            const char *at = keys + (key * h->kv_heads + kv) * head_bytes;
            for (size_t q = 0; q < shared; q += SHARED) {
                size_t head = kv * shared + q, stride = h->head_stride;
                const float *query = queries + head * stride;
                float *score = scores + head * SPAN_KEYS + (key - from);
                switch (shared - q) {
                case 1: dot(type, 1, h->head_dim, at, query, stride, score); break;
                case 2: dot(type, 2, h->head_dim, at, query, stride, score); break;
                case 3: dot(type, 3, h->head_dim, at, query, stride, score); break;
                default: dot(type, 4, h->head_dim, at, query, stride, score); break;
                }
            }
        }
}

INLINE void blend_block(int type, const struct heads *h, const char *values, size_t from, size_t to,
                        const float *weights, float *mixed) {
    size_t shared = h->query_heads / h->kv_heads, head_bytes = h->head_dim * element_bytes(type);
    size_t value_bytes = h->kv_heads * head_bytes;
    for (size_t kv = 0; kv < h->kv_heads; kv++) {
        const char *at = values + from * value_bytes + kv * head_bytes;
        for (size_t q = 0; q < shared; q += SHARED) {
            size_t head = kv * shared + q, stride = h->head_stride, dim = h->head_dim;
            const float *weight = weights + head * SPAN_KEYS;
            float *out = mixed + head * stride;
            switch (shared - q) {
            case 1: blend_head(type, 1, dim, at, value_bytes, to - from, weight, out, stride); break;
            case 2: blend_head(type, 2, dim, at, value_bytes, to - from, weight, out, stride); break;
            case 3: blend_head(type, 3, dim, at, value_bytes, to - from, weight, out, stride); break;
            default: blend_head(type, 4, dim, at, value_bytes, to - from, weight, out, stride); break;
            }
        }
    }
}

#define DEFINE_BLOCKS(SUFFIX, TYPE)                                                                                \
    static __attribute__((noinline)) void score_##SUFFIX(const struct heads *h, const char *keys, size_t from,       \
                                                         size_t to, const float *queries, float *scores) {           \
        score_block(TYPE, h, keys, from, to, queries, scores);                                                       \
    }                                                                                                                \
    static __attribute__((noinline)) void blend_##SUFFIX(const struct heads *h, const char *values, size_t from,     \
                                                         size_t to, const float *weights, float *mixed) {            \
        blend_block(TYPE, h, values, from, to, weights, mixed);                                                      \
    }
DEFINE_BLOCKS(float32, FLOAT32)
DEFINE_BLOCKS(bfloat16, BFLOAT16)
DEFINE_BLOCKS(float16, FLOAT16)

/* Turns scores[SPAN_KEYS] into exp(score - largest); returns the largest, and the sum in *total. */
static float soften(float *scores, size_t count, float *total) {
    for (size_t i = count; i % LANES; i++) scores[i] = -INFINITY;
    vf best = splat(-INFINITY), sum = splat(0.0f);
    for (size_t i = 0; i < count; i += LANES) best = larger(load(scores + i), best);
    float largest = max_lanes(best);
    for (size_t i = 0; i < count; i += LANES) {
        vf weight = exponential(load(scores + i) - largest);
        store(scores + i, weight);
        sum += weight;
    }
    *total = sum_lanes(sum);
    return largest;
}

/* What a span of keys gives to one row: for each head the largest score, the sum of weights, and unnormalised
 * mixed values [head_stride]. */
INLINE size_t span_floats(const struct heads *h) { return h->query_heads * (2 + h->head_stride); }

/* Keys `from` up to `to`, inside one span. `table` is the row's block table; a block's keys begin at
 * pool + block * block_bytes + layer_bytes and its values at half_bytes after them. `scores` is scratch
 * [query_heads][SPAN_KEYS]. */
static void attend_span(const struct heads *h, const char *pool, size_t block_bytes, size_t half_bytes,
                        const int32_t *table, size_t from, size_t to, const float *queries, float *scores,
                        float *result) {
    float *largest = result, *total = result + h->query_heads, *mixed = total + h->query_heads;
    for (size_t at = from; at < to;) {
        size_t block = at / h->block_size, first = at % h->block_size;
        size_t end = first + (to - at) < h->block_size ? first + (to - at) : h->block_size;
        const char *keys = pool + (size_t)table[block] * block_bytes;
        if (h->type == FLOAT32)
            score_float32(h, keys, first, end, queries, scores + (at - from));
        else if (h->type == BFLOAT16)
            score_bfloat16(h, keys, first, end, queries, scores + (at - from));
        else
            score_float16(h, keys, first, end, queries, scores + (at - from));
        at += end - first;
    }
    for (size_t head = 0; head < h->query_heads; head++)
        largest[head] = soften(scores + head * SPAN_KEYS, to - from, &total[head]);
    memset(mixed, 0, h->query_heads * h->head_stride * sizeof *mixed);
    for (size_t at = from; at < to;) {
        size_t block = at / h->block_size, first = at % h->block_size;
        size_t end = first + (to - at) < h->block_size ? first + (to - at) : h->block_size;
        const char *values = pool + (size_t)table[block] * block_bytes + half_bytes;
        if (h->type == FLOAT32)
            blend_float32(h, values, first, end, scores + (at - from), mixed);
        else if (h->type == BFLOAT16)
            blend_bfloat16(h, values, first, end, scores + (at - from), mixed);
        else
            blend_float16(h, values, first, end, scores + (at - from), mixed);
        at += end - first;
    }
}

#endif
