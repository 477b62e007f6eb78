"""The detection example's parts: metric, anchors, losses, network, data. Nothing is trained."""

import io
import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import average_precision  # noqa: E402
import detection  # noqa: E402
import detection_data  # noqa: E402
import multibox  # noqa: E402
import ssd  # noqa: E402

# Metric.


def test_iou_by_hand():
    first = [[0, 0, 2, 2], [0, 0, 1, 1], [0, 0, 0, 0]]
    second = [[1, 1, 3, 3], [0, 0, 2, 2], [1, 0, 2, 1], [0, 0, 0, 0]]
    # Areas 4, 1, 0 and 4, 4, 1, 0.
    expected = [[1 / 7, 1, 1 / 4, 0], [0, 1 / 4, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(average_precision.iou(first, second), expected, rtol=1e-12)
    assert average_precision.iou(np.zeros((0, 4)), second).shape == (0, 4)


HERE, THERE = [0, 0, 1, 1], [2, 2, 3, 3]
AWAY = [5, 5, 6, 6]


def image(*found, label=0):
    """Detections of one image from pairs of box and score."""
    boxes, scores = zip(*found, strict=True) if found else ((), ())
    return np.reshape(boxes, (-1, 4)), np.full(len(boxes), label), np.array(scores, float)


def truth(*boxes, label=0):
    return np.reshape(boxes, (-1, 4)), np.full(len(boxes), label)


@pytest.mark.parametrize(
    "detections, shown, expected",
    [
        # Right, wrong, right: precision 1 up to recall 1/2, then 2/3.
        ([image((HERE, 0.9), (AWAY, 0.8), (THERE, 0.7))], [truth(HERE, THERE)], 5 / 6),
        # Wrong, right, right: 1/2 at recall 1/2, but 2/3 at a higher one.
        ([image((AWAY, 0.9), (HERE, 0.8), (THERE, 0.7))], [truth(HERE, THERE)], 2 / 3),
        # Scores, not images, order the detections: right, wrong, right.
        (
            [image((AWAY, 0.8), (HERE, 0.7)), image((HERE, 0.9))],
            [truth(HERE), truth(HERE)],
            5 / 6,
        ),
        # A second detection of one object is wrong: right, wrong, right.
        ([image((HERE, 0.9), (HERE, 0.8), (THERE, 0.7))], [truth(HERE, THERE)], 5 / 6),
        # The surest one finds the object, wherever it stands in the list.
        ([image((HERE, 0.2), (HERE, 0.9), (THERE, 0.1))], [truth(HERE, THERE)], 5 / 6),
        # It overlaps two boxes by 3/4 and 1/2 and is held against the first, which is taken.
        (
            [image(([0, 0, 4, 1], 0.9), ([0, 0, 3, 1], 0.8))],
            [truth([0, 0, 4, 1], [1.5, 0, 3, 1])],
            1 / 2,
        ),
        ([image(([0, 0, 1, 0.5], 0.9))], [truth(HERE)], 1),  # an IoU of just 0.5
        ([image(([0, 0, 1, 0.49], 0.9))], [truth(HERE)], 0),
        ([image((HERE, 0.9))], [truth(HERE, THERE)], 1 / 2),  # one is missed
        ([image((HERE, 0.9)), image()], [truth(HERE), truth(THERE)], 1 / 2),
        ([image((HERE, 0.9), label=1)], [truth(HERE)], 0),  # of another class
        ([image()], [truth(HERE)], 0),
        ([image((HERE, 0.9))], [truth()], np.nan),  # no image shows the class
    ],
)
def test_average_precision_by_hand(detections, shown, expected):
    found = average_precision.average_precision(detections, shown, label=0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_mean_is_over_the_classes_that_are_shown():
    boxes = np.array([HERE, THERE, AWAY])
    detections = [(boxes, np.array([0, 1, 2]), np.array([0.9, 0.8, 0.7]))]
    shown = [(boxes[[0, 2]], np.array([0, 1]))]  # right; wrong place; not shown
    assert average_precision.mean_average_precision(detections, shown, classes=3) == 0.5


# Anchors and boxes.


@pytest.mark.parametrize("size, sides", [(64, [8, 4, 2]), (96, [12, 6, 3, 2])])
def test_anchors(size, sides):
    anchors = multibox.make_anchors(size)
    assert len(anchors) == 4 * sum(side**2 for side in sides)
    scales = np.linspace(0.2, 1, len(sides) + 1)
    start = 0
    for side, scale, following in zip(sides, scales, scales[1:], strict=False):
        rows = anchors[start : start + 4 * side**2].reshape(side, side, 4, 4)
        # One row down and two to the right of the first.
        np.testing.assert_allclose(rows[0, 0, :, :2], 0.5 / side, rtol=1e-6)
        np.testing.assert_allclose(rows[-1, 0, :, 0], 0.5 / side, rtol=1e-6)
        np.testing.assert_allclose(rows[-1, 0, :, 1], 1 - 0.5 / side, rtol=1e-6)
        area, aspect = rows[..., 2] * rows[..., 3], rows[..., 2] / rows[..., 3]
        np.testing.assert_allclose(area[0, 1], scale * np.array([scale] * 3 + [following]), 1e-6)
        np.testing.assert_allclose(aspect[1, 0], [1, 2, 0.5, 1], 1e-6)
        start += 4 * side**2
    assert start == len(anchors)


def test_larger_images_have_a_map_more():
    assert len(multibox.make_anchors(160)) == 4 * (400 + 100 + 25 + 9 + 4)


def test_match_by_hand():
    overlap = np.array(
        [
            [0.9, 0.0, 0.0],
            [0.8, 0.6, 0.1],  # the best anchor of the second box, too: it goes to the first pair
            [0.5, 0.4, 0.2],  # 0.5 is enough
            [0.1, 0.3, 0.0],
            [0.0, 0.0, 0.0],
        ]
    )
    # (0, 0) with 0.9, (1, 1) with 0.6 although 0.8 is larger, and the third box takes what is left.
    np.testing.assert_array_equal(multibox.match(overlap), [0, 1, 2, -1, -1])
    np.testing.assert_array_equal(multibox.match(np.zeros((2, 0))), [-1, -1])
    # All boxes want the first anchor.
    greedy = np.array([[0.9, 0.8], [0.3, 0.2], [0.1, 0.4]])
    np.testing.assert_array_equal(multibox.match(greedy), [0, -1, 1])


def test_encode_by_hand():
    anchors = np.float32([[0.5, 0.5, 0.2, 0.4], [0.1, 0.1, 0.1, 0.1]])
    boxes = np.float32([[0.42, 0.3, 0.62, 0.8]])  # centre 0.52, 0.55, size 0.2 x 0.5
    targets, classes = multibox.encode(boxes, np.array([3]), anchors)
    by_hand = [0.02 / 0.2 / 0.1, 0.05 / 0.4 / 0.1, 0, np.log(0.5 / 0.4) / 0.2, 1]
    np.testing.assert_allclose(targets, [by_hand, np.zeros(5)], atol=2e-6)
    np.testing.assert_array_equal(classes, [4, 0])


def test_decode_inverts_encode():
    rng = np.random.default_rng(0)
    anchors = multibox.make_anchors(64)
    corner = rng.uniform(0, 0.5, (5, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(0.1, 0.5, (5, 2))], 1).astype(np.float32)
    labels = np.arange(5)
    targets, classes = multibox.encode(boxes, labels, anchors)
    decoded = multibox.decode(targets[None, :, :4], anchors)[0]
    taken = targets[:, 4] == 1
    np.testing.assert_array_equal(taken, classes > 0)
    assert set(classes[taken]) == {1, 2, 3, 4, 5}  # no box is left out
    np.testing.assert_allclose(decoded[taken], boxes[classes[taken] - 1], atol=1e-6)
    # Elsewhere the differences are 0, and the anchor itself comes back.
    np.testing.assert_allclose(decoded[~taken], multibox.corners(anchors)[~taken], atol=1e-6)


def test_no_objects_no_targets():
    anchors = multibox.make_anchors(64)
    targets, classes = multibox.encode(np.zeros((0, 4), np.float32), np.zeros(0, int), anchors)
    assert not targets.any() and not classes.any()


def test_detections_by_hand():
    # Two anchors in one place, one elsewhere, and one that is nothing.
    anchors = np.float32(
        [[0.3, 0.3, 0.2, 0.2], [0.31, 0.3, 0.2, 0.2], [0.7, 0.7, 0.2, 0.4], [0.5, 0.5, 0.1, 0.1]]
    )
    scores = np.float32([[0.2, 0.7, 0.1], [0.1, 0.8, 0.1], [0.4, 0.0, 0.6], [1, 0, 0]])
    logits = np.log(scores + np.float32(1e-6))
    outputs = {"boxes": np.zeros((1, 4, 4), np.float32), "classes": logits[None]}
    [(boxes, labels, sure)] = multibox.detect(outputs, anchors, least=0.15)
    np.testing.assert_array_equal(labels, [0, 1])
    np.testing.assert_allclose(sure, [0.8, 0.6], atol=1e-5)
    np.testing.assert_allclose(boxes, [[0.21, 0.2, 0.41, 0.4], [0.6, 0.5, 0.8, 0.9]], atol=1e-6)


# Loss.


def reference_mining(entropy, positive):
    """The definition, image by image."""
    chosen = np.zeros_like(positive)
    for i in range(len(entropy)):
        negatives = sorted(np.flatnonzero(~positive[i]), key=lambda k: -entropy[i, k])
        chosen[i, negatives[: 3 * positive[i].sum()]] = True
    return chosen


@pytest.fixture
def batch():
    """Targets and outputs of four images: of few, no, most and all anchors with a box."""
    rng = np.random.default_rng(0)
    labels = np.zeros((4, 40), np.int32)
    for row, count in enumerate((5, 0, 30, 40)):
        labels[row, rng.permutation(40)[:count]] = rng.integers(1, 4, count)
    boxes = rng.normal(0, 1.5, (4, 40, 5)).astype(np.float32)
    boxes[..., 4] = labels > 0
    outputs = rng.normal(0, 1.5, (4, 40, 4)), rng.normal(0, 2, (4, 40, 4))
    return labels, boxes, *(y.astype(np.float32) for y in outputs)


def reference_entropy(labels, logits):
    logits = logits.astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return -np.log(np.take_along_axis(probabilities, labels[..., None], -1)[..., 0])


def test_hard_negatives(batch, run):
    labels, _, _, logits = batch
    entropy = reference_entropy(labels, logits)
    expected = reference_mining(entropy, labels > 0)
    assert expected.sum(axis=1).tolist() == [15, 0, 10, 0]
    found = run(ssd.hard_negatives)(tf.constant(entropy, tf.float32), tf.constant(labels))
    np.testing.assert_array_equal(found, expected)


def test_mined_labels_fix_the_choice(batch):
    """Other outputs choose the same anchors then; the loss of the first outputs is unchanged."""
    labels, _, _, logits = batch
    mined = ssd.mine(labels, logits)
    chosen = (labels > 0) | reference_mining(reference_entropy(labels, logits), labels > 0)
    np.testing.assert_array_equal(mined, np.where(chosen, labels, -1))
    loss = ssd.losses()["classes"]
    np.testing.assert_allclose(loss(mined, logits), loss(labels, logits), rtol=1e-6)
    other = np.float32(-logits)
    expected = reference_entropy(labels, other)[chosen].sum() / 75
    np.testing.assert_allclose(loss(mined, other), expected, rtol=1e-5)
    assert abs(loss(labels, other) - expected) > 0.1


def test_losses(batch, run):
    labels, boxes, differences, logits = batch
    entropy, positive = reference_entropy(labels, logits), labels > 0
    chosen = positive | reference_mining(entropy, positive)
    error = np.abs(differences.astype(np.float64) - boxes[..., :4])
    smooth = np.where(error < 1, 0.5 * error**2, error - 0.5).sum(-1)
    losses = {name: run(loss) for name, loss in ssd.losses(2.0, 1e-3).items()}
    found = losses["boxes"](tf.constant(boxes), tf.constant(differences))
    np.testing.assert_allclose(found, 2 * smooth[positive].sum() / 75, rtol=1e-5)
    # Keras hands labels over in the dtype of the outputs.
    found = losses["classes"](tf.constant(labels, tf.float32), tf.constant(logits))
    np.testing.assert_allclose(found, 1e-3 * entropy[chosen].sum() / 75, rtol=1e-5)


def test_gradients_of_losses(batch):
    labels, boxes, differences, logits = (tf.constant(x) for x in batch)
    with tf.GradientTape() as tape:
        tape.watch([differences, logits])
        losses = ssd.losses()
        loss = losses["boxes"](boxes, differences) + losses["classes"](labels, logits)
    of_boxes, of_logits = tape.gradient(loss, [differences, logits])
    positive = labels.numpy() > 0
    expected = np.clip(differences - boxes[..., :4], -1, 1) * positive[..., None] / 75
    np.testing.assert_allclose(of_boxes, expected, atol=1e-7)
    entropy = reference_entropy(labels.numpy(), logits.numpy())
    chosen = positive | reference_mining(entropy, positive)
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = (softmax - np.eye(4)[labels.numpy()]) * chosen[..., None] / 75
    np.testing.assert_allclose(of_logits, expected, atol=1e-7)


def test_losses_without_any_object_are_zero(batch):
    _, boxes, differences, logits = batch
    losses = ssd.losses()
    assert float(losses["boxes"](0 * boxes, differences)) == 0
    assert float(losses["classes"](np.zeros((4, 40)), logits)) == 0


# Network.


@pytest.mark.parametrize("size, policy", [(64, "mixed_float16"), (160, "float32")])
def test_outputs(size, policy):
    keras.config.set_dtype_policy(policy)
    model = ssd.build_model(size, classes=3)
    anchors = len(multibox.make_anchors(size))
    shapes = {name: y.shape for name, y in model.output.items()}
    assert shapes == {"boxes": (None, anchors, 4), "classes": (None, anchors, 4)}
    assert {y.dtype for y in model.output.values()} == {"float32"}
    kinds = {
        layer.compute_dtype for layer in model.layers if isinstance(layer, keras.layers.Conv2D)
    }
    assert kinds == {"float32" if policy == "float32" else "float16"}


def test_outputs_are_in_the_order_of_the_anchors():
    """An output depends on 3 x 3 places of its map around its anchor's centre."""
    model, anchors = ssd.build_model(64, classes=1), multibox.make_anchors(64)
    inputs = [model.get_layer(f"map{i}").output for i in range(3)]
    heads = keras.Model(inputs, model.outputs)
    rng = np.random.default_rng(0)
    maps = [tf.constant(rng.normal(size=(1, *x.shape[1:])), tf.float32) for x in inputs]
    first = (0, 4 * 64, 4 * (64 + 16))
    for number, y, x, shape in ((0, 1, 5, 0), (0, 6, 2, 3), (1, 2, 1, 1)):
        side = maps[number].shape[1]
        row = first[number] + 4 * (side * y + x) + shape
        np.testing.assert_allclose(anchors[row, :2] * side, [x + 0.5, y + 0.5], rtol=1e-6)
        with tf.GradientTape() as tape:
            tape.watch(maps)
            boxes, classes = (output[0, row] for output in heads(maps))
            total = tf.reduce_sum(boxes) + tf.reduce_sum(classes)
        gradients = tape.gradient(total, maps)
        rows, columns = np.nonzero(np.abs(gradients[number][0]).sum(-1))
        assert set(rows) == {y - 1, y, y + 1} and set(columns) == {x - 1, x, x + 1}
        for other in set(range(3)) - {number}:
            assert not np.any(gradients[other])


def made_up_weights():
    """SqueezeNet's arrays, random."""
    rng, arrays, channels = np.random.default_rng(0), {}, 64
    shapes = {"conv1": (3, 3, 3, 64)}
    for module, filters in zip(range(2, 10), (16, 16, 32, 32, 48, 48, 64, 64), strict=True):
        shapes[f"fire{module}/squeeze1x1"] = (1, 1, channels, filters)
        shapes[f"fire{module}/expand1x1"] = (1, 1, filters, 4 * filters)
        shapes[f"fire{module}/expand3x3"] = (3, 3, filters, 4 * filters)
        channels = 8 * filters
    for name, shape in shapes.items():
        deviation = np.sqrt(2 / np.prod(shape[:3]))
        arrays[f"{name}/kernel"] = rng.normal(0, deviation, shape).astype(np.float32)
        arrays[f"{name}/bias"] = rng.normal(0, 20, shape[-1:]).astype(np.float32)
    return arrays


def squeezenet(arrays, images):
    """SqueezeNet's maps fire5 and fire9: convolutions with biases, no normalisations."""

    def conv(x, name, strides=1):
        y = tf.nn.conv2d(x, arrays[f"{name}/kernel"], strides, "SAME")
        return tf.nn.relu(y + arrays[f"{name}/bias"])

    x = images[..., ::-1].astype(np.float32) - np.float32([103.939, 116.779, 123.68])
    x, maps = conv(x, "conv1", 2), []
    for module in range(2, 10):
        if module in (2, 4, 6):
            x = tf.nn.max_pool2d(x, 3, 2, "SAME")
        x = conv(x, f"fire{module}/squeeze1x1")
        x = tf.concat([conv(x, f"fire{module}/expand{k}x{k}") for k in (1, 3)], -1)
        maps.append(x)
    return maps[3], maps[7]


def test_backbone_computes_what_squeezenet_does(tmp_path):
    arrays = made_up_weights()
    np.savez(tmp_path / "weights.npz", **arrays, more=np.zeros(3))
    images = np.random.default_rng(1).integers(0, 256, (8, 64, 64, 3), np.uint8)
    model = ssd.build_model(64, 2, ssd.load_backbone(tmp_path / "weights.npz", images))
    heads = keras.Model(model.input, [model.get_layer(f"map{i}").output for i in range(2)])
    for training in (False, True):  # batch statistics are the moving ones
        for ours, theirs in zip(
            heads(images, training=training), squeezenet(arrays, images), strict=True
        ):
            np.testing.assert_allclose(ours, theirs / 127.5 / 4, rtol=1e-3, atol=1e-3)


def test_backbone_errors(tmp_path):
    images = np.zeros((1, 64, 64, 3), np.uint8)

    def problem(path):
        with pytest.raises(ValueError, match="(?s)Expected an .npz with weights") as caught:
            ssd.load_backbone(path, images)
        assert str(caught.value).endswith(f"Received: {path}")
        return str(caught.value)

    assert "there is no such file" in problem(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("not an archive")
    assert "not an .npz archive" in problem(tmp_path / "text.npz")
    np.save(tmp_path / "plain.npy", np.zeros(3))
    assert "not an .npz archive" in problem(tmp_path / "plain.npy")
    arrays = made_up_weights()
    np.savez(tmp_path / "turned.npz", **arrays | {"conv1/kernel": np.zeros((64, 3, 3, 3))})
    assert "conv1/kernel has shape (64, 3, 3, 3), not (3, 3, 3, 64)" in problem(
        tmp_path / "turned.npz"
    )
    del arrays["fire4/expand3x3/bias"]
    np.savez(tmp_path / "cut.npz", **arrays)
    assert "fire4/expand3x3/bias is missing" in problem(tmp_path / "cut.npz")


# Data.


def test_shapes_are_the_same_for_a_seed_whatever_their_number():
    first, more = detection_data.draw_shapes(2, 32, seed=3), detection_data.draw_shapes(4, 32, 3)
    np.testing.assert_array_equal(first.images, more.images[:2])
    for ours, theirs in zip(
        first.boxes + first.labels, more.boxes[:2] + more.labels[:2], strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    assert (detection_data.draw_shapes(1, 32, seed=4).images != first.images[:1]).any()
    assert first.images.dtype == np.uint8 and first.images.shape == (2, 32, 32, 3)


def test_shapes_fill_their_boxes():
    drawn, inside, outside = detection_data.draw_shapes(60, 64), [], []
    assert set(np.concatenate(drawn.labels)) == {0, 1, 2}
    for image, boxes, labels in zip(*drawn, strict=True):
        assert 1 <= len(boxes) == len(labels) <= 3
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= 1).all()
        if len(boxes) > 1:
            continue
        # A shape has one colour, which is rare elsewhere.
        x0, y0, x1, y1 = boxes[0] * 64
        row, column = int((y0 + y1) / 2), int((x0 + x1) / 2)
        colour = image[row - 1 : row + 2, column - 1 : column + 2].mean((0, 1))
        alike = (np.abs(image - colour) < 40).all(-1)
        in_box = np.zeros((64, 64), bool)
        in_box[round(y0) : round(y1), round(x0) : round(x1)] = True
        area = (np.pi / 4, 1, 0.5)[labels[0]]
        inside.append(alike[in_box].mean() - area)
        outside.append(alike[~in_box].mean())
    assert len(inside) > 10
    assert np.abs(inside).max() < 0.15 and np.mean(outside) < 0.03


def jpeg(width, height, colour):
    buffer = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), colour, np.uint8)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def archive():
    """Three images: two to train on, the second without objects, and one to validate."""
    files = [np.frombuffer(jpeg(40, 20, colour), np.uint8) for colour in (50, 100, 200)]
    return dict(
        jpeg_bytes=np.concatenate(files),
        jpeg_offsets=np.cumsum([0, *map(len, files)]),
        split=np.array([0, 0, 1], np.uint8),
        boxes=np.float32([[0, 0, 0.5, 1], [0.2, 0.1, 0.4, 0.3], [0.5, 0.5, 1, 0.75]]),
        box_class=np.array([1, 0, 1], np.uint8),
        box_image=np.array([0, 2, 0]),
    )


def test_npz(tmp_path):
    arrays = archive()
    np.savez(tmp_path / "a.npz", **arrays, class_names=["dog", "cat", "cow"])
    data = detection_data.load(tmp_path / "a.npz", 32)
    assert data.name == "a.npz" and data.classes == ("dog", "cat", "cow")
    assert data.train.images.shape == (2, 32, 32, 3) and data.val.images.shape == (1, 32, 32, 3)
    np.testing.assert_allclose(data.train.images.mean((1, 2, 3)), [50, 100], atol=2)
    np.testing.assert_array_equal(data.train.boxes[0], arrays["boxes"][[0, 2]])
    np.testing.assert_array_equal(data.train.labels[0], [1, 1])
    assert data.train.boxes[1].shape == (0, 4) and data.train.labels[1].shape == (0,)
    np.testing.assert_array_equal(data.val.boxes[0], arrays["boxes"][[1]])
    np.savez(tmp_path / "b.npz", **arrays)
    assert detection_data.load(tmp_path / "b.npz", 32).classes == ("class 0", "class 1")


ANNOTATION = """<annotation><size><width>9</width><height>9</height></size>{}</annotation>"""
OBJECT = """<object><name>{}</name><difficult>{}</difficult><bndbox><xmin>{}</xmin><ymin>{}</ymin>
<xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"""


def devkit(folder, **splits):
    """A folder of 40 x 20 pictures; for each split, the objects of its pictures by name."""
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    for split, pictures in splits.items():
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(pictures) + "\n\n")
        for name, objects in pictures.items():
            (folder / "JPEGImages" / f"{name}.jpg").write_bytes(jpeg(40, 20, 90))
            text = ANNOTATION.format("".join(OBJECT.format(*each) for each in objects))
            (folder / "Annotations" / f"{name}.xml").write_text(text)
    return folder


COW, HARD_DOG, DOG = ("cow", 0, 1, 1, 20, 20), ("dog", 1, 1, 1, 5, 5), ("dog", 0, 11, 6, 40, 10)


def test_devkit(tmp_path):
    devkit(tmp_path / "VOC2007", train={"a1": [DOG, HARD_DOG, COW]}, val={"b": [COW]})
    devkit(tmp_path / "VOC2012", train={"c": [], "d": [DOG]}, val={"e": [DOG]})
    data = detection_data.load(tmp_path / "VOC2007", 32)
    assert data.name == "VOC2007" and data.classes == ("cow", "dog")
    assert data.train.images.shape == (1, 32, 32, 3)
    # The first pixel is 1 and the last one belongs to the box; difficult objects are left out.
    np.testing.assert_allclose(data.train.boxes[0], [[0.25, 0.25, 1, 0.5], [0, 0, 0.5, 1]])
    np.testing.assert_array_equal(data.train.labels[0], [1, 0])
    both = detection_data.load(tmp_path, 32)
    assert [len(boxes) for boxes in both.train.boxes] == [2, 0, 1]
    assert [labels.tolist() for labels in both.val.labels] == [[0], [1]]


def test_errors_say_what_was_expected(tmp_path):
    def problem(path):
        with pytest.raises(ValueError, match="(?s)Expected one of.*Leave out --data") as caught:
            detection_data.load(path, 32)
        assert "Received: " in str(caught.value).splitlines()[-1]
        return str(caught.value)

    def changed(**arrays):
        path = tmp_path / "changed.npz"
        np.savez(path, **archive() | arrays)
        return problem(path)

    assert "no such file or folder" in problem(tmp_path / "missing")
    (tmp_path / "text.npz").write_text("not an archive")
    assert "not an .npz archive" in problem(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", pictures=np.zeros(3))
    assert "it holds ['pictures']" in problem(tmp_path / "other.npz")
    assert "differ in length" in changed(box_class=np.zeros(2, np.uint8))
    assert "no val images" in changed(split=np.zeros(3, np.uint8))
    assert "no objects in val" in changed(box_image=np.zeros(3, int))
    assert "a box in train is empty" in changed(boxes=np.float32([[0, 0, 40, 20]] * 3))
    assert "a box in train is empty" in changed(boxes=np.full((3, 4), np.nan, np.float32))
    assert "none of the 1 class names" in changed(class_names=["dog"])
    assert "an image cannot be read" in changed(jpeg_bytes=np.zeros(9000, np.uint8))

    assert "has no train images" in problem(tmp_path)
    folder = devkit(tmp_path / "kit", train={"a": [COW]}, val={"b": [DOG]})
    assert "dog in val is not in train" in problem(folder)
    (folder / "JPEGImages" / "b.jpg").unlink()
    assert "JPEGImages/b.jpg is missing" in problem(folder)
    (folder / "Annotations" / "a.xml").write_text("<annotation><object/></annotation>")
    assert "lacks a name or a bndbox" in problem(folder)
    (folder / "Annotations" / "a.xml").write_text("<annotation>")
    assert "lacks a name or a bndbox" in problem(folder)
    (folder / "ImageSets" / "Main" / "train.txt").unlink()
    assert "ImageSets/Main/train.txt is missing" in problem(folder)


# The program.


def test_flipped_images_have_flipped_boxes():
    split, anchors = detection_data.draw_shapes(2, 64), multibox.make_anchors(64)
    (images, targets) = detection.encode(split, [1, 1], anchors, [False, True])
    np.testing.assert_array_equal(images[1], images[0, :, ::-1])
    plain, flipped = multibox.decode(targets["boxes"][..., :4], anchors)
    x0, y0, x1, y1 = plain[targets["classes"][0] > 0].T
    mirrored = np.stack([1 - x1, y0, 1 - x0, y1], axis=1)
    for box in flipped[targets["classes"][1] > 0]:
        assert np.abs(mirrored - box).max(axis=1).min() < 1e-5


def test_batches_hold_each_image_once_in_an_epoch():
    split, anchors = detection_data.draw_shapes(6, 64), multibox.make_anchors(64)
    epoch = [
        x for (x, _), _ in zip(detection.batches(split, anchors, 2, 0), range(3), strict=False)
    ]
    again = [
        x for (x, _), _ in zip(detection.batches(split, anchors, 2, 0), range(3), strict=False)
    ]
    np.testing.assert_array_equal(epoch, again)
    # Means are not changed by flips.
    means = np.sort(np.concatenate(epoch).mean((1, 2, 3)))
    np.testing.assert_allclose(means, np.sort(split.images.mean((1, 2, 3))))


class Oracle:
    """A model that knows the truth, and answers in whole batches only."""

    def __init__(self, split, anchors, classes):
        encoded = [multibox.encode(*pair, anchors) for pair in zip(*split[1:], strict=True)]
        self.known = {
            image.tobytes(): (targets[:, :4], 20 * np.eye(1 + classes, dtype=np.float32)[labels])
            for image, (targets, labels) in zip(split.images, encoded, strict=True)
        }

    def predict(self, images, batch, verbose):
        assert len(images) % batch == 0
        boxes, classes = zip(*(self.known[image.tobytes()] for image in images), strict=True)
        return {"boxes": np.stack(boxes), "classes": np.stack(classes)}


@pytest.fixture
def drawn():
    split = detection_data.draw_shapes(5, 64)
    return detection_data.Dataset("drawn", split, split, detection_data.SHAPES)


def test_the_truth_has_a_precision_of_one(drawn):
    anchors = multibox.make_anchors(64)
    callback = detection.MeanAveragePrecision(drawn, anchors, batch=2)
    callback.set_model(Oracle(drawn.val, anchors, 3))
    logs = {}
    callback.on_epoch_end(0, logs)
    assert logs == {"val_map": 1.0}


def test_picture(tmp_path, drawn):
    anchors = multibox.make_anchors(64)
    found = detection.predict(Oracle(drawn.val, anchors, 3), drawn.val.images, anchors, 2)
    assert len(found) == 5
    found[1] = tuple(array[:0] for array in found[1])  # nothing found
    detection.draw(tmp_path / "picture.png", drawn, found)
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.size == (1250, 540)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--size", "100"], "--size must be a multiple of 32 from 64 on. Received: 100"),
        (["--batch", "0"], "--batch must be positive. Received: 0"),
        (["--class-weight", "0"], "--class-weight must be positive. Received: 0.0"),
    ],
)
def test_bad_options(capsys, options, message):
    with pytest.raises(SystemExit):
        detection.parse_arguments(options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_loss_multiplier_leaves_steps_as_they_are(name):
    def after(multiplier):
        options = ["--optimizer", name, "--steps", "20", "--loss-multiplier", str(multiplier)]
        optimizer = detection.make_optimizer(detection.parse_arguments(options))
        weight = keras.Variable([1.0, 1.0])
        for gradient in ([1.0, -1e-6], [0.5, 1e-6], [2.0, 3e-6]):
            optimizer.apply([keras.ops.array(gradient) * multiplier], [weight])
        return weight.numpy()

    assert (after(1.0) != 1).all()
    np.testing.assert_allclose(after(2.0**-13) - 1, after(1.0) - 1, rtol=1e-5)


def test_bad_files_end_the_program_with_advice(tmp_path):
    with pytest.raises(SystemExit, match="(?s)no such file or folder.*Expected one of"):
        detection.main(["--data", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="(?s)no such file.*Leave out --backbone"):
        detection.main(["--size", "64", "--backbone", str(tmp_path / "nowhere")])


@pytest.mark.slow
def test_the_program_runs(tmp_path, capsys):
    options = ["--size", "64", "--batch", "4", "--steps", "9", "--verbose", "0"]
    options += ["--scaling", "none"]  # compiles in a third of the time
    path = tmp_path / "found.json"
    detection.main([*options, "--json", str(path), "--out", str(tmp_path / "picture.png")])
    found = json.loads(path.read_text())
    assert found["options"]["steps"] == 8 and len(found["history"]["val_map"]) == 4
    assert found["final"] == found["history"]["val_map"][-1] and 0 <= found["final"] <= 1
    assert found["steps_lost"] == 0 and max(found["lost_entries"].values()) < 0.5
    assert "float16: val_map" in capsys.readouterr().out
    assert (tmp_path / "picture.png").is_file()
