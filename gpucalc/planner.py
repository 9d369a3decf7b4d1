"""From a resolved job to its plan: opens the cluster, settles what is auto, plans, advises.

The one place where jobs, catalogue, search and advice meet; the command line, `validate` and the
Python API all come through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from gpucalc.accuracy import error_table
from gpucalc.advise import advised
from gpucalc.catalog import Catalog
from gpucalc.catalog_machines import POD_GPUS, PRICE_OF
from gpucalc.economics import economics
from gpucalc.errors import InputError
from gpucalc.jobs import ResolvedJob
from gpucalc.plan.answer import Assumption, Level, Plan
from gpucalc.plan.evaluate import ErrorTable, Subject, Terms, evaluate
from gpucalc.search import best_run, with_chosen
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.train_run import TrainRun

R = TypeVar("R", TrainRun, ServeRun)
# Cards named when a run does not fit: what data centres rent today, by memory.
LARGER_CARDS = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm", "b300-sxm", "mi300x")
NAMED_LARGER = 2
FULL_BISECTION = (
    "a rail-optimised fat tree without a bottleneck, though two tiers of 64-port switches join only"
    f" {POD_GPUS:,} GPUs; Llama 3's had 7:1 above pods of 3,072"
)


def plan_job(
    job: ResolvedJob,
    catalog: Catalog,
    *,
    subject: Subject | None = None,
    cluster: Cluster | None = None,
    errors: ErrorTable | None = None,
    advice: bool = True,
    always_time: bool = False,
) -> Plan:
    """The plan of a job. `subject` and `cluster` may be handed in when many jobs share them."""
    run = job.run
    subject = subject or _subject(job)
    cluster = cluster or catalog.cluster(job.fleet, job.job.system, network=job.job.network)
    errors = errors if errors is not None else error_table(catalog)
    assumptions = tuple(Assumption(d.key, d.value, d.why) for d in job.defaults)
    facts = economics(job.job, catalog, cluster)
    assumptions += _network_assumed(job, cluster)
    if facts.money.usd_per_gpu_hour is not None:  # the published price is not the one taken
        said = tuple(text for text in cluster.assumptions if not text.startswith(PRICE_OF))
        cluster = replace(cluster, price_per_gpu_hour=facts.money.usd_per_gpu_hour, assumptions=said)

    def clusters(card: str, count: int) -> Cluster:
        return catalog.cluster([(None, count, card)])

    terms = Terms(
        name=job.name,
        fleet=str(job.fleet),
        notes=job.notes,
        errors=errors,
        always_time=always_time,
        economics=facts,
    )
    if not isinstance(run, TrainRun):
        run, assumptions = _runnable(run, "dtype", assumptions, cluster)
        terms = replace(terms, assumptions=assumptions)
        if subject.graph.network is not None and not subject.graph.stacks:
            from gpucalc.plan.serve_network import evaluate_network  # plans of language models do without

            return evaluate_network(subject, run, cluster, terms)
        from gpucalc.search_serving import plan_serving  # training plans do without
        from gpucalc.spec.engine import EngineSpec

        engine = catalog.load("engines", run.framework, EngineSpec)
        plan = plan_serving(subject, run, cluster, engine, terms, loads=advice)
        if not advice:
            return plan
        from gpucalc.advise_serving import advised_serving, wanting

        return advised_serving(
            plan,
            subject,
            run,
            cluster,
            engine,
            clusters=clusters,
            larger=_larger(catalog, cluster) if wanting(plan) else (),
            errors=errors,
        )
    run, assumptions = _runnable(run, "precision", assumptions, cluster)
    settled, chosen = best_run(subject, run, cluster, errors)
    terms = replace(terms, assumptions=with_chosen(assumptions, chosen))
    plan = evaluate(subject, settled, cluster, terms)
    if not advice:
        return plan
    if len({pool.gpu.id for pool in cluster.pools}) > 1:
        from gpucalc.mixed import peak_note, splits  # fleets of one kind do without

        ways = splits(
            plan,
            subject,
            settled,
            cluster,
            clusters=clusters,
            errors=errors,
            unstated={item.key for item in assumptions},
        )
        shares = peak_note(subject, settled, cluster)
        plan = replace(plan, splits=ways, notes=(*plan.notes, *shares))
    return advised(
        plan,
        subject,
        settled,
        cluster,
        clusters=clusters,
        larger=_larger(catalog, cluster) if plan.verdict.level is not Level.FITS else (),
        errors=errors,
    )


def plan_together(
    job: ResolvedJob, catalog: Catalog, *, subject: Subject, cluster: Cluster, errors: ErrorTable
) -> Plan:
    """The plan of a training run in the best way that uses all the unlike cards of a cluster.

    Raises Infeasible or InputError where there is none.
    """
    from gpucalc.mixed import shared_way, way_plan  # fleets of one kind do without

    assert isinstance(job.run, TrainRun)
    assumptions = tuple(Assumption(d.key, d.value, d.why) for d in job.defaults)
    run, assumptions = _runnable(job.run, "precision", assumptions, cluster)
    unstated = {item.key for item in assumptions}
    if run.micro_batch == "auto":
        unstated.add("run.micro_batch")
        run = run.model_copy(update={"micro_batch": 1})
    # Of the equal layout only what no batch decides is kept: the ways divide the batch themselves.
    bare = run.model_copy(update={"global_batch": None, "grad_accum": 1})
    settled, chosen = best_run(subject, bare, cluster, errors)
    said = with_chosen(assumptions, chosen)
    terms = Terms(job.name, str(job.fleet), assumptions=said, notes=job.notes, errors=errors)
    plan = evaluate(subject, settled, cluster, terms)
    settled = settled.model_copy(update={"global_batch": run.global_batch, "grad_accum": run.grad_accum})
    batch = run.global_batch if isinstance(run.global_batch, int) else plan.layout.global_batch
    way = shared_way(batch, subject, settled, cluster, errors=errors, unstated=unstated)
    facts = economics(job.job, catalog, cluster)
    return way_plan(plan, way, subject, settled, cluster, errors=errors, facts=facts)


def _subject(job: ResolvedJob) -> Subject:
    """The model's graph and counts. Raises UnsupportedModel or InputError, of the file the model is from."""
    try:
        return Subject.of(job.model, job.draft)
    except InputError as error:
        raise error.at(job.model_where) from None


