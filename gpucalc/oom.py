"""An out-of-memory message explained: what was asked for, which tensor has that size, what would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpucalc.catalog import Catalog
from gpucalc.explain import equation_of
from gpucalc.formulas import tensors as size
from gpucalc.jobs import ResolvedJob
from gpucalc.oom_changes import Change, cheapest
from gpucalc.oom_held import too_much
from gpucalc.oom_message import Amount, Message, read_message
from gpucalc.oom_tensors import Tensor, tensors
from gpucalc.plan.answer import Level, Plan
from gpucalc.plan.evaluate import Subject
from gpucalc.planner import plan_job
from gpucalc.units import GIB, gib

NEAR = 0.02  # sizes within two percent are named as near, not as matching
SMALL = 20 * 2**20  # what torch asks for in place of anything from 1 to 10 MiB
BY_TORCH = ("torch", "deepspeed")
OTHERS = 0.75 * GIB  # more than contexts and libraries take: another program


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor of the job whose size is that of the failed allocation, exactly or nearly."""

    name: str
    phases: tuple[str, ...]
    bytes: float
    exact: bool
    equation: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the message says, which tensor it was about, and what to do."""

    message: Message
    phase: str | None
    reading: tuple[str, ...]
    matches: tuple[Match, ...]
    plan: Plan | None
    changes: tuple[Change, ...]


def diagnose(
    text: str,
    *,
    where: str = "the message",
    job: ResolvedJob | None = None,
    catalog: Catalog | None = None,
) -> Diagnosis:
    """The diagnosis of a message, with the job's own numbers where a job is given. Raises InputError.

    where: what an error calls the text.
    """
    message = read_message(text, where)
    if job is None:
        return Diagnosis(message, message.phase, tuple(_reading(message, None)), (), None, ())
    assert catalog is not None
    subject = Subject.of(job.model, job.draft)
    cluster = catalog.cluster(job.fleet, job.job.system, network=job.job.network)
    plan = plan_job(job, catalog, subject=subject, cluster=cluster, advice=False)
    matches = _matches(message, tensors(subject, plan))
    phase = message.phase or next((p for m in matches if m.exact for p in m.phases), None)
    if phase is None and message.failed and plan.verdict.level is not Level.FITS:
        phase = plan.verdict.phase
    changes = tuple(cheapest(message, job, plan, subject, cluster, catalog)) if message.failed else ()
    named = any(match.exact for match in matches)
    beyond = too_much(message, job, plan, subject, cluster, catalog)
    reading = (*_reading(message, plan, named=named), *beyond)
    return Diagnosis(message, phase, reading, matches, plan, changes)


# -- matching -------------------------------------------------------------------------------------


def _matches(message: Message, known: Iterable[Tensor]) -> tuple[Match, ...]:
    """The tensors of that size, likeliest first; those near it where none is exact."""
    if message.tried is None:
        return ()
    tried, slack = message.tried.bytes, message.tried.slack * 1.001  # a half may be rounded either way
    by_torch = message.engine in BY_TORCH or message.phase == "capture"
    exact: list[tuple[tuple[float, ...], Match]] = []
    near: list[tuple[tuple[float, ...], Match]] = []
    if by_torch and tried <= SMALL + slack:
        return ()
    for tensor in known:
        value = float(tensor.line.value)
        asked = float(size.cuda_request_bytes(tensor_bytes=value)) if by_torch else value
        off = min(abs(asked - tried), abs(value - tried))
        place = 0 if message.phase is None or message.phase in tensor.phases else 1
        match = Match(tensor.name, tensor.phases, value, off <= slack, equation_of(tensor.line))
        if off <= slack:
            exact.append(((tensor.rank >= 4, place, tensor.rank, off), match))
        elif off <= NEAR * tried:
            near.append(((place, off), match))
    chosen = exact or near
    chosen.sort(key=lambda item: item[0])
    named = {match.name: match for _, match in reversed(chosen)}
    ordered = dict.fromkeys(match.name for _, match in chosen)
    return tuple(named[name] for name in ordered)[:4]


# -- words ----------------------------------------------------------------------------------------


def _reading(message: Message, plan: Plan | None, *, named: bool = False) -> Iterator[str]:
    """What the figures say, in sentences."""
    tried, free = message.tried, message.free
    if message.what:
        yield f"{message.engine} was making {message.what}"
    if tried is not None:
        words = f"{_in_words(tried)} was asked for"
        if free is not None:
            words += f" with {_in_words(free)} free"
            words += f" of {_in_words(message.total)}" if message.total else ""
            short = tried.bytes - free.bytes
            words += f": {gib(short)} short" if short > 0 else ": enough in all, but not in one piece"
        yield words
    elif message.allocated is not None and message.total is not None:
        yield f"{_in_words(message.allocated)} was allocated of {_in_words(message.total)}"
        if plan is not None and plan.serves and (weights := plan.memory.find("weights")) is not None:
            yield f"weights are {gib(weights.value)} of it on each GPU"
    if not message.failed:
        used = message.allocated or message.in_use
        assert used is not None
        by = "torch allocates" if used is message.allocated else "in use on the fullest GPU:"
        yield f"{by} {_in_words(used)}" + (f" of {_in_words(message.total)}" if message.total else "")
    if {"weights_gib", "avail_mem_gib"} <= message.facts.keys():
        held, left = message.facts["weights_gib"], message.facts["avail_mem_gib"]
        yield f"{held:.2f} GiB of weights, {left:.2f} GiB free after them"
    yield from _held(message)
    if message.tokens_held is not None and message.tokens_wanted is not None:
        held, wanted = message.tokens_held, message.tokens_wanted
        yield f"the cache holds {held:,} tokens, one request may have {wanted:,}"
    if message.longest is not None:
        yield f"the engine says {message.longest:,} tokens would fit"
    if tried is not None and message.engine in BY_TORCH:
        if tried.bytes <= SMALL:
            yield "torch asks for 20 MiB in place of 1 to 10 MiB: the GPU is full, see what fills it"
        elif not named:
            yield from _otherwise(tried, plan)
    if plan is not None:
        yield _plan_words(plan, failed=message.failed)


def _otherwise(tried: Amount, plan: Plan | None) -> Iterator[str]:
    """What a size would be where no tensor of the job has it."""
    fp32, half = (
        float(size.copied_params(copy_bytes=tried.bytes, element_bytes=element)) / 1e9 for element in (4, 2)
    )
    yield f"as one copy of parameters it would be {fp32:.3g}B in fp32 or {half:.3g}B in 16 bit"
    vocab = None if plan is None else plan.model.find("vocabulary") or plan.model.find("table")
    if plan is None or plan.serves or vocab is None or "vocab" not in vocab.inputs:
        return
    tokens = size.logits_tokens(
        logits_bytes=tried.bytes, vocab=vocab.inputs["vocab"], element_bytes=4, tp=plan.layout.tp
    )
    here = plan.layout.micro_batch * plan.recipe.seq_len // plan.layout.cp
    yield f"as fp32 logits it would be {tokens:,.0f} tokens; the job has {here:,} in a micro-batch"


def _held(message: Message) -> Iterator[str]:
    idle, tried = message.reserved_idle, message.tried
    if idle is not None and tried is not None and idle.bytes >= max(tried.bytes, GIB / 4):
        yield (
            f"{_in_words(idle)} is reserved but unused, more than was asked for: fragmentation;"
            " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins such pieces"
        )
    if message.total is not None and message.free is not None and message.in_use is not None:
        others = message.total.bytes - message.free.bytes - message.in_use.bytes
        if others > OTHERS:
            yield f"{gib(others)} is held by other processes on that GPU"
    if message.engine == "vllm" and message.what and message.what.startswith("the share"):
        assert message.total is not None
        assert message.free is not None
        yield f"{gib(message.total.bytes - message.free.bytes)} is held by other processes on that GPU"
        most = message.free.bytes / message.total.bytes
        yield f"gpu_memory_utilization up to {int(most * 100) / 100:.2f} starts beside them"


def _plan_words(plan: Plan, *, failed: bool) -> str:
    verdict = plan.verdict
    text = (
        f"by the plan the job {verdict.level.verb}: {gib(verdict.needed.value)} of"
        f" {gib(verdict.capacity.value)} at {verdict.phase}, largest part {verdict.binds}"
    )
    if verdict.host_decides and verdict.host is not None:
        capacity = verdict.host.capacity
        has = f" of {gib(capacity.value)}" if capacity is not None else ""
        return f"by the plan the host decides: {gib(verdict.host.needed.value)}{has} at {verdict.host.phase}"
    if verdict.level is Level.FITS and failed:
        text += "; the run differed from the job (length, batch, software) or shared the GPU"
    return text


def _in_words(amount: Amount) -> str:
    return gib(amount.bytes) if amount.bytes >= GIB / 10 else f"{amount.bytes / 2**20:,.1f} MiB"
