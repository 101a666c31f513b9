/* What prefill steps compute: products of many rows (products.h), the rotation of their heads and their way into the
 * cache, and attention of several positions of a sequence at once over its paged cache.
 *
 * Attention: work is cut into tiles: some positions of a chunk, with all the query heads that share a KV head, so each key and
 * value is widened once for all of them. A tile goes over its keys KEYS at a time and keeps for each row the
 * largest score so far, the sum of weights and the mixed values (online softmax; Milakov and Gimelshein, 2018).
 * Groups of keys begin at multiples of KEYS and hidden keys have weight 0, so a row's bits depend neither on the
 * tile that it is in nor on the number of threads.
 */
#include "heads.h"
#include "panels.h"
#include "products.h"
#include "threads.h"

#define EXPORT __attribute__((visibility("default")))
#define KEYS 128       /* a multiple of every BLOCK */
#define AHEAD 16       /* positions whose keys and values are on their way from memory */
#define QUERY_ROWS 192 /* at least one position's query heads, rounded up to whole strips */

/* The structures below are mirrored by baton.engine.native.chunks. */
struct chunk {
    const int32_t *table; /* the sequence's blocks from its first position on */
    int64_t first_row, tokens, start;
};

struct attention {
    int64_t cache_type, kv_heads, shared, head_dim, block_size, window; /* shared: query heads of a KV head */
    int64_t block_bytes, half_bytes; /* from a cache block to the next; from a layer's keys in it to its values */
    int64_t position_bytes;          /* from a position to the next */
    const struct chunk *chunk;
    int64_t chunks;
    const char *keys;     /* this layer's in block 0 */
    const float *queries; /* [rows][kv_heads][shared][head_dim], rows `query_stride` apart */
    float *mixed;         /* the same, without gaps */
    int64_t query_stride;
};

/* The queries, keys and values of all rows in one layer. */
struct rows {
    int64_t cache_type, rows, query_heads, kv_heads, head_dim;
    float *heads; /* [rows][query_heads + 2 * kv_heads][head_dim] */
    const float *cosine, *sine;          /* [rows][head_dim / 2] */
    const float *query_norm, *key_norm;  /* [head_dim], or NULL */
    double epsilon;
    char *keys;              /* this layer's in block 0 */
    const int64_t *position; /* [rows][2]: of each row's key and value, counted from there */
    int64_t position_bytes;  /* from a position to the next */
};

/* A thread's own. */
struct scratch {
    float *queries; /* [strip][depth][STRIP] */
    float *mixed;   /* [row][depth] */
    float *largest, *total, *scale; /* [row] */
    float *keys;    /* [panel of keys][depth][BLOCK] */
    float *values;  /* [panel of depth][KEYS][BLOCK] */
    float *scores;  /* [STRIP][KEYS] */
};

struct chunks {
    struct team team;
    int threads; /* that team and scratch are for; 0 for none */
    const struct attention *attention;
    const struct rows *placed;
    size_t depth, rows; /* of a tile: a padded head, and room for so many rows */
    size_t scratch_floats;
    float *scratch;
    _Atomic int next_scratch;
    struct products products;
};

/* What a tile sees of a sequence. */
struct tile {
    const struct chunk *chunk;
    size_t kv, first, tokens; /* the first token, counted from the chunk's start */
};

static size_t strips_of(size_t rows) { return (rows + STRIP - 1) / STRIP; }
static size_t tokens_of_tile(const struct attention *a) {
    size_t shared = (size_t)a->shared;
    return shared < QUERY_ROWS ? QUERY_ROWS / shared : 1;
}

static struct scratch scratch_at(const struct chunks *c, float *at) {
    struct scratch s;
    float **all[] = {&s.queries, &s.mixed, &s.keys, &s.values, &s.scores, &s.largest, &s.total, &s.scale};
    size_t floats[] = {c->rows * c->depth, c->rows * c->depth, KEYS * c->depth, KEYS * c->depth, STRIP * KEYS,
                       c->rows,            c->rows,            STRIP};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i] = at;
        at += padded(floats[i]);
    }
    return s;
}

