"""Seconds and rates of many requests: the steady state of a constant number of requests in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gpucalc.errors import InputError
from gpucalc.formulas import compute as f
from gpucalc.formulas import serving_time as g
from gpucalc.graph import Attention, Graph
from gpucalc.line import Kind, Line, compute, total, value_of
from gpucalc.plan.serve_pass import Server
from gpucalc.plan.serve_rates import Load
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, ServingTime, Traffic
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.hardware import Cluster


@dataclass(frozen=True, slots=True)
class _Steady:
    """The steady state of one cache's engine ranks, before it is said in rates of the deployment."""

    running: Line  # requests with room in the cache
    group: float  # of them in one pass: pipeline stages work on groups in turn
    groups: int
    passes: tuple[tuple[Line, float], ...]  # kinds of pass, and how many of each give all a token
    period: Line  # mean time between two tokens of a request
    first: Line  # time to first token once admitted
    prompt: Line  # time to compute one prompt with the engine idle
    starved: bool
    most: Line | None = None  # requests per second that prompts computed elsewhere allow


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts computed together, in one pass or several."""

    chunk: Line  # the mean pass
    tokens: float  # of prompts in it
    time: Line  # of all chunks


def _prompts(server: Server, computed: float, before: float, beside: Load, arriving: float = 1.0) -> _Prompts:
    """Prompts of `computed` tokens beside what decodes, as many in a pass as arrive and have room."""
    room = max(server.at_once - beside.decoded, 1)
    together = min(max(arriving, 1.0), max(room / computed, 1.0))
    tokens = computed * together
    chunks = max(-(-tokens // room), 1)
    earlier = (computed - tokens / chunks) / 2 if computed > room else 0.0
    load = replace(beside, chunk=tokens / chunks, before=before + earlier, prompts=together / chunks)
    chunk = server.forward_pass(load, "chunk")
    if server.drafter is not None:  # it reads the prompt too
        read = server.drafter.forward_pass(replace(load, requests=0.0, tokens=0.0, context=0.0), "draft")
        chunk = total("chunk", (*chunk.children, read), unit="s", kind=chunk.kind)
    time = server.chunked("prompt", chunks, chunk)
    return _Prompts(chunk, tokens / chunks, time)


def _steady(
    server: Server, *, offered: float, isl: int, osl: int, kv_tokens: Any, traffic: Traffic
) -> _Steady:
    speed, recipe, layout = server.speed, server.recipe, server.layout
    held = compute("held", g.held_tokens, isl=isl, osl=osl, reserves=speed.reserves)
    cache = compute("cache", g.cache_requests, kv_tokens=kv_tokens, held=held)
    if cache.value < 1:
        raise InputError(
            "one request does not fit the cache",
            key="isl + osl",
            given=isl + osl,
            legal=f"at most {max(int(value_of(kv_tokens)), 0)} tokens",
        )
    running = compute("running", g.running_requests, offered=offered, cache=cache, limit=recipe.max_num_seqs)
    requests = float(running.value)
    groups = max(min(layout.pp, int(requests)), 1)
    group = requests / groups
    computed = compute("computed", g.computed_tokens, isl=isl, prefix_hit=traffic.prefix_hit)
    before = isl - computed.value
    verified = group * (1 + traffic.drafts)
    decoding = Load(requests=group, context=isl + osl / 2, tokens=verified)
    decode = server.forward_pass(decoding, "decode")
    alone = _prompts(server, computed.value, before, Load()).time
    token = decode
    draft: Line | None = None
    if traffic.drafts:
        if server.drafter is not None:
            draft = server.drafter.forward_pass(replace(decoding, tokens=group), "draft")
        token = _speculated(decode, traffic, draft)
    steady = _Steady(
        running=running,
        group=group,
        groups=groups,
        passes=((decode, 1.0),),
        period=_renamed(token, "tpot"),
        first=_renamed(alone, "ttft"),
        prompt=alone,
        starved=requests < min(offered, recipe.max_num_seqs),
    )
    if traffic.prefill_replicas:
        return _disaggregated(server, steady, isl=isl, traffic=traffic)
    # A request that runs alone has no other's prompt beside it.
    followers = group * (1 - 1 / requests) if requests > 1 else 0.0
    beside = decoding if speed.mixes_prefill else Load()
    prompts = _prompts(server, computed.value, before, beside, arriving=followers * groups / osl)
    passes = compute(
        "chunk_passes",
        g.chunk_passes,
        requests=followers if speed.mixes_prefill else followers * groups,
        computed=computed,
        osl=osl,
        chunk=prompts.tokens,
    )
    if speed.mixes_prefill:
        mixed = _speculated(prompts.chunk, traffic, draft) if traffic.drafts else prompts.chunk
        period = compute("tpot", g.mixed_period_s, decode_s=token, mixed_s=mixed, chunk_passes=passes)
        alone_share = max(1 - passes.value, 0.0)
    else:
        chunk = compute("chunk", f.shared_s, whole_s=prompts.chunk, share=1 / groups)
        period = compute("tpot", g.alternating_period_s, decode_s=token, chunk_s=chunk, chunk_passes=passes)
        alone_share = 1.0
    beside_others = speed.mixes_prefill and requests > 1
    return replace(
        steady,
        passes=((decode, alone_share), (prompts.chunk, float(passes.value))),
        period=replace(period, children=(token,)),
        first=_renamed(prompts.time if beside_others else alone, "ttft"),
    )


def _disaggregated(server: Server, steady: _Steady, *, isl: int, traffic: Traffic) -> _Steady:
    """The steady state of a copy that only decodes: prompts come with their cache from other copies."""
    layout = server.layout
    token_bytes = sum(
        server.stack.count(index) * server.cached(block.mixer, 1.0)[1]
        for index, block in enumerate(server.stack.blocks)
        if isinstance(block.mixer, Attention)
    )
    moved = compute("message", g.cache_transfer_bytes, isl=isl, token_bytes=token_bytes)
    send = server.links.send("cache_transfer", moved, world=layout.gpus)
    return replace(
        steady,
        first=total("ttft", (steady.prompt, send, steady.period), unit="s", kind=Kind.MODELLED),
        most=compute(
            "prompts_per_s",
            g.prompts_per_s,
            caches=traffic.prefill_replicas * layout.dp,
            pp=layout.pp,
            prefill_s=steady.prompt,
        ),
    )


def _renamed(line: Line, name: str) -> Line:
    return replace(line, name=name)


def _speculated(verify: Line, traffic: Traffic, draft: Line | None) -> Line:
    """Time per token. `draft`: a pass of the model that drafts; a share of the model's own where None."""
    accepted = compute("accepted", g.accepted_tokens, acceptance=traffic.acceptance, drafts=traffic.drafts)
    if draft is None:
        draft = compute("draft", f.shared_s, whole_s=verify, share=traffic.draft_share)
    drafting = compute("drafting", f.repeated_s, each_s=draft, times=traffic.drafts)
    return compute(
        verify.name,
        g.speculative_period_s,
        verify_s=verify,
        draft_s=draft,
        drafts=traffic.drafts,
        accepted=accepted,
        children=(total("verify_and_draft", (verify, drafting), unit="s", kind=verify.kind),),
    )


