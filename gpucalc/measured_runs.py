"""Which job a published training run is: from a row to what the planner takes, and what was filled in.

Frameworks a job cannot name, sharding by its FSDP name and batch arithmetic left open are settled by
rules on the row's fields, and every value a row does not state is listed with the job. A row that still
lacks something is skipped, and the reason names the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError
from gpucalc.measured import ANY_GPU, Conventions, Lacking, Row, Skip, gpus_in, in_catalog
from gpucalc.measured_meters import Meter, meter_of
from gpucalc.spec.job import Job
from gpucalc.spec.yamlio import load_yaml

CONVENTIONS = "conventions.yaml"

# Stacks a job cannot name, and the one whose arithmetic is closest.
NEAREST_FRAMEWORK = {
    "tensorflow": ("ddp", "TensorFlow with Horovod replicates the model as DDP does"),
    "tensorflow2": ("ddp", "TensorFlow with Horovod replicates the model as DDP does"),
    "mxnet": ("ddp", "MXNet with Horovod or KVStore replicates the model as DDP does"),
    "paddle": ("ddp", "Paddle's data parallelism replicates the model as DDP does"),
    "internevo": ("deepspeed", "InternEvo keeps 16-bit weights with fp32 masters sharded as ZeRO does"),
    "maxtext": ("fsdp", "MaxText shards over its fsdp axis by default"),
}
_FSDP_STAGES = {"fsdp": 3, "hsdp": 3, "fsdp-full-shard": 3, "fsdp-shard-grad-op": 2, "fsdp-hybrid-shard": 3}
_TRUE_16_BIT = re.compile(r"(bf16|fp16|bfloat16|float16)-true|\bfull (bf16|fp16|bfloat16)", re.IGNORECASE)
_OFFLOAD = (
    (re.compile(r"^cpu\b", re.IGNORECASE), "params+optimizer-cpu"),
    (re.compile(r"^params\b.*optimizer", re.IGNORECASE), "params+optimizer-cpu"),
)
_SHAPE = ("layers", "hidden", "heads", "ffn", "vocab")
_NETWORK_TOTALS = (
    "gflops_forward", "saved_elements", "traffic_elements", "loss_bytes", "loss_once_bytes", "head_elements",
)  # fmt: skip
# Facts about the measurement, not about the run; TrainRun has no place for them.
_RUN_ONLY = frozenset({"image_size", "dp_note"})


@dataclass(frozen=True, slots=True)
class Network:
    """The network between nodes in the source's words: its rate one way, by node or by GPU, and its kind."""

    gbit_per_s: float
    per_gpu: bool
    kind: str  # ib | roce | ethernet

    @classmethod
    def of(cls, words: str) -> Network | None:
        """The network a text states, or None when it states no rate."""
        text = words.casefold()
        kind = "roce" if "roce" in text else "ethernet" if "ethernet" in text or "tcp" in text else "ib"
        for pattern, unit in _NETWORKS:
            match = pattern.search(text)
            if match is not None:
                rate = float(match["rate"]) if "rate" in match.groupdict() else _INFINIBAND[match["name"]]
                cards = float(match["cards"] or 1)
                return cls(cards * rate * unit, "per gpu" in text, kind)
        return None


_INFINIBAND = {"edr": 100.0, "hdr100": 100.0, "hdr": 200.0, "hdr200": 200.0, "ndr": 400.0, "ndr400": 400.0}
_NETWORKS = (
    (re.compile(r"(?:(?P<cards>\d+) ?x ?)?(?P<rate>\d+(?:\.\d+)?) ?gb/s infiniband"), 8.0),  # bytes
    (re.compile(r"(?:(?P<cards>\d+) ?x ?)?(?P<rate>\d+(?:\.\d+)?) ?(?:gbps|gb/s|gbit/s)"), 1.0),
    (re.compile(r"(?:(?P<cards>\d+) ?x ?)?(?P<name>edr|hdr200|hdr100|hdr|ndr400|ndr)\b"), 1.0),
)


@dataclass(frozen=True, slots=True)
class Ready:
    """A row's job, what was filled in or replaced to get it, and the network the source names."""

    job: Job
    notes: tuple[str, ...]
    network: Network | None = None
    memory_only: str | None = None  # why its speed cannot be compared, where its memory can


