"""What the benchmarks count, and the networks they train."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import kernel_times  # noqa: E402
import models  # noqa: E402
import program_size  # noqa: E402

HLO = """HloModule step, is_scheduled=true

%fused_computation (param_0: f32[4]) -> f32[4] {
  %param_0 = f32[4]{0} parameter(0)
  ROOT %negate.1 = f32[4]{0} negate(f32[4]{0} %param_0)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

%chosen (arg: (f32[4])) -> (f32[]) {
  %arg = (f32[4]{0}) parameter(0)
  %values = f32[4]{0} get-tuple-element((f32[4]{0}) %arg), index=0
  %zero = f32[] constant(0)
  %total = f32[] reduce(f32[4]{0} %values, f32[] %zero), dimensions={0}, to_apply=%add
  ROOT %made = (f32[]) tuple(f32[] %total)
}

%kept (arg.1: ()) -> (f32[]) {
  %arg.1 = () parameter(0)
  %one = f32[] constant(1)
  ROOT %made.1 = (f32[]) tuple(f32[] %one)
}

ENTRY %main (x: f32[4], p: pred[]) -> f32[] {
  %x = f32[4]{0} parameter(0)
  %p = pred[] parameter(1)
  %fusion = f32[4]{0} fusion(f32[4]{0} %x), kind=kLoop, calls=%fused_computation
  %given = (f32[4]{0}) tuple(f32[4]{0} %fusion)
  %none = () tuple()
  %cond = (f32[]) conditional(pred[] %p, (f32[4]{0}) %given, () %none), true_computation=%chosen, false_computation=%kept
  ROOT %result = f32[] get-tuple-element((f32[]) %cond), index=0
}
"""  # noqa: E501


def test_what_is_fused_is_one_kernel():
    counts = program_size.instructions(HLO)
    # The fusion and the reduction within a branch; not what they are made of.
    assert (counts["fusion"], counts["reduce"], counts["conditional"]) == (1, 1, 1)
    assert counts["negate"] == counts["add"] == 0
    assert program_size.kernels(counts) == 2


def test_nodes_are_those_of_the_optimized_graph():
    @tf.function
    def plain(x):
        return tf.sin(x)

    @tf.function
    def folded(x):
        return tf.sin(x) + tf.reduce_sum(tf.ones([8]) * 2.0)

    @tf.function
    def longer(x):
        return tf.sin(x) * x

    x = tf.constant(np.ones(4, "float32"))
    count = program_size.nodes(plain, x)
    # What is constant is worked out beforehand: a constant and an addition are left.
    assert program_size.nodes(folded, x) == count + 2
    assert program_size.nodes(longer, x) == count + 1


def test_a_dump_without_the_module_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must have left a file.*Received: no \*\.txt"):
        program_size.largest(tmp_path, "*.txt")


@pytest.mark.parametrize("name", ["residual", "mobilenet", "transformer"])
def test_networks_of_a_given_depth(name):
    sizes = [len(models.MODELS[name](size=16, width=8, blocks=blocks).layers) for blocks in (3, 6)]
    assert sizes[1] > sizes[0]
    keras.backend.clear_session()


def test_a_kernel_is_counted_once_though_many_layers_run_it(tmp_path):
    (tmp_path / "module_0001.f.after_optimizations.txt").write_text("small")
    (tmp_path / "module_0002.f.after_optimizations.txt").write_text("the larger one")
    for name in ("0001.f.a", "0002.f.a", "0002.f.b"):
        for kind in ("with", "no"):
            (tmp_path / f"module_{name}_kernel_module.ir-{kind}-opt.ll").write_text("")
    assert program_size.compiled_kernels(tmp_path) == 2


@pytest.mark.parametrize("jit", [False, True])
def test_kernels_of_a_kind_are_added_up(jit):
    space = kernel_times.xplane_pb2.XSpace()
    plane = space.planes.add()
    line = plane.lines.add()
    names = ["dot.1", "dot.12", "end: dot.12", "a/MatMul:MatMul", "b/MatMul_1:MatMul", "Eager: a:b"]
    for i, name in enumerate(names):
        plane.event_metadata[i].name = name
        line.events.add(metadata_id=i, duration_ps=(i + 1) * 10**9)
    found = kernel_times.kinds(space, 2, jit)
    if jit:
        assert found["dot"] == [1.0, 1.5]
    else:
        assert dict(found) == {"MatMul": [1.0, 4.5]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg", "segnet", "residual", "transformer"])
def test_scales_take_no_memory(name):
    """What XLA asks for is no more than what it does with Keras' loss scaling."""
    options = {"width": 8, "size": 32}
    found = {m: program_size.measure(name, m, 16, options)["bytes"] for m in ("lso", "ours")}
    assert found["ours"] <= 1.01 * found["lso"]
