"""Runs an attack on client steps: within its time, with its answer checked and its faults kept
apart.

    done = run_steps(attack, view, count=20, generator=lambda step: ...)
    done.reconstruction, done.failed     {place of an image: why it has no reconstruction}

All steps are attacked at once or, if that fails, each alone, so that one client step with bad
numbers, or one that an attack of somebody's own does not bear, does not spoil the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from attacks.budget import OVER, SECONDS, Budget, OverBudget, limited
from mjp_privacy.core.errors import UserError, format_error, format_traceback
from mjp_privacy.core.machine import out_of_memory
from mjp_privacy.core.schema import height_width
from mjp_privacy.core.stop import interrupted
from mjp_privacy.core.text import shown
from mjp_privacy.interfaces import Attack, AttackerView, Reconstruction

BREAKDOWN = (torch.linalg.LinAlgError, np.linalg.LinAlgError)

Piece = TypeVar("Piece")
Caught = (Exception, SystemExit, GeneratorExit)  # an attack's own sys.exit() too


class Pieces(Generic[Piece]):
    """Pieces of work, each tried whole and, where that fails, in smaller ones until they work.

        pieces = Pieces([range(20)], smaller)
        for piece in pieces:
            with pieces:
                results.append(work(piece))
            if pieces.failed:
                results.append(what stands for the piece)

    smaller  the pieces to try in place of one, after an error; none: it cannot be divided, and
             `failed` is the error; None: the error is not of this kind, and is raised
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        smaller: Callable[[Piece, BaseException], Sequence[Piece] | None],
    ) -> None:
        self.pending, self.smaller = list(pieces), smaller
        self.failed: BaseException | None = None

    def __iter__(self) -> Iterator[Piece]:
        while self.pending:
            self.piece, self.failed = self.pending.pop(0), None
            yield self.piece

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Caught) or interrupted():
            return False
        parts = self.smaller(self.piece, error)
        if parts is None:
            return False
        self.pending[:0] = parts
        self.failed = None if parts else error
        return True


@dataclass(frozen=True)
class Done:
    """What an attack made of some client steps."""

    reconstruction: Reconstruction
    failed: Mapping[int, str] = field(default_factory=dict)
    """{place of an image: why it has no reconstruction, though the attack applies to it}."""
    traces: Mapping[str, str] = field(default_factory=dict)  # tracebacks, by reason


def run_steps(
    attack: Attack,
    view: AttackerView,
    count: int,
    generator: Callable[[int], torch.Generator],
    seconds: float | None = None,
) -> Done:
    """Attack the `count` images of a view. Running out of memory is the caller's to handle.

    generator  gives the generator for the random choices from a step on
    seconds    how long the attack may take over one image (`attacks.budget`)
    """
    batch = view.updates[0].batch
    steps = count // batch
    divisible = view.pool == batch  # else images of several steps cannot be told apart

    def smaller(piece: range, error: BaseException) -> list[range] | None:
        if out_of_memory(error):
            return None
        return [range(s, s + 1) for s in piece] if divisible and len(piece) > 1 else []

    pieces, parts = Pieces([range(steps)], smaller), list[Done]()
    for piece in pieces:
        images = len(piece) * batch
        with pieces:
            seen = view if len(piece) == steps else view.part(piece.start)
            with nullcontext() if seconds is None else limited(seconds, images) as budget:
                answer = attack.run(seen, generator=generator(piece.start))
            made = checked_reconstruction(answer, seen, images)
            if budget is not None:
                made = replace(made, diagnostics={**made.diagnostics, **_told(budget, images)})
            parts.append(Done(made, without_reconstruction(made, images)))
        if pieces.failed is not None:
            parts.append(_given_up(range(images), pieces.failed))
    return parts[0] if len(parts) == 1 else _of_all_steps(parts, batch, view)


def _given_up(places: range, error: BaseException) -> Done:
    """What stands for images on which the attack failed, each alone or together."""
    if isinstance(error, OverBudget):
        reasons, told = dict.fromkeys(places, str(error)), _told(error.budget, len(places))
        return Done(Reconstruction(None, inapplicable=reasons, diagnostics=told))
    traces = {}
    if isinstance(error, UserError):
        reason = str(error)
    elif isinstance(error, BREAKDOWN):
        reason = f"the attack's linear algebra broke down: {error}"
    else:
        reason = format_error(error)
        traces[reason] = format_traceback(error)
    return Done(Reconstruction(None), dict.fromkeys(places, reason), traces)


def _told(budget: Budget, images: int) -> dict[str, Tensor]:
    """The diagnostics of images that had so much time."""
    cut = torch.tensor([place in budget.cut for place in range(images)], dtype=torch.float64)
    return {SECONDS: torch.full((images,), budget.seconds, dtype=torch.float64), OVER: cut}


