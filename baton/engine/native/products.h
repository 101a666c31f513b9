/* Products of weights, row-major [out, in] as PyTorch keeps them, with the many rows of a prefill step.
 *
 * Weights are widened and turned into panels, a few at a time, which stay in the cache while all rows are multiplied.
 * Rows are packed into strips first; what the layer does to its input (norm, or silu of the gate times up) is done
 * on the way. Each output is one sum in the order of the packed depth, whatever else is in the step. With int8 weights
 * the rows are rounded, and all of it is done on whole numbers (int8_panels.h).
 */
#ifndef BATON_PRODUCTS_H
#define BATON_PRODUCTS_H

#include "int8_panels.h"
#include "linear.h"
#include "panels.h"
#include "threads.h"

#define GROUP_PANELS 6 /* panels of weights that one thread has at a time */
#define DEPTH 320      /* of them at a time: a panel's part stays in the first-level cache. A multiple of every BLOCK
                        */
#define INT8_DEPTH 9   /* the same in groups of int8 weights, at most */
#define MOST_ROWS 384  /* packed at a time: a multiple of every STRIP */

enum { PLAIN = 0, NORMED = 1, GATED = 2 };

/* Mirrored by baton.engine.native.chunks. */
struct product {
    int64_t type, out, in;
    const void *weight;
    const uint16_t *scale; /* as in struct linear */
    const float *bias;     /* or NULL */
    int64_t rows;
    const float *x; /* rows `x_stride` apart: `in` values, or for GATED the gate's and then the up's */
    int64_t x_stride;
    int64_t input;
    const float *norm; /* for NORMED: [in] */
    double epsilon;
    float *y;     /* [rows][out] */
    int64_t adds; /* whether results are added to what `y` holds */
};

struct products {
    struct team *team;
    const struct product *product;
    size_t first, rows; /* of the rows that are packed */
    float *packed;      /* [strip][padded in][STRIP], or for int8 weights int16 [strip][pair][STRIP][2] */
    size_t packed_floats;
    float step[MOST_ROWS]; /* of each packed row, for int8 weights */
    float *own;            /* OWN_FLOATS of each thread */
    _Atomic int next_own;
};

/* A thread's own: panels [GROUP_PANELS][DEPTH][BLOCK], or struct int8_group [GROUP_PANELS][INT8_DEPTH]; and the sums of a
 * group of panels [MOST_ROWS][GROUP_WIDTH], where they are added to something when they are complete. */
#define GROUP_WIDTH (GROUP_PANELS * BLOCK)
#define PANEL_FLOATS (GROUP_WIDTH * DEPTH)
#define OWN_FLOATS (PANEL_FLOATS + MOST_ROWS * GROUP_WIDTH)
_Static_assert(GROUP_PANELS * INT8_DEPTH * sizeof(struct int8_group) <= PANEL_FLOATS * sizeof(float), "room for both");

/* Groups of int8 weights. */
struct int8_part {
    size_t from, to;
};

/* Where the sums of the packed rows go, from some output on. */
struct sums {
    float *y;
    size_t stride;
};

static struct sums sums_at(const struct products *s, size_t out, float *own) {
    const struct product *p = s->product;
    if (p->adds) return (struct sums){own + PANEL_FLOATS, GROUP_WIDTH};
    return (struct sums){p->y + s->first * (size_t)p->out + out, (size_t)p->out};
}

/* Adds a group's complete sums where the product is to be added. */
static void add_sums(const struct products *s, size_t out, struct sums from) {
    const struct product *p = s->product;
    size_t left = (size_t)p->out - out, count = left < GROUP_WIDTH ? left : GROUP_WIDTH;
    float *to = p->y + s->first * (size_t)p->out + out;
    for (size_t row = 0; p->adds && row < s->rows; row++, to += p->out)
        for (size_t i = 0; i < count; i++) to[i] += from.y[row * from.stride + i];
}

