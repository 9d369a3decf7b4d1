"""What a quantised checkpoint holds its matrices in."""

from __future__ import annotations

from gpucalc.importers.config.reader import Reader

# What a quantised checkpoint holds its matrices in, by the method its configuration names.
_HELD = {
    "awq": "awq", "gptq": "gptq", "fbgemm_fp8": "fbgemm-fp8", "fp8": "fp8",
    "mxfp4": "mxfp4", "nvfp4": "nvfp4",
}  # fmt: skip


def quantization(c: Reader) -> tuple[str | None, str | None]:
    """The quantisation in words, and the element type its matrices are stored in where that is clear."""
    inner = c.group("quantization_config", "compression_config")
    if inner is None:
        return None, None
    method = inner.get("quant_method", "quant_type", "quant_algo")
    algorithm = inner.get("quant_algo")
    bits = inner.whole("bits", "w_bit", "num_bits")
    kind = None
    if bits is None and inner.get("load_in_4bit", "_load_in_4bit"):
        bits, kind = 4, "nf4"
    if bits is None and inner.get("load_in_8bit", "_load_in_8bit"):
        bits, kind = 8, "int8"
    groups = inner.group("config_groups")
    named: str | None = None
    if groups is not None:
        for group in list(groups.config):
            part = groups.group(group)
            weights = part.group("weights") if part is not None else None
            if weights is None or bits is not None:
                continue
            bits, named = weights.whole("num_bits"), str(weights.get("type") or "int")
            weights.used.update(weights.config)
        groups.used.update(groups.config)
        for part in groups.inner:
            part.used.update(part.config)
    words = str(algorithm or method or "").lower()
    held = kind or next((ours for word, ours in _HELD.items() if word in words), None)
    if held == "gptq" and bits == 8:
        held = "int8"
    if held is None and named is not None and bits is not None:
        held = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "w4a16", ("float", 4): "nvfp4"}.get(
            (named, bits)
        )
        spared = inner.config.get("ignore")
        if held == "w4a16" and isinstance(spared, list) and any("attn" in str(name) for name in spared):
            held = "int4 experts"
    inner.used.update(
        ("ignore", "producer", "kv_cache_scheme", "activation_scheme", "fmt", "scale_fmt", "format", "sym",
         "weight_block_size", "modules_to_not_convert", "group_size", "zero_point", "version", "desc_act")
    )  # fmt: skip
    text = " ".join(str(part) for part in (method, f"{bits}-bit" if bits else None) if part)
    return text or "stated, method unknown", held
