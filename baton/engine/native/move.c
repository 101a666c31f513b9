/* A copy that writes around the caches: what is copied will not be read soon, and a line that is written as a whole
 * need not be fetched first. The C library does the same, but for far longer copies than a block. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

#if defined(__SSE2__)
#include <emmintrin.h>

#define LINE 64
#define AHEAD 1024 /* bytes: by so much the reads are told in advance */

EXPORT void baton_move(char *to, const char *from, int64_t bytes) {
    size_t left = (size_t)bytes, head = -(uintptr_t)to % LINE;
    if (head > left) head = left;
    memcpy(to, from, head);
    for (to += head, from += head, left -= head; left >= LINE; to += LINE, from += LINE, left -= LINE) {
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA); /* no fault, wherever it points */
        const __m128i *source = (const __m128i *)from;
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        __m128i *target = (__m128i *)to;
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(to, from, left);
    _mm_sfence(); /* such stores are ordered with nothing else */
}
#else
EXPORT void baton_move(char *to, const char *from, int64_t bytes) { memcpy(to, from, (size_t)bytes); }
#endif