static void take_queries(const struct chunks *c, struct tile tile, struct scratch s) {
    const struct attention *a = c->attention;
    size_t dim = (size_t)a->head_dim, shared = (size_t)a->shared, rows = tile.tokens * shared;
    float scale = 1.0f / sqrtf((float)dim);
    memset(s.queries, 0, strips_of(rows) * STRIP * c->depth * sizeof(float));
    for (size_t row = 0; row < rows; row++) {
        size_t token = (size_t)tile.chunk->first_row + tile.first + row / shared;
        const float *from = a->queries + token * (size_t)a->query_stride + (tile.kv * shared + row % shared) * dim;
        float *to = s.queries + row / STRIP * STRIP * c->depth + row % STRIP;
        for (size_t i = 0; i < dim; i++) to[i * STRIP] = from[i] * scale;
    }
    memset(s.mixed, 0, c->rows * c->depth * sizeof(float));
    for (size_t row = 0; row < c->rows; row++) s.largest[row] = -INFINITY, s.total[row] = 0.0f;
}

static const char *position_at(const struct attention *a, struct tile tile, size_t position) {
    size_t dim_bytes = (size_t)a->head_dim * element_bytes((int)a->cache_type);
    size_t block = position / (size_t)a->block_size, within = position % (size_t)a->block_size;
    return a->keys + (size_t)tile.chunk->table[block] * (size_t)a->block_bytes +
           within * (size_t)a->position_bytes + tile.kv * dim_bytes;
}

/* Begins to read a position's key and value. */
INLINE void fetch_position(const struct attention *a, struct tile tile, size_t position) {
    const char *at = position_at(a, tile, position);
    size_t bytes = (size_t)a->head_dim * element_bytes((int)a->cache_type);
    for (size_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(at + i, 0, 2);
        __builtin_prefetch(at + a->half_bytes + i, 0, 2);
    }
}

/* Widens keys and values of positions `from` up to `to`, of the group that begins at `group`, into panels. */
INLINE void take_keys(int type, const struct chunks *c, struct tile tile, size_t group, size_t from, size_t to,
                      struct scratch s) {
    const struct attention *a = c->attention;
    size_t dim = (size_t)a->head_dim, depth = c->depth;
    size_t end = (size_t)tile.chunk->start + tile.first + tile.tokens;
    const char *rows[SIDE];
    for (size_t first = from / SIDE * SIDE; first < to; first += SIDE) {
        for (size_t i = first + AHEAD; i < first + AHEAD + SIDE && i < end; i++) fetch_position(a, tile, i);
        for (size_t i = 0; i < SIDE; i++) { /* around them any will do: nobody looks at the scores */
            size_t position = first + i < from ? from : first + i < to ? first + i : to - 1;
            rows[i] = position_at(a, tile, position);
            if (position != first + i) continue;
            float *value = s.values + (position - group) * BLOCK;
            vf low, high;
            for (size_t d = 0; d < depth; d += BLOCK, value += KEYS * BLOCK) {
                const char *part = rows[i] + a->half_bytes + d * element_bytes(type);
                if (d + BLOCK <= dim)
                    widen(type, part, &low, &high);
                else
                    widen_rest(type, part, dim - d, &low, &high);
                store(value, low);
                store(value + LANES, high);
            }
        }
        size_t column = first - group;
        turn_rows(type, rows, dim, s.keys + column / BLOCK * BLOCK * depth + column % BLOCK);
    }
}

/* Turns scores `low` up to `high` of a row into weights relative to its largest score so far, and those around them, in
 * whole vectors, into 0. Returns what its earlier sums have to be multiplied with. */
static float soften_row(float *scores, size_t low, size_t high, size_t from, size_t to, float *largest,
                        float *total) {
    from = from / LANES * LANES;
    for (size_t i = from; i < low; i++) scores[i] = -INFINITY;
    for (size_t i = high; i < to || i % LANES; i++) scores[i] = -INFINITY;
    vf best = splat(-INFINITY), sum = splat(0.0f);
    for (size_t i = from; i < to; i += LANES) best = larger(load(scores + i), best);
    float before = *largest, now = max_lanes(best);
    now = now > before ? now : before;
    for (size_t i = from; i < to; i += LANES) {
        vf score = load(scores + i);
        vf weight = (vf)((vi)exponential(score - now) & (score > -INFINITY));
        store(scores + i, weight);
        sum += weight;
    }
    float scale = now == before ? 1.0f : expf(before - now);
    *largest = now;
    *total = *total * scale + sum_lanes(sum);
    return scale;
}

