"""What is said where a file or a name lacks facts: which file, and what timm declares."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from mjp_privacy.core.errors import UserError
from mjp_privacy.models import load_model
from mjp_privacy.models.loading import outline_model
from tests.helpers.models import KNOWN, MEAN, state_of


def test_a_file_called_as_all_weights_are_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "my_vit").mkdir()
    path = tmp_path / "my_vit" / "model.safetensors"
    save_file(state_of(), path)
    for load in (load_model, outline_whole):
        with pytest.raises(
            UserError, match=r"^my_vit.model\.safetensors: num_heads cannot be read"
        ):
            load(checkpoint=path, mean=MEAN, std=0.5)
    model = load_model(checkpoint=path, **KNOWN)
    assert model.card.checkpoint.source == "model.safetensors"  # a folder is no part of a run_id


def outline_whole(**arguments: Any) -> None:
    outline_model(whole=True, **arguments)


def test_what_timm_declares_for_the_name_is_said_and_not_taken(tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    with pytest.raises(UserError) as caught:
        load_model(name, checkpoint="random", num_classes=5)
    declared = "mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)"
    end = f" timm declares {declared} for {name}: give that if the client used it."
    assert str(caught.value).endswith(end)
    with pytest.raises(UserError) as caught:
        load_model(name, checkpoint="random", num_classes=5, mean=0.5)
    assert f" timm declares std=(0.5, 0.5, 0.5) for {name}: give" in str(caught.value)
    with pytest.raises(UserError) as caught:
        load_model("vit_b_16", checkpoint="random", num_classes=5)
    assert "timm declares" not in str(caught.value)
