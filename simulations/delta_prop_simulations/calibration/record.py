"""What a calibration has found, as a file that scenarios name: laws by sink, and which machine they are of.

Values only. Laws of another machine are of no use, so the file says which one it was.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from delta_prop_simulations.calibration.laws import Law
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "delta-prop calibration 1"
CALL = "call"
"""The law of whole calls of a sink: what a scenario draws."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """`machine`: what it is, which versions, when. `sinks`: each one's laws by what they are of.

    `call` is the whole of `apply`; other laws are parts of the way, which predictions are made of.
    """

    machine: Mapping[str, str]
    sinks: Mapping[str, Mapping[str, Law]]

    def law(self, sink: str, of: str = CALL) -> Law:
        """One law. Raises UsageError with what there is."""
        for name, known, what in ((sink, self.sinks, "sink"), (of, self.sinks.get(sink, {}), "law")):
            if name not in known:
                near = get_close_matches(name, known, 1)
                raise UsageError(
                    f"the calibration has no {what} {name!r}: "
                    + (f"did you mean {near[0]!r}? " if near else "")
                    + f"there is {', '.join(known) or 'none'} (delta-prop simulate calibrate measures)"
                )
        return self.sinks[sink][of]

    def to_text(self) -> str:
        """The file."""
        sinks = {name: {of: law.to_json() for of, law in laws.items()} for name, laws in self.sinks.items()}
        return json.dumps({"format": FORMAT, "machine": dict(self.machine), "sinks": sinks}) + "\n"

    @classmethod
    def from_text(cls, text: str, path: str = "the calibration") -> Calibration:
        """Read the file; `path` is for people. Raises UsageError."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise UsageError(f"it does not begin with the format {FORMAT!r}")
            machine = {str(name): str(value) for name, value in data["machine"].items()}
            sinks = {
                str(name): {str(of): Law.from_json(law) for of, law in laws.items()}
                for name, laws in data["sinks"].items()
            }
        except (UsageError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{path} is no calibration: {error}; make one with: delta-prop simulate calibrate --to {path}"
            ) from None
        return cls(machine, sinks)
