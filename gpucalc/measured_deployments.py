"""Which deployment a published serving run is: from a row to what the planner takes, and what was filled in.

Sources name engines, releases and number formats in their own words. They are normalised by rules on
the row's fields; what a row leaves out comes from its own arithmetic, from the catalogue model it
names, or from a documented default (`conventions_serving.yaml`), and is listed with the deployment. A
row that still lacks something is skipped, and the reason names the field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpucalc.catalog import Catalog
from gpucalc.errors import InputError
from gpucalc.measured import (
    ANY_GPU,
    Conventions,
    Lacking,
    Row,
    Skip,
    gpus_in,
    in_catalog,
    is_number,
    whole,
)
from gpucalc.measured_runs import Normaliser
from gpucalc.spec.job import Job
from gpucalc.spec.run_values import SERVE_FRAMEWORKS
from gpucalc.spec.serve_run import ServeRun
from gpucalc.spec.yamlio import load_yaml
from gpucalc.units import GIB

CONVENTIONS = "conventions_serving.yaml"


@dataclass(frozen=True, slots=True)
class Nearest:
    """The planned engines that stand for one that is not, by what is asked, and why.

    version: the release of those that compute prompts as it does, where that matters.
    """

    memory: str
    decode: str
    prompt: str
    why: str
    version: str | None = None


NEAREST_ENGINE = {
    "gpt-fast": Nearest("hf", "trtllm", "trtllm", "the whole step is compiled, the cache has a fixed size"),
    "autoawq": Nearest(
        "hf",
        "trtllm",
        "hf",
        "FasterTransformer's attention decodes; prompts keep scores as Transformers 4.35",
        version="4.35.0",
    ),
    "exllamav2": Nearest("hf", "trtllm", "trtllm", "a step of compiled kernels, the cache has a fixed size"),
    "tgi": Nearest("vllm", "vllm", "vllm", "continuous batching over a paged cache"),
    "lmdeploy": Nearest("vllm", "trtllm", "trtllm", "TurboMind descends from FasterTransformer as this does"),
    "deepspeed": Nearest("hf", "vllm", "vllm", "fused inference kernels launched from Python"),
}
# Number formats as sources word them; the first that matches decides.
_QUANTS = (
    (re.compile(r"^(?:none|bf16|bfloat16|fp16|float16|f16)$|\bnative\b"), None),  # as published
    (re.compile(r"nvfp4"), "nvfp4"),
    (re.compile(r"mxfp4"), "mxfp4"),
    (re.compile(r"mxfp8"), "mxfp8"),
    (re.compile(r"^(?:ud-)?(i?q\d\w*)$"), "gguf"),
    (re.compile(r"gptq.*(?:int ?8|8 ?bit)"), "gptq-int8"),
    (re.compile(r"gptq|w4a16"), "gptq-int4"),
    (re.compile(r"awq"), "awq"),
    (re.compile(r"fbgemm"), "fbgemm-fp8"),
    (re.compile(r"fp8|float8"), "fp8"),
    (re.compile(r"int8 w8a8|w8a8"), "w8a8-int8"),
    (re.compile(r"nf4|bnb.*4"), "nf4"),
    (re.compile(r"int8"), "int8"),
    (re.compile(r"int4"), "int4"),
)
_BITS = re.compile(r"(\d+(?:\.\d+)?) ?bpw")
_VERSION = re.compile(r"\b(b\d{3,5}|\d+\.\d+[\w.]*)")
_MONTH = re.compile(r"\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* (20\d\d)\b", re.IGNORECASE)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_NUMBER = re.compile(r"(?:issue|PR) #(\d+)")
_KV = re.compile(r"\b(q\d_\d|fp8|f16|fp16|bf16|bfloat16|float16|int8|fp32)\b")
_ANSWER = re.compile(r"mean (?:of )?(\d+) (?:output )?tokens")
_ATTENTION_RANKS = re.compile(r"attention dp", re.IGNORECASE)
_CONTEXT_PARALLEL = re.compile(r"decode.context.parallel (\d+)", re.IGNORECASE)
_LAID_OUT_ELSEWHERE = re.compile(r"partly off-?loaded|experts on CPU", re.IGNORECASE)
# Words of a checkpoint's name that say how it was tuned or stored, not how it is built.
_STORED = re.compile(
    r"[-_.](?:hf|it|chat|instruct|base|gguf|awq|gptq(?:[-_]?int\d)?|fp8(?:[-_]?dynamic)?|nvfp4|bf16|int[48]"
    r"|quantized[-_.]w\da\d+|w\da\d+|[48]bit|iq\d\w*|q\d\w*|ud|mixed|fp4|\d{4})$",
    re.IGNORECASE,
)
_MEMORY_TOLERANCE = 0.006  # a log's total memory beside a catalogue GPU's
_WHOLE = (
    "tp", "pp", "dp", "ep", "isl", "osl", "concurrency", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens",
)  # fmt: skip
_SOME_TOKENS = 128  # of a request nobody described; pools do not depend on it


@dataclass(frozen=True, slots=True)
class Deployment:
    """A row's job for memory, decoding and prompts, the GPU's memory as logged, and what was filled in."""

    job: Job
    decode_job: Job
    prompt_job: Job
    gpu_memory_bytes: float | None
    notes: tuple[str, ...]
    known: str = "all"  # what the GPU is known for: all | memory (its size is logged) | tensors (nothing)


@dataclass(frozen=True, slots=True)
class Releases:
    """Which release of an engine was current at an issue's number or in a month."""

    framework: str
    repo: str
    numbers: tuple[tuple[int, str], ...]
    months: Mapping[str, str]
    source: str

    def at_number(self, number: int) -> str | None:
        """The release current when an issue of that number was opened."""
        found = [version for first, version in self.numbers if first <= number]
        return found[-1] if found else None


