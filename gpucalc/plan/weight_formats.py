"""Bytes per parameter of every format weights are served in, and what of a model a format leaves alone.

Bits follow from block layouts: element bits plus scales and zero points spread over a block. GGUF mixes
choose the type tensor by tensor; the rules are those of llama.cpp's quantiser.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpucalc.counts import count
from gpucalc.errors import UnknownName, nearest
from gpucalc.graph import Attention, Graph, Moe
from gpucalc.plan.serving_layout import WeightFormat
from gpucalc.spec.model import ModelSpec, WeightsSpec

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# ggml block layouts: bytes of a block over its elements (ggml-common.h).
GGML = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_0": 22 / 32,
    "q5_1": 24 / 32,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
    "q6_k": 210 / 256,
    "q5_k": 176 / 256,
    "q4_k": 144 / 256,
    "q3_k": 110 / 256,
    "q2_k": 84 / 256,
    "iq4_nl": 18 / 32,
    "iq4_xs": 136 / 256,
    "iq3_s": 110 / 256,
    "iq3_xxs": 98 / 256,
    "iq2_s": 82 / 256,
    "iq2_xs": 74 / 256,
    "iq2_xxs": 66 / 256,
    "iq1_m": 56 / 256,
    "iq1_s": 50 / 256,
}
KV_BYTES = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp32": 4.0,
    "fp8": 1.0,
    "int8": 1.0,
    **{name: GGML[name] for name in ("q8_0", "q5_0", "q5_1", "q4_0", "q4_1")},
}
_GROUP = 128  # weights per scale in published GPTQ and AWQ checkpoints
_INT4 = (4 + 16 / _GROUP + 4 / _GROUP) / 8  # fp16 scale and packed 4-bit zero point per group
_INT8 = (8 + 16 / _GROUP + 8 / _GROUP) / 8
_FP8_BLOCK = 1 + 4 / 128**2  # fp32 scale per 128 x 128 block
_MXFP4 = (4 + 8 / 32) / 8  # OCP microscaling: 8-bit scale per 32
_MXFP8 = (8 + 8 / 32) / 8
_NVFP4 = (4 + 8 / 16) / 8  # fp8 scale per 16
_NF4 = (4 + 32 / 64) / 8  # fp32 absmax per 64

# Held in 16 bit by every stack met: small, or read in another way.
KEPT = (
    "router",
    "mixer_streams",
    "ffn_streams",
    "merge_streams",
    "shared_expert_gate",
    "index_weights",
    "ba",
)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A format of safetensors checkpoints: one size for every quantised matrix.

    experts_only: of a model that has experts; of others every matrix.
    """

    bytes_per_param: float
    math: str
    computes: bool
    source: str
    experts_only: bool = False
    keeps: tuple[str, ...] = ()  # matrices left in 16 bit beside those every format leaves


_STORED = {
    "fp8": _Stored(_FP8_BLOCK, "fp8", True, "fp8 weights, fp32 scale per 128 x 128 block or per channel"),
    "fbgemm-fp8": _Stored(
        1.0,
        "fp8",
        True,
        "FBGEMM fp8: feed-forward matrices alone, scale per channel",
        keeps=("q", "k", "v", "o"),
    ),
    "int8": _Stored(1.0, "int8", False, "one byte a weight, scale per channel"),
    "w8a8-int8": _Stored(1.0, "int8", True, "compressed-tensors w8a8: one byte a weight, scale per channel"),
    "int4": _Stored(
        (4 + 16 / _GROUP) / 8, "int4", False, "compressed-tensors w4a16: 16-bit scale per 128, symmetric"
    ),
    "awq": _Stored(_INT4, "int4", False, "AWQ: 4 bits, 16-bit scale and 4-bit zero point per 128"),
    "gptq-int4": _Stored(_INT4, "int4", False, "GPTQ: 4 bits, 16-bit scale and 4-bit zero point per 128"),
    "gptq-int8": _Stored(_INT8, "int8", False, "GPTQ: 8 bits, 16-bit scale and 8-bit zero point per 128"),
    "nf4": _Stored(_NF4, "int4", False, "bitsandbytes NF4: 4 bits, fp32 absmax per 64"),
    "mxfp4": _Stored(_MXFP4, "fp4", False, "OCP MXFP4: 4 bits, 8-bit scale per 32", experts_only=True),
    "mxfp8": _Stored(_MXFP8, "fp8", True, "OCP MXFP8: 8 bits, 8-bit scale per 32"),
    "nvfp4": _Stored(_NVFP4, "fp4", True, "NVFP4: 4 bits, fp8 scale per 16"),
}


