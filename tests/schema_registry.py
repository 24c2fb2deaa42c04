"""A schema registry that runs in a test and gives recorded answers of Confluent's API."""

from __future__ import annotations

import json
import struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


def framed(number: int, message: bytes) -> bytes:
    """A message in Confluent's framing."""
    return struct.pack(">bI", 0, number) + message


class Registry:
    """A schema registry with ``subjects``. Their schemas have ids from 11 on; equal ones have one."""

    def __init__(self) -> None:
        self.subjects: dict[str, list[Any]] = {}
        self.references: dict[str, list[str]] = {}
        """By subject, the types that its schemas refer to: first versions of subjects of that name."""
        self.refusal = 0
        """HTTP status of all answers; 0 = as they are."""
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = registry.answer(self.path.split("?")[0])
                subject = self.path.split("/")[2]
                missing = {"error_code": 40401, "message": f"Subject '{subject}' not found."}
                if registry.refusal:
                    found, missing = None, {"error_code": registry.refusal, "message": "No."}
                body = json.dumps(missing if found is None else found).encode()
                self.send_response(registry.refusal or (404 if found is None else 200))
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, path: str) -> Any:
        """The answer to a GET; None = there is no such subject or version."""
        for subject, schemas in self.subjects.items():
            versions = f"/subjects/{subject}/versions"
            if path == versions:
                return list(range(1, len(schemas) + 1))
            every = [one for some in self.subjects.values() for one in some]
            distinct = [one for i, one in enumerate(every) if one not in every[:i]]
            for version, schema in enumerate(schemas, 1):
                if path == f"{versions}/{version}":
                    about = {"subject": subject, "version": version, "id": 11 + distinct.index(schema)}
                    names = self.references.get(subject, [])
                    refers = [{"name": name, "subject": name, "version": 1} for name in names]
                    more = {"references": refers} if refers else {}
                    return {**about, **more, "schema": json.dumps(schema)}
        return None

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
