"""What a plan must not load: the libraries that would make every answer slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("numpy", "torch", "pynvml", "rich", "transformers")


COMMANDS = (
    "plan llama-3-8b --gpus 8xH100-SXM --json",
    "plan llama-3-8b --gpus 8xH100-SXM --set run.micro_batch=auto --set run.recompute=auto --json",
    "explain llama-3-8b weights --gpus 8xH100-SXM --json",
    "gpus show H100-SXM --json",
    "--help",
)


@pytest.mark.parametrize("arguments", [line.split() for line in COMMANDS], ids=COMMANDS)
def test_no_heavy_library_is_loaded(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom gpucalc.__main__ import main\n"
        f"code = main({arguments!r})\nprint(code, *sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, *modules = done.stderr.split()
    assert status == "0", done.stderr
    assert not {name.split(".")[0] for name in modules} & set(HEAVY)


def test_a_config_file_of_70b_costs_little_beside_a_catalogue_model(tmp_path: Path) -> None:
    """The same model by its config.json and by its name: modules loaded, not seconds."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
        "hidden_act": "silu", "max_position_embeddings": 131072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import sys\nfrom gpucalc.__main__ import main\n"
        "code = main(['plan', sys.argv[1], '--gpus', '8xH100-SXM', '--json'])\n"
        "print(code, *sorted(sys.modules), file=sys.stderr)"
    )
    loaded = []
    for model in ("llama-3-70b", str(tmp_path / "config.json")):
        done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
        status, *modules = done.stderr.split()
        assert status == "0", done.stderr
        assert not {name.split(".")[0] for name in modules} & set(HEAVY)
        loaded.append(set(modules))
    named, read = loaded
    extra = {name for name in read - named if not name.startswith("gpucalc.importers")}
    assert extra <= {"json", "json.decoder", "json.scanner", "json.encoder", "_json", "gpucalc.spec.jsonio"}
    assert len(read) <= 1.06 * len(named)
