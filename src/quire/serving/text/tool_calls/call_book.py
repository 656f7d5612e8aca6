"""Numbers the calls of one answer, limits their number, and drops repeated ones."""

from __future__ import annotations

from collections.abc import Callable, Collection

from quire.serving.text.parts import CallArguments, CallBegun, Part


class CallBook:
    """Converts the calls that a reader finds into parts.

    A call with the name and arguments of an earlier one is dropped. While a call may still equal an earlier one it is
    held back; the first different character releases it. Calls beyond `limit` are dropped too. With `known`, only these
    names are calls.
    """

    def __init__(
        self,
        make_id: Callable[[], str],
        *,
        limit: int | None = None,
        known: Collection[str] | None = None,
        must_call: bool = False,
    ) -> None:
        self._make_id, self._limit, self.known, self._must_call = make_id, limit, known, must_call
        self._made: list[tuple[str, str]] = []  # names and arguments of the completed calls
        self._name = self._given_id = ""
        self._ids: set[str] = set()  # that the model gave
        self._pieces: list[str] | None = None  # arguments of the current call so far; None: it is dropped
        self._alike: list[str] = []  # arguments of earlier calls that may equal those of the current one
        self._num_held = 0  # characters of arguments that are held back
        self._is_shown = False
        self._num_shown = 0
        self.has_calls = False  # including calls that are held back or dropped
        self.has_repeats = False

    @property
    def expects_calls(self) -> bool:
        """Whether an incomplete mark at the end of the answer is certainly a mark and not text."""
        return self._must_call or self.has_calls

    def knows(self, name: str) -> bool:
        return self.known is None or name in self.known

    def begin(self, name: str, parts: list[Part], call_id: str = "") -> None:
        """Begin a call. `call_id` is the id that the model gave it, if any."""
        self.has_calls, self._is_shown, self._name, self._given_id = True, False, name, call_id
        self._num_held, self._alike = 0, [arguments for made, arguments in self._made if made == name]
        self._pieces = [] if self._limit is None or self._num_shown < self._limit else None
        if self._pieces is not None and not self._alike:
            self._show(parts)

    def add_arguments(self, text: str, parts: list[Part]) -> None:
        """Add the next piece of the current call's arguments."""
        if not text or self._pieces is None:
            return
        self._pieces.append(text)
        if self._is_shown:
            parts.append(CallArguments(self._num_shown - 1, text))
            return
        self._alike = [arguments for arguments in self._alike if arguments.startswith(text, self._num_held)]
        self._num_held += len(text)
        if not self._alike:
            self._show(parts)

    def end(self, parts: list[Part]) -> None:
        """End the current call."""
        if self._pieces is None:
            return
        arguments = "".join(self._pieces)
        if not self._is_shown:
            if arguments in self._alike:
                self.has_repeats, self._pieces = True, None
                return
            self._show(parts)
        self._made.append((self._name, arguments))
        self._pieces = None

    def _show(self, parts: list[Part]) -> None:
        call_id = self._given_id if self._given_id not in self._ids else ""
        self._ids.add(call_id)
        parts.append(CallBegun(self._num_shown, call_id or self._make_id(), self._name))
        self._is_shown = True
        self._num_shown += 1
        if text := "".join(self._pieces or ()):
            parts.append(CallArguments(self._num_shown - 1, text))
