"""Street scenes drawn by the program itself: images with a label for every pixel.

A camera stands on a straight road. The ground, the rows of houses and every object follow one
perspective: something at depth z appears with scale f / z and stands on the line
`horizon + f / z`. Objects are painted from far to near, so that near ones hide far ones. What makes
the task more than a matter of colour: houses, road and pavement share their greys, every surface is
textured, the light changes from scene to scene, and the classes are as unbalanced as in real street
scenes (road and pavement cover a third of all pixels, poles and pedestrians two percent each).

The bonnet of the camera's own car, seen in some scenes, is unlabelled and is to be left out of the
loss and of the metric, as are the unlabelled pixels of real data sets.

Example:

    images, labels = draw_scenes(4, size=(96, 128), seed=0)   # uint8 (4, 96, 128, 3), (4, 96, 128)
"""

import numpy as np

CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "car", "pedestrian")
SKY, BUILDING, POLE, ROAD, PAVEMENT, TREE, CAR, PEDESTRIAN = range(len(CLASSES))
UNLABELLED = len(CLASSES)

ROAD_HALF_WIDTH = 1.9  # in units of the camera's height, as all lengths below
PAVEMENT_WIDTH = 1.3


def draw_scenes(count, size=(96, 128), seed=0):
    """Draws labelled street scenes.

    Args:
        count: Number of scenes.
        size: Height and width in pixels.
        seed: Seed of the random numbers. Scene i of a seed is the same for every `count`.

    Returns:
        Images, uint8 of shape (count, height, width, 3), and labels, uint8 of shape
        (count, height, width) with values below `len(CLASSES)`, or `UNLABELLED`.
    """
    height, width = size
    if height < 16 or width < 16:
        raise ValueError(f"A scene needs at least 16 x 16 pixels. Received: size={size}")
    images = np.empty((count, height, width, 3), np.uint8)
    labels = np.empty((count, height, width), np.uint8)
    for index in range(count):
        scene = _Scene(size, np.random.default_rng([seed, index]))
        images[index], labels[index] = scene.draw()
    return images, labels


