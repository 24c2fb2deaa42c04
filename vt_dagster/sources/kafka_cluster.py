"""Kafka clusters: connection settings, metadata of topics, schema registries, offset ranges, messages.

Does not use Spark.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, PARTITION
from vt_dagster.core.source_records import POSITION, RECORD_TIME, SOURCE
from vt_dagster.errors import SourceError, VtDagsterError, counted
from vt_dagster.sources.avro import node_of, with_types
from vt_dagster.sources.base import of_id
from vt_dagster.storage.commit_log import Commit, Offsets, Ranges
from vt_dagster.topology.options import check_types

# Kafka cluster


Protocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]

_OAUTH = "OAUTHBEARER"
_LOGIN = ("username", "password")
_CERTIFICATE = ("certificate_location", "key_location")
_FILES = ("ca_location", *_CERTIFICATE)
_ADDRESS = re.compile(r"([A-Z_]+://)?[^\s/,]+:\d+")
_TOPIC = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
_JAVA_SECURITY = "org.apache.kafka.common.security"
_MILLIS_FROM = 1e11
"""An expiry of this number or more is in milliseconds: in seconds it would be after the year 5000."""

_SECONDS = 10.0
"""Timeout of a request to the cluster."""

_log = logging.getLogger("vt_dagster.kafka")


@dataclass(frozen=True)
class TopicState:
    """Metadata of a topic.

    Args:
        id: the topic id; a topic that is deleted and recreated under its name gets another one.
        earliest: the first available offset by partition (inclusive).
        ends: the last stable offset by partition (exclusive): records from it on are in open
            transactions, or behind one.
        high_watermarks: the offset after the last record by partition (exclusive), whether it is in an
            open transaction or not.
    """

    id: str
    earliest: dict[int, int]
    ends: dict[int, int]
    high_watermarks: dict[int, int]


@dataclass(frozen=True)
class KafkaCluster:
    """Connection settings of a Kafka cluster, for Spark and for sensors.

    Every string may be a ``dagster.EnvVar``. It is resolved when a connection is made, so that
    definitions hold no secrets. Secrets appear in no message, log, metadata or table.

    Args:
        bootstrap_servers: ``host:port``, separated by commas.
        security_protocol: ``SASL_SSL`` and ``SASL_PLAINTEXT`` need ``username`` and ``password``.
        sasl_mechanism: the SASL mechanism that authenticates ``username`` and ``password``; or
            ``OAUTHBEARER``, with ``token_endpoint`` or ``token_provider``.
        ca_location: file (PEM) with the trusted certificates; None = those of the machine.
        certificate_location, key_location, key_password: the client certificate and key (PEM), if the
            cluster requires one.
        options: further client settings that librdkafka and the Java client both accept, for example
            ``{"client.id": "warehouse"}``.
        token_endpoint: URL of an OAuth (OIDC) server that gives tokens for client credentials:
            ``username`` is the client's id, ``password`` its secret. For ``OAUTHBEARER``.
        token_scope: the scope to ask that server for.
        token_provider: import path ``module:function`` of a Python function without parameters that
            returns a token and the time at which it expires (epoch seconds). For ``OAUTHBEARER``. It is
            called in the processes of Dagster, by sensors and at the start of runs. Spark's Kafka
            client is Java and cannot call it: set in ``java_options`` how that client gets its tokens.
            A publication sends from Spark's Python workers, with the token of the run's start.
        java_options: settings for Spark's Kafka client only; they replace the settings derived from the
            other arguments, for example ``sasl.login.callback.handler.class``. The repr hides them.
    """

    bootstrap_servers: str
    security_protocol: Protocol = "PLAINTEXT"
    sasl_mechanism: Mechanism = "SCRAM-SHA-512"
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    ca_location: str | None = None
    certificate_location: str | None = None
    key_location: str | None = None
    key_password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict[str, str], hash=False, repr=False)
    token_endpoint: str | None = None
    token_scope: str | None = None
    token_provider: str | None = None
    java_options: Mapping[str, str] = field(default_factory=dict[str, str], hash=False, repr=False)

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__, SourceError)
        if self.security_protocol not in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"):
            raise SourceError(
                "security_protocol must be PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL, got "
                f"{self.security_protocol!r}"
            )
        if self.sasl_mechanism not in get_args(Mechanism):
            raise SourceError(
                f"expected sasl_mechanism to be one of {', '.join(get_args(Mechanism))}, got "
                f"{self.sasl_mechanism!r}; correct it"
            )
        if not hasattr(self.bootstrap_servers, "get_value"):
            _require_addresses(self.bootstrap_servers)
        self._require_used()
        if self._oauth:
            self._check_tokens()
        elif self.token_endpoint or self.token_provider or self.token_scope:
            raise SourceError(
                "token_endpoint, token_scope and token_provider need sasl_mechanism='OAUTHBEARER' with "
                "security_protocol='SASL_SSL' or 'SASL_PLAINTEXT', got "
                f"{self.sasl_mechanism!r} with {self.security_protocol!r}; set both, or remove them"
            )
        known = self.token_provider is not None
        if self._sasl and not known and (self.username is None or self.password is None):
            raise SourceError(
                f"expected username and password with security_protocol={self.security_protocol!r}, "
                "got none; give them, for example as dagster.EnvVar('KAFKA_PASSWORD')"
            )

    def _require_used(self) -> None:
        """Raises SourceError for a login or a file that a connection would not use."""
        for names, uses, wanted in (
            (_LOGIN, self._sasl, "'SASL_SSL' or 'SASL_PLAINTEXT'"),
            ((*_FILES, "key_password"), self.security_protocol.endswith("SSL"), "'SSL' or 'SASL_SSL'"),
        ):
            given = [name for name in names if getattr(self, name) is not None]
            if given and not uses:
                raise SourceError(
                    f"expected security_protocol={wanted} with {' and '.join(given)}, got "
                    f"{self.security_protocol!r}, which does not use them; set it, or remove them"
                )
        pair = [name for name in _CERTIFICATE if getattr(self, name) is not None]
        if len(pair) == 1:
            raise SourceError(
                f"expected both certificate_location and key_location, got only {pair[0]}; set the "
                "other one too (of a file that has both, the same path), or remove it"
            )
        if self.key_password is not None and not pair:
            raise SourceError(
                "expected key_location with key_password, got none; set the file of the key, or "
                "remove the password"
            )

    def _check_tokens(self) -> None:
        if (self.token_endpoint is None) == (self.token_provider is None):
            got = "neither" if self.token_endpoint is None else "both"
            raise SourceError(
                "expected token_endpoint or token_provider with sasl_mechanism='OAUTHBEARER', got "
                f"{got}; set the URL of the OAuth server, or the import path of a function that "
                "returns a token"
            )
        if self.token_provider is None:
            return
        if not re.fullmatch(r"[\w.]+:\w+", self.token_provider):
            raise SourceError(
                "expected token_provider to be an import path 'module:function', got "
                f"{self.token_provider!r}; correct it"
            )
        if not self.java_options:
            raise SourceError(
                f"expected java_options with token_provider={self.token_provider!r}, got none: "
                "Spark's Kafka client is Java and cannot call a Python function; set how it gets its "
                "tokens, for example sasl.jaas.config and sasl.login.callback.handler.class"
            )

    @property
    def _sasl(self) -> bool:
        return self.security_protocol.startswith("SASL")

    @property
    def _oauth(self) -> bool:
        return self._sasl and self.sasl_mechanism == _OAUTH

    @property
    def servers(self) -> str:
        """The bootstrap servers, resolved."""
        return setting(self.bootstrap_servers, "bootstrap_servers")

    # -- settings --------------------------------------------------------------------------------

    def spark_options(self) -> dict[str, str]:
        """Returns the options of Spark's Kafka source. Reads PEM files, which executors may lack."""
        options = {"bootstrap.servers": self.servers, **self.options}
        options["security.protocol"] = self.security_protocol
        if self._sasl:
            options["sasl.mechanism"] = self.sasl_mechanism
            options |= self._java_login()
        if self.ca_location is not None:
            options["ssl.truststore.type"] = "PEM"
            options["ssl.truststore.certificates"] = _file(self.ca_location, "ca_location")
        if self.key_location is not None:
            options["ssl.keystore.type"] = "PEM"
            options["ssl.keystore.key"] = _file(self.key_location, "key_location")
            chain = _file(self.certificate_location, "certificate_location")
            options["ssl.keystore.certificate.chain"] = chain
            if self.key_password is not None:
                options["ssl.key.password"] = setting(self.key_password, "key_password")
        options |= {name: setting(value, name) for name, value in self.java_options.items()}
        return {f"kafka.{name}": value for name, value in options.items()}

    def _java_login(self) -> dict[str, str]:
        """Returns the settings by which the Java client authenticates; empty with a token provider,
        because ``java_options`` then contain these settings."""
        if self._oauth and self.token_endpoint is None:
            return {}
        if not self._oauth:
            module = "scram.Scram" if self.sasl_mechanism.startswith("SCRAM") else "plain.Plain"
            given = {"username": self.username, "password": self.password}
            return {"sasl.jaas.config": _jaas(f"{module}LoginModule", given)}
        given = {"clientId": self.username, "clientSecret": self.password, "scope": self.token_scope}
        return {
            "sasl.oauthbearer.token.endpoint.url": setting(self.token_endpoint, "token_endpoint"),
            "sasl.login.callback.handler.class": (
                f"{_JAVA_SECURITY}.oauthbearer.OAuthBearerLoginCallbackHandler"
            ),
            "sasl.jaas.config": _jaas("oauthbearer.OAuthBearerLoginModule", given),
        }

    def client_settings(self) -> dict[str, Any]:
        """Returns the settings of confluent-kafka (librdkafka)."""
        settings: dict[str, Any] = {"bootstrap.servers": self.servers, **self.options}
        settings["security.protocol"] = self.security_protocol
        if self._sasl:
            settings["sasl.mechanism"] = self.sasl_mechanism
            settings |= self._python_login()
        for name in _FILES:
            if (path := getattr(self, name)) is not None:
                _file(path, name)  # librdkafka does not say that there is none
                settings[f"ssl.{name.replace('_', '.')}"] = setting(path, name)
        if self.key_password is not None:
            settings["ssl.key.password"] = setting(self.key_password, "key_password")
        return {**settings, "logger": _log, "log_level": 4}

    def _python_login(self) -> dict[str, Any]:
        """Returns the settings by which librdkafka authenticates."""
        if self.token_provider is not None:
            provider = self.token_provider
            # Get the first token here, for a clear error: the client would wait ten seconds, and then
            # only report that it got no token.
            tokens = [token_of(provider)]
            return {"oauth_cb": lambda _: tokens.pop() if tokens else token_of(provider)}
        name, secret = setting(self.username, "username"), setting(self.password, "password")
        if not self._oauth:
            return {"sasl.username": name, "sasl.password": secret}
        scope = {} if self.token_scope is None else {"scope": setting(self.token_scope, "token_scope")}
        given = {
            "method": "oidc",
            "client.id": name,
            "client.secret": secret,
            "token.endpoint.url": setting(self.token_endpoint, "token_endpoint"),
            **scope,
        }
        return {f"sasl.oauthbearer.{part}": value for part, value in given.items()}

    # -- metadata --------------------------------------------------------------------------------

    def topics(self, names: Sequence[str]) -> dict[str, TopicState]:
        """Returns the current state of topics.

        Raises:
            SourceError: the cluster does not answer, or has no such topic.
        """
        return self._call_admin(lambda admin: _states(self, admin, names))

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the current ids of topics.

        Raises:
            SourceError: the cluster does not answer, or has no such topic.
        """
        found = self._call_admin(lambda admin: _described(self, admin, names))
        return {name: str(topic.topic_id) for name, topic in found.items()}

    def timestamp_types(self, names: Sequence[str]) -> dict[str, str]:
        """Returns ``message.timestamp.type`` by topic: ``CreateTime`` or ``LogAppendTime``.

        Raises:
            SourceError: the cluster does not answer, or the user may not describe topic configs.
        """
        from confluent_kafka.admin import (
            ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
            ResourceType,  # pyright: ignore[reportPrivateImportUsage]
        )

        def ask(admin: Any) -> dict[str, str]:
            resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
            answers = admin.describe_configs(resources, request_timeout=_SECONDS)
            found = {r.name: answer.result(timeout=_SECONDS + 5) for r, answer in answers.items()}
            return {name: str(of["message.timestamp.type"].value) for name, of in found.items()}

        return self._call_admin(ask)

    def offsets_at(self, topic: str, partitions: Sequence[int], moment: datetime) -> dict[int, int]:
        """Returns the first offset by partition whose record has a timestamp >= ``moment``."""
        from confluent_kafka import TopicPartition
        from confluent_kafka.admin import OffsetSpec  # pyright: ignore[reportPrivateImportUsage]

        millis = int(moment.timestamp() * 1000)

        def ask(admin: Any) -> dict[int, int]:
            specs = {TopicPartition(topic, p): OffsetSpec.for_timestamp(millis) for p in partitions}
            found = _offsets(admin, specs)
            return {p: offset for (_, p), offset in found.items() if offset >= 0}

        return self._call_admin(ask)

    def oldest(self, positions: Mapping[str, Mapping[int, int]]) -> float | None:
        """Returns the timestamp of the oldest record at or after some positions.

        Returns:
            epoch seconds; None if no record was read.
        """
        times = [message.timestamp()[1] / 1000 for message in self.first_messages(positions)]
        return min(times, default=None)

    def first_messages(self, positions: Mapping[str, Mapping[int, int]]) -> list[Any]:
        """Returns the first message at or after each of some positions; fewer if some are not there or
        must not be read, or if the cluster does not answer within two seconds."""
        from confluent_kafka import Consumer, KafkaException, TopicPartition

        waiting = [TopicPartition(t, p, o) for t, some in positions.items() for p, o in some.items()]
        if not waiting:
            return []
        settings = {
            **self.client_settings(),
            "group.id": "vt_dagster_lag",
            "enable.auto.commit": False,
            "fetch.message.max.bytes": 65536,
            "queued.min.messages": 1,
        }
        consumer = Consumer(settings)
        seen: dict[tuple[str, int], Any] = {}
        until = time.monotonic() + 10  # the client may repeat an error for ever
        try:
            consumer.assign(waiting)
            while len(seen) < len(waiting) and time.monotonic() < until:
                found = consumer.consume(len(waiting), timeout=2.0)
                if not found:
                    break
                for message in found:
                    if message.error() is None:
                        place = (str(message.topic()), int(message.partition() or 0))
                        seen.setdefault(place, message)
                        consumer.pause([TopicPartition(*place)])
        except KafkaException:
            return []
        finally:
            consumer.close()
        return [*seen.values()]

    def _call_admin(self, question: Callable[[Any], Any]) -> Any:
        confluent, reasons = _confluent(), list[str]()

        def noticed(error: Any) -> None:
            if error.code() != confluent.KafkaError._ALL_BROKERS_DOWN:
                reasons.append(error.str())

        settings = {**self.client_settings(), "error_cb": noticed, "log_level": 0}
        try:
            admin = confluent.admin.AdminClient(settings)
        except confluent.KafkaException as error:
            raise SourceError(
                f"expected settings of the Kafka cluster {self.servers} that its client knows, got: "
                f"{error.args[0].str()}; correct the options, the files or the login of KafkaCluster"
            ) from None
        try:
            return question(admin)
        except confluent.KafkaException as error:
            error_code = error.args[0]
            why = error_code.str() if hasattr(error_code, "str") else str(error_code)
            # The request only times out; why there is no connection is an event of its own.
            admin.poll(0)
            why += f" ({reasons[-1]})" if reasons else ""
            raise SourceError(
                f"Kafka at {self.servers} did not answer as expected: {why}; check that it runs, that "
                "it can be reached from here, and that the security settings match the cluster"
            ) from None


def _require_addresses(servers: str) -> None:
    found = [one.strip() for one in servers.split(",") if one.strip()]
    if not found or not all(map(_ADDRESS.fullmatch, found)):
        raise SourceError(
            "expected bootstrap_servers to be host:port, several ones separated by commas, got "
            f"{servers!r}; correct it"
        )


def require_topic(name: str, error: type[VtDagsterError] = SourceError) -> None:
    """Checks the name of a topic, when definitions load.

    Raises:
        VtDagsterError: no topic can have this name.
    """
    if not _TOPIC.fullmatch(name):
        raise error(
            f"expected topic to be the name of a Kafka topic, got {name!r}; correct it: a name of a "
            "topic has up to 249 letters, digits, '.', '_' and '-'"
        )


def _confluent() -> Any:
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError:
        raise SourceError(
            'expected the package confluent-kafka, got none; install "vt-dagster[kafka]"'
        ) from None
    return confluent_kafka


def _described(cluster: KafkaCluster, admin: Any, names: Sequence[str]) -> dict[str, Any]:
    from confluent_kafka import KafkaError, KafkaException, TopicCollection

    answers = admin.describe_topics(TopicCollection(list(names)), request_timeout=_SECONDS)
    about: dict[str, Any] = {}
    for name, answer in answers.items():
        try:
            about[name] = answer.result(timeout=_SECONDS + 5)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
            raise SourceError(
                f"expected a topic {name!r} at {cluster.servers}, got none; create it, or correct "
                "the name"
            ) from None
    return about


def _states(cluster: KafkaCluster, admin: Any, names: Sequence[str]) -> dict[str, TopicState]:
    from confluent_kafka import IsolationLevel, TopicPartition
    from confluent_kafka.admin import OffsetSpec  # pyright: ignore[reportPrivateImportUsage]

    about = _described(cluster, admin, names)
    every = [TopicPartition(n, p.id) for n, topic in about.items() for p in topic.partitions]
    first = _offsets(admin, dict.fromkeys(every, OffsetSpec.earliest()))
    committed = {"isolation_level": IsolationLevel.READ_COMMITTED}
    last = _offsets(admin, dict.fromkeys(every, OffsetSpec.latest()))
    stable = _offsets(admin, dict.fromkeys(every, OffsetSpec.latest()), **committed)
    return {
        name: TopicState(
            str(topic.topic_id),
            {p.id: first[name, p.id] for p in topic.partitions},
            {p.id: stable[name, p.id] for p in topic.partitions},
            {p.id: last[name, p.id] for p in topic.partitions},
        )
        for name, topic in about.items()
    }


def _offsets(admin: Any, specs: Mapping[Any, Any], **more: Any) -> dict[tuple[str, int], int]:
    answers = admin.list_offsets(specs, request_timeout=_SECONDS, **more)
    return {
        (at.topic, at.partition): answer.result(timeout=_SECONDS + 5).offset
        for at, answer in answers.items()
    }


def _jaas(module: str, given: Mapping[str, Any]) -> str:
    """Returns the entry of a login module with its options; those that are None are left out."""
    texts = {name: setting(value, name) for name, value in given.items() if value is not None}
    quoted = {n: text.replace("\\", "\\\\").replace('"', '\\"') for n, text in texts.items()}
    options = " ".join(f'{name}="{text}"' for name, text in quoted.items())
    return f"{_JAVA_SECURITY}.{module} required {options};"


def token_of(provider: str) -> tuple[str, float]:
    """Returns the token of a provider, and the time at which it expires (epoch seconds).

    Raises:
        SourceError: the function does not exist, failed, or returned something else. The message
            contains neither the returned value nor the text of the function's error, because both may
            contain a token.
    """
    module, _, name = provider.partition(":")
    try:
        found: Any = getattr(import_module(module), name)()
    except Exception as error:
        raise SourceError(
            f"expected token_provider {provider!r} to return a token and its expiry, got a "
            f"{type(error).__name__}; call it by hand to see the reason"
        ) from None
    pair: Any = found if isinstance(found, tuple) and len(cast("tuple[Any, ...]", found)) == 2 else ()
    token, expiry = pair or (None, None)
    if not isinstance(token, str) or not token or not isinstance(expiry, int | float):
        raise SourceError(
            f"expected token_provider {provider!r} to return (token, expiry), a text and epoch "
            f"seconds, got {type(found).__name__}; correct the function"
        )
    if expiry >= _MILLIS_FROM:
        raise SourceError(
            f"expected token_provider {provider!r} to return the expiry in epoch seconds, got "
            f"{expiry:.0f}, which looks like milliseconds; divide it by 1000"
        )
    if expiry <= time.time():
        raise SourceError(
            f"expected token_provider {provider!r} to return a token that is valid now, got one that "
            f"has expired {time.time() - expiry:.0f} s ago; do not cache tokens for longer than they "
            "live, and check this machine's clock"
        )
    return token, float(expiry)


def setting(text: Any, name: str) -> str:
    """Returns the text of a setting; resolves an ``EnvVar``.

    Raises:
        SourceError: the environment variable is not set.
    """
    if not hasattr(text, "get_value"):
        return str(text)
    found = text.get_value()
    if found is None:
        raise SourceError(
            f"{name}: expected the environment variable {text.env_var_name} to be set, got none; set "
            "it for this process"
        )
    return found


def _file(path: Any, name: str) -> str:
    where = setting(path, name)
    try:
        return Path(where).read_text(encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{name}: cannot read {where}: {error.strerror}; correct the path") from None
    except UnicodeDecodeError:
        raise SourceError(
            f"{name}: expected {where} to be in PEM, a text, got other bytes; convert it, for example "
            "with openssl x509 -inform der"
        ) from None


# Schema registry


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

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__, SourceError)
        if not hasattr(self.url, "get_value") and not re.match(r"https?://\S", self.url):
            raise SourceError(
                "SchemaRegistry: expected url to be an address like https://registry:8081, got "
                f"{self.url.rpartition('@')[2]!r}; correct it"
            )
        if (self.username is None) != (self.password is None):
            raise SourceError(
                "SchemaRegistry: expected both username and password, got only one; set both, or none"
            )

    def schemas(self, subject: str, *, optional: bool = False) -> dict[int, str]:
        """Returns all versions of a subject's schema by schema id, oldest version first.

        Args:
            optional: whether the result is empty if the registry lacks the subject.

        Raises:
            SourceError: the registry does not answer, or has no such subject, or a schema is not valid.
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
            client, versions = SchemaRegistryClient(conf), list[int]()
            try:
                versions = client.get_versions(subject)
            except SchemaRegistryError as error:
                if not optional or error.http_status_code != _NOT_FOUND:
                    raise
            found = [client.get_version(subject, v) for v in versions]
            types = [_references(client, one.schema) for one in found]
        except SchemaRegistryError as error:
            raise SourceError(
                f"expected schemas of {subject!r} in the schema registry at {url}, got: "
                f"{error.error_message} ({error.http_status_code}); "
                f"{_ADVICE_BY_STATUS.get(error.http_status_code, 'check the registry, then run again')}"
            ) from None
        except Exception as error:  # any error of its HTTP client
            why = re.sub(r"//[^/]*@", "//", f"{type(error).__name__} {error}").strip()
            raise SourceError(
                f"the schema registry at {url} did not answer: {why}; nothing "
                "was read. Check that it runs, that it can be reached from here and, with https, that "
                "ca_location has its certificate, then run again"
            ) from None
        return {
            int(one.schema_id or 0): _checked(one, subject, more)
            for one, more in zip(found, types, strict=True)
        }


