"""Why a recorded upload cannot be attacked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from mjp_privacy.client.recorded.folder import RecordedUpload
from mjp_privacy.core.errors import UserError
from mjp_privacy.models import LoadedModel


def faults(upload: RecordedUpload, model: LoadedModel) -> Iterator[str]:
    """Why this upload cannot be attacked, in order of depth."""
    header = upload.header
    try:
        tensors = upload.tensors()
    except UserError as error:
        yield str(error)
        return
    if header.weights_sha256 is not None:
        found = hashlib.sha256(upload.weights_path.read_bytes()).hexdigest()
        if found != header.weights_sha256:
            yield (
                f"{header.weights} is not the file whose weights the client had: sha256 "
                f"{found[:12]}, expected {header.weights_sha256[:12]}"
            )
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if strange := [name for name in tensors if name not in own]:
        yield (
            f"it holds {', '.join(strange[:3])}, which the model of {header.weights} has not: "
            "expected an upload of that model"
        )
        return
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != own[name]:
            yield (
                f"{name} is {tuple(tensor.shape)}, and the model's {own[name]}: expected an upload "
                "of that model, without a leading axis"
            )
            return
    if bad := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        yield f"{', '.join(bad[:3])} hold(s) NaN or infinity: the client's step broke down"
    if tensors and not any(bool(tensor.any()) for tensor in tensors.values()):
        yield "every number in it is zero: nothing was trained in this round"
