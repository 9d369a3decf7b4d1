"""Formulas against PyTorch itself, on CPU: small modules on the code paths the formulas stand for.

Saved tensors are counted by storage with saved_tensors_hooks, live tensors with a dispatch mode and weak
references on storages. What CUDA does otherwise is in the tests: attention runs CPU's flash kernel, which
keeps q, k, v, out and log-sum-exp as CUDA's does.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpucalc.builders.build import build_graph
from gpucalc.formulas import activations as act
from gpucalc.formulas import losses
from gpucalc.formulas import memory as mem
from gpucalc.plan.activation import layer_line
from gpucalc.plan.resolve import resolve_recipe, settle
from gpucalc.plan.selective import selective_line
from gpucalc.spec.model import ModelSpec
from gpucalc.spec.train_run import TrainRun

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map_  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

BF16 = torch.bfloat16
BATCH, SEQ, HIDDEN, HEADS, KV_HEADS, HEAD, FFN = 2, 64, 128, 4, 2, 32, 352
TOKENS = BATCH * SEQ


# --- instruments -------------------------------------------------------------------------------------------


def saved_bytes(run: Callable[..., Any], held: Any, *inputs: Any) -> int:
    """Bytes of storages that autograd keeps of a forward pass, without those held anyway."""
    own = {tensor.untyped_storage().data_ptr() for tensor in held}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(*inputs)
    del out
    return sum(storage.nbytes() for storage in kept.values())


class Live(TorchDispatchMode):
    """Bytes of live storages made inside the mode, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

    def _add(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        self.now += storage.nbytes()
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def hold(self, tensors: Any) -> None:
        """Storages that were there before, which operations return views of or write to."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.seen.add(storage._cdata)
            weakref.finalize(storage, self.seen.discard, storage._cdata)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tree_map_(self._add, out)
        self.peak = max(self.peak, self.now)
        return out


@contextlib.contextmanager
def live(*held: Any) -> Iterator[Live]:
    gc.collect()
    mode = Live()
    mode.hold(held)
    with mode:
        yield mode


# --- one layer ---------------------------------------------------------------------------------------------


class WrittenOut(nn.Module):
    """RMSNorm as Llama's code in transformers writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Layer(nn.Module):
    """A Llama layer, or a Qwen3 one with norms on query and key heads."""

    def __init__(self, qk_norm: bool = False) -> None:
        super().__init__()
        sizes = {
            "q": (HIDDEN, HEADS * HEAD), "k": (HIDDEN, KV_HEADS * HEAD), "v": (HIDDEN, KV_HEADS * HEAD),
            "o": (HEADS * HEAD, HIDDEN), "gate": (HIDDEN, FFN), "up": (HIDDEN, FFN), "down": (FFN, HIDDEN),
        }  # fmt: skip
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))
        self.before, self.between = WrittenOut(HIDDEN), WrittenOut(HIDDEN)
        self.q_norm = WrittenOut(HEAD) if qk_norm else nn.Identity()
        self.k_norm = WrittenOut(HEAD) if qk_norm else nn.Identity()

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        y = self.before(x)
        q, k, v = (part(y).view(*y.shape[:2], -1, HEAD) for part in (self.q, self.k, self.v))
        q, k = (
            rotated(self.q_norm(q).transpose(1, 2), cos, sin),
            rotated(self.k_norm(k).transpose(1, 2), cos, sin),
        )
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).reshape(*y.shape[:2], -1))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def layer_and_inputs(dtype: Any, *, qk_norm: bool = False) -> tuple[Any, tuple[Any, Any, Any]]:
    torch.manual_seed(0)
    layer = Layer(qk_norm).to(dtype)
    table = torch.randn(SEQ, HEAD, dtype=dtype)
    return layer, (torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True), table, table)


