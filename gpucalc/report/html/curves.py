"""What other sizes and loads would bring: the scaling curve of a training run, speed against throughput of
a deployment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpucalc import units
from gpucalc.layouts import Layouts, Option
from gpucalc.plan.answer import LoadPoint, Plan
from gpucalc.report.html.ledger import BESIDE, Ledger
from gpucalc.report.html.pieces import Row, Section, figure, legend, section, table
from gpucalc.report.html.tables import LEVELS
from gpucalc.report.layouts import HEADS, idle
from gpucalc.report.markup import Html, tag, text
from gpucalc.report.screen import set_word, whole
from gpucalc.report.svg.axes import Axis, linear, logarithmic
from gpucalc.report.svg.plot import Curve, Point, plot
from gpucalc.scale import Scaling, Size, rental_price

# -- scaling --------------------------------------------------------------------------------------


def scaling(answer: Plan, found: Scaling | None, ledger: Ledger) -> Section | None:
    """Rate on more and fewer GPUs, against the rate that as many of the smallest would have."""
    if found is None or not found.runs:
        return None
    series = [("weak", "every GPU keeps its batch", "0", found.weak)]
    if found.strong is not None:
        series.append(("strong", "the global batch stays", "1", found.strong))
    running = [size for _, _, _, sizes in series for size in sizes if size.runs]
    if len(running) < 2:
        return None
    counts = sorted({size.gpus for size in running})
    rates = [rate(size) for size in running]
    first = min(running, key=lambda size: size.gpus)
    each = rate(first) / first.gpus
    x = logarithmic([float(count) for count in counts], start=0.08, end=0.96, room=1.25)
    ideal = [(float(count), each * count) for count in (counts[0], counts[-1])]
    y = logarithmic([*rates, *(value for _, value in ideal)], start=0.04, room=1.3)
    points, curves = [], [Curve(ideal, "ideal")]
    for name, _, number, sizes in series:
        ran = [size for size in sizes if size.runs]
        curves.append(Curve([(float(size.gpus), rate(size)) for size in ran], f"l{number}"))
        points += [
            Point(
                float(size.gpus),
                rate(size),
                f"{name}, {size.gpus:,} GPUs: {whole(rate(size))} {unit(answer)}/s",
                class_=f"s{number}",
                strong=size.gpus == answer.gpus,
            )
            for size in ran
        ]
    told = "; ".join(point.title for point in points)
    picture = plot(
        Axis(x.low, x.high, log=True, start=x.start, end=x.end),
        y,
        label=f"Scaling curve. {told}",
        x_title="GPUs",
        y_title=f"{unit(answer)}/s of all GPUs",
        x_shown=whole,
        y_shown=lambda value: units.count(value).replace(".00", ""),
        x_ticks=[float(count) for count in counts[:: -(-len(counts) // 8)]],
        points=points,
        curves=curves,
    )
    marks = legend((f"s{number}", f"{name}: {words}") for name, words, number, _ in series)
    caption = "Broken line: every GPU as fast as on the smallest size. The ringed point is this plan's size."
    content = [figure(picture, caption, marks)]
    for name, words, _, sizes in series:
        heads = ("GPUs", "step", f"{unit(answer)}/s", "efficiency", "$/M", "bound by")
        title = f"{name.capitalize()} scaling: {words}"
        content.append(table(title, heads, _sizes(sizes, ledger), numbers=4, name="wide", counted=True))
    return section("scaling", "Scaling", content)


def unit(answer: Plan) -> str:
    """What is counted: tokens, or samples where a sample is one image."""
    return "samples" if not answer.serves and answer.recipe.seq_len == 1 else "tokens"


def rate(size: Size) -> float:
    """Tokens per second of all GPUs."""
    assert size.plan is not None
    assert size.plan.throughput is not None
    return float(size.plan.throughput.child("tokens_per_s").value)


def _sizes(sizes: Sequence[Size], ledger: Ledger) -> Iterator[Row]:
    for size in sizes:
        plan = size.plan
        if plan is None:
            yield (whole(size.gpus), "", "", "", "", "; ".join(size.why_not))
        elif not size.runs or plan.time is None or size.efficiency is None:
            yield (whole(size.gpus), "", "", "", "", f"does not fit; {plan.verdict.binds} largest")
        else:
            price = rental_price(plan)
            yield (
                ledger.opened(size.efficiency, text(whole(size.gpus)), depth=BESIDE),
                units.seconds(plan.time.value),
                ledger.value(rate(size), "count"),
                units.percent(size.efficiency.value, 0),
                "" if price is None else f"{price.value:.3g}",
                plan.binds,
            )


# -- layouts of a search --------------------------------------------------------------------------


def layouts(answer: Plan, found: Layouts | None, ledger: Ledger) -> Section | None:
    """What a search found: layouts none beats in both memory and speed, the fastest, and the job's own."""
    if found is None or answer.throughput is None or not found.fitting:
        return None
    tokens = float(answer.throughput.child("tokens_per_s").value) / float(answer.throughput.value)
    limit = float(answer.verdict.capacity.value)
    chosen, own = found.options[0], found.own_option
    listed = _distinct([*found.front, *found.options, *([own] if own is not None else [])])
    best = [_named(one) for one in found.front]

    def per_s(one: Option) -> float:
        return (one.samples_per_s or 0.0) * tokens

    def said(one: Option) -> str:
        return f"{_named(one)}: {units.gib(one.needed_bytes)}, {whole(per_s(one))} {unit(answer)}/s"

    x = linear([limit, *(one.needed_bytes for one in listed)], start=0.02)
    y = linear([per_s(one) for one in listed])
    points = [
        Point(one.needed_bytes, per_s(one), said(one), class_=class_, strong=one == chosen)
        for one in listed
        if one.step_s is not None
        for class_ in ["s0" if _named(one) in best else "s1" if one == own != chosen else "g2"]
    ]
    words = f"{found.legal:,} legal layouts, {found.fitting:,} of them fit"
    picture = plot(
        x,
        y,
        label=f"Layouts by memory and speed: {words}. {'; '.join(point.title for point in points[:8])}",
        x_title="memory per GPU",
        y_title=f"{unit(answer)}/s of all GPUs",
        x_shown=lambda value: units.gib(value, 0),
        y_shown=whole,
        points=points,
        curves=[
            Curve([(one.needed_bytes, per_s(one)) for one in found.front], "l0"),
            Curve([(limit, 0.0), (limit, y.high)], "limit"),
        ],
        x_ticks=x.ticks(4, units.GIB),
    )
    entries = [("s0", "none is better in both memory and speed"), ("g2", "among the fastest")]
    if own is not None and own != chosen:
        entries.append(("s1", "the job's own layout"))
    caption = f"{words}. The ringed point is this plan; the line at the right is the card's limit."
    heads = ("layout", "needs", "step", f"{unit(answer)}/s", "verdict")
    rows = (
        (
            _opened(one, tag("b" if one == chosen else "span", _named(one)), ledger),
            ledger.value(one.needed_bytes, "bytes"),
            "" if one.step_s is None else ledger.value(one.step_s, "s"),
            "" if one.step_s is None else ledger.value(per_s(one), "count"),
            LEVELS[one.level] + (", the job's own" if one == own else ""),
        )
        for one in sorted(listed, key=lambda one: -per_s(one))
    )
    return section(
        "search",
        "Layouts searched",
        figure(picture, caption, legend(entries)),
        table("Layouts, the fastest first", heads, rows, numbers=3, name="wide"),
    )


