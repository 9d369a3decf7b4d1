"""Any `torch.nn.Module` as a model file: exact parameters, forward FLOPs, what autograd keeps per sample.

This runs the user's code: the factory is imported and called, and its module is run forward. It does so
on fake tensors, which have shapes and no values, so neither weights nor a GPU are needed. What is kept
for backward is counted from autograd's own saved tensors at two batch sizes and checked on a third.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gpucalc.errors import CannotMeasure, InputError
from gpucalc.spec.model import ModelSpec, TracedBlock, TraceSpec
from gpucalc.spec.yamlio import parse_scalar

BATCHES = (2, 4)
CHECK_BATCH = 7
TOLERANCE = 0.01  # how far the third batch may lie off the line through the first two
MAX_SIDE = 2**24
_INTEGERS = ("int64", "int32", "bool")
_FLOATS = ("float32", "bfloat16", "float16")
_PRODUCTS = ("convolution", "mm", "bmm", "addmm", "baddbmm", "_scaled_dot_product", "_grouped_mm")


@dataclass(frozen=True, slots=True)
class TraceInput:
    """One tensor the module is called with; the first side is the batch."""

    shape: tuple[int, ...]
    dtype: str | None = None  # None: the module's own
    name: str | None = None  # passed by keyword

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.name + '=' if self.name else ''}{self.dtype + ':' if self.dtype else ''}{shape}"


def parse_input(text: str) -> TraceInput:
    """`[name=][dtype:]1x3x224x224`, batch first. Raises InputError."""
    name, equals, rest = text.rpartition("=")
    dtype, colon, sides = rest.rpartition(":")
    known = (*_FLOATS, *_INTEGERS)
    problem = None
    if equals and not name.isidentifier():
        problem = "the name is not an argument's"
    elif colon and dtype not in known:
        problem = f"unknown element type {dtype!r}"
    numbers = sides.lower().split("x")
    if problem is None and not all(part.isdigit() and 1 <= int(part) <= MAX_SIDE for part in numbers):
        problem = "is not a shape"
    if problem:
        legal = f"[name=][dtype:]1x3x224x224, batch first; types {', '.join(known)}"
        raise InputError(problem, where="--input", given=text, legal=legal)
    return TraceInput(tuple(map(int, numbers)), dtype or None, name or None)


def parse_argument(text: str) -> tuple[str, Any]:
    """KEY=VALUE for the factory, the value as YAML has it. Raises InputError."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise InputError("is not KEY=VALUE", where="--arg", given=text)
    return key, parse_scalar(value, "--arg")


@dataclass(slots=True)
class _Seen:
    """What one forward pass at one batch size came to."""

    params: int = 0
    buffers: int = 0
    saved_bytes: int = 0
    saved_by: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    flops_by: dict[str, int] = field(default_factory=dict)
    traffic: int = 0
    kernels: int = 0
    blocks: dict[str, tuple[str, int]] = field(default_factory=dict)  # name -> class, parameters
    live_bytes: int | None = None  # most alive at once without gradients


