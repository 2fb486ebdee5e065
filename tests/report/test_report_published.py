"""The paper's Table 5 as it is kept here."""

import math
import re

import pytest

from mjp_privacy.report.published import TABLE5, PublishedRow

PRINTED = """
1 ViT-S             a 78.1 .0278 .0039 19.27 .5203 .3623
1 DeiT-S            a 79.8 .0350 .0057 18.94 .5182 .3767
1 DeiT-S (w/o PEs)  a 77.5 .0379 .0082 20.22 .5912 .2692
1 DeiT-S+MJP        a 80.5 .1055 .0166 11.52 .4053 .6545
2 ViT-S             b 18.7 .0327 .0016 18.44 .6065 .2836
2 DeiT-S            b 36.0 .0391 .0024 17.60 .5991 .3355
2 DeiT-S (w/o PEs)  b 77.5 .0379 .0025 20.25 .6655 .2370
2 DeiT-S+MJP        b 62.9 .1043 .0059 11.66 .4493 .6519
3 DeiT-S+MJP (w/o)  a 40.6 .1043 .0059 11.66 .4493 .6519
4 DeiT-S+MJP        c 62.9 .1706 .0338 8.07 .0875 .8945
"""
"""Table 5 as the paper's text has it: Acc., MSE, FFT2D, PSNR, SSIM, LPIPS."""


def five_scores(row: PublishedRow) -> tuple[float, ...]:
    return (row.mse, row.fft2d, row.psnr, row.ssim, row.lpips)


def test_published_rows_are_the_papers() -> None:
    printed = []
    for line in PRINTED.strip().splitlines():
        found = re.fullmatch(r"(\d) (.*\S) +([abc]) (.*)", line)
        assert found
        scores = map(float, found[4].split())
        printed.append((int(found[1]), found[2], found[3], *scores))
    assert printed == [(r.group, r.model, r.setting, r.acc, *five_scores(r)) for r in TABLE5]


def test_mean_psnr_is_above_the_psnr_of_the_mean_error_by_what_the_caveat_says() -> None:
    excess = [row.psnr + 10 * math.log10(row.mse) for row in TABLE5]
    assert max(excess) == pytest.approx(6.0, abs=0.05)
