"""The configuration of a served delta-prop: a TOML file, overridden by the environment, checked whole.

Read once, at the start; nothing here opens a file or looks at the environment, both are handed in.
"""

from delta_prop.configuration.attaching import Attachment, make_sinks
from delta_prop.configuration.reading import ENVIRONMENT_PREFIX, read_configuration
from delta_prop.configuration.shape import Access, Configuration, Logging, TlsFiles
from delta_prop.configuration.sinks import (
    CacheTerms,
    ForwardTerms,
    IndexTerms,
    JsonLinesTerms,
    SinkTerms,
    StorageTerms,
)
from delta_prop.configuration.writing import to_json, to_toml

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Access",
    "Attachment",
    "CacheTerms",
    "Configuration",
    "ForwardTerms",
    "IndexTerms",
    "JsonLinesTerms",
    "Logging",
    "SinkTerms",
    "StorageTerms",
    "TlsFiles",
    "make_sinks",
    "read_configuration",
    "to_json",
    "to_toml",
]
