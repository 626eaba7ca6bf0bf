"""A small server that answers as llama.cpp's does, with a real model; it can lie in known ways.

Names, statuses and values are those that the server of xllamacpp 2026.10.11549 gave for the same requests.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from served_model import NAME, ServedModel

LOWEST = -3.4028234663852886e38  # for a probability of 0
NOT_FOUND = {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}
SETTINGS = {"seed": 4294967295, "temperature": 1.0, "n_probs": 3, "samplers": []}  # some of them


class LlamaCppModel(ServedModel):
    """`lie`: "honest", or how each answer of `/completion` is wrong."""

    program = "llama.cpp"
    num_slots = 3
    partial_ids: tuple[int, ...] = ()  # tokens that end within a character, as far as this server knows

    def __init__(self, folder: Path, lie: str = "honest") -> None:
        super().__init__(folder, lie)
        self.max_model_len = 512

    def page(self, path: str) -> tuple[int, Any]:
        meta = {"vocab_type": 2, "n_vocab": len(self._tokenizer), "n_ctx": self.max_model_len}
        found = {
            "/v1/models": {"models": [{"name": NAME}], "object": "list", "data": [{"id": NAME, "meta": meta}]},
            "/props": {
                "default_generation_settings": {"params": SETTINGS, "n_ctx": self.max_model_len},
                "total_slots": self.num_slots,
                "model_path": NAME,
                "build_info": "b0-unknown",
            },
        }.get(path)
        return (200, found) if found else (404, NOT_FOUND)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/completion":
            return self._one(body)
        if path == "/v1/completions":
            return self._openai(body)
        return 404, NOT_FOUND

    def _one(self, body: dict[str, Any]) -> tuple[int, Any]:
        """`/completion` for one token."""
        ids = body["prompt"]
        if len(ids) >= self.max_model_len:
            told = f"request ({len(ids)} tokens) exceeds the available context size ({self.max_model_len} tokens)"
            error = {"code": 400, "message": f"{told}, try increasing it", "type": "exceed_context_size_error"}
            return 400, {"error": {**error, "n_prompt_tokens": len(ids), "n_ctx": self.max_model_len}}
        read = ids[:-1] if self.lie == "behind" and len(ids) > 1 else ids
        log_probs = self._log_probs(read)[-1]
        if self.lie == "heated":
            log_probs = (log_probs / body["temperature"]).log_softmax(-1)
        generated = int(log_probs.argmax()) if self.lie == "unforced" else body["logit_bias"][0][0]
        num = body["n_probs"] // 2 if self.lie == "few" else body["n_probs"]
        kept = log_probs.topk(min(num, len(log_probs))).indices.tolist()
        found = {
            "index": 0,
            "content": self._text(generated),
            "tokens": [],
            "id_slot": body["id_slot"] if body["id_slot"] < self.num_slots else 0,
            "tokens_predicted": 1,
            "tokens_evaluated": len(ids) + (self.lie == "mark"),
            "generation_settings": SETTINGS,
            "prompt": self._tokenizer.decode(ids),
            "truncated": self.lie == "truncated",
            "stop_type": "limit",
        }
        if generated not in self.partial_ids:
            own, top = self._entry(generated, log_probs), [self._entry(token, log_probs) for token in kept]
            found["completion_probabilities"] = [self._lying({**own, "top_logprobs": top})]
        wanted = body.get("response_fields")
        return 200, found if wanted is None else {name: found[name] for name in wanted if name in found}

    def _lying(self, own: dict[str, Any]) -> dict[str, Any]:
        top = own["top_logprobs"]
        match self.lie:
            case "sampled":
                return {"id": own["id"], "prob": math.exp(own["logprob"]), "top_probs": top}
            case "no table":
                own.pop("top_logprobs")
            case "twice":
                top[1]["id"] = top[0]["id"]
            case "texts":
                own["top_logprobs"] = [{"token": one["token"], "logprob": one["logprob"]} for one in top]
        return own

    def _entry(self, token: int, log_probs: Any) -> dict[str, Any]:
        value = float(log_probs[token])
        text = "" if token in self._tokenizer.all_special_ids else self._text(token)
        held = list(text.encode())
        return {"id": token, "token": text, "bytes": held, "logprob": value if value > -103.0 else LOWEST}

    def _openai(self, body: dict[str, Any]) -> tuple[int, Any]:
        """`/v1/completions`: `echo` and `prompt_logprobs` are taken and not heeded."""
        log_probs = self._log_probs(body["prompt"])[-1]
        own = self._entry(int(log_probs.argmax()), log_probs)
        held = {"content": [{**own, "top_logprobs": [own]}]} if "logprobs" in body else None
        choice = {"text": own["token"], "index": 0, "logprobs": held, "finish_reason": "length"}
        usage = {"completion_tokens": 1, "prompt_tokens": len(body["prompt"])}
        return 200, {"choices": [choice], "model": NAME, "object": "text_completion", "usage": usage}
