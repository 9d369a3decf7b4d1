"""From a serving run to the layout and recipe it stands for, every choice nobody made with its reason."""

from __future__ import annotations

from collections.abc import Callable

from gpucalc.errors import Infeasible, InputError
from gpucalc.formulas import serving_memory as mem
from gpucalc.graph import Graph, Moe
from gpucalc.plan.answer import Assumption
from gpucalc.plan.rules import Degrees, broken_rules
from gpucalc.plan.serve_draft import drafter
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, Traffic
from gpucalc.plan.weight_formats import DTYPE_BYTES, KV_BYTES, as_gguf, is_gguf, weight_format
from gpucalc.spec.engine import CardSize, EngineEra, EngineSpec, of_size
from gpucalc.spec.figure import Figure
from gpucalc.spec.gpu import GpuSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.version import version_key
from gpucalc.units import GIB

DRAFT_COST = 0.1
UNRELEASED = ("main", "nightly", "latest")  # the newest there is
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
    run: ServeRun,
    spec: ModelSpec,
    graph: Graph,
    engine: EngineSpec,
    cluster: Cluster,
    layout: ServeLayout,
    *,
    draft: tuple[ModelSpec, Graph] | None = None,
) -> tuple[ServeRecipe, EngineEra, tuple[Assumption, ...]]:
    """What the engine is told and what it chooses by itself, and the era of its version."""
    listed: list[Assumption] = []

    def choose(key: str, value: object, why: str) -> None:
        listed.append(Assumption(f"run.{key}", value, why))

    newer = engine.serves_from(spec.architecture, engine.default_version)
    version = run.version or newer or engine.default_version
    if run.version is None and newer is not None:
        choose("version", version, f"the first {engine.name} that knows {spec.architecture}")
    elif run.version is None:
        choose("version", version, f"{engine.name} as measured last; defaults and memory differ by version")
    else:
        _known_version(engine, version, choose)
    era = engine.at(version)
    asked = run.quant or "none"
    unread = engine.unread.get("gguf" if is_gguf(asked) else asked)
    if unread is not None:
        raise InputError(unread, key="run.quant", given=asked, legal="another format, or another framework")
    quant, told = as_gguf(run.quant, spec) if engine.id == "llamacpp" else (run.quant, "")
    weights, why = weight_format(quant, run.dtype, spec, graph)
    why = told or why
    if why:
        choose("quant", weights.name, why)
    for pool in cluster.pools:
        least = era.multiplies(weights.name, pool.gpu.vendor, pool.gpu.compute_capability)
        if least is not None:
            raise InputError(
                f"{engine.name} {version} has no kernels for these weights on {pool.gpu.name}"
                f" (compute capability {pool.gpu.compute_capability})",
                key="run.quant",
                given=weights.name,
                legal=f"on cards of {least} and up",
            )
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
    card = _card(era, cluster)
    seqs = run.max_num_seqs
    if seqs is None:
        by_card = card.max_num_seqs if card is not None else None
        stated = by_card or era.max_num_seqs
        if stated is not None:
            seqs = int(stated.value)
            large = " on cards this large" if by_card is not None else ""
            choose("max_num_seqs", seqs, f"{engine.name}'s default{large}")
        else:
            seqs = max(1, -(-concurrency // layout.caches))
            choose("max_num_seqs", seqs, "one slot for each request in flight")
    batched = run.max_num_batched_tokens
    if batched is None:
        by_card = card.max_num_batched_tokens if card is not None else None
        stated = by_card or era.max_num_batched_tokens
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
        static, why = _static_fraction(era, card, layout, cluster, batched, run=run)
        choose("mem_fraction_static", static, why)
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
        in_use_bytes=(run.memory_in_use_gib or 0.0) * GIB,
        isl=isl,
        osl=osl,
        concurrency=concurrency,
        request_rate=run.request_rate,
        rope_positions=max(spec.max_context or 0, longest),
        rope_factor=spec.rope_linear_factor or 1.0,
        ttft_ms=run.ttft_ms,
        tpot_ms=run.tpot_ms,
        traffic=_traffic(run, layout, choose),
        drafter=drafter(run, graph, engine, layout, draft, choose),
    )
    return recipe, era, tuple(listed)


def _known_version(engine: EngineSpec, version: str, choose: Callable[[str, object, str], None]) -> None:
    """Says where a release is newer than any that was read. Raises InputError for what is no release."""
    given, newest = version_key(version), version_key(engine.newest)
    if given is None and version not in UNRELEASED:
        raise InputError(
            f"is no release of {engine.name}",
            key="run.version",
            given=version,
            legal=f"one such as {engine.default_version}, or {', '.join(UNRELEASED)}",
        )
    if given is None or (newest is not None and given > newest):
        choose("version", version, f"newer than {engine.newest}, the last release read: taken as that one")


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
    if drafts and cost is None and run.draft_model is None:
        cost = DRAFT_COST
        choose("draft_cost", cost, "a draft head or a small model: about a tenth of a pass of the model")
    return Traffic(
        prefix_hit=run.prefix_hit_rate or 0.0,
        drafts=drafts,
        acceptance=run.acceptance_rate or 0.0,
        draft_share=cost or 0.0,
        prefill_replicas=prefill,
    )


def _drafting(era: EngineEra, run: ServeRun) -> Figure | None:
    """What SGLang keeps back for what drafts."""
    if not run.num_speculative_tokens:
        return None
    if run.draft_model is not None and era.reserve_draft_model is not None:
        return era.reserve_draft_model
    return era.reserve_drafting


def _kv_dtype(run: ServeRun) -> str:
    if run.kv_dtype != "auto":
        return run.kv_dtype
    return _KV_NAMES.get(run.framework, run.dtype)


def _card(era: EngineEra, cluster: Cluster) -> CardSize | None:
    """What the engine defaults to on the smallest of the cards."""
    found = [era.card(pool.gpu.id, _reported(pool.gpu)) for pool in cluster.pools]
    return min(found, key=lambda size: size.at_least.si if size is not None else 0.0)


def _reported(gpu: GpuSpec) -> float:
    """Bytes the driver reports, which engines take their defaults from."""
    return gpu.memory_total.si if gpu.memory_total is not None else float(gpu.usable_memory().value)


def _static_fraction(
    era: EngineEra,
    card: CardSize | None,
    layout: ServeLayout,
    cluster: Cluster,
    tokens: int,
    *,
    run: ServeRun,
) -> tuple[float, str]:
    """SGLang's own share for weights and cache, and where it comes from."""
    ranks = layout.engine_gpus  # attention in data parallel ranks is a part of SGLang's tensor group
    base = (card.reserve if card is not None else None) or era.reserve
    if card is not None and card.static_fraction is not None:
        return card.static_fraction.value, "SGLang's default on cards this large"
    if base is None:
        table = era.static_fraction
        assert table is not None
        return of_size(table, ranks).value, "SGLang's default for as many ranks"

    def of(figure: Figure | None) -> float:
        return figure.si if figure is not None else 0.0

    least_tokens = int(era.number("reserve_least_tokens", 0))
    graphs = card.graph_requests if card is not None else None
    captured = int(of_size(graphs, layout.tp * layout.dp).value) if graphs else 0
    apart = layout.dp if layout.dp > 1 else 0
    reserve = mem.static_reserve_bytes(
        base_bytes=base.si + (of(era.reserve_attention_ranks) if apart else 0),
        tokens=max(tokens, least_tokens),
        token_bytes=of(era.reserve_per_token),
        graph_requests=captured,
        graph_request_bytes=of(era.reserve_per_graph_request),
        attention_ranks=apart,
        attention_rank_bytes=of(era.reserve_per_attention_rank),
        ranks=ranks,
        rank_bytes=of((card.reserve_per_rank if card is not None else None) or era.reserve_per_rank),
        least_bytes=of(card.reserve_least if card is not None else None),
        drafting_bytes=of(_drafting(era, run)),
    )
    memory = min(_reported(pool.gpu) for pool in cluster.pools)
    fraction = mem.reserved_static_fraction(memory_bytes=memory, reserve_bytes=reserve)
    why = f"SGLang keeps {reserve / GIB:.1f} GiB of a card this large for activations and graphs"
    return fraction, why
