"""Jobs of ours in the words of every program whose files are read, and which runs each can say.

Only what a format can say is varied; what a trainer's file does not say is set on both sides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import yaml
from hypothesis import strategies as st

MODEL = "llama-3.2-1b"


def to_deepspeed(run: Mapping[str, Any]) -> str:
    zero: dict[str, Any] = {"stage": run["zero_stage"]}
    if run["offload"].startswith(("optimizer", "params")):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if run["offload"].startswith("params"):
        zero["offload_param"] = {"device": "cpu"}
    body = {
        "train_micro_batch_size_per_gpu": run["micro_batch"],
        "gradient_accumulation_steps": run["grad_accum"],
        "zero_optimization": zero,
        "optimizer": {"type": {"adamw": "AdamW", "lion": "Lion"}[run["optimizer"]], "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
    }
    if run["precision"] != "fp32":
        body[run["precision"]] = {"enabled": True}
    return json.dumps(body)


def to_accelerate(run: Mapping[str, Any]) -> str:
    strategy = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}[run["zero_stage"]]
    return yaml.safe_dump(
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "mixed_precision": {"fp32": "no"}.get(run["precision"], run["precision"]),
            "num_processes": 4,
            "gradient_accumulation_steps": run["grad_accum"],
            "fsdp_config": {
                "fsdp_sharding_strategy": strategy,
                "fsdp_activation_checkpointing": run["recompute"] == "full",
                "fsdp_offload_params": run["offload"] != "none",
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            },
        }
    )


def to_transformers(run: Mapping[str, Any]) -> str:
    sharding = {"fsdp": '--fsdp "full_shard auto_wrap"', "hf": ""}[run["framework"]]
    return (
        f"torchrun --nproc_per_node 4 train.py --model_name_or_path {MODEL} --output_dir out {sharding}"
        f" --per_device_train_batch_size {run['micro_batch']}"
        f" --gradient_accumulation_steps={run['grad_accum']}"
        f" --{run['precision']} True --gradient_checkpointing {run['recompute'] == 'full'}"
        f" --optim {run['optimizer'].replace('-', '_')} --max_seq_length {run['seq_len']}"
    )


def to_llamafactory(run: Mapping[str, Any]) -> str:
    body = {
        "model_name_or_path": MODEL,
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": run["lora"]["rank"],
        "lora_target": "all",
        "cutoff_len": run["seq_len"],
        "per_device_train_batch_size": run["micro_batch"],
        "gradient_accumulation_steps": run["grad_accum"],
        "bf16": True,
        "disable_gradient_checkpointing": run["recompute"] == "none",
        "flash_attn": {"flash": "fa2", "sdpa": "sdpa"}[run["attention"]],
    }
    if run["method"] == "qlora":
        body["quantization_bit"] = 4
    return yaml.safe_dump(body)


def to_axolotl(run: Mapping[str, Any]) -> str:
    body = {
        "base_model": MODEL,
        "model_type": "LlamaForCausalLM",
        "adapter": run["method"],
        "load_in_4bit": run["method"] == "qlora",
        "lora_r": run["lora"]["rank"],
        "lora_target_linear": True,
        "sequence_len": run["seq_len"],
        "micro_batch_size": run["micro_batch"],
        "gradient_accumulation_steps": run["grad_accum"],
        "optimizer": {"adamw": "adamw_torch", "adamw-8bit": "adamw_bnb_8bit"}[run["optimizer"]],
        "bf16": True,
        "gradient_checkpointing": run["recompute"] == "full",
        "flash_attention": run["attention"] == "flash",
    }
    return yaml.safe_dump(body)


def to_torchtune(run: Mapping[str, Any]) -> str:
    return yaml.safe_dump(
        {
            "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
            "tokenizer": {"_component_": "x", "path": "/tmp/t", "max_seq_len": run["seq_len"]},
            "batch_size": run["micro_batch"],
            "gradient_accumulation_steps": run["grad_accum"],
            "dtype": "bf16",
            "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5},
            "enable_activation_checkpointing": run["recompute"] == "full",
            "compile": run["compile"],
            "fsdp_reshard_after_forward": run["zero_stage"] == 3,
            "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        }
    )


def to_torchtitan(run: Mapping[str, Any]) -> str:
    mode = {"full": "full", "none": "none"}.get(run["recompute"], "selective")
    option = {"selective-op": "op"}.get(run["recompute"], "2")
    return (
        f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = {run["micro_batch"]}\n'
        f"seq_len = {run['seq_len']}\n[parallelism]\ntensor_parallel_degree = {run['tp']}\n"
        f"data_parallel_shard_degree = -1\n[compile]\nenable = {str(run['compile']).lower()}\n"
        f'[activation_checkpoint]\nmode = "{mode}"\nselective_ac_option = "{option}"\n'
        '[optimizer]\nname = "AdamW"\n'
    )


MEGATRON_MODEL = {"name": "megatron-model", "family": "gpt2", "layers": 8, "hidden": 1024, "heads": 16,
                  "kv_heads": 4, "head_dim": 64, "ffn": 2816, "vocab": 32000, "norm": "rmsnorm",
                  "activation": "silu", "gated_mlp": True, "qkv_bias": False, "o_bias": False,
                  "mlp_bias": False,
                  "position_kind": "rope", "tied_embeddings": False}  # fmt: skip


def to_megatron(run: Mapping[str, Any]) -> str:
    line = (
        "MODEL=(\n --num-layers 8 --hidden-size 1024 --num-attention-heads 16  # small\n"
        " --group-query-attention --num-query-groups 4 --ffn-hidden-size 2816 --vocab-size 32000\n"
        " --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope\n"
        " --untie-embeddings-and-output-weights\n)\n"
        f"TP={run['tp']}\n"
        "torchrun --nproc_per_node 4 pretrain_gpt.py ${MODEL[@]} --tensor-model-parallel-size ${TP} \\\n"
        f"  --pipeline-model-parallel-size {run['pp']} --micro-batch-size {run['micro_batch']} \\\n"
        f"  --global-batch-size {run['global_batch']} --seq-length {run['seq_len']} --bf16 --use-flash-attn"
    )
    line += " --sequence-parallel" if run["sequence_parallel"] else ""
    line += " --use-distributed-optimizer" if run["zero_stage"] else ""
    line += "" if run["recompute"] == "none" else f" --recompute-granularity {run['recompute']}"
    return line


def to_vllm(run: Mapping[str, Any]) -> str:
    return (
        f"vllm serve {MODEL} -tp {run['tp']} --max-model-len {run['max_model_len']}"
        f" --max-num-seqs={run['max_num_seqs']} --gpu_memory_utilization {run['gpu_memory_utilization']}"
        f" --kv-cache-dtype {run['kv_dtype']}" + (" --enforce-eager" if run["enforce_eager"] else "")
    )


def to_vllm_yaml(run: Mapping[str, Any]) -> str:
    return yaml.safe_dump(
        {
            "model": MODEL,
            "tensor-parallel-size": run["tp"],
            "max-model-len": run["max_model_len"],
            "max_num_seqs": run["max_num_seqs"],
            "gpu-memory-utilization": run["gpu_memory_utilization"],
            "kv-cache-dtype": run["kv_dtype"],
            "enforce-eager": run["enforce_eager"],
        }
    )


def to_sglang(run: Mapping[str, Any]) -> str:
    return (
        f"python3 -m sglang.launch_server --model-path {MODEL} --tp {run['tp']} --context-length"
        f" {run['max_model_len']} --max-running-requests {run['max_num_seqs']} --mem-fraction-static"
        f" {run['mem_fraction_static']}" + (" --disable-cuda-graph" if run["enforce_eager"] else "")
    )


def to_llama_server(run: Mapping[str, Any]) -> str:
    return (
        f"./llama-server -m {MODEL}.yaml -c {run['max_model_len'] * run['max_num_seqs']} -np"
        f" {run['max_num_seqs']} -ctk {run['kv_dtype']} -ctv {run['kv_dtype']} -ngl 99 -fa on"
    )


small = st.integers(1, 4)
recompute = st.sampled_from(("none", "full"))
lora = st.fixed_dictionaries({"rank": st.sampled_from((8, 16, 64)), "targets": st.just("all-linear")})
length = st.sampled_from((512, 2048))
SERVED = {
    "task": st.just("serve"),
    "tp": st.sampled_from((1, 2)),
    "max_model_len": st.sampled_from((2048, 8192)),
    "max_num_seqs": st.sampled_from((4, 32)),
}


def runs(**keys: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            key: value if isinstance(value, st.SearchStrategy) else st.just(value)
            for key, value in keys.items()
        }
    )


Case = tuple[str, Callable[[Mapping[str, Any]], str], st.SearchStrategy[dict[str, Any]], dict[str, Any]]
# File name, exporter, the runs it can say, and keys set on both sides because it cannot.
CASES: dict[str, Case] = {
    "deepspeed": (
        "ds_config.json",
        to_deepspeed,
        runs(
            framework="deepspeed",
            precision=st.sampled_from(("bf16", "fp16", "fp32")),
            optimizer=st.sampled_from(("adamw", "lion")),
            micro_batch=small,
            grad_accum=small,
        ).flatmap(
            lambda run: st.sampled_from(
                (
                    (0, "none"),
                    (1, "optimizer-cpu"),
                    (2, "optimizer+gradients-cpu"),
                    (3, "params+optimizer-cpu"),
                    (3, "none"),
                )
            ).map(lambda pair: {**run, "zero_stage": pair[0], "offload": pair[1]})
        ),
        {"seq_len": 1024},
    ),
    "accelerate": (
        "accelerate.yaml",
        to_accelerate,
        runs(framework="fsdp", precision=st.sampled_from(("bf16", "fp16", "fp32")), grad_accum=small,
             zero_stage=st.sampled_from((0, 2, 3)), recompute=recompute,
             offload=st.sampled_from(("none", "params+optimizer-cpu"))),
        {"seq_len": 1024, "micro_batch": 2},
    ),
    "transformers": (
        "train.sh",
        to_transformers,
        runs(framework=st.sampled_from(("fsdp", "hf")), precision=st.sampled_from(("bf16", "fp16")),
             micro_batch=small, grad_accum=small, seq_len=length, recompute=recompute,
             optimizer=st.sampled_from(("adafactor", "paged-adamw-8bit"))),
        {},
    ),
    "llama-factory": (
        "lora.yaml",
        to_llamafactory,
        runs(framework="hf", precision="bf16", method=st.sampled_from(("lora", "qlora")), lora=lora,
             micro_batch=small, grad_accum=small, seq_len=length, recompute=recompute,
             attention=st.sampled_from(("flash", "sdpa"))),
        {},
    ),
    "axolotl": (
        "axolotl.yml",
        to_axolotl,
        runs(framework="hf", precision="bf16", method=st.sampled_from(("lora", "qlora")), lora=lora,
             micro_batch=small, grad_accum=small, seq_len=length, recompute=recompute,
             optimizer=st.sampled_from(("adamw", "adamw-8bit")), attention=st.sampled_from(("flash",
             "sdpa"))),
        {},
    ),
    "torchtune": (
        "tune.yaml",
        to_torchtune,
        runs(framework="fsdp", precision="bf16-pure", optimizer="adamw-fused", fused_loss=True, loss_chunks=8,
        micro_batch=small,
             grad_accum=small, seq_len=length, recompute=recompute, compile=st.booleans(),
             zero_stage=st.sampled_from((2, 3))),
        {},
    ),
    "torchtitan": (
        "titan.toml",
        to_torchtitan,
        runs(framework="torchtitan", precision="bf16", optimizer="adamw-fused", micro_batch=small,
        seq_len=length,
             tp=st.sampled_from((1, 2)), compile=st.booleans(), zero_stage=3,
             recompute=st.sampled_from(("none", "full", "selective-op", "selective-layer"))),
        {"model": "llama-3-8b"},
    ),
    "megatron": (
        "pretrain.sh",
        to_megatron,
        runs(framework="megatron", precision="bf16", optimizer="adam", attention="flash", fused_loss=False,
             micro_batch=st.sampled_from((1, 2)), global_batch=16, seq_len=length, tp=2,
             pp=st.sampled_from((1, 2)), sequence_parallel=st.booleans(), zero_stage=st.sampled_from((0, 1)),
             recompute=st.sampled_from(("none", "selective", "full"))),
        {"model": MEGATRON_MODEL},
    ),
    "vllm": (
        "serve.sh",
        to_vllm,
        runs(framework="vllm", gpu_memory_utilization=st.sampled_from((0.8, 0.95)),
             kv_dtype=st.sampled_from(("auto", "fp8")), enforce_eager=st.booleans(), **SERVED),
        {},
    ),
    "vllm-yaml": (
        "vllm.yaml",
        to_vllm_yaml,
        runs(framework="vllm", gpu_memory_utilization=st.sampled_from((0.8, 0.95)),
             kv_dtype=st.sampled_from(("auto", "fp8")), enforce_eager=st.booleans(), **SERVED),
        {},
    ),
    "sglang": (
        "sglang.sh",
        to_sglang,
        runs(framework="sglang", mem_fraction_static=st.sampled_from((0.7, 0.85)),
        enforce_eager=st.booleans(),
             **SERVED),
        {},
    ),
    "llama-server": (
        "llama.sh",
        to_llama_server,
        runs(framework="llamacpp", kv_dtype=st.sampled_from(("fp16", "q8_0")),
             **{key: value for key, value in SERVED.items() if key != "tp"}),
        {},
    ),
}  # fmt: skip
