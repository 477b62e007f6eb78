"""How good detections are: average precision as in PASCAL VOC.

Keras, TensorFlow, SciPy and NumPy have no such metric. Boxes are rows of x0, y0, x1, y1.
"""

import numpy as np


def iou(first, second):
    """Intersection over union of all pairs of boxes.

    Args:
        first: Boxes, of shape (n, 4).
        second: Boxes, of shape (m, 4).

    Returns:
        float64 of shape (n, m).
    """
    first, second = np.asarray(first, float)[:, None], np.asarray(second, float)[None]
    low, high = np.maximum(first[..., :2], second[..., :2]), np.minimum(first, second)[..., 2:]
    common = np.prod(np.maximum(high - low, 0), axis=-1)
    areas = [np.prod(boxes[..., 2:] - boxes[..., :2], axis=-1) for boxes in (first, second)]
    union = areas[0] + areas[1] - common
    return np.divide(common, union, out=np.zeros_like(common), where=union > 0)


def average_precision(detections, truth, label, least=0.5):
    """Area under the curve of precision against recall, for one class.

    From the surest detection to the least sure, each is held against the box of its class that it
    overlaps most: it is right if their IoU is at least `least` and no surer one was right there.
    Precision at a recall is the best at that recall or a higher one (VOC 2010 and later).

    Args:
        detections: For each image its boxes (n, 4), labels (n,) and scores (n,).
        truth: For each image its boxes and labels.
        label: The class.
        least: Smallest IoU of a right detection.

    Returns:
        A number from 0 to 1; NaN if no image shows the class.
    """
    scores, right, shown = [], [], 0
    for (boxes, labels, sure), (true_boxes, true_labels) in zip(detections, truth, strict=True):
        true_boxes = true_boxes[true_labels == label]
        order = np.flatnonzero(labels == label)
        order = order[np.argsort(-sure[order], kind="stable")]
        taken = np.zeros(len(true_boxes), bool)
        for overlap in iou(boxes[order], true_boxes):
            best = overlap.argmax() if len(overlap) else None
            right.append(best is not None and overlap[best] >= least and not taken[best])
            if right[-1]:
                taken[best] = True
        shown += len(true_boxes)
        scores.extend(sure[order])
    if shown == 0:
        return np.nan
    right = np.asarray(right, bool)[np.argsort(-np.asarray(scores), kind="stable")]
    precision = np.cumsum(right) / np.arange(1, len(right) + 1)
    best_from_here = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(best_from_here[right]) / shown)  # recall grows where one is right


def mean_average_precision(detections, truth, classes, least=0.5):
    """The mean of `average_precision` over those of the `classes` that an image shows."""
    found = [average_precision(detections, truth, label, least) for label in range(classes)]
    return float(np.nanmean(found))