class _Scene:
    """One scene: a canvas for the picture, one for the labels, and a camera."""

    def __init__(self, size, rng):
        self.rng = rng
        self.height, self.width = size
        self.y, self.x = np.mgrid[: self.height, : self.width].astype(np.float32)
        self.image = np.zeros((self.height, self.width, 3), np.float32)
        self.label = np.full(size, SKY, np.uint8)
        self.horizon = self.height * rng.uniform(0.38, 0.5)
        self.vanishing = self.width * rng.uniform(0.35, 0.65)
        self.focal = self.height * rng.uniform(0.75, 0.9)

    def draw(self):
        """Returns the finished picture and its labels."""
        self._sky()
        self._ground()
        self._houses()
        for depth, draw_object in self._objects():
            draw_object(depth)
        if self.rng.random() < 0.4:
            self._bonnet()
        return self._expose(), self.label

    # The camera.

    def _place(self, across, depth):
        """Returns column, row and pixels per unit of length of a point on the ground."""
        scale = self.focal / depth
        return self.vanishing + across * scale, self.horizon + scale, scale

    def _paint(self, where, label, colour, texture=0.06):
        """Fills the pixels `where` with a textured colour and, if it is not None, a label."""
        shade = 1 + texture * self.rng.standard_normal(np.count_nonzero(where))
        self.image[where] = np.asarray(colour, np.float32) * shade[:, None]
        if label is not None:
            self.label[where] = label

    def _box(self, left, right, top, bottom):
        return (self.x >= left) & (self.x < right) & (self.y >= top) & (self.y < bottom)

    def _ellipse(self, x, y, radius_x, radius_y):
        return ((self.x - x) / radius_x) ** 2 + ((self.y - y) / radius_y) ** 2 < 1

    def _tint(self, colour, spread=0.08):
        return np.clip(np.asarray(colour) + self.rng.normal(0, spread, 3), 0.02, 1)

    # The surroundings.

    def _sky(self):
        overcast = self.rng.random() < 0.4
        zenith = self._tint((0.72, 0.74, 0.78) if overcast else (0.35, 0.55, 0.9), 0.04)
        fade = np.clip(self.y / self.horizon, 0, 1)[..., None]
        self.image[:] = zenith * (1 - fade) + np.float32((0.9, 0.9, 0.9)) * fade
        for _ in range(self.rng.integers(0, 5)):
            x, y = self.rng.uniform(0, self.width), self.rng.uniform(0, self.horizon)
            cloud = self._ellipse(x, y, self.width * 0.15, self.height * 0.05)
            self._paint(cloud, SKY, self._tint((0.9, 0.9, 0.92), 0.03), texture=0.02)

    def _ground(self):
        below = self.y > self.horizon
        across = (self.x - self.vanishing) / np.maximum(self.y - self.horizon, 0.5)
        depth = self.focal / np.maximum(self.y - self.horizon, 0.5)
        grey = self.rng.uniform(0.28, 0.45)
        pavement = self._tint(np.full(3, grey + self.rng.uniform(0.05, 0.2)), 0.02)
        self._paint(below, PAVEMENT, pavement)
        slabs = below & (depth % 1.0 < 0.08) & (depth < 12)
        self._paint(slabs, PAVEMENT, pavement * 0.8)
        road = below & (np.abs(across) < ROAD_HALF_WIDTH)
        self._paint(road, ROAD, self._tint(np.full(3, grey), 0.015))
        marks = road & (np.abs(across) < 0.05) & (depth % 2.5 < 1.2)
        self._paint(marks, ROAD, (0.85, 0.85, 0.8))
        kerb = below & (np.abs(np.abs(across) - ROAD_HALF_WIDTH) < 0.06)
        self._paint(kerb, None, np.full(3, grey * 0.7))

    def _houses(self):
        """Two rows of houses along the pavement, with gaps, windows and roofs of many heights."""
        edge = ROAD_HALF_WIDTH + PAVEMENT_WIDTH
        offset = self.x - self.vanishing
        for side in (-1, 1):
            # A facade parallel to the road: a column of the picture sees it at one depth.
            depth = self.focal * edge / np.maximum(side * offset, 0.5)
            scale = self.focal / depth
            row = (self.horizon + scale - self.y) / scale  # height above the ground
            near = 1.0
            while near < 30:
                far = near + self.rng.uniform(1.5, 5)
                if self.rng.random() < 0.85:
                    top = self.rng.uniform(2, 5.5)
                    wall = (side * offset > 0) & (depth >= near) & (depth < far)
                    wall &= (row >= 0) & (row < top)
                    colour = self._tint(((0.5, 0.42, 0.38), (0.6, 0.58, 0.55))[side > 0], 0.1)
                    self._paint(wall, BUILDING, colour)
                    window = wall & (row % 1.1 > 0.5) & (depth % 0.9 > 0.45) & (row > 0.4)
                    self._paint(window, BUILDING, self._tint((0.22, 0.26, 0.32), 0.05), 0.1)
                near = far
        distant = self._box(0, self.width, self.horizon - self.focal / 25, self.horizon + 1)
        distant &= self.label == SKY
        self._paint(distant, BUILDING, self._tint((0.55, 0.55, 0.6), 0.04))

    # What stands on the ground.

    def _objects(self):
        """Chooses the objects of the scene and returns them from far to near."""
        kinds = ((self._tree, 5, 2.5), (self._pole, 6, 1.8), (self._car, 4, 2.2))
        chosen = []
        for draw_object, most, nearest in (*kinds, (self._pedestrian, 7, 1.8)):
            for _ in range(self.rng.integers(1, most + 1)):
                chosen.append((nearest * np.exp(self.rng.uniform(0, 1.5)), draw_object))
        return sorted(chosen, key=lambda pair: -pair[0])

    def _beside(self, low, high):
        return self.rng.choice((-1, 1)) * (ROAD_HALF_WIDTH + self.rng.uniform(low, high))

    def _tree(self, depth):
        x, foot, scale = self._place(self._beside(0.7, 1.2), depth)
        crown = foot - self.rng.uniform(1.9, 2.6) * scale
        trunk = self._box(x - 0.1 * scale, x + 0.1 * scale, crown, foot)
        self._paint(trunk, TREE, self._tint((0.3, 0.22, 0.15), 0.03), 0.15)
        green = self._tint((0.2, 0.36, 0.14), 0.05)
        for _ in range(6):
            shift = self.rng.normal(0, 0.4, 2) * scale
            radius = self.rng.uniform(0.4, 0.8) * scale
            leaves = self._ellipse(x + shift[0], crown + shift[1], radius, radius)
            self._paint(leaves, TREE, green * self.rng.uniform(0.8, 1.2), 0.3)

    def _pole(self, depth):
        x, foot, scale = self._place(self._beside(0.15, 0.4), depth)
        half = max(0.06 * scale, 0.75)
        top = foot - self.rng.uniform(2, 3) * scale
        self._paint(self._box(x - half, x + half, top, foot), POLE, self._tint((0.3, 0.3, 0.3)))
        lamp = self._box(x - 5 * half, x + half, top, top + max(0.1 * scale, 1))
        self._paint(lamp, POLE, self._tint((0.4, 0.4, 0.4)))

    def _car(self, depth):
        lane = self.rng.choice((-1, 1))
        x, foot, scale = self._place(lane * self.rng.uniform(0.8, 1.2), depth)
        colour = self._tint(self.rng.choice(((0.7, 0.1, 0.1), (0.15, 0.2, 0.5), (0.8, 0.8, 0.8))))
        self._paint(self._ellipse(x, foot, 0.8 * scale, 0.1 * scale), None, (0.12, 0.12, 0.12))
        body = self._box(x - 0.7 * scale, x + 0.7 * scale, foot - 0.65 * scale, foot)
        self._paint(body, CAR, colour)
        roof = self._ellipse(x, foot - 0.65 * scale, 0.55 * scale, 0.42 * scale)
        self._paint(roof & (self.y < foot - 0.6 * scale), CAR, colour * 0.9)
        glass = self._ellipse(x, foot - 0.65 * scale, 0.45 * scale, 0.32 * scale)
        self._paint(glass & (self.y < foot - 0.65 * scale), CAR, (0.15, 0.18, 0.22))
        for side in (-1, 1):
            wheel = self._ellipse(x + side * 0.5 * scale, foot, 0.16 * scale, 0.2 * scale)
            self._paint(wheel, CAR, (0.08, 0.08, 0.08))
            light = self._ellipse(
                x + side * 0.55 * scale, foot - 0.45 * scale, 0.1 * scale, 0.08 * scale
            )
            self._paint(light, CAR, (0.95, 0.85, 0.6) if lane > 0 else (0.8, 0.1, 0.1))

    def _pedestrian(self, depth):
        x, foot, scale = self._place(self._beside(0.1, 1.1), depth)
        legs = self._box(x - 0.14 * scale, x + 0.14 * scale, foot - 0.6 * scale, foot)
        self._paint(legs, PEDESTRIAN, self._tint((0.15, 0.15, 0.25), 0.05))
        coat = self._ellipse(x, foot - 0.78 * scale, 0.22 * scale, 0.36 * scale)
        self._paint(coat, PEDESTRIAN, self._tint((0.6, 0.3, 0.3), 0.2))
        head = self._ellipse(x, foot - 1.22 * scale, 0.13 * scale, 0.15 * scale)
        self._paint(head, PEDESTRIAN, self._tint((0.75, 0.55, 0.45), 0.08))

    def _bonnet(self):
        bonnet = self._ellipse(
            self.width / 2, self.height * 1.02, self.width * 0.45, self.height * 0.1
        )
        self._paint(bonnet, UNLABELLED, self._tint((0.25, 0.25, 0.3), 0.1), 0.02)

    def _expose(self):
        """Light, contrast and the noise of the sensor."""
        light = self.rng.uniform(0.7, 1.15) * self.rng.uniform(0.93, 1.07, 3)
        noisy = self.image * light + self.rng.normal(0, 0.035, self.image.shape)
        return (np.clip(noisy, 0, 1) * 255).astype(np.uint8)
