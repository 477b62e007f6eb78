"""The segmentation example's parts: data, loss, metrics, table, picture. Nothing is trained."""

import io
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import tf_gradscale as gs

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import methods  # noqa: E402
import scenes  # noqa: E402
import segmentation  # noqa: E402
import segmentation_data  # noqa: E402
import segmentation_figure  # noqa: E402
import segnet  # noqa: E402

SIZE = (16, 24)


@pytest.fixture(scope="module")
def drawn():
    images, labels = scenes.draw_scenes(6, SIZE, seed=3)
    return segmentation_data.Dataset(
        "drawn", images[:4], labels[:4], images[4:], labels[4:], scenes.CLASSES
    )


# Scenes.


def test_scenes_are_the_same_for_a_seed_whatever_their_number(drawn):
    images, labels = scenes.draw_scenes(2, SIZE, seed=3)
    np.testing.assert_array_equal(images, drawn.x_train[:2])
    np.testing.assert_array_equal(labels, drawn.y_train[:2])
    other, _ = scenes.draw_scenes(1, SIZE, seed=4)
    assert (other != images[:1]).any()
    assert images.dtype == labels.dtype == np.uint8
    assert images.shape == (2, *SIZE, 3) and labels.shape == (2, *SIZE)


def test_scenes_hold_every_class_and_are_unbalanced():
    _, labels = scenes.draw_scenes(12, (48, 64))
    shares = np.bincount(labels.ravel(), minlength=len(scenes.CLASSES) + 1) / labels.size
    assert len(shares) == len(scenes.CLASSES) + 1
    assert (shares > 0).all()
    assert shares[scenes.ROAD] > 0.2 > 0.05 > shares[scenes.POLE] + shares[scenes.PEDESTRIAN]


def test_scenes_refuse_tiny_pictures():
    with pytest.raises(ValueError, match=r"at least 16 x 16 pixels. Received: size=\(8, 64\)"):
        scenes.draw_scenes(1, (8, 64))


# The user's own data.


