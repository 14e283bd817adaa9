"""The configuration of a served delta-prop: a TOML file, overridden by the environment, fully validated.

It is read once, at the start; nothing here opens a file or reads the environment, both are arguments.
"""

from delta_prop.configuration.attachment import Attachment, make_sinks
from delta_prop.configuration.reading import ENVIRONMENT_PREFIX, read_configuration
from delta_prop.configuration.schema import Access, Configuration, Logging, TlsFiles
from delta_prop.configuration.sinks import (
    CacheConfig,
    ForwardConfig,
    IndexConfig,
    JsonLinesConfig,
    SinkConfig,
    StorageConfig,
)
from delta_prop.configuration.writing import to_json, to_toml

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Access",
    "Attachment",
    "CacheConfig",
    "Configuration",
    "ForwardConfig",
    "IndexConfig",
    "JsonLinesConfig",
    "Logging",
    "SinkConfig",
    "StorageConfig",
    "TlsFiles",
    "make_sinks",
    "read_configuration",
    "to_json",
    "to_toml",
]
