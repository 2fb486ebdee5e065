"""Every weights file of the package has its card, and figures in it are those of results/zoo."""

from __future__ import annotations

from tools.model_cards import ROOT, ZOO, cards


def test_cards_are_what_metadata_and_results_say() -> None:
    assert {file.stem for file in cards()} == {file.stem for file in ZOO.glob("*.safetensors")}
    for file, text in cards().items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name}: python -m tools.model_cards"


def test_weights_of_other_sources_are_named_in_the_card_of_their_folder() -> None:
    weights = [*ROOT.glob("mjp_privacy/**/*.safetensors"), *ROOT.glob("attacks/**/*.safetensors")]
    others = [file for file in weights if file.parent != ZOO]
    assert len(others) == 3
    for file in others:
        assert file.name in (file.parent / "README.md").read_text(encoding="utf-8")
