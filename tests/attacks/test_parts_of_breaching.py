"""breaching's attackers without the rest of breaching: its own classes, and no trace left."""

import subprocess
import sys

import pytest

PARTS = """
import sys
from attacks.breaching import breaching_folder, parts_of_breaching
with parts_of_breaching():
    from breaching.attacks.analytic_attack import AprilAttacker
assert "breaching" not in sys.modules and "torchvision" not in sys.modules
assert (breaching_folder() / "config" / "attack" / "april_analytic.yaml").is_file()
import breaching
assert breaching.attacks.analytic_attack.AprilAttacker is AprilAttacker
assert callable(breaching.get_attack_config) and callable(breaching.cases.construct_case)
with parts_of_breaching():  # the whole is there already, and stays
    import breaching.attacks
assert sys.modules["breaching"] is breaching
"""


@pytest.mark.nightly
def test_whoever_imports_breaching_later_gets_the_whole_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", PARTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
