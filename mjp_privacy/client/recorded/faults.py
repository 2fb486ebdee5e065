"""Why a recorded upload cannot be attacked: the one answer that `mjp check` and a run both give.

    Examiner().faults(upload)   # [] for a sound upload

Headers of files are compared with the model before a value is read. So what an upload makes anyone
allocate is bounded by its weights file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mjp_privacy.client.recorded.header import header_refusal
from mjp_privacy.client.recorded.loading import outline_recorded
from mjp_privacy.client.recorded.recorded_upload import WEIGHTS_FILE, RecordedUpload
from mjp_privacy.core.errors import BadFile, UserError, format_error
from mjp_privacy.core.read import MIB
from mjp_privacy.core.stop import interrupted
from mjp_privacy.core.text import shown
from mjp_privacy.models import LoadedModel
from mjp_privacy.models.checkpoint_files import file_sha256
from mjp_privacy.models.tensor_files import TensorFile, check_digest

SENT_AS = {"float32": ("F32", "F16", "BF16"), "float64": ("F64",)}
"""Types of an upload's tensors, by the precision in which the header says the client computed."""

COPIED = WEIGHTS_FILE.advising("Record or copy it again.")

ROOM = 16
"""How many times the size of its weights file a model may have in memory. Half precision takes 2,
tables for more patches than the file's a few more."""


@dataclass
class Examiner:
    """Examines uploads; weights that several of them share are looked at once."""

    outlines: dict[str, LoadedModel | str] = field(default_factory=dict)
    """The model of each weights file and header, or why there is none."""
    digests: dict[str, str] = field(default_factory=dict)
    """That of each file of weights."""

    def faults(self, upload: RecordedUpload) -> list[str]:
        """The reasons why this upload cannot be attacked, each one sentence; none if it can."""
        model = self._outline(upload)
        reasons = [model] if isinstance(model, str) else []
        outline = None if isinstance(model, str) else model
        parts = (_of_seals, self._of_weights, _of_labels, _of_levels, _of_tensors, _of_truth)
        for part in parts:
            try:
                reasons += part(upload, outline)  # as many as it yields before it raises
            except Exception as error:
                reasons.append(_said(error))
        return [one_line(reason, upload.folder) for reason in dict.fromkeys(reasons)]

    def _outline(self, upload: RecordedUpload) -> LoadedModel | str:
        """The upload's model without its weights, or why it cannot be loaded."""
        header = upload.header
        key = json.dumps([header.weights, header.model, header.mean, header.std], sort_keys=True)
        try:
            upload.check_weights()
            if key not in self.outlines:
                self.outlines[key] = _checked_outline(upload)
        except BadFile as error:
            if error.path == upload.header_path:
                return str(error)
            self.outlines[key] = str(error)
        except Exception as error:
            self.outlines[key] = _said(error)
        outline = self.outlines[key]
        is_reason = isinstance(outline, str)
        return f"{upload.header_path.name}, weights: {outline}" if is_reason else outline

    def _of_weights(self, upload: RecordedUpload, model: LoadedModel | None) -> Iterator[str]:
        expected, name = upload.header.weights_sha256, upload.header.weights
        if model is None:
            return
        if upload.weights_path.suffix.lower() == ".safetensors":
            check_digest(upload.weights_path, COPIED)
        if expected is None:
            return
        if name not in self.digests:
            with WEIGHTS_FILE.reading(upload.weights_path):
                self.digests[name] = file_sha256(upload.weights_path)
        if self.digests[name] != expected:
            yield (
                f"{shown(name)} is not the file whose weights the client had: sha256 "
                f"{self.digests[name][:12]}, expected {expected[:12]}"
            )


def _said(error: Exception) -> str:
    """What a reason says of an error. Where it is a fault of our own code, the other uploads are
    examined all the same."""
    if interrupted():
        raise error
    return (
        str(error)
        if isinstance(error, UserError)
        else f"what nobody expected: {format_error(error)}"
    )


