"""The shipped configs, and what identifies a cell: its line in a table and its rows on disk."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mjp_privacy.client.config import ClientConfig, client_identity, client_recipe
from mjp_privacy.client.feeding import Feeding
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.read import read_mapping, stock_config
from mjp_privacy.experiment.cell_facts import ClientFacts, cell_key, columns_of, run_id
from mjp_privacy.experiment.config import expand, load_experiment
from mjp_privacy.experiment.simulated import federation_key
from mjp_privacy.report.published import published_row
from tests.helpers.runs import one_cell

CONFIGS = Path(__file__).parents[2] / "configs"


SHIPPED = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_parse_and_open_with_their_command(path: Path) -> None:
    experiment = load_experiment(path)
    assert experiment.name == path.stem
    head = path.read_text().split("\nname:")[0]
    assert f"mjp attack configs/{path.name}" in head
    assert "Time: " in head
    assert "Expected: " in head
    assert {cell.model for cell in expand(experiment)} == set(experiment.models)


def test_table5_is_the_papers_ten_rows_in_its_order() -> None:
    experiment = load_experiment(CONFIGS / "table5.yaml")
    cells = [c for c in expand(experiment) if c.attack.name == "april" and c.gamma in (0, 0.27)]
    rows = [(c.model, c.setting, c.gamma) for c in cells]
    intact = ["ViT-S", "DeiT-S", "DeiT-S (w/o PEs)", "DeiT-S+MJP"]
    assert rows == [
        *((model, "a", 0.0) for model in intact),
        *((model, "b", 0.27) for model in intact),
        ("DeiT-S+MJP (w/o)", "b", 0.27),
        ("DeiT-S+MJP", "c", 0.27),
    ]
    for cell in cells:
        paper = experiment.models[cell.model].paper
        setting = cell.paper_setting or cell.setting
        assert paper is not None
        assert published_row(paper, setting).label, (paper, setting)
    printed = {(experiment.models[c.model].paper, c.paper_setting or c.setting) for c in cells}
    assert len(printed) == 10
    assert {(c.model, c.setting) for c in expand(experiment) if c.gamma == 0.9} == {
        (model, setting) for model, setting, gamma in rows if gamma
    }
    without = next(c for c in cells if c.model == "DeiT-S+MJP (w/o)")
    assert without.paper_setting == "a"
    assert without.note is not None
    assert {c.dtype for c in cells} == {"float32"}


def test_stock_configs_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_experiment("demo").name == "demo"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("name: mine\n")
    assert stock_config("demo") == Path("configs/demo.yaml")
    (tmp_path / "demo").write_text("name: nearer\n")
    assert stock_config("demo") == Path("demo")
    assert stock_config("configs/demo.yaml") == Path("configs/demo.yaml")
    assert read_mapping(Path("configs/training/cifar10.yaml"))["name"] == "cifar10"
    with pytest.raises(UserError) as caught:
        load_experiment("ladderr")
    assert "'ladderr'" in str(caught.value)
    assert "ladder?" in str(caught.value)


# cell_key and run_id ------------------------------------------------------------------------------


def test_cells_of_older_configs_keep_their_key_and_run_id() -> None:
    """Digests of the release before labels, clients of entries and their further fields."""
    experiment = load_experiment(CONFIGS / "demo.yaml")
    found = {}
    for c in expand(experiment):
        own = cell_key(c, experiment), run_id(c, experiment, None, True)
        found[c.model, c.setting, c.dtype, c.attack.name] = own
    expected = {
        ("ViT", "a", "float32", "april"): ("f5e654e45f94a036", "c03368e735ffe851"),
        ("ViT (w/o PEs)", "b", "float64", "april"): ("9d68dd6844e1b6b7", "fd851f239e821eed"),
        ("ViT+MJP", "c", "float32", "april"): ("7c409c17905b7b87", "bc67c9ee7c0f3e26"),
        ("ViT+MJP", "b", "float64", "april_unk_aware"): ("aa039ad8d7a94603", "2617a5b46df3d3e7"),
    }
    assert {line: found[line] for line in expected} == expected
    changed = {"mode": "train", "batch": 2, "dal": True, "dal_lambda": 0.3}
    content = {"name": "x", "models": {"ViT": {}}, "grid": [{"models": ["ViT"], "settings": ["a"]}]}
    experiment = load_experiment(content | {"client": changed})
    whole = load_experiment(content)
    entry = content["grid"][0] | {"client": changed}  # type: ignore[index]
    own = load_experiment(content | {"grid": [entry]})
    keys = [cell_key(expand(e)[0], e) for e in (experiment, own, whole)]
    assert keys[0] == keys[1] != keys[2]


OTHER: dict[str, Any] = {
    "mode": "train",
    "batch": 2,
    "partners": "fresh",
    "dal": True,
    "dal_lambda": 0.5,
    "plain_share": 0.5,
    "mask": "batch",
    "augment": "flip",
    "withhold": ("pos_embed",),
    "positions": "sinusoidal",
    "position_noise": 0.1,
    "server_lr": 0.1,
    "upload": "weight_difference",
    "lr": 0.5,
    "weight_decay": 0.1,
    "defenses": ("int8",),
    "steps": 2,
    "optimizer": "adamw",
    "momentum": 0.9,
    "lora": "{rank: 4, targets: [qkv]}",
    "train": "head",
    "autocast": "bf16",
}


"""A value of each field of the client that is not its default; `loss` has only one value."""


def test_the_table_above_holds_every_field() -> None:
    fields = {field.name for field in dataclasses.fields(ClientConfig)}
    assert fields - set(OTHER) == {"loss"}


@pytest.mark.parametrize("field", OTHER)
def test_no_two_clients_share_an_input_an_upload_a_line_or_rows(field: str) -> None:
    """A field that is forgotten somewhere would reuse another cell's."""
    client, changed = ClientConfig(), replace(ClientConfig(), **{field: OTHER[field]})
    fed = Feeding(client, "c", 0.5, 8, 0)
    assert fed == Feeding(ClientConfig(), "c", 0.5, 8, 0)
    assert fed != replace(fed, client=changed)
    experiment = load_experiment(one_cell())
    cell = expand(experiment)[0]
    cells = [replace(cell, client=one) for one in (client, changed)]
    assert len({federation_key(one) for one in cells}) == 2
    assert len({cell_key(one, experiment) for one in cells}) == 2
    assert len({run_id(one, experiment, None, True) for one in cells}) == 2
    assert client_identity(changed) != client_identity(client)
    assert client_recipe(changed) == {field: OTHER[field]}


@pytest.mark.parametrize("field", [*OTHER, "loss"])
def test_every_field_is_a_column_that_shows_its_value(field: str) -> None:
    """Lists in words; `dal_lambda` only where the loss has such a term."""
    assert field in columns_of(ClientFacts)
    if field in OTHER:
        dal = {"dal": True} if field == "dal_lambda" else {}
        client = replace(ClientConfig(), **{field: OTHER[field]}, **dal)
        words = {"withhold": "pos_embed", "defenses": "int8"}
        shown = getattr(ClientFacts.of(client, localizes=True), field)
        assert shown == words.get(field, OTHER[field])