@dataclass(slots=True)
class ServingNormaliser:
    """Turns rows into deployments. Holds the catalogue and what has been looked up in it."""

    catalog: Catalog
    conventions: Conventions = field(default_factory=Conventions)
    releases: tuple[Releases, ...] = ()
    models: Normaliser = field(init=False)
    _stems: dict[str, str | None] = field(default_factory=dict)
    _memories: list[tuple[float, str]] | None = None

    def __post_init__(self) -> None:
        self.models = Normaliser(self.catalog)

    @classmethod
    def of(cls, catalog: Catalog) -> ServingNormaliser:
        """With the conventions that come with the catalogue."""
        path = in_catalog(catalog, CONVENTIONS)
        return cls(catalog) if path is None else cls(catalog, Conventions.read(path), _read_releases(path))

    def deployment_of(self, row: Row) -> Deployment | Skip:
        """The deployment a row describes, or why it cannot be told."""
        try:
            return _Draft(row, self).finish()
        except Lacking as lacking:
            return Skip(str(lacking))
        except InputError as error:
            return Skip(f"not accepted: {error}")

    def run_of(self, row: Row, notes: list[str] | None = None) -> dict[str, Any]:
        """A row's run with documented defaults filled in; `notes` takes the sentences that say so."""
        run = {k: v for k, v in row.run.items() if v is not None}
        said = self.conventions.fill(row, run)
        answer = _ANSWER.search(str(row.data.get("notes") or ""))
        if answer is not None:
            run["osl"] = int(answer[1])
            said.append(f"run.osl {answer[1]}: the mean of the answers, which stop early")
        if notes is not None:
            notes += said
        return run

    def meter_of(self, row: Row) -> str:
        """What a row's total of memory counts: held | allocated | device."""
        rules = (rule for rule in self.conventions.meters if rule.applies(row))
        return next((str(rule.values["meter"]) for rule in rules), "device")

    def find_model(self, name: str) -> str | None:
        """The catalogue id of a checkpoint's name, without the words that say how it is stored."""
        if name not in self._stems:
            self._stems[name] = next(
                (stem for one in _names(name) if (stem := self.catalog.stem_of("models", one)) is not None),
                None,
            )
        return self._stems[name]

    def gpu_with(self, memory_bytes: float) -> str | None:
        """The catalogue GPU whose reported memory is nearest a logged total."""
        if self._memories is None:
            self._memories = []
            for name in self.catalog.names("gpus"):
                gpu, _ = self.catalog.gpu(name)
                if gpu.memory_total is not None or gpu.memory_runtime is not None:
                    self._memories.append((float(gpu.usable_memory().value), name))
        near = min(self._memories, key=lambda held: abs(held[0] - memory_bytes), default=None)
        if near is None or abs(near[0] / memory_bytes - 1) > _MEMORY_TOLERANCE:
            return None
        return near[1]