def one_line(reason: object, folder: Path) -> str:
    """A reason as a row holds it: without breaks of lines, and with paths inside the folder."""
    return " ".join(str(reason).replace(f"{shown(folder)}{os.sep}", "").split())


def _checked_outline(upload: RecordedUpload) -> LoadedModel:
    """The model without its weights, unless it is far larger than its weights file."""
    model = outline_recorded(upload)
    needed = 4 * sum(p.numel() for p in model.parameters())
    held = upload.weights_path.stat().st_size
    if needed > ROOM * held + MIB:
        raise UserError(
            f"expected a model such as that of a file of {held / MIB:,.1f} MiB; got one of "
            f"{needed / MIB:,.0f} MiB. Mend `model` in the header."
        )
    return model


def _of_seals(upload: RecordedUpload, model: LoadedModel | None) -> Iterator[str]:
    upload.check_seals()
    yield from ()


def _of_labels(upload: RecordedUpload, model: LoadedModel | None) -> Iterator[str]:
    classes = None if model is None else model.card.num_classes
    wrong = [n for n in upload.header.labels or () if classes is not None and n >= classes]
    if wrong and classes is not None:
        expected = f"classes of the model, 0 to {classes - 1}"
        yield str(header_refusal(upload.header_path, "labels", expected, str(wrong[0])))


def _of_levels(upload: RecordedUpload, model: LoadedModel | None) -> Iterator[str]:
    """Names of errors that belong to no parameter: what they say would be lost."""
    known = set() if model is None else {name for name, _ in model.named_parameters()}
    for kind in ("noise", "rounding"):
        strange = [name for name in getattr(upload.header, kind) if known and name not in known]
        if strange:
            expected, got = "names of the model's parameters", repr(shown(strange[0]))
            yield str(header_refusal(upload.header_path, kind, expected, got))


def _of_tensors(upload: RecordedUpload, model: LoadedModel | None) -> Iterator[str]:
    file = upload.tensor_file()
    types = set(file.dtypes.values())
    allowed = SENT_AS[upload.header.dtype]
    if len(types) > 1:
        raise file.kind.refusal(upload.path, f"a mixture of {', '.join(sorted(types))}")
    if not types <= set(allowed):
        raise file.kind.refusal(
            upload.path,
            f"{types.pop()}, and the header's dtype is {upload.header.dtype}, which is sent as "
            f"{' or '.join(allowed)}",
        )
    if not types:
        raise file.kind.refusal(upload.path, "no tensors")
    if model is None:
        return
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    yield from _of_shapes(file, shapes, upload.header.weights)
    if file.shapes.items() <= shapes.items():
        yield from _of_values(file)


def _of_shapes(
    file: TensorFile, shapes: Mapping[str, tuple[int, ...]], weights: str
) -> Iterator[str]:
    if unknown := [name for name in file.names if name not in shapes]:
        names = ", ".join(shown(name, 60) for name in unknown[:3])
        yield (
            f"it holds {names}, which the model of {shown(weights)} does not have: expected an "
            "upload of that model"
        )
    for name in file.names:
        if name in shapes and file.shapes[name] != shapes[name]:
            yield (
                f"{name} has the shape {file.shapes[name]}, and the model's {shapes[name]}: "
                "expected an upload of that model, without a leading axis"
            )
            return


def _of_values(file: TensorFile) -> Iterator[str]:
    """One tensor at a time, so that memory holds the largest alone."""
    broken, empty = [], True
    for name in file.names:
        tensor = file.tensors([name])[name]
        if not bool(tensor.isfinite().all()):
            broken.append(name)
        empty = empty and not bool(tensor.any())
    if broken:
        yield f"NaN or infinity in {', '.join(broken[:3])}: the client's step broke down"
    elif empty:
        yield "every number in it is zero: nothing was trained in this round"


def _of_truth(upload: RecordedUpload, model: LoadedModel | None) -> Iterator[str]:
    file = upload.truth_file()
    if file is not None and model is not None:
        file.check_shapes(upload.header.batch, model.card.img_size, model.patch_embed.num_patches)
        file.read()
    yield from ()
