"""Every weights file of the package has its card, and figures in it are those of results/zoo."""

from __future__ import annotations

from tools.model_cards import CARD, ROOT, ZOO, card


def test_the_card_is_what_metadata_and_results_say() -> None:
    names = [file.stem for file in ZOO.glob("*.safetensors")]
    assert names
    assert all(f"| `{name}` |" in card() for name in names)
    assert CARD.read_text(encoding="utf-8") == card(), "python -m tools.model_cards"


def test_weights_of_other_sources_are_named_in_the_card_of_their_folder() -> None:
    weights = [*ROOT.glob("mjp_privacy/**/*.safetensors"), *ROOT.glob("attacks/**/*.safetensors")]
    others = [file for file in weights if file.parent != ZOO]
    assert len(others) == 3
    for file in others:
        assert file.name in (file.parent / "README.md").read_text(encoding="utf-8")
