"""Megatron-LM argument lines and YAML to a job: the model is described inline, from its own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpucalc.errors import InputError
from gpucalc.importers.trainers.common import started
from gpucalc.importers.words import Draft, ImportedJob, Words, fold
from gpucalc.spec.run_values import CUDA_GRAPHS, RECOMPUTE_MODULES

# Vocabularies of tokenizers whose size Megatron takes from the tokenizer and not from an argument.
_TOKENIZERS = {"gpt2bpetokenizer": 50257, "llama2tokenizer": 32000}
_IDLE = (
    "lr", "min_lr", "lr_decay_style",
    "lr_warmup_iters", "lr_warmup_fraction", "lr_decay_iters", "lr_warmup_samples", "lr_decay_samples",
    "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "init_method_std", "seed",
    "train_iters", "train_samples", "eval_iters", "eval_interval", "save_interval", "log_interval", "save",
    "load", "data_path", "split", "tokenizer_model", "vocab_file", "merge_file", "tensorboard_dir",
    "log_throughput", "log_progress", "exit_interval", "exit_duration_in_mins", "distributed_backend",
    "distributed_timeout_minutes", "wandb_project", "wandb_exp_name", "num_workers", "rotary_base",
    "rotary_percent", "norm_epsilon", "attention_softmax_in_fp32", "use_mcore_models", "no_load_optim",
    "no_load_rng", "no_save_optim", "mock_data", "ckpt_format", "master_addr", "master_port", "node_rank",
    "rdzv_endpoint", "rdzv_backend", "data_cache_path", "transformer_impl", "no_masked_softmax_fusion",
    "bias_swiglu_fusion", "no_bias_swiglu_fusion", "tokenizer_type", "attention_dropout", "hidden_dropout",
    "no_rope_fusion", "apply_layernorm_1p", "moe_aux_loss_coeff", "moe_router_load_balancing_type",
    "moe_router_score_function", "moe_z_loss_coeff", "log_timers_to_tensorboard",
    "cuda_graph_warmup_steps", "cuda_graph_use_single_mempool", "te_rng_tracker", "use_te_rng_tracker",
    "log_memory_to_tensorboard", "log_params_norm", "log_num_zeros_in_grad",
    "log_validation_ppl_to_tensorboard", "manual_gc", "manual_gc_interval", "timing_log_level",
)  # fmt: skip


def megatron(flags: Mapping[str, Any], where: str) -> ImportedJob:
    """The arguments of `pretrain_gpt.py`, from its command line or a YAML, nested or not."""
    words = Words(_flat(flags), where)
    draft = Draft(run={"framework": "megatron"})
    draft.model = _model(words)
    _run(words, draft)
    words.skip(*_IDLE)
    return words.job("megatron", draft)


def _flat(flags: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in flags.items():
        if isinstance(value, Mapping):
            flat |= _flat(value)
        else:
            flat[fold(str(key))] = value
    return flat


def _run(words: Words, draft: Draft) -> None:
    run = draft.run
    tp = words.degree("tensor_model_parallel_size") or 1
    pp = words.degree("pipeline_model_parallel_size") or 1
    run |= {"tp": tp, "pp": pp}
    run["cp"] = words.degree("context_parallel_size") or 1
    run["ep"] = words.degree("expert_model_parallel_size", "expert_parallel_size") or 1
    run["etp"] = words.degree("expert_tensor_parallel_size")
    run["sequence_parallel"] = bool(words.flag("sequence_parallel")) if tp > 1 else None
    words.skip("sequence_parallel")
    _overlap(words, run)
    virtual = words.degree("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
    per_stage = words.degree("num_layers_per_virtual_pipeline_stage")
    layers = words.whole("num_layers")
    if virtual is None and per_stage is not None and layers is not None:
        if layers % (pp * per_stage):
            problem = f"does not divide the {layers} layers over {pp} pipeline stages"
            raise words.wrong(("num_layers_per_virtual_pipeline_stage",), problem, per_stage)
        virtual = layers // pp // per_stage
    run["vpp"] = virtual or 1
    uneven = (
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    )  # fmt: skip
    if words.has(*uneven):
        for name in uneven:
            words.take(name)
        run["pipeline_split"] = "uneven"
        words.assume("stages of unequal length: divided as evenly as the layers allow")
    run["micro_batch"] = words.whole("micro_batch_size", sets="run.micro_batch")
    if run["micro_batch"] is None and not words.asked:
        raise InputError("missing", where=words.where, key="micro_batch_size")
    run["global_batch"] = words.whole("global_batch_size", sets="run.global_batch")
    run["seq_len"] = words.whole("seq_length", "encoder_seq_length", sets="run.seq_len")
    if run["seq_len"] is None:
        raise InputError("missing", where=words.where, key="seq_length")
    run["precision"] = _precision(words)
    optimizer = words.text("optimizer") or "adam"
    if optimizer not in ("adam", "sgd", "dist_muon", "muon"):
        raise words.wrong(
            ("optimizer",), "is an optimizer whose state is not known", optimizer, "adam, sgd, muon"
        )
    run["optimizer"] = {"adam": "adam", "sgd": "sgd-momentum"}.get(optimizer, "muon")
    strategy = words.text("data_parallel_sharding_strategy")
    sharded = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3, "no_shard": 0}
    if words.flag("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2"):
        run["zero_stage"] = sharded.get(strategy or "", 3)
    else:
        run["zero_stage"] = 1 if words.flag("use_distributed_optimizer") else 0
        if not run["zero_stage"]:
            words.assume("use-distributed-optimizer not given: every rank keeps all optimizer state")
    if words.flag("use_precision_aware_optimizer"):
        moments = {words.text("exp_avg_dtype") or "fp32", words.text("exp_avg_sq_dtype") or "fp32"}
        if len(moments) > 1 or not moments <= {"fp32", "bf16", "fp8"}:
            raise words.wrong(("exp_avg_dtype",), "moments have one type here", sorted(moments),
                              "fp32, bf16 or fp8 for both")  # fmt: skip
        run["state_dtype"] = moments.pop()
    if words.flag("fp8_param_gather"):
        run["fp8_params"] = True
    granularity = words.text("recompute_granularity")
    if granularity is None and words.flag("recompute_activations"):
        granularity = "selective"
    run["recompute"] = granularity or "none"
    if granularity == "full":
        method, count = words.text("recompute_method"), words.whole("recompute_num_layers")
        if method == "block":
            words.assume(f"recompute-method block over {count} layers: every layer is taken as recomputed")
    modules = words.take("recompute_modules")
    if modules is not None:
        named = modules if isinstance(modules, list) else str(modules).split()
        unknown = [name for name in named if name not in RECOMPUTE_MODULES]
        if unknown:
            raise words.wrong(("recompute_modules",), f"{unknown[0]} has no plan", modules)
        if granularity == "selective":
            run["recompute_modules"] = named
    _graphs(words, run)
    backend = words.text("attention_backend")
    if words.flag("use_flash_attn") or backend in ("flash", "fused"):
        run["attention"] = "flash"
    elif backend in ("unfused", "local"):
        run["attention"] = "eager"
    run["fused_loss"] = bool(words.flag("cross_entropy_loss_fusion"))
    if words.flag("optimizer_cpu_offload"):
        run["offload"] = "optimizer-cpu"
    draft.ranks = started(words)


def _overlap(words: Words, run: dict[str, Any]) -> None:
    """How tensor-parallel gathers and the exchange of tokens run, and how evenly experts are filled."""
    beside = words.flag("tp_comm_overlap")
    if beside is not None and run["tp"] > 1:
        run["tp_overlap"] = beside
    if words.flag("overlap_moe_expert_parallel_comm"):
        run["ep_overlap"] = True
    dispatcher = str(words.take("moe_token_dispatcher_type") or "").lower()
    if run["ep"] > 1 and dispatcher in ("flex", "alltoall"):
        run["moe_dispatcher"] = "deepep" if dispatcher == "flex" else "alltoall"
    factor = words.real("moe_expert_capacity_factor")
    if words.flag("moe_pad_expert_input_to_capacity") and factor is not None and factor >= 1:
        run["expert_imbalance"] = factor


def _graphs(words: Words, run: dict[str, Any]) -> None:
    """What is replayed from CUDA graphs, by the names of several releases.

    A graph of whole layers captures the experts of a layer only where their tokens are padded to a capacity
    (megatron/core/transformer/moe/README.md, CUDA Graph).
    """
    implementation = words.text("cuda_graph_impl") or "none"
    per_layer = [words.flag(name) for name in ("enable_cuda_graph", "external_cuda_graph")]
    said = words.take("cuda_graph_modules")
    scope = words.take("cuda_graph_scope") if said is None else said
    parts = scope if isinstance(scope, list) else str(scope or "").replace(",", " ").split()
    if implementation not in ("none", "local", "transformer_engine", "full_iteration"):
        raise words.wrong(
            ("cuda_graph_impl",),
            "is no way of capturing",
            implementation,
            "none, local, transformer_engine, full_iteration",
        )
    if implementation == "none" and not any(per_layer):
        return
    unknown = [part for part in parts if part not in (*CUDA_GRAPHS, "full_iteration", "full")]
    if unknown:
        raise words.wrong(("cuda_graph_modules", "cuda_graph_scope"), f"{unknown[0]} has no plan", scope)
    if implementation == "full_iteration" or "full_iteration" in parts:
        run["cuda_graphs"] = ["full"]
    elif parts and "full" not in parts:
        run["cuda_graphs"] = parts
    elif not words.has("num_experts"):
        run["cuda_graphs"] = ["attn", "mlp"]
    else:
        padded = bool(words.flag("moe_pad_expert_input_to_capacity"))
        run["cuda_graphs"] = ["attn", "moe"] if padded else ["attn"]


def _precision(words: Words) -> str:
    bf16, fp16 = words.flag("bf16"), words.flag("fp16")
    if bf16 and fp16:
        raise InputError("fp16 and bf16 are both given", where=words.where, key="fp16")
    eight = words.text("fp8_format", "fp8")
    recipe = words.text("fp8_recipe")
    if eight and eight not in ("false", "none"):
        return "mxfp8" if recipe == "mxfp8" else "fp8"
    if words.text("fp4_format", "fp4"):
        return "nvfp4"
    if not bf16 and not fp16:
        words.assume("neither bf16 nor fp16 is given: fp32, Megatron's default")
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"


def _model(words: Words) -> dict[str, Any] | None:
    """The model the arguments describe; None when they describe none (a YAML of the layout alone)."""
    if not words.has("num_layers", "hidden_size"):
        return None

    def need(*names: str) -> int:
        value = words.whole(*names)
        if value is None:
            raise InputError(
                "missing; the model cannot be described without it", where=words.where, key=names[0]
            )
        return value

    hidden, heads = need("hidden_size"), need("num_attention_heads")
    gated = bool(words.flag("swiglu")) or bool(words.flag("gated_linear_unit"))
    model: dict[str, Any] = {
        "name": "megatron-model",
        "family": "gpt2",
        "layers": need("num_layers"),
        "hidden": hidden,
        "heads": heads,
    }
    ffn = words.whole("ffn_hidden_size")
    if ffn is None:
        # Megatron: 4 x hidden, or two thirds of that in multiples of 64 with a gate.
        ffn = int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden
        words.assume(f"ffn-hidden-size not given: {ffn}, Megatron's default")
    grouped = words.flag("group_query_attention")
    groups = words.whole("num_query_groups")
    if grouped and groups is None:
        words.assume("num-query-groups not given: 1, Megatron's default")
        groups = 1
    normalization = words.text("normalization") or "LayerNorm"
    if normalization not in ("LayerNorm", "RMSNorm"):
        raise words.wrong(("normalization",), "is not a norm", normalization, "LayerNorm, RMSNorm")
    bias = not words.flag("disable_bias_linear") and words.flag("add_bias_linear") is not False
    untied = bool(words.flag("untie_embeddings_and_output_weights")) or words.flag(
        "share_embeddings_and_output_weights") is False  # fmt: skip
    position = words.text("position_embedding_type") or (
        "rope" if words.flag("use_rotary_position_embeddings") else "learned_absolute")  # fmt: skip
    if position not in ("rope", "learned_absolute", "none"):
        raise words.wrong(
            ("position_embedding_type",), "has no plan", position, "rope, learned_absolute, none"
        )
    activation = (
        "silu" if words.has("swiglu") and gated else "relu2" if words.flag("squared_relu") else "gelu"
    )
    table = words.whole("max_position_embeddings")
    model |= {
        "ffn": ffn,
        "kv_heads": groups if grouped and groups else heads,
        "head_dim": words.whole("kv_channels") or hidden // heads,
        "norm": "rmsnorm" if normalization == "RMSNorm" else "layernorm",
        "activation": activation,
        "gated_mlp": gated,
        "qkv_bias": bias or bool(words.flag("add_qkv_bias")),
        "o_bias": bias,
        "mlp_bias": bias,
        "position_kind": {"rope": "rope", "learned_absolute": "learned"}.get(position, "none"),
        "tied_embeddings": not untied,
    }
    if words.flag("qk_layernorm"):
        model["qk_norm"] = "head"
    if table is not None:
        model["max_context"] = table
    if position == "learned_absolute":
        model["positions"] = need("max_position_embeddings")
    vocab = words.whole("vocab_size", "padded_vocab_size")
    if vocab is None:
        vocab = _TOKENIZERS.get((words.text("tokenizer_type") or "").lower())
        if vocab is not None:
            words.assume(f"vocab-size not given: {vocab:,}, that of the tokenizer type")
    if vocab is None:
        words.ask("vocab-size is not given and the tokenizer is not read", "model.vocab")
    else:
        model["vocab"] = vocab
    words.skip("make_vocab_size_divisible_by")
    experts = words.whole("num_experts", "num_moe_experts")
    if experts:
        model["moe"] = _experts(words, experts, ffn)
    if words.flag("multi_latent_attention"):
        model["mla"] = {
            "kv_lora": need("kv_lora_rank"),
            "qk_nope": need("qk_head_dim"),
            "qk_rope": need("qk_pos_emb_head_dim"),
            "v_head": need("v_head_dim"),
        }
        low = words.whole("q_lora_rank")
        if low is not None:
            model["mla"]["q_lora"] = low
        model["family"] = "deepseek_v3"
        model.pop("kv_heads")
        model.pop("head_dim")
    return model


def _experts(words: Words, experts: int, ffn: int) -> dict[str, Any]:
    width = words.whole("moe_ffn_hidden_size")
    if width is None:
        words.assume("moe-ffn-hidden-size not given: as ffn-hidden-size, Megatron's default")
    top_k = words.whole("moe_router_topk")
    if top_k is None:
        words.assume("moe-router-topk not given: 2, Megatron's default")
    moe: dict[str, Any] = {"experts": experts, "top_k": top_k or 2, "expert_ffn": width or ffn}
    shared = words.whole("moe_shared_expert_intermediate_size")
    if shared:
        moe["shared_expert_ffn"] = shared
    frequency = words.take("moe_layer_freq")
    if frequency is not None:
        pattern = _frequency(str(frequency))
        if isinstance(pattern, int):
            moe |= {"every": pattern, "offset": 0} if pattern > 1 else {}
        else:
            dense = pattern.index(1) if 1 in pattern else len(pattern)
            if not all(pattern[dense:]):
                raise words.wrong(
                    ("moe_layer_freq",), "dense layers among the expert ones have no plan", frequency
                )
            moe |= {"dense_layers": dense} if dense else {}
    words.skip(
        "moe_grouped_gemm", "moe_permute_fusion", "moe_router_dtype", "moe_token_drop_policy",
    )  # fmt: skip
    return moe


def _frequency(text: str) -> int | list[int]:
    """`2` or `([0]*3+[1]*58)`, read without evaluating it."""
    if text.strip().isdigit():
        return int(text)
    found: list[int] = []
    for part in text.replace("(", "").replace(")", "").replace(" ", "").split("+"):
        inner, _, times = part.partition("*")
        values = inner.strip("[]").split(",")
        if not all(value in ("0", "1") for value in values) or (times and not times.isdigit()):
            raise InputError("is not a pattern of 0 and 1", key="moe_layer_freq", given=text)
        if len(values) * int(times or 1) > 10_000:
            raise InputError("more layers than any model has", key="moe_layer_freq", given=text)
        found += [int(value) for value in values] * int(times or 1)
    return found