_NOT_FOUND = 404
_ADVICE_BY_STATUS = {
    401: "correct username and password",
    403: "let the user read the subject",
    _NOT_FOUND: "register them, or correct the subject",
}


def _references(client: Any, schema: Any) -> dict[str, str]:
    """Returns the schemas of other subjects that a schema refers to, by the name of the type."""
    types, waiting = dict[str, str](), [schema]
    while waiting:
        for one in waiting.pop().references or ():
            if one.name not in types:
                other = client.get_version(one.subject, one.version).schema
                types[one.name] = str(other.schema_str)
                waiting.append(other)
    return types


def _checked(registered: Any, subject: str, types: Mapping[str, str]) -> str:
    """Returns the text of an Avro schema with the types that it refers to."""
    schema = registered.schema
    is_avro = types and schema.schema_type == "AVRO"
    try:
        text = with_types(schema.schema_str, types) if is_avro else str(schema.schema_str)
        node_of(text)
    except SourceError as error:
        raise SourceError(
            f"schema {registered.schema_id} of the subject {subject!r} in the registry: expected "
            f"one that can be read, got: {error}"
        ) from None
    return text


# Kafka messages


_MESSAGE = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "timestampType int, "
    "headers array<struct<key:string,value:binary>>"
)
_PLACE = "_place"