def serving_time(
    graph: Graph,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineSpec,
    cluster: Cluster,
    *,
    concurrency: float | None = None,
    isl: int | None = None,
    osl: int | None = None,
    kv_tokens: Any,
    traffic: Traffic | None = None,
) -> ServingTime:
    """What requests of one kind see when `concurrency` of them are in flight over the whole deployment.

    `kv_tokens` is what one cache holds; requests beyond its room queue.
    Raises InputError where one request does not fit the cache or a rate is not known.
    """
    server = Server(graph, layout, recipe, engine, cluster)
    return served(server, concurrency, isl, osl, kv_tokens, traffic or recipe.traffic)


def served(
    server: Server,
    concurrency: float | None,
    isl: int | None,
    osl: int | None,
    kv_tokens: Any,
    traffic: Traffic,
) -> ServingTime:
    layout, recipe = server.layout, server.recipe
    isl = recipe.isl if isl is None else isl
    osl = recipe.osl if osl is None else osl
    load = recipe.concurrency if concurrency is None else concurrency
    caches = layout.decoding_caches(traffic.prefill_replicas)
    # Fewer requests than caches leave some caches idle.
    busy = min(float(load), float(caches))
    steady = _steady(server, offered=load / busy, isl=isl, osl=osl, kv_tokens=kv_tokens, traffic=traffic)
    request = compute("request", g.request_s, first_token_s=steady.first, period_s=steady.period, osl=osl)
    notes = []
    offered, paced = load / busy, False
    each = compute("each", g.output_tokens_per_s, requests=steady.running, osl=osl, request_s=request)
    if steady.most is None:
        queue = compute("queue", g.queue_s, offered=offered, running=steady.running, request_s=request)
    else:
        own = replace(each, name="decoded")
        each = compute("each", g.paced_tokens_per_s, decoded=own, prompts=steady.most, caches=busy, osl=osl)
        paced = each.value < own.value
        if paced:
            notes.append("the copies that compute prompts set the pace; those that decode wait for them")
        leaving = compute("leaving", g.requests_per_s, tokens_per_s=each, osl=osl)
        queue = compute("queue", g.paced_queue_s, offered=offered, requests_per_s=leaving, request_s=request)
    output = compute("output_tokens_per_s", g.repeated_rate_tokens_per_s, each_tokens_per_s=each, times=busy)
    if steady.starved:
        notes.append(
            f"the cache keeps {steady.running.value:,.0f} of {offered:,.0f} requests running;"
            f" a request waits {queue.value:,.1f} s for room"
        )
    return ServingTime(
        prefill_s=steady.first,
        decode_step_s=steady.period,
        output_tokens_per_s=output,
        tokens_per_s_per_gpu=compute(
            "tokens_per_s_per_gpu", f.tokens_per_s_per_gpu, tokens_per_s=output, gpus=layout.gpus
        ),
        tokens_per_s_per_user=compute(
            "tokens_per_s_per_user", g.tokens_per_s_per_user, period_s=steady.period
        ),
        concurrency=int(steady.running.value * busy),
        binds="cache" if steady.starved else "prompts" if paced else binding(steady.passes),
        notes=tuple(notes),
        request_s=request,
        requests_per_s=compute("requests_per_s", g.requests_per_s, tokens_per_s=output, osl=osl),
        queue_s=queue,
        burst_first_token_s=compute(
            "burst_ttft", g.burst_first_token_s, requests=offered, prefill_s=steady.prompt
        ),
    )


def binding(passes: Iterable[tuple[Line, float]]) -> str:
    """What takes most of the passes: compute, memory bandwidth, link or latency."""
    sums = {"compute": 0.0, "memory bandwidth": 0.0, "link": 0.0, "latency": 0.0}
    for line, times in passes:
        for part in line.children:
            if part.name in ("gaps", "launch", "between_passes"):
                sums["latency"] += times * part.value
            elif part.name in ("tensor_parallel", "expert_parallel", "pipeline"):
                sums["link"] += times * part.value
            elif part.name == "products":
                for product in part.children:
                    inner = product.inputs.get("each_s", product)
                    computes = inner.inputs["multiply_s"].value > inner.inputs["read_s"].value
                    sums["compute" if computes else "memory bandwidth"] += times * product.value
            else:
                sums["memory bandwidth"] += times * part.value
    return max(sums, key=sums.__getitem__)
