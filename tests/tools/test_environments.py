"""tools/test-environments: rows of two runs are compared by what they are about."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import numpy as np
import pandas as pd

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "test-environments"


def test_a_line_says_how_far_a_run_is_from_the_standard(tmp_path: Path) -> None:
    """Distances are relative above one, and infinite where a value is lost."""
    loader = SourceFileLoader("test_environments_tool", str(SCRIPT))
    tool = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(tool)

    def written(name: str, **changed: float) -> pd.DataFrame:
        """Four images' PSNR in two precisions; `changed` gives image a another by precision."""
        about = dict.fromkeys(tool.KEY, "x") | {"gamma": 0.27, "metric": "psnr"}
        about |= {"status": "ok", "reason": ""}
        known = zip("abcd", [20.0, np.inf, np.nan, 40.0], strict=True)
        rows = [
            about | {"dtype": dtype, "image_id": image, "value": value}
            for image, value in known
            for dtype in ("float64", "float32")
        ]
        for row in rows:
            if row["image_id"] == "a":
                row["value"] = changed.get(row["dtype"], row["value"])
        table = pd.DataFrame(rows).sample(frac=1, random_state=0)
        table.to_parquet(tmp_path / f"{name}.parquet")
        return table

    written(tool.STOCK[0].replace("=", "_torch"))
    written("near", float64=20.5, float32=np.nan)
    written("short").iloc[1:].to_parquet(tmp_path / "short.parquet")
    other = written("other")
    other.assign(status=["failed", *["ok"] * 7]).to_parquet(tmp_path / "other.parquet")
    lines = {line.split(" | ")[0][2:]: line for line in tool.comparison(tmp_path).splitlines()}
    near = "8 | 0 | 75.0 % | 2.5e-02 | 5.0e-01 | 0.0e+00 | inf | inf | 0.0e+00"
    assert lines["near"] == f"| near | {near} |"
    assert lines["other"].startswith("| other | 8 | 1 | 100.0 % |")
    assert lines["short"].startswith("| short | 7 | has other rows |")
