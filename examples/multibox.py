"""Anchors of the detection example, and boxes as differences from them.

Boxes are x0, y0, x1, y1 in 0..1; anchors are x, y of the centre, width, height.
"""

import numpy as np
import scipy.special
import tensorflow as tf
from average_precision import iou

ASPECTS = (1, 2, 1 / 2)  # width over height of anchors; each map has another, larger square
SMALLEST = 0.2  # side of the smallest anchors
VARIANCES = np.float32([0.1, 0.1, 0.2, 0.2])  # what the four differences are divided by


def make_anchors(size):
    """Returns the anchors in the order of the model's outputs, float32 of shape (count, 4)."""
    sides = [size // 8, size // 16]
    while sides[-1] > 2:
        sides.append(-(-sides[-1] // 2))
    scales = np.linspace(SMALLEST, 1, len(sides) + 1)
    anchors = []
    for side, scale, following in zip(sides, scales, scales[1:], strict=False):
        shapes = [(scale * aspect**0.5, scale / aspect**0.5) for aspect in ASPECTS]
        shapes.append(((scale * following) ** 0.5,) * 2)
        centres = (np.arange(side) + 0.5) / side
        for y in centres:
            anchors += [(x, y, *shape) for x in centres for shape in shapes]
    return np.asarray(anchors, np.float32)


def corners(anchors):
    """Turns centres and sizes into x0, y0, x1, y1."""
    centre, half = anchors[..., :2], anchors[..., 2:] / 2
    return np.concatenate([centre - half, centre + half], axis=-1)


def match(overlap, least=0.5):
    """Chooses a box for each anchor.

    Args:
        overlap: IoU of shape (anchors, boxes).
        least: From which IoU on an anchor takes the box that it overlaps most.

    Returns:
        For each anchor the index of its box, or -1. Every box also takes one anchor whatever their
        IoU: the pair with the largest, then that of those left, and so on.
    """
    matched = np.full(len(overlap), -1)
    if overlap.shape[1] == 0:
        return matched
    near = overlap.max(axis=1) >= least
    matched[near] = overlap[near].argmax(axis=1)
    left = overlap.copy()
    for _ in range(overlap.shape[1]):
        anchor, box = np.unravel_index(left.argmax(), left.shape)
        matched[anchor] = box
        left[anchor], left[:, box] = -1, -1
    return matched


def encode(boxes, labels, anchors):
    """The targets of one image.

    Args:
        boxes: Of shape (count, 4).
        labels: Of shape (count,), the first class is 0.
        anchors: From `make_anchors`.

    Returns:
        For each anchor 4 differences and a 1 if it has a box (float32, 5 columns; otherwise they
        are 0), and its class (int32; 0 if it has no box, 1 for the first class).
    """
    matched = match(iou(corners(anchors), boxes))
    taken = matched >= 0
    targets = np.zeros((len(anchors), 5), np.float32)
    classes = np.zeros(len(anchors), np.int32)
    chosen, anchors = boxes[matched[taken]], anchors[taken]
    centre, extent = (chosen[:, :2] + chosen[:, 2:]) / 2, chosen[:, 2:] - chosen[:, :2]
    difference = [(centre - anchors[:, :2]) / anchors[:, 2:], np.log(extent / anchors[:, 2:])]
    targets[taken, :4] = np.concatenate(difference, axis=1) / VARIANCES
    targets[taken, 4] = 1
    classes[taken] = labels[matched[taken]] + 1
    return targets, classes


def decode(differences, anchors):
    """Returns the boxes that differ so from the anchors: the inverse of `encode`."""
    differences = differences * VARIANCES
    centre = anchors[:, :2] + differences[..., :2] * anchors[:, 2:]
    # No box is larger than this anyway, and an untrained network must not overflow.
    extent = np.exp(np.minimum(differences[..., 2:], 4)) * anchors[:, 2:]
    return corners(np.concatenate([centre, extent], axis=-1))


def detect(outputs, anchors, least=0.01, most=100):
    """Turns the model's outputs into detections.

    Args:
        outputs: Dictionary of arrays, as the model returns it.
        anchors: From `make_anchors`.
        least: Smallest score of a detection.
        most: How many detections an image has at most.

    Returns:
        For each image boxes (n, 4), labels (n,) and scores (n,), the surest first; of those of one
        class that overlap by more than an IoU of 0.45 only the surest is left.
    """
    boxes = decode(np.asarray(outputs["boxes"]), anchors)
    scores = scipy.special.softmax(np.asarray(outputs["classes"]), axis=-1)[..., 1:]
    # It expects y before x, and treats both alike.
    found = tf.image.combined_non_max_suppression(
        boxes[:, :, None], scores, most, most, iou_threshold=0.45, score_threshold=least
    )
    boxes, scores, labels, counts = (array.numpy() for array in found)
    labels = labels.astype(np.int32)
    return [(boxes[i, :n], labels[i, :n], scores[i, :n]) for i, n in enumerate(counts)]
