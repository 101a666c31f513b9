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
#define AHEAD 16 /* keys */

struct heads {
    int type; /* of the cache */
    size_t query_heads, kv_heads, head_dim, head_stride; /* head_stride: floats of a padded head */
    size_t block_size;
};

/* mixed[q][d .. d + width * BLOCK) += sum over keys of weights[q][key] * value[key][d ...]; key k's values begin
 * at[k] + offset. The next keys' are fetched meanwhile. */
INLINE void blend(int type, int count, int width, size_t present, const char *const *at, size_t offset, size_t keys,
                  const float *weights, float *mixed, size_t stride) {
    vf sum[SHARED][2 * 2];
#pragma GCC unroll 4
    for (int q = 0; q < count; q++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * width; i++) sum[q][i] = load(mixed + q * stride + i * LANES);
    for (size_t key = 0; key < keys; key++) {
        const char *values = at[key] + offset;
        __builtin_prefetch(at[key + AHEAD] + offset, 0, 2);
#pragma GCC unroll 2
        for (int i = 0; i < width; i++) {
            const float *weight_of = weights + key;
            vf first, second;
            __asm__("" : "+r"(weight_of)); /* weights are loaded again for each i: kept, they would displace sums */
            if (present)
                widen_rest(type, values, present, &first, &second);
            else
                widen(type, values + i * BLOCK * element_bytes(type), &first, &second);
#pragma GCC unroll 4
            for (int q = 0; q < count; q++) {
                vf weight = splat(weight_of[q * SPAN_KEYS]);
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

INLINE void blend_head(int type, int count, size_t dim, const char *const *at, size_t offset, size_t keys,
                       const float *weights, float *mixed, size_t stride) {
    size_t d = 0, bytes = element_bytes(type);
    for (; d + 2 * BLOCK <= dim; d += 2 * BLOCK)
        blend(type, count, 2, 0, at, offset + d * bytes, keys, weights, mixed + d, stride);
    for (; d + BLOCK <= dim; d += BLOCK)
        blend(type, count, 1, 0, at, offset + d * bytes, keys, weights, mixed + d, stride);
    if (d < dim) blend(type, count, 1, dim - d, at, offset + d * bytes, keys, weights, mixed + d, stride);
}

/* Adds what the values of `count` keys give to all heads, AHEAD keys at a time: so many stay in the first cache. */
INLINE void blend_keys(int type, const struct heads *h, const char *const *at, size_t half_bytes, size_t count,
                       const float *weights, float *mixed) {
    size_t shared = h->query_heads / h->kv_heads, stride = h->head_stride, dim = h->head_dim;
    for (size_t from = 0; from < count; from += AHEAD, at += AHEAD) {
        size_t keys = count - from < AHEAD ? count - from : AHEAD;
        for (size_t head = 0; head < h->query_heads; head += shared) {
            size_t offset = half_bytes + head / shared * dim * element_bytes(type);
            for (size_t q = 0; q < shared; q += SHARED) {
                const float *weight = weights + (head + q) * SPAN_KEYS + from;
                float *out = mixed + (head + q) * stride;
                switch (shared - q) {
                case 1: blend_head(type, 1, dim, at, offset, keys, weight, out, stride); break;
                case 2: blend_head(type, 2, dim, at, offset, keys, weight, out, stride); break;
                case 3: blend_head(type, 3, dim, at, offset, keys, weight, out, stride); break;
                default: blend_head(type, SHARED, dim, at, offset, keys, weight, out, stride); break;
                }
            }
        }
    }
}

/* scores[head * SPAN_KEYS + k] = key k times the head's query, for `outs` (TILE_OUT or 1) keys from k = 0 on. */
INLINE void score_tile(int type, const struct heads *h, int outs, const char *const *at, const float *queries,
                       float *scores) {
    size_t shared = h->query_heads / h->kv_heads, head_bytes = h->head_dim * element_bytes(type);
    struct operands p = {{NULL}, NULL, h->head_stride, h->head_dim};
#pragma GCC unroll 4
    for (int o = 0; o < outs; o++) p.weight[o] = at[o];
    for (size_t head = 0; head < h->query_heads; head += shared) {
        for (int q = 0, count; q < (int)shared; q += count) {
            count = tile_rows((int)shared - q);
            p.x = queries + (head + (size_t)q) * h->head_stride;
            tile_of_rows(type, outs, count, p, scores + (head + (size_t)q) * SPAN_KEYS, SPAN_KEYS);
        }
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            for (size_t i = 0; i < head_bytes; i += 64) __builtin_prefetch(at[AHEAD + o] + (p.weight[o] - at[o]) + i, 0, 2);
            p.weight[o] += head_bytes;
        }
    }
}

INLINE void score_keys(int type, const struct heads *h, const char *const *at, size_t count, const float *queries,
                       float *scores) {
    size_t k = 0;
    for (; k + TILE_OUT <= count; k += TILE_OUT) score_tile(type, h, TILE_OUT, at + k, queries, scores + k);
    for (; k < count; k++) score_tile(type, h, 1, at + k, queries, scores + k);
}

#define DEFINE_ATTENTION(SCORE, BLEND, TYPE)                                                                        \
    static __attribute__((noinline)) void SCORE(const struct heads *h, const char *const *at, size_t count,        \
                                                const float *queries, float *scores) {                             \
        score_keys(TYPE, h, at, count, queries, scores);                                                           \
    }                                                                                                              \
    static __attribute__((noinline)) void BLEND(const struct heads *h, const char *const *at, size_t half_bytes,   \
                                                size_t count, const float *weights, float *mixed) {                \
        blend_keys(TYPE, h, at, half_bytes, count, weights, mixed);                                                \
    }
DEFINE_ATTENTION(score_float32, blend_float32, FLOAT32)
DEFINE_ATTENTION(score_bfloat16, blend_bfloat16, BFLOAT16)
DEFINE_ATTENTION(score_float16, blend_float16, FLOAT16)

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

/* Where the keys `from` up to `to` are, in the order in which they are read: as TILE_OUT streams (see struct walk), which
 * the processor foresees, while it cannot guess where the next block is. AHEAD more are what is to be fetched after them:
 * the first values, and after these what the next layer reads. */
static void list_keys(const struct heads *h, const char *keys, size_t block_bytes, size_t half_bytes,
                      const int32_t *table, size_t from, size_t to, const char **at) {
    size_t count = to - from, position_bytes = h->kv_heads * h->head_dim * element_bytes(h->type);
    const char *ordered[SPAN_KEYS];
    for (size_t k = 0, within = from % h->block_size, block = from / h->block_size; k < count; block++, within = 0) {
        const char *key = keys + (size_t)table[block] * block_bytes + within * position_bytes;
        for (; within < h->block_size && k < count; within++, key += position_bytes) ordered[k++] = key;
    }
    const char **next = at;
    for (struct walk walk = walk_outputs(0, (int64_t)count, 1); walk.output < (int64_t)count; walk_on(&walk))
        for (int i = 0; i < walk_outs(&walk); i++) *next++ = ordered[walk.output + i * walk.apart];
    for (size_t k = 0; k < AHEAD; k++) *next++ = at[k < count ? k : 0] + half_bytes;
}

/* Keys `from` up to `to`, inside one span. `table` is the row's block table; block b's keys begin at
 * keys + b * block_bytes, its values half_bytes after them. `scores` is scratch [query_heads][SPAN_KEYS]. */
static void attend_span(const struct heads *h, const char *keys, size_t block_bytes, size_t half_bytes,
                        const int32_t *table, size_t from, size_t to, const float *queries, float *scores,
                        float *result) {
    const char *at[SPAN_KEYS + AHEAD];
    size_t count = to - from;
    float *largest = result, *total = result + h->query_heads, *mixed = total + h->query_heads;
    list_keys(h, keys, block_bytes, half_bytes, table, from, to, at);
    if (h->type == FLOAT32)
        score_float32(h, at, count, queries, scores);
    else if (h->type == BFLOAT16)
        score_bfloat16(h, at, count, queries, scores);
    else
        score_float16(h, at, count, queries, scores);
    for (size_t head = 0; head < h->query_heads; head++)
        largest[head] = soften(scores + head * SPAN_KEYS, count, &total[head]);
    memset(mixed, 0, h->query_heads * h->head_stride * sizeof *mixed);
    if (h->type == FLOAT32)
        blend_float32(h, at, half_bytes, count, scores, mixed);
    else if (h->type == BFLOAT16)
        blend_bfloat16(h, at, half_bytes, count, scores, mixed);
    else
        blend_float16(h, at, half_bytes, count, scores, mixed);
}

#endif
