/* Reads memory as fast as the machine can: each thread in several streams at once, which its prefetchers follow. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define STREAMS 4
#define MOST_THREADS 64

struct part {
    const uint64_t *from;
    size_t words; /* a multiple of 8 * STREAMS */
    uint64_t sum;
};

static void *read_part(void *argument) {
    struct part *part = argument;
    size_t words = part->words / STREAMS;
    uint64_t sums[8] = {0};
    for (size_t i = 0; i < words; i += 8)
        for (size_t s = 0; s < STREAMS; s++)
            for (size_t k = 0; k < 8; k++) sums[k] += part->from[s * words + i + k];
    for (size_t k = 0; k < 8; k++) part->sum += sums[k];
    return NULL;
}

/* The sum of what is read: `words` in all, a multiple of 8 * STREAMS * threads. */
uint64_t read_memory(const uint64_t *from, size_t words, int threads) {
    struct part parts[MOST_THREADS];
    pthread_t started[MOST_THREADS];
    uint64_t sum = 0;
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    size_t each = words / (size_t)threads;
    for (int i = 0; i < threads; i++) {
        parts[i] = (struct part){from + (size_t)i * each, each, 0};
        if (i > 0 && pthread_create(&started[i], NULL, read_part, &parts[i])) threads = i;
    }
    read_part(&parts[0]);
    for (int i = 1; i < threads; i++) pthread_join(started[i], NULL);
    for (int i = 0; i < threads; i++) sum += parts[i].sum;
    return sum;
}
