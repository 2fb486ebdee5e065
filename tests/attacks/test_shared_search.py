"""What batches share: planted systems, the test of two uploads, and the search among many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attacks.equations.agreement import Meeting, Search
from attacks.equations.batches import BatchSpan, batch_span, pictures_by_rank
from attacks.equations.patch_system import PatchSystem

N, D, P = 5, 40, 60
EPS = torch.finfo(torch.float64).eps
Batch = tuple[int, ...]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


PICTURES = draw(40, N, P, seed=0)


def system(batch: Batch, seed: int, masks: Tensor | None = None, noise: float = 0) -> PatchSystem:
    """What an upload of these pictures holds, with rows of its own; masks (B, N)."""
    pictures = PICTURES[list(batch)]
    hidden = torch.zeros(pictures.shape[:2], dtype=torch.bool) if masks is None else masks
    rows = draw(len(batch), N, D, seed=1000 + seed)
    total = torch.einsum("bid,bip->dp", rows, pictures)
    total = total + noise * draw(D, P, seed=2000 + seed)
    shown = torch.where(hidden.unsqueeze(-1), 0.0, rows).sum(0)
    sums = None if masks is None else torch.where(hidden.unsqueeze(-1), rows, 0.0).sum((0, 1))[None]
    return PatchSystem(shown[None], total[None], hidden.all(0)[None], sums)


def span(batch: Batch, seed: int, masks: Tensor | None = None, noise: float = 0) -> BatchSpan:
    made = system(batch, seed, masks, noise)
    return batch_span(made, 0, len(batch), EPS, can_mask=masks is not None)


def found(spans: list[BatchSpan]) -> dict[int, tuple[int, ...]]:
    """{the number of a picture that was found exactly: its uploads}; others are -1, -2, ..."""
    named: dict[int, tuple[int, ...]] = {}
    for picture in Search(spans).pictures():
        apart = (PICTURES - picture.patches).flatten(1).norm(dim=1)
        nearest = int(apart.argmin()) if float(apart.min()) < 1e-6 else -1 - len(named)
        named[nearest] = tuple(sorted(picture.uploads))
    return named


# one upload ---------------------------------------------------------------------------------------


def test_every_picture_obeys_the_equations_of_its_batch() -> None:
    batch = (3, 7, 11)
    one = span(batch, 0)
    assert one.basis.shape == (N * 2, P)
    for picture in PICTURES[list(batch)]:
        assert torch.allclose(one.off(picture), one.complement, atol=1e-9)
    assert (one.off(PICTURES[4]) - one.complement).norm(dim=1).min() > 1


def test_masked_patches_have_one_thing_in_common_where_their_sum_is_sent() -> None:
    masks = torch.zeros(3, N, dtype=torch.bool)
    masks[:, 1] = True  # in all pictures
    masks[0, 3] = True  # in one
    one = span((3, 7, 11), 0, masks)
    assert len(one.basis) == N * 2 + 1 - 1
    for picture, hidden in zip(PICTURES[[3, 7, 11]], masks, strict=True):
        assert torch.allclose(one.off(picture), one.known(~hidden), atol=1e-9)


def test_without_that_sum_they_lie_in_the_span() -> None:
    masks = torch.zeros(2, N, dtype=torch.bool)
    masks[:, 1] = True
    made = system((3, 7), 0, masks)
    one = batch_span(PatchSystem(made.rows, made.total, made.hidden), 0, 2, EPS, can_mask=True)
    assert len(one.basis) == N + 1
    assert one.off(PICTURES[[3, 7], 1]).norm(dim=1).max() < 1e-9
    assert not one.complement[1].any()


@pytest.mark.parametrize("noise", [1e-7, 1e-5])
def test_errors_are_what_the_upload_says_of_itself(noise: float) -> None:
    """The bound holds, and is not a hundred times too large."""
    one = span((3, 7, 11, 15), 0, noise=noise)
    everywhere = torch.ones(N, dtype=torch.bool)
    for picture in PICTURES[[3, 7, 11, 15]]:
        missed = (one.off(picture) - one.complement).norm(dim=1)
        expected = one.expected(picture, everywhere)
        assert (missed < 2 * expected).all()
        assert (missed > expected / 20).all()


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_the_rank_shows_how_many_pictures_a_batch_holds(count: int) -> None:
    made = system(tuple(range(count)), 0, noise=1e-9)
    assert pictures_by_rank(made.total[0], N, 1e-9) == count


def test_equal_patches_leave_the_number_of_pictures() -> None:
    pictures = PICTURES[:3].clone()
    pictures[:, 0] = 0.25  # a border in all pictures
    rows = draw(3, N, D, seed=5)
    total = torch.einsum("bid,bip->dp", rows, pictures) + 1e-9 * draw(D, P, seed=6)
    assert pictures_by_rank(total, N, 1e-9) == 3


def test_noise_of_full_rank_shows_no_number_of_pictures() -> None:
    assert pictures_by_rank(draw(D, P, seed=7), N, 1e-9) is None


# several uploads ----------------------------------------------------------------------------------


def test_two_uploads_that_share_a_picture_give_it() -> None:
    assert found([span((0, 1, 2), 0), span((0, 3, 4), 1)]) == {0: (0, 1)}


def test_two_uploads_that_share_nothing_give_nothing() -> None:
    search = Search([span((0, 1, 2), 0), span((3, 4, 5), 1)])
    assert not search.pictures()
    assert not search.agreeing


def test_several_shared_pictures_are_told_apart_by_a_third_upload() -> None:
    both = [span((0, 1, 2), 0), span((0, 1, 3), 1)]
    assert not found(both)
    assert found([*both, span((1, 4, 5), 2)]) == {1: (0, 1, 2)}


def test_pictures_that_always_stand_together_are_a_group() -> None:
    search = Search([span((0, 1, 2), 0), span((0, 1, 3), 1)])
    assert not search.pictures()
    assert len(search.groups) == 2
    group = search.groups[0]
    assert group.basis.shape == (N, P)
    for picture in PICTURES[:2]:
        apart = picture - group.patches
        assert torch.allclose(apart, (apart @ group.basis.mT) @ group.basis, atol=1e-8)


def test_a_group_counts_once() -> None:
    """Of three uploads that share two pictures no pair adds to the group of all."""
    uploads = [span((0, 1, 2), 0), span((0, 1, 3), 1), span((0, 1, 4), 2)]
    search = Search(uploads)
    assert not search.pictures()
    assert [sorted(group.uploads) for group in search.groups] == [[0, 1, 2]] * 2


def test_the_same_batch_every_time_gives_no_picture() -> None:
    assert not found([span((0, 1, 2), seed) for seed in range(3)])


def test_a_client_that_shuffles_by_epochs_gives_all() -> None:
    spans: list[BatchSpan] = []
    held: list[Batch] = []
    for epoch in range(4):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(epoch)).tolist()
        for first in range(0, 9, 3):
            held.append(tuple(order[first : first + 3]))
            spans.append(span(held[-1], len(spans)))
    expected = {
        picture: tuple(number for number, batch in enumerate(held) if picture in batch)
        for picture in range(9)
    }
    assert found(spans) == expected


def test_every_further_upload_makes_it_more_exact() -> None:
    uploads = [span((0, 2 * k + 1, 2 * k + 2), k, noise=1e-6) for k in range(6)]
    errors = []
    for count in (2, 6):
        (picture,) = Search(uploads[:count]).pictures()
        errors.append(float((picture.patches - PICTURES[0]).norm()))
        assert errors[-1] < float(picture.error.norm()) < 30 * errors[-1]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("sent", [True, False])
def test_a_shared_mask_takes_one_more_upload(sent: bool) -> None:
    """A patch that was masked in both uploads stays open until it is seen."""

    def upload(batch: Batch, seed: int, places: list[int]) -> BatchSpan:
        masks = torch.zeros(2, N, dtype=torch.bool)
        masks[:, places] = True
        made = system(batch, seed, masks)
        sums = made.hidden_sum if sent else None
        made = PatchSystem(made.rows, made.total, made.hidden, sums)
        return batch_span(made, 0, 2, EPS, can_mask=True)

    two = [upload((0, 1), 0, [0, 1, 2]), upload((0, 2), 1, [1, 2, 3])]
    (partly,) = Search(two).pictures()
    assert len(partly.basis) == (1 if sent else 2)
    assert not partly.determined
    assert found([*two, upload((0, 3), 2, [0, 4])]) == {0: (0, 1, 2)}


def test_a_mask_for_every_picture_is_found_with_it() -> None:
    masks = [torch.zeros(2, N, dtype=torch.bool) for _ in range(3)]
    masks[0][0, 1] = masks[0][1, 3] = True
    masks[1][0, 2] = masks[1][1, 2] = True
    masks[2][0, 4] = masks[2][1, 0] = True
    uploads = [span((0, number + 1), number, mask) for number, mask in enumerate(masks)]
    (picture,) = Search(uploads).pictures()
    assert picture.determined
    assert torch.allclose(picture.patches, PICTURES[0], atol=1e-7)
    shown = {upload: ~picture.visible[at] for at, upload in enumerate(picture.uploads)}
    for upload, mask in enumerate(masks):
        assert torch.equal(shown[upload], mask[0])


def test_pairs_with_too_few_equations_wait_for_a_third_upload() -> None:
    """2 (p - N (B - 1)) <= p: any two batches agree, so three are asked."""
    short = PICTURES[:, :, :18]

    def upload(batch: Batch, seed: int) -> BatchSpan:
        rows = draw(len(batch), N, D, seed=seed)
        total = torch.einsum("bid,bip->dp", rows, short[list(batch)])
        made = PatchSystem(rows.sum(0)[None], total[None], torch.zeros(1, N, dtype=torch.bool))
        return batch_span(made, 0, len(batch), EPS)

    spans = [upload((0, 1, 2), 0), upload((3, 4, 5), 1), upload((0, 6, 7), 2), upload((0, 8, 9), 3)]
    (picture,) = Search(spans).pictures()
    assert sorted(picture.uploads) == [0, 2, 3]
    assert torch.allclose(picture.patches, short[0], atol=1e-7)


def test_errors_that_hide_a_contradiction_are_no_agreement() -> None:
    noise = 1.0  # of the size of what is known
    pair = [span((0, 1, 2), 0, noise=noise), span((0, 3, 4), 1, noise=noise)]
    assert not Search(pair).pictures()


def test_a_direction_that_is_noise_is_not_taken_for_a_difference() -> None:
    """Equal patches at a position of the whole batch: the span has one direction less."""
    pictures = PICTURES.clone()
    pictures[:, 2] = 0.5

    def upload(batch: Batch, seed: int) -> BatchSpan:
        rows = draw(len(batch), N, D, seed=seed)
        total = torch.einsum("bid,bip->dp", rows, pictures[list(batch)])
        total = total + 1e-8 * draw(D, P, seed=50 + seed)
        made = PatchSystem(rows.sum(0)[None], total[None], torch.zeros(1, N, dtype=torch.bool))
        return batch_span(made, 0, len(batch), EPS)

    first, second = upload((0, 1, 2), 0), upload((0, 3, 4), 1)
    assert int(first.strength.isinf().sum()) == 2
    (picture,) = Search([first, second]).pictures()
    assert (picture.patches - pictures[0]).abs().max() < 1e-5
    assert not Search([first, upload((5, 6, 7), 2)]).pictures()


def test_a_meeting_of_one_upload_is_that_upload() -> None:
    one = span((0, 1), 0)
    meeting = Meeting.of([one])
    assert meeting.open == N
    shown = torch.ones(1, N, dtype=torch.bool)
    assert torch.allclose(meeting.patches(shown), one.complement, atol=1e-9)