def weight_format(quant: str | None, dtype: str, spec: ModelSpec, graph: Graph) -> tuple[WeightFormat, str]:
    """The format of a run's weights, and why where nobody said. Raises UnknownName.

    quant None: as the model is published.
    """
    kept = float(DTYPE_BYTES[dtype])
    published = quant is None or quant in published_formats(spec)
    if spec.weights is not None and (published or quant == spec.quantization) and dtype != "fp32":
        base, why = _published(dtype, kept, spec) if published else (gguf(str(quant), graph), "")
        held = _as_stored(base, spec.weights, graph)
        if held is not None:
            return held, why or f"the file is {quant}"
    if published or quant is None:
        return _published(dtype, kept, spec)
    if quant == "none":
        return _plain(dtype, kept), ""
    if quant in _STORED:
        routed = any(isinstance(block.ffn, Moe) for stack in graph.stacks for block in stack.blocks)
        return _stored(quant, kept, dtype, routed=routed), ""
    return gguf(quant, graph), ""


def _plain(dtype: str, kept: float) -> WeightFormat:
    return WeightFormat(dtype, kept, kept, kept, kept, kept, math=dtype, source="element type")


def is_gguf(quant: str) -> bool:
    """Whether a format is one of llama.cpp's files, by its name."""
    return quant != "none" and quant not in _STORED


def _stored(quant: str, kept: float, dtype: str, *, routed: bool = True) -> WeightFormat:
    known = _STORED[quant]
    return WeightFormat(
        name=quant,
        linear=kept if known.experts_only and routed else known.bytes_per_param,
        expert=known.bytes_per_param,
        embedding=kept,
        head=kept,
        rest=kept,
        math=known.math if known.computes else dtype,
        computes_quantised=known.computes,
        exceptions=dict.fromkeys((*KEPT, *known.keeps), kept),
        source=known.source,
    )


def _as_stored(base: WeightFormat, weights: WeightsSpec, graph: Graph) -> WeightFormat | None:
    """The format with the bytes the files' headers state; None where they hold another model than is drawn.

    Files may hold prediction layers a deployment does not load, or pack parameters in a way that is not
    known: then their parameters are not those of the graph.
    """
    params, size = weights.params_by_part, weights.bytes_by_part
    whole = float(count(graph).total.value)
    if abs(sum(params.values()) / whole - 1) > STORED_TOLERANCE:
        return None

    def each(*parts: str, otherwise: float) -> float:
        number = sum(params.get(part, 0) for part in parts)
        return sum(size.get(part, 0) for part in parts) / number if number else otherwise

    embedding = each("embedding", otherwise=base.embedding)
    return replace(
        base,
        linear=each("linear", otherwise=base.linear),
        expert=each("experts", otherwise=base.expert),
        embedding=embedding,
        head=each("head", otherwise=embedding),
        rest=each("rest", "vision", otherwise=base.rest),
        exceptions=None,
        kind="exact",
        source="headers of the weights files",
    )


# How far the parameters of files may be from the graph's: buffers that are stored, padded vocabularies.
STORED_TOLERANCE = 0.005

# Element types an importer reads from a checkpoint's quantisation, and the stored format each is.
_CHECKPOINTS = {
    "awq": "awq",
    "gptq": "gptq-int4",
    "w4a16": "int4",
    "nvfp4": "nvfp4",
    "nf4": "nf4",
    "int8": "int8",
    "fbgemm-fp8": "fbgemm-fp8",
}


def published_formats(spec: ModelSpec) -> tuple[str, ...]:
    """The formats a model is published in, by our names."""
    words = (spec.native_dtype or "").lower()
    if words in _CHECKPOINTS:
        return (_CHECKPOINTS[words],)
    return tuple(
        name
        for name, found in (("mxfp4", "mxfp4"), ("fp8", "fp8"), ("fp8", "float8"), ("int4", "int4"))
        if found in words
    )