/* One row as the weights are multiplied with it, in plain order: [padded in], of which the end is left. */
static void take_row(const struct product *p, const float *x, float *to) {
    size_t in = (size_t)p->in, whole = in / LANES * LANES;
    if (p->input == PLAIN) {
        memcpy(to, x, in * sizeof *to);
    } else if (p->input == NORMED) {
        vf squares = splat(0.0f);
        for (size_t i = 0; i < whole; i += LANES) squares = fused(load(x + i), load(x + i), squares);
        float sum = sum_lanes(squares);
        for (size_t i = whole; i < in; i++) sum += x[i] * x[i];
        float scale = 1.0f / sqrtf(sum / (float)in + (float)p->epsilon);
        for (size_t i = 0; i < in; i++) to[i] = x[i] * scale * p->norm[i];
    } else {
        for (size_t i = 0; i < whole; i += LANES) {
            vf gate = load(x + i);
            store(to + i, gate / (1.0f + exponential(-gate)) * load(x + in + i));
        }
        for (size_t i = whole; i < in; i++) {
            vf gate = splat(x[i]);
            to[i] = (gate / (1.0f + exponential(-gate)))[0] * x[in + i];
        }
    }
}

static void pack_strip(const struct products *s, size_t strip, float *row) {
    const struct product *p = s->product;
    size_t in = (size_t)p->in, depth = padded(in);
    float *to = s->packed + strip * depth * STRIP;
    memset(to + (depth - BLOCK) * STRIP, 0, BLOCK * STRIP * sizeof *to);
    for (size_t r = 0; r < STRIP; r++) {
        size_t at = strip * STRIP + r;
        if (at >= s->rows) {
            for (size_t i = 0; i < depth; i++) to[i * STRIP + r] = 0.0f;
            continue;
        }
        take_row(p, p->x + (s->first + at) * (size_t)p->x_stride, row);
        for (size_t i = 0; i < in; i++) to[i * STRIP + r] = row[i];
    }
}

INLINE size_t int8_groups(const struct product *p) { return grouped((size_t)p->in) / GROUP; }

/* The same for int8 weights: rounded, in pairs. */
static void pack_int8_strip(struct products *s, size_t strip, float *row) {
    const struct product *p = s->product;
    size_t count = int8_groups(p) * GROUP;
    int16_t *to = (int16_t *)s->packed + strip * count * STRIP, rounded[count];
    for (size_t r = 0; r < STRIP; r++) {
        size_t at = strip * STRIP + r;
        memset(rounded, 0, sizeof rounded);
        if (at < s->rows) {
            take_row(p, p->x + (s->first + at) * (size_t)p->x_stride, row);
            s->step[at] = round_row(row, (size_t)p->in, rounded);
        }
        pack_pairs(rounded, count, to, r);
    }
}

/* Outputs from `out` on, elements `from` up to `to` of their weights, as panels of depth to - from, padded. */
INLINE void take_weights(int type, const struct product *p, size_t out, size_t panels, size_t from, size_t to,
                         float *panel) {
    size_t in = (size_t)p->in, bytes = element_bytes(type), depth = padded(to - from), last = (size_t)p->out - 1;
    const char *rows[SIDE];
    for (size_t column = 0; column < panels * BLOCK && out + column <= last; column += SIDE) {
        for (size_t i = 0; i < SIDE; i++) { /* beyond the last any will do */
            size_t row = out + column + i < last ? out + column + i : last;
            rows[i] = (const char *)p->weight + (row * in + from) * bytes;
        }
        turn_rows(type, rows, to - from, panel + column / BLOCK * BLOCK * depth + column % BLOCK);
    }
}

