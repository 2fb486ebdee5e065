"""One recorded upload: its header, and the files that the header stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mjp_privacy.client.recorded.header import UploadHeader
from mjp_privacy.client.recorded.truth import TRUTH, RecordedTruth, TruthFile
from mjp_privacy.core.errors import BadFile
from mjp_privacy.core.read import FileKind, is_there
from mjp_privacy.core.text import shown
from mjp_privacy.models.tensor_files import FLOATS, TensorFile, check_digest

TRUTH_FOLDER = "truth"

TENSORS = FileKind(
    "the tensors of an upload: a whole safetensors file of floating-point numbers of one type",
    "Record or copy it again, or take it and its .json out.",
    1 << 38,
)
WEIGHTS_FILE = FileKind(
    "a file beside the uploads with the weights from before the round",
    "Put it there, or mend the header.",
    1 << 38,
)


@dataclass(frozen=True)
class RecordedUpload:
    """One upload's place and header; its tensors are read from disk at every call."""

    folder: Path
    name: str
    header: UploadHeader

    @property
    def path(self) -> Path:
        """The file of its tensors."""
        return self.folder / f"{self.name}.safetensors"

    @property
    def header_path(self) -> Path:
        """The file of its header."""
        return self.folder / f"{self.name}.json"

    @property
    def weights_path(self) -> Path:
        """The file of the weights before the round."""
        return self.folder / self.header.weights

    @property
    def truth_path(self) -> Path:
        """The file of its private images, which may be absent."""
        return self.folder / TRUTH_FOLDER / f"{self.name}.safetensors"

    @property
    def shuffles_images(self) -> bool:
        """Whether the uploads of its series hold other images in every round."""
        return self.header.recipe.get("partners") == "fresh"

    def files(self) -> list[Path]:
        """Every file that belongs to it; that of its private images may be absent."""
        return [self.path, self.header_path, self.weights_path, self.truth_path]

    def check_weights(self) -> None:
        """Raise unless the header names a regular file in the folder; a link may not lead out."""
        path = self.weights_path
        try:
            WEIGHTS_FILE.check(path)
            with WEIGHTS_FILE.reading(path):
                inside = path.resolve().is_relative_to(self.folder.resolve())
            if not inside:
                raise WEIGHTS_FILE.refusal(path, "a link that leads out of the uploads' folder")
        except BadFile as error:
            got = f"{shown(self.header.weights)!r}, {error.got}"
            raise WEIGHTS_FILE.refusal(self.header_path, got, "weights") from error

    def check_seals(self) -> None:
        """Raise unless the tensors and the private images are as they were recorded. Files without
        a seal, as strangers write them, pass."""
        check_digest(self.path, TENSORS)
        if self.has_truth:
            check_digest(self.truth_path, TRUTH)

    def tensor_file(self) -> TensorFile:
        """The file of its tensors, whose header is sound."""
        return TensorFile(self.path, TENSORS, FLOATS)

    def tensors(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The tensors by parameter name: all, or those of `names` that the file holds."""
        file = self.tensor_file()
        wanted = [name for name in file.names if names is None or name in names]
        return file.tensors(wanted, finite=True) if wanted else {}

    def names(self) -> list[str]:
        """The names of its tensors, read without the tensors."""
        return self.tensor_file().names

    @property
    def has_truth(self) -> bool:
        """Whether somebody kept its private images."""
        return is_there(self.truth_path)

    def truth_file(self) -> TruthFile | None:
        """The file of its private images, of which the header alone is read; None if absent."""
        return TruthFile(self.truth_path) if self.has_truth else None

    def truth(self) -> RecordedTruth | None:
        """Its private images, or None where nobody kept them."""
        file = self.truth_file()
        return None if file is None else file.read()