def _of_all_steps(parts: Sequence[Done], batch: int, view: AttackerView) -> Done:
    """The results of single steps as those of all.

    What one step has and another lacks is filled in there. A step that lacks something broke down,
    so its images are failures and the filling is never read.
    """
    answers = [part.reconstruction for part in parts]
    pictures, mask = [answer.images for answer in answers], [answer.mask for answer in answers]
    if all(one is None for one in mask) or any(one is not None for one in pictures):
        size = height_width(view.pixels.size)
        nothing = torch.full((batch, len(view.pixels.mean), *size), torch.nan)
        pictures = [nothing if images is None else images for images in pictures]
    names = dict.fromkeys(name for answer in answers for name in answer.diagnostics)
    told = {name: _filled([a.diagnostics.get(name) for a in answers], torch.nan) for name in names}

    def placed(by_step: Iterable[Mapping[int, str]]) -> dict[int, str]:
        steps = enumerate(by_step)
        return {step * batch + place: why for step, one in steps for place, why in one.items()}

    whole = Reconstruction(
        _filled(pictures, torch.nan),
        _filled(mask, False),
        _filled([answer.permutation for answer in answers], 0),
        {name: values for name, values in told.items() if values is not None},
        placed(answer.inapplicable for answer in answers),
    )
    traces = {key: text for part in parts for key, text in part.traces.items()}
    return Done(whole, placed(part.failed for part in parts), traces)


def _filled(parts: Sequence[Tensor | None], missing: float) -> Tensor | None:
    """The steps' parts as one tensor (m, ...), a missing one filled; None if all miss."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    filler = torch.full_like(like, missing)
    return torch.cat([(filler if part is None else part).cpu() for part in parts])


def without_reconstruction(reconstruction: Reconstruction, count: int) -> dict[int, str]:
    """Which of `count` images have no finite reconstruction, though the attack applies to them."""
    wanted = [at for at in range(count) if at not in reconstruction.inapplicable]
    if reconstruction.images is None and reconstruction.mask is not None:
        return {}  # an attack that only names the masked positions
    if reconstruction.images is None:
        return dict.fromkeys(wanted, "the attack returned no reconstruction")
    finite = reconstruction.images.isfinite().flatten(1).all(-1).tolist()
    return {at: "the reconstruction is not finite" for at in wanted if not finite[at]}


# whether an answer is one -------------------------------------------------------------------------


class WrongAnswer(ValueError):
    """An attack returned something else than a Reconstruction of its images."""


def checked_reconstruction(answer: Any, view: AttackerView, count: int) -> Reconstruction:
    """The attack's answer for `count` images, without a graph; WrongAnswer where it is none.

    Pictures may hold NaN: those are failures of single images.
    """
    if not isinstance(answer, Reconstruction):
        raise WrongAnswer(f"expected a Reconstruction, got {type(answer).__name__}")
    patches = view.model.grid.patches
    picture = (count, len(view.pixels.mean), *height_width(view.pixels.size))
    images = _tensor("images", answer.images, picture, "float")
    mask = _tensor("mask", answer.mask, (count, patches), "whole")
    permutation = _tensor("permutation", answer.permutation, (count, patches), "whole")
    if (
        permutation is not None
        and not 0 <= int(permutation.min()) <= int(permutation.max()) < patches
    ):
        raise WrongAnswer(f"permutation: expected numbers of patches, 0 to {patches - 1}")
    if not isinstance(answer.diagnostics, Mapping):
        kind = type(answer.diagnostics).__name__
        raise WrongAnswer(f"diagnostics: expected tensors by name, got {kind}")
    diagnostics = dict[str, Tensor | None]()
    for name, values in answer.diagnostics.items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 100:
            raise WrongAnswer(f"diagnostics: expected short names, got {shown(repr(name), 60)}")
        diagnostics[name] = _tensor(f"diagnostics[{name!r}]", values, (count,), "float", "whole")
    return replace(
        answer,
        images=images,
        mask=mask,
        permutation=permutation,
        diagnostics={name: values for name, values in diagnostics.items() if values is not None},
        inapplicable=_reasons(answer.inapplicable, count),
    )


def _tensor(name: str, value: Any, shape: tuple[int, ...], *kinds: str) -> Tensor | None:
    """The value without its graph, or None if it is None.

    kinds  of numbers that it may hold: float, or whole, as booleans are
    """
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise WrongAnswer(f"{shown(name, 60)}: expected a tensor, got {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise WrongAnswer(
            f"{shown(name, 60)}: expected the shape {shape}, got {tuple(value.shape)}"
        )
    kind = "float" if value.is_floating_point() else "complex" if value.is_complex() else "whole"
    if kind not in kinds:
        words = " or ".join(kinds)
        raise WrongAnswer(f"{shown(name, 60)}: expected {words} numbers, got {value.dtype}")
    return value.detach()


def _reasons(inapplicable: Any, count: int) -> dict[int, str]:
    """{place: why} with places among the images, and texts."""
    fits = isinstance(inapplicable, Mapping) and all(
        type(place) is int and 0 <= place < count and isinstance(reason, str)
        for place, reason in inapplicable.items()
    )
    if not fits:
        got = shown(repr(inapplicable), 100)
        raise WrongAnswer(f"inapplicable: expected reasons by image, 0 to {count - 1}, got {got}")
    return {place: shown(reason) for place, reason in inapplicable.items()}
