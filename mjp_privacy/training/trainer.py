"""The training loop: epochs, metrics, checkpoints and the export at the end.

A run is a function of its config and its images. Every random choice of a step comes from (seed,
step), so a run that was killed continues from its checkpoint as if it had not stopped: on the same
kind of CPU with the same number of threads its curve is the very same.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import lock, output_folder
from mjp_privacy.core.machine import commit, pick_device
from mjp_privacy.core.registry import Entry
from mjp_privacy.core.text import one_line
from mjp_privacy.data.images import keep_apart
from mjp_privacy.training.batches import Batches, World
from mjp_privacy.training.config import TrainingConfig, plain
from mjp_privacy.training.learner import Learner, build_mixup, learning_rate
from mjp_privacy.training.run_files import (
    CHECKPOINT,
    MODEL,
    Journal,
    TrainingCheckpoint,
    check_command,
    draw_curves,
    export_model,
    identity_of,
    load_checkpoint,
    save_checkpoint,
)

MOST_WORKERS = 256
SETTLE = 0.2  # seconds for the threads of a process group to come to rest
LEAVE = 5.0  # seconds to leave a process group in after an error
LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "store->get",
)
"""What gloo and NCCL say of a process that has ended."""

# the loop -----------------------------------------------------------------------------------------


class Trainer:
    """One run in its folder: Trainer(...).fit() trains to the end and returns the model's path.

    images    number of training images, all processes together
    identity  what the run's checkpoints belong to; `load_checkpoint` compares it
    learner   what is trained, by its class
    """

    def __init__(
        self,
        config: TrainingConfig,
        batches: Batches,
        validation: Batches | None,
        folder: Path,
        world: World,
        images: int,
        identity: Mapping[str, str] | None = None,
        learner: type[Learner] = Learner,
    ) -> None:
        self.config, self.batches, self.validation = config, batches, validation
        self.folder, self.world = folder, world
        self.identity = dict(identity or {})
        self.made_with: list[dict[str, Any]] = []  # software and machine of every process
        self.steps_per_epoch = images // config.recipe.batch
        self.steps = self.steps_per_epoch * config.recipe.epochs
        self.learner = learner(config, self.steps_per_epoch, world)
        self.journal = Journal(folder, self.steps, quiet=not world.first)
        self.step = 0
        self.score: float | None = None  # the last validation's

    def fit(self) -> Path:
        """Train to the end and export; the path of the model."""
        self._resume()
        if self.step == self.steps:
            self.journal.say("finished already; its model is written again")
        elif self.learner.without_bfloat16:
            self.journal.say("note: this CPU has no fast bfloat16: it trains in float32")
        while self.step < self.steps:
            self._train_epoch(self.step // self.steps_per_epoch)
        if self.world.first:
            facts = {
                self.learner.measure: self.score,
                "steps": self.step,
                "commit": ", ".join(dict.fromkeys(fact["commit"] for fact in self.made_with)),
                "made_with": self.made_with,
                "initial_sha256": self.identity.get("initial"),
            }
            export_model(self.folder, self.learner.trained, self.config, facts)
            draw_curves([self.folder], self.folder)
        self.world.wait()
        return self.folder / MODEL

    def _train_epoch(self, epoch: int) -> None:
        self.learner.objective.train()
        first = self.step - epoch * self.steps_per_epoch
        window = list[Tensor]()  # what the steps since the last line measured, still on the device
        began = saved_at = time.monotonic()
        for images, labels in self.batches.epoch(epoch, first, self.steps_per_epoch):
            window.append(self.learner.train_step(self.step, images, labels))
            self.step += 1
            ended = self.step % self.steps_per_epoch == 0
            if self.step % self.config.log_every and not ended:
                continue
            line = self._measured(window, began)
            if ended and self.validation is not None:
                line |= self.learner.validated(self.validation)
                self.score = line[self.learner.measure]
            self.journal.write(line)
            if ended:
                self._save()
                continue
            due = time.monotonic() - saved_at > 60 * self.config.checkpoint_minutes
            if self.world.agreed(due):
                self._save()
                saved_at = time.monotonic()
            window, began = [], time.monotonic()

    def _measured(self, window: Sequence[Tensor], began: float) -> dict[str, Any]:
        """The line of metrics.jsonl for some steps. Stops the run if the loss diverged."""
        names, steps = ("loss", "cross_entropy", "dal", "accuracy", "gradient_norm"), len(window)
        mean = self.world.mean(sum(window, torch.zeros_like(window[0])) / steps)
        numbers = dict(zip(names, mean.tolist(), strict=True))
        elapsed = max(time.monotonic() - began, 1e-9)  # read after the device is done
        loss, norm = numbers["loss"], numbers["gradient_norm"]
        if not math.isfinite(loss + norm):
            raise self._diverged(f"the loss is {loss:g}, its gradient's norm {norm:g}")
        return {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            **numbers,
            "lr": learning_rate(self.config, self.step - 1, self.steps_per_epoch),
            "timing": {
                "images_per_s": round(steps * self.config.recipe.batch / elapsed, 1),
                "seconds_per_step": elapsed / steps,
            },
        }

    def _diverged(self, what: str) -> UserError:
        return UserError(
            f"At step {self.step} {what}: expected finite numbers. Start again in another --out, "
            "with a smaller --lr or --precision float32, and from the weights before that, where "
            f"there are any: --initial {self.folder.name}/{CHECKPOINT}."
        )

    # files -----------------------------------------------------------------------------------

    def _save(self) -> None:
        if not self.learner.finite():
            raise self._diverged("the weights are no longer finite")
        if self.world.first:
            state = {
                **self.identity,
                "step": self.step,
                **self.learner.state(),
                self.learner.measure: self.score,
                "made_with": self.made_with,
                "measured": self.journal.last,
            }
            save_checkpoint(self.folder, state)
        self.world.wait()

    def _resume(self) -> None:
        """Go on where an earlier process stopped, if one did."""
        stored = load_checkpoint(self.folder, self.identity, TrainingCheckpoint, self.steps)
        measured = None
        if stored is not None:
            self.learner.restore(stored, self.folder / CHECKPOINT)
            self.step, self.score = stored.step, getattr(stored, self.learner.measure)
            self.made_with, measured = stored.made_with, stored.measured
            self.journal.say(f"continuing from step {self.step} of {self.steps}")
        now = {  # on a CPU the number of threads changes results, and how it multiplies
            "commit": commit(),
            "torch": str(torch.__version__),
            "device": self.world.device.type,
            "threads": torch.get_num_threads(),
            "processes": self.world.size,
        }
        if self.learner.without_bfloat16:
            now["products"] = "float32"
        if self.step < self.steps and now not in self.made_with:
            self.made_with = [*self.made_with, now]
        self.world.wait()
        self.journal.keep_until(self.step, measured)


# the processes that train together ----------------------------------------------------------------


@contextmanager
def joined(device: str, batch: int, *, pairs: bool = False) -> Iterator[World]:
    """The processes that torchrun's environment names, joined until the end of the `with` block;
    without it this process is alone.

    If one process raises, it leaves with its own reason and waits for nobody. Those that wait for
    it say that another one ended: at once on CPUs; on GPUs torchrun ends them within 30 s.

    pairs  images are mixed in pairs, so each process needs an even number of them
    """
    world = _join(device, batch, pairs=pairs)
    try:
        yield world
        world.wait()
    except BaseException as error:
        if world.size > 1 and world.device.type != "cuda":  # NCCL's group may wait for all others
            leaving = Thread(target=_leave, args=(world,), daemon=True)
            leaving.start()
            leaving.join(LEAVE)  # what is still under way has nobody to answer it
        if is_lost(error, world):
            raise UserError(
                f"Process {world.rank} of {world.size} waited for another one, which has ended "
                f"({one_line(error)}); that one's line says why. What was saved is kept."
            ) from error
        raise
    _leave(world)


def _leave(world: World) -> None:
    """Leave the group of processes; the world cannot be used afterwards."""
    if world.size > 1:
        # gloo's threads drop the last tensors, for which they need Python's lock; whoever joins
        # them while holding it, as the destructor of DDP's reducer does, would wait forever
        time.sleep(SETTLE)
        dist.destroy_process_group()


def is_lost(error: BaseException, world: World) -> bool:
    """Whether this is what a process gets that waits for one that has ended. Other errors of the
    libraries beneath, such as two processes on one GPU, are this process's own."""
    lost = any(sign in str(error) for sign in LOST)
    return world.size > 1 and isinstance(error, RuntimeError) and lost