def _published(dtype: str, kept: float, spec: ModelSpec) -> tuple[WeightFormat, str]:
    """Published checkpoints are 16 bit, unless the model file says which parts are smaller."""
    native = (spec.native_dtype or "").lower()
    if native in _CHECKPOINTS:
        return _stored(_CHECKPOINTS[native], kept, dtype), f"the checkpoint is {spec.quantization or native}"
    if "fp4" in native and "mxfp4" not in native:  # fp8 matrices around fp4 experts
        around = _stored("fp8", kept, dtype)
        inner = _stored("mxfp4", kept, dtype)
        mixed = replace(
            around,
            name="fp8+fp4-experts",
            expert=inner.expert,
            source=f"{around.source}; experts {inner.source}",
        )
        return mixed, f"published with {spec.native_dtype}"
    for word, quant in (("mxfp4", "mxfp4"), ("float8", "fp8"), ("fp8", "fp8"), ("int4", "int4")):
        if word in native:
            found = _stored(quant, kept, dtype)
            if quant == "int4":  # Kimi: routed experts alone, a scale per 32
                each = (4 + 16 / 32) / 8
                found = replace(found, linear=kept, expert=each, source="4 bits, 16-bit scale per 32")
            return found, f"published with {spec.native_dtype}"
    return _plain(dtype, kept), f"no quantisation: {dtype} as published"


def as_gguf(quant: str | None, spec: ModelSpec) -> tuple[str | None, str]:
    """The GGUF type of a run's weights, and why where it is not the one asked for.

    Raises UnknownName for formats that only checkpoints of other engines have.
    """
    native = published_formats(spec)
    if quant == "mxfp4" or (quant is None and "mxfp4" in native):
        return "mxfp4_moe", "GGUF files keep MXFP4 for experts and hold the rest in eight bits"
    if quant is None and native:
        return "q8_0", f"published in {native[0]}, which GGUF has no type for; eight bits are the nearest"
    if quant in _STORED:
        legal = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "iq3_xxs", "iq2_xxs", "f16")
        raise UnknownName("llama.cpp reads GGUF files", key="run.quant", given=quant, legal=legal)
    return quant, ""


# -- GGUF -----------------------------------------------------------------------------------------


def gguf(name: str, graph: Graph) -> WeightFormat:
    """The bytes of a GGUF mix for one model. Raises UnknownName."""
    asked = name.lower().replace("-", "_").removeprefix("ud_")
    asked = {"f32": "f32", "fp16": "f16"}.get(asked, asked)
    dynamic = name.lower().startswith(("ud_", "ud-")) or asked.endswith("_xl")
    if asked.endswith("_xl"):
        asked = asked.removesuffix("_xl") + ("" if asked.startswith("q2") else "_m")
        asked = {"q8_k_m": "q8_0", "q6_k_m": "q6_k"}.get(asked, asked)
    if asked in ("q3_k", "q4_k", "q5_k"):
        asked += "_m"  # what llama.cpp's quantiser takes them for
    mix = _mix(asked, graph)
    if mix is None:
        legal = (
            *("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"),
            *("q8_0", "f16", "iq4_xs", "iq4_nl", "iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq1_s"),
            "mxfp4_moe",
        )
        raise UnknownName(
            "unknown GGUF type", key="run.quant", given=name, legal=legal, near=nearest(asked, legal)
        )
    base, head, table, exceptions = mix
    exceptions |= dict.fromkeys(KEPT, 4.0)
    return WeightFormat(
        name=name,
        linear=base,
        expert=exceptions.pop("experts", base),
        embedding=table,
        head=head,
        rest=4.0,
        math="fp16",
        exceptions=exceptions,
        kind="assumed" if dynamic else "exact",
        source="ggml block layouts, types by llama.cpp's quantiser"
        + ("; a dynamic mix differs per model and is taken as the plain one" if dynamic else ""),
    )