def png(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def camvid_folder(folder, drawn):
    for split, images, labels in (
        ("train", drawn.x_train, drawn.y_train),
        ("val", drawn.x_val, drawn.y_val),
    ):
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            png(folder / split / f"{i}.png", image)
            png(folder / f"{split}annot" / f"{i}.png", label)
    return folder


def test_camvid_folder(tmp_path, drawn):
    camvid_folder(tmp_path / "CamVid", drawn)
    for path in (tmp_path, tmp_path / "CamVid"):  # the repository or the folder in it
        data = segmentation_data.load(path, SIZE)
        assert data.name == "CamVid" and len(data.classes) == 11
        for ours, theirs in zip(data[1:5], drawn[1:5], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_camvid_lists_choose_and_order_the_images(tmp_path, drawn):
    camvid_folder(tmp_path, drawn)
    rows = [f"/SegNet/CamVid/train/{i}.png /SegNet/CamVid/trainannot/{i}.png" for i in (2, 0)]
    (tmp_path / "train.txt").write_text("\n".join(rows) + "\n")
    data = segmentation_data.load(tmp_path, SIZE)
    np.testing.assert_array_equal(data.x_train, drawn.x_train[[2, 0]])
    np.testing.assert_array_equal(data.y_train, drawn.y_train[[2, 0]])
    assert len(data.x_val) == 2


def test_npz_of_arrays(tmp_path, drawn):
    labels = np.where(drawn.y_train == scenes.UNLABELLED, 255, drawn.y_train)
    arrays = dict(x_train=drawn.x_train, y_train=labels, x_val=drawn.x_val, y_val=drawn.y_val)
    np.savez(tmp_path / "a.npz", **arrays, class_names=[*scenes.CLASSES, "unlabelled"])
    data = segmentation_data.load(tmp_path / "a.npz", SIZE)
    assert data.classes == scenes.CLASSES
    np.testing.assert_array_equal(data.y_train, drawn.y_train)
    np.testing.assert_array_equal(data.x_val, drawn.x_val)

    arrays["y_val"] = np.minimum(arrays["y_val"], 2)
    arrays["y_train"] = np.where(labels == 255, 255, np.minimum(labels, 2))
    np.savez(tmp_path / "b.npz", **arrays)
    data = segmentation_data.load(tmp_path / "b.npz", SIZE)
    assert data.classes == ("class 0", "class 1", "class 2")
    assert data.y_train.max() == (3 if (labels == 255).any() else 2)


def test_npz_of_jpegs_is_resized(tmp_path, drawn):
    buffers = []
    for image in (*drawn.x_train, *drawn.x_val):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=95)
        buffers.append(np.frombuffer(buffer.getvalue(), np.uint8))
    np.savez(
        tmp_path / "c.npz",
        jpeg_bytes=np.concatenate(buffers),
        jpeg_offsets=np.cumsum([0, *map(len, buffers)]),
        split=np.array([0, 0, 0, 1, 1, 2], np.uint8),
        labels=np.concatenate([drawn.y_train, drawn.y_val]),
    )
    data = segmentation_data.load(tmp_path / "c.npz", (32, 48))
    assert data.x_train.shape == (3, 32, 48, 3) and data.x_val.shape == (2, 32, 48, 3)
    assert len(data.classes) == 11
    # Labels are classes, not colours: each is repeated, none is mixed.
    np.testing.assert_array_equal(data.y_train[:, ::2, ::2], drawn.y_train[:3])


def test_errors_say_what_was_expected(tmp_path, drawn):
    def problem(path):
        with pytest.raises(ValueError, match="(?s)Expected one of.*Leave out --data") as caught:
            segmentation_data.load(path, SIZE)
        assert f"Received: {path}" in str(caught.value) or path.is_dir()
        return str(caught.value)

    assert "no such file or folder" in problem(tmp_path / "missing")
    (tmp_path / "text.npz").write_text("not an archive")
    assert "not an .npz archive" in problem(tmp_path / "text.npz")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    assert "not an .npz archive" in problem(tmp_path / "cut.npz")
    (tmp_path / "empty.npz").touch()
    assert "not an .npz archive" in problem(tmp_path / "empty.npz")
    np.save(tmp_path / "plain.npy", np.zeros(3))
    assert "not an .npz archive" in problem(tmp_path / "plain.npy")
    np.savez(tmp_path / "other.npz", pictures=np.zeros(3))
    assert "it holds ['pictures']" in problem(tmp_path / "other.npz")
    arrays = dict(y_train=drawn.y_train, x_val=drawn.x_val, y_val=drawn.y_val)
    np.savez(tmp_path / "floats.npz", x_train=drawn.x_train / 255.0, **arrays)
    assert "x_train float64 (4, 16, 24, 3)" in problem(tmp_path / "floats.npz")
    np.savez(tmp_path / "few.npz", x_train=drawn.x_train, **arrays, class_names=["sky", "rest"])
    assert "none of the 2 class names" in problem(tmp_path / "few.npz")

    folder = tmp_path / "folder"
    folder.mkdir()
    assert "no train images" in problem(folder)
    camvid_folder(folder, drawn)
    (folder / "valannot" / "1.png").unlink()
    assert "valannot/1.png is missing" in problem(folder)
    png(folder / "valannot" / "1.png", drawn.x_val[1])
    assert "colours" in problem(folder)
    (folder / "val.txt").write_text("val/0.png\n")
    assert "not an image and a label map" in problem(folder)


def test_class_weights_are_median_frequency():
    labels = np.repeat(np.uint8([0, 1, 3, 4]), [8, 4, 2, 6])[None]  # 4 is unlabelled, 2 is absent
    data = segmentation_data.Dataset("", None, labels, None, None, tuple("abcd"))
    np.testing.assert_allclose(data.class_weights(), [0.5, 1, 0, 2])


# Loss and metrics.


def test_loss_and_its_gradient_are_numpys(drawn):
    rng = np.random.default_rng(0)
    labels = drawn.y_train.copy()
    labels[:, :5] = scenes.UNLABELLED
    weights = rng.uniform(0.5, 2, len(scenes.CLASSES)).astype(np.float32)
    loss = segnet.PixelCrossEntropy(weights, multiplier=2**-6)
    logits = tf.constant(rng.normal(0, 3, (*labels.shape, len(weights))), tf.float32)
    softmax = keras.layers.Activation("softmax")
    with tf.GradientTape() as tape:
        tape.watch(logits)
        probabilities = softmax(logits)
        value = loss(labels, probabilities)
    valid = labels < len(weights)
    chosen = np.take_along_axis(probabilities.numpy()[valid], labels[valid][:, None], axis=1)[:, 0]
    expected = -np.sum(weights[labels[valid]] * np.log(chosen)) / valid.sum() / 64
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(
        tape.gradient(value, logits),
        segmentation.softmax_gradient(probabilities.numpy(), labels, loss),
        rtol=1e-4,
        atol=1e-9,
    )


def test_loss_of_a_batch_without_labels_is_zero():
    loss = segnet.PixelCrossEntropy(np.ones(3))
    labels = np.full((1, 4, 4), 3, np.uint8)
    assert float(loss(labels, np.full((1, 4, 4, 3), 1 / 3, np.float32))) == 0


def test_miou_leaves_unlabelled_pixels_out(drawn):
    args = segmentation.parse_arguments(["--size", "16", "24"])
    args.class_weights = np.ones(len(drawn.classes))
    loss = segnet.PixelCrossEntropy(args.class_weights)
    model = segmentation.prepare(segmentation.METHODS["float32"], args, drawn, loss, 0.1)
    model.jit_compile = False
    values = model.evaluate(drawn.x_val, drawn.y_val, verbose=0, return_dict=True)
    maps = np.argmax(model.predict(drawn.x_val, verbose=0), axis=-1)
    valid = drawn.y_val < len(drawn.classes)
    ious = []
    for i in range(len(drawn.classes)):
        truth, found = drawn.y_val[valid] == i, maps[valid] == i
        if (truth | found).any():
            ious.append((truth & found).sum() / (truth | found).sum())
    np.testing.assert_allclose(values["miou"], np.mean(ious), rtol=1e-5)
    np.testing.assert_allclose(values["loss"], values["cross_entropy"], rtol=1e-5)


def test_share_lost_is_what_float16_rounds_to_nothing():
    smallest = 2.0**-24
    gradient = np.array([0, 0, smallest, -smallest, smallest / 2, 0.2 * smallest, 1.0, -(2.0**-9)])
    assert segmentation.share_lost(gradient, 1) == pytest.approx(2 / 6)
    assert segmentation.share_lost(gradient, 2) == pytest.approx(1 / 6)
    assert segmentation.share_lost(gradient, 4) == 0
    assert segmentation.share_lost(gradient, 2.0**17) == pytest.approx(1 / 6)  # one is infinite
    assert segmentation.share_lost(np.zeros(3), 1) == 0


def test_default_setting_loses_gradients_without_scaling():
    """At the size and multiplier of the program float16 loses most of a good network's gradient."""
    rng = np.random.default_rng(0)
    shape = (8, 96, 128)
    args = segmentation.parse_arguments([])
    assert (args.batch, *args.size) == shape
    labels = rng.integers(0, 8, shape)
    logits = rng.normal(0, 1, (*shape, 8)) + 4 * np.eye(8)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    loss = segnet.PixelCrossEntropy(np.ones(8), args.loss_multiplier)
    gradient = segmentation.softmax_gradient(probabilities, labels, loss)
    assert segmentation.share_lost(gradient, 1) > 0.75
    assert segmentation.share_lost(gradient, 2.0**24) < 1e-3


# Methods.


@pytest.fixture
def models(drawn):
    args = segmentation.parse_arguments(["--size", "16", "24"])
    loss = segnet.PixelCrossEntropy(np.ones(len(drawn.classes)), args.loss_multiplier)
    return {
        name: segmentation.prepare(method, args, drawn, loss, 0.1)
        for name, method in segmentation.METHODS.items()
    }


def test_methods_start_from_equal_weights_and_differ_in_optimizer_only(models):
    reference = models["float32"]
    for model in models.values():
        assert [w.name for w in model.weights] == [w.name for w in reference.weights]
        for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    kinds = {method: type(model.optimizer) for method, model in models.items()}
    assert kinds == {
        "float32": keras.optimizers.SGD,
        "float16": keras.optimizers.SGD,
        "loss-scaling": keras.optimizers.LossScaleOptimizer,
        "gradient-scaling": gs.GradScaleOptimizer,
    }
    for method, model in models.items():
        assert model.get_layer("encoder1").compute_dtype == (
            "float32" if method == "float32" else "float16"
        )


@pytest.mark.parametrize("method", ["float32", "loss-scaling", "gradient-scaling"])
def test_lost_steps_are_those_that_change_nothing(models, method):
    optimizer = models[method].optimizer
    variables = models[method].trainable_variables
    optimizer.build(variables)
    for value in (0.0, np.inf, 0.0, np.nan) if method != "float32" else (0.0,) * 4:
        optimizer.apply([tf.fill(v.shape, np.float32(value)) for v in variables], variables)
    lost = methods.lost_steps(models[method], 4)
    assert lost == (0 if method == "float32" else 2)


def test_scale_at_cast_is_the_methods_own(models):
    for method in ("loss-scaling", "gradient-scaling"):
        models[method].optimizer.build(models[method].trainable_variables)
    models["gradient-scaling"].scales.freeze(lambda site: 8.0 if site.kind == "cast" else 1.0)
    images = np.zeros((1, *SIZE, 3), np.uint8)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(models["gradient-scaling"](images, training=True)[..., 0])
    tape.gradient(loss, models["gradient-scaling"].trainable_variables)
    scales = {
        name: segmentation.scale_at_cast(model, segmentation.METHODS[name])
        for name, model in models.items()
    }
    assert scales == {
        "float32": 1,
        "float16": 1,
        "loss-scaling": 2.0**15,
        "gradient-scaling": 8,  # the first cast on the way back, not the product of several
    }


# Output.


@pytest.fixture
def runs(drawn):
    history = {
        "cross_entropy": [1.5, 0.25],
        "val_cross_entropy": [2.0, 0.5],
        "val_miou": [0.1, 0.6],
    }

    def found(lost, first, seconds, scales, at_cast):
        times = {"seconds_first_step": first, "seconds": seconds}
        lost = {"steps_lost": lost, "lost_at_cast": at_cast}
        return {"history": history, "scales": scales, **lost, **times}

    sites = [("logits/cast", "cast", 2.0**20, 2.0**20), ("logits/kernel", "variable", 0.5, 2.0**19)]
    return [
        segmentation.Run("float32", found(0, 2.0, 10.4, [], 0.0), drawn.y_val),
        segmentation.Run("gradient-scaling", found(3, 10.0, 90.0, sites, 0.125), drawn.y_val),
    ]


def test_table(runs):
    assert segmentation.format_table(runs).splitlines() == [
        "method            train loss  val mIoU  steps lost  lost at cast  seconds",
        "-------------------------------------------------------------------------",
        "float32                0.250     0.600           0          0.0%       12",
        "gradient-scaling       0.250     0.600           3         12.5%      100",
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_picture(tmp_path, runs, drawn, count):
    path = tmp_path / "picture.png"
    segmentation_figure.draw(path, drawn, runs[:count])
    picture = np.asarray(Image.open(path).convert("RGB"))
    assert min(picture.shape[:2]) > 500
    assert (picture == segmentation_figure.CLASS_COLOURS["road"]).all(-1).sum() > 1000


def test_palette_tells_classes_apart():
    names = segmentation_data.CAMVID_CLASSES
    assert len(np.unique(segmentation_figure.class_colours(names), axis=0)) == len(names) + 1
    assert segmentation_figure.class_colours(["class 0", "class 1"]).shape == (3, 3)


# The command line.


def test_multiplier_is_one_for_real_images():
    assert segmentation.parse_arguments(["--data", "x"]).loss_multiplier == 1
    assert segmentation.parse_arguments([]).loss_multiplier == 1 / 64


@pytest.mark.parametrize(
    "options, message",
    [
        (["--size", "100", "128"], "--size must be multiples of 8 from 16 on"),
        (["--batch", "0"], "--batch must be positive. Received: 0"),
        (["--loss-multiplier", "-1"], "--loss-multiplier must be positive. Received: -1.0"),
        (
            ["--precision", "bfloat16", "--scaling", "dynamic"],
            "leave it at none. Received: dynamic",
        ),
        (["--methods", "bfloat16"], "invalid choice: 'bfloat16'"),
        (["--methods", "float32", "--scaling", "none"], "one of them. Received: --methods float32"),
    ],
)
def test_bad_options(capsys, options, message):
    with pytest.raises(SystemExit):
        segmentation.parse_arguments(options)
    assert message in capsys.readouterr().err


def test_bad_data_ends_the_program_with_advice(tmp_path):
    with pytest.raises(SystemExit, match="(?s)no such file or folder.*Expected one of"):
        segmentation.main(["--data", str(tmp_path / "nowhere")])