/* One tile: a strip times a panel, for `count` rows. Those at the edges go through a tile of their own. */
static void multiply_tile(const struct product *p, size_t depth, const float *rows, const float *panel, struct sums to,
                          size_t count, size_t out, int first) {
    size_t left = (size_t)p->out - out, columns = left < BLOCK ? left : BLOCK, stride = to.stride;
    float *y = to.y, ones[STRIP], edge[STRIP * BLOCK];
    for (size_t r = 0; r < STRIP; r++) ones[r] = 1.0f;
    int is_whole = columns == BLOCK && count >= STRIP, keeps = !first || p->bias;
    count = count < STRIP ? count : STRIP;
    if (first && p->bias)
        for (size_t r = 0; r < count; r++) memcpy(y + r * stride, p->bias + out, columns * sizeof *y);
    if (is_whole) {
        multiply_panel(depth, rows, 1, STRIP, panel, y, stride, keeps ? ones : NULL);
        return;
    }
    memset(edge, 0, sizeof edge);
    if (keeps)
        for (size_t r = 0; r < count; r++) memcpy(edge + r * BLOCK, y + r * stride, columns * sizeof *y);
    multiply_panel(depth, rows, 1, STRIP, panel, edge, BLOCK, keeps ? ones : NULL);
    for (size_t r = 0; r < count; r++) memcpy(y + r * stride, edge + r * BLOCK, columns * sizeof *y);
}

static void multiply_group(const struct products *s, size_t out, float *panels) {
    const struct product *p = s->product;
    size_t in = (size_t)p->in, whole = padded(in), left = (size_t)p->out - out, strips = (s->rows + STRIP - 1) / STRIP;
    size_t count = left < GROUP_WIDTH ? (left + BLOCK - 1) / BLOCK : GROUP_PANELS;
    struct sums sums = sums_at(s, out, panels);
    for (size_t from = 0; from < in; from += DEPTH) {
        size_t to = in - from < DEPTH ? in : from + DEPTH, depth = padded(to - from);
        if (p->type == FLOAT32)
            take_weights(FLOAT32, p, out, count, from, to, panels);
        else if (p->type == BFLOAT16)
            take_weights(BFLOAT16, p, out, count, from, to, panels);
        else
            take_weights(FLOAT16, p, out, count, from, to, panels);
        for (size_t strip = 0; strip < strips; strip++)
            for (size_t panel = 0; panel < count; panel++) {
                struct sums at = {sums.y + strip * STRIP * sums.stride + panel * BLOCK, sums.stride};
                multiply_tile(p, depth, s->packed + (strip * whole + from) * STRIP, panels + panel * depth * BLOCK, at,
                              s->rows - strip * STRIP, out + panel * BLOCK, from == 0);
            }
    }
    add_sums(s, out, sums);
}

/* The same of int8 weights, in whole groups. */
static void take_int8_weights(const struct product *p, size_t out, size_t panels, size_t from, size_t to,
                              struct int8_group *panel) {
    size_t groups = int8_groups(p), last = (size_t)p->out - 1;
    const char *rows[SIDE];
    for (size_t column = 0; column < panels * BLOCK && out + column <= last; column += SIDE) {
        struct int8_group *at = panel + column / BLOCK * (to - from);
        for (size_t group = from; group < to; group++, at++) {
            for (size_t i = 0; i < SIDE; i++) {
                size_t row = out + column + i < last ? out + column + i : last;
                rows[i] = (const char *)p->weight + (row * groups + group) * GROUP;
                __builtin_prefetch(rows[i] + SIDE * groups * GROUP, 0, 2);
                at->scale[column % BLOCK + i] = from_bfloat16(p->scale[row * groups + group]);
            }
            turn_int8_rows(rows, column % BLOCK, at);
        }
    }
}

/* `columns` of a row; all but the last panel's have a size that the compiler knows. */
INLINE void copy_columns(float *to, const float *from, size_t columns) {
    if (columns == BLOCK)
        memcpy(to, from, BLOCK * sizeof *to);
    else
        memcpy(to, from, columns * sizeof *to);
}

