"""The sampling parameters that a model's makers recommend, used for requests that do not set them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Recommended values of sampling parameters. None: no recommendation, so the default of SamplingParams applies.

    Raises InvalidRequest, naming the parameter, for a value that no request may have.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        checked = SamplingParams(**self.given())
        for name in self.given():
            object.__setattr__(self, name, getattr(checked, name))

    def given(self) -> dict[str, Any]:
        """Return the recommended values, by the names of SamplingParams."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}

    def params(self) -> SamplingParams:
        """Return SamplingParams with these values."""
        return SamplingParams(**self.given())

    def overridden(self, values: Mapping[str, Any]) -> SamplingDefaults:
        """Return a copy in which `values` replace these. A value of None removes the recommendation."""
        merged = {item.name: getattr(self, item.name) for item in fields(self)}
        return SamplingDefaults(**(merged | dict(values)))


DEFAULT_NAMES: tuple[str, ...] = tuple(item.name for item in fields(SamplingDefaults))
NO_DEFAULTS = SamplingDefaults()
