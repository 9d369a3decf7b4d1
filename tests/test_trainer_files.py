"""Files of accelerate and torchtune in the forms their own tools write, key by key."""

from __future__ import annotations

from typing import Any

import pytest

from gpucalc.errors import InputError
from gpucalc.importers.formats import read_data

# As `accelerate config` writes it.
COMMON = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}


def accelerate(**keys: Any) -> dict[str, Any]:
    run: dict[str, Any] = read_data({**COMMON, **keys}, "a.yaml").data["run"]
    return run


def test_accelerate_writes_deepspeed_keys_of_its_own() -> None:
    zero = {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero_stage": 3,
    }
    run = accelerate(distributed_type="DEEPSPEED", deepspeed_config=zero)
    assert (run["framework"], run["precision"], run["zero_stage"]) == ("deepspeed", "bf16", 3)
    assert (run["grad_accum"], run["offload"]) == (4, "optimizer+gradients-cpu")
    both = accelerate(
        distributed_type="DEEPSPEED",
        deepspeed_config={**zero, "offload_param_device": "cpu"},
    )
    assert both["offload"] == "params+optimizer-cpu"
    unsaid = accelerate(distributed_type="DEEPSPEED", deepspeed_config={})
    assert (unsaid["zero_stage"], unsaid["offload"]) == (2, "none")


def test_accelerate_writes_megatron_keys_of_its_own() -> None:
    run = accelerate(
        distributed_type="MEGATRON_LM",
        megatron_lm_config={
            "megatron_lm_gradient_clipping": 1.0,
            "megatron_lm_num_micro_batches": 8,
            "megatron_lm_pp_degree": 2,
            "megatron_lm_recompute_activations": True,
            "megatron_lm_sequence_parallelism": True,
            "megatron_lm_tp_degree": 4,
            "megatron_lm_use_distributed_optimizer": True,
        },
    )
    assert (run["framework"], run["tp"], run["pp"], run["grad_accum"]) == ("megatron", 4, 2, 8)
    assert (run["recompute"], run["sequence_parallel"], run["zero_stage"]) == ("selective", True, 1)


def test_accelerate_replicates_where_nothing_shards() -> None:
    assert accelerate(distributed_type="MULTI_GPU")["framework"] == "ddp"
    assert accelerate(distributed_type="NO", num_processes=1)["framework"] == "hf"
    compiled = accelerate(
        distributed_type="MULTI_GPU",
        gradient_accumulation_steps=2,
        dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"},
    )
    assert (compiled["compile"], compiled["grad_accum"]) == (True, 2)
    sharded = accelerate(
        distributed_type="FSDP",
        fsdp_config={"fsdp_version": 2, "fsdp_reshard_after_forward": True},
        parallelism_config={
            "parallelism_config_dp_shard_size": 4,
            "parallelism_config_dp_replicate_size": 2,
            "parallelism_config_tp_size": 1,
        },
    )
    assert (sharded["framework"], sharded["dp_shard"]) == ("fsdp", 4)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"distributed_type": "XLA"}, "has no plan"),
        ({"distributed_type": "NO", "mixed_precision": "int4"}, "is not a precision"),
        ({"distributed_type": "DEEPSPEED"}, "deepspeed_config"),
        ({"distributed_type": "FSDP"}, "fsdp_config"),
        ({"distributed_type": "MEGATRON_LM"}, "megatron_lm_config"),
        (
            {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_tp_size": 2}},
            "tp under accelerate has no plan",
        ),
    ],
)
def test_accelerate_says_what_it_cannot_plan(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        accelerate(**keys)


TUNE = {
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 4096},
    "batch_size": 2,
    "gradient_accumulation_steps": 8,
    "dtype": "bf16",
    "epochs": 1,
    "device": "cuda",
}


def test_torchtune_adapters() -> None:
    model = {
        "_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
        "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "apply_lora_to_output": True,
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
    }
    optimizer = {"_component_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.01, "lr": 3e-4}
    job = read_data({**TUNE, "model": model, "optimizer": optimizer}, "lora.yaml")
    run = job.data["run"]
    assert (run["method"], run["precision"], run["optimizer"]) == ("lora", "bf16-pure", "adamw-fused")
    assert run["lora"] == {
        "rank": 8,
        "alpha": 16,
        "dropout": 0.05,
        "dtype": "bf16",
        "targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    }


def test_torchtune_switches() -> None:
    model = {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}
    loss = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    keys = {
        "enable_activation_checkpointing": True,
        "enable_activation_offloading": True,
        "compile": {"model": True, "loss": False},
        "optimizer_in_bwd": True,
        "loss": loss,
    }
    run = read_data({**TUNE, "model": model, **keys}, "full.yaml").data["run"]
    assert (run["recompute"], run["offload"], run["compile"]) == ("full", "activations-cpu", True)
    assert (run["optimizer_in_backward"], run["fused_loss"], run["loss_chunks"]) == (True, True, 8)
    held = {"fsdp_cpu_offload": True, "fsdp_reshard_after_forward": False, "data_parallel_shard_dim": 4}
    sharded = read_data({**TUNE, "model": model, **held}, "fsdp.yaml").data["run"]
    assert (sharded["framework"], sharded["zero_stage"], sharded["dp_shard"]) == ("fsdp", 2, 4)
    assert sharded["offload"] == "params+optimizer-cpu"
    second = {"ref_checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer"}}
    assert read_data({**TUNE, "model": model, **second}, "dpo.yaml").data["run"]["reference_model"] is True


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tensor_parallel_dim": 2}, "tensor parallelism under torchtune has no plan"),
        ({"batch_size": None}, "batch_size"),
    ],
)
def test_torchtune_says_what_it_cannot_plan(keys: dict[str, Any], words: str) -> None:
    data = {**TUNE, "model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}, **keys}
    with pytest.raises(InputError, match=words):
        read_data(data, "full.yaml")
