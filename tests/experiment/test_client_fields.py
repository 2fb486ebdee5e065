"""A field of the client that is forgotten somewhere would reuse another cell's input, file or
column: every field enters all of them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from mjp_privacy.experiment.identity import cell_key, run_id

from mjp_privacy.client.config import ClientConfig, client_identity, client_recipe
from mjp_privacy.client.feeding import Feeding
from mjp_privacy.experiment.cell_facts import ClientFacts, columns_of
from mjp_privacy.experiment.config import expand
from mjp_privacy.experiment.config_files import load_experiment
from mjp_privacy.experiment.simulated import federation_key
from mjp_privacy.experiment.store import CELL_COLUMNS
from tests.helpers.runs import one_cell

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
    "autocast": "bf16",
}
"""A value of each field that is not its default; `loss` has only one value."""

each_field = pytest.mark.parametrize("field", OTHER)


def test_the_table_above_holds_every_field() -> None:
    fields = {field.name for field in dataclasses.fields(ClientConfig)}
    assert fields - set(OTHER) == {"loss"}


@each_field
def test_it_is_part_of_the_memo_keys(field: str) -> None:
    """What is fed, and what is uploaded, is made anew for another client."""
    client = ClientConfig()
    changed = replace(client, **{field: OTHER[field]})
    fed = Feeding(client, "c", 0.5, 8, 0)
    assert fed == Feeding(ClientConfig(), "c", 0.5, 8, 0)
    assert fed != replace(fed, client=changed)
    cell = expand(load_experiment(one_cell()))[0]
    keys = {federation_key(replace(cell, client=one), "intact") for one in (client, changed)}
    assert len(keys) == 2


@each_field
def test_it_is_part_of_the_identity(field: str) -> None:
    """Two clients never share a line of the table or its rows."""
    changed = replace(ClientConfig(), **{field: OTHER[field]})
    assert client_identity(changed) != client_identity(ClientConfig())
    assert client_recipe(changed) == {field: OTHER[field]}
    experiment = load_experiment(one_cell())
    cell = expand(experiment)[0]
    other = replace(cell, client=changed)
    assert cell_key(cell, experiment) != cell_key(other, experiment)
    ids = {run_id(one, experiment, None, True) for one in (cell, other)}
    assert len(ids) == 2


@pytest.mark.parametrize("field", [*OTHER, "loss"])
def test_it_is_a_column_of_the_rows(field: str) -> None:
    assert field in columns_of(ClientFacts)
    assert field in CELL_COLUMNS


@each_field
def test_its_column_shows_its_value(field: str) -> None:
    """Lists in words; `dal_lambda` only where the loss has such a term."""
    dal = {"dal": True} if field == "dal_lambda" else {}
    client = replace(ClientConfig(), **{field: OTHER[field]}, **dal)
    shown = getattr(ClientFacts.of(client, localizes=True), field)
    words = {"withhold": "pos_embed", "defenses": "int8"}
    assert shown == words.get(field, OTHER[field])
