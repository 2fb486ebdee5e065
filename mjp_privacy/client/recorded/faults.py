"""Why a recorded upload cannot be attacked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from mjp_privacy.client.recorded.folder import RecordedUpload
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel


def faults(upload: RecordedUpload, model: LoadedModel) -> Iterator[str]:
    """The reasons why this upload cannot be attacked; none if it can.

    Where the file cannot be read or holds other parameters than the model, nothing else is checked.
    """
    header = upload.header
    try:
        tensors = upload.tensors()
    except UserError as error:
        yield str(error)
        return
    if header.weights_sha256 is not None:
        digest = hashlib.sha256(upload.weights_path.read_bytes()).hexdigest()
        if digest != header.weights_sha256:
            yield (
                f"{header.weights} is not the file whose weights the client had: sha256 "
                f"{digest[:12]}, expected {header.weights_sha256[:12]}"
            )
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if unknown := [name for name in tensors if name not in shapes]:
        yield (
            f"it holds {', '.join(unknown[:3])}, which the model of {header.weights} does not "
            "have: expected an upload of that model"
        )
        return
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            yield (
                f"{name} has the shape {tuple(tensor.shape)}, and the model's {shapes[name]}: "
                "expected an upload of that model, without a leading axis"
            )
            return
    if bad := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        yield f"NaN or infinity in {', '.join(bad[:3])}: the client's step broke down"
    if tensors and not any(bool(tensor.any()) for tensor in tensors.values()):
        yield "every number in it is zero: nothing was trained in this round"
