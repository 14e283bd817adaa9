"""The scenes of the demo but the faults, in the order in which they are played.

Every number on the screen was measured in this run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.lowlevel

from delta_prop.demo import system
from delta_prop.demo.console import Console, blank_unprintable, display_width, format_size, truncate
from delta_prop.demo.corpus import (
    PARAGRAPH_CHARACTERS_MIN,
    Document,
    ParseFailed,
    count_short_paragraphs,
    documents_of,
)
from delta_prop.demo.embedding import DIMENSION
from delta_prop.demo.library import DOCUMENTS_MAX, NAMESPACE, Library, append_words
from delta_prop.demo.system import ScanResult, Workspace
from delta_prop.demo.verify import Verdict, corrupt, verify
from delta_prop.demo.wiring import Wiring, number_bytes
from delta_prop.platform.ports import Timer
from delta_prop_wire.delta import Delta
from delta_prop_wire.errors import UsageError
from delta_prop_wire.topics import kind_name

SEARCHES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("random sample without replacement", ("random:sample",)),
    ("walk a directory tree", ("os:walk",)),
    ("compress data with gzip", ("gzip:compress",)),
    ("run a subprocess and capture its output", ("subprocess:run",)),
    ("parse command line arguments", ("argparse:ArgumentParser", "argparse:ArgumentParser.parse_args")),
    ("least recently used cache", ("functools:lru_cache",)),
    ("base64 encode bytes", ("base64:b64encode", "base64:encodebytes")),
    ("shuffle a list in place", ("random:shuffle",)),
    ("temporary file", ("tempfile:TemporaryFile", "tempfile:NamedTemporaryFile")),
    ("quote a shell argument", ("shlex:quote",)),
)
"""Queries for the standard library, and the expected results; nothing is tuned to them."""

WORKSPACE_BYTES, WORKSPACE_BYTES_PER_DOCUMENT = 2_000_000, 36_000
"""Estimated size of the temporary folder: a fixed part, and a part for each document.

It holds the published lines, and three files of vectors with write-ahead logs.
"""
HITS_MAX = 3
EDITED_DOCUMENT = "random:sample"
EDIT_WORDS = "lottery raffle"
_BATCH = 256
_OWN_SEARCHES = 5
_OWN_SEARCH_WORDS = 8
_EDIT_TRIES_MAX = 50
_CHANGES_SHOWN_MAX = 10
_QUERY_COLUMNS = 42
_WORDS = re.compile(r"[^\W_][\w'-]*")


@dataclass(slots=True)
class Play:
    """Shared state of the scenes.

    `folder`: the folder of the texts. `is_own`: the folder is the user's, and is never written to.
    `facts`: the results for `--json`.
    """

    console: Console
    workspace: Workspace
    folder: Path
    is_own: bool
    timer: Timer
    command: str = "delta-prop"
    library: Library = field(default_factory=Library)
    last_scan: ScanResult = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def scan(self) -> ScanResult:
        """Scan the texts as they are now: the user's own, or the copies."""
        return system.scan(
            *(
                (self.folder, system.USER_FILTER)
                if self.is_own
                else (self.workspace.texts, system.COPY_FILTER)
            )
        )

    def read(self, path: str) -> str | None:
        """Read a text as it is now; None if that fails."""
        return system.read(self.folder if self.is_own else self.workspace.texts, path)