def conventions_of(catalog: Catalog) -> Conventions:
    """The documented defaults that come with the catalogue; none when it has none."""
    path = in_catalog(catalog, CONVENTIONS)
    return Conventions() if path is None else Conventions.read(path)


@dataclass(slots=True)
class Normaliser:
    """Turns rows into jobs. Holds the catalogue and what has been looked up in it."""

    catalog: Catalog
    conventions: Conventions = field(default_factory=Conventions)
    _models: dict[str, str | None] = field(default_factory=dict)
    _bodies: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _servers: list[tuple[int, str, str]] | None = None

    def job_of(self, row: Row) -> Ready | Skip:
        """The job a row describes, or why it cannot be told."""
        draft = _Draft(row, self)
        try:
            return draft.finish()
        except Lacking as lacking:
            return Skip(str(lacking))
        except InputError as error:
            return Skip(f"not accepted: {error}")

    def meter_of(self, row: Row) -> Meter | None:
        """What the row's memory figure counts, or None when it has no per-GPU figure."""
        return meter_of(row, self.conventions.meters)

    def servers_of(self, name: str) -> tuple[int | None, list[tuple[int, str, str]]]:
        """GPUs in a node of a GPU's largest default server, and every server of that chip and memory.

        A server is (GPUs in a node, its name, its GPU), those with the very GPU first.
        """
        try:
            gpu, _ = self.catalog.gpu(name)
        except InputError:
            return None, []
        if self._servers is None:
            self._servers = []
            for system in (self.catalog.system(stem) for stem in self.catalog.names("systems")):
                self._servers.append((system.gpus_per_node, system.id, system.gpu))
        alike = [server for server in self._servers if _chip(server[2]) == _chip(gpu.id)]
        alike.sort(key=lambda server: (server[2] != gpu.id, server))
        default = max((self.catalog.system(stem).gpus_per_node for stem in gpu.default_systems), default=None)
        return default, alike

    def find_model(self, name: str) -> str | None:
        """The catalogue id of a model name or alias, or None."""
        if name not in self._models:
            found = self.catalog.look_up("models", name)
            self._models[name] = None if found is None else found.stem
        return self._models[name]

    def model_body(self, stem: str) -> Mapping[str, Any]:
        """What the catalogue says about a model."""
        if stem not in self._bodies:
            self._bodies[stem] = load_yaml(self.catalog.path_of("models", stem)).data
        return self._bodies[stem]


def _chip(gpu: str) -> tuple[str, str]:
    """Chip and memory of a GPU id: v100-sxm2-32gb and v100-sxm3-32gb hold the same."""
    words = gpu.split("-")
    return words[0], words[-1]


