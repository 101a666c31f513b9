/* A team of threads that runs one function at a time, with shares of loops taken as each is free.
 *
 * Another process may hold a core at any moment, so a waiting thread spins for a few microseconds and then sleeps.
 */
#ifndef BATON_THREADS_H
#define BATON_THREADS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SPINS 2000

struct team {
    int size; /* threads, the caller's included */
    pthread_t *helpers;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    _Atomic uint32_t phase; /* goes up when all threads have arrived */
    _Atomic int arrived;
    _Atomic int64_t next; /* the next share of the loop that runs */
    int sleepers;         /* under the mutex */
    int ending;           /* read by helpers after the barrier that starts their work */
    void (*work)(void *);
    void *argument;
};

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Returns when every thread of the team has called it. What they wrote before is then seen by all. */
static void team_wait(struct team *team) {
    if (team->size == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    uint32_t phase = atomic_load(&team->phase);
    if (atomic_fetch_add(&team->arrived, 1) == team->size - 1) {
        atomic_store(&team->arrived, 0);
        atomic_store(&team->next, 0);
        pthread_mutex_lock(&team->mutex);
        atomic_store(&team->phase, phase + 1);
        int wake = team->sleepers;
        pthread_mutex_unlock(&team->mutex);
        if (wake) pthread_cond_broadcast(&team->changed);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&team->phase, memory_order_acquire) != phase) return;
        pause_briefly();
    }
    pthread_mutex_lock(&team->mutex);
    team->sleepers++;
    while (atomic_load(&team->phase) == phase) pthread_cond_wait(&team->changed, &team->mutex);
    team->sleepers--;
    pthread_mutex_unlock(&team->mutex);
}

/* The next share of a loop of `count`, or -1. Between two loops every thread calls team_wait. */
static inline int64_t team_take(struct team *team, int64_t count) {
    int64_t share = atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
    return share < count ? share : -1;
}

static void *team_helper(void *argument) {
    struct team *team = argument;
    pthread_mutex_lock(&team->mutex);
    pthread_mutex_unlock(&team->mutex);
    for (;;) {
        team_wait(team);
        if (team->ending) return NULL;
        team->work(team->argument);
        team_wait(team);
    }
}

/* Runs work(argument) on every thread, the caller's included; returns when all are done. */
static void team_run(struct team *team, void (*work)(void *), void *argument) {
    team->work = work;
    team->argument = argument;
    team_wait(team);
    work(argument);
    team_wait(team);
}

static void team_end(struct team *team) {
    if (team->size > 1) {
        team->ending = 1;
        team_wait(team);
        for (int i = 0; i < team->size - 1; i++) pthread_join(team->helpers[i], NULL);
    }
    free(team->helpers);
    pthread_cond_destroy(&team->changed);
    pthread_mutex_destroy(&team->mutex);
}

/* Starts size - 1 helpers, or as many as the system allows. */
static void team_start(struct team *team, int size) {
    memset(team, 0, sizeof *team);
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->changed, NULL);
    team->helpers = calloc((size_t)size, sizeof *team->helpers);
    int started = 0;
    pthread_mutex_lock(&team->mutex); /* holds the helpers back until the size is known */
    while (team->helpers && started < size - 1) {
        if (pthread_create(&team->helpers[started], NULL, team_helper, team)) break;
        started++;
    }
    team->size = started + 1;
    pthread_mutex_unlock(&team->mutex);
}

#endif
