"""Images of rows: the positions of their tokens (time, height, width), and the vectors that the vision tower computes
for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.config.vision import ImageLimits, Vision, tiles_at_once
from quire.runtime.layers.step import Features, ImageBlock
from quire.runtime.layers.vision import TileTower, VisionTower
from quire.runtime.sampling.samples import Longs
from quire.runtime.transfer import Uploader
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage
from quire.types.step import Chunk, NewRow, StepPlan

NUM_AXES = 3  # time, height, width


class ImageRows:
    """Holds the images of rows. Rows without images cost nothing.

    An image's vectors are computed in the first step that needs some of them, and cached by the image's content hash.
    The cache keeps those of images that a row has computed only in part, and the most recently used others, up to
    `capacity` tokens in total. Later pipeline stages have no tower, because vectors replace embeddings.
    """

    def __init__(
        self, tower: VisionTower | None, vision: Vision, num_rows: int, limits: ImageLimits | None,
        device: torch.device, uploader: Uploader, tables: tuple[Tensor, ...] = (), block_size: int = 1,
    ) -> None:  # fmt: skip
        """`tables`: all block tables [rows, blocks]. `limits`: None: as few vectors are kept as possible."""
        self._tower, self._vision, self._uploader = tower, vision, uploader
        self._capacity = 0 if limits is None else limits.max_kept_tokens
        self._at_once = 1 if limits is None or not vision.grid.fixed else tiles_at_once(vision, limits)
        self._tables, self._block_size = tables, block_size
        self.shifts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._host_shifts: Longs = np.zeros(num_rows, dtype=np.int64)  # position minus index of tokens after the prompt
        self._axes: dict[int, Longs] = {}  # by row: positions [3, tokens] up to the end of its last image
        self._images: dict[int, tuple[PromptImage, ...]] = {}  # by row: images whose tokens are not all computed
        self._begun: dict[int, bytes] = {}  # by row: key of the image that is partly computed
        self._vectors: OrderedDict[bytes, Tensor] = OrderedDict()  # by image key, in the order of last use
        self.num_encoded = 0  # images encoded so far

    @property
    def has_axes(self) -> bool:
        """Whether positions of image tokens have three axes."""
        return self._vision.has_axes

    # ------------------------------------------------------------------------------------------------------ rows
    def place(self, news: Sequence[NewRow]) -> None:
        """Store the images of new rows, and their position shifts on the device."""
        changed = [new for new in news if new.images or self._host_shifts[new.row]]
        for new in news:
            self._forget(new.row)
            if new.images:
                self._images[new.row] = new.images
            if new.images and self._vision.has_axes:
                self._axes[new.row], self._host_shifts[new.row] = axes_of(new.images)
        if changed:
            rows = np.array([new.row for new in changed], dtype=np.int64)
            where, shifts = self._uploader.upload(rows, self._host_shifts[rows])
            self.shifts.index_copy_(0, where, shifts)

    def release(self, rows: Sequence[int]) -> None:
        """Forget the images of rows that are free. Their shifts stay on the device until the row is used again."""
        for row in rows:
            self._axes.pop(row, None)
            self._images.pop(row, None)
            self._begun.pop(row, None)

    def _forget(self, row: int) -> None:
        self.release((row,))
        self._host_shifts[row] = 0

    def check_image(self, image: PromptImage) -> None:
        """Raise InvalidRequest for an image whose pixel data does not match its size."""
        if not self._vision.grid.fits(image):
            raise InvalidRequest("images", "an image's pixels do not match its size", "resize it as the model asks")

    # -------------------------------------------------------------------------------------------------- positions
    def axes(
        self, token_rows: Longs, positions: Longs, spans: Longs, *, whole: bool
    ) -> Longs:  # [3, tokens] or [1, tokens]
        """Return the positions of tokens, given their rows and their indices in the rows; `spans` are the chunks among
        them (see `find_spans`). The result has three lines (time, height, width). It has one line if no chunk has an
        image, unless `whole`. Negative rows are padding."""
        shifted = positions + np.where(token_rows < 0, 0, self._host_shifts[token_rows])
        known = [(span, self._axes[span[3]]) for span in spans.tolist() if span[3] in self._axes]
        inside = [(span, axes[:, span[1] : span[1] + span[2]]) for span, axes in known if span[1] < axes.shape[1]]
        if not whole and not inside:
            return shifted[None]
        found = np.repeat(shifted[None], NUM_AXES, axis=0)
        for (begin, *_), axes in inside:
            found[:, begin : begin + axes.shape[1]] = axes
        return found

    # -------------------------------------------------------------------------------------------------- vectors
    def features(self, plan: StepPlan) -> Features | None:
        """Return the vectors of all image tokens that the plan's chunks compute, or None if there are none. Without a
        tower, return only the images whose tokens see all of their image, or None if there are none."""
        if not self._images:
            return None
        if self._tower is not None:
            self._encode(self._tower, plan)
        places, vectors, begin = [], [], len(plan.decode_rows)
        blocks: list[ImageBlock] = []
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            images = self._images.get(chunk.row, ())
            for image in images:
                first, last = max(image.start, chunk.start), min(image.end, end)
                if first >= last:
                    continue
                if self._vision.grid.is_whole:
                    blocks.append(self._block_of(chunk, image, begin))
                if self._tower is not None:
                    self._begun[chunk.row] = image.key
                    places.append(_placeholders(image, first, last) + (begin - chunk.start))
                    span = slice(*(image.placeholders_before(index - image.start) for index in (first, last)))
                    vectors.append(self._vectors[image.key][span])
            if images:
                self._images[chunk.row] = rest = tuple(image for image in images if image.end > end)
                if not rest or rest[0].start >= end:
                    self._begun.pop(chunk.row, None)
            begin += chunk.num_tokens
        self._images = {row: images for row, images in self._images.items() if images}
        self._evict()
        if not places:
            return Features(self.shifts[:0], self.shifts[:0], blocks=tuple(blocks)) if blocks else None
        own, *deep = torch.cat(vectors).chunk(1 + len(self._vision.deep), dim=1)
        return Features(self._uploader.upload(np.concatenate(places))[0], own, tuple(deep), tuple(blocks))

    def _block_of(self, chunk: Chunk, image: PromptImage, begin: int) -> ImageBlock:
        """Return where an image is that a chunk computes whole. `begin`: the chunk's first token in the batch."""
        assert chunk.start <= image.start
        assert image.end <= chunk.start + chunk.num_tokens
        count = -(-image.end // self._block_size)
        tables = tuple(table[chunk.row, :count].long() for table in self._tables)
        return ImageBlock(begin + image.start - chunk.start, image.start, image.num_tokens, tables)

    def _encode(self, tower: VisionTower, plan: StepPlan) -> None:
        """Compute the vectors of all images that the plan's chunks need, and mark them as used."""
        missing: dict[bytes, PromptImage] = {}
        for chunk in plan.chunks:
            for image in self._images.get(chunk.row, ()):
                if image.start >= chunk.start + chunk.num_tokens or image.end <= chunk.start:
                    continue
                if image.key in self._vectors:
                    self._vectors.move_to_end(image.key)
                else:
                    missing[image.key] = image
        if isinstance(tower, TileTower):
            self._encode_tiles(tower, list(missing.values()))
        else:
            unit = self._vision.grid.unit
            for key, image in missing.items():
                pixels = self._pixels(image).view(image.rows * unit, image.columns * unit, 3)
                self._vectors[key] = tower(pixels)
        self.num_encoded += len(missing)

    def _encode_tiles(self, tower: TileTower, images: Sequence[PromptImage]) -> None:
        """Encode images of one or more tiles each, as many tiles together as memory is planned for."""
        side = self._vision.grid.tile_side
        tiles = [self._pixels(image).view(-1, side, side, 3) for image in images]
        batches = torch.split(torch.cat(tiles), self._at_once) if tiles else ()
        found = [tower(batch) for batch in batches]
        if found:
            parts = torch.split(torch.cat(found), [len(each) for each in tiles])
            for image, vectors in zip(images, parts, strict=True):
                self._vectors[image.key] = tower.join(vectors, image.size).clone()

    def _pixels(self, image: PromptImage) -> Tensor:
        return torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).to(self.shifts.device)

    def forget_vectors(self) -> None:
        """Forget all vectors: the tower's weights change. They are computed again when they are needed."""
        self._vectors.clear()

    def _evict(self) -> None:
        """Drop the least recently used vectors until the capacity is met, except those of partly computed images."""
        held = sum(map(len, self._vectors.values()))
        if held <= self._capacity:
            return
        for key in [key for key in self._vectors if key not in self._begun.values()]:
            if held <= self._capacity:
                return
            held -= len(self._vectors.pop(key))

    def check(self) -> None:
        """Waits for the device."""
        assert self._begun.keys() <= self._images.keys()
        assert self._images.keys() <= self._axes.keys() or not self._vision.has_axes
        rows = np.array(sorted(self._axes), dtype=np.int64)
        assert (self.shifts.cpu().numpy()[rows] == self._host_shifts[rows]).all()


def _placeholders(image: PromptImage, first: int, last: int) -> Longs:
    """Return the indices in the prompt of the placeholders among tokens first .. last of an image."""
    found = np.arange(first, last, dtype=np.int64)
    return found[(found - image.start) % (image.columns + image.gap) < image.columns] if image.gap else found


def axes_of(images: Sequence[PromptImage]) -> tuple[Longs, int]:
    """Return the positions of a prompt's tokens up to the end of its last image [3, tokens], and the difference between
    position and index of later tokens.

    All tokens of an image have the same time; height and width count its rows and columns from the position where it
    begins. The text after it continues behind the larger of the two.
    """
    parts: list[Longs] = []
    index = position = 0
    for image in images:
        text = image.start - index
        parts.append(np.repeat(np.arange(position, position + text, dtype=np.int64)[None], NUM_AXES, axis=0))
        begin = position + text
        row, column = np.divmod(np.arange(image.num_tokens, dtype=np.int64), image.columns)
        parts.append(begin + np.stack((np.zeros_like(row), row, column)))
        index, position = image.end, begin + max(image.rows, image.columns)
    return np.concatenate(parts, axis=1), position - index
