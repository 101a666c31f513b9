/* Attention of one query position over a paged cache, a span of keys at a time.
 *
 * A KV head's keys and values are read once for all the query heads that share it. Spans start at multiples of
 * SPAN_KEYS and are combined in order, so the result depends neither on the number of threads nor on other rows.
 */
#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H

#include "linear.h"

#define SPAN_KEYS 128
#define SHARED 4 /* query heads that are computed together */

struct heads {
    int type; /* of the cache */
    size_t query_heads, kv_heads, head_dim, head_stride; /* head_stride: floats of a padded head */
    size_t block_size;
};

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

/* One cache block's keys `from` up to `to` against all heads: scores[head * SPAN_KEYS + key - from]. */
INLINE void score_block(int type, const struct heads *h, const char *keys, size_t from, size_t to,
                        const float *queries, float *scores) {
    size_t shared = h->query_heads / h->kv_heads, head_bytes = h->head_dim * element_bytes(type);
    struct operands p = {NULL, h->kv_heads * head_bytes, NULL, h->head_stride, h->head_dim};
    for (size_t kv = 0; kv < h->kv_heads; kv++) {
        p.weight = keys + from * p.weight_bytes + kv * head_bytes;
        for (size_t key = from; key < to; key += TILE_OUT, p.weight += TILE_OUT * p.weight_bytes) {
            int outs = to - key < TILE_OUT ? (int)(to - key) : TILE_OUT;
            for (int q = 0, count; q < (int)shared; q += count) {
                size_t head = kv * shared + (size_t)q;
                count = tile_rows((int)shared - q);
                p.x = queries + head * h->head_stride;
                tiles(type, outs, count, p, scores + head * SPAN_KEYS + (key - from), SPAN_KEYS);
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

#define DEFINE_BLEND(NAME, TYPE)                                                                                    \
    static __attribute__((noinline)) void NAME(const struct heads *h, const char *values, size_t from, size_t to,  \
                                               const float *weights, float *mixed) {                               \
        blend_block(TYPE, h, values, from, to, weights, mixed);                                                    \
    }
DEFINE_BLEND(blend_float32, FLOAT32)
DEFINE_BLEND(blend_bfloat16, BFLOAT16)
DEFINE_BLEND(blend_float16, FLOAT16)

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

/* The part of a span that lies in one cache block. */
struct part {
    const char *at; /* the block's keys, or its values */
    size_t first, end, next;
};

INLINE struct part part_of(const struct heads *h, const char *base, size_t block_bytes, const int32_t *table,
                           size_t from, size_t to) {
    size_t first = from % h->block_size, room = h->block_size - first;
    size_t end = to - from < room ? first + (to - from) : h->block_size;
    return (struct part){base + (size_t)table[from / h->block_size] * block_bytes, first, end, from + (end - first)};
}

/* Blocks lie anywhere, so the processor cannot guess the next one. */
INLINE void fetch(const struct heads *h, struct part part) {
    size_t position_bytes = h->kv_heads * h->head_dim * element_bytes(h->type);
    for (size_t i = part.first * position_bytes; i < part.end * position_bytes; i += 64)
        __builtin_prefetch(part.at + i, 0, 2);
}

/* Keys `from` up to `to`, inside one span. `table` is the row's block table; block b's keys begin at
 * keys + b * block_bytes, its values half_bytes after them. `scores` is scratch [query_heads][SPAN_KEYS]. */
static void attend_span(const struct heads *h, const char *keys, size_t block_bytes, size_t half_bytes,
                        const int32_t *table, size_t from, size_t to, const float *queries, float *scores,
                        float *result) {
    const char *values = keys + half_bytes;
    float *largest = result, *total = result + h->query_heads, *mixed = total + h->query_heads;
    for (size_t at = from; at < to;) {
        struct part part = part_of(h, keys, block_bytes, table, at, to);
        fetch(h, part.next < to ? part_of(h, keys, block_bytes, table, part.next, to)
                                : part_of(h, values, block_bytes, table, from, to));
        if (h->type == FLOAT32)
            score_block(FLOAT32, h, part.at, part.first, part.end, queries, scores + (at - from));
        else if (h->type == BFLOAT16)
            score_block(BFLOAT16, h, part.at, part.first, part.end, queries, scores + (at - from));
        else
            score_block(FLOAT16, h, part.at, part.first, part.end, queries, scores + (at - from));
        at = part.next;
    }
    for (size_t head = 0; head < h->query_heads; head++)
        largest[head] = soften(scores + head * SPAN_KEYS, to - from, &total[head]);
    memset(mixed, 0, h->query_heads * h->head_stride * sizeof *mixed);
    for (size_t at = from; at < to;) {
        struct part part = part_of(h, values, block_bytes, table, at, to);
        if (part.next < to) fetch(h, part_of(h, values, block_bytes, table, part.next, to));
        if (h->type == FLOAT32)
            blend_float32(h, part.at, part.first, part.end, scores + (at - from), mixed);
        else if (h->type == BFLOAT16)
            blend_bfloat16(h, part.at, part.first, part.end, scores + (at - from), mixed);
        else
            blend_float16(h, part.at, part.first, part.end, scores + (at - from), mixed);
        at = part.next;
    }
}

#endif
