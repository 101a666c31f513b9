/* What is done to the heads of a row before attention: the norm that some models have, and the rotation by position. */
#ifndef BATON_HEADS_H
#define BATON_HEADS_H

#include "simd.h"

/* Normalises (if `weight`) and rotates one head of `dim` elements in place; `cosine` and `sine` have one for each pair. */
INLINE void rotate_head(float *restrict head, size_t dim, const float *restrict weight, double epsilon,
                        const float *restrict cosine, const float *restrict sine) {
    size_t half = dim / 2;
    if (weight) {
        float squares = 0.0f;
        for (size_t i = 0; i < dim; i++) squares += head[i] * head[i];
        float scale = 1.0f / sqrtf(squares / (float)dim + (float)epsilon);
        for (size_t i = 0; i < dim; i++) head[i] = head[i] * scale * weight[i];
    }
    for (size_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosine[i] - high * sine[i];
        head[i + half] = high * cosine[i] + low * sine[i];
    }
}

#endif
