"""From a serving run to the layout and recipe it stands for, every choice nobody made with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable

from gpucalc.errors import Infeasible, InputError
from gpucalc.graph import Graph, Moe
from gpucalc.plan.answer import Assumption
from gpucalc.plan.rules import Degrees, broken_rules
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, Traffic
from gpucalc.plan.weight_formats import DTYPE_BYTES, KV_BYTES, weight_format
from gpucalc.spec.engine import EngineEra, EngineSpec
from gpucalc.spec.figure import Figure
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.job import ServeRun
from gpucalc.spec.model import ModelSpec
from gpucalc.units import GIB

LARGE_CARD = 70 * GIB  # from here on vLLM batches more, A100 aside
DRAFT_COST = 0.1
BY_LAYERS = ("llamacpp", "hf")  # several GPUs hold a run of layers each
_KV_NAMES = {"llamacpp": "fp16"}


def has_experts(graph: Graph) -> bool:
    """Whether the model routes tokens to experts."""
    return any(isinstance(block.ffn, Moe) for stack in graph.stacks for block in stack.blocks)


def serve_layout(run: ServeRun, graph: Graph, *, gpus: int) -> tuple[ServeLayout, tuple[Assumption, ...]]:
    """The layout of a run whose degrees are all numbers. Raises Infeasible with every broken rule."""
    tp, pp, dp, ep = (int(getattr(run, key)) for key in ("tp", "pp", "dp", "ep"))
    rules: list[str] = []
    listed: list[Assumption] = []
    dcp = run.decode_context_parallel
    each = tp * pp * dp
    if each > gpus:
        rules.append(f"tp {tp} x pp {pp} x dp {dp} = {each}, but there are {gpus} GPUs")
    elif gpus % each:
        rules.append(f"{gpus} GPUs cannot be divided into engines of tp {tp} x pp {pp} x dp {dp} = {each}")
    experts = has_experts(graph)
    if ep > 1 and experts and run.framework == "vllm" and ep != tp * dp:
        rules.append(f"vLLM spreads experts over all tp x dp = {tp * dp} ranks (legal ep: 1, {tp * dp})")
    elif ep > 1 and experts and (tp * dp) % ep:
        rules.append(f"ep {ep} does not divide tp x dp = {tp * dp}")
    if tp % dcp:
        rules.append(f"decode_context_parallel {dcp} does not divide tp {tp}")
    slices = max(tp * dp // ep, 1) if experts else 1
    degrees = Degrees(
        gpus=each, tp=tp, pp=pp, vpp=1, cp=1, ep=ep, etp=slices, dp=dp, micro_batch=1, global_batch=dp,
        seq_len=tp, sequence_parallel=False, even_pipeline=False,
    )  # fmt: skip
    rules += [rule for rule in broken_rules(graph, degrees) if rule not in rules]
    if rules:
        raise Infeasible(rules)
    replicas = gpus // each
    if not experts and dp > 1:  # nothing is shared among the ranks: whole copies
        replicas, dp = replicas * dp, 1
    if replicas > 1:
        listed.append(
            Assumption(
                "gpus", gpus, f"{replicas} independent copies of {gpus // replicas} GPUs share the requests"
            )
        )
    layout = ServeLayout(
        tp=tp, pp=pp, dp=dp, ep=ep if experts else 1, replicas=replicas, gpus=gpus, decode_context=dcp
    )
    return layout, tuple(listed)


def serve_recipe(
    run: ServeRun, spec: ModelSpec, graph: Graph, engine: EngineSpec, cluster: Cluster, layout: ServeLayout
) -> tuple[ServeRecipe, EngineEra, tuple[Assumption, ...]]:
    """What the engine is told and what it chooses by itself, and the era of its version."""
    listed: list[Assumption] = []

    def choose(key: str, value: object, why: str) -> None:
        listed.append(Assumption(f"run.{key}", value, why))

    version = run.version or engine.default_version
    if run.version is None:
        choose("version", version, f"{engine.name} as measured last; defaults and memory differ by version")
    era = engine.at(version)
    weights, why = weight_format(run.quant, run.dtype, spec, graph)
    if why:
        choose("quant", weights.name, why)
    kv_dtype = _kv_dtype(run)
    longest = run.max_model_len or min(8192, spec.max_context or 8192)
    isl, osl = run.isl or 1024, run.osl or 256
    if isl + osl > longest + 1 and engine.id != "hf":  # the last token enters no cache
        raise InputError(
            f"a request of isl {isl} + osl {osl} tokens is longer than max_model_len {longest}",
            key="run.isl",
            given=isl,
            legal=f"at most {longest - osl} with this osl" if longest > osl else f"osl below {longest}",
        )
    concurrency = run.concurrency or (1 if engine.id in BY_LAYERS else 16)
    large = _large(cluster) and era.max_num_seqs_large is not None
    seqs = run.max_num_seqs
    if seqs is None:
        stated = era.max_num_seqs_large if large else era.max_num_seqs
        if stated is not None:
            seqs = int(stated.value)
            choose("max_num_seqs", seqs, f"{engine.name}'s default{' on cards this large' if large else ''}")
        else:
            seqs = max(1, -(-concurrency // layout.caches))
            choose("max_num_seqs", seqs, "one slot for each request in flight")
    batched = run.max_num_batched_tokens
    if batched is None:
        wide = era.max_num_batched_tokens_large
        stated = wide if wide is not None and _large(cluster) else era.max_num_batched_tokens
        batched = int(stated.value) if stated is not None else isl
        if stated is not None:
            choose("max_num_batched_tokens", batched, f"{engine.name}'s default on this card")
    block = run.block_size
    if block is None:
        block = int(era.block_size.value) if era.block_size is not None else 1
    utilization, static = run.gpu_memory_utilization, run.mem_fraction_static
    if utilization is None and era.memory_fraction is not None:
        utilization = era.memory_fraction.value
        choose("gpu_memory_utilization", utilization, f"{engine.name}'s own default")
    if engine.id == "sglang" and static is None:
        static = _static_fraction(era, layout.tp * layout.pp)
        choose("mem_fraction_static", static, "SGLang's default for as many ranks")
    recipe = ServeRecipe(
        engine=engine.id,
        version=version,
        weights=weights,
        dtype=run.dtype,
        dtype_bytes=DTYPE_BYTES[run.dtype],
        kv_dtype=kv_dtype,
        kv_bytes=KV_BYTES[kv_dtype],
        max_model_len=longest,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        block_size=block,
        gpu_memory_utilization=utilization,
        mem_fraction_static=static,
        enforce_eager=run.enforce_eager,
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        rope_positions=max(spec.max_context or 0, longest),
        rope_factor=spec.rope_linear_factor or 1.0,
        ttft_ms=run.ttft_ms,
        tpot_ms=run.tpot_ms,
        traffic=_traffic(run, layout, choose),
    )
    return recipe, era, tuple(listed)


def _traffic(run: ServeRun, layout: ServeLayout, choose: Callable[[str, object, str], None]) -> Traffic:
    """What shortens prompts and passes. Raises InputError where no copy is left to decode."""
    prefill = run.prefill_replicas or 0
    if prefill >= layout.replicas and prefill:
        raise InputError(
            "no copy of the engine is left to decode",
            key="run.prefill_replicas",
            given=prefill,
            legal=f"below {layout.replicas}, the copies there are"
            if layout.replicas > 1
            else "several copies",
        )
    drafts = run.num_speculative_tokens or 0
    cost = run.draft_cost
    if drafts and cost is None:
        cost = DRAFT_COST
        choose("draft_cost", cost, "a draft head or a small model: about a tenth of a pass of the model")
    return Traffic(
        prefix_hit=run.prefix_hit_rate or 0.0,
        drafts=drafts,
        acceptance=run.acceptance_rate or 0.0,
        draft_share=cost or 0.0,
        prefill_replicas=prefill,
    )


def _kv_dtype(run: ServeRun) -> str:
    if run.kv_dtype != "auto":
        return run.kv_dtype
    return _KV_NAMES.get(run.framework, run.dtype)


def _large(cluster: Cluster) -> bool:
    """Whether vLLM takes the cards for the kind that is given more to do."""
    return all(
        pool.gpu.usable_memory().value >= LARGE_CARD and not re.match("a[18]00", pool.gpu.id)
        for pool in cluster.pools
    )


def _static_fraction(era: EngineEra, ranks: int) -> float:
    table: dict[int, Figure] = era.static_fraction or {}
    below = [size for size in table if size <= ranks]
    return table[max(below)].value if below else 0.88
