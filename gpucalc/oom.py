"""An out-of-memory message read: what was asked for, which tensor has that size, what would fit.

Messages of torch (with DeepSpeed's and FSDP's tracebacks around it), vLLM, SGLang and llama.cpp
are known by their words. The text is only read: nothing in it is run or looked up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpucalc.advise import advised
from gpucalc.catalog import Catalog
from gpucalc.check import equation_of
from gpucalc.errors import GpucalcError, InputError
from gpucalc.formulas import tensors as size
from gpucalc.jobs import ResolvedJob
from gpucalc.oom_tensors import Tensor, tensors
from gpucalc.plan.answer import Action, Level, Plan
from gpucalc.plan.evaluate import Subject
from gpucalc.planner import LARGER_CARDS, plan_job
from gpucalc.search import best_run
from gpucalc.spec.fleet import FleetSpec
from gpucalc.spec.hardware import Cluster
from gpucalc.spec.job import ServeRun, TrainRun
from gpucalc.units import GIB, gib, parse_bytes

MAX_TEXT = 16 * 2**20
NEAR = 0.02  # sizes within two percent are named as near, not as matching
CHANGES = 3
SMALL = 20 * 2**20  # what torch asks for in place of anything from 1 to 10 MiB
BY_TORCH = ("torch", "deepspeed")
OTHERS = 0.75 * GIB  # more than contexts and libraries take: another program

_SIZE = r"([0-9]+(?:[.,][0-9]+)?)\s*(bytes|[KMGT]i?B)"


@dataclass(frozen=True, slots=True)
class Amount:
    """A size as printed: bytes, and half of the last digit shown."""

    bytes: float
    slack: float


@dataclass(frozen=True, slots=True)
class Message:
    """What a message states. Sizes in bytes; None where it does not say."""

    engine: str  # torch | deepspeed | vllm | sglang | llamacpp | host | nccl
    tried: Amount | None = None
    total: Amount | None = None
    free: Amount | None = None
    allocated: Amount | None = None
    in_use: Amount | None = None
    reserved_idle: Amount | None = None
    what: str | None = None  # what the engine itself says it was making
    phase: str | None = None
    tokens_held: int | None = None  # tokens the cache holds
    tokens_wanted: int | None = None  # of one request
    longest: int | None = None  # what the engine says would fit
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor of the job whose size is that of the failed allocation, exactly or nearly."""

    name: str
    phases: tuple[str, ...]
    bytes: float
    exact: bool
    equation: str


@dataclass(frozen=True, slots=True)
class Change:
    """A change that would fit, found by planning with it."""

    title: str
    changes: Mapping[str, Any]
    level: Level
    needed_bytes: float
    capacity_bytes: float
    tokens_per_s: float | None
    kv_tokens: float | None
    usd_per_hour: float | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the message says, which tensor it was about, and what to do."""

    message: Message
    phase: str | None
    reading: tuple[str, ...]
    matches: tuple[Match, ...]
    plan: Plan | None
    changes: tuple[Change, ...]


def diagnose(text: str, *, job: ResolvedJob | None = None, catalog: Catalog | None = None) -> Diagnosis:
    """The diagnosis of a message, with the job's own numbers where a job is given. Raises InputError."""
    message = read_message(text)
    if job is None:
        return Diagnosis(message, message.phase, tuple(_reading(message, None)), (), None, ())
    assert catalog is not None
    subject = Subject.of(job.model)
    cluster = catalog.cluster(job.fleet, job.job.system, network=job.job.network)
    plan = plan_job(job, catalog, subject=subject, cluster=cluster, advice=False)
    matches = _matches(message, tensors(subject, plan))
    phase = message.phase or next((p for m in matches if m.exact for p in m.phases), None)
    if phase is None and plan.verdict.level is not Level.FITS:
        phase = plan.verdict.phase
    changes = tuple(_cheapest(message, job, plan, subject, cluster, catalog))
    named = any(match.exact for match in matches)
    reading = tuple(_reading(message, plan, named=named))
    return Diagnosis(message, phase, reading, matches, plan, changes)


# -- reading --------------------------------------------------------------------------------------


def read_message(text: str) -> Message:
    """The figures and the place a message states. Raises InputError when it is none that is known."""
    if len(text) > MAX_TEXT:
        raise InputError("is too long for a message", where="oom", legal=f"at most {MAX_TEXT // 2**20} MiB")
    for reader in (_vllm, _sglang, _llamacpp, _torch, _host, _nccl):
        found = reader(text)
        if found is not None:
            return found
    raise InputError(
        "holds no out-of-memory message that is known",
        where="oom",
        legal="a log of torch, DeepSpeed, vLLM, SGLang or llama.cpp with the failing line",
    )


