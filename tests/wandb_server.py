"""A stand-in for W&B's server on this machine: what the real client asks of it when a run starts, logs and ends."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Answers GraphQL and takes files.

    Attributes:
        status: of every answer; 200 is a healthy server.
        asked: operation name -> variables of each time.
        rows: the history that arrived, as sent.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.asked: dict[str, list[dict[str, Any]]] = {}
        self.rows: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def go_away(self) -> None:
        """Answer nobody any more."""
        self.shutdown()
        self.server_close()

    def answer_query(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        if name == "Viewer":
            return {
                "viewer": {
                    "id": "V",
                    "entity": "lab",
                    "username": "lab",
                    "flags": "{}",
                    "teams": {"edges": []},
                }
            }
        if name == "UpsertBucket":
            project = {"id": "P", "name": variables.get("project"), "entity": {"id": "E", "name": "lab"}}
            bucket = {"id": "B", "name": variables.get("name"), "displayName": "", "project": project}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": True}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": "B", "uploadHeaders": [], "files": files}}
        return {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        body, answer = self._read(), {}
        if self.path == "/graphql":
            query = json.loads(body)
            name, variables = query["operationName"], query.get("variables") or {}
            self.server.asked.setdefault(name, []).append(variables)
            answer = {"data": self.server.answer_query(name, variables)}
        elif self.path.endswith("/file_stream"):
            sent = json.loads(body)
            lines = (sent.get("files") or {}).get("wandb-history.jsonl", {}).get("content", [])
            self.server.rows += map(json.loads, lines)
            if sent.get("complete"):
                self.server.exit_codes.append(sent["exitcode"])
        self._send(answer)

    def do_PUT(self) -> None:
        self._read()
        self._send({})

    def do_GET(self) -> None:
        self._send({})

    def _read(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _send(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def wandb_server() -> Iterator[Server]:
    """Run a server for a while."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.go_away()
        thread.join()
