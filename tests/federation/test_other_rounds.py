"""--rounds: what a config says in rounds moves with it, and what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mjp_privacy.cli import main
from mjp_privacy.core.errors import UserError
from mjp_privacy.core.files import write_json
from mjp_privacy.core.read import read_mapping
from mjp_privacy.federation.config import load_federation, longest_probe, what_moved, with_rounds
from tests.helpers.federations import config, content, images

QUICK = "configs/federated/quick.yaml"
SHIPPED = [
    (path, row)
    for path in sorted(Path("configs/federated").glob("*.yaml"))
    for row in (read_mapping(path).get("rows") or {None: None})
]


def test_a_shortened_training_takes_what_is_recorded_along() -> None:
    whole = load_federation(QUICK)
    short = with_rounds(whole, 10)
    assert short == load_federation(QUICK, rounds=10)
    assert (short.rounds, short.record.rounds) == (10, (0, 2, 4))
    assert (short.server.warmup, short.evaluate_every) == (1, 2)
    assert "0, 2, 4" in what_moved(whole, short)
    assert with_rounds(whole, whole.rounds) is whole
    assert what_moved(whole, whole) == ""
    assert with_rounds(config(record={}), 40).server.warmup == 0


@pytest.mark.parametrize("rounds", [6, 11, 1000])
@pytest.mark.parametrize(("path", "row"), SHIPPED, ids=str)
def test_every_shipped_config_can_have_another_length(
    path: Path, row: str | None, rounds: int
) -> None:
    whole = load_federation(path, row)
    other = load_federation(path, row, rounds=rounds)
    starts, room = other.record.rounds, rounds - longest_probe(whole)
    assert list(starts) == sorted(set(starts))
    assert starts
    assert starts[-1] <= room
    assert (whole.record.rounds[0] == 0) <= (starts[0] == 0)
    before = whole.record.rounds[-1] / (whole.rounds - longest_probe(whole))
    assert abs(starts[-1] - before * room) <= 0.5
    assert len(starts) == len(whole.record.rounds) or rounds < whole.rounds


def test_rows_of_shipped_configs_are_told_apart() -> None:
    titles = [(path, load_federation(path, row).title) for path, row in SHIPPED]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("rounds", [5, 0, -3])
def test_too_few_rounds_for_the_probes_are_refused(rounds: int) -> None:
    with pytest.raises(UserError, match=r"--rounds.* 6"):
        load_federation(QUICK, rounds=rounds)
    assert with_rounds(config(record={}), 1).rounds == 1


def test_the_command_says_what_moved_and_records_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "config.yaml", content(rounds=20, evaluate_every=10))  # JSON is YAML
    out = tmp_path / "out"
    argv = [str(tmp_path / "config.yaml"), "--data", str(images(tmp_path / "data"))]
    argv = ["federate", *argv, "--out", str(out), "--device", "cpu", "--rounds", "4"]
    assert main(argv) == 0
    assert "round 0 instead of 1" in capsys.readouterr().out.splitlines()[0]
    recorded = {json.loads(path.read_text())["round"] for path in out.glob("uploads/*.json")}
    assert recorded == {0, 1}
    assert main([*argv[:-1], "1"]) == 2
    assert "--rounds" in capsys.readouterr().err
