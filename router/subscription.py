"""What a relay may say to the worker about its sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.registry import WorkerLink


class Subscription:
    """One stream of one sequence, by the name that the worker gives its outputs in this router's session.

    A sequence that is not resumable has one stream and ends with it. A resumable one goes on: only ``cancel`` ends it
    for everybody, and only ``complete`` ends it in such a way that it can still be resumed.
    """

    def __init__(self, link: WorkerLink, name: str, *, resumable: bool) -> None:
        self.link = link
        self.name = name
        self.resumable = resumable
        self._session = link.num_welcomes
        self._left = False

    @property
    def is_cut(self) -> bool:
        """Its session has ended."""
        return self.link.num_welcomes != self._session or not self.link.is_connected

    def complete(self) -> None:
        """The answer has all it should have, as by a stop string. The worker's last word follows."""
        self.link.abort(self.name, complete=True)

    def cancel(self) -> None:
        """Somebody asked to end the request. The worker's last word follows."""
        self.link.abort(self.name)

    def more(self) -> None:
        """There is room for more of a replay."""
        self.link.more(self.name)

    def leave(self, *, delivered: bool = False) -> None:
        """The caller is through with it, or gone; nothing more is fed. What is not resumable is aborted if it runs."""
        if self._left or self.is_cut:  # in a newer session the name may be another stream's
            return
        self._left = True
        if self.resumable:
            self.link.leave(self.name, delivered=delivered)
        else:
            self.link.detach(self.name)
