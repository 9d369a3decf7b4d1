"""The tensors a job asks a GPU for, by name and size, to know a failed allocation by.

Sizes are of single allocations, not of sums a plan adds up: a copy of every parameter, logits, the
scores of a layer, a bucket, the cache. Lines of the plan follow, for what is allocated as one pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpucalc.formulas import tensors as size
from gpucalc.graph import Attention, Graph, Linear, Mlp, Moe
from gpucalc.line import Line, compute
from gpucalc.plan.answer import Plan
from gpucalc.plan.evaluate import Subject
from gpucalc.plan.stages import block_linears, held_stages

DEEPSPEED_BUCKET = 5e8  # elements, unless the configuration says otherwise
TYPES = ((4, "fp32"), (2, "16 bit"))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor by what it is, the phase it is made in, its rank among equals, and its size."""

    name: str
    phases: tuple[str, ...]
    rank: int  # lower is likelier where sizes agree
    line: Line


def tensors(subject: Subject, plan: Plan) -> Iterator[Tensor]:
    """Every tensor of the job that could be the one that failed."""
    if plan.serves:
        yield from _served(subject, plan)
    else:
        yield from _copies(subject, plan)
        yield from _logits(subject.graph, plan)
        yield from _tables(subject.graph, plan)
        yield from _layers(subject.graph, plan)
        yield from _activations(subject.graph, plan)
        yield from _buckets(plan)
    yield from _pools(plan)


def _copies(subject: Subject, plan: Plan) -> Iterator[Tensor]:
    """4N and 2N, whole and divided; of what is trained alone where that is less."""
    layout = plan.layout
    split = held_stages(subject.graph, layout)
    stage = split[plan.verdict.stage].params.total
    held = {"every parameter": float(subject.counts.total.value)}
    if layout.pp > 1:
        held["every parameter of the stage"] = float(stage)
    shares = {1: ""}
    if layout.tp > 1:
        shares[layout.tp] = f" / tp {layout.tp}"
    if layout.shard > 1:
        shares |= {ranks: f" / {ranks} ranks" for ranks in (layout.shard, layout.tp * layout.shard)}
    for what, params in held.items():
        for ranks, words in shares.items():
            for element, kind in TYPES:
                if ranks > 1 and "ranks" in words:
                    phases: tuple[str, ...] = ("init", "step") if element == 4 else ("init", "backward")
                else:
                    phases = ("load", "init", "step") if element == 4 else ("load", "backward")
                name = f"a copy of {what} in {kind} ({element}N{words})"
                line = compute(
                    "copy", size.parameter_copy_bytes, params=params, element_bytes=element, ranks=ranks
                )
                yield Tensor(name, phases, 0, line)


def _tokens(plan: Plan) -> float:
    return float(plan.layout.micro_batch * plan.recipe.seq_len / plan.layout.cp)


def _logits(graph: Graph, plan: Plan) -> Iterator[Tensor]:
    if graph.head is None or not graph.head.vocab or not plan.recipe.seq_len:
        return
    layout, sequences = plan.layout, plan.layout.micro_batch
    counts = {"": _tokens(plan), ", last token dropped": sequences * (plan.recipe.seq_len / layout.cp - 1)}
    for words, tokens in counts.items():
        for element, kind, line in _logit_lines(graph.head.vocab, tokens, layout.tp):
            name = f"logits in {kind} (tokens x vocabulary x {element}{words})"
            yield Tensor(name, ("loss", "backward"), 1 if words else 0, line)


def _logit_lines(vocab: int, tokens: float, tp: int) -> Iterator[tuple[int, str, Line]]:
    """Logits of so many tokens in each type: its bytes, its name and the tensor's size."""
    for element, kind in TYPES:
        line = compute(
            "logits", size.logits_tensor_bytes, tokens=tokens, vocab=vocab, element_bytes=element, tp=tp
        )
        yield element, kind, line


def _tables(graph: Graph, plan: Plan) -> Iterator[Tensor]:
    if graph.embedding is None:
        return
    layout = plan.layout
    for ranks in dict.fromkeys((1, layout.tp, layout.shard)):
        for element, kind in TYPES:
            line = compute(
                "table",
                size.matrix_tensor_bytes,
                rows=graph.embedding.vocab,
                columns=graph.embedding.width,
                copies=1,
                element_bytes=element,
                ranks=ranks,
            )
            share = f" / {ranks} ranks" if ranks > 1 else ""
            name = f"a vocabulary table in {kind}, or its gradient (vocabulary x hidden x {element}{share})"
            yield Tensor(name, ("load", "forward", "backward", "step"), 1, line)


def _layers(graph: Graph, plan: Plan) -> Iterator[Tensor]:
    """A whole layer gathered or reduced as one, and each matrix."""
    layout = plan.layout
    gathered = layout.zero_stage >= 3
    held = held_stages(graph, layout)
    for stage in held[plan.verdict.stage : plan.verdict.stage + 1]:
        for run in stage.layers:
            for element, kind in TYPES:
                for ranks in dict.fromkeys((layout.tp, layout.tp * layout.shard)):
                    line = compute(
                        "layer",
                        size.parameter_copy_bytes,
                        params=run.params.total,
                        element_bytes=element,
                        ranks=ranks,
                    )
                    share = f" / {ranks} ranks" if ranks > 1 else ""
                    name = f"one layer's parameters or gradients in {kind} ({run.block.name}{share})"
                    yield Tensor(name, ("forward", "backward"), 1 if gathered else 3, line)
            for linear in block_linears(run.block):
                for element, kind in TYPES:
                    for ranks in dict.fromkeys((layout.tp, layout.tp * layout.shard)):
                        line = _matrix(linear, element, ranks)
                        share = f" / {ranks} ranks" if ranks > 1 else ""
                        name = f"the matrix {linear.name} in {kind}, or its gradient{share}"
                        yield Tensor(name, ("load", "forward", "backward", "step"), 2, line)


