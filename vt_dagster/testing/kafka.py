"""A real Kafka broker for tests and experiments: ``python -m vt_dagster.testing_kafka DIR``.

One local process in KRaft mode, from the jars that Kafka publishes. Needs Java.
"""

from __future__ import annotations

import base64
import contextlib
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Self

from vt_dagster.errors import SourceError
from vt_dagster.spark.jars import resolve_broker_jars

_START_SECONDS = 60


class KafkaBroker:
    """A local Kafka broker on free ports with its data in a directory.

    After a restart it has the same ports and data. Topics keep their records forever unless configured
    otherwise, and are not created automatically.

    Args:
        directory: directory for data, settings and the broker's output.
        port: port of the plaintext listener; None = a free port.
        user: name and password; adds a second listener, ``secure_servers``, with TLS and
            SCRAM-SHA-256.

    Example:
        >>> with KafkaBroker(tmp_path) as broker:
        ...     cluster = KafkaCluster(broker.bootstrap_servers)
    """

    def __init__(
        self, directory: Path | str, port: int | None = None, user: tuple[str, str] | None = None
    ) -> None:
        self._directory = Path(directory).resolve()
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._port, self._secure, self._controller = _ports(port)
        self.bootstrap_servers = f"127.0.0.1:{self._port}"
        self.secure_servers = f"localhost:{self._secure}"

    @property
    def ca_location(self) -> Path:
        """The CA certificate (PEM) of the secure listener."""
        return self._directory / "ca.pem"

    def start(self) -> Self:
        """Starts the process and returns when its port accepts connections.

        Raises:
            SourceError: the process ended, or did not accept connections within a minute.
        """
        settings = self._directory / "server.properties"
        classpath = ":".join(str(jar) for jar in resolve_broker_jars())
        java = shutil.which("java") or "java"
        command = [java, "-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", classpath]
        if not settings.exists():
            self._prepare(settings, command)
        output = self._directory / "broker.log"
        with output.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "kafka.Kafka", str(settings)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(self._port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = output.read_text(errors="replace")[-500:]
                self.kill()
                raise SourceError(
                    f"expected a Kafka broker on port {self._port}, but it did not start: {tail}; see "
                    f"{output}"
                )
            time.sleep(0.1)
        return self

    def stop(self) -> None:
        """Shuts the broker down cleanly (SIGTERM)."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the broker at once (SIGKILL)."""
        self._end(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None

    def _prepare(self, settings: Path, command: Sequence[str]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        lines = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
            "SASL_SSL:SASL_SSL",
            "listeners": f"PLAINTEXT://127.0.0.1:{self._port},"
            f"CONTROLLER://127.0.0.1:{self._controller}",
            "log.dirs": str(self._directory / "data"),
            "log.retention.ms": "-1",
            "log.cleaner.backoff.ms": "500",
            "message.max.bytes": "20000000",
            "auto.create.topics.enable": "false",
            "num.partitions": "1",
            "offsets.topic.num.partitions": "1",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
        }
        more: list[str] = []
        if self._user is not None:
            name, password = self._user
            lines["listeners"] += f",SASL_SSL://127.0.0.1:{self._secure}"
            lines["advertised.listeners"] = (
                f"PLAINTEXT://127.0.0.1:{self._port},SASL_SSL://{self.secure_servers}"
            )
            lines |= self._tls(password)
            lines["sasl.enabled.mechanisms"] = "SCRAM-SHA-256"
            lines["listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config"] = (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            )
            more = ["--add-scram", f"SCRAM-SHA-256=[name={name},password={password}]"]
        settings.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # "--cluster-id=ID" in one argument: an id may begin with "-".
        about = [f"--cluster-id={cluster}", f"--config={settings}"]
        format_ = [*command, "kafka.tools.StorageTool", "format", *about]
        done = subprocess.run([*format_, *more], capture_output=True, text=True, check=False)
        if done.returncode:
            settings.unlink()
            raise SourceError(
                f"expected to format Kafka's storage in {self._directory}, got: "
                f"{(done.stdout + done.stderr)[-500:]}; check that the directory is writable"
            )

    def _tls(self, password: str) -> dict[str, str]:
        store = self._directory / "broker.p12"
        about = ["-keystore", str(store), "-storepass", password, "-alias", "broker"]
        certificate = ["-keyalg", "EC", "-dname", "CN=localhost", "-validity", "3650"]
        certificate += ["-ext", "san=dns:localhost,ip:127.0.0.1", "-ext", "bc:c"]
        for step in (
            ["-genkeypair", "-storetype", "PKCS12", *certificate],
            ["-exportcert", "-rfc", "-file", str(self.ca_location)],
        ):
            subprocess.run(["keytool", *step, *about], check=True, capture_output=True)
        return {
            "ssl.keystore.location": str(store),
            "ssl.keystore.password": password,
            "ssl.keystore.type": "PKCS12",
        }


def _ports(wanted: int | None) -> tuple[int, int, int]:
    sockets = [socket.socket() for _ in range(3)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        first, second, third = (s.getsockname()[1] for s in sockets)
        return wanted or first, second, third
    finally:
        for s in sockets:
            s.close()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def main(directory: str = "data/kafka") -> None:
    """Runs a broker on Kafka's default port in the foreground until interrupted."""
    with KafkaBroker(directory, 9092) as broker:
        print(f"Kafka broker on {broker.bootstrap_servers}, data in {directory}; Ctrl-C stops it")
        with contextlib.suppress(KeyboardInterrupt):
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