static size_t first_seen(const struct attention *a, size_t position) {
    size_t window = (size_t)a->window;
    return window && position >= window ? position - window + 1 : 0;
}

/* One strip against one group of keys, whose panels are there. */
static void attend_strip(const struct chunks *c, struct tile tile, size_t strip, size_t group, struct scratch s) {
    const struct attention *a = c->attention;
    size_t shared = (size_t)a->shared, depth = c->depth, rows = tile.tokens * shared, row = strip * STRIP;
    size_t last = row + STRIP < rows ? row + STRIP - 1 : rows - 1;
    size_t start = (size_t)tile.chunk->start + tile.first;
    size_t from = first_seen(a, start + row / shared), to = start + last / shared + 1;
    from = from > group ? from - group : 0;
    to = to < group + KEYS ? (to > group ? to - group : 0) : KEYS;
    if (from >= to) return;
    const float *queries = s.queries + row * depth;
    for (size_t key = from / BLOCK * BLOCK; key < to; key += BLOCK)
        multiply_panel(depth, queries, 1, STRIP, s.keys + key * depth, s.scores + key, KEYS, NULL);
    for (size_t r = 0; r < STRIP; r++) {
        size_t position = start + (row + r) / shared, low = first_seen(a, position), high = position + 1;
        low = low > group ? low - group : 0;
        high = row + r <= last && high > group ? high - group : 0;
        high = high < to ? high : to;
        low = low < from ? from : low;
        if (low >= high) low = high = to; /* sees nothing here: all weights are 0 */
        s.scale[r] = soften_row(s.scores + r * KEYS, low, high, from, to, &s.largest[row + r], &s.total[row + r]);
    }
    for (size_t d = 0; d < depth; d += BLOCK)
        multiply_panel(to - from, s.scores + from, KEYS, 1, s.values + d * KEYS + from * BLOCK,
                       s.mixed + row * depth + d, depth, s.scale);
}

static void give_mixed(const struct chunks *c, struct tile tile, struct scratch s) {
    const struct attention *a = c->attention;
    size_t dim = (size_t)a->head_dim, shared = (size_t)a->shared, heads = (size_t)a->kv_heads * shared;
    for (size_t row = 0; row < tile.tokens * shared; row++) {
        size_t token = (size_t)tile.chunk->first_row + tile.first + row / shared;
        float *to = a->mixed + (token * heads + tile.kv * shared + row % shared) * dim;
        const float *from = s.mixed + row * c->depth;
        for (size_t i = 0; i < dim; i++) to[i] = from[place((int)a->cache_type, i)] / s.total[row];
    }
}

static void attend_tile(const struct chunks *c, struct tile tile, struct scratch s) {
    const struct attention *a = c->attention;
    size_t start = (size_t)tile.chunk->start + tile.first, end = start + tile.tokens, from = first_seen(a, start);
    size_t strips = strips_of(tile.tokens * (size_t)a->shared);
    take_queries(c, tile, s);
    for (size_t group = from / KEYS * KEYS; group < end; group += KEYS) {
        size_t low = from > group ? from : group, high = end < group + KEYS ? end : group + KEYS;
        if (a->cache_type == FLOAT32)
            take_keys(FLOAT32, c, tile, group, low, high, s);
        else if (a->cache_type == BFLOAT16)
            take_keys(BFLOAT16, c, tile, group, low, high, s);
        else
            take_keys(FLOAT16, c, tile, group, low, high, s);
        for (size_t strip = 0; strip < strips; strip++) attend_strip(c, tile, strip, group, s);
    }
    give_mixed(c, tile, s);
}

/* Tiles of one chunk are taken last positions first: they are the longest. */
static void attention_work(void *argument) {
    struct chunks *c = argument;
    const struct attention *a = c->attention;
    struct scratch s = scratch_at(c, c->scratch + (size_t)atomic_fetch_add(&c->next_scratch, 1) * c->scratch_floats);
    size_t per_tile = tokens_of_tile(a), kv_heads = (size_t)a->kv_heads;
    int64_t count = 0, taken = team_take(&c->team, INT64_MAX);
    for (int64_t i = 0; i < a->chunks; i++) {
        size_t tokens = (size_t)a->chunk[i].tokens;
        int64_t tiles = (int64_t)((tokens + per_tile - 1) / per_tile * kv_heads);
        for (; taken < count + tiles; taken = team_take(&c->team, INT64_MAX)) {
            size_t share = (size_t)(count + tiles - 1 - taken), first = share / kv_heads * per_tile;
            size_t left = tokens - first;
            attend_tile(c, (struct tile){&a->chunk[i], share % kv_heads, first, left < per_tile ? left : per_tile}, s);
        }
        count += tiles;
    }
}

