"""Takes the images out of conversations: the chat template writes a placeholder where each of them stood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.serving.text.chat_messages import IMAGE_PARTS, PLACEHOLDER, unknown_of_image
from quire.serving.vision.image_reader import ImageBudget, ImageReader
from quire.serving.vision.sources import MediaSources
from quire.types.errors import InvalidRequest
from quire.types.images import PromptImage

_FORM = 'send {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'


@dataclass(frozen=True, slots=True)
class ImageTaker:
    """Reads the images of messages, wherever their bytes are."""

    reader: ImageReader
    sources: MediaSources

    def take(self, messages: Sequence[Any]) -> tuple[list[Any], tuple[PromptImage, ...]]:
        """Return the messages with placeholders in place of image parts, and the images in order. What is wrong with
        messages besides is left to whoever renders them. Raises InvalidRequest."""
        images: list[PromptImage] = []
        budget = self.reader.make_budget()
        taken = [self._take(f"messages[{place}]", message, images, budget) for place, message in enumerate(messages)]
        return taken, tuple(images)

    def _take(self, where: str, message: Any, images: list[PromptImage], budget: ImageBudget) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message
        parts = []
        for place, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == PLACEHOLDER["type"]:
                raise InvalidRequest(f"{where}.content[{place}]", "has no image", _FORM)
            if kind in IMAGE_PARTS:
                if len(images) == self.reader.limits.max_images:
                    reason = f"is one image more than the {len(images)} that a request may have"
                    raise InvalidRequest(f"{where}.content[{place}]", reason, "send fewer")
                images.append(self._read(f"{where}.content[{place}]", part, budget))
                parts.append(PLACEHOLDER)
            else:
                parts.append(part)
        return {**message, "content": parts}

    def _read(self, where: str, part: Mapping[str, Any], budget: ImageBudget) -> PromptImage:
        kind = str(part["type"])
        for _, _, error in unknown_of_image(where, part):
            raise error
        if kind == "image_pil":
            return self.reader.prepare(f"{where}.image_pil", part.get("image_pil"), budget)
        given, field = part.get("image_url"), f"{where}.image_url"
        if isinstance(given, Mapping):
            given, field = given.get("url"), f"{field}.url"
        if given is None:
            raise InvalidRequest(field, "is missing", _FORM)
        return self.reader.decode(field, self.sources.read(field, given), budget)
