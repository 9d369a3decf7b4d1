"""What drafts for a deployment's model: a smaller model with the same words, or a head of stated size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpucalc.errors import Infeasible, InputError
from gpucalc.graph import Graph
from gpucalc.plan.rules import Degrees, model_rules
from gpucalc.plan.serving_layout import PLAIN, Drafter, ServeLayout, ServeRecipe
from gpucalc.plan.weight_formats import as_gguf, weight_format
from gpucalc.spec.engine import EngineSpec
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.serve_run import ServeRun
from gpucalc.units import GIB


def drafter(
    run: ServeRun,
    graph: Graph,
    engine: EngineSpec,
    layout: ServeLayout,
    draft: tuple[ModelSpec, Graph] | None,
    choose: Callable[[str, object, str], None],
) -> Drafter | None:
    """What the run says drafts. Raises InputError for a model that cannot, Infeasible by the layout."""
    if run.draft_head_gib is not None:
        choose("draft_head_gib", run.draft_head_gib, "caches keys and values of one layer like the model's")
        return Drafter("head", "", head_bytes=run.draft_head_gib * GIB)
    if run.draft_model is None:
        return None
    if draft is None:
        raise InputError("needs a description of that model", key="run.draft_model", given=run.draft_model)
    spec, drafting = draft
    _same_words(run, graph, drafting, engine)
    tp = layout.tp
    degrees = Degrees(
        gpus=tp, tp=tp, pp=1, vpp=1, cp=1, ep=1, etp=1, dp=1, micro_batch=1, global_batch=1, seq_len=tp,
        sequence_parallel=False, even_pipeline=False,
    )  # fmt: skip
    broken = model_rules(drafting, degrees)
    if broken:
        raise Infeasible([f"{run.draft_model}, which drafts: {rule}" for rule in broken])
    quant, told = as_gguf(run.quant, spec) if engine.id == "llamacpp" else (None, "")
    weights, why = weight_format(quant, run.dtype, spec, drafting)
    as_model = "as the model" if engine.id == "llamacpp" and run.quant is not None else ""
    choose("draft_model", f"{run.draft_model} in {weights.name}", told or why or as_model or "as published")
    return Drafter(
        run.draft_model,
        spec.hf or spec.label,
        graph=drafting,
        weights=weights,
        rope_positions=max(spec.max_context or 0, run.max_model_len or 0),
    )


def _same_words(run: ServeRun, graph: Graph, drafting: Graph, engine: EngineSpec) -> None:
    """Refuse a model whose tokens are not the model's own."""
    own = graph.head.vocab if graph.head is not None else 0
    other = drafting.head.vocab if drafting.head is not None else 0
    if abs(own - other) <= engine.draft_vocab_difference and other:
        return
    within = f" within {engine.draft_vocab_difference}" if engine.draft_vocab_difference else ""
    raise InputError(
        f"cannot draft: it has {other:,} words, the model {own:,}",
        key="run.draft_model",
        given=run.draft_model,
        legal=f"a model with the same vocabulary{within}, such as a smaller one of its family",
    )


def alone(layout: ServeLayout, recipe: ServeRecipe) -> tuple[Graph, ServeLayout, ServeRecipe] | None:
    """The model that drafts as a deployment of its own: on the same tensor group, whole on each stage's GPU.

    llama.cpp spreads its layers as the model's.
    """
    found = recipe.drafter
    if found is None or found.graph is None or found.weights is None:
        return None
    pp = min(layout.pp, len(found.graph.trunk.layers)) if recipe.engine == "llamacpp" else 1
    own = replace(
        recipe, weights=found.weights, rope_positions=found.rope_positions, rope_factor=1.0, traffic=PLAIN,
        drafter=None,
    )  # fmt: skip
    return found.graph, replace(layout, pp=pp, ep=1), own