def _distinct(options: Sequence[Option]) -> list[Option]:
    """The options, each layout once."""
    return list({_named(one): one for one in options}.values())


def _opened(one: Option, name: Html, ledger: Ledger) -> Html:
    """A layout's name, which opens into its memory, step and rate where it was planned whole."""
    if one.plan is None:
        return name
    lines = [("needs", one.plan.verdict.needed)]
    if one.step_s is not None and one.plan.time is not None and one.plan.throughput is not None:
        rate = one.plan.throughput.child("tokens_per_s")
        lines += [(one.plan.time.name, one.plan.time), (rate.name, rate)]
    return ledger.several(name, lines, depth=BESIDE)


def _named(one: Option) -> str:
    """A layout by the keys that say something."""
    return ", ".join(f"{key} {set_word(one.keys[key])}" for key in HEADS if not idle(key, one.keys))


# -- loads of a deployment ------------------------------------------------------------------------


def loads(answer: Plan, ledger: Ledger) -> Section | None:
    """What a user gets against what a GPU gives, from one request in flight to as many as fit."""
    points = answer.loads
    if len(points) < 2:
        return None
    best = front(points)
    x = linear([point.tokens_per_s_per_user for point in points], start=0.09, end=0.97)
    y = linear([point.tokens_per_s_per_gpu for point in points])
    marks = [
        Point(
            point.tokens_per_s_per_user,
            point.tokens_per_s_per_gpu,
            f"{point.concurrency:,} in flight{f' with {point.layout}' if point.layout else ''}:"
            f" {whole(point.tokens_per_s_per_user)} tokens/s a user,"
            f" {whole(point.tokens_per_s_per_gpu)} tokens/s a GPU",
            class_="s1" if point.meets_targets is False else "g2" if point.layout else "s0",
            strong=point.is_job,
        )
        for point in points
    ]
    line = sorted((point.tokens_per_s_per_user, point.tokens_per_s_per_gpu) for point in best)
    picture = plot(
        x,
        y,
        label="Speed of a user against throughput of a GPU. " + "; ".join(mark.title for mark in marks),
        x_title="tokens/s of a user",
        y_title="tokens/s of a GPU",
        x_shown=whole,
        y_shown=whole,
        points=marks,
        curves=[Curve(line, "l0")],
    )
    targets = any(point.meets_targets is not None for point in points)
    entries = [("s0", "meets the targets" if targets else "a number of requests in flight")]
    if any(point.meets_targets is False for point in points):
        entries.append(("s1", "misses them"))
    if any(point.layout for point in points):
        entries.append(("g2", "another layout"))
    caption = (
        "Each point is a number of requests in flight, joined where none is better at both speeds;"
        " the ringed one is this job's."
    )
    heads = ("in flight", "a user", "a GPU", "TTFT", "TPOT", "bound by")
    rows = (
        (
            ledger.several(
                tag("b" if point.is_job else "span", whole(point.concurrency)),
                [(line.name, line) for line in point.line.children],
                depth=BESIDE,
            ),
            ledger.value(point.tokens_per_s_per_user, "count"),
            ledger.value(point.tokens_per_s_per_gpu, "count"),
            ledger.value(point.ttft_s, "s"),
            ledger.value(point.tpot_s, "s"),
            _load_words(point),
        )
        for point in points
    )
    return section(
        "loads",
        "Speed against throughput",
        figure(picture, caption, legend(entries)),
        table("Output tokens/s by requests in flight", heads, rows, numbers=4, name="wide", counted=True),
    )


def front(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """The points no other beats at both speeds."""
    return [
        point
        for point in points
        if not any(
            other.tokens_per_s_per_user >= point.tokens_per_s_per_user
            and other.tokens_per_s_per_gpu >= point.tokens_per_s_per_gpu
            and other is not point
            and (other.tokens_per_s_per_user, other.tokens_per_s_per_gpu)
            != (point.tokens_per_s_per_user, point.tokens_per_s_per_gpu)
            for other in points
        )
    ]


def _load_words(point: LoadPoint) -> str:
    words = [point.binds.removesuffix(" bandwidth")]
    if point.layout:
        words.append(point.layout)
    if point.is_job:
        words.append("this job")
    if point.meets_targets is not None:
        met = "most that meet the targets" if point.is_most else "meets the targets"
        words.append(met if point.meets_targets else "misses the targets")
    if point.queue_s > 0:
        words.append(f"waits {units.seconds(point.queue_s)}")
    return ", ".join(words)
