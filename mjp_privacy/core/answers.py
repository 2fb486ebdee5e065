"""What a command prints for programs under `--json`: one object on stdout, and nothing else.

docs/json.md has the fields of each; `schema` says which they are: "mjp-privacy/report/1".
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def print_json(kind: str, content: object, version: int = 1) -> None:
    """Print a mapping or a dataclass under its schema: print_json("list", {"attacks": {}})."""
    fields = {"schema": f"mjp-privacy/{kind}/{version}", **plain_value(content)}
    print(json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False))


def plain_value(value: object) -> Any:
    """A value as JSON has it: dataclasses are objects, NaN is null, infinity "inf" or "-inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_value(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_value(of_key) for key, of_key in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain_value(of) for of in value]
    if hasattr(value, "item"):  # a number of NumPy or pandas
        return plain_value(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return str(value) if isinstance(value, Path) else value
