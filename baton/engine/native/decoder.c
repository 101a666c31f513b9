/* One decode step of a Llama-family model: a token for each of some sequences, whose keys and values are paged.
 *
 * Every thread of the team runs `step_work`; between two phases they wait for each other, and inside a phase each
 * takes shares of the loop as it gets free. No result depends on who computed it. Activations are float32. Rows of
 * activations lie in the weights' order (simd.h) wherever a product with weights reads them; whoever completes a row
 * for int8 weights also rounds it.
 */
#include "attention.h"
#include "heads.h"
#include "int8.h"
#include "linear.h"
#include "simd.h"
#include "threads.h"

#define EXPORT __attribute__((visibility("default")))
#define ROWS_AT_A_TIME 48 /* activations of so many rows stay in the second-level cache */
#define SHARE_STEP 32     /* outputs: a multiple of every BLOCK */

enum { OK = 0, NO_MEMORY = 1, NO_SUCH_TOKEN = 2 };

/* The four structures below are mirrored by baton.engine.native.library. */
struct layer {
    const float *input_norm, *query_norm, *key_norm, *mlp_norm; /* query_norm and key_norm may be NULL */
    struct linear qkv, output, gate_up, down;
    int64_t window; /* positions that a token sees, its own included; 0 for all */
};

struct model {
    int64_t type, cache_type;
    int64_t vocabulary, hidden, inner, layers, query_heads, kv_heads, head_dim, block_size;
    double norm_epsilon, rope_scale;
    const float *inv_freq, *final_norm;
    const void *embeddings;
    const uint16_t *embedding_scale; /* as in struct linear */
    const struct layer *layer;
    struct linear head;
    char *pool;
};

struct batch {
    int64_t rows, sampled;
    const int32_t *tokens, *positions;
    const int32_t *tables;       /* all rows' block tables, one after another */
    const int32_t *table_starts; /* where each row's begins */
    const int32_t *sampled_rows;
    float *logits; /* [sampled, vocabulary] */
};

struct span {
    int32_t row;
    int32_t from, to; /* keys */
};

/* The work of attention, a span of keys at a time: row r's spans are first[r] up to first[r + 1]. */
struct spans {
    struct span *span;
    int32_t *first;
    int64_t count;
};

struct decoder {
    struct model model;
    struct heads heads;
    struct batch batch;
    struct team team;
    size_t hidden_stride, mixed_stride, inner_stride, qkv_stride; /* floats of a row */
    size_t block_bytes, half_bytes;                               /* of a cache block; of one layer's keys in it */
    int64_t window;                                               /* of the layers that have one */
    struct spans spans[2];                                        /* of the layers without a window, and with it */
    /* Scratch, grown to what steps need. */
    int64_t room_for_rows, room_for_spans;
    float *hidden, *normed, *qkv, *queries, *mixed, *gate_up, *cosine, *sine;
    float *partial; /* [span][span_floats] */
    /* For int8 weights: what the next product reads, rounded, and each row's step. */
    int16_t *rounded;
    float *steps;
    size_t rounded_stride;
};

static void embed(struct decoder *d, int64_t row) {
    const struct model *m = &d->model;
    struct linear table = {m->embeddings, m->embedding_scale, NULL, m->vocabulary, m->hidden};
    table = linear_from((int)m->type, &table, d->batch.tokens[row]);
    size_t bytes = element_bytes((int)m->type), hidden = (size_t)m->hidden, whole = hidden / BLOCK * BLOCK;
    const char *from = table.weight;
    float *to = d->hidden + (size_t)row * d->hidden_stride;
    vf first, second;
    if (m->type == INT8)
        for (size_t i = 0; i < hidden; i++) to[i] = from_bfloat16(table.scale[i / GROUP]) * ((const int8_t *)from)[i];
    for (size_t i = 0; m->type != INT8 && i < d->hidden_stride; i += BLOCK) {
        if (i < whole)
            widen((int)m->type, from + i * bytes, &first, &second);
        else
            widen_rest((int)m->type, from + i * bytes, hidden - i, &first, &second);
        store(to + i, first);
        store(to + i + LANES, second);
    }
    float position = (float)d->batch.positions[row];
    size_t half = (size_t)m->head_dim / 2;
    for (size_t i = 0; i < half; i++) {
        double angle = position * m->inv_freq[i]; /* rounded to float32, as PyTorch does */
        d->cosine[(size_t)row * half + i] = (float)(cos((double)(float)angle) * m->rope_scale);
        d->sine[(size_t)row * half + i] = (float)(sin((double)(float)angle) * m->rope_scale);
    }
}

