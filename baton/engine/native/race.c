/* The choice of a token: sampler.py defines it and computes the same with PyTorch. */
#include "simd.h"

#define EXPORT __attribute__((visibility("default")))
#define IDS 64 /* hashed at a time, so that the compiler computes them in vectors */

static inline uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* The id whose probability, divided by its waiting time -log(u), is largest; the lowest among equals. One of the
 * probabilities has to be above 0. */
EXPORT int64_t baton_race(const float *probabilities, int64_t vocabulary, uint64_t key) {
    const uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
    double best = 0;
    int64_t winner = 0;
    for (int64_t from = 0; from < vocabulary; from += IDS) {
        const int64_t ids = vocabulary - from < IDS ? vocabulary - from : IDS;
        const float *p = probabilities + from;
        uint32_t x[IDS];
        for (int i = 0; i < IDS; i++) x[i] = mixed(mixed((uint32_t)(from + i) * 0x9e3779b9u + low) ^ high);
        /* A waiting time is never below 1 - u: few ids can win, and only their logarithms are computed. First a whole
         * block is sifted in float32, with bounds rounded down. */
        const float bound = (float)(best * 0.999999);
        int can_win = ids < IDS;
        if (!can_win)
            for (int i = 0; i < IDS; i++) can_win |= (float)(int32_t)(~x[i] >> 8) * 0x1p-24f * bound < p[i];
        if (!can_win) continue;
        for (int64_t i = 0; i < ids; i++) {
            if (!(((double)~x[i] + 0.5) * 0x1p-32 * best < p[i])) continue;
            const double score = p[i] / -log(((double)x[i] + 0.5) * 0x1p-32);
            if (score > best) best = score, winner = from + i;
        }
    }
    return winner;
}

/* The largest of LARGEST logits, which is compared alone; *fault becomes not 0 where one is not a number. */
#define LARGEST (4 * 4 * LANES)
INLINE float largest_of(const float *x, vi *fault) {
    vf best[4];
    for (int k = 0; k < 4; k++) best[k] = load(x + k * LANES);
    for (int i = 0; i < LARGEST; i += 4 * LANES)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            vf value = load(x + i + k * LANES);
            best[k] = larger(value, best[k]);
            *fault |= value != value;
        }
    return max_lanes(larger(larger(best[0], best[1]), larger(best[2], best[3])));
}

/* For each row the lowest id that has its largest logit; -1 where that is not finite or any is not a number. */
EXPORT void baton_largest(const float *logits, int64_t rows, int64_t vocabulary, int64_t *ids) {
    for (int64_t row = 0; row < rows; row++, logits += vocabulary) {
        float best = -INFINITY;
        int64_t from = 0, first = 0, end = vocabulary;
        vi fault = {0};
        for (; from + LARGEST <= vocabulary; from += LARGEST) {
            float largest = largest_of(logits + from, &fault);
            if (largest > best) best = largest, first = from, end = from + LARGEST;
        }
        int faults = 0;
        for (int lane = 0; lane < LANES; lane++) faults |= fault[lane];
        for (; from < vocabulary; from++) {
            faults |= logits[from] != logits[from];
            if (logits[from] > best) best = logits[from], first = from, end = from + 1;
        }
        while (first < end - 1 && logits[first] != best) first++;
        ids[row] = faults || !isfinite(best) ? -1 : first;
    }
}