def _mix(name: str, graph: Graph) -> tuple[float, float, float, dict[str, float]] | None:
    """Bytes of most matrices, of the head, of the token table, and of what differs."""
    g = GGML
    layers = len(graph.trunk.layers)
    more = sum(_more_bits(i, layers) for i in range(layers)) / layers
    eighth = max(1, layers // 8) / layers
    attention = next((b.mixer for b in graph.trunk.blocks if isinstance(b.mixer, Attention)), None)
    grouped = attention is not None and attention.heads // max(attention.kv_heads, 1) >= 4
    eight = any(isinstance(b.ffn, Moe) and b.ffn.experts == 8 for b in graph.trunk.blocks)
    large = layers == 80 and grouped  # the 70B rule of the quantiser

    def parts(v: float, down: float, **more_of: float) -> dict[str, float]:
        found = {"v": v, "down": down, "shared_down": down, "expert_down": down, **more_of}
        if eight:
            found |= {"k": g["q8_0"], "v": g["q8_0"]}
        return found

    def blend(share: float, many: str, few: str) -> float:
        return share * g[many] + (1 - share) * g[few]

    if name == "mxfp4_moe":  # experts as published, the rest in eight bits
        return g["q8_0"], g["q8_0"], g["q8_0"], {"experts": _MXFP4}
    if name in ("f32", "f16", "bf16", "q8_0", "q6_k"):
        return g[name], g[name], g[name], {}
    if name in ("q4_0", "q4_1", "q5_0", "q5_1"):
        return g[name], g["q6_k"], g[name], {"k": g["q8_0"], "v": g["q8_0"]} if eight else {}
    if name in ("q4_k_m", "q5_k_m"):
        low = name[:4]
        v = blend(more, "q6_k", "q5_k" if large and low == "q4_k" else low)
        found = parts(v, blend(more, "q6_k", low))
        if eight and low == "q4_k":
            found["o"] = g["q5_k"]
        return g[low], g["q6_k"], g[low], found
    if name in ("q4_k_s", "q5_k_s"):
        low = name[:4]
        if low == "q5_k":
            return g[low], g["q6_k"], g[low], parts(g[low], g[low])
        down = blend(eighth, "q5_k", low)
        v = g["q5_k"] if large else blend(4 / layers, "q5_k", low)
        found = parts(v, down)
        if eight:
            found["o"] = g["q5_k"]
        return g[low], g["q6_k"], g[low], found
    if name == "q3_k_s":
        v = g["q4_k"] if large else g["q3_k"]
        return g["q3_k"], g["q6_k"], g["q3_k"], parts(v, g["q3_k"])
    if name == "q3_k_m":
        first = max(1, layers // 16) / layers
        down = first * g["q5_k"] + (more - first / 2) * g["q4_k"] + (1 - first / 2 - more) * g["q3_k"]
        v = g["q5_k"] if large else blend(2 / layers, "q5_k", "q4_k")
        return g["q3_k"], g["q6_k"], g["q3_k"], parts(v, down, o=g["q4_k"])
    if name == "q3_k_l":
        return g["q3_k"], g["q6_k"], g["q3_k"], parts(g["q5_k"], g["q5_k"], o=g["q5_k"])
    if name in ("q2_k", "q2_k_s"):
        return (
            g["q2_k"],
            g["q6_k"],
            g["q2_k"],
            parts(g["q4_k"] if grouped else g["q3_k"], g["q3_k"], o=g["q3_k"]),
        )
    if name in ("iq4_xs", "iq4_nl"):
        v = g["q5_k"] if grouped else g[name]
        return g[name], g["q6_k"], g[name], parts(v, g[name])
    if name in ("iq3_s", "iq3_m", "iq3_xs", "iq3_xxs"):
        low = "iq3_xxs" if name == "iq3_xs" else name.replace("iq3_m", "iq3_s")
        down = blend(eighth, "q4_k", low) if name in ("iq3_m", "iq3_xs") else g[low]
        v = g["q4_k"] if grouped else g["iq3_s"]
        head = g["q5_k"] if name == "iq3_xxs" else g["q6_k"]
        return g[low], head, g["iq3_s"], parts(v, down, o=g["iq3_s"])
    if name in ("iq2_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_s", "iq1_m"):
        low = "iq2_s" if name == "iq2_m" else name
        down = blend(eighth, "q2_k" if name in ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs") else "iq3_s", low)
        v = g["q4_k"] if grouped else g["q2_k"]
        return g[low], g["q5_k"], g["q2_k" if name[:3] in ("iq1",) else "iq3_s"], parts(v, down)
    return None


def _more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's use_more_bits: the first and last eighth, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
