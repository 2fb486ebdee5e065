"""The in-process federation against torch's own optimisers, its splits, and after it was killed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mjp_privacy.client.upload import sinusoidal_table
from mjp_privacy.core.errors import UserError
from mjp_privacy.federation import rounds
from mjp_privacy.federation.config import Server, load_federation
from mjp_privacy.federation.rounds import Federation, federate
from mjp_privacy.federation.task import (
    ServerState,
    Task,
    data_path,
    dirichlet,
    federation_images,
    iid,
    learning_rate,
    mean_gradient,
    server_step,
)
from mjp_privacy.interfaces import ClientUpdate
from mjp_privacy.models import load_model
from tests.helpers.federations import MJP, config, images, plain_forward, run, task

MINUTE = "configs/federated/minute.yaml"


CLOCK = ("timing", "check")
"""Fields of a line of metrics.jsonl that depend on the clock: its checksum counts the seconds."""


def rounds_of(federation: Task, number: int) -> dict[str, torch.Tensor]:
    weights, state = federation.initial_weights(), ServerState()
    for round in range(number):
        uploads = [
            (federation.client_update(weights, client, round), federation.examples(client))
            for client in federation.participants(round)
        ]
        weights, state = federation.server_step(weights, state, uploads, round)
    return weights


def torch_rounds(federation: Task, number: int, optimizer: Any) -> dict[str, torch.Tensor]:
    """The union of a round's batches as one batch of an ordinary training loop."""
    model = copy.deepcopy(federation.with_weights(federation.initial_weights()))
    steps = optimizer(model.parameters())
    for round in range(number):
        places = [
            place
            for client in federation.participants(round)
            for place in federation._drawn(client, round)
        ]
        steps.zero_grad()
        plain_forward(model, federation, places).backward()
        steps.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=atol), name


def test_fedsgd_is_sgd_on_the_union_of_the_batches(tmp_path: Path) -> None:
    federation = task(tmp_path)
    expected = torch_rounds(federation, 3, lambda p: torch.optim.SGD(p, lr=0.1))
    assert_close(rounds_of(federation, 3), expected, 1e-6)


