"""Tokens of a batch, found position by position and joined to pictures."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attacks import find_attack
from attacks.equations.batches import superposed
from attacks.equations.completion import field_energy
from attacks.equations.layers import LayerSpans
from attacks.equations.patch_system import patch_system
from attacks.equations.token_search import PictureSearch, Token, TokenSearch, completed, linked
from mjp_privacy.client.config import ClientConfig
from mjp_privacy.models.jigsaw import to_patches
from tests.helpers.models import planted_model
from tests.helpers.planted import planted_images, planted_view

ATTACK = find_attack("layer_span", {"prior": "stationary"})
SIDE, BATCH, PATCHES = 8, 3, 4


def planted() -> tuple[TokenSearch, Tensor]:
    """The search in an upload of a batch of three, and the pictures' patches (B, N, p)."""
    model = planted_model(img_size=SIDE, depth=3)
    images = planted_images(BATCH, SIDE)
    client = ClientConfig(batch=BATCH)
    view, _ = planted_view(model, ATTACK, "a", images=images, client=client)
    update = view.updates[0]
    guess = superposed(view, update, patch_system(view, update), 0, "stationary")
    grads = {name: sent[0] for name, sent in update.grads.items()}
    spans = LayerSpans.of(view.model, grads, BATCH, 2)
    assert spans is not None
    energy = field_energy("stationary", model.patch_size, view.pixels)
    normalised = view.model.normalize(images)  # type: ignore[operator]
    patches = torch.stack([to_patches(one, model.patch_size) for one in normalised])
    return TokenSearch(spans, guess, energy), patches.double()


def tokens_of(search: TokenSearch, patches: Tensor) -> list[Token]:
    """The tokens of one picture (N, p)."""
    with torch.no_grad():
        sums = search.attended(patches)
    return [Token(place, *both) for place, both in enumerate(zip(patches, sums, strict=True))]


def test_searches_end_at_tokens_of_the_batch_and_nowhere_else() -> None:
    search, patches = planted()
    places = [place for place in range(PATCHES) for _ in range(8)]
    middle = search.coordinates(search.guess.mean)[places]
    away = torch.randn(middle.shape, generator=torch.Generator().manual_seed(0)) * search.scale
    found = search.precisely(search.found(middle + away, places, 1e-9))
    assert len(found) > 8
    for token in found:
        off = (patches[:, token.place] - token.patch).abs().amax(1)
        assert float(off.min()) < 1e-5


def test_attention_tells_which_tokens_stood_together() -> None:
    search, patches = planted()
    each = [tokens_of(search, picture) for picture in patches]
    mixed = [each[number][place] for place in range(PATCHES) for number in (2, 0, 1)]
    pictures = linked(search, mixed, BATCH, 0.6)
    assert len(pictures) == BATCH
    for tokens in pictures:
        assert any(all(one in own for one in tokens) for own in each)
        assert len(tokens) == PATCHES


def test_a_missing_token_is_linked_around_and_completed() -> None:
    search, patches = planted()
    each = [tokens_of(search, picture) for picture in patches]
    some = [*each[0][:3], *each[1], *each[2]]
    pictures = linked(search, some, BATCH, 0.6)
    assert sorted(map(len, pictures)) == [3, 4, 4]
    found = completed(search, each[0][:3])
    assert float((found - patches[0]).square().mean().sqrt()) < 1e-2


def test_all_pictures_are_looked_for_before_one_is_taken_out() -> None:
    search, patches = planted()
    known = PictureSearch(torch.Generator().manual_seed(0))
    first = known.found(search, BATCH, 12, 1e-9)
    assert first is not None
    assert len(known.waiting) == BATCH - 1
    again = replace(known).found(search, BATCH - 1, 0, 1e-9)  # no round is needed
    assert again is not None
    for picture, share in (first, again):
        assert share < 1e-15
        assert float((patches - picture).square().mean((1, 2)).min()) < 1e-16