def trace(
    factory: str | Callable[..., Any],
    inputs: Sequence[TraceInput],
    *,
    arguments: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    name: str | None = None,
) -> ModelSpec:
    """The module that `factory` (module:callable) makes, as a model known by its totals.

    Imports and calls the user's code. Raises InputError when it cannot be traced, CannotMeasure
    without torch.
    """
    torch = _torch()
    if dtype not in _FLOATS:
        raise InputError("unknown element type", where="--dtype", given=dtype, legal=", ".join(_FLOATS))
    if not inputs:
        raise InputError(
            "no input is given", where="--input", legal="the shape of what the module is called with"
        )
    make = _factory(factory) if isinstance(factory, str) else factory
    label = name or (factory.rpartition(":")[2] if isinstance(factory, str) else "module")
    with _fake(), _dropout_as_on_a_gpu(torch):
        module = _make(torch, make, dict(arguments or {}), dtype)
        passes = {
            batch: _forward(torch, module, inputs, batch, dtype, label, count_work=batch == BATCHES[0])
            for batch in (*BATCHES, CHECK_BATCH)
        }
        for batch, seen in passes.items():
            seen.live_bytes = _most_alive(torch, module, inputs, batch, dtype)
    first, second = (passes[batch] for batch in BATCHES)
    live = _live(passes)
    slope, fixed = _line(first.saved_bytes, second.saved_bytes)
    expected = fixed + slope * CHECK_BATCH
    off = passes[CHECK_BATCH].saved_bytes / expected - 1 if expected else 0.0
    if abs(off) > TOLERANCE:
        raise InputError(
            f"what it keeps for backward does not grow with the batch: {first.saved_bytes:,} bytes at"
            f" {BATCHES[0]}, {second.saved_bytes:,} at {BATCHES[1]}, {passes[CHECK_BATCH].saved_bytes:,} at"
            f" {CHECK_BATCH}",
            where=label,
        )
    if "" not in first.blocks and (first.flops_by.get("") or first.saved_by.get("")):
        first.blocks[""] = (label, 0)  # what the module does outside its children
    width = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    blocks = tuple(
        TracedBlock(
            name=block,
            kind=kind,
            params=params,
            flops_forward=_share(first.flops_by.get(block, 0)),
            saved_bytes=_line(first.saved_by.get(block, 0), second.saved_by.get(block, 0))[0],
        )
        for block, (kind, params) in first.blocks.items()
    )
    return ModelSpec(
        name=label,
        kind="cnn",
        family="traced",
        image_size=max(inputs[0].shape[1:], default=1) if len(inputs[0].shape) < 4 else inputs[0].shape[-1],
        layers=max(first.kernels, 1) if first.kernels <= 10_000 else 10_000,
        params_total=first.params,
        gflops_forward=max(first.flops / BATCHES[0] / 1e9, 1e-12),
        saved_elements=max(slope / width, 1e-12),
        live_elements=live / width if live is not None else None,
        traffic_elements=max(first.traffic / BATCHES[0], 1e-12),
        native_dtype=dtype,
        config_source=f"traced: {label}, torch {torch.__version__} fake tensors, training mode",
        count_status="exact (instantiated and traced, see config_source)",
        trace=TraceSpec(
            inputs=tuple(map(str, inputs)),
            torch=str(torch.__version__),
            buffers=first.buffers,
            saved_bytes_per_sample=slope,
            saved_bytes_fixed=fixed,
            check_batch=CHECK_BATCH,
            check_error=off,
            blocks=blocks,
        ),
    )


def _line(at_first: int, at_second: int) -> tuple[float, float]:
    """Slope and intercept through the two batch sizes."""
    slope = (at_second - at_first) / (BATCHES[1] - BATCHES[0])
    return slope, at_first - slope * BATCHES[0]


def _live(passes: Mapping[int, _Seen]) -> float | None:
    """Bytes alive at once per sample, None where they do not grow with the batch."""
    first, second, third = (passes[batch].live_bytes for batch in (*BATCHES, CHECK_BATCH))
    if first is None or second is None or third is None:
        return None
    slope, fixed = _line(first, second)
    grows = slope > 0 and abs(third / (fixed + slope * CHECK_BATCH) - 1) <= TOLERANCE
    return slope if grows else None


def _share(flops: int) -> float:
    return flops / BATCHES[0]


# -- the user's module ----------------------------------------------------------------------------


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        problem = f"tracing needs torch, which cannot be imported ({error})"
        raise CannotMeasure(f'{problem}: pip install "gpucalc[probe]"') from None


def _factory(text: str) -> Callable[..., Any]:
    module, colon, name = text.partition(":")
    if not colon or not name or not module:
        raise InputError(
            "is not MODULE:FACTORY", where="trace", given=text, legal="such as torchvision.models:resnet50"
        )
    here = os.getcwd()
    if here not in sys.path:  # a file beside the user, as `python -m` finds it
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise InputError(f"{module} has no {name}", where="trace", given=text) from None
    except Exception as error:  # the module is the user's, and may raise anything
        problem = f"cannot be imported: {type(error).__name__}: {error}"
        raise InputError(problem, where="trace", given=module) from error
    if not callable(found):
        raise InputError("is not callable", where="trace", given=text)
    made: Callable[..., Any] = found
    return made