def read_messages(
    cluster: KafkaCluster,
    spark: SparkSession,
    ranges: Mapping[str, Mapping[int, tuple[int, int]]],
    headers: bool = False,
    uncommitted: bool = False,
) -> DataFrame:
    """Returns the messages of offset ranges, in the columns of Spark's Kafka source.

    Args:
        ranges: ``[start, end)`` by topic and partition; none of them empty.
        uncommitted: whether to read also messages of open and aborted transactions, and those that an
            open transaction hides.
    """

    def offsets(which: int) -> str:
        return json.dumps({t: {str(p): r[which] for p, r in s.items()} for t, s in ranges.items()})

    if not ranges:
        return spark.createDataFrame([], _MESSAGE)
    return (
        spark.read.format("kafka")
        # After each poll Spark requests the partition's end offsets. The broker answers only after the
        # consumer's prefetch, which at the end of a topic waits for records: 500 ms by default.
        .option("kafka.fetch.max.wait.ms", "10")
        # So that a poll, with its request, returns all that was fetched (1 MB), not 500 records.
        .option("kafka.max.poll.records", "100000")
        .options(**cluster.spark_options())
        .option("assign", json.dumps({t: sorted(some) for t, some in ranges.items()}))
        .option("startingOffsets", offsets(0))
        .option("endingOffsets", offsets(1))
        .option("includeHeaders", str(headers).lower())
        .option("kafka.isolation.level", "read_uncommitted" if uncommitted else "read_committed")
        .option("failOnDataLoss", "true")
        .load()
    )


