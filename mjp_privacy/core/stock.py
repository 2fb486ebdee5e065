"""The stock configs: `configs/` of a checkout, which a wheel holds as `mjp_privacy/configs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
STOCK = next(
    (folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()),
    PACKAGE / "configs",
)


def stock_config(path: str | Path) -> Path:
    """The file of this path, else the stock config that is meant by it, else the path as it is.

    stock_config("demo"), stock_config("configs/training/cifar10.yaml"): from any folder, as if it
    were the checkout; a file that is there comes first, also one in `configs/` of this folder
    """
    path = Path(path)
    is_name = not path.suffix
    if path.is_file() or path.is_absolute() or not (is_name or path.parts[0] == "configs"):
        return path
    inside = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    name = inside.with_suffix(".yaml") if is_name else inside
    found = (folder / name for folder in (Path("configs"), STOCK))
    return next((file for file in found if file.is_file()), path)


def stock_configs() -> Mapping[str, Path]:
    """Every stock config by what a command takes for it, `configs/training/cifar10.yaml`."""
    files = sorted(STOCK.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {f"configs/{file.relative_to(STOCK).as_posix()}": file for file in files}
