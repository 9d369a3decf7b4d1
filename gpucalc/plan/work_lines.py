"""What one layer's work is kept as: lines by kind of kernel, summed forward, backward and run again."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpucalc.formulas import compute as f
from gpucalc.graph import Block
from gpucalc.line import Line, compute, total
from gpucalc.num import Num
from gpucalc.plan.device import Device
from gpucalc.plan.layout import Recipe
from gpucalc.plan.work_counts import REPLAY_CALLS

# Modules that the scope moe of Megatron-Core captures together.
_OF_EXPERTS = ("moe_router", "moe_preprocess", "experts")
WHOLE_RECOMPUTE = ("megatron", "deepspeed")  # frameworks whose checkpoints repeat a layer's last product


@dataclass(slots=True)
class LayerWork:
    """What one layer of a kind costs for one micro-batch."""

    block: Block
    matrix: list[Line] = field(default_factory=list)  # forward matrices
    attention: list[Line] = field(default_factory=list)
    traffic: list[Line] = field(default_factory=list)
    matrix_back: list[Line] = field(default_factory=list)
    attention_back: list[Line] = field(default_factory=list)
    traffic_back: list[Line] = field(default_factory=list)
    calls: dict[str, Num] = field(default_factory=dict)  # host time forward, in kernel launches, by module
    module: str = ""  # what the calls added belong to, as Megatron-Core names what it captures

    def call(self, count: Num, module: str | None = None) -> None:
        """Add host time of the module at hand, or of another."""
        name = self.module if module is None else module
        self.calls[name] = self.calls.get(name, 0) + count

    def launched(self, graphs: tuple[str, ...]) -> Num:
        """Host time forward in kernel launches, where these modules are replayed from CUDA graphs."""
        captured = {*graphs, *(_OF_EXPERTS if "moe" in graphs else ())}
        left: Num = REPLAY_CALLS if captured & self.calls.keys() else 0
        for name, count in self.calls.items():
            if name not in captured:
                left = left + count
        return left

    def forward(self) -> Line:
        """Seconds forward."""
        return _sum("forward", self.matrix, self.attention, self.traffic)

    def backward(self) -> Line:
        """Seconds backward, recomputation apart."""
        return _sum("backward", self.matrix_back, self.attention_back, self.traffic_back)

    def recompute(self, recipe: Recipe) -> Line | None:
        """Seconds of forward work repeated for backward."""
        if recipe.recompute == "none":
            return None
        if recipe.recompute == "selective":
            if recipe.recompute_scope == "core":
                return _sum("recompute", [], self.attention, []) if self.attention else None
            if recipe.recompute_scope == "modules":
                return self._modules_again(recipe.recompute_modules)
            if recipe.recompute_scope == "op":
                # Half of the matrices and all elementwise kernels run again; attention's output is kept.
                return _sum("recompute", self.matrix[1::2], [], self.traffic)
            return compute("recompute", f.shared_s, whole_s=self.forward(), share=0.5)
        matrix = self.matrix
        if recipe.framework not in WHOLE_RECOMPUTE and matrix:
            matrix = matrix[:-1]  # torch's checkpoint stops before the last product
        return _sum("recompute", matrix, self.attention, self.traffic)

    def _modules_again(self, modules: tuple[str, ...]) -> Line | None:
        """Seconds of what Megatron-Core's recompute modules run again."""
        names = [name for module in modules for name in _MODULE_WORK.get(module, ())]

        def of(lines: list[Line]) -> list[Line]:
            return [line for line in lines if line.name.startswith(tuple(names))] if names else []

        attention = self.attention if "core_attn" in modules else []
        matrix, traffic = of(self.matrix), of(self.traffic)
        return _sum("recompute", matrix, attention, traffic) if matrix or attention or traffic else None


# First words of the lines of work that a module of Megatron-Core is made of.
_MODULE_WORK = {
    "layernorm": ("input", "pre_ffn"),
    "moe_act": ("expert_activation",),
    "mlp": ("gate", "up", "down", "activation", "mlp"),
    "moe": ("router", "expert_", "shared_", "permute"),
    "shared_experts": ("shared_",),
    "mla_up_proj": ("q_b", "kv_b", "rope"),
}


def _sum(name: str, matrix: list[Line], attention: list[Line], traffic: list[Line]) -> Line:
    parts = [
        total(part, tuple(lines), unit="s")
        for part, lines in (("matrices", matrix), ("attention", attention), ("elementwise", traffic))
        if lines
    ]
    return total(name, tuple(parts), unit="s")


@dataclass(frozen=True, slots=True)
class Shape:
    """The tokens a layer sees on one rank."""

    tokens: Num  # rows of activations: micro_batch x seq_len / cp
    sequences: Num
    seq_len: Num
    memory_len: Num  # encoder tokens a cross attention reads


def add_elementwise(
    work: LayerWork,
    name: str,
    tokens: Num,
    width: Num,
    passes: tuple[float, float],
    element_bytes: Num,
    device: Device,
) -> None:
    """Kernels bound by memory: `passes` reads or writes of a tensor forward, and backward."""
    for lines, count in ((work.traffic, passes[0]), (work.traffic_back, passes[1])):
        moved = compute(
            "bytes",
            f.elementwise_bytes,
            tokens=tokens,
            width=width,
            passes=count,
            element_bytes=element_bytes,
        )
        lines.append(device.move(name, moved))
