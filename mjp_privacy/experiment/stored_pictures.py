"""The files of pictures of a run folder, a block of one cell in each.

    RUN/reconstructions/<run_id>/<block>.safetensors

`images` is what the attack made, always float32 in [0, 1]. The other pictures may be bytes: the
metadata's "scale:NAME", "1/255" or "1", says by what to multiply, "image_ids" lists the images in
the order of the tensors' first axis (`packing.py`), and "mjp-seal" is the file's own digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mjp_privacy.core.errors import NoFile
from mjp_privacy.core.read import FileKind
from mjp_privacy.core.sealed import read_seal, written_seal
from mjp_privacy.experiment.packing import appended, pack, unpack
from mjp_privacy.experiment.reconstruction_index import ReconstructionIndex, file_stamps
from mjp_privacy.models.tensor_files import TensorFile, save_tensors

PICTURES = FileKind(
    "the reconstructions of a block", "Run the attack again, which makes them again.", 1 << 40
)


@dataclass(frozen=True)
class StoredPictures:
    """The pictures of one run folder: StoredPictures(Path("results/demo")).find(run_id, "a.png").

    block_of: by run_id, the block of each image whose rows count; it is asked where two files hold
    pictures of one image, which a killed run can leave behind
    """

    root: Path
    block_of: Callable[[str], Mapping[str, int]]
    _indexes: dict[str, ReconstructionIndex] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The places of stored images that were asked for so far, by run_id."""

    def folder(self, run_id: str) -> Path:
        """The folder of one cell's pictures."""
        return self.root / "reconstructions" / run_id

    def path(self, run_id: str, block: int) -> Path:
        """The file of one cell's pictures of one block."""
        return self.folder(run_id) / f"{block:05d}.safetensors"

    def files(self, run_id: str) -> dict[int, Path]:
        """The files of a cell's pictures, by block."""
        names = (name for name, *_ in file_stamps(self.folder(run_id)))
        return {int(Path(name).stem): self.folder(run_id) / name for name in names}

    def digest(self, run_id: str, block: int) -> dict[int, str]:
        """What rows say of the block's pictures: {block: digest of their file}; {} without one."""
        path = self.path(run_id, block)
        try:
            return {block: written_seal(path) or read_seal(path).digest}
        except FileNotFoundError:
            return {}

    def write(
        self, run_id: str, block: int, tensors: Mapping[str, Tensor], image_ids: Sequence[str]
    ) -> None:
        """Write one cell's pictures of one block. `tensors`: images (m, C, H, W) float32; with
        truth target, plain and input too, mask and permutation (m, N) if there are any."""
        packed, metadata = pack(tensors)
        metadata["image_ids"] = json.dumps(list(image_ids))
        save_tensors(self.path(run_id, block), packed, metadata, digest=True)

    def read(self, path: Path) -> tuple[dict[str, Tensor], list[str]]:
        """The tensors that were given to `write`, and the ids of their images."""
        file = TensorFile(path, PICTURES)
        return unpack(file.tensors(), file.metadata), stored_ids(file)

    def put(
        self,
        run_id: str,
        block: int,
        tensors: Mapping[str, Tensor],
        image_ids: Sequence[str],
        without: Collection[str] = (),
    ) -> None:
        """Add images to a block, replacing those of the same ids, and remove those of `without`;
        the file goes with its last image.

        Images that lack a tensor which others of the block have get zeros.
        """
        path = self.path(run_id, block)
        if (before := self._before(path)) is not None:
            old, old_ids = before
            left = {*image_ids, *without}
            kept = [at for at, image_id in enumerate(old_ids) if image_id not in left]
            if not image_ids and len(kept) == len(old_ids):
                return
            old_ids = [old_ids[at] for at in kept]
            old = {name: tensor[kept] for name, tensor in old.items()}
            if old_ids:
                tensors = appended(old, tensors) if image_ids else old
            image_ids = [*old_ids, *image_ids]
        if image_ids:
            self.write(run_id, block, tensors, image_ids)
        else:
            path.unlink(missing_ok=True)

    def _before(self, path: Path) -> tuple[dict[str, Tensor], list[str]] | None:
        """What a block's file holds; None where there is none. Whoever merges has seen to it that
        the file is whole (`RunStore.leave_whole`)."""
        try:
            return self.read(path)
        except NoFile:
            return None

    def find(self, run_id: str, image_id: str) -> dict[str, Tensor] | None:
        """The stored tensors of one image in one cell, without the leading axis; None where there
        are none, or where their file changed after it was written."""
        from safetensors import safe_open

        place = self._index(run_id).places.get(image_id)
        if place is None:
            return None
        PICTURES.check(place.path)
        seal = read_seal(place.path)
        if seal.written is not None and not seal.whole:
            return None
        with safe_open(place.path, framework="pt") as file:
            tensors = {name: file.get_slice(name)[place.position] for name in file.keys()}
            return unpack(tensors, file.metadata())

    def images(self, run_id: str) -> list[str]:
        """The ids of the images whose pictures are stored for a cell, in stored order."""
        return list(self._index(run_id).places)

    def _index(self, run_id: str) -> ReconstructionIndex:
        """Where the cell's images are; read again if a file was added or replaced."""
        folder = self.folder(run_id)
        index = self._indexes.get(run_id)
        if index is None or not index.holds(folder):
            index = ReconstructionIndex.of(folder, lambda: self.block_of(run_id))
            self._indexes[run_id] = index
        return index


def stored_ids(file: TensorFile) -> list[str]:
    """The images of a file of pictures, in the order of its tensors."""
    ids = file.metadata_value("image_ids")
    if not isinstance(ids, list) or not all(isinstance(image_id, str) for image_id in ids):
        raise PICTURES.refusal(file.path, "no list of the images in it", "image_ids")
    if any(not shape or shape[0] != len(ids) for shape in file.shapes.values()):
        raise PICTURES.refusal(file.path, f"tensors of other numbers of images than {len(ids)}")
    return ids
