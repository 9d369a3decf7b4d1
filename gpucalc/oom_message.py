"""What an out-of-memory message states: the engine, the sizes in it, and what was being made.

Messages of torch (with DeepSpeed's and FSDP's tracebacks around it), vLLM, SGLang and llama.cpp
are known by their words, and so are tables and lines that say how much memory is in use. The text is only
read: nothing in it is run or looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpucalc.errors import InputError
from gpucalc.units import parse_bytes

MAX_TEXT = 16 * 2**20

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
    failed: bool = True  # false: it only says what is in use


def read_message(text: str, where: str = "the message") -> Message:
    """The figures and the place a message states. Raises InputError when it is none that is known."""
    if len(text) > MAX_TEXT:
        raise InputError("is too long for a message", where=where, legal=f"at most {MAX_TEXT // 2**20} MiB")
    for reader in (_vllm, _sglang, _llamacpp, _torch, _host, _nccl, _in_use):
        found = reader(text)
        if found is not None:
            return found
    raise InputError(
        "holds no out-of-memory message that is known",
        where=where,
        legal="a log of torch, DeepSpeed, vLLM, SGLang or llama.cpp with the failing line; or what is in use:"
        " nvidia-smi's table, DeepSpeed's Max_MA, a size such as 13GiB",
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


def _in_use(text: str) -> Message | None:
    """How much memory is in use, where nothing failed: the most that is printed."""
    by_deepspeed = re.findall(r"Max_MA\s+([0-9.]+)\s*GB", text)  # which it divides by 2^30
    if by_deepspeed:
        return Message("deepspeed", allocated=_amount(max(by_deepspeed, key=float), "GiB"), failed=False)
    by_torch = re.findall(rf"max(?:imum)?[_ ](?:memory[_ ])?allocated\W+{_SIZE}", text, re.IGNORECASE)
    if by_torch:
        most = max((_amount(*one) for one in by_torch), key=lambda amount: amount.bytes)
        return Message("torch", allocated=most, failed=False)
    cards = re.findall(r"(\d+)\s?MiB\s*/\s*(\d+)\s?MiB", text)
    if cards:
        used, total = max(cards, key=lambda card: int(card[0]))
        return Message("nvidia-smi", in_use=_amount(used, "MiB"), total=_amount(total, "MiB"), failed=False)
    bare = re.fullmatch(rf"\s*{_SIZE}\s*", text)
    return Message("stated", in_use=_amount(bare[1], bare[2]), failed=False) if bare else None


def _amount(number: str, unit: str) -> Amount:
    number = number.replace(",", ".")
    scale = 1.0 if unit == "bytes" else parse_bytes(f"1 {unit}")
    digits = len(number.partition(".")[2])
    return Amount(float(number) * scale, 0.5 * 10**-digits * scale)