def _join(device: str, batch: int, *, pairs: bool) -> World:
    """Meet the other processes, each on a GPU of its own where it is to be on one."""
    place = pick_device(device)
    try:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        number = int(os.environ.get("LOCAL_RANK", "0"))
        unit = size * (2 if pairs else 1)
        if size < 1 or number < 0:
            raise ValueError(f"{size} and {number}")
        if batch % unit:
            even = " an even number each, for mixup," if pairs else ""
            raise UserError(
                f"Expected a batch that the processes ({size}) can share equally,{even} got "
                f"{batch}. Give --batch {batch - batch % unit or unit}."
            )
        if size == 1:
            return World(place)
        if place.type == "cuda":
            if number >= (there := torch.cuda.device_count()):
                raise UserError(
                    f"Expected a GPU for each process of this machine, got {there} and a process "
                    f"number {number}, counted from 0. Give --nproc_per_node={there}, or --device "
                    "cpu."
                )
            place = torch.device("cuda", number)
            torch.cuda.set_device(place)
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:  # ValueError: no number, or a part is missing
        raise UserError(
            "Expected the processes that the environment variables WORLD_SIZE, LOCAL_RANK, "
            f"MASTER_ADDR and MASTER_PORT name, as torchrun sets them; got: {one_line(error)}. "
            "Start with torchrun, or unset them."
        ) from error
    return World(place, dist.get_rank(), size)


