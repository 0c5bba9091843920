"""A certificate that cannot fail is worth nothing: faults are planted, and must come out."""

from pathlib import Path

import pytest
from fault_series import FAULTS, make_series

from parity import Comparison, worst


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    return make_series(Path(tmp_path_factory.mktemp("faults")))


def test_right_training_is_equal(series: dict[str, Comparison]) -> None:
    assert series["none"].verdict == "equal", series["none"].reason
    moved_share = series["none"].moved_share
    assert moved_share is not None and moved_share > 0.9
    assert worst(series["none"].grad_norms).ratio < 4


@pytest.mark.parametrize("fault", FAULTS[1:-1])
def test_fault_comes_out_not_equal(series: dict[str, Comparison], fault: str) -> None:
    assert series[fault].verdict == "not equal", series[fault].reason
    # By far: a fault near the limit would be missed on another day.
    gaps = (*series[fault].losses, *series[fault].grad_norms, *series[fault].weights)
    assert worst(gaps).ratio > 40


def test_another_seed_is_not_comparable(series: dict[str, Comparison]) -> None:
    assert series["another_seed"].verdict == "not comparable"
    assert any("seed" in field for field in series["another_seed"].mismatches)


@pytest.mark.long
def test_faults_come_out_in_bf16(tmp_path: Path) -> None:
    found = make_series(tmp_path, "bf16")
    verdicts = {name: comparison.verdict for name, comparison in found.items()}
    wrong = dict.fromkeys(FAULTS[1:-1], "not equal")
    assert verdicts == {"none": "equal", **wrong, "another_seed": "not comparable"}
