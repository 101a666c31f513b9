/* The draw of a token: sampler.py defines it and computes the same with PyTorch. */
#include <math.h>
#include <stdint.h>

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
