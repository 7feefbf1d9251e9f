"""Prompts to token ids and back, away from the event loop.

One worker thread does the work in the order of arrival: a long prompt delays other prompts and
never a stream. The worker has a tokenizer of its own, because encoding changes its state.
"""

import asyncio
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.detokenizer import Detokenizer
from engine.request import RequestError
from service.errors import unimplemented
from service.orders import ChatPrompt, Prompt, TextPrompt, TokenPrompt


class PromptEncoder:
    """Encodes with the target's tokenizer. max_prompt_bytes bounds the text, as UTF-8."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_prompt_bytes: int) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._max_prompt_bytes = max_prompt_bytes
        self._control_tokens = _control_tokens(tokenizer)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    async def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids. Raises RequestError or ServiceError for what cannot be a prompt."""
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids
        self._check_size(prompt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._encode, prompt)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids, which must lie inside the vocabulary."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._worker, self._decode, token_ids, skip_special_tokens
        )

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _check_size(self, prompt: TextPrompt | ChatPrompt) -> None:
        if isinstance(prompt, TextPrompt):
            path, num_bytes = "text", len(prompt.text.encode())
        else:
            path = "chat"
            num_bytes = sum(len(text.encode()) for _, text in _rendered_texts(prompt))
        if num_bytes > self._max_prompt_bytes:
            raise RequestError(path, f"has {num_bytes} bytes, at most {self._max_prompt_bytes}")

    def _encode(self, prompt: TextPrompt | ChatPrompt) -> tuple[int, ...]:
        if isinstance(prompt, TextPrompt):
            encoded = self._tokenizer(
                prompt.text,
                add_special_tokens=prompt.add_special_tokens,
                split_special_tokens=True,  # a client's text cannot smuggle in a control token
            )
        else:
            encoded = self._tokenizer(self._render(prompt), add_special_tokens=False)
        return tuple(encoded["input_ids"])

    def _render(self, chat: ChatPrompt) -> str:
        if not self.has_chat_template:
            raise RequestError("chat", "the model has no chat template; send text or tokens")
        if chat.tools and "tools" not in str(self._tokenizer.chat_template):
            raise unimplemented("chat.tools", "the model's chat template knows no tools")
        for path, content in _rendered_texts(chat):
            for token in self._control_tokens:
                if token in content:
                    raise RequestError(path, f"contains the control token {token!r} of the model")
        conversation: list[dict[str, Any]] = [dict(message) for message in chat.messages]
        tools: list[dict[Any, Any] | Callable[..., Any]] = [dict(tool) for tool in chat.tools]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=not chat.continue_last_message,
                continue_final_message=chat.continue_last_message,
            )
        except Exception as error:  # templates raise whatever they like for a wrong order of roles
            raise RequestError("chat", f"the model's chat template refuses it: {error}") from error
        return str(text)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The named ones and all others that the vocabulary marks: Llama 3 names only a few."""
    named = {str(token) for token in tokenizer.all_special_tokens}
    marked = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    return tuple(sorted(named | marked))


def _rendered_texts(chat: ChatPrompt) -> Iterator[tuple[str, str]]:
    """Whatever of the client's a template may render, each with its field."""
    for index, message in enumerate(chat.messages):
        for name, value in message.items():
            if name != "role":  # of an enum, not of the client
                yield f"chat.messages[{index}].{name}", _text(value)
    for index, tool in enumerate(chat.tools):
        yield f"chat.tools[{index}]", _text(tool)


def _text(value: object) -> str:
    # Characters as they are: templates write JSON without escaping them.
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
