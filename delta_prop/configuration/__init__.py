"""The configuration of a server: a TOML file, with overrides from the environment; every value is checked.

It is read once, at the start. Nothing here opens a file or reads the environment: both are passed in.
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
    configs_of_partition,
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
    "configs_of_partition",
    "make_sinks",
    "read_configuration",
    "to_json",
    "to_toml",
]