def planned(architecture: str = "llama", **run: Any) -> tuple[Any, Any]:
    spec = {
        "name": "layer", "architecture": architecture, "layers": 2, "vocab": 512, "hidden": HIDDEN,
        "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD, "ffn": FFN,
    }  # fmt: skip
    graph = build_graph(ModelSpec.read(spec))
    base = {"framework": "ddp", "precision": "bf16-pure", "seq_len": SEQ, "micro_batch": BATCH}
    settled, _ = settle(TrainRun.read({**base, **run}))
    return graph.trunk.blocks[0], resolve_recipe(settled, graph)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-pure", BF16), ("fp32", torch.float32)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_layer_written_out(architecture: str, precision: str, dtype: Any) -> None:
    layer, inputs = layer_and_inputs(dtype, qk_norm=architecture == "qwen3")
    kept = saved_bytes(layer, [*layer.parameters(), *inputs], *inputs)
    block, recipe = planned(architecture, precision=precision)
    line = layer_line(block, recipe, seq_len=SEQ)
    # At 32 bit the norm keeps its input itself, which is held here.
    shared = 0 if dtype == BF16 else 4 * HIDDEN
    assert kept == (line.value - shared) * TOKENS


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_compiled_layer_keeps_what_fused_kernels_keep(architecture: str) -> None:
    """Inductor's partitioner (min-cut, with its decompositions), the graphs run by PyTorch's own kernels."""
    layer, inputs = layer_and_inputs(BF16, qk_norm=architecture == "qwen3")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager_decomp_partition")
    kept = saved_bytes(compiled, [*layer.parameters(), *inputs[1:]], *inputs)
    block, recipe = planned(architecture, compile=True)
    assert kept == layer_line(block, recipe, seq_len=SEQ).value * TOKENS


def test_norms() -> None:
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    weight = nn.Parameter(torch.ones(HIDDEN))
    # One kernel: the input and rstd. Composed in 16 bit (no fused kernel on CPU): two fp32 tensors and rstd.
    fused = saved_bytes(lambda x: F.rms_norm(x, (HIDDEN,), None, 1e-6), [], x)
    assert fused == TOKENS * act.fused_rmsnorm_saved_bytes(width=HIDDEN, rows=1, activation_bytes=4)
    composed = saved_bytes(lambda x: F.rms_norm(x, (HIDDEN,), weight, 1e-6), [weight], x.to(BF16))
    assert composed == TOKENS * act.rmsnorm_fp32_weight_saved_bytes(width=HIDDEN, rows=1)
    normed = saved_bytes(lambda x: F.layer_norm(x, (HIDDEN,), weight, weight), [weight], x)
    assert normed == TOKENS * act.layernorm_saved_bytes(width=HIDDEN, activation_bytes=4)


def test_autocast_keeps_a_copy_of_every_weight_and_of_the_input_for_each() -> None:
    linears = [nn.Linear(HIDDEN, width, bias=False) for width in (128, 64, 64)]
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    held = [*(linear.weight for linear in linears), x]

    def run(x: Any) -> Any:
        with torch.autocast("cpu", BF16):
            y = 2 * x  # autocast would cache the copy of a leaf
            return sum(linear(y).sum() for linear in linears)

    copies = mem.autocast_weight_bytes(linear_params=HIDDEN * 256)
    inputs = TOKENS * act.linear_input_saved_bytes(width=HIDDEN, element_bytes=2, copies=3)
    assert saved_bytes(run, held, x) == copies + inputs


