"""The comparison's bookkeeping: which runs there are, what is compared, what is written."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import compare  # noqa: E402
import loss_magnitude  # noqa: E402
import mechanisms  # noqa: E402
import methods  # noqa: E402
import result_page  # noqa: E402
import results  # noqa: E402


def record(folder, task, precision, scaling, seed, final, **others):
    """A result as an example writes it."""
    path = compare.Run(task, 1.0, precision, scaling, seed).path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    metric = "val_perplexity" if task == "language" else "val_miou"
    found = {
        "method": [precision, scaling],
        "data": "made up",
        "options": {"seed": seed, "steps": 11},
        "metric": metric,
        "final": final,
        "history": {metric: [0.25, final], "loss": [0.5, 0.25]},
        "steps_lost": seed,
        "lost_entries": {"logits": 0.01, "hidden": 0.002} if precision == "float16" else {},
        "seconds": 5.0,
        "core_seconds": 5.0 if precision == "float32" else 6.0,
        "machine": "one",
        "peak_mib": 900.0,
        "log2_scales_by_epoch": [[0.0, 1.0], [3.0, 4.0]],
        "scales": [],
        "lost_at_cast": 0.0,
        **others,
    }
    path.write_text(json.dumps(found))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "results"
    for k, scaling in enumerate(compare.FIXED):
        for task in ("language", "segmentation"):
            record(folder, task, "float16", scaling, 0, 0.5 - 0.01 * abs(k - 2))
    for seed in (0, 1, 2):
        record(folder, "segmentation", "float32", "none", seed, 0.5 + 0.01 * seed)
        record(folder, "segmentation", "float16", "balanced", seed, 0.5 + 0.02 * seed)
        record(folder, "segmentation", "float16", "paper", seed, 0.4)
    return folder


def test_the_best_fixed_scale(folder):
    def best(task, higher):
        return results.best_fixed(results.read(folder / task / "1"), higher)

    assert best("segmentation", higher=True) == "fixed:2^11"
    # Both ends of the sweep are as far away; the first is taken.
    assert best("language", higher=False) == "fixed:2^0"
    assert best("nothing", higher=True) is None
    record(folder, "segmentation", "float16", "fixed:2^15", 0, float("nan"))
    assert best("segmentation", higher=True) == "fixed:2^11"


def test_differences_are_paired_by_seed(folder):
    found = results.read(folder / "segmentation" / "1")
    mean, spread, count = results.difference(found["balanced"], found["float32"])
    # 0, 0.01 and 0.02.
    np.testing.assert_allclose([mean, spread, count], [0.01, 0.01, 3])
    one = results.difference(found["fixed:2^0"], found["float32"])
    np.testing.assert_allclose(one, [-0.02, np.nan, 1])
    assert results.difference(found["balanced"], {})[2] == 0


def test_times_are_compared_on_one_machine():
    float32 = [{"machine": name, "core_seconds": x} for name, x in (("a", 1), ("a", 3), ("b", 8))]
    ours = [{"machine": name, "core_seconds": x} for name, x in (("a", 3), ("b", 8), ("c", 99))]
    # 3 / 2 and 8 / 8; nothing is known of the third.
    assert results.core_time(ours, float32) == 1.25
    assert np.isnan(results.core_time(ours[2:], float32))


def test_what_is_not_known_is_left_out(folder):
    loss = {"val_miou": [0.1, 0.1], "loss": [0.5, float("nan")]}
    record(folder, "segmentation", "float16", "fixed:2^19", 0, 0.0, history=loss)
    record(folder, "segmentation", "float16", "dynamic", 1, 0.5, lost_entries={})
    record(folder, "segmentation", "float16", "balanced", 1, 0.52, lost_entries={})
    found = results.read(folder / "segmentation" / "1")
    rows = results.table(found, True, []).splitlines()
    assert "| balanced (ours) | 3 | 50.0 | +1.0 ± 1.0 | 1 | 1 % |  | 900 |" in rows
    assert "| fixed scale 2^19 | 1 | 0.0 | -50.0 | 0 | diverged |  | 900 |" in rows
    assert "| dynamic | 1 |  | -1.0 | 1 |  |  | 900 |" in rows


def test_ours_against_the_others(folder):
    for seed, final in ((0, 1.5), (1, 1.25)):
        record(folder, "language", "float16", "balanced", seed, final)
        record(folder, "language", "float16", "dynamic", seed, 1.0)
    folders = {
        (task, 1.0): results.read(folder / task / "1") for task in ("segmentation", "language")
    }
    higher = {"segmentation": True, "language": False}
    assert results.summary(folders, higher).splitlines()[2:] == [
        # Steps lost are the seeds, in `record`: 0 + 1 + 2.
        "| segmentation, × 1 | +1.0 ± 1.0 (3) |  | +0.0 (1, fixed scale 2^11) | 3 |",
        # A higher perplexity is worse: 0.5 and 0.25; and 1.5 against 0.48.
        "| language, × 1 |  | -0.375 ± 0.177 (2) | -1.020 (1, no scaling (fixed scale 1)) | 1 |",
    ]


def test_runs_come_in_the_order_of_importance(folder):
    runs = list(compare.runs(["segmentation"], folder))
    assert len(runs) == len(set(runs))
    assert len({run.path(folder) for run in runs}) == len(runs)
    first, last = runs[: len(compare.MAIN + compare.SWEEP)], runs[-2 * len(compare.REST) :]
    assert {run.seed for run in first} == {0} and {run.multiplier for run in first} == {1.0}
    assert [run.scaling for run in last[: len(compare.REST)]] == [way for _, way in compare.REST]
    # The best of the sweep has three seeds, the others one.
    seeds = [run.seed for run in runs if run.scaling == "fixed:2^11" and run.multiplier == 1]
    assert seeds == [0, 1, 2]
    assert [run.seed for run in runs if run.scaling == "fixed:2^7" and run.multiplier == 1] == [0]


def test_the_best_fixed_scale_waits_for_the_sweep(folder):
    compare.Run("segmentation", 1.0, "float16", "fixed:2^19", 0).path(folder).unlink()
    fixed = {run for run in compare.runs(["segmentation"], folder) if run.scaling in compare.FIXED}
    assert {run.seed for run in fixed} == {0}


def test_a_variant_has_one_seed_and_one_multiplier(folder):
    runs = list(compare.runs(["recognition-18-plain"], folder))
    assert {(run.multiplier, run.seed) for run in runs} == {(1.0, 0)}
    assert len(runs) == len(compare.VARIANT)


PROGRAM = """
import json, sys
path, seed, scaling = (sys.argv[sys.argv.index(n) + 1] for n in ("--json", "--seed", "--scaling"))
if scaling == "paper:16,1024":
    sys.exit("It breaks.")
