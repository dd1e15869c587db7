"""The speed of a run, for its log."""

from time import monotonic

# A shorter time would measure how the host and the devices take turns.
_SECONDS = 10.0


class Speed:
    """Examples per second, the mean over at least ten seconds of the run.

    These seconds have all that the run does: reading of batches, evaluations and saves too.
    """

    def __init__(self) -> None:
        self.examples, self.since = 0, 0.0
        self.has_begun = False

    def add(self, examples: int) -> dict[str, float]:
        """Count a step that has ended; return the speed every ten seconds, else {}.

        The first step only starts the clock, because it compiles.
        """
        now = monotonic()
        if not self.has_begun:
            self.has_begun, self.since = True, now
            return {}
        self.examples += examples
        passed = now - self.since
        if passed < _SECONDS or not self.examples:
            return {}
        speed = self.examples / passed
        self.examples, self.since = 0, now
        return {"examples_per_second": speed}
