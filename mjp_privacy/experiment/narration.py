"""What a person reads while a run goes on, in the progress display and in RUN/log.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mjp_privacy.core.progress import Progress
from mjp_privacy.core.text import first_of, shown
from mjp_privacy.experiment.applicability import Forecast
from mjp_privacy.experiment.messages import BlockSkipped, CellDone, Message, ModelOpened
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.store import RunStore


def say_start(
    progress: Progress,
    plan: Plan,
    images: int,
    store: RunStore,
    facts: Mapping[str, str | int],
    workers: str,
    absent: Sequence[str],
) -> None:
    """Log the command's versions and machine; warn of another number of threads than before, and
    of images that are gone.

    facts: of `provenance`; workers: where the work is done, in words
    """
    progress.say(
        f"{images} images, {len(plan.cells)} cells, {workers}",
        images=images,
        **facts,
    )
    timed = store.read_timings()
    earlier = set(timed["threads"]) if "threads" in timed else set()
    if earlier - {facts["threads"]}:
        progress.say(
            f"earlier parts of this run had {sorted(earlier)} thread(s): float32 scores of "
            "APRIL depend slightly on their number, float64 ones do not"
        )
    if absent:
        progress.say(
            f"{len(absent)} image(s) of this run folder are no longer among the images that were "
            f"given ({first_of(absent, 1)}); their rows stay in its tables"
        )


def say_mended(progress: Progress, damage: Sequence[str], lost: int) -> None:
    """Say what was damaged in the folder, and how many images with rows images.csv lacked."""
    for line in damage:
        progress.say(line)
    if lost:
        progress.say(
            f"images.csv lacks {lost} image(s) that have rows: their hashes are taken anew from "
            "the images that are given now"
        )


def say_foreseen(progress: Progress, remarks: Sequence[str], foreseen: Forecast) -> None:
    """Say what does not apply and which models fail, before anything is computed."""
    for remark in remarks:
        progress.say(remark)
    for model, reason in foreseen.unopened.items():
        progress.say(f"{model}: FAILED. {reason}")
    for line in foreseen.lines:
        progress.say(f"not applicable: {line}")


def say(progress: Progress, message: Message, foreseen: Forecast) -> None:
    """Show what one message says."""
    if isinstance(message, BlockSkipped):
        progress.skip(message.units)
    elif isinstance(message, CellDone):
        if message.remark:
            progress.say(message.remark)
        where = f"{message.model} {message.setting} {message.dtype}"
        for reason, trace in message.traces.items():
            _say_fault(progress, f"{where}, block {message.block}", reason, trace)
        progress.advance(message.units, where)
    elif isinstance(message, ModelOpened) and message.reason != foreseen.unopened.get(
        message.model
    ):
        _say_model(progress, message)


def _say_fault(progress: Progress, where: str, reason: str, trace: str) -> None:
    """Say that code of an attack, a defence or this package failed; the log gets the traceback."""
    log = "" if progress.log is None else f" The traceback is in {shown(progress.log)}."
    progress.say(f"{where}: FAILED. {reason}.{log}", traceback=trace)


def _say_model(progress: Progress, opened: ModelOpened) -> None:
    report, name = opened.report, opened.model
    if report is None and opened.trace:
        _say_fault(progress, name, opened.reason, opened.trace)
        return
    if report is None:
        progress.say(f"{name}: FAILED. {opened.reason}")
        return
    notes = "; ".join(report.notes) or "complete"
    if report.stored_as:
        notes += f"; stored as {report.stored_as}, used as float32"
    progress.say(
        f"{name}: {report.source} ({report.layout}), sha256 {report.sha256[:12]}, {notes}",
        missing=report.missing,
        unexpected=report.unexpected,
        beside=report.beside,
    )
    if report.unexpected:
        progress.say(f"{name}: tensors of the checkpoint not used: {', '.join(report.unexpected)}")
