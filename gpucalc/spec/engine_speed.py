"""What a serving engine's own kernels and loop add to a GPU's rates.

Fitted by engine and weight class, never by model. A weight class says in which bits weights are stored and
in which activations are multiplied: w16 (16 bits or more), w8a16 and w4a16 (weights widened on the way), w8a8
and w4a4 (activations quantised too, where the GPU has the rate); w2a16 are codebooks of 3 bits and less,
which kernels look weights up in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gpucalc.errors import InputError
from gpucalc.spec.base import Spec
from gpucalc.spec.figure import Figure
from gpucalc.spec.version import version_key

WeightClass = Literal["w16", "w8a16", "w8a8", "w4a16", "w4a4", "w2a16"]
WIDE_BYTES = 1.5  # per parameter, from there up
EIGHT_BYTES = 0.8
CODEBOOKS = ("iq1", "iq2", "iq3")  # GGUF types by the start of their name
# What stands for a class an engine file does not list: the nearest that stores as many bits.
NEAREST: dict[WeightClass, tuple[WeightClass, ...]] = {
    "w16": (),
    "w8a16": ("w8a8",),
    "w8a8": ("w8a16",),
    "w4a16": ("w4a4",),
    "w4a4": ("w4a16",),
    "w2a16": (),
}


def weight_class(bytes_per_param: float, *, quantised: bool, name: str = "") -> WeightClass:
    """The class of weights stored in so many bytes each; `quantised`: activations are too.

    `name` is the format's, which tells codebooks from plain quantisation.
    """
    if bytes_per_param >= WIDE_BYTES:
        return "w16"
    if bytes_per_param >= EIGHT_BYTES:
        return "w8a8" if quantised else "w8a16"
    if name.startswith(CODEBOOKS):
        return "w2a16"
    return "w4a4" if quantised else "w4a16"


class WeightSpeed(Spec):
    """How one engine multiplies with weights of one class.

    read_share: of the datasheet bandwidth thin products reach, where the kernel does not reach less.
    per_multiprocessor: what each multiprocessor can have in flight, the bound on GPUs with few of them for
    their bandwidth. layer_gap: what a layer takes besides its products and attention in a captured graph;
    host time where kernels are launched one by one. compute_share: of the rate the GPU's kernels reach
    alone, at many rows.
    """

    read_share: Figure
    per_multiprocessor: Figure | None = None
    layer_gap: Figure
    compute_share: Figure


class EngineSpeed(Spec):
    """The speed of an engine beyond its kernels' rates on the GPU.

    before: constants of classes whose kernels were other ones before a version. vendors: of classes with
    kernels of their own on a vendor's GPUs, which multiply with weights as they are stored in every version.
    host_layer: host time per layer where kernels are launched one by one, by the engine version from
    which it holds ("0" for the first). own_kernels: thin products are the engine's, so that the rates of
    the GPU's libraries bound them not. mixes_prefill: prompt chunks share passes with decoding. reserves: a
    request is admitted only when its whole length fits the cache. rewrites_cache: each step copies keys and
    values and widens them to the query heads. grouped_since: the version before which each query head reads
    its keys and values anew. widens_before: the version before which weights of fewer bits are written out
    in 16 bit before many rows are multiplied with them. expert_launch: time a matrix of each expert takes
    where they are multiplied with one after another, until the version of experts_together. stream_bytes:
    of an element handed to the next stage, as the dtype has where not given. stages_whole: what is handed
    over goes to the host before it goes on, where GPUs have no access to each other. grouped_tile:
    rows of a tile of the kernel that multiplies with all experts at once, from that version on. launch_queue:
    kernels that wait on one GPU before the one host thread that starts them waits too, with
    product_launches for a product of many rows and layer_launches for the rest of a layer; chunk_copies: of
    a prompt's chunks, so many have inputs of their own.
    """

    weights: dict[WeightClass, WeightSpeed]
    moe_gap: Figure  # per layer with experts, beside layer_gap
    step: Figure  # per pass, no forward
    request: Figure  # per running request and pass
    grouped_share: Figure  # of the rate one product reaches, what grouped expert products do
    attention_share: Figure  # of the rate decode attention reaches alone
    all_reduce_latency: Figure  # share of NCCL's
    handoff: Figure  # per pipeline boundary of a pass
    host_layer: dict[str, Figure] | None = None
    before: dict[str, dict[WeightClass, WeightSpeed]] | None = None
    vendors: dict[str, dict[WeightClass, WeightSpeed]] | None = None
    eager: bool = False  # no graphs, whatever is asked
    own_kernels: bool = False
    stream_bytes: Figure | None = None
    stages_whole: bool = False
    mixes_prefill: bool = True
    reserves: bool = False
    rewrites_cache: bool = False
    grouped_since: str | None = None
    widens_before: str | None = None
    expert_launch: Figure | None = None
    experts_together: str | None = None
    grouped_tile: Figure | None = None
    launch_queue: Figure | None = None
    product_launches: Figure | None = None
    layer_launches: Figure | None = None
    chunk_copies: Figure | None = None
    multiplies_in: Literal["fp16"] | None = None  # whatever the dtype

    def figure(self, key: str) -> Figure:
        """A figure that goes with another one given. Raises InputError where the engine lacks it."""
        found = getattr(self, key)
        if not isinstance(found, Figure):
            raise InputError("an engine with launch_queue has this too", key=f"speed.{key}")
        return found

    def own_kernels_on(self, vendor: str) -> Mapping[WeightClass, WeightSpeed]:
        """The classes with kernels of their own on a vendor's GPUs."""
        return (self.vendors or {}).get(vendor, {})

    def of_class(self, name: WeightClass, version: str, vendor: str) -> WeightSpeed | None:
        """The constants of a class in a version, or of the nearest listed class; None where neither is."""
        given = version_key(version)
        older = [
            classes
            for first, classes in sorted(
                (self.before or {}).items(), key=lambda item: version_key(item[0]) or ()
            )
            if given is not None and given < (version_key(first) or ())
        ]
        for one in (name, *NEAREST[name]):
            for classes in (self.own_kernels_on(vendor), *older, self.weights):
                if one in classes:
                    return classes[one]
        return None
