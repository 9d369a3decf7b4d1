"""Driver, CUDA, PyTorch and architecture against each other; ECC, persistence, the environment."""

from __future__ import annotations

import re
from dataclasses import replace

from gpucalc.doctor.context import Answers, Context
from gpucalc.doctor.finding import Finding, Question, once
from gpucalc.doctor.lint import settings_wrong, tables
from gpucalc.doctor.script import Setting
from gpucalc.spec.checks import Severity


def number(version: str) -> tuple[int, ...]:
    """A version as numbers to compare: 12.10 is above 12.9."""
    return tuple(int(part) for part in re.findall(r"[0-9]+", version.partition("+")[0]))


def _minor(version: str) -> str:
    return ".".join(map(str, number(version)[:2]))


def versions(ctx: Context) -> Answers:
    """Each version against the minimum another one sets."""
    box, table = ctx.box, ctx.cuda
    if not box.nvidia:
        return Answers(questions=(Question("driver", "its version and the ROCm or other stack it serves"),))
    found: list[Finding] = []
    asked: list[Question] = []
    for name, value, where in (
        ("driver", box.driver, "nvidia-smi"),
        ("CUDA", box.cuda, "torch.version.cuda"),
    ):
        if value is None:
            asked.append(Question(name, f"its version ({where})", ("B24", "B25")))
    cuda = box.cuda and _minor(box.cuda)
    if box.driver and cuda:
        found += _driver(ctx, box.driver, cuda)
    for capability in sorted({card.capability for card in box.cards if card.capability}, key=number):
        first = table.first_cuda_for_sm.get(capability)
        if first is None:
            if box.cards[0].spec is None or box.cards[0].spec.vendor == "NVIDIA":
                asked.append(Question(f"compute capability {capability}", "the first CUDA that runs it"))
            continue
        if cuda and number(cuda) < number(first):
            found.append(
                _wrong("cuda-architecture", f"CUDA {cuda}",
                       f"does not know compute capability {capability}, which needs {first}",
                       f"cards of {capability}; first CUDA {first}", f"CUDA {first} or later", ("B24",))
            )  # fmt: skip
        if cuda and number(cuda) >= (13,) and number(capability) < number(table.cuda13_min_sm):
            found.append(
                _wrong("cuda-architecture", f"CUDA {cuda}",
                       f"no longer builds for compute capability {capability}",
                       f"CUDA 13 starts at {table.cuda13_min_sm}", "CUDA 12.9", ("B24",))
            )  # fmt: skip
        floor = table.min_linux_driver_for_toolkit.get(first)
        if box.driver and floor and number(box.driver) < number(floor):
            found.append(
                _wrong("driver-architecture", f"driver {box.driver}",
                       f"is older than the first for compute capability {capability}",
                       f"CUDA {first} came with driver {floor}", f"driver {floor} or later", ("B24",))
            )  # fmt: skip
    if box.torch and cuda:
        found += _torch(ctx, _minor(box.torch), cuda)
    return Answers(tuple(found), tuple(asked))


def _driver(ctx: Context, driver: str, cuda: str) -> list[Finding]:
    table = ctx.cuda
    own = table.min_linux_driver_for_toolkit.get(cuda)
    family = table.minor_version_compat_min_driver.get(f"{number(cuda)[0]}.x")
    evidence = f"driver {driver}; CUDA {cuda} ships with {own or 'an unknown driver'}"
    if family is not None:
        evidence += f", runs from {family} on by minor-version compatibility"
    if family is not None and number(driver) < number(family):
        problem = f"is too old for CUDA {cuda}: nothing runs"
        return [
            _wrong(
                "driver-cuda", f"driver {driver}", problem, evidence, f"driver {family} or later", ("B24",)
            )
        ]
    if own is not None and number(driver) < number(own):
        return [
            Finding(
                "driver-cuda", Severity.WARNING, f"driver {driver}",
                f"is older than the one of CUDA {cuda}: code compiled at run time (PTX) fails", evidence,
                f"driver {own} or later", table.source, ("B24",),
            )
        ]  # fmt: skip
    if own is None and family is None:
        return []
    return [
        Finding("driver-cuda", Severity.NOTE, f"driver {driver}", f"serves CUDA {cuda}", evidence, None,
                table.source, ("B24",))
    ]  # fmt: skip


def _torch(ctx: Context, torch: str, cuda: str) -> list[Finding]:
    builds = ctx.cuda.pytorch_cuda.get(torch)
    if builds is None:
        return []
    listed = ", ".join(builds)
    if cuda not in builds:
        return [
            Finding(
                "torch-cuda", Severity.WARNING, f"PyTorch {torch}", f"is not published for CUDA {cuda}",
                f"its wheels: CUDA {listed}", f"CUDA {listed}, or your own build", ctx.cuda.source, ("B25",),
            )
        ]  # fmt: skip
    found = []
    for built, archs in ctx.cuda.pytorch_architectures.items():
        names, _, tag = built.partition("+cu")
        if torch not in names.split("/") or tag != cuda.replace(".", ""):
            continue
        for capability in sorted({card.capability for card in ctx.box.cards if card.capability}):
            if not _runs(capability, archs):
                found.append(
                    _wrong("torch-architecture", f"PyTorch {torch} for CUDA {cuda}",
                           f"holds no code for compute capability {capability}",
                           f"built for {', '.join(archs)}", "another build of PyTorch", ("B25",))
                )  # fmt: skip
    return found


def _runs(capability: str, archs: tuple[str, ...]) -> bool:
    """Code of the same generation and a smaller minor runs; PTX runs on anything newer."""
    major, minor = number(capability)
    for arch in archs:
        built = number(arch)
        if built[0] == major and built[1] <= minor:
            return True
        if arch.endswith("+PTX") and built <= (major, minor):
            return True
    return False


def _wrong(
    check: str, about: str, problem: str, evidence: str, right: str, claims: tuple[str, ...]
) -> Finding:
    return Finding(
        check, Severity.ERROR, about, problem, evidence, right, ("cuda", "pytorch_release"), claims
    )


def state(ctx: Context) -> Answers:
    """ECC that changes at the next reboot, errors, persistence."""
    found: list[Finding] = []
    for card in ctx.box.cards:
        about = f"GPU {card.index}"
        if card.ecc_uncorrected:
            found.append(
                Finding(
                    "ecc-errors", Severity.ERROR, about,
                    f"has {card.ecc_uncorrected} uncorrected memory errors",
                    card.name, "nvidia-smi -q -d ECC,ROW_REMAPPER; drain it and reset or replace it",
                    ("nvml_doc",), ("C46",),
                )
            )  # fmt: skip
        if card.ecc_pending:
            found.append(
                Finding(
                    "ecc-pending", Severity.WARNING, about, "changes its ECC mode at the next reboot",
                    f"{card.name}: current and pending mode differ", "reboot before measuring or planning",
                    ("nvml_doc",), ("C46",),
                )
            )  # fmt: skip
        if card.persistence is False:
            found.append(
                Finding(
                    "persistence", Severity.NOTE, about, "has persistence mode off: every start waits for it",
                    card.name, "nvidia-persistenced, or nvidia-smi -pm 1", ("smi_man",),
                )
            )  # fmt: skip
    return Answers(once(found))


def environment(ctx: Context) -> Answers:
    """Settings of NCCL and PyTorch that hurt, by the same tables as --lint."""
    known = tables(ctx.catalog).settings
    held = [Setting(name, value, 1, f"{name}={value}") for name, value in ctx.box.environment.items()]
    return Answers(tuple(replace(item, line=None) for item in settings_wrong(held, known)))
