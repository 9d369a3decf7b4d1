"""Real training steps on one rank: the module, its optimizer, how gradients are summed, what it took.

The same code runs on a GPU and on a CPU. Peak memory is what torch's allocator says of a GPU; on a CPU
the bytes of all live tensors are counted, which is the same quantity.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from importlib import import_module
from time import perf_counter
from typing import Any

from gpucalc.builders.build import build_graph
from gpucalc.errors import CannotMeasure
from gpucalc.probe.device import Device
from gpucalc.probe.modules import Make, cut, language_model
from gpucalc.spec.model import ModelSpec

_BUCKET_BYTES = 25 * 2**20  # in which DDP sums gradients, its default
_CLIP = 1.0
_LEARNING_RATE = 1e-4


class Trainer:
    """A model in training on this rank. `strategy`: none, ddp or fsdp.

    `beat` is called before every micro-batch: a sign of life.
    """

    def __init__(self, device: Device, settings: Mapping[str, Any], beat: Callable[[], None]) -> None:
        self.device, self.settings, self.beat = device, settings, beat
        torch = self.torch = device.torch
        self.strategy: str = settings["strategy"]
        precision = settings["precision"]
        pure = precision == "bf16-pure"
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.manual_seed(0)  # the same weights on every rank
        make = Make(
            torch, device.place, torch.bfloat16 if pure else torch.float32, settings["eager_attention"]
        )
        spec = ModelSpec.read(settings["model"])
        graph = cut(build_graph(spec), tuple(settings["layers"]))
        self.plain = language_model(make, graph, recompute=settings["recompute"])
        assert graph.embedding is not None
        self.vocab = graph.embedding.vocab
        self.half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.model = self._wrapped()
        self.optimizer = _optimizer(torch, self.plain.parameters(), settings["optimizer"])
        self.scaler = torch.amp.GradScaler(device.kind) if precision == "fp16" else None
        torch.manual_seed(1 + device.index)  # another batch on every rank
        shape = (settings["micro_batch"], settings["seq_len"])
        self.tokens = torch.randint(0, self.vocab, shape, device=device.place)
        self.targets = torch.randint(0, self.vocab, shape, device=device.place)

    @property
    def tokens_per_step(self) -> int:
        """Tokens this rank trains on in one optimizer step."""
        return int(self.tokens.numel() * self.settings["micro_batches"])

    def step(self, *, synchronise: bool = True) -> float:
        """One optimizer step; the loss of its last micro-batch. Without sums each rank goes its own way."""
        micro_batches: int = self.settings["micro_batches"]
        loss = 0.0
        for number in range(micro_batches):
            self.beat()
            last = number == micro_batches - 1
            with self._summed(synchronise and last):
                made = self._loss()
                scaled = made / micro_batches
                (self.scaler.scale(scaled) if self.scaler is not None else scaled).backward()
            loss = made.detach()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self.torch.nn.utils.clip_grad_norm_(self.plain.parameters(), _CLIP)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)

    def timed_step(self, *, synchronise: bool = True) -> tuple[float, float]:
        """Seconds of one step from an idle device to an idle device, and its loss."""
        self.device.synchronize()
        start = perf_counter()
        loss = self.step(synchronise=synchronise)
        self.device.synchronize()
        return perf_counter() - start, loss

    def communicate(self) -> None:
        """The collectives of one step's gradient sums and weight gathers, without any computation."""
        torch, dist = self.torch, self.torch.distributed
        world = dist.get_world_size()
        if self.strategy == "ddp":
            gradient = 4 if self.settings["precision"] != "bf16-pure" else 2
            kind = torch.float32 if gradient == 4 else torch.bfloat16
            left = sum(parameter.numel() for parameter in self.plain.parameters())
            while left > 0:
                part = min(left, _BUCKET_BYTES // gradient)
                self.beat()
                dist.all_reduce(torch.empty(part, device=self.device.place, dtype=kind))
                left -= part
            return
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        sent = self.half or (torch.bfloat16 if self.settings["precision"] == "bf16-pure" else torch.float32)
        reduced = torch.float32 if self.settings["reduce_bytes"] == 4 else torch.bfloat16
        gathers = 2 if self.settings["reshard"] else 1
        for _ in range(self.settings["micro_batches"]):
            for each in self._units():
                self.beat()
                part = -(-each // world)
                for _ in range(gathers):
                    whole = torch.empty(part * world, device=self.device.place, dtype=sent)
                    gather(whole, torch.empty(part, device=self.device.place, dtype=sent))
                whole = torch.empty(part * world, device=self.device.place, dtype=reduced)
                scatter(torch.empty(part, device=self.device.place, dtype=reduced), whole)

    def _units(self) -> list[int]:
        """Parameters of every group that FSDP gathers at once: each layer, and what is left."""
        layers = [sum(p.numel() for p in layer.parameters()) for layer in self.plain.layers]
        return [*layers, sum(p.numel() for p in self.plain.parameters()) - sum(layers)]

    def _wrapped(self) -> Any:
        if self.strategy == "none":
            return self.plain
        torch = self.torch
        if self.strategy == "ddp":
            place = [self.device.place.index] if self.device.kind == "cuda" else None
            parallel = import_module("torch.nn.parallel").DistributedDataParallel
            return parallel(self.plain, device_ids=place)
        module = import_module("torch.distributed.fsdp")
        if not hasattr(module, "fully_shard"):
            raise CannotMeasure(f"torch {torch.__version__} has no fully_shard: the stages need 2.6 or later")
        mesh = import_module("torch.distributed.device_mesh").init_device_mesh(
            self.device.kind, (torch.distributed.get_world_size(),)
        )
        reduced = torch.float32 if self.settings["reduce_bytes"] == 4 else torch.bfloat16
        policy = module.MixedPrecisionPolicy(param_dtype=self.half, reduce_dtype=reduced)
        options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": self.settings["reshard"]}
        for layer in self.plain.layers:
            module.fully_shard(layer, **options)
        return module.fully_shard(self.plain, **options)

    def _summed(self, wanted: bool) -> Any:
        """Whether this backward pass sums gradients. FSDP sums after every micro-batch, as its plan does."""
        if self.strategy == "ddp" and not wanted:
            return self.model.no_sync()
        return nullcontext()

    def _loss(self) -> Any:
        torch = self.torch
        cast: Any = nullcontext()
        if self.half is not None and self.strategy != "fsdp":
            cast = torch.autocast(self.device.kind, dtype=self.half)
        with cast:
            logits = self.model(self.tokens)
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), self.targets.flatten())


