"""The text of a stall, from the reports of all ranks (engine/comm/progress.py); the same on every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..engine.comm.progress import Report, unit_of


def describe(waited_s: float, reports: Mapping[int, Report | str], hint: str) -> str:
    """Return the text of a stall: the ranks that lag, the place of every rank, and its last collectives.

    reports: world rank -> its report, or why there is none. hint: what to say where all ranks have made the same calls.
    """
    hint = f"Did all ranks run the same modules and calls?{_one_sided(reports) or hint}"
    told = {rank: report for rank, report in sorted(reports.items()) if isinstance(report, Report)}
    steps = {report.step for report in told.values()}
    one = len(steps) == 1

    def place(rank: int) -> str:
        return _place(told[rank]) + ("" if one else f" in step {told[rank].step}")

    busy = [rank for rank in told if not told[rank].waiting]
    places = [f"rank {rank} {report}" for rank, report in sorted(reports.items()) if isinstance(report, str)]
    for some in (busy, [rank for rank in told if told[rank].waiting]):
        for text, each in _alike(some, place):
            plural = text.replace("computes or sleeps", "compute or sleep", 1).replace("waits", "wait", 1)
            places.append(f"{_ranks(each)} {plural if len(each) > 1 else text}")
    head = f"no progress for {waited_s:.0f} s: " + "; ".join(places) + (f"; step {next(iter(steps))}" if one else "")
    last = [f"{_ranks(each)}: {text}" for text, each in _alike(list(told), lambda rank: ", ".join(told[rank].last) or "none")]
    parts = [f"{head}. {hint} Last collectives: {'; '.join(last)}."]
    parts += [f"The Python stack of rank {rank}, which computes or sleeps:\n{told[rank].stack.rstrip()}\n" for rank in busy]
    return "\n".join(parts)


def _one_sided(reports: Mapping[int, Report | str]) -> str:
    """Return ' Rank 0 called zs.full_state_dict() ...' for the first of the last calls that not all ranks have made."""
    told = {
        rank: {call[0]: call[1:] for call in each.calls} for rank, each in sorted(reports.items()) if isinstance(each, Report)
    }
    first = max((min(calls, default=1) for calls in told.values()), default=1)  # earlier calls are not kept everywhere
    for number in sorted({number for calls in told.values() for number in calls if number >= first}):
        made = {rank: calls.get(number, (0, "", "")) for rank, calls in told.items()}
        if len({what for _, what, _ in made.values()}) > 1:
            caller = max(told, key=lambda rank: (max(told[rank], default=0), -rank))  # who has made more calls
            step, what, place = made[caller]
            missed = [rank for rank in made if made[rank][1] != what]
            called = _ranks([rank for rank in made if made[rank][1] == what]).capitalize()
            on_the_way = not all(isinstance(each := reports[rank], Report) and each.waiting for rank in missed)
            so_far = " so far: every rank must call it." if on_the_way else ": call it on all ranks."
            return f" {called} called {what} in step {step} ({place}), and {_ranks(missed)} did not{so_far}"
    return ""


def places_of(reports: Mapping[int, Report | str]) -> dict[int, str]:
    """Return rank -> label of its wait, or "forward of <module>", for ranks in one of these (see `control.misuse`)."""
    told = {rank: report for rank, report in reports.items() if isinstance(report, Report)}
    places = {rank: each.waiting or (f"forward of {each.module}" if each.module else "") for rank, each in told.items()}
    return {rank: place for rank, place in places.items() if place}


def _place(report: Report) -> str:
    """Return 'waits at `layers.7` (gather #40)' or 'computes or sleeps in `layers.8` (...)'."""
    unit, place = unit_of(report.gather), unit_of(report.waiting) if report.waiting else report.module
    number = f"gather #{report.turn}" if report.turn else "no gather so far"
    number += f": `{unit}`" if report.turn and unit != place else ""
    if not report.waiting:
        where = f" in `{report.module}`" if report.module else ""
        return f"computes or sleeps{where}{f', in {report.function}' if report.function else ''} ({number})"
    quoted = f"`{place}`" if report.waiting == report.gather else f"'{place}'"
    return f"waits at {quoted} ({number}){f' for {_ranks(report.missing)}' if report.missing else ''}"


def _alike(ranks: list[int], text: Callable[[int], str]) -> list[tuple[str, list[int]]]:
    """Return (text, ranks) for each distinct text, so that ranks with the same text are named together."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(text(rank), []).append(rank)
    return list(found.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
