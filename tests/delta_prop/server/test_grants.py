"""Rights: what is not given is denied, and every denial says the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.server.grants import EVERYTHING, Grant, Unauthorized
from delta_prop_wire.delta import Kind, Source
from delta_prop_wire.frames import Nack
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.state import UNAUTHORIZED_TEXT
from delta_prop_wire.topics import Topic

NAMES = st.text("ab*", max_size=4)


@given(NAMES, st.lists(NAMES.filter(lambda name: "*" not in name[:-1]), max_size=4))
def test_a_namespace_is_named_or_begun(name: str, patterns: list[str]) -> None:
    grant = Grant("a", publish=True, namespaces=tuple(patterns))
    naive = any(name.startswith(one[:-1]) if one.endswith("*") else name == one for one in patterns)
    assert grant.may_publish(name) is naive
    assert not grant.may_read(name)


def test_publishing_and_reading_are_two_rights() -> None:
    reads = Grant("a", subscribe=True, namespaces=("docs",))
    assert reads.may_read("docs")
    assert not reads.may_read("docs2")
    assert not reads.may_publish("docs")
    assert reads.reader is not None
    assert reads.reader("docs")
    assert not reads.reader("other")
    assert EVERYTHING.reader is None
    nothing = Grant("a", namespaces=None).reader
    assert nothing is not None
    assert not nothing("docs")


def denied(grant: Grant, what: str) -> str | None:
    """Do one thing; the true cause of its denial, None where it is allowed."""
    actions = {
        "origins": lambda: grant.check_origins(Source.LOCAL),
        "replica": lambda: grant.check_origins(Source.REPLICA),
        "publish": lambda: grant.check_publish(["docs"], 1 << Kind.CREATE),
        "publish elsewhere": lambda: grant.check_publish(["docs", "secret"], 1 << Kind.CREATE),
        "delete": lambda: grant.check_publish(["docs"], 1 << Kind.CREATE | 1 << Kind.DELETE),
        "read": lambda: grant.check_subscribe([Topic.parse("ns:docs")]),
        "read all": lambda: grant.check_subscribe([Topic.parse("*"), Topic.parse("v:x")]),
        "read elsewhere": lambda: grant.check_subscribe([Topic.parse("*"), Topic.parse("ns:secret")]),
        "admin": grant.check_admin,
    }
    try:
        actions[what]()
    except Unauthorized as refused:
        frame = Nack.of(7, refused)
        assert frame == Nack(7, ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT)  # not a word more
        return refused.cause
    return None


DOCS = ("docs",)
PUBLISHES = Grant("a", publish=True, namespaces=DOCS, kinds_mask=1 << Kind.CREATE)
FORWARDS = Grant("a", publish=True, forward=True, namespaces=None)
READS = Grant("a", subscribe=True, namespaces=DOCS)
ADMIN = Grant("a", admin=True, namespaces=None)


@pytest.mark.parametrize(
    ("what", "allowed"),
    [
        ("origins", {"publishes", "forwards"}),
        ("replica", {"forwards"}),
        ("publish", {"publishes", "forwards"}),
        ("publish elsewhere", {"forwards"}),
        ("delete", {"forwards"}),
        ("read", {"reads"}),
        ("read all", {"reads"}),
        ("read elsewhere", set()),
        ("admin", {"admin"}),
    ],
)
def test_each_action_needs_its_right_and_no_other(what: str, allowed: set[str]) -> None:
    grants = {"publishes": PUBLISHES, "forwards": FORWARDS, "reads": READS, "admin": ADMIN}
    assert {name for name, grant in grants.items() if denied(grant, what) is None} == allowed
    assert denied(EVERYTHING, what) is None
    assert denied(Grant("a", namespaces=None), what)


def test_the_cause_names_what_was_wrong() -> None:
    assert denied(PUBLISHES, "publish elsewhere") == "the token may not publish to namespace 'secret'"
    assert denied(PUBLISHES, "delete") == "the token may not publish operation 'delete'"
    assert denied(READS, "read elsewhere") == "the token may not read namespace 'secret'"
