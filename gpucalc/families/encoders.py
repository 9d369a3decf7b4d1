"""Encoders, encoder-decoders, decoders with recurrence, and what sees images."""

from __future__ import annotations

from dataclasses import replace

from gpucalc.families.family import Family

_PLAIN = Family(
    norm="layernorm",
    position_kind="learned",
    activation="gelu",
    gated_mlp=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)
_BERT = replace(
    _PLAIN,
    form="bert",
    post_norm=True,
    positions=512,
    embedding_norm=True,
    tied_embeddings=True,
    ffn_ratio=4,
    vocab=30522,
    token_types=2,
    head="pooler",
)

_T5 = Family(
    form="t5",
    norm="rmsnorm_keeps_input",
    position_kind="relative",
    activation="relu",
    gated_mlp=False,
    tied_embeddings=True,
)

_AUDIO = replace(_PLAIN, form="wav2vec2", position_kind="none", post_norm=True, head="body")

ENCODERS: dict[str, Family] = {
    "bert": _BERT,
    "roberta": replace(_BERT, positions=514, vocab=50265, token_types=1),
    "xlm_roberta_xl": replace(
        _BERT, positions=514, vocab=250880, token_types=1, post_norm=False, embedding_norm=False
    ),
    "ernie": replace(_BERT, vocab=None),
    "albert": replace(_BERT, vocab=None, ffn_ratio=None, activation="gelu_new"),
    "distilbert": replace(_BERT, token_types=0, head="body"),
    "electra": replace(_BERT, head="body"),
    "mpnet": replace(_BERT, vocab=30527, token_types=0),
    "deberta_v2": replace(
        _BERT, position_kind="relative", ffn_ratio=None, vocab=None, token_types=0, head="body"
    ),
    "modernbert": Family(
        form="bert",
        norm="layernorm_nobias",
        qkv="fused",
        fused_gate_up=True,
        activation="gelu",
        embedding_norm=True,
        tied_embeddings=True,
        head="mlm",
    ),
    "t5": _T5,
    "mt5": replace(_T5, gated_mlp=True, activation="gelu_new"),
    "umt5": replace(_T5, gated_mlp=True, activation="gelu_new"),
    "bart": replace(
        _PLAIN,
        form="bart",
        post_norm=True,
        positions=1024,
        position_offset=2,
        embedding_norm=True,
        tied_embeddings=True,
    ),
    "mbart": replace(
        _PLAIN, form="bart", positions=1024, position_offset=2, embedding_norm=True, tied_embeddings=True
    ),
    "pegasus": replace(_PLAIN, form="bart", positions=1024, tied_embeddings=True),
    "marian": replace(_PLAIN, form="bart", post_norm=True, positions=1024, tied_embeddings=True),
    "m2m_100": replace(_PLAIN, form="bart", position_kind="none", tied_embeddings=True),
    "whisper": replace(_PLAIN, form="whisper", positions=448, tied_embeddings=True),
    "wav2vec2": _AUDIO,
    "hubert": _AUDIO,
    "wavlm": _AUDIO,
    "unispeech": _AUDIO,
    "unispeech_sat": _AUDIO,
    "transformer_xl": Family(
        form="transformer_xl",
        norm="layernorm",
        post_norm=True,
        qkv="fused",
        position_kind="relative",
        activation="relu",
        gated_mlp=False,
        mlp_bias=True,
        tied_embeddings=True,
        ffn_ratio=4,
    ),
}

_TOTALS = Family(form="totals", norm="none", head="body")

IMAGES: dict[str, Family] = {
    "vit": replace(_PLAIN, form="vit", head="classifier"),
    "dinov2": replace(_PLAIN, form="vit", layer_scale=True, mask_token=True, head="body"),
    "deit": replace(_PLAIN, form="vit", head="classifier"),
    "clip": replace(_PLAIN, form="clip", positions=77, head="body"),
    "siglip": replace(_PLAIN, form="clip", positions=64, activation="gelu_tanh", head="body"),
    "resnet": _TOTALS,
    "convnext": _TOTALS,
    "swin": _TOTALS,
    "yolov7": _TOTALS,
    "yolov8": _TOTALS,
    "diffusion": _TOTALS,
}