/* `weight` lies in the weights' order and is padded with zeros, like the rows. */
static void norm_row(const float *x, const float *weight, float *to, size_t stride, size_t count, double epsilon) {
    vf squares = splat(0.0f);
    for (size_t i = 0; i < stride; i += LANES) squares = fused(load(x + i), load(x + i), squares);
    float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)count + (float)epsilon);
    for (size_t i = 0; i < stride; i += LANES) store(to + i, load(x + i) * scale * load(weight + i));
}

/* Called when row `row` of what the next product reads is complete. */
static void complete_row(struct decoder *d, const float *x, int64_t row, int64_t count) {
    if (d->model.type == INT8)
        d->steps[row] = round_row(x, (size_t)count, d->rounded + (size_t)row * d->rounded_stride);
}

static void prepare_heads(struct decoder *d, const struct layer *layer, int64_t index, int64_t row) {
    const struct model *m = &d->model;
    size_t dim = (size_t)m->head_dim, kv_dim = (size_t)m->kv_heads * dim;
    float *head = d->qkv + (size_t)row * d->qkv_stride, scale = 1.0f / sqrtf((float)dim);
    float *query = d->queries + (size_t)row * d->heads.query_heads * d->heads.head_stride;
    const float *cosine = d->cosine + (size_t)row * (dim / 2), *sine = d->sine + (size_t)row * (dim / 2);
    for (int64_t q = 0; q < m->query_heads; q++, head += dim, query += d->heads.head_stride) {
        rotate_head(head, dim, layer->query_norm, m->norm_epsilon, cosine, sine);
        for (size_t i = 0; i < dim; i++) query[place(d->heads.type, i)] = head[i] * scale;
    }
    for (int64_t k = 0; k < m->kv_heads; k++)
        rotate_head(head + (size_t)k * dim, dim, layer->key_norm, m->norm_epsilon, cosine, sine);
    size_t position = (size_t)d->batch.positions[row];
    int32_t block = d->batch.tables[(size_t)d->batch.table_starts[row] + position / d->heads.block_size];
    size_t bytes = kv_dim * element_bytes(d->heads.type);
    char *to = m->pool + (size_t)block * d->block_bytes + (size_t)index * 2 * d->half_bytes +
               position % d->heads.block_size * bytes;
    narrow(d->heads.type, to, head, kv_dim);
    narrow(d->heads.type, to + d->half_bytes, head + kv_dim, kv_dim);
}

static void combine_spans(struct decoder *d, const int32_t *first_span, int64_t row) {
    const struct heads *h = &d->heads;
    size_t floats = span_floats(h);
    float *to = d->mixed + (size_t)row * d->mixed_stride;
    int32_t from = first_span[row], end = first_span[row + 1];
    for (size_t head = 0; head < h->query_heads; head++) {
        float largest = -INFINITY, total = 0.0f, sums[h->head_stride];
        memset(sums, 0, sizeof sums);
        for (int32_t s = from; s < end; s++) {
            float score = d->partial[(size_t)s * floats + head];
            largest = score > largest ? score : largest;
        }
        for (int32_t s = from; s < end; s++) {
            const float *part = d->partial + (size_t)s * floats;
            const float *values = part + 2 * h->query_heads + head * h->head_stride;
            float weight = expf(part[head] - largest);
            total += weight * part[h->query_heads + head];
            for (size_t i = 0; i < h->head_stride; i++) sums[i] += weight * values[i];
        }
        for (size_t i = 0; i < h->head_dim; i++)
            to[place((int)d->model.type, head * h->head_dim + i)] = sums[place(h->type, i)] / total;
    }
    complete_row(d, to, row, (int64_t)(h->query_heads * h->head_dim));
}

/* Outputs of a product that one thread computes at a time: enough shares for an even end, none of them tiny. */
static int64_t share_of(const struct decoder *d, int64_t out) {
    int64_t share = out / (4 * d->team.size);
    share = (share + SHARE_STEP - 1) / SHARE_STEP * SHARE_STEP;
    return share > 256 ? 256 : share < SHARE_STEP ? SHARE_STEP : share;
}

