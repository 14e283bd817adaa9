"""Fuzzes the entrances of the native core: `./run fuzz --seconds S`. Needs cargo and a C++ compiler.

Builds `native/fuzz` with libFuzzer, with assertions and checks of overflow, and starts from the golden frames
of the protocol. Exit status: 0: no finding; 1: a finding, whose input is kept; 77: it cannot be built here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUZZ = ROOT / "native" / "fuzz"
BUILT = ROOT / "native" / "target" / "fuzz"
TARGETS = ("body", "fold", "frames", "heads")
FRAME_HEAD_BYTES = 64
COVERAGE = (
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "--cfg=fuzzing",
)
"""The flags of cargo-fuzz, without a sanitizer: the core has no unsafe code of its own."""


def main(arguments: list[str] | None = None) -> int:
    """Build, fuzz all targets at once, each for its share of the time, and print a table.

    Return the exit status.
    """
    parser = argparse.ArgumentParser(prog="./run fuzz", description="Fuzz the native core.")
    parser.add_argument("--seconds", type=int, default=60, help="time for all targets together; default: 60")
    seconds = parser.parse_args(arguments).seconds
    if seconds < len(TARGETS):
        parser.error(f"--seconds {seconds}: give at least {len(TARGETS)}, one for each target")
    if shutil.which("cargo") is None or shutil.which("c++") is None:
        print(
            "./run fuzz: cargo and a C++ compiler are needed: install Rust (rustup.rs) and g++",
            file=sys.stderr,
        )
        return 77
    if not _build():
        return 77
    frames, share = [bytes.fromhex(text) for text in _golden_frames()], seconds // len(TARGETS)
    print(f"./run fuzz: {len(TARGETS)} targets, {share} s each", file=sys.stderr, flush=True)
    print(f"{'target':<8} {'inputs':>12} {'coverage':>9} {'found':>6}")
    with ThreadPoolExecutor(len(TARGETS)) as threads:
        findings = list(threads.map(lambda target: _fuzz(target, frames, share), TARGETS))
    return 1 if any(findings) else 0


def _build() -> bool:
    checks = {
        "CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS": "true",
        "CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS": "true",
    }
    environ = {**os.environ, **checks, "RUSTFLAGS": " ".join(COVERAGE), "CARGO_TARGET_DIR": str(BUILT)}
    # With a target, cargo builds the scripts of packages without the flags.
    rustc = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=False)
    host = re.search(r"(?m)^host: (\S+)", rustc.stdout)
    command = [
        "cargo",
        "build",
        "--quiet",
        "--release",
        "--locked",
        "--manifest-path",
        str(FUZZ / "Cargo.toml"),
    ]
    if host is None:
        print(rustc.stderr, end="", file=sys.stderr)
    if host is None or subprocess.run([*command, "--target", host[1]], env=environ, check=False).returncode:
        print("./run fuzz: the fuzzers could not be built; the reason is above", file=sys.stderr)
        return False
    (BUILT / "host").write_text(host[1])
    return True


def _golden_frames() -> list[str]:
    """Return each text of hexadecimal digits in the golden file that holds a frame."""
    return re.findall(r'"([0-9a-f]{32,})"', (ROOT / "docs" / "protocol-golden.json").read_text())


def _fuzz(target: str, frames: list[bytes], seconds: int) -> bool:
    """Fuzz one target, print its row, and return True if it found something. Runs in a thread."""
    corpus, findings = BUILT / "corpus" / target, BUILT / "findings" / target
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(frames):
        (corpus / f"golden-{number}").write_bytes(_seed(target, frame))
    before = set(findings.iterdir())
    binary = BUILT / (BUILT / "host").read_text() / "release" / target
    bounds = [f"-max_total_time={seconds}", "-timeout=5", "-rss_limit_mb=2048", "-max_len=16384"]
    run = subprocess.run(
        [binary, *bounds, "-print_final_stats=1", f"-artifact_prefix={findings}/", corpus],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds + 120,
    )
    inputs = re.search(r"number_of_executed_units: (\d+)", run.stderr)
    covered = re.findall(r"cov: (\d+)", run.stderr)
    found = sorted(set(findings.iterdir()) - before)
    executed = int(inputs[1]) if inputs else 0
    print(f"{target:<8} {executed:>12,} {covered[-1] if covered else '-':>9} {len(found):>6}", flush=True)
    for path in found:
        print(f"  {path.relative_to(ROOT)}")
    if run.returncode and not found:
        print(run.stderr[-2_000:], file=sys.stderr)
    return bool(found) or run.returncode != 0


def _seed(target: str, frame: bytes) -> bytes:
    """Return the input of a target that stands for a frame."""
    if target == "frames":
        return frame
    body = frame[FRAME_HEAD_BYTES:]
    return body if target == "body" else len(body).to_bytes(2, "little") + body


if __name__ == "__main__":
    sys.exit(main())
