"""From a plan to tasks for an engine: what is finished already is no task."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from mjp_privacy.experiment.engines.coordinator import Coordinator, Engine, TaskLost
from mjp_privacy.experiment.finished import Finished
from mjp_privacy.experiment.job import Job, Task
from mjp_privacy.experiment.messages import BlockSkipped, Message, ModelOpened
from mjp_privacy.experiment.plan import Plan
from mjp_privacy.experiment.source import UploadSource
from mjp_privacy.experiment.work import Codes, OpenModel, skipped


def handed_out(
    plan: Plan, source: UploadSource, finished: Finished, codes: Codes, job: Job, engine: Engine
) -> Generator[Message | TaskLost, None, None]:
    """Have an engine do everything that is not finished; what is said of it. Closed, it stops."""
    unfinished = _Unfinished(plan, source, finished, codes)
    yield from unfinished.messages()
    coordinator = Coordinator(job, list(plan.blocks), engine, frozenset(unfinished.opened))
    yield from coordinator.messages(unfinished.tasks)


@dataclass
class _Unfinished:
    """The tasks of a plan that are left; known once `messages` was read to its end."""

    plan: Plan
    source: UploadSource
    finished: Finished
    codes: Codes
    tasks: list[Task] = field(default_factory=list, init=False)
    opened: set[str] = field(default_factory=set, init=False)  # models that were told of

    def messages(self) -> Iterator[ModelOpened | BlockSkipped]:
        """What is said of blocks that are finished in every cell. Only weights tell which rows
        belong to a cell, so models are opened here, but only in a folder that holds rows."""
        any_rows = bool(self.finished.store.stored_cells())
        for number, (name, blocks) in enumerate(self.plan.blocks.items()):
            everything = [Task(number, block.index) for block in blocks]
            if not any_rows:
                self.tasks += everything
                continue
            opened = OpenModel.of(self.plan, self.source, name)
            self.opened.add(name)
            yield opened.message()
            if opened.uploads is None:
                self.tasks += everything
                continue
            for task, block in zip(everything, blocks, strict=True):
                states = {
                    cell: self.finished.state(
                        facts.run_id, block, self.codes[cell].digest, cell.attack.seconds
                    )
                    for cell, facts in opened.facts.items()
                }
                if any(state.left for state in states.values()):
                    self.tasks.append(task)
                else:
                    yield skipped(opened, block, states)
