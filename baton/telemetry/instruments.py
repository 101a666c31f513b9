"""The one list of metrics. Times in seconds, as Prometheus wants them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

# Bounds of the GenAI conventions, and above them what a long prompt takes on a small machine.
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 120)
# Finer under 10 ms, where a decode step of a small model lies.
_TOKEN_S = (0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
_HANDOVER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def new_registry() -> CollectorRegistry:
    """A registry of its own with the process's memory, CPU time and open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class GatewayInstruments:
    """What clients experience. `queue_class` is the class a request was put in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_class = ("queue_class",)
        self.time_to_first_token = Histogram(
            "baton_time_to_first_token_seconds",
            "Arrival to first token sent",
            by_class,
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "baton_time_per_output_token_seconds",
            "Mean gap between the tokens of one request",
            by_class,
            buckets=_TOKEN_S,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "baton_inter_token_latency_seconds",
            "Each gap between tokens after the first",
            by_class,
            buckets=_TOKEN_S,
            registry=registry,
        )
        self.e2e_request_latency = Histogram(
            "baton_e2e_request_latency_seconds",
            "Arrival to the end of the request",
            by_class,
            buckets=_REQUEST_S,
            registry=registry,
        )
        self.request_queue_time = Histogram(
            "baton_request_queue_time_seconds",
            "Admission to the grant of a pair of workers",
            by_class,
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.prefill_time = Histogram(
            "baton_prefill_time_seconds",
            "Grant to first token",
            by_class,
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.handover_time = Histogram(
            "baton_handover_time_seconds",
            "First token to the decode worker's ownership of the KV cache",
            buckets=_HANDOVER_S,
            registry=registry,
        )
        self.num_requests_running = Gauge(
            "baton_num_requests_running", "Requests that hold a pair of workers", registry=registry
        )
        self.num_requests_waiting = Gauge(
            "baton_num_requests_waiting", "Requests that wait for a pair of workers", by_class, registry=registry
        )
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens of admitted requests", registry=registry)
        self.generation_tokens = Counter("baton_generation_tokens", "Tokens that were generated", registry=registry)
        self.retries = Counter(
            "baton_retries",
            "Attempts that followed one whose worker was lost, by that worker's role",
            ("role",),
            registry=registry,
        )
        self.requests = Counter(
            "baton_requests",
            "Requests that ended: `stop`, `length`, or the error's reason in lower case",
            ("outcome",),
            registry=registry,
        )


class WorkerInstruments:
    """What a prefill or decode worker does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_requests_running = Gauge(
            "baton_num_requests_running", "Requests that are being computed", registry=registry
        )
        self.num_requests_waiting = Gauge(
            "baton_num_requests_waiting", "Requests that wait inside the worker", registry=registry
        )
        self.engine = Gauge(
            "baton_engine_info",
            "1, by what the engine computes with",
            ("device", "dtype", "quantization", "attention"),
            registry=registry,
        )
        self.kv_cache_usage = Gauge("baton_kv_cache_usage_ratio", "KV blocks in use, of all; 0 to 1", registry=registry)
        self.step_time = Histogram("baton_step_seconds", "One engine step", buckets=_TOKEN_S, registry=registry)
        self.step_tokens = Histogram(
            "baton_step_tokens", "Tokens that one engine step computed", buckets=_STEP_TOKENS, registry=registry
        )
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens that were computed", registry=registry)
        self.prefix_cache_queried_tokens = Counter(
            "baton_prefix_cache_queried_tokens",
            "Prompt tokens whose KV cache was looked for; a prefill worker's",
            registry=registry,
        )
        self.prefix_cache_hit_tokens = Counter(
            "baton_prefix_cache_hit_tokens", "Of those the ones that were found ready", registry=registry
        )
        self.generation_tokens = Counter("baton_generation_tokens", "Tokens that were generated", registry=registry)
        self.handover_time = Histogram(
            "baton_handover_time_seconds",
            "Copy of one KV cache",
            ("transport",),
            buckets=_HANDOVER_S,
            registry=registry,
        )
        self.handover_bytes = Counter(
            "baton_handover_bytes", "Bytes of KV caches taken over", ("transport",), registry=registry
        )
        self.out_of_memory = Counter(
            "baton_out_of_memory", "Requests shed because an allocation failed", registry=registry
        )
        self.preemptions = Counter(
            "baton_preemptions",
            "Sequences that gave way for want of KV blocks: swap or shed",
            ("how",),
            registry=registry,
        )
        self.swapped_blocks = Counter(
            "baton_swapped_blocks",
            "KV blocks copied to the swap space and back: out or in",
            ("way",),
            registry=registry,
        )
        self.num_requests_swapped = Gauge(
            "baton_num_requests_swapped", "Requests whose KV blocks are in the swap space", registry=registry
        )
        self.leases = Counter("baton_leases", "Leases on KV caches that ended", ("outcome",), registry=registry)