# a run --------------------------------------------------------------------------------------------


TASKS: Mapping[str, Entry] = {
    "classification": Entry("mjp_privacy.training.learner:Learner"),
    "segmentation": Entry("mjp_privacy.paper.segmentation:SegmentationLearner"),
}
"""What learns a task, by the name that a config gives it; imported when one trains."""


def train(
    config: TrainingConfig,
    *,
    data: str | Path,
    out: str | Path,
    val: str | Path | None = None,
    device: str = "auto",
    workers: int = 2,
) -> Path:
    """Train a model, or continue the run in `out`; returns the path of the exported model.

    train(load_training("configs/training/cifar10.yaml", "J"), data="train.zip", out="results/J")

    data: class folders, a zip of them, or ImageNet's layout, which holds validation images too; for
    a segmentation pictures and label maps in ADE20K's layout
    """
    if not 0 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers: expected 0 or more, got {workers} (at most {MOST_WORKERS}).")
    learner: type[Learner] = TASKS[config.task].load()
    mixed = build_mixup(config) is not None
    with joined(device, config.recipe.batch, pairs=mixed) as world:
        keep_apart(out, {"--data": data, "--val": val})
        folder = output_folder(Path(out))
        check_command(folder, "train")
        # All processes of a run work in one folder; the first one holds the lock for all.
        with lock(folder) if world.first else nullcontext():
            if config.initial is not None:  # weights that do not fit are refused before any image
                learner.network(config)
            examples, held_out = learner.find(config, Path(data), Path(val) if val else None)
            identity = identity_of(plain(config), examples, held_out, config.initial)
            if config.task == "segmentation" and held_out is None and world.first:
                print("no images/validation: nothing is scored", file=sys.stderr, flush=True)
            steps = config.recipe.epochs * (len(examples) // config.recipe.batch)
            # a folder of another training, before any decoding
            load_checkpoint(folder, identity, TrainingCheckpoint, steps)
            batches = learner.batches(config, examples, world, workers)
            validation = None
            if held_out:
                validation = learner.batches(config, held_out, world, workers, "validation")
            number = len(examples)
            run = Trainer(config, batches, validation, folder, world, number, identity, learner)
            return run.fit()