async def read_scene(play: Play) -> None:
    """Read all texts, copy those that may be edited, add their documents.

    Raises UsageError if there are no documents.
    """
    console, library = play.console, play.library
    too_large: list[str] = []
    files = system.scan(play.folder, system.USER_FILTER if play.is_own else system.LIBRARY_FILTER, too_large)
    unread = empty = short = 0  # files, files, paragraphs
    for number, path in enumerate(files, 1):
        text = system.read(play.folder, path)
        try:
            document_count = library.add(path, text) if text is not None else 0
        except ParseFailed:
            document_count, text = 0, None
        unread += text is None
        empty += text is not None and not document_count
        short += 0 if text is None else count_short_paragraphs(path, text)
        if text is not None and document_count and not play.is_own:
            play.workspace.copy(path, text)
        console.progress(number, len(files), f"files read, {len(library.documents):,} documents")
        await anyio.lowlevel.checkpoint()
    console.end_progress()
    left_out = [
        f"{count:,} {noun}{'s' * (count != 1)} left out: {reason}"
        for count, noun, reason in (
            (len(too_large), "file", f"above {format_size(system.FILE_BYTES_MAX)}"),
            (unread, "file", "not UTF-8, or not Python as this version knows it"),
            (empty, "file", f"no description, no paragraph of {PARAGRAPH_CHARACTERS_MIN} characters"),
            (short, "paragraph", f"shorter than {PARAGRAPH_CHARACTERS_MIN} characters"),
            (library.skipped_count, "document", f"the demo takes {DOCUMENTS_MAX:,}"),
        )
        if count
    ]
    if not library.documents:
        raise UsageError(
            f"{play.folder} has no text to index: name a folder with documented .py, or .md, .rst, .txt files"
            + "".join(f"; {line}" for line in left_out)
        )
    _check_free_space(play)
    library.learn()
    play.last_scan = play.scan()
    play.facts |= {"files": len(files), "documents": len(library.documents)}
    console.line(f"  {len(library.documents):,} documents in {len(files):,} files below {play.folder}")
    for line in left_out:
        console.line(f"  {line}")


async def index_scene(play: Play, wiring: Wiring) -> None:
    """Publish the vectors of all documents, as columns; show the rate, and each sink's lag."""
    console, ids = play.console, list(play.library.documents)
    started = play.timer.now()
    for start in range(0, len(ids), _BATCH):
        batch_ids = ids[start : start + _BATCH]
        await wiring.create(batch_ids, play.library.vectors(batch_ids))
        rate = wiring.delta_count / max(play.timer.now() - started, 1e-9)
        lags = ", ".join(f"{name} lags {lag:,}" for name, lag in wiring.lags().items() if lag)
        status = f"{rate:,.0f} deltas/s  {format_size(wiring.number_bytes)}  {lags or 'no sink lags'}"
        console.progress(wiring.delta_count, len(ids), status)
        await anyio.lowlevel.checkpoint()
    published_s = play.timer.now() - started
    await wiring.wait_settled()
    settled_s = play.timer.now() - started
    console.end_progress()
    rate = len(ids) / settled_s
    amount = f"{wiring.delta_count:,} deltas, {format_size(wiring.number_bytes)}"
    console.line(f"  {amount}: embedded and published in {published_s:.1f} s,")
    console.line(
        f"  at every sink and on disk after {settled_s:.1f} s; {rate:,.0f} deltas/s from text to disk"
    )
    play.facts |= {"index_s": round(settled_s, 3), "deltas_per_s": round(rate)}


async def search_scene(play: Play, wiring: Wiring) -> None:
    """Search the index with ten fixed queries for the standard library, or with words of the user's texts."""
    searches = _sample_searches(play.library) if play.is_own else SEARCHES
    found_count = 0
    for query, expected in searches:
        hits, took_s = search(play, wiring, query)
        found_count += any(hit in expected for hit in hits)
        _show_hits(play.console, query, hits, took_s, expected)
        await anyio.lowlevel.checkpoint()
    expected_hit = "the text they are from" if play.is_own else "the function one hopes for"
    play.console.line(f"  {found_count} of {len(searches)} found {expected_hit} among the first {HITS_MAX}")
    play.facts |= {"searches": len(searches), "searches_found": found_count}


def search(play: Play, wiring: Wiring, query: str) -> tuple[list[str], float]:
    """Return the ids of the nearest documents, and the duration of the search in seconds."""
    started = play.timer.now()
    hits = wiring.index.search(play.library.embedding.query(query), HITS_MAX, NAMESPACE, "pivot")
    return [hit.vector_id for hit in hits if hit.score > 0], play.timer.now() - started


