"""Every reader of files from outside: a file of the base inputs, what changes it, what reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import forms
from tests.fuzz import mutations as m
from tests.inputs import base

UPLOAD = "b1s1_r00000_000_at00000"


@dataclass(frozen=True)
class Reader:
    """`read(folder)` reads `file`, a place in a copy of the base inputs; a star stands for a name.

    copied  what of the base inputs it needs
    seeds   further valid contents, by their places in the base inputs
    """

    file: str
    change: m.Change
    read: Callable[[Path], Any]
    copied: tuple[str, ...] = ()
    seeds: Sequence[str] = ()

    def place(self, folder: Path) -> Path:
        """The file in a folder."""
        return next(iter(sorted(folder.glob(self.file))), folder / self.file)


def _experiment(folder: Path) -> Any:
    from mjp_privacy.experiment.config import load_experiment

    return load_experiment(folder / "experiment.yaml")


def _training(folder: Path) -> Any:
    from mjp_privacy.training.config_files import load_training

    return load_training(folder / "training.yaml")


def _federation(folder: Path) -> Any:
    from mjp_privacy.federation.config import load_federation

    return load_federation(folder / "federation.yaml")


def _site(folder: Path) -> Any:
    from mjp_privacy.experiment.engines.options import engine_config

    return engine_config(str(folder / "site.yaml"), {})


def _uploads(folder: Path) -> None:
    from mjp_privacy.core.errors import UserError
    from mjp_privacy.uploads.check import check_uploads
    from mjp_privacy.uploads.faults import examine
    from mjp_privacy.uploads.folder import UploadFolder

    check_uploads(folder / "uploads")
    refused = examine(UploadFolder(folder / "uploads")).reasons
    if refused:  # each is a row of its own; here it counts as what a reader raises
        raise UserError("; ".join(refused.values()))


def _header(folder: Path) -> Any:

    path = folder / "uploads" / f"{UPLOAD}.json"
    from mjp_privacy.uploads.header import read_header

    return read_header(path).client_config(path.stem)


def _tensors(folder: Path) -> Any:
    from mjp_privacy.uploads.folder import UploadFolder

    return UploadFolder(folder / "uploads").upload(UPLOAD).tensors()


def _truth(folder: Path) -> None:
    from mjp_privacy.uploads.folder import UploadFolder

    upload = UploadFolder(folder / "uploads").upload(UPLOAD)
    file = upload.truth_file()
    if file is not None:
        file.check_shapes(upload.header.batch, base.SIDE, (base.SIDE // base.PATCH) ** 2)
        file.read()


def _checkpoint(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mjp_privacy.models import load_model

        heads: dict[str, Any] = {} if name == "model.safetensors" else {"num_heads": 2}
        normal = {"mean": 0.5, "std": 0.25} if heads else {}
        return load_model(checkpoint=folder / name, **heads, **normal)

    return read


def _outline(folder: Path) -> Any:
    from mjp_privacy.models.loading import outline_model

    return outline_model(checkpoint=folder / "model.safetensors")


def _prior(folder: Path) -> Any:
    from attacks.prior.files import load_prior

    return load_prior(folder / "prior.safetensors")


def _state(folder: Path) -> Any:
    from mjp_privacy.training.snapshots import load_checkpoint

    identity = {"config": "{}", "images": "", "validation": "", "initial": ""}
    return load_checkpoint(folder / "trained", identity)


def _curves(folder: Path) -> Any:
    from mjp_privacy.training.journal import METRICS, check_runs, whole_lines

    check_runs([folder / "trained"])
    return whole_lines(folder / "trained" / METRICS)


def _store(part: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mjp_privacy.experiment.store import RunStore

        store = RunStore(folder / "run")
        return getattr(store, part)()

    return read


def _pictures(folder: Path) -> Any:
    from mjp_privacy.experiment.store import RunStore

    store = RunStore(folder / "run")
    (run_id,) = (path.name for path in (folder / "run" / "rows").iterdir())
    return [store.pictures(run_id, f"{number}.png") for number in range(4)]


def _report(folder: Path) -> Any:
    """As the report does: what is damaged is left out, and a remark says so."""
    from mjp_privacy.report.runs import load_runs

    return load_runs([folder / "run"])


def _mending(folder: Path) -> Any:
    """As a run that goes on does."""
    from mjp_privacy.experiment.store import RunStore

    store = RunStore(folder / "run")
    whole = store.without(store.damaged())
    return [(whole.read(run_id), whole.finished(run_id)) for run_id in store.stored_cells()]


def _rows(folder: Path) -> Any:
    """As if the name fitted whatever the file holds."""
    from mjp_privacy.experiment.store import RunStore

    store = RunStore(folder / "run")
    return [store.read(run_id) for run_id in store.stored_cells()]


def _comparison(folder: Path) -> Any:
    from mjp_privacy.federation.comparison import defence_text
    from mjp_privacy.federation.config import plain
    from mjp_privacy.federation.rounds import evaluations, stored_config

    evaluations(folder / "federation")
    return defence_text(plain(stored_config(folder / "federation")))


def _image(folder: Path) -> Any:
    from mjp_privacy.data.decoding import decode_image

    return decode_image((folder / "image").read_bytes())


def _labels(folder: Path) -> Any:
    from mjp_privacy.data import open_images

    return open_images(folder / "images").records


def _label_file(folder: Path) -> Any:
    from mjp_privacy.data.labels import parse_label_file

    return parse_label_file("labels", (folder / "labels").read_bytes())


def _zip(folder: Path) -> Any:
    from mjp_privacy.data import open_images
    from mjp_privacy.data.decoding import ImageError

    source = open_images(folder / "images.zip")
    for record in source.records[:4]:
        try:
            source.decode(record)
        except ImageError:
            continue
    return source


def _beside(folder: Path) -> Any:
    from mjp_privacy.models import load_model

    return load_model(checkpoint=folder / "beside")


def _job(folder: Path) -> Any:
    from mjp_privacy.experiment.engines.worker import Job

    return Job.read(folder / "job.json")


def _task(folder: Path) -> Any:
    from mjp_privacy.experiment.engines.worker import TaskReport

    return TaskReport.read(folder / "task.json")


RUN = ("run",)
READERS: Mapping[str, Reader] = {
    "experiment": Reader("experiment.yaml", m.changed_yaml, _experiment),
    "training": Reader("training.yaml", m.changed_yaml, _training),
    "federation": Reader("federation.yaml", m.changed_yaml, _federation),
    "site": Reader("site.yaml", m.changed_yaml, _site),
    "upload header": Reader(f"uploads/{UPLOAD}.json", m.changed_json, _header, ("uploads",)),
    "upload tensors": Reader(
        f"uploads/{UPLOAD}.safetensors", forms.changed_safetensors, _tensors, ("uploads",)
    ),
    "upload truth": Reader(
        f"uploads/truth/{UPLOAD}.safetensors", forms.changed_safetensors, _truth, ("uploads",)
    ),
    "uploads, header": Reader(f"uploads/{UPLOAD}.json", m.changed_json, _uploads, ("uploads",)),
    "uploads, weights": Reader(
        "uploads/weights/*.safetensors", forms.changed_safetensors, _uploads, ("uploads",)
    ),
    "uploads, truth": Reader(
        f"uploads/truth/{UPLOAD}.safetensors", forms.changed_safetensors, _uploads, ("uploads",)
    ),
    "checkpoint": Reader(
        "model.safetensors", forms.changed_safetensors, _checkpoint("model.safetensors")
    ),
    "checkpoint of the authors": Reader(
        "official_mjp.safetensors",
        forms.changed_safetensors,
        _checkpoint("official_mjp.safetensors"),
    ),
    "checkpoint outline": Reader("model.safetensors", forms.changed_safetensors, _outline),
    "checkpoint pth": Reader("model.pth", forms.changed_torch, _checkpoint("model.pth")),
    "config beside weights": Reader(
        "beside/config.json", m.changed_json, _beside, ("beside",), ("beside/config.json",)
    ),
    "prior": Reader("prior.safetensors", forms.changed_safetensors, _prior),
    "training state": Reader("trained/checkpoint.pt", forms.changed_torch, _state, ("trained",)),
    "training curves": Reader("trained/metrics.jsonl", m.changed_lines, _curves, ("trained",)),
    "cells": Reader("run/cells.*.parquet", m.changed_bytes, _store("read_cells"), RUN),
    "rows": Reader("run/rows/*/00000.*.parquet", m.changed_bytes, _mending, RUN),
    "rows under their name": Reader("run/rows/*/00000.*.parquet", m.changed_bytes, _rows, RUN),
    "pictures": Reader("run/rows/*/00000.*.parquet", m.changed_bytes, _pictures, RUN),
    "report of rows": Reader("run/rows/*/00000.*.parquet", m.changed_bytes, _report, RUN),
    "report of cells": Reader("run/cells.*.parquet", m.changed_bytes, _report, RUN),
    "federation.json": Reader(
        "federation/federation.json", m.changed_json, _comparison, ("federation",)
    ),
    "federation's metrics": Reader(
        "federation/metrics.jsonl", m.changed_lines, _comparison, ("federation",)
    ),
    "image": Reader("image", m.changed_bytes, _image, (), ("pictures",)),
    "label file": Reader("labels", forms.changed_table, _label_file, (), ("label files",)),
    "labels in a folder": Reader("images/labels.csv", forms.changed_table, _labels, ("images",)),
    "zip": Reader("images.zip", forms.changed_zip, _zip),
    "job": Reader("job.json", m.changed_json, _job),
    "task": Reader("task.json", m.changed_json, _task, (), ("tasks",)),
}
"""By name, as tools/fuzz lists them."""
