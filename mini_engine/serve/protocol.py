"""OpenAI's requests, read: each field is used, or refused by name. Nothing is passed over in silence.

Source: OpenAI's API reference, and for the fields beyond it vLLM's server.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from json import loads
from typing import Any

from mini_engine.checks import is_whole, shown
from mini_engine.request import SamplingParams

# Fields of SamplingParams that are sent under their own names; null is the default.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "include_stop_str_in_output", "n",
    "skip_special_tokens", "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "prompt_logprobs",
    "structured_outputs",
)  # fmt: skip
COMMON = {*SAMPLING, "model", "stream", "stream_options", "max_tokens", "logit_bias", "logprobs", "priority"}
COMMON |= {"cache_salt", "response_format"}
COMPLETION = COMMON | {"prompt", "echo"}
CHAT = COMMON | {"messages", "max_completion_tokens", "top_logprobs"}
# They change no token here, and clients send them without being asked.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Known to OpenAI, not supported here; null and these values ask for nothing.
NOT_SUPPORTED: dict[str, Sequence[Any]] = {
    "suffix": ("",), "best_of": (1,), "tools": ([],), "tool_choice": ("none",), "functions": ([],),
    "function_call": ("none",), "parallel_tool_calls": (True, False), "audio": (), "modalities": (["text"],),
    "prediction": (), "reasoning_effort": ("none",), "verbosity": (), "web_search_options": (),
}  # fmt: skip
MAX_TOP_LOGPROBS = 20


class APIError(Exception):
    """An answer in OpenAI's shape: the status, a message, the field that it is about, and a code."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    @classmethod
    def of_model(cls, name: str, model: str) -> "APIError":
        return cls(f"the model {name} is not served here; {model} is", "model", "model_not_found", 404)

    def to_json(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass
class Asked:
    """A request that was understood: prompts with one SamplingParams, and how the answer is to look."""

    model: str
    prompts: list[str | list[int]]
    params: SamplingParams
    is_chat: bool
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # in every chunk, of its choice
    echo: bool = False
    priority: int = 0
    cache_salt: str = ""


def read_body(data: bytes) -> dict[str, Any]:
    """Return the fields of a request that are given. Raises APIError unless it is a JSON object in UTF-8."""
    try:
        body = loads(data, parse_constant=lambda name: _refuse_constant(name))
    except RecursionError:
        raise APIError("the body is nested too deeply") from None
    except ValueError as error:
        raise APIError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise APIError(f"the body must be a JSON object, but is {shown(body)}")
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def read_completion(body: dict[str, Any], model: str) -> Asked:
    """Return what /v1/completions is asked for. Raises APIError."""
    given = _known(body, COMPLETION)
    asked = _common(given, model, is_chat=False)
    asked.prompts = _prompts(body.get("prompt"))
    asked.echo = _flag(given, "echo")
    if asked.echo and asked.params.prompt_logprobs is None:  # OpenAI has one number for both
        asked.params = replace(asked.params, prompt_logprobs=asked.params.logprobs)
    return asked


def read_chat(body: dict[str, Any], model: str, encode: Callable[[Any], list[int]]) -> Asked:
    """Return what /v1/chat/completions is asked for. `encode` applies the model's chat template."""
    given = _known(body, CHAT)
    if "messages" not in given:
        raise APIError("messages is missing", "messages", "missing_required_parameter")
    asked = _common(given, model, is_chat=True)
    try:
        asked.prompts = [encode(_messages(given["messages"]))]
    except ValueError as error:
        raise APIError(str(error), "messages") from None
    return asked


def _known(body: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the fields that are not null. Raises APIError for one that is unknown or not supported."""
    for name, value in body.items():
        if name in NOT_SUPPORTED:
            if value is not None and value not in NOT_SUPPORTED[name]:
                raise APIError(f"{name} is not supported here; leave it out", name, "unsupported_parameter")
        elif name not in known and name not in IGNORED:
            raise APIError(f"unknown field {shown(name)}", str(name), "unknown_parameter")
    return {name: value for name, value in body.items() if name in known and value is not None}


def _common(given: dict[str, Any], model: str, is_chat: bool) -> Asked:
    name = given.get("model", model)
    if name != model:
        raise APIError.of_model(shown(name), model)
    stream = _flag(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "continuous_usage_stats"}:
        rule = "stream_options may have include_usage and continuous_usage_stats"
        raise APIError(f"{rule}, but is {shown(options)}", "stream_options")
    if "stream_options" in given and not stream:
        raise APIError("stream_options needs stream: true", "stream_options")
    priority = given.get("priority", 0)
    if not is_whole(priority, -(2**31), 2**31):
        raise APIError(f"priority must be a whole number, but is {shown(priority)}", "priority")
    salt = given.get("cache_salt", "")
    if not isinstance(salt, str):
        raise APIError(f"cache_salt must be text, but is {shown(salt)}", "cache_salt")
    usage = _flag(options, "include_usage")
    always = _flag(options, "continuous_usage_stats") and usage
    params = _sampling_params(given, is_chat)
    return Asked(name, [], params, is_chat, stream, usage, always, priority=priority, cache_salt=salt)


def _sampling_params(given: dict[str, Any], is_chat: bool) -> SamplingParams:
    chosen = {name: given[name] for name in SAMPLING if name in given}
    if is_chat:
        chosen["max_tokens"] = given.get("max_completion_tokens", given.get("max_tokens"))
    elif "max_tokens" in given:
        chosen["max_tokens"] = given["max_tokens"]
    if "logit_bias" in given:
        chosen["logit_bias"] = _logit_bias(given["logit_bias"])
    chosen["logprobs"] = _logprobs(given, is_chat)
    _number(given, "prompt_logprobs")
    chosen |= _response_format(given.get("response_format"))
    try:
        return SamplingParams(**chosen)
    except ValueError as error:
        raise refusal(error) from None


def refusal(error: ValueError) -> APIError:
    """Return the answer to what SamplingParams or the engine refuses: its message, and the field it names."""
    message = str(error)
    names = {one.name for one in fields(SamplingParams)}
    if message.startswith("request "):  # of the engine: the client does not know the id
        message = message.partition(": ")[2] or message
    first = message.split()[0].removesuffix("'s") if message.split() else ""
    if "the model's length" in message or "the pool" in message:
        return APIError(message, None, "context_length_exceeded")
    return APIError(message, first if first in names else None, "invalid_value")


def _logprobs(given: dict[str, Any], is_chat: bool) -> int | None:
    """Return how many alternatives are asked for: OpenAI has a number, and for chats a flag with a number."""
    if not is_chat:
        return _number(given, "logprobs") if "logprobs" in given else None
    wanted, top = _flag(given, "logprobs"), _number(given, "top_logprobs")
    if top and not wanted:
        raise APIError("top_logprobs needs logprobs: true", "top_logprobs")
    return top if wanted else None


def _number(given: dict[str, Any], name: str) -> int:
    if not is_whole(value := given.get(name, 0), 0, MAX_TOP_LOGPROBS):
        raise APIError(f"{name} must be from 0 to {MAX_TOP_LOGPROBS}, but is {shown(value)}", name)
    return int(value)


def _logit_bias(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise APIError(f"logit_bias must be an object of token ids, but is {shown(value)}", "logit_bias")
    try:
        return {int(token_id): bias for token_id, bias in value.items()}
    except ValueError:
        raise APIError(f"logit_bias has a key that is no token id: {shown([*value])}", "logit_bias") from None


def _response_format(value: Any) -> dict[str, Any]:
    """Return what a response_format makes of SamplingParams."""
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return {}
    if kind not in ("json_object", "json_schema"):
        rule = "response_format's type must be text, json_object or json_schema"
        raise APIError(f"{rule}, but it is {shown(value)}", "response_format")
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise APIError("response_format.json_schema.schema must be an object", "response_format")
    return {"structured_outputs": {"json": schema}}


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise APIError(f"{name} must be true or false, but is {shown(value)}", name)
    return value


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts: text, token ids, or a list of either."""
    rule = "prompt must be text, a list of texts, token ids, or lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise APIError(f"{rule}, but is {shown(value)}", "prompt")
    if all(is_whole(one) for one in value):
        return [value]
    are_ids = all(isinstance(one, list) and one and all(is_whole(i) for i in one) for one in value)
    if are_ids or all(isinstance(one, str) for one in value):
        return list(value)
    raise APIError(f"{rule}, but is {shown(value)}", "prompt")


def _messages(value: Any) -> Any:
    """Return the messages with contents as text: parts are joined, other kinds than text are refused."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages must be a list of at least one message, but is {shown(value)}")
    return [_message(number, one) for number, one in enumerate(value)]


def _message(number: int, message: Any) -> Any:
    name = f"messages[{number}]"
    if not isinstance(message, dict):
        raise ValueError(f"{name} must be an object, but is {shown(message)}")
    content = message.get("content")
    if isinstance(content, list):
        texts = [p for p in content if isinstance(p, dict) and p.get("type") == "text"]
        if len(texts) < len(content) or not all(isinstance(p.get("text"), str) for p in texts):
            raise ValueError(f"{name}: its content may have parts of text only, but is {shown(content)}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{name}: its content must be text, but is {shown(content)}")
    if extra := message.keys() - {"role", "content", "name"}:
        raise ValueError(f"{name} has {shown(min(extra))}, which is not supported here")
    return {"role": message.get("role"), "content": content}