/* Outputs `from` up to `to` for some of the rows of x. */
static void part_of_linear(struct decoder *d, const struct linear *linear, const float *x, size_t x_stride,
                           int64_t first, int rows, int64_t from, int64_t to, struct target target) {
    if (d->model.type == INT8)
        int8_range(linear, d->rounded + (size_t)first * d->rounded_stride, d->rounded_stride, d->steps + first, rows,
                   from, to, target);
    else
        linear_range((int)d->model.type, linear, x + (size_t)first * x_stride, x_stride, rows, from, to, target);
}

static void linear_phase(struct decoder *d, const struct linear *linear, const float *x, size_t x_stride,
                         int64_t rows, struct target target) {
    int64_t share = share_of(d, linear->out), shares = (linear->out + share - 1) / share;
    for (int64_t i; (i = team_take(&d->team, shares)) >= 0;) {
        int64_t from = i * share, to = from + share < linear->out ? from + share : linear->out;
        for (int64_t r = 0; r < rows; r += ROWS_AT_A_TIME) {
            struct target part = target;
            part.y += (size_t)r * target.stride;
            part_of_linear(d, linear, x, x_stride, r, (int)(rows - r < ROWS_AT_A_TIME ? rows - r : ROWS_AT_A_TIME),
                           from, to, part);
        }
    }
    team_wait(&d->team);
}

/* silu(gate) * up into the place of gate. */
static void gate_up_phase(struct decoder *d, const struct layer *layer) {
    const struct model *m = &d->model;
    size_t stride = 2 * d->inner_stride;
    struct linear gate = layer->gate_up, up = linear_from((int)m->type, &layer->gate_up, m->inner);
    gate.out = m->inner;
    int64_t share = share_of(d, m->inner), shares = (m->inner + share - 1) / share;
    for (int64_t i; (i = team_take(&d->team, shares)) >= 0;) {
        int64_t from = i * share, to = from + share < m->inner ? from + share : m->inner;
        for (int64_t r = 0; r < d->batch.rows; r += ROWS_AT_A_TIME) {
            int rows = (int)(d->batch.rows - r < ROWS_AT_A_TIME ? d->batch.rows - r : ROWS_AT_A_TIME);
            float *y = d->gate_up + (size_t)r * stride;
            part_of_linear(d, &gate, d->normed, d->hidden_stride, r, rows, from, to,
                           (struct target){y, stride, 1, 0});
            part_of_linear(d, &up, d->normed, d->hidden_stride, r, rows, from, to,
                           (struct target){y + d->inner_stride, stride, 1, 0});
            for (int row = 0; row < rows; row++, y += stride)
                for (size_t c = (size_t)from; c < padded((size_t)to); c += LANES) {
                    vf g = load(y + c);
                    store(y + c, g / (1.0f + exponential(-g)) * load(y + d->inner_stride + c));
                }
        }
    }
    team_wait(&d->team);
    if (m->type != INT8) return;
    for (int64_t r; (r = team_take(&d->team, d->batch.rows)) >= 0;)
        complete_row(d, d->gate_up + (size_t)r * stride, r, m->inner);
    team_wait(&d->team);
}

/* Normalises row `from` of the hidden states into row `to`. */
static void norm_into(struct decoder *d, int64_t from, const float *weight, int64_t to) {
    float *normed = d->normed + (size_t)to * d->hidden_stride;
    norm_row(d->hidden + (size_t)from * d->hidden_stride, weight, normed, d->hidden_stride, (size_t)d->model.hidden,
             d->model.norm_epsilon);
    complete_row(d, normed, to, d->model.hidden);
}

static void norm_phase(struct decoder *d, const float *weight) {
    for (int64_t r; (r = team_take(&d->team, d->batch.rows)) >= 0;) norm_into(d, r, weight, r);
    team_wait(&d->team);
}