@pytest.mark.parametrize("changes", [{}, {"model": {**MJP, "dal": "nonlinear"}, "gamma": 0.5}])
def test_the_mean_of_undefended_clients_is_made_at_once(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """And is that of their single uploads, also with masks and DAL."""
    client = {"batch": 3, "dal": bool(changes), "withhold": ["head.bias"]}
    federation = task(tmp_path, client=client, **changes)
    weights = federation.initial_weights()
    single = [
        (update, 3) for update in federation.client_updates(weights, federation.participants(1), 1)
    ]
    ((mean, images),) = federation.round_uploads(weights, 1)
    assert images == 6
    assert_close(mean_gradient([(mean, images)]), mean_gradient(single), 1e-6)


def test_fedadam_is_torchs_adamw() -> None:
    """On the same gradients: those of a network would differ by rounding, which Adam magnifies
    where they are zero."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1)
    server = Server(optimizer="adam", lr=0.01, weight_decay=0.1)
    weights, state = {"w": start}, ServerState()
    for round in range(4):
        gradient = torch.randn(5, 3, generator=generator)
        parameter.grad = gradient
        reference.step()
        upload = ClientUpdate({"w": -gradient.unsqueeze(0)}, kind="weight_difference")
        weights, state = server_step(server, weights, state, [(upload, 1)], round=round, rounds=4)
        assert torch.allclose(weights["w"], parameter.detach(), atol=1e-6)


def test_the_servers_rate_warms_up_and_falls_to_zero() -> None:
    server = Server(lr=1.0, warmup=2, schedule="cosine")
    rates = [learning_rate(server, round, 10) for round in range(11)]
    assert rates[0] == 0.5
    assert rates[5] == pytest.approx(0.5)
    assert rates[10] == pytest.approx(0.0)
    assert learning_rate(Server(lr=0.3), 7, 10) == 0.3


def test_fedavg_is_the_mean_of_the_clients_weights(tmp_path: Path) -> None:
    client = {"batch": 3, "upload": "weight_difference", "lr": 0.05, "weight_decay": 0.01}
    federation = task(tmp_path, client=client, server={"lr": 1.0})
    start = federation.initial_weights()
    trained = []
    for client_number in federation.participants(0):
        model = copy.deepcopy(federation.with_weights(start))
        places = federation._drawn(client_number, 0)
        loss = plain_forward(model, federation, places)
        step = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)
        loss.backward()
        step.step()
        trained.append({name: p.detach() for name, p in model.named_parameters()})
    mean = {name: (trained[0][name] + trained[1][name]) / 2 for name in start}
    assert_close(rounds_of(federation, 1), mean, 1e-6)


def killed_in(round: int, monkeypatch: pytest.MonkeyPatch, *arguments: Any, **changes: Any) -> None:
    """A run that is stopped when this round begins."""
    one_round = Federation._one_round

    def dies(self: Federation) -> None:
        if self.round == round:
            raise KeyboardInterrupt
        one_round(self)

    with monkeypatch.context() as patched:
        patched.setattr(rounds, "CHECKPOINT_SECONDS", -1.0)
        patched.setattr(Federation, "_one_round", dies)
        with pytest.raises(KeyboardInterrupt):
            run(*arguments, **changes)


def test_a_killed_federation_ends_with_the_same_weights_and_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its attacks were corrected meanwhile, which are no part of the training."""
    mjp = {"model": MJP, "gamma": 0.5, "server": {"optimizer": "adam", "lr": 0.01}}
    whole = run(tmp_path, "whole", **mjp)
    killed_in(2, monkeypatch, tmp_path, "killed", **mjp, attacks=[{"name": "grey"}])
    killed = run(tmp_path, "killed", **mjp)
    models = [load_model(checkpoint=out / "model.safetensors") for out in (whole, killed)]
    for (name, one), (_, other) in zip(*(m.named_parameters() for m in models), strict=True):
        assert one.equal(other), name
    written = sorted(p.name for p in (whole / "uploads").iterdir())
    assert written == sorted(p.name for p in (killed / "uploads").iterdir())
    lines = [
        [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in text]
        for text in ((out / "metrics.jsonl").read_text().splitlines() for out in (whole, killed))
    ]
    assert lines[0] == lines[1]
    assert [line["round"] for line in lines[0]] == [0, 2, 4]


def test_what_is_trained_may_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the run was finished, or killed before its first checkpoint."""
    killed_in(0, monkeypatch, tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match=r"server\.lr"):
            run(tmp_path, server={"optimizer": "sgd", "lr": 0.2})
        assert (run(tmp_path) / "model.safetensors").is_file()


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="finite"):
        run(tmp_path, server={"optimizer": "sgd", "lr": 1e9})
    with pytest.raises(UserError, match="none"):
        federate(config(), tmp_path / "none", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("others", [[{"v": torch.ones(1)}], [{}], None])
def test_uploads_of_other_names_and_none_at_all_are_refused(others: Any) -> None:
    one, three = (ClientUpdate({"w": torch.full((1, 2), value)}) for value in (1.0, 5.0))
    assert mean_gradient([(one, 1), (three, 3)])["w"].tolist() == [4.0, 4.0]  # by their images
    given = [] if others is None else [{"w": torch.ones(1)}, *others]
    with pytest.raises(UserError):
        mean_gradient([(ClientUpdate(grads), 1) for grads in given])


def test_a_fixed_table_stays_and_is_not_uploaded(tmp_path: Path) -> None:
    client = {"batch": 3, "positions": "sinusoidal"}
    federation = task(tmp_path, model=MJP, gamma=0.5, client=client)
    weights = federation.initial_weights()
    assert "pos_embed" not in federation.client_update(weights, 0, 0).grads
    table = sinusoidal_table(4, 40).to(torch.float32)
    assert rounds_of(federation, 2)["pos_embed"][0, 1:].equal(table)


def test_local_steps_and_defences_are_the_clients_own(tmp_path: Path) -> None:
    """Noise differs between clients, and the mean of many local steps is not one step's."""
    noisy = task(tmp_path, client={"batch": 3, "defenses": [{"gaussian_noise": 1.0}]})
    plain, weights = task(tmp_path), noisy.initial_weights()
    parts = [
        noisy.client_update(weights, c, 0).grads["cls_token"]
        - plain.client_update(weights, c, 0).grads["cls_token"]
        for c in (0, 1)
    ]
    assert not torch.allclose(parts[0], parts[1])
    stepped = {"batch": 3, "steps": 3, "upload": "weight_difference", "lr": 0.05}
    local = task(tmp_path, client=stepped, server={"lr": 1.0})
    model = copy.deepcopy(local.with_weights(weights))
    places = local._drawn(0, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        plain_forward(model, local, places).backward()
        optimizer.step()
    sent = local.client_update(weights, 0, 0).grads
    for name, parameter in model.named_parameters():
        assert torch.allclose(sent[name][0], parameter.detach() - weights[name], atol=1e-6), name


def test_iid_deals_every_image_once() -> None:
    parts = iid([0] * 23, 5, seed=0)
    assert sorted(place for part in parts for place in part) == list(range(23))
    assert {len(part) for part in parts} == {4, 5}


def test_a_small_alpha_gives_clients_few_classes() -> None:
    labels = [place % 10 for place in range(2000)]
    shares = {}
    for alpha in (0.1, 100.0):
        parts = dirichlet(labels, 10, alpha=alpha, least=1, seed=0)
        assert sorted(place for part in parts for place in part) == list(range(2000))
        largest = [max([labels[p] for p in part].count(k) for k in range(10)) for part in parts]
        shares[alpha] = sum(m / len(part) for m, part in zip(largest, parts, strict=True)) / 10
    assert shares[0.1] > 0.4 > 0.15 > shares[100.0]


def test_splits_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="alpha"):
        dirichlet([0, 1, 2], 3, alpha=0.01, least=2, seed=0)
    with pytest.raises(UserError, match=r"clients\.number"):
        task(tmp_path, clients={"number": 500})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gamma": 0.3}, "unknown_embedding"),
        ({"clients": {"number": 2, "per_round": 3}}, "clients.per_round"),
        ({"record": {"rounds": [4]}}, "record.rounds"),
        ({"record": {"rounds": [0], "images": 3, "probes": [{"batch": 2}]}}, "record.images"),
        ({"record": {"images": 8, "probes": [{"batch": 1, "partners": "fresh"}]}}, "probes.0"),
        ({"record": {"images": 8, "probes": [{"batch": 8, "partners": "fresh"}]}}, "16"),
        ({"client": {"batch": 2, "server_lr": 0.1}}, "server.lr"),
        ({"client": {"bach": 2}}, "batch"),
        ({"client": {"batch": 2, "augment": "mixup"}}, "client.augment"),
        ({"sever": {}}, "server"),
    ],
)
def test_mistakes_in_a_config_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        config(**changes)
    assert named in str(caught.value)


