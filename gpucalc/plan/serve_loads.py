"""Loads side by side: throughput per GPU against speed per user, and the largest load within targets."""

from __future__ import annotations

import math
from typing import Any

from gpucalc.formulas import serving_time as g
from gpucalc.graph import Graph
from gpucalc.plan.serve_pass import Server
from gpucalc.plan.serve_time import served
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, ServingTime, Traffic
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.hardware import Cluster

CLOSE = 1.02  # a load is found when it is at most about so much too large
ROUNDS = 6  # steps towards the load of a rate before it is bracketed
ROWS = 6  # of a table that has room for the job's own load and the largest within its targets


def ladder(most: int, rows: int = ROWS) -> tuple[int, ...]:
    """Doublings from 1 up to `most`, itself included, of which so many are kept, evenly."""
    steps = [*(2**power for power in range((most - 1).bit_length())), most]
    if len(steps) <= rows:
        return tuple(steps)
    return tuple(steps[round(row * (len(steps) - 1) / (rows - 1))] for row in range(rows))


def pareto(
    graph: Graph,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineSpec,
    cluster: Cluster,
    *,
    kv_tokens: Any,
    isl: int | None = None,
    osl: int | None = None,
    rows: int = ROWS,
    traffic: Traffic | None = None,
) -> tuple[ServingTime, ...]:
    """Rates from one request a cache to as many as run at once: throughput per GPU against speed per user."""
    server = Server(graph, layout, recipe, engine, cluster)
    given = traffic or recipe.traffic
    caches = layout.decoding_caches(given.prefill_replicas)
    full = served(server, recipe.max_num_seqs * caches, isl, osl, kv_tokens, given)
    loads = ladder(full.concurrency // caches, rows)
    return tuple(
        full
        if load == recipe.max_num_seqs and full.binds != "cache"
        else served(server, load * caches, isl, osl, kv_tokens, given)
        for load in loads
    )


def at_rate(
    graph: Graph,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineSpec,
    cluster: Cluster,
    *,
    kv_tokens: Any,
    requests_per_s: float,
) -> tuple[ServingTime, ServingTime]:
    """The load at which so many requests a second arrive and leave, and the most that runs at once.

    The same twice where more arrive than ever leave.

    Requests stay the longer the more there are: the load grows until both agree.
    """
    server = Server(graph, layout, recipe, engine, cluster)
    caches = layout.decoding_caches(recipe.traffic.prefill_replicas)

    def at(load: int) -> ServingTime:
        return served(server, load, None, None, kv_tokens, recipe.traffic)

    high = recipe.max_num_seqs * caches
    most = at(high)
    if most.concurrency < high:  # what waits beyond this is not served sooner
        high = max(most.concurrency, 1)
        most = at(high)
    if not keeps_up(most, requests_per_s):
        return most, most
    low, point = 1, at(1)
    for _ in range(ROUNDS):
        if keeps_up(point, requests_per_s):
            return point, most
        assert point.request_s is not None
        wanted = g.requests_in_flight(requests_per_s=requests_per_s, request_s=point.request_s.value)
        low = max(low + 1, min(math.ceil(CLOSE * wanted), high))
        point = at(low)
    while not keeps_up(point, requests_per_s):
        middle = (low + high + 1) // 2
        trial = at(middle)
        if keeps_up(trial, requests_per_s) and middle - low > 1:
            high = middle
            if high <= CLOSE * low:
                return trial, most
        else:
            low, point = middle, trial
    return point, most


def keeps_up(point: ServingTime, requests_per_s: float) -> bool:
    """Whether as many requests leave as arrive."""
    return point.requests_per_s is not None and point.requests_per_s.value >= requests_per_s


def at_targets(
    graph: Graph,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineSpec,
    cluster: Cluster,
    *,
    kv_tokens: Any,
    isl: int | None = None,
    osl: int | None = None,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    traffic: Traffic | None = None,
) -> ServingTime | None:
    """The largest load whose mean time to first token and per token meet the targets, None for no load.

    A load at which requests wait for room, or for the copies that compute prompts, meets none.
    """
    server = Server(graph, layout, recipe, engine, cluster)
    given = traffic or recipe.traffic
    caches = layout.decoding_caches(given.prefill_replicas)

    def meets(load: int) -> ServingTime | None:
        point = served(server, load * caches, isl, osl, kv_tokens, given)
        assert point.queue_s is not None
        first = point.prefill_s.value + point.queue_s.value
        if ttft_ms is not None and first * 1e3 > ttft_ms:
            return None
        if tpot_ms is not None and point.decode_step_s.value * 1e3 > tpot_ms:
            return None
        return point if point.binds not in ("cache", "prompts") else None

    best = meets(1)
    if best is None:
        return None
    low, high = 1, 2
    while high <= recipe.max_num_seqs and (point := meets(high)) is not None:
        best, low, high = point, high, high * 2
    high = min(high, recipe.max_num_seqs + 1)
    while high - low > 1:
        middle = (low + high) // 2
        point = meets(middle)
        if point is None:
            high = middle
        else:
            best, low = point, middle
    return best