class _Draft:
    """One row on its way to a job."""

    def __init__(self, row: Row, owner: Normaliser) -> None:
        self.row = row
        self.owner = owner
        self.notes: list[str] = []
        self.run: dict[str, Any] = {k: v for k, v in row.run.items() if v is not None}
        self.memory_only: str | None = None

    def finish(self) -> Ready:
        """The job; raises Lacking or InputError."""
        if self.run.get("task", "train") != "train":
            raise Lacking("run.task is not train")
        self._apply_conventions()
        gpus = self._gpus()
        model, network = self._model()
        self._framework()
        self._precision()
        self._sharding()
        self._method()
        self._offload()
        self._batch(gpus, network)
        self._pipeline(model)
        if not network and self.run.get("seq_len") is None:
            raise Lacking("run.seq_len not stated")
        if self.run.get("precision") is None:
            raise Lacking("run.precision not stated")
        run = {k: v for k, v in self.run.items() if k not in _RUN_ONLY}
        job = Job.read(
            {"name": self.row.id, "model": model, **self._fleet(gpus), "run": run},
            where=self.row.where,
        )
        words = self.row.get("hardware.inter")
        between = Network.of(words) if isinstance(words, str) else None
        return Ready(job, tuple(dict.fromkeys(self.notes)), between, self.memory_only)

    def note(self, text: str) -> None:
        self.notes.append(text)

    # -- what the stack documents ---------------------------------------------------------------

    def _apply_conventions(self) -> None:
        self.notes += self.owner.conventions.fill(self.row, self.run)

    # -- hardware -------------------------------------------------------------------------------

    def _gpus(self) -> int:
        gpus = self.row.data.get("gpus")
        if gpus is None:
            return self._gpus_of_hardware()
        return gpus_in(gpus)

    def _gpus_of_hardware(self) -> int:
        """How many GPUs where no catalogue GPU is named: enough for memory, which takes the count alone."""
        count = self.row.get("hardware.gpus") or self.run.get("dp")
        if not isinstance(count, int):
            raise Lacking("gpus not stated")
        self.memory_only = "gpus not stated"
        return count

    def _fleet(self, count: int) -> dict[str, str]:
        """The GPUs, and the server the source's node count points to when the default one differs."""
        if self.memory_only is not None:
            self.note(f"the GPU is not in the catalogue; tensors of a rank do not depend on it ({ANY_GPU})")
            return {"gpus": f"{count}x{ANY_GPU}"}
        gpus = str(self.row.data["gpus"])
        nodes = self.row.get("hardware.nodes")
        match = re.match(r"^\s*(\d+)x(\D.*)$", gpus)
        if match is None or not isinstance(nodes, int) or nodes < 1 or count % nodes:
            return {"gpus": gpus}
        per_node = count // nodes
        default, others = self.owner.servers_of(match[2].strip())
        if default is None or per_node <= default:
            spread = nodes > 1 and default is not None and per_node < default
            return {"gpus": f"{nodes}x{per_node}x{match[2]}" if spread else gpus}
        server = next(((name, gpu) for held, name, gpu in others if held >= per_node), None)
        if server is None:
            self.note(f"the source's {nodes} nodes of {per_node} are planned as nodes of {default}")
            return {"gpus": gpus}
        name, gpu = server
        self.note(f"system {name} with {gpu}: the source has {per_node} GPUs in a node")
        return {"gpus": f"{nodes}x{per_node}x{gpu}", "system": name}

    # -- model ----------------------------------------------------------------------------------

    def _model(self) -> tuple[str | dict[str, Any], bool]:
        stated = self.row.data.get("model")
        if stated is None:
            raise Lacking("model not stated")
        if isinstance(stated, str):
            stem = self.owner.find_model(stated)
            if stem is None:
                raise Lacking(f"model {stated!r} is not in the catalogue")
            return self._known(stem, {})
        if not isinstance(stated, Mapping):
            raise Lacking("model is neither a name nor a mapping")
        facts = {k: v for k, v in stated.items() if v is not None}
        name = str(facts.get("name") or "")
        stem = self._stem_of(name)
        if stem is not None:
            return self._known(stem, facts)
        missing = [key for key in ("layers", "hidden", "heads") if facts.get(key) is None]
        if missing:
            raise Lacking(
                f"model.{missing[0]} not stated and {name or 'the model'!r} is not in the catalogue"
            )
        return self._inline(facts), False

    def _stem_of(self, name: str) -> str | None:
        # "llama-3-8b (what the source says of it)": the words in brackets are not part of the name.
        for candidate in dict.fromkeys((name, re.sub(r"\s*\(.*\)\s*$", "", name))):
            stem = self.owner.find_model(candidate) if candidate else None
            if stem is not None:
                return stem
        return None

    def _known(self, stem: str, facts: dict[str, Any]) -> tuple[str | dict[str, Any], bool]:
        body = self.owner.model_body(stem)
        if body.get("gflops_forward") is not None or body.get("kind") in ("cnn", "detector", "diffusion"):
            return self._network(stem, body, facts), True
        image = self.run.get("image_size") or facts.get("image_size")
        fixed = body.get("kind") in ("vit", "clip")
        if fixed and image is not None and image != body.get("image_size"):
            return {**_described(body), "image_size": image}, True
        shape = {k: facts[k] for k in (*_SHAPE, "kv_heads", "moe", "mla", "gated_mlp") if k in facts}
        differs = [k for k, v in shape.items() if k in body and not isinstance(v, Mapping) and body[k] != v]
        if not differs:
            return stem, fixed
        if all(facts.get(key) is not None for key in ("layers", "hidden", "heads", "ffn", "vocab")):
            return self._inline(facts), False
        if differs == ["layers"] and not body.get("pattern"):
            self.note(f"{stem} cut to {facts['layers']} layers")
            return {**_described(body), "layers": facts["layers"]}, fixed
        raise Lacking(f"model.{differs[0]} differs from {stem}'s and the rest of the shape is not stated")

    def _network(self, stem: str, body: Mapping[str, Any], facts: Mapping[str, Any]) -> str | dict[str, Any]:
        image = self.run.get("image_size") or facts.get("image_size")
        reference = body.get("image_size")
        if body.get("gflops_forward") is None:
            raise Lacking(f"model {stem} has no traced totals")
        if image is None or reference is None or image == reference:
            return stem
        # Every layer of an image network works on a grid proportional to the image.
        scale = (image / reference) ** 2
        self.note(f"{stem} traced at {reference} pixels, scaled to {image}")
        scaled = {k: body[k] * scale for k in _NETWORK_TOTALS if body.get(k) is not None}
        return {**_described(body), **scaled, "image_size": image}

    def _inline(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        model = dict(facts)
        vocab = self.run.pop("vocab", None)  # a convention's, where the stack has a usual one
        if model.get("vocab") is None and vocab is not None:
            model["vocab"] = vocab
        return model

    # -- run ------------------------------------------------------------------------------------

    def _framework(self) -> None:
        framework = self.run.get("framework")
        if framework is None:
            raise Lacking("run.framework not stated")
        nearest = NEAREST_FRAMEWORK.get(str(framework).casefold())
        if nearest is not None:
            self.run["framework"], why = nearest
            self.note(f"framework {framework} estimated as {nearest[0]}: {why}")
        stage = str(self.run.get("zero_stage", "")).casefold()
        if stage in _FSDP_STAGES and self.run["framework"] in ("ddp", "hf", "megatron"):
            # Accelerate, the HF Trainer and InternEvo reach FSDP through a setting.
            self.note(f"framework {self.run['framework']} with {stage} estimated as fsdp")
            self.run["framework"] = "fsdp"
        elif self.run["framework"] in ("ddp", "hf") and self.run.get("zero_stage") in (1, 2, 3):
            self.note(f"framework {self.run['framework']} with sharding estimated as deepspeed")
            self.run["framework"] = "deepspeed"
        degrees = [key for key in ("tp", "pp", "cp", "ep") if self.run.get(key, 1) not in (1, None)]
        if degrees and self.run["framework"] in ("ddp", "hf", "fsdp"):
            was = self.run["framework"]
            self.run["framework"] = "torchtitan" if was == "fsdp" else "megatron"
            self.note(f"framework {was} with {', '.join(degrees)} estimated as {self.run['framework']}")

    def _precision(self) -> None:
        precision, detail = self.run.get("precision"), str(self.run.get("precision_detail") or "")
        if precision in ("bf16", "fp16") and _TRUE_16_BIT.search(detail):
            self.run["precision"] = f"{precision}-pure"

    def _sharding(self) -> None:
        stage = self.run.get("zero_stage")
        if isinstance(stage, str) and stage.casefold() in _FSDP_STAGES:
            self.run["zero_stage"] = _FSDP_STAGES[stage.casefold()]
            if stage.casefold() in ("hsdp", "fsdp-hybrid-shard") and "dp_shard" not in self.run:
                nodes, dp = self.row.get("hardware.nodes"), self.run.get("dp")
                per_node = dp // nodes if isinstance(nodes, int) and isinstance(dp, int) and nodes else 8
                if isinstance(dp, int) and dp % max(1, per_node) == 0 and per_node < dp:
                    self.run["dp_shard"] = max(1, per_node)
                    self.note(f"hybrid sharding over the {per_node} GPUs of a node, FSDP's default")
        if self.run["framework"] == "hf" and self.run.get("zero_stage") == 0:
            del self.run["zero_stage"]

    def _method(self) -> None:
        method = self.run.get("method", "full")
        if method in ("adapter", "adapter_v2"):
            self.run["method"] = "lora"
            self.run["lora"] = {"kind": method, **(self.run.get("lora") or {})}
            self.note(f"method {method} estimated as lora with its count of trained parameters")
        elif method == "full" and self.run.get("quantization") is not None:
            self.run["method"] = "qlora"
            self.note("a quantised base is trained through adapters: method qlora")
        lora = self.run.get("lora")
        if self.run.get("method", "full") == "full" and lora is not None:
            del self.run["lora"]
        elif isinstance(lora, Mapping):
            self.run["lora"] = {k: v for k, v in lora.items() if v is not None}

    def _offload(self) -> None:
        offload = self.run.get("offload")
        for pattern, name in _OFFLOAD:
            if isinstance(offload, str) and pattern.match(offload):
                self.run["offload"] = name
                return

    def _batch(self, gpus: int, network: bool) -> None:
        """Fill the batch arithmetic: gpus = tp pp cp dp, global = micro x accumulation x dp."""
        run = self.run
        if gpus > 1 and run["framework"] == "megatron" and run.get("dp") is None:
            unsaid = [key for key in ("tp", "pp") if run.get(key) is None]
            if unsaid:
                raise Lacking(f"run.{unsaid[0]} not stated")
        degrees = 1
        for key in ("tp", "pp", "cp"):
            degrees *= int(run.get(key) or 1)
        if gpus % degrees:
            raise Lacking(f"run.tp x pp x cp = {degrees} does not divide {gpus} GPUs")
        dp = gpus // degrees
        if run.get("dp") not in (None, dp):
            raise Lacking(f"run.dp {run['dp']} is not the {dp} that {gpus} GPUs leave")
        run["dp"] = dp
        micro, accum, whole = run.get("micro_batch"), run.get("grad_accum"), run.get("global_batch")
        if not network and self._in_tokens(micro):
            raise Lacking("run.micro_batch counts tokens and run.seq_len is not stated")
        if micro is None and whole is not None and accum is not None and whole % (accum * dp) == 0:
            micro = whole // (accum * dp)
        if micro is None and whole is not None and whole == dp:
            micro = 1
        if micro is None and whole is not None and run["framework"] == "torchtitan":
            micro = self._per_stage(whole, dp)
        if micro is None:
            raise Lacking("run.micro_batch not stated")
        if accum is None and whole is not None:
            accum = max(1, round(whole / (micro * dp)))
        if accum is None:
            accum = 1
            if self.run.get("pp", 1) not in (1, None):
                raise Lacking("run.global_batch not stated")
            self.note("run.grad_accum 1: no accumulation is stated")
        if whole is not None and whole != micro * accum * dp:
            self.note(f"global batch {whole} as listed is not {micro} x {accum} x {dp}; the factors are used")
        run["micro_batch"], run["grad_accum"] = micro, accum
        run["global_batch"] = micro * accum * dp

    def _pipeline(self, model: str | dict[str, Any]) -> None:
        pp, vpp = int(self.run.get("pp") or 1), int(self.run.get("vpp") or 1)
        if pp == 1 or self.run["framework"] != "megatron" or "pipeline_split" in self.run:
            return
        layers = (model if isinstance(model, dict) else self.owner.model_body(model)).get("layers")
        if isinstance(layers, int) and layers % (pp * vpp):
            self.run["pipeline_split"] = "uneven"
            self.note(f"{layers} layers over {pp * vpp} chunks: divided unevenly, as the run must have been")

    def _per_stage(self, whole: int, dp: int) -> int | None:
        # pipeline_parallel_microbatches defaults to the number of stages (torchtitan, config_manager.py).
        stages = int(self.run.get("pp") or 1) * int(self.run.get("vpp") or 1)
        if stages == 1 or whole % dp:
            return None
        self.note(f"run.micro_batch: the local batch in {stages} micro-batches, torchtitan's default")
        return max(1, whole // dp // stages)

    def _in_tokens(self, micro: Any) -> bool:
        family = self.row.get("model.family")
        translation = family == "transformer-encdec" or self.run.get("workload") == "train-translation"
        return translation and isinstance(micro, int) and micro > 512 and self.run.get("seq_len") is None


def _described(body: Mapping[str, Any]) -> dict[str, Any]:
    """A catalogue model as an inline description: without what only a file has."""
    return {k: v for k, v in body.items() if k not in ("aliases", "default_for")}
