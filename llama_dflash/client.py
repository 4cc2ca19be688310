"""A small HTTP client for our own llama-server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from llama_dflash.errors import ServerError

HEALTH_TIMEOUT_S = 5.0
POSITION = "draft_n_accepted_pos_"
# Our server is on this machine or in its network; a proxy for the internet must not come between.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Sampling:
    """Sampling of one request. The default is greedy.

    A temperature alone means just that: no top-k, top-p or min-p cut (docs/testing.md, "T 0.8").
    """

    temperature: float = 0.0
    seed: int = 0

    def fields(self, i_prompt: int) -> dict[str, Any]:
        """Request fields for prompt number `i_prompt`, whose seed is `seed + i_prompt`."""
        return {"temperature": self.temperature, "seed": self.seed + i_prompt, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    @property
    def summary(self) -> dict[str, Any]:
        """The `sampling` object of JSON results."""
        if self.temperature == 0:
            return {"temperature": 0}
        return {"temperature": self.temperature, "seed": self.seed, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True)
class Completion:
    """One answer: token ids, text and the server's timings."""

    tokens: list[int]
    text: str
    timings: dict[str, Any]


class Client:
    """Requests to one server.

    Args:
        url: such as `http://127.0.0.1:8080`.
        timeout_s: for one request.
        api_key: sent with every request, for a server that was started with --api-key.
    """

    def __init__(self, url: str, timeout_s: float = 600.0, api_key: str | None = None) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Any:
        """GET a JSON document; raises ServerError."""
        return self._send(urllib.request.Request(self.url + path, headers=self._headers))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """POST a JSON document; raises ServerError."""
        data = json.dumps(body).encode()
        return self._send(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **self._headers}))

    def _send(self, request: urllib.request.Request) -> Any:
        try:
            with _OPENER.open(request, timeout=self.timeout_s) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as e:
            raise ServerError(f"{request.selector}: HTTP {e.code}: {_message(e.read())}") from e
        except (OSError, ValueError, http.client.HTTPException) as e:
            raise ServerError(f"{request.selector}: no answer from {self.url} ({e})", "see the server's log") from e

    def is_healthy(self) -> bool:
        """Whether the model is loaded."""
        try:
            # A timeout of its own: a port may accept and never answer.
            return bool(Client(self.url, HEALTH_TIMEOUT_S).get("/health").get("status") == "ok")
        except ServerError:
            return False

    def effective_mode(self) -> dict[str, Any]:
        """What the server really does: `{"mode", "types", "draft", "n_max", "budget", "top_k", "rollback", "reason", "str"}`.

        The unpatched llama-server does not tell; its mode is then `unknown`.
        """
        unknown = {"mode": "unknown", "n_max": 0, "reason": "the server does not tell", "str": "mode = unknown"}
        try:
            return dict(self.get("/props").get("speculative") or unknown)
        except ServerError as e:
            if "HTTP 401" in str(e):  # a key that we were not given
                return unknown
            raise

    def n_ctx(self) -> int:
        """Context of one slot, in tokens; raises ServerError."""
        return int(self.get("/props")["default_generation_settings"]["n_ctx"])

    def complete(
        self, prompt: str | list[int], n_predict: int, sampling: Sampling, i_prompt: int = 0, **fields: Any
    ) -> Completion:
        """Complete one prompt through /completion, without reusing an earlier prompt's cache."""
        body = {"prompt": prompt, "n_predict": n_predict, "cache_prompt": False, "return_tokens": True}
        reply = self.post("/completion", {**body, **sampling.fields(i_prompt), **fields})
        return Completion(reply["tokens"], reply["content"], _with_list(reply["timings"]))

    def top_logprobs(self, ids: list[int], n_top: int) -> dict[int, float]:
        """Log-probabilities of the likeliest next tokens after `ids`, evaluated as one batch."""
        body = {"prompt": ids, "n_predict": 1, "n_probs": n_top, "temperature": 0, "cache_prompt": False}
        reply = self.post("/completion", body)
        return {int(e["id"]): float(e["logprob"]) for e in reply["completion_probabilities"][0]["top_logprobs"]}


def _with_list(timings: dict[str, Any]) -> dict[str, Any]:
    """The counts per position, which the server tells one by one, as the list `draft_n_accepted_per_pos`."""
    rest = {key: value for key, value in timings.items() if not key.startswith(POSITION)}
    counts = [timings[f"{POSITION}{i}"] for i in range(len(timings) - len(rest))]
    return {**rest, "draft_n_accepted_per_pos": counts} if counts else rest


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:200] or "no message"
