"""What a block's cells share: by key, by the content of tensors, the last two of large values."""

import torch
from mjp_privacy.experiment.memo import Memo


def test_once_is_once() -> None:
    memo, calls = Memo(), []
    for _ in range(2):
        assert memo.once("key", lambda: calls.append(1) or "value") == "value"
    assert calls == [1]


def test_equal_tensors_have_one_number() -> None:
    memo, images = Memo(), torch.rand(2, 3)
    first = memo.content(images)
    assert memo.content(images.clone()) == first
    others = (images + 1, images[:1], images.double(), None)
    assert len({first, *map(memo.content, others)}) == 5
    assert memo.content(None) == -1


def test_the_last_two_values_of_a_name_are_kept() -> None:
    memo, made = Memo(), []

    def value_of(key: int) -> int:
        return memo.recent("large", key, lambda: made.append(key) or key)

    assert [value_of(key) for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]  # 2 was dropped for 3, as 1 had been used since
