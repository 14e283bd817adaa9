"""Write the golden frames from the samples: `python -m tests.wire.write_golden`.

The frames are in `docs/protocol-golden.json` and at the end of `docs/protocol.md`. A change of these bytes
is a change of the protocol.
"""

from __future__ import annotations

import json
import re
import textwrap

from delta_prop_wire.codec import decode, encode
from delta_prop_wire.spec import FrameType
from tests.wire.samples import COMPRESSED, DOCS, SAMPLES, to_json_value

_JSON = DOCS / "protocol-golden.json"
_PAGE = DOCS / "protocol.md"
_COLUMNS = 96


def write() -> None:
    """Replace only the frames in both files."""
    golden = json.loads(_JSON.read_text(encoding="utf-8"))
    golden["frames"] = [_entry(name, encode(frame)) for name, frame in SAMPLES.items()]
    golden["compressed"] = [
        {"name": name, "type": "BATCH", "hex": raw.hex(), "is": sample}
        for name, (raw, sample) in COMPRESSED.items()
    ]
    _JSON.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    blocks = "\n".join(_block(entry) for entry in (*golden["frames"], *golden["compressed"]))
    page = _PAGE.read_text(encoding="utf-8")
    first = re.search(r"^\*\*[^*\n]+\*\* \(\w+\)$", page, re.MULTILINE)
    assert first, "the page has no golden frame"
    _PAGE.write_text(page[: first.start()] + blocks, encoding="utf-8")


def _entry(name: str, raw: bytes) -> dict[str, object]:
    return {
        "name": name,
        "type": FrameType(raw[2]).name,
        "hex": raw.hex(),
        "fields": to_json_value(decode(raw)),
    }


def _block(entry: dict[str, object]) -> str:
    lines = "\n".join(textwrap.wrap(str(entry["hex"]), _COLUMNS))
    kind = str(entry["type"]).capitalize()
    return f"**{entry['name']}** ({kind})\n\n```text\n{lines}\n```\n"


if __name__ == "__main__":
    write()
