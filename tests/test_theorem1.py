"""Theorem 1 against real networks: the benchmark's figures, on small ones."""

import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import theorem1

    yield theorem1
    for name in ("theorem1", "models"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["residual", "vgg"])
def test_theorem_1_predicts_the_realised_rate(benchmark, name):
    options = {"blocks": 3} if name == "residual" else {}
    found = benchmark.rates(lambda: benchmark.MODELS[name](size=16, width=8, **options), batch=32)
    rows = [row for row in found["paper"] if row["below"] * row["entries"] >= 10]
    assert len(rows) >= 5
    for row in rows:
        # The smallest power of two that will do: between half of γ' and γ'.
        assert 0.49e-3 < row["below predicted"] <= 1.02e-3
        assert 0.3 < row["below predicted"] / row["below"] < 3
        assert 0.3 < row["lost predicted"] / row["lost"] < 3
    # Balanced placement leaves so much room below that next to nothing is lost.
    for row in found["balanced"]:
        assert row["below predicted"] < 1e-5
        assert row["below"] * row["entries"] <= 3


def test_the_page_has_a_row_for_every_product(benchmark):
    row = {"layer": "dense", "n": 8, "entries": 1000, "alpha": 2.0**-3}
    rates = {"below predicted": 1e-3, "below": 2e-2, "lost predicted": 5e-4, "lost": 1e-3}
    assert benchmark.table([{**row, **rates}])[2:] == [
        "| dense | 8 | 1000 | -3 | 1.0e-03 | 2.0e-02 | 0.05 | 5.0e-04 | 1.0e-03 |"
    ]
    assert benchmark.table([{**row, **rates, "below": 2e-3}])[2].split(" | ")[6] == "–"
