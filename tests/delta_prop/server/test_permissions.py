"""Permissions: an action that is not granted is denied, and every denial has the same text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.server.permissions import ALL_PERMISSIONS, Permissions, Unauthorized
from delta_prop_wire.delta import Kind, Source
from delta_prop_wire.frames import Nack
from delta_prop_wire.message_rules import UNAUTHORIZED_TEXT
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import Topic

NAMES = st.text("ab*", max_size=4)


@given(NAMES, st.lists(NAMES.filter(lambda name: "*" not in name[:-1]), max_size=4))
def test_namespace_matches_a_name_or_a_prefix(name: str, patterns: list[str]) -> None:
    permissions = Permissions("a", publish=True, namespaces=tuple(patterns))
    naive = any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in patterns
    )
    assert permissions.can_publish(name) is naive
    assert not permissions.can_read(name)


def test_publish_and_read_are_separate_permissions() -> None:
    reader = Permissions("a", subscribe=True, namespaces=("docs",))
    assert reader.can_read("docs")
    assert not reader.can_read("docs2")
    assert not reader.can_publish("docs")
    assert reader.read_filter is not None
    assert reader.read_filter("docs")
    assert not reader.read_filter("other")
    assert ALL_PERMISSIONS.read_filter is None
    no_filter = Permissions("a", namespaces=None).read_filter
    assert no_filter is not None
    assert not no_filter("docs")


def denial_cause(permissions: Permissions, action: str) -> str | None:
    """Do one action; return the internal cause of its denial, or None if it is allowed."""
    actions = {
        "origins": lambda: permissions.check_origins(Source.LOCAL),
        "replica": lambda: permissions.check_origins(Source.REPLICA),
        "publish": lambda: permissions.check_publish(["docs"], 1 << Kind.CREATE),
        "publish elsewhere": lambda: permissions.check_publish(["docs", "secret"], 1 << Kind.CREATE),
        "delete": lambda: permissions.check_publish(["docs"], 1 << Kind.CREATE | 1 << Kind.DELETE),
        "read": lambda: permissions.check_subscribe([Topic.parse("ns:docs")]),
        "read all": lambda: permissions.check_subscribe([Topic.parse("*"), Topic.parse("v:x")]),
        "read elsewhere": lambda: permissions.check_subscribe([Topic.parse("*"), Topic.parse("ns:secret")]),
        "admin": permissions.check_admin,
    }
    try:
        actions[action]()
    except Unauthorized as refused:
        frame = Nack.of(7, refused)
        assert frame == Nack(7, ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT)  # no further detail
        return refused.cause
    return None


DOCS = ("docs",)
PUBLISHER = Permissions("a", publish=True, namespaces=DOCS, kinds_mask=1 << Kind.CREATE)
FORWARDER = Permissions("a", publish=True, forward=True, namespaces=None)
READER = Permissions("a", subscribe=True, namespaces=DOCS)
ADMIN = Permissions("a", admin=True, namespaces=None)


@pytest.mark.parametrize(
    ("action", "allowed"),
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
def test_each_action_needs_exactly_its_permission(action: str, allowed: set[str]) -> None:
    permissions_by_role = {"publishes": PUBLISHER, "forwards": FORWARDER, "reads": READER, "admin": ADMIN}
    assert {
        name for name, permissions in permissions_by_role.items() if denial_cause(permissions, action) is None
    } == allowed
    assert denial_cause(ALL_PERMISSIONS, action) is None
    assert denial_cause(Permissions("a", namespaces=None), action)


def test_denial_cause_names_the_fault() -> None:
    assert denial_cause(PUBLISHER, "publish elsewhere") == "the token may not publish to namespace 'secret'"
    assert denial_cause(PUBLISHER, "delete") == "the token may not publish operation 'delete'"
    assert denial_cause(READER, "read elsewhere") == "the token may not read namespace 'secret'"
