"""The Python API: `plan` answers what `gpucalc plan` does, and its answer draws itself in a notebook.

    import gpucalc

    answer = gpucalc.plan("llama-3-8b", gpus="8xH100-SXM", run={"seq_len": 4096})
    answer.level                        # "fits", "marginal" or "does_not_fit"
    answer.value("tokens_per_s")        # the number behind any line of the report

What a user gets wrong is an `errors.GpucalcError` that says where, what was given and what is legal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from gpucalc.catalog import open_catalog
from gpucalc.errors import Infeasible, InputError
from gpucalc.jobs import resolve
from gpucalc.plan import answer
from gpucalc.planner import plan_job, provenance

if TYPE_CHECKING:
    from gpucalc.catalog import Catalog
    from gpucalc.documents import Estimate
    from gpucalc.jobs import ResolvedJob
    from gpucalc.layouts import Layouts
    from gpucalc.line import Line
    from gpucalc.scale import Scaling
    from gpucalc.spec.hardware import Cluster

MOST_TIMES = 8  # a scaling curve reaches from an eighth of the job's GPUs to eight times as many


@dataclass(frozen=True, slots=True, repr=False)
class Plan(answer.Plan):
    """A plan with what it was made from: the numbers, the document, the table, the page.

    Every number is a `Line` of one tree (`root`); the fields `verdict`, `memory`, `time`,
    `throughput`, `cost`, `assumptions` and `actions` are its parts.
    """

    job: ResolvedJob = field(kw_only=True, compare=False)
    catalog: Catalog = field(kw_only=True, compare=False)

    @property
    def level(self) -> str:
        """ "fits", "marginal" or "does_not_fit"."""
        return self.verdict.level.value

    @property
    def cluster(self) -> Cluster:
        """The machine as the catalogue describes it."""
        return self.catalog.cluster(self.job.fleet, self.job.job.system, network=self.job.job.network)

    def line(self, name: str) -> Line:
        """The line of that dotted path, or of the end of one; of several, the worst GPU's at its peak.

        Raises UnknownName or InputError.
        """
        from gpucalc.explain import find

        return find(self.root, name, prefer=(f"stage_{self.verdict.stage}", self.verdict.phase))[1]

    def value(self, name: str) -> Any:
        """The number of that line, in bytes, seconds, FLOPs, watts, dollars: `line(name).unit`."""
        return self.line(name).value

    def explain(self, name: str) -> str:
        """That line as formula, values and sources, as `gpucalc explain` prints it."""
        from gpucalc.explain import explain
        from gpucalc.report import table
        from gpucalc.report.screen import render

        found = explain(self.root, name, prefer=(f"stage_{self.verdict.stage}", self.verdict.phase))
        return render(table.explanation(found), color=False)

    def document(self) -> dict[str, Any]:
        """What `gpucalc plan --json` prints, as a dictionary."""
        from gpucalc.report import json as report

        found: dict[str, Any] = json.loads(report.text(report.plan(self, provenance(self.job, self.catalog))))
        return found

    def scaling(self) -> Scaling | None:
        """The same run on fewer and on more GPUs; None where it cannot be told: a deployment, several kinds
        of GPU, or a layout that goes with no other number of them."""
        from gpucalc.scale import scale

        if self.serves or len(self.job.fleet.parts) > 1:
            return None
        layout = self.layout
        copy = layout.tp * layout.pp * layout.cp
        sizes = {copy * 2**power for power in range(20)}
        near = {count for count in sizes if self.gpus / MOST_TIMES <= count <= self.gpus * MOST_TIMES}
        try:
            return scale(self.job, self.catalog, sorted(near | {self.gpus}))
        except (Infeasible, InputError):
            return None

    def search(self) -> Layouts | None:
        """The layouts weighed for what the run leaves auto; None where it leaves nothing to a search."""
        from gpucalc.layouts import best_layouts
        from gpucalc.search import AUTO_KEYS, has_auto
        from gpucalc.spec.train_run import TrainRun

        run = self.job.run
        if not isinstance(run, TrainRun) or not has_auto(run):
            return None
        held = [f"run.{key}" for key in AUTO_KEYS if getattr(run, key) != "auto"]
        return best_layouts(self.job, self.catalog, held=held)

    def html(
        self,
        *,
        rules: Sequence[Estimate] = (),
        origin: Mapping[str, Any] | None = None,
        search: Layouts | None = None,
    ) -> str:
        """The page of `gpucalc plan --html`.

        rules: what `plan --rules` tells; origin: the files read; search: layouts that led to this plan.
        """
        from gpucalc.report.html.page import Beside, page

        known = provenance(self.job, self.catalog) if origin is None else origin
        weighed = search or self.search()
        if weighed is not None:
            from gpucalc.layouts import planned_whole

            weighed = planned_whole(weighed, self.job, self.catalog)
        return page(self, Beside(self.cluster, self.scaling(), weighed, rules, known))

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict, the key figures and the memory's stack."""
        from gpucalc.report.html.page import fragment

        return fragment(self)

    def __str__(self) -> str:
        """The report that `gpucalc plan` prints."""
        from gpucalc.report import table
        from gpucalc.report.screen import render

        return render(table.plan(self), color=False)

    def __repr__(self) -> str:
        return f"<gpucalc.Plan {self.name!r} on {self.fleet!r}: {self.level}>"


def plan(
    job: str | PathLike[str] | Mapping[str, Any],
    *,
    gpus: str | None = None,
    model: str | None = None,
    task: str | None = None,
    run: Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,
    catalog: str | PathLike[str] | None = None,
    hub: bool = False,
    advice: bool = True,
) -> Plan:
    """The plan of a job: does it fit, how fast is it, what binds, what would help.

    job: a job file, shipped job, model file, `config.json`, folder or catalogue model, as on the command
    line, or a job's own keys as a mapping. gpus, model, task, hub and catalog are the flags of those names.
    run: keys of the run, `{"seq_len": 4096}`. set: any keys of the job by their dotted names, as `--set`
    takes them; None takes a key away. advice: look for changes that would help, which takes more time.

    Raises errors.GpucalcError: UnknownName, UnsupportedModel, Infeasible and InputError are its kinds.
    """
    changes = {f"run.{key}": value for key, value in (run or {}).items()} | dict(set or {})
    known = open_catalog(None if catalog is None else fspath(catalog))
    given = dict(job) if isinstance(job, Mapping) else fspath(job)
    sets = [f"{key}={_text(value)}" for key, value in changes.items()]
    found = resolve(given, known, gpus=gpus, model=model, hub=hub, task=task, sets=sets)
    return planned(found, known, advice=advice)


def planned(job: ResolvedJob, catalog: Catalog, *, advice: bool = True) -> Plan:
    """The plan of a job already read, with what it was made from."""
    made = plan_job(job, catalog, advice=advice)
    parts = {part.name: getattr(made, part.name) for part in fields(answer.Plan)}
    return warned(Plan(**parts, job=job, catalog=catalog), [f"models/{job.model.label}"])


def warned(made: Plan, entities: Sequence[str]) -> Plan:
    """The plan with a note for every claim of planning documents about these entries that does not hold."""
    if not made.catalog.claimed(entities):
        return made
    from gpucalc.claims import warnings

    return replace(made, notes=(*made.notes, *warnings(made.catalog, entities)))


def _text(value: Any) -> str:
    """A value as `--set` takes it; JSON is YAML."""
    try:
        return "" if value is None else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise InputError("cannot stand in a job", key="set", given=value) from None