def _make(torch: Any, make: Callable[..., Any], arguments: dict[str, Any], dtype: str) -> Any:
    if isinstance(make, torch.nn.Module):
        raise InputError(
            "is a module that was made with weights", where="trace", legal="the function that makes it"
        )
    try:
        module = make(**arguments)
    except Exception as error:
        if "DataDependent" not in type(error).__name__:
            raise InputError(f"the factory failed: {type(error).__name__}: {error}", where="trace") from error
        module = _made_on_meta(torch, make, arguments)
    if not isinstance(module, torch.nn.Module):
        raise InputError("the factory made no torch.nn.Module", where="trace", given=type(module).__name__)
    if dtype != "float32":
        narrow = getattr(torch, dtype)
        for tensor in (*module.parameters(), *module.buffers()):  # .to() cannot swap fake tensors
            if tensor.is_floating_point():
                tensor.data = torch.empty_like(tensor, dtype=narrow)
    return module.train()


def _made_on_meta(torch: Any, make: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The module of a factory that reads values it computes, such as a schedule of drop rates.

    It is made on the meta device, which leaves what is put on the CPU by name with its values; its
    weights then become fake ones.
    """
    fake = importlib.import_module("torch._subclasses.fake_tensor")
    try:
        with fake.unset_fake_temporarily(), torch.device("meta"):
            module = make(**arguments)
    except Exception as error:
        raise InputError(f"the factory failed: {type(error).__name__}: {error}", where="trace") from error
    made: dict[int, Any] = {}  # shared weights stay shared

    def faked(tensor: Any, *, weight: bool) -> Any:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            grows = weight and tensor.requires_grad
            made[id(tensor)] = torch.nn.Parameter(empty, requires_grad=grows) if weight else empty
        return made[id(tensor)]

    for part in module.modules() if isinstance(module, torch.nn.Module) else ():
        for held, weight in ((part._parameters, True), (part._buffers, False)):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    held[name] = faked(tensor, weight=weight)
    return module


@contextmanager
def _fake() -> Iterator[Any]:
    fake = importlib.import_module("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@contextmanager
def _dropout_as_on_a_gpu(torch: Any) -> Iterator[None]:
    """Dropout on CPU keeps its mask as numbers; the GPU's keeps one byte an element."""
    functional = torch.nn.functional
    plain, raw = functional.dropout, torch.dropout

    def forward(context: Any, x: Any) -> Any:
        context.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    def backward(_: Any, gradient: Any) -> Any:
        return torch.empty_like(gradient)

    masked = type(
        "MaskedDropout",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )

    def dropout(x: Any, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Any:
        return masked.apply(x) if training and p > 0 else x  # type: ignore[attr-defined]

    functional.dropout = dropout
    torch.dropout = lambda x, p, train: dropout(x, p, train)
    try:
        yield
    finally:
        functional.dropout, torch.dropout = plain, raw


def _forward(
    torch: Any,
    module: Any,
    inputs: Sequence[TraceInput],
    batch: int,
    dtype: str,
    label: str,
    *,
    count_work: bool,
) -> _Seen:
    seen = _Seen()
    parameters = {id(p): p for p in module.parameters()}.values()
    seen.params = sum(p.numel() for p in parameters)
    seen.buffers = sum(b.numel() for b in module.buffers())
    seen.blocks = _blocks(module)
    given, named = _arguments(torch, inputs, batch, dtype)
    try:
        with _saved(torch, module, seen), _work(torch, seen, count_work):
            module(*given, **named)
    except Exception as error:
        kind = type(error).__name__
        if "DataDependent" in kind or "DynamicOutputShape" in kind:
            problem = "what it does depends on values, which a trace without weights does not have"
            raise InputError(f"{problem}: {error}", where=label) from error
        raise InputError(f"its forward pass failed: {kind}: {error}", where=label) from error
    return seen


def _arguments(
    torch: Any, inputs: Sequence[TraceInput], batch: int, dtype: str
) -> tuple[list[Any], dict[str, Any]]:
    """What the module is called with, in order and by name."""
    given: list[Any] = []
    named: dict[str, Any] = {}
    for item in inputs:
        shape = (batch * item.shape[0], *item.shape[1:])
        kind = item.dtype or dtype
        make = torch.empty if kind in _FLOATS else torch.zeros
        tensor = make(shape, dtype=getattr(torch, kind))
        if item.name:
            named[item.name] = tensor
        else:
            given.append(tensor)
    return given, named


def _most_alive(torch: Any, module: Any, inputs: Sequence[TraceInput], batch: int, dtype: str) -> int | None:
    """Bytes of the storages that are alive at once in a pass without gradients, weights not counted.

    None where the module does not run in evaluation mode.
    """
    modes = importlib.import_module("torch.utils._python_dispatch")
    tree = importlib.import_module("torch.utils._pytree")
    weak = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef
    given, named = _arguments(torch, inputs, batch, dtype)
    held = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    alive: dict[int, tuple[Any, int]] = {}
    most = 0

    def note(tensors: Any) -> None:
        nonlocal most
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in held:
                    alive[storage._cdata] = (weak(storage), storage.nbytes())
        most = max(most, sum(size for _, size in alive.values()))

    def dispatch(_: Any, function: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for key in [key for key, (storage, _) in alive.items() if storage.expired()]:
            del alive[key]
        note(tree.tree_leaves(out))
        return out

    note((*given, *named.values()))
    module.eval()
    watched = type("Alive", (modes.TorchDispatchMode,), {"__torch_dispatch__": dispatch})
    try:
        with torch.no_grad(), watched():
            module(*given, **named)
    except Exception:  # the module is the user's: what it cannot do is not known, and not zero
        return None
    finally:
        module.train()
    return most


def _blocks(module: Any) -> dict[str, tuple[str, int]]:
    """The module's children, lists of them taken apart; a parameter counts in the first that holds it."""
    found: dict[str, tuple[str, int]] = {}
    counted: set[int] = set()

    def own(part: Any) -> int:
        fresh = {id(p): p.numel() for p in part.parameters() if id(p) not in counted}
        counted.update(fresh)
        return sum(fresh.values())

    for name, child in module.named_children():
        inner = list(child.named_children())
        if type(child).__name__ in ("Sequential", "ModuleList") and len(inner) > 1:
            for place, part in inner:
                found[f"{name}.{place}"] = (type(part).__name__, own(part))
        else:
            found[name] = (type(child).__name__, own(child))
    rest = own(module)
    if rest or not found:
        found[""] = (type(module).__name__, rest)
    return found


@contextmanager
def _saved(torch: Any, module: Any, seen: _Seen) -> Iterator[None]:
    """Count what autograd keeps, each storage once, weights and buffers not at all."""
    held = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    kept: dict[int, Any] = {}  # storages stay alive, so that an address is never met twice
    stack: list[str] = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in held and key not in kept:
            kept[key] = storage
            size = storage.nbytes()
            seen.saved_bytes += size
            block = next((name for name in reversed(stack) if name in seen.blocks), "")
            seen.saved_by[block] = seen.saved_by.get(block, 0) + size
        return tensor

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def leave(*_: Any) -> None:
        stack.pop()

    hooks: list[Any] = []
    for name, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(enter(name)))
        hooks.append(part.register_forward_hook(leave, always_call=True))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _work(torch: Any, seen: _Seen, wanted: bool) -> Iterator[None]:
    """Count FLOPs (2 x multiply-accumulate) by block, kernels, and what layers without products move."""
    if not wanted:
        yield
        return
    counter = importlib.import_module("torch.utils.flop_counter")
    modes = importlib.import_module("torch.utils._python_dispatch")
    tree = importlib.import_module("torch.utils._pytree")
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
        return counter.sdpa_flop_count(q, k, v)

    def dispatch(_: Any, function: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.__name__
        tensors = [t for t in tree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        inputs = {t.untyped_storage()._cdata for t in tensors}
        view = made and not function._schema.is_mutable and made[0].untyped_storage()._cdata in inputs
        if view or not made or name.startswith(("empty", "detach", "prim", "zeros", "lift")):
            return out
        seen.kernels += 1
        if not any(product in name for product in _PRODUCTS):
            seen.traffic += sum(t.numel() for t in tensors) + sum(t.numel() for t in made)
        return out

    moved = type("Moved", (modes.TorchDispatchMode,), {"__torch_dispatch__": dispatch})
    flops = counter.FlopCounterMode(display=False, custom_mapping={attention: attention_flops})
    with moved(), flops:
        yield
    seen.flops = flops.get_total_flops()
    totals = {name: sum(parts.values()) for name, parts in flops.get_flop_counts().items()}
    for block in seen.blocks:
        if block:
            seen.flops_by[block] = next(
                (n for name, n in totals.items() if name.partition(".")[2] == block), 0
            )
    seen.flops_by[""] = seen.flops - sum(seen.flops_by.values())
