"""Orders, weights and uploads as Flower's records: arrays by name and plain values, no pickle.

order   weights: ArrayRecord, order: ConfigRecord (client, round, config as JSON)
reply   grads: ArrayRecord, upload: ConfigRecord, metrics: MetricRecord (examples)
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mjp_privacy.core.errors import UserError
from mjp_privacy.federation.config import FederationConfig, plain
from mjp_privacy.federation.config_files import load_federation
from mjp_privacy.interfaces import ClientUpdate

try:
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
except ImportError as error:
    raise UserError(
        "Flower: expected the package flwr, which is not installed here. "
        "pip install '.[federated]' (Python 3.11 or newer)."
    ) from error

CPU = torch.device("cpu")
LONGEST = 300  # characters that are shown of a client's failure
ALONE = ""  # the name of a field's only tensor; parameters have names
NOT_SENT = "weights_before"  # the server has the weights that it gave


def order_of(config: FederationConfig, weights: ArrayRecord, client: int, round: int) -> RecordDict:
    """What the server sends to a client; the config goes along, so that nodes need only images."""
    fields: dict[str, Any] = {"client": client, "round": round}
    fields["config"] = json.dumps(plain(config))
    return RecordDict({"weights": weights, "order": ConfigRecord(fields)})


def read_order(content: RecordDict) -> tuple[FederationConfig, dict[str, Tensor], int, int]:
    """An order's content: the federation's config, the weights, the client and the round."""
    order = content.config_records["order"]
    config = load_federation(json.loads(str(order["config"])))
    weights = tensors(content.array_records["weights"])
    return config, weights, whole(order["client"]), whole(order["round"])


def reply_of(update: ClientUpdate, examples: int) -> RecordDict:
    """An upload as a reply, with every field that differs from its default."""
    content = RecordDict({"metrics": MetricRecord({"examples": examples})})
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(update):
        value = getattr(update, field.name)
        if field.name == NOT_SENT or value == field.default:
            continue
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        if isinstance(value, Tensor):
            content[field.name] = arrays({ALONE: value})
        elif isinstance(value, Mapping):
            content[field.name] = arrays(value)
        elif isinstance(value, (bool, int, float, str)):
            fields[field.name] = value
        else:
            raise UserError(
                f"ClientUpdate.{field.name}: expected a number, a string or tensors, as a Flower "
                f"message can carry, got {type(value).__name__}. Use the in-process engine."
            )
    content["upload"] = ConfigRecord(fields)
    return content


def read_reply(content: RecordDict, device: torch.device) -> tuple[ClientUpdate, int]:
    """A reply's upload, on this device, and its number of images; unknown fields are an error."""
    fields: dict[str, Any] = dict(content.config_records["upload"])
    for name, record in content.array_records.items():
        by_name = tensors(record, device)
        fields[name] = by_name.get(ALONE, by_name)
    expected = {field.name for field in dataclasses.fields(ClientUpdate)} - {NOT_SENT}
    if unknown := sorted(set(fields) - expected):
        raise UserError(
            f"An upload has the fields {', '.join(unknown)}, which this server does not know. "
            "Expected the same version of mjp-privacy on server and clients. Install it."
        )
    if "dtype" in fields:
        fields["dtype"] = getattr(torch, str(fields["dtype"]))
    return ClientUpdate(**fields), whole(content.metric_records["metrics"]["examples"])


def cause(reason: str) -> str:
    """What went wrong with a client, without what Flower and Ray put around the message."""
    uncoloured = re.sub(r"\x1b\[\d+m", "", reason)
    inner = uncoloured.rpartition("Message: ")[2] if "Message: " in uncoloured else uncoloured
    wrapped = re.fullmatch(r"<class '[^']*'>:<'(.*)", inner, re.DOTALL)
    text = (wrapped[1] if wrapped else inner).removesuffix("'>")
    short = " ".join(text.split())
    return short if len(short) <= LONGEST else f"{short[:LONGEST]}..."


def arrays(by_name: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors by name as a record that Flower sends."""
    return ArrayRecord({name: tensor.detach().cpu() for name, tensor in by_name.items()})


def tensors(record: ArrayRecord, device: torch.device = CPU) -> dict[str, Tensor]:
    """A record's tensors by name, on this device; they do not share the record's memory."""
    return {
        name: torch.from_numpy(array.numpy().copy()).to(device) for name, array in record.items()
    }


def whole(value: Any) -> int:
    """The value as a whole number; a message from elsewhere may hold anything."""
    if not isinstance(value, int):
        raise UserError(f"A message holds {value!r} where a whole number was expected.")
    return value
