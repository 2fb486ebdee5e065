"""The images of a table of scores: their ids once, however many cells have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import pandas as pd
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


class Images:
    """The ids of images, sorted, each once. `Images.of` gives equal ones the same object."""

    _known: ClassVar[WeakValueDictionary[int, Images]] = WeakValueDictionary()
    _columns: ClassVar[WeakValueDictionary[bytes, Images]] = WeakValueDictionary()

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = tuple(ids)

    @classmethod
    def of(cls, ids: Iterable[str]) -> Images:
        """The images of these ids, in any order and number."""
        return cls._one(cls(sorted(set(ids))))

    @classmethod
    def of_column(cls, ids: pa.Array) -> Images:
        """The images of a file's column, which has each once, in order. Their names are read only
        if no other images are equal to them."""
        import pyarrow as pa

        digest = hashlib.sha256(pa.record_batch([ids], ["ids"]).serialize()).digest()
        known = cls._columns.get(digest)
        if known is None:
            known = cls._columns[digest] = cls._one(cls(ids.to_pylist()))
        return known

    @classmethod
    def _one(cls, images: Images) -> Images:
        """These images, or equal ones that are there already."""
        known = cls._known.setdefault(hash(images.ids), images)
        return known if known.ids == images.ids else images

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def index(self) -> pd.Index:
        """The ids as pandas' index."""
        return pd.Index(self.ids, dtype=object, name="image_id")

    @cached_property
    def everywhere(self) -> NDArray[np.int32]:
        """The places of all images."""
        return np.arange(len(self.ids), dtype=np.int32)

    @cached_property
    def names(self) -> frozenset[str]:
        """The ids as a set."""
        return frozenset(self.ids)

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Where each id stands."""
        return {name: at for at, name in enumerate(self.ids)}

    def places(self, ids: Sequence[str]) -> NDArray[np.int32]:
        """Where each of these ids stands; -1 where it is not among the images."""
        if ids is self.ids:
            return self.everywhere
        return np.asarray(self.index.get_indexer(pd.Index(ids, dtype=object)), dtype=np.int32)