def _matrix(linear: Linear, element: float, ranks: int) -> Line:
    """The weights of a product, or their gradient, over so many ranks."""
    return compute(
        linear.name,
        size.matrix_tensor_bytes,
        rows=linear.inputs,
        columns=linear.outputs,
        copies=linear.copies,
        element_bytes=element,
        ranks=ranks,
    )


def _activations(graph: Graph, plan: Plan) -> Iterator[Tensor]:
    layout, recipe = plan.layout, plan.recipe
    if not graph.stacks or not recipe.seq_len:
        return
    tokens = _tokens(plan)
    seen: set[str] = set()
    for block in graph.trunk.blocks:
        mixer, ffn = block.mixer, block.ffn
        if isinstance(mixer, Attention) and "scores" not in seen:
            seen.add("scores")
            for element, kind in TYPES:
                line = compute(
                    "scores",
                    size.score_tensor_bytes,
                    sequences=layout.micro_batch,
                    heads=mixer.heads,
                    tokens=recipe.seq_len / layout.cp,
                    element_bytes=element,
                    tp=layout.tp,
                )
                name = f"attention scores of a layer in {kind} (heads x tokens^2 x {element})"
                rank = 0 if recipe.attention == "eager" else 3
                yield Tensor(name, ("forward", "backward"), rank, line)
        widths = {"hidden": (graph.trunk.hidden, 1)}
        if isinstance(ffn, Mlp):
            widths["feed-forward"] = (ffn.ffn, layout.tp)
            if ffn.gated:
                widths["gate and up"] = (2 * ffn.ffn, layout.tp)
        if isinstance(ffn, Moe):
            widths["routed feed-forward"] = (ffn.expert_ffn * ffn.top_k, layout.tp)
            widths["routed hidden"] = (graph.trunk.hidden * ffn.top_k, 1)
        for what, (width, tp) in widths.items():
            if what in seen:
                continue
            seen.add(what)
            for element, kind in TYPES:
                line = compute(
                    "activation",
                    size.token_tensor_bytes,
                    tokens=tokens,
                    width=width,
                    element_bytes=element,
                    tp=tp,
                )
                name = f"an activation in {kind} (tokens x {what} width x {element})"
                yield Tensor(name, ("forward", "backward"), 2, line)


def _buckets(plan: Plan) -> Iterator[Tensor]:
    if plan.recipe.framework != "deepspeed" or not plan.layout.zero_stage:
        return
    for element, kind in TYPES:
        line = compute("bucket", size.bucket_tensor_bytes, elements=DEEPSPEED_BUCKET, element_bytes=element)
        yield Tensor(f"a DeepSpeed bucket of 5e8 elements in {kind}", ("init", "backward", "step"), 0, line)


def _served(subject: Subject, plan: Plan) -> Iterator[Tensor]:
    """Weights whole and divided, the cache of a request, prompts' logits."""
    layout, recipe, graph = plan.layout, plan.recipe, subject.graph
    params = float(subject.counts.total.value)
    shares = dict.fromkeys((1, layout.tp, layout.tp * layout.pp))
    for ranks in shares:
        for element, kind in TYPES:
            share = f" / {ranks} GPUs" if ranks > 1 else ""
            line = compute(
                "weights", size.parameter_copy_bytes, params=params, element_bytes=element, ranks=ranks
            )
            yield Tensor(f"every parameter in {kind} ({element}N{share})", ("load",), 0, line)
    per_token = None if plan.cache is None else plan.cache.find("kv_bytes_per_token")
    if per_token is not None:
        wanted = {recipe.max_model_len: "max_model_len"}
        if recipe.max_num_seqs > 1:
            wanted[recipe.max_model_len * recipe.max_num_seqs] = "max_model_len x max_num_seqs"
        for tokens, words in wanted.items():
            line = compute("cache", size.request_cache_bytes, tokens=tokens, token_bytes=per_token)
            yield Tensor(f"the cache of {words} tokens", ("cache",), 0, line)
    if graph.head is not None and graph.head.vocab:
        counts = {
            "max_num_seqs": recipe.max_num_seqs,
            "max_num_batched_tokens": recipe.max_num_batched_tokens,
        }
        for words, tokens in counts.items():
            for _, kind, line in _logit_lines(graph.head.vocab, tokens, layout.tp):
                yield Tensor(f"logits of {words} rows in {kind}", ("serve",), 1, line)
    for linear in (linear for block in graph.trunk.blocks for linear in block_linears(block)):
        for element, kind in TYPES:
            line = _matrix(linear, element, layout.tp)
            yield Tensor(f"the matrix {linear.name} in {kind}", ("load",), 2, line)


def _pools(plan: Plan) -> Iterator[Tensor]:
    """Lines of the plan that an engine may allocate as one."""
    groups = [plan.memory] if plan.cache is None else [plan.memory, plan.cache]
    for group in groups:
        for path, line in group.walk():
            if line.unit != "bytes" or path.count(".") < 1 or not line.value:
                continue
            parts = path.split(".")
            phase = parts[2] if parts[1].startswith("stage_") and len(parts) > 2 else ""
            if phase and len(parts) < 5:  # sums of a phase
                continue
            name = parts[-1].replace("_", " ")
            if phase and len(parts) > 5:
                name = f"{parts[4].replace('_', ' ')}, {name}"
            phases = (phase,) if phase else ("cache",) if name in ("kv cache", "pool") else ("load",)
            yield Tensor(f"{name} of the plan", phases, 4, line)
