"""One slot of one llama-server, asked over HTTP; replies without what differs from run to run."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import Any

from llama_dflash.errors import ServerError
from llama_dflash.server import Server

Reply = dict[str, Any]
TIMEOUT_S = 600.0
# Random, or named after the machine, the clock or the slot. Token ids ("id" with a number) stay.
VOLATILE = {"created", "created_at", "system_fingerprint", "model", "id_slot", "time_ms", "save_ms", "restore_ms", "speculative.types"}
COUNTERS = {"cache_n", "prompt_n", "predicted_n"}


def plain(value: Any) -> Any:
    """`value` without the volatile keys; of the timings only the token counts stay."""
    if isinstance(value, list):
        return [plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    out = {}
    for key, v in value.items():
        if key in VOLATILE or (key == "id" and isinstance(v, str)):
            continue
        if key == "timings":
            v = {k: n for k, n in v.items() if k in COUNTERS}
        out[key] = plain(v)
    return out


def text_of(reply: Reply | list[Reply], index: int = 0) -> str:
    """Generated text of any interface, of a whole reply or of the events of a stream; thinking and arguments included."""
    parts: list[str] = []
    for e in reply if isinstance(reply, list) else [reply]:
        for c in e.get("choices", []):
            if c.get("index", 0) == index:
                parts += [c.get("text") or "", *_message(c.get("message") or c.get("delta") or {})]
        blocks = e.get("content", [])
        parts += [blocks] if isinstance(blocks, str) else [_block(b) for b in blocks]
        parts.append(_block(e.get("delta", {})))
    return "".join(parts)


def _message(message: Reply) -> list[str]:
    calls = [c.get("function", {}) for c in message.get("tool_calls", [])]
    args = [f.get("name", "") + f.get("arguments", "") for f in calls]
    return [message.get("reasoning_content") or "", message.get("content") or "", *args]


def _block(block: Reply) -> str:
    args = json.dumps(block["input"]) if block.get("input") else block.get("partial_json", "")
    return str(block.get("thinking", "") + block.get("text", "") + args)


@dataclass
class Session:
    """Requests to one slot.

    Attributes:
        server: the running server.
        slot: requests are bound to it; None lets the server choose.
        name: prefix of the files that the slot is saved to.
        timings: of every answer so far, as the server gave them.
    """

    server: Server
    slot: int | None
    name: str
    timings: list[Reply] = field(default_factory=list)

    def ask(self, path: str, **body: Any) -> Any:
        """One answer, a list if several were asked for, or the error; never cached unless the body says so."""
        reply = json.loads(self._send(path, body))
        self._note(reply)
        return self._plain(path, reply)

    def stream(self, path: str, **body: Any) -> list[Reply]:
        """The events of a streamed answer."""
        lines = self._send(path, {**body, "stream": True}).splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        events = [json.loads(d) for d in data if d != "[DONE]"]
        for event in events:
            self._note(event)
        return [self._plain(path, event) for event in events]

    def slot_action(self, action: str) -> Reply:
        """Save, restore or erase this session's slot."""
        url = f"/slots/{self.slot or 0}?action={action}"
        reply = plain(self.server.client.post(url, {"filename": f"{self.name}.bin"}))
        reply.pop("filename", None)
        return dict(reply)

    def _send(self, path: str, body: Reply) -> str:
        body = {"cache_prompt": False, **body}
        if self.slot is not None:
            body = {"id_slot": self.slot, **body}
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            return connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException) as e:
            tail = "\n".join(self.server.log_tail())
            raise ServerError(f"{path}: no answer ({e}); exit code {self.server.returncode}; log:\n{tail}", "") from e
        finally:
            connection.close()

    def _note(self, reply: Any) -> None:
        self.timings += [r["timings"] for r in (reply if isinstance(reply, list) else [reply]) if "timings" in r]

    @staticmethod
    def _plain(path: str, reply: Any) -> Any:
        if path == "/v1/messages":  # the pin gives no timings here
            reply.pop("timings", None)
        return plain(reply)