def reason_of(error: Exception) -> str | None:
    """Returns the reason that Kafka's client gives in an error of Spark; None = the error is not from
    Kafka's client."""
    found = re.search(r"(?:Caused by: )?(?:org\.apache|java)[\w.]*[kK]afka[\w.$]*: (.+)", str(error))
    return None if found is None else found[1].strip().rstrip(".;")


def advice_on_reading(reason: str) -> str:
    """Returns what to do about a result of :func:`reason_of`."""
    found = (advice for why, advice in _ADVICE.items() if why in reason)
    return next(found, "check the topic's retention")


_ADVICE = {
    "Authentication failed": "correct username and password of the cluster",
    "Timed out": "check that the brokers run and that Spark can reach them",
    "Timeout": "check that the brokers run and that Spark can reach them",
}


def in_order_of_arrival(messages: DataFrame, topics: Sequence[str]) -> DataFrame:
    """Adds ``_arrival``: the offset; with several topics a row number by stream time per partition."""
    if len(topics) == 1:
        return messages.withColumn(ARRIVAL, F.col(POSITION))
    place = F.array_position(F.array(*[F.lit(t) for t in topics]), F.col(SOURCE))
    so_far = W.partitionBy(PARTITION, SOURCE).orderBy(POSITION)
    merged = W.partitionBy(PARTITION).orderBy("_time", _PLACE, POSITION)
    timed = messages.withColumns({_PLACE: place, "_time": F.max(RECORD_TIME).over(so_far)})
    return timed.withColumn(ARRIVAL, F.row_number().over(merged).cast("long")).drop(_PLACE, "_time")