static void attention_phases(struct decoder *d, const struct layer *layer, int64_t index) {
    const struct heads *h = &d->heads;
    const struct spans *spans = &d->spans[layer->window != 0];
    const char *pool = d->model.pool + (size_t)index * 2 * d->half_bytes;
    for (int64_t r; (r = team_take(&d->team, d->batch.rows)) >= 0;) prepare_heads(d, layer, index, r);
    team_wait(&d->team);
    float scores[h->query_heads * SPAN_KEYS];
    for (int64_t i; (i = team_take(&d->team, spans->count)) >= 0;) {
        const struct span *span = &spans->span[i];
        attend_span(h, pool, d->block_bytes, d->half_bytes, d->batch.tables + d->batch.table_starts[span->row],
                    (size_t)span->from, (size_t)span->to,
                    d->queries + (size_t)span->row * h->query_heads * h->head_stride, scores,
                    d->partial + (size_t)i * span_floats(h));
    }
    team_wait(&d->team);
    for (int64_t r; (r = team_take(&d->team, d->batch.rows)) >= 0;) combine_spans(d, spans->first, r);
    team_wait(&d->team);
}

static void step_work(void *argument) {
    struct decoder *d = argument;
    const struct model *m = &d->model;
    const struct target to_hidden = {d->hidden, d->hidden_stride, 1, 1};
    int64_t rows = d->batch.rows;
    for (int64_t r; (r = team_take(&d->team, rows)) >= 0;) embed(d, r);
    team_wait(&d->team);
    for (int64_t index = 0; index < m->layers; index++) {
        const struct layer *layer = &m->layer[index];
        norm_phase(d, layer->input_norm);
        linear_phase(d, &layer->qkv, d->normed, d->hidden_stride, rows, (struct target){d->qkv, d->qkv_stride, 0, 0});
        attention_phases(d, layer, index);
        linear_phase(d, &layer->output, d->mixed, d->mixed_stride, rows, to_hidden);
        norm_phase(d, layer->mlp_norm);
        gate_up_phase(d, layer);
        linear_phase(d, &layer->down, d->gate_up, 2 * d->inner_stride, rows, to_hidden);
    }
    for (int64_t s; (s = team_take(&d->team, d->batch.sampled)) >= 0;)
        norm_into(d, d->batch.sampled_rows[s], m->final_norm, s);
    team_wait(&d->team);
    linear_phase(d, &m->head, d->normed, d->hidden_stride, d->batch.sampled,
                 (struct target){d->batch.logits, (size_t)m->vocabulary, 0, 0});
}

static int64_t first_key(int64_t position, int64_t window) {
    return window && position >= window ? position - window + 1 : 0;
}

static int64_t count_spans(const struct batch *batch, int64_t window) {
    int64_t count = 0;
    for (int64_t r = 0; r < batch->rows; r++)
        count += batch->positions[r] / SPAN_KEYS - first_key(batch->positions[r], window) / SPAN_KEYS + 1;
    return count;
}

static void list_spans(struct spans *spans, const struct batch *batch, int64_t window) {
    spans->count = 0;
    for (int64_t r = 0; r < batch->rows; r++) {
        spans->first[r] = (int32_t)spans->count;
        int64_t end = (int64_t)batch->positions[r] + 1;
        for (int64_t from = first_key(end - 1, window); from < end;) {
            int64_t to = (from / SPAN_KEYS + 1) * SPAN_KEYS;
            to = to < end ? to : end;
            spans->span[spans->count++] = (struct span){(int32_t)r, (int32_t)from, (int32_t)to};
            from = to;
        }
    }
    spans->first[batch->rows] = (int32_t)spans->count;
}

/* Frees `old`; returns room for `count` elements of `size` bytes, zeroed, or NULL. */
static void *renew(void *old, int64_t count, size_t size) {
    free(old);
    size_t bytes = ((size_t)count * size + 63) / 64 * 64;
    void *made = aligned_alloc(64, bytes);
    return made ? memset(made, 0, bytes) : NULL;
}
#define RENEW(array, count, size) (((array) = renew((array), (count), (size))) != NULL)