options = {"seed": int(seed), "data": "/secret", "backbone": "/secret", "steps": 2}
found = {"metric": "val_miou", "final": 0.5, "core_seconds": 1.0, "options": options}
open(path, "w").write(json.dumps({**found, "method": ["float16", scaling]}))
"""


def test_jobs_make_every_run_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples" / "segmentation.py").write_text(PROGRAM)
    folder = tmp_path / "results"
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    monkeypatch.setattr(result_page, "write", lambda *args: None)
    monkeypatch.setattr(mechanisms, "lines", lambda *args: [])
    given = ["--tasks", "segmentation", "--folder", str(folder), "--jobs", "3"]
    with pytest.raises(RuntimeError, match=r"(?s)must end with a result.*It breaks.*Received"):
        compare.main(given)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(set(said))
    done = {run for run in compare.runs(["segmentation"], folder) if run.path(folder).exists()}
    # 15 main ones and 4 of the sweep, at each of two multipliers, before the first that breaks.
    assert len(done) >= 2 * 19
    text = compare.Run("segmentation", 1.0, "float16", "paper", 2).path(folder).read_text()
    assert "secret" not in text and json.loads(text)["options"]["data"] is True


def test_every_method_of_the_comparison_is_one_of_the_examples():
    for precision, scaling in compare.MAIN + compare.SWEEP + compare.REST:
        assert methods.parse(precision, scaling) == (precision, scaling)
        way = scaling if precision == "float16" else precision
        assert results.order(way)


def test_commands(tmp_path):
    args = compare.parse_arguments(["--voc", str(tmp_path), "--squeezenet", "w.npz"])
    run = compare.Run("detection-96-b8", 1e-4, "float16", "paper:16,1024", 2)
    given = compare.command(run, args)
    assert given[1].endswith("detection.py") and str(tmp_path) in given
    assert given[given.index("--loss-multiplier") + 1] == "0.0001"
    assert Path(given[given.index("--backbone") + 1]).is_absolute()
    assert "--data" not in compare.command(run._replace(task="language"), args)


def test_the_page(folder, tmp_path):
    page = tmp_path / "results.md"
    page.write_text(f"# Title\n\n{result_page.NOTHING_YET}\n")
    wanted = [
        compare.Run("segmentation", 1.0, "float16", "balanced", 2),
        compare.Run("segmentation", 1.0, "bfloat16", "none", 0),
    ]
    for _ in range(2):
        result_page.write(folder, page, compare.TASKS, wanted, mechanisms.lines(folder))
    assert f"]({folder.name}/curves.png)" in page.read_text()
    text = page.read_text()
    assert text.startswith("# Title\n\n" + result_page.MARK) and text.count(result_page.MARK) == 1
    assert "| balanced (ours) | 3 | 50.0 | +1.0 ± 1.0 | 1 | 1 % | 1.20 | 900 |" in text
    assert "| no scaling (fixed scale 1) | 1 | 0.480 |  | 0 | 1 % |  | 900 |" in text
    assert "- segmentation, loss × 1: bfloat16 (0)" in text
    for name in ("fixed_scales", "curves", "scales"):
        with Image.open(folder / f"{name}.png") as picture:
            assert min(picture.size) > 300


class Overflowing:
    """Stands in for a network whose true gradient is 3, and infinite once it is above a bound."""

    def __init__(self, largest):
        self.largest = largest

    def gradients(self, batch, factor):
        return [np.array([3.0 * factor if factor <= self.largest else np.inf])]


@pytest.mark.parametrize("largest", [1e-6, 1.0, 1e9])
def test_dynamic_scaling_takes_the_first_step_that_is_finite(largest):
    found = loss_magnitude.dynamic(Overflowing(largest), None, 1.0, [np.array([3.0])])
    np.testing.assert_array_equal(found, [0.0])
    gone = loss_magnitude.dynamic(Overflowing(0.0), None, 1.0, [np.array([3.0])])
    assert not np.all(np.isfinite(gone))


def test_the_picture_of_loss_magnitudes(tmp_path):
    errors = np.geomspace(1e-4, 1, len(loss_magnitude.MULTIPLIERS))
    found = {name: dict.fromkeys(loss_magnitude.STYLES, errors) for name in ("one", "two")}
    loss_magnitude.draw(tmp_path / "errors.png", found)
    with Image.open(tmp_path / "errors.png") as picture:
        assert picture.width > 2 * picture.height


def test_the_page_is_written_beside_its_results(tmp_path):
    before = (compare.ROOT / "docs" / "results.md").read_bytes()
    folder = tmp_path / "of.mine"
    with pytest.raises(SystemExit, match="compare.py: Results must be there.*Received: .*of.mine"):
        compare.main(["--report", "--folder", str(folder)])
    record(folder, "segmentation", "float16", "balanced", 0, 0.5)
    compare.main(["--report", "--folder", str(folder)])
    assert "](of.mine/curves.png)" in (tmp_path / "of.mine.md").read_text()
    assert (compare.ROOT / "docs" / "results.md").read_bytes() == before


def test_nothing_to_report(tmp_path):
    with pytest.raises(ValueError, match="must be there before they are reported. Received: "):
        result_page.write(tmp_path, tmp_path / "page.md", compare.TASKS, [], [])


def test_causes(tmp_path):
    """Each finding of the paper, from results made up to show it."""
    folder = tmp_path / "results"
    assert mechanisms.lines(folder).count("Its runs have not been made yet.") == 6
    for seed, lost in ((0, 0.7), (1, 0.5)):
        record(folder, "segmentation", "float16", "fixed:2^0", seed, 0.3, lost_at_cast=lost)
    assert mechanisms.at_the_cast(folder)[2:] == ["| × 1 | no scaling (fixed scale 1) | 60 % |"]

    sites = [
        ("encoder1_norm/cast", "cast", 0.25, 8.0),
        ("encoder2_norm/cast", "cast", 1.0, 2.0**17),
        ("encoder4_norm/cast", "cast", 16.0, 1.0),
    ]
    record(folder, "segmentation", "float16", "paper", 0, 0.4, scales=sites)
    assert mechanisms.below_one(folder)[2:] == [
        "| paper's choice | behind an encoder's branch | -1.0 | -2 to 0 | 50 % |",
        "| paper's choice | all others | 4.0 | 4 to 4 | 0 % |",
    ]
    record(folder, "segmentation", "float32", "none", 0, 0.5)
    assert mechanisms.by_cap(folder)[2:] == [
        "| float32 | 50.0 |  |",
        "| paper's choice | 40.0 | 17 |",
    ]

    sites = [("boxes0/input", "gemm", 64.0, 64.0), ("fire2/input", "gemm", 2.0, 64.0)]
    record(folder, "detection-96-b8", "float16", "balanced", 0, 0.1, scales=sites)
    assert [row.split(" | ")[2] for row in mechanisms.at_the_heads(folder)[2:]] == ["6.0", "1.0"]

    for task, lost in (("recognition-18", 0.1), ("recognition-18-plain", 0.3)):
        shares = {"logits": 0.0, "hidden": lost}
        record(folder, task, "float16", "fixed:2^0", 0, 0.1, lost_entries=shares)
    assert [row.split(" | ")[2:] for row in mechanisms.by_connections(folder)[2:]] == [
        ["5 %", "10 % |"],
        ["15 %", "30 % |"],
    ]

    record(folder, "detection-160-b32", "float16", "dynamic", 0, 0.1, steps_lost=3)
    assert mechanisms.by_batch(folder)[2:] == ["| 160 × 160 | dynamic | 32 | 3 of 11 | 27.3 % |"]
    assert "Its runs have not been made yet." not in mechanisms.lines(folder)
