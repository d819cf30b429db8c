"""Acts as an engine that serves LoRA adapters as vLLM does: by name, a few of them loaded at a time."""

import json
from collections import OrderedDict
from typing import Any

from tests.support.proxy.acting import Actor

__all__ = ["AdapterActor"]


class AdapterActor(Actor):
    """An actor with a base model and adapters, of which it has the last used ones loaded."""

    def __init__(self, role: str, adapters: list[str], slots: int) -> None:
        super().__init__(role)
        self.adapters = adapters
        self.slots = slots
        self.loaded = OrderedDict[str, None]()
        self.loads = 0
        """Adapters that it had to load."""
        self.missed = 0
        """Requests for models that it does not serve."""
        self.by_model: list[str] = []
        """The models of the legs that it ran."""
        self.probes = 0
        self.echoes = False
        """Whether it refuses legs with a `seed` that is a text, and repeats it."""

    def page(self, path: str) -> bytes:
        """See `Actor`."""
        if path == "/metrics":
            labels = f'max_lora="{self.slots}",waiting_lora_adapters="",running_lora_adapters=""'
            return f"vllm:num_requests_running 0\nvllm:lora_requests_info{{{labels}}} 1.0\n".encode()
        self.probes += 1
        cards = [{"id": "stub"}, *({"id": each, "root": f"/{each}", "parent": "stub"} for each in self.adapters)]
        return json.dumps({"object": "list", "data": cards}).encode()

    def refusal(self, asked: dict[str, Any]) -> bytes | None:
        """See `Actor`."""
        model: str = asked["model"]
        if self.echoes and isinstance(seed := asked.get("seed"), str):
            error = {"message": seed, "type": "NotFoundError", "code": int(self.refusal_status[:3])}
            return json.dumps({"error": error}).encode()
        if model == "stub":
            return None
        if model not in self.adapters:
            self.missed += 1
            error = {"message": f"The model `{model}` does not exist.", "type": "NotFoundError", "code": 404}
            return json.dumps({"error": error}).encode()
        self.by_model.append(model)
        self.loads += model not in self.loaded
        self.loaded[model] = None
        self.loaded.move_to_end(model)
        if len(self.loaded) > self.slots:
            self.loaded.popitem(last=False)
        return None