def _optimizer(torch: Any, parameters: Iterator[Any], name: str) -> Any:
    """The optimizer the plan is for; all tensors at once, as torch does on GPUs."""
    held, kinds = list(parameters), torch.optim
    match name:
        case "adamw-fused":
            return kinds.AdamW(held, lr=_LEARNING_RATE, fused=True)
        case "adam":
            return kinds.Adam(held, lr=_LEARNING_RATE, foreach=True)
        case "sgd":
            return kinds.SGD(held, lr=_LEARNING_RATE, foreach=True)
        case "sgd-momentum":
            return kinds.SGD(held, lr=_LEARNING_RATE, momentum=0.9, foreach=True)
    return kinds.AdamW(held, lr=_LEARNING_RATE, foreach=True)


class Peak:
    """The most bytes of tensors alive from `restart` on. Everything a CPU shall count is made inside."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.now = self.most = 0
        self.held: dict[int, int] = {}
        self._alive: dict[int, Any] = {}
        self._mode: Any = nullcontext() if device.kind == "cuda" else self._counting()

    def __enter__(self) -> Peak:
        if self.device.kind == "cuda":
            self.device.torch.cuda.empty_cache()
        self.restart()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def restart(self) -> None:
        """Count from what is alive now: what making the model took is no part of training it."""
        if self.device.kind == "cuda":
            self.device.torch.cuda.reset_peak_memory_stats()
        self._looked_at()
        self.most = self.now

    @property
    def allocated(self) -> float:
        """Bytes of tensors at the peak, of one device."""
        if self.device.kind == "cuda":
            return float(self.device.torch.cuda.max_memory_allocated())
        return float(self.most)

    @property
    def reserved(self) -> float | None:
        """Bytes the caching allocator held at its peak; a CPU has none."""
        if self.device.kind == "cuda":
            return float(self.device.torch.cuda.max_memory_reserved())
        return None

    def _counting(self) -> Any:
        """A mode that sees every operation, and counts each storage until it is freed."""
        torch = self.device.torch
        base = import_module("torch.utils._python_dispatch").TorchDispatchMode
        leaves = import_module("torch.utils._pytree").tree_leaves

        def dispatch(_: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(_sharded(kind) for kind in types):
                return NotImplemented  # a sharded tensor's own operations come here one by one
            out = function(*args, **(kwargs or {}))
            for item in leaves(out):
                if isinstance(item, torch.Tensor) and not _sharded(type(item)):
                    self._add(item.untyped_storage())
            return out

        return type("LiveBytes", (base,), {"__torch_dispatch__": dispatch})()

    def _add(self, storage: Any) -> None:
        if storage.device.type == "meta":  # shapes alone, as sharded tensors work theirs out
            return
        key, size = storage._cdata, storage.nbytes()
        if key not in self.held:
            self.held[key] = 0
            self._alive[key] = weakref.ref(storage)
            weakref.finalize(storage, self._drop, key)
        self._sized(key, size)
        if self.now > self.most:
            self._looked_at()
            self.most = max(self.most, self.now)

    def _looked_at(self) -> None:
        """Take every storage's size anew: FSDP empties some where no operation shows it."""
        for key, alive in list(self._alive.items()):
            if (held := alive()) is not None:
                self._sized(key, held.nbytes())

    def _sized(self, key: int, size: int) -> None:
        self.now += size - self.held[key]
        self.held[key] = size

    def _drop(self, key: int) -> None:
        self.now -= self.held.pop(key, 0)
        self._alive.pop(key, None)


def _sharded(kind: type) -> bool:
    return kind.__name__ == "DTensor"


def finite(losses: list[float]) -> bool:
    """Whether every loss is a number."""
    return all(math.isfinite(loss) for loss in losses)
