"""The results of a calibration as a file that scenarios name: distributions by sink, and their machine.

Values only. Distributions of another machine are of no use, so the file names the machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from delta_prop_simulations.calibration.distributions import Distribution
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "delta-prop calibration 1"
CALL = "call"
"""The distribution of complete calls of a sink, which a scenario draws from."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """`machine`: its description, versions and date. `sinks`: the distributions of each, by subject.

    `call` is the entire `apply`; the others are parts of it, which predictions are made of.
    """

    machine: Mapping[str, str]
    sinks: Mapping[str, Mapping[str, Distribution]]

    def distribution(self, sink: str, of: str = CALL) -> Distribution:
        """Return one distribution. Raises UsageError with the known names."""
        for name, known, what in ((sink, self.sinks, "sink"), (of, self.sinks.get(sink, {}), "distribution")):
            if name not in known:
                near = get_close_matches(name, known, 1)
                raise UsageError(
                    f"the calibration has no {what} {name!r}: "
                    + (f"did you mean {near[0]!r}? " if near else "")
                    + f"give one of {', '.join(known) or 'none'}, or measure: delta-prop simulate calibrate"
                )
        return self.sinks[sink][of]

    def to_text(self) -> str:
        """Return the text of the file."""
        sinks = {
            name: {of: distribution.to_json() for of, distribution in found.items()}
            for name, found in self.sinks.items()
        }
        return json.dumps({"format": FORMAT, "machine": dict(self.machine), "sinks": sinks}) + "\n"

    @classmethod
    def from_text(cls, text: str, path: str = "the calibration") -> Calibration:
        """Read the text of a file; `path` is its name for messages. Raises UsageError."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise UsageError(f"its format is not {FORMAT!r}")
            machine = {str(name): str(value) for name, value in data["machine"].items()}
            sinks = {
                str(name): {
                    str(of): Distribution.from_json(distribution) for of, distribution in found.items()
                }
                for name, found in data["sinks"].items()
            }
        except (UsageError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{path}: not a calibration: {error}: create one: delta-prop simulate calibrate --to {path}"
            ) from None
        return cls(machine, sinks)
