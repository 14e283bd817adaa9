"""The file of a calibration: the distributions of each sink, valid on one machine, and that machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from delta_prop_simulations.calibration.distributions import Distribution
from delta_prop_simulations.files import read_text, resolve_beside
from delta_prop_simulations.scenarios.sinks import ConfiguredDistribution
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop_simulations.scenarios.scenario import SinkSpec

FORMAT = "delta-prop calibration 1"
CALL = "call"
"""The name of the distribution of complete calls of a sink, from which a scenario draws."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """`machine`: the machine's description, versions and the date. `sinks`: for each sink its distributions,
    by kind.

    The kind `call` is a complete call. The other kinds are parts of a call, from which predictions are
    composed.
    """

    machine: Mapping[str, str]
    sinks: Mapping[str, Mapping[str, Distribution]]

    def distribution(self, sink: str, kind: str = CALL) -> Distribution:
        """Return one distribution. Raises UsageError with the known names."""
        distributions = self.sinks.get(sink, {})
        for name, known, noun in ((sink, self.sinks, "sink"), (kind, distributions, "distribution")):
            if name not in known:
                matches = get_close_matches(name, known, 1)
                raise UsageError(
                    f"the calibration has no {noun} {name!r}: "
                    + (f"did you mean {matches[0]!r}? " if matches else "")
                    + f"give one of {', '.join(known) or 'none'}, or measure: delta-prop simulate calibrate"
                )
        return distributions[kind]

    def to_text(self) -> str:
        """Return the text of the file."""
        sinks = {
            name: {kind: distribution.to_json() for kind, distribution in distributions.items()}
            for name, distributions in self.sinks.items()
        }
        return json.dumps({"format": FORMAT, "machine": dict(self.machine), "sinks": sinks}) + "\n"

    @classmethod
    def from_text(cls, text: str, path: str = "the calibration") -> Calibration:
        """Read the text of a file. `path`: the name of the file in messages. Raises UsageError."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise UsageError(f"its format is not {FORMAT!r}")
            machine = {str(name): str(value) for name, value in data["machine"].items()}
            sinks = {
                str(name): {
                    str(kind): Distribution.from_json(distribution)
                    for kind, distribution in distributions.items()
                }
                for name, distributions in data["sinks"].items()
            }
        except (UsageError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{path}: not a calibration: {error}: create one: delta-prop simulate calibrate --to {path}"
            ) from None
        return cls(machine, sinks)


def distribution_of(spec: SinkSpec, scenario: str) -> Distribution | ConfiguredDistribution:
    """Return the distribution of a sink's calls. `scenario`: its path, which `file` is relative to."""
    if spec.file is None:
        return ConfiguredDistribution(spec)
    path = resolve_beside(scenario, spec.file)
    return Calibration.from_text(read_text(path), path).distribution(spec.sink or spec.name)