#define ROWS_OF_SHARE 16

static void place_row(const struct rows *p, size_t row) {
    size_t dim = (size_t)p->head_dim, queries = (size_t)p->query_heads, kv_heads = (size_t)p->kv_heads;
    float *head = p->heads + row * (queries + 2 * kv_heads) * dim;
    const float *cosine = p->cosine + row * (dim / 2), *sine = p->sine + row * (dim / 2);
    for (size_t i = 0; i < queries + kv_heads; i++, head += dim)
        rotate_head(head, dim, i < queries ? p->query_norm : p->key_norm, p->epsilon, cosine, sine);
    const float *key = head - kv_heads * dim;
    for (int of_pair = 0; of_pair < 2; of_pair++)
        narrow((int)p->cache_type, p->keys + p->position[2 * row + of_pair] * p->position_bytes,
               key + of_pair * kv_heads * dim, kv_heads * dim);
}

static void place_work(void *argument) {
    struct chunks *c = argument;
    const struct rows *p = c->placed;
    int64_t shares = (p->rows + ROWS_OF_SHARE - 1) / ROWS_OF_SHARE;
    for (int64_t i; (i = team_take(&c->team, shares)) >= 0;)
        for (int64_t row = i * ROWS_OF_SHARE; row < p->rows && row < (i + 1) * ROWS_OF_SHARE; row++)
            place_row(p, (size_t)row);
}

/* A team of `threads` threads and what each needs; 0 without memory, and then the next call tries again. */
static int use_threads(struct chunks *c, int threads) {
    if (c->threads == threads) return 1;
    if (c->threads) team_end(&c->team);
    c->threads = 0;
    free(c->scratch);
    free(c->products.own);
    size_t bytes = (size_t)threads * c->scratch_floats * sizeof(float);
    c->scratch = aligned_alloc(64, bytes);
    c->products.own = aligned_alloc(64, (size_t)threads * OWN_FLOATS * sizeof(float));
    if (!c->scratch || !c->products.own) return 0;
    memset(c->scratch, 0, bytes);
    team_start(&c->team, threads);
    c->threads = threads;
    return 1;
}

/* All compute on `threads` threads, the caller's included, and block. They keep nothing of what they are given, and
 * return 0 without memory, with nothing done. */

/* Attends from all chunks in one layer. The pool holds the chunks' own keys already. */
EXPORT int baton_attend(struct chunks *c, const struct attention *attention, int threads) {
    if (!use_threads(c, threads)) return 0;
    c->attention = attention;
    atomic_store(&c->next_scratch, 0);
    team_run(&c->team, attention_work, c);
    return 1;
}

/* Rotates queries and keys in place, and writes keys and values into the pool. */
EXPORT int baton_place_rows(struct chunks *c, const struct rows *rows, int threads) {
    if (!use_threads(c, threads)) return 0;
    c->placed = rows;
    team_run(&c->team, place_work, c);
    return 1;
}

EXPORT int baton_multiply(struct chunks *c, const struct product *product, int threads) {
    if (!use_threads(c, threads) || !room_for_rows(&c->products, product)) return 0;
    multiply_rows(&c->products, product);
    return 1;
}

EXPORT void baton_chunks_destroy(struct chunks *c) {
    if (c->threads) team_end(&c->team);
    free(c->scratch);
    free(c->products.own);
    free(c->products.packed);
    free(c);
}

/* For heads of `head_dim`, of which `shared` query heads share a KV head. NULL without memory. */
EXPORT struct chunks *baton_chunks_create(int64_t head_dim, int64_t shared) {
    struct chunks *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->products.team = &c->team;
    c->depth = padded((size_t)head_dim);
    c->rows = strips_of((size_t)(shared > QUERY_ROWS ? shared : QUERY_ROWS)) * STRIP;
    c->scratch_floats = 2 * (c->rows + KEYS) * c->depth + STRIP * KEYS + 2 * c->rows;
    c->scratch_floats = (c->scratch_floats + 8 * BLOCK + 15) / 16 * 16; /* whole cache lines */
    return c;
}