def bounded(ranges: Ranges, most: int | None) -> Ranges:
    """Limits ranges to ``most`` offsets in total, shared fairly between partitions; None = no limit."""
    sizes = {(t, p): e - s for t, some in ranges.items() for p, (s, e) in some.items()}
    if most is None or sum(sizes.values()) <= most:
        return ranges
    left = most
    shares: dict[tuple[str, int], int] = {}
    # Smallest first: a partition below its share leaves the rest of the share to the others.
    for i, (place, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        shares[place] = min(size, left // (len(sizes) - i))
        left -= shares[place]
    return {t: {p: (s, s + shares[t, p]) for p, (s, _) in some.items()} for t, some in ranges.items()}


def as_ranges(given: Mapping[str, Any] | None) -> Ranges | None:
    """Parses the ranges of a run config: ``{topic: {"0": [start, end]}}``, ``end`` exclusive.

    Raises:
        SourceError: the value has another form.
    """
    if given is None:
        return None
    try:
        return {
            topic: {int(p): (int(start), int(end)) for p, (start, end) in some.items()}
            for topic, some in given.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise SourceError(
            f'expected ranges like {{"topic": {{"0": [start, end]}}}}, got {given!r}; correct the '
            "run config"
        ) from None


def as_offsets(text: str) -> dict[str, dict[int, int]]:
    """Parses offsets in JSON: ``{"topic": {"0": 100}}``.

    Raises:
        SourceError: the text has another form.
    """
    try:
        return {t: {int(p): int(o) for p, o in some.items()} for t, some in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError):
        raise SourceError(
            f'expected offsets like {{"topic": {{"0": 100}}}}, got {text!r}; correct the text'
        ) from None


def reached(ranges: Ranges, ends: Mapping[str, Offsets]) -> bool:
    """Returns whether ranges reach the ends of topics; a partition that no longer exists counts as
    reached."""
    places = [(t, p, end) for t, some in ends.items() for p, end in some.items()]
    return all(ranges.get(t, {}).get(p, (0, end))[1] >= end for t, p, end in places)


def of_other_ids(topics: Iterable[str], ids: Mapping[str, str], before: Commit | None) -> list[str]:
    """Returns the topics with an id that no commit has consumed: recreated ones, or ones of another
    cluster."""
    known = {} if before is None else before.topics
    return [
        topic
        for topic in topics
        if known.get(topic, ids[topic]) != ids[topic] and of_id(topic, ids[topic]) not in known
    ]


def lost(gaps: Ranges, states: Mapping[str, TopicState], before: Commit | None) -> str:
    """Returns a description of lost offsets for an error message.

    Args:
        before: the asset's last commit; None = no commit yet.
    """
    texts: list[str] = []
    others = of_other_ids(gaps, {topic: state.id for topic, state in states.items()}, before)
    for topic, missing in gaps.items():
        if before is not None and topic in others:
            texts.append(
                f"topic {topic} was deleted and recreated since batch {before.batch} (its id "
                f"was {before.topics[topic]}, now {states[topic].id}), or the source reads another "
                "cluster: its offsets refer to other records"
            )
            continue
        texts += [
            f"topic {topic}, partition {p}: {counted(there - first, 'offset is', 'offsets are')} gone: "
            f"{first} is the next offset to consume, {there} the first available one (the topic's "
            "retention has passed)"
            for p, (first, there) in missing.items()
        ]
    return "; ".join(texts)
