"""Long runs and failures: time between interruptions, checkpoints, what is lost, spare machines.

A synchronous run stops with any of its GPUs and goes on from the last checkpoint. Interruptions are
taken as independent and equally likely at any time, so that a run's rate is its GPUs' rates summed.
"""

from __future__ import annotations

from gpucalc.formula import formula
from gpucalc.formulas.rules import gpus_with_spares, save_interval_s
from gpucalc.num import Num, exp, minimum, sqrt, where

_ARITHMETIC = "Arithmetic"
_SERIES = "Independent failures at a constant rate: the rates of all GPUs of a run add up"
_DALY = "Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps"


# --- how often -------------------------------------------------------------------------------------


@formula(
    unit="GPU h",
    source="Published runs: GPUs times hours over interruptions; Llama 3 405B: 16,384 x 1,296 / 419",
)
def mtbf_gpu_hours(*, gpus: Num, hours: Num, interruptions: Num) -> Num:
    """GPU-hours between two interruptions of a run that was watched for so long."""
    return gpus * hours / interruptions


@formula(unit="s", source=_SERIES)
def run_mtbf_s(*, mtbf_gpu_hours: Num, gpus: Num) -> Num:
    """Mean time between the interruptions of a run on so many GPUs."""
    return mtbf_gpu_hours * 3600 / gpus


@formula(unit="count", source=_SERIES)
def expected_interruptions(*, wall_s: Num, mtbf_s: Num) -> Num:
    """Interruptions to expect over a wall time."""
    return wall_s / mtbf_s


# --- checkpoints -----------------------------------------------------------------------------------


@formula(unit="bytes/s", source=_ARITHMETIC + "; storage grows with its clusters up to the largest told of")
def storage_bytes_per_s(*, gpus: Num, per_gpu_bytes_per_s: Num, most_bytes_per_s: Num) -> Num:
    """Rate at which all ranks together write to the storage."""
    return minimum(gpus * per_gpu_bytes_per_s, most_bytes_per_s)


@formula(unit="s", source=_ARITHMETIC + "; BLOOM wrote 2.3 TB in 40 s at 57.5 GB/s")
def write_s(*, checkpoint_bytes: Num, storage_bytes_per_s: Num) -> Num:
    """Time to write one checkpoint, all ranks at once."""
    return checkpoint_bytes / storage_bytes_per_s


@formula(unit="s", source=_ARITHMETIC + "; an asynchronous save blocks for its copy to host memory alone")
def stall_s(*, write_s: Num, blocking_share: Num) -> Num:
    """Time for which training stands still at a checkpoint."""
    return write_s * blocking_share


@formula(
    unit="s",
    source=_DALY + ", equation 37: for writes below twice the time between failures, else that time",
)
def daly_interval_s(*, write_s: Num, mtbf_s: Num) -> Num:
    """Computation between two checkpoints that finishes a run soonest."""
    return where(
        write_s < 2 * mtbf_s,
        save_interval_s(write_s=write_s, mtbf_s=mtbf_s)
        * (1 + sqrt(write_s / (2 * mtbf_s)) / 3 + write_s / (2 * mtbf_s) / 9)
        - write_s,
        mtbf_s,
    )


@formula(unit="steps", source=_ARITHMETIC)
def interval_steps(*, interval_s: Num, step_s: Num) -> Num:
    """The interval in whole steps, one at the least."""
    return where(interval_s > step_s, (interval_s / step_s + 0.5) // 1, 1)


# --- what is lost ----------------------------------------------------------------------------------


@formula(
    unit="fraction",
    source=_DALY + ", equation 20: wall time M e^(R/M) (e^((t + d)/M) - 1) of t seconds of progress",
)
def goodput(*, interval_s: Num, write_s: Num, restart_s: Num, mtbf_s: Num) -> Num:
    """Share of wall time that makes progress; checkpoints, repeated work and restarts take the rest.

    Failures may strike at any time, also while a checkpoint is written or a run restarts.
    """
    return interval_s / (mtbf_s * exp(restart_s / mtbf_s) * (exp((interval_s + write_s) / mtbf_s) - 1))


@formula(unit="fraction", source=_ARITHMETIC)
def saving_share(*, write_s: Num, interval_s: Num) -> Num:
    """Share of time spent on writing checkpoints, when nothing fails."""
    return write_s / (interval_s + write_s)


@formula(
    unit="fraction",
    source="First order: half an interval is repeated after each interruption, and the restart waited for",
)
def interrupted_share(*, interval_s: Num, write_s: Num, restart_s: Num, mtbf_s: Num) -> Num:
    """Share of time lost to interruptions: work done again, and restarts."""
    return ((interval_s + write_s) / 2 + restart_s) / mtbf_s


# --- spare machines --------------------------------------------------------------------------------


@formula(
    unit="nodes",
    source="Little's law: those that fail in the time a repair takes; the number is Poisson distributed",
)
def nodes_in_repair(*, mtbf_s: Num, hardware_share: Num, repair_s: Num) -> Num:
    """Nodes that are out on average: an interruption by hardware takes its whole node away."""
    return hardware_share * repair_s / mtbf_s


@formula(unit="GPUs", source="A node is replaced whole")
def spare_gpus(*, nodes: Num, gpus_per_node: Num) -> Num:
    """GPUs of so many spare nodes."""
    return nodes * gpus_per_node


@formula(unit="GPUs", source='Document "multi-GPU architectures", section 5: at least 10 % of the GPUs spare')
def spare_gpus_by_rule(*, gpus: Num, spare_percent: Num) -> Num:
    """Spare GPUs the document asks for, whatever they are and however long the run."""
    return gpus_with_spares(gpus=gpus, spare_percent=spare_percent) - gpus


@formula(unit="GPUs", source=_ARITHMETIC)
def total_gpus(*, gpus: Num, spare_gpus: Num) -> Num:
    """GPUs in use and in reserve."""
    return gpus + spare_gpus
