"""Memory of one GPU of a deployment, as its engine divides the card, and what the cache then holds.

Engines that make a pool (vLLM, SGLang, TensorRT-LLM) take what their budget leaves; llama.cpp and
Transformers allocate for the requests at hand. The stage of a pipeline that holds least decides.
"""

from __future__ import annotations

from gpucalc.graph import Graph
from gpucalc.plan.serve_parts import NOTHING_LOGGED, Logged
from gpucalc.plan.serve_pool import Pooled
from gpucalc.plan.serve_static import Static
from gpucalc.plan.serving_layout import ServeLayout, ServeRecipe, ServingMemory
from gpucalc.plan.stages import Stage, stages
from gpucalc.spec.engine import EngineEra
from gpucalc.spec.hardware import Cluster

POOLED = ("vllm", "sglang", "trtllm")


def serving_memory(
    graph: Graph,
    layout: ServeLayout,
    recipe: ServeRecipe,
    engine: EngineEra,
    cluster: Cluster,
    *,
    logged: Logged = NOTHING_LOGGED,
    stage_index: int | None = None,
) -> ServingMemory:
    """The memory of the GPU that decides, and the cache it leaves; of one stage where its index is given."""
    parts = stages(graph, pp=layout.pp, vpp=1)
    if stage_index is not None:
        parts = (parts[stage_index],)
    alike: dict[tuple[object, ...], Stage] = {}
    for stage in parts:
        held = tuple((id(run.block), run.count) for run in stage.layers)
        alike.setdefault((held, stage.first, stage.last), stage)
    kind = Pooled if recipe.engine in POOLED else Static
    found = [kind(graph, stage, layout, recipe, engine, cluster, logged).memory() for stage in alike.values()]
    # The pool is as small as its smallest rank; between equals the one nearer its limit decides.
    return min(found, key=lambda m: (m.refusal is None, m.kv_tokens.value, m.capacity.value - m.needed.value))