async def edit_scene(play: Play, wiring: Wiring) -> None:
    """Edit a docstring in the temporary folder and follow the delta until it is visible in the index."""
    console = play.console
    edit = _choose_edit(play)
    if edit is None:
        console.line("  no document here can be edited by appending two words; nothing was edited")
        return
    document, path, text = edit
    before, _ = search(play, wiring, EDIT_WORDS)
    play.workspace.copy(path, text)
    console.line(
        f'  "{EDIT_WORDS}" added to {blank_unprintable(document.id)}, in {play.workspace.texts / path}'
    )
    deltas = play.library.edit(path, text)
    if not play.is_own:
        play.last_scan = play.scan()
    await publish_changes(play, wiring, deltas)
    after, took_s = search(play, wiring, EDIT_WORDS)
    console.line(
        f"  the delta's numbers: {format_size(number_bytes(deltas[0]))} instead of {4 * DIMENSION:,} B"
    )
    console.line(
        f"  before the edit, a search for these words found {before[0] if before else 'nothing'} first; now:"
    )
    _show_hits(console, EDIT_WORDS, after, took_s, (document.id,))
    play.facts["edit"] = {
        "id": document.id,
        "bytes": number_bytes(deltas[0]),
        "found_first": after[:1] == [document.id],
    }


async def publish_changes(play: Play, wiring: Wiring, deltas: Sequence[Delta]) -> None:
    """Publish the deltas of an edit one by one; show the listener's line for each."""
    for number, delta in enumerate(deltas):
        started = play.timer.now()
        ack = await wiring.publish([delta])
        await wiring.propagator.wait_visible(ack, sinks=["index"])
        took_ms = (play.timer.now() - started) * 1000
        await wiring.propagator.wait_visible(ack, sinks=["subscriber"])
        assert wiring.listener.last is not None
        received = wiring.listener.last.delta
        if number < _CHANGES_SHOWN_MAX:
            numbers = received.operation.values
            parts = [
                f"{kind_name(received.operation.kind)} {blank_unprintable(received.vector_id)}",
                f"{0 if numbers is None else len(numbers):,} dims",
                format_size(number_bytes(received)),
                f"visible in index after {took_ms:.1f} ms",
            ]
            play.console.line(f"  subscriber: {'  '.join(parts)}")
        play.facts.setdefault("visible_ms", round(took_ms, 3))
    if len(deltas) > _CHANGES_SHOWN_MAX:
        play.console.line(f"  subscriber: and {len(deltas) - _CHANGES_SHOWN_MAX:,} more")


def answer_query(play: Play, wiring: Wiring, query: str) -> None:
    """Search for a typed query."""
    hits, took_s = search(play, wiring, query)
    if not hits:
        play.console.line("  nothing has any of these words")
        return
    play.console.line(play.console.style("dim", f"  {took_s * 1000:.1f} ms"))
    for hit in hits:
        document = play.library.documents.get(hit)
        if document is not None:
            first_line = blank_unprintable(document.text.strip().partition("\n")[0])
            line = f"  {play.console.style('bold', blank_unprintable(hit))}  {first_line}"
            play.console.line(play.console.fit(line))


# --- helpers


def _check_free_space(play: Play) -> None:
    needed = WORKSPACE_BYTES + len(play.library.documents) * WORKSPACE_BYTES_PER_DOCUMENT
    free = play.workspace.free_bytes
    if free < needed:
        raise UsageError(
            f"{play.workspace.root} has {format_size(free)} free, but this demo needs about "
            f"{format_size(needed)}: free some, or name another folder with TMPDIR=DIR"
        )