def _names(name: str) -> Iterator[str]:
    """A checkpoint's name, then shorter ones: without owner, brackets and words of storage."""
    tried: set[str] = set()
    plain = re.sub(r"\s*\(.*?\)\s*", "", name).strip()
    for start in (name, plain, plain.rpartition("/")[2], plain.partition(" ")[0]):
        word = start
        while word and word not in tried:
            tried.add(word)
            yield word
            word = _STORED.sub("", word)


def _read_releases(path: Path) -> tuple[Releases, ...]:
    out = []
    for entry in load_yaml(path).data.get("releases", []):
        out.append(
            Releases(
                framework=entry["framework"],
                repo=entry["repo"],
                numbers=tuple((int(number), str(version)) for number, version in entry.get("numbers", [])),
                months={str(month): str(version) for month, version in entry.get("months", [])},
                source=entry["source"],
            )
        )
    return tuple(out)


class _Draft:
    """One row on its way to a deployment."""

    def __init__(self, row: Row, owner: ServingNormaliser) -> None:
        self.row = row
        self.owner = owner
        self.notes: list[str] = []
        self.run = owner.run_of(row, self.notes)

    def finish(self) -> Deployment:
        """The deployment; raises Lacking or InputError."""
        odd = next((key for key in _WHOLE if key in self.run and whole(self.run[key]) is None), None)
        if odd is not None:
            raise Lacking(f"run.{odd} is {self.run[odd]!r}, not a whole number")
        if _LAID_OUT_ELSEWHERE.search(str(self.row.data.get("notes") or "")):
            raise Lacking("part of the weights lies in host memory, where is not stated")
        engine = str(self.run.get("framework") or "").casefold()
        if not engine:
            raise Lacking("run.framework not stated")
        model = self._model()
        memory = self._gpu_memory()
        gpus, known = self._gpus(memory)
        self._version(engine)
        self._formats()
        self._settings(engine, model)
        self._degrees(engine, gpus)
        taken = NEAREST_ENGINE.get(engine)
        if taken is not None:
            words = f"{taken.memory} in memory, {taken.decode} in speed, {taken.prompt} for prompts"
            self.notes.append(f"{engine} estimated as {words}: {taken.why}")
        elif engine in SERVE_FRAMEWORKS:
            taken = Nearest(engine, engine, engine, "")
        else:
            raise Lacking(f"engine {engine} is not planned")
        return Deployment(
            self._job(model, gpus, taken.memory, taken.version),
            self._job(model, gpus, taken.decode),
            self._job(model, gpus, taken.prompt, taken.version),
            memory,
            tuple(dict.fromkeys(self.notes)),
            known=known,
        )

    def _job(self, model: str | dict[str, Any], gpus: str, engine: str, version: str | None = None) -> Job:
        run = {key: value for key, value in self.run.items() if key in ServeRun.model_fields}
        if version is not None:
            run["version"] = version
        run["framework"] = engine
        longest = run.get("max_model_len")
        if longest is not None:  # a request that fits, where none is stated
            run.setdefault("osl", max(1, min(_SOME_TOKENS, longest - run.get("isl", 1))))
            run.setdefault("isl", max(1, min(_SOME_TOKENS, longest - run["osl"])))
        if engine in ("hf", "llamacpp"):
            for key in ("gpu_memory_utilization", "mem_fraction_static", "enforce_eager", "ep"):
                run.pop(key, None)
        if engine == "hf":
            run.pop("max_num_batched_tokens", None)
            run.pop("max_num_seqs", None)
        return Job.read({"name": self.row.id, "model": model, "gpus": gpus, "run": run}, where=self.row.where)

    # -- model ----------------------------------------------------------------------------------

    def _model(self) -> str | dict[str, Any]:
        stated = self.row.data.get("model")
        facts = dict(stated) if isinstance(stated, Mapping) else {}
        names = [stated if isinstance(stated, str) else facts.get("name"), self.row.data.get("checkpoint")]
        for name in names:
            stem = self.owner.find_model(name) if isinstance(name, str) else None
            if stem is not None and self._agrees(stem, facts):
                return stem
        name = str(names[0] or "")
        if not facts:
            raise Lacking(f"model {name!r} is not in the catalogue" if name else "model not stated")
        return self._inline(name, facts)

    def _agrees(self, stem: str, facts: Mapping[str, Any]) -> bool:
        """Whether a catalogue model has the shape that the row states."""
        body = self.owner.models.model_body(stem)
        shape = ("layers", "hidden", "heads", "kv_heads", "head_dim")
        return all(
            facts.get(key) is None or body.get(key) is None or facts[key] == body[key] for key in shape
        )

    def _inline(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        """A model given by its shape; the width of its feed-forward part follows from its size."""
        if isinstance(facts.get("attention"), str) and re.search("hybrid|cross|ssm", facts["attention"]):
            raise Lacking(f"model {name!r} is not in the catalogue, nor are its mixed layers stated")
        if facts.get("moe") is not None or facts.get("mla") is not None:
            raise Lacking(f"model {name!r} is not in the catalogue, nor is its whole shape stated")
        needed = ("layers", "hidden", "heads", "kv_heads", "vocab", "params_b")
        missing = next((key for key in needed if facts.get(key) is None), None)
        if missing is not None:
            raise Lacking(f"model.{missing} not stated and {name!r} is not in the catalogue")
        odd = next((key for key in needed if not is_number(facts[key])), None)
        if odd is not None:
            raise Lacking(f"model.{odd} is {facts[odd]!r}, not a number")
        layers, hidden = int(facts["layers"]), int(facts["hidden"])
        head = int(facts.get("head_dim") or hidden // int(facts["heads"]))
        attention = hidden * head * 2 * (int(facts["heads"]) + int(facts["kv_heads"]))
        tables = 2 * int(facts["vocab"]) * hidden
        ffn = (float(facts["params_b"]) * 1e9 - tables - layers * attention) / (3 * hidden * layers)
        if ffn < hidden:
            raise Lacking(f"model.ffn not stated and {name!r} is not in the catalogue")
        ffn = round(ffn / 64) * 64
        self.notes.append(f"model.ffn {ffn}: what {facts['params_b']} billion parameters leave")
        shape = {key: facts[key] for key in needed if key != "params_b"}
        return {
            **shape, "name": name, "head_dim": head, "ffn": ffn, "gated_mlp": True, "tied_embeddings": False,
            "architecture": "llama", "kind": "dense_decoder",
        }  # fmt: skip

    # -- hardware -------------------------------------------------------------------------------

    def _gpu_memory(self) -> float | None:
        """Total memory of one GPU as the log has it; a whole number is the marketed size, not a log's."""
        total = self.row.get("hardware.gpu_mem_total_gib")
        return float(total) * GIB if is_number(total) and not float(total).is_integer() else None

    def _gpus(self, memory: float | None) -> tuple[str, str]:
        stated = self.row.data.get("gpus")
        if stated is not None:
            gpus_in(stated)
            return str(stated), "all"
        degrees = [int(self.run[key]) for key in ("tp", "pp", "dp") if key in self.run]
        count = self.row.get("hardware.gpus") or (math.prod(degrees) if degrees else None)
        words = self.row.get("hardware.gpu")
        if count is None and self.run.get("framework") == "llamacpp" and words is None:
            count = 1  # it divides nothing over GPUs by itself but whole layers
        if count is None:
            raise Lacking("gpus not stated")
        name = self.owner.gpu_with(memory) if memory is not None else None
        if name is not None and memory is not None:
            self.notes.append(f"the GPU is not named; its {memory / GIB:.2f} GiB are those of {name}")
            return f"{count}x{name}", "memory"
        self.notes.append(f"the GPU is not in the catalogue: tensors do not depend on it ({ANY_GPU})")
        return f"{count}x{ANY_GPU}", "tensors"

    # -- run ------------------------------------------------------------------------------------

    def _version(self, engine: str) -> None:
        """The release as the engine numbers it; from the month or the issue's number when not stated."""
        words = str(self.run.pop("version", "") or "")
        number = _VERSION.search(words)
        if engine in NEAREST_ENGINE:
            number = None  # another engine's numbering
        if number is not None:
            self.run["version"] = number[1]
            return
        like = NEAREST_ENGINE[engine].decode if engine in NEAREST_ENGINE else engine
        month = _MONTH.search(words)
        repo, path = self.row.get("source.repo"), str(self.row.get("source.issue_or_path") or "")
        issue = _NUMBER.search(path)
        for releases in self.owner.releases:
            if releases.framework != like:
                continue
            found = None
            if month is not None:
                found = releases.months.get(f"{month[2]}-{_MONTHS.index(month[1].casefold()) + 1:02}")
            elif issue is not None and repo == releases.repo and engine == like:
                found = releases.at_number(int(issue[1]))
            if found is not None:
                self.run["version"] = found
                self.notes.append(f"run.version {found}: the release of that time ({releases.source})")

    def _formats(self) -> None:
        quant = self.run.pop("quant", None)
        if quant is not None:
            self._quant(str(quant).casefold().strip(), str(quant))
        kv = self.run.pop("kv_dtype", None)
        if kv is not None:
            match = _KV.search(str(kv).casefold())
            if match is None:
                raise Lacking(f"run.kv_dtype {kv!r} is not planned")
            self.run["kv_dtype"] = match[1]

    def _quant(self, words: str, stated: str) -> None:
        bits = _BITS.search(words)
        if bits is not None:
            near = min((4.0, "int4"), (8.0, "int8"), key=lambda one: abs(one[0] - float(bits[1])))
            if abs(near[0] - float(bits[1])) > 0.1:
                raise Lacking(f"run.quant {stated!r} is not planned")
            self.run["quant"] = near[1]
            self.notes.append(f"quant {stated} estimated as {near[1]}")
            return
        for pattern, name in _QUANTS:
            match = pattern.search(words)
            if match is None:
                continue
            if name is not None:
                self.run["quant"] = match[1] if name == "gguf" else name
            return
        raise Lacking(f"run.quant {stated!r} is not planned")

    def _settings(self, engine: str, model: str | dict[str, Any]) -> None:
        run = self.run
        ranks = _CONTEXT_PARALLEL.search(str(self.row.data.get("notes") or ""))
        if ranks is not None and engine == "vllm":
            run["decode_context_parallel"] = int(ranks[1])
        block = self.row.measured.get("block_size")  # logged, but a setting
        if whole(block) is not None and engine in ("vllm", "trtllm"):
            run.setdefault("block_size", block)
        if engine == "sglang" and "gpu_memory_utilization" in run:
            run["mem_fraction_static"] = run.pop("gpu_memory_utilization")
        if run.get("max_model_len") is None:
            body = model if isinstance(model, dict) else self.owner.models.model_body(model)
            longest = body.get("max_context")
            request = (whole(run.get("isl")) or 0) + (whole(run.get("osl")) or 0)
            if engine in ("vllm", "sglang") and isinstance(longest, int):
                run["max_model_len"] = max(longest, request)
                self.notes.append(f"run.max_model_len {run['max_model_len']}: the model's longest context")
            elif request > 1:
                run["max_model_len"] = request + ("osl" not in run)

    def _degrees(self, engine: str, gpus: str) -> None:
        count, run = gpus_in(gpus), self.run
        spreads = engine in ("hf", "llamacpp")
        if not any(key in run for key in ("tp", "pp", "dp")) and count > 1 and not spreads:
            raise Lacking("run.tp not stated")
        ranks = int(run.get("tp") or 1)
        if (
            engine == "trtllm"
            and ranks > 1
            and _ATTENTION_RANKS.search(str(self.row.data.get("notes") or ""))
        ):
            run.update(tp=1, dp=ranks, ep=ranks)
            self.notes.append(f"attention over {ranks} data ranks, experts over as many: the sizes not given")
        product = math.prod(int(run.get(key) or 1) for key in ("tp", "pp", "dp"))
        if product != count and spreads and product == 1:
            run["pp"] = count
            self.notes.append(f"layers are spread over the {count} GPUs, the engine's default")
        elif product != count:
            raise Lacking(f"run.tp x pp x dp = {product} is not {count} GPUs")
