/* Copies that bypass the caches: for results so long that they would not stay there, and others' data would go. */
#ifndef OFFBEAT_STREAMING_H
#define OFFBEAT_STREAMING_H
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

static inline void stream_copy(char *out, const char *in, int64_t bytes) {
#if defined(__SSE2__)
    int64_t head = -(intptr_t)out & 15;
    if (head > bytes) head = bytes;
    memcpy(out, in, head);
    out += head, in += head, bytes -= head;
    for (; bytes >= 64; out += 64, in += 64, bytes -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)in), b = _mm_loadu_si128((const __m128i *)(in + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(in + 32)), d = _mm_loadu_si128((const __m128i *)(in + 48));
        _mm_stream_si128((__m128i *)out, a);
        _mm_stream_si128((__m128i *)(out + 16), b);
        _mm_stream_si128((__m128i *)(out + 32), c);
        _mm_stream_si128((__m128i *)(out + 48), d);
    }
    _mm_sfence();
#endif
    memcpy(out, in, bytes);
}
#endif