@pytest.mark.parametrize("reentrant", [True, False])
def test_autocast_holds_its_copies_of_weights_until_forward_is_done(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    linear = nn.Linear(HIDDEN, 256, bias=False)
    x = 2 * torch.randn(TOKENS, HIDDEN, requires_grad=True)  # the copy of a leaf would be held too
    with live(linear.weight, x) as mode:
        with torch.autocast("cpu", BF16):
            out = checkpoint(linear, x, use_reentrant=reentrant)
            inside = mode.now - out.nbytes
        gc.collect()
        after = mode.now - out.nbytes
    copies = mem.autocast_weight_bytes(linear_params=HIDDEN * 256)
    assert inside - after == copies


# --- recomputation -----------------------------------------------------------------------------------------


def test_full_recomputation_keeps_layer_inputs() -> None:
    from torch.utils.checkpoint import checkpoint

    layer, inputs = layer_and_inputs(BF16)

    def run(x: Any, cos: Any, sin: Any) -> Any:
        for _ in range(3):
            x = checkpoint(layer, x, cos, sin, use_reentrant=False)
        return x

    with live(*layer.parameters(), *inputs) as mode:
        out = run(*inputs)
        between = mode.now - out.nbytes  # the third layer's input is the second's output
    one = act.checkpoint_bytes(hidden=HIDDEN, tokens=TOKENS, activation_bytes=2, shards=1)
    assert between == 2 * one


def test_selective_recomputation_by_operation() -> None:
    """torchtitan's policy: attention and every second matrix product of a layer are kept."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    layer, inputs = layer_and_inputs(BF16)
    products = {"forward": 0, "recompute": 0}

    def policy(ctx: Any, function: Any, *_: Any, **__: Any) -> Any:
        mode = "recompute" if ctx.is_recompute else "forward"
        if function == torch.ops.aten.mm.default:
            products[mode] += 1
            keep = products[mode] % 2 == 1
        else:
            keep = "attention" in str(function)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    with live(*layer.parameters(), *inputs) as mode:
        out = checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)
        kept = mode.now - out.nbytes
    block, recipe = planned(framework="torchtitan", precision="bf16", recompute="selective-op")
    line = selective_line(block, recipe, seq_len=SEQ)
    held = TOKENS * line.child("layer_input").value  # is held by the caller here
    assert kept == TOKENS * line.value - held


def test_selective_recomputation_by_operation_compiled() -> None:
    """The same policy under inductor's partitioner, which drops a result that only joins the residual."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def contexts() -> Any:
        products = {"forward": 0, "recompute": 0}

        def policy(ctx: Any, function: Any, *_: Any, **__: Any) -> Any:
            mode = "recompute" if ctx.is_recompute else "forward"
            keep = "attention" in str(function)
            if function == torch.ops.aten.mm.default:
                products[mode] += 1
                keep = products[mode] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    layer, inputs = layer_and_inputs(BF16)
    torch._dynamo.reset()
    wrapped = checkpoint_wrapper(layer, context_fn=contexts, preserve_rng_state=False)
    compiled = torch.compile(wrapped, backend="aot_eager_decomp_partition")
    kept = saved_bytes(compiled, [*layer.parameters(), *inputs[1:]], *inputs)
    block, recipe = planned(framework="torchtitan", precision="bf16", recompute="selective-op", compile=True)
    assert kept == TOKENS * selective_line(block, recipe, seq_len=SEQ).value


def test_activations_on_the_host_leave_none_on_the_device() -> None:
    """save_on_cpu copies every saved tensor; what stays is what the layer holds while it runs."""
    layer, inputs = layer_and_inputs(BF16)
    moved: list[int] = []

    def pack(tensor: Any) -> Any:
        moved.append(tensor.untyped_storage().nbytes())
        return tensor.to("meta")  # another device than the one counted

    with live(*layer.parameters(), *inputs) as mode:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = layer(*inputs)
        assert mode.now == out.nbytes
    assert sum(moved) > 0


# --- loss --------------------------------------------------------------------------------------------------


def test_loss_in_fp32_of_16_bit_logits() -> None:
    vocab = 4000
    logits = torch.randn(TOKENS, vocab, dtype=BF16, requires_grad=True)
    labels = torch.randint(0, vocab, (TOKENS,))
    kept = TOKENS * losses.unfused_loss_saved_bytes(vocab=vocab, loss_bytes=4)
    with live(logits, labels) as mode:
        loss = F.cross_entropy(logits.float(), labels)
        forward, after = mode.peak, mode.now
        mode.peak = mode.now
        loss.backward()
    # Logits and labels were there before. Their fp32 copy is alive while the log-softmax is made.
    ids = 8 * TOKENS
    copy = TOKENS * losses.loss_forward_bytes(vocab=vocab, activation_bytes=2, loss_bytes=4) - logits.nbytes
    assert forward == pytest.approx(kept - ids + copy, abs=64)
    assert after == pytest.approx(kept - ids, abs=64)
    gradients = losses.loss_backward_bytes(vocab=vocab, activation_bytes=2, loss_bytes=4, logits_kept=0)
    assert mode.peak == pytest.approx(kept - ids + TOKENS * gradients, abs=64)


# --- experts -----------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Dropless routed experts, each run on the rows sent to it."""

    def __init__(self, experts: int, top_k: int, ffn: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(experts, HIDDEN, ffn) * 0.02) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, ffn, HIDDEN) * 0.02)

    def forward(self, x: Any, exchange: Callable[[Any], Any] = lambda rows: rows) -> Any:
        scores = self.router(x).float().softmax(-1)
        weights, chosen = scores.topk(self.top_k, -1)
        order = chosen.view(-1).argsort(stable=True)
        rows = exchange(x[order // self.top_k])  # permuted, and sent to the experts' ranks
        counts = torch.bincount(chosen.view(-1), minlength=len(self.gate)).tolist()
        out = torch.cat(
            [
                (F.silu(part @ self.gate[e]) * (part @ self.up[e])) @ self.down[e]
                for e, part in enumerate(rows.split(counts))
            ]
        )
        out = exchange(out) * weights.view(-1)[order].unsqueeze(-1).to(out.dtype)
        return out[order.argsort()].view(len(x), self.top_k, -1).sum(1)


@pytest.mark.parametrize("exchanged", [False, True], ids=["one-rank", "all-to-all"])
def test_routed_experts(exchanged: bool) -> None:
    """Expert parallelism sends rows before and after; the exchange keeps nothing of its own."""
    experts, top_k, ffn = 8, 2, 96
    torch.manual_seed(0)
    layer = Experts(experts, top_k, ffn).to(BF16)
    x = torch.randn(TOKENS, HIDDEN, dtype=BF16, requires_grad=True)

    class AllToAll(torch.autograd.Function):  # of a balanced group: as many rows come as go
        @staticmethod
        def forward(_: Any, rows: Any) -> Any:
            return rows.clone()

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            return gradient.clone()

    exchange = AllToAll.apply if exchanged else lambda rows: rows
    kept = saved_bytes(lambda x: layer(x, exchange), [*layer.parameters(), x], x)
    routed = act.moe_saved_bytes(
        top_k=top_k,
        width=HIDDEN,
        wide_tensors=2,
        expert_ffn=ffn,
        expert_tensors=4,
        input_tensors=1,
        activation_bytes=2,
        input_bytes=2,
        imbalance=1.0,
        stash_factor=1,
    )
    router = act.router_saved_bytes(experts=experts, top_k=top_k)
    assert kept == pytest.approx(TOKENS * (routed + router), rel=0.02)


# --- adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (BF16, 2)], ids=["fp32", "bf16"])
def test_adapters_on_a_frozen_linear(dtype: Any, size: int) -> None:
    rank = 8
    base = nn.Linear(HIDDEN, FFN, bias=False).to(BF16).requires_grad_(False)
    down, up = (nn.Linear(*shape, bias=False).to(dtype) for shape in ((HIDDEN, rank), (rank, FFN)))
    x = torch.randn(TOKENS, HIDDEN, dtype=BF16, requires_grad=True)

    def run(x: Any) -> Any:
        return base(x) + up(down(x.to(dtype))).to(BF16)

    kept = saved_bytes(run, [base.weight, down.weight, up.weight], x)
    assert kept == TOKENS * act.lora_saved_bytes(inputs=HIDDEN, rank=rank, element_bytes=size, dropout=0)


# --- optimizers and frameworks -----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "temporaries"), [("foreach", 1), ("fused", 0)])
def test_temporaries_of_an_adamw_step(kind: str, temporaries: int) -> None:
    weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(6)]
    optimizer = torch.optim.AdamW(weights, **{kind: True})
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    held = [
        *weights,
        *(weight.grad for weight in weights),
        *(state for states in optimizer.state.values() for state in states.values()),
    ]
    with live(*held) as mode:
        optimizer.step()
    params = 6 * 64 * 64
    whole = mem.foreach_step_bytes(
        params=params, state_bytes=4 * temporaries, shard=1, sub_group_elements=params
    )
    assert mode.peak == pytest.approx(whole, abs=1024)


def test_muon_keeps_one_momentum() -> None:
    weights = [nn.Parameter(torch.randn(64, 96)) for _ in range(3)]
    optimizer = torch.optim.Muon(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    states = sum(state.nbytes for held in optimizer.state.values() for state in held.values())
    params = 3 * 64 * 96
    assert states == mem.optimizer_state_bytes(params=params, bytes_per_param=4, shard=1, zero_stage=0)
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([nn.Parameter(torch.randn(64))])


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    """A gloo group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.usefixtures("group")
def test_ddp_buckets(views: bool) -> None:
    """Two gloo processes hold the same: buckets as large as all gradients, or gradients that lie in them."""
    from torch.profiler import ProfilerActivity, profile

    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    params = 8 * 256**2

    def allocated(run: Callable[[], Any]) -> tuple[int, Any]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            result = run()
        return sum(event.self_cpu_memory_usage for event in recorded.events()), result

    made, ddp = allocated(
        lambda: nn.parallel.DistributedDataParallel(
            module, gradient_as_bucket_view=views, broadcast_buffers=False, init_sync=False
        )
    )
    for _ in range(2):
        ddp(torch.randn(4, 256)).sum().backward()
    assert made == mem.ddp_bucket_bytes(params=params, element_bytes=4)
    storages = {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert len(storages) < 8 if views else len(storages) == 8


def test_zero_redundancy_optimizer_shards_states() -> None:
    """torch's own stage 1: ranks hold states of whole tensors, as even as those divide."""
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(8)]
        optimizer = ZeroRedundancyOptimizer(weights, torch.optim.AdamW, foreach=True)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.optim.step()
        states = sum(
            state.nbytes
            for states in optimizer.optim.state.values()
            for state in states.values()
            if state.dim()
        )
    finally:
        dist.destroy_process_group()
    assert states == mem.optimizer_state_bytes(params=8 * 64**2, bytes_per_param=8, shard=4, zero_stage=1)


# --- optimizers --------------------------------------------------------------------------------------------


def test_adafactor_keeps_means_of_rows_and_columns() -> None:
    from gpucalc.formulas import optimizers as opt

    weights = [nn.Parameter(torch.randn(96, 40)), nn.Parameter(torch.randn(64))]
    optimizer = torch.optim.Adafactor(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = sum(
        value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step"
    )
    assert kept == opt.adafactor_state_bytes(
        sides=96 + 40, other_params=64, element_bytes=4, shard=1, zero_stage=0
    )


# --- attention written out ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "wide", "kept"), [(BF16, 4, 6), (BF16, 2, 2), (torch.float32, 4, 4)], ids=str
)
def test_scores_alive_in_the_backward_of_written_out_attention(dtype: Any, wide: int, kept: int) -> None:
    length = 256
    q, k, v = (torch.randn(1, HEADS, length, HEAD, dtype=dtype, requires_grad=True) for _ in range(3))
    as_fp32 = torch.float32 if wide > dtype.itemsize else None
    with live(q, k, v) as mode:
        scores = torch.matmul(q, k.transpose(2, 3)) * HEAD**-0.5
        weights = F.softmax(scores, dim=-1, dtype=as_fp32).to(dtype)
        del scores
        out = torch.matmul(weights, v)
        del weights
        saved = mode.now - out.nbytes
        gradient = torch.randn_like(out)
        mode.peak = before = mode.now
        out.backward(gradient)
        more = mode.peak - before
    assert saved == kept * HEADS * length**2
    beyond = act.eager_attention_backward_bytes(
        heads=HEADS,
        span=length,
        tokens=length,
        softmax_bytes=wide,
        probability_bytes=kept,
        freed_bytes=0,
        tp=1,
    )
    assert more == beyond + v.nbytes  # the gradient of the values is there first