static void multiply_int8_tile(const struct products *s, size_t strip, struct int8_part part, size_t out,
                               const struct int8_group *panel, struct sums to) {
    const struct product *p = s->product;
    size_t left = (size_t)p->out - out, columns = left < BLOCK ? left : BLOCK, row = strip * STRIP;
    size_t count = s->rows - row < STRIP ? s->rows - row : STRIP, groups = int8_groups(p);
    float *y = to.y + row * to.stride;
    float sums[STRIP * BLOCK] __attribute__((aligned(64))) = {0}, bias[BLOCK] = {0};
    if (part.from)
        for (size_t r = 0; r < count; r++) copy_columns(sums + r * BLOCK, y + r * to.stride, columns);
    const int16_t *rows = (const int16_t *)s->packed + (strip * groups + part.from) * GROUP * STRIP;
    multiply_int8_panel(part.to - part.from, rows, panel, sums);
    int is_last = part.to == groups;
    if (is_last && p->bias) copy_columns(bias, p->bias + out, columns);
    for (size_t r = 0; r < count; r++) {
        float *sum = sums + r * BLOCK;
        for (size_t i = 0; is_last && i < BLOCK; i += LANES)
            store(sum + i, load(sum + i) * splat(s->step[row + r]) + load(bias + i));
        copy_columns(y + r * to.stride, sum, columns);
    }
}

static void multiply_int8_group(const struct products *s, size_t out, struct int8_group *panels) {
    const struct product *p = s->product;
    size_t left = (size_t)p->out - out, strips = (s->rows + STRIP - 1) / STRIP, groups = int8_groups(p);
    size_t count = left < GROUP_WIDTH ? (left + BLOCK - 1) / BLOCK : GROUP_PANELS;
    struct sums sums = sums_at(s, out, (float *)panels);
    size_t parts = (groups + INT8_DEPTH - 1) / INT8_DEPTH, depth = (groups + parts - 1) / parts; /* none is tiny */
    for (size_t from = 0; from < groups; from += depth) {
        struct int8_part part = {from, groups - from < depth ? groups : from + depth};
        take_int8_weights(p, out, count, part.from, part.to, panels);
        for (size_t strip = 0; strip < strips; strip++)
            for (size_t panel = 0; panel < count; panel++)
                multiply_int8_tile(s, strip, part, out + panel * BLOCK, panels + panel * (part.to - part.from),
                                   (struct sums){sums.y + panel * BLOCK, sums.stride});
    }
    add_sums(s, out, sums);
}

static void product_work(void *argument) {
    struct products *s = argument;
    const struct product *p = s->product;
    float *panels = s->own + (size_t)atomic_fetch_add(&s->next_own, 1) * OWN_FLOATS;
    int64_t strips = (int64_t)((s->rows + STRIP - 1) / STRIP), width = GROUP_WIDTH;
    float row[padded((size_t)p->in)];
    for (int64_t i; (i = team_take(s->team, strips)) >= 0;)
        if (p->type == INT8)
            pack_int8_strip(s, (size_t)i, row);
        else
            pack_strip(s, (size_t)i, row);
    team_wait(s->team);
    for (int64_t i; (i = team_take(s->team, (p->out + width - 1) / width)) >= 0;)
        if (p->type == INT8)
            multiply_int8_group(s, (size_t)(i * width), (struct int8_group *)panels);
        else
            multiply_group(s, (size_t)(i * width), panels);
}

/* Room to pack the rows of such a product; 0 without memory. */
static int room_for_rows(struct products *s, const struct product *p) {
    size_t rows = (size_t)(p->rows < MOST_ROWS ? p->rows : MOST_ROWS);
    size_t of_row = p->type == INT8 ? int8_groups(p) * GROUP / 2 : padded((size_t)p->in);
    size_t floats = (rows + STRIP - 1) / STRIP * STRIP * of_row;
    if (floats <= s->packed_floats) return 1;
    free(s->packed);
    s->packed = aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
    s->packed_floats = s->packed ? floats : 0;
    return s->packed != NULL;
}

/* The team and its panels are there. */
static void multiply_rows(struct products *s, const struct product *product) {
    s->product = product;
    for (s->first = 0; s->first < (size_t)product->rows; s->first += s->rows) {
        s->rows = (size_t)product->rows - s->first;
        if (s->rows > MOST_ROWS) s->rows = MOST_ROWS;
        atomic_store(&s->next_own, 0);
        team_run(s->team, product_work, s);
    }
}

#endif