def _torch(text: str) -> Message | None:
    found = list(
        re.finditer(rf"(?:CUDA|HIP|XPU) out of memory\.?\s+Tried to allocate\s+{_SIZE}", text)
    ) or list(re.finditer(rf"Tried to allocate\s+{_SIZE}", text))
    if not found:
        said = re.search(r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA out of memory", text)
        if said is None:
            return None
        return _torch_figures(text, said.start(), None)
    first = found[0]  # later ones are often other ranks, or what failed while handling the first
    return _torch_figures(text, first.start(), _amount(first[1], first[2]))


def _torch_figures(text: str, start: int, tried: Amount | None) -> Message:
    line = text[start : start + 1500]

    def amount(pattern: str) -> Amount | None:
        match = re.search(pattern, line, re.IGNORECASE)
        return _amount(match[1], match[2]) if match else None

    reserved = amount(rf"{_SIZE}\s+reserved in total")
    allocated = amount(rf"{_SIZE}\s+(?:is allocated by PyTorch|already allocated)")
    idle = amount(rf"{_SIZE}\s+is reserved by PyTorch but unallocated")
    if idle is None and reserved is not None and allocated is not None:
        idle = Amount(max(0.0, reserved.bytes - allocated.bytes), reserved.slack + allocated.slack)
    return Message(
        engine=_stack(text),
        tried=tried,
        total=amount(rf"total capac?i?ty of\s+{_SIZE}") or amount(rf"{_SIZE}\s+total capacity"),
        free=amount(rf"of which\s+{_SIZE}\s+is free") or amount(rf"{_SIZE}\s+free"),
        allocated=allocated,
        in_use=amount(rf"this process has\s+{_SIZE}\s+memory in use"),
        reserved_idle=idle,
        phase=_phase(text[:start]),
    )


def _stack(text: str) -> str:
    if re.search(r"deepspeed[/\\.]|DeepSpeed|\bzero[/\\](?:stage|partition)", text):
        return "deepspeed"
    if re.search(r"\bvllm[/\\.]", text):
        return "vllm"
    return "sglang" if re.search(r"\bsglang[/\\.]", text) else "torch"


# The call that was running, innermost first: a step or a backward pass calls everything below it.
_FRAMES = (
    ("init", r"initialize_optimizer_states|single_partition_of_fp32|stage_1_and_2\.py.{0,80}__init__"
             r"|stage3\.py.{0,80}__init__|_create_fp32_partitions|_configure_zero_optimizer"),
    ("step", r"optimizer\.step\(|_multi_tensor_adam|_single_tensor_adam|exp_avg|_foreach_|\badamw?\.py"),
    ("backward", r"loss\.backward\(|\.backward\(|run_backward|reduce_bucket|reduce_ipg|average_tensor"),
    ("loss", r"cross_entropy|log_softmax|nll_loss|logits\.float\(|compute_loss_fn|ForCausalLMLoss"),
    ("load", r"from_pretrained|load_state_dict|load_checkpoint|load_model\b|load_weights|model\.to\("
             r"|Loading checkpoint shards|\.half\(\)|convert\(|_move_model"),
    ("forward", r"\bforward\(|in forward\b|_call_impl"),
)  # fmt: skip


def _phase(text: str) -> str | None:
    """The phase the last traceback of a text was in."""
    last = text[max(0, text.rfind("Traceback")) :]
    return next((phase for phase, pattern in _FRAMES if re.search(pattern, last)), None)


def _vllm(text: str) -> Message | None:
    fraction = re.search(r"gpu_memory_utilization\W{1,4}(?:is\s+)?\(?([01]?\.\d+)", text)
    facts = {"gpu_memory_utilization": float(fraction[1])} if fraction else {}
    # 0.2 to 0.8 printed tokens; later releases print gigabytes and what would fit.
    by_tokens = re.search(
        r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in"
        r" (?:the )?KV cache \((\d+)\)",
        text,
    )
    if by_tokens:
        held, wanted = int(by_tokens[2]), int(by_tokens[1])
        what = "the cache of one request"
        return Message("vllm", what=what, phase="cache", tokens_held=held, tokens_wanted=wanted, facts=facts)
    by_bytes = re.search(
        rf"max seq len \((\d+)\)[,.]?\s*\(?{_SIZE} KV cache is needed, which is larger than the available"
        rf" KV cache memory \({_SIZE}\)",
        text,
    )
    if by_bytes:
        longest = re.search(r"estimated maximum model length is (\d+)", text)
        return Message(
            "vllm",
            tried=_amount(by_bytes[2], by_bytes[3]),
            free=_amount(by_bytes[4], by_bytes[5]),
            what="the cache of one request",
            phase="cache",
            tokens_wanted=int(by_bytes[1]),
            longest=int(longest[1]) if longest else None,
            facts=facts,
        )
    startup = re.search(
        rf"Free memory on device \(?(?:cuda:\d+ \()?([0-9.]+)/{_SIZE}\)? on startup is less than desired GPU"
        rf" memory utilization \(([0-9.]+), {_SIZE}\)",
        text,
    )
    if startup:
        return Message(
            "vllm",
            tried=_amount(startup[5], startup[6]),
            total=_amount(startup[2], startup[3]),
            free=_amount(startup[1], startup[3]),
            what="the share of the GPU the engine was told to take",
            phase="load",
            facts={"gpu_memory_utilization": float(startup[4])},
        )
    if "No available memory for the cache blocks" in text:
        return Message(
            "vllm", what="the cache: weights and activations left nothing", phase="cache", facts=facts
        )
    return None


def _sglang(text: str) -> Message | None:
    number = r"(-?[0-9.]+)"
    facts: dict[str, float] = {}
    for name, pattern in (
        ("avail_mem_gib", rf"avail mem={number}\s*GB"),
        ("weights_gib", rf"mem usage={number}\s*GB"),
        ("mem_fraction_static", r"mem[_-]fraction[_-]static\W+([01]?\.\d+)"),
    ):
        found = re.search(pattern, text)
        if found:
            facts[name] = float(found[1])
    profiled = re.search(r"max_total_tokens=(\d+) is larger than the profiled value (-?\d+)", text)
    if re.search(r"Not enough memory\. Please try (?:to )?increas\w+ --mem-fraction-static", text) or (
        profiled and int(profiled[2]) < 0
    ):
        return Message(
            "sglang",
            what="the cache: weights left nothing of the static share",
            phase="cache",
            tokens_held=max(0, int(profiled[2])) if profiled else None,
            facts=facts,
        )
    if "Capture cuda graph failed" in text or re.search(r"Capture \w+ graphs? failed", text):
        found_torch = _torch(text)
        tried = found_torch.tried if found_torch else None
        free = found_torch.free if found_torch else None
        total = found_torch.total if found_torch else None
        return Message("sglang", tried, total, free, what="CUDA graphs", phase="capture", facts=facts)
    if "KV cache pool is full" in text:
        return Message("sglang", what="the cache: more requests than it holds", phase="serve", facts=facts)
    return None


def _llamacpp(text: str) -> Message | None:
    asked = re.search(r"allocating ([0-9]+(?:[.,][0-9]+)?) (MiB) on device \d+: cudaMalloc failed", text)
    exact = re.search(r"failed to allocate \w+ buffer of size (\d+)", text)
    pinned = re.search(r"failed to allocate ([0-9.,]+) (MiB) of pinned memory", text)
    if not (asked or exact or pinned):
        return None
    tried = Amount(float(exact[1]), 0.5) if exact else None
    if tried is None:
        found = asked or pinned
        assert found is not None
        tried = _amount(found[1].replace(",", "."), found[2])
    after = text[(exact or asked or pinned).end() :] if (exact or asked or pinned) else ""  # type: ignore[union-attr]
    what, phase = "a buffer", "load"
    if re.search(r"compute buffers?|graph_reserve|gallocr", text) and not re.search(
        r"error loading model", after
    ):
        what, phase = "compute buffers (activations and logits of one batch)", "serve"
    elif re.search(r"kv cache|kv_cache|KV buffer", after, re.IGNORECASE):
        what, phase = "the cache", "cache"
    elif re.search(r"error loading model|unable to allocate|load_tensors|alloc_tensor_range", text):
        what, phase = "weights", "load"
    if pinned and not asked and not exact:
        what = "pinned host memory"
    return Message("llamacpp", tried=tried, what=what, phase=phase)


def _host(text: str) -> Message | None:
    asked = re.search(r"DefaultCPUAllocator: (?:can't|not enough) .*?allocate (\d+) bytes", text, re.DOTALL)
    if asked:
        return Message("host", tried=Amount(float(asked[1]), 0.5), what="host memory", phase=_phase(text))
    if re.search(
        r"exit(?:s with return)?\s?code\s{0,2}[:=]?\s{0,2}-9\b|signal 9|SIGKILL|oom-kill|Killed process", text
    ):
        return Message(
            "host", what="host memory: the kernel killed the process", phase=_phase(text) or "load"
        )
    return None


def _nccl(text: str) -> Message | None:
    if re.search(r"Cuda failure (?:2 )?'?out of memory'?", text):
        return Message(
            "nccl", what="communication buffers, made when the first collective runs", phase="init"
        )
    return None


def _amount(number: str, unit: str) -> Amount:
    number = number.replace(",", ".")
    scale = 1.0 if unit == "bytes" else parse_bytes(f"1 {unit}")
    digits = len(number.partition(".")[2])
    return Amount(float(number) * scale, 0.5 * 10**-digits * scale)


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
        yield _plan_words(plan)


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


def _plan_words(plan: Plan) -> str:
    verdict = plan.verdict
    words = {"fits": "fits", "marginal": "is marginal", "does_not_fit": "does not fit"}[verdict.level.value]
    text = (
        f"by the plan the job {words}: {gib(verdict.needed.value)} of {gib(verdict.capacity.value)} at"
        f" {verdict.phase}, largest part {verdict.binds}"
    )
    if verdict.host_decides and verdict.host is not None:
        capacity = verdict.host.capacity
        has = f" of {gib(capacity.value)}" if capacity is not None else ""
        return f"by the plan the host decides: {gib(verdict.host.needed.value)}{has} at {verdict.host.phase}"
    if verdict.level is Level.FITS:
        text += "; the run differed from the job (length, batch, software) or shared the GPU"
    return text


def _in_words(amount: Amount) -> str:
    return gib(amount.bytes) if amount.bytes >= GIB / 10 else f"{amount.bytes / 2**20:,.1f} MiB"


# -- what would fit -------------------------------------------------------------------------------


def _cheapest(
    message: Message, job: ResolvedJob, plan: Plan, subject: Subject, cluster: Cluster, catalog: Catalog
) -> Iterator[Change]:
    """Changes that fit, cheapest first: what keeps the GPUs and the speed, then other GPUs by price."""
    if isinstance(job.run, TrainRun):
        found = _trained(job.run, plan, subject, cluster, catalog)
    else:
        found = list(_served(message, job, plan, subject, cluster, catalog))
    rank = list(Level)
    kept = [change for change in found if change.level is not Level.DOES_NOT_FIT]
    kept.sort(
        key=lambda change: (
            rank.index(change.level),
            "gpus" in change.changes,
            _price(change),
            -(change.tokens_per_s or 0.0),
            change.needed_bytes,
        )
    )
    yield from kept[:CHANGES]


def _price(change: Change) -> float:
    """Dollars an hour of other GPUs; those without a known price come last."""
    if "gpus" not in change.changes:
        return 0.0
    return math.inf if change.usd_per_hour is None else change.usd_per_hour


def _trained(run: TrainRun, plan: Plan, subject: Subject, cluster: Cluster, catalog: Catalog) -> list[Change]:
    settled, _ = best_run(subject, run, cluster)
    # The run did not fit, whatever the plan says: ask for what saves memory.
    verdict = plan.verdict
    refused = replace(plan, verdict=replace(verdict, level=Level.DOES_NOT_FIT))
    found = advised(
        refused if verdict.level is Level.FITS else plan,
        subject,
        settled,
        cluster,
        clusters=lambda card, count: catalog.cluster([(None, count, card)]),
        larger=_larger(cluster, catalog),
    )
    return [_change(action, cluster, catalog) for action in found.actions]


def _change(action: Action, cluster: Cluster, catalog: Catalog) -> Change:
    fleet = action.changes.get("gpus")
    if isinstance(fleet, str):
        count, _, card = fleet.partition("x")
        cluster = catalog.cluster([(None, int(count), card)])
    price = cluster.price_per_gpu_hour
    return Change(
        title=action.title,
        changes=action.changes,
        level=action.level,
        needed_bytes=action.needed_bytes,
        capacity_bytes=_capacity(cluster),
        tokens_per_s=action.tokens_per_s,
        kv_tokens=None,
        usd_per_hour=None if price is None else float(price.value) * cluster.count,
    )


def _larger(cluster: Cluster, catalog: Catalog) -> tuple[str, ...]:
    own = _capacity(cluster)
    sizes = {card: float(catalog.gpu(card)[0].usable_memory().value) for card in LARGER_CARDS}
    return tuple(card for card, memory in sizes.items() if memory > 1.2 * own)[:2]


def _capacity(cluster: Cluster) -> float:
    return float(min(pool.gpu.usable_memory().value for pool in cluster.pools))


def _served(
    message: Message, job: ResolvedJob, plan: Plan, subject: Subject, cluster: Cluster, catalog: Catalog
) -> Iterator[Change]:
    run = job.run
    assert isinstance(run, ServeRun)
    for title, changes, fleet in _serving_changes(message, run, plan, cluster, catalog):
        try:
            other = catalog.cluster(fleet) if fleet is not None else cluster
            written = {key.removeprefix("run."): value for key, value in changes.items() if key != "gpus"}
            stated = run.model_dump(exclude_none=True)
            changed = ServeRun.read({**stated, **written})
            asked = replace(job, job=job.job.model_copy(update={"run": changed}))
            if fleet is not None:
                asked = replace(
                    asked, job=asked.job.model_copy(update={"gpus": changes["gpus"], "system": None})
                )
            found = plan_job(asked, catalog, subject=subject, cluster=other, advice=False)
        except GpucalcError:
            continue
        price = other.price_per_gpu_hour
        rates = found.throughput
        speed = None if rates is None else rates.find("output_tokens_per_s") or rates
        tokens = None if found.cache is None else found.cache.find("kv_tokens")
        yield Change(
            title=title,
            changes=changes,
            level=found.verdict.level,
            needed_bytes=float(found.verdict.needed.value),
            capacity_bytes=float(found.verdict.capacity.value),
            tokens_per_s=None if speed is None else float(speed.value),
            kv_tokens=None if tokens is None else float(tokens.value),
            usd_per_hour=None if price is None else float(price.value) * other.count,
        )


def _serving_changes(
    message: Message, run: ServeRun, plan: Plan, cluster: Cluster, catalog: Catalog
) -> Iterator[tuple[str, dict[str, Any], FleetSpec | list[tuple[int | None, int, str]] | None]]:
    """Single changes that could help a deployment, in words and keys."""
    recipe, layout = plan.recipe, plan.layout
    held = message.longest or message.tokens_held
    if held is None and plan.cache is not None:
        tokens = plan.cache.find("kv_tokens")
        held = int(tokens.value) if tokens is not None and 0 < tokens.value < recipe.max_model_len else None
    if held is not None and 64 <= held < recipe.max_model_len:
        yield f"max_model_len {held}", {"run.max_model_len": held, **_shorter(run, held)}, None
    if recipe.max_model_len >= 2048:
        half = recipe.max_model_len // 2
        yield f"max_model_len {half}", {"run.max_model_len": half, **_shorter(run, half)}, None
    if run.kv_dtype in ("auto", "bf16", "fp16"):
        kind = "q8_0" if run.framework == "llamacpp" else "fp8"
        yield f"{kind} cache", {"run.kv_dtype": kind}, None
    if run.quant is None or run.quant == "none":
        for kind in ("q4_k_m",) if run.framework == "llamacpp" else ("fp8", "awq"):
            yield f"{kind} weights", {"run.quant": kind}, None
    if recipe.gpu_memory_utilization is not None and recipe.gpu_memory_utilization < 0.95:
        yield "gpu_memory_utilization 0.95", {"run.gpu_memory_utilization": 0.95}, None
    if run.framework in ("vllm", "sglang") and not run.enforce_eager:
        yield "no CUDA graphs", {"run.enforce_eager": True}, None
    if recipe.max_num_seqs > 32:
        yield "max_num_seqs 32", {"run.max_num_seqs": 32}, None
    if len(cluster.pools) > 1:
        for pool in cluster.pools:
            fleet = f"{pool.count}x{pool.gpu.id}"
            parts: list[tuple[int | None, int, str]] = [(None, pool.count, pool.gpu.id)]
            yield f"{pool.count} x {pool.gpu.name} alone", {"gpus": fleet, "run.tp": pool.count}, parts
        return
    card = cluster.pools[0].gpu.id
    twice: list[tuple[int | None, int, str]] = [(None, 2 * cluster.count, card)]
    changes = {"gpus": f"{2 * cluster.count}x{card}", "run.tp": 2 * layout.tp}
    yield f"{2 * cluster.count} x {cluster.pools[0].gpu.name}, tp {2 * layout.tp}", changes, twice
    for other in _larger(cluster, catalog):
        same: list[tuple[int | None, int, str]] = [(None, cluster.count, other)]
        yield f"{cluster.count} x {other}", {"gpus": f"{cluster.count}x{other}"}, same


def _shorter(run: ServeRun, length: int) -> dict[str, Any]:
    """Prompts and answers that still fit a shorter context."""
    isl, osl = run.isl or 1, run.osl or 1
    if isl + osl <= length:
        return {}
    return {"run.isl": max(1, length * isl // (isl + osl)), "run.osl": max(1, length * osl // (isl + osl))}
