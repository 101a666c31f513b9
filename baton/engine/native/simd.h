/* Vectors of the machine's own width, and the element types that weights and caches are kept in.
 *
 * A "block" is 2 * LANES consecutive elements. Widening a block of bfloat16 gives its even and its odd elements in
 * two vectors, which costs a shift and a mask; keeping them in order would cost shuffles. So whatever is multiplied
 * with elements of a type lies in that type's order: `place` says where element i stands.
 */
#ifndef BATON_SIMD_H
#define BATON_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__) || defined(__F16C__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define LANES (VECTOR_BYTES / 4)
#define BLOCK (2 * LANES)
#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3 }; /* INT8: weights only, see int8.h */

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef float vf_any __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(VECTOR_BYTES / 2), aligned(1), may_alias));

INLINE vf load(const float *from) { return *(const vf_any *)from; }
INLINE void store(float *to, vf value) { *(vf_any *)to = value; }
/* Taking nothing away is free; adding a zero is not, since it would change a negative zero. */
INLINE vf splat(float value) { return value - (vf){0}; }
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
/* pick(a > b, a, b) and pick(a < b, a, b): of numbers that are none, b. */
INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}
INLINE vf smaller(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return pick(a < b, a, b);
#endif
}

/* a * b + c, rounded once where the machine can. Left to the compiler, one expression would be rounded once in one
 * place and twice in another, and a row's bits would depend on the size of its batch: it is told to leave it. */
INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

typedef float v4 __attribute__((vector_size(16)));
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t v4i __attribute__((vector_size(16)));
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (v4i){i, j, k, l})
#endif

INLINE v4 quarter_sums(vf value) {
    union {
        vf whole;
        v4 part[VECTOR_BYTES / 16];
    } u = {value};
#if VECTOR_BYTES == 64
    return (u.part[0] + u.part[1]) + (u.part[2] + u.part[3]);
#elif VECTOR_BYTES == 32
    return u.part[0] + u.part[1];
#else
    return u.part[0];
#endif
}

INLINE float sum_lanes(vf value) {
    v4 sum = quarter_sums(value);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* The sums of four vectors' lanes, each added in the order of sum_lanes. */
INLINE v4 sum_lanes_of_four(vf a, vf b, vf c, vf d) {
    v4 s = quarter_sums(a), t = quarter_sums(b), u = quarter_sums(c), v = quarter_sums(d);
    v4 st = SHUFFLE(s, t, 0, 4, 1, 5) + SHUFFLE(s, t, 2, 6, 3, 7);
    v4 uv = SHUFFLE(u, v, 0, 4, 1, 5) + SHUFFLE(u, v, 2, 6, 3, 7);
    return SHUFFLE(st, uv, 0, 1, 4, 5) + SHUFFLE(st, uv, 2, 3, 6, 7);
}

INLINE float max_lanes(vf value) {
    float best = value[0];
    for (int i = 1; i < LANES; i++) best = value[i] > best ? value[i] : best;
    return best;
}

/* e ** x within 2 units in the last place; x is taken as -87 or 88 where it is beyond them. Cephes' polynomial. */
INLINE vf exponential(vf x) {
    const vf magic = splat(12582912.0f); /* adding it rounds to a whole number, kept in the low bits */
    x = larger(x, splat(-87.0f));
    x = smaller(x, splat(88.0f));
    vf t = fused(x, splat(1.44269504088896341f), magic);
    vf n = t - magic;
    vf r = fused(n, splat(-0.693359375f), x);
    r = fused(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p * r, r, r + 1.0f);
    return (vf)((vi)p + ((vi)t << 23));
}

INLINE size_t element_bytes(int type) { return type == FLOAT32 ? 4 : 2; }

/* Elements rounded up to whole blocks. */
INLINE size_t padded(size_t count) { return (count + BLOCK - 1) / BLOCK * BLOCK; }

/* Where element `i` stands in `type`'s order. */
INLINE size_t place(int type, size_t i) {
    if (type != BFLOAT16) return i;
    size_t within = i % BLOCK;
    return i - within + within / 2 + (within % 2) * LANES;
}

INLINE vf widen_half(const uint16_t *from) {
#if defined(__F16C__) && VECTOR_BYTES == 64
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__) && VECTOR_BYTES == 32
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    vu bits = __builtin_convertvector(*(const vh_any *)from, vu);
    vu magnitude = (bits & 0x7fff) << 13;
    vu infinite = (vu)(magnitude >= 0x0f800000u) & 0x7f800000u;
    vf scaled = (vf)magnitude * 0x1p112f; /* moves the exponent's bias, subnormal numbers included */
    return (vf)((vu)scaled | infinite | (bits & 0x8000) << 16);
#endif
}

/* Widens a block into two vectors, in `type`'s order. */
INLINE void widen(int type, const void *from, vf *first, vf *second) {
    if (type == FLOAT32) {
        *first = load((const float *)from);
        *second = load((const float *)from + LANES);
    } else if (type == BFLOAT16) {
        vu bits = *(const vu_any *)from;
        *first = (vf)(bits << 16);
        *second = (vf)(bits & 0xffff0000u);
    } else {
        *first = widen_half((const uint16_t *)from);
        *second = widen_half((const uint16_t *)from + LANES);
    }
}

/* Widens the `count` < BLOCK elements at the end of a row: the rest of the block is zeros. Reads nothing beyond. */
INLINE void widen_rest(int type, const void *from, size_t count, vf *first, vf *second) {
    char rest[BLOCK * 4] = {0};
    memcpy(rest, from, count * element_bytes(type));
    widen(type, rest, first, second);
}

INLINE float from_bfloat16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t to_float16(float value) {
#ifdef __F16C__
    return (uint16_t)_cvtss_sh(value, 0);
#else
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00; /* rounds to 2 ** 16 or more */
    if (bits < 0x38800000) {                      /* subnormal: let the addition round */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    return sign | (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
#endif
}

INLINE void narrow(int type, void *to, const float *from, size_t count) {
    if (type == FLOAT32) {
        memcpy(to, from, count * 4);
    } else if (type == BFLOAT16) {
        for (size_t i = 0; i < count; i++) ((uint16_t *)to)[i] = to_bfloat16(from[i]);
    } else {
        for (size_t i = 0; i < count; i++) ((uint16_t *)to)[i] = to_float16(from[i]);
    }
}

#endif