static int make_room(struct decoder *d, int64_t rows, int64_t spans) {
    size_t queries = d->heads.query_heads * d->heads.head_stride, half = (size_t)d->model.head_dim / 2;
    if (rows > d->room_for_rows) {
        d->room_for_rows = 0;
        if (!(RENEW(d->hidden, rows, d->hidden_stride * 4) && RENEW(d->normed, rows, d->hidden_stride * 4) &&
              RENEW(d->qkv, rows, d->qkv_stride * 4) && RENEW(d->queries, rows, queries * 4) &&
              RENEW(d->mixed, rows, d->mixed_stride * 4) && RENEW(d->gate_up, rows, 2 * d->inner_stride * 4) &&
              RENEW(d->cosine, rows, half * 4) && RENEW(d->sine, rows, half * 4) &&
              (d->model.type != INT8 ||
               (RENEW(d->rounded, rows, d->rounded_stride * 2) && RENEW(d->steps, rows, 4))) &&
              RENEW(d->spans[0].first, rows + 1, sizeof(int32_t)) &&
              RENEW(d->spans[1].first, rows + 1, sizeof(int32_t))))
            return 0;
        d->room_for_rows = rows;
    }
    if (spans > d->room_for_spans) {
        d->room_for_spans = 0;
        spans += spans / 4; /* sequences grow at every step */
        if (!(RENEW(d->partial, spans, span_floats(&d->heads) * 4) &&
              RENEW(d->spans[0].span, spans, sizeof(struct span)) &&
              RENEW(d->spans[1].span, spans, sizeof(struct span))))
            return 0;
        d->room_for_spans = spans;
    }
    return 1;
}

/* Runs one step. Blocks. The batch's arrays are not kept. Returns OK, or NO_MEMORY or NO_SUCH_TOKEN with nothing
 * done. Block ids and positions are the caller's to check. */
EXPORT int baton_step(struct decoder *d, const struct batch *batch) {
    for (int64_t r = 0; r < batch->rows; r++)
        if (batch->tokens[r] < 0 || batch->tokens[r] >= d->model.vocabulary) return NO_SUCH_TOKEN;
    /* Without a window a row has the most spans. */
    if (!make_room(d, batch->rows, count_spans(batch, 0))) return NO_MEMORY;
    d->batch = *batch;
    list_spans(&d->spans[0], batch, 0);
    if (d->window) list_spans(&d->spans[1], batch, d->window);
    team_run(&d->team, step_work, d);
    return OK;
}

/* Computes with `threads` threads from the next step on. Not during a step. */
EXPORT void baton_use_threads(struct decoder *d, int threads) {
    team_end(&d->team);
    team_start(&d->team, threads);
}

EXPORT void baton_destroy(struct decoder *d) {
    if (d->team.size) team_end(&d->team);
    void *all[] = {d->hidden, d->normed,  d->qkv,     d->queries, d->mixed,          d->gate_up,        d->cosine,
                   d->sine,   d->partial, d->rounded, d->steps,   d->spans[0].first, d->spans[1].first,
                   d->spans[0].span, d->spans[1].span};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(d);
}

/* A decoder that computes with `threads` threads, the caller's included; NULL without memory. `model` is copied;
 * all that it points to has to stay. */
EXPORT struct decoder *baton_create(const struct model *model, int threads) {
    struct decoder *d = calloc(1, sizeof *d);
    if (!d) return NULL;
    const struct model *m = &d->model;
    d->model = *model;
    size_t head_dim = (size_t)m->head_dim, kv_dim = (size_t)m->kv_heads * head_dim;
    d->heads = (struct heads){(int)m->cache_type, (size_t)m->query_heads, (size_t)m->kv_heads,
                              head_dim,           padded(head_dim),       (size_t)m->block_size};
    d->hidden_stride = padded((size_t)m->hidden);
    d->mixed_stride = padded((size_t)m->query_heads * head_dim);
    d->inner_stride = padded((size_t)m->inner);
    d->qkv_stride = padded((size_t)m->query_heads * head_dim + 2 * kv_dim);
    if (m->type == INT8) {
        size_t widest = d->hidden_stride > d->mixed_stride ? d->hidden_stride : d->mixed_stride;
        d->rounded_stride = grouped(widest > d->inner_stride ? widest : d->inner_stride);
    }
    d->half_bytes = (size_t)m->block_size * kv_dim * element_bytes((int)m->cache_type);
    d->block_bytes = (size_t)m->layers * 2 * d->half_bytes;
    for (int64_t i = 0; i < m->layers; i++)
        if (m->layer[i].window) d->window = m->layer[i].window;
    team_start(&d->team, threads);
    return d;
}

/* Where element `i` of a vector that is multiplied with weights of `type` stands, and how long such vectors are. */
EXPORT int64_t baton_place(int type, int64_t i) { return (int64_t)place(type, (size_t)i); }
EXPORT int64_t baton_padded(int64_t count) { return (int64_t)padded((size_t)count); }
