"""A model of vLLM and its draft model, which speculates, as one model that a refit writes."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any


class WithDraft:
    """What `Executor.bind` and refit.vllm ask of a model, of both. A plan whose job has "mtp" names the tensors of both. A draft model's
    own names for its tensors are the plan's, or begin with "model." where the plan has the checkpoint's "mtp.". What it shares with
    the model, as the embedding, is the model's. Other attributes are the model's too."""

    def __init__(self, model: Any, draft: Any, planned: Collection[str]):
        self.__dict__.update(model=model, draft=draft, planned=planned)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return self._both(lambda part: part.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        return self._both(lambda part: part.named_buffers())

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        return self._both(lambda part: part.named_modules())

    def state_dict(self) -> dict[str, Any]:
        return {**self.model.state_dict(), **{self._name(name): tensor for name, tensor in self.draft.state_dict().items()}}

    def _both(self, of: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
        own = list(of(self.model))
        shared = {id(held) for _, held in own}
        yield from own
        yield from ((self._name(name), held) for name, held in of(self.draft) if id(held) not in shared)

    def _name(self, name: str) -> str:
        """The plan's. A module's is that of the tensors in it."""
        checkpoints = "mtp." + name.removeprefix("model.")
        return checkpoints if name.startswith("model.") and any(
            planned == checkpoints or planned.startswith(checkpoints + ".") for planned in self.planned) else name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.model, name, value)