def _network_assumed(job: ResolvedJob, cluster: Cluster) -> tuple[Assumption, ...]:
    """What nobody said of the network of a fleet too large for the simplest one."""
    network = job.job.network
    if network is not None and network.oversubscription is not None:
        pods = "GPUs that two tiers of 64-port switches join"
        return (Assumption("network.pod_gpus", POD_GPUS, pods),) if network.pod_gpus is None else ()
    return (Assumption("network.oversubscription", 1, FULL_BISECTION),) if cluster.count > POD_GPUS else ()


def _runnable(
    run: R, key: str, assumptions: tuple[Assumption, ...], cluster: Cluster
) -> tuple[R, tuple[Assumption, ...]]:
    """fp16 in place of a bf16 nobody asked for under this key, where a GPU has no bf16 rate."""
    lacking = next((pool.gpu for pool in cluster.pools if pool.gpu.peak("bf16") is None), None)
    if lacking is None or not any(item.key == f"run.{key}" for item in assumptions):
        return run, assumptions
    chosen = next((p for p in ("fp16", "fp32") if all(pool.gpu.peak(p) for pool in cluster.pools)), None)
    if chosen is None:
        return run, assumptions
    said = Assumption(f"run.{key}", chosen, f"{lacking.name} has no bf16 rate")
    others: tuple[Assumption, ...] = tuple(item for item in assumptions if item.key != f"run.{key}")
    return run.model_copy(update={key: chosen}), (said, *others)


def _larger(catalog: Catalog, cluster: Cluster) -> tuple[str, ...]:
    """Cards with more memory than the fleet's smallest, the next sizes up."""
    own = min(pool.gpu.usable_memory().value for pool in cluster.pools)
    named: list[str] = []
    last = own
    for card in LARGER_CARDS:
        gpu, _ = catalog.gpu(card)
        memory = gpu.usable_memory().value
        if memory > 1.2 * last:
            named.append(card)
            last = memory
    return tuple(named[:NAMED_LARGER])


def provenance(job: ResolvedJob, catalog: Catalog) -> Mapping[str, Any]:
    """Which files, in which revision, the answer came from."""
    from gpucalc import __version__

    return {
        "gpucalc_version": __version__,
        "job": job.where,
        "model": job.model_where,
        "catalogue": [str(root) for root in catalog.roots],
        "revisions": catalog.used(),
    }
