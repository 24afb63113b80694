"""What a trainer tells a vLLM whose weight-transfer backend is "refit". Needs no vLLM in the trainer's environment."""
from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import inspect
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from refit.executor import TIMEOUT_SECONDS
from refit.vllm import destination_of, server_facts
from refit.workers import GRACE_SECONDS, WorkerError, checked, deadline

# How long the end of an update that failed is waited for: the engine may hang, or its part may need the caller.
ABANDON_SECONDS = 1.0


class HTTPClient:
    """Calls the routes of a vLLM server that runs with VLLM_SERVER_DEV_MODE=1. Like vLLM's own HTTPVLLMWeightSyncClient, but an
    update ends with a reset of the server's caches, and errors have the server's words.

    `timeout`: seconds for each request; default: what the engine's workers may take by the `timeout` that the request gives them.
    `headers`: sent with each request, such as {"Authorization": "Bearer …"} for a proxy before the server."""

    def __init__(self, base_url: str, timeout: Optional[float] = None, headers: Optional[Mapping[str, str]] = None):
        self.base_url, self.timeout = base_url.rstrip("/"), timeout
        self._headers = {**(headers or {}), "Content-Type": "application/json"}
        self._workers_timeout = TIMEOUT_SECONDS  # that the last request with one gave the workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: Optional[str] = None) -> None:
        self._post("/finish_weight_update", None, **({} if weight_version is None else {"weight_version": weight_version}))
        self._reset_caches()

    def _reset_caches(self) -> None:
        """Both hold what the old weights computed."""
        self._post("/reset_encoder_cache")
        answer = self._post("/reset_prefix_cache?reset_running_requests=true")
        if not answer.get("success", True):
            raise WorkerError(f"the vLLM server at {self.base_url} has the new weights, but cannot reset its prefix cache, which holds "
                              "what the old weights computed: requests hold it. End the requests and update again")

    def destination(self) -> dict[str, Any]:
        """The destination of a job for this server's engine."""
        config, version = self._get("/server_info?config_format=json")["vllm_config"], self._get("/version")["version"]
        return destination_of(server_facts(config, str(version)))

    def abandon_weight_update(self) -> None:
        """Ends an update that failed. Its caches are left to the next one."""
        self._post("/finish_weight_update", seconds=GRACE_SECONDS)

    def shutdown_weight_transfer_engine(self) -> None:
        self._post("/shutdown_weight_transfer_engine")

    def _post(self, path: str, seconds: Optional[float] = None, **body: Any) -> dict[str, Any]:
        """Once: the workers of a request that is posted again would wait for trainers that have given up."""
        return self._asked(path, json.dumps(body).encode(), self._seconds(body) if seconds is None else seconds)

    def _get(self, path: str) -> dict[str, Any]:
        return self._asked(path, None, GRACE_SECONDS)

    def _asked(self, path: str, body: Optional[bytes], seconds: float) -> dict[str, Any]:
        url = self.base_url + path
        request = urllib.request.Request(url, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                answer: dict[str, Any] = json.loads(response.read() or b"{}")
                return answer
        except urllib.error.HTTPError as error:
            raise WorkerError(f"{url} answers {error.code}: {_message(error.read())}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise WorkerError(f"{url}: {error}") from error

    def _seconds(self, body: Mapping[str, Any]) -> float:
        """How long a request is waited for. One that comes after another waits for that, too, in the engine."""
        if self.timeout is not None:
            return self.timeout
        told = [info["timeout"] for info in body.values() if isinstance(info, Mapping) and "timeout" in info]
        self._workers_timeout = max(told, default=self._workers_timeout)
        return min(deadline(self._workers_timeout), threading.TIMEOUT_MAX)


class ExtensionHTTPClient(HTTPClient):
    """The same for a server whose workers have refit.vllm.WorkerExtension, whatever its weight-transfer backend."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        info = {"engine": 0, "check_backends": True, "timeout": TIMEOUT_SECONDS, "engines": None, **init_info}
        self._call("refit_init", info, "plan", "meeting", "engine", "check_backends", "timeout", "engines")

    def start_weight_update(self) -> None:
        """Nothing to begin."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = {"version": None, "timeout": TIMEOUT_SECONDS, "check": False, "dense": False, **update_info}
        if info.get("bind"):
            self._call("refit_bind", info, "timeout")
        self._call("refit_update", info, "version", "timeout", "check", "dense")

    def finish_weight_update(self, weight_version: Optional[str] = None) -> None:
        self._reset_caches()

    def abandon_weight_update(self) -> None:
        """Nothing to end."""

    def _call(self, method: str, info: Mapping[str, Any], *names: str) -> None:
        limit = min(deadline(info["timeout"]), threading.TIMEOUT_MAX - GRACE_SECONDS)
        # The engine's own limit comes first, because its error says more.
        seconds = limit + GRACE_SECONDS if self.timeout is None else self.timeout
        answer = self._post("/collective_rpc", seconds, method=method, args=[info[name] for name in names], timeout=limit)
        checked(answer["results"])


def _message(body: bytes) -> str:
    """What vLLM says of an error, of whose answer it is a part."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return str(text)


def update_by(client: Any, update_info: dict[str, Any], version: Optional[str] = None) -> None:
    """Drives an engine's part of an update by any client with vLLM's methods. `version` becomes the engine's weight version, if the
    client takes one."""
    try:
        client.start_weight_update()  # of several engines some may have started before one could not
        client.update_weights(update_info if version is None else {**update_info, "version": version})
    except BaseException:
        # An engine that hangs is not waited for again: the call that failed may have waited for its whole deadline.
        ends = threading.Thread(target=_end, args=(client,), name="refit ends an update", daemon=True)
        ends.start()
        ends.join(ABANDON_SECONDS)
        raise
    _finish(client, version)


def _finish(client: Any, version: Optional[str]) -> None:
    if version is not None and "weight_version" in inspect.signature(client.finish_weight_update).parameters:
        client.finish_weight_update(weight_version=version)
    else:
        client.finish_weight_update()


def _end(client: Any) -> None:
    """Ends a failed update on a client, whether it began or not: Refit's workers take an end without a beginning for none."""
    with contextlib.suppress(Exception):
        getattr(client, "abandon_weight_update", client.finish_weight_update)()


class Clients:
    """Clients of several engines as one: each is called at the same time, and told which of the plan's engines it is.

    The calls of one engine are performed in order, one at a time. So an update's end never overtakes its beginning, nor the next
    beginning the last end, although nobody waits for the other engines once a call has failed on one."""

    def __init__(self, clients: Sequence[Any]):
        self._clients = list(clients)
        self._queues = [concurrent.futures.ThreadPoolExecutor(1, f"refit engine {i}") for i in range(len(self._clients))]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        numbers = {"engines": len(self._clients)}
        self._each(lambda i, client: client.init_weight_transfer_engine({**init_info, **numbers, "engine": i}))

    def start_weight_update(self) -> None:
        self._each(lambda _, client: client.start_weight_update())

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._each(lambda _, client: client.update_weights(dict(update_info)))

    def finish_weight_update(self, weight_version: Optional[str] = None) -> None:
        self._each(lambda _, client: _finish(client, weight_version))

    def abandon_weight_update(self) -> None:
        """Has each engine end an update that failed, once its part of it has ended."""
        concurrent.futures.wait([queue.submit(_end, client) for queue, client in zip(self._queues, self._clients)],
                                timeout=ABANDON_SECONDS)

    def _each(self, call: Callable[[int, Any], Any]) -> None:
        calls = [queue.submit(call, i, client) for i, (queue, client) in enumerate(zip(self._queues, self._clients))]
        concurrent.futures.wait(calls, return_when=concurrent.futures.FIRST_EXCEPTION)
        # The others may wait for the engine that failed: until the caller has ended that.
        concurrent.futures.wait(calls, timeout=1)
        failed = [(i, call.exception()) for i, call in enumerate(calls) if call.done() and call.exception() is not None]
        if failed:
            lines = "\n  ".join(f"engine {i}: {type(error).__name__}: {error}" for i, error in failed)
            raise RuntimeError(f"{len(failed)} of {len(calls)} engines failed\n  {lines}") from failed[0][1]
