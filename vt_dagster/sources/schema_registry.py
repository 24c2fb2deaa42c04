"""Schemas of messages from a schema registry."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from vt_dagster.errors import SourceError
from vt_dagster.sources.kafka_cluster import setting


@dataclass(frozen=True)
class SchemaRegistry:
    """A schema registry with Confluent's HTTP API. Strings may be ``dagster.EnvVar``.

    Args:
        url: ``https://host:port``.
        username, password: for basic authentication. The repr hides them and ``url``.
        ca_location: file (PEM) with the trusted certificates.
    """

    url: str = field(repr=False)
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    ca_location: str | None = None

    def schemas(self, subject: str) -> dict[int, str]:
        """Returns all versions of a subject's schema by schema id, oldest version first.

        Raises:
            SourceError: the registry does not answer, or has no such subject.
        """
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError
        except ImportError:
            raise SourceError(
                "expected the package confluent-kafka with its schema registry client, got none; "
                'install "vt-dagster[kafka]"'
            ) from None
        url = setting(self.url, "url")
        conf: dict[str, Any] = {"url": url, "timeout": 10, "max.retries": 2}
        url = re.sub(r"//[^/]*@", "//", url)  # no credentials in messages
        if self.username is not None:
            name, password = setting(self.username, "username"), setting(self.password, "password")
            conf["basic.auth.user.info"] = f"{name}:{password}"
        if self.ca_location is not None:
            conf["ssl.ca.location"] = setting(self.ca_location, "ca_location")
        try:
            client = SchemaRegistryClient(conf)
            found = [client.get_version(subject, v) for v in client.get_versions(subject)]
        except SchemaRegistryError as error:
            raise SourceError(
                f"expected schemas of {subject!r} in the schema registry at {url}, got: "
                f"{error.error_message} ({error.http_status_code}); register them, or correct the "
                "subject"
            ) from None
        except Exception as error:  # any error of its HTTP client
            raise SourceError(
                f"the schema registry at {url} did not answer: {type(error).__name__}; nothing was "
                "read. Check that it runs and can be reached from here, then run again"
            ) from None
        return {int(one.schema_id or 0): str(one.schema.schema_str) for one in found}