def test_an_epoch_holds_every_image_once(tmp_path: Path) -> None:
    federation = task(tmp_path, client={"batch": 3, "partners": "fresh"})
    part = federation.parts[1]
    batches = len(part) // 3
    epochs = []
    for epoch in range(3):
        drawn = [federation._drawn(1, epoch * batches + place) for place in range(batches)]
        images = [image for batch in drawn for image in batch]
        assert len(set(images)) == len(images) == batches * 3
        assert set(images) <= set(part)
        epochs.append(images)
    assert epochs[0] != epochs[1] != epochs[2]
    assert federation._drawn(1, 0) == epochs[0][:3]  # a function of client and round alone
    assert task(tmp_path).participants(2) == federation.participants(2)
    federation.parts[1] = part[:2]  # fewer than a batch: they are repeated
    assert set(federation._drawn(1, 0)) == set(part[:2])
    assert len(federation._drawn(1, 5)) == 3


def test_each_photograph_is_a_class() -> None:
    train, test = federation_images(load_federation(MINUTE), "embedded", None)
    assert (len(train), test) == (20, None)
    photographs = {record.image_id.split("/")[0] for record in train.records}
    pairs = {(record.image_id.split("/")[0], record.label) for record in train.records}
    assert len(pairs) == len(photographs) == len(set(train.labels)) == 6
    same, tested = federation_images(load_federation(MINUTE), "embedded", "embedded")
    assert same == tested


def test_photographs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.num_classes"):
        federation_images(config(model={"num_classes": 5}), "embedded", None)
    with pytest.raises(UserError, match="--val"):
        federation_images(load_federation(MINUTE), "embedded", images(tmp_path / "data"))
    assert data_path("embedded") == "embedded"
    assert data_path("images") == str(Path("images").resolve())
