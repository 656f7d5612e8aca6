"""Takes the images out of messages and replaces them by parts for which the chat template writes placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from quire.serving.text.chat_messages import IMAGE_PARTS, PLACEHOLDER, ForeignImage, unknown_of_image
from quire.serving.vision.image_reader import ImageBudget, ImageReader, TooManyImages
from quire.serving.vision.replacements import with_replacements
from quire.serving.vision.sources import MediaSources
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage

_FORM = 'send {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
Taken = tuple[Any, tuple[PromptImage, ...]]  # a message with placeholders, and its images


@dataclass(frozen=True, slots=True)
class ImageTaker:
    """Reads the images of messages from their sources."""

    reader: ImageReader
    sources: MediaSources

    def take(self, messages: Sequence[Any]) -> tuple[list[Any], tuple[PromptImage, ...]]:
        """Return the messages with placeholder parts instead of images, and the images in order. Other errors in
        messages are left to the renderer. Raises InvalidRequest."""
        budget = self.reader.make_budget()
        pairs = [self._take(f"messages[{place}]", message, budget) for place, message in enumerate(messages)]
        return [message for message, _ in pairs], tuple(chain.from_iterable(images for _, images in pairs))

    def with_replacements(self, text: str, images: Sequence[PromptImage]) -> str:
        """Return the text of a rendered conversation with images in the form that the model was trained on."""
        return with_replacements(text, self.reader.limits.grid, images, "messages")

    def take_last(self, messages: Sequence[Any], num_first: int) -> tuple[dict[int, Taken], int]:
        """Take the images of the first `num_first` messages, and of the last messages while the image limits of a
        request allow. Returns the taken messages with their images by index, and the index of the first of the last
        messages. Raises InvalidRequest."""
        budget = self.reader.make_budget()
        taken: dict[int, Taken] = {}
        for place in range(num_first):
            taken[place] = self._take(f"messages[{place}]", messages[place], budget)
        for place in range(len(messages) - 1, num_first - 1, -1):
            try:
                taken[place] = self._take(f"messages[{place}]", messages[place], budget)
            except TooManyImages:
                return taken, place + 1
        return taken, num_first

    def _take(self, where: str, message: Any, budget: ImageBudget) -> Taken:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message, ()
        images: list[PromptImage] = []
        parts = []
        for place, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == PLACEHOLDER["type"]:
                raise InvalidRequest(f"{where}.content[{place}]", "has no image", _FORM)
            if kind in IMAGE_PARTS:
                block = part.block if isinstance(part, ForeignImage) else f"{where}.content[{place}]"
                budget.add_one(block)
                images.append(self._read(block, part, budget))
                parts.append(PLACEHOLDER)
            else:
                parts.append(part)
        return {**message, "content": parts}, tuple(images)

    def _read(self, where: str, part: Mapping[str, Any], budget: ImageBudget) -> PromptImage:
        kind = str(part["type"])
        for _, _, error in unknown_of_image(where, part):
            raise error
        if kind == "image_pil":
            return self.reader.prepare(f"{where}.image_pil", part.get("image_pil"), budget)
        given, field = part.get("image_url"), f"{where}.image_url"
        if isinstance(given, Mapping):
            given, field = given.get("url"), f"{field}.url"
        field = part.field if isinstance(part, ForeignImage) else field
        if given is None:
            raise InvalidRequest(field, "is missing", _FORM)
        return self.reader.decode(field, self.sources.read(field, given), budget)