def _sample_searches(library: Library) -> list[tuple[str, tuple[str, ...]]]:
    """Return the first words of some documents, spread over all, each with the id that they should find."""
    searches: list[tuple[str, tuple[str, ...]]] = [
        (" ".join(words[:_OWN_SEARCH_WORDS]), (document.id,))
        for document in library.documents.values()
        if len(words := _WORDS.findall(document.text)) >= _OWN_SEARCH_WORDS
    ]
    step = max(len(searches) // _OWN_SEARCHES, 1)
    return searches[step // 2 :: step][:_OWN_SEARCHES]


def _show_hits(
    console: Console, query: str, hits: Sequence[str], took_s: float, expected: Sequence[str]
) -> None:
    """Show a search on one line if that fits, else the hits on a line of their own; expected hits in bold."""
    listed = "   ".join(
        console.style("bold", blank_unprintable(hit)) if hit in expected else blank_unprintable(hit)
        for hit in hits
    )
    listed = listed or "nothing"
    shown = truncate(query, _QUERY_COLUMNS)
    start = f"  {shown}{' ' * (_QUERY_COLUMNS - display_width(shown))}  {f'{took_s * 1000:.1f} ms':>8}"
    if display_width(f"{start}  {listed}") < console.columns:
        console.line(f"{start}  {listed}")
    else:
        console.line(start)
        console.line(console.fit(f"      {listed}"))


def _choose_edit(play: Play) -> tuple[Document, str, str] | None:
    """Choose a document to edit; return it, the path of its file, and the file's edited text.

    Returns None if no document can be edited without a change of another one.
    """
    library = play.library
    first = [EDITED_DOCUMENT] if EDITED_DOCUMENT in library.documents and not play.is_own else []
    for document_id in [*first, *list(library.documents)[:_EDIT_TRIES_MAX]]:
        document, path = library.documents[document_id], library.file_of(document_id)
        text = play.read(path)
        edited = None if text is None else append_words(text, document, EDIT_WORDS)
        if (
            edited is not None
            and edited != text
            and _changes_only_document(library, path, edited, document_id)
        ):
            return document, path, edited
    return None


def _changes_only_document(library: Library, path: str, text: str, document_id: str) -> bool:
    try:
        documents = documents_of(path, text)
    except ParseFailed:
        return False
    changed = [document.id for document in documents if library.documents.get(document.id) != document]
    # Lines below the edit do not move: it adds words, not lines.
    return changed == [document_id]


# --- the end


async def verify_scene(play: Play, wiring: Wiring, corrupted: str | None) -> list[Verdict]:
    """Compare every sink with the published lines; first plant a fault in the sink `corrupted`, if given."""
    console = play.console
    await wiring.wait_settled()
    if corrupted is not None:
        if corrupted not in wiring.sinks():
            raise UsageError(
                f"--corrupt {corrupted}: no such sink, since no document here could be edited: choose another"
            )
        ids = list(play.library.documents)
        corrupt(corrupted, wiring, play.workspace, (NAMESPACE, ids[len(ids) // 2]))
        corruption = "one line was removed from" if corrupted == "audit" else "one wrong row was planted in"
        console.line(f"  {corruption} {corrupted}")
    verdicts = await verify(wiring, play.workspace)
    for verdict in verdicts:
        unit = "deltas" if verdict.sink in ("subscriber", "audit") else "rows"
        result = console.style("green", "identical")
        if not verdict.is_identical:
            result = (
                console.style("red", f"{verdict.wrong_count:,} WRONG")
                + f"  {blank_unprintable(verdict.fault)}"
            )
        console.line(f"  verify {verdict.sink:<10}  {verdict.row_count:>7,} {unit:<6}  {result}")
    play.facts["verify"] = {
        verdict.sink: "identical" if verdict.is_identical else blank_unprintable(verdict.fault)
        for verdict in verdicts
    }
    return verdicts


def end_scene(play: Play, wiring: Wiring, elapsed_s: float) -> None:
    """Show the totals, and a table of the sinks."""
    console, library = play.console, play.library
    statistics = wiring.propagator.statistics()
    console.line(
        f"  {len(library.documents):,} documents, {wiring.delta_count:,} deltas, "
        f"{format_size(wiring.number_bytes)}, {elapsed_s:.1f} s in all"
    )
    console.line(console.style("dim", "  sink          deltas     lag   publish to visible, p50"))
    sinks = {}
    for name in wiring.sinks():
        feed, p50_ms = statistics.sinks[name], wiring.latencies.p50_ms(name)
        latency = "–" if p50_ms is None else f"{p50_ms:.1f} ms"
        console.line(f"  {name:<10}  {feed.applied_deltas:>8,}  {feed.lag:>6,}   {latency:>23}")
        sinks[name] = {
            "deltas": feed.applied_deltas,
            "lag": feed.lag,
            "p50_ms": None if p50_ms is None else round(p50_ms, 3),
        }
    play.facts |= {
        "deltas": wiring.delta_count,
        "bytes": wiring.number_bytes,
        "elapsed_s": round(elapsed_s, 2),
        "sinks": sinks,
    }


def next_scene(play: Play) -> None:
    """Show commands to try next."""
    console, command = play.console, play.command
    console.line("  next:")
    console.line(f"  {command} demo                       edit and search by hand")
    console.line(f"  {command} demo --path DIR            the same with your own text")
    console.line(f"  {command} demo --once --corrupt index  plant a wrong row and see it found")
