"""What a trainer tells a vLLM whose weight-transfer backend is "refit". Needs no vLLM in the trainer's environment."""
from __future__ import annotations

import contextlib
import http.client
import inspect
import json
import urllib.error
import urllib.request
from typing import Any, Optional

from refit.executor import TIMEOUT_SECONDS
from refit.workers import GRACE_SECONDS, WorkerError


class HTTPClient:
    """Calls the routes of a vLLM server that runs with VLLM_SERVER_DEV_MODE=1. Like vLLM's own HTTPVLLMWeightSyncClient, but an
    update ends with a reset of the server's caches, and errors have the server's words. `timeout`: seconds for each request."""

    def __init__(self, base_url: str, timeout: float = TIMEOUT_SECONDS + GRACE_SECONDS):
        self.base_url, self.timeout = base_url.rstrip("/"), timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: Optional[str] = None) -> None:
        self._post("/finish_weight_update", **({} if weight_version is None else {"weight_version": weight_version}))
        # Both hold what the old weights computed.
        self._post("/reset_encoder_cache")
        answer = self._post("/reset_prefix_cache?reset_running_requests=true")
        if not answer.get("success", True):
            raise WorkerError(f"the vLLM server at {self.base_url} has the new weights, but cannot reset its prefix cache, which holds "
                              "what the old weights computed: requests hold it. End the requests and update again")

    def shutdown_weight_transfer_engine(self) -> None:
        self._post("/shutdown_weight_transfer_engine")

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        """Once: the workers of a request that is posted again would wait for trainers that have given up."""
        url = self.base_url + path
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer: dict[str, Any] = json.loads(response.read() or b"{}")
                return answer
        except urllib.error.HTTPError as error:
            raise WorkerError(f"{url} answers {error.code}: {_message(error.read())}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise WorkerError(f"{url}: {error}") from error


def _message(body: bytes) -> str:
    """What vLLM says of an error, of whose answer it is a part."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return str(text)


def update_by(client: Any, update_info: dict[str, Any], version: Optional[str] = None) -> None:
    """Drives an engine's part of an update by any client with vLLM's methods. `version` becomes the engine's weight version, if the
    client takes one."""
    client.start_weight_update()
    try:
        client.update_weights(update_info)
    except BaseException:
        # Ends the update on the workers that did not raise; on the one that did there is none to end.
        with contextlib.suppress(Exception):
            client.finish_weight_update()
        raise
    if version is not None and "weight_version" in inspect.signature(client.finish_weight_update).parameters:
        client.finish_weight_update(weight_version=version)
    else:
        client.finish_weight_update()
