"""When to try again to move gradients before a script has taken its step."""

from __future__ import annotations

__all__ = ["LONGEST_PAUSE", "EarlyPause"]

LONGEST_PAUSE = 256
"""Maximum number of iterations for which gradients are not moved early."""


class EarlyPause:
    """Suspends the early moving of gradients for a while, each time that a script has changed what was moved.

    A script that clips its gradients after the backward pass changes them in every iteration, so moving them early
    saves no time. Each pause is twice as long as the one before, up to `LONGEST_PAUSE`, until nothing has changed.

    >>> pause = EarlyPause()
    >>> pause.ended(changed=True)
    >>> pause.is_on
    True
    >>> pause.ended(changed=False)
    >>> pause.is_on
    False
    """

    def __init__(self) -> None:
        self._left = 0  # the number of iterations for which the pause still lasts
        self._next = 1

    @property
    def is_on(self) -> bool:
        """True if gradients are not moved early in the current iteration."""
        return self._left > 0

    def ended(self, *, changed: bool) -> None:
        """Record the end of an iteration.

        Args:
            changed: True if the script has changed a gradient after it was moved.
        """
        if changed:
            self._left = self._next
            self._next = min(2 * self._next, LONGEST_PAUSE)
        elif self._left:
            self._left -= 1
        else:
            self._next = 1
